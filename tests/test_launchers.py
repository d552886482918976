"""Test that chapter 03 starts under any launcher, and that stopped runs continue."""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

from cluster.cluster import wait_until
from conftest import (
    SCRIPTS,
    SHORT,
    curves_of,
    difference,
    metrics,
    run_or_fail,
    start_ranks,
    user_error,
)
from harness import launch_command
from in_process import Captured
from marks import exhaustive, slow
from runs import last_logged_step

# srun sets these variables for rank 3 of four ranks. The local rank of rank 3 is 1.
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
SRUN |= {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
COMPLETE = dict.fromkeys([*NUMBERS, "MASTER_PORT"], "0") | {"MASTER_ADDR": "127.0.0.1"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
OPEN_MPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}


@pytest.mark.parametrize(
    "nodes, first",
    [("gpu[03-07,12],big1", "gpu03"), ("r[1-2]n[007,9]", "r1n007"), ("a,b[1-3]", "a")],
)
def test_ranks_under_srun_meet_on_the_first_node_at_a_port_of_their_step(
    load, monkeypatch, nodes, first
):
    monkeypatch.setattr(os, "environ", SRUN | {"SLURM_STEP_NODELIST": nodes})
    load("03").adopt_launcher()
    adopted = [os.environ[name] for name in (*NUMBERS, "MASTER_ADDR")]
    assert adopted == ["3", "4", "1", first]
    # The port is 10,000 + (10 × the job's id + the step's id) modulo 20,000.
    assert os.environ["MASTER_PORT"] == "10770"


TORCHRUN, LAUNCHER = "needs torchrun: torchrun --standalone", "with a launcher, such as torchrun"
INCOMPLETE = [
    ("02", {}, TORCHRUN),
    ("02", COMPLETE | {"RANK": ""}, TORCHRUN),
    ("03", {}, LAUNCHER),
    ("03", COMPLETE | {"LOCAL_RANK": ""}, f"{LAUNCHER}: LOCAL_RANK is not set"),
    ("03", COMPLETE | {"MASTER_PORT": ""}, f"{LAUNCHER}: MASTER_PORT is not set"),
    # mpirun gives each rank its number, but not the address of rank 0.
    ("03", OPEN_MPI, f"{LAUNCHER}: MASTER_ADDR is not set"),
    ("03", MPICH, f"{LAUNCHER}: MASTER_ADDR is not set"),
]


@pytest.mark.parametrize("name, environment, problem", INCOMPLETE)
def test_incomplete_variables_of_a_launcher_print_one_line(
    load, monkeypatch, capsys, name, environment, problem
):
    chapter = load(name)
    monkeypatch.setattr(chapter.time, "sleep", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["train_llm.py", "--device", "cpu"])
    monkeypatch.setattr(os, "environ", dict(environment))
    error = user_error(capsys, chapter.parse_args)
    assert error.count("\n") == 1 and problem in error
    if environment in (OPEN_MPI, MPICH):
        assert [os.environ[number] for number in NUMBERS] == ["3", "4", "1"]


def test_newest_start_of_a_run_owns_its_folder(load, one_rank_group, tmp_path, capsys):
    chapter = load("03")
    chapter.check_shared(tmp_path)
    stops = chapter.stop_requests(tmp_path)
    assert not any(next(stops) for _ in range(3))
    # Check that a newer process stops no older process before the newer process takes a step.
    chapter.check_shared(tmp_path)
    assert not any(next(stops) for _ in range(3))
    (tmp_path / "newest-start").write_text("process 7 on h2")
    # The first next() below ends an all-reduce that began before the newer start, so only the
    # second next() returns True.
    assert [next(stops), next(stops)] == [False, True]
    assert "process 7 on h2 has started the same run; this process stops" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, gpus, under_torchrun, expected",
    [
        # With srun --gpus-per-task=1, each rank sees one GPU, so local rank 1 uses GPU 0.
        ("03", 1, False, "set_device(cuda:0)"),
        ("03", 4, False, "set_device(cuda:1)"),
        ("03", 1, True, "error: local rank 1: torch sees only 1 GPU(s); start fewer ranks"),
        ("02", 1, True, "error: local rank 1: torch sees only 1 GPU(s); start fewer ranks"),
    ],
)
def test_rank_uses_the_gpu_of_its_number_or_its_only_gpu(
    load, monkeypatch, capsys, tmp_path, name, gpus, under_torchrun, expected
):
    def stop_at(device):
        raise SystemExit(f"set_device({device})")

    chapter = load(name)
    monkeypatch.setattr(chapter.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(chapter.torch.cuda, "set_device", stop_at)
    launched = {"TORCHELASTIC_RUN_ID": "77"} if under_torchrun else {}
    monkeypatch.setattr(os, "environ", {"LOCAL_RANK": "1", **launched})
    args = {"device": "cuda", "precision": "bf16", "save_dir": tmp_path, "experiment_name": "run"}
    with pytest.raises(SystemExit) as stop, contextlib.redirect_stdout(Captured()):
        chapter.setup(argparse.Namespace(**args))
    assert expected in f"{stop.value}{capsys.readouterr().err}"


# ---- runs that are stopped or killed -----------------------------------------------------------

# A run with these flags takes many steps in a second. During its long warmup, the learning rate of
# a step does not depend on --num-steps.
LONG = [*SHORT, "--seq-length", 32, "--config", "num_hidden_layers=1", "--lr", 0.3]
LONG += ["--warmup-steps", 10_000, "--checkpoint-every", 100, "--eval-every", 10_000, "-e", "run"]
ENDLESS = ["--num-steps", 10_000]


def uninterrupted(chapter, args, folder):
    """Train with the arguments `args` on two ranks, without an interruption; return the metrics."""
    return curves_of(folder, {2: {"complete": (chapter, args)}})["complete"]


@pytest.mark.parametrize(
    "chapter, request_stop",
    [
        ("03", "SIGTERM"),
        slow("03", "file"),
        exhaustive("03", "SIGUSR1"),
        slow("04", "SIGTERM"),
        exhaustive("05", "SIGTERM"),
    ],
)
def test_stopped_run_continues_without_a_difference(chapter, request_stop, tmp_path):
    """Request a stop by a signal or a file: all ranks must save and end after the same step.

    Then resume the run for ten steps.
    """
    args, run_dir = [*LONG, "--save-dir", tmp_path], tmp_path / "run"
    if chapter == "05":
        # Save often in the background, so that a save is likely to be under way at the stop.
        args += ["--checkpoint-async", "--checkpoint-every", 8]
    ranks = start_ranks(2, [SCRIPTS[chapter], *args, *ENDLESS], tmp_path)
    wait_until(lambda: last_logged_step(run_dir) >= 5, 150, "step 5")
    if request_stop == "file":
        (run_dir / "stop").touch()
    else:
        ranks[1].send_signal(getattr(signal, request_stop))
    assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
    output = (tmp_path / "rank0.log").read_text()
    step = int(re.search(r"^stopped at step (\d+);", output, re.M)[1])
    assert (run_dir / f"checkpoints/step-{step:08}").exists()
    assert not (run_dir / "model").exists() and "terminate called" not in output
    # Resume the run for ten steps. The script itself removes the file `stop` when it starts.
    args += ["--num-steps", step + 10]
    [[first, _]] = run_or_fail(2, [(chapter, args)], tmp_path / "ranks")
    assert f"/step-{step:08}" in first["stdout"] and "finished" in first["stdout"]
    assert difference(uninterrupted(chapter, args, tmp_path), metrics(run_dir)) == 0.0


def start_under_torchrun(chapter, args, folder):
    """Start a run under torchrun; wait for step 15, and return torchrun and its workers."""
    env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = launch_command(2, ["--max-restarts", 3, SCRIPTS[chapter], *args])
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    launcher = subprocess.Popen(list(map(str, command)), env=env, **options)
    wait_until(lambda: launcher.poll() or last_logged_step(folder / "run") >= 15, 150, "step 15")
    children = psutil.Process(launcher.pid).children()
    return launcher, [child for child in children if "train_llm.py" in str(child.cmdline())]


@pytest.mark.slow
@pytest.mark.parametrize("chapter", ["02", exhaustive("03")])
def test_worker_dies_with_its_launcher(chapter, tmp_path):
    """Kill torchrun with SIGKILL, and restart the run; no old worker may disturb the new run."""
    args = [*LONG, "--checkpoint-every", 10, "--save-dir", tmp_path]
    launcher, workers = start_under_torchrun(chapter, [*args, *ENDLESS], tmp_path)
    assert len(workers) == 2
    launcher.kill()
    # Wait until the killed torchrun has ended. On a busy machine, this takes a while, and the
    # workers log steps until then.
    launcher.wait()
    args += ["--num-steps", last_logged_step(tmp_path / "run") + 10]
    [[first, _]] = run_or_fail(2, [(chapter, args)], tmp_path / "again")
    # Accept zombies, because process 1 may take a while to remove a killed worker.
    _, left = psutil.wait_procs(workers, timeout=10)
    states = [worker.status() for worker in left]
    assert set(states) <= {psutil.STATUS_ZOMBIE}, "a worker outlived torchrun"
    assert "continuing from" in first["stdout"]
    assert difference(uninterrupted(chapter, args, tmp_path), metrics(tmp_path / "run")) == 0.0


@pytest.mark.slow
def test_killed_worker_is_restarted_by_torchrun(tmp_path):
    args = [*LONG, "--num-steps", 300, "--checkpoint-every", 10, "--save-dir", tmp_path]
    launcher, workers = start_under_torchrun("03", args, tmp_path)
    workers[-1].kill()
    output, _ = launcher.communicate(timeout=150)
    assert launcher.returncode == 0 and "continuing from" in output, output
    assert difference(uninterrupted("03", args, tmp_path), metrics(tmp_path / "run")) == 0.0
