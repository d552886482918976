"""Compare runs bit by bit: two runs of a layout, a resumed run, and chapter 01 in one process.

Here:  python related-topics/determinism/bits.py 01
All:   python related-topics/determinism/bits.py --output benchmarks/results/determinism.json

A run trains a chapter's script for 20 steps on the CPU, in new processes. Two runs are identical if
all losses, gradient norms and final weights have the same bits. Otherwise, this program prints the
largest difference between their losses.
"""

import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tools")]

from harness import benchmark, call, script_of  # noqa: E402
from plot import largest_difference, read_metrics, series  # noqa: E402

RUN = """--device cpu --precision fp32 --seq-length 64 --global-batch-size 8 --batch-size 8
    --num-steps 20 --log-every 1 --eval-every 10 --eval-samples 8
    --checkpoint-every 10 --keep-checkpoints 2""".split()
# A layout has a chapter, a number of ranks, a number of threads per rank, and additional flags. The
# program compares each layout with the first layout.
LAYOUTS = {
    "01": ("01", 1, 1, ""),
    "01, 2 threads": ("01", 1, 2, ""),
    "01, --batch-size 4": ("01", 1, 1, "--batch-size 4"),
    "02, 1 rank": ("02", 1, 1, ""),
    "02, 2 ranks": ("02", 2, 1, ""),
    "02, 4 ranks": ("02", 4, 1, ""),
    "04, 2 ranks": ("04", 2, 1, ""),
    "04, 4 ranks": ("04", 4, 1, ""),
}


def train(layout, run_dir):
    """Train with a layout's chapter and flags; return the metrics and the final weights."""
    chapter, ranks, threads, flags = LAYOUTS[layout]
    command = [script_of(chapter), *RUN, *flags.split()]
    command += ["--save-dir", run_dir.parent, "-e", run_dir.name]
    call(command, ranks, threads)
    weights = {}
    for file in (run_dir / "model").glob("*.safetensors"):
        weights |= load_file(file)
    return read_metrics(run_dir), weights


def resume_from_half(layout, run_dir):
    """Delete what a run saved after step 10, resume the run, and return its results.

    The results are the metrics and the final weights, as train() returns them.
    """
    shutil.rmtree(run_dir / "checkpoints/step-00000020")
    shutil.rmtree(run_dir / "model")
    (run_dir / "finished-20").unlink()
    return train(layout, run_dir)


def compare(one, other):
    """Compare two results of train(); return a dictionary.

    `identical` is true if all losses, gradient norms and weights have the same bits. `difference`
    is the largest difference between losses.
    """
    (rows, weights), (other_rows, other_weights) = one, other
    names = ("loss", "grad_norm", "val_loss")
    identical = all(series(rows, name) == series(other_rows, name) for name in names)
    identical = identical and weights.keys() == other_weights.keys()
    identical = identical and all(weights[name].equal(other_weights[name]) for name in weights)
    difference = largest_difference({"one": rows, "other": other_rows})
    return {"identical": identical, "difference": difference}


def in_words(comparison):
    """Return the word `identical`, or the largest difference between losses as text."""
    return "identical" if comparison["identical"] else f"{comparison['difference']:.1e}"


def bits(args, folder):
    """Run each layout twice, and resume the second run; print and yield three comparisons."""
    norm = None
    for layout in dict.fromkeys(["01", *(args.layouts or LAYOUTS)]):
        first, second = (train(layout, folder / f"{layout}-{turn}") for turn in ("first", "second"))
        resumed = resume_from_half(layout, folder / f"{layout}-second")
        norm = norm or first
        pairs = {"twice": [first, second], "resumed": [first, resumed], "norm": [norm, first]}
        found = {name: compare(*pair) for name, pair in pairs.items()}
        words = "  ".join(f"{name} {in_words(comparison)}" for name, comparison in found.items())
        print(f"{layout:20} {words}", flush=True)
        yield {"layout": layout} | found


def add_flags(add):
    """Declare the arguments that only this script has."""
    add("layouts", nargs="*", choices=LAYOUTS, help="layouts to compare; by default all layouts")


if __name__ == "__main__":
    benchmark(__doc__, bits, add_flags, gpus=False)
