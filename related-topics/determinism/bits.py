"""Compare runs bit by bit: a layout run twice, its resumed run, and chapter 01 in one process.

Here:  python related-topics/determinism/bits.py 01
All:   python related-topics/determinism/bits.py --output benchmarks/results/determinism.json

A run takes 20 steps with a chapter's script on the CPU, in new processes. Two runs are identical if
all losses, gradient norms and final weights have the same bits. Otherwise, the script prints the
largest difference between their losses.
"""

import argparse
import multiprocessing
import os
import runpy
import shutil
import sys
from itertools import chain
from pathlib import Path

# Import the packages of the ranks once; each rank is a fork of this process.
import datasets  # noqa: F401
import torch
import transformers  # noqa: F401
import wandb  # noqa: F401
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tools"), str(ROOT / "tools/maintain")]

from chapters import chapters  # noqa: E402
from harness import describe_machine, free_port, keep  # noqa: E402
from plot import fail, largest_difference, read_metrics  # noqa: E402

RUN = """--device cpu --precision fp32 --seq-length 64 --global-batch-size 8 --batch-size 8
    --num-steps 20 --log-every 1 --eval-every 10 --eval-samples 8
    --checkpoint-every 10 --keep-checkpoints 2""".split()
FORK, LIMIT = multiprocessing.get_context("fork"), 600  # seconds that a run may take
# A layout has a chapter, a number of ranks, the threads of each rank, and additional flags. All
# layouts are compared with the first layout, which is the norm.
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


def parse_args():
    """Parse and check the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("layouts", nargs="*", help=f"by default all: {', '.join(map(repr, LAYOUTS))}")
    add("--save-dir", type=Path, default=Path("outputs/determinism"), help="folder for the runs")
    add("--output", type=Path, help="JSON file for the machine and the results")
    args = parser.parse_args()
    if unknown := set(args.layouts) - set(LAYOUTS):
        fail(f"{unknown.pop()}: no such layout; choose from {', '.join(LAYOUTS)}")
    return args


def train(layout, run_dir):
    """Run the command of a layout; a run that was stopped resumes."""
    chapter, ranks, threads, flags = LAYOUTS[layout]
    command = [chapters()[chapter], *RUN, *flags.split()]
    command += ["--save-dir", run_dir.parent, "-e", run_dir.name]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    where |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    started = [
        FORK.Process(
            target=work, args=(command, where | {"RANK": rank, "LOCAL_RANK": rank}, threads)
        )
        for rank in range(ranks)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(LIMIT)
        # Kill a rank that exceeds the limit. The kill does nothing to a rank that has ended.
        process.kill()
        process.join()
    if failed := [process.exitcode for process in started if process.exitcode]:
        fail(f"{layout}: a rank ended with status {failed[0]}")


def work(command, variables, threads):
    """Run a script as a rank, in this process, as `python SCRIPT ARGUMENTS` would."""
    os.environ.update({name: str(value) for name, value in variables.items()})
    sys.argv = list(map(str, command))
    torch.set_num_threads(threads)
    sys.stdout = open(os.devnull, "w")
    runpy.run_path(sys.argv[0], run_name="__main__")


def stop_after_half(run_dir):
    """Make a finished run look as if it had been killed after the checkpoint of step 10."""
    shutil.rmtree(run_dir / "checkpoints/step-00000020")
    shutil.rmtree(run_dir / "model")
    (run_dir / "finished-20").unlink()


def result_of(run_dir):
    """Return the metrics and the final weights of a run."""
    files = sorted((run_dir / "model").glob("*.safetensors"))
    return read_metrics(run_dir), dict(chain(*(load_file(file).items() for file in files)))


def compare(one, other):
    """Compare two results: whether all bits are the same, and how far the losses differ at most."""
    measured = [
        [{name: row.get(name) for name in ("loss", "grad_norm", "val_loss")} for row in rows]
        for rows, _ in (one, other)
    ]
    weights = one[1].keys() == other[1].keys()
    weights = weights and all(one[1][name].equal(other[1][name]) for name in one[1])
    difference = largest_difference({"one": one[0], "other": other[0]})
    return {"identical": weights and measured[0] == measured[1], "difference": difference}


def told(comparison):
    """Return a comparison in one word: `identical`, or the largest difference of losses."""
    if comparison["identical"]:
        return "identical"
    return f"{comparison['difference']:.1e}"


def main():
    """Run each layout twice, and resume the second run; print the comparisons of each layout."""
    args, rows, norm = parse_args(), [], None
    for layout in dict.fromkeys([next(iter(LAYOUTS)), *(args.layouts or LAYOUTS)]):
        first, second = (args.save_dir / f"{layout}-{turn}" for turn in ("first", "second"))
        for run_dir in (first, second):
            shutil.rmtree(run_dir, ignore_errors=True)
            train(layout, run_dir)
        results = [result_of(first), result_of(second)]
        stop_after_half(second)
        train(layout, second)
        results.append(result_of(second))
        norm = norm or results[0]
        pairs = {"twice": results[:2], "resumed": results[::2], "norm": [norm, results[0]]}
        rows.append({"layout": layout} | {name: compare(*pair) for name, pair in pairs.items()})
        words = "  ".join(f"{name} {told(rows[-1][name])}" for name in pairs)
        print(f"{layout:20} {words}", flush=True)
        if args.output:
            keep(args.output, describe_machine(gpus=False), {"rows": rows})


if __name__ == "__main__":
    main()
