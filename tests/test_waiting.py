"""Test that a step does not wait for the device, and that DDP reduces each bucket once."""

import functools
import re

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from conftest import SCRIPTS, SHORT, change_file, prepare_training, run_or_fail
from in_process import FLAGS, SYNC_OPS, events_of_steps
from marks import exhaustive

# The profiler reports each reduction twice, once under each of these names.
REDUCTION = {"gloo:all_reduce", "c10d::allreduce_"}
COLLECTIVES = re.compile("gloo:|nccl:|c10d::")


@pytest.mark.parametrize("name", ["tiny", "gemma3", *map(exhaustive, ("gpt2", "qwen3"))])
def test_step_reads_no_value_from_the_device(load, models, name):
    """Check that a step reads no number from a tensor: on a GPU, each read makes the host wait."""
    name = name if name == "tiny" else str(models / name)
    events, _ = events_of_steps(load("01"), "--model-name", name, "--global-batch-size", 4)
    assert "aten::mm" in events, "the profiler has recorded no step"
    assert [event for event in events if SYNC_OPS.match(event)] == []


@pytest.mark.parametrize("chapter, precision, further", [("02", "bf16", 0), ("fp16", "fp16", 1)])
def test_step_reduces_each_bucket_of_ddp_once_and_nothing_else(
    load, one_rank_group, chapter, precision, further
):
    """Count a step's all-reduces: one per bucket and, in fp16, one for the flag of a fatal step."""
    words = ["--global-batch-size", 8, "--precision", precision]
    events, ddp = events_of_steps(load(chapter), *words)
    num_buckets = len(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(","))
    assert num_buckets in (1, 2)
    # The profile covers three steps, so it has three times the reductions of one step.
    assert events.count("c10d::allreduce_") == 3 * (num_buckets + further)
    others = [event for event in events if COLLECTIVES.match(event) and event not in REDUCTION]
    assert others == []
    assert [event for event in events if SYNC_OPS.match(event)] == []


@pytest.mark.parametrize("chapter", ["02", "fp16"])
def test_gradients_stay_in_the_buckets_of_ddp(chapter, tmp_path):
    """Check that each gradient is a part of a bucket, also in the first step after a resume."""
    forward = "        loss = loss_of("
    check = """        for weight in model.parameters():
            assert weight.grad.untyped_storage().nbytes() > weight.grad.nbytes, "not in a bucket"
"""
    script = change_file(SCRIPTS[chapter], forward, check + forward, tmp_path / "train_llm.py")
    words = [*SHORT, "--batch-size", 2, "--save-dir", tmp_path / "runs", "-e", "run"]
    for num_steps in (2, 4):
        run_or_fail(1, [(script, [*words, "--num-steps", num_steps])], tmp_path / "jobs")


@pytest.mark.slow
def test_compiled_layers_let_ddp_send_while_they_compute(load, one_rank_group, monkeypatch):
    """Check that DDP can send the first bucket before most gradients are ready.

    A compiled layer is a separate graph, so its gradients are ready before those of earlier layers.
    """
    # This backend builds the same graphs as the default backend, but generates no code.
    compile_layer = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
    monkeypatch.setattr(torch.nn.Module, "compile", compile_layer)
    chapter = load("02")
    args, model, *_ = prepare_training(chapter, *FLAGS, "--compile")
    ddp = chapter.DistributedDataParallel(model, bucket_cap_mb=1)
    ddp.loss_function = model.loss_function
    ready_weights, ready_at_send = [], []
    for name, weight in model.named_parameters():
        weight.register_post_accumulate_grad_hook(lambda _, name=name: ready_weights.append(name))

    def send(state, bucket):
        ready_at_send.append(len(ready_weights))
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, send)
    batch = torch.randint(0, 255, (2, 64))
    # Run two backward passes, because DDP rebuilds its buckets after the first pass.
    for _ in range(2):
        ready_weights.clear()
        ready_at_send.clear()
        chapter.loss_of(args, ddp, batch).backward()
    assert len(ready_at_send) >= 3
    assert ready_at_send[0] < len(ready_weights) / 2, "the first bucket waits for most gradients"
