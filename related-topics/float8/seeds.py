"""Train a small Llama with several seeds, and compare the losses in float8, bf16 and float32.

Here:  python related-topics/float8/seeds.py --seeds 1
Ours:  python related-topics/float8/seeds.py --seeds 6 --output benchmarks/results/float8.json

Each run trains for 20 steps of 512 tokens, on 1, 2 or 4 ranks with CPUs.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tools")]

from harness import benchmark, call, script_of  # noqa: E402
from plot import read_metrics  # noqa: E402

SETTINGS = """--device cpu --seq-length 64 --global-batch-size 8 --num-steps 20 --log-every 1
    --eval-every 20 --eval-samples 64 --checkpoint-every 20"""
PRECISIONS = {"float32": "--precision fp32", "bf16": "--precision bf16"}
PRECISIONS["float8"] = "--precision fp32 --float8"
# Each run has a precision and a number of ranks.
RUNS = [("float32", 1), ("bf16", 1), ("bf16", 2), ("float8", 1), ("float8", 2), ("float8", 4)]
# Each comparison has a name and pairs of runs.
COMPARISONS = {
    "1 rank and 2 or 4 ranks, float8": [(RUNS[3], RUNS[4]), (RUNS[3], RUNS[5])],
    "float8 and float32, 1 rank": [(RUNS[3], RUNS[0])],
    "1 rank and 2 ranks, bf16": [(RUNS[1], RUNS[2])],
}


def train(folder, cell):
    """Train with one (seed, (precision, ranks)), and return a row.

    The row has the last validation loss, and the losses and the gradient norms of all steps.
    """
    seed, (precision, ranks) = cell
    name = f"{precision}-{ranks}-{seed}"
    words = f"{SETTINGS} {PRECISIONS[precision]} --seed {seed} --save-dir {folder} -e {name}"
    call([script_of("float8"), *words.split()], ranks)
    # Leave out the row of step 0, because it has only a validation loss.
    steps = read_metrics(folder / name)[1:]
    row = {"seed": seed, "precision": precision, "ranks": ranks, "val_loss": steps[-1]["val_loss"]}
    print(f"{precision:7}  {ranks} ranks  seed {seed}  val_loss {row['val_loss']:.4f}", flush=True)
    return row | {name: [step[name] for step in steps] for name in ("loss", "grad_norm")}


def differences(rows):
    """Return, for each comparison, the largest differences between the losses of two runs.

    Each value is the maximum over all seeds and all pairs of runs in the comparison. "val_loss" is
    the difference between the last validation losses, "mean" is the mean difference of all steps,
    and "step" is the difference in a single step. "norm" is no maximum: it is the gradient norm of
    the pair's first run in the step with the difference "step".
    """
    runs = {(row["seed"], (row["precision"], row["ranks"])): row for row in rows}
    found = {}
    for name, pairs in COMPARISONS.items():
        apart = []
        for seed, (one, other) in product({row["seed"] for row in rows}, pairs):
            first, second = runs[seed, one], runs[seed, other]
            steps = [abs(a - b) for a, b in zip(first["loss"], second["loss"], strict=True)]
            val_loss = abs(first["val_loss"] - second["val_loss"])
            worst = max(zip(steps, first["grad_norm"], strict=True))
            apart.append((val_loss, fmean(steps), worst))
        val_loss, mean, (step, norm) = map(max, zip(*apart, strict=True))
        found[name] = {"val_loss": val_loss, "mean": mean, "step": step, "norm": norm}
    return found


def compare(args, folder):
    """Train all runs, two at a time; yield their rows, and print each comparison's differences."""
    rows = []
    with ThreadPoolExecutor(2) as pool:
        cells = product(range(args.seeds), RUNS)
        for row in pool.map(lambda cell: train(folder, cell), cells):
            rows.append(row)
            yield row
    for name, row in differences(rows).items():
        print(f"{name}: {', '.join(f'{key} {value:.4f}' for key, value in row.items())}")


def add_flags(add):
    """Declare the flag that only this script has."""
    add("--seeds", type=int, default=1, help="number of seeds")


if __name__ == "__main__":
    benchmark(__doc__, compare, add_flags, gpus=False)
