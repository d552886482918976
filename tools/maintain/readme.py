"""Read the code blocks of the READMEs, and find the output that a README shows of each block."""

import re
from dataclasses import dataclass
from functools import cache

from markdown_it import MarkdownIt

from chapters import ROOT

SAMPLE = r'\bsample\("([\w-]+)"(?:, head=(\d+), tail=(\d+))?'
# These folders of a checkout are not part of the guide.
SKIPPED = {".git", ".venv", "outputs", ".pytest_cache"}


@dataclass
class Block:
    """Hold a fenced block of a README, and the requirements in the comment before the block."""

    name: str
    kind: str
    text: str
    needs: str = ""
    # The file with this name under assets/samples holds the output of the block.
    sample: str = ""
    # The README shows only the first and the last lines of the output. This tuple holds the two
    # numbers of lines. If it is empty, the README shows all lines.
    shown: tuple = ()


def readmes():
    """Return the paths of the guide's Markdown files; files in the top folder come first."""
    found = [*ROOT.glob("*.md")]
    # Search each folder separately, because a search of the root would also walk through .venv.
    for folder in ROOT.iterdir():
        if folder.is_dir() and folder.name not in SKIPPED:
            found += folder.glob("**/*.md")
    return sorted(found, key=lambda path: (len(path.parts), path))


def blocks(path):
    """Return the fenced blocks of a README.

    A comment `<!-- needs: ... -->` belongs to the next block. A call of `sample("name")`, in a
    comment for cog, belongs to the nearest bash block above it.
    """
    found, needs = [], ""
    for token in MarkdownIt().parse(path.read_text()):
        if token.type == "html_block":
            marker = re.match(r"<!-- needs: (.*?) -->", token.content)
            needs = marker[1] if marker else needs
            if call := re.search(SAMPLE, token.content):
                block = [block for block in found if block.kind == "bash"][-1]
                block.sample, *shown = call.groups()
                block.shown = tuple(map(int, filter(None, shown)))
        elif token.type == "fence":
            name = f"{path.relative_to(ROOT)}:{token.map[0] + 1}"
            found.append(Block(name, token.info, token.content, needs))
            needs = ""
    return found


@cache
def commands():
    """Return the bash blocks of the guide's Markdown files."""
    return [block for path in readmes() for block in blocks(path) if block.kind == "bash"]


def shown(sample, output):
    """Return the lines of `output` that READMEs show: all lines, or the first and the last lines.

    `sample` is the name of the output's file in assets/samples.
    """
    parts = [block.shown for block in commands() if block.sample == sample]
    if () in parts:
        return output
    head, tail = map(max, zip(*parts, strict=True))
    lines = output.splitlines(keepends=True)
    return "".join([*lines[:head], "...\n", *lines[max(head, len(lines) - tail) :]])
