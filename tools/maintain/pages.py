"""Build the site: READMEs, and beside each chapter's the diff of its script. Here: make site"""

import argparse
import functools
import json
import os
import re
import shutil
from difflib import SequenceMatcher
from html import escape, unescape
from itertools import accumulate, groupby, zip_longest
from pathlib import Path
from urllib.parse import quote

import jinja2
import merman
from markdown_it import MarkdownIt
from pygments.lexers import PythonLexer, TextLexer, find_lexer_class_for_filename
from pygments.token import STANDARD_TYPES

from chapters import ROOT, chapters, diff, parent_of, parts
from readme import readmes, slug

HERE = Path(__file__).with_suffix("")
MARKDOWN = MarkdownIt("gfm-like", {"linkify": False})
# The colours of tokens, by Pygments' short name of their type or by its first letter.
KINDS = {"ow": "k", "nb": "k", "nf": "f", "nc": "f", "nd": "f"} | {kind: kind for kind in "cksm"}


# ---- scripts ---------------------------------------------------------------------------------


def highlight(text, lexer=PythonLexer):
    """Return the lines of a text, each a list of (colour, letter)."""
    lines = [[]]
    for token, value in lexer(stripnl=False).get_tokens(text):
        short = STANDARD_TYPES.get(token, "")
        kind = KINDS.get(short) or KINDS.get(short[:1], "")
        for letter in value:
            lines.append([]) if letter == "\n" else lines[-1].append((kind, letter))
    return lines[:-1]


def html_of(line, changed=()):
    """Return a line of `highlight` as HTML, with the letters marked whose positions are given."""
    html, letters = "", [(kind, n in changed, letter) for n, (kind, letter) in enumerate(line)]
    for (kind, marked), group in groupby(letters, key=lambda letter: letter[:2]):
        text = escape("".join(letter for *_, letter in group), quote=False)
        text = f"<mark>{text}</mark>" if marked else text
        html += f"<i {kind}>{text}</i>" if kind else text
    return html


def align(removed, added):
    """Yield the rows of a hunk as pairs of numbers: lines that begin alike are in the same row."""
    starts = [[re.match(r"\W*\w*", line)[0] for line in side] for side in (removed, added)]
    for _, a, b, c, d in SequenceMatcher(None, *starts, autojunk=False).get_opcodes():
        yield from zip_longest(range(a, b), range(c, d))


def changes(before, after):
    """Return the positions of the letters that differ in each of two lines, if most are equal."""
    words = [re.findall(r"\w+|\s+|.", line) for line in (before, after)]
    ends = [[0, *accumulate(map(len, side))] for side in words]
    matcher = SequenceMatcher(None, *words, autojunk=False)
    spans = [s for kind, *s in matcher.get_opcodes() if kind != "equal" and matcher.ratio() > 0.6]
    old = {n for a, b, *_ in spans for n in range(ends[0][a], ends[0][b])}
    return old, {n for *_, c, d in spans for n in range(ends[1][c], ends[1][d])}


def sides(chapter):
    """Return the paths of the two scripts that a chapter's diff compares."""
    return chapters().get(parent_of(chapter), Path(os.devnull)), chapters()[chapter]


@functools.cache
def origins(chapter):
    """Return for each line of a script the number of the chapter that brought it."""
    kept = origins(parent_of(chapter)) if parent_of(chapter) else []
    lines = [line for line in diff(*sides(chapter)) if line[0] != "-"]
    own = list(chapters()).index(chapter)
    return [own if mark == "+" else kept[old - 1] for mark, _, old, _ in lines]


def run_of(lines, colours, origin):
    """Return the HTML of lines of one origin: if they are unchanged, only of the right side."""
    old, new, same = ([line for line in lines if line[0] == mark] for mark in "-+ ")
    html = "".join(f"<span>{html_of(colours[1][line[3] - 1])}</span>" for line in same)
    after, texts = "", [[line[1] for line in side] for side in (old, new)]
    for row, (a, b) in enumerate(align(*texts), 1):
        marks = changes(texts[0][a], texts[1][b]) if None not in (a, b) else ((), ())
        if a is not None:
            html += f"<del style=--r:{row}>{html_of(colours[0][old[a][2] - 1], marks[0])}</del>"
        if b is not None:
            after += f"<ins style=--r:{row}>{html_of(colours[1][new[b][3] - 1], marks[1])}</ins>"
    mark, _, o, n = lines[0]
    start = f"counter-set:o {o - (mark != '+')} n {n - (mark != '-')}"
    return f'<div style="--b:{origin};{start}">{html}{after}</div>'


def script_of(chapter):
    """Return the parts of a script in order, each with the HTML of its diff."""
    texts = [path.read_text() for path in sides(chapter)]
    colours, found = [highlight(text) for text in texts], []
    old, new = ({n: name for name, span in parts(text).items() for n in span} for text in texts)

    def part(line):
        return old.get(line[2], "") if line[0] == "-" else new.get(line[3], "")

    own, origin = list(chapters()).index(chapter), origins(chapter)
    for name, group in groupby(diff(*sides(chapter)), key=part):
        lines = list(group)
        runs = groupby(lines, key=lambda line: origin[line[3] - 1] if line[0] == " " else own)
        html = "".join(run_of(list(run), colours, brought) for brought, run in runs)
        plus, minus = (sum(line[0] == mark for line in lines) for mark in "+-")
        size = f"+{plus} −{minus}" if plus + minus else f"{len(lines)} lines"
        id_ = f"f-{name}" if name and name not in [part["name"] for part in found] else ""
        found.append(dict(name=name, html=html, size=size, changed=plus + minus, id=id_))
    return found


# ---- READMEs ---------------------------------------------------------------------------------


def place_of(path):
    """Return the path of a file's page on the site; of a picture, that of its copy."""
    if path.name == "README.md" or path in chapters().values():
        return path.relative_to(ROOT).with_name("index.html")
    suffix = {".png": ".png", ".md": ".html"}.get(path.suffix, f"{path.suffix}.html")
    return path.relative_to(ROOT).with_suffix(suffix)


@functools.cache
def glossary():
    """Return anchor and meaning of the glossary's terms and, in backticks, its symbols."""
    text, found = (ROOT / "docs/glossary.md").read_text(), {}
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    for names, meaning in re.findall(r"^\*\*(.+?)\.\*\* (.+?)\n(?:\n|\Z)", text, re.M | re.S):
        words = escape(re.sub("[`*]", "", meaning).replace("\n", " "))
        found |= {name.lower(): (slug(names), words) for name in names.split(" and ")}
    for name, meaning in re.findall(r"^\| (`\w`) \| (.+) \|$", text, re.M):
        found[name] = "symbols", f"the number of {meaning.replace('`', '')}"
    return found


class Page:
    """A README as HTML; `parts` are those of the script beside it."""

    def __init__(self, path, parts):
        self.path, self.names = path, {part["name"] for part in parts} - {""}
        self.linked, self.seen = set(), set()
        tokens = MARKDOWN.parse(path.read_text())
        for n, token in enumerate(tokens):
            if token.type == "heading_open":
                token.attrSet("id", slug(tokens[n + 1].content))
            elif token.type == "inline":
                self.inline(token.children)
            elif token.type == "fence":
                token.type, token.content = "html_block", self.block(token.info, token.content)
        html = MARKDOWN.renderer.render(tokens, MARKDOWN.options, {})
        html = html.replace("<table>", "<div class=scroll tabindex=0><table>")
        self.html = html.replace("</table>", "</table></div>")

    def sections(self):
        """Return anchor, title and text of each section."""
        # The script beside the README has these lines, too.
        html = re.sub("<pre class=diff>.*?</pre>", "", self.html, flags=re.S)
        found = re.findall(r'<h\d id="(.*?)">(.*?)</h\d>(.*?)(?=<h\d |\Z)', html, re.S)
        return [(anchor, *map(plain, texts)) for anchor, *texts in found]

    def link(self, target):
        """Return the target of a link on the site."""
        file, _, anchor = target.partition("#")
        if "://" in file or not file:
            return target
        path = (self.path.parent / file).resolve()
        self.linked.add(path)
        anchor = "script" if path in chapters().values() else anchor
        target = os.path.relpath(place_of(path), place_of(self.path).parent)
        return f"{target}#{anchor}" if anchor else target

    def inline(self, pieces):
        """Make links of a paragraph lead somewhere, and names and terms links."""
        linked, words = False, "|".join(sorted(glossary(), key=len, reverse=True))
        for n, piece in enumerate(pieces):
            linked = piece.type == "link_open" or (linked and piece.type != "link_close")
            for name in {"href", "src"} & set(piece.attrs):
                piece.attrSet(name, self.link(piece.attrs[name]))
            if piece.type == "strong_open" and self.path.name == "glossary.md":
                piece.attrSet("id", slug(pieces[n + 1].content.rstrip(".")))
            html = ""
            if piece.type == "code_inline" and not linked:
                html = self.name(f"`{piece.content}`", f"<code>{escape(piece.content)}</code>")
            elif piece.type == "text" and not linked:
                pieces_of_text = re.split(rf"(?i)\b({words})(?=s?\b)(?!-)", piece.content)
                html = "".join(self.name(word.lower(), escape(word)) for word in pieces_of_text)
            if html:
                piece.type, piece.content = "html_inline", html

    def name(self, name, html):
        """Return a name as a link: to that part of the script, or once to the glossary's term."""
        part, file = name.strip("`"), os.path.relpath(ROOT / "docs/glossary.md", self.path.parent)
        if "`" in name and part in self.names:
            anchor = f"id=m-{part}" if f"m-{part}" not in self.seen else ""
            self.seen.add(f"m-{part}")
            return f'<a {anchor} href="#f-{part}">{html}</a>'
        if name in self.seen or name not in glossary() or self.path.name == "glossary.md":
            return html
        self.seen.add(name)
        anchor, meaning = glossary()[name]
        link = self.link(f"{file}#{anchor}")
        return f'<a class=term href="{link}" aria-description="{meaning}">{html}</a>'

    def block(self, kind, text):
        """Return a fenced block as HTML."""
        if kind == "mermaid":
            drawn = quote(merman.Merman().render_svg(text, None))
            return f'<img alt="{escape(text)}" src="data:image/svg+xml,{drawn}">'
        if kind != "diff":
            return source_html(text, f"x.{kind}")
        html, code = "", highlight(re.sub("(?m)^.", "", text))
        for line, colours in zip(text.splitlines(), code, strict=True):
            tag = {"+": "ins", "-": "del", "@": "b"}.get(line[:1], "span")
            name = re.match(r"@@ (\w+)|", line)[1]
            html += f"<{tag}>{self.name(f'`{name}`', line) if name else html_of(colours)}</{tag}>"
        return f"<pre class=diff>{html}</pre>"


def plain(html):
    """Return HTML as text, without spaces where a word is only part of a link or coloured."""
    html = re.sub(r"</?(?:a|i|code|em|mark|strong)\b[^>]*>", "", html)
    return " ".join(unescape(re.sub("<[^>]*>", " ", html)).split())


def source_html(text, name):
    """Return the text of a file as HTML, in the colours that its name calls for."""
    lexer = find_lexer_class_for_filename(name) or TextLexer
    return f"<pre>{chr(10).join(map(html_of, highlight(text, lexer)))}</pre>"


# ---- pages -----------------------------------------------------------------------------------


def main():
    """Write all pages to a folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "site")
    output = parser.parse_args().output
    copy = functools.partial(shutil.copytree, dirs_exist_ok=True)
    copy(HERE, output, ignore=shutil.ignore_patterns("page.html"))
    copy(ROOT / "assets", output / "assets", ignore=shutil.ignore_patterns("*.txt"))
    template = jinja2.Template((HERE / "page.html").read_text(), trim_blocks=True)
    names = {script.with_name("README.md"): name for name, script in chapters().items()}
    scripts = {path: script_of(name) for path, name in names.items()}
    pages = {path: Page(path, scripts.get(path, ())) for path in readmes()}
    titles = {place_of(path): page.sections()[0][1] for path, page in pages.items()}
    chapter_pages = {place_of(path): name for path, name in names.items()}
    index = []

    def write(page_path, **values):
        (output / page_path).parent.mkdir(parents=True, exist_ok=True)
        root = "../" * (len(page_path.parts) - 1)
        html = template.render(root=root, names=chapter_pages, menu=titles, **values)
        (output / page_path).write_text(html)

    for path, page in pages.items():
        page_path, name, parts = place_of(path), names.get(path), scripts.get(path, ())
        values = {"title": titles[page_path], "chapter": name, "page": page, "parts": parts}
        if name:
            values |= {"parent": parent_of(name), "origins": origins(name)}
        write(page_path, **values)
        index += [
            [f"{page_path}#{anchor}", titles[page_path], *texts]
            for anchor, *texts in page.sections()
        ]
        for part in (part for part in parts if part["id"] and part["changed"]):
            added = plain(" ".join(re.findall("<ins.*?</ins>", part["html"])))
            index.append([f"{page_path}#{part['id']}", titles[page_path], part["name"], added])
    for path in set().union(*(page.linked for page in pages.values())):
        if path.suffix not in (".md", ".png") and path not in chapters().values():
            text = "\n".join(sorted(os.listdir(path))) if path.is_dir() else path.read_text()
            source = f"<pre>{escape(text, quote=False)}</pre>"
            write(place_of(path), title=str(path.relative_to(ROOT)), source=source)
    (output / "search.js").write_text(f"INDEX = {json.dumps(index, ensure_ascii=False)}")
    print(f"open {output / 'index.html'}")


if __name__ == "__main__":
    main()
