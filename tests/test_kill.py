"""kill -9 at any moment: what is named a checkpoint is whole, and the curve goes on unchanged."""

import contextlib
import os
import random
import signal
import subprocess
import time

import pytest

from conftest import (
    SCRIPTS,
    SHORT,
    difference,
    free_port,
    metrics,
    run_or_fail,
    start_ranks,
)
from runs import all_running, last_logged_step, newest_step, wait_for

EVERY = 3
ARGS = [*SHORT, "--seq-length", 32, "--checkpoint-every", EVERY, "--eval-every", 50]


def ended(process):
    """Return the status of a process whose fellows end: without them it may wait for ever."""
    try:
        return process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(timeout=20)


def kill_one(processes, draw):
    """Kill one rank, and end the others as torchrun would."""
    draw.choice(processes).kill()
    time.sleep(0.1)  # this often torchrun looks after its ranks
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)  # torchrun waits for 30 s before it kills


def kill_once(chapter, args, run_dir, before, draw, in_a_save, one_rank):
    """Start the run, kill it at some moment, check what is left; return the newest step of that.

    Or None, if there was nothing to kill any more.
    """
    logs = run_dir.with_name("logs")
    logs.mkdir(exist_ok=True)
    command, port = [SCRIPTS[chapter], *args], str(free_port())
    processes = start_ranks(1 if chapter == "01" else 2, command, logs, MASTER_PORT=port)
    after = before + draw.randint(2, 5 * EVERY)  # in steps: the machine's speed does not matter
    if not wait_for(lambda: last_logged_step(run_dir) >= after, processes):
        statuses = [ended(process) for process in processes]
        output = "\n".join(path.read_text() for path in sorted(logs.glob("rank*.log")))
        assert not any(statuses), f"it failed, and nobody had killed it:\n{output}"
        return None
    time.sleep(draw.uniform(0, 0.02))
    if in_a_save:
        checkpoints = run_dir / "checkpoints"
        wait_for((checkpoints / ".partial").exists, processes)
        time.sleep(draw.uniform(0, 0.01))
    running = all_running(processes)
    if one_rank and running:
        kill_one(processes, draw)
    for process in processes:
        process.kill()
    for process in processes:
        process.wait(timeout=20)
    newest = newest_step(run_dir)
    assert newest >= before
    lost = 2 * EVERY if "--checkpoint-async" in args else EVERY  # the newest may be on its way
    assert newest >= last_logged_step(run_dir) - lost
    return newest if running else None


def kill_often(chapter, times, tmp_path, num_steps):
    """Kill a run `times` times, let it finish, and compare it with one that never stopped."""
    seed = int(os.environ.get("KILL_SEED", random.randrange(10**6)))
    print(f"KILL_SEED={seed} repeats these moments as far as the machine does")
    draw = random.Random(seed)
    args = [*ARGS, "--num-steps", num_steps, "--save-dir", tmp_path]
    args += ["--checkpoint-async"] if chapter in ("05", "06", "07", "08") else []
    args += ["--tensor-parallel-size", 2] if chapter == "06" else []
    args += ["--pipeline-parallel-size", 2, "--batch-size", 4] if chapter == "07" else []
    args += ["--context-parallel-size", 2] if chapter == "08" else []
    run_dir, kills, hit_a_save, newest = tmp_path / "killed", 0, 0, 0
    while kills < times or (not hit_a_save and kills < times + 5):
        in_a_save, one_rank = kills % 2 == 0, chapter > "03" and kills % 4 > 1
        command = [*args, "-e", "killed"]
        newest = kill_once(chapter, command, run_dir, newest, draw, in_a_save, one_rank)
        assert newest is not None, f"it finished after {kills} kills: lengthen the run"
        kills += 1
        hit_a_save += (run_dir / "checkpoints/.partial").exists()
    assert hit_a_save, "no kill ever hit a save"
    jobs = [(chapter, [*args, "-e", name]) for name in ("killed", "whole")]
    run_or_fail(1 if chapter == "01" else 2, jobs, tmp_path / "jobs")
    assert not (run_dir / "checkpoints/.partial").exists()
    assert difference(metrics(tmp_path / "whole"), metrics(run_dir)) == 0.0


def test_killed(tmp_path):
    kill_often("01", 1, tmp_path, num_steps=150)


@pytest.mark.slow
@pytest.mark.parametrize("chapter", ["01", "02", "03", "04", "05", "06", "07", "08"])
def test_killed_four_times(tmp_path, chapter):
    """All processes at once; from 04 on also one of the ranks, after which the others are ended."""
    kill_often(chapter, 4, tmp_path, num_steps=150)


@pytest.mark.exhaustive
@pytest.mark.parametrize("chapter", ["02", "05"])
def test_killed_twenty_times(tmp_path, chapter):
    """One file, and shards; the other chapters save as these do."""
    kill_often(chapter, 20, tmp_path, num_steps=400)
