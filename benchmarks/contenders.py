"""Train as a contender of speed.py: as a chapter or a framework's script, or as a bare loop.

One at a time:   python benchmarks/contenders.py bare --compile --num-steps 20
On two ranks:    torchrun --nproc-per-node 2 benchmarks/contenders.py 04 --num-steps 20

The arguments are those of the chapters. The bare loop starts from the weights of chapter 01 and
takes the same samples in the same order, with the same AdamW, learning rates and limit on
gradients, so that the losses can be compared. All contenders write metrics.jsonl, as the chapters
do, and timing.json, which has the seconds of other work.
"""

import json
import os
import sys
import time
from functools import partial, wraps
from itertools import product
from pathlib import Path

import torch

from harness import leave_group, load, settle

# When the command started, as unix time.
STARTED = float(os.environ.get("BENCHMARK_STARTED", str(time.time())))


def write(args, name, text):
    """Write a file into the run's folder."""
    folder = Path(args.save_dir, args.experiment_name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def chapter(name):
    """Run a script; note when its first step ended, and the seconds of its last save."""
    script, timing, saves = load(name), {}, {}

    def timed(function):
        @wraps(function)
        def call(*args):
            begun = time.perf_counter()
            result = function(*args)
            if function.__name__ != "train_step":
                saves[function.__name__] = time.perf_counter() - begun
            elif not timing:
                # The last argument of train_step() is the device.
                settle(args[-1])
                timing["first_step"] = time.time() - STARTED
            return result

        return call

    names = ("train_step", "save_checkpoint", "_save_checkpoint")
    for owner, name in product((script, getattr(script, "Trainer", None)), names):
        if hasattr(owner, name):
            setattr(owner, name, timed(getattr(owner, name)))
    args = script.parse_args()
    script.main()
    # transformers' Trainer saves a checkpoint, and then the script publishes it.
    timing["save_checkpoint"] = sum(saves.values())
    if os.environ.get("RANK", "0") == "0":
        write(args, "timing.json", json.dumps(timing))


def bare_model(script, args, config):
    """Build the chapter's model without compiling it, and without masks, as the chapter does."""
    compiled, args.compile = args.compile, False
    model = script.build_model(args, config)
    args.compile = compiled
    model.set_attn_implementation("causal_sdpa")
    return model


def bare_step(args, forward, model, optimizer, micro_batches, mixed):
    """Take forward and backward passes, clip and step; return the loss and the norm."""
    total = 0.0
    for batch in micro_batches:
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=mixed):
            loss = forward(input_ids=batch, labels=batch, use_cache=False).loss
        loss = loss / len(micro_batches)
        loss.backward()
        total += loss.detach()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return total, grad_norm


def bare(dtype=torch.float32, one_graph=True):
    """Train with steps alone, on tokens that lie on the device.

    Compiled, the model is one graph; without `one_graph`, it has a graph per layer, as in chapters.
    """
    script = load("01")
    args = script.parse_args()
    device, _ = script.setup(args)
    tokenizer, config = script.build_tokenizer_and_config(args)
    train_set, _ = script.build_data(args, tokenizer)
    steps = range(1, args.num_steps + 1)
    batches = [
        [
            script.batch_at(args, train_set, step, micro, device)
            for micro in range(args.accumulation)
        ]
        for step in steps
    ]
    build_model = partial(bare_model, script) if one_graph else script.build_model
    model = build_model(args, config).to(device, dtype)
    optimizer = script.build_optimizer(args, model)
    forward = torch.compile(model) if args.compile and one_graph else model
    mixed = args.precision == "bf16" and dtype == torch.float32
    rows, timing, interval_start = [], {}, (0, None)
    for step, batch in zip(steps, batches, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = script.lr_at(args, step)
        result = bare_step(args, forward, model, optimizer, batch, mixed)
        if step == 1 or step % args.log_every == 0:
            rows.append(script.measure(args, model, train_set, step, *result, interval_start))
            timing.setdefault("first_step", time.time() - STARTED)
            interval_start = step, time.perf_counter()
    write(args, "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write(args, "timing.json", json.dumps(timing))


LOOPS = {
    "bare": bare,
    "bare-layers": partial(bare, one_graph=False),
    # Weights, gradients and moments are in bf16, as some guides teach it.
    "pure-bf16": partial(bare, torch.bfloat16),
}


def main():
    """Train as the contender that the first argument names."""
    name = sys.argv.pop(1)
    LOOPS[name]() if name in LOOPS else chapter(name)
    leave_group()


if __name__ == "__main__":
    main()
