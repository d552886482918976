"""Run the commands whose output a README shows; keep what they print, and draw, under docs.

Here:  make samples                       all of them
       python tools/samples.py 02-run     those of these names
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from chapters import ROOT
from readme import commands, script_of, workplace

SAMPLES = ROOT / "docs/samples"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}


def run(block, folder, timeout=None):
    """Run a block in a copy of the repository; return its exit status and all that it printed."""
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
        text=True,
        timeout=timeout,
    )
    return done.returncode, done.stdout


def main():
    """Write docs/samples anew."""
    wanted = sys.argv[1:]
    for block in commands():
        if not block.sample or (wanted and block.sample not in wanted):
            continue
        print(f"{block.name}: {block.sample}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            status, output = run(block, folder)
            for picture in Path(folder).glob("outputs/*.png"):
                shutil.copy(picture, ROOT / "docs")
        if status:
            sys.exit(f"{output}\nfailed with status {status}: {block.text}")
        SAMPLES.mkdir(parents=True, exist_ok=True)
        (SAMPLES / f"{block.sample}.txt").write_text(output)


if __name__ == "__main__":
    main()
