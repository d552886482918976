"""Measure how much memory and waiting time chapter 05 saves, compared with chapter 04.

Here:  python benchmarks/large.py reading saves --output benchmarks/results/large.json

reading  the peak host memory of a rank that reads published weights, for 1, 2 and 4 ranks
saves    how long training stops for a checkpoint, in the background or not
"""

import re
import threading
import time
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from harness import benchmark, show
from on_ranks import build, make_model_folder, on_ranks

# measure_saves() measures ROUNDS rounds. WIDTH is the width of all measured models.
ROUNDS, WIDTH = 3, 768
# Undo the harness's settings of glibc, so that glibc returns freed memory to the system. Memory
# that glibc keeps would count as used.
GIVE_BACK = {"MALLOC_MMAP_MAX_": "65536", "MALLOC_TRIM_THRESHOLD_": str(2**17)}


def own_memory():
    """Return the bytes of host memory that this process uses, without the pages of mapped files."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def highest_memory(ended, found):
    """Record the highest memory of this process so far, in bytes, until `ended` is set.

    About every millisecond, append this value to `found`.
    """
    while not ended.wait(0.001):
        found.append(max(found[-1], own_memory()))


def measure_reading(chapter, args, device):
    """Build the model, and measure the peak of this rank's host memory during the build.

    Return four sizes in bytes: the growth of the host memory up to its peak, the rank's share of
    the weights, all weights, and the largest weight tensor.
    """
    _, config = chapter.build_tokenizer_and_config(args)
    ended, found = threading.Event(), [own_memory()]
    watch = threading.Thread(target=highest_memory, args=(ended, found))
    watch.start()
    model = chapter.shard(args, chapter.build_model(args, config), device)
    ended.set()
    watch.join()
    weights = list(model.parameters())
    return {
        "peak": max(found[-1], own_memory()) - found[0],
        "share": sum(weight.to_local().nbytes for weight in weights),
        "model": sum(weight.numel() * 4 for weight in weights),
        "largest tensor": max(weight.numel() * 4 for weight in weights),
    }


def seconds_of(work, *args):
    """Call `work` on all ranks; return the seconds until the slowest rank has finished."""
    dist.barrier()
    start = time.perf_counter()
    work(*args)
    dist.barrier()
    return time.perf_counter() - start


def measure_saves(chapter, args, device):
    """Save checkpoints by turns in the foreground and in the background.

    Return the bytes of a checkpoint and, for each round, three durations in seconds: how long each
    of the two saves stops training, and how long the save in the background takes until it is
    complete.
    """
    model, _, optimizer, samples = build(chapter, args, device)
    run_dir, rows = Path(args.save_dir, "run"), []

    def train():
        chapter.train_step(args, model, optimizer, samples, 1, device)

    def save(in_the_background):
        args.checkpoint_async = in_the_background
        step = 2 * len(rows) + 1 + in_the_background
        chapter.save_checkpoint(args, run_dir, model, optimizer, step, is_final=False)

    # Run one more round, and drop the first round, which allocates the memory that later saves in
    # the background use again for their copies.
    for _ in range(ROUNDS + 1):
        train()
        row = {"plain": seconds_of(save, False)}
        began = time.perf_counter()
        row["stall"] = seconds_of(save, True)
        while not chapter.PENDING_SAVES[0].done():
            seconds_of(train)
        chapter.PENDING_SAVES.pop().result()
        rows.append(row | {"in the background": time.perf_counter() - began})
    saved = max(run_dir.glob("checkpoints/step-*"))
    size = sum(path.stat().st_size for path in saved.iterdir())
    return {"bytes": size, "rounds": rows[1:]}


def reading(args, folder):
    """Measure a rank's peak host memory in chapters 04 and 05 while it reads weights from files.

    Return a row for each chapter and each number of ranks.
    """
    model = make_model_folder(folder / "model", args.layers, WIDTH, vocabulary=16_384)
    config = AutoConfig.from_pretrained(model)
    published = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    published.save_pretrained(model, max_shard_size="50MB")
    rows, options = [], f"-m {model} --pretrained --seq-length 64 --global-batch-size 4"
    for ranks, chapter in product(args.ranks, ("04", "05")):
        found = on_ranks(measure_reading, chapter, ranks, folder, options, **GIVE_BACK)
        rows.append({"chapter": chapter, "ranks": ranks} | found)
        show(rows[-1])
    return rows


def saves(args, folder):
    """Measure how long chapter 05 stops training on two ranks to save a checkpoint.

    Return the result of measure_saves().
    """
    model = make_model_folder(folder / "model", args.layers * 3 // 2, WIDTH)
    options = f"-m {model} --seq-length 64 --global-batch-size 2"
    found = on_ranks(measure_saves, "05", 2, folder, options)
    print(found, flush=True)
    return found


MEASURES = {"reading": reading, "saves": saves}


def large(args, folder):
    """Run the measurements in `args.what`; after each measurement, yield its result."""
    for name in args.what:
        yield {name: MEASURES[name](args, folder / name)}


def add_flags(add):
    """Declare the flags that only this benchmark has."""
    add("what", nargs="+", choices=MEASURES)
    add("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks that read")
    add("--layers", type=int, default=8, help="layers of the measured models")


if __name__ == "__main__":
    benchmark(__doc__, large, add_flags, in_rows=False)
