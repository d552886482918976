"""Check on a GPU what the guide says of GPUs, and write down what came out.

Here:    python benchmarks/gpu_check.py
Closer:  python benchmarks/gpu_check.py --only parity speed-01-compiled
No GPU:  python benchmarks/gpu_check.py --device cpu --only parity-01 resume-01

First, side by side, come the checks that may share a GPU, and then, one by one, those that need it
for themselves. What they train is in processes of its own. A check that fails or takes too long is
a row of the result like any other, and --output is written anew after each.
With --device cpu the same code runs with tiny sizes: that tries the checks, and no GPU.
Exit status: 0 nothing failed, 1 something did, 2 there is no GPU or an argument is wrong.
"""

import argparse
import importlib.util
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import transformers

from contenders import matmul_rate, with_labels
from every_family import ROWS, SENSITIVE
from speed import describe_machine, in_rows

ROOT = Path(__file__).resolve().parent.parent

CHAPTERS = ("01", "02", "03", "04", "05", "06", "07", "08")
TINY = """--seq-length 64 --global-batch-size 8 --batch-size 4 --num-steps 20 --log-every 1
    --eval-every 10 --eval-samples 10 --checkpoint-every 10"""
LONG = "--num-steps 1000000 --eval-every 1000000 --checkpoint-every 1000000 --eval-samples 2"
ONE_RANK = "--json --nodes 1 --gpus-per-node 1"  # for the planner
CONTEXT = "--context-parallel-size"
SPREAD = "--batch-size 2 --pipeline-parallel-size"  # four micro-batches
INTERLEAVED = f"--pipeline-schedule interleaved-1f1b {SPREAD}"
WINDOW, WINDOWS = 3, 3  # steps in a measurement of speed; measurements after a first, left out
WITHIN = (0, 1e-4)  # losses in float32 on unlike devices
ROUGHLY = (0, 1e-2)  # losses in bfloat16 and in float32; on an H200 they differ by 2e-3
BF16 = {"how": "--precision bf16 --compile", "within": ROUGHLY}
TIED = ["afmoe", "ernie4_5_moe"]  # all experts tie at first, and devices break ties differently
KINDS = {"nan-data": "not-finite", "oom-device": "device-out-of-memory"}  # what is to be found
LARGE = dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16)
LARGE |= dict(num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True)
SMALL = dict(vocab_size=384, hidden_size=64, intermediate_size=176, num_hidden_layers=2)
MIXTURE = SMALL | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
MIXTURE |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
MODELS = {  # by device; large is of the shape of Llama-3.2-1B, and of middle several run at once
    "cuda": {"large": LARGE, "middle": LARGE | {"vocab_size": 32000, "num_hidden_layers": 4}},
    "cpu": {"large": LARGE | SMALL, "middle": LARGE | SMALL},
}
ASK = "index,name,uuid,memory.total,driver_version,power.limit,clocks.max.sm,compute_mode"


def parse_args():
    """Return the arguments; stop if there is no GPU and none was forgone."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=formatter)
    parser.error = fail
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try the code alone")
    add("--only", nargs="+", metavar="NAME", default=[""], help="checks, or what they begin with")
    add("--list", action="store_true", help="print the names of all checks and exit")
    add("--budget", type=float, default=480.0, help="seconds for all; the last may get none")
    add("--output", type=Path, help="a JSON file (default: benchmarks/results/gpu-check-GPU.json)")
    args = parser.parse_args()
    args.names = [name for word in args.only for name in named(word)]
    if args.device == "cuda" and not args.list and not torch.cuda.is_available():
        fail(
            f"torch {torch.__version__} sees no GPU here; --device cpu tries the code of the checks"
        )
    return args


def named(word):
    """Return the name of a check, or all that begin so."""
    names = [word] if word in CHECKS else [name for name in CHECKS if name.startswith(word)]
    return names or fail(f"--only {word}: no check begins so; --list names them all")


def fail(message):
    """Stop because of what the user gave us: one line on stderr, exit status 2."""
    print(f"{Path(__file__).name}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


# ---- one check, and the processes that it starts ---------------------------------------------


class Skip(Exception):
    """Why a check says nothing."""


@dataclass
class Job:
    """A process with all that it starts: they have `mark` in their environment."""

    name: str
    process: subprocess.Popen
    mark: str
    folder: Path  # --save-dir with --experiment-name
    log: Path

    def rows(self):
        """Return the rows of metrics.jsonl; a last one that is not whole yet does not count."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def telling(self):
        """Return the lines that say why it failed, or else its last ones."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        pattern = r"(\[rank\d+\]: *)*([\w.]*(Error|Exception)\b|[\w.]+: error: )"
        errors = [line for line in lines if re.match(pattern, line) and "ChildFail" not in line]
        return " / ".join(dict.fromkeys((errors or lines)[-4:]))[:800]

    def kill(self):
        """Kill all of it, also what torchrun has put into sessions of its own."""
        kill_marked(self.mark)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)


def kill_marked(mark):
    """Kill all processes with `mark` in their environment; a driver may keep one from ending."""
    deadline = time.monotonic() + 10
    while victims := [path for path in Path("/proc").glob("[0-9]*") if is_marked(path, mark)]:
        for path in victims:
            with suppress(OSError):
                os.kill(int(path.name), signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)


def is_marked(path, mark):
    """Return whether a folder of /proc is of such a process."""
    with suppress(OSError):
        return mark.encode() in (path / "environ").read_bytes()


class Bench:
    """What a check works with: a folder, a deadline, its numbers, and ways to start processes."""

    def __init__(self, session, name):
        self.session, self.device, self.count = session, session.device, session.count
        self.deadline = min(time.monotonic() + CHECKS[name][2], session.end)
        self.folder = session.folder / name
        self.alone = CHECKS[name] in ALONE.values()
        self.jobs, self.numbers = [], {}

    def start(self, name, command, ranks=None, run=None):
        """Start Python with a command, under torchrun if it is for `ranks`; return the Job."""
        job, mark = self.folder / name, f"{self.session.mark}-{uuid.uuid4().hex}"
        job.mkdir(parents=True)
        cache = self.session.folder if self.alone else job  # which nobody else uses at this time
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GPU_CHECK": mark}
        env |= {"HF_HOME": f"{cache}/hf", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
        if ranks:
            launcher = ["-m", "torch.distributed.run", "--nproc-per-node", ranks]
            launcher += ["--master-addr", "127.0.0.1", "--master-port", free_port()]
            command = [*launcher, *command]
        else:  # Trainer takes all GPUs that it sees
            env["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        command = [sys.executable, *map(str, command)]
        with open(job / "out", "w") as out, open(job / "log", "w") as log:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": log}
            process = subprocess.Popen(command, env=env, start_new_session=True, **pipes)
        self.jobs.append(Job(name, process, mark, self.folder / (run or name) / "run", job / "log"))
        return self.jobs[-1]

    def train(self, chapter, flags, name="train", device=None, ranks=1, run=None):
        """Start a chapter, 01 by itself and the others under torchrun; return the Job."""
        flags = f"{flags} --save-dir {self.folder / (run or name)} --experiment-name run"
        command = [script_of(chapter), *flags.split(), "--device", device or self.device]
        return self.start(name, command, None if chapter == "01" else ranks, run)

    def here(self, name, flags):
        """Run a function of this file on chapter 01; keep the numbers that it finds."""
        path = self.folder / "numbers.json"
        where = f"--device {self.device} --save-dir {self.folder}/runs"
        command = ["--run", name, script_of("01"), path, *f"{flags} {where}".split()]
        try:
            self.wait(self.start(name, [__file__, *command]))
        finally:  # of what fails in the end, the beginning may be there
            self.numbers |= json.loads(path.read_text()) if path.exists() else {}

    def tool(self, name, *command, ok=(0,)):
        """Run a tool to its end; return what it printed on stdout."""
        job = self.wait(self.start(name, command), ok=ok)
        return job.log.with_name("out").read_text()

    def wait(self, job, until=None, ok=(0,)):
        """Return the job when `until()` is true or, without it, when it has ended well."""
        while True:
            met, status = until and until(), job.process.poll()
            if met or (status in ok and not until):
                return job
            if status is not None:
                raise RuntimeError(f"{job.name} ended with status {status}: {job.telling()}")
            if time.monotonic() > self.deadline:
                raise TimeoutError(f"{job.name} was not done in time: {job.telling()}")
            time.sleep(0.02)

    def judged(self, goals, reason=""):
        """Return a row: it passed if each number that has a goal, (least, most), is within it."""
        missed = [
            f"{name} is {self.numbers[name]:.4g}, not within {low:g} and {high:g}"
            for name, (low, high) in goals.items()
            if name in self.numbers and not low <= self.numbers[name] <= high
        ]
        return {"passed": not missed, "reason": "; ".join(filter(None, [*missed, reason]))}


def script_of(chapter):
    """Return the path of a chapter's script."""
    return next(ROOT.glob(f"{chapter}-*/train_llm.py"))


def free_port():
    """Return a port that nothing listens on, and that the system gives to no connection either."""
    while True:
        port = random.randrange(12_000, 30_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


# ---- in a process of its own, with chapter 01 as a module ------------------------------------


def prepare(chapter, args):
    """Return what the chapter's main() makes before it trains: device, tokenizer, and so on."""
    device, _ = chapter.setup(args)
    tokenizer, config = chapter.build_tokenizer_and_config(args)
    model = chapter.build_model(args, config).to(device)
    return device, tokenizer, model, chapter.build_optimizer(args, model)


def bare(chapter, args, keep):
    """Measure forward, backward, clip and step alone, eager and then compiled, and matmul."""
    device, _, model, optimizer = prepare(chapter, args)
    config = model.config
    width = config.num_hidden_layers * config.hidden_size
    flops = 6 * model.num_parameters() + 12 * width * args.seq_length  # PaLM, appendix B; tied
    keep({"GFLOP a token": flops / 1e9})
    for name in ("eager", "compiled"):
        if name == "compiled":  # as the chapter does it
            for layer in chapter.layers_of(model):
                layer.compile(dynamic=False)
            model.loss_function = torch.compile(model.loss_function, dynamic=False)
        speeds = [bare_window(args, model, optimizer, device) for _ in range(1 + WINDOWS)]
        rate = matmul_rate(device) / 1e12  # right after a model has trained
        keep({f"{name} tokens/s": median(speeds[1:]), f"matmul TFLOP/s, {name}": rate})


def bare_window(args, model, optimizer, device):
    """Take WINDOW steps on random tokens; return the tokens a second."""
    shape = args.micro_batch_size, args.seq_length
    batch = torch.randint(model.config.vocab_size, shape, device=device)
    batch[0, 0].item()  # now the device has nothing to do
    start = time.perf_counter()
    for _ in range(WINDOW):
        for _ in range(args.accumulation):
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            (loss / args.accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    next(model.parameters())[0, 0].item()  # which the last step has changed
    return WINDOW * args.global_batch_size * args.seq_length / (time.perf_counter() - start)


def trainer(chapter, args, keep):
    """Measure the Hugging Face Trainer on as many tokens, set up as its documentation does."""
    tokenizer, config = chapter.build_tokenizer_and_config(args)
    samples = chapter.build_data(args, tokenizer)[0].pieces[0]
    ends, steps = [], len(samples) // args.global_batch_size

    class Clock(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            if "loss" in logs:  # the last log of all has none
                ends.append(time.perf_counter())

    settings = {"output_dir": args.save_dir, "save_strategy": "no", "report_to": "none"}
    settings |= {"max_steps": WINDOW * (1 + WINDOWS), "logging_steps": WINDOW, "disable_tqdm": True}
    settings |= {"bf16": True, "optim": "adamw_torch_fused", "use_cpu": args.device == "cpu"}
    settings |= {"per_device_train_batch_size": args.micro_batch_size}
    settings |= {"gradient_accumulation_steps": args.accumulation}
    with torch.device(args.device):  # its weights may be any
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**settings),
        train_dataset=samples[: steps * args.global_batch_size],
        data_collator=with_labels,
        callbacks=[Clock()],
    ).train()
    tokens = WINDOW * args.global_batch_size * args.seq_length
    keep({"tokens/s": median(tokens / (end - start) for start, end in pairwise(ends))})


def no_waiting(chapter, args, keep):
    """Take steps while torch makes an error of whatever lets the host wait for the GPU."""
    device, tokenizer, model, optimizer = prepare(chapter, args)
    train_set, _ = chapter.build_data(args, tokenizer)
    mode = torch.cuda.set_sync_debug_mode if args.device == "cuda" else print
    for step in range(1, 6):
        mode("error" if step > 2 else "default")
        loss, _ = chapter.train_step(args, model, optimizer, train_set, step, device)
    keep({"steps": 3, "waits are seen": 0})
    try:
        loss.item()
    except RuntimeError:  # so the check can fail
        keep({"waits are seen": 1})
    mode("default")


def run_in_this_process():
    """Run what `Bench.here` asks for."""
    name, script, path = sys.argv[2:5]
    del sys.argv[1:5]
    spec = importlib.util.spec_from_file_location("chapter_01", script)
    chapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chapter)
    found = {}

    def keep(numbers):
        found.update(numbers)
        Path(path).write_text(json.dumps(found))

    globals()[name](chapter, chapter.parse_args(), keep)


# ---- checks ----------------------------------------------------------------------------------


def parity(bench, chapter, how="--precision fp32", model="", within=WITHIN):
    """A chapter's losses on one device, and on all, against one process in float32 on the CPU."""
    flags = f"{TINY} --global-batch-size {math.lcm(8, bench.count)}"
    flags += f" -m {bench.session.folder}/{model}" if model else ""
    jobs = {"cpu": bench.train(chapter, f"{flags} --precision fp32", "cpu", "cpu")}
    for ranks in {1} if chapter == "01" else {1, bench.count}:
        jobs[f"difference, ranks: {ranks}"] = bench.train(
            chapter, f"{flags} {how}", f"of-{ranks}", None, ranks
        )
    curves = {name: bench.wait(job).rows() for name, job in jobs.items()}
    reference = curves.pop("cpu")
    bench.numbers |= {name: difference(rows, reference) for name, rows in curves.items()}
    return bench.judged(dict.fromkeys(bench.numbers, within))


def split_layers(bench, chapter, flag, model=""):
    """Losses in float32 where GPUs split layers or spread them, against a process on the CPU."""
    size = math.gcd(bench.count, 4)  # of tiny's heads each has as many
    if size == 1:
        raise Skip("one GPU, or an odd number of them, splits nothing")
    flags = f"{TINY} --precision fp32 {model}"
    whole = bench.train(chapter, flags, "whole", "cpu")
    split = bench.train(chapter, f"{flags} {flag} {size}", "split", None, size)
    rows, others = bench.wait(split).rows(), bench.wait(whole).rows()
    bench.numbers |= {"ranks": size, "difference": difference(rows, others)}
    return bench.judged({"difference": WITHIN})


def difference(rows, others):
    """Return the largest difference between the losses of two runs."""
    one, other = ({row["step"]: row for row in each} for each in (rows, others))
    if one.keys() != other.keys():
        raise RuntimeError(f"{len(one)} steps are logged, and {len(other)} by what it is to equal")
    names = ("loss", "val_loss")
    return max(abs(one[n][name] - other[n][name]) for n in one for name in names if name in one[n])


def framework(bench, name, settings=""):
    """A framework's losses in both precisions, against chapter 01 in float32 on the CPU."""
    needs = "accelerate" if name == "trainer" else name
    if not importlib.util.find_spec(needs):
        raise Skip(f"{needs} is not installed")
    size = math.lcm(8, bench.count)
    options = f"{TINY} --global-batch-size {size}"
    reference = bench.train("01", f"{options} --precision fp32", "cpu", "cpu")
    script = ROOT / f"alternative-frameworks/{name}/train_llm.py"
    options += f" --device {bench.device} --experiment-name run"
    jobs = {}
    for precision in ("fp32", "bf16"):
        flags = f"{options} --save-dir {bench.folder / precision}"
        own = f"{settings} --precision {precision} --gpus-per-node {bench.count} --brief"
        own += f" --global-batch-size {size}"
        flags += f" --precision {precision}"
        if name == "deepspeed":  # its file has it, too
            own += " --batch-size 4"
        if settings:
            file = bench.folder / f"{precision}.{'json' if name == 'deepspeed' else 'yaml'}"
            writer = [ROOT / "tools/planner/will_it_fit.py", *own.split(), "--write-config", name]
            bench.tool(f"config-{precision}", *writer, file)
            flags += f" --{name}-config {file}"
        jobs[precision] = bench.start(precision, [script, *flags.split()], bench.count)
    curves = {precision: bench.wait(job).rows() for precision, job in jobs.items()}
    rows = bench.wait(reference).rows()
    bench.numbers |= {f"difference, {name}": difference(curves[name], rows) for name in curves}
    return bench.judged({"difference, fp32": WITHIN, "difference, bf16": ROUGHLY})


def families(bench):
    """Losses in float32 of all families of models in chapter 01, against those on the CPU."""
    some = ["llama", "gpt2", "bert"] if bench.device == "cpu" else ROWS
    rows = [row for row in some if row not in TIED + SENSITIVE]
    tool, paths = ROOT / "benchmarks/every_family.py", {}
    for name, device in {"there": "cpu", "here": bench.device}.items():
        paths[name] = bench.folder / f"{name}.json"
        flags = ["--chapters", "01", "--device", device, "--output", paths[name]]
        bench.start(name, [tool, "--only", *rows, *flags])
    for job in list(bench.jobs):
        bench.wait(job, ok=(0, 1))  # 1: a family fails, here or there
    there, here = (
        {row["family"]: row for row in json.loads(path.read_text())["rows"]}
        for path in paths.values()
    )
    told = {name: alike(there[name], here.get(name, {})) for name in there}
    for word in ("equal", "refused", "different"):
        bench.numbers[word] = sum(verdict.startswith(word) for verdict in told.values())
    names = [f"{name} is {told[name]}" for name in told if told[name].startswith("different")]
    return bench.judged({"different": (0, 0)}, "; ".join(names))


def alike(row, other):
    """Return how a family's row in the results of every_family.py compares with another."""
    if "curve" in row and "curve" in other:
        pairs = zip(row["curve"], other["curve"], strict=True)
        names = ("loss", "val_loss")
        far = max(abs(a[name] - b[name]) for a, b in pairs for name in names if name in a)
        return "equal" if far <= WITHIN[1] else f"different by {far:.1e}"
    return "refused" if "refused" in row and "refused" in other else "different: one fails"


def resume(bench, chapter, flags=""):
    """Kill a run with -9, start it again, and compare its losses with those of a whole run."""
    flags = f"{TINY} --precision fp32 --num-steps 100 --eval-every 50 {flags}"
    whole, torn = (bench.train(chapter, flags, name) for name in ("whole", "torn"))
    saved = torn.folder / "checkpoints/step-00000030"
    bench.wait(torn, until=lambda: saved.exists() and torn.rows()[-1]["step"] > 34)
    torn.kill()
    killed = torn.rows()[-1]["step"]
    again = bench.wait(bench.train(chapter, flags, "again", run="torn"))
    said = again.log.with_name("out").read_text()
    found = re.search(r"continuing from .*/step-0*(\d+)", said)
    if killed >= 100 or not found:
        raise RuntimeError(f"killed in step {killed}, and then it did not continue: {said[-200:]}")
    bench.numbers |= {"killed in step": killed, "resumed from step": int(found[1])}
    bench.numbers["difference"] = difference(again.rows(), bench.wait(whole).rows())
    return bench.judged({"difference": WITHIN})


def no_sync(bench):
    """No step of chapter 01 lets the host wait for the GPU."""
    bench.here("no_waiting", TINY)
    return bench.judged({"waits are seen": (1, 1)})


def memory(bench, chapter, flags=""):
    """The most that tensors take on a GPU, against the planner."""
    flags = f"-m {bench.session.folder}/middle -s 1024 -b 4 --precision bf16 {flags}"
    # in chapter 01 gradients last as those of DDP do, but there is no second copy of them
    plan = "02 --global-batch-size 4" if chapter == "01" else f"{chapter} --global-batch-size 8"
    with bench.session.room:
        options = f"{flags} --global-batch-size 8 {LONG} --log-every 1"
        job = bench.train(chapter, options)
        planner = [ROOT / "tools/planner/will_it_fit.py", *ONE_RANK.split(), *flags.split()]
        planner += f"--device {bench.device} --chapter {plan}".split()
        told = bench.tool("plan", *planner, ok=(0, 1))  # 1: it would not fit
        bench.wait(job, until=lambda: len(job.rows()) > 4)  # the first is of step 0
        job.kill()
    planned = json.loads(told)["asked"]["gpu_total"] / 2**30
    bench.numbers |= {"peak GiB": job.rows()[-1]["peak_memory_gib"], "planned GiB": planned}
    bench.numbers["planned / peak"] = planned / bench.numbers["peak GiB"]
    return bench.judged({"planned / peak": (0.9, 1.1)})


def watched(bench):
    """What watched.py tells of a rank's GPU, and that no step waits for it."""
    bench.folder.mkdir(parents=True, exist_ok=True)
    waits = bench.folder / "waits.py"  # the script raises where its host waits for the device
    script = script_of("01")
    waits.write_text(WAITS.format(script=str(script)))
    tool, where = ROOT / "diagnosing-errors/watched.py", bench.folder / "train/run"
    flags = f"{TINY} --device {bench.device} --num-steps 60 --log-every 1000 --eval-every 1000"
    flags += f" --checkpoint-every 1000 --save-dir {where.parent} --experiment-name run"
    job = bench.start("train", [tool, "--into", where, waits, *flags.split()], ranks=0)
    bench.wait(job)
    beat = json.loads((where / "ranks/00000.json").read_text())
    bench.numbers |= {"step": beat["step"], "looks": len(beat["checks"])}
    if bench.device == "cuda":
        bench.numbers["GiB on the device"] = beat["device_memory_gib"]
    goals = {"GiB on the device": (1e-4, math.inf), "looks": (4, 4)}
    return bench.judged(goals, str(beat["fault"] or ""))


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


def fault(bench, name):
    """Whether whats_wrong.py names what was broken on purpose, and the rank."""
    tools, run = ROOT / "diagnosing-errors", bench.folder / "train/run"
    flags = f"{TINY} --device {bench.device} --save-dir {run.parent} --experiment-name run"
    broken = [tools / "inject.py", f"{name}@rank0:step12", script_of("03"), *flags.split()]
    command = [tools / "watched.py", "--into", run, *broken]
    job = bench.start("train", command, ranks=1)
    bench.wait(job, ok=range(1, 256))
    command = [tools / "whats_wrong.py", run, "--json"]
    said = json.loads(bench.tool("tool", *command, ok=(0, 1, 3)))
    right = said["kind"] == KINDS[name] and said["ranks"] == [0]
    return {"passed": right, "reason": f"{said['kind']} {said['ranks']}: {said['reason']}"[:400]}


def preflight(bench):
    """Whether preflight.py, on one rank, lets this machine train."""
    flags = f"--device {bench.device} --save-dir {bench.folder}/runs"
    command = [ROOT / "diagnosing-errors/preflight.py", *flags.split()]
    job = bench.start("preflight", command, ranks=1)
    bench.wait(job, ok=(0, 1))
    said = job.log.with_name("out").read_text()
    if rate := re.search(r"^matmul +([\d.]+) TFLOP/s$", said, re.M):
        bench.numbers["matmul TFLOP/s"] = float(rate[1])
    found = re.findall(r"^(?:no-go|warning|go)\b.*", said, re.M)
    return {"passed": "\ngo: " in said, "reason": "; ".join(found) or job.telling()}


def speed_flags(bench, ranks=1):
    """Return the flags of all that is compared in speed."""
    length, batch, micro = (4096, 8, bench.session.micro) if bench.device == "cuda" else (64, 4, 2)
    flags = f"-m {bench.session.folder}/large -s {length} -b {micro} --precision bf16"
    return f"{flags} --global-batch-size {batch * ranks} {LONG} --log-every {WINDOW}"


def speed_bare(bench):
    """The most that could be: a loop with nothing around it, and the rate of matrix products."""
    bench.here("bare", speed_flags(bench))
    return bench.judged({})


def speed_trainer(bench):
    """The Hugging Face Trainer on one device, not compiled."""
    if not importlib.util.find_spec("accelerate"):
        raise Skip("accelerate is not installed, and the Trainer needs it")
    bench.here("trainer", speed_flags(bench))
    return bench.judged({})


def speed(bench, chapter, how="compiled"):
    """Tokens a second of a chapter on one device, from 02 on on all, against what could be."""
    ranks = 1 if chapter == "01" else bench.count
    flags = speed_flags(bench, ranks) + (" --compile" if how == "compiled" else "")
    job = bench.train(chapter, flags, ranks=ranks)
    bench.wait(job, until=lambda: len(job.rows()) > 1 + WINDOWS)
    job.kill()
    rows = job.rows()[2:]  # after that of step 0, and the first window
    each = median(row["tokens_per_second"] for row in rows)
    bench.numbers |= {"ranks": ranks, "tokens/s": each}
    bench.numbers |= {"mfu": rows[-1]["mfu"]} if rows[-1]["mfu"] else {}  # of a known GPU
    bench.numbers["peak GiB"] = rows[-1]["peak_memory_gib"]
    bench.numbers |= ratios(bench.session.rows, each / ranks, how)
    goals = {"to trainer": (1.1, math.inf), "to bare": (0.95, math.inf), "to matmul": (0.65, 1)}
    missing = ", ".join(goals.keys() - bench.numbers.keys())
    judged = (chapter, how, bench.device) == ("01", "compiled", "cuda")
    row = bench.judged(goals if judged else {}, missing and f"not known: {missing}")
    if judged and missing and row["passed"]:
        raise Skip(row["reason"])  # nothing was missed, but not all was there to be compared
    return row


def ratios(rows, per_rank, how):
    """Return how the tokens a second of a rank compare with what was measured before."""
    bare, trainer = (rows.get(f"speed-{n}", {}).get("numbers", {}) for n in ("bare", "trainer"))
    found = {"to trainer": per_rank / trainer["tokens/s"]} if trainer else {}
    if f"matmul TFLOP/s, {how}" in bare:
        found["to bare"] = per_rank / bare[f"{how} tokens/s"]
        rate = bare[f"matmul TFLOP/s, {how}"] * 1e3
        found["to matmul"] = per_rank * bare["GFLOP a token"] / rate
    return found


MEMORY = dict.fromkeys(("01", "02", "04", "05"), "")
MEMORY |= {"05-offload": "--cpu-offload", "05-full": "--recompute full"}
MEMORY |= {"05-selective": "--recompute selective"}
DEEPSPEED = {"zero2": "--no-reshard-after-forward", "zero3": "--reshard-after-forward"}
DEEPSPEED["offload"] = "--cpu-offload"
# what it does, the seconds without which it does not begin, and those it may take
TOGETHER = {
    **{f"parity-{name}": (partial(parity, chapter=name), 30, 150) for name in CHAPTERS},
    **{
        f"mixture-{name}": (partial(parity, chapter=name, model="mixture"), 30, 150)
        for name in ("01", "05")
    },
    **{f"bf16-{name}": (partial(parity, chapter=name, **BF16), 30, 150) for name in CHAPTERS},
    "bf16-mixture": (partial(parity, chapter="05", model="mixture", **BF16), 30, 150),
    "split-layers": (partial(split_layers, chapter="06", flag="--tensor-parallel-size"), 30, 150),
    "spread-layers": (partial(split_layers, chapter="07", flag=SPREAD), 30, 150),
    # With two stages on each rank, stages of distant ranks exchange tensors, too.
    "interleaved-layers": (
        partial(split_layers, chapter="07", flag=INTERLEAVED, model="--config num_hidden_layers=8"),
        30,
        150,
    ),
    "split-sequences": (partial(split_layers, chapter="08", flag=CONTEXT), 30, 150),
    "accelerate-ddp": (partial(framework, name="accelerate", settings="--chapter 02"), 40, 150),
    "accelerate-fsdp2": (
        partial(framework, name="accelerate", settings="--chapter 05"),
        40,
        150,
    ),
    "trainer": (partial(framework, name="trainer"), 40, 150),
    **{
        f"deepspeed-{name}": (partial(framework, name="deepspeed", settings=flags), 40, 200)
        for name, flags in DEEPSPEED.items()
    },
    "families": (families, 60, 400),
    "no-sync": (no_sync, 20, 100),
    "resume-01": (partial(resume, chapter="01"), 30, 150),
    "resume-05-async": (partial(resume, chapter="05", flags="--checkpoint-async"), 40, 150),
    **{f"memory-{n}": (partial(memory, chapter=n[:2], flags=MEMORY[n]), 30, 300) for n in MEMORY},
    "watched": (watched, 30, 120),
    **{f"fault-{name}": (partial(fault, name=name), 30, 120) for name in KINDS},
}
ALONE = {
    "speed-bare": (speed_bare, 60, 200),
    "speed-trainer": (speed_trainer, 40, 150),
    "speed-01-compiled": (partial(speed, chapter="01"), 40, 150),
    "preflight": (preflight, 20, 90),
    "speed-01": (partial(speed, chapter="01", how="eager"), 40, 150),
    "speed-04-compiled": (partial(speed, chapter="04"), 40, 150),
    "speed-05-compiled": (partial(speed, chapter="05"), 40, 150),
    "speed-02-compiled": (partial(speed, chapter="02"), 40, 150),
}
CHECKS = TOGETHER | ALONE
GPU_ONLY = {"no-sync": "a CPU is not waited for"}
GPU_ONLY |= {f"memory-{name}": "on a CPU the peak is that of the process" for name in MEMORY}


# ---- all checks ------------------------------------------------------------------------------


def known(read):
    """Return what `read` returns, or None: no fact about a machine is worth an error."""
    with suppress(Exception):
        return read()


def describe_gpus(device):
    """Return what is known of the GPUs and their software."""
    if device == "cpu":
        return {"gpus": [{"name": "cpu"}], "count": 2}  # processes, to try several ranks
    command = ["nvidia-smi", f"--query-gpu={ASK}", "--format=csv,noheader,nounits"]
    # torch is not asked: it may take memory on a GPU, which preflight.py wants to find free
    smi = known(lambda: subprocess.check_output(command, text=True, timeout=20).splitlines()) or []
    gpus = [dict(zip(ASK.split(","), line.split(", "), strict=False)) for line in smi]
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # comes first here, too
    gpus.sort(key=lambda gpu: first != gpu["index"] and not gpu["uuid"].startswith(first))
    for gpu in gpus:
        del gpu["uuid"]
    return {
        "gpus": gpus or [{"name": known(torch.cuda.get_device_name)}],
        "count": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "nccl": known(lambda: ".".join(map(str, torch.cuda.nccl.version()))),
    }


class Session:
    """What all checks share: the machine, the time, the folder, and the rows so far."""

    def __init__(self, args, folder):
        self.device, self.folder = args.device, Path(folder)
        self.end, self.mark = time.monotonic() + args.budget, uuid.uuid4().hex
        self.machine = describe_machine(gpus=False) | describe_gpus(args.device)
        self.count, [gpu, *_] = self.machine["count"], self.machine["gpus"]
        size = known(lambda: float(gpu["memory.total"]) / 1024) or 16
        self.micro = 2 if size > 70 else 1  # as the planner says: 53 GiB, or 39, in chapter 02
        self.room = threading.Semaphore(max(1, int(size / 20)))  # of `memory`
        slug = re.sub("[^a-z0-9]+", "-", (gpu["name"] or "unknown").lower()).strip("-")
        self.output = args.output or ROOT / f"benchmarks/results/gpu-check-{slug}.json"
        self.rows, self.lock = {}, threading.Lock()
        tokenizer = transformers.ByT5Tokenizer()
        for name, shape in MODELS[args.device].items():
            transformers.LlamaConfig(
                **shape, max_position_embeddings=8192, bos_token_id=None, eos_token_id=1
            ).save_pretrained(self.folder / name)
            tokenizer.save_pretrained(self.folder / name)
        mixture = transformers.Qwen3MoeConfig(**MIXTURE, eos_token_id=1)
        mixture.save_pretrained(self.folder / "mixture")
        tokenizer.save_pretrained(self.folder / "mixture")

    def check(self, name):
        """Run a check, come what may; keep, print and write its row."""
        work, least, _ = CHECKS[name]
        begun, bench = time.monotonic(), Bench(self, name)
        try:
            if self.end - begun < least:
                raise Skip("no time left")
            row = work(bench)
            if self.device == "cpu" and name in GPU_ONLY:
                raise Skip(GPU_ONLY[name])
        except Skip as reason:
            row = {"passed": None, "reason": str(reason)}
        except Exception as error:  # of a CUDA, for example, that is not as was thought
            row = {"passed": False, "reason": f"{type(error).__name__}: {error}"[:1000]}
        for job in bench.jobs:
            job.kill()
        if row["passed"] is False:
            row["logs"] = {
                job.name: job.log.read_text(errors="replace")[-3000:] for job in bench.jobs
            }
        shutil.rmtree(bench.folder, ignore_errors=True)
        seconds = time.monotonic() - begun
        self.keep({"name": name, "seconds": seconds, "numbers": bench.numbers} | row)

    def keep(self, row):
        """Print a row; write all there are, in the order of CHECKS."""
        verdict = {True: "passed", False: "FAILED", None: "skipped"}[row["passed"]]
        numbers = [f"{name} {value:.4g}" for name, value in row["numbers"].items()]
        told = "; ".join(filter(None, [row["reason"], ", ".join(numbers)]))
        machine = dict(self.machine)
        head = {name: machine.pop(name) for name in ("date", "command")}
        with self.lock:
            print(f"{verdict:8} {row['name']:18} {row['seconds']:4.0f} s  {told}", flush=True)
            self.rows[row["name"]] = row
            rows = [self.rows[name] for name in CHECKS if name in self.rows]
            text = in_rows({"machine": machine, **head, "rows": rows})
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self.output.with_suffix(".new").write_text(text + "\n")
            self.output.with_suffix(".new").replace(self.output)

    def run(self, asked):
        """Run the checks: side by side what may be, with two cores or more for each."""
        names = [name for name in CHECKS if name in asked]
        pool = ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 2) // 2)))
        try:
            list(pool.map(self.check, [name for name in names if name in TOGETHER]))
            for name in (name for name in names if name in ALONE):
                self.check(name)
        finally:  # also at Ctrl-C
            pool.shutdown(wait=False, cancel_futures=True)
            kill_marked(self.mark)


def main():
    """Run the checks; exit with 0 only if none failed."""
    args = parse_args()
    if args.list:
        return print(*args.names, sep="\n")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what kills the jobs
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
        session = Session(args, folder)
        session.run(args.names)
    verdicts = [row["passed"] for row in session.rows.values()]
    failed, skipped = verdicts.count(False), verdicts.count(None)
    print(f"{len(verdicts)} checks, {failed} failed, {skipped} skipped: {session.output}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:  # as which Bench.here() starts this script
        run_in_this_process()
    else:
        main()
