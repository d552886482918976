"""Test how where.py divides the time of a step, in traces that the tests write and in real ones."""

import json

import pytest

from where import parts_of

pytestmark = pytest.mark.tool

TINY = "--model-name tiny --seq-length 64 --precision fp32".split()
DELAY = 0.2  # seconds in each step


# Events of a window of 20 seconds: kind, name, thread or stream, first and last second.
CPU_EVENTS = [
    ("user_annotation", "window", 1, 0, 20),
    ("user_annotation", "batch", 1, 1, 2),
    # This operator makes the batch.
    ("cpu_op", "aten::stack", 1, 1.5, 1.8),
    ("cpu_op", "aten::linear", 1, 2, 5),
    ("cpu_op", "aten::addmm", 1, 3, 4),
    # This operator runs in a different thread.
    ("cpu_op", "aten::ones", 2, 0, 20),
    ("user_annotation", "backward", 1, 5, 12),
    ("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 1, 5, 9),
    ("cpu_op", "aten::mm", 1, 5, 9),
    ("user_annotation", "gloo:all_reduce", 3, 7, 11),
    ("user_annotation", "gloo:all_gather", 3, 13, 14),
    ("user_annotation", "waiting", 1, 12.5, 14.5),
    # The end of the wait copies.
    ("cpu_op", "aten::copy_", 1, 14, 14.5),
    ("cpu_op", "_c10d_functional::wait_tensor", 1, 16, 17),
]
GPU_EVENTS = [
    ("user_annotation", "window", 1, 0, 20),
    ("gpu_user_annotation", "window", 7, 1, 19),
    ("user_annotation", "batch", 1, 0, 3),
    # The operator only launches a kernel.
    ("cpu_op", "aten::mm", 1, 3, 4),
    # A wait for NCCL does not delay the host.
    ("user_annotation", "waiting", 1, 4, 5),
    ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 7, 2, 4),
    ("kernel", "sm90_xmma_gemm_bf16", 7, 4, 10),
    ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 24, 8, 13),
    ("kernel", "fused_adamw", 7, 13, 15),
    ("user_annotation", "waiting", 1, 16, 17),
    ("user_annotation", "gloo:all_reduce", 3, 15, 17),
]
PARTS = ("compute", "exposed", "data", "host", "hidden", "step")


@pytest.mark.parametrize(
    ("events", "expected"),
    [(CPU_EVENTS, (7.5, 4.5, 1, 7, 2, 20)), (GPU_EVENTS, (10, 4, 2, 4, 2, 20))],
    ids=["cpu", "gpu"],
)
def test_trace_gives_the_seconds_of_its_parts(tmp_path, events, expected):
    written = [{"ph": "M", "name": "thread_name"}]
    for kind, name, thread, start, end in events:
        times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
        written.append({"ph": "X", "cat": kind, "name": name, "tid": thread} | times)
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": written}))
    found = parts_of(tmp_path / "trace.json")
    assert found == pytest.approx(dict(zip(PARTS, expected, strict=True)))
