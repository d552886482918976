"""Published folders: mixtures train in every chapter, and what does not fit costs one line."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from conftest import (
    SHORT,
    difference,
    fast_byte_tokenizer,
    metrics,
    run_jobs,
    run_or_fail,
    torchrun,
)
from families import shrink
from runs import check_user_error

# Of these, transformers saves each expert under a name of its own.
MIXTURES = ["mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe"]
MIXTURES += ["ernie4_5_moe", "minimax_m2", "flex_olmo", "exaone_moe"]
STEPS = ["--num-steps", 4, "--log-every", 1, "--eval-every", 4, "--checkpoint-every", 4]
STEPS += ["-s", 32, "--global-batch-size", 4, "--batch-size", 2, "--eval-samples", 4]
LAYOUTS = {
    "04": [],
    "05": [],
    "07": ["--pipeline-parallel-size", 2],
    "08": ["--context-parallel-size", 2],
}


def save_model(folder, config):
    """Save a model with random weights and a tokenizer as a published folder; return the folder."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    fast_byte_tokenizer().save_pretrained(folder)
    return folder


def files_of(folder):
    """Return all tensors of a folder's safetensors files by name."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


FIRST = ["mixtral", "qwen3_moe", "deepseek_v3"]


@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in FIRST),
        *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in MIXTURES[len(FIRST) :]),
    ],
)
def test_mixtures_are_read_and_written_as_published(tmp_path, kind):
    """Each chapter has chapter 01's losses, and exports the names and values of its export."""
    # By default, the first three layers of DeepSeek-V3 have no experts, and the others have groups.
    groups = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    settings = groups if kind == "deepseek_v3" else {}
    config = shrink(CONFIG_MAPPING[kind](), eos_token_id=1, num_hidden_layers=3, **settings)
    folder = save_model(tmp_path / kind, config)
    args = [*SHORT, *STEPS, "--pretrained", "-m", folder, "--save-dir", tmp_path, "-e"]
    run_or_fail(1, [("01", [*args, "01"])], tmp_path / "jobs-1")
    jobs = [(chapter, [*args, chapter, *layout]) for chapter, layout in LAYOUTS.items()]
    run_or_fail(2, jobs, tmp_path / "jobs-2")

    published, expected = files_of(folder), files_of(tmp_path / "01/model")
    assert any(".experts.3." in name for name in published)
    assert expected.keys() == published.keys()
    for chapter in LAYOUTS:
        assert difference(metrics(tmp_path / "01"), metrics(tmp_path / chapter)) < 1e-5
        exported = files_of(tmp_path / chapter / "model")
        # Chapter 04 stacks the experts of a layer, as transformers does in memory.
        if chapter != "04":
            assert exported.keys() == expected.keys()
        for name in exported.keys() & expected.keys():
            assert torch.allclose(exported[name], expected[name], atol=1e-4)


@pytest.fixture(scope="module")
def unfit(tmp_path_factory):
    """Folders of a small Llama, each with something wrong in its files."""
    root = tmp_path_factory.mktemp("unfit")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 384}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=1)
    good = save_model(root / "good", config)
    weights = load_file(good / "model.safetensors")

    def change(name, changed=None, **settings):
        folder = shutil.copytree(good, root / name)
        if changed is not None:
            save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(values | settings))
        return folder / "model.safetensors"

    change("prefix", {f"_orig_mod.{name}": weight for name, weight in weights.items()})
    change("bias", weights | {"model.layers.1.self_attn.q_proj.bias": torch.ones(32)})
    change("missing", {name: w for name, w in weights.items() if ".1.mlp.up_proj" not in name})
    change("vocabulary", vocab_size=512)
    change("layers", num_hidden_layers=1)
    change("fp8", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    change("gptq", quantization_config={"quant_method": "gptq", "bits": 4})
    cut = change("truncated")
    cut.write_bytes(cut.read_bytes()[:-100])
    change("lfs").write_text("version https://git-lfs.github.com/spec/v1\nsize 100\n")
    change("nothing").unlink()
    shard = change("shard")
    shard.unlink()
    index = {"weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
    index["metadata"] = {"total_size": 0}
    (shard.parent / "model.safetensors.index.json").write_text(json.dumps(index))
    return root


UNFIT = {
    "prefix": "lack lm_head.weight (21 weights); they have the unknown weight _orig_mod.",
    "bias": "have the unknown weight model.layers.1.self_attn.q_proj.bias (1 weights)",
    "missing": "lack model.layers.1.mlp.up_proj.weight (1 weights)",
    "vocabulary": "have a different shape of lm_head.weight (2 weights)",
    "fp8": "its weights are quantized; choose a model with bf16 weights",
    "gptq": "its weights are quantized; choose a model with bf16 weights",
    "truncated": "incomplete metadata, file not fully covered",
    "lfs": "header too large",
    "nothing": "nothing",
    "shard": "model-00001-of-00001.safetensors",
}


def test_one_line_says_which_files_do_not_fit(unfit, tmp_path):
    args = [*SHORT, *STEPS, "--pretrained", "--save-dir", tmp_path / "runs"]
    jobs = [("01", [*args, "-m", unfit / name, "-e", name]) for name in UNFIT]
    results = run_jobs(1, jobs, tmp_path / "jobs", shares=2)
    for (name, expected), [result] in zip(UNFIT.items(), results, strict=True):
        check_user_error(result, expected)
        assert str(unfit / name) in result["stderr"]
    assert not [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if number % 3 == 0 else pytest.mark.exhaustive)
        for number, name in enumerate(UNFIT)
    ],
)
def test_one_rank_of_two_says_which_files_do_not_fit(unfit, tmp_path, name):
    """Chapter 05 reads the files itself."""
    folder = tmp_path / "runs"
    args = [*SHORT, *STEPS, "--pretrained", "--save-dir", folder, "-m", unfit / name]
    _, stderr = torchrun("05", *args).communicate(timeout=120)
    errors = [line for line in stderr.splitlines() if line.startswith("train_llm.py: error:")]
    assert len(errors) == 1 and UNFIT[name] in errors[0], stderr
    assert 'train_llm.py", line' not in stderr
    assert not [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.slow
def test_a_model_may_have_the_first_layers_of_the_files(unfit, tmp_path):
    args = [*SHORT, *STEPS, "--pretrained", "--save-dir", tmp_path, "-m", unfit / "layers"]
    run_or_fail(1, [("01", [*args, "-e", "01"])], tmp_path / "jobs-1")
    run_or_fail(2, [("05", [*args, "-e", "05"])], tmp_path / "jobs-2")
    assert difference(metrics(tmp_path / "01"), metrics(tmp_path / "05")) < 1e-5
