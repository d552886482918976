"""Whatever the user gets wrong: one line that names the value, exit status 2, nothing written."""

import json
import shutil
import subprocess

import pytest
import tokenizers
import transformers

from conftest import SCRIPTS, SHORT, metrics, run_command, run_jobs, run_or_fail, torchrun
from runs import check_user_error


@pytest.fixture(scope="module")
def files(tmp_path_factory, models):
    """Files and folders with one thing wrong in each."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "empty.jsonl").touch()
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (folder / "numbers.jsonl").write_text('{"text": 1}\n{"text": 2}\n')
    (folder / "columns.csv").write_text("title,body\na,b\n")
    (folder / "short.txt").write_text("too short")
    (folder / "few.txt").write_text("x" * 64 * 10)
    (folder / "picture.png").write_bytes(b"\x89PNG")
    latin1 = [json.dumps({"text": "caf\xe9 " * 99}, ensure_ascii=False).encode("latin1")] * 9
    (folder / "latin1.jsonl").write_bytes(b"\n".join(latin1))
    (folder / "latin1.txt").write_bytes(b"caf\xe9 " * 999)
    (folder / "brackets[1]").mkdir()
    (folder / "brackets[1]/text.txt").write_text("text " * 999)
    (folder / "folder-without-data").mkdir()
    (folder / "bad.args").write_text("--num-steps 5 # fine\n--nosuch 1\n")
    shutil.copytree(models / "gpt2", folder / "small-embedding")
    config = json.loads((folder / "small-embedding/config.json").read_text())
    (folder / "small-embedding/config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    (folder / "no-tokenizer").mkdir()
    shutil.copy(models / "gpt2/config.json", folder / "no-tokenizer")
    shutil.copytree(models / "gpt2", folder / "t5")
    transformers.T5Config(num_layers=1, d_model=16, vocab_size=384).save_pretrained(folder / "t5")
    few_words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "of": 1, "</s>": 2}))
    few_words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    few_words = transformers.PreTrainedTokenizerFast(tokenizer_object=few_words, eos_token="</s>")
    few_words.save_pretrained(folder / "few-words")
    shutil.copy(models / "gpt2/config.json", folder / "few-words")
    shutil.copytree(folder / "few-words", folder / "high-id")
    path = folder / "high-id/tokenizer.json"
    path.write_text(path.read_text().replace('"of": 1', '"of": 1000'))
    return folder


CASES = {
    "zero": ("--num-steps 0", "--num-steps 0: must be at least 1"),
    "nan": ("--lr nan", "--lr nan: must be at least 0"),
    "length": ("--seq-length 1", "--seq-length 1: must be at least 2"),
    "seed": (f"--seed {2**70}", f"--seed {2**70}: must be less than 2**63"),
    "change": ("--config nosuch=1", "tiny nosuch=1: key nosuch isn't in the original config"),
    "changed type": ("--config num_hidden_layers=x", "num_hidden_layers=x: invalid literal for"),
    "no change": ("--config hidden_size", "--model-name tiny hidden_size: "),
    "flag": ("--nosuch 1", "unrecognized arguments: --nosuch 1"),
    "abbreviation": ("--num 1", "unrecognized arguments: --num 1"),
    "arguments file": ("@nosuch.args", "'nosuch.args'"),
    "flag in a file": ("@{files}/bad.args", "unrecognized arguments: --nosuch 1"),
    "too long": ("--seq-length 4096", "--seq-length 4096: tiny takes at most 2048 tokens"),
    "no cuda": ("--device cuda", "finds no working GPU"),
    "nothing pretrained": ("--pretrained", "--pretrained: tiny has no published weights"),
    "unknown model": ("-m nosuch/model", "--model-name nosuch/model:"),
    "no model there": ("-m {files}/folder-without-data", "folder-without-data:"),
    "no tokenizer": ("-m {files}/no-tokenizer", "found no tokenizer; check the model's files"),
    "small embedding": ("-m {files}/small-embedding", "token id 383, but only 100 embeddings"),
    "high id": ("-m {files}/high-id", "found token id 1000, but only 384 embeddings"),
    "unknown words": ("-m {files}/few-words", "pydoc: cannot tokenize it with the tokenizer of"),
    "encoder-decoder": ("-m {files}/t5", "t5: cannot build the model: ValueError"),
    "unknown data": ("-d nosuch/data", "--dataset-name nosuch/data:"),
    "missing file": ("-d nosuch.txt", "--dataset-name nosuch.txt: Unable to find"),
    "other file": ("-d {files}/picture.png", "picture.png: its format is unknown; known are .txt"),
    "encoding": ("-d {files}/latin1.jsonl", "latin1.jsonl: cannot tokenize it with the tokenizer"),
    "encoding of text": ("-d {files}/latin1.txt", "latin1.txt: 'utf-8' codec can't decode byte"),
    "brackets": ("-d {files}/brackets[1]", "brackets[1]: rename the folder"),
    "folder without data": ("-d {files}/folder-without-data", "folder-without-data:"),
    "empty": ("-d {files}/empty.jsonl", "empty.jsonl: the dataset is empty"),
    "malformed": ("-d {files}/broken.jsonl", "broken.jsonl: JSON parse error"),
    "numbers": ("-d {files}/numbers.jsonl", "--text-column text: not a text column"),
    "no such column": ("-d {files}/columns.csv", "csv has the columns {'title': 'large_string', '"),
    "no such column of pydoc": ("--text-column body", "text column; pydoc has the columns {'text'"),
    "no sample": ("-d {files}/short.txt", "0 samples of 64 tokens are not more than"),
    "too few samples": ("-d {files}/few.txt", "10 samples of 64 tokens are not more than"),
    "not a folder": ("--save-dir {files}/short.txt", "short.txt"),
    "not writable": ("--save-dir /proc/nosuch", "--save-dir /proc/nosuch: "),
}


@pytest.fixture(scope="module")
def results(files, tmp_path_factory):
    """What chapter 01 says in each case, from one process."""
    root = tmp_path_factory.mktemp("bad")
    jobs = []
    for number, (arguments, _) in enumerate(CASES.values()):
        args = [*SHORT, "--save-dir", root / "runs", "-e", str(number)]
        jobs.append(("01", [*args, *arguments.format(files=files).split()]))
    return dict(zip(CASES, run_jobs(1, jobs, root / "jobs", shares=2), strict=True)), root / "runs"


@pytest.mark.parametrize("case", CASES)
def test_one_line_says_what_is_wrong(results, case):
    check_user_error(results[0][case][0], CASES[case][1])


def test_nothing_is_written(results):
    runs = {name: list((results[1] / str(n)).rglob("*")) for n, name in enumerate(CASES)}
    assert {name: found for name, found in runs.items() if found} == {}


RESUMED = {
    "fewer steps": ("--num-steps 10", "--num-steps 10: {tmp_path}/run has a checkpoint of step 20"),
    "seed": ("--seed 1", "seed was 0, is now 1"),
    "sequence length": ("--seq-length 32", "seq_length was 64, is now 32"),
    "global batch": ("--global-batch-size 4", "global_batch_size was 8, is now 4"),
    "data": ("-d {files}/other.txt", "dataset_fingerprint was "),
    "size": ("--config num_hidden_layers=2", "config was [], is now ['num_hidden_layers=2']"),
    "model": ("-m {models}/gpt2", "model_name was tiny, is now {models}/gpt2"),
}


def test_a_checkpoint_is_not_continued_as_another_run(files, models, tmp_path):
    """Both values are named, and the run that is there stays as it is."""
    (files / "other.txt").write_text("other text " * 2000)
    args = [*SHORT, "--save-dir", tmp_path, "-e", "run"]
    places = {"files": files, "models": models, "tmp_path": tmp_path}
    jobs = [("01", args)]
    jobs += [("01", [*args, *line.format(**places).split()]) for line, _ in RESUMED.values()]
    first, *others = run_jobs(1, jobs, tmp_path / "jobs")
    assert first[0]["status"] == 0, first
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    for [result], (_, expected) in zip(others, RESUMED.values(), strict=True):
        check_user_error(result, expected.format(**places))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("--global-batch-size 9", "--global-batch-size 9: not divisible by 2 data-parallel ranks"),
        ("-d nosuch.txt", "--dataset-name nosuch.txt: Unable to find"),
        ("-d {files}/latin1.jsonl", "latin1.jsonl: cannot tokenize it with the tokenizer of tiny"),
    ],
)
def test_under_torchrun_one_rank_says_it(files, tmp_path, arguments, expected):
    """One of them fails before the ranks know each other, one while a rank waits for the other."""
    arguments = arguments.format(files=files).split()
    process = torchrun("02", *SHORT, "--save-dir", tmp_path / "runs", *arguments)
    _, stderr = process.communicate(timeout=120)
    ours = [line for line in stderr.splitlines() if line.startswith("train_llm.py: error:")]
    assert len(ours) == 1 and expected in ours[0], stderr
    assert process.returncode == 1  # torchrun's own
    assert "exitcode  : 2" in stderr
    assert 'train_llm.py", line' not in stderr  # no traceback of ours
    assert not [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]


def test_without_torchrun_chapter_02_says_how_to_start_it():
    done = run_command(SCRIPTS["02"])
    check_user_error(
        {"status": done.returncode, "stderr": done.stderr}, "this script needs torchrun: torchrun"
    )


@pytest.mark.parametrize(
    "chapter", ["01", *(pytest.param(name, marks=pytest.mark.slow) for name in ("02", "04", "05"))]
)
def test_full_disk_during_a_save(small_disk, tmp_path, chapter):
    """Nothing that was saved is lost, and when there is room the run goes on from there."""
    world_size = 1 if chapter == "01" else 2
    steps = 40 if chapter == "05" else 30  # in the background: it learns of it at its next save
    args = [*SHORT, "--num-steps", steps, "--save-dir", small_disk, "-e", "run"]
    args += ["--checkpoint-async"] * (chapter == "05")
    [ranks] = run_jobs(world_size, [(chapter, args)], tmp_path / "full")
    assert all(rank["status"] for rank in ranks)
    checkpoints = small_disk / "run/checkpoints"
    names = sorted(folder.name for folder in checkpoints.iterdir())
    assert names == [".partial", "step-00000010", "step-00000020"]

    subprocess.run(["mount", "-o", "remount,size=80m", str(small_disk)], check=True)
    [ranks] = run_or_fail(world_size, [(chapter, args)], tmp_path / "again")
    assert f"continuing from {checkpoints}/step-00000020" in ranks[0]["stdout"]
    assert sorted(metrics(small_disk / "run")) == list(range(steps + 1))
