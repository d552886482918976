"""Test that exactly one rank reads each sample of an epoch, and that datasets become samples."""

import functools
import random
import shlex
import shutil
from argparse import Namespace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import ByT5Tokenizer

from chats import write_rows
from conftest import ROOT, SHORT, run_command, run_or_fail, user_error

DEVICE = torch.device("cpu")


@pytest.fixture
def ids_at(load, monkeypatch):
    """Return a function that returns the ids of all samples of a step, in the stream's order."""

    def ids_at(name, step, ranks=1, micro_batch_size=2, pieces=(103,), skip_steps=0):
        script = load(name)
        args = Namespace(device="cpu", skip_steps=skip_steps, global_batch_size=48)
        args.micro_batch_size, args.accumulation = micro_batch_size, 48 // ranks // micro_batch_size
        first, *later = torch.arange(sum(pieces), dtype=torch.int32).view(-1, 1).split(list(pieces))
        samples = script.Samples(7, first, iter(later))
        monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
        ids = []
        for micro_step in range(args.accumulation):
            parts = []
            for rank in range(ranks):
                monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
                parts.append(script.batch_at(args, samples, step, micro_step, DEVICE).flatten())
            # Interleave the samples of the ranks, because ranks take turns in the stream.
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
    """Check that all layouts read the same stream: the pieces in turn, each with a new shuffle."""
    stream, expected = [], []
    for step in range(1, 8):
        stream += ids_at(name, step, ranks, micro_batch_size, pieces)
    for shuffle in range(3 * len(pieces)):
        number = shuffle % len(pieces)
        generator = torch.Generator().manual_seed(chapter.hash_of(7, shuffle))
        order = torch.randperm(pieces[number], generator=generator)
        expected += (sum(pieces[:number]) + order).tolist()
    assert stream[: len(expected)] == expected and len(stream) >= len(expected)


@pytest.mark.parametrize("name", ["01", "02"])
def test_skipped_steps_shift_the_samples(ids_at, name):
    assert ids_at(name, 5, skip_steps=30) == ids_at(name, 35) != ids_at(name, 5)


def test_late_step_takes_two_permutations_at_most(chapter, ids_at):
    """Check that step 10**12 shuffles at most twice, so that a late resume takes no longer."""
    chapter.random_order.cache_clear()
    ids_at("01", 10**12)
    assert chapter.random_order.cache_info().misses <= 2


def test_resume_keeps_the_number_of_skipped_steps(chapter, capsys):
    for skip_steps, kept, output in ((0, 30, ""), (50, 50, "skip_steps was 30, is now 50")):
        args = Namespace(skip_steps=skip_steps)
        chapter.compare_args(args, {"skip_steps": 30, "wandb_id": "a"}, "step-00000010")
        assert args.skip_steps == kept
        assert capsys.readouterr().out.strip().removeprefix("step-00000010: ") == output


def test_seeds_are_mixed_not_added(chapter):
    seeds = {chapter.hash_of(*numbers) for numbers in product(range(10), repeat=3)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**64 for seed in seeds)


# ---- a dataset of the hub --------------------------------------------------------------------
@pytest.fixture
def hub(chapter, tmp_path, monkeypatch):
    """Return a function that builds samples from texts, as if the texts were a dataset on the hub.

    The function's arguments are the texts and changed flags.
    """
    real = datasets.load_dataset

    def build(texts, **changes):
        path = write_rows(tmp_path / "data.jsonl", [{"text": text} for text in texts])

        def load_dataset(name, subset, split, **options):
            assert (name, subset, split) == ("some/texts", None, "train")
            return real("json", data_files=str(path), split=split, **options)

        monkeypatch.setattr(chapter.datasets, "load_dataset", load_dataset)
        args = {"dataset_name": "some/texts", "dataset_subset": None, "text_column": "text"}
        args |= {"seq_length": 64, "eval_samples": 5, "seed": 0, "wandb_id": "a"} | changes
        return chapter.build_data(Namespace(**args), ByT5Tokenizer())

    return build


def make_texts(count):
    """Return `count` random texts with fewer than 400 characters."""
    source = random.Random(0)
    return ["".join(source.choices("abcdefgh ", k=source.randrange(400))) for _ in range(count)]


def test_samples_are_the_documents_joined_and_cut(hub):
    """Check that only an incomplete last sample is dropped, and that `<s>` in a text stays text."""
    rows = [*make_texts(2350), "<p>price <s>9</s></p>", "text " * 40]
    samples, held_out = hub(rows)
    [train] = samples.pieces
    stream = [byte + 3 if byte >= 0 else 1 for text in rows for byte in [*text.encode(), -1]]
    expected = stream[: len(stream) // 64 * 64]
    assert torch.cat([train, held_out]).flatten().tolist() == expected
    assert len(held_out) == 5 and train.dtype == torch.int32


UNUSABLE = {
    "null": ([None], {}, "--text-column text: a row has no text; prepare.py can skip it"),
    "column": (["b"], {"text_column": "body"}, "text-column body: no such column; choose ['text']"),
}


@pytest.mark.parametrize("rows, changes, expected", UNUSABLE.values(), ids=UNUSABLE)
def test_unusable_dataset_prints_one_line(hub, capsys, rows, changes, expected):
    error = user_error(capsys, functools.partial(hub, ["a", *rows], **changes))
    assert error.splitlines()[-1].endswith(expected)


def test_text_file_is_refused_with_the_command_that_prepares_it(tmp_path, monkeypatch):
    """Run the printed command unchanged, and then train on the folder that the command writes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my text.txt").write_text("\n\n".join(make_texts(200)))
    shutil.copytree(ROOT / "preparing-data", tmp_path / "preparing-data")
    script = ROOT / "01-single-gpu/train_llm.py"
    refused = run_command(script, *SHORT, "--num-steps", 1, "-d", "my text.txt")
    line = refused.stderr.splitlines()[-1]
    assert refused.returncode == 2 and "--dataset-name my text.txt: prepare it: " in line
    _, tool, *words = shlex.split(line.partition("prepare it: ")[2])
    run_command(tool, *words, check=True)
    folder = words[words.index("-o") + 1]
    run_command(script, *SHORT, "--num-steps", 1, "-d", folder, check=True)


@pytest.mark.slow
def test_ranks_find_the_tokens_of_rank_0(tmp_path, monkeypatch):
    """Check that two ranks write only one token file.

    Change an environment variable, so that the ranks are new processes, not forks, and hash strings
    with different seeds.
    """
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    args = [*SHORT, "--num-steps", 1, "--save-dir", tmp_path]
    run_or_fail(2, [("02", args)], tmp_path / "ranks")
    assert len([path for path in (tmp_path / "hf").rglob("*.tokens*")]) == 1


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_tokenizing_takes_the_same_memory_for_any_corpus(chapter, hub, monkeypatch):
    """Check that the process's own memory hardly grows while it writes 6 MB of tokens."""
    sizes = []

    def measure(*args, **options):
        status = Path("/proc/self/status").read_text()
        sizes.append(int(status.split("RssAnon:")[1].split()[0]) / 1024)
        return np.array(*args, **options)

    monkeypatch.setattr(chapter, "np", SimpleNamespace(array=measure, int32=np.int32))
    hub(make_texts(12_000))
    assert len(sizes) == 12_000
    assert max(sizes[4000:]) - sizes[4000] < 4, (sizes[4000], max(sizes[4000:]))
