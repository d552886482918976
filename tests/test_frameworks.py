"""DeepSpeed, Accelerate and the Trainer keep the promises of chapter 03; some do more, unasked."""

import json
import os
import random
import re
import sys
from argparse import Namespace
from importlib.util import find_spec
from unittest.mock import patch

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, get_scheduler

import contenders
from checks import check_bad_gradient
from conftest import (
    ROOT,
    SCRIPTS,
    SHORT,
    curves_of,
    difference,
    metrics,
    prepare_training,
    run_command,
    run_jobs,
    run_or_fail,
    same_curve,
    start_ranks,
    user_error,
)
from marks import exhaustive as rare
from runs import check_user_error, copy_run, last_logged_step, wait_for

pytestmark = pytest.mark.skipif(
    not (find_spec("accelerate") and find_spec("deepspeed")),
    reason="accelerate or deepspeed is not installed; run make extras",
)
exhaustive = pytest.mark.exhaustive


# ---- what a run needs ------------------------------------------------------------------------
def zero(stage, offload=(), **settings):
    """Return DeepSpeed's settings for a stage; `offload` names the state that stays on the CPU."""
    offloads = {f"offload_{name}": {"device": "cpu"} for name in offload}
    return {"zero_optimization": {"stage": stage} | offloads} | settings


def fsdp2(mixed_precision="no", recompute=False):
    """Return Accelerate's settings for FSDP2."""
    fsdp_config = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": not recompute,
        "fsdp_activation_checkpointing": recompute,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_offload_params": False,
        "fsdp_cpu_ram_efficient_loading": False,
    }
    settings = {"distributed_type": "FSDP", "num_processes": 2, "num_machines": 1}
    return settings | {"mixed_precision": mixed_precision, "fsdp_config": fsdp_config}


AUTOCAST = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
WEIGHTS = {"bf16": {"enabled": True}}
SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
RECOMPUTE = {"activation_checkpointing": {"partition_activations": False}}
OFFLOAD = {"zero_force_ds_cpu_optimizer": False} | RECOMPUTE
CONFIGS = {f"zero{stage}": zero(stage) for stage in (1, 2, 3)}
CONFIGS |= {f"zero{stage}-bf16": zero(stage, torch_autocast=AUTOCAST) for stage in (1, 2, 3)}
CONFIGS |= {f"zero{stage}-bf16weights": zero(stage, **WEIGHTS, **SUMS) for stage in (2, 3)}
CONFIGS |= {f"zero{stage}-offload": zero(stage, ["optimizer"], **OFFLOAD) for stage in (1, 2)}
CONFIGS["zero1-bf16weights"] = zero(1, **WEIGHTS)
CONFIGS["zero3-offload"] = zero(3, ["optimizer", "param"], **OFFLOAD)
CONFIGS["zero2-recompute"] = zero(2, **RECOMPUTE)
CONFIGS |= {"fsdp2": fsdp2(), "fsdp2-bf16": fsdp2("bf16"), "fsdp2-recompute": fsdp2(recompute=True)}
# The Trainer does not add the sizes of its batches to DeepSpeed's settings.
BATCH = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4}
BATCH |= {"gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
FLAGS = {"accumulated": ["--batch-size", 1], "compiled": ["--compile"]}
FLAGS |= {"bf16": [], "sparse": ["--log-every", 10]}

# A run is FRAMEWORK@RANKS, and a configuration, a model or flags.
DEEPSPEED = [f"deepspeed@2,{name}" for name in CONFIGS if name.startswith("zero")]
DEEPSPEED += [f"deepspeed@2,zero{stage},accumulated" for stage in (1, 2, 3)]
DEEPSPEED += [f"deepspeed@1,zero{stage}" for stage in (1, 2, 3)]
DEEPSPEED += ["deepspeed@2,zero2-bf16weights,accumulated", "deepspeed@1,compiled"]
KINDS = ["@1", "@1,fsdp2", "@2", "@2,accumulated", "@2,fsdp2", "@2,fsdp2,accumulated"]
KINDS += ["@2,fsdp2-recompute", "@2,gpt2", "@2,fsdp2,qwen3"]
KINDS += ["@2,bf16", "@2,fsdp2-bf16", "@2,fsdp2-bf16,accumulated"]
RUNS = DEEPSPEED + [framework + kind for framework in ("accelerate", "trainer") for kind in KINDS]
# The Trainer gives the samples of a step to other ranks, so with dropout it runs on one rank.
RUNS += ["accelerate@2,gpt2-dropout", "trainer@1,gpt2-dropout", "trainer@2,sparse"]
RUNS += ["trainer@2,zero1", "trainer@2,zero2-bf16", "trainer@2,zero3"]


@pytest.fixture(scope="module")
def job_of(tmp_path_factory, models):
    """A function that returns the framework, the number of ranks and the arguments of a run."""
    folder = tmp_path_factory.mktemp("configs")

    def job_of(run):
        name, *parts = run.split(",")
        framework, ranks = name.split("@")
        args = [*SHORT, *["--precision", "bf16"] * ("bf16" in run)]
        for part in parts:
            if part in FLAGS:
                args += FLAGS[part]
            elif part in CONFIGS:
                reader = "deepspeed" if part.startswith("zero") else "accelerate"
                batch = BATCH if (framework, reader) == ("trainer", "deepspeed") else {}
                path = folder / f"{framework}-{part}.json"
                path.write_text(json.dumps(CONFIGS[part] | batch))
                args += [f"--{reader}-config", path]
            else:
                args += ["-m", models / part]
        return framework, int(ranks), args

    return job_of


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("frameworks")


@pytest.fixture(scope="module")
def curves(request, root, models, job_of):
    """The metrics of chapter 01 and of the runs that tests take, by name."""
    flags = {"01": [], "01-bf16": ["--precision", "bf16"]}
    flags |= {f"01-{name}": ["-m", models / name] for name in ("gpt2", "qwen3")}
    curves_of(root, {1: {name: ("01", args) for name, args in flags.items()}})
    for ranks in (1, 2):
        args = ["-m", models / "gpt2-dropout"]
        curves_of(root, {ranks: {f"03-gpt2-dropout-{ranks}": ("03", args)}})
    items = [item for item in request.session.items if hasattr(item, "callspec")]
    groups = {}
    for run in {item.callspec.params.get("run") for item in items} & {*RUNS}:
        framework, ranks, args = job_of(run)
        # DeepSpeed changes functions of torch, which other runs in the process would notice.
        groups.setdefault((framework, "zero" in run, ranks), {})[run] = framework, args
    for (*_, ranks), jobs in groups.items():
        curves_of(root, {ranks: jobs})
    return {path.parent.name: metrics(path.parent) for path in root.glob("*/metrics.jsonl")}


def check_model(run_dir, held_out, tolerance=1e-5):
    """Check that transformers loads a finished model, which has the logged loss and a cache."""
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
@exhaustive
@pytest.mark.parametrize("run", RUNS)
def test_run_follows_the_curve_of_the_chapters(curves, root, held_out, run):
    """Losses agree within 1e-5 in fp32, and within 5e-3 if the forward pass is in bf16.

    With weights in bf16, the forward pass reads rounded weights, so losses differ by up to 2e-2.
    """
    parts = ["03" if "dropout" in run else "01", *re.findall("gpt2-dropout|gpt2|qwen3", run)]
    parts += ["bf16"] * ("bf16" in run) + [run.split("@")[1][0]] * ("dropout" in run)
    reference, curve = curves["-".join(parts)], curves[run]
    reference = {step: row for step, row in reference.items() if step in curve}
    if "bf16" in run:
        tolerance = 2e-2 if "weights" in run else 5e-3
        assert difference(reference, curve, names=["loss", "val_loss"]) < tolerance
        assert difference(reference, curve, names=["grad_norm"], relative=True) < 2 * tolerance
        assert difference(curves["01"], curve, names=["loss"]) > 1e-7, "it ran in fp32"
        check_model(root / run, held_out, tolerance=5e-3)
    else:
        assert same_curve(reference, curve)
        check_model(root / run, held_out)


@exhaustive
@pytest.mark.parametrize("settings, expected", [({}, 1), (RECOMPUTE, 2)])
def test_deepspeed_recomputes_each_layer(
    load, one_rank_group, monkeypatch, tmp_path, settings, expected
):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    (tmp_path / "zero.json").write_text(json.dumps(zero(2, **settings)))
    script, calls = load("deepspeed"), []
    # DeepSpeed would compile operations, which takes minutes.
    monkeypatch.setattr(script.deepspeed.ops, "__compatible_ops__", {})
    script.deepspeed.init_distributed("gloo")
    args = [*SHORT, "--deepspeed-config", tmp_path / "zero.json"]
    args, model, *_ = prepare_training(script, *args)
    script.layers_of(model)[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    script.loss_of(args, model, torch.zeros(1, 64, dtype=torch.int64)).backward()
    assert len(calls) == expected


# ---- stop and start again --------------------------------------------------------------------
LAYOUTS = [(f"deepspeed@2,zero{stage}", f"deepspeed@2,zero{stage}") for stage in (1, 2, 3)]
LAYOUTS += [(f"deepspeed@2,zero{stage}", f"deepspeed@1,zero{stage}") for stage in (1, 2, 3)]
LAYOUTS += [("deepspeed@1,zero3", "deepspeed@2,zero3")]
LAYOUTS += [("accelerate@2", "accelerate@1"), ("accelerate@2,fsdp2", "accelerate@1,fsdp2")]
LAYOUTS += [("accelerate@2,fsdp2", "accelerate@2,fsdp2"), ("trainer@2,zero3", "trainer@2,zero3")]
LAYOUTS += [("trainer@2", "trainer@1"), ("trainer@2,fsdp2", "trainer@1,fsdp2")]
LAYOUTS += [("accelerate@2", "accelerate@2,accumulated"), ("trainer@2", "trainer@2,accumulated")]


@exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run, after", LAYOUTS)
def test_killed_run_continues_on_the_curve(curves, job_of, held_out, tmp_path, run, after):
    """For other ranks, DeepSpeed first needs the command that its script prints."""
    framework, ranks, args = job_of(run)
    run_dir, folder = tmp_path / "run", ["--save-dir", tmp_path, "-e", "run"]
    processes = start_ranks(ranks, [SCRIPTS[framework], *args, *folder], tmp_path)
    last = random.randint(11, 15)
    running = wait_for(lambda: last_logged_step(run_dir) >= last, processes, seconds=240)
    for process in processes:
        process.kill()
        process.wait(timeout=20)
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
    assert same_curve(curves["01"], metrics(run_dir))
    check_model(run_dir, held_out)
    if framework == "deepspeed" and run == after:
        assert difference(curves[run], metrics(run_dir)) == 0.0


@exhaustive
@pytest.mark.parametrize(
    "run", ["deepspeed@2,zero2", "deepspeed@1,zero3", "accelerate@2", "trainer@2"]
)
def test_resume_applies_the_settings_of_the_command(curves, root, job_of, tmp_path, run):
    """The frameworks would restore some of these settings from the checkpoint."""
    changes = ["--lr", 3e-3, "--weight-decay", 5, "--max-grad-norm", 0.5, "--num-steps", 25]
    changes += ["--save-dir", tmp_path, "-e"]
    copy_run(root / "01", 10, tmp_path / "01")
    run_or_fail(1, [("01", [*SHORT, *changes, "01"])], tmp_path / "jobs")
    copy_run(root / run, 10, tmp_path / run)
    framework, ranks, args = job_of(run)
    run_or_fail(ranks, [(framework, [*args, *changes, run])], tmp_path / "jobs")
    reference, curve = metrics(tmp_path / "01"), metrics(tmp_path / run)
    assert same_curve(reference, curve) and 25 in curve
    assert difference(reference, curve, names=["lr"]) < 1e-9


BROKEN = {
    "deepspeed@2,zero2": "zero/*pp_rank_1_*optim_states.pt",
    "deepspeed@2,zero3": "zero/*pp_rank_1_*optim_states.pt",
    "accelerate@2": "model.safetensors",
    "accelerate@2,fsdp2": "pytorch_model_fsdp_0/__1_0.distcp",
}


@exhaustive
@pytest.mark.parametrize("run", BROKEN)
def test_broken_checkpoint_is_skipped_by_all_ranks(curves, root, job_of, tmp_path, run):
    """If no checkpoint is left, the run stops."""
    jobs = []
    for name, first in {"one": 20, "all": 10}.items():
        copy_run(root / run, 20, tmp_path / name)
        for step in range(first, 21, 10):
            [path] = tmp_path.glob(f"{name}/checkpoints/step-000000{step}/{BROKEN[run]}")
            path.write_bytes(path.read_bytes()[:1000])
        framework, ranks, args = job_of(run)
        jobs.append((framework, [*args, "--save-dir", tmp_path, "-e", name]))
    [one, *_], [none, *_] = run_jobs(ranks, jobs, tmp_path / "jobs")
    assert one["status"] == 0, one
    assert re.search("step-00000020 cannot be read: .*; trying the previous", one["stdout"])
    assert "step-00000010" in one["stdout"].partition("continuing from")[2], one
    assert same_curve(curves["01"], metrics(tmp_path / "one"))
    check_user_error(none, "delete the folder to start over")


@exhaustive
@pytest.mark.parametrize(
    "run",
    [f"deepspeed@2,zero{stage}" for stage in (1, 2, 3)]
    + ["accelerate@2,fsdp2", "trainer@2,fsdp2", "trainer@2,zero2"],
)
@pytest.mark.parametrize("fault", ["nan-data", "nan-gradient"])
def test_bad_gradient_ends_the_run_before_its_next_save(job_of, tmp_path, fault, run):
    """The fault counts AdamW's steps; DeepSpeed takes a step for each group of weights."""
    framework, ranks, args = job_of(run)
    args += ["--num-steps", 12, "--log-every", 5, "--checkpoint-every", 3, "--save-dir", tmp_path]
    args = [f"{fault}@rank1:step7", SCRIPTS[framework], *args, "-e", "run"]
    [results] = run_jobs(ranks, [(ROOT / "diagnosing-errors/inject.py", args)], tmp_path / "jobs")
    check_bad_gradient(results, tmp_path / "run", every=3)


# ---- configuration files ---------------------------------------------------------------------
@pytest.fixture
def load_script(monkeypatch):
    """Return a function that imports a script for a command line on one rank."""
    launcher = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    with patch.dict(os.environ, launcher):

        def load(framework, *words):
            words = ["train_llm.py", "--device", "cpu", "--global-batch-size", 8, *words]
            monkeypatch.setattr(sys, "argv", list(map(str, words)))
            return contenders.load(SCRIPTS[framework])

        yield load


def read_config(script):
    """Read the configuration file of a script's command line."""
    args = script.parse_args()
    if hasattr(script, "load_zero_settings"):
        script.load_zero_settings(args)


WRONG = [
    ("deepspeed", None, "No such file"),
    ("deepspeed", "{", "Expecting property name"),
    ("deepspeed", {"train_batch_size": 16}, "train_batch_size is 16, but the flags give 8; change"),
    ("deepspeed", {"train_micro_batch_size_per_gpu": 2}, "size_per_gpu is 2, but the flags give 8"),
    ("deepspeed", {"gradient_accumulation_steps": 2}, "steps is 2, but the flags give 1"),
    ("deepspeed", {"gradient_clipping": 0.0}, "clipping is 0.0, but the flags give 1.0"),
    ("deepspeed", WEIGHTS, "precision is bf16, but the flags give fp32"),
    ("deepspeed", {"torch_autocast": AUTOCAST}, "precision is bf16, but the flags give fp32"),
    ("deepspeed", {"scheduler": {}}, "scheduler is not supported; remove it"),
    ("deepspeed", zero(0), "stage 0 reports no gradient norm; choose stage 1, 2 or 3"),
    ("trainer", None, "No such file"),
    ("trainer", "{", "Expecting property name"),
    ("trainer", {}, "ZeRO is off; choose stage 1, 2 or 3"),
    ("trainer", {"scheduler": {}}, "scheduler is not supported; remove it"),
    ("trainer", RECOMPUTE, "activation_checkpointing is not supported; remove it"),
    ("trainer", zero(1, **WEIGHTS), "its precision is bf16, not fp32"),
    ("accelerate", None, "The passed configuration file"),
    ("accelerate", fsdp2("bf16"), "--precision fp32: Accelerate has mixed_precision bf16"),
    ("accelerate", fsdp2("fp16"), "mixed_precision fp16: not supported; choose 'bf16' or 'no'"),
]


@pytest.mark.parametrize("framework", ["accelerate", rare("deepspeed"), rare("trainer")])
def test_wrong_configuration_costs_one_line(load_script, capsys, tmp_path, framework):
    """The file may be missing or damaged, or contradict the flags."""
    flag = "--accelerate-config" if framework == "accelerate" else "--deepspeed-config"
    path = tmp_path / "config.json"
    for config, expected in [case[1:] for case in WRONG if case[0] == framework]:
        path.unlink(missing_ok=True)
        if config is not None:
            path.write_text(config if config == "{" else json.dumps(config))
        script = load_script(framework, "--precision", "fp32", flag, path)
        error = user_error(capsys, read_config, script)
        assert error.count("\n") == 1 and expected in error, (config, error)


@pytest.mark.parametrize("framework", ["accelerate", "trainer"])
def test_accelerate_file_sets_precision_and_sharding(load_script, capsys, tmp_path, framework):
    (tmp_path / "fsdp2.json").write_text(json.dumps(fsdp2("bf16")))
    args = load_script(framework, "--accelerate-config", tmp_path / "fsdp2.json").parse_args()
    assert args.precision == "bf16" and os.environ["ACCELERATE_USE_FSDP"] == "true"
    os.environ["FSDP_OFFLOAD_PARAMS"] = "true"
    script = load_script(framework)
    assert "this run uses no GPU; set it to false" in user_error(capsys, script.parse_args)


@pytest.mark.parametrize("framework", ["accelerate", "trainer"])
def test_script_without_ranks_names_the_launchers(load_script, capsys, framework):
    """With --cpu, `accelerate launch` starts one process, and gives it no rank."""
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        del os.environ[variable]
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    assert "this script with a launcher" in user_error(capsys, load_script(framework).parse_args)


# ---- the Trainer -----------------------------------------------------------------------------
def test_trainer_defaults_are_those_of_the_readme():
    readme = (ROOT / "alternative-frameworks/trainer/README.md").read_text()
    table = readme.partition("## Which defaults to change")[2].partition("These need no change")[0]
    expected = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", table, re.M))
    assert len(expected) > 10
    expected |= {"optim": "adamw_torch_fused", "adam_epsilon": "1e-08", "max_grad_norm": "1.0"}
    expected |= {"report_to": "none"}
    fields = TrainingArguments.__dataclass_fields__
    defaults = {name: fields[name].default for name in expected}
    assert {
        name: str(getattr(value, "value", value)) for name, value in defaults.items()
    } == expected


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "mistral", "gpt_neox", "gemma3"])
def test_trainer_decays_matrices_only(models, family):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(models / family))
    weights = dict(model.named_parameters())
    # The Trainer also names tied weights, which named_parameters() leaves out.
    decay = weights.keys() & Trainer.get_decay_parameter_names(None, model)
    assert decay == {name for name, weight in weights.items() if weight.ndim >= 2}


@pytest.mark.parametrize(
    "name, delay", [("cosine_warmup_with_min_lr", 0), ("cosine_with_min_lr", 1)]
)
def test_trainer_has_the_schedule_of_the_chapters(load, name, delay):
    """The schedule with the simpler name is a step late."""
    script = load("03")
    for warmup, steps in ((0, 20), (1, 20), (10, 20), (10, 100)):
        args = Namespace(lr=1e-3, warmup_steps=warmup, num_steps=steps)
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.lr)
        schedule = get_scheduler(name, optimizer, warmup, steps, {"min_lr_rate": 0.1})
        for step in range(1, steps + 1):
            expected = script.lr_at(args, step - delay) if step > delay or warmup else args.lr
            assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, abs=1e-12)
            optimizer.step()
            schedule.step()


LATE = """
import os, runpy, sys, time
from transformers import trainer

sort_checkpoints = trainer.sort_checkpoints

def sort_late(output_dir, **options):
    folder = os.open(output_dir, os.O_RDONLY)
    time.sleep(2 * int(os.environ["RANK"]))
    assert os.path.samestat(os.fstat(folder), os.stat(output_dir)), "the folder was replaced"
    return sort_checkpoints(output_dir, **options)

trainer.sort_checkpoints = sort_late
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@exhaustive
def test_trainer_exports_after_all_ranks_have_left_train(tmp_path):
    """At its end, train() looks for checkpoints in a folder that the export replaces."""
    (tmp_path / "late.py").write_text(LATE)
    args = [SCRIPTS["trainer"], *SHORT, "--num-steps", 2, "--save-dir", tmp_path, "-e", "run"]
    run_or_fail(2, [(tmp_path / "late.py", args)], tmp_path / "jobs")
    assert (tmp_path / "run/model").is_dir()


def test_fsdp2_of_accelerate_reduces_in_bf16():
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.reduce_dtype == torch.bfloat16
