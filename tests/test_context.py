"""Chapter 08: the curve of the chapters before, from ranks that have parts of each sequence."""

import argparse
import json
import sys

import pytest
import torch
import transformers
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from conftest import (
    ROOT,
    SHORT,
    curves_of,
    difference,
    metrics,
    run_command,
    run_or_fail,
    run_params,
    selected_runs,
)
from families import ARGS, FAMILY_NAMES, MODERN, shrink
from runs import LONG, check_user_error, copy_run, load_exported, weights_of

TWO, FOUR = ["--context-parallel-size", 2], ["--context-parallel-size", 4]
ULYSSES = ["--context-parallel-style", "ulysses"]
TP, PP = ["--tensor-parallel-size", 2], ["--pipeline-parallel-size", 2, "--batch-size", 2]
STEPS = ["--num-steps", 10]
FAMILIES = ["llama", "qwen3", "gpt_neox"]
SETTINGS = {
    "2": ["--batch-size", 2],  # so gradients are accumulated
    "long": ["--seq-length", 256],  # two chunks of the loss
    "bf16": ["--precision", "bf16"],
    "offload": ["--cpu-offload", "--recompute", "full", "--checkpoint-async"],
    "compiled": ["--compile"],
}
LAYOUTS = {
    "cp2": (2, TWO),
    "cp4": (4, FOUR),
    "dp2cp2": (4, TWO),
    "replicas": (4, [*TWO, "--replicas", 2]),
    "tp2cp2": (4, [*TP, *TWO]),
    "pp2cp2": (4, [*PP, *TWO]),
}
LAYOUTS |= {f"{name}u": (ranks, [*flags, *ULYSSES]) for name, (ranks, flags) in LAYOUTS.items()}
RUNS = [f"{layout}@{name}" for layout in LAYOUTS for name in FAMILIES]
RUNS += [f"{layout}@{name}" for layout in ("cp2", "cp2u") for name in SETTINGS]
RUNS += [f"{layout}@{name}" for layout in ("dp2cp2", "dp2cp2u") for name in ("2", "bf16")]
QUICK = ["cp2@qwen3", "cp2u@gpt_neox", "dp2cp2u@2"]


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Folders with tiny models whose key-value heads four ranks can share, or cannot."""
    size = {"vocab_size": 384, "bos_token_id": None, "eos_token_id": 1, "hidden_size": 64}
    size |= {"num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 128}
    few = size | {"num_key_value_heads": 4, "head_dim": 16}
    grown = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    configs = {
        "llama": transformers.LlamaConfig(**few),
        "qwen3": transformers.Qwen3Config(**few, tie_word_embeddings=True),
        "gpt_neox": transformers.GPTNeoXConfig(**size),
        "window": transformers.Gemma3TextConfig(**few, sliding_window=32),
        "one-head": transformers.LlamaConfig(**few | {"num_key_value_heads": 1}),
        "dynamic": transformers.LlamaConfig(**few, rope_parameters=grown),
    }
    root = tmp_path_factory.mktemp("families")
    for name, config in configs.items():
        config.save_pretrained(root / name)
        transformers.ByT5Tokenizer().save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("context")


@pytest.fixture(scope="module")
def curves(request, root, families):
    """Metrics by name of the runs that are looked at, and of the same on one rank."""
    options = SETTINGS | {name: ["-m", families / name] for name in FAMILIES}
    options = {name: [*STEPS, *flags] for name, flags in options.items()}
    runs = {1: {}, 2: {}, 4: {}}
    for run in RUNS:
        (ranks, flags), name = LAYOUTS[run.partition("@")[0]], run.partition("@")[2]
        runs[ranks][run] = ("08", [*flags, *options[name]])
    runs = selected_runs(request, runs)
    for name in {run.partition("@")[2] for run in [*runs[2], *runs[4]]}:
        chapter = "05" if name == "bf16" else "01"  # FSDP keeps bf16 between layers
        runs[1][name] = (chapter, STEPS if name in ("offload", "compiled") else options[name])
    return curves_of(root, {ranks: jobs for ranks, jobs in runs.items() if jobs})


@pytest.mark.slow
@pytest.mark.parametrize("run", run_params(RUNS, QUICK))
def test_curves_are_those_of_one_rank(curves, run):
    """Losses, gradient norms and validation losses."""
    one, other = curves[run.partition("@")[2]], curves[run]
    if not run.endswith("bf16"):
        assert difference(one, other) < 1e-5
        return
    assert difference(one, other, names=["loss", "val_loss"]) < 5e-3
    assert difference(one, other, names=["grad_norm"], relative=True) < 5e-2


@pytest.mark.slow
@pytest.mark.parametrize("run", run_params(["cp2@qwen3", "cp4u@llama"], ["cp2@qwen3"]))
def test_the_finished_model_is_what_was_evaluated(curves, root, load, families, monkeypatch, run):
    """transformers loads it by its folder alone, and finds the validation loss that was logged."""
    chapter, name = load("01"), run.partition("@")[2]
    monkeypatch.setattr(sys, "argv", ["train_llm.py", *SHORT, "-m", str(families / name)])
    args = chapter.parse_args()
    _, held_out = chapter.build_data(args, chapter.build_tokenizer_and_config(args)[0])
    with torch.no_grad():
        loss = load_exported(root / run, 10)(input_ids=held_out.long(), labels=held_out.long()).loss
    assert abs(loss.item() - curves[run][10]["val_loss"]) < 1e-5


def same(one, other, step):
    """Return whether two runs have logged the same, and have the same weights, bit for bit."""
    mine, theirs = weights_of(one, step), weights_of(other, step)
    equal = all(torch.equal(mine[name], theirs[name]) for name in mine)
    return equal and difference(metrics(one), metrics(other)) == 0.0


@pytest.mark.exhaustive
@pytest.mark.parametrize("flags", [TP, PP], ids=["tp2", "pp2"])
def test_whole_sequences_are_chapter_07(tmp_path, flags):
    """Whatever style is named."""
    args = [*SHORT, *flags, "--save-dir", tmp_path, "-e"]
    run_or_fail(
        2, [("07", [*args, "seven"]), ("08", [*args, "eight", *ULYSSES])], tmp_path / "jobs"
    )
    assert same(tmp_path / "seven", tmp_path / "eight", 20)


@pytest.mark.exhaustive
@pytest.mark.parametrize("style", [[], ULYSSES], ids=["gather", "ulysses"])
def test_resume_is_bit_identical(tmp_path, style):
    args = [*LONG, *TWO, *style, "--save-dir", tmp_path, "-e"]
    run_or_fail(2, [("08", [*args, "whole"])], tmp_path / "jobs")
    copy_run(tmp_path / "whole", 10, tmp_path / "again")
    [ranks] = run_or_fail(2, [("08", [*args, "again"])], tmp_path / "more")
    assert "continuing from" in ranks[0]["stdout"] and "step-00000010" in ranks[0]["stdout"]
    assert same(tmp_path / "whole", tmp_path / "again", 30)


# ---- what it keeps ---------------------------------------------------------------------------


def check_kept(file):
    """Compare what ranks keep of the tiny model with what the README says."""
    rows = json.loads(file.read_text())["rows"]
    whole = next(row["bytes"] for row in rows if row["ranks"] == 1)
    for row in rows:
        for length, size in row["bytes"].items():
            expected = whole[length] / row["ranks"]
            if row["style"] == "gather":  # keys and values of those four layers, 128 wide
                expected += 4 * 2 * 4 * int(length) * 128 * 4 * (1 - 1 / row["ranks"])
                expected += 4 * int(length) ** 2 * 4 * (row["ranks"] > 1) / row["ranks"]  # masks
            assert size == pytest.approx(expected, rel=0.15), (row, length)


def test_published_activations_are_as_predicted():
    check_kept(ROOT / "benchmarks/results/context.json")


@pytest.mark.slow
def test_activations_are_as_predicted(tmp_path):
    """Ulysses keeps its share; gather, besides, whole keys and values."""
    command = [ROOT / "benchmarks/context.py", "--output", tmp_path / "it.json", "--lengths", 512]
    run_command(*command, "--only", "one rank", "gather, 2 ranks", "ulysses, 2 ranks", check=True)
    check_kept(tmp_path / "it.json")


# ---- what is refused -------------------------------------------------------------------------
REFUSED = {
    "ranks": ([*TWO, *TP], 2, "--pipeline-parallel-size 1: 2 ranks are not divisible by 4"),
    "length": ([*TWO, "-s", 63], 2, "--seq-length 63: not divisible by the 2 ranks that split"),
    "both": ([*TWO, *TP, "-s", 66], 4, "--seq-length 66: not divisible by the 4 ranks that split"),
    "samples": ([*TWO, "--global-batch-size", 7], 4, "7: not divisible by 2 data-parallel ranks"),
    "heads": ([*TWO, *ULYSSES, "-m", "one-head"], 2, "1 key-value heads for 2 ranks"),
    "parts of them": ([*FOUR, *TP, *ULYSSES], 8, "4 key-value heads for 8 ranks"),
    "window": ([*TWO, "-m", "window"], 2, "window has a mask, which needs full sequences"),
    "positions": ([*TWO, "-m", "dynamic"], 2, "full sequences, because it has dynamic"),
}


@pytest.fixture
def begin(load, families, monkeypatch):
    """Return a function that does with arguments what rank 0 does before it has a model."""

    def begin(*given, world_size):
        variables = {"WORLD_SIZE": world_size, "RANK": 0, "LOCAL_RANK": 0, "MASTER_ADDR": "here"}
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        given = [families / word if (families / str(word)).is_dir() else word for word in given]
        monkeypatch.setattr(sys, "argv", ["train_llm.py", *map(str, [*SHORT, *given])])
        chapter = load("08")
        args = chapter.parse_args()
        chapter.build_model(args, chapter.build_tokenizer_and_config.__wrapped__(args)[1])
        return args

    return begin


@pytest.mark.parametrize("case", REFUSED)
def test_one_line_says_why_sequences_cannot_be_split(begin, capsys, case):
    given, ranks, expected = REFUSED[case]
    with pytest.raises(SystemExit) as stop:
        begin(*given, world_size=ranks)
    check_user_error({"stderr": capsys.readouterr().err, "status": stop.value.code}, expected)


def test_a_layer_that_calls_attention_twice_is_refused(load, capsys):
    with pytest.raises(SystemExit):
        token_by_token(load("08"), "diffllama")
    assert "needs full sequences" in capsys.readouterr().err


def test_gathering_needs_no_heads_to_share(begin):
    assert begin(*FOUR, "-m", "one-head", world_size=8).accumulation == 1


def alone(_module, query, key, value, *_, **__):
    """Attend from each token to itself only, in a way that shows whether it met the right key."""
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    return ((query * key).sum(-1, keepdim=True) * value).transpose(1, 2).contiguous(), None


def token_by_token(chapter, kind):
    """Return how far a family's parts of sequences are from the whole, apart from attention."""
    config = shrink(CONFIG_MAPPING[kind]())
    split = {"tensor_parallel_size": 1, "context_parallel_size": 2}
    split |= {"context_parallel_style": "gather", "pipeline_parallel_size": 1}
    chapter.build_model(argparse.Namespace(**ARGS, **split), config)
    model = AutoModelForCausalLM.from_config(config).eval()
    AttentionInterface.register("alone", alone)
    model.set_attn_implementation("alone")
    ids, positions = torch.arange(3, 35).view(2, 16), torch.arange(16)[None]
    with torch.no_grad():
        halves = zip(ids.split(8, 1), positions.split(8, 1), strict=True)
        parts = [model(input_ids=a, position_ids=b, use_cache=False).logits for a, b in halves]
        whole = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return (whole - torch.cat(parts, 1)).abs().max().item()


@pytest.mark.parametrize("kind", [kind for kind in MODERN if kind != "diffllama"])
def test_all_but_attention_takes_token_by_token(load, kind):
    """So it does not matter which tokens a rank has."""
    assert token_by_token(load("08"), kind) < 1e-5


@pytest.mark.exhaustive
def test_families_that_need_whole_sequences_are_refused(load):
    """Of all that can be made small by the rule of test_families."""
    found, left_out = {}, {}
    for kind in FAMILY_NAMES:
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(shrink(CONFIG_MAPPING[kind]()))
            assert model.num_parameters() < 20_000_000
            found[kind] = token_by_token(load("08"), kind)
        except (Exception, SystemExit) as error:
            left_out[kind] = f"{type(error).__name__}: {error}"
    assert not {kind: away for kind, away in found.items() if away > 1e-5}
    assert len(found) > 60, left_out
