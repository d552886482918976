"""Break runs on purpose, let whats_wrong.py look, and note whether it names what broke, and where.

Here:    python benchmarks/faults.py --output benchmarks/results/faults-cpu-2cores.json
Closer:  python benchmarks/faults.py --only hang-data bit-flip --seeds 1

Every fault of diagnosing-errors/train_llm.py begins on a rank and in a step that the seed chooses;
inject.py breaks scripts from outside, which are not changed: one that knows nothing of this guide,
and chapters 02 and 04. watched.py runs them all. whats_wrong.py is asked until it finds anything,
and its first finding counts. Of healthy runs, some of them slow, it is to find nothing.
"""

import json
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from harness import describe_machine, free_port, keep, parser_of

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "diagnosing-errors"
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
INSIDE = ("wrong-shape", "wrong-order", "same-data", "loss-spike", "corrupt-checkpoint")
FLAGS = """--device cpu --precision fp32 -s 64 --global-batch-size 9 -b 3 --num-steps 5000
    --log-every 5 --checkpoint-every 10 --eval-every 1000 --eval-samples 9""".split()
SCRIPTS = {  # and on how many ranks, with which flags, which faults
    "diagnosing-errors/train_llm.py": (3, [*FLAGS, "--dist-timeout", "30"], list(KINDS)),
    "diagnosing-errors/stranger.py": (
        2, [], [name for name, kind in KINDS.items() if kind and name not in INSIDE] + ["healthy"]
    ),
    "02-ddp/train_llm.py": (
        3, FLAGS, ["crash", "stop-process", "slow-compute", "nan-gradient", "healthy"]
    ),
    "04-fsdp/train_llm.py": (
        3, FLAGS, ["oom-kill", "stop-process", "slow-compute", "nan-gradient", "healthy"]
    ),
}  # fmt: skip
STEP = ("crash", "segfault", "oom-device", "stop-process", "slow-compute")  # where inject.py does
LINES = {  # of scripts, and of chapters: the code of the line that the verdict is to name
    "diagnosing-errors/train_llm.py": {
        "crash": "raise RuntimeError",
        "segfault": "ctypes.string_at",
        "oom-device": "torch.empty(2**50",
        "stop-process": "signal.SIGSTOP",
        "hang-data": "time.sleep(1e6)",
        "wrong-shape": "dist.all_reduce(torch.zeros(1000",
        "wrong-order": "dist.broadcast(loss, 0)",
        "slow-compute": "time.sleep(1.0)",
        "slow-data": "time.sleep(1)",
    },
    "diagnosing-errors/stranger.py": {
        **dict.fromkeys(STEP, "opt.step()"),
        **dict.fromkeys(["hang-data", "slow-data"], "enumerate(loader)"),
        "skip-collective": "dist.all_reduce(mean",
    },
    "": dict.fromkeys(STEP, "optimizer.step()"),
}
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
PATIENCE = 60  # seconds until a verdict must be there


def parse_args():
    """Return the arguments."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=KINDS, default=list(KINDS), help="faults")
    add("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), help="what is broken")
    add("--seeds", type=int, default=2, help="runs of each, each with another rank and step")
    add("--healthy", type=int, default=5, help="runs of each kind in which nothing is wrong")
    return parser.parse_args()


def chosen(script, fault, seed):
    """Return a rank and a step, other ones for other seeds."""
    rng = random.Random(f"{script} {fault} {seed}")
    first = 1 if fault == "same-data" else 0  # whose data are rank 0's anyway
    return rng.randrange(first, SCRIPTS[script][0]), rng.randrange(21, 30)  # after two checkpoints


def words_of(script, fault, rank, step):
    """Return what to tell watched.py to run."""
    _, flags, _ = SCRIPTS[script]
    words = [str(ROOT / script), *flags]
    where = f"{fault}@rank{rank}:step{step}"
    if fault == "slow but healthy":
        # all ranks are slow: two threads where there is one core, and all work in tiny pieces
        return [*words, "-b", "1", "--global-batch-size", "36", "-s", "128"]
    if fault == "corrupt-checkpoint":  # which only the next start will read, if none follows it
        return [*words, "--inject", where, f"hang-data@rank{rank}:step{step}"]
    if KINDS[fault] is None:
        return words
    if script.startswith("diagnosing-errors/train"):
        return [*words, "--inject", where]
    return [str(TOOLS / "inject.py"), where, *words]


@contextmanager
def started(script, folder, words):
    """Give the process of torchrun with the script's ranks; in the end kill them all."""
    limit = "ulimit -S -n 1024 && exec "  # as many open files as on most machines
    command = [sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1"]
    command += ["--nproc-per-node", SCRIPTS[script][0], "--master-port", free_port()]
    command += [TOOLS / "watched.py", "--into", folder / "run", "--stall", "15", *words]
    if "stranger" not in script:
        command += ["--save-dir", folder, "-e", "run"]
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


def remember(process, family):
    """Add to the family what torchrun has started: it may die before they do."""
    with suppress(psutil.NoSuchProcess):
        head = psutil.Process(process.pid)
        family |= {member.pid: member for member in (head, *head.children(recursive=True))}


def ask(folder, *flags):
    """Return what whats_wrong.py prints of a run."""
    command = [sys.executable, TOOLS / "whats_wrong.py", folder / "run"]
    done = subprocess.run([*command, *flags], check=False, text=True, timeout=90, **PIPES)
    return done.stdout


def wait_for(what, seconds, process, family):
    """Return `what()` as soon as it is true, and when that was; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        remember(process, family)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what.__name__} after {seconds} s")
        time.sleep(0.2)
    return found, time.monotonic()


def break_and_find(script, fault, seed):
    """Run with a fault; return what was said about it, and after how many seconds."""
    rank, step = chosen(script, fault, seed)
    row = {"script": script, "fault": fault, "rank": rank, "step": step}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = words_of(script, fault, rank, step)
        if fault == "corrupt-checkpoint":
            with started(script, folder, words) as run:
                wait_for(lambda: broken(folder), 4 * PATIENCE, *run)
                time.sleep(0.5)
            words = words_of(script, "healthy", rank, step)
        with started(script, folder, words) as run:
            if KINDS[fault] is None:
                return row | find_nothing(folder, *run)
            return row | find(row, folder, *run)


def broken(folder, words="breaks in step"):
    """Return whether the fault has begun, of which the log tells."""
    return words in (folder / "log").read_text()


def find(row, folder, process, family):
    """Return the first finding, how long after the fault it was there, and whether it is right."""
    fault = row["fault"]

    def verdict():
        said = json.loads(ask(folder, "--json"))
        return said if said["kind"] not in ("healthy", "unknown", "slow-but-healthy") else None

    begins = "cannot be read" if fault == "corrupt-checkpoint" else "breaks in step"
    _, begun = wait_for(lambda: broken(folder, begins), 4 * PATIENCE, process, family)
    found = {"verdict": None, "said": "nothing", "right": False}
    with suppress(TimeoutError):
        said, known = wait_for(verdict, PATIENCE, process, family)
        found |= {"verdict": known - begun, "said": said["kind"], "ranks": said["ranks"]}
        found |= {"reason": without_paths(said["reason"], folder), "sure": said["sure"]}
        found["right"] = said["kind"] == KINDS[fault] and set(said["ranks"]) == culprits(row)
        found["right"] = found["right"] and line_of(row) in said["reason"]
    log = [without_paths(line, folder) for line in symptoms(folder / "log")]
    return found | {"log": log, "text": without_paths(ask(folder), folder)}


def without_paths(text, folder):
    """Return text without the paths of this machine."""
    return text.replace(str(folder), "outputs").replace(f"{ROOT}/", "")


def line_of(row):
    """Return what of a verdict says the line: file:number; nothing where no line is to blame."""
    code = LINES.get(row["script"], LINES[""]).get(row["fault"])
    lines = (ROOT / row["script"]).read_text().splitlines()
    numbers = [number for number, line in enumerate(lines, 1) if code and code in line]
    return f"{Path(row['script']).name}:{numbers[0]} " if numbers else ""


def symptoms(log):
    """Return the lines by which the ranks, and torchrun, say what is wrong; without repetitions."""
    telling = r".*breaks in step|warning|train_llm.py: error|(\[rank\d\]: )?\w*(Error|Exception)\b"
    telling += r"|  (rank|exitcode) +:"
    lines = [line[:160] for line in log.read_text().splitlines() if re.match(telling, line)]
    return list(dict.fromkeys(lines))


def culprits(row):
    """Return the ranks that a verdict is to name."""
    if row["fault"] == "corrupt-checkpoint":  # all ranks read it
        return set()
    two = SCRIPTS[row["script"]][0] == 2 and row["fault"] == "bit-flip"  # and nobody can tell whose
    return {0, row["rank"]} if row["fault"] == "same-data" else {0, 1} if two else {row["rank"]}


def find_nothing(folder, process, family):
    """Return whether the tool left a healthy run alone, asked five times, and what it said."""

    def trains():
        beats = [path.read_text() for path in folder.glob("run/ranks/0000?.json")]
        return beats and not any('"step_seconds": null' in beat for beat in beats)

    wait_for(trains, 4 * PATIENCE, process, family)
    for _ in range(5):
        time.sleep(2)
        said = json.loads(ask(folder, "--json"))
        if said["kind"] not in ("healthy", "slow-but-healthy"):
            return {"right": False, "said": said["kind"], "reason": said["reason"]}
    return {"right": True, "said": "nothing"}


def summary(rows):
    """Return in words how often the tool was right, and how fast."""
    text = f"{sum(row['right'] for row in rows)} of {len(rows)} right"
    if times := [row["verdict"] for row in rows if row.get("verdict") is not None]:
        text += f", after {statistics.median(times):.0f} s"
    wrong = [row for row in rows if not row["right"]]
    return text + "".join(f"; said {row['said']} {row.get('ranks')}" for row in wrong)


def main():
    """Break each run, print what was found, keep it."""
    args = parse_args()
    machine = describe_machine()
    rows = []
    for script in args.scripts:
        for fault in (fault for fault in SCRIPTS[script][2] if fault in args.only):
            runs = range(args.seeds if KINDS[fault] else args.healthy)
            mine = [break_and_find(script, fault, seed) for seed in runs]
            print(f"{script:32} {fault:20} {summary(mine)}", flush=True)
            rows += mine
            keep(args.output, machine, {"rows": rows})
    sys.exit(not all(row["right"] for row in rows))


if __name__ == "__main__":
    main()
