"""What a run leaves is a model that transformers loads, and its weights really moved."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import SHORT, metrics, run_well

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
    still = ["--lr", 3e-5, "--num-steps", 100, "--warmup-steps", 0, "--log-every", 100]
    jobs.append(("01", [*args, "-e", "small-lr", *still, "--checkpoint-every", 100]))
    run_well(1, jobs, root / "jobs", shares=2)
    return root


COMPILED = ["tiny-compiled", "tiny-ddp-compiled"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A folder with compiled runs on one rank and on two, and one to compare them with."""
    root = tmp_path_factory.mktemp("compiled")
    args = [*SHORT, "--save-dir", root]
    run_well(1, [("01", [*args, "-e", "tiny"])], root / "jobs-tiny")
    for world_size, chapter, name in zip((1, 2), ("01", "02"), COMPILED, strict=True):
        run_well(world_size, [(chapter, [*args, "--compile", "-e", name])], root / f"jobs-{name}")
    return root


def made_by(request, run):
    """Return the folder with a run, made now if it was not before."""
    return request.getfixturevalue("compiled" if run in COMPILED else "root")


RUNS = [*FAMILIES, *(pytest.param(run, marks=pytest.mark.slow) for run in COMPILED)]


@pytest.mark.parametrize("run", RUNS)
def test_checkpoints_load_in_transformers(request, run):
    """The names in every checkpoint are those of the plain model."""
    root = made_by(request, run)
    model = AutoModelForCausalLM.from_config(
        AutoModelForCausalLM.from_pretrained(root / run / "model").config
    )
    checkpoints = sorted((root / run / "checkpoints").iterdir())
    assert len(checkpoints) == 2
    for checkpoint in checkpoints:
        state = torch.load(checkpoint / "state.pt", weights_only=True)["model"]
        keys = model.load_state_dict(state, strict=False)
        assert (keys.missing_keys, keys.unexpected_keys) == ([], [])


@pytest.mark.parametrize("run", RUNS)
def test_finished_model_has_the_logged_validation_loss(request, run, load):
    """Loaded by its folder alone, tokenizer included, and attended to as transformers does."""
    root = made_by(request, run)
    folder = root / run / "model"
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert "causal_sdpa" not in (folder / "config.json").read_text()
    assert all(weight.dtype == torch.float32 for weight in model.parameters())
    chapter = load("01")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    state = torch.load(root / run / "checkpoints/step-00000020/state.pt", weights_only=True)
    args = type("Args", (), state["args"])
    _, held_out = chapter.build_data(args, tokenizer)
    with torch.no_grad():
        ids = held_out.long()
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss == pytest.approx(metrics(root / run)[20]["val_loss"], abs=1e-5)


@pytest.mark.slow
def test_compiling_changes_the_losses_but_little(compiled):
    one, other = metrics(compiled / "tiny"), metrics(compiled / "tiny-compiled")
    assert max(abs(one[step]["loss"] - other[step]["loss"]) for step in range(1, 21)) < 1e-4


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
            assert torch.allclose(
                ours(changed).logits[:, :-1], ours(batch).logits[:, :-1], atol=1e-5
            )


def moved(before, after):
    """Return the share of matrix entries that are no longer what they were."""
    pairs = [(before[name], after[name]) for name in before if before[name].ndim >= 2]
    return sum((one != other).sum().item() for one, other in pairs) / sum(
        one.numel() for one, _ in pairs
    )


def test_small_updates_are_not_lost(root, load):
    """At a rate of 3e-5 nearly every weight has moved after 100 steps, as in bf16 most had not."""
    chapter = load("01")
    state = torch.load(root / "small-lr/checkpoints/step-00000100/state.pt", weights_only=True)
    args = type("Args", (), state["args"])
    _, config = chapter.build_tokenizer_and_config(args)
    start = chapter.build_model(args, config).state_dict()
    assert moved(start, start) == 0.0
    assert moved(start, state["model"]) > 0.99


@pytest.mark.slow
def test_weights_in_bf16_would_lose_small_updates(load, monkeypatch):
    """What the README of chapter 01 says: 100 steps at 3e-5, 29% of bf16 weights ever moved."""
    chapter = load("01")
    line = "--lr 3e-5 --warmup-steps 0 --precision bf16 --device cpu -s 64 --global-batch-size 8"
    monkeypatch.setattr("sys.argv", ["train_llm.py", *line.split(), "--eval-samples", "8"])
    args = chapter.parse_args()
    tokenizer, config = chapter.build_tokenizer_and_config(args)
    train_set, _ = chapter.build_data(args, tokenizer)
    shares, losses = [], []
    for dtype in (torch.float32, torch.bfloat16):
        model = chapter.build_model(args, config).to(dtype)
        start = {name: weight.clone() for name, weight in model.state_dict().items()}
        optimizer = chapter.build_optimizer(args, model)
        for step in range(1, 101):
            loss, _ = chapter.train_step(
                args, model, optimizer, train_set, step, torch.device("cpu")
            )
        shares.append(moved(start, model.state_dict()))
        losses.append(loss.item())
    assert shares[0] > 0.99 and shares[1] == pytest.approx(0.29, abs=0.02)
    assert losses == pytest.approx([5.25, 5.64], abs=0.03)


def test_pretrained_starts_from_the_weights_it_names(root, tmp_path):
    """Continuing from a finished model starts at the validation loss that it ended with."""
    jobs = []
    for save_as in (torch.float32, torch.bfloat16):
        source = tmp_path / str(save_as)
        model = AutoModelForCausalLM.from_pretrained(root / "tiny/model", dtype=save_as)
        model.save_pretrained(source)
        AutoTokenizer.from_pretrained(root / "tiny/model").save_pretrained(source)
        args = [*SHORT, "--pretrained", "-m", source, "--num-steps", 1, "--save-dir", tmp_path]
        jobs.append(("01", [*args, "-e", f"from-{save_as}"]))
    run_well(1, jobs, tmp_path / "jobs")
    expected = metrics(root / "tiny")[20]["val_loss"]
    found = metrics(tmp_path / "from-torch.float32")[0]["val_loss"]
    assert found == pytest.approx(expected, abs=1e-6)
    found = metrics(tmp_path / "from-torch.bfloat16")[0]["val_loss"]
    assert found == pytest.approx(expected, abs=1e-2)
    config = json.loads((tmp_path / "from-torch.bfloat16/model/config.json").read_text())
    assert config["dtype"] == "float32"
