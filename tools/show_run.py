"""Draw the loss curves of a finished run; print its results, its files, and the next command."""

import argparse
import statistics
from pathlib import Path

from plot import draw, read_metrics, series


def parse_args():
    """Parse the folder of the run, and the batch size of the next command."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("run_folder", type=Path, help="such as outputs/02-ddp")
    add("--global-batch-size", type=int, default=32, help="that of the run")
    return parser.parse_args()


def main():
    """Show the run."""
    args = parse_args()
    run_folder, rows = args.run_folder, read_metrics(args.run_folder)
    draw({run_folder.name: rows}, run_folder / "loss.png")
    steps, losses = series(rows, "val_loss")
    _, speeds = series(rows, "tokens_per_second")
    losses = f"{losses[0]:.3f} -> {losses[-1]:.3f}  (step {steps[0]} -> step {steps[-1]})"
    print(f"  validation loss    {losses}")
    print(f"  tokens per second  {statistics.median(speeds):,.0f}  (median)")
    print(f"  newest checkpoint  {max(run_folder.glob('checkpoints/step-*'))}")
    print(f"  finished model     {run_folder / 'model'}")
    print(f"  metrics            {run_folder / 'metrics.jsonl'}")
    print(f"  loss curves        {run_folder / 'loss.png'}")
    print("\nNext, train the same model on one device, and see that the losses are the same:")
    batch = f" --global-batch-size {args.global_batch_size}" if args.global_batch_size != 32 else ""
    print(f"  .venv/bin/python 01-single-gpu/train_llm.py{batch}")


if __name__ == "__main__":
    main()
