"""Run prepare.py in the process of a test."""

import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

import recorded
from conftest import ROOT
from in_process import Captured

TOOL = ROOT / "preparing-data/prepare.py"
MODULE = recorded.load(TOOL)


def prepare(output, *words, status=0):
    """Run prepare.py with one worker; check that it exits with `status`, and return its output."""
    command = ["prepare.py", "-o", output, "--workers", 1, *words]
    out, found = Captured(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(out):
        patch.setattr(sys, "argv", list(map(str, command)))
        # Let monkeypatch restore this variable, which prepare.py sets.
        patch.setenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        try:
            MODULE.main()
        except SystemExit as stop:
            found = stop.code
    assert found == status, out.getvalue()
    return out.getvalue()
