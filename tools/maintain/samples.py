"""Run the commands whose output a README shows; keep the output and the plots under assets.

Here:  make samples                                all commands
       python tools/maintain/samples.py 02-run     the commands with these names
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from chapters import ROOT
from readme import Block, commands, shown

SAMPLES = ROOT / "assets/samples"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "COLUMNS": "100",
    # Keep DeepSpeed from printing a warning when Accelerate imports it.
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}",
}
# A block runs in the shell of the practice cluster if the block's needs begin with these words.
PRACTICE = "the cluster to practice on"


def run(block, folder, timeout=None, typed=""):
    """Run a block in a folder with links to the repository; return the exit status and output.

    `typed` is the text that the block reads from standard input.
    """
    for path in ROOT.iterdir():
        if path.name not in ("outputs", ".git"):
            Path(folder, path.name).symlink_to(path)
    # Keep make from installing the environment again, and keep bash from ending the block if `diff`
    # finds differences.
    text = re.sub(r"^make ", "make -o install ", re.sub(r"^diff ", "! diff ", block.text))
    # Drop make's environment variables, because they let a make inside of a make print the names of
    # folders.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        check=False,
        cwd=folder,
        env=inherited | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        input=typed,
        text=True,
        timeout=timeout,
    )
    return done.returncode, done.stdout


def practise(folder, timeout=None):
    """Start the practice cluster, and run the guide's blocks for this cluster in its shell.

    The cluster needs root. Return the exit status of `make cluster`, and the output of the shell.
    """
    text = "".join(block.text for block in commands() if block.needs.startswith(PRACTICE))
    status, output = run(Block("practice", "bash", "make cluster"), folder, timeout, text)
    # `make cluster` prints this line before it opens the shell, so keep only the text after it.
    _, last_line, shell = output.partition("ends the cluster and everything that runs on it.\n")
    assert last_line, output
    return status, shell


def main():
    """Write the samples that the arguments name; without arguments, write all samples."""
    known = {block.sample for block in commands() if block.sample}
    names = set(sys.argv[1:]) or known
    if unknown := names - known:
        sys.exit(f"samples.py: error: {min(unknown)}: no README has this sample; check its name")
    for block in commands():
        if block.sample not in names:
            continue
        print(f"{block.name}: {block.sample}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            is_practice = block.needs.startswith(PRACTICE)
            status, output = practise(folder) if is_practice else run(block, folder)
            page = (ROOT / block.name.partition(":")[0]).read_text()
            for picture in Path(folder).glob("outputs/*.png"):
                if f"assets/{picture.name})" in page:
                    shutil.copy(picture, ROOT / "assets")
        if status:
            sys.exit(f"{output}\n{block.name}: status {status}; mend this block:\n{block.text}")
        (SAMPLES / f"{block.sample}.txt").write_text(shown(block.sample, output))


if __name__ == "__main__":
    main()
