"""Measure the tensors that a model keeps for its backward pass: run two layers on fake tensors.

Fake tensors have shapes, but no data.
"""

import contextlib
import copy
import functools
import weakref
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, placement_types
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface

from setting import ATTENTION, UnsupportedModelError, kinds_of_layers
from training_step import (
    balanced,
    load_chapter,
    local,
    mesh_of,
    newest_chapter,
    refuse,
    simulate_ranks,
    split_matrices,
)


class Recorder(TorchDispatchMode):
    """Count the bytes of the tensors that operations create, until Python deletes the tensors.

    A view shares the storage of its base tensor, and a storage counts once.
    """

    def __init__(self):
        super().__init__()
        # These keys identify the storages of the weights, which the recorder does not count.
        self.weights = set()
        # Map the key of each counted storage to the kind of its tensor.
        self.kind_of = {}
        self.live, self.operations = Counter(), Counter()
        self.segments = {}
        self.begin("before")

    def begin(self, name, kind="activations"):
        """Begin the segment `name`; from now on, new tensors are of the kind `kind`.

        A segment stores the live bytes, by kind of tensor, at its start and at its peak.
        """
        self.segment = self.segments[name] = SimpleNamespace(start=Counter(), most=Counter())
        self.name, self.kind, self.at_start = name, kind, True
        self.update_peaks()

    def update_peaks(self):
        """Store the current live bytes if they exceed the peak of the current segment.

        Leave out gradients in buckets, because the buckets last for the entire run.
        """
        live = self.live - Counter(buckets=self.live["buckets"])
        if live.total() > self.segment.most.total():
            self.segment.most = live

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Leave the operation to DTensor or AsyncCollectiveTensor, which call it again with local
        # tensors.
        if any(issubclass(cls, (DTensor, AsyncCollectiveTensor)) for cls in types):
            return NotImplemented
        # Record the live bytes at the start of a segment only when its first operation runs,
        # because Python frees some tensors of the previous segment only after begin().
        if self.at_start:
            self.segment.start, self.at_start = +self.live, False
        self.operations[self.name] += 1
        if self.name.startswith("layer") and self.operations[self.name] > MOST_OPERATIONS:
            refuse("a layer computes one token after the other; choose a shorter --seq-length")
        output = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        seen = self.kind_of.keys() | self.weights
        new = [tensor for tensor in tensors if key_of(tensor) not in seen]
        for tensor in new:
            self.count(tensor, self.kind)
        if new:
            self.update_peaks()
        return output

    def count(self, tensor, kind):
        """Count the bytes of a tensor's storage until Python deletes the storage."""
        storage = tensor.untyped_storage()
        self.kind_of[storage._cdata] = kind
        self.live[kind] += storage.nbytes()
        weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())

    def forget(self, key, size):
        """Subtract the bytes of a deleted storage, whose key is `key`, from the live bytes."""
        self.live[self.kind_of.pop(key)] -= size

    def rename(self, tensor, kind):
        """Change the kind of a tensor to `kind`, if the recorder counts this tensor."""
        key, size = key_of(tensor), local(tensor).untyped_storage().nbytes()
        if key in self.kind_of:
            self.live[self.kind_of[key]] -= size
            self.live[kind] += size
            self.kind_of[key] = kind


def key_of(tensor):
    """Return a key that identifies the storage of the local part of a tensor."""
    return local(tensor).untyped_storage()._cdata


# A layer with more operations than this limit computes one token after the other. Running all its
# operations on fake tensors would take an hour.
MOST_OPERATIONS = 10_000
# The tensors of a layer depend on these arguments.
TRACED_ARGS = ["chapter", "precision", "weights_dtype", "model_name", "seq_length", "recompute"]
TRACED_ARGS += ["micro_batch_size", "tensor_parallel_size", "lora_rank"]
TRACED_ARGS += ["context_parallel_size", "context_parallel_style", "expert_parallel_size"]
# This cache maps each traced setting to its segments or, if the trace failed, to the reason.
TRACES = {}


def segments_of(setting):
    """Return the memory of each segment of a micro-step on one rank, by the segment's name.

    A segment is a part of the micro-step, such as the forward pass of a layer. The micro-step runs
    only two layers of the model. Raise an UnsupportedModelError if the model cannot run in this
    setting.
    """
    setting = setting.changed(device="cuda", cpu_offload=False, pipeline_parallel_size=1)
    # Trace chapters 06 to 09 as chapter 05, because all of these chapters build the same model.
    setting.chapter = min(setting.chapter, "05")
    key = (setting.model, *(getattr(setting, name) for name in TRACED_ARGS))
    if key not in TRACES:
        TRACES[key] = trace_or_problem(setting)
    if isinstance(TRACES[key], str):
        raise UnsupportedModelError(TRACES[key])
    return TRACES[key]


def trace_or_problem(setting):
    """Return the segments of a micro-step or, if the model cannot run, the reason as text."""
    try:
        return trace(setting)
    except UnsupportedModelError as error:
        return str(error)
    except Exception as error:
        # Some models compute with values, but fake tensors have only shapes. Other models change a
        # tensor that selective recomputation has stored.
        problem = f"cannot run on fake tensors ({error!r:.200})"
        return f"--model-name {setting.model_name}: {problem}; measure a training run instead"


def trace(setting):
    """Run two layers of the model on fake tensors; return the memory of each segment, by name.

    Segments are parts of the forward and the backward pass.
    """
    length = setting.seq_length // setting.context_parallel_size
    simulate_ranks()
    # Replace deep copies of tensors, because torch would copy data, which fake tensors lack.
    copy_fake = mock.patch.object(torch.Tensor, "__deepcopy__", lambda t, _: t.detach().clone())
    exchange = mock.patch.object(placement_types, "shard_dim_alltoall", reshape_locally)
    # Hide from the recorder the extra operations that DTensor runs to learn the shapes of results.
    learn = ShardingPropagator._propagate_tensor_meta_non_cached
    unrecorded_learn = _disable_current_modes()(learn)
    unrecorded = mock.patch.object(ShardingPropagator, learn.__name__, unrecorded_learn)
    with FakeTensorMode(), copy_fake, exchange, unrecorded:
        small = small_model(setting)
        ids = torch.zeros(setting.micro_batch_size, setting.seq_length, dtype=torch.long)
        inputs = {"input_ids": ids[:, :length], "use_cache": False}
        if setting.tensor_parallel_size * setting.context_parallel_size > 1:
            inputs["position_ids"] = torch.arange(length)[None]
        record = Recorder()
        watch(setting, small, record)
        with record, torch.autocast("cpu", torch.bfloat16, enabled=setting.autocast):
            record.begin("embedding")
            loss = loss_of(small, inputs, ids)
        with record:
            record.begin("head backward", "logits")
            loss.backward()
            record.begin("end")
    return record.segments


def loss_of(model, inputs, labels):
    """Return the loss; keep the logits in memory as long as loss_of() in the chapters does."""
    logits = model(**inputs).logits
    return model.loss_function(logits, labels)


def reshape_locally(tensor, gather_dim, shard_dim, mesh, mesh_dim):
    """Return a tensor that has the shape of an all-to-all's result.

    Use this function in place of torch's shard_dim_alltoall(), which gathers the full tensor on a
    CPU.
    """
    return torch.cat(tensor.chunk(mesh.size(mesh_dim), shard_dim), gather_dim)


def small_model(setting):
    """Build the model of the setting's chapter, but with only two layers.

    The weights have the type that they have in the forward pass. Under FSDP, this is the type of
    the gathered weights.
    """
    config = copy.deepcopy(setting.model.config)
    if len(kinds := kinds_of_layers(config)) > 1 and kinds - ATTENTION:
        problem = f"has layers of several kinds ({', '.join(sorted(kinds))})"
        refuse(f"--model-name {setting.model_name}: {problem}; use tools/dry_run.py")
    config.num_hidden_layers = min(2, config.num_hidden_layers)
    # Shorten the list layer_types, because some families have derived it from the original number
    # of layers.
    if config.to_dict().get("layer_types"):
        config.layer_types = config.layer_types[:2]
    # If a mixture begins with plain layers, keep one plain layer and one layer with experts.
    for name, most in {"first_k_dense_replace": 1, "decoder_sparse_step": 2}.items():
        if getattr(config, name, None):
            setattr(config, name, min(most, getattr(config, name)))
    if getattr(config, "mlp_only_layers", None):
        config.mlp_only_layers = [number for number in config.mlp_only_layers if number == 0]
    chapter = load_chapter("04") if setting.chapter < "05" else newest_chapter()
    with mock.patch.object(chapter, "fail", refuse):
        model = chapter.build_model(setting, config)
    if setting.context_parallel_size > 1:
        split_attention(setting, model)
    if setting.expert_parallel_size * setting.tensor_parallel_size > 1:
        split_experts(setting, model)
    if setting.lora_rank:
        add_adapters(setting, model)
    is_half = setting.precision == "bf16" and not setting.autocast
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16 if is_half else torch.float32)
    split_matrices(model, setting.tensor_parallel_size)
    return model


def add_adapters(setting, model):
    """Freeze the weights of the model and add LoRA adapters, as fine-tuning/lora does."""
    args = SimpleNamespace(lora_rank=setting.lora_rank, lora_alpha=1, lora_modules=[])
    with contextlib.redirect_stdout(None):
        load_chapter("lora").add_adapters(args, model)
    # Give the inputs gradients, because the first traced layer stands for later layers, whose
    # inputs have gradients.
    model.enable_input_require_grads()


def split_experts(setting, model):
    """Keep the experts of only one expert-parallel rank; dispatch tokens as chapter 09 does."""
    chapter, size = newest_chapter(), setting.expert_parallel_size
    mesh, dispatch = mesh_of([*range(size)]), balanced(chapter.dispatch)
    for experts in chapter.experts_of(model):
        experts.num_experts //= size
        for weight in experts.parameters():
            weight.data = weight.data[: experts.num_experts].clone()
        run_experts = experts.forward
        experts.forward = functools.partial(dispatch, mesh, experts.num_experts, run_experts)


def split_attention(setting, model):
    """Let the model compute attention as the last context-parallel rank does."""
    chapter, size = newest_chapter(), setting.context_parallel_size
    mesh = mesh_of([*range(size)])
    # Pretend that this process, which is rank 0, is the last rank, which attends to the most keys.
    mesh.get_local_rank = lambda: size - 1
    mask = chapter.causal_lower_right(setting.seq_length // size, setting.seq_length)
    styles = {
        "gather": functools.partial(chapter.gathered_attention, mesh, mask),
        "ulysses": functools.partial(chapter.ulysses_attention, mesh),
    }
    AttentionInterface.register("context_parallel", styles[setting.context_parallel_style])
    model.set_attn_implementation("context_parallel")


def watch(setting, model, record):
    """Add hooks to the model that begin a new segment of `record` where a layer begins or ends.

    The hooks run in the forward and in the backward pass. If ranks split the experts or the
    matrices, a segment also begins when the gradients of a layer's experts are complete. Other
    hooks set the kind of each gradient.
    """
    # In chapter 02, DDP keeps the gradients in its buckets.
    kind = "buckets" if setting.chapter == "02" else "gradients"
    for weight in model.parameters():
        record.weights.add(key_of(weight))
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(lambda w: record.rename(w.grad, kind))

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

    def after_experts(number, missing, weight):
        missing.remove(weight)
        if not missing:
            record.begin(f"layer {number} backward after experts")

    splits_experts = setting.expert_parallel_size * setting.tensor_parallel_size > 1
    all_experts = newest_chapter().experts_of(model) if splits_experts else []
    for number, layer in enumerate(newest_chapter().layers_of(model), 1):
        experts = [module for module in layer.modules() if module in all_experts]
        missing = {weight for module in experts for weight in module.parameters()}
        for weight in list(missing):
            hook = functools.partial(after_experts, number, missing)
            weight.register_post_accumulate_grad_hook(hook)
        layer.register_forward_pre_hook(functools.partial(before, number), with_kwargs=True)
        layer.register_forward_hook(functools.partial(after, number))
