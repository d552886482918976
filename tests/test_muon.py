"""Test that Muon updates the right weights, and that its curve equals torch.optim.Muon's curve."""

import math
import types

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

import harness
from conftest import SCRIPTS, SHORT, change_file, curves_of, prepare_training, run_jobs
from in_process import tensors_of
from runs import check_user_error, copy_run, read_checkpoint

DEVICE = torch.device("cpu")
SMALL = [*SHORT, "--config", "hidden_size=48", "intermediate_size=80", "num_hidden_layers=2"]


@pytest.fixture
def script(load, one_rank_group):
    return load("muon")


def prepare(script, *words):
    """Build and shard the model that the flags `words` ask for.

    Return the arguments, the model, the optimizer and the training samples.
    """
    args, model, _, train_set, _ = prepare_training(script, *words)
    model = script.shard(args, model, DEVICE)
    return args, model, script.build_optimizer(args, model), train_set


def train(script, steps, args, model, optimizer, train_set):
    """Train for `steps` steps in this process; return the loss of each step."""
    steps = range(1, steps + 1)
    return [
        script.train_step(args, model, optimizer, train_set, step, DEVICE)[0].item()
        for step in steps
    ]


# ---- the weights that Muon updates -----------------------------------------------------------
# Each family has a few weights of its first layer; True means that Muon updates the weight.
FAMILIES = {
    "llama": {"self_attn.q_proj.weight": True, "input_layernorm.weight": False},
    "gpt2": {"attn.c_attn.weight": True, "attn.c_attn.bias": False},
    "qwen3_moe": {"mlp.experts.gate_up_proj": True, "mlp.gate.weight": True},
    "gpt_oss": {"mlp.experts.down_proj": True, "mlp.experts.down_proj_bias": False},
    "lfm2": {"conv.conv.weight": False, "conv.in_proj.weight": True},
}


@pytest.mark.parametrize("family, expected", FAMILIES.items())
def test_muon_gets_matrices_and_experts_but_no_convolution(load, models, family, expected):
    if family == "lfm2":
        config = AutoConfig.for_model(family, layer_types=["conv"], num_hidden_layers=1)
    else:
        config = AutoConfig.from_pretrained(models / family)
    script = load("muon")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    hidden = script.matrices_of_layers(model)
    named = script.layers_of(model)[0].named_parameters()
    assert {name: weight in hidden for name, weight in named}.items() >= expected.items()
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        assert module.weight not in hidden


# ---- from shards to matrices -----------------------------------------------------------------
def orthogonalize_on_ranks(script, monkeypatch, matrices, num_ranks):
    """Run orthogonalize_split() as each of `num_ranks` ranks; join and return the results."""
    sent = []

    def all_to_all_single(received, parts, group, async_op):
        assert async_op and received.is_contiguous() and parts.is_contiguous()
        sent.append((received.chunk(num_ranks), parts.chunk(num_ranks)))
        return types.SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
    num_rows, results = matrices.shape[1], []
    shards = list(matrices.chunk(num_ranks, dim=1))
    shards += [matrices[:, :0]] * (num_ranks - len(shards))
    # Simulate each rank's process group with an object that only has a size.
    updates = [
        script.orthogonalize_split(shard, num_rows, types.SimpleNamespace(size=lambda: num_ranks))
        for shard in shards
    ]
    for _ in range(2):
        for update in updates:
            next(update)
        # Copy the parts one after another, so that a part is wrong if a rank receives into the
        # buffer that it still sends from.
        for rank, (received, _) in enumerate(sent):
            for source, (_, parts) in enumerate(sent):
                received[source].copy_(parts[rank])
        sent.clear()
    for update in updates:
        with pytest.raises(StopIteration) as stop:
            next(update)
        results.append(stop.value.value)
    return torch.cat(results, dim=1)


def distance(script, monkeypatch, num_matrices, shape, num_ranks):
    """Orthogonalize matrices on `num_ranks` ranks, and without ranks.

    Return the largest difference between the results. All `num_matrices` matrices are random, and
    have the shape `shape`.
    """
    torch.manual_seed(0)
    matrices = torch.randn(num_matrices, *shape)
    result = orthogonalize_on_ranks(script, monkeypatch, matrices, num_ranks)
    assert result.shape == matrices.shape
    return (result - script.orthogonalize(matrices)).abs().max().item()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_matrices", [1, 3, 4, 8])
def test_ranks_orthogonalize_each_matrix_as_one_rank(load, monkeypatch, num_matrices, num_ranks):
    """Test with short and empty shards, too, and with fewer matrices than ranks."""
    for shape in [(16, 24), (24, 16), (17, 24), (5, 8)]:
        assert distance(load("muon"), monkeypatch, num_matrices, shape, num_ranks) < 1e-5


# In the script's exchange(), this line lets a rank receive twice in the same buffer.
REUSED = "received = ranks.__dict__.setdefault('buffer', torch.empty_like(parts.contiguous()))"


def test_reused_buffer_is_wrong_with_one_matrix_per_rank(monkeypatch, tmp_path):
    """Let the two all-to-alls of an update receive in the same buffer.

    With one matrix per rank, the second all-to-all also sends from this buffer, so the result is
    wrong.
    """
    old = "received = torch.empty_like(parts, memory_format=torch.contiguous_format)"
    copy = change_file(SCRIPTS["muon"], old, REUSED, tmp_path / "train_llm.py")
    old = "    matrices = orthogonalize(matrices)\n"
    script = harness.load(change_file(copy, old, "    matrices.copy_(orthogonalize(matrices))\n"))
    assert distance(script, monkeypatch, 8, (16, 24), 4) < 1e-5
    assert distance(script, monkeypatch, 4, (16, 24), 4) > 1e-5


def test_wrong_order_is_found_with_two_matrices_per_rank(monkeypatch, tmp_path):
    """Swap the axes of ranks and matrices; the result is right only with one matrix per rank."""
    old = "received.unflatten(0, (num_ranks, -1)).transpose(0, 1)"
    new = "received.unflatten(0, (-1, num_ranks))"
    script = harness.load(change_file(SCRIPTS["muon"], old, new, tmp_path / "train_llm.py"))
    assert distance(script, monkeypatch, 4, (16, 24), 4) < 1e-5
    assert distance(script, monkeypatch, 8, (16, 24), 4) > 1e-5


# ---- one process -----------------------------------------------------------------------------
class Both:
    """Update the matrices of the layers with torch.optim.Muon, and the other weights with AdamW."""

    def __init__(self, script, args, model):
        hidden = script.matrices_of_layers(model)
        options = {"lr": args.lr, "weight_decay": args.weight_decay}
        muon = torch.optim.Muon(hidden, adjust_lr_fn="match_rms_adamw", **options)
        others = [weight for weight in model.parameters() if weight not in hidden]
        groups = [{"params": [weight for weight in others if weight.ndim >= 2]}]
        vectors = [weight for weight in others if weight.ndim < 2]
        groups.append({"params": vectors, "weight_decay": 0.0})
        adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True, **options)
        self.optimizers = muon, adamw
        self.param_groups = muon.param_groups + adamw.param_groups
        self.found_inf = torch.zeros(())

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def test_losses_are_those_of_torch_muon(script, monkeypatch):
    """Compare 20 losses of the script with 20 losses of torch.optim.Muon.

    Let torch.optim.Muon compute in fp32, as the script does.
    """
    losses = train(script, 20, *prepare(script, *SMALL))
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    args, model, _, train_set = prepare(script, *SMALL)
    expected = train(script, 20, args, model, Both(script, args, model), train_set)
    assert losses == pytest.approx(expected, rel=0, abs=1e-5)
    assert losses[-1] < losses[0] - 0.5


def test_bad_gradient_changes_no_weight_and_no_momentum(script, monkeypatch):
    """Check that neither a gradient of NaN nor the finite gradient after it changes a tensor."""
    args, model, optimizer, train_set = prepare(script, *SMALL)
    train(script, 2, args, model, optimizer, train_set)
    before = [local(tensor).clone() for tensor in tensors_of(model, optimizer)]
    loss_of = script.loss_of
    with monkeypatch.context() as patch:
        patch.setattr(script, "loss_of", lambda *given: loss_of(*given) * math.nan)
        script.train_step(args, model, optimizer, train_set, 3, DEVICE)
    _, norm = script.train_step(args, model, optimizer, train_set, 4, DEVICE)
    assert norm.isfinite() and optimizer.found_inf
    after = [local(tensor) for tensor in tensors_of(model, optimizer)]
    assert len(before) == len(after) > 40 and all(map(torch.equal, before, after))


def local(tensor):
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_matrix_of_a_layer_has_one_moment(script):
    """Check that Muon keeps one tensor for a matrix of a layer; AdamW keeps three for the head."""
    _, model, optimizer, _ = prepare(script, *SMALL)
    state = get_optimizer_state_dict(model, optimizer)["state"]
    assert set(state["model.layers.0.mlp.up_proj.weight"]) == {"exp_avg"}
    assert set(state["lm_head.weight"]) == {"exp_avg", "exp_avg_sq", "step"}


# ---- runs that change the optimizer; test_layouts.py compares Muon's layouts -------------------
@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Train with AdamW in chapter 04, and with Muon in Muon's script; return the runs' folder."""
    root = tmp_path_factory.mktemp("muon")
    curves_of(root, {1: {"adamw": ("04", []), "muon": ("muon", [])}})
    return root


@pytest.mark.slow
def test_muon_continues_a_run_of_adamw_with_its_first_moments(root, script):
    args, model, optimizer, _ = prepare(script, *SHORT, "--save-dir", root, "-e", "adamw")
    assert script.load_checkpoint(args, root / "adamw", model, optimizer) == 20
    saved = read_checkpoint(root / "adamw", 20)["optimizer"]
    state = get_optimizer_state_dict(model, optimizer)["state"]
    assert state.keys() <= saved.keys() and len(state) > 20
    for name, moments in state.items():
        assert torch.equal(local(moments["exp_avg"]), saved[name]["exp_avg"]), name


@pytest.mark.slow
def test_adamw_refuses_to_continue_a_run_of_muon(root):
    copy_run(root / "muon", 10, root / "refused")
    args = [*SHORT, "--save-dir", root, "-e", "refused"]
    [[result]] = run_jobs(1, [("04", args)], root / "refused-jobs")
    check_user_error(result, "cannot read its checkpoints; choose a different --experiment-name")
    assert "_proj.weight.step" in result["stdout"]
