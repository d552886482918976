"""Measure how fast the chapters train, next to a bare loop and to what people would use instead.

All:     python benchmarks/speed.py --output benchmarks/results/speed.json
Closer:  python benchmarks/speed.py --only 01 trainer --rounds 5

Every contender trains the same 7M Llama from the same weights on the same samples, in processes of
its own. They take turns, and a ratio is one of two speeds in the same round: on a shared machine
speeds come and go, and ratios stay. If a goal is missed or a contender fails, the exit status is 1.
"""

import argparse
import importlib.util
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parent.parent
CONTENDERS = ROOT / "benchmarks/contenders.py"
CHAPTERS = ("01", "02", "04", "05")  # a step of 03 is one of 02
BATCH, SEQ_LENGTH, WINDOW = 8, 256, 10  # samples a step, tokens a sample, steps a measurement
NEEDS = {"trainer": "accelerate", "accelerate": "accelerate", "fabric": "lightning_fabric"}
NEEDS |= {f"zero-{stage}": "deepspeed" for stage in (1, 2, 3)}  # which package is needed by whom
LONGEST = 1200  # seconds that a run may take: the first start of DeepSpeed compiles
ON_GPU = torch.cuda.is_available()
# glibc gives large blocks back to the system as soon as they are free, and the system clears each
# page that it gives out again. So all contenders keep what they free, as with `make train`.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)}
RATIOS = {  # and the least to be reached; matmul: the speed if a step were matrix products only
    ("01", "trainer"): 0.97,
    ("01 compiled", "trainer"): 1.1 if ON_GPU else None,
    ("01 compiled", "trainer compiled"): 0.97,
    ("01 compiled", "accelerate compiled"): None,
    ("01 compiled", "fabric compiled"): None,
    ("01", "bare"): 0.97,
    ("01 compiled", "bare compiled"): 0.97,
    ("01 compiled", "pure-bf16 compiled"): 1.0,
    ("01", "matmul"): None,
    ("01 compiled", "matmul"): None,
    ("bare", "matmul"): None,
    ("bare compiled", "matmul"): None,
    **{(f"{name}@1", "01"): None for name in CHAPTERS[1:]},
    **{(f"{name}@1 compiled", "01 compiled"): None for name in CHAPTERS[1:]},
    ("02@2", "01"): None if ON_GPU else 0.9,
    ("02@2 compiled", "01 compiled"): None,
    **{(f"{name}@2", "02@2"): None for name in CHAPTERS[2:]},
    **{(f"{name}@2 compiled", "02@2 compiled"): None for name in CHAPTERS[2:]},
    **{("02@2", f"{name}@2"): None for name in ("trainer", "accelerate", "fabric", "zero-1")},
    ("04@2", "zero-2@2"): None,
    ("04@2", "zero-3@2"): None,
}


def contenders(ranks):
    """Return who takes part: from name to what contenders.py calls it, its ranks and flags."""
    found = {}
    for more, flags in (("", []), (" compiled", ["--compile"])):
        for name in ("bare", "01", "trainer", "accelerate", "fabric"):  # those with goals in a row
            found[name + more] = (name, 0, flags)
    found["pure-bf16 compiled"] = ("pure-bf16", 0, ["--compile"])
    for size in ranks:
        for name in CHAPTERS[1:]:
            found[f"{name}@{size}"] = (name, size, [])
            found[f"{name}@{size} compiled"] = (name, size, ["--compile"])
        if size > 1:
            for name in ("trainer", "accelerate", "fabric", "zero-1", "zero-2", "zero-3"):
                found[f"{name}@{size}"] = (name, size, [])
    return found


def parser_of(about):
    """Return a benchmark's parser, with what it says about itself and the flag that all have."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=about.split("\n")[0], formatter_class=formatter)
    parser.add_argument("--output", type=Path, help="a JSON file for machine and results")
    return parser


def parse_args():
    """Return the arguments."""
    devices = torch.cuda.device_count() if ON_GPU else os.cpu_count()
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="how often each contender runs")
    add("--steps", type=int, default=30, help=f"of each run; the first {WINDOW} warm it up")
    ranks = [size for size in ((1, 2, 4) if ON_GPU else (2,)) if size <= devices]
    add("--ranks", type=int, nargs="+", default=ranks, help="of the chapters from 02 on")
    add("--only", nargs="+", help="who takes part, such as 01 trainer '02@2 compiled'")
    args = parser.parse_args()
    if args.rounds < 1 or args.steps < 2 * WINDOW or args.steps % WINDOW:
        parser.error(f"it takes one round or more, and 2, 3, 4 ... times {WINDOW} steps")
    if bad := [size for size in args.ranks if BATCH % size]:
        parser.error(f"--ranks {bad[0]} does not divide the {BATCH} samples of a step")
    args.all = contenders(args.ranks)
    if unknown := sorted(set(args.only or ()) - set(args.all)):
        parser.error(f"--only {unknown[0]}: there is {', '.join(args.all)}")
    return args


# ---- one run ---------------------------------------------------------------------------------


def make_model_folder(folder):
    """Write a 7M Llama's configuration, and a tokenizer trained on Python's documentation."""
    end, alphabet = "<|endoftext|>", pre_tokenizers.ByteLevel.alphabet()
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    options = {"special_tokens": [end], "initial_alphabet": alphabet, "show_progress": False}
    tokens.train_from_iterator(topics.values(), trainers.BpeTrainer(vocab_size=4096, **options))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=end)
    tokenizer.save_pretrained(folder)
    transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    ).save_pretrained(folder)


def command_of(name, size, flags):
    """Return what starts a contender, without torchrun where it is one process by itself."""
    python = [sys.executable]
    if size:
        python += ["-m", "torch.distributed.run", f"--nproc-per-node={size}"]
        python += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    return [*python, str(CONTENDERS), name, *flags]


def free_port():
    """Return a port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run(contender, steps, folder, run_name, *more):
    """Run a contender, with more flags; return its metrics, and how long things took."""
    name, size, flags = contender
    arguments = f"""
        --model-name {folder}/llama --seq-length {SEQ_LENGTH} --precision bf16
        --global-batch-size {BATCH} --batch-size {BATCH} --num-steps {steps} --log-every {WINDOW}
        --eval-samples {BATCH} --eval-every {steps} --checkpoint-every {steps}
        --save-dir {folder} --experiment-name {run_name}"""
    settings = {
        "OMP_NUM_THREADS": os.environ.get(
            "OMP_NUM_THREADS", str(max(1, os.cpu_count() // max(1, size)))
        ),
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "HF_HOME": f"{folder}/hf",
        "BENCHMARK_STARTED": str(time.time()),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if ON_GPU and not size:  # or the Trainer would take all that it sees
        first, *_ = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
        settings["CUDA_VISIBLE_DEVICES"] = first
    command = [*command_of(name, size, flags), *arguments.split(), *more]
    call(command, os.environ | settings, LONGEST)
    rows = map(json.loads, Path(folder, run_name, "metrics.jsonl").read_text().splitlines())
    last = {row["step"]: row for row in rows}
    timing = json.loads(Path(folder, run_name, "timing.json").read_text())
    return {"rows": [last[step] for step in sorted(last) if step >= WINDOW], "timing": timing}


class Failed(SystemExit):
    """A command failed and printed this; uncaught, it ends the benchmark with that message."""


def call(command, environment, limit):
    """Run a command for at most `limit` seconds, and leave nothing of it; return what it said."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=environment | ALLOCATOR, **pipes)
    try:
        said, _ = process.communicate(timeout=limit)
    except BaseException as error:  # Ctrl-C too
        process.terminate()  # torchrun then ends its ranks
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise Failed(f"not done after {limit} s: {shlex.join(command)}") from None
        raise
    if process.returncode:
        raise Failed(f"{said}\nfailed: {shlex.join(command)}")
    return said


# ---- all of them -----------------------------------------------------------------------------


def speed_of(one):
    """Return a run's tokens a second: the median of its windows, of which the first warms it up."""
    return median(row["tokens_per_second"] for row in one["rows"] if row["step"] > WINDOW)


def speeds_of(runs):
    """Return the tokens a second of each contender in a round."""
    speeds = {name: speed_of(one) for name, one in runs.items()}
    matmul = [row["matmul"] for one in runs.values() for row in one["rows"] if "matmul" in row]
    return speeds | ({"matmul": median(matmul)} if matmul else {})


def compare(speeds):
    """Return the ratios of those who took part, in each round, with median and goal."""
    ratios = {}
    for (one, other), goal in RATIOS.items():
        if {one, other} <= speeds[0].keys():
            values = [by_name[one] / by_name[other] for by_name in speeds]
            ratios[f"{one} / {other}"] = {"median": median(values), "goal": goal, "rounds": values}
    return ratios


def details(rounds):
    """Return of each contender what is no speed: medians over the rounds, seconds and GiB."""
    first, found = rounds[0], {}
    losses = {
        name: {row["step"]: row["loss"] for row in one["rows"]} for name, one in first.items()
    }
    norm = losses.get("01") or next(iter(losses.values()))
    for name in first:
        runs = [runs[name] for runs in rounds]
        timing = [one["timing"] for one in runs]
        last = max(losses[name])
        found[name] = {
            "first step, cold": timing[0]["first_step"][0],
            "first step": median(each["first_step"][0] for each in timing[1:] or timing),
            "peak memory": median(one["rows"][-1]["peak_memory_gib"] for one in runs),
            "loss": losses[name][last],
            "loss difference": max(abs(losses[name][step] - norm[step]) for step in norm),
        }
        for what in ("evaluate", "save_checkpoint"):
            if last := [each[what][-1] for each in timing if each.get(what)]:  # warm by now
                found[name][what] = median(last)
    return found


def describe_machine(gpus=True):
    """Return what the numbers depend on besides the code; `gpus` initializes CUDA for the name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    facts = {name.strip(): value for name, _, value in (line.partition(":") for line in lines)}
    flags = {"avx512_bf16", "amx_bf16"} & set(facts.get("flags", "").split())
    packages = ("torch", "transformers", "accelerate", "deepspeed", "lightning_fabric")
    count, versions = torch.cuda.device_count() if gpus else 0, {}
    for name in packages:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "cpu": facts.get("model name", platform.processor()).strip(),
        "cores": os.cpu_count(),
        "bf16 flags": ", ".join(sorted(flags)) or "none",
        **({"gpus": f"{count} x {torch.cuda.get_device_name()}"} if count else {}),
        "python": platform.python_version(),
        **versions,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
    }


def measured_apart(script, steps, *more):
    """Return what a script measures in a process with the settings and the model of all."""
    with tempfile.TemporaryDirectory() as folder:
        make_model_folder(f"{folder}/llama")
        flags = f"""--model-name {folder}/llama --seq-length {SEQ_LENGTH} --precision bf16
            --global-batch-size {BATCH} --batch-size {BATCH} --num-steps {steps}
            --eval-samples {BATCH} --save-dir {folder}"""
        command = [sys.executable, script, "--measure", *flags.split(), *more]
        return json.loads(call(command, os.environ, LONGEST).splitlines()[-1])


def in_rows(value, depth=2, indent=""):
    """Return JSON with a line for each row of a table: what lies deeper than `depth` is in one.

    So are plain values that belong together, such as the facts about a machine.
    """
    inner, nested = indent + " ", (dict, list)
    parts = value.values() if isinstance(value, dict) else value
    if depth == 0 or not isinstance(value, nested) or not any(isinstance(x, nested) for x in parts):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        parts = [f"{json.dumps(k)}: {in_rows(v, depth - 1, inner)}" for k, v in value.items()]
    else:
        parts = [in_rows(each, depth - 1, inner) for each in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    body = f",\n{inner}".join(parts)
    return f"{first}\n{inner}{body}\n{indent}{last}"


def keep(output, machine, results):
    """Write results down, if somewhere, beside what is there."""
    if output:
        before = json.loads(output.read_text()) if output.exists() else {}
        output.write_text(in_rows(before | {"machine": machine} | results) + "\n")


def show(machine, speeds, ratios):
    """Print machine, speeds and ratios: medians over the rounds, then the lowest and highest."""
    print(*(f"{name:12} {value}" for name, value in machine.items()), "", sep="\n")
    for name in speeds[0]:
        values = [by_name[name] for by_name in speeds]
        print(f"{name:36} {median(values):7,.0f} tokens/s {min(values):7,.0f} – {max(values):,.0f}")
    for name, (middle, goal, values) in ((name, ratio.values()) for name, ratio in ratios.items()):
        verdict = goal and f"goal {goal:.2f} {'reached' if middle >= goal else 'MISSED'}"
        spread = f"{min(values):.2f} – {max(values):.2f}"
        print(f"{name:36} {middle:7.2f} {spread:>13}   {verdict or ''}".rstrip())


def who_can(args):
    """Return the names of those who take part, without those whose package is not there."""
    names = args.only or list(args.all)
    for package in dict.fromkeys(NEEDS.values()):
        if not importlib.util.find_spec(package):
            out = [name for name in names if NEEDS.get(args.all[name][0]) == package]
            names = [name for name in names if name not in out]
            print(f"{package} is not installed, so without {', '.join(out)}") if out else None
    return names


def one_round(args, names, folder, number):
    """Let the contenders take their turn; return the runs of those who did not fail."""
    runs = {}
    for name in names:
        try:
            where = f"{name.replace(' ', '-')}-{number}"
            runs[name] = run(args.all[name], args.steps, folder, where)
        except Failed as error:
            print(error, f"so without {name}", sep="\n", flush=True)
        else:
            print(f"round {number}: {name} {speed_of(runs[name]):,.0f} tokens/s", flush=True)
    return runs


def main():
    """Let the contenders take turns; print a table and, with --output, write all of it down."""
    args, machine, rounds = parse_args(), describe_machine(), []
    names = asked = who_can(args)
    with tempfile.TemporaryDirectory() as folder:
        make_model_folder(f"{folder}/llama")
        for number in range(1, args.rounds + 1):
            rounds.append(one_round(args, names, folder, number))
            names = list(rounds[-1])  # one that fails is left out of all rounds
            if not names:
                sys.exit("all have failed")
            rounds = [{name: runs[name] for name in names} for runs in rounds]
            speeds = [speeds_of(runs) for runs in rounds]
            ratios = compare(speeds)
            results = {"ratios": ratios, "speeds": speeds, "details": details(rounds)}
            keep(args.output, machine, results)
    show(machine, speeds, ratios)
    failed = [name for name in asked if name not in names]
    missed = [name for name, ratio in ratios.items() if ratio["median"] < (ratio["goal"] or 0)]
    told = [f"failed: {', '.join(failed)}"] * bool(failed)
    told += [f"missed: {', '.join(missed)}"] * bool(missed)
    sys.exit("; ".join(told) or 0)


if __name__ == "__main__":
    main()
