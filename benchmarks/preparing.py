"""Compare prepare.py with one and two workers, and with the map of the datasets library.

Here:  python benchmarks/preparing.py --output benchmarks/results/preparing.json

All contenders read the same files of JSON lines, tokenize them with the same tokenizer, one thread
per process, and write the same number of tokens. Times are of the whole program.
"""

import json
import random
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median

import numpy as np

from harness import ROOT, benchmark, call, show, take_turns, words_of
from on_ranks import make_7m_llama

SHARDS = 8
TWO_WORKERS = "prepare.py, 2 workers"


def write_text(folder, megabytes):
    """Write documents of random paragraphs from Python's documentation."""
    folder.mkdir()
    paragraphs = [part for text in topics.values() for part in text.split("\n\n")]
    sample = random.Random(0)
    for shard in range(SHARDS):
        size = 0
        with open(folder / f"{shard}.jsonl", "w") as file:
            while size < megabytes * 1e6 / SHARDS:
                text = "\n\n".join(sample.choices(paragraphs, k=sample.randrange(2, 12)))
                size += len(text)
                print(json.dumps({"text": text}), file=file)


def map_and_write():
    """Do the work of prepare.py with the datasets library, into one file that is not shuffled."""
    from datasets import disable_progress_bars, load_dataset
    from transformers import AutoTokenizer

    tokenizer_folder, text_folder, output = sys.argv[1:]
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


def preparing(args, folder):
    """Let the contenders take turns; compare their times with those of two workers."""
    tokenizer, text = make_7m_llama(folder / "tokenizer"), folder / "text"
    write_text(text, args.megabytes)
    prepare = [ROOT / "preparing-data/prepare.py", "-m", tokenizer, text, "--piece", 2**21]
    commands = {
        "prepare.py, 1 worker": [*prepare, "--workers", 1, "-o"],
        TWO_WORKERS: [*prepare, "--workers", 2, "-o"],
        "datasets.map, 2 processes": [*words_of(map_and_write), tokenizer, text],
    }

    def measure(name, number):
        output = folder / f"{list(commands).index(name)}-{number}.tokens"
        variables = {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        begun = time.time()
        call([sys.executable, *commands[name], output], **variables)
        seconds, files = time.time() - begun, list(map(Path.stat, output.glob("*.tokens")))
        first = min(file.st_mtime for file in files) - begun
        return {"seconds": seconds, "first": first, "tokens": sum(x.st_size for x in files) // 2}

    [*_, rounds] = take_turns(commands, args.rounds, measure, str)
    if len({result["tokens"] for results in rounds for result in results.values()}) > 1:
        sys.exit(f"preparing.py: error: the numbers of tokens differ: {rounds}")
    rows = []
    for name in rounds[0]:
        ratios = [it[name]["seconds"] / it[TWO_WORKERS]["seconds"] for it in rounds]
        firsts = [it[name]["first"] / it[name]["seconds"] for it in rounds]
        row = {"name": name, "time": median(ratios), "first file": median(firsts)}
        row["seconds"] = median(it[name]["seconds"] for it in rounds)
        rows.append(row | {"low": min(ratios), "high": max(ratios)})
        show(rows[-1])
    facts = {"rounds": args.rounds, "megabytes": args.megabytes}
    yield facts | {"tokens": rounds[0][TWO_WORKERS]["tokens"], "rows": rows}


def add_flags(add):
    """Declare the flags."""
    add("--megabytes", type=int, default=96, help="size of the text")
    add("--rounds", type=int, default=3, help="how often each contender runs")


if __name__ == "__main__":
    benchmark(__doc__, preparing, add_flags)
