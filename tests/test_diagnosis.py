"""Runs that are broken on purpose: is what broke named, and the rank? Is the text true?"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import whats_wrong

import faults
from cluster.cluster import wait_until
from conftest import ROOT, SHORT, logged, printed, start_ranks
from runs import command_of, verdict_of

CHAPTER = ROOT / "diagnosing-errors"
RESULTS = ROOT / "benchmarks/results"


CASES = [(script, fault) for script, (_, _, some) in faults.SCRIPTS.items() for fault in some]
# beside other work a healthy run may well have a rank that is slow
MARKED = [pytest.param(*case, marks=[pytest.mark.alone] * ("healthy" in case[1])) for case in CASES]


@pytest.mark.slow
@pytest.mark.parametrize("script, fault", MARKED)
def test_the_culprit_is_named(script, fault):
    """Once, on a rank and in a step that the published table does not have."""
    row = faults.break_and_find(script, fault, seed=100)
    assert row["right"], json.dumps(row, indent=1)


def test_the_published_table_has_all_faults_and_no_false_alarm():
    rows = json.loads((RESULTS / "faults-cpu-2cores.json").read_text())["rows"]
    assert all(row["right"] for row in rows)
    assert all(faults.line_of(row) in row["reason"] for row in rows if "reason" in row)
    for script, fault in CASES:
        runs = [row for row in rows if (row["script"], row["fault"]) == (script, fault)]
        assert len({(row["rank"], row["step"]) for row in runs}) >= 2, (script, fault)
    assert sum(faults.KINDS[row["fault"]] is None for row in rows) >= 20


def test_every_fault_is_known_by_all():
    """The script, what is expected of the tool, and the text have the same faults."""
    script = (CHAPTER / "train_llm.py").read_text()
    named = set(re.findall(r'^    "([a-z-]+)": "', script, re.M))
    text = (CHAPTER / "faults.md").read_text()
    assert named == {fault for fault, kind in faults.KINDS.items() if kind}
    assert named == set(re.findall(r'cog fault\("([a-z-]+)"\)', text))
    inside = set(re.findall(r'^    "([a-z-]+)": ', (CHAPTER / "inject.py").read_text(), re.M))
    assert inside == named - set(faults.INSIDE)


def test_every_verdict_has_a_section():
    kinds = re.findall(r'Finding\("([a-z-]+)"', (CHAPTER / "whats_wrong.py").read_text())
    headings = re.findall(r"^#+ (.*)$", (CHAPTER / "faults.md").read_text(), re.M)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    known = {*kinds, *whats_wrong.CLUES, *whats_wrong.NO_FAULT}
    assert "hang-in-data" in known and anchors >= known


DDP = """
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


@pytest.mark.parametrize(
    "detail, what, status, words",
    [
        ("DETAIL", "mismatch", 1, "Detected mismatch between collectives on ranks"),
        ("DETAIL", "ddp", -11, ""),
        ("INFO", "ddp", 0, ""),
    ],
)
def test_what_the_debug_level_does(detail, what, status, words, tmp_path, monkeypatch):
    """What the README says of it: a new torch may have mended the segfault."""
    script = tmp_path / "script.py"
    script.write_text(DDP)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", detail)
    started = start_ranks(2, [script, what], tmp_path)
    statuses = {process.wait(timeout=200) for process in started}
    said = [path.read_text() for path in tmp_path.glob("rank*.log")]
    assert statuses == {status}, said
    assert all(words in text for text in said)


# ---- on two hosts ----------------------------------------------------------------------------

FAST = """--device cpu --precision fp32 -s 64 --global-batch-size 8 -b 8 --num-steps 5000
    --log-every 5 --eval-every 5000 --eval-samples 8 --checkpoint-every 5000
    --dist-timeout 40""".split()


@pytest.fixture
def two_hosts(cluster, tmp_path):
    """What starts a run on a rank of each of two hosts, and what asks the tool about it."""
    (tmp_path / "hosts").write_text("h1\nh2\n")
    bin_first = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"PATH": bin_first, "OMP_NUM_THREADS": "1", "RANKS_PER_NODE": "1", "HF_HUB_OFFLINE": "1"}
    launch = ROOT / "03-job-launchers/ssh/launch.sh"
    command = [launch, tmp_path / "hosts", CHAPTER / "watched.py", "--into", tmp_path / "run"]
    command += [ROOT / "03-job-launchers/train_llm.py", *FAST]
    command += ["--save-dir", tmp_path, "-e", "run"]

    def start(**variables):
        log = open(tmp_path / "log", "w")
        started = {"stdout": log, "stderr": log, "env": env | variables}
        return cluster.popen("head", list(map(str, command)), **started)

    def ask(*kinds):
        return verdict_of(cluster, tmp_path / "run", env, kinds, "--hosts", tmp_path / "hosts")

    return start, ask


def trains(folder):
    """Wait until a run takes steps."""
    wait_until(lambda: logged(folder / "run", 10), 90, "some steps")


@pytest.mark.slow
@pytest.mark.cluster
class TestOnCluster:
    @pytest.mark.parametrize("fault", ["unplug", "kill_host"])
    def test_a_host_that_is_cut_off_or_dies(self, cluster, two_hosts, tmp_path, fault):
        start, ask = two_hosts
        start()
        trains(tmp_path)
        getattr(cluster, fault)("h2")
        said = ask("host-unreachable", *["network"] * (fault == "unplug"))
        assert "h2" in said["hosts"], said
        if fault == "kill_host":
            assert said["hosts"] == ["h2"] and said["ranks"] == [1], said

    @pytest.mark.parametrize(
        "variables, kind, words",
        [
            ({"GLOO_SOCKET_IFNAME": "eth9"}, "rendezvous", "eth9"),
            ({"MASTER_PORT": "23456"}, "unknown", "preflight.py"),
        ],
        ids=["wrong interface", "blocked port"],
    )
    def test_hosts_that_never_meet(self, cluster, two_hosts, tmp_path, variables, kind, words):
        """Where torchrun's own processes do not meet, no rank is started that could tell."""
        start, ask = two_hosts
        (tmp_path / "run").mkdir()
        cluster.block_port("h1", 23456)
        start(**variables).wait(timeout=200)
        said = ask(kind)
        assert words in said["reason"], said


@pytest.mark.slow
def test_a_full_disk(small_disk, tmp_path):
    """A checkpoint does not fit: the tool says so, and that is no crash."""
    args = [*SHORT, "--num-steps", 30, "--save-dir", small_disk, "-e", "run"]
    args += ["--checkpoint-every", 3]
    run, script = small_disk / "run", CHAPTER / "train_llm.py"
    with open(tmp_path / "log", "w") as log:
        command = command_of(run, script, *args, ranks=2)
        assert subprocess.run(command, check=False, stdout=log, stderr=log, timeout=200).returncode
    done = printed(CHAPTER / "whats_wrong.py", run, "--json")
    assert json.loads(done.stdout)["kind"] == "disk-full", done.stdout
