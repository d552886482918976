"""From chapter 05 on, a rank initializes or reads its own shards; the values are chapter 01's."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from conftest import ROOT, SHORT, run_command, run_jobs
from families import make_hub_folder
from runs import call_on_ranks, check_user_error

pytestmark = pytest.mark.slow
EXHAUSTIVE = pytest.mark.exhaustive
TP2, PP2 = ["--tensor-parallel-size", 2], ["--pipeline-parallel-size", 2, "-b", 2]
# The families that each chapter can split.
FAMILIES = {
    "05": ["gpt2", "qwen3", "mistral", "gemma3"],
    "06": ["llama", "qwen3", "gpt_neox", "gemma", "odd"],
    "07": ["llama", "qwen3", "gpt_neox", "gpt2", "olmo"],
}
# Chapter 05 reads all kinds of published files; the others read the first two kinds.
PUBLISHED = {"06": ["tied", "many files"], "07": ["tied", "many files"]}


@pytest.fixture(scope="module")
def hub(layout_models, tmp_path_factory):
    """Folders of published weights."""
    root, number = tmp_path_factory.mktemp("hub"), iter(range(99))

    def publish(family, *size, **options):
        return make_hub_folder(layout_models, root / str(next(number)), family, *size, **options)

    return {
        "tied": publish("qwen3", "100KB"),
        "many files": publish("mistral", "100KB"),
        "one file": publish("mistral"),
        "float32": publish("gemma3", "100KB", dtype=torch.float32),
        "no head": publish("gpt2", headless=True),
        "old names": publish("gpt_neox"),
        "other files": with_other_files(publish("mistral")),
        "old shards": with_old_shards(publish("mistral")),
        "other name": rewrite(
            publish("qwen3"),
            lambda tensors: tensors | {"lm_head.weight": tensors.pop("model.embed_tokens.weight")},
        ),
        "buffers": rewrite(
            publish("apertus"),
            lambda tensors: {
                name: tensor / 2 if tensor.ndim == 0 else tensor for name, tensor in tensors.items()
            },
        ),
    }


def rewrite(folder, change):
    """Change the tensors of a folder with one file; return the folder."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    return folder


def with_other_files(folder):
    """Add a file with other values for the same weights, such as an average of the weights."""
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "ema.safetensors")
    return folder


def with_old_shards(folder):
    """Add shards with other values, which an earlier save has left behind without their index."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    for weight in model.parameters():
        weight.data += 1
    model.save_pretrained(folder / "shards", max_shard_size="100KB")
    for shard in (folder / "shards").glob("*-of-*.safetensors"):
        shard.rename(folder / shard.name)
    shutil.rmtree(folder / "shards")
    return folder


@pytest.mark.parametrize(
    "chapter, ranks, flags",
    [
        ("05", 2, []),
        ("06", 4, TP2),
        pytest.param("05", 1, [], marks=EXHAUSTIVE),
        pytest.param("05", 4, [], marks=EXHAUSTIVE),
        pytest.param("06", 2, TP2, marks=EXHAUSTIVE),
        pytest.param("07", 2, [*PP2, "--pipeline-schedule", "interleaved-1f1b"], marks=EXHAUSTIVE),
        pytest.param("07", 4, ["--pipeline-parallel-size", 4, "-b", 2], marks=EXHAUSTIVE),
    ],
)
def test_initial_weights_equal_chapter_01(layout_models, hub, tmp_path, chapter, ranks, flags):
    """Every bit is the same, in buffers too, and in the files that the chapter then exports."""
    flags = [*map(str, flags)]
    published = PUBLISHED.get(chapter, hub)
    cases = {"tiny": []}
    cases |= {family: ["-m", layout_models / family] for family in FAMILIES[chapter]}
    cases |= {name: ["-m", hub[name], "--pretrained"] for name in published}
    if chapter < "07":
        cases["replicas"] = ["--replicas", ranks // (2 if chapter == "06" else 1)]
        cases["offload"] = ["--cpu-offload"]
    common = ["--device", "cpu", "--save-dir", tmp_path, "--seq-length", 64]
    cases = {name: [*common, *args] for name, args in cases.items()}
    differing = call_on_ranks(ranks, "values.py", cases, tmp_path / "jobs", chapter, *flags)
    nothing, exported = {"initial": []}, {"initial": [], "exported": []}
    assert differing == {name: exported if name in published else nothing for name in cases}


def test_broken_weight_files_stop_the_run(hub, tmp_path):
    """One line says what is wrong with the files, and nothing is trained."""
    expected = {
        "missing": "cannot read the safetensors files of",
        "cut": "SafetensorError",
        "quantized": "are quantized; choose a bf16 copy",
        "pickled": "cannot read the safetensors files of",
        "untied": "different values for model.embed_tokens.weight and lm_head.weight",
    }
    jobs = []
    for name in expected:
        kind = "tied" if name == "untied" else "many files"
        folder = shutil.copytree(hub[kind], tmp_path / name)
        second = sorted(folder.glob("*.safetensors"))[1]
        if name == "missing":
            second.unlink()
        elif name == "cut":
            second.write_bytes(second.read_bytes()[:-1])
        elif name == "pickled":
            for file in folder.glob("*.safetensors*"):
                file.rename(file.with_suffix(".bin"))
        elif name == "untied":
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            index["weight_map"]["lm_head.weight"] = "head.safetensors"
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
            save_file({"lm_head.weight": torch.ones(384, 64)}, folder / "head.safetensors")
        else:
            tensors = load_file(second)
            save_file(tensors | {"scale": torch.zeros(2, dtype=torch.int8)}, second)
        args = [*SHORT, "--save-dir", tmp_path / "runs", "--pretrained", "-m", folder]
        jobs.append(("05", args))
    for name, ranks in zip(expected, run_jobs(1, jobs, tmp_path / "jobs"), strict=True):
        check_user_error(ranks[0], expected[name])
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))


@pytest.mark.exhaustive
def test_reading_uses_the_memory_of_a_shard_and_a_tensor(tmp_path):
    """A rank never holds the full model, on one rank or on two."""
    command = [ROOT / "benchmarks/large.py", "reading", "--layers", 2, "--ranks", 1, 2]
    run_command(*command, "--output", tmp_path / "reading.json", check=True)
    rows = json.loads((tmp_path / "reading.json").read_text())["reading"]
    rows = {row["ranks"]: row for row in rows if row["chapter"] == "05"}
    for row in rows.values():
        assert row["peak"] < row["share"] + row["largest tensor"] + 20_000_000
    assert rows[2]["share"] * 2 == rows[1]["share"] == rows[1]["model"]
