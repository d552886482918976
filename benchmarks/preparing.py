"""Measure how fast chapter 01 prepares text, and how much memory that takes.

Here:  python benchmarks/preparing.py --output benchmarks/results/preparing.json

A small and a large corpus are made on the spot, of words of Python's documentation.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

from contenders import load
from large import Peak
from speed import ALLOCATOR, describe_machine, keep, make_model_folder, parser_of


def write_corpus(path, megabytes):
    """Write documents of about 4 kB, words of Python's documentation in ever another order."""
    words, draw = " ".join(topics.values()).split(), random.Random(0)
    with open(path, "w") as file:
        while file.tell() < megabytes * 1e6:
            first = draw.randrange(len(words) - 600)
            text = " ".join(words[first : first + 600])
            file.write(json.dumps({"text": f"{draw.random()} {text}"}) + "\n")


def prepare(model, path):
    """Tokenize a file; print its bytes, the seconds, and the most memory it took here."""
    sys.argv[1:] = ["-m", model, "-d", path]
    chapter = load("01")
    args = chapter.parse_args()
    tokenizer, _ = chapter.build_tokenizer_and_config(args)
    begun = time.perf_counter()
    with Peak() as peak:
        chapter.build_data(args, tokenizer)
    seconds, size = time.perf_counter() - begun, Path(path).stat().st_size
    print(json.dumps({"bytes": size, "seconds": seconds, "memory grows by": peak.bytes}))


def main():
    """Measure each corpus in a process and a cache of its own, print it, keep it."""
    parser = parser_of(__doc__)
    parser.add_argument("--corpora-mb", type=int, nargs="+", default=[50, 500], help="their sizes")
    args, rows = parser.parse_args(), []
    for megabytes in args.corpora_mb:
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/corpus.jsonl"
            make_model_folder(f"{folder}/llama")
            write_corpus(path, megabytes)
            command = [sys.executable, __file__, "--prepare", f"{folder}/llama", path]
            caches = {"HF_HOME": f"{folder}/hf"}
            told = subprocess.check_output(command, text=True, env=os.environ | ALLOCATOR | caches)
            rows.append(json.loads(told.splitlines()[-1]))
            print(rows[-1], flush=True)
    keep(args.output, describe_machine(), {"corpora": rows})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--prepare"]:  # as which it starts itself anew
        prepare(*sys.argv[2:])
    else:
        main()
