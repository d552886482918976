"""The tools that keep chapters in step: a fix travels, a conflict is shown, runs are drawn."""

import json
import subprocess

import pytest

import plot
from conftest import ROOT, run_command

SCRIPT = '''"""A chapter.{parent}"""


def first():
    return 1


def second():
    return 2
'''


@pytest.fixture
def guide(tmp_path):
    """A repository of four chapters: 01, 02 and 03 in a line, and another that comes from 02."""
    for name, parent in [("01-a", ""), ("02-b", "01-a"), ("03-c", "02-b"), ("other", "02-b")]:
        (tmp_path / name).mkdir()
        text = SCRIPT.format(parent=f" Parent: {parent}." if parent else "")
        (tmp_path / name / "train_llm.py").write_text(text)
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm start"):
        subprocess.run(["git", "-C", tmp_path, *command.split()], check=True)
    return tmp_path


def change(guide, folder, old, new):
    path = guide / folder / "train_llm.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def carry(guide, chapter):
    return run_command(ROOT / "tools/maintain/carry.py", chapter, "--root", guide)


def test_a_fix_reaches_all_descendants(guide):
    change(guide, "01-a", "return 1", "return 10")
    change(guide, "03-c", "return 2", "return 30")  # what a descendant has of its own stays
    done = carry(guide, "01")
    assert done.returncode == 0, done.stderr
    for folder in ("02-b", "03-c", "other"):
        assert "return 10" in (guide / folder / "train_llm.py").read_text()
    assert "return 30" in (guide / "03-c" / "train_llm.py").read_text()
    assert done.stdout == "01 -> 02: merged\n02 -> 03: merged\n02 -> other: merged\n"


def test_a_conflict_is_shown_and_the_others_go_on(guide):
    change(guide, "01-a", "return 1", "return 10")
    change(guide, "03-c", "return 1", "return 11")
    done = carry(guide, "01")
    assert done.returncode == 1
    assert "return 11" in done.stdout and "return 10" in done.stdout and "<<<<<<<" in done.stdout
    assert "go on with make carry FROM=03" in done.stderr
    assert "return 10" in (guide / "other" / "train_llm.py").read_text()


def test_runs_are_drawn_and_compared(tmp_path):
    for name, shift in [("one", 0.0), ("two", 1e-6)]:
        (tmp_path / name).mkdir()
        rows = [{"step": step, "loss": 5 - step + shift} for step in range(3)]
        text = "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "lo'  # as a kill may
        (tmp_path / name / "metrics.jsonl").write_text(text)
    done = run_command(ROOT / "tools/plot.py", "one", "two", "-o", "runs.png", cwd=tmp_path)
    assert done.stdout == "drawn: runs.png; largest difference between losses: 1.0e-06\n"
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")


def test_the_last_row_of_a_step_counts(tmp_path):
    rows = [{"step": 1, "loss": 9.0}, {"step": 2, "loss": 8.0}, {"step": 1, "loss": 7.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plot.read_metrics(tmp_path) == [{"step": 1, "loss": 7.0}, {"step": 2, "loss": 8.0}]


def test_a_run_that_is_not_there_is_one_line(tmp_path):
    done = run_command(ROOT / "tools/plot.py", "nowhere", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "nowhere" in done.stderr
