"""List the chapters, and compare two scripts; all facts come from the scripts themselves."""

import ast
import io
import re
import subprocess
from itertools import groupby
from pathlib import Path
from tokenize import COMMENT, DEDENT, ENDMARKER, INDENT, NEWLINE, NL, generate_tokens

ROOT = Path(__file__).resolve().parents[2]
# These kinds of tokens hold no code.
WITHOUT_CODE = {COMMENT, DEDENT, ENDMARKER, INDENT, NEWLINE, NL}


def chapters(root=ROOT):
    """Return the paths of the chapters' scripts by short name, such as "01", in reading order."""
    scripts = sorted([*root.glob("*/train_llm.py"), *root.glob("[a-z]*-*/*/train_llm.py")])
    return {re.match(r"\d\d|.*", script.parent.name)[0]: script for script in scripts}


def parent_of(chapter, root=ROOT):
    """Return the short name of a chapter's parent, or None for 01, which has no parent.

    The first line of a chapter's script names the parent.
    """
    # Read only the first line, because later lines may have conflict markers.
    with open(chapters(root)[chapter]) as script:
        parent = re.search(r"Parent: ([\w-]+)", script.readline())
    by_folder = {script.parent.name: name for name, script in chapters(root).items()}
    return by_folder[parent[1]] if parent else None


# ---- one script ------------------------------------------------------------------------------
def parts(source):
    """Return the line numbers of each part of a script, by the name of the part.

    A part is a constant, a function or class with its decorators, or the last `if` statement, whose
    name here is `__main__`. The docstring and the imports belong to no part.
    """
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Assign):
            name = node.targets[0].id
        elif isinstance(node, ast.If):
            name = "__main__"
        else:
            continue
        # Begin a function or class with its first decorator, because node.lineno is the line of
        # `def` or `class`.
        first = min(part.lineno for part in [node, *getattr(node, "decorator_list", [])])
        found[name] = range(first, node.end_lineno + 1)
    return found


def flags(source):
    """Return the code that declares each flag of a script, by the long name of the flag."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "add":
            names = [word.value for word in node.args if isinstance(word, ast.Constant)]
            found[names[-1]] = ast.unparse(node)
    return found


def code_lines(source):
    """Return the line numbers of a script's code, without blank lines, comments and docstrings."""
    numbers = set()
    for token in generate_tokens(io.StringIO(source).readline):
        if token.type not in WITHOUT_CODE:
            numbers |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        may_have_one = isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        if may_have_one and ast.get_docstring(node):
            numbers -= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    return numbers


# ---- two scripts -----------------------------------------------------------------------------
def diff(before, after):
    """Return all lines of two scripts as (mark, line, number in `before`, number in `after`).

    The mark is ' ' for a line in both scripts, '-' for a line only in `before`, and '+' for a line
    only in `after`. Line numbers begin at 1. If the scripts are equal, return an empty list.
    """
    command = ["diff", "--unified=1000000", "--", str(before), str(after)]
    marked = subprocess.run(command, check=False, capture_output=True, text=True).stdout
    lines, old, new = [], 0, 0
    for mark, line in ((line[:1], line[1:]) for line in marked.splitlines()[3:]):
        old += mark != "+"
        new += mark != "-"
        lines.append((mark, line, old, new))
    return lines


def diff_by_part(before, after):
    """Return the lines of diff() by the name of their part.

    A removed line belongs to a part of `before`, and every other line to a part of `after`. Lines
    between two parts have a number in place of a name; the docstring and the imports have 0.
    """
    old_names, new_names = (
        {number: name for name, numbers in parts(path.read_text()).items() for number in numbers}
        for path in (before, after)
    )

    def part_of(line):
        mark, _, old, new = line
        return old_names.get(old) if mark == "-" else new_names.get(new)

    # Collect the lines of each part from several groups, because a diff may interrupt a removed
    # part with lines of a new part.
    found = {}
    for number, (name, lines) in enumerate(groupby(diff(before, after), key=part_of)):
        found.setdefault(name or number, []).extend(lines)
    return found


def num_added(before, after):
    """Return the number of code lines that the script `after` adds to the script `before`."""
    numbers = code_lines(after.read_text())
    return sum(mark == "+" and new in numbers for mark, *_, new in diff(before, after))


def changes(before, after):
    """Return the names of the flags and parts that differ between two scripts.

    The result maps each kind of change, such as "new", to a list of names.
    """
    old, new = parts(before.read_text()), parts(after.read_text())
    old_flags, new_flags = flags(before.read_text()), flags(after.read_text())
    changed, decorated = set(), set()
    for name, lines in diff_by_part(before, after).items():
        changed_lines = [line for mark, line, *_ in lines if mark != " "]
        if changed_lines and name in old.keys() & new.keys():
            is_decorated = all(line.startswith("@") for line in changed_lines)
            (decorated if is_decorated else changed).add(name)
    found = {
        "flags": {name for name, _ in old_flags.items() ^ new_flags.items()},
        "changed": changed,
        "decorated": decorated,
        "new": new.keys() - old.keys(),
        "gone": old.keys() - new.keys(),
    }
    # Sort the names of each kind of change by their order in the scripts.
    order = [*new_flags, *old_flags, *new, *old]
    return {kind: sorted(names, key=order.index) for kind, names in found.items() if names}


def noise(before, after):
    """Return the hunks of a diff that change only comments, blank lines or indentation.

    The diff compares the scripts at the paths `before` and `after`.
    """
    found = []
    for is_changed, group in groupby(diff(before, after), key=lambda line: line[0] != " "):
        hunk = [line[:2] for line in group]
        if is_changed and code_of(hunk, "-") == code_of(hunk, "+"):
            found.append("\n".join(map("".join, hunk)))
    return found


def code_of(hunk, mark):
    """Return the lines of `hunk` with `mark`, without comments, blank lines and indentation."""
    code = (re.sub(r"(^|\s+)#( .*)?$", "", line) for its_mark, line in hunk if its_mark == mark)
    return [line.strip() for line in code if line.strip()]
