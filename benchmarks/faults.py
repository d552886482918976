"""Break runs on purpose, let the tools look, and note whether they name what broke, and where.

Here:    python benchmarks/faults.py --output benchmarks/results/faults-cpu-2cores.json
Closer:  python benchmarks/faults.py --only hang-data bit-flip --seeds 1

Each run has three ranks under torchrun. A fault of diagnosing-errors/train_llm.py begins at a step
and on a rank that the seed chooses. As soon as watch.py marks something, or a rank ends, the
symptom is there; whats_wrong.py is then asked until it has a verdict. Healthy runs, among them
slow ones, get the same questions, and the right answer is that nothing is wrong.
"""

import argparse
import json
import os
import random
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from speed import describe_machine

CHAPTER = Path(__file__).resolve().parent.parent / "diagnosing-errors"
KINDS = {  # from fault to the kind that the verdict is to name; None: nothing is wrong
    "crash": "crash",
    "segfault": "segfault",
    "oom-kill": "killed",
    "oom-device": "device-out-of-memory",
    "hang-data": "hang-in-data",
    "skip-collective": "skipped-collective",
    "wrong-shape": "mismatched-collective",
    "wrong-order": "mismatched-collective",
    "stop-process": "stopped-process",
    "slow-compute": "straggler",
    "slow-data": "straggler",
    "nan-data": "not-finite",
    "nan-gradient": "not-finite",
    "bit-flip": "replicas-differ",
    "same-data": "same-data",
    "loss-spike": "loss-spike",
    "memory-leak": "host-memory-leak",
    "file-leak": "too-many-open-files",
    "corrupt-checkpoint": "corrupt-checkpoint",
    "healthy": None,
    "slow but healthy": None,
}
RANKS = 3
RUN = """--device cpu --precision fp32 -s 64 --global-batch-size 9 -b 3 --num-steps 5000
    --log-every 5 --checkpoint-every 10 --eval-every 1000 --eval-samples 9
    --dist-timeout 30""".split()
PATIENCE = 60  # seconds until a fault must have shown itself, and again until the verdict


def parse_args():
    """Return the arguments."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=formatter)
    add = parser.add_argument
    add("--only", nargs="+", choices=KINDS, default=list(KINDS), help="faults")
    add("--seeds", type=int, default=3, help="runs of each, each with another rank and step")
    add("--healthy", type=int, default=10, help="runs of each kind in which nothing is wrong")
    add("--output", type=Path, help="a JSON file for the machine and all rows")
    return parser.parse_args()


def chosen(fault, seed):
    """Return a rank and a step, other ones for other seeds."""
    rng = random.Random(f"{fault} {seed}")
    first = 1 if fault == "same-data" else 0  # whose data are rank 0's anyway
    return rng.randrange(first, RANKS), rng.randrange(21, 30)  # there are two checkpoints by then


def flags_of(fault, rank, step):
    """Return what to tell the script."""
    if KINDS[fault]:
        return ["--inject", f"{fault}@rank{rank}:step{step}"]
    if fault == "healthy":
        return []
    # all ranks are slow: two threads where there is one core, and all work in tiny pieces
    return ["-b", "1", "--global-batch-size", "36", "-s", "128"]


@contextmanager
def started(folder, *flags):
    """Give the process of torchrun with three ranks; in the end kill them all."""
    limit = "ulimit -S -n 1024 && exec "  # as many open files as on most machines
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command += [CHAPTER / "train_llm.py", *RUN, "--save-dir", folder, "-e", "run", *flags]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            ["bash", "-c", limit + shlex.join(map(str, command))],
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=log,
            stderr=log,
        )
    family = {}
    try:
        yield process, family
    finally:
        remember(process, family)
        for member in family.values():
            with suppress(psutil.NoSuchProcess):
                member.send_signal(signal.SIGKILL)
        process.wait()


def free_port():
    """Return a port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def remember(process, family):
    """Add to the family what torchrun has started: it may die before they do."""
    with suppress(psutil.NoSuchProcess):
        head = psutil.Process(process.pid)
        family |= {member.pid: member for member in (head, *head.children(recursive=True))}


def tool(name, folder, *flags):
    """Return the exit status of a tool that looks at the run, and what it printed."""
    command = [sys.executable, CHAPTER / name, folder / "run", *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, check=False, text=True, timeout=60, **pipes)
    return done.returncode, done.stdout


def ask(folder):
    """Return the verdict of whats_wrong.py on a run."""
    _, printed = tool("whats_wrong.py", folder, "--json", "--log", folder / "log")
    return json.loads(printed)


def wait_for(what, seconds, process, family):
    """Return `what()` as soon as it is true, and when that was; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        remember(process, family)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what.__name__} after {seconds} s")
        time.sleep(0.2)
    return found, time.monotonic()


def break_and_find(fault, seed):
    """Run with a fault; return what the tools said about it, and after how many seconds."""
    rank, step = chosen(fault, seed)
    row = {"fault": fault, "rank": rank, "step": step}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = flags_of(fault, rank, step)
        if fault == "corrupt-checkpoint":  # which only the next start will read, if none follows it
            hang = ["--inject", f"hang-data@rank{rank}:step{step}"]
            with started(folder, *flags, *hang) as run:
                wait_for(lambda: broken(folder), 4 * PATIENCE, *run)
                time.sleep(0.5)
            flags = []
        with started(folder, *flags) as run:
            found = find_nothing if KINDS[fault] is None else find
            return row | found(fault, rank, folder, *run)


def broken(folder, words="breaks in step"):
    """Return whether the fault has begun, of which the log tells."""
    return words in (folder / "log").read_text()


def find(fault, rank, folder, process, family):
    """Return how long after the fault its symptom was there, and the verdict, and which it was."""
    log = folder / "log"

    def symptom():
        if "cannot be read" in log.read_text():
            return True
        return process.poll() is not None or tool("watch.py", folder, "--once")[0] == 1

    def verdict():
        said = ask(folder)
        return said if said["kind"] not in ("healthy", "unknown", "slow-but-healthy") else None

    begins = "cannot be read" if fault == "corrupt-checkpoint" else "breaks in step"
    _, begun = wait_for(lambda: broken(folder, begins), 4 * PATIENCE, process, family)
    row = {"symptom": None, "verdict": None, "said": "nothing", "right": False}
    with suppress(TimeoutError):
        _, seen = wait_for(symptom, PATIENCE, process, family)
        row["symptom"] = seen - begun
        said, known = wait_for(verdict, PATIENCE, process, family)
        row |= {"verdict": known - begun, "said": said["kind"], "ranks": said["ranks"]}
        row |= {"reason": said["reason"], "sure": said["sure"]}
        row |= {"log": symptoms(log), "text": text_of(folder)}
        named = set(said["ranks"]) == culprits(fault, rank)
        row["right"] = said["kind"] == KINDS[fault] and named
    return row


def symptoms(log):
    """Return the lines by which the ranks, and torchrun, say what is wrong; without repetitions."""
    telling = r"rank \d+ breaks|warning|train_llm.py: error|(\[rank\d\]: )?\w*(Error|Exception)\b"
    telling += r"|  (rank|exitcode) +:"
    lines = [line[:160] for line in log.read_text().splitlines() if re.match(telling, line)]
    return list(dict.fromkeys(lines))


def text_of(folder):
    """Return what whats_wrong.py prints for a person, without the paths of this machine."""
    _, text = tool("whats_wrong.py", folder, "--log", folder / "log")
    return text.replace(str(folder), "outputs").replace(f"{CHAPTER.parent}/", "")


def culprits(fault, rank):
    """Return the ranks that a verdict is to name."""
    if fault == "corrupt-checkpoint":  # all ranks read it
        return set()
    return {0, rank} if fault == "same-data" else {rank}


def find_nothing(fault, rank, folder, process, family):
    """Return whether the tools left a healthy run alone, asked five times, and what they said."""
    metrics = folder / "run/metrics.jsonl"

    def trains():
        return metrics.exists() and metrics.read_text().count("\n") > 2

    wait_for(trains, 4 * PATIENCE, process, family)
    row = {"right": True, "said": "nothing"}
    for _ in range(5):
        time.sleep(2)
        marked, seen = tool("watch.py", folder, "--once")
        said = ask(folder)
        if marked or said["kind"] not in ("healthy", "slow-but-healthy"):
            row = {"right": False, "said": said["kind"], "reason": said["reason"]}
            row |= {"watch": seen.replace(str(folder), "outputs") if marked else None}
    return row


def show(rows):
    """Print a line for each fault."""
    for fault in dict.fromkeys(row["fault"] for row in rows):
        mine = [row for row in rows if row["fault"] == fault]
        print(f"{fault:20} {summary(mine)}")


def summary(rows):
    """Return in words how often the tools were right, and how fast."""
    text = f"{sum(row['right'] for row in rows)} of {len(rows)} right"
    for what in ("symptom", "verdict"):
        if times := [row[what] for row in rows if row.get(what) is not None]:
            text += f", {what} after {statistics.median(times):.0f} s"
    wrong = [row for row in rows if not row["right"]]
    return text + "".join(f"; said {row['said']} {row.get('ranks')}" for row in wrong)


def main():
    """Break each run, print what was found, keep it."""
    args = parse_args()
    machine = describe_machine()
    rows = []
    for fault in args.only:
        for seed in range(args.seeds if KINDS[fault] else args.healthy):
            rows.append(break_and_find(fault, seed))
            print(json.dumps(rows[-1]), flush=True)
    show(rows)
    if args.output:
        args.output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
