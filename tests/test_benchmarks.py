"""Test that the benchmarks compare the same work, and that they notice a slower chapter."""

import json
import shutil
import sys
from pathlib import Path

import pytest

import contenders
import harness
import speed
from conftest import ROOT, run_command

pytestmark = pytest.mark.tool


def test_compared_names_are_contenders():
    assert {name for pair in speed.RATIOS for name in pair} <= speed.CONTENDERS.keys()
    scripts = {name for name, *_ in speed.CONTENDERS.values()}
    assert scripts <= {*contenders.LOOPS, "01", *speed.CHAPTERS}


def test_ratios_compare_the_same_round():
    rounds = [{"01": 10.0, "bare": 20.0}, {"01": 30.0, "bare": 30.0}, {"01": 9.0, "bare": 10.0}]
    found = speed.compare(rounds)
    assert found == {"01 / bare": {"median": 0.9, "goal": 0.97, "rounds": [0.5, 1.0, 0.9]}}


def test_failed_contender_leaves_all_rounds(capsys):
    def measure(name, number):
        if (name, number) == ("b", 2):
            raise harness.Failed("out of memory")
        return number

    *_, rounds = harness.take_turns("ab", 2, measure, str)
    assert rounds == [{"a": 1}, {"a": 2}]
    assert "out of memory\nso without b" in capsys.readouterr().out


def test_time_limit_kills_all_processes(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(
        "import pathlib, subprocess, sys, time\n"
        "child = [sys.executable, '-c', 'import time; time.sleep(99)']\n"
        "print(subprocess.Popen(child, start_new_session=True).pid, file=open(sys.argv[1], 'w'))\n"
        "time.sleep(99)\n"
    )
    with pytest.raises(harness.Failed, match="not done after 3 s"):
        harness.call([sys.executable, script, tmp_path / "pid"], limit=3)
    status = Path("/proc", (tmp_path / "pid").read_text().strip(), "status")
    assert not status.exists() or "zombie" in status.read_text(), "its child still runs"


def test_speed_counts_the_last_row_of_a_step_after_the_warm_up(monkeypatch, tmp_path):
    speeds = [(0, None), (10, None), (20, 3), (20, 7), (30, 9)]
    rows = [json.dumps({"step": step, "tokens_per_second": value}) for step, value in speeds]
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("\n".join(rows))
    (tmp_path / "run/timing.json").write_text("{}")
    monkeypatch.setattr(harness, "call", lambda *_, **__: None)
    assert speed.speed_of(speed.run(("01", 0, []), 30, tmp_path, "run")) == 8


@pytest.mark.slow
def test_chapter_that_waits_in_each_step_misses_its_goal(tmp_path):
    """The copy of chapter 01 waits in each step; its losses are those of the bare loop."""
    for folder in ("benchmarks", "01-single-gpu"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    script = tmp_path / "01-single-gpu/train_llm.py"
    source, line = script.read_text(), "    optimizer.step()\n"
    assert source.count(line) == 1, "the test no longer finds the place to wait"
    script.write_text(source.replace(line, f"{line}    time.sleep(2)\n"))
    options = ["--rounds", 1, "--steps", 20, "--output", tmp_path / "found.json"]
    command = ["benchmarks/speed.py", "--only", "bare", "01", *options]
    done = run_command(*command, cwd=tmp_path, timeout=600)
    assert done.returncode == 1 and "missed: 01 / bare" in done.stderr, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ratios"]["01 / bare"]["median"] < 0.85
    assert all(one["loss difference"] < 1e-6 for one in found["details"].values())
    assert found["details"]["01"]["save_checkpoint"] > 0
