"""Let every layout of chapters 04 to 08 continue a run of another's, along one curve.

Here:  python benchmarks/exam.py --output benchmarks/results/exam.json

A run changes its layout every few steps, in an order that a seed draws. All that it logs, losses,
gradient norms and validation losses, is compared with a run of chapter 01 that never stopped.
"""

import json
import math
import random
import sys
import tempfile
from pathlib import Path

from harness import describe_machine, keep, parser_of, script_of
from on_ranks import make_model_folder, torchrun

TP, PP = "--tensor-parallel-size 2", "--pipeline-parallel-size 2"
CP, ULYSSES = "--context-parallel-size 2", "--context-parallel-style ulysses"
LAYOUTS = {  # chapter, ranks, flags; of the ranks, those that no flag takes are data-parallel
    "04": ("04", 2, ""),
    "05": ("05", 2, "--cpu-offload --recompute full"),
    "dp2": ("08", 2, ""),
    "tp2": ("08", 2, TP),
    "pp2": ("08", 2, PP),
    "cp2": ("08", 2, CP),
    "dp2 × tp2": ("08", 4, TP),
    "dp2 × pp2": ("08", 4, PP),
    "dp2 × cp2": ("08", 4, f"{CP} {ULYSSES}"),
    "tp2 × pp2": ("08", 4, f"{TP} {PP}"),
    "tp2 × cp2": ("08", 4, f"{TP} {CP}"),
    "pp2 × cp2": ("08", 4, f"{PP} {CP} {ULYSSES}"),
    "dp2 × tp2 × pp2": ("08", 8, f"{TP} {PP}"),
    "tp2 × pp2 × cp2": ("08", 8, f"{TP} {PP} {CP}"),
}
COMMON = "--device cpu --precision fp32 --seq-length 64 --global-batch-size 8 --batch-size 2 "
COMMON += "--log-every 1 --eval-samples 8 --lr 0.03 --warmup-steps 1000"  # it rises all the time
WITHIN = 1e-5
NAMES = ("loss", "grad_norm", "val_loss")


def parse_args():
    """Return the arguments."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=2, help="that each layout takes")
    parser.add_argument("--seed", type=int, default=0, help="for the order")
    parser.add_argument("--only", nargs="+", choices=LAYOUTS, help="these, in this order")
    return parser.parse_args()


def order_of(seed):
    """Return all layouts in a random order; it begins and ends with the same one."""
    names = list(LAYOUTS)
    random.Random(seed).shuffle(names)
    return [*names, names[0]]


def train(folder, name, chapter, ranks, flags):
    """Train on so many ranks; return what was printed."""
    command = [script_of(chapter), "--save-dir", folder, "-e", name, *flags.split()]
    done = torchrun(ranks, command, folder)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\n{chapter} {flags} has failed")
    return done.stdout


def rows_of(folder):
    """Return what a run has logged, by step."""
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def distance(whole, rows):
    """Return the largest difference of what some steps have logged, or infinity if one is not."""
    pairs = [(whole[n].get(name), row.get(name)) for n, row in rows.items() for name in NAMES]
    pairs = [pair for pair in pairs if pair != (None, None)]
    return max(math.inf if None in pair else abs(pair[0] - pair[1]) for pair in pairs)


def hops(folder, order, steps):
    """Let one layout after another continue the run; yield a row for each."""
    model = make_model_folder(f"{folder}/model", 4, 64, heads=8, kv=4)
    every = f"--checkpoint-every {steps} --eval-every {steps}"
    train(folder, "whole", "01", 1, f"-m {model} {COMMON} {every} --num-steps {steps * len(order)}")
    whole, before = rows_of(f"{folder}/whole"), "nothing"
    for number, name in enumerate(order):
        first, last = number * steps, (number + 1) * steps
        chapter, ranks, flags = LAYOUTS[name]
        flags = f"-m {model} {COMMON} {every} --num-steps {last} {flags}"
        told = train(folder, "run", chapter, ranks, flags)
        if number and f"step-{first:08}\n" not in told.partition("continuing from")[2]:
            sys.exit(f"{told}\n{name} has not continued from step {first}")
        rows = {n: row for n, row in rows_of(f"{folder}/run").items() if first < n <= last}
        found = distance(whole, rows) if len(rows) == steps else math.inf
        row = {"from": before, "to": name, "chapter": chapter, "ranks": ranks}
        yield row | {"steps": [first + 1, last], "difference": found, "loss": rows[last]["loss"]}
        before = name


def main():
    """Take the exam; the exit status says whether all hops stay on the curve."""
    args, rows = parse_args(), []
    with tempfile.TemporaryDirectory() as folder:
        for row in hops(folder, args.only or order_of(args.seed), args.steps):
            rows.append(row)
            told = f"{row['from']} -> {row['to']} on {row['ranks']} ranks, steps {row['steps']}"
            print(f"{told}: largest difference {row['difference']:.1e}", flush=True)
    keep(args.output, describe_machine(), {"seed": args.seed, "rows": rows})
    sys.exit(any(row["difference"] > WITHIN for row in rows))


if __name__ == "__main__":
    main()
