"""Accelerate and the Trainer: the guide's curve, what they do unasked, and how they start."""

import itertools
import os
import random
import re
import sys
from argparse import Namespace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainingArguments,
    get_scheduler,
)

import conftest
from conftest import (
    ROOT,
    SCRIPTS,
    SHORT,
    curves_of,
    difference,
    metrics,
    run_command,
    run_jobs,
    run_or_fail,
    same_curve,
    start_ranks,
    user_error,
)
from framework_files import write_config
from runs import copy_run, last_logged_step, wait_for

pytest.importorskip("accelerate", reason="accelerate is not installed")

FOLDER = ROOT / "alternative-frameworks"
NAMES = ["accelerate", "trainer"]
LINE = [*SHORT, "--num-steps", 12, "--log-every", 5, "--checkpoint-every", 3]
LOSSES = ["loss", "val_loss"]


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Flags with files that the planner writes for two ranks, by name."""
    folder = tmp_path_factory.mktemp("configs")
    fsdp2 = ["accelerate", "--gpus-per-node", 2, "--precision"]
    words = {"fsdp2": [*fsdp2, "fp32"], "half": [*fsdp2, "bf16"]}
    words["recompute"] = [*fsdp2, "fp32", "--recompute", "full", "--no-reshard-after-forward"]
    files = {name: write_config(folder / f"{name}.yaml", *line) for name, line in words.items()}
    return {name: ["--accelerate-config", path] for name, path in files.items()}


# ---- one curve -------------------------------------------------------------------------------
def interrupted(name, args, run_dir, logs):
    """Start a run on two ranks, kill all of it after a checkpoint, and let it finish."""
    command = [SCRIPTS[name], *SHORT, *args, "--save-dir", run_dir.parent, "-e", run_dir.name]
    logs.mkdir()
    processes, after = start_ranks(2, command, logs), random.randint(11, 15)
    running = wait_for(lambda: last_logged_step(run_dir) >= after, processes, seconds=240)
    assert running, (logs / "rank0.log").read_text()
    for process in processes:
        process.kill()
    for process in processes:
        process.wait(timeout=20)
    for process in start_ranks(2, command, logs):
        assert process.wait(timeout=240) == 0, (logs / "rank0.log").read_text()
    assert "step-00000010" in (logs / "rank0.log").read_text()


def validation_loss(folder, samples):
    """Return the loss of a finished model on samples, as transformers calculates it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.use_cache
    with torch.no_grad():
        return model(input_ids=samples.long(), labels=samples.long()).loss.item()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_continued_and_finished(load, configs, tmp_path):
    """Each in one layout: on chapter 01's curve all the same, and the model gives its last loss."""
    one = curves_of(tmp_path / "01", {1: {"one": ("01", [])}})["one"]
    held_out = conftest.prepare_training(load("01"), *SHORT)[-1]
    for name, args in {"accelerate": configs["fsdp2"], "trainer": []}.items():
        run_dir = tmp_path / "runs" / name
        interrupted(name, args, run_dir, tmp_path / name)
        assert same_curve(one, metrics(run_dir)), name
        found = validation_loss(run_dir / "model", held_out)
        assert abs(found - one[20]["val_loss"]) < 1e-5, name


KINDS = ["", "-4", "-fsdp2", "-fsdp2-4", "-recompute", "-gpt2", "-fsdp2-qwen3"]
FP32 = [f"{name}@2{kind}" for name in NAMES for kind in KINDS]
FP32 += [f"{name}@1{kind}" for name in NAMES for kind in ("", "-4", "-fsdp2")]
# The framework that trains with dropout, by number of ranks.
DROPOUT = {1: "trainer", 2: "accelerate"}
BF16 = [f"{name}@2{kind}-bf16" for name in NAMES for kind in ("", "-half", "-half-4")]


@pytest.fixture(scope="module")
def curves(tmp_path_factory, configs, models):
    """The folder of all runs, and every run's metrics, by name."""
    extra = configs | {"4": ["--batch-size", 1], "bf16": ["--precision", "bf16"]}
    extra |= {name: ["-m", models / name] for name in ("gpt2", "qwen3", "gpt2-dropout")}
    runs = {1: {"01": ("01", [])}, 2: {}}
    runs[1] |= {f"01-{name}": ("01", extra[name]) for name in ("bf16", "gpt2", "qwen3")}
    for run in [*FP32, *BF16]:
        name, *more = run.split("-")
        script, ranks = name.split("@")
        args = itertools.chain.from_iterable(extra[part] for part in more)
        runs[int(ranks)][run] = (script, list(args))
    for ranks, name in DROPOUT.items():
        both = {
            f"{script}-dropout@{ranks}": (script, extra["gpt2-dropout"]) for script in (name, "03")
        }
        runs[ranks] |= both
    root = tmp_path_factory.mktemp("frameworks")
    return root, curves_of(root, runs)


def reference(curves, run):
    """Return the metrics of the run of chapter 01 that a run must equal."""
    return curves["-".join(["01", *({"bf16", "gpt2", "qwen3"} & {*run.split("-")})])]


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", FP32)
def test_one_curve(curves, run):
    assert same_curve(reference(curves[1], run), curves[1][run])


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", BF16)
def test_one_curve_in_bf16(curves, run):
    one, other = reference(curves[1], run), curves[1][run]
    assert difference(one, other, names=LOSSES) < 5e-3
    few_roundings = 1e-2  # CPUs differ in theirs
    assert difference(one, other, names=["grad_norm"], relative=True) < few_roundings
    assert 1e-7 < difference(curves[1]["01"], other, names=LOSSES) < 5e-2


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", DROPOUT)
def test_dropout_follows_from_step_and_rank(curves, ranks):
    """The Trainer deals the samples of a step in another way, which one rank does not see."""
    name = DROPOUT[ranks]
    assert same_curve(curves[1][f"03-dropout@{ranks}"], curves[1][f"{name}-dropout@{ranks}"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind, ranks, batch", [("", 2, 1), ("", 1, 8), ("-fsdp2", 1, 2)])
def test_continued_in_another_layout(curves, configs, tmp_path, name, kind, ranks, batch):
    """On a different number of ranks, or with a different accumulation."""
    copy_run(curves[0] / f"{name}@2{kind}", 10, tmp_path / "run")
    args = [*SHORT, "--batch-size", batch, "--save-dir", tmp_path, "-e", "run"]
    args += configs["fsdp2"] if kind else []
    [[result, *_]] = run_or_fail(ranks, [(name, args)], tmp_path / "jobs")
    assert "continuing from" in result["stdout"] and "step-00000010" in result["stdout"]
    assert difference(curves[1]["01"], metrics(tmp_path / "run"), after=10) < 1e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kind, file", [("", "model.safetensors"), ("-fsdp2", "pytorch_model_fsdp_0/__1_0.distcp")]
)
def test_a_broken_checkpoint(curves, configs, tmp_path, kind, file):
    """With Accelerate, all ranks load the previous checkpoint; the Trainer cannot do that."""
    copy_run(curves[0] / f"accelerate@2{kind}", 20, tmp_path / "run")
    broken = tmp_path / "run/checkpoints/step-00000020" / file
    broken.write_bytes(broken.read_bytes()[:1000])
    args = [*SHORT, "--save-dir", tmp_path, "-e", "run", *(configs["fsdp2"] if kind else [])]
    [[result, *_]] = run_or_fail(2, [("accelerate", args)], tmp_path / "jobs")
    assert re.search(r"step-00000020 cannot be read: .*; trying the previous", result["stdout"])
    assert same_curve(curves[1]["01"], metrics(tmp_path / "run"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_changed_settings_hold(curves, tmp_path, name):
    """A run that is continued with other settings is what chapter 03 makes of it."""
    root = curves[0]
    copy_run(root / f"{name}@2", 10, tmp_path / name)
    run_or_fail(2, [("03", [*SHORT, "--save-dir", tmp_path, "-e", "03"])], tmp_path / "first")
    for folder in [*(tmp_path / "03/checkpoints").glob("*20"), *(tmp_path / "03").glob("fin*")]:
        folder.rename(tmp_path / folder.name)
    args = ["--lr", 3e-3, "--weight-decay", 0.5, "--num-steps", 25, "--eval-every", 3]
    args = [*SHORT, *args, "--save-dir", tmp_path, "-e"]
    jobs = [("03", [*args, "03"]), (name, [*args, name])]
    run_or_fail(2, jobs, tmp_path / "jobs")
    one, other = metrics(tmp_path / "03"), metrics(tmp_path / name)
    assert difference(one, other, after=10) < 1e-5
    assert difference(one, other, after=10, names=["lr"]) < 1e-9 and 25 in other


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", ["nan-data", "nan-gradient"])
def test_a_gradient_that_is_not_finite(configs, tmp_path, fault, name):
    """As in test_nonfinite.py: the save of step 6 is the last."""
    args = [f"{fault}@rank1:step7", SCRIPTS[name], *LINE, *configs["fsdp2"]]
    args += ["--save-dir", tmp_path, "-e", "run"]
    [done] = run_jobs(2, [(ROOT / "diagnosing-errors/inject.py", args)], tmp_path / "jobs")
    output = "".join(rank["stdout"] + rank["stderr"] for rank in done)
    assert {rank["status"] for rank in done} == {2}, output
    message = r"a gradient in steps \d+ to 9 was not finite; these steps are not saved"
    assert re.search(message, output), output
    names = sorted(path.name for path in tmp_path.glob("run/checkpoints/step-*"))
    assert names == ["step-00000003", "step-00000006"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage, precision", [(1, "fp32"), (2, "bf16"), (3, "fp32")])
def test_the_trainer_with_deepspeed(curves, tmp_path, monkeypatch, stage, precision):
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    words = ["--gpus-per-node", 2, "--precision", precision, "--global-batch-size", 8]
    path = write_config(tmp_path / "zero.json", "deepspeed", *words, stage=stage)
    args = ["--deepspeed-config", path]
    args += ["--precision", precision]
    interrupted("trainer", args, tmp_path / "runs/run", tmp_path / "logs")
    one = curves[1]["01-bf16" if precision == "bf16" else "01"]
    far = difference(one, metrics(tmp_path / "runs/run"), names=LOSSES)
    assert far < (5e-3 if precision == "bf16" else 1e-5)


@pytest.mark.exhaustive
def test_a_step_that_deepspeed_skips_ends_the_run(tmp_path, monkeypatch):
    """Though the gradients of the steps after it are finite, and so is what is logged."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    words = ["--gpus-per-node", 2, "--precision", "fp32", "--global-batch-size", 8]
    path = write_config(tmp_path / "zero.json", "deepspeed", *words, stage=2)
    args = ["nan-data@rank1:step7", SCRIPTS["trainer"], *LINE, "--save-dir", tmp_path, "-e", "run"]
    args += ["--deepspeed-config", path]
    [done] = run_jobs(2, [(ROOT / "diagnosing-errors/inject.py", args)], tmp_path / "jobs")
    output = "".join(rank["stdout"] + rank["stderr"] for rank in done)
    message = r"a gradient in steps \d+ to \d+ was not finite; these steps are not saved"
    assert re.search(message, output), output
    assert {rank["status"] for rank in done} == {2}, output


LATE = """
import os, runpy, sys, time
from transformers import trainer
looks = trainer.sort_checkpoints
def late(output_dir, **options):
    folder = os.open(output_dir, os.O_RDONLY)
    time.sleep(2 * int(os.environ["RANK"]))
    assert os.path.samestat(os.fstat(folder), os.stat(output_dir)), "it is another folder"
    return looks(output_dir, **options)
trainer.sort_checkpoints = late
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.exhaustive
def test_the_export_waits_for_each_rank(tmp_path):
    """At its end the Trainer looks for checkpoints, on each rank, in a folder that goes then."""
    (tmp_path / "late.py").write_text(LATE)
    args = [SCRIPTS["trainer"], *SHORT, "--num-steps", 2, "--save-dir", tmp_path, "-e", "run"]
    run_or_fail(2, [(tmp_path / "late.py", args)], tmp_path / "jobs")
    assert (tmp_path / "run/model").is_dir()


WRONG = {
    "nosuch": "No such file or directory",
    "{": "Expecting property name",
    "{}": "ZeRO is off; choose stage 1, 2 or 3",
    '{"scheduler": {}}': "scheduler is not supported; remove it",
    '{"activation_checkpointing": {}}': "activation_checkpointing is not supported; remove it",
    '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}}': "its precision is bf16, not",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("text", WRONG)
def test_the_trainer_refuses_a_file_in_a_line(load_script, capsys, tmp_path, monkeypatch, text):
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    path = tmp_path / "zero.json"
    if text != "nosuch":
        path.write_text(text)
    args = Namespace(deepspeed_config=str(path), precision="fp32")
    output = user_error(capsys, load_script("trainer").load_zero_settings, args)
    assert f"--deepspeed-config {path}: " in output and WRONG[text] in output


# ---- the Trainer's defaults ------------------------------------------------------------------
def documented():
    """Return the defaults that the README says to change, by name."""
    readme = (FOLDER / "trainer/README.md").read_text()
    table = readme.partition("## Which defaults to change")[2].partition("These need no change")[0]
    return dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", table, re.M))


@pytest.mark.parametrize("name", documented())
def test_defaults_are_what_the_readme_says(name):
    default = TrainingArguments.__dataclass_fields__[name].default
    assert str(getattr(default, "value", default)) == documented()[name]


@pytest.mark.parametrize("name", ["optim", "adam_epsilon", "max_grad_norm", "report_to"])
def test_defaults_that_need_no_change(name):
    default = TrainingArguments.__dataclass_fields__[name].default
    like = {"optim": "adamw_torch_fused", "adam_epsilon": 1e-8, "max_grad_norm": 1.0}
    assert default == (like | {"report_to": "none"})[name]


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "mistral", "gpt_neox", "gemma3"])
def test_the_same_weights_decay(models, family):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(models / family))
    weights = dict(model.named_parameters())
    # The Trainer also names tied weights, which named_parameters() leaves out.
    decay = weights.keys() & Trainer.get_decay_parameter_names(None, model)
    assert decay == {name for name, weight in weights.items() if weight.ndim >= 2}


@pytest.mark.parametrize(
    "kind, late", [("cosine_warmup_with_min_lr", 0), ("cosine_with_min_lr", 1)]
)
def test_the_schedule(load, kind, late):
    """One is the guide's; the other, which has the better name, is a step late."""
    script = load("03")
    for warmup, steps in ((0, 20), (1, 20), (10, 20), (10, 100)):
        args = script.argparse.Namespace(lr=1e-3, warmup_steps=warmup, num_steps=steps)
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.lr)
        schedule = get_scheduler(kind, optimizer, warmup, steps, {"min_lr_rate": 0.1})
        for step in range(1, steps + 1):
            expected = script.lr_at(args, step - late) if step > late or warmup else args.lr
            assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, abs=1e-12)
            optimizer.step()
            schedule.step()


WITHOUT = """
import runpy, sys, transformers

settings = transformers.TrainingArguments

def without(**given):
    given.pop("{name}")
    if "lr_scheduler_type" not in given:
        given.pop("lr_scheduler_kwargs")  # which are of that type
    return settings(**given)

transformers.TrainingArguments = without
try:
    runpy.run_path("{script}", run_name="__main__")
finally:
    transformers.TrainingArguments = settings
"""
# These settings change what is logged. The others are about speed, checkpoints or errors.
MOVE = {"learning_rate", "lr_scheduler_type", "warmup_steps", "adam_beta2", "weight_decay"}
MOVE |= {"train_sampling_strategy", "gradient_accumulation_steps", "max_steps", "logging_steps"}
MOVE |= {"eval_strategy", "per_device_eval_batch_size"}


@pytest.fixture(scope="module")
def defaults(tmp_path_factory):
    """What is logged with one setting left at its default, by name, and with none."""
    root, args = tmp_path_factory.mktemp("defaults"), [*SHORT, "--batch-size", 2]
    jobs = [("trainer", [*args, "--save-dir", root, "-e", "none"])]
    for name in sorted(MOVE):
        script = root / f"{name}.py"
        script.write_text(WITHOUT.format(name=name, script=SCRIPTS["trainer"]))
        jobs.append((script, [*args, "--save-dir", root, "-e", name]))
    run_or_fail(2, jobs, root / "jobs")
    return {name: metrics(root / name) for name in ("none", *MOVE)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(MOVE))
def test_each_default_would_change_the_curve(defaults, name):
    one, other = defaults["none"], defaults[name]
    logged = [{step: set(row) for step, row in rows.items()} for rows in (one, other)]
    assert logged[0] != logged[1] or difference(one, other) > 1e-4


@pytest.mark.exhaustive
def test_a_row_has_the_loss_of_its_step(curves, tmp_path):
    """The Trainer itself would log the mean of ten steps."""
    args = [*SHORT, "--log-every", 10, "--save-dir", tmp_path, "-e", "run"]
    run_or_fail(2, [("trainer", args)], tmp_path / "jobs")
    rows = metrics(tmp_path / "run")
    assert list(rows) == [0, 10, 20]
    assert difference({step: curves[1]["01"][step] for step in rows}, rows) < 1e-5


# ---- what Accelerate does unasked ------------------------------------------------------------
PROBE = """
import json, os, sys, torch
from accelerate import Accelerator

os.environ["ACCELERATE_USE_FSDP"] = "{fsdp}"
accelerator = Accelerator(cpu={cpu}, mixed_precision="bf16")
found = {{"type": accelerator.distributed_type.value, "ranks": accelerator.num_processes}}
if {cpu}:
    model, optimizer = torch.nn.Linear(2, 2), None
    optimizer = torch.optim.SGD(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    found["dtype"] = str(model(torch.zeros(1, 2)).dtype)
    optimizer.step()
    schedule.step()
    found["schedule"] = schedule.scheduler.last_epoch
print(json.dumps(found))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "fsdp, cpu, expected",
    [
        ("true", True, {"type": "MULTI_CPU", "ranks": 2, "dtype": "torch.float32", "schedule": 2}),
        ("false", False, {"type": "NO", "ranks": 1}),
    ],
)
def test_traps_on_a_cpu(tmp_path, fsdp, cpu, expected):
    """FSDP is ignored, outputs are fp32, schedules count ranks; without cpu=True each is alone."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    (tmp_path / "probe.py").write_text(PROBE.format(fsdp=fsdp, cpu=cpu))
    [ranks] = run_or_fail(2, [(tmp_path / "probe.py", [])], tmp_path / "jobs")
    for rank in ranks:
        assert yaml.safe_load(rank["stdout"].splitlines()[-1]) == expected


def test_fsdp2_would_sum_gradients_in_bf16():
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.reduce_dtype == torch.bfloat16


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "words, ranks", [(["--cpu"], ["None"]), ([], ["None"]), (["--multi_gpu"], ["0", "1"])]
)
def test_how_many_processes_accelerate_launch_starts(tmp_path, words, ranks):
    """And that it sets mixed_precision to no, if it is not told."""
    names = "'RANK', 'ACCELERATE_MIXED_PRECISION'"
    (tmp_path / "probe.py").write_text(f"import os\nprint(*map(os.environ.get, [{names}]))")
    command = [Path(sys.executable).with_name("accelerate"), "launch", "--main_process_port", 0]
    command += [*words, "--num_processes", 2, tmp_path / "probe.py"]
    done = run_command(*command, check=True)
    assert sorted(done.stdout.splitlines()) == [f"{rank} no" for rank in ranks]


@pytest.mark.parametrize("name", NAMES)
def test_a_script_that_accelerate_launch_starts_alone_says_so(load_script, capsys, name):
    """As with `--cpu`: the launcher has set no rank."""
    with patch.dict(os.environ, {"ACCELERATE_MIXED_PRECISION": "no"}):
        for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
            os.environ.pop(variable, None)
        assert "this script with a launcher" in user_error(capsys, load_script(name).parse_args)


# ---- its file --------------------------------------------------------------------------------
@pytest.fixture
def load_script(monkeypatch):
    """Import one of the scripts as a module; it sees these arguments."""
    import contenders

    def load(name, *words):
        monkeypatch.setattr(sys, "argv", ["train_llm.py", "--device", "cpu", *map(str, words)])
        return contenders.load(SCRIPTS[name])

    return load


@pytest.mark.parametrize("name", NAMES)
def test_what_the_file_says(load_script, capsys, configs, name):
    launcher = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    for words, precision in (([], "bf16"), (["--precision", "bf16"], "bf16")):
        with patch.dict(os.environ, launcher):
            args = load_script(name, *configs["half"], *words).parse_args()
            assert args.precision == precision and os.environ["ACCELERATE_USE_FSDP"] == "true"
    with patch.dict(os.environ, launcher):
        script = load_script(name, *configs["half"], "--precision", "fp32")
        assert "--precision fp32: Accelerate has" in user_error(capsys, script.parse_args)
    with patch.dict(os.environ, launcher | {"FSDP_OFFLOAD_PARAMS": "true"}):
        script = load_script(name)
        assert "this run uses no GPU" in user_error(capsys, script.parse_args)
    with patch.dict(os.environ, launcher):
        script = load_script(name, "--accelerate-config", "nosuch.yaml")
        output = user_error(capsys, script.parse_args)
    assert output.startswith("train_llm.py: error: --accelerate-config nosuch.yaml: The passed")


FLAGS = {
    "--chapter": ["02", "05"],
    "--precision": ["bf16", "fp32"],
    "--recompute": ["none", "full"],
    "--offload": ["", "--cpu-offload"],
    "--reshard": ["--reshard-after-forward", "--no-reshard-after-forward"],
}


@pytest.mark.parametrize("values", list(itertools.product(*FLAGS.values())), ids="-".join)
def test_each_combination_is_written_or_refused(values, tmp_path, capsys):
    """Accelerate accepts what is written, and makes of it what the flags say."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    chapter, precision, recompute, offload, reshard = values
    words = [*itertools.chain(*zip(FLAGS, values[:3], strict=False)), *offload.split(), reshard]
    words = ["accelerate", "--gpus-per-node", 4, "--nodes", 2, *words]
    if chapter == "02" and values[2:] != ("none", "", "--reshard-after-forward"):
        problem = user_error(capsys, write_config, tmp_path / "one.yaml", *words)
        assert "--chapter 02: it has no --" in problem
        return
    write_config(tmp_path / "one.yaml", *words)
    command = ["--num_machines", "1", "--main_process_port", "0"]
    command += ["--config_file", str(tmp_path / "one.yaml"), "script.py"]
    config, *_ = _validate_launch_command(launch_command_parser().parse_args(command))
    assert config.num_processes == 8 and config.mixed_precision == precision.replace("fp32", "no")
    assert config.multi_gpu == (chapter == "02") and config.use_fsdp == (chapter == "05")
    variables = prepare_multi_gpu_env(config)
    if chapter == "05":
        assert variables["ACCELERATE_USE_FSDP"] == "true" and variables["FSDP_VERSION"] == "2"
        names = ["OFFLOAD_PARAMS", "ACTIVATION_CHECKPOINTING", "RESHARD_AFTER_FORWARD"]
        expected = [bool(offload), recompute == "full", reshard == "--reshard-after-forward"]
        found = [variables[f"FSDP_{name}"] for name in names]
        assert found == [str(value).lower() for value in expected]
