"""The benchmarks compare the same work, and a chapter that got slower is seen."""

import json
import shutil
import sys

import pytest

import contenders
import speed
from conftest import ROOT, run_command, user_error


def test_all_that_is_compared_takes_part():
    known = {*speed.contenders([1, 2]), "matmul"}
    assert {name for pair in speed.RATIOS for name in pair} <= known
    found = {name for name, _, _ in speed.contenders([2]).values()}
    assert found == {*contenders.PEERS, *speed.CHAPTERS}


def test_ratios_are_of_the_same_round():
    rounds = [{"01": 10.0, "bare": 20.0}, {"01": 30.0, "bare": 30.0}, {"01": 9.0, "bare": 10.0}]
    found = speed.compare(rounds)
    assert found["01 / bare"] == {"median": 0.9, "goal": 0.97, "rounds": [0.5, 1.0, 0.9]}
    assert list(found) == ["01 / bare"]


def test_the_warm_up_does_not_count_and_the_last_row_of_a_step_does(monkeypatch, tmp_path):
    speeds = [(0, None), (10, None), (20, 3), (20, 7), (30, 9)]
    rows = [json.dumps({"step": step, "tokens_per_second": each}) for step, each in speeds]
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("\n".join(rows))
    (tmp_path / "run/timing.json").write_text("{}")
    monkeypatch.setattr(speed, "call", lambda *_: None)
    assert speed.speed_of(speed.run(("01", 0, []), 30, tmp_path, "run")) == 8


@pytest.mark.parametrize(
    "args, part",
    [
        (["--only", "nobody"], "--only nobody: there is bare, 01, trainer"),
        (["--steps", "15"], "2, 3, 4 ... times 10 steps"),
        (["--ranks", "3"], "--ranks 3 does not divide the 8 samples of a step"),
    ],
)
def test_bad_arguments_are_told_in_one_line(monkeypatch, capsys, args, part):
    monkeypatch.setattr(sys, "argv", ["speed.py", *args])
    assert part in user_error(capsys, speed.parse_args)


@pytest.mark.slow
def test_the_same_work_and_a_chapter_that_waits_in_each_step(tmp_path):
    """In a copy, chapter 01 waits in each step as long as a device to host copy might take."""
    for folder in ("benchmarks", "01-single-gpu"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    script = tmp_path / "01-single-gpu/train_llm.py"
    source, line = script.read_text(), "    optimizer.step()\n"
    assert source.count(line) == 1
    script.write_text(source.replace(line, f"{line}    time.sleep(2)\n"))
    options = ["--rounds", 1, "--steps", 20, "--output", tmp_path / "found.json"]
    command = ["benchmarks/speed.py", "--only", "bare", "01", *options]
    done = run_command(*command, cwd=tmp_path, timeout=600)
    assert done.returncode == 1 and "missed: 01 / bare" in done.stderr, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ratios"]["01 / bare"]["median"] < 0.85
    assert all(one["loss difference"] < 1e-6 for one in found["details"].values())
    assert found["details"]["01"]["evaluate"] > 0
