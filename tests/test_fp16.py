"""Test that a step with an overflow in fp16 is skipped, and that fp16 follows the fp32 curve."""

import math

import inject
import pytest
import torch

from conftest import SCRIPTS, SHORT, curves_of, difference, metrics, prepare_training, run_or_fail
from in_process import tensors_of
from runs import copy_run

FP16 = ["--precision", "fp16"]
ARGS = [*SHORT, "--config", "num_hidden_layers=1", "--seq-length", 32, "--global-batch-size", 4]
ARGS += ["--num-steps", 8, "--eval-every", 4, "--checkpoint-every", 4]
DEVICE = torch.device("cpu")


@pytest.fixture
def script(load, one_rank_group):
    return load("fp16")


def take_step(script, *words):
    """Run one training step.

    Return the arguments, the model, the optimizer, the samples, copies of the tensors of the model
    and the optimizer from before the step, and the gradient norm.
    """
    args, model, optimizer, train_set, _ = prepare_training(script, *ARGS, *words)
    before = [tensor.clone() for tensor in tensors_of(model, optimizer)]
    _, norm = script.train_step(args, model, optimizer, train_set, 1, DEVICE)
    return args, model, optimizer, train_set, before, norm


def test_overflow_skips_its_step_and_halves_the_scale(script):
    # Start with a scale of 2 ** 20, because a scale of 2 ** 16 causes no overflow here.
    words = [*FP16, "--init-scale", 2.0**20]
    args, model, optimizer, train_set, before, norm = take_step(script, *words)
    assert not norm.isfinite() and not optimizer.found_inf
    assert optimizer.scaler.get_scale() == 2.0**19
    assert all(map(torch.equal, before, model.state_dict().values())), "a weight changed"
    for step in range(2, 6):
        loss, norm = script.train_step(args, model, optimizer, train_set, step, DEVICE)
        if norm.isfinite():
            break
    assert optimizer.scaler.get_scale() == 2.0 ** (21 - step)
    # AdamW's bias correction depends on its number of steps, so AdamW must not count a skipped
    # step.
    assert {int(moments["step"]) for moments in optimizer.state.values()} == {1}
    assert loss.isfinite() and not torch.equal(before[0], next(iter(model.state_dict().values())))


def test_grouped_heads_have_the_gradients_of_the_parent(load, script, models):
    """Compare the fp32 gradients of the fp16 script and of chapter 02.

    The fp16 script repeats shared keys and values, while SDPA repeats them in chapter 02.
    """
    gradients = []
    for chapter in (load("02"), script):
        _, model, optimizer, *_ = take_step(chapter, "-m", models / "qwen3", "--max-grad-norm", 0)
        moments = [optimizer.state[weight]["exp_avg"].flatten() for weight in model.parameters()]
        gradients.append(torch.cat(moments))
    largest = gradients[0].abs().max()
    assert (gradients[0] - gradients[1]).abs().max() < 1e-5 * largest


# ---- runs ------------------------------------------------------------------------------------
@pytest.mark.exhaustive
def test_curve_of_fp16_is_nearer_to_fp32_than_the_curve_of_bf16(tmp_path):
    """Allow fp16 smaller differences from fp32 than bf16, because fp16 has more mantissa bits."""
    # Choose a scale that causes no overflow, because a skipped step would change the curve.
    fp16 = [*ARGS, *FP16, "--init-scale", 2.0**12]
    runs = {name: ("fp16", [*ARGS, "--precision", name]) for name in ("bf16", "fp32")}
    runs["fp16"] = "fp16", fp16
    curves = curves_of(tmp_path, {1: {"fp16@1": ("fp16", fp16)}, 2: runs})
    limits = {("fp16@1", "fp16"): 5e-4, ("fp16", "fp32"): 5e-4, ("bf16", "fp32"): 5e-3}
    for (name, other), limit in limits.items():
        assert difference(curves[name], curves[other], names=["loss", "val_loss"]) < limit, name
    assert {row.get("loss_scale") for row in curves["fp16"].values()} == {None, 2.0**12}
    assert curves["fp16"][8]["loss"] < curves["fp16"][1]["loss"] - 0.3


@pytest.mark.slow
def test_overflow_on_one_rank_skips_its_step_on_all_ranks(tmp_path):
    """Put NaN into rank 1's gradients in step 3; both ranks must then skip this step.

    NaN stands for an overflow. A resume from rank 0's checkpoint must repeat every bit of the
    losses. A different weight on rank 1, or a scale that the resume has reset, would change the
    losses.
    """
    args = [*ARGS, *FP16, "--init-scale", 2.0**12, "--save-dir", tmp_path, "-e"]
    fault = ["nan-gradient@rank1:step2", SCRIPTS["fp16"]]
    complete = inject.__file__, [*fault, *args, "complete"]
    run_or_fail(2, [complete], tmp_path / "first")
    copy_run(tmp_path / "complete", 4, tmp_path / "continued")
    [[first, _]] = run_or_fail(2, [("fp16", [*args, "continued"])], tmp_path / "second")
    assert "step-00000004" in first["stdout"].partition("continuing from")[2]
    rows, continued = metrics(tmp_path / "complete"), metrics(tmp_path / "continued")
    assert difference(rows, continued, after=4, names=["loss", "val_loss", "loss_scale"]) == 0.0
    assert [step for step in rows if not math.isfinite(rows[step].get("grad_norm", 0))] == [3]
    assert rows[8]["loss_scale"] == 2.0**11
    state = torch.load(tmp_path / "complete/checkpoints/step-00000008/state.pt", weights_only=True)
    assert {int(moments["step"]) for moments in state["optimizer"]["state"].values()} == {7}
