"""Find the commands of real size that the guide gives to its readers.

The commands come from the scripts' docstrings, the pages, and the files of arguments.
"""

import ast
import re
import shlex
from dataclasses import dataclass

from conftest import FRAMEWORKS, ROOT, SCRIPTS
from readme import commands


@dataclass
class RealCommand:
    """Hold a command: its origin, its number of GPUs, its script, and the script's arguments."""

    name: str
    gpus: int
    script: str
    arguments: list

    @property
    def gpu(self):
        """Return the name of the command's GPU in the planner.

        The guide uses fp16 only on GPUs without bf16, such as the T4.
        """
        # The first lines of this file of arguments name GPUs of 141 GB, which are H200s.
        if "@09-expert-parallel/configs/qwen3-30b-a3b.args" in self.arguments:
            return "H200-141GB"
        return "T4-16GB" if "fp16" in self.arguments else "H100-80GB"


def real_commands():
    """Return the guide's commands for GPUs.

    Leave out the commands of the frameworks' scripts, because these scripts have no dry run.
    """
    found = [*from_docstrings(), *from_pages(), *from_argument_files()]
    others = {str(SCRIPTS[name].relative_to(ROOT)) for name in FRAMEWORKS}
    return [command for command in found if command.script not in others]


def from_docstrings():
    """Yield the command after "Real:" in the docstring of each script."""
    for path in SCRIPTS.values():
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        yield from commands_in(str(path.relative_to(ROOT)), docstring.partition("Real:")[2])


def from_pages():
    """Yield the commands of the pages' code blocks that need a GPU or Slurm."""
    for block in commands():
        if {"GPU", "Slurm"} & set(block.needs.split(", ")):
            yield from commands_in(block.name, block.text)


def from_argument_files():
    """Yield a command for each file of arguments.

    The first lines of the file give the number of GPUs and the number of samples per step.
    """
    for path in sorted(ROOT.glob("*/configs/*.args")):
        name, text = str(path.relative_to(ROOT)), path.read_text()
        script = SCRIPTS[re.match(r"# For chapter (\d\d)", text)[1]].relative_to(ROOT)
        samples = re.search(r"with (\d+) samples a step", text)[1]
        nodes, gpus = map(int, re.search(r"# (\d+) × (\d+) GPUs", text).groups())
        arguments = [f"@{name}", "--global-batch-size", samples]
        yield RealCommand(name, nodes * gpus, str(script), arguments)


def commands_in(name, text):
    """Yield the commands in a text that start a training script."""
    for variable, value in re.findall(r'^(\w+)="(.*)"$', text, re.MULTILINE):
        text = text.replace(f"${variable}", value)
    # The model of an earlier run does not exist here, so drop the flag and the path that name this
    # model.
    text = re.sub(r"--[\w-]+ outputs/\S+", "", text.replace("\\\n", " "))
    # The words after the last script of a line are the arguments of this script.
    for script, words in re.findall(r"^(?:.*\s)?(\S+/train_llm\.py)(.*)$", text, re.M):
        yield RealCommand(name, gpus_of(text), script, shlex.split(words))


def gpus_of(text):
    """Return the number of GPUs that the commands in a text use.

    With --nodes, each node has eight GPUs. Without --nodes, torchrun uses eight, and a plain
    command uses one.
    """
    if nodes := re.search(r"--nodes (\d+)", text):
        return 8 * int(nodes[1])
    return 8 if "torchrun" in text else 1
