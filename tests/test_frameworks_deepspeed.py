"""DeepSpeed trains as the chapters do: one curve, resume, a model that transformers loads."""

import json
import os
import re
import shutil
import sys
from itertools import product
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

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
    selected_runs,
    start_ranks,
)
from framework_files import write_config
from runs import check_user_error, copy_run, last_logged_step, validation_loss, wait_for

REQUIREMENTS = "alternative-frameworks/deepspeed/requirements.txt"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path(sys.executable).with_name("deepspeed").exists(),
        reason=f"no DeepSpeed: pip install -r {REQUIREMENTS}",
    ),
]
BF16 = ["--precision", "bf16"]


def config(path, *flags, precision="fp32", batch=8, stage=2, ranks=1):
    """Write a configuration with the batch of SHORT; return the flags of a run with it."""
    line = ["--global-batch-size", 8, "--batch-size", batch, "--precision", precision]
    line += ["--gpus-per-node", ranks]
    write_config(path, "deepspeed", *line, *flags, stage=stage)
    return ["--deepspeed-config", path, "--batch-size", batch, "--precision", precision]


def loaded(run_dir, load, within=1e-5):
    """Return the finished model; it has the validation loss that was logged."""
    model, info = AutoModelForCausalLM.from_pretrained(run_dir / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    args = json.loads((run_dir / "checkpoints/step-00000020/args.json").read_text())
    loss = validation_loss(model, run_dir, args, load("01"))
    assert loss == pytest.approx(metrics(run_dir)[20]["val_loss"], abs=within)
    return model


def test_killed_and_continued_on_the_curve(tmp_path, load):
    """ZeRO-2 on two ranks: kill -9 after a save, the same command, and chapter 01's losses."""
    run_or_fail(1, [("01", [*SHORT, "--save-dir", tmp_path, "-e", "one"])], tmp_path / "one")
    command = [SCRIPTS["deepspeed"], *SHORT, "--save-dir", tmp_path, "-e", "run"]
    for number, last in enumerate((12, 20)):
        folder = tmp_path / f"start{number}"
        folder.mkdir()
        ranks = start_ranks(2, command, folder)
        try:
            wait_for(lambda: last_logged_step(tmp_path / "run") >= last, ranks)  # noqa: B023
            statuses = [rank.wait(timeout=90) for rank in ranks] if last == 20 else []
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait(timeout=20)
    output = (folder / "rank0.log").read_text()
    assert statuses == [0, 0] and "step-00000010" in output.partition("continuing from")[2], output
    assert same_curve(metrics(tmp_path / "one"), metrics(tmp_path / "run"))
    loaded(tmp_path / "run", load)


# ---- every setting ---------------------------------------------------------------------------

OFFLOAD = ["--cpu-offload", "--recompute", "full"]
AUTOCAST = {"precision": "bf16"}
REDUCED = {"precision": "bf16", "flags": ["--weights-dtype", "bf16"]}
# What differs from ZeRO-2 in fp32 without accumulation, by name and number of ranks.
RUNS = {
    f"{name}@{ranks}": {"stage": stage, "batch": 2 // ranks if "accumulated" in name else 8, **more}
    for ranks in (1, 2)
    for stage in (1, 2, 3)
    for name, more in {
        f"zero-{stage}": {},
        f"zero-{stage}-accumulated": {},
        f"zero-{stage}-offload": {"flags": OFFLOAD},
        f"zero-{stage}-bf16": AUTOCAST,
        f"zero-{stage}-bf16-weights": REDUCED,
        f"zero-{stage}-accumulated-bf16-weights": REDUCED,
    }.items()
}


def command(root, name):
    """Return the chapter and the arguments of a run."""
    run = {"flags": [], "precision": "fp32"} | RUNS[name]
    sizes = kept(run, "precision", "batch", "stage") | {"ranks": int(name[-1])}
    return "deepspeed", config(root / f"{name}.json", *run["flags"], **sizes)


def kept(values, *names):
    return {name: values[name] for name in names}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def curves(request, root):
    """The metrics of the runs that tests take, and of chapter 01."""
    runs = {ranks: {} for ranks in (1, 2)}
    runs[1] = {"01": ("01", []), "01-bf16": ("01", BF16)}
    runs[1]["compiled@1"] = ("deepspeed", ["--compile"])
    for name in RUNS:
        runs[int(name[-1])][name] = command(root, name)
    return curves_of(root, selected_runs(request, runs))


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", [*RUNS, "compiled@1"])
def test_one_curve(curves, root, load, run):
    """In fp32 within 1e-5; in bf16 within 5e-3, if only the forward pass is in it.

    With weights in bf16 it reads what rounding has left of them, and adds up layers in bf16.
    """
    if "bf16" not in run:
        assert same_curve(curves["01"], curves[run])
        # Gradient norms are about 3, so they may differ by more than losses.
        assert difference(curves["01"], curves[run]) < 1e-4
    else:
        bound = 2e-2 if "weights" in run else 5e-3
        one = curves["01-bf16"]
        assert difference(one, curves[run], names=["loss", "val_loss"]) < bound
        assert difference(one, curves[run], names=["grad_norm"], relative=True) < bound
    loaded(root / run, load, within=5e-3 if "bf16" in run else 1e-5)


TYPES = [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")]
SETTINGS = [(1, 2, 3), TYPES, ([], ["--cpu-offload"]), ("none", "full"), (0, 1)]


@pytest.mark.exhaustive
def test_every_combination_trains(tmp_path):
    """Two steps of two micro-batches each."""
    jobs = []
    small = [*SHORT, "--num-steps", 2, "--eval-samples", 2]
    for number, values in enumerate(product(*SETTINGS)):
        stage, (precision, weights), offload, recompute, norm = values
        same = ["--max-grad-norm", norm]
        line = [*same, "--weights-dtype", weights, "--recompute", recompute, *offload]
        sizes = {"precision": precision, "batch": 4, "stage": stage}
        args = [*small, *same, *config(tmp_path / f"{number}.json", *line, **sizes)]
        jobs.append(("deepspeed", [*args, "--save-dir", tmp_path, "-e", number]))
    run_or_fail(1, jobs, tmp_path / "jobs", shares=2)
    rows = [metrics(tmp_path / str(args[-1]))[2] for _, args in jobs]
    assert all(5 < row["loss"] < 6 and row["grad_norm"] > 1 for row in rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "run", [f"zero-{stage}@{ranks}" for stage in (1, 2, 3) for ranks in (1, 2)]
)
@pytest.mark.parametrize("after", [1, 2])
def test_continued(curves, root, tmp_path, run, after):
    """The same number of ranks gives the same bits; others first run the printed command."""
    before = int(run[-1])
    copy_run(root / run, 10, tmp_path / "run")
    _, flags = command(root, f"{run[:-1]}{after}")
    job = ("deepspeed", [*SHORT, *flags, "--save-dir", tmp_path, "-e", "run"])
    if before != after:
        output = run_jobs(after, [job], tmp_path / "asked")[0][0]["stderr"]
        assert f"written by {before} ranks, and this run has {after}; convert it: " in output
        convert = output.partition(" convert it: python ")[2].split()
        run_command(sys.executable, *convert, check=True)
    [[first, *_]] = run_or_fail(after, [job], tmp_path / "jobs")
    assert "continuing from" in first["stdout"] and "step-00000010" in first["stdout"]
    if before == after:
        assert difference(curves[run], metrics(tmp_path / "run")) == 0.0
    else:
        assert same_curve(curves["01"], metrics(tmp_path / "run"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", ["zero-2@2", "zero-3@2"])
def test_a_checkpoint_with_a_broken_file_is_left_out(curves, root, tmp_path, run):
    """All ranks load the previous checkpoint; if there is none, the run stops."""
    copy_run(root / run, 20, tmp_path / "run")
    for step, stops in ((20, False), (10, True)):
        for old in (tmp_path / "run/checkpoints").iterdir():
            if int(old.name[5:]) > step:
                shutil.rmtree(old)
        [path] = tmp_path.glob(f"run/checkpoints/*{step}/zero/*pp_rank_1_*optim_states.pt")
        path.write_bytes(path.read_bytes()[:10_000])
        job = ("deepspeed", [*SHORT, *command(root, run)[1], "--save-dir", tmp_path, "-e", "run"])
        [[first, _]] = run_jobs(2, [job], tmp_path / f"jobs{step}")
        output = rf"step-000000{step} cannot be read: .*; trying the previous checkpoint"
        assert re.search(output, first["stdout"]), first["stdout"]
        assert first["status"] == (2 if stops else 0), first["stderr"]
        if stops:
            check_user_error(first, "delete the folder to start over")
            continue
        assert "continuing from" in first["stdout"] and "step-00000010" in first["stdout"]
        assert difference(curves[run], metrics(tmp_path / "run")) == 0.0


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", ["zero-2@2", "zero-3@1"])
def test_what_the_command_says_holds(curves, root, tmp_path, run):
    """DeepSpeed restores weight decay and the limit on norms from a checkpoint; here flags rule."""
    new = ["--weight-decay", 5, "--max-grad-norm", 0.5]
    flags = [*SHORT, *new, "--save-dir", tmp_path, "-e"]
    for name in (run, "01"):
        copy_run(root / name, 10, tmp_path / name)
    sizes = {"stage": int(run[5]), "ranks": int(run[-1])}
    zero = [*flags, run, *config(tmp_path / "new.json", "--max-grad-norm", 0.5, **sizes)]
    run_or_fail(int(run[-1]), [("deepspeed", zero)], tmp_path / "jobs")
    run_or_fail(1, [("01", [*flags, "01"])], tmp_path / "jobs01")
    assert same_curve(metrics(tmp_path / "01"), metrics(tmp_path / run))
    assert difference(curves["01"], metrics(tmp_path / run)) > 1e-3


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("fault", ["nan-data", "nan-gradient"])
def test_a_gradient_that_is_not_finite_ends_the_run(tmp_path, fault, stage):
    """At the next line or save. The fault counts AdamW's steps: ZeRO takes one for each group."""
    line = [*SHORT, "--num-steps", 12, "--log-every", 5, "--checkpoint-every", 3]
    flags = config(tmp_path / "zero.json", stage=stage, ranks=2)
    args = [f"{fault}@rank1:step7", SCRIPTS["deepspeed"], *line, *flags, "--save-dir", tmp_path]
    script = ROOT / "diagnosing-errors/inject.py"
    [done] = run_jobs(2, [(script, [*args, "-e", "run"])], tmp_path / "jobs")
    output = "".join(rank["stdout"] + rank["stderr"] for rank in done)
    assert {rank["status"] for rank in done} == {2}, output
    assert "a gradient in steps 4 to 5 was not finite; these steps are not saved" in output
    names = sorted(path.name for path in tmp_path.glob("run/checkpoints/*"))
    assert names == ["step-00000003"]


@pytest.mark.exhaustive
def test_activations_are_computed_again(tmp_path):
    """A layer runs twice a step, and half the layers' outputs are not kept."""
    source = SCRIPTS["deepspeed"].read_text()
    counting = """model.calls = []
    layers_of(model)[0].mlp.register_forward_hook(lambda *_: model.calls.append(model.training))
    engine, *_ = deepspeed"""
    source = source.replace("engine, *_ = deepspeed", counting)
    source = source.replace(
        "    export_model(", "    print('calls', sum(model.calls))\n    export_model("
    )
    (tmp_path / "train_llm.py").write_text(source)
    for flags, calls in ((["--recompute", "none"], 20), (["--recompute", "full"], 40)):
        args = [
            *SHORT,
            *config(tmp_path / "zero.json", *flags),
            "--save-dir",
            tmp_path,
            "-e",
            calls,
        ]
        [[done]] = run_or_fail(1, [(tmp_path / "train_llm.py", args)], tmp_path / f"jobs{calls}")
        assert f"calls {calls}\n" in done["stdout"]


# ---- what the user gets wrong ----------------------------------------------------------------

WRONG = {
    '{"train_batch_size": 16': "train_batch_size is 16, but the flags give 8; change it or",
    '{"train_micro_batch_size_per_gpu": 2': "size_per_gpu is 2, but the flags give 8",
    '{"gradient_accumulation_steps": 2': "gradient_accumulation_steps is 2, but the flags give 1",
    '{"gradient_clipping": 0.0': "gradient_clipping is 0.0, but the flags give 1.0",
    '{"bf16": {"enabled": true}': "precision is bf16, but the flags give fp32",
    '{"torch_autocast": {"enabled": true}': "precision is bf16, but the flags give fp32",
    '{"scheduler": {}': "zero.json: scheduler is not supported; remove it",
    "{": "zero.json: Expecting property name",
    "": "No such file",
}


@pytest.mark.exhaustive
def test_a_file_that_contradicts_the_flags(tmp_path):
    jobs = []
    for number, text in enumerate([*WRONG, '{"zero_optimization": {"stage": 0}}']):
        path = tmp_path / f"{number}/zero.json"
        path.parent.mkdir()
        if text:
            path.write_text(text if text in "{" else f"{text.rstrip('}') + '}' * text.count('{')}")
        args = [*SHORT, "--deepspeed-config", path, "--save-dir", tmp_path, "-e", "run"]
        jobs.append(("deepspeed", args))
    results = run_jobs(1, jobs, tmp_path / "jobs")
    expected = [*WRONG.values(), "stage 0 reports no gradient norm; choose stage 1, 2 or 3"]
    for [result], line in zip(results, expected, strict=True):
        check_user_error(result, line)
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_every_flag_is_explained():
    """Those of all chapters, and its own."""
    env = os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    shown = run_command(SCRIPTS["deepspeed"], "--help", check=True, env=env).stdout
    assert "--deepspeed-config" in shown and "--dist-timeout" in shown
