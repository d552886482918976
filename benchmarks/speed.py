"""Measure how fast the chapters train, next to a bare loop.

All:     python benchmarks/speed.py --output benchmarks/results/speed.json
Closer:  python benchmarks/speed.py --only 01 bare --rounds 5

Every contender trains the same Llama of 7 million weights from the same start on the same samples,
in processes of its own. They take turns, and a ratio is one of two speeds in the same round. If a
goal is missed or a contender fails, the exit status is 1.
"""

import json
import os
import sys
import time
from pathlib import Path
from statistics import median

import torch

import harness
from harness import ROOT
from on_ranks import make_7m_llama

# A step of chapter 03 is a step of chapter 02.
CHAPTERS = ("02", "04", "05")
RANKS = 2
# Samples in a step, tokens in a sample, and steps in a measurement; the first one is a warm-up.
BATCH, SEQ_LENGTH, WINDOW = 8, 256, 10
# The name of each contender in contenders.py, its number of ranks, and its flags.
EAGER = {"bare": ("bare", 0, []), "01": ("01", 0, [])}
EAGER |= {f"{name}@{RANKS}": (name, RANKS, []) for name in CHAPTERS}
CONTENDERS = EAGER | {"pure-bf16 compiled": ("pure-bf16", 0, ["--compile"])}
CONTENDERS |= {
    f"{name} compiled": (script, ranks, ["--compile"]) for name, (script, ranks, _) in EAGER.items()
}
# The ratios, and the lowest value that is good enough.
RATIOS = {
    ("01", "bare"): 0.97,
    ("01 compiled", "bare compiled"): 0.97,
    ("01 compiled", "pure-bf16 compiled"): 1.0,
    ("02@2", "01"): None if torch.cuda.is_available() else 0.9,
}


def add_flags(add):
    """Declare the flags of benchmarks whose contenders take turns."""
    add("--rounds", type=int, default=3, help="how often each contender runs")
    lengths = range(2 * WINDOW, 100 * WINDOW, WINDOW)
    help_text = f"of each run, a multiple of {WINDOW}; the first {WINDOW} warm it up"
    add("--steps", type=int, default=30, choices=lengths, metavar="N", help=help_text)


def training_flags(folder, run_name, steps):
    """Return the flags of all runs whose speeds are compared."""
    return f"""
        --seq-length {SEQ_LENGTH} --precision {harness.fast_precision()}
        --global-batch-size {BATCH} --batch-size {BATCH} --num-steps {steps} --log-every {WINDOW}
        --eval-samples {BATCH} --eval-every {steps} --checkpoint-every {steps}
        --save-dir {folder} --experiment-name {run_name}""".split()


def run(contender, steps, folder, run_name):
    """Run a contender; return its metrics after the warm-up, and the seconds of other work."""
    name, ranks, flags = contender
    arguments = ["--model-name", f"{folder}/llama", *training_flags(folder, run_name, steps)]
    threads = max(1, os.cpu_count() // max(1, ranks))
    settings = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "HF_HOME": f"{folder}/hf",
        "BENCHMARK_STARTED": str(time.time()),
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [ROOT / "benchmarks/contenders.py", name, *flags, *arguments]
    harness.call(harness.launch_command(ranks, command), **settings)
    rows = map(json.loads, Path(folder, run_name, "metrics.jsonl").read_text().splitlines())
    # A step may have two rows, and the last one counts.
    last = {row["step"]: row for row in rows}
    timing = json.loads(Path(folder, run_name, "timing.json").read_text())
    return {"rows": [last[step] for step in sorted(last) if step >= WINDOW], "timing": timing}


def speed_of(one):
    """Return a run's tokens per second: the median of its windows after the warm-up."""
    return median(row["tokens_per_second"] for row in one["rows"] if row["step"] > WINDOW)


def compare(speeds):
    """Return the ratios of the contenders, in each round, with median and goal."""
    ratios = {}
    for (one, other), goal in RATIOS.items():
        if {one, other} <= speeds[0].keys():
            values = [by_name[one] / by_name[other] for by_name in speeds]
            ratios[f"{one} / {other}"] = {"median": median(values), "goal": goal, "rounds": values}
    return ratios


def details(rounds):
    """Return each contender's seconds, GiB and losses: medians over the rounds."""
    losses = {
        name: {row["step"]: row["loss"] for row in one["rows"]} for name, one in rounds[0].items()
    }
    reference = losses.get("01") or next(iter(losses.values()))
    found = {}
    for name, loss in losses.items():
        runs = [runs[name] for runs in rounds]
        timing = [one["timing"] for one in runs]
        found[name] = {
            # The first round fills the cache of compiled graphs.
            "first step": median(seconds["first_step"] for seconds in timing[1:] or timing),
            "peak memory": median(one["rows"][-1]["peak_memory_gib"] for one in runs),
            "loss": loss[max(loss)],
            "loss difference": max(abs(loss[step] - reference[step]) for step in reference),
            # A bare loop does not save.
            "save_checkpoint": median(seconds.get("save_checkpoint", 0) for seconds in timing),
        }
    return found


def speeds(args, folder):
    """Let the contenders take turns; compare the ratios of their speeds with the goals."""
    make_7m_llama(folder / "llama")

    def measure(name, number):
        run_name = f"{name.replace(' ', '-')}-{number}"
        return run(CONTENDERS[name], args.steps, folder, run_name)

    for rounds in harness.take_turns(args.only, args.rounds, measure, speed_of):
        by_round = [{name: speed_of(one) for name, one in runs.items()} for runs in rounds]
        ratios = compare(by_round)
        yield {"ratios": ratios, "speeds": by_round, "details": details(rounds)}
    for name, ratio in ratios.items():
        print(f"{name:36} {harness.spread(ratio['rounds'])}   goal {ratio['goal']}")
    problems = [f"failed: {name}" for name in args.only if name not in rounds[0]]
    problems += [
        f"missed: {name}" for name, row in ratios.items() if row["median"] < (row["goal"] or 0)
    ]
    sys.exit("; ".join(problems) or 0)


def add_all_flags(add):
    """Declare the flags."""
    add_flags(add)
    names = list(CONTENDERS)
    add("--only", nargs="+", choices=names, default=names, metavar="NAME", help="contenders")


if __name__ == "__main__":
    harness.benchmark(__doc__, speeds, add_all_flags)
