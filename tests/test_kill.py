"""kill -9 at any moment: what is named a checkpoint is whole, and the curve goes on unchanged."""

import json
import os
import random
import signal
import subprocess
import time

import psutil
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from conftest import SHORT, difference, family, kill_all, metrics, run_well, torchrun

EVERY = 3
ARGS = [*SHORT, "--seq-length", 32, "--checkpoint-every", EVERY, "--eval-every", 50]


def newest_step(run_dir):
    """Return the newest checkpoint's step; all that are named so must load."""
    steps = [0]
    for checkpoint in (run_dir / "checkpoints").glob("step-*"):
        assert checkpoint.suffix == ""
        whole = checkpoint / "state.pt"
        if not whole.exists():  # the shards of all ranks: each of them is read
            whole = run_dir / "all-shards.pt"
            dcp_to_torch_save(checkpoint, whole)
        state = torch.load(whole, weights_only=True)
        assert f"step-{state['step']:08}" == checkpoint.name
        steps.append(state["step"])
    return max(steps)


def last_row(run_dir):
    """Return the last whole row's step."""
    path = run_dir / "metrics.jsonl"
    rows = path.read_text().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(row)["step"] for row in rows if row.endswith("\n")), default=0)


def wait_for(condition, process, seconds=120):
    """Wait until `condition` holds or the process has ended; say whether it still runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        if process.poll() is not None:
            return False
        time.sleep(0.001)
    return process.poll() is None


def kill_once(chapter, args, run_dir, draw, in_a_save, one_rank=False):
    """Start the run, kill it at some moment, check what is left; return whether it still ran."""
    before = newest_step(run_dir)
    process = torchrun(chapter, *args)
    after = before + draw.randint(2, 5 * EVERY)  # in steps: the machine's speed does not matter
    if not wait_for(lambda: last_row(run_dir) >= after, process):
        output = "".join(process.communicate())
        assert process.returncode == 0, f"it failed, and nobody had killed it:\n{output}"
        return False
    time.sleep(draw.uniform(0, 0.02))
    if in_a_save:
        checkpoints = run_dir / "checkpoints"
        wait_for(lambda: list(checkpoints.glob(".step-*")), process)
        time.sleep(draw.uniform(0, 0.01))
    running = process.poll() is None
    if running:
        process.send_signal(signal.SIGSTOP)  # or it starts a rank that is in no list
    victims = family(process) if running else []
    if one_rank:  # torchrun ends the others
        ranks = [victim for victim in victims if "train_llm.py" in " ".join(victim.cmdline()[:3])]
        if ranks:
            draw.choice(ranks).kill()
            process.send_signal(signal.SIGCONT)
            process.communicate(timeout=60)
    kill_all(process, victims)
    newest = newest_step(run_dir)
    assert newest >= before
    assert newest >= last_row(run_dir) - EVERY  # at most one interval is lost
    return running


def kill_often(chapter, times, tmp_path, num_steps):
    """Kill a run `times` times, let it finish, and compare it with one that never stopped."""
    seed = int(os.environ.get("KILL_SEED", random.randrange(10**6)))
    print(f"KILL_SEED={seed} repeats these moments as far as the machine does")
    draw = random.Random(seed)
    args = [*ARGS, "--num-steps", num_steps, "--save-dir", tmp_path]
    run_dir, kills, hit_a_save = tmp_path / "killed", 0, 0
    while kills < times or (not hit_a_save and kills < times + 5):
        in_a_save, one_rank = kills % 2 == 0, chapter == "04" and kills % 4 > 1
        running = kill_once(chapter, [*args, "-e", "killed"], run_dir, draw, in_a_save, one_rank)
        assert running, f"it finished after {kills} kills: lengthen the run"
        kills += 1
        hit_a_save += bool(list((run_dir / "checkpoints").glob(".step-*")))
    assert hit_a_save, "no kill ever hit a save"
    jobs = [(chapter, [*args, "-e", name]) for name in ("killed", "whole")]
    run_well(1 if chapter == "01" else 2, jobs, tmp_path / "jobs")
    assert not list((run_dir / "checkpoints").glob(".step-*"))
    assert difference(metrics(tmp_path / "whole"), metrics(run_dir)) == 0.0


def test_killed(tmp_path):
    kill_often("01", 1, tmp_path, num_steps=150)


@pytest.mark.slow
def test_killed_while_it_tokenizes(tmp_path):
    """kill -9 of the one process leaves none of those that it shares the tokenizing with."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"text": "{"word " * 100}{n}"}}\n' for n in range(100_000)))
    args = ["-d", data, "--num-proc", 2, "--save-dir", tmp_path]
    process = torchrun("01", *args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert wait_for(lambda: len(family(process)) > 2, process)
        members = family(process)[1:]
    finally:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(members, timeout=10)
    assert not alive


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chapter", ["01", "02", "04"])
def test_killed_twenty_times(tmp_path, chapter):
    """All processes at once; in 04 also one of the ranks, whose launcher then ends the others."""
    kill_often(chapter, 20, tmp_path, num_steps=600)
