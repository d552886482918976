"""Chapter 06: the curve of the chapters before, from layers that no rank computes whole."""

import argparse
import contextlib
import json
import sys

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from conftest import (
    ROOT,
    SHORT,
    curves_of,
    difference,
    free_port,
    metrics,
    run_jobs,
    run_or_fail,
    same_curve,
    start_ranks,
)
from families import MODERN, shrink
from runs import LONG, check_user_error, copy_run, load_exported, weights_of

TWO, FOUR = ["--tensor-parallel-size", 2], ["--tensor-parallel-size", 4]
REPLICAS = [*TWO, "--replicas", 2]
FAMILIES = ["llama", "qwen3", "gpt_neox", "gemma", "odd"]
SETTINGS = {
    "": [],
    "-4": ["--batch-size", 4],
    "-1": ["--batch-size", 1],
    "-compiled": ["--compile"],
    "-offload": ["--cpu-offload", "--recompute", "full", "--checkpoint-async"],
    "-long": ["--seq-length", 256, "--batch-size", 8],  # two chunks of the loss on each rank
}
BF16 = ["--precision", "bf16"]
KINDS = ["all_gather_into", "reduce_scatter"]
SPLIT = {"tp2": (2, TWO), "dp2tp2": (4, TWO), "replicas": (4, REPLICAS), "tp4": (4, FOUR)}
TRIED = {  # by layout: settings, families, precisions besides fp32
    "tp2": ["-4", "-bf16", "-qwen3", "-gpt_neox", "-gemma"],
    "dp2tp2": ["-1"],
    "replicas": ["-1"],
    "tp4": ["-odd"],
}
MATRIX = {
    "tp2": ["", "-1", "-compiled", "-offload", "-long", "-llama", "-odd"],
    "dp2tp2": ["", "-4", "-offload", "-long", "-bf16", *(f"-{name}" for name in FAMILIES)],
    "replicas": ["", "-4", "-offload", "-qwen3", "-odd"],
    "tp4": ["", "-1", "-offload", "-long", "-bf16", *(f"-{name}" for name in FAMILIES[:4])],
}


def runs_of(tried):
    return [f"{layout}{name}" for layout, names in tried.items() for name in names]


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Folders with tiny models whose heads four ranks can share."""
    ids = {"vocab_size": 384, "bos_token_id": None, "eos_token_id": 1}
    size = ids | {"hidden_size": 64}
    size |= {"num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 128}
    size |= {"max_position_embeddings": 256}
    few = size | {"num_key_value_heads": 4, "head_dim": 16}
    configs = {
        "llama": transformers.LlamaConfig(**few),
        "qwen3": transformers.Qwen3Config(**few, tie_word_embeddings=True),
        "gpt_neox": transformers.GPTNeoXConfig(**size),
        "gemma": transformers.GemmaConfig(**few),
        "odd": transformers.LlamaConfig(**few | {"vocab_size": 385}),
        "gpt2": transformers.GPT2Config(**ids, n_embd=64, n_layer=2, n_head=4),
        "mixtral": transformers.MixtralConfig(**few, num_local_experts=4),
        "window": transformers.MistralConfig(**few, sliding_window=32),
        "one-head": transformers.LlamaConfig(**few | {"num_key_value_heads": 1}),
    }
    root = tmp_path_factory.mktemp("families")
    for name, config in configs.items():
        config.save_pretrained(root / name)
        transformers.ByT5Tokenizer().save_pretrained(root / name)
    return root


def train(root, families, tried, steps=20):
    """Run what is listed, and the same on one rank; return all metrics by name."""
    options = (
        SETTINGS | {"-bf16": BF16} | {f"-{name}": ["-m", families / name] for name in FAMILIES}
    )
    options = {name: [*flags, "--num-steps", steps] for name, flags in options.items()}
    whole = sorted({plain(name) for names in tried.values() for name in names})
    runs = {1: {f"01{name}": (whole_by(name), options[name]) for name in whole}, 2: {}, 4: {}}
    for layout, names in tried.items():
        world_size, flags = SPLIT[layout]
        runs[world_size] |= {f"{layout}{name}": ("06", [*options[name], *flags]) for name in names}
    for world_size, jobs in runs.items():  # what was compiled remembers the groups of a job before
        for name in [name for name, (_, flags) in jobs.items() if "--compile" in flags]:
            curves_of(root, {world_size: {name: jobs.pop(name)}})
    return curves_of(root, runs)


def plain(name):
    """Return the setting whose curve that of a setting must be."""
    return name if name[1:] in (*FAMILIES, "bf16", "long") else ""


def whole_by(name):
    """Return the chapter to compare with: FSDP keeps bf16 between layers, autocast does not."""
    return "05" if name == "-bf16" else "01"


def compare(curves, run):
    """Compare a run's curve with that of one rank."""
    layout = max((layout for layout in SPLIT if run.startswith(layout)), key=len)
    one, other = curves[f"01{plain(run.removeprefix(layout))}"], curves[run]
    if not run.endswith("bf16"):
        assert difference(one, other) < 1e-5
        return
    assert difference(one, other, names=["loss", "val_loss"]) < 5e-3
    assert difference(one, other, names=["grad_norm"], relative=True) < 5e-2


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("tensor")


@pytest.fixture(scope="module")
def curves(root, families):
    return train(root, families, TRIED)


@pytest.mark.slow
@pytest.mark.parametrize("run", runs_of(TRIED))
def test_curves_are_those_of_one_rank(curves, run):
    """Losses, gradient norms and validation losses."""
    compare(curves, run)


@pytest.fixture(scope="module")
def more_curves(tmp_path_factory, families):
    return train(tmp_path_factory.mktemp("matrix"), families, MATRIX, steps=10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", runs_of(MATRIX))
def test_all_settings_together(more_curves, run):
    compare(more_curves, run)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["tp2-qwen3", "tp2-gpt_neox", "tp4-odd"])
def test_the_finished_model_is_what_was_evaluated(curves, root, families, load, monkeypatch, run):
    """transformers loads it by its folder alone, and finds the validation loss that was logged."""
    chapter = load("01")
    args = [*SHORT, "--save-dir", str(root), "-m", str(families / run.partition("-")[2])]
    monkeypatch.setattr(sys, "argv", ["train_llm.py", *map(str, args)])
    args = chapter.parse_args()
    _, held_out = chapter.build_data(args, chapter.build_tokenizer_and_config(args)[0])
    model = load_exported(root / run, 20)
    with torch.no_grad():
        loss = model(input_ids=held_out.long(), labels=held_out.long()).loss.item()
    assert abs(loss - curves[run][20]["val_loss"]) < 1e-5


# ---- where it starts -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param("tp2", marks=pytest.mark.exhaustive), "dp2tp2"])
def test_weights_are_those_of_chapter_01(families, tmp_path, layout):
    """Drawn or read, bit for bit, with the buffers, and nothing is left as memory was."""
    world_size, flags = SPLIT[layout]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(families / "qwen3")
    )
    model.save_pretrained(tmp_path / "published", max_shard_size="20KB")
    transformers.ByT5Tokenizer().save_pretrained(tmp_path / "published")
    cases = {family: ["-m", families / family] for family in FAMILIES} | {"tiny": []}
    cases |= {"replicas": ["--replicas", world_size // 2], "offload": ["--cpu-offload"]}
    cases |= {"published": ["-m", tmp_path / "published", "--pretrained"]}
    common = ["--device", "cpu", "--save-dir", tmp_path, "--seq-length", 64]
    cases = {name: list(map(str, [*common, *args])) for name, args in cases.items()}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    files = tmp_path / "cases.json", tmp_path / "done"
    command = [ROOT / "tests/support/values.py", *files, "06", *flags]
    ranks = start_ranks(world_size, list(map(str, command)), tmp_path, MASTER_PORT=str(free_port()))
    statuses = [rank.wait(timeout=200) for rank in ranks]
    assert statuses == [0] * world_size, (tmp_path / "rank0.log").read_text()
    different = json.loads((tmp_path / "done").read_text())
    assert different.keys() >= cases.keys() and not any(different.values()), different
    assert "published, exported" in different


# ---- what it sends ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traffic(tmp_path_factory):
    """What `traffic.py` counts on two groups of two ranks, by setting."""
    folder = tmp_path_factory.mktemp("traffic")
    common = [*SHORT, *TWO, "--save-dir", folder, "--batch-size", 2]
    cases = {name: ["--recompute", name] for name in ("none", "full", "selective")}
    cases["once"] = ["--batch-size", 4]
    cases = {name: list(map(str, [*common, *args])) for name, args in cases.items()}
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [ROOT / "tests/support/traffic.py", folder / "cases.json", folder / "done"]
    ranks = start_ranks(4, list(map(str, command)), folder, MASTER_PORT=str(free_port()))
    statuses = [rank.wait(timeout=200) for rank in ranks]
    assert statuses == [0] * 4, (folder / "rank0.log").read_text()
    return json.loads((folder / "done").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["none", "full", "selective", "once"])
def test_communication_is_what_the_readme_says(traffic, setting):
    """A layer gathers and reduce-scatters its hidden states, T d numbers, four times each.

    Besides, the embedding and the output layer do each once: hidden states, and weights.
    """
    layers, width, vocabulary, length = 4, 128, 384, 64
    samples, times = (4, 1) if setting == "once" else (2, 2)
    hidden, head = samples * length * width * 4, vocabulary * width * 4
    again = 2 * layers if setting in ("full", "selective") else 0  # as a backward starts with them
    gathers, reductions = (traffic[setting][f"{kind}_tensor"] for kind in KINDS)
    assert gathers == {str(hidden): times * (4 * layers + 1 + again), str(head): times}
    again = layers if again else 0  # the last one of a layer is not needed again
    assert reductions == {str(hidden): times * (4 * layers + 1 + again), str(head): times}


# ---- where it goes on ------------------------------------------------------------------------


def carry_on(chapter, world_size, before, folder, step, *args):
    """Continue a run from its checkpoint of `step`; return the folder in which it ended."""
    copy_run(before, step, folder)
    args = [*LONG, "--save-dir", folder.parent, "-e", folder.name, *args]
    [ranks] = run_or_fail(world_size, [(chapter, args)], folder.with_suffix(".jobs"), timeout=200)
    assert f"continuing from {folder}/checkpoints/step-{step:08}" in ranks[0]["stdout"]
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run on four ranks, two of which split each matrix."""
    root = tmp_path_factory.mktemp("grid")
    args = [*LONG, *TWO, "--save-dir", root, "-e", "run"]
    run_or_fail(4, [("06", args)], root / "jobs", timeout=200)
    return root / "run"


@pytest.mark.exhaustive  # test_kill.py has two ranks
def test_resume_is_bit_identical(whole, tmp_path):
    again = carry_on("06", 4, whole, tmp_path / "again", 10, *TWO)
    assert difference(metrics(whole), metrics(again)) == 0.0
    one, other = weights_of(whole, 30), weights_of(again, 30)
    assert all(torch.equal(one[name], other[name]) for name in one)


OFFLOAD = ["--cpu-offload"]
WAYS = {  # chapter, ranks, and step from which on they continue
    "05 and back": [("05", 2, 10, OFFLOAD), ("06", 2, 20, TWO)],
    "all layouts": [("06", 4, 10, []), ("05", 2, 15, OFFLOAD), ("06", 2, 20, TWO)],
}
WAYS["all layouts"].append(("06", 4, 25, REPLICAS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["05 and back", pytest.param("all layouts", marks=pytest.mark.exhaustive)]
)
def test_the_curve_goes_on_in_other_layouts(whole, tmp_path, way):
    """Each time, ranks find their parts of weights and moments, whichever layout wrote them."""
    before = whole
    for chapter, world_size, step, args in WAYS[way]:
        folder = tmp_path / f"from{step}"
        before = carry_on(chapter, world_size, before, folder, step, "--checkpoint-every", 5, *args)
    assert same_curve(metrics(whole), metrics(before))
    one, other = weights_of(whole, 30), weights_of(before, 30)
    assert all(torch.allclose(one[name], other[name], rtol=0, atol=1e-4) for name in one)


# ---- what is refused -------------------------------------------------------------------------
REFUSED = {
    "no plan": (
        "gpt2",
        TWO,
        "the plan of {model} does not say how to split transformer.wpe",
    ),
    "experts": (
        "mixtral",
        TWO,
        "the plan of {model} does not say how to split model.layers.0.mlp.gate",
    ),
    "window": ("window", TWO, "2: {model} has a mask, which needs full sequences"),
    "heads": ("one-head", TWO, "2: {model} has 1 key-value heads; choose a divisor"),
    "ranks": ("llama", FOUR, "--tensor-parallel-size 4: 2 ranks are not divisible by 4"),
    "length": (
        "llama",
        [*TWO, "--seq-length", 63],
        "--seq-length 63: not divisible by the 2 ranks that split a sequence",
    ),
    "zero": (
        "llama",
        ["--tensor-parallel-size", 0],
        "--tensor-parallel-size 0: must be at least 1",
    ),
}


@pytest.fixture
def begin(load, monkeypatch):
    """Return a function that does with arguments what rank 0 does before it has a model."""

    def begin(*given, world_size):
        variables = {"WORLD_SIZE": world_size, "RANK": 0, "LOCAL_RANK": 0, "MASTER_ADDR": "here"}
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(sys, "argv", ["train_llm.py", *map(str, [*SHORT, *given])])
        chapter = load("06")
        args = chapter.parse_args()
        config = transformers.LlamaConfig(hidden_size=32, num_hidden_layers=1)
        if args.model_name != "tiny":
            config = transformers.AutoConfig.from_pretrained(args.model_name)
        chapter.build_model(args, config)
        return args

    return begin


@pytest.mark.parametrize("case", REFUSED)
def test_one_line_says_why_it_cannot_be_split(begin, families, capsys, case):
    family, args, expected = REFUSED[case]
    with pytest.raises(SystemExit) as stop:
        begin("-m", families / family, *args, world_size=2)
    expected = expected.format(model=families / family)
    check_user_error({"stderr": capsys.readouterr().err, "status": stop.value.code}, expected)


@pytest.mark.slow
def test_on_two_ranks_both_end_and_nothing_is_written(families, tmp_path):
    args = [*SHORT, *TWO, "--save-dir", tmp_path / "runs", "-m", families / "gpt2"]
    [ranks] = run_jobs(2, [("06", args)], tmp_path / "jobs", timeout=100)
    assert all(rank["status"] for rank in ranks)  # the other may see no more than rank 0's end
    check_user_error(ranks[0], "--tensor-parallel-size 2: ")
    assert not [path for path in tmp_path.glob("runs/**/*") if path.is_file()]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_that_split_a_matrix_take_the_same_samples(begin, capsys, size):
    """So it is their groups that must divide the global batch."""
    split = ["--tensor-parallel-size", size]
    args = begin(*split, "--global-batch-size", 8, world_size=4)
    assert args.micro_batch_size * args.accumulation == 8 * size // 4
    if size < 4:
        with pytest.raises(SystemExit):
            begin(*split, "--global-batch-size", 7, world_size=4)
        expected = f"--global-batch-size 7: not divisible by {4 // size} data-parallel ranks"
        assert expected in capsys.readouterr().err


def test_what_is_not_refused(load):
    """Every family is split as its plan says, or refused: with a style that is unknown, always."""
    chapter, accepted = load("06"), []
    args = argparse.Namespace(tensor_parallel_size=2, model_name="it")
    for kind in MODERN:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shrink(CONFIG_MAPPING[kind]()))
        model.config._attn_implementation = "causal_sdpa"
        with contextlib.suppress(SystemExit):
            chapter.check_model(args, model)
            assert set(model.tp_plan.values()) <= chapter.STYLES.keys()
            accepted.append(kind)
    assert {"llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "olmo2", "gpt_neox"} <= {
        *accepted
    }
    assert not {"gpt2", "opt", "mixtral", "qwen3_moe", "apertus", "diffllama"} & {*accepted}
