"""Chapter 04: the curve of the chapters before, from weights that no rank holds whole."""

import argparse

import pytest

import fsdp
import on_ranks
from conftest import curves_of, difference, run_params, selected_runs, start_ranks

pytestmark = pytest.mark.slow
FAMILIES = ["gpt2", "qwen3", "mistral", "gemma3"]  # and tiny, a Llama
SETTINGS = {
    "-kept": ["--no-reshard-after-forward"],
    "-2": ["--batch-size", 2],  # 4 micro-batches on one rank, 2 on two, 1 on four
    "-1": ["--batch-size", 1],
    "-1-kept": ["--batch-size", 1, "--no-reshard-after-forward"],
    "-compiled": ["--compile"],
    "-replicas": ["--replicas", 2],
    "-replicas-1": ["--replicas", 2, "--batch-size", 1],
}
BF16 = ["--precision", "bf16"]
TRIED = {  # by number of ranks: settings, families, precisions besides fp32
    1: ["-kept", "-2", "-bf16", "-qwen3"],
    2: ["-kept", "-2", "-1", "-1-kept", "-compiled", "-replicas", "-bf16",
        "-gpt2", "-qwen3", "-mistral", "-gemma3"],
    4: ["-kept", "-1", "-replicas-1", "-gpt2", "-qwen3"],
}  # fmt: skip
RUNS = [f"04@{ranks}{name}" for ranks, names in TRIED.items() for name in names]
QUICK = ["04@1-2", "04@2-1-kept", "04@2-compiled", "04@2-bf16", "04@2-qwen3", "04@4-replicas-1"]


@pytest.fixture(scope="module")
def curves(request, tmp_path_factory, models):
    """The metrics of every run that is to be looked at, by name."""
    options = SETTINGS | {"-bf16": BF16} | {f"-{name}": ["-m", models / name] for name in FAMILIES}
    runs = {
        ranks: {f"04@{ranks}{name}": ("04", options[name]) for name in names}
        for ranks, names in TRIED.items()
    }
    runs[1] |= {f"01-{name}": ("01", options[f"-{name}"]) for name in ("bf16", *FAMILIES)}
    runs[1]["01"] = ("01", [])
    return curves_of(tmp_path_factory.mktemp("fsdp"), selected_runs(request, runs))


@pytest.mark.parametrize("run", run_params([run for run in RUNS if run[4:] in SETTINGS], QUICK))
def test_settings_change_nothing(curves, run):
    assert difference(curves["01"], curves[run]) < 1e-5


@pytest.mark.parametrize("run", run_params([run for run in RUNS if run[5:] in FAMILIES], QUICK))
def test_families_agree(curves, run):
    assert difference(curves[f"01-{run[5:]}"], curves[run]) < 1e-5


@pytest.mark.parametrize("run", run_params([run for run in RUNS if run.endswith("bf16")], QUICK))
def test_bf16_agrees(curves, run):
    one, other = curves["01-bf16"], curves[run]
    assert difference(one, other, names=["loss", "val_loss"]) < 5e-3
    assert difference(one, other, names=["grad_norm"], relative=True) < 5e-2
    assert difference(one, other, names=["loss"]) > 0  # it is not computed in the same precision


# ---- what it costs ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def costs(tmp_path_factory):
    """What `benchmarks/fsdp.py costs` finds for a small model: rows by ranks and setting."""
    folder = tmp_path_factory.mktemp("costs")
    args = argparse.Namespace(layers=LAYERS, width=128, ranks=[2, 4])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_ranks, "torchrun", forked)  # it would start 32 ranks
        rows = fsdp.costs(args, folder)
    return {(row["ranks"], row["setting"]): row for row in rows}


def forked(ranks, command, folder):
    """Run a command on so many ranks, as the benchmark's `torchrun` does, without its imports."""
    processes = start_ranks(ranks, command, folder)
    for process in processes:
        process.wait(timeout=100)
    logs = "".join(path.read_text() for path in sorted(folder.glob("rank*.log")))
    return argparse.Namespace(stdout=logs, stderr="")


LAYERS = 4
LAYER = 4 * (128**2 * 4 + 3 * 128 * 352 + 2 * 128)  # bytes of a layer's weights: Llama
ROOT_GROUP = 4 * (2 * 384 * 128 + 128)  # of all that is in no layer
MODEL = LAYERS * LAYER + ROOT_GROUP
ALL = [(ranks, name) for ranks in (2, 4) for name in ("as it is", "layers kept")]
ALL += [(2, "2 micro-batches"), (4, "2 micro-batches")]
ALL += [(4, "2 replicas"), (4, "2 replicas, 2 micro-batches")]


@pytest.mark.parametrize("ranks, setting", ALL)
def test_memory_is_what_the_readme_says(costs, ranks, setting):
    """Shards are an equal part of everything; gathered is the root's group and a layer."""
    row, shards = costs[ranks, setting], ranks // 2 if "replicas" in setting else ranks
    assert row["model"] == MODEL
    assert row["weights"] == row["gradients"] == MODEL // shards
    assert 0 <= row["optimizer"] - 2 * MODEL // shards < 1000  # besides moments, steps: a number
    assert row["gathered"] == (MODEL if setting == "layers kept" else ROOT_GROUP + LAYER)


@pytest.mark.parametrize("ranks, setting", ALL)
def test_communication_is_what_the_readme_says(costs, ranks, setting):
    """How many collectives of each kind a step takes, and how large what they move is in all."""
    row, replicas = costs[ranks, setting], 2 if "replicas" in setting else 1
    times = 2 if "micro-batches" in setting else 1
    again = 0 if setting == "layers kept" else LAYERS - 1  # for the backward, but for the last
    gathers = [times * (1 + LAYERS + again), times * (MODEL + again * LAYER)]
    expected = {
        "all-gather": gathers,
        "reduce-scatter": [times * (1 + LAYERS), times * MODEL],
        "all-reduce": [1 + LAYERS, MODEL * replicas // ranks],
    }
    if replicas == 1:
        del expected["all-reduce"]
    assert row["collectives"] == expected
