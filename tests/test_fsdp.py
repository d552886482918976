"""Chapter 04: the curve of the chapters before, from weights that no rank holds whole."""

import json
import subprocess
import sys

import pytest

from conftest import ROOT, SHORT, difference, metrics, run_well

pytestmark = pytest.mark.slow
FAMILIES = ["gpt2", "qwen3", "mistral", "gemma3"]  # and tiny, a Llama
SETTINGS = {
    "": [],
    "-kept": ["--no-reshard-after-forward"],
    "-2": ["--batch-size", 2],  # 4 micro-steps on one rank, 2 on two, 1 on four
    "-1": ["--batch-size", 1],
    "-1-kept": ["--batch-size", 1, "--no-reshard-after-forward"],
    "-1-unsynced": ["--batch-size", 1, "--no-sync-each-micro-step"],
}
HYBRID = {
    "-replicas": ["--replicas", 2],
    "-replicas-1": ["--replicas", 2, "--batch-size", 1],
    "-replicas-1-unsynced": ["--replicas", 2, "--batch-size", 1, "--no-sync-each-micro-step"],
    "-replicas-kept": ["--replicas", 2, "--no-reshard-after-forward"],
}
BF16 = ["--precision", "bf16"]
COMPILED = ["--compile"]
WORLD_SIZES = [1, 2, 4]


def settings_of(world_size):
    """Return the settings in which a number of ranks is tried."""
    hybrid = HYBRID if world_size == 4 else {"-replicas": ["--replicas", world_size]}
    return SETTINGS | (hybrid if world_size > 1 else {})


@pytest.fixture(scope="module")
def curves(tmp_path_factory, models):
    """Every run's metrics, by name; one set of processes for each world size."""
    root = tmp_path_factory.mktemp("fsdp")
    for world_size in WORLD_SIZES:
        runs = {
            f"04@{world_size}{name}": ("04", args) for name, args in settings_of(world_size).items()
        }
        runs[f"04@{world_size}-bf16"] = ("04", BF16)
        if world_size == 2:
            runs |= {f"04@2{n}-compiled": ("04", [*SETTINGS[n], *COMPILED]) for n in ("", "-1")}
        for family in FAMILIES:
            runs[f"04@{world_size}-{family}"] = ("04", ["-m", models / family])
        if world_size == 1:
            runs |= {"01": ("01", []), "01-bf16": ("01", BF16)}
            runs |= {f"01-{family}": ("01", ["-m", models / family]) for family in FAMILIES}
        jobs = [
            (chapter, [*SHORT, *args, "--save-dir", root, "-e", name])
            for name, (chapter, args) in runs.items()
        ]
        shares = 2 if world_size == 1 else 1
        run_well(world_size, jobs, root / f"ranks{world_size}", shares=shares)
    return {folder.parent.name: metrics(folder.parent) for folder in root.glob("*/metrics.jsonl")}


@pytest.mark.parametrize(
    "run", [f"04@{size}{name}" for size in WORLD_SIZES for name in settings_of(size)]
)
def test_settings_change_nothing(curves, run):
    assert difference(curves["01"], curves[run]) < 1e-5


@pytest.mark.parametrize("run", ["04@2-compiled", "04@2-1-compiled"])
def test_compiled_agrees(curves, run):
    assert difference(curves["01"], curves[run]) < 2e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_families_agree(curves, family, world_size):
    assert difference(curves[f"01-{family}"], curves[f"04@{world_size}-{family}"]) < 1e-5


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_bf16_agrees(curves, world_size):
    one, other = curves["01-bf16"], curves[f"04@{world_size}-bf16"]
    assert difference(one, other, names=["loss", "val_loss"]) < 5e-3
    assert difference(one, other, names=["grad_norm"], relative=True) < 5e-2
    assert difference(one, other, names=["loss"]) > 0


# ---- what it costs ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def costs(tmp_path_factory):
    """What `benchmarks/fsdp.py costs` finds for a small model: rows by ranks and setting."""
    output = tmp_path_factory.mktemp("costs") / "costs.json"
    command = [sys.executable, ROOT / "benchmarks/fsdp.py", "costs", "--output", output]
    command += ["--layers", str(LAYERS), "--width", "128"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    rows = json.loads(output.read_text())["costs"]
    return {(row["ranks"], row["setting"]): row for row in rows}


LAYERS = 4
LAYER = 4 * (128**2 * 4 + 3 * 128 * 352 + 2 * 128)  # bytes of a layer's weights: Llama
ROOT_GROUP = 4 * (2 * 384 * 128 + 128)  # of all that is in no layer
MODEL = LAYERS * LAYER + ROOT_GROUP
ALL = [(ranks, name) for ranks in (1, 2, 4) for name in ("as it is", "layers kept")]
ALL += [(ranks, f"2 micro-steps{how}") for ranks in (1, 2, 4) for how in ("", ", unsynced")]
ALL += [(4, "2 replicas"), (4, "2 replicas, 2 micro-steps")]


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
    times = 2 if "micro-steps" in setting else 1
    again = 0 if setting == "layers kept" else LAYERS - 1  # for the backward, but for the last
    gathers = [times * (1 + LAYERS + again), times * (MODEL + again * LAYER)]
    reduced = 1 if "unsynced" in setting else times
    expected = {
        "all-gather": gathers,
        "reduce-scatter": [reduced * (1 + LAYERS), reduced * MODEL],
        "all-reduce": [1 + LAYERS, MODEL * replicas // ranks],
    }
    if replicas == 1:
        del expected["all-reduce"]
    assert row["collectives"] == (expected if ranks > 1 else {})
