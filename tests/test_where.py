"""Where the time of a step goes: its parts are told apart, in made-up traces and real ones."""

import json

import pytest

from where import COLORS, SCRIPTS, parts_of, run

TINY = "--model-name tiny --seq-length 64 --precision fp32".split()
DELAY = 0.2  # seconds in each step


def write_trace(path, *events):
    """Write a trace of events: kind, name, thread or stream, first and last second."""
    made = [
        {"cat": kind, "name": name, "tid": thread, "ts": start * 1e6, "dur": (end - start) * 1e6}
        for kind, name, thread, start, end in events
    ]
    complete = [event | {"ph": "X"} for event in made]
    path.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "thread_name"}, *complete]}))
    return path


def test_trace_of_a_cpu_rank(tmp_path):
    note = "user_annotation"
    trace = write_trace(
        tmp_path / "trace.json",
        (note, "window", 1, 0, 20),
        (note, "batch", 1, 1, 2),
        ("cpu_op", "aten::stack", 1, 1.5, 1.8),  # the batch's
        ("cpu_op", "aten::linear", 1, 2, 5),
        ("cpu_op", "aten::addmm", 1, 3, 4),  # inside of it
        ("cpu_op", "aten::ones", 2, 0, 20),  # in another thread
        (note, "backward", 1, 5, 12),
        ("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 1, 5, 9),
        ("cpu_op", "aten::mm", 1, 5, 9),
        (note, "gloo:all_reduce", 3, 7, 11),
        (note, "gloo:all_gather", 3, 13, 14),
        (note, "waiting", 1, 12.5, 14.5),
        ("cpu_op", "aten::copy_", 1, 14, 14.5),  # what the wait does in the end
        ("cpu_op", "_c10d_functional::wait_tensor", 1, 16, 17),
    )
    expected = {"compute": 7.5, "exposed": 4.5, "data": 1, "host": 7, "hidden": 2, "step": 20}
    assert parts_of(trace) == pytest.approx(expected)


def test_trace_of_a_gpu_rank(tmp_path):
    trace = write_trace(
        tmp_path / "trace.json",
        ("user_annotation", "window", 1, 0, 20),
        ("gpu_user_annotation", "window", 7, 1, 19),
        ("user_annotation", "batch", 1, 0, 3),
        ("cpu_op", "aten::mm", 1, 3, 4),  # launches, and computes nothing itself
        ("user_annotation", "waiting", 1, 4, 5),  # nccl's, which holds up no host
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 7, 2, 4),
        ("kernel", "sm90_xmma_gemm_bf16", 7, 4, 10),
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 24, 8, 13),
        ("kernel", "fused_adamw", 7, 13, 15),
        ("user_annotation", "waiting", 1, 16, 17),
        ("user_annotation", "gloo:all_reduce", 3, 15, 17),
    )
    expected = {"compute": 10, "exposed": 4, "data": 2, "host": 4, "hidden": 2, "step": 20}
    assert parts_of(trace) == pytest.approx(expected)


def add_up(rows):
    """Assert that the parts of traced windows are as long as a clock says the windows were."""
    traced = [row for row in rows if "step" in row]
    for row in traced:
        assert sum(row[name] for name in COLORS) == pytest.approx(row["wall"], rel=0.02)
    return traced[0]


@pytest.mark.slow
def test_one_rank_waits_for_no_other(tmp_path):
    [rows] = run(SCRIPTS["01"], 1, tmp_path, 1, *TINY)
    row = add_up(rows)
    assert row["exposed"] == row["hidden"] == 0
    assert row["compute"] > 0 and row["host"] > 0


@pytest.mark.slow
def test_a_late_batch_is_data_of_one_rank_and_a_wait_of_the_other(tmp_path):
    script = tmp_path / "02-late" / "train_llm.py"
    script.parent.mkdir()
    source = SCRIPTS["02"].read_text()
    line = "    batch = samples_at(args, samples, positions).long()\n"
    assert source.count(line) == 1
    late = f"    time.sleep({DELAY} * dist.get_rank())\n"
    script.write_text(source.replace(line, line + late))
    first, second = map(add_up, run(script, 2, tmp_path / "runs", 1, *TINY))
    assert second["data"] >= DELAY
    assert first["data"] < second["data"] - DELAY / 2
    assert second["exposed"] < first["exposed"] - DELAY / 2
