"""Test that chapters train the weights of published folders, or report faults in the files."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from checks import check_two_ranks_fail
from conftest import (
    ROOT,
    SHORT,
    SPLIT,
    curves_of,
    difference,
    prepare_training,
    run_command,
    user_error,
)
from families import make_hub_folder, save_small_model
from marks import exhaustive, slow
from runs import have_same_weights, validation_loss

ARGS = [*SHORT, "--num-steps", 2, "--eval-every", 2, "--checkpoint-every", 2, "--pretrained"]
ARGS += ["-s", 32, "--global-batch-size", 4, "--batch-size", 2, "--eval-samples", 4]
SHARDS = {"max_shard_size": "100KB"}
# Each value has the family of a model, and the options that make_hub_folder() needs to save it.
FOLDERS = {
    "tied": ("qwen3", SHARDS),
    "many files": ("mistral", SHARDS | {"dtype": torch.float32}),
    "no head": ("gpt2", {"headless": True}),
    "old names": ("gpt_neox", {}),
}
# transformers saves each expert of these mixtures under a separate name.
MIXTURES = ["deepseek_v3", "mixtral", "qwen3_moe", "glm4_moe", "ernie4_5_moe", "minimax_m2"]
MIXTURES += ["flex_olmo", "exaone_moe"]
# Besides chapter 01, these chapters train the model of a folder. If a folder is not listed, it is
# chapter 05 that trains the model besides chapter 01, because chapter 05 reads the files itself.
CHAPTERS = dict.fromkeys(MIXTURES, "04 05 07 08 09")
CHAPTERS |= {"tied": "04 05 06 07 08", "many files": "05 06 07"}


def publish(models, root, kind):
    """Save a model as FOLDERS specifies for `kind`, or a mixture of the family `kind`.

    Return the model's folder.
    """
    if kind in FOLDERS:
        family, options = FOLDERS[kind]
        return make_hub_folder(models, root, family, **options)
    settings = "+num_hidden_layers=3"
    # Give DeepSeek-V3 experts from the second layer on, in one group. By default, its first three
    # layers have no experts, and its experts form several groups.
    if kind == "deepseek_v3":
        settings += "+first_k_dense_replace=1+n_group=1+topk_group=1"
    save_small_model(kind + settings, root / "small" / kind)
    return make_hub_folder(root / "small", root, kind)


def names_in_files(folder):
    """Return the names of all tensors in a folder's safetensors files."""
    return {name for path in folder.glob("*.safetensors") for name in load_file(path)}


KINDS = [*map(slow, ("tied", "many files", "old names"))]
KINDS += map(exhaustive, ("no head", *MIXTURES))


@pytest.mark.parametrize("kind", KINDS)
def test_published_model_is_read_and_written_as_published(
    load, layout_models, small_tokens, tmp_path, kind
):
    """Check that chapter 01 starts from the files' weights, and other chapters follow its curve."""
    folder = publish(layout_models, tmp_path / "hub", kind)
    args = [*ARGS, "-m", folder, "-d", small_tokens(folder)]
    chapters = CHAPTERS.get(kind, "05").split()
    jobs = {name: (name, [*SPLIT.get(name, []), *args]) for name in chapters}
    curves = curves_of(tmp_path, {1: {"01": ("01", args)}, 2: jobs})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loss = validation_loss(model, tmp_path / "01", 2, load("01"))
    assert curves["01"][0]["val_loss"] == pytest.approx(loss, abs=1e-6), "step 0 has other weights"
    if kind in MIXTURES:
        assert any(".experts.3." in name for name in names_in_files(folder)), "experts are merged"
    for chapter in ["01", *chapters]:
        assert difference(curves["01"], curves[chapter]) < 1e-5, chapter
        assert have_same_weights(tmp_path / "01", tmp_path / chapter, tolerance=1e-4), chapter
        if kind in MIXTURES:
            assert names_in_files(tmp_path / chapter / "model") == names_in_files(folder), chapter


# ---- files that do not fit the model ---------------------------------------------------------
UNFIT = {
    "prefix": "lacks lm_head.weight (39 weights); check its files",
    "missing": "lacks model.layers.1.mlp.up_proj.weight (1 weights); check its files",
    "vocabulary": "You set `ignore_mismatched_sizes` to `False`",
    "fp8": "its weights are quantized; choose a model with bf16 weights",
    "truncated": "incomplete metadata, file not fully covered",
    "lfs": "header too large",
    "nothing": "nothing",
    "untied": "the files do not tie lm_head.weight; pass --config tie_word_embeddings=false",
}
# Chapter 05 reads the files itself. So it reports a wrong vocabulary with a different error, and
# finds quantized weights even if config.json does not mention them.
UNFIT_FOR_05 = UNFIT | {
    "vocabulary": "lacks lm_head.weight (2 weights); check its files",
    "int8": "are quantized; choose a bf16 copy",
}


@pytest.fixture(scope="module")
def unfit(layout_models, tmp_path_factory):
    """Return a folder with copies of a small Llama; the files of each copy have a fault."""
    root = tmp_path_factory.mktemp("unfit")
    good = make_hub_folder(layout_models, root, "llama")
    weights = load_file(good / "model.safetensors")

    def change(name, changed=None, **settings):
        folder = shutil.copytree(good, root / name)
        save_file(changed or weights, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | settings))
        return folder / "model.safetensors"

    change("prefix", {f"_orig_mod.{name}": weight for name, weight in weights.items()})
    change("missing", {name: w for name, w in weights.items() if ".1.mlp.up_proj" not in name})
    change("vocabulary", vocab_size=512)
    change("fp8", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    change("int8", weights | {"scale": torch.zeros(2, dtype=torch.int8)})
    change("untied", tie_word_embeddings=True)
    cut = change("truncated")
    cut.write_bytes(cut.read_bytes()[:-100])
    change("lfs").write_text("version https://git-lfs.github.com/spec/v1\nsize 100\n")
    change("nothing").unlink()
    return root


@pytest.mark.parametrize("name", UNFIT)
def test_unfit_files_are_named(unfit, load, capsys, name):
    error = user_error(capsys, prepare_training, load("01"), *ARGS, "-m", unfit / name)
    assert UNFIT[name] in error.splitlines()[-1]
    assert str(unfit / name) in error or name == "untied"


@pytest.mark.parametrize(
    "name",
    [
        slow(name) if name in ("missing", "truncated", "int8", "untied") else exhaustive(name)
        for name in UNFIT_FOR_05
    ],
)
def test_unfit_files_print_one_line_on_two_ranks(unfit, small_tokens, tmp_path, name):
    args = [*ARGS, "-m", unfit / name, "-d", small_tokens(unfit / name)]
    check_two_ranks_fail("05", args, UNFIT_FOR_05[name], tmp_path, tmp_path / "runs")


@pytest.mark.exhaustive
def test_reading_uses_the_memory_of_a_shard_and_a_tensor(tmp_path):
    """Check, for 1 and for 2 ranks, that a rank needs memory only for its shard and one tensor."""
    command = [ROOT / "benchmarks/large.py", "reading", "--layers", 2, "--ranks", 1, 2]
    run_command(*command, "--output", tmp_path / "reading.json", check=True)
    rows = json.loads((tmp_path / "reading.json").read_text())["reading"]
    rows = {row["ranks"]: row for row in rows if row["chapter"] == "05"}
    for row in rows.values():
        assert row["peak"] < row["share"] + row["largest tensor"] + 20_000_000
    assert rows[2]["share"] * 2 == rows[1]["share"] == rows[1]["model"]
