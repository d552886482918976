"""Train with the Hugging Face Trainer, on the guide's data and curve. Parent: 03-job-launchers.

Here:      torchrun --standalone --nproc-per-node 2 alternative-frameworks/trainer/train_llm.py
For real:  python alternative-frameworks/make_config.py accelerate --strategy fsdp2 --ranks 8 \
               --output fsdp2.yaml
           accelerate launch --config_file fsdp2.yaml \
               alternative-frameworks/trainer/train_llm.py \
               -m meta-llama/Llama-3.2-1B -d roneneldan/TinyStories \
               -s 2048 --global-batch-size 64 --num-steps 5000 --compile
"""

import argparse
import ctypes
import functools
import hashlib
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import socket
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
from accelerate import DistributedType, PartialState
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from datasets.fingerprint import Hasher
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy
from tqdm import tqdm
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.initialization import no_init_weights
from transformers.integrations.sdpa_attention import sdpa_attention_forward

LAUNCHERS = [  # the variables in which each tells a process its rank, world size and local rank
    ["RANK", "WORLD_SIZE", "LOCAL_RANK"],  # torchrun, deepspeed
    [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK")],  # mpirun of Open MPI
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"],  # mpirun of MPICH
    ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"],  # srun
]


def parse_args():
    """Return the arguments, checked as far as that needs no data, and the batch split up."""
    adopt_launcher()
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
    add("--precision", choices=["auto", "bf16", "fp32"], default="auto", help="auto: bf16 on cuda")
    add("--compile", action="store_true", help="compile the layers and the loss")
    add("--accelerate-config", help="its file, for launchers other than accelerate launch")
    add("--deepspeed-config", help="its file, to train with DeepSpeed")

    add("-e", "--experiment-name", default=chapter, help="the run's folder under --save-dir")
    add("--save-dir", default="outputs", help="where runs are kept")
    add("--checkpoint-every", type=int, default=50, help="steps between checkpoints")
    add("--keep-checkpoints", type=int, default=2, help="how many stay on disk")
    add("--eval-every", type=int, default=50, help="steps between evaluations")
    add("--eval-samples", type=int, default=64, help="how many samples are held out for them")
    add("--log-every", type=int, default=10, help="steps between log lines")
    add("--wandb", choices=["disabled", "offline", "online"], default="disabled", help="mode")
    add("--dist-timeout", type=int, default=600, help="seconds that a rank waits for the others")

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
    adopt_config(args)
    if args.precision == "auto":  # GPUs before 8.0 have no units for bf16 and emulate it slowly
        fast = args.device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
        args.precision = "bf16" if fast else "fp32"
    if not {"LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys():
        fail("start this with a launcher; mpirun needs -x MASTER_ADDR=... -x MASTER_PORT=... too")
    world_size = int(os.environ["WORLD_SIZE"])
    samples, rest = divmod(args.global_batch_size, world_size)
    if rest:
        fail(f"--global-batch-size {args.global_batch_size} does not divide by {world_size} ranks")
    args.micro_batch_size = max(n for n in range(1, args.batch_size + 1) if samples % n == 0)
    args.accumulation = samples // args.micro_batch_size
    args.wandb_id = uuid.uuid4().hex[:8]
    return args


def adopt_config(args):
    """Set the variables that `accelerate launch` makes of its file, as other launchers do not."""
    if args.accelerate_config:  # Accelerate: as on one node, whose free port nobody will use
        words = ["--num_machines", "1", "--main_process_port", "0"]
        words += ["--config_file", args.accelerate_config, __file__]
        try:
            config, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
        except Exception as error:
            fail(f"--accelerate-config {args.accelerate_config}: {error}")
        os.environ |= prepare_multi_gpu_env(config)
    told = os.environ.get("ACCELERATE_MIXED_PRECISION", "none")
    meant = {"bf16": "bf16", "no": "fp32", "none": args.precision}.get(told)
    if meant is None or args.precision not in ("auto", meant):
        fail(f"--precision {args.precision}, but Accelerate was told mixed_precision: {told}")
    args.precision = meant
    if args.device == "cpu" and os.environ.get("FSDP_OFFLOAD_PARAMS") == "true":
        fail("fsdp_offload_params: true, but without a GPU there is nothing to offload from")


def adopt_launcher():
    """Set the variables that torchrun sets to what another launcher tells this process."""
    for names in LAUNCHERS:
        if all(name in os.environ for name in names):
            os.environ |= zip(LAUNCHERS[0], [os.environ[name] for name in names], strict=True)
            break
    if "SLURM_STEP_NODELIST" in os.environ:  # rank 0 is on the first of nodes like gpu[03-07,12]
        nodes = re.sub(r"\[(\d+)[^]]*\]", r"\1", os.environ["SLURM_STEP_NODELIST"])
        step = 10 * int(os.environ["SLURM_JOB_ID"]) + int(os.environ["SLURM_STEP_ID"])
        os.environ.setdefault("MASTER_ADDR", nodes.split(",")[0])
        os.environ.setdefault("MASTER_PORT", str(10_000 + step % 20_000))  # of this step alone


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
        if gpus == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
            index = 0  # srun --gpus-per-task=1 shows each task a GPU of its own, and no other
        if index >= gpus:
            fail(f"local rank {index} has no GPU: torch sees {gpus} here")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)  # DDP: or else all ranks would put something on GPU 0
    backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=args.dist_timeout))
    if dist.get_rank() != 0:  # DDP: rank 0 speaks for all
        sys.stdout, args.wandb = open(os.devnull, "w"), "disabled"
    check_shared(run_dir)
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


def check_shared(run_dir):
    """Stop if a node does not see what rank 0 writes to the run's folder."""
    probe = [run_dir / f".probe-{uuid.uuid4().hex}"]
    if dist.get_rank() == 0:
        probe[0].touch()
    dist.broadcast_object_list(probe, group=patient_group())
    here = None if probe[0].exists() else socket.gethostname()
    blind = [None] * dist.get_world_size()
    dist.all_gather_object(blind, here, group=patient_group())
    if dist.get_rank() == 0:
        probe[0].unlink()
    if hosts := set(blind) - {None}:
        fail(f"--save-dir: {', '.join(hosts)} cannot see what rank 0 writes to {run_dir.resolve()}")


def stop_requests(run_dir):
    """Yield before each step whether a rank was asked to stop: by a signal, or rank 0 by a file.

    All ranks get the same answer, of the exchange that they began a step ago: no rank waits.
    """
    received = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, lambda number, _: received.append(number))
    (run_dir / "stop").unlink(missing_ok=True)  # it was meant for the run before
    stop = False
    while True:
        asked = received or (dist.get_rank() == 0 and (run_dir / "stop").exists())
        answer = torch.tensor(bool(asked), dtype=torch.int32)
        exchange = dist.all_reduce(answer, dist.ReduceOp.MAX, patient_group(), async_op=True)
        yield stop
        exchange.wait()
        stop = bool(answer)


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


class Packed(torch.utils.data.Dataset):
    """All samples of the run in their order; the Trainer deals them to the ranks, as one epoch."""

    def __init__(self, args, samples):
        self.args, self.samples = args, samples

    def __len__(self):
        return self.args.num_steps * self.args.global_batch_size

    def __getitem__(self, position):
        epoch, place = divmod(position, len(self.samples))
        order = order_of(self.args.seed, epoch, len(self.samples))
        tokens = self.samples[order[place]].long()
        return {"input_ids": tokens, "labels": tokens}


# ---- one step --------------------------------------------------------------------------------
class Trainer(transformers.Trainer):
    """Keeps the loss of a step, where it would log the mean of all since the row before."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.guide.loss += loss
        return loss


class Guide(transformers.TrainerCallback):
    """What the guide does around each step of the Trainer: logs, checks, stops, publishes."""

    def __init__(self, args, run_dir, run, start):
        self.args, self.run_dir, self.run = args, run_dir, run
        self.since = start, None  # the speed of the first interval is unknown, as it compiles
        self.stops, self.reported = stop_requests(run_dir), False

    def on_train_begin(self, args, state, control, optimizer, lr_scheduler, **_):
        """Take the settings from the command: the Trainer has restored those of the checkpoint."""
        state.compute_steps(args, args.max_steps)
        lr_scheduler.base_lrs = [args.learning_rate for _ in lr_scheduler.base_lrs]
        factor = lr_scheduler.lr_lambdas[0](lr_scheduler.last_epoch)
        for group, decay in zip(optimizer.param_groups, [args.weight_decay, 0.0], strict=False):
            group |= {"lr": args.learning_rate * factor, "weight_decay": decay}
        lr_scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]  # which is logged

    def on_step_begin(self, _, state, control, **__):
        if self.reported:
            self.since, self.reported = (state.global_step, time.perf_counter()), False
        self.stop, self.loss = next(self.stops), torch.zeros((), device=self.args.device)
        torch.manual_seed(mix(self.args.seed, state.global_step + 1, dist.get_rank()))

    def on_step_end(self, _, state, control, **__):
        control.should_save |= self.stop
        control.should_training_stop |= self.stop
        control.should_log |= control.should_evaluate or control.should_save

    def on_log(self, _, state, control, logs, model, **__):
        if "loss" in logs:
            skipped = getattr(self.trainer.deepspeed, "skipped_steps", 0)  # ZeRO: it would go on
            if skipped or not math.isfinite(logs["grad_norm"]):
                told = f"a gradient in steps {self.since[0] + 1} to {state.global_step}"
                fail(f"{told} was not finite; nothing was saved")
            logs = logs | {"step": state.global_step, "loss": self.loss}
            self.row = measure(self.args, model, logs, self.since)
            self.reported = True
        elif "eval_loss" in logs:
            row = {"step": state.global_step} if state.global_step == 0 else self.row
            self.row = row | {"val_loss": logs["eval_loss"]}
        if "eval_loss" in logs or ("loss" in logs and not control.should_evaluate):
            log(self.run_dir, self.run, self.row)

    def on_save(self, args, state, control, **_):
        dist.barrier(group=patient_group())  # each rank has written something
        partial = Path(args.output_dir, f"checkpoint-{state.global_step}")
        save_checkpoint(self.args, self.run_dir, partial, state.global_step)


def zero_of(args):
    """Return DeepSpeed's settings, from its file; or None, to train without it."""
    path = args.deepspeed_config
    if not path:
        return None
    import deepspeed  # which else nobody needs

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or, on a CPU, it compiles it
    try:
        zero = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        fail(f"--deepspeed-config {path}: {error}")
    for name in {"optimizer", "scheduler", "fp16", "activation_checkpointing"} & zero.keys():
        fail(f"--deepspeed-config {path}: {name}: leave it out; this script cannot obey it")
    if not zero.get("zero_optimization", {}).get("stage"):
        fail(f"--deepspeed-config {path}: it says no stage of ZeRO, 1 to 3")
    said = any(zero.get(name, {}).get("enabled") for name in ("bf16", "torch_autocast"))
    if said != (args.precision == "bf16"):
        fail(f"--deepspeed-config {path}: it is not for --precision {args.precision}")
    # or it would save the shards of ZeRO-3 twice, and no model
    zero["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return zero


def build_trainer(args, run_dir, guide, model, train_set, held_out):
    """Return the Trainer, with the settings that make it do what chapter 03 does."""
    sharded, zero = os.environ.get("ACCELERATE_USE_FSDP") == "true", zero_of(args)
    if args.device == "cpu":  # where Accelerate would do DDP instead, and not say so
        kind = DistributedType.MULTI_GPU if sharded else DistributedType.MULTI_CPU
        PartialState(cpu=True).distributed_type = DistributedType.DEEPSPEED if zero else kind
    model.loss_type = "ForCausalLM"  # or a step of GPT-2, say, would count a token more per sample
    most, ranks = args.micro_batch_size, dist.get_world_size()
    settings = transformers.TrainingArguments(
        output_dir=partial_of(run_dir / "model"),
        max_steps=args.num_steps,
        per_device_train_batch_size=args.micro_batch_size,
        gradient_accumulation_steps=args.accumulation,
        train_sampling_strategy="sequential",  # Packed has shuffled them
        learning_rate=args.lr,
        adam_beta2=0.95,
        weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm,
        lr_scheduler_type="cosine_warmup_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=args.warmup_steps,
        seed=args.seed,
        use_cpu=args.device == "cpu",
        bf16=args.precision == "bf16" and "torch_autocast" not in (zero or {}),
        logging_steps=args.log_every,
        logging_nan_inf_filter=False,  # or a loss that is not a number would not be seen
        eval_strategy="steps",
        eval_steps=args.eval_every,
        eval_on_start=guide.since[0] == 0,
        per_device_eval_batch_size=max(  # none of which gets samples twice
            n for n in range(1, most + 1) if n == 1 or args.eval_samples % (n * ranks) == 0
        ),
        prediction_loss_only=True,
        save_steps=args.checkpoint_every,
        ddp_find_unused_parameters=False,
        deepspeed=zero,
        accelerator_config={
            "use_configured_state": args.device == "cpu",
            # or each rank would keep whole gradients while they accumulate
            "gradient_accumulation_kwargs": {"sync_each_batch": sharded},
        },
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        settings,
        train_dataset=Packed(args, train_set),
        eval_dataset=[{"input_ids": row.long(), "labels": row.long()} for row in held_out],
        callbacks=[guide],
    )
    trainer.guide, guide.trainer = guide, trainer
    trainer.remove_callback(transformers.PrinterCallback)
    if sharded and args.precision == "bf16":  # or it would reduce in bf16
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = policy
    return trainer


# ---- checkpoint ------------------------------------------------------------------------------
def partial_of(folder):
    """Return an empty folder in which to write what shall appear as `folder`."""
    partial = folder.with_name(".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)  # a kill may have left it
        partial.mkdir(parents=True, exist_ok=True)
    dist.barrier(group=patient_group())  # Trainer: all ranks write into it
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
def save_checkpoint(args, run_dir, partial, step):
    """Give what the Trainer has saved its name: a kill may have come while it wrote."""
    if dist.get_rank() != 0:
        return
    (partial / "args.json").write_text(json.dumps(vars(args)))
    checkpoint = run_dir / f"checkpoints/step-{step:08}"
    checkpoint.parent.mkdir(exist_ok=True)
    publish(args, partial, checkpoint)


def load_checkpoint(args, run_dir):
    """Return the newest checkpoint, which the Trainer will read, and its step; or None and 0."""
    found = [max((run_dir / "checkpoints").glob("step-????????"), default=None)]
    dist.broadcast_object_list(found, group=patient_group())
    checkpoint = found[0]
    if checkpoint is None:
        return None, 0
    compare_args(args, json.loads((checkpoint / "args.json").read_text()), checkpoint)
    print(f"continuing from {checkpoint}")
    return checkpoint, int(checkpoint.name.removeprefix("step-"))


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


def export_model(args, run_dir, trainer, tokenizer):
    """Write the finished model as a folder that `from_pretrained` loads."""
    dist.barrier(group=patient_group())  # Trainer: it has looked for checkpoints on each rank
    partial = partial_of(run_dir / "model")
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if dist.get_rank() != 0:
        return
    trainer.model.config.use_cache = True  # Trainer: it has turned that off, for generation too
    trainer.model.save_pretrained(partial, state_dict=weights)
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
    weights = [weight for part in parts for weight in part.parameters()]
    weights = sum(getattr(weight, "ds_numel", weight.numel()) for weight in weights)  # of ZeRO-3
    config, heads = model.config, model.config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    flops = 6 * weights + 12 * config.num_hidden_layers * width * args.seq_length
    return tokens_per_second * flops / (peak * dist.get_world_size())


def measure(args, model, logs, since):
    """Return the metrics of a step; to read them, the host waits for the device."""
    dist.all_reduce(logs["loss"], dist.ReduceOp.AVG)
    row = {"step": logs["step"], "loss": logs["loss"].item(), "grad_norm": logs["grad_norm"]}
    first, then = since
    tokens = (row["step"] - first) * args.global_batch_size * args.seq_length
    speed = tokens / (time.perf_counter() - then) if then else None
    unit = 1 if sys.platform == "darwin" else 1024  # of the next line, in bytes
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if args.device == "cuda":
        memory = torch.cuda.max_memory_allocated()
    row |= {"lr": logs["learning_rate"], "tokens_per_second": speed}
    row |= {"mfu": mfu(args, model, speed)}
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
    _, run_dir = setup(args)
    tokenizer, config = build_tokenizer_and_config(args)
    train_set, held_out = build_data(args, tokenizer)
    args.dataset_fingerprint = mix(len(train_set), train_set[:: 1 + len(train_set) // 100].tolist())
    model = build_model(args, config)
    args.num_weights = model.num_parameters()
    checkpoint, start = load_checkpoint(args, run_dir)
    if start >= args.num_steps and (run_dir / f"finished-{start}").exists():
        print(f"{run_dir} is finished: it has {start} steps")
        return

    torch._dynamo.config.optimize_ddp = False  # DDP: or it would cut compiled layers into pieces
    about = {"id": args.wandb_id, "name": args.experiment_name, "config": vars(args)}
    run = wandb.init(**about, dir=run_dir, mode=args.wandb, resume="allow")
    guide = Guide(args, run_dir, run, start)
    trainer = build_trainer(args, run_dir, guide, model, train_set, held_out)
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    step = trainer.state.global_step
    if step < args.num_steps:
        print(f"stopped at step {step}: the same command continues")
        run.finish()
        return

    export_model(args, run_dir, trainer, tokenizer)
    print(f"finished: {run_dir} has the model, the metrics and the last checkpoints")
    run.finish()


if __name__ == "__main__":
    main()
    if dist.is_initialized():  # which it is not after --help
        dist.barrier(group=patient_group())  # DDP: no rank leaves while another may still need it
        dist.destroy_process_group()
