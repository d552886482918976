"""A user's mistake costs one line that names the value, exit status 2, and no file."""

import json
import shutil
import subprocess

import pytest

from checks import check_two_ranks_fail
from conftest import SHORT, change_file, metrics, run_jobs, run_or_fail
from marks import exhaustive, slow
from runs import check_user_error


@pytest.fixture(scope="module")
def files(tmp_path_factory, models):
    """A folder of files and folders, each with one thing wrong."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "empty.jsonl").touch()
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (folder / "columns.csv").write_text("title,body\na,b\n")
    (folder / "short.txt").write_text("too short")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    latin1 = [json.dumps({"text": "caf\xe9 " * 99}, ensure_ascii=False).encode("latin1")] * 9
    (folder / "latin1.jsonl").write_bytes(b"\n".join(latin1))
    (folder / "brackets[1]").mkdir()
    (folder / "brackets[1]/text.txt").write_text("text " * 999)
    shutil.copytree(models / "gpt2", folder / "small-embedding")
    change_file(folder / "small-embedding/config.json", '_size": 384', '_size": 100')
    (folder / "no-tokenizer").mkdir()
    shutil.copy(models / "gpt2/config.json", folder / "no-tokenizer")
    return folder


CASES = {
    "zero": ("--num-steps 0", "--num-steps 0: must be at least 1"),
    "nan": ("--lr nan", "--lr nan: must be at least 0"),
    "seed": (f"--seed {2**70}", f"--seed {2**70}: must be less than 2**63"),
    "change": ("--config nosuch=1", "tiny nosuch=1: key nosuch isn't in the original config"),
    "flag": ("--nosuch 1", "--nosuch 1: unknown argument; a later chapter may have it, see"),
    "too long": ("--seq-length 4096", "--seq-length 4096: tiny takes at most 2048 tokens"),
    "no cuda": ("--device cuda", "finds no working GPU"),
    "nothing pretrained": ("--pretrained", "--pretrained: tiny has no published weights"),
    "unknown model": ("-m nosuch/model", "--model-name nosuch/model:"),
    "no tokenizer": ("-m {files}/no-tokenizer", "found no tokenizer; check the model's files"),
    "small embedding": ("-m {files}/small-embedding", "token id 383, but only 100 embeddings"),
    "unknown data": ("-d nosuch/data", "--dataset-name nosuch/data:"),
    "missing file": ("-d nosuch.txt", "--dataset-name nosuch.txt: Unable to find"),
    "other file": ("-d {files}/picture.png", "picture.png: its format is unknown; known are .txt"),
    "encoding": ("-d {files}/latin1.jsonl", "latin1.jsonl: cannot tokenize it with the tokenizer"),
    "brackets": ("-d {files}/brackets[1]", "brackets[1]: rename the folder"),
    "empty": ("-d {files}/empty.jsonl", "empty.jsonl: the dataset is empty"),
    "malformed": ("-d {files}/broken.jsonl", "broken.jsonl: JSON parse error"),
    "no such column": ("-d {files}/columns.csv", "csv has the columns {'title': 'large_string', '"),
    "no sample": ("-d {files}/short.txt", "0 samples of 64 tokens are not more than"),
    "not writable": ("--save-dir /proc/nosuch", "--save-dir /proc/nosuch: "),
}


def test_mistake_costs_one_line_and_no_file(files, tmp_path):
    jobs = []
    for case, (arguments, _) in CASES.items():
        args = [*SHORT, "--save-dir", tmp_path, "-e", case]
        jobs.append(("01", [*args, *arguments.format(files=files).split()]))
    results = run_jobs(1, jobs, tmp_path / "jobs", shares=2)
    for (case, (_, expected)), [result] in zip(CASES.items(), results, strict=True):
        check_user_error(result, expected)
        assert list((tmp_path / case).glob("*")) == [], case


RESUMED = [
    ("--num-steps 2", "--num-steps 2: {tmp_path}/run has a checkpoint of step 4"),
    ("--seed 1", "seed was 0, is now 1"),
    ("-d {files}/other.txt", "dataset_fingerprint was "),
    ("-m {models}/gpt2", "model_name was tiny, is now {models}/gpt2"),
]


@pytest.mark.parametrize("chapter, ranks, other", [slow("01", 1, "04"), exhaustive("04", 2, "02")])
def test_resume_with_different_arguments_changes_nothing(
    files, models, small_text, tmp_path, chapter, ranks, other
):
    """The error names the value of the checkpoint and the value of the command.

    The checkpoints of the other chapter have a different format.
    """
    (files / "other.txt").write_text("other text " * 2000)
    args = [*SHORT, "-d", small_text, "--num-steps", 4, "--save-dir", tmp_path, "-e", "run"]
    run_or_fail(ranks, [(chapter, args)], tmp_path / "first")
    folders = {"files": files, "models": models, "tmp_path": tmp_path}
    jobs = [(chapter, [*args, *line.format(**folders).split()]) for line, _ in RESUMED]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    results = run_jobs(ranks, [*jobs, (other, args)], tmp_path / "jobs", shares=2 // ranks)
    unreadable = "", "no checkpoint in {tmp_path}/run/checkpoints can be read; delete the folder"
    for result, (_, expected) in zip(results, [*RESUMED, unreadable], strict=True):
        check_user_error(result[0], expected.format(**folders))
        assert {rank["status"] for rank in result} == {2}
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


@pytest.mark.parametrize(
    "chapter, arguments, expected",
    [
        slow("02", "-d {files}/latin1.jsonl", "latin1.jsonl: cannot tokenize it with the token"),
        ("02", "--global-batch-size 9", "--global-batch-size 9: not divisible by 2 data-parallel"),
        slow("04", "-e run[1]", "run[1]: choose --save-dir and --experiment-name without *, ? and"),
        exhaustive("06", "--tensor-parallel-size 2 -m {models}/gpt2", "--tensor-parallel-size 2:"),
    ],
)
def test_only_one_rank_reports_a_mistake(files, models, tmp_path, chapter, arguments, expected):
    """Rank 0 fails while rank 1 waits for it, or before the ranks know each other."""
    args = [*SHORT, *arguments.format(files=files, models=models).split()]
    check_two_ranks_fail(chapter, args, expected, tmp_path, tmp_path / "runs")


@pytest.mark.parametrize("chapter", [slow("01"), *map(exhaustive, ("02", "04", "05"))])
def test_full_disk_loses_no_checkpoint(small_disk, tmp_path, chapter):
    """The third save fails; when there is space, the run continues from the second save."""
    num_ranks = 1 if chapter == "01" else 2
    # Chapter 05 saves in the background, and learns of the failed save in its next save.
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
