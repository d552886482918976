"""Test that chapters 01 and 05 initialize all families equally, and refuse unsuitable families.

Other families follow chapter 01 in benchmarks/every_family.py.
"""

import argparse
import json

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import every_family
from conftest import ROOT, prepare_training, run_command, user_error
from families import ARGS, MODERN, shrink


@pytest.fixture
def poisoned_memory():
    """Have torch fill new memory with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", MODERN)
def test_initial_values_are_set_and_equal_in_chapter_05(load, monkeypatch, poisoned_memory, kind):
    """Every bit of the weights and buffers is the same, and none is NaN, which equals nothing."""
    first, last, args = load("01"), load("05"), argparse.Namespace(**ARGS)
    monkeypatch.setattr(last, "fully_shard", lambda *_, **__: None)
    monkeypatch.setattr(last, "build_mesh", lambda *_: {"shard": None})
    # build_model() changes the configuration, so each chapter gets a copy of its own.
    full = first.build_model(args, shrink(CONFIG_MAPPING[kind]()))
    split = last.build_model(args, shrink(CONFIG_MAPPING[kind]()))
    split = last.shard(args, split, torch.device("cpu"))
    values, others = (
        dict(model.named_parameters()) | dict(model.named_buffers()) for model in (full, split)
    )
    assert values.keys() == others.keys()
    assert [name for name in values if not torch.equal(values[name], others[name])] == []


def model_of(chapter, kind, **settings):
    """Build a small model in a chapter; return the arguments and the model."""
    args = argparse.Namespace(**ARGS | {"seq_length": 48, "model_name": kind})
    return args, chapter.build_model(args, shrink(CONFIG_MAPPING[kind](), **settings))


@pytest.mark.parametrize(
    ("kind", "settings", "attention"),
    [
        ("llama", {}, "causal_sdpa"),
        ("gpt2", {}, "causal_sdpa"),
        ("qwen3_moe", {}, "causal_sdpa"),
        ("gemma3_text", {"sliding_window": 48}, "causal_sdpa"),
        ("gemma3_text", {"sliding_window": 47}, "sdpa"),
        ("llama4_text", {"attention_chunk_size": 48}, "causal_sdpa"),
        ("llama4_text", {"attention_chunk_size": 47}, "sdpa"),
        ("doge", {}, "sdpa"),  # its layers compute a mask
        ("deepseek_v32", {}, "sdpa"),  # its layers choose the tokens
    ],
)
def test_only_plain_causal_attention_skips_the_mask(load, kind, settings, attention):
    chapter = load("01")
    args, model = model_of(chapter, kind, **settings)
    assert model.config._attn_implementation == attention
    chapter.check_forward(args, model, torch.device("cpu"))
    if attention == "causal_sdpa":
        ids = torch.arange(3, 51)[None]
        with torch.no_grad():
            logits = model.eval()(input_ids=ids).logits
            model.set_attn_implementation("sdpa")
            expected = model(input_ids=ids).logits
        assert torch.allclose(logits, expected, atol=1e-5), "differs from attention with a mask"


LATER = "tokens attend to later tokens"
LOSS = "its loss is not the next-token loss"


@pytest.mark.parametrize(
    ("kind", "settings", "error"),
    [
        ("bert", {}, LATER),
        ("gemma3_text", {"use_bidirectional_attention": True}, LATER),
        ("llama", {"is_causal": False}, LATER),
        ("bart", {}, LOSS),  # does not shift its labels
        ("qwen3_moe", {"output_router_logits": True}, LOSS),
        ("gptj", {"rotary_dim": 64}, "cannot be trained on tokens alone: RuntimeError"),
    ],
)
def test_unsuitable_model_is_refused_with_the_reason(load, capsys, kind, settings, error):
    chapter = load("01")

    def build():
        args, model = model_of(chapter, kind, **settings)
        chapter.check_forward(args, model, torch.device("cpu"))

    assert f"--model-name {kind}: {error}" in user_error(capsys, build)


def test_router_loss_is_refused_with_the_setting_that_helps(load, capsys, models):
    words = ["-m", models / "mixtral", "--config", "output_router_logits=true"]
    error = user_error(capsys, prepare_training, load("01"), *words)
    assert "pass --config output_router_logits=false" in error


@pytest.mark.parametrize(
    ("kind", "settings", "splits"),
    [
        ("llama", {}, True),
        ("ministral3", {}, True),  # scales queries by position_ids
        # This model scales queries by its own positions.
        ("llama4_text", {"no_rope_layers": [1, 0]}, False),
        ("recurrent_gemma", {}, False),
    ],
)
def test_sequence_is_split_only_if_attention_alone_joins_tokens(load, kind, settings, splits):
    assert load("08").is_split_by_tokens(shrink(CONFIG_MAPPING[kind](), **settings)) == splits


def test_wrong_export_is_refused(load, one_rank_group, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    chapter, words = load("04"), ["--save-dir", tmp_path, "-s", 16, "--device", "cpu"]
    args, model, *_ = prepare_training(chapter, *words)
    model = chapter.shard(args, model, torch.device("cpu"))
    chapter.export_model(args, tmp_path, model, transformers.ByT5Tokenizer())
    with torch.no_grad():
        model.get_input_embeddings().weight.to_local()[3, 5] += 1
    error = user_error(capsys, chapter.check_export, tmp_path / "model", chapter.weights_of(model))
    assert "has other values of model.embed_tokens.weight than the model" in error


@pytest.mark.slow
def test_sample_of_families_follows_chapter_01_or_is_refused(tmp_path):
    results = tmp_path / "families.json"
    command = [ROOT / "benchmarks/every_family.py", "--output", results]
    done = run_command(*command, "--only", *every_family.SAMPLE, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(results.read_text())["rows"]
    expected = {(row, chapter) for row in every_family.SAMPLE for chapter in every_family.LAYOUTS}
    assert {(row["family"], row["chapter"]) for row in rows} == expected
    equal = [row["chapter"] for row in rows if row["verdict"] == "equal"]
    assert set(equal) == set(every_family.LAYOUTS) and len(equal) >= 20


def test_published_table_has_all_families_and_no_wrong_one():
    results = json.loads((ROOT / "benchmarks/results/families.json").read_text())
    verdicts = {(row["family"], row["chapter"]): row["verdict"] for row in results["rows"]}
    assert set(verdicts.values()) == {"equal", "refused"}
    families = {family for family, _ in verdicts}
    assert families | results["left_out"].keys() == set(every_family.ROWS)
    assert len(families) > 140 and len(verdicts) == len(families) * len(every_family.LAYOUTS)
    judged = every_family.judge([row | {"verdict": None} for row in results["rows"]])
    assert {(row["family"], row["chapter"]): row["verdict"] for row in judged} == verdicts
