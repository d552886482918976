"""Test the verdicts of whats_wrong.py on made-up facts, and its handling of damaged files."""

import copy
import json
import os
import time

import pytest
import whats_wrong
from facts import read_ranks

from conftest import ROOT, run_command
from fake_facts import (
    BUCKET,
    FLAG,
    GATHER,
    IN_DATA,
    NOW,
    REDUCE,
    SCRIPT,
    STEPS,
    facts_of,
    files_of,
    frames,
    moving_ranks,
    rank_files,
)

TOOL = ROOT / "diagnosing-errors/whats_wrong.py"


# ---- made-up facts -----------------------------------------------------------------------------
def judged(facts):
    """Return the kind, the ranks and the certainty of a verdict; check its form and its section."""
    facts_before = copy.deepcopy(facts)
    verdict, ranks = whats_wrong.judge(facts)
    assert json.loads(json.dumps(verdict)) == verdict
    assert facts == facts_before, "judge() must not change the facts"
    title = verdict["kind"].replace("-", " ").capitalize()
    assert f"\n### {title}\n" in (TOOL.parent / "faults.md").read_text()
    assert "\n" not in verdict["reason"]
    whats_wrong.show(facts, verdict, ranks)
    return verdict["kind"], verdict["ranks"], verdict["sure"]


def own_error(text):
    """Return the changes to the heartbeat of a rank that failed with this error."""
    return {"end": "failed", "error": f"Traceback (most recent call last):\n{text}"}


LOST = own_error("RuntimeError: Connection closed by peer [127.0.0.1]:41641. This is typically ...")
NCCL = """torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, \
unhandled cuda error, NCCL version 2.27.3
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 2 'out of memory'"""


# ---- verdicts on made-up facts -----------------------------------------------------------------
DATA = {"phase": "data"}
HANGS = {"calls": STEPS[:-2], "pending": False, "stack": IN_DATA, "beat": DATA}
CRASHED = own_error("ValueError: injected")
LATE = own_error("RuntimeError: Timed out waiting 600000ms for recv operation to complete")
AHEAD = {"calls": [*STEPS, BUCKET, BUCKET, FLAG]}
SKIPPED = {"calls": [*STEPS, BUCKET, BUCKET, GATHER]}
SHAPE = {"calls": [*STEPS, BUCKET, BUCKET, ("all_reduce", "[[1000]]", 405, "measure")]}
ORDER = {"calls": [*STEPS, BUCKET, BUCKET, ("broadcast", "[[]]", 404, "measure")]}
AGREES = {"calls": STEPS[:-1], "pending": False, "stack": frames((357, "agree"))}
COMPUTES = HANGS | {"stack": frames((727, "loss_of"), inner=None), "beat": {}}
# FSDP's hooks pass through dynamo without compiling, so this stack is not in the compile phase.
DYNAMO = frames((746, "train_step"), inner=("/x/site-packages/torch/_dynamo/eval_frame.py", "_fn"))
DYNAMO += frames()
STARTS = {"phase": "start", "step_seconds": None, "cpu": 0.0}
MEETS = {"stack": frames((259, "setup"), (1, "init_process_group")), "calls": [FLAG]}
ABORTED = "Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n"
ABORTED += '  File "/x/torch/distributed/distributed_c10d.py", line 3252 in all_reduce\n'
VERDICTS = {
    "training": (facts_of(moving_ranks()), "healthy", [], "certain"),
    "one rank has no batch": (facts_of(files_of(odd=HANGS)), "hang-in-data", [1], "certain"),
    "no rank has a batch": (
        facts_of(files_of(2, stack=IN_DATA, beat=DATA, pending=False)), "hang-in-data", [0, 1]
    ),
    **{
        f"{fault}, {size} ranks": (facts_of(files_of(size, odd, **AHEAD)), kind, [1], sure)
        for size, sure in ((2, "likely"), (4, "certain"))
        for fault, kind, odd in (
            ("a collective left out", "skipped-collective", SKIPPED),
            ("a different shape", "mismatched-collective", SHAPE),
            ("a different order", "mismatched-collective", ORDER),
        )
    },
    "no majority and no history": (
        facts_of(files_of(2, {"calls": [GATHER]}, calls=[FLAG])),
        "mismatched-collective", [0, 1], "a guess",
    ),
    "waits in a different group": (facts_of(files_of(odd=AGREES)), "skipped-collective", [1]),
    "still computes": (facts_of(files_of(odd=COMPUTES)), "straggler", [1]),
    "hooks in dynamo": (facts_of(files_of(odd=HANGS, stack=DYNAMO)), "hang-in-data", [1]),
    "all ranks in one collective": (facts_of(files_of(16)), "network"),
    "stopped by SIGSTOP": (
        facts_of(files_of(odd={"age": 40.0, "beat": {"phase": "start"}}), stopped=[1]),
        "stopped-process", [1], "certain",
    ),
    "one error is not a lost connection": (
        facts_of(
            files_of(odd={"age": 31.0, "beat": CRASHED}, odd_rank=2, beat=LOST, age=30.0),
            gone=range(4),
        ),
        "crash", [2], "certain",
    ),
    "vanished, and the others lost the connection": (
        facts_of(files_of(odd={"age": 31.5}, beat=LOST, age=30.0), gone=range(4)),
        "killed", [1], "likely",
    ),
    "vanished, and the others received SIGTERM": (
        facts_of(files_of(odd={"age": 31.5}, beat={"asked_to_end": NOW}, age=30.0), gone=range(4)),
        "killed", [1],
    ),
    "Gloo aborts the receiver of a wrong shape": (
        facts_of(
            {0: rank_files(0, 2, age=31.0, crash=ABORTED, dump=None),
             1: rank_files(1, 2, age=30.0, beat=LOST, **SHAPE)},
            gone=(0, 1),
        ),
        "mismatched-collective", [1], "likely",
    ),
    "NCCL's watchdog aborts the waiting ranks": (
        facts_of(files_of(odd=HANGS, age=30.0, crash=ABORTED), gone=(0, 2, 3)), "hang-in-data", [1]
    ),
    "all ranks timed out": (
        facts_of(files_of(odd=HANGS | {"beat": DATA | LATE}, beat=LATE), gone=range(4)),
        "hang-in-data", [1],
    ),
    "all ranks equally slow": (facts_of(files_of(beat={"step_seconds": 90.0})), "healthy"),
    "full disk": (facts_of(moving_ranks(), free=4096), "disk-full"),
    "the last rank never started": (
        facts_of({rank: rank_files(rank, 4, beat=STARTS, **MEETS) for rank in range(3)}),
        "rendezvous", [3],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", VERDICTS)
def test_made_up_facts_give_the_expected_verdict(case):
    facts, *expected = VERDICTS[case]
    assert judged(facts)[: len(expected)] == tuple(expected)


@pytest.mark.parametrize(
    "message, kind",
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to", "device-out-of-memory"),
        ("RuntimeError: CUDA error: out of memory", "device-out-of-memory"),
        (NCCL, "device-out-of-memory"),
        ("OSError: [Errno 24] Too many open files: 'x'", "too-many-open-files"),
        ("OSError: [Errno 28] No space left on device", "disk-full"),
        ("MemoryError", "host-memory-leak"),
        ("SystemExit: error: a gradient in steps 1 to 5 was not finite", "not-finite"),
        ("RuntimeError: Unable to find address for: eth9", "rendezvous"),
        ("SystemExit: error: no checkpoint in x/checkpoints can be read", "corrupt-checkpoint"),
    ],
)  # fmt: skip
def test_error_text_decides_the_kind(message, kind):
    """Check also that the verdict starts with NCCL's reason, which NCCL reports last."""
    odd = {"age": 31.0, "beat": {"end": "failed", "error": message}}
    facts = facts_of(files_of(odd=odd), gone=[1])
    assert judged(facts)[:2] == (kind, [1])
    reason = whats_wrong.judge(facts)[0]["reason"]
    assert "Error: Cuda failure 2" in reason or message != NCCL


def test_crash_file_gives_the_line_of_a_segfault():
    crash = "Fatal Python error: Segmentation fault\n\n"
    crash += "Current thread 0x1 (most recent call first):"
    crash += f'\n  File "{SCRIPT}", line 778 in break_now\n'
    facts = facts_of(files_of(odd={"age": 31.0, "crash": crash}), gone=[1])
    assert judged(facts) == ("segfault", [1], "certain")
    assert "train_llm.py:778 break_now" in whats_wrong.judge(facts)[0]["reason"]


@pytest.mark.parametrize("phase, task", [("data", "loads its data"), ("forward", "its own work")])
@pytest.mark.parametrize("size", [2, 4])
def test_rank_that_is_late_for_every_collective_is_a_straggler(size, phase, task):
    """Rank 1 calls each collective 60 ms late; one collective takes 100 ms."""
    ranks = moving_ranks(size, calls=STEPS * 2)
    line = {"/run/train_llm.py:99 read": 0.6}
    slow = {"since": 1.0, "pending": False, "calls": STEPS * 2}
    slow["beat"] = {"phases": {phase: 0.7}, "lines": line}
    ranks[1] = rank_files(1, size, late=0.06, **slow)
    verdict, _ = whats_wrong.judge(facts_of(ranks))
    assert judged(facts_of(ranks)) == ("straggler", [1], "certain")
    assert task in verdict["reason"] and "train_llm.py:99 read (+60%)" in verdict["reason"]
    # A rank that is late only for the newer half of the collectives is no straggler.
    prompt = ranks[0]["dump"]["collectives"]
    late = ranks[1]["dump"]["collectives"]
    ranks[1]["dump"]["collectives"] = prompt[:25] + late[25:]
    assert judged(facts_of(ranks))[0] == "healthy"


def test_rank_with_the_shortest_nccl_collectives_is_a_straggler():
    """On a GPU, all hosts queue a collective at the same time, so only its duration differs."""
    ranks = moving_ranks(4, calls=STEPS * 2)
    for rank, files in ranks.items():
        for call in files["dump"]["collectives"]:
            call["milliseconds"] = 5.0 if rank == 2 else 65.0
    assert judged(facts_of(ranks)) == ("straggler", [2], "certain")


def test_different_clocks_do_not_make_a_straggler():
    ranks = moving_ranks(16)
    for rank in range(8, 16):
        ranks[rank] = rank_files(rank, 16, since=1.0, pending=False, late=7.0)
        ranks[rank]["beat"] |= {"time": NOW + 7, "since": NOW + 6}
    assert judged(facts_of(ranks))[0] == "healthy"


@pytest.mark.parametrize("phase", ["start", "compile", "evaluation", "checkpoint", "export"])
def test_long_phase_is_healthy_while_a_rank_works(phase):
    beat = {"phase": phase, "cpu": 0.5}
    assert judged(facts_of(files_of(since=900.0, beat=beat)))[0] == "slow-but-healthy"


def checks(data=(1, 2), weights=7, losses=(3.0, 3.1)):
    """Return the checks of a rank in two steps."""
    return [{"step": 10 * n, "data": x, "weights": weights, "losses": [*losses]}
            for n, x in enumerate(data, 1)]  # fmt: skip


@pytest.mark.parametrize(
    "odd, size, kind, ranks",
    [
        ({"bad": {"step": 12, "loss": float("inf"), "gradients": 1}}, 4, "not-finite", [1]),
        ({"bad": {"step": 12, "loss": 3.0, "gradients": 1}}, 4, "not-finite", [1]),
        ({"checks": checks(weights=8)}, 4, "replicas-differ", [1]),
        ({"checks": checks(weights=8)}, 2, "replicas-differ", [0, 1]),
        ({"checks": checks(weights=8), "shard": "0: 1"}, 2, "healthy", []),
        ({"checks": checks(data=(100, 200))}, 4, "same-data", [0, 1]),
        ({"checks": checks(losses=(5.5, 5.6))}, 4, "loss-spike", [1]),
        ({"memory": [0.7, 0.7, 0.9, 1.1, 1.3, 1.5, 1.7]}, 4, "host-memory-leak", [1]),
        ({"memory": [0.7, 0.7, 0.7, 1.7, 1.7, 1.7, 1.7]}, 4, "healthy", []),
        ({"open_files": 900}, 4, "too-many-open-files", [1]),
        ({"printed": ["x/step-20 cannot be read: EOFError(); trying the previous checkpoint"]}, 4,
         "corrupt-checkpoint", []),
    ],
)  # fmt: skip
def test_values_in_heartbeats_give_the_expected_verdict(odd, size, kind, ranks):
    files = moving_ranks(size)
    for rank in files:
        files[rank]["beat"]["checks"] = checks(data=(rank * 100, rank * 100 + 50))
    if kind == "same-data":
        files[0]["beat"]["checks"] = odd["checks"]
    files[1]["beat"] |= odd
    assert judged(facts_of(files))[:2] == (kind, ranks)


@pytest.mark.parametrize("has_checked, kind", [(True, "replicas-differ"), (False, "healthy")])
def test_verdict_on_replicas_waits_for_the_third(has_checked, kind):
    """Two replicas differ; only the third shows which of them is wrong."""
    files = moving_ranks(3)
    for rank in files:
        files[rank]["beat"]["checks"] = checks(data=(rank * 100, rank * 100 + 50))
    files[1]["beat"]["checks"] = checks(data=(5, 6), weights=8)
    if not has_checked:
        files[2]["beat"]["checks"] = []
    assert judged(facts_of(files))[:2] == (kind, [1] if has_checked else [])


@pytest.mark.parametrize("sigterm_time, kind", [(None, "finished"), (NOW, "interrupted")])
def test_complete_run_is_finished_or_interrupted(sigterm_time, kind):
    beat = {"end": "finished", "asked_to_end": sigterm_time}
    assert judged(facts_of(files_of(age=9e5, beat=beat), gone=range(4)))[0] == kind


def test_silent_ranks_are_on_an_unreachable_host():
    ranks = {rank: rank_files(rank, 16, age=1.0 if rank < 8 else 50.0) for rank in range(16)}
    facts = facts_of(ranks, gone=range(8, 16))
    facts["hosts"]["h1"] = {"error": "No route to host"}
    assert judged(facts) == ("host-unreachable", list(range(8, 16)), "certain")
    del facts["hosts"]["h1"]
    assert judged(facts) == ("host-unreachable", list(range(8, 16)), "a guess")


def test_thousands_of_ranks_take_seconds():
    size, calls = 4096, STEPS * 5
    files = rank_files(0, size, calls=calls, stack=REDUCE * 40)
    ranks = {}
    for rank in range(size):
        beat = files["beat"] | {"rank": rank, "pid": 1000 + rank, "host": f"h{rank // 8}"}
        ranks[rank] = files | {"beat": beat}
    late = {"calls": calls[:-2], "pending": False, "stack": IN_DATA, "beat": {"phase": "data"}}
    ranks[1234] = rank_files(1234, size, **late)
    facts = facts_of(ranks)
    began = time.process_time()
    verdict, _ = whats_wrong.judge(facts)
    culprit = verdict["kind"], verdict["ranks"], verdict["hosts"]
    assert culprit == ("hang-in-data", [1234], ["h154"])
    assert time.process_time() - began < 8


# ---- the command ---------------------------------------------------------------------------------
def ask(*args):
    """Run the tool; return its exit status, verdict and errors."""
    done = run_command(TOOL, *args, "--json")
    verdict = json.loads(done.stdout) if done.stdout else None
    return done.returncode, verdict, done.stderr


@pytest.mark.parametrize(
    "args, problem",
    [
        (["nowhere"], "run nowhere: not a folder;"),
        ([".", "--hosts", "nowhere"], "--hosts nowhere: no such file;"),
        ([".", "--hosts", os.devnull], "--hosts /dev/null: no such file;"),
        ([".", "."], "unrecognized arguments: ."),
        ([], "the following arguments are required: run"),
        ([".", "--slurm-job", "no-such-job"], "--slurm-job no-such-job: Slurm lists no host"),
    ],
)
def test_wrong_argument_is_an_error(args, problem):
    status, _, errors = ask(*args)
    assert status == 2
    assert f"whats_wrong.py: error: {problem}" in errors


def test_hosts_file_without_hosts_is_an_error(tmp_path):
    (tmp_path / "hosts").write_text("# no host\n")
    status, _, errors = ask(tmp_path, "--hosts", tmp_path / "hosts")
    assert status == 2
    assert "names no host;" in errors


def test_folder_without_ranks_is_unknown(tmp_path):
    status, verdict, _ = ask(tmp_path)
    assert (status, verdict["kind"]) == (3, "unknown")


def test_damaged_files_are_ignored(tmp_path):
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    (ranks / "00000.json").write_text('{"rank": 0, "ti')
    (ranks / "00000.dump.json").write_bytes(b"\xff\x00{")
    (ranks / "00001.json").write_text("[1]")
    (ranks / "x.json").write_text("{}")
    status, verdict, errors = ask(tmp_path)
    assert (status, verdict["kind"], errors) == (3, "unknown", "")


def test_files_of_an_earlier_start_are_ignored(tmp_path):
    (tmp_path / "ranks").mkdir()
    for rank, age in ((0, 1), (1, 1), (2, 5000)):
        beat = rank_files(rank, 2)["beat"] | {"time": time.time() - age}
        beat["started"] = time.time() - age - 100
        path = tmp_path / f"ranks/{rank:05}.json"
        path.write_text(json.dumps(beat))
        os.utime(path, (time.time() - age,) * 2)
    assert sorted(read_ranks(tmp_path)) == [0, 1]
