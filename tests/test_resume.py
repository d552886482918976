"""Stop it anywhere and start it again: the curve is that of a run that never stopped."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import SHORT, difference, metrics, run_jobs, run_well

LONG = [*SHORT, "--num-steps", 30, "--keep-checkpoints", 9]


def cut(run_dir, step, copy):
    """Copy a run as it was right after the checkpoint of `step`, with some rows more."""
    shutil.copytree(run_dir, copy)
    shutil.rmtree(copy / "model")
    for checkpoint in (copy / "checkpoints").iterdir():
        if int(checkpoint.name[5:]) > step:
            shutil.rmtree(checkpoint)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, models):
    """Whole runs and continued ones: a name such as 02@2-from-1 says who continued whose run."""
    root = tmp_path_factory.mktemp("resume")
    dropout = ["-m", models / "gpt2-dropout"]
    extra = {"": [], "-dropout": dropout, "-bf16": ["--precision", "bf16"]}

    def job(chapter, name, kind=""):
        return chapter, [*LONG, *extra[kind], "--save-dir", root, "-e", name]

    whole = {1: [job("01", f"01{kind}", kind) for kind in extra] + [job("02", "02@1")]}
    whole[2] = [job("02", "02@2"), job("02", "02@2-dropout", "-dropout"), job("04", "04@2")]
    whole[4] = [job("02", "02@4")]
    for world_size, jobs in whole.items():
        shares = 2 if world_size == 1 else 1
        run_well(world_size, jobs, root / f"whole{world_size}", shares=shares)

    later = {1: [], 2: [], 4: []}
    for name, chapter, world_size, kind in [
        ("01", "01", 1, ""),
        ("01-dropout", "01", 1, "-dropout"),
        ("01-bf16", "01", 1, "-bf16"),
        ("02@2", "02", 2, ""),
        ("02@2-dropout", "02", 2, "-dropout"),
        ("02@4", "02", 4, ""),
        ("02@2", "02", 1, ""),
        ("02@1", "02", 2, ""),
        ("01", "02", 2, ""),
        ("02@2", "01", 1, ""),
        ("04@2", "04", 2, ""),
        ("04@2", "04", 1, ""),
    ]:
        copy = f"{name}-on-{chapter}@{world_size}"
        cut(root / name, 10, root / copy)
        later[world_size].append(job(chapter, copy, kind))
    for world_size, jobs in later.items():
        shares = 2 if world_size == 1 else 1
        results = run_well(world_size, jobs, root / f"later{world_size}", shares=shares)
        for ranks in results:
            assert "continuing from" in ranks[0]["stdout"]
            assert "step-00000010" in ranks[0]["stdout"]
    return root


@pytest.mark.parametrize(
    "run, on",
    [("01", "01@1"), ("01-dropout", "01@1"), ("01-bf16", "01@1"), ("02@2", "02@2"),
     ("02@2-dropout", "02@2"), ("04@2", "04@2")],
)  # fmt: skip
def test_resume_is_bit_identical(runs, run, on):
    one, other = metrics(runs / run), metrics(runs / f"{run}-on-{on}")
    assert sorted(one) == list(range(31))
    assert difference(one, other) == 0.0
    weights = [
        AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
        for folder in (runs / run, runs / f"{run}-on-{on}")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(
    "run, on",
    [
        ("02@4", "02@4"),
        ("02@2", "02@1"),
        ("02@1", "02@2"),
        ("01", "02@2"),
        ("02@2", "01@1"),
        ("04@2", "04@1"),
    ],
)
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
    [[result]] = run_well(1, [("01", args)], tmp_path / "jobs")
    assert "is finished" in result["stdout"]
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_killed_before_the_model_was_written(finished, tmp_path):
    """A run that was extended and then killed after its last checkpoint has an old model folder."""
    run_dir, args = finished
    older = (run_dir / "model").rename(run_dir / "older")
    (run_dir / "model").mkdir()
    import os

    os.utime(run_dir / "model", (1, 1))
    run_well(1, [("01", args)], tmp_path / "jobs")
    written, expected = (folder / "model.safetensors" for folder in (run_dir / "model", older))
    assert written.read_bytes() == expected.read_bytes()


def test_a_longer_run_continues(finished, tmp_path):
    run_dir, args = finished
    [[result]] = run_well(1, [("01", [*args, "--num-steps", 35])], tmp_path / "jobs")
    assert "num_steps was 30, is 35" in result["stdout"]
    assert sorted(metrics(run_dir)) == list(range(36))


def test_changed_settings_of_the_optimizer_hold(finished, tmp_path):
    """What the log says has changed has really changed."""
    run_dir, args = finished
    args = [*args, "--num-steps", 35, "--weight-decay", 0.05, "--checkpoint-every", 35]
    [[result]] = run_well(1, [("01", args)], tmp_path / "jobs")
    assert "weight_decay was 0.1, is 0.05" in result["stdout"]
    state = torch.load(run_dir / "checkpoints/step-00000035/state.pt", weights_only=True)
    decays = [group["weight_decay"] for group in state["optimizer"]["param_groups"]]
    assert decays == [0.05, 0.0]


def test_killed_while_an_older_model_is_replaced(finished, tmp_path, load):
    """The old folder is whole under its name or not there at all, so that it is written again."""
    run_dir, _ = finished
    chapter, seen = load("01"), []

    def watch(path):
        seen.append((run_dir / "model/config.json").exists())
        seen.append((run_dir / "model/model.safetensors").exists())

    remove, chapter.shutil.rmtree = chapter.shutil.rmtree, lambda path, **_: watch(path)
    try:
        with chapter.whole_folder(run_dir / "model") as folder:
            for name in ("config.json", "model.safetensors"):
                (folder / name).write_text("new")
    finally:
        chapter.shutil.rmtree = remove
    assert all(seen) and (run_dir / "model/config.json").read_text() == "new"


DAMAGES = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:5000]),
    "emptied": lambda file: file.write_bytes(b""),
    "deleted": lambda file: file.unlink(),
}


@pytest.mark.parametrize("world_size, chapter", [(1, "01"), (2, "02")])
def test_broken_checkpoints_are_reported_and_older_ones_used(runs, tmp_path, world_size, chapter):
    name = {"01": "01", "02": "02@2"}[chapter]
    jobs = []
    for damage, spoil in DAMAGES.items():
        run_dir = tmp_path / damage
        cut(runs / name, 20, run_dir)
        spoil(run_dir / "checkpoints/step-00000020/state.pt")
        jobs.append((chapter, [*LONG, "--save-dir", tmp_path, "-e", damage]))
    results = run_well(world_size, jobs, tmp_path / "jobs")
    for damage, ranks in zip(DAMAGES, results, strict=True):
        run_dir = tmp_path / damage
        assert f"{run_dir}/checkpoints/step-00000020 cannot be read" in ranks[0]["stdout"]
        assert f"continuing from {run_dir}/checkpoints/step-00000010" in ranks[0]["stdout"]
        assert (run_dir / "checkpoints/step-00000020.broken").is_dir()
        assert difference(metrics(runs / name), metrics(run_dir)) == 0.0
        for rank in ranks[1:]:
            assert rank["stdout"] == ""


@pytest.mark.parametrize("world_size, chapter", [(1, "01"), (2, "02")])
def test_without_any_whole_checkpoint_it_stops(runs, tmp_path, world_size, chapter):
    """It does not start again at step 0, neither at once nor when it is started once more."""
    cut(runs / "01", 20, tmp_path / "run")
    for state in (tmp_path / "run").glob("checkpoints/*/state.pt"):
        state.write_bytes(b"")
    before = (tmp_path / "run/metrics.jsonl").read_text()
    job = (chapter, [*LONG, "--save-dir", tmp_path, "-e", "run"])
    for ranks in run_jobs(world_size, [job, job], tmp_path / "jobs"):
        assert [rank["status"] for rank in ranks] == [2] * world_size
        assert "no checkpoint in" in ranks[0]["stderr"]
    assert (tmp_path / "run/metrics.jsonl").read_text() == before


def test_metrics_are_cut_back_even_if_a_kill_tore_the_last_line(runs, tmp_path):
    cut(runs / "01", 20, tmp_path / "run")
    rows = (tmp_path / "run/metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run/metrics.jsonl").write_text("".join(rows[:21]) + rows[21][:9])
    run_well(1, [("01", [*LONG, "--save-dir", tmp_path, "-e", "run"])], tmp_path / "jobs")
    assert difference(metrics(runs / "01"), metrics(tmp_path / "run")) == 0.0


def test_pruning_keeps_the_newest_and_never_counts_broken_ones(runs, tmp_path):
    cut(runs / "01", 10, tmp_path / "run")
    checkpoints = tmp_path / "run/checkpoints"
    (checkpoints / "step-00000005.broken").mkdir()
    (checkpoints / ".step-00000099").mkdir()  # what a killed save leaves
    args = [*LONG, "--keep-checkpoints", 2, "--checkpoint-every", 5, "--save-dir", tmp_path]
    run_well(1, [("01", [*args, "-e", "run"])], tmp_path / "jobs")
    names = sorted(folder.name for folder in checkpoints.iterdir())
    assert names == ["step-00000005.broken", "step-00000025", "step-00000030"]


def test_resume_does_not_take_longer_in_later_steps(load):
    """The sampler starts anywhere in the time of one permutation."""
    import time

    sampler = load("01").ResumableSampler
    times = []
    for position in (0, 10**6, 10**12):
        start = time.perf_counter()
        next(iter(sampler(100_000, 0, position)))
        times.append(time.perf_counter() - start)
    assert times[2] < 20 * times[0] + 0.1


@pytest.mark.slow
def test_a_continued_run_continues_the_same_wandb_run(tmp_path):
    args = [*SHORT, "--save-dir", tmp_path, "-e", "run", "--wandb", "offline"]
    run_well(1, [("01", args)], tmp_path / "first")
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000020")
    shutil.rmtree(tmp_path / "run/model")
    [[result]] = run_well(1, [("01", args)], tmp_path / "second")
    assert "continuing from" in result["stdout"]
    runs = list((tmp_path / "run/wandb").glob("offline-run-*"))
    assert len({folder.name.rpartition("-")[2] for folder in runs}) == 1, runs
    assert all(list(folder.glob("*.wandb")) for folder in runs)
