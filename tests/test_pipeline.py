"""Test that chapter 07 spreads layers evenly, and that stages wait as the formula predicts."""

import argparse
import json

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from conftest import ROOT, run_command


@pytest.mark.parametrize(
    "layers, stages", [(4, 2), (4, 4), (5, 2), (8, 8), (32, 4), (80, 8), (126, 16), (126, 64)]
)
def test_layers_are_spread_evenly(load, layers, stages):
    """Count the first stage's embedding and the last stage's head as a layer each."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(hidden_size=32, num_hidden_layers=layers, vocab_size=384)
        )
    parts = load("07").split_into_stages(argparse.Namespace(num_stages=stages), model)
    ends = [model.model.embed_tokens, model.model.norm, model.lm_head]
    layers_of_stages = [[part for part in stage if part not in ends] for stage in parts]
    assert [part for stage in layers_of_stages for part in stage] == [*model.model.layers]
    counts = list(map(len, layers_of_stages))
    assert min(counts) > 0
    counts[0], counts[-1] = counts[0] + 1, counts[-1] + 1
    assert max(counts) - min(counts) == (1 if (layers + 2) % stages else 0)
    assert ends[0] in parts[0] and ends[1] in parts[-1] and ends[2] in parts[-1]


@pytest.mark.exhaustive
def test_bubble_equals_the_formula(tmp_path):
    """Run bubble.py, whose layers sleep so long that the ranks' other work does not matter."""
    command = [ROOT / "benchmarks/bubble.py", "--output", tmp_path / "rows.json"]
    run_command(*command, check=True)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == 5
    for row in rows:
        assert abs(row["bubble"] - row["formula"]) < 0.03, row
