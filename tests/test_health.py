"""What is not as it should be is noticed, by name, and no checkpoint keeps it."""

import json
import re

import pytest
import torch

from conftest import ROOT, SCRIPTS, SHORT, difference, free_port, metrics, start_ranks

SLOW = [pytest.param(chapter, marks=pytest.mark.slow) for chapter in ("03", "05")]
CHAPTERS = ("01", "02", "03", "04", "05")
LINE = [*SHORT, "--eval-every", "20", "--num-steps", "12", "--log-every", "5"]


def run_broken(chapter, what, step, folder, *flags, ranks=2):
    """Run a chapter with its last rank broken; return the ranks' statuses and all they printed."""
    command = [ROOT / "tests/broken.py", what, step, SCRIPTS[chapter], *LINE]
    command += ["--save-dir", folder, "-e", "run", *flags]
    ranks = 1 if chapter == "01" else ranks
    started = start_ranks(ranks, command, folder, MASTER_PORT=str(free_port()))
    try:
        statuses = [process.wait(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    return statuses, "".join(path.read_text() for path in sorted(folder.glob("rank*.log")))


def culprit(chapter, ranks=2):
    """Return what messages call the last rank."""
    host = "" if chapter in ("01", "02") else r" on \S+"
    return f"rank {ranks - 1}{host}"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_loss_that_is_nan_stops_all(chapter, tmp_path):
    statuses, said = run_broken(chapter, "loss", 8, tmp_path)
    assert set(statuses) == {2}, said
    why = "and the loss is nan"
    if chapter != "01":
        why = f"because the loss of {culprit(chapter)} is not"
    line = rf"train_llm.py: error: step 8: the gradient is not finite, {why}; no weight was changed"
    assert len(re.findall(line, said)) == 1, said
    assert "Traceback" not in said
    assert not [*tmp_path.glob("run/checkpoints/step-*")]


@pytest.mark.parametrize("chapter", ["02", "04", *SLOW])
def test_a_gradient_that_is_not_finite_stops_all(chapter, tmp_path):
    statuses, said = run_broken(chapter, "gradient", 8, tmp_path)
    assert set(statuses) == {2}, said
    assert re.search(f"step 8: .* because that of {culprit(chapter)} alone is not; no wei", said)


@pytest.mark.parametrize("chapter", ["02", "04", *SLOW])
def test_such_a_step_may_be_skipped(chapter, tmp_path):
    """It changes no weight; the run goes on and ends well."""
    statuses, said = run_broken(chapter, "loss", 12, tmp_path, "--on-nonfinite", "skip")
    assert set(statuses) == {0}, said
    assert said.count("warning: step 12: the gradient is not finite") == 1
    rows = metrics(tmp_path / "run")
    assert rows[10]["loss"] < rows[5]["loss"] and rows[12]["val_loss"] < rows[5]["loss"]


def test_a_step_that_is_skipped_changes_nothing(load, monkeypatch):
    """Neither weights nor moments, nor the number of steps that AdamW corrects its bias by."""
    chapter = load("01")
    monkeypatch.setattr("sys.argv", ["train_llm.py", *LINE])
    args = chapter.parse_args()
    tokenizer, config = chapter.build_tokenizer_and_config(args)
    train_set, _ = chapter.build_data(args, tokenizer)
    model = chapter.build_model(args, config)
    optimizer = chapter.build_optimizer(args, model)
    batches = iter(chapter.build_loader(args, train_set, 0))
    device = torch.device("cpu")
    chapter.train_step(args, model, optimizer, batches, 1, device)
    before = [tensor.clone() for tensor in tensors_of(model, optimizer)]
    loss_of = chapter.loss_of
    monkeypatch.setattr(chapter, "loss_of", lambda *given: loss_of(*given) * float("nan"))
    _, norm = chapter.train_step(args, model, optimizer, batches, 2, device)
    assert not norm.isfinite()
    after = tensors_of(model, optimizer)
    assert all(map(torch.equal, before, after)) and len(before) == len(after) > 100


def tensors_of(model, optimizer):
    """Return all tensors that training changes."""
    moments = [state[name] for state in optimizer.state.values() for name in sorted(state)]
    return [*model.state_dict().values(), *moments]


@pytest.mark.parametrize("chapter, ranks, flags", [
    ("02", 2, ()), ("03", 3, ("--global-batch-size", "9")), ("04", 4, ("--replicas", "2")),
])  # fmt: skip
def test_a_changed_bit_is_noticed_before_it_is_saved(chapter, ranks, flags, tmp_path):
    statuses, said = run_broken(chapter, "weights", 8, tmp_path, *flags, ranks=ranks)
    assert set(statuses) == {2}, said
    name = culprit(chapter, ranks) if chapter != "02" else "ranks 0, 1"
    assert re.search(f"error: step 10: the weights of .*{name} differ", said)
    assert ("one of them is wrong" in said) == (ranks != 3)  # three have a majority
    assert not [*tmp_path.glob("run/checkpoints/step-*")]


@pytest.mark.parametrize("chapter", CHAPTERS[2:])
def test_ranks_tell_what_they_do(chapter, tmp_path):
    """A file of each rank, with phase and times; the start before stays in `ranks.before`."""
    for _ in range(2):
        statuses, said = run_broken(chapter, "nothing", 0, tmp_path)
        assert set(statuses) == {0}, said
    folder = tmp_path / "run/ranks"
    beats = [json.loads((folder / f"{rank:05}.json").read_text()) for rank in range(2)]
    assert [beat["rank"] for beat in beats] == [0, 1]
    assert {beat["phase"] for beat in beats} == {"finished"} and not beats[0]["error"]
    before = [
        json.loads(path.read_text()) for path in sorted(folder.parent.glob("ranks.before/*.json"))
    ]
    assert [beat["step"] for beat in before] == [12, 12]
    for beat in before:
        assert 0 < beat["data_seconds"] < beat["local_seconds"] <= beat["step_seconds"] < 60
    rows = metrics(tmp_path / "run")
    assert all(
        0 <= rows[step]["skew"] <= 1 and rows[step]["slowest_rank"] in (0, 1)
        for step in (5, 10, 12)
    )


def test_watching_changes_no_loss(tmp_path):
    """The curve of chapter 03, whose every part is watched, is that of chapter 01."""
    for chapter in ("01", "03"):
        (tmp_path / chapter).mkdir()
        statuses, said = run_broken(chapter, "nothing", 0, tmp_path / chapter)
        assert set(statuses) == {0}, said
    one, other = (metrics(tmp_path / chapter / "run") for chapter in ("01", "03"))
    assert difference(one, other) < 1e-5
