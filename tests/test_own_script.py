"""Test that the Python code on pages does what the pages claim."""

import ast
import contextlib
import io
import itertools
import types

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers

from conftest import ROOT, run_jobs
from families import make_hub_folder
from readme import blocks

PAGES = [ROOT / f"docs/your-own-{name}.md" for name in ("script", "large-model")]
CODE = "\n".join(block.text for page in PAGES for block in blocks(page) if block.kind == "python")


def page():
    """Run the Python code of docs/your-own-*.md in a new module; return the module."""
    module = types.ModuleType("page")
    exec(CODE, module.__dict__)
    return module


def from_pretrained(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


# ---- published weights, shard by shard ---------------------------------------------------------
@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
    """Save models in the hub's format, one with tied embeddings; return their folders by name."""
    root = tmp_path_factory.mktemp("published")
    return {name: make_hub_folder(models, root, name) for name in ("mistral", "qwen3", "mixtral")}


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_model_built_on_the_meta_device_equals_the_model_built_on_the_cpu(
    name, folders, one_rank_group
):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        page().check(folders[name], "cpu")
    assert output.getvalue() == "different: []\n"


def test_weights_with_other_names_are_read_after_they_were_written_out(
    folders, one_rank_group, tmp_path
):
    code = page()
    with pytest.raises(dcp.CheckpointException, match="Missing key"):
        code.load_sharded(folders["mixtral"], "cpu")
    code.write_out(folders["mixtral"], tmp_path / "written")
    loaded = code.load_sharded(tmp_path / "written", "cpu")
    assert code.different(loaded, from_pretrained(folders["mixtral"])) == []


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_saved_shards_become_a_model_folder(name, folders, one_rank_group, tmp_path):
    """Check also that saving keeps the last two checkpoints, and deletes a partial checkpoint."""
    code = page()
    model = code.load_sharded(folders[name], "cpu")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    run = tmp_path / "run"
    for leftover in ("step-00000001", "step-00000003.partial"):
        (run / leftover).mkdir(parents=True)
    for step in (2, 3):
        code.save_shards(run, model, optimizer, schedule, step)
    assert (run / "step-00000002").exists() and not (run / "step-00000003").exists()
    code.finish_save()
    assert sorted(path.name for path in run.iterdir()) == ["step-00000002", "step-00000003"]
    code.to_folder(run / "step-00000003", folders[name], tmp_path / "folder")
    assert code.different(model, from_pretrained(tmp_path / "folder")) == []


# ---- resume ------------------------------------------------------------------------------------
STEPS, SAVED = 20, 10
SAMPLES = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))


class Model(torch.nn.Sequential):
    """Compute the mean squared difference between the outputs and the shifted inputs."""

    def forward(self, inputs):
        return (super().forward(inputs) - inputs.roll(1, 1)).pow(2).mean()


def run(code, path, stops=None, shards=False):
    """Train a small model with the pages' code; resume the run if `path` has a checkpoint.

    Print a line per step, and return the losses by step. `stops` has one truth value per step: the
    run stops after the first step with a true value. With `shards`, use FSDP and sharded
    checkpoints.
    """
    torch.manual_seed(1)
    model = Model(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 8))
    options = {}
    if shards:
        code.fully_shard(model)
        options = {"load": code.load_shards, "save": code.save_shards}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    stops = stops or itertools.repeat(False)
    args = model, optimizer, schedule, SAMPLES, path, STEPS, SAVED, stops
    losses = code.train(*args, shown=range(STEPS), **options)
    code.finish_save()
    return {step: loss.item() for step, loss in losses.items()}


@pytest.mark.parametrize("shards", [False, True])
def test_resume_is_exact_to_the_bit(shards, one_rank_group, tmp_path, capsys):
    code = page()
    losses = run(code, tmp_path / "alone", shards=shards)
    lines = capsys.readouterr().out.splitlines()
    # This iterator raises a ZeroDivisionError three steps after the run's checkpoint.
    stops = (1 / (SAVED + 3 - step) < 0 for step in range(STEPS))
    with pytest.raises(ZeroDivisionError):
        run(code, tmp_path / "killed", stops, shards)
    code.finish_save()
    capsys.readouterr()
    resumed_losses = run(code, tmp_path / "killed", shards=shards)
    assert resumed_losses == {step: losses[step] for step in range(SAVED, STEPS)}
    assert capsys.readouterr().out.splitlines() == lines[SAVED:]


def test_run_that_is_stopped_loses_no_step(one_rank_group, tmp_path):
    losses = run(page(), tmp_path / "alone")
    first_losses = run(page(), tmp_path / "run", iter([False] * 3 + [True]))
    resumed_losses = run(page(), tmp_path / "run")
    assert list(first_losses) == list(range(4))
    assert first_losses | resumed_losses == losses


# ---- several ranks -----------------------------------------------------------------------------
def test_ranks_read_each_sample_once(tmp_path):
    code, samples = page(), torch.arange(24)
    first_step = next(code.batches(samples, 8, 8, 0, 0))
    readers = [code.batches(samples, 8, 2, 0, 1, rank, 2) for rank in range(2)]
    later_steps = [next(reader) for _ in range(4) for reader in readers]
    assert sorted(torch.cat([first_step, *later_steps]).tolist()) == list(range(24))
    assert code.split(24, 5, 2) == (4, 3)
    with pytest.raises(AssertionError, match="8 samples are not divisible by 3 ranks"):
        code.split(8, 2, 3)


def test_ranks_that_share_a_stream_end_together(tmp_path):
    """Give rank 0 one batch more than rank 1, and check that together() drops this batch."""
    page = ROOT / "preparing-data/data-loading.md"
    code = "\n".join(block.text for block in blocks(page) if block.kind == "python")
    script = tmp_path / "script.py"
    script.write_text(f"""{code}
from torch.utils.data import DataLoader
dist.init_process_group("gloo")
share = Share(range(29), dist.get_rank(), dist.get_world_size())
batches = DataLoader(share, batch_size=2, num_workers=2, drop_last=True)
print([batch.tolist() for batch in together(batches)])
dist.destroy_process_group()
""")
    [results] = run_jobs(2, [(script, [])], tmp_path / "jobs", timeout=60)
    assert [ast.literal_eval(result["stdout"]) for result in results] == [
        [[0, 4], [1, 5], [8, 12], [9, 13], [16, 20], [17, 21]],
        [[2, 6], [3, 7], [10, 14], [11, 15], [18, 22], [19, 23]],
    ]
