"""Train the matrices of a split causal language model with Muon. Parent: 04-fsdp.

Small:  torchrun --standalone --nproc-per-node 2 related-topics/muon/train_llm.py
Real:   sbatch --nodes 4 --gpus-per-node 8 03-job-launchers/slurm/train.sbatch \
            related-topics/muon/train_llm.py \
            -m meta-llama/Llama-3.1-8B -d roneneldan/TinyStories \
            -s 2048 --global-batch-size 64 --num-steps 5000 --compile
"""

import argparse
import bisect
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
from contextlib import contextmanager
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from pydoc_data.topics import topics

import datasets
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
import wandb
from datasets.fingerprint import Hasher
from safetensors import safe_open
from safetensors.torch import save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, masking_utils
from transformers import core_model_loading as conversion
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

# The name of this start of the run, as rank 0 writes it to the run's folder.
PROCESS = f"process {os.getpid()} on {socket.gethostname()}"
# The environment variables that each launcher sets to the rank, the world size and the local rank,
# in this order.
LAUNCHER_VARIABLES = {
    "torchrun": ["RANK", "WORLD_SIZE", "LOCAL_RANK"],
    "Open MPI": ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],
    "MPICH": ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"],
    "srun": ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"],
}
# The asynchronous save in progress: a list with at most one Future object.
PENDING_SAVES = []


def parse_args():
    """Parse the command line, and compute the size and the number of the micro-batches."""
    adopt_launcher()
    parser = argparse.ArgumentParser(fromfile_prefix_chars="@", allow_abbrev=False)
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.convert_arg_line_to_args = lambda line: shlex.split(line, comments=True)
    parser.error = lambda message: fail(f"{message}; docs/flags.md has the flags of each chapter")
    chapter = Path(__file__).resolve().parent.name
    add = parser.add_argument

    add("-m", "--model-name", default="tiny", help="hub id, folder, or tiny (a built-in Llama)")
    add("--config", nargs="+", default=[], metavar="NAME=VALUE", help="override model settings")
    add("--pretrained", action="store_true", help="start from the published weights")

    add("-d", "--dataset-name", default="pydoc", help="hub id, FOLDER.tokens, or pydoc")
    add("--dataset-subset", help="the subset to load, if the hub dataset has subsets")
    add("--text-column", default="text", help="the column that holds the text")
    add("-s", "--seq-length", type=positive, default=256, help="tokens per sample")

    add("--global-batch-size", type=positive, default=32, help="samples per optimizer step")
    add("-b", "--batch-size", type=positive, default=8, help="maximum samples per forward pass")
    add("--num-steps", type=positive, default=100, help="total number of optimizer steps")
    add("--lr", type=float, default=1e-3, help="peak learning rate, reached after the warmup")
    add("--warmup-steps", type=int, default=10, help="steps until the learning rate peaks")
    add("--weight-decay", type=float, default=0.1, help="decay of matrices; vectors have no decay")
    add("--max-grad-norm", type=float, default=1.0, help="maximum gradient norm; 0 means no limit")
    add("--skip-steps", type=int, default=0, help="steps whose samples are left out")
    add("--seed", type=int, default=0, help="seed for weights, data order and dropout")

    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda if present")
    add("--precision", choices=["auto", "bf16", "fp32"], default="auto", help="auto: bf16 if fast")
    add("--compile", action="store_true", help="compile the layers and the loss")
    switch = argparse.BooleanOptionalAction
    add("--reshard-after-forward", action=switch, default=True, help="free gathered weights early")
    add("--replicas", type=positive, default=1, help="model copies, each split across its ranks")

    add("-e", "--experiment-name", default=chapter, help="name of the run's folder in --save-dir")
    add("--save-dir", default="outputs", help="the folder that holds all runs")
    add("--checkpoint-every", type=positive, default=50, help="steps between checkpoints")
    add("--keep-checkpoints", type=positive, default=2, help="number of checkpoints to keep")
    add("--eval-every", type=positive, default=50, help="steps between evaluations")
    add("--eval-samples", type=positive, default=64, help="number of samples to hold out")
    add("--log-every", type=positive, default=10, help="steps between log lines")
    add("--wandb", choices=["disabled", "offline", "online"], default="disabled", help="wandb mode")
    add("--dist-timeout", type=positive, default=600, help="seconds to wait for other ranks")
    add("--checkpoint-async", action="store_true", help="write checkpoints in the background")

    args = parser.parse_args()
    if args.device == "auto":
        # The driver creates /dev/nvidiactl, even if torch cannot use the GPU. A run with a broken
        # GPU must not continue on the CPU.
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
        has_gpu = torch.cuda.is_available() or (os.path.exists("/dev/nvidiactl") and not hidden)
        args.device = "cuda" if has_gpu else "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        fail("torch finds no working GPU; repair the driver, or pass --device cpu")
    if args.precision == "auto":
        # GPUs below compute capability 8.0 emulate bf16, and the emulation is slow.
        has_bf16 = args.device == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
        args.precision = "bf16" if has_bf16 else "fp32"
    needed = [*LAUNCHER_VARIABLES["torchrun"], "MASTER_ADDR", "MASTER_PORT"]
    if missing := [name for name in needed if not os.environ.get(name)]:
        fail(f"start this script with a launcher, such as torchrun: {missing[0]} is not set")
    num_data_ranks = int(os.environ["WORLD_SIZE"])
    # The samples that this device processes in each step.
    local_batch_size, remainder = divmod(args.global_batch_size, num_data_ranks)
    if remainder:
        problem = f"not divisible by {num_data_ranks} data-parallel ranks; choose a multiple"
        fail(f"--global-batch-size {args.global_batch_size}: {problem}")
    if num_data_ranks % args.replicas:
        fail(f"--replicas {args.replicas}: not a divisor of {num_data_ranks} ranks; use a divisor")
    sizes = range(1, args.batch_size + 1)
    args.micro_batch_size = max(size for size in sizes if local_batch_size % size == 0)
    args.accumulation = local_batch_size // args.micro_batch_size
    args.wandb_id = os.urandom(4).hex()
    return args


def positive(text):
    """Convert the value of a flag to an integer; raise an error if it is below 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def adopt_launcher():
    """Set torchrun's variables from the variables of the launcher that started this rank."""
    for names in LAUNCHER_VARIABLES.values():
        if all(map(os.environ.get, names)):
            os.environ |= zip(LAUNCHER_VARIABLES["torchrun"], map(os.getenv, names), strict=True)
            break
    if "SLURM_STEP_NODELIST" in os.environ:
        # srun: rank 0 runs on the first node of the list. The list gpu[03-07,12] starts with gpu03.
        nodes = re.sub(r"\[(\d+)[^]]*\]", r"\1", os.environ["SLURM_STEP_NODELIST"])
        os.environ.setdefault("MASTER_ADDR", nodes.split(",")[0])
        # srun: derive the port from the job and step ids; each call of srun needs its own port.
        job_step = 10 * int(os.environ["SLURM_JOB_ID"]) + int(os.environ["SLURM_STEP_ID"])
        os.environ.setdefault("MASTER_PORT", str(10_000 + job_step % 20_000))


def setup(args):
    """Join the process group; return this rank's device and the run's folder."""
    # DDP: let Linux kill this rank when its launcher dies. Otherwise, this rank could keep training
    # and overwrite the files of the next run. The 1 is PR_SET_PDEATHSIG.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    # Ctrl-C ends this rank without a traceback.
    signal.signal(signal.SIGINT, lambda *_: sys.exit("KeyboardInterrupt"))
    sys.stdout.reconfigure(line_buffering=True)
    run_dir = Path(args.save_dir, args.experiment_name)
    run_dir.mkdir(parents=True, exist_ok=True)
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
    # DDP: NCCL connects the ranks in the first operation, so let all ranks take part in it.
    dist.all_reduce(torch.zeros((), device=device))
    # DDP: only rank 0 prints to stdout and talks to wandb.
    if dist.get_rank() != 0:
        sys.stdout, args.wandb = open(os.devnull, "w"), "disabled"
    check_shared(run_dir)
    print(f"training on {device} in {args.precision}")
    return device, run_dir


@functools.cache
def patient_group(user="main thread"):
    """Return a group whose timeout is a week, because tokenizing may take hours.

    Each thread needs a group of its own.
    """
    return dist.new_group(backend="gloo", timeout=timedelta(days=7))


@contextmanager
def rank_first():
    """Run the body on rank 0, then on local rank 0 of the other nodes, then on the remaining ranks.

    Later ranks find the files that earlier ranks have written.
    """
    turn = (dist.get_rank() != 0) + (os.environ["LOCAL_RANK"] != "0")
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
    if dist.get_rank() == 0:
        (run_dir / ".probe").write_text(PROCESS)
    wait_for_all()
    found = [path.read_text() for path in run_dir.glob(".probe")]
    found_by_all = [None] * dist.get_world_size()
    dist.all_gather_object(found_by_all, (socket.gethostname(), found), group=patient_group())
    if hosts := {host for host, found in found_by_all if found != found_by_all[0][1]}:
        fail(f"--save-dir: {', '.join(hosts)} cannot see {run_dir.resolve()}; use a shared folder")


def stop_requests(run_dir):
    """Yield, before each step, whether the run should stop after that step.

    SIGTERM, SIGUSR1 or SIGHUP on any rank requests a stop, and so does a file named `stop` in the
    run's folder, or a newer start of the same run. An all-reduce gives all ranks the same answer.
    The all-reduce runs in the background during the previous step, so that the ranks rarely wait
    for the answer.
    """
    received, newest = [], run_dir / "newest-start"
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, lambda number, _: received.append(number))
    # A `stop` file that already exists was meant for an earlier run.
    (run_dir / "stop").unlink(missing_ok=True)
    if dist.get_rank() == 0:
        (run_dir / ".probe").rename(newest)
    stop = False
    while True:
        if dist.get_rank() == 0 and newest.exists() and newest.read_text() != PROCESS:
            print(f"{run_dir}: {newest.read_text()} has started the same run; this process stops")
            received.append(newest)
        requested = received or (dist.get_rank() == 0 and (run_dir / "stop").exists())
        any_requested = torch.tensor(bool(requested), dtype=torch.int32)
        exchange = dist.all_reduce(any_requested, dist.ReduceOp.MAX, patient_group(), async_op=True)
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


def hash_of(*values):
    """Hash the values, in their order, into 64 bits."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8], "little")


# ---- model -----------------------------------------------------------------------------------
@rank_first()
def build_tokenizer_and_config(args):
    """Load the tokenizer and the configuration of `--model-name`, and apply `--config`."""
    try:
        if args.model_name == "tiny":
            # ByT5's tokens are bytes, so its tokenizer needs no vocabulary file.
            tokenizer = transformers.ByT5Tokenizer()
            settings = {"hidden_size": 128, "intermediate_size": 352, "vocab_size": len(tokenizer)}
            settings |= {"num_hidden_layers": 4, "num_attention_heads": 4, "bos_token_id": None}
            config = transformers.LlamaConfig(**settings, eos_token_id=tokenizer.eos_token_id)
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
            items = config.to_dict().items()
            config = config.from_dict({key: value for key, value in items if key != "layer_types"})
        if getattr(config, "output_router_logits", False):
            raise ValueError("no router loss is added; pass --config output_router_logits=false")
    except (OSError, ValueError) as error:
        fail(f"--model-name {' '.join([args.model_name, *args.config])}: {error}")
    if len(tokenizer) < 2 or tokenizer.eos_token_id is None:
        fail(f"--model-name {args.model_name}: needs a tokenizer with an end-of-text token")
    # A tokenizer may leave out numbers, so its highest token id may be above its number of tokens.
    if (highest_id := max(tokenizer.get_vocab().values())) >= config.vocab_size:
        fail(f"--model-name {args.model_name}: vocab_size must exceed token id {highest_id}")
    args.config_fingerprint = hash_of(config.to_diff_dict() | {"transformers_version": None})
    return tokenizer, config


def build_model(args, config):
    """Build the model on the CPU, so that its initial weights do not depend on the device."""
    torch.manual_seed(args.seed)
    if args.pretrained:
        model = load_pretrained(args, config)
    else:
        # Skip random initialization in the constructors; init_weights() initializes all weights.
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.init_weights()
    model.loss_function = next_token_loss

    # In every forward pass, transformers asks the device whether samples hold several packed
    # sequences, and the host has to wait for the answer. Here, the answer is always no.
    masking_utils.find_packed_sequence_indices = lambda position_ids: None

    # layer.compile() keeps the names of the weights; torch.compile(layer) would change the names.
    # With dynamic=False, torch compiles a separate graph for each input shape.
    if args.compile:
        for layer in layers_of(model):
            layer.compile(dynamic=False)
        model.loss_function = torch.compile(model.loss_function, dynamic=False)
    return model


def load_pretrained(args, config):
    """Load the published weights of `--model-name`; stop if a weight is missing."""
    name, options = args.model_name, {"dtype": torch.float32, "use_safetensors": True}
    load = functools.partial(AutoModelForCausalLM.from_pretrained, output_loading_info=True)
    try:
        model, loading = load(name, config=config, **options)
    except Exception as error:
        # Each kind of damaged file raises a different type of exception.
        fail(f"--pretrained: cannot read the safetensors files of {name}: {error!r:.300}")
    # Stop if a weight is missing, because it would start with random values.
    if missing := loading["missing_keys"]:
        fail(f"--pretrained: {name} lacks {min(missing)} ({len(missing)} weights); check its files")
    # transformers does not tie two weights if the files have different values for them.
    for key in model.get_expanded_tied_weights_keys().keys() - model.all_tied_weights_keys.keys():
        fail(f"--pretrained: the files do not tie {key}; pass --config tie_word_embeddings=false")
    return model.train()


def check_causal(args, model, device):
    """Stop if a token attends to later tokens, because the model would see what it predicts."""
    # These two sequences differ only in their second half.
    batch = torch.arange(16, device=device).repeat(2, 1)
    batch[1, 8:] = 0
    model.eval()
    # Do not compile graphs for these short sequences.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        logits = model(input_ids=batch, use_cache=False).logits[:, :8]
    model.train()
    if (logits[0] - logits[1]).abs().max() > 1e-3 * logits.std():
        fail(f"--model-name {args.model_name}: tokens see later tokens; choose a causal model")


def layers_of(model):
    """Return the decoder layers, which in transformers share a base class."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def next_token_loss(logits, labels):
    """Return the mean cross entropy of predicting each token from the tokens before it.

    The shape of `logits` is [batch, sequence, vocabulary], that of `labels` [batch, sequence].
    """
    # The last position has no next token; cross_entropy() ignores the target -100.
    targets = F.pad(labels[:, 1:], (0, 1), value=-100)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build_mesh(args, device):
    """Arrange the ranks in a mesh with one dimension for each kind of parallelism."""
    sizes = {
        "replicate": args.replicas,
        "shard": dist.get_world_size() // args.replicas,
    }
    return dist.init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def placement_of(num_shards, weight):
    """Return the placement of a weight that FSDP should shard; None shards its first dimension.

    transformers stacks the experts of a layer: [experts, rows, columns]. FSDP would pad the number
    of experts to a multiple of the shards, so that on 64 ranks, 8 experts would need the memory of
    64. Instead, each rank gets some columns of all experts.
    """
    if weight.ndim == 3 and len(weight) % num_shards and weight.shape[2] % num_shards == 0:
        return Shard(2)
    return None


def shard(args, model, device):
    """Split the model's weights across the ranks in place, layer by layer; return the model.

    fully_shard() moves one layer at a time to the device, keeps this rank's shard and frees the
    rest, so that the device does not have to hold the full model. In training, the ranks gather a
    layer's weights before its forward pass, and again before its backward pass if the weights have
    been freed. After the backward pass, the ranks reduce-scatter the layer's gradients, so that
    each rank keeps only its shard.
    """
    mesh = build_mesh(args, device)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {
        "mesh": mesh["replicate", "shard"] if args.replicas > 1 else mesh["shard"],
        "mp_policy": bf16 if args.precision == "bf16" else MixedPrecisionPolicy(),
        "shard_placement_fn": functools.partial(placement_of, mesh["shard"].size()),
    }
    layers = layers_of(model)
    # FSDP: in a few models, a layer contains other layers, which must be sharded first.
    for layer in reversed(layers):
        # FSDP: keep the last layer gathered, because it is the first in the backward pass.
        reshard = args.reshard_after_forward and layer is not layers[-1]
        fully_shard(layer, reshard_after_forward=reshard, **options)
    # FSDP: this call shards the weights that are outside of the layers.
    return fully_shard(model, reshard_after_forward=False, **options)


def build_optimizer(args, model):
    """Build Muon for the matrices of the layers, and AdamW for all other weights."""
    hidden = matrices_of_layers(model)
    matrices = [w for w in model.parameters() if w.ndim >= 2 and w not in hidden]
    vectors = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    # Muon: all matrices of a group have the same shape, so that one tensor can hold a group.
    for shape in dict.fromkeys(weight.shape for weight in hidden):
        same_shape = [weight for weight in hidden if weight.shape == shape]
        groups.append({"params": same_shape, "momentum": 0.95})
    options = {"betas": (0.9, 0.95), "weight_decay": args.weight_decay, "fused": True}
    optimizer = Muon(groups, lr=args.lr, **options)
    optimizer.dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    # Fused AdamW skips its update while found_inf is 1; train_step() sets found_inf.
    optimizer.found_inf = torch.zeros((), device=matrices[0].device)
    return optimizer


def matrices_of_layers(model):
    """Return the matrices and the stacked experts in layers, with their names, in a fixed order.

    The rows of an embedding and of the output layer are vectors of tokens, so AdamW trains them.
    """
    named = [pair for layer in layers_of(model) for pair in layer.named_parameters()]
    # Muon: transformers stacks experts into three dimensions, and the biases of experts into two. A
    # convolution also has three dimensions, but is no stack of matrices.
    return {w: name for name, w in named if w.ndim == 2 + ("experts" in name.split("."))}


class Muon(torch.optim.AdamW):
    """AdamW, but the weights of a group that has a momentum are updated by Muon.

    Muon moves a matrix along its momentum, after making all singular values of the momentum about
    equal (arxiv.org/abs/2502.16982). The momentum is sharded like the matrix. Singular values need
    full matrices, so the ranks divide the matrices among themselves, and send one another shards.
    """

    @torch.no_grad()
    def step(self, closure=None):
        updates = [self.update(group) for group in self.param_groups if "momentum" in group]
        # An update stops at each yield, while its matrices travel. Meanwhile, start the next one.
        for _ in range(3):
            for update in updates:
                next(update, None)
        # AdamW skips the weights that Muon has updated, because they no longer have a gradient.
        super().step()

    def update(self, group):
        """Update weights of the same shape; yield while their shards travel between the ranks."""
        weights = [weight for weight in group["params"] if weight.grad is not None]
        if not weights:
            return
        shards = torch.stack([self.direction(group, weight) for weight in weights])
        ranks, split = weights[0].device_mesh.get_group("shard"), weights[0].placements[-1].dim
        num_rows, num_columns = weights[0].shape[-2:]
        if weights[0].ndim == 2:
            changes = yield from orthogonalize_split(shards, num_rows, ranks)
        elif split == 0:
            # This rank has all rows and columns of its experts, so no shards travel.
            changes = orthogonalize(shards)
        else:
            # FSDP has split the columns of all experts, which are the rows of transposed experts.
            shards = shards.flatten(0, 1).mT
            changes = yield from orthogonalize_split(shards, num_columns, ranks)
            changes = changes.mT.unflatten(0, (len(weights), -1))
        # With this factor, updates are about as large as those of AdamW, and --lr means the same.
        factor = 0.2 * max(num_rows, num_columns) ** 0.5
        rate = group["lr"] * (1 - self.found_inf)
        for weight, change in zip(weights, changes, strict=True):
            local = weight.to_local()
            local -= rate * (factor * change + group["weight_decay"] * local)

    def direction(self, group, weight):
        """Add the gradient to the momentum; return this rank's shard of the direction to move."""
        momentum = self.momentum_of(weight)
        # While found_inf is 1, leave the momentum unchanged.
        gradient = weight.grad.to_local().where(self.found_inf == 0, momentum)
        weight.grad = None
        momentum.lerp_(gradient, 1 - group["momentum"])
        # Nesterov's momentum looks one step ahead.
        return gradient.lerp(momentum, group["momentum"]).to(self.dtype)

    def momentum_of(self, weight):
        """Return this rank's shard of the momentum of a weight; the momentum starts at zero."""
        if "exp_avg" not in self.state[weight]:
            # With AdamW's name, the momentum can continue the first moment of a run of AdamW.
            self.state[weight]["exp_avg"] = torch.zeros_like(weight)
        return self.state[weight]["exp_avg"].to_local()


def orthogonalize_split(shards, num_rows, ranks):
    """Orthogonalize matrices whose rows are split over the ranks; yield while shards travel.

    The shape of `shards`, and of the result, is [matrices, rows of this rank, columns].
    """
    num_ranks, (num_matrices, num_local_rows, _) = ranks.size(), shards.shape
    # Rank r gets the r-th part of the matrices. Add rows of zeros to short shards, and matrices of
    # zeros, so that all parts have the same size.
    missing_rows = -(-num_rows // num_ranks) - num_local_rows
    parts = F.pad(shards, (0, 0, 0, missing_rows, 0, -num_matrices % num_ranks))
    received, transfer = exchange(parts, ranks)
    yield
    transfer.wait()
    # Change [ranks, matrices, rows of a rank, columns] to [matrices, rows, columns].
    matrices = received.unflatten(0, (num_ranks, -1)).transpose(0, 1).flatten(1, 2)
    # Rows of zeros stay zero.
    matrices = orthogonalize(matrices)
    parts = matrices.unflatten(1, (num_ranks, -1)).transpose(0, 1).flatten(0, 1)
    received, transfer = exchange(parts, ranks)
    yield
    transfer.wait()
    return received[:num_matrices, :num_local_rows]


def exchange(parts, ranks):
    """Start to send the r-th part of the first dimension to rank r; return the received parts.

    Also return the transfer; wait for it before you read the parts. They need a tensor of their
    own: with one matrix per rank, a tensor that is reused could still be in use as a view.
    """
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    transfer = dist.all_to_all_single(received, parts.contiguous(), group=ranks, async_op=True)
    return received, transfer


def orthogonalize(matrices):
    """Bring the singular values of each matrix close to 1, by five Newton-Schulz iterations."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    result = matrices.mT if is_tall else matrices
    result = result / result.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        # These factors suit singular values from 0 to 1 (kellerjordan.github.io/posts/muon).
        gram = result @ result.mT
        result = 3.4445 * result + (2.0315 * gram @ gram - 4.7750 * gram) @ result
    return result.mT if is_tall else result


def lr_at(args, step):
    """Return the learning rate at `step`: linear warmup, then cosine decay to a tenth of `--lr`."""
    if step <= args.warmup_steps:
        return args.lr * step / args.warmup_steps
    progress = (step - args.warmup_steps) / max(1, args.num_steps - args.warmup_steps)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


# ---- data ------------------------------------------------------------------------------------
@rank_first()
def build_data(args, tokenizer):
    """Return the training samples, and a [samples, seq_length] tensor of held-out samples."""
    pieces = pieces_of(args, tokenizer)
    piece = next(pieces, torch.empty(0, args.seq_length))
    if len(piece) <= args.eval_samples:
        fail(f"--eval-samples {args.eval_samples}: there are only {len(piece)} samples; lower it")
    piece, held_out = piece.tensor_split([-args.eval_samples])
    args.dataset_fingerprint = hash_of(len(piece), piece[:: 1 + len(piece) // 100].tolist())
    return Samples(args.seed, piece, pieces), held_out


class Samples:
    """Hold an endless sequence of training samples; each epoch has every sample once.

    The samples come in pieces. Each piece is shuffled on its own, differently in each epoch.
    """

    def __init__(self, seed, first_piece, later_pieces):
        self.seed, self.pieces, self.later_pieces = seed, [first_piece], later_pieces
        # The positions in an epoch where each piece begins, and where the last piece ends.
        self.starts = [0, len(first_piece)]

    def __getitem__(self, position):
        # Load pieces until a piece holds this position, or until there are no more pieces.
        while position >= self.starts[-1] and (piece := next(self.later_pieces, None)) is not None:
            self.pieces.append(piece)
            self.starts.append(self.starts[-1] + len(piece))
        epoch, position = divmod(position, self.starts[-1])
        number = bisect.bisect(self.starts, position) - 1
        shuffle, num_samples = epoch * len(self.pieces) + number, len(self.pieces[number])
        order = random_order(self.seed, shuffle, num_samples)
        return self.pieces[number][order[position - self.starts[number]]]


@functools.lru_cache(maxsize=2)
def random_order(seed, shuffle, num_samples):
    """Return a random order of the samples of a piece, different for each `shuffle`."""
    generator = torch.Generator().manual_seed(hash_of(seed, shuffle))
    return torch.randperm(num_samples, generator=generator).numpy()


def pieces_of(args, tokenizer):
    """Yield the samples of one token file, or of each piece in a folder that prepare.py writes."""
    folder = Path(args.dataset_name)
    if folder.suffix != ".tokens":
        yield map_samples(token_file(args, tokenizer), torch.int32, args.seq_length)
        return
    if not (folder / "index.json").exists():
        fail(f"--dataset-name {folder}: no index.json; write it with preparing-data/prepare.py")
    index = json.loads((folder / "index.json").read_text())
    vocabulary = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.eos_token_id])
    if index["tokenizer"] != hashlib.sha256(vocabulary.encode()).hexdigest()[:16]:
        fail(f"--dataset-name {folder}: was prepared with a different tokenizer; prepare it again")
    if kind := index.get("kind"):
        fail(f"--dataset-name {folder}: holds {kind}; train on it with fine-tuning/{kind}")
    # A process of prepare.py writes part k of n: the pieces k, k + n, k + 2n, ... until it ends.
    number, num_ended, num_parts = 0, 0, index["parts"]
    while num_ended < num_parts:
        path, part = folder / f"{number:06}.tokens", folder / f"part-{number % num_parts}.json"
        state = json.loads(part.read_text()) if part.exists() else {"ended": False}
        if path.exists():
            yield map_samples(path, getattr(torch, index["dtype"]), args.seq_length)
            number, num_ended = number + 1, 0
        elif state["ended"] and number // num_parts >= state["pieces"]:
            number, num_ended = number + 1, num_ended + 1
        else:
            print(f"waiting for {path}; is prepare.py running?", flush=True)
            time.sleep(10)


def map_samples(path, dtype, seq_length):
    """Return the samples in a token file as a memory-mapped [samples, seq_length] tensor."""
    size = path.stat().st_size // dtype.itemsize // seq_length * seq_length
    return torch.from_file(str(path), size=size, dtype=dtype).view(-1, seq_length)


def token_file(args, tokenizer):
    """Tokenize all documents into one int32 file, unless it exists; return the file's path."""
    documents = load_documents(args)
    # Split a control token that a text quotes, such as </s>, into ordinary tokens.
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    key = Hasher.hash([documents.cache_files, args.text_column, tokenizer, options])
    path = Path(datasets.config.HF_DATASETS_CACHE, f"{key}.tokens")
    if path.exists():
        return path
    # Two runs may write this file at the same time, so add a random id to the temporary name.
    partial = path.with_suffix(f".{args.wandb_id}")
    with open(partial, "wb") as file:
        for batch in tqdm(documents.iter(1000), "tokenizing", disable=None):
            if None in batch[args.text_column]:
                fail(f"--text-column {args.text_column}: a row has no text; prepare.py can skip it")
            for ids in tokenizer(batch[args.text_column], **options)["input_ids"]:
                np.array([*ids, tokenizer.eos_token_id], dtype=np.int32).tofile(file)
    return partial.rename(path)


def load_documents(args):
    """Return a dataset with one document per row."""
    name = args.dataset_name
    if name == "pydoc":
        return datasets.Dataset.from_generator(lambda: ({"text": text} for text in topics.values()))
    if os.path.exists(name):
        words = ["prepare.py", "-m", args.model_name, "-o", f"{Path(name).stem}.tokens", name]
        fail(f"--dataset-name {name}: prepare it: python preparing-data/{shlex.join(words)}")
    load = functools.partial(datasets.load_dataset, name, args.dataset_subset, split="train")
    try:
        documents = load()
        # Load text files again, because blank lines separate their documents.
        if documents.builder_name == "text":
            documents = load(sample_by="paragraph")
    except Exception as error:
        # The datasets library raises many exception types, and often hides the reason in __cause__.
        fail(f"--dataset-name {name}: {error.__cause__ or error}")
    if args.text_column not in documents.column_names:
        fail(f"--text-column {args.text_column}: no such column; choose {documents.column_names}")
    return documents


def batch_at(args, train_set, step, micro_step, device):
    """Return an int64 micro-batch; its samples depend on the step number, not on past steps."""
    data_rank, num_data_ranks = dist.get_rank(), dist.get_world_size()
    size = args.micro_batch_size * num_data_ranks
    start = position_of(args, step) + micro_step * size
    positions = range(start + data_rank, start + size, num_data_ranks)
    # DDP: wait for the piece that contains the step's last sample, because collectives time out.
    _ = train_set[position_of(args, step + 1) - 1]
    batch = torch.stack([train_set[position] for position in positions]).long()
    return batch.pin_memory().to(device, non_blocking=True) if args.device == "cuda" else batch


def position_of(args, step):
    """Return the position of the first sample of a step, counted over all epochs."""
    return (step - 1 + args.skip_steps) * args.global_batch_size


# ---- one step --------------------------------------------------------------------------------
def loss_of(args, model, batch):
    """Return the mean next-token loss of `batch`."""
    logits = model(input_ids=batch, use_cache=False).logits
    return model.loss_function(logits, batch)


def forward_backward(args, model, train_set, step, device):
    """Compute the gradients of the step's mean loss; return the mean loss as a device tensor."""
    total_loss = torch.zeros((), device=device)
    for micro_step in range(args.accumulation):
        # FSDP: every micro-batch adds to the gradient shards. All-reduce these shards between the
        # replicas in the last micro-batch only.
        model.set_requires_all_reduce(micro_step == args.accumulation - 1)
        batch = batch_at(args, train_set, step, micro_step, device)
        loss = loss_of(args, model, batch) / args.accumulation
        loss.backward()
        total_loss += loss.detach()
    return total_loss


def clip_gradients(args, model):
    """Limit the norm of the gradients to `--max-grad-norm`; return the norm before clipping."""
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    # FSDP: full_tensor() combines the norms of all shards.
    norm = torch.nn.utils.get_total_norm(grads).full_tensor()
    # FSDP: replicas may round the norm differently, so all ranks use the norm of rank 0.
    dist.broadcast(norm, 0)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), args.max_grad_norm or math.inf, norm)
    return norm


def train_step(args, model, optimizer, train_set, step, device):
    """Run one optimizer step; return the loss and the gradient norm as tensors on the device."""
    torch.manual_seed(hash_of(args.seed, step, dist.get_rank()))
    loss = forward_backward(args, model, train_set, step, device)
    grad_norm = clip_gradients(args, model)
    for group in optimizer.param_groups:
        group["lr"] = lr_at(args, step)
    # Once a gradient is not finite, found_inf stays 1, and AdamW skips this and all later updates.
    optimizer.found_inf = torch.maximum(optimizer.found_inf, (~grad_norm.isfinite()).float())
    optimizer.step()
    optimizer.zero_grad()
    return loss, grad_norm


@torch.no_grad()
def evaluate(args, model, held_out, device):
    """Return the mean loss of the held-out samples."""
    model.eval()
    total_loss = torch.zeros((), device=device)
    data_rank, num_data_ranks = dist.get_rank(), dist.get_world_size()
    for batch in held_out.split(args.micro_batch_size * num_data_ranks):
        # DDP: a rank with no samples left evaluates the first sample with weight 0, so that every
        # rank runs the same number of forward passes.
        share = batch[data_rank::num_data_ranks]
        inputs = share if len(share) else held_out[:1]
        total_loss += loss_of(args, model, inputs.long().to(device)) * len(share)
    dist.all_reduce(total_loss, dist.ReduceOp.AVG)
    model.train()
    return (total_loss * num_data_ranks / len(held_out)).item()


# ---- checkpoint ------------------------------------------------------------------------------
@rank_first()
def partial_of(folder):
    """Create an empty temporary folder beside `folder`; publish() renames it to `folder`."""
    partial = folder.with_name(".partial")
    if dist.get_rank() != 0:
        return partial
    # A run that was killed during a save may have left files behind.
    delete(partial)
    partial.mkdir(parents=True, exist_ok=True)
    return partial


def delete(folder):
    """Delete a folder if it exists; if it is a symbolic link, delete only the link."""
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def publish(args, partial, folder):
    """Flush `partial` to disk, rename it to `folder`, and delete the oldest checkpoints."""
    for path in (*partial.rglob("*"), partial):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    # The folder may hold the model of an earlier export.
    delete(folder)
    partial.rename(folder)
    # FSDP: keep later checkpoints, which could not be read, but do not count them.
    checkpoints = [path for path in sorted(folder.parent.glob("step-????????")) if path <= folder]
    for checkpoint in checkpoints[: -args.keep_checkpoints]:
        # Rename a checkpoint before deleting it, so that a kill leaves no half-deleted checkpoint.
        delete(checkpoint.rename(partial))


class PublishingWriter(dcp.FileSystemWriter):
    """Publish a checkpoint once the shards of all ranks are on disk."""

    def __init__(self, args, checkpoint):
        super().__init__(partial_of(checkpoint))
        self.args, self.checkpoint = args, checkpoint

    def finish(self, metadata, results):
        # FSDP: DCP calls finish() on rank 0, after all ranks have written their shards.
        super().finish(metadata, results)
        publish(self.args, self.path, self.checkpoint)


def save_checkpoint(args, run_dir, model, optimizer, step, is_final):
    """Save the model, the optimizer and the arguments; the step number determines the rest."""
    # FSDP: wait until the previous save has been published.
    while PENDING_SAVES:
        PENDING_SAVES.pop().result()
    checkpoint = run_dir / f"checkpoints/step-{step:08}"
    state = state_of(model, optimizer)
    # FSDP: only rank 0 adds its arguments to the state; otherwise, DCP would save the arguments of
    # an arbitrary rank.
    if dist.get_rank() == 0:
        state["args"] = json.dumps(vars(args))
    writer, group = PublishingWriter(args, checkpoint), patient_group("checkpoints")
    if args.checkpoint_async and not is_final:
        # FSDP: DCP copies the shards to host memory now, and writes them while training continues.
        PENDING_SAVES.append(dcp.async_save(state, storage_writer=writer, process_group=group))
    else:
        dcp.save(state, storage_writer=writer, process_group=group)


def state_of(model, optimizer):
    """Return this rank's shards in a dict whose keys do not depend on the number of ranks."""
    # FSDP: call weights_of() first, because it reshards weights that an evaluation left gathered.
    weights = weights_of(model)
    # FSDP: get_optimizer_state_dict() also creates the optimizer's state if the optimizer has no
    # state yet.
    return {"model": weights, "optimizer": get_optimizer_state_dict(model, optimizer)["state"]}


def weights_of(model):
    """Return this rank's shards of the weights by name; a tied weight appears only once."""
    tied, weights = model.all_tied_weights_keys, model.state_dict()
    return {name: weight for name, weight in weights.items() if name not in tied}


def load_checkpoint(args, run_dir, model, optimizer):
    """Restore the newest readable checkpoint; return its step, or 0 for a new run."""
    found = [sorted((run_dir / "checkpoints").glob("step-????????"), reverse=True)]
    # DDP: all ranks try the checkpoints that rank 0 has found.
    dist.broadcast_object_list(found, group=patient_group())
    for checkpoint in found[0]:
        if (checkpoint / "state.pt").exists():
            fail(f"{checkpoint}: continue it with chapter 03, or choose another --experiment-name")
        try:
            saved = {"args": ""}
            dcp.load(saved, checkpoint_id=checkpoint, process_group=patient_group())
            compare_args(args, json.loads(saved["args"]), checkpoint)
            state = state_of(model, optimizer)
            # FSDP: each rank reads its shards directly into the model and the optimizer.
            dcp.load(state, checkpoint_id=checkpoint, process_group=patient_group())
            break
        except (Exception, dcp.CheckpointException) as error:
            # FSDP: DCP raises an error of one rank on all ranks, so all ranks try the same
            # checkpoint next.
            print(f"{checkpoint} cannot be read: {error!r:.200}; trying the previous checkpoint")
    else:
        if found[0]:
            fail(f"{run_dir}: cannot read its checkpoints; choose a different --experiment-name")
        return 0
    print(f"continuing from {checkpoint}")
    return int(checkpoint.name.removeprefix("step-"))


def compare_args(args, saved_args, checkpoint):
    """Stop if an argument that must stay the same has changed; print all other changes."""
    args.wandb_id = saved_args["wandb_id"]
    args.skip_steps = args.skip_steps or saved_args.get("skip_steps", 0)
    fixed = ["config_fingerprint", "dataset_fingerprint", "seq_length", "global_batch_size", "seed"]
    for name, saved_value in saved_args.items():
        if (value := getattr(args, name, saved_value)) != saved_value:
            change = f"{checkpoint}: {name} was {saved_value}, is now {value}"
            if name in fixed:
                fail(f"{change}; choose a different --experiment-name")
            print(change)


def export_model(args, run_dir, model, tokenizer):
    """Write the finished model to a folder that `from_pretrained` can load."""
    partial, is_writer = partial_of(run_dir / "model"), dist.get_rank() == 0
    # FSDP: no rank holds the full model. The ranks gather one layer at a time, and rank 0 writes it
    # to a separate file, under the names that weights have in published files.
    # transformers finds these names by the model's class, which fully_shard() has changed.
    model.__class__ = next(cls for cls in type(model).__mro__ if "FSDP" not in cls.__name__)
    layer_of = re.compile(r".*?\.\d+(?=\.)|.*").match
    for layer, items in groupby(weights_of(model).items(), lambda item: layer_of(item[0])[0]):
        weights = {name: gather(weight, is_writer) for name, weight in items}
        if is_writer:
            weights = conversion.revert_weight_conversion(model, weights)
            # Do not use save_file(), because nobody but the owner could read its files.
            (partial / f"model-{layer}.safetensors").write_bytes(save(weights, {"format": "pt"}))
    if dist.get_rank() != 0:
        return
    # FSDP: open each file, because this raises an error if a full disk has cut the file.
    files = {key: path.name for path in partial.iterdir() for key in safe_open(path, "pt").keys()}
    index = json.dumps({"metadata": {}, "weight_map": files}, indent=2)
    (partial / "model.safetensors.index.json").write_text(index)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(partial)
    model.generation_config.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    publish(args, partial, run_dir / "model")
    (run_dir / f"finished-{args.num_steps}").touch()


def gather(weight, is_writer):
    """Gather a full weight; return it, on the CPU, on the ranks that write it to a file."""
    full_weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return full_weight.cpu() if is_writer else None


# ---- main ------------------------------------------------------------------------------------
# Peak bf16 TFLOP/s without sparsity, from the vendors' data sheets.
PEAK_TFLOPS = {"A100-SXM4-80GB": 312, "H100 80GB HBM3": 989, "H200": 989, "B200": 2250}
PEAK_TFLOPS |= {"L40S": 362, "H100 PCIe": 756, "GH200 480GB": 989, "AMD Instinct MI300X": 1307}


def mfu(args, model, tokens_per_second):
    """Return the model FLOPs utilization (PaLM, appendix B, arxiv.org/abs/2204.02311).

    Return None if the speed is unknown, if PEAK_TFLOPS does not list the device, or if the
    precision is not bf16.
    """
    device_name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    peak = PEAK_TFLOPS.get(device_name.removeprefix("NVIDIA "))
    if peak is None or tokens_per_second is None or args.precision != "bf16":
        return None
    config, heads = model.config, getattr(model.config, "num_attention_heads", 0)
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // max(1, heads))
    flops_per_token = 12 * config.num_hidden_layers * width * args.seq_length
    # A token uses only a few of a layer's experts, which transformers stacks into one weight.
    num_used = getattr(config, "num_experts_per_tok", None) or 1
    for module in [model.get_output_embeddings(), *layers_of(model)]:
        for name, weight in module.named_parameters():
            is_stacked = "experts" in name.split(".") and weight.ndim > 1
            flops_per_token += 6 * weight.numel() * (num_used / len(weight) if is_stacked else 1)
    return tokens_per_second * flops_per_token / (peak * 1e12 * dist.get_world_size())


def measure(args, model, train_set, step, loss, grad_norm, first_step, start_time):
    """Return the metrics of `step`; loss.item() makes the host wait for the device."""
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    epoch = (position_of(args, step + 1) - 1) // train_set.starts[-1]
    row = {"step": step, "epoch": epoch, "loss": loss.item(), "grad_norm": grad_norm.item()}
    tokens = (step - first_step + 1) * args.global_batch_size * args.seq_length
    speed = tokens / (time.perf_counter() - start_time) if start_time else None
    # On Linux, the unit of ru_maxrss is KiB.
    host_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    memory = torch.cuda.max_memory_allocated() if args.device == "cuda" else host_memory
    row |= {"lr": lr_at(args, step), "tokens_per_second": speed, "mfu": mfu(args, model, speed)}
    return row | {"peak_memory_gib": memory / 2**30}


def start_tracking(args, run_dir):
    """Start a wandb run, or continue the wandb run whose id is in the checkpoint."""
    options = {"id": args.wandb_id, "name": args.experiment_name, "resume": "allow"}
    wandb_run = wandb.init(config=vars(args), dir=run_dir, mode=args.wandb, **options)
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
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    wandb_run.log(row)
    known = {name: value for name, value in row.items() if value is not None}
    try:
        tqdm.write("  ".join(f"{name} {value:,.6g}" for name, value in known.items()))
    except OSError:
        # DDP: the terminal is closed. Print to nowhere, because an error would end all ranks.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@record
def main():
    """Train the model; if the run has a checkpoint, continue from the newest checkpoint."""
    args = parse_args()
    device, run_dir = setup(args)
    tokenizer, config = build_tokenizer_and_config(args)
    train_set, held_out = build_data(args, tokenizer)
    model = shard(args, build_model(args, config), device)
    optimizer = build_optimizer(args, model)
    check_causal(args, model, device)
    start = load_checkpoint(args, run_dir, model, optimizer)
    if start >= args.num_steps and (run_dir / f"finished-{start}").exists():
        print(f"{run_dir} is already finished, at step {start}")
        return

    wandb_run = start_tracking(args, run_dir)
    if start == 0:
        log(run_dir, wandb_run, {"step": 0, "val_loss": evaluate(args, model, held_out, device)})
    # The first interval may include compilation. Without a start time, measure() reports no speed.
    interval_start = start + 1, None
    stops = stop_requests(run_dir)
    for step in tqdm(range(start + 1, args.num_steps + 1), file=sys.stdout, disable=None):
        stop = next(stops)
        loss, grad_norm = train_step(args, model, optimizer, train_set, step, device)
        is_last = step == args.num_steps
        evaluating = is_last or step % args.eval_every == 0
        saving = is_last or step % args.checkpoint_every == 0 or stop
        if not (evaluating or saving or step % args.log_every == 0):
            continue
        row = measure(args, model, train_set, step, loss, grad_norm, *interval_start)
        if optimizer.found_inf:
            fail(f"a gradient in steps {interval_start[0]} to {step} was not finite; lower --lr")
        if evaluating:
            row["val_loss"] = evaluate(args, model, held_out, device)
        log(run_dir, wandb_run, row)
        if saving:
            save_checkpoint(args, run_dir, model, optimizer, step, stop or is_last)
        interval_start = step + 1, time.perf_counter()
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
