"""The checkpoints of chapters 04 and 05: all ranks write them, and any ranks read them."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import ROOT, SHORT, difference, metrics, run_command, run_jobs, run_or_fail
from marks import exhaustive
from runs import check_user_error, copy_run, has_weights_of, read_checkpoint

pytestmark = pytest.mark.slow
STEPS = [*SHORT, "--num-steps", 6, "--eval-every", 3, "--checkpoint-every", 2]
STEPS += ["--keep-checkpoints", 9]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, models):
    """Finished runs on two ranks: of chapters 02, 04 and 05, and of a model with tied weights."""
    root = tmp_path_factory.mktemp("checkpoints")
    runs = {"ddp": ("02", []), "fsdp": ("04", []), "async": ("05", ["--checkpoint-async"])}
    runs |= {"tied": ("04", ["-m", models / "qwen3"])}
    jobs = []
    for name, (chapter, args) in runs.items():
        jobs.append((chapter, [*STEPS, *args, "--save-dir", root, "-e", name]))
    run_or_fail(2, jobs, root / "jobs")
    return root


def test_async_save_equals_a_save_and_continues(runs, tmp_path):
    """Training continues during a save, and changes no bit of it."""
    for step in (2, 4, 6):
        weights, others = (
            read_checkpoint(runs / name, step)["model"] for name in ("fsdp", "async")
        )
        assert all(torch.equal(weights[name], others[name]) for name in weights)
    copy_run(runs / "async", 4, tmp_path / "again")
    args = [*STEPS, "--save-dir", tmp_path, "-e", "again", "--checkpoint-async"]
    [ranks] = run_or_fail(2, [("05", args)], tmp_path / "jobs")
    assert "step-00000004\n" in ranks[0]["stdout"].partition("continuing from")[2]
    assert difference(metrics(runs / "async"), metrics(tmp_path / "again")) == 0.0


def test_wrong_run_folder_stops_the_run(runs, tmp_path):
    """A folder may have a checkpoint of chapter 02 or of a different seed, or a pattern as name."""
    cases = {
        "ddp": ([], "no checkpoint in "),
        "fsdp": (["--seed", 1], "step-00000006: seed was 0, is now 1; choose a different"),
        "run[1]": ([], "run[1]: choose --save-dir and --experiment-name without *, ? and ["),
    }
    for name in ("ddp", "fsdp"):
        copy_run(runs / name, 6, tmp_path / name)
    args = [*STEPS, "--save-dir", tmp_path, "-e"]
    jobs = [("04", [*args, name, *flags]) for name, (flags, _) in cases.items()]
    results = run_jobs(2, jobs, tmp_path / "jobs")
    for ranks, (_, expected) in zip(results, cases.values(), strict=True):
        assert [rank["status"] for rank in ranks] == [2, 2]
        check_user_error(ranks[0], expected)


@pytest.mark.parametrize("run", ["fsdp", exhaustive("tied")])
def test_checkpoint_becomes_a_model_with_one_command(runs, tmp_path, run):
    """An earlier checkpoint gives its own weights, with the other files of the exported model."""
    checkpoint, folder = runs / run / "checkpoints/step-00000004", tmp_path / "model"
    done = run_command(ROOT / "04-fsdp/to_transformers.py", checkpoint, folder)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    assert done.stdout.strip().endswith("step-00000004")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert has_weights_of(model, read_checkpoint(runs / run, 4))
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (runs / run / "model" / name).read_bytes(), name


def test_folder_without_a_checkpoint_becomes_no_model(tmp_path):
    done = run_command(ROOT / "04-fsdp/to_transformers.py", tmp_path, tmp_path / "model")
    assert done.returncode == 1 and not (tmp_path / "model").exists()
    [line] = done.stderr.splitlines()
    assert line.startswith(f"to_transformers.py: error: cannot read {tmp_path}: ")
