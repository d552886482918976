"""preflight.py: healthy machines get a go, and each planted fault a line that says where it is."""

import argparse
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from conftest import ROOT, free_port

TOOL = ROOT / "diagnosing-errors/preflight.py"


@pytest.fixture(scope="module")
def preflight():
    """The tool as a module."""
    spec = importlib.util.spec_from_file_location("preflight", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- comparison ------------------------------------------------------------------------------


def arguments(**changes):
    given = {"device": "cpu", "checkpoint_gb": 40.0, "keep_checkpoints": 2, "network_gbs": 0.0}
    return argparse.Namespace(**given | {"accept": []} | changes)


def healthy(preflight, ranks=1000, per_host=8):
    """Return what so many ranks would tell of healthy machines; no two measure quite the same."""
    return [told_by(preflight, rank, ranks, per_host) for rank in range(ranks)]


def told_by(preflight, rank, ranks, per_host):
    local = rank % per_host
    noise = 1 - (rank * 37 % 100) / 1000  # up to 10% slower
    told = {"rank": rank, "host": f"h{rank // per_host}", "local_rank": local, "boot": "x"}
    told |= {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0", "cuda": "13.0"}
    told |= {"open_files": 65536, "memlock": -1, "shm_free": 2**34, "memory_free": 2**40}
    told |= {"affinity": [local], "cpus": 1, "threads": 1, "many_hosts": True}
    told |= {"interfaces": {"lo": ["127.0.0.1", True], "eth0": ["10.0.0.1", True]}}
    told |= {"gloo_interface": "eth0", "route": "eth0", "clocks": [rank / 1e6] * 5}
    told |= {"matmul": {"float32": 50 * noise, "bfloat16": 600 * noise, "share": noise}}
    told |= {"collective": {"right": "right", "latency": 20.0, "all-reduce": 300.0}}
    others = {(rank + sign * per_host) % ranks for sign in (1, 2, 3)} - {rank}
    told |= {"pairs": {f"between {other}": 20 * noise for other in others}}
    told["pairs"] |= {f"latency between {other}": 20e-6 for other in others}
    if local == 0:
        told |= {"address": "10.0.0.1", "name_of_address": told["host"] + ".cluster"}
        told |= {"unresolved": [], "disk_free": 2**42, "shared": preflight.DONE}
        told |= {"gpus": [gpu(number) for number in range(per_host)], "gpus_seen": per_host}
    return told


def gpu(number):
    good = {"index": str(number), "name": "H100", "uncorrected": 0, "remap_failed": "no"}
    good |= {"pending": "no", "remapped": 0, "retired": None, "nvlinks_down": 0, "slowed": "none"}
    return good | {"processes": 0, "width": "16x of 16x", "generation": "5 of 5", "clock": 1980}


def findings(preflight, reports, **changes):
    rows = preflight.compare(reports, arguments(**changes))
    return [finding for row in rows for finding in row["findings"]]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_thousand_healthy_ranks(preflight, device):
    start = time.monotonic()
    assert findings(preflight, healthy(preflight), device=device) == []
    assert time.monotonic() - start < 10


RANK = {  # what rank 17, on h2, may tell, and which check finds it
    "torch": ({"torch": "2.12.0"}, "no-go", "2.12.0"),
    "transformers": ({"transformers": None}, "no-go", "not installed"),
    "python": ({"python": "3.12.1"}, "warning", "3.12.1"),
    "open files": ({"open_files": 256}, "no-go", "256"),
    "CPUs for threads": ({"threads": 4}, "warning", "only 1 for 4"),
    "gloo's interface": ({"gloo_interface": "eth9"}, "no-go", "eth9: there is none"),
    "matmul float32": ({"matmul": {"float32": 38.0, "bfloat16": 600.0}}, "no-go", "38 TFLOP/s"),
    "share of its CPUs": ({"matmul": {"share": 0.33}}, "no-go", "33%"),
    "sums and gathers": ({"collective": {"right": "wrong"}}, "no-go", "wrong"),
    "pairs between hosts": ({"pairs": {"between 9": 1.0}}, "no-go", "from rank 9 on h1 to rank 17"),
}


@pytest.mark.parametrize("check", RANK)
def test_one_rank_of_a_thousand(preflight, check):
    changes, level, words = RANK[check]
    reports = healthy(preflight)
    reports[17] |= changes
    [finding] = findings(preflight, reports)
    assert (finding["check"], finding["level"]) == (check, level)
    assert words in finding["value"] + finding["where"]
    assert "rank 17 on h2" in finding["where"]
    line = preflight.line_of(finding)
    assert line.startswith(f"{level:8} {check}: ") and line.endswith(finding["advice"])
    found = findings(preflight, reports, accept=[check])
    assert [each["level"] for each in found] == ["warning"]


HOST = {
    "--save-dir": ({"shared": "not seen"}, "no-go"),
    "disk free": ({"disk_free": 100 * 10**9}, "no-go"),
    "own name and address": ({"name_of_address": "localhost"}, "warning"),
    "other hosts' names": ({"unresolved": ["h1"]}, "warning"),
    "clock ahead by": ({"clocks": [5.0] * 5}, "warning"),
    "/dev/shm free": ({"shm_free": 2**26}, "warning"),
    "host memory free": ({"memory_free": 2**38}, "warning"),
}


@pytest.mark.parametrize("check", HOST)
def test_one_host_of_many(preflight, check):
    changes, level = HOST[check]
    reports = healthy(preflight, 80)
    reports[16] |= changes
    [finding] = findings(preflight, reports)
    assert (finding["check"], finding["level"], finding["where"]) == (check, level, "h2")


GPU = {
    "GPU ECC errors": {"uncorrected": 3},
    "GPU remapping failed": {"remap_failed": "yes"},
    "GPU repair pending": {"pending": "yes"},
    "GPU rows remapped": {"remapped": 1},
    "NVLinks down": {"nvlinks_down": 2},
    "GPU slowed by": {"slowed": "hw_thermal_slowdown"},
    "GPU's processes": {"processes": 1},
    "PCIe width": {"width": "8x of 16x"},
    "GPU": {"name": "A100"},
}


@pytest.mark.parametrize("check", GPU)
def test_one_gpu_of_many(preflight, check):
    reports = healthy(preflight, 80)
    reports[16]["gpus"][3] |= GPU[check]
    [finding] = findings(preflight, reports, device="cuda")
    assert (finding["check"], finding["where"]) == (check, "h2 GPU 3")


def test_fewer_gpus_than_ranks(preflight):
    reports = healthy(preflight, 80)
    reports[16]["gpus_seen"] = 7
    found = {each["check"]: each for each in findings(preflight, reports, device="cuda")}
    assert found.keys() == {"GPU for each rank", "GPUs of a host"}


def test_what_cannot_be_read_is_not_known(preflight):
    reports = healthy(preflight, 8)
    for told in reports:
        told.pop("gpus", None)
        told.pop("affinity")
    rows = {row["check"]: row for row in preflight.compare(reports, arguments(device="cuda"))}
    assert rows["GPU ECC errors"]["level"] == rows["CPUs for threads"]["level"] == "not known"
    assert "nvidia-smi -q" in rows["GPU ECC errors"]["most"]
    assert not findings(preflight, reports, device="cuda")


def test_a_slow_host_among_three(preflight):
    """Most of the pairs of three hosts are slow if one host is, and that one is blamed."""
    hosts = {0: "h1", 1: "h2", 2: "h3"}
    pairs = {pair: 0.01 if 2 in pair else 1.0 for pair in itertools.permutations(hosts, 2)}
    usual = preflight.usual_rate(pairs)
    assert usual == 1.0
    [finding] = preflight.slow_pairs("pairs", pairs, hosts, usual / 2, "")
    assert finding["where"] == "rank 2 on h3"


def test_two_slow_hosts_need_a_number(preflight):
    """Nothing says which of two hosts is slow, or that they are, but --network-gbs."""
    reports = healthy(preflight, 2, per_host=1)
    assert not findings(preflight, reports)
    [finding] = findings(preflight, reports, network_gbs=100.0)
    assert finding["ranks"] == [0, 1]


# ---- parts -----------------------------------------------------------------------------------


def test_spans(preflight):
    assert preflight.spans([9, 0, 1, 2, 4]) == "0-2,4,9"


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 33])
def test_every_pair_meets_once(preflight, ranks):
    met = [
        (rank, (rank + shift) % ranks) for shift in preflight.shifts(ranks) for rank in range(ranks)
    ]
    assert sorted(met) == sorted(itertools.permutations(range(ranks), 2))


def test_rounds_are_bounded(preflight):
    assert len(preflight.shifts(1000)) <= preflight.MOST_ROUNDS


def test_rings(preflight):
    me = SimpleNamespace(rank=3, host="b", hosts=["a", "a", "b", "b", "c"])
    assert preflight.rings(me) == {"inside": ([2, 3], 2), "between": ([3], 3)}
    me.hosts.append("c")
    assert preflight.rings(me)["between"] == ([1, 3, 5], 3)


@pytest.mark.parametrize(
    "spec, left",
    [
        ("eth", "eth0 eth1"),
        ("=eth1", "eth1"),
        ("^docker,lo", "eth0 eth1"),
        ("^=eth1", "docker0 eth0 lo"),
        ("ib", "none fits ib"),
        (None, None),
    ],
)
def test_nccl_interfaces(preflight, spec, left):
    interfaces = dict.fromkeys(["lo", "eth0", "eth1", "docker0"])
    assert preflight.nccl_interfaces({"nccl_spec": spec, "interfaces": interfaces}) == left


SMI = """<nvidia_smi_log><gpu id="0"><product_name>NVIDIA H100</product_name><uuid>GPU-1</uuid>
<pci><pci_gpu_link_info><pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>1</current_link_gen>
</pcie_gen><link_widths><max_link_width>16x</max_link_width><current_link_width>8x</current_link_width>
</link_widths></pci_gpu_link_info></pci><clocks_event_reasons>
<clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
<clocks_event_reason_hw_thermal_slowdown>Active</clocks_event_reason_hw_thermal_slowdown>
<clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown></clocks_event_reasons>
<ecc_errors><volatile><sram_correctable>9</sram_correctable><sram_uncorrectable>1</sram_uncorrectable>
<dram_uncorrectable>2</dram_uncorrectable></volatile></ecc_errors>
<retired_pages><pending_retirement>N/A</pending_retirement></retired_pages>
<remapped_rows><remapped_row_corr>0</remapped_row_corr><remapped_row_unc>4</remapped_row_unc>
<remapped_row_pending>Yes</remapped_row_pending><remapped_row_failure>No</remapped_row_failure>
</remapped_rows><temperature><gpu_temp>41 C</gpu_temp></temperature>
<clocks><sm_clock>1980 MHz</sm_clock></clocks><processes><process_info><pid>1</pid></process_info>
</processes></gpu><gpu id="1"><product_name>GTX</product_name></gpu></nvidia_smi_log>"""


def test_parse_smi(preflight):
    """As the drivers' names for them were found in published outputs: none could be tried here."""
    known, unknown = preflight.parse_smi(SMI)
    wanted = {
        "uncorrected": 3,
        "remapped": 4,
        "pending": "yes",
        "remap_failed": "no",
        "processes": 1,
    }
    wanted |= {"slowed": "hw_thermal_slowdown", "width": "8x of 16x", "temperature": 41}
    assert {name: known[name] for name in wanted} == wanted
    assert unknown["uncorrected"] is unknown["slowed"] is unknown["width"] is None


def test_gpus_through_a_pretended_nvidia_smi(preflight, monkeypatch, tmp_path):
    (tmp_path / "smi.xml").write_text(SMI)
    script = f"#!/bin/sh\n[ $1 = -q ] && exec cat {tmp_path}/smi.xml\nexit 1\n"
    (tmp_path / "nvidia-smi").write_text(script)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert preflight.known(preflight.read_gpus) is None
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert [each["nvlinks_down"] for each in preflight.read_gpus()] == [None, None]
    for visible, name in {"1": "GTX", "GPU-1": "NVIDIA H100"}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [each["name"] for each in preflight.read_gpus()] == [name]
    gpus = [{"slowed": "none"}]
    assert preflight.while_hot(gpus, lambda: "measured") == "measured"
    assert gpus[0]["slowed"] == "hw_thermal_slowdown"


def test_parse_nvlink(preflight):
    text = "GPU 0: H100 (UUID: x)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n"
    text += "GPU 1: H100 (UUID: y)\n\t Link 0: <inactive>\n"
    assert preflight.parse_nvlink(text, 3) == [1, None, None]


ROLLS = {  # what is odd about rank 2 of 3, and what is said of it
    "absent": ({}, "rank 2: never came to h1:29500 (2 of 3 did, within 9 s); no rank came from h3"),
    "silent": ({"silent": [2]}, "rank 2 on h3: no answer; the last known phase: pairs"),
    "failed": ({"failed": {1: "closed by peer", 2: "no memory"}}, "rank 2 on h3: no memory"),
    "behind": (
        {"phases": {0: "05 pairs", 1: "05 pairs", 2: "04 matmul"}},
        "rank 2 on h3: still in",
    ),
    "none": ({"failed": {}}, "ranks 0-2 on h1, h2, h3: not done in time: pairs"),
}


@pytest.mark.parametrize("odd", ROLLS)
def test_who_is_missing(preflight, monkeypatch, odd):
    monkeypatch.setenv("MASTER_ADDR", "h1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    changes, words = ROLLS[odd]
    roll = {"hosts": {0: "h1", 1: "h2", 2: "h3"}, "phases": dict.fromkeys(range(3), "05 pairs")}
    roll |= {"silent": [], "failed": {}} | changes
    if odd == "absent":
        del roll["hosts"][2], roll["phases"][2]
    args = argparse.Namespace(timeout=9)
    [finding] = preflight.who_is_missing(args, roll, 3, ["h1", "h2", "h3"])
    assert words in preflight.line_of(finding)


def test_rename_is_seen(preflight, tmp_path):
    path = tmp_path / "new/probe"
    assert not preflight.wait_for(path, "old", seconds=0.1)
    assert preflight.in_words(preflight.write_flushed, path, "old") == preflight.DONE
    assert preflight.wait_for(path, "old", seconds=0.1)
    assert preflight.in_words(preflight.write_flushed, path, "new") == preflight.DONE
    assert preflight.wait_for(path, "new", seconds=0.1)
    path.write_text("")
    assert preflight.in_words(preflight.write_flushed, path / "under", "old").startswith("failed: ")


# ---- runs on this machine --------------------------------------------------------------------


def start(rank, size, *args, prefix=(), **variables):
    """Start a rank as a launcher would."""
    variables |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    env |= {name: str(value) for name, value in variables.items()}
    command = [*prefix, sys.executable, TOOL, *args]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(list(map(str, command)), env=env, **streams)


def run(commands, timeout=90):
    """Wait for started ranks; return (status, stdout, stderr) of each."""
    try:
        outputs = [process.communicate(timeout=timeout) for process in commands]
        return [
            (process.returncode, *output) for process, output in zip(commands, outputs, strict=True)
        ]
    finally:
        for process in commands:
            process.kill()


@pytest.fixture(scope="module")
def runs(environment, tmp_path_factory):
    """At the same time: two healthy ranks; rank 0 alone; rank 1 without a rank 0, and nowhere."""
    folder, port = tmp_path_factory.mktemp("preflight"), free_port()
    args = ["--save-dir", folder / "new/outputs", "--json", folder / "healthy.json"]
    healthy = [start(rank, 2, *args, MASTER_PORT=port) for rank in range(2)]
    few = ["bash", "-c", 'ulimit -n 256; exec "$@"', "-"]
    alone = start(0, 2, "--timeout", 5, "--save-dir", folder, prefix=few, MASTER_PORT=free_port())
    nobody = start(1, 2, "--timeout", 5, MASTER_PORT=free_port())
    nowhere = start(1, 2, "--timeout", 5, MASTER_PORT=port, MASTER_ADDR="no.such.host.invalid")
    done = run([*healthy, alone, nobody, nowhere])
    return SimpleNamespace(folder=folder, healthy=done[:2], alone=done[2], lost=done[3:])


def test_two_healthy_ranks(runs):
    (status, output, errors), (other, silence, more_errors) = runs.healthy
    assert status == other == 0, output + errors + more_errors
    assert output.splitlines()[-1].startswith("go; ") and not silence
    assert "Traceback" not in errors + more_errors
    told = json.loads((runs.folder / "healthy.json").read_text())
    assert (told["verdict"], told["findings"], len(told["ranks"])) == ("go", [], 2)
    rows = {row["check"]: row["most"] for row in told["rows"]}
    assert rows["--save-dir"] == "written, renamed, flushed"
    assert rows["sums and gathers"] == "right (2 of 2)"
    for name in ("matmul float32", "all-reduce, bus", "all-gather, bus", "pairs inside a host"):
        assert float(rows[name].split()[0]) > 0
    assert list((runs.folder / "new/outputs").iterdir()) == []


def test_a_rank_that_never_comes(runs):
    status, output, _ = runs.alone
    assert status == 1
    assert "rank 1: never came to 127.0.0.1:" in output and "(1 of 2 did, within 5 s)" in output
    assert output.splitlines()[-1].startswith("no-go: all ranks come through")


def test_no_rank_0(runs):
    """The others say what is wrong with the way to it."""
    for (status, _, errors), words in zip(runs.lost, ["refused", "not resolve"], strict=True):
        assert status == 1
        [line] = errors.splitlines()
        assert line.startswith("preflight.py: error: rank 1 on ") and words in line


@pytest.mark.parametrize(
    "args, words",
    [
        (["--checkpoint-gb", "nan"], "must be at least 0.0"),
        (["--json", "/no/such/folder/file"], "there is no folder /no/such/folder"),
        (["--hosts", "/no/such/file"], "No such file"),
        ([], "start this with a launcher"),
    ],
)
def test_bad_arguments(preflight, monkeypatch, capsys, args, words):
    for names in preflight.LAUNCHERS.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as stop:
        parsed = preflight.parse_args(args)
        preflight.launch(parsed, args)
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(os.cpu_count() < 2, reason="needs two CPUs")
def test_a_busy_core(environment, tmp_path):
    """Two loops run on the CPU to which rank 1 is bound: it is named."""
    if os.geteuid() and os.getloadavg()[0] > os.cpu_count():
        pytest.skip("all CPUs are busy, and only root can put these processes before others")
    loop = [*FIRST, "taskset", "-c", "1", sys.executable, "-c", HALF_A_MINUTE]
    busy = [subprocess.Popen(loop) for _ in range(2)]
    try:
        done = run(bound_ranks(tmp_path))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    status, output, errors = done[0]
    assert status == 1, output + errors
    assert "no-go    share of its CPUs: rank 1 on " in output, output


HALF_A_MINUTE = "import time; end = time.time() + 30\nwhile time.time() < end: pass"
# as if nothing else ran here: ahead of all other sessions, see sched(7) on autogroups
AHEAD = 'echo -15 2>/dev/null >/proc/self/autogroup; exec "$@"'
FIRST = ["setsid", "-w", "bash", "-c", AHEAD, "-"] if os.geteuid() == 0 else []


def bound_ranks(folder):
    """Start two ranks, each on a CPU of its own."""
    port = free_port()
    bound = [[*FIRST, "taskset", "-c", rank] for rank in range(2)]
    return [
        start(rank, 2, "--save-dir", folder, prefix=bound[rank], MASTER_PORT=port)
        for rank in range(2)
    ]


# ---- runs on two hosts -----------------------------------------------------------------------

on_cluster = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(240)]


def on_two_hosts(cluster, tmp_path, *args, **variables):
    """Run it on a rank of each of two hosts, over ssh; return the CompletedProcess."""
    (tmp_path / "hosts.txt").write_text("h1\nh2\n")
    options = ["--hosts", tmp_path / "hosts.txt", "--save-dir", tmp_path / "save", *args]
    env = {"OMP_NUM_THREADS": "1"} | variables
    return cluster.run("head", [sys.executable, TOOL, *options], 120, check=False, env=env)


@pytest.mark.usefixtures("environment")
class TestOnCluster:
    pytestmark = on_cluster

    def test_slow_full_and_not_shared(self, cluster, tmp_path):
        """h2 has a slow link, and a small disk of its own where the shared folder should be."""
        (tmp_path / "save").mkdir()
        cluster.run("h2", ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path / "save"])
        cluster.slow_link("h2", "20mbit")
        options = ["--network-gbs", 0.2, "--checkpoint-gb", 0.01, "--accept", "share of its CPUs"]
        done = on_two_hosts(cluster, tmp_path, *options)
        cluster.run("h2", ["umount", tmp_path / "save"])
        assert done.returncode == 1, done.stdout + done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith("no-go  ")]
        found = [": ".join(line.split(": ")[:2]) for line in lines]
        for expected in (
            "no-go    disk free: h2",
            "no-go    --save-dir: h2",
            "no-go    pairs between hosts: ranks 0-1 on h1, h2",
        ):
            assert expected in found, done.stdout

    def test_wrong_interface(self, cluster, tmp_path):
        done = on_two_hosts(cluster, tmp_path, GLOO_SOCKET_IFNAME="eth9")
        assert done.returncode == 1
        assert (
            "gloo's interface: ranks 0-1 on h1, h2: eth9: there is none of this name" in done.stdout
        )
        assert "Unable to find address for: eth9" in done.stdout

    def test_blocked_port(self, cluster, tmp_path):
        cluster.block_port("h1", 23456)
        done = on_two_hosts(cluster, tmp_path, "--timeout", 15, MASTER_PORT="23456")
        assert done.returncode == 1
        assert "rank 1: never came to h1:23456" in done.stdout
        assert "no rank came from h2" in done.stdout
        assert "rank 1 on h2 cannot reach h1:23456: no answer: a firewall" in done.stderr

    def test_a_rank_that_stops(self, cluster, tmp_path):
        """SIGSTOP, in the middle of it: its silence is reported, with its host."""
        (tmp_path / "hosts.txt").write_text("h1\nh2\n")
        save = tmp_path / "save"
        options = ["--hosts", tmp_path / "hosts.txt", "--save-dir", save, "--timeout", 20]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = cluster.popen("head", [sys.executable, TOOL, *options], **streams)
        patience = time.monotonic() + 60
        while not list(save.glob(".preflight-*")):  # a file that is soon gone again
            assert time.monotonic() < patience, "they have not come"
            time.sleep(0.01)
        cluster.run("h2", ["pkill", "-STOP", "-f", "preflight.py"])
        try:
            output, _ = process.communicate(timeout=90)
        finally:
            process.kill()
        assert "all ranks come through: rank 1 on h2: no answer; the last known phase:" in output
