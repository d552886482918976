"""Test that the size of chapter 08's activations matches the formula in its README."""

import json

import pytest

from conftest import ROOT


def test_activations_equal_the_formula():
    """Compare the recorded bytes of the tiny model's activations with chapter 08's formula."""
    rows = json.loads((ROOT / "benchmarks/results/context.json").read_text())["rows"]
    one_rank = next(row["bytes"] for row in rows if row["ranks"] == 1)
    for row in rows:
        for length, size in row["bytes"].items():
            expected = one_rank[length] / row["ranks"]
            if row["style"] == "gather":
                # Add the keys and values that a rank gathers from the other ranks, in four layers
                # with a width of 128. Then add the masks.
                expected += 4 * 2 * 4 * int(length) * 128 * 4 * (1 - 1 / row["ranks"])
                expected += 4 * int(length) ** 2 * 4 * (row["ranks"] > 1) / row["ranks"]
            assert size == pytest.approx(expected, rel=0.15), (row, length)
