"""Run chapter 07's schedules with layers that only sleep, so that what remains is the bubble.

Here:  python benchmarks/bubble.py --output benchmarks/results/bubble.json --plot assets/bubble.png

A micro-batch's forward sleeps, on each rank, as long as its input gradients and its weight
gradients. Four ranks that sleep need no four cores.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from contenders import load
from fsdp import torchrun
from speed import describe_machine, in_rows

RANKS = 4
RUNS = [("gpipe", 8), ("1f1b", 4), ("1f1b", 8), ("1f1b", 16), ("interleaved-1f1b", 8)]
COLORS = {"forward": "#5aa9a3", "input gradient": "#1f3b5c", "weight gradient": "#e08a3c"}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.2, help="of a rank's forward")
    parser.add_argument("--only", nargs="+", help="schedules")
    parser.add_argument("--output", type=Path, help="where to write the results")
    parser.add_argument("--plot", type=Path, help="where to draw those of eight micro-batches")
    return parser.parse_args()


class Inputs(torch.autograd.Function):
    """Sleeps for a layer in the forward, and for the gradient of its input in the backward."""

    @staticmethod
    def forward(ctx, hidden, work):
        ctx.work = work
        work("forward")
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.work("input gradient")
        return gradient.contiguous(), None  # to be sent


class Weights(torch.autograd.Function):
    """Sleeps in the backward for the gradient of a layer's weights."""

    @staticmethod
    def forward(ctx, weight, work):
        ctx.work = work
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.work("weight gradient")
        return gradient.sum(), None


class Stage(torch.nn.Module):
    """Has one weight; what it does, in `seconds`, is noted as [what, first, last second]."""

    def __init__(self, done):
        super().__init__()
        self.weight, self.done = torch.nn.Parameter(torch.ones(())), done

    def work(self, what):
        start = time.monotonic()
        time.sleep(self.seconds)
        self.done.append([what, start, time.monotonic()])

    def forward(self, received):
        if not received.is_floating_point():  # ids, for the first stage
            received = received.float()[..., None].requires_grad_()
        return Inputs.apply(received, self.work) + Weights.apply(self.weight, self.work)


def run(chapter, name, micro_batches, seconds):
    """Take two steps; return what this rank did in the last, by seconds since it began."""
    rank, done = dist.get_rank(), []
    _, passes = chapter.SCHEDULES[name]
    parts = {number: Stage(done) for number in range(rank, RANKS * passes, RANKS)}
    args = {"pipeline_schedule": name, "num_stages": RANKS * passes, "precision": "fp32"}
    args |= {"accumulation": micro_batches, "micro_batch_size": 1, "seq_length": 2}
    args = SimpleNamespace(**args, tensor_parallel_size=1)
    loss = lambda hidden, ids: hidden.sum()  # noqa: E731
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=1), loss_function=loss)
    schedule = chapter.build_schedule(args, model, parts, torch.device("cpu"), dist.group.WORLD)
    batch = torch.zeros(micro_batches, 2, dtype=torch.int64)
    for number in range(2):  # in the first, which takes no time, ranks connect
        for part in parts.values():
            part.seconds = seconds / passes if number else 0.0
        done.clear()
        dist.barrier()
        start = time.monotonic()
        schedule.step(batch, target=batch, losses=[], return_outputs=False)
        taken = time.monotonic() - start
    return taken, [[what, first - start, last - start] for what, first, last in done]


def most_in_flight(events, passes):
    """Return how many micro-batches a rank had to keep activations of, at most, at once."""
    changes = [(first, 1) for what, first, _ in events if what == "forward"]
    changes += [(last, -1) for what, _, last in events if what == "weight gradient"]
    kept, most = 0, 0
    for _, change in sorted(changes):
        kept += change
        most = max(most, kept)
    return most / passes


def run_on_this_rank():
    """Run all schedules; on rank 0, write down what all ranks did."""
    seconds, output, *only = sys.argv[2:]
    dist.init_process_group("gloo")
    chapter, rows = load("07"), []
    for name, micro_batches in RUNS:
        if only and name not in only:
            continue
        found = [None] * RANKS
        dist.all_gather_object(found, run(chapter, name, micro_batches, float(seconds)))
        taken, passes = max(taken for taken, _ in found), chapter.SCHEDULES[name][1]
        events = [rank for _, rank in found]
        row = {"schedule": name, "micro_batches": micro_batches, "passes": passes}
        row |= {"bubble": 1 - 3 * micro_batches * float(seconds) / taken}
        turns = passes * micro_batches
        row |= {"formula": (RANKS - 1) / (turns + RANKS - 1)}
        row |= {"in flight": [most_in_flight(rank, passes) for rank in events]}
        rounded = [[[w, round(a, 3), round(b, 3)] for w, a, b in rank] for rank in events]
        rows.append(row | {"events": rounded if micro_batches == 8 else []})
    if dist.get_rank() == 0:
        Path(output).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def draw(rows, path):
    """Write a picture of what each rank does in a step, schedule by schedule."""
    rows = [row for row in rows if row["events"]]
    figure = Figure(figsize=(8.3, 5.2), dpi=90, layout="constrained")
    all_axes = figure.subplots(len(rows), sharex=True, squeeze=False)[:, 0]
    for axes, row in zip(all_axes, rows, strict=True):
        for rank, events in enumerate(row["events"]):
            for name, color in COLORS.items():
                bars = [(first, last - first) for what, first, last in events if what == name]
                edge = {"edgecolor": "white", "linewidth": 0.5}
                axes.broken_barh(bars, (-rank - 0.42, 0.84), color=color, **edge)
        axes.set_yticks(range(0, -RANKS, -1), [f"rank {rank}" for rank in range(RANKS)], fontsize=7)
        axes.set_title(f"{row['schedule']}: idle {row['bubble']:.0%}", loc="left", fontsize=9)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    all_axes[-1].set_xlabel("seconds")
    handles = [Patch(color=color, label=name) for name, color in COLORS.items()]
    figure.legend(handles=handles, ncols=3, loc="outside upper right", frameon=False, fontsize=8)
    figure.savefig(path)


def main():
    """Run everything on ranks of its own; write and draw the results."""
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        command = [Path(__file__).resolve(), "--on-this-rank", args.seconds, path]
        done = torchrun(RANKS, [*command, *(args.only or [])], folder)
        if done.returncode:
            sys.exit(done.stderr)
        rows = json.loads(path.read_text())
    for row in rows:
        told = f"idle {row['bubble']:.3f}, formula {row['formula']:.3f}"
        print(f"{row['schedule']}, {row['micro_batches']} micro-batches: {told}", row["in flight"])
    if args.output:
        result = {"machine": describe_machine(), "seconds": args.seconds, "rows": rows}
        args.output.write_text(f"{in_rows(result)}\n")
    if args.plot:
        draw(rows, args.plot)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--on-this-rank"]:
        run_on_this_rank()
    else:
        main()
