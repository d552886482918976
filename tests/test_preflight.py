"""Test that preflight.py accepts healthy machines, and names each planted fault and its rank."""

import argparse
import sys

import preflight
import pytest

from conftest import ROOT, free_port

pytestmark = pytest.mark.tool

TOOL = ROOT / "diagnosing-errors/preflight.py"


# ---- comparison --------------------------------------------------------------------------------
def healthy_reports(num_ranks=1000, ranks_per_host=8):
    """Return the reports of healthy ranks, whose measurements differ by up to 10%."""
    reports = []
    for rank in range(num_ranks):
        noise = 1 - (rank * 37 % 100) / 1000
        reports.append({
            "rank": rank, "host": f"h{rank // ranks_per_host}", "device": "cuda",
            "python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0", "datasets": "5.2.0",
            "GPU": "H100", "GPU memory in use": 0.5 * noise,
            "clock": rank / 1e6, "--save-dir": "shared", "disk free": 4000.0 * noise,
            "matmul": 600 * noise, "link within a node": 200 * noise,
            "link between nodes": 20 * noise,
        })  # fmt: skip
    return reports


def findings_of(reports, network_gbs=0.0):
    args = argparse.Namespace(device="cuda", network_gbs=network_gbs, checkpoint_gb=40.0)
    return preflight.compare(args, reports)[1]


# For each check, this table has the faulty value that rank 16 reports, and the level and a part of
# the text of the finding that must follow.
FAULTS = {
    "python": ("3.12.1", "warning", "3.12.1 (usual: 3.11.7)"),
    "transformers": ("not installed", "no-go", "not installed (usual: 5.23.0)"),
    "device": ("cpu", "no-go", "cpu (usual: cuda)"),
    "GPU memory in use": (9.0, "no-go", "9.0 GiB"),
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
    [finding] = findings_of(reports)
    preflight.print_finding(finding)
    first, advice = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{level:8} {check}: rank 16 on h2: {words}")
    assert advice.strip()


def test_slow_host_is_one_finding():
    reports = healthy_reports(24)
    for rank in range(8, 16):
        reports[rank]["link between nodes"] /= 10
    [finding] = findings_of(reports)
    assert finding.ranks == "ranks 8, 9, 10, 11, 12, 13, 14, 15 on h1"


def test_two_slow_hosts_are_found_only_with_an_expected_rate():
    reports = healthy_reports(2, ranks_per_host=1)
    assert findings_of(reports) == []
    findings = findings_of(reports, network_gbs=100.0)
    assert [finding.ranks for finding in findings] == ["rank 0 on h0", "rank 1 on h1"]


# ---- measurements ------------------------------------------------------------------------------
def test_rings_join_the_ranks_of_a_node_and_the_nodes():
    within, between = preflight.rings_of(["a", "a", "b", "b", "c"]).values()
    assert (within, between) == ([[0, 1], [2, 3], [4]], [[0, 2, 4], [1, 3]])


@pytest.mark.parametrize("num_ranks", [3, 4, 8, 33])
def test_only_the_slow_host_measures_a_slow_link(monkeypatch, num_ranks):
    def simulate(data, partner, group):
        return 100.0 if 2 in (rank, partner) else 1.0

    monkeypatch.setattr(preflight.dist, "barrier", lambda: None)
    monkeypatch.setattr(preflight, "exchange_seconds", simulate)
    ring, device, rates = list(range(num_ranks)), preflight.torch.device("cpu"), []
    for rank in ring:
        rates.append(preflight.link_rate(rank, [ring], device, None))
    assert [rank for rank in ring if rates[rank] < max(rates)] == [2]


# ---- one rank in this process ------------------------------------------------------------------
@pytest.fixture
def run_rank(no_group, monkeypatch, capsys, tmp_path):
    """Return a function that runs one of two ranks in this process, and returns the error line."""
    monkeypatch.setattr(preflight.os, "_exit", sys.exit)
    # Skip the wait that lets rank 0 report its error first.
    monkeypatch.setattr(preflight.time, "sleep", lambda _: None)
    monkeypatch.setattr(
        sys, "argv", ["preflight.py", "--timeout", "1", "--save-dir", str(tmp_path)]
    )

    def run(rank, function=preflight.main, status=1, **variables):
        defaults = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        defaults |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}
        for name, value in (defaults | variables).items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(SystemExit, match=str(status)):
            function()
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"preflight.py: error: rank {rank} on ")
        return line

    return run


def test_more_ranks_than_gpus_is_an_error(run_rank, monkeypatch):
    monkeypatch.setattr(preflight.torch.cuda, "device_count", lambda: 2)
    assert "local rank 3 has no GPU (torch sees 2);" in run_rank(3, preflight.choose_gpu)


@pytest.mark.parametrize(
    "rank, variables, words",
    [
        (0, {}, "these ranks did not connect to 127.0.0.1:"),
        # Gloo needs all interfaces of the list, but NCCL would need only one of them.
        (0, {"GLOO_SOCKET_IFNAME": "lo,eth9"}, "Unable to find address for: eth9"),
        (1, {}, "Connection refused; set MASTER_ADDR to the node of rank 0, and MASTER_PORT"),
    ],
)
def test_rank_that_cannot_connect_reports_why(run_rank, rank, variables, words):
    assert words in run_rank(rank, **variables)


# Each mistake has the wrong variables, and a part of the expected error line.
MISTAKES = [
    ({"RANK": "", "WORLD_SIZE": ""}, "RANK, WORLD_SIZE: not set; start preflight.py with a"),
    ({"MASTER_PORT": ""}, "MASTER_PORT: not set; pass MASTER_ADDR and MASTER_PORT with -x"),
    # Kubernetes sets MASTER_PORT to the address of a service if the service's name is `master`.
    ({"MASTER_PORT": "tcp://10.0.0.1:80"}, "MASTER_PORT tcp://10.0.0.1:80: not a number; unset"),
    ({"MASTER_ADDR": "h[1-2]"}, "MASTER_ADDR h[1-2]: Name or service not known; set it to"),
    ({"RANK": "3"}, "WORLD_SIZE 2: there are at least 4 ranks; unset the variables RANK,"),
    ({"SLURM_STEP_NUM_TASKS": "4"}, "WORLD_SIZE 2: there are at least 4 ranks; unset the"),
    ({"GLOO_SOCKET_IFNAME": "eth9"}, "GLOO_SOCKET_IFNAME eth9: this node has only lo"),
    ({"NCCL_SOCKET_IFNAME": "=eth9,ib"}, "NCCL_SOCKET_IFNAME =eth9,ib: this node has only lo"),
    ({"WANDB_PROJECT": "team/run"}, "WANDB_PROJECT team/run: has a slash; set WANDB_ENTITY"),
]


@pytest.mark.parametrize("variables, words", MISTAKES)
def test_wrong_variable_is_reported_before_ranks_connect(run_rank, monkeypatch, variables, words):
    monkeypatch.setattr(preflight, "connect", lambda *_: pytest.fail("the rank has connected"))
    assert words in run_rank(int(variables.get("RANK") or 0), status=2, **variables)


# ---- on two hosts ------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(240)
def test_slow_full_and_unshared_host_is_named(cluster, tmp_path):
    """Give h2 a slow link, and a small disk of its own in place of the shared folder."""
    folder = tmp_path / "save"
    folder.mkdir()
    cluster.run("h2", ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder])
    cluster.slow_link("h2", "20mbit")
    command = ["srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, TOOL]
    command += ["--save-dir", folder, "--network-gbs", 0.2, "--checkpoint-gb", 0.01]
    done = cluster.run("head", command, 120, check=False, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no-go    disk free: rank 1 on h2: " in done.stdout, done.stdout
    assert "no-go    --save-dir: rank 1 on h2: not shared" in done.stdout, done.stdout
    assert "no-go    link between nodes: rank 1 on h2: " in done.stdout, done.stdout
