"""Test that each layout of each chapter has the loss curve of chapter 01 on one rank.

A layout is a chapter, a number of ranks, and the flags that split the model or the samples. A
setting is a model family, a precision, or further flags. The tables below list the layouts and
the settings; the lists after them name the runs to test.
"""

import random
from typing import NamedTuple

import pytest

from chats import prepare_conversations, prepare_pairs
from conftest import SCRIPTS, SHORT, difference, disagreement, metrics, run_or_fail, start_ranks
from marks import exhaustive, slow
from runs import (
    copy_run,
    evaluate_export,
    have_same_weights,
    kill,
    last_logged_step,
    newest_step,
    wait_for,
)

TP2, TP4 = "--tensor-parallel-size 2", "--tensor-parallel-size 4"
# With `-b 2`, a stage receives the 8 samples of a step in 4 micro-batches, or 4 of these samples in
# 2 micro-batches if two data-parallel ranks share the step.
PP2, PP4 = "--pipeline-parallel-size 2 -b 2", "--pipeline-parallel-size 4 -b 2"
INTERLEAVED = "--pipeline-schedule interleaved-1f1b"
CP2, CP4 = "--context-parallel-size 2", "--context-parallel-size 4"
ULYSSES2, ULYSSES4 = (f"{cp} --context-parallel-style ulysses" for cp in (CP2, CP4))
EP2, EP4 = "--expert-parallel-size 2", "--expert-parallel-size 4"
REPLICAS = "--replicas 2"
# The high weight decay makes a wrong decay visible within a few steps. With 10 held-out samples,
# the last batch of an evaluation is incomplete.
STEPS = """--num-steps 4 --warmup-steps 2 --weight-decay 1 --eval-every 2 --eval-samples 10
    --checkpoint-every 99"""


class Layout(NamedTuple):
    """Hold a chapter, a number of ranks, and the flags that split the model or the samples."""

    chapter: str
    ranks: int
    flags: str = ""


LAYOUTS = {
    "01": Layout("01", 1),
    "ddp1": Layout("02", 1),
    "ddp2": Layout("02", 2),
    "ddp4": Layout("02", 4),
    "launched2": Layout("03", 2),
    "launched4": Layout("03", 4),
    "fsdp1": Layout("04", 1),
    "fsdp2": Layout("04", 2),
    "fsdp4": Layout("04", 4),
    "hsdp4": Layout("04", 4, REPLICAS),
    "large1": Layout("05", 1),
    "large2": Layout("05", 2),
    "large4": Layout("05", 4),
    "tp1": Layout("06", 1),
    "tp2": Layout("06", 2, TP2),
    "tp4": Layout("06", 4, TP4),
    "dp2-tp2": Layout("06", 4, TP2),
    "hsdp2-tp2": Layout("06", 4, f"{TP2} {REPLICAS}"),
    "pp1": Layout("07", 1),
    "pp2": Layout("07", 2, PP2),
    "interleaved2": Layout("07", 2, f"{PP2} {INTERLEAVED}"),
    "pp4": Layout("07", 4, PP4),
    "dp2-pp2": Layout("07", 4, PP2),
    "hsdp2-pp2": Layout("07", 4, f"{PP2} {REPLICAS}"),
    "tp2-pp2": Layout("07", 4, f"{TP2} {PP2}"),
    "tp2-interleaved2": Layout("07", 4, f"{TP2} {PP2} {INTERLEAVED}"),
    "dp2-tp2-pp2": Layout("07", 8, f"{TP2} {PP2}"),
    "cp1": Layout("08", 1),
    "cp2": Layout("08", 2, CP2),
    "cp4": Layout("08", 4, CP4),
    "dp2-cp2": Layout("08", 4, CP2),
    "hsdp2-cp2": Layout("08", 4, f"{CP2} {REPLICAS}"),
    "tp2-cp2": Layout("08", 4, f"{TP2} {CP2}"),
    "pp2-cp2": Layout("08", 4, f"{PP2} {CP2}"),
    "tp2-pp2-cp2": Layout("08", 8, f"{TP2} {PP2} {CP2}"),
    "ulysses2": Layout("08", 2, ULYSSES2),
    "ulysses4": Layout("08", 4, ULYSSES4),
    "dp2-ulysses2": Layout("08", 4, ULYSSES2),
    "tp2-ulysses2": Layout("08", 4, f"{TP2} {ULYSSES2}"),
    "pp2-ulysses2": Layout("08", 4, f"{PP2} {ULYSSES2}"),
    # On one rank, which has all experts, chapter 09 must train a mixture as chapter 01 does.
    "ep1": Layout("09", 1),
    "ep2": Layout("09", 2, EP2),
    "ep4": Layout("09", 4, EP4),
    "dp2-ep2": Layout("09", 4, EP2),
    "hsdp2-ep2": Layout("09", 4, f"{EP2} {REPLICAS}"),
    "cp2-ep2": Layout("09", 2, f"{CP2} {EP2}"),
    "dp2-cp2-ep2": Layout("09", 4, f"{CP2} {EP2}"),
    "ulysses2-ep4": Layout("09", 4, f"{ULYSSES2} {EP4}"),
    "pp2-ep2": Layout("09", 4, f"{PP2} {EP2}"),
    "interleaved2-ep2": Layout("09", 4, f"{PP2} {INTERLEAVED} {EP2}"),
    "mixture-tp2": Layout("09", 2, TP2),
    "tp2-ep2": Layout("09", 2, f"{TP2} {EP2}"),
    "dp2-tp2-ep2": Layout("09", 4, f"{TP2} {EP2}"),
    "tp2-ep4": Layout("09", 4, f"{TP2} {EP4}"),
    # Chapter 09 must also train a model without experts.
    "dense-tp2-cp2": Layout("09", 4, f"{TP2} {CP2}"),
    "chats1": Layout("conversations", 1),
    "chats2": Layout("conversations", 2),
    "chats4": Layout("conversations", 4),
    "chats-hsdp4": Layout("conversations", 4, REPLICAS),
    "pairs1": Layout("preferences", 1),
    "pairs2": Layout("preferences", 2),
    "pairs4": Layout("preferences", 4),
    "pairs-hsdp4": Layout("preferences", 4, REPLICAS),
    "lora1": Layout("lora", 1),
    "lora2": Layout("lora", 2),
    "lora4": Layout("lora", 4),
    "lora-hsdp4": Layout("lora", 4, REPLICAS),
    "muon1": Layout("muon", 1),
    "muon2": Layout("muon", 2),
    "muon4": Layout("muon", 4),
    "muon-hsdp4": Layout("muon", 4, REPLICAS),
    "float8-2": Layout("float8", 2, "--float8"),
}
# Compare these chapters with one-rank runs of the same chapter, because chapter 01 would learn more
# tokens, train more weights, or use a different optimizer.
FIRST = {"conversations": "chats1", "preferences": "pairs1", "lora": "lora1", "muon": "muon1"}
# Each chapter of fine-tuning has a function that writes the chapter's data, and the number of
# tokens per sample.
DATA = {"conversations": (prepare_conversations, 128), "lora": (prepare_conversations, 128)}
DATA["preferences"] = prepare_pairs, 256
SETTINGS = {
    "plain": "",
    "2": "-b 2",
    "1": "-b 1",
    "kept": "--no-reshard-after-forward",
    "compiled": "--compile",
    "full": "--recompute full",
    "selective": "--recompute selective",
    "async": "--checkpoint-async --checkpoint-every 2",
    "offload": "--cpu-offload --recompute full --checkpoint-async",
    "gpipe": "--pipeline-schedule gpipe",
}
# The settings in this table change the curve, so a run's reference run has the same settings from
# this table, and the same model.
CURVES = {
    "bf16": "--precision bf16",
    # Use the default warmup and decay, because with the values of STEPS, rounding errors would grow
    # too much within 20 steps.
    "over-20-steps": "--num-steps 20 --eval-every 10 --warmup-steps 10 --weight-decay 0.1",
    # With this length, a rank computes the loss in two chunks.
    "long": "--seq-length 512",
    "five": "--config num_hidden_layers=5",
    # With these settings, Mixtral has fewer experts than ranks, or its number of experts is not
    # divisible by the number of shards.
    "two-experts": "--config num_local_experts=2 num_experts_per_tok=1",
    "three-experts": "--config num_local_experts=3",
    "six-experts": "--config num_local_experts=6",
    # With six experts, four ranks split the columns of each expert. With the eight experts of the
    # tiny models, each rank would have two experts.
    "columns": "--config num_experts=6",
    # Neither 202 rows nor three layers can be divided evenly among four ranks. Three matrices have
    # the same shape, so a rank has one matrix or none.
    "uneven": "--config hidden_size=120 intermediate_size=202 num_hidden_layers=3 head_dim=30",
    # With a LoRA rank of 1, matrix A of an adapter has one row, so three of four ranks get no row.
    "rank-1": "--lora-rank 1",
}


# Each run is a layout and its settings, joined by "@" and "+". All pairs of a layout and a setting
# would take hours, so the lists follow three rules:
# - Each layout of at most four ranks has a run.
# - Each chapter has a run with each of its settings. These runs are spread over the chapter's
#   layouts, so that one run tests two things.
# - Chapter 09, which has the splits of all chapters, trains each mixture that it accepts with each
#   kind of split: experts alone, and experts with matrices, sequences or layers.
CORE = """01@plain 01@2 ddp2@2 launched2@plain fsdp2@2 large1@mixtral+bf16 large2@offload+1
    large2@mixtral+three-experts tp2@plain pp2@plain cp2@plain ep2@glm4_moe""".split()
SLOW = """01@bf16 01@gpt2 01@qwen3 01@gemma3
    ddp1@2 ddp2@bf16 ddp2@gpt2 ddp2@compiled ddp2@mixtral+bf16 ddp2@over-20-steps
    fsdp1@2 fsdp2@kept+1 fsdp2@bf16 fsdp2@qwen3 fsdp4@mixtral+two-experts hsdp4@1
    large1@offload large2@long large2@selective+compiled large2@bf16 large2@over-20-steps
    tp1@plain tp2@bf16 tp2@qwen3 tp2@over-20-steps dp2-tp2@1
    pp1@plain pp2@gpipe pp2@qwen3 pp2@over-20-steps dp2-pp2@plain tp2-interleaved2@plain
    cp1@plain cp2@qwen3 cp2@over-20-steps ulysses2@gpt_neox dp2-ulysses2@2
    ep2@full+qwen3_moe ep2@mixtral+bf16 dp2-ep2@deepseek_v3 dp2-ep2@mixtral+six-experts
    tp2-ep2@glm4_moe
    muon2@plain muon4@uneven muon4@qwen3_moe muon4@columns+qwen3_moe muon-hsdp4@plain""".split()
MODELS = """ddp4@qwen3 launched4@plain fsdp2@gemma3 fsdp4@gpt2 hsdp4@mistral
    large2@gpt2 large2@gemma3 large4@qwen3 large4@mistral large4@mixtral
    tp2@gpt_neox tp4@gemma tp4@odd tp4@qwen3 hsdp2-tp2@llama
    pp2@gpt2 pp2@llama pp4@qwen3 interleaved2@five interleaved2@olmo tp2-pp2@gpt_neox
    cp4@gpt_neox hsdp2-cp2@llama tp2-cp2@qwen3 pp2-cp2@llama
    ulysses4@qwen3 tp2-ulysses2@llama pp2-ulysses2@gpt_neox
    ep1@mixtral ep2@qwen2_moe ep4@gpt_oss dp2-ep2@olmoe hsdp2-ep2@qwen3_moe hsdp2-ep2@mixtral
    mixture-tp2@mixtral tp2-ep2@olmoe dp2-tp2-ep2@qwen3_moe tp2-ep4@glm4_moe
    cp2-ep2@qwen3_moe cp2-ep2@deepseek_v3 dp2-cp2-ep2@olmoe ulysses2-ep4@mixtral
    ulysses2-ep4@glm4_moe pp2-ep2@mixtral pp2-ep2@gpt_oss pp2-ep2@deepseek_v3
    interleaved2-ep2@qwen2_moe interleaved2-ep2@qwen3_moe interleaved2-ep2@glm4_moe
    dense-tp2-cp2@plain""".split()
EXPORTED = [*CORE, *map(slow, SLOW), *map(exhaustive, MODELS)]
# Do not test the models that these runs and the runs of MORE_SETTINGS export: a run of EXPORTED
# exports the same weights, or test_lora.py and other tests check the models of fine-tuning.
FINE_TUNED = "chats2@2 chats2@offload+1 pairs2@2 pairs2@offload+1 lora2@offload+1".split()
MORE_SETTINGS = """fsdp2@compiled fsdp4@over-20-steps hsdp4@kept
    large2@full+compiled large2@async large4@selective
    tp2@compiled tp4@long dp2-tp2@offload+1 hsdp2-tp2@bf16
    pp2@bf16 interleaved2@compiled pp4@gpipe dp2-pp2@offload+1 hsdp2-pp2@1 tp2-interleaved2@1
    cp2@long cp2@selective+compiled dp2-cp2@offload ulysses2@bf16 ulysses2@compiled
    ep2@offload+glm4_moe tp2-ep2@full+glm4_moe cp2-ep2@compiled+glm4_moe dp2-tp2-ep2@1+glm4_moe
    chats2@selective+compiled chats2@async chats2@bf16 chats2@gemma3-window
    chats4@1 chats4@mistral chats-hsdp4@gpt2 chats-hsdp4@qwen3
    pairs2@selective+compiled pairs2@bf16 pairs2@gemma3-window pairs4@1 pairs4@qwen3
    pairs-hsdp4@gpt2
    lora2@selective+compiled lora2@bf16 lora2@gemma3-window lora4@rank-1 lora4@mistral
    lora-hsdp4@1 lora-hsdp4@qwen3""".split()
RUNS = [*EXPORTED, *map(slow, FINE_TUNED), *map(exhaustive, MORE_SETTINGS)]


def reference_of(run):
    """Return the name of the reference run, whose curve a run must repeat.

    The reference of chapter 01's run in bf16 is the run in fp32. These two curves need only be
    close.
    """
    layout, _, setting = run.partition("@")
    first = FIRST.get(LAYOUTS[layout].chapter, "01")
    changes = [name for name in setting.split("+") if name not in SETTINGS]
    if run == "01@bf16" or not changes:
        return f"{first}@plain"
    return f"{first}@{'+'.join(changes)}"


def job_of(models, run, root, *more):
    """Return a job, for run_jobs(), that trains with the layout and settings in the name `run`."""
    name, _, settings = run.partition("@")
    args = [*SHORT, *STEPS.split(), *LAYOUTS[name].flags.split()]
    flags = SETTINGS | CURVES
    for setting in settings.split("+"):
        args += flags[setting].split() if setting in flags else ["-m", models / setting]
    if LAYOUTS[name].chapter in DATA:
        write, length = DATA[LAYOUTS[name].chapter]
        names = [setting for setting in settings.split("+") if setting not in flags]
        model = models / names[0] if names else "tiny"
        args += ["--lr", 1e-3, "-s", length, "-d", write(models, 100, model, length)]
    return LAYOUTS[name].chapter, [*args, "--save-dir", root, *more]


@pytest.fixture(scope="module")
def root(request, tmp_path_factory, layout_models):
    """Train each selected run and its reference once; return the folder of the runs."""
    root, jobs, selected = tmp_path_factory.mktemp("layouts"), {}, set()
    for item in request.session.items:
        if item.path == request.path and "run" in getattr(item, "fixturenames", ()):
            selected.add(item.callspec.params["run"])
    for run in sorted(selected | {reference_of(run) for run in selected}):
        ranks = LAYOUTS[run.partition("@")[0]].ranks
        jobs.setdefault(ranks, []).append(job_of(layout_models, run, root, "-e", run))
    for ranks, group in jobs.items():
        run_or_fail(ranks, group, root / f"ranks{ranks}", shares=2 if ranks == 1 else 1)
    return root


# Allow two hours, because the first test also waits for all runs of the fixture `root`.
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("run", RUNS)
def test_layout_follows_its_reference_curve(root, run):
    """Compare a run's losses with the losses of its reference run.

    Compare the gradient norms, too, except for 01@bf16.
    """
    curve, reference = metrics(root / run), metrics(root / reference_of(run))
    if run == "01@bf16":
        assert 1e-5 < difference(reference, curve, names=["loss", "val_loss"]) < 5e-2
    elif run.endswith("bf16"):
        # From chapter 04 on, FSDP also rounds weights, and activations between layers, to bf16. So
        # the losses differ from the reference by up to 0.0017, and the gradient norms differ by up
        # to 0.27%.
        assert run != reference_of(run), "the test would compare a run with itself"
        assert difference(reference, curve, names=["loss", "val_loss"]) < 5e-3
        assert difference(reference, curve, names=["grad_norm"], relative=True) < 1e-2
    else:
        assert disagreement(reference, curve) == {}


# On a CPU with torch 2.13.0 and transformers 5.23.0, the first steps have these losses.
LOSSES = [5.9667125, 5.8170733, 5.6755233, 5.5211148, 5.3670635]
LOSSES += [5.2734270, 5.0691161, 5.1340919, 4.9781885, 4.7330828]


@pytest.mark.parametrize("run", ["01@over-20-steps"])
def test_losses_are_those_of_the_pinned_versions(root, run):
    """Compare the first ten losses with LOSSES.

    Check also that the curve falls, because two flat curves would pass every comparison.
    """
    curve = metrics(root / run)
    assert sorted(curve) == list(range(21))
    assert [step for step, row in curve.items() if "val_loss" in row] == [0, 10, 20]
    assert curve[20]["loss"] < curve[1]["loss"] - 1
    losses = [curve[step]["loss"] for step in range(1, 11)]
    # Allow small differences, because other CPUs add in a different order.
    assert losses == pytest.approx(LOSSES, abs=1e-4)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("run", EXPORTED)
def test_exported_model_has_the_logged_loss(root, load, run):
    """Evaluate the exported model, which has the weights of the last step, with transformers."""
    curve = metrics(root / run)
    loss = evaluate_export(root / run, max(curve), load("01"))
    # This test evaluates each model in fp32. A run in bf16 has computed its logged loss in bf16;
    # the logged loss is 0.002 higher.
    assert abs(loss - curve[max(curve)]["val_loss"]) < (5e-3 if run.endswith("bf16") else 1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "chapter, flags, layout",
    [
        ("07", f"-b 2 {INTERLEAVED}", "tp2@2"),
        ("08", "--context-parallel-style ulysses", "tp2@plain"),
        ("08", "--context-parallel-style ulysses", "pp2@plain"),
        ("09", "", "tp2@plain"),
        ("09", "", "cp2@plain"),
    ],
)
def test_split_by_one_rank_changes_no_bit(layout_models, tmp_path, chapter, flags, layout):
    """Compare a chapter with an earlier chapter on the earlier chapter's layout.

    The split that the later chapter adds stays off.
    """
    earlier, args = job_of(layout_models, layout, tmp_path, "-e")
    jobs = [(earlier, [*args, "earlier"]), (chapter, [*args, "later", *flags.split()])]
    run_or_fail(2, jobs, tmp_path / "jobs")
    assert difference(metrics(tmp_path / "earlier"), metrics(tmp_path / "later")) == 0
    assert have_same_weights(tmp_path / "earlier", tmp_path / "later"), "a weight differs"


# ---- a run continues -------------------------------------------------------------------------
REPEATED = """01@bf16 01@gpt2-dropout fsdp2@plain large2@async lora2@2 muon2@plain
    float8-2@plain""".split()
RARELY_REPEATED = "hsdp4@gpt2-dropout tp2-pp2@qwen3 ulysses2@plain chats2@2".split()


@pytest.mark.parametrize("resumed", [*map(slow, REPEATED), *map(exhaustive, RARELY_REPEATED)])
def test_resume_repeats_every_bit(layout_models, tmp_path, resumed):
    """Train the last two steps of a run a second time, from the checkpoint of step 2."""
    ranks, more = LAYOUTS[resumed.partition("@")[0]].ranks, ["--checkpoint-every", 2, "-e"]
    job = job_of(layout_models, resumed, tmp_path, *more, "entire")
    run_or_fail(ranks, [job], tmp_path / "jobs")
    copy_run(tmp_path / "entire", 2, tmp_path / "resumed")
    job = job_of(layout_models, resumed, tmp_path, *more, "resumed")
    [[first_rank, *_]] = run_or_fail(ranks, [job], tmp_path / "jobs")
    assert "step-00000002\n" in first_rank["stdout"].partition("continuing from")[2]
    assert difference(metrics(tmp_path / "entire"), metrics(tmp_path / "resumed")) == 0
    assert have_same_weights(tmp_path / "entire", tmp_path / "resumed"), "a weight differs"


# During this long warmup, the learning rate of a step does not depend on --num-steps.
ENDLESS = ["--lr", 0.03, "--warmup-steps", 1000]
SPLIT = [name for name, layout in LAYOUTS.items() if "03" < layout.chapter < "09"]
ROUTES = {
    "data-parallel": "01 ddp2 launched2 ddp1".split(),
    "each-chapter": "fsdp4 dp2-tp2 tp2-pp2 dp2-ulysses2 fsdp2 large2 fsdp2 cp2 fsdp1 hsdp4".split(),
    "lora": "lora2 lora1 lora-hsdp4 lora4".split(),
    "muon": "muon2 muon4 muon1 muon-hsdp4".split(),
    # With six experts, four shards split the columns of each expert, and two shards have three
    # experts each.
    "few-experts": "fsdp4 fsdp2 dp2-ep2 large4 mixture-tp2 hsdp4".split(),
}
# Distribute all layouts of SPLIT over three routes, because rounding errors grow with the number of
# steps.
SHUFFLED = random.Random(0).sample(SPLIT, len(SPLIT))
ROUTES |= {f"each-layout-{number}": SHUFFLED[number::3] for number in range(3)}


SLOW_ROUTES = "data-parallel muon".split()
OTHER_ROUTES = "each-chapter lora few-experts each-layout-0 each-layout-1 each-layout-2".split()


@pytest.mark.parametrize("route", [*map(slow, SLOW_ROUTES), *map(exhaustive, OTHER_ROUTES)])
def test_run_that_changes_its_layout_stays_on_the_curve(layout_models, tmp_path, route):
    """Resume a run in a different layout every two steps.

    Most routes train Qwen3, because its embeddings are tied.
    """
    setting = "mixtral+six-experts" if route == "few-experts" else "qwen3"
    names, more = ROUTES[route], [*ENDLESS, "--eval-every", 2, "--num-steps"]
    reference = reference_of(f"{names[0]}@{setting}")
    job = job_of(layout_models, reference, tmp_path, *more, 2 * len(names), "-e", "entire")
    run_or_fail(1, [job], tmp_path / "jobs")
    for start, name in enumerate(names):
        run = f"{name}@{setting}{'+offload' * (LAYOUTS[name].chapter == '05')}"
        job = job_of(layout_models, run, tmp_path, *more, 2 * start + 2, "-e", "run")
        [ranks] = run_or_fail(LAYOUTS[name].ranks, [job], tmp_path / f"jobs{start}")
        found = ranks[0]["stdout"].partition("continuing from")[2]
        assert start == 0 or f"step-{2 * start:08}\n" in found, ranks[0]["stdout"]
    assert disagreement(metrics(tmp_path / "entire"), metrics(tmp_path / "run")) == {}
    assert have_same_weights(tmp_path / "entire", tmp_path / "run", tolerance=1e-4), "not equal"


# Together, these layouts split data, weights, matrices, sequences, layers and experts.
EXAM = "hsdp4 mixture-tp2 cp2-ep2 large2 pp2-ep2".split()


@pytest.mark.slow
def test_run_killed_in_six_kinds_of_parallelism_stays_on_the_curve(layout_models, tmp_path):
    """Resume a run in each layout of EXAM, and each time kill the run after three more steps."""
    more = [*ENDLESS, "--eval-every", 4, "--checkpoint-every", 2, "--num-steps", 5 * len(EXAM)]
    job = job_of(layout_models, "01@glm4_moe", tmp_path, *more, "-e", "entire")
    run_or_fail(1, [job], tmp_path / "jobs")
    run_dir, logs, newest = tmp_path / "run", tmp_path / "logs", 0
    logs.mkdir()
    for name in EXAM:
        chapter, args = job_of(layout_models, f"{name}@glm4_moe", tmp_path, *more, "-e", "run")
        processes = start_ranks(LAYOUTS[name].ranks, [SCRIPTS[chapter], *args], logs, log=name)
        wait_for(lambda step=newest + 3: last_logged_step(run_dir) >= step, processes)
        kill(processes)
        output = (logs / f"rank0{name}.log").read_text()
        continues = f"step-{newest:08}\n" in output.partition("continuing from")[2]
        assert newest == 0 or continues, output
        assert newest_step(run_dir) > newest, output
        newest = newest_step(run_dir)
    run_or_fail(LAYOUTS[name].ranks, [(chapter, args)], tmp_path / "jobs")
    assert disagreement(metrics(tmp_path / "entire"), metrics(run_dir)) == {}
    assert have_same_weights(tmp_path / "entire", run_dir, tolerance=1e-4)


# ---- dropout ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [slow("large2"), exhaustive("pp2")])
def test_dropout_affects_only_training_and_recompute_repeats_it(layout_models, tmp_path, layout):
    settings = {"none": "gpt2", "dropout": "gpt2-dropout", "recomputed": "gpt2-dropout+full"}
    jobs = []
    for name, setting in settings.items():
        jobs.append(job_of(layout_models, f"{layout}@{setting}", tmp_path, "-e", name))
    run_or_fail(2, jobs, tmp_path / "jobs")
    none, dropout, recomputed = (metrics(tmp_path / name) for name in settings)
    assert none[0]["val_loss"] == dropout[0]["val_loss"]
    assert difference(none, dropout, names=["loss"]) > 1e-3
    assert difference(dropout, recomputed) < 1e-5
