"""One command, one loss curve: the same arguments give the same losses everywhere."""

import pytest

from conftest import curves_of, difference

# What each world size runs: name -> (chapter, further arguments).
ACCUMULATION = {"": [], "-2": ["--batch-size", 4], "-4": ["--batch-size", 2]}
BF16 = ["--precision", "bf16"]
RUNS = ["02@1", "02@1-2", "02@1-4", "02@2", "02@2-2", "02@2-4", "02@4", "03@1", "03@2", "03@4"]
RUNS += ["04@1", "04@2", "04@4", "04@4-replicas"]  # and many more in test_fsdp.py
# and in test_large.py, test_tensor.py, test_pipeline.py, test_context.py
RUNS += [f"{chapter}@{ranks}" for chapter in ("05", "06", "07", "08") for ranks in (1, 2, 4)]
SPLIT = {
    "05": "--cpu-offload --recompute full --checkpoint-async",
    "06": "--tensor-parallel-size 2",
}
SPLIT |= {"07": "--pipeline-parallel-size 2 --batch-size 2", "08": "--context-parallel-size 2"}


@pytest.fixture(scope="module")
def curves(tmp_path_factory, models):
    """Every run's metrics, by name."""
    families = {name: ["-m", models / name] for name in ("gpt2", "qwen3")}
    both = {"-bf16": BF16} | {f"-{name}": args for name, args in families.items()}
    runs = {}
    for ranks in (1, 2, 4):
        runs[ranks] = {f"{chapter}@{ranks}": (chapter, []) for chapter in ("02", "03", "04")}
        runs[ranks] |= {f"02@{ranks}{name}": ("02", args) for name, args in both.items()}
    for ranks in (1, 2):
        runs[ranks] |= {f"02@{ranks}{name}": ("02", args) for name, args in ACCUMULATION.items()}
    runs[1] |= {f"01{name}": ("01", args) for name, args in (ACCUMULATION | both).items()}
    for chapter, flags in SPLIT.items():
        runs[1][f"{chapter}@1"] = (chapter, [])
        runs[2][f"{chapter}@2"] = runs[4][f"{chapter}@4"] = (chapter, flags.split())
    runs[4]["04@4-replicas"] = ("04", ["--replicas", 2])
    return curves_of(tmp_path_factory.mktemp("parity"), runs)


def test_accumulation_changes_nothing(curves):
    assert difference(curves["01"], curves["01-2"]) < 1e-5
    assert difference(curves["01"], curves["01-4"]) < 1e-5


@pytest.mark.parametrize("run", RUNS)
def test_world_size_changes_nothing(curves, run):
    assert difference(curves["01"], curves[run]) < 1e-5


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_other_families_agree(curves, family, world_size):
    assert difference(curves[f"01-{family}"], curves[f"02@{world_size}-{family}"]) < 1e-5


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bf16_agrees(curves, world_size):
    one, other = curves["01-bf16"], curves[f"02@{world_size}-bf16"]
    assert difference(one, other, names=["loss", "val_loss"]) < 5e-3
    assert difference(one, other, names=["grad_norm"], relative=True) < 5e-3  # norms reach 6 here
    assert difference(one, curves["01"], names=["loss", "val_loss"]) < 5e-2


def test_the_curve_is_learning(curves):
    """Equal curves prove little if nothing is learned."""
    losses = [row["loss"] for row in curves["01"].values() if "loss" in row]
    assert losses[-1] < losses[0] - 1


def test_losses_are_compared_in_every_step(curves):
    assert sorted(curves["01"]) == list(range(21))
    assert [step for step, row in curves["01"].items() if "val_loss" in row] == [0, 10, 20]
