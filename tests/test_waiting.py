"""Between two log lines, a step neither waits for the device nor talks more than DDP must."""

import re

import pytest
import torch

from conftest import SCRIPTS, prepare_training
from in_process import FLAGS, SYNC_OPS, events_of_steps
from on_ranks import make_model_folder, torchrun

REDUCTION = {"gloo:all_reduce", "c10d::allreduce_"}  # one and the same, seen at two levels
COLLECTIVES = re.compile("gloo:|nccl:|c10d::")


@pytest.mark.parametrize("name", ["tiny", "gpt2", "qwen3", "gemma3"])
def test_no_value_is_read_from_the_device(load, models, name):
    """What reads a number of a tensor on a GPU makes the host wait for it."""
    name = name if name == "tiny" else str(models / name)
    events, _ = events_of_steps(load("01"), "--model-name", name, "--global-batch-size", 4)
    assert "aten::mm" in events  # the profiler did look
    assert [event for event in events if SYNC_OPS.match(event)] == []


def test_only_ddps_buckets_are_reduced_and_once_a_step(load, one_rank_group):
    events, ddp = events_of_steps(load("02"), "--global-batch-size", 8)
    buckets = len(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(","))
    reductions = [event for event in events if event == "c10d::allreduce_"]
    others = [event for event in events if COLLECTIVES.match(event) and event not in REDUCTION]
    assert buckets == 1 or buckets == 2
    assert len(reductions) == 3 * buckets
    assert others == []
    assert [event for event in events if SYNC_OPS.match(event)] == []


@pytest.mark.slow
@pytest.mark.parametrize("line", ["torch._dynamo.config.optimize_ddp = False", "pass"])
def test_compiled_layers_stay_in_one_piece(monkeypatch, tmp_path, line):
    """Without chapter 02's line torch cuts a layer that has more than a first bucket's MiB."""
    source = SCRIPTS["02"].read_text()
    assert source.count("torch._dynamo.config.optimize_ddp = False") == 1
    script = tmp_path / "train_llm.py"
    script.write_text(source.replace("torch._dynamo.config.optimize_ddp = False", line))
    model = make_model_folder(tmp_path / "wide", 2, 256)
    flags = f"""-m {model} --compile --seq-length 64 --global-batch-size 4 --num-steps 2
        --eval-samples 4 --save-dir {tmp_path}"""
    monkeypatch.setenv("TORCH_LOGS", "ddp_graphs")
    done = torchrun(1, [script, *flags.split()], tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("split graph" in done.stderr) == (line == "pass")


@pytest.mark.slow
def test_compiled_layers_keep_ddps_overlap(load, one_rank_group):
    """Each layer's backward is its own graph, so that one bucket is sent while others compute."""
    chapter = load("02")
    args, model, *_ = prepare_training(chapter, *FLAGS, "--compile")
    model = chapter.DistributedDataParallel(model, bucket_cap_mb=1)
    order = []
    for name, weight in model.module.named_parameters():
        weight.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    calls = []

    def hook(state, bucket):
        calls.append(len(order))
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    batch = torch.randint(0, 255, (2, 64))
    for _ in range(2):
        order.clear()
        calls.clear()
        chapter.loss_of(args, model, batch).backward()
    assert len(calls) >= 3
    assert calls[0] < len(order) / 2, "the first bucket waits for more than half of the gradients"
