"""Break runs on purpose, and check that whats_wrong.py names the fault, the rank and the line.

The table of the README and the samples of faults.md come from these runs. To renew them, delete
the file RESULTS, and run `python -m pytest tests/test_faults.py -k made_fault --record` on an idle
machine. To renew a few rows, keep the file, and choose the faults with -k.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import inject
import pytest

from cluster.cluster import wait_until
from conftest import ROOT, SCRIPTS, SHORT, run_command
from harness import describe_machine, keep, launch_command
from runs import last_logged_step

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
# The run with the fault corrupt-checkpoint ends after 20 steps. Its second start then fails,
# because it reads the damaged checkpoint.
RESUME = "--num-steps 20".split()
# Faults begin after the first checkpoint, which the runs with FLAGS save in step 10.
FIRST_STEP = 12
# Wait at most this number of seconds for a verdict. whats_wrong.py waits at least 10 s before it
# reports that a rank hangs, and a busy machine needs more time.
PATIENCE = 90


@dataclass
class Case:
    """Hold a fault for one run, and the expected verdict."""

    fault: str
    script: str
    rank: int
    kind: str
    # The verdict must name the line of the script with this code, unless `line` is empty.
    line: str = ""
    # The verdict must name these ranks, or only the rank with the fault if `ranks` is None.
    ranks: tuple | None = None
    flags: tuple = ()


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
    # If two replicas differ, nobody can tell which one is right, so the verdict names both ranks.
    Case("bit-flip", STRANGER, 1, "replicas-differ", ranks=(0, 1)),
    Case("same-data", TRAIN, 1, "same-data", ranks=(0, 1)),
    Case("loss-spike", TRAIN, 1, "loss-spike"),
    # All ranks start with the damaged checkpoint, but only rank 0 reports the error.
    Case("corrupt-checkpoint", DDP, 0, "corrupt-checkpoint", flags=RESUME),
]
HEALTHY_CASES = [Case("healthy", script, 0, "healthy") for script in (STRANGER, DDP, FSDP)]


# ---- broken runs -------------------------------------------------------------------------------
def script_words(case, folder):
    """Return the words of a case's command after "python": the script and its arguments.

    If inject.py makes the fault, inject.py and its argument come first.
    """
    where = f"{case.fault}@rank{case.rank}:step{FIRST_STEP}"
    words = [ROOT / case.script]
    if case.script != STRANGER:
        words += [*FLAGS, *case.flags, "--save-dir", folder, "-e", "run"]
    if case.fault in inject.FAULTS:
        return [CHAPTER / "inject.py", where, *words]
    return [*words, "--inject", where] if case in CASES else words


@contextmanager
def started(case, folder, words):
    """Start a case's ranks under torchrun and watched.py; end them when the `with` block ends."""
    ranks = 2 if case.script == STRANGER else 3
    watched = [CHAPTER / "watched.py", "--into", folder / "run", "--stall", 15]
    command = list(map(str, launch_command(ranks, [*watched, *words])))
    # Limit each process to 1,024 open files, which is a common limit, so that a process that leaks
    # files soon fails.
    command = ["bash", "-c", f"ulimit -S -n 1024 && exec {shlex.join(command)}"]
    # With this variable, torchrun kills ranks that still run one second after SIGTERM.
    env = os.environ | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(timeout=60)


def ask(folder, *flags):
    """Diagnose the run in `folder` with whats_wrong.py; return the output."""
    return run_command(CHAPTER / "whats_wrong.py", folder / "run", *flags).stdout


def verdict_on(case, folder, first_sign):
    """Wait until the log has the text `first_sign`, and then until whats_wrong.py finds a fault.

    Return a row for the published table. It has the verdict, and the seconds from the text in the
    log to the verdict.
    """
    log = folder / "log"
    wait_until(lambda: first_sign in log.read_text(), 240, f"the log has {first_sign!r}")
    start_time = time.monotonic()

    def find_verdict():
        verdict = json.loads(ask(folder, "--json"))
        return verdict if verdict["kind"] not in ("healthy", "unknown") else None

    verdict = wait_until(find_verdict, PATIENCE, "a verdict")
    row = {"script": case.script, "fault": case.fault, "rank": case.rank}
    row |= {"verdict": time.monotonic() - start_time, "said": verdict.pop("kind")}
    return row | verdict | {"log": symptoms(log), "text": ask(folder)}


def line_of(case):
    """Return the script's name and the number of the line that the verdict must name.

    Return an empty text if the verdict need not name a line.
    """
    script = ROOT / case.script
    lines = script.read_text().splitlines()
    numbers = [number for number, line in enumerate(lines, 1) if case.line in line]
    return f"{script.name}:{numbers[0]} " if case.line else ""


def symptoms(log):
    """Return the lines of a log that report problems of ranks or of torchrun, each line once.

    Cut a long line after 160 characters.
    """
    telling = r".*breaks in step|warning|train_llm.py: error|(\[rank\d\]: )?\w*(Error|Exception)\b"
    lines = [line[:160] for line in log.read_text().splitlines() if re.match(telling, line)]
    return list(dict.fromkeys(lines))


@pytest.fixture
def record(request):
    """Return a function that replaces a case's published row; without --record, it does nothing.

    The file RESULTS names the machine of the first recorded row. Delete the file before you record
    all cases on a different machine.
    """

    def write(row, folder):
        if not request.config.getoption("--record"):
            return
        if not RESULTS.exists():
            keep(RESULTS, describe_machine(), {"rows": []})
        published = json.loads(RESULTS.read_text())
        rows = {(old["script"], old["fault"]): old for old in published["rows"]}
        text = json.dumps(row).replace(str(folder), "outputs").replace(f"{ROOT}/", "")
        rows[row["script"], row["fault"]] = json.loads(text)
        keep(RESULTS, published["machine"], {"rows": list(rows.values())})

    return write


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fault)
def test_made_fault_gets_its_verdict(case, tmp_path, record):
    words = script_words(case, tmp_path)
    first_sign = "breaks in step"
    if case.fault == "corrupt-checkpoint":
        with started(case, tmp_path, words) as process:
            assert process.wait(timeout=300) == 0, (tmp_path / "log").read_text()
        words, first_sign = words[2:], "cannot read it"
    with started(case, tmp_path, words):
        row = verdict_on(case, tmp_path, first_sign)
    culprits = [case.rank] if case.ranks is None else list(case.ranks)
    found = f"expected {case}, found {json.dumps(row, indent=1)}"
    assert (row["said"], row["ranks"]) == (case.kind, culprits), found
    assert line_of(case) in row["reason"], found
    record(row | {"right": True}, tmp_path)


@pytest.mark.slow
# Run this test alone, because beside other processes a healthy run may have a straggler.
@pytest.mark.alone
@pytest.mark.parametrize("case", HEALTHY_CASES, ids=lambda case: f"{case.fault} {case.script}")
def test_run_without_a_made_fault_gets_no_verdict(case, tmp_path, record):
    """Diagnose a healthy run five times; whats_wrong.py must report that the run is healthy."""
    with started(case, tmp_path, script_words(case, tmp_path)):

        def takes_steps():
            heartbeats = [path.read_text() for path in tmp_path.glob("run/ranks/0000?.json")]
            return heartbeats and not any('"step_seconds": null' in text for text in heartbeats)

        wait_until(takes_steps, 240, "all ranks take steps")
        for _ in range(5):
            time.sleep(2)
            text = ask(tmp_path)
            assert "HEALTHY" in text, text
    row = {"script": case.script, "fault": case.fault, "said": "nothing", "right": True}
    record(row, tmp_path)


# ---- the pages ---------------------------------------------------------------------------------
def test_each_fault_has_one_injector_and_a_case_and_each_verdict_a_sample(load):
    inside = load("diagnosing-errors").FAULTS
    faults = [*inject.FAULTS, *inside]
    assert sorted(faults) == sorted(case.fault for case in CASES)
    shown = re.findall(r'cog fault\("([a-z-]+)"', FAULTS_PAGE)
    assert {case.kind for case in CASES} == {case.kind for case in CASES if case.fault in shown}


def test_published_verdicts_name_the_lines_of_the_scripts():
    rows = {(row["script"], row["fault"]): row for row in json.loads(RESULTS.read_text())["rows"]}
    for case in CASES:
        row, script = rows[case.script, case.fault], ROOT / case.script
        lines = script.read_text().splitlines()
        assert line_of(case) in row["reason"], f"{case.fault}: its line has moved; record it again"
        for number, code in re.findall(rf"{script.name}:(\d+) \S+: (.*)", row["text"]):
            line = lines[int(number) - 1].strip()
            assert code.startswith(line), f"{case.fault}: line {number} is {line}; record it again"


# ---- on two hosts ------------------------------------------------------------------------------
LONG = [*SHORT, "--num-steps", 5000, "--eval-every", 5000, "--checkpoint-every", 5000]
LONG += ["--dist-timeout", 40]


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("fault", ["unplug", "kill_host"])
def test_lost_host_is_named(cluster, tmp_path, fault):
    hosts, run = tmp_path / "hosts", tmp_path / "run"
    hosts.write_text("h1\nh2\n")
    bin_first = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"PATH": bin_first, "OMP_NUM_THREADS": "1", "RANKS_PER_NODE": "1", "HF_HUB_OFFLINE": "1"}
    command = [ROOT / "03-job-launchers/ssh/launch.sh", hosts, CHAPTER / "watched.py"]
    command += ["--into", run, SCRIPTS["03"], *LONG, "--save-dir", tmp_path, "-e", "run"]
    with open(tmp_path / "log", "w") as log:
        cluster.popen("head", list(map(str, command)), stdout=log, stderr=log, env=env)
    wait_until(lambda: last_logged_step(run) >= 10, 90, "the run takes ten steps")
    getattr(cluster, fault)("h2")
    # A host without its network still writes heartbeats to the folder that the hosts share, so
    # whats_wrong.py may blame the network instead of the host.
    verdict_kinds = ["host-unreachable", "network"] if fault == "unplug" else ["host-unreachable"]
    tool = [sys.executable, CHAPTER / "whats_wrong.py", run, "--json", "--hosts", hosts]

    def find_verdict():
        verdict = json.loads(cluster.run("head", tool, check=False, env=env).stdout)
        return verdict if verdict["kind"] in verdict_kinds else None

    verdict = wait_until(find_verdict, PATIENCE, f"a verdict of {verdict_kinds}")
    assert "h2" in verdict["hosts"], verdict
