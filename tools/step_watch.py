"""Count the bytes of one rank's tensors, the bytes that it sends, and its waits for the GPU."""

import contextlib
import sys
import weakref
from collections import Counter

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from step_time import collective

aten = torch.ops.aten
# Each key names a function of torch or of a script. The value is the kind of the tensors that the
# function creates.
KINDS = {
    "init_all_gather_outputs": "gathered weights",
    "alloc_all_gather_outputs": "gathered weights",
    "all_gather_inputs": "communication",
    "foreach_all_gather": "communication",
    "foreach_reduce": "communication",
    "to_accumulated_grad_if_needed": "full gradients",
    "make_bucket": "gradients",
    "_init_group": "optimizer state",
    "momentum_of": "optimizer state",
    "loss_of_chunk": "logits",
    "loss_of_logits": "logits",
    "ChunkedLoss.forward": "logits",
    "_prepare_forward_infra": "communication",
    "_prepare_backward_infra": "communication",
}
# The name of a collective's operation in torch contains one of these kinds, with "_" or nothing in
# place of "-".
COLLECTIVES = "all-reduce all-gather reduce-scatter all-to-all broadcast send".split()
# The CPU waits for the GPU in these operations. An operation in READS returns a value to the CPU,
# and the shape of a result of an operation in SHAPES depends on values.
READS = [aten._local_scalar_dense.default, aten.is_nonzero.default, aten.item.default]
SHAPES = [aten.nonzero.default, aten.masked_select.default]


class Watch(TorchDispatchMode):
    """Count tensors, collectives and waits in the phases of a run.

    `phase` names the current phase. For the peak of each phase on each device, `peaks` has the live
    bytes by kind of tensor, and the line that the script was running. `waits` counts the waits by
    phase, line and reason. `sent` has the number of calls, the sent bytes and the estimated seconds
    of collectives, by phase, kind, number of ranks, number of nodes, device and line.
    """

    def __init__(self, options):
        super().__init__()
        self.options, self.phase, self.paused = options, "start", 0
        # `storages` has the size, the device and the kind of each live storage. `live` has the sums
        # of the sizes, by device and kind.
        self.storages, self.live = {}, {"gpu": Counter(), "cpu": Counter()}
        self.peaks, self.waits, self.sent = {}, Counter(), {}
        self.pinned = set()

    def watch_torch(self):
        """Wrap functions of torch, to count resized storages and to recognize full gradients."""
        resize, init_weight = torch.UntypedStorage.resize_, FSDPParam.init_unsharded_param

        def resize_and_count(storage, size):
            resize(storage, size)
            if storage._cdata in self.storages:
                self.count(storage)

        def init_and_watch(weight):
            is_new = not hasattr(weight, "_unsharded_param")
            init_weight(weight)
            if is_new and weight._unsharded_param.requires_grad:
                add_hook = weight._unsharded_param.register_post_accumulate_grad_hook
                add_hook(lambda full_weight: self.rename(full_weight.grad, "full gradients"))

        torch.UntypedStorage.resize_ = resize_and_count
        FSDPParam.init_unsharded_param = init_and_watch

    @contextlib.contextmanager
    def ignoring(self):
        """Ignore the operations in a `with` block, or in a function that has this decorator."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def peak_bytes(self, device):
        """Return the largest number of bytes that tensors have used on a device so far."""
        return max((kinds.total() for (_, on), (kinds, _) in self.peaks.items() if on == device))

    # ---- where the script is -----------------------------------------------------------------

    def running_line(self):
        """Return ((line, function), kind): where the script is, and the kind of new tensors.

        The kind is None if no function in KINDS is running. If the script is not running, the line
        is 0, and the function is "".
        """
        frame, kind = sys._getframe(2), None
        while frame and frame.f_code.co_filename != self.options.script:
            kind = kind or KINDS.get(frame.f_code.co_name)
            frame = frame.f_back
        if not frame:
            return (0, ""), kind
        code = frame.f_code
        kind = kind or KINDS.get(code.co_name) or KINDS.get(code.co_qualname)
        return (frame.f_lineno, code.co_name), kind

    def phase_now(self):
        """Return the name of the current phase; during a backward pass, append ", backward"."""
        in_backward = torch._C._current_graph_task_id() != -1
        return f"{self.phase}, backward" if in_backward else self.phase

    def wait(self, reason):
        """Count a wait of the CPU for the GPU."""
        self.waits[self.phase, self.running_line()[0], reason] += 1

    # ---- memory ------------------------------------------------------------------------------

    def count(self, storage, device=None):
        """Update the live bytes and the peak of the phase for a new or resized storage."""
        key = storage._cdata
        before, device, kind = self.storages.get(key, (0, device, None))
        # torch's allocator for GPUs rounds sizes up to a multiple of 512 bytes.
        size = -(-storage.nbytes() // 512) * 512
        if size == before:
            return
        line, kind_here = self.running_line()
        if kind is None:
            kind = kind_here or self.default_kind()
            weakref.finalize(storage, self.forget, key)
        live, phase = self.live[device], (self.phase_now(), device)
        live[kind] += size - before
        self.storages[key] = size, device, kind
        if phase not in self.peaks or live.total() > self.peaks[phase][0].total():
            self.peaks[phase] = +live, line

    def default_kind(self):
        """Return the kind of a new tensor that no function in KINDS creates."""
        if not self.phase.startswith(("step", "evaluation", "check")):
            return "parameters"
        is_forward = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        return "activations" if is_forward else "temporary"

    def forget(self, key):
        """Subtract a deleted storage from the live bytes."""
        size, device, kind = self.storages.pop(key)
        self.pinned.discard(key)
        self.live[device][kind] -= size

    def rename(self, tensor, kind):
        """Change the kind of a tensor that is already counted."""
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        key = tensor.untyped_storage()._cdata
        if key in self.storages:
            size, device, before = self.storages[key]
            self.storages[key] = size, device, kind
            self.live[device] += Counter({kind: size})
            self.live[device][before] -= size

    # ---- operations --------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # Leave the operation to DTensor or AsyncCollectiveTensor, which call it again with local
        # tensors.
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented
        if self.paused:
            return func(*args, **kwargs)
        if func in READS:
            return self.read(func, args[0])
        if func is aten._pin_memory.default:
            output = torch.empty_like(args[0])
            self.pinned.add(output.untyped_storage()._cdata)
        elif func is aten.is_pinned.default:
            return args[0].untyped_storage()._cdata in self.pinned
        else:
            self.check(func, args, kwargs)
            output = func(*args, **kwargs)
            # Copy the fake result, because it is a view of a larger tensor that a GPU would not
            # hold.
            if func is torch.ops._dtensor.shard_dim_alltoall.default:
                output = output.clone()
        for tensor in tree_leaves(output):
            if isinstance(tensor, FakeTensor) and tensor.device.type in self.live:
                self.count(tensor.untyped_storage(), tensor.device.type)
        return output

    def read(self, func, tensor):
        """Return the value of a real tensor; a fake tensor has no value, so return zero or False.

        If the tensor is on the GPU, count a wait.
        """
        if tensor.device.type == "gpu":
            self.wait("reads a value")
        if not isinstance(tensor, FakeTensor):
            return func(tensor)
        if tensor.dtype == torch.bool or func is aten.is_nonzero.default:
            return False
        return 0.0 if tensor.is_floating_point() else 0

    def check(self, func, args, kwargs):
        """Count an operation's waits and sent bytes; refuse a mix of devices that torch refuses."""
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::", "_dtensor::")) and "wait" not in name:
            self.send(name.partition("::")[2], args)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        if func in SHAPES and "gpu" in devices:
            self.wait("asks how many values are not zero")
        target = tensors[0].device.type if tensors else None
        if func is aten._to_copy.default and kwargs.get("device"):
            target = torch.device(kwargs["device"]).type
        if not {"cpu", "gpu"} <= devices | {target}:
            return
        if func in (aten._to_copy.default, aten.copy_.default):
            if not kwargs.get("non_blocking") and args[2:] != (True,):
                self.wait(f"copies to the {target.upper()}")
        elif "index" in name:
            self.wait("copies indices to the GPU")
        # Like torch, refuse a fused operation on tensors of different devices, and an operation
        # that would write a result from the GPU into a tensor on the CPU.
        elif "fused" in name or (func._schema.is_mutable and tensors[0].device.type == "cpu"):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")

    def send(self, name, args):
        """Count a collective, or a message that this rank sends to a different rank."""
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        letters = name.replace("_", "")
        kind = next((kind for kind in COLLECTIVES if kind.replace("-", "") in letters), None)
        group = next(filter(None, map(group_of, tree_leaves(args))), None)
        if kind is None or group is None or not tensors:
            return
        line, kind_of_tensors = self.running_line()
        if kind == "reduce-scatter" and kind_of_tensors == "communication":
            self.rename(tensors[0], "gradients")
        ranks = dist.get_process_group_ranks(group)
        if kind == "send":
            peer = next(value for value in args if type(value) is int)
            ranks = [dist.get_rank(), ranks[peer]]
        if len(ranks) > 1:
            nodes = len({rank // self.options.gpus_per_node for rank in ranks})
            size = max(tensor.numel() * tensor.itemsize for tensor in tensors)
            # Multiply by the number of ranks, because these all-gathers get only one rank's part of
            # the full tensor as an argument.
            if name.startswith("all_gather"):
                size *= len(ranks)
            seconds, sent = transfer(self.options, kind, size, len(ranks), nodes)
            key = self.phase_now(), kind, len(ranks), nodes, tensors[0].device.type, *line
            calls, all_sent, all_seconds = self.sent.get(key, (0, 0.0, 0.0))
            self.sent[key] = calls + 1, all_sent + sent, all_seconds + seconds


def group_of(value):
    """Return the process group that a collective's argument stands for, otherwise None."""
    with contextlib.suppress(Exception):
        if isinstance(value, torch.ScriptObject):
            return dist.ProcessGroup.unbox(value)
        if isinstance(value, str):
            return dist.distributed_c10d._resolve_process_group(value)
    return None


def transfer(options, kind, size, ranks, nodes):
    """Return the estimated seconds of a collective or a message, and the bytes that a rank sends.

    `size` is the number of bytes of the full tensor. A ring over several nodes uses the network
    links of all ranks that it has on a node.
    """
    gbs = options.nvlink_gbs
    if nodes > 1:
        gbs = min(gbs, ranks / nodes * options.network_gbs)
    if kind == "send":
        return size / gbs / 1e9, size
    return collective(options, kind, size, ranks, nodes, gbs)
