"""Carry a change of one chapter's script into all chapters that grew out of it.

Here:  make carry FROM=01

Every descendant is merged three ways: what it is now, what its parent was in the last commit, and
what its parent is now. Where both have changed the same lines, the script gets conflict markers,
and its own descendants wait until you have mended them and carry on from there.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from chapters import ROOT, chapters, children_of


def parse_args():
    """Return the chapter whose change is carried, and where the repository is."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("chapter", help="its short name, such as 01")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    args = parser.parse_args()
    if args.chapter not in chapters(args.root):
        parser.error(f"{args.chapter}: the chapters are {', '.join(chapters(args.root))}")
    return args


def committed(path, root):
    """Return what a file was in the last commit."""
    name = f"HEAD:{path.relative_to(root)}"
    shown = subprocess.run(["git", "-C", root, "show", name], check=False, capture_output=True)
    if shown.returncode:
        sys.exit(f"carry.py: error: {shown.stderr.decode().strip()}; commit {path.name} first")
    return shown.stdout


def merge(child, parent, root):
    """Merge into the child's script what is new in the parent's; return the number of conflicts."""
    with tempfile.NamedTemporaryFile() as before:
        before.write(committed(parent, root))
        before.flush()
        command = ["git", "merge-file", "-L", child.parent.name, "-L", "the last commit"]
        command += ["-L", parent.parent.name, child, before.name, parent]
        status = subprocess.run(command, check=False).returncode
    if status > 127:
        sys.exit(f"carry.py: error: git merge-file could not merge {parent} into {child}")
    return status


def show_conflicts(script):
    """Print the lines between conflict markers, with their numbers."""
    inside = False
    for number, line in enumerate(script.read_text().splitlines(), 1):
        inside = inside or line.startswith("<<<<<<< ")
        if inside:
            print(f"{script}:{number}: {line}")
        inside = inside and not line.startswith(">>>>>>> ")


def carry(chapter, root):
    """Merge `chapter` into its descendants, nearest first; return those that have conflicts."""
    conflicts, scripts = [], chapters(root)
    for child in children_of(chapter, root):
        before = scripts[child].read_bytes()
        if merge(scripts[child], scripts[chapter], root):
            show_conflicts(scripts[child])
            conflicts.append(child)
            continue
        changed = scripts[child].read_bytes() != before
        print(f"{chapter} -> {child}: {'merged' if changed else 'nothing to do'}")
        conflicts += carry(child, root)
    return conflicts


def main():
    """Carry a change forward."""
    args = parse_args()
    if conflicts := carry(args.chapter, args.root.resolve()):
        further = ", then ".join(f"make carry FROM={child}" for child in conflicts)
        sys.exit(f"carry.py: error: conflicts; mend them in an editor, and go on with {further}")


if __name__ == "__main__":
    main()
