"""Layouts of chapters 04 to 08 continue one another's run, and stay on the curve of chapter 01."""

import random

import pytest

from conftest import METRICS, difference, metrics, run_or_fail
from on_ranks import make_model_folder

TP = ["--tensor-parallel-size", 2]
PP = ["--pipeline-parallel-size", 2]
CP = ["--context-parallel-size", 2]
ULYSSES = [*CP, "--context-parallel-style", "ulysses"]
# Each layout has a chapter, a number of ranks, and flags. Ranks that no flag uses are
# data-parallel.
LAYOUTS = {
    "04": ("04", 2, []),
    "05": ("05", 2, ["--cpu-offload", "--recompute", "full"]),
    "dp2": ("08", 2, []),
    "tp2": ("08", 2, TP),
    "pp2": ("08", 2, PP),
    "cp2": ("08", 2, CP),
    "dp2 × tp2": ("08", 4, TP),
    "dp2 × pp2": ("08", 4, PP),
    "dp2 × cp2": ("08", 4, ULYSSES),
    "tp2 × pp2": ("08", 4, [*TP, *PP]),
    "tp2 × cp2": ("08", 4, [*TP, *CP]),
    "pp2 × cp2": ("08", 4, [*PP, *ULYSSES]),
    "dp2 × tp2 × pp2": ("08", 8, [*TP, *PP]),
    "tp2 × pp2 × cp2": ("08", 8, [*TP, *PP, *CP]),
}
STEPS_PER_LAYOUT = 2
# The long warmup makes the learning rate rise in every step.
COMMON = """--device cpu --precision fp32 --seq-length 64 --global-batch-size 8 --batch-size 2
    --log-every 1 --eval-samples 8 --lr 0.03 --warmup-steps 1000
    --checkpoint-every 2 --eval-every 2""".split()


@pytest.mark.exhaustive
def test_run_that_changes_its_layout_stays_on_the_curve(tmp_path):
    """The order is random; it begins and ends with the same layout."""
    order = list(LAYOUTS)
    random.Random(0).shuffle(order)
    order.append(order[0])
    model = make_model_folder(tmp_path / "model", 4, 64, heads=8, kv=4)
    common = ["-m", model, *COMMON, "--save-dir", tmp_path]
    num_steps = STEPS_PER_LAYOUT * len(order)
    run_or_fail(1, [("01", [*common, "-e", "alone", "--num-steps", num_steps])], tmp_path / "jobs")
    expected = metrics(tmp_path / "alone")
    for number, name in enumerate(order):
        chapter, ranks, flags = LAYOUTS[name]
        first, last = STEPS_PER_LAYOUT * number, STEPS_PER_LAYOUT * (number + 1)
        args = [*common, "-e", "run", "--num-steps", last, *flags]
        [results] = run_or_fail(ranks, [(chapter, args)], tmp_path / f"jobs{number}")
        continues = f"step-{first:08}\n" in results[0]["stdout"].partition("continuing from")[2]
        assert continues or number == 0, f"{name} did not continue from step {first}"
        rows = {step: row for step, row in metrics(tmp_path / "run").items() if step > first}
        expected_rows = {step: expected[step] for step in range(first + 1, last + 1)}
        distance = difference(expected_rows, rows, after=first, names=METRICS)
        print(f"{name} on {ranks} ranks, steps {first + 1} to {last}: {distance:.1e}")
        assert distance < 1e-5, name
