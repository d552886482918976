"""The checks of a GPU run without one, tiny; what is broken is told, and what hangs is ended."""

import json
import os
import sys

import pytest

import gpu_check
from conftest import ROOT, SCRIPTS, run_command, user_error

# As a script of its own: the chapters of another folder are checked, and one check gets no time.
BROKEN = """
import sys
from pathlib import Path
import gpu_check
gpu_check.ROOT = Path(sys.argv.pop(1))
gpu_check.CHECKS["no-sync"] = (gpu_check.no_sync, 0, 1)
gpu_check.main()
"""


def run(command, output, *names):
    """Run checks on the CPU; return the exit status, rows by name, and what was printed."""
    flags = ["--device", "cpu", "--output", output, "--only", *names]
    env = os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")}
    done = run_command(sys.executable, *command, *flags, timeout=600, env=env)
    assert output.exists(), done.stderr
    rows = {row["name"]: row for row in json.loads(output.read_text())["rows"]}
    return done.returncode, rows, done.stdout


@pytest.mark.parametrize(
    "args, part",
    [
        ([], "sees no GPU here; --device cpu tries the code of the checks"),
        (["--device", "cpu", "--only", "nothing"], "--only nothing: no check begins so"),
    ],
)
def test_one_line_says_why_nothing_is_checked(monkeypatch, capsys, args, part):
    monkeypatch.setattr(gpu_check.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *args])
    [line] = user_error(capsys, gpu_check.main).splitlines()
    assert line.startswith("gpu_check.py: error: ") and part in line


@pytest.mark.slow
def test_checks_run_without_a_gpu(tmp_path):
    names = ["parity-01", "no-sync", "speed-01"]
    status, rows, said = run(["benchmarks/gpu_check.py"], tmp_path / "result.json", *names)
    assert status == 0, said
    assert [rows[name]["passed"] for name in names] == [True, None, True], said
    assert rows["parity-01"]["numbers"]["difference, ranks: 1"] == 0
    assert rows["no-sync"]["reason"] == "a CPU is not waited for"
    assert rows["speed-01"]["numbers"]["tokens/s"] > 0
    assert "3 checks, 0 failed, 1 skipped" in said


@pytest.mark.slow
def test_what_is_broken_or_hangs_is_a_failed_row(tmp_path):
    source, root = SCRIPTS["01"].read_text(), tmp_path / "broken"
    unseeded = source.replace("torch.manual_seed(args.seed)", "torch.seed()")
    broken = SCRIPTS["02"].read_text().replace("def build_optimizer", "raise OSError(7)\n\n\ndef x")
    assert unseeded != source
    for chapter, text in (("01-single-gpu", unseeded), ("02-ddp", broken)):
        (root / chapter).mkdir(parents=True)
        (root / chapter / "train_llm.py").write_text(text)
    names = ["parity-01", "parity-02", "no-sync"]
    status, rows, said = run(["-c", BROKEN, root], tmp_path / "result.json", *names)
    assert status == 1
    assert [rows[name]["passed"] for name in names] == [False] * 3, said
    assert rows["parity-01"]["numbers"]["difference, ranks: 1"] > 1e-4
    assert "not within 0 and 0.0001" in rows["parity-01"]["reason"]
    assert "ended with status 1: " in rows["parity-02"]["reason"]
    assert "OSError: 7" in rows["parity-02"]["reason"]
    assert "was not done in time" in rows["no-sync"]["reason"]
    assert "3 checks, 3 failed, 0 skipped" in said
