"""One rank's train steps in the process of a test."""

import argparse
import contextlib
import re

import torch
from torch.profiler import profile

from conftest import prepared
from worker import Captured

LINE = "--device cpu --precision bf16 --seq-length 64 --eval-samples 5 --batch-size 2".split()
READS = re.compile("aten::(_local_scalar_dense|item|nonzero|is_nonzero)$")  # what waits for a GPU


def tensors_of(model, optimizer):
    """Return all tensors that training changes."""
    moments = [state[name] for state in optimizer.state.values() for name in sorted(state)]
    return [*model.state_dict().values(), *moments]


def events_of_steps(chapter, *words):
    """Return the names of all operations of three train steps, and the chapter's DDP model."""
    args, model, optimizer, train_set, _ = prepared(chapter, *LINE, *words)
    if hasattr(chapter, "DistributedDataParallel"):
        model = chapter.DistributedDataParallel(model, gradient_as_bucket_view=True)
        model.broadcast_buffers = False
    device = torch.device("cpu")
    for step in (1, 2):  # DDP rebuilds its buckets after the first
        chapter.train_step(args, model, optimizer, train_set, step, device)
    with profile() as profiled:
        for step in (3, 4, 5):
            chapter.train_step(args, model, optimizer, train_set, step, device)
    return [event.name for event in profiled.events() if not in_optimizer(event)], model


def in_optimizer(event):
    """Return whether AdamW's kernel did it: on a CPU it reads its step counters, on a GPU not."""
    while event and event.name != "aten::_fused_adamw_":
        event = event.cpu_parent
    return event is not None


def set_up(chapter, monkeypatch, tmp_path, **args):
    """Call a chapter's `setup` as rank 0 of 16 that seem to be there."""
    for name, value in {"init_process_group": None, "get_rank": 0, "get_world_size": 16}.items():
        monkeypatch.setattr(chapter.dist, name, lambda *_, value=value, **__: value)
    for name in ("patient_group", "check_shared"):
        monkeypatch.setattr(chapter, name, lambda *_: None, raising=False)
    args |= {"dist_timeout": 9, "save_dir": tmp_path, "experiment_name": "run"}
    with contextlib.redirect_stdout(Captured()):
        chapter.setup(argparse.Namespace(**args))
