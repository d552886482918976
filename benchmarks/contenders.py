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
import resource
import sys
import time
from functools import wraps
from pathlib import Path

import torch
import torch.distributed as dist

from harness import load, settle

# When the command started, as unix time.
STARTED = float(os.environ.get("BENCHMARK_STARTED", str(time.time())))


def peak_memory_gib(device):
    """Return the peak memory of this process; on a GPU, the peak memory of its tensors."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    # Linux counts in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def write(args, name, text):
    """Write a file into the run's folder."""
    folder = Path(args.save_dir, args.experiment_name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def chapter(name):
    """Run a script; note when its first step ended, and how long it evaluated and saved."""
    script = load(name)
    seconds = {"first_step": [], "evaluate": [], "save_checkpoint": []}

    def timed(function, note):
        @wraps(function)
        def call(*args):
            begun = time.perf_counter()
            result = function(*args)
            if note == "first_step" and not seconds[note]:
                # The last argument of train_step() is the device.
                settle(args[-1])
                seconds[note].append(time.time() - STARTED)
            elif note != "first_step":
                seconds[note].append(time.perf_counter() - begun)
            return result

        return call

    for note in seconds:
        function = "train_step" if note == "first_step" else note
        if hasattr(script, function):
            setattr(script, function, timed(getattr(script, function), note))
    # transformers' Trainer saves a checkpoint, and then the script publishes it.
    if trainer := getattr(script, "Trainer", None):
        seconds["by_trainer"] = []
        trainer._save_checkpoint = timed(trainer._save_checkpoint, "by_trainer")
    args = script.parse_args()
    script.main()
    if trainer:
        parts = zip(seconds.pop("by_trainer"), seconds["save_checkpoint"], strict=True)
        seconds["save_checkpoint"] = [sum(both) for both in parts]
    if os.environ.get("RANK", "0") == "0":
        write(args, "timing.json", json.dumps(seconds))


def bare_model(script, args, config):
    """Build the chapter's model without compiling it, and without masks, as the chapter does."""
    compiled, args.compile = args.compile, False
    model = script.build_model(args, config)
    args.compile = compiled
    model.set_attn_implementation("causal_sdpa")
    return model


def bare_step(args, forward, model, optimizer, batch, mixed=True):
    """Take a forward pass, a backward pass, clip and step; return the loss."""
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=mixed):
        loss = forward(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def bare(dtype=torch.float32):
    """Train with steps alone, on tokens that lie on the device."""
    script = load("01")
    args = script.parse_args()
    device, _ = script.setup(args)
    tokenizer, config = script.build_tokenizer_and_config(args)
    train_set, _ = script.build_data(args, tokenizer)
    steps = range(1, args.num_steps + 1)
    micro_steps = range(args.accumulation)
    batches = [
        torch.cat([script.batch_at(args, train_set, step, micro, device) for micro in micro_steps])
        for step in steps
    ]
    model = bare_model(script, args, config).to(device, dtype)
    optimizer = script.build_optimizer(args, model)
    forward = torch.compile(model) if args.compile else model
    mixed = args.precision == "bf16" and dtype == torch.float32
    rows, losses = [], torch.zeros(args.num_steps, device=device)
    for step, batch in zip(steps, batches, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = script.lr_at(args, step)
        losses[step - 1] = bare_step(args, forward, model, optimizer, batch, mixed)
        if step == 1:
            settle(device)
            first_step, begun = time.time() - STARTED, (step, time.perf_counter())
        elif step % args.log_every == 0:
            settle(device)
            num_tokens = (step - begun[0]) * args.global_batch_size * args.seq_length
            speed = num_tokens / (time.perf_counter() - begun[1])
            memory = peak_memory_gib(device)
            rows.append({"step": step, "tokens_per_second": speed, "peak_memory_gib": memory})
            begun = step, time.perf_counter()
    rows = [row | {"loss": losses[row["step"] - 1].item()} for row in rows]
    write(args, "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write(args, "timing.json", json.dumps({"first_step": [first_step]}))


def pure_bf16():
    """Train with weights, gradients and moments in bf16, as some guides teach it."""
    bare(torch.bfloat16)


LOOPS = {"bare": bare, "pure-bf16": pure_bf16}


def main():
    """Train as the contender that the first argument names."""
    name = sys.argv.pop(1)
    LOOPS[name]() if name in LOOPS else chapter(name)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
