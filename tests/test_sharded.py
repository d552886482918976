"""Chapter 04's checkpoints: written by all ranks, read by any number of them, whole or not used."""

import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM

from conftest import ROOT, difference, metrics, run_command, run_jobs, run_or_fail
from runs import (
    LONG,
    check_user_error,
    copy_run,
    load_exported,
    read_checkpoint,
    validation_loss,
    weights_of,
)

pytestmark = pytest.mark.slow


RANKS = {"on1": 1, "on2": 2, "dropout": 2, "tied": 2, "on4": 4, "replicas": 4}


@pytest.fixture(scope="module")
def options(models):
    """What runs are started with."""
    options = {name: [] for name in RANKS} | {"replicas": ["--replicas", 2]}
    return options | {"dropout": ["-m", models / "gpt2-dropout"], "tied": ["-m", models / "qwen3"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, options):
    """Whole runs on 1, 2 and 4 ranks."""
    root = tmp_path_factory.mktemp("sharded")
    args = [*LONG, "--save-dir", root, "-e"]
    for size in (1, 2, 4):
        names = [name for name, ranks in RANKS.items() if ranks == size]
        jobs = [("04", [*args, name, *options[name]]) for name in names]
        run_or_fail(size, jobs + [("02", [*args, "whole"])] * (size == 2), root / f"ranks{size}")
    return root


@pytest.mark.parametrize("name", ["dropout", "tied", "on4", "replicas"])
def test_resume_is_bit_identical(runs, options, tmp_path, name):
    """On as many ranks as before, for weights and losses, with dropout too."""
    copy_run(runs / name, 10, tmp_path / name)
    args = [*LONG, "--save-dir", tmp_path, "-e", name, *options[name]]
    [ranks] = run_or_fail(RANKS[name], [("04", args)], tmp_path / "jobs")
    assert f"continuing from {tmp_path / name}/checkpoints/step-00000010" in ranks[0]["stdout"]
    assert difference(metrics(runs / name), metrics(tmp_path / name)) == 0.0
    one, other = (weights_of(folder / name, 30) for folder in (runs, tmp_path))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_the_curve_goes_on_from_four_ranks_to_two_to_one_to_four(runs, tmp_path):
    """Each time ranks find their shards of weights and moments, whichever layout wrote them."""
    before = runs / "on4"
    for step, world_size, options in [(10, 2, []), (20, 1, []), (25, 4, ["--replicas", 2])]:
        run_dir = tmp_path / f"from{step}"
        copy_run(before, step, run_dir)
        args = [*LONG, "--checkpoint-every", 5, "--save-dir", tmp_path, "-e", run_dir.name]
        [ranks] = run_or_fail(world_size, [("04", [*args, *options])], tmp_path / f"jobs{step}")
        assert f"continuing from {run_dir}/checkpoints/step-{step:08}" in ranks[0]["stdout"]
        before = run_dir
    assert difference(metrics(runs / "on4"), metrics(before)) < 1e-5
    one, other = (weights_of(run_dir, 30) for run_dir in (runs / "on4", before))
    assert all(torch.allclose(one[name], other[name], rtol=0, atol=1e-4) for name in one)


def test_what_is_of_another_run_stays_as_it_is(runs, models, tmp_path):
    """A checkpoint of chapter 02, another seed, and another model under the same name."""
    model = tmp_path / "model"
    shutil.copytree(models / "qwen3", model)
    args = [*LONG, "--save-dir", tmp_path, "-e"]
    run_or_fail(2, [("04", [*args, "qwen", "-m", model])], tmp_path / "q")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    copy_run(runs / "whole", 10, tmp_path / "whole")
    copy_run(runs / "on2", 30, tmp_path / "seed")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/checkpoints/**/*")}
    cases = {
        "whole": ([], "no checkpoint in "),
        "seed": (["--seed", 1], "step-00000030: seed was 0, is now 1; choose a different"),
        "qwen": (["-m", model], "step-00000030: num_weights was "),
    }
    jobs = [("04", [*args, name, *options]) for name, (options, _) in cases.items()]
    for ranks, (_, expected) in zip(run_jobs(2, jobs, tmp_path / "j"), cases.values(), strict=True):
        assert [rank["status"] for rank in ranks] == [2, 2]
        check_user_error(ranks[0], expected)
    after = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/checkpoints/**/*")}
    assert before == after


def test_name_that_is_a_pattern_is_refused(tmp_path):
    args = [*LONG, "--save-dir", tmp_path, "-e", "run[1]"]
    [[done]] = run_jobs(1, [("04", args)], tmp_path / "jobs")
    expected = "run[1]: choose --save-dir and --experiment-name without *, ? and ["
    check_user_error(done, expected)


def test_the_settings_of_the_command_hold_after_a_resume(runs, tmp_path):
    """Not those of the checkpoint: it has none, and with another weight decay the curve differs."""
    copy_run(runs / "on2", 10, tmp_path / "run")
    names = dcp.FileSystemReader(tmp_path / "run/checkpoints/step-00000010").read_metadata()
    assert not [name for name in names.state_dict_metadata if "weight_decay" in name]
    args = [*LONG, "--save-dir", tmp_path, "-e", "run", "--weight-decay", 5.0]
    [ranks] = run_or_fail(2, [("04", args)], tmp_path / "jobs")
    assert "weight_decay was 0.1, is now 5.0" in ranks[0]["stdout"]
    one, other = metrics(runs / "on2"), metrics(tmp_path / "run")
    assert one[11]["loss"] == other[11]["loss"] and one[30]["loss"] < other[30]["loss"] - 1e-3


# ---- the model -------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["on1", "on2", "on4", "tied", "dropout"])
def test_the_finished_model_has_the_weights_of_all_shards(runs, run, load):
    """It loads by its folder alone, and has the validation loss that the ranks logged last."""
    model = load_exported(runs / run, 30)
    assert not type(model).__name__.startswith("FSDP")
    assert all(weight.dtype == torch.float32 for weight in model.parameters())
    args = json.loads(
        read_checkpoint(runs / run / "checkpoints/step-00000030", {"args": ""})["args"]
    )
    loss = validation_loss(model, runs / run, args, load("01"))
    assert abs(loss - metrics(runs / run)[30]["val_loss"]) < 1e-5


@pytest.mark.parametrize("run", ["on4", "tied"])
def test_a_checkpoint_becomes_a_model_with_one_command(runs, tmp_path, run):
    """The last one gives the model of the run, an earlier one its own weights."""
    for step in (20, 30):
        checkpoint = runs / run / f"checkpoints/step-{step:08}"
        done = run_command(ROOT / "04-fsdp/to_transformers.py", checkpoint, tmp_path / str(step))
        assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
        assert done.stdout.strip().endswith(f"step-{step:08}")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / str(step))
        expected = weights_of(runs / run, step)
        assert all(torch.equal(w, expected[name]) for name, w in model.state_dict().items())
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert (tmp_path / "30" / name).read_bytes() == (runs / run / "model" / name).read_bytes()


def test_what_is_no_checkpoint_becomes_no_model(tmp_path):
    done = run_command(ROOT / "04-fsdp/to_transformers.py", tmp_path, tmp_path / "model")
    assert done.returncode == 1 and not (tmp_path / "model").exists()
    [line] = done.stderr.splitlines()
    assert line.startswith(f"to_transformers.py: error: cannot read {tmp_path}: ")
