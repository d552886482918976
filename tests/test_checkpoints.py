"""The checkpoints of chapters 04 and 05: all ranks write them, and any ranks read them."""

import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM

from conftest import ROOT, SHORT, difference, metrics, run_command, run_jobs, run_or_fail
from runs import check_user_error, copy_run, weights_of

pytestmark = pytest.mark.slow
STEPS = [*SHORT, "--num-steps", 6, "--eval-every", 3, "--checkpoint-every", 2]
STEPS += ["--keep-checkpoints", 9]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, models):
    """Finished runs on two ranks: of chapters 02, 04 and 05, and of a model with tied weights."""
    root = tmp_path_factory.mktemp("checkpoints")
    model = shutil.copytree(models / "qwen3", root / "model")
    runs = {"ddp": ("02", []), "fsdp": ("04", []), "async": ("05", ["--checkpoint-async"])}
    runs |= {"tied": ("04", ["-m", models / "qwen3"]), "other model": ("04", ["-m", model])}
    jobs = []
    for name, (chapter, args) in runs.items():
        jobs.append((chapter, [*STEPS, *args, "--save-dir", root, "-e", name]))
    run_or_fail(2, jobs, root / "jobs")
    return root


def test_async_save_equals_a_save_and_continues(runs, tmp_path):
    """Training continues during a save, and changes no bit of it."""
    for step in (2, 4, 6):
        weights, others = (weights_of(runs / name, step) for name in ("fsdp", "async"))
        assert all(torch.equal(weights[name], others[name]) for name in weights)
    copy_run(runs / "async", 4, tmp_path / "again")
    args = [*STEPS, "--save-dir", tmp_path, "-e", "again", "--checkpoint-async"]
    [ranks] = run_or_fail(2, [("05", args)], tmp_path / "jobs")
    assert "step-00000004\n" in ranks[0]["stdout"].partition("continuing from")[2]
    assert difference(metrics(runs / "async"), metrics(tmp_path / "again")) == 0.0


def test_checkpoint_of_a_different_run_stops_the_run_and_stays(runs, tmp_path):
    """The checkpoint is of chapter 02, of a different seed, or of a changed model folder."""
    for name in ("ddp", "fsdp", "other model"):
        copy_run(runs / name, 6, tmp_path / name)
    path = runs / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 96}))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/checkpoints/**/*")}
    cases = {
        "ddp": ([], "no checkpoint in "),
        "fsdp": (["--seed", 1], "step-00000006: seed was 0, is now 1; choose a different"),
        "other model": (["-m", runs / "model"], "step-00000006: num_weights was "),
    }
    args = [*STEPS, "--save-dir", tmp_path, "-e"]
    jobs = [("04", [*args, name, *flags]) for name, (flags, _) in cases.items()]
    results = run_jobs(2, jobs, tmp_path / "jobs")
    for ranks, (_, expected) in zip(results, cases.values(), strict=True):
        assert [rank["status"] for rank in ranks] == [2, 2]
        check_user_error(ranks[0], expected)
    after = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/checkpoints/**/*")}
    assert before == after


def test_name_that_is_a_pattern_stops_the_run(tmp_path):
    args = [*STEPS, "--save-dir", tmp_path, "-e", "run[1]"]
    [[result]] = run_jobs(1, [("04", args)], tmp_path / "jobs")
    expected = "run[1]: choose --save-dir and --experiment-name without *, ? and ["
    check_user_error(result, expected)


def test_resumed_run_uses_the_settings_of_its_command(runs, tmp_path):
    """A checkpoint has no settings of the optimizer; with a new weight decay, the loss changes."""
    copy_run(runs / "fsdp", 2, tmp_path / "run")
    names = dcp.FileSystemReader(tmp_path / "run/checkpoints/step-00000002").read_metadata()
    assert not [name for name in names.state_dict_metadata if "weight_decay" in name]
    args = [*STEPS, "--save-dir", tmp_path, "-e", "run", "--weight-decay", 50.0]
    [ranks] = run_or_fail(2, [("04", args)], tmp_path / "jobs")
    assert "weight_decay was 0.1, is now 50.0" in ranks[0]["stdout"]
    curve, changed = metrics(runs / "fsdp"), metrics(tmp_path / "run")
    assert curve[3]["loss"] == changed[3]["loss"]
    assert abs(curve[6]["loss"] - changed[6]["loss"]) > 1e-3


@pytest.mark.parametrize("run", ["fsdp", pytest.param("tied", marks=pytest.mark.exhaustive)])
def test_checkpoint_becomes_a_model_with_one_command(runs, tmp_path, run):
    """An earlier checkpoint gives its own weights, with the other files of the exported model."""
    checkpoint, folder = runs / run / "checkpoints/step-00000004", tmp_path / "model"
    done = run_command(ROOT / "04-fsdp/to_transformers.py", checkpoint, folder)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    assert done.stdout.strip().endswith("step-00000004")
    model, expected = AutoModelForCausalLM.from_pretrained(folder), weights_of(runs / run, 4)
    assert all(torch.equal(w, expected[name]) for name, w in model.state_dict().items())
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (runs / run / "model" / name).read_bytes(), name


def test_folder_without_a_checkpoint_becomes_no_model(tmp_path):
    done = run_command(ROOT / "04-fsdp/to_transformers.py", tmp_path, tmp_path / "model")
    assert done.returncode == 1 and not (tmp_path / "model").exists()
    [line] = done.stderr.splitlines()
    assert line.startswith(f"to_transformers.py: error: cannot read {tmp_path}: ")
