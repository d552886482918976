"""Say before you rent GPUs whether a model fits, in which setting, and what takes the memory.

Here:  python 05-large-model/will_it_fit.py --model-name tiny --nodes 1 --gpus-per-node 4
Big:   python 05-large-model/will_it_fit.py @05-large-model/configs/llama-3.1-405b.args \
           --nodes 8 --gpus-per-node 8 --gpu-memory-gib 80 --host-memory-gib 1000

Neither weights nor a GPU are needed. Weights, gradients and optimizer state follow from the shapes.
What a layer keeps for its backward is found by running one layer on tensors that have shapes and no
data. Then one training step is played in slow motion, and the fullest moment is what has to fit.
All bytes are of tensors; what else takes memory is in --gpu-overhead-gib and --fragmentation.
"""

import argparse
import ast
import contextlib
import copy
import functools
import json
import logging
import math
import os
import shlex
import sys
import urllib.error
import urllib.request
import warnings
import weakref
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    ByT5Tokenizer,
    LlamaConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

HERE = Path(__file__).resolve().parent
GIB = 2**30
SETTINGS = {  # what to try first: each gathers, copies or computes more than those before
    "02": ("02", {}),
    "04 --no-reshard-after-forward": ("04", {"reshard_after_forward": False}),
    "04": ("04", {}),
    "05": ("05", {}),
    "05 --recompute selective": ("05", {"recompute": "selective"}),
    "05 --recompute full": ("05", {"recompute": "full"}),
    "05 --cpu-offload": ("05", {"cpu_offload": True}),
    "05 --cpu-offload --recompute selective": (
        "05",
        {"cpu_offload": True, "recompute": "selective"},
    ),
    "05 --cpu-offload --recompute full": ("05", {"cpu_offload": True, "recompute": "full"}),
}
DECIDED = {"reshard_after_forward": True, "recompute": "none", "cpu_offload": False}  # by a setting
PARTS = [  # of a GPU's memory, from what lasts to what comes and goes
    "parameters",
    "gradients",
    "optimizer state",
    "gathered weights",
    "whole gradients",
    "cast weights",
    "activations",
    "logits",
    "communication",
]
KINDS = ["cast weights", "activations", "logits"]  # of what is traced, besides gradients


# ---- command line ----------------------------------------------------------------------------


def parse_args(argv=None):
    """Return the plan's arguments, together with those of the chapter's script."""
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
    add = parser.add_argument_group("the chapter's flags").add_argument
    for names, options in flags_of(script_of("05")):
        add(*names, **options)
    args = parser.parse_args(argv)
    args.precision = {"auto": "fp32" if args.device == "cpu" else "bf16"}.get(
        args.precision, args.precision
    )
    check(args)
    return args


def add_plan_flags(parser):
    """Declare what the plan needs to know of machines, and of itself."""
    add = parser.add_argument_group("machines").add_argument
    add("--nodes", type=at_least(1), default=1, help="hosts")
    add("--gpus-per-node", type=at_least(1), default=8, help="on each host, one rank each")
    add("--gpu-memory-gib", type=at_least(0.0), default=80.0, help="of each GPU")
    add("--host-memory-gib", type=at_least(0.0), default=1000.0, help="of each host")
    add("--gpu-overhead-gib", type=at_least(0.0), default=3.0, help="CUDA context, NCCL, cuBLAS")
    add("--host-overhead-gib", type=at_least(0.0), default=4.0, help="of each rank: its libraries")
    add("--fragmentation", type=at_least(0.0), default=0.05, help="lost by the allocator, a part")

    add = parser.add_argument_group("speeds, of which the estimate of time is made").add_argument
    add("--gpu-tflops", type=at_least(0.001), default=989.0, help="dense bf16 TFLOP/s of a GPU")
    add("--gpu-fp32-tflops", type=at_least(0.001), default=67.0, help="the same, in float32")
    add("--gpu-efficiency", type=at_least(0.001), nargs=2, default=[0.5, 0.75],
        metavar=("LOW", "HIGH"), help="part of it that matrix products reach")  # fmt: skip
    add("--gpu-bandwidth-gbs", type=at_least(0.001), default=3350.0, help="of a GPU's own memory")
    add("--nvlink-gbs", type=at_least(0.001), default=400.0, help="a GPU sends inside its node")
    add("--network-gbs", type=at_least(0.001), default=50.0, help="a GPU's share of the network")
    add("--pcie-gbs", type=at_least(0.001), default=50.0, help="between a GPU and its host")
    add("--pageable-gbs", type=at_least(0.001), default=6.0, help="to host memory that is pageable")
    add("--cpu-adam-gbs", type=at_least(0.001), default=200.0, help="a host's memory, in AdamW")
    add("--disk-gbs", type=at_least(0.001), default=5.0, help="all ranks together write")

    add = parser.add_argument_group("the plan").add_argument
    add("--chapter", choices=["02", "04", "05"], default="05", help="whose exit status it is")
    add("--weights-dtype", choices=["fp32", "bf16"], default="fp32",
        help="bf16: weights, gradients and moments in 2 bytes, which no chapter does")  # fmt: skip
    add("--json", action="store_true", help="print all numbers, in bytes and seconds, as JSON")
    add("--brief", action="store_true", help="print one line, of the asked setting")
    add("--plot", metavar="FILE.png", help="draw what each setting takes")


def flags_of(script):
    """Return the flags that a chapter's script declares: a list of (names, argparse's options)."""
    try:
        nodes = list(ast.walk(ast.parse(script.read_text())))
    except (OSError, SyntaxError) as error:
        fail(f"cannot read the flags of {script}: {error}")
    [may_be_zero] = (
        ast.literal_eval(node.value)
        for node in nodes
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "may_be_zero"
    )
    calls = (each for each in nodes if isinstance(each, ast.Call))
    calls = [each for each in calls if getattr(each.func, "id", None) == "add"]
    return [([word.value for word in call.args], options_of(call, may_be_zero)) for call in calls]


def options_of(call, may_be_zero):
    """Return the options of one flag; those that only a run of the script could say are left out.

    Numbers are at least 1, but for those of these names.
    """
    options = {"help": argparse.SUPPRESS}  # train_llm.py --help has it
    flag = call.args[-1].value
    for word in call.keywords:
        if word.arg == "action":
            named = isinstance(word.value, ast.Name)
            options["action"] = argparse.BooleanOptionalAction if named else word.value.value
        elif word.arg == "type":
            least = flag.removeprefix("--").replace("-", "_") not in may_be_zero
            options["type"] = at_least({"int": int, "float": float}[word.value.id](least))
        elif word.arg != "help":
            with contextlib.suppress(ValueError):
                options[word.arg] = ast.literal_eval(word.value)
    if flag == "--device":
        options["default"] = "cuda"  # which need not be here
    return options


def at_least(minimum):
    """Return an argument type: numbers like `minimum` that are not below it."""

    def number(text):
        value = type(minimum)(text)
        if not minimum <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, not {text}")
        return value

    number.__name__ = type(minimum).__name__  # which argparse shows for what is no number at all
    return number


def script_of(chapter, nodes=1):
    """Return the path of a chapter's script; on several nodes, chapter 03 stands for 02."""
    name = "03" if chapter == "02" and nodes > 1 else chapter
    found = [HERE / "train_llm.py"] if name == "05" else HERE.parent.glob(f"{name}-*/train_llm.py")
    return next(iter(found), HERE.parent / f"{name}-*/train_llm.py")


def check(args):
    """Stop where the script would, and split the batch as it does."""
    args.ranks = args.nodes * args.gpus_per_node
    per_rank, rest = divmod(args.global_batch_size, args.ranks)
    if rest:
        fail(
            f"--global-batch-size {args.global_batch_size} does not divide by {args.ranks} ranks; "
            f"take {(per_rank + 1) * args.ranks}"
        )
    if args.ranks % args.replicas:
        fail(f"--replicas {args.replicas} does not divide {args.ranks} ranks into equal groups")
    if args.gpu_efficiency != sorted(args.gpu_efficiency) or args.gpu_efficiency[1] > 1:
        fail("--gpu-efficiency takes two numbers, LOW and HIGH, and 1 is all of --gpu-tflops")
    if args.plot and Path(args.plot).suffix not in (".png", ".svg", ".pdf"):
        fail(f"--plot {args.plot}: name a .png, .svg or .pdf file")
    if args.weights_dtype == "bf16" and args.precision == "fp32":
        fail("--weights-dtype bf16 with --precision fp32: weights of 2 bytes compute in 2 bytes")
    batches = [n for n in range(1, min(per_rank, args.batch_size) + 1) if per_rank % n == 0]
    args.micro_batch_size, args.accumulation = batches[-1], per_rank // batches[-1]


def fail(message):
    """Stop because of what the user gave us: one line on stderr, exit status 2."""
    print(f"{Path(__file__).name}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


# ---- the model's shapes ----------------------------------------------------------------------


def load_config(args):
    """Return the configuration of `--model-name`, changed by `--config`, and from where it is."""
    config, source = find_config(args.model_name)
    if not args.config:
        return config, source
    changes = ",".join(args.config)
    try:  # as the chapters do it
        config.update_from_string(changes)
        values = config.to_dict()
        values.pop("layer_types", None)  # which follow from the number of layers
        config = config.from_dict(values)
    except Exception as error:  # each wrong type in a configuration has a kind of its own
        fail(f"--config {changes}: {first_line(error)}")
    return config, f"{source}, with {changes}"


def find_config(name):
    """Return the configuration of `--model-name`, and from where it is; no weights are read."""
    path = Path(name)
    if name == "tiny":
        return tiny_config(), "built in"
    if path.suffix == ".json" and not path.exists():
        fail(f"--model-name {name}: there is no such file")
    if path.exists():
        return read_config(name, path), str(path)
    with contextlib.suppress(OSError, ValueError):
        return read_config(name, name, local_files_only=True), "the cache of the hub"
    if (shape := shipped_shape(name)) is not None:
        where = f"{shape.relative_to(HERE.parent)}, the published shape; the hub was not asked"
        return read_config(name, shape), where
    check_hub(name)
    return read_config(name, name), "the hub"


def check_hub(name):
    """Stop within seconds if the hub cannot be reached: its own client tries for half a minute."""
    if os.environ.get("HF_HUB_OFFLINE", "0") != "0":
        return
    try:
        urllib.request.urlopen(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=4)
    except urllib.error.HTTPError:
        return  # it answers
    except (OSError, ValueError) as error:
        fail(
            f"--model-name {name}: it is no folder and not in the cache, and the hub cannot be "
            f"reached: {error}; name a folder or a config.json"
        )


def read_config(name, path, **options):
    """Return the configuration at `path`; unless only the cache is asked, errors end the plan."""
    try:
        return AutoConfig.from_pretrained(path, **options)
    except Exception as error:  # transformers has dozens of kinds
        if options:
            raise OSError from error
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        fail(f"--model-name {name}: {first} Is it a folder, a config.json or a hub id?")


def tiny_config():
    """Return the configuration that the chapters call `tiny`."""
    shape = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
    return LlamaConfig(**shape, num_attention_heads=4, vocab_size=len(ByT5Tokenizer()))


def shipped_shape(name):
    """Return the file among configs/ whose model a hub id names, or None."""
    wanted = name.rpartition("/")[2].lower()
    shapes = sorted(HERE.glob("configs/*.json"), key=lambda path: -len(path.stem))
    return next((path for path in shapes if wanted.startswith(path.stem)), None)


@dataclass(frozen=True, eq=False)
class Model:
    """The shapes of a model's weights: a list per layer, and one of the root, which is the rest."""

    config: transformers.PretrainedConfig
    layers: list
    root: list
    head: int  # numbers in the output layer's matrix
    tied: bool  # whether that is the embedding, too
    width: int  # of all attention heads together
    vocabulary: int
    layer_class: str

    @property
    def weights(self):
        """Return how many numbers the model has."""
        return sum(map(numbers, [*self.layers, self.root]))


def numbers(shapes):
    """Return how many numbers tensors of these shapes hold."""
    return sum(map(math.prod, shapes))


def shard_numbers(shapes, ranks):
    """Return how many numbers of such tensors rank 0 holds, and as many are sent for each rank.

    FSDP2 cuts the first dimension into `ranks` chunks and pads all to the first one's size, which
    is the size divided by `ranks`, rounded up: torch.chunk and _get_dim0_padded_size.
    """
    return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in shapes)


def model_of(config):
    """Return the shapes of a configuration's model, which is built without memory for weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    layers = layers_of(model)
    inside = [[tuple(weight.shape) for weight in layer.parameters()] for layer in layers]
    ids = {id(weight) for layer in layers for weight in layer.parameters()}
    rest = [tuple(weight.shape) for weight in model.parameters() if id(weight) not in ids]
    head = model.get_output_embeddings().weight
    heads = config.num_attention_heads
    return Model(
        config=config,
        layers=inside,
        root=rest,
        head=head.numel(),
        tied=head is model.get_input_embeddings().weight,
        width=heads * (getattr(config, "head_dim", None) or config.hidden_size // heads),
        vocabulary=config.vocab_size,
        layer_class=type(layers[0]).__name__,
    )


def layers_of(model):
    """Return the decoder layers: transformers names their class as one not to be split."""
    return [
        part for part in model.modules() if type(part).__name__ in (model._no_split_modules or ())
    ]


# ---- activations: two layers, run on shapes alone --------------------------------------------


@dataclass
class Segment:
    """A part of a step: bytes of tensors by kind, at its start and when it is fullest."""

    start: Counter = field(default_factory=Counter)
    most: Counter = field(default_factory=Counter)
    most_besides: Counter = field(default_factory=Counter)  # all but finished gradients
    traffic: int = 0  # bytes that all but matrix products read and write


class Recorder(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make, until nothing refers to them.

    What is a view of another tensor has the same storage, and is not counted again.
    """

    def __init__(self):
        super().__init__()
        self.kinds, self.weights, self.live = {}, {}, Counter()
        self.segments, self.now, self.kind = {}, Segment(), "activations"
        self.fresh = True

    def begin(self, name, kind="activations"):
        """From here on, count for the segment `name`; new tensors are of this kind."""
        self.now = self.segments[name] = Segment()
        self.kind, self.fresh = kind, True
        self.look()

    def look(self):
        """Remember the fullest moments."""
        total = sum(self.live.values())
        besides = total - self.live["gradients"]
        if total > sum(self.now.most.values()):
            self.now.most = +self.live
        if besides > sum(self.now.most_besides.values()):
            self.now.most_besides = self.live - Counter(gradients=self.live["gradients"])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.fresh:  # by now, what the last segment was called with is forgotten
            self.now.start, self.fresh = +self.live, False
        out = func(*args, **(kwargs or {}))
        storages = [tensor.untyped_storage() for tensor in self.tensors(out)]
        new = [each for each in storages if each._cdata not in self.kinds | self.weights]
        taken = [tensor.untyped_storage() for tensor in self.tensors((args, kwargs))]
        cast = func.name() == "aten::_to_copy" and taken[0]._cdata in self.weights
        for storage in new:
            self.count(storage, "cast weights" if cast else self.kind)
        if new:
            self.look()
            if not any(word in func.name() for word in ("mm", "attention")):
                self.now.traffic += sum(each.nbytes() for each in {*new, *taken})
        return out

    def tensors(self, tree):
        """Return the tensors among arguments or results."""
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

    def count(self, storage, kind):
        """Count a storage from now on, until it is gone."""
        self.kinds[storage._cdata] = kind
        self.live[kind] += storage.nbytes()
        weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())

    def forget(self, key, size):
        self.live[self.kinds.pop(key)] -= size

    def rename(self, tensor, kind):
        """Let a tensor that was counted as something else be of this kind."""
        storage = tensor.untyped_storage()
        if storage._cdata in self.kinds:
            self.live[self.kinds[storage._cdata]] -= storage.nbytes()
            self.kinds[storage._cdata] = kind
            self.live[kind] += storage.nbytes()


@functools.cache
def trace(model, batch, length, dtype, autocast, recompute, chunked):
    """Return the segments of a step of the model with two layers, from name to Segment.

    `batch` samples of `length` tokens; weights of type `dtype`, as FSDP hands them to the layer, or
    float32 under `autocast`. Tensors are fake: torch knows their shapes and types, and that is all.
    """
    with FakeTensorMode(), warnings_off():
        small = small_model(model.config, length, dtype, recompute, chunked)
        ids = torch.zeros(batch, length, dtype=torch.long)
        record = Recorder()
        watch(small, record)
        with record, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            record.begin("embedding")
            loss = small(input_ids=ids, labels=ids, use_cache=False).loss
        with record:
            record.begin("head backward", "logits")
            loss.backward()
            record.begin("end")
    return record.segments


@contextlib.contextmanager
def warnings_off():
    """Let torch and transformers say nothing: what fails is reported in one line."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def small_model(config, length, dtype, recompute, chunked):
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
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    if chunked:
        head = model.get_output_embeddings()
        head.forward = lambda hidden: hidden
        model.loss_function = functools.partial(chunked_loss, head)
    for layer in layers_of(model) if recompute != "none" else ():
        layer.forward = functools.partial(recomputed, layer.forward, recompute)
    return model


def recomputed(forward, recompute, *args, **kwargs):
    """Run a layer's forward, and again in its backward, but for what `selective` keeps."""
    aten, options = torch.ops.aten, {}
    if recompute == "selective":
        attention = ("cudnn", "efficient", "flash")
        kept = [getattr(aten, f"_scaled_dot_product_{name}_attention") for name in attention]
        kept += [aten.mm, aten.addmm, aten.bmm, aten._scaled_dot_product_flash_attention_for_cpu]
        kept = [overloads.default for overloads in kept]
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, kept)
    # fake tensors have no random state to preserve, and it takes no memory worth the name
    options |= {"use_reentrant": False, "preserve_rng_state": False}
    return checkpoint(forward, *args, **options, **kwargs)


def chunked_loss(head, logits, labels, *_, **__):
    """Return the loss as chapter 05 does: `logits` are hidden states, taken chunk by chunk."""
    chunk = chunk_size()
    hidden, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    sums = [
        checkpoint(loss_of_chunk, head, *each, use_reentrant=False, preserve_rng_state=False)
        for each in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.stack(sums).sum() / len(targets)


def loss_of_chunk(head, hidden, targets):
    """Return the summed loss of a chunk: hidden states [tokens, width], ids [tokens]."""
    logits = F.linear(hidden, head.weight, head.bias)
    return F.cross_entropy(logits.float(), targets, reduction="sum")


@functools.cache
def chunk_size():
    """Return how many tokens chapter 05 makes logits of at a time."""
    body = ast.parse(script_of("05").read_text()).body
    found = [node.value.value for node in body if isinstance(node, ast.Assign)
             and node.targets[0].id == "CHUNK"]  # fmt: skip
    return found[0] if found else 1024


def watch(model, record):
    """Let the recorder know where each layer begins and ends, forward and backward."""
    for name, weight in model.named_parameters():
        record.weights[weight.untyped_storage()._cdata] = name
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


# ---- memory: one step in slow motion ---------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What decides how much memory a rank needs, apart from the model."""

    chapter: str
    ranks: int
    replicas: int
    bf16: bool
    weight_bytes: int  # of a number in the shards: 4 in all chapters
    batch: int
    length: int
    accumulation: int
    reshard: bool
    recompute: str
    offload: bool
    prefetch: int
    cuda: bool

    @property
    def shards(self):
        """Return over how many ranks a copy of the model is split."""
        return 1 if self.chapter == "02" else self.ranks // self.replicas

    @property
    def compute_bytes(self):
        """Return the bytes of a number in gathered weights and in their gradients."""
        return 2 if self.bf16 else 4

    @property
    def reduce_bytes(self):
        """Return the bytes of a number while gradients are reduced: float32, as the shards are."""
        return self.weight_bytes

    @property
    def autocast(self):
        """Return whether each operation casts float32 weights for itself, and gradients back."""
        return self.chapter == "02" and self.bf16 and self.weight_bytes == 4

    def trace(self, model):
        """Return the segments of this setting's forward and backward."""
        dtype = torch.bfloat16 if self.bf16 and not self.autocast else torch.float32
        chunked = self.chapter == "05"
        return trace(model, self.batch, self.length, dtype, self.autocast, self.recompute, chunked)


def setting_of(args, chapter, changes):
    """Return the Setting of the arguments, with these changes of what a setting decides."""
    flags = DECIDED | changes
    own = chapter == "05"
    return Setting(
        chapter=chapter,
        ranks=args.ranks,
        replicas=args.replicas if chapter != "02" else 1,
        bf16=args.precision == "bf16",
        weight_bytes=2 if args.weights_dtype == "bf16" else 4,
        batch=args.micro_batch_size,
        length=args.seq_length,
        accumulation=args.accumulation,
        reshard=flags["reshard_after_forward"],
        recompute=flags["recompute"] if own else "none",
        offload=own and flags["cpu_offload"],
        prefetch=args.prefetch if own else 0,
        cuda=args.device == "cuda",
    )


def state_bytes(model, setting):
    """Return the bytes of weights, gradients and optimizer state that rank 0 holds.

    AdamW has two moments of each weight, and of each tensor the number of steps, in 4 bytes.
    """
    tensors = [shape for shapes in (*model.layers, model.root) for shape in shapes]
    weights = shard_numbers(tensors, setting.shards) * setting.weight_bytes
    return {
        "parameters": weights,
        "gradients": weights,
        "optimizer state": 2 * weights + 4 * len(tensors),
    }


class Step:
    """Plays a training step on rank 0, and remembers what was held at its fullest moment."""

    def __init__(self, model, setting):
        self.model, self.setting = model, setting
        self.segments = setting.trace(model)
        self.state = state_bytes(model, setting)
        self.depth = len(model.layers)
        self.saved = (
            self.segments["head"].start - self.segments[f"layer {min(2, self.depth)}"].start
        )
        self.held, self.most, self.when = Counter(), Counter(), ""

    def look(self, when, **more):
        """Remember this moment if there was no fuller one; `more` is gone right after it."""
        now = self.held + Counter({name.replace("_", " "): size for name, size in more.items()})
        if sum(now.values()) > sum(self.most.values()):
            self.most, self.when = now, when

    def before(self, name, number):
        """Hold the activations that are there before a segment of a layer, or of the whole model.

        Two layers were traced. All above the second keep as much as it does.
        """
        more = max(0, number - 2)
        for kind in KINDS:
            self.held[kind] = self.segments[name].start[kind] + self.saved[kind] * more

    def compute(self, when, name):
        """Look at the fullest moment of a segment, before which `before` was called."""
        segment = self.segments[name]
        most = segment.most if self.keeps_gradients() else segment.most_besides
        adds = {kind: most[kind] - segment.start[kind] for kind in KINDS}
        if self.keeps_gradients():
            adds["whole gradients"] = most["gradients"] - segment.start["gradients"]
        self.look(when, **adds)

    def keeps_gradients(self):
        """Return whether gradients need memory of their own before anything is done with them."""
        raise NotImplementedError

    def forward(self):
        """Play the forward pass and the loss."""
        self.compute("embedding", "embedding")
        for number in range(1, self.depth + 1):
            name = f"layer {min(2, number)}"
            self.before(name, number)
            self.before_forward(number)
            self.compute(f"forward of layer {number}", name)
            self.after_forward(number)
        self.before("head", self.depth)
        self.compute("loss", "head")

    def backward(self):
        """Play the backward pass."""
        self.before("head backward", self.depth)
        self.compute("backward of the loss", "head backward")
        name = f"layer {min(2, self.depth)} backward"
        of_head = self.segments[name].start["gradients"]
        self.before(name, self.depth)
        self.loss_is_done(of_head)
        for number in range(self.depth, 0, -1):
            self.before_backward(number)
            self.compute(f"backward of layer {number}", name)
            name = f"layer {min(2, number - 1)} backward" if number > 1 else "embedding backward"
            self.before(name, number - 1)
            self.after_backward(number, self.gradients_of(number))
        self.compute("backward of the embedding", name)
        for kind in KINDS:
            self.held[kind] = 0
        self.end_of_backward(self.gradients_of(0) - of_head, of_head)

    def shapes(self, group):
        """Return the shapes of a group's weights: 0 is the root, then come the layers."""
        return self.model.layers[group - 1] if group else self.model.root

    def gradients_of(self, group):
        """Return the bytes of a group's gradients as a backward makes them."""
        size = 4 if self.setting.autocast else self.setting.compute_bytes
        return numbers(self.shapes(group)) * size

    def before_forward(self, number):
        """Do what comes before a layer's forward."""

    def after_forward(self, number):
        """Do what comes after a layer's forward."""

    def loss_is_done(self, made):
        """Do what comes after the backward of the loss, which made so many bytes of gradients."""

    def before_backward(self, number):
        """Do what comes before a layer's backward."""

    def after_backward(self, number, made):
        """Do what comes after a layer's backward."""

    def end_of_backward(self, made, made_before):
        """Do what comes after the last backward, the root's: part of it was made by the loss."""


class ReplicatedStep(Step):
    """Chapters 02 and 03: DDP under autocast.

    Its buckets of gradients last, but only the last micro-step's gradients go there. Those that
    earlier micro-steps add up lie elsewhere until then.
    """

    def play(self):
        """Play the first micro-step, one more and the last."""
        self.held.update(self.state)
        steps = self.setting.accumulation
        for number in sorted({1, min(2, steps), steps}):
            self.growth = 0 if 1 < number < steps or steps == 1 else 1 if number == 1 else -1
            self.forward()
            self.backward()
        self.look("AdamW")
        return self

    def keeps_gradients(self):
        return self.growth == 1

    def loss_is_done(self, made):
        self.held["whole gradients"] += self.growth * made

    def after_backward(self, number, made):
        self.held["whole gradients"] += self.growth * made

    def end_of_backward(self, made, made_before):
        self.held["whole gradients"] += self.growth * made


class ShardedStep(Step):
    """Chapters 04 and 05: FSDP2 gathers a layer for its forward and backward, reduces after it.

    The order in which buffers come and go is that of torch/distributed/fsdp/_fully_shard.
    """

    def play(self):
        """Play the first micro-step and, if there is one, another, which finds gradients there."""
        if not self.setting.offload or not self.setting.cuda:
            self.held.update({name: self.state[name] for name in ("parameters", "optimizer state")})
        self.has_shards = set()
        for _ in range(min(2, self.setting.accumulation)):
            self.gathered, self.in_flight, self.copied, self.reduced = set(), {}, 0, 0
            self.gather(0)
            self.copy_out(0, forward=True)
            self.forward()
            self.after_loss()
            self.backward()
        self.look("AdamW")
        return self

    def whole(self, group, size):
        """Return the bytes of a group's whole tensors, padded, with so many bytes a number."""
        return shard_numbers(self.shapes(group), self.setting.shards) * self.setting.shards * size

    def keeps_gradients(self):
        return True

    def gather(self, group):
        """Begin an all-gather: its output is there, its input for a moment only."""
        if group in self.gathered or group in self.in_flight:
            return
        size, shards = self.setting.compute_bytes, self.setting.shards
        out = self.whole(group, size) if shards > 1 else 0  # one rank has all there is
        own = shard_numbers(self.shapes(group), shards)
        cast = own * size if size != self.setting.weight_bytes or self.setting.offload else 0
        gloo = 0 if self.setting.cuda else out  # which gathers into a copy
        self.look(f"all-gather of {self.name(group)}", communication=out + cast + gloo)
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
        self.look(f"copy of {self.name(group)}")
        out = self.in_flight.pop(group)
        self.copied = out if forward else self.copied
        self.held["communication"] -= 0 if forward else out

    def free(self, group):
        """Give a group's gathered weights back."""
        if group in self.gathered:
            self.held["gathered weights"] -= self.whole(group, self.setting.compute_bytes)
            self.gathered.remove(group)

    def name(self, group):
        """Return what to call a group."""
        return f"layer {group}" if group else "embedding, norm and output"

    def before_forward(self, number):
        self.copy_out(number, forward=True)
        for ahead in range(number + 1, min(number + self.setting.prefetch, self.depth) + 1):
            self.gather(ahead)

    def after_forward(self, number):
        if self.setting.reshard and number < self.depth:
            self.free(number)

    def after_loss(self):
        """The root's forward, with the loss in it, is over."""
        self.held["communication"] -= self.copied
        self.copied = 0

    def loss_is_done(self, made):
        self.held["whole gradients"] += made

    def before_backward(self, number):
        self.copy_out(number, forward=False)
        for ahead in range(number - 1, max(0, number - 1 - max(1, self.setting.prefetch)), -1):
            self.gather(ahead)

    def after_backward(self, number, made):
        self.held["whole gradients"] += made
        self.reduce(number, made)

    def end_of_backward(self, made, made_before):
        self.held["whole gradients"] += made
        self.reduce(0, made + made_before)
        self.held["communication"] -= self.reduced
        self.reduced = 0

    def reduce(self, group, made):
        """Add up a group's gradients over the ranks; the input buffer lasts until the next one."""
        self.free(group)
        self.held["communication"] -= self.reduced
        self.reduced = self.whole(group, self.setting.reduce_bytes)
        self.held["communication"] += self.reduced
        self.look(f"reduce-scatter of {self.name(group)}")
        self.held["whole gradients"] -= made
        shard = self.reduced // self.setting.shards
        gloo = 0 if self.setting.cuda or self.setting.shards == 1 else self.reduced
        self.look(f"reduce-scatter of {self.name(group)}", communication=shard + gloo)
        if group not in self.has_shards and not (self.setting.offload and self.setting.cuda):
            self.held["gradients"] += shard
        self.has_shards.add(group)


def play(model, setting):
    """Return the played step of a setting."""
    kind = ReplicatedStep if setting.chapter == "02" else ShardedStep
    return kind(model, setting).play()


def host_memory(model, setting, local_ranks, asynchronous):
    """Return what a host holds at its fullest, by part, in bytes, and when that is.

    To start, chapters 02 to 04 make the whole model in each rank's memory, and chapter 05 the root
    and one layer at a time. What is offloaded to a CPU for a GPU lies in pinned memory, of which
    torch takes a power of two for each tensor: CachingHostAllocator.h. So does what a save copies
    before it writes, but not the copies of a save in the background: _state_dict_stager.py.
    """
    if not setting.cuda:
        return {}, "the step"  # there is only one memory
    shards, state = setting.shards, state_bytes(model, setting)
    tensors = [shape for shapes in (*model.layers, model.root) for shape in shapes]
    pinned = [shard_numbers([shape], shards) * setting.weight_bytes for shape in tensors]
    pinned = sum(power_of_two(size) for size in pinned)
    layer = max(map(numbers, model.layers), default=0)
    made = model.weights if setting.chapter != "05" else numbers(model.root) + layer
    start = {"model in the making": made * 4, "parameters": pinned if setting.offload else 0}
    train = {}
    if setting.offload:
        train |= {"parameters": pinned, "gradients": pinned}
        train["optimizer state"] = state["optimizer state"]
    if asynchronous and setting.chapter == "05":
        train["copy being saved"] = state["parameters"] + state["optimizer state"]
    elif not setting.offload and setting.chapter != "02":  # DCP holds it until the file is closed
        train["copy being saved"] = pinned + 2 * pinned
    fullest, when = max((start, "the start"), (train, "training"), key=lambda x: sum(x[0].values()))
    return {name: size * local_ranks for name, size in fullest.items() if size}, when


def power_of_two(size):
    """Return the smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length() if size else 0


# ---- time ------------------------------------------------------------------------------------


def flops_of(model, setting):
    """Return the FLOPs of one micro-step on one rank: of the model, and those done again.

    A token takes 6 per weight and 12 × layers × width × sequence length for attention: PaLM,
    appendix B, https://arxiv.org/abs/2204.02311. Looking up an embedding takes none. A third of
    that is the forward, which is done again for the layers by `--recompute full`, and for the
    logits by chapter 05.
    """
    tokens = setting.batch * setting.length
    inside = sum(map(numbers, model.layers))
    layers = 6 * inside + 12 * len(model.layers) * model.width * setting.length
    head = 6 * model.head
    again = (layers / 3 if setting.recompute == "full" else 0) + (
        head / 3 if setting.chapter == "05" else 0
    )
    return (layers + head) * tokens, again * tokens


def bytes_sent(model, setting):
    """Return the bytes of whole tensors that one step gathers and reduces, and of shards copied.

    A dictionary: `shard group` is sent among the ranks of a copy, `replicas` among copies, `pcie`
    between GPU and host. Chapter 04's README has the formulas. Under offload, FSDP2 copies the
    gradients of the first micro-step into pinned memory, while it goes on. To those it adds the
    later ones, `pageable`, for which it waits: foreach_reduce in _fsdp_collectives.py.
    """
    steps, size = setting.accumulation, setting.compute_bytes
    weights, root = model.weights, numbers(model.root)
    last = numbers(model.layers[-1])
    if setting.chapter == "02":
        return {"shard group": 0, "replicas": 2 * 4 * weights, "pcie": 0, "pageable": 0}
    gathered = 2 * weights - root - last if setting.reshard else weights
    reduced = steps * weights * setting.reduce_bytes
    shards = weights * setting.reduce_bytes / setting.shards
    among_replicas = 2 * (1 - 1 / setting.replicas) * shards
    offloaded = setting.weight_bytes / setting.shards if setting.offload else 0
    return {
        "shard group": (steps * gathered * size + reduced) * (1 - 1 / setting.shards),
        "replicas": among_replicas,
        "pcie": (steps * gathered + weights) * offloaded,
        "pageable": (steps - 1) * weights * offloaded,
    }


def links(args, setting):
    """Return the GB/s at which a rank sends inside a copy of the model, and between copies.

    A ring that spans nodes leaves each node once, through the network links of all its GPUs. Rings
    of which each GPU of a node has one of its own share these links.
    """
    across = min(args.nvlink_gbs, args.gpus_per_node * args.network_gbs)
    inside = across if setting.shards > args.gpus_per_node else args.nvlink_gbs
    if args.nodes == 1:
        return inside, args.nvlink_gbs
    return inside, across if setting.chapter == "02" else args.network_gbs


def peak_of(args, setting):
    """Return the FLOP/s that a GPU could do at best."""
    return 1e12 * (args.gpu_tflops if setting.bf16 else args.gpu_fp32_tflops)


def seconds_of(args, model, setting):
    """Return the seconds that each resource works in one step, as (fastest, slowest)."""
    sent, (inside, between) = bytes_sent(model, setting), links(args, setting)
    matmul = setting.accumulation * sum(flops_of(model, setting)) / peak_of(args, setting)
    low, high = args.gpu_efficiency
    # of each number in the shards, 10 are read or written: 1 for the norm, 2 to clip, 7 by AdamW
    adam = 10 * setting.weight_bytes * model.weights / setting.shards
    memory = args.cpu_adam_gbs / args.gpus_per_node if setting.offload else args.gpu_bandwidth_gbs
    times = {
        "other operations": traffic(model, setting) / args.gpu_bandwidth_gbs,
        "inside a copy": sent["shard group"] / inside,
        "between copies": sent["replicas"] / between,
        "GPU to host and back": sent["pcie"] / args.pcie_gbs,
        "later gradients": sent["pageable"] * (1 / args.pageable_gbs + 3 / memory),  # copied, added
        "AdamW": adam / memory,
    }
    rest = {name: (giga / 1e9, giga / 1e9) for name, giga in times.items()}
    return {"matrix products": (matmul / high, matmul / low)} | rest


def traffic(model, setting):
    """Return the bytes that all but matrix products read and write in one step, uncompiled."""
    segments = setting.trace(model)
    inner = f"layer {min(2, len(model.layers))}"
    times = {inner: len(model.layers), f"{inner} backward": len(model.layers)}
    outer = ("embedding", "head", "head backward", "embedding backward")
    times |= dict.fromkeys(outer, 1)
    return setting.accumulation * sum(segments[name].traffic * n for name, n in times.items())


def estimate(args, model, setting):
    """Return what a step takes: seconds and MFU, each as (best, worst), and where they go.

    Best: all communication hides behind computing or the other way round, but for what a rank
    waits for. Worst: nothing hides.
    """
    parts = seconds_of(args, model, setting)
    computing, waiting = ("matrix products", "other operations"), ("later gradients", "AdamW")
    compute, waits = (sum(parts[name][0] for name in names) for names in (computing, waiting))
    links = [parts[name][0] for name in parts if name not in (*computing, *waiting)]
    seconds = (max(compute, *links) + waits, sum(slow for _, slow in parts.values()))
    flops = flops_of(model, setting)[0] * setting.accumulation
    mfu = [flops / (peak_of(args, setting) * each) for each in seconds]
    return {"seconds": seconds, "mfu": mfu, "parts": parts}


def checkpoint_of(args, model, setting):
    """Return the bytes of a checkpoint, and the seconds to write it: weights and two moments."""
    tensors = sum(map(len, model.layers)) + len(model.root)
    size = 3 * setting.weight_bytes * model.weights + 4 * tensors
    return {"bytes": size, "seconds": size / args.disk_gbs / 1e9}


# ---- report ----------------------------------------------------------------------------------


def plan_of(args, model, chapter, changes):
    """Return all that is known of one setting, as a dictionary."""
    setting = setting_of(args, chapter, changes)
    step = play(model, setting)
    host, when = host_memory(model, setting, args.gpus_per_node, args.checkpoint_async)
    room = args.gpu_memory_gib * GIB
    gpu = sum(step.most.values())
    needs = gpu * (1 + args.fragmentation) + args.gpu_overhead_gib * GIB
    host_needs = sum(host.values()) + args.gpus_per_node * args.host_overhead_gib * GIB
    if not setting.cuda:
        room = args.host_memory_gib * GIB / args.gpus_per_node
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
        "host_margin": args.host_memory_gib * GIB - host_needs,
        "fits": room >= needs and args.host_memory_gib * GIB >= host_needs,
        **estimate(args, model, setting),
        "checkpoint": checkpoint_of(args, model, setting),
    }


def asked_setting(args):
    """Return the chapter and changes that the arguments ask for."""
    return args.chapter, {name: getattr(args, name) for name in DECIDED}


def make_plan(args):
    """Return the plan as a dictionary: of the asked setting, of all, and the first that fits."""
    config, source = load_config(args)
    longest = getattr(config, "max_position_embeddings", None) or args.seq_length
    if args.seq_length > longest:
        fail(f"--seq-length {args.seq_length}: {args.model_name} takes at most {longest} tokens")
    try:
        model = model_of(config)
        settings = {name: plan_of(args, model, *how) for name, how in SETTINGS.items()}
        asked = plan_of(args, model, *asked_setting(args))
    except Exception as error:  # of any model there is, some compute with values, not shapes alone
        fail(f"--model-name {args.model_name}: cannot be run on shapes alone: {first_line(error)}")
    first = next((name for name, plan in settings.items() if plan["fits"]), None)
    return {
        "model": about(args, model, source),
        "asked": asked,
        "settings": settings,
        "first": first,
        "command": command_of(args, *SETTINGS[first]) if first else None,
        "enough_nodes": None if first else enough_nodes(args, model),
    }


def enough_nodes(args, model):
    """Return on how many nodes, 2, 4, 8 and so on times as many, the last setting fits, or None."""
    for factor in (2**power for power in range(1, 9)):
        more = copy.copy(args)
        more.nodes, more.ranks = args.nodes * factor, args.ranks * factor
        if plan_of(more, model, *list(SETTINGS.values())[-1])["fits"]:
            return more.nodes
    return None


def first_line(error):
    """Return the first line of what an error says, for some say a page."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def about(args, model, source):
    """Return what the plan is made for."""
    return {
        "name": args.model_name,
        "source": source,
        "weights": model.weights,
        "layers": len(model.layers),
        "ranks": args.ranks,
        "micro_batch_size": args.micro_batch_size,
        "accumulation": args.accumulation,
        "seq_length": args.seq_length,
        "precision": args.precision,
    }


def command_of(args, chapter, changes):
    """Return the command that starts a setting, with those of the user's flags that it knows."""
    script = script_of(chapter, args.nodes)
    flags = {}
    for names, options in flags_of(script):
        name = names[-1].removeprefix("--").replace("-", "_")
        value = changes.get(name, DECIDED.get(name, getattr(args, name)))
        flags[names[-1]] = (value, options)
    where = "--standalone"
    if args.nodes > 1:
        where = f"--nnodes {args.nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    start = (
        f"torchrun {where} --nproc-per-node {args.gpus_per_node} {script.relative_to(HERE.parent)}"
    )
    return shlex.join([*start.split(), *given(flags)])


def given(flags):
    """Return those flags, from name to (value, options), that differ from what they are anyway."""
    words = []
    for name, (value, options) in flags.items():
        default = False if options.get("action") == "store_true" else options.get("default")
        if name == "--precision" or value == default or value is None:
            continue
        if options.get("action") == argparse.BooleanOptionalAction:
            words.append(name if value else name.replace("--", "--no-", 1))
        elif isinstance(value, list):
            words += [name, *value]
        else:
            words += [name] if value is True else [name, str(value)]
    return words


def show(args, plan):
    """Print the plan."""
    show_machine(args, plan["model"])
    show_memory(args, plan["asked"])
    show_time(args, plan["asked"])
    show_settings(plan["settings"])
    if plan["first"]:
        print(f"\nthe first that fits:\n\n  {plan['command']}")
    elif plan["enough_nodes"]:
        print(f"\nnothing fits; {list(SETTINGS)[-1]} would on {plan['enough_nodes']} such nodes")
    else:
        print("\nnothing fits, on any number of nodes: take larger GPUs or a smaller --seq-length")


def show_line(args, plan):
    """Print whether the asked setting fits, and how fast it may be."""
    asked, machines = plan["asked"], f"{args.nodes} × {args.gpus_per_node} GPUs"
    best, worst = asked["seconds"]
    print(
        f"{plan['model']['name']} on {machines} of {args.gpu_memory_gib:g} GiB: {verdict(asked)}; "
        f"a GPU {text_of(asked['gpu_total'])} of tensors, {text_of(asked['gpu_needs'])} with all "
        f"else; a host {text_of(asked['host_needs'])}; "
        f"{time_of(best)} to {time_of(worst)} a step, MFU {asked['mfu'][1]:.0%} to "
        f"{asked['mfu'][0]:.0%}"
    )


def show_machine(args, model):
    """Print what is planned."""
    print(f"{model['name']}: {model['weights']:,} weights in {model['layers']} layers")
    print(f"shape from: {model['source']}")
    print(
        f"{args.nodes} × {args.gpus_per_node} GPUs of {args.gpu_memory_gib:g} GiB, hosts of "
        f"{args.host_memory_gib:g} GiB"
    )
    print(
        f"{args.precision}; {model['seq_length']} tokens a sample, {model['micro_batch_size']} "
        f"samples a micro-batch, micro-steps: {model['accumulation']}"
    )


def show_memory(args, asked):
    """Print what the asked setting takes on a GPU and on a host, in GiB."""
    print(f"\nper GPU, at the fullest moment: {asked['gpu_when']}")
    overhead = args.gpu_overhead_gib * GIB
    rows = asked["gpu"] | {"all tensors": asked["gpu_total"]}
    rows["fragmentation"] = asked["gpu_total"] * args.fragmentation
    rows |= {"overhead": overhead, "margin": asked["gpu_margin"]}
    show_rows(rows)
    print(f"\nper host, at the fullest moment: {asked['host_when']}")
    overhead = args.host_overhead_gib * args.gpus_per_node * GIB
    show_rows(asked["host"] | {"overhead": overhead, "margin": asked["host_margin"]})


def show_rows(rows):
    """Print names and bytes."""
    for name, size in rows.items():
        print(f"  {name:20}{text_of(size):>16}")


def text_of(size):
    """Return bytes as GiB, or as MiB where that would say nothing."""
    if not size:
        return "0"
    if abs(size) < GIB / 10:
        return f"{size / 2**20:,.2f} MiB"
    return f"{size / GIB:,.2f} GiB"


def time_of(seconds):
    """Return seconds as text, or as milliseconds where there are few."""
    return f"{seconds:.3g} s" if seconds >= 0.1 or not seconds else f"{seconds * 1000:.3g} ms"


def show_time(args, asked):
    """Print the estimate of a step's time, where it goes and what it assumes; and of a save's."""
    best, worst = asked["seconds"]
    print(f"\na step: {time_of(best)} if all overlaps that can, {time_of(worst)} if nothing does")
    print(f"  MFU {asked['mfu'][1]:.0%} to {asked['mfu'][0]:.0%}")
    for name, (fast, slow) in asked["parts"].items():
        print(f"  {name:20}{time_of(fast):>16}" + (f" to {time_of(slow)}" if slow > fast else ""))
    low, high = args.gpu_efficiency
    print(
        f"  assumed: {args.gpu_tflops:g} TFLOP/s in bf16, {args.gpu_fp32_tflops:g} in fp32, of "
        f"which matrix products reach {low:.0%} to {high:.0%};\n"
        f"  GB/s: {args.gpu_bandwidth_gbs:g} GPU memory, {args.nvlink_gbs:g} NVLink, "
        f"{args.network_gbs:g} network per GPU, {args.pcie_gbs:g} PCIe,\n"
        f"  {args.pageable_gbs:g} PCIe to pageable memory, {args.cpu_adam_gbs:g} host memory, "
        f"{args.disk_gbs:g} disk; no --compile"
    )
    if asked["parts"]["later gradients"][0]:
        print("one micro-step is best under offload: a rank waits for the gradients of later ones")
    saved = asked["checkpoint"]
    print(f"a checkpoint: {saved['bytes'] / 1e9:,.4g} GB, {time_of(saved['seconds'])} to write")


def show_settings(settings):
    """Print a line per setting: what it takes, how fast it may be, whether it fits."""
    print(f"\n{'setting':38}{'GPU':>14}{'host':>14}{'a step':>18}")
    for name, plan in settings.items():
        best, worst = plan["seconds"]
        sizes = f"{text_of(plan['gpu_needs']):>14}{text_of(plan['host_needs']):>14}"
        print(f"{name:38}{sizes}{f'{time_of(best)} – {time_of(worst)}':>18}  {verdict(plan)}")


def verdict(plan):
    """Return whether a setting fits, and what is too small if not."""
    short = [name for name in ("gpu", "host") if plan[f"{name}_margin"] < 0]
    return f"no: {' and '.join(short).replace('gpu', 'GPU')}" if short else "fits"


def draw(args, plan):
    """Draw two bars per setting, stacked of what it takes on a GPU and on a host."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        fail("--plot needs matplotlib: pip install -r requirements-dev.txt")
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    settings = plan["settings"]
    draw_bars(left, {name: each["gpu"] for name, each in settings.items()}, args.gpu_memory_gib)
    draw_bars(right, {name: each["host"] for name, each in settings.items()}, args.host_memory_gib)
    left.invert_yaxis()
    left.set(xlabel="GiB of tensors on a GPU")
    right.set(xlabel="GiB of tensors on a host")
    handles = {text: handle for axes in (right, left)
               for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}  # fmt: skip
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=6, fontsize="small")
    figure.suptitle(f"{args.model_name}, at the fullest moment")
    try:
        Path(args.plot).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(args.plot)
    except OSError as error:
        fail(f"--plot {args.plot}: {first_line(error)}")


def draw_bars(axes, bars, limit):
    """Draw bars, from name to bytes by part, and a line at `limit` GiB."""
    left = dict.fromkeys(bars, 0.0)
    for number, part in enumerate([*PARTS, "model in the making", "copy being saved"]):
        sizes = [bar.get(part, 0) / GIB for bar in bars.values()]
        if any(sizes):
            axes.barh(list(bars), sizes, left=list(left.values()), label=part, color=f"C{number}")
        left = dict(zip(bars, map(sum, zip(left.values(), sizes, strict=True)), strict=True))
    axes.axvline(limit, color="black", linestyle="--", label="what there is")


def main():
    """Print the plan; exit with 0 if the asked setting fits, and with 1 if not."""
    args = parse_args()
    plan = make_plan(args)
    if args.plot:
        draw(args, plan)
    if args.json:
        print(json.dumps(plan, indent=1))
    elif args.brief:
        show_line(args, plan)
    else:
        show(args, plan)
    sys.exit(0 if plan["asked"]["fits"] else 1)


if __name__ == "__main__":
    main()
