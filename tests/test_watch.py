"""Test the table of watch.py, at several widths, and its exit status."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from watched import start_ticks

from cluster.cluster import wait_until
from conftest import ROOT, run_command
from fake_facts import rank_files

WATCH = ROOT / "diagnosing-errors/watch.py"


@pytest.fixture
def run(tmp_path):
    """Return a function that writes the files of four ranks that are training at this moment."""

    def write(**odd):
        (tmp_path / "ranks").mkdir()
        for rank in range(4):
            files = rank_files(rank, 4, since=1.0, pending=False, **(odd if rank == 2 else {}))
            beat, now = files["beat"], time.time()
            shift = now - beat["time"]
            beat |= {name: beat[name] + shift for name in ("time", "started", "since")}
            beat |= {"pid": os.getpid(), "host": os.uname().nodename, "step_seconds": 10.0}
            beat |= {"born": start_ticks()}
            (tmp_path / f"ranks/{rank:05}.json").write_text(json.dumps(beat))
            dump = files["dump"] | {"time": now}
            (tmp_path / f"ranks/{rank:05}.dump.json").write_text(json.dumps(dump))
        row = {"step": 10, "loss": 3.21, "tokens_per_second": 1234}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        return tmp_path

    return write


def watch(folder, *args, columns=100):
    """Run watch.py; return its exit status and its output."""
    env = os.environ | {"COLUMNS": str(columns), "TERM": "dumb"}
    done = run_command(WATCH, folder, *args, env=env)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 200])
def test_healthy_run_is_shown_in_full(run, columns):
    status, text = watch(run(), "--once", columns=columns)
    assert status == 0, text
    words = " ".join(text.split())  # a narrow terminal breaks lines
    assert "4 of 4 ranks" in words and "loss 3.21" in words and "healthy" in words
    assert all(len(line) <= columns for line in text.splitlines())
    assert sum("backward" in line for line in text.splitlines()) == 4


def test_rank_with_a_fault_is_shown_first(run):
    status, text = watch(run(beat={"open_files": 900}), "--once", "--most", "1")
    assert status == 1
    assert "too-many-open-files rank 2" in text.replace("\n", " ")
    assert "and 3 more ranks" in text and "whats_wrong.py" in text


def test_folder_without_a_run_is_an_error(tmp_path):
    assert watch(tmp_path, "--once")[0] == 3
    status, text = watch(tmp_path / "nowhere", "--once")
    assert status == 2 and "is no folder" in text


@pytest.mark.slow
def test_ctrl_c_ends_the_live_table(run):
    folder = run()
    command = [sys.executable, WATCH, folder]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, **pipes)
    wait_until((folder / "ranks/clock").exists, 60, "watch.py draws its second table")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0 and "healthy" in output and "Traceback" not in output
