"""Test the planner: known bytes and speeds, plausible verdicts, real runs, bad input."""

import itertools
import json
import math
import re
import shlex
import sys
from collections import defaultdict
from statistics import median

import pytest

import dry_run
import fit
import layouts
import scale
import training_step
import will_it_fit
from conftest import ROOT, run_command
from families import save_small_model
from marks import slow
from memory import ShardedMemory
from on_ranks import make_model_folder
from planner import CASES, COMMON, SMALL
from readme import commands
from scale import setting_from
from setting import numbers
from step_time import StepTime, attention_width, speed_of

pytestmark = pytest.mark.tool

PAPER = (
    "-m meta-llama/Llama-3.1-405B --nodes 8 --gpus-per-node 8 -s 4096 -b 1 "
    "--global-batch-size 64 --cpu-offload --recompute full"
)
MEASURED = ROOT / "benchmarks/results/planner-cpu-2cores.json"
# The model tiny has 4 layers. Each layer has 4 matrices of 128 × 128, 3 matrices of 128 × 352, and
# 2 norms of 128 weights.
TINY_MATRICES = 4 * 128 * 128 + 3 * 128 * 352
TINY_LAYER, SPLIT_LAYER = TINY_MATRICES + 2 * 128, TINY_MATRICES / 2 + 2 * 128
# Outside of its layers, tiny has an embedding and a head, each of 384 × 128, and a norm of 128
# weights.
TINY_ROOT = 2 * 384 * 128 + 128


def plan(options):
    """Return the planner's plan for a command line."""
    return will_it_fit.make_plan(will_it_fit.parse_args(shlex.split(options)))


def asked(options):
    """Return the plan of the setting on the command line, without the plans of other settings."""
    return layouts.plan_of(setting_from(options))


def main(monkeypatch, options):
    """Run the planner's main() with a command line; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["will_it_fit.py", *shlex.split(options)])
    with pytest.raises(SystemExit) as stop:
        will_it_fit.main()
    return stop.value.code


# ---- bytes that are known --------------------------------------------------------------------


# Map the flags of a run on four ranks to the number of weights and the number of tensors on the
# rank with the highest peak. Each of two tensor-parallel ranks has half of each matrix and all of
# each norm. The first of two stages has two layers and the embedding. From chapter 04 on, FSDP then
# shards these weights across the other ranks, but not across replicas.
STATES = {
    "--chapter 02": (4 * TINY_LAYER + TINY_ROOT, 39),
    "--chapter 04": ((4 * TINY_LAYER + TINY_ROOT) / 4, 39),
    "--chapter 04 --replicas 2": ((4 * TINY_LAYER + TINY_ROOT) / 2, 39),
    "--tensor-parallel-size 2": ((4 * SPLIT_LAYER + 384 * 128 + 128) / 2, 39),
    "--tensor-parallel-size 2 --replicas 2": (4 * SPLIT_LAYER + 384 * 128 + 128, 39),
    "--pipeline-parallel-size 2 -b 2": ((2 * TINY_LAYER + 384 * 128) / 2, 19),
    "--pipeline-parallel-size 2 -b 2 --tensor-parallel-size 2": (2 * SPLIT_LAYER + 24_576, 19),
    "--context-parallel-size 2": ((4 * TINY_LAYER + TINY_ROOT) / 4, 39),
}


@pytest.mark.parametrize("flags", STATES)
def test_state_of_tiny_has_the_bytes_counted_by_hand(flags):
    parameters, tensors = STATES[flags]
    state = asked(f"--device cpu --gpus-per-node 4 {flags}")["state"]
    assert state["parameters"] == state["gradients"] == 4 * parameters
    assert state["optimizer state"] == 8 * parameters + 4 * tensors


def test_lora_has_gradients_and_moments_of_adapters_only():
    """Count the adapters: each of a layer's 7 matrices has two factors, with 4 rows or columns."""
    adapters = 4 * 4 * (4 * (128 + 128) + 3 * (128 + 352)) // 4
    plan = asked("--device cpu --gpus-per-node 4 --lora-rank 4")
    frozen = 4 * (4 * TINY_LAYER + TINY_ROOT) / 4
    assert plan["state"]["parameters"] == frozen + 4 * adapters
    assert plan["state"]["gradients"] == 4 * adapters
    assert plan["state"]["optimizer state"] == 8 * adapters + 4 * 56
    assert plan["checkpoint"] == 4 * 12 * adapters + 4 * 56


def test_muon_keeps_one_moment_for_each_matrix_of_a_layer():
    """Compare Muon with AdamW: each of 28 matrices needs one moment and one counter less."""
    plans = [
        asked(f"--device cpu --gpus-per-node 4 --chapter 04 {flag}") for flag in ("", "--muon")
    ]
    adamw, muon = (plan["state"] for plan in plans)
    matrices = 4 * (4 * 128 * 128 + 3 * 128 * 352)
    assert adamw["optimizer state"] - muon["optimizer state"] == 4 * matrices / 4 + 4 * 28
    assert adamw["parameters"] == muon["parameters"] and adamw["gradients"] == muon["gradients"]
    assert plans[0]["checkpoint"] - plans[1]["checkpoint"] == 4 * matrices + 4 * 28


# The first layer of tiny-mixture has no experts. Each of the other three layers has 16 experts of
# 3 × 128 × 64 weights.
MIXTURE = f"-m {ROOT}/09-expert-parallel/tiny-mixture --gpus-per-node 4 -b 1 --recompute full"
EXPERTS = 16 * 3 * 128 * 64


def test_expert_parallel_rank_gathers_only_its_own_experts():
    settings = [setting_from(f"{MIXTURE} --expert-parallel-size {size}") for size in (1, 2, 4)]
    one, two, four = (ShardedMemory(setting, 0) for setting in settings)
    assert one.state == two.state == four.state
    # Group 4 is the set of the last layer's weights that FSDP gathers together. With expert
    # parallelism, it has no experts.
    others = numbers(two.shapes(4))
    assert numbers(one.shapes(4)) == others + EXPERTS
    assert [step.gathered_bytes(1) for step in (one, two, four)] == [one.gathered_bytes(1)] * 3
    # With expert parallelism, FSDP gathers the weights of a layer's experts separately. For layer
    # 4, these weights are group 8.
    assert [step.groups_of(4) for step in (one, two, four)] == [[4], [4, 8], [4, 8]]
    assert two.groups_of(1) == [1]
    gathered = [sum(map(step.gathered_bytes, step.groups_of(4))) for step in (one, two, four)]
    assert gathered == [2 * (others + EXPERTS // size) for size in (1, 2, 4)]
    totals = [layouts.plan_of(setting)["gpu_total"] for setting in settings]
    assert totals[0] > totals[1] > totals[2]


def test_experts_send_the_bytes_of_the_readme():
    """Count 3 passes of each expert layer, because --recompute full repeats the forward pass.

    Each pass sends each token to 2 experts and back.
    """
    tokens, passes, micro_batches = 256, 3, 8
    for size in (1, 2, 4):
        setting = setting_from(f"{MIXTURE} --expert-parallel-size {size}")
        sent = StepTime(setting).sent["expert"]
        share = (size - 1) / size
        assert sent == pytest.approx(micro_batches * 3 * passes * 2 * 2 * tokens * 2 * 128 * share)


FAMILIES = ["gpt2", "qwen3", "mistral", "gemma3", "gemma3-window", "mixtral", "qwen3_moe"]
FAMILIES += ["gpt_oss", "deepseek_v3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_planned(models, family):
    plan = asked(f"-m {models / family} -s 64 --config num_hidden_layers=3")
    assert plan["gpu"]["activations"] > 0


def test_405b_needs_the_published_memory():
    # A published run needed 52.9 GB on each of 64 GPUs, most likely with all numbers in bf16. The
    # planner predicts 56.6 GB.
    published = asked(f"{PAPER} --weights-dtype bf16")["gpu_total"]
    assert published == pytest.approx(52.9e9, rel=0.1)
    planned = plan(PAPER)
    assert planned["asked"]["gpu_total"] > published, "float32 takes more than bf16"
    assert planned["first"] == "05 --cpu-offload --recompute full"
    assert not any(planned["settings"][name]["fits"] for name in ("02", "04", "05"))
    assert "configs/llama-3.1-405b.json; the hub was not asked" in planned["model"]["source"]


# ---- verdicts --------------------------------------------------------------------------------


def test_exit_status_shows_whether_the_chosen_setting_fits(monkeypatch, capsys):
    assert main(monkeypatch, "--json") == 0
    assert json.loads(capsys.readouterr().out)["asked"]["fits"]
    assert main(monkeypatch, "--gpu-memory-gib 1") == 1
    assert "the first that fits: none; use more nodes" in capsys.readouterr().out


def test_kind_of_gpu_sets_only_the_flags_that_are_left_out():
    defaults, h100, h200 = (
        vars(will_it_fit.parse_args(line.split())) | {"wandb_id": None}
        for line in ("", "--gpu H100", "--gpu-memory-gib 131 --gpu H200-141GB --network-gbs 20")
    )
    assert h100 == defaults | {"gpu": "H100-80GB"}
    changed = {name: value for name, value in h200.items() if value != h100[name]}
    assert changed == {
        "gpu": "H200-141GB",
        "gpu_memory_gib": 131,
        "gpu_bandwidth_gbs": 4800,
        "network_gbs": 20,
    }


def test_dry_run_and_planner_know_the_same_gpus():
    options = dry_run.parse_args("--gpus 8 --gpu L40S -- 04-fsdp/train_llm.py".split())
    args = will_it_fit.parse_args(["--gpu", "L40S"])
    for name in ("gpu", "nvlink_gbs", "network_gbs"):
        assert getattr(options, name) == getattr(args, name)


@pytest.mark.parametrize(
    ("gpu", "host", "word", "text"),
    [
        (20 * 2**30, 90 * 2**30, "fits", "fits"),
        (33 * 2**20, 90 * 2**30, "tight: GPU", "tight: GPU has 33.00 MiB"),
        (-(2**30), 10 * 2**30, "no: GPU", "no: GPU by 1.00 GiB"),
        (7 * 2**30, 2**30, "tight: GPU, host", "tight: GPU has 7.00 GiB, host has 1.00 GiB"),
    ],
)
def test_small_margin_is_tight(gpu, host, word, text):
    margins = {"gpu_margin": gpu, "host_margin": host}
    found = margins | {"gpu_needs": 80 * 2**30 - gpu, "host_needs": 100 * 2**30 - host}
    assert will_it_fit.verdict(found) == word
    assert will_it_fit.verdict(found, sizes=True) == text


# ---- speed -----------------------------------------------------------------------------------

# Llama-3.1-8B has 32 layers. Outside of them, it has an embedding, a head and a norm.
WEIGHTS_8B, LAYERS, ROOT_8B = 8_030_261_248, 32, 2 * 128_256 * 4096 + 4096
LAYER_8B = (WEIGHTS_8B - ROOT_8B) // LAYERS
# These are the numbers of weights that a tensor-parallel rank has in a layer and outside of the
# layers. Eight ranks split all weights except the weights of the norms.
SPLIT_8B = [(LAYER_8B - 2 * 4096) // 8 + 2 * 4096, (ROOT_8B - 4096) // 8 + 4096]
# Map each way to split Llama-3.1-8B on nodes of eight GPUs to its flags.
SPLITS = {
    "DDP": "--chapter 02",
    "kept": "--no-reshard-after-forward",
    "FSDP": "",
    "hybrid": "--replicas {nodes}",
    "tensor": "--tensor-parallel-size 8 -b 16",
    "pipeline": "--pipeline-parallel-size {nodes}",
}


def test_reference_pass_takes_a_third_of_the_time_of_training(monkeypatch, capsys):
    options = f"@{ROOT}/05-large-model/configs/llama-3.1-8b.args --tokens 1e9 --pair-tokens 1e9"
    main(monkeypatch, options)
    output = capsys.readouterr().out
    hours = float(re.search(r"for 1 billion tokens, ([\d.]+) GPU-hours", output)[1]) / 8
    minutes = float(re.search(r"reference pass: ([\d.,]+) minutes", output)[1].replace(",", ""))
    assert minutes == pytest.approx(hours * 60 / 3, rel=0.02)


def test_every_plan_has_gpu_hours_and_a_price():
    options = f"@{ROOT}/05-large-model/configs/llama-3.1-8b.args --dollars-per-gpu-hour 2.5"
    speed = {"tokens_per_second": 1e6 / 3600, "mfu": 0.4, "exposed": 0.01}
    texts = {
        "": (1000 * 64 * 4096, "1.37 days for 262.1 million tokens, 262.1 GPU-hours, 655.36"),
        "--tokens 1e9": (1e9, "5.21 days for 1 billion tokens, 1,000.0 GPU-hours, 2,500.00"),
        "--conversations 2000 500": (1e6, "7.5 minutes for 1 million tokens, 1.0 GPU-hours, 2.50"),
    }
    for words, (tokens, cost) in texts.items():
        args = will_it_fit.parse_args(shlex.split(f"{options} {words}"))
        assert args.tokens == tokens
        text = will_it_fit.speed_text(args, {"speed": speed, "stop_seconds": 90})
        assert f"{cost} dollars" in text


def test_plan_in_fp32_asks_for_a_peak_in_fp32(capsys):
    for words, is_asked in {"": True, "--gpu-tflops 67": False, "--device cpu": False}.items():
        will_it_fit.parse_args(shlex.split(f"--precision fp32 {words}"))
        assert ("the speed is too high" in capsys.readouterr().err) == is_asked, words


def test_brief_plan_has_gpu_hours_and_a_price_if_it_fits(monkeypatch, capsys):
    options = f"@{ROOT}/05-large-model/configs/llama-3.1-8b.args --brief --dollars-per-gpu-hour 2"
    assert main(monkeypatch, f"{options} --tokens 1e9") == 0
    cost = r"; 1 billion tokens, ([\d.]+) GPU-hours, ([\d.]+) dollars\n$"
    hours, dollars = map(float, re.search(cost, capsys.readouterr().out).groups())
    assert dollars == pytest.approx(2 * hours, abs=0.11)
    assert main(monkeypatch, f"{options} --gpu-memory-gib 8") == 1
    assert "GPU-hours" not in capsys.readouterr().out


def test_lora_is_faster_than_all_weights_as_published():
    """Compare with NVIDIA's runs of Llama 3 8B on 8 H100s: 1.32 s per step, and 0.92 s with LoRA.

    https://github.com/NVIDIA/dgxc-benchmarking at 8f5cbb37, llama3/finetuning/README_8b.md
    """
    words = "-m meta-llama/Llama-3.1-8B -s 4096 -b 1 --global-batch-size 32 --compile"
    full, lora = (speed_of(setting_from(f"{words} {more}")) for more in ("", "--lora-rank 8"))
    assert full["step"] / lora["step"] == pytest.approx(1.32 / 0.92, rel=0.05)
    assert lora["mfu"] == pytest.approx(full["mfu"], rel=0.05)


def test_replicas_send_no_frozen_weights():
    words = "-m meta-llama/Llama-3.1-8B -s 2048 -b 1 --gpus-per-node 2 --lora-rank 16 --replicas"
    sharded, replicated = (speed_of(setting_from(f"{words} {replicas}")) for replicas in (1, 2))
    assert replicated["network_gb"] == 0
    assert replicated["tokens_per_second"] > sharded["tokens_per_second"]


def sent_in_copy(split, ranks, micro_steps):
    """Compute the bytes that a rank sends to gather weights and reduce gradients in a step."""
    if split == "DDP":
        return 2 * (ranks - 1) / ranks * 4 * WEIGHTS_8B
    layer, root = SPLIT_8B if split == "tensor" else (LAYER_8B, ROOT_8B)
    weights = LAYERS * layer + root
    gathered = 2 * weights if split == "kept" else 2 * (2 * weights - root - layer)
    return micro_steps * (gathered + 4 * weights) * (ranks - 1) / ranks


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("nodes", "micro_steps"), [(1, 1), (8, 1), (8, 3)])
def test_sent_bytes_follow_the_closed_formulas(split, nodes, micro_steps):
    # A step trains on two samples of 8,192 tokens for each GPU and micro-step.
    words = f"-m meta-llama/Llama-3.1-8B -s 8192 -b 2 --recompute selective --nodes {nodes} "
    words += f"--global-batch-size {2 * 8 * nodes * micro_steps} "
    step = StepTime(setting_from(words + SPLITS[split].format(nodes=nodes)))
    formula = sent_in_copy(split, {"hybrid": 8, "tensor": nodes}.get(split, 8 * nodes), micro_steps)
    # The largest of eight stages has five layers. It gathers their weights and reduces their
    # gradients once per step.
    if split == "pipeline" and nodes == 8:
        formula = 7 / 8 * 6 * 5 * LAYER_8B
    assert step.sent["copy"] == pytest.approx(formula, rel=1e-12)
    if nodes == 1:
        assert step.sent["network"] == 0, "a single node sends something"
    # FSDP sends in a ring of all ranks, where only one rank of a node sends to the next node, so
    # the planner counts an eighth of the bytes for each of the node's eight ranks. Replicas send
    # only the gradients of shards to other nodes.
    elif split == "FSDP":
        assert step.sent["network"] == pytest.approx(formula / 8, rel=1e-12)
    elif split == "hybrid":
        shards = 2 * 7 / 8 * 4 * WEIGHTS_8B / 8
        assert step.sent["network"] == step.sent["replicas"] == pytest.approx(shards, rel=1e-12)


RECORDED = json.loads(scale.FILE.read_text())
SLOW_PARTS = ["scenes", "layers", "fastest", "job"]


def test_published_speeds_are_predicted_as_the_page_says():
    """Check that the median error of predictions is at most 12%, in fitted and in held-out runs.

    One run may have an error of up to 34%: its GPUs had almost no free memory, and the planner does
    not know how much time this costs. Each other run may have an error of up to 30%.
    """
    misses = {True: [], False: []}
    for row in RECORDED["published"]:
        miss = abs(row["predicted"]["tokens_per_second"] / row["published"] - 1)
        misses[row["fitted"]].append(miss)
    assert all(len(found) >= 15 for found in misses.values())
    assert all(median(found) <= 0.12 for found in misses.values())
    largest = sorted(misses[True] + misses[False])
    assert largest[-1] <= 0.34 and largest[-2] <= 0.3


def test_every_other_row_of_a_source_is_fitted():
    groups = defaultdict(list)
    for row in RECORDED["published"]:
        groups[row["run"].partition(",")[0], row["gpu"]].append(row["fitted"])
    for fitted in groups.values():
        assert fitted == [number % 2 == 0 for number in range(len(fitted))]


def test_fitted_numbers_have_the_smallest_loss():
    """Change each fitted number by a tenth; the planner must then predict the runs less well."""
    runs, _ = fit.published_runs()
    used = {name: value for name, (_, value) in fit.NUMBERS.items()}
    smallest = fit.loss_of(runs, used)
    for name, factor in itertools.product(used, (0.9, 1.1)):
        assert fit.loss_of(runs, used | {name: used[name] * factor}) > smallest, name


def test_fit_finds_the_smallest_loss(monkeypatch):
    def distance(_, numbers):
        return sum(math.log(numbers[name] / used) ** 2 for name, (_, used) in fit.NUMBERS.items())

    monkeypatch.setattr(fit, "loss_of", distance)
    assert fit.fit([]) == {
        name: pytest.approx(used, rel=0.02) for name, (_, used) in fit.NUMBERS.items()
    }


def test_published_mixtures_are_predicted_as_the_page_says():
    for row in RECORDED["mixtures"]:
        speed = row["predicted"]
        if "published" in row:
            assert -0.5 < speed["tokens_per_second"] / row["published"] - 1 < 0.05
            assert -0.1 < speed["sent once"] / row["published"] - 1 < 0.35


def test_efficiency_has_the_causes_that_the_page_names():
    """Change one setting at a time, and compare the shares of the peak speed that a GPU reaches."""
    base = f"-m {ROOT}/05-large-model/configs/llama-3.1-8b.json --gpus-per-node 1 -s 4096 -b 1"
    base += " --global-batch-size 64"

    def share(flags=""):
        return speed_of(setting_from(f"{base} {flags}"))["mfu"]

    assert share("--gpu A100-80GB") > 1.2 * share()
    assert share("--config hidden_size=8192 num_attention_heads=64") > share()
    assert share("-b 4") > share()
    assert share("--compile") == share("--kernels compiled") > share()
    assert share("--kernels fused") > 1.1 * share("--kernels compiled")
    one, other = (share(f"--flops-efficiency {value}") for value in (0.2, 0.4))
    assert one == pytest.approx(other / 2, rel=0.02)


def test_attention_of_deepseek_has_keys_that_are_wider_than_values():
    config = setting_from(
        f"-m {ROOT}/09-expert-parallel/configs/deepseek-v3-671b.json"
    ).model.config
    assert attention_width(config) == 128 * (128 + 64 + 128) / 2


@pytest.mark.parametrize("part", ["published", "mixtures", *map(slow, SLOW_PARTS)])
def test_recorded_rows_are_those_of_the_planner(part):
    """Predict each recorded row again, and check that the prediction has not changed.

    In the part "fastest", check only the first row, which has Llama 3.1 8B on 8 GPUs.
    """
    rows = RECORDED[part][:1] if part == "fastest" else RECORDED[part]
    for row in rows:
        found = json.loads(json.dumps(scale.predict(part, row)))
        assert found == row["predicted"], "run tools/planner/scale.py again"


# ---- layouts ---------------------------------------------------------------------------------


def test_layout_that_does_not_fit_has_no_speed(monkeypatch, capsys):
    ways = [("DDP", "03", [["--batch-size 1"]])]
    ways += [("FSDP, CPU offload", "05", [["--cpu-offload --recompute full"]])]
    monkeypatch.setattr(layouts, "ways_to_split", lambda _: ways)
    line = "-m meta-llama/Llama-3.1-70B -s 4096 -b 1 --nodes 8 --global-batch-size 64 --layouts"
    assert main(monkeypatch, line) == 0
    offload, ddp = capsys.readouterr().out.split("\n\n")[1:]
    assert offload.startswith("FSDP, CPU offload: fits") and "tokens/s per GPU" in offload
    assert ddp.startswith("DDP: no: GPU by 1,") and "tokens/s" not in ddp and "torchrun" not in ddp
    assert plan(line.replace("--layouts", "--chapter 02"))["asked"]["speed"] is None


def test_command_of_a_layout_starts_its_chapter(monkeypatch):
    line = (
        "--nodes 2 --gpus-per-node 4 --checkpoint-async --recompute full -b 4 --lr 1e-5 --layouts"
    )
    found = plan(line)["layouts"]
    speeds = [layout["speed"]["tokens_per_second"] for layout in found if layout["fits"]]
    assert speeds == sorted(speeds, reverse=True) and len(found) == 9
    for layout in found:
        start, _, words = layout["command"].partition(".py ")
        assert start.startswith("torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d")
        script = training_step.load_chapter(start.split()[-1][:2])
        monkeypatch.setattr(training_step, "newest_chapter", lambda script=script: script)
        args = training_step.parse_training_args(shlex.split(words.replace("\\\n", " ")), 8)
        assert args.micro_batch_size == layout["setting"].micro_batch_size and args.lr == 1e-5
        monkeypatch.undo()


def test_way_that_a_chapter_refuses_for_a_model_is_left_out(models):
    found = {layout["way"] for layout in plan(f"-m {models / 'gpt2'} -s 64 --layouts")["layouts"]}
    assert "FSDP, PP" in found and not found & {"FSDP, TP", "FSDP, TP, PP"}


# ---- what the pages say about real jobs --------------------------------------------------------


def jobs_of_pages():
    """Yield the test parameters of each train.sbatch job on a page that the planner can plan.

    The parameters are the command, the chapter's number, and the arguments of the script.
    """
    for block in commands():
        text = block.text.replace("\\\n", " ")
        for line in re.findall(r".*sbatch .*train\.sbatch .*", text):
            # Plan fine-tuning/conversations as chapter 05, which trains the same weights.
            as_chapter = line.replace("fine-tuning/conversations", "05-large-model")
            script = re.search(r"(0\d)-[\w-]+/train_llm\.py (.*)", as_chapter)
            # Skip jobs on CPUs, because the planner knows no speed of CPUs. Skip jobs that start
            # from the model of an earlier job, because this model does not exist here.
            skipped = "--device" in line or "--model-name outputs" in line
            if script and not skipped and "--gpus-per-node" in line:
                yield pytest.param(line, *script.groups(), id=block.name)


@pytest.mark.parametrize(("line", "chapter", "words"), list(jobs_of_pages()))
def test_job_of_a_page_has_the_time_that_its_stop_takes(line, chapter, words):
    """Check that SBATCH_SIGNAL leaves the seconds that the planner expects for a stop.

    If a command does not set SBATCH_SIGNAL, the default of train.sbatch must leave enough seconds.
    """
    words = shlex.split(re.sub(r"@(?=\d\d-)", f"@{ROOT}/", words.replace("$", "")))
    nodes, gpus = (re.search(rf"--{name} (\d+)", line) for name in ("nodes", "gpus-per-node"))
    line_of_plan = f"--nodes {nodes[1]} --gpus-per-node {gpus[1]} {shlex.join(words)}"
    # Plan chapter 03 as chapter 02, which trains in the same way.
    chapter = {"03": "02"}.get(chapter, chapter)
    setting = setting_from(f"{line_of_plan} --chapter {chapter}").changed(chapter=chapter)
    size = layouts.checkpoint_bytes(setting)
    needed = layouts.stop_seconds(setting, size, speed_of(setting))
    given = re.search(r"SBATCH_SIGNAL=B:USR1@(\d+)", line)
    script = (ROOT / "03-job-launchers/slurm/train.sbatch").read_text()
    default = int(re.search(r"--signal=B:USR1@(\d+)", script)[1])
    assert needed == int(given[1]) if given else needed <= default
    assert "--signal" not in line


def gib(setting):
    """Return the GiB that a GPU needs with a setting, rounded and written as on the pages."""
    return f"{layouts.plan_of(setting)['gpu_needs'] / layouts.GIB:.0f}"


def speed(setting):
    """Return the tokens per second of each GPU, rounded and written as on the pages."""
    return f"{speed_of(setting)['tokens_per_second']:,.0f}"


CONFIGS = f"@{ROOT}/05-large-model/configs/llama-3.1-"
ALONE_405B, LONG_8B = f"{CONFIGS}405b.args --nodes 8", f"{CONFIGS}8b.args --nodes 4 -s 131072"
SPLIT_405B = f"{ALONE_405B} --tensor-parallel-size 8"
ON_GPUS = PAPER.replace("--cpu-offload", "--tensor-parallel-size 8")
MIXTURE_30B = "-m Qwen/Qwen3-30B-A3B --nodes 2 -s 4096 --global-batch-size 128 -b 1"
# Each row has a page, a pattern that finds the planner's numbers in the text of the page, a
# function that computes one number from a setting, and a command line for each number.
IN_TEXT = [
    (
        "06-tensor-parallel",
        r"expects (\d+) GiB per GPU, and (\d+) GiB with FSDP alone",
        gib,
        [f"{SPLIT_405B} --batch-size 8", ALONE_405B],
    ),
    (
        "06-tensor-parallel",
        r"expect ([\d,]+) tokens/s per GPU instead of ([\d,]+)",
        speed,
        [f"{SPLIT_405B} --batch-size 8", ALONE_405B],
    ),
    (
        "07-pipeline-parallel",
        r"expects (\d+) GiB per GPU .*on the GPUs, and the planner expects (\d+) GiB per GPU",
        gib,
        [f"{line} --pipeline-parallel-size 8" for line in (SPLIT_405B, ON_GPUS)],
    ),
    (
        "07-pipeline-parallel",
        r"default \| ([\d,]+) \S+ \| ([\d,]+) \S+ \| \| .*? \| ([\d,]+) \S+ \| ([\d,]+) \S+ \|",
        speed,
        [
            f"{SPLIT_405B} {split} --network-gbs {rate}"
            for rate in (47, 5)
            for split in ("--batch-size 8", "--pipeline-parallel-size 8")
        ],
    ),
    (
        "08-context-parallel",
        r"per GPU\*\*, (\d+) GiB with gather, and (\d+) GiB without context parallelism",
        gib,
        [f"{LONG_8B} --recompute full --context-parallel-size {size}" for size in (8, 1)],
    ),
    (
        "09-expert-parallel",
        r"expects ([\d,]+) tokens per second on each GPU with expert parallelism, and ([\d,]+)",
        speed,
        [f"{MIXTURE_30B} --recompute full --expert-parallel-size {size}" for size in (8, 1)],
    ),
]


@pytest.mark.parametrize(("page", "pattern", "number_of", "lines"), IN_TEXT)
def test_numbers_in_the_text_of_a_page_are_those_of_the_plan(page, pattern, number_of, lines):
    text = " ".join((ROOT / page / "README.md").read_text().split())
    found = re.search(pattern, text).groups()
    assert list(found) == [number_of(setting_from(line)) for line in lines]


def test_size_of_a_checkpoint_is_the_same_on_all_pages():
    for name, size in {"70b": 847, "405b": 4870}.items():
        setting = setting_from(f"@{ROOT}/05-large-model/configs/llama-3.1-{name}.args --nodes 8")
        assert round(layouts.checkpoint_bytes(setting) / 1e9) == size
    texts = {path: path.read_text() for path in ROOT.glob("[0-9fd]*/**/*.md")}
    assert any("847 GB" in text for text in texts.values())
    assert not [path for path, text in texts.items() if re.search(r"\b84[0-689] GB", text)]


# ---- bad input -------------------------------------------------------------------------------

BAD = {
    "--gpus-per-node 0": "--gpus-per-node: must be at least 1, not 0",
    "--gpus-per-node 3 --layouts": "--layouts: no layout has a plan",
    "--gpus-per-node 2 --nodes 2 --tensor-parallel-size 4": "not a divisor of --gpus-per-node 2",
    "-m meta-llama/Llama-3.1-8B --config vocab_size=1000": "vocab_size must exceed token id 128255",
    "--context-parallel-size 8 --context-parallel-style ulysses": "4 key-value heads for 8 ranks",
    "-m nosuch.json": "--model-name nosuch.json: file not found",
    "-m no/such-model": "--model-name no/such-model: the hub does not give this model",
    "-m {folder}/broken.json": "broken.json:",
    # The planner refuses this model, because the model has layers of several kinds, but the two
    # layers that the planner traces would be of one kind.
    "-m {folder}/jamba --config num_hidden_layers=8": "layers of several kinds",
    "--gpu A100": "several kinds; choose A100-40GB or A100-80GB",
    "--gpu H1000": "unknown kind; choose T4-16GB, A100-40GB,",
    "--write-config horovod file": "unknown framework; choose deepspeed or accelerate",
    "--write-config deepspeed file --recompute selective": "choose none or full",
    "--write-config deepspeed file --chapter 02": "choose --chapter 04 or 05",
}


@pytest.mark.parametrize("options", BAD)
def test_mistake_costs_one_line(options, tmp_path, monkeypatch, capsys):
    (tmp_path / "broken.json").write_text("{")
    if "jamba" in options:
        save_small_model("jamba", tmp_path / "jamba")
    assert main(monkeypatch, options.format(folder=tmp_path)) == 2
    output, error = capsys.readouterr()
    assert not output
    assert error.startswith("will_it_fit.py: error: ")
    assert error.count("\n") == 1
    assert BAD[options] in error


# ---- real runs -------------------------------------------------------------------------------


def check(row):
    """Fail unless the state of training is exactly as planned, and the peak almost as planned.

    Without a pipeline, the planned and the measured peak may differ by 0.1%. With a pipeline, the
    planned peak may be up to 4% too high; it is about 3% too high, for an unknown reason.
    """
    assert row["exact"], row
    highest = 1.04 if "--pipeline" in row["flags"] else 1.001
    assert 0.999 < row["peak ratio"] < highest, row


@pytest.mark.parametrize("case", CASES)
def test_measured_runs_were_as_planned(case, tmp_path):
    [row] = [row for row in json.loads(MEASURED.read_text())["rows"] if row["case"] == case]
    check(row)
    chapter, ranks, changes, flags = CASES[case]
    make_model_folder(tmp_path, **(SMALL | changes))
    planned = asked(f"-m {tmp_path} --chapter {chapter} --gpus-per-node {ranks} {COMMON} {flags}")
    planned = planned["state"] | {"peak": planned["gpu_total"]}
    assert planned == row["planned"], "the plan has changed; run benchmarks/planner.py again"


@pytest.mark.slow
# Run this test alone, because the profiler does not see the memory that Gloo's threads release.
# Beside other tests, the profiler once counted the gradients of a run of chapter 02 twice.
@pytest.mark.alone
def test_runs_are_as_planned(tmp_path):
    cases = ["02 bf16", "04 kept", "05 selective", "06 full", "07"]
    command = [ROOT / "benchmarks/planner.py", "--output", tmp_path / "rows.json", "--only"]
    done = run_command(*command, *cases, timeout=900)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["case"] for row in rows] == cases
    for row in rows:
        check(row)


def test_setting_that_cannot_run_keeps_the_other_settings(models, monkeypatch, capsys):
    """Plan gpt-oss, whose experts change a tensor that selective recomputation has stored.

    The planner must report that selective recomputation has no plan, and plan full recomputation.
    """
    names = ["05 --recompute selective", "05 --recompute full"]
    settings = {name: will_it_fit.SETTINGS[name] for name in names}
    monkeypatch.setattr(will_it_fit, "SETTINGS", settings)
    assert main(monkeypatch, f"-m {models / 'gpt_oss'} -s 64 --recompute full") == 0
    output = capsys.readouterr().out
    assert re.search(r"05 --recompute selective +no plan: .* selective activation", output)
    assert re.search(r"05 --recompute full .* fits\n", output)
    assert "the first that fits: 05 --recompute full" in output


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_layers_without_attention_have_memory_but_no_speed(family, tmp_path, monkeypatch, capsys):
    save_small_model(family, tmp_path)
    monkeypatch.setattr(will_it_fit, "SETTINGS", {})
    line = f"-m {tmp_path} -s 8"
    assert main(monkeypatch, line) == 0
    output = capsys.readouterr().out
    assert re.search(r"activations +[\d.]+ MiB", output) and "speed: unknown" in output
    assert "tokens/s" not in output
    assert main(monkeypatch, f"{line} --layouts") == 2
    assert "knows no speed of layers without attention" in capsys.readouterr().err
