"""The related topics' own scripts say what the chapters do, and their pages what was measured."""

import importlib
import json
import sys
from argparse import Namespace
from itertools import islice, product

import pytest
import torch
import torch.distributed as dist

import contenders
from conftest import ROOT, user_error
from test_resume import NEAR, SAME

TOPICS = ROOT / "related-topics"
PAGES = ["batch-size-and-lr", "determinism", "elastic", "own-architecture"]


def script(name):
    """Return the script of a topic as a module."""
    return contenders.load(TOPICS / name)


def results(name):
    """Return the rows that were measured for a topic."""
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["rows"]


def test_the_index_has_every_topic():
    index = (TOPICS / "README.md").read_text()
    pages = [path.parent.name for path in TOPICS.glob("*/README.md")]
    assert set(PAGES) < set(pages)
    assert [page for page in pages if f"({page}/README.md)" not in index] == []


# ---- batch size and learning rate ------------------------------------------------------------
@pytest.fixture
def sweep(monkeypatch, tmp_path):
    """Return a function that sweeps with a training that is made up, and what it trained."""
    module, trained = script("batch-size-and-lr/sweep.py"), []

    def train(samples, batch, lr, seed):
        trained.append((batch, lr, seed))
        return None if lr > 0.02 else (lr - 0.002) ** 2 + batch

    def run(*words):
        output = tmp_path / "found.json"
        line = ["sweep.py", "--output", output, *words]
        monkeypatch.setattr(sys, "argv", list(map(str, line)))
        module.main()
        return module.losses_of(json.loads(output.read_text())["rows"])

    monkeypatch.setattr(module, "train", train)
    run.trained, run.module = trained, module
    return run


GRID = ["--batch-sizes", 64, 4, 16, "--lrs", 1e-3, 2e-3, 4e-3]


def test_the_best_rate_of_the_smallest_batch_is_scaled_by_each_rule(sweep, capsys):
    losses = sweep(*GRID)
    asked = {"the same rate": [2e-3] * 3, "square root": [2e-3, 4e-3, 8e-3]}
    asked["linear"] = [2e-3, 8e-3, 32e-3]
    rates = sweep.module.scaled(losses)
    assert {rule: list(by_batch.values()) for rule, by_batch in rates.items()} == asked
    grid = list(product([4, 16, 64], [1e-3, 2e-3, 4e-3], [0]))
    assert sweep.trained == [*grid, (64, 8e-3, 0), (16, 8e-3, 0), (64, 32e-3, 0)]
    assert losses[64][32e-3] == float("inf")
    assert "batch 64   steps 64    lr 0.032   diverged" in capsys.readouterr().out


def test_what_was_trained_is_not_trained_again(sweep):
    before = sweep(*GRID)
    number = len(sweep.trained)
    assert sweep(*GRID) == before and len(sweep.trained) == number
    sweep(*GRID, "--seeds", 2)
    assert len(sweep.trained) == 2 * number and {seed for *_, seed in sweep.trained} == {0, 1}


def test_a_file_may_have_more_than_is_asked_for(sweep, capsys):
    sweep(*GRID, "--seeds", 2)
    capsys.readouterr()
    sweep("--batch-sizes", 16, "--lrs", 4e-3)
    assert capsys.readouterr().out.startswith("the same rate  16: 16.0000\n")


def test_a_rate_that_one_seed_lacks_does_not_count(sweep):
    cells = [(4, 1e-3, 0, 2.0), (4, 1e-3, 1, 4.0), (4, 2e-3, 0, 1.0)]
    rows = [dict(zip(("batch", "lr", "seed", "val_loss"), cell, strict=True)) for cell in cells]
    assert sweep.module.losses_of(rows) == {4: {1e-3: 3.0}}


def test_runs_are_on_as_many_tokens(sweep, capsys):
    said = user_error(capsys, sweep, "--samples", 100, "--batch-sizes", 8)
    assert "--samples 100 does not divide by a batch of 8" in said
    sweep(*GRID)
    said = user_error(capsys, sweep, *GRID, "--samples", 2048)
    assert "has runs on 4096 samples; choose another --output" in said


def test_what_the_page_says_of_rates_was_measured(sweep):
    losses = sweep.module.losses_of(results("batch-size-and-lr"))
    rules = sweep.module.scaled(losses)
    best = {batch: min(by_rate.values()) for batch, by_rate in losses.items()}
    lost = {
        rule: [losses[batch][lr] - best[batch] for batch, lr in list(rates.items())[1:]]
        for rule, rates in rules.items()
    }
    assert max(lost["square root"]) < 0.01 and min(lost["linear"]) > 0.1
    assert lost["the same rate"][-1] > 1 and losses[4][0.004] - losses[4][0.002] < 0.02
    assert list(best.values()) == sorted(best.values())


# ---- determinism -----------------------------------------------------------------------------
def test_one_bit_is_seen():
    bits, weight = script("determinism/bits.py"), torch.tensor([1.0, 2.0])
    rows = [{"step": 1, "loss": 2.5, "grad_norm": 1.0, "tokens_per_second": 7}]
    one = rows, {"weight": weight}
    faster = [rows[0] | {"tokens_per_second": 9}], {"weight": weight.clone()}
    assert bits.told(bits.compare(one, faster)) == "identical"
    flipped = (weight.view(torch.int32) ^ 1).view(torch.float32)
    assert bits.told(bits.compare(one, (rows, {"weight": flipped}))) == "0.0e+00"
    other = [rows[0] | {"loss": 2.75}], {"weight": weight}
    assert bits.told(bits.compare(one, other)) == "2.5e-01"


def test_what_the_page_says_of_bits_was_measured():
    rows = {row["layout"]: row for row in results("determinism")}
    assert list(rows) == list(script("determinism/bits.py").LAYOUTS)
    assert all(row["twice"]["identical"] for row in rows.values())
    assert [name for name, row in rows.items() if not row["resumed"]["identical"]] == [
        "02, 4 ranks"
    ]
    for name in ("01, --batch-size 4", "02, 2 ranks", "02, 4 ranks", "04, 2 ranks", "04, 4 ranks"):
        assert not rows[name]["norm"]["identical"]
    apart = [row[what]["difference"] for row in rows.values() for what in ("resumed", "norm")]
    assert max(apart) < 1e-5


def test_the_table_of_resumes_says_what_their_tests_require():
    same = {row["layout"]: row["resumed"]["identical"] for row in results("determinism")}
    layouts = {run.replace("@", ", ") + " ranks" * (run != "01") for run, _ in SAME}
    assert all(same[layout] for layout in layouts & same.keys()) and len(layouts & same.keys()) == 3
    assert ("02@4", "02@4") in NEAR and not same["02, 4 ranks"]


# ---- data loading ----------------------------------------------------------------------------
@pytest.mark.parametrize("chapter, ranks", [("01", 1), ("02", 2), ("02", 4)])
def test_a_sampler_gives_the_batches_of_the_chapters(load, monkeypatch, chapter, ranks):
    """On each rank, from any step on, and from one epoch to the next."""
    module, share = load(chapter), script("../preparing-data/share.py")
    samples, args = (
        torch.arange(100, dtype=torch.int32).view(50, 2),
        Namespace(seed=3, device="cpu", skip_steps=0),
    )
    args.global_batch_size, args.micro_batch_size, args.accumulation = 24, 3, 8 // ranks
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    for rank, step in product(range(ranks), (1, 2, 7)):
        monkeypatch.setattr(dist, "get_rank", lambda: rank)  # noqa: B023
        ids = share.ids_from(args, module.order_of, len(samples), step, rank, ranks)
        for number, some in enumerate(islice(ids, 3 * args.accumulation)):
            later, micro_step = divmod(number, args.accumulation)
            place = step + later, micro_step
            batch = module.batch_at(args, module.Samples(samples), *place, "cpu")
            assert torch.equal(samples[some].long(), batch)


@pytest.mark.exhaustive
@pytest.mark.alone
def test_a_step_waits_as_predicted():
    """Roughly: 75% of its time without workers, and not at all with as many as it costs steps."""
    share = script("../preparing-data/share.py")
    took, waited = share.measure(20)
    assert waited / took < 0.05
    seconds = 3 * (took - waited) / 20 / share.BATCH
    for workers, least, most in ((0, 0.5, 0.9), (8, 0, 0.3)):
        took, waited = share.measure(20, workers, seconds)
        assert least <= waited / took <= most, (workers, waited / took)


def test_what_the_page_says_of_waiting_was_measured():
    alone, none, *_, most = (row["share"] for row in results("data-loading"))
    assert alone < 0.02 and none > 0.7 and most < 0.1


# ---- elastic ---------------------------------------------------------------------------------
def test_ranks_split_a_batch_as_the_chapters_do(load, monkeypatch, capsys):
    chapter, ranks = load("03"), script("elastic/ranks.py")
    variables = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for samples, most, size in product((24, 64, 96), (3, 8), (1, 2, 3, 8, 24, 64)):
        monkeypatch.setenv("WORLD_SIZE", str(size))
        line = ["train_llm.py", "--global-batch-size", samples, "-b", most, "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", list(map(str, line)))
        found = ranks.split(samples, size, most)
        if found is None:
            said = user_error(capsys, chapter.parse_args)
            assert f"not divisible by {size} data-parallel ranks" in said
        else:
            args = chapter.parse_args()
            assert found == (args.micro_batch_size, args.accumulation)


@pytest.mark.parametrize(
    "words, told",
    [
        ("--nodes 4:1", "--nodes 4:1: FEWEST:MOST, such as 1:4"),
        ("--nodes 3", "--nodes 3: FEWEST:MOST, such as 1:4"),
        ("--ranks-per-node 0", "batch sizes and ranks must be at least 1"),
    ],
)
def test_wrong_nodes_are_told_in_one_line(monkeypatch, capsys, words, told):
    monkeypatch.setattr(sys, "argv", ["ranks.py", *words.split()])
    said = user_error(capsys, script("elastic/ranks.py").main)
    assert said == f"ranks.py: error: {told}\n"


# ---- own architecture ------------------------------------------------------------------------
@pytest.fixture(scope="module")
def planner():
    return importlib.import_module("will_it_fit")


@pytest.mark.parametrize("row", results("own-architecture"), ids=lambda row: row["size"])
def test_a_size_has_the_weights_of_its_name(planner, monkeypatch, load, row):
    """By hand, on the meta device, and in the configuration that a chapter makes of it."""
    sizes, size = script("own-architecture/sizes.py"), row["size"]
    width, layers, heads, kv_heads, inner, tied = sizes.SHAPES[size]
    head = width // heads
    assert width % heads == heads % kv_heads == inner % 128 == 0 and head in (64, 128)
    layer = 2 * width * heads * head + 2 * width * kv_heads * head + 3 * width * inner + 2 * width
    embeddings = sizes.VOCABULARY * width * (1 if tied else 2)
    by_hand = layers * layer + width + embeddings
    assert (row["weights"], row["embeddings"]) == (by_hand, embeddings)
    unit = {"M": 1e6, "B": 1e9}[size[-1]]
    assert float(size[:-1]) == pytest.approx(by_hand / unit, rel=0.05)

    config = sizes.config_of(size)
    monkeypatch.setattr(sys, "argv", ["train_llm.py", "--config", *config, "--device", "cpu"])
    chapter = load("01")
    _, made = chapter.build_tokenizer_and_config(chapter.parse_args())
    planned, _ = planner.load_config(planner.parse_args(["--config", *config]))
    assert planner.model_of(made).weights == planner.model_of(planned).weights == by_hand


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", ["10M", "2.5B"])
def test_the_planner_still_says_so(planner, size):
    [row] = [row for row in results("own-architecture") if row["size"] == size]
    found = script("own-architecture/sizes.py").needs_of(planner, size)
    for gpus in ("1 GPUs", "8 GPUs"):
        assert found[gpus]["setting"] == row[gpus]["setting"]
        assert found[gpus]["gib"] == pytest.approx(row[gpus]["gib"], rel=1e-3)


def test_sizes_prints_what_config_takes(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sizes.py", "10M"])
    script("own-architecture/sizes.py").main()
    assert "hidden_size=192 num_hidden_layers=8" in capsys.readouterr().out
