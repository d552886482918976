"""Test that the scripts of related topics agree with the chapters, and the pages with the data."""

import importlib
import json

import nbformat
import pytest
import torch

import harness
import samples
from conftest import ROOT, disagreement, metrics, parse
from flags import unknown_flags
from readme import Block

TOPICS = ROOT / "related-topics"


def script(name):
    """Import a script of a topic, such as `determinism/bits.py`; return the module."""
    return harness.load(TOPICS / name)


def test_index_has_every_topic():
    index = (TOPICS / "README.md").read_text()
    pages = [path.parent.name for path in TOPICS.glob("*/README.md")]
    assert pages and [page for page in pages if f"({page}/README.md)" not in index] == []


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
        assert bits.in_words(bits.compare(*pair)) == expected


# ---- own architecture ------------------------------------------------------------------------
SIZES = json.loads((ROOT / "benchmarks/results/own-architecture.json").read_text())["rows"]


@pytest.mark.parametrize("row", SIZES, ids=lambda row: row["size"])
def test_size_has_the_weights_of_its_name(load, row):
    """Count the weights of the model that the planner builds from chapter 01's configuration."""
    sizes, planner = script("own-architecture/sizes.py"), importlib.import_module("will_it_fit")
    chapter, settings = load("01"), sizes.config_of(row["size"])
    args = parse(chapter, "--device", "cpu", "--config", *settings)
    _, config = chapter.build_tokenizer_and_config(args)
    assert planner.model_of(config).weights == row["weights"]
    unit = {"M": 1e6, "B": 1e9}[row["size"][-1]]
    assert float(row["size"][:-1]) == pytest.approx(row["weights"] / unit, rel=0.05)


# ---- try it free -----------------------------------------------------------------------------
SMALL = "--num-steps 6 --seq-length 32 --global-batch-size 4 --batch-size 2 --eval-samples 4"
SMALL += " --log-every 1 --device cpu"


def cells():
    """Return the commands of each bash cell of the notebook, except cells for a cloud service."""
    notebook = nbformat.read(TOPICS / "try-it-free/notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in code), "the notebook has outputs; clear them"
    texts = [cell.source for cell in code if cell.metadata.get("tags") != ["service"]]
    assert texts and all(text.startswith("%%bash\n") for text in texts)
    return [text.removeprefix("%%bash\n") for text in texts]


def test_notebook_is_valid_and_uses_known_flags():
    assert unknown_flags("\n".join(cells())) == []


@pytest.mark.exhaustive
def test_notebook_trains_one_curve_on_two_processes(tmp_path):
    """Run the notebook's cells with two CPU processes, and with smaller values in try.args."""
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
    assert disagreement(runs["one"], runs["ddp"]) == disagreement(runs["one"], runs["fsdp"]) == {}
    assert runs["fp16"][6]["loss_scale"] >= 2.0**12
    assert (tmp_path / "outputs.tar.gz").stat().st_size > 10**6
    assert output.count("drawn: outputs/") == 2
