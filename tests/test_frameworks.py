"""Test that DeepSpeed, Accelerate and the Trainer follow the chapters' curves, even when killed."""

import functools
import json
import os
import random
import re
import sys
from importlib.util import find_spec
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainingArguments

from checks import check_bad_gradient
from conftest import (
    ROOT,
    SCRIPTS,
    SHORT,
    curves_of,
    difference,
    disagreement,
    metrics,
    parse,
    prepare_training,
    run_command,
    run_jobs,
    run_or_fail,
    start_ranks,
    user_error,
)
from framework_files import write_config
from marks import exhaustive
from runs import kill, last_logged_step, wait_for

pytestmark = pytest.mark.skipif(
    not (find_spec("accelerate") and find_spec("deepspeed")),
    reason="accelerate or deepspeed is not installed; run make extras",
)


# ---- what a run needs ------------------------------------------------------------------------
# The name of a run begins with SCRIPT@RANKS. Further words, after commas, choose flags, a
# configuration file or a model.
FLAGS = {"accumulated": ["--batch-size", 1], "bf16": ["--precision", "bf16"]}
FLAGS["compiled"] = ["--compile"]
# These flags of the planner change only the configuration file, not the command of the run.
SETTINGS = {"recompute": ["--recompute", "full"], "weights": ["--weights-dtype", "bf16"]}
SETTINGS["offload"] = ["--cpu-offload", "--recompute", "full"]
FILES = {"zero1": "deepspeed", "zero2": "deepspeed", "zero3": "deepspeed", "fsdp2": "accelerate"}

RUNS = [
    f"deepspeed@{ranks},zero{stage}{words}"
    for stage in (1, 2, 3)
    for ranks, words in [(1, ""), (2, ""), (2, ",accumulated"), (2, ",bf16"), (2, ",offload")]
]
RUNS += ["deepspeed@2,zero2,bf16,weights", "deepspeed@2,zero3,bf16,weights", "deepspeed@1,compiled"]
KINDS = ["1", "1,fsdp2", "2", "2,accumulated", "2,fsdp2", "2,fsdp2,accumulated", "2,bf16"]
KINDS += ["2,fsdp2,recompute", "2,gpt2", "2,fsdp2,qwen3", "2,fsdp2,bf16"]
RUNS += [f"{framework}@{kind}" for framework in ("accelerate", "trainer") for kind in KINDS]
# With dropout, test the Trainer on one rank only, because the Trainer distributes the samples of a
# step over the ranks in a different order than the chapters do.
RUNS += ["accelerate@2,gpt2-dropout", "trainer@1,gpt2-dropout"]
RUNS += ["trainer@2,zero1", "trainer@2,zero2,bf16", "trainer@2,zero3"]
MODELS = {"gpt2", "gpt2-dropout", "qwen3"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("frameworks")


@pytest.fixture(scope="module")
def job_of(root, models):
    """Return a function that converts a run's name to (script, number of ranks, arguments).

    If the run needs a configuration file, the function writes this file.
    """

    def job_of(run):
        name, *words = run.split(",")
        script, ranks = name.split("@")
        args = [*SHORT, *(flag for word in words for flag in FLAGS.get(word, []))]
        for word in words:
            if word in FILES:
                path, flags = root / f"{run}.config", ["--gpus-per-node", ranks]
                flags += args[args.index("--precision") : args.index("--num-steps")]
                for choice in words:
                    flags += (FLAGS | SETTINGS).get(choice, [])
                write_config(path, FILES[word], *flags, stage=int(word[-1]))
                args += [f"--{FILES[word]}-config", path]
            elif word not in FLAGS | SETTINGS:
                args += ["-m", models / word]
        return script, int(ranks), args

    return job_of


@pytest.fixture(scope="module")
def curve_of(root, job_of):
    """Return a function that returns a run's metrics; the first call for a run trains the run."""

    @functools.cache
    def curve_of(run):
        script, ranks, args = job_of(run)
        return curves_of(root, {ranks: {run: (script, args)}})[run]

    return curve_of


def reference_of(run):
    """Return the name of the chapter's run whose curve the framework's run must follow."""
    name, *words = run.split(",")
    chapter = f"03@{name[-1]}" if "gpt2-dropout" in words else "01@1"
    return ",".join([chapter, *(word for word in words if word == "bf16" or word in MODELS)])


def check_model(run_dir, held_out, tolerance=1e-5):
    """Load a run's model; check that its loss is the logged loss, and that it uses a cache."""
    model, info = AutoModelForCausalLM.from_pretrained(run_dir / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.use_cache
    with torch.no_grad():
        loss = model(input_ids=held_out.long(), labels=held_out.long()).loss.item()
    assert loss == pytest.approx(metrics(run_dir)[20]["val_loss"], abs=tolerance)


@pytest.fixture(scope="module")
def held_out(load):
    return prepare_training(load("01"), *SHORT)[-1]


# ---- one curve -------------------------------------------------------------------------------
@pytest.mark.exhaustive
@pytest.mark.parametrize("run", RUNS)
def test_run_follows_the_curve_of_the_chapters(curve_of, root, held_out, run):
    """Compare the losses of a run with the losses of its reference run.

    They may differ by 1e-5 in fp32, and by 5e-3 if the forward pass is in bf16. With weights in
    bf16, the forward pass reads rounded weights, so the losses may differ by 2e-2.
    """
    reference, curve = curve_of(reference_of(run)), curve_of(run)
    if "bf16" in run:
        tolerance = 2e-2 if "weights" in run else 5e-3
        assert difference(reference, curve, names=["loss", "val_loss"]) < tolerance
        assert difference(reference, curve, names=["grad_norm"], relative=True) < 2 * tolerance
        assert difference(curve_of("01@1"), curve, names=["loss"]) > 1e-7, "the run was in fp32"
        check_model(root / run, held_out, tolerance=5e-3)
    else:
        assert disagreement(reference, curve) == {}
        check_model(root / run, held_out)


# ---- stop and start again --------------------------------------------------------------------
LAYOUTS = [
    (f"deepspeed@{ranks},zero{stage}", f"deepspeed@{others},zero{stage}")
    for stage, ranks, others in [(1, 2, 2), (1, 2, 1), (2, 2, 1), (3, 2, 2), (3, 2, 1), (3, 1, 2)]
]
LAYOUTS += [
    (f"{framework}@{before}", f"{framework}@{after}")
    for framework in ("accelerate", "trainer")
    for before, after in [("2", "1"), ("2,fsdp2", "1,fsdp2"), ("2", "2,accumulated")]
]
LAYOUTS += [("accelerate@2,fsdp2", "accelerate@2,fsdp2"), ("trainer@2,zero3", "trainer@2,zero3")]


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run, after", LAYOUTS)
def test_killed_run_continues_on_the_curve(curve_of, job_of, held_out, tmp_path, run, after):
    """Kill a run, and resume it, in some cases on a different number of ranks.

    On a different number of ranks, the DeepSpeed script needs a converted checkpoint, so run the
    command that the script's error message contains.
    """
    framework, ranks, args = job_of(run)
    run_dir, folder = tmp_path / "run", ["--save-dir", tmp_path, "-e", "run"]
    processes = start_ranks(ranks, [SCRIPTS[framework], *args, *folder], tmp_path)
    last = random.randint(11, 15)
    running = wait_for(lambda: last_logged_step(run_dir) >= last, processes, seconds=240)
    kill(processes)
    assert running, (tmp_path / "rank0.log").read_text()
    _, ranks, args = job_of(after)
    job = framework, [*args, *folder]
    if framework == "deepspeed" and run != after:
        error = run_jobs(ranks, [job], tmp_path / "error")[0][0]["stderr"]
        assert re.search(rf"written by \d ranks, and this run has {ranks}; convert it: ", error)
        command = error.partition(" convert it: python ")[2].split()
        run_command(sys.executable, *command, check=True)
    [[first, *_]] = run_or_fail(ranks, [job], tmp_path / "jobs")
    assert "step-00000010" in first["stdout"].partition("continuing from")[2], first
    assert disagreement(curve_of("01@1"), metrics(run_dir)) == {}
    check_model(run_dir, held_out)
    if framework == "deepspeed" and run == after:
        assert difference(curve_of(run), metrics(run_dir)) == 0.0


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", ["deepspeed@2,zero1", "deepspeed@2,zero3", "trainer@2,fsdp2"])
@pytest.mark.parametrize("fault", ["nan-data", "nan-gradient"])
def test_bad_gradient_ends_the_run_before_its_next_save(job_of, tmp_path, fault, run):
    """Break the first backward pass of rank 1 after seven calls of AdamW.

    In each step, DeepSpeed calls AdamW once for each group of weights, and the Trainer calls AdamW
    only once. So the fault comes in an earlier step with DeepSpeed than with the Trainer.
    """
    framework, ranks, args = job_of(run)
    args += ["--num-steps", 12, "--log-every", 5, "--checkpoint-every", 3, "--save-dir", tmp_path]
    args = [f"{fault}@rank1:step7", SCRIPTS[framework], *args, "-e", "run"]
    [results] = run_jobs(ranks, [(ROOT / "diagnosing-errors/inject.py", args)], tmp_path / "jobs")
    check_bad_gradient(results, tmp_path / "run", every=3)


# ---- configuration files ---------------------------------------------------------------------
FSDP2 = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 2}}
WRONG = [
    ("accelerate", FSDP2 | {"mixed_precision": "bf16"}, "Accelerate has mixed_precision bf16"),
    ("accelerate", FSDP2 | {"mixed_precision": "fp16"}, "mixed_precision fp16: not supported"),
    exhaustive("deepspeed", {"train_batch_size": 16}, "train_batch_size is 16, but the flags"),
    exhaustive("deepspeed", {"scheduler": {}}, "scheduler is not supported; remove it"),
    exhaustive("trainer", {}, "ZeRO is off; choose stage 1, 2 or 3"),
]


@pytest.mark.parametrize("framework, config, expected", WRONG)
def test_wrong_configuration_prints_one_line(load, capsys, tmp_path, framework, config, expected):
    """Pass a configuration file that contradicts the flags, or that the script does not support."""
    reader, path = "accelerate" if framework == "accelerate" else "deepspeed", tmp_path / "it.json"
    path.write_text(json.dumps(config))
    script = load(framework)

    def read_configuration():
        args = parse(script, *SHORT, f"--{reader}-config", path)
        script.load_zero_settings(args)

    # When this block ends, undo the changes that the script has made to environment variables.
    with patch.dict(os.environ):
        error = user_error(capsys, read_configuration)
    assert error.count("\n") == 1 and expected in error


# ---- the Trainer -----------------------------------------------------------------------------
def test_trainer_defaults_are_those_of_the_readme():
    readme = (ROOT / "alternative-frameworks/trainer/README.md").read_text()
    table = readme.partition("## Which defaults to change")[2]
    table, found, _ = table.partition("These settings and behaviors need no change")
    assert found, "trainer/README.md: the sentence after the table is missing; update this test"
    expected = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", table, re.M))
    assert len(expected) > 10
    expected |= {"optim": "adamw_torch_fused", "adam_epsilon": "1e-08", "max_grad_norm": "1.0"}
    expected |= {"report_to": "none"}
    fields = TrainingArguments.__dataclass_fields__
    defaults = {name: fields[name].default for name in expected}
    assert {
        name: str(getattr(value, "value", value)) for name, value in defaults.items()
    } == expected
