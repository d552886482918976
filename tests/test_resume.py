"""Test that finished, longer and damaged runs start again correctly.

test_layouts.py compares the curves of runs that continue, and test_kill.py kills runs.
"""

import functools
import shutil

import pytest
import torch

from conftest import SHORT, difference, metrics, run_jobs, run_or_fail
from marks import exhaustive, slow
from runs import check_user_error, copy_run

# Each run has 12 steps. It logs every step, and evaluates and saves a checkpoint in every fourth
# step.
ARGS = [*SHORT, "--config", "num_hidden_layers=1", "--seq-length", 32, "--num-steps", 12]
ARGS += ["--eval-every", 4, "--checkpoint-every", 4, "--keep-checkpoints", 9]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Return a function that trains a run once, and returns the run's folder at each call."""

    @functools.cache
    def train(chapter, num_ranks):
        root = tmp_path_factory.mktemp("runs")
        args = [*ARGS, "--save-dir", root, "-e", "run"]
        run_or_fail(num_ranks, [(chapter, args)], root / "jobs")
        return root / "run"

    return train


# ---- a finished run is started again ---------------------------------------------------------
@pytest.fixture
def finished(run_of, tmp_path):
    """Return a copy of a finished run of chapter 01, and a function that starts it again."""

    def start(*args):
        """Start the run again with additional arguments; return its output."""
        args = [*ARGS, "--save-dir", tmp_path, "-e", "run", *args]
        [[result]] = run_or_fail(1, [("01", args)], tmp_path / "jobs")
        return result["stdout"]

    return shutil.copytree(run_of("01", 1), tmp_path / "run"), start


def test_finished_run_stays_unchanged(finished):
    run_dir, start = finished
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    assert "is already finished" in start()
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_longer_run_applies_the_settings_that_it_reports(finished):
    run_dir, start = finished
    output = start("--num-steps", 14, "--weight-decay", 0.05)
    for change in ("weight_decay was 0.1, is now 0.05", "num_steps was 12, is now 14"):
        assert change in output
    assert sorted(metrics(run_dir)) == list(range(15))
    state = torch.load(run_dir / "checkpoints/step-00000014/state.pt", weights_only=True)
    decays = [group["weight_decay"] for group in state["optimizer"]["param_groups"]]
    assert decays == [0.05, 0.0]


def test_checkpoints_behind_links_survive(finished, tmp_path):
    """Move a checkpoint and a model out of the run's folder, and leave links, as a user may."""
    run_dir, start = finished
    (tmp_path / "disk").mkdir()
    contents = {}
    for folder in (run_dir / "checkpoints/step-00000004", run_dir / "model"):
        target = folder.rename(tmp_path / "disk" / folder.name)
        folder.symlink_to(target)
        contents |= {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    # Start twice: the first start deletes the links, and both starts write a checkpoint and a
    # model.
    for steps in (14, 16):
        start("--num-steps", steps, "--keep-checkpoints", 1)
        names = [path.name for path in (run_dir / "checkpoints").iterdir()]
        assert names == [f"step-{steps:08}"]
    assert not (run_dir / "model").is_symlink() and list((run_dir / "model").iterdir())
    files = [path for path in (tmp_path / "disk").rglob("*") if path.is_file()]
    assert {path: path.read_bytes() for path in files} == contents


def test_pruning_keeps_the_newest_and_removes_what_a_kill_leaves(finished):
    run_dir, start = finished
    checkpoints = run_dir / "checkpoints"
    (checkpoints / ".partial").mkdir()
    shutil.rmtree(checkpoints / "step-00000012")
    start("--keep-checkpoints", 2, "--checkpoint-every", 3)
    names = sorted(folder.name for folder in checkpoints.iterdir())
    assert names == ["step-00000009", "step-00000012"]


def test_row_that_a_kill_has_cut_changes_no_other_row(finished):
    """Check that readers of metrics.jsonl skip the cut row; the run must write the row again."""
    run_dir, start = finished
    path = run_dir / "metrics.jsonl"
    complete, rows = metrics(run_dir), path.read_text().splitlines(keepends=True)
    path.write_text("".join(rows[:11]) + rows[11][:20])
    for step in (12, 8):
        shutil.rmtree(run_dir / f"checkpoints/step-{step:08}")
    start()
    assert difference(complete, metrics(run_dir)) == 0.0


# ---- checkpoints that cannot be read ---------------------------------------------------------
@pytest.mark.parametrize("chapter, num_ranks", [("01", 1), exhaustive("02", 2)])
def test_broken_checkpoint_stops_the_run_until_it_is_moved_away(
    run_of, tmp_path, chapter, num_ranks
):
    """Check that a run whose newest checkpoint is broken does not start again at step 0.

    After the broken checkpoint is moved away, the run must continue from the checkpoint before it.
    """
    run_dir = run_of(chapter, num_ranks)
    copy_run(run_dir, 12, tmp_path / "run")
    broken = tmp_path / "run/checkpoints/step-00000012"
    content = (broken / "state.pt").read_bytes()
    job = chapter, [*ARGS, "--save-dir", tmp_path, "-e", "run"]
    for damaged in (content[: len(content) // 2], b""):
        (broken / "state.pt").write_bytes(damaged)
        [ranks] = run_jobs(num_ranks, [job], tmp_path / "jobs")
        check_user_error(ranks[0], f"{broken}: cannot read it, so move it away to use an older one")
        assert [rank["status"] for rank in ranks] == [2] * num_ranks
    rows = (tmp_path / "run/metrics.jsonl").read_text()
    assert rows == (run_dir / "metrics.jsonl").read_text()
    broken.rename(tmp_path / "elsewhere")
    [ranks] = run_or_fail(num_ranks, [job], tmp_path / "jobs")
    assert "step-00000008" in ranks[0]["stdout"].partition("continuing from")[2]
    assert difference(metrics(run_dir), metrics(tmp_path / "run")) == 0.0


@pytest.mark.parametrize("file", [slow("__1_0.distcp"), exhaustive(".metadata")])
def test_broken_checkpoints_are_skipped_but_never_all(run_of, tmp_path, file):
    """Check that all ranks skip a checkpoint, even if only one rank sees the damage.

    If no checkpoint can be read, the run must not start again at step 0, even if a user starts it
    twice.
    """
    run_dir = run_of("04", 2)
    for name in ("some", "all"):
        copy_run(run_dir, 12, tmp_path / name)
    middle, newest = sorted(tmp_path.glob(f"some/checkpoints/*/{file}"))[1:]
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    middle.unlink()
    for path in tmp_path.glob(f"all/checkpoints/*/{file}"):
        path.write_bytes(b"")
    jobs = [("04", [*ARGS, "--save-dir", tmp_path, "-e", name]) for name in ("some", "all")]
    results, *stopped = run_jobs(2, [*jobs, jobs[1]], tmp_path / "jobs")
    output = results[0]["stdout"]
    for step in (12, 8):
        assert output.count(f"step-{step:08} cannot be read") == 1, results
    assert "step-00000004" in output.partition("continuing from")[2], results
    assert results[1]["stdout"] == ""
    assert difference(metrics(run_dir), metrics(tmp_path / "some")) == 0.0
    for ranks in stopped:
        assert [rank["status"] for rank in ranks] == [2, 2], ranks
        assert "cannot read its checkpoints; choose a different" in ranks[0]["stderr"]
    rows = (tmp_path / "all/metrics.jsonl").read_text()
    assert rows == (run_dir / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_resume_continues_the_wandb_run(tmp_path):
    """Check that a checkpoint stores the arguments of rank 0, because only rank 0 uses wandb."""
    args = [*ARGS, "--num-steps", 4, "--checkpoint-every", 2, "--save-dir", tmp_path, "-e", "run"]
    args += ["--wandb", "offline"]
    run_or_fail(2, [("04", args)], tmp_path / "first")
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000004")
    (tmp_path / "run/finished-4").unlink()
    [[result, *_]] = run_or_fail(2, [("04", args)], tmp_path / "second")
    assert "continuing from" in result["stdout"] and "wandb was" not in result["stdout"]
    runs = list((tmp_path / "run/wandb").glob("offline-run-*"))
    assert len(runs) == 2 and len({folder.name.rpartition("-")[2] for folder in runs}) == 1, runs
    assert all(list(folder.glob("*.wandb")) for folder in runs), "a wandb run has no file"
