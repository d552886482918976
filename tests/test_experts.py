"""Test that biases balance the experts of chapter 09, and that a rank may receive no tokens."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import ROOT, SHORT, curves_of, difference, metrics, prepare_training
from marks import exhaustive, slow
from runs import copy_run, have_same_weights, read_checkpoint

TINY = ROOT / "09-expert-parallel/tiny-mixture"
# Use a low learning rate, because with a high rate scores would change faster than biases.
MIXTURE = ["-m", TINY, "--lr", 2e-4]
RATE = [*MIXTURE, "--expert-balance-rate", 0.01]
EP2, EP4 = ["--expert-parallel-size", 2], ["--expert-parallel-size", 4]
# Each layout has a number of ranks and a list of flags.
LAYOUTS = {"one": (1, []), "fsdp2": (2, []), "ep2": (2, EP2)}
MORE_LAYOUTS = {"ep4": (4, EP4), "full": (2, [*EP2, "--recompute", "full"])}


def is_bias(name):
    return name.endswith("e_score_correction_bias")


def biases_of(run_dir, step):
    """Return the biases of all routers in a checkpoint, [layers, experts]."""
    weights = read_checkpoint(run_dir, step)["model"]
    return torch.stack([weights[name] for name in sorted(weights) if is_bias(name)])


def test_step_moves_each_bias_toward_the_mean_load(load, one_rank_group, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    chapter, device = load("09"), torch.device("cpu")
    # Build no optimizer here, because it needs shards, and the model has no shards yet.
    with monkeypatch.context() as patch:
        patch.setattr(chapter, "build_optimizer", lambda *_: None)
        args, model, _, train_set, _ = prepare_training(chapter, *SHORT, *RATE)
    model = chapter.shard(args, model, device)
    chosen = []
    routers = [module for module in model.modules() if "Router" in type(module).__name__]
    for router in routers:
        router.register_forward_hook(lambda _router, _inputs, output: chosen.append(output[2]))
    optimizer = chapter.build_optimizer(args, model)
    chapter.train_step(args, model, optimizer, train_set, 1, device)
    assert len(routers) == len(chosen) == 3
    shares = []
    for router, experts in zip(routers, chosen, strict=True):
        loads = torch.bincount(experts.flatten(), minlength=16)
        assert loads.sum() == 8 * 64 * 2
        expected = 0.01 * (loads.float().mean() - loads).sign()
        assert torch.equal(router.e_score_correction_bias, expected) and expected.any()
        shares.append(loads.max() / loads.sum())
    assert model.largest_share == max(shares)


# ---- runs with balancing ---------------------------------------------------------------------
@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Train without balancing, and with balancing on several layouts; return the runs' folder."""
    root = tmp_path_factory.mktemp("balanced")
    runs = {1: {"off": ("09", MIXTURE)}}
    for name, (ranks, flags) in LAYOUTS.items():
        runs.setdefault(ranks, {})[name] = ("09", [*RATE, *flags])
    curves_of(root, runs)
    return root


@pytest.mark.slow
def test_balancing_lowers_the_load_of_the_most_loaded_expert(root):
    shares = {}
    for name in ("off", "one"):
        curve = metrics(root / name)
        shares[name] = sum(curve[step]["experts"] for step in range(11, 21)) / 10
    # Without biases, most tokens choose the same two of 16 experts in one of the layers.
    assert shares["off"] > 0.45
    assert shares["one"] < 0.7 * shares["off"]
    assert not biases_of(root / "off", 20).any()


def check_balanced_run(run_dir, reference):
    """Check that a run has the losses, the loads and the biases of the run on one rank."""
    curve, expected = metrics(run_dir), metrics(reference)
    assert difference(curve, expected) < 1e-5
    for step in range(1, 21):
        assert curve[step]["experts"] == expected[step]["experts"], step
    assert torch.equal(biases_of(run_dir, 20), biases_of(reference, 20))
    assert biases_of(run_dir, 20).any()


@pytest.mark.parametrize("name", [*map(slow, LAYOUTS), *map(exhaustive, MORE_LAYOUTS)])
def test_balance_does_not_depend_on_the_layout(root, tmp_path, name):
    folder = root if name in LAYOUTS else tmp_path
    if name in MORE_LAYOUTS:
        ranks, flags = MORE_LAYOUTS[name]
        curves_of(folder, {ranks: {name: ("09", [*RATE, *flags])}})
    check_balanced_run(folder / name, root / "one")


@pytest.mark.parametrize("first, second", [slow("fsdp2", "ep2"), exhaustive("ep2", "one")])
def test_balanced_run_continues_on_another_layout(root, tmp_path, first, second):
    copy_run(root / first, 10, tmp_path / "moved")
    ranks, flags = LAYOUTS[second]
    curves_of(tmp_path, {ranks: {"moved": ("09", [*RATE, *flags])}})
    check_balanced_run(tmp_path / "moved", root / "one")


@pytest.mark.slow
def test_finished_model_has_the_biases(root):
    model = AutoModelForCausalLM.from_pretrained(root / "ep2/model")
    buffers = dict(model.named_buffers())
    biases = torch.stack([buffers[name] for name in sorted(buffers) if is_bias(name)])
    assert torch.equal(biases, biases_of(root / "ep2", 20))


# ---- ranks without tokens --------------------------------------------------------------------
@pytest.mark.slow
def test_rank_without_tokens_changes_no_curve(tmp_path, small_tokens):
    """Publish a model with biases so high that all tokens choose experts of rank 0."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY))
    for name, bias in model.named_buffers():
        if is_bias(name):
            bias[:2] = 10
    model.save_pretrained(tmp_path / "hub")
    for path in TINY.glob("tokenizer*"):
        (tmp_path / "hub" / path.name).write_bytes(path.read_bytes())
    args = ["-m", tmp_path / "hub", "--pretrained", "--num-steps", 4]
    args += ["-d", small_tokens(tmp_path / "hub")]
    jobs = {"01": ("01", args)}, {"09": ("09", [*args, *EP2])}
    curves = curves_of(tmp_path, dict(zip((1, 2), jobs, strict=True)))
    assert [row["experts"] for row in curves["09"].values() if "experts" in row] == [0.5] * 4
    assert difference(curves["01"], curves["09"]) < 1e-5
    assert have_same_weights(tmp_path / "01", tmp_path / "09", tolerance=1e-4)
