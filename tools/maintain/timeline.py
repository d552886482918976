"""Draw what two ranks of chapter 02 do in one optimizer step, as the profiler saw it.

Here:  make timeline      which runs this with torchrun, and writes assets/timeline.png
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from chapters import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from contenders import load
from where import marked

COLORS = {"forward": "#5aa9a3", "backward": "#1f3b5c"}
COLORS |= {"all-reduce": "#e08a3c", "clip and step": "#8d6cab"}
ARGUMENTS = "--num-steps 8 --global-batch-size 16 --batch-size 8 --device cpu --save-dir"


def profile_a_step(chapter, trace):
    """Train some steps; leave the last one's trace in a file."""
    args = chapter.parse_args()
    device, _ = chapter.setup(args)
    tokenizer, config = chapter.build_tokenizer_and_config(args)
    train_set, _ = chapter.build_data(args, tokenizer)
    model = chapter.build_model(args, config)
    optimizer = chapter.build_optimizer(args, model)
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    chapter.loss_of = marked(chapter.loss_of, "forward")
    for name in ("get_total_norm", "clip_grads_with_norm_"):
        setattr(torch.nn.utils, name, marked(getattr(torch.nn.utils, name), "clip and step"))
    optimizer.step = marked(optimizer.step, "clip and step")
    for step in range(1, args.num_steps + 1):
        dist.barrier()
        with profile() as profiler:
            chapter.train_step(args, model, optimizer, train_set, step, device)
    profiler.export_chrome_trace(trace)


def spans_of(trace):
    """Return the spans of a rank by name, as pairs (start, length) in ms since the epoch."""
    content = json.loads(Path(trace).read_text())
    offset = content.get("baseTimeNanoseconds", 0) / 1e6
    spans = {name: [] for name in COLORS}
    backward = []
    for event in content["traceEvents"]:
        if event.get("ph") != "X":
            continue
        start, length = event["ts"] / 1e3 + offset, event["dur"] / 1e3
        if event["name"] in spans and event.get("cat") == "user_annotation":
            spans[event["name"]].append((start, length))
        elif event["name"] == "gloo:all_reduce":
            spans["all-reduce"].append((start, length))
        elif event["name"].startswith("autograd::engine::evaluate_function"):
            backward.append((start, start + length))
    first, last = min(start for start, _ in backward), max(end for _, end in backward)
    spans["backward"] = [(first, last - first)]
    # Gloo's thread notes the end of an all-reduce late.
    used = min(start for start, _ in spans["clip and step"])
    sums = spans["all-reduce"]
    spans["all-reduce"] = [(start, min(length, used - start)) for start, length in sums]
    return spans


def draw(ranks, path):
    """Write the picture: for each rank a bar for what it computes, and one for what it sends."""
    zero = min(start for spans in ranks for parts in spans.values() for start, _ in parts)
    figure = Figure(figsize=(8.3, 2.6), dpi=100, layout="constrained")
    axes = figure.subplots()
    labels = []
    for rank, spans in enumerate(ranks):
        for name, parts in spans.items():
            row = -2 * rank - (name == "all-reduce")
            bars = [(start - zero, length) for start, length in parts]
            edge = {"edgecolor": "white", "linewidth": 0.8}
            axes.broken_barh(bars, (row - 0.36, 0.72), color=COLORS[name], **edge)
        labels += [f"rank {rank} computes", "gradients travel"]
    axes.set_yticks(range(0, -len(labels), -1), labels)
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = [Patch(color=color, label=name) for name, color in COLORS.items()]
    figure.legend(handles=handles, ncols=len(COLORS), loc="outside upper center", frameon=False)
    figure.savefig(path)


def main():
    """Profile a step on every rank; have rank 0 draw all of them."""
    (output,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        sys.argv[1:] = [*ARGUMENTS.split(), folder]
        trace = f"{folder}/trace.json"
        profile_a_step(load("02"), trace)
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, spans_of(trace))
    if os.environ["RANK"] == "0":
        draw(ranks, ROOT / output)
        print(f"drawn: {output}")
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
