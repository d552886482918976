"""Test that preflight.py lets healthy machines go, and names each planted fault and its rank."""

import argparse
import os
import signal
import subprocess
import sys
import time

import preflight
import pytest

from cluster.cluster import wait_until
from conftest import ROOT, free_port, user_error

pytestmark = pytest.mark.tool

TOOL = ROOT / "diagnosing-errors/preflight.py"


# ---- comparison --------------------------------------------------------------------------------
def healthy_reports(num_ranks=1000, ranks_per_host=8):
    """Return the reports of healthy ranks, whose measurements differ by up to 10%."""
    reports = []
    for rank in range(num_ranks):
        noise = 1 - (rank * 37 % 100) / 1000
        report = {
            "rank": rank, "host": f"h{rank // ranks_per_host}", "device": "cuda",
            "python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0", "datasets": "5.2.0",
            "nccl": "2.28", "driver": "580.1", "GPU": "H100", "GPU memory in use": 4,
            "GPU ECC errors": 0, "GPU hardware slowdown": "Not Active",
            "GPU thermal slowdown": "Not Active", "open files": 65536,
            "locked memory": "unlimited", "/dev/shm free": 99 * noise, "clock": rank / 1e6,
            "matmul": 600 * noise, "all-reduce": 300 * noise,
            "link within a node": 200 * noise, "link between nodes": 20 * noise,
        }  # fmt: skip
        # Only the first rank of each host checks the folder.
        if rank % ranks_per_host == 0:
            report |= {"--save-dir": "shared", "disk free": 4000.0}
        reports.append(report)
    return reports


def compare(reports, device="cuda", network_gbs=0.0):
    """Return the rows of the report, and the findings."""
    args = argparse.Namespace(device=device, network_gbs=network_gbs, checkpoint_gb=40.0)
    return preflight.compare(args, reports)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_thousand_healthy_ranks_have_no_finding(device):
    assert compare(healthy_reports(), device)[1] == []


# For each check, the value that rank 16 reports, the level of the finding, and its words.
FAULTS = {
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
def test_one_odd_rank_of_a_thousand_is_named(capsys, check):
    value, level, words = FAULTS[check]
    reports = healthy_reports()
    reports[16][check] = value
    [finding] = compare(reports)[1]
    preflight.print_finding(finding)
    first, advice = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{level:8} {check}: rank 16 on h2: {words}")
    assert advice.strip()


def test_slow_host_is_one_finding():
    reports = healthy_reports(24)
    for rank in range(8, 16):
        reports[rank]["link between nodes"] /= 10
    [finding] = compare(reports)[1]
    assert finding.ranks == "ranks 8, 9, 10, 11, 12, 13, 14, 15 on h1"


def test_two_slow_hosts_are_found_only_with_an_expected_rate():
    reports = healthy_reports(2, ranks_per_host=1)
    assert compare(reports)[1] == []
    findings = compare(reports, network_gbs=100.0)[1]
    assert [finding.ranks for finding in findings] == ["rank 0 on h0", "rank 1 on h1"]


def test_values_that_cannot_be_read_are_not_known():
    [report] = healthy_reports(1)
    # A machine without InfiniBand does not report a limit on locked memory.
    del report["GPU ECC errors"], report["locked memory"]
    rows, findings = compare([report])
    assert dict(rows)["GPU ECC errors"] == "not known: see nvidia-smi -q" and not findings
    assert "locked memory" not in dict(rows)


# ---- facts and measurements --------------------------------------------------------------------
def test_rings_join_the_ranks_of_a_node_and_the_nodes():
    within, between = preflight.rings_of(["a", "a", "b", "b", "c"]).values()
    assert (within, between) == ([[0, 1], [2, 3], [4]], [[0, 2, 4], [1, 3]])


@pytest.mark.parametrize("num_ranks", [3, 4, 8, 33])
def test_only_the_slow_host_measures_a_slow_link(monkeypatch, num_ranks):
    """Each rank has at least two partners, and both partners have the same round."""
    partners = []

    def simulate(device, work):
        partner = None if work is preflight.do_nothing else work.args[1]
        partners.append(partner)
        return 100.0 if 2 in (rank, partner) else 1.0

    monkeypatch.setattr(preflight, "seconds_of", simulate)
    ring, device = list(range(num_ranks)), preflight.torch.device("cpu")
    rates, rounds = [], []
    for rank in ring:
        partners.clear()
        rates.append(preflight.link_rate(rank, [ring], device, None))
        rounds.append(partners[::6])
    assert [rank for rank in ring if rates[rank] < max(rates)] == [2]
    for rank in ring:
        pairs = [pair for pair in enumerate(rounds[rank]) if pair[1] is not None]
        assert len({partner for _, partner in pairs}) >= 2
        assert all(rounds[partner][number] == rank for number, partner in pairs)


def test_gpu_values_come_from_nvidia_smi(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    cells = "NVIDIA H100, 580.82.07, 512, [N/A], Active, Not Active"
    tool.write_text(f'#!/bin/sh\n[ "$1" = --id=GPU-b ] && echo "{cells}"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert preflight.read_gpu(0) == {}
    expected = {"GPU": "NVIDIA H100", "driver": "580.82.07", "GPU memory in use": 512}
    expected |= {"GPU hardware slowdown": "Active", "GPU thermal slowdown": "Not Active"}
    assert preflight.read_gpu(1) == expected


# ---- one rank in this process ------------------------------------------------------------------
@pytest.fixture
def rank(monkeypatch):
    """Return a function that makes this process a rank, which exits with SystemExit."""
    monkeypatch.setattr(preflight.os, "_exit", sys.exit)

    def become(rank, world_size, **variables):
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()} | variables
        variables |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return become


def test_more_ranks_than_gpus_is_an_error(rank, monkeypatch, capsys):
    monkeypatch.setattr(preflight.torch.cuda, "device_count", lambda: 1)
    rank(1, 2, TORCHELASTIC_RUN_ID="x")
    with pytest.raises(SystemExit, match="1"):
        preflight.gpu_index()
    assert "local rank 1 has no GPU: torch sees 1 here" in capsys.readouterr().err
    # Under srun --gpus-per-task=1, each task sees only its own GPU.
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert preflight.gpu_index() == 0


@pytest.mark.parametrize(
    "args, words",
    [
        (["--checkpoint-gb", "nan"], "--checkpoint-gb nan: must be at least 0"),
        (["--timeout", "0"], "--timeout 0: must be at least 1"),
        (["--hosts", "h1"], "unrecognized arguments: --hosts h1"),
        ([], "start this with a launcher"),
    ],
)
def test_wrong_argument_is_an_error(monkeypatch, capsys, args, words):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert words in user_error(capsys, preflight.parse_args, args)


def run_alone(monkeypatch, capsys, *args):
    """Run preflight.py in this process, where it must exit with status 1; return its output."""
    monkeypatch.setattr(sys, "argv", ["preflight.py", "--timeout", "2", *map(str, args)])
    with pytest.raises(SystemExit, match="1"):
        preflight.main()
    return capsys.readouterr()


def test_rank_0_names_ranks_that_never_connect(rank, monkeypatch, capsys, tmp_path):
    rank(0, 3)
    output = run_alone(monkeypatch, capsys, "--save-dir", tmp_path).out
    assert "no-go    all ranks connect: ranks 1, 2: did not connect to 127.0.0.1:" in output
    assert "within 2 s (1 of 3 ranks did)" in output


@pytest.mark.parametrize(
    "number, variables, words",
    [
        (1, {}, "Connection refused"),
        (1, {"MASTER_ADDR": "no.such.host.invalid"}, "Name or service not known"),
        (0, {"GLOO_SOCKET_IFNAME": "eth9"}, "Unable to find address for: eth9"),
    ],
)
def test_rank_that_cannot_connect_reports_why(
    rank, monkeypatch, capsys, tmp_path, number, variables, words
):
    rank(number, 2, **variables)
    [line] = run_alone(monkeypatch, capsys, "--save-dir", tmp_path).err.splitlines()
    assert line.startswith(f"preflight.py: error: rank {number} on ") and words in line


# ---- several ranks on this machine -------------------------------------------------------------
def start(rank, world_size, folder, *args, prefix=(), port):
    """Start a rank as a launcher would."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    env |= {name: str(value) for name, value in variables.items()}
    command = [*prefix, sys.executable, TOOL, "--save-dir", folder, *args]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(list(map(str, command)), env=env, **streams)


def wait_for(*processes):
    """Wait for ranks; return the (status, stdout, stderr) of each rank."""
    try:
        outputs = [process.communicate(timeout=90) for process in processes]
        return [(p.returncode, *output) for p, output in zip(processes, outputs, strict=True)]
    finally:
        for process in processes:
            process.kill()


def test_two_ranks_measure_and_name_a_low_limit(tmp_path):
    """Rank 0 has a low limit of open files; the check leaves no file behind."""
    few, port = ["bash", "-c", 'ulimit -n 256; exec "$@"', "-"], free_port()
    folder = tmp_path / "new/outputs"
    ranks = [start(0, 2, folder, prefix=few, port=port), start(1, 2, folder, port=port)]
    (status, output, errors), (other_status, silence, more_errors) = wait_for(*ranks)
    assert (status, other_status, silence, errors, more_errors) == (1, 1, "", "", "")
    rows = dict(line.split("  ", 1) for line in output.splitlines() if "  " in line)
    assert rows["--save-dir"].strip() == "shared"
    for name in ("matmul", "all-reduce", "link within a node"):
        assert float(rows[name].split()[0]) > 0
    assert "no-go    open files: rank 0 on " in output and ": 256" in output
    assert output.splitlines()[-1].startswith("no-go: world size 2 on 1 node; open files")
    assert list(folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_rank_that_stops_or_dies_is_named(tmp_path, number):
    """Rank 0 names the rank that no longer answers, not the rank that waits."""
    port, folder = free_port(), tmp_path / "save"
    ranks = [start(rank, 3, folder, "--timeout", 5, port=port) for rank in range(3)]
    try:
        wait_until(folder.exists, 60, "the ranks have connected")
        # The ranks now measure for some seconds.
        time.sleep(0.3)
        ranks[1].send_signal(number)
        (status, output, _), (other_status, *_) = wait_for(ranks[0], ranks[2])
    finally:
        ranks[1].kill()
        ranks[1].communicate(timeout=20)
    assert (status, other_status) == (1, 1)
    assert "no-go    all ranks answer: rank 1 on " in output


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(os.cpu_count() < 2, reason="needs two CPUs")
def test_busy_core_is_named(tmp_path):
    """Endless loops run on the core of rank 1."""
    loop = ["timeout", "60", "taskset", "-c", "1", sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(loop) for _ in range(3)]
    port, cores = free_port(), [["taskset", "-c", rank] for rank in range(2)]
    ranks = [start(rank, 2, tmp_path, prefix=cores[rank], port=port) for rank in range(2)]
    try:
        (status, output, errors), _ = wait_for(*ranks)
    finally:
        for process in loops:
            process.terminate()
            process.wait(timeout=20)
    assert status == 1, output + errors
    assert "no-go    matmul: rank 1 on " in output, output


# ---- on two hosts ------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(240)
class TestOnCluster:
    def srun(self, cluster, tmp_path, *args, **variables):
        """Run a rank on each of two hosts under srun; return the CompletedProcess."""
        command = ["srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, TOOL]
        command += ["--save-dir", tmp_path / "save", *args]
        env = {"OMP_NUM_THREADS": "1"} | variables
        return cluster.run("head", command, 120, check=False, env=env)

    def test_slow_full_and_unshared_host_is_named(self, cluster, tmp_path):
        """h2 has a slow link, and a small disk of its own at the place of the shared folder."""
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

    def test_blocked_port_is_named(self, cluster, tmp_path):
        cluster.block_port("h1", 23456)
        done = self.srun(cluster, tmp_path, "--timeout", 15, MASTER_PORT="23456")
        assert done.returncode == 1
        assert "rank 1: did not connect to h1:23456" in done.stdout, done.stdout + done.stderr
        assert "no rank connected from h2" in done.stdout
        assert "rank 1 on h2: cannot reach h1:23456: no answer" in done.stderr
