"""Check on your GPUs that the guide's claims about GPUs hold, and record the results.

Here:    python benchmarks/gpu_check.py
Closer:  python benchmarks/gpu_check.py --only parity speed-01-compiled
No GPU:  python benchmarks/gpu_check.py --device cpu --only parity-01 resume-01

The checks that may share a GPU run first, side by side; the checks that need all GPUs run one by
one. A check that fails or takes too long still gets a row in the result, and the script writes the
file of --output after each check. With --device cpu, the same code runs with tiny sizes: this tests
the code of the checks, but no GPU. The exit status is 0 if no check failed, 1 if a check failed,
and 2 if there is no GPU or an argument is wrong.
"""

import importlib.util
import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import harness
from overhead import bare

sys.path.append(str(harness.ROOT / "tests/support"))

from families import MODERN, save_small_model
from plot import largest_difference, read_metrics, rows_of

CHAPTERS = ["01", "02", "03", "04", "05", "06", "07", "08", "09"]
CHAPTERS += ["float8", "conversations", "lora", "muon"]
FRAMEWORKS = ["accelerate", "trainer", "deepspeed"]
SCRIPTS = {name: harness.script_of(name) for name in CHAPTERS + FRAMEWORKS}
TINY = """--seq-length 64 --global-batch-size 8 --batch-size 4 --num-steps 20 --log-every 1
    --eval-every 10 --eval-samples 10 --checkpoint-every 10"""
FP32 = "--precision fp32"
LONG = "--num-steps 1000000 --eval-every 1000000 --checkpoint-every 1000000 --eval-samples 2"
# The checks no-sync and watched train for this number of steps. After the first step, the host must
# not wait for the GPU.
NUM_FORBIDDEN = 60
# The check float8-restarts compares the losses of this number of steps after each start.
NUM_RESTARTED = 30
# In a check of speed, the script logs its speed every WINDOW steps, and the check uses the median
# of WINDOWS logged speeds.
WINDOW, WINDOWS = 3, 3
# A check starts only if at least LEAST seconds of --budget are left, and may take at most LIMIT
# seconds.
LEAST, LIMIT = 30, 300
# Losses in float32 may differ by up to 1e-4 between devices.
WITHIN = (0, 1e-4)
# Losses in bfloat16 may differ from losses in float32 by up to 1e-2. On an H200, the largest
# difference was 2e-3.
ROUGHLY = (0, 1e-2)
# Losses in float8 may differ from losses in float32 by up to 2e-2. Without a GPU, they differ by
# up to 4e-3 with seed 0.
IN_FLOAT8 = (0, 2e-2)
# Map each injected fault to the kind of fault that whats_wrong.py should report.
KINDS = {"nan-data": "not-finite", "oom-device": "device-out-of-memory"}
# SHAPE holds the sizes that LARGE and MIDDLE share. LARGE has the layers and the vocabulary of
# Llama-3.2-1B. MIDDLE has fewer layers and a smaller vocabulary, so that several checks can train
# it side by side on the same GPU.
SHAPE = """--config hidden_size=2048 intermediate_size=8192 num_attention_heads=32 head_dim=64
    num_key_value_heads=8 tie_word_embeddings=true max_position_embeddings=8192"""
LARGE = f"{SHAPE} vocab_size=128256 num_hidden_layers=16"
MIDDLE = f"{SHAPE} vocab_size=32000 num_hidden_layers=4"
# WIDE has layers as wide as the layers of Llama 3.1 8B, because float8 is faster than bfloat16 only
# in large matrix products.
WIDE = """--config hidden_size=4096 intermediate_size=14336 num_attention_heads=32 head_dim=128
    num_key_value_heads=8 max_position_embeddings=8192 vocab_size=32000"""
# To train on a token, LARGE needs 6 FLOPs for each weight, and 12 × layers × width × sequence
# length FLOPs for attention. The sequences have 4,096 tokens.
FLOPS_PER_TOKEN = 9_025_499_136
MIXTURE = "qwen3_moe+hidden_size=64+moe_intermediate_size=64+num_attention_heads=4"
GPU_FACTS = "name,memory.total,driver_version,power.limit,clocks.max.sm,compute_mode,compute_cap"


def parse_args():
    """Return the arguments and the names of the selected checks.

    Exit with an error if --device is cuda, but torch finds no GPU.
    """
    parser = harness.parser_of(__doc__)
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: test only the checks' code")
    only_help = "checks to run; the beginning of a name selects all checks that begin with it"
    add("--only", nargs="+", metavar="NAME", default=[""], help=only_help)
    add("--budget", type=float, default=480.0, help="seconds for all checks")
    args, names = parser.parse_args(), []
    for start in args.only:
        found = [start] if start in CHECKS else [name for name in CHECKS if name.startswith(start)]
        if not found:
            parser.error(f"--only {start}: not a check; choose from {' '.join(CHECKS)}")
        names += found
    if args.device == "cuda" and not torch.cuda.is_available():
        problem = f"--device cuda: torch {torch.__version__} finds no GPU"
        parser.error(f"{problem}; pass --device cpu to test only the checks' code")
    return args, names


# ---- one check, and the processes that it starts ---------------------------------------------


class Skip(Exception):
    """Skip a check; the message of this exception is the reason why the check has no result."""


class Job(harness.Job):
    """Run a command for a check, and read the files that the command writes."""

    def __init__(self, name, command, folder, run_dir, **variables):
        self.name, self.folder, self.run_dir = name, folder, run_dir
        self.log = folder / "log"
        folder.mkdir(parents=True)
        with open(folder / "out", "w") as out, open(self.log, "w") as log:
            super().__init__(command, out, log, **variables)

    def printed(self):
        """Return the text that the command has printed to stdout."""
        return (self.folder / "out").read_text()

    def rows(self):
        """Return the complete rows of the run's metrics.jsonl, or no rows if there is no file."""
        path = self.run_dir / "metrics.jsonl"
        return rows_of(path) if path.exists() else []

    def last_words(self):
        """Return the log's last errors, at most four; without errors, return its last lines."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        pattern = r"(\[rank\d+\]: *)*([\w.]*(Error|Exception)\b|[\w.]+: error: )"
        errors = [line for line in lines if re.match(pattern, line) and "ChildFail" not in line]
        return " / ".join(dict.fromkeys((errors or lines)[-4:]))[:800]


class Bench:
    """Hold a check's folder, deadline and measured numbers, and start the check's processes."""

    def __init__(self, session, name):
        self.session, self.device, self.count = session, session.device, session.count
        self.deadline = min(time.monotonic() + LIMIT, session.end)
        self.folder = session.folder / name
        # Checks that run one by one share their caches, so that a later check compiles less.
        self.caches = session.folder if name in ALONE else None
        self.jobs, self.numbers = [], {}

    def start(self, name, command, ranks=0, run=None):
        """Start a script with its arguments, under torchrun unless `ranks` is 0; return the Job."""
        folder = self.folder / name
        caches = self.caches or folder
        env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": f"{caches}/hf"}
        env["TORCHINDUCTOR_CACHE_DIR"] = f"{caches}/inductor"
        if not ranks:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
            env["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]
        command = harness.launch_command(ranks, command)
        job = Job(name, command, folder, self.folder / (run or name) / "run", **env)
        self.jobs.append(job)
        self.session.jobs.append(job)
        return job

    def train(self, script, flags, name="train", device=None, ranks=1, run=None):
        """Start a training run; return its Job.

        `script` is a name in SCRIPTS, or a command that accepts the flags of chapter 01. `run` is
        the name of the earlier job whose run the script continues, or None for a new run.
        """
        command = script if isinstance(script, list) else [SCRIPTS[script]]
        where = self.folder / (run or name)
        flags = f"{flags} --device {device or self.device} --save-dir {where} --experiment-name run"
        return self.start(name, [*command, *flags.split()], 0 if script == "01" else ranks, run)

    def model(self, flags):
        """Return `flags` on a GPU, and no flags on a CPU, so that the run trains `tiny` there."""
        return flags if self.device == "cuda" else ""

    def tool(self, name, *command, ok=(0,)):
        """Run a script without torchrun until the script ends; return the text that it printed."""
        return self.wait(self.start(name, command), ok=ok).printed()

    def wait(self, job, until=None, ok=(0,)):
        """Wait until the job succeeds or, if `until` is given, until `until()` is true.

        Return the job. A job succeeds if it ends with a status in `ok`. Raise RuntimeError if the
        job ends too early or with a different status, and TimeoutError if the check's deadline
        passes first.
        """
        while True:
            met, status = until and until(), job.process.poll()
            if met or (status in ok and not until):
                return job
            if status is not None:
                raise RuntimeError(f"{job.name} ended with status {status}: {job.last_words()}")
            if time.monotonic() > self.deadline:
                raise TimeoutError(f"{job.name} was not done in time: {job.last_words()}")
            time.sleep(0.02)

    def judged(self, goals, reason=""):
        """Return the verdict on the check: the entries `passed` and `reason` of its row.

        `goals` maps the name of a number to its goal: (lowest, highest). The check passes if each
        of these numbers is within its goal. Raise Skip if no goal is missed, but a number has not
        been measured. Append the text `reason` to the reason of the verdict.
        """
        missed = [
            f"{name} is {self.numbers[name]:.4g}, not within {low:g} and {high:g}"
            for name, (low, high) in goals.items()
            if name in self.numbers and not low <= self.numbers[name] <= high
        ]
        unknown = [name for name in goals if name not in self.numbers]
        if unknown and not missed:
            raise Skip(f"not known: {', '.join(unknown)}")
        return {"passed": not missed, "reason": "; ".join(filter(None, [*missed, reason]))}


# ---- checks ----------------------------------------------------------------------------------


def difference(job, reference):
    """Return the largest difference between two runs' losses in the same step."""
    return largest_difference({run.name: read_metrics(run.run_dir) for run in (job, reference)})


def follow(bench, chapter, flags, runs):
    """Train `runs`, and compare their losses with a chapter's losses in fp32 on the CPU.

    `flags` holds the flags that all runs share. `runs` maps the name of each run to its script, its
    additional flags and its number of ranks. Record the largest difference of each run as a number
    of the check.
    """
    reference = bench.train(chapter, f"{flags} --precision fp32", "cpu", "cpu")
    jobs = {}
    for name, (script, more, ranks) in runs.items():
        folder = name.replace(": ", "-")
        jobs[name] = bench.train(script, f"{flags} {more}", folder, ranks=ranks)
    bench.wait(reference)
    for name, job in jobs.items():
        bench.numbers[f"difference, {name}"] = difference(bench.wait(job), reference)


def parity(bench, chapter, own_flags=FP32, model="", family="", within=WITHIN, split=""):
    """Compare a chapter's losses on the check's devices with its fp32 losses on the CPU.

    Without `split`, run the chapter on one device and on all devices, but chapter 01 on only one.
    `own_flags` holds flags of the runs on the check's devices, and `model` holds flags of all runs.
    `family` names a model family of transformers, perhaps with settings, and makes all runs train a
    small model of this family. `split` holds flags whose last flag splits the model or each
    sequence, and takes a number of devices: 2 or 4. With `split`, there is no run on one device.
    `within` is the range of allowed differences.
    """
    counts = {1} if chapter == "01" else {1, bench.count}
    if split:
        # Use a divisor of the number of devices, and at most 4 ranks, because the small models have
        # too few heads or layers for more ranks.
        counts = {math.gcd(bench.count, 4)}
    if split and counts == {1}:
        raise Skip("needs an even number of GPUs")
    flags = f"{TINY} --global-batch-size {math.lcm(8, bench.count)} {model}"
    if family:
        save_small_model(family, bench.folder / "model")
        flags += f" -m {bench.folder}/model"
    runs = {}
    for count in counts:
        more = f"{own_flags} {split} {count}" if split else own_flags
        runs[f"ranks: {count}"] = chapter, more, count
    follow(bench, chapter, flags, runs)
    return bench.judged(dict.fromkeys(bench.numbers, within))


def framework(bench, name, settings=""):
    """Compare a framework's losses in fp32 and bf16 with chapter 01's losses in fp32 on the CPU.

    `settings` holds the planner's flags that choose the framework's configuration. If it is empty,
    the framework gets no configuration file.
    """
    needed = "accelerate" if name == "trainer" else name
    if not importlib.util.find_spec(needed):
        raise Skip(f"{needed} is not installed")
    batch = f"--global-batch-size {math.lcm(8, bench.count)}"
    runs = {}
    for precision in ("fp32", "bf16"):
        flags = f"--precision {precision}"
        if settings:
            file = bench.folder / f"{precision}.{'json' if name == 'deepspeed' else 'yaml'}"
            words = f"{settings} {flags} {batch} --gpus-per-node {bench.count} --brief"
            # Pass the micro-batch size, because DeepSpeed's configuration file contains it.
            words += " --batch-size 4" * (name == "deepspeed")
            words += f" --write-config {name} {file}"
            bench.tool(f"config-{precision}", harness.PLANNER, *words.split())
            flags += f" --{name}-config {file}"
        runs[precision] = (name, flags, bench.count)
    follow(bench, "01", f"{TINY} {batch}", runs)
    return bench.judged({"difference, fp32": WITHIN, "difference, bf16": ROUGHLY})


def resume(bench, chapter, flags=""):
    """Kill a run, start it again, and compare its losses with an uninterrupted run's losses."""
    flags = f"{TINY} {FP32} --num-steps 100 --eval-every 50 {flags}"
    uninterrupted, torn = (bench.train(chapter, flags, name) for name in ("uninterrupted", "torn"))
    saved = torn.run_dir / "checkpoints/step-00000030"
    bench.wait(torn, until=lambda: saved.exists() and torn.rows()[-1]["step"] > 34)
    torn.kill()
    killed = torn.rows()[-1]["step"]
    resumed = bench.wait(bench.train(chapter, flags, "resumed", run="torn"))
    found = re.search(r"continuing from .*/step-0*(\d+)", resumed.printed())
    if killed >= 100 or not found:
        raise RuntimeError(f"killed in step {killed}, did not continue: {resumed.printed()[-200:]}")
    bench.numbers |= {"killed in step": killed, "resumed from step": int(found[1])}
    bench.numbers["difference"] = difference(resumed, bench.wait(uninterrupted))
    return bench.judged({"difference": WITHIN})


def restarts(bench):
    """Start the same run in float8 three times, and compare the losses of the first steps.

    Each start compiles again, and PyTorch may choose different kernels. Because of a bug in Triton,
    some of these kernels once returned NaN. If a kernel returns NaN, the script ends, and the check
    fails.
    """
    model = bench.model(f"{WIDE} num_hidden_layers=2") or "--config num_hidden_layers=1"
    flags = f"{TINY} {model} --seq-length 256"
    flags = f"{flags} {COMPILED_BF16} --float8 {LONG} --log-every 1"
    losses = []
    with bench.session.room:
        for number in range(3):
            job = bench.train("float8", flags, f"start-{number}")
            bench.wait(job, until=lambda job=job: len(job.rows()) > 1 + NUM_RESTARTED)
            job.kill()
            losses.append([row["loss"] for row in job.rows()[1 : 1 + NUM_RESTARTED]])
    bench.numbers["difference"] = max(max(step) - min(step) for step in zip(*losses, strict=True))
    return bench.judged({"difference": IN_FLOAT8})


def forbid_waits():
    """Run the script that sys.argv names; raise an error if it makes the host wait for the GPU.

    Allow waits in the first step, and after step NUM_FORBIDDEN.
    """
    steps = []

    def after_step(*_):
        steps.append(1)
        if torch.cuda.is_initialized():
            mode = "error" if len(steps) < NUM_FORBIDDEN else "default"
            torch.cuda.set_sync_debug_mode(mode)

    register_optimizer_step_post_hook(after_step)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


def no_sync(bench, *launcher):
    """Check that after the first step of chapter 01, no step makes the host wait for the GPU.

    `launcher` is the beginning of the command, such as a result of under_watched(), and may be
    empty.
    """
    flags = f"{TINY} --num-steps {NUM_FORBIDDEN} --log-every 1000 --eval-every 1000"
    command = [*launcher, *harness.words_of(forbid_waits), harness.script_of("01")]
    bench.wait(bench.train(command, f"{flags} --checkpoint-every 1000", ranks=0))
    return bench.judged({})


def memory(bench, chapter, flags=""):
    """Compare a chapter's peak memory on one GPU with the peak that the planner predicts."""
    flags = f"{bench.model(MIDDLE)} -s 1024 -b 4 --precision bf16 {flags}"
    # Plan chapter 01 as chapter 02 on one device, because the planner has no chapter 01. In chapter
    # 01 as in this plan, a process holds exactly one copy of all gradients when its memory reaches
    # the peak.
    plans = {"01": "02 --global-batch-size 4", "conversations": f"05 {EIGHT}"}
    plans["lora"] = f"05 {EIGHT} --lora-rank 16"
    plan = plans.get(chapter, f"{chapter} {EIGHT}")
    with bench.session.room:
        job = bench.train(chapter, f"{flags} --global-batch-size 8 {LONG} --log-every 1")
        options = f"--json --nodes 1 --gpus-per-node 1 --device {bench.device} --chapter {plan}"
        command = [harness.PLANNER, *options.split(), *flags.split()]
        # Accept the planner's exit status 1, which means that the model does not fit in the GPU's
        # memory.
        planned = json.loads(bench.tool("plan", *command, ok=(0, 1)))["asked"]["gpu_total"] / 2**30
        # Wait for several rows, because the row of step 0 does not contain the peak memory.
        bench.wait(job, until=lambda: len(job.rows()) > 4)
        job.kill()
    bench.numbers |= {"peak GiB": job.rows()[-1]["peak_memory_gib"], "planned GiB": planned}
    bench.numbers["planned / peak"] = planned / bench.numbers["peak GiB"]
    return bench.judged({"planned / peak": (0.9, 1.1)})


def under_watched(bench):
    """Return the beginning of a command that starts watched.py; the caller appends a script."""
    return [harness.ROOT / "diagnosing-errors/watched.py", "--into", bench.folder / "train/run"]


def watched(bench):
    """Check that watched.py records its latest four checks of the weights.

    Also check that after the first step, no step makes the host wait for the GPU.
    """
    no_sync(bench, *under_watched(bench))
    beat = json.loads((bench.folder / "train/run/ranks/00000.json").read_text())
    bench.numbers |= {"step": beat["step"], "looks": len(beat["checks"])}
    return bench.judged({"looks": (4, 4)}, str(beat["fault"] or ""))


def fault(bench, name):
    """Check that whats_wrong.py names the kind and the rank of an injected fault."""
    folder = harness.ROOT / "diagnosing-errors"
    broken = [folder / "inject.py", f"{name}@rank0:step12", harness.script_of("03")]
    job = bench.train([*under_watched(bench), *broken], TINY)
    run_dir = bench.wait(job, ok=range(1, 256)).run_dir
    output = bench.tool("tool", folder / "whats_wrong.py", run_dir, "--json", ok=(0, 1, 3))
    found = json.loads(output)
    right = found["kind"] == KINDS[name] and found["ranks"] == [0]
    reason = f"{found['kind']} {found['ranks']}: {found['reason']}"[:400]
    return {"passed": right, "reason": reason}


def preflight(bench):
    """Check that preflight.py, on one rank, finds no fault in this machine."""
    flags = f"--device {bench.device} --save-dir {bench.folder}/runs"
    command = [harness.ROOT / "diagnosing-errors/preflight.py", *flags.split()]
    job = bench.wait(bench.start("preflight", command, ranks=1), ok=(0, 1))
    output = job.printed()
    if rate := re.search(r"^matmul +([\d.]+) TFLOP/s$", output, re.M):
        bench.numbers["matmul TFLOP/s"] = float(rate[1])
    found = re.findall(r"^(?:no-go|warning|go)\b.*", output, re.M)
    return {"passed": "\ngo: " in output, "reason": "; ".join(found) or job.last_words()}


def speed_flags(bench, ranks=1, model=LARGE):
    """Return flags to measure how fast `ranks` ranks train `model`, or `tiny` on a CPU."""
    length, batch, micro = (4096, 8, bench.session.micro) if bench.device == "cuda" else (64, 4, 2)
    flags = f"{bench.model(model)} -s {length} -b {micro}"
    flags += f" --precision {harness.fast_precision()}"
    return f"{flags} --global-batch-size {batch * ranks} {LONG} --log-every {WINDOW}"


def speed_bare(bench):
    """Measure the tokens per second of a loop that only trains, eager and compiled.

    Later checks divide their own speed by this speed.
    """
    for how, more in {"eager": "", "compiled": "--compile"}.items():
        flags = f"{speed_flags(bench)} --num-steps {WINDOW * (1 + WINDOWS)} {more}"
        # Leave out two rows: the row of step 1, which has no speed, and the row of step WINDOW,
        # which measures the warm-up.
        rows = bench.wait(bench.train([*harness.words_of(bare)], flags, how, ranks=0)).rows()
        bench.numbers[f"{how} tokens/s"] = median(row["tokens_per_second"] for row in rows[2:])
    return bench.judged({})


def mixture_model(bench):
    """Return flags to train a mixture of experts: Qwen3-30B-A3B with only two of its layers."""
    folder = bench.folder / "mixture"
    shutil.copytree(harness.ROOT / "09-expert-parallel/tiny-mixture", folder)
    config = harness.ROOT / "09-expert-parallel/configs/qwen3-30b-a3b.json"
    shutil.copy(config, folder / "config.json")
    return f"-m {folder} --config num_hidden_layers=2"


def speed(bench, script, how="eager", mixture=False, flags="", beside=None, goals=None, wide=False):
    """Measure a script's tokens per second, and divide this speed by the speeds of earlier checks.

    `how` is "eager" or "compiled". With `mixture`, the script trains a mixture of experts in place
    of LARGE, and with `wide`, it trains WIDE. `beside` names one more earlier check to compare the
    speed with. `goals` maps the name of a number to its lowest and its highest allowed value on a
    GPU; on a CPU, there are no goals.
    """
    ranks = 1 if script in ("01", "trainer") else bench.count
    if script == "trainer" and not importlib.util.find_spec("accelerate"):
        raise Skip("accelerate is not installed, and the Trainer needs it")
    model = mixture_model(bench) if mixture else f"{WIDE} num_hidden_layers=4" if wide else LARGE
    flags = f"{speed_flags(bench, ranks, model)} {flags}" + " --compile" * (how == "compiled")
    job = bench.train(script, flags, ranks=ranks)
    # Wait for WINDOWS rows in addition to two rows: the row of step 0, and the row of the first
    # WINDOW steps, which are a warm-up.
    bench.wait(job, until=lambda: len(job.rows()) > 1 + WINDOWS)
    job.kill()
    rows = job.rows()[2:]
    measured = median(row["tokens_per_second"] for row in rows)
    bench.numbers |= {"ranks": ranks, "tokens/s": measured, "peak GiB": rows[-1]["peak_memory_gib"]}
    # Record mfu only if the row has a value for it, because the script does not know every GPU's
    # peak FLOP/s.
    bench.numbers |= {"mfu": rows[-1]["mfu"]} if rows[-1]["mfu"] else {}
    known = bench.session.rows
    if script != "trainer" and not mixture and not wide:
        bench.numbers |= ratios(known, measured / ranks, how)
    other = known.get(beside, {}).get("numbers", {})
    if "tokens/s" in other:
        per_rank = other["tokens/s"] / other["ranks"]
        bench.numbers[f"to {beside.removeprefix('speed-')}"] = measured / ranks / per_rank
    return bench.judged(goals or {} if bench.device == "cuda" else {})


def ratios(rows, tokens_per_second, how):
    """Return the ratios of a rank's speed to the speeds that three earlier checks have measured.

    Leave out the ratio to a check that has measured no speed. `tokens_per_second` is the speed of
    the rank. `rows` maps the names of earlier checks to their rows, and `how` is "eager" or
    "compiled".
    """
    numbers = {}
    for name in ("preflight", "speed-trainer", "speed-bare"):
        numbers |= rows.get(name, {}).get("numbers", {})
    limits = {"to trainer": numbers.get("tokens/s"), "to bare": numbers.get(f"{how} tokens/s")}
    limits["to matmul"] = numbers.get("matmul TFLOP/s", 0) * 1e12 / FLOPS_PER_TOKEN
    return {name: tokens_per_second / limit for name, limit in limits.items() if limit}


MIXED = {"family": MIXTURE}
COMPILED_BF16 = "--precision bf16 --compile"
BF16 = {"own_flags": COMPILED_BF16, "within": ROUGHLY}
FLOAT8 = {"own_flags": f"{COMPILED_BF16} --float8", "within": IN_FLOAT8}
STAGES = "--batch-size 2 --pipeline-parallel-size"  # four micro-batches
INTERLEAVED = f"--pipeline-schedule interleaved-1f1b {STAGES}"
# The interleaved schedule has two stages on each of up to 4 ranks, and each stage needs a layer.
EIGHT_LAYERS = "--config num_hidden_layers=8"
# Train for only four steps, because rounding errors grow with each step and differ between devices.
FOUR_STEPS = {"chapter": "01", "model": "--num-steps 4 --warmup-steps 1"}
EIGHT = "--global-batch-size 8"
FLEX = "--attention flex_attention"
PLANNED = ("01", "02", "04", "05", "conversations", "lora")
TO_BARE = {"to bare": (0.95, math.inf)}
SPEED_GOALS = TO_BARE | {"to trainer": (1.1, math.inf), "to matmul": (0.65, 1)}
COMPILED = partial(speed, how="compiled")
BESIDE_05 = {"beside": "speed-05-compiled"}
TO_05 = {"to 05-compiled": (0.9, math.inf)}
BESIDE_WIDE = {"beside": "speed-wide-05-compiled"}
TO_WIDE = {"to wide-05-compiled": (1, math.inf)}
BESIDE_01 = {"mixture": True, "beside": "speed-mixture-01"}
TO_01 = {"to mixture-01": (0.9, math.inf)}
TOGETHER = {
    **{f"parity-{name}": partial(parity, chapter=name) for name in CHAPTERS},
    **{f"mixture-{n}": partial(parity, chapter=n, **MIXED) for n in ("01", "05", "09")},
    # Leave out LoRA: without --pretrained, it initializes frozen weights in bfloat16, so they would
    # differ from the float32 weights of the run on the CPU.
    **{f"bf16-{n}": partial(parity, chapter=n, **BF16) for n in CHAPTERS if n != "lora"},
    "bf16-conversations-flex": partial(
        parity, chapter="conversations", own_flags=f"{BF16['own_flags']} {FLEX}", within=ROUGHLY
    ),
    "float8": partial(parity, chapter="float8", **FLOAT8),
    "float8-restarts": restarts,
    "bf16-mixture": partial(parity, chapter="05", **MIXED, **BF16),
    "bf16-mixture-09": partial(parity, chapter="09", **MIXED, **BF16),
    "split-layers": partial(parity, chapter="06", split="--tensor-parallel-size"),
    "spread-layers": partial(parity, chapter="07", split=STAGES),
    "interleaved-layers": partial(parity, chapter="07", split=INTERLEAVED, model=EIGHT_LAYERS),
    "split-sequences": partial(parity, chapter="08", split="--context-parallel-size"),
    "spread-experts": partial(parity, chapter="09", split="--expert-parallel-size", **MIXED),
    "accelerate-ddp": partial(framework, name="accelerate", settings="--chapter 02"),
    "accelerate-fsdp2": partial(framework, name="accelerate", settings="--chapter 05"),
    "trainer": partial(framework, name="trainer"),
    "deepspeed-zero2": partial(framework, name="deepspeed", settings="--no-reshard-after-forward"),
    "deepspeed-zero3": partial(framework, name="deepspeed", settings="--reshard-after-forward"),
    "deepspeed-offload": partial(framework, name="deepspeed", settings="--cpu-offload"),
    **{f"family-{name}": partial(parity, family=name, **FOUR_STEPS) for name in MODERN},
    "no-sync": no_sync,
    "resume-01": partial(resume, chapter="01"),
    "resume-05-async": partial(resume, chapter="05", flags="--checkpoint-async"),
    "resume-lora": partial(resume, chapter="lora"),
    **{f"memory-{name}": partial(memory, chapter=name) for name in PLANNED},
    "memory-05-offload": partial(memory, chapter="05", flags="--cpu-offload"),
    "memory-05-full": partial(memory, chapter="05", flags="--recompute full"),
    "memory-05-selective": partial(memory, chapter="05", flags="--recompute selective"),
    "watched": watched,
    **{f"fault-{name}": partial(fault, name=name) for name in KINDS},
}
ALONE = {
    "preflight": preflight,
    "speed-bare": speed_bare,
    "speed-trainer": partial(speed, script="trainer"),
    "speed-01-compiled": partial(COMPILED, script="01", goals=SPEED_GOALS),
    "speed-01": partial(speed, script="01"),
    "speed-04-compiled": partial(COMPILED, script="04"),
    "speed-05-compiled": partial(COMPILED, script="05", goals=TO_BARE),
    "speed-conversations-flex": partial(
        COMPILED, script="conversations", flags=FLEX, **BESIDE_05, goals=TO_05
    ),
    "speed-mixture-01": partial(speed, script="01", mixture=True),
    "speed-mixture-09": partial(speed, script="09", **BESIDE_01, goals=TO_01),
    "speed-conversations-compiled": partial(COMPILED, script="conversations", **BESIDE_05),
    "speed-02-compiled": partial(COMPILED, script="02"),
    "speed-muon-compiled": partial(COMPILED, script="muon", beside="speed-04-compiled"),
    "speed-lora-compiled": partial(COMPILED, script="lora", **BESIDE_05),
    "speed-mixture-09-compiled": partial(COMPILED, script="09", mixture=True),
    "speed-wide-05-compiled": partial(COMPILED, script="05", wide=True),
    "speed-float8-compiled": partial(
        COMPILED, script="float8", wide=True, flags="--float8", **BESIDE_WIDE, goals=TO_WIDE
    ),
}
CHECKS = TOGETHER | ALONE
# Checks whose names start with these words have no result on a CPU, because there the host never
# waits for a device, and the peak memory of the process includes more than tensors.
GPU_ONLY = ("no-sync", "memory")
# On a GPU that cannot multiply in float8, skip the checks whose names start with these words.
IN_FLOAT8_ONLY = ("float8", "speed-float8")


# ---- all checks ------------------------------------------------------------------------------


def describe_gpus(device):
    """Return facts about the first GPU, the number of GPUs, and the versions of CUDA and NCCL.

    If `device` is "cpu", return invented facts instead: two devices of 16 GiB.
    """
    if device == "cpu":
        # Report two devices, so that checks can run two ranks.
        return {"gpus": [{"name": "cpu", "memory.total": "16384"}], "count": 2}
    # Ask nvidia-smi about the GPU, because torch might allocate memory on it, and preflight.py
    # reports a GPU whose memory is in use.
    command = ["nvidia-smi", f"--query-gpu={GPU_FACTS}", "--format=csv,noheader,nounits"]
    first = subprocess.check_output(command, text=True, timeout=20).splitlines()[0]
    gpu = dict(zip(GPU_FACTS.split(","), first.split(", "), strict=True))
    facts = {"gpus": [gpu], "count": torch.cuda.device_count(), "cuda": torch.version.cuda}
    return facts | {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}


class Session:
    """Run checks, and hold the state that all checks share.

    This state includes the deadline, the folder, the rows of results, and facts about the machine.
    """

    def __init__(self, args, folder):
        self.device, self.folder = args.device, Path(folder)
        self.end = time.monotonic() + args.budget
        self.machine = harness.describe_machine(gpus=False) | describe_gpus(args.device)
        self.count, [gpu, *_] = self.machine["count"], self.machine["gpus"]
        size = float(gpu["memory.total"]) / 1024
        # The planner predicts that chapter 02 needs 54 GiB to train LARGE with two samples in a
        # micro-batch, and 39 GiB with one sample. So use one sample on a GPU of up to 70 GiB.
        self.micro = 2 if size > 70 else 1
        self.has_float8 = float(gpu.get("compute_cap", 8.9)) >= 8.9
        self.room = threading.Semaphore(max(1, int(size / 20)))
        slug = re.sub("[^a-z0-9]+", "-", gpu["name"].lower()).strip("-")
        self.output = args.output or harness.ROOT / f"benchmarks/results/gpu-check-{slug}.json"
        self.rows, self.jobs, self.lock = {}, [], threading.Lock()

    def check(self, name):
        """Run a check; keep, print and write its row, even if the check raises an exception."""
        begun, bench = time.monotonic(), Bench(self, name)
        try:
            if self.end - begun < LEAST:
                raise Skip("no time left")
            if name.startswith(IN_FLOAT8_ONLY) and not self.has_float8:
                raise Skip("needs a GPU with compute capability 8.9 or higher")
            row = CHECKS[name](bench)
            if self.device == "cpu" and name.startswith(GPU_ONLY):
                raise Skip("needs a GPU")
        except Skip as reason:
            row = {"passed": None, "reason": str(reason)}
        except Exception as error:
            row = {"passed": False, "reason": f"{type(error).__name__}: {error}"[:1000]}
        for job in bench.jobs:
            job.kill()
        if row["passed"] is False:
            logs = {job.name: job.log.read_text(errors="replace")[-3000:] for job in bench.jobs}
            row["logs"] = logs
        shutil.rmtree(bench.folder, ignore_errors=True)
        seconds = time.monotonic() - begun
        self.keep({"name": name, "seconds": seconds, "numbers": bench.numbers} | row)

    def keep(self, row):
        """Print a check's row; write the rows of all checks so far, in the order of CHECKS."""
        verdict = {True: "passed", False: "FAILED", None: "skipped"}[row["passed"]]
        numbers = [f"{name} {value:.4g}" for name, value in row["numbers"].items()]
        text = "; ".join(filter(None, [row["reason"], ", ".join(numbers)]))
        with self.lock:
            print(f"{verdict:8} {row['name']:18} {row['seconds']:4.0f} s  {text}", flush=True)
            self.rows[row["name"]] = row
            rows = [self.rows[name] for name in CHECKS if name in self.rows]
            self.output.parent.mkdir(parents=True, exist_ok=True)
            harness.keep(self.output, self.machine, {"rows": rows})

    def run(self, asked):
        """Run the checks in `asked`: side by side if they may share a GPU, otherwise one by one."""
        pool = ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 2) // 2)))
        try:
            list(pool.map(self.check, [name for name in TOGETHER if name in asked]))
            for name in ALONE:
                if name in asked:
                    self.check(name)
        finally:
            # Do not wait for the checks that still run, but kill all their processes, so that no
            # process is left behind, even after Ctrl-C.
            pool.shutdown(wait=False, cancel_futures=True)
            for job in self.jobs:
                job.kill()


def main():
    """Run the checks; exit with status 0 only if no check failed."""
    args, names = parse_args()
    # Exit on SIGTERM, because an exit runs the `finally` that kills the jobs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
        session = Session(args, folder)
        session.run(names)
    verdicts = [row["passed"] for row in session.rows.values()]
    failed, skipped = verdicts.count(False), verdicts.count(None)
    print(f"{len(verdicts)} checks, {failed} failed, {skipped} skipped: {session.output}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
