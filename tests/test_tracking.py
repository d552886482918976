"""wandb's offline files and TensorBoard's event files hold what metrics.jsonl holds."""

import json
import signal
import sys
import time
from subprocess import PIPE, Popen
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

from conftest import ROOT, SCRIPTS, SHORT, free_port, metrics, run_command, run_or_fail, start_ranks
from runs import last_logged_step, wait_for

TOOLS = str(ROOT / "tools")  # which has a tensorboard.py, and may be there more than once
sys.path[:] = [*(path for path in sys.path if path != TOOLS), TOOLS]
sys.path.append(str(SCRIPTS["tracking"].parent))
import offline  # noqa: E402
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402

TOOL = ROOT / "tools/tensorboard.py"
LINE = [*SHORT, "--seq-length", 32, "--global-batch-size", 4, "--wandb", "offline"]


def add_rows(run_dir, *steps, shift=0.0):
    """Write rows of metrics, and half of one as a kill may."""
    run_dir.mkdir(exist_ok=True)
    with open(run_dir / "metrics.jsonl", "a") as file:
        for step in steps:
            row = {"step": step, "loss": 1 / (step + 3) + shift, "mfu": None}
            print(json.dumps(row | {"val_loss": 0.1 * step} if step % 2 == 0 else row), file=file)


def in_events(run_dir):
    """Return what TensorBoard reads: from step to its metrics, the kind that floats have there."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    events.Reload()
    rows = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert name not in rows.setdefault(event.step, {}), "it comes twice"
            rows[event.step][name] = np.float32(event.value)
    return rows


def in_metrics(run_dir):
    """Return the same of metrics.jsonl."""
    return {
        step: {n: np.float32(v) for n, v in row.items() if n != "step" and v is not None}
        for step, row in metrics(run_dir).items()
    }


def test_tensorboard_has_the_last_row_of_each_step(tmp_path):
    add_rows(tmp_path / "one", 0, 1, 2, 3, 4)
    add_rows(tmp_path / "one", 3, 4, 5, shift=1.0)
    add_rows(tmp_path / "two", 0, 10)
    for _ in range(2):  # the second time they are written anew, not twice
        done = run_command(TOOL, "one", "nosuch", "two", cwd=tmp_path, check=True)
        assert done.stdout == "one: 6 steps\ntwo: 2 steps\n" and done.stderr == "nosuch: no run\n"
    for name in ("one", "two"):
        assert in_events(tmp_path / name) == in_metrics(tmp_path / name)
    assert in_events(tmp_path / "one")[4]["loss"] > 1


def test_no_run_is_one_line(tmp_path):
    done = run_command(TOOL, "nosuch", cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "tensorboard.py: error: cannot read nosuch/metrics.jsonl" in done.stderr


def test_it_follows_a_run_through_a_resume(tmp_path):
    add_rows(tmp_path, 0, 1, 2, 3, 4)
    with Popen([sys.executable, TOOL, tmp_path, "--follow"], stdout=PIPE, text=True) as tool:
        try:
            for steps, shift in [((), 0.0), ((5,), 0.0), ((4, 5, 6), 1.0), ((7,), 1.0)]:
                add_rows(tmp_path, *steps, shift=shift)
                deadline = time.monotonic() + 60
                while not (found := list(tmp_path.glob("events*"))) or (
                    in_events(tmp_path) != in_metrics(tmp_path)
                ):
                    assert time.monotonic() < deadline and tool.poll() is None, found
                    time.sleep(0.2)
            tool.send_signal(signal.SIGINT)
            assert tool.communicate(timeout=30)[0] == f"{tmp_path}: 8 steps\n"
            assert tool.returncode == 0
        finally:
            tool.kill()
    assert in_events(tmp_path)[5]["loss"] > 1


WHO = {  # which ranks of two nodes with two ranks each have a run
    "0": ["first", None, None, None],
    "node": ["first", None, "first-2", None],
    "all": ["first", "first-1", "first-2", "first-3"],
}


@pytest.mark.parametrize("ranks", WHO)
def test_who_has_a_run(load, monkeypatch, tmp_path, ranks):
    """All in one group, with ids that follow from rank 0's, which checkpoints hold."""
    script, names = load("tracking"), []
    monkeypatch.setattr(script, "patient_group", Mock())
    monkeypatch.setattr(script.wandb, "init", Mock())

    def broadcast(ids, group):
        ids[0] = "first"

    monkeypatch.setattr(script.dist, "broadcast_object_list", broadcast)
    for rank in range(4):
        monkeypatch.setattr(script.dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setenv("LOCAL_RANK", str(rank % 2))
        args = script.argparse.Namespace(wandb="offline", wandb_ranks=ranks, wandb_id=f"id{rank}")
        args.experiment_name = "run"
        script.start_tracking(args, tmp_path)  # metrics.jsonl is gone
        about = script.wandb.init.call_args.kwargs
        assert about["group"] == "run" and about["name"] == about["id"].replace("first", "run")
        assert about["resume"] == "allow" and about["mode"] in ("offline", "disabled")
        names.append(about["id"] if about["mode"] == "offline" else None)
    assert names == WHO[ranks]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run of two ranks, each with a wandb run, that was killed and went on."""
    root = tmp_path_factory.mktemp("tracking")
    args = [*LINE, "--wandb-ranks", "all", "--save-dir", root, "-e", "run"]
    port = str(free_port())
    processes = start_ranks(2, [SCRIPTS["tracking"], *args], root, MASTER_PORT=port)
    running = wait_for(lambda: last_logged_step(root / "run") >= 13, processes)
    for process in processes:
        process.kill()
        process.wait(timeout=20)
    assert running, (root / "rank0.log").read_text()
    [[first, _]] = run_or_fail(2, [("tracking", args)], root / "jobs")
    assert "step-00000010" in first["stdout"] and "was" not in first["stdout"]
    lines = (root / "run/metrics.jsonl").read_text().splitlines()
    assert len(lines) > len(metrics(root / "run")) == 21  # some steps were taken twice
    return root / "run"


@pytest.mark.slow
def test_wandb_has_what_metrics_has(killed):
    """Of rank 0 all; rank 1 sees the same training, at a speed and in a memory of its own."""
    found = offline.rows_of(killed)
    assert found["run"] == metrics(killed) and sorted(found) == ["run", "run-1"]
    for step in range(11, 21):
        assert offline.numbers(found["run-1"][step]) == offline.numbers(found["run"][step])
    ids = {path.name.partition("-")[2] for path in killed.glob("wandb/offline-run-*/*.wandb")}
    assert len(ids) == 2, "the resumed run is not the same wandb run"
    said = run_command(SCRIPTS["tracking"].with_name("offline.py"), killed).stdout
    assert "run: 21 steps, 21 of 21 as in metrics.jsonl\n" in said


@pytest.mark.slow
def test_tensorboard_has_what_metrics_has(killed):
    run_command(TOOL, killed, check=True)
    assert in_events(killed) == in_metrics(killed)


@pytest.mark.exhaustive
def test_a_run_outlives_the_service_of_wandb(tmp_path):
    args = [*LINE, "--num-steps", 90, "--eval-every", 90, "--checkpoint-every", 90]
    command = [SCRIPTS["tracking"], *args, "--save-dir", tmp_path, "-e", "run"]
    [process] = start_ranks(1, command, tmp_path)
    assert wait_for(lambda: last_logged_step(tmp_path / "run") >= 1, [process])
    services = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if child.name() == "wandb-core"
    ]
    for service in services:
        service.kill()
    assert services and process.wait(timeout=120) == 0, (tmp_path / "rank0.log").read_text()
    assert last_logged_step(tmp_path / "run") == 90
    assert "the training continues without wandb" in (tmp_path / "rank0.log").read_text()


@pytest.mark.slow
def test_what_a_kill_has_torn_is_left_out(killed, tmp_path):
    """Of a file that ends anywhere, the records before are read."""
    path = next(path for path in killed.glob("wandb/offline-run-*/run-*.wandb"))
    whole, data = list(offline.records(path)), path.read_bytes()
    for size in range(7, len(data), 101):
        (tmp_path / "torn.wandb").write_bytes(data[:size])
        found = list(offline.records(tmp_path / "torn.wandb"))
        assert found == whole[: len(found)]
