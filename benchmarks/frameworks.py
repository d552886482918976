"""Compare the speed and the memory of chapters 03 and 04 with the same training in frameworks.

All:     python benchmarks/frameworks.py --output benchmarks/results/frameworks.json
Closer:  python benchmarks/frameworks.py --only 03 deepspeed

On two ranks, all runs train a Llama of 7 million weights, from the same initial weights and on the
same samples. The runs take turns, and a ratio compares two runs of the same round.
"""

import os
from itertools import permutations
from statistics import median

import harness
from on_ranks import BATCH, WINDOW, training_flags
from plot import read_metrics

RANKS = 2
# Each chapter or framework trains ROUNDS times for STEPS steps. The first WINDOW steps are a
# warm-up.
ROUNDS, STEPS = 3, 30
FRAMEWORKS = sorted((harness.ROOT / "alternative-frameworks").glob("*/train_llm.py"))
CONTENDERS = {name: harness.script_of(name) for name in ("03", "04")}
CONTENDERS |= {script.parent.name: script for script in FRAMEWORKS}
CONTENDERS["deepspeed-zero-3"] = CONTENDERS["deepspeed"]


def write_zero_3(path):
    """Write a configuration file for DeepSpeed's ZeRO-3."""
    line = f"--global-batch-size {BATCH} --batch-size {BATCH} --brief"
    line += f" --gpus-per-node {RANKS} --precision {harness.fast_precision()}"
    line += f" --write-config deepspeed {path}"
    harness.call([harness.PLANNER, *line.split()])


def run(name, folder, run_name):
    """Train with a contender; return its median tokens per second, and its peak memory in GiB."""
    flags = training_flags(folder, run_name, STEPS)
    if name == "deepspeed-zero-3":
        flags += ["--deepspeed-config", folder / "zero-3.json"]
    threads = os.environ.get("OMP_NUM_THREADS", max(1, os.cpu_count() // RANKS))
    settings = {"HF_HOME": f"{folder}/hf", "TOKENIZERS_PARALLELISM": "false"}
    harness.call([CONTENDERS[name], *flags], RANKS, threads, **settings)
    # Leave out the rows of the first WINDOW steps, which are a warm-up.
    rows = [row for row in read_metrics(folder / run_name) if row["step"] > WINDOW]
    return {
        "speed": median(row["tokens_per_second"] for row in rows),
        "memory": max(row["peak_memory_gib"] for row in rows),
    }


def compare(rounds):
    """Divide each contender's speed and memory by those of chapter 03, and by those of chapter 04.

    Return, for each of these quotients, the values in all rounds, and the median of the values.
    """
    found = {}
    # Compare only the contenders of the latest round, which has no contender that has failed.
    for name, chapter in permutations(rounds[-1], 2):
        for number in rounds[-1][name] if chapter in ("03", "04") else ():
            values = [runs[name][number] / runs[chapter][number] for runs in rounds]
            found[f"{name} / {chapter}, {number}"] = {"median": median(values), "rounds": values}
    return found


def frameworks(args, folder):
    """Train with one contender after the other; after each round, yield all results so far.

    If a contender fails, print the error, and leave this contender out of the later rounds.
    """
    write_zero_3(folder / "zero-3.json")
    names, rounds = list(args.only), []
    for number in range(1, ROUNDS + 1):
        rounds.append({})
        for name in list(names):
            try:
                rounds[-1][name] = run(name, folder, f"{name}-{number}")
            except harness.Failed as error:
                print(f"{error}\n{name}: failed; continuing without it", flush=True)
                names.remove(name)
            else:
                print(f"round {number}: {name} {rounds[-1][name]}", flush=True)
        yield {"ratios": compare(rounds), "rounds": rounds}


if __name__ == "__main__":
    harness.benchmark(__doc__, frameworks, cases=CONTENDERS, in_rows=False)
