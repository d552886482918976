"""Chapter 03 learns its rank from any launcher, and a run that is stopped or killed continues."""

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
    ROOT,
    SCRIPTS,
    SHORT,
    difference,
    has_logged,
    metrics,
    run_command,
    run_or_fail,
    start_ranks,
    torchrun,
    user_error,
)
from in_process import set_up_chapter

# What each launcher sets to the rank, the number of ranks, and the rank on the node.
LAUNCHERS = {
    "torchrun": "RANK WORLD_SIZE LOCAL_RANK",
    "Open MPI": "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK",
    "MPICH": "PMI_RANK PMI_SIZE MPI_LOCALRANKID",
    "srun": "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID",
}
RENDEZVOUS = {"MASTER_ADDR": "h1", "MASTER_PORT": "29400"}
STEP = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "h[1-2]"}


def variables(launcher, rank="3"):
    """Return the variables of a rank of four, which is number 1 on its node."""
    return dict(zip(LAUNCHERS[launcher].split(), (rank, "4", "1"), strict=True))


@pytest.fixture
def adopt(load, monkeypatch):
    """Return a function that gives the chapter these variables alone, and returns them after."""

    chapter = load("03")

    def adopt(found):
        monkeypatch.setattr(os, "environ", dict(found))
        chapter.adopt_launcher()
        return os.environ

    return adopt


UNDER_SRUN = variables("srun", rank="0") | STEP | variables("torchrun")


@pytest.mark.parametrize("found", [*map(variables, LAUNCHERS), UNDER_SRUN])
def test_rank_comes_from_the_launcher_and_under_srun_from_torchrun(adopt, found):
    expected = variables("torchrun") | RENDEZVOUS
    assert expected.items() <= adopt(found | RENDEZVOUS).items()


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("h1", "h1"),
        ("h[1-2]", "h1"),
        ("gpu[03-07,12],big1", "gpu03"),
        ("r[1-2]n[007,9]", "r1n007"),
        ("a,b[1-3]", "a"),
    ],
)
def test_ranks_under_srun_meet_on_the_first_node_at_a_port_of_their_step(adopt, nodes, first):
    adopted = adopt(variables("srun") | STEP | {"SLURM_STEP_NODELIST": nodes})
    assert (adopted["MASTER_ADDR"], adopted["MASTER_PORT"]) == (first, "10770")


@pytest.mark.parametrize(
    "found, problem",
    [
        ({}, "start this script with a launcher, such as torchrun"),
        (RENDEZVOUS, "start this script with a launcher, such as torchrun"),
        (variables("Open MPI"), "MASTER_ADDR is not set; pass it and MASTER_PORT with -x"),
    ],
)
def test_missing_launcher_or_address_is_reported(load, adopt, monkeypatch, capsys, found, problem):
    chapter = load("03")
    monkeypatch.setattr(chapter.time, "sleep", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["train_llm.py", "--device", "cpu"])
    adopt(found)
    error = user_error(capsys, chapter.parse_args)
    assert error.count("\n") == 1 and problem in error


@pytest.fixture
def gpu_of_local_rank_1(load, monkeypatch, tmp_path):
    """Return a function that returns the GPU that setup() selects if there are `gpus` GPUs."""

    def select(name, gpus, under_torchrun):
        chapter, selected = load(name), []
        monkeypatch.setattr(chapter.torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(chapter.torch.cuda, "set_device", selected.append)
        # The first collective of setup() is on the GPUs.
        zeros = chapter.torch.zeros
        monkeypatch.setattr(chapter.torch, "zeros", lambda size, device: zeros(size))
        monkeypatch.setattr(chapter.dist, "all_reduce", lambda tensor: None)
        launched = {"TORCHELASTIC_RUN_ID": "77"} if under_torchrun else {}
        monkeypatch.setattr(os, "environ", {"LOCAL_RANK": "1", **launched})
        set_up_chapter(chapter, monkeypatch, tmp_path, device="cuda", precision="bf16")
        return selected.pop().index

    return select


@pytest.mark.parametrize("gpus, under_torchrun, gpu", [(1, False, 0), (4, False, 1), (4, True, 1)])
def test_rank_uses_the_gpu_of_its_number_or_its_only_gpu(
    gpu_of_local_rank_1, gpus, under_torchrun, gpu
):
    """With srun --gpus-per-task=1, each rank sees one GPU."""
    assert gpu_of_local_rank_1("03", gpus, under_torchrun) == gpu


@pytest.mark.parametrize("name", ["02", "03"])
def test_rank_without_a_gpu_is_reported(gpu_of_local_rank_1, capsys, name):
    error = user_error(capsys, gpu_of_local_rank_1, name, 1, True)
    assert "error: local rank 1: torch sees only 1 GPU(s); start fewer ranks" in error


@pytest.mark.parametrize("job", ["train", "srun-direct"])
def test_last_words_of_a_job_have_the_reason_of_nccl(tmp_path, job):
    """The reason is in the line after "Last error:"."""
    source = (ROOT / f"03-job-launchers/slurm/{job}.sbatch").read_text()
    command = re.search(r"^ +(awk '/Last.*?tail -n 5)$", source, re.M | re.S)[1]
    lines = ["[W123 c10d.cpp] Warning: error: noise", "RuntimeError: NCCL error in: init.cpp"]
    lines += ["ncclSystemError: System call failed.", "Last error:", "no route to host h2", "end"]
    (tmp_path / "0.log").write_text("\n".join(lines))
    done = run_command("bash", "-c", command, env=os.environ | {"logs": str(tmp_path)})
    assert done.stdout.splitlines() == [lines[1], lines[2], "Last error: no route to host h2"]


# ---- runs that are stopped or killed -----------------------------------------------------------

LONG = [*SHORT, "--seq-length", 32, "--num-steps", 150]
LONG += ["--checkpoint-every", 100, "--eval-every", 150]


def uninterrupted(chapter, folder):
    """Return the metrics of a run that nothing interrupts."""
    run_or_fail(2, [(chapter, [*LONG, "--save-dir", folder, "-e", "whole"])], folder / "ranks")
    return metrics(folder / "whole")


@pytest.mark.parametrize(
    "chapter, request_stop",
    [
        ("03", "SIGTERM"),
        pytest.param("03", "file", marks=pytest.mark.slow),
        pytest.param("03", "SIGUSR1", marks=pytest.mark.exhaustive),
        pytest.param("04", "SIGTERM", marks=pytest.mark.slow),
        pytest.param("05", "SIGTERM", marks=pytest.mark.exhaustive),
    ],
)
def test_stopped_run_continues_without_a_difference(chapter, request_stop, tmp_path):
    """Ask one rank to stop. All ranks stop after the same step, and save."""
    args, run_dir = [*LONG, "--save-dir", tmp_path, "-e", "run"], tmp_path / "run"
    if chapter == "05":
        # Let the stop meet a save.
        args += ["--checkpoint-async", "--checkpoint-every", 8]
    ranks = start_ranks(2, [SCRIPTS[chapter], *args], tmp_path)
    wait_until(lambda: has_logged(run_dir, 5), 150, "step 5")
    if request_stop == "file":
        (run_dir / "stop").touch()
    else:
        ranks[1].send_signal(getattr(signal, request_stop))
    assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
    output = (tmp_path / "rank0.log").read_text()
    step = int(re.search(r"^stopped at step (\d+);", output, re.M)[1])
    assert step < 150 and (run_dir / f"checkpoints/step-{step:08}").exists()
    assert not (run_dir / "model").exists() and "terminate called" not in output
    # A new run removes the file `stop`, so it does not stop again.
    [[first, _]] = run_or_fail(2, [(chapter, args)], tmp_path / "ranks")
    assert f"/step-{step:08}" in first["stdout"] and "finished" in first["stdout"]
    assert difference(uninterrupted(chapter, tmp_path), metrics(run_dir)) == 0.0


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGHUP"])
def test_request_to_stop_travels_during_a_step_and_nobody_waits_for_it(
    load, one_rank_group, monkeypatch, tmp_path, name
):
    """The exchange of a request ends before the next step, not before its own step."""
    chapter, handlers, waits = load("03"), {}, []
    monkeypatch.setattr(chapter.signal, "signal", handlers.__setitem__)
    exchange = argparse.Namespace(wait=lambda: waits.append("wait"))
    monkeypatch.setattr(chapter.dist, "all_reduce", lambda *_, async_op, **__: exchange)
    stops = chapter.stop_requests(tmp_path)
    assert (next(stops), waits) == (False, [])
    handlers[getattr(signal, name)](name, None)
    assert (next(stops), waits) == (False, ["wait"])
    assert (next(stops), waits) == (True, ["wait", "wait"])


@contextlib.contextmanager
def under_torchrun(chapter, args, run_dir, **options):
    """Run a chapter under torchrun; yield torchrun and its workers, once step 15 is logged."""
    launcher = torchrun(chapter, *args, stderr=subprocess.STDOUT, **options)
    try:
        wait_until(lambda: launcher.poll() or has_logged(run_dir, 15), 150, "step 15")
        children = psutil.Process(launcher.pid).children()
        yield launcher, [child for child in children if "train_llm.py" in str(child.cmdline())]
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(launcher.pid).children(recursive=True):
                process.kill()
        launcher.kill()
        launcher.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("chapter", ["02", pytest.param("03", marks=pytest.mark.exhaustive)])
def test_worker_dies_with_its_launcher(chapter, tmp_path):
    """After kill -9 of torchrun, start the same run at once. No old worker disturbs it."""
    args = [*LONG, "--checkpoint-every", 10, "--save-dir", tmp_path, "-e", "run"]
    with under_torchrun(chapter, args, tmp_path / "run") as (launcher, workers):
        assert len(workers) == 2
        launcher.kill()
        [[first, _]] = run_or_fail(2, [(chapter, args)], tmp_path / "again")
        assert not any(worker.is_running() for worker in workers)
    assert "continuing from" in first["stdout"]
    assert difference(uninterrupted(chapter, tmp_path), metrics(tmp_path / "run")) == 0.0


@pytest.mark.slow
def test_killed_worker_is_restarted_by_torchrun(tmp_path):
    args = [*LONG, "--checkpoint-every", 10, "--save-dir", tmp_path, "-e", "run"]
    env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    options = {"launcher": ["--max-restarts", "3"], "env": env}
    with under_torchrun("03", args, tmp_path / "run", **options) as (launcher, workers):
        workers[-1].kill()
        output, _ = launcher.communicate(timeout=150)
    assert launcher.returncode == 0 and "continuing from" in output, output
    assert difference(uninterrupted("03", tmp_path), metrics(tmp_path / "run")) == 0.0


def test_missing_rank_is_waited_for_as_long_as_the_flag_says(tmp_path):
    args = [*SHORT, "--dist-timeout", 3, "--save-dir", tmp_path / "runs"]
    first, second = start_ranks(2, [SCRIPTS["03"], *args], tmp_path)
    second.kill()
    assert first.wait(timeout=120) == 1
    assert "1/2 clients joined" in (tmp_path / "rank0.log").read_text()
    assert not [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
