"""Run the training steps of one rank in the process of a test."""

import io
import re

import torch
from torch.profiler import profile

from conftest import prepare_training

FLAGS = "--device cpu --precision bf16 --seq-length 16 --eval-samples 5 --batch-size 2".split()
# If a tensor is on a GPU, these operations make the host wait for the GPU.
SYNC_OPS = re.compile("aten::(_local_scalar_dense|item|nonzero|is_nonzero)$")


class Captured(io.StringIO):
    """Collect output in memory, but offer a file descriptor, as real streams do."""

    def fileno(self):
        return 2

    def reconfigure(self, **_):
        """Do nothing, because a stream in memory needs no line buffering."""


def tensors_of(model, optimizer):
    """Return all tensors that training may change: weights, buffers, and the optimizer's state."""
    moments = [state[name] for state in optimizer.state.values() for name in sorted(state)]
    return [*model.state_dict().values(), *moments]


def events_of_steps(chapter, *words):
    """Profile three training steps; return the names of the operations, and the model.

    The operations inside AdamW's kernel are left out. In a chapter with DDP, the returned model is
    wrapped in DDP.
    """
    flags = [*FLAGS, "--config", "num_hidden_layers=1"]
    args, model, optimizer, train_set, _ = prepare_training(chapter, *flags, *words)
    if hasattr(chapter, "DistributedDataParallel"):
        model = chapter.DistributedDataParallel(model, gradient_as_bucket_view=True)
        model.broadcast_buffers, model.loss_function = False, model.module.loss_function
    device = torch.device("cpu")
    # Run two steps first, because DDP rebuilds its buckets after the first step.
    for step in (1, 2):
        chapter.train_step(args, model, optimizer, train_set, step, device)
    with profile() as profiled:
        for step in (3, 4, 5):
            chapter.train_step(args, model, optimizer, train_set, step, device)
    return [event.name for event in profiled.events() if not in_optimizer(event)], model


def in_optimizer(event):
    """Return whether AdamW's kernel caused this event.

    On a CPU, the kernel reads AdamW's step counters with operations of SYNC_OPS. On a GPU, the
    kernel reads the counters in GPU memory, so the host does not wait.
    """
    while event and event.name != "aten::_fused_adamw_":
        event = event.cpu_parent
    return event is not None
