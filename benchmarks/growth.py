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


def in_turns(args, settings, names):
    """Return rounds of speeds, GiB and rates of matrix products, for each setting.

    A setting is a folder with a model, and flags. Of each, all contenders run in each round.
    """
    rounds, everyone = {name: [] for name in settings}, contenders([2])
    for number in range(args.rounds):
        for setting, (folder, *flags) in settings.items():
            found = {}
            for name in names:
                where = f"{setting}-{name.replace(' ', '-')}-{number}"
                one = run(everyone[name], args.steps, folder, where, *flags)
                last = one["rows"][-1]
                found[name] = {"speed": speed_of(one), "gib": last["peak_memory_gib"]}
                found["matmul"] = last.get("matmul", found.get("matmul"))
            rounds[setting].append(found)
    return rounds


def race(args, settings):
    """Return the medians of chapter 01, compiled, and of ratios in the same round, by setting."""
    rounds, ours = in_turns(args, settings, ["bare compiled", "01 compiled"]), "01 compiled"
    return {
        setting: {
            "tokens per second": median(each[ours]["speed"] for each in found),
            "to the bare loop": median(
                each[ours]["speed"] / each["bare compiled"]["speed"] for each in found
            ),
            "to matrix products": median(each[ours]["speed"] / each["matmul"] for each in found),
            "peak memory": median(each[ours]["gib"] for each in found),
        }
        for setting, found in rounds.items()
    }


def measure_model(args, folder):
    """Return a row for each size."""
    sizes = make_models(folder)
    found = race(args, {name: [f"{folder}/{name}"] for name in MODELS})
    return [{"weights": sizes[name]} | row for name, row in found.items()]


def measure_sequence(args, folder):
    """Return a row for each length."""
    make_model_folder(f"{folder}/llama")
    flags = {n: ["--seq-length", str(n), *batch_flags(LENGTHS[n])] for n in LENGTHS}
    found = race(args, {length: [folder, *some] for length, some in flags.items()})
    return [{"sequence": length} | row for length, row in found.items()]


def batch_flags(samples):
    """Return the flags of a step on so many samples, all at once."""
    return f"--global-batch-size {samples} --batch-size {samples} --eval-samples {samples}".split()


def measure_batch(args, folder):
    """Return a row for each size of a step: the medians of PAIRS' ratios."""
    make_model_folder(f"{folder}/llama")
    settings = {samples: [folder, *batch_flags(samples)] for samples in BATCHES}
    rounds = in_turns(args, settings, dict.fromkeys(name for pair in PAIRS for name in pair))
    return [
        {"samples": samples}
        | {
            f"{one} / {other}": median(each[one]["speed"] / each[other]["speed"] for each in found)
            for one, other in PAIRS
        }
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
