"""Build the site: all READMEs, and beside each chapter's the diff of its script.

Here:  make site
       python tools/maintain/pages.py --output /tmp/site --no-plans    faster: no planner's table
"""

import argparse
import functools
import importlib
import json
import os
import re
import shutil
import sys
import warnings
from difflib import SequenceMatcher
from html import escape
from itertools import accumulate, groupby, product, zip_longest
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
NODES = 1, 2, 4, 8, 16, 32, 64  # of eight GPUs each
MARKDOWN = MarkdownIt("gfm-like", {"linkify": False})
# The colours of tokens, by Pygments' short name of their type or by its first letter.
KINDS = {
    "c": "c",
    "s": "s",
    "m": "m",
    "k": "k",
    "ow": "k",
    "nb": "k",
    "nf": "f",
    "nc": "f",
    "nd": "f",
}


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
        html += f"<i class={kind}>{text}</i>" if kind else text
    return html


@functools.cache
def compare(before, after):
    """Return how alike two lines are and, if they are, the positions at which each differs."""
    words = [re.findall(r"\w+|\s+|.", line) for line in (before, after)]
    ends = [[0, *accumulate(map(len, side))] for side in words]
    matcher = SequenceMatcher(None, *words, autojunk=False)
    found = [], []
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind != "equal" and matcher.ratio() > 0.6:
            found[0].extend(range(ends[0][a], ends[0][b]))
            found[1].extend(range(ends[1][c], ends[1][d]))
    return matcher.ratio(), *found


def align(removed, added):
    """Yield the rows of a hunk as pairs of numbers: each line beside the one most like it."""
    pairs, done = [], (0, 0)
    for old, line in enumerate(removed):
        free = range(pairs[-1][1] + 1 if pairs else 0, len(added))
        likeness, new = max(((compare(line, added[n])[0], -n) for n in free), default=(0, 0))
        pairs += [(old, -new)] if likeness > 0.6 else []
    for pair in [*pairs, (len(removed), len(added))]:
        yield from zip_longest(*map(range, done, pair))
        yield from [pair] if pair in pairs else []
        done = pair[0] + 1, pair[1] + 1


@functools.cache
def compared(chapter):
    """Return the lines of a chapter's diff against its parent; a first chapter changes nothing."""
    script, parent = chapters()[chapter], parent_of(chapter)
    lines = enumerate(script.read_text().splitlines(), 1)
    return diff(chapters()[parent], script) if parent else [(" ", line, n, n) for n, line in lines]


@functools.cache
def origins(chapter):
    """Return for each line of a script the number of the chapter that brought it."""
    parent, lines = parent_of(chapter), [line for line in compared(chapter) if line[0] != "-"]
    own = list(chapters()).index(chapter)
    kept = origins(parent) if parent else [own] * len(lines)
    return [own if mark == "+" else kept[old - 1] for mark, _, old, _ in lines]


def run_of(lines, colours, origin):
    """Return the HTML of lines that are all changed, or all not.

    Those of the left side come first: the unified view has but to put them in one column.
    """
    left, right = ([line for line in lines if line[0] in marks] for marks in ("- ", "+ "))
    before, after, changed = "", "", lines[0][0] != " "
    pairs = ((n, n) for n in range(len(lines)))
    if changed:
        pairs = align([line[1] for line in left], [line[1] for line in right])
    for row, (old, new) in enumerate(pairs, 1):
        both = old is not None and new is not None
        marks = compare(left[old][1], right[new][1]) if both else ((), (), ())
        if old is not None:
            n, tag = left[old][2], "del" if changed else "b"
            text = html_of(colours[0][n - 1], marks[1])
            before += f"<{tag} data-n={n} style=--r:{row}>{text}</{tag}>"
        if new is not None:
            n, tag = right[new][3], "ins" if changed else "span"
            text = html_of(colours[1][n - 1], marks[2])
            after += f"<{tag} data-n={n} style=--r:{row};--b:{origin[n - 1]}>{text}</{tag}>"
    return f"<div>{before}{after}</div>"


def script_of(chapter):
    """Return the parts of a script in order, each with the HTML of its diff."""
    texts = [chapters()[name].read_text() for name in (parent_of(chapter) or chapter, chapter)]
    colours, found = [highlight(text) for text in texts], []
    old, new = ({n: name for name, span in parts(text).items() for n in span} for text in texts)

    for name, group in groupby(
        compared(chapter),
        key=lambda line: old.get(line[2], "") if line[0] == "-" else new.get(line[3], ""),
    ):
        lines = list(group)
        runs = groupby(lines, key=lambda line: line[0] != " ")
        html = "".join(run_of(list(run), colours, origins(chapter)) for _, run in runs)
        marks = [line[0] for line in lines]
        size = f"+{marks.count('+')} −{marks.count('-')}", f"{len(lines)} lines"
        changed = set(marks) != {" "}
        new_id = f"f-{name}" if name and name not in [part["name"] for part in found] else ""
        part = dict(name=name, html=html, size=size[not changed], changed=changed, id=new_id)
        found.append(part)
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
    for names, told in re.findall(r"^\*\*(.+?)\.\*\* (.+?)\n(?:\n|\Z)", text, re.M | re.S):
        plain = escape(re.sub("[`*]", "", told).replace("\n", " "))
        found |= {name.lower(): (slug(names), plain) for name in names.split(" and ")}
    for name, told in re.findall(r"^\| (`\w`) \| (.+) \|$", text, re.M):
        found[name] = "symbols", f"the number of {told.replace('`', '')}"
    return found


class Page:
    """A README as HTML; `parts` are those of the script beside it."""

    def __init__(self, path, parts):
        self.path, self.names = path, {part["name"] for part in parts} - {""}
        self.linked, self.seen, self.sections = set(), set(), []  # a section: anchor, title, text
        tokens = MARKDOWN.parse(path.read_text())
        for n, token in enumerate(tokens):
            if token.type == "heading_open":
                title = tokens[n + 1].content.replace("`", "")
                token.attrSet("id", slug(title))
                self.sections.append([slug(title), title, ""])
            elif token.type == "inline":
                text = [piece.content for piece in token.children if piece.type != "html_inline"]
                self.sections[-1][-1] += " ".join([*text, ""])
                self.inline(token.children)
            elif token.type == "fence":
                token.type, token.content = "html_block", self.block(token.info, token.content)
        html = MARKDOWN.renderer.render(tokens, MARKDOWN.options, {})
        html = html.replace("<table>", "<div class=scroll tabindex=0><table>")
        self.html = html.replace("</table>", "</table></div>")

    def link(self, target):
        """Return where a link leads on the site."""
        file, _, anchor = target.partition("#")
        if "://" in file or not file:
            return target
        path = (self.path.parent / file).resolve()
        self.linked.add(path)
        anchor = "script" if path in chapters().values() else anchor
        place = os.path.relpath(place_of(path), place_of(self.path).parent)
        return f"{place}#{anchor}" if anchor else place

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
                html = self.mention(piece.content, f"<code>{escape(piece.content)}</code>")
            elif piece.type == "text" and not linked:
                some = re.split(rf"(?i)\b({words})(?=s?\b)(?!-)", piece.content)
                html = "".join(self.term(word.lower(), escape(word)) for word in some)
            if html:
                piece.type, piece.content = "html_inline", html

    def mention(self, name, html):
        """Return the name of a part of the script as a link there, with an anchor to come back."""
        if name not in self.names:
            return self.term(f"`{name}`", html)
        anchor = f"id=m-{name}" if f"m-{name}" not in self.seen else ""
        self.seen.add(f"m-{name}")
        return f'<a {anchor} href="#f-{name}">{html}</a>'

    def term(self, name, html):
        """Return a term of the glossary as a link with its meaning, once a page."""
        if name in self.seen or name not in glossary() or self.path.name == "glossary.md":
            return html
        self.seen.add(name)
        anchor, told = glossary()[name]
        file = os.path.relpath(ROOT / "docs/glossary.md", self.path.parent)
        return f'<a class=term href="{self.link(f"{file}#{anchor}")}" aria-description="{told}">{html}</a>'

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
            html += f"<{tag}>{self.mention(name, line) if name else html_of(colours)}</{tag}>"
        return f"<pre class=diff>{html}</pre>"


def source_html(text, name):
    """Return the text of a file as HTML, in the colours that its name calls for."""
    lexer = find_lexer_class_for_filename(name) or TextLexer
    return f"<pre>{chr(10).join(map(html_of, highlight(text, lexer)))}</pre>"


def beside(page):
    """Return the sections of a README as HTML for a page in its folder or in one beside it."""
    there = f"../{page.path.parent.name}/"
    html = re.sub(r'(<(?:h\d|a) )id=[^ >]* ?', r"\1", page.html)
    html = re.sub(r'(href|src)="#', rf'\1="{there}index.html#', html)
    return re.split("(?=<h2)", re.sub(r'(href|src)="(?!\w+:|\.\.)', rf'\1="{there}', html))


# ---- pages -----------------------------------------------------------------------------------


def plans():
    """Yield the rows of the planner's table: sizes × clusters × settings."""
    folder = ROOT / "05-large-model"
    sys.path.insert(0, str(folder))
    planner = importlib.import_module("will_it_fit")
    planner.trace = functools.cache(planner.trace)  # the same on any number of nodes
    warnings.simplefilter("ignore")
    for file in sorted(folder.glob("configs/*.args")):
        model = None
        for size, nodes in product((1, 8), NODES):
            flags = [f"@{file}", f"--nodes={nodes}", f"--tensor-parallel-size={size}"]
            args = planner.parse_args([*flags, f"--global-batch-size={8 * nodes}"])
            model = model or planner.model_of(planner.load_config(args)[0])
            for name, changes in planner.SETTINGS.items():
                if size > 1 and name < "05":
                    continue
                chapter = args.chapter if size > 1 else name[:2]
                plan = planner.plan_of(args, model, chapter, changes)
                setting = f"{chapter}{f' {flags[-1]}' * (size > 1)}{name[2:]}"
                sizes = (f"{plan[key] / 2**30:.1f}" for key in ("gpu_needs", "host_needs"))
                yield file.stem, nodes, setting, *sizes


def main():
    """Write all pages to a folder that is made anew."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "site")
    parser.add_argument("--no-plans", action="store_true")
    args = parser.parse_args()
    shutil.rmtree(args.output, ignore_errors=True)
    loader = jinja2.FileSystemLoader(HERE)
    template = jinja2.Environment(loader=loader, trim_blocks=True).get_template("page.html")
    names = {script.with_name("README.md"): name for name, script in chapters().items()}
    scripts = {path: script_of(name) for path, name in names.items()}
    pages = {path: Page(path, scripts.get(path, ())) for path in readmes()}
    menu = {place_of(path): page.sections[0][1] for path, page in pages.items()}
    index = []

    def write(place, **more):
        (args.output / place).parent.mkdir(parents=True, exist_ok=True)
        root = "../" * (len(place.parts) - 1)
        html = template.render(root=root, names=names, menu=menu, **more)
        (args.output / place).write_text(html)

    for path, page in pages.items():
        place, name, parts, more = place_of(path), names.get(path), scripts.get(path, ()), {}
        title = menu[place]
        index += [[f"{place}#{anchor}", title, *told] for anchor, *told in page.sections]
        if name:
            parent = parent_of(name)
            more = dict(chapter=name, parent=parent, origins=origins(name), parts=parts)
        write(place, title=title, page=page, **more)
        if name and parent:
            before = pages[chapters()[parent].with_name("README.md")]
            pairs = zip_longest(beside(before), beside(page), fillvalue="")
            write(place.with_name("readmes.html"), title=title, chapter=name, pairs=pairs)
        for part in parts:
            if part["id"] and (part["changed"] or not parent):
                text = re.sub("<[^>]*>", " ", part["html"])
                index.append([f"{place}#{part['id']}", title, part["name"], text])
    for path in set().union(*(page.linked for page in pages.values())) - set(pages):
        where, name = args.output / place_of(path), str(path.relative_to(ROOT))
        if path.suffix == ".png":
            where.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, where)
        elif path not in chapters().values():
            files = "\n".join(sorted(os.listdir(path))) if path.is_dir() else path.read_text()
            write(place_of(path), title=name, source=source_html(files, name))
    write(Path("planner.html"), title="Will it fit?", plans=[] if args.no_plans else [*plans()])
    for name in ("site.css", "site.js"):
        shutil.copy(HERE / name, args.output)
    (args.output / "search.js").write_text(f"INDEX = {json.dumps(index, ensure_ascii=False)}")
    print(f"open {args.output / 'index.html'}")


if __name__ == "__main__":
    main()
