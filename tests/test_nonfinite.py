"""Test that a gradient that is not finite changes no weight, is not saved, and ends the run."""

import itertools

import pytest
import torch

from checks import check_bad_gradient
from conftest import ROOT, SCRIPTS, SHORT, SPLIT, prepare_training, run_jobs
from in_process import tensors_of
from marks import exhaustive, slow

ARGS = [*SHORT, "--seq-length", 32, "--num-steps", 12, "--log-every", 5, "--checkpoint-every", 3]
FAULTS = ("nan-data", "nan-gradient")
CASES = [("01", "nan-data"), slow("04", "nan-gradient"), slow("fp16", "nan-data")]
CASES += [exhaustive("02", "nan-gradient"), exhaustive("04", "nan-data")]
CASES += [exhaustive(*case) for case in itertools.product(("05", "07", "08", "09"), FAULTS)]
# A scale of 1 cannot be halved, so the first overflow ends a run in fp16.
FLAGS = SPLIT | {"fp16": ["--precision", "fp16", "--init-scale", 1]}


@pytest.mark.parametrize("chapter, fault", CASES)
def test_bad_gradient_ends_the_run_before_its_next_save(chapter, fault, tmp_path):
    """Plant a NaN in a loss or gradient of the last rank in step 8, after step 6 is saved."""
    ranks = 1 if chapter == "01" else 2
    args = [f"{fault}@rank{ranks - 1}:step7", SCRIPTS[chapter], *ARGS, *FLAGS.get(chapter, [])]
    args += ["--save-dir", tmp_path, "-e", "run"]
    [results] = run_jobs(ranks, [(ROOT / "diagnosing-errors/inject.py", args)], tmp_path / "jobs")
    assert "in steps 7 to 9" in "".join(result["stderr"] for result in results)
    check_bad_gradient(results, tmp_path / "run", every=3)


FP16 = ["--precision", "fp16", "--init-scale", 4]
# Each row has a chapter, its flags, the value that is not finite in three steps, and whether each
# of these steps must end the run.
FATAL = [
    ("01", [], "loss", [True, True, True]),
    ("fp16", FP16, "loss", [True, True, True]),
    # In the three steps, the scale is 4, 2 and 1, and a scale of 1 is too small to be halved.
    ("fp16", FP16, "gradient", [False, False, True]),
    # In fp32, each bad gradient is fatal, because there is no scale that could be too large.
    ("fp16", [], "gradient", [True, True, True]),
]


@pytest.mark.parametrize("name, flags, cause, fatal_steps", FATAL)
def test_steps_after_a_bad_gradient_change_nothing(
    load, one_rank_group, monkeypatch, name, flags, cause, fatal_steps
):
    """Check that even finite gradients change no weight or AdamW state after a bad gradient."""
    chapter, device, found = load(name), torch.device("cpu"), []
    args, model, optimizer, train_set, _ = prepare_training(chapter, *ARGS, *flags)
    chapter.train_step(args, model, optimizer, train_set, 1, device)
    before, loss_of = [tensor.clone() for tensor in tensors_of(model, optimizer)], chapter.loss_of

    def bad_loss_of(*given):
        loss = loss_of(*given)
        if cause == "loss":
            return loss * float("nan")
        loss.register_hook(lambda gradient: gradient * float("nan"))
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(chapter, "loss_of", bad_loss_of)
        for step in (2, 3, 4):
            chapter.train_step(args, model, optimizer, train_set, step, device)
            found.append(bool(optimizer.found_inf))
    _, norm = chapter.train_step(args, model, optimizer, train_set, 5, device)
    assert found == fatal_steps and norm.isfinite() and optimizer.found_inf
    after = tensors_of(model, optimizer)
    assert len(before) == len(after) > 100, "the optimizer has no moments"
    assert all(map(torch.equal, before, after)), "a step after the bad gradient changed a tensor"
