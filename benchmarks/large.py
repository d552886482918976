"""Measure what chapter 05 saves in memory and in waiting, against chapter 04.

Here:  python benchmarks/large.py reading saves --output large.json

reading  the most host memory a rank takes while it reads published weights, for 1, 2, 4 ranks
saves    how long the training stands still for a checkpoint, in the background and not
"""

import re
import statistics
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from on_ranks import make_model_folder, measure_all, on_ranks
from speed import describe_machine, parser_of

ROUNDS, WIDTH = 3, 768  # of saves; of the models that are read and saved


def parse_args():
    """Return the arguments."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("what", nargs="+", choices=MEASURES)
    add("--ranks", type=int, nargs="+", default=[1, 2, 4], help="on which reading is measured")
    add("--layers", type=int, default=8, help="of the models that are read and saved")
    return parser.parse_args()


# ---- one rank --------------------------------------------------------------------------------


def own_memory():
    """Return the bytes of host memory that this process has filled, files not counted."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


class Peak:
    """The most memory that this process takes while the block runs, looked at every millisecond."""

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
    """Return bytes: the most while reading, this rank's share, the whole, the largest tensor."""
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


def measure_saves(chapter, args, device):
    """Save in both ways in turn, while nothing else runs; return seconds and bytes."""
    _, config = chapter.build_tokenizer_and_config(args)
    args.dataset_fingerprint = args.num_weights = None
    model = chapter.shard(args, chapter.build_model(args, config), device)
    optimizer = chapter.build_optimizer(args, model)
    ids = torch.randint(config.vocab_size, (8, args.seq_length), dtype=torch.int32)
    samples = chapter.Samples(ids)
    run_dir, rows, step = Path(args.save_dir, "run"), [], 0

    def train():
        nonlocal step
        step += 1
        start = time.perf_counter()
        chapter.train_step(args, model, optimizer, samples, step, device)
        dist.barrier()
        return time.perf_counter() - start

    def save(in_the_background):
        args.checkpoint_async = in_the_background
        dist.barrier()
        start = time.perf_counter()
        chapter.save_checkpoint(args, run_dir, model, optimizer, step)
        dist.barrier()
        return time.perf_counter() - start

    for _ in range(ROUNDS + 1):  # the first round makes the memory for the copies
        row = {"step": statistics.median(train() for _ in range(3))}
        row["plain"] = save(in_the_background=False)
        train()
        began = time.perf_counter()
        row["stall"] = save(in_the_background=True)
        beside = []
        while not chapter.PENDING_SAVES[0].done() and len(beside) < 50:
            beside.append(train())
        chapter.finish_saves()
        row["in the background"] = time.perf_counter() - began
        row["step beside it"] = statistics.median(beside or [train()])
        rows.append(row)
    saved = max(run_dir.glob("checkpoints/step-*"))
    size = sum(path.stat().st_size for path in saved.iterdir())
    return {"bytes": size, "rounds": rows[1:]}


# ---- all ranks -------------------------------------------------------------------------------


def reading(args, folder):
    """Return rows of host memory by chapter and number of ranks."""
    model = make_model_folder(f"{folder}/model", args.layers, WIDTH, vocabulary=16_384)
    config = AutoConfig.from_pretrained(model)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    whole.save_pretrained(model, max_shard_size="50MB")
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

if __name__ == "__main__":
    measure_all(MEASURES, parse_args(), describe_machine())
