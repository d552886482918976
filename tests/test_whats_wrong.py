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


def judged(facts):
    """Return the kind, the ranks, the certainty and the reason of a verdict; check its form."""
    facts_before = copy.deepcopy(facts)
    verdict, ranks = whats_wrong.judge(facts)
    assert json.loads(json.dumps(verdict)) == verdict
    assert facts == facts_before, "judge() must not change the facts"
    assert "\n" not in verdict["reason"]
    whats_wrong.show(facts, verdict, ranks)
    return verdict["kind"], verdict["ranks"], verdict["sure"], verdict["reason"]


# ---- hangs and ends ------------------------------------------------------------------------------
def failed(text):
    """Return the changes to the heartbeat of a rank that failed with this error."""
    return {"end": "failed", "error": f"Traceback (most recent call last):\n{text}"}


LOST = failed("RuntimeError: Connection closed by peer [127.0.0.1]:41641. This is typically ...")
LATE = failed("RuntimeError: Timed out waiting 600000ms for recv operation to complete")
NO_BATCH = {"calls": STEPS[:-2], "pending": False, "stack": IN_DATA, "phase": "data"}
AHEAD = {"calls": [*STEPS, BUCKET, BUCKET, FLAG]}
ODD_CALLS = {
    "skipped-collective": {"calls": [*STEPS, BUCKET, BUCKET, GATHER]},
    "mismatched-collective": {"calls": [*STEPS, BUCKET, BUCKET, ("broadcast", "[[]]", 404, "at")]},
}
SHAPE = {"calls": [*STEPS, BUCKET, BUCKET, ("all_reduce", "[[1000]]", 405, "measure")]}
AGREES = {"calls": STEPS[:-1], "pending": False, "stack": frames((357, "agree"))}
COMPUTES = NO_BATCH | {"stack": frames((727, "loss_of"), inner=None), "phase": "forward"}
# FSDP's hooks pass through dynamo without compiling, so this stack is not in the compile phase.
DYNAMO = frames((746, "train_step"), inner=("/x/site-packages/torch/_dynamo/eval_frame.py", "_fn"))
STARTS = {"phase": "start", "step_seconds": None, "calls": [FLAG]}
STARTS["stack"] = frames((259, "setup"), (1, "init_process_group"))
ABORTED = "Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n"
ABORTED += '  File "/x/torch/distributed/distributed_c10d.py", line 3252 in all_reduce\n'
SEGFAULT = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):"
SEGFAULT += f'\n  File "{SCRIPT}", line 778 in some_function\n'
ALL = range(4)
UNREACHABLE = facts_of({n: rank_files(n, 16, age=1.0 if n < 8 else 50.0) for n in range(16)})
UNREACHABLE["hosts"]["h1"] = {"error": "No route to host"}
UNCHECKED = UNREACHABLE | {"hosts": {"h0": UNREACHABLE["hosts"]["h0"]}}

# Each case has facts, and the start of (kind, ranks, certainty).
VERDICTS = {
    "training": (facts_of(moving_ranks()), "healthy", [], "certain"),
    "equally slow": (facts_of(files_of(step_seconds=90.0)), "healthy"),
    "one rank has no batch": (facts_of(files_of(odd=NO_BATCH)), "hang-in-data", [1], "certain"),
    "no rank has a batch": (
        facts_of(files_of(2, stack=IN_DATA, phase="data", pending=False)), "hang-in-data", [0, 1]
    ),
    **{
        f"{kind}, {size} ranks": (facts_of(files_of(size, odd, **AHEAD)), kind, [1], sure)
        for size, sure in ((2, "likely"), (4, "certain"))
        for kind, odd in ODD_CALLS.items()
    },
    "a different shape": (facts_of(files_of(odd=SHAPE, **AHEAD)), "mismatched-collective", [1]),
    "no majority and no history": (
        facts_of(files_of(2, {"calls": [GATHER]}, calls=[FLAG])),
        "mismatched-collective", [0, 1], "a guess",
    ),
    "waits in a different group": (facts_of(files_of(odd=AGREES)), "skipped-collective", [1]),
    "still computes": (facts_of(files_of(odd=COMPUTES)), "straggler", [1]),
    "hooks in dynamo": (
        facts_of(files_of(odd=NO_BATCH, stack=DYNAMO + REDUCE)), "hang-in-data", [1]
    ),
    "all ranks in one collective": (facts_of(files_of(16)), "network"),
    "stopped": (
        facts_of(files_of(odd={"age": 40.0, "phase": "start"}), stopped=[1]),
        "stopped-process", [1], "certain",
    ),
    "one error is not a lost connection": (
        facts_of(files_of(odd={"age": 31.0, **failed("ValueError: x")}, age=30.0, **LOST), ALL),
        "crash", [1], "certain",
    ),
    "vanished, and the others lost the connection": (
        facts_of(files_of(odd={"age": 31.5}, age=30.0, **LOST), ALL), "killed", [1], "likely"
    ),
    "vanished, and the others received SIGTERM": (
        facts_of(files_of(odd={"age": 31.5}, age=30.0, asked_to_end=NOW), ALL), "killed", [1]
    ),
    "crashed in C code": (
        facts_of(files_of(odd={"age": 31.0, "crash": SEGFAULT}), [1]), "segfault", [1], "certain"
    ),
    "Gloo aborts the receiver of a wrong shape": (
        facts_of(
            {0: rank_files(0, 2, age=31.0, crash=ABORTED) | {"dump": None},
             1: rank_files(1, 2, age=30.0, **LOST, **SHAPE)},
            gone=(0, 1),
        ),
        "mismatched-collective", [1], "likely",
    ),
    "NCCL's watchdog aborts the waiting ranks": (
        facts_of(files_of(odd=NO_BATCH, age=30.0, crash=ABORTED), (0, 2, 3)), "hang-in-data", [1]
    ),
    "all ranks timed out": (
        facts_of(files_of(odd=NO_BATCH | LATE, **LATE), ALL), "hang-in-data", [1]
    ),
    "full disk": (facts_of(moving_ranks(), free=4096), "disk-full"),
    "the last rank never started": (
        facts_of({rank: rank_files(rank, 4, **STARTS) for rank in range(3)}), "rendezvous", [3]
    ),
    "a host does not answer": (UNREACHABLE, "host-unreachable", [*range(8, 16)], "certain"),
    "a host was not asked": (UNCHECKED, "host-unreachable", [*range(8, 16)], "a guess"),
    "all ranks have finished": (facts_of(files_of(age=9e5, end="finished"), ALL), "finished"),
    "all ranks stopped on request": (
        facts_of(files_of(age=9e5, end="finished", asked_to_end=NOW), ALL), "interrupted"
    ),
    **{
        f"long phase {phase}": (
            facts_of(files_of(since=900.0, phase=phase, cpu=0.5)), "slow-but-healthy"
        )
        for phase in ("start", "compile", "evaluation", "checkpoint", "export")
    },
}  # fmt: skip


@pytest.mark.parametrize("case", VERDICTS)
def test_made_up_facts_give_the_expected_verdict(case):
    facts, *expected = VERDICTS[case]
    verdict = judged(facts)
    assert verdict[: len(expected)] == tuple(expected)
    if case == "crashed in C code":
        assert "train_llm.py:778 some_function" in verdict[3]


NCCL = """torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, \
unhandled cuda error, NCCL version 2.27.3
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 2 'out of memory'"""


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
    odd = {"age": 31.0, "end": "failed", "error": message}
    verdict = judged(facts_of(files_of(odd=odd), gone=[1]))
    assert verdict[:2] == (kind, [1])
    assert message != NCCL or "Error: Cuda failure 2" in verdict[3]


# ---- runs that move ------------------------------------------------------------------------------
def checks(rank, weights=7, losses=(3.0, 3.1), data=None):
    """Return the checks of a rank in two steps."""
    hashes = data or (100 * rank + 1, 100 * rank + 2)
    return [{"step": 10 * n, "data": x, "weights": weights, "losses": [*losses]}
            for n, x in enumerate(hashes, 1)]  # fmt: skip


# Each case has changes to the heartbeat of rank 1, the number of ranks, and the verdict.
HEARTBEATS = [
    ({"bad": {"step": 12, "loss": float("inf"), "gradients": 1}}, 4, "not-finite", [1]),
    ({"bad": {"step": 12, "loss": 3.0, "gradients": 1}}, 4, "not-finite", [1]),
    ({"checks": checks(1, weights=8)}, 4, "replicas-differ", [1]),
    ({"checks": checks(1, weights=8)}, 2, "replicas-differ", [0, 1]),
    ({"checks": checks(1, weights=8), "shard": "0: 1"}, 2, "healthy", []),
    ({"checks": checks(1, data=(1, 2))}, 4, "same-data", [0, 1]),
    ({"checks": checks(1, losses=(5.5, 5.6))}, 4, "loss-spike", [1]),
    ({"memory": [0.7, 0.7, 0.9, 1.1, 1.3, 1.5, 1.7]}, 4, "host-memory-leak", [1]),
    ({"memory": [0.7, 0.7, 0.7, 1.7, 1.7, 1.7, 1.7]}, 4, "healthy", []),
    ({"open_files": 900}, 4, "too-many-open-files", [1]),
    ({"printed": ["x/step-20 cannot be read: EOFError(); trying the previous checkpoint"]}, 4,
     "corrupt-checkpoint", []),
]  # fmt: skip


@pytest.mark.parametrize("odd, size, kind, ranks", HEARTBEATS)
def test_values_in_heartbeats_give_the_expected_verdict(odd, size, kind, ranks):
    files = moving_ranks(size)
    for rank in files:
        files[rank]["beat"]["checks"] = checks(rank)
    files[1]["beat"] |= odd
    assert judged(facts_of(files))[:2] == (kind, ranks)


@pytest.mark.parametrize("has_checked, kind", [(True, "replicas-differ"), (False, "healthy")])
def test_verdict_on_replicas_waits_for_the_third(has_checked, kind):
    """Two replicas differ; only the third shows which of them is wrong."""
    files = moving_ranks(3)
    files[0]["beat"]["checks"] = checks(0)
    files[1]["beat"]["checks"] = checks(1, weights=8)
    files[2]["beat"]["checks"] = checks(2) if has_checked else []
    assert judged(facts_of(files))[:2] == (kind, [1] if has_checked else [])


@pytest.mark.parametrize("phase, task", [("data", "loads its data"), ("forward", "its own work")])
@pytest.mark.parametrize("size", [2, 4])
def test_rank_that_is_late_for_every_collective_is_a_straggler(size, phase, task):
    """Rank 1 calls each collective 60 ms late; one collective takes 100 ms."""
    slow = {"late": 0.06, "phases": {phase: 0.7}, "lines": {"/run/train_llm.py:99 read": 0.6}}
    ranks = moving_ranks(size, odd=slow, calls=STEPS * 2)
    *verdict, reason = judged(facts_of(ranks))
    assert verdict == ["straggler", [1], "certain"]
    assert task in reason and "train_llm.py:99 read (+60%)" in reason
    # A rank that is late only for the newer half of the collectives is no straggler.
    prompt, late = (ranks[rank]["dump"]["collectives"] for rank in (0, 1))
    ranks[1]["dump"]["collectives"] = prompt[:25] + late[25:]
    assert judged(facts_of(ranks))[0] == "healthy"


def test_rank_with_the_shortest_nccl_collectives_is_a_straggler():
    """On a GPU, all hosts queue a collective at the same time, so only its duration differs."""
    ranks = moving_ranks(4, calls=STEPS * 2)
    for rank, files in ranks.items():
        for call in files["dump"]["collectives"]:
            call["milliseconds"] = 5.0 if rank == 2 else 65.0
    assert judged(facts_of(ranks))[:3] == ("straggler", [2], "certain")


def test_different_clocks_do_not_make_a_straggler():
    ranks = moving_ranks(16)
    for rank in range(8, 16):
        ranks[rank] = rank_files(rank, 16, since=1.0, pending=False, late=7.0)
        ranks[rank]["beat"] |= {"time": NOW + 7, "since": NOW + 6}
    assert judged(facts_of(ranks))[0] == "healthy"


def test_thousands_of_ranks_take_seconds():
    size, calls = 4096, STEPS * 5
    files = rank_files(0, size, calls=calls, stack=REDUCE * 40)
    ranks = {}
    for rank in range(size):
        beat = files["beat"] | {"rank": rank, "pid": 1000 + rank, "host": f"h{rank // 8}"}
        ranks[rank] = files | {"beat": beat}
    ranks[1234] = rank_files(1234, size, **NO_BATCH | {"calls": calls[:-2]})
    facts = facts_of(ranks)
    start_time = time.process_time()
    verdict, _ = whats_wrong.judge(facts)
    assert time.process_time() - start_time < 8
    culprit = verdict["kind"], verdict["ranks"], verdict["hosts"]
    assert culprit == ("hang-in-data", [1234], ["h154"])


# ---- the command ---------------------------------------------------------------------------------
def ask(*args):
    """Run the tool; return its exit status, verdict and errors."""
    done = run_command(TOOL, *args, "--json")
    verdict = json.loads(done.stdout) if done.stdout else None
    return done.returncode, verdict, done.stderr


def test_wrong_argument_is_an_error(tmp_path):
    (tmp_path / "hosts").write_text("# no host\n")
    problems = {
        "run nowhere: not a folder;": ["nowhere"],
        "--hosts nowhere: no such file;": [".", "--hosts", "nowhere"],
        "hosts: names no host;": [".", "--hosts", tmp_path / "hosts"],
        "--slurm-job no-such-job: Slurm lists no host": [".", "--slurm-job", "no-such-job"],
        "unrecognized arguments: .": [".", "."],
    }
    for problem, args in problems.items():
        status, _, errors = ask(*args)
        assert status == 2 and "whats_wrong.py: error: " in errors and problem in errors, errors


def test_missing_or_damaged_files_make_the_verdict_unknown(tmp_path):
    assert ask(tmp_path)[0] == 3
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
