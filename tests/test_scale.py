"""The paper model of speed: bytes of the closed formulas, limits, and a published run."""

import json
import math

import pytest

import scale
from conftest import ROOT, user_error

pytestmark = pytest.mark.tool

WEIGHTS, LAYERS, ROOT_WEIGHTS = 8_030_261_248, 32, 2 * 128_256 * 4096 + 4096
LAYER = (WEIGHTS - ROOT_WEIGHTS) // LAYERS
SHARE = 0.4


def args_of(flags="", **changes):
    """Return the arguments of a command line, with changes that no flag could make."""
    args = scale.parse_args(flags.split())
    vars(args).update(changes)
    return args


def step_of(strategy, devices, flags=""):
    """Return a simulated step."""
    return scale.StepSeconds(scale.at_scale(args_of(flags), strategy, devices), SHARE).simulate()


def row_of(strategy, devices, flags="", **changes):
    """Return the row of a strategy."""
    setting = scale.at_scale(args_of(flags, **changes), strategy, devices)
    return scale.row_of(setting, strategy, SHARE)


def sent_in_copy(strategy, ranks, micro_steps):
    """Return the bytes that a rank sends among the ranks of a copy, by the READMEs' formulas."""
    if strategy == "DDP":
        return 2 * (ranks - 1) / ranks * 4 * WEIGHTS
    layer, root = LAYER, ROOT_WEIGHTS
    # Tensor-parallel ranks split all weights but those of the norms.
    if strategy == "tensor parallel":
        layer, root = (layer - 2 * 4096) // 8 + 2 * 4096, (root - 4096) // 8 + 4096
    weights = LAYERS * layer + root
    gathered = 2 * weights
    if strategy != "FSDP, layers kept":
        gathered = 2 * (2 * weights - root - layer)
    return micro_steps * (gathered + 4 * weights) * (ranks - 1) / ranks


@pytest.mark.parametrize("strategy", scale.STRATEGIES)
@pytest.mark.parametrize(("devices", "micro_steps"), [(8, 1), (64, 1), (64, 3)])
def test_sent_bytes_follow_the_closed_formulas(strategy, devices, micro_steps):
    step = step_of(strategy, devices, f"--micro-steps {micro_steps}")
    # The largest of eight stages has five layers, and sends once per step.
    if strategy == "pipeline" and devices > 8:
        assert step.sent["copy"] == pytest.approx(7 / 8 * 6 * 5 * LAYER, rel=1e-12)
        return
    ranks = {"hybrid": 8, "tensor parallel": devices // 8}.get(strategy, devices)
    assert step.sent["copy"] == pytest.approx(sent_in_copy(strategy, ranks, micro_steps), rel=1e-12)
    if devices == 8:
        assert step.sent["network"] == 0, "one node sends nothing to another"


@pytest.mark.parametrize("devices", [8, 64])
def test_group_sends_the_hidden_states_that_chapter_06_counts(devices):
    for flags, times in (("--recompute none", 8), ("", 8 + 3)):
        step = step_of("tensor parallel", devices, flags)
        # The hidden states of 8 × 2 samples of 8,192 tokens, and the head.
        hidden, head = 2 * 8 * 2 * 8192 * 4096, 2 * 128_256 * 4096
        formula = 7 / 8 * ((LAYERS * times + 2) * hidden + 2 * head)
        assert step.sent["group"] == pytest.approx(formula, rel=1e-12)
        assert step.busy["group"] > formula / 370e9


@pytest.mark.parametrize(
    ("schedule", "micro_steps", "idle"),
    [("1f1b", 1, 7 / 15), ("1f1b", 8, 7 / 71), ("interleaved-1f1b", 8, 7 / 135)],
)
def test_pipeline_is_idle_by_the_formula_and_sends_hidden_states(schedule, micro_steps, idle):
    flags = f"--micro-steps {micro_steps} --pipeline-schedule {schedule} --recompute none"
    step = step_of("pipeline", 64, flags)
    stages = [len(stage.layers) for stage in step.stages]
    assert sum(stages) == LAYERS and len(stages) == 8
    passes, count = 1 if schedule == "1f1b" else 2, 8 * micro_steps
    # The bytes of a micro-batch of 2 samples.
    hidden = 2 * 2 * 8192 * 4096
    assert step.sent["stages"] == 2 * passes * count * hidden
    row = row_of("pipeline", 64, flags)
    # Besides, the rank waits for the reduction at the end.
    assert idle < row["share"] < idle + 0.02
    most = max(stages) * 3 * step.layer * count
    assert most <= step.busy["compute"] < 1.05 * (most + 3 * step.head * count)


@pytest.mark.parametrize("micro_steps", [1, 8])
def test_hybrid_sends_only_shards_of_gradients_between_nodes(micro_steps):
    flags, nodes = f"--micro-steps {micro_steps}", 8
    hybrid = step_of("hybrid", 8 * nodes, flags)
    assert hybrid.sent["network"] == hybrid.sent["replicas"]
    formula = 2 * (nodes - 1) / nodes * 4 * WEIGHTS / 8
    assert hybrid.sent["network"] == pytest.approx(formula, rel=1e-12)
    # A ring of all ranks leaves each node once, through eight adapters.
    plain = step_of(scale.FITTED, 8 * nodes, flags)
    formula = sent_in_copy(scale.FITTED, 8 * nodes, micro_steps) / 8
    assert plain.sent["network"] == pytest.approx(formula, rel=1e-12)


@pytest.mark.parametrize("strategy", scale.STRATEGIES)
def test_waits_vanish_with_one_device_or_links_without_limits(strategy):
    alone, row = step_of(strategy, 1), row_of(strategy, 1)
    assert alone.sent["copy"] == alone.sent["replicas"] == alone.sent["network"] == 0
    # With offload, a single device still copies to the host.
    assert (row["exposed"] > 0) == (strategy == "FSDP, CPU offload")
    fast = dict.fromkeys(("nvlink_gbs", "network_gbs", "pcie_gbs"), math.inf)
    row = row_of(strategy, 512, "--latency 0", **fast)
    # Eight micro-batches in eight stages are idle, however fast the links are.
    idle = 7 / (8 + 7) if strategy == "pipeline" else 0
    assert row["share"] == pytest.approx(idle, abs=1e-3)
    slow = row_of(strategy, 512)
    assert slow["exposed"] > 0.001
    assert slow["compute"] + slow["host"] + slow["exposed"] == pytest.approx(slow["step"])


def test_collective_takes_the_time_computed_by_hand():
    # In a ring of 16 ranks on 2 nodes, one hop crosses. For 2**30 bytes at 370 GB/s, NCCL's
    # "Simple" is the fastest.
    expected = 15 / 16 * 2**30 / 370e9 + (8.4 + 14 * 3.4 + 14) * 1e-6
    seconds, sent = scale.collective(args_of(), "all-gather", 2**30, 16, 2, 370)
    assert (seconds, sent) == (pytest.approx(expected), 15 / 16 * 2**30)
    # A small collective is faster with LL128, and an all-reduce of 4,096 ranks with a tree.
    seconds, _ = scale.collective(args_of(), "all-gather", 1024, 16, 2, 370)
    assert seconds == pytest.approx((14 + 14 * 1.9 + 4) * 1e-6, rel=1e-3)
    gather, _ = scale.collective(args_of(), "all-gather", 2**20, 4096, 512, 370)
    reduce, _ = scale.collective(args_of(), "all-reduce", 2**20, 4096, 512, 370)
    assert gather > 4095 * 1.9e-6 > 10 * reduce


def test_published_run_on_128_gpus_is_predicted_within_4_percent():
    for row in scale.published_rows():
        assert abs(row["error"]) < (1e-6 if row["fitted"] else 0.04), row
    assert 0.3 < scale.fitted_share("eager") < scale.fitted_share("compiled") < 0.5


def test_node_that_is_not_full_fails(capsys):
    words = ["--gpus-per-node", "6", "--global-batch-size", "24"]
    error = user_error(capsys, scale.parse_args, words)
    assert "--gpus-per-node 6: nodes are not full; choose a power of 2" in error


@pytest.mark.exhaustive
def test_predictions_in_the_readmes_are_current():
    published = json.loads((ROOT / "benchmarks/results/scale.json").read_text())
    assert json.loads(json.dumps(scale.predictions())) == published, "run scale.py --output again"
