"""watch.py: what it shows of heartbeats, at several widths, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from watched import born

from cluster.cluster import wait_until
from conftest import ROOT, printed
from made_up import rank_files

WATCH = ROOT / "diagnosing-errors/watch.py"


@pytest.fixture
def run(tmp_path):
    """Write the files of four ranks that take steps, as if they did so now; return the folder."""

    def write(**odd):
        (tmp_path / "ranks").mkdir()
        for rank in range(4):
            files = rank_files(rank, 4, since=1.0, pending=False, **(odd if rank == 2 else {}))
            beat, now = files["beat"], time.time()
            shift = now - beat["time"]
            beat |= {name: beat[name] + shift for name in ("time", "started", "since")}
            beat |= {"pid": os.getpid(), "host": os.uname().nodename, "step_seconds": 10.0}
            beat |= {"born": born()}
            (tmp_path / f"ranks/{rank:05}.json").write_text(json.dumps(beat))
            dump = files["dump"] | {"time": now}
            (tmp_path / f"ranks/{rank:05}.dump.json").write_text(json.dumps(dump))
        row = {"step": 10, "loss": 3.21, "tokens_per_second": 1234}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        return tmp_path

    return write


def watch(folder, *args, columns=100):
    """Return the exit status and what was printed."""
    env = os.environ | {"COLUMNS": str(columns), "TERM": "dumb"}
    done = printed(WATCH, folder, *args, env=env)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 200])
def test_a_healthy_run(run, columns):
    status, text = watch(run(), "--once", columns=columns)
    assert status == 0, text
    assert "4 of 4 ranks" in text and "loss 3.21" in text and "healthy" in text
    assert all(len(line) <= columns for line in text.splitlines())
    assert sum("backward" in line for line in text.splitlines()) == 4


def test_a_fault_is_marked(run):
    status, text = watch(run(beat={"open_files": 900}), "--once", "--most", "1")
    assert status == 1
    assert "too-many-open-files rank 2" in text.replace("\n", " ")
    assert "and 3 more ranks" in text and "whats_wrong.py" in text


def test_no_run(tmp_path):
    assert watch(tmp_path, "--once")[0] == 3
    status, text = watch(tmp_path / "nowhere", "--once")
    assert status == 2 and "is no folder" in text


@pytest.mark.slow
def test_live_until_ctrl_c(run):
    folder = run()
    command = [sys.executable, WATCH, folder]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, **pipes)
    wait_until((folder / "ranks/clock").exists, 60, "it begins the second picture")
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 0 and "healthy" in said and "Traceback" not in said
