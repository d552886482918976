"""Check prose, comments, docstrings and messages against "How we write" in CONTRIBUTING.md.

Here:  python tools/maintain/english.py             check all files that git tracks
       python tools/maintain/english.py PATH ...    check these files and folders
"""

import ast
import inspect
import io
import re
import subprocess
import sys
import tokenize
from collections import namedtuple
from itertools import groupby
from pathlib import Path

from markdown_it import MarkdownIt

from chapters import ROOT

# `kind` is the kind of a text: prose, comment, trailing (a comment after code on the same line),
# docstring, message (any other string in Python) or name (of a variable).
Text = namedtuple("Text", "kind line words")
Finding = namedtuple("Finding", "line words advice")

# This pattern matches the body of a sentence. A period inside a number or a file name does not end
# the sentence.
BODY = r"(?:(?!\n\n)[^.!?]|[.!?](?!\s))*?"
CHOICES = "(?:way|rank|run|step|layer|device|order|case|digit|file|one)s?"
TAILS = "which|whose|whom|who|of|or|nor|as|where|whereas|than|but|and"
PARTS = "gradient|model|weight|layer|tensor|optimizer|parameter|checkpoint|matrix"
OBJECTS = "seed|batch|number|size|name|order|folder|chapter|group|model|key"
RANDOM = "samples?|batch(?:es)?|numbers?|seeds?|weights?|tokens?|windows?|masks?"
# This pattern matches a word and the articles before it, because articles do not count as words.
WORD = r"(?:(?:a|an|the) )*(?!(?:a|an|the)\b)\w[^\s/]*"
BAD_NAMES = """about again each least made many mine of ours place places rest said some
    stuff such theirs then there thing things this those told wanted what which who whole"""

# A key names the kinds of text that its patterns check. The value of a pattern is advice: the words
# to write instead. A space in a pattern also matches a line break. The case of letters matters only
# inside `(?-i:...)`.
RULES = {
    "prose comment trailing docstring message": {
        r"\b(?:of|in|on|at|by|to|from|with|for|under|after|before|through|into) (?:which|whom)\b"
        rf"(?! (?:{CHOICES})\b)(?!{BODY}\?)": "two clauses, or a verb for the noun",
        r"\b(?:than|to|from|of|in|for|as) (?:such|all|both|those|each)(?=[.,;:)]|\Z)": (
            "the noun: both scripts, all ranks"
        ),
        r"\b(?:do|does|did|doesn't|don't|didn't) (?:not )?divide by\b": "is (not) divisible by",
        rf"\bwhole (?:{PARTS})": "the full gradient, the entire model",
        rf"\banother (?:{OBJECTS})\b": "a different seed",
        r"(?<!twice )(?<!times )(?<!at least )\bas many\b(?! as possible)": "the same number of",
        rf"\b(?:draws?|drawn) (?:from|at random|(?:\w+ ){{0,2}}(?:{RANDOM}))\b": "sample, shuffle",
        r"\b(?:says?|said|tells?) so\b|\bsaid to\b": "reports the error, prints the reason",
        r"\b(?:is|are) (?:told|asked)\b": "a sentence that names who does it",
        r"\bone (?:before|after)\b(?! another| the other)": "the previous line, the next line",
        r"\banew\b": "again",
        r"\bgo(?:es)? on\b": "continue, keep training",
        r"\bor else\b": "otherwise",
    },
    "prose comment trailing docstring": {
        rf": {BODY}: |;{BODY};": "two sentences",
        r"(?<![\w./:\"'-])(?-i:nccl|gloo)\b(?![./:\"-]\w)": "NCCL and Gloo",
    },
    "comment docstring": {
        r"\breturns? (?:what|who|where|whatever|how)\b": "a noun: Return the order of the samples",
    },
    "comment trailing": {
        rf"\A(?-i:{TAILS})\b": "a sentence that makes sense without the code before it",
    },
    "comment": {r"\S+\Z(?<![.?!])(?<![.?!][)\"'])": "a full sentence with a period"},
    "trailing": {rf"\A(?:{WORD}\W+){{5}}{WORD}": "at most five words, or a sentence above it"},
    "name": {
        rf"\A(?-i:{'|'.join(BAD_NAMES.split())})\Z": (
            "a noun that a reader would search for: saved_args, local_rank, problem"
        )
    },
}
# This pattern matches comments that are not prose: instructions for programs, and banners.
MARKER = re.compile(r"#!|#\s*(?:noqa|type:|fmt:|ruff:|pragma:|\[\[\[|\]\]\]|-{4}|={4})")


# ---- finding the texts -----------------------------------------------------------------------
def blank(pattern, text, filler=" ", flags=re.S | re.M):
    """Overwrite each match of `pattern` with `filler`, so that lines and columns stay the same."""
    return re.sub(pattern, lambda match: re.sub(r"[^\n]", filler, match[0]), text, flags=flags)


def without_code(text):
    """Return the text with code, values in braces, link targets, HTML tags and URLs overwritten."""
    text = blank(r"`[^`]+`|\{[^{}]+\}", text, "x")
    text = blank(r"(?<=\])\([^)\s]*\)|</?[a-z][^>]*>", text)
    return blank(r"https?://\S+", text, ".")


def texts_of_markdown(source):
    """Yield each paragraph, heading, list item and table cell, but no code block and no comment."""
    source = blank(r"<!-- \[\[\[cog.*?\[\[\[end\]\]\] -->|<!--.*?-->", source)
    for token in MarkdownIt("gfm-like", {"linkify": False}).parse(source):
        if token.type in ("inline", "html_block"):
            yield Text("prose", token.map[0] + 1, token.content)


def comments_of(source):
    """Yield each trailing comment, and each block of comment lines as one text."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    comments = [comment for comment in comments if not MARKER.match(comment.string)]

    def block_of(numbered):
        # In a block, each comment is one row below the previous comment, so `row - number` is equal
        # for all comments of the block.
        number, (_, _, (row, column), _, line) = numbered
        is_alone = not line[:column].strip()
        return is_alone, row - number if is_alone else row

    for (is_alone, _), group in groupby(enumerate(comments), key=block_of):
        block = [comment for _, comment in group]
        # A comment with two spaces after the # is a line of code, so do not check its words.
        lines = [blank(r"\A {2}.*", comment.string[1:], ".").strip() for comment in block]
        # Drop a first word with a colon, which names the chapter or the library, as in "DDP: ".
        words = re.sub(r"\A\w+: ", "", "\n".join(lines))
        yield Text("comment" if is_alone else "trailing", block[0].start[0], words)


def texts_of_python(source):
    """Yield the comments, docstrings, messages and variable names of a Python file."""
    yield from comments_of(source)
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                # Blank the usage lines and the indented code of a docstring, which are not prose.
                words = blank(r"^(?:\w[\w ]*:  .*| .*)$", inspect.cleandoc(text), flags=re.M)
                yield Text("docstring", node.lineno, words)
            case ast.Constant(value=str(text)):
                yield Text("message", node.lineno, text)
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield Text("name", node.lineno, name)


# ---- checking them ---------------------------------------------------------------------------
def findings_in(source, suffix):
    """Return the findings in a Markdown (.md) or Python (.py) source, in the order of its lines."""
    findings = set()
    for text in texts_of_markdown(source) if suffix == ".md" else texts_of_python(source):
        words = without_code(text.words)
        rules = [rules for kinds, rules in RULES.items() if text.kind in kinds.split()]
        for pattern, advice in (rule for group in rules for rule in group.items()):
            for match in re.finditer(pattern.replace(" ", r"\s"), words, re.I | re.S):
                line = text.line + words.count("\n", 0, match.start())
                findings.add(Finding(line, " ".join(match[0].split()), advice))
    return sorted(findings)


def files_in(paths):
    """Return the Markdown and Python files in `paths`; leave out files that git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths]
    listed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    files = {Path(name) for name in listed.splitlines()}
    # Leave out deleted files, because git lists them until the deletion is committed.
    return sorted(file for file in files if file.suffix in (".md", ".py") and file.exists())


def main():
    """Print each finding and what to write instead; exit with status 1 on a finding."""
    files, count = files_in(sys.argv[1:] or [ROOT]), 0
    for path in files:
        for line, words, advice in findings_in(path.read_text(), path.suffix):
            print(f"{path}:{line}: {words!r}; write {advice}")
            count += 1
    print(f"findings: {count}; files checked: {len(files)}")
    sys.exit(count > 0)


if __name__ == "__main__":
    main()
