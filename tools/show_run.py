"""Draw a run's loss curves; say what came out of it, where it is, and what to try next."""

import argparse
import statistics
from pathlib import Path

from plot import draw, read_metrics, series


def parse_args():
    """Return the run's folder, and the batch size that it takes to repeat the run."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("run_folder", type=Path, help="such as outputs/02-ddp")
    parser.add_argument(
        "--global-batch-size", type=int, default=32, help="that of the run, if it was not 32"
    )
    return parser.parse_args()


def results(rows):
    """Yield the numbers that tell how the training went."""
    steps, losses = series(rows, "val_loss")
    if steps:
        change = f"{losses[0]:.3f} -> {losses[-1]:.3f}"
        yield "validation loss", f"{change}  (step {steps[0]} -> step {steps[-1]})"
    if speeds := series(rows, "tokens_per_second")[1]:
        yield "tokens per second", f"{statistics.median(speeds):,.0f}  (median)"


def places(run_folder):
    """Yield what the run has written."""
    if checkpoints := sorted((run_folder / "checkpoints").glob("step-????????")):
        yield "newest checkpoint", checkpoints[-1]
    for name, path in [("finished model", "model"), ("metrics", "metrics.jsonl")]:
        yield name, run_folder / path if (run_folder / path).exists() else "not there yet"
    yield "loss curves", run_folder / "loss.png"


def main():
    """Show the run."""
    args = parse_args()
    rows = read_metrics(args.run_folder)
    draw({args.run_folder.name: rows}, args.run_folder / "loss.png")
    for name, value in (*results(rows), *places(args.run_folder)):
        print(f"  {name:<18} {value}")
    batch = f" --global-batch-size {args.global_batch_size}" if args.global_batch_size != 32 else ""
    print("\nNext, train the same on one device, and see that the losses are the same:")
    print(f"  .venv/bin/python 01-single-gpu/train_llm.py{batch}")


if __name__ == "__main__":
    main()
