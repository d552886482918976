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
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

import harness
from harness import ROOT

# A step of chapter 03 is a step of chapter 02.
CHAPTERS = ("02", "04", "05")
# Samples in a step, tokens in a sample, and steps in a measurement; the first one is a warm-up.
BATCH, SEQ_LENGTH, WINDOW = 8, 256, 10
ON_GPU = torch.cuda.is_available()
# The ratios, and the lowest value that is good enough.
RATIOS = {
    ("01", "bare"): 0.97,
    ("01 compiled", "bare compiled"): 0.97,
    ("01 compiled", "pure-bf16 compiled"): 1.0,
    ("02@2", "01"): None if ON_GPU else 0.9,
    ("02@2 compiled", "01 compiled"): None,
    ("04@2", "02@2"): None,
    ("04@2 compiled", "02@2 compiled"): None,
    ("05@2", "02@2"): None,
    ("05@2 compiled", "02@2 compiled"): None,
}


def contenders(ranks):
    """Return the name of each contender in contenders.py, its number of ranks, and its flags."""
    found = {}
    for suffix, flags in (("", []), (" compiled", ["--compile"])):
        for name in ("bare", "01"):
            found[name + suffix] = (name, 0, flags)
        for size in ranks:
            for name in CHAPTERS:
                found[f"{name}@{size}{suffix}"] = (name, size, flags)
    return found | {"pure-bf16 compiled": ("pure-bf16", 0, ["--compile"])}


def parse_args():
    """Parse the arguments."""
    parser = harness.parser_of(__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="how often each contender runs")
    add("--steps", type=int, default=30, help=f"of each run; the first {WINDOW} warm it up")
    add("--ranks", type=int, nargs="+", default=[2], help="of the chapters from 02 on")
    add("--only", nargs="+", help="contenders, such as 01 bare '02@2 compiled'")
    args = parser.parse_args()
    if args.rounds < 1 or args.steps < 2 * WINDOW or args.steps % WINDOW:
        parser.error(
            f"--steps {args.steps}: choose 2, 3, 4 ... times {WINDOW}, and 1 round or more"
        )
    if bad := [size for size in args.ranks if BATCH % size]:
        parser.error(f"--ranks {bad[0]}: a step's {BATCH} samples are not divisible by it")
    args.all = contenders(args.ranks)
    if unknown := sorted(set(args.only or ()) - set(args.all)):
        parser.error(f"--only {unknown[0]}: choose from {', '.join(args.all)}")
    return args


def run(contender, steps, folder, run_name):
    """Run a contender; return its metrics after the warm-up, and the seconds of other work."""
    name, size, flags = contender
    arguments = f"""
        --model-name {folder}/llama --seq-length {SEQ_LENGTH} --precision bf16
        --global-batch-size {BATCH} --batch-size {BATCH} --num-steps {steps} --log-every {WINDOW}
        --eval-samples {BATCH} --eval-every {steps} --checkpoint-every {steps}
        --save-dir {folder} --experiment-name {run_name}""".split()
    threads = max(1, os.cpu_count() // max(1, size))
    settings = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "HF_HOME": f"{folder}/hf",
        "BENCHMARK_STARTED": str(time.time()),
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [ROOT / "benchmarks/contenders.py", name, *flags, *arguments]
    command = harness.torchrun_command(size, command) if size else [sys.executable, *command]
    harness.call(command, **settings)
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
            "first step": median(seconds["first_step"][0] for seconds in timing[1:] or timing),
            "peak memory": median(one["rows"][-1]["peak_memory_gib"] for one in runs),
            "loss": loss[max(loss)],
            "loss difference": max(abs(loss[step] - reference[step]) for step in reference),
        }
        for work in ("evaluate", "save_checkpoint"):
            if last := [seconds[work][-1] for seconds in timing if seconds.get(work)]:
                found[name][work] = median(last)
    return found


def main():
    """Let the contenders take turns; print the ratios, and compare them with the goals."""
    args, machine = parse_args(), harness.describe_machine()
    asked = args.only or list(args.all)
    with tempfile.TemporaryDirectory() as folder:
        harness.make_7m_llama(f"{folder}/llama")

        def measure(name, number):
            where = f"{name.replace(' ', '-')}-{number}"
            return run(args.all[name], args.steps, folder, where)

        for rounds in harness.take_turns(asked, args.rounds, measure, speed_of):
            speeds = [{name: speed_of(one) for name, one in runs.items()} for runs in rounds]
            ratios = compare(speeds)
            results = {"ratios": ratios, "speeds": speeds, "details": details(rounds)}
            harness.keep(args.output, machine, results)
    for name in speeds[0]:
        print(f"{name:36} {harness.spread([by_name[name] for by_name in speeds], ',.0f')} tokens/s")
    for name, ratio in ratios.items():
        goal = f"   goal {ratio['goal']:.2f}" if ratio["goal"] else ""
        print(f"{name:36} {harness.spread(ratio['rounds'])}{goal}")
    failed = [name for name in asked if name not in speeds[0]]
    missed = [name for name, ratio in ratios.items() if ratio["median"] < (ratio["goal"] or 0)]
    texts = [f"failed: {', '.join(failed)}"] * bool(failed)
    texts += [f"missed: {', '.join(missed)}"] * bool(missed)
    sys.exit("; ".join(texts) or 0)


if __name__ == "__main__":
    main()
