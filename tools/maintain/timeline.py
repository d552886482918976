"""Measure what two ranks of chapter 02 do in one optimizer step; pictures.py draws it.

Here:  make pictures      which runs this with torchrun, and writes benchmarks/results/step.json
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from chapters import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from contenders import load
from harness import describe_machine
from where import marked

NAMES = ("forward", "backward", "all-reduce", "clip and step")
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
    spans = {name: [] for name in NAMES}
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


def main():
    """Profile a step on every rank; have rank 0 write all of them."""
    (output,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        sys.argv[1:] = [*ARGUMENTS.split(), folder]
        trace = f"{folder}/trace.json"
        profile_a_step(load("02"), trace)
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, spans_of(trace))
    if os.environ["RANK"] == "0":
        content = {"machine": describe_machine(), "ranks": ranks}
        (ROOT / output).write_text(json.dumps(content, indent=1) + "\n")
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
