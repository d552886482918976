"""Compare losses with the losses of the pinned versions of torch and transformers.

Run this file in an environment with other versions: python -m pytest tests/test_versions.py
"""

import pytest

from conftest import SPLIT, curves_of
from marks import exhaustive

# The losses of torch 2.13.0 with transformers 5.23.0, on a CPU.
LOSSES = [5.9667125, 5.8170733, 5.6755233, 5.5211148, 5.3670635]
LOSSES += [5.2734270, 5.0691161, 5.1340919, 4.9781885, 4.7330828]


@pytest.mark.parametrize("chapter", ["01", *map(exhaustive, ("02", "04", "05", "06", "07", "08"))])
def test_losses_are_those_of_the_pinned_versions(tmp_path, chapter):
    job = chapter, ["--num-steps", 10, *SPLIT.get(chapter, [])]
    curve = curves_of(tmp_path, {1 if chapter == "01" else 2: {"run": job}})["run"]
    losses = [row["loss"] for step, row in curve.items() if step > 0]
    # Other CPUs add in a different order.
    assert losses == pytest.approx(LOSSES, abs=1e-4)
