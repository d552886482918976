"""Test that prepare.py and training on its pieces lose and repeat no document or sample."""

import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import random
import time
from argparse import Namespace
from itertools import chain

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from transformers import ByT5Tokenizer

import preparing
import recorded
from chats import write_rows
from conftest import (
    ROOT,
    SCRIPTS,
    SERVER,
    SHORT,
    SPLIT,
    change_file,
    run_command,
    start_ranks,
    user_error,
)
from preparing import TOOL
from runs import all_running, kill, last_logged_step, wait_for

LICENSE = (ROOT / "LICENSE").read_text()
# This is the end-of-text token of the tiny model. The token of a byte is the byte's value plus 3.
EOS = 1


def write_shards(folder, num_shards, num_documents, seed=0):
    """Write files with numbered documents of different lengths; return the documents."""
    folder.mkdir()
    choose, documents = random.Random(seed), []
    for shard in range(num_shards):
        rows = []
        for number in range(num_documents):
            first, length = choose.randrange(len(LICENSE) - 90), choose.randrange(90)
            rows.append(f"{shard}-{number} {LICENSE[first : first + length]}")
        write_rows(folder / f"{shard:02}.jsonl", [{"text": row} for row in rows])
        documents += rows
    return documents


def prepare(output, *words, part="0/1", status=0):
    """Run prepare.py for the part `part`, such as 1/3, with small pieces; return its messages."""
    return preparing.prepare(output, "--piece", 3000, "--part", part, *words, status=status)


def contents(folder):
    """Return the bytes of each piece by its number."""
    return {int(path.stem): path.read_bytes() for path in sorted(folder.glob("*.tokens"))}


def pieces(folder):
    """Return the tokens of each piece by its number."""
    return {number: np.frombuffer(data, np.uint16) for number, data in contents(folder).items()}


def documents_of(folder, parts=1):
    """Return the documents in the pieces; a document may continue in the next piece of its part."""
    found, texts = pieces(folder), []
    for part in range(parts):
        tokens = np.concatenate([found[number] for number in found if number % parts == part])
        *documents, unfinished = np.split(tokens, np.flatnonzero(tokens == EOS) + 1)
        assert len(unfinished) == 0
        texts += [bytes(int(token) - 3 for token in ids[:-1]).decode() for ids in documents]
    return texts


# ---- documents -------------------------------------------------------------------------------
def test_weights_mix_sources_by_tokens(tmp_path):
    large = set(write_shards(tmp_path / "large", 2, 400, seed=1))
    small = set(write_shards(tmp_path / "small", 1, 20, seed=2))
    sources = [f"{tmp_path}/large:75e-2", f"{tmp_path}/small:.25"]
    output = prepare(tmp_path / "o.tokens", *sources)
    texts = documents_of(tmp_path / "o.tokens")
    sizes = [sum(len(text) + 1 for text in texts if text in group) for group in (large, small)]
    assert abs(sizes[1] / sum(sizes) - 0.25) < 0.01
    assert large <= set(texts) and "small: " in output and " times" in output
    # A finished folder stays as it is if the same command is started again.
    before = contents(tmp_path / "o.tokens")
    prepare(tmp_path / "o.tokens", *sources)
    assert contents(tmp_path / "o.tokens") == before


def parquet_of(rows):
    """Return rows as the bytes of a parquet file."""
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file := io.BytesIO())
    return file.getvalue()


TEXTS = ["one", "two\nlines", ""]
ROWS = [{"text": text, "other": 1} for text in TEXTS]
LINES = [json.dumps(row).encode() + b"\n" for row in ROWS]
FILES = {
    "a.json": (json.dumps(ROWS).encode(), TEXTS),
    "b.jsonl": (b"".join(LINES), TEXTS),
    "c.parquet": (parquet_of(ROWS), TEXTS),
    "d.txt": (b"one\n\n\ntwo\nlines\n\nthree\n", ["one", "two\nlines", "three"]),
    # Each of the next three files joins several compressed files, one for each line.
    "e.jsonl.gz": (b"".join(map(gzip.compress, LINES)), TEXTS),
    "f.jsonl.xz": (b"".join(map(lzma.compress, LINES)), TEXTS),
    "g.jsonl.bz2": (b"".join(map(bz2.compress, LINES)), TEXTS),
    "h.txt.zst": (pyarrow.compress(b"one\n\ntwo", "zstd", asbytes=True), ["one", "two"]),
    "i.csv": (b'other,text\n1,one\n1,"two\nlines"\n1,\n', TEXTS),
    "j.tsv.gz": (gzip.compress(b'text\tother\none\t1\n"two\nlines"\t1\n\t1\n'), TEXTS),
    "l.csv": (b'text\r\nNA\r\nnull\r\nnan\r\nNone\r\n""\r\n', ["NA", "null", "nan", "None", ""]),
    # In a text, the letters </s> stay plain text, although the end-of-text token has the same
    # spelling.
    "n.txt": (b"<s>1 euro</s>", ["<s>1 euro</s>"]),
}
FILES["byte-order-mark.csv"] = (codecs.BOM_UTF8 + FILES["i.csv"][0], TEXTS)


@pytest.mark.parametrize("name", FILES)
def test_all_formats_have_the_same_documents(tmp_path, name):
    data, expected = FILES[name]
    (tmp_path / name).write_bytes(data)
    prepare(tmp_path / "o.tokens", tmp_path / name)
    assert sorted(documents_of(tmp_path / "o.tokens")) == sorted(expected)


BAD = {
    "empty.jsonl": (b"", "empty.jsonl: it has no documents"),
    "latin1.jsonl": ('{"text": "é"}\n'.encode("latin1"), "latin1.jsonl, line 1: Unicode"),
    "column.jsonl": (b'{"text": "a"}\n{"body": "b"}\n', "line 2: no column text; choose"),
    "null.parquet": (parquet_of([{"text": ""}, {"text": None}]), "line 2: column text holds None"),
    "half.jsonl": (b'{"text": "a"}\n{"text": "\\ud800"}\n', "half.jsonl, line 2: Unicode"),
    "commas.csv": (b"text\na, b\nc\n", "commas.csv, line 2: more or fewer fields than the header"),
    "header.csv": (b"a,b\n1,2\n", "line 2: no column text; choose --text-column from: a, b; "),
    "torn.jsonl": (b'{"text": "a"}\n{"text": "b', "torn.jsonl, line 2: JSONDecodeError"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_prints_one_line_and_leaves_no_piece(tmp_path, name):
    data, expected = BAD[name]
    (tmp_path / name).write_bytes(data)
    [line] = prepare(tmp_path / "o.tokens", tmp_path / name, status=2).splitlines()
    assert line.startswith("prepare.py: error: ") and expected in line
    assert line.endswith("; repair it, or pass --skip-bad to leave it out")
    assert {path.name for path in (tmp_path / "o.tokens").glob("*")} <= {"index.json"}


def test_skipping_counts_bad_documents(tmp_path):
    lines = b'{"text": "a"}\n{"text": 7}\nno JSON\n{"text": "\\ud800"}\n{"text": "b"}\n{}\n'
    (tmp_path / "some").mkdir()
    (tmp_path / "some/1.jsonl").write_bytes(lines)
    (tmp_path / "some/2.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 99)[:-9])
    (tmp_path / "some/3.csv").write_bytes(b'text\nc\nc, c\nd\n"e')
    output = prepare(tmp_path / "o.tokens", tmp_path / "some", "--skip-bad")
    assert "some/2.jsonl.gz: OSError" in output and "the rest of this shard is left out" in output
    assert "some/3.csv, line 5 or later: Error: unexpected end of data; the rest" in output
    found = set(documents_of(tmp_path / "o.tokens"))
    assert {"a", "b", "c", "d"} <= found <= {"a", "b", "c", "d", "x"}
    assert "7 bad documents left out" in output


# Each row has three lists of files in a folder: files that prepare.py must read, files that it must
# leave out with a message, and files that it must leave out silently.
FOLDERS = [
    (["a.TXT", "b/b.txt"], ["b/d.pdf"], [".git/a.txt", "README.md", "b/License.txt", "o.tokens/a"]),
    (["train_history.txt", "cooking.txt", "test_driving.txt"], [], []),
    (["test.txt", "dev.txt"], [], []),
    (["train.txt", "latest.txt"], ["test.txt", "Val.txt"], []),
    (["train-00000-of-00001.txt", "test-a.txt"], ["test-00000-of-00001.txt"], []),
    (["train/test-drive.txt", "en/training.txt"], ["en/Validation/a.txt"], []),
]


@pytest.mark.parametrize("read, left_out, skipped", FOLDERS)
def test_files_of_a_folder_are_read_or_left_out_by_name(tmp_path, read, left_out, skipped):
    for name in (*read, *left_out, *skipped):
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_text(name)
    output = prepare(tmp_path / "o.tokens", tmp_path / "d")
    assert sorted(documents_of(tmp_path / "o.tokens")) == sorted(read)
    count = f"left out {len(left_out)} of {len(read + left_out)} files"
    line = f"{count} (unknown format or held-out split): {', '.join(sorted(left_out))}\n"
    assert output.count("left out") == bool(left_out) and (not left_out or line in output)


def test_hub_text_is_read_by_paragraph(tmp_path, monkeypatch):
    def load_dataset(name, subset, split, streaming, sample_by="line"):
        assert (name, subset, split, streaming) == ("user/texts", "en", "train", True)
        texts = ["one", "two", "", "three"] if sample_by == "line" else ["one\ntwo", "three"]
        rows = [{"text": text} for text in texts]
        info = Namespace(builder_name="text")
        return Namespace(info=info, num_shards=1, shard=lambda num_shards, index: rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    prepare(tmp_path / "o.tokens", "user/texts/en")
    assert documents_of(tmp_path / "o.tokens") == ["one\ntwo", "three"]


def test_output_of_different_content_is_refused(tmp_path):
    source, output = tmp_path / "a.txt", tmp_path / "o.tokens"
    source.write_text("alpha")
    prepare(output, source)
    # Write a different text of the same size, and restore the modification time, as rsync may do.
    times = source.stat()
    source.write_text("omega")
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    [line] = prepare(output, source, status=2).splitlines()
    assert "o.tokens: shards was " in line and line.endswith("; choose a different --output")


WRONG = [
    (["--seed", "5", "text.txt"], "seed was 0, is now 5; choose a different --output"),
    (["nosuch"], "nosuch: no such file or folder"),
    (["--part", "3/3", "text.txt"], "3/3: must be K/N"),
    (["text.txt", "./text.txt"], "./text.txt: given twice; give each source once"),
    (["text.txt:0.5", "empty"], "empty: has no weight above 0; give each"),
    (["empty"], "empty: no file with documents; give .jsonl, .json, .txt"),
]


def test_wrong_arguments_print_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text(LICENSE)
    prepare(tmp_path / "o.tokens", "text.txt")
    for words, expected in WRONG:
        [line] = prepare(tmp_path / "o.tokens", *words, status=2).splitlines()
        assert expected in line


# ---- training --------------------------------------------------------------------------------
def samples_of(folder, length, num_held_out):
    """Return the training samples in a folder of pieces, in order, and the held-out samples.

    Leave out the last tokens of a piece if they do not fill a sample.
    """
    found = []
    for tokens in pieces(folder).values():
        rows = tokens[: len(tokens) // length * length].reshape(-1, length)
        found.append(list(map(tuple, rows.tolist())))
    first, *others = found
    return [*first[:-num_held_out], *chain(*others)], first[-num_held_out:]


# Each row has a number of shards, a number of parts, and the number of tokens in a piece.
GRID = [(1, 1, 3000), (6, 1, 1000), (20, 3, 1000), (2, 3, 500)]


@pytest.mark.parametrize("num_shards, parts, piece", GRID)
def test_each_sample_is_read_once_per_epoch(tmp_path, load, num_shards, parts, piece):
    """Check that the pieces have each document once, and that an epoch has each sample once."""
    documents = write_shards(tmp_path / "shards", num_shards, 360 // num_shards)
    output = tmp_path / "out.tokens"
    for part in range(parts):
        prepare(output, tmp_path / "shards", "--piece", piece, part=f"{part}/{parts}")
    texts, sizes = documents_of(output, parts), {n: len(ids) for n, ids in pieces(output).items()}
    assert sorted(texts) == sorted(documents)
    shards = {text.partition("-")[0] for text in texts[:40]}
    assert parts > 1 or len(shards) == num_shards, "shards are not mixed"
    last = [max(number for number in sizes if number % parts == part) for part in range(parts)]
    assert all(size == piece for number, size in sizes.items() if number not in last)
    args = Namespace(dataset_name=str(output), seq_length=64, eval_samples=5, seed=0)
    samples, held_out = load("01").build_data(args, ByT5Tokenizer())
    expected, expected_held_out = samples_of(output, 64, 5)
    assert list(map(tuple, held_out.tolist())) == expected_held_out
    rows = [tuple(samples[position].tolist()) for position in range(2 * len(expected))]
    first, second = rows[: len(expected)], rows[len(expected) :]
    assert sorted(first) == sorted(second) == sorted(expected) and first != second


@pytest.fixture
def started():
    """Return a list; when the test ends, kill the processes that the test has added to it."""
    processes = []
    yield processes
    for process in processes:
        process.kill()


# Each entry has a chapter and a number of ranks. The first entry starts the run; after each kill,
# the next entry resumes the run.
RESUMES = [("04", 2), ("08", 2), ("05", 1)]
# In a copy of a script, RECORD replaces RETURN, so that each rank records its samples and their
# positions in the stream.
RETURN = "    return batch.pin_memory()"
RECORD = f"""    with open(os.environ["RECORD"] + os.environ["RANK"] + ".jsonl", "a") as record:
        print(json.dumps([list(positions), batch.tolist()]), file=record)
{RETURN}"""
# A test shortens this pause, so that a script soon looks for a missing piece again.
PAUSE = 'is prepare.py running?", flush=True)\n            time.sleep(10)\n'


@pytest.mark.slow
def test_each_sample_is_trained_on_once_per_epoch_through_kills(tmp_path, started):
    """Kill prepare.py and a run at random moments; resume both, and change the run's layout.

    The pieces must have the same bytes as the pieces that three workers write without a kill.
    """
    documents = write_shards(tmp_path / "shards", 3, 34)
    output, run, record = tmp_path / "out.tokens", tmp_path / "run", tmp_path / "record"
    record.mkdir()
    # Let prepare.py pause before it writes each file, so that a kill may hit any part of its work.
    line = "def write(path, data):\n"
    tool = change_file(TOOL, line, f"{line}    time.sleep(0.2)\n", tmp_path / "prepare.py")
    words = ["--piece", 1500, tmp_path / "shards"]
    slowly = [tool, "-o", output, "--workers", 1, *words]
    num_tokens = sum(len(text) + 1 for text in documents)
    args = [*SHORT, "--seq-length", 32, "--checkpoint-every", 3, "--eval-every", 500]
    args += ["--num-steps", 2 * num_tokens // 32 // 8 + 1, "--save-dir", tmp_path, "-d", output]
    with open(tmp_path / "feeder.log", "w") as log:
        for attempt, (chapter, ranks) in enumerate(RESUMES):
            feeder = SERVER.start(slowly, {}, log)
            started.append(feeder)
            wait_for((output / "index.json").exists, [feeder])
            script = change_file(SCRIPTS[chapter], RETURN, RECORD, tmp_path / f"{chapter}.py")
            change_file(script, PAUSE, PAUSE.replace("10", "0.1"))
            command = [script, *args, "-e", "run", *SPLIT.get(chapter, [])]
            variables = {"RECORD": f"{record}/{attempt:03}."}
            processes = start_ranks(ranks, command, tmp_path, f"-{attempt}", **variables)
            started.extend(processes)
            if (chapter, ranks) == RESUMES[-1]:
                break
            after = last_logged_step(run) + random.randint(1, 6)
            wait_for(lambda: last_logged_step(run) >= after, processes, 300)  # noqa: B023
            time.sleep(random.uniform(0, 0.05))
            logs = "".join(path.read_text() for path in tmp_path.glob(f"rank*-{attempt}.log"))
            assert all_running(processes), logs
            kill([*processes, feeder])
        assert not any(process.wait(timeout=300) for process in processes), "a rank failed"
        assert feeder.wait(timeout=120) == 0, (tmp_path / "feeder.log").read_text()
    run_command(TOOL, "-o", tmp_path / "complete.tokens", "--workers", 3, *words, check=True)
    assert contents(output) == contents(tmp_path / "complete.tokens")
    expected, _ = samples_of(output, 32, 10)
    found = recorded.trained(record)
    for epoch in range(2):
        positions = range(epoch * len(expected), (epoch + 1) * len(expected))
        assert sorted(found[position] for position in positions) == sorted(expected)


@pytest.mark.slow
def test_ranks_wait_for_a_piece_without_a_collective_and_report_it(tmp_path, started):
    """Let ranks wait for a piece for longer than --dist-timeout; then supply the missing files."""
    write_shards(tmp_path / "shards", 3, 60)
    folder, hidden = tmp_path / "o.tokens", tmp_path / "hidden"
    prepare(folder, tmp_path / "shards")
    hidden.mkdir()
    kept = {"index.json", "000000.tokens"}
    missing = [path for path in folder.iterdir() if path.name not in kept]
    for path in missing:
        path.rename(hidden / path.name)
    # With this batch size, the first step that needs the missing piece needs it only for the second
    # of its two micro-batches.
    args = [*SHORT, "--num-steps", 8, "--batch-size", 2, "--eval-samples", 8, "--dist-timeout", 5]
    args += ["--save-dir", tmp_path, "-e", "run", "-d", folder]
    processes = start_ranks(2, [SCRIPTS["03"], *args], tmp_path)
    started.extend(processes)
    log, expected = tmp_path / "rank0.log", f"waiting for {folder}/000001.tokens; is prepare.py"
    assert wait_for(lambda: expected in log.read_text(), processes)
    time.sleep(8)
    assert all_running(processes), log.read_text()
    assert log.read_text().count("waiting for") == 1
    assert "waiting for" not in (tmp_path / "rank1.log").read_text()
    for path in missing:
        (hidden / path.name).rename(path)
    assert not any(process.wait(timeout=120) for process in processes), log.read_text()


def test_piece_that_appears_after_the_end_of_its_part_is_not_missed(tmp_path, load, monkeypatch):
    """Let a piece appear after the file that ends its part, as on a slow shared file system."""
    chapter, late = load("01"), tmp_path / "o.tokens/000003.tokens"
    write_shards(tmp_path / "shards", 3, 60)
    for part in ("0/2", "1/2"):
        prepare(tmp_path / "o.tokens", tmp_path / "shards", part=part)
    late.rename(tmp_path / "hidden")
    monkeypatch.setattr(chapter.time, "sleep", lambda _: (tmp_path / "hidden").rename(late))
    args = Namespace(dataset_name=str(tmp_path / "o.tokens"), seq_length=64)
    pieces = list(chapter.pieces_of(args, ByT5Tokenizer()))
    assert late.exists() and len(pieces) == len(contents(tmp_path / "o.tokens"))


def test_folder_of_a_different_tokenizer_is_refused(tmp_path, load, capsys):
    (tmp_path / "text.txt").write_text(LICENSE)
    prepare(tmp_path / "o.tokens", tmp_path / "text.txt")
    fingerprint = preparing.MODULE.fingerprint_of(ByT5Tokenizer())
    change_file(tmp_path / "o.tokens/index.json", fingerprint, "0" * 16)
    args = Namespace(dataset_name=str(tmp_path / "o.tokens"), seq_length=64)
    error = user_error(capsys, load("01").build_data, args, ByT5Tokenizer())
    assert "was prepared with a different tokenizer" in error
