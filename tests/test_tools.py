"""Tests of the tools: a fix reaches all descendants, conflicts are shown, runs are compared."""

import json
import subprocess

import pytest

import plot
from carry import carry
from conftest import ROOT, change_file, run_command

SCRIPT = '''"""A chapter.{parent}"""


def first():
    return 1


def second():
    return 2
'''


@pytest.fixture
def guide(tmp_path):
    """Create a repository: 02 is the child of 01, and 03 and `other` are children of 02."""
    for name, parent in [("01-a", ""), ("02-b", "01-a"), ("03-c", "02-b"), ("other", "02-b")]:
        (tmp_path / name).mkdir()
        text = SCRIPT.format(parent=f" Parent: {parent}." if parent else "")
        (tmp_path / name / "train_llm.py").write_text(text)
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm start"):
        subprocess.run(["git", "-C", tmp_path, *command.split()], check=True)
    return tmp_path


def test_fix_reaches_all_descendants(guide, capsys):
    change_file(guide / "01-a/train_llm.py", "return 1", "return 10")
    # This is a change of 03's own, and stays.
    change_file(guide / "03-c/train_llm.py", "return 2", "return 30")
    assert carry("01", guide) == []
    printed = capsys.readouterr().out
    assert printed == "01 -> 02: merged\n02 -> 03: merged\n02 -> other: merged\n"
    for folder in ("02-b", "03-c", "other"):
        assert "return 10" in (guide / folder / "train_llm.py").read_text()
    assert "return 30" in (guide / "03-c" / "train_llm.py").read_text()


def test_conflict_is_marked_and_stops_no_other_chapter(guide):
    change_file(guide / "01-a/train_llm.py", "return 1", "return 10")
    change_file(guide / "03-c/train_llm.py", "return 1", "return 11")
    assert carry("01", guide) == ["03"]
    assert "<<<<<<<" in (guide / "03-c" / "train_llm.py").read_text()
    assert "return 10" in (guide / "other" / "train_llm.py").read_text()


def write_run(folder, rows):
    """Write the metrics of a run, and half of a row, as a kill may."""
    folder.mkdir()
    lines = [json.dumps({"tokens_per_second": 9.0, "val_loss": 2.5} | row) for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 3, "lo']))


def test_runs_are_drawn_and_compared(tmp_path):
    for name, shift in [("one", 0.0), ("two", 1e-6)]:
        write_run(tmp_path / name, [{"step": step, "loss": 5 - step + shift} for step in range(3)])
    done = run_command(ROOT / "tools/plot.py", "one", "two", "-o", "runs.png", cwd=tmp_path)
    assert done.stdout == "drawn: runs.png; largest difference between losses: 1.0e-06\n"
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")


def test_last_row_of_a_step_counts(tmp_path):
    rows = [{"step": step, "loss": loss} for step, loss in [(1, 9.0), (2, 8.0), (1, 7.0)]]
    write_run(tmp_path / "run", rows)
    assert plot.series(plot.read_metrics(tmp_path / "run"), "loss") == ([1, 2], [7.0, 8.0])


def test_missing_run_is_reported_in_one_line(tmp_path):
    done = run_command(ROOT / "tools/plot.py", "nowhere", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "nowhere" in done.stderr
