"""Train a causal language model on sequences that devices share. Parent: 07-pipeline-parallel.

Small:  torchrun --standalone --nproc-per-node 2 08-context-parallel/train_llm.py \
            --context-parallel-size 2
Real:   sbatch --nodes 4 --gpus-per-node 8 03-job-launchers/slurm/train.sbatch \
            08-context-parallel/train_llm.py @05-large-model/configs/llama-3.1-8b.args \
            --seq-length 131072 --context-parallel-size 8 --recompute full
"""

import argparse
import bisect
import copy
import ctypes
import functools
import hashlib
import json
import logging
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
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import chain, groupby, pairwise
from pathlib import Path
from pydoc_data.topics import topics
from unittest import mock

import datasets
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.pipelining as pp
import torch.distributed.tensor.parallel as tp
import torch.nn.functional as F
import transformers
import wandb
from datasets.fingerprint import Hasher
from safetensors import safe_open
from safetensors.torch import save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as recompute
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, masking_utils
from transformers import core_model_loading as conversion
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.initialization import no_init_weights
from transformers.integrations.sdpa_attention import sdpa_attention_forward, use_gqa_in_sdpa
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils.hub import cached_file

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
# The number of tokens whose logits exist at the same time.
CHUNK_SIZE = 1024
# The asynchronous save in progress: a list with at most one Future object.
PENDING_SAVES = []


class ReplicatedNorm(tp.SequenceParallel):
    """Replicate a norm; all ranks compute it for the same input, so their gradients are equal."""

    def __init__(self):
        super().__init__(use_local_output=True)
        self.sequence_sharding = (Replicate(),)


# Each style defines how ranks share the work of a module. The keys are names of styles: the last
# two are our own, and the others are in the tensor-parallel plans of transformers. Shard(1) splits
# hidden states along the sequence: each rank has one part of each sequence.
STYLES = {
    "colwise": tp.ColwiseParallel(),
    "rowwise": tp.RowwiseParallel(output_layouts=Shard(1)),
    "colwise_gather_output": tp.ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "replicated_with_grad_allreduce": tp.SequenceParallel(use_local_output=True),
    "replicated_norm": ReplicatedNorm(),
    "embedding": tp.ColwiseParallel(output_layouts=Shard(1)),
}
# The class of each schedule, and its number of stages per rank.
SCHEDULES = {
    "gpipe": (pp.ScheduleGPipe, 1),
    "1f1b": (pp.Schedule1F1B, 1),
    "interleaved-1f1b": (pp.ScheduleInterleaved1F1B, 2),
}


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
    add("--cpu-offload", action="store_true", help="keep shards on the CPU, and run AdamW there")
    add(
        "--recompute",
        choices=["none", "full", "selective"],
        default="none",
        help="activations to compute again in the backward pass",
    )
    add("--tensor-parallel-size", type=positive, default=1, help="ranks that split each matrix")
    add("--pipeline-parallel-size", type=positive, default=1, help="ranks that split the layers")
    add("--pipeline-schedule", choices=SCHEDULES, default="1f1b", help="order of micro-batches")
    add("--context-parallel-size", type=positive, default=1, help="ranks that split each sequence")
    add(
        "--context-parallel-style",
        choices=["gather", "ulysses"],
        default="gather",
        help="how attention combines the parts of a sequence",
    )

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
    world_size = int(os.environ["WORLD_SIZE"])
    # TP: the ranks that split a matrix process the same samples, and split each sequence.
    ranks_per_sample = args.tensor_parallel_size
    layout = f"--tensor-parallel-size {args.tensor_parallel_size}"
    # CP: context-parallel ranks split each sequence; tensor-parallel ranks then split each part
    # again.
    ranks_per_sample *= args.context_parallel_size
    layout += f" --context-parallel-size {args.context_parallel_size}"
    if args.seq_length % ranks_per_sample:
        problem = f"not divisible by the {ranks_per_sample} ranks that split a sequence ({layout})"
        fail(f"--seq-length {args.seq_length}: {problem}; choose a multiple")
    # PP: all stages process the same samples.
    ranks_per_sample *= args.pipeline_parallel_size
    layout += f" --pipeline-parallel-size {args.pipeline_parallel_size}"
    if world_size % ranks_per_sample:
        problem = f"{world_size} ranks are not divisible by {ranks_per_sample}"
        fail(f"{layout}: {problem}; start a multiple of {ranks_per_sample} ranks")
    num_data_ranks = world_size // ranks_per_sample
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
    args.num_stages = args.pipeline_parallel_size * SCHEDULES[args.pipeline_schedule][1]
    check_schedule(args)
    args.wandb_id = os.urandom(4).hex()
    return args


def positive(text):
    """Convert the value of a flag to an integer; raise an error if it is below 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def check_schedule(args):
    """Stop if the micro-batches of a step do not fill the pipeline schedule."""
    ranks, micro_batches = args.pipeline_parallel_size, args.accumulation
    # The interleaved schedule runs groups of `ranks` micro-batches, so require full groups. torch
    # would also accept larger groups.
    group_size = ranks if args.pipeline_schedule == "interleaved-1f1b" else 1
    if micro_batches < ranks or micro_batches % group_size:
        problem = f"micro-batches ({micro_batches} per step) do not fill the pipeline"
        fail(f"--pipeline-parallel-size {ranks}: {problem}; lower -b or raise --global-batch-size")


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
    # TP: hide DTensor's warning that it replaces an all-to-all by an all-gather on CPUs.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
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
    """Build the model with uninitialized weights.

    Linux gives them memory only when shard() fills them.
    """
    torch.manual_seed(args.seed)
    # Skip random initialization in the constructors; shard() initializes weights layer by layer.
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    check_model(args, model)
    # transformers finds these rules by the name of the class, which fully_shard() changes.
    model.conversion_rules = get_model_conversion_mapping(model)
    # chunked_loss() applies the weights of the head, so the head itself only clones the hidden
    # states. Without the clone, FSDP would warn that a module returns a view.
    head = model.get_output_embeddings()
    head.forward = torch.clone
    loss_and_grad = torch.compile(loss_of_logits, dynamic=False) if args.compile else loss_of_logits
    model.loss_function = functools.partial(chunked_loss, head, loss_and_grad)
    # In a step, all ranks together predict all tokens except the first token of each sample.
    model.num_targets = args.global_batch_size * (args.seq_length - 1)

    # In every forward pass, transformers asks the device whether samples hold several packed
    # sequences, and the host has to wait for the answer. Here, the answer is always no.
    masking_utils.find_packed_sequence_indices = lambda position_ids: None

    # Wrap the layers for recomputation before they are compiled and sharded.
    if args.recompute != "none":
        contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
        options = {"context_fn": contexts} if args.recompute == "selective" else {}
        for layer in layers_of(model):
            forward = functools.partial(recompute, layer.forward, use_reentrant=False, **options)
            layer.forward = forward

    # layer.compile() keeps the names of the weights; torch.compile(layer) would change the names.
    # With dynamic=False, torch compiles a separate graph for each input shape.
    if args.compile:
        for layer in layers_of(model):
            layer.compile(dynamic=False)
    return model


def check_causal(args, model, device):
    """Stop if a token attends to later tokens, because the model would see what it predicts."""
    # TP, PP: no rank has full sequences or the full model, but check_model() has found causal
    # attention.
    # CP: a rank has only its part of each sequence.
    sizes = args.tensor_parallel_size, args.pipeline_parallel_size, args.context_parallel_size
    if max(sizes) > 1:
        return
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


def check_model(args, model):
    """Report the reason and stop if this script cannot train the model."""
    caps = ["final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"]
    has_cap = any(getattr(model.config, cap, None) for cap in caps)
    name = args.model_name
    problems = [
        (has_cap, f"--model-name {name}: the chunked loss caps no logits; use a different model"),
    ]
    tensor_size, has_mask = args.tensor_parallel_size, needs_mask(args, model)
    if tensor_size > 1:
        flag, heads = f"--tensor-parallel-size {tensor_size}", key_value_heads_of(model.config)
        module = module_without_style(model)
        problems += [
            (module, f"{flag}: the plan of {name} does not say how to split {module}"),
            (heads % tensor_size, f"{flag}: {name} has {heads} key-value heads; choose a divisor"),
            (has_mask, f"{flag}: {name} has a mask, which needs full sequences; omit the flag"),
        ]
    if args.pipeline_parallel_size > 1:
        flag, stages = f"--pipeline-parallel-size {args.pipeline_parallel_size}", args.num_stages
        has_plan = model.config.base_model_pp_plan or model.config.model_type == "gpt2"
        problems += [
            (not has_plan, f"{flag}: transformers has no pipeline plan for {name}; omit the flag"),
            (len(layers_of(model)) < stages, f"{flag}: {name} has fewer than {stages} layers"),
        ]
    context_size = args.context_parallel_size
    if context_size > 1:
        flag, heads = f"--context-parallel-size {context_size}", key_value_heads_of(model.config)
        head_ranks = context_size * tensor_size if args.context_parallel_style == "ulysses" else 1
        feature = full_sequence_feature(model.config)
        problems += [
            (feature, f"{flag}: {name} needs full sequences, because it has {feature}"),
            (has_mask, f"{flag}: {name} has a mask, which needs full sequences; omit the flag"),
            (not is_split_by_tokens(model.config), f"{flag}: {name} needs full sequences"),
            (heads % head_ranks, f"{flag}: {heads} key-value heads for {head_ranks} ranks"),
        ]
    for has_problem, problem in problems:
        if has_problem:
            fail(problem)


def styles_of(model):
    """Map each module to its tensor-parallel style, or to None if it has no style."""
    plan, styles = model.tp_plan or {}, {}
    # In these blocks, each rank has the full result of each split matrix.
    gathered = [key.rpartition(".")[0] for key in plan if plan[key] == "colwise_gather_output"]
    for name, module in model.named_modules():
        # A plan has a * in place of a layer's number.
        plan_name = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        # A norm that the plan lacks is replicated, unless it has a row of weights for each head.
        is_norm = "Norm" in type(module).__name__
        is_norm = is_norm and all(weight.dim() == 1 for weight in module.parameters())
        is_gathered = plan_name.rpartition(".")[0] in gathered
        norm_style = "replicated_norm" if is_gathered else "replicated_with_grad_allreduce"
        default = norm_style if is_norm else None
        styles[module] = STYLES.get(plan.get(plan_name, default))
    # Split the embedding by columns, so that a rank makes the gradient of only its own columns.
    # The head counts as split, too: split_matrices() splits it by rows.
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
    return styles | dict.fromkeys(embeddings, STYLES["embedding"])


def module_without_style(model):
    """Return the name of the first module that has weights but no style, or None."""
    styles = styles_of(model)
    for name, module in model.named_modules():
        if styles[module] is None and list(module.parameters(recurse=False)):
            return name
    return None


def key_value_heads_of(config):
    """Return the number of key-value heads in each layer of the full model."""
    # A model without attention has no heads, and no plan either.
    num_heads = getattr(config, "num_attention_heads", 0)
    return getattr(config, "num_key_value_heads", None) or num_heads


def full_sequence_feature(config):
    """Return the kind of layer or position encoding that needs full sequences, or None."""
    settings = f"{getattr(config, 'layer_types', '')} {getattr(config, 'rope_parameters', '')}"
    match = re.search("conv|mamba|linear_attention|dynamic|longrope", settings)
    return match and match[0]


def is_split_by_tokens(config):
    """Return whether tokens affect each other in attention only, and are numbered by position_ids.

    Run the model's forward pass on the meta device, which computes shapes but no values.
    """
    length, lengths = 17, []

    def count_call(module, query, key, value, *_, **__):
        batch_size, num_heads, num_tokens, _ = query.shape
        lengths.append(num_tokens)
        return value.new_empty(batch_size, num_tokens, num_heads, value.shape[3]), None

    transformers.AttentionInterface.register("count_calls", count_call)
    with no_init_weights(), torch.device("meta"), suppress(Exception):
        # On the meta device, torch can run mixtures of experts in bf16 only.
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.bfloat16)
        model.set_attn_implementation("count_calls")
        ids = torch.zeros(1, length, dtype=torch.int64)
        with mock.patch("torch.arange", wraps=torch.arange) as arange:
            model(input_ids=ids, position_ids=ids, use_cache=False)
        numbers_tokens = any(length in call.args for call in arange.call_args_list)
        # In RoBERTa models, the row of position 0 comes after the row of the padding.
        num_positions = getattr(config, "max_position_embeddings", 0)
        for module in model.modules():
            if getattr(module, "num_embeddings", None) == num_positions:
                numbers_tokens |= module.padding_idx is not None
        # The number of calls of attention must be the number of layers.
        return lengths == [length] * len(layers_of(model)) and not numbers_tokens
    return False


def needs_mask(args, model):
    """Return whether a layer needs a mask; stop if tokens attend to later tokens."""
    if not model._supports_attention_backend or model.config._attn_implementation != "sdpa":
        return True
    keys = torch.arange(args.seq_length)
    queries = keys[:: 1 + args.seq_length // 64, None]
    results = []

    def check_mask(*_, mask_function, allow_is_causal_skip, **__):
        mask = mask_function(0, 0, queries, keys)
        if (mask & (keys > queries)).any():
            fail(f"--model-name {args.model_name}: tokens see later tokens; choose a causal model")
        results.append(allow_is_causal_skip and torch.equal(mask, keys <= queries))

    # Every forward pass builds all masks before it calls attention for the first time. Check these
    # masks, and then end the pass with an error: attention is None here, which cannot be called. A
    # layer that needs a mask raises an error earlier. Restore the random state, because dropout
    # changes it, and weights may be initialized later.
    masking_utils.AttentionMaskInterface.register("check_mask", check_mask)
    transformers.AttentionInterface.register("check_mask", None)
    model.set_attn_implementation("check_mask")
    with suppress(Exception), torch.no_grad(), torch.random.fork_rng([]):
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    model.set_attn_implementation("sdpa")
    return not results or not all(results)


def chunked_loss(head, loss_and_grad, hidden, labels):
    """Return the summed cross entropy of predicting each label from the previous hidden state.

    The shape of `hidden` is [batch, sequence, width], that of `labels` [batch, sequence].
    """
    # The last position has no next token; cross_entropy() ignores the target -100.
    targets = F.pad(labels[:, 1:], (0, 1), value=-100)
    # TP: this rank has the hidden states of one part of each sequence, so use that part's targets.
    num_parts = labels.shape[1] // hidden.shape[1]
    targets = targets.chunk(num_parts, dim=1)[dist.get_rank() % num_parts]
    weights = (full_weight(head.weight), full_weight(head.bias))
    return ChunkedLoss.apply(loss_and_grad, hidden.flatten(0, 1), targets.flatten(), *weights)


def full_weight(weight):
    """Gather a split weight; in the backward pass, add up its gradients across the ranks."""
    if isinstance(weight, DTensor):
        return weight.full_tensor(grad_placements=[Partial()])
    return weight


class ChunkedLoss(torch.autograd.Function):
    """Compute the loss chunk by chunk, and a chunk's gradients while its logits exist.

    Logits, [tokens, vocabulary], exist for only one chunk of tokens at a time. If the gradients
    waited for the backward pass, each chunk's logits would have to be computed again.
    """

    @staticmethod
    def forward(ctx, loss_and_grad, hidden, targets, weight, bias):
        inputs, total_loss = (hidden, weight, bias), 0.0
        # An evaluation needs no gradients, and a frozen weight has none.
        needed = [hidden.requires_grad and x is not None and x.requires_grad for x in inputs]
        pairs = zip(inputs, needed, strict=True)
        grads = [torch.zeros_like(x) if is_needed else None for x, is_needed in pairs]
        grad_hidden, grad_weight, grad_bias = grads
        for start in range(0, len(hidden), CHUNK_SIZE):
            chunk = slice(start, start + CHUNK_SIZE)
            logits = F.linear(hidden[chunk], weight, bias)
            loss, grad_logits = loss_and_grad(logits, targets[chunk])
            total_loss += loss
            if grad_hidden is not None:
                grad_hidden[chunk] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.T, hidden[chunk])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        ctx.save_for_backward(*grads)
        return total_loss

    @staticmethod
    def backward(ctx, grad):
        grad_hidden, *others = (g if g is None else g.mul_(grad) for g in ctx.saved_tensors)
        return None, grad_hidden, None, *others


def loss_of_logits(logits, targets):
    """Return the summed cross entropy of logits, [tokens, vocabulary], and its gradient."""
    log_probs = logits.float().log_softmax(1)
    loss = F.nll_loss(log_probs, targets, reduction="sum")
    # The gradient is the softmax, minus 1 at the target. Without a target, it is 0.
    has_target = (targets >= 0).float()[:, None]
    grad = log_probs.exp_().scatter_add_(1, targets.clamp(min=0)[:, None], -has_target)
    return loss, grad.mul_(has_target).to(logits.dtype)


def keep_products(_, operation, *args, **kwargs):
    """Keep the results of matrix products and attention, which are expensive to recompute."""
    is_expensive = "mm" in str(operation) or "attention" in str(operation)
    return CheckpointPolicy.MUST_SAVE if is_expensive else CheckpointPolicy.PREFER_RECOMPUTE


def build_mesh(args, device):
    """Arrange the ranks in a mesh with one dimension for each kind of parallelism."""
    sizes = {
        # PP: stages exchange little data, so they may be on different nodes.
        "pipeline": args.pipeline_parallel_size,
        "replicate": args.replicas,
        # CP: like data-parallel ranks, context-parallel ranks hold different shards of the model.
        "shard": data_rank_of(args)[1] // args.replicas * args.context_parallel_size,
        # TP: put this dimension last, so that each tensor-parallel group consists of consecutive
        # ranks, which share a node.
        "tensor": args.tensor_parallel_size,
    }
    mesh = dist.init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    # TP: the gradient norm is reduced over the shard and tensor dimensions. _flatten() gives them
    # one group; without it, torch would run two all-reduces and warn on each rank. torch has no
    # public function for this purpose.
    mesh["shard", "tensor"]._flatten()
    return mesh


def replace_attention(args, model, device):
    """Replace causal attention with attention across the ranks that share a sequence."""
    context, tensor = args.context_parallel_size, args.tensor_parallel_size
    sizes = (dist.get_world_size() // context // tensor, context, tensor)
    names = ("sequences", "context", "tensor")
    mesh = dist.init_device_mesh(device.type, sizes, mesh_dim_names=names)["context"]
    # This rank's last query attends to all keys up to its own. Each earlier query attends to one
    # key fewer than the query after it. Make this mask now, because causal_lower_right() fails
    # inside of layers that are recomputed selectively.
    length = args.seq_length // args.context_parallel_size
    mask = causal_lower_right(length, length * (mesh.get_local_rank() + 1))
    styles = {
        "gather": functools.partial(gathered_attention, mesh, mask),
        "ulysses": functools.partial(ulysses_attention, mesh),
    }
    attention = styles[args.context_parallel_style]
    transformers.AttentionInterface.register("context_parallel", attention)
    model.set_attn_implementation("context_parallel")


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
    """Initialize the model and split it across the ranks layer by layer; return the model.

    After a layer gets its values, fully_shard() keeps this rank's shard and frees the rest of the
    layer. Only then does the next layer get its values, so that no rank has to hold the full model.
    The shards are on the device or, with --cpu-offload, on the CPU.
    """
    mesh = build_mesh(args, device)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {
        "mesh": mesh["replicate", "shard"] if args.replicas > 1 else mesh["shard"],
        "mp_policy": bf16 if args.precision == "bf16" else MixedPrecisionPolicy(),
        "shard_placement_fn": functools.partial(placement_of, mesh["shard"].size()),
    }
    if args.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=args.device == "cuda")
    if args.context_parallel_size > 1:
        replace_attention(args, model, device)
    layers = layers_of(model)
    owners = owners_of(model)
    stages, other_modules = {0: model}, set()
    if args.pipeline_parallel_size > 1:
        stages, other_modules = build_stages(args, model, mesh.get_local_rank("pipeline"))

    def initialize_and_shard(module):
        initialize(args, owners[module], module)
        if module in other_modules:
            # PP: this module belongs to another rank, so drop its values. The initialization was
            # still necessary: it has advanced the random number generator, so that later modules
            # get the same values as in chapter 01.
            module.to_empty(device="meta").requires_grad_(False)
            return
        if module in layers:
            split_matrices(model, module.modules(), mesh["tensor"])
            # FSDP: keep the last layer gathered, because it is the first in the backward pass.
            reshard = args.reshard_after_forward and module is not layers[-1]
            # PP: a step runs each layer for many micro-batches, so keep all layers gathered.
            reshard = reshard and args.pipeline_parallel_size == 1
            fully_shard_to_sum(module, reshard_after_forward=reshard, **options)

    # apply() visits the children of a module before the module itself.
    model.apply(initialize_and_shard)
    # TP: also split the modules outside the layers, such as the embeddings and the head.
    layer_modules = {module for layer in layers for module in layer.modules()}
    # PP: skip the modules of other ranks, because their weights have no values here.
    layer_modules |= other_modules
    outer_modules = [module for module in model.modules() if module not in layer_modules]
    split_matrices(model, outer_modules, mesh["tensor"])
    model.tie_weights()
    # FSDP: this call shards the weights that are outside of the layers.
    for stage in stages.values():
        fully_shard_to_sum(stage, reshard_after_forward=False, **options)
    if args.pipeline_parallel_size > 1:
        # PP: fully_shard() has replaced the weight of the embedding, so tie the head to the new
        # weight.
        model.tie_weights()
        model.schedule = build_schedule(args, model, stages, device, mesh.get_group("pipeline"))
    if args.pretrained:
        read_weights(args, model)
    return model


def fully_shard_to_sum(module, **options):
    """Shard a module's weights; the ranks add up their gradients instead of averaging them."""
    fully_shard(module, **options)
    module.set_gradient_divide_factor(1.0)
    # By default, torch would multiply and add in one operation, which Gloo does not have.
    module.set_force_sum_reduction_for_comms(True)


def build_stages(args, model, pipeline_rank):
    """Build a model for each stage of this rank.

    Return a dict from stage number to model, and the set of modules that only other ranks have.
    """
    modules = split_into_stages(args, model)
    numbers = range(pipeline_rank, args.num_stages, args.pipeline_parallel_size)
    stages = {number: build_stage(args, model, modules, number) for number in numbers}
    own_modules = {module for number in numbers for module in modules[number]}
    return stages, {*chain(*modules)} - own_modules


def split_into_stages(args, model):
    """Return each stage's modules.

    The first and the last stage also have modules outside of the layers.
    """
    layers, num_stages = layers_of(model), args.num_stages
    # To balance the stages, count the embedding as an extra layer at the start, and the head as an
    # extra layer at the end. Every stage has at least one decoder layer.
    borders = []
    for number in range(num_stages + 1):
        border = round(number * (len(layers) + 2) / num_stages) - 1
        borders.append(max(number, min(border, len(layers) - num_stages + number)))
    print("layers of each stage:", *(f"{first}-{end - 1}" for first, end in pairwise(borders)))
    stages = [layers[first:end] for first, end in pairwise(borders)]
    layer_modules = {module for layer in layers for module in layer.modules()}
    for module in model.modules():
        if module not in layer_modules and list(module.parameters(recurse=False)):
            stages[0 if isinstance(module, torch.nn.Embedding) else -1].append(module)
    # The last stage has a copy of a tied embedding; see sum_tied_gradients().
    if model.all_tied_weights_keys:
        stages[-1].append(model.get_input_embeddings())
    return stages


class EarlierStages(torch.nn.Module):
    """Stand in for the modules of earlier stages; return the input of this stage."""

    def forward(self, *_, **__):
        return self.hidden


class LaterStages(torch.nn.Module):
    """Stand in for the modules of later stages; keep and return the output of this stage."""

    def forward(self, hidden, *_, **__):
        if hidden.ndim != 3:
            raise ValueError(f"layers exchange tensors of shape {[*hidden.shape]}")
        if self.hidden is None:
            self.hidden = hidden
        return self.hidden


def build_stage(args, model, modules, number):
    """Build a model that runs one stage of `model`.

    The new model shares the modules of that stage with `model`, and has stand-ins for the modules
    of the other stages. Its forward pass takes token ids in the first stage and hidden states in
    the other stages, and returns hidden states.
    """
    earlier, later = EarlierStages(), LaterStages()
    # If the id of a module is in the memo, deepcopy() uses the object that the memo holds for that
    # id, instead of a copy of the module.
    memo = {id(module): earlier for module in chain(*modules[:number])}
    memo |= {id(module): later for module in chain(*modules[number + 1 :])}
    memo |= {id(module): module for module in modules[number]}
    stage = copy.deepcopy(model, memo)
    full_forward = stage.forward

    def forward(received):
        stage.train(model.training)
        if number and model.training:
            # In torch 2.11, buffers that an evaluation allocated have requires_grad=False.
            received.requires_grad_()
        earlier.hidden, later.hidden = received, None
        inputs = {"inputs_embeds" if number else "input_ids": received}
        positions = torch.arange(args.seq_length, device=received.device)[None]
        positions = context_part(args, positions)
        output = full_forward(**inputs, position_ids=positions, use_cache=False)
        # The head passes hidden states through, so the logits of the last stage are hidden states.
        return output.logits if later.hidden is None else later.hidden

    stage.forward = forward
    return stage


def build_schedule(args, model, stages, device, group):
    """Build the schedule, which runs micro-batches forward and backward through the stages."""
    # Describe the inputs and outputs of the stages with empty meta tensors, so that the schedule
    # can allocate its receive buffers.
    length = args.seq_length // args.context_parallel_size
    ids = torch.empty(args.micro_batch_size, length, dtype=torch.int64, device="meta")
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    shape = (args.micro_batch_size, length // args.tensor_parallel_size, model.config.hidden_size)
    hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    pipeline_stages = []
    for number, stage in stages.items():
        options = {"input_args": hidden if number else ids, "output_args": hidden, "group": group}
        pipeline_stages.append(pp.PipelineStage(stage, number, args.num_stages, device, **options))

    def share_of_loss(hidden, labels):
        return model.loss_function(hidden, labels) / model.num_targets

    schedule, stages_per_rank = SCHEDULES[args.pipeline_schedule]
    stage_or_stages = pipeline_stages if stages_per_rank > 1 else pipeline_stages[0]
    return schedule(stage_or_stages, args.accumulation, loss_fn=share_of_loss, scale_grads=False)


def owners_of(model):
    """Return, for each module, the innermost transformers model that contains it."""
    owners = {}
    # modules() lists outer models first, so inner models overwrite the entries of outer models.
    for owner in model.modules():
        if isinstance(owner, transformers.PreTrainedModel):
            owners |= dict.fromkeys(owner.modules(), owner)
    return owners


def initialize(args, owner, module):
    """Give a module's own weights the values that they have in chapter 01."""
    for weight in module.parameters(recurse=False):
        # With --pretrained, read_weights() will fill the weight later, so keep transformers from
        # initializing it.
        weight._is_hf_initialized = args.pretrained
    owner._init_weights(module)


def split_matrices(model, modules, mesh):
    """Split the weights of these modules across a tensor-parallel group, in place.

    Inside a block (attention or MLP), a rank computes its own heads or columns for the full
    sequence. Between blocks, a rank has complete hidden states, but only for its part of the
    sequence.
    """
    if mesh.size() == 1:
        return
    styles, head = styles_of(model), model.get_output_embeddings()
    # The styles of the matrices at the beginning of a block.
    first_styles = {STYLES["colwise"], STYLES["colwise_gather_output"]}
    for module in modules:
        weights = dict(module.named_parameters(recurse=False))
        if module is head:
            # Split the weights of the head, but do not change its forward pass, because
            # chunked_loss() gathers and applies the weights.
            for name, weight in weights.items():
                rows = distribute_tensor(weight.data, mesh, [Shard(0)], src_data_rank=None)
                module.register_parameter(name, torch.nn.Parameter(rows))
        elif weights:
            tp.parallelize_module(module, mesh, styles[module], src_data_rank=None)
        if first_styles & {styles[child] for child in module.children()}:
            gather = functools.partial(gather_sequence, mesh)
            module.register_forward_pre_hook(gather, with_kwargs=True)


def gather_sequence(mesh, block, args, kwargs):
    """Gather the full sequence's hidden states; the backward pass reduce-scatters the gradient."""
    local = args[0] if args else kwargs["hidden_states"]
    hidden = DTensor.from_local(local, mesh, [Shard(1)]).redistribute(placements=[Replicate()])
    if args:
        return (hidden, *args[1:]), kwargs
    return args, kwargs | {"hidden_states": hidden}


def gathered_attention(mesh, mask, module, query, key, value, attention_mask, **options):
    """Attend from this rank's tokens to the tokens of this rank and of all ranks before it.

    The shape of query, key and value is [batch, heads, sequence, width].
    """
    length = query.shape[2]
    end = length * (mesh.get_local_rank() + 1)
    # full_weight() also fits keys and values: it gathers them, and adds up their gradients over all
    # ranks.
    key, value = (full_weight(DTensor.from_local(x, mesh, [Shard(2)])) for x in (key, value))
    key, value = key[:, :, :end], value[:, :, :end]
    # In fp32, no kernel accepts grouped heads, so let sdpa_attention_forward() copy keys and values
    # for each query head. This function also reports a softcap, which SDPA lacks.
    takes_groups = query.dtype != torch.float32 and use_gqa_in_sdpa(None, key, value)
    if not takes_groups or options.get("softcap"):
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    options = {"dropout_p": options.get("dropout", 0.0), "scale": options.get("scaling")}
    output = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True, **options)
    return output.transpose(1, 2).contiguous(), None


def ulysses_attention(mesh, module, query, key, value, attention_mask, **options):
    """Attend with this rank's heads over the full sequence (arxiv.org/abs/2309.14509)."""
    query, key, value = (all_to_all(mesh, tensor) for tensor in (query, key, value))
    output, weights = sdpa_attention_forward(module, query, key, value, None, **options)
    # The output is [batch, sequence, heads, width], so all_to_all() splits the sequence again.
    return all_to_all(mesh, output), weights


def all_to_all(mesh, tensor):
    """Reshard the tensor across the ranks: split dimension 1 instead of dimension 2."""
    split = DTensor.from_local(tensor, mesh, [Shard(2)])
    return split.redistribute(placements=[Shard(1)]).to_local()


def read_weights(args, model):
    """Read this rank's shards, and nothing else, from the safetensors files of `--model-name`."""
    # get_slice() reads nothing yet.
    tensors = {key: file.get_slice(key) for file in weight_files(args) for key in file.keys()}
    if {"F4", "F8", "I8", "U8"} & {tensor.get_dtype()[:2] for tensor in tensors.values()}:
        fail(f"--pretrained: the weights of {args.model_name} are quantized; choose a bf16 copy")
    # FSDP: transformers replaces the uninitialized shards, so give back their memory. Pinned
    # memory, which --cpu-offload uses on a machine with GPUs, cannot be given back here.
    for weight in model.parameters():
        if isinstance(weight, DTensor):
            storage = weight.to_local().untyped_storage()
            if storage.resizable():
                storage.resize_(0)
    # FSDP: transformers knows the names of weights in files, and reads only this rank's rows. Keep
    # it from using threads, because it then reads one weight at a time, which needs less memory.
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    devices = {name: buffer.device for name, buffer in model.named_buffers()}
    devices[""] = "cpu" if args.cpu_offload else args.device
    options = LoadStateDictConfig(weight_mapping=model.conversion_rules, device_map=devices)
    # PP: transformers reads all weights that state_dict() returns, so leave out other stages.
    weights = own_weights(model)
    with mock.patch.object(model, "state_dict", lambda: weights):
        names, _ = conversion.convert_and_load_state_dict_in_model(model, tensors, options)
    # FSDP: a weight without values on this rank, such as a few experts, is not missing.
    sharded = [item for item in model.state_dict().items() if isinstance(item[1], DTensor)]
    names.missing_keys -= {name for name, weight in sharded if not weight.to_local().numel()}
    # A file may store a tied weight under its other name, or under both names.
    tied = set(model.all_tied_weights_keys)
    model.tie_weights(names.missing_keys, recompute_mapping=False)
    # transformers does not tie two weights if the files have different values for them.
    for key in tied - model.all_tied_weights_keys.keys():
        fail(f"--pretrained: the files do not tie {key}; pass --config tie_word_embeddings=false")
    # Leave out the names that transformers ignores for this family.
    model._adjust_missing_and_unexpected_keys(names)
    if missing := names.missing_and_mismatched():
        name = args.model_name
        fail(f"--pretrained: {name} lacks {min(missing)} ({len(missing)} weights); check its files")
    # Not every model has a generation config.
    with suppress(OSError):
        model.generation_config = transformers.GenerationConfig.from_pretrained(args.model_name)


@rank_first()
def weight_files(args):
    """Open the safetensors files that from_pretrained() would read; download them if needed."""
    name = args.model_name
    try:
        try:
            paths = [cached_file(name, "model.safetensors")]
        except OSError:
            index = cached_file(name, "model.safetensors.index.json")
            files = json.loads(Path(index).read_text())["weight_map"].values()
            paths = [cached_file(name, file) for file in set(files)]
        # Open the files here, because this raises an error if a file is cut.
        return [safe_open(path, "pt") for path in paths]
    except Exception as error:
        fail(f"--pretrained: cannot read the safetensors files of {name}: {error!r:.300}")


def build_optimizer(args, model):
    """Build AdamW with weight decay for matrices, but not for norms and biases."""
    # With --cpu-offload, AdamW runs on the CPU. torchrun gives each rank only one thread, so divide
    # the cores of this node among its ranks.
    if args.cpu_offload:
        hostnames = [None] * dist.get_world_size()
        dist.all_gather_object(hostnames, socket.gethostname(), group=patient_group())
        ranks_on_host = hostnames.count(socket.gethostname())
        cores_per_rank = len(os.sched_getaffinity(0)) // ranks_on_host
        torch.set_num_threads(max(torch.get_num_threads(), cores_per_rank))
    # PP: leave out the weights of other stages, which are on the meta device.
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    matrices = [weight for weight in weights if weight.ndim >= 2]
    vectors = [weight for weight in weights if weight.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    options = {"betas": (0.9, 0.95), "weight_decay": args.weight_decay, "fused": True}
    optimizer = torch.optim.AdamW(groups, lr=args.lr, **options)
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
    data_rank, num_data_ranks = data_rank_of(args)
    size = args.micro_batch_size * num_data_ranks
    start = position_of(args, step) + micro_step * size
    positions = range(start + data_rank, start + size, num_data_ranks)
    # DDP: wait for the piece that contains the step's last sample, because collectives time out.
    _ = train_set[position_of(args, step + 1) - 1]
    batch = torch.stack([train_set[position] for position in positions]).long()
    return batch.pin_memory().to(device, non_blocking=True) if args.device == "cuda" else batch


def data_rank_of(args):
    """Return this rank's data-parallel rank, and the number of data-parallel ranks."""
    # TP: neighboring ranks process the same samples.
    # CP: context-parallel ranks process different parts of the same samples.
    ranks_per_sequence = args.tensor_parallel_size * args.context_parallel_size
    # PP: all ranks of one pipeline process the same samples.
    num_data_ranks = dist.get_world_size() // ranks_per_sequence // args.pipeline_parallel_size
    return dist.get_rank() // ranks_per_sequence % num_data_ranks, num_data_ranks


def context_part(args, sequences):
    """Return this rank's part of each sequence; the shape of `sequences` is [batch, length]."""
    context_rank = dist.get_rank() // args.tensor_parallel_size % args.context_parallel_size
    return sequences.chunk(args.context_parallel_size, dim=1)[context_rank]


def position_of(args, step):
    """Return the position of the first sample of a step, counted over all epochs."""
    return (step - 1 + args.skip_steps) * args.global_batch_size


# ---- one step --------------------------------------------------------------------------------
def loss_of(args, model, batch):
    """Return the share of a step's mean loss that this rank's tokens in `batch` have."""
    if args.pipeline_parallel_size > 1:
        return run_schedule(args, model, batch)
    options = {"use_cache": False}
    # TP, CP: pass the positions; otherwise the model would number each part of a sequence from 0.
    if args.tensor_parallel_size * args.context_parallel_size > 1:
        positions = torch.arange(batch.shape[1], device=batch.device)[None]
        options["position_ids"] = context_part(args, positions)
    hidden = model(input_ids=context_part(args, batch), **options).logits
    return model.loss_function(hidden, batch) / model.num_targets


def run_schedule(args, model, batch):
    """Run a batch forward through all stages and, in training, backward through all stages.

    Only the ranks of the last stage have a share of the loss; the other ranks return 0.
    """
    # The schedule needs a fixed number of samples, so pad the batch. The loss ignores target -100.
    num_samples = args.accumulation * args.micro_batch_size
    labels = F.pad(batch, (0, 0, 0, num_samples - len(batch)), value=-100)
    run_micro_batches = model.schedule.step if model.training else model.schedule.eval
    losses = []
    ids = context_part(args, labels.clamp(min=0))
    run_micro_batches(ids, target=labels, losses=losses, return_outputs=False)
    return sum(losses, torch.zeros((), device=batch.device)).detach()


def forward_backward(args, model, train_set, step, device):
    """Compute the gradients of the step's mean loss; return this rank's share of the mean loss."""
    if args.pipeline_parallel_size > 1:
        # PP: the schedule runs the forward and backward passes of all micro-batches.
        batches = [batch_at(args, train_set, step, n, device) for n in range(args.accumulation)]
        return run_schedule(args, model, torch.cat(batches))
    total_loss = torch.zeros((), device=device)
    for micro_step in range(args.accumulation):
        # FSDP: every micro-batch adds to the gradient shards. All-reduce these shards between the
        # replicas in the last micro-batch only.
        model.set_requires_all_reduce(micro_step == args.accumulation - 1)
        batch = batch_at(args, train_set, step, micro_step, device)
        loss = loss_of(args, model, batch)
        loss.backward()
        total_loss += loss.detach()
    return total_loss


def sum_tied_gradients(args, model):
    """Add up the gradients of a tied weight, which the first and the last stage both hold.

    On the ranks of the last stage, return that stage's copy of the weight; otherwise return None.
    """
    ranks_per_stage = dist.get_world_size() // args.pipeline_parallel_size
    pipeline_rank, last = dist.get_rank() // ranks_per_stage, args.pipeline_parallel_size - 1
    if last == 0 or pipeline_rank not in (0, last) or not model.all_tied_weights_keys:
        return None
    peer = (last - pipeline_rank) * ranks_per_stage + dist.get_rank() % ranks_per_stage
    weight = model.get_input_embeddings().weight
    grad = weight.grad.to_local()
    peer_grad = torch.empty_like(grad)
    exchange = [dist.P2POp(dist.isend, grad, peer), dist.P2POp(dist.irecv, peer_grad, peer)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    grad += peer_grad
    return weight if pipeline_rank == last else None


def clip_gradients(args, model):
    """Limit the norm of the gradients to `--max-grad-norm`; return the norm before clipping."""
    # PP: the first stage counts the tied weight in the norm, so the last stage leaves it out.
    tied_copy = sum_tied_gradients(args, model)
    weights = [weight for weight in model.parameters() if weight is not tied_copy]
    grads = [weight.grad for weight in weights if weight.grad is not None]
    # FSDP: full_tensor() combines the norms of all shards.
    norm = torch.nn.utils.get_total_norm(grads).full_tensor()
    if args.pipeline_parallel_size > 1:
        # PP: add up the squares of the norms of all pipeline ranks. All ranks with the same
        # pipeline rank have the same norm, so the sum is the mean over all ranks times the number
        # of pipeline ranks.
        dist.all_reduce(norm.square_(), dist.ReduceOp.AVG)
        norm.mul_(args.pipeline_parallel_size).sqrt_()
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
    data_rank, num_data_ranks = data_rank_of(args)
    # PP: one call of the schedule processes all micro-batches of a step.
    num_micro_batches = args.accumulation if args.pipeline_parallel_size > 1 else 1
    for batch in held_out.split(num_micro_batches * args.micro_batch_size * num_data_ranks):
        # DDP: a rank with no samples left evaluates the first sample with weight 0, so that every
        # rank runs the same number of forward passes.
        share = batch[data_rank::num_data_ranks]
        inputs = share if len(share) else held_out[:1]
        total_loss += loss_of(args, model, inputs.long().to(device)) * (len(share) > 0)
    dist.all_reduce(total_loss)
    model.train()
    return (total_loss * model.num_targets / held_out[:, 1:].numel()).item()


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
    tied, weights = model.all_tied_weights_keys, own_weights(model)
    return {name: weight for name, weight in weights.items() if name not in tied}


def own_weights(model):
    """Return the weights of this rank's stages; all other weights are on the meta device."""
    return {name: weight for name, weight in model.state_dict().items() if not weight.is_meta}


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
    # PP: the first rank of each stage is the writer of that stage's layers.
    ranks_per_stage = dist.get_world_size() // args.pipeline_parallel_size
    partial, is_writer = partial_of(run_dir / "model"), dist.get_rank() % ranks_per_stage == 0
    # FSDP: no rank holds the full model. The ranks gather one layer at a time, and rank 0 writes it
    # to a separate file, under the names that weights have in published files.
    # transformers finds these names by the model's class, which fully_shard() has changed.
    model.__class__ = next(cls for cls in type(model).__mro__ if "FSDP" not in cls.__name__)
    layer_of = re.compile(r".*?\.\d+(?=\.)|.*").match
    for layer, items in groupby(weights_of(model).items(), lambda item: layer_of(item[0])[0]):
        # With --cpu-offload, gather on the device, so that only the writer needs host memory.
        weights = {name: gather(weight.to(args.device), is_writer) for name, weight in items}
        if is_writer:
            weights = conversion.revert_weight_conversion(model, weights)
            # PP: two stages have a tied weight, so rename the file only when it is complete.
            path = partial / f"model-{layer}.safetensors"
            unfinished = Path(f"{path}.{dist.get_rank()}")
            unfinished.write_bytes(save(weights, {"format": "pt"}))
            unfinished.rename(path)
    wait_for_all()
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
    dist.all_reduce(loss)
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
