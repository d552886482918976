"""whats_wrong.py: what it concludes from made-up facts, and what it makes of odd files."""

import copy
import json
import os
import time

import pytest
import whats_wrong
from facts import read_ranks

from conftest import ROOT, printed
from made_up import (
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
    moving,
    rank_files,
)

TOOL = ROOT / "diagnosing-errors/whats_wrong.py"


# ---- made-up facts ---------------------------------------------------------------------------


def judged(facts):
    """Return kind, ranks and sureness of the verdict; it must be JSON and have a section."""
    before = copy.deepcopy(facts)
    verdict, ranks = whats_wrong.judge(facts)
    assert json.loads(json.dumps(verdict)) == verdict
    assert facts == before, "judging changes no fact"
    title = verdict["kind"].replace("-", " ").capitalize()
    assert f"\n### {title}\n" in (TOOL.parent / "faults.md").read_text()
    assert "\n" not in verdict["reason"]
    whats_wrong.show(facts, verdict, ranks)
    return verdict["kind"], verdict["ranks"], verdict["sure"]


def own_error(text):
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
# FSDP's hooks pass through dynamo and do not compile: such a hang was once called healthy
DYNAMO = frames((746, "train_step"), inner=("/x/site-packages/torch/_dynamo/eval_frame.py", "_fn"))
DYNAMO += frames()
STARTS = {"phase": "start", "step_seconds": None, "cpu": 0.0}
MEETS = {"stack": frames((259, "setup"), (1, "init_process_group")), "calls": [FLAG]}
ABORTED = "Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n"
ABORTED += '  File "/x/torch/distributed/distributed_c10d.py", line 3252 in all_reduce\n'
VERDICTS = {
    "it moves": (facts_of(moving()), "healthy", [], "certain"),
    "one has no batch": (facts_of(files_of(odd=HANGS)), "hang-in-data", [1], "certain"),
    "none has a batch": (
        facts_of(files_of(2, stack=IN_DATA, beat=DATA, pending=False)), "hang-in-data", [0, 1]
    ),
    **{
        f"{what}, of {size}": (facts_of(files_of(size, odd, **AHEAD)), kind, [1], sure)
        for size, sure in ((2, "likely"), (4, "certain"))
        for what, kind, odd in (
            ("one left out", "skipped-collective", SKIPPED),
            ("another shape", "mismatched-collective", SHAPE),
            ("another order", "mismatched-collective", ORDER),
        )
    },
    "nothing decides": (
        facts_of(files_of(2, {"calls": [GATHER]}, calls=[FLAG])),
        "mismatched-collective", [0, 1], "a guess",
    ),
    "it left for another group": (facts_of(files_of(odd=AGREES)), "skipped-collective", [1]),
    "it computes on": (facts_of(files_of(odd=COMPUTES)), "straggler", [1]),
    "through dynamo": (facts_of(files_of(odd=HANGS, stack=DYNAMO)), "hang-in-data", [1]),
    "all in one collective": (facts_of(files_of(16)), "network"),
    "stopped": (
        facts_of(files_of(odd={"age": 40.0, "beat": {"phase": "start"}}), stopped=[1]),
        "stopped-process", [1], "certain",
    ),
    "the first with an error of its own": (
        facts_of(
            files_of(odd={"age": 31.0, "beat": CRASHED}, at=2, beat=LOST, age=30.0),
            gone=range(4),
        ),
        "crash", [2], "certain",
    ),
    "vanished, and the others lost it": (
        facts_of(files_of(odd={"age": 31.5}, beat=LOST, age=30.0), gone=range(4)),
        "killed", [1], "likely",
    ),
    "vanished, and the others were asked to end": (
        facts_of(files_of(odd={"age": 31.5}, beat={"asked_to_end": NOW}, age=30.0), gone=range(4)),
        "killed", [1],
    ),
    "gloo aborts, and the survivor tells": (
        facts_of(
            {0: rank_files(0, 2, age=31.0, crash=ABORTED, dump=None),
             1: rank_files(1, 2, age=30.0, beat=LOST, **SHAPE)},
            gone=(0, 1),
        ),
        "mismatched-collective", [1], "likely",
    ),
    "nccl's watchdog aborts the innocent": (
        facts_of(files_of(odd=HANGS, age=30.0, crash=ABORTED), gone=(0, 2, 3)), "hang-in-data", [1]
    ),
    "all timed out": (
        facts_of(files_of(odd=HANGS | {"beat": DATA | LATE}, beat=LATE), gone=range(4)),
        "hang-in-data", [1],
    ),
    "all are slow alike": (facts_of(files_of(beat={"step_seconds": 90.0})), "healthy"),
    "full disk": (facts_of(moving(), free=4096), "disk-full"),
    "the last never came": (
        facts_of({rank: rank_files(rank, 4, beat=STARTS, **MEETS) for rank in range(3)}),
        "rendezvous", [3],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", VERDICTS)
def test_verdicts(case):
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
def test_an_error_tells_its_kind(message, kind):
    """Of NCCL's the reason, which it gives last, is shown first."""
    odd = {"age": 31.0, "beat": {"end": "failed", "error": message}}
    facts = facts_of(files_of(odd=odd), gone=[1])
    assert judged(facts)[:2] == (kind, [1])
    reason = whats_wrong.judge(facts)[0]["reason"]
    assert "Error: Cuda failure 2" in reason or message != NCCL


def test_a_segfault_is_told_by_the_crash_file():
    crash = "Fatal Python error: Segmentation fault\n\n"
    crash += "Current thread 0x1 (most recent call first):"
    crash += f'\n  File "{SCRIPT}", line 778 in break_now\n'
    facts = facts_of(files_of(odd={"age": 31.0, "crash": crash}), gone=[1])
    assert judged(facts) == ("segfault", [1], "certain")
    assert "train_llm.py:778 break_now" in whats_wrong.judge(facts)[0]["reason"]


@pytest.mark.parametrize("phase, task", [("data", "waiting for data"), ("forward", "its own work")])
@pytest.mark.parametrize("size", [2, 4])
def test_stragglers(size, phase, task):
    """Rank 1 comes 60 of 100 ms late to each collective, and not only to the last ones."""
    ranks = moving(size, calls=STEPS * 2)
    line = {"/run/train_llm.py:99 read": 0.6}
    slow = {"since": 1.0, "pending": False, "calls": STEPS * 2}
    slow["beat"] = {"phases": {phase: 0.7}, "lines": line}
    ranks[1] = rank_files(1, size, late=0.06, **slow)
    verdict, _ = whats_wrong.judge(facts_of(ranks))
    assert judged(facts_of(ranks)) == ("straggler", [1], "certain")
    assert task in verdict["reason"] and "train_llm.py:99 read (+60%)" in verdict["reason"]
    prompt, late = (ranks[rank]["dump"]["collectives"] for rank in (0, 1))
    ranks[1]["dump"]["collectives"] = prompt[:25] + late[25:]
    assert judged(facts_of(ranks))[0] == "healthy"


def test_on_a_gpu_who_comes_last_is_who_waits_least():
    """The host only queues NCCL's collectives, at the same moments on all ranks."""
    ranks = moving(4, calls=STEPS * 2)
    for rank, files in ranks.items():
        for call in files["dump"]["collectives"]:
            call["milliseconds"] = 5.0 if rank == 2 else 65.0
    assert judged(facts_of(ranks)) == ("straggler", [2], "certain")


def test_clocks_of_hosts_that_differ_make_no_straggler():
    ranks = moving(16)
    for rank in range(8, 16):
        ranks[rank] = rank_files(rank, 16, since=1.0, pending=False, late=7.0)
        ranks[rank]["beat"] |= {"time": NOW + 7, "since": NOW + 6}
    assert judged(facts_of(ranks))[0] == "healthy"


@pytest.mark.parametrize("phase", ["start", "compile", "evaluation", "checkpoint", "export"])
def test_what_takes_long_is_no_fault_while_a_rank_works(phase):
    beat = {"phase": phase, "cpu": 0.5}
    assert judged(facts_of(files_of(since=900.0, beat=beat)))[0] == "slow-but-healthy"


def checks(data=(1, 2), weights=7, losses=(3.0, 3.1)):
    """Return what a rank saw in two steps."""
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
        ({"printed": ["x/step-20 cannot be read, so the one before is tried"]}, 4,
         "corrupt-checkpoint", []),
    ],
)  # fmt: skip
def test_numbers(odd, size, kind, ranks):
    files = moving(size)
    for rank in files:
        files[rank]["beat"]["checks"] = checks(data=(rank * 100, rank * 100 + 50))
    if kind == "same-data":
        files[0]["beat"]["checks"] = odd["checks"]
    files[1]["beat"] |= odd
    assert judged(facts_of(files))[:2] == (kind, ranks)


@pytest.mark.parametrize("told, kind", [(2, "replicas-differ"), (1, "healthy")])
def test_replicas_are_judged_when_all_have_told(told, kind):
    """Of two that differ, a third says which is wrong: one bit had changed, and both were named."""
    files = moving(3)
    for rank in files:
        files[rank]["beat"]["checks"] = checks(data=(rank * 100, rank * 100 + 50))
    files[1]["beat"]["checks"] = checks(data=(5, 6), weights=8)
    if told == 1:
        files[2]["beat"]["checks"] = []
    assert judged(facts_of(files))[:2] == (kind, [1] * (told == 2))


@pytest.mark.parametrize("asked, kind", [(None, "finished"), (NOW, "interrupted")])
def test_a_run_that_ended_as_it_should(asked, kind):
    beat = {"end": "finished", "asked_to_end": asked}
    assert judged(facts_of(files_of(age=9e5, beat=beat), gone=range(4)))[0] == kind


def test_hosts_that_do_not_answer():
    ranks = {rank: rank_files(rank, 16, age=1.0 if rank < 8 else 50.0) for rank in range(16)}
    facts = facts_of(ranks, gone=range(8, 16))
    facts["hosts"]["h1"] = {"error": "No route to host"}
    assert judged(facts) == ("host-unreachable", list(range(8, 16)), "certain")
    del facts["hosts"]["h1"]
    assert judged(facts) == ("host-unreachable", list(range(8, 16)), "a guess")


def test_thousands_of_ranks_are_judged_in_seconds():
    size, calls = 4096, STEPS * 5
    one = rank_files(0, size, calls=calls, stack=REDUCE * 40)
    ranks = {}
    for rank in range(size):
        beat = one["beat"] | {"rank": rank, "pid": 1000 + rank, "host": f"h{rank // 8}"}
        ranks[rank] = one | {"beat": beat}
    late = {"calls": calls[:-2], "pending": False, "stack": IN_DATA, "beat": {"phase": "data"}}
    ranks[1234] = rank_files(1234, size, **late)
    facts = facts_of(ranks)
    began = time.process_time()
    verdict, _ = whats_wrong.judge(facts)
    named = verdict["kind"], verdict["ranks"], verdict["hosts"]
    assert named == ("hang-in-data", [1234], ["h154"])
    assert time.process_time() - began < 8


# ---- the command ---------------------------------------------------------------------------------
def ask(*args):
    """Run the tool; return its exit status, verdict and errors."""
    done = printed(TOOL, *args, "--json")
    verdict = json.loads(done.stdout) if done.stdout else None
    return done.returncode, verdict, done.stderr


@pytest.mark.parametrize(
    "args",
    [["nowhere"], [".", "--hosts", "nowhere"], ["."] * 2, [], [".", "--slurm-job", "no-such-job"]],
)
def test_wrong_arguments_are_told(args):
    status, _, errors = ask(*args)
    assert status == 2
    assert "whats_wrong.py: error: " in errors


def test_a_folder_without_ranks(tmp_path):
    status, verdict, _ = ask(tmp_path)
    assert (status, verdict["kind"]) == (3, "unknown")


def test_half_written_files(tmp_path):
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
