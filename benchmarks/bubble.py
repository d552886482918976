"""Run chapter 07's schedules with layers that only sleep, to measure how long ranks are idle.

Here:  python benchmarks/bubble.py --output benchmarks/results/bubble.json

On each rank, a micro-batch sleeps three times for the same time: in its forward pass, for its input
gradients and for its weight gradients. Four ranks that sleep do not need four cores.
"""

import time
from itertools import accumulate
from types import SimpleNamespace

import torch
import torch.distributed as dist

from harness import benchmark, show
from on_ranks import on_ranks

# Each run has a schedule and a number of micro-batches. RANKS ranks run the schedule, and on each
# rank, the forward pass of a micro-batch takes SECONDS seconds.
RANKS, SECONDS = 4, 0.4
RUNS = [("gpipe", 8), ("1f1b", 4), ("1f1b", 8), ("1f1b", 16), ("interleaved-1f1b", 8)]


class Sleep(torch.autograd.Function):
    """Return a copy of a tensor; in the backward pass, call `work(name)`, which sleeps."""

    @staticmethod
    def forward(ctx, tensor, work, name):
        ctx.work, ctx.name = work, name
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.work(ctx.name)
        # A stage may send this gradient to a different rank, and torch sends only contiguous
        # tensors.
        return gradient.contiguous(), None, None


class Stage(torch.nn.Module):
    """Act as a pipeline stage that only sleeps; append [name, start, end] to `done` each time."""

    def __init__(self, done):
        super().__init__()
        self.weight, self.done = torch.nn.Parameter(torch.ones(())), done

    def work(self, name):
        start = time.monotonic()
        time.sleep(self.seconds)
        self.done.append([name, start, time.monotonic()])

    def forward(self, received):
        # Convert token ids, which the first stage receives, to numbers that can have gradients.
        if not received.is_floating_point():
            received = received.float()[..., None].requires_grad_()
        self.work("forward")
        hidden = Sleep.apply(received, self.work, "input gradient")
        return hidden + Sleep.apply(self.weight, self.work, "weight gradient")


def take_step(chapter, args, name, micro_batches):
    """Run two steps of the schedule `name`, and measure the second step.

    Return the duration of the second step in seconds, and the highest number of micro-batches that
    this rank had in flight at one time during this step.
    """
    rank, done = dist.get_rank(), []
    _, passes = chapter.SCHEDULES[name]
    stages = {number: Stage(done) for number in range(rank, RANKS * passes, RANKS)}
    args.pipeline_schedule, args.num_stages = name, RANKS * passes
    args.accumulation, args.micro_batch_size = micro_batches, 1
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=1), num_targets=1)
    model.loss_function = lambda hidden, ids: hidden.sum()
    schedule = chapter.build_schedule(args, model, stages, torch.device("cpu"), dist.group.WORLD)
    batch = torch.zeros(micro_batches, 2, dtype=torch.int64)
    # Run a first step without sleep, so that the ranks connect before the measured step.
    for pause in (0.0, SECONDS / passes):
        for stage in stages.values():
            stage.seconds = pause
        done.clear()
        dist.barrier()
        start = time.monotonic()
        schedule.step(batch, target=batch, losses=[], return_outputs=False)
        taken = time.monotonic() - start
    return taken, most_in_flight(done, passes)


def most_in_flight(events, passes):
    """Return the highest number of micro-batches whose activations a rank keeps at one time.

    A rank has `passes` stages. A micro-batch counts as 1 / `passes` for each of these stages that
    keeps its activations.
    """
    changes = [(first, 1) for work, first, _ in events if work == "forward"]
    changes += [(last, -1) for work, _, last in events if work == "weight gradient"]
    return max(accumulate(change for _, change in sorted(changes))) / passes


def measure(chapter, args, device):
    """Run each schedule of RUNS; return a row per run with the measured and the expected bubble."""
    rows = []
    for name, micro_batches in RUNS:
        found = [None] * RANKS
        dist.all_gather_object(found, take_step(chapter, args, name, micro_batches))
        slowest, passes = max(taken for taken, _ in found), chapter.SCHEDULES[name][1]
        row = {"schedule": name, "micro_batches": micro_batches, "passes": passes}
        row["bubble"] = 1 - 3 * micro_batches * SECONDS / slowest
        row["formula"] = (RANKS - 1) / (passes * micro_batches + RANKS - 1)
        rows.append(row | {"in flight": [in_flight for _, in_flight in found]})
    return rows


def bubble(args, folder):
    """Run the schedules of RUNS on RANKS ranks; print and yield a row of results for each run."""
    flags = f"--pipeline-parallel-size {RANKS} --num-steps 1 --precision fp32 --seq-length 2"
    for row in on_ranks(measure, "07", RANKS, folder, flags):
        show(row)
        yield row


if __name__ == "__main__":
    benchmark(__doc__, bubble)
