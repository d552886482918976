"""Test that watched.py writes correct files, and that scripts run as they do without it."""

import json
import signal
import sys
import threading
from collections import OrderedDict

import pytest
import torch
import watched

from cluster.cluster import wait_until
from conftest import (
    ROOT,
    SCRIPTS,
    SHORT,
    difference,
    metrics,
    run_command,
    run_jobs,
    run_or_fail,
    start_ranks,
)


def run(folder, script, *args):
    """Run a script on one rank under watched.py; return the rank's exit status and output."""
    [[result]] = run_jobs(1, [(watched.__file__, ["--into", folder, script, *args])], folder)
    return result


def beat_of(folder, rank=0):
    """Return the last heartbeat of a rank."""
    return json.loads((folder / f"ranks/{rank:05}.json").read_text())


def written(folder, text):
    """Write a script; return its path."""
    (folder / "some_script.py").write_text(text)
    return folder / "some_script.py"


# ---- scripts run and end as they do without it -------------------------------------------------
OWN = "import sys, neighbour; assert [__name__, *sys.argv[1:]] == ['__main__', '-e', '--into']"
# Map each script to its exit status and to a part of the error in its last heartbeat.
ENDS = {
    OWN: (0, "None"),
    "import sys; sys.exit('no way')": (1, "SystemExit: no way"),
    "1 / 0": (1, "ZeroDivisionError"),
    "import sys; print('x.py: error: bad', file=sys.stderr); sys.exit(2)": (2, "x.py: error: bad"),
}


@pytest.mark.parametrize("text", ENDS)
def test_script_has_its_own_folder_arguments_and_exit_status(tmp_path, text):
    (tmp_path / "neighbour.py").touch()
    status, error = ENDS[text]
    result = run(tmp_path, written(tmp_path, text), "-e", "--into")
    assert result["status"] == status, result
    beat = beat_of(tmp_path)
    assert beat["end"] == ("failed" if status else "finished")
    assert error in str(beat["error"])


HANDLER = """
import signal, time, sys
def stop(*_): print("saving"); sys.exit(7)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(1e6)
"""


def test_sigterm_reaches_the_handler_of_the_script_and_is_recorded(tmp_path):
    command = [watched.__file__, "--into", tmp_path, written(tmp_path, HANDLER)]
    [process] = start_ranks(1, command, tmp_path)
    log = tmp_path / "rank0.log"
    wait_until(lambda: "ready\n" in log.read_text(), 60, "the script runs")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=3) == 7
    assert log.read_text() == "ready\nsaving\n"
    assert beat_of(tmp_path)["asked_to_end"]


def test_missing_script_is_an_error(tmp_path):
    result = run(tmp_path, "nowhere.py")
    assert result["status"] == 2
    assert "error: script nowhere.py: no such file;" in result["stderr"]


# ---- heartbeats --------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def watched_run(tmp_path_factory):
    """Run chapter 02 with watched.py and without it; return the folder that holds both runs."""
    folder = tmp_path_factory.mktemp("runs")
    args = [SCRIPTS["02"], *SHORT, "--save-dir", folder, "-e"]
    jobs = [("02", [*args[1:], "alone"]), (watched.__file__, ["--into", folder, *args, "watched"])]
    run_or_fail(2, jobs, folder / "jobs")
    return folder


@pytest.mark.slow
def test_losses_are_the_same_without_watched(watched_run):
    alone, watched = metrics(watched_run / "alone"), metrics(watched_run / "watched")
    assert difference(alone, watched) == 0


@pytest.mark.slow
def test_heartbeat_has_steps_checks_and_resources(watched_run):
    beats = [beat_of(watched_run, rank) for rank in (0, 1)]
    for rank, beat in enumerate(beats):
        assert (beat["rank"], beat["world_size"], beat["end"]) == (rank, 2, "finished")
        assert (beat["step"], beat["bad"], beat["fault"]) == (20, None, None)
        assert [check["step"] for check in beat["checks"]] == [1, 10, 20]
        assert beat["memory"][-1] > 0.1
    first, second = (beat["checks"] for beat in beats)
    assert [check["weights"] for check in first] == [check["weights"] for check in second]
    hashes = [{check["data"] for check in checks[1:]} for checks in (first, second)]
    assert not hashes[0] & hashes[1], "both ranks have a batch with the same hash"
    rows = metrics(watched_run / "watched")
    means = [sum(pair) / 2 for pair in zip(first[-1]["losses"], second[-1]["losses"], strict=True)]
    assert means == pytest.approx([rows[step]["loss"] for step in (18, 19, 20)], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "chapter, ranks, flags, replicas",
    [
        ("07", 2, ["--pipeline-parallel-size", 2, "-b", 4], []),
        ("07", 4, ["--pipeline-parallel-size", 2, "-b", 2, "--replicas", 2], [1]),
        ("04", 4, ["--replicas", 2], [2]),
    ],
)
def test_only_ranks_with_the_same_layers_and_shards_are_replicas(
    tmp_path, chapter, ranks, flags, replicas
):
    """Check which rank has the same shard as rank 0, if any, and that these ranks have no fault."""
    words = [SCRIPTS[chapter], *SHORT, "--save-dir", tmp_path, "-e", "run", *flags]
    run_or_fail(ranks, [(watched.__file__, ["--into", tmp_path, *words])], tmp_path / "jobs")
    shards = [beat_of(tmp_path, rank)["shard"] for rank in range(ranks)]
    assert [rank for rank in range(1, ranks) if shards[rank] == shards[0]] == replicas
    done = run_command(ROOT / "diagnosing-errors/whats_wrong.py", tmp_path)
    assert "REPLICAS-DIFFER" not in done.stdout, done.stdout


@pytest.mark.slow
def test_step_number_includes_the_steps_before_a_resume(watched_run):
    args = ["--into", watched_run, SCRIPTS["02"], *SHORT, "--num-steps", 30]
    args += ["--save-dir", watched_run, "-e", "watched"]
    run_or_fail(2, [(watched.__file__, args)], watched_run / "resumed")
    assert beat_of(watched_run)["step"] == 30


# ---- checks ------------------------------------------------------------------------------------
class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(16, 4), torch.nn.Linear(4, 16)

    def forward(self, ids):
        return torch.nn.functional.cross_entropy(self.head(self.embed(ids)), ids)


@pytest.fixture
def steps(monkeypatch):
    """Return a watched.Steps, which counts and checks the optimizer steps of this process.

    After the test, undo the changes that watched.Steps has made to torch's functions and hooks.
    """
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    monkeypatch.setattr(torch.nn.Embedding, "forward", torch.nn.Embedding.forward)
    module = sys.modules[torch.optim.Optimizer.__module__]
    monkeypatch.setattr(module, "_global_optimizer_post_hooks", OrderedDict())
    return watched.Steps(every=2)


def train(optimizer_class, count=4, infinite_step=None, **options):
    """Train for `count` steps on different batches; step `infinite_step` has an infinite loss."""
    model = Tokens()
    optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
    for step in range(1, count + 1):
        loss = model(torch.arange(8) + step)
        loss = loss * (torch.inf if step == infinite_step else 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_main_thread_reads_nothing_from_the_device(steps, monkeypatch):
    """Check that the main thread calls no function that would wait for a GPU.

    The watching thread may call `tolist`, because it reads only numbers that have arrived on the
    CPU.
    """
    calls = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy"):
        read = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor,
            name,
            lambda *args, read=read, name=name: calls.append(name) or read(*args),
        )
    train(torch.optim.AdamW, fused=True)
    assert (steps.fault, calls) == (None, [])
    thread = threading.Thread(target=steps.collect)
    thread.start()
    thread.join()
    assert [check["step"] for check in steps.checks] == [1, 2, 4]
    assert calls == ["tolist"] * 4


def test_first_step_that_is_not_finite_is_recorded(steps):
    train(torch.optim.SGD, infinite_step=3)
    steps.collect()
    assert (steps.first_nonfinite["step"], steps.first_nonfinite["loss"]) == (3, float("inf"))


def test_error_in_a_check_does_not_stop_the_training(steps, monkeypatch):
    monkeypatch.delattr(watched, "checksum")
    train(torch.optim.SGD)
    assert "NameError" in steps.fault and steps.count == 1
