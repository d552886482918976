"""The paper model of scaling: bytes of the closed formulas, limits, and a published run."""

import math

import pytest

import scale
from conftest import user_error

WEIGHTS, LAYERS, ROOT_WEIGHTS = 8_030_261_248, 32, 2 * 128_256 * 4096 + 4096
LAYER = (WEIGHTS - ROOT_WEIGHTS) // LAYERS
SHARE = 0.4


def args_of(flags="", **changes):
    """Return the arguments of a command line, with changes that no flag could make."""
    args = scale.parse_args(flags.split())
    vars(args).update(changes)
    return args


def step_of(strategy, devices, flags="", share=SHARE, **changes):
    """Return a step that was played."""
    return scale.Step(*scale.at_scale(args_of(flags, **changes), strategy, devices), share).play()


def closed(strategy, ranks, micro_steps):
    """Return the bytes that a rank sends among those with the same copy, as the READMEs have it."""
    if strategy == "DDP":  # chapter 02
        return 2 * (ranks - 1) / ranks * 4 * WEIGHTS
    layer, root = LAYER, ROOT_WEIGHTS
    if strategy == "tensor parallel":  # all but norms' weights is split
        layer, root = (layer - 2 * 4096) // 8 + 2 * 4096, (root - 4096) // 8 + 4096
    weights = LAYERS * layer + root
    kept = strategy == "FSDP, layers kept"  # chapter 04, with B = 2 W
    gathered = 2 * weights if kept else 2 * (2 * weights - root - layer)
    return micro_steps * (gathered + 4 * weights) * (ranks - 1) / ranks


@pytest.mark.parametrize("strategy", scale.STRATEGIES)
@pytest.mark.parametrize(("devices", "micro_steps"), [(8, 1), (64, 1), (64, 3)])
def test_bytes_are_those_of_the_closed_formulas(strategy, devices, micro_steps):
    step = step_of(strategy, devices, f"--micro-steps {micro_steps}")
    if strategy == "pipeline" and devices > 8:  # of eight stages, the largest has five layers
        assert step.sent["copy"] == pytest.approx(7 / 8 * 6 * 5 * LAYER, rel=1e-12)  # once a step
        return
    ranks = 8 if strategy == "hybrid" else devices
    ranks = devices // 8 if strategy == "tensor parallel" else ranks
    assert step.sent["copy"] == pytest.approx(closed(strategy, ranks, micro_steps), rel=1e-12)


@pytest.mark.parametrize("devices", [8, 64])
def test_a_group_sends_hidden_states_as_chapter_06_counts_them(devices):
    for flags, times in (("--recompute none", 8), ("", 8 + 3)):
        step = step_of("tensor parallel", devices, flags)
        hidden, head = 2 * 8 * 2 * 8192 * 4096, 2 * 128_256 * 4096  # bytes: 8 × 2 samples of 8,192
        formula = 7 / 8 * ((LAYERS * times + 2) * hidden + 2 * head)
        assert step.sent["group"] == pytest.approx(formula, rel=1e-12)
        assert step.busy["group"] > formula / 370e9


@pytest.mark.parametrize(
    ("schedule", "micro_steps", "idle"),
    [("1f1b", 1, 7 / 15), ("1f1b", 8, 7 / 71), ("interleaved-1f1b", 8, 7 / 135)],
)
def test_a_pipeline_waits_as_the_formula_says_and_sends_hidden_states(schedule, micro_steps, idle):
    flags = f"--micro-steps {micro_steps} --pipeline-schedule {schedule} --recompute none"
    step = step_of("pipeline", 64, flags)
    stages = [len(part.layers) for part in step.stages]
    assert sum(stages) == LAYERS and len(stages) == 8
    passes, count = 1 if schedule == "1f1b" else 2, 8 * micro_steps
    hidden = 2 * 2 * 8192 * 4096  # bytes of a micro-batch of 2 samples
    assert step.sent["stages"] == 2 * passes * count * hidden
    row = scale.row_of(args_of(flags), "pipeline", 64, SHARE)
    assert idle < row["share"] < idle + 0.02  # besides, what is reduced at the end
    most = max(stages) * 3 * step.layer * count
    assert most <= step.busy["compute"] < 1.05 * (most + 3 * step.head * count)


@pytest.mark.slow
def test_what_is_fastest():
    """Splitting is for more devices than samples; and nothing is said of what does not fit."""
    rows = {(row["model"][-4:], row["devices"]): row for row in scale.first_rows(SHARE)}
    fastest = {}
    for key, row in rows.items():
        speeds = {way: row[way]["tokens_per_second"] for way in scale.WAYS if way in row}
        fastest[key] = max(speeds, key=speeds.get, default=None)
    assert fastest["405B", 8] is fastest["405B", 64] is None  # 6 TB of state
    assert fastest["1-8B", 8] == fastest["1-8B", 512] == fastest["-70B", 512] == "FSDP"
    assert "FSDP" not in rows["1-8B", 4096]  # of 1,024 samples
    assert fastest["-70B", 4096] == fastest["405B", 4096] == "TP and PP"


def test_a_layer_by_hand():
    rows = {(row["model"][-3:], row["devices"]): row for row in scale.layer_rows(SHARE)}
    one, many = rows["-8B", 8], rows["-8B", 512]
    assert one["FSDP_gb"] == pytest.approx(7 / 8 * 8 * LAYER / 1e9)
    assert one["group_gb"] == many["group_gb"] == pytest.approx(7 / 8 * 16 * 8 * 1024 * 4096 / 1e9)
    assert one["across"] == one["across_gb"] == 0
    # of a node's links each of its devices has one eighth, and for it an eighth of the layer
    assert many["across_gb"] == pytest.approx(63 / 64 * LAYER / 1e9, rel=1e-3)
    assert many["across"] == pytest.approx(many["across_gb"] / 47, rel=0.5)
    for row in rows.values():
        ends = row["compute"] + row["group"], row["FSDP"]
        assert (row["pays below"] > 1024) == (ends[0] < ends[1])


@pytest.mark.parametrize("micro_steps", [1, 8])
def test_between_nodes_hybrid_sends_shards_of_gradients_once_a_step(micro_steps):
    flags, nodes = f"--micro-steps {micro_steps}", 8
    hybrid = step_of("hybrid", 8 * nodes, flags)
    assert hybrid.sent["network"] == hybrid.sent["replicas"]
    formula = 2 * (nodes - 1) / nodes * 4 * WEIGHTS / 8
    assert hybrid.sent["network"] == pytest.approx(formula, rel=1e-12)
    # a ring of all ranks leaves each node once, through eight adapters
    whole = step_of("FSDP, gathered twice", 8 * nodes, flags)
    formula = closed("FSDP, gathered twice", 8 * nodes, micro_steps) / 8
    assert whole.sent["network"] == pytest.approx(formula, rel=1e-12)


@pytest.mark.parametrize("strategy", scale.STRATEGIES)
def test_one_node_sends_nothing_to_another_and_one_device_nothing_at_all(strategy):
    assert step_of(strategy, 8).sent["network"] == 0
    alone, row = step_of(strategy, 1), scale.row_of(args_of(), strategy, 1, SHARE)
    assert alone.sent["copy"] == alone.sent["replicas"] == alone.sent["network"] == 0
    assert (row["exposed"] > 0) == (strategy == "FSDP, CPU offload")  # what it copies to the host


@pytest.mark.parametrize("strategy", scale.STRATEGIES)
def test_links_without_limits_leave_nothing_exposed(strategy):
    fast = dict.fromkeys(("nvlink_gbs", "network_gbs", "pcie_gbs"), math.inf)
    row = scale.row_of(args_of("--latency 0", **fast), strategy, 512, SHARE)
    idle = 7 / (8 + 7) if strategy == "pipeline" else 0  # eight micro-batches in as many stages
    assert row["share"] == pytest.approx(idle, abs=1e-3)
    assert (row["exposed"] < 1e-9) == (idle == 0)
    slow = scale.row_of(args_of(), strategy, 512, SHARE)
    assert slow["exposed"] > 0.001
    assert slow["compute"] + slow["host"] + slow["exposed"] == pytest.approx(slow["step"])


def test_collectives_by_hand():
    # of 16 ranks on 2 nodes 1 hop crosses; 2**30 bytes at 370 GB/s: nccl's Simple is the fastest
    expected = 15 / 16 * 2**30 / 370e9 + (8.4 + 14 * 3.4 + 14) * 1e-6
    seconds, sent = scale.collective(args_of(), "all-gather", 2**30, 16, 2, 370)
    assert (seconds, sent) == (pytest.approx(expected), 15 / 16 * 2**30)
    # a small one is faster with LL128, and of 4096 ranks an all-reduce goes by a tree
    seconds, _ = scale.collective(args_of(), "all-gather", 1024, 16, 2, 370)
    assert seconds == pytest.approx((14 + 14 * 1.9 + 4) * 1e-6, rel=1e-3)
    gather = scale.collective(args_of(), "all-gather", 2**20, 4096, 512, 370)[0]
    reduce = scale.collective(args_of(), "all-reduce", 2**20, 4096, 512, 370)[0]
    assert gather > 4095 * 1.9e-6 > 10 * reduce


def test_published_on_128_gpus_is_predicted_within_4_percent():
    shares = {run: scale.fit(run) for run in ("eager", "compiled")}
    for row in scale.compare(shares):
        assert abs(row["error"]) < (1e-6 if row["fitted"] else 0.04), row
    assert 0.3 < shares["eager"] < shares["compiled"] < 0.5


def test_devices_that_fill_no_nodes_are_named(capsys):
    said = user_error(capsys, scale.parse_args, ["--devices", "8", "12"])
    assert "--devices 12: no multiple of --gpus-per-node 8" in said
