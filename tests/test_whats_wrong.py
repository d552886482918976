"""Test that whats_wrong.py judges made-up facts correctly, and damaged files as unknown."""

import json
import os
import time

import pytest
import whats_wrong
from facts import ranks_of, read_ranks

from conftest import ROOT, run_command

TOOL = ROOT / "diagnosing-errors/whats_wrong.py"


# ---- made-up facts -----------------------------------------------------------------------------
NOW = 1_000_000.0
FLAG = "all_reduce [[]] at train_llm.py:405 measure"
BUCKET = "all_reduce [[606976]] at train_llm.py:746 train_step"
GATHER = "all_gather [[21]] at train_llm.py:412 gather"
STEPS = [BUCKET, BUCKET, FLAG, GATHER] * 5


def collectives(calls, pending, late=0.0):
    """Return records of collectives as watched.py writes them; the calls are 0.1 s apart.

    If `pending` is true, the last of `calls` has not finished. One more collective never finishes.
    It is patient: its timeout is so long that a rank may wait in it without a fault.
    """
    records = [
        {"group": "gloo 0", "number": n, "call": call, "called": NOW - 50 + n / 10 + late,
         "milliseconds": None, "pending": pending and n == len(calls), "patient": False}
        for n, call in enumerate(calls, 1)
    ]  # fmt: skip
    return [*records, records[-1] | {"group": "gloo 1", "patient": True, "pending": True}]


STACK = [["/run/train_llm.py", 746, "train_step"]]


def rank_files(rank, size, since=60.0, calls=STEPS, pending=True, age=1.0, **changes):
    """Return the contents of the files of a rank that has been in one phase for `since` seconds.

    `changes` replaces values of the heartbeat, except two: `late` delays all collectives by this
    number of seconds, and `crash` is the text that faulthandler has written.
    """
    late, crash = changes.pop("late", 0.0), changes.pop("crash", "")
    beat = {
        "rank": rank, "world_size": size, "host": f"h{rank // 8}", "pid": 1000 + rank,
        "started": NOW - 500, "time": NOW, "phase": "backward", "step": 12,
        "since": NOW - since, "step_seconds": 1.0, "shard": "whole", "frame": STACK[0],
        "lines": {"train_llm.py:746 train_step": 0.9}, "memory": [0.69, 0.7, 0.7, 0.7, 0.7],
        "checks": [], "cpu": 0.0, "printed": [], "end": None, "error": None, "bad": None,
        "asked_to_end": None,
    }  # fmt: skip
    dump = {"reason": "asked", "stack": STACK}
    dump |= {"collectives": collectives(calls, pending, late)}
    return {"beat": beat | changes, "age": age, "dump": dump, "crash": crash}


def facts_of(ranks, gone=()):
    """Return facts about ranks whose hosts all answer; the ranks in `gone` have no process."""
    beats = [files["beat"] for files in ranks.values()]
    states = {str(beat["pid"]): "S" for beat in beats if beat["rank"] not in gone}
    hosts = {beat["host"]: {"host": beat["host"], "states": states} for beat in beats}
    return {"run": "/run/outputs/x", "free": 2**40, "ranks": ranks, "hosts": hosts}


def run(odd=None, size=4, gone=(), **changes):
    """Return facts about ranks whose files have `changes`; rank 1 has the changes `odd` instead."""
    files = {rank: rank_files(rank, size, **changes) for rank in range(size)}
    if odd:
        files[1] = rank_files(1, size, **odd)
    return facts_of(files, gone)


def judged(facts):
    """Judge facts, and check the form of the verdict.

    Return the kind, the ranks, the certainty and the reason of the verdict.
    """
    ranks = ranks_of(facts)
    verdict = whats_wrong.diagnose(facts, ranks)
    assert json.loads(json.dumps(verdict)) == verdict
    assert "\n" not in verdict["reason"]
    whats_wrong.show(facts, verdict, ranks)
    return verdict["kind"], verdict["ranks"], verdict["sure"], verdict["reason"]


# ---- hangs and ends ------------------------------------------------------------------------------
def failed(text):
    """Return the changes to the heartbeat of a rank that failed with the error `text`."""
    return {"end": "failed", "error": f"Traceback (most recent call last):\n{text}"}


LOST = failed("RuntimeError: Connection closed by peer [127.0.0.1]:41641. This is typically ...")
LATE = failed("RuntimeError: Timed out waiting 600000ms for recv operation to complete")
NO_BATCH = {"calls": STEPS[:-2], "pending": False, "phase": "data"}
AHEAD = {"calls": [*STEPS, BUCKET, BUCKET, FLAG]}
SKIPPED = {"calls": [*STEPS, BUCKET, BUCKET, GATHER]}
SHAPE = {"calls": [*STEPS, BUCKET, BUCKET, "all_reduce [[1000]] at train_llm.py:405 measure"]}
ABORTED = "Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n"
ABORTED += '  File "/x/torch/distributed/distributed_c10d.py", line 3252 in all_reduce\n'
ALL, MOVING = range(4), {"since": 1.0, "pending": False}
STARTING = {rank: rank_files(rank, 4, phase="start", step_seconds=None) for rank in range(3)}
UNREACHABLE = facts_of({n: rank_files(n, 16, age=1.0 if n < 8 else 50.0) for n in range(16)})
UNREACHABLE["hosts"]["h1"] = {"error": "No route to host"}


# Each case has the kind of the expected verdict, sometimes also the ranks and the certainty of the
# verdict, and last the facts.
VERDICTS = {
    "training": ("healthy", [], "certain", run(**MOVING)),
    "evaluation takes minutes": ("healthy", run(since=900.0, phase="evaluation", cpu=0.5)),
    "one rank has no batch": ("hang-in-data", [1], "certain", run(NO_BATCH)),
    "skipped, 4 ranks": ("skipped-collective", [1], "certain", run(SKIPPED, 4, **AHEAD)),
    "wrong shape, 4 ranks": ("mismatched-collective", [1], "certain", run(SHAPE, 4, **AHEAD)),
    "in a different group": ("skipped-collective", [1], run(NO_BATCH | {"phase": "collective"})),
    "all ranks in one collective": ("network", [], run(size=16)),
    "vanished first": ("killed", [1], "likely", run({"age": 31.5}, 4, ALL, age=30.0, **LOST)),
    "NCCL aborts the waiting ranks": (
        "hang-in-data", [1], run(NO_BATCH, 4, (0, 2, 3), age=30.0, crash=ABORTED)
    ),
    "all ranks timed out": ("hang-in-data", [1], run(NO_BATCH | LATE, 4, ALL, **LATE)),
    "full disk": ("disk-full", [], run(**MOVING) | {"free": 4096}),
    "the last rank never started": ("rendezvous", [3], facts_of(STARTING)),
    "a host does not answer": ("host-unreachable", [*range(8, 16)], "certain", UNREACHABLE),
    "all ranks have finished": ("finished", run(gone=ALL, age=9e5, end="finished")),
}  # fmt: skip


NCCL = """torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, \
unhandled cuda error, NCCL version 2.27.3
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 2 'out of memory'"""
# Each key is the last error of rank 1, and each value is the kind of the expected verdict.
ERRORS = {
    NCCL: "device-out-of-memory",
    "OSError: [Errno 28] No space left on device": "disk-full",
    "RuntimeError: Unable to find address for: eth9": "rendezvous",
    "SystemExit: error: x: cannot read its checkpoints; choose a different": "corrupt-checkpoint",
}
for message, kind in ERRORS.items():
    odd = {"age": 31.0, "end": "failed", "error": message}
    VERDICTS[message] = kind, [1], run(odd, gone=[1])


def checks(rank, weights=7):
    """Return the checks that watched.py would record for a rank in two steps."""
    hashes = enumerate((100 * rank + 1, 100 * rank + 2), 1)
    return [{"step": 10 * n, "data": x, "weights": weights, "losses": [3.0, 3.1]}
            for n, x in hashes]  # fmt: skip


def moving(size=4, **odd):
    """Return facts about ranks that take steps; `odd` replaces values in rank 1's heartbeat."""
    facts = run(size=size, **MOVING)
    for rank, files in facts["ranks"].items():
        files["beat"]["checks"] = checks(rank)
    facts["ranks"][1]["beat"] |= odd
    return facts


UNREAD = "x/step-20 cannot be read: EOFError(); trying the prev"
VERDICTS |= {
    "one of 4 replicas": ("replicas-differ", [1], moving(checks=checks(1, weights=8))),
    "2 shards": ("healthy", [], moving(2, checks=checks(1, weights=8), shard="0: 1")),
    "leak": ("host-memory-leak", [1], moving(memory=[0.7, 0.7, 0.9, 1.1, 1.3, 1.5, 1.7])),
    "unreadable": ("corrupt-checkpoint", [], moving(printed=[UNREAD])),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_made_up_facts_give_the_expected_verdict(case):
    *expected, facts = VERDICTS[case]
    verdict = judged(facts)
    assert verdict[: len(expected)] == tuple(expected)
    # In the NCCL case, check that the reason has the last line of the error, where NCCL reports the
    # cause.
    assert case != NCCL or "Error: Cuda failure 2" in verdict[3]


# ---- stragglers ----------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [2, 4])
def test_rank_that_is_late_for_every_collective_is_a_straggler(size):
    """Let rank 1 call each collective 60 ms late; the calls of a rank are 100 ms apart."""
    same = MOVING | {"calls": STEPS * 2}
    facts = run(same | {"late": 0.06, "lines": {"train_llm.py:99 read": 0.6}}, size, **same)
    *verdict, reason = judged(facts)
    assert verdict == ["straggler", [1], "certain"]
    assert "train_llm.py:99 read (+60%)" in reason


def test_rank_with_the_shortest_nccl_collectives_is_a_straggler():
    """Give rank 2 short collectives, and give the other ranks, which wait for it, long collectives.

    On a GPU, only the duration of a collective shows a wait.
    """
    facts = run(calls=STEPS * 2, **MOVING)
    for rank, files in facts["ranks"].items():
        for call in files["dump"]["collectives"]:
            call["milliseconds"] = 5.0 if rank == 2 else 65.0
    assert judged(facts)[:3] == ("straggler", [2], "certain")


# ---- the command ---------------------------------------------------------------------------------
def test_missing_or_damaged_files_make_the_verdict_unknown(tmp_path):
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    (ranks / "00000.json").write_text('{"rank": 0, "ti')
    (ranks / "00000.dump.json").write_bytes(b"\xff\x00{")
    (ranks / "x.json").write_text("{}")
    done = run_command(TOOL, tmp_path, "--json")
    assert (done.returncode, json.loads(done.stdout)["kind"], done.stderr) == (3, "unknown", "")


def test_files_of_an_earlier_start_are_ignored(tmp_path):
    (tmp_path / "ranks").mkdir()
    now = time.time()
    for rank, age in ((0, 1), (1, 1), (2, 5000)):
        beat = rank_files(rank, 2)["beat"] | {"time": now - age, "started": now - age - 100}
        path = tmp_path / f"ranks/{rank:05}.json"
        path.write_text(json.dumps(beat))
        os.utime(path, (now - age, now - age))
    assert sorted(read_ranks(tmp_path, now)) == [0, 1]
