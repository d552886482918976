"""Build the site: all READMEs, and beside a chapter's README the diff of its script.

Here:  make site
"""

import argparse
import os
import shutil
from html import escape
from itertools import groupby, pairwise, zip_longest
from pathlib import Path
from urllib.parse import quote

import jinja2
import merman
import pygments
from markdown_it import MarkdownIt
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from chapters import ROOT, chapters, diff, parent_of, parts
from readme import readmes, slug

TEMPLATES = Path(__file__).with_suffix("")


# ---- READMEs ---------------------------------------------------------------------------------
def highlight(text, language, _attributes=""):
    """Return a text as HTML: code in colors, and a Mermaid diagram as a picture."""
    if language == "mermaid":
        drawn = quote(merman.Merman().render_svg(text, None))
        return f'<pre><img alt="{escape(text)}" src="data:image/svg+xml,{drawn}"></pre>'
    lexer = get_lexer_by_name(language or "text", stripnl=False)
    return pygments.highlight(text, lexer, HtmlFormatter(nowrap=True))


MARKDOWN = MarkdownIt("gfm-like", {"linkify": False, "highlight": highlight})


def page_path(path):
    """Return the path of a file's page on the site; a picture is its own page."""
    if path.name == "README.md":
        return path.relative_to(ROOT).with_name("index.html")
    if path.suffix in (".png", ".svg"):
        return path.relative_to(ROOT)
    suffix = ".html" if path.suffix == ".md" else f"{path.suffix}.html"
    return path.relative_to(ROOT).with_suffix(suffix)


def render(path):
    """Return the title and the HTML of a README, and the files that it links."""
    tokens, linked = MARKDOWN.parse(path.read_text()), set()
    for token, following in pairwise(tokens):
        if token.type == "heading_open":
            token.attrSet("id", slug(following.content))
        for piece in token.children or ():
            for name in {"href", "src"} & piece.attrs.keys():
                file, hash_sign, anchor = piece.attrs[name].partition("#")
                if file and "://" not in file:
                    target = (path.parent / file).resolve()
                    linked.add(target)
                    file = os.path.relpath(page_path(target), page_path(path).parent)
                    piece.attrSet(name, f"{file}{hash_sign}{anchor}")
    # A README begins with its title.
    title = next(token.content for token in tokens if token.type == "inline")
    return title.replace("`", ""), MARKDOWN.renderer.render(tokens, MARKDOWN.options, {}), linked


# ---- scripts ---------------------------------------------------------------------------------
def split_diff(chapter):
    """Yield the parts of a script in order, each with its name, its size and its rows."""
    paths = chapters().get(parent_of(chapter), Path(os.devnull)), chapters()[chapter]
    texts = [path.read_text() for path in paths]
    html = [highlight(text, "python").splitlines() for text in texts]
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
        yield {"name": name, "size": size, "rows": rows_of(lines, *html)}


def rows_of(lines, old_html, new_html):
    """Return the rows of a diff: the parent's line and the chapter's line, or None.

    A line has its mark, its number and its HTML.
    """
    rows = []
    for _, group in groupby(lines, key=lambda line: line[0] == " "):
        hunk = list(group)
        left = [(mark, old, old_html[old - 1]) for mark, _, old, _ in hunk if mark != "+"]
        right = [(mark, new, new_html[new - 1]) for mark, _, _, new in hunk if mark != "-"]
        rows += zip_longest(left, right)
    return rows


# ---- the command -----------------------------------------------------------------------------
def main():
    """Write all pages to a folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "site")
    output = parser.parse_args().output
    shutil.copytree(ROOT / "assets", output / "assets", ignore=shutil.ignore_patterns("*.txt"))
    shutil.copy(TEMPLATES / "site.css", output)
    template = jinja2.Template((TEMPLATES / "page.html").read_text(), trim_blocks=True)
    pages = {path: render(path) for path in readmes()}
    menu = {page_path(path): title for path, (title, *_) in pages.items()}
    names = {script.with_name("README.md"): name for name, script in chapters().items()}
    navigation = {page_path(path): name for path, name in names.items()}

    def write(path, **values):
        target = output / page_path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        root = "../" * (len(page_path(path).parts) - 1)
        target.write_text(template.render(root=root, menu=menu, navigation=navigation, **values))

    for path, (title, html, _) in pages.items():
        name = names.get(path)
        parts_of_diff = list(split_diff(name)) if name else []
        write(path, title=title, html=html, chapter=name, parts=parts_of_diff)
    for path in set().union(*(linked for *_, linked in pages.values())):
        if path.suffix not in (".md", ".png", ".svg"):
            text = "\n".join(sorted(os.listdir(path))) if path.is_dir() else path.read_text()
            write(path, title=path.relative_to(ROOT), html=f"<pre>{escape(text)}</pre>")
    print(f"open {output / 'index.html'}")


if __name__ == "__main__":
    main()
