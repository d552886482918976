"""Measure how costs of training grow: with model, sequence, batch, steps already done, and data.

All:     python benchmarks/growth.py --output benchmarks/results/growth.json
Closer:  python benchmarks/growth.py --only model --rounds 5

model     speed and memory of a bare loop and chapter 01, compiled, for models of three sizes
sequence  the same with longer samples, and as many tokens in a step
batch     how chapter 01 relates to weights in bf16, and two ranks to one process, in larger steps
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
from transformers import LlamaConfig

from contenders import load
from large import Peak
from speed import (
    ALLOCATOR,
    WINDOW,
    contenders,
    describe_machine,
    keep,
    make_model_folder,
    parser_of,
    run,
    speed_of,
)

MODELS = {"2M": (128, 4), "7M": (256, 6), "25M": (512, 8)}  # width and layers
LENGTHS = {256: 8, 512: 4, 1024: 2}  # tokens a sample, and samples a step
BATCHES = (8, 32)  # samples a step
PAIRS = (("01 compiled", "pure-bf16 compiled"), ("02@2", "01"))  # what a larger step brings closer
RACERS = {"bare": "bare", "chapter 01": "01"}
DONE = (10, 10_000, 1_000_000)  # steps


def parse_args():
    """Return the arguments."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=MEASURES, default=list(MEASURES), help="what to measure")
    add("--rounds", type=int, default=3, help="of all but data")
    add("--steps", type=int, default=20, help=f"of each run; the first {WINDOW} warm it up")
    add("--corpus-mb", type=int, default=500, help="size of the large corpus")
    return parser.parse_args()


# ---- model, sequence and batch ---------------------------------------------------------------


def make_models(folder):
    """Write folders of models of all sizes that share one tokenizer; return their weights."""
    sizes = {}
    for name, (width, layers) in MODELS.items():
        path = f"{folder}/{name}/llama"
        make_model_folder(path)
        config = LlamaConfig.from_pretrained(path)
        config.update({"hidden_size": width, "num_hidden_layers": layers, "head_dim": 64})
        config.update({"intermediate_size": 11 * width // 4, "num_attention_heads": width // 64})
        config.update({"num_key_value_heads": width // 64})
        config.save_pretrained(path)
        width_of_all = 4 * width**2 + 3 * width * config.intermediate_size + 2 * width
        sizes[name] = layers * width_of_all + 2 * width * config.vocab_size + width
    return sizes


def race(folder, label, steps, *flags):
    """Return tokens a second, the share of matrix products' rate, and GiB, of each racer."""
    found = {}
    for name, contender in RACERS.items():
        where = f"{label}-{contender}-{time.time():.0f}"
        one = run((contender, 0, ["--compile"]), steps, folder, where, *flags)
        last = one["rows"][-1]
        found[name] = {"speed": speed_of(one), "gib": last["peak_memory_gib"]}
        found["matmul"] = last.get("matmul", found.get("matmul"))
    return found


def summed_up(rounds):
    """Return the medians of rounds, and the ratios in the same round."""
    ratio = median(each["chapter 01"]["speed"] / each["bare"]["speed"] for each in rounds)
    share = median(each["chapter 01"]["speed"] / each["matmul"] for each in rounds)
    return {
        "tokens per second": median(each["chapter 01"]["speed"] for each in rounds),
        "to the bare loop": ratio,
        "to matrix products": share,
        "peak memory": median(each["chapter 01"]["gib"] for each in rounds),
    }


def measure_model(args, folder):
    """Return a row for each size."""
    sizes = make_models(folder)
    rounds = {name: [] for name in MODELS}
    for _ in range(args.rounds):
        for name, found in rounds.items():
            found.append(race(f"{folder}/{name}", "size", args.steps))
    return [{"weights": sizes[name]} | summed_up(found) for name, found in rounds.items()]


def measure_sequence(args, folder):
    """Return a row for each length."""
    make_model_folder(f"{folder}/llama")
    rounds = {length: [] for length in LENGTHS}
    for _ in range(args.rounds):
        for length, found in rounds.items():
            flags = ["--seq-length", str(length), *batch_flags(LENGTHS[length])]
            found.append(race(folder, f"length-{length}", args.steps, *flags))
    return [{"sequence": length} | summed_up(found) for length, found in rounds.items()]


def batch_flags(samples):
    """Return the flags of a step on so many samples, all at once."""
    number = str(samples)
    return ["--global-batch-size", number, "--batch-size", number, "--eval-samples", number]


def measure_batch(args, folder):
    """Return a row for each size of a step: the medians of PAIRS' ratios, and all rounds."""
    make_model_folder(f"{folder}/llama")
    names, everyone = dict.fromkeys(name for pair in PAIRS for name in pair), contenders([2])
    rounds = {samples: [] for samples in BATCHES}
    for number in range(args.rounds):
        for samples, found in rounds.items():
            speeds = {}
            for name in names:
                where = f"{name.replace(' ', '-')}-{samples}-{number}"
                one = run(everyone[name], args.steps, folder, where, *batch_flags(samples))
                speeds[name] = speed_of(one)
            found.append({f"{one} / {other}": speeds[one] / speeds[other] for one, other in PAIRS})
    return [
        {"samples": samples}
        | {pair: median(each[pair] for each in found) for pair in found[0]}
        | {"rounds": found}
        for samples, found in rounds.items()
    ]


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
    "model": measure_model,
    "sequence": measure_sequence,
    "batch": measure_batch,
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
