"""Train a small Llama with AdamW and with Muon at several rates, each on the same tokens.

Here:  python related-topics/muon/sweep.py --steps 20 --lrs 4e-3
Ours:  python related-topics/muon/sweep.py --seeds 3 --output benchmarks/results/muon.json

AdamW trains in chapter 04, and Muon in this folder's script, each on one device. Every run has a
complete schedule: a warm-up of a tenth of its steps, and then the decay.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tools")]

from harness import Failed, benchmark, call, script_of  # noqa: E402
from plot import read_metrics, series  # noqa: E402

SCRIPTS = {"AdamW": script_of("04"), "Muon": script_of("muon")}
SETTINGS = """--device cpu --precision fp32 --seq-length 64 --global-batch-size 16 --batch-size 16
    --eval-samples 128 --checkpoint-every 1000000"""


def train(folder, steps, cell):
    """Train with the seed, the optimizer and the learning rate in `cell`; return a row of results.

    The row has the validation losses by step, or None if a gradient was not finite.
    """
    seed, optimizer, lr = cell
    name = f"{optimizer}-{lr:g}-{seed}"
    words = f"""{SETTINGS} --num-steps {steps} --warmup-steps {max(1, steps // 10)} --lr {lr}
        --seed {seed} --eval-every {max(1, steps // 10)} --save-dir {folder} -e {name}"""
    row = {"optimizer": optimizer, "lr": lr, "seed": seed, "val_losses": None}
    try:
        call([SCRIPTS[optimizer], *words.split()], ranks=1)
    except Failed as error:
        if "was not finite" not in str(error):
            raise
    else:
        row["val_losses"] = dict(zip(*series(read_metrics(folder / name), "val_loss"), strict=True))
    last = f"val_loss {row['val_losses'][steps]:.4f}" if row["val_losses"] else "diverged"
    print(f"{optimizer:5}  lr {lr:<6g}  seed {seed}  {last}", flush=True)
    return row


def curves_of(rows):
    """Return the validation losses, averaged over all seeds, by optimizer, rate and step.

    If the run of any seed diverged at a rate, this rate has None instead of the mean losses.
    """
    found = {}
    for row in rows:
        found.setdefault(row["optimizer"], {}).setdefault(row["lr"], []).append(row["val_losses"])
    for by_rate in found.values():
        for lr, runs in by_rate.items():
            by_rate[lr] = None if None in runs else mean_of(runs)
    return found


def mean_of(runs):
    """Return the mean of the validation losses of `runs`, by step."""
    return {int(step): fmean(run[step] for run in runs) for step in runs[0]}


def best_of(by_rate):
    """Return the rate with the lowest mean loss after the last step."""
    finished = {lr: curve[max(curve)] for lr, curve in by_rate.items() if curve}
    return min(finished, key=finished.get)


def last_losses(rows, optimizer, lr):
    """Return each seed's validation loss after the last step, or no losses if a seed diverged."""
    runs = [row["val_losses"] for row in rows if (row["optimizer"], row["lr"]) == (optimizer, lr)]
    return [] if None in runs else [run[max(run, key=int)] for run in runs]


def first_step(curve, loss):
    """Return the first step whose loss in the dictionary `curve` is at most `loss`."""
    return next(step for step in sorted(curve) if curve[step] <= loss)


def rates(args, folder):
    """Train with both optimizers at all rates, two runs at a time; yield a row for each run.

    At the end, print the best rate of each optimizer.
    """
    rows, cells = [], product(range(args.seeds), SCRIPTS, args.lrs)
    with ThreadPoolExecutor(2) as pool:
        for row in pool.map(lambda cell: train(folder, args.steps, cell), cells):
            rows.append(row)
            yield row
    for optimizer, by_rate in curves_of(rows).items():
        best = best_of(by_rate)
        print(f"{optimizer:5}  best rate {best:g}  val_loss {by_rate[best][args.steps]:.4f}")


def add_flags(add):
    """Declare the flags that only this script has."""
    lrs = [5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3]
    add("--lrs", nargs="+", type=float, default=lrs, help="peak learning rates")
    add("--steps", type=int, default=200, help="optimizer steps of each run")
    add("--seeds", type=int, default=1, help="runs to average per rate")


if __name__ == "__main__":
    benchmark(__doc__, rates, add_flags, gpus=False)
