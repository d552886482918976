"""Stop it anywhere and start it again: the curve is that of a run that never stopped."""

import argparse
import shutil
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import SCRIPTS, SHORT, difference, metrics, run_jobs, run_or_fail
from runs import LONG, copy_run

# whose run is continued by which chapter on how many ranks: bit by bit, and nearly
SAME = [("01", "01@1"), ("01-dropout", "01@1"), ("01-bf16", "01@1"), ("02@2", "02@2")]
SAME += [("02@2-dropout", "02@2"), ("04@2", "04@2")]
NEAR = [("02@4", "02@4"), ("02@2", "02@1"), ("02@1", "02@2"), ("01", "02@2"), ("02@2", "01@1")]


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory, models):
    """Whole runs and continued ones: a name such as 02@2-on-02@1 says who continued whose run.

    Only what the selected tests need is run.
    """
    root = tmp_path_factory.mktemp("resume")
    items = [item for item in request.session.items if item.path == request.path]
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    places = {(found.get("run"), found.get("on")) for found in params}
    pairs = [pair for pair in SAME + NEAR if pair in places]
    names = {"01", "02@2", *dict(pairs), *(found["name"] for found in params if "name" in found)}
    names |= {name for name in ("01-dropout", "02@2-dropout") if pairs}
    dropout = ["-m", models / "gpt2-dropout"]
    extra = {"": [], "dropout": dropout, "bf16": ["--precision", "bf16"]}

    def run_all(names, kind):
        for ranks in (1, 2, 4):
            jobs = []
            for name, on in names:
                chapter, _, size = on.partition("@")
                if int(size or 1) == ranks:
                    more = extra[name.partition("-on-")[0].partition("-")[2]]
                    jobs.append((chapter, [*LONG, *more, "--save-dir", root, "-e", name]))
            yield from run_or_fail(ranks, jobs, root / f"{kind}{ranks}", shares=1 + (ranks == 1))

    list(run_all([(name, name.partition("-")[0]) for name in sorted(names)], "whole"))
    for name, on in pairs:
        copy_run(root / name, 10, root / f"{name}-on-{on}")
    for ranks in run_all([(f"{name}-on-{on}", on) for name, on in pairs], "later"):
        assert "continuing from" in ranks[0]["stdout"] and "step-00000010" in ranks[0]["stdout"]
    return root


@pytest.mark.parametrize("run, on", SAME)
def test_resume_is_bit_identical(runs, run, on):
    one, other = metrics(runs / run), metrics(runs / f"{run}-on-{on}")
    assert sorted(one) == list(range(31))
    assert difference(one, other) == 0.0
    weights = [
        AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
        for folder in (runs / run, runs / f"{run}-on-{on}")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("run, on", NEAR)
def test_resume_on_another_number_of_ranks(runs, run, on):
    one, other = metrics(runs / run), metrics(runs / f"{run}-on-{on}")
    assert difference(one, other, after=10) < 1e-5


def test_dropout_really_drops(runs):
    """Or else the tests with dropout would prove nothing."""
    one, other = metrics(runs / "01-dropout"), metrics(runs / "02@2-dropout")
    assert difference(one, other, names=["loss"]) > 1e-3


@pytest.fixture
def finished(runs, tmp_path):
    """Return a copy of a finished run of chapter 01, and the command that made it."""
    shutil.copytree(runs / "01", tmp_path / "run")
    return tmp_path / "run", [*LONG, "--save-dir", tmp_path, "-e", "run"]


def test_a_finished_run_says_so(finished, tmp_path):
    run_dir, args = finished
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    [[result]] = run_or_fail(1, [("01", args)], tmp_path / "jobs")
    assert "is already finished" in result["stdout"]
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_killed_before_the_model_was_written(finished, tmp_path):
    """A run that was extended and then killed after its last checkpoint has an old model folder."""
    run_dir, args = finished
    older = (run_dir / "model").rename(run_dir / "older")
    (run_dir / "model").mkdir()
    (run_dir / "model/config.json").touch()
    (run_dir / "finished-30").rename(run_dir / "finished-20")
    run_or_fail(1, [("01", args)], tmp_path / "jobs")
    written, expected = (folder / "model.safetensors" for folder in (run_dir / "model", older))
    assert written.read_bytes() == expected.read_bytes()


def test_a_longer_run_continues_and_changed_settings_hold(finished, tmp_path):
    """What the log says has changed has really changed."""
    run_dir, args = finished
    args = [*args, "--num-steps", 35, "--weight-decay", 0.05, "--checkpoint-every", 35]
    [[result]] = run_or_fail(1, [("01", args)], tmp_path / "jobs")
    for changed in ("weight_decay was 0.1, is now 0.05", "num_steps was 30, is now 35"):
        assert changed in result["stdout"]
    assert sorted(metrics(run_dir)) == list(range(36))
    state = torch.load(run_dir / "checkpoints/step-00000035/state.pt", weights_only=True)
    decays = [group["weight_decay"] for group in state["optimizer"]["param_groups"]]
    assert decays == [0.05, 0.0]


@pytest.mark.parametrize(
    "chapter, world_size", [("01", 1), pytest.param("05", 2, marks=pytest.mark.slow)]
)
def test_links_to_checkpoints_lose_nothing(tmp_path, chapter, world_size):
    """A user may move a checkpoint or a model to another disk, and leave a link to it."""
    args = [*LONG, "--num-steps", 20, "--save-dir", tmp_path, "-e", "run"]
    run_or_fail(world_size, [(chapter, args)], tmp_path / "first")
    (tmp_path / "disk").mkdir()
    run_dir, moved = tmp_path / "run", {}
    for folder in (run_dir / "checkpoints/step-00000010", run_dir / "model"):
        target = folder.rename(tmp_path / "disk" / folder.name)
        folder.symlink_to(target)
        moved |= {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    # The first of these runs deletes the link, and both write a checkpoint and a model.
    for steps in (40, 60):
        longer = [*args, "--num-steps", steps, "--keep-checkpoints", 1, "--checkpoint-every", 20]
        run_or_fail(world_size, [(chapter, longer)], tmp_path / f"until-{steps}")
        names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
        assert names == [f"step-{steps:08}"]
    assert not (run_dir / "model").is_symlink() and list((run_dir / "model").iterdir())
    found = [path for path in (tmp_path / "disk").rglob("*") if path.is_file()]
    assert {path: path.read_bytes() for path in found} == moved


DAMAGES = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "emptied": lambda file: file.write_bytes(b""),
    "deleted": lambda file: file.unlink(),
}
SLOW = {"marks": pytest.mark.slow}


@pytest.mark.parametrize(
    "name, file",
    [("01", "state.pt"), ("02@2", "state.pt")]
    + [pytest.param("04@2", file, **SLOW) for file in ("__1_0.distcp", ".metadata")],
)
def test_broken_checkpoints_are_reported_and_older_ones_used(runs, tmp_path, name, file):
    """By all ranks, though only one of them may have seen what is broken."""
    chapter, jobs = name[:2], []
    for damage, spoil in DAMAGES.items():
        run_dir = tmp_path / damage
        copy_run(runs / name, 20, run_dir)
        spoil(run_dir / "checkpoints/step-00000020" / file)
        jobs.append((chapter, [*LONG, "--save-dir", tmp_path, "-e", damage]))
    results = run_or_fail(1 if chapter == "01" else 2, jobs, tmp_path / "jobs")
    for damage, ranks in zip(DAMAGES, results, strict=True):
        run_dir = tmp_path / damage
        [line] = [line for line in ranks[0]["stdout"].splitlines() if "cannot be read" in line]
        assert line.startswith(f"{run_dir}/checkpoints/step-00000020 cannot be read")
        assert f"continuing from {run_dir}/checkpoints/step-00000010" in ranks[0]["stdout"]
        assert difference(metrics(runs / name), metrics(run_dir)) == 0.0
        for rank in ranks[1:]:
            assert rank["stdout"] == ""


@pytest.mark.parametrize(
    "name, file",
    [("01", "state.pt"), ("02@2", "state.pt"), pytest.param("04@2", ".metadata", **SLOW)],
)
def test_without_any_whole_checkpoint_it_stops(runs, tmp_path, name, file):
    """It does not start again at step 0, neither at once nor when it is started once more."""
    copy_run(runs / name, 20, tmp_path / "run")
    for state in (tmp_path / "run").glob(f"checkpoints/*/{file}"):
        state.write_bytes(b"")
    before = (tmp_path / "run/metrics.jsonl").read_text()
    job, world_size = (name[:2], [*LONG, "--save-dir", tmp_path, "-e", "run"]), int(name[3:] or 1)
    for ranks in run_jobs(world_size, [job, job], tmp_path / "jobs"):
        assert [rank["status"] for rank in ranks] == [2] * world_size
        assert "no checkpoint in" in ranks[0]["stderr"]
    assert (tmp_path / "run/metrics.jsonl").read_text() == before


def test_pruning_keeps_the_newest_and_leaves_nothing_of_a_kill(runs, tmp_path):
    """A later checkpoint that could not be read does not count, until it is saved anew."""
    copy_run(runs / "01", 10, tmp_path / "run")
    checkpoints = tmp_path / "run/checkpoints"
    (checkpoints / ".partial").mkdir()  # what a killed save leaves
    (checkpoints / "step-00000030").mkdir()
    args = [*LONG, "--keep-checkpoints", 2, "--checkpoint-every", 5, "--save-dir", tmp_path]
    [[result]] = run_or_fail(1, [("01", [*args, "-e", "run"])], tmp_path / "jobs")
    assert "step-00000030 cannot be read" in result["stdout"]
    names = sorted(folder.name for folder in checkpoints.iterdir())
    assert names == ["step-00000025", "step-00000030"]


def test_ranks_that_read_different_checkpoints_stop(runs, tmp_path):
    """In chapters 02 and 03 each rank reads for itself: here one cannot read the newest."""
    copy_run(runs / "02@2", 20, tmp_path / "run")
    script = tmp_path / "one_blind.py"
    script.write_text(BLIND.format(script=SCRIPTS["02"]))
    args = [*LONG, "--save-dir", tmp_path, "-e", "run"]
    [ranks] = run_jobs(2, [(script, args)], tmp_path / "jobs")
    assert [rank["status"] for rank in ranks] == [2, 2]
    expected = "cannot read the same checkpoint: they would continue from steps [20, 10]"
    assert expected in ranks[0]["stderr"]


BLIND = """
import os, runpy, torch

load = torch.load

def load_or_not(path, *args, **options):
    if os.environ["RANK"] == "1" and "step-00000020" in str(path):
        raise OSError("blind")
    return load(path, *args, **options)

torch.load = load_or_not
runpy.run_path("{script}", run_name="__main__")
"""


def test_a_resume_does_not_take_longer_in_later_steps(load):
    """Any batch takes the time of one permutation."""
    chapter = load("01")
    args = argparse.Namespace(seed=0, accumulation=1, micro_batch_size=4, device="cpu")
    args.skip_steps, args.global_batch_size = 0, 4
    samples, times = chapter.Samples(torch.zeros(100_000, 2, dtype=torch.int32)), []
    for step in (1, 10**6, 10**12):
        chapter.order_of.cache_clear()
        start = time.perf_counter()
        chapter.batch_at(args, samples, step, 0, torch.device("cpu"))
        times.append(time.perf_counter() - start)
    assert times[2] < 20 * times[0] + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("chapter, world_size", [("01", 1), ("04", 2)])
def test_a_continued_run_continues_the_same_wandb_run(tmp_path, chapter, world_size):
    """Of the arguments in a checkpoint, those of rank 0 count: only it talks to wandb."""
    args = [*SHORT, "--save-dir", tmp_path, "-e", "run", "--wandb", "offline"]
    run_or_fail(world_size, [(chapter, args)], tmp_path / "first")
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000020")
    (tmp_path / "run/finished-20").unlink()
    [[result, *_]] = run_or_fail(world_size, [(chapter, args)], tmp_path / "second")
    assert "continuing from" in result["stdout"] and "wandb was" not in result["stdout"]
    runs = list((tmp_path / "run/wandb").glob("offline-run-*"))
    assert len(runs) == 2 and len({folder.name.rpartition("-")[2] for folder in runs}) == 1, runs
    assert all(list(folder.glob("*.wandb")) for folder in runs)
