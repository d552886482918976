"""Check on GPUs what the guide says of GPUs, and write down the results.

Here:    python benchmarks/gpu_check.py
Closer:  python benchmarks/gpu_check.py --only parity speed-01-compiled
No GPU:  python benchmarks/gpu_check.py --device cpu --only parity-01 resume-01

The checks that may share a GPU run first, side by side; the checks that need it for themselves run
one by one. A check that fails or takes too long is a row of the result like any other, and --output
is written after each check. With --device cpu the same code runs with tiny sizes, which tests the
checks, but no GPU.
Exit status: 0 nothing failed, 1 a check failed, 2 there is no GPU or an argument is wrong.
"""

import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median

import torch
import transformers

import harness
from every_family import ROWS, SENSITIVE
from on_ranks import build, work_command

CHAPTERS = ("01", "02", "03", "04", "05", "06", "07", "08")
TINY = """--seq-length 64 --global-batch-size 8 --batch-size 4 --num-steps 20 --log-every 1
    --eval-every 10 --eval-samples 10 --checkpoint-every 10"""
LONG = "--num-steps 1000000 --eval-every 1000000 --checkpoint-every 1000000 --eval-samples 2"
# The steps in a measurement of speed, and the measurements after the first.
WINDOW, WINDOWS = 3, 3
# The seconds that a check needs to begin, and the seconds that it may take.
LEAST, LIMIT = 30, 200
LONGER = {"families": 400, "memory": 300}
# The tolerance of losses in float32 on different devices.
WITHIN = (0, 1e-4)
# The tolerance of losses in bfloat16 against float32, which differ by 2e-3 on an H200.
ROUGHLY = (0, 1e-2)
# All experts tie at first, and devices break ties differently.
TIED = ["afmoe", "ernie4_5_moe"]
# What whats_wrong.py should find.
KINDS = {"nan-data": "not-finite", "oom-device": "device-out-of-memory"}
LARGE = dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16)
LARGE |= dict(num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True)
SMALL = dict(vocab_size=384, hidden_size=64, intermediate_size=176, num_hidden_layers=2)
MIXTURE = SMALL | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
MIXTURE |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
# By device. The large model has the shape of Llama-3.2-1B; several middle models run side by side.
MODELS = {
    "cuda": {"large": LARGE, "middle": LARGE | {"vocab_size": 32000, "num_hidden_layers": 4}},
    "cpu": {"large": LARGE | SMALL, "middle": LARGE | SMALL},
}
ASK = "name,memory.total,driver_version,power.limit,clocks.max.sm,compute_mode"


def parse_args():
    """Parse the arguments; stop if there is no GPU for --device cuda."""
    parser = harness.parser_of(__doc__)
    parser.error = fail
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: only test the checks' code")
    add("--only", nargs="+", metavar="NAME", default=[""], help="names of checks, or their starts")
    add("--list", action="store_true", help="print the names of all checks and exit")
    add("--budget", type=float, default=480.0, help="seconds for all checks")
    args = parser.parse_args()
    args.names = []
    for word in args.only:
        names = [name for name in CHECKS if name == word or name.startswith(word)]
        args.names += [word] if word in CHECKS else names
        if not names:
            fail(f"--only {word}: no check begins so; --list shows the names")
    if args.device == "cuda" and not args.list and not torch.cuda.is_available():
        fail(f"torch {torch.__version__} finds no GPU; --device cpu tests the code of the checks")
    return args


def fail(message):
    """Report a user error in one line on stderr, and exit with status 2."""
    print(f"{Path(__file__).name}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


# ---- one check, and the processes that it starts ---------------------------------------------


class Skip(Exception):
    """The reason why a check has no result."""


class Job(harness.Job):
    """A process of a check, its log, and the folder of its run."""

    def __init__(self, name, command, folder, run_dir, **variables):
        self.name, self.folder, self.run_dir = name, folder, run_dir
        self.log = folder / "log"
        folder.mkdir(parents=True)
        with open(folder / "out", "w") as out, open(self.log, "w") as log:
            super().__init__([sys.executable, *command], out, log, **variables)

    def printed(self):
        """Return the output of the process."""
        return (self.folder / "out").read_text()

    def rows(self):
        """Return the complete rows of metrics.jsonl."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def last_words(self):
        """Return the lines of the log that report an error; if there are none, the last lines."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        pattern = r"(\[rank\d+\]: *)*([\w.]*(Error|Exception)\b|[\w.]+: error: )"
        errors = [line for line in lines if re.match(pattern, line) and "ChildFail" not in line]
        return " / ".join(dict.fromkeys((errors or lines)[-4:]))[:800]


class Bench:
    """The folder, the deadline and the numbers of a check, and ways to start processes."""

    def __init__(self, session, name):
        self.session, self.device, self.count = session, session.device, session.count
        limit = LONGER.get(name.partition("-")[0], LIMIT)
        self.deadline = min(time.monotonic() + limit, session.end)
        self.folder = session.folder / name
        # Checks that run one by one can share the caches.
        self.caches = session.folder if name in ALONE else None
        self.jobs, self.numbers = [], {}

    def start(self, name, command, ranks=None, run=None):
        """Start a script with its arguments, under torchrun if there are `ranks`."""
        folder = self.folder / name
        caches = self.caches or folder
        env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": f"{caches}/hf"}
        env["TORCHINDUCTOR_CACHE_DIR"] = f"{caches}/inductor"
        if ranks:
            command = harness.torchrun_command(ranks, command)[1:]
        else:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
            env["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]
        job = Job(name, command, folder, self.folder / (run or name) / "run", **env)
        self.jobs.append(job)
        self.session.jobs.append(job)
        return job

    def train(self, script, flags, name="train", device=None, ranks=1, run=None):
        """Start a chapter or another script, which has the flags of the chapters."""
        script = harness.script_of(script) if script in CHAPTERS else script
        where = self.folder / (run or name)
        flags = f"{flags} --device {device or self.device} --save-dir {where} --experiment-name run"
        is_alone = script.parent.name.startswith("01")
        return self.start(name, [script, *flags.split()], None if is_alone else ranks, run)

    def here(self, work, flags, name=None):
        """Run a function of this file with chapter 01 in a process; keep its numbers."""
        result = self.folder / "numbers.json"
        flags = f"{flags} --device {self.device} --save-dir {self.folder}/runs"
        command = work_command(work, harness.script_of("01"), result, flags)
        self.wait(self.start(name or work.__name__, command))
        self.numbers |= json.loads(result.read_text())

    def tool(self, name, *command, ok=(0,)):
        """Run a tool to its end; return its output."""
        return self.wait(self.start(name, command), ok=ok).printed()

    def wait(self, job, until=None, ok=(0,)):
        """Return the job when `until()` is true; without `until`, when the job has succeeded."""
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
        """Return a row; it passed if each number is within its goal, (lowest, highest)."""
        missed = [
            f"{name} is {self.numbers[name]:.4g}, not within {low:g} and {high:g}"
            for name, (low, high) in goals.items()
            if name in self.numbers and not low <= self.numbers[name] <= high
        ]
        return {"passed": not missed, "reason": "; ".join(filter(None, [*missed, reason]))}


# ---- in a process of its own, with chapter 01 as a module ------------------------------------


def matmul_rate(device):
    """Return the FLOPs per second of square bf16 matrix products."""
    # A GPU is fast only with large matrices; these take half a second of an H100.
    size, times = (8192, 500) if device.type == "cuda" else (2048, 10)
    left, right = torch.randn(2, size, size, device=device).bfloat16()
    (left @ right)[0, 0].item()
    start = time.perf_counter()
    for _ in range(times):
        product = left @ right
    product[0, 0].item()
    return times * 2 * size**3 / (time.perf_counter() - start)


def bare(chapter, args, device):
    """Measure forward, backward, clip and step alone, then matrix products."""
    model, _, optimizer, _ = build(chapter, args, device)
    batch = torch.randint(model.config.vocab_size, (args.micro_batch_size, args.seq_length))
    batch, speeds = batch.to(device), []
    for _ in range(1 + WINDOWS):
        harness.settle(device)
        start = time.perf_counter()
        for _ in range(WINDOW):
            for _ in range(args.accumulation):
                with torch.autocast(device.type, torch.bfloat16):
                    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
                (loss / args.accumulation).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        harness.settle(device)
        tokens = WINDOW * args.global_batch_size * args.seq_length
        speeds.append(tokens / (time.perf_counter() - start))
    # The formula is PaLM's, appendix B, https://arxiv.org/abs/2204.02311. The embeddings are tied.
    width = model.config.num_hidden_layers * model.config.hidden_size
    flops = 6 * model.num_parameters() + 12 * width * args.seq_length
    how, rate = "compiled" if args.compile else "eager", matmul_rate(device) / 1e12
    numbers = {f"{how} tokens/s": median(speeds[1:]), f"matmul TFLOP/s, {how}": rate}
    return {"GFLOP a token": flops / 1e9} | numbers


def steps_without_waiting(chapter, args, device):
    """Take steps while torch raises an error wherever the host waits for the GPU."""
    model, _, optimizer, samples = build(chapter, args, device)
    set_mode = torch.cuda.set_sync_debug_mode if device.type == "cuda" else print
    for step in range(1, 6):
        set_mode("error" if step > 2 else "default")
        loss, _ = chapter.train_step(args, model, optimizer, samples, step, device)
    waits_are_seen = 0
    try:
        loss.item()
    except RuntimeError:
        # The check can fail.
        waits_are_seen = 1
    set_mode("default")
    return {"steps": 3, "waits are seen": waits_are_seen}


# ---- checks ----------------------------------------------------------------------------------


def difference(rows, others):
    """Return the largest difference between the losses of two runs."""
    one, other = ({row["step"]: row for row in curve} for curve in (rows, others))
    if one.keys() != other.keys():
        raise RuntimeError(f"{len(one)} steps are logged, but {len(other)} in the other run")
    names = ("loss", "val_loss")
    return max(abs(one[n][name] - other[n][name]) for n in one for name in names if name in one[n])


def follow(bench, script, flags, runs):
    """Compare the losses of runs with those of a script in fp32 on the CPU; keep the differences.

    `runs` has a script, its flags and its number of ranks, by name.
    """
    reference = bench.train(script, f"{flags} --precision fp32", "cpu", "cpu")
    jobs = {}
    for name, (script, flags, ranks) in runs.items():
        jobs[name] = bench.train(script, flags, name.replace(": ", "-"), None, ranks)
    rows = bench.wait(reference).rows()
    for name, job in jobs.items():
        bench.numbers[f"difference, {name}"] = difference(bench.wait(job).rows(), rows)


def parity(bench, chapter, how="--precision fp32", model="", within=WITHIN):
    """Compare a chapter's losses, on one device and on all, with one process in fp32 on the CPU."""
    flags = f"{TINY} --global-batch-size {math.lcm(8, bench.count)}"
    flags += f" -m {bench.session.folder}/{model}" if model else ""
    counts = {1} if chapter == "01" else {1, bench.count}
    runs = {f"ranks: {count}": (chapter, f"{flags} {how}", count) for count in counts}
    follow(bench, chapter, flags, runs)
    return bench.judged(dict.fromkeys(bench.numbers, within))


def split(bench, chapter, flag, model=""):
    """Compare losses in fp32 where GPUs share a layer or a model with one process on the CPU."""
    # The heads of the tiny model can be split among 4 ranks.
    count = math.gcd(bench.count, 4)
    if count == 1:
        raise Skip("one GPU, or an odd number of them, splits nothing")
    flags = f"{TINY} --precision fp32 {model}"
    follow(bench, chapter, flags, {f"ranks: {count}": (chapter, f"{flags} {flag} {count}", count)})
    return bench.judged(dict.fromkeys(bench.numbers, WITHIN))


def framework(bench, name, settings=""):
    """Compare a framework's losses in both precisions with chapter 01 in fp32 on the CPU."""
    needed = "accelerate" if name == "trainer" else name
    if not importlib.util.find_spec(needed):
        raise Skip(f"{needed} is not installed")
    size = math.lcm(8, bench.count)
    flags = f"{TINY} --global-batch-size {size}"
    script = harness.ROOT / f"alternative-frameworks/{name}/train_llm.py"
    runs = {}
    for precision in ("fp32", "bf16"):
        own = f"--precision {precision}"
        if settings:
            file = bench.folder / f"{precision}.{'json' if name == 'deepspeed' else 'yaml'}"
            words = f"{settings} {own} --gpus-per-node {bench.count} --global-batch-size {size}"
            # The file of DeepSpeed also has the micro-batch.
            words += " --batch-size 4" * (name == "deepspeed")
            words += f" --brief --write-config {name} {file}"
            bench.tool(f"config-{precision}", harness.PLANNER, *words.split())
            own += f" --{name}-config {file}"
        runs[precision] = (script, f"{flags} {own}", bench.count)
    follow(bench, "01", flags, runs)
    return bench.judged({"difference, fp32": WITHIN, "difference, bf16": ROUGHLY})


def families(bench):
    """Compare the losses in fp32 of all families of models in chapter 01 with those on the CPU."""
    names = ["llama", "gpt2", "bert"] if bench.device == "cpu" else ROWS
    rows = [name for name in names if name not in TIED + SENSITIVE]
    tool, results = harness.ROOT / "benchmarks/every_family.py", {}
    for name, device in {"cpu": "cpu", "device": bench.device}.items():
        results[name] = bench.folder / f"{name}.json"
        flags = ["--chapters", "01", "--device", device, "--output", results[name]]
        bench.start(name, [tool, "--only", *rows, *flags])
    for job in list(bench.jobs):
        # Exit status 1: a family fails, here or there.
        bench.wait(job, ok=(0, 1))
    on_cpu, on_device = (
        {row["family"]: row for row in json.loads(path.read_text())["rows"]}
        for path in results.values()
    )
    verdicts = {name: compare(on_cpu[name], on_device.get(name, {})) for name in on_cpu}
    for word in ("equal", "refused", "different"):
        bench.numbers[word] = sum(verdict.startswith(word) for verdict in verdicts.values())
    names = [f"{name} is {text}" for name, text in verdicts.items() if text.startswith("different")]
    return bench.judged({"different": (0, 0)}, "; ".join(names))


def compare(row, other):
    """Compare a family's row in the results of every_family.py with another row."""
    if "curve" in row and "curve" in other:
        pairs = zip(row["curve"], other["curve"], strict=True)
        names = ("loss", "val_loss")
        far = max(abs(a[name] - b[name]) for a, b in pairs for name in names if name in a)
        return "equal" if far <= WITHIN[1] else f"different by {far:.1e}"
    return "refused" if "refused" in row and "refused" in other else "different: one fails"


def resume(bench, chapter, flags=""):
    """Kill a run with -9, start it again, and compare its losses with an uninterrupted run's."""
    flags = f"{TINY} --precision fp32 --num-steps 100 --eval-every 50 {flags}"
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
    bench.numbers["difference"] = difference(resumed.rows(), bench.wait(uninterrupted).rows())
    return bench.judged({"difference": WITHIN})


def no_sync(bench):
    """Check that no step of chapter 01 lets the host wait for the GPU."""
    bench.here(steps_without_waiting, TINY)
    return bench.judged({"waits are seen": (1, 1)})


def memory(bench, chapter, flags=""):
    """Compare the peak memory of tensors on a GPU with the plan."""
    flags = f"-m {bench.session.folder}/middle -s 1024 -b 4 --precision bf16 {flags}"
    # The gradients of chapter 01 live as long as those of DDP, but they have no second copy.
    plan = "02 --global-batch-size 4" if chapter == "01" else f"{chapter} --global-batch-size 8"
    with bench.session.room:
        job = bench.train(chapter, f"{flags} --global-batch-size 8 {LONG} --log-every 1")
        options = f"--json --nodes 1 --gpus-per-node 1 --device {bench.device} --chapter {plan}"
        command = [harness.PLANNER, *options.split(), *flags.split()]
        # Exit status 1: the model would not fit.
        planned = json.loads(bench.tool("plan", *command, ok=(0, 1)))["asked"]["gpu_total"] / 2**30
        # The first row is that of step 0.
        bench.wait(job, until=lambda: len(job.rows()) > 4)
        job.kill()
    bench.numbers |= {"peak GiB": job.rows()[-1]["peak_memory_gib"], "planned GiB": planned}
    bench.numbers["planned / peak"] = planned / bench.numbers["peak GiB"]
    return bench.judged({"planned / peak": (0.9, 1.1)})


# Under watched.py, this script raises an error wherever its host waits for the device.
WAITS = """
import runpy, sys, torch
from torch.optim.optimizer import register_optimizer_step_post_hook
steps = []
def from_the_second_step_to_the_last(*_):
    steps.append(1)
    if torch.cuda.is_initialized():
        torch.cuda.set_sync_debug_mode("error" if len(steps) < 60 else "default")
register_optimizer_step_post_hook(from_the_second_step_to_the_last)
runpy.run_path({script!r}, run_name="__main__")
"""


def watched_run(bench, script, flags, ranks=None, ok=(0,)):
    """Run a script, given as words, under watched.py to its end; return the folder of the run."""
    run_dir = bench.folder / "train/run"
    tool = harness.ROOT / "diagnosing-errors/watched.py"
    flags = f"{TINY} --device {bench.device} {flags}"
    flags += f" --save-dir {run_dir.parent} --experiment-name run"
    command = [tool, "--into", run_dir, *script, *flags.split()]
    bench.wait(bench.start("train", command, ranks), ok=ok)
    return run_dir


def watched(bench):
    """Check what watched.py reports of a rank's GPU, and that no step waits for watched.py."""
    waits = bench.session.folder / "waits.py"
    waits.write_text(WAITS.format(script=str(harness.script_of("01"))))
    flags = "--num-steps 60 --log-every 1000 --eval-every 1000 --checkpoint-every 1000"
    run_dir = watched_run(bench, [waits], flags)
    beat = json.loads((run_dir / "ranks/00000.json").read_text())
    bench.numbers |= {"step": beat["step"], "looks": len(beat["checks"])}
    if bench.device == "cuda":
        bench.numbers["GiB on the device"] = beat["device_memory_gib"]
    goals = {"GiB on the device": (1e-4, math.inf), "looks": (4, 4)}
    return bench.judged(goals, str(beat["fault"] or ""))


def fault(bench, name):
    """Check that whats_wrong.py names an injected fault, and its rank."""
    folder = harness.ROOT / "diagnosing-errors"
    broken = [folder / "inject.py", f"{name}@rank0:step12", harness.script_of("03")]
    run_dir = watched_run(bench, broken, "", 1, ok=range(1, 256))
    output = bench.tool("tool", folder / "whats_wrong.py", run_dir, "--json", ok=(0, 1, 3))
    found = json.loads(output)
    right = found["kind"] == KINDS[name] and found["ranks"] == [0]
    reason = f"{found['kind']} {found['ranks']}: {found['reason']}"[:400]
    return {"passed": right, "reason": reason}


def preflight(bench):
    """Check that preflight.py, on one rank, lets this machine train."""
    flags = f"--device {bench.device} --save-dir {bench.folder}/runs"
    command = [harness.ROOT / "diagnosing-errors/preflight.py", *flags.split()]
    job = bench.wait(bench.start("preflight", command, ranks=1), ok=(0, 1))
    output = job.printed()
    if rate := re.search(r"^matmul +([\d.]+) TFLOP/s$", output, re.M):
        bench.numbers["matmul TFLOP/s"] = float(rate[1])
    found = re.findall(r"^(?:no-go|warning|go)\b.*", output, re.M)
    return {"passed": "\ngo: " in output, "reason": "; ".join(found) or job.last_words()}


def speed_flags(bench, ranks=1):
    """Return the flags of all runs whose speeds are compared."""
    length, batch, micro = (4096, 8, bench.session.micro) if bench.device == "cuda" else (64, 4, 2)
    flags = f"-m {bench.session.folder}/large -s {length} -b {micro} --precision bf16"
    return f"{flags} --global-batch-size {batch * ranks} {LONG} --log-every {WINDOW}"


def speed_bare(bench):
    """Measure the upper limits: a loop with steps alone, and matrix products."""
    bench.here(bare, speed_flags(bench), "eager")
    bench.here(bare, f"{speed_flags(bench)} --compile", "compiled")
    return bench.judged({})


def speed(bench, script, how="eager"):
    """Measure the tokens per second on one device, or on all, against the upper limits."""
    ranks = bench.count if script in CHAPTERS[1:] else 1
    if script not in CHAPTERS and not importlib.util.find_spec("accelerate"):
        raise Skip("accelerate is not installed, and the Trainer needs it")
    flags = speed_flags(bench, ranks) + (" --compile" if how == "compiled" else "")
    job = bench.train(script, flags, ranks=ranks)
    # The first rows are those of step 0 and of the first window.
    bench.wait(job, until=lambda: len(job.rows()) > 1 + WINDOWS)
    job.kill()
    rows = job.rows()[2:]
    measured = median(row["tokens_per_second"] for row in rows)
    bench.numbers |= {"ranks": ranks, "tokens/s": measured}
    # mfu is only known for some GPUs.
    bench.numbers |= {"mfu": rows[-1]["mfu"]} if rows[-1]["mfu"] else {}
    bench.numbers["peak GiB"] = rows[-1]["peak_memory_gib"]
    if script not in CHAPTERS:
        return bench.judged({})
    bench.numbers |= ratios(bench.session.rows, measured / ranks, how)
    goals = {"to trainer": (1.1, math.inf), "to bare": (0.95, math.inf), "to matmul": (0.65, 1)}
    missing = ", ".join(goals.keys() - bench.numbers.keys())
    has_goals = (script, how, bench.device) == ("01", "compiled", "cuda")
    row = bench.judged(goals if has_goals else {}, missing and f"not known: {missing}")
    if has_goals and missing and row["passed"]:
        raise Skip(row["reason"])
    return row


def ratios(rows, per_rank, how):
    """Return the ratios of the tokens per second of a rank to the earlier results."""
    bare, trainer = (rows.get(f"speed-{n}", {}).get("numbers", {}) for n in ("bare", "trainer"))
    found = {"to trainer": per_rank / trainer["tokens/s"]} if "tokens/s" in trainer else {}
    if f"matmul TFLOP/s, {how}" in bare:
        found["to bare"] = per_rank / bare[f"{how} tokens/s"]
        rate = bare[f"matmul TFLOP/s, {how}"] * 1e3
        found["to matmul"] = per_rank * bare["GFLOP a token"] / rate
    return found


MIXED = {"model": "mixture"}
BF16 = {"how": "--precision bf16 --compile", "within": ROUGHLY}
STAGES = "--batch-size 2 --pipeline-parallel-size"  # four micro-batches
INTERLEAVED = f"--pipeline-schedule interleaved-1f1b {STAGES}"
# With two stages on each rank, stages of distant ranks exchange tensors, too.
EIGHT_LAYERS = "--config num_hidden_layers=8"
TRAINER = harness.ROOT / "alternative-frameworks/trainer/train_llm.py"
TOGETHER = {
    **{f"parity-{name}": partial(parity, chapter=name) for name in CHAPTERS},
    "mixture-01": partial(parity, chapter="01", **MIXED),
    "mixture-05": partial(parity, chapter="05", **MIXED),
    **{f"bf16-{name}": partial(parity, chapter=name, **BF16) for name in CHAPTERS},
    "bf16-mixture": partial(parity, chapter="05", **MIXED, **BF16),
    "split-layers": partial(split, chapter="06", flag="--tensor-parallel-size"),
    "spread-layers": partial(split, chapter="07", flag=STAGES),
    "interleaved-layers": partial(split, chapter="07", flag=INTERLEAVED, model=EIGHT_LAYERS),
    "split-sequences": partial(split, chapter="08", flag="--context-parallel-size"),
    "accelerate-ddp": partial(framework, name="accelerate", settings="--chapter 02"),
    "accelerate-fsdp2": partial(framework, name="accelerate", settings="--chapter 05"),
    "trainer": partial(framework, name="trainer"),
    "deepspeed-zero2": partial(framework, name="deepspeed", settings="--no-reshard-after-forward"),
    "deepspeed-zero3": partial(framework, name="deepspeed", settings="--reshard-after-forward"),
    "deepspeed-offload": partial(framework, name="deepspeed", settings="--cpu-offload"),
    "families": families,
    "no-sync": no_sync,
    "resume-01": partial(resume, chapter="01"),
    "resume-05-async": partial(resume, chapter="05", flags="--checkpoint-async"),
    **{f"memory-{name}": partial(memory, chapter=name) for name in ("01", "02", "04", "05")},
    "memory-05-offload": partial(memory, chapter="05", flags="--cpu-offload"),
    "memory-05-full": partial(memory, chapter="05", flags="--recompute full"),
    "memory-05-selective": partial(memory, chapter="05", flags="--recompute selective"),
    "watched": watched,
    **{f"fault-{name}": partial(fault, name=name) for name in KINDS},
}
ALONE = {
    "speed-bare": speed_bare,
    "speed-trainer": partial(speed, script=TRAINER),
    "speed-01-compiled": partial(speed, script="01", how="compiled"),
    "preflight": preflight,
    "speed-01": partial(speed, script="01"),
    **{f"speed-{n}-compiled": partial(speed, script=n, how="compiled") for n in ("04", "05", "02")},
}
CHECKS = TOGETHER | ALONE
GPU_ONLY = {"no-sync": "a CPU is not waited for"}
GPU_ONLY |= {n: "on a CPU the peak is that of the process" for n in CHECKS if n[:6] == "memory"}


# ---- all checks ------------------------------------------------------------------------------


def describe_gpus(device):
    """Return the facts about the GPUs and their software."""
    if device == "cpu":
        # Two processes, to test several ranks.
        return {"gpus": [{"name": "cpu"}], "count": 2}
    # Do not ask torch: it may use memory of a GPU, and preflight.py wants to find the GPU free.
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", "-i", first, f"--query-gpu={ASK}", "--format=csv,noheader,nounits"]
    gpu = {"name": "unknown", "memory.total": "16384"}
    with suppress(OSError, subprocess.SubprocessError):
        values = subprocess.check_output(command, text=True, timeout=20).strip().split(", ")
        gpu = dict(zip(ASK.split(","), values, strict=True))
    facts = {"gpus": [gpu], "count": torch.cuda.device_count(), "cuda": torch.version.cuda}
    return facts | {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}


class Session:
    """The machine, the time, the folder and the rows, which all checks share."""

    def __init__(self, args, folder):
        self.device, self.folder = args.device, Path(folder)
        self.end = time.monotonic() + args.budget
        self.machine = harness.describe_machine(gpus=False) | describe_gpus(args.device)
        self.count, [gpu, *_] = self.machine["count"], self.machine["gpus"]
        size = float(gpu.get("memory.total", 16384)) / 1024
        # The planner says that chapter 02 needs 53 GiB with micro-batches of 2, and 39 GiB with 1.
        self.micro = 2 if size > 70 else 1
        self.room = threading.Semaphore(max(1, int(size / 20)))
        slug = re.sub("[^a-z0-9]+", "-", gpu["name"].lower()).strip("-")
        self.output = args.output or harness.ROOT / f"benchmarks/results/gpu-check-{slug}.json"
        self.rows, self.jobs, self.lock = {}, [], threading.Lock()
        configs = {
            name: transformers.LlamaConfig(**shape, max_position_embeddings=8192, eos_token_id=1)
            for name, shape in MODELS[args.device].items()
        }
        configs["mixture"] = transformers.Qwen3MoeConfig(**MIXTURE, eos_token_id=1)
        for name, config in configs.items():
            config.bos_token_id = None
            config.save_pretrained(self.folder / name)
            transformers.ByT5Tokenizer().save_pretrained(self.folder / name)

    def check(self, name):
        """Run a check; keep, print and write its row, even if the check raises an exception."""
        begun, bench = time.monotonic(), Bench(self, name)
        try:
            if self.end - begun < LEAST:
                raise Skip("no time left")
            row = CHECKS[name](bench)
            if self.device == "cpu" and name in GPU_ONLY:
                raise Skip(GPU_ONLY[name])
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
        """Print a row; write all rows so far, in the order of CHECKS."""
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
        """Run the checks, side by side where possible, with two cores or more per check."""
        pool = ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 2) // 2)))
        try:
            list(pool.map(self.check, [name for name in TOGETHER if name in asked]))
            for name in ALONE:
                if name in asked:
                    self.check(name)
        finally:
            # Ctrl-C ends here, too.
            pool.shutdown(wait=False, cancel_futures=True)
            for job in self.jobs:
                job.kill()


def main():
    """Run the checks; exit with status 0 only if none failed."""
    args = parse_args()
    if args.list:
        return print(*args.names, sep="\n")
    # An exit runs the `finally` that kills the jobs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
        session = Session(args, folder)
        session.run(args.names)
    verdicts = [row["passed"] for row in session.rows.values()]
    failed, skipped = verdicts.count(False), verdicts.count(None)
    print(f"{len(verdicts)} checks, {failed} failed, {skipped} skipped: {session.output}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
