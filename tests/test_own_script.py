"""The Python on pages does what the pages claim, and its checks notice mistakes."""

import ast
import contextlib
import io
import itertools
import re
import types

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers

from conftest import ROOT, run_jobs
from families import make_hub_folder
from readme import blocks

PAGES = [ROOT / f"docs/your-own-{name}.md" for name in ("script", "large-model")]
CODE = "\n".join(block.text for page in PAGES for block in blocks(page) if block.kind == "python")


def page(old="", new=""):
    """Return the functions of the pages as a module, after a replacement in their text."""
    assert not old or old in CODE, f"the pages do not have: {old}"
    module = types.ModuleType("page")
    exec(CODE.replace(old, new) if old else CODE, module.__dict__)
    return module


def from_pretrained(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


# ---- published weights, shard by shard ---------------------------------------------------------
@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
    """Return folders of published models by name; the embeddings of qwen3 are tied."""
    root = tmp_path_factory.mktemp("published")
    return {name: make_hub_folder(models, root, name) for name in ("mistral", "qwen3", "mixtral")}


def differing_names(code, folder):
    """Return the names that the page's check prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code.check(folder, "cpu")
    return ast.literal_eval(output.getvalue().removeprefix("different: "))


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_model_built_on_the_meta_device_equals_the_model_built_on_the_cpu(
    name, folders, one_rank_group
):
    assert differing_names(page(), folders[name]) == []


@pytest.mark.parametrize(
    "line, replacement, ending",
    [("model.init_weights()", "", "inv_freq"), ("dcp.load(weights, ", "dict(", "weight")],
)
def test_forgotten_line_is_noticed(line, replacement, ending, folders, one_rank_group):
    names = differing_names(page(line, replacement), folders["mistral"])
    assert names and all(name.endswith(ending) for name in names), names


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
    """Saving keeps two checkpoints, and leaves nothing that a killed run has left."""
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


def test_only_buffers_move(folders, one_rank_group):
    model = from_pretrained(folders["mistral"])
    page().buffers_to(model, "meta")
    assert all(buffer.is_meta for buffer in model.buffers()) and list(model.buffers())
    assert not any(weight.is_meta for weight in model.parameters()), "a weight moved"


# ---- resume ------------------------------------------------------------------------------------
STEPS, SAVED = 20, 10
SAMPLES = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))


class Model(torch.nn.Sequential):
    """A small model with dropout, which returns a loss."""

    def forward(self, inputs):
        return (super().forward(inputs) - inputs.roll(1, 1)).pow(2).mean()


def run(code, path, stops=None, shards=False, num_steps=STEPS, **options):
    """Train from the checkpoint, if there is one; return losses and the line of each step."""
    torch.manual_seed(1)
    model = Model(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 8))
    if shards:
        code.fully_shard(model)
        options |= {"load": code.load_shards, "save": code.save_shards}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    stops = stops or itertools.repeat(False)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        args = model, optimizer, schedule, SAMPLES, path, num_steps, SAVED, stops
        losses = code.train(*args, shown=range(num_steps), **options)
    code.finish_save()
    lines = {}
    for line in output.getvalue().splitlines():
        first, *words = line.split("  ")
        lines[int(first.split()[1])] = dict(word.split() for word in words)
    return {step: loss.item() for step, loss in losses.items()}, lines


@pytest.mark.parametrize("shards", [False, True])
def test_resume_is_exact_to_the_bit(shards, one_rank_group, tmp_path):
    code = page()
    losses, lines = run(code, tmp_path / "alone", shards=shards)
    # This run fails with an error three steps after its checkpoint.
    stops = (1 / (SAVED + 3 - step) < 0 for step in range(STEPS))
    with pytest.raises(ZeroDivisionError):
        run(code, tmp_path / "killed", stops, shards)
    code.finish_save()
    resumed_losses, resumed_lines = run(code, tmp_path / "killed", shards=shards)
    assert list(resumed_losses) == list(range(SAVED, STEPS))
    for step, loss in resumed_losses.items():
        assert (loss, resumed_lines[step]) == (losses[step], lines[step])


@pytest.mark.parametrize("end", ["stop", "end of a stream"])
def test_run_that_ends_early_loses_no_step(end, one_rank_group, monkeypatch, tmp_path):
    """The run stops in step 4, or its samples end in the middle of a step, after a checkpoint."""
    losses, _ = run(page(), tmp_path / "alone")
    if end == "stop":
        num_steps = 4
        first_losses, _ = run(page(), tmp_path / "run", iter([False] * 3 + [True]))
    else:
        num_steps = SAVED + 3
        [line] = re.findall(r"`(if not all_have.*?; break)`", PAGES[0].read_text())
        code = page("        if step in shown:", f"        {line}\n        if step in shown:")
        # Each step has two micro-batches.
        batches, num_batches = code.batches, 2 * num_steps + 1
        limited = lambda *args: itertools.islice(batches(*args), num_batches)  # noqa: E731
        monkeypatch.setattr(code, "batches", limited)
        first_losses, _ = run(code, tmp_path / "run")
    resumed_losses, _ = run(page(), tmp_path / "run")
    assert list(first_losses) == list(range(num_steps))
    assert first_losses | resumed_losses == losses


@pytest.mark.parametrize(
    "old, new, name",
    [
        ('optimizer.load_state_dict(state["optimizer"])', "pass", "moments"),
        ('schedule.load_state_dict(state["schedule"])', "pass", "lr"),
        ("micro, seed, done,", "micro, seed, 0,", "samples"),
        ("torch.manual_seed(hash((seed, step, rank)))", "torch.rand(())", "random"),
    ],
)
def test_lost_state_is_the_only_difference_in_the_line(old, new, name, one_rank_group, tmp_path):
    code = page(old, new)
    losses, lines = run(code, tmp_path / "alone")
    run(code, tmp_path / "killed", num_steps=SAVED)
    resumed_losses, resumed_lines = run(code, tmp_path / "killed")
    line, resumed_line = lines[SAVED], resumed_lines[SAVED]
    assert {key for key in line if resumed_line[key] != line[key]} == {name}
    assert any(resumed_losses[step] != losses[step] for step in resumed_losses), "no loss shows it"


def test_size_of_micro_batches_changes_no_loss(one_rank_group, tmp_path):
    without_dropout = page("torch.manual_seed(hash((seed, step, rank)))", "model.eval()")
    losses, _ = run(without_dropout, tmp_path / "large", most=8)
    small_losses, _ = run(without_dropout, tmp_path / "small", most=3)
    assert small_losses == pytest.approx(losses, abs=1e-6)


@pytest.mark.parametrize("workers_stay", [False, True])
def test_sigterm_to_all_processes_ends_workers_unless_they_stay(tmp_path, workers_stay):
    """Without workers, a rank that handles the signal fails; with them, it reads on."""
    option = ", worker_init_fn=stay" if workers_stay else ""
    script = tmp_path / "script.py"
    script.write_text(f"""{CODE}
import subprocess
signal.signal(signal.SIGTERM, lambda *_: None)
batches = iter(DataLoader(range(10_000), 2, num_workers=2{option}))
# Both workers have started after ten batches.
list(itertools.islice(batches, 10))
subprocess.run(["kill", "--", f"-{{os.getpgrp()}}"], start_new_session=True)
print(len(list(itertools.islice(batches, 100))))
raise ZeroDivisionError
""")
    [[result]] = run_jobs(1, [(script, [])], tmp_path / "jobs", timeout=60)
    assert result["status"] == 1
    assert result["stdout"] == ("100\n" if workers_stay else ""), result["stderr"]
    assert ("ZeroDivisionError" in result["stderr"]) == workers_stay


# ---- several ranks -----------------------------------------------------------------------------
def test_file_that_only_some_ranks_see_is_refused(one_rank_group, monkeypatch, tmp_path):
    def gather(seen, is_here):
        seen[:] = [is_here, not is_here]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    with pytest.raises(AssertionError, match="only some ranks see"):
        page().load(tmp_path / "state.pt", None, None, None)


def test_ranks_read_each_sample_once(tmp_path):
    code, samples = page(), torch.arange(24)
    first_step = next(code.batches(samples, 8, 8, 0, 0))
    readers = [code.batches(samples, 8, 2, 0, 1, rank, 2) for rank in range(2)]
    later_steps = [next(reader) for _ in range(4) for reader in readers]
    assert sorted(torch.cat([first_step, *later_steps]).tolist()) == list(range(24))
    assert code.split(24, 5, 2) == (4, 3)
    with pytest.raises(AssertionError, match="8 samples are not divisible by 3 ranks"):
        code.split(8, 2, 3)


@pytest.mark.parametrize("others_have", [0, 1])
def test_all_ranks_end_together(others_have, monkeypatch):
    def reduce(answer, operation):
        assert operation == dist.ReduceOp.MIN
        answer.clamp_(max=others_have)

    monkeypatch.setattr(dist, "all_reduce", reduce)
    assert [page().all_have(more, "cpu") for more in (True, False)] == [bool(others_have), False]


def test_ranks_that_share_a_stream_end_together(tmp_path):
    """Rank 0 would have one batch more than rank 1."""
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
