"""Carry a change of one chapter's script into all chapters that descend from it.

Here:  make carry FROM=01

A three-way merge updates each descendant: it adds the parent's changes since the last commit to the
descendant's script. If both scripts have changed the same lines, the descendant gets conflict
markers. Resolve the conflicts and carry the descendant's change; only then do its own descendants
change.
"""

import argparse
import subprocess
import sys
import tempfile

from chapters import ROOT, chapters, parent_of


def merge(child, parent, root):
    """Merge the uncommitted changes of the script `parent` into the script `child`.

    Return whether the merge had no conflict.
    """
    committed = ["git", "-C", root, "show", f"HEAD:{parent.relative_to(root)}"]
    with tempfile.NamedTemporaryFile() as before:
        subprocess.run(committed, check=True, stdout=before)
        labels = [child.parent.name, "the last commit", parent.parent.name]
        command = ["git", "merge-file", *(f"-L{label}" for label in labels)]
        status = subprocess.run([*command, child, before.name, parent], check=False).returncode
    return status == 0


def carry(chapter, root):
    """Merge a chapter's changes into its children, and from each child into the child's children.

    Leave out the descendants of a child with conflicts. Return the names of the chapters with
    conflicts.
    """
    conflicts, scripts = [], chapters(root)
    children = [name for name in scripts if parent_of(name, root) == chapter]
    for child in children:
        if not merge(scripts[child], scripts[chapter], root):
            print(f"{chapter} -> {child}: conflicts; search {scripts[child]} for <<<<<<<")
            conflicts.append(child)
            continue
        print(f"{chapter} -> {child}: merged")
        conflicts += carry(child, root)
    return conflicts


def main():
    """Carry a chapter's changes into all its descendants; exit with an error after conflicts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("chapter", choices=chapters(), help="the chapter that has changed")
    if conflicts := carry(parser.parse_args().chapter, ROOT):
        commands = ", then ".join(f"make carry FROM={child}" for child in conflicts)
        sys.exit(f"carry.py: error: conflicts; resolve them in an editor, and run {commands}")


if __name__ == "__main__":
    main()
