"""What a run leaves is a model that transformers loads, and its weights really moved."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import SHORT, difference, metrics, prepare_training, run_or_fail
from runs import validation_loss

FAMILIES = ["tiny", "gpt2", "qwen3", "gemma3", "gemma3-window"]


@pytest.fixture(scope="module")
def root(tmp_path_factory, models):
    """Finished runs of several families."""
    root = tmp_path_factory.mktemp("weights")
    args = [*SHORT, "--save-dir", root]
    jobs = [
        ("01", [*args, "-m", family if family == "tiny" else models / family, "-e", family])
        for family in FAMILIES
    ]
    run_or_fail(1, jobs, root / "jobs", shares=2)
    return root


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A folder with compiled runs on one rank and on two."""
    root = tmp_path_factory.mktemp("compiled")
    for world_size, name in enumerate(COMPILED, start=1):
        args = [*SHORT, "--save-dir", root, "--compile", "-e", name]
        run_or_fail(world_size, [(f"0{world_size}", args)], root / f"jobs-{name}")
    return root


COMPILED = ["tiny-compiled", "tiny-ddp-compiled"]
RUNS = [*FAMILIES, *(pytest.param(run, marks=pytest.mark.slow) for run in COMPILED)]


@pytest.mark.parametrize("run", RUNS)
def test_finished_model_has_the_logged_validation_loss(request, run, load):
    """Loaded by its folder alone, tokenizer included; checkpoints have the plain model's names."""
    run_dir = request.getfixturevalue("compiled" if run in COMPILED else "root") / run
    folder = run_dir / "model"
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert "causal_sdpa" not in (folder / "config.json").read_text()
    assert all(weight.dtype == torch.float32 for weight in model.parameters())
    state = torch.load(run_dir / "checkpoints/step-00000020/state.pt", weights_only=True)
    assert state["model"].keys() == model.state_dict().keys()
    loss = validation_loss(model, run_dir, state["args"], load("01"))
    assert loss == pytest.approx(metrics(run_dir)[20]["val_loss"], abs=1e-5)


@pytest.mark.slow
def test_compiling_changes_the_losses_but_little(root, compiled):
    one, other = metrics(root / "tiny"), metrics(compiled / "tiny-compiled")
    assert difference(one, other, names=["loss"]) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_transformers_own_and_causal(load, models, family):
    """The attention without a mask gives what "sdpa" with one gives, sliding windows too."""
    chapter = load("01")
    name = family if family == "tiny" else str(models / family)
    for seq_length in (16, 100):  # shorter and longer than the windows of the test's models
        args = {"model_name": name, "pretrained": False, "compile": False, "seed": 0, "config": []}
        args = type("Args", (), args | {"seq_length": seq_length})
        _, config = chapter.build_tokenizer_and_config(args)
        ours = chapter.build_model(args, config).eval()
        theirs = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        theirs.load_state_dict(ours.state_dict())
        batch = torch.randint(3, 259, (2, seq_length))
        with torch.no_grad():
            assert torch.allclose(ours(batch).logits, theirs(batch).logits, atol=1e-5)
            changed = batch.clone()
            changed[:, -1] = 5
            earlier, same = (ours(each).logits[:, :-1] for each in (batch, changed))
            assert torch.allclose(earlier, same, atol=1e-5)


def moved(before, after):
    """Return the share of matrix entries that are no longer what they were."""
    pairs = [(before[name], after[name]) for name in before if before[name].ndim >= 2]
    return sum((one != other).sum().item() for one, other in pairs) / sum(
        one.numel() for one, _ in pairs
    )


@pytest.mark.slow
def test_weights_in_bf16_would_lose_small_updates(load):
    """What the README of chapter 01 says: 100 steps at 3e-5, 29% of bf16 weights ever moved."""
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
        shares.append(moved(start, model.state_dict()))
    assert shares[0] > 0.99 and shares[1] == pytest.approx(0.29, abs=0.02)
    assert losses == pytest.approx([5.97, 5.25, 5.97, 5.64], abs=0.03)


@pytest.mark.parametrize("dtype, near", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_pretrained_starts_from_the_weights_it_names(root, tmp_path, dtype, near):
    """Continuing from a finished model starts at the validation loss that it ended with."""
    source = tmp_path / "published"
    AutoModelForCausalLM.from_pretrained(root / "tiny/model", dtype=dtype).save_pretrained(source)
    AutoTokenizer.from_pretrained(root / "tiny/model").save_pretrained(source)
    args = [*SHORT, "--pretrained", "-m", source, "--num-steps", 1, "--save-dir", tmp_path]
    run_or_fail(1, [("01", [*args, "-e", "run"])], tmp_path / "jobs")
    expected = metrics(root / "tiny")[20]["val_loss"]
    assert metrics(tmp_path / "run")[0]["val_loss"] == pytest.approx(expected, abs=near)
    config = json.loads((tmp_path / "run/model/config.json").read_text())
    assert config["dtype"] == "float32"
