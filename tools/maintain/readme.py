"""The blocks of the READMEs: what a reader may run, and what is said to come out of it."""

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from chapters import ROOT

SAMPLE = r'\bsample\("([\w-]+)"(?:, head=(\d+), tail=(\d+))?'
SKIPPED = {".venv", "outputs", ".pytest_cache"}  # folders of this checkout that are none of ours


@dataclass
class Block:
    """A fenced block: its language, its text, and what a comment before it says it needs."""

    name: str
    kind: str
    text: str
    needs: str = ""
    sample: str = ""  # the file under assets/samples that holds what it printed
    shown: tuple = ()  # how many of its first and last lines the README shows; (): all


def readmes(root=ROOT):
    """Return the paths of all READMEs, the top one first."""
    found = (path for path in root.glob("**/*.md") if not SKIPPED & set(path.parts))
    return sorted(found, key=lambda path: (len(path.parts), path))


def words(path, made=True):
    """Return the number of words of a README: all, or of its prose: none that is made, no code."""
    text = re.sub(r'<a id="[\w-]+"></a>', "", path.read_text())
    if not made:
        text = re.sub(
            r"<!-- \[\[\[cog.*?\[\[\[end\]\]\]|<!--.*?-->|```.*?```", "", text, flags=re.S
        )
    return len(re.findall(r"[A-Za-z0-9][\w'’.-]*", text))


def slug(heading):
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def blocks(path):
    """Return the blocks of a README.

    `<!-- needs: ... -->` belongs to the block after it, and `sample("name")`, in one of cog's
    comments, to the last block in bash before it.
    """
    found, needs = [], ""
    for token in MarkdownIt().parse(path.read_text()):
        if token.type == "html_block":
            marker = re.match(r"<!-- needs: (.*?) -->", token.content)
            needs = marker[1] if marker else needs
            if asked := re.search(SAMPLE, token.content):
                block = [block for block in found if block.kind == "bash"][-1]
                block.sample, *shown = asked.groups()
                block.shown = tuple(map(int, filter(None, shown)))
        elif token.type == "fence":
            name = f"{path.relative_to(ROOT)}:{token.map[0] + 1}"
            found.append(Block(name, token.info, token.content, needs))
            needs = ""
    return found


def commands():
    """Return all blocks in bash, of all READMEs."""
    return [block for path in readmes() for block in blocks(path) if block.kind == "bash"]


def shown(sample, output):
    """Return what READMEs show of an output: all, or its first and last lines."""
    parts = [block.shown for block in commands() if block.sample == sample]
    if () in parts:
        return output
    head, tail = map(max, zip(*parts, strict=True))
    lines = output.splitlines(keepends=True)
    return "".join([*lines[:head], "...\n", *lines[max(head, len(lines) - tail) :]])


def workplace(folder):
    """Make `folder` a copy of the repository, by links, in which a command may leave what it will.

    Return it.
    """
    for path in ROOT.iterdir():
        if path.name not in ("outputs", ".git"):
            Path(folder, path.name).symlink_to(path)
    return folder


def script_of(block):
    """Return the block as bash runs it in a workplace.

    That two files differ is no failure of `diff`, and the environment is there already.
    """
    text = re.sub(r"^make ", "make -o install ", block.text)
    return re.sub(r"^diff ", "! diff ", text)
