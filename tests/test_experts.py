"""Test that chapter 09 balances its experts, and that it trains if a rank receives no tokens."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from conftest import ROOT, SCRIPTS, SHORT, change_file, curves_of, difference, metrics, parse
from marks import exhaustive, slow
from runs import copy_run, have_same_weights, read_checkpoint

TINY = ROOT / "09-expert-parallel/tiny-mixture"
# Use a low learning rate, because with a high rate the routers' scores would change faster than the
# biases.
MIXTURE = ["-m", TINY, "--lr", 2e-4]
RATE = [*MIXTURE, "--expert-balance-rate", 0.01]
EP2 = ["--expert-parallel-size", 2]
# Each layout has a number of ranks and a list of flags. With --recompute full, the script counts
# each token twice, but the shares of the experts stay the same.
LAYOUTS = {"one": (1, []), "fsdp2": (2, []), "ep2": (2, [*EP2, "--recompute", "full"])}


def is_bias(name):
    return name.endswith("e_score_correction_bias")


def biases_of(run_dir, step):
    """Return the biases of all routers in a checkpoint as a tensor of shape [layers, experts]."""
    weights = read_checkpoint(run_dir, step)["model"]
    return torch.stack([weights[name] for name in sorted(weights) if is_bias(name)])


@pytest.fixture
def sharded(load, one_rank_group, monkeypatch):
    """Return a function that prepares a training step of chapter 09 with the given flags.

    The function returns the chapter, the arguments, the sharded model and the training samples.
    """
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    chapter = load("09")

    def prepare(*flags):
        args = parse(chapter, *SHORT, *flags)
        tokenizer, config = chapter.build_tokenizer_and_config(args)
        model = chapter.shard(args, chapter.build_model(args, config), torch.device("cpu"))
        train_set, _ = chapter.build_data(args, tokenizer)
        return chapter, args, model, train_set

    return prepare


def test_step_moves_each_bias_toward_the_mean_load(sharded):
    chapter, args, model, train_set = sharded(*RATE)
    chosen = []
    routers = [module for module in model.modules() if "Router" in type(module).__name__]
    for router in routers:
        router.register_forward_hook(lambda _router, _inputs, output: chosen.append(output[2]))
    optimizer = chapter.build_optimizer(args, model)
    chapter.train_step(args, model, optimizer, train_set, 1, torch.device("cpu"))
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
    # Without biases, more than 90% of the tokens choose the same expert in one of the layers. Each
    # token chooses two experts, so this expert has more than 45% of the load.
    assert shares["off"] > 0.45
    assert shares["one"] < 0.7 * shares["off"]
    assert not biases_of(root / "off", 20).any()


def check_balanced_run(run_dir, reference):
    """Check that two runs have equal biases and largest loads, and losses within 1e-5."""
    curve, expected = metrics(run_dir), metrics(reference)
    assert difference(curve, expected) < 1e-5
    assert difference(curve, expected, names=["experts"]) == 0
    assert torch.equal(biases_of(run_dir, 20), biases_of(reference, 20))
    assert biases_of(run_dir, 20).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_balance_does_not_depend_on_the_layout(root, name):
    check_balanced_run(root / name, root / "one")


@pytest.mark.exhaustive
def test_first_steps_are_the_same_on_four_ranks(root, tmp_path):
    job = "09", [*RATE, "--expert-parallel-size", 4]
    curves = metrics(root / "one"), curves_of(tmp_path, {4: {"ep4": job}})["ep4"]
    # Compare only eight steps, because on some CPUs, two experts have almost equal scores in a
    # later step, and a rounding error decides between them.
    curve, expected = ({step: rows[step] for step in range(9)} for rows in curves)
    assert difference(curve, expected) < 1e-5
    assert difference(curve, expected, names=["experts"]) == 0


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


# ---- the loss for balancing ------------------------------------------------------------------
# Give the loss for balancing a high weight, so that it clearly changes the gradients.
LOSS = ["--lr", 1e-3, "--expert-balance-loss", 1, "-b", 2, "--num-steps", 8]
LOSS_LAYOUTS = [
    exhaustive(1, "--compile"),
    exhaustive(2, "-b 4"),
    exhaustive(2, "--tensor-parallel-size 2"),
    slow(2, "--expert-parallel-size 2 --recompute full"),
    slow(4, "--expert-parallel-size 2 --pipeline-parallel-size 2 -b 1"),
    exhaustive(4, "--context-parallel-size 2 --replicas 2"),
]


def gradients_of(chapter, args, model, train_set):
    """Return the loss of the first step, and a dictionary of the full gradients."""
    loss = chapter.forward_backward(args, model, train_set, 1, torch.device("cpu"))
    weights = model.named_parameters()
    gradients = {name: weight.grad.full_tensor().clone() for name, weight in weights}
    model.zero_grad()
    return loss, gradients


@pytest.mark.parametrize("family", ["qwen3_moe", slow("mixtral"), slow("olmoe"), slow("gpt_oss")])
def test_balance_loss_has_the_gradient_of_the_textbook(sharded, layout_models, family):
    """Compare chapter 09's gradients with autograd's gradients of Switch Transformers' loss.

    Compute both losses for balancing with the same token counts.
    """
    words = ["-m", layout_models / family, *LOSS, "-b", 8]
    chapter, args, model, train_set = sharded(*words)
    loss, without = gradients_of(chapter, args, model, train_set)
    layers, experts = len(chapter.routers_of(model)), len(chapter.routers_of(model)[0].weight)
    totals = torch.arange(layers * experts).view(layers, experts) + 1
    model.token_totals = totals
    same_loss, found = gradients_of(chapter, args, model, train_set)
    assert same_loss == loss
    # Compute the same step without chapter 09's loss for balancing, but add Switch Transformers'
    # loss to the loss of the model.
    model.token_totals = torch.zeros(0)
    original, logits_of_layers = chapter.loss_of, []
    for router in chapter.routers_of(model):
        router.register_forward_hook(lambda *it: logits_of_layers.append(it[-1][0]))

    def with_textbook(args, model, batch):
        loss = original(args, model, batch)
        for logits, counts in zip(logits_of_layers, totals, strict=True):
            means = logits.softmax(-1, dtype=torch.float32).mean(0)
            shares = counts / counts.sum()
            loss = loss + args.expert_balance_loss * experts * (shares * means).sum()
        return loss

    chapter.loss_of = with_textbook
    _, expected = gradients_of(chapter, args, model, train_set)
    assert any((found[name] - without[name]).norm() > 0.01 * without[name].norm() for name in found)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name


@pytest.fixture(scope="module")
def loss_root(tmp_path_factory, layout_models):
    """Train on one rank with and without the loss for balancing; return the runs' folder."""
    root = tmp_path_factory.mktemp("balance-loss")
    words = ["-m", layout_models / "qwen3_moe", *LOSS]
    off = [*words, "--expert-balance-loss", 0]
    curves_of(root, {1: {"one": ("09", [*words, "-b", 8]), "off": ("09", off)}})
    return root


@pytest.mark.parametrize("ranks, flags", LOSS_LAYOUTS)
def test_balance_loss_does_not_depend_on_the_layout(
    loss_root, layout_models, tmp_path, ranks, flags
):
    words = ["-m", layout_models / "qwen3_moe", *LOSS, *flags.split()]
    curve = curves_of(tmp_path, {ranks: {"run": ("09", words)}})["run"]
    expected = metrics(loss_root / "one")
    assert difference(curve, expected) < 1e-5
    assert difference(curve, expected, names=["experts"]) == 0
    assert difference(expected, metrics(loss_root / "off"), names=["grad_norm"]) > 1e-3


# Each mistake replaces the first text in the script with the second text, so that the loss depends
# on the layout.
MISTAKES = {
    "counts of one rank": ("    dist.all_reduce(totals)\n", ""),
    "counts of one micro-batch": (
        "costs_of(args, model.token_totals[number])",
        "costs_of(args, count_tokens(output[2], len(router.weight)))",
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("mistake", MISTAKES)
def test_comparison_of_layouts_finds_a_mistake(layout_models, tmp_path, mistake):
    script = change_file(SCRIPTS["09"], *MISTAKES[mistake], copy=tmp_path / "changed.py")
    words = ["-m", layout_models / "qwen3_moe", *LOSS]
    runs = {1: {"one": (script, [*words, "-b", 8])}, 2: {"two": (script, [*words, "-b", 1])}}
    curves = curves_of(tmp_path, runs)
    assert difference(curves["one"], curves["two"], names=["grad_norm"]) > 1e-4


@pytest.mark.slow
def test_run_with_balance_loss_continues_on_another_layout(loss_root, layout_models, tmp_path):
    """Check that the first step after a resume uses the token counts from before the resume."""
    words = ["-m", layout_models / "qwen3_moe", *LOSS, "--checkpoint-every", 4]
    curves_of(tmp_path, {2: {"run": ("09", [*words, *EP2])}})
    copy_run(tmp_path / "run", 4, tmp_path / "moved")
    curve = curves_of(tmp_path, {1: {"moved": ("09", words)}})["moved"]
    assert difference(curve, metrics(loss_root / "one")) < 1e-5


# ---- ranks without tokens --------------------------------------------------------------------
@pytest.mark.slow
def test_rank_without_tokens_changes_no_curve(tmp_path, small_tokens):
    """Train a model whose router biases make all tokens choose the same two experts on rank 0."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY))
    for name, bias in model.named_buffers():
        if is_bias(name):
            bias[:2] = 10
    model.save_pretrained(tmp_path / "hub")
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path / "hub")
    args = ["-m", tmp_path / "hub", "--pretrained", "--num-steps", 4]
    args += ["-d", small_tokens(tmp_path / "hub")]
    curves = curves_of(tmp_path, {1: {"01": ("01", args)}, 2: {"09": ("09", [*args, *EP2])}})
    assert [row["experts"] for row in curves["09"].values() if "experts" in row] == [0.5] * 4
    assert difference(curves["01"], curves["09"]) < 1e-5
    assert have_same_weights(tmp_path / "01", tmp_path / "09", tolerance=1e-4)
