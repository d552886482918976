"""Measure what chapter 05 saves in memory and in waiting, against chapter 04.

Here:  python benchmarks/large.py reading saves recompute largest --output large.json

reading    the most host memory a rank takes while it reads published weights, for 1, 2, 4 ranks
saves      how long the training stands still for a checkpoint, in the background and not
recompute  memory and speed of each --recompute
largest    the largest model that trains in a fixed memory per rank
"""

import argparse
import importlib.util
import json
import re
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, ByT5Tokenizer, LlamaConfig

from fsdp import ROOT, torchrun
from speed import describe_machine, in_rows

SCRIPTS = {name: next(ROOT.glob(f"{name}-*/train_llm.py")) for name in ("04", "05")}


def parse_args():
    """Return the arguments."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=formatter)
    add = parser.add_argument
    add("what", nargs="+", choices=["reading", "saves", "recompute", "largest"])
    add("--ranks", type=int, nargs="+", default=[1, 2, 4], help="on which reading is measured")
    add("--layers", type=int, default=8, help="of the models that are read, saved and recomputed")
    add("--width", type=int, default=768, help="of the models that are read and saved")
    add("--rounds", type=int, default=3, help="of saves and of recompute")
    add("--gib", type=float, default=2.0, help="memory a rank may take in `largest`")
    add("--output", type=Path, help="a JSON file that gets or replaces what is measured")
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
    samples = torch.randint(config.vocab_size, (8, args.seq_length), dtype=torch.int32)
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

    for _ in range(int(args.rounds) + 1):  # the first round makes the memory for the copies
        row = {"step": statistics.median(train() for _ in range(3))}
        row["plain"] = save(in_the_background=False)
        train()
        began = time.perf_counter()
        row["stall"] = save(in_the_background=True)
        beside = []
        while not chapter.SAVES[0].done() and len(beside) < 50:
            beside.append(train())
        chapter.finish_saves()
        row["in the background"] = time.perf_counter() - began
        row["step beside it"] = statistics.median(beside or [train()])
        rows.append(row)
    saved = max(run_dir.glob("checkpoints/step-*"))
    size = sum(path.stat().st_size for path in saved.iterdir())
    return {"bytes": size, "rounds": rows[1:]}


def run_on_this_rank():
    """Measure as a rank that torchrun started; rank 0 leaves the result in the run's folder."""
    what, script, result, rounds = sys.argv[1:5]
    del sys.argv[1:5]
    spec = importlib.util.spec_from_file_location("chapter", script)
    chapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chapter)
    args = chapter.parse_args()
    args.rounds = rounds
    device, _ = chapter.setup(args)
    found = {"reading": measure_reading, "saves": measure_saves}[what](chapter, args, device)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# ---- all ranks -------------------------------------------------------------------------------


def make_model_folder(folder, layers, width, vocab_size, seq_length, weights=False):
    """Write a Llama's configuration and a tokenizer of bytes, with weights in bf16 if asked."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        max_position_embeddings=seq_length,
        bos_token_id=None,
        eos_token_id=ByT5Tokenizer().eos_token_id,
    )
    config.save_pretrained(folder)
    ByT5Tokenizer().save_pretrained(folder)
    if weights:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder, max_shard_size="50MB")
    return folder


def measure_on_ranks(what, chapter, ranks, model, folder, options, rounds=1):
    """Return what rank 0 found."""
    result = Path(folder, "result.json")
    result.unlink(missing_ok=True)
    command = [__file__, "as-a-rank", what, SCRIPTS[chapter], result, rounds]
    command += ["--model-name", model, "--save-dir", folder, "--device", "cpu", *options.split()]
    done = torchrun(ranks, command, folder)
    if not result.exists():
        sys.exit(f"{done.stdout}{done.stderr}\nno result of {what}, chapter {chapter}")
    return json.loads(result.read_text())


def reading(args, folder):
    """Return rows of host memory by chapter and number of ranks."""
    model = make_model_folder(f"{folder}/model", args.layers, args.width, 16_384, 64, weights=True)
    rows = []
    for ranks in args.ranks:
        for chapter in ("04", "05"):
            options = "--pretrained --seq-length 64 --global-batch-size 4"
            found = measure_on_ranks("reading", chapter, ranks, model, folder, options)
            rows.append({"chapter": chapter, "ranks": ranks} | found)
            print(rows[-1], flush=True)
    return rows


def saves(args, folder):
    """Return the seconds of saves on two ranks, of each round."""
    model = make_model_folder(f"{folder}/model", args.layers * 3 // 2, args.width, 384, 64)
    options = "--seq-length 64 --global-batch-size 2"
    found = measure_on_ranks("saves", "05", 2, model, folder, options, args.rounds)
    print(found, flush=True)
    return found


def train(chapter, ranks, model, folder, name, options):
    """Run a chapter; return the metrics of its steps, and what it printed."""
    command = f"""--device cpu --eval-samples 4 --save-dir {folder} -m {model}
        --checkpoint-every 99 --eval-every 99 --experiment-name {name} {options}"""
    done = torchrun(ranks, [SCRIPTS[chapter], *command.split()], folder)
    path = Path(folder, name, "metrics.jsonl")
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["step"]], f"{done.stdout}{done.stderr}"


def recompute(args, folder):
    """Return rows of speed and memory by mode and round, with two ranks."""
    model = make_model_folder(f"{folder}/model", args.layers, 512, 384, 512)
    options = "--seq-length 512 --global-batch-size 8 --batch-size 4 --num-steps 12 --log-every 6"
    rows = []
    for number in range(args.rounds):
        for mode in ("none", "selective", "full"):
            given = f"{options} --recompute {mode}"
            metrics, said = train("05", 2, model, folder, f"{mode}-{number}", given)
            assert metrics, said
            kept = {name: metrics[-1][name] for name in ("tokens_per_second", "peak_memory_gib")}
            rows.append({"mode": mode, "round": number} | kept)
            print(rows[-1], flush=True)
    return rows


LARGEST = {  # what is tried in `largest`: chapter and options
    "chapter 04": ("04", ""),
    "chapter 05, `--recompute full`": ("05", "--recompute full"),
}


def trains(setting, layers, args, folder):
    """Say whether a model of so many layers takes two steps in the memory that a rank may have."""
    chapter, options = LARGEST[setting]
    model = make_model_folder(f"{folder}/model", layers, 512, 16_384, 512)
    options += " --seq-length 512 --global-batch-size 8 --batch-size 4 --num-steps 2 --log-every 1"
    name = f"{chapter}-{layers}"
    metrics, said = train(chapter, 2, model, folder, name, options)
    assert metrics, said
    fits = metrics[-1]["peak_memory_gib"] <= args.gib  # of pages in use: others cost nothing
    print(f"{setting}, {layers} layers: {'fits' if fits else 'too many'}", flush=True)
    return fits


def largest(args, folder):
    """Return the most layers, and weights, that each setting has room for, within 10%."""
    rows = []
    for setting in LARGEST:
        fits, fails = 0, 8
        while trains(setting, fails, args, folder):
            fits, fails = fails, 2 * fails
        while fails - fits > max(1, fits // 10):
            middle = (fits + fails) // 2
            if trains(setting, middle, args, folder):
                fits = middle
            else:
                fails = middle
        layer = 512**2 * 4 + 3 * 512 * (512 * 11 // 4) + 2 * 512
        weights = fits * layer + 512 * (2 * 16_384 + 1)
        rows.append({"setting": setting, "layers": fits, "weights": weights, "gib": args.gib})
        print(rows[-1], flush=True)
    return rows


def main():
    """Measure what was asked for; with --output, write it down beside what is there."""
    args = parse_args()
    known = args.output and args.output.exists()
    results = json.loads(args.output.read_text()) if known else {}
    results["machine"] = describe_machine()
    measures = {"reading": reading, "saves": saves, "recompute": recompute, "largest": largest}
    for what in args.what:
        with tempfile.TemporaryDirectory() as folder:
            results[what] = measures[what](args, folder)
        if args.output:
            args.output.write_text(in_rows(results) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["as-a-rank"]:  # as which torchrun starts this script, for each rank
        del sys.argv[1]
        run_on_this_rank()
    else:
        main()
