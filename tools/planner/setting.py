"""Define the setting of a plan: the arguments, and the shapes of the model's weights.

This module, memory.py, step_time.py, layouts.py and report.py compute only with numbers, so they
also run in MicroPython in a browser: see form_model.py.
"""

import functools
import math
from collections import Counter
from types import SimpleNamespace

# Before setting_of() applies `changes`, it resets these flags to their defaults.
FLAG_DEFAULTS = {"reshard_after_forward": True, "recompute": "none", "cpu_offload": False}
# Each key is a flag. Its entry has the first chapter that accepts the flag, and a value: earlier
# chapters train as if the flag had this value.
ADDED_BY = {
    "reshard_after_forward": ("04", True),
    "replicas": ("04", 1),
    "recompute": ("05", "none"),
    "cpu_offload": ("05", False),
    "checkpoint_async": ("04", False),
    "tensor_parallel_size": ("06", 1),
    "pipeline_parallel_size": ("07", 1),
    "expert_parallel_size": ("09", 1),
}
# The planner's formulas cover the memory and the FLOPs of these kinds of layers.
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


class UnsupportedModelError(Exception):
    """Report that a chapter or the planner does not support a model."""


class Model:
    """Hold the shapes of a model's weights.

    `layers` has a list for each layer, with the shapes of the layer's weights. `root` has the
    shapes of the weights outside of the layers, which FSDP shards as one group. `built` is None, or
    the model itself on the meta device, where weights use no memory.
    """

    def __init__(self, config, layers, root, built=None):
        self.config, self.layers, self.root, self.built = config, layers, root, built
        self.shapes = [shape for layer in layers for shape in layer] + root
        self.weights = numbers(self.shapes)

    @property
    def has_other_layers(self):
        """Return whether the planner's formulas do not cover some layers, such as Mamba's."""
        has_heads = getattr(self.config, "num_attention_heads", None)
        return not has_heads or bool(kinds_of_layers(self.config) - ATTENTION)


def kinds_of_layers(config):
    """Return the set of kinds in the configuration's list `layer_types`, or an empty set."""
    return set(getattr(config, "layer_types", None) or [])


class ExpertShape(tuple):
    """Mark the shape of a weight that holds all experts of a layer: [experts, ...].

    An ExpertShape does not equal a plain tuple of the same numbers, because the cache of
    shards_of() must distinguish experts from other weights.
    """

    def __eq__(self, other):
        return isinstance(other, ExpertShape) and tuple(self) == tuple(other)

    def __hash__(self):
        return hash(tuple(self))


def numbers(shapes):
    """Return the total number of elements in tensors of the given shapes."""
    return sum(map(math.prod, shapes))


def local_numbers(shapes, setting):
    """Return the number of elements in the weights that a rank gathers.

    Leave out the experts of other ranks.
    """
    experts = [shape for shape in shapes if isinstance(shape, ExpertShape)]
    others = numbers(shapes) - numbers(experts)
    return others + numbers(experts) // setting.expert_parallel_size


def shard_numbers(shapes, setting):
    """Return the number of elements in rank 0's shards, given the shapes of the full tensors.

    FSDP2 cuts the first dimension into chunks of the same size, rounded up. It pads all shards to
    this size for communication: see torch.chunk and _get_dim0_padded_size.
    """
    return sum(shards_of(tuple(shapes), *setting.sharding).values())


def padded_numbers(shapes, setting, least_shards=1):
    """Return the number of elements in all shards of the given tensors, with FSDP's padding.

    Leave out tensors with fewer than `least_shards` shards.
    """
    shards = shards_of(tuple(shapes), *setting.sharding)
    return sum(elements * count for count, elements in shards.items() if count >= least_shards)


@functools.cache
def shards_of(shapes, num_shards, num_expert_shards, expert_ranks):
    """Return a Counter of the elements in rank 0's shards, by the number of shards of a tensor."""
    found = Counter()
    for shape in shapes:
        is_expert, rows, columns = isinstance(shape, ExpertShape), shape[0], math.prod(shape[1:])
        count = num_expert_shards if is_expert else num_shards
        local_rows = rows // expert_ranks if is_expert else rows
        elements = -(-local_rows // count) * columns
        # If the number of columns is divisible by the number of shards, but the number of experts
        # is not, placement_of() in chapter 04 shards the columns.
        if len(shape) == 3 and local_rows % count and shape[2] % count == 0:
            elements = local_rows * columns // count
        found[count] += elements
    return found


def adapter_shapes(layers, rank):
    """Return the shapes of LoRA's adapters for the matrices in the layers, as in fine-tuning/lora.

    A matrix of shape (n, m) gets matrices of the shapes (rank, m) and (n, rank).
    """
    matrices = [shape for shapes in layers for shape in shapes if len(shape) == 2]
    return [shape for n, m in matrices for shape in ((rank, m), (n, rank))]


def muon_shapes(layers):
    """Return the shapes of the weights that related-topics/muon trains with only one moment.

    These weights are the matrices and the stacked experts in the layers.
    """
    shapes = [shape for layer in layers for shape in layer]
    return [shape for shape in shapes if len(shape) == 2 + isinstance(shape, ExpertShape)]


def power_of_two(number):
    """Return the smallest power of two that is not below `number`."""
    return 2 ** math.ceil(math.log2(number))


# ---- the setting -----------------------------------------------------------------------------


class Setting(SimpleNamespace):
    """Hold the arguments of a plan: the machines, and the arguments of the training script.

    The functions of the chapters' scripts accept a Setting as their parameter `args`.
    """

    def changed(self, **changes):
        """Return a copy of this Setting with the given arguments in place of its own."""
        return Setting(**(self.__dict__ | changes))

    @property
    def shards(self):
        """Return the number of FSDP shards of a weight outside of experts, which is 1 under DDP."""
        ranks_per_copy = self.replicas * self.tensor_parallel_size * self.pipeline_parallel_size
        return 1 if self.chapter == "02" else self.ranks // ranks_per_copy

    @property
    def expert_shards(self):
        """Return the number of FSDP shards of the experts that a rank gathers.

        In chapter 09, the ranks of a tensor-parallel group also hold different shards of experts.
        """
        tp_size = self.tensor_parallel_size if self.chapter == "09" else 1
        return self.shards * tp_size // self.expert_parallel_size

    @property
    def sharding(self):
        """Return three numbers: shards of a plain weight, shards of an expert, and expert ranks.

        Expert ranks are the ranks that share the experts of a layer.
        """
        return self.shards, self.expert_shards, self.expert_parallel_size

    @property
    def has_expert_groups(self):
        """Return whether FSDP gathers a layer's experts apart from the layer's other weights."""
        return self.chapter == "09" and self.expert_parallel_size * self.tensor_parallel_size > 1

    @property
    def num_stages(self):
        """Return the number of stages of the pipeline."""
        return self.pipeline_parallel_size * stages_per_rank(self.pipeline_schedule)

    @property
    def cuda(self):
        """Return whether the ranks have GPUs."""
        return self.device != "cpu"

    @property
    def weight_bytes(self):
        """Return the bytes of one element of a weight shard.

        Without LoRA, FSDP reduces gradients in the same type. With LoRA, the shards of frozen
        weights have the type of the gathered weights.
        """
        if self.lora_rank:
            return self.compute_bytes
        return 2 if self.weights_dtype == "bf16" else 4

    @property
    def compute_bytes(self):
        """Return the bytes of one element of the type that the layers compute with.

        If FSDP gathers weights, the gathered weights and their gradients also have this type.
        """
        return 2 if self.precision == "bf16" else 4

    @property
    def autocast(self):
        """Return whether autocast computes in bf16, with weights in float32, as in chapter 02."""
        return self.chapter == "02" and self.compute_bytes < self.weight_bytes


def setting_of(args, chapter, changes=None):
    """Return a Setting that has the arguments `args` for a chapter.

    With `changes`, first reset the flags in FLAG_DEFAULTS to their defaults, and then apply
    `changes`.
    """
    # Plan chapter 03 as chapter 02, because both chapters train in the same way.
    chapter = "02" if chapter == "03" else chapter
    values = args.__dict__ | {"chapter": chapter}
    if changes is not None:
        values |= FLAG_DEFAULTS | changes
    # Turn these flags off, because the planner loads no weights and compiles no code.
    values |= {"pretrained": False, "compile": False}
    for name, (first_chapter, value) in ADDED_BY.items():
        if chapter < first_chapter:
            values[name] = value
    # A pipeline runs each layer for many micro-batches, so it keeps all layers gathered.
    values["reshard_after_forward"] &= values["pipeline_parallel_size"] == 1
    return Setting(**values)


def in_flight(schedule, rank, ranks, micro_batches):
    """Return the largest number of micro-batches whose activations a rank keeps at one time.

    With interleaved-1f1b, a rank may keep the activations of only one of its two stages, which
    count as half a micro-batch.
    """
    limits = {"gpipe": micro_batches, "1f1b": ranks - rank}
    return min(micro_batches, limits.get(schedule, (3 * ranks - 1) / 2 - rank))


def stages_per_rank(schedule):
    """Return the number of stages that each rank of a pipeline has, as in chapter 07."""
    return 2 if schedule == "interleaved-1f1b" else 1


def bubble(schedule, ranks, micro_batches):
    """Return the share of a step that a pipeline rank is idle, by the formula in chapter 07."""
    turns = stages_per_rank(schedule) * micro_batches
    return (ranks - 1) / (turns + ranks - 1)
