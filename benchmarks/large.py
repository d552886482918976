"""Measure what chapter 05 saves in memory and in waiting, against chapter 04.

Here:  python benchmarks/large.py reading saves --output benchmarks/results/large.json

reading  the peak host memory of a rank that reads published weights, for 1, 2 and 4 ranks
saves    how long training stops for a checkpoint, in the background and not
"""

import re
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from harness import describe_machine, keep, parser_of
from on_ranks import build, make_model_folder, on_ranks

# The rounds of saves, and the width of the models.
ROUNDS, WIDTH = 3, 768


def parse_args():
    """Parse the arguments."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("what", nargs="+", choices=MEASURES)
    add("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks that read")
    add("--layers", type=int, default=8, help="of the models that are read and saved")
    return parser.parse_args()


def own_memory():
    """Return the bytes of host memory that this process has filled, files not counted."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


class Peak:
    """The peak memory of this process while the block runs, checked every millisecond."""

    def __enter__(self):
        self.before, self.most, self.ended = own_memory(), 0, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.ended.wait(0.001):
            self.most = max(self.most, own_memory())

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()
        self.bytes = max(self.most, own_memory()) - self.before


def measure_reading(chapter, args, device):
    """Return bytes: the peak while reading, this rank's share, the model, the largest tensor."""
    _, config = chapter.build_tokenizer_and_config(args)
    with Peak() as peak:
        model = chapter.shard(args, chapter.build_model(args, config), device)
    weights = list(model.parameters())
    return {
        "peak": peak.bytes,
        "share": sum(weight.to_local().nbytes for weight in weights),
        "model": sum(weight.numel() * 4 for weight in weights),
        "largest tensor": max(weight.numel() * 4 for weight in weights),
    }


def seconds_of(work, *args):
    """Call `work` on all ranks; return the seconds of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    work(*args)
    dist.barrier()
    return time.perf_counter() - start


def measure_saves(chapter, args, device):
    """Save in both ways in turn; return seconds and bytes."""
    args.dataset_fingerprint = args.num_weights = None
    model, _, optimizer, samples = build(chapter, args, device)
    run_dir, rows, step = Path(args.save_dir, "run"), [], 0

    def train():
        nonlocal step
        step += 1
        chapter.train_step(args, model, optimizer, samples, step, device)

    def save(in_the_background):
        args.checkpoint_async = in_the_background
        chapter.save_checkpoint(args, run_dir, model, optimizer, step)

    # The first round allocates the memory for the copies.
    for _ in range(ROUNDS + 1):
        row = {"step": median(seconds_of(train) for _ in range(3))}
        row["plain"] = seconds_of(save, False)
        train()
        began = time.perf_counter()
        row["stall"] = seconds_of(save, True)
        beside = []
        while not chapter.PENDING_SAVES[0].done() and len(beside) < 50:
            beside.append(seconds_of(train))
        chapter.finish_saves()
        row["in the background"] = time.perf_counter() - began
        row["step beside it"] = median(beside or [seconds_of(train)])
        rows.append(row)
    saved = max(run_dir.glob("checkpoints/step-*"))
    size = sum(path.stat().st_size for path in saved.iterdir())
    return {"bytes": size, "rounds": rows[1:]}


def reading(args, folder):
    """Return a row of host memory for each chapter and number of ranks."""
    model = make_model_folder(f"{folder}/model", args.layers, WIDTH, vocabulary=16_384)
    config = AutoConfig.from_pretrained(model)
    published = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    published.save_pretrained(model, max_shard_size="50MB")
    rows, options = [], "--pretrained --seq-length 64 --global-batch-size 4"
    for ranks in args.ranks:
        for chapter in ("04", "05"):
            found = on_ranks(measure_reading, chapter, ranks, model, folder, options)
            rows.append({"chapter": chapter, "ranks": ranks} | found)
            print(rows[-1], flush=True)
    return rows


def saves(args, folder):
    """Return the seconds of saves on two ranks, of each round."""
    model = make_model_folder(f"{folder}/model", args.layers * 3 // 2, WIDTH)
    options = "--seq-length 64 --global-batch-size 2"
    found = on_ranks(measure_saves, "05", 2, model, folder, options)
    print(found, flush=True)
    return found


MEASURES = {"reading": reading, "saves": saves}


def main():
    """Measure, and keep the results."""
    args, machine = parse_args(), describe_machine()
    for name in args.what:
        with tempfile.TemporaryDirectory() as folder:
            keep(args.output, machine, {name: MEASURES[name](args, folder)})


if __name__ == "__main__":
    main()
