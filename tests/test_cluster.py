"""The practice cluster starts, loses hosts and ends as its users expect, and leaves nothing."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cluster.cluster import Cluster, ClusterError, missing_requirement, wait_until
from conftest import run_command

pytestmark = [pytest.mark.exhaustive, pytest.mark.cluster, pytest.mark.timeout(240)]
PROGRAM = Path(__file__).parent / "cluster/cluster.py"
OWNER = """
import sys, time
from cluster.cluster import HOSTS, Cluster
with Cluster(sys.argv[1]) as cluster:
    for host in HOSTS:
        cluster.run(host, "setsid --fork sleep 80 >/dev/null 2>&1")
        cluster.popen(host, ["sleep", "81"])
    print("up", flush=True)
    time.sleep(99)
"""


def mounts_and_devices():
    """Return the machine's mounts and network devices."""
    return Path("/proc/self/mounts").read_text(), sorted(os.listdir("/sys/class/net"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("seconds", [0.15, 0.3, 0.5, None])
def test_owner_that_is_killed_leaves_no_process_and_no_mount(machine, tmp_path, seconds, number):
    """Stop the owner while the cluster starts, or (None) when it is up."""
    before, folder = mounts_and_devices(), tmp_path / "state"
    env = os.environ | {"PYTHONPATH": str(PROGRAM.parent.parent)}
    command = [sys.executable, "-c", OWNER, folder]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as owner:
        if seconds:
            time.sleep(seconds)
        else:
            assert owner.stdout.readline() == "up\n"
        owner.send_signal(signal.SIGSTOP)
        children = psutil.Process(owner.pid).children(recursive=True)
        assert seconds or len(children) > 12
        owner.send_signal(number)
        owner.send_signal(signal.SIGCONT)
        owner.wait(timeout=30)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert mounts_and_devices() == before
    assert number == signal.SIGKILL or not folder.exists(), "the owner has not removed its files"


def test_existing_folder_is_refused_and_kept(machine, tmp_path):
    (tmp_path / "lock").write_text("mine")
    with pytest.raises(ClusterError, match="exists"), Cluster(tmp_path):
        pass
    assert (tmp_path / "lock").read_text() == "mine"


def test_shell_kills_and_revives_a_host_and_ctrl_c_ends_only_its_command(machine):
    """Type in a terminal, as a user does."""
    command = ["script", "-qec", f"{sys.executable} {PROGRAM}", "/dev/null"]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **streams) as terminal:
        terminal.stdin.write(
            "touch $CLUSTER/h2/kill; while [ -e $CLUSTER/h2/pid ]; do sleep 0.1; done\n"
            "touch $CLUSTER/h2/revive; until ssh -n h2 true; do sleep 0.1; done\n"
            "echo folder $CLUSTER; sleep 76\n"
        )
        terminal.stdin.flush()
        try:
            sleeps = ["pgrep", "-f", "^sleep 76"]
            wait_until(lambda: run_command(*sleeps).stdout, 90, "the shell sleeps")
            stdout, _ = terminal.communicate("\x03echo status $?; exit 4\n", timeout=30)
        finally:
            terminal.kill()
    assert "status 130" in stdout and terminal.returncode == 4
    assert not Path(re.search(r"^folder (\S+)", stdout, re.M)[1]).exists()


def test_missing_requirement_is_one_line(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert missing_requirement() == "a cluster on one machine needs Linux, and root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("cluster.cluster.COMMANDS", ["sh", "no-such-tool"])
    expected = "no-such-tool: not installed; run bash .*packages.sh"
    assert re.fullmatch(expected, missing_requirement())
