"""Say before you rent GPUs whether a model fits, in which setting, and what takes the memory.

Here:  python 05-large-model/will_it_fit.py --model-name tiny --nodes 1 --gpus-per-node 4
Big:   python 05-large-model/will_it_fit.py @05-large-model/configs/llama-3.1-405b.args \
           --nodes 8 --gpus-per-node 8 --gpu-memory-gib 80 --host-memory-gib 1000

It needs neither weights nor a GPU. The sizes of weights, gradients and optimizer state follow from
their shapes. To find what a layer keeps for its backward, two layers run on fake tensors, which
have shapes but no data. From these a training step is played through, layer by layer; its fullest
moment has to fit. This counts the bytes of tensors only: --gpu-overhead-gib and --fragmentation
stand for the rest. With --tensor-parallel-size, --pipeline-parallel-size or
--context-parallel-size, chapter 08's own script splits these layers, splits all into stages, or
splits sequences; the fullest rank has to fit.
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
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer

HERE = Path(__file__).resolve().parent
MAKER = HERE.parent / "alternative-frameworks/make_config.py"
GIB = 2**30
CHUNK_SIZE = 1024  # tokens whose logits exist at the same time, as in train_llm.py
# Flags that a setting decides, and what they are otherwise.
DECIDED = {"reshard_after_forward": True, "recompute": "none", "cpu_offload": False}
SETTINGS = {  # in the order to try them: each gathers, copies or recomputes more than those before
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
LAST = "05 --cpu-offload --recompute full"  # which takes the least of a GPU
TRACED = ["cast weights", "activations", "logits"]
PARTS = ["parameters", "gradients", "optimizer state", "gathered weights", "whole gradients"]
PARTS += [*TRACED, "communication"]  # of a GPU's memory, from what lasts to what comes and goes
IGNORED = (  # flags of train_llm.py on which no size depends; a file of its arguments has some
    "--dataset-subset --text-column --num-steps --lr --warmup-steps --weight-decay --max-grad-norm "
    "--seed --save-dir --checkpoint-every --keep-checkpoints --eval-every --eval-samples "
    "--log-every --wandb --dist-timeout"
)


# ---- command line ----------------------------------------------------------------------------


def parse_args(argv=None):
    """Return the arguments, with the number of ranks and the batch split as the scripts do."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="all flags of this chapter's train_llm.py are understood, also from @FILE",
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
    """Declare what the plan needs to know of the machines, and what to print."""
    add = parser.add_argument_group("machines").add_argument
    add("--nodes", type=at_least(1), default=1, help="hosts")
    add("--gpus-per-node", type=at_least(1), default=8, help="on each host, one rank each")
    add("--gpu-memory-gib", type=at_least(0.0), default=80.0, help="of each GPU")
    add("--host-memory-gib", type=at_least(0.0), default=1000.0, help="of each host")
    add("--gpu-overhead-gib", type=at_least(0.0), default=3.0, help="CUDA context, NCCL, cuBLAS")
    add("--host-overhead-gib", type=at_least(0.0), default=4.0, help="of each rank: its libraries")
    add("--fragmentation", type=at_least(0.0), default=0.05, help="share lost by the allocator")

    add = parser.add_argument_group("the plan").add_argument
    chapters = "02 04 05 06 07 08".split()
    add("--chapter", choices=chapters, default="05", help="whose exit status it is")
    weights_help = "bf16: weights, gradients and moments in 2 bytes, which no chapter does"
    add("--weights-dtype", choices=["fp32", "bf16"], default="fp32", help=weights_help)
    add("--json", action="store_true", help="print all numbers, in bytes, as JSON")
    add("--brief", action="store_true", help="print one line, of the chosen setting")
    write_help = "if it fits, write the chosen setting for a framework: make_config.py does it"
    add("--write-config", nargs=2, metavar=("deepspeed|accelerate", "FILE"), help=write_help)


def add_training_flags(parser):
    """Declare the flags of train_llm.py; their help is in its own --help."""
    add = functools.partial(parser.add_argument, help=argparse.SUPPRESS)
    add("-m", "--model-name", default="tiny")
    add("--config", nargs="+", default=[])
    add("-s", "--seq-length", type=at_least(2), default=256)
    add("--global-batch-size", type=at_least(1), default=32)
    add("-b", "--batch-size", type=at_least(1), default=8)
    add("--device", choices=["auto", "cpu", "cuda"], default="cuda")  # which need not be here
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
    for name in IGNORED.split():
        add(name)


def config_command(args):
    """Return the command with which make_config.py writes the chosen setting for a framework."""
    kind, path = args.write_config
    words = [kind, "--output", path, "--ranks", args.ranks, "--precision", args.precision]
    words += ["--recompute", args.recompute] + ["--offload-params", "cpu"] * args.cpu_offload
    if kind == "deepspeed":
        if args.chapter == "02":
            fail("--write-config deepspeed --chapter 02: ZeRO shards, 02 does not; take 04 or 05")
        words += ["--global-batch-size", args.global_batch_size, "--batch-size", args.batch_size]
        words += ["--max-grad-norm", args.max_grad_norm] if args.max_grad_norm else []
        words += ["--stage", 3 if args.reshard_after_forward else 2]
        words += ["--offload-optimizer", "cpu"] * args.cpu_offload
    elif kind == "accelerate":
        words += ["--nodes", args.nodes, *(["--strategy", "ddp"] if args.chapter == "02" else [])]
        words += ["--no-reshard-after-forward"] * (not args.reshard_after_forward)
    else:
        fail(f"--write-config {kind}: not a framework that it knows; take deepspeed or accelerate")
    split = args.tensor_parallel_size * args.pipeline_parallel_size * args.context_parallel_size
    if split * args.replicas > 1 or args.recompute == "selective" or args.weights_dtype == "bf16":
        fail(f"--write-config {kind}: it has no such splits, replicas, --recompute or bf16 moments")
    return [sys.executable, str(MAKER), *map(str, words)]


def at_least(minimum):
    """Return an argument type: numbers like `minimum` that are not below it."""

    def number(text):
        value = type(minimum)(text)
        if not minimum <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, not {text}")
        return value

    number.__name__ = type(minimum).__name__  # argparse's word for what is not a number
    return number


def check(args):
    """Stop where the script would, and split the batch as it does."""
    args.ranks, size = args.nodes * args.gpus_per_node, args.tensor_parallel_size
    args.chapter = "06" if size > 1 else args.chapter
    layout = f"--tensor-parallel-size {size} --context-parallel-size {args.context_parallel_size}"
    size *= args.context_parallel_size
    if args.seq_length % size:
        problem = f"not divisible by {size}, the ranks of a sequence ({layout})"
        fail(f"--seq-length {args.seq_length}: {problem}; choose a multiple")
    size *= args.pipeline_parallel_size
    layout += f" --pipeline-parallel-size {args.pipeline_parallel_size}"
    if args.ranks % size:
        problem = f"{args.ranks} ranks are not divisible by {size}"
        fail(f"{layout}: {problem}; start a multiple")
    groups = args.ranks // size
    per_rank, rest = divmod(args.global_batch_size, groups)
    if rest:
        problem = f"not divisible by {groups} data-parallel ranks; choose a multiple"
        fail(f"--global-batch-size {args.global_batch_size}: {problem}: {(per_rank + 1) * groups}")
    if groups % args.replicas:
        problem = f"{groups} data-parallel ranks are not divisible by it"
        fail(f"--replicas {args.replicas}: {problem}; choose a divisor")
    if args.weights_dtype == "bf16" and args.precision == "fp32":
        fail("--weights-dtype bf16 with --precision fp32: weights of 2 bytes compute in 2 bytes")
    args.micro_batch_size = max(n for n in range(1, args.batch_size + 1) if per_rank % n == 0)
    args.accumulation = per_rank // args.micro_batch_size
    if args.pipeline_parallel_size > 1:  # which stops if these are too few
        args.chapter = "07"
        last_chapter(args.tensor_parallel_size)[0].check_schedule(args)
    args.chapter = "08" if args.context_parallel_size > 1 else args.chapter
    args.write_config = args.write_config and config_command(args)


def fail(message):
    """Stop because of what the user gave us: one line on stderr, exit status 2."""
    print(f"{Path(__file__).name}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def first_line(error):
    """Return the first line of an error's message, as some messages fill a page."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# ---- the model's shapes ----------------------------------------------------------------------


def load_config(args):
    """Return the configuration of `--model-name`, changed by `--config`, and where it is from."""
    try:
        config, source = find_config(args.model_name)
    except Exception as error:  # transformers has dozens of kinds
        told = first_line(error).rstrip(".:")
        fail(f"--model-name {args.model_name}: {told}; is it a folder, a config.json or a hub id?")
    if not args.config:
        return config, source
    changes = ",".join(args.config)
    try:  # as the chapters do it
        config.update_from_string(changes)
        values = config.to_dict()
        values.pop("layer_types", None)  # which follow from the number of layers
        return config.from_dict(values), f"{source}, with {changes}"
    except Exception as error:  # each wrong type in a configuration has a kind of its own
        fail(f"--config {changes}: {first_line(error)}")


def find_config(name):
    """Return the configuration that `name` stands for, and where it is from; no weights are read.

    A shape under configs/ comes before the hub, so that planning needs neither network nor login.
    """
    if name == "tiny":  # as in the chapters
        shape = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
        shape |= {"num_attention_heads": 4, "vocab_size": len(transformers.ByT5Tokenizer())}
        return transformers.LlamaConfig(**shape), "built in"
    if Path(name).exists():
        return AutoConfig.from_pretrained(name), name
    if name.endswith(".json"):
        fail(f"--model-name {name}: there is no such file")
    with contextlib.suppress(OSError, ValueError):
        return AutoConfig.from_pretrained(name, local_files_only=True), "the cache of the hub"
    for shape in HERE.glob("configs/*.json"):
        if name.rpartition("/")[2].lower().startswith(shape.stem):
            source = f"{shape.relative_to(HERE.parent)}; the hub was not asked"
            return AutoConfig.from_pretrained(shape), source
    huggingface_hub.model_info(name, timeout=4)  # fails at once, where transformers retries
    return AutoConfig.from_pretrained(name), "the hub"


@dataclass(frozen=True, eq=False)  # compared by identity, which makes it a key of a cache
class Model:
    """The shapes of a model's weights."""

    config: transformers.PretrainedConfig
    layers: list  # of each layer, the shapes of its weights
    root: list  # the shapes of those outside of layers, which FSDP shards as one more group
    built: torch.nn.Module  # which has these weights, without memory

    @property
    def shapes(self):
        """Return the shapes of all weights."""
        return [shape for group in (*self.layers, self.root) for shape in group]

    @property
    def weights(self):
        """Return how many numbers the model has."""
        return numbers(self.shapes)


def numbers(shapes):
    """Return how many numbers tensors of these shapes hold."""
    return sum(map(math.prod, shapes))


def shard_numbers(shapes, ranks):
    """Return how many numbers of such tensors rank 0 holds, and as many are sent for each rank.

    FSDP2 cuts the first dimension into `ranks` chunks and pads all to the first one's size, which
    is the size divided by `ranks`, rounded up: torch.chunk and _get_dim0_padded_size.
    """
    return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in shapes)


def model_of(config, size=1):
    """Return the shapes of a model, built without memory; of a rank's part if `size` split it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    split(model, size)
    return shapes_in(model, model.modules())


def shapes_in(model, modules):
    """Return the shapes of some of a model's modules, as a Model."""
    modules, layers = list(modules), layers_of(model)
    layers = [part for part in modules if part in layers]
    inside = {weight for layer in layers for weight in layer.parameters()}
    own = dict.fromkeys(weight for part in modules for weight in part.parameters(recurse=False))
    return Model(
        config=model.config,
        layers=[shapes_of(layer.parameters()) for layer in layers],
        root=shapes_of(weight for weight in own if weight not in inside),
        built=model,
    )


@functools.cache
def split_of(model, size):
    """Return the shapes of a model of which `size` ranks split the weights."""
    return model if size == 1 else model_of(model.config, size)


@dataclass(frozen=True)
class Pipeline:
    """How layers are split into stages, by chapter 07's names; one stage without a pipeline."""

    model_name: str
    pipeline_parallel_size: int
    pipeline_schedule: str
    num_stages: int
    tensor_parallel_size: int = 1  # so that check_model() checks the stages only
    context_parallel_size: int = 1


@functools.cache
def parts_of(model, size, pipeline):
    """Return the shapes of what each rank of a pipeline has of weights that `size` ranks split."""
    whole, ranks = split_of(model, size), pipeline.pipeline_parallel_size
    if ranks == 1:
        return [whole]
    chapter, _ = last_chapter(size)
    chapter.check_model(pipeline, whole.built)
    with contextlib.redirect_stdout(None):
        stages = chapter.split_into_stages(pipeline, whole.built)
    of_ranks = [itertools.chain(*stages[rank::ranks]) for rank in range(ranks)]
    return [shapes_in(whole.built, modules) for modules in of_ranks]


def in_flight(schedule, rank, ranks, count):
    """Return of how many micro-batches, of `count`, a rank keeps the activations at once."""
    most = {"gpipe": count, "1f1b": ranks - rank}
    return min(count, most.get(schedule, (3 * ranks - 1) / 2 - rank))


def bubble(schedule, ranks, count):
    """Return during which share of a step the ranks of a pipeline are idle: chapter 07's README."""
    turns = (2 if schedule == "interleaved-1f1b" else 1) * count
    return (ranks - 1) / (turns + ranks - 1)


def shapes_of(tensors):
    """Return the shapes of tensors, as tuples."""
    return [tuple(local(tensor).shape) for tensor in tensors]


def local(tensor):
    """Return what the first rank has of a tensor that may be split."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@functools.cache
def last_chapter(size):
    """Return chapter 08's script as a module, and a mesh of `size` ranks that need not be there."""
    script = HERE.parent / "08-context-parallel/train_llm.py"
    spec = importlib.util.spec_from_file_location("chapter_08", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.fail, module.recompute = fail, recomputed
    # on GPUs no mask is made; and an all-to-all gives back as many numbers as it takes
    module.causal_lower_right = lambda *shape: torch.zeros(()).expand(shape)
    module.all_to_all = lambda mesh, tensor: torch.cat(tensor.chunk(mesh.size(), 1), 2)
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=4096, store=FakeStore())
    return module, DeviceMesh("cpu", list(range(size)))


def check_split(model, size, context):
    """Stop where chapter 08 would, if `size` ranks split weights, and those of `context` tokens."""
    args = argparse.Namespace(tensor_parallel_size=size, model_name=model.config.model_type)
    args.context_parallel_size, args.context_parallel_style = context
    args.pipeline_parallel_size = 1  # a model of two layers says nothing about stages
    last_chapter(size)[0].check_model(args, model)


def split_attention(size, context):
    """Let models attend as the last of the ranks that have parts of each sequence."""
    chapter, _ = last_chapter(size)
    styles = {"gather": chapter.gathered_attention, "ulysses": chapter.ulysses_attention}
    with unset_fake_temporarily():
        mesh = DeviceMesh("cpu", [*range(1, context[0]), 0])  # rank 0, which this is, comes last
    AttentionInterface.register("causal_sdpa", functools.partial(styles[context[1]], mesh))


def split(model, size):
    """Split the weights of a model over `size` ranks in place, as chapters 06 and 07 do."""
    if size > 1:
        chapter, mesh = last_chapter(size)
        chapter.split_matrices(model, model.modules(), mesh)
        model.tie_weights()


def layers_of(model):
    """Return the decoder layers, which in transformers share a base class."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


# ---- activations: two layers, run on fake tensors --------------------------------------------


@dataclass
class Segment:
    """A part of a step: bytes of tensors by kind, at its start and when it is fullest."""

    start: Counter = field(default_factory=Counter)
    most: Counter = field(default_factory=Counter)
    most_besides: Counter = field(default_factory=Counter)  # all but finished gradients


class Recorder(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make, until nothing refers to them.

    A view has the storage of the tensor that it is a view of, and is not counted again.
    """

    def __init__(self):
        super().__init__()
        self.weights = set()  # storages, which are not counted
        self.kinds = {}  # of the storages that are
        self.live = Counter()
        self.segments = {}
        self.begin("before")

    def begin(self, name, kind="activations"):
        """From here on, count for the segment `name`; new tensors are of this kind."""
        self.now = self.segments[name] = Segment()
        self.kind, self.fresh = kind, True
        self.look()

    def look(self):
        """Remember the fullest moments."""
        besides = Counter({kind: size for kind, size in self.live.items() if kind != "gradients"})
        if self.live.total() > self.now.most.total():
            self.now.most = +self.live
        if besides.total() > self.now.most_besides.total():
            self.now.most_besides = besides

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # it comes again, with what this rank has of the tensors
        if self.fresh:  # by now, what the last segment was called with is forgotten
            self.now.start, self.fresh = +self.live, False
        out = func(*args, **(kwargs or {}))
        counted = self.kinds.keys() | self.weights
        new = [each for each in storages(out) if each._cdata not in counted]
        read = storages((args, kwargs))
        cast = func.name() == "aten::_to_copy" and read[0]._cdata in self.weights
        for storage in new:
            self.count(storage, "cast weights" if cast else self.kind)
        if new:
            self.look()
        return out

    def count(self, storage, kind):
        """Count a storage from now on, until it is gone."""
        self.kinds[storage._cdata] = kind
        self.live[kind] += storage.nbytes()
        weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())

    def forget(self, key, size):
        self.live[self.kinds.pop(key)] -= size

    def rename(self, tensor, kind):
        """Count a tensor that was counted already as of this kind instead."""
        storage = local(tensor).untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.kinds:
            self.live[self.kinds[key]] -= size
            self.live[kind] += size
            self.kinds[key] = kind


def storages(tree):
    """Return the storages of the tensors among arguments or results."""
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@functools.cache
def trace(model, batch, length, dtype, autocast, recompute, chunked, size, context):
    """Return the segments of a step of the model with two layers, from name to Segment.

    `batch` samples of `length` tokens; weights of type `dtype`, as FSDP hands them to the layer, or
    float32 under `autocast`; `size` ranks split them, and those of `context` each sequence.
    """
    with FakeTensorMode():
        small = small_model(model.config, length, dtype, recompute, chunked, size, context)
        ids = torch.zeros(batch, length, dtype=torch.long)
        given = {"input_ids": ids[:, : length // context[0]], "labels": ids, "use_cache": False}
        if size * context[0] > 1:
            given["position_ids"] = torch.arange(length // context[0])[None]
            small(**given).loss.backward()  # at first, DTensor tries operations to learn the shapes
            small.zero_grad()
        record = Recorder()
        watch(small, record)
        with record, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            record.begin("embedding")
            loss = small(**given).loss
        with record:
            record.begin("head backward", "logits")
            loss.backward()
            record.begin("end")
    return record.segments


def small_model(config, length, dtype, recompute, chunked, size, context):
    """Return a model with two layers, changed as the chapters' `build_model` changes theirs."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = min(2, config.num_hidden_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.train()
    window = getattr(config, "sliding_window", None) or length
    plain = model._supports_attention_backend and model.config._attn_implementation == "sdpa"
    if plain and length <= window:
        AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
        model.set_attn_implementation("causal_sdpa")
    if size * context[0] > 1:
        check_split(model, size, context)
    if context[0] > 1:
        split_attention(size, context)
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    split(model, size)
    if chunked:
        head = model.get_output_embeddings()
        head.forward = lambda hidden: hidden
        loss = last_chapter(size)[0].chunked_loss if size * context[0] > 1 else chunked_loss
        model.loss_function = functools.partial(loss, head)
    if recompute != "none":
        contexts = checkpointing.create_selective_checkpoint_contexts
        keep = functools.partial(contexts, keep_products)
        options = {"context_fn": keep} if recompute == "selective" else {}
        for layer in layers_of(model):
            layer.forward = functools.partial(recomputed, layer.forward, **options)
    return model


def recomputed(function, *args, **options):
    """Call a function, keep none of its activations, and call it again in the backward.

    Fake tensors have no random state to preserve, and it would take next to no memory.
    """
    options |= {"use_reentrant": False, "preserve_rng_state": False}
    return checkpointing.checkpoint(function, *args, **options)


def keep_products(_, operation, *args, **kwargs):
    """Choose what `--recompute selective` keeps: matrix products and attention are costly."""
    policy = checkpointing.CheckpointPolicy
    costly = "mm" in str(operation) or "scaled_dot_product" in str(operation)
    return policy.MUST_SAVE if costly else policy.PREFER_RECOMPUTE


def chunked_loss(head, logits, labels, *_, **__):
    """Return the summed loss as chapter 05 does: `logits` are hidden states, chunk by chunk."""
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
    """Let the recorder know where each layer begins and ends, forward and backward."""
    for weight in model.parameters():
        record.weights.add(local(weight).untyped_storage()._cdata)
        weight.register_post_accumulate_grad_hook(lambda w: record.rename(w.grad, "gradients"))

    def before(number, _, args, kwargs):
        record.begin(f"layer {number}")
        hidden = args[0] if args else kwargs["hidden_states"]
        if number == 1:
            hidden.register_hook(lambda _: record.begin("embedding backward"))

    def after(number, _, args, out):
        hidden = out[0] if isinstance(out, tuple) else out
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
    """What decides how much memory a rank needs, apart from the model."""

    chapter: str
    ranks: int
    replicas: int
    bf16: bool
    weight_bytes: int  # of a number in the shards, and while gradients are reduced
    batch: int  # samples of a micro-batch
    length: int  # tokens of a sample
    accumulation: int  # micro-steps of a step
    reshard: bool
    recompute: str
    offload: bool
    cuda: bool
    size: int  # of a group that splits layers
    context: tuple  # how many ranks split each sequence, and how they attend
    pipeline: Pipeline

    @property
    def shards(self):
        """Return over how many ranks FSDP splits a copy of the model, or a group's part of it."""
        ranks = self.ranks // self.replicas // self.size // self.pipeline.pipeline_parallel_size
        return 1 if self.chapter == "02" else ranks

    @property
    def compute_bytes(self):
        """Return the bytes of a number in gathered weights and in their gradients."""
        return 2 if self.bf16 else 4

    @property
    def autocast(self):
        """Return whether each operation casts float32 weights for itself, and gradients back."""
        return self.chapter == "02" and self.bf16 and self.weight_bytes == 4

    def trace(self, model):
        """Return the segments of this setting's forward and backward."""
        dtype = torch.bfloat16 if self.bf16 and not self.autocast else torch.float32
        how = self.autocast, self.recompute, self.chapter >= "05", self.size, self.context
        return trace(model, self.batch, self.length, dtype, *how)


def setting_of(args, chapter, changes):
    """Return the Setting of the arguments, with these changes of the flags in DECIDED."""
    flags = DECIDED | changes
    own, ranks = chapter >= "05", args.pipeline_parallel_size if chapter >= "07" else 1
    recompute, schedule = flags["recompute"] if own else "none", args.pipeline_schedule
    stages = ranks * (2 if schedule == "interleaved-1f1b" else 1)
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
        recompute=recompute,
        offload=own and flags["cpu_offload"],
        cuda=args.device != "cpu",
        size=args.tensor_parallel_size if chapter >= "06" else 1,
        context=(args.context_parallel_size, args.context_parallel_style),
        pipeline=Pipeline(args.model_name, ranks, schedule, stages),
    )


def state_bytes(part, setting):
    """Return the bytes of weights, gradients and optimizer state that a rank holds of its part.

    AdamW has two moments of each weight, and of each tensor the number of steps, in 4 bytes.
    """
    weights = shard_numbers(part.shapes, setting.shards) * setting.weight_bytes
    moments = 2 * weights + 4 * len(part.shapes)
    return {"parameters": weights, "gradients": weights, "optimizer state": moments}


def play(model, setting):
    """Return the fullest rank's Step, played: `most` is the bytes by part, `when` the moment."""
    ranks = setting.pipeline.pipeline_parallel_size
    kind = Step if setting.chapter == "02" else PipelineStep if ranks > 1 else ShardedStep
    steps = [kind(model, setting, rank) for rank in range(ranks)]
    for step in steps:
        step.play()
    return max(steps, key=lambda step: step.most.total())


class Step:
    """Plays a training step on rank 0, and remembers what was held at its fullest moment.

    This is a step of chapters 02 and 03: DDP under autocast. Its buckets of gradients last, but
    only the last micro-step's gradients are made in them. Those that earlier micro-steps add up
    are separate tensors until then.
    """

    growth = 0  # -1, 0 or 1: how many copies of the gradients a micro-step adds to what is held
    has_head, others = True, 0  # micro-batches whose activations are kept besides

    def __init__(self, model, setting, rank=0):
        self.model, self.setting = parts_of(model, setting.size, setting.pipeline)[rank], setting
        self.segments = setting.trace(model)
        self.state = state_bytes(self.model, setting)
        self.depth, self.traced = len(self.model.layers), min(2, len(model.layers))
        self.saved = self.segments["head"].start - self.segments[f"layer {self.traced}"].start
        self.held, self.most, self.when = Counter(), Counter(), ""

    def play(self):
        """Play the first micro-step, one more and the last."""
        self.held.update(self.state)
        steps = self.setting.accumulation
        for number in sorted({1, min(2, steps), steps}):
            if steps > 1:
                self.growth = 1 if number == 1 else -1 if number == steps else 0
            self.forward()
            self.backward()
        self.look("AdamW")

    def look(self, when, **more):
        """Remember this moment if there was no fuller one; `more` is gone right after it."""
        now = self.held + Counter(more)
        if now.total() > self.most.total():
            self.most, self.when = now, when

    def enter(self, name, number):
        """Hold the activations that are there before the segment `name` of layer `number`.

        Two layers were traced. All above the second keep as much as it does.
        """
        more = number - (self.traced if "head" in name else min(2, number))
        for kind in TRACED:
            kept = self.segments["head"].start[kind] + self.saved[kind] * (self.depth - self.traced)
            self.held[kind] = self.segments[name].start[kind] + self.saved[kind] * more
            self.held[kind] += int(self.others * kept)

    def compute(self, when, name):
        """Look at the fullest moment of a segment that was entered."""
        segment = self.segments[name]
        most = segment.most if self.growth == 1 else segment.most_besides
        adds = {kind: most[kind] - segment.start[kind] for kind in TRACED}
        if self.growth == 1:
            adds["whole gradients"] = most["gradients"] - segment.start["gradients"]
        self.look(when, **adds)

    def forward(self):
        """Play the forward pass and the loss."""
        self.compute("embedding", "embedding")
        for number in range(1, self.depth + 1):
            self.enter(traced(number), number)
            self.before_forward(number)
            self.compute(f"forward of layer {number}", traced(number))
        if self.has_head:
            self.enter("head", self.depth)
            self.compute("loss", "head")

    def backward(self):
        """Play the backward pass."""
        name, of_head = f"{traced(self.depth)} backward", 0
        if self.has_head:
            self.enter("head backward", self.depth)
            self.compute("backward of the loss", "head backward")
            of_head = self.segments[f"layer {self.traced} backward"].start["gradients"]
        self.enter(name, self.depth)
        self.add_gradients(of_head)
        for number in range(self.depth, 0, -1):
            self.before_backward(number)
            self.compute(f"backward of layer {number}", name)
            name = f"{traced(number - 1)} backward" if number > 1 else "embedding backward"
            self.enter(name, number - 1)
            self.add_gradients(self.gradients_of(number))
            self.reduce(number)
        self.compute("backward of the embedding", name)
        for kind in TRACED:
            self.held[kind] = 0
        self.add_gradients(self.gradients_of(0) - of_head)
        self.reduce(0)

    def add_gradients(self, made):
        """Hold the gradients that a backward made, if not in memory that is there anyway."""
        self.held["whole gradients"] += self.growth * made

    def shapes(self, group):
        """Return the shapes of a group's weights: 0 is the root, then come the layers."""
        return self.model.layers[group - 1] if group else self.model.root

    def gradients_of(self, group):
        """Return the bytes of a group's gradients as a backward makes them."""
        size = 4 if self.setting.autocast else self.setting.compute_bytes
        return numbers(self.shapes(group)) * size

    def before_forward(self, number):
        """Do what comes before a layer's forward."""

    def before_backward(self, number):
        """Do what comes before a layer's backward."""

    def reduce(self, group):
        """Add up a group's gradients over the ranks."""


def traced(number):
    """Return the traced layer that stands for layer `number`."""
    return f"layer {min(2, number)}"


class ShardedStep(Step):
    """Chapters 04 to 08: FSDP2 gathers a layer for its forward and backward, reduces after it.

    The order in which buffers come and go is that of torch/distributed/fsdp/_fully_shard.
    """

    growth, rounds = 1, 2

    def play(self):
        """Play the first micro-step and, if there is one, another, which finds gradients there."""
        self.shards_here = not (self.setting.offload and self.setting.cuda)
        if self.shards_here:
            self.held.update({name: self.state[name] for name in ("parameters", "optimizer state")})
        self.has_shards = set()
        for _ in range(min(self.rounds, self.setting.accumulation)):
            self.gathered, self.in_flight, self.copied, self.reduced = set(), {}, 0, 0
            self.gather(0)
            self.copy_out(0, forward=True)
            self.forward()
            self.held["communication"] -= self.copied
            self.backward()
            self.held["communication"] -= self.reduced
        self.look("AdamW")

    def whole(self, group, size):
        """Return the bytes of a group's whole tensors, padded, with so many bytes a number."""
        return shard_numbers(self.shapes(group), self.setting.shards) * self.setting.shards * size

    def gather(self, group):
        """Begin an all-gather: its output is there, its input for a moment only."""
        if group in self.gathered or group in self.in_flight:
            return
        size, shards = self.setting.compute_bytes, self.setting.shards
        out = self.whole(group, size) if shards > 1 else 0  # one rank has all there is
        own = shard_numbers(self.shapes(group), shards)
        cast = own * size if size != self.setting.weight_bytes or self.setting.offload else 0
        gloo = 0 if self.setting.cuda else out  # which gathers into a copy
        self.look(f"all-gather of {name_of(group)}", communication=out + cast + gloo)
        self.held["communication"] += out
        self.in_flight[group] = out

    def copy_out(self, group, forward):
        """Wait for an all-gather and copy what it brought into the weights."""
        if group in self.gathered:
            return
        self.gather(group)
        if forward:  # until then the last one's buffer is kept, so that the copies may overlap
            self.held["communication"] -= self.copied
        self.held["gathered weights"] += self.whole(group, self.setting.compute_bytes)
        self.gathered.add(group)
        self.look(f"copy of {name_of(group)}")
        out = self.in_flight.pop(group)
        if forward:
            self.copied = out
        else:
            self.held["communication"] -= out

    def free(self, group):
        """Give a group's gathered weights back."""
        if group in self.gathered:
            self.held["gathered weights"] -= self.whole(group, self.setting.compute_bytes)
            self.gathered.remove(group)

    def before_forward(self, number):
        if self.setting.reshard and number > 1:
            self.free(number - 1)
        self.copy_out(number, forward=True)

    def before_backward(self, number):
        self.copy_out(number, forward=False)
        if number > 1:  # FSDP begins to gather the layer before, by itself
            self.gather(number - 1)

    def reduce(self, group):
        """Reduce a group's gradients to shards; the input buffer lasts until the next one."""
        self.free(group)
        self.held["communication"] -= self.reduced
        self.reduced = self.whole(group, self.setting.weight_bytes)
        self.held["communication"] += self.reduced
        self.look(f"reduce-scatter of {name_of(group)}")
        self.held["whole gradients"] -= self.gradients_of(group)
        shard = self.reduced // self.setting.shards
        gloo = 0 if self.setting.cuda or self.setting.shards == 1 else self.reduced
        self.look(f"reduce-scatter of {name_of(group)}", communication=shard + gloo)
        if group not in self.has_shards and self.shards_here:
            self.held["gradients"] += shard
        self.has_shards.add(group)


class PipelineStep(ShardedStep):
    """Chapter 07, where a rank of a pipeline gathers its weights and reduces gradients once a step.

    Played is a micro-batch while most others are kept and the gradients of earlier ones are there.
    What is received has a buffer for each micro-batch: torch/distributed/pipelining/stage.py.
    """

    rounds = 1

    def __init__(self, model, setting, rank):
        super().__init__(model, setting, rank)
        count, schedule = setting.accumulation, setting.pipeline.pipeline_schedule
        ranks = setting.pipeline.pipeline_parallel_size
        self.has_head = rank == ranks - 1
        self.others = in_flight(schedule, rank, ranks, count) - 1
        received = count * (2 * setting.pipeline.num_stages // ranks - (rank == 0) - self.has_head)
        tokens = setting.batch * setting.length // setting.context[0] // setting.size
        hidden = tokens * model.config.hidden_size
        self.held["communication"] = received * hidden * setting.compute_bytes
        self.held["whole gradients"] = self.model.weights * setting.weight_bytes

    def reduce(self, group):
        """Add a group's gradients to those that are there; in the end, they are reduced."""
        self.held["whole gradients"] -= self.gradients_of(group)


def name_of(group):
    """Return what to call a group of weights that are gathered together."""
    return f"layer {group}" if group else "embedding, norm and output"


def host_memory(model, part, setting, local_ranks, asynchronous):
    """Return what a host holds at its fullest, by part, in bytes, and when that is.

    To start, chapters 02 to 04 make the whole model in each rank's memory, and later ones the root
    and one layer at a time. What is offloaded to a CPU for a GPU lies in pinned memory, of which
    torch takes a power of two for each tensor: CachingHostAllocator.h. So does what a save copies
    before it writes, but not the copies of a save in the background: _state_dict_stager.py.
    """
    if not setting.cuda:
        return {}, "the step"  # a CPU has one memory for all
    state = state_bytes(part, setting)
    shards = [shard_numbers([shape], setting.shards) for shape in part.shapes]
    pinned = sum(1 << (shard * setting.weight_bytes - 1).bit_length() for shard in shards)
    layer = max(map(numbers, model.layers), default=0)
    made = model.weights if setting.chapter < "05" else numbers(model.root) + layer
    start = {"model in the making": made * 4, "parameters": pinned if setting.offload else 0}
    train = {}
    if setting.offload:
        train |= {"parameters": pinned, "gradients": pinned}
        train["optimizer state"] = state["optimizer state"]
    if asynchronous and setting.chapter >= "05":
        train["copy being saved"] = state["parameters"] + state["optimizer state"]
    elif not setting.offload and setting.chapter != "02":  # DCP holds it until the file is closed
        train["copy being saved"] = pinned + 2 * pinned
    fullest, when = max((start, "the start"), (train, "training"), key=lambda x: sum(x[0].values()))
    return {name: size * local_ranks for name, size in fullest.items() if size}, when


# ---- the plan --------------------------------------------------------------------------------


def make_plan(args):
    """Return the plan as a dictionary: of the chosen setting, of all, and the first that fits."""
    config, source = load_config(args)
    longest = getattr(config, "max_position_embeddings", None) or args.seq_length
    if args.seq_length > longest:
        fail(f"--seq-length {args.seq_length}: {args.model_name} takes at most {longest} tokens")
    try:
        model = model_of(config)
        tried = SETTINGS
        if args.chapter >= "06":  # in which a rank takes other samples than in those before
            tried = [name for name in SETTINGS if name >= "05"]
            tried = {f"{args.chapter}{name[2:]}": SETTINGS[name] for name in tried}
        settings = {name: plan_of(args, model, name[:2], tried[name]) for name in tried}
        asked = plan_of(args, model, args.chapter, {name: getattr(args, name) for name in DECIDED})
    except Exception as error:  # of any model there is, some compute with values, not shapes alone
        fail(f"--model-name {args.model_name}: cannot be run on shapes alone: {first_line(error)}")
    first = next((name for name, plan in settings.items() if plan["fits"]), None)
    about = {"name": args.model_name, "source": source}
    return {
        "model": about | {"weights": model.weights, "layers": len(model.layers)},
        "asked": asked,
        "settings": settings,
        "first": first,
        "enough_nodes": None if first else enough_nodes(args, model),
    }


def plan_of(args, model, chapter, changes):
    """Return all that is known of one setting, as a dictionary; sizes are in bytes."""
    setting = setting_of(args, chapter, changes)
    step = play(model, setting)
    host, when = host_memory(model, step.model, setting, args.gpus_per_node, args.checkpoint_async)
    gpu = step.most.total()
    room, host_room = args.gpu_memory_gib * GIB, args.host_memory_gib * GIB
    needs = gpu * (1 + args.fragmentation) + args.gpu_overhead_gib * GIB
    host_needs = sum(host.values()) + args.gpus_per_node * args.host_overhead_gib * GIB
    if not setting.cuda:
        room = host_room / args.gpus_per_node
        needs = gpu + args.host_overhead_gib * GIB
        host_needs = needs * args.gpus_per_node
    return {
        "gpu": {name: step.most[name] for name in PARTS},
        "gpu_when": step.when,
        "gpu_total": gpu,
        "gpu_needs": needs,
        "gpu_margin": room - needs,
        "state": step.state,
        "host": host,
        "host_when": when,
        "host_needs": host_needs,
        "host_margin": host_room - host_needs,
        "fits": room >= needs and host_room >= host_needs,
        # of all ranks: weights, two moments, and of each tensor the number of steps
        "checkpoint": 3 * setting.weight_bytes * model.weights + 4 * len(model.shapes),
    }


def enough_nodes(args, model):
    """Return on how many nodes, 2, 4, 8 and so on times as many, the last setting fits, or None."""
    for factor in (2**power for power in range(1, 9)):
        more = copy.copy(args)
        more.nodes, more.ranks = args.nodes * factor, args.ranks * factor
        if plan_of(more, model, max(args.chapter, LAST[:2]), SETTINGS[LAST])["fits"]:
            return more.nodes
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
        groups = args.global_batch_size // (args.micro_batch_size * args.accumulation)
        groups = groups * plan["enough_nodes"] // args.nodes
        batch = f", and a batch that divides by {groups}" if args.global_batch_size % groups else ""
        print(f"\nnothing fits; {last} would on {plan['enough_nodes']} such nodes{batch}")
    else:
        print("\nnothing fits, on any number of nodes: take larger GPUs or a smaller --seq-length")


def show_machine(args, model):
    """Print what is planned."""
    print(f"{model['name']}: {model['weights']:,} weights in {model['layers']} layers")
    print(f"shape from: {model['source']}")
    gpus = f"{args.nodes} × {args.gpus_per_node} GPUs of {args.gpu_memory_gib:g} GiB"
    print(f"{gpus}, hosts of {args.host_memory_gib:g} GiB")
    print(
        f"{args.precision}; {args.seq_length} tokens a sample, micro-batch size "
        f"{args.micro_batch_size}, micro-batches per step: {args.accumulation}"
    )
    if args.pipeline_parallel_size > 1:
        how = args.pipeline_schedule, args.pipeline_parallel_size, args.accumulation
        print(f"a pipeline of {how[1]}, {how[0]}: idle for {bubble(*how):.1%} of a step at least")


def show_memory(args, asked):
    """Print what the chosen setting takes on a GPU, on a host and on the disk."""
    print(f"\nper GPU, at the fullest moment: {asked['gpu_when']}")
    rows = asked["gpu"] | {"all tensors": asked["gpu_total"]}
    rows["fragmentation"] = asked["gpu_total"] * args.fragmentation
    rows["overhead"] = args.gpu_overhead_gib * GIB
    show_rows(rows | {"margin": asked["gpu_margin"]})
    print(f"\nper host, at the fullest moment: {asked['host_when']}")
    overhead = args.host_overhead_gib * args.gpus_per_node * GIB
    show_rows(asked["host"] | {"overhead": overhead, "margin": asked["host_margin"]})
    print(f"\na checkpoint: {asked['checkpoint'] / 1e9:,.4g} GB")
    if args.cpu_offload and "05" <= args.chapter < "07" and args.accumulation > 1:
        print("one micro-batch is best under offload: a rank waits for later ones' gradients")


def show_rows(rows):
    """Print names and bytes."""
    for name, size in rows.items():
        print(f"  {name:20}{text_of(size):>16}")


def show_settings(settings):
    """Print a line per setting: what it takes, and whether it fits."""
    print(f"\n{'setting':38}{'GPU':>13}{'host':>14}")
    for name, plan in settings.items():
        sizes = f"{text_of(plan['gpu_needs']):>13}{text_of(plan['host_needs']):>14}"
        print(f"{name:38}{sizes}  {verdict(plan)}")


def show_line(args, plan):
    """Print whether the chosen setting fits."""
    asked, machines = plan["asked"], f"{args.nodes} × {args.gpus_per_node} GPUs"
    print(
        f"{args.model_name} on {machines} of {args.gpu_memory_gib:g} GiB: {verdict(asked)}; "
        f"a GPU {text_of(asked['gpu_total'])} of tensors, {text_of(asked['gpu_needs'])} with all "
        f"else; a host {text_of(asked['host_needs'])}"
    )


def text_of(size):
    """Return bytes as GiB, or as MiB where that would say nothing."""
    if not size:
        return "0"
    if abs(size) < GIB / 10:
        return f"{size / 2**20:,.2f} MiB"
    return f"{size / GIB:,.2f} GiB"


def verdict(plan):
    """Return whether a setting fits, and what is too small if not."""
    short = [name for name in ("gpu", "host") if plan[f"{name}_margin"] < 0]
    return f"no: {', '.join(short).replace('gpu', 'GPU')}" if short else "fits"


def main():
    """Print the plan; exit with 0 if the chosen setting fits, and with 1 if not."""
    args = parse_args()
    warnings.simplefilter("ignore")  # what fails is reported in one line
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
