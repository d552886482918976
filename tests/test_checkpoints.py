"""Test that one command turns a checkpoint of any chapter into a folder for transformers."""

import pytest
from transformers import AutoModelForCausalLM

from conftest import ROOT, SHORT, run_command, run_or_fail
from marks import exhaustive
from runs import has_weights_of, read_checkpoint

pytestmark = pytest.mark.slow


# The input and output embeddings of qwen3 share their weights, so test this family, too.
@pytest.mark.parametrize(
    "chapter, family", [("04", "llama"), ("02", "qwen3"), exhaustive("04", "qwen3")]
)
def test_checkpoint_becomes_a_model_with_one_command(models, tmp_path, chapter, family):
    """Check that export.py writes the checkpoint's weights, and the same JSON files as the run."""
    args = [*SHORT, "--num-steps", 4, "--checkpoint-every", 2, "-m", models / family]
    run_or_fail(2, [(chapter, [*args, "--save-dir", tmp_path, "-e", "run"])], tmp_path / "jobs")
    run, folder = tmp_path / "run", tmp_path / "model"
    checkpoint = run / "checkpoints/step-00000002"
    done = run_command(ROOT / "tools/export.py", checkpoint, folder)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    assert done.stdout.strip().endswith("step-00000002")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert has_weights_of(model, read_checkpoint(run, 2))
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (run / "model" / name).read_bytes(), name


def test_folder_without_a_checkpoint_becomes_no_model(tmp_path):
    done = run_command(ROOT / "tools/export.py", tmp_path, tmp_path / "model")
    assert done.returncode == 2 and not (tmp_path / "model").exists()
    [line] = done.stderr.splitlines()
    assert line.startswith(f"export.py: error: {tmp_path}: not a complete checkpoint (")
