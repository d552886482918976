"""Test that the benchmarks compare runs of a round, and that they notice a slower chapter."""

import json
import shutil
import sys
from pathlib import Path
from statistics import median

import pytest

import frameworks
import harness
from conftest import ROOT, change_file, run_command

pytestmark = pytest.mark.tool


def test_ratios_compare_the_same_round():
    speeds = [(20.0, 10.0), (30.0, 30.0), (10.0, 9.0)]
    rounds = [{"03": {"speed": one}, "trainer": {"speed": other}} for one, other in speeds]
    found = frameworks.compare(rounds)
    assert found.keys() == {"trainer / 03, speed"}
    assert found["trainer / 03, speed"] == {"median": 0.9, "rounds": [0.5, 1.0, 0.9]}


def test_failed_contender_leaves_all_rounds(capsys):
    def measure(name, number):
        if (name, number) == ("b", 2):
            raise harness.Failed("out of memory")
        return number

    *_, rounds = harness.take_turns("ab", 2, measure)
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
    rows = [{"step": step, "tokens_per_second": speed} for step, speed in speeds]
    lines = [json.dumps(row | {"peak_memory_gib": 2.0}) for row in rows]
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(harness, "call", lambda *_, **__: None)
    found = frameworks.run("03", [], tmp_path, "run")
    assert found == {"speed": 8, "memory": 2.0}


@pytest.mark.slow
def test_chapter_that_waits_in_each_step_misses_its_goal(tmp_path):
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    script, line = "01-single-gpu/train_llm.py", "    optimizer.step()\n"
    change_file(ROOT / script, line, f"{line}    time.sleep(0.5)\n", tmp_path / script)
    options = ["--blocks", 6, "--output", tmp_path / "found.json"]
    command = ["benchmarks/overhead.py", "chapter", *options]
    done = run_command(*command, cwd=tmp_path, timeout=600)
    assert done.returncode == 1 and "missed: " in done.stderr, done.stdout + done.stderr
    assert median(json.loads((tmp_path / "found.json").read_text())["shares"]["chapter"]) > 1.05
