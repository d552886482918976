"""What the chapters are, and what differs between two of them: read from the scripts themselves.

Here:  python tools/maintain/chapters.py 01     prints the path of that chapter's script
"""

import ast
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def chapters(root=ROOT):
    """Return the scripts in the order in which they are read, by short name: 01, 02 and so on."""
    scripts = sorted([*root.glob("*/train_llm.py"), *root.glob("[a-z]*-*/*/train_llm.py")])
    return {re.match(r"\d\d|.*", script.parent.name)[0]: script for script in scripts}


def parent_of(chapter, root=ROOT):
    """Return the chapter that a script's first line names as its parent; 01 has none."""
    with open(chapters(root)[chapter]) as script:  # its other lines may have conflict markers
        named = re.search(r"Parent: ([\w-]+)", script.readline())
    by_folder = {script.parent.name: name for name, script in chapters(root).items()}
    return by_folder[named[1]] if named else None


def children_of(chapter, root=ROOT):
    """Return the chapters whose parent this one is."""
    return [name for name in chapters(root) if parent_of(name, root) == chapter]


def parts(source):
    """Return what a script is made of: from name to the numbers of its lines.

    These are functions and classes with their decorators, constants, and the last lines as
    `__main__`; not the docstring and the imports.
    """
    found = {}
    for node in ast.parse(source).body:
        first = node.lineno
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
            first = min([first, *(decorator.lineno for decorator in node.decorator_list)])
        elif isinstance(node, ast.Assign):
            name = node.targets[0].id
        elif isinstance(node, ast.If):
            name = "__main__"
        else:
            continue
        found[name] = range(first, node.end_lineno + 1)
    return found


def text_of(source, lines):
    """Return the lines of a part, and of these those without decorators."""
    text = [source.splitlines()[number - 1] for number in lines]
    return text, [line for line in text if not line.startswith("@")]


def flags(source):
    """Return the command line of a script: from the long name of a flag to how it is declared."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "add":
            names = [word.value for word in node.args if isinstance(word, ast.Constant)]
            found[names[-1]] = ast.unparse(node)
    return found


def imports(source):
    """Return the names that a script imports, as its code writes them."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {name.asname or name.name for name in node.names}
    return found


def banners(source):
    """Return the lines that head the parts of a script."""
    return re.findall(r"^# ---- .*$", source, re.M)


def diff(before, after):
    """Return the whole of two scripts as `diff` marks it.

    A list of (mark, line, number in `before`, number in `after`): the mark is ' ', '+' or '-', and
    the numbers count from 1.
    """
    command = ["diff", "--unified=1000000", "--", str(before), str(after)]
    marked = subprocess.run(command, check=False, capture_output=True, text=True).stdout
    lines, old, new = [], 0, 0
    for mark, line in ((line[:1], line[1:]) for line in marked.splitlines()[3:]):
        old += mark != "+"
        new += mark != "-"
        lines.append((mark, line, old, new))
    return lines


def diff_size(before, after):
    """Return how many lines are added and how many are removed."""
    marks = [mark for mark, *_ in diff(before, after)]
    return marks.count("+"), marks.count("-")


def hunks(before, after):
    """Return the runs of changed lines: a list of (removed lines, added lines)."""
    found = []
    for changed, group in groupby(diff(before, after), key=lambda line: line[0] != " "):
        if changed:
            lines = list(group)
            found.append(tuple([line for mark, line, *_ in lines if mark == sign] for sign in "-+"))
    return found


def without_comments(lines):
    """Return lines of code as they are without comments, blank lines left out."""
    bare = (re.sub(r"(^|\s+)#( .*)?$", "", line) for line in lines)
    return [line for line in bare if line.strip()]


def noise(before, after):
    """Return what a reader of the diff would learn nothing from: a list of (reason, hunk)."""
    found, all_hunks = [], hunks(before, after)
    added = ["\n".join([*without_comments(new), ""]) for _, new in all_hunks]
    for old, new in all_hunks:
        code, new_code = without_comments(old), without_comments(new)
        lines = "\n".join(f"-{line}" for line in old) + "\n".join(f"\n+{line}" for line in new)
        if code == new_code:
            found.append(("only comments or blank lines", lines))
        elif [line.strip() for line in code] == [line.strip() for line in new_code]:
            found.append(("only another indentation", lines))
        elif all(line.startswith("@") for line in code):
            continue  # a function is decorated no more: that says something, wherever another is
        elif not new_code and any("\n".join([*code, ""]) in other for other in added):
            found.append(("only moved", lines))
    return found


def main():
    """Print the path of a chapter's script."""
    (name,) = sys.argv[1:]
    if name not in chapters():
        print(f"there is no chapter {name}: take one of {', '.join(chapters())}", file=sys.stderr)
        sys.exit(2)
    print(chapters()[name].relative_to(ROOT))


if __name__ == "__main__":
    main()
