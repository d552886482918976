"""Test that each layout of each chapter has the loss curve of chapter 01 on one rank.

A layout is a chapter, a number of ranks, and the flags that split the model or the samples. A
setting is a model family, a precision, or further flags. The tables below list the splits and the
settings; the lists after them name the runs to test.
"""

import random

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

# The high weight decay makes a wrong decay visible within a few steps. In many runs, the last batch
# of the 10 held-out samples is incomplete.
STEPS = """--num-steps 4 --warmup-steps 2 --weight-decay 1 --eval-every 2 --eval-samples 10
    --checkpoint-every 99"""
# The name of a layout has a chapter, a number of ranks and, possibly, splits. Each split is a name
# from this table and a number. So 07-4-tp2-pp2 is chapter 07 on four ranks: the model has two
# stages, and two ranks split the matrices of each stage. In 07-4-pp2, two data-parallel ranks share
# the samples of a step.
#
# With `-b 2`, a rank processes the 8 samples of a step in 4 micro-batches. If two data-parallel
# ranks share the samples, each of these ranks processes 4 samples in 2 micro-batches.
SPLITS = {
    "tp": "--tensor-parallel-size {}",
    "pp": "-b 2 --pipeline-parallel-size {}",
    "interleaved": "-b 2 --pipeline-schedule interleaved-1f1b --pipeline-parallel-size {}",
    "cp": "--context-parallel-size {}",
    "ulysses": "--context-parallel-style ulysses --context-parallel-size {}",
    "ep": "--expert-parallel-size {}",
    "replicas": "--replicas {}",
}
# Compare these chapters with one-rank runs of the same chapter, because chapter 01 would compute a
# different loss, train more weights, or use a different optimizer.
OWN_REFERENCE = ("conversations", "preferences", "lora", "muon")
# For each chapter of fine-tuning, DATA has the function that writes the training data, and the
# number of tokens per sample.
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
    "float8": "--float8",
}
# The settings in this table change the curve, so a run and its reference run have the same settings
# from this table, and the same model. Only the reference run of 01-1@bf16 leaves out bf16.
CURVES = {
    "bf16": "--precision bf16",
    # Use the default warmup and decay, because with the values of STEPS, rounding errors would grow
    # too much within 20 steps.
    "over-20-steps": "--num-steps 20 --eval-every 10 --warmup-steps 10 --weight-decay 0.1",
    # With this length, each of two ranks computes its part of the loss in two chunks.
    "long": "--seq-length 512",
    "five": "--config num_hidden_layers=5",
    # Mixtral's two or six experts cannot be divided evenly among four ranks, and its three experts
    # cannot be divided evenly among two ranks.
    "two-experts": "--config num_local_experts=2 num_experts_per_tok=1",
    "three-experts": "--config num_local_experts=3",
    "six-experts": "--config num_local_experts=6",
    # With six experts, four ranks split the columns of each expert. With the eight experts of the
    # tiny Qwen3-MoE, each of the four ranks would have two experts.
    "columns": "--config num_experts=6",
    # Neither 202 rows nor three layers can be divided evenly among four ranks. Only three matrices
    # have the shape 120 × 202, so each of four ranks gets one of these matrices, or none.
    "uneven": "--config hidden_size=120 intermediate_size=202 num_hidden_layers=3 head_dim=30",
    # With a LoRA rank of 1, matrix A of an adapter has one row, so three of four ranks get no row.
    "rank-1": "--lora-rank 1",
}


# The name of a run is LAYOUT@SETTING, or LAYOUT@SETTING+SETTING. All pairs of a layout and a
# setting would take hours, so the lists follow three rules:
# - Any two of the splits tp, pp, cp, ep and replicas have a run that combines them.
# - The settings are spread over the layouts, so that one run tests a layout and a setting.
# - Chapter 09, which has the splits of all chapters, trains several mixtures with each kind of
#   split: experts alone, and experts with matrices, sequences or layers.
CORE = """
    01-1@plain 01-1@2 02-2@2 03-2@plain 04-2@2 05-1@mixtral+bf16 05-2@offload+1
    05-2@mixtral+three-experts 06-2-tp2@plain 07-2-pp2@plain 08-2-cp2@plain 09-2-ep2@glm4_moe
""".split()
SLOW = """
    01-1@bf16 01-1@gpt2 01-1@qwen3 01-1@gemma3
    02-1@2 02-2@bf16 02-2@gpt2 02-2@compiled 02-2@mixtral+bf16 02-2@over-20-steps
    04-1@2 04-2@kept+1 04-2@bf16 04-2@qwen3 04-4@mixtral+two-experts 04-4-replicas2@1
    05-1@offload 05-2@long 05-2@selective+compiled 05-2@bf16 05-2@over-20-steps
    06-1@plain 06-2-tp2@bf16 06-2-tp2@qwen3 06-2-tp2@over-20-steps 06-4-tp2@1
    07-1@plain 07-2-pp2@gpipe 07-2-pp2@qwen3 07-2-pp2@over-20-steps 07-4-pp2@plain
    07-4-tp2-interleaved2@plain
    08-1@plain 08-2-cp2@qwen3 08-2-cp2@over-20-steps 08-2-ulysses2@gpt_neox 08-4-ulysses2@2
    09-2-ep2@full+qwen3_moe 09-2-ep2@mixtral+bf16 09-4-ep2@deepseek_v3
    09-4-ep2@mixtral+six-experts 09-2-tp2-ep2@glm4_moe
    muon-2@plain muon-4@uneven muon-4@qwen3_moe muon-4@columns+qwen3_moe muon-4-replicas2@plain
""".split()
MODELS = """
    02-4@qwen3
    03-4@plain
    04-2@gemma3 04-4@gpt2 04-4-replicas2@mistral
    05-2@gpt2 05-2@gemma3 05-4@qwen3 05-4@mistral 05-4@mixtral
    06-2-tp2@gpt_neox 06-4-tp4@gemma 06-4-tp4@odd 06-4-tp4@qwen3 06-4-tp2-replicas2@llama
    07-2-pp2@gpt2 07-2-pp2@llama 07-4-pp4@qwen3 07-2-interleaved2@five 07-2-interleaved2@olmo
    07-4-tp2-pp2@gpt_neox
    08-4-cp4@gpt_neox 08-4-cp2-replicas2@llama 08-4-tp2-cp2@qwen3 08-4-pp2-cp2@llama
    08-4-ulysses4@qwen3 08-4-tp2-ulysses2@llama 08-4-pp2-ulysses2@gpt_neox
    09-1@mixtral 09-2-ep2@qwen2_moe 09-4-ep4@gpt_oss 09-4-ep2@olmoe 09-4-ep2-replicas2@qwen3_moe
    09-4-ep2-replicas2@mixtral 09-2-tp2@mixtral 09-2-tp2-ep2@olmoe 09-4-tp2-ep2@qwen3_moe
    09-4-tp2-ep4@glm4_moe 09-2-cp2-ep2@qwen3_moe 09-2-cp2-ep2@deepseek_v3 09-4-cp2-ep2@olmoe
    09-4-ulysses2-ep4@mixtral 09-4-ulysses2-ep4@glm4_moe 09-4-pp2-ep2@mixtral 09-4-pp2-ep2@gpt_oss
    09-4-pp2-ep2@deepseek_v3 09-4-interleaved2-ep2@qwen2_moe 09-4-interleaved2-ep2@qwen3_moe
    09-4-interleaved2-ep2@glm4_moe 09-4-tp2-cp2@plain
""".split()
EXPORTED = [*CORE, *map(slow, SLOW), *map(exhaustive, MODELS)]
# The test of exported models leaves out the runs of this list and of MORE_SETTINGS. For
# fine-tuning, test_lora.py and other tests check exported models. Without fine-tuning, the runs
# that are left out learn almost the same weights as runs of EXPORTED.
FINE_TUNED = """
    conversations-2@2 conversations-2@offload+1 preferences-2@2 preferences-2@offload+1
    lora-2@offload+1
""".split()
MORE_SETTINGS = """
    04-2@compiled 04-4@over-20-steps 04-4-replicas2@kept
    05-2@full+compiled 05-2@async 05-4@selective
    06-2-tp2@compiled 06-4-tp4@long 06-4-tp2@offload+1 06-4-tp2-replicas2@bf16
    07-2-pp2@bf16 07-2-interleaved2@compiled 07-4-pp4@gpipe 07-4-pp2@offload+1
    07-4-pp2-replicas2@1 07-4-tp2-interleaved2@1
    08-2-cp2@long 08-2-cp2@selective+compiled 08-4-cp2@offload 08-2-ulysses2@bf16
    08-2-ulysses2@compiled
    09-2-ep2@offload+glm4_moe 09-2-tp2-ep2@full+glm4_moe 09-2-cp2-ep2@compiled+glm4_moe
    09-4-tp2-ep2@1+glm4_moe
    conversations-2@selective+compiled conversations-2@async conversations-2@bf16
    conversations-2@gemma3-window conversations-4@1 conversations-4@mistral
    conversations-4-replicas2@gpt2 conversations-4-replicas2@qwen3
    preferences-2@selective+compiled preferences-2@bf16 preferences-2@gemma3-window
    preferences-4@1 preferences-4@qwen3 preferences-4-replicas2@gpt2
    lora-2@selective+compiled lora-2@bf16 lora-2@gemma3-window lora-4@rank-1 lora-4@mistral
    lora-4-replicas2@1 lora-4-replicas2@qwen3
""".split()
RUNS = [*EXPORTED, *map(slow, FINE_TUNED), *map(exhaustive, MORE_SETTINGS)]


def split_name(run):
    """Return the chapter, the number of ranks, the splits and the settings in the name of a run."""
    layout, _, settings = run.partition("@")
    chapter, ranks, *splits = layout.split("-")
    return chapter, int(ranks), splits, settings.split("+")


def reference_of(run):
    """Return the name of the reference run, whose curve a run must repeat.

    The reference of chapter 01's run in bf16 is the run in fp32. These two curves need only be
    close.
    """
    chapter, _, _, settings = split_name(run)
    first = f"{chapter}-1" if chapter in OWN_REFERENCE else "01-1"
    changes = [name for name in settings if name not in SETTINGS]
    if run == "01-1@bf16" or not changes:
        return f"{first}@plain"
    return f"{first}@{'+'.join(changes)}"


def job_of(models, run, root, *more):
    """Return a job, for run_jobs(), that trains with the layout and settings in the name `run`."""
    chapter, _, splits, settings = split_name(run)
    flags, model = SETTINGS | CURVES, "tiny"
    args = [*SHORT, *STEPS.split()]
    for split in splits:
        args += SPLITS[split[:-1]].format(split[-1]).split()
    for setting in settings:
        if setting in flags:
            args += flags[setting].split()
        else:
            model = models / setting
            args += ["-m", model]
    if chapter in DATA:
        write, length = DATA[chapter]
        args += ["--lr", 1e-3, "-s", length, "-d", write(models, 100, model, length)]
    return chapter, [*args, "--save-dir", root, *more]


@pytest.fixture(scope="module")
def root(request, tmp_path_factory, layout_models):
    """Train each selected run and its reference once; return the folder of the runs."""
    root, jobs, selected = tmp_path_factory.mktemp("layouts"), {}, set()
    for item in request.session.items:
        if item.path == request.path and "run" in getattr(item, "fixturenames", ()):
            selected.add(item.callspec.params["run"])
    for run in sorted(selected | {reference_of(run) for run in selected}):
        jobs.setdefault(split_name(run)[1], []).append(job_of(layout_models, run, root, "-e", run))
    for ranks, group in jobs.items():
        run_or_fail(ranks, group, root / f"ranks{ranks}", shares=2 if ranks == 1 else 1)
    return root


# Allow two hours, because the first test also waits for all runs of the fixture `root`.
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("run", RUNS)
def test_layout_follows_its_reference_curve(root, run):
    """Compare a run's losses with the losses of its reference run.

    Compare the gradient norms, too, except for 01-1@bf16.
    """
    curve, reference = metrics(root / run), metrics(root / reference_of(run))
    if run == "01-1@bf16":
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


# On a CPU with torch 2.13.0 and transformers 5.23.0, the first ten steps of 01-1@over-20-steps have
# these losses.
LOSSES = [5.9667125, 5.8170733, 5.6755233, 5.5211148, 5.3670635]
LOSSES += [5.2734270, 5.0691161, 5.1340919, 4.9781885, 4.7330828]


@pytest.mark.parametrize("run", ["01-1@over-20-steps"])
def test_losses_are_those_of_the_pinned_versions(root, run):
    """Compare the first ten losses with LOSSES.

    Check also that the curve falls, because two flat curves would pass every comparison.
    """
    curve = metrics(root / run)
    assert sorted(curve) == list(range(21))
    assert [step for step, row in curve.items() if "val_loss" in row] == [0, 10, 20]
    assert curve[20]["loss"] < curve[1]["loss"] - 1
    losses = [curve[step]["loss"] for step in range(1, 11)]
    # Allow small differences, because other CPUs may add numbers in a different order.
    assert losses == pytest.approx(LOSSES, abs=1e-4)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("run", EXPORTED)
def test_exported_model_has_the_logged_loss(root, load, run):
    """Let transformers evaluate the exported model, which has the weights of the last step."""
    curve = metrics(root / run)
    loss = evaluate_export(root / run, max(curve), load("01"))
    # This test computes the loss of each model in fp32. A run in bf16 has computed its logged loss
    # in bf16, and logged a loss that is about 0.002 higher.
    assert abs(loss - curve[max(curve)]["val_loss"]) < (5e-3 if run.endswith("bf16") else 1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "chapter, flags, layout",
    [
        ("07", "-b 2 --pipeline-schedule interleaved-1f1b", "06-2-tp2@2"),
        ("08", "--context-parallel-style ulysses", "06-2-tp2@plain"),
        ("08", "--context-parallel-style ulysses", "07-2-pp2@plain"),
        ("09", "", "06-2-tp2@plain"),
        ("09", "", "08-2-cp2@plain"),
    ],
)
def test_split_by_one_rank_changes_no_bit(layout_models, tmp_path, chapter, flags, layout):
    """Train with a chapter and an earlier chapter, in a layout of the earlier chapter.

    The split that the later chapter adds stays off, so the two runs must be equal.
    """
    earlier, args = job_of(layout_models, layout, tmp_path, "-e")
    jobs = [(earlier, [*args, "earlier"]), (chapter, [*args, "later", *flags.split()])]
    run_or_fail(2, jobs, tmp_path / "jobs")
    assert difference(metrics(tmp_path / "earlier"), metrics(tmp_path / "later")) == 0
    assert have_same_weights(tmp_path / "earlier", tmp_path / "later"), "a weight differs"


# ---- a run continues -------------------------------------------------------------------------
REPEATED = """
    01-1@bf16 01-1@gpt2-dropout 04-2@plain 05-2@async lora-2@2 muon-2@plain float8-2@float8
""".split()
RARELY_REPEATED = """
    04-4-replicas2@gpt2-dropout 07-4-tp2-pp2@qwen3 08-2-ulysses2@plain conversations-2@2
""".split()


@pytest.mark.parametrize("resumed", [*map(slow, REPEATED), *map(exhaustive, RARELY_REPEATED)])
def test_resume_repeats_every_bit(layout_models, tmp_path, resumed):
    """Train the last two steps of a run a second time, from the checkpoint of step 2."""
    ranks, more = split_name(resumed)[1], ["--checkpoint-every", 2, "-e"]
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
# This list has the layouts of chapters 04 to 08 in the runs above, and two layouts on eight ranks.
SPLIT = {run.partition("@")[0] for run in [*CORE, *SLOW, *MODELS, *MORE_SETTINGS]}
SPLIT = sorted(layout for layout in SPLIT if "04" <= layout < "09")
SPLIT += ["07-8-tp2-pp2", "08-8-tp2-pp2-cp2"]
ROUTES = {
    "data-parallel": "01-1 02-2 03-2 02-1".split(),
    "each-chapter": """04-4 06-4-tp2 07-4-tp2-pp2 08-4-ulysses2 04-2 05-2 04-2 08-2-cp2 04-1
        04-4-replicas2""".split(),
    "lora": "lora-2 lora-1 lora-4-replicas2 lora-4".split(),
    "muon": "muon-2 muon-4 muon-1 muon-4-replicas2".split(),
    # If four shards split the experts, each shard has some columns of all six experts. If two
    # shards split the experts, each shard has three entire experts.
    "few-experts": "04-4 04-2 09-4-ep2 05-4 09-2-tp2 04-4-replicas2".split(),
}
# Distribute all layouts of SPLIT over three routes, because rounding errors would grow too much
# over the steps of one long route.
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
        run = f"{name}@{setting}{'+offload' * name.startswith('05')}"
        job = job_of(layout_models, run, tmp_path, *more, 2 * start + 2, "-e", "run")
        [ranks] = run_or_fail(split_name(run)[1], [job], tmp_path / f"jobs{start}")
        found = ranks[0]["stdout"].partition("continuing from")[2]
        assert start == 0 or f"step-{2 * start:08}\n" in found, ranks[0]["stdout"]
    assert disagreement(metrics(tmp_path / "entire"), metrics(tmp_path / "run")) == {}
    assert have_same_weights(tmp_path / "entire", tmp_path / "run", tolerance=1e-4), "not equal"


# Together, these layouts split data, weights, matrices, sequences, layers and experts.
EXAM = "04-4-replicas2 09-2-tp2 09-2-cp2-ep2 05-2 09-4-pp2-ep2".split()


@pytest.mark.slow
def test_run_killed_in_six_kinds_of_parallelism_stays_on_the_curve(layout_models, tmp_path):
    """Continue a run in each layout of EXAM, and kill it each time after three or more steps.

    In the end, let the run finish in the last layout.
    """
    more = [*ENDLESS, "--eval-every", 4, "--checkpoint-every", 2, "--num-steps", 5 * len(EXAM)]
    job = job_of(layout_models, "01-1@glm4_moe", tmp_path, *more, "-e", "entire")
    run_or_fail(1, [job], tmp_path / "jobs")
    run_dir, logs, newest = tmp_path / "run", tmp_path / "logs", 0
    logs.mkdir()
    for name in EXAM:
        run = f"{name}@glm4_moe"
        ranks, (chapter, args) = (
            split_name(run)[1],
            job_of(layout_models, run, tmp_path, *more, "-e", "run"),
        )
        processes = start_ranks(ranks, [SCRIPTS[chapter], *args], logs, log=name)
        wait_for(lambda step=newest + 3: last_logged_step(run_dir) >= step, processes)
        kill(processes)
        output = (logs / f"rank0{name}.log").read_text()
        continues = f"step-{newest:08}\n" in output.partition("continuing from")[2]
        assert newest == 0 or continues, output
        assert newest_step(run_dir) > newest, output
        newest = newest_step(run_dir)
    run_or_fail(ranks, [(chapter, args)], tmp_path / "jobs")
    assert disagreement(metrics(tmp_path / "entire"), metrics(run_dir)) == {}
    assert have_same_weights(tmp_path / "entire", run_dir, tolerance=1e-4)


# ---- dropout ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [slow("05-2"), exhaustive("07-2-pp2")])
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
