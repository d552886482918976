"""Chapter 08: activations follow the formula, and only attention needs other ranks' tokens."""

import argparse
import json

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from conftest import ROOT, run_command
from families import ARGS, FAMILY_NAMES, MODERN, shrink


def check_activations(file):
    """Compare the activations of the tiny model in a file of results with the README's formula."""
    rows = json.loads(file.read_text())["rows"]
    one_rank = next(row["bytes"] for row in rows if row["ranks"] == 1)
    for row in rows:
        for length, size in row["bytes"].items():
            expected = one_rank[length] / row["ranks"]
            if row["style"] == "gather":
                # Add the keys and values of four layers with a width of 128, and the masks.
                expected += 4 * 2 * 4 * int(length) * 128 * 4 * (1 - 1 / row["ranks"])
                expected += 4 * int(length) ** 2 * 4 * (row["ranks"] > 1) / row["ranks"]
            assert size == pytest.approx(expected, rel=0.15), (row, length)


def test_published_activations_equal_the_formula():
    check_activations(ROOT / "benchmarks/results/context.json")


@pytest.mark.exhaustive
def test_measured_activations_equal_the_formula(tmp_path):
    command = [ROOT / "benchmarks/context.py", "--output", tmp_path / "it.json", "--lengths", 512]
    run_command(*command, "--only", "one rank", "gather, 2 ranks", "ulysses, 2 ranks", check=True)
    check_activations(tmp_path / "it.json")


def attend_to_self(_module, query, key, value, *_, **__):
    """Attend from each token to itself only; a wrong key would change the result."""
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    return ((query * key).sum(-1, keepdim=True) * value).transpose(1, 2).contiguous(), None


def difference_of_halves(chapter, kind):
    """Return the largest difference between the logits of half sequences and full sequences."""
    config = shrink(CONFIG_MAPPING[kind]())
    split = {"tensor_parallel_size": 1, "context_parallel_size": 2}
    split |= {"context_parallel_style": "gather", "pipeline_parallel_size": 1}
    chapter.build_model(argparse.Namespace(**ARGS, **split), config)
    model = AutoModelForCausalLM.from_config(config).eval()
    AttentionInterface.register("alone", attend_to_self)
    model.set_attn_implementation("alone")
    ids, positions = torch.arange(3, 35).view(2, 16), torch.arange(16)[None]
    with torch.no_grad():
        halves = zip(ids.split(8, 1), positions.split(8, 1), strict=True)
        parts = [model(input_ids=a, position_ids=b, use_cache=False).logits for a, b in halves]
        full = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return (full - torch.cat(parts, 1)).abs().max().item()


@pytest.mark.parametrize("kind", [kind for kind in MODERN if kind != "diffllama"])
def test_only_attention_mixes_tokens(load, kind):
    """So the rest of a model computes the same for any part of a sequence."""
    assert difference_of_halves(load("08"), kind) < 1e-5


@pytest.mark.exhaustive
def test_families_that_need_full_sequences_are_refused(load):
    """This covers the families that shrink() can make small."""
    differences, left_out = {}, {}
    for kind in FAMILY_NAMES:
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(shrink(CONFIG_MAPPING[kind]()))
            assert model.num_parameters() < 20_000_000
            differences[kind] = difference_of_halves(load("08"), kind)
        except (Exception, SystemExit) as error:
            left_out[kind] = f"{type(error).__name__}: {error}"
    assert not {kind: value for kind, value in differences.items() if value > 1e-5}
    assert len(differences) > 60, left_out
