"""Stand in for GPUs and ranks that do not exist, so that a chapter's script runs without them.

The GPU is the device "gpu", a device of the kind that torch has for backends written in Python. Its
tensors are fake: they have shapes, types and a device, but no data. The process group has the
number of ranks that you want, and sends nothing.
"""

import contextlib
import functools
import os
import types

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fully_shard
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining import stage as stage_module
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import backend_registration
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from gpus import GPUS

aten = torch.ops.aten
# Autocast on a GPU runs the operations in HALF in bf16 or fp16, and the operations in FULL in
# float32.
HALF = "mm addmm bmm baddbmm matmul linear conv1d einsum".split()
FULL = "pow rsqrt layer_norm softmax log_softmax nll_loss sum cumsum norm".split()
# Keep these libraries in variables, because torch removes the kernels of a library that Python
# deletes.
ATEN, FALLBACK = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")


# ---- the GPU ---------------------------------------------------------------------------------
class Instant:
    """Stand in for a CUDA stream or event; its methods return at once, because no kernel runs."""

    watch = None
    device_index = stream_id = priority = 0

    def __init__(self, *_, **__):
        pass

    def record(self, *_, **__):
        return self

    def synchronize(self):
        """Count a wait of the CPU for the GPU."""
        self.watch.wait("waits for an event")

    wait = wait_event = wait_stream = record_event = record


def gpu_functions(options, watch):
    """Map names in torch.cuda and torch.gpu that the script or torch uses to replacements."""
    name, capability = GPUS[options.gpu].name, GPUS[options.gpu].capability
    stream = Instant()
    values = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": capability >= (8, 0),
        "device_count": options.gpus_per_node,
        "current_device": 0,
        "get_device_name": name,
        "get_device_capability": capability,
        "get_amp_supported_dtype": [torch.bfloat16, torch.float16],
        "current_stream": stream,
        "default_stream": stream,
        "_is_in_bad_fork": False,
    }
    nothing = "set_device manual_seed manual_seed_all get_rng_state set_rng_state empty_cache"
    functions = {
        name: lambda *_, _value=value, **__: _value
        for name, value in (values | dict.fromkeys(nothing.split())).items()
    }
    return functions | {
        "synchronize": lambda *_: watch.wait("calls synchronize()"),
        "max_memory_allocated": lambda *_: watch.peak_bytes("gpu"),
        "Stream": Instant,
        "Event": Instant,
        "stream": lambda *_: contextlib.nullcontext(),
        "device": lambda *_: contextlib.nullcontext(),
    }


class FakeTensors(FakeTensorMode):
    """Create tensors without data, even where torch.tensor() copies numbers to a device."""

    avoid_device_init = True

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)


class ScriptTorch(types.ModuleType):
    """Stand in for the module torch in the script, so that "cuda" names the fake GPU."""

    def __init__(self, options, watch):
        super().__init__("torch")
        self.cuda = types.SimpleNamespace(**gpu_functions(options, watch))

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def device(kind, *index):
        """Return the fake GPU if `kind` is "cuda", and otherwise the result of torch.device()."""
        return torch.device("gpu", 0) if kind == "cuda" else torch.device(kind, *index)


def add_gpu(options, watch):
    """Add the device "gpu" to this process; replace functions of torch that fail on this device."""
    Instant.watch, module = watch, types.ModuleType("torch.gpu")
    vars(module).update(gpu_functions(options, watch))
    backend_registration._setup_privateuseone_for_python_backend("gpu", module)
    torch.autograd.set_multithreading_enabled(False)
    # Allow meta tensors beside fake tensors, because PipelineStage uses meta tensors to describe
    # its inputs.
    torch._functorch.config.fake_tensor_allow_meta = True
    torch.utils.swap_tensors = swap
    _fsdp_init._move_states_to_device = _fully_shard._move_states_to_device = move
    torch.accelerator.current_stream = lambda *_: Instant()
    # Let a device mesh use real tensors, because the mesh reads its ranks' numbers from a tensor,
    # and fake tensors have no values.
    mesh = dist.device_mesh.DeviceMesh
    names = "__init__ __getitem__ _flatten _unflatten _concatenate get_coordinate get_local_rank"
    for name in names.split():
        if hasattr(mesh, name):
            setattr(mesh, name, on_real_tensors(getattr(mesh, name)))
    # Do not count the memory of full tensors that DTensor creates to derive the shapes of results,
    # because no rank ever holds these tensors.
    for name in ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta"):
        setattr(ShardingPropagator, name, watch.ignoring()(getattr(ShardingPropagator, name)))
    # A real GPU has kernels for these operations, so register kernels for the fake GPU, too.
    # Without kernels, torch would split each operation into several operations that need more
    # memory. Fake tensors never call the kernels.
    for name in ("silu_backward", "mish_backward"):
        ATEN.impl(name, lambda *_: None, "PrivateUse1")
    add_autocast()
    torch.nn.functional.scaled_dot_product_attention = attention_on(options)


def swap(one, other):
    """Exchange two tensors in place, as torch.utils.swap_tensors() does.

    Unlike swap_tensors(), allow weak references to the tensors.
    """
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


def move(weights, buffers, device):
    """Move tensors to a device in place; FSDP's own function would not move fake tensors."""
    for tensor in (*weights, *buffers):
        if tensor.device != device and tensor.device.type != "meta":
            with torch.no_grad():
                moved = tensor.to(device)
            if isinstance(tensor, torch.nn.Parameter):
                moved = torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)
            swap(tensor, moved)


def on_real_tensors(function):
    """Return a version of `function` that turns off fake tensors, so it creates real tensors."""
    return _disable_current_modes()(function)


def add_autocast():
    """Let autocast cast tensors on the fake GPU as it does on a real GPU."""
    key, cache = torch._C.DispatchKey.AutocastPrivateUse1, {}
    clear = torch.clear_autocast_cache
    torch.clear_autocast_cache = lambda: (cache.clear(), clear())

    def cast(dtype, value):
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        if not is_float or value.device.type != "gpu" or value.dtype == dtype:
            return value
        # Cast each weight only once per forward pass, as autocast on a real GPU does.
        if value.is_leaf and value.requires_grad and dtype != torch.float32:
            if id(value) not in cache:
                cache[id(value)] = value.to(dtype)
            return cache[id(value)]
        return value.to(dtype)

    def kernel(operation, is_half, *args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            dtype = torch.get_autocast_dtype("gpu") if is_half else torch.float32
            inputs = tree_map(functools.partial(cast, dtype), (args, kwargs))
            return operation(*inputs[0], **inputs[1])

    FALLBACK.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in HALF + FULL:
        packet = getattr(aten, name)
        for overload in packet.overloads():
            if not overload.endswith(("out", "dimname")):
                operation = getattr(packet, overload)
                implementation = functools.partial(kernel, operation, name in HALF)
                ATEN.impl(operation, implementation, "AutocastPrivateUse1")


class LowerRight:
    """Stand in for the mask of causal_lower_right(); on a GPU, that mask stores no matrix."""

    shape = ()

    def __init__(self, *_):
        pass


def attention_on(options):
    """Return an attention function that chooses the kernel that torch would choose on a real GPU.

    torch's own function would ask the driver of the GPU, which does not exist here.
    """
    original = torch.nn.functional.scaled_dot_product_attention
    capability = GPUS[options.gpu].capability

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        inputs = query, key, value
        if query.device.type != "gpu":
            return original(*inputs, attn_mask, dropout_p, is_causal, **options)
        if torch.is_autocast_enabled("gpu"):
            inputs = [tensor.to(torch.get_autocast_dtype("gpu")) for tensor in inputs]
        if isinstance(attn_mask, LowerRight):
            attn_mask, is_causal = None, True
        scale, has_groups = {"scale": options.get("scale")}, options.get("enable_gqa")
        is_half = inputs[0].dtype in (torch.bfloat16, torch.float16)
        if is_half and attn_mask is None and capability >= (8, 0):
            flash = aten._scaled_dot_product_flash_attention
            return flash(*inputs, dropout_p, is_causal, **scale)[0]
        # If heads are grouped and the flash kernel cannot run, assume that torch computes attention
        # in separate operations, which need the most memory.
        if has_groups:
            unfused = aten._scaled_dot_product_attention_math
            return unfused(*inputs, attn_mask, dropout_p, is_causal, enable_gqa=True, **scale)[0]
        efficient = aten._scaled_dot_product_efficient_attention
        return efficient(*inputs, attn_mask, True, dropout_p, is_causal, **scale)[0]

    return attention


# ---- the ranks -------------------------------------------------------------------------------
def add_ranks(options, rank):
    """Let this process be the rank `rank` of a process group whose collectives send nothing."""
    start, new = dist.init_process_group, dist.new_group
    backend = "cpu:fake,gpu:fake"

    def init_process_group(*_, **__):
        start(backend, rank=rank, world_size=options.gpus, store=FakeStore())

    def all_gather_object(objects, own_object, group=None):
        objects[:] = [own_object] * len(objects)

    # torchrun would set these variables for this rank.
    values = {"RANK": rank, "WORLD_SIZE": options.gpus, "LOCAL_RANK": rank % options.gpus_per_node}
    values |= {"MASTER_ADDR": "none", "MASTER_PORT": 0, "TORCHELASTIC_RUN_ID": "none"}
    os.environ.update({name: str(value) for name, value in values.items()})
    torch.nn.parallel.DistributedDataParallel = ReplicatedModel
    dist.init_process_group, dist.all_gather_object = init_process_group, all_gather_object
    dist.new_group = on_real_tensors(lambda ranks=None, *_, **__: new(ranks, backend=backend))
    dist.barrier = dist.broadcast_object_list = lambda *_, **__: None
    schedules._PipelineSchedule._warmup_p2p = decide_alone


def decide_alone(_, stages, has_backward, p2p_done):
    """Let each stage choose static or dynamic shapes alone, because no other ranks exist to ask."""
    mode = stage_module.InferenceMode
    for stage in stages:
        is_dynamic = mode.needs_dynamic(stage._user_meta, has_backward)
        stage._inference_mode = mode.DYNAMIC if is_dynamic else mode.STATIC


class ReplicatedModel(torch.nn.Module):
    """Stand in for DistributedDataParallel, whose C++ code reads data that fake tensors lack."""

    def __init__(self, module, **_):
        super().__init__()
        self.module, self.require_backward_grad_sync = module, True
        weights = [weight for weight in module.parameters() if weight.requires_grad][::-1]
        if any(hasattr(weight, "bucket") for weight in weights):
            problem = "a second DistributedDataParallel would reduce the same gradients again"
            raise RuntimeError(f"{problem}; wrap the model once")
        # As DDP does, close the first bucket when it has 1 MiB or more, and each later bucket when
        # it has 25 MiB or more.
        bucket, limit = [], 2**20
        for weight in weights:
            bucket.append(weight)
            if sum(w.numel() * w.itemsize for w in bucket) >= limit or weight is weights[-1]:
                self.make_bucket(bucket)
                bucket, limit = [], 25 * 2**20

    def make_bucket(self, weights):
        """Store the gradients of `weights` in one tensor; all-reduce it when it is complete."""
        sizes, ready = [weight.numel() for weight in weights], []
        bucket = torch.zeros(sum(sizes), device=weights[0].device)

        def after_gradient(part, weight):
            if not self.require_backward_grad_sync:
                return
            if weight.grad.untyped_storage()._cdata != bucket.untyped_storage()._cdata:
                weight.grad = part.view_as(weight)
            ready.append(weight)
            if len(ready) == len(weights):
                ready.clear()
                dist.all_reduce(bucket.div_(dist.get_world_size()))

        for weight, part in zip(weights, bucket.split(sizes), strict=True):
            weight.bucket = bucket
            weight.register_post_accumulate_grad_hook(functools.partial(after_gradient, part))

    @contextlib.contextmanager
    def no_sync(self):
        """Let backward passes in this context add up gradients without an all-reduce."""
        self.require_backward_grad_sync = False
        yield
        self.require_backward_grad_sync = True

    def forward(self, *args, **kwargs):
        """Run the forward pass of the wrapped model."""
        return self.module(*args, **kwargs)
