"""fp16: an overflow costs its step and half of the scale, on all ranks; all else ends the run."""

import math
import re

import pytest
import torch

from conftest import (
    ROOT,
    SCRIPTS,
    SHORT,
    curves_of,
    difference,
    metrics,
    prepare_training,
    run_jobs,
    run_or_fail,
)
from in_process import SYNC_OPS, events_of_steps, tensors_of
from runs import copy_run

FP16 = ["--precision", "fp16"]
LINE = [*SHORT, "--seq-length", 32, "--global-batch-size", 4, "--num-steps", 12]
LINE += ["--eval-every", 6, "--checkpoint-every", 6]
TOO_LARGE = ["--init-scale", 2.0**20]  # 2 ** 16 is not
DEVICE = torch.device("cpu")


@pytest.fixture
def script(load, one_rank_group):
    return load("fp16")


def one_step(script, *words):
    """Return what a first step leaves: all tensors, its gradient norm, and the optimizer."""
    words = [*LINE, "--config", "num_hidden_layers=1", *words]
    args, model, optimizer, train_set, _ = prepare_training(script, *words)
    before = [tensor.clone() for tensor in tensors_of(model, optimizer)]
    _, norm = script.train_step(args, model, optimizer, train_set, 1, DEVICE)
    return args, model, optimizer, train_set, before, norm


def test_an_overflow_skips_its_step_and_halves_the_scale(script):
    args, model, optimizer, train_set, before, norm = one_step(script, *FP16, *TOO_LARGE)
    assert not norm.isfinite() and not optimizer.found_inf
    assert optimizer.scaler.get_scale() == 2.0**19
    assert all(map(torch.equal, before, model.state_dict().values()))
    for step in range(2, 6):
        loss, norm = script.train_step(args, model, optimizer, train_set, step, DEVICE)
        if norm.isfinite():
            break
    assert optimizer.scaler.get_scale() == 2.0 ** (21 - step)
    [taken] = {int(moments["step"]) for moments in optimizer.state.values()}
    assert taken == 1 and loss.isfinite()  # AdamW corrects its bias by the steps that it took
    assert not torch.equal(before[0], next(iter(model.state_dict().values())))


def test_clipping_sees_gradients_without_the_scale(script):
    """The norm is that of fp32, and so is the step that is taken."""
    small = ["--max-grad-norm", 0.01]
    half, full = (one_step(script, *words, *small) for words in (FP16, []))
    assert half[-1] == pytest.approx(full[-1].item(), rel=2e-3) and half[-1] > 1
    for model, optimizer in (half[1:3], full[1:3]):
        moments = [optimizer.state[weight]["exp_avg"] for weight in model.parameters()]
        norm = torch.nn.utils.get_total_norm(moments)
        assert norm == pytest.approx(0.01 * 0.1, rel=1e-2)  # 1 - beta1 of the clipped gradient


def test_small_gradients_do_not_become_zero(script):
    """Which is what the scale is for: without it fp16 loses some that fp32 has."""
    zeros = []
    for words in ([], FP16, [*FP16, "--init-scale", 1.0]):
        _, model, optimizer, *_ = one_step(script, *words, "--config", "num_hidden_layers=4")
        moments = [optimizer.state[weight]["exp_avg"] for weight in model.parameters()]
        zeros.append(sum(int((moment == 0).sum()) for moment in moments))
    assert zeros[0] == zeros[1] < zeros[2] - 20, zeros


@pytest.mark.parametrize("cause", ["loss", "gradient"])
def test_what_no_scale_mends_is_remembered(script, monkeypatch, cause):
    """A loss that is not finite at once; gradients alone when no scale is left to halve."""
    args, model, optimizer, train_set, *_ = one_step(script, *FP16, "--init-scale", 4.0)
    loss_of = script.loss_of

    def broken(*given):
        loss = loss_of(*given)
        if cause == "loss":
            return loss * float("nan")
        loss.register_hook(lambda gradient: gradient * float("nan"))
        return loss

    before = [tensor.clone() for tensor in tensors_of(model, optimizer)]
    monkeypatch.setattr(script, "loss_of", broken)
    seen = []
    for step in (2, 3, 4):
        script.train_step(args, model, optimizer, train_set, step, DEVICE)
        seen.append(bool(optimizer.found_inf))
    assert seen == ([True] * 3 if cause == "loss" else [False, False, True])
    monkeypatch.setattr(script, "loss_of", loss_of)
    _, norm = script.train_step(args, model, optimizer, train_set, 5, DEVICE)
    assert norm.isfinite() and optimizer.found_inf
    assert all(map(torch.equal, before, tensors_of(model, optimizer)))


def test_no_scale_is_infinite(script):
    *_, optimizer, _, _, _ = one_step(script, *FP16, "--init-scale", "inf")
    assert optimizer.found_inf


def test_no_value_is_read_from_the_device(script):
    """Nor does a step reduce more than gradients and one number."""
    small = ["--global-batch-size", 4, "--seq-length", 16, "--config", "num_hidden_layers=1"]
    events, ddp = events_of_steps(script, *FP16, *small)
    assert "aten::_amp_update_scale_" in events  # the profiler did look
    assert [event for event in events if SYNC_OPS.match(event)] == []
    buckets = len(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(","))
    assert events.count("c10d::allreduce_") == 3 * (buckets + 1)


def test_without_fp16_it_is_chapter_02(script):
    """Any gradient that is not finite ends the run: there is no scale that it could be due to."""
    args, model, optimizer, train_set, *_ = one_step(script)
    assert optimizer.scaler.state_dict() == {} and args.precision == "fp32"
    model.get_output_embeddings().weight.data[0, 0] = float("inf")
    script.train_step(args, model, optimizer, train_set, 2, DEVICE)
    script.train_step(args, model, optimizer, train_set, 3, DEVICE)
    assert optimizer.found_inf


# ---- whole runs ------------------------------------------------------------------------------
@pytest.mark.exhaustive
def test_its_curve_is_that_of_other_precisions(tmp_path):
    """Nearer to fp32 than bf16 is: fp16 has three more bits for the digits of a number."""
    fp16 = ("fp16", [*LINE, *FP16, "--init-scale", 2.0**12])  # at which nothing overflows
    others = {name: ("fp16", [*LINE, "--precision", name]) for name in ("bf16", "fp32")}
    curves = curves_of(tmp_path, {1: {"one": fp16}, 2: {"two": fp16} | others})
    losses = {"names": ["loss", "val_loss"]}
    assert difference(curves["one"], curves["two"], **losses) < 5e-4
    assert difference(curves["two"], curves["fp32"], **losses) < 5e-4
    assert difference(curves["bf16"], curves["fp32"], **losses) < 5e-3
    assert [row["loss_scale"] for row in list(curves["two"].values())[1:]] == [2.0**12] * 12
    assert curves["two"][12]["loss"] < curves["two"][1]["loss"] - 0.5


@pytest.mark.slow
def test_a_resume_is_bit_identical(tmp_path):
    """The scale goes on as it was: if it began anew, the steps from 7 on would be skipped."""
    args = [*LINE, *FP16, *TOO_LARGE, "--save-dir", tmp_path, "-e"]
    run_or_fail(2, [("fp16", [*args, "whole"])], tmp_path / "jobs")
    copy_run(tmp_path / "whole", 6, tmp_path / "later")
    [[first, _]] = run_or_fail(2, [("fp16", [*args, "later"])], tmp_path / "jobs")
    assert "step-00000006" in first["stdout"]
    whole, later = metrics(tmp_path / "whole"), metrics(tmp_path / "later")
    assert min(skipped(whole)) <= 6 < max(skipped(whole))
    assert difference(whole, later, after=6, names=["loss", "val_loss", "loss_scale"]) == 0.0


def skipped(rows):
    """Return the steps that were not taken."""
    return [step for step in rows if not math.isfinite(rows[step].get("grad_norm", 0))]


@pytest.mark.slow
def test_all_ranks_skip_what_overflows_on_one(tmp_path):
    """In step 4, on rank 1; then weights and scales are still the same on both."""
    (tmp_path / "broken.py").write_text(BROKEN.format(script=SCRIPTS["fp16"], fault=OVERFLOW))
    args = [*LINE, *FP16, "--init-scale", 2.0**12, "--save-dir", tmp_path, "-e", "run"]
    [ranks] = run_or_fail(2, [(tmp_path / "broken.py", args)], tmp_path / "jobs")
    one, two = (rank["stderr"].splitlines()[-1] for rank in ranks)
    assert one == two and one.endswith(" scale 2048.0 steps {11}"), (one, two)
    assert skipped(metrics(tmp_path / "run")) == [4]


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["loss", pytest.param("gradient", marks=pytest.mark.exhaustive)])
def test_the_run_ends_at_the_next_line(tmp_path, cause):
    """On both ranks, though only rank 1 has what is not finite; step 3 is the last one saved."""
    args = [*LINE, *FP16, "--log-every", 5, "--checkpoint-every", 3, "--save-dir", tmp_path]
    args += ["-e", "run"]
    if cause == "loss":
        job = (tmp_path / "broken.py", args)
        job[0].write_text(BROKEN.format(script=SCRIPTS["fp16"], fault='loss * float("nan")'))
    else:  # which no smaller scale mends, as there is none
        args = ["nan-gradient@rank1:step3", SCRIPTS["fp16"], *args, "--init-scale", 1.0]
        job = (ROOT / "diagnosing-errors/inject.py", args)
    [done] = run_jobs(2, [job], tmp_path / "jobs")
    said = "".join(rank["stdout"] + rank["stderr"] for rank in done)
    assert {rank["status"] for rank in done} == {2}, said
    line = "train_llm.py: error: a gradient in steps 4 to 5 was not finite; these steps are not"
    assert re.findall(line, said) and "Traceback" not in said, said
    assert [path.name for path in tmp_path.glob("run/checkpoints/*")] == ["step-00000003"]


OVERFLOW = 'loss if loss.register_hook(lambda gradient: gradient * float("inf")) else None'
BROKEN = """
import os, runpy, sys

names = runpy.run_path("{script}")["train_step"].__globals__
loss_of, train_step, seen = names["loss_of"], names["train_step"], []

def broken(args, model, batch):
    loss = loss_of(args, model, batch)
    if os.environ["RANK"] == "1" and model.training and len(seen) == 4:
        return {fault}
    return loss

def counted(*given):
    seen.append(given)
    return train_step(*given)

names |= {{"loss_of": broken, "train_step": counted}}
names["main"]()
_, model, optimizer, *_ = seen[-1]
total = sum(weight.double().sum().item() for weight in model.parameters())
steps = {{int(state["step"]) for state in optimizer.state.values()}}
print(total, "scale", optimizer.scaler.get_scale(), "steps", steps, file=sys.stderr)
"""
