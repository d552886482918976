"""Chapter 05's planner: bytes that are known, verdicts that make sense, real runs, bad input."""

import json
import os
import shlex
import sys

import pytest

import contenders
from chapters import flags
from conftest import ROOT, SCRIPTS, run_command, user_error

PLANNER = ROOT / "05-large-model/will_it_fit.py"
MEASURED = ROOT / "benchmarks/results/planner-cpu-2cores.json"
PAPER = (
    "-m meta-llama/Llama-3.1-405B --nodes 8 --gpus-per-node 8 -s 4096 -b 1 "
    "--global-batch-size 64 --cpu-offload --recompute full"
)
WEIGHTS = {  # as published
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
}


@pytest.fixture(scope="module")
def planner():
    """The planner as a module, which makes each model once, and so traces each setting once."""
    module = contenders.load(PLANNER)
    made, make = {}, module.model_of

    def model_of(config, *size):
        key = config.to_json_string(), size
        made[key] = made.get(key) or make(config, *size)
        return made[key]

    module.model_of = model_of
    return module


def plan(planner, options):
    """Return the plan of a command line."""
    return planner.make_plan(planner.parse_args(shlex.split(options)))


@pytest.mark.parametrize(("name", "weights"), WEIGHTS.items())
def test_shapes_that_come_along_have_as_many_weights_as_published(planner, name, weights):
    args = planner.parse_args(["-m", str(PLANNER.parent / f"configs/{name}.json")])
    config, _ = planner.load_config(args)
    assert planner.model_of(config).weights == weights


def test_bytes_of_tiny_by_hand(planner):
    # of 4 layers: 4 matrices of 128 × 128, 3 of 128 × 352, 2 norms; then 384 × 128 twice, 1 norm
    layer = 4 * 128 * 128 + 3 * 128 * 352 + 2 * 128
    weights = 4 * layer + 2 * 384 * 128 + 128
    options = "--device cpu --gpus-per-node 4 --chapter 04"
    state = plan(planner, options)["asked"]["state"]
    assert state["parameters"] == state["gradients"] == weights * 4 / 4
    assert state["optimizer state"] == 2 * weights * 4 / 4 + 4 * (4 * 9 + 3)
    state = plan(planner, f"{options} --replicas 2")["asked"]["state"]
    assert state["parameters"] == weights * 4 / 2
    state = plan(planner, "--device cpu --gpus-per-node 4 --chapter 02")["asked"]["state"]
    assert state["parameters"] == weights * 4


SMALL = "-m meta-llama/Llama-3.1-8B -s 4096 -b 1 --gpu-memory-gib"


@pytest.mark.parametrize(
    ("memory", "first", "nodes"),
    [
        ("400", "02", None),
        ("70", "04 --no-reshard-after-forward", None),
        ("55", "04", None),
        ("14", "05 --cpu-offload --recompute full", None),
        ("14 --host-memory-gib 100", None, 2),
    ],
)
def test_the_first_setting_that_fits_or_on_how_many_nodes(planner, memory, first, nodes):
    planned = plan(planner, f"{SMALL} {memory}")
    assert (planned["first"], planned["enough_nodes"]) == (first, nodes)


def test_more_nodes_may_need_a_larger_batch(planner, capsys):
    words = [*f"{SMALL} 14 --host-memory-gib 100 --global-batch-size 8".split()]
    args = planner.parse_args(words)
    planner.show(args, plan(planner, " ".join(words)))
    answer = "would fit on 2 such nodes, with a global batch that is a multiple of 16"
    assert answer in capsys.readouterr().out


def test_flags_and_chunks_are_those_of_the_chapter(planner, tmp_path):
    source, ours = SCRIPTS["08"].read_text(), vars(planner.parse_args([]))  # 05's, and five more
    for flag, declared in flags(source).items():
        value = ours[flag.removeprefix("--").replace("-", "_")]
        assert not value or f"default={value!r}" in declared or flag in ("--device", "--precision")
    assert f"\nCHUNK_SIZE = {planner.CHUNK_SIZE}\n" in source
    (tmp_path / "some.args").write_text("--lr 1e-5  # slow\n--compile\n--recompute full\n")
    args = planner.parse_args([f"@{tmp_path}/some.args", "--warmup-steps", "0", "-e", "name"])
    assert (args.lr, args.compile, args.recompute) == ("1e-5", True, "full")


def test_the_chosen_setting_is_written_for_deepspeed(tmp_path, planner, capsys):
    """If it fits; what DeepSpeed has not is refused."""
    line = [PLANNER, "--brief", "--gpus-per-node", 4, "--write-config", "deepspeed"]
    line += [tmp_path / "zero.json", "--max-grad-norm", 0.5, "--cpu-offload"]
    run_command(*line, check=True)
    written = json.loads((tmp_path / "zero.json").read_text())
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    assert written["zero_optimization"] == zero and written["gradient_clipping"] == 0.5
    assert written["train_micro_batch_size_per_gpu"] == 8 and "torch_autocast" in written
    (tmp_path / "zero.json").unlink()
    assert run_command(*line, "--gpu-memory-gib", 1).returncode == 1
    assert not (tmp_path / "zero.json").exists()
    words = f"--write-config deepspeed {tmp_path}/zero.json --recompute selective".split()
    problem = "--recompute selective: make_config.py does not support this value"
    assert problem in user_error(capsys, planner.parse_args, words)
    words[3:] = ["--chapter", "02"]
    assert "choose --chapter 04 or 05" in user_error(capsys, planner.parse_args, words)


def test_the_chosen_setting_is_written_for_accelerate(tmp_path):
    line = [PLANNER, "--brief", "--gpus-per-node", 4, "--write-config", "accelerate"]
    line += [tmp_path / "fsdp2.yaml", "--no-reshard-after-forward", "--recompute", "full"]
    run_command(*line, check=True)
    written = (tmp_path / "fsdp2.yaml").read_text().splitlines()
    assert {"num_processes: 4", "  fsdp_activation_checkpointing: true"} <= {*written}
    assert {"  fsdp_reshard_after_forward: false", "  fsdp_offload_params: false"} <= {*written}
    run_command(*line[:-3], "--chapter", "02", check=True)
    written = (tmp_path / "fsdp2.yaml").read_text().splitlines()
    assert 'distributed_type: "MULTI_GPU"' in written and "fsdp_config:" not in written


SPLIT = "--device cpu --gpus-per-node 4 --tensor-parallel-size"


def test_bytes_of_tiny_by_hand_where_layers_are_split(planner):
    """Two ranks have half of each matrix, and all of each norm."""
    layer = (4 * 128 * 128 + 3 * 128 * 352) / 2 + 2 * 128
    weights = 4 * layer + 2 * 384 * 128 / 2 + 128
    planned = plan(planner, f"{SPLIT} 2")
    state = planned["asked"]["state"]
    assert state["parameters"] == state["gradients"] == weights * 4 / 2
    assert state["optimizer state"] == 2 * weights * 4 / 2 + 4 * (4 * 9 + 3)
    state = plan(planner, f"{SPLIT} 2 --replicas 2")["asked"]["state"]
    assert state["parameters"] == weights * 4
    assert len(planned["settings"]) == 6 and all(name[:2] == "06" for name in planned["settings"])
    assert planned["asked"] == planned["settings"]["06"]


def test_what_splitting_layers_does_to_a_step(planner):
    """Of as many tokens per device, whole groups gather a part of each layer, and keep it all."""
    options = "-m meta-llama/Llama-3.1-8B -s 4096 --global-batch-size 64 --nodes 8"
    one = plan(planner, f"{options} -b 1")["asked"]["gpu"]
    eight = plan(planner, f"{options} -b 8 --tensor-parallel-size 8")["asked"]["gpu"]
    assert one["gathered weights"] / 8.1 < eight["gathered weights"] < one["gathered weights"] / 7.9
    whole = 4 * 8 * 4096 * 4096 * 32  # bytes: of each layer, what its two blocks gather is kept
    more = eight["activations"] - one["activations"]
    assert more == pytest.approx(whole * 7 / 8, rel=0.01)  # of which each device had its part
    few = plan(planner, f"{options} -b 1 --tensor-parallel-size 8")["asked"]["gpu"]
    assert few["activations"] == pytest.approx(eight["activations"] / 8, rel=0.01)


STAGES = "--device cpu --gpus-per-node 4 --batch-size 2 --pipeline-parallel-size"


def test_bytes_of_tiny_by_hand_in_stages(planner):
    """Two of four layers, and one end: the first stage's embedding, or the last one's head."""
    layer = 4 * 128 * 128 + 3 * 128 * 352 + 2 * 128
    planned = plan(planner, f"{STAGES} 2")
    state, gpu = planned["asked"]["state"], planned["asked"]["gpu"]
    weights = 2 * layer + 384 * 128  # of the first, which keeps more
    assert state["parameters"] == weights * 4 / 2
    assert state["optimizer state"] == 2 * weights * 4 / 2 + 4 * (2 * 9 + 1)
    assert gpu["gathered weights"] == weights * 4
    assert weights * 4 < gpu["whole gradients"] < weights * 4 + 2 * layer * 4
    assert gpu["communication"] == 8 * 2 * 256 * 128 * 4  # gradients of eight micro-batches
    assert len(planned["settings"]) == 6 and all(name[:2] == "07" for name in planned["settings"])
    split = plan(planner, f"{STAGES} 2 --tensor-parallel-size 2")["asked"]["state"]
    halves = weights - 2 * 2 * 128  # all but norms
    assert split["parameters"] == (halves / 2 + 2 * 2 * 128) * 4


PARTS = "--device cpu --gpus-per-node 4 --batch-size 4 -s 512 --context-parallel-size"


def test_ranks_that_share_sequences_keep_their_parts(planner):
    """And with gathering, besides, keys and values of all tokens: of four layers, 128 wide."""
    one, two = plan(planner, f"{PARTS} 1")["asked"]["gpu"], plan(planner, f"{PARTS} 2")
    assert len(two["settings"]) == 6 and all(name[:2] == "08" for name in two["settings"])
    assert two["asked"]["state"] == plan(planner, f"{PARTS} 1")["asked"]["state"]
    swapped = plan(planner, f"{PARTS} 2 --context-parallel-style ulysses")["asked"]["gpu"]
    assert swapped["activations"] == pytest.approx(one["activations"] / 2, rel=0.05)
    whole = 4 * 2 * 4 * 512 * 128 * 4  # bytes, of which each rank had half before
    gathered = two["asked"]["gpu"]["activations"]
    assert gathered == pytest.approx(one["activations"] / 2 + whole / 2, rel=0.02)
    halves = plan(planner, f"{PARTS} 2 --pipeline-parallel-size 2")["asked"]["gpu"]
    assert halves["communication"] == 8 * 4 * 256 * 128 * 4  # of eight micro-batches


def test_activations_are_those_of_the_micro_batches_in_flight(planner):
    """Of eight; each of two ranks has three layers."""
    kept = {}
    for schedule in ("gpipe", "1f1b", "interleaved-1f1b"):
        options = f"{STAGES} 2 --config num_hidden_layers=6 --pipeline-schedule {schedule}"
        kept[schedule] = plan(planner, options)["asked"]["gpu"]["activations"]
    assert kept["gpipe"] / kept["1f1b"] == pytest.approx(8 / 2, rel=0.1)
    assert kept["interleaved-1f1b"] / kept["1f1b"] == pytest.approx(2.5 / 2, rel=0.1)


BUBBLES = json.loads((ROOT / "benchmarks/results/bubble.json").read_text())["rows"]


@pytest.mark.parametrize("row", BUBBLES, ids=lambda row: f"{row['schedule']}, {row['formula']}")
def test_schedules_were_measured_as_planned(planner, row):
    """What ranks kept, exactly, and for how long they were idle."""
    schedule, count, kept = row["schedule"], row["micro_batches"], row["in flight"]
    ranks = len(kept)
    assert kept == [planner.in_flight(schedule, rank, ranks, count) for rank in range(ranks)]
    idle = planner.bubble(schedule, ranks, count)
    assert row["formula"] == pytest.approx(idle) and abs(row["bubble"] - idle) < 0.03


def test_a_changed_configuration_is_the_one_that_is_planned(planner):
    changed = plan(planner, "--config num_hidden_layers=2 hidden_size=64")
    layer = 4 * 64 * 128 + 3 * 64 * 352 + 2 * 64  # four heads of 32, as before
    assert changed["model"]["weights"] == 2 * layer + 2 * 384 * 64 + 64
    assert changed["model"]["source"] == "built in, with num_hidden_layers=2,hidden_size=64"


def test_one_micro_batch_is_advised_under_offload(planner, monkeypatch, capsys):
    advice = "one micro-batch is best under offload"
    assert main(planner, monkeypatch, "--cpu-offload", "-b", 2) == 0
    assert advice in capsys.readouterr().out
    assert main(planner, monkeypatch, "--cpu-offload") == 0
    assert advice not in capsys.readouterr().out


def test_405b_as_reported(planner):
    # 52.9 GB were reported for 64 GPUs of 80 GB, most likely with weights and states in bf16
    as_reported = plan(planner, f"{PAPER} --weights-dtype bf16")["asked"]
    assert as_reported["gpu_total"] == pytest.approx(52.9e9, rel=0.1)
    ours = plan(planner, PAPER)
    assert ours["asked"]["fits"]
    assert ours["asked"]["gpu_total"] > as_reported["gpu_total"]
    assert ours["asked"]["state"]["parameters"] == pytest.approx(405_853_388_800 * 4 / 64, rel=1e-3)
    assert not any(ours["settings"][name]["fits"] for name in ("02", "04", "05"))
    assert ours["first"] == "05 --cpu-offload --recompute full"


def timed_command(*command):
    """Run a command; return its CompletedProcess and the CPU seconds that it used."""
    before = os.times()
    done = run_command(*command)
    after = os.times()
    used = after.children_user + after.children_system
    return done, used - before.children_user - before.children_system


def test_405b_takes_less_than_twice_the_start_of_a_chapter():
    """Both are measured in the same run, because machines differ."""
    done, seconds = timed_command(PLANNER, *PAPER.split())
    _, seconds_to_start = timed_command(SCRIPTS["08"], "--help")
    assert seconds < 2 * seconds_to_start
    assert done.returncode == 0, done.stderr
    assert "configs/llama-3.1-405b.json; the hub was not asked" in done.stdout
    assert "the first that fits: 05 --cpu-offload --recompute full" in done.stdout


def main(planner, monkeypatch, *options):
    """Run the planner's main() with a command line; return its exit status."""
    monkeypatch.setattr(sys, "argv", [str(PLANNER), *map(str, options)])
    with pytest.raises(SystemExit) as stop:
        planner.main()
    return stop.value.code


def test_exit_status_says_whether_the_chosen_setting_fits(planner, monkeypatch, capsys):
    assert main(planner, monkeypatch, "--json") == 0
    assert json.loads(capsys.readouterr().out)["asked"]["fits"]
    assert main(planner, monkeypatch, "--gpu-memory-gib", 1) == 1
    assert "nothing fits" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "mistral", "gemma3", "gemma3-window"])
def test_other_families(planner, models, family):
    options = f"-m {models / family} -s 64 --config num_hidden_layers=3"
    config, _ = planner.load_config(planner.parse_args(options.split()))
    assert len(planner.model_of(config).layers) == 3
    asked = plan(planner, options)["asked"]
    assert asked["fits"]
    assert asked["gpu"]["activations"] > 0


BAD = {
    "no GPUs": ("--gpus-per-node 0", "--gpus-per-node: must be at least 1, not 0"),
    "config": ("--config width=8", "--config width=8: key width"),
    "no value": ("--config num_hidden_layers", "--config num_hidden_layers: "),
    "batch": (
        "--nodes 5",
        "not divisible by 40 data-parallel ranks; choose a multiple, such as 40",
    ),
    "replicas": ("--replicas 3", "--replicas 3: 8 data-parallel ranks are not divisible by 3"),
    "groups": (
        "--tensor-parallel-size 3 -s 255",
        "8 ranks are not divisible by 3; start a multiple",
    ),
    "length": (
        "--tensor-parallel-size 8 -s 250",
        "--seq-length 250: not divisible by the 8 ranks that split",
    ),
    "samples": (
        "--nodes 5 --tensor-parallel-size 8 --config num_attention_heads=8 num_key_value_heads=8",
        "not divisible by 5 data-parallel ranks; choose a multiple, such as 35",
    ),
    "heads": ("--tensor-parallel-size 8", "llama has 4 key-value heads; choose a divisor"),
    "parts": ("--context-parallel-size 3", "--seq-length 256: not divisible by the 3 ranks"),
    "parts, heads": (
        "--context-parallel-size 8 --context-parallel-style ulysses",
        "4 key-value heads for 8 ranks",
    ),
    "stages": ("--pipeline-parallel-size 16", "-size 16: 8 ranks are not divisible by 16"),
    "few": ("--pipeline-parallel-size 8 -b 8", "do not fill the pipeline; lower --batch-size"),
    "few layers": ("--pipeline-parallel-size 8 -b 4", "tiny has fewer than 8 layers"),
    "too long": ("-s 100000", "--seq-length 100000: tiny takes at most 2048 tokens"),
    "no file": ("-m nosuch.json", "--model-name nosuch.json: file not found"),
    "no model": ("-m nosuch/model", "--model-name nosuch/model:"),
    "no json": ("-m {folder}/broken.json", "broken.json:"),
    "arguments file": ("@nosuch.args", "'nosuch.args'"),
    "types": ("--precision fp32 --weights-dtype bf16", "weights in bf16 cannot compute in fp32"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(planner, name, tmp_path, monkeypatch, capsys):
    (tmp_path / "broken.json").write_text("{")
    options, message = BAD[name]
    words = options.format(folder=tmp_path).split()
    assert main(planner, monkeypatch, *words) == 2
    out, error = capsys.readouterr()
    assert not out
    assert error.startswith("will_it_fit.py: error: ")
    assert error.count("\n") == 1
    assert message in error


def check(rows):
    """Fail unless weights, gradients and optimizer state are as planned, and the peaks nearly."""
    for row in rows:
        assert row["exact"], row
        assert row["peak ratio"] == pytest.approx(1, abs=0.05), row


def test_measured_runs_were_as_planned():
    rows = json.loads(MEASURED.read_text())["rows"]
    assert len(rows) >= 8
    check(rows)


@pytest.mark.slow
def test_runs_are_as_planned(tmp_path):
    cases = ["02 bf16", "04 kept", "05 selective", "06 full", "07"]
    command = [ROOT / "benchmarks/planner.py", "--output", tmp_path / "rows.json", "--only"]
    done = run_command(*command, *cases, timeout=900)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["case"] for row in rows] == cases
    check(rows)
