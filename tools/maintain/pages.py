"""Build the site with Sphinx: all READMEs, and for each chapter a page beside its script's diff.

Here:  make site
"""

import argparse
import os
import re
import shutil
import tempfile
from html import escape
from itertools import groupby, zip_longest
from pathlib import Path

import jinja2
import pygments
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sphinx.cmd.build import main as sphinx

from chapters import ROOT, chapters, diff, parent_of, parts
from planner_form import planner_script
from readme import readmes

SITE = Path(__file__).with_name("site")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
PICTURE = re.compile(r"(!\[[^]]*\]\(\S+)\.svg\)")
ANCHOR = re.compile(r'<a id="([\w-]+)"></a>')
# Pages drop the tags of names, operators and punctuation, because these words get no color.
PLAIN = re.compile(r'<span class="(?:n|o|p|w)">(.*?)</span>')
# Pages drop quotes around class names, because HTML needs them only if a slash follows.
QUOTED = re.compile(r'(<[a-z][^<>]* class=)"([\w-]+)"(?=[\s>])')
# The theme puts these icons into all pages, for links to the source that the site does not have.
UNUSED = re.compile(r'<symbol id="svg-(?:pencil|eye)".*?</symbol>', re.S)
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.M | re.S)
# The sidebar has these parts, in the order of reading. A page is in the first part that has a
# matching pattern.
SIDEBAR = {
    "Chapters": "0*/*",
    "Around the chapters": "preparing-data/* fine-tuning/* diagnosing-errors/* tools/*/*",
    "Questions and choices": "docs/*",
    "More": "alternative-frameworks/* related-topics/* benchmarks/*",
    "About": "*",
}


# ---- sources for Sphinx ----------------------------------------------------------------------
def stage_readme(path, stage):
    """Write a README as MyST reads it, and return the other files that the README links.

    A link to a script becomes a link to the page with its diff.
    """
    linked = set()

    def to_page(match):
        target = (path.parent / match[1]).resolve()
        if target.suffix in (".md", ".png", ".svg"):
            return match[0]
        if target in chapters().values():
            return f"]({os.path.relpath(target.with_name('diff.md'), path.parent)}"
        linked.add(target)
        # conf.py makes a URL of the part after the colon.
        return f"](source:{match[1].rstrip('/')}.txt"

    pieces = FENCED.split(path.read_text())
    for index in range(0, len(pieces), 2):
        pieces[index] = ANCHOR.sub(r"[]{#\1}", LINK.sub(to_page, pieces[index]))
        # Furo shows an element of one of these classes only in this theme.
        pictures = r"\1-light.svg){.only-light}\1-dark.svg){.only-dark}"
        pieces[index] = PICTURE.sub(pictures, pieces[index])
    write(stage / path.relative_to(ROOT), "".join(pieces))
    return linked


def stage_pictures(stage):
    """Write each picture in a light and in a dark form, which do not depend on the system."""
    for path in (ROOT / "assets").glob("*.svg"):
        for theme, media in (("light", "not all"), ("dark", "all")):
            text = path.read_text().replace("(prefers-color-scheme: dark)", media)
            write(stage / "assets" / f"{path.stem}-{theme}.svg", text)


def stage_source(path, stage):
    """Copy a file as text, which every browser shows; for a folder, write the names in it."""
    text = "\n".join(sorted(os.listdir(path))) if path.is_dir() else path.read_text()
    write(stage / "files" / f"{path.relative_to(ROOT)}.txt", text)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# ---- a chapter beside its diff ---------------------------------------------------------------
def stage_step(chapter, stage):
    """Write the page that shows a chapter's README on the left and its script's diff on the right.

    A link below the README's title leads to this page.
    """
    template = jinja2.Template((SITE / "step.html").read_text(), trim_blocks=True)
    script = template.render(parts=list(split_diff(chapter)), first=not parent_of(chapter))
    folder = stage / chapters()[chapter].parent.relative_to(ROOT)
    page = f"""---
orphan: true
hide-toc: true
nosearch: true
---
```{{raw}} html
<div class="step"><div class="read">
```
```{{include}} README.md
```
```{{raw}} html
</div>
{script}
</div>
```
"""
    write(folder / "diff.md", page)
    title, text = (folder / "README.md").read_text().split("\n", 1)
    link = "[Read this page beside its diff](diff.md)"
    write(folder / "README.md", f"{title}\n\n{link}\n{text}")


def split_diff(chapter):
    """Yield the parts of a script in order, each with its name, its size and its rows.

    If a part has not changed, `same` is its text.
    """
    paths = chapters().get(parent_of(chapter), Path(os.devnull)), chapters()[chapter]
    texts = [path.read_text() for path in paths]
    lexer, formatter = PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)
    html = [
        PLAIN.sub(r"\1", pygments.highlight(text, lexer, formatter)).splitlines() for text in texts
    ]
    old_names, new_names = (
        {number: name for name, numbers in parts(text).items() for number in numbers}
        for text in texts
    )

    def part_of(line):
        mark, _, old, new = line
        return old_names.get(old, "") if mark == "-" else new_names.get(new, "")

    for name, group in groupby(diff(*paths), key=part_of):
        lines = list(group)
        marks = [mark for mark, *_ in lines]
        added, removed = marks.count("+"), marks.count("-")
        size = f"+{added} −{removed}" if added or removed else ""
        same = "" if size else escape("\n".join(line for _, line, *_ in lines))
        yield {"name": name, "size": size, "same": same, "rows": rows_of(lines, *html)}


def rows_of(lines, old_html, new_html):
    """Return the rows of a diff, as pairs of the parent's line and the chapter's line.

    A line has its mark, its number and its HTML; None stands for a missing line.
    """
    rows = []
    for _, group in groupby(lines, key=lambda line: line[0] == " "):
        hunk = list(group)
        left = [(mark, old, old_html[old - 1]) for mark, _, old, _ in hunk if mark != "+"]
        right = [(mark, new, new_html[new - 1]) for mark, _, _, new in hunk if mark != "-"]
        rows += zip_longest(left, right)
    return rows


# ---- the planner's form ----------------------------------------------------------------------
def stage_form(stage):
    """Write the planner's form into its page, and the script that computes the layouts."""
    page, form = stage / "tools/planner/form.md", (SITE / "planner/form.html").read_text()
    empty = '<div id="planner-form"></div>'
    write(page, page.read_text().replace(empty, f"```{{raw}} html\n{form}```"))
    write(stage / "static/planner.js", planner_script())


# ---- the command -----------------------------------------------------------------------------
def home_of(page, pages):
    """Return the README that is nearest above a page, or None for the top page."""
    folders = page.parents[1:] if page.name == "README.md" else page.parents
    return next((folder / "README.md" for folder in folders if folder / "README.md" in pages), None)


def add_sidebar(pages, stage):
    """Add to each README the table of the pages below it, which Sphinx shows as the sidebar."""
    top = Path("README.md")
    below = {page: [other for other in pages if home_of(other, pages) == page] for page in pages}
    for title, patterns in SIDEBAR.items():
        found = [page for page in below[top] if any(map(page.match, patterns.split()))]
        below[top] = [page for page in below[top] if page not in found]
        add_table(stage / top, found, f":caption: {title}\n")
    for page in pages:
        add_table(stage / page, below[page])


def add_table(path, pages, caption=""):
    names = "\n".join(f"/{page}" for page in pages)
    if pages:
        with open(path, "a") as page:
            page.write(f"\n```{{toctree}}\n:hidden:\n{caption}\n{names}\n```\n")


def shrink(output):
    """Delete the maps of minified files, and the characters that a browser does not need."""
    for path in output.glob("_static/**/*.map"):
        path.unlink()
    for page in output.glob("**/*.html"):
        pieces = re.split("(<pre.*?</pre>)", page.read_text(), flags=re.S)
        pieces[::2] = [re.sub(r"\n\s+", "\n", piece) for piece in pieces[::2]]
        page.write_text(QUOTED.sub(r"\1\2", UNUSED.sub("", "".join(pieces))))


def main():
    """Write the sources of all pages to a temporary folder, and build the site from them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "site")
    output = parser.parse_args().output
    with tempfile.TemporaryDirectory() as name:
        stage = Path(name)
        shutil.copytree(ROOT / "assets", stage / "assets", ignore=shutil.ignore_patterns("*.txt"))
        stage_pictures(stage)
        shutil.copytree(SITE, stage, dirs_exist_ok=True)
        linked = set().union(*(stage_readme(path, stage) for path in readmes()))
        for path in linked:
            stage_source(path, stage)
        for chapter in chapters():
            stage_step(chapter, stage)
        stage_form(stage)
        add_sidebar([path.relative_to(ROOT) for path in readmes()], stage)
        status = sphinx(["-q", "-W", "-b", "html", "-d", f"{name}.trees", str(stage), str(output)])
    shrink(output)
    shutil.copy(output / "README.html", output / "index.html")
    print(f"open {output / 'index.html'}")
    raise SystemExit(status)


if __name__ == "__main__":
    main()
