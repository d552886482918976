"""Train a causal language model in fp16, on GPUs that have no bf16. Parent: 02-ddp.

Here:      torchrun --standalone --nproc-per-node 2 related-topics/fp16/train_llm.py \
               --precision fp16
For real:  torchrun --standalone --nproc-per-node gpu related-topics/fp16/train_llm.py \
               -m Qwen/Qwen3-0.6B -d roneneldan/TinyStories -s 1024 -b 1 \
               --global-batch-size 64 --num-steps 5000 --precision fp16
"""

import argparse
import ctypes
import functools
import hashlib
import json
import math
import os
import resource
import shlex
import shutil
import signal
import sys
import time
import uuid
from array import array
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from pydoc_data.topics import topics

import datasets
import torch
import torch.distributed as dist
import transformers
import wandb
from datasets.fingerprint import Hasher
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.initialization import no_init_weights
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def parse_args():
    """Return the arguments, checked as far as that needs no data, and the batch split up."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(formatter_class=formatter, fromfile_prefix_chars="@")
    parser.allow_abbrev = False
    parser.convert_arg_line_to_args = lambda line: shlex.split(line, comments=True)
    parser.error = fail
    chapter = Path(__file__).resolve().parent.name
    add = parser.add_argument

    add("-m", "--model-name", default="tiny", help="hub id, folder, or tiny: a built-in Llama")
    add("--config", nargs="+", default=[], metavar="NAME=VALUE", help="change its configuration")
    add("--pretrained", action="store_true", help="start from published weights, not random ones")

    add("-d", "--dataset-name", default="pydoc", help="hub id, folder, .txt/.jsonl/.csv/.parquet")
    add("--dataset-subset", help="the configuration, of a hub dataset that has several")
    add("--text-column", default="text", help="the column that holds the text")
    add("-s", "--seq-length", type=int, default=256, help="tokens per sample")

    add("--global-batch-size", type=int, default=32, help="samples per optimizer step")
    add("-b", "--batch-size", type=int, default=8, help="most samples per forward pass")
    add("--num-steps", type=int, default=100, help="optimizer steps in the whole run")
    add("--lr", type=float, default=1e-3, help="learning rate after the warmup")
    add("--warmup-steps", type=int, default=10, help="steps in which the learning rate rises")
    add("--weight-decay", type=float, default=0.1, help="for matrices, not for vectors")
    add("--max-grad-norm", type=float, default=1.0, help="gradients are clipped to it; 0: never")
    add("--seed", type=int, default=0, help="for weights, data order and dropout")

    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda if there")
    add(
        "--precision",
        choices=["auto", "bf16", "fp32", "fp16"],
        default="auto",
        help="auto: bf16 on cuda",
    )
    add("--compile", action="store_true", help="compile the layers and the loss")
    add("--init-scale", type=float, default=2.0**16, help="of the loss, in fp16: the first one")

    add("-e", "--experiment-name", default=chapter, help="the run's folder under --save-dir")
    add("--save-dir", default="outputs", help="where runs are kept")
    add("--checkpoint-every", type=int, default=50, help="steps between checkpoints")
    add("--keep-checkpoints", type=int, default=2, help="how many stay on disk")
    add("--eval-every", type=int, default=50, help="steps between evaluations")
    add("--eval-samples", type=int, default=64, help="how many samples are held out for them")
    add("--log-every", type=int, default=10, help="steps between log lines")
    add("--wandb", choices=["disabled", "offline", "online"], default="disabled", help="mode")

    args = parser.parse_args()
    may_be_zero = ["lr", "warmup_steps", "weight_decay", "max_grad_norm", "seed"]
    for name, value in vars(args).items():
        least = 0 if name in may_be_zero else 2 if name == "seq_length" else 1
        if type(value) in (int, float) and not value >= least:  # in this form it refuses NaN too
            fail(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    if args.pretrained and args.model_name == "tiny":
        fail("--pretrained: there are no published weights of tiny; name a model with -m")
    if args.device == "auto":
        args.device = "cuda" if has_gpu() else "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        fail(f"torch {torch.__version__} finds no GPU that works; to do without, pass --device cpu")
    if args.precision == "auto":  # GPUs before 8.0 have no units for bf16 and emulate it slowly
        fast = args.device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
        args.precision = "bf16" if fast else "fp32"
    if "LOCAL_RANK" not in os.environ:
        fail(f"start this with torchrun: torchrun --standalone --nproc-per-node 2 {sys.argv[0]}")
    world_size = int(os.environ["WORLD_SIZE"])
    samples, rest = divmod(args.global_batch_size, world_size)
    if rest:
        fail(f"--global-batch-size {args.global_batch_size} does not divide by {world_size} ranks")
    args.micro_batch_size = max(n for n in range(1, args.batch_size + 1) if samples % n == 0)
    args.accumulation = samples // args.micro_batch_size
    args.wandb_id = uuid.uuid4().hex[:8]
    return args


def has_gpu():
    """Return whether this process was given a GPU, even if torch cannot use it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1"):
        return False  # hidden on purpose
    driver = os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")
    return driver or visible or "SLURM_GPUS_ON_NODE" in os.environ or torch.cuda.is_available()


def setup(args):
    """Join the process group; return this rank's device and the run's folder."""
    if sys.platform == "linux":  # DDP: no rank outlives torchrun, or two runs would share a folder
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    sys.stdout.reconfigure(line_buffering=True)
    if not sys.stderr.isatty():  # in a file, progress bars are noise
        datasets.disable_progress_bars()
        transformers.logging.disable_progress_bar()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # fail() reports its errors
    run_dir = Path(args.save_dir, args.experiment_name)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--save-dir {args.save_dir}: {error}")
    device = torch.device(args.device)
    if args.device == "cuda":
        index, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if index >= gpus:
            fail(f"local rank {index} has no GPU: torch sees {gpus} here")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)  # DDP: or else all ranks would put something on GPU 0
    backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend)
    if dist.get_rank() != 0:  # DDP: rank 0 speaks for all
        sys.stdout, args.wandb = open(os.devnull, "w"), "disabled"
    print(f"training on {device} in {args.precision}")
    return device, run_dir


@functools.cache
def patient_group():
    """Return a group of all ranks for waits that may take hours; others give up in minutes."""
    return dist.new_group(backend="gloo", timeout=timedelta(days=7))


@contextmanager
def rank_first():
    """Let rank 0 do this first, then one rank of each node, then the rest: they find it done."""
    turn = 0 if dist.get_rank() == 0 else 1 if os.environ["LOCAL_RANK"] == "0" else 2
    for number in range(3):
        if number == turn:
            yield
            continue
        try:
            dist.barrier(group=patient_group())
        except RuntimeError as error:  # DDP: that rank says why, and torchrun ends us meanwhile
            time.sleep(10)
            sys.exit(f"another rank has failed: {error}")


def fail(message):
    """Stop because of what the user gave us: one line on stderr, exit status 2."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(10)  # DDP: rank 0 says it and torchrun ends us, or only we have this fault
    print(f"{Path(__file__).name}: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def mix(*numbers):
    """Return one 64-bit seed made of several numbers; sums would collide, as 1 + 2 and 2 + 1."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "little")


# ---- model -----------------------------------------------------------------------------------
@rank_first()
def build_tokenizer_and_config(args):
    """Return the tokenizer and the configuration of `--model-name`, changed by `--config`."""
    try:
        if args.model_name == "tiny":
            tokenizer = transformers.ByT5Tokenizer()  # a token is a byte, so it needs no files
            shape = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
            shape |= {"num_attention_heads": 4, "vocab_size": len(tokenizer)}
            ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
            config = transformers.LlamaConfig(**shape, **ids)
        else:
            tokenizer = AutoTokenizer.from_pretrained(args.model_name)
            config = AutoConfig.from_pretrained(args.model_name)
        if args.config:
            config.update_from_string(",".join(args.config))
            values = config.to_dict()
            values.pop("layer_types", None)  # which follow from the number of layers
            config = config.from_dict(values)
    except Exception as error:  # each wrong type in a configuration has a kind of its own
        fail(f"--model-name {' '.join([args.model_name, *args.config])}: {error}")
    longest = getattr(config, "max_position_embeddings", None) or args.seq_length
    if args.seq_length > longest:
        fail(f"--seq-length {args.seq_length}: {args.model_name} takes at most {longest} tokens")
    if tokenizer.eos_token_id is None or not 1 < len(tokenizer) <= config.vocab_size:
        told = f"{len(tokenizer)} tokens for {config.vocab_size} embeddings"
        fail(f"--model-name {args.model_name}: its tokenizer has no end of text, or {told}")
    return tokenizer, config


def build_model(args, config):
    """Return the model with float32 weights on the CPU, equal for equal seeds on any device."""
    torch.manual_seed(args.seed)
    if args.pretrained:
        model = AutoModelForCausalLM.from_pretrained(
            args.model_name, config=config, dtype=torch.float32
        )
    else:
        with no_init_weights():  # what constructors draw is drawn below; what they set stays
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.init_weights()
    if not layers_of(model):
        fail(f"--model-name {args.model_name}: transformers does not say which its layers are")
    model.train()

    # To decide on a mask, transformers makes the host wait for the device in each forward pass; for
    # an attention under a name of our own it does not: plain causal attention needs no mask.
    window = getattr(config, "sliding_window", None) or args.seq_length
    plain = model._supports_attention_backend and model.config._attn_implementation == "sdpa"
    if plain and args.seq_length <= window:
        AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
        model.set_attn_implementation("causal_sdpa")

    if args.compile:  # in place, so that the weights keep their names; each shape by itself
        for layer in layers_of(model):
            layer.compile(dynamic=False)
        model.loss_function = torch.compile(model.loss_function, dynamic=False)
    return model


def layers_of(model):
    """Return the decoder layers: transformers names their class as one not to be split."""
    return [part for part in model.modules() if type(part).__name__ in model._no_split_modules]


def build_optimizer(args, model):
    """Return AdamW, which decays the matrices and leaves norms and biases alone."""
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
    vectors = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )
    optimizer.found_inf = torch.zeros((), device=matrices[0].device)  # see train_step
    # fp16: the scale follows from the steps before, so that it has to be saved
    fp16 = args.precision == "fp16"
    optimizer.scaler = torch.amp.GradScaler(args.device, init_scale=args.init_scale, enabled=fp16)
    return optimizer


def lr_at(args, step):
    """Return the learning rate of `step` (1 is the first): linear warmup, cosine to a tenth."""
    if step <= args.warmup_steps:
        return args.lr * step / args.warmup_steps
    progress = (step - args.warmup_steps) / max(1, args.num_steps - args.warmup_steps)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


# ---- data ------------------------------------------------------------------------------------
@rank_first()
def build_data(args, tokenizer):
    """Return training and held-out samples, int32 of [samples, `--seq-length`], memory-mapped."""
    path = token_file(args, tokenizer)
    num_samples = path.stat().st_size // 4 // args.seq_length
    training = num_samples - args.eval_samples
    if training < 1:
        made = f"{args.dataset_name} makes {num_samples} samples of {args.seq_length} tokens"
        fail(f"--dataset-name {made}, too few to hold {args.eval_samples} out and train on others")
    tokens = torch.from_file(str(path), size=num_samples * args.seq_length, dtype=torch.int32)
    return tokens.view(num_samples, -1).split([training, args.eval_samples])


def token_file(args, tokenizer):
    """Return a file of all tokens, int32: the documents, with an end-of-text token after each."""
    documents = load_documents(args)
    key = Hasher.hash([documents.cache_files, args.text_column, tokenizer])
    path = Path(datasets.config.HF_DATASETS_CACHE, f"{key}.tokens")
    if path.exists():
        return path
    partial = path.with_suffix(f".{uuid.uuid4().hex}")
    with open(partial, "wb") as file:
        for batch in tqdm(documents.iter(1000), "tokenizing", disable=None):
            texts = [text or "" for text in batch[args.text_column]]
            for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
                array("i", [*ids, tokenizer.eos_token_id]).tofile(file)
    return partial.rename(path)


def load_documents(args):
    """Return a dataset with a document per row."""
    name = args.dataset_name
    formats = {".txt": "text", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
    reader = formats.get(Path(name).suffix)
    options = {"data_files": name} if reader else {"name": args.dataset_subset}
    if reader == "text" or any(Path(name).glob("*.txt")):
        options["sample_by"] = "paragraph"  # blank lines separate documents
    try:
        if name == "pydoc":
            documents = datasets.Dataset.from_generator(
                lambda: ({"text": text} for text in topics.values())
            )
        else:
            documents = datasets.load_dataset(reader or name, split="train", **options)
    except Exception as error:  # datasets has dozens of kinds, many with the reason in the cause
        fail(f"--dataset-name {name}: {error.__cause__ or str(error) or 'it is empty'}")
    types = {column: str(getattr(of, "dtype", of)) for column, of in documents.features.items()}
    if types.get(args.text_column) not in ("string", "large_string"):
        fail(f"--text-column {args.text_column}: not a column of text; {name} has {types}")
    return documents


@functools.lru_cache(maxsize=2)
def order_of(seed, epoch, num_samples):
    """Return the order of all samples in an epoch: another one in each."""
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    return torch.randperm(num_samples, generator=generator)


def batch_at(args, samples, step, micro_step, device):
    """Return a micro-batch, int64 of [samples, `--seq-length`]: the step alone says which."""
    size = args.micro_batch_size * dist.get_world_size()
    first = ((step - 1) * args.accumulation + micro_step) * size
    positions = range(first + dist.get_rank(), first + size, dist.get_world_size())
    places = [divmod(position, len(samples)) for position in positions]
    ids = [order_of(args.seed, epoch, len(samples))[place] for epoch, place in places]
    batch = samples[torch.stack(ids)].long()
    return batch.pin_memory().to(device, non_blocking=True) if args.device == "cuda" else batch


# ---- one step --------------------------------------------------------------------------------
def loss_of(args, model, batch):
    """Return the mean loss of predicting each token of `batch` from those before it."""
    half = torch.float16 if args.precision == "fp16" else torch.bfloat16
    with torch.autocast(batch.device.type, half, enabled=args.precision != "fp32"):
        return model(input_ids=batch, labels=batch, use_cache=False).loss


def train_step(args, model, optimizer, train_set, step, device):
    """Take one optimizer step; return loss and gradient norm as they lie on the device."""
    torch.manual_seed(mix(args.seed, step, dist.get_rank()))
    total = torch.zeros((), device=device)
    for micro_step in range(args.accumulation):
        # DDP: gradients add up on each rank and are reduced once; no_sync() sets the same switch
        model.require_backward_grad_sync = micro_step == args.accumulation - 1
        batch = batch_at(args, train_set, step, micro_step, device)
        loss = loss_of(args, model, batch) / args.accumulation
        optimizer.scaler.scale(loss).backward()  # fp16: or else small gradients would become 0
        total += loss.detach()
    optimizer.scaler.unscale_(optimizer)  # fp16: the norm and clipping are of true gradients
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    grad_norm = torch.nn.utils.get_total_norm(grads)
    limit = args.max_grad_norm or math.inf
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), limit, grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr_at(args, step)
    before = optimizer.found_inf  # fp16: what this step adds may be an overflow, and no more
    # 1 from the first gradient on that is not finite: AdamW then leaves everything as it is
    optimizer.found_inf = torch.maximum(optimizer.found_inf, (~grad_norm.isfinite()).float())
    optimizer.step()
    optimizer.zero_grad()
    if args.precision == "fp16":
        optimizer.found_inf = torch.maximum(before, update_scale(optimizer, total))
    return total, grad_norm


def update_scale(optimizer, loss):
    """Halve the scale if the gradient was not finite; return 1 if no smaller scale can help.

    The scale is in the backward pass only, so that it is not why a loss is not finite.
    """
    scaler = optimizer.scaler
    scaler.update()  # fp16: without scaler.step(), which would delete optimizer.found_inf
    scale = scaler.scale(torch.ones_like(loss))
    hopeless = (~loss.isfinite() | (scale < 1) | scale.isinf()).float()
    dist.all_reduce(hopeless, dist.ReduceOp.MAX)  # gradients are equal on all ranks, losses not
    return hopeless


@torch.no_grad()
def evaluate(args, model, held_out, device):
    """Return the mean loss of the held-out samples."""
    model.eval()
    total = torch.zeros((), device=device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rounds = math.ceil(len(held_out) / (args.micro_batch_size * world_size))
    for batch in held_out.tensor_split(rounds * world_size)[rank::world_size]:
        some = batch if len(batch) else held_out[:1]  # DDP: all ranks do as many forward passes
        total += loss_of(args, model, some.long().to(device)) * len(batch)
    model.train()
    dist.all_reduce(total)
    return (total / len(held_out)).item()


# ---- checkpoint ------------------------------------------------------------------------------
def partial_of(folder):
    """Return an empty folder in which to write what shall appear as `folder`."""
    partial = folder.with_name(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # a kill may have left it
    partial.mkdir(parents=True, exist_ok=True)
    return partial


def publish(args, partial, folder):
    """Give a folder its name, once all of it is on the disk; delete the oldest checkpoints."""
    for path in (*partial.rglob("*"), partial):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    shutil.rmtree(folder, ignore_errors=True)  # it could not be read, or is an older model
    partial.rename(folder)
    until_now = [old for old in sorted(folder.parent.glob("step-????????")) if old <= folder]
    for old in until_now[: -args.keep_checkpoints]:
        shutil.rmtree(old.rename(partial))  # a kill leaves no half of it under its name


@rank_first()
def save_checkpoint(args, run_dir, model, optimizer, step):
    """Save all that is not a function of the step."""
    if dist.get_rank() != 0:
        return
    checkpoint = run_dir / f"checkpoints/step-{step:08}"
    partial = partial_of(checkpoint)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "args": vars(args)}
    state["scaler"] = optimizer.scaler.state_dict()
    torch.save(state, partial / "state.pt")
    publish(args, partial, checkpoint)


def load_checkpoint(args, run_dir, model, optimizer):
    """Restore the newest checkpoint that can be read; return its step, which is 0 for a new run."""
    checkpoints = sorted((run_dir / "checkpoints").glob("step-????????"), reverse=True)
    found = [checkpoints]
    dist.broadcast_object_list(found, group=patient_group())
    for checkpoint in found[0]:  # DDP: all ranks try those that rank 0 has found
        try:
            state = torch.load(checkpoint / "state.pt", "cpu", mmap=True, weights_only=True)
        except Exception as error:  # broken files raise many kinds
            print(f"{checkpoint} cannot be read, so the one before is tried: {error!r:.200}")
            continue
        compare_args(args, state["args"], checkpoint)
        model.load_state_dict(state["model"])
        settings = optimizer.state_dict()["param_groups"]  # as the command says, not as they were
        optimizer.load_state_dict(state["optimizer"] | {"param_groups": settings})
        if scale := state.get("scaler"):  # fp16: not in a checkpoint of another precision
            optimizer.scaler.load_state_dict(scale)
        print(f"continuing from {checkpoint}")
        return int(checkpoint.name.removeprefix("step-"))
    if checkpoints:
        fail(f"no checkpoint in {run_dir}/checkpoints can be read; delete them all to start anew")
    return 0


def compare_args(args, before, checkpoint):
    """Stop if the checkpoint is another run's; else say what has changed since."""
    args.wandb_id = before["wandb_id"]
    fixed = ["model_name", "config", "num_weights", "dataset_fingerprint"]
    fixed += ["seq_length", "global_batch_size", "seed"]
    for name, value in vars(args).items():
        if value == before.get(name):
            continue
        told = f"{checkpoint}: {name} was {before.get(name)}, is {value}"
        if name in fixed:
            fail(f"{told}; choose another --experiment-name")
        print(told)


@rank_first()
def export_model(args, run_dir, model, tokenizer):
    """Write the finished model as a folder that `from_pretrained` loads."""
    if dist.get_rank() != 0:
        return
    partial = partial_of(run_dir / "model")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    publish(args, partial, run_dir / "model")
    (run_dir / f"finished-{args.num_steps}").touch()


# ---- main ------------------------------------------------------------------------------------
PEAK_FLOPS = {  # dense bf16 matrix products a second, from the makers' data sheets
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "AMD Instinct MI300X": 1307e12,
}


def mfu(args, model, tokens_per_second):
    """Return the model FLOPs utilization, or None: PaLM, appendix B, arxiv.org/abs/2204.02311."""
    peak = PEAK_FLOPS.get(torch.cuda.get_device_name() if args.device == "cuda" else "cpu")
    if peak is None or tokens_per_second is None or args.precision != "bf16":
        return None
    parts = [model.get_output_embeddings(), *layers_of(model)]
    weights = sum(weight.numel() for part in parts for weight in part.parameters())
    config, heads = model.config, model.config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    flops = 6 * weights + 12 * config.num_hidden_layers * width * args.seq_length
    return tokens_per_second * flops / (peak * dist.get_world_size())


def measure(args, model, step, loss, grad_norm, since):
    """Return the metrics of `step`; to read them, the host waits for the device."""
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    row = {"step": step, "loss": loss.item(), "grad_norm": grad_norm.item()}
    first, then = since
    tokens = (step - first) * args.global_batch_size * args.seq_length
    speed = tokens / (time.perf_counter() - then) if then else None
    unit = 1 if sys.platform == "darwin" else 1024  # of the next line, in bytes
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if args.device == "cuda":
        memory = torch.cuda.max_memory_allocated()
    row |= {"lr": lr_at(args, step), "tokens_per_second": speed, "mfu": mfu(args, model, speed)}
    return row | {"peak_memory_gib": memory / 2**30}


def log(run_dir, run, row):
    """Add a row to metrics.jsonl, where the last row of a step counts, to wandb, and to stdout."""
    if dist.get_rank() != 0:
        return
    with open(run_dir / "metrics.jsonl", "a") as file:
        print(json.dumps(row), file=file)
    run.log(row, step=row["step"])
    with suppress(OSError):  # of a terminal that is gone
        tqdm.write("  ".join(f"{name} {n:,.6g}" for name, n in row.items() if n is not None))


@record
def main():
    """Train; started again with the same command, continue from the newest checkpoint."""
    args = parse_args()
    device, run_dir = setup(args)
    tokenizer, config = build_tokenizer_and_config(args)
    train_set, held_out = build_data(args, tokenizer)
    args.dataset_fingerprint = mix(len(train_set), train_set[:: 1 + len(train_set) // 100].tolist())
    model = build_model(args, config).to(device)
    args.num_weights = model.num_parameters()
    optimizer = build_optimizer(args, model)
    start = load_checkpoint(args, run_dir, model, optimizer)
    if start >= args.num_steps and (run_dir / f"finished-{start}").exists():
        print(f"{run_dir} is finished: it has {start} steps")
        return

    starts = [None] * dist.get_world_size()
    dist.all_gather_object(starts, start, group=patient_group())
    if len(set(starts)) > 1:
        fail(f"the ranks cannot read the same checkpoint: they would continue from steps {starts}")
    torch._dynamo.config.optimize_ddp = False  # DDP: or it would cut compiled layers into pieces
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    ddp.broadcast_buffers = False  # DDP: they never change, so no step has to send them
    about = {"id": args.wandb_id, "name": args.experiment_name, "config": vars(args)}
    run = wandb.init(**about, dir=run_dir, mode=args.wandb, resume="allow")
    if start == 0:
        log(run_dir, run, {"step": 0, "val_loss": evaluate(args, model, held_out, device)})
    since = start, None  # the speed of the first interval is unknown, as its first step compiles
    steps = range(start + 1, args.num_steps + 1)
    for step in tqdm(steps, initial=start, total=args.num_steps, file=sys.stdout, disable=None):
        loss, grad_norm = train_step(args, ddp, optimizer, train_set, step, device)
        last = step == args.num_steps
        evaluating = last or step % args.eval_every == 0
        reporting = evaluating or step % args.log_every == 0
        saving = last or step % args.checkpoint_every == 0
        if (reporting or saving) and optimizer.found_inf:
            fail(f"a gradient in steps {since[0] + 1} to {step} was not finite; nothing was saved")
        if reporting:
            row = measure(args, model, step, loss, grad_norm, since)
            row["loss_scale"] = optimizer.scaler.get_scale()
            if evaluating:
                row["val_loss"] = evaluate(args, model, held_out, device)
            log(run_dir, run, row)
        if saving:
            save_checkpoint(args, run_dir, model, optimizer, step)
        if reporting or saving:
            since = step, time.perf_counter()

    export_model(args, run_dir, model, tokenizer)
    print(f"finished: {run_dir} has the model, the metrics and the last checkpoints")
    run.finish()


if __name__ == "__main__":
    main()
    if dist.is_initialized():  # which it is not after --help
        dist.barrier(group=patient_group())  # DDP: no rank leaves while another may still need it
        dist.destroy_process_group()
