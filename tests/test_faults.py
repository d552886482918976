"""Break runs on purpose, and check that whats_wrong.py names the fault, the rank and the line.

The table of the README and the samples of faults.md come from these runs. To renew them, delete
the file RESULTS, and run `python -m pytest tests/test_faults.py -k made_fault --record` on an idle
machine. To renew a few of them, keep the file, and choose the faults with -k.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import inject
import pytest
import whats_wrong

from cluster.cluster import wait_until
from conftest import ROOT, SCRIPTS, SHORT, has_logged, run_command, start_ranks
from runs import wait_for_verdict, watched_command

pytestmark = pytest.mark.tool

CHAPTER = ROOT / "diagnosing-errors"
RESULTS = ROOT / "benchmarks/results/faults-cpu-2cores.json"
FAULTS_PAGE = (CHAPTER / "faults.md").read_text()

TRAIN = "diagnosing-errors/train_llm.py"
STRANGER = "diagnosing-errors/stranger.py"
DDP = "02-ddp/train_llm.py"
FSDP = "04-fsdp/train_llm.py"

FLAGS = """--device cpu --precision fp32 -s 64 --global-batch-size 9 -b 3 --num-steps 5000
    --log-every 5 --checkpoint-every 10 --eval-every 1000 --eval-samples 9""".split()
# Each rank has two threads on half a core, and tiny micro-batches.
SLOW = "-b 1 --global-batch-size 36 -s 128".split()
# After a damaged checkpoint, the same command continues from the checkpoint before.
RESUME = "--num-steps 20".split()
NO_FAULT = ("healthy", "slow-but-healthy")
# The first checkpoint, of step 10, is whole.
FIRST_STEP = 12
# A rank that stops or waits is found after 10 s; the limit leaves time for a busy machine.
PATIENCE = 90


@dataclass
class Case:
    """A fault that is made once, and the verdict that it must have."""

    fault: str
    script: str
    rank: int
    kind: str
    # The code of the line that the verdict names.
    line: str = ""
    # The ranks that the verdict names, if they are not just the rank with the fault.
    ranks: tuple | None = None
    flags: tuple = ()

    @property
    def culprits(self):
        return [self.rank] if self.ranks is None else list(self.ranks)


CASES = [
    Case("crash", DDP, 1, "crash", "optimizer.step()"),
    Case("oom-device", STRANGER, 1, "device-out-of-memory", "opt.step()"),
    Case("segfault", STRANGER, 0, "segfault", "opt.step()"),
    Case("oom-kill", FSDP, 2, "killed"),
    Case("file-leak", STRANGER, 1, "too-many-open-files"),
    Case("hang-data", STRANGER, 1, "hang-in-data", "enumerate(loader)"),
    Case("skip-collective", STRANGER, 0, "skipped-collective", "dist.all_reduce(mean"),
    Case("wrong-shape", TRAIN, 1, "mismatched-collective", "dist.all_reduce(torch.zeros(1000"),
    Case("wrong-order", TRAIN, 2, "mismatched-collective", "dist.broadcast(loss, 0)"),
    Case("stop-process", DDP, 1, "stopped-process"),
    Case("slow-compute", FSDP, 1, "straggler", "optimizer.step()"),
    Case("slow-data", STRANGER, 0, "straggler", "enumerate(loader)"),
    Case("memory-leak", STRANGER, 1, "host-memory-leak"),
    Case("nan-data", STRANGER, 0, "not-finite"),
    Case("nan-gradient", FSDP, 2, "not-finite"),
    # With two replicas, nobody can tell which of them is right.
    Case("bit-flip", STRANGER, 1, "replicas-differ", ranks=(0, 1)),
    Case("same-data", TRAIN, 1, "same-data", ranks=(0, 1)),
    Case("loss-spike", TRAIN, 1, "loss-spike"),
    # All ranks read the checkpoint, so the verdict names no rank.
    Case("corrupt-checkpoint", DDP, 0, "corrupt-checkpoint", ranks=(), flags=RESUME),
]
HEALTHY_CASES = [Case("healthy", script, 0, "healthy") for script in (STRANGER, DDP, FSDP)]
HEALTHY_CASES += [Case("slow but healthy", TRAIN, 0, "healthy", flags=SLOW)]


# ---- broken runs -------------------------------------------------------------------------------
def script_words(case):
    """Return the script with its arguments, after the injector if the fault needs it."""
    where = f"{case.fault}@rank{case.rank}:step{FIRST_STEP}"
    words = [ROOT / case.script]
    if case.script != STRANGER:
        words += [*FLAGS, *case.flags]
    if case.fault in inject.FAULTS:
        return [CHAPTER / "inject.py", where, *words]
    return [*words, "--inject", where] if case.kind != "healthy" else words


@contextmanager
def started(case, folder, words):
    """Start the ranks of a case under torchrun and watched.py; end them afterwards."""
    if case.script != STRANGER:
        words = [*words, "--save-dir", folder, "-e", "run"]
    command = watched_command(
        folder / "run", "--stall", 15, *words, ranks=2 if case.script == STRANGER else 3
    )
    # Many machines limit a process to 1,024 open files.
    command = ["bash", "-c", f"ulimit -S -n 1024 && exec {shlex.join(command)}"]
    # torchrun kills ranks that still run a second after SIGTERM.
    env = os.environ | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(timeout=60)


def ask(folder, *flags):
    """Return the output of whats_wrong.py."""
    return run_command(CHAPTER / "whats_wrong.py", folder / "run", *flags).stdout


def break_and_find(case, folder):
    """Run a case; return the first verdict other than "healthy", and what led to it."""
    words = script_words(case)
    first_sign = "breaks in step"
    if case.fault == "corrupt-checkpoint":
        with started(case, folder, words) as process:
            assert process.wait(timeout=300) == 0, (folder / "log").read_text()
        words, first_sign = words[2:], "cannot be read"
    with started(case, folder, words):
        log = folder / "log"
        wait_until(lambda: first_sign in log.read_text(), 240, f"the log has {first_sign!r}")
        start_time = time.monotonic()

        def find_verdict():
            verdict = json.loads(ask(folder, "--json"))
            return verdict if verdict["kind"] not in (*NO_FAULT, "unknown") else None

        verdict = wait_until(find_verdict, PATIENCE, "a verdict")
        seconds = time.monotonic() - start_time
        # The report has the same verdict, for people.
        text = ask(folder)
    row = {"script": case.script, "fault": case.fault, "rank": case.rank, "verdict": seconds}
    row |= {"said": verdict["kind"], "ranks": verdict["ranks"], "sure": verdict["sure"]}
    row |= {"reason": verdict["reason"], "log": symptoms(log), "text": text}
    row["right"] = is_right(case, row)
    return json.loads(json.dumps(row).replace(str(folder), "outputs").replace(f"{ROOT}/", ""))


def is_right(case, row):
    """Return whether a verdict has the kind, the ranks and the line of the case."""
    expected = (case.kind, case.culprits)
    return (row["said"], row["ranks"]) == expected and line_of(case) in row["reason"]


def line_of(case):
    """Return the script's name and the number of the line that the verdict names."""
    script = ROOT / case.script
    lines = script.read_text().splitlines()
    numbers = [number for number, line in enumerate(lines, 1) if case.line in line]
    return f"{script.name}:{numbers[0]} " if case.line else ""


def symptoms(log):
    """Return the problems that the ranks and torchrun report, without repetitions."""
    telling = r".*breaks in step|warning|train_llm.py: error|(\[rank\d\]: )?\w*(Error|Exception)\b"
    lines = [line[:160] for line in log.read_text().splitlines() if re.match(telling, line)]
    return list(dict.fromkeys(lines))


def find_nothing(case, folder):
    """Ask five times about a healthy run; return the verdicts."""
    with started(case, folder, script_words(case)):

        def takes_steps():
            heartbeats = [path.read_text() for path in folder.glob("run/ranks/0000?.json")]
            return heartbeats and not any('"step_seconds": null' in text for text in heartbeats)

        wait_until(takes_steps, 240, "all ranks take steps")
        verdicts = []
        for _ in range(5):
            time.sleep(2)
            verdicts.append(json.loads(ask(folder, "--json"))["kind"])
    wrong = [kind for kind in verdicts if kind not in NO_FAULT]
    row = {"script": case.script, "fault": case.fault, "said": wrong[0] if wrong else "nothing"}
    return row | {"right": not wrong}


@pytest.fixture
def record(request):
    """Return a function that replaces the published rows of a case, if --record is given.

    The file names the machine that began it. So delete the file before all cases are recorded on a
    different machine.
    """

    def write(row):
        if not request.config.getoption("--record"):
            return
        from harness import describe_machine, keep

        if not RESULTS.exists():
            keep(RESULTS, describe_machine(), {"rows": []})
        published = json.loads(RESULTS.read_text())
        name = row["script"], row["fault"]
        rows = [old for old in published["rows"] if (old["script"], old["fault"]) != name]
        order = {case.fault: number for number, case in enumerate([*CASES, *HEALTHY_CASES])}
        rows = sorted([*rows, row], key=lambda row: order[row["fault"]])
        keep(RESULTS, published["machine"], {"rows": rows})

    return write


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fault)
def test_made_fault_gets_its_verdict(case, tmp_path, record):
    row = break_and_find(case, tmp_path)
    assert row["right"], f"expected {asdict(case)}, found {json.dumps(row, indent=1)}"
    record(row)


@pytest.mark.slow
# Beside other processes, a healthy run may have a straggler.
@pytest.mark.alone
@pytest.mark.parametrize("case", HEALTHY_CASES, ids=lambda case: f"{case.fault} {case.script}")
def test_made_fault_of_no_kind_gets_no_verdict(case, tmp_path, record):
    row = find_nothing(case, tmp_path)
    assert row["right"], row
    record(row)


# ---- the pages ---------------------------------------------------------------------------------
@pytest.mark.xfail(
    reason="Rows of older scripts name other lines; renew them with --record on an idle machine.",
    strict=True,
)
def test_published_table_has_all_faults_and_no_false_alarm():
    rows = json.loads(RESULTS.read_text())["rows"]
    for case in [*CASES, *HEALTHY_CASES]:
        runs = [row for row in rows if (row["script"], row["fault"]) == (case.script, case.fault)]
        assert runs, f"no row of {case}"
        assert all(row["right"] for row in runs), runs
        assert all(line_of(case) in row.get("reason", "") for row in runs), runs


def test_each_fault_has_one_injector_a_case_and_a_sample(load):
    inside = load("diagnosing-errors").FAULTS
    assert not inside.keys() & inject.FAULTS.keys()
    faults = [*inject.FAULTS, *inside]
    assert sorted(faults) == sorted(case.fault for case in CASES)
    assert sorted(faults) == sorted(re.findall(r'cog fault\("([a-z-]+)"\)', FAULTS_PAGE))


def test_every_fault_that_a_verdict_names_has_a_section():
    literals = re.findall(r'Finding\("([a-z-]+)"', (CHAPTER / "whats_wrong.py").read_text())
    verdicts = {*literals, *whats_wrong.CLUES} - {*whats_wrong.NO_FAULT}
    headings = re.findall(r"^#+ (.*)$", FAULTS_PAGE, re.M)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    assert {"hang-in-data", "unknown"} <= verdicts
    assert verdicts <= anchors, f"faults.md has no section {verdicts - anchors}"


WITH_DEBUG_LEVEL = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
if sys.argv[1] == "ddp":
    DistributedDataParallel(torch.nn.Linear(4, 4))(torch.ones(2, 4)).sum().backward()
else:
    dist.all_reduce(torch.ones(3 + dist.get_rank()))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "debug_level, mode, status, message",
    [
        ("DETAIL", "mismatch", 1, "Detected mismatch between collectives on ranks"),
        ("DETAIL", "ddp", -signal.SIGSEGV, ""),
        ("INFO", "ddp", 0, ""),
    ],
)
def test_debug_level_has_the_documented_effect(
    debug_level, mode, status, message, tmp_path, monkeypatch
):
    """Check faults.md: a new release of torch may no longer end in a segmentation fault."""
    script = tmp_path / "script.py"
    script.write_text(WITH_DEBUG_LEVEL)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", debug_level)
    processes = start_ranks(2, [script, mode], tmp_path)
    statuses = {process.wait(timeout=200) for process in processes}
    logs = [path.read_text() for path in tmp_path.glob("rank*.log")]
    assert statuses == {status}, logs
    assert all(message in log for log in logs), logs


# ---- on two hosts ------------------------------------------------------------------------------
FAST = """--device cpu --precision fp32 -s 64 --global-batch-size 8 -b 8 --num-steps 5000
    --log-every 5 --eval-every 5000 --eval-samples 8 --checkpoint-every 5000
    --dist-timeout 40""".split()


@pytest.fixture
def two_hosts(cluster, tmp_path):
    """Return two functions: one starts a run on two hosts, the other waits for a verdict on it."""
    (tmp_path / "hosts").write_text("h1\nh2\n")
    bin_first = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"PATH": bin_first, "OMP_NUM_THREADS": "1", "RANKS_PER_NODE": "1", "HF_HUB_OFFLINE": "1"}
    launch = ROOT / "03-job-launchers/ssh/launch.sh"
    command = [launch, tmp_path / "hosts", CHAPTER / "watched.py", "--into", tmp_path / "run"]
    command += [SCRIPTS["03"], *FAST, "--save-dir", tmp_path, "-e", "run"]

    def start(**variables):
        log = open(tmp_path / "log", "w")
        options = {"stdout": log, "stderr": log, "env": env | variables}
        return cluster.popen("head", list(map(str, command)), **options)

    def wait_for(*allowed):
        hosts = ["--hosts", tmp_path / "hosts"]
        return wait_for_verdict(cluster, tmp_path / "run", env, allowed, *hosts)

    return start, wait_for


@pytest.mark.slow
@pytest.mark.cluster
class TestOnCluster:
    @pytest.mark.parametrize("fault", ["unplug", "kill_host"])
    def test_lost_host_is_named(self, cluster, two_hosts, tmp_path, fault):
        start, wait_for = two_hosts
        start()
        wait_until(lambda: has_logged(tmp_path / "run", 10), 90, "the run takes ten steps")
        getattr(cluster, fault)("h2")
        allowed = ["host-unreachable", "network"] if fault == "unplug" else ["host-unreachable"]
        verdict = wait_for(*allowed)
        assert "h2" in verdict["hosts"], verdict
        if fault == "kill_host":
            assert verdict["hosts"] == ["h2"] and verdict["ranks"] == [1], verdict

    @pytest.mark.parametrize(
        "variables, kind, word",
        [
            ({"GLOO_SOCKET_IFNAME": "eth9"}, "rendezvous", "eth9"),
            ({"MASTER_PORT": "23456"}, "unknown", "preflight.py"),
        ],
        ids=["wrong interface", "blocked port"],
    )
    def test_hosts_that_cannot_connect_get_a_verdict(
        self, cluster, two_hosts, tmp_path, variables, kind, word
    ):
        """If the torchrun processes cannot connect, no rank starts, so the verdict is unknown."""
        start, wait_for = two_hosts
        (tmp_path / "run").mkdir()
        cluster.block_port("h1", 23456)
        start(**variables).wait(timeout=200)
        verdict = wait_for(kind)
        assert word in verdict["reason"], verdict


@pytest.mark.slow
def test_full_disk_is_named(small_disk, tmp_path):
    """The disk has no space for a checkpoint; the verdict is not a crash."""
    args = [*SHORT, "--num-steps", 30, "--checkpoint-every", 3]
    run = small_disk / "run"
    command = watched_command(
        run, SCRIPTS["03"], *args, "--save-dir", small_disk, "-e", "run", ranks=2
    )
    with open(tmp_path / "log", "w") as log:
        assert subprocess.run(command, check=False, stdout=log, stderr=log, timeout=200).returncode
    done = run_command(CHAPTER / "whats_wrong.py", run, "--json")
    assert json.loads(done.stdout)["kind"] == "disk-full", done.stdout
