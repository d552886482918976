"""Each sample comes once an epoch, on one rank, no matter how often the run stops and starts."""

import gzip
import json
import lzma
import random
import shutil
from argparse import Namespace
from itertools import product
from pathlib import Path

import datasets
import pytest
import torch
import torch.distributed as dist
from transformers import ByT5Tokenizer

from conftest import SHORT, run_or_fail, user_error

DEVICE = torch.device("cpu")


@pytest.fixture
def ids_at(load, monkeypatch):
    """Return a function that returns the ids of a step's samples, in the order of the stream."""

    def ids_at(name, step, ranks=1, micro_batch_size=2, pieces=(103,), skip_steps=0):
        script = load(name)
        args = Namespace(seed=7, device="cpu", skip_steps=skip_steps, global_batch_size=48)
        args.micro_batch_size, args.accumulation = micro_batch_size, 48 // ranks // micro_batch_size
        first, *further = (
            torch.arange(sum(pieces), dtype=torch.int32).view(-1, 1).split(list(pieces))
        )
        samples = script.Samples(first, further)
        monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
        ids = []
        for micro_step in range(args.accumulation):
            parts = []
            for rank in range(ranks):
                monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
                parts.append(script.batch_at(args, samples, step, micro_step, DEVICE).flatten())
            # The ranks take turns.
            ids += torch.stack(parts, 1).flatten().tolist()
        return ids

    return ids_at


LAYOUTS = [("01", 1), ("02", 1), ("02", 2), ("02", 4), ("02", 8)]


@pytest.mark.parametrize("pieces", [[103], [60, 43]], ids=["file", "pieces"])
@pytest.mark.parametrize("micro_batch_size", [1, 3])
@pytest.mark.parametrize("name, ranks", LAYOUTS)
def test_ranks_share_the_seeded_permutations(
    chapter, ids_at, name, ranks, micro_batch_size, pieces
):
    """The stream does not depend on the layout, and each visit to a piece has its own order."""
    stream, expected = [], []
    for step in range(1, 8):
        stream += ids_at(name, step, ranks, micro_batch_size, pieces)
    for visit in range(3 * len(pieces)):
        number = visit % len(pieces)
        generator = torch.Generator().manual_seed(chapter.mix(7, visit))
        order = torch.randperm(pieces[number], generator=generator)
        expected += (sum(pieces[:number]) + order).tolist()
    assert stream[: len(expected)] == expected and len(stream) >= len(expected)


@pytest.mark.parametrize("name", ["01", "02"])
def test_skipped_steps_shift_the_samples(ids_at, name):
    assert ids_at(name, 5, skip_steps=30) == ids_at(name, 35) != ids_at(name, 5)


def test_late_step_takes_two_permutations_at_most(chapter, ids_at):
    """The start of a resumed run does not take longer in later steps."""
    chapter.order_of.cache_clear()
    ids_at("01", 10**12)
    assert chapter.order_of.cache_info().misses <= 2


def test_resume_keeps_the_number_of_skipped_steps(chapter, capsys):
    for skip_steps, kept, output in ((0, 30, ""), (50, 50, "skip_steps was 30, is now 50")):
        args = Namespace(skip_steps=skip_steps)
        chapter.compare_args(args, {"skip_steps": 30}, "step-00000010")
        assert args.skip_steps == kept
        assert capsys.readouterr().out.strip().removeprefix("step-00000010: ") == output


def test_seeds_are_mixed_not_added(chapter):
    seeds = {chapter.mix(*numbers) for numbers in product(range(10), repeat=3)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**64 for seed in seeds)


def build(script, folder, rows, **changes):
    """Return the training and held-out samples of some texts."""
    path = folder / "data.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    args = {"dataset_name": str(path), "dataset_subset": None, "text_column": "text"}
    args |= {"seq_length": 64, "eval_samples": 5} | changes
    samples, held_out = script.build_data(Namespace(**args), ByT5Tokenizer())
    return samples.pieces[0], held_out


def make_texts(count):
    """Return documents of 0 to 400 characters."""
    source = random.Random(0)
    return ["".join(source.choices("abcdefgh ", k=source.randrange(400))) for _ in range(count)]


def test_samples_are_the_documents_joined_and_cut(chapter, tmp_path):
    """A missing text is an empty document. Only an incomplete last sample is left out."""
    rows = [*make_texts(2350), None, "text " * 40]
    train, held_out = build(chapter, tmp_path, rows)
    stream = [
        byte + 3 if byte >= 0 else 1 for text in rows for byte in [*(text or "").encode(), -1]
    ]
    assert torch.cat([train, held_out]).flatten().tolist() == stream[: len(stream) // 64 * 64]
    assert len(held_out) == 5 and train.dtype == torch.int32


@pytest.mark.slow
def test_ranks_find_the_tokens_of_rank_0(tmp_path, monkeypatch):
    """The processes hash strings differently, because a new environment gives each its own seed."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "data.txt").write_text("\n\n".join(make_texts(210)))
    args = [*SHORT, "--num-steps", 1, "-d", tmp_path / "data.txt", "--save-dir", tmp_path]
    run_or_fail(2, [("02", args)], tmp_path / "ranks")
    assert len([path for path in (tmp_path / "hf").rglob("*.tokens*")]) == 1


def test_formats_give_the_same_samples(chapter, tmp_path):
    """All formats, compressed files, and text files in folders hold the same documents."""
    # A document of several lines shows whether a reader takes lines for documents.
    rows = [text.strip().replace(" ", "\n", 1) for text in make_texts(200) if text.strip()]
    table = datasets.Dataset.from_dict({"text": rows})
    table.to_csv(tmp_path / "a.csv")
    table.to_parquet(tmp_path / "a.parquet")
    table.to_json(tmp_path / "a.jsonl")
    table.to_json(tmp_path / "list.json", lines=False)
    table.to_csv(tmp_path / "a.tsv", sep="\t")
    (tmp_path / "a.txt").write_text("\n\n".join(rows))
    for name in ("a.txt", "a.jsonl", "a.csv"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress((tmp_path / "a.jsonl").read_bytes()))
    # A card, as on the hub, is not data.
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nText about the data.\n")
    copies = {"a.jsonl": ["B [1].JSONL", "card/a.jsonl"], "README.md": ["card/README.md"]}
    copies |= {"a.txt": ["folder/a.txt", "nested/one/two/a.txt"], "a.txt.gz": ["packed/a.txt.gz"]}
    for source, path in [(name, path) for name in copies for path in copies[name]]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / source, tmp_path / path)
    names = ["a.csv", "a.jsonl", "a.txt", "folder", "nested", "packed", "a.txt.gz", "a.jsonl.gz"]
    names += ["a.csv.gz", "a.jsonl.xz", "a.tsv", "list.json", "B [1].JSONL", "[ab].jsonl", "card"]
    expected, _ = build(chapter, tmp_path, [], dataset_name=str(tmp_path / "a.parquet"))
    for name in names:
        samples, _ = build(chapter, tmp_path, [], dataset_name=str(tmp_path / name))
        assert torch.equal(samples, expected), name


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_tokenizing_takes_the_same_memory_for_any_corpus(chapter, tmp_path, monkeypatch):
    """Ten MB of tokens pass through, and the memory that belongs to no file stays."""
    array, sizes = chapter.array, []

    def measure(*args):
        status = Path("/proc/self/status").read_text()
        sizes.append(int(status.split("RssAnon:")[1].split()[0]) / 1024)
        return array(*args)

    monkeypatch.setattr(chapter, "array", measure)
    build(chapter, tmp_path, make_texts(12_000))
    assert len(sizes) == 12_000
    assert max(sizes[4000:]) - sizes[4000] < 4, (sizes[4000], max(sizes[4000:]))


@pytest.mark.parametrize("lines", ["a, b\nc\n", 'he said "hi", ok\n'])
def test_csv_with_commas_in_its_texts_is_rejected(chapter, tmp_path, capsys, lines):
    """By default, pandas would take the first fields of these lines for their names."""
    path = tmp_path / "a.csv"
    path.write_text("text\n" + lines)
    options = {"dataset_name": str(path), "eval_samples": 1, "seq_length": 2}
    error = user_error(capsys, lambda: build(chapter, tmp_path, [], **options))
    assert f"--dataset-name {path}: " in error
