"""Train a small Llama with several batch sizes and rates, each on the same number of tokens.

Here:  python related-topics/batch-size-and-lr/sweep.py --samples 256 --batch-sizes 8 32 --lrs 4e-3
Ours:  python related-topics/batch-size-and-lr/sweep.py --seeds 3 \
           --output benchmarks/results/batch-size-and-lr.json --plot assets/batch-size-and-lr.png

The script trains chapter 01 with each batch size at each rate. Then three rules scale the best rate
of the smallest batch size to the other batch sizes, and the script trains at these rates, too. It
saves each result at once, and skips a run whose result has been saved.
"""

import argparse
import json
import sys
from itertools import product
from pathlib import Path
from statistics import fmean

import datasets
import torch
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tools")]

from contenders import load  # noqa: E402
from harness import describe_machine, keep  # noqa: E402
from plot import COLORS, fail  # noqa: E402

SEQ_LENGTH, HELD_OUT = 64, 512  # tokens per sample, samples
# These settings make the built-in model `tiny` smaller.
MODEL = "hidden_size=64 intermediate_size=176 num_hidden_layers=2 head_dim=16"
# Each rule has a power: a batch that is n times as large trains at n ** power times the rate.
RULES = {"the same rate": 0, "square root": 0.5, "linear": 1}


def parse_args():
    """Parse the arguments; fail unless --samples is a multiple of each batch size."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=formatter
    )
    add, rates = parser.add_argument, [1e-3, 2e-3, 4e-3, 8e-3, 16e-3]
    sizes = [4, 16, 64, 256]
    add("--batch-sizes", nargs="+", type=int, default=sizes, help="samples per optimizer step")
    add("--lrs", nargs="+", type=float, default=rates, help="learning rates")
    add("--samples", type=int, default=4096, help="samples that each run trains on")
    add("--seeds", type=int, default=1, help="runs to average per batch size and rate")
    add("--output", type=Path, help="file for results; outputs/sweep-SAMPLES.json if not given")
    add("--plot", type=Path, help="PNG file for a plot of the results")
    args = parser.parse_args()
    args.batch_sizes.sort()
    args.output = args.output or Path(f"outputs/sweep-{args.samples}.json")
    # Describe the machine before train() changes sys.argv, which is a part of the description.
    args.machine = describe_machine()
    for size in args.batch_sizes:
        if size < 1 or args.samples % size:
            fail(f"--samples {args.samples}: not divisible by a batch of {size}; choose a multiple")
    return args


# ---- runs ------------------------------------------------------------------------------------
def train(samples, batch, lr, seed):
    """Return the validation loss after a run of chapter 01, or None if it diverged."""
    chapter, steps = load("01"), samples // batch
    settings = f"""--device cpu --precision fp32 --seq-length {SEQ_LENGTH} --batch-size 64
        --global-batch-size {batch} --num-steps {steps} --warmup-steps {max(1, steps // 10)}
        --lr {lr} --seed {seed} --eval-samples {HELD_OUT} --config {MODEL}"""
    sys.argv = ["train_llm.py", *settings.split()]
    args, device = chapter.parse_args(), torch.device("cpu")
    tokenizer, config = chapter.build_tokenizer_and_config(args)
    train_set, held_out = chapter.build_data(args, tokenizer)
    model = chapter.build_model(args, config)
    optimizer = chapter.build_optimizer(args, model)
    for step in range(1, steps + 1):
        chapter.train_step(args, model, optimizer, train_set, step, device)
    return None if optimizer.found_inf else chapter.evaluate(args, model, held_out, device)


def sweep(args, cells, rows):
    """Train each (batch size, rate) pair that has no row yet, seed by seed; save each result."""
    for seed, (batch, lr) in product(range(args.seeds), cells):
        cell = {"samples": args.samples, "batch": batch, "lr": lr, "seed": seed}
        if any(cell.items() <= row.items() for row in rows):
            continue
        rows.append(cell | {"val_loss": train(**cell)})
        loss = rows[-1]["val_loss"]
        loss = "diverged" if loss is None else f"val_loss {loss:.4f}"
        print(f"batch {batch:<4} steps {args.samples // batch:<5} lr {lr:<7g} {loss}", flush=True)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        keep(args.output, args.machine, {"rows": rows})


# ---- results ---------------------------------------------------------------------------------
def asked(args, rows):
    """Return the rows of the requested batch sizes and seeds; the file may have more rows."""
    rows = [row for row in rows if row["batch"] in args.batch_sizes]
    return [row for row in rows if row["seed"] < args.seeds]


def losses_of(rows):
    """Return the mean validation loss by batch and rate, infinite where a seed diverged.

    Leave out a rate that was not trained with every seed.
    """
    found, seeds = {}, {row["seed"] for row in rows}
    for row in rows:
        loss = float("inf") if row["val_loss"] is None else row["val_loss"]
        found.setdefault(row["batch"], {}).setdefault(row["lr"], []).append(loss)
    return {
        batch: {lr: fmean(by_rate[lr]) for lr in sorted(by_rate) if len(by_rate[lr]) == len(seeds)}
        for batch, by_rate in sorted(found.items())
    }


def scaled(losses):
    """Return the rate of each rule for each batch: the smallest batch's best rate, scaled."""
    base = min(losses)
    best = min(losses[base], key=losses[base].get)
    return {
        rule: {batch: float(f"{best * (batch / base) ** power:.3g}") for batch in losses}
        for rule, power in RULES.items()
    }


def draw(losses, path):
    """Plot the loss over the rate for each batch size, and over the batch size for each rule."""
    figure = Figure(figsize=(9, 4), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    for color, (batch, by_rate) in zip(COLORS, losses.items(), strict=False):
        rates = [lr for lr in by_rate if by_rate[lr] < float("inf")]
        best = min(by_rate, key=by_rate.get)
        label = f"{batch} samples per step"
        left.plot(rates, [by_rate[lr] for lr in rates], color=color, marker=".", label=label)
        left.plot(best, by_rate[best], color=color, marker="o", ms=9)
    left.set(xscale="log", xlabel="learning rate", ylabel="validation loss, nats per token")
    left.set_title("each batch size has a rate of its own", fontsize=10)
    best = {batch: min(by_rate, key=by_rate.get) for batch, by_rate in losses.items()}
    styles = [("gray", "-"), (COLORS[4], "-"), ("black", "--"), ("black", ":")]
    curves = scaled(losses) | {"best of all rates": best}
    for (color, style), (rule, rates) in zip(styles, curves.items(), strict=True):
        values = [losses[batch][lr] for batch, lr in rates.items()]
        right.plot(list(rates), values, marker=".", color=color, ls=style, label=rule)
    right.set(xscale="log", xlabel="samples per step; all runs read the same number in total")
    right.set_xticks(list(losses), list(losses), minor=False)
    right.set_title("the smallest batch's best rate, scaled by three rules", fontsize=10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e6e6e6")
        axes.legend(frameon=False, fontsize=8)
    right.minorticks_off()
    figure.savefig(path)


def main():
    """Train all pairs, then at the rates of the rules; print each rule's losses."""
    args = parse_args()
    datasets.disable_progress_bars()
    rows = json.loads(args.output.read_text())["rows"] if args.output.exists() else []
    if any(row["samples"] != args.samples for row in rows):
        fail(f"{args.output} has runs on {rows[0]['samples']} samples; choose another --output")
    sweep(args, list(product(args.batch_sizes, args.lrs)), rows)
    by_rule = scaled(losses_of(asked(args, rows)))
    sweep(args, [cell for rates in by_rule.values() for cell in rates.items()], rows)
    losses = losses_of(asked(args, rows))
    for rule, rates in by_rule.items():
        words = "  ".join(f"{batch}: {losses[batch][lr]:.4f}" for batch, lr in rates.items())
        print(f"{rule:14} {words}")
    if args.plot:
        draw(losses, args.plot)
        print(f"drawn: {args.plot}")


if __name__ == "__main__":
    main()
