"""Tests of the related topics: their scripts agree with the chapters, their pages with the data."""

import importlib
import json
import sys
from itertools import product

import nbformat
import pytest
import torch

import contenders
import samples
from conftest import ROOT, metrics, same_curve, user_error
from flags import unknown_flags
from readme import Block

TOPICS = ROOT / "related-topics"


def script(name):
    """Return the script of a topic as a module."""
    return contenders.load(TOPICS / name)


def results(name):
    """Return the rows that were measured for a topic."""
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["rows"]


def test_index_has_every_topic():
    index = (TOPICS / "README.md").read_text()
    pages = [path.parent.name for path in TOPICS.glob("*/README.md")]
    assert pages and [page for page in pages if f"({page}/README.md)" not in index] == []


# ---- batch size and learning rate ------------------------------------------------------------
GRID = ["--batch-sizes", 64, 4, 16, "--lrs", 1e-3, 2e-3, 4e-3]


@pytest.fixture
def sweep(monkeypatch, tmp_path):
    """Return a function that sweeps with a made-up training, and lists what it trained."""
    module, trained = script("batch-size-and-lr/sweep.py"), []

    def train(samples, batch, lr, seed):
        trained.append((batch, lr, seed))
        return None if lr > 0.02 else (lr - 0.002) ** 2 + batch

    def run(*words):
        output = tmp_path / "found.json"
        words = ["sweep.py", "--output", output, *words]
        monkeypatch.setattr(sys, "argv", list(map(str, words)))
        module.main()
        return module.losses_of(json.loads(output.read_text())["rows"])

    monkeypatch.setattr(module, "train", train)
    run.trained, run.module = trained, module
    return run


def test_sweep_trains_the_grid_and_the_scaled_rates(sweep, capsys):
    losses = sweep(*GRID)
    assert {rule: list(rates.values()) for rule, rates in sweep.module.scaled(losses).items()} == {
        "the same rate": [2e-3] * 3,
        "square root": [2e-3, 4e-3, 8e-3],
        "linear": [2e-3, 8e-3, 32e-3],
    }
    grid = list(product([4, 16, 64], [1e-3, 2e-3, 4e-3], [0]))
    assert sweep.trained == [*grid, (64, 8e-3, 0), (16, 8e-3, 0), (64, 32e-3, 0)]
    assert losses[64][32e-3] == float("inf")
    assert "batch 64   steps 64    lr 0.032   diverged" in capsys.readouterr().out


def test_sweep_repeats_no_run_and_uses_only_requested_runs(sweep, capsys):
    losses = sweep(*GRID)
    number = len(sweep.trained)
    assert sweep(*GRID) == losses and len(sweep.trained) == number
    sweep(*GRID, "--seeds", 2)
    assert len(sweep.trained) == 2 * number and {seed for *_, seed in sweep.trained} == {0, 1}
    capsys.readouterr()
    sweep("--batch-sizes", 16, "--lrs", 4e-3)
    assert capsys.readouterr().out.startswith("the same rate  16: 16.0000\n")
    cells = [(4, 1e-3, 0, 2.0), (4, 1e-3, 1, 4.0), (4, 2e-3, 0, 1.0)]
    rows = [dict(zip(("batch", "lr", "seed", "val_loss"), cell, strict=True)) for cell in cells]
    assert sweep.module.losses_of(rows) == {4: {1e-3: 3.0}}, "a rate lacks a seed, but counts"


def test_sweep_refuses_runs_on_different_numbers_of_tokens(sweep, capsys):
    error = user_error(capsys, sweep, "--samples", 100, "--batch-sizes", 8)
    assert "--samples 100: not divisible by a batch of 8" in error
    sweep(*GRID)
    error = user_error(capsys, sweep, *GRID, "--samples", 2048)
    assert "has runs on 4096 samples; choose another --output" in error


def test_page_on_rates_agrees_with_the_data(sweep):
    losses = sweep.module.losses_of(results("batch-size-and-lr"))
    best = {batch: min(by_rate.values()) for batch, by_rate in losses.items()}
    lost = {
        rule: [losses[batch][lr] - best[batch] for batch, lr in list(rates.items())[1:]]
        for rule, rates in sweep.module.scaled(losses).items()
    }
    assert max(lost["square root"]) < 0.01 and min(lost["linear"]) > 0.1
    assert lost["the same rate"][-1] > 1 and losses[4][0.004] - losses[4][0.002] < 0.02
    assert list(best.values()) == sorted(best.values())


# ---- determinism -----------------------------------------------------------------------------
def test_bits_finds_one_flipped_bit():
    bits, weight = script("determinism/bits.py"), torch.tensor([1.0, 2.0])
    row = {"step": 1, "loss": 2.5, "grad_norm": 1.0, "tokens_per_second": 7}
    flipped = (weight.view(torch.int32) ^ 1).view(torch.float32)
    for changes, weights, expected in [
        ({"tokens_per_second": 9}, weight.clone(), "identical"),
        ({}, flipped, "0.0e+00"),
        ({"loss": 2.75}, weight, "2.5e-01"),
    ]:
        pair = ([row], {"weight": weight}), ([row | changes], {"weight": weights})
        assert bits.told(bits.compare(*pair)) == expected


def test_page_on_bits_agrees_with_the_data_and_the_resume_tests():
    rows = {row["layout"]: row for row in results("determinism")}
    assert list(rows) == list(script("determinism/bits.py").LAYOUTS)
    assert all(row["twice"]["identical"] for row in rows.values())
    same = {name: row["resumed"]["identical"] for name, row in rows.items()}
    assert [name for name in same if not same[name]] == ["02, 4 ranks"]
    for name in ("01, --batch-size 4", "02, 2 ranks", "02, 4 ranks", "04, 2 ranks", "04, 4 ranks"):
        assert not rows[name]["norm"]["identical"]
    apart = [row[kind]["difference"] for row in rows.values() for kind in ("resumed", "norm")]
    assert max(apart) < 1e-5


# ---- own architecture ------------------------------------------------------------------------
@pytest.fixture(scope="module")
def planner():
    return importlib.import_module("will_it_fit")


@pytest.mark.parametrize("row", results("own-architecture"), ids=lambda row: row["size"])
def test_size_has_the_weights_of_its_name(planner, monkeypatch, load, row):
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
    _, built = chapter.build_tokenizer_and_config(chapter.parse_args())
    planned, _ = planner.load_config(planner.parse_args(["--config", *config]))
    assert planner.model_of(built).weights == planner.model_of(planned).weights == by_hand


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", ["10M", "2.5B"])
def test_needs_of_a_size_are_still_those_of_the_planner(planner, size):
    [row] = [row for row in results("own-architecture") if row["size"] == size]
    needs = script("own-architecture/sizes.py").needs_of(planner, size)
    for gpus in ("1 GPUs", "8 GPUs"):
        assert needs[gpus]["setting"] == row[gpus]["setting"]
        assert needs[gpus]["gib"] == pytest.approx(row[gpus]["gib"], rel=1e-3)


# ---- try it free -----------------------------------------------------------------------------
SMALL = "--num-steps 6 --seq-length 32 --global-batch-size 4 --batch-size 2 --eval-samples 4"
SMALL += " --log-every 1 --device cpu"


def cells():
    """Return the text of the notebook's cells in bash; all cells but those of a service are."""
    notebook = nbformat.read(TOPICS / "try-it-free/notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in code), "clear the outputs of the notebook"
    texts = [cell.source for cell in code if cell.metadata.get("tags") != ["service"]]
    assert texts and all(text.startswith("%%bash\n") for text in texts)
    return [text.removeprefix("%%bash\n") for text in texts]


def test_notebook_is_valid_and_uses_known_flags():
    assert unknown_flags("\n".join(cells())) == []


@pytest.mark.exhaustive
def test_notebook_trains_one_curve_on_two_processes(tmp_path):
    """The cells run in place of `gpu` with two processes, and with a smaller file of arguments."""
    lines = []
    for text in cells():
        lines.append(f"(\n{text}\n)")
        if "cat > try.args" in text:
            lines.append(f"printf '%s\\n' {SMALL!r} >> try.args")
    text = "\n".join(lines).replace("--nproc-per-node gpu", "--nproc-per-node 2")
    assert text.count("--nproc-per-node 2") == 3
    status, output = samples.run(Block("notebook", "bash", text), tmp_path, timeout=600)
    assert status == 0, output
    runs = {name: metrics(tmp_path / "outputs" / name) for name in ("one", "ddp", "fsdp", "fp16")}
    assert same_curve(runs["one"], runs["ddp"]) and same_curve(runs["one"], runs["fsdp"])
    assert runs["fp16"][6]["loss_scale"] >= 2.0**12
    assert (tmp_path / "outputs.tar.gz").stat().st_size > 10**6
    assert output.count("drawn: outputs/") == 2
