"""Train a causal language model of which no device computes a whole layer. Parent: 05-large-model.

Here:      torchrun --standalone --nproc-per-node 2 06-tensor-parallel/train_llm.py \
               --tensor-parallel-size 2
For real:  sbatch --nodes 8 --gpus-per-node 8 03-job-launchers/slurm/train.sbatch \
               06-tensor-parallel/train_llm.py --tensor-parallel-size 8 \
               @05-large-model/configs/llama-3.1-405b.args
"""

import argparse
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
import uuid
from array import array
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from pydoc_data.topics import topics

import datasets
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor.parallel as tp
import torch.nn.functional as F
import transformers
import wandb
from datasets.fingerprint import Hasher
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as recompute
from tqdm import tqdm
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.initialization import no_init_weights
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils.hub import snapshot_download

LAUNCHERS = [  # the variables in which each tells a process its rank, world size and local rank
    ["RANK", "WORLD_SIZE", "LOCAL_RANK"],  # torchrun, deepspeed
    [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK")],  # mpirun of Open MPI
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"],  # mpirun of MPICH
    ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"],  # srun
]
STYLES = {  # how a matrix is split, by the names that transformers' plans have for it
    "colwise": tp.ColwiseParallel(),
    "rowwise": tp.RowwiseParallel(output_layouts=Shard(1)),
    "colwise_gather_output": tp.ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "embedding_rowwise": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "replicated_with_grad_allreduce": tp.SequenceParallel(use_local_output=True),  # norms
}
CHUNK = 1024  # tokens whose logits exist at the same time
SAVES = []  # at most one, which goes on in the background


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
    switch = argparse.BooleanOptionalAction
    add("--reshard-after-forward", action=switch, default=True, help="free gathered weights early")
    add("--replicas", type=int, default=1, help="groups of ranks that each hold a whole model")
    add("--cpu-offload", action="store_true", help="shards live on the host, where AdamW steps")
    add("--recompute", choices=["none", "full", "selective"], default="none", help="activations")
    add("--prefetch", type=int, default=1, help="layers gathered ahead; 0: FSDP's own way")
    add("--tensor-parallel-size", type=int, default=1, help="ranks that split each matrix")

    add("-e", "--experiment-name", default=chapter, help="the run's folder under --save-dir")
    add("--save-dir", default="outputs", help="where runs are kept")
    add("--checkpoint-every", type=int, default=50, help="steps between checkpoints")
    add("--keep-checkpoints", type=int, default=2, help="how many stay on disk")
    add("--eval-every", type=int, default=50, help="steps between evaluations")
    add("--eval-samples", type=int, default=64, help="how many samples are held out for them")
    add("--log-every", type=int, default=10, help="steps between log lines")
    add("--wandb", choices=["disabled", "offline", "online"], default="disabled", help="mode")
    add("--dist-timeout", type=int, default=600, help="seconds that a rank waits for the others")
    add("--checkpoint-async", action="store_true", help="write them while the training goes on")

    args = parser.parse_args()
    may_be_zero = ["lr", "warmup_steps", "weight_decay", "max_grad_norm", "seed", "prefetch"]
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
    if not {"LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys():
        fail("start this with a launcher; mpirun needs -x MASTER_ADDR=... -x MASTER_PORT=... too")
    world_size, size = int(os.environ["WORLD_SIZE"]), args.tensor_parallel_size
    told = f"must divide {world_size} ranks and --seq-length {args.seq_length}"
    if world_size % size or args.seq_length % size:
        fail(f"--tensor-parallel-size {size} {told}")
    world_size //= size  # TP: the ranks that split a matrix take the same samples
    ranks = f"{world_size} ranks" if size == 1 else f"{world_size} groups of {size} ranks"
    samples, rest = divmod(args.global_batch_size, world_size)
    if rest:
        fail(f"--global-batch-size {args.global_batch_size} does not divide by {ranks}")
    if world_size % args.replicas:
        fail(f"--replicas {args.replicas} does not divide {ranks} into equal groups")
    args.micro_batch_size = max(n for n in range(1, args.batch_size + 1) if samples % n == 0)
    args.accumulation = samples // args.micro_batch_size
    args.wandb_id = uuid.uuid4().hex[:8]
    return args


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
    if args.cpu_offload:  # AdamW steps on the host's cores, of which torchrun gives a rank one
        hosts = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname(), group=patient_group())
        cores = len(os.sched_getaffinity(0)) // hosts.count(socket.gethostname())
        torch.set_num_threads(max(torch.get_num_threads(), cores))
    check_shared(run_dir)
    print(f"training on {device} in {args.precision}")
    return device, run_dir


@functools.cache
def patient_group(thread="main"):
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
    """Return the model without values, in memory that is not in use before `shard` writes to it."""
    caps = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    if any(getattr(config, cap, None) for cap in caps):
        fail(f"--model-name {args.model_name}: it caps its logits, which this chapter never makes")
    torch.manual_seed(args.seed)
    with no_init_weights():  # what constructors draw is drawn later; what they set stays
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
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

    if args.tensor_parallel_size > 1:
        check_plan(args, model)
    head = model.get_output_embeddings()
    head.forward = torch.clone  # of the hidden states: the loss applies it, chunk by chunk
    model.loss_function = functools.partial(chunked_loss, head)

    if args.recompute != "none":  # inside of what is compiled, and split
        keep = functools.partial(create_selective_checkpoint_contexts, keep_products)
        options = {"context_fn": keep} if args.recompute == "selective" else {}
        for layer in layers_of(model):
            forward = functools.partial(recompute, layer.forward, use_reentrant=False, **options)
            layer.forward = forward

    if args.compile:  # in place, so that the weights keep their names; each shape by itself
        for layer in layers_of(model):
            layer.compile(dynamic=False)
        model.loss_function = torch.compile(model.loss_function, dynamic=False)
    return model


def check_plan(args, model):
    """Stop if transformers does not say how to split all of the model, or it cannot be split so."""
    size, config, styles = args.tensor_parallel_size, model.config, styles_of(model)
    this = f"--tensor-parallel-size {size}: {args.model_name}"
    for name, part in model.named_modules():
        if styles[part] is None and list(part.parameters(recurse=False)):
            fail(f"{this} has weights in {name}, which this chapter cannot split")
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % size:
        fail(f"{this} has {heads} key-value heads, which {size} ranks cannot share equally")
    if config._attn_implementation != "causal_sdpa":
        fail(f"{this} attends with a mask, which takes whole sequences, of which ranks have parts")


def styles_of(model):
    """Return how to split each module's weights; None where transformers' plan does not say."""
    styles, plan = {}, model.tp_plan or {}
    for name, part in model.named_modules():
        norm = "replicated_with_grad_allreduce" if "Norm" in type(part).__name__ else None
        general = re.sub(r"\.\d+(?=\.|$)", ".*", name)  # plans have * for the layer's number
        styles[part] = STYLES.get(plan.get(general, norm))
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    return styles | dict.fromkeys(ends, STYLES["embedding_rowwise"])  # a row is a token's


def chunked_loss(head, logits, labels, *_, **__):
    """Return the mean cross entropy of predicting each label from the hidden states before it.

    These are what `head` has let through as if it were logits: [batch, sequence, width]. The true
    logits, [tokens, vocabulary], exist only for a chunk of the tokens at a time.
    """
    mesh, length = getattr(head.weight, "device_mesh", None), logits.shape[1]
    first = 1 + length * (mesh.get_local_rank() if mesh else 0)  # TP: of this rank's tokens
    targets = labels[:, first : first + length]  # one less on the last rank
    hidden, targets = logits[:, : targets.shape[1]].flatten(0, 1), targets.flatten()
    weights = whole(head.weight), whole(head.bias)
    total = 0.0
    for some, wanted in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
        total += recompute(loss_of_chunk, weights, some, wanted, use_reentrant=False)
    if mesh:
        total = DTensor.from_local(total, mesh, [Partial()]).full_tensor()
    return total / labels[:, 1:].numel()


def whole(weight):
    """Return all rows of a weight that may be split; each rank has a part of their gradient."""
    split = isinstance(weight, DTensor)
    return weight.full_tensor(grad_placements=[Partial()]) if split else weight


def loss_of_chunk(weights, hidden, targets):
    """Return the summed cross entropy of a chunk: hidden states [tokens, width], ids [tokens]."""
    logits = F.linear(hidden, *weights)
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def keep_products(_, operation, *args, **kwargs):
    """Choose what `--recompute selective` keeps: matrix products and attention are costly."""
    costly = "mm" in str(operation) or "scaled_dot_product" in str(operation)
    return CheckpointPolicy.MUST_SAVE if costly else CheckpointPolicy.PREFER_RECOMPUTE


def layers_of(model):
    """Return the decoder layers: transformers names their class as one not to be split."""
    return [part for part in model.modules() if type(part).__name__ in model._no_split_modules]


def shard(args, model, device):
    """Give the model its values and split it across the ranks in place; return it.

    Each layer moves to the device by itself and leaves only its shard there. A layer's weights are
    gathered for its forward and again for its backward, and its gradients are reduced to shards.
    """
    size, names = args.tensor_parallel_size, ("replicate", "shard", "tensor")
    shape = (args.replicas, dist.get_world_size() // args.replicas // size, size)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)  # TP: of neighbours
    mesh["shard", "tensor"]._flatten()  # so that the gradient norm takes one all-reduce for both
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {
        "mesh": mesh["replicate", "shard"] if args.replicas > 1 else mesh["shard"],
        "mp_policy": bf16 if args.precision == "bf16" else MixedPrecisionPolicy(),
    }
    if args.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=args.device == "cuda")
    layers = layers_of(model)
    parents = [part for part in model.modules() if isinstance(part, transformers.PreTrainedModel)]
    owner = {part: parent for parent in parents for part in parent.modules()}  # the innermost one

    def materialize(part):
        """Give values to one module, whose own parts have theirs already; split it if a layer."""
        for weight in part.parameters(recurse=False):
            weight._is_hf_initialized = args.pretrained  # not to be drawn, as it is read below
        owner[part]._init_weights(part)
        if part in layers:
            split_matrices(model, part.modules(), mesh["tensor"])
            free = args.reshard_after_forward and part is not layers[-1]  # its backward comes next
            fully_shard(part, reshard_after_forward=free, **options)

    model.apply(materialize)
    inside = {part for layer in layers for part in layer.modules()}
    split_matrices(model, [part for part in model.modules() if part not in inside], mesh["tensor"])
    model.tie_weights()
    fully_shard(model, reshard_after_forward=False, **options)  # FSDP: what is in no layer
    prefetch(args, model, layers)
    if args.pretrained:
        read_weights(args, model)
    return model


def split_matrices(model, parts, mesh):
    """Split the weights of some modules over the ranks of a tensor-parallel group, in place.

    In a block (attention, MLP) a rank has its heads or columns; outside, its part of each sequence.
    """
    if mesh.size() == 1:
        return
    styles, head = styles_of(model), model.get_output_embeddings()
    for part in parts:
        weights = dict(part.named_parameters(recurse=False))
        if part is head:  # it has no forward of its own: the loss uses its weights
            for name, weight in weights.items():
                rows = distribute_tensor(weight.data, mesh, [Shard(0)], src_data_rank=None)
                part.register_parameter(name, torch.nn.Parameter(rows))
        elif weights:
            tp.parallelize_module(part, mesh, styles[part], src_data_rank=None)
        if isinstance(part, torch.nn.Embedding):  # clone() waits for what compiled layers would not
            part.register_forward_hook(lambda _part, _ids, hidden: hidden.clone())
        if any(isinstance(styles[child], tp.ColwiseParallel) for child in part.children()):
            part.register_forward_pre_hook(functools.partial(gather, mesh), with_kwargs=True)


def gather(mesh, block, args, kwargs):
    """Give a block the hidden states of whole sequences; their gradients are added up."""
    part = args[0] if args else kwargs["hidden_states"]
    hidden = DTensor.from_local(part, mesh, [Shard(1)]).redistribute(placements=[Replicate()])
    return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})


def prefetch(args, model, layers):
    """Let each layer start to gather the next ones, in the forward and in the backward."""
    model.set_modules_to_forward_prefetch(layers[: args.prefetch])
    for number, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 1 + args.prefetch])
        before = layers[max(0, number - args.prefetch) : number]
        layer.set_modules_to_backward_prefetch(before[::-1])


def read_weights(args, model):
    """Read this rank's shards, and no more, from the safetensors files of `--model-name`."""
    folder = args.model_name
    if not Path(folder).is_dir():
        with rank_first():
            folder = snapshot_download(folder, allow_patterns="model*.safetensors")
    reader = dcp.HuggingFaceStorageReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    if not saved or any(tensor.properties.dtype.itemsize < 2 for tensor in saved.values()):
        fail(f"--pretrained --model-name {args.model_name}: no safetensors, or quantized ones")
    weights = dict(model.named_parameters())
    prefix = f"{model.base_model_prefix}."  # files of a model without a head have names without
    for name in weights.keys() - saved.keys():  # and GPT-NeoX's files call its head embed_out
        weights[name.removeprefix(prefix).replace("lm_head", "embed_out")] = weights.pop(name)
    dcp.load(weights, storage_reader=reader, process_group=patient_group())
    with suppress(OSError):  # which not every model has
        model.generation_config = transformers.GenerationConfig.from_pretrained(args.model_name)


def build_optimizer(args, model):
    """Return AdamW, which decays the matrices and leaves norms and biases alone."""
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
    vectors = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )
    optimizer.found_inf = torch.zeros((), device=matrices[0].device)  # see train_step
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
    rank, world_size = data_rank(args)
    size = args.micro_batch_size * world_size
    first = ((step - 1) * args.accumulation + micro_step) * size
    positions = range(first + rank, first + size, world_size)
    places = [divmod(position, len(samples)) for position in positions]
    ids = [order_of(args.seed, epoch, len(samples))[place] for epoch, place in places]
    batch = samples[torch.stack(ids)].long()
    return batch.pin_memory().to(device, non_blocking=True) if args.device == "cuda" else batch


def data_rank(args):
    """Return which part of a batch this rank takes, and how many there are."""
    size = args.tensor_parallel_size  # TP: neighbours take the same
    return dist.get_rank() // size, dist.get_world_size() // size


# ---- one step --------------------------------------------------------------------------------
def loss_of(args, model, batch):
    """Return the mean loss of predicting each token of `batch` from those before it."""
    more = {}
    if args.tensor_parallel_size > 1:  # TP: from a part of a sequence, positions cannot be told
        more["position_ids"] = torch.arange(batch.shape[1], device=batch.device)[None]
    return model(input_ids=batch, labels=batch, use_cache=False, **more).loss


def train_step(args, model, optimizer, train_set, step, device):
    """Take one optimizer step; return loss and gradient norm as they lie on the device."""
    torch.manual_seed(mix(args.seed, step, dist.get_rank()))
    total = torch.zeros((), device=device)
    for micro_step in range(args.accumulation):
        # FSDP: each rank adds up its shard of the gradient; replicas add theirs up once
        model.set_requires_all_reduce(micro_step == args.accumulation - 1)
        batch = batch_at(args, train_set, step, micro_step, device)
        loss = loss_of(args, model, batch) / args.accumulation
        loss.backward()
        total += loss.detach()
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    grad_norm = torch.nn.utils.get_total_norm(grads).full_tensor()  # FSDP: of all shards
    dist.broadcast(grad_norm, 0)  # FSDP: each replica has added up in an order of its own
    limit = args.max_grad_norm or math.inf
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), limit, grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr_at(args, step)
    # 1 from the first gradient on that is not finite: AdamW then leaves everything as it is
    optimizer.found_inf = torch.maximum(optimizer.found_inf, (~grad_norm.isfinite()).float())
    optimizer.step()
    optimizer.zero_grad()
    return total, grad_norm


@torch.no_grad()
def evaluate(args, model, held_out, device):
    """Return the mean loss of the held-out samples."""
    model.eval()
    total = torch.zeros((), device=device)
    rank, world_size = data_rank(args)
    rounds = math.ceil(len(held_out) / (args.micro_batch_size * world_size))
    for batch in held_out.tensor_split(rounds * world_size)[rank::world_size]:
        some = batch if len(batch) else held_out[:1]  # DDP: all ranks do as many forward passes
        total += loss_of(args, model, some.long().to(device)) * len(batch)
    model.train()
    dist.all_reduce(total)
    return (total / args.tensor_parallel_size / len(held_out)).item()


# ---- checkpoint ------------------------------------------------------------------------------
@rank_first()
def partial_of(folder):
    """Return an empty folder in which to write what shall appear as `folder`."""
    partial = folder.with_name(".partial")
    if dist.get_rank() != 0:
        return partial
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


class PublishingWriter(dcp.FileSystemWriter):
    """Gives a checkpoint its name when the shards of all ranks are on the disk."""

    def __init__(self, args, checkpoint):
        super().__init__(partial_of(checkpoint))
        self.args, self.checkpoint = args, checkpoint

    def finish(self, metadata, results):
        super().finish(metadata, results)  # FSDP: rank 0 calls it, when all ranks have written
        publish(self.args, self.path, self.checkpoint)


@functools.cache
def stager(pinned):
    """Return what copies a state to the host, into memory that it keeps for the next copy."""
    return DefaultStager(StagingOptions(pinned, False, False, use_non_blocking_copy=pinned))


def finish_saves():
    """Return when no save is under way on any rank."""
    while SAVES:
        SAVES.pop().result()


def save_checkpoint(args, run_dir, model, optimizer, step):
    """Save all that is not a function of the step."""
    finish_saves()
    checkpoint = run_dir / f"checkpoints/step-{step:08}"
    state = state_of(model, optimizer)
    if dist.get_rank() == 0:
        state["args"] = json.dumps(vars(args))  # FSDP: or else DCP would take any rank's
    writer = PublishingWriter(args, checkpoint)
    if args.checkpoint_async:
        copy = {"async_stager": stager(args.device == "cuda")}
        group = patient_group("saves")  # a thread's collectives must not mix with the main one's
        SAVES.append(dcp.async_save(state, storage_writer=writer, process_group=group, **copy))
        return
    dcp.save(state, storage_writer=writer, process_group=patient_group())


def state_of(model, optimizer):
    """Return this rank's shards, by names that do not depend on the number of ranks."""
    weights = weights_of(model)  # first, as it shards again what an evaluation left gathered
    adam = get_optimizer_state_dict(model, optimizer)["state"]  # a new optimizer gets it here
    return {"model": weights, "optimizer": adam}


def weights_of(model):
    """Return this rank's shards of the weights by name, tied ones once."""
    tied, weights = model.all_tied_weights_keys, model.state_dict()
    return {name: weight for name, weight in weights.items() if name not in tied}


def load_checkpoint(args, run_dir, model, optimizer):
    """Restore the newest checkpoint that can be read; return its step, which is 0 for a new run."""
    checkpoints = sorted((run_dir / "checkpoints").glob("step-????????"), reverse=True)
    logging.getLogger().setLevel(logging.ERROR)  # DCP logs pages on what fits on a line
    found = [checkpoints]
    dist.broadcast_object_list(found, group=patient_group())
    for checkpoint in found[0]:  # DDP: all ranks try those that rank 0 has found
        try:
            about = {"args": ""}
            dcp.load(about, checkpoint_id=checkpoint, process_group=patient_group())
            compare_args(args, json.loads(about["args"]), checkpoint)
            state = state_of(model, optimizer)  # FSDP: each rank fills its shards in place
            dcp.load(state, checkpoint_id=checkpoint, process_group=patient_group())
        except (Exception, dcp.CheckpointException) as error:  # FSDP: the same one on all ranks
            print(f"{checkpoint} cannot be read, so the one before is tried: {error!r:.200}")
            continue
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


def export_model(args, run_dir, model, tokenizer):
    """Write the finished model as a folder that `from_pretrained` loads; no host holds it all."""
    partial, weights = partial_of(run_dir / "model"), weights_of(model)
    ends = accumulate(weight.numel() * weight.itemsize for weight in weights.values())
    files = {name: 1 + end // 5_000_000_000 for name, end in zip(weights, ends, strict=True)}
    writer = dcp.HuggingFaceStorageWriter(
        partial, files, save_distributed=True, enable_consolidation=True
    )
    dcp.save(weights, storage_writer=writer, process_group=patient_group())
    if dist.get_rank() != 0:
        return
    shutil.rmtree(partial / "sharded")  # FSDP: the shards, of which rank 0 has made the files
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    for part in (model.config, model.generation_config, tokenizer):
        part.save_pretrained(partial)
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
    model = shard(args, build_model(args, config), device)
    args.num_weights = model.num_parameters()
    optimizer = build_optimizer(args, model)
    start = load_checkpoint(args, run_dir, model, optimizer)
    if start >= args.num_steps and (run_dir / f"finished-{start}").exists():
        print(f"{run_dir} is finished: it has {start} steps")
        return

    about = {"id": args.wandb_id, "name": args.experiment_name, "config": vars(args)}
    run = wandb.init(**about, dir=run_dir, mode=args.wandb, resume="allow")
    if start == 0:
        log(run_dir, run, {"step": 0, "val_loss": evaluate(args, model, held_out, device)})
    since = start, None  # the speed of the first interval is unknown, as its first step compiles
    steps = range(start + 1, args.num_steps + 1)
    stops = stop_requests(run_dir)
    for step in tqdm(steps, initial=start, total=args.num_steps, file=sys.stdout, disable=None):
        stop = next(stops)
        loss, grad_norm = train_step(args, model, optimizer, train_set, step, device)
        last = step == args.num_steps
        evaluating = last or step % args.eval_every == 0
        reporting = evaluating or step % args.log_every == 0
        saving = last or step % args.checkpoint_every == 0 or stop
        if (reporting or saving) and optimizer.found_inf:
            fail(f"a gradient in steps {since[0] + 1} to {step} was not finite; nothing was saved")
        if reporting:
            row = measure(args, model, step, loss, grad_norm, since)
            if evaluating:
                row["val_loss"] = evaluate(args, model, held_out, device)
            log(run_dir, run, row)
        if saving:
            save_checkpoint(args, run_dir, model, optimizer, step)
        if reporting or saving:
            since = step, time.perf_counter()
        if stop and not last:
            finish_saves()
            print(f"stopped at step {step}: the same command continues")
            run.finish()
            return

    finish_saves()
    export_model(args, run_dir, model, tokenizer)
    print(f"finished: {run_dir} has the model, the metrics and the last checkpoints")
    run.finish()


if __name__ == "__main__":
    main()
    if dist.is_initialized():  # which it is not after --help
        dist.barrier(group=patient_group())  # DDP: no rank leaves while another may still need it
        dist.destroy_process_group()
