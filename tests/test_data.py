"""Every sample comes once an epoch, on one rank, whatever stops and starts in between."""

import json
import random
from argparse import Namespace
from itertools import islice
from pathlib import Path

import pytest
import torch

from conftest import SHORT, run_well


@pytest.fixture(scope="module")
def chapters(load):
    return {"01": load("01"), "02": load("02")}


def ids_of(chapters, world_size, position, count, num_samples=103, seed=7):
    """Return the ids that `world_size` ranks draw from `position` on, `count` in all."""
    if world_size is None:
        sampler = chapters["01"].ResumableSampler(num_samples, seed, position)
        return list(islice(sampler, count))
    ranks = [
        chapters["02"].ResumableSampler(num_samples, seed, position, rank, world_size)
        for rank in range(world_size)
    ]
    assert count % world_size == 0
    drawn = [list(islice(rank, count // world_size)) for rank in ranks]
    return [sample for turn in zip(*drawn, strict=True) for sample in turn]


@pytest.mark.parametrize("world_size", [None, 1, 2, 3, 4, 8])
def test_ranks_together_draw_the_seeded_permutations(chapters, world_size):
    """The stream is the same for any number of ranks, across the ends of epochs too."""
    stream = ids_of(chapters, None, 0, 3 * 103)
    assert ids_of(chapters, world_size, 0, 288) == stream[:288]
    for epoch in range(3):  # an epoch is a permutation, and a different one each time
        assert sorted(stream[epoch * 103 : (epoch + 1) * 103]) == list(range(103))
    assert stream[:103] != stream[103:206] != stream[206:]


def test_permutation_is_torchs_and_a_tensor(chapters, monkeypatch):
    """No list of all ids is ever made: at 100 million samples it would take gigabytes."""
    longest = []
    split = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: longest.append(len(t)) or split(t))
    drawn = list(islice(chapters["01"].ResumableSampler(5000, 0, 0), 5000))
    generator = torch.Generator().manual_seed(chapters["01"].mix(0, 0))
    monkeypatch.undo()
    assert drawn == torch.randperm(5000, generator=generator).tolist()
    assert max(longest) <= 1024


@pytest.mark.parametrize("other_world_size", [None, 1, 2, 4])
def test_resume_neither_skips_nor_repeats(chapters, other_world_size):
    """A run of 2 ranks that continues on others anywhere consumes the ids of the uninterrupted."""
    stream = ids_of(chapters, None, 0, 400)
    for step in (1, 5, 13, 26):  # step 13 is within the epoch's end: 8 samples a step, 103 in all
        before = ids_of(chapters, 2, 0, step * 8)
        after = ids_of(chapters, other_world_size, step * 8, 400 - step * 8)
        assert before + after == stream


def test_seeds_are_mixed_not_added(chapters):
    mix = chapters["01"].mix
    seeds = {
        mix(seed, step, rank) for seed in range(10) for step in range(10) for rank in range(10)
    }
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**64 for seed in seeds)


def build(script, folder, rows, num_proc=1, **changes):
    """Return the training and held-out samples of some texts."""
    name = folder / "data.jsonl"
    if not name.exists():
        name.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    from transformers import ByT5Tokenizer

    args = {"dataset_name": str(name), "dataset_subset": None, "text_column": "text"}
    args |= {"seq_length": 64, "eval_samples": 5, "num_proc": num_proc} | changes
    return script.build_data(Namespace(**args), ByT5Tokenizer())


def texts(count, seed=0):
    """Return documents of 0 to 400 characters."""
    draw = random.Random(seed)
    return ["".join(draw.choices("abcdefgh ", k=draw.randrange(400))) for _ in range(count)]


def test_samples_are_the_documents_joined_and_cut(chapters, tmp_path):
    """Only what does not fill a last sample is lost: nothing between the packer's batches."""
    rows = texts(350)
    train, held_out = build(chapters["01"], tmp_path, rows)
    stream = [byte + 3 if byte >= 0 else 1 for text in rows for byte in [*text.encode(), -1]]
    found = [
        *train[:]["input_ids"].flatten().tolist(),
        *held_out[:]["input_ids"].flatten().tolist(),
    ]
    assert found == stream[: len(stream) // 64 * 64]
    assert len(held_out) == 5


def test_number_of_processes_does_not_change_the_samples(chapters, tmp_path, monkeypatch):
    """The text is large enough for three processes, and three really are used."""
    import datasets

    used = []
    map_rows = datasets.Dataset.map

    def count(self, *args, **kwargs):
        used.append(kwargs.get("num_proc"))
        kwargs["load_from_cache_file"] = False
        return map_rows(self, *args, **kwargs)

    monkeypatch.setattr(datasets.Dataset, "map", count)
    rows = texts(3100)
    samples = []
    for num_proc in (1, 2, 3):
        train, held_out = build(chapters["01"], tmp_path, rows, num_proc)
        samples.append((train[:]["input_ids"], held_out[:]["input_ids"]))
    assert [n for n in used if n] == [1, 2, 3]
    for train, held_out in samples[1:]:
        assert torch.equal(train, samples[0][0]) and torch.equal(held_out, samples[0][1])


def test_missing_texts_are_empty_documents(chapters, tmp_path):
    rows = ["abc" * 200, None, "abc" * 200]
    train, _ = build(chapters["01"], tmp_path, rows, eval_samples=1)
    assert 1 in train[:]["input_ids"]


def test_second_run_finds_everything_cached(chapters, tmp_path):
    """Preparing again writes no file anew: ranks that come later only read."""

    def written():
        samples = build(chapters["01"], tmp_path, texts(200))[0]
        return {
            name: Path(name).stat().st_mtime_ns for (name,) in map(dict.values, samples.cache_files)
        }

    assert written() == written() != {}


def test_ranks_share_what_rank_0_prepared(tmp_path, monkeypatch):
    """Processes whose hashes of strings differ still find the same cache files."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "data.txt").write_text("\n\n".join(texts(2100)))
    args = [*SHORT, "--num-steps", 1, "-d", tmp_path / "data.txt", "--save-dir", tmp_path]
    run_well(2, [("02", [*args, "--num-proc", 2])], tmp_path / "ranks")
    cached = list((tmp_path / "hf").rglob("cache-*.arrow"))
    assert len(cached) == 3, cached  # the tokens of two processes and the samples, once


def test_formats_give_the_same_samples(chapters, tmp_path):
    """Text, JSON lines, CSV, Parquet and a folder of text files hold the same documents."""
    import datasets

    rows = [text.strip() for text in texts(200) if text.strip()]
    table = datasets.Dataset.from_dict({"text": rows})
    table.to_csv(tmp_path / "a.csv")
    table.to_parquet(tmp_path / "a.parquet")
    table.to_json(tmp_path / "a.jsonl")
    (tmp_path / "folder").mkdir()
    for name in (tmp_path / "a.txt", tmp_path / "folder" / "a.txt"):
        name.write_text("\n\n".join(rows))
    prepared = {
        name: build(chapters["01"], tmp_path, [], dataset_name=str(tmp_path / name))[0]
        for name in ("a.csv", "a.parquet", "a.jsonl", "a.txt", "folder")
    }
    expected = prepared.pop("a.parquet")[:]["input_ids"]
    prints = set()
    for name, samples in prepared.items():
        assert torch.equal(samples[:]["input_ids"], expected), name
        prints.add(chapters["01"].fingerprint(samples))
    assert len(prints) == 1, "the fingerprint depends on more than the samples"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_while_packing_does_not_grow_with_the_corpus(chapters, tmp_path, monkeypatch):
    """Sixteen MiB of tokens pass through the packer, and the memory that is no file's stays."""
    pack, seen = chapters["01"].Packer.__call__, []

    def watch(self, batch):
        status = Path("/proc/self/status").read_text()
        seen.append(int(status.split("RssAnon:")[1].split()[0]) / 1024)
        return pack(self, batch)

    monkeypatch.setattr(chapters["01"].Packer, "__call__", watch)
    build(chapters["01"], tmp_path, texts(20_000))
    assert len(seen) == 200
    assert max(seen[20:]) - seen[20] < 4, seen
