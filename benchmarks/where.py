"""Measure what a step spends its time on: computation, waits for ranks or data, or the host.

Here:    python benchmarks/where.py --output benchmarks/results/where.json
Closer:  python benchmarks/where.py --only 02 --trace traces

Each chapter's own script trains a Llama of 7 million weights, and torch's profiler traces a window
of its steps. These four parts of the window add up to its length.

compute   kernels run; on a CPU, torch's operators in the thread that trains
exposed   communication that the rank waits for while it computes nothing
data      the rank waits for a batch
host      the rest: Python, launching kernels, logging

A fifth number, hidden, is the part of compute during which communication is in flight. On a GPU,
copies from and to the host count as compute. Each microsecond counts in only one of the four parts.
--trace keeps the traces for https://ui.perfetto.dev.
"""

import json
import math
import os
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import profile, record_function

import harness
from on_ranks import BATCH, WINDOW, training_flags

CHAPTERS = sorted(folder.name[:2] for folder in harness.ROOT.glob("0*-*"))
PARTS = ("compute", "exposed", "data", "host", "hidden")
OPERATORS = ("aten::", "fsdp::", "mkldnn::", "torch::distributed::reducer")


# ---- a rank's trace --------------------------------------------------------------------------


def parts_of(path):
    """Return the seconds of each part in PARTS and, under `step`, of the entire traced window."""
    events = [e for e in json.loads(Path(path).read_text())["traceEvents"] if e.get("ph") == "X"]
    [window] = select(events, "user_annotation", "window")
    own_thread = [event for event in events if event["tid"] == window["tid"]]

    def when(kind, names, among=own_thread):
        return mask_of(select(among, kind, names), window)

    data = when("user_annotation", "batch")
    waits = when("user_annotation", "waiting") | when("cpu_op", "_c10d_functional::wait_tensor")
    # Search the events of all threads, because Gloo communicates in threads of its own.
    gloo = when("user_annotation", "gloo:", events)
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if kernels:
        nccl = when("kernel", "nccl", kernels)
        compute = mask_of([e for e in kernels if not e["name"].startswith("nccl")], window)
        flight = nccl | gloo
        # Leave out the host's waits for NCCL, because the GPU may compute during these waits.
        order = {"compute": compute, "exposed": nccl | (gloo & waits), "data": data}
    else:
        compute, flight = when("cpu_op", OPERATORS), gloo
        exposed = waits | (gloo & mask_of(tails_of(own_thread), window))
        # Put data first, because operators also run while the rank prepares a batch, and their time
        # belongs to data.
        order = {"data": data, "compute": compute, "exposed": exposed}
    # If parts overlap, count the shared time only for the part that comes first in `order`.
    remaining, parts = mask_of([window], window), {"hidden": compute & flight}
    for name, mask in order.items():
        parts[name], remaining = mask & remaining, remaining & ~mask
    seconds = {name: mask.sum() / 1e6 for name, mask in (parts | {"host": remaining}).items()}
    return seconds | {"step": window["dur"] / 1e6}


def select(events, kind, names):
    """Return the events of category `kind` whose names begin with `names`, a string or a tuple."""
    return [e for e in events if e.get("cat") == kind and e["name"].startswith(names)]


def mask_of(events, window):
    """Return an array with one value per microsecond of the window: True while an event runs."""
    mask = np.zeros(round(window["dur"]), dtype=bool)
    for event in events:
        start = event["ts"] - window["ts"]
        mask[max(0, round(start)) : max(0, round(start + event["dur"]))] = True
    return mask


def tails_of(events):
    """Return an event for each backward pass: the time from its last autograd node to its end.

    During this time, DDP waits in C++ for the last buckets, and the trace shows no event.
    """
    nodes = select(events, "cpu_op", "autograd::engine::")
    ends, tails = [node["ts"] + node["dur"] for node in nodes], []
    for backward in select(events, "user_annotation", "backward"):
        start, end = backward["ts"], backward["ts"] + backward["dur"]
        last = max((time for time in ends if start < time < end), default=end)
        tails.append({"ts": last, "dur": end - last})
    return tails


def mark(owner, function, name):
    """Let the profiler record each call of a function of `owner` under the name `name`."""
    setattr(owner, function, record_function(name)(getattr(owner, function)))


@contextmanager
def traced_window(path):
    """Trace the steps inside this context as one window, and write the trace to a file."""
    with profile() as profiler:
        # Let all ranks begin their windows together, although their profilers may start at
        # different times.
        if dist.is_initialized():
            dist.barrier()
        with record_function("window"):
            yield
    profiler.export_chrome_trace(path)


def trace_steps():
    """Run the script of a chapter, and trace its steps after the warm-up, except the last step.

    sys.argv has the beginning of the trace's path, the chapter, and the script's arguments.
    """
    path = f"{sys.argv.pop(1)}-rank{os.environ.get('RANK', '0')}.json"
    chapter, window = harness.load(sys.argv.pop(1)), ExitStack()

    def traced_step(args, model, optimizer, train_set, step, device):
        if step == WINDOW + 1:
            window.enter_context(traced_window(path))
        # End the window before the last step, because the script evaluates and saves after this
        # step.
        if step == args.num_steps:
            window.close()
        return train_step(args, model, optimizer, train_set, step, device)

    mark(chapter, "train_step", "step")
    train_step, chapter.train_step = chapter.train_step, traced_step
    mark(chapter, "batch_at", "batch")
    mark(chapter, "loss_of", "forward")
    mark(torch.Tensor, "backward", "backward")
    mark(dist.Work, "wait", "waiting")
    for name in ("clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_"):
        mark(torch.nn.utils, name, "clip and step")
    mark(torch.optim.AdamW, "step", "clip and step")
    chapter.main()


# ---- all runs --------------------------------------------------------------------------------


def where(args, folder):
    """Trace each chapter, and yield a row: the seconds of a step, and each part's share of it."""
    traces = args.trace or folder
    traces.mkdir(parents=True, exist_ok=True)
    # Chapters with several ranks use one rank per GPU, or two ranks without a GPU. They use fewer
    # ranks if BATCH is not divisible by this number of ranks.
    most_ranks = math.gcd(BATCH, torch.cuda.device_count() or 2)
    # Give a rank the same number of threads in every chapter, even in chapter 01, which has only
    # one rank, so that the chapters' speeds are comparable.
    threads = max(1, os.cpu_count() // most_ranks)
    for chapter in args.only:
        ranks = 0 if chapter == "01" else most_ranks
        flags = training_flags(folder, chapter, WINDOW + args.steps + 1)
        command = [*harness.words_of(trace_steps), traces / chapter, chapter, *flags]
        harness.call(command, ranks, threads)
        by_rank = [parts_of(traces / f"{chapter}-rank{rank}.json") for rank in range(ranks or 1)]
        row = {"chapter": chapter, "ranks": ranks or 1}
        row["step_seconds"] = fmean(seconds["step"] for seconds in by_rank) / args.steps
        for part in PARTS:
            row[part] = fmean(seconds[part] / seconds["step"] for seconds in by_rank)
        harness.show(row)
        yield row


def add_flags(add):
    """Declare the flags that only this benchmark has."""
    add("--steps", type=int, default=50, help="steps to trace in each run")
    add("--trace", type=Path, metavar="FOLDER", help="keep all ranks' traces in this folder")


if __name__ == "__main__":
    harness.benchmark(__doc__, where, add_flags, cases=CHAPTERS)
