"""The small cluster that other tests launch on does what a real one does, and leaves nothing."""

import contextlib
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

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(240)]
PROGRAM = Path(__file__).parent / "cluster" / "cluster.py"


OWNER = """
import sys, time
from cluster.cluster import Cluster
with Cluster(folder=sys.argv[1]) as cluster:
    for host in cluster.hosts:
        cluster.run(host, "setsid --fork sleep 80 >/dev/null 2>&1")
        cluster.popen(host, ["sleep", "81"])
    print("up", flush=True)
    time.sleep(99)
"""


def mounts():
    """Return the machine's mounts and network devices, which a cluster leaves as they are."""
    return Path("/proc/self/mounts").read_text(), sorted(os.listdir("/sys/class/net"))


@pytest.fixture
def owner(tmp_path):
    """A process that makes a cluster in a folder, and keeps it."""
    if reason := missing_requirement():
        pytest.skip(reason)
    environment = os.environ | {"PYTHONPATH": str(PROGRAM.parent.parent)}
    command = [sys.executable, "-c", OWNER, tmp_path / "state"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, env=environment, **streams) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("moment", [0.15, 0.3, 0.5, None])
def test_nothing_is_left(owner, tmp_path, moment, number):
    """Stopped while it starts or later, a cluster leaves nothing; after SIGKILL, files at most."""
    before, folder = mounts(), tmp_path / "state"
    if moment:
        time.sleep(moment)
    else:
        assert owner.stdout.readline() == "up\n"
    owner.send_signal(signal.SIGSTOP)
    found = psutil.Process(owner.pid).children(recursive=True)
    assert moment or len(found) > 12
    for each in (number, signal.SIGCONT):
        owner.send_signal(each)
    owner.wait(timeout=30)
    _, alive = psutil.wait_procs(found, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert mounts() == before and (number == signal.SIGKILL or not folder.exists())


def test_a_folder_that_exists_is_left_alone(cluster, tmp_path):
    (tmp_path / "lock").write_text("mine")
    with pytest.raises(ClusterError, match="exists"), Cluster(folder=tmp_path):
        pass
    assert (tmp_path / "lock").read_text() == "mine"


def test_ctrl_c_ends_what_runs_in_the_shell_and_no_more(cluster, tmp_path):
    """Meanwhile a host is killed and revived from another terminal."""
    program = f"{sys.executable} {PROGRAM} --folder {tmp_path / 'state'} "
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    terminal = subprocess.Popen(["script", "-qec", f"{program} shell", "/dev/null"], **streams)

    def sleeps():
        with contextlib.suppress(ClusterError):
            inside = Cluster.attach(tmp_path / "state")
            return inside.run("head", ["pgrep", "-f", "^sleep 76"], check=False).stdout

    try:
        terminal.stdin.write("sleep 76\n")
        terminal.stdin.flush()
        wait_until(sleeps, 30, "sleep runs in the shell")
        for action in ("kill", "revive"):
            subprocess.run([*program.split(), action, "h2"], check=True, timeout=60)
            assert bool(Cluster.attach(tmp_path / "state").pids("h2")) == (action == "revive")
        stdout, _ = terminal.communicate("\x03echo 'status' $?; exit 4\n", timeout=30)
    finally:
        terminal.kill()
    assert "status 130" in stdout
    assert terminal.returncode == 4
    assert not (tmp_path / "state").exists()


def test_what_is_missing_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert missing_requirement() == "a cluster on one machine needs Linux, and root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("cluster.cluster.COMMANDS", ["sh", "no-such-tool"])
    assert re.fullmatch(
        "no-such-tool: not installed; run bash .*packages.sh", missing_requirement()
    )
