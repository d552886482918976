"""Check prose, comments, docstrings and messages against "How we write" in CONTRIBUTING.md.

Here:  python tools/maintain/english.py             check the paths listed in pyproject.toml
       python tools/maintain/english.py PATH ...    check these files and folders
"""

import ast
import inspect
import io
import os
import re
import sys
import tokenize
import tomllib
from collections import Counter, namedtuple
from pathlib import Path

from chapters import ROOT

# `kind` names the part of a file that the words come from: prose, cell, comment, trailing, wide,
# docstring, message, name, or broken. A "wide" comment is a trailing comment on a line of at least
# 93 columns. For a "broken" file, the words are the error message of Python's parser.
Text = namedtuple("Text", "kind line words")
Rule = namedtuple("Rule", "name kinds pattern advice")
Finding = namedtuple("Finding", "line rule excerpt")

TRAILING = "trailing wide"
SENTENCES = f"prose comment docstring {TRAILING}"
ALL_TEXT = f"{SENTENCES} cell message"
# The body of a sentence. A period inside a number or a file name does not end the sentence.
BODY = r"(?:(?!\n\n)[^.!?]|[.!?](?!\s))*?"
BEFORE_WHICH = "of|in|on|at|by|to|from|with|for|under|after|before|through|into"
CHOICES = "(?:way|rank|run|step|layer|device|order|case|digit|file|one)s?"
TAILS = "which|whose|whom|who|of|or|nor|as|where|whereas|than|but|and"
LOCATIONS = "from|by|on|at|into|onto|until"
CLAUSE = "what|who|where|whatever|how"
PARTS = "gradient|model|weight|layer|tensor|optimizer|parameter|checkpoint|matrix"
OBJECTS = "seed|batch|number|size|name|order|folder|chapter|group|model|key"
RANDOM = "samples?|batch(?:es)?|numbers?|seeds?|weights?|tokens?|windows?|masks?"
# A word with its articles, which do not count.
WORD = r"(?:(?:a|an|the) )*(?!(?:a|an|the)\b)\w[^\s/]*"
BAD_NAMES = """about again anew each kinds least made many mine of ours place places rest said some
    stuff such theirs then there thing things this those told wanted what which who whole"""

# Each rule: its name, the kinds of text that it checks, the pattern, and what to write instead.
# A space in a pattern also matches a line break, and patterns ignore upper and lower case.
RULES = [
    Rule("preposition + which", ALL_TEXT, rf"\b(?:{BEFORE_WHICH}) (?:which|whom)\b(?! (?:{CHOICES})"
         rf"\b)(?!{BODY}\?)", "end the clause and start a new one, or give the noun its own verb"),
    Rule("Return + clause", "docstring comment", rf"\breturns? (?:{CLAUSE})\b",
         "name the returned noun: Return the order of the samples"),
    Rule("more than one colon", SENTENCES, rf": {BODY}: ", "split the sentence in two"),
    Rule("more than one semicolon", SENTENCES, rf";{BODY};", "split the sentence in two"),
    Rule("tail of a sentence", f"comment {TRAILING}", rf"\A(?:(?-i:{TAILS})\b|(?-i:{LOCATIONS})\b"
         r"(?! (?:its|their|default|purpose|top of)\b))",
         "write a full sentence that makes sense without the code before it"),
    Rule("no period", "comment", r"\S+\Z(?<![.?!])(?<![.?!][)\"'])",
         "end the comment with a period, after a full sentence"),
    Rule("long trailing comment", "trailing", rf"\A(?:{WORD}\W+){{5}}{WORD}",
         "move it above its line, as a sentence; five words, not counting articles, are the limit"),
    Rule("wide line", "wide", r"\A", "move the comment above its line, as a sentence"),
    Rule("variable name", "name", rf"\A(?-i:{'|'.join(BAD_NAMES.split())})\Z",
         "choose a noun that a reader would search for: saved_args, local_rank, problem"),
    Rule("does not divide by", ALL_TEXT, r"\b(?:does|do|did|doesn't|don't|didn't) (?:not )?divide"
         r"(?: evenly)? by\b|\b(?:that|which) divides?(?: by|(?=[.,;:)]|\Z))",
         "write: is (not) divisible by, or: a multiple of"),
    Rule("backend name", SENTENCES, r"(?<![\w./:\"'-])(?-i:nccl|gloo)\b(?![./:\"-]\w)",
         "write NCCL and Gloo; only the string for init_process_group() is in lower case"),
    Rule("bare pronoun", ALL_TEXT, r"\b(?:than|to|from|of|in|for|as) "
         r"(?:such|all|both|those|each)(?=[.,;:)]|\Z)", "name the noun: both scripts, all ranks"),
    Rule("whole", ALL_TEXT, rf"\bwhole (?:{PARTS})", "write: the full gradient, the entire model"),
    Rule("another", ALL_TEXT, rf"\banother (?:{OBJECTS})\b", "write: a different seed"),
    Rule("as many", ALL_TEXT, r"(?<!(?:twice|times|least) )\bas many\b(?! as possible)",
         "write: the same number of"),
    Rule("draw", ALL_TEXT, rf"\b(?:draws?|drawn) (?:from|at random|below|later|next|(?:its|their) "
         rf"own|(?:\w+ )?(?:{RANDOM}))\b|\bseed draws\b", "write: sample, shuffle, initialize"),
    Rule("loss", ALL_TEXT, r"\bcurves? of (?:the )?loss(?:es)?\b|\blosses of 0\d\b",
         "write: the loss curve, the loss of chapter 01"),
    Rule("told, asked", ALL_TEXT, r"\b(?:is|are) (?:told|asked)\b",
         "say who does it: the user sets the flag, the rank learns its number"),
    Rule("says so", ALL_TEXT, r"\b(?:says?|said|tells?) so\b|\bsaid to\b",
         "write: reports the error, prints the reason"),
    Rule("linking word", ALL_TEXT, r"\b(?:whereupon|whereby|thereby|wherein|thereof)\b",
         "write two sentences"),
    Rule("meanwhile", ALL_TEXT, r"\w meanwhile(?=[.;,:)]|\Z)", "write: in the meantime"),
    Rule("halfway", ALL_TEXT, r"\bhalf-?way\b(?! through)", "name the point: at step 50"),
    Rule("the one before", f"{SENTENCES} cell", r"\bone (?:before|after)\b(?! another| the other)",
         "write: the previous chapter, the next line"),
    Rule("none of ours", ALL_TEXT, r"\bnone of (?:ours|yours)\b", "write: not part of this guide"),
    Rule("anew", ALL_TEXT, r"\banew\b", "write: again"),
    Rule("go on", ALL_TEXT, r"\bgo(?:es)? on\b", "write: continue, keep training"),
    Rule("or else", ALL_TEXT, r"\bor else\b", "write: otherwise"),
    Rule("syntax error", "broken", r"\A", "fix the code, so that the checker can read it"),
    Rule("shall", ALL_TEXT, r"\bshall\b", "write: should, must, will"),
]  # fmt: skip
PATTERNS = {rule: re.compile(rule.pattern.replace(" ", r"\s"), re.I | re.S) for rule in RULES}

# Comments for programs, and banners.
MARKER = re.compile(r"#!|#\s*(?:noqa|type:|fmt:|ruff:|pragma:|\[\[\[|\]\]\]|-{4}|={4})")
# The user reads the arguments of calls to these functions, and the values of these keywords.
REPORTING = {"fail", "print", "exit", "error", "warn", "skip"}
KEYWORDS = {"help", "description", "epilog"}
SKIPPED = {".venv", ".git", "outputs", "site", "node_modules", "wandb"}


# ---- finding the texts -----------------------------------------------------------------------
def blank(pattern, text, filler=" ", flags=re.S | re.M):
    """Overwrite the matches in the text, so that line and column numbers stay the same."""
    return re.sub(pattern, lambda match: re.sub(r"[^\n]", filler, match[0]), text, flags=flags)


def without_code(text):
    """Overwrite code spans, values in braces, link targets, HTML tags and URLs."""
    text = blank(r"`[^`]+`|\{[^{}]+\}", text, "x")
    text = blank(r"(?<=\])\([^)\s]*\)|</?[a-z][^>]*>", text)
    return blank(r"https?://\S+", text, ".")


def texts_of_markdown(source):
    """Yield each paragraph, heading, list item and table cell, but no code and no comment."""
    source = blank(r"<!-- \[\[\[cog.*?\[\[\[end\]\]\] -->|<!--.*?-->|^( *)```.*?^\1```", source)
    # A new text starts at a blank line, at a list item or heading, and at each column of a table.
    borders = r"\n(?=\s*(?:[-*|#>]|\d+\.)\s|\s*(?:\n|\Z))|(?<=\n)\||\s\|(?=\s)|\Z"
    start = 0
    for border in re.finditer(borders, source):
        words = source[start : border.start()]
        start += len(words) - len(words.lstrip())
        in_table = source.startswith("|", source.rfind("\n", 0, start) + 1)
        kind = "cell" if in_table else "prose"
        yield Text(kind, source.count("\n", 0, start) + 1, words.strip("\n| "))
        start = border.end()


def comments_of(source):
    """Yield each trailing comment, and each block of comment lines as one text."""
    block = Text("comment", -1, "")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or MARKER.match(token.string):
            continue
        # A second space after the # marks a line of code.
        row, words = token.start[0], blank(r"\A {2}.*", token.string[1:], ".").strip()
        alone = not token.line[: token.start[1]].strip()
        if alone and row == block.line + block.words.count("\n") + 1:
            block = block._replace(words=f"{block.words}\n{words}")
            continue
        # A first word with a colon names the chapter or the library, as in "DDP: ".
        words = re.sub(r"\A\w+: ", "", words)
        if alone:
            yield block
            block = Text("comment", row, words)
        else:
            yield Text("wide" if len(token.line.rstrip()) >= 93 else "trailing", row, words)
    yield block


def docstrings_of(tree):
    """Yield the docstrings, without their usage lines and indented code."""
    for node in ast.walk(tree):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node):
            words = inspect.cleandoc(node.body[0].value.value)
            words = blank(r"^(?:\w[\w ]*:  .*| .*)$", words, flags=re.M)
            yield Text("docstring", node.body[0].lineno, words)


def expressions_that_users_read(tree):
    """Yield the arguments of calls that report something, and the values of help=."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from node.exc.args
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            yield from node.args if name in REPORTING else []
            yield from (option.value for option in node.keywords if option.arg in KEYWORDS)


def messages_of(tree):
    """Yield the messages, and the strings assigned to variables that a message contains."""
    expressions = list(expressions_that_users_read(tree))
    nodes = (node for expression in expressions for node in ast.walk(expression))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and names & {*map(ast.unparse, node.targets)}:
            expressions.append(node.value)
    for expression in expressions:
        for line, words in strings_in(expression):
            yield Text("message", line, words)


def strings_in(node):
    """Yield (line number, string) for each string of an expression, with {} for a value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value
    elif isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        yield node.lineno, "".join(parts)
    if not isinstance(node, ast.Constant | ast.Subscript | ast.Dict | ast.Compare):
        for child in ast.iter_child_nodes(node):
            inside_string = isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)
            yield from [] if inside_string else strings_in(child)


def names_of(tree):
    """Yield the names of variables and parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield Text("name", node.lineno, node.id)
        elif isinstance(node, ast.arg):
            yield Text("name", node.lineno, node.arg)


def texts_of_python(source):
    """Yield the comments, docstrings, messages and variable names of a Python file."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        yield Text("broken", error.lineno, error.msg)
        return
    yield from comments_of(source)
    for texts in (docstrings_of, messages_of, names_of):
        yield from texts(tree)


# ---- checking them ---------------------------------------------------------------------------
def findings_in(source, suffix):
    """Return the findings in a Markdown (.md) or Python (.py) source, in the order of its lines."""
    texts = texts_of_markdown(source) if suffix == ".md" else texts_of_python(source)
    findings = {
        Finding(text.line + text.words.count("\n", 0, match.start()), rule, excerpt(text, match))
        for text in texts
        for rule, pattern in PATTERNS.items()
        if text.kind in rule.kinds.split()
        for match in pattern.finditer(without_code(text.words))
    }
    return sorted(findings, key=lambda finding: finding.line)


def excerpt(text, match):
    """Return about a line of the text around the match."""
    start = text.words.rfind(" ", 0, max(0, match.start() - 40)) + 1
    return " ".join(text.words[start : start + 100].split())


def configured_files():
    """Return the files that `make lint` checks, which pyproject.toml lists as patterns."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [file for path in settings["tool"]["english"]["paths"] for file in ROOT.glob(path)]


def files_in(paths):
    """Return the Markdown and Python files among the paths and in the folders among them."""
    files = set()
    for path in map(Path, paths):
        if not path.exists():
            print(f"english.py: error: {path}: no such file or folder", file=sys.stderr)
            sys.exit(2)
        inside = {file for file in path.rglob("*.*") if not SKIPPED & {*file.parts}}
        files |= inside if path.is_dir() else {path}
    return sorted(file for file in files if file.suffix in (".md", ".py"))


def main():
    """Print the findings, then each rule that was broken and its advice; exit 1 on a finding."""
    files, counts = files_in(sys.argv[1:] or configured_files()), Counter()
    for path in files:
        for finding in findings_in(path.read_text(), path.suffix):
            shown = os.path.relpath(path)
            print(f"{shown}:{finding.line}: {finding.rule.name}: {finding.excerpt}")
            counts[finding.rule] += 1
    for rule, count in counts.most_common():
        print(f"{count} x {rule.name}: {rule.advice}")
    print(f"total: {counts.total()}; files checked: {len(files)}")
    sys.exit(bool(counts))


if __name__ == "__main__":
    main()
