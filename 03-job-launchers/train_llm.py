"""Train a causal language model on many nodes, under any launcher. Parent: 02-ddp.

Small:  torchrun --standalone --nproc-per-node 2 03-job-launchers/train_llm.py
Real:   sbatch --nodes 4 --gpus-per-node 8 03-job-launchers/slurm/train.sbatch \
            03-job-launchers/train_llm.py \
            -m meta-llama/Llama-3.2-1B -d roneneldan/TinyStories \
            -s 2048 --global-batch-size 64 --num-steps 5000 --compile
"""

import argparse
import bisect
import ctypes
import functools
import glob
import hashlib
import itertools
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
import warnings
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
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_layers import GradientCheckpointingLayer

# The environment variables that each launcher sets to the rank, the world size and the local rank,
# in this order.
LAUNCHER_VARIABLES = {
    "torchrun": ["RANK", "WORLD_SIZE", "LOCAL_RANK"],
    "Open MPI": ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],
    "MPICH": ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"],
    "srun": ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"],
}


def parse_args():
    """Parse and check the command line, and compute the size and number of micro-batches."""
    adopt_launcher()
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(formatter_class=formatter, fromfile_prefix_chars="@")
    parser.allow_abbrev = False
    parser.convert_arg_line_to_args = lambda line: shlex.split(line, comments=True)
    parser.error = fail
    chapter = Path(__file__).resolve().parent.name
    add = parser.add_argument

    add("-m", "--model-name", default="tiny", help="hub id, folder, or tiny (a built-in Llama)")
    add("--config", nargs="+", default=[], metavar="NAME=VALUE", help="override model settings")
    add("--pretrained", action="store_true", help="start from the published weights")

    sources = "hub id, folder, .txt/.jsonl/.csv/.parquet, or FOLDER.tokens of prepare.py"
    add("-d", "--dataset-name", default="pydoc", help=sources)
    add("--dataset-subset", help="the subset to load, if the hub dataset has subsets")
    add("--text-column", default="text", help="the column that holds the text")
    add("-s", "--seq-length", type=int, default=256, help="tokens per sample")

    add("--global-batch-size", type=int, default=32, help="samples per optimizer step")
    add("-b", "--batch-size", type=int, default=8, help="maximum samples per forward pass")
    add("--num-steps", type=int, default=100, help="total number of optimizer steps")
    add("--lr", type=float, default=1e-3, help="peak learning rate, reached after the warmup")
    add("--warmup-steps", type=int, default=10, help="steps until the learning rate peaks")
    add("--weight-decay", type=float, default=0.1, help="decay of matrices; vectors have no decay")
    add("--max-grad-norm", type=float, default=1.0, help="maximum gradient norm; 0 means no limit")
    skipping = "number of steps whose samples are skipped; by default, that of the checkpoint"
    add("--skip-steps", type=int, default=0, help=skipping)
    add("--seed", type=int, default=0, help="seed for weights, data order and dropout")

    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda if present")
    add("--precision", choices=["auto", "bf16", "fp32"], default="auto", help="auto: bf16 if fast")
    add("--compile", action="store_true", help="compile the layers and the loss")

    add("-e", "--experiment-name", default=chapter, help="name of the run's folder in --save-dir")
    add("--save-dir", default="outputs", help="the folder that holds all runs")
    add("--checkpoint-every", type=int, default=50, help="steps between checkpoints")
    add("--keep-checkpoints", type=int, default=2, help="number of checkpoints to keep")
    add("--eval-every", type=int, default=50, help="steps between evaluations")
    add("--eval-samples", type=int, default=64, help="number of samples to hold out")
    add("--log-every", type=int, default=10, help="steps between log lines")
    add("--wandb", choices=["disabled", "offline", "online"], default="disabled", help="wandb mode")
    add("--dist-timeout", type=int, default=600, help="maximum seconds to wait for other ranks")

    args, unknown = parser.parse_known_args()
    if unknown:
        problem = "unknown argument; a later chapter may have it"
        fail(f"{' '.join(unknown)}: {problem}, see docs/flags.md")
    may_be_zero = ["lr", "warmup_steps", "weight_decay", "max_grad_norm", "seed", "skip_steps"]
    minimums = dict.fromkeys(may_be_zero, 0) | {"seq_length": 2}
    for name, value in vars(args).items():
        minimum = minimums.get(name, 1)
        flag = f"--{name.replace('_', '-')} {value}"
        # "not value >= minimum" also rejects NaN; "value < minimum" would accept NaN.
        if type(value) in (int, float) and not value >= minimum:
            fail(f"{flag}: must be at least {minimum}")
        if type(value) is int and value >= 2**63:
            fail(f"{flag}: must be less than 2**63, because torch counts in 64 bits")
    if args.pretrained and args.model_name == "tiny":
        fail("--pretrained: tiny has no published weights; choose a model with --model-name")
    if args.device == "auto":
        args.device = "cuda" if has_gpu() else "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        problem = f"torch {torch.__version__} finds no working GPU"
        fail(f"--device cuda: {problem}; repair the driver, or pass --device cpu")
    if args.precision == "auto":
        # GPUs below compute capability 8.0 emulate bf16, and the emulation is slow.
        has_bf16 = args.device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
        args.precision = "bf16" if has_bf16 else "fp32"
    if "LOCAL_RANK" not in os.environ:
        fail("start this script with a launcher, such as torchrun, srun or mpirun")
    if "MASTER_ADDR" not in os.environ:
        fail("MASTER_ADDR is not set; pass it and MASTER_PORT with -x (Open MPI) or -genv (MPICH)")
    num_data_ranks = int(os.environ["WORLD_SIZE"])
    local_batch_size, remainder = divmod(args.global_batch_size, num_data_ranks)
    if remainder:
        problem = f"not divisible by {num_data_ranks} data-parallel ranks; choose a multiple"
        fail(f"--global-batch-size {args.global_batch_size}: {problem}")
    sizes = range(1, args.batch_size + 1)
    args.micro_batch_size = max(size for size in sizes if local_batch_size % size == 0)
    args.accumulation = local_batch_size // args.micro_batch_size
    args.wandb_id = uuid.uuid4().hex[:8]
    return args


def adopt_launcher():
    """Set torchrun's variables from the variables of the launcher that started this rank."""
    for names in LAUNCHER_VARIABLES.values():
        if all(name in os.environ for name in names):
            values = [os.environ[name] for name in names]
            os.environ |= zip(LAUNCHER_VARIABLES["torchrun"], values, strict=True)
            break
    if "SLURM_STEP_NODELIST" in os.environ:
        # srun: rank 0 runs on the first node of the list. The list gpu[03-07,12] starts with gpu03.
        nodes = re.sub(r"\[(\d+)[^]]*\]", r"\1", os.environ["SLURM_STEP_NODELIST"])
        os.environ.setdefault("MASTER_ADDR", nodes.split(",")[0])
        # srun: derive the port from the job and step ids; each call of srun needs its own port.
        job_step = 10 * int(os.environ["SLURM_JOB_ID"]) + int(os.environ["SLURM_STEP_ID"])
        os.environ.setdefault("MASTER_PORT", str(10_000 + job_step % 20_000))


def has_gpu():
    """Return whether this process has a GPU, even if torch cannot use the GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1"):  # all GPUs are hidden
        return False
    # Slurm: SLURM_GPUS_ON_NODE is set only in a job that has requested GPUs.
    if "SLURM_GPUS_ON_NODE" in os.environ:
        return True
    # The NVIDIA driver creates /dev/nvidiactl, and the AMD driver creates /dev/kfd.
    has_driver = os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")
    return has_driver or bool(visible) or torch.cuda.is_available()


def setup(args):
    """Join the process group; return this rank's device and the run's folder."""
    # DDP: let Linux kill this rank when its launcher dies. Otherwise, this rank could keep training
    # and overwrite the files of the next run. The 1 is PR_SET_PDEATHSIG.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    sys.stdout.reconfigure(line_buffering=True)
    # If stderr is not a terminal, disable progress bars, because they would clutter a log file.
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
        transformers.logging.disable_progress_bar()
    # fail() reports the errors of the libraries, so turn off the libraries' own messages.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    transformers.logging.set_verbosity_error()
    # Autocast does not know grouped_mm, which multiplies tokens by the weights of their experts.
    for name in ("aten::_grouped_mm", "transformers::grouped_mm_fallback"):
        torch.library.register_autocast(name, args.device, torch.bfloat16)
    run_dir = Path(args.save_dir, args.experiment_name)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--save-dir {args.save_dir}: {error}")
    device = torch.device(args.device)
    if args.device == "cuda":
        local_rank, num_gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        # srun: with --gpus-per-task=1, each rank sees only its own GPU, which has index 0.
        if num_gpus == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
            local_rank = 0
        if local_rank >= num_gpus:
            fail(f"local rank {local_rank}: torch sees only {num_gpus} GPU(s); start fewer ranks")
        # DDP: without set_device(), every rank would also allocate memory on GPU 0.
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=args.dist_timeout))
    # DDP: NCCL connects the ranks in the first operation, so let all ranks take part in that one.
    dist.all_reduce(torch.zeros((), device=device))
    # DDP: only rank 0 prints to stdout.
    if dist.get_rank() != 0:
        sys.stdout = open(os.devnull, "w")
    check_shared(run_dir)
    print(f"training on {device} in {args.precision}")
    return device, run_dir


@functools.cache
def patient_group():
    """Return a group whose timeout is a week, because tokenizing may take hours."""
    return dist.new_group(backend="gloo", timeout=timedelta(days=7))


@contextmanager
def rank_first():
    """Run the body on rank 0, then on local rank 0 of the other nodes, then on the remaining ranks.

    Later ranks find the files that earlier ranks have written.
    """
    if dist.get_rank() == 0:
        turn = 0
    elif os.environ["LOCAL_RANK"] == "0":
        turn = 1
    else:
        turn = 2
    for _ in range(turn):
        wait_for_all()
    yield
    for _ in range(2 - turn):
        wait_for_all()


def wait_for_all():
    """Wait until all ranks have called this function, even if some ranks need hours."""
    try:
        dist.barrier(group=patient_group())
    except RuntimeError as error:
        # DDP: wait while the failed rank reports the reason; torchrun usually ends this rank then.
        time.sleep(10)
        sys.exit(f"another rank has failed: {error}")


def check_shared(run_dir):
    """Stop if a node cannot see the files that rank 0 writes to the run's folder."""
    probe = [run_dir / f".probe-{uuid.uuid4().hex}"]
    if dist.get_rank() == 0:
        probe[0].touch()
    dist.broadcast_object_list(probe, group=patient_group())
    host_without_access = None if probe[0].exists() else socket.gethostname()
    hosts_without_access = [None] * dist.get_world_size()
    dist.all_gather_object(hosts_without_access, host_without_access, group=patient_group())
    if dist.get_rank() == 0:
        probe[0].unlink()
    if hosts := set(hosts_without_access) - {None}:
        problem = f"{', '.join(hosts)} cannot see what rank 0 writes to {run_dir.resolve()}"
        fail(f"--save-dir: {problem}; choose a folder that all nodes share")


def stop_requests(run_dir):
    """Yield, before each step, whether the run should stop after that step.

    SIGTERM, SIGUSR1 or SIGHUP on any rank requests a stop, and so does a file named `stop` in the
    run's folder. An all-reduce gives all ranks the same answer. The all-reduce runs in the
    background during the previous step, so that the ranks rarely wait for the answer.
    """
    received = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, lambda number, _: received.append(number))
    # A `stop` file that already exists was meant for an earlier run.
    (run_dir / "stop").unlink(missing_ok=True)
    stop = False
    while True:
        requested = received or (dist.get_rank() == 0 and (run_dir / "stop").exists())
        any_requested = torch.tensor(bool(requested), dtype=torch.int32)
        options = {"op": dist.ReduceOp.MAX, "group": patient_group(), "async_op": True}
        exchange = dist.all_reduce(any_requested, **options)
        yield stop
        exchange.wait()
        stop = bool(any_requested)


def fail(message):
    """Report a user error in one line on stderr, and exit with status 2."""
    # DDP: let rank 0 report an error that all ranks have; the launcher then ends this rank. If only
    # this rank has the error, this rank reports it after the wait.
    if os.environ.get("RANK", "0") != "0":
        time.sleep(10)
    print(f"{Path(__file__).name}: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def mix(*numbers):
    """Hash the numbers into a 64-bit seed that, unlike their sum, depends on their order."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "little")


# ---- model -----------------------------------------------------------------------------------
@rank_first()
def build_tokenizer_and_config(args):
    """Load the tokenizer and the configuration of `--model-name`, and apply `--config`."""
    try:
        if args.model_name == "tiny":
            # ByT5's tokens are bytes, so its tokenizer needs no vocabulary file.
            tokenizer = transformers.ByT5Tokenizer()
            config = transformers.LlamaConfig(
                hidden_size=128,
                intermediate_size=352,
                num_hidden_layers=4,
                num_attention_heads=4,
                vocab_size=len(tokenizer),
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
            )
        else:
            tokenizer = AutoTokenizer.from_pretrained(args.model_name)
            config = AutoConfig.from_pretrained(args.model_name)
            if getattr(config, "quantization_config", None):
                raise ValueError("its weights are quantized; choose a model with bf16 weights")
            # Train only the text part of a multimodal model.
            config = config.get_text_config(decoder=True)
        if args.config:
            config.update_from_string(",".join(args.config))
            # Drop layer_types, so that from_dict() derives it from the new number of layers.
            values = config.to_dict()
            values.pop("layer_types", None)
            config = config.from_dict(values)
    except Exception as error:
        # transformers raises a different type of exception for each kind of bad value.
        fail(f"--model-name {' '.join([args.model_name, *args.config])}: {error}")
    if getattr(config, "output_router_logits", False):
        problem = "a router loss would depend on the size of the micro-batches"
        fail(f"--config output_router_logits: {problem}; pass --config output_router_logits=false")
    max_length = getattr(config, "max_position_embeddings", None) or args.seq_length
    if 0 < max_length < args.seq_length:
        fail(f"--seq-length {args.seq_length}: {args.model_name} takes at most {max_length} tokens")
    if len(tokenizer) < 2:
        fail(f"--model-name {args.model_name}: found no tokenizer; check the model's files")
    if tokenizer.eos_token_id is None:
        fail(f"--model-name {args.model_name}: its tokenizer has no eos_token; define one")
    # A tokenizer may leave out numbers, so its highest token id may be above its number of tokens.
    highest_id = max(tokenizer.get_vocab().values())
    if highest_id >= config.vocab_size:
        problem = f"token id {highest_id}, but only {config.vocab_size} embeddings"
        fail(f"--model-name {args.model_name}: found {problem}")
    return tokenizer, config


def build_model(args, config):
    """Build the model on the CPU, so that its initial weights do not depend on the device."""
    torch.manual_seed(args.seed)
    try:
        if args.pretrained:
            model, loading = AutoModelForCausalLM.from_pretrained(
                args.model_name,
                config=config,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
            check_names(args, model, **loading)
        else:
            # Skip random initialization in the constructors; init_weights() initializes all
            # weights.
            with no_init_weights():
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            model.init_weights()
    except Exception as error:
        # Unsuitable models raise many types of exceptions.
        fail(f"--model-name {args.model_name}: cannot build the model: {error!r:.300}")
    if not layers_of(model):
        fail(f"--model-name {args.model_name}: found no decoder layers; choose a different model")
    model.train()

    # In every forward pass, transformers checks whether samples are packed, because packed samples
    # need a mask. This check makes the host wait for the device. Plain causal attention needs no
    # mask, so register SDPA under a new name. transformers has no mask function for the new name,
    # so it skips both the check and the mask.
    if needs_no_mask(args, model):
        AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
        model.set_attn_implementation("causal_sdpa")

    # layer.compile() keeps the names of the weights; torch.compile(layer) would change the names.
    # With dynamic=False, torch compiles a separate graph for each input shape.
    if args.compile:
        for layer in layers_of(model):
            layer.compile(dynamic=False)
        model.loss_function = torch.compile(model.loss_function, dynamic=False)
    return model


def check_names(args, model, missing_keys, unexpected_keys, mismatched_keys, **_):
    """Stop if the files of `--pretrained` do not have exactly the weights of the model."""
    # With --config num_hidden_layers, the model may have only the first layers of the files.
    patterns = {re.sub(r"\d+", "*", name) for name in model.state_dict()}
    unknown = [name for name in unexpected_keys if re.sub(r"\d+", "*", name) not in patterns]
    reshaped = [name for name, *_ in mismatched_keys]
    problems = [("lack", missing_keys), ("have a different shape of", reshaped)]
    problems += [("have the unknown weight", unknown)]
    texts = [f"{text} {min(names)} ({len(names)} weights)" for text, names in problems if names]
    if texts:
        fail(f"--pretrained: the files of {args.model_name} {'; they '.join(texts)}")


def needs_no_mask(args, model):
    """Return whether every token attends to itself and all tokens before it, in every layer."""
    if not model._supports_attention_backend or model.config._attn_implementation != "sdpa":
        return False
    name, keys = f"--model-name {args.model_name}", torch.arange(args.seq_length)
    queries = keys[:: 1 + args.seq_length // 64, None]
    results = []

    def check_mask(*_, mask_function, allow_is_causal_skip, **__):
        mask = mask_function(0, 0, queries, keys)
        if (mask & (keys > queries)).any():
            fail(f"{name}: tokens attend to later tokens; choose a model with causal attention")
        results.append(allow_is_causal_skip and torch.equal(mask, keys <= queries))

    def stop(*_, **__):
        raise StopIteration

    # Every forward pass builds all masks before it calls attention for the first time. Check these
    # masks, and stop there. A layer that cannot do without a mask stops earlier, with an exception.
    # Restore the random state, because dropout changes it, and weights may be initialized later.
    AttentionMaskInterface.register("check_mask", check_mask)
    AttentionInterface.register("check_mask", stop)
    model.set_attn_implementation("check_mask")
    with suppress(Exception), torch.no_grad(), torch.random.fork_rng([]):
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    model.set_attn_implementation("sdpa")
    return len(results) > 0 and all(results)


def check_forward(args, model, device):
    """Stop unless attention is causal and the model's loss is just the next-token loss."""
    name, ids = f"--model-name {args.model_name}", torch.arange(16, device=device)[None]
    # Only the first half has labels, so the loss must not depend on the tokens of the second half.
    labels = ids.where(ids < 8, -100)
    embedded = []
    # Do not compile graphs for this short sequence.
    with torch.compiler.set_stance("force_eager"):
        try:
            embedding = model.get_input_embeddings()
            hook = embedding.register_forward_hook(lambda *call: embedded.append(call[-1]))
            output = model(input_ids=ids, labels=labels, use_cache=False)
            loss = model.loss_function(output.logits, labels, vocab_size=model.config.vocab_size)
            embedded[0].retain_grad()
            output.loss.backward()
        except Exception as error:
            # Each kind of unsuitable model raises a different type of exception.
            fail(f"{name}: cannot be trained on tokens alone: {error!r}")
    hook.remove()
    model.zero_grad()
    if abs(output.loss - loss) > 1e-5 * loss:
        fail(f"{name}: its loss is not the next-token loss; choose a different model")
    gradient = embedded[0].grad.abs()
    if gradient[:, 8:].max() > 1e-5 * gradient.max():
        fail(f"{name}: tokens attend to later tokens; choose a model with causal attention")


def layers_of(model):
    """Return the decoder layers, which in transformers share a base class."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def build_optimizer(args, model):
    """Build AdamW with weight decay for matrices, but not for norms and biases."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    matrices = [weight for weight in weights if weight.ndim >= 2]
    vectors = [weight for weight in weights if weight.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )
    # Fused AdamW skips its update while found_inf is 1; train_step() sets found_inf.
    optimizer.found_inf = torch.zeros((), device=matrices[0].device)
    return optimizer


def lr_at(args, step):
    """Return the learning rate at `step`: linear warmup, then cosine decay to a tenth of `--lr`."""
    if step <= args.warmup_steps:
        return args.lr * step / args.warmup_steps
    progress = (step - args.warmup_steps) / max(1, args.num_steps - args.warmup_steps)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


# ---- data ------------------------------------------------------------------------------------
@rank_first()
def build_data(args, tokenizer):
    """Return the training samples and the held-out samples, a [samples, seq_length] tensor."""
    pieces = pieces_of(args, tokenizer)
    first = next(pieces, torch.empty(0, args.seq_length))
    num_train = len(first) - args.eval_samples
    if num_train < 1:
        samples = f"{len(first)} samples of {args.seq_length} tokens"
        problem = f"{samples} are not more than --eval-samples {args.eval_samples}"
        fail(f"--dataset-name {args.dataset_name}: {problem}; add text, or lower --seq-length")
    first, held_out = first.split([num_train, args.eval_samples])
    return Samples(first, pieces), held_out


class Samples:
    """The training samples of one or more pieces: memory-mapped [samples, seq_length] tensors."""

    def __init__(self, first, further=()):
        """Begin with the first piece; `further` yields the other pieces."""
        self.pieces, self.further = [first], iter(further)
        # Where each piece begins in an epoch, and where the last one ends.
        self.starts = [0, len(first)]

    def place_of(self, position):
        """Return the epoch, the piece and the index in the piece of a position in all epochs."""
        while position >= self.starts[-1] and (piece := next(self.further, None)) is not None:
            self.pieces.append(piece)
            self.starts.append(self.starts[-1] + len(piece))
        epoch, position = divmod(position, self.starts[-1])
        piece = bisect.bisect(self.starts, position) - 1
        return epoch, piece, position - self.starts[piece]


def pieces_of(args, tokenizer):
    """Yield the samples of one token file, or of each piece in a folder that prepare.py writes."""
    folder = Path(args.dataset_name)
    if folder.suffix != ".tokens":
        yield map_samples(token_file(args, tokenizer), torch.int32, args.seq_length)
        return
    try:
        index = json.loads((folder / "index.json").read_text())
    except (OSError, ValueError) as error:
        fail(f"--dataset-name {folder}: {error}; write it with preparing-data/prepare.py")
    vocabulary = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.eos_token_id])
    if index["tokenizer"] != hashlib.sha256(vocabulary.encode()).hexdigest()[:16]:
        fail(f"--dataset-name {folder}: was prepared with a different tokenizer")
    # Part k of n has the pieces k, k + n, k + 2n, ... up to its end.
    number = num_missing = 0
    while num_missing < index["parts"]:
        path = wait_for_piece(folder, number, index["parts"])
        if path:
            yield map_samples(path, getattr(torch, index["dtype"]), args.seq_length)
        number, num_missing = number + 1, 0 if path else num_missing + 1


def wait_for_piece(folder, number, num_parts):
    """Return the path of a piece when it is complete, or None if its part has ended before it."""
    path, part = folder / f"{number:06}.tokens", folder / f"part-{number % num_parts}.json"
    for second in itertools.count():
        # A shared file system may show the end of a part before it shows the part's last piece.
        state = json.loads(part.read_text()) if part.exists() else {}
        if state.get("ended") and number // num_parts >= state["pieces"]:
            return None
        if path.exists():
            return path
        if second % 60 == 0:
            print(f"waiting for {path}; is prepare.py running?", flush=True)
        time.sleep(1)


def map_samples(path, dtype, seq_length):
    """Return the samples in a token file as a memory-mapped [samples, seq_length] tensor."""
    num_samples = path.stat().st_size // dtype.itemsize // seq_length
    tokens = torch.from_file(str(path), size=num_samples * seq_length, dtype=dtype)
    return tokens.view(num_samples, seq_length)


def token_file(args, tokenizer):
    """Tokenize all documents into one int32 file, unless it exists; return the file's path."""
    documents = load_documents(args)
    key = Hasher.hash([documents.cache_files, args.text_column, tokenizer])
    path = Path(datasets.config.HF_DATASETS_CACHE, f"{key}.tokens")
    if path.exists():
        return path
    partial = path.with_suffix(f".{uuid.uuid4().hex}")
    try:
        with open(partial, "wb") as file:
            for batch in tqdm(documents.iter(1000), "tokenizing", disable=None):
                texts = [text or "" for text in batch[args.text_column]]
                for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
                    array("i", [*ids, tokenizer.eos_token_id]).tofile(file)
    except Exception as error:
        # The text may not be UTF-8, a character may have no token, or the disk may be full.
        partial.unlink(missing_ok=True)
        problem = f"cannot tokenize it with the tokenizer of {args.model_name}"
        fail(f"--dataset-name {args.dataset_name}: {problem}: {error!r}")
    return partial.rename(path)


def load_documents(args):
    """Return a dataset with one document per row."""
    name, path = args.dataset_name, Path(args.dataset_name)
    formats = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv"}
    formats[".parquet"] = "parquet"
    # The name of a compressed file has two suffixes, such as .txt.gz.
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:] if suffix.lower() in formats]
    reader, options = name, {"name": args.dataset_subset}
    if suffixes:
        # In patterns, brackets have a meaning; in the name of a file, they have none.
        files = glob.escape(name) if path.is_file() else name
        reader, options = formats[suffixes[-1]], {"data_files": files}
    elif path.is_file():
        fail(f"--dataset-name {name}: its format is unknown; known are {' '.join(formats)}")
    elif path.is_dir() and set("[]*?") & set(name):
        fail(f"--dataset-name {name}: rename the folder; datasets takes [ ] * ? for a pattern")
    try:
        if name == "pydoc":
            documents = datasets.Dataset.from_generator(
                lambda: ({"text": text} for text in topics.values())
            )
        else:
            config = datasets.load_dataset_builder(reader, **options).config
            # In text files, blank lines separate documents.
            if hasattr(config, "sample_by"):
                options["sample_by"] = "paragraph"
            # By default, pandas drops the first fields of a CSV line that has too many fields.
            if hasattr(config, "index_col"):
                options["index_col"] = False
                warnings.filterwarnings("error", message="Length of header")
            if ".tsv" in suffixes:
                options["sep"] = "\t"
            documents = datasets.load_dataset(reader, split="train", **options)
    except Exception as error:
        # The datasets library raises many exception types, and often hides the reason in __cause__.
        fail(f"--dataset-name {name}: {error.__cause__ or str(error) or 'the dataset is empty'}")
    features = documents.features.items()
    types = {column: str(getattr(feature, "dtype", feature)) for column, feature in features}
    if types.get(args.text_column) not in ("string", "large_string"):
        fail(f"--text-column {args.text_column}: not a text column; {name} has the columns {types}")
    return documents


@functools.lru_cache(maxsize=2)
def order_of(seed, visit, num_samples):
    """Return a random order of the samples of a piece, different in each visit."""
    generator = torch.Generator().manual_seed(mix(seed, visit))
    return torch.randperm(num_samples, generator=generator)


def batch_at(args, samples, step, micro_step, device):
    """Return an int64 micro-batch; its samples depend on the step number, not on past steps."""
    data_rank, num_data_ranks = dist.get_rank(), dist.get_world_size()
    size = args.micro_batch_size * num_data_ranks
    first = end_of(args, step - 1) + micro_step * size
    positions = range(first + data_rank, first + size, num_data_ranks)
    # DDP: wait for the whole step's pieces, because a collective cannot wait for long.
    samples.place_of(end_of(args, step) - 1)
    batch = samples_at(args, samples, positions).long()
    return batch.pin_memory().to(device, non_blocking=True) if args.device == "cuda" else batch


def end_of(args, step):
    """Return the position after the last sample of a step, counted over all epochs."""
    return (step + args.skip_steps) * args.global_batch_size


def samples_at(args, samples, positions):
    """Return the samples at the given positions in the endless sequence of shuffled epochs."""
    rows = []
    for position in positions:
        epoch, number, index = samples.place_of(position)
        piece = samples.pieces[number]
        # Each visit to a piece has an order of its own.
        visit = epoch * len(samples.pieces) + number
        rows.append(piece[order_of(args.seed, visit, len(piece))[index, None]])
    return torch.cat(rows)


# ---- one step --------------------------------------------------------------------------------
def loss_of(args, model, batch):
    """Return the mean next-token loss of `batch`."""
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=args.precision == "bf16"):
        return model(input_ids=batch, labels=batch, use_cache=False).loss


def forward_backward(args, model, train_set, step, device):
    """Compute the gradients of the step's mean loss; return the mean loss as a device tensor."""
    total_loss = torch.zeros((), device=device)
    for micro_step in range(args.accumulation):
        # DDP: all-reduce the gradients in the last micro-batch only. DDP's no_sync() sets the same
        # flag.
        model.require_backward_grad_sync = micro_step == args.accumulation - 1
        batch = batch_at(args, train_set, step, micro_step, device)
        loss = loss_of(args, model, batch) / args.accumulation
        loss.backward()
        total_loss += loss.detach()
    return total_loss


def clip_gradients(args, model):
    """Limit the norm of the gradients to `--max-grad-norm`; return the norm before clipping."""
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    grad_norm = torch.nn.utils.get_total_norm(grads)
    max_norm = args.max_grad_norm or math.inf
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, grad_norm)
    return grad_norm


def train_step(args, model, optimizer, train_set, step, device):
    """Run one optimizer step; return the loss and the gradient norm as tensors on the device."""
    torch.manual_seed(mix(args.seed, step, dist.get_rank()))
    loss = forward_backward(args, model, train_set, step, device)
    grad_norm = clip_gradients(args, model)
    for group in optimizer.param_groups:
        group["lr"] = lr_at(args, step)
    # Once a gradient is not finite, found_inf stays 1, and AdamW skips this and all later updates.
    optimizer.found_inf = torch.maximum(optimizer.found_inf, (~grad_norm.isfinite()).float())
    optimizer.step()
    # DDP: set the gradients to 0. If zero_grad() deleted them, all micro-batches except for the
    # last would store their gradients outside of DDP's buckets, which needs more memory.
    optimizer.zero_grad(set_to_none=False)
    return loss, grad_norm


@torch.no_grad()
def evaluate(args, model, held_out, device):
    """Return the mean loss of the held-out samples."""
    model.eval()
    total_loss, num_samples = torch.zeros(2, device=device)
    data_rank, num_data_ranks = dist.get_rank(), dist.get_world_size()
    batch_size = args.micro_batch_size
    num_rounds = math.ceil(len(held_out) / (batch_size * num_data_ranks))
    for batch in held_out.tensor_split(num_rounds * num_data_ranks)[data_rank::num_data_ranks]:
        # DDP: a rank with no samples left evaluates the first sample with weight 0, so that every
        # rank runs the same number of forward passes.
        inputs = batch if len(batch) else held_out[:1]
        total_loss += loss_of(args, model, inputs.long().to(device)) * len(batch)
        num_samples += len(batch)
    model.train()
    dist.all_reduce(total_loss)
    dist.all_reduce(num_samples)
    return (total_loss / num_samples).item()


# ---- checkpoint ------------------------------------------------------------------------------
def partial_of(folder):
    """Create an empty temporary folder beside `folder`; publish() renames it to `folder`."""
    partial = folder.with_name(".partial")
    # A run that was killed during a save may have left files behind.
    delete(partial)
    partial.mkdir(parents=True, exist_ok=True)
    return partial


def delete(folder):
    """Delete a folder if it exists; of a symbolic link, delete only the link."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def publish(args, partial, folder):
    """Flush `partial` to disk, rename it to `folder`, and delete the oldest checkpoints."""
    for path in (*partial.rglob("*"), partial):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    # The folder may hold a checkpoint that could not be read, or the model of an earlier export.
    delete(folder)
    partial.rename(folder)
    checkpoints = [path for path in sorted(folder.parent.glob("step-????????")) if path <= folder]
    for checkpoint in checkpoints[: -args.keep_checkpoints]:
        # Rename a checkpoint before deleting it, so that a kill leaves no half-deleted checkpoint.
        delete(checkpoint.rename(partial))


@rank_first()
def save_checkpoint(args, run_dir, model, optimizer, step):
    """Save the model, the optimizer and the arguments; the step number determines the rest."""
    if dist.get_rank() != 0:
        return
    checkpoint = run_dir / f"checkpoints/step-{step:08}"
    partial = partial_of(checkpoint)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "args": vars(args)}
    torch.save(state, partial / "state.pt")
    publish(args, partial, checkpoint)


def load_checkpoint(args, run_dir, model, optimizer):
    """Restore the newest readable checkpoint; return its step, or 0 for a new run."""
    checkpoints = sorted((run_dir / "checkpoints").glob("step-????????"), reverse=True)
    # DDP: all ranks try the checkpoints that rank 0 has found.
    candidates = [checkpoints]
    dist.broadcast_object_list(candidates, group=patient_group())
    for checkpoint in candidates[0]:
        try:
            state = torch.load(checkpoint / "state.pt", "cpu", mmap=True, weights_only=True)
        except Exception as error:
            # Reading a damaged file can raise almost any type of exception.
            print(f"{checkpoint} cannot be read: {error!r:.200}; trying the previous checkpoint")
            continue
        compare_args(args, state["args"], checkpoint)
        args.wandb_id = state["args"]["wandb_id"]
        model.load_state_dict(state["model"])
        # Hyperparameters come from the command line, not from the checkpoint.
        param_groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict(state["optimizer"] | {"param_groups": param_groups})
        print(f"continuing from {checkpoint}")
        return int(checkpoint.name.removeprefix("step-"))
    if checkpoints:
        fail(f"no checkpoint in {run_dir}/checkpoints can be read; delete the folder to start over")
    return 0


def compare_args(args, saved_args, checkpoint):
    """Stop if an argument that must stay the same has changed; print all other changes."""
    args.skip_steps = args.skip_steps or saved_args.get("skip_steps", 0)
    must_match = ["model_name", "config", "num_weights", "dataset_fingerprint"]
    must_match += ["seq_length", "global_batch_size", "seed"]
    for name, value in vars(args).items():
        if name == "wandb_id" or value == saved_args.get(name):
            continue
        change = f"{checkpoint}: {name} was {saved_args.get(name)}, is now {value}"
        if name in must_match:
            fail(f"{change}; choose a different --experiment-name")
        print(change)


@rank_first()
def export_model(args, run_dir, model, tokenizer):
    """Write the finished model to a folder that `from_pretrained` can load."""
    if dist.get_rank() != 0:
        return
    partial = partial_of(run_dir / "model")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    publish(args, partial, run_dir / "model")
    (run_dir / f"finished-{args.num_steps}").touch()


# ---- main ------------------------------------------------------------------------------------
# Peak bf16 TFLOP/s without sparsity, from the vendors' data sheets.
PEAK_TFLOPS = {
    312: ["A100-SXM4-40GB", "A100-SXM4-80GB", "A100-PCIE-40GB", "A100 80GB PCIe"],
    362: ["L40S"],
    756: ["H100 PCIe"],
    835: ["H100 NVL", "H200 NVL"],
    989: ["H100 80GB HBM3", "H200", "GH200 480GB"],
    1307: ["AMD Instinct MI300X"],
    2250: ["B200", "B300 SXM6 AC"],
    2500: ["GB200", "GB300"],
}
PEAK_FLOPS = {name: peak * 1e12 for peak, names in PEAK_TFLOPS.items() for name in names}


def mfu(args, model, tokens_per_second):
    """Return the model FLOPs utilization (PaLM, appendix B, arxiv.org/abs/2204.02311).

    Return None if the speed is unknown, if PEAK_FLOPS does not list the device, or if the precision
    is not bf16.
    """
    device_name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    peak = PEAK_FLOPS.get(device_name.removeprefix("NVIDIA "))
    if peak is None or tokens_per_second is None or args.precision != "bf16":
        return None
    modules = [model.get_output_embeddings(), *layers_of(model)]
    weights = [item for module in modules for item in module.named_parameters()]
    num_weights = sum(num_active(model.config, name, weight.shape) for name, weight in weights)
    config, heads = model.config, model.config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    flops_per_token = 6 * num_weights + 12 * config.num_hidden_layers * width * args.seq_length
    return tokens_per_second * flops_per_token / (peak * dist.get_world_size())


def num_active(config, name, shape):
    """Return the number of values in a weight that a token uses; it uses only a few experts."""
    # transformers stacks the experts of a layer into weights of the shape [experts, ...].
    is_stacked = "experts" in name.split(".") and len(shape) > 1
    # Families name the number of experts that a token uses differently.
    names = ("num_experts_per_tok", "moe_topk", "moe_k")
    used = [getattr(config, key) for key in names if getattr(config, key, None)]
    return math.prod((used[0], *shape[1:]) if is_stacked else shape)


def measure(args, model, train_set, step, loss, grad_norm, interval_start):
    """Return the metrics of `step`; loss.item() makes the host wait for the device."""
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    epoch, *_ = train_set.place_of(end_of(args, step) - 1)
    row = {"step": step, "epoch": epoch, "loss": loss.item(), "grad_norm": grad_norm.item()}
    start_step, start_time = interval_start
    tokens = (step - start_step) * args.global_batch_size * args.seq_length
    speed = tokens / (time.perf_counter() - start_time) if start_time else None
    # On Linux, the unit of ru_maxrss is KiB.
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if args.device == "cuda":
        memory = torch.cuda.max_memory_allocated()
    row |= {"lr": lr_at(args, step), "tokens_per_second": speed, "mfu": mfu(args, model, speed)}
    return row | {"peak_memory_gib": memory / 2**30}


def start_tracking(args, run_dir):
    """Start a wandb run, or continue the wandb run whose id is in the checkpoint."""
    wandb_run = wandb.init(
        id=args.wandb_id,
        name=args.experiment_name,
        config=vars(args),
        dir=run_dir,
        mode=args.wandb if dist.get_rank() == 0 else "disabled",
        resume="allow",
    )
    # Plot each metric against the "step" in its row. By default, wandb numbers the rows itself, so
    # steps that a resume repeats would look like new steps.
    wandb_run.define_metric("*", step_metric="step")
    return wandb_run


def log(run_dir, wandb_run, row):
    """Append `row` to metrics.jsonl, and send `row` to wandb and stdout.

    After a resume, metrics.jsonl may have several rows for a step; the last row is valid.
    """
    if dist.get_rank() != 0:
        return
    with open(run_dir / "metrics.jsonl", "ab+") as file:
        # A kill or a full disk may have cut the last row short. If so, begin a new line.
        file.seek(max(0, file.tell() - 1))
        separator = b"" if file.read() in (b"", b"\n") else b"\n"
        file.write(separator + json.dumps(row).encode() + b"\n")
    wandb_run.log(row)
    # Keep training if the terminal has been closed.
    with suppress(OSError):
        known = {name: value for name, value in row.items() if value is not None}
        tqdm.write("  ".join(f"{name} {value:,.6g}" for name, value in known.items()))


@record
def main():
    """Train the model; if the run has a checkpoint, continue from the newest checkpoint."""
    args = parse_args()
    device, run_dir = setup(args)
    tokenizer, config = build_tokenizer_and_config(args)
    train_set, held_out = build_data(args, tokenizer)
    first = train_set.pieces[0]
    args.dataset_fingerprint = mix(len(first), first[:: 1 + len(first) // 100].tolist())
    model = build_model(args, config).to(device)
    check_forward(args, model, device)
    args.num_weights = model.num_parameters()
    optimizer = build_optimizer(args, model)
    start = load_checkpoint(args, run_dir, model, optimizer)
    if start > args.num_steps:
        fail(f"--num-steps {args.num_steps}: {run_dir} has a checkpoint of step {start} already")
    if start == args.num_steps and (run_dir / f"finished-{start}").exists():
        print(f"{run_dir} is already finished, at step {start}")
        return

    start_steps = [None] * dist.get_world_size()
    dist.all_gather_object(start_steps, start, group=patient_group())
    if len(set(start_steps)) > 1:
        problem = f"they would continue from steps {start_steps}"
        fail(f"the ranks cannot read the same checkpoint: {problem}; check the mount of --save-dir")
    # DDP: keep torch.compile from splitting a layer's graph at the ends of gradient buckets.
    torch._dynamo.config.optimize_ddp = False
    # DDP: begin with gradients of 0. DDP moves them into its buckets, also after a resume.
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    # DDP: training never changes the buffers, so do not broadcast them in each forward pass.
    ddp.broadcast_buffers = False
    wandb_run = start_tracking(args, run_dir)
    if start == 0:
        log(run_dir, wandb_run, {"step": 0, "val_loss": evaluate(args, model, held_out, device)})
    # The first interval may include compilation. Without a start time, measure() reports no speed.
    interval_start = start, None
    steps = range(start + 1, args.num_steps + 1)
    stops = stop_requests(run_dir)
    for step in tqdm(steps, initial=start, total=args.num_steps, file=sys.stdout, disable=None):
        stop = next(stops)
        loss, grad_norm = train_step(args, ddp, optimizer, train_set, step, device)
        is_last = step == args.num_steps
        evaluating = is_last or step % args.eval_every == 0
        reporting = evaluating or step % args.log_every == 0
        saving = is_last or step % args.checkpoint_every == 0 or stop
        if (reporting or saving) and optimizer.found_inf:
            first = interval_start[0] + 1
            fail(f"a gradient in steps {first} to {step} was not finite; these steps are not saved")
        if reporting:
            row = measure(args, model, train_set, step, loss, grad_norm, interval_start)
            if evaluating:
                row["val_loss"] = evaluate(args, model, held_out, device)
            log(run_dir, wandb_run, row)
        if saving:
            save_checkpoint(args, run_dir, model, optimizer, step)
        if reporting or saving:
            interval_start = step, time.perf_counter()
        if stop and not is_last:
            print(f"stopped at step {step}; run the same command to continue")
            wandb_run.finish()
            return

    export_model(args, run_dir, model, tokenizer)
    print(f"finished: {run_dir} has the model, the metrics and the last checkpoints")
    wandb_run.finish()


if __name__ == "__main__":
    main()
    # DDP: after --help, @record makes main() return before setup() has created a process group.
    if dist.is_initialized():
        # DDP: keep every rank alive until all ranks have finished.
        wait_for_all()
        dist.destroy_process_group()
