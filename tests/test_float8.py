"""Test that products in float8 are right, and that losses hardly depend on them or the layout."""

import copy
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import SHORT, curves_of, difference, metrics, parse, prepare_training, user_error
from runs import evaluate_export

SMALL = [*SHORT, "--config", "hidden_size=64", "num_hidden_layers=2"]


@pytest.fixture
def script(load, one_rank_group):
    return load("float8")


# ---- products --------------------------------------------------------------------------------
def rounded(script, tensor, *dtype):
    """Round a tensor to float8; return the rounded values in float64."""
    values, scale = script.to_float8(tensor, *dtype)
    return values.double() * scale.double()


def distance(result, expected):
    """Return the norm of the difference, relative to the norm of the expected values."""
    return ((result.double() - expected).norm() / expected.norm()).item()


def three_products(inputs, weight, grad):
    """Return a linear layer's outputs, and its gradients of inputs and weight, in float64."""
    inputs, weight, grad = inputs.double(), weight.double(), grad.double()
    return inputs @ weight.T, grad @ weight, grad.T @ inputs


@pytest.mark.parametrize("precision, limit", [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
def test_products_equal_the_products_of_rounded_values(script, precision, limit):
    """Allow the error of one rounding, because each result is rounded to `precision`."""
    torch.manual_seed(0)
    inputs = torch.randn(2, 64, 128, dtype=precision, requires_grad=True)
    linear, grad = torch.nn.Linear(128, 96, dtype=precision), torch.randn(128, 96, dtype=precision)
    linear.__class__ = script.Float8Linear
    linear.bias.data.zero_()
    outputs = linear(inputs).flatten(0, 1)
    outputs.backward(grad)
    found = outputs, inputs.grad.flatten(0, 1), linear.weight.grad
    factors = inputs.detach().flatten(0, 1), linear.weight.detach()
    exact = three_products(*factors, grad)
    factors = [rounded(script, factor) for factor in factors]
    emulated = three_products(*factors, rounded(script, grad, torch.float8_e5m2))
    for number in range(3):
        assert found[number].dtype == precision
        assert distance(found[number], emulated[number]) < limit
        assert 0.03 < distance(found[number], exact[number]) < 0.065
    assert distance(linear.bias.grad, grad.double().sum(0)) < limit


def gradients_of_layer(script, model, is_compiled):
    """Run the first layer forward and backward; return its output and all gradients."""
    torch.manual_seed(0)
    layer = copy.deepcopy(script.layers_of(model)[0])
    if is_compiled:
        layer.compile(backend="aot_eager_decomp_partition", dynamic=False, fullgraph=True)
    hidden = torch.randn(2, 32, model.config.hidden_size, requires_grad=True)
    positions = model.model.rotary_emb(hidden, torch.arange(32)[None])
    output = layer(hidden, position_embeddings=positions)
    output.backward(torch.randn_like(output))
    return [output, hidden.grad, *(weight.grad for weight in layer.parameters())]


def test_compiled_layer_is_one_graph_with_the_same_gradients(script, models):
    """Compile with fullgraph, which raises an error if PyTorch cannot trace a product.

    Generate no code, because the compiler of C++ would need a minute.
    """
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(models / "llama", initializer_range=0.1)
    model = AutoModelForCausalLM.from_config(config)
    script.use_float8(parse(script, *SHORT), model)
    eager, compiled = (gradients_of_layer(script, model, choice) for choice in (False, True))
    for tensor, expected in zip(compiled, eager, strict=True):
        assert distance(tensor, expected.double()) < 0.01


# ---- scales ----------------------------------------------------------------------------------
def test_largest_value_does_not_change_the_rounding(script):
    """Round the same 4,096 values beside several largest values.

    Leave out values near 0, which float8 rounds more coarsely when the scale grows.
    """
    torch.manual_seed(0)
    values = torch.randn(64, 64)
    values[values.abs() < 0.05] = 1.0
    beside = values.clone()
    for largest in (5.0, 50.0, 300.0):
        beside[0, 0] = largest
        assert (rounded(script, beside) != rounded(script, values)).sum() == 1


def test_scale_keeps_zeros_and_turns_infinity_into_nan(script):
    for tensor in (torch.zeros(2, 2), torch.tensor([[1e-40, 0.0]])):
        assert not rounded(script, tensor).any()
    for bad in (math.inf, -math.inf, math.nan):
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            tensor = torch.tensor([[bad, 1.0], [1.0, 1.0]])
            assert rounded(script, tensor, dtype)[0].isnan().any()


@pytest.mark.parametrize("exponent", [-90, -20, 0, 20, 90])
def test_largest_value_fits_and_powers_of_two_stay(script, exponent):
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        values = 2.0**exponent * torch.tensor([[1.0, 0.5, 0.25, -0.125], [0.999, 0.9, 1.001, 1.7]])
        result = rounded(script, values, dtype)
        assert torch.equal(result[0], values[0].double())
        assert distance(result, values.double()) < 0.1


# ---- the modules that multiply in float8 -----------------------------------------------------
def modules_of(script, capsys, *words):
    """Build a model; return the names of its modules in float8, and the script's output."""
    _, model, *_ = prepare_training(script, *SMALL, *words)
    modules = model.named_modules()
    names = [name for name, module in modules if type(module) is script.Float8Linear]
    return names, capsys.readouterr().out


def test_all_products_of_the_layers_are_in_float8_but_not_the_head(script, capsys):
    names, printed = modules_of(script, capsys, "--float8")
    assert len(names) == 2 * 7 and all(name.startswith("model.layers.") for name in names)
    assert "14 of 14 linear modules in the layers multiply in float8" in printed
    assert modules_of(script, capsys) == ([], "")


@pytest.mark.parametrize("change", ["-m {models}/qwen3_moe", "intermediate_size=72"])
def test_experts_and_sizes_that_are_no_multiples_of_16_stay(script, capsys, models, change):
    names, _ = modules_of(script, capsys, *change.format(models=models).split(), "--float8")
    assert {name.split(".")[-1] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    "words, expected",
    [
        ("-s 40", "needs a --seq-length that is a multiple of 16; choose one"),
        ("-m gpt2", "needs linear modules whose sizes are multiples of 16; change the model"),
        ("", "needs a GPU with compute capability 8.9 or higher; leave it out"),
    ],
)
def test_unfit_model_length_or_gpu_fails_with_the_reason(
    script, capsys, monkeypatch, models, words, expected
):
    monkeypatch.chdir(models)
    args = parse(script, *SHORT, "--float8", *words.split())
    _, config = script.build_tokenizer_and_config(args)
    if not words:
        args.device = "cuda"
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    error = user_error(capsys, script.build_model, args, config)
    assert error.startswith("train_llm.py: error: --float8: ") and expected in error


# ---- runs ------------------------------------------------------------------------------------
FLOAT8, BF16 = ["--float8"], ["--precision", "bf16"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Train each layout; return the folder of the runs."""
    root = tmp_path_factory.mktemp("float8")
    ranks1 = {"parent": ("05", []), "off": ("float8", []), "ranks1": ("float8", FLOAT8)}
    ranks2 = {"ranks2": ("float8", FLOAT8), "bf16-ranks2": ("float8", FLOAT8 + BF16)}
    ranks2["selective"] = "float8", [*FLOAT8, "--recompute", "selective"]
    ranks4 = {"ranks4": ("float8", FLOAT8)}
    curves_of(root, {1: ranks1, 2: ranks2, 4: ranks4})
    return root


def mean_difference(root, name, other):
    """Compare the losses of two runs.

    Return the mean difference of the training losses, and the largest difference of the validation
    losses.
    """
    curve, other_curve = metrics(root / name), metrics(root / other)
    steps = [step for step in curve if step > 0]
    apart = [abs(curve[step]["loss"] - other_curve[step]["loss"]) for step in steps]
    return sum(apart) / len(apart), difference(curve, other_curve, names=["val_loss"])


@pytest.mark.slow
@pytest.mark.parametrize("pair", [("off", "parent"), ("ranks2", "selective")], ids=" ".join)
def test_script_without_the_flag_and_recomputation_change_no_bit(root, pair):
    curve, other_curve = (metrics(root / name) for name in pair)
    assert difference(curve, other_curve) == 0


PAIRS = [("ranks1", "ranks2"), ("ranks1", "ranks4"), ("ranks1", "parent")]
PAIRS += [("bf16-ranks2", "ranks2"), ("bf16-ranks2", "parent")]


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_losses_differ_by_less_than_5e_3_on_average(root, pair):
    """Check also that the losses of a pair are not equal.

    Equal losses would show that both runs compute the same, so the comparison would test nothing.
    Compare the mean difference, because a step with a large gradient norm may differ by 5e-2.
    """
    in_steps, in_evaluations = mean_difference(root, *pair)
    print(*pair, in_steps, in_evaluations)
    assert 1e-5 < in_steps < 5e-3
    assert 0 < in_evaluations < 5e-3


@pytest.mark.slow
def test_exported_model_has_the_saved_weights_and_nearly_the_logged_loss(root, load):
    """Allow a difference of 5e-3, because transformers multiplies in float32, not in float8."""
    loss = evaluate_export(root / "ranks4", 20, load("01"))
    assert loss == pytest.approx(metrics(root / "ranks4")[20]["val_loss"], abs=5e-3)


@pytest.mark.exhaustive
def test_compiled_losses_differ_by_less_than_5e_3_on_average(tmp_path):
    runs = {"eager": ("float8", FLOAT8), "compiled": ("float8", [*FLOAT8, "--compile"])}
    curves_of(tmp_path, {1: runs})
    in_steps, in_evaluations = mean_difference(tmp_path, "eager", "compiled")
    assert 0 < in_steps < 5e-3 and in_evaluations < 5e-3
