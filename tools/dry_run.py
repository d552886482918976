"""Run a chapter's command on GPUs that do not exist, one rank at a time, before you rent them.

    python tools/dry_run.py --gpus 512 -- 06-tensor-parallel/train_llm.py \
        @05-large-model/configs/llama-3.1-70b.args --tensor-parallel-size 8

The script runs unchanged, at the real sizes: it builds, shards, evaluates, and trains two steps.
Its tensors have shapes and devices, but no data, so that a laptop is large enough. The GPU is a
device of torch's own kind for backends that are written in Python, and the process group has as
many ranks as you say, but sends nothing. The tool counts the bytes of all tensors, the bytes that
the rank sends, and the places where the CPU waits for the GPU.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import linecache
import math
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import types
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # noqa: F401  (shapes of collectives)
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tools/planner"))

from step_time import SPEEDS, collective  # noqa: E402
from training_step import copy_of_config, needs_no_mask  # noqa: E402

aten, GIB = torch.ops.aten, 2**30
# The name that torch has for each GPU, its memory in GiB, and its compute capability.
GPUS = {
    "T4-16GB": ("Tesla T4", 15, (7, 5)),
    "A100-40GB": ("NVIDIA A100-SXM4-40GB", 40, (8, 0)),
    "A100-80GB": ("NVIDIA A100-SXM4-80GB", 80, (8, 0)),
    "H100-80GB": ("NVIDIA H100 80GB HBM3", 80, (9, 0)),
    "H200-141GB": ("NVIDIA H200", 140, (9, 0)),
    "B200-180GB": ("NVIDIA B200", 179, (10, 0)),
}


# ---- a GPU that does not exist ---------------------------------------------------------------
class Instant:
    """Stand in for a stream or an event; nothing waits, because nothing runs."""

    device_index = stream_id = priority = 0

    def __init__(self, *_, **__):
        pass

    def __eq__(self, other):
        return isinstance(other, Instant)

    def __hash__(self):
        return 0

    def record(self, *_, **__):
        return self

    wait = wait_event = wait_stream = record_event = record


def gpu_functions(options, watch):
    """Return what torch.cuda and the module of the fake device answer."""
    name, _, capability = GPUS[options.gpu]

    def nothing(*_, **__):
        return None

    def synchronize(*_):
        watch.wait("synchronize()")

    stream = Instant()
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: capability >= (8, 0),
        "device_count": lambda: options.gpus_per_node,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: name,
        "get_device_capability": lambda *_: capability,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "max_memory_allocated": lambda *_: watch.peak("gpu"),
        "memory_allocated": lambda *_: watch.live["gpu"].total(),
        "synchronize": synchronize,
        "Stream": Instant,
        "Event": Instant,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda *_: contextlib.nullcontext(),
        "device": lambda *_: contextlib.nullcontext(),
        "_is_in_bad_fork": lambda: False,
    } | dict.fromkeys("set_device manual_seed manual_seed_all empty_cache".split(), nothing)


class ScriptTorch(types.ModuleType):
    """Stand in for torch in the script: "cuda" names the fake GPU."""

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def device(kind, *index):
        return torch.device(kind.replace("cuda", "gpu") if isinstance(kind, str) else kind, *index)


def swap(one, other):
    """Exchange two tensors, also if weak references to them exist."""
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


def move(weights, buffers, device):
    """Move tensors in place; FSDP's own function sets `.data`, which keeps a fake tensor's device."""
    for tensor in (*weights, *buffers):
        if tensor.device != device and tensor.device.type != "meta":
            with torch.no_grad():
                moved = tensor.to(device)
            if isinstance(tensor, torch.nn.Parameter):
                moved = torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)
            swap(tensor, moved)


def add_gpu(options, watch):
    """Add the device "gpu" to this process, and replace what cannot run on fake tensors."""
    module = types.ModuleType("torch.gpu")
    vars(module).update(gpu_functions(options, watch))
    backend_registration._setup_privateuseone_for_python_backend("gpu", module)
    torch.utils.swap_tensors = swap
    _fsdp_init._move_states_to_device = move
    torch.distributed.fsdp._fully_shard._fully_shard._move_states_to_device = move
    torch.Tensor.record_stream = lambda *_: None
    torch.accelerator.current_stream = lambda *_: Instant()
    torch.autograd.set_multithreading_enabled(False)
    torch._functorch.config.fake_tensor_allow_meta = True
    # The mesh computes with true tensors.
    mesh = dist.device_mesh.DeviceMesh
    names = "__init__ __getitem__ _flatten _unflatten _concatenate get_coordinate get_local_rank"
    for owner, name in [(mesh, name) for name in names.split() if hasattr(mesh, name)]:
        setattr(owner, name, without_modes(getattr(owner, name)))
    # DTensor asks for the shapes of full tensors that nobody makes.
    for name in ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta"):
        if hasattr(ShardingPropagator, name):
            setattr(ShardingPropagator, name, uncounted(watch, getattr(ShardingPropagator, name)))
    add_autocast()


def without_modes(function):
    """Return the function, but on true tensors."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def uncounted(watch, function):
    """Return the function, but without counting its tensors."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        watch.paused += 1
        try:
            return function(*args, **kwargs)
        finally:
            watch.paused -= 1

    return call


# What autocast computes in bf16 or fp16 on a GPU, and in float32.
HALF = "mm addmm bmm baddbmm matmul linear conv1d einsum".split()
FULL = "pow rsqrt layer_norm softmax log_softmax nll_loss sum cumsum norm".split()
LIBRARY, FALLBACK = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")


def add_autocast():
    """Cast on the fake GPU as autocast does on a GPU."""
    for name in ("silu_backward", "mish_backward"):
        LIBRARY.impl(name, lambda *_: None, "PrivateUse1")
    key, cache = torch._C.DispatchKey.AutocastPrivateUse1, {}
    FALLBACK.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    clear = torch.clear_autocast_cache
    torch.clear_autocast_cache = lambda: (cache.clear(), clear())

    def cast(dtype, value):
        if not isinstance(value, torch.Tensor) or value.device.type != "gpu":
            return value
        if not value.is_floating_point() or value.dtype in (dtype, torch.float64):
            return value
        # Autocast casts a weight once in each forward pass.
        if value.is_leaf and value.requires_grad and dtype != torch.float32:
            if id(value) not in cache:
                cache[id(value)] = value.to(dtype)
            return cache[id(value)]
        return value.to(dtype)

    def kernel(operation, is_half, *args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            dtype = torch.get_autocast_dtype("gpu") if is_half else torch.float32
            to_dtype = functools.partial(cast, dtype)
            return operation(*tree_map(to_dtype, args), **tree_map(to_dtype, kwargs))

    for name in HALF + FULL:
        packet = getattr(aten, name)
        for overload in packet.overloads():
            if not overload.endswith(("out", "dimname", "names_out")):
                operation = getattr(packet, overload)
                implementation = functools.partial(kernel, operation, name in HALF)
                LIBRARY.impl(operation, implementation, "AutocastPrivateUse1")


class LowerRight:
    """Stand in for the mask of causal_lower_right(), which has no data on a GPU either."""

    shape = ()

    def __init__(self, *size):
        self.size = size


def attention_on(options):
    """Return a function in place of F.scaled_dot_product_attention: one kernel of a GPU."""
    original, capability = torch.nn.functional.scaled_dot_product_attention, GPUS[options.gpu][2]

    def attention(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **more
    ):
        inputs = query, key, value
        if query.device.type != "gpu":
            return original(*inputs, attn_mask, dropout_p, is_causal, scale=scale, **more)
        if torch.is_autocast_enabled("gpu"):
            inputs = (part.to(torch.get_autocast_dtype("gpu")) for part in inputs)
            query, key, value = inputs
        if isinstance(attn_mask, LowerRight):
            attn_mask, is_causal = None, True
        is_half = query.dtype in (torch.bfloat16, torch.float16)
        flash = is_half and attn_mask is None and capability >= (8, 0)
        if flash:
            return aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, scale=scale
            )[0]
        # Only flash attention takes grouped heads.
        if more.get("enable_gqa"):
            return aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True
            )[0]
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
        )[0]

    return attention


# ---- ranks that do not exist -----------------------------------------------------------------
def add_ranks(options, rank):
    """Make this process one rank of a group that sends nothing."""
    start, new = dist.init_process_group, dist.new_group

    def init_process_group(*_, timeout=None, **__):
        start("cpu:fake,gpu:fake", rank=rank, world_size=options.gpus, store=FakeStore())

    def new_group(ranks=None, *_, **__):
        with _disable_current_modes():
            return new(ranks, backend="cpu:fake,gpu:fake")

    def all_gather_object(objects, mine, group=None):
        objects[:] = [mine] * len(objects)

    os.environ.update(launcher_variables(options, rank))
    dist.init_process_group, dist.new_group = init_process_group, new_group
    dist.all_gather_object = all_gather_object
    dist.barrier = dist.broadcast_object_list = lambda *_, **__: None


def launcher_variables(options, rank):
    """Return what torchrun sets."""
    local_rank = rank % options.gpus_per_node
    values = {"RANK": rank, "WORLD_SIZE": options.gpus, "LOCAL_RANK": 0, "MASTER_PORT": 29500}
    values |= {"MASTER_ADDR": "none", "TORCHELASTIC_RUN_ID": "dry"}
    return {name: str(value) for name, value in values.items()} if options.gpus > 1 else {}


class ReplicatedModel(torch.nn.Module):
    """Stand in for DistributedDataParallel, whose C++ code reads the data of tensors."""

    def __init__(self, module, **_):
        super().__init__()
        self.module, self.syncs = module, True
        weights = [weight for weight in module.parameters() if weight.requires_grad]
        bucket, limit = [], 2**20
        for weight in reversed(weights):
            bucket.append(weight)
            if sum(w.numel() * w.itemsize for w in bucket) >= limit or weight is weights[0]:
                self.make_bucket(bucket)
                bucket, limit = [], 25 * 2**20

    def make_bucket(self, weights):
        """Let the gradients of these weights be parts of one tensor, reduced when it is full."""
        sizes = [weight.numel() for weight in weights]
        bucket, ready = torch.zeros(sum(sizes), device=weights[0].device), []

        def after_gradient(part, weight):
            if not self.syncs:
                return
            if weight.grad.untyped_storage()._cdata != bucket.untyped_storage()._cdata:
                weight.grad = part.view_as(weight)
            ready.append(weight)
            if len(ready) == len(weights):
                ready.clear()
                bucket.div_(dist.get_world_size())
                dist.all_reduce(bucket)

        for weight, part in zip(weights, bucket.split(sizes), strict=True):
            hook = functools.partial(after_gradient, part)
            weight.register_post_accumulate_grad_hook(hook)

    @contextlib.contextmanager
    def no_sync(self):
        """Accumulate gradients without reducing them."""
        self.syncs = False
        yield
        self.syncs = True

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


# ---- what a rank does ------------------------------------------------------------------------
# The kind of the tensors that these functions create.
KINDS = {
    "init_all_gather_outputs": "gathered weights",
    "alloc_all_gather_outputs": "gathered weights",
    "all_gather_inputs": "communication",
    "foreach_all_gather": "communication",
    "foreach_reduce": "communication",
    "to_accumulated_grad_if_needed": "full gradients",
    "make_bucket": "gradients",
    "adamw": "optimizer state",
    "_init_group": "optimizer state",
    "loss_of_chunk": "logits",
    "_prepare_forward_infra": "communication",
    "_prepare_backward_infra": "communication",
}
COLLECTIVES = {
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
}


class Watch(TorchDispatchMode):
    """Count the bytes of tensors and collectives, and the waits of the CPU for the GPU."""

    def __init__(self, options, script):
        super().__init__()
        self.options, self.script = options, script
        self.paused, self.phase = 0, "start"
        # The size, device and kind of each live storage, and the sums by device and kind.
        self.storages, self.live = {}, {"gpu": Counter(), "cpu": Counter()}
        # The fullest moment of each device in each phase: its bytes by kind, and its place.
        self.peaks, self.pinned = {}, set()
        self.waits, self.sent = Counter(), {}

    def peak(self, device):
        """Return the bytes at the fullest moment."""
        return max((kinds.total() for (_, d), (kinds, _) in self.peaks.items() if d == device))

    def place(self):
        """Return the running line of the script, and the kind of the tensors that it creates."""
        frame, kind = sys._getframe(2), None
        while frame and frame.f_code.co_filename != self.script:
            kind = kind or KINDS.get(frame.f_code.co_name)
            frame = frame.f_back
        line = (frame.f_lineno, frame.f_code.co_name) if frame else (0, "")
        return line, kind or KINDS.get(line[1])

    def part(self):
        """Return the phase, and in a step its part."""
        in_backward = torch._C._current_graph_task_id() != -1
        return f"{self.phase}: backward" if in_backward else self.phase

    def wait(self, reason):
        """Count a wait of the CPU for the GPU."""
        if not self.paused:
            self.waits[self.phase, reason, self.place()[0]] += 1

    def count(self, storage, device):
        """Count a storage that is new, or that has a new size."""
        key = storage._cdata
        if device is None and key not in self.storages:
            return
        before, device, kind = self.storages.get(key, (0, device, None))
        # torch's allocator rounds sizes up to 512 bytes.
        size = -(-storage.nbytes() // 512) * 512
        if size == before:
            return
        place, kind_here = self.place()
        if kind is None:
            kind = kind_here or self.default_kind()
            weakref.finalize(storage, self.forget, key)
        live = self.live[device]
        live[kind] += size - before
        self.storages[key] = size, device, kind
        if size > before:
            phase = self.part(), device
            if phase not in self.peaks or live.total() > self.peaks[phase][0].total():
                self.peaks[phase] = live.copy(), place

    def default_kind(self):
        """Return the kind of a new tensor by what goes on."""
        if not self.phase.startswith(("step", "evaluat", "check")):
            return "parameters"
        is_forward = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        return "activations" if is_forward else "temporary"

    def forget(self, key):
        """Stop counting a storage."""
        size, device, kind = self.storages.pop(key)
        self.pinned.discard(key)
        self.live[device][kind] -= size

    def rename(self, tensor, kind):
        """Change the kind of a tensor."""
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        key = tensor.untyped_storage()._cdata
        if key in self.storages:
            size, device, before = self.storages[key]
            self.storages[key] = size, device, kind
            self.live[device][before] -= size
            self.live[device][kind] += size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if self.paused:
            return func(*args, **kwargs)
        if func in (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.item.default):
            return self.read(func, args[0])
        if func is aten._pin_memory.default:
            output = torch.empty_like(args[0])
            self.pinned.add(output.untyped_storage()._cdata)
            return output
        if func is aten.is_pinned.default:
            return args[0].untyped_storage()._cdata in self.pinned
        if func in (aten._to_copy.default, aten.copy_.default):
            self.copy(func, args, kwargs)
        else:
            self.check_devices(func, args, kwargs)
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::", "_dtensor::")) and "wait" not in name:
            self.send(name.partition("::")[2], args)
        output = func(*args, **kwargs)
        for tensor in tree_leaves(output):
            if isinstance(tensor, FakeTensor) and tensor.device.type in self.live:
                self.count(tensor.untyped_storage(), tensor.device.type)
        return output

    def read(self, func, tensor):
        """Return a number in place of the value of a tensor; on a GPU, the CPU waits for it."""
        if tensor.device.type == "gpu":
            self.wait("reads a value")
        if not isinstance(tensor, FakeTensor):
            return func(tensor)
        zero = torch.zeros((), dtype=tensor.dtype, device="cpu") if False else None
        if tensor.dtype == torch.bool or func is aten.is_nonzero.default:
            return False
        return 0.0 if tensor.is_floating_point() else 0

    def copy(self, func, args, kwargs):
        """Count a copy between CPU and GPU that makes the CPU wait."""
        source, target = args[0], kwargs.get("device") or args[0].device
        blocking = not kwargs.get("non_blocking")
        if func is aten.copy_.default:
            target, source = args[0].device, args[1]
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        pair = source.device.type, torch.device(target).type
        if blocking and set(pair) == {"cpu", "gpu"}:
            self.wait(f"copies {pair[0]} → {pair[1]}".upper().replace("COPIES", "copies"))

    def check_devices(self, func, args, kwargs):
        """Raise the error of a GPU about a tensor that is on the CPU."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        kinds = {tensor.device.type for tensor in tensors}
        if not {"cpu", "gpu"} <= kinds or "index" in func._schema.name:
            return
        # A number on the CPU may take part, but not be the result.
        written = args[0] if func._schema.is_mutable and args else None
        is_written = isinstance(written, torch.Tensor) and written.device.type == "cpu"
        if is_written or "fused" in func._schema.name or "foreach" in func._schema.name:
            raise RuntimeError(f"{func}: Expected all tensors to be on the same device")

    def send(self, name, args):
        """Count a collective of this rank."""
        tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        if "reduce_scatter" in name and self.place()[1] == "communication":
            self.rename(tensors[0], "gradients")
        kind = next((COLLECTIVES[key] for key in COLLECTIVES if key in name), None)
        if kind is None or not tensors:
            return
        group = next(filter(None, map(group_of, tree_leaves(args))), None)
        ranks = dist.get_process_group_ranks(group)
        if kind == "send":
            ranks = [dist.get_rank(), next(x for x in args if type(x) is int)]
            ranks[1] = dist.get_process_group_ranks(group)[ranks[1]]
        if len(ranks) == 1:
            return
        nodes = len({rank // self.options.gpus_per_node for rank in ranks})
        size = max(tensor.numel() * tensor.itemsize for tensor in tensors)
        device = tensors[0].device.type
        seconds, sent = transfer(self.options, kind, size, len(ranks), nodes)
        key = self.part(), kind, len(ranks), nodes, device
        calls, total, total_seconds = self.sent.get(key, (0, 0.0, 0.0))
        self.sent[key] = calls + 1, total + sent, total_seconds + seconds


def group_of(value):
    """Return the process group of an argument of a collective, or None."""
    with contextlib.suppress(Exception):
        if isinstance(value, torch.ScriptObject):
            return dist.ProcessGroup.unbox(value)
        if isinstance(value, str):
            return dist.distributed_c10d._resolve_process_group(value)
    return None


def transfer(options, kind, size, ranks, nodes):
    """Return the seconds of a collective by NCCL's estimate, and the bytes that a rank sends."""
    speed = options.nvlink_gbs
    if nodes > 1:
        speed = min(speed, ranks / nodes * options.network_gbs)
    if kind == "send":
        return size / speed / 1e9, size
    return collective(options, kind, size, ranks, nodes, speed)


# ---- the script ------------------------------------------------------------------------------
def load_script(options):
    """Import the script as a module."""
    spec = importlib.util.spec_from_file_location("dry_run_script", options.script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def prepare_script(options, module, watch, fake, modes):
    """Replace what needs a GPU, data, files or other ranks, and let the script's parts be phases."""
    module.torch = ScriptTorch("torch")
    module.torch.cuda = SimpleNamespace(**gpu_functions(options, watch))
    module.has_gpu = lambda: True
    module.AutoConfig = SimpleNamespace(from_pretrained=copy_of_config)
    module.AutoTokenizer = SimpleNamespace(from_pretrained=lambda _: transformers.ByT5Tokenizer())
    module.needs_no_mask = needs_no_mask
    module.causal_lower_right = LowerRight
    module.DistributedDataParallel = ReplicatedModel
    if hasattr(module, "init_device_mesh"):
        module.init_device_mesh = without_modes(module.init_device_mesh)
    module.load_checkpoint = lambda *_: 0
    for name in ("check_shared", "read_weights", "save_checkpoint", "export_model"):
        setattr(module, name, lambda *_: None)
    parse_args = module.parse_args

    def parse_short_run():
        args = parse_args()
        args.compile = args.pretrained = args.checkpoint_async = False
        args.num_steps = args.eval_every = 2
        args.log_every, args.wandb = 2, "disabled"
        return args

    def build_data(args, _):
        # Zeros that use no memory: a token is repeated.
        samples = torch.zeros(1, 1, dtype=torch.int32)
        samples = samples.expand(3 * args.global_batch_size, args.seq_length)
        held_out = samples[: min(args.eval_samples, options.gpus)]
        return module.Samples(samples), held_out

    module.parse_args, module.build_data = parse_short_run, build_data

    def start():
        modes.enter_context(fake)
        modes.enter_context(watch)

    setup = module.setup

    def setup_on_fake_gpu(args):
        with fake, watch:
            return setup(args)

    module.setup = setup_on_fake_gpu
    phases = {
        "build_model": "build",
        "shard": "shard",
        "check_forward": "check",
        "build_optimizer": "optimizer",
        "evaluate": "evaluation",
        "train_step": "step",
        "clip_gradients": "step: clip",
    }
    for name, phase in phases.items():
        if hasattr(module, name):
            begin = start if name == "build_model" else None
            setattr(module, name, as_phase(watch, getattr(module, name), phase, begin))


def as_phase(watch, function, phase, begin=None):
    """Return the function, but let it be a phase of the run."""

    def call(*args, **kwargs):
        if begin:
            begin()
        before = watch.phase
        watch.phase = phase
        if phase == "step":
            watch.phase = f"step {args[4]}"
        if phase.startswith("step: "):
            watch.phase = f"{before}: {phase[6:]}"
        try:
            return function(*args, **kwargs)
        finally:
            watch.phase = before

    return call


def name_gradients(watch):
    """Let gradients of gathered weights be a kind."""
    original = _fsdp_param.FSDPParam.init_unsharded_param

    def init_unsharded_param(self):
        is_new = not hasattr(self, "_unsharded_param")
        original(self)
        if is_new and self._unsharded_param.requires_grad:
            self._unsharded_param.register_post_accumulate_grad_hook(
                lambda weight: watch.rename(weight.grad, "full gradients")
            )

    _fsdp_param.FSDPParam.init_unsharded_param = init_unsharded_param


def run_rank(options, module, rank):
    """Run the script as this rank; return what it did."""
    began, watch = time.time(), Watch(options, options.script)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    add_gpu(options, watch)
    add_ranks(options, rank)
    torch.nn.functional.scaled_dot_product_attention = attention_on(options)
    name_gradients(watch)
    resize = torch.UntypedStorage.resize_

    def resize_and_count(storage, size):
        result = resize(storage, size)
        watch.count(storage, None)
        return result

    torch.UntypedStorage.resize_ = resize_and_count
    problem = None
    with contextlib.ExitStack() as modes, tempfile.TemporaryDirectory() as folder:
        prepare_script(options, module, watch, fake, modes)
        sys.argv = [options.script, *options.words, "--device", "cuda", "--save-dir", folder]
        stdout = sys.stdout
        sys.stdout = open(os.devnull, "w")
        try:
            module.main()
        except BaseException as error:
            problem = "".join(traceback.format_exception(error))
        finally:
            sys.stdout = stdout
    return SimpleNamespace(watch=watch, problem=problem, seconds=time.time() - began)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--gpu", default="H100-80GB")
    parser.add_argument("--rank", type=int, default=0)
    for name, (speed, description) in SPEEDS.items():
        parser.add_argument(name, type=float, default=speed, help=description)
    parser.add_argument("script")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    options.script = str(Path(options.script).resolve())
    module = load_script(options)
    r = run_rank(options, module, options.rank)
    w = r.watch
    print("seconds", r.seconds)
    print(r.problem)
    for (phase, device), (kinds, place) in w.peaks.items():
        print(phase, device, f"{kinds.total()/GIB:.2f}", {k: round(v/GIB, 2) for k, v in kinds.items() if v > 2**24}, place)
    for k, v in w.waits.items(): print(k, v)
    for k, v in w.sent.items(): print(k, v[0], f"{v[1]/1e9:.3f} GB {v[2]:.3f} s")
    os._exit(0)
