"""Measure the time of a step of chapter 01 against a bare loop's, and of a watched step.

Here:    python benchmarks/overhead.py chapter --output benchmarks/results/overhead.json
Also:    python benchmarks/overhead.py chapter --compile
         python benchmarks/overhead.py watched --output benchmarks/results/watching.json

Two steps of steps take turns in one process, so that other load on the machine slows both. Each
trains the model of speed.py in blocks of ten steps. A block counts as its mean step without the
fastest and the slowest, as a share of the mean of the blocks before and after it.
"""

import os
import sys
import time
from functools import partial
from pathlib import Path
from statistics import fmean

import torch

from contenders import bare_model, bare_step
from harness import ROOT, benchmark, fast_precision, settle, spread
from on_ranks import build, make_7m_llama, on_ranks
from speed import BATCH, SEQ_LENGTH

NUM_BLOCKS = 25
# The steps of a block; in each block, watched.py looks at losses and weights once.
BLOCK = 10


def shares_of(args, device, steps):
    """Let two kinds of steps take turns in blocks; return the shares of their blocks, by name."""
    names, blocks = list(steps), []
    for block in range(args.num_steps // BLOCK):
        take_step = steps[names[block % 2]]
        seconds = []
        for step in range(block * BLOCK + 1, (block + 1) * BLOCK + 1):
            begun = time.perf_counter()
            take_step(step)
            settle(device)
            seconds.append(time.perf_counter() - begun)
        blocks.append(fmean(sorted(seconds)[1:-1]))
    shares = {name: [] for name in reversed(names)}
    # The first two blocks are a warm-up.
    for block in range(3, len(blocks) - 1):
        neighbors = fmean([blocks[block - 1], blocks[block + 1]])
        shares[names[block % 2]].append(blocks[block] / neighbors)
    return shares


def measure_chapter(chapter, args, device):
    """Compare the chapter's train_step() with a bare step on an equal model."""
    model, _, optimizer, samples = build(chapter, args, device)
    bare = bare_model(chapter, args, model.config).to(device)
    forward = torch.compile(bare) if args.compile else bare
    bare_optimizer = chapter.build_optimizer(args, bare)
    batch = chapter.batch_at(args, samples, 1, 0, device)
    mixed = args.precision == "bf16"
    steps = {
        "bare": lambda _: bare_step(args, forward, bare, bare_optimizer, [batch], mixed),
        "chapter": lambda step: chapter.train_step(args, model, optimizer, samples, step, device),
    }
    return shares_of(args, device, steps)


def measure_watched(chapter, args, device):
    """Compare the chapter's train_step() while watched.py watches, and while it does not."""
    sys.path.insert(0, str(ROOT / "diagnosing-errors"))
    import watched

    model, _, optimizer, samples = build(chapter, args, device)
    counter = watched.Steps(BLOCK)
    watch = watched.Watch(Path(args.save_dir, "ranks"), counter, 60)
    working = {name: getattr(watch, name) for name in ("look", "tell", "dump_if_due")}

    def take_step(watching, step):
        # A fault keeps the hooks from working.
        counter.fault = None if watching else "off"
        for name, work in working.items():
            setattr(watch, name, work if watching else lambda: None)
        chapter.train_step(args, model, optimizer, samples, step, device)

    steps = {"alone": partial(take_step, False), "watched": partial(take_step, True)}
    found = shares_of(args, device, steps)
    if not counter.checks:
        sys.exit(f"watched.py watched nothing: {counter.fault}")
    return found


MEASURES = {"chapter": measure_chapter, "watched": measure_watched}


def overhead(args, folder):
    """Measure in a process with the harness's settings."""
    model = make_7m_llama(folder / "llama")
    flags = f"--seq-length {SEQ_LENGTH} --precision {fast_precision()} --global-batch-size {BATCH}"
    flags += f" --device auto --num-steps {NUM_BLOCKS * BLOCK}{' --compile' * args.compile}"
    work = MEASURES[args.what]
    found = on_ranks(work, "01", 1, model, folder, flags, threads=os.cpu_count())
    for name, shares in found.items():
        print(f"{name:8} {spread(shares, '.3f')}")
    yield {"compiled" if args.compile else "shares": found}


def add_flags(add):
    """Declare the flags."""
    add("what", choices=MEASURES)
    add("--compile", action="store_true", help="the bare loop as one graph, the chapter by layer")


if __name__ == "__main__":
    benchmark(__doc__, overhead, add_flags)
