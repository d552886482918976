"""Train as chapter 03 does, but break on purpose what --inject names. Parent: 03-job-launchers.

Here:      torchrun --standalone --nproc-per-node 2 diagnosing-errors/train_llm.py \
               --inject hang-data@rank1:step12
For real:  the same on a cluster whose tools you want to try, with any launcher of chapter 03
"""

import argparse
import atexit
import ctypes
import faulthandler
import functools
import hashlib
import json
import math
import os
import pickle
import re
import resource
import shlex
import shutil
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
import uuid
from collections import Counter
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import chain, takewhile
from pathlib import Path

import datasets
import torch
import torch.distributed as dist
import transformers
import wandb
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, default_collate
from tqdm import tqdm
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

LAUNCHERS = {  # the variables with rank, world size, local rank, and number of ranks on this node
    "torchrun": ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
    "mpirun (Open MPI)": [
        f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    ],
    "mpirun (MPICH)": ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
    "deepspeed": ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"],
    "srun": ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"],
}

FAULTS = {  # what --inject knows, in the order of the README
    "crash": "an error in Python",
    "segfault": "an error in C",
    "oom-kill": "the system kills the process, as when memory runs out",
    "oom-device": "the device has no memory left",
    "hang-data": "the next batch never comes",
    "skip-collective": "this rank leaves out an all-reduce",
    "wrong-shape": "it reduces a tensor of another shape",
    "wrong-order": "it broadcasts where the others reduce",
    "stop-process": "the process is stopped, and may go on one day",
    "slow-compute": "every forward pass takes longer",
    "slow-data": "every batch takes longer",
    "nan-data": "the loss of one batch is NaN",
    "nan-gradient": "the gradient of one batch is NaN",
    "bit-flip": "one bit of a weight changes",
    "same-data": "this rank reads the samples of another",
    "loss-spike": "its samples are noise",
    "memory-leak": "host memory grows with every step",
    "file-leak": "so do the open files",
    "corrupt-checkpoint": "the newest checkpoint loses its second half",
}
BROKEN = set()  # which of them this rank has by now
LEAKED = []


def parse_args():
    """Return the arguments, checked as far as possible without data, and the batch split up."""
    adopt_launcher()
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="@FILE reads arguments from a file: a flag and its value per line, # for comments",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        fromfile_prefix_chars="@",
        allow_abbrev=False,
    )
    parser.convert_arg_line_to_args = lambda line: shlex.split(line, comments=True)
    parser.error = fail
    chapter = Path(__file__).resolve().parent.name
    device = "cuda" if torch.cuda.is_available() else "cpu"

    add = parser.add_argument_group("model").add_argument
    add("-m", "--model-name", default="tiny", help="hub id, folder, or tiny: a built-in Llama")
    add("--pretrained", action="store_true", help="start from published weights, not random ones")

    add = parser.add_argument_group("data").add_argument
    add("-d", "--dataset-name", default="pydoc", help="hub id, folder, .txt/.jsonl/.csv/.parquet")
    add("--dataset-subset", help="the configuration, of a hub dataset that has several")
    add("--text-column", default="text", help="the column that holds the text")
    add("-s", "--seq-length", type=at_least(2), default=256, help="tokens per sample")
    add("--num-proc", type=at_least(1), default=os.cpu_count(), help="processes that tokenize")

    add = parser.add_argument_group("optimization").add_argument
    add("--global-batch-size", type=at_least(1), default=32, help="samples per optimizer step")
    add("-b", "--batch-size", type=at_least(1), default=8, help="most samples per forward pass")
    add("--num-steps", type=at_least(1), default=100, help="optimizer steps in the whole run")
    add("--lr", type=at_least(0.0), default=1e-3, help="learning rate after the warm-up")
    add("--warmup-steps", type=at_least(0), default=10, help="steps of rising learning rate")
    add("--weight-decay", type=at_least(0.0), default=0.1, help="of matrices, not of vectors")
    add("--max-grad-norm", type=at_least(0.0), default=1.0, help="of the gradient; 0: no limit")
    add("--seed", type=at_least(0), default=0, help="of weights, data order and dropout")
    add("--on-nonfinite", choices=["stop", "skip"], default="stop", help="if a gradient has NaN")

    add = parser.add_argument_group("device").add_argument
    add("--device", choices=["cpu", "cuda"], default=device, help="where to train")
    add("--precision", choices=["auto", "bf16", "fp32"], default="auto", help="auto: bf16 on cuda")
    add("--compile", action="store_true", help="compile the layers and the loss")

    add = parser.add_argument_group("run").add_argument
    add("-e", "--experiment-name", default=chapter, help="the run's folder under --save-dir")
    add("--save-dir", default="outputs", help="where runs are kept")
    add("--checkpoint-every", type=at_least(1), default=50, help="steps from save to save")
    add("--keep-checkpoints", type=at_least(1), default=2, help="how many stay on disk")
    add("--eval-every", type=at_least(1), default=50, help="steps from evaluation to evaluation")
    add("--eval-samples", type=at_least(1), default=64, help="how many are held out for it")
    add("--log-every", type=at_least(1), default=10, help="steps from log line to log line")
    add("--wandb", choices=["disabled", "offline", "online"], default="disabled", help="mode")
    add("--dist-timeout", type=at_least(1), default=600, help="seconds a rank waits for others")
    add("--rank-logs", action="store_true", help="other ranks write to logs/ in the run's folder")
    add(
        "--inject",
        type=fault,
        action="append",
        metavar="FAULT@rankR:stepS",
        help=f"one of {', '.join(FAULTS)}",
    )

    args = parser.parse_args()
    if args.pretrained and args.model_name == "tiny":
        fail("--pretrained: there are no published weights of tiny; name a model with -m")
    if args.device == "cuda" and not torch.cuda.is_available():
        fail(f"--device cuda: torch {torch.__version__} sees no GPU here; take --device cpu")
    if args.precision == "auto":
        args.precision = "bf16" if args.device == "cuda" else "fp32"
    if "WORLD_SIZE" not in os.environ:
        fail(f"start this with a launcher, such as torchrun --nproc-per-node 2 {sys.argv[0]}")
    world_size = int(os.environ["WORLD_SIZE"])
    per_rank, rest = divmod(args.global_batch_size, world_size)
    if rest:
        fail(
            f"--global-batch-size {args.global_batch_size} does not divide by {world_size} ranks; "
            f"take {(per_rank + 1) * world_size}"
        )
    args.micro_batch_size, args.accumulation = split_batch(per_rank, args.batch_size)
    args.wandb_id = uuid.uuid4().hex[:8]
    check_writable(Path(args.save_dir, args.experiment_name).resolve())
    for name, rank, _ in args.inject or ():
        if rank >= world_size:
            fail(f"--inject {name}: there is no rank {rank} among {world_size}")
    return args


def fault(text):
    """Return name, rank and step of what --inject is given."""
    parts = re.fullmatch(r"([a-z-]+)@rank(\d+):step(\d+)", text)
    if not parts or parts[1] not in FAULTS:
        raise argparse.ArgumentTypeError(f"{text} is not like hang-data@rank1:step12")
    return parts[1], int(parts[2]), int(parts[3])


def adopt_launcher():
    """Set the variables that torchrun sets to what another launcher says of this process."""
    missing = {
        name: [key for key in keys if key not in os.environ] for name, keys in LAUNCHERS.items()
    }
    launcher = min(missing, key=lambda name: len(missing[name]))
    keys = LAUNCHERS[launcher]
    if missing[launcher] == keys:
        return  # nothing started this but a person, who may want --help
    if missing[launcher]:
        here, gone = (set(keys) - set(missing[launcher])).pop(), missing[launcher][0]
        fail(f"{here} is set, but {gone} is not: {launcher} sets both for what it starts")
    for name, key in zip(LAUNCHERS["torchrun"], keys, strict=True):
        os.environ[name] = re.match(r"\d+", os.environ[key])[0]  # "2(x4)" is 2 on each of 4 nodes
    if launcher == "srun":  # rank 0 is on the first node of a list such as gpu[03-07,12]
        nodes = re.sub(r"\[(\d+)[^]]*\]", r"\1", os.environ["SLURM_STEP_NODELIST"])
        step = 10 * int(os.environ["SLURM_JOB_ID"]) + int(os.environ["SLURM_STEP_ID"])
        os.environ.setdefault("MASTER_ADDR", nodes.split(",")[0])
        os.environ.setdefault("MASTER_PORT", str(10_000 + step % 20_000))  # of this step alone
    elif os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"]:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            fail(f"{name} is not set: give {launcher} one address and port of rank 0's node")


def setup(args):
    """Join the process group; return this rank's device."""
    signal.signal(signal.SIGINT, interrupted)
    os.register_at_fork(after_in_child=follow_parent)  # in the processes that tokenize
    if not sys.stderr.isatty():  # in a file, progress bars are noise
        datasets.disable_progress_bars()
        transformers.logging.disable_progress_bar()
    torch.set_float32_matmul_precision("highest")  # fp32 means fp32, not TF32
    if args.device == "cpu":
        keep_freed_memory()
    device = torch.device(args.device)
    if args.rank_logs and os.environ["RANK"] != "0":
        log_to_file(args)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # torch keeps the last collectives
    threading.Thread(target=follow_launcher, args=(os.getppid(),), daemon=True).start()
    if args.device == "cuda":
        ranks, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if ranks > gpus:
            fail(f"--nproc-per-node {ranks}: torch sees only {gpus} GPUs here")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # DDP: or else all ranks would put something on GPU 0
        join_group(args, "nccl", device_id=device)
    else:
        join_group(args, "gloo")
    return device


def follow_parent():
    """In a forked process: end at Ctrl-C without a word, and when what forked it is dead."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # which only Linux has
    if prctl:
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def keep_freed_memory():
    """Let glibc keep what tensors free, as every step needs it again.

    Otherwise it hands large blocks back, and takes new ones whose every page the system must clear:
    https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # which other C libraries do not have
    if mallopt:
        mallopt(-4, 0)  # M_MMAP_MAX: no block, however large, is outside of the heap
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: and the heap does not shrink


def join_group(args, backend, **options):
    """Meet the other ranks; if they do not come, say so and exit with 1: another try may do."""
    try:
        timeout = timedelta(seconds=args.dist_timeout)
        dist.init_process_group(backend, timeout=timeout, **options)
    except (RuntimeError, ValueError) as error:
        where = "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
        here = f"{Path(__file__).name}: error: {socket.gethostname()}"
        sys.exit(f"{here} cannot meet the other ranks at {where}: {first_line(error)}")


def log_to_file(args):
    """Send all that this rank prints from here on to a file of its own."""
    path = Path(
        args.save_dir, args.experiment_name, "logs", f"rank-{int(os.environ['RANK']):05}.log"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    print(f"rank {os.environ['RANK']} on {socket.gethostname()}, process {os.getpid()}", flush=True)


def follow_launcher(launcher):
    """End this process within ten seconds after the one that started it: nobody else would."""
    while os.getppid() == launcher:
        time.sleep(1)
    with suppress(OSError):
        print(f"the launcher (process {launcher}) is gone, so this rank ends", file=sys.stderr)
    signal.alarm(8)  # the system's own end to all that may hang
    os.kill(os.getpid(), signal.SIGTERM)  # until then there may be time for a save


class StopRequest:
    """Whether a rank was asked to stop: by SIGTERM, SIGUSR1, SIGHUP or a file `stop` of its run.

    All ranks agree on it without waiting for each other: in each step they begin to exchange what
    they know, and read what came of the exchange that was begun a step ago.
    """

    def __init__(self, run_dir):
        self.file = run_dir / "stop"
        self.signalled = False
        self.exchange = None
        if dist.get_rank() == 0:
            self.file.unlink(missing_ok=True)  # it was meant for the run before
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, self.receive)

    def receive(self, *_):
        self.signalled = True

    def agreed(self):
        """Return whether any rank knew of a request one step ago: the same answer on all ranks."""
        stop = False
        if self.exchange:
            self.exchange.wait()
            stop = bool(self.asked)
        asked = self.signalled or (dist.get_rank() == 0 and self.file.exists())
        self.asked = torch.tensor(int(asked))
        self.exchange = dist.all_reduce(
            self.asked, dist.ReduceOp.MAX, group=patient_group(), async_op=True
        )
        return stop


NOW = {"phase": "start", "step": 0, "step_ended": None, "error": None}  # what this rank does


def enter(phase):
    """Note what this rank does from now on, for its watchdog to tell."""
    NOW.update(phase=phase, since=time.time())


def during(phase):
    """Note that this rank is in a phase while it does this work."""

    def decorate(work):
        @functools.wraps(work)
        def noted_work(*args):
            before = NOW["phase"]
            enter(phase)
            done = work(*args)
            enter(before)
            return done

        return noted_work

    return decorate


@functools.cache
def patient_group():
    """Return a group of all ranks for waits that may take hours; others give up in minutes."""
    return dist.new_group(backend="gloo", timeout=timedelta(days=7))


def all_ranks(answer):
    """Return whether `answer` is true on every rank."""
    answers = torch.tensor(int(answer))
    dist.all_reduce(answers, dist.ReduceOp.MIN, group=patient_group())
    return bool(answers)


def while_others_wait(mine, work, *args):
    """Do the work if it is `mine`, or wait for it, however long; if that fails, all exit."""
    done = stop = None
    try:
        if mine:
            done = work(*args)
    except BaseException as error:
        stop = error
    if not all_ranks(stop is None):
        raise stop or SystemExit(2)
    return done


def on_rank_zero(work):
    """Let rank 0 do the work while the others wait."""

    @functools.wraps(work)
    def work_on_rank_zero(*args):
        while_others_wait(dist.get_rank() == 0, work, *args)

    return work_on_rank_zero


def in_turn(build):
    """Let rank 0 build first, then one rank of each node, then the rest: they find it cached."""

    @functools.wraps(build)
    def build_in_turn(*args):
        my_turn = 0 if dist.get_rank() == 0 else 1 if os.environ["LOCAL_RANK"] == "0" else 2
        built = [while_others_wait(turn == my_turn, build, *args) for turn in range(3)]
        return built[my_turn]

    return build_in_turn


def mean_over_ranks(value):
    """Return the mean of the ranks' values, on every rank."""
    total = value.clone()
    if "skip-collective" in BROKEN:
        return total
    if "wrong-shape" in BROKEN:
        total = total.repeat(1000)
    if "wrong-order" in BROKEN:
        dist.broadcast(total, src=0)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def from_all_ranks(value):
    """Return what each rank gave, in a list, on every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def say(message):
    """Print a line at once, without breaking the progress bar."""
    if os.environ["RANK"] != "0":
        return
    with suppress(OSError):  # no terminal any more, or no pipe, is no reason to stop
        tqdm.write(message)
        sys.stdout.flush()


def fail(message):
    """Stop because of what the user gave us: one line on stderr, exit status 2."""
    if NOW["phase"] == "stopped":
        sys.exit(130)  # after Ctrl-C whatever goes wrong is a consequence
    NOW.update(error=message)
    if os.environ.get("RANK", "0") != "0":
        time.sleep(10)  # DDP: rank 0 says it and torchrun ends us, or only we have this fault
    print(f"{Path(__file__).name}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def interrupted(*_):
    """Stop at Ctrl-C with one line; what was trained since the last checkpoint is lost."""
    enter("stopped")
    say("interrupted: the same command continues from the newest checkpoint")
    sys.excepthook = lambda *_: None  # whatever goes wrong from here on is a consequence
    sys.exit(130)


def at_least(minimum):
    """Return an argument type: numbers like `minimum` that are not below it."""

    def number(text):
        value = type(minimum)(text)
        if not value >= minimum:  # in this form it refuses NaN too
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, not {text}")
        return value

    number.__name__ = type(minimum).__name__  # which argparse shows for what is no number at all
    return number


def split_batch(samples, most):
    """Return the largest divisor of `samples` that is at most `most`, and how often it fits."""
    micro_batch_size = max(n for n in range(1, min(samples, most) + 1) if samples % n == 0)
    return micro_batch_size, samples // micro_batch_size


def check_writable(folder):
    """Stop if `folder` can be neither made nor written to."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        fail(f"--save-dir: cannot write to {folder}, because {there} is not a writable folder")


def mix(*numbers):
    """Return one 64-bit seed made of several numbers; sums would collide, as 1 + 2 and 2 + 1."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "little")


def first_line(error):
    """Return the first line of what an error says, for some say a page."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# ---- model -----------------------------------------------------------------------------------


@in_turn
def build_tokenizer_and_config(args):
    """Return the tokenizer and the configuration of `--model-name`."""
    if args.model_name == "tiny":
        tokenizer = ByT5Tokenizer()  # a token is a byte, so it needs no files
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(args.model_name)
            config = AutoConfig.from_pretrained(args.model_name)
        except (OSError, ValueError) as error:
            fail(f"--model-name {args.model_name}: {first_line(error)} Is it a folder or hub id?")
    longest = getattr(config, "max_position_embeddings", None) or args.seq_length
    if args.seq_length > longest:
        fail(f"--seq-length {args.seq_length}: {args.model_name} takes at most {longest} tokens")
    if len(tokenizer) > config.vocab_size:
        fail(
            f"--model-name {args.model_name}: its tokenizer has {len(tokenizer)} tokens, its "
            f"embedding only {config.vocab_size} rows; tokenizer and model do not belong together"
        )
    if tokenizer.eos_token_id is None or not tokenizer("text", add_special_tokens=False).input_ids:
        fail(f"--model-name {args.model_name}: its tokenizer has no end-of-text token or is empty")
    return tokenizer, config


def build_model(args, config):
    """Return the model with float32 weights on the CPU, equal for equal seeds on any device."""
    torch.manual_seed(args.seed)
    if args.pretrained:
        try:
            model = AutoModelForCausalLM.from_pretrained(args.model_name, dtype=torch.float32)
        except (OSError, ValueError) as error:
            fail(f"--pretrained --model-name {args.model_name}: {first_line(error)}")
    else:
        with torch.device("meta"):  # shapes alone, as transformers draws all values after it
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.to_empty(device="cpu").init_weights()
    model.train()

    # To build a mask, transformers makes the host wait for the device in every forward pass, and
    # for an attention under a name of our own it builds none: plain causal attention needs none.
    window = getattr(config, "sliding_window", None) or args.seq_length
    plain = model._supports_attention_backend and model.config._attn_implementation == "sdpa"
    if plain and args.seq_length <= window:
        AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
        model.set_attn_implementation("causal_sdpa")

    if args.compile:  # in place, so that the weights keep their names; once for all layers
        for layer in layers_of(model):
            layer.compile()
        model.loss_function = torch.compile(model.loss_function)
    return model


def layers_of(model):
    """Return the decoder layers: transformers names their class as one not to be split."""
    return [
        part for part in model.modules() if type(part).__name__ in (model._no_split_modules or ())
    ]


def build_optimizer(args, model):
    """Return AdamW, which decays the matrices and leaves norms and biases alone."""
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
    vectors = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )


def lr_at(args, step):
    """Return the learning rate of `step` (1 is the first): linear warm-up, cosine to a tenth."""
    if step <= args.warmup_steps:
        return args.lr * step / args.warmup_steps
    progress = (step - args.warmup_steps) / max(1, args.num_steps - args.warmup_steps)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


# ---- data ------------------------------------------------------------------------------------


@in_turn
def build_data(args, tokenizer):
    """Return training and held-out samples: datasets with `--seq-length` `input_ids` a row."""
    documents = load_documents(args)
    tokens = documents.map(
        tokenize,
        batched=True,
        num_proc=min(args.num_proc, len(documents) // 1000) or None,
        remove_columns=documents.column_names,
        fn_kwargs={"tokenizer": tokenizer, "column": args.text_column},
        desc="tokenizing",
    )
    samples = tokens.map(
        Packer(args.seq_length),
        batched=True,
        batch_size=100,  # with one process and one size, cores do not decide what a sample is
        desc="packing",
    ).with_format("torch")
    training = len(samples) - args.eval_samples
    if training < 1:
        fail(
            f"--dataset-name {args.dataset_name} makes {len(samples)} samples of {args.seq_length} "
            f"tokens, too few to hold {args.eval_samples} out and train on the rest: "
            "take more text, a smaller --seq-length, or fewer --eval-samples"
        )
    return samples.select(range(training)), samples.select(range(training, len(samples)))


def load_documents(args):
    """Return a dataset with a document per row."""
    name, path = args.dataset_name, Path(args.dataset_name)
    formats = {".txt": "text", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
    if path.is_file() != (path.suffix in formats):
        fail(f"--dataset-name {name}: there is no such {', '.join(formats)} file, folder or hub id")
    if path.is_file() and not path.stat().st_size:
        fail(f"--dataset-name {name}: this file is empty")
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # fail() reports errors in one line
    options = {}
    if path.suffix == ".txt" or any(path.glob("*.txt")):
        options["sample_by"] = "paragraph"  # blank lines separate documents
    if path.is_file():
        options["data_files"], name = name, formats[path.suffix]
    try:
        if name == "pydoc":
            documents = datasets.Dataset.from_generator(pydoc, gen_kwargs={"python": sys.version})
        else:
            documents = datasets.load_dataset(name, args.dataset_subset, split="train", **options)
    except Exception as error:  # datasets has dozens of kinds, many with the reason in the cause
        fail(f"--dataset-name {args.dataset_name}: {first_line(error.__cause__ or error)}")
    if args.text_column not in documents.column_names:
        columns = ", ".join(documents.column_names)
        fail(f"--text-column {args.text_column}: the columns of {args.dataset_name} are {columns}")
    if getattr(documents.features[args.text_column], "dtype", None) not in (
        "string",
        "large_string",
    ):
        fail(f"--text-column {args.text_column}: this column of {args.dataset_name} is not text")
    return documents


def pydoc(python):
    """Yield the documentation of the language that Python carries for its help()."""
    from pydoc_data.topics import topics

    for text in topics.values():
        yield {"text": text}


def tokenize(batch, tokenizer, column):
    """Turn texts into lists of token ids, each closed with the end-of-text token."""
    texts = [text or "" for text in batch[column]]
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return {"input_ids": [[*document, tokenizer.eos_token_id] for document in ids]}


class Packer:
    """Cuts the stream of all tokens into samples; what a batch leaves over begins the next."""

    def __init__(self, seq_length):
        self.seq_length = seq_length
        self.rest = []

    def __call__(self, batch):
        """Return the samples that are complete."""
        tokens = self.rest + list(chain.from_iterable(batch["input_ids"]))
        starts = range(0, len(tokens) - self.seq_length + 1, self.seq_length)
        self.rest = tokens[len(starts) * self.seq_length :]
        return {"input_ids": [tokens[start : start + self.seq_length] for start in starts]}


def fingerprint(samples):
    """Return a short hash of how many samples there are and of what a hundred of them hold."""
    some = samples.select(range(0, len(samples), 1 + len(samples) // 100))
    content = repr((len(samples), some.with_format(None)["input_ids"][:]))
    return hashlib.sha256(content.encode()).hexdigest()[:12]


class ResumableSampler(Sampler):
    """Yields sample ids without end, one seeded permutation of all samples after the other.

    It starts at any `position` at once, so that the step alone says which samples come next.
    """

    def __init__(self, num_samples, seed, position, rank, world_size):
        self.num_samples = num_samples
        self.seed = seed
        self.position = position
        self.rank = rank
        self.world_size = world_size

    def __iter__(self):
        position = self.position + self.rank
        while True:
            epoch, offset = divmod(position, self.num_samples)
            generator = torch.Generator().manual_seed(mix(self.seed, epoch))
            order = torch.randperm(self.num_samples, generator=generator)
            ids = order[offset :: self.world_size]  # DDP: the ranks take turns
            for chunk in ids.split(1024):  # as a list, all ids would take five times the memory
                yield from chunk.tolist()
            position += len(ids) * self.world_size


def build_loader(args, train_set, start):
    """Return batches, int64 of [micro-batch size, `--seq-length`], from step `start` on."""
    sampler = ResumableSampler(
        len(train_set),
        args.seed,
        position=start * args.global_batch_size,
        rank=0 if "same-data" in BROKEN else dist.get_rank(),
        world_size=dist.get_world_size(),
    )
    return DataLoader(
        train_set,
        batch_size=args.micro_batch_size,
        sampler=sampler,
        pin_memory=args.device == "cuda",
        collate_fn=collate,
    )


def collate(samples):
    """Return the batch of these samples."""
    if "hang-data" in BROKEN:
        time.sleep(1e6)
    if "slow-data" in BROKEN:
        time.sleep(1)
    batch = default_collate(samples)
    if "loss-spike" in BROKEN:
        batch["input_ids"].random_(256)
    return batch


# ---- one step --------------------------------------------------------------------------------


def loss_of(args, model, batch):
    """Return the mean loss of predicting each token of `batch` from those before it."""
    if "slow-compute" in BROKEN:
        time.sleep(1)
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=args.precision == "bf16"):
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    if "nan-data" in BROKEN:
        BROKEN.remove("nan-data")
        return loss * math.nan
    if "nan-gradient" in BROKEN:
        BROKEN.remove("nan-gradient")
        loss.register_hook(lambda gradient: gradient * math.nan)
    return loss


def train_step(args, model, optimizer, batches, step, device):
    """Take one optimizer step; return loss and gradient norm as they lie on the device."""
    torch.manual_seed(mix(args.seed, step, dist.get_rank()))
    total = torch.zeros((), device=device)
    for micro_step in range(args.accumulation):
        # DDP: gradients add up on each rank and are reduced once; no_sync() sets the same switch
        model.require_backward_grad_sync = micro_step == args.accumulation - 1
        batch = next(batches)["input_ids"].to(device, non_blocking=True)
        loss = loss_of(args, model, batch) / args.accumulation
        loss.backward()
        total += loss.detach()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
    for group in optimizer.param_groups:
        group["lr"] = lr_at(args, step)
    optimizer.found_inf = (~grad_norm.isfinite()).float()  # 1: AdamW leaves all as it was
    optimizer.step()
    optimizer.zero_grad()
    return total, grad_norm


def inject(args, model, run_dir, step):
    """Break what is to break on this rank in this step; return what that is."""
    here = dist.get_rank(), step
    begun = {name for name, *where in args.inject or () if tuple(where) == here}
    BROKEN.update(begun)
    if "memory-leak" in BROKEN:
        LEAKED.append(torch.ones(2**24))  # 64 MiB
    if "file-leak" in BROKEN:
        LEAKED.extend(open(__file__) for _ in range(200))
    for name in begun:
        print(f"rank {here[0]} breaks in step {step}: {FAULTS[name]}", file=sys.stderr, flush=True)
        break_now(name, model, run_dir)
    return begun


def break_now(name, model, run_dir):
    """Do what a fault does at once, if it does; the others do theirs where BROKEN is asked for."""
    match name:
        case "crash":
            raise RuntimeError("this was injected")
        case "segfault":
            ctypes.string_at(0)
        case "oom-kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "oom-device":
            torch.empty(2**50, device=model.device)
        case "stop-process":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "bit-flip":
            next(model.parameters()).data.view(torch.int32)[0, 0] ^= 2**20
        case "corrupt-checkpoint":
            state = max((run_dir / "checkpoints").glob("step-????????/state.pt"))
            os.truncate(state, state.stat().st_size // 2)


@during("evaluation")
@torch.no_grad()
def evaluate(args, model, held_out, device):
    """Return the mean loss of the held-out samples."""
    model.eval()
    total = torch.zeros((), device=device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for first in range(0, len(held_out), args.micro_batch_size * world_size):
        last = min(first + args.micro_batch_size * world_size, len(held_out))
        ids = range(first + rank, last, world_size)
        # DDP: all ranks do the same number of forward passes; one with nothing left counts zero
        batch = held_out[ids or range(1)]["input_ids"].to(device)
        total += loss_of(args, model, batch) * len(ids)
    model.train()
    dist.all_reduce(total)
    return (total / len(held_out)).item()


# ---- checkpoint ------------------------------------------------------------------------------


@contextmanager
def saving(path):
    """Stop with one line if what the block saves as `path` cannot be written."""
    try:
        yield
    except Exception as error:  # a full disk is of another kind in torch and in safetensors
        cause = error.__context__ or error
        fail(f"cannot write {path}: {first_line(cause)}; what was saved before is whole")


@contextmanager
def whole_folder(folder):
    """Give a folder to write to that appears as `folder` only when all of it is on the disk."""
    partial = folder.with_name(f".{folder.name}")
    make_empty(partial)
    try:
        yield partial
        publish(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def make_empty(folder):
    """Make a folder, without what a kill may have left in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def publish(partial, folder):
    """Give a folder its name, once all that is in it is on the disk."""
    for path in (*partial.rglob("*"), partial):
        flush(path)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)  # a kill while deleting would leave half of it
    partial.rename(folder)
    flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def flush(path):
    """Bring a file or folder from the system's memory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def check_shared(run_dir):
    """Stop if a node does not see what rank 0 writes to the run's folder."""
    probe = [run_dir / f".seen-{uuid.uuid4().hex}"]
    dist.broadcast_object_list(probe, group=patient_group())
    if dist.get_rank() == 0:
        with saving(probe[0]):
            run_dir.mkdir(parents=True, exist_ok=True)
            probe[0].touch()
    all_ranks(True)
    patience = time.monotonic() + 10  # network file systems show new files late
    while not probe[0].exists() and time.monotonic() < patience:
        time.sleep(0.1)
    blind = [None] * dist.get_world_size()
    here = None if probe[0].exists() else socket.gethostname()
    dist.all_gather_object(blind, here, group=patient_group())
    if dist.get_rank() == 0:
        probe[0].unlink()
    if blind := sorted(set(blind) - {None}):
        fail(f"--save-dir: {', '.join(blind)} cannot see what rank 0 writes to {run_dir.resolve()}")


@during("checkpoint")
@on_rank_zero
def save_checkpoint(args, run_dir, model, optimizer, step):
    """Save all that is not a function of the step, then delete the oldest checkpoints."""
    checkpoints = run_dir / "checkpoints"
    checkpoint = checkpoints / f"step-{step:08}"
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"step": step, "args": vars(args)}
    with saving(checkpoint), whole_folder(checkpoint) as folder:
        with open(folder / "state.pt", "wb") as file:
            torch.save(state, file)
    delete_oldest(args, checkpoints)


def delete_oldest(args, checkpoints):
    """Delete all but the newest `--keep-checkpoints`, and what a kill has left."""
    for old in sorted(checkpoints.glob("step-????????"))[: -args.keep_checkpoints]:
        old.rename(old.with_name(f".{old.name}"))  # first, since a kill may leave half of it
    for hidden in checkpoints.glob(".step-*"):  # on NFS one may be open still: the next save tries
        shutil.rmtree(hidden, ignore_errors=True)


def load_checkpoint(args, run_dir, model, optimizer):
    """Restore the newest checkpoint that can be read; return its step, which is 0 for a new run."""
    while checkpoint := newest_checkpoint(run_dir):
        state = read_checkpoint(checkpoint)
        if not all_ranks(state is not None):
            set_aside(checkpoint)
            continue
        compare_args(args, state["args"], checkpoint)
        model.load_state_dict(state["model"])
        settings = optimizer.state_dict()["param_groups"]  # as the command says, not as they were
        optimizer.load_state_dict(state["optimizer"] | {"param_groups": settings})
        say(f"continuing from {checkpoint}")
        return state["step"]
    return 0


def newest_checkpoint(run_dir):
    """Return the newest checkpoint's folder, or None if none was ever saved."""
    folders = sorted((run_dir / "checkpoints").glob("step-*"))
    whole = [folder for folder in folders if not folder.suffix]
    if folders and not whole:
        fail(f"no checkpoint in {run_dir}/checkpoints can be read; delete them all to start anew")
    choice = [whole[-1] if whole else None]
    dist.broadcast_object_list(choice, group=patient_group())  # DDP: all take what rank 0 found
    return choice[0]


def read_checkpoint(checkpoint):
    """Return what was saved, or None if it cannot be read."""
    try:
        return torch.load(checkpoint / "state.pt", "cpu", mmap=True, weights_only=True)
    except (MemoryError, PermissionError) as error:  # not the checkpoint's fault
        fail(f"cannot read {checkpoint}: {first_line(error)}; nothing was changed")
    except Exception as error:  # broken files raise many kinds
        say(f"{checkpoint} cannot be read: {first_line(error)}; trying the one before")
        return None


@on_rank_zero
def set_aside(checkpoint):
    """Mark a checkpoint as broken, so that it is neither tried nor counted again."""
    broken = checkpoint.with_suffix(".broken")
    shutil.rmtree(broken, ignore_errors=True)
    checkpoint.rename(broken)


def compare_args(args, before, checkpoint):
    """Stop if the checkpoint's run is another one; else say what has changed since."""
    args.wandb_id = before["wandb_id"]
    changed = {name for name, value in vars(args).items() if value != before.get(name)}
    told = "; ".join(
        f"{name} was {before.get(name)}, is {vars(args)[name]}" for name in sorted(changed)
    )
    if changed & {
        "model_name",
        "num_weights",
        "dataset_fingerprint",
        "seq_length",
        "global_batch_size",
        "seed",
    }:
        fail(f"{checkpoint} is from another run: {told}; choose another --experiment-name")
    if changed:
        say(f"changed since {checkpoint}: {told}")


@during("export")
@on_rank_zero
def export_model(run_dir, model, tokenizer):
    """Write the finished model as a folder that `from_pretrained` loads."""
    with saving(run_dir / "model"), whole_folder(run_dir / "model") as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


# ---- main ------------------------------------------------------------------------------------


PEAK_FLOPS = {  # dense bf16 matrix products a second, from the makers' data sheets
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "MI300X": 1307e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}


def mfu(args, model, tokens_per_second):
    """Return the model FLOPs utilisation, 1 at the device's peak, or None if that is unknown.

    A token takes 6 FLOPs per weight and 12 × layers × width × sequence length for attention:
    PaLM, appendix B, https://arxiv.org/abs/2204.02311. Looking up an embedding takes none.
    """
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    peak = next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)
    if peak is None or tokens_per_second is None or args.precision != "bf16":
        return None
    config, embedding = model.config, model.get_input_embeddings().weight
    weights = sum(weight.numel() for weight in model.parameters())
    if embedding is not model.get_output_embeddings().weight:
        weights -= embedding.numel()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    flops = 6 * weights + 12 * config.num_hidden_layers * width * args.seq_length
    return tokens_per_second * flops / (peak * dist.get_world_size())


def peak_memory_gib(args):
    """Return the most memory this process has held, on the GPU or else on the host."""
    if args.device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on a Mac, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


@on_rank_zero
def cut_back_metrics(run_dir, start):
    """Make metrics.jsonl end with the last row that the checkpoint of step `start` has seen."""
    path, new = run_dir / "metrics.jsonl", run_dir / "metrics.new"
    with saving(path):
        run_dir.mkdir(parents=True, exist_ok=True)
        rows = path.read_text().splitlines(keepends=True) if start and path.exists() else []
        # a kill may have torn the last row, which then has no end
        rows = takewhile(lambda row: row[-1] == "\n" and json.loads(row)["step"] <= start, rows)
        new.write_text("".join(rows))
        new.rename(path)


@on_rank_zero
def append_metrics(run_dir, row):
    """Add a row to metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    with saving(path), open(path, "a") as file:
        print(json.dumps(row), file=file)


def open_wandb(args, run_dir):
    """Start the wandb run, or the one that does nothing, or continue that of the checkpoint."""
    try:
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", "train-llm"),
            name=args.experiment_name,
            id=args.wandb_id,
            resume="allow",
            dir=run_dir,
            mode=args.wandb if dist.get_rank() == 0 else "disabled",
            config=vars(args),
        )
    except wandb.Error as error:
        fail(f"--wandb {args.wandb}: {first_line(error)}")


def checksum(model):
    """Return a number that is another one if a bit of the float32 weights is."""
    bits = [weight.detach().view(torch.int32) for weight in model.parameters()]
    return torch.stack([part.sum(dtype=torch.int32) for part in bits]).sum().item()


class Health:
    """Compares the ranks where the host waits for the device anyway.

    Were all gradients finite? Are the weights still equal? Has each rank data of its own?
    """

    def __init__(self, args, model):
        self.args = args
        self.model = model
        self.seen = {}
        self.broken = 0
        self.losses = [()] * dist.get_world_size()
        self.hosts = from_all_ranks(socket.gethostname())
        model.get_input_embeddings().register_forward_hook(self.follow)

    def follow(self, _, inputs, output):
        """Look at the gradient where its way back ends, before those of other ranks are added."""
        if output.requires_grad:
            output.register_hook(self.look)

    def look(self, gradient):
        """Count the micro-steps in which it was not finite."""
        self.broken += ~gradient.isfinite().all()

    def add(self, step, loss, grad_norm):
        """Keep what a step has given, as it lies on the device."""
        self.seen[step] = loss, grad_norm, self.broken
        self.broken = 0

    def check(self):
        """Stop, or only warn, if a gradient was not finite since the last check."""
        mine = {step: [float(value) for value in values] for step, values in self.seen.items()}
        self.seen.clear()
        if not mine:
            return
        ranks, sums = from_all_ranks(mine), from_all_ranks(checksum(self.model))
        for step in mine:
            losses, norms, broken = zip(*(seen[step] for seen in ranks), strict=True)
            if not math.isfinite(sum(norms)):
                self.report(step, self.origin(losses, broken))
            self.losses = [(*old, new)[-3:] for old, new in zip(self.losses, losses, strict=True)]
        NOW.update(losses=self.losses[dist.get_rank()])
        self.compare_weights(step, sums, range(len(sums)))
        self.compare_losses(step)

    def origin(self, losses, broken):
        """Return in words which ranks have made the gradient so."""
        if bad := [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]:
            return f"because the loss of {self.name(bad)} is not"
        if bad := [rank for rank, count in enumerate(broken) if count]:
            return f"because that of {self.name(bad)} alone is not"
        return "though no rank's loss, nor what came back through its layers, is to blame"

    def compare_weights(self, step, sums, replicas):
        """Stop if weights that were equal on these ranks are no more: no save may keep them."""
        common, count = Counter(sums[rank] for rank in replicas).most_common(1)[0]
        others = [rank for rank in replicas if sums[rank] != common]
        if others and count > len(others):
            self.stop(f"step {step}: the weights of {self.name(others)} differ from the replicas")
        if others:
            both = self.name(replicas)
            self.stop(f"step {step}: the weights of {both} differ: one of them is wrong")

    def compare_losses(self, step):
        """Warn if ranks have had the very same losses in three steps, as from the same data."""
        ranks_with = {}
        for rank, losses in enumerate(self.losses):
            ranks_with.setdefault(losses, []).append(rank)
        for losses, ranks in ranks_with.items():
            if len(ranks) > 1 and len(losses) == 3:
                told = f"step {step}: the same losses, so the same data: {self.name(ranks)}"
                NOW.update(warning=told)
                say(f"warning: {told}")

    def name(self, ranks):
        """Return what to call some ranks in a message."""
        return ", ".join(f"rank {rank} on {self.hosts[rank]}" for rank in ranks)

    def report(self, step, why):
        """Say that a step has changed nothing, and why; stop if the user wants it so."""
        told = f"step {step}: the gradient is not finite, {why}; no weight was changed"
        if self.args.on_nonfinite == "stop":
            self.stop(f"{told}, and --on-nonfinite skip would go on")
        say(f"warning: {told}")

    def stop(self, message):
        """Stop because of what all ranks have found at once: one says it."""
        NOW.update(error=message)
        if dist.get_rank() != 0:
            sys.exit(2)
        fail(message)


@on_rank_zero
def set_last_words_aside(run_dir):
    """Keep what the ranks told in the start before this one, until there is another."""
    told, before = run_dir / "ranks", run_dir / "ranks.before"
    with saving(told):
        shutil.rmtree(before, ignore_errors=True)
        if told.exists():
            told.rename(before)
        told.mkdir()


class Watchdog:
    """Tells in a file, every two seconds, what this rank does; in another, if it hangs, where.

    These are `ranks/00001.json` and `ranks/00001.dump.json` of the run; the second also comes when
    somebody touches `ranks/dump`. A thread writes them: it goes on while all else hangs, and ends
    with the process, so that a file that is not renewed tells something too.
    """

    def __init__(self, args, run_dir, model, device):
        set_last_words_aside(run_dir)
        self.folder = run_dir / "ranks"
        self.device = device
        self.about = {
            "rank": dist.get_rank(),
            "local_rank": int(os.environ["LOCAL_RANK"]),
            "world_size": dist.get_world_size(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": str(device),
            "started": time.time(),
            "num_steps": args.num_steps,
            "stall_after": args.dist_timeout / 2,  # seconds: soon enough to look at all ranks
        }
        if device.type == "cuda":
            self.about["device_uuid"] = str(torch.cuda.get_device_properties(device).uuid)
        self.dumped = self.asked = 0.0
        self.seconds_of_data = 0.0
        self.steps = []
        self.skew = {}
        enter("start")
        self.crash = open(self.file("crash"), "w")
        faulthandler.enable(self.crash)  # after a crash in C it says in which line of Python
        self.spare = open(os.devnull)  # gives its descriptor to the last words, if there is none
        model.get_input_embeddings().register_forward_hook(self.follow)
        sys.excepthook = functools.partial(self.failed, sys.excepthook)
        atexit.register(self.leave)
        threading.Thread(target=self.watch, daemon=True).start()

    def file(self, ending):
        """Return the path of this rank's file of a kind."""
        return self.folder / f"{self.about['rank']:05}.{ending}"

    def watch(self):
        """Write what there is to tell, in a thread of its own."""
        while True:
            self.tell()
            if reason := self.reason_to_dump():
                self.dump(reason)
            time.sleep(2)

    def tell(self):
        """Write what this rank does."""
        now = self.about | NOW | {"time": time.time(), "host_memory_gib": host_memory_gib()}
        if now["error"]:
            now["phase"] = "failed"
        if self.device.type == "cuda":
            now["device_memory_gib"] = torch.cuda.memory_allocated(self.device) / 2**30
        with suppress(OSError):  # it has no such folder if this is not Linux
            now["open_files"] = len(os.listdir("/proc/self/fd"))
        self.write("json", now)

    def write(self, ending, content):
        """Replace a file, so that nobody reads half of it; a full disk is for others to report."""
        path = self.file(ending)
        with suppress(OSError):
            path.with_suffix(".new").write_text(json.dumps(content, default=str))
            path.with_suffix(".new").rename(path)

    def failed(self, show, kind, error, trace):
        """Tell at once what ends this rank: others may fail because of it."""
        NOW["error"] = NOW["error"] or "".join(traceback.format_exception(kind, error, trace))
        self.spare.close()
        self.tell()
        self.dump("failed")
        show(kind, error, trace)

    def leave(self):
        """Tell how this rank ends; what has no error of its own ends because of another."""
        if NOW["phase"] not in ("finished", "stopped"):
            NOW["error"] = NOW["error"] or "SystemExit: another rank has failed"
        self.tell()

    def reason_to_dump(self):
        """Return why to say where this rank stands, or None."""
        with suppress(OSError):  # nobody has asked yet
            asked = (self.folder / "dump").stat().st_mtime
            if asked != self.asked:
                self.asked = asked
                return "asked"
        if time.time() - max(NOW["since"], self.dumped) > self.about["stall_after"]:
            say(f"warning: step {NOW['step']} does not end; {self.folder} tells where ranks stand")
            return "stall"

    def dump(self, reason):
        """Write where each thread stands, and which collectives were called."""
        self.dumped = time.time()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = [
            {"thread": names.get(thread), "frames": [*map(list, traceback.extract_stack(frame))]}
            for thread, frame in sys._current_frames().items()
        ]
        told = {"rank": self.about["rank"], "time": self.dumped, "reason": reason}
        self.write("dump.json", told | {"stacks": stacks, "collectives": last_collectives()})

    def watched(self, batches):
        """Yield the batches; note when this rank waits for one."""
        while True:
            enter("data")
            begun = time.perf_counter()
            batch = next(batches)
            self.seconds_of_data += time.perf_counter() - begun
            enter("compute")
            yield batch

    def begin(self, step):
        """Begin to time a step."""
        NOW["step"] = step
        self.begun = self.tick()

    def follow(self, _, inputs, output):
        """Time a backward pass until it comes to its end: there, ranks wait for each other."""
        if output.requires_grad:
            output.register_hook(self.note_end)

    def note_end(self, _):
        """Note that this rank has done its own part, unless the step has more micro-steps."""
        self.alone_until = self.tick()

    def end(self):
        """End to time a step; the first is left out, for it compiles."""
        if NOW["step_ended"]:
            self.steps.append((self.begun, self.alone_until, self.tick()))
        else:
            self.seconds_of_data = 0.0
        NOW["step_ended"] = time.time()

    def tick(self):
        """Return this moment: on a GPU, that at which the work given to it so far is done."""
        if self.device.type == "cpu":
            return time.perf_counter()
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment

    def compare(self):
        """Find for how much of a step the others wait for the slowest rank, and which it is."""
        if not self.steps:
            return
        own = statistics.mean(between(begun, alone) for begun, alone, _ in self.steps)
        whole = statistics.mean(between(begun, ended) for begun, _, ended in self.steps)
        data = self.seconds_of_data / len(self.steps)
        NOW.update(local_seconds=own, step_seconds=whole, data_seconds=data)
        NOW.setdefault("host_memory_gib_first", host_memory_gib())
        self.steps, self.seconds_of_data = [], 0.0
        each = from_all_ranks(own)
        slowest = each.index(max(each))
        others = [*each[:slowest], *each[slowest + 1 :]] or each
        wait = max(each) - statistics.median(others)
        self.skew = {"skew": wait / whole, "slowest_rank": slowest}


def between(begun, ended):
    """Return the seconds between two ticks."""
    return ended - begun if isinstance(begun, float) else begun.elapsed_time(ended) / 1000


def host_memory_gib():
    """Return the host memory that this process has now, or None where /proc does not tell."""
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 2**30


def last_collectives():
    """Return what torch's Flight Recorder knows, with the last hundred collectives."""
    torch_c = torch._C._distributed_c10d
    try:
        on_gpu = dist.is_initialized() and "nccl" in dist.get_backend()
        known = pickle.loads(torch_c._dump_nccl_trace() if on_gpu else torch_c._dump_fr_trace())
        last = known.get("entries", [])[-100:]
        for entry in last:  # of its stack, where this script calls it
            entry["frames"] = [at for at in entry["frames"] if at["filename"] == __file__][:3]
        return known | {"entries": last}
    except Exception as error:  # an inner part of torch: without it the stacks still help
        return {"error": first_line(error)}


def warn_if_slow(seconds):
    """Warn if a save takes longer than launchers wait between a request to stop and SIGKILL."""
    grace = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
    if seconds > grace:
        say(
            f"warning: saving took {seconds:.0f} s, and a launcher may kill after {grace:.0f}; "
            "set TORCH_ELASTIC_SHUTDOWN_TIMEOUT and the scheduler's grace to more"
        )


def due(args, step, *intervals):
    """Return whether a multiple of any of the intervals, or the last step, is reached."""
    return step == args.num_steps or any(step % interval == 0 for interval in intervals)


def is_finished(args, run_dir, start):
    """Return whether no step is missing and the model was written after the last of them."""
    model = run_dir / "model"
    if start < args.num_steps or not model.exists():
        return False
    return model.stat().st_mtime >= newest_checkpoint(run_dir).stat().st_mtime


def restart(step, loss):
    """Return `step` and the time at which the device has done it: speed is measured from there."""
    loss.item()
    return step, time.perf_counter()


def measure(args, model, step, loss, grad_norm, since):
    """Return the metrics of `step`; to read them, the host waits for the device."""
    row = {"step": step, "loss": mean_over_ranks(loss).item(), "grad_norm": grad_norm.item()}
    first, then = since
    tokens = (step - first) * args.global_batch_size * args.seq_length
    speed = tokens / (time.perf_counter() - then) if tokens else None
    return row | {
        "lr": lr_at(args, step),
        "tokens_per_second": speed,
        "mfu": mfu(args, model, speed),
        "peak_memory_gib": peak_memory_gib(args),
    }


@record
def main():
    """Train; started again with the same command, continue where the newest checkpoint is."""
    args = parse_args()
    device = setup(args)
    run_dir = Path(args.save_dir, args.experiment_name)
    tokenizer, config = build_tokenizer_and_config(args)
    train_set, held_out = build_data(args, tokenizer)
    args.dataset_fingerprint = fingerprint(train_set)
    model = build_model(args, config).to(device)
    args.num_weights = model.num_parameters()
    optimizer = build_optimizer(args, model)
    check_shared(run_dir)
    watchdog = Watchdog(args, run_dir, model, device)
    start = load_checkpoint(args, run_dir, model, optimizer)
    if is_finished(args, run_dir, start):
        enter("finished")
        say(f"{run_dir} is finished: it has {start} steps")
        return

    torch._dynamo.config.optimize_ddp = False  # DDP: or it would cut compiled layers into pieces
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    ddp.broadcast_buffers = False  # DDP: they never change, so no step has to send them
    cut_back_metrics(run_dir, start)
    run = open_wandb(args, run_dir)

    def log(row):
        append_metrics(run_dir, row | watchdog.skew)
        run.log(row | watchdog.skew, step=row["step"])
        say("  ".join(f"{name} {value:,.6g}" for name, value in row.items() if value is not None))

    if start == 0:
        log({"step": 0, "val_loss": evaluate(args, model, held_out, device)})
    batches = watchdog.watched(iter(build_loader(args, train_set, start)))
    health = Health(args, model)
    stop_request = StopRequest(run_dir)
    since = None
    for step in tqdm(
        range(start + 1, args.num_steps + 1),
        initial=start,
        total=args.num_steps,
        disable=None if dist.get_rank() == 0 else True,
    ):
        watchdog.begin(step)
        if "same-data" in inject(args, model, run_dir, step):
            batches = watchdog.watched(iter(build_loader(args, train_set, step - 1)))
        loss, grad_norm = train_step(args, ddp, optimizer, batches, step, device)
        watchdog.end()
        health.add(step, loss, grad_norm)
        since = since or restart(step, loss)  # the first step compiles, so it is not measured
        if due(args, step, args.log_every, args.eval_every):
            health.check()
            watchdog.compare()
            row = measure(args, model, step, loss, grad_norm, since)
            if due(args, step, args.eval_every):
                row["val_loss"] = evaluate(args, model, held_out, device)
            log(row)
            since = restart(step, loss)
        stop = stop_request.agreed()
        if due(args, step, args.checkpoint_every) or stop:
            saving_since = time.monotonic()
            health.check()
            save_checkpoint(args, run_dir, model, optimizer, step)
            warn_if_slow(time.monotonic() - saving_since)
            since = restart(step, loss)
        if stop and step < args.num_steps:
            enter("stopped")
            say(f"stopped at step {step}: the same command continues")
            run.finish()
            return

    export_model(run_dir, model, tokenizer)
    enter("finished")
    say(f"finished: {run_dir} has the model, the metrics and the last checkpoints")
    run.finish()


if __name__ == "__main__":
    main()
    if not dist.is_initialized():
        sys.exit()  # after --help
    all_ranks(True)  # DDP: no rank leaves while another may still need it
    dist.destroy_process_group()
