"""Test that chapters initialize and train all families equally, and refuse unsuitable families.

The table of docs/families.md comes from these runs. `make families` trains each family in those
chapters whose results are missing in the file RESULTS.
"""

import argparse
import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import SafetensorError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from chats import distances, loss_of_documents, plain_model, split_documents
from conftest import (
    ROOT,
    SCRIPTS,
    SPLIT,
    difference,
    metrics,
    prepare_tokens,
    prepare_training,
    run_jobs,
    user_error,
)
from families import (
    ARGS,
    MODERN,
    SENSITIVE,
    VARIED_FAMILIES,
    fast_byte_tokenizer,
    save_small_model,
    shrink,
)
from marks import exhaustive, slow
from runs import call_on_ranks, evaluate_export

RESULTS = ROOT / "benchmarks/results/families.json"
# Chapter 01 trains on one rank, and the other chapters train on two ranks.
CHAPTERS = ("01", "02", "04", "05", "06", "07", "08")
FLAGS = """--device cpu --precision fp32 -s 32 --global-batch-size 4 -b 2 --num-steps 4
    --log-every 1 --eval-samples 4 --warmup-steps 1""".split()
# In the published table, rows about packed conversations have this name in place of a chapter's
# number.
PACKED = "conversations"
# Without --record, the tests train these families. An exhaustive run also trains the families in
# RARE.
SAMPLE = "llama qwen3_moe lfm2".split()
# For these families, the tests tokenize the text again, because AutoTokenizer does not load the
# saved tokenizer unchanged.
OWN_TOKENIZER = ["qwen2", "qwen3_5_moe_text"]
RARE = ["bart", "gemma3_text+sliding_window=8", "apertus", "bert"]
RARE += ["llama4_text+attention_chunk_size=8"]


@pytest.fixture
def poisoned_memory():
    """Let torch fill new memory with NaN, so that a test finds values that a model never sets."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", MODERN)
def test_initial_values_are_set_and_equal_in_chapter_05(load, monkeypatch, poisoned_memory, kind):
    """Check that chapters 01 and 05 set all weights and buffers to the same values.

    A value that a chapter does not set is NaN, which equals nothing.
    """
    first, last, args = load("01"), load("05"), argparse.Namespace(**ARGS)
    monkeypatch.setattr(last, "fully_shard_to_sum", lambda *_, **__: None)
    monkeypatch.setattr(last, "build_mesh", lambda *_: {"shard": argparse.Namespace(size=int)})
    # Create a configuration for each chapter, because build_model() may change its argument.
    full = first.build_model(args, shrink(CONFIG_MAPPING[kind]()))
    split = last.build_model(args, shrink(CONFIG_MAPPING[kind]()))
    split = last.shard(args, split, torch.device("cpu"))
    values, others = (
        dict(model.named_parameters()) | dict(model.named_buffers()) for model in (full, split)
    )
    assert values.keys() == others.keys()
    assert [name for name in values if not torch.equal(values[name], others[name])] == []


def model_of(chapter, kind, **settings):
    """Build a small model with a chapter's script; return the arguments and the model."""
    args = argparse.Namespace(**ARGS | {"seq_length": 48, "model_name": kind})
    return args, chapter.build_model(args, shrink(CONFIG_MAPPING[kind](), **settings))


@pytest.mark.parametrize(
    ("kind", "settings", "is_needed"),
    [
        ("llama", {}, False),
        ("gpt2", {}, False),
        ("qwen3_moe", {}, False),
        ("gemma3_text", {"sliding_window": 48}, False),
        ("gemma3_text", {"sliding_window": 47}, True),
        ("llama4_text", {"attention_chunk_size": 48}, False),
        ("llama4_text", {"attention_chunk_size": 47}, True),
        ("doge", {}, True),  # its layers compute a mask
        ("deepseek_v32", {}, True),  # its layers choose the tokens
    ],
)
def test_only_plain_causal_attention_needs_no_mask(load, kind, settings, is_needed):
    args, model = model_of(load("01"), kind, **settings)
    assert load("06").needs_mask(args, model) == is_needed


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("bert", {}),
        # RoCBert is the hardest case, because its later tokens change the early logits the least.
        ("roc_bert", {}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("llama", {"is_causal": False}),
    ],
)
def test_model_that_sees_later_tokens_is_refused(chapter, capsys, kind, settings):
    args, model = model_of(chapter, kind, **settings)
    error = user_error(capsys, chapter.check_causal, args, model, torch.device("cpu"))
    assert f"--model-name {kind}: tokens see later tokens; choose a causal model" in error


def test_frozen_embedding_changes_no_check(chapter):
    args, model = model_of(chapter, "llama")
    model.get_input_embeddings().requires_grad_(False)
    chapter.check_causal(args, model, torch.device("cpu"))


def test_router_loss_is_refused_with_the_setting_that_helps(chapter, capsys, models):
    words = ["-m", models / "mixtral", "--config", "output_router_logits=true"]
    error = user_error(capsys, prepare_training, chapter, *words)
    assert "no router loss is added; pass --config output_router_logits=false" in error


@pytest.mark.parametrize(
    ("kind", "settings", "splits"),
    [
        ("llama", {}, True),
        ("ministral3", {}, True),  # scales queries by position_ids
        # This model scales queries by positions that it computes itself, not by position_ids.
        ("llama4_text", {"no_rope_layers": [1, 0]}, False),
        ("recurrent_gemma", {}, False),
    ],
)
def test_sequence_is_split_only_if_attention_alone_joins_tokens(load, kind, settings, splits):
    assert load("08").is_split_by_tokens(shrink(CONFIG_MAPPING[kind](), **settings)) == splits


AUTOCAST = [slow("01", "bf16"), slow("fp16", "fp16")]
AUTOCAST += [exhaustive("02", "bf16"), exhaustive("diagnosing-errors", "bf16")]


@pytest.mark.parametrize(("chapter", "precision"), AUTOCAST)
def test_autocast_computes_experts_in_its_precision(models, tmp_path, chapter, precision):
    words = ["-m", models / "mixtral", "--device", "cpu", "--precision", precision]
    cases = {"words": [*words, "-s", 16, "--save-dir", tmp_path]}
    types = call_on_ranks(1, "expert_types.py", cases, tmp_path / "types", SCRIPTS[chapter])
    assert types == [{"bf16": "torch.bfloat16", "fp16": "torch.float16"}[precision]]


def test_cut_export_is_refused(load, one_rank_group, monkeypatch, tmp_path):
    """Cut off the end of an exported file; some full disks do this without reporting an error."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    chapter, words = load("04"), ["--save-dir", tmp_path, "-s", 16, "--device", "cpu"]
    args, model, *_ = prepare_training(chapter, *words)
    model = chapter.shard(args, model, torch.device("cpu"))
    save = chapter.save
    monkeypatch.setattr(chapter, "save", lambda *options: save(*options)[:-4])
    with pytest.raises(SafetensorError, match="file not fully covered"):
        chapter.export_model(args, tmp_path, model, transformers.ByT5Tokenizer())
    assert not (tmp_path / "model").exists()


# ---- all families ------------------------------------------------------------------------------
def published():
    """Return the published table as a dictionary with its rows, and the families that have none."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": [], "left_out": {}}


def published_chapters(family):
    """Return the chapters that have a row about a family in the published table."""
    return {row["chapter"] for row in published()["rows"] if row["family"] == family}


def pytest_generate_tests(metafunc):
    """Choose the families to test: a few or, with --record, all that lack a published result."""
    is_recording = metafunc.config.getoption("--record")
    for argument, chapters, families in (
        ("family", {*CHAPTERS}, [*SAMPLE, *map(exhaustive, RARE)]),
        ("packed_family", {PACKED}, [*SAMPLE, "bloom"]),
    ):
        if argument in metafunc.fixturenames:
            candidates = [name for name in VARIED_FAMILIES if name not in published()["left_out"]]
            missing = [name for name in candidates if chapters - published_chapters(name)]
            metafunc.parametrize(argument, missing if is_recording else families)


@pytest.fixture
def publish(request):
    """Return a function that updates the published file with its argument, if --record is given."""
    from harness import describe_machine, keep

    is_recording = request.config.getoption("--record")
    return partial(keep, RESULTS if is_recording else None, describe_machine(gpus=False))


@pytest.fixture(scope="module")
def license_tokens(tmp_path_factory):
    """Tokenize the file LICENSE with the small models' tokenizer; return the folder of tokens."""
    folder = tmp_path_factory.mktemp("license")
    (folder / "LICENSE.txt").write_text((ROOT / "LICENSE").read_text())
    fast_byte_tokenizer().save_pretrained(folder / "model")
    transformers.LlamaConfig().save_pretrained(folder / "model")
    return prepare_tokens(folder / "LICENSE.txt", folder / "license.tokens", folder / "model")


def train(family, chapter, folder, tokens):
    """Train a small model of a family; return (metrics, None), or (None, error) after a failure."""
    ranks = 1 if chapter == "01" else 2
    words = ["-m", folder / family, "-d", tokens, "--save-dir", folder, "-e", chapter]
    words += [*SPLIT.get(chapter, []), *FLAGS, *["--lr", "1e-4"] * (family in SENSITIVE)]
    [results] = run_jobs(ranks, [(chapter, words)], folder / f"{chapter}-logs", timeout=120)
    errors = "".join(result["stderr"] for result in results if result["status"] == 2)
    if refusal := re.search(r"^train_llm.py: error: (.*)", errors, re.M):
        return None, refusal[1].replace(f"{folder}/", "")
    path = folder / chapter / "metrics.jsonl"
    if not path.exists() or max(metrics(path.parent)) == 0:
        # The script logged no training step, so find the exceptions that stopped its ranks.
        errors = "".join(result["stderr"] for result in results)
        found = re.findall(r"^(?:\w+\.)*\w+Error: .*", errors, re.M)
        # Return the first error that Gloo did not raise. Gloo only reports a closed connection, and
        # later errors are consequences.
        return None, next(error for error in found if "/gloo/" not in error)
    assert [result["status"] for result in results] == [0] * ranks, results
    return metrics(folder / chapter), None


@pytest.mark.slow
def test_weights_without_gradients_train_under_ddp(tmp_path, license_tokens):
    """Compare chapters 01 and 02 on a model with sparse attention.

    The weights that choose the tokens for attention get no gradient.
    """
    save_small_model("deepseek_v32", tmp_path / "deepseek_v32")
    curves = [
        train("deepseek_v32", chapter, tmp_path, license_tokens)[0] for chapter in ("01", "02")
    ]
    assert difference(*curves, names=["loss", "val_loss"]) <= 1e-5


@pytest.mark.slow
def test_family_follows_chapter_01_or_is_refused(
    load, request, tmp_path, publish, license_tokens, family
):
    try:
        save_small_model(family, tmp_path / family)
    except ValueError as reason:
        publish({"left_out": published()["left_out"] | {family: str(reason)}})
        pytest.skip(f"{family}: {reason}")
    tokens = license_tokens
    if family in OWN_TOKENIZER:
        text = Path(license_tokens).with_name("LICENSE.txt")
        tokens = prepare_tokens(text, tmp_path / "own.tokens", tmp_path / family)
    rows, reference = [], None
    known = published_chapters(family) - {"01"} if request.config.getoption("--record") else set()
    for chapter in sorted({*CHAPTERS} - known):
        curve, refusal = train(family, chapter, tmp_path, tokens)
        row = {"family": family, "chapter": chapter}
        if refusal:
            rows.append(row | {"verdict": "refused", "refused": refusal})
            continue
        reference = curve if chapter == "01" else reference
        assert reference, f"chapter {chapter} trains a model that chapter 01 refuses"
        assert difference(curve, reference, names=["loss", "val_loss"]) <= 1e-5
        # Compare the gradient norms of only two steps, because AdamW amplifies rounding errors in
        # later steps.
        first_steps = [{step: rows[step] for step in (1, 2)} for rows in (curve, reference)]
        assert difference(*first_steps, names=["grad_norm"], relative=True) <= 1e-4
        loss = evaluate_export(tmp_path / chapter, max(curve), load("01"))
        assert abs(loss - curve[max(curve)]["val_loss"]) <= 1e-5, f"chapter {chapter}: wrong export"
        rows.append(row | {"verdict": "equal"})
    trained = [(family, row["chapter"]) for row in rows]
    kept = [row for row in published()["rows"] if (row["family"], row["chapter"]) not in trained]
    publish({"rows": [*kept, *rows]})
    expected = {row["chapter"]: row for row in published()["rows"] if row["family"] == family}
    for row in rows:
        assert row["verdict"] == expected[row["chapter"]]["verdict"], row


# ---- packed conversations ----------------------------------------------------------------------
# Each inner list has the lengths, in tokens, of the documents in one sample.
LENGTHS = [[13, 8, 11], [5, 27], [32], [1, 2, 29]]


def packed_samples(chapter):
    """Return samples of random tokens; each sample has documents with the lengths in LENGTHS."""
    samples = torch.randint(3, 259, (len(LENGTHS), 32), generator=torch.Generator().manual_seed(0))
    for sample, lengths in zip(samples, LENGTHS, strict=True):
        sample[torch.tensor([0, *lengths[:-1]]).cumsum(0)] |= chapter.FIRST | chapter.CONTEXT
    return samples


def distance_from_documents_alone(chapter, folder):
    """Return the largest relative distance between a weight's gradients with and without packing.

    Raise SystemExit if the script refuses to pack documents for this model, or if the loss is not
    finite.
    """
    sizes = {"global_batch_size": 4, "micro_batch_size": 2, "accumulation": 2, "skip_steps": 0}
    sizes |= {"config": [], "model_name": str(folder), "seq_length": 32}
    args = argparse.Namespace(**ARGS | sizes)
    _, config = chapter.build_tokenizer_and_config(args)
    model = chapter.shard(args, chapter.build_model(args, config), torch.device("cpu"))
    chapter.check_causal(args, model, torch.device("cpu"))
    chapter.check_packing(args, model, torch.device("cpu"))
    samples, plain = packed_samples(chapter), plain_model(model)
    loss = loss_of_documents(plain, split_documents(chapter, samples))
    loss.backward()
    if not loss.isfinite():
        # Refuse the model, because the script would fail at its first log line.
        sys.exit("a gradient in steps 1 to 1 was not finite; lower --lr")
    grads = {name: weight.grad for name, weight in plain.named_parameters()}
    norms = {name: 0.0 if grad is None else grad.norm() for name, grad in grads.items()}
    # Replace gradients whose norms are much smaller than the largest norm by 0, so that the
    # comparison ignores them: they are inexact in float32 even without packing.
    smallest = 2e-5 * max(norms.values())
    gradients = {
        name: grad if norms[name] > smallest else torch.zeros(()) for name, grad in grads.items()
    }
    train_set = chapter.Samples(0, samples, iter(()))
    return distances(chapter, args, model, train_set, loss.item(), gradients)[1]


@pytest.mark.slow
def test_family_packs_with_the_gradients_of_documents_alone_or_is_refused(
    load, one_rank_group, monkeypatch, tmp_path, publish, packed_family
):
    try:
        save_small_model(packed_family, tmp_path / packed_family)
    except ValueError as reason:
        pytest.skip(f"{packed_family}: {reason}")
    chapter, row = load(PACKED), {"family": packed_family, "chapter": PACKED}
    # If the script refuses the model, raise SystemExit with the message.
    monkeypatch.setattr(chapter, "fail", sys.exit)
    try:
        apart = distance_from_documents_alone(chapter, tmp_path / packed_family)
        assert apart <= 1e-4
        row |= {"verdict": "equal"}
    except SystemExit as reason:
        row |= {"verdict": "refused", "refused": str(reason).replace(f"{tmp_path}/", "")}
    publish({"rows": [*published()["rows"], row]})
    assert row["verdict"] == next(
        known["verdict"]
        for known in published()["rows"]
        if (known["family"], known["chapter"]) == (packed_family, PACKED)
    )


def test_published_table_has_all_families_and_no_wrong_one():
    verdicts = {(row["family"], row["chapter"]): row["verdict"] for row in published()["rows"]}
    assert set(verdicts.values()) == {"equal", "refused"}
    families = {family for family, _ in verdicts}
    assert families | published()["left_out"].keys() == set(VARIED_FAMILIES)
    assert len(families) > 140 and len(verdicts) == len(families) * len([*CHAPTERS, PACKED])
