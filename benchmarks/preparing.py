"""Compare prepare.py with one and two workers, and with the map of the datasets library.

Here:  python benchmarks/preparing.py --output benchmarks/results/preparing.json

All read the same files of JSON lines, tokenize them with the same tokenizer of 8,000 entries, one
thread per process, and write the same number of tokens. Times are of the whole program.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median

import numpy as np

from contenders import ROOT
from speed import describe_machine, keep

SHARDS = 8
CONTENDERS = ("prepare.py, 1 worker", "prepare.py, 2 workers", "datasets.map, 2 processes")


def parse_args():
    """Parse the arguments."""
    formatter, about = argparse.ArgumentDefaultsHelpFormatter, __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(description=about, formatter_class=formatter)
    parser.add_argument("--megabytes", type=int, default=96, help="size of the text")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured")
    parser.add_argument("--output", type=Path, help="JSON file for the machine and the results")
    return parser.parse_args()


def write_tokenizer(folder):
    """Train a byte-level BPE tokenizer on the documentation of Python."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(topics.values(), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)


def write_text(folder, megabytes):
    """Write documents of paragraphs, drawn from the documentation of Python."""
    folder.mkdir()
    paragraphs = [part for text in topics.values() for part in text.split("\n\n")]
    draw = random.Random(0)
    for shard in range(SHARDS):
        size = 0
        with open(folder / f"{shard}.jsonl", "w") as file:
            while size < megabytes * 1e6 / SHARDS:
                text = "\n\n".join(draw.choices(paragraphs, k=draw.randrange(2, 12)))
                size += len(text)
                print(json.dumps({"text": text}), file=file)


def map_and_write(tokenizer_folder, text_folder, output):
    """Do what prepare.py does with the datasets library: without shuffling, into one file."""
    from datasets import disable_progress_bars, load_dataset
    from transformers import AutoTokenizer

    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    files, cache = str(Path(text_folder, "*.jsonl")), f"{output}-cache"
    rows = load_dataset("json", data_files=files, split="train", cache_dir=cache)

    def tokenize(batch):
        ids = tokenizer(batch["text"], add_special_tokens=False)["input_ids"]
        return {"ids": [[*tokens, tokenizer.eos_token_id] for tokens in ids]}

    tokens = rows.map(tokenize, batched=True, num_proc=2, remove_columns=["text"])
    Path(output).mkdir()
    with open(f"{output}/all.tokens", "wb") as file:
        for batch in tokens.with_format("numpy").iter(1000):
            np.concatenate(batch["ids"]).astype(np.uint16).tofile(file)


def commands_of(folder, output):
    """Return the command of each contender."""
    tool = [sys.executable, ROOT / "preparing-data/prepare.py", "-m", folder / "tokenizer"]
    tool += ["-o", output, "--piece", 2**21, folder / "text", "--workers"]
    mapped = [sys.executable, __file__, "--map", folder / "tokenizer", folder / "text", output]
    return dict(zip(CONTENDERS, ([*tool, 1], [*tool, 2], mapped), strict=True))


def run(command, output):
    """Run a command; return the seconds until its first file, its seconds, and its tokens."""
    variables = {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    begun, first = time.perf_counter(), None
    process = subprocess.Popen(
        list(map(str, command)), env=os.environ | variables, stdout=subprocess.DEVNULL
    )
    while process.poll() is None:
        if first is None and any(output.glob("*.tokens")):
            first = time.perf_counter() - begun
        time.sleep(0.02)
    if process.returncode:
        sys.exit(f"preparing.py: error: {command[1]} failed with status {process.returncode}")
    sizes = [path.stat().st_size for path in output.glob("*.tokens")]
    return {"first": first, "seconds": time.perf_counter() - begun, "tokens": sum(sizes) // 2}


def main():
    """Measure the contenders in turn; print medians, and their ratios to two workers."""
    args, machine = parse_args(), describe_machine(gpus=False)
    rounds = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_tokenizer(folder / "tokenizer")
        write_text(folder / "text", args.megabytes)
        for number in range(args.rounds):
            results = {}
            for name, place in zip(CONTENDERS, "abc", strict=True):
                output = folder / f"{number}{place}.tokens"
                results[name] = run(commands_of(folder, output)[name], output)
                print(f"{name:26} {results[name]['seconds']:6.1f} s", flush=True)
            if len({result["tokens"] for result in results.values()}) > 1:
                sys.exit(f"preparing.py: error: they wrote different numbers of tokens: {results}")
            rounds.append(results)
    rows = []
    for name in CONTENDERS:
        ratios = [it[name]["seconds"] / it[CONTENDERS[1]]["seconds"] for it in rounds]
        firsts = [it[name]["first"] / it[name]["seconds"] for it in rounds]
        row = {"name": name, "time": median(ratios), "first file": median(firsts)}
        row["seconds"] = median(it[name]["seconds"] for it in rounds)
        rows.append(row | {"low": min(ratios), "high": max(ratios)})
        print(f"{name:26} {row['time']:.2f} x the time of two workers")
    tokens = rounds[0][CONTENDERS[0]]["tokens"]
    if args.output:
        result = {"rounds": args.rounds, "megabytes": args.megabytes, "tokens": tokens}
        result["rows"] = rows
        keep(args.output, machine, result)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--map"]:  # The benchmark has started itself.
        map_and_write(*sys.argv[2:])
    else:
        main()
