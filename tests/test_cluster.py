"""The practice cluster starts, loses a host and ends as its users expect, and leaves nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.exhaustive, pytest.mark.cluster, pytest.mark.timeout(240)]
PROGRAM = Path(__file__).parent / "cluster/cluster.py"
# What a user types in the shell of the cluster.
TYPED = """
touch $CLUSTER/h2/kill; while [ -e $CLUSTER/h2/kill ]; do sleep 0.1; done
ssh -no ConnectTimeout=2 h2 true || killed=yes
touch $CLUSTER/h2/revive; until ssh -n h2 true; do sleep 0.1; done
ssh -n h2 'sleep 80 >/dev/null 2>&1 &'
echo killed $killed and revived
sleep 99
"""


def mounts_and_devices():
    """Return the machine's mounts and network devices."""
    return Path("/proc/self/mounts").read_text(), sorted(os.listdir("/sys/class/net"))


# Linux sends SIGHUP when a terminal is closed.
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_shell_revives_a_host_and_leaves_no_process_and_no_mount(machine, tmp_path, number):
    before, env = mounts_and_devices(), os.environ | {"TMPDIR": str(tmp_path)}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, PROGRAM], env=env, **streams) as shell:
        shell.stdin.write(TYPED)
        shell.stdin.flush()
        assert "killed yes and revived\n" in iter(shell.stdout.readline, "")
        children = psutil.Process(shell.pid).children(recursive=True)
        assert len(children) > 12
        shell.send_signal(number)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert mounts_and_devices() == before
    assert number == signal.SIGKILL or not list(tmp_path.iterdir()), "it leaves files"
