"""A run leaves a model that transformers loads, and whose weights have moved."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import SHORT, curves_of, difference, metrics, prepare_training
from runs import validation_loss

FAMILIES = ["tiny", "gpt2", "qwen3", "gemma3", "gemma3-window"]
ARGS = [*SHORT, "--seq-length", 40, "--num-steps", 4, "--eval-every", 4]


@pytest.fixture(scope="module")
def root(tmp_path_factory, models, small_text):
    """The folder of a finished run of each family."""
    root = tmp_path_factory.mktemp("weights")
    names = {family: family if family == "tiny" else models / family for family in FAMILIES}
    args = [*ARGS, "-d", small_text]
    curves_of(root, {1: {family: ("01", [*args, "-m", name]) for family, name in names.items()}})
    return root


def check_model(run_dir, load):
    """Check that transformers loads a finished model, and that it has the logged loss.

    The folder alone is enough, tokenizer included, and the checkpoint has the model's own names.
    """
    folder = run_dir / "model"
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert "causal_sdpa" not in (folder / "config.json").read_text()
    assert all(weight.dtype == torch.float32 for weight in model.parameters())
    state = torch.load(run_dir / "checkpoints/step-00000004/state.pt", weights_only=True)
    assert state["model"].keys() == model.state_dict().keys()
    loss = validation_loss(model, run_dir, state["args"], load("01"))
    assert loss == pytest.approx(metrics(run_dir)[4]["val_loss"], abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_finished_model_has_the_logged_validation_loss(root, load, family):
    check_model(root / family, load)


@pytest.mark.slow
def test_compiled_run_keeps_the_curve_and_the_names(load, small_text, tmp_path):
    """On two ranks, DDP must not split the graphs of the layers."""
    # One layer and one size of the batches need few graphs.
    args = [*ARGS, "-d", small_text, "--config", "num_hidden_layers=1", "--eval-samples", 8]
    runs = {1: {"plain": ("01", args)}, 2: {"compiled": ("02", [*args, "--compile"])}}
    curves = curves_of(tmp_path, runs)
    check_model(tmp_path / "compiled", load)
    assert difference(curves["plain"], curves["compiled"], names=["loss", "val_loss"]) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_causal_and_equals_sdpa(load, models, small_text, family):
    """Attention without a mask gives what "sdpa" gives with a mask, for sliding windows, too."""
    chapter = load("01")
    name = family if family == "tiny" else models / family
    # The sliding windows of the test models are longer than 16 tokens, and shorter than 100.
    for seq_length in (16, 100):
        words = ["-m", name, "-d", small_text, "-s", seq_length]
        args, model, *_ = prepare_training(chapter, *ARGS, *words)
        model.eval()
        reference = AutoModelForCausalLM.from_config(
            model.config, attn_implementation="sdpa"
        ).eval()
        reference.load_state_dict(model.state_dict())
        batch = torch.randint(3, 259, (2, args.seq_length))
        changed = batch.clone()
        changed[:, -1] = 5
        with torch.no_grad():
            logits, logits_of_changed = model(batch).logits, model(changed).logits
            assert torch.allclose(logits, reference(batch).logits, atol=1e-5)
        assert torch.allclose(logits[:, :-1], logits_of_changed[:, :-1], atol=1e-5)


def share_of_moved_weights(before, after):
    """Return the share of matrix entries that have changed."""
    pairs = [(before[name], after[name]) for name in before if before[name].ndim >= 2]
    num_moved = sum((one != other).sum().item() for one, other in pairs)
    return num_moved / sum(one.numel() for one, _ in pairs)


@pytest.mark.exhaustive
def test_bf16_weights_lose_small_updates(load):
    """As the README of chapter 01 reports: in 100 steps, 29% of weights in bf16 moved."""
    chapter = load("01")
    line = "--lr 3e-5 --warmup-steps 0 --precision bf16 --device cpu -s 64 --global-batch-size 8"
    shares, losses, device = [], [], torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16):
        args, model, _, train_set, _ = prepare_training(chapter, *line.split(), "--eval-samples", 8)
        optimizer = chapter.build_optimizer(args, model.to(dtype))
        start = {name: weight.clone() for name, weight in model.state_dict().items()}
        for step in range(1, 101):
            loss, _ = chapter.train_step(args, model, optimizer, train_set, step, device)
            losses += [loss.item()] if step in (1, 100) else []
        shares.append(share_of_moved_weights(start, model.state_dict()))
    assert shares[0] > 0.99 and shares[1] == pytest.approx(0.29, abs=0.02)
    assert losses == pytest.approx([5.97, 5.25, 5.97, 5.64], abs=0.03)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_pretrained_run_starts_from_the_published_weights(
    root, small_text, tmp_path, dtype, tolerance
):
    """A run that starts from a finished model starts at the model's last validation loss."""
    source = tmp_path / "published"
    AutoModelForCausalLM.from_pretrained(root / "tiny/model", dtype=dtype).save_pretrained(source)
    AutoTokenizer.from_pretrained(root / "tiny/model").save_pretrained(source)
    args = [*ARGS, "--pretrained", "-m", source, "-d", small_text, "--num-steps", 1]
    curve = curves_of(tmp_path, {1: {"run": ("01", args)}})["run"]
    expected = metrics(root / "tiny")[4]["val_loss"]
    assert curve[0]["val_loss"] == pytest.approx(expected, abs=tolerance)
    config = json.loads((tmp_path / "run/model/config.json").read_text())
    assert config["dtype"] == "float32"
