"""Train a small Llama with several batch sizes and rates, each on the same number of tokens.

Here:  python related-topics/batch-size-and-lr/sweep.py --samples 256 --batch-sizes 8 32 --lrs 4e-3
Ours:  python related-topics/batch-size-and-lr/sweep.py --seeds 3 \
           --output benchmarks/results/batch-size-and-lr.json

The script trains chapter 01 with each batch size at each rate. Then three rules scale the best rate
of the smallest batch size to the other batch sizes, and the script trains at these rates, too.
"""

import sys
from itertools import product
from pathlib import Path
from statistics import fmean

import datasets
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tools")]

from harness import benchmark, load  # noqa: E402
from plot import fail  # noqa: E402

# These settings make the built-in model `tiny` smaller.
MODEL = "hidden_size=64 intermediate_size=176 num_hidden_layers=2 head_dim=16"
# Map each rule to a power. For a batch n times as large as the smallest batch, the rule multiplies
# the best rate of the smallest batch by n ** power.
RULES = {"the same rate": 0, "square root": 0.5, "linear": 1}


def train(samples, batch, lr, seed):
    """Train like chapter 01; return the final validation loss, or None if the run diverged."""
    chapter, steps = load("01"), samples // batch
    settings = f"""--device cpu --precision fp32 --seq-length 64 --batch-size 64
        --global-batch-size {batch} --num-steps {steps} --warmup-steps {max(1, steps // 10)}
        --lr {lr} --seed {seed} --eval-samples 512 --config {MODEL}"""
    sys.argv = ["train_llm.py", *settings.split()]
    args, device = chapter.parse_args(), torch.device("cpu")
    tokenizer, config = chapter.build_tokenizer_and_config(args)
    train_set, held_out = chapter.build_data(args, tokenizer)
    model = chapter.build_model(args, config)
    optimizer = chapter.build_optimizer(args, model)
    for step in range(1, steps + 1):
        chapter.train_step(args, model, optimizer, train_set, step, device)
    return None if optimizer.found_inf else chapter.evaluate(args, model, held_out, device)


def sweep(args, cells):
    """Train with each seed and each pair of batch size and rate in `cells`; yield a row per run."""
    for seed, (batch, lr) in product(range(args.seeds), cells):
        row = {"samples": args.samples, "batch": batch, "lr": lr, "seed": seed}
        row["val_loss"] = train(**row)
        loss = "diverged" if row["val_loss"] is None else f"val_loss {row['val_loss']:.4f}"
        print(f"batch {batch:<4} steps {args.samples // batch:<5} lr {lr:<7g} {loss}", flush=True)
        yield row


def losses_of(rows):
    """Return the mean validation loss of all seeds, by batch size and rate.

    The mean is infinite if the run of a seed diverged. Leave out a rate that lacks the run of a
    seed.
    """
    found, num_seeds = {}, len({row["seed"] for row in rows})
    for row in sorted(rows, key=lambda row: (row["batch"], row["lr"])):
        loss = float("inf") if row["val_loss"] is None else row["val_loss"]
        found.setdefault(row["batch"], {}).setdefault(row["lr"], []).append(loss)
    return {
        batch: {lr: fmean(losses) for lr, losses in by_rate.items() if len(losses) == num_seeds}
        for batch, by_rate in found.items()
    }


def scaled(losses):
    """Scale the best rate of the smallest batch size to every batch size, by each rule.

    Return the scaled rates by rule and batch size.
    """
    base = min(losses)
    best = min(losses[base], key=losses[base].get)
    return {
        rule: {batch: float(f"{best * (batch / base) ** power:.3g}") for batch in losses}
        for rule, power in RULES.items()
    }


def batch_sizes(args, folder):
    """Train with each batch size at each rate and at the rules' rates; yield a row for each run.

    After all runs, print the mean loss at each rate of each rule, and only then yield the rows.
    """
    for size in args.batch_sizes:
        if size < 1 or args.samples % size:
            problem = f"not divisible by a batch of {size}"
            fail(f"--samples {args.samples}: {problem}; choose a multiple of {size}")
    datasets.disable_progress_bars()
    cells = list(product(sorted(args.batch_sizes), args.lrs))
    rows = list(sweep(args, cells))
    by_rule = scaled(losses_of(rows))
    scaled_cells = [cell for rates in by_rule.values() for cell in rates.items()]
    rows += sweep(args, [cell for cell in scaled_cells if cell not in cells])
    losses = losses_of(rows)
    for rule, rates in by_rule.items():
        words = "  ".join(f"{batch}: {losses[batch][lr]:.4f}" for batch, lr in rates.items())
        print(f"{rule:14} {words}")
    yield from rows


def add_flags(add):
    """Declare the flags that only this script has."""
    sizes, rates = [4, 16, 64, 256], [1e-3, 2e-3, 4e-3, 8e-3, 16e-3]
    add("--batch-sizes", nargs="+", type=int, default=sizes, help="samples per optimizer step")
    add("--lrs", nargs="+", type=float, default=rates, help="peak learning rates")
    add("--samples", type=int, default=4096, help="samples that each run trains on")
    add("--seeds", type=int, default=1, help="runs to average per batch size and rate")


if __name__ == "__main__":
    benchmark(__doc__, batch_sizes, add_flags)
