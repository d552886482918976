"""Test that kill -9 at any moment leaves complete checkpoints, and does not change the curve."""

import os
import random
import time

import pytest

from chats import prepare_conversations, prepare_pairs
from conftest import SCRIPTS, SHORT, SPLIT, curves_of, difference, start_ranks
from marks import exhaustive, slow
from runs import kill, last_logged_step, newest_step, wait_for

EVERY = 3
ARGS = [*SHORT, "--seq-length", 32, "--checkpoint-every", EVERY, "--eval-every", 50]


def kill_once(chapter, args, run_dir, oldest, choice, during_save):
    """Start or continue a run, kill it at a random moment, and check how many steps it has lost.

    If `during_save` is true, choose a moment during a save. Return the step of the newest
    checkpoint.
    """
    logs = run_dir.with_name("logs")
    logs.mkdir(exist_ok=True)
    processes = start_ranks(1 if chapter == "01" else 2, [SCRIPTS[chapter], *args], logs)
    # Kill after a number of steps, not seconds, so that the speed of the machine does not matter.
    last = oldest + choice.randint(2, 2 * EVERY)
    running = wait_for(lambda: last_logged_step(run_dir) >= last, processes)
    time.sleep(choice.uniform(0, 0.02))
    if during_save:
        wait_for((run_dir / "checkpoints/.partial").exists, processes)
        time.sleep(choice.uniform(0, 0.01))
    kill(processes)
    output = "\n".join(path.read_text() for path in sorted(logs.glob("rank*.log")))
    assert running, f"the run ended or failed before the kill:\n{output}"
    newest = newest_step(run_dir)
    # A run may lose the steps since its latest save. In the background, the latest save may be
    # incomplete, so the run may also lose the steps since the save before it.
    lost = 2 * EVERY if "--checkpoint-async" in args else EVERY
    assert newest >= max(oldest, last_logged_step(run_dir) - lost), output
    return newest


CASES = [("01", 1), slow("05", 2), slow("muon", 1), slow("float8", 1)]
CASES += [
    exhaustive(chapter, 4)
    for chapter in ("03", "04", *SPLIT, "conversations", "lora", "preferences")
]
# Kill these chapters most often: chapter 02 saves one file, chapter 05 saves shards, and every
# other chapter saves in one of these two ways.
CASES += [exhaustive(chapter, 20) for chapter in ("02", "05")]


@pytest.mark.parametrize("chapter, kills", CASES)
def test_kills_change_no_curve(tmp_path, chapter, kills):
    """Kill all ranks once or several times, by turns during a save and at any moment."""
    seed = int(os.environ.get("KILL_SEED", random.randrange(10**6)))
    print(f"KILL_SEED={seed} repeats these moments, as far as the machine repeats its timing")
    choice = random.Random(seed)
    args = [*ARGS, "--num-steps", 30 + 12 * kills, "--save-dir", tmp_path, *SPLIT.get(chapter, [])]
    args += ["--checkpoint-async"] * (chapter >= "04")
    args += ["--expert-balance-rate", 0.01] * (chapter == "09")
    args += ["--float8"] * (chapter == "float8")
    if chapter in ("conversations", "lora"):
        args += ["--seq-length", 128, "-d", prepare_conversations(tmp_path, 100, "tiny", 128)]
    if chapter == "preferences":
        args += ["--seq-length", 256, "-d", prepare_pairs(tmp_path, 100)]
    run_dir, saves_hit, newest, number = tmp_path / "killed", 0, 0, 0
    while number < kills or (not saves_hit and number < kills + 3):
        command = [*args, "-e", "killed"]
        newest = kill_once(chapter, command, run_dir, newest, choice, during_save=number % 2 == 0)
        saves_hit += (run_dir / "checkpoints/.partial").exists()
        number += 1
    assert saves_hit, "no kill hit a save"
    jobs = {name: (chapter, args) for name in ("killed", "complete")}
    curves = curves_of(tmp_path, {1 if chapter == "01" else 2: jobs})
    assert not (run_dir / "checkpoints/.partial").exists()
    assert difference(curves["complete"], curves["killed"]) == 0.0
