"""A gradient that is not finite reaches neither a weight nor a checkpoint, and ends the run."""

import itertools

import pytest
import torch

from checks import check_bad_gradient
from conftest import ROOT, SCRIPTS, SHORT, SPLIT, prepare_training, run_jobs
from in_process import tensors_of
from marks import exhaustive, slow

ARGS = [*SHORT, "--seq-length", 32, "--num-steps", 12, "--log-every", 5, "--checkpoint-every", 3]
FAULTS = ("nan-data", "nan-gradient")
CASES = [("01", "nan-data"), ("02", "nan-gradient"), ("04", "nan-gradient")]
CASES += [slow("05", "nan-data"), slow("fp16", "nan-gradient")]
CASES += [exhaustive(*case) for case in itertools.product(("04", "05", "07", "08", "09"), FAULTS)]


@pytest.mark.parametrize("chapter, fault", CASES)
def test_bad_gradient_ends_the_run_before_its_next_save(chapter, fault, tmp_path):
    """In step 8, the loss or the gradient of the last rank is not finite; step 6 is saved."""
    ranks = 1 if chapter == "01" else 2
    args = [f"{fault}@rank{ranks - 1}:step7", SCRIPTS[chapter], *ARGS, *SPLIT.get(chapter, [])]
    args += ["--save-dir", tmp_path, "-e", "run"]
    [results] = run_jobs(ranks, [(ROOT / "diagnosing-errors/inject.py", args)], tmp_path / "jobs")
    assert "in steps 7 to 9" in "".join(result["stderr"] for result in results)
    check_bad_gradient(results, tmp_path / "run", every=3)


def test_steps_after_a_bad_gradient_change_nothing(load, monkeypatch):
    """Weights, moments, and AdamW's number of steps stay, although later gradients are finite."""
    chapter = load("01")
    args, model, optimizer, train_set, _ = prepare_training(chapter, *ARGS)
    device = torch.device("cpu")
    chapter.train_step(args, model, optimizer, train_set, 1, device)
    before = [tensor.clone() for tensor in tensors_of(model, optimizer)]
    with monkeypatch.context() as patch:
        loss_of = chapter.loss_of
        patch.setattr(chapter, "loss_of", lambda *given: loss_of(*given) * float("nan"))
        chapter.train_step(args, model, optimizer, train_set, 2, device)
    _, norm = chapter.train_step(args, model, optimizer, train_set, 3, device)
    assert norm.isfinite() and optimizer.found_inf
    after = tensors_of(model, optimizer)
    assert all(map(torch.equal, before, after)) and len(before) == len(after) > 100
