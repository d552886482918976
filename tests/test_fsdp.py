"""Chapter 04: the curve of the chapters before, from weights that no rank holds whole."""

import pytest

from conftest import SHORT, difference, metrics, run_well

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
