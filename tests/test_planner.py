"""The planner: bytes that are known, verdicts that make sense, real runs, bad input."""

import json
import shlex
import sys

import pytest
import yaml

import will_it_fit
from conftest import ROOT, run_command
from framework_files import write_config
from on_ranks import make_model_folder
from planner import CASES, COMMON, SMALL
from training_step import bubble, in_flight, load_config

pytestmark = pytest.mark.tool

PAPER = (
    "-m meta-llama/Llama-3.1-405B --nodes 8 --gpus-per-node 8 -s 4096 -b 1 "
    "--global-batch-size 64 --cpu-offload --recompute full"
)
MEASURED = ROOT / "benchmarks/results/planner-cpu-2cores.json"
# The numbers of weights as published.
WEIGHTS = {
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
}
# Tiny has 4 layers with 4 matrices of 128 × 128, 3 matrices of 128 × 352, and 2 norms.
TINY_MATRICES = 4 * 128 * 128 + 3 * 128 * 352
TINY_LAYER, SPLIT_LAYER = TINY_MATRICES + 2 * 128, TINY_MATRICES / 2 + 2 * 128
# Besides, tiny has an embedding and a head of 384 × 128, and a norm.
TINY_ROOT = 2 * 384 * 128 + 128


def plan(options):
    """Return the plan of a command line."""
    return will_it_fit.make_plan(will_it_fit.parse_args(shlex.split(options)))


def asked(options):
    """Return the plan of only the setting that a command line chooses."""
    args = will_it_fit.parse_args(shlex.split(options))
    model = will_it_fit.model_of(load_config(args)[0])
    flags = {name: getattr(args, name) for name in will_it_fit.FLAG_DEFAULTS}
    return will_it_fit.plan_of(args, model, args.chapter, flags)


def main(monkeypatch, options):
    """Run the planner's main() with a command line; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["will_it_fit.py", *shlex.split(options)])
    with pytest.raises(SystemExit) as stop:
        will_it_fit.main()
    return stop.value.code


# ---- bytes that are known --------------------------------------------------------------------


@pytest.mark.parametrize(("name", "weights"), WEIGHTS.items())
def test_shape_in_configs_has_the_published_number_of_weights(name, weights):
    args = will_it_fit.parse_args(["-m", str(ROOT / f"05-large-model/configs/{name}.json")])
    config, _ = load_config(args)
    assert will_it_fit.model_of(config).weights == weights


# Two ranks that split layers have half of each matrix, and each norm completely. The first of two
# stages has two layers and the embedding.
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


def test_pipeline_keeps_the_activations_of_the_micro_batches_in_flight():
    kept = {}
    for schedule in ("gpipe", "1f1b", "interleaved-1f1b"):
        options = f"--device cpu --gpus-per-node 4 -b 2 --pipeline-schedule {schedule}"
        options += " --pipeline-parallel-size 2 --config num_hidden_layers=6"
        kept[schedule] = asked(options)["gpu"]["activations"]
    assert kept["gpipe"] / kept["1f1b"] == pytest.approx(8 / 2, rel=0.1)
    assert kept["interleaved-1f1b"] / kept["1f1b"] == pytest.approx(2.5 / 2, rel=0.1)


def test_context_parallel_rank_keeps_its_part_and_gathered_keys_and_values():
    options = "--device cpu --gpus-per-node 4 --batch-size 4 -s 512 --context-parallel-size"
    one = asked(f"{options} 1")["gpu"]["activations"]
    swapped = asked(f"{options} 2 --context-parallel-style ulysses")["gpu"]["activations"]
    assert swapped == pytest.approx(one / 2, rel=0.05)
    # The keys and values of all tokens, in four layers; a rank had half of them before.
    all_keys_and_values = 4 * 2 * 4 * 512 * 128 * 4
    gathered = asked(f"{options} 2")["gpu"]["activations"]
    assert gathered == pytest.approx(one / 2 + all_keys_and_values / 2, rel=0.02)


def test_schedules_were_measured_as_planned():
    """The ranks kept exactly the planned micro-batches, and were idle for the planned share."""
    for row in json.loads((ROOT / "benchmarks/results/bubble.json").read_text())["rows"]:
        schedule, count, kept = row["schedule"], row["micro_batches"], row["in flight"]
        ranks = len(kept)
        assert kept == [in_flight(schedule, rank, ranks, count) for rank in range(ranks)], row
        idle = bubble(schedule, ranks, count)
        assert row["formula"] == pytest.approx(idle) and abs(row["bubble"] - idle) < 0.03, row


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "mistral", "gemma3", "gemma3-window"])
def test_family_is_planned(models, family):
    plan = asked(f"-m {models / family} -s 64 --config num_hidden_layers=3")
    assert plan["gpu"]["activations"] > 0


def test_405b_needs_the_published_memory():
    # A published run needed 52.9 GB on each of 64 GPUs, most likely with all numbers in bf16. The
    # plan has 56.6 GB.
    published = asked(f"{PAPER} --weights-dtype bf16")["gpu_total"]
    assert published == pytest.approx(52.9e9, rel=0.1)
    planned = plan(PAPER)
    assert planned["asked"]["gpu_total"] > published, "float32 takes more than bf16"
    assert planned["first"] == "05 --cpu-offload --recompute full"
    assert not any(planned["settings"][name]["fits"] for name in ("02", "04", "05"))
    assert "configs/llama-3.1-405b.json; the hub was not asked" in planned["model"]["source"]


# ---- verdicts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "first"),
    [
        ("400", "02"),
        ("70", "04 --no-reshard-after-forward"),
        ("55", "04"),
        ("14", "05 --cpu-offload --recompute full"),
        ("14 --host-memory-gib 100", None),
    ],
)
def test_plan_names_the_first_setting_that_fits(memory, first):
    planned = plan(f"-m meta-llama/Llama-3.1-8B -s 4096 -b 1 --gpu-memory-gib {memory}")
    assert planned["first"] == first


def test_split_is_planned_with_the_settings_of_its_chapter():
    planned = plan("--gpus-per-node 4 --tensor-parallel-size 2")
    assert len(planned["settings"]) == 6 and all(name[:2] == "06" for name in planned["settings"])
    assert planned["asked"] == planned["settings"]["06"]
    for name, chapter in {"pipeline": "07", "context": "08"}.items():
        words = ["--gpus-per-node", "4", "-b", "2", f"--{name}-parallel-size", "2"]
        assert will_it_fit.parse_args(words).chapter == chapter


def test_exit_status_tells_whether_the_chosen_setting_fits(monkeypatch, capsys):
    assert main(monkeypatch, "--json") == 0
    assert json.loads(capsys.readouterr().out)["asked"]["fits"]
    assert main(monkeypatch, "--gpu-memory-gib 1") == 1
    assert "the first that fits: none; use more nodes" in capsys.readouterr().out


def test_flags_are_those_of_the_newest_chapter(tmp_path):
    (tmp_path / "some.args").write_text("--lr 1e-5  # slow\n--compile\n--recompute full\n")
    args = will_it_fit.parse_args([f"@{tmp_path}/some.args", "--warmup-steps", "0", "-e", "name"])
    assert (args.lr, args.compile, args.recompute) == (1e-5, True, "full")
    # A plan is for GPUs, whether this machine has one or not.
    assert (args.device, args.precision, args.ranks) == ("cuda", "bf16", 8)


# ---- files for frameworks --------------------------------------------------------------------


# The flags, the names of a value in the file, and the value.
FILES = [
    ("deepspeed --cpu-offload", "zero_optimization stage", 3),
    ("deepspeed --cpu-offload", "zero_optimization offload_param device", "cpu"),
    ("deepspeed --max-grad-norm 0.5", "gradient_clipping", 0.5),
    ("deepspeed -b 3", "train_micro_batch_size_per_gpu", 2),
    ("deepspeed", "torch_autocast lower_precision_safe_modules", []),
    ("deepspeed --no-reshard-after-forward --cpu-offload", "zero_optimization stage", 2),
    ("deepspeed --no-reshard-after-forward --cpu-offload", "zero_optimization offload_param", None),
    ("deepspeed --weights-dtype bf16", "torch_autocast", None),
    ("deepspeed --weights-dtype bf16", "data_types grad_accum_dtype", "fp32"),
    ("accelerate --gpus-per-node 4", "num_processes", 4),
    ("accelerate --recompute full", "fsdp_config fsdp_activation_checkpointing", True),
    ("accelerate --no-reshard-after-forward", "fsdp_config fsdp_reshard_after_forward", False),
    ("accelerate --chapter 02", "distributed_type", "MULTI_GPU"),
    ("accelerate --chapter 02", "fsdp_config", None),
]


@pytest.mark.parametrize(("flags", "names", "value"), FILES)
def test_file_for_a_framework_has_the_setting(flags, names, value, tmp_path):
    framework, *words = flags.split()
    # A file in JSON is also one in YAML.
    found = yaml.safe_load(write_config(tmp_path / "file", framework, *words).read_text())
    for name in names.split():
        found = found.get(name)
    assert found == value


def test_file_is_written_only_if_the_setting_fits(monkeypatch, tmp_path):
    path = tmp_path / "new/zero.json"
    line = f"--brief --write-config deepspeed {path}"
    assert main(monkeypatch, f"{line} --gpu-memory-gib 1") == 1 and not path.exists()
    assert main(monkeypatch, line) == 0 and path.exists()


# ---- bad input -------------------------------------------------------------------------------

BAD = {
    "--gpus-per-node 0": "--gpus-per-node: must be at least 1, not 0",
    "--config width=8": "--model-name tiny width=8: key width",
    "--context-parallel-size 8 --context-parallel-style ulysses": "4 key-value heads for 8 ranks",
    "--pipeline-parallel-size 8 -b 4": "tiny has fewer than 8 layers",
    "-m nosuch.json": "--model-name nosuch.json: file not found",
    "-m {folder}/broken.json": "broken.json:",
    "@nosuch.args": "'nosuch.args'",
    "--precision fp32 --weights-dtype bf16": "weights in bf16 cannot compute in fp32",
    "--write-config horovod file": "unknown framework; choose deepspeed or accelerate",
    "--write-config deepspeed file --recompute selective": "choose none or full",
    "--write-config deepspeed file --chapter 02": "choose --chapter 04 or 05",
    "--write-config accelerate file --weights-dtype bf16": "choose fp32",
}


@pytest.mark.parametrize("options", BAD)
def test_mistake_costs_one_line(options, tmp_path, monkeypatch, capsys):
    (tmp_path / "broken.json").write_text("{")
    assert main(monkeypatch, options.format(folder=tmp_path)) == 2
    output, error = capsys.readouterr()
    assert not output
    assert error.startswith("will_it_fit.py: error: ")
    assert error.count("\n") == 1
    assert BAD[options] in error


# ---- real runs -------------------------------------------------------------------------------


def check(row):
    """Fail unless the state of training is exactly as planned, and the peak nearly.

    The plan misses a peak by at most 0.08%. For a pipeline, it has 2.6% too much, and the reason is
    not known.
    """
    assert row["exact"], row
    highest = 1.03 if "--pipeline" in row["flags"] else 1.001
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
def test_runs_are_as_planned(tmp_path):
    cases = ["02 bf16", "04 kept", "05 selective", "06 full", "07"]
    command = [ROOT / "benchmarks/planner.py", "--output", tmp_path / "rows.json", "--only"]
    done = run_command(*command, *cases, timeout=900)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["case"] for row in rows] == cases
    for row in rows:
        check(row)
