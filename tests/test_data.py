"""Every sample comes once an epoch, on one rank, whatever stops and starts in between."""

import json
import random
import shutil
from argparse import Namespace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from conftest import SHORT, run_or_fail, user_error

GLOBAL_BATCH = 48
DEVICE = torch.device("cpu")


@pytest.fixture(scope="module")
def chapters(load):
    return {"01": load("01"), "02": load("02")}


@pytest.fixture
def ids_at(chapters, monkeypatch):
    """Return a function that gives the ids of a step's samples, in the order of the stream."""

    def ids_of(step, world_size, micro_batch_size=2, num_samples=103):
        script = chapters["01" if world_size is None else "02"]
        ranks = world_size or 1
        args = Namespace(seed=7, device="cpu", micro_batch_size=micro_batch_size)
        args.skip_steps, args.global_batch_size = 0, GLOBAL_BATCH
        args.accumulation = GLOBAL_BATCH // ranks // micro_batch_size
        ids = torch.arange(num_samples, dtype=torch.int32).view(-1, 1)
        samples = script.Samples(ids)
        monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
        drawn = []
        for micro_step in range(args.accumulation):
            parts = []
            for rank in range(ranks):
                monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
                parts.append(script.batch_at(args, samples, step, micro_step, DEVICE).flatten())
            drawn += torch.stack(parts, 1).flatten().tolist()  # the ranks take turns
        return drawn

    return ids_of


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
@pytest.mark.parametrize("ranks", [None, 1, 2, 4, 8])
def test_ranks_together_draw_the_seeded_permutations(chapters, ids_at, ranks, micro_batch_size):
    """The stream is the same for any number of ranks and split, across the ends of epochs too."""
    stream = [sample for step in range(1, 14) for sample in ids_at(step, ranks, micro_batch_size)]
    for epoch in range(3):  # an epoch is a permutation, and another one each time
        generator = torch.Generator().manual_seed(chapters["01"].mix(7, epoch))
        expected = torch.randperm(103, generator=generator).tolist()
        assert stream[epoch * 103 : (epoch + 1) * 103] == expected


@pytest.mark.parametrize("chapter", ["01", "02"])
def test_skipping_steps_reads_later_samples(chapters, monkeypatch, chapter):
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    script = chapters[chapter]
    samples = script.Samples(torch.arange(50, dtype=torch.int32).view(-1, 1))
    args = Namespace(seed=0, device="cpu", micro_batch_size=2, accumulation=2)
    args.global_batch_size, args.skip_steps = 4, 30
    found = script.batch_at(args, samples, 5, 1, DEVICE)
    args.skip_steps = 0
    assert torch.equal(found, script.batch_at(args, samples, 35, 1, DEVICE))


def test_resume_keeps_the_number_of_skipped_steps(chapters, capsys):
    compare = chapters["01"].compare_args
    args = Namespace(skip_steps=0)
    compare(args, {"skip_steps": 30}, "step-00000010")
    assert args.skip_steps == 30 and capsys.readouterr().out == ""
    args = Namespace(skip_steps=50)
    compare(args, {"skip_steps": 30}, "step-00000010")
    assert capsys.readouterr().out == "step-00000010: skip_steps was 30, is now 50\n"


def test_seeds_are_mixed_not_added(chapters):
    mix = chapters["01"].mix
    seeds = {mix(*numbers) for numbers in product(range(10), repeat=3)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**64 for seed in seeds)


def build(script, folder, rows, **changes):
    """Return the training and held-out samples of some texts."""
    name = folder / "data.jsonl"
    if not name.exists():
        name.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    from transformers import ByT5Tokenizer

    args = {"dataset_name": str(name), "dataset_subset": None, "text_column": "text"}
    args |= {"seq_length": 64, "eval_samples": 5} | changes
    samples, held_out = script.build_data(Namespace(**args), ByT5Tokenizer())
    return samples.pieces[0], held_out


def texts(count, seed=0):
    """Return documents of 0 to 400 characters."""
    draw = random.Random(seed)
    return ["".join(draw.choices("abcdefgh ", k=draw.randrange(400))) for _ in range(count)]


def test_samples_are_the_documents_joined_and_cut(chapters, tmp_path):
    """Only what does not fill a last sample is lost."""
    rows = texts(2350)
    train, held_out = build(chapters["01"], tmp_path, rows)
    stream = [byte + 3 if byte >= 0 else 1 for text in rows for byte in [*text.encode(), -1]]
    assert torch.cat([train, held_out]).flatten().tolist() == stream[: len(stream) // 64 * 64]
    assert len(held_out) == 5 and train.dtype == torch.int32


def test_another_length_needs_no_tokenizing(chapters, tmp_path, monkeypatch):
    """The tokens are one stream; samples are slices of it, and a second run writes nothing."""
    long, _ = build(chapters["01"], tmp_path, texts(200), seq_length=128)
    monkeypatch.setattr(chapters["01"], "array", None)  # with which tokens are written
    short, _ = build(chapters["01"], tmp_path, texts(200), seq_length=64)
    both = min(long.numel(), short.numel())
    assert torch.equal(long.flatten()[:both], short.flatten()[:both])


def test_missing_texts_are_empty_documents(chapters, tmp_path):
    rows = ["abc" * 200, None, "abc" * 200]
    train, _ = build(chapters["01"], tmp_path, rows, eval_samples=1)
    assert 1 in train


def test_ranks_share_what_rank_0_prepared(tmp_path, monkeypatch):
    """Processes whose hashes of strings differ still find the same file."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "data.txt").write_text("\n\n".join(texts(2100)))
    args = [*SHORT, "--num-steps", 1, "-d", tmp_path / "data.txt", "--save-dir", tmp_path]
    run_or_fail(2, [("02", args)], tmp_path / "ranks")
    assert len([path for path in (tmp_path / "hf").rglob("*.tokens*")]) == 1


def test_formats_give_the_same_samples(chapters, tmp_path):
    """All formats, compressed files, and text files in folders hold the same documents."""
    import gzip
    import lzma

    import datasets

    # A document of several lines shows whether lines are taken for documents.
    rows = [text.strip().replace(" ", "\n", 1) for text in texts(200) if text.strip()]
    table = datasets.Dataset.from_dict({"text": rows})
    table.to_csv(tmp_path / "a.csv")
    table.to_parquet(tmp_path / "a.parquet")
    table.to_json(tmp_path / "a.jsonl")
    table.to_json(tmp_path / "list.json", lines=False)
    table.to_csv(tmp_path / "a.tsv", sep="\t")
    shutil.copy(tmp_path / "a.jsonl", tmp_path / "B [1].JSONL")
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress((tmp_path / "a.jsonl").read_bytes()))
    for folder in ("folder", "nested/one/two", "compressed"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("a.txt", "folder/a.txt", "nested/one/two/a.txt"):
        (tmp_path / name).write_text("\n\n".join(rows))
    for name in ("a.txt", "a.jsonl", "a.csv"):
        with gzip.open(tmp_path / f"{name}.gz", "wb") as file:
            file.write((tmp_path / name).read_bytes())
    shutil.copy(tmp_path / "a.txt.gz", tmp_path / "compressed")
    names = ["a.csv", "a.parquet", "a.jsonl", "a.txt", "folder", "nested", "compressed"]
    names += ["a.txt.gz", "a.jsonl.gz", "a.csv.gz", "a.jsonl.xz", "a.tsv", "list.json"]
    names += ["B [1].JSONL", "[ab].jsonl", "card"]
    # A card, as on the hub, is not data.
    (tmp_path / "card").mkdir()
    (tmp_path / "card/README.md").write_text("---\nlicense: mit\n---\nText about the data.\n")
    shutil.copy(tmp_path / "a.jsonl", tmp_path / "card")
    prepared = {
        name: build(chapters["01"], tmp_path, [], dataset_name=str(tmp_path / name))[0]
        for name in names
    }
    expected = prepared.pop("a.parquet")
    for name, samples in prepared.items():
        assert torch.equal(samples, expected), name


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_while_tokenizing_does_not_grow_with_the_corpus(chapters, tmp_path, monkeypatch):
    """Sixteen MiB of tokens pass through, and the memory that is no file's stays."""
    write, seen = chapters["01"].array, []

    def watch(*args):
        status = Path("/proc/self/status").read_text()
        seen.append(int(status.split("RssAnon:")[1].split()[0]) / 1024)
        return write(*args)

    monkeypatch.setattr(chapters["01"], "array", watch)
    build(chapters["01"], tmp_path, texts(20_000))
    assert len(seen) == 20_000
    assert max(seen[4000:]) - seen[4000] < 4, (seen[4000], max(seen[4000:]))


@pytest.mark.parametrize(
    "lines", ["a, b\nc\n", "a\nb, c\nd\n", "a, b\nc, d\n", 'he said "hi", ok\n']
)
def test_a_csv_with_commas_in_its_texts_is_refused(chapters, tmp_path, capsys, lines):
    """By default, pandas takes the first fields of such lines for their names."""
    (tmp_path / "a.csv").write_text("text\n" + lines)
    options = {"dataset_name": str(tmp_path / "a.csv"), "eval_samples": 1, "seq_length": 2}
    error = user_error(capsys, lambda: build(chapters["01"], tmp_path, [], **options))
    assert f"--dataset-name {tmp_path}/a.csv: " in error
