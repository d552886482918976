"""Run the commands whose output a README shows; keep what it shows, and what they
draw, under assets.

Here:  make samples                       all of them
       python tools/maintain/samples.py 02-run     those of these names
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from chapters import ROOT
from readme import Block, commands, script_of, shown, workplace

SAMPLES = ROOT / "assets/samples"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
# Accelerate imports DeepSpeed where both are installed, which says what it has found here
ENVIRONMENT |= {"DS_ACCELERATOR": "cpu"}


PRACTICE = "the cluster to practise on"  # how the needs of blocks begin that belong in its shell


def run(block, folder, timeout=None, typed=""):
    """Run a block in a copy of the repository; return its exit status and all that it printed.

    `typed` is what it reads.
    """
    path = f"{ROOT / '.venv/bin'}:{os.environ['PATH']}"
    # a make that is called by another says so in its output
    ours = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script_of(block)],
        check=False,
        cwd=workplace(folder),
        env=ours | ENVIRONMENT | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        input=typed,
        text=True,
        timeout=timeout,
    )
    return done.returncode, done.stdout


def practise(folder, timeout=None):
    """Make the practice cluster, type all that READMEs have for it, as `run` does; needs root."""
    blocks = [block.text for block in commands() if block.needs.startswith(PRACTICE)]
    status, output = run(
        Block("practice", "bash", "make cluster"), folder, timeout, "".join(blocks)
    )
    # `make cluster` prints this line before it opens the shell.
    _, last_line, shown = output.partition("ends the cluster and everything that runs on it.\n")
    assert last_line, output
    return status, shown


def main():
    """Write assets/samples anew."""
    wanted = sys.argv[1:]
    if unknown := set(wanted) - {block.sample for block in commands()}:
        sys.exit(f"samples.py: error: no block of a README has the sample {min(unknown)}")
    for block in commands():
        if not block.sample or (wanted and block.sample not in wanted):
            continue
        print(f"{block.name}: {block.sample}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            practice = block.needs.startswith(PRACTICE)
            status, output = practise(folder) if practice else run(block, folder)
            page = (ROOT / block.name.partition(":")[0]).read_text()
            for picture in Path(folder).glob("outputs/*.png"):
                if f"assets/{picture.name})" in page:
                    shutil.copy(picture, ROOT / "assets")
        if status:
            sys.exit(f"{output}\nfailed with status {status}: {block.text}")
        SAMPLES.mkdir(parents=True, exist_ok=True)
        (SAMPLES / f"{block.sample}.txt").write_text(shown(block.sample, output))


if __name__ == "__main__":
    main()
