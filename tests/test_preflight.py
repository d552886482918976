"""preflight.py: healthy machines get a go, and each planted fault a line that says where it is."""

import argparse
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import preflight
import pytest

from cluster.cluster import wait_until
from conftest import ROOT, free_port, user_error

TOOL = ROOT / "diagnosing-errors/preflight.py"

# ---- comparison ------------------------------------------------------------------------------


def healthy(ranks=1000, per_host=8):
    """Return what so many ranks report of healthy machines; no two measure quite the same."""
    return [report_of(rank, rank % per_host, f"h{rank // per_host}") for rank in range(ranks)]


def report_of(rank, local_rank, host):
    noise = 1 - (rank * 37 % 100) / 1000  # up to 10% slower
    report = {"rank": rank, "host": host, "device": "cuda", "python": "3.11.7", "torch": "2.13.0"}
    report |= {"transformers": "5.23.0", "datasets": "5.2.0", "nccl": "2.28", "driver": "580.1"}
    report |= {"GPU": "H100", "GPU memory in use": 4, "GPU ECC errors": 0, "open files": 65536}
    report |= dict.fromkeys(["GPU hardware slowdown", "GPU thermal slowdown"], "Not Active")
    report |= {"locked memory": "unlimited", "/dev/shm free": 99 * noise, "clock": rank / 1e6}
    report |= {"matmul": 600 * noise, "all-reduce": 300 * noise}
    report |= {"link within a node": 200 * noise, "link between nodes": 20 * noise}
    if local_rank == 0:
        report |= {"--save-dir": "shared", "disk free": 4000.0}
    return report


def findings(reports, device="cuda", network_gbs=0.0):
    args = argparse.Namespace(device=device, network_gbs=network_gbs, checkpoint_gb=40.0)
    return preflight.compare(args, reports)[1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_thousand_healthy_ranks(device):
    assert findings(healthy(), device) == []


FAULTS = {  # what rank 16, the first of h2, reports: which level, and in which words
    "python": ("3.12.1", "warning", "3.12.1 (usual: 3.11.7)"),
    "torch": ("2.12.0", "no-go", "2.12.0 (usual: 2.13.0)"),
    "transformers": ("not installed", "no-go", "not installed (usual: 5.23.0)"),
    "datasets": ("5.1.0", "warning", "5.1.0"),
    "nccl": ("2.27", "no-go", "2.27"),
    "driver": ("570.1", "warning", "570.1"),
    "device": ("cpu", "no-go", "cpu (usual: cuda)"),
    "GPU": ("A100", "no-go", "A100"),
    "GPU memory in use": (9000, "no-go", "9000 MiB"),
    "GPU ECC errors": (3, "no-go", "3"),
    "GPU hardware slowdown": ("Active", "no-go", "Active"),
    "GPU thermal slowdown": ("Active", "no-go", "Active"),
    "open files": (256, "no-go", "256"),
    "locked memory": ("8 MiB", "warning", "8 MiB"),
    "/dev/shm free": (0.06, "warning", "0.1 GB"),
    "clock": (-5.0, "warning", "-5.0 s"),
    "--save-dir": ("not shared", "no-go", "not shared"),
    "disk free": (100.0, "no-go", "100.0 GB"),
    "matmul": (400.0, "no-go", "400 TFLOP/s"),
    "link within a node": (90.0, "no-go", "90 GB/s"),
    "link between nodes": (8.0, "no-go", "8 GB/s"),
}


@pytest.mark.parametrize("check", FAULTS)
def test_one_rank_of_a_thousand(capsys, check):
    value, level, words = FAULTS[check]
    reports = healthy()
    reports[16][check] = value
    [finding] = findings(reports)
    preflight.print_finding(finding)
    first, advice = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{level:8} {check}: rank 16 on h2: {words}")
    assert advice.strip()


def test_a_slow_host_is_one_finding():
    reports = healthy(24)
    for rank in range(8, 16):
        reports[rank]["link between nodes"] /= 10
    [finding] = findings(reports)
    assert finding.ranks == "ranks 8, 9, 10, 11, 12, 13, 14, 15 on h1"


def test_two_slow_hosts_need_a_number():
    """Nothing says which of two hosts is slow, or that they are, but --network-gbs."""
    reports = healthy(2, per_host=1)
    assert findings(reports) == []
    found = findings(reports, network_gbs=100.0)
    assert [finding.ranks for finding in found] == ["rank 0 on h0", "rank 1 on h1"]


def test_what_cannot_be_read_is_not_known():
    report = report_of(0, 0, "h0")
    del report["GPU ECC errors"], report["locked memory"]
    args = argparse.Namespace(device="cuda", network_gbs=0.0, checkpoint_gb=0.0)
    rows, found = preflight.compare(args, [report])
    assert dict(rows)["GPU ECC errors"] == "not known: see nvidia-smi -q" and not found
    assert "locked memory" not in dict(rows)  # there is no InfiniBand that needs it


# ---- reading ---------------------------------------------------------------------------------


def test_rings():
    within, between = preflight.rings_of(["a", "a", "b", "b", "c"]).values()
    assert (within, between) == ([[0, 1], [2, 3], [4]], [[0, 2, 4], [1, 3]])


@pytest.mark.parametrize("hosts", [3, 4, 8, 33])
def test_only_the_slow_host_measures_a_slow_link(monkeypatch, hosts):
    """Each meets two others at least, and both of a pair in the same round."""
    met = []

    def pretended(device, work):
        partner = None if work is preflight.do_nothing else work.args[1]
        met.append(partner)
        return 100.0 if 2 in (rank, partner) else 1.0

    monkeypatch.setattr(preflight, "seconds_of", pretended)
    rates, rounds = [], []
    for rank in range(hosts):
        met.clear()
        rings, cpu = [list(range(hosts))], preflight.torch.device("cpu")
        rates.append(preflight.link_rate(rank, rings, cpu, None))
        rounds.append(met[::6])
    assert [rank for rank in range(hosts) if rates[rank] < max(rates)] == [2]
    for rank, partners in enumerate(rounds):
        assert len(set(partners) - {None}) >= 2
        pairs = [(number, each) for number, each in enumerate(partners) if each is not None]
        assert all(rounds[each][number] == rank for number, each in pairs)


def test_gpu_through_a_pretended_nvidia_smi(monkeypatch, tmp_path):
    """The names that are asked for are those of NVIDIA's manual: no GPU was there to ask."""
    tool = tmp_path / "nvidia-smi"
    cells = "NVIDIA H100, 580.82.07, 512, [N/A], Active, Not Active"
    tool.write_text(f'#!/bin/sh\n[ "$1" = --id=GPU-b ] && echo "{cells}"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert preflight.read_gpu(0) == {}
    wanted = {"GPU": "NVIDIA H100", "driver": "580.82.07", "GPU memory in use": 512}
    wanted |= {"GPU hardware slowdown": "Active", "GPU thermal slowdown": "Not Active"}
    assert preflight.read_gpu(1) == wanted


def test_more_ranks_than_gpus(monkeypatch, capsys):
    monkeypatch.setattr(preflight.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(preflight.os, "_exit", sys.exit)
    for name, value in {"RANK": "9", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="1"):
        preflight.gpu_index()
    assert "local rank 1 has no GPU: torch sees 1 here" in capsys.readouterr().err
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert preflight.gpu_index() == 0  # the one that srun --gpus-per-task=1 shows


@pytest.mark.parametrize(
    "args, words",
    [
        (["--checkpoint-gb", "nan"], "--checkpoint-gb nan: must be at least 0"),
        (["--timeout", "0"], "--timeout 0: must be at least 1"),
        (["--hosts", "h1"], "unrecognized arguments: --hosts h1"),
        ([], "start this with a launcher"),
    ],
)
def test_bad_arguments(monkeypatch, capsys, args, words):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert words in user_error(capsys, preflight.parse_args, args)


# ---- runs on this machine --------------------------------------------------------------------


def start(rank, size, folder, *args, prefix=(), **variables):
    """Start a rank as a launcher would."""
    variables |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    env |= {name: str(value) for name, value in variables.items()}
    command = [*prefix, sys.executable, TOOL, "--save-dir", folder, *args]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(list(map(str, command)), env=env, **streams)


def ended(*processes, timeout=90):
    """Wait for started ranks; return (status, stdout, stderr) of each."""
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
        return [(each.returncode, *told) for each, told in zip(processes, outputs, strict=True)]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def runs(environment, tmp_path_factory):
    """At the same time: two healthy ranks, and some that are left alone, by rank 0 or with it."""
    folder, port, brief = tmp_path_factory.mktemp("preflight"), free_port(), ["--timeout", 5]
    new, few = folder / "new/outputs", ["bash", "-c", 'ulimit -n 256; exec "$@"', "-"]
    pair = [start(0, 2, new, prefix=few, MASTER_PORT=port), start(1, 2, new, MASTER_PORT=port)]
    alone = start(0, 3, folder, *brief, MASTER_PORT=free_port())
    nobody = start(1, 2, folder, *brief, MASTER_PORT=free_port())
    nowhere = start(1, 2, folder, *brief, MASTER_PORT=port, MASTER_ADDR="no.such.host.invalid")
    wrong = {"MASTER_PORT": free_port(), "GLOO_SOCKET_IFNAME": "eth9"}
    eth9 = start(0, 2, folder, *brief, **wrong)
    done = ended(*pair, alone, nobody, nowhere, eth9)
    names = ["alone", "nobody", "nowhere", "eth9"]
    return SimpleNamespace(new=new, pair=done[:2], **dict(zip(names, done[2:], strict=True)))


def test_two_ranks(runs):
    """They come through; one of them has too few open files."""
    (status, output, errors), (other, silence, more_errors) = runs.pair
    assert (status, other, silence, errors, more_errors) == (1, 1, "", "", "")
    rows = dict(line.split("  ", 1) for line in output.splitlines() if "  " in line)
    assert rows["--save-dir"].strip() == "shared"
    for name in ("matmul", "all-reduce", "link within a node"):
        assert float(rows[name].split()[0]) > 0
    assert "no-go    open files: rank 0 on " in output and ": 256" in output
    assert output.splitlines()[-1].startswith("no-go: world size 2 on 1 node; open files")
    assert list(runs.new.iterdir()) == []


def test_ranks_that_never_come(runs):
    status, output, _ = runs.alone
    assert status == 1
    assert "no-go    all ranks connect: ranks 1, 2: did not connect to 127.0.0.1:" in output
    assert "within 5 s (1 of 3 ranks did)" in output


WAYS = {"nobody": "Connection refused", "nowhere": "Name or service not known"}
WAYS |= {"eth9": "Unable to find address for: eth9"}


@pytest.mark.parametrize("name", WAYS)
def test_no_way_to_rank_0(runs, name):
    """One line says which rank, on which host, and why."""
    status, _, errors = getattr(runs, name)
    [line] = errors.splitlines()
    assert status == 1 and line.startswith("preflight.py: error: rank ") and WAYS[name] in line


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_stops_or_dies(environment, tmp_path, number):
    """In the middle of it: rank 0 names the one that answers no more, not those that wait."""
    port, save = free_port(), tmp_path / "save"
    ranks = [start(rank, 3, save, "--timeout", 5, MASTER_PORT=port) for rank in range(3)]
    try:
        wait_until(save.exists, 60, "they have met")
        time.sleep(0.3)  # now they measure, for some seconds
        ranks[1].send_signal(number)
        (status, output, _), (other, *_) = ended(ranks[0], ranks[2])
    finally:
        ranks[1].kill()
        ranks[1].communicate(timeout=20)
    assert (status, other) == (1, 1)
    assert "no-go    all ranks answer: rank 1 on " in output


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(os.cpu_count() < 2, reason="needs two CPUs")
def test_a_busy_core(environment, tmp_path):
    """Loops run on the CPU to which rank 1 is bound: it is named."""
    busy = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(["timeout", "60", "taskset", "-c", "1", *busy]) for _ in range(3)]
    port = free_port()
    bound = [["taskset", "-c", rank] for rank in range(2)]
    ranks = [start(rank, 2, tmp_path, prefix=bound[rank], MASTER_PORT=port) for rank in range(2)]
    try:
        (status, output, errors), _ = ended(*ranks)
    finally:
        for loop in loops:
            loop.terminate()
            loop.wait(timeout=20)
    assert status == 1, output + errors
    assert "no-go    matmul: rank 1 on " in output, output


# ---- runs on two hosts -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("environment")
class TestOnCluster:
    def srun(self, cluster, tmp_path, *args, prefix=(), **variables):
        """Run it under srun, with a rank on each of two hosts; return the CompletedProcess."""
        command = ["srun", "--nodes=2", "--ntasks-per-node=1", *prefix, sys.executable, TOOL]
        env = {"OMP_NUM_THREADS": "1"} | variables
        options = ["--save-dir", tmp_path / "save", *args]
        return cluster.run("head", [*command, *options], 120, check=False, env=env)

    def test_slow_full_and_not_shared(self, cluster, tmp_path):
        """h2 has a slow link, and a small disk of its own where the shared folder should be."""
        (tmp_path / "save").mkdir()
        cluster.run("h2", ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path / "save"])
        cluster.slow_link("h2", "20mbit")
        done = self.srun(cluster, tmp_path, "--network-gbs", 0.2, "--checkpoint-gb", 0.01)
        assert done.returncode == 1, done.stdout + done.stderr
        for expected in (
            "no-go    disk free: rank 1 on h2: ",
            "no-go    --save-dir: rank 1 on h2: not shared",
            "no-go    link between nodes: rank 1 on h2: ",
        ):
            assert expected in done.stdout, done.stdout + done.stderr

    def test_blocked_port(self, cluster, tmp_path):
        """Rank 1 does not get through to rank 0, which says which rank and host that is."""
        cluster.block_port("h1", 23456)
        done = self.srun(cluster, tmp_path, "--timeout", 15, MASTER_PORT="23456")
        assert done.returncode == 1
        assert "rank 1: did not connect to h1:23456" in done.stdout, done.stdout + done.stderr
        assert "no rank connected from h2" in done.stdout
        assert "rank 1 on h2: cannot reach h1:23456: no answer" in done.stderr
