"""A gradient that is not finite reaches neither a weight nor a checkpoint, and ends the run."""

import re

import pytest
import torch

from conftest import ROOT, SCRIPTS, SHORT, prepare_training, run_jobs
from in_process import tensors_of

LINE = [*SHORT, "--num-steps", "12", "--log-every", "5", "--checkpoint-every", "3"]


LATER = [pytest.param("05", marks=pytest.mark.slow)]
LATER += [pytest.param(chapter, marks=pytest.mark.exhaustive) for chapter in ("07", "08")]
SPLIT = {"07": ["--pipeline-parallel-size", "2", "--batch-size", "4"]}
SPLIT |= {"08": ["--context-parallel-size", "2"]}


@pytest.mark.parametrize("chapter", ["01", "02", "04", *LATER])
@pytest.mark.parametrize("fault", ["nan-data", "nan-gradient"])
def test_a_run_ends_at_the_next_line_or_save(chapter, fault, tmp_path):
    """One rank's loss or gradient is not finite in step 8; the save of step 6 is the last."""
    ranks = 1 if chapter == "01" else 2
    args = [f"{fault}@rank{ranks - 1}:step7", SCRIPTS[chapter], *LINE]
    args += [*SPLIT.get(chapter, []), "--save-dir", tmp_path, "-e", "run"]
    [done] = run_jobs(ranks, [(ROOT / "diagnosing-errors/inject.py", args)], tmp_path / "jobs")
    said = "".join(rank["stdout"] + rank["stderr"] for rank in done)
    assert {rank["status"] for rank in done} == {2}, said
    line = "train_llm.py: error: a gradient in steps 7 to 9 was not finite; these steps are not"
    assert re.findall(line, said) and "Traceback" not in said, said
    names = sorted(path.name for path in tmp_path.glob("run/checkpoints/*"))
    assert names == ["step-00000003", "step-00000006"]


def test_from_then_on_no_step_changes_anything(load, monkeypatch):
    """Neither weights nor moments, nor the number of steps that AdamW corrects its bias by."""
    chapter = load("01")
    args, model, optimizer, train_set, _ = prepare_training(chapter, *LINE)
    device = torch.device("cpu")
    chapter.train_step(args, model, optimizer, train_set, 1, device)
    before = [tensor.clone() for tensor in tensors_of(model, optimizer)]
    loss_of = chapter.loss_of
    monkeypatch.setattr(chapter, "loss_of", lambda *given: loss_of(*given) * float("nan"))
    chapter.train_step(args, model, optimizer, train_set, 2, device)
    monkeypatch.setattr(chapter, "loss_of", loss_of)
    _, norm = chapter.train_step(args, model, optimizer, train_set, 3, device)
    assert norm.isfinite() and optimizer.found_inf
    after = tensors_of(model, optimizer)
    assert all(map(torch.equal, before, after)) and len(before) == len(after) > 100
