"""Test the table of watch.py, at several widths, its exit status, and Ctrl-C."""

import io
import json
import signal
import subprocess
import sys
import time

import pytest
import watch
from rich.console import Console

from cluster.cluster import wait_until
from conftest import ROOT, run_command
from fake_facts import facts_of, moving_ranks

TOOL = ROOT / "diagnosing-errors/watch.py"


def drawn(facts, columns=100):
    """Return the table for some facts as text."""
    console = Console(file=io.StringIO(), width=columns)
    console.print(watch.draw(facts)[0])
    return console.file.getvalue()


@pytest.mark.parametrize("columns", [80, 200])
def test_table_shows_each_rank_and_the_latest_metrics(tmp_path, columns):
    row = {"step": 10, "loss": 3.21, "tokens_per_second": 1234, "val_loss": None}
    (tmp_path / "metrics.jsonl").write_text('"cut": 1}\n' + json.dumps(row) + "\n")
    text = drawn(facts_of(moving_ranks(), run=str(tmp_path)), columns)
    # A narrow terminal breaks lines.
    words = " ".join(text.split())
    assert "4 of 4 ranks" in words and "loss 3.21" in words and "healthy" in words
    assert all(len(line) <= columns for line in text.splitlines())
    assert sum("backward" in line for line in text.splitlines()) == 4


def test_rank_with_a_fault_comes_first():
    files = moving_ranks(40)
    files[39]["beat"]["open_files"] = 900
    text = drawn(facts_of(files))
    assert text.splitlines()[2].split()[0] == "39"
    assert "and 8 more ranks" in text and "too-many-open-files rank 39" in text


def test_folder_without_a_run_is_an_error(tmp_path):
    done = run_command(TOOL, tmp_path, "--once")
    assert done.returncode == 3 and "no rank has written" in done.stdout
    done = run_command(TOOL, tmp_path / "nowhere", "--once")
    assert done.returncode == 2 and "nowhere: not a folder;" in done.stderr


def test_ctrl_c_ends_the_live_table(tmp_path):
    (tmp_path / "ranks").mkdir()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([sys.executable, TOOL, tmp_path], **pipes)
    # watch.py creates this file shortly before it draws its first table.
    wait_until((tmp_path / "ranks/clock").exists, 60, "watch.py draws a table")
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0, output
    assert "no rank has written" in output and "Traceback" not in output
