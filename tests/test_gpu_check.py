"""Run the GPU checks on a CPU, with tiny sizes."""

import json
import os
import subprocess
import sys

import pytest

import gpu_check
from conftest import ROOT, run_command, user_error

pytestmark = pytest.mark.tool


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("", "finds no GPU; --device cpu tests the checks' code"),
        ("--device cpu --only nothing", "--only nothing: no check begins so"),
    ],
)
def test_missing_gpu_or_check_fails_with_the_reason(monkeypatch, capsys, words, error):
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *words.split()])
    line = user_error(capsys, gpu_check.main).splitlines()[-1]
    assert line.startswith("gpu_check.py: error: ") and error in line


def test_checks_start_without_the_modules_of_the_tests():
    """Start them without the folders that pytest adds to the path."""
    env = os.environ | {"PYTHONPATH": ""}
    command = [sys.executable, ROOT / "benchmarks/gpu_check.py", "--only", "none"]
    done = subprocess.run(command, check=False, env=env, stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 2 and b" parity-09 " in done.stderr


@pytest.mark.slow
def test_checks_pass_without_a_gpu(tmp_path):
    names = ["parity-01", "family-gpt2", "no-sync", "speed-bare", "speed-01"]
    flags = ["--device", "cpu", "--output", tmp_path / "rows.json", "--only", *names]
    done = run_command(ROOT / "benchmarks/gpu_check.py", *flags, timeout=600)
    output = done.stdout
    assert done.returncode == 0, output + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    rows = {row["name"]: row for row in rows}
    assert [rows[name]["passed"] for name in names] == [True, True, None, True, True], output
    assert rows["parity-01"]["numbers"]["difference, ranks: 1"] == 0
    assert rows["no-sync"]["reason"] == "needs a GPU"
    assert rows["speed-01"]["numbers"]["to bare"] > 0
    assert "5 checks, 0 failed, 1 skipped" in output
