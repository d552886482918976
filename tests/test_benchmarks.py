"""Test that the benchmarks compare runs of a round, and that they notice a slower chapter."""

import json
import shutil
import sys
from pathlib import Path
from statistics import median

import pytest

import harness
from conftest import ROOT, change_file, run_command

pytestmark = pytest.mark.tool


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
