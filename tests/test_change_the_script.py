"""Test that each patch of change-the-script fits, has its effect, and keeps resuming exact."""

import math
import subprocess
from types import SimpleNamespace

import pytest
import torch

import harness
from conftest import ROOT, SCRIPTS, SHORT, difference, metrics, run_or_fail
from marks import slow
from runs import copy_run, read_checkpoint

PATCHES = ROOT / "related-topics/change-the-script"
NAMES = ["data", "freeze", "metric", "module", "wsd"]
SMALL = [*SHORT, "--seq-length", 32, "--config", "num_hidden_layers=2"]


def patched(name, chapter, folder):
    """Apply a patch to a copy of a chapter's script; return the path of the copy.

    Fail if a line of the patch does not fit.
    """
    script, patch = folder / f"{chapter}.py", PATCHES / f"{name}.patch"
    command = ["patch", "--fuzz=0", "--output", script, SCRIPTS[chapter], patch]
    subprocess.run(command, check=True)
    return script


def train(name, chapter, run_dir):
    """Train a patched chapter for 20 steps, or resume its run; return the metrics."""
    args = [*SMALL, "--save-dir", run_dir.parent, "-e", run_dir.name]
    jobs = [(patched(name, chapter, run_dir.parent), args)]
    run_or_fail(1 if chapter == "01" else 2, jobs, run_dir.with_suffix(".jobs"))
    return metrics(run_dir)


def check_effect(name, run_dir, curve):
    """Check the effect of the patch `name` on a run.

    For `data` and `module`, check only that the validation loss has fallen.
    """
    weights, earlier_weights = (read_checkpoint(run_dir, step)["model"] for step in (20, 10))
    if name == "freeze":
        frozen = {key for key in weights if torch.equal(weights[key], earlier_weights[key])}
        parts = ("model.embed_tokens.", "model.layers.0.")
        assert frozen == {key for key in weights if key.startswith(parts)}
    elif name == "metric":
        norm = torch.nn.utils.get_total_norm(weights.values()).item()
        assert curve[20]["weight_norm"] == pytest.approx(norm)
        assert curve[20]["perplexity"] == math.exp(curve[20]["val_loss"])
    elif name == "wsd":
        rates = [curve[step]["lr"] * 5000 for step in range(10, 21)]
        assert rates == pytest.approx([5, 5, 5, 5, 5, 5, 5, 4, 3, 2, 1])
    else:
        assert curve[20]["val_loss"] < curve[0]["val_loss"] - 0.5


@pytest.mark.parametrize(
    "chapter, name", [("01", name) for name in NAMES] + [slow("04", name) for name in NAMES]
)
def test_patched_script_has_its_effect_and_resumes_exactly(chapter, name, tmp_path):
    curve = train(name, chapter, tmp_path / "run")
    check_effect(name, tmp_path / "run", curve)
    copy_run(tmp_path / "run", 10, tmp_path / "copy")
    assert difference(curve, train(name, chapter, tmp_path / "copy")) == 0
    if chapter == "04":
        other_curve = train(name, "01", tmp_path / "one")
        # Compare no gradient norms, because PyTorch rounds the norm of a large gradient differently
        # than the norms of its shards.
        assert difference(curve, other_curve, names=["loss", "val_loss"]) < 1e-5


def test_longer_run_has_the_same_rates_before_the_decay(tmp_path):
    script = harness.load(patched("wsd", "01", tmp_path))
    runs = [SimpleNamespace(lr=1e-3, warmup_steps=10, num_steps=number) for number in (20, 30)]
    for step in range(1, 17):
        assert len({script.lr_at(run, step) for run in runs}) == 1
