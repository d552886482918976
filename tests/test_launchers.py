"""Chapter 03: who started it does not matter, and it may be stopped, restarted and left alone."""

import fcntl
import functools
import json
import os
import select
import signal
import subprocess
import sys
import termios
import textwrap
import threading
import time

import psutil
import pytest

from conftest import (
    ROOT,
    SCRIPTS,
    SHORT,
    difference,
    family,
    free_port,
    kill_all,
    metrics,
    run_well,
)

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
RENDEZVOUS = {"MASTER_ADDR": "h1", "MASTER_PORT": "29400"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
DEEPSPEED = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[03-07,12],big1",
}
PREFIXES = ("SLURM", "OMPI", "PMI", "MPI", "MASTER", "LOCAL_")


@pytest.fixture
def launched(load, monkeypatch):
    """Return a function that sets these variables alone, and lets the chapter read them."""
    chapter = load("03")
    for name in list(os.environ):
        if name.startswith(PREFIXES) or name in TORCHRUN:
            monkeypatch.delenv(name)

    monkeypatch.setattr(chapter.time, "sleep", lambda _: None)  # before ranks say what is wrong

    def adopt(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        chapter.adopt_launcher()
        return {name: os.environ.get(name) for name in (*TORCHRUN, *RENDEZVOUS)}

    yield adopt
    for name in (*TORCHRUN, *RENDEZVOUS):
        os.environ.pop(name, None)


@pytest.mark.parametrize("variables", [TORCHRUN, OPEN_MPI, MPICH, DEEPSPEED])
def test_ranks_come_from_the_launcher(launched, variables):
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


def test_torchrun_under_srun_is_torchrun(launched):
    found = launched(SRUN | {"SLURM_PROCID": "0"} | TORCHRUN | RENDEZVOUS)
    assert found == TORCHRUN | RENDEZVOUS


def test_one_node_meets_at_home(launched):
    found = launched(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert found["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize("variables", [TORCHRUN, OPEN_MPI, MPICH, DEEPSPEED, SRUN])
def test_half_of_the_variables_is_an_error(launched, variables, capsys):
    """It names one that is there, one that is not, and who should have set both."""
    rest = dict(variables)
    del rest[gone := list(variables)[1]]
    with pytest.raises(SystemExit) as stop:
        launched(rest | RENDEZVOUS)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"{gone} is not" in error
    assert any(f"{name} is set" in error for name in rest)


@pytest.mark.parametrize("gone", RENDEZVOUS)
def test_no_place_to_meet_is_an_error(launched, gone, capsys):
    rest = dict(RENDEZVOUS)
    del rest[gone]
    with pytest.raises(SystemExit):
        launched(OPEN_MPI | rest | {"OMPI_COMM_WORLD_RANK": "0"})
    assert f"{gone} is not set: give mpirun (Open MPI)" in capsys.readouterr().err


# ---- stopping --------------------------------------------------------------------------------


LONG = [*SHORT, "--seq-length", 32, "--num-steps", 60]
LONG += ["--checkpoint-every", 50, "--eval-every", 60]


def start(*args, launcher=(), chapter="03", **options):
    """Start a chapter under torchrun on two ranks; return the process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", *launcher]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | options
    return subprocess.Popen([*command, str(SCRIPTS[chapter]), *map(str, args)], **options)


def wait_for_step(run_dir, step, process):
    """Wait until a step is logged."""
    path, deadline = run_dir / "metrics.jsonl", time.monotonic() + 150
    while not (path.exists() and f'"step": {step},' in path.read_text()):
        assert time.monotonic() < deadline and process.poll() is None, "it never got there"
        time.sleep(0.05)


def workers(process):
    """Return the processes that train: torchrun's children that run the script."""
    children = psutil.Process(process.pid).children()
    return [child for child in children if any("train_llm.py" in word for word in child.cmdline())]


FURTHER = {"05": ["--checkpoint-async", "--checkpoint-every", 3]}  # so that a stop meets a save


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a function that gives the metrics of a chapter's run that was never stopped."""

    @functools.cache
    def metrics_of(chapter):
        root = tmp_path_factory.mktemp("whole")
        run_well(2, [(chapter, [*LONG, "--save-dir", root, "-e", "whole"])], root / "ranks")
        return metrics(root / "whole")

    return metrics_of


def ask(how, process, run_dir):
    """Ask a run to stop."""
    if how == "SIGTERM to torchrun":
        process.send_signal(signal.SIGTERM)
    elif how == "SIGUSR1 to rank 1":
        last = max(workers(process), key=lambda worker: int(worker.environ()["RANK"]))
        last.send_signal(signal.SIGUSR1)
    else:
        (run_dir / "stop").touch()


@pytest.mark.parametrize(
    "chapter, how",
    [
        ("03", "SIGTERM to torchrun"),
        pytest.param("03", "SIGUSR1 to rank 1", marks=pytest.mark.slow),
        pytest.param("03", "a file", marks=pytest.mark.slow),
        pytest.param("04", "SIGTERM to torchrun", marks=pytest.mark.slow),
        pytest.param("05", "SIGTERM to torchrun", marks=pytest.mark.slow),
    ],
)
def test_stopped_and_continued(chapter, how, whole, tmp_path):
    """All ranks stop at one step, whose checkpoint is there; the curve goes on bit by bit."""
    args, run_dir = [*LONG, "--save-dir", tmp_path, "-e", "run"], tmp_path / "run"
    args += FURTHER.get(chapter, [])
    process = start(*args, chapter=chapter)
    try:
        wait_for_step(run_dir, 5, process)
        ask(how, process, run_dir)
        output, _ = process.communicate(timeout=60)
    finally:
        kill_all(process, family(process) if process.poll() is None else [])
    [line] = [line for line in output.splitlines() if line.startswith("stopped at step")]
    step = int(line.split()[3].rstrip(":"))
    assert step < 60 and (run_dir / f"checkpoints/step-{step:08}").exists()
    assert not (run_dir / "model").exists()
    assert process.returncode == (1 if how == "SIGTERM to torchrun" else 0)  # 1 is torchrun's own
    assert "terminate called" not in output
    [[first, _]] = run_well(2, [(chapter, args)], tmp_path / "ranks")  # the file is no request now
    assert "continuing from" in first["stdout"] and "finished" in first["stdout"]
    assert difference(whole(chapter), metrics(run_dir)) == 0.0


def test_nobody_waits_to_agree(tmp_path):
    """A rank that is a second behind costs the other nothing, and both learn at the same step."""
    script = tmp_path / "agree.py"
    script.write_text(
        textwrap.dedent("""
            import importlib.util, json, os, pathlib, sys, time
            spec = importlib.util.spec_from_file_location("chapter", sys.argv[1])
            chapter = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(chapter)
            import torch.distributed as dist
            dist.init_process_group("gloo")
            rank = dist.get_rank()
            chapter.patient_group()
            request = chapter.StopRequest(pathlib.Path(sys.argv[2]))
            dist.barrier()
            if rank == 1:
                time.sleep(1)
                request.signalled = True
            began = time.monotonic()
            answers = [request.agreed()]
            took = time.monotonic() - began
            answers += [request.agreed() for _ in range(3)]
            result = json.dumps({"rank": rank, "took": took, "answers": answers})
            pathlib.Path(sys.argv[2], f"rank{rank}.json").write_text(result)
            dist.barrier()
            dist.destroy_process_group()
        """)
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), str(script), str(SCRIPTS["03"]), str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)):
        assert rank["took"] < 0.5, "it waited for the other"
        assert rank["answers"] == [False, True, True, True]


def test_a_slow_save_is_told(load, monkeypatch, capsys):
    chapter = load("03")
    monkeypatch.setenv("RANK", "0")
    chapter.warn_if_slow(29)
    assert capsys.readouterr().out == ""
    chapter.warn_if_slow(31)
    assert "warning: saving took 31 s, and a launcher may kill after 30" in capsys.readouterr().out
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")
    chapter.warn_if_slow(31)
    assert capsys.readouterr().out == ""


# ---- launchers that die ----------------------------------------------------------------------


def test_no_worker_outlives_its_launcher(tmp_path):
    args = [*LONG, "--num-steps", 100_000, "--save-dir", tmp_path, "-e", "run"]
    process = start(*args)
    members = []
    try:
        wait_for_step(tmp_path / "run", 3, process)
        members = workers(process)
        assert len(members) == 2
        process.kill()
        _, alive = psutil.wait_procs(members, timeout=10)
        assert not alive
        assert list((tmp_path / "run/checkpoints").glob("step-*")), "they saved first"
    finally:
        kill_all(process, [process, *members] if process.poll() is None else members)


@pytest.mark.slow
def test_no_worker_waits_for_one_that_cannot_answer(tmp_path):
    """With its launcher gone, a rank ends in ten seconds, though the other hangs."""
    process = start(*LONG, "--num-steps", 100_000, "--save-dir", tmp_path, "-e", "run")
    members = []
    try:
        wait_for_step(tmp_path / "run", 3, process)
        members = workers(process)
        members[1].suspend()
        process.kill()
        members[0].wait(timeout=15)  # ten, and some for a busy machine
    finally:
        kill_all(process, [process, *members] if process.poll() is None else members)


def test_a_lost_terminal_is_a_request_to_stop(tmp_path):
    """As when an ssh connection breaks: torchrun passes SIGHUP on, and all ranks save."""
    ours, theirs = os.openpty()
    process = start(
        *LONG,
        *("--num-steps", 100_000, "--save-dir", tmp_path, "-e", "run"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    looking = threading.Event()
    looking.set()

    def look():
        while looking.is_set():
            if select.select([ours], [], [], 0.1)[0]:
                os.read(ours, 1 << 16)

    person = threading.Thread(target=look)
    person.start()
    members = []
    try:
        wait_for_step(tmp_path / "run", 3, process)
        members = workers(process)
        looking.clear()
        person.join()
        os.close(ours)
        _, alive = psutil.wait_procs(members, timeout=20)
        assert not alive
        assert list((tmp_path / "run/checkpoints").glob("step-*"))
        process.wait(timeout=20)
    finally:
        looking.clear()
        kill_all(process, [process, *members] if process.poll() is None else members)


def killed_and_restarted(tmp_path, name):
    """Kill a worker with -9; torchrun starts all again, and the run ends well. Return metrics."""
    args = [*LONG, "--checkpoint-every", 20, "--num-steps", 60, "--save-dir", tmp_path, "-e", name]
    settings = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    process = start(*args, launcher=["--max-restarts", "3"], env=settings)
    try:
        wait_for_step(tmp_path / name, 30, process)
        workers(process)[-1].kill()
        output, _ = process.communicate(timeout=150)
    finally:
        kill_all(process, family(process) if process.poll() is None else [])
    assert process.returncode == 0, output
    assert "continuing from" in output
    return metrics(tmp_path / name)


@pytest.mark.slow
def test_a_killed_worker_is_restarted_ten_times_out_of_ten(tmp_path):
    runs = [killed_and_restarted(tmp_path, f"run-{number}") for number in range(10)]
    assert sorted(runs[0]) == list(range(61))
    assert all(difference(runs[0], other) == 0.0 for other in runs[1:])


# ---- flags -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_other_ranks_write_to_files(tmp_path):
    process = start(*SHORT, "--save-dir", tmp_path, "-e", "run", "--rank-logs", cwd=ROOT)
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    logs = tmp_path / "run/logs"
    assert [path.name for path in logs.iterdir()] == ["rank-00001.log"]
    assert (logs / "rank-00001.log").read_text().startswith("rank 1 on ")
    assert "finished: " in output and "rank 1 on" not in output


def test_who_does_not_come_is_told_in_one_line(tmp_path):
    """With half of the ranks missing, the others give up after --dist-timeout."""
    settings = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(SCRIPTS["03"]), *map(str, SHORT), "--dist-timeout", "3"]
    done = subprocess.run(
        [*command, "--save-dir", str(tmp_path / "runs")],
        check=False,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert [line for line in lines if "cannot meet the other ranks at 127.0.0.1:" in line]
    assert not (tmp_path / "runs").exists()
