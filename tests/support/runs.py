"""Read the results of runs: checkpoints, weights, metrics, and the error line of a failed run."""

import argparse
import json
import shutil
import time
from functools import partial

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import ROOT, run_or_fail
from plot import rows_of


def copy_run(run_dir, step, copy):
    """Copy the folder of a run to `copy`; leave out checkpoints after step `step`.

    Also leave out the exported model, and the file that marks the run as finished. The copy keeps
    the metrics of all steps.
    """
    shutil.copytree(run_dir, copy, ignore=shutil.ignore_patterns("model", "finished-*"))
    for checkpoint in (copy / "checkpoints").iterdir():
        if int(checkpoint.name[5:]) > step:
            shutil.rmtree(checkpoint)


def read_checkpoint(run_dir, step):
    """Return all entries of a checkpoint, whether it is one file or a folder of shards."""
    checkpoint = run_dir / f"checkpoints/step-{step:08}"
    file = checkpoint / "state.pt"
    if not file.exists():
        file = run_dir / "all-shards.pt"
        dcp_to_torch_save(checkpoint, file)
    return torch.load(file, weights_only=True)


def newest_step(run_dir):
    """Return the step of the newest checkpoint, or 0 if there is none.

    Load every checkpoint; fail if a checkpoint cannot be loaded, or if its optimizer has counted a
    different number of steps.
    """
    steps = sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))
    for step in steps:
        adam = read_checkpoint(run_dir, step)["optimizer"]
        moments = adam.get("state", adam).values()
        # Skip the state of Muon, because Muon does not count its steps.
        assert {int(state["step"]) for state in moments if "step" in state} == {step}
    return max(steps, default=0)


def last_logged_step(run_dir):
    """Return the step of the last complete row in a run's metrics, or 0 if there is no row."""
    path = run_dir / "metrics.jsonl"
    rows = rows_of(path) if path.exists() else []
    return rows[-1]["step"] if rows else 0


def all_running(processes):
    return all([process.poll() is None for process in processes])


def kill(processes):
    """Kill processes, and wait until they have ended."""
    for process in processes:
        process.kill()
        process.wait(timeout=20)


def wait_for(condition, processes, seconds=120):
    """Wait until `condition` holds or a process ends; return whether all processes still run.

    Fail if neither happens within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while all_running(processes) and not condition():
        assert time.monotonic() < deadline, f"the condition did not hold within {seconds} s"
        time.sleep(0.001)
    return all_running(processes)


def arguments_of(run_dir, step):
    """Return a checkpoint's arguments as a dictionary; sharded checkpoints store them as JSON."""
    args = read_checkpoint(run_dir, step)["args"]
    return args if isinstance(args, dict) else json.loads(args)


def has_weights_of(model, checkpoint):
    """Return whether a model has a checkpoint's weights; tied weights may be saved only once."""
    weights, saved = model.state_dict(), checkpoint["model"]
    assert weights.keys() - saved.keys() <= set(model.all_tied_weights_keys)
    return all(torch.equal(weights[name], weight) for name, weight in saved.items())


def have_same_weights(run_dir, other_run_dir, tolerance=0):
    """Return whether the exported models of two runs have the same weights, up to `tolerance`."""
    folders = [run_dir / "model", other_run_dir / "model"]
    models = map(AutoModelForCausalLM.from_pretrained, folders)
    weights, others = (model.state_dict() for model in models)
    assert weights.keys() == others.keys()
    is_close = partial(torch.allclose, rtol=0, atol=tolerance)
    return all(is_close(weights[name], others[name]) for name in weights)


def evaluate_export(run_dir, step, chapter):
    """Check that a run has exported the weights of checkpoint `step`; return their loss.

    The loss is the mean loss on the run's held-out samples.
    """
    model, info = AutoModelForCausalLM.from_pretrained(run_dir / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    config = json.loads((run_dir / "model/config.json").read_text())
    assert config["architectures"] == [type(model).__name__] and config["dtype"] == "float32"
    assert not [path for path in (run_dir / "model").iterdir() if path.is_dir()]
    assert has_weights_of(model, read_checkpoint(run_dir, step))
    return validation_loss(model, run_dir, step, chapter)


def validation_loss(model, run_dir, step, chapter):
    """Return the mean loss of a model on the held-out samples of a run.

    The arguments in checkpoint `step` select these samples.
    """
    args = argparse.Namespace(**arguments_of(run_dir, step))
    _, held_out = chapter.build_data(args, AutoTokenizer.from_pretrained(run_dir / "model"))
    # Turn off the key-value cache, because some families return a different loss with the cache.
    model.config.use_cache = False
    with torch.no_grad():
        logits = model(input_ids=held_out.long()).logits[:, :-1]
    # Compute the loss here, because the loss functions of some decoders do not shift the labels.
    return cross_entropy(logits.flatten(0, 1), held_out[:, 1:].flatten().long()).item()


def check_user_error(result, expected):
    """Check that a rank printed one error line with the text `expected`, and exited with status 2.

    Before this line, a library may have printed a report or a progress bar.
    """
    *before, line = [line for line in result["stderr"].splitlines() if line.strip()]
    assert line.startswith("train_llm.py: error: ") and expected in line, result["stderr"]
    assert "Traceback" not in before and not any("error: " in line for line in before), before
    assert result["status"] == 2


def call_on_ranks(world_size, script, cases, folder, *words):
    """Run a script of tests/support/ on `world_size` ranks; return its JSON result.

    The arguments of the script are the path of a file with the cases, the path of a file for the
    result, and `words`.
    """
    folder.mkdir(exist_ok=True)
    cases = {name: list(map(str, args)) for name, args in cases.items()}
    (folder / "cases.json").write_text(json.dumps(cases))
    args = [folder / "cases.json", folder / "result.json", *words]
    run_or_fail(world_size, [(ROOT / "tests/support" / script, args)], folder, timeout=1200)
    return json.loads((folder / "result.json").read_text())
