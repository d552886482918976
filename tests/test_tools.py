"""Test that tools carry a fix to all descendants, mark conflicts, and compare and evaluate runs."""

import argparse
import json
import math
import re
import subprocess

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import evaluate
from carry import carry
from conftest import ROOT, change_file, curves_of, run_command, user_error
from marks import exhaustive

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
    # Change a line only in 03, because carry() must keep this change when it carries a fix of 01.
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


def test_runs_are_drawn_and_compared(tmp_path):
    """Plot two runs whose metrics have rows that a kill has cut."""
    for name, shift in [("one", 0.0), ("two", 1e-6)]:
        rows = [{"step": step, "loss": 5 - step + shift, "val_loss": 2.5} for step in range(3)]
        (tmp_path / name).mkdir()
        lines = [json.dumps(row | {"tokens_per_second": 9.0}) for row in rows]
        cut = '{"step": 3, "lo'
        (tmp_path / name / "metrics.jsonl").write_text("\n".join([cut + lines[0], *lines, cut]))
    done = run_command(ROOT / "tools/plot.py", "one", "two", "-o", "runs.png", cwd=tmp_path)
    assert done.stdout == "drawn: runs.png; largest difference between losses: 1.0e-06\n"
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")


def test_missing_run_is_reported_in_one_line(tmp_path):
    done = run_command(ROOT / "tools/plot.py", "nowhere", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "nowhere" in done.stderr


# ---- evaluate.py -----------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("chapter", ["01", exhaustive("06")])
def test_perplexity_of_the_held_out_samples_is_that_of_the_validation_loss(tmp_path, chapter):
    """Evaluate a run's model and checkpoint; chapter 06's checkpoint has two ranks' shards."""
    ranks = 1 if chapter == "01" else 2
    split = ["--tensor-parallel-size", 2] if chapter == "06" else []
    rows = curves_of(tmp_path, {ranks: {"run": (chapter, split)}})["run"]
    for folder, step in {"model": 20, "checkpoints/step-00000010": 10}.items():
        words = ["--device", "cpu", "--held-out", "--seq-length", 64, "--eval-samples", 10]
        tool = ROOT / "tools/evaluate.py"
        output = run_command(tool, tmp_path / "run" / folder, *words, check=True).stdout
        pattern = r"(\S+) of .*\nloss (\S+) nats per token, perplexity (\S+)\n"
        tokens, loss, perplexity = map(float, re.search(pattern, output).groups())
        assert tokens == 10 * 63
        assert loss == pytest.approx(rows[step]["val_loss"], abs=2e-5)
        assert perplexity == pytest.approx(math.exp(rows[step]["val_loss"]), rel=1e-4)
    left = [path.name for path in (tmp_path / "run/checkpoints").iterdir()]
    assert not any(name.startswith(".evaluate") for name in left)


@pytest.mark.parametrize("stride", [1, 3, 8])
def test_each_token_is_counted_once_with_the_context_of_its_window(models, stride):
    """Compare the loss of windows of 8 tokens with the loss of one forward pass per token."""
    config = AutoConfig.from_pretrained(models / "qwen3")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tokens, expected, counted = torch.arange(25) % 11, 0.0, 0
    args = argparse.Namespace(seq_length=8, stride=stride, batch_size=5)
    for position in range(1, 25):
        # This is the start of the first window that contains the token at `position`.
        start = max(0, math.ceil((position - 7) / stride) * stride)
        # Without an overlap, the first token of a window has no context, so skip this token.
        if start < position:
            scores = model(input_ids=tokens[None, start:position]).logits[0, -1].log_softmax(0)
            expected -= scores[tokens[position]].item()
            counted += 1
    total, count = evaluate.total_loss(args, model, tokens)
    assert count == counted and total == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "words, message",
    [
        (["nowhere"], "nowhere: no such folder; give RUN/model"),
        (["qwen3", "-d", "my.txt"], "--dataset-name my.txt: prepare it: python preparing-data/"),
        ([".", "--stride", "300"], "--stride 300: must be from 1 to --seq-length 256"),
        ([".", "--nosuch"], "unrecognized arguments: --nosuch;"),
        (["empty"], "empty: not a complete checkpoint ("),
    ],
)
def test_mistake_in_an_evaluation_is_reported_in_one_line(
    models, tmp_path, monkeypatch, capsys, words, message
):
    (tmp_path / "empty").mkdir()
    (tmp_path / "qwen3").symlink_to(models / "qwen3")
    (tmp_path / "my.txt").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["evaluate.py", *words, "--device", "cpu"])
    assert user_error(capsys, evaluate.main).startswith(f"evaluate.py: error: {message}")
