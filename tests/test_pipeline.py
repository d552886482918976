"""Chapter 07: layers are spread evenly over stages that, one after another, are the model."""

import argparse
import json

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from conftest import ROOT, run_command
from families import FAMILY_NAMES, MODERN, shrink


@pytest.mark.parametrize(
    "layers, stages", [(4, 2), (4, 4), (5, 2), (8, 8), (32, 4), (80, 8), (126, 16), (126, 64)]
)
def test_layers_are_spread_evenly(load, capsys, layers, stages):
    """The embedding of the first stage and the head of the last stage count as a layer each."""
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
    line = capsys.readouterr().out
    assert line.startswith(f"layers of each stage: 0-{len(layers_of_stages[0]) - 1} ")
    assert line.endswith(f"-{layers - 1}\n") and line.count("-") == stages


def run_stages(chapter, kind, stages=2):
    """Return the output of a small model, and the output of its stages in sequence."""
    torch.manual_seed(0)
    config = shrink(CONFIG_MAPPING[kind]())
    model = AutoModelForCausalLM.from_config(config).eval()
    # build_model() replaces the head in the same way.
    model.get_output_embeddings().forward = torch.clone
    args = {"num_stages": stages, "pipeline_parallel_size": stages, "tensor_parallel_size": 1}
    args = argparse.Namespace(**args, model_name=kind, seq_length=16)
    chapter.check_model(args, model)
    parts = chapter.split_into_stages(args, model)
    ids = torch.arange(32).view(2, 16)
    with torch.no_grad():
        expected, hidden = model(input_ids=ids, use_cache=False).logits, ids
        for number in range(stages):
            hidden = chapter.build_stage(args, model, parts, number)(hidden)
    return expected, hidden


@pytest.mark.parametrize("kind", MODERN)
def test_stages_in_sequence_equal_the_model(load, kind):
    """Every bit is the same, or the family is refused."""
    if not CONFIG_MAPPING[kind].base_model_pp_plan and kind != "gpt2":
        with pytest.raises(SystemExit):
            run_stages(load("07"), kind)
    else:
        assert torch.equal(*run_stages(load("07"), kind))


@pytest.mark.exhaustive
def test_stages_of_every_family_equal_the_model(load):
    """This covers the causal models with a plan that shrink() can make small."""
    results, left_out, chapter = {}, {}, load("07")
    for kind in FAMILY_NAMES:
        if not CONFIG_MAPPING[kind].base_model_pp_plan:
            continue
        try:
            results[kind] = torch.equal(*run_stages(chapter, kind))
        except (Exception, SystemExit) as error:
            left_out[kind] = f"{type(error).__name__}: {error}"
    print(f"{len(results)} families; left out: {left_out}")
    assert all(results.values()), [kind for kind, same in results.items() if not same]
    assert len(results) > 50, left_out


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b"])
def test_bubble_equals_the_formula(tmp_path, schedule):
    """The layers sleep so long that all other work of the ranks does not matter."""
    command = [ROOT / "benchmarks/bubble.py", "--output", tmp_path / "rows.json"]
    run_command(*command, "--seconds", 0.4, "--only", schedule, check=True)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == (3 if schedule == "1f1b" else 1)
    for row in rows:
        assert abs(row["bubble"] - row["formula"]) < 0.03, row
