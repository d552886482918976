"""Shards read while training: the same samples on any number of ranks, and after any stop."""

import gzip
import json
import os
import random
import time
from argparse import Namespace
from collections import Counter
from itertools import cycle, islice
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset, load_dataset

import conftest
from conftest import SCRIPTS, SHORT, difference, metrics, run_or_fail, user_error
from runs import last_logged_step, newest_step, wait_for

LANES, SHARDS, BLOCK = 4, 10, 8  # the last in records
LINE = len(json.dumps({"url": "", "text": "1000"})) + 1
LOSSES = ["loss", "val_loss"]
SIZES = [60 - 5 * shard for shard in range(SHARDS)]  # records; some shards end in half a block


def bytes_read():
    return int(Path("/proc/self/io").read_text().split()[1])


def words(text, **_):
    """Tokenize a text that begins with a number, which becomes up to seven equal tokens."""
    return {"input_ids": [int(text[:4])] * (1 + int(text[:4]) % 7)}


words.eos_token_id = 0


def write(path, texts):
    """Write a shard of the kind that its name says."""
    if path.suffix == ".parquet":
        Dataset.from_dict({"text": texts}).to_parquet(path, batch_size=BLOCK)
        return
    lines = "".join(json.dumps({"url": "", "text": text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)


def fill(folder, kind):
    """Write shards; shard n has the records 1000 + 100 n, 1001 + 100 n and so on."""
    for shard, size in enumerate(SIZES):
        write(folder / f"{shard}.{kind}", [str(1000 + 100 * shard + n) for n in range(size)])


@pytest.fixture(params=["json.gz", "jsonl", "parquet"])
def folder(request, tmp_path):
    fill(tmp_path, request.param)
    return tmp_path


@pytest.fixture
def stream(load, monkeypatch):
    """Return a function that makes what one rank of several reads from a folder."""
    script = load("streaming")
    monkeypatch.setattr(script.time, "sleep", Mock())
    monkeypatch.setenv("RANK", "0")

    def make(folder, rank=0, ranks=1, **changes):
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
        args = {"dataset_name": str(folder), "dataset_subset": None, "text_column": "text"}
        args |= {"lanes": LANES, "shuffle_block": BLOCK * LINE - 1, "seed": 7, "seq_length": 16}
        args |= {"eval_samples": 2, "skip_bad_shards": False, "device": "cpu"}
        args |= {"micro_batch_size": 6, "accumulation": 4 // ranks}
        made = script.Stream(Namespace(**args | changes), words)
        return made, made.hold_out()

    make.script = script
    return make


def epochs(made):
    """Return the records of all lanes in the first two epochs."""
    seen = [Counter(), Counter()]
    for lane in range(made.args.lanes):
        turns = len(range(lane, len(made.shards), made.args.lanes))
        for (shard, *_), texts in made.blocks_of(lane, 0, 0, 0):
            if shard >= 2 * turns:
                break
            seen[shard // turns].update(map(int, texts))
    return seen


def test_an_epoch_has_every_record_once(folder, stream):
    """But the first block, of which the held-out samples are, in no epoch."""
    made, held_out = stream(folder)
    first, second = epochs(made)
    assert first == second and set(first.values()) == {1}
    missing = {1000 + 100 * n + i for n, size in enumerate(SIZES) for i in range(size)} - {*first}
    assert len(missing) == BLOCK and set(held_out.flatten().tolist()) <= {0, *missing}


def test_samples_are_the_records_joined_and_cut(folder, stream):
    """Shuffled in blocks, in another order in each epoch, and across the epochs' ends."""
    made, _ = stream(folder)
    tokens = torch.cat([sample for sample, _ in islice(made.samples_of(1, [0] * 5), 100)]).tolist()
    expected, orders = [], set()
    for at, texts in islice(made.blocks_of(1, 0, 0, 0), 40):
        generator = torch.Generator().manual_seed(stream.script.mix(7, 1, *at[:2]))
        order = torch.randperm(len(texts), generator=generator).tolist()
        orders.add(tuple(order))
        expected += [n for i in order for n in [*words(texts[i])["input_ids"], 0]]
    number = min(len(tokens), len(expected))
    assert number > 1000 and tokens[:number] == expected[:number] and len(orders) > 30


def test_any_position_continues_its_lane(folder, stream):
    made, _ = stream(folder)
    whole = list(islice(made.samples_of(0, [0] * 5), 121))
    for number, (_, position) in enumerate(whole[:-1]):
        sample, end = next(made.samples_of(0, position))
        assert torch.equal(sample, whole[number + 1][0]) and end == whole[number + 1][1]


def test_ranks_read_one_stream(folder, stream):
    """From where any number of ranks stopped after a step, on any number."""

    def read(rank, ranks, step, number, positions=None):
        made, _ = stream(folder, rank, ranks)
        made.positions = {lane: (positions or made.positions)[lane] for lane in made.positions}
        return torch.cat(list(islice(made.read_ahead(step), number))), made.positions

    one, _ = read(0, 1, 0, 12)  # three steps of 24 samples
    for before, after in [(1, 1), (2, 4), (4, 2), (4, 1), (1, 2)]:
        first = [read(rank, before, 0, 4 // before) for rank in range(before)]
        positions = {lane: at for _, some in first for lane, at in some.items()}
        rest = [read(rank, after, 1, 8 // after, positions) for rank in range(after)]
        again = [torch.stack([ids for ids, _ in some], 1).flatten(0, 1) for some in (first, rest)]
        assert torch.equal(torch.cat(again), one)


@pytest.mark.parametrize("kind, share", [("jsonl", 2), ("parquet", 2), ("json.gz", 101)])
def test_a_resume_reads_a_block_again(kind, share, stream, tmp_path):
    """Of a hundred: and of .gz all that is before it."""
    texts = [f"1234{random.randbytes(10_000).hex()}" for _ in range(100 * BLOCK)]
    write(tmp_path / f"0.{kind}", texts)
    size = BLOCK * (LINE + 20_000)
    made, _ = stream(tmp_path, lanes=1, shuffle_block=size - 1)
    before = bytes_read()
    next(made.samples_of(0, [0, 70 if kind == "parquet" else 70 * size, 0, 3, 1]))
    blocks = (bytes_read() - before) / (tmp_path / f"0.{kind}").stat().st_size * 100
    assert share * 0.5 < blocks < share


DAMAGES = {  # the kind of shard, what befalls it, and what is said
    "truncated": ("json.gz", lambda data: data[:100], "EOFError"),
    "corrupt": ("json.gz", lambda data: data[:100] + bytes(50) + data[150:], "rror"),
    "half a line": ("jsonl", lambda data: data[:701], "JSONDecodeError"),
    "no footer": ("parquet", lambda data: data[:100], "ArrowInvalid"),
    "another column": ("jsonl", lambda data: data.replace(b'"text"', b'"body"'), "KeyError"),
    "gone": ("jsonl", None, "FileNotFoundError"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_shard_is_named_or_skipped(damage, stream, tmp_path, capsys):
    """After three more tries; what was read before the damage counts."""
    kind, spoil, told = DAMAGES[damage]
    fill(tmp_path, kind)
    made, _ = stream(tmp_path)
    bad = tmp_path / f"2.{kind}"
    bad.write_bytes(spoil(bad.read_bytes())) if spoil else bad.unlink()
    said = user_error(capsys, epochs, made)
    assert f"train_llm.py: error: cannot read column text of {bad}, from " in said and told in said
    waits = [call.args[0] for call in stream.script.time.sleep.mock_calls]
    assert waits == ([] if damage == "another column" else [1, 4, 16])

    made.args.skip_bad_shards = True
    first, second = epochs(made)
    assert first == second and set(first.values()) == {1}
    assert sum(n // 100 != 12 for n in first) == sum(SIZES) - SIZES[2] - BLOCK
    assert capsys.readouterr().err.count(f"skipped column text of {bad}, from ") >= 2
    ends = [list(islice(made.samples_of(lane, [0] * 5), 300))[-1][1] for lane in range(LANES)]
    assert sum(skipped for _, _, skipped, *_ in ends) >= 1


def test_what_fails_once_is_read_again(folder, stream, monkeypatch):
    """From the block on in which it failed, however many do: no record is lost or comes twice."""
    made, _ = stream(folder)
    whole, read, failed = epochs(made), stream.script.blocks_in, set()

    def read_or_fail(args, shard, place):
        for number, block in enumerate(read(args, shard, place)):
            if number == 1 and (shard, place) not in failed:
                failed.add((shard, place))
                raise ConnectionError("reset by peer")
            yield block

    monkeypatch.setattr(stream.script, "blocks_in", read_or_fail)
    assert epochs(made) == whole and max(Counter(shard for shard, _ in failed).values()) > 4


def test_what_a_shuffle_buffer_forgets_was_counted(tmp_path):
    """The README's numbers, of `datasets` with a buffer."""
    for shard in range(8):
        write(tmp_path / f"{shard}.jsonl", [str(10_000 * shard + n) for n in range(5000)])

    def read(state=None):
        made = load_dataset(str(tmp_path), split="train", streaming=True)
        made = made.shuffle(seed=0, buffer_size=1000)
        if state:
            made.load_state_dict(state)
        for row in made:
            yield row["text"], made

    whole, first = [text for text, _ in islice(read(), 3000)], list(islice(read(), 1500))
    *_, (_, stopped) = first
    second = {text for text, _ in islice(read(stopped.state_dict()), 1500)}
    lost, again = set(whole[1500:]) - second, set(whole[:1500]) & second
    page = SCRIPTS["streaming"].with_name("README.md").read_text()
    told = f"of the next 1,500 records {len(lost)} were missing, and {len(again)} were repeated"
    assert told in page


REFUSED = {
    "ranks": ({"lanes": 3, "ranks": 2}, "--lanes 3: not divisible by 2 data-parallel ranks"),
    "shards": ({"lanes": 12}, "--lanes 12: 11 shards are too few"),
    "column": ({"text_column": "body"}, "cannot read column body of "),
    "held out": ({"eval_samples": 99}, "--eval-samples 99: the first block has fewer"),
    "no data": ({"folder": "nosuch"}, "nosuch: "),
    "nothing left": ({"folder": "one", "lanes": 1}, "--lanes 1: lane 0 has no training data"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_is_an_error_at_the_start(case, stream, tmp_path, capsys):
    changes, told = REFUSED[case]
    fill(tmp_path, "jsonl")
    (tmp_path / "one").mkdir()
    write(tmp_path / "one/0.jsonl", ["1000"] * BLOCK)
    changes = changes | {"folder": tmp_path / changes.get("folder", "")}
    assert told in user_error(capsys, lambda: next(stream(**changes)[0].read_ahead(0)))


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Training on the documentation of Python, a paragraph a record, in eight shards."""
    folder = tmp_path_factory.mktemp("shards")
    conftest.run_command(SCRIPTS["streaming"].with_name("shards.py"), folder, check=True)
    return [*SHORT, "-d", folder, "--stream", "--shuffle-block", 4000]


@pytest.mark.slow
def test_one_curve(command, tmp_path):
    """On 1, 2 and 4 ranks; nothing is prepared. Without --stream, the curve is chapter 04's."""
    before = set(Path(os.environ["HF_HOME"]).rglob("*"))
    runs = {ranks: {f"on-{ranks}": ("streaming", command)} for ranks in (1, 2, 4)}
    curves = conftest.curves_of(tmp_path, runs)
    new = set(Path(os.environ["HF_HOME"]).rglob("*")) - before
    assert not any(path.stat().st_size for path in new if path.is_file())
    for ranks in ("on-2", "on-4"):
        assert difference(curves["on-1"], curves[ranks], names=LOSSES) < 1e-5
        assert difference(curves["on-1"], curves[ranks], names=["grad_norm"], relative=True) < 1e-4
    assert curves["on-1"][20]["loss"] < curves["on-1"][1]["loss"] - 1
    runs = {2: {name: (name, []) for name in ("04", "streaming")}}
    curves = conftest.curves_of(tmp_path / "plain", runs)
    assert difference(curves["04"], curves["streaming"]) == 0.0


FEW = pytest.param(3, 30, marks=pytest.mark.slow)
MANY = pytest.param(20, 200, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("times, steps", [FEW, MANY])
def test_killed(times, steps, command, tmp_path):
    """Each time on another number of ranks, and then compared with a run that never stopped."""
    draw, run_dir = random.Random(), tmp_path / "killed"
    args = [*command, "--checkpoint-every", 3, "--num-steps", steps, "--save-dir", tmp_path, "-e"]
    for ranks in islice(cycle([2, 4, 1]), times):
        after, line = newest_step(run_dir) + draw.randint(2, 9), [SCRIPTS["streaming"], *args]
        port = str(conftest.free_port())
        processes = conftest.start_ranks(ranks, [*line, "killed"], tmp_path, MASTER_PORT=port)
        running = wait_for(lambda: last_logged_step(run_dir) >= after, processes)  # noqa: B023
        assert running, (tmp_path / "rank0.log").read_text()
        time.sleep(draw.uniform(0, 0.05))
        for process in processes:
            process.kill()
            process.wait(timeout=20)
    run_or_fail(
        1, [("streaming", [*args, name]) for name in ("killed", "whole")], tmp_path / "jobs"
    )
    assert difference(metrics(tmp_path / "whole"), metrics(run_dir), names=LOSSES) < 1e-5


@pytest.mark.exhaustive
def test_memory_stays_flat_over_a_gigabyte(stream, tmp_path):
    for shard in range(8):
        write(tmp_path / f"{shard}.jsonl", [str(n) * 450 for n in range(1000, 1800)] * 90)
    made, _ = stream(tmp_path, lanes=8, shuffle_block=2_000_000)
    seen, number = [], 8 * 72_000 * 5 // 16 // 6  # all 1.05 GB, in micro-batches
    for _ in islice(made.read_ahead(0), 0, number, number // 100):
        status = Path("/proc/self/status").read_text()
        seen.append(int(status.split("RssAnon:")[1].split()[0]) / 1024)
    assert max(seen) - max(seen[:10]) < 20, seen


@pytest.mark.exhaustive
def test_a_step_hardly_waits_for_data(command, tmp_path):
    args = [*command, "--seq-length", 256, "--num-steps", 40, "--log-every", 10]
    run_or_fail(1, [("streaming", [*args, "--save-dir", tmp_path, "-e", "run"])], tmp_path / "jobs")
    rows = metrics(tmp_path / "run")
    waited = rows[40]["data_wait"] - rows[10]["data_wait"]
    took = sum(10 * 8 * 256 / rows[step]["tokens_per_second"] for step in (20, 30, 40))
    assert waited / took < 0.02, (waited, took)
