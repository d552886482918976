"""Test that a mistake prints one line with the value, exits with status 2, and leaves no file."""

import shutil
import subprocess

import pytest

from checks import check_two_ranks_fail
from conftest import SHORT, change_file, metrics, prepare_tokens, run_jobs, run_or_fail
from marks import exhaustive, slow
from runs import check_user_error


@pytest.fixture(scope="module")
def files(tmp_path_factory, models):
    """Create a text file and two faulty models; return the folder that contains them."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "text.txt").write_text("other text " * 2000)
    shutil.copytree(models / "gpt2", folder / "small-embedding")
    change_file(folder / "small-embedding/config.json", '_size": 384', '_size": 100')
    (folder / "no-tokenizer").mkdir()
    shutil.copy(models / "gpt2/config.json", folder / "no-tokenizer")
    return folder


CASES = {
    "zero": ("--num-steps 0", "argument --num-steps: 0 is below 1; docs/flags.md has the flags"),
    "text": ("--num-steps a", "argument --num-steps: invalid positive value: 'a'; docs/flags.md"),
    "change": ("--config nosuch=1", "tiny nosuch=1: key nosuch isn't in the original config"),
    "no cuda": ("--device cuda", "torch finds no working GPU; repair the driver, or pass"),
    "nothing pretrained": ("--pretrained", "--pretrained: cannot read the safetensors files of"),
    "unknown model": ("-m nosuch/model", "--model-name nosuch/model:"),
    "no tokenizer": ("-m {files}/no-tokenizer", "needs a tokenizer with an end-of-text token"),
    "small embedding": ("-m {files}/small-embedding", "vocab_size must exceed token id 383"),
    "unknown data": ("-d nosuch/data", "--dataset-name nosuch/data:"),
    "missing file": ("-d nosuch.txt", "--dataset-name nosuch.txt: "),
    "no folder": ("-d nosuch.tokens", "--dataset-name nosuch.tokens: no index.json; write it with"),
    "no sample": ("--eval-samples 99999", "--eval-samples 99999: there are only "),
}


def test_mistake_prints_one_line_and_writes_no_file(files, tmp_path):
    jobs = []
    for case, (arguments, _) in CASES.items():
        args = [*SHORT, "--save-dir", tmp_path, "-e", case]
        jobs.append(("01", [*args, *arguments.format(files=files).split()]))
    results = run_jobs(1, jobs, tmp_path / "jobs", shares=2)
    for (case, (_, expected)), [result] in zip(CASES.items(), results, strict=True):
        check_user_error(result, expected)
        assert list((tmp_path / case).glob("*")) == [], case


RESUMED = [
    ("--seed 1", "seed was 0, is now 1"),
    ("-d {other}", "dataset_fingerprint was "),
    ("-m {models}/gpt2", "config_fingerprint was "),
    ("--config rms_norm_eps=1e-3", "config_fingerprint was "),
]
# Chapter 02 cannot read a checkpoint with shards, and chapter 04 cannot read a checkpoint without
# shards. Each value is a part of the error that the chapter then prints.
UNREADABLE = {
    "02": "step-00000004: cannot read it, so move it away to use an older one: FileNotFound",
    "04": "step-00000004: continue it with chapter 03, or choose another --experiment-name",
}


def times_of(folder):
    """Return the time in ns of each path's last change, without check_shared()'s probe file."""
    files = [path for path in folder.rglob("*") if path.name != ".probe"]
    return {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.parametrize("chapter, ranks, other", [slow("01", 1, "04"), exhaustive("04", 2, "02")])
def test_resume_with_different_arguments_changes_nothing(
    files, models, small_tokens, tmp_path, chapter, ranks, other
):
    """Check that the error names the changed value or the unreadable checkpoint.

    No file of the run may change.
    """
    other_tokens = prepare_tokens(files / "text.txt", tmp_path / "other.tokens")
    args = [*SHORT, "-d", small_tokens(), "--num-steps", 4, "--save-dir", tmp_path, "-e", "run"]
    run_or_fail(ranks, [(chapter, args)], tmp_path / "first")
    folders = {"other": other_tokens, "models": models, "tmp_path": tmp_path}
    jobs = [(chapter, [*args, *line.format(**folders).split()]) for line, _ in RESUMED]
    before = times_of(tmp_path / "run")
    results = run_jobs(ranks, [*jobs, (other, args)], tmp_path / "jobs", shares=2 // ranks)
    for result, (_, expected) in zip(results, [*RESUMED, ("", UNREADABLE[other])], strict=True):
        check_user_error(result[0], expected.format(**folders))
        assert {rank["status"] for rank in result} == {2}
    assert times_of(tmp_path / "run") == before


@pytest.mark.parametrize(
    "chapter, arguments, expected",
    [
        slow("02", "-d {files}/text.txt", "prepare it: python preparing-data/prepare.py -m tiny"),
        ("02", "--global-batch-size 9", "--global-batch-size 9: not divisible by 2 data-parallel"),
        slow("04", "--replicas 3", "--replicas 3: not a divisor of 2 ranks; use a divisor"),
    ],
)
def test_only_one_rank_reports_a_mistake(files, tmp_path, chapter, arguments, expected):
    """Test a mistake that rank 0 finds while rank 1 waits, and mistakes that both ranks find."""
    args = [*SHORT, *arguments.format(files=files).split()]
    check_two_ranks_fail(chapter, args, expected, tmp_path, tmp_path / "runs")


@pytest.mark.parametrize("chapter", [slow("01"), *map(exhaustive, ("02", "04", "05"))])
def test_full_disk_loses_no_checkpoint(small_disk, tmp_path, chapter):
    """Let the third save fail; on a larger disk, the run must continue from the second save."""
    num_ranks = 1 if chapter == "01" else 2
    # Train longer in chapter 05, because it saves in the background, and reports a failed save only
    # at the next save.
    steps = 8 if chapter == "05" else 6
    args = [*SHORT, "--num-steps", steps, "--checkpoint-every", 2, "--save-dir", small_disk]
    args += ["-e", "run", *["--checkpoint-async"] * (chapter == "05")]
    [ranks] = run_jobs(num_ranks, [(chapter, args)], tmp_path / "full")
    assert all(rank["status"] for rank in ranks), "a rank ended as if the disk were not full"
    checkpoints = small_disk / "run/checkpoints"
    names = sorted(folder.name for folder in checkpoints.iterdir())
    assert names == [".partial", "step-00000002", "step-00000004"]

    subprocess.run(["mount", "-o", "remount,size=80m", str(small_disk)], check=True)
    [ranks] = run_or_fail(num_ranks, [(chapter, args)], tmp_path / "again")
    assert f"continuing from {checkpoints}/step-00000004" in ranks[0]["stdout"]
    assert sorted(metrics(small_disk / "run")) == list(range(steps + 1))
