"""Carry a change of one chapter's script into all chapters that descend from it.

Here:  make carry FROM=01

Every descendant is merged three ways: its script, its parent's script in the last commit, and its
parent's script now. If both have changed the same lines, the script gets conflict markers, and its
own descendants wait until you have resolved them and carry on from there.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from chapters import ROOT, chapters, children_of


def parse_args():
    """Parse the chapter that has changed, and the folder of the repository."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("chapter", help="its short name, such as 01")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    args = parser.parse_args()
    args.root = args.root.resolve()
    if args.chapter not in chapters(args.root):
        parser.error(f"{args.chapter}: the chapters are {', '.join(chapters(args.root))}")
    return args


def merge(child, parent, root):
    """Merge the changes of the parent's script into the child's script; return whether it went."""
    committed = ["git", "-C", root, "show", f"HEAD:{parent.relative_to(root)}"]
    with tempfile.NamedTemporaryFile() as before:
        subprocess.run(committed, check=True, stdout=before)
        labels = [child.parent.name, "the last commit", parent.parent.name]
        command = ["git", "merge-file", *(f"-L{label}" for label in labels)]
        status = subprocess.run([*command, child, before.name, parent], check=False).returncode
    return status == 0


def show_conflicts(script):
    """Print the lines between conflict markers, with their numbers."""
    inside = False
    for number, line in enumerate(script.read_text().splitlines(), 1):
        inside = inside or line.startswith("<<<<<<< ")
        if inside:
            print(f"{script}:{number}: {line}")
        inside = inside and not line.startswith(">>>>>>> ")


def carry(chapter, root):
    """Merge a chapter into its descendants, nearest first; return the chapters with conflicts."""
    conflicts, scripts = [], chapters(root)
    for child in children_of(chapter, root):
        before = scripts[child].read_bytes()
        if not merge(scripts[child], scripts[chapter], root):
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
    if conflicts := carry(args.chapter, args.root):
        commands = ", then ".join(f"make carry FROM={child}" for child in conflicts)
        sys.exit(f"carry.py: error: conflicts; resolve them in an editor, and run {commands}")


if __name__ == "__main__":
    main()
