"""Measure what a start costs: with the steps already done, and with the data.

All:     python benchmarks/growth.py --output benchmarks/results/growth.json
Closer:  python benchmarks/growth.py --only resume --rounds 5

resume    how long a start takes until its first step has ended, by the steps already done
data      megabytes of text a second that are tokenized, and the memory that it takes, for a small
          and a large corpus, both made on the spot
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median

import torch

from contenders import load
from large import Peak
from speed import ALLOCATOR, describe_machine, keep, make_model_folder, parser_of, run

DONE = (10, 10_000, 1_000_000)  # steps


def parse_args():
    """Return the arguments."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=MEASURES, default=list(MEASURES), help="what to measure")
    add("--rounds", type=int, default=3, help="of resume")
    add("--corpus-mb", type=int, default=500, help="size of the large corpus")
    return parser.parse_args()


# ---- resume ----------------------------------------------------------------------------------


def pretend(folder, done):
    """Make a run that has done so many steps out of one that has done ten."""
    state = torch.load(folder / "ten/checkpoints/step-00000010/state.pt", weights_only=True)
    checkpoint = folder / f"done-{done}/checkpoints/step-{done:08}"
    checkpoint.mkdir(parents=True)
    torch.save(state, checkpoint / "state.pt")
    row = {"loss": 3.0, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_second": 1e4}
    rows = [json.dumps({"step": step} | row) + "\n" for step in range(10, done + 1, 10)]
    (folder / f"done-{done}/metrics.jsonl").write_text("".join(rows))


def measure_resume(args, folder):
    """Return a row for each number of steps: seconds to load, and to the end of the first step."""
    make_model_folder(f"{folder}/llama")
    short = ["--log-every", "1", "--eval-every", "10000000", "--checkpoint-every"]
    run(("01", 0, []), 10, folder, "ten", *short, "10")
    found = {done: [] for done in DONE}
    for number in range(args.rounds):
        for done in DONE:
            source = Path(folder)
            pretend(source, done)
            one = run(("01", 0, []), done + 1, folder, f"done-{done}", *short, "10000000")
            found[done].append(one["timing"])
            (source / f"done-{done}").rename(source / f"was-{done}-{number}")
    return [
        {"steps done": done}
        | {
            what: median(each[what][0] for each in rows)
            for what in ("load_checkpoint", "first_step")
        }
        for done, rows in found.items()
    ]


# ---- data ------------------------------------------------------------------------------------


def write_corpus(path, megabytes):
    """Write documents of about 4 kB, words of Python's documentation in ever another order."""
    words, draw = " ".join(topics.values()).split(), random.Random(0)
    with open(path, "w") as file:
        while file.tell() < megabytes * 1e6:
            first = draw.randrange(len(words) - 600)
            text = " ".join(words[first : first + 600])
            file.write(json.dumps({"text": f"{draw.random()} {text}"}) + "\n")


def prepare(path, model):
    """Tokenize a file; print seconds, samples, and the most memory it took here."""
    sys.argv[1:] = ["-m", model, "-d", path]
    chapter = load("01")
    args = chapter.parse_args()
    tokenizer, _ = chapter.build_tokenizer_and_config(args)
    begun = time.perf_counter()
    with Peak() as peak:
        samples, _ = chapter.build_data(args, tokenizer)
    seconds = time.perf_counter() - begun
    told = {"seconds": seconds, "samples": len(samples), "memory grows by": peak.bytes}
    print(json.dumps(told))


def measure_data(args, folder):
    """Return a row for each size of the corpus."""
    make_model_folder(f"{folder}/llama")
    rows = []
    for megabytes in (50, args.corpus_mb):
        path = Path(folder, f"{megabytes}.jsonl")
        write_corpus(path, megabytes)
        command = [sys.executable, __file__, "--prepare", path, f"{folder}/llama"]
        done = subprocess.run(
            list(map(str, command)),
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=3600,
            env=os.environ | ALLOCATOR | {"HF_HOME": f"{folder}/hf-{path.stem}"},
        )
        told = json.loads(done.stdout.splitlines()[-1])
        size = path.stat().st_size
        speed = {"MB per second": size / 1e6 / told["seconds"]}
        rows.append({"bytes": size} | told | speed)
        shutil.rmtree(f"{folder}/hf-{path.stem}")
        path.unlink()
    return rows


MEASURES = {
    "resume": measure_resume,
    "data": measure_data,
}


def main():
    """Measure what was asked for, print it, keep it."""
    args = parse_args()
    found = {}
    for what in args.only:
        with tempfile.TemporaryDirectory() as folder:
            found[what] = MEASURES[what](args, folder)
        for row in found[what]:
            print(what, json.dumps(row), flush=True)
    keep(args.output, describe_machine(), found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--prepare"]:  # as which it starts itself anew
        prepare(*sys.argv[2:])
    else:
        main()
