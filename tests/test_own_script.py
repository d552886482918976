"""The Python on docs/your-own-*.md does what the pages say, and its checks notice mistakes."""

import ast
import contextlib
import io
import itertools
import json
import re
import sys
import types

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

from conftest import ROOT, run_command
from families import make_hub_folder
from readme import blocks

PAGES = [ROOT / f"docs/your-own-{name}.md" for name in ("script", "large-model")]
CODE = "\n".join(block.text for page in PAGES for block in blocks(page) if block.kind == "python")


def page(old="", new=""):
    """Return what the pages define, after a replacement."""
    assert not old or old in CODE
    module = types.ModuleType("page")
    exec(CODE.replace(old, new) if old else CODE, module.__dict__)
    return module


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
    """Folders of published models by name; qwen3's embeddings are tied."""
    root = tmp_path_factory.mktemp("published")
    return {name: make_hub_folder(models, root, name) for name in ("mistral", "qwen3", "mixtral")}


def checked(code, folder):
    """Return the names that the page's check prints."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code.check(folder, "cpu")
    return ast.literal_eval(said.getvalue().removeprefix("different: "))


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_a_model_built_on_the_meta_device(name, folders, one_rank_group):
    """It equals the one that is built on the CPU, bit for bit."""
    assert checked(page(), folders[name]) == []


@pytest.mark.parametrize(
    "forgotten, told", [("model.init_weights()", "inv_freq"), ("dcp.load(weights, ", "weight")]
)
def test_a_forgotten_line_is_named(forgotten, told, folders, one_rank_group):
    names = checked(page(forgotten, "dict(" if forgotten.endswith(" ") else ""), folders["mistral"])
    assert names and all(each.endswith(told) for each in names), names


def test_lost_ties_are_named(folders, one_rank_group, monkeypatch):
    monkeypatch.setattr(transformers.Qwen3ForCausalLM, "tie_weights", lambda *_, **__: None)
    with pytest.raises(dcp.CheckpointException, match=r"Missing key.*: lm_head\.weight"):
        checked(page(), folders["qwen3"])


def test_weights_under_other_names(folders, one_rank_group, tmp_path):
    """Mixtral's cannot be read shard by shard, and can be after they were written out."""
    code = page()
    with pytest.raises(dcp.CheckpointException, match="Missing key"):
        code.load_sharded(folders["mixtral"], "cpu")
    code.write_out(folders["mixtral"], tmp_path / "written")
    expected = transformers.AutoModelForCausalLM.from_pretrained(
        folders["mixtral"], dtype=torch.float32
    )
    torch.use_deterministic_algorithms(True)
    assert code.different(code.load_sharded(tmp_path / "written", "cpu"), expected) == []


def stepped(model, optimizer, steps=2):
    """Return the losses of a few steps on the same tokens."""
    losses, ids = [], torch.arange(32).view(2, 16)
    for _ in range(steps):
        losses.append(model(input_ids=ids, labels=ids, use_cache=False).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_shards_are_saved_loaded_and_made_a_folder(name, folders, one_rank_group, tmp_path):
    """Weights and moments: the losses go on as if nothing had been."""
    code, models = page(), []
    for _ in range(2):
        model = code.load_sharded(folders[name], "cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        models.append((model, optimizer, schedule))
    one, other = models
    stepped(*one[:2])
    run = tmp_path / "run"
    (run / "step-00000001").mkdir(parents=True)
    (run / "step-00000003.partial").mkdir()  # which a kill has left
    for step in (2, 3):
        code.save_shards(run, *one, step)
    assert (run / "step-00000002").exists() and not (run / "step-00000003").exists()
    code.finish_save()
    assert sorted(path.name for path in run.iterdir()) == ["step-00000002", "step-00000003"]
    assert code.load_shards(run, *other) == 3
    code.to_folder(run / "step-00000003", folders[name], tmp_path / "folder")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert code.different(one[0], loaded) == []
    assert stepped(*one[:2]) == stepped(*other[:2])


def test_buffers_move_alone(folders, one_rank_group):
    code, model = page(), transformers.AutoModelForCausalLM.from_pretrained(folders["mistral"])
    code.buffers_to(model, "meta")
    assert all(buffer.is_meta for buffer in model.buffers()) and list(model.buffers())
    assert not any(weight.is_meta for weight in model.parameters())


# ---- resume ----------------------------------------------------------------------------------
STEPS, SAVED = 20, 10
SAMPLES = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))


class Model(torch.nn.Sequential):
    """Returns a loss, with dropout on the way."""

    def forward(self, inputs):
        return (super().forward(inputs) - inputs.roll(1, 1)).pow(2).mean()


def run(code, path, steps, stops=None, shards=False, **options):
    """Train from the checkpoint, if there is one; return losses and the line of each step."""
    torch.manual_seed(1)
    model = Model(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 8))
    if shards:
        code.fully_shard(model)
        options |= {"load": code.load_shards, "save": code.save_shards}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    stops = stops or itertools.repeat(False)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        args = model, optimizer, schedule, SAMPLES, path, steps, SAVED, stops
        losses = code.train(*args, shown=range(steps), **options)
    code.finish_save()
    lines = [line.split("  ") for line in said.getvalue().splitlines()]
    found = {int(line[0].split()[1]): dict(word.split() for word in line[1:]) for line in lines}
    return {step: loss.item() for step, loss in losses.items()}, found


@pytest.mark.parametrize("shards", [False, True])
def test_a_resume_is_exact(shards, one_rank_group, tmp_path):
    """Not one bit of the losses after it differs, nor anything that is printed."""
    code = page()
    losses, lines = run(code, tmp_path / "whole", STEPS, shards=shards)
    asked = (1 / (SAVED + 3 - step) < 0 for step in range(STEPS))  # which ends in an error
    with pytest.raises(ZeroDivisionError):
        run(code, tmp_path / "killed", STEPS, stops=asked, shards=shards)
    code.finish_save()
    after, shown = run(code, tmp_path / "killed", STEPS, shards=shards)
    assert list(after) == list(range(SAVED, STEPS))
    assert all(after[step] == losses[step] and shown[step] == lines[step] for step in after)


def test_a_stop_loses_no_step(one_rank_group, tmp_path):
    """The run ends after the step in which it was asked, and continues exactly."""
    losses, _ = run(page(), tmp_path / "whole", STEPS)
    asked = iter([False] * 3 + [True])
    before, _ = run(page(), tmp_path / "asked", STEPS, stops=asked)
    after, _ = run(page(), tmp_path / "asked", STEPS)
    assert list(before) == [0, 1, 2, 3] and before | after == losses


@pytest.mark.parametrize("options", ["", ", worker_init_fn=stay"], ids=["as it is", "stay"])
def test_a_signal_to_all_processes(options):
    """It ends workers, and with them the rank that handles it; those that stay end if it fails."""
    code = f"""{CODE}
import subprocess
os.setpgrp()
signal.signal(signal.SIGTERM, lambda *_: None)
batches = iter(DataLoader(range(10_000), 2, num_workers=2{options}))
some = [next(batches) for _ in range(10)]  # of both workers
subprocess.run(["kill", "--", f"-{{os.getpgrp()}}"], start_new_session=True)
print(len(list(itertools.islice(batches, 100))))
raise ZeroDivisionError
"""
    done = run_command(sys.executable, "-c", code, timeout=60)
    assert done.returncode == 1
    assert done.stdout == "100\n" * bool(options), done.stderr
    assert ("ZeroDivisionError" in done.stderr) == bool(options)


def test_the_end_of_a_stream_loses_no_step(one_rank_group, monkeypatch, tmp_path):
    """With the page's line for it; the samples end in the middle of a step, after a save."""
    [line] = re.findall(r"`(if not all_have.*?; break)`", PAGES[0].read_text())
    whole, _ = run(page(), tmp_path / "whole", STEPS)
    code = page("        if step in shown:", f"        {line}\n        if step in shown:")
    batches, enough = code.batches, 2 * (SAVED + 3) + 1  # two micro-batches a step
    monkeypatch.setattr(code, "batches", lambda *at: itertools.islice(batches(*at), enough))
    before, _ = run(code, tmp_path / "ended", STEPS)
    after, _ = run(page(), tmp_path / "ended", STEPS)
    assert list(before) == list(range(SAVED + 3)) and before | after == whole


def test_a_stream_continues_where_its_state_says(tmp_path):
    """As the page on data loading has it; here with a map that makes two samples of each record."""
    for name in "abcd":
        rows = [json.dumps({"text": f"{name}{number}"}) for number in range(50)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))

    def stream():
        options = {"streaming": True, "split": "train", "cache_dir": str(tmp_path)}
        found = load_dataset("json", data_files=str(tmp_path / "*.jsonl"), **options)
        split = split_dataset_by_node(found, 1, 2)
        twice = {"batched": True, "batch_size": 16}
        return split.map(lambda rows: {"text": [row * 2 for row in rows["text"] * 2]}, **twice)

    whole, state = [], None
    for number, batch in enumerate(DataLoader(first := stream(), 3)):
        whole.append(batch["text"])
        if number == 7:
            state = json.dumps(first.state_dict())
    (later := stream()).load_state_dict(json.loads(state))
    assert [batch["text"] for batch in DataLoader(later, 3)] == whole[8:] and len(whole) > 60


@pytest.mark.parametrize(
    "old, new, lost",
    [
        ('optimizer.load_state_dict(state["optimizer"])', "pass", {"moments"}),
        ('schedule.load_state_dict(state["schedule"])', "pass", {"lr"}),
        ("micro, seed, done,", "micro, seed, 0,", {"samples"}),
        ("torch.manual_seed(hash((seed, step, rank)))", "torch.rand(())", {"random"}),
    ],
)
def test_what_is_lost_is_named(old, new, lost, one_rank_group, tmp_path):
    """Of the line for the first step after the resume, only what was lost is another."""
    code = page(old, new)
    losses, lines = run(code, tmp_path / "whole", STEPS)
    run(code, tmp_path / "killed", SAVED)
    after, shown = run(code, tmp_path / "killed", STEPS)
    differ = {name for name in lines[SAVED] if shown[SAVED][name] != lines[SAVED][name]}
    assert differ == lost
    assert any(after[step] != losses[step] for step in after)


def test_micro_batches_change_no_loss(one_rank_group, tmp_path):
    code = page("torch.manual_seed(hash((seed, step, rank)))", "model.eval()")  # no dropout
    whole, _ = run(code, tmp_path / "whole", STEPS, most=8)
    parts, _ = run(code, tmp_path / "parts", STEPS, most=3)
    assert parts == pytest.approx(whole, abs=1e-6)


def test_a_file_that_only_some_ranks_see_is_refused(one_rank_group, monkeypatch, tmp_path):
    def gather(seen, mine):
        seen[:] = [mine, not mine]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    with pytest.raises(AssertionError, match="only some ranks see"):
        page().load(tmp_path / "state.pt", None, None, None)


def test_ranks_load_in_turn(one_rank_group, monkeypatch):
    turns = []
    for rank in "01":
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        monkeypatch.setenv("LOCAL_RANK", rank)
        barrier = lambda _: turns.append("wait")  # noqa: E731
        monkeypatch.setattr(dist, "barrier", barrier)
        load = lambda: turns.append("load") or torch.nn.Linear(1, 1)  # noqa: E731
        page().load_in_turn(load, "cpu", None)
    assert turns == ["load", "wait", "wait", "wait", "load", "wait"]


def test_ranks_share_a_pass(tmp_path):
    """Together they read each sample once, from any step on."""
    code, data = page(), torch.arange(24)
    first = [code.batches(data, 8, 2, 0, 1, rank, 2) for rank in range(2)]
    read = torch.cat([next(each) for _ in range(4) for each in first])
    before = next(code.batches(data, 8, 8, 0, 0))
    assert code.split(24, 5, 2) == (4, 3)
    with pytest.raises(AssertionError, match="8 samples do not divide by 3 ranks"):
        code.split(8, 2, 3)
    assert sorted(torch.cat([before, read]).tolist()) == list(range(24))


@pytest.mark.parametrize("others", [0, 1])
def test_all_ranks_end_together(others, monkeypatch):
    def reduce(answer, operation):
        assert operation == dist.ReduceOp.MIN
        answer.clamp_(max=others)

    monkeypatch.setattr(dist, "all_reduce", reduce)
    assert [page().all_have(more, "cpu") for more in (True, False)] == [bool(others), False]
