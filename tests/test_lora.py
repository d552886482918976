"""Test that LoRA has the gradients of peft, and writes adapters that peft can load."""

import json
from argparse import Namespace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import evaluate
import export
from chats import (
    distances,
    documents_of_step,
    loss_of_documents,
    plain_model,
    prepare,
    prepare_conversations,
    split_documents,
)
from conftest import SHORT, metrics, run_or_fail, user_error
from families import ARGS, OWN_SETTINGS, fast_byte_tokenizer, make_hub_folder, shrink
from marks import slow
from runs import arguments_of, read_checkpoint

RANK = 4
WHY = "peft is not installed; run make extras"


@pytest.fixture
def chapter(load, one_rank_group, monkeypatch):
    # Let monkeypatch restore this variable after the test, because read_weights() sets the variable
    # for the entire process.
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    return load("lora")


@pytest.fixture(scope="module")
def base(layout_models, tmp_path_factory):
    """Save a small fp32 model in the format of models on the hub; return the model's folder."""
    root = tmp_path_factory.mktemp("base")
    return make_hub_folder(layout_models, root, "llama", dtype=torch.float32)


@pytest.fixture(scope="module")
def run_dir(base, tmp_path_factory):
    """Train adapters on two ranks; return the run's folder."""
    root = tmp_path_factory.mktemp("lora")
    args = [*SHORT, "-m", base, "--pretrained", "--lora-rank", RANK, "--lr", 0.03, "-s", 128]
    tokens = prepare_conversations(root, 100, base, 128)
    args += ["-d", tokens, "--num-steps", 4, "--save-dir", root]
    run_or_fail(2, [("lora", [*args, "-e", "run"])], root / "jobs")
    return root / "run"


@pytest.fixture
def words(layout_models, tmp_path):
    """Prepare conversations; return the flags to train a small Llama on them."""
    model = layout_models / "llama"
    return ["-m", model, "-d", prepare_conversations(tmp_path, model=model)]


def randomize_adapters(model, std=0.05):
    for weight in model.parameters():
        if weight.requires_grad:
            # Give random values to both matrices of an adapter, A and B. If B had its initial
            # value, 0, the gradient of A would be 0.
            torch.nn.init.normal_(weight.detach().to_local(), std=std)


def own_name(name):
    """Return the script's name for a weight, given the name of the weight in peft."""
    name = name.removeprefix("base_model.model.").replace(".base_layer", "")
    return name.replace(".default", "")


def test_gradients_are_those_of_peft(chapter, words):
    """Compare the adapters' gradients with those in peft, which reads one document at a time."""
    peft = pytest.importorskip("peft", reason=WHY)
    args, model, train_set, _ = prepare(chapter, *words, "--lora-rank", RANK)
    randomize_adapters(model)
    settings = {"lora_alpha": args.lora_alpha, "target_modules": args.lora_modules}
    config = peft.LoraConfig(r=RANK, **settings)
    other = peft.get_peft_model(plain_model(model, torch.float32), config)
    weights, gradients = dict(model.named_parameters()), {}
    for name, weight in other.named_parameters():
        weight.data = weights[own_name(name)].full_tensor()
    loss = loss_of_documents(other, documents_of_step(chapter, args, train_set))
    loss.backward()
    for name, weight in other.named_parameters():
        if weight.requires_grad:
            gradients[own_name(name)] = weight.grad
    adapters = [name for name, weight in weights.items() if weight.requires_grad]
    assert sorted(gradients) == sorted(adapters), "peft adapts other modules"
    apart = distances(chapter, args, model, train_set, loss.item(), gradients)
    assert max(apart) < 1e-5


def test_adapters_change_no_loss_before_the_first_step(chapter, words):
    args, model, train_set, held_out = prepare(chapter, *words)
    plain, device = plain_model(model), torch.device("cpu")
    with torch.no_grad():
        expected = loss_of_documents(plain, split_documents(chapter, held_out)).item()
        first = loss_of_documents(plain, documents_of_step(chapter, args, train_set)).item()
    model.num_targets = chapter.answers_at(args, train_set, 1)
    loss = chapter.forward_backward(args, model, train_set, 1, device).item()
    # Check that evaluate() divides the loss by the number of learned tokens in the held-out
    # samples, not by the number in the step's samples.
    assert chapter.evaluate(args, model, held_out, device) == pytest.approx(expected, abs=1e-6)
    assert loss == pytest.approx(first, abs=1e-6)


# ---- mixtures --------------------------------------------------------------------------------
# These families and settings cover layers with plain MLPs, with experts and with shared experts.
KINDS = {
    "llama": {},
    "deepseek_v3": {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "glm4_moe": {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "dots1": {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_num_experts": 4, "moe_k": 2},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "flint": {},
}


def base_with_adapters(chapter, folder, kind, precision):
    """Save a small model, and read it into the script's model with adapters.

    Return the arguments, and the script's model in eval mode.
    """
    torch.manual_seed(0)
    settings = OWN_SETTINGS.get(kind, {}) | KINDS[kind]
    config = shrink(CONFIG_MAPPING[kind](), pad_token_id=None, **settings)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in base.state_dict().items():
        # Give the router's biases values as in the published files of DeepSeek-V3, where they are
        # near 5 and differ by a few hundredths.
        if "correction_bias" in name:
            weight.normal_(5, 0.02)
    base.save_pretrained(folder)
    fast_byte_tokenizer().save_pretrained(folder)
    words = {"model_name": str(folder), "precision": precision, "pretrained": True}
    words |= {"lora_modules": [], "lora_rank": RANK, "lora_alpha": 6, "config": []}
    args = Namespace(**ARGS | words, keep_checkpoints=1)
    _, config = chapter.build_tokenizer_and_config(args)
    model = chapter.shard(args, chapter.build_model(args, config), torch.device("cpu"))
    return args, model.eval()


@torch.no_grad()
def logits_of(model, ids):
    """Return the logits of the script's model, whose head only returns hidden states."""
    hidden = model(input_ids=ids, use_cache=False).logits
    return linear(hidden, full(model.get_output_embeddings().weight))


def full(weight):
    """Return the full tensor of a DTensor; return a plain tensor, such as a buffer, unchanged."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


IDS = torch.arange(3, 43)[None]
# In most of these families, transformers keeps values of the router in fp32. In flint, it also
# keeps parameters of the attention in fp32.
IN_FP32 = ["deepseek_v3", "ernie4_5_moe"]
IN_FP32 += map(slow, ("llama", "dots1", "glm4_moe", "flint", "hunyuan_v1_moe"))


@pytest.mark.parametrize("kind", IN_FP32)
def test_frozen_weights_are_those_that_transformers_reads_in_bf16(chapter, tmp_path, kind):
    _, model = base_with_adapters(chapter, tmp_path, kind, "bf16")
    other = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    weights = model.state_dict()
    for name, expected in other.state_dict().items():
        weight = full(weights[name])
        assert weight.dtype == expected.dtype and torch.equal(weight, expected), name
    with torch.no_grad():
        expected = other(input_ids=IDS, use_cache=False).logits
    # Compare the logits. They would differ by far more if the routers of the two models chose
    # different experts.
    assert (logits_of(model, IDS) - expected).abs().max() < 1e-3 * expected.std()


IN_PEFT = ["llama", "deepseek_v3"]
IN_PEFT += map(slow, ("glm4_moe", "dots1", "ernie4_5_moe", "hunyuan_v1_moe", "qwen3_moe"))


@pytest.mark.parametrize("kind", IN_PEFT)
def test_adapters_give_the_same_logits_in_peft(chapter, tmp_path, kind):
    peft = pytest.importorskip("peft", reason=WHY)
    args, model = base_with_adapters(chapter, tmp_path / "base", kind, "fp32")
    randomize_adapters(model, std=0.1)
    chapter.export_adapters(args, tmp_path, model)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        before = plain(input_ids=IDS, use_cache=False).logits
        loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "adapters").eval()
        found = loaded(input_ids=IDS, use_cache=False).logits
    logits = logits_of(model, IDS)
    assert (found - logits).abs().max() < 1e-5 < 1e-2 < (before - logits).abs().max()
    # Check the names of the adapted modules, because programs that serve adapters need these names.
    # In mixtures, the list is empty, because peft needs the names of weights instead.
    config = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert config["target_modules"] == (args.lora_modules if kind == "llama" else [])


# ---- files -----------------------------------------------------------------------------------
@pytest.mark.slow
def test_checkpoint_holds_only_adapters(run_dir):
    weights = read_checkpoint(run_dir, 4)["model"]
    assert weights and all(".lora_" in name for name in weights)
    num_weights = sum(weight.numel() for weight in weights.values())
    # Each of two ranks writes a file with parts of each weight, of its two moments and of its step
    # counter. An element of a weight and of its moments takes 12 bytes. In addition, each part
    # takes about 1.6 KiB in the file.
    size = sum(path.stat().st_size for path in run_dir.glob("checkpoints/step-00000004/*"))
    assert size < 12 * num_weights + 2048 * 2 * 4 * len(weights)


@pytest.mark.slow
def test_adapters_merge_into_the_finished_model(chapter, base, run_dir):
    args, row = arguments_of(run_dir, 4), metrics(run_dir)[4]
    adapters = load_file(run_dir / "adapters/adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    weights, merged = load_file(base / "model.safetensors"), model.state_dict()
    for name in [name for name in adapters if name.endswith("lora_B.weight")]:
        product = adapters[name] @ adapters[name.replace("lora_B", "lora_A")]
        target = name.removeprefix("base_model.model.").replace("lora_B.", "")
        weights[target] += args["lora_alpha"] / RANK * product
    assert weights.keys() == merged.keys()
    assert max((weights[name] - merged[name]).abs().max().item() for name in weights) < 1e-5
    for path in [*run_dir.glob("adapters/*"), *run_dir.glob("model/*")]:
        assert path.stat().st_mode & 0o044 == 0o044, f"others cannot read {path.name}"
    *_, held_out = prepare(chapter, "-s", 128, "-d", args["dataset_name"], "--eval-samples", 10)
    with torch.no_grad():
        loss = loss_of_documents(model, split_documents(chapter, held_out)).item()
    assert loss == pytest.approx(row["val_loss"], abs=1e-5)


MISTAKES = {
    "--lora-modules q_proj nosuch": "--lora-modules nosuch q_proj: the linear modules in a layer of"
    " tiny are: down_proj gate_proj k_proj o_proj q_proj up_proj v_proj",
    "-m {models}/gpt2": "gpt2: its layers have no linear modules to adapt",
    "--lora-rank 0": "argument --lora-rank: 0 is below 1",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistake_prints_one_line(chapter, capsys, layout_models, line):
    words = line.format(models=layout_models).split()
    assert MISTAKES[line] in user_error(capsys, prepare, chapter, *words)


def test_resume_with_a_different_rank_is_refused(chapter, capsys, run_dir):
    saved = arguments_of(run_dir, 4)
    for name, value in {"lora_rank": 8, "lora_alpha": 1, "lora_modules": ["q_proj"]}.items():
        args = Namespace(**saved | {name: value})
        error = user_error(capsys, chapter.compare_args, args, saved, "step-00000004")
        assert f"{name} was {saved[name]}, is now {value}; choose a different" in error


@pytest.mark.parametrize("tool", [evaluate, export])
def test_tool_refuses_a_checkpoint_of_adapters_in_one_line(
    chapter, words, tmp_path, monkeypatch, capsys, tool
):
    args, model, *_ = prepare(chapter, *words)
    chapter.save_checkpoint(args, tmp_path, model, chapter.build_optimizer(args, model), 1, True)
    checkpoint, name = tmp_path / "checkpoints/step-00000001", tool.__name__
    paths = [checkpoint] + [tmp_path / "new"] * (tool is export)
    monkeypatch.setattr("sys.argv", [f"{name}.py", *map(str, paths)])
    # Discard the output up to here, because prepare() may have printed a progress bar.
    capsys.readouterr()
    [line] = user_error(capsys, tool.main).splitlines()
    assert line.startswith(f"{name}.py: error: {checkpoint}: it has only adapters; use the folder")
    assert not (tmp_path / "new").exists()
