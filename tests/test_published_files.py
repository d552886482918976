"""Published folders: mixtures train in every chapter, and files that do not fit cost one line."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from checks import check_two_ranks_fail
from conftest import (
    SHORT,
    SPLIT,
    curves_of,
    difference,
    fast_byte_tokenizer,
    prepare_training,
    user_error,
)
from families import shrink
from marks import exhaustive, slow

# transformers saves each expert of these mixtures under a name of its own.
MIXTURES = ["mixtral", "qwen3_moe", "glm4_moe", "ernie4_5_moe", "minimax_m2", "flex_olmo"]
MIXTURES += ["exaone_moe"]
ARGS = [*SHORT, "--num-steps", 2, "--eval-every", 2, "--checkpoint-every", 2, "--pretrained"]
ARGS += ["-s", 32, "--global-batch-size", 4, "--batch-size", 2, "--eval-samples", 4]


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


@pytest.mark.parametrize("kind", [slow("deepseek_v3"), *map(exhaustive, MIXTURES)])
def test_mixture_is_read_and_written_as_published(small_text, tmp_path, kind):
    """Each chapter has chapter 01's losses, and exports the names and values of its export."""
    # By default, the first three layers of DeepSeek-V3 have no experts, and the others have groups.
    groups = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    settings = groups if kind == "deepseek_v3" else {}
    config = shrink(CONFIG_MAPPING[kind](), eos_token_id=1, num_hidden_layers=3, **settings)
    folder = save_model(tmp_path / kind, config)
    args, chapters = [*ARGS, "-m", folder, "-d", small_text], ("04", "05", "07", "08")
    jobs = {name: (name, [*SPLIT.get(name, []), *args]) for name in chapters}
    curves = curves_of(tmp_path, {1: {"01": ("01", args)}, 2: jobs})
    published, expected = files_of(folder), files_of(tmp_path / "01/model")
    assert any(".experts.3." in name for name in published)
    assert expected.keys() == published.keys()
    for chapter in chapters:
        assert difference(curves["01"], curves[chapter]) < 1e-5
        exported = files_of(tmp_path / chapter / "model")
        # Chapter 04 stacks the experts of a layer, as transformers does in memory.
        if chapter != "04":
            assert exported.keys() == expected.keys()
        for name in exported.keys() & expected.keys():
            assert torch.allclose(exported[name], expected[name], atol=1e-4), (chapter, name)


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
    change("missing", {name: w for name, w in weights.items() if ".1.mlp.up_proj" not in name})
    change("vocabulary", vocab_size=512)
    change("layers", num_hidden_layers=1)
    change("fp8", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
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
    "missing": "lack model.layers.1.mlp.up_proj.weight (1 weights)",
    "vocabulary": "have a different shape of lm_head.weight (2 weights)",
    "fp8": "its weights are quantized; choose a model with bf16 weights",
    "truncated": "incomplete metadata, file not fully covered",
    "lfs": "header too large",
    "nothing": "nothing",
    "shard": "model-00001-of-00001.safetensors",
}


@pytest.mark.parametrize("name", UNFIT)
def test_unfit_files_are_named(unfit, load, capsys, name):
    error = user_error(capsys, prepare_training, load("01"), *ARGS, "-m", unfit / name)
    assert UNFIT[name] in error.splitlines()[-1] and str(unfit / name) in error


@pytest.mark.parametrize(
    "names", [slow(["missing", "truncated"]), exhaustive(UNFIT.keys() - {"missing", "truncated"})]
)
def test_unfit_files_cost_one_line_on_two_ranks(unfit, small_text, tmp_path, names):
    """Chapter 05 reads the files itself."""
    for name in names:
        args = [*ARGS, "-m", unfit / name, "-d", small_text]
        check_two_ranks_fail("05", args, UNFIT[name], tmp_path, tmp_path / "runs")


@pytest.mark.slow
def test_model_may_have_only_the_first_layers_of_the_files(unfit, small_text, tmp_path):
    args = [*ARGS, "-m", unfit / "layers", "-d", small_text]
    curves = curves_of(tmp_path, {1: {"01": ("01", args)}, 2: {"05": ("05", args)}})
    assert difference(curves["01"], curves["05"]) < 1e-5
