"""Chapter 07: the curve of the chapters before, from layers that are spread over stages."""

import argparse
import json
import sys

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from conftest import (
    ROOT,
    SCRIPTS,
    SHORT,
    curves_of,
    difference,
    free_port,
    metrics,
    run_command,
    run_jobs,
    run_or_fail,
    same_curve,
    start_ranks,
)
from families import FAMILY_NAMES, MODERN, shrink
from runs import LONG, check_user_error, copy_run, weights_of

TWO, FOUR = ["--pipeline-parallel-size", 2], ["--pipeline-parallel-size", 4]
TP = ["--tensor-parallel-size", 2]
FAMILIES = ["llama", "qwen3", "gpt_neox", "gpt2", "olmo"]
SETTINGS = {  # four micro-batches where nothing else is said
    "": ["--batch-size", 2],
    "-8": ["--batch-size", 1],
    "-2": ["--batch-size", 4],
    "-gpipe": ["--batch-size", 2, "--pipeline-schedule", "gpipe"],
    "-interleaved": ["--batch-size", 2, "--pipeline-schedule", "interleaved-1f1b"],
    "-compiled": ["--batch-size", 4, "--compile"],
    "-offload": ["--batch-size", 1, "--cpu-offload", "--recompute", "full", "--checkpoint-async"],
    "-replicas": ["--batch-size", 2, "--replicas", 2],
    "-five": ["--batch-size", 2, "--config", "num_hidden_layers=5"],
    "-bf16": ["--batch-size", 2, "--precision", "bf16"],
}
LAYOUTS = {
    "pp2": (2, TWO),
    "pp4": (4, FOUR),
    "pp2dp2": (4, TWO),
    "pp2tp2": (4, [*TWO, *TP]),
    "pp2dp2tp2": (8, [*TWO, *TP]),
}
TRIED = {  # by layout: settings and families
    "pp2": ["-gpipe", "-qwen3"],
    "pp2tp2": ["-interleaved"],
    "pp2dp2": [""],
}
MATRIX = {
    "pp2": ["", "-8", "-2", "-interleaved", "-compiled", "-offload", "-five", "-bf16"],
    "pp2dp2": ["", "-8", "-gpipe", "-interleaved", "-offload", "-replicas", "-bf16", "-qwen3"],
    "pp2tp2": ["", "-8", "-gpipe", "-offload", "-bf16", "-llama", "-qwen3", "-gpt_neox"],
    "pp4": ["", "-8", "-gpipe", "-five", "-bf16", *(f"-{name}" for name in FAMILIES[1:])],
    "pp2dp2tp2": ["-qwen3"],
}
MATRIX["pp2"] += [f"-{name}" for name in FAMILIES if name != "qwen3"]


def runs_of(tried):
    return [f"{layout}{name}" for layout, names in tried.items() for name in names]


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Folders with tiny models of four layers."""
    ids = {"vocab_size": 384, "bos_token_id": None, "eos_token_id": 1}
    size = ids | {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    size |= {"intermediate_size": 128, "max_position_embeddings": 256}
    few = size | {"num_key_value_heads": 2}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    opt = {"ffn_dim": 64, "word_embed_proj_dim": 64, "num_hidden_layers": 4, "hidden_size": 64}
    configs = {
        "llama": transformers.LlamaConfig(**few),
        "qwen3": transformers.Qwen3Config(**few, head_dim=16, tie_word_embeddings=True),
        "gpt_neox": transformers.GPTNeoXConfig(**size),
        "gpt2": transformers.GPT2Config(**ids, **still, n_embd=64, n_layer=4, n_head=4),
        "gpt2-dropout": transformers.GPT2Config(**ids, n_embd=64, n_layer=4, n_head=4),
        "olmo": transformers.OlmoConfig(**few),
        "opt": transformers.OPTConfig(**ids, **opt, num_attention_heads=4),
    }
    root = tmp_path_factory.mktemp("families")
    for name, config in configs.items():
        config.save_pretrained(root / name)
        transformers.ByT5Tokenizer().save_pretrained(root / name)
    return root


def train(root, families, tried, steps=20):
    """Run what is listed, and the same on one rank; return all metrics by name."""
    options = SETTINGS | {f"-{name}": [*SETTINGS[""], "-m", families / name] for name in FAMILIES}
    options = {name: [*flags, "--num-steps", steps] for name, flags in options.items()}
    whole = sorted({plain(name) for names in tried.values() for name in names})
    runs = {
        1: {f"01{name}": (whole_by(name), options[name]) for name in whole},
        2: {},
        4: {},
        8: {},
    }
    for layout, names in tried.items():
        world_size, flags = LAYOUTS[layout]
        runs[world_size] |= {f"{layout}{name}": ("07", [*options[name], *flags]) for name in names}
    for world_size, jobs in runs.items():  # what was compiled remembers the groups of a job before
        for name in [name for name, (_, flags) in jobs.items() if "--compile" in flags]:
            curves_of(root, {world_size: {name: jobs.pop(name)}})
    return curves_of(root, {ranks: by_name for ranks, by_name in runs.items() if by_name})


def plain(name):
    """Return the setting whose curve that of a setting must be."""
    if name.endswith("bf16"):
        return "-bf16"
    return name if name[1:] in (*FAMILIES, "five") else ""


def whole_by(name):
    """Return the chapter to compare with: FSDP keeps bf16 between layers, autocast does not."""
    return "05" if name == "-bf16" else "01"


def compare(curves, run):
    """Compare a run's curve with that of one rank."""
    layout = max((layout for layout in LAYOUTS if run.startswith(layout)), key=len)
    one, other = curves[f"01{plain(run.removeprefix(layout))}"], curves[run]
    if not run.endswith("bf16"):
        assert difference(one, other) < 1e-5
        return
    assert difference(one, other, names=["loss", "val_loss"]) < 5e-3
    assert difference(one, other, names=["grad_norm"], relative=True) < 5e-2


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def curves(root, families):
    return train(root, families, TRIED)


@pytest.mark.slow
@pytest.mark.parametrize("run", runs_of(TRIED))
def test_curves_are_those_of_one_rank(curves, run):
    """Losses, gradient norms and validation losses: of ten samples, which no batch divides."""
    compare(curves, run)


@pytest.fixture(scope="module")
def more_curves(tmp_path_factory, families):
    return train(tmp_path_factory.mktemp("matrix"), families, MATRIX, steps=10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", runs_of(MATRIX))
def test_all_settings_together(more_curves, run):
    compare(more_curves, run)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["pp2-qwen3", "pp2tp2-interleaved", "pp2dp2"])
def test_the_finished_model_is_what_was_evaluated(curves, root, load, monkeypatch, families, run):
    """transformers loads it by its folder alone, and finds the validation loss that was logged."""
    chapter, args = load("01"), [*SHORT, "--save-dir", str(root)]
    args += ["-m", str(families / "qwen3")] if run.endswith("qwen3") else []
    monkeypatch.setattr(sys, "argv", ["train_llm.py", *map(str, args)])
    args = chapter.parse_args()
    _, held_out = chapter.build_data(args, chapter.build_tokenizer_and_config(args)[0])
    model, info = AutoModelForCausalLM.from_pretrained(
        root / run / "model", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with torch.no_grad():
        loss = model(input_ids=held_out.long(), labels=held_out.long()).loss.item()
    assert abs(loss - curves[run][20]["val_loss"]) < 1e-5
    expected = weights_of(root / run, 20)
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())


@pytest.mark.exhaustive
def test_one_rank_in_the_pipeline_is_chapter_06(tmp_path):
    """Bit for bit, whatever schedule is named."""
    args = [*SHORT, *TP, "--batch-size", 2, "--save-dir", tmp_path, "-e"]
    interleaved = ["--pipeline-schedule", "interleaved-1f1b"]
    jobs = [("06", [*args, "six"]), ("07", [*args, "seven", *interleaved])]
    run_or_fail(2, jobs, tmp_path / "jobs", timeout=200)
    assert difference(metrics(tmp_path / "six"), metrics(tmp_path / "seven")) == 0.0
    one, other = weights_of(tmp_path / "six", 20), weights_of(tmp_path / "seven", 20)
    assert all(torch.equal(one[name], other[name]) for name in one)


# ---- where it starts -------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout, schedule", [("pp2", "interleaved-1f1b"), ("pp4", "1f1b")])
def test_weights_are_those_of_chapter_01(families, tmp_path, layout, schedule):
    """Drawn or read, bit for bit, with the buffers, and nothing is left as memory was."""
    world_size, flags = LAYOUTS[layout]
    tried = FAMILIES if schedule == "1f1b" else ["llama", "gpt_neox"]
    published = "qwen3" if schedule == "1f1b" else "gpt_neox"
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(families / published)
    )
    model.save_pretrained(tmp_path / "published", max_shard_size="20KB")
    transformers.ByT5Tokenizer().save_pretrained(tmp_path / "published")
    cases = {family: ["-m", families / family] for family in tried}
    cases |= {"published": ["-m", tmp_path / "published", "--pretrained"]}
    common = ["--device", "cpu", "--save-dir", tmp_path, "--seq-length", 64, "--batch-size", 2]
    cases = {name: list(map(str, [*common, *args])) for name, args in cases.items()}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    command = [ROOT / "tests/support/values.py", tmp_path / "cases.json", tmp_path / "done", "07"]
    command += [*flags, "--pipeline-schedule", schedule]
    ranks = start_ranks(world_size, list(map(str, command)), tmp_path, MASTER_PORT=str(free_port()))
    statuses = [rank.wait(timeout=200) for rank in ranks]
    assert statuses == [0] * world_size, (tmp_path / "rank0.log").read_text()
    different = json.loads((tmp_path / "done").read_text())
    assert different.keys() >= cases.keys() and not any(different.values()), different
    assert "published, exported" in different


@pytest.fixture
def parse(load, monkeypatch):
    """Return a function that parses arguments as rank 0 of so many does."""

    def parse(*given, world_size):
        variables = {"WORLD_SIZE": world_size, "RANK": 0, "LOCAL_RANK": 0, "MASTER_ADDR": "here"}
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(sys, "argv", ["train_llm.py", *map(str, [*SHORT, *given])])
        return load("07").parse_args()

    return parse


@pytest.mark.parametrize(
    "layers, stages", [(4, 2), (4, 4), (5, 2), (8, 8), (32, 4), (80, 8), (126, 16), (126, 64)]
)
def test_layers_are_spread_evenly(load, capsys, layers, stages):
    """The first stage has the embedding too, the last norm and head: each counts as a layer."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(hidden_size=32, num_hidden_layers=layers, vocab_size=384)
        )
    parts = load("07").split_into_stages(argparse.Namespace(num_stages=stages), model)
    ends = [model.model.embed_tokens, model.model.norm, model.lm_head]
    found = [[part for part in stage if part not in ends] for stage in parts]
    assert [part for stage in found for part in stage] == [*model.model.layers]
    counts = list(map(len, found))
    assert min(counts) > 0
    counts[0], counts[-1] = counts[0] + 1, counts[-1] + 1
    assert max(counts) - min(counts) == (1 if (layers + 2) % stages else 0)
    assert ends[0] in parts[0] and ends[1] in parts[-1] and ends[2] in parts[-1]
    line = capsys.readouterr().out
    assert line.startswith(f"layers of each stage: 0-{len(found[0]) - 1} ")
    assert line.endswith(f"-{layers - 1}\n") and line.count("-") == stages


def chained(chapter, kind, stages=2):
    """Return what a small model and its stages, one after another, make of the same ids."""
    torch.manual_seed(0)
    config = shrink(CONFIG_MAPPING[kind]())
    model = AutoModelForCausalLM.from_config(config).eval()
    model.get_output_embeddings().forward = torch.clone  # as in build_model
    args = {"num_stages": stages, "pipeline_parallel_size": stages, "tensor_parallel_size": 1}
    args = argparse.Namespace(**args, model_name=kind, seq_length=16)
    chapter.check_model(args, model)
    parts = chapter.split_into_stages(args, model)
    ids = torch.arange(32).view(2, 16)
    with torch.no_grad():
        whole, hidden = model(input_ids=ids, use_cache=False).logits, ids
        for number in range(stages):
            hidden = chapter.build_stage(args, model, parts, number)(hidden)
    return whole, hidden


@pytest.mark.parametrize("kind", MODERN)
def test_stages_one_after_another_are_the_model(load, kind):
    """Bit for bit, or it is refused: whatever it does before its layers, and after them."""
    if not CONFIG_MAPPING[kind].base_model_pp_plan and kind != "gpt2":
        with pytest.raises(SystemExit):
            chained(load("07"), kind)
    else:
        assert torch.equal(*chained(load("07"), kind))


@pytest.mark.exhaustive
def test_stages_of_all_families(load):
    """All with a plan that are causal models and can be made small by the rule of test_families."""
    found, left_out, chapter = {}, {}, load("07")
    for kind in FAMILY_NAMES:
        if not CONFIG_MAPPING[kind].base_model_pp_plan:
            continue
        try:
            found[kind] = torch.equal(*chained(chapter, kind))
        except (Exception, SystemExit) as error:
            left_out[kind] = f"{type(error).__name__}: {error}"
    print(f"{len(found)} families; left out: {left_out}")
    assert all(found.values()), [kind for kind, same in found.items() if not same]
    assert len(found) > 50, left_out


@pytest.mark.parametrize("world_size, size", [(2, TWO), (4, TWO), (4, FOUR), (8, [*TWO, *TP])])
@pytest.mark.parametrize("given", ["1f1b", "interleaved-1f1b"])
def test_a_pipeline_takes_the_samples_of_one_rank(parse, given, world_size, size):
    """All at once: it is the schedule that splits them, into what --batch-size allows."""
    args = parse(*size, "--batch-size", 1, "--pipeline-schedule", given, world_size=world_size)
    groups = world_size // args.pipeline_parallel_size // args.tensor_parallel_size
    assert args.micro_batch_size == 1 and args.accumulation == 8 // groups
    assert args.num_stages == args.pipeline_parallel_size * (1 if given == "1f1b" else 2)


@pytest.mark.exhaustive
def test_a_step_gathers_each_layer_once(tmp_path):
    """However many micro-batches it has; so does an evaluation. And it reduces once."""
    args = [*SHORT, *TWO, "--batch-size", 1, "--num-steps", 3, "--eval-samples", 8]
    args += ["--save-dir", tmp_path, "-e", "run"]
    command = [ROOT / "tests/support/gathers.py", tmp_path, SCRIPTS["07"], *args]
    ranks = start_ranks(4, list(map(str, command)), tmp_path, MASTER_PORT=str(free_port()))
    statuses = [rank.wait(timeout=200) for rank in ranks]
    assert statuses == [0] * 4, (tmp_path / "rank0.log").read_text()
    counted = [json.loads((tmp_path / f"counted{rank}").read_text()) for rank in range(4)]
    groups = 3  # two layers and what is around them
    # Three steps, two evaluations, and the run that tries all stages.
    assert counted == [{"gathers": groups * (3 + 2 + 1), "reductions": groups * 3}] * 4


# ---- where it goes on ------------------------------------------------------------------------


def carry_on(chapter, world_size, before, folder, step, *args):
    """Continue a run from its checkpoint of `step`; return the folder in which it ended."""
    copy_run(before, step, folder)
    args = [*LONG, "--save-dir", folder.parent, "-e", folder.name, *args]
    [ranks] = run_or_fail(world_size, [(chapter, args)], folder.with_suffix(".jobs"), timeout=200)
    assert f"continuing from {folder}/checkpoints/step-{step:08}" in ranks[0]["stdout"]
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, families):
    """A run of two stages, each on two ranks that split its matrices; embeddings are tied."""
    root = tmp_path_factory.mktemp("grid")
    args = [*LONG, *SETTINGS[""], *TWO, *TP, "-m", families / "qwen3"]
    run_or_fail(4, [("07", [*args, "--save-dir", root, "-e", "run"])], root / "jobs", timeout=200)
    return root / "run"


@pytest.mark.exhaustive  # test_kill.py has two ranks
def test_resume_is_bit_identical(whole, families, tmp_path):
    args = [*SETTINGS[""], *TWO, *TP, "-m", families / "qwen3"]
    again = carry_on("07", 4, whole, tmp_path / "again", 10, *args)
    assert difference(metrics(whole), metrics(again)) == 0.0
    one, other = weights_of(whole, 30), weights_of(again, 30)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_one_curve_through_chapters_06_07_and_05(families, tmp_path):
    """It is chapter 01's: ranks find their parts of what another layout has saved."""
    args = [*LONG, *SETTINGS[""], "-m", families / "qwen3", "--save-dir", tmp_path, "-e"]
    run_or_fail(1, [("01", [*args, "whole"])], tmp_path / "jobs1", timeout=200)
    run_or_fail(4, [("06", [*args, "first", *TP])], tmp_path / "jobs4", timeout=200)
    given = [*SETTINGS[""], "-m", families / "qwen3"]
    split = carry_on("07", 4, tmp_path / "first", tmp_path / "second", 10, *given, *TWO, *TP)
    last = carry_on("05", 1, split, tmp_path / "last", 20, *given)
    assert same_curve(metrics(tmp_path / "whole"), metrics(last))


@pytest.mark.exhaustive
def test_the_curve_goes_on_in_other_layouts(whole, families, tmp_path):
    interleaved = [*SETTINGS["-interleaved"], *TWO]
    steps = [("06", 4, 10, TP), ("07", 2, 15, interleaved), ("05", 1, 20, [])]
    steps += [("07", 4, 25, [*SETTINGS[""], *TWO])]
    before = whole
    common = ["--checkpoint-every", 5, "-m", families / "qwen3"]
    for chapter, world_size, step, args in steps:
        folder = tmp_path / f"from{step}"
        before = carry_on(chapter, world_size, before, folder, step, *common, *args)
    assert same_curve(metrics(whole), metrics(before))
    one, other = weights_of(whole, 30), weights_of(before, 30)
    assert all(torch.allclose(one[name], other[name], rtol=0, atol=1e-4) for name in one)


@pytest.mark.exhaustive
def test_evaluation_has_no_dropout(families, tmp_path):
    """In no part of a stage: the loss before the first step is that without any."""
    args = [*SHORT, *SETTINGS[""], "--num-steps", 1, "--save-dir", tmp_path, "-e"]
    jobs = [("07", [*args, name, *TWO, "-m", families / name]) for name in ("gpt2", "gpt2-dropout")]
    run_or_fail(2, jobs, tmp_path / "jobs", timeout=200)
    still, dropped = metrics(tmp_path / "gpt2"), metrics(tmp_path / "gpt2-dropout")
    assert still[0]["val_loss"] == dropped[0]["val_loss"]
    assert abs(still[1]["loss"] - dropped[1]["loss"]) > 1e-4


# ---- what is refused -------------------------------------------------------------------------
REFUSED = {
    "ranks": ([*TP, *TWO], "--pipeline-parallel-size 2: 2 ranks are not divisible by 4"),
    "zero": (["--pipeline-parallel-size", 0], "--pipeline-parallel-size 0: must be at least 1"),
    "schedule": (["--pipeline-schedule", "2f2b"], "invalid choice: '2f2b'"),
    "micro-batches": (
        TWO,
        "-size 2: 1 micro-batches do not fill the pipeline; lower --batch-size",
    ),
    "rounds": (
        [*TWO, "--pipeline-schedule", "interleaved-1f1b", "--global-batch-size", 12, "-b", 4],
        "-size 2: 3 micro-batches do not fill the pipeline; lower --batch-size",
    ),
    "samples": (
        [*TWO, "--global-batch-size", 1],
        "-size 2: 1 micro-batches do not fill the pipeline; lower --batch-size",
    ),
    "layers": (
        [*TWO, "-b", 2, "--config", "num_hidden_layers=1"],
        "tiny has fewer than 2 layers",
    ),
    "two stages a rank": (
        [*SETTINGS["-interleaved"], *TWO, "--config", "num_hidden_layers=3"],
        "tiny has fewer than 4 layers",
    ),
    "no plan": (
        [*TWO, "-b", 2, "-m", "opt"],
        "-size 2: transformers has no pipeline plan for {families}/opt",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_one_line_says_why_it_cannot_be_a_pipeline(parse, load, families, capsys, case):
    given, expected = REFUSED[case]
    given = [families / word if word == "opt" else word for word in given]
    with pytest.raises(SystemExit) as stop:
        args = parse(*given, world_size=2)
        chapter = load("07")
        _, config = chapter.build_tokenizer_and_config.__wrapped__(args)
        chapter.build_model(args, config)
    expected = expected.format(families=families)
    check_user_error({"stderr": capsys.readouterr().err, "status": stop.value.code}, expected)


@pytest.mark.exhaustive
def test_on_two_ranks_both_end_and_nothing_is_written(families, tmp_path):
    args = [*SHORT, *TWO, "-b", 2, "--save-dir", tmp_path / "runs", "-m", families / "opt"]
    [ranks] = run_jobs(2, [("07", args)], tmp_path / "jobs", timeout=100)
    assert all(rank["status"] for rank in ranks)  # the other may see no more than rank 0's end
    check_user_error(ranks[0], "--pipeline-parallel-size 2: ")
    assert not [path for path in tmp_path.glob("runs/**/*") if path.is_file()]


# ---- how long ranks are idle -----------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b"])
def test_the_bubble_is_that_of_the_formula(tmp_path, schedule):
    """With layers that sleep for so long that what else the ranks do does not matter."""
    command = [ROOT / "benchmarks/bubble.py", "--output", tmp_path / "rows.json"]
    run_command(*command, "--seconds", 0.4, "--only", schedule, check=True)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == (3 if schedule == "1f1b" else 1)
    for row in rows:
        assert abs(row["bubble"] - row["formula"]) < 0.03, row
