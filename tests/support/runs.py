"""What runs leave behind: checkpoints, weights, rows, and one line if something was wrong."""

import argparse
import json
import shutil
import sys
import time

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.cluster import wait_until
from conftest import ROOT, SHORT, free_port

WATCHED = ROOT / "diagnosing-errors/watched.py"
LONG = [*SHORT, "--num-steps", 30, "--keep-checkpoints", 9]


def cut(run_dir, step, copy):
    """Copy a run as it was right after the checkpoint of `step`, with some rows more."""
    shutil.copytree(run_dir, copy)
    shutil.rmtree(copy / "model")
    for finished in copy.glob("finished-*"):
        finished.unlink()
    for checkpoint in (copy / "checkpoints").iterdir():
        if int(checkpoint.name[5:]) > step:
            shutil.rmtree(checkpoint)


def newest_step(run_dir):
    """Return the newest checkpoint's step; all that are named so must load."""
    steps = [0]
    for checkpoint in (run_dir / "checkpoints").glob("step-*"):
        whole = checkpoint / "state.pt"
        if not whole.exists():  # the shards of all ranks: each of them is read
            whole = run_dir / "all-shards.pt"
            dcp_to_torch_save(checkpoint, whole)
        adam = torch.load(whole, weights_only=True)["optimizer"]
        [step] = {int(moments["step"]) for moments in adam.get("state", adam).values()}
        assert f"step-{step:08}" == checkpoint.name
        steps.append(step)
    return max(steps)


def last_row(run_dir):
    """Return the last whole row's step."""
    path = run_dir / "metrics.jsonl"
    rows = path.read_text().split("\n")[:-1] if path.exists() else []
    return json.loads(rows[-1])["step"] if rows else 0


def all_run(processes):
    return all([process.poll() is None for process in processes])


def wait_for(condition, processes, seconds=120):
    """Wait until `condition` holds or a process has ended; say whether all still run."""
    deadline = time.monotonic() + seconds
    while all_run(processes) and not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.001)
    return all_run(processes)


def read(checkpoint, state):
    """Fill `state` with what a checkpoint has under its names."""
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    return state


def weights_of(run_dir, step):
    """Return a checkpoint's weights by name; it has those that are tied only once."""
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    tied = model.all_tied_weights_keys
    weights = {name: torch.full_like(w, torch.nan) for name, w in model.state_dict().items()}
    weights = {name: weight for name, weight in weights.items() if name not in tied}
    read(run_dir / f"checkpoints/step-{step:08}", {"model": weights})
    return weights | {name: weights[source] for name, source in tied.items()}


def loaded(run_dir, step):
    """Return a finished run's model, loaded by its folder alone: it has a checkpoint's weights."""
    model, info = AutoModelForCausalLM.from_pretrained(run_dir / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    expected = weights_of(run_dir, step)
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())
    return model


def validation_loss(model, run_dir, args, chapter):
    """Return the loss of a finished run's model on the samples that were held out."""
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "model")
    _, held_out = chapter.build_data(argparse.Namespace(**args), tokenizer)
    with torch.no_grad():
        return model(input_ids=held_out.long(), labels=held_out.long()).loss.item()


def check(result, expected):
    """Check one rank's result: the line, nothing but the line, and the status."""
    lines = [line for line in result["stderr"].splitlines() if line.strip()]
    assert len(lines) == 1, result["stderr"]
    assert lines[0].startswith("train_llm.py: error: ") and expected in lines[0]
    assert result["status"] == 2


def command_of(folder, *words, ranks=0):
    """Return what runs a script under watched.py, on some ranks under torchrun."""
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", ranks]
        launcher += ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    return list(map(str, [*launcher, WATCHED, "--into", folder, *words]))


def verdict_of(cluster, run, env, kinds, *where):
    """Ask the tool until its verdict is of one of these kinds; return it."""
    tool, said = ROOT / "diagnosing-errors/whats_wrong.py", {}
    command = [sys.executable, tool, run, "--json", *where]

    def named():
        done = cluster.run("head", command, 60, check=False, env=env)
        said.update(json.loads(done.stdout))
        return said["kind"] in kinds

    wait_until(named, 90, f"a verdict of {kinds}: {said}")
    return said
