"""Chapter 03: who started it does not matter, and it may be stopped, restarted and left alone."""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import textwrap

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

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
RENDEZVOUS = {"MASTER_ADDR": "h1", "MASTER_PORT": "29400"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
OPEN_MPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
SRUN |= {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[03-07,12],big1"}


@pytest.fixture
def launched(load, monkeypatch):
    """Return a function that sets these variables alone, and lets the chapter read them."""
    chapter = load("03")
    for name in list(os.environ):
        if name.startswith(("SLURM", "OMPI", "PMI", "MPI", "MASTER")) or name in TORCHRUN:
            monkeypatch.delenv(name)

    def adopt(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        chapter.adopt_launcher()
        return {name: os.environ.get(name) for name in (*TORCHRUN, *RENDEZVOUS)}

    yield adopt
    for name in (*TORCHRUN, *RENDEZVOUS):
        os.environ.pop(name, None)


UNDER_SRUN = SRUN | {"SLURM_PROCID": "0"} | TORCHRUN


@pytest.mark.parametrize("variables", [TORCHRUN, UNDER_SRUN, OPEN_MPI, MPICH])
def test_ranks_come_from_the_launcher(launched, variables):
    """Torchrun under srun is torchrun."""
    assert launched(variables | RENDEZVOUS) == TORCHRUN | RENDEZVOUS


def test_srun_says_where_to_meet(launched):
    """Rank 0 is on the list's first node, and no two steps of one cluster meet at one port."""
    found = launched(SRUN)
    assert found == TORCHRUN | {"MASTER_ADDR": "gpu03", "MASTER_PORT": "10770"}


@pytest.mark.parametrize(
    "nodes, first",
    [("h1", "h1"), ("h[1-2]", "h1"), ("r[1-2]n[007,9]", "r1n007"), ("a,b[1-3]", "a")],
)
def test_first_node(launched, nodes, first):
    assert launched(SRUN | {"SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == first


@pytest.mark.parametrize(
    "variables, problem",
    [
        ({}, "start this script with a launcher, such as torchrun"),
        (RENDEZVOUS, "start this script with a launcher, such as torchrun"),
        (OPEN_MPI, "MASTER_ADDR is not set; pass it and MASTER_PORT with -x (Open MPI)"),
    ],
)
def test_missing_launcher_or_address_is_reported(
    load, launched, monkeypatch, capsys, variables, problem
):
    chapter = load("03")
    monkeypatch.setattr(chapter.time, "sleep", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["train_llm.py", "--device", "cpu"])
    launched(variables)
    error = user_error(capsys, chapter.parse_args)
    assert error.count("\n") == 1 and problem in error


@pytest.mark.parametrize("gpus, torchrun, index", [(1, False, 0), (4, False, 1), (4, True, 1)])
def test_a_task_may_see_but_one_gpu(load, monkeypatch, tmp_path, gpus, torchrun, index):
    """As under srun --gpus-per-task=1; local rank 1 then takes its only one."""
    assert device_of_local_rank_1(load("03"), monkeypatch, tmp_path, gpus, torchrun) == index


@pytest.mark.parametrize("name", ["02", "03"])
def test_a_rank_without_a_gpu_says_so(load, monkeypatch, tmp_path, capsys, name):
    said = user_error(capsys, device_of_local_rank_1, load(name), monkeypatch, tmp_path, 1, True)
    assert "error: local rank 1: torch sees only 1 GPU(s); start fewer ranks" in said


def device_of_local_rank_1(chapter, monkeypatch, tmp_path, gpus, torchrun):
    """Return the number of the GPU that `setup` takes on a machine that seems to have some."""
    taken = []
    monkeypatch.setattr(chapter.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(chapter.torch.cuda, "set_device", lambda device: taken.append(device.index))
    # The first collective of setup() is on the GPUs.
    zeros = chapter.torch.zeros
    monkeypatch.setattr(chapter.torch, "zeros", lambda size, device: zeros(size))
    monkeypatch.setattr(chapter.dist, "all_reduce", lambda tensor: None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "77")
    set_up_chapter(chapter, monkeypatch, tmp_path, device="cuda", precision="bf16")
    return taken.pop()


@pytest.mark.parametrize("job", ["train", "srun-direct"])
def test_a_jobs_last_words_have_nccls_reason(tmp_path, job):
    """It is in the last line of NCCL's error, behind one that only announces it."""
    source = (ROOT / f"03-job-launchers/slurm/{job}.sbatch").read_text()
    command = re.search(r"^ +(awk '/Last.*?tail -n 5)$", source, re.M | re.S)[1]
    lines = ["[W123 c10d.cpp] Warning: error: noise", "RuntimeError: NCCL error in: init.cpp"]
    lines += ["ncclSystemError: System call failed.", "Last error:", "no route to host h2", "end"]
    (tmp_path / "0.log").write_text("\n".join(lines))
    done = run_command("bash", "-c", command, env=os.environ | {"logs": str(tmp_path)})
    assert done.stdout.splitlines() == [lines[1], lines[2], "Last error: no route to host h2"]


# ---- stopping --------------------------------------------------------------------------------


LONG = [*SHORT, "--seq-length", 32, "--num-steps", 150]
LONG += ["--checkpoint-every", 100, "--eval-every", 150]


@contextlib.contextmanager
def running(run_dir, step, chapter, *args, **options):
    """A chapter under torchrun, once a step is logged; in the end nothing is left of it."""
    process = torchrun(chapter, *args, stderr=subprocess.STDOUT, **options)
    try:
        wait_until(
            lambda: process.poll() is not None or has_logged(run_dir, step), 150, f"step {step}"
        )
        yield process
    finally:
        alive = process.poll() is None  # torchrun's ranks have sessions of their own
        for left in psutil.Process(process.pid).children(recursive=True) if alive else []:
            left.kill()
        process.kill()
        process.communicate()


def workers(process):
    """Return the processes that train: torchrun's children that run the script."""
    children = psutil.Process(process.pid).children()
    return [child for child in children if any("train_llm.py" in word for word in child.cmdline())]


FURTHER = {"05": ["--checkpoint-async", "--checkpoint-every", 8]}  # so that a stop meets a save


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a function that gives the metrics of a chapter's run that was never stopped."""

    @functools.cache
    def metrics_of(chapter):
        root = tmp_path_factory.mktemp("whole")
        run_or_fail(2, [(chapter, [*LONG, "--save-dir", root, "-e", "whole"])], root / "ranks")
        return metrics(root / "whole")

    return metrics_of


def ask(how, process, run_dir):
    """Ask a run to stop."""
    if how == "SIGTERM to torchrun":
        process.send_signal(signal.SIGTERM)
    elif how == "SIGUSR1 to a rank":
        workers(process)[-1].send_signal(signal.SIGUSR1)
    else:
        (run_dir / "stop").touch()


@pytest.mark.parametrize(
    "chapter, how",
    [
        ("03", "SIGTERM to torchrun"),
        pytest.param("03", "SIGUSR1 to a rank", marks=pytest.mark.slow),
        pytest.param("03", "a file", marks=pytest.mark.slow),
        pytest.param("04", "SIGTERM to torchrun", marks=pytest.mark.slow),
        pytest.param("05", "SIGTERM to torchrun", marks=pytest.mark.slow),
    ],
)
def test_stopped_and_continued(chapter, how, whole, tmp_path):
    """All ranks stop at one step, whose checkpoint is there; the curve goes on bit by bit."""
    args, run_dir = [*LONG, "--save-dir", tmp_path, "-e", "run"], tmp_path / "run"
    args += FURTHER.get(chapter, [])
    with running(run_dir, 5, chapter, *args) as process:
        ask(how, process, run_dir)
        output, _ = process.communicate(timeout=60)
    [line] = [line for line in output.splitlines() if line.startswith("stopped at step")]
    step = int(line.split()[3].rstrip(";"))
    assert step < 150 and (run_dir / f"checkpoints/step-{step:08}").exists()
    assert not (run_dir / "model").exists()
    assert process.returncode == (1 if how == "SIGTERM to torchrun" else 0)  # 1 is torchrun's own
    assert "terminate called" not in output
    # A new run removes the file `stop`, so it does not stop again.
    [[first, _]] = run_or_fail(2, [(chapter, args)], tmp_path / "ranks")
    assert "continuing from" in first["stdout"] and "finished" in first["stdout"]
    assert difference(whole(chapter), metrics(run_dir)) == 0.0


def test_nobody_waits_to_agree(tmp_path):
    """A rank that is a second behind costs the other nothing, and both learn at the same step."""
    script = tmp_path / "agree.py"
    script.write_text(
        textwrap.dedent("""
            import importlib.util, json, os, pathlib, signal, sys, time
            spec = importlib.util.spec_from_file_location("chapter", sys.argv[1])
            chapter = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(chapter)
            import torch.distributed as dist
            dist.init_process_group("gloo")
            rank = dist.get_rank()
            chapter.patient_group()
            stops = chapter.stop_requests(pathlib.Path(sys.argv[2]))
            dist.barrier()
            began = time.monotonic()
            if rank == 1:
                time.sleep(1)
            answers = [next(stops)]
            took = time.monotonic() - began - rank
            if rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            answers += [next(stops) for _ in range(4)]
            result = json.dumps({"rank": rank, "took": took, "answers": answers})
            pathlib.Path(sys.argv[2], f"rank{rank}.json").write_text(result)
            dist.barrier()
            dist.destroy_process_group()
        """)
    )
    ranks = start_ranks(2, [script, SCRIPTS["03"], tmp_path], tmp_path)
    log = tmp_path / "rank0.log"
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0], log.read_text()
    for rank in (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)):
        assert rank["took"] < 0.5, "it waited for the other"
        assert rank["answers"] == [False, False, True, True, True]


# ---- launchers that die ----------------------------------------------------------------------


@pytest.mark.parametrize("chapter", ["02", pytest.param("03", marks=pytest.mark.slow)])
def test_no_worker_outlives_its_launcher(tmp_path, chapter, whole):
    """kill -9 of torchrun alone, and at once the same command again: one run, the same curve."""
    args, run_dir = [*LONG, "--save-dir", tmp_path, "-e", "run"], tmp_path / "run"
    args += ["--checkpoint-every", 10]
    with running(run_dir, 15, chapter, *args) as process:
        members = workers(process)
        assert len(members) == 2
        process.kill()
        with running(run_dir, 15, chapter, *args) as again:
            _, alive = psutil.wait_procs(members, timeout=3)
            assert not [member for member in alive if member.status() != psutil.STATUS_ZOMBIE]
            output, _ = again.communicate(timeout=150)
    assert again.returncode == 0 and "continuing from" in output, output
    assert difference(whole(chapter), metrics(run_dir)) == 0.0


@pytest.mark.slow
def test_a_killed_worker_is_restarted(tmp_path, whole):
    """kill -9 of a worker: torchrun starts all again, and the run ends well."""
    args, run_dir = [*LONG, "--save-dir", tmp_path, "-e", "run"], tmp_path / "run"
    env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    options = {"launcher": ["--max-restarts", "3"], "env": env}
    with running(run_dir, 30, "03", *args, "--checkpoint-every", 20, **options) as process:
        workers(process)[-1].kill()
        output, _ = process.communicate(timeout=150)
    assert process.returncode == 0 and "continuing from" in output, output
    assert difference(whole("03"), metrics(run_dir)) == 0.0


# ---- flags -----------------------------------------------------------------------------------


def test_who_does_not_come_is_waited_for_as_long_as_the_flag_says(tmp_path):
    """With half of the ranks missing, the others give up after --dist-timeout."""
    args = [*SHORT, "--dist-timeout", 3, "--save-dir", tmp_path / "runs"]
    first, second = start_ranks(2, [SCRIPTS["03"], *args], tmp_path)
    second.kill()
    said = tmp_path / "rank0.log"
    assert first.wait(timeout=120) == 1 and "1/2 clients joined" in said.read_text()
    assert not [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
