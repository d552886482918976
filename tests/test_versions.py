"""Losses that do not depend on the versions of torch and transformers.

Run this file in an environment with other versions: python -m pytest tests/test_versions.py
"""

import pytest

from conftest import SHORT, metrics, run_or_fail

# From torch 2.13.0 with transformers 5.23.0, on a CPU.
LOSSES = [5.9667125, 5.8170733, 5.6755233, 5.5211148, 5.3670635]
LOSSES += [5.2734270, 5.0691161, 5.1340919, 4.9781885, 4.7330828]
LAYOUTS = {
    "01": (1, []),
    "02": (2, []),
    "04": (2, []),
    "05": (2, []),
    "06": (2, ["--tensor-parallel-size", 2]),
    "07": (2, ["--pipeline-parallel-size", 2, "--batch-size", 2]),
    "08": (2, ["--context-parallel-size", 2]),
}


@pytest.mark.parametrize(
    "chapter",
    ["01", *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name != "01")],
)
def test_losses_are_those_of_the_pinned_versions(tmp_path, chapter):
    world_size, flags = LAYOUTS[chapter]
    args = [*SHORT, "--num-steps", 10, *flags, "--save-dir", tmp_path, "-e", "run"]
    run_or_fail(world_size, [(chapter, args)], tmp_path / "jobs")
    rows = metrics(tmp_path / "run")
    found = [rows[step]["loss"] for step in range(1, 11)]
    # Other CPUs add in another order.
    assert found == pytest.approx(LOSSES, abs=1e-4)
