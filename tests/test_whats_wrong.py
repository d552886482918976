"""whats_wrong.py: what it concludes from made-up facts, and from real processes."""

import copy
import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from chapters import ROOT
from conftest import free_port

TOOL = ROOT / "diagnosing-errors/whats_wrong.py"
SCRIPT = "/run/train_llm.py"


@pytest.fixture(scope="module")
def tool():
    """The tool as a module."""
    spec = importlib.util.spec_from_file_location("whats_wrong", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# ---- made-up facts ---------------------------------------------------------------------------

FLAG = ("all_reduce", [[]], 405, "mean_over_ranks")
BUCKET = ("all_reduce", [[606976]], 746, "train_step")
GATHER = ("all_gather", [[21]], 412, "from_all_ranks")
STEPS = [BUCKET, BUCKET, FLAG, GATHER] * 5


def collectives(calls, pending):
    """Return a flight recorder's dictionary with these calls, of which the last may be pending."""
    entries = [
        {
            "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": number,
            "profiling_name": f"gloo:{op}", "input_sizes": sizes, "input_dtypes": ["Float"],
            "state": "scheduled", "retired": not pending or number < len(calls),
            "timeout_ms": 600_000, "is_p2p": False,
            "frames": [{"filename": "/x/site-packages/torch/d.py", "line": 1, "name": "wrapper"},
                       {"filename": SCRIPT, "line": line, "name": name}],
        }
        for number, (op, sizes, line, name) in enumerate(calls, 1)
    ]  # fmt: skip
    last = len(calls)
    patient = entries[-1] | {"process_group": ["1", "undefined"], "pg_id": 1, "retired": False}
    patient |= {"timeout_ms": 7 * 24 * 3_600_000, "collective_seq_id": 9}
    status = {str(group): {"last_enqueued_collective": seq} for group, seq in ((0, last), (1, 9))}
    return {"pg_status": status, "entries": [*entries, patient]}


def frames(*own, inner=("/x/site-packages/torch/distributed/distributed_c10d.py", "all_reduce")):
    """Return a main thread's frames: (line, function, source) of the script, then a package's."""
    stack = [[SCRIPT, line, name, source] for line, name, source in own]
    return stack + ([[inner[0], 3252, inner[1], "work.wait()"]] if inner else [])


REDUCE = frames((746, "train_step", "loss.backward()"))
IN_DATA = frames((735, "train_step", "batch = next(batches)"), inner=None)


def rank_files(rank, size, since=60.0, calls=STEPS, pending=True, stack=REDUCE, age=1.0, **changes):
    """Return what the files of a rank say that has been in one place for so many seconds."""
    now = 1_000_000.0
    beat = {
        "rank": rank, "world_size": size, "host": f"h{rank // 8}", "pid": 1000 + rank,
        "started": now - 500, "time": now, "phase": "compute", "step": 12, "since": now - since,
        "step_ended": now - since, "step_seconds": 1.0, "data_seconds": 0.1, "local_seconds": 0.5,
        "host_memory_gib": 0.7, "host_memory_gib_first": 0.69, "open_files": 35, "error": None,
    }  # fmt: skip
    dump = {
        "rank": rank, "time": now, "reason": "asked",
        "stacks": [{"thread": "MainThread", "frames": stack}],
        "collectives": collectives(calls, pending),
    }  # fmt: skip
    beat |= changes.pop("beat", {})
    return {"beat": beat, "age": age, "dump": dump, "dump_age": age, "crash": ""} | changes


def worker(rank, state="S", **changes):
    """Return what a host says of a rank's process."""
    return {
        "rank": rank, "pid": 1000 + rank, "pid_inside": 1000 + rank, "state": state, "cpu": 0.0,
        "age": 500.0, "files_limit": 1024, "stuck_sockets": [], "frames": [], "no_stack": None,
        "environment": {"WORLD_SIZE": "4", "MASTER_ADDR": "h0", "MASTER_PORT": "29500"},
    } | changes  # fmt: skip


def facts_of(ranks, gone=(), workers=None, **changes):
    """Return facts about these ranks, all of whose hosts answer; `gone` have no process."""
    hosts = {}
    for rank, files in ranks.items():
        host = files["beat"]["host"] if files["beat"] else "h0"
        hosts.setdefault(host, {"host": host, "workers": [], "launchers": [], "hidden": 0,
                                "interfaces": {"lo": "up", "eth0": "up"}, "kernel": [],
                                "oom_kills": 0})  # fmt: skip
        if rank not in gone:
            hosts[host]["workers"].append((workers or {}).get(rank) or worker(rank))
    return {
        "run": "/run/outputs/x", "notes": [], "text": "", "logs": {}, "rows": [], "rows_age": 5.0,
        "checkpoints": {}, "exported": False, "ranks": ranks, "hosts": hosts,
        "disk": {"free": 2**40, "files_free": 10**6, "writable": True},
    } | changes  # fmt: skip


def four(**odd):
    """Return the files of four ranks; of rank 1 with these changes."""
    return {rank: rank_files(rank, 4, **(odd if rank == 1 else {})) for rank in range(4)}


def judged(tool, facts):
    """Return kind, ranks and sureness of the verdict; it must be JSON and have a section."""
    before = copy.deepcopy(facts)
    verdict, ranks = tool.judge(facts)
    assert json.loads(json.dumps(verdict)) == verdict
    assert facts == before, "judging changes no fact"
    assert verdict["section"].endswith("#" + tool.KINDS[verdict["kind"]])
    assert "\n" not in verdict["reason"]
    tool.show(facts, verdict, ranks)
    return verdict["kind"], verdict["ranks"], verdict["sure"]


def own_error(text):
    return {"phase": "failed", "error": f"Traceback (most recent call last):\n{text}"}


LOST = own_error("RuntimeError: Connection closed by peer [127.0.0.1]:41641. This is typically ...")


# ---- verdicts on made-up facts -----------------------------------------------------------------


def test_a_run_that_moves_is_healthy(tool):
    ranks = {rank: rank_files(rank, 4, since=1.0) for rank in range(4)}
    assert judged(tool, facts_of(ranks)) == ("healthy", [], "certain")


def test_a_rank_without_a_batch_is_named(tool):
    beat = {"phase": "data"}
    facts = facts_of(four(calls=STEPS[:-2], pending=False, stack=IN_DATA, beat=beat))
    assert judged(tool, facts) == ("hang-in-data", [1], "certain")


def test_a_loader_that_hangs_on_all_ranks(tool):
    beat = {"phase": "data"}
    ranks = {r: rank_files(r, 2, stack=IN_DATA, beat=beat, pending=False) for r in (0, 1)}
    assert judged(tool, facts_of(ranks))[:2] == ("hang-in-data", [0, 1])


@pytest.mark.parametrize("size, sure", [(2, "likely"), (4, "certain")])
def test_a_skipped_collective(tool, size, sure):
    ranks = {
        rank: rank_files(rank, size, calls=[*STEPS, BUCKET, BUCKET, FLAG]) for rank in range(size)
    }
    ranks[1] = rank_files(1, size, calls=[*STEPS, BUCKET, BUCKET, GATHER])
    assert judged(tool, facts_of(ranks)) == ("skipped-collective", [1], sure)


@pytest.mark.parametrize("size, sure", [(2, "likely"), (4, "certain")])
@pytest.mark.parametrize(
    "odd",
    [("all_reduce", [[1000]], 405, "mean_over_ranks"), ("broadcast", [[]], 404, "mean_over_ranks")],
)
def test_another_shape_and_another_order(tool, odd, size, sure):
    ranks = {
        rank: rank_files(rank, size, calls=[*STEPS, BUCKET, BUCKET, FLAG]) for rank in range(size)
    }
    ranks[1] = rank_files(1, size, calls=[*STEPS, BUCKET, BUCKET, odd])
    assert judged(tool, facts_of(ranks)) == ("mismatched-collective", [1], sure)


def test_where_two_ranks_differ_and_nothing_decides_both_are_named(tool):
    ranks = {0: rank_files(0, 2, calls=[FLAG]), 1: rank_files(1, 2, calls=[GATHER])}
    assert judged(tool, facts_of(ranks)) == ("mismatched-collective", [0, 1], "a guess")


def test_a_rank_that_left_for_another_group_has_skipped(tool):
    stack = frames((357, "all_ranks", "dist.all_reduce(answers, group=patient_group())"))
    facts = facts_of(four(calls=STEPS[:-1], pending=False, stack=stack))
    assert judged(tool, facts)[:2] == ("skipped-collective", [1])


def test_a_rank_that_computes_on_while_others_wait(tool):
    stack = frames((727, "loss_of", "while True: pass"), inner=None)
    facts = facts_of(four(calls=STEPS[:-2], pending=False, stack=stack))
    assert judged(tool, facts)[:2] == ("straggler", [1])


def test_all_in_one_collective_that_does_not_end(tool):
    facts = facts_of({rank: rank_files(rank, 16) for rank in range(16)})
    link = {"from": "10.0.0.1", "to": "10.0.0.2", "bytes": 5, "again": 4}
    facts["hosts"]["h0"]["workers"][0]["stuck_sockets"] = [link]
    facts["hosts"]["h1"] = {"error": "Connection timed out", "address": "10.0.0.2"}
    verdict, _ = tool.judge(facts)
    assert (verdict["kind"], verdict["hosts"]) == ("network", ["h1"])
    assert "h0, h1" in verdict["reason"]


def test_a_stopped_process(tool):
    workers = {1: worker(1, "T")}
    facts = facts_of(four(age=40.0, beat={"phase": "start"}), workers=workers)
    assert judged(tool, facts) == ("stopped-process", [1], "certain")


def test_of_those_that_died_the_first_with_an_error_of_its_own_is_named(tool):
    ranks = {rank: rank_files(rank, 4, beat=LOST, age=30.0) for rank in range(4)}
    ranks[2] = rank_files(2, 4, age=31.0, beat=own_error("ValueError: injected"))
    assert judged(tool, facts_of(ranks, gone=range(4))) == ("crash", [2], "certain")


@pytest.mark.parametrize(
    "message, kind, named",
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to", "device-out-of-memory", [1]),
        ("OSError: [Errno 24] Too many open files: 'x'", "too-many-open-files", [1]),
        ("cannot write x: [Errno 28] No space left on device", "disk-full", [1]),
        ("MemoryError", "host-memory-leak", [1]),
        ("the gradient is not finite, because the loss of rank 3 on h2 is not", "not-finite", [3]),
        ("step 5: the weights of rank 0 on h1, rank 2 on h2 differ", "replicas-differ", [0, 2]),
        ("h1 cannot meet the other ranks at h0:29400: timed out", "rendezvous", [1]),
        ("RuntimeError: Unable to find address for: eth9", "rendezvous", [1]),
        ("no checkpoint in x/checkpoints can be read; delete them", "corrupt-checkpoint", [1]),
    ],
)  # fmt: skip
def test_an_error_tells_its_kind(tool, message, kind, named):
    facts = facts_of(four(age=31.0, beat={"phase": "failed", "error": message}), gone=[1])
    assert judged(tool, facts)[:2] == (kind, named)


def test_a_rank_that_vanished_was_killed_and_the_others_lost_it(tool):
    ranks = {rank: rank_files(rank, 4, beat=LOST, age=30.0) for rank in range(4)}
    ranks[1] = rank_files(1, 4, age=31.5)
    facts = facts_of(ranks, gone=range(4))
    assert judged(tool, facts) == ("killed", [1], "likely")
    failed = "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 7)"
    facts["text"] = f"Root Cause (first observed failure):\n{failed}"
    assert judged(tool, facts) == ("killed", [1], "certain")
    facts["hosts"]["h0"]["kernel"] = [(31.0, "Out of memory: Killed process 1001 (python)")]
    assert "kernel" in tool.judge(facts)[0]["reason"]


def test_a_segfault_is_told_by_the_crash_file(tool):
    crash = "Fatal Python error: Segmentation fault\n\n"
    crash += "Current thread 0x1 (most recent call first):"
    crash += f'\n  File "{SCRIPT}", line 778 in break_now\n'
    facts = facts_of(four(age=31.0, crash=crash), gone=[1])
    assert judged(tool, facts) == ("segfault", [1], "certain")
    assert "train_llm.py:778 break_now" in tool.judge(facts)[0]["reason"]


def test_gloo_aborts_on_another_size_and_the_survivor_tells(tool):
    crash = "Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n"
    crash += '  File "/x/torch/distributed/distributed_c10d.py", line 3252 in all_reduce\n'
    odd = ("all_reduce", [[1000]], 405, "mean_over_ranks")
    survivor = {"beat": LOST, "calls": [*STEPS, BUCKET, BUCKET, odd]}
    ranks = {0: rank_files(0, 2, age=31.0, crash=crash, dump=None)}
    ranks[1] = rank_files(1, 2, age=30.0, **survivor)
    assert judged(tool, facts_of(ranks, gone=(0, 1))) == ("mismatched-collective", [1], "likely")


def test_a_timeout_of_all_is_explained_by_their_dumps(tool):
    late = own_error("RuntimeError: Timed out waiting 600000ms for recv operation to complete")
    ranks = four(calls=STEPS[:-2], pending=False, stack=IN_DATA, beat={"phase": "data"} | late)
    for rank in (0, 2, 3):
        ranks[rank]["beat"] |= late
    assert judged(tool, facts_of(ranks, gone=range(4)))[:2] == ("hang-in-data", [1])


@pytest.mark.parametrize("name, value", [("local", 0.95), ("data", 0.95)])
@pytest.mark.parametrize("size", [2, 4])
def test_stragglers(tool, size, name, value):
    ranks = {rank: rank_files(rank, size, since=1.0) for rank in range(size)}
    ranks[1]["beat"] |= {"local_seconds": 0.95, f"{name}_seconds": value}
    rows = [{"step": step, "skew": 0.3, "slowest_rank": 1} for step in range(12)]
    rows[0] |= {"skew": 0.01}
    facts = facts_of(ranks, rows=rows)
    assert judged(tool, facts) == ("straggler", [1], "certain")
    passing = [row | {"skew": 0.3 * (row["step"] > 5)} for row in rows]
    assert judged(tool, facts_of(ranks, rows=passing))[0] == "healthy"
    told = "waiting for data" if name == "data" else "computing"
    assert told in tool.judge(facts)[0]["reason"]


def test_all_slow_alike_is_no_finding(tool):
    slow = {"step_seconds": 90.0, "local_seconds": 89.0}
    ranks = {rank: rank_files(rank, 4, since=60.0, beat=slow) for rank in range(4)}
    assert judged(tool, facts_of(ranks))[0] == "healthy"
    rows = [{"step": n, "loss": 3.0, "tokens_per_second": 100 if n < 9 else 40} for n in range(12)]
    assert judged(tool, facts_of(ranks, rows=rows))[0] == "slow-but-healthy"


@pytest.mark.parametrize("phase", ["start", "evaluation", "checkpoint", "export"])
def test_what_takes_long_is_no_fault_while_a_rank_works(tool, phase):
    ranks = {rank: rank_files(rank, 4, since=900.0, beat={"phase": phase}) for rank in range(4)}
    facts = facts_of(ranks, workers={0: worker(0, cpu=0.5)})
    assert judged(tool, facts)[0] == "slow-but-healthy"


@pytest.mark.parametrize(
    "rows, kind",
    [
        ([{"step": n, "loss": 3.0 if n < 9 else float("nan")} for n in range(10)], "not-finite"),
        ([{"step": n, "loss": 3.0 + n % 2 / 10 + 4 * (n == 9)} for n in range(10)], "loss-spike"),
        ([{"step": n, "loss": 6.0 - n / 4} for n in range(9)], "healthy"),
        ([{"step": 0, "val_loss": 5.9}, {"loss": "?"}, {"step": 1, "loss": 5.9}], "healthy"),
    ],
)  # fmt: skip
def test_losses(tool, rows, kind):
    ranks = {rank: rank_files(rank, 4, since=1.0) for rank in range(4)}
    assert judged(tool, facts_of(ranks, rows=rows))[0] == kind


@pytest.mark.parametrize(
    "changes, kind",
    [
        ({"host_memory_gib": 2.5}, "host-memory-leak"),
        ({"open_files": 900}, "too-many-open-files"),
        ({"warning": "step 5: the same losses, so the same data: rank 1 on h0"}, "same-data"),
    ],
)  # fmt: skip
def test_what_grows_or_was_warned_of(tool, changes, kind):
    facts = facts_of(four(since=1.0, beat=changes))
    for rank in (0, 2, 3):
        facts["ranks"][rank]["beat"]["since"] += 59
    assert judged(tool, facts)[:2] == (kind, [1])


def test_disk_and_checkpoints(tool):
    ranks = {rank: rank_files(rank, 4, since=1.0) for rank in range(4)}
    full = {"free": 4096, "files_free": 10**6, "writable": True}
    assert judged(tool, facts_of(ranks, disk=full))[0] == "disk-full"
    broken = {"step-00000050.broken": 100.0, "step-00000040": 900.0}
    assert judged(tool, facts_of(ranks, checkpoints=broken))[0] == "corrupt-checkpoint"
    assert judged(tool, facts_of(ranks, checkpoints={"step-00000050.broken": 9e9}))[0] == "healthy"


@pytest.mark.parametrize("phase, kind", [("finished", "finished"), ("stopped", "interrupted")])
def test_a_run_that_ended_as_it_should(tool, phase, kind):
    ranks = {rank: rank_files(rank, 4, age=9e5, beat={"phase": phase}) for rank in range(4)}
    assert judged(tool, facts_of(ranks, gone=range(4)))[0] == kind


def test_hosts_that_do_not_answer(tool):
    ranks = {rank: rank_files(rank, 16, age=1.0 if rank < 8 else 50.0) for rank in range(16)}
    facts = facts_of(ranks, gone=range(8, 16))
    facts["hosts"]["h1"] = {"error": "No route to host"}
    assert judged(tool, facts) == ("host-unreachable", list(range(8, 16)), "certain")
    del facts["hosts"]["h1"]
    assert judged(tool, facts) == ("host-unreachable", list(range(8, 16)), "a guess")


def test_files_of_an_earlier_start_are_ignored(tool):
    ranks = {rank: rank_files(rank, 2, since=1.0) for rank in range(2)}
    ranks |= {rank: rank_files(rank, 4, age=5000.0) for rank in (2, 3)}
    facts = facts_of(ranks, gone=(2, 3))
    assert judged(tool, facts)[0] == "healthy"
    assert "earlier start" in tool.judge(facts)[0]["notes"][0]


def test_ranks_that_do_not_meet(tool):
    stack = frames((259, "join_group", "x"), (1, "init_process_group", "y"))
    workers = {rank: worker(rank, age=60.0, frames=stack) for rank in range(3)}
    facts = facts_of({rank: {"beat": None} for rank in range(3)}, workers=workers) | {"ranks": {}}
    assert judged(tool, facts)[:2] == ("rendezvous", [3])
    workers[2]["environment"] |= {"MASTER_ADDR": "h9"}
    assert judged(tool, facts)[:2] == ("rendezvous", [2])
    workers[2]["environment"] |= {"MASTER_ADDR": "h0", "GLOO_SOCKET_IFNAME": "eth9"}
    assert judged(tool, facts)[:2] == ("rendezvous", [2])


def test_garbage_is_survived(tool):
    good = rank_files(0, 4, since=1.0)
    junk = ["x", 5, None, [], {}, {"entries": 7}, {"pg_status": {}, "entries": [{}, 3]}, [[["a"]]]]
    ranks = {0: good, 1: {"beat": None, "age": 1.0, "dump": None, "dump_age": None, "crash": ""}}
    for number, some in enumerate(junk, 2):
        dump = {"stacks": some, "collectives": some, "reason": some}
        beat = {"step": some, "step_seconds": some, "since": some, "started": some, "warning": some}
        ranks[number] = rank_files(number, 4, since=1.0, dump=dump, beat=beat)
    verdict, _ = tool.judge(facts_of(ranks))
    assert verdict["kind"] in tool.KINDS
    assert any("cannot be read" in note for note in verdict["notes"])


def test_thousands_of_ranks_are_judged_in_seconds(tool):
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
    verdict, _ = tool.judge(facts)
    assert (verdict["kind"], verdict["ranks"], verdict["hosts"]) == (
        "hang-in-data",
        [1234],
        ["h154"],
    )
    assert time.process_time() - began < 8


def test_spans(tool):
    assert tool.spans([5, 0, 1, 2, 3]) == "0-3,5"
    assert tool.spans([]) == ""


def test_only_what_trains_into_the_folder_is_a_worker(tool):
    python, script = "/venv/bin/python3.11", "03-job-launchers/train_llm.py"
    run, rank = "/w/outputs/x", {"RANK": "1"}
    inside = lambda *words: tool.belongs(list(words), tool.script_in(list(words)), rank, "/w", run)  # noqa: E731
    assert inside(python, "-u", script, "-e", "x")
    assert inside(python, script, "--experiment-name=x", "--save-dir", "/w/outputs")
    assert not inside(python, script)
    assert not inside(python, script, "-e", "x", "--save-dir", "/tmp")
    assert tool.script_in([python, "-c", "from multiprocessing import x", "a.py"]) is None
    assert tool.script_in(["bash", "train_llm.py"]) is None
    assert tool.script_in([python, str(TOOL), run]) is None


# ---- the command ---------------------------------------------------------------------------------


def whats_wrong(*args, timeout=60):
    """Run the tool; return its exit status, verdict and errors."""
    command = [sys.executable, TOOL, *args, "--json"]
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=timeout, check=False
    )
    verdict = json.loads(done.stdout) if done.stdout else None
    return done.returncode, verdict, done.stderr


@pytest.mark.parametrize("args", [["nowhere"], [".", "--hosts", "nowhere"], ["."] * 2, []])
def test_wrong_arguments_take_one_line(args):
    status, _, errors = whats_wrong(*args)
    assert status == 2
    assert errors.count("\n") == 1 and errors.startswith("whats_wrong.py: error: ")


def test_a_folder_without_ranks_or_processes(tmp_path):
    status, verdict, _ = whats_wrong(tmp_path)
    assert (status, verdict["kind"]) == (3, "unknown")
    log = tmp_path / "log"
    log.write_text("[rank1]: ValueError: bad\n[rank0]: RuntimeError: Connection reset by peer\n")
    status, verdict, _ = whats_wrong(tmp_path, "--log", log)
    assert (status, verdict["kind"], verdict["ranks"]) == (1, "crash", [1])
    (tmp_path / "model").mkdir()
    (tmp_path / "error.json").write_text('{"message": {"message": "MemoryError: x"}}')
    status, verdict, _ = whats_wrong(tmp_path, "--error-files", tmp_path)
    assert (status, verdict["kind"]) == (1, "host-memory-leak")
    assert whats_wrong(tmp_path)[1]["kind"] == "finished"


def test_half_written_files(tmp_path):
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    (ranks / "00000.json").write_text('{"rank": 0, "ti')
    (ranks / "00000.dump.json").write_bytes(b"\xff\x00{")
    (ranks / "00001.json").write_text("[1]")
    (ranks / "x.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n{"st')
    status, verdict, errors = whats_wrong(tmp_path)
    assert (status, verdict["kind"], errors) == (3, "unknown", "")
    assert "0-1 cannot be read" in verdict["notes"][0]


# ---- real processes ------------------------------------------------------------------------------

TRAIN = """
    import os, sys, time, signal, json
    import torch, torch.distributed as dist
    from datetime import timedelta

    def batches(fault):
        step = 0
        while True:
            step += 1
            if fault == "hang" and step == 3:
                time.sleep(1e6)
            yield step

    def train_step(batches):
        step = next(batches)
        if fault == "stop" and step == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.05)
        dist.all_reduce(torch.zeros(1))

    fault = sys.argv[1] if os.environ["RANK"] == "1" else "none"
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    data = batches(fault)
    while True:
        train_step(data)
"""


@pytest.fixture
def run(tmp_path):
    """Start two ranks of a small script that writes no heartbeats, as the chapters write none."""
    script = tmp_path / "train_llm.py"
    script.write_text(textwrap.dedent(TRAIN))
    folder = tmp_path / "outputs/x"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 2, "loss": 3.0}\n')
    started = []

    def start(fault):
        meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank in "01":
            environment = os.environ | meet | {"RANK": rank, "LOCAL_RANK": rank}
            command = [sys.executable, script, fault, "-e", "x"]
            started.append(subprocess.Popen(command, cwd=tmp_path, env=environment))
        return folder, started

    yield start
    for process in started:
        process.kill()
        process.wait(timeout=20)


def until_it_waits(processes, timeout=60):
    """Wait until rank 0 is in a collective, and rank 1 is not going to come."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        before = sum(sum(psutil.Process(p.pid).cpu_times()[:2]) for p in processes)
        time.sleep(2)
        after = sum(sum(psutil.Process(p.pid).cpu_times()[:2]) for p in processes)
        if before > 2 and after - before < 0.05:
            return
    pytest.fail("the ranks do not come to rest")


def collected(folder):
    """Return what a host shows, asked as over ssh: the tool comes from standard input."""
    command = ["python3", "-", "--collect", folder]
    told = {"input": TOOL.read_text(), "capture_output": True, "text": True}
    return json.loads(subprocess.run(command, **told, timeout=30, cwd="/", check=True).stdout)


@pytest.mark.slow
@pytest.mark.parametrize("fault, kind", [("hang", "hang-in-data"), ("stop", "stopped-process")])
def test_processes_alone_tell_a_fault(run, fault, kind):
    folder, processes = run(fault)
    until_it_waits(processes)
    fact = collected(folder)
    assert sorted(one["rank"] for one in fact["workers"]) == [0, 1]
    assert {one["pid"] for one in fact["workers"]} == {process.pid for process in processes}
    old = time.time() - 300
    os.utime(folder / "metrics.jsonl", (old, old))
    deadline = time.monotonic() + 60  # a process must have been there for a while
    while (found := whats_wrong(folder))[1]["kind"] != kind and time.monotonic() < deadline:
        time.sleep(2)
    status, verdict, _ = found
    assert (status, verdict["kind"], verdict["ranks"]) == (1, kind, [1])


@pytest.mark.slow
def test_it_looks_at_processes_only_and_leaves_them_alone(run):
    folder, processes = run("none")
    time.sleep(15)
    status, verdict, _ = whats_wrong(folder)
    assert (status, verdict["kind"]) == (0, "healthy")
    assert all(process.poll() is None for process in processes)
    for process in processes:
        assert psutil.Process(process.pid).status() != psutil.STATUS_STOPPED
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=20)
    assert whats_wrong(folder)[0] == 3
