"""Accelerate and the Trainer: the guide's curve, what they do unasked, and how they start."""

import itertools
import json
import random
import shutil
import time

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import conftest
from conftest import (
    ROOT,
    SHORT,
    curves_of,
    difference,
    metrics,
    on_one_curve,
    printed,
    refused,
    run_jobs,
    run_well,
    start_ranks,
)
from test_kill import last_row, wait_for

pytest.importorskip("accelerate", reason="pip install -r each folder's requirements.txt")

MAKE = ROOT / "alternative-frameworks/make_config.py"
SCRIPTS = {name: MAKE.parent / name / "train_llm.py" for name in ("accelerate", "trainer")}
LOSSES = ["loss", "val_loss"]


def written(folder, *words):
    """Return the path of what make_config.py writes."""
    path = folder / ("config" + "".join(map(str, words[1:])).replace("--", "-") + f".{words[0]}")
    printed(MAKE, *words, "--output", path, check=True)
    return path


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Files by name, and which flag takes them."""
    folder = tmp_path_factory.mktemp("configs")
    fsdp2 = ["accelerate", "--strategy", "fsdp2", "--ranks", 2, "--precision"]
    ddp = ["accelerate", "--strategy", "ddp", "--ranks", 2, "--precision", "fp32"]
    words = {"ddp": ddp, "fsdp2": [*fsdp2, "fp32"], "bf16": [*fsdp2, "bf16"]}
    words["recompute"] = [*fsdp2, "fp32", "--recompute", "full", "--no-reshard-after-forward"]
    return {name: written(folder, *each) for name, each in words.items()}


# ---- one curve -------------------------------------------------------------------------------
def interrupted(name, args, run_dir, logs):
    """Start a run on two ranks, kill all of it after a checkpoint, and let it finish."""
    command = [SCRIPTS[name], *SHORT, *args, "--save-dir", run_dir.parent, "-e", run_dir.name]
    logs.mkdir(exist_ok=True)
    processes = start_ranks(2, command, logs)
    after = random.randint(11, 15)
    running = wait_for(lambda: last_row(run_dir) >= after, processes, seconds=240)
    assert running, (logs / "rank0.log").read_text()
    for process in processes:
        process.kill()
    for process in processes:
        process.wait(timeout=20)
    processes = start_ranks(2, command, logs)
    for process in processes:
        assert process.wait(timeout=240) == 0, (logs / "rank0.log").read_text()
    assert "step-00000010" in (logs / "rank0.log").read_text()


def validation_loss(folder, samples):
    """Return the loss of a finished model on samples, as transformers calculates it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return model(input_ids=samples.long(), labels=samples.long()).loss.item()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_continued_and_finished(load, configs, tmp_path):
    """Each in one layout: on chapter 01's curve all the same, and the model gives its last loss."""
    one = curves_of(tmp_path / "01", {1: {"01": ("01", [])}})["01"]
    layouts = {"accelerate": ["--accelerate-config", configs["fsdp2"]], "trainer": []}
    _, _, _, _, held_out = conftest.prepared(load("01"), *SHORT)
    for name, args in layouts.items():
        run_dir = tmp_path / "runs" / name
        interrupted(name, args, run_dir, tmp_path / f"{name}-logs")
        assert on_one_curve(one, metrics(run_dir)), name
        found = validation_loss(run_dir / "model", held_out)
        assert abs(found - one[20]["val_loss"]) < 1e-5
