"""Check whether a model fits in memory before you rent GPUs, and show what fills the memory.

Here:  python 05-large-model/will_it_fit.py --model-name tiny --nodes 1 --gpus-per-node 4
Big:   python 05-large-model/will_it_fit.py @05-large-model/configs/llama-3.1-405b.args \
           --nodes 8 --gpus-per-node 8 --gpu-memory-gib 80 --host-memory-gib 1000

The planner needs neither weights nor a GPU. The sizes of weights, gradients and optimizer state
follow from the shapes of the weights. To measure what a layer keeps for its backward pass, the
planner runs two layers on fake tensors, which have shapes but no data. From these sizes, it
simulates a training step layer by layer; the fullest moment of the step must fit. The planner
counts only the bytes of tensors: --gpu-overhead-gib and --fragmentation estimate the rest. With
--tensor-parallel-size, --pipeline-parallel-size or --context-parallel-size, the functions of
chapter 08's script split matrices, layers or sequences across ranks; the fullest rank must fit.
"""

import argparse
import contextlib
import copy
import functools
import importlib.util
import itertools
import json
import math
import shlex
import subprocess
import sys
import warnings
import weakref
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import huggingface_hub
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint as checkpointing
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations import moe
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer

# On the meta device, torch knows the shapes of grouped_mm() in bf16 only, so compute experts in a
# loop.
moe._can_use_grouped_mm = lambda *_: False
HERE = Path(__file__).resolve().parent
MAKE_CONFIG = HERE.parent / "alternative-frameworks/make_config.py"
GIB = 2**30
# The number of tokens whose logits exist at the same time, as in train_llm.py.
CHUNK_SIZE = 1024
# The flags that a setting can change, and their defaults.
FLAG_DEFAULTS = {"reshard_after_forward": True, "recompute": "none", "cpu_offload": False}
# The settings in the order to try them. Each setting gathers, copies or recomputes more than the
# settings above it.
SETTINGS = {
    "02": {},
    "04 --no-reshard-after-forward": {"reshard_after_forward": False},
    "04": {},
    "05": {},
    "05 --recompute selective": {"recompute": "selective"},
    "05 --recompute full": {"recompute": "full"},
    "05 --cpu-offload": {"cpu_offload": True},
    "05 --cpu-offload --recompute selective": {"cpu_offload": True, "recompute": "selective"},
    "05 --cpu-offload --recompute full": {"cpu_offload": True, "recompute": "full"},
}
# The setting that needs the least GPU memory.
SMALLEST_SETTING = "05 --cpu-offload --recompute full"
# The parts of a GPU's memory that the run on fake tensors measures.
TRACED_PARTS = ["cast weights", "activations", "logits"]
# All parts of a GPU's memory, from tensors that stay to tensors that come and go.
PARTS = ["parameters", "gradients", "optimizer state", "gathered weights", "whole gradients"]
PARTS += [*TRACED_PARTS, "communication"]
# The flags of train_llm.py that do not affect any size. The planner accepts them, because a file
# of arguments may contain them.
IGNORED_FLAGS = (
    "--dataset-subset --text-column --num-steps --lr --warmup-steps --weight-decay --max-grad-norm "
    "--skip-steps --seed --save-dir --checkpoint-every --keep-checkpoints --eval-every "
    "--eval-samples --log-every --wandb --dist-timeout"
)


# ---- command line ----------------------------------------------------------------------------


def parse_args(argv=None):
    """Parse and check the command line, and split the global batch as the scripts do."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="All flags of this chapter's train_llm.py are accepted, also from @FILE. "
        "The exit status is 0 if the chosen setting fits, and 1 if it does not.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        fromfile_prefix_chars="@",
        allow_abbrev=False,
    )
    parser.convert_arg_line_to_args = lambda line: shlex.split(line, comments=True)
    parser.error = fail
    add_plan_flags(parser)
    add_training_flags(parser)
    args = parser.parse_args(argv)
    if args.precision == "auto":
        args.precision = "fp32" if args.device == "cpu" else "bf16"
    check(args)
    return args


def add_plan_flags(parser):
    """Declare the flags that describe the machines, and the flags that control the output."""
    add = parser.add_argument_group("machines").add_argument
    add("--nodes", type=at_least(1), default=1, help="number of nodes")
    add("--gpus-per-node", type=at_least(1), default=8, help="GPUs of a node, with a rank on each")
    add("--gpu-memory-gib", type=at_least(0.0), default=80.0, help="memory of each GPU")
    add("--host-memory-gib", type=at_least(0.0), default=1000.0, help="CPU memory of each node")
    overhead_help = "GPU memory for the CUDA context, NCCL and cuBLAS"
    add("--gpu-overhead-gib", type=at_least(0.0), default=3.0, help=overhead_help)
    overhead_help = "CPU memory for the libraries of each rank"
    add("--host-overhead-gib", type=at_least(0.0), default=4.0, help=overhead_help)
    fragmentation_help = "memory that the allocator loses, as a share of the tensors"
    add("--fragmentation", type=at_least(0.0), default=0.05, help=fragmentation_help)

    add = parser.add_argument_group("the plan").add_argument
    chapters = "02 04 05 06 07 08".split()
    add("--chapter", choices=chapters, default="05", help="chapter whose script will train")
    weights_help = "bf16: keep weights, gradients and moments in bf16; no chapter does this"
    add("--weights-dtype", choices=["fp32", "bf16"], default="fp32", help=weights_help)
    add("--json", action="store_true", help="print all numbers, in bytes, as JSON")
    add("--brief", action="store_true", help="print one line about the chosen setting")
    write_help = "if the chosen setting fits, write it for a framework with make_config.py"
    add("--write-config", nargs=2, metavar=("deepspeed|accelerate", "FILE"), help=write_help)


def add_training_flags(parser):
    """Declare the flags of train_llm.py, whose own --help explains them."""
    add = functools.partial(parser.add_argument, help=argparse.SUPPRESS)
    add("-m", "--model-name", default="tiny")
    add("--config", nargs="+", default=[])
    add("-s", "--seq-length", type=at_least(2), default=256)
    add("--global-batch-size", type=at_least(1), default=32)
    add("-b", "--batch-size", type=at_least(1), default=8)
    # The planner runs without a GPU, so the default does not depend on this machine.
    add("--device", choices=["auto", "cpu", "cuda"], default="cuda")
    add("--precision", choices=["auto", "bf16", "fp32"], default="auto")
    add("--reshard-after-forward", action=argparse.BooleanOptionalAction, default=True)
    add("--replicas", type=at_least(1), default=1)
    add("--recompute", choices=["none", "full", "selective"], default="none")
    add("--tensor-parallel-size", type=at_least(1), default=1)
    add("--pipeline-parallel-size", type=at_least(1), default=1)
    add("--pipeline-schedule", choices=["gpipe", "1f1b", "interleaved-1f1b"], default="1f1b")
    add("--context-parallel-size", type=at_least(1), default=1)
    add("--context-parallel-style", choices=["gather", "ulysses"], default="gather")
    for name in ("--cpu-offload", "--checkpoint-async", "--pretrained", "--compile"):
        add(name, action="store_true")
    add("-d", "--dataset-name")
    add("-e", "--experiment-name")
    for name in IGNORED_FLAGS.split():
        add(name)


def config_command(args):
    """Return the make_config.py command that writes the chosen setting for a framework."""
    framework, path = args.write_config
    words = [framework, "--output", path, "--ranks", args.ranks, "--precision", args.precision]
    words += ["--recompute", args.recompute]
    if args.cpu_offload:
        words += ["--offload-params", "cpu"]
    if framework == "deepspeed":
        if args.chapter == "02":
            problem = "ZeRO shards the optimizer state, but chapter 02 does not"
            fail(f"--write-config deepspeed --chapter 02: {problem}; choose --chapter 04 or 05")
        words += ["--global-batch-size", args.global_batch_size, "--batch-size", args.batch_size]
        if args.max_grad_norm:
            words += ["--max-grad-norm", args.max_grad_norm]
        words += ["--stage", 3 if args.reshard_after_forward else 2]
        if args.cpu_offload:
            words += ["--offload-optimizer", "cpu"]
    elif framework == "accelerate":
        words += ["--nodes", args.nodes]
        if args.chapter == "02":
            words += ["--strategy", "ddp"]
        if not args.reshard_after_forward:
            words.append("--no-reshard-after-forward")
    else:
        fail(f"--write-config {framework}: unknown framework; choose deepspeed or accelerate")
    check_supported(args, framework)
    return [sys.executable, str(MAKE_CONFIG), *map(str, words)]


def check_supported(args, framework):
    """Stop if the chosen setting has a value that make_config.py cannot write."""
    supported = {
        "tensor_parallel_size": [1],
        "pipeline_parallel_size": [1],
        "context_parallel_size": [1],
        "replicas": [1],
        "recompute": ["none", "full"],
        "weights_dtype": ["fp32"],
    }
    for name, values in supported.items():
        value = getattr(args, name)
        if value not in values:
            flags = f"--write-config {framework} --{name.replace('_', '-')} {value}"
            choices = " or ".join(map(str, values))
            fail(f"{flags}: make_config.py does not support this value; choose {choices}")


def at_least(minimum):
    """Return an argument type for finite numbers of at least `minimum`, and of its type."""

    def number(text):
        value = type(minimum)(text)
        if not minimum <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, not {text}")
        return value

    # argparse prints this name if the text is not a number.
    number.__name__ = type(minimum).__name__
    return number


def check(args):
    """Stop on flags that the chapter's script rejects, and split the batch as the script does."""
    args.ranks = args.nodes * args.gpus_per_node
    ranks_per_sample = args.tensor_parallel_size
    if args.tensor_parallel_size > 1:
        args.chapter = "06"
    layout = f"--tensor-parallel-size {args.tensor_parallel_size}"
    layout += f" --context-parallel-size {args.context_parallel_size}"
    ranks_per_sample *= args.context_parallel_size
    if args.seq_length % ranks_per_sample:
        problem = f"not divisible by the {ranks_per_sample} ranks that split a sequence ({layout})"
        fail(f"--seq-length {args.seq_length}: {problem}; choose a multiple")
    ranks_per_sample *= args.pipeline_parallel_size
    layout += f" --pipeline-parallel-size {args.pipeline_parallel_size}"
    if args.ranks % ranks_per_sample:
        problem = f"{args.ranks} ranks are not divisible by {ranks_per_sample}"
        fail(f"{layout}: {problem}; start a multiple of {ranks_per_sample} ranks")
    num_data_ranks = args.ranks // ranks_per_sample
    local_batch_size, remainder = divmod(args.global_batch_size, num_data_ranks)
    if remainder:
        problem = f"not divisible by {num_data_ranks} data-parallel ranks"
        advice = f"choose a multiple, such as {(local_batch_size + 1) * num_data_ranks}"
        fail(f"--global-batch-size {args.global_batch_size}: {problem}; {advice}")
    if num_data_ranks % args.replicas:
        problem = f"{num_data_ranks} data-parallel ranks are not divisible by {args.replicas}"
        fail(f"--replicas {args.replicas}: {problem}; choose a divisor")
    if args.weights_dtype == "bf16" and args.precision == "fp32":
        problem = "weights in bf16 cannot compute in fp32"
        fail(f"--weights-dtype bf16 --precision fp32: {problem}; use --precision bf16")
    sizes = range(1, args.batch_size + 1)
    args.micro_batch_size = max(size for size in sizes if local_batch_size % size == 0)
    args.accumulation = local_batch_size // args.micro_batch_size
    if args.pipeline_parallel_size > 1:
        args.chapter = "07"
        last_chapter(args.tensor_parallel_size)[0].check_schedule(args)
    if args.context_parallel_size > 1:
        args.chapter = "08"
    if args.write_config:
        args.write_config = config_command(args)


def fail(message):
    """Stop because of a user's mistake: print one line on stderr, and exit with status 2."""
    print(f"{Path(__file__).name}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def first_line(error):
    """Return the first line of an error's message, because some messages fill a page."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# ---- the model's shapes ----------------------------------------------------------------------


def load_config(args):
    """Return the configuration of `--model-name` after the changes of `--config`, and its source.

    The source is a text that names the origin of the configuration.
    """
    try:
        config, source = find_config(args.model_name)
    except Exception as error:
        # transformers raises a different type of exception for each kind of bad name.
        problem = first_line(error).rstrip(".:")
        fail(f"--model-name {args.model_name}: {problem}; give a folder, a .json file or a hub id")
    if getattr(config, "quantization_config", None):
        problem = "its weights are quantized; choose a model with bf16 weights"
        fail(f"--model-name {args.model_name}: {problem}")
    # The chapters train only the text part of a multimodal model.
    config = config.get_text_config(decoder=True)
    if not args.config:
        return config, source
    changes = ",".join(args.config)
    try:
        config.update_from_string(changes)
        # Drop layer_types, so that from_dict() derives it from the new number of layers.
        values = config.to_dict()
        values.pop("layer_types", None)
        return config.from_dict(values), f"{source}, with {changes}"
    except Exception as error:
        # transformers raises a different type of exception for each kind of bad value.
        problem = first_line(error).rstrip(".:")
        fail(f"--config {changes}: {problem}; give NAME=VALUE as in the model's config.json")


def find_config(name):
    """Return the configuration of a model and its source, without reading weights.

    The configurations under configs/ take precedence over a download from the hub, so that
    planning needs neither a network nor a login.
    """
    # The chapters build the same tiny model.
    if name == "tiny":
        shape = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
        shape |= {"num_attention_heads": 4, "vocab_size": len(transformers.ByT5Tokenizer())}
        return transformers.LlamaConfig(**shape), "built in"
    if Path(name).exists():
        return AutoConfig.from_pretrained(name), name
    if name.endswith(".json"):
        fail(f"--model-name {name}: file not found; check the path")
    with contextlib.suppress(OSError, ValueError):
        return AutoConfig.from_pretrained(name, local_files_only=True), "the cache of the hub"
    for shape in HERE.glob("configs/*.json"):
        if name.rpartition("/")[2].lower().startswith(shape.stem):
            source = f"{shape.relative_to(HERE.parent)}; the hub was not asked"
            return AutoConfig.from_pretrained(shape), source
    # Without a network, this request fails at once, whereas transformers would retry.
    huggingface_hub.model_info(name, timeout=4)
    return AutoConfig.from_pretrained(name), "the hub"


# Models are compared by identity, so that a model can be the key of a cache.
@dataclass(frozen=True, eq=False)
class Model:
    """Hold the shapes of a model's weights."""

    config: transformers.PretrainedConfig
    # A list for each layer, with the shapes of its weights.
    layers: list
    # The shapes of the weights outside the layers, which FSDP shards as one more group.
    root: list
    # The module that has these weights; it lives on the meta device and uses no memory.
    built: torch.nn.Module

    @property
    def shapes(self):
        """Return the shapes of all weights."""
        return [shape for group in (*self.layers, self.root) for shape in group]

    @property
    def weights(self):
        """Return the number of weights of the model."""
        return numbers(self.shapes)


def numbers(shapes):
    """Return the total number of elements in tensors of these shapes."""
    return sum(map(math.prod, shapes))


def shard_numbers(shapes, ranks):
    """Return the number of elements in rank 0's shards of tensors of these shapes.

    FSDP2 cuts the first dimension into `ranks` chunks of the same size, rounded up. It pads all
    shards to this size for communication: see torch.chunk and _get_dim0_padded_size.
    """
    return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in shapes)


def model_of(config, tp_size=1):
    """Build a model without memory and return its shapes on one of `tp_size` ranks."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    split(model, tp_size)
    return shapes_in(model, model.modules())


def shapes_in(model, modules):
    """Return a Model with the shapes of these modules of the model."""
    modules, layers = list(modules), layers_of(model)
    layers = [module for module in modules if module in layers]
    in_layers = {weight for layer in layers for weight in layer.parameters()}
    direct_weights = (module.parameters(recurse=False) for module in modules)
    # Tied weights occur twice. A dict drops the second occurrence and keeps the order.
    unique_weights = dict.fromkeys(itertools.chain(*direct_weights))
    return Model(
        config=model.config,
        layers=[shapes_of(layer.parameters()) for layer in layers],
        root=shapes_of(weight for weight in unique_weights if weight not in in_layers),
        built=model,
    )


@functools.cache
def split_of(model, tp_size):
    """Return the shapes of a model on one of `tp_size` ranks that split the weights."""
    return model if tp_size == 1 else model_of(model.config, tp_size)


@dataclass(frozen=True)
class Pipeline:
    """Hold the arguments that chapter 08's pipeline functions need, under the same names."""

    model_name: str
    pipeline_parallel_size: int
    pipeline_schedule: str
    num_stages: int
    # check_model() checks only the stages if these sizes are 1; check_split() checks the splits.
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1


@functools.cache
def parts_of(model, tp_size, pipeline):
    """Return a Model for each rank of a pipeline, with weights that `tp_size` ranks split."""
    full_model, ranks = split_of(model, tp_size), pipeline.pipeline_parallel_size
    if ranks == 1:
        return [full_model]
    chapter, _ = last_chapter(tp_size)
    chapter.check_model(pipeline, full_model.built)
    with contextlib.redirect_stdout(None):
        stages = chapter.split_into_stages(pipeline, full_model.built)
    modules_by_rank = [itertools.chain(*stages[rank::ranks]) for rank in range(ranks)]
    return [shapes_in(full_model.built, modules) for modules in modules_by_rank]


def in_flight(schedule, rank, ranks, micro_batches):
    """Return the number of micro-batches whose activations a rank keeps at the same time."""
    limits = {"gpipe": micro_batches, "1f1b": ranks - rank}
    return min(micro_batches, limits.get(schedule, (3 * ranks - 1) / 2 - rank))


def bubble(schedule, ranks, micro_batches):
    """Return the idle share of a pipeline rank's step, by the formula in chapter 07's README."""
    turns = (2 if schedule == "interleaved-1f1b" else 1) * micro_batches
    return (ranks - 1) / (turns + ranks - 1)


def shapes_of(tensors):
    """Return the shapes of tensors, as tuples."""
    return [tuple(local(tensor).shape) for tensor in tensors]


def local(tensor):
    """Return the first rank's part of a tensor, or the tensor itself if it is not split."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@functools.cache
def last_chapter(tp_size):
    """Return chapter 08's script as a module, and a mesh of `tp_size` simulated ranks."""
    script = HERE.parent / "08-context-parallel/train_llm.py"
    spec = importlib.util.spec_from_file_location("chapter_08", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.fail, module.recompute = fail, recomputed
    # A GPU kernel needs no mask in memory, so the stored mask here is a single number.
    module.causal_lower_right = lambda *shape: torch.zeros(()).expand(shape)
    # An all-to-all returns a tensor of the same size, so a local reshape replaces it.
    module.all_to_all = lambda mesh, tensor: torch.cat(tensor.chunk(mesh.size(), 1), 2)
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=4096, store=FakeStore())
    return module, DeviceMesh("cpu", list(range(tp_size)))


def check_supported_model(model, tp_size, context):
    """Stop on models that chapters 05 to 08 reject for these tensor- and context-parallel sizes."""
    args = argparse.Namespace(tensor_parallel_size=tp_size, model_name=model.config.model_type)
    args.context_parallel_size, args.context_parallel_style = context
    # The traced model has only two layers, so parts_of() checks the stages of the full model.
    args.pipeline_parallel_size = 1
    chapter, _ = last_chapter(tp_size)
    with mock.patch.object(chapter, "fail", refuse):
        chapter.check_model(args, model)


class UnsupportedModelError(Exception):
    """A chapter cannot train the model; the message is the chapter's line about it."""


def refuse(message):
    """Raise the chapter's message as an exception, because other chapters may take the model."""
    raise UnsupportedModelError(message)


def split_attention(tp_size, context):
    """Make attention work as on the last of the ranks that split each sequence."""
    chapter, _ = last_chapter(tp_size)
    cp_size, cp_style = context
    styles = {"gather": chapter.gathered_attention, "ulysses": chapter.ulysses_attention}
    # This process is rank 0. The mesh lists it last, because the last rank attends to the most
    # keys.
    with unset_fake_temporarily():
        mesh = DeviceMesh("cpu", [*range(1, cp_size), 0])
    AttentionInterface.register("causal_sdpa", functools.partial(styles[cp_style], mesh))


def split(model, tp_size):
    """Split the weights of a model over `tp_size` ranks in place, as chapters 06 to 08 do."""
    if tp_size > 1:
        chapter, mesh = last_chapter(tp_size)
        chapter.split_matrices(model, model.modules(), mesh)
        model.tie_weights()


def layers_of(model):
    """Return the decoder layers, which share a base class in transformers."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


# ---- activations: two layers, run on fake tensors --------------------------------------------


@dataclass
class Segment:
    """Hold the bytes of tensors by kind in a part of a step: at its start and at its peak."""

    start: Counter = field(default_factory=Counter)
    most: Counter = field(default_factory=Counter)
    # The peak of the bytes without finished gradients. It can occur at a different moment.
    most_besides_gradients: Counter = field(default_factory=Counter)


class Recorder(TorchDispatchMode):
    """Count the bytes of each tensor that an operation creates, until nothing refers to it.

    A view shares the storage of its base tensor, and a storage counts once.
    """

    def __init__(self):
        super().__init__()
        # The keys of the weights' storages, which are not counted.
        self.weights = set()
        # The kind of each counted tensor, by the key of its storage.
        self.kind_of = {}
        self.live = Counter()
        self.segments = {}
        self.begin("before")

    def begin(self, name, kind="activations"):
        """Begin the segment `name`, and count new tensors as tensors of this kind."""
        self.segment = self.segments[name] = Segment()
        self.kind, self.at_start = kind, True
        self.update_peaks()

    def update_peaks(self):
        """Store the live bytes if they exceed the peaks of the segment."""
        live = self.live.items()
        besides_gradients = Counter({kind: size for kind, size in live if kind != "gradients"})
        if self.live.total() > self.segment.most.total():
            self.segment.most = +self.live
        if besides_gradients.total() > self.segment.most_besides_gradients.total():
            self.segment.most_besides_gradients = besides_gradients

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # DTensor and AsyncCollectiveTensor call the operation again, with local tensors.
        if any(issubclass(cls, (DTensor, AsyncCollectiveTensor)) for cls in types):
            return NotImplemented
        # Python frees the arguments of the previous segment after begin(), but before the first
        # operation of the new segment.
        if self.at_start:
            self.segment.start, self.at_start = +self.live, False
        output = func(*args, **(kwargs or {}))
        seen = self.kind_of.keys() | self.weights
        new = [storage for storage in storages(output) if storage._cdata not in seen]
        inputs = storages((args, kwargs))
        is_cast = func.name() == "aten::_to_copy" and inputs[0]._cdata in self.weights
        for storage in new:
            self.count(storage, "cast weights" if is_cast else self.kind)
        if new:
            self.update_peaks()
        return output

    def count(self, storage, kind):
        """Count a storage until Python deletes it."""
        self.kind_of[storage._cdata] = kind
        self.live[kind] += storage.nbytes()
        weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())

    def forget(self, key, size):
        """Stop counting a storage."""
        self.live[self.kind_of.pop(key)] -= size

    def rename(self, tensor, kind):
        """Change the kind of a tensor that is already counted."""
        storage = local(tensor).untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.kind_of:
            self.live[self.kind_of[key]] -= size
            self.live[kind] += size
            self.kind_of[key] = kind


def storages(tree):
    """Return the storages of the tensors among arguments or results."""
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@functools.cache
def trace(model, batch, length, dtype, autocast, recompute, chunked, tp_size, context):
    """Run a step of the model with two layers, and return its segments by name.

    The step has `batch` samples of `length` tokens. The weights have the type `dtype`, as FSDP
    passes them to a layer, or float32 under `autocast`. `tp_size` ranks split the weights.
    `context` has the number of ranks that split each sequence, and the style of attention.
    """
    cp_size, _ = context
    with FakeTensorMode():
        small = small_model(model.config, length, dtype, recompute, chunked, tp_size, context)
        ids = torch.zeros(batch, length, dtype=torch.long)
        inputs = {"input_ids": ids[:, : length // cp_size], "labels": ids, "use_cache": False}
        if tp_size * cp_size > 1:
            inputs["position_ids"] = torch.arange(length // cp_size)[None]
            # On first use, DTensor runs extra operations to learn the shapes of results. Run once
            # before recording, so that they are not counted.
            small(**inputs).loss.backward()
            small.zero_grad()
        record = Recorder()
        watch(small, record)
        with record, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            record.begin("embedding")
            loss = small(**inputs).loss
        with record:
            record.begin("head backward", "logits")
            loss.backward()
            record.begin("end")
    return record.segments


def small_model(config, length, dtype, recompute, chunked, tp_size, context):
    """Build a model with two layers, and change it as the chapters' `build_model` does."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = min(2, config.num_hidden_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.train()
    window = getattr(config, "sliding_window", None) or length
    uses_sdpa = model._supports_attention_backend and model.config._attn_implementation == "sdpa"
    if uses_sdpa and length <= window:
        AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
        model.set_attn_implementation("causal_sdpa")
    cp_size, _ = context
    if chunked:
        check_supported_model(model, tp_size, context)
    if cp_size > 1:
        split_attention(tp_size, context)
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    split(model, tp_size)
    if chunked:
        head = model.get_output_embeddings()
        head.forward = lambda hidden: hidden
        is_split = tp_size * cp_size > 1
        loss = last_chapter(tp_size)[0].chunked_loss if is_split else chunked_loss
        model.loss_function = functools.partial(loss, head)
    if recompute != "none":
        create_contexts = checkpointing.create_selective_checkpoint_contexts
        contexts = functools.partial(create_contexts, keep_products)
        options = {"context_fn": contexts} if recompute == "selective" else {}
        for layer in layers_of(model):
            layer.forward = functools.partial(recomputed, layer.forward, **options)
    return model


def recomputed(function, *args, **options):
    """Call a function without keeping activations, and call it again in the backward pass.

    Fake tensors have no random state to preserve, and a real random state needs almost no memory.
    """
    options |= {"use_reentrant": False, "preserve_rng_state": False}
    return checkpointing.checkpoint(function, *args, **options)


def keep_products(_, operation, *args, **kwargs):
    """Return the policy of `--recompute selective`: save only matrix products and attention."""
    policy = checkpointing.CheckpointPolicy
    is_costly = "mm" in str(operation) or "scaled_dot_product" in str(operation)
    return policy.MUST_SAVE if is_costly else policy.PREFER_RECOMPUTE


def chunked_loss(head, logits, labels, *_, **__):
    """Return the summed loss, computed in chunks as in chapter 05.

    The `logits` are hidden states, because small_model() makes the head return its input.
    """
    targets = F.pad(labels[:, 1:], (0, 1), value=-100)
    hidden_chunks = logits.flatten(0, 1).split(CHUNK_SIZE)
    target_chunks = targets.flatten().split(CHUNK_SIZE)
    total_loss = 0.0
    for chunk in zip(hidden_chunks, target_chunks, strict=True):
        total_loss += recomputed(loss_of_chunk, (head.weight, head.bias), *chunk)
    return total_loss


def loss_of_chunk(weights, hidden, targets):
    """Return the summed loss of a chunk: hidden states [tokens, width], ids [tokens]."""
    logits = F.linear(hidden, *weights)
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def watch(model, record):
    """Add hooks that begin a segment at the borders of each layer, forward and backward."""
    for weight in model.parameters():
        record.weights.add(local(weight).untyped_storage()._cdata)
        weight.register_post_accumulate_grad_hook(lambda w: record.rename(w.grad, "gradients"))

    def before(number, _, args, kwargs):
        record.begin(f"layer {number}")
        hidden = args[0] if args else kwargs["hidden_states"]
        if number == 1:
            hidden.register_hook(lambda _: record.begin("embedding backward"))

    def after(number, _, args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        hidden.register_hook(functools.partial(start_backward, number))
        record.begin("head", "logits")

    def start_backward(number, grad):
        record.rename(grad, "activations")
        record.begin(f"layer {number} backward")

    for number, layer in enumerate(layers_of(model), 1):
        layer.register_forward_pre_hook(functools.partial(before, number), with_kwargs=True)
        layer.register_forward_hook(functools.partial(after, number))


# ---- memory: a step, layer by layer ----------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Hold all values that affect a rank's memory, except the model."""

    chapter: str
    ranks: int
    replicas: int
    bf16: bool
    # The bytes of a number in the shards, and in gradients while ranks reduce them.
    weight_bytes: int
    batch: int  # samples per micro-batch
    length: int  # tokens per sample
    accumulation: int  # micro-batches per step
    reshard: bool
    recompute: str
    offload: bool
    cuda: bool
    size: int  # ranks that split matrices
    # The number of ranks that split each sequence, and their style of attention.
    context: tuple
    pipeline: Pipeline

    @property
    def shards(self):
        """Return the number of FSDP shards of each weight, which is 1 under DDP."""
        ranks = self.ranks // self.replicas // self.size // self.pipeline.pipeline_parallel_size
        return 1 if self.chapter == "02" else ranks

    @property
    def compute_bytes(self):
        """Return the bytes of a number in gathered weights and in their gradients."""
        return 2 if self.bf16 else 4

    @property
    def autocast(self):
        """Return True if autocast casts float32 weights in each operation, and gradients back."""
        return self.chapter == "02" and self.bf16 and self.weight_bytes == 4

    def trace(self, model):
        """Return the segments of this setting's forward and backward passes."""
        dtype = torch.bfloat16 if self.bf16 and not self.autocast else torch.float32
        chunked = self.chapter >= "05"
        options = self.autocast, self.recompute, chunked, self.size, self.context
        return trace(model, self.batch, self.length, dtype, *options)


def setting_of(args, chapter, changes):
    """Return the Setting of the arguments, with these changes to the flags in FLAG_DEFAULTS."""
    flags = FLAG_DEFAULTS | changes
    # From chapter 05 on, the scripts have --recompute and --cpu-offload.
    has_memory_flags = chapter >= "05"
    ranks = args.pipeline_parallel_size if chapter >= "07" else 1
    schedule = args.pipeline_schedule
    return Setting(
        chapter=chapter,
        ranks=args.ranks,
        replicas=args.replicas if chapter != "02" else 1,
        bf16=args.precision == "bf16",
        weight_bytes=2 if args.weights_dtype == "bf16" else 4,
        batch=args.micro_batch_size,
        length=args.seq_length,
        accumulation=args.accumulation,
        reshard=flags["reshard_after_forward"] and ranks == 1,
        recompute=flags["recompute"] if has_memory_flags else "none",
        offload=has_memory_flags and flags["cpu_offload"],
        cuda=args.device != "cpu",
        size=args.tensor_parallel_size if chapter >= "06" else 1,
        context=(args.context_parallel_size, args.context_parallel_style),
        pipeline=Pipeline(
            model_name=args.model_name,
            pipeline_parallel_size=ranks,
            pipeline_schedule=schedule,
            num_stages=ranks * (2 if schedule == "interleaved-1f1b" else 1),
        ),
    )


def state_bytes(model, setting):
    """Return the bytes of weights, gradients and optimizer state in a rank's shards of a Model.

    AdamW keeps two moments for each weight, and a step counter of 4 bytes for each tensor.
    """
    weights = shard_numbers(model.shapes, setting.shards) * setting.weight_bytes
    moments = 2 * weights + 4 * len(model.shapes)
    return {"parameters": weights, "gradients": weights, "optimizer state": moments}


def play(model, setting):
    """Simulate a step on each rank of a pipeline, and return the Step of the fullest rank.

    In the result, `most` has the bytes of each part at the peak, and `when` names that moment.
    """
    ranks = setting.pipeline.pipeline_parallel_size
    step_class = PipelineStep if ranks > 1 else ShardedStep
    if setting.chapter == "02":
        step_class = Step
    steps = [step_class(model, setting, rank) for rank in range(ranks)]
    for step in steps:
        step.play()
    return max(steps, key=lambda step: step.most.total())


class Step:
    """Simulate a training step on one rank, and store the bytes of each part at the peak.

    This class models chapters 02 and 03, which use DDP and autocast. DDP's gradient buckets last
    for the entire run, but only the last micro-step writes its gradients into them. Until then,
    the sums of the gradients of earlier micro-steps are separate tensors.
    """

    # The number of copies of the gradients that a micro-step adds to memory: -1, 0 or 1.
    growth = 0
    # Only the last stage of a pipeline has the head. Without a pipeline, each rank has it.
    has_head = True
    # The number of other micro-batches whose activations the rank keeps at the same time.
    other_micro_batches = 0

    def __init__(self, model, setting, rank=0):
        self.model, self.setting = parts_of(model, setting.size, setting.pipeline)[rank], setting
        self.segments = setting.trace(model)
        self.state = state_bytes(self.model, setting)
        self.depth, self.traced_depth = len(self.model.layers), min(2, len(model.layers))
        last_layer = self.segments[f"layer {self.traced_depth}"]
        self.saved_per_layer = self.segments["head"].start - last_layer.start
        self.held, self.most, self.when = Counter(), Counter(), ""

    def play(self):
        """Simulate the first micro-step, the second and the last."""
        self.held.update(self.state)
        last = self.setting.accumulation
        for number in sorted({1, min(2, last), last}):
            if last > 1:
                self.growth = 1 if number == 1 else -1 if number == last else 0
            self.forward()
            self.backward()
        self.update_peak("AdamW")

    def update_peak(self, when, **temporary):
        """Store this moment if it is the fullest; `temporary` bytes exist at this moment only."""
        total = self.held + Counter(temporary)
        if total.total() > self.most.total():
            self.most, self.when = total, when

    def enter(self, name, number):
        """Hold the activations that exist when the segment `name` of layer `number` starts.

        The run on fake tensors has two layers. Each further layer keeps as much as the second.
        """
        layers_in_trace = self.traced_depth if "head" in name else min(2, number)
        untraced_layers = number - layers_in_trace
        for kind in TRACED_PARTS:
            saved = self.saved_per_layer[kind]
            self.held[kind] = self.segments[name].start[kind] + saved * untraced_layers
            per_micro_batch = self.segments["head"].start[kind]
            per_micro_batch += saved * (self.depth - self.traced_depth)
            self.held[kind] += int(self.other_micro_batches * per_micro_batch)

    def compute(self, when, name):
        """Update the step's peak with the peak of the segment `name`."""
        segment = self.segments[name]
        most = segment.most if self.growth == 1 else segment.most_besides_gradients
        temporary = {kind: most[kind] - segment.start[kind] for kind in TRACED_PARTS}
        if self.growth == 1:
            temporary["whole gradients"] = most["gradients"] - segment.start["gradients"]
        self.update_peak(when, **temporary)

    def forward(self):
        """Simulate the forward pass and the loss."""
        self.compute("embedding", "embedding")
        for number in range(1, self.depth + 1):
            self.enter(traced_layer(number), number)
            self.before_forward(number)
            self.compute(f"forward of layer {number}", traced_layer(number))
        if self.has_head:
            self.enter("head", self.depth)
            self.compute("loss", "head")

    def backward(self):
        """Simulate the backward pass."""
        name, head_gradients = f"{traced_layer(self.depth)} backward", 0
        if self.has_head:
            self.enter("head backward", self.depth)
            self.compute("backward of the loss", "head backward")
            after_head = self.segments[f"layer {self.traced_depth} backward"].start
            head_gradients = after_head["gradients"]
        self.enter(name, self.depth)
        self.add_gradients(head_gradients)
        for number in range(self.depth, 0, -1):
            self.before_backward(number)
            self.compute(f"backward of layer {number}", name)
            name = f"{traced_layer(number - 1)} backward" if number > 1 else "embedding backward"
            self.enter(name, number - 1)
            self.add_gradients(self.gradients_of(number))
            self.reduce(number)
        self.compute("backward of the embedding", name)
        for kind in TRACED_PARTS:
            self.held[kind] = 0
        self.add_gradients(self.gradients_of(0) - head_gradients)
        self.reduce(0)

    def add_gradients(self, size):
        """Add `growth` times `size` bytes of gradients to the held bytes."""
        self.held["whole gradients"] += self.growth * size

    def shapes(self, group):
        """Return the shapes of a group's weights; group 0 is the root, and group N is layer N."""
        return self.model.layers[group - 1] if group else self.model.root

    def gradients_of(self, group):
        """Return the bytes of a group's gradients as the backward pass produces them."""
        size = 4 if self.setting.autocast else self.setting.compute_bytes
        return numbers(self.shapes(group)) * size

    def before_forward(self, number):
        """Simulate the communication before the forward pass of a layer."""

    def before_backward(self, number):
        """Simulate the communication before the backward pass of a layer."""

    def reduce(self, group):
        """Simulate the reduction of a group's gradients across the ranks."""


def traced_layer(number):
    """Return the name of the traced layer that stands for layer `number`."""
    return f"layer {min(2, number)}"


class ShardedStep(Step):
    """Simulate chapters 04 to 08, where FSDP2 gathers a layer's weights and reduces its gradients.

    Buffers are allocated and freed in the order of torch/distributed/fsdp/_fully_shard.
    """

    growth, rounds = 1, 2

    def play(self):
        """Simulate the first micro-step and, if there are more, a second one.

        The second micro-step starts with the gradient shards of the first.
        """
        self.shards_on_device = not (self.setting.offload and self.setting.cuda)
        if self.shards_on_device:
            self.held.update({name: self.state[name] for name in ("parameters", "optimizer state")})
        self.groups_with_gradients = set()
        for _ in range(min(self.rounds, self.setting.accumulation)):
            self.gathered, self.gather_buffers = set(), {}
            self.last_gather_buffer, self.reduce_buffer = 0, 0
            self.gather(0)
            self.copy_out(0, forward=True)
            self.forward()
            self.held["communication"] -= self.last_gather_buffer
            self.backward()
            self.held["communication"] -= self.reduce_buffer
        self.update_peak("AdamW")

    def full_bytes(self, group, bytes_per_number):
        """Return the bytes of a group's full tensors, including FSDP's padding."""
        shards = self.setting.shards
        return shard_numbers(self.shapes(group), shards) * shards * bytes_per_number

    def gather(self, group):
        """Begin an all-gather: hold its output buffer, and its input only for a moment."""
        if group in self.gathered or group in self.gather_buffers:
            return
        bytes_per_number, shards = self.setting.compute_bytes, self.setting.shards
        # A single rank has the full weights already.
        output = self.full_bytes(group, bytes_per_number) if shards > 1 else 0
        # FSDP copies the shard to change its type, or to move it to the GPU.
        copies_shard = bytes_per_number != self.setting.weight_bytes or self.setting.offload
        shard = shard_numbers(self.shapes(group), shards) * bytes_per_number
        input_copy = shard if copies_shard else 0
        # Gloo gathers into a second buffer.
        gloo_copy = 0 if self.setting.cuda else output
        when = f"all-gather of {name_of(group)}"
        self.update_peak(when, communication=output + input_copy + gloo_copy)
        self.held["communication"] += output
        self.gather_buffers[group] = output

    def copy_out(self, group, forward):
        """Wait for an all-gather and copy its output into the weights."""
        if group in self.gathered:
            return
        self.gather(group)
        # In the forward pass, FSDP keeps the previous output buffer until now, so that its
        # copies can overlap with the next all-gather.
        if forward:
            self.held["communication"] -= self.last_gather_buffer
        self.held["gathered weights"] += self.full_bytes(group, self.setting.compute_bytes)
        self.gathered.add(group)
        self.update_peak(f"copy of {name_of(group)}")
        output = self.gather_buffers.pop(group)
        if forward:
            self.last_gather_buffer = output
        else:
            self.held["communication"] -= output

    def free(self, group):
        """Free a group's gathered weights."""
        if group in self.gathered:
            self.held["gathered weights"] -= self.full_bytes(group, self.setting.compute_bytes)
            self.gathered.remove(group)

    def before_forward(self, number):
        if self.setting.reshard and number > 1:
            self.free(number - 1)
        self.copy_out(number, forward=True)

    def before_backward(self, number):
        self.copy_out(number, forward=False)
        # FSDP prefetches the weights of the layer that comes next in the backward pass.
        if number > 1:
            self.gather(number - 1)

    def reduce(self, group):
        """Reduce a group's gradients to shards; keep the input buffer until the next reduction."""
        self.free(group)
        self.held["communication"] -= self.reduce_buffer
        self.reduce_buffer = self.full_bytes(group, self.setting.weight_bytes)
        self.held["communication"] += self.reduce_buffer
        when = f"reduce-scatter of {name_of(group)}"
        self.update_peak(when)
        self.held["whole gradients"] -= self.gradients_of(group)
        shard = self.reduce_buffer // self.setting.shards
        # Gloo reduces in a second buffer.
        uses_gloo = not self.setting.cuda and self.setting.shards > 1
        gloo_copy = self.reduce_buffer if uses_gloo else 0
        self.update_peak(when, communication=shard + gloo_copy)
        if group not in self.groups_with_gradients and self.shards_on_device:
            self.held["gradients"] += shard
        self.groups_with_gradients.add(group)


class PipelineStep(ShardedStep):
    """Simulate a pipeline, where a rank gathers weights and reduces gradients once per step.

    The simulated micro-batch runs while the rank keeps the activations of the largest number of
    other micro-batches, and the gradients of earlier ones. Each micro-batch has its own receive
    buffers: see torch/distributed/pipelining/stage.py.
    """

    rounds = 1

    def __init__(self, model, setting, rank):
        super().__init__(model, setting, rank)
        pipeline, micro_batches = setting.pipeline, setting.accumulation
        ranks = pipeline.pipeline_parallel_size
        self.has_head = rank == ranks - 1
        kept = in_flight(pipeline.pipeline_schedule, rank, ranks, micro_batches)
        self.other_micro_batches = kept - 1
        # Each stage receives hidden states and their gradients, but nothing comes from before the
        # first stage or from after the last one.
        buffers_per_micro_batch = 2 * pipeline.num_stages // ranks - (rank == 0) - self.has_head
        cp_size, _ = setting.context
        tokens = setting.batch * setting.length // cp_size // setting.size
        hidden_bytes = tokens * model.config.hidden_size * setting.compute_bytes
        self.held["communication"] = micro_batches * buffers_per_micro_batch * hidden_bytes
        self.held["whole gradients"] = self.model.weights * setting.weight_bytes

    def reduce(self, group):
        """Add a group's gradients to the sums; the rank reduces the sums at the end of the step."""
        self.held["whole gradients"] -= self.gradients_of(group)


def name_of(group):
    """Return the name of a group of weights that FSDP gathers together."""
    return f"layer {group}" if group else "embedding, norm and output"


def host_memory(model, part, setting, local_ranks, asynchronous):
    """Return the bytes of each part of a node's CPU memory at the peak, and the moment's name.

    At the start, each rank of chapters 02 to 04 builds the entire model in CPU memory. From
    chapter 05 on, a rank builds the root and one layer at a time. Tensors that are offloaded from a
    GPU are in pinned memory. torch rounds the size of each pinned tensor up to a power of two:
    see CachingHostAllocator.h. A normal save copies tensors to pinned memory before it writes
    them, but a save in the background does not: see _state_dict_stager.py.
    """
    # Without GPUs, all tensors share one memory, and the Step counts them.
    if not setting.cuda:
        return {}, "the step"
    state = state_bytes(part, setting)
    shards = [shard_numbers([shape], setting.shards) for shape in part.shapes]
    pinned = sum(1 << (shard * setting.weight_bytes - 1).bit_length() for shard in shards)
    layer = max(map(numbers, model.layers), default=0)
    built_weights = model.weights if setting.chapter < "05" else numbers(model.root) + layer
    start = {"model in the making": built_weights * 4}
    start["parameters"] = pinned if setting.offload else 0
    train = {}
    if setting.offload:
        train |= {"parameters": pinned, "gradients": pinned}
        train["optimizer state"] = state["optimizer state"]
    if asynchronous and setting.chapter >= "05":
        train["copy being saved"] = state["parameters"] + state["optimizer state"]
    elif not setting.offload and setting.chapter != "02":
        # DCP holds its copies of the weights and the two moments until it closes the file.
        train["copy being saved"] = pinned + 2 * pinned
    phases = (start, "the start"), (train, "training")
    fullest, when = max(phases, key=lambda phase: sum(phase[0].values()))
    return {name: size * local_ranks for name, size in fullest.items() if size}, when


# ---- the plan --------------------------------------------------------------------------------


def make_plan(args):
    """Return the plans of the chosen setting and of the settings to try, as a dictionary.

    The dictionary also names the first setting that fits. If no setting fits, it has the number of
    nodes that would be enough.
    """
    config, source = load_config(args)
    max_length = getattr(config, "max_position_embeddings", None) or args.seq_length
    if args.seq_length > max_length:
        problem = f"{args.model_name} takes at most {max_length} tokens"
        fail(f"--seq-length {args.seq_length}: {problem}; choose a shorter length")
    try:
        model = model_of(config)
        candidates = SETTINGS
        # From chapter 06 on, several ranks share a sample. Chapters 02 and 04 would split the batch
        # into different micro-batches, so their settings are left out.
        if args.chapter >= "06":
            names = [name for name in SETTINGS if name >= "05"]
            candidates = {f"{args.chapter}{name[2:]}": SETTINGS[name] for name in names}
        settings = {}
        for name, changes in candidates.items():
            with contextlib.suppress(UnsupportedModelError):
                settings[name] = plan_of(args, model, name[:2], changes)
        chosen_flags = {name: getattr(args, name) for name in FLAG_DEFAULTS}
        chosen_plan = plan_of(args, model, args.chapter, chosen_flags)
    except UnsupportedModelError as error:
        fail(f"chapter {args.chapter}: {error}")
    except Exception as error:
        # Some models compute with values, and fake tensors have only shapes.
        problem = f"cannot run on fake tensors ({first_line(error)})"
        fail(f"--model-name {args.model_name}: {problem}; measure a training run instead")
    first = next((name for name, plan in settings.items() if plan["fits"]), None)
    model_facts = {"name": args.model_name, "source": source}
    model_facts |= {"weights": model.weights, "layers": len(model.layers)}
    return {
        "model": model_facts,
        "asked": chosen_plan,
        "settings": settings,
        "first": first,
        "enough_nodes": None if first else enough_nodes(args, model),
    }


def plan_of(args, model, chapter, changes):
    """Return the plan of one setting as a dictionary, with all sizes in bytes."""
    setting = setting_of(args, chapter, changes)
    step = play(model, setting)
    host, when = host_memory(model, step.model, setting, args.gpus_per_node, args.checkpoint_async)
    gpu_total = step.most.total()
    gpu_room, host_room = args.gpu_memory_gib * GIB, args.host_memory_gib * GIB
    gpu_needs = gpu_total * (1 + args.fragmentation) + args.gpu_overhead_gib * GIB
    host_needs = sum(host.values()) + args.gpus_per_node * args.host_overhead_gib * GIB
    if not setting.cuda:
        gpu_room = host_room / args.gpus_per_node
        gpu_needs = gpu_total + args.host_overhead_gib * GIB
        host_needs = gpu_needs * args.gpus_per_node
    return {
        "gpu": {name: step.most[name] for name in PARTS},
        "gpu_when": step.when,
        "gpu_total": gpu_total,
        "gpu_needs": gpu_needs,
        "gpu_margin": gpu_room - gpu_needs,
        "state": step.state,
        "host": host,
        "host_when": when,
        "host_needs": host_needs,
        "host_margin": host_room - host_needs,
        "fits": gpu_room >= gpu_needs and host_room >= host_needs,
        # A checkpoint has the weights and two moments of all ranks, and a step counter per tensor.
        "checkpoint": 3 * setting.weight_bytes * model.weights + 4 * len(model.shapes),
    }


def enough_nodes(args, model):
    """Return a number of nodes that is enough for SMALLEST_SETTING, or None.

    Try the given number of nodes times 2, 4, 8 and so on, up to 256.
    """
    chapter = max(args.chapter, SMALLEST_SETTING[:2])
    for factor in (2**power for power in range(1, 9)):
        larger = copy.copy(args)
        larger.nodes, larger.ranks = args.nodes * factor, args.ranks * factor
        with contextlib.suppress(UnsupportedModelError):
            if plan_of(larger, model, chapter, SETTINGS[SMALLEST_SETTING])["fits"]:
                return larger.nodes
    return None


# ---- report ----------------------------------------------------------------------------------


def show(args, plan):
    """Print the plan."""
    show_machine(args, plan["model"])
    show_memory(args, plan["asked"])
    show_settings(plan["settings"])
    if plan["first"]:
        print(f"\nthe first that fits: {plan['first']}")
    elif plan["enough_nodes"]:
        last = list(plan["settings"])[-1]
        num_data_ranks = args.global_batch_size // (args.micro_batch_size * args.accumulation)
        num_data_ranks = num_data_ranks * plan["enough_nodes"] // args.nodes
        batch = ""
        if args.global_batch_size % num_data_ranks:
            batch = f", with a global batch that is a multiple of {num_data_ranks}"
        print(f"\nnothing fits; {last} would fit on {plan['enough_nodes']} such nodes{batch}")
    else:
        print("\nnothing fits, on any number of nodes: take larger GPUs or a smaller --seq-length")


def show_machine(args, model):
    """Print the model, the machines and the batch of the plan."""
    print(f"{model['name']}: {model['weights']:,} weights in {model['layers']} layers")
    print(f"shape from: {model['source']}")
    gpus = f"{args.nodes} × {args.gpus_per_node} GPUs of {args.gpu_memory_gib:g} GiB"
    print(f"{gpus}, hosts of {args.host_memory_gib:g} GiB")
    print(
        f"{args.precision}; {args.seq_length} tokens a sample, micro-batch size "
        f"{args.micro_batch_size}, micro-batches per step: {args.accumulation}"
    )
    if args.pipeline_parallel_size > 1:
        schedule, ranks = args.pipeline_schedule, args.pipeline_parallel_size
        idle = bubble(schedule, ranks, args.accumulation)
        print(f"a pipeline of {ranks}, {schedule}: idle for {idle:.1%} of a step at least")


def show_memory(args, plan):
    """Print the memory that the chosen setting needs on a GPU, on a host and on the disk."""
    print(f"\nper GPU, at the fullest moment: {plan['gpu_when']}")
    rows = plan["gpu"] | {"all tensors": plan["gpu_total"]}
    rows["fragmentation"] = plan["gpu_total"] * args.fragmentation
    rows["overhead"] = args.gpu_overhead_gib * GIB
    show_rows(rows | {"margin": plan["gpu_margin"]})
    print(f"\nper host, at the fullest moment: {plan['host_when']}")
    overhead = args.host_overhead_gib * args.gpus_per_node * GIB
    show_rows(plan["host"] | {"overhead": overhead, "margin": plan["host_margin"]})
    print(f"\na checkpoint: {plan['checkpoint'] / 1e9:,.4g} GB")
    if args.cpu_offload and "05" <= args.chapter < "07" and args.accumulation > 1:
        print("one micro-batch is best under offload: a rank waits for later ones' gradients")


def show_rows(rows):
    """Print a line for each name and its number of bytes."""
    for name, size in rows.items():
        print(f"  {name:20}{text_of(size):>16}")


def show_settings(settings):
    """Print a line per setting: its GPU memory, its host memory, and whether it fits."""
    print(f"\n{'setting':38}{'GPU':>13}{'host':>14}")
    for name, plan in settings.items():
        sizes = f"{text_of(plan['gpu_needs']):>13}{text_of(plan['host_needs']):>14}"
        print(f"{name:38}{sizes}  {verdict(plan)}")


def show_line(args, plan):
    """Print in one line whether the chosen setting fits."""
    plan, machines = plan["asked"], f"{args.nodes} × {args.gpus_per_node} GPUs"
    print(
        f"{args.model_name} on {machines} of {args.gpu_memory_gib:g} GiB: {verdict(plan)}; "
        f"a GPU {text_of(plan['gpu_total'])} of tensors, {text_of(plan['gpu_needs'])} with all "
        f"else; a host {text_of(plan['host_needs'])}"
    )


def text_of(size):
    """Return a number of bytes as text: in GiB, or in MiB if it is below 0.1 GiB."""
    if not size:
        return "0"
    if abs(size) < GIB / 10:
        return f"{size / 2**20:,.2f} MiB"
    return f"{size / GIB:,.2f} GiB"


def verdict(plan):
    """Return "fits", or "no" and the names of the memories that are too small."""
    too_small = [name for name in ("gpu", "host") if plan[f"{name}_margin"] < 0]
    return f"no: {', '.join(too_small).replace('gpu', 'GPU')}" if too_small else "fits"


def main():
    """Print the plan; exit with 0 if the chosen setting fits, and with 1 if it does not."""
    args = parse_args()
    # Warnings would hide the error message, which is a single line.
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    plan = make_plan(args)
    if args.json:
        print(json.dumps(plan, indent=1))
    elif args.brief:
        show_line(args, plan)
    else:
        show(args, plan)
    if args.write_config and plan["asked"]["fits"]:
        subprocess.run(args.write_config, check=True)
    sys.exit(0 if plan["asked"]["fits"] else 1)


if __name__ == "__main__":
    main()
