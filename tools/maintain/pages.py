"""Build the site with Sphinx: all READMEs, and for each chapter a page beside its script's diff.

Here:  make site
"""

import argparse
import difflib
import os
import re
import shutil
import tempfile
from html import escape
from itertools import groupby, pairwise
from pathlib import Path

import jinja2
import pygments
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sphinx.cmd.build import main as sphinx

from chapters import ROOT, chapters, diff_by_part, parent_of
from planner_form import planner_script
from readme import readmes

SITE = Path(__file__).with_name("site")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
PICTURE = re.compile(r"(!\[[^]]*\]\(\S+)\.svg\)")
ANCHOR = re.compile(r'<a id="([\w-]+)"></a>')
# Match the tags around names, operators, punctuation and spaces. split_diff() removes these tags,
# because the site has no color for the text inside.
PLAIN = re.compile(r'<span class="(?:n|nn|o|p|w)">(.*?)</span>')
# Match a class attribute with a single name. shrink() removes the quotes around the name, because
# HTML needs these quotes only if a slash follows.
QUOTED = re.compile(r'(<[a-z][^<>]* class=)"([\w-]+)"(?=[\s>])')
HUNK = re.compile(r'<span class="gu">@@ \w+(?:, further down)? @@</span>')
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.M | re.S)
# The sidebar has these parts, in the order of reading. A page directly below the top page is in the
# first part that has a pattern for the page's path.
SIDEBAR = {
    "Chapters": "0*/*",
    "Around the chapters": "preparing-data/* fine-tuning/* diagnosing-errors/* tools/*/*",
    "Questions and choices": "docs/*",
    "More": "alternative-frameworks/* related-topics/* benchmarks/*",
    "About": "*",
}


# ---- sources for Sphinx ----------------------------------------------------------------------
def stage_readme(path, stage):
    """Write a README to `stage` in MyST's syntax, and return the paths of all linked source files.

    Folders count as source files. A link to a chapter's script becomes a link to the page with the
    script's diff.
    """
    linked = set()

    def to_page(match):
        target = (path.parent / match[1]).resolve()
        if target.suffix in (".md", ".png", ".svg"):
            return match[0]
        if target in chapters().values():
            return f"]({os.path.relpath(target.with_name('diff.md'), path.parent)}"
        linked.add(target)
        # The setting myst_url_schemes in conf.py turns this link into a URL, which is the part
        # after the colon.
        return f"](source:{match[1].rstrip('/')}.txt"

    pieces = FENCED.split(path.read_text())
    for index in range(0, len(pieces), 2):
        pieces[index] = ANCHOR.sub(r"[]{#\1}", LINK.sub(to_page, pieces[index]))
        # Furo shows an element of the class only-light only in the light theme, and an element of
        # the class only-dark only in the dark theme.
        pictures = r"\1-light.svg){.only-light}\1-dark.svg){.only-dark}"
        pieces[index] = PICTURE.sub(pictures, pieces[index])
    write(stage / path.relative_to(ROOT), "".join(pieces))
    return linked


def stage_pictures(stage):
    """Write two versions of each picture, light and dark, that ignore the system's color theme."""
    for path in (ROOT / "assets").glob("*.svg"):
        for theme, media in (("light", "not all"), ("dark", "all")):
            text = path.read_text().replace("(prefers-color-scheme: dark)", media)
            write(stage / "assets" / f"{path.stem}-{theme}.svg", text)


def stage_source(path, stage):
    """Copy a file as text, which every browser shows; for a folder, write a list of its files."""
    text = "\n".join(sorted(os.listdir(path))) if path.is_dir() else path.read_text()
    write(stage / "files" / f"{path.relative_to(ROOT)}.txt", text)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# ---- a chapter beside its diff ---------------------------------------------------------------
def stage_step(chapter, stage):
    """Write the page that shows a chapter's README on the left, and the script's diff on the right.

    Below the README's title, add a link to this page. Return the anchors of the hunks that the
    README shows, in the order of the README.
    """
    folder = stage / chapters()[chapter].parent.relative_to(ROOT)
    readme = (folder / "README.md").read_text()
    found, kind = list(split_diff(chapter)), "diff" if parent_of(chapter) else "script"
    targets = find_shown_hunks(readme, found)
    template = jinja2.Template((SITE / "step.jinja").read_text(), trim_blocks=True)
    path, parent = chapters()[chapter].relative_to(ROOT), parent_of(chapter)
    neighbors = {
        name: os.path.relpath(other.with_name("diff.html"), chapters()[chapter].parent)
        for name, other in chapters().items()
        if name == parent or parent_of(name) == chapter
    }
    page = template.render(path=path, parts=found, parent=parent, neighbors=neighbors, kind=kind)
    write(folder / "diff.md", page)
    title, text = readme.split("\n", 1)
    link = f"[Read this page beside its {kind}](diff.md)"
    write(folder / "README.md", f"{title}\n\n{link}\n{text}")
    return targets


def split_diff(chapter):
    """Yield a dictionary for each part of a chapter's script, in the order of the script.

    Each dictionary has the part's name, the numbers of added and removed lines, and the blocks of
    lines. If the part is the same as in the parent chapter, "same" is the text of the part.
    """
    parent = parent_of(chapter)
    paths = chapters().get(parent, Path(os.devnull)), chapters()[chapter]
    texts = [path.read_text() for path in paths]
    lexer, formatter = PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)
    html = [
        PLAIN.sub(r"\1", pygments.highlight(text, lexer, formatter)).splitlines() for text in texts
    ]
    for name, lines in diff_by_part(*paths).items():
        changed = [line for line in lines if line[0] != " "]
        # Skip the lines between parts, unless a comment has changed.
        if isinstance(name, int) and name and not any(line[1].strip() for line in changed):
            continue
        added = sum(mark == "+" for mark, *_ in changed)
        yield {
            "name": {0: "docstring and imports"}.get(name, name if isinstance(name, str) else ""),
            "id": f"script-{name}",
            "added": added,
            "removed": len(changed) - added,
            "same": "" if changed else escape("\n".join(line for _, line, *_ in lines)),
            "blocks": blocks_of(lines, *html, is_new=not parent),
        }


def blocks_of(lines, old_html, new_html, is_new):
    """Return the blocks of a part: its hunks, and the unchanged lines around the hunks.

    A fold hides two or more neighboring lines that are all more than three lines away from a hunk.
    A part without a hunk has no fold. If the script `is_new`, the part has no hunk, and all its
    lines form one block.
    """
    blocks = []
    runs = [list(run) for _, run in groupby(lines, key=lambda line: line[0] == " " or is_new)]
    for run in runs:
        if run[0][0] != " " and not is_new:
            blocks.append(hunk_of(run, old_html, new_html))
            continue
        first = 0 if run is runs[0] else 3
        last = len(run) if run is runs[-1] else len(run) - 3
        folds = last - first > 1 and len(runs) > 1
        for start, stop in pairwise([0, first, last, len(run)] if folds else [0, len(run)]):
            if shown := run[start:stop]:
                html = [new_html[new - 1] for *_, new in shown]
                folded = folds and start == first
                blocks.append({"same": html, "start": shown[0][2:], "folded": folded})
    return blocks


def hunk_of(lines, old_html, new_html):
    """Return a hunk as a dictionary: the HTML of its old lines as "old", of its new lines as "new".

    "start" has the number of the first old line and of the first new line, or 0 if there is no such
    line. "text" is the set of these lines without HTML, each after its mark + or -.
    """
    before, after = ([line for line in lines if line[0] == mark] for mark in "-+")
    marks = changed_words([line[1] for line in before], [line[1] for line in after])
    pairs = zip(before, marks["-"], strict=True), zip(after, marks["+"], strict=True)
    return {
        "old": [mark_words(old_html[line[2] - 1], mark) for line, mark in pairs[0]],
        "new": [mark_words(new_html[line[3] - 1], mark) for line, mark in pairs[1]],
        "start": [before[0][2] if before else 0, after[0][3] if after else 0],
        "text": {(mark + line).strip() for mark, line, *_ in lines},
        "shown_in": {},
    }


def changed_words(before, after):
    """Return the marks of each old line of a hunk under the key "-", of each new line under "+".

    The marks of a line are a list with a boolean for each character: whether the character is part
    of a changed word. Only a line that resembles a line on the opposite side of the hunk has
    changed words.
    """
    found = {"-": [], "+": []}
    for line, below in pairwise([*difflib.ndiff(before, after), ""]):
        # If ndiff marks changed characters of a line, the next line begins with "?" and has a sign
        # below each changed character.
        signs = below[2:] if below.startswith("?") else ""
        words = re.finditer(r"\w+|\W", line[2:])
        marks = [bool(signs[word.start() : word.end()].strip()) for word in words for _ in word[0]]
        for side in {" ": "-+", "?": ""}.get(line[0], line[0]):
            found[side].append(marks)
    return found


def mark_words(html, marks):
    """Return a line's HTML with <mark> around the characters whose value in `marks` is true."""
    marks = iter(marks)

    def mark(match):
        groups = groupby(re.findall(r"&[^;]+;|.", match[0]), key=lambda _: next(marks))
        texts = ((is_marked, "".join(group)) for is_marked, group in groups)
        return "".join(f"<mark>{text}</mark>" if is_marked else text for is_marked, text in texts)

    return re.sub(r"(?<![^>])[^<]+", mark, html)


def find_shown_hunks(readme, found):
    """Give each hunk an anchor, and return the anchors of the hunks that a README shows.

    Store in each shown hunk the titles of the README's sections that show the hunk.
    """
    hunks = {}
    for part in found:
        hunks[part["name"]] = [block for block in part["blocks"] if "text" in block]
        for number, block in enumerate(hunks[part["name"]], 1):
            block["id"] = f"{part['id']}-{number}"
    targets, title = [], ""
    for match in re.finditer(r"^##+ (.*)|^ *@@ (\w+).* @@\n((?: *[-+ ].*\n)+)", readme, re.M):
        title = match[1] or title
        if match[2]:
            line = next(line.strip() for line in match[3].splitlines() if line.strip()[0] in "+-")
            hunk = next(hunk for hunk in hunks[match[2]] if line in hunk["text"])
            hunk["shown_in"].setdefault(title.replace("`", ""), len(targets))
            targets.append(hunk["id"])
    return targets


def link_hunks(page, script, targets):
    """Turn the header of each hunk on a page into a link to the same hunk in the page `script`.

    If `script` is empty, link to the hunk on `page` itself. `targets` has the anchors of the hunks,
    in the order of the page.
    """
    numbered = enumerate(targets)

    def link(match):
        number, target = next(numbered)
        return f'<a id="shown-{number}" href="{script}#{target}">{match[0]}</a>'

    page.write_text(HUNK.sub(link, page.read_text()))


# ---- the planner's form ----------------------------------------------------------------------
def stage_form(stage):
    """Write the planner's form into tools/planner/form.md, and its script to static/planner.js."""
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
    """Add a table of contents to each page that has pages below it, for Sphinx's sidebar."""
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
    """Delete files and characters of the built site that a browser does not need."""
    for path in [*output.glob("_static/**/*.map"), output / "_static/searchtools.js"]:
        path.unlink()
    for page in output.glob("**/*.html"):
        pieces = re.split("(<pre.*?</pre>)", page.read_text(), flags=re.S)
        pieces[::2] = [re.sub(r"\n\s+", "\n", piece) for piece in pieces[::2]]
        text = "".join(pieces).replace('class="reference internal"', "class=reference")
        text = text.replace('class="docutils literal notranslate"', "class=literal")
        # Remove the span around code that is a single word. The span would keep the word on one
        # line, but site.css does this for code without a span.
        text = re.sub(
            r'(<code class=literal>)<span class="pre">([^<]*)</span></code>', r"\1\2</code>", text
        )
        # Remove the end tags of list items, table rows and table cells, because HTML does not
        # require them.
        text = re.sub(r"</(?:li|t[dhr])>\s*", "", text)
        # Remove the role `heading`, because a screen reader also needs the level of the heading,
        # which Sphinx omits.
        text = text.replace(' role="heading"', "")
        page.write_text(QUOTED.sub(r"\1\2", text))


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
        shown = {chapter: stage_step(chapter, stage) for chapter in chapters()}
        stage_form(stage)
        add_sidebar([path.relative_to(ROOT) for path in readmes()], stage)
        status = sphinx(["-q", "-W", "-b", "html", "-d", f"{name}.trees", str(stage), str(output)])
    for chapter, targets in shown.items():
        folder = output / chapters()[chapter].parent.relative_to(ROOT)
        link_hunks(folder / "README.html", "diff.html", targets)
        link_hunks(folder / "diff.html", "", targets)
    shrink(output)
    shutil.copy(output / "README.html", output / "index.html")
    print(f"open {output / 'index.html'}")
    raise SystemExit(status)


if __name__ == "__main__":
    main()
