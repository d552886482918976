"""Chapter 05: the curve of the chapters before, from a model that is whole nowhere and never."""

import argparse
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from conftest import (
    ROOT,
    SCRIPTS,
    SHORT,
    curves_of,
    difference,
    metrics,
    run_command,
    run_jobs,
    run_or_fail,
    run_params,
    selected_runs,
    start_ranks,
)
from families import make_hub_folder
from on_ranks import make_model_folder, torchrun
from runs import LONG, check_user_error, copy_run, load_exported, weights_of

pytestmark = pytest.mark.slow
FAMILIES = ["gpt2", "qwen3", "mistral", "gemma3"]  # and tiny, a Llama
SETTINGS = {
    "": [],
    "-long": ["--seq-length", 256],  # the loss of 8 samples is that of two chunks
    "-offload": ["--cpu-offload"],
    "-full": ["--recompute", "full"],
    "-selective": ["--recompute", "selective"],
    "-async": ["--checkpoint-async", "--checkpoint-every", 3],
    "-all": ["--cpu-offload", "--recompute", "full", "--checkpoint-async", "--batch-size", 1],
    "-compiled-full": ["--compile", "--recompute", "full"],
    "-compiled-selective": ["--compile", "--recompute", "selective"],
}
BF16 = ["--precision", "bf16"]
TRIED = {  # by number of ranks: settings, families, precisions besides fp32
    1: ["", "-long", "-selective", "-all", "-bf16"],
    2: ["", "-long", "-offload", "-full", "-selective", "-async", "-all", "-compiled-full",
        "-compiled-selective", "-bf16", "-gpt2", "-qwen3", "-mistral", "-gemma3"],
    4: ["", "-long", "-selective", "-all", "-qwen3"],
}  # fmt: skip
RUNS = [f"05@{ranks}{name}" for ranks, names in TRIED.items() for name in names]
QUICK = ["05@1-all", "05@2-long", "05@2-all", "05@2-compiled-selective", "05@2-bf16", "05@2-qwen3"]
QUICK += ["05@4-all"]


@pytest.fixture(scope="module")
def root(request, tmp_path_factory, models):
    """A folder with the finished runs that are to be looked at."""
    root, dropout = tmp_path_factory.mktemp("large"), ["-m", models / "gpt2-dropout"]
    options = SETTINGS | {"-bf16": BF16} | {f"-{name}": ["-m", models / name] for name in FAMILIES}
    runs = {
        ranks: {f"05@{ranks}{name}": ("05", options[name]) for name in names}
        for ranks, names in TRIED.items()
    }
    runs[1] |= {f"01-{name}": ("01", options[f"-{name}"]) for name in ("long", *FAMILIES)}
    runs[1]["01"] = ("01", [])
    runs[2]["dropout"] = ("05", dropout)
    runs[2]["05@2-dropout-full"] = ("05", [*dropout, "--recompute", "full"])
    runs[2] |= {"04": ("04", []), "04-bf16": ("04", BF16)}
    curves_of(root, selected_runs(request, runs))
    return root


def curve(root, run):
    return metrics(root / run)


@pytest.mark.parametrize("run", run_params([run for run in RUNS if run[4:] in SETTINGS], QUICK))
def test_settings_change_nothing(root, run):
    plain = "01-long" if run.endswith("-long") else "01"
    assert difference(curve(root, plain), curve(root, run)) < 1e-5
    if plain == "01":
        assert difference(curve(root, "04"), curve(root, run)) < 1e-5


@pytest.mark.parametrize("run", ["05@2-dropout-full"])
def test_dropout_is_the_same_when_it_is_recomputed(root, run):
    """The backward of a layer drops what its forward has dropped."""
    one, other = curve(root, "dropout"), curve(root, run)
    assert difference(one, other) < 1e-5
    assert difference(one, curve(root, "01-gpt2")) > 1e-2  # the same model without dropout


@pytest.mark.parametrize("run", run_params([run for run in RUNS if run[5:] in FAMILIES], QUICK))
def test_families_agree(root, run):
    assert difference(curve(root, f"01-{run[5:]}"), curve(root, run)) < 1e-5


@pytest.mark.parametrize("run", run_params([run for run in RUNS if run.endswith("bf16")], QUICK))
def test_bf16_agrees(root, run):
    one, other = curve(root, "04-bf16"), curve(root, run)
    assert difference(one, other, names=["loss", "val_loss"]) < 5e-3
    assert difference(one, other, names=["grad_norm"], relative=True) < 5e-2


@pytest.mark.parametrize("run", run_params(["05@2", "05@4", "05@2-qwen3", "05@2-gpt2"], QUICK))
def test_the_finished_model_is_that_of_the_last_checkpoint(root, run):
    """It loads by its folder alone, in float32, with a config that names its class."""
    folder, model = root / run / "model", load_exported(root / run, 20)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__] and config["dtype"] == "float32"
    assert not [path for path in folder.iterdir() if path.is_dir()]


# ---- the loss --------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 63, 1024])
@pytest.mark.parametrize("bias", [True, False])
def test_the_loss_of_chunks_is_that_of_all(load, monkeypatch, chunk, bias):
    """Its value and gradients, for chunks of one token, of numbers that divide nothing, of all."""
    chapter = load("05")
    monkeypatch.setattr(chapter, "CHUNK_SIZE", chunk)
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 50, bias=bias)
    hidden, labels = torch.randn(3, 22, 16, requires_grad=True), torch.randint(50, (3, 22))
    inputs = [hidden, *head.parameters()]
    logits = head(hidden)[:, :-1].flatten(0, 1)
    whole = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
    chunks = chapter.chunked_loss(head, hidden, labels, vocab_size=50) / len(logits)
    assert abs(whole - chunks) < 2e-6
    grads = [torch.autograd.grad(loss, inputs) for loss in (whole, chunks)]
    for one, other in zip(*grads, strict=True):
        assert (one - other).abs().max() < 2e-6


def test_models_that_cap_their_logits_are_refused(models, tmp_path):
    shutil.copytree(models / "gemma3", tmp_path / "capped")
    path = tmp_path / "capped/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"final_logit_softcapping": 30.0}))
    args = [*SHORT, "--save-dir", tmp_path, "-m", tmp_path / "capped"]
    [ranks] = run_jobs(1, [("05", args)], tmp_path / "jobs")
    check_user_error(ranks[0], "capped: it caps its logits, which the chunked loss does not do")


# ---- where weights come from -----------------------------------------------------------------


@pytest.fixture(scope="module")
def hub(models, tmp_path_factory):
    """Folders of published weights."""
    root = tmp_path_factory.mktemp("hub")
    return {
        "one file": make_hub_folder(models, root, "mistral"),
        "many files": make_hub_folder(models, root, "mistral", "20KB"),
        "float32": make_hub_folder(models, root, "gemma3", "20KB", torch.float32),
        "tied": make_hub_folder(models, root, "qwen3", "20KB"),
        "no head": make_hub_folder(models, root, "gpt2", headless=True),
        "old names": make_hub_folder(models, root, "gpt_neox"),
        "other files": with_other_files(make_hub_folder(models, root / "other", "mistral")),
        "old shards": with_old_shards(make_hub_folder(models, root / "old", "mistral")),
        "other name": rewrite(
            make_hub_folder(models, root / "head", "qwen3"),
            lambda tensors: tensors | {"lm_head.weight": tensors.pop("model.embed_tokens.weight")},
        ),
        "buffers": rewrite(
            make_hub_folder(models, root / "buffers", "apertus"),
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
    """Add a file with other values for the same weights, as an average of the weights would be."""
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "ema.safetensors")
    return folder


def with_old_shards(folder):
    """Add shards with other values, which an earlier save has left behind without their index."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    for weight in model.parameters():
        weight.data += 1
    model.save_pretrained(folder / "shards", max_shard_size="20KB")
    for shard in (folder / "shards").glob("*-of-*.safetensors"):
        shard.rename(folder / shard.name)
    shutil.rmtree(folder / "shards")
    return folder


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_weights_are_those_of_chapter_01(models, hub, tmp_path, world_size):
    """Drawn or read, bit for bit, with the buffers, and nothing is left as memory was."""
    cases = {family: ["-m", models / family] for family in FAMILIES} | {"tiny": []}
    cases |= {name: ["-m", folder, "--pretrained"] for name, folder in hub.items()}
    cases["replicas"] = ["--replicas", world_size]
    cases["offload"] = ["--cpu-offload"]
    common = ["--device", "cpu", "--save-dir", tmp_path, "--seq-length", 64]
    (tmp_path / "cases.json").write_text(
        json.dumps({name: list(map(str, [*common, *args])) for name, args in cases.items()})
    )
    command = [ROOT / "tests/support/values.py", tmp_path / "cases.json", tmp_path / "done", "05"]
    ranks = start_ranks(world_size, command, tmp_path)
    statuses = [rank.wait(timeout=200) for rank in ranks]
    assert statuses == [0] * world_size, (tmp_path / "rank0.log").read_text()
    different = json.loads((tmp_path / "done").read_text())
    assert different.keys() >= cases.keys() and not any(different.values()), different
    assert len([name for name in different if "exported" in name]) == len(hub)


def test_broken_weights_train_nothing(hub, tmp_path):
    """One line says what is wrong with the files."""
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
            save_file({"lm_head.weight": torch.ones(384, 32)}, folder / "head.safetensors")
        else:
            tensors = load_file(second)
            save_file(tensors | {"scale": torch.zeros(2, dtype=torch.int8)}, second)
        args = [*SHORT, "--save-dir", tmp_path / "runs", "--pretrained", "-m", folder]
        jobs.append(("05", args))
    for name, ranks in zip(expected, run_jobs(1, jobs, tmp_path / "jobs"), strict=True):
        check_user_error(ranks[0], expected[name])
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))


def test_reading_takes_the_memory_of_a_share_and_a_tensor(tmp_path):
    """As the README says, and not that of the model, on one rank as on two."""
    command = [ROOT / "benchmarks/large.py", "reading", "--layers", 2, "--ranks", 1, 2]
    run_command(*command, "--output", tmp_path / "reading.json", check=True)
    rows = json.loads((tmp_path / "reading.json").read_text())["reading"]
    rows = {row["ranks"]: row for row in rows if row["chapter"] == "05"}
    for row in rows.values():
        assert row["peak"] < row["share"] + row["largest tensor"] + 20_000_000
    assert rows[2]["share"] * 2 == rows[1]["share"] == rows[1]["model"]


def test_what_chapter_04_cannot_hold_trains_here(tmp_path):
    """One model of 16 layers on two ranks that may have 3 GiB each."""
    model, peaks = make_model_folder(tmp_path / "model", 16, 512, vocabulary=16_384), {}
    for chapter, more in (("04", []), ("05", ["--recompute", "full"])):
        args = ["--device", "cpu", "-s", 512, "--global-batch-size", 8, "-b", 4, "--num-steps", 2]
        args += ["--log-every", 1, "--checkpoint-every", 99, "--eval-every", 99]
        args += ["--eval-samples", 4, "-m", model, "--save-dir", tmp_path, "-e", chapter]
        done = torchrun(2, [SCRIPTS[chapter], *args, *more], tmp_path)
        assert done.returncode == 0, done.stderr
        peaks[chapter] = metrics(tmp_path / chapter)[2]["peak_memory_gib"]
    assert peaks["05"] <= 3 < peaks["04"]


# ---- saves in the background -----------------------------------------------------------------


def test_a_save_in_the_background_is_what_a_save_is(tmp_path):
    """Bit for bit, although the training has gone on; and a run continues from either."""
    args = [*LONG, "--save-dir", tmp_path, "--keep-checkpoints", 9, "-e"]
    jobs = [("05", [*args, "plain"]), ("05", [*args, "async", "--checkpoint-async"])]
    run_or_fail(2, jobs, tmp_path / "jobs")
    for step in (10, 20, 30):
        one, other = (weights_of(tmp_path / name, step) for name in ("plain", "async"))
        assert all(torch.equal(one[name], other[name]) for name in one)
    copy_run(tmp_path / "async", 20, tmp_path / "again")
    [ranks] = run_or_fail(2, [("05", [*args, "again"])], tmp_path / "more")
    assert "step-00000020\n" in ranks[0]["stdout"] and "continuing from" in ranks[0]["stdout"]
    assert difference(metrics(tmp_path / "plain"), metrics(tmp_path / "again")) == 0.0


def test_a_run_goes_on_between_chapters_04_and_05(tmp_path):
    args = [*LONG, "--save-dir", tmp_path, "-e"]
    run_or_fail(2, [("04", [*args, "four"]), ("05", [*args, "five"])], tmp_path / "jobs")
    for before, now, chapter in (("four", "a", "05"), ("five", "b", "04")):
        copy_run(tmp_path / before, 20, tmp_path / now)
        run_or_fail(2, [(chapter, [*args, now])], tmp_path / now / "jobs")
        assert difference(metrics(tmp_path / before), metrics(tmp_path / now)) < 1e-5


def test_adamw_steps_on_all_cores_of_the_host(load, monkeypatch):
    """torchrun gives each rank one thread; a higher number that the user sets stays."""
    chapter, threads = load("05"), []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(chapter.os, "sched_getaffinity", lambda _: range(96))

    def gather(hosts, mine, group):  # eight of sixteen ranks are on this host
        hosts[:] = [mine] * 8 + ["another"] * 8

    monkeypatch.setattr(chapter.dist, "get_world_size", lambda: 16)
    monkeypatch.setattr(chapter.dist, "all_gather_object", gather)
    monkeypatch.setattr(chapter, "patient_group", lambda: None)
    args = argparse.Namespace(cpu_offload=True, lr=1e-3, weight_decay=0.1)
    for own, expected in ((1, 12), (16, 16)):
        monkeypatch.setattr(torch, "get_num_threads", lambda own=own: own)
        chapter.build_optimizer(args, torch.nn.Linear(2, 2))
        assert threads.pop() == expected
