"""Whatever the user gets wrong: one line that names the value, exit status 2, nothing written."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from conftest import SCRIPTS, SHORT, family, kill_all, metrics, run_jobs, run_well, torchrun


@pytest.fixture(scope="module")
def files(tmp_path_factory, models):
    """Files and folders with one thing wrong in each."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "empty.jsonl").touch()
    (folder / "empty.txt").touch()
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (folder / "numbers.jsonl").write_text('{"text": 1}\n{"text": 2}\n')
    (folder / "columns.csv").write_text("title,body\na,b\n")
    (folder / "short.txt").write_text("too short")
    (folder / "few.txt").write_text("x" * 64 * 10)
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "not-parquet.parquet").write_text("text")
    (folder / "folder-without-data").mkdir()
    (folder / "bad.args").write_text("--num-steps 5 # fine\n--nosuch 1\n")
    shutil.copytree(models / "gpt2", folder / "small-embedding")
    config = json.loads((folder / "small-embedding/config.json").read_text())
    (folder / "small-embedding/config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    (folder / "no-tokenizer").mkdir()
    shutil.copy(models / "gpt2/config.json", folder / "no-tokenizer")
    return folder


CASES = {
    "zero": ("--num-steps 0", "argument --num-steps: must be at least 1, not 0"),
    "negative": ("--batch-size -3", "argument -b/--batch-size: must be at least 1, not -3"),
    "nan": ("--lr nan", "argument --lr: must be at least 0.0, not nan"),
    "word": ("--seq-length many", "argument -s/--seq-length: invalid int value: 'many'"),
    "flag": ("--nosuch 1", "unrecognized arguments: --nosuch 1"),
    "abbreviation": ("--num 1", "unrecognized arguments: --num 1"),
    "arguments file": ("@nosuch.args", "'nosuch.args'"),
    "flag in a file": ("@{files}/bad.args", "unrecognized arguments: --nosuch 1"),
    "too long": ("--seq-length 4096", "--seq-length 4096: tiny takes at most 2048 tokens"),
    "no cuda": ("--device cuda", "--device cuda: torch"),
    "nothing pretrained": ("--pretrained", "--pretrained: there are no published weights of tiny"),
    "unknown model": ("-m nosuch/model", "--model-name nosuch/model:"),
    "no model there": ("-m {files}/folder-without-data", "folder-without-data:"),
    "no tokenizer": ("-m {files}/no-tokenizer", "/no-tokenizer: its tokenizer has no end-of"),
    "small embedding": (
        "-m {files}/small-embedding",
        "tokenizer has 384 tokens, its embedding only 100",
    ),
    "unknown data": ("-d nosuch/data", "--dataset-name nosuch/data:"),
    "missing file": ("-d nosuch.txt", "--dataset-name nosuch.txt: there is no such"),
    "other file": ("-d {files}/picture.png", "picture.png: there is no such .txt"),
    "folder without data": ("-d {files}/folder-without-data", "folder-without-data:"),
    "empty": ("-d {files}/empty.jsonl", "empty.jsonl: this file is empty"),
    "empty text": ("-d {files}/empty.txt", "empty.txt: this file is empty"),
    "malformed": ("-d {files}/broken.jsonl", "broken.jsonl: JSON parse error"),
    "malformed parquet": ("-d {files}/not-parquet.parquet", "not-parquet.parquet:"),
    "numbers": ("-d {files}/numbers.jsonl", "--text-column text: this column of"),
    "no such column": ("-d {files}/columns.csv", "columns.csv are title, body"),
    "no such column of pydoc": ("--text-column body", "the columns of pydoc are text"),
    "no sample": ("-d {files}/short.txt", "makes 0 samples of 64 tokens"),
    "too few samples": ("-d {files}/few.txt", "makes 10 samples of 64 tokens, too few to hold 10"),
    "not a folder": ("--save-dir {files}/short.txt", "short.txt is not a writable folder"),
    "not writable": ("--save-dir /proc/nosuch", "cannot write /proc/nosuch"),
    "no login": ("--wandb online", "--wandb online: No API key"),
}


def check(result, expected):
    """Check one rank's result: the line, nothing but the line, and the status."""
    lines = [line for line in result["stderr"].splitlines() if line.strip()]
    assert len(lines) == 1, result["stderr"]
    assert lines[0].startswith("train_llm.py: error: ") and expected in lines[0]
    assert result["status"] == 2


@pytest.fixture(scope="module")
def results(files, tmp_path_factory):
    """What chapter 01 says in each case, from one process."""
    root = tmp_path_factory.mktemp("bad")
    os.environ.pop("WANDB_API_KEY", None)
    jobs = []
    for number, (arguments, _) in enumerate(CASES.values()):
        args = [*SHORT, "--save-dir", root / "runs", "-e", str(number)]
        jobs.append(("01", [*args, *arguments.format(files=files).split()]))
    return dict(zip(CASES, run_jobs(1, jobs, root / "jobs", shares=2), strict=True)), root / "runs"


@pytest.mark.parametrize("case", CASES)
def test_one_line_says_what_is_wrong(results, case):
    check(results[0][case][0], CASES[case][1])


def test_nothing_is_written(results):
    runs = {name: list((results[1] / str(n)).rglob("*")) for n, name in enumerate(CASES)}
    runs.pop("no login")  # wandb has started by then; it gets an empty folder and nothing else
    assert {name: found for name, found in runs.items() if found} == {}


RESUMED = {
    "seed": ("--seed 1", "seed was 0, is 1"),
    "sequence length": ("--seq-length 32", "seq_length was 64, is 32"),
    "global batch": ("--global-batch-size 4", "global_batch_size was 8, is 4"),
    "data": ("-d {files}/other.txt", "dataset_name was pydoc, is {files}/other.txt"),
    "model": ("-m {models}/gpt2", "model_name was tiny, is {models}/gpt2"),
}


def test_a_checkpoint_is_not_continued_as_another_run(files, models, tmp_path):
    """Both values are named, and the run that is there stays as it is."""
    (files / "other.txt").write_text("other text " * 2000)
    args = [*SHORT, "--save-dir", tmp_path, "-e", "run"]
    places = {"files": files, "models": models}
    jobs = [("01", args)]
    jobs += [("01", [*args, *line.format(**places).split()]) for line, _ in RESUMED.values()]
    first, *others = run_jobs(1, jobs, tmp_path / "jobs")
    assert first[0]["status"] == 0, first
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    for [result], (_, expected) in zip(others, RESUMED.values(), strict=True):
        check(result, expected.format(**places))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("--global-batch-size 9", "--global-batch-size 9 does not divide by 2 ranks; take 10"),
        ("-d nosuch.txt", "--dataset-name nosuch.txt: there is no such"),
    ],
)
def test_under_torchrun_one_rank_says_it(tmp_path, arguments, expected):
    """One of them fails before the ranks know each other, one while a rank waits for the other."""
    process = torchrun("02", *SHORT, "--save-dir", tmp_path / "runs", *arguments.split())
    _, stderr = process.communicate(timeout=120)
    ours = [line for line in stderr.splitlines() if line.startswith("train_llm.py: error:")]
    assert len(ours) == 1 and expected in ours[0], stderr
    assert process.returncode == 1  # torchrun's own
    assert "exitcode  : 2" in stderr
    assert 'train_llm.py", line' not in stderr  # no traceback of ours
    assert not (tmp_path / "runs").exists()


def test_without_torchrun_chapter_02_says_how_to_start_it():
    command = [sys.executable, str(SCRIPTS["02"])]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    check({"status": done.returncode, "stderr": done.stderr}, "start this with torchrun: torchrun")


@pytest.mark.parametrize(
    "chapter", ["01", "02", *(pytest.param(name, marks=pytest.mark.slow) for name in ("04", "05"))]
)
def test_ctrl_c_ends_with_one_line_and_no_orphan(tmp_path, chapter):
    args = [*SHORT, "--num-steps", 100_000, "--save-dir", tmp_path, "-e", "run"]
    args += ["--checkpoint-async"] if chapter == "05" else []
    process = torchrun(chapter, *args)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run/checkpoints").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        members = family(process)
        assert len(members) >= (1 if chapter == "01" else 3)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            kill_all(process, family(process))
    ended = [line for line in stdout.splitlines() if "interrupted" in line]
    assert ended == ["interrupted: the same command continues from the newest checkpoint"], stderr
    for trouble in ('train_llm.py", line', "train_llm.py: error:", "terminate called"):
        assert trouble not in stderr
    assert "warning: cannot write" not in stdout
    _, orphans = psutil.wait_procs(members, timeout=20)  # wandb's service ends after the ranks
    assert not orphans
    if chapter == "01":
        assert process.returncode == 130 and stderr.strip() == ""


@pytest.mark.parametrize("chapter", SCRIPTS)
def test_ctrl_c_during_a_save_is_no_full_disk(load, monkeypatch, tmp_path, capsys, chapter):
    """torch makes an error of its own of whatever ends its writing."""
    module = load(chapter)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("RANK", "0")

    class Disk(io.BytesIO):
        def write(self, data):
            module.interrupted()

    with pytest.raises(SystemExit) as stop, module.saving(tmp_path / "step-00000010"):
        torch.save({"weight": torch.zeros(9)}, Disk())
    assert stop.value.code == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("chapter", list(SCRIPTS)[2:])
def test_what_breaks_after_ctrl_c_is_not_told(load, monkeypatch, tmp_path, capsys, chapter, rank):
    """DCP goes on after whatever ends a rank's part of a save, with ranks that are gone by then."""
    module = load(chapter)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"sleeps {seconds} s"))
    monkeypatch.setenv("RANK", str(rank))
    with pytest.raises(SystemExit) as stop, module.saving(tmp_path / "step-00000010"):
        with contextlib.suppress(SystemExit):
            module.interrupted()
        raise RuntimeError("Connection closed by peer")
    assert stop.value.code == 130
    assert capsys.readouterr().err == ""


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 30 MiB, on which two of the tiny model's checkpoints fit and three do not."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=30m", "tmpfs", str(disk)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize(
    "world_size, chapter", [(1, "01"), pytest.param(2, "02", marks=pytest.mark.slow)]
)
def test_full_disk_during_a_save(small_disk, tmp_path, world_size, chapter):
    """The save that does not fit is reported, and after cleaning up the run goes on from before."""
    args = [*SHORT, "--num-steps", 30, "--save-dir", small_disk, "-e", "run", "--wandb", "disabled"]
    [ranks] = run_jobs(world_size, [(chapter, args)], tmp_path / "full")
    assert [rank["status"] for rank in ranks] == [2] * world_size
    check(ranks[0], f"cannot write {small_disk}/run/checkpoints/step-00000030: ")
    assert "No space left on device; what was saved before is whole" in ranks[0]["stderr"]
    checkpoints = small_disk / "run/checkpoints"
    assert sorted(f.name for f in checkpoints.iterdir()) == ["step-00000010", "step-00000020"]

    subprocess.run(["mount", "-o", "remount,size=80m", str(small_disk)], check=True)
    [ranks] = run_well(world_size, [(chapter, args)], tmp_path / "again")
    assert f"continuing from {checkpoints}/step-00000020" in ranks[0]["stdout"]
    assert sorted(metrics(small_disk / "run")) == list(range(31))
