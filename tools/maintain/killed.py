"""Train chapter 01 without a kill, and again with two kills; pictures.py shows both loss curves.

Here:  make pictures      run this program, and write benchmarks/results/killed.json
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from chapters import ROOT, chapters

sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tools")]

import plot
from harness import describe_machine, keep

ARGUMENTS = "--device cpu --num-steps 100 --checkpoint-every 20 --log-every 1 --seq-length 64"
# Kill the run when it has logged step 34, resume it, and kill it again when it has logged step 73.
KILLED_AFTER = (34, 73)


def rows_of(folder):
    """Return the step and the loss of each row that the run in `folder` has logged."""
    path = Path(folder, "01-single-gpu/metrics.jsonl")
    rows = plot.rows_of(path) if path.exists() else []
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def train(folder, kill_after=None):
    """Start or resume the run in `folder`; return the steps and the losses that it then logs.

    If `kill_after` is given, kill the run when it has logged this step.
    """
    before = len(rows_of(folder))
    command = [sys.executable, chapters()["01"], *ARGUMENTS.split(), "--save-dir", folder]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while kill_after and rows_of(folder)[-1:] < [(kill_after,)]:
        time.sleep(0.02)
    if kill_after:
        run.kill()
    status = run.wait()
    assert kill_after or status == 0, f"chapter 01 ended with status {status}"
    return rows_of(folder)[before:]


def main():
    """Train a run without kills and a run with two kills; write the losses of both runs to a file.

    The command line names the file.
    """
    (output,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        straight = train(one)
        starts = [train(other, step) for step in (*KILLED_AFTER, None)]
    keep(ROOT / output, describe_machine(), {"straight": straight, "starts": starts})


if __name__ == "__main__":
    main()
