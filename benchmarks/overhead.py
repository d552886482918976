"""Compare the time of a step of chapter 01 with a step of a bare loop, and with a watched step.

Here:    python benchmarks/overhead.py chapter --output benchmarks/results/overhead.json
Also:    python benchmarks/overhead.py chapter --compile
         python benchmarks/overhead.py watched --output benchmarks/results/watching.json
         python benchmarks/overhead.py loss --output benchmarks/results/loss.json

Two kinds of steps take turns in one process, so that other load on the machine slows both
kinds. Each kind trains a Llama of 7 million weights in blocks of ten steps. The time of a block is
the mean of its steps, without the fastest and the slowest step. The script divides this time by the
mean time of the two neighboring blocks, which are of the other kind. If the chapter is slower than
its goal, the exit status is 1.

`loss` compares the losses of chapter 05 and of fine-tuning/preferences, which work in chunks, with
the loss of chapter 04.
"""

import json
import os
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from statistics import fmean, median

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from harness import ROOT, benchmark, fast_precision, load, show
from on_ranks import BATCH, LLAMA_7M, SEQ_LENGTH, build, on_ranks

# A block has this number of steps. measure_watched() lets watched.py check the weights after the
# same number of watched steps, so each watched block after the warm-up has one check.
BLOCK = 10
# To compare losses, use samples of SHORT tokens, and split a batch into four chunks of CHUNK
# tokens.
SHORT, CHUNK = 64, BATCH * 64 // 4
# FlopCounterMode has no formula for the FLOPs of addmm_, so measure_loss() passes this formula to
# it.
IN_PLACE = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}
# A step of the chapter may take at most GOAL times as long as a bare step. The chapter then reaches
# at least 97% of the bare loop's speed.
GOAL = 1 / 0.97


# ---- the bare loop ---------------------------------------------------------------------------
def bare_loss(model, batch):
    """Return the mean next-token loss of a batch."""
    return model.loss_function(model(input_ids=batch, use_cache=False).logits, batch)


def bare_step(args, loss_of, model, optimizer, micro_batches, mixed):
    """Train one step with only the necessary calls; return the mean loss and the gradient norm."""
    total = 0.0
    for batch in micro_batches:
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=mixed):
            loss = loss_of(model, batch) / len(micro_batches)
        loss.backward()
        total += loss.detach()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return total, grad_norm


def bare():
    """Train with bare steps on random tokens; log chapter 01's metrics to metrics.jsonl."""
    chapter = load("01")
    args = chapter.parse_args()
    device, run_dir = chapter.setup(args)
    model, _, optimizer, samples = build(chapter, args, device)
    micro_steps = range(args.accumulation)
    batches = [chapter.batch_at(args, samples, 1, number, device) for number in micro_steps]
    interval_start, mixed = (1, None), args.precision == "bf16"
    with open(run_dir / "metrics.jsonl", "w") as file:
        for step in range(1, args.num_steps + 1):
            result = bare_step(args, bare_loss, model, optimizer, batches, mixed)
            if step == 1 or step % args.log_every == 0:
                row = chapter.measure(args, model, samples, step, *result, *interval_start)
                print(json.dumps(row), file=file)
                interval_start = step + 1, time.perf_counter()


# ---- steps that take turns -------------------------------------------------------------------
def shares_of(args, device, steps):
    """Let two kinds of steps take turns, in blocks of BLOCK steps; return the shares of each kind.

    `steps` maps the name of each kind to a function that runs a step. The time of a block is the
    mean time of its steps, without the fastest and the slowest step. The share of a block is its
    time, divided by the mean time of the block before it and the block after it, which run the
    other kind.
    """
    names, blocks = list(steps), []
    for block in range(args.num_steps // BLOCK):
        take_step = steps[names[block % 2]]
        seconds = []
        for step in range(block * BLOCK + 1, (block + 1) * BLOCK + 1):
            begun = time.perf_counter()
            take_step(step)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        blocks.append(fmean(sorted(seconds)[1:-1]))
    # Leave out blocks 0 and 1, which are a warm-up. So block 3 is the first block that has two
    # usable neighbors.
    times = np.array(blocks[2:])
    shares = 2 * times[1:-1] / (times[:-2] + times[2:])
    return {names[1]: shares[::2].tolist(), names[0]: shares[1::2].tolist()}


def measure_chapter(chapter, args, device):
    """Compare the time of the chapter's train_step() with the time of a bare step.

    Return the result of shares_of().
    """
    model, _, optimizer, samples = build(chapter, args, device)
    uncompiled = Namespace(**vars(args) | {"compile": False})
    bare = chapter.build_model(uncompiled, model.config).to(device)
    loss_of = torch.compile(bare_loss) if args.compile else bare_loss
    bare_optimizer = chapter.build_optimizer(args, bare)
    batch = chapter.batch_at(args, samples, 1, 0, device)
    mixed = args.precision == "bf16"
    loss, _ = bare_step(args, loss_of, bare, bare_optimizer, [batch], mixed)
    other_loss, _ = chapter.train_step(args, model, optimizer, samples, 1, device)
    if abs(loss - other_loss) > 0.01:
        sys.exit(
            f"first loss: {loss:.4f} in the bare loop, but {other_loss:.4f} in chapter 01; "
            "adapt the bare loop to the chapter"
        )
    steps = {
        "bare": lambda _: bare_step(args, loss_of, bare, bare_optimizer, [batch], mixed),
        "chapter": lambda step: chapter.train_step(args, model, optimizer, samples, step, device),
    }
    return shares_of(args, device, steps)


def measure_watched(chapter, args, device):
    """Compare the time of train_step() under watched.py with the time of train_step() alone.

    Return the result of shares_of().
    """
    sys.path.insert(0, str(ROOT / "diagnosing-errors"))
    import watched

    model, _, optimizer, samples = build(chapter, args, device)
    counter = watched.Steps(BLOCK)
    watch = watched.Watch(Path(args.save_dir, "ranks"), counter, 60)
    working = {name: getattr(watch, name) for name in ("look", "tell", "dump_if_due")}

    def take_step(watching, step):
        # In a step that is not watched, turn off watched.py's checks: record a fault, because no
        # check runs after a fault.
        counter.fault = None if watching else "off"
        for name, work in working.items():
            setattr(watch, name, work if watching else lambda: None)
        chapter.train_step(args, model, optimizer, samples, step, device)

    steps = {"alone": partial(take_step, False), "watched": partial(take_step, True)}
    found = shares_of(args, device, steps)
    if not counter.checks:
        sys.exit(f"watched.py checked no step: {counter.fault}")
    return found


def losses_of(chapter, args, model):
    """Return three functions that compute the loss from hidden states, by name.

    The function `all` computes all logits at once. The functions `chunked` and `recomputed` compute
    the logits in chunks: `chunked` as `chapter` does, and `recomputed` as fine-tuning/preferences
    does.
    """
    head, chapter.CHUNK_SIZE = model.get_output_embeddings(), CHUNK
    preferences = load(ROOT / "fine-tuning/preferences/train_llm.py")
    sharded, preferences.CHUNK_SIZE = load("04"), CHUNK

    def all_at_once(hidden, batch):
        return sharded.next_token_loss(F.linear(hidden, head.weight), batch)

    def chunked(hidden, batch):
        return chapter.chunked_loss(head, loss_and_grad, hidden, batch) / num_targets

    def recomputed(hidden, batch):
        loss = preferences.chunked_loss(head, preferences.loss_of_chunk, hidden, batch)
        return loss.sum() / num_targets

    loss_and_grad = chapter.loss_of_logits
    num_targets = BATCH * (SHORT - 1)
    return {"all": all_at_once, "chunked": chunked, "recomputed": recomputed}


def measure_loss(chapter, args, device):
    """Compare steps that compute the loss in chunks with a step that computes all logits at once.

    Return, by kind of step, the floating-point operations of a step in units of 10^12. For a kind
    with chunks, add its shares: see shares_of().
    """
    model, _, optimizer, samples = build(chapter, args, device)
    batch, losses = chapter.batch_at(args, samples, 1, 0, device), losses_of(chapter, args, model)

    def take_step(loss_of, _):
        loss = loss_of(model(input_ids=batch, use_cache=False).logits, batch)
        loss.backward()
        chapter.clip_gradients(args, model)
        optimizer.step()
        optimizer.zero_grad()

    reference, found = partial(take_step, losses["all"]), {}
    for name, loss_of in losses.items():
        with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
            take_step(loss_of, 0)
        found[name] = {"tflop": counter.get_total_flops() / 1e12}
        if name != "all":
            steps = {"all": reference, name: partial(take_step, loss_of)}
            found[name]["shares"] = shares_of(args, device, steps)[name]
    return found


MEASURES = {"chapter": measure_chapter, "watched": measure_watched, "loss": measure_loss}


def overhead(args, folder):
    """Run the measurement `args.what`; exit with status 1 if chapter 01 is slower than its goal."""
    is_loss = args.what == "loss"
    length, precision = (SHORT, "fp32") if is_loss else (SEQ_LENGTH, fast_precision())
    flags = f"{LLAMA_7M} --seq-length {length} --precision {precision} --device auto"
    flags += f" --global-batch-size {BATCH} --num-steps {args.blocks * BLOCK}"
    flags += " --compile" * args.compile
    work, chapter = MEASURES[args.what], "05" if is_loss else "01"
    found = on_ranks(work, chapter, 1, folder, flags, threads=os.cpu_count())
    if is_loss:
        print(found, flush=True)
        yield found
        return
    show({name: median(shares) for name, shares in found.items()})
    yield {"compiled" if args.compile else "shares": found}
    if median(found.get("chapter", [0])) > GOAL:
        sys.exit(f"goal missed: chapter 01 needs more than {GOAL:.3f} times the bare loop's time")


def add_flags(add):
    """Declare the flags that only this benchmark has."""
    add("what", choices=MEASURES)
    add("--blocks", type=int, default=25, help=f"blocks of {BLOCK} steps, of both kinds together")
    add("--compile", action="store_true", help="compile the bare loop, and the chapter by layer")


if __name__ == "__main__":
    benchmark(__doc__, overhead, add_flags, in_rows=False)
