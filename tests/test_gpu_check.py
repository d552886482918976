"""Test with tiny sizes, on a CPU, that the GPU checks report errors and end hanging runs."""

import json
import os
import subprocess
import sys

import pytest

import gpu_check
from conftest import ROOT, SCRIPTS, change_file, run_command, user_error

pytestmark = pytest.mark.tool

# This program checks the chapters in a folder of broken chapters, and lets the check `no-sync` run
# out of time.
BROKEN = """
import sys
from pathlib import Path
import gpu_check
scripts = Path(sys.argv.pop(1)).glob("*/train_llm.py")
gpu_check.SCRIPTS |= {script.parent.name[:2]: script for script in scripts}


def late(bench):
    bench.deadline = 0
    return gpu_check.no_sync(bench)


gpu_check.CHECKS["no-sync"] = late
gpu_check.main()
"""


def run_checks(command, output, *names):
    """Run checks on the CPU; return the exit status, the rows by name, and the output."""
    flags = ["--device", "cpu", "--output", output, "--only", *names]
    env = os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")}
    done = run_command(sys.executable, *command, *flags, timeout=600, env=env)
    assert output.exists(), done.stderr
    rows = {row["name"]: row for row in json.loads(output.read_text())["rows"]}
    return done.returncode, rows, done.stdout


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("", "finds no GPU; pass --device cpu to test only the checks' code"),
        ("--device cpu --only nothing", "--only nothing: not a check; choose from"),
    ],
)
def test_missing_gpu_or_check_fails_with_the_reason(monkeypatch, capsys, words, error):
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *words.split()])
    line = user_error(capsys, gpu_check.main).splitlines()[-1]
    assert line.startswith("gpu_check.py: error: ") and error in line


def test_checks_start_without_the_modules_of_the_tests():
    """Start a process without PYTHONPATH, so that it cannot import the modules of the tests."""
    env = os.environ | {"PYTHONPATH": ""}
    command = [sys.executable, ROOT / "benchmarks/gpu_check.py", "--only", "none"]
    done = subprocess.run(command, check=False, env=env, stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 2 and b" parity-09 " in done.stderr


@pytest.mark.slow
def test_checks_pass_without_a_gpu(tmp_path):
    names = ["parity-01", "family-gpt2", "no-sync", "speed-bare", "speed-01"]
    status, rows, output = run_checks(["benchmarks/gpu_check.py"], tmp_path / "rows.json", *names)
    assert status == 0, output
    assert [rows[name]["passed"] for name in names] == [True, True, None, True, True], output
    assert rows["parity-01"]["numbers"]["difference, ranks: 1"] == 0
    assert rows["no-sync"]["reason"] == "needs a GPU"
    assert rows["speed-01"]["numbers"]["to bare"] > 0
    assert "5 checks, 0 failed, 1 skipped" in output


@pytest.mark.slow
def test_broken_or_hanging_check_fails_with_its_reason(tmp_path):
    root, fault = tmp_path / "broken", "raise OSError(7)\n\n\ndef build_optimizer"
    for chapter, old, new in (
        ("01", "torch.manual_seed(args.seed)", "torch.seed()"),
        ("02", "def build_optimizer", fault),
    ):
        script = SCRIPTS[chapter]
        change_file(script, old, new, root / script.relative_to(ROOT))
    names = ["parity-01", "parity-02", "no-sync"]
    status, rows, output = run_checks(["-c", BROKEN, root], tmp_path / "rows.json", *names)
    assert status == 1
    assert [rows[name]["passed"] for name in names] == [False] * 3, output
    assert rows["parity-01"]["numbers"]["difference, ranks: 1"] > 1e-4
    assert "not within 0 and 0.0001" in rows["parity-01"]["reason"]
    assert "ended with status 1: " in rows["parity-02"]["reason"]
    assert "OSError: 7" in rows["parity-02"]["reason"]
    assert "was not done in time" in rows["no-sync"]["reason"]
    assert "3 checks, 3 failed, 0 skipped" in output
