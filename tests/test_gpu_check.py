"""Test with tiny sizes, on a CPU, that the GPU checks report errors and end hanging runs."""

import json
import os
import re
import sys

import pytest

import gpu_check
from conftest import ROOT, SCRIPTS, change_file, run_command, user_error

pytestmark = pytest.mark.tool


@pytest.fixture
def run_checks(monkeypatch, capsys, tmp_path):
    """Return a function that runs checks on the CPU.

    The function returns the exit status, the rows of the report by name, and the output.
    """
    output = tmp_path / "rows.json"

    def run_checks(*names):
        words = ["gpu_check.py", "--device", "cpu", "--output", str(output), "--only", *names]
        monkeypatch.setattr(sys, "argv", words)
        monkeypatch.setattr(gpu_check.signal, "signal", lambda *_: None)
        with pytest.raises(SystemExit) as stop:
            gpu_check.main()
        rows = {row["name"]: row for row in json.loads(output.read_text())["rows"]}
        return stop.value.code, rows, capsys.readouterr().out

    return run_checks


def test_missing_gpu_fails_with_the_reason(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    error = user_error(capsys, gpu_check.main)
    assert "finds no GPU; pass --device cpu to test only the checks' code" in error


def test_unknown_check_is_reported_without_the_modules_of_the_tests():
    command = [ROOT / "benchmarks/gpu_check.py", "--only", "nothing"]
    done = run_command(*command, env=os.environ | {"PYTHONPATH": ""})
    assert done.returncode == 2
    assert "gpu_check.py: error: --only nothing: not a check; choose from" in done.stderr


@pytest.mark.slow
def test_checks_pass_without_a_gpu(run_checks):
    names = ["parity-01", "family-gpt2", "no-sync", "speed-bare", "speed-01"]
    status, rows, output = run_checks(*names)
    assert status == 0, output
    assert [rows[name]["passed"] for name in names] == [True, True, None, True, True], output
    assert rows["parity-01"]["numbers"]["difference, ranks: 1"] == 0
    assert rows["no-sync"]["reason"] == "needs a GPU"
    assert rows["speed-01"]["numbers"]["to bare"] > 0
    assert "5 checks, 0 failed, 1 skipped" in output


@pytest.mark.slow
def test_broken_or_hanging_check_fails_with_its_reason(run_checks, monkeypatch, tmp_path):
    def late(bench):
        bench.deadline = 0
        return gpu_check.no_sync(bench)

    monkeypatch.setitem(gpu_check.CHECKS, "no-sync", late)
    for chapter, old, new in (
        ("01", "torch.manual_seed(args.seed)", "torch.seed()"),
        ("02", "def build_optimizer", "raise OSError(7)\n\n\ndef build_optimizer"),
    ):
        script = change_file(SCRIPTS[chapter], old, new, tmp_path / chapter / "train_llm.py")
        monkeypatch.setitem(gpu_check.SCRIPTS, chapter, script)
    names = ["parity-01", "parity-02", "no-sync"]
    status, rows, output = run_checks(*names)
    assert status == 1
    assert [rows[name]["passed"] for name in names] == [False] * 3, output
    assert rows["parity-01"]["numbers"]["difference, ranks: 1"] > 1e-4
    assert "not within 0 and 0.0001" in rows["parity-01"]["reason"]
    assert re.search("ended with status 1: .*OSError: 7", rows["parity-02"]["reason"])
    assert "was not done in time" in rows["no-sync"]["reason"]
    assert "3 checks, 3 failed, 0 skipped" in output
