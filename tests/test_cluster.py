"""The small cluster that other tests launch on does what a real one does, and leaves nothing."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.cluster import Cluster, ClusterError, obstacle, until

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(240)]
PROGRAM = Path(__file__).parent / "cluster" / "cluster.py"
HOSTS = ["head", "h1", "h2"]
PROBE = "import socket, sys; socket.create_connection((sys.argv[1], 5000), 4).recv(9)"
HOLD = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 5000))
print(connection.recv(9), flush=True)
print(connection.recv(9))
"""
LISTEN = """
import socket
listener = socket.create_server(("", 5000))
print("listening", flush=True)
clients = []
while True:
    clients.append(listener.accept()[0])
    clients[-1].send(b"hello")
"""


@pytest.fixture
def server(cluster):
    """Let h1 greet whoever connects to its port 5000, and keep the connection."""
    process = cluster.popen("h1", [sys.executable, "-c", LISTEN], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"listening\n"
    yield
    process.kill()
    process.wait()


def connects(cluster, host):
    """Return whether a host gets h1's greeting within four seconds."""
    return not cluster.run(host, [sys.executable, "-c", PROBE, "h1"], check=False).returncode


def test_hosts_have_names_and_reach_each_other_by_name(cluster):
    for host in HOSTS:
        assert cluster.run(host, ["hostname"]).stdout == f"{host}\n"
        for other in HOSTS:
            found = cluster.run(host, ["getent", "ahostsv4", other]).stdout
            assert found.split()[0] == cluster.address(other)


def test_ssh_goes_everywhere_without_a_question(cluster):
    before = own_ssh_files()
    for host in HOSTS:
        for other in HOSTS:
            done = cluster.run(host, ["ssh", other, "hostname"])
            assert (done.stdout, done.stderr) == (f"{other}\n", "")
    assert own_ssh_files() == before


def own_ssh_files():
    """Return the machine's own settings of ssh, and when they were changed."""
    folders = [path for path in (Path.home() / ".ssh", Path("/etc/ssh")) if path.exists()]
    return [(path, path.stat().st_mtime) for folder in folders for path in folder.rglob("*")]


def test_pdsh_runs_on_all_hosts(cluster):
    done = cluster.run("head", ["pdsh", "-R", "ssh", "-w", "h[1-2]", "hostname"])
    assert sorted(done.stdout.splitlines()) == ["h1: h1", "h2: h2"]


def test_files_are_shared_and_run_is_not(cluster, tmp_path):
    cluster.run("h1", f"echo here > {tmp_path}/shared; echo here > /run/own; echo > /dev/shm/own")
    assert cluster.run("h2", ["cat", tmp_path / "shared"]).stdout == "here\n"
    assert cluster.run("h2", "ls /run/own /dev/shm/own", check=False).returncode == 2


def test_a_host_sees_only_its_own_processes(cluster):
    process = cluster.popen("h1", ["sleep", "77"])
    assert process.pid in cluster.pids("h1")
    assert process.pid not in cluster.pids("h2")
    until(lambda: "sleep 77" in cluster.run("h1", ["ps", "-ef"]).stdout, 10, "h1 sees it")
    assert "sleep 77" not in cluster.run("h2", ["ps", "-ef"]).stdout
    process.terminate()
    assert process.wait(timeout=5) == -signal.SIGTERM


def test_processes_are_found_though_their_parents_are_gone(cluster):
    cluster.run("h1", "setsid --fork sleep 78 >/dev/null 2>&1")
    until(lambda: "sleep 78" in command_lines(cluster, "h1"), 10, "the orphan is found")
    cluster.reset()
    assert "sleep 78" not in command_lines(cluster, "h1")


def command_lines(cluster, host):
    """Return the command lines of all processes on a host."""
    lines = []
    for pid in cluster.pids(host):
        with contextlib.suppress(OSError):
            lines.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip())
    return lines


def test_a_command_that_fails_or_hangs_says_so(cluster):
    with pytest.raises(ClusterError, match=r"h1: .* ended with 3:\nout\nerr\n"):
        cluster.run("h1", "echo out; echo err >&2; exit 3")
    with pytest.raises(ClusterError, match=r"h1: .* ran past 0.5 s:\nbegun"):
        cluster.run("h1", "echo begun; sleep 60", timeout=0.5)
    with pytest.raises(ClusterError, match="there is no host h3; the hosts are head h1 h2"):
        cluster.run("h3", ["true"])


def test_srun_on_two_nodes(cluster):
    done = cluster.run("head", ["srun", "--nodes=2", "hostname"])
    assert sorted(done.stdout.split()) == ["h1", "h2"]


def test_gpus_are_given_to_a_job(cluster, tmp_path):
    show = "echo $SLURMD_NODENAME:$CUDA_VISIBLE_DEVICES"
    script = ["--output", tmp_path / "out", "--nodes=2", "--gpus-per-node=2"]
    job = cluster.sbatch(*script, f"--wrap=srun bash -c '{show}'")
    cluster.wait_for_job(job, "COMPLETED")
    assert sorted((tmp_path / "out").read_text().split()) == ["h1:0,1", "h2:0,1"]
    one = cluster.run("h2", ["srun", "--gpus-per-node=1", "bash", "-c", show]).stdout
    assert one.strip() == "h1:0"


def test_a_requeued_job_starts_again(cluster, tmp_path):
    script = 'echo restart ${SLURM_RESTART_COUNT:-0}; [ -n "$SLURM_RESTART_COUNT" ] || sleep 99'
    options = ["--requeue", "--open-mode=append", "--output", tmp_path / "out"]
    job = cluster.sbatch(*options, f"--wrap={script}")
    until(lambda: "restart 0" in text(tmp_path / "out"), 60, "the job has begun")
    cluster.run("h1", ["scontrol", "requeue", job])
    cluster.wait_for_job(job, "COMPLETED")
    assert text(tmp_path / "out").split("\n")[0] == "restart 0"
    assert text(tmp_path / "out").split("\n")[-2] == "restart 1"
    assert cluster.job(job)["Restarts"] == "1"


def text(path):
    """Return a file's text, or nothing if there is no file."""
    return path.read_text() if path.exists() else ""


def test_a_job_outlives_its_node(cluster, tmp_path):
    """The job needs both nodes: it waits for the dead one, and finishes when that is back."""
    script = 'srun --nodes=2 hostname; echo begun; [ -n "$SLURM_RESTART_COUNT" ] || sleep 99'
    options = ["--requeue", "--nodes=2", "--open-mode=append", "--output", tmp_path / "out"]
    job = cluster.sbatch(*options, f"--wrap={script}")
    until(lambda: "begun" in text(tmp_path / "out"), 60, "the job has begun")
    cluster.kill_host("h2")
    assert cluster.pids("h2") == []
    until(lambda: cluster.nodes()["h2"].startswith("down"), 60, "h2 is known to be dead")
    assert cluster.wait_for_job(job, "PENDING")["Restarts"] == "1"
    cluster.revive("h2")
    cluster.wait_for_job(job, "COMPLETED", seconds=120)
    lines = text(tmp_path / "out").split("\n")
    assert (lines.count("h1"), lines.count("h2")) == (2, 2)


def test_a_job_moves_to_another_node(cluster, tmp_path):
    script = 'hostname; [ -n "$SLURM_RESTART_COUNT" ] || sleep 99'
    options = ["--requeue", "--open-mode=append", "--output", tmp_path / "out"]
    job = cluster.sbatch(*options, f"--wrap={script}")
    until(lambda: "h1" in text(tmp_path / "out"), 60, "the job has begun")
    cluster.kill_host("h1")
    cluster.wait_for_job(job, "COMPLETED")
    assert text(tmp_path / "out").split()[-1] == "h2"


def test_the_controller_comes_back_with_its_jobs(cluster, tmp_path):
    job = cluster.sbatch("--output", tmp_path / "out", "--wrap=sleep 12; echo done")
    cluster.wait_for_job(job, "RUNNING")
    # It saves its state some seconds late, and what it had not saved is lost.
    time.sleep(7)
    cluster.kill_host("head")
    cluster.revive("head")
    cluster.wait_for_job(job, "COMPLETED")
    assert text(tmp_path / "out") == "done\n"


MPI = "mpirun --allow-run-as-root --mca btl self,tcp --mca btl_tcp_if_include eth0"
MPI = [*MPI.split(), *"--mca oob_tcp_if_include eth0 -x OMP_NUM_THREADS".split()]
RANK = 'echo "$(hostname) $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE $OMP_NUM_THREADS"'


def test_mpirun_across_hosts(cluster):
    command = [*MPI, "-H", "h1:2,h2:2", "bash", "-c", RANK]
    done = cluster.run("h1", ["timeout", "-s", "KILL", "60", *command])
    assert sorted(done.stdout.splitlines()) == [
        f"{host} {rank} of 4 1" for host, rank in (("h1", 0), ("h1", 1), ("h2", 2), ("h2", 3))
    ]


SUM = """
import os
import sys
import torch
import torch.distributed as dist

def main():
    dist.init_process_group("gloo")
    value = torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(value)
    # One write: torchrun's Python is unbuffered, and print's newline is a write of its own.
    sys.stdout.write(f"{os.uname().nodename} {os.environ['LOCAL_RANK']} sum {value.item()}\\n")
    dist.barrier()

main()
torch.distributed.destroy_process_group()
"""


def test_one_torchrun_a_host_sums_over_all_ranks(cluster, tmp_path):
    (tmp_path / "sum.py").write_text(SUM)
    launch = ["timeout", "-s", "KILL", "100", sys.executable, "-m", "torch.distributed.run"]
    launch += "--nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=h1:29500".split()
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    agents = [
        cluster.popen(host, [*launch, tmp_path / "sum.py"], **streams) for host in ("h1", "h2")
    ]
    outputs = [agent.communicate(timeout=110) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    for (stdout, _), host in zip(outputs, ("h1", "h2"), strict=True):
        assert sorted(stdout.splitlines()) == [f"{host} {local} sum 15.0" for local in (0, 1)]


def test_a_blocked_port_is_blocked(cluster, server):
    assert connects(cluster, "h2")
    for reject in (False, True):
        cluster.block_port("h1", 5000, reject)
        begin = time.monotonic()
        assert not connects(cluster, "h2")
        # Refused is said at once; what is dropped is waited for.
        assert (time.monotonic() - begin < 3) == reject
        assert connects(cluster, "h1"), "the host itself is not kept out"
        assert cluster.run("h2", ["ssh", "h1", "hostname"]).stdout == "h1\n"
        cluster.unblock("h1")
        assert connects(cluster, "h2")


def test_a_pulled_cable_cuts_the_host_off(cluster, server):
    cluster.link("h1", up=False)
    assert not connects(cluster, "h2")
    assert connects(cluster, "h1")
    cluster.link("h1", up=True)
    until(lambda: connects(cluster, "h2"), 20, "h1 is reached again")


def test_a_slow_link_is_slow(cluster, tmp_path):
    def seconds(sender, receiver):
        begin = time.monotonic()
        cluster.run(sender, f"head --bytes=1000000 /dev/zero | ssh {receiver} 'cat >/dev/null'")
        return time.monotonic() - begin

    cluster.slow_link("h1", "2mbit")
    assert seconds("h1", "h2") > 3
    assert seconds("h2", "h1") > 3
    cluster.slow_link("h1")
    assert seconds("h1", "h2") < 3


@pytest.mark.parametrize("silently", [True, False])
def test_peers_are_told_of_a_death_unless_it_is_silent(cluster, server, silently):
    streams = {"stdout": subprocess.PIPE, "text": True}
    client = cluster.popen("h2", [sys.executable, "-c", HOLD, "h1"], **streams)
    assert client.stdout.readline() == "b'hello'\n"
    cluster.kill_host("h1", silently)
    if silently:
        with pytest.raises(subprocess.TimeoutExpired):
            client.wait(timeout=2)
        client.kill()
    assert client.communicate(timeout=10)[0] == ("" if silently else "b''\n")


def test_reset_reboots_a_host_that_lost_a_daemon(cluster):
    cluster.run("h2", "pkill slurmd")
    cluster.reset()
    assert "slurmd" in command_lines(cluster, "h2")


def test_reset_undoes_all(cluster):
    cluster.sbatch("--nodes=2", "--output=/dev/null", "--wrap=sleep 99")
    cluster.run("h1", "setsid --fork sleep 79 >/dev/null 2>&1")
    until(lambda: "sleep 79" in command_lines(cluster, "h1"), 10, "a stray process is there")
    cluster.block_port("h1", 22)
    cluster.slow_link("h1", "1kbit")
    cluster.link("h1", up=False)
    cluster.kill_host("h2")
    cluster.reset()
    assert (
        sorted(cluster.run("head", ["srun", "--nodes=2", "hostname"]).stdout.split()) == HOSTS[1:]
    )
    assert cluster.run("head", ["ssh", "h1", "hostname"]).stdout == "h1\n"
    assert "sleep 79" not in command_lines(cluster, "h1")


# What remains afterwards: nothing.

OWNER = """
import sys, time
from cluster.cluster import Cluster
with Cluster(folder=sys.argv[1]) as cluster:
    for host in cluster.hosts:
        cluster.run(host, "setsid --fork sleep 80 >/dev/null 2>&1")
        cluster.popen(host, ["sleep", "81"])
    print("up", flush=True)
    {then}
"""


def traces(cluster):
    """Return all namespaces of a living cluster, opened, so that nothing else gets their names."""
    pids = [pid for host in cluster.hosts for pid in cluster.pids(host)]
    pids.append(int((cluster.folder / "guardian").read_text()))
    found = {}
    for pid in pids:
        for name, path in namespaces(pid).items():
            if name not in namespaces("self") and name not in found:
                found[name] = open(path)
    assert len(pids) > 12 and len(found) == 1 + 1 + 5 * len(cluster.hosts)
    return found


def namespaces(pid):
    """Return a process's namespaces: a dictionary from name to path, empty if it has ended."""
    kinds = ("net", "uts", "ipc", "mnt", "pid", "pid_for_children")
    paths = [f"/proc/{pid}/ns/{kind}" for kind in kinds]
    try:
        return {os.readlink(path): path for path in paths}
    except OSError:
        return {}


def mounts():
    """Return the machine's mounts and network devices, which a cluster leaves as they are."""
    return Path("/proc/self/mounts").read_text(), sorted(os.listdir("/sys/class/net"))


def gone(folder, found):
    """Return whether no process, namespace, mount or file of a cluster is left."""
    used = {name for pid in filter(str.isdigit, os.listdir("/proc")) for name in namespaces(pid)}
    if used & found.keys() or folder.exists() or related(folder):
        return False
    for file in found.values():
        file.close()
    return True


def related(folder):
    """Return the processes that were started for a cluster's folder, or that have it mounted."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        for kind in ("cmdline", "mountinfo"):
            with contextlib.suppress(OSError):
                if str(folder).encode() in Path(f"/proc/{entry}/{kind}").read_bytes():
                    found.append(entry)
    return found


def popen_owner(folder, then):
    """Start a process that makes a cluster."""
    environment = os.environ | {"PYTHONPATH": str(PROGRAM.parent.parent)}
    command = [sys.executable, "-c", OWNER.format(then=then), folder]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    return subprocess.Popen(command, env=environment, **streams)


def start_owner(folder, then):
    """Start a process that owns a cluster; return it, and that cluster."""
    owner = popen_owner(folder, then)
    assert owner.stdout.readline() == "up\n"
    return owner, Cluster.attach(folder)


@pytest.fixture
def needs_cluster():
    """Skip where no cluster can be made."""
    if reason := obstacle():
        pytest.skip(reason)


@pytest.mark.parametrize(
    ("then", "fault"),
    [
        ("pass", None),
        ("1 / 0", None),
        ("import os; os._exit(1)", None),
        ("time.sleep(99)", signal.SIGINT),
        ("time.sleep(99)", signal.SIGTERM),
        ("time.sleep(99)", signal.SIGKILL),
    ],
    ids=["end", "exception", "exit", "interrupt", "terminate", "kill"],
)
def test_nothing_is_left(needs_cluster, tmp_path, then, fault):
    before = mounts()
    folder = tmp_path / "state"
    if fault is None:
        then = f"open({str(tmp_path / 'go')!r}).read(); {then}"
        os.mkfifo(tmp_path / "go")
    owner, cluster = start_owner(folder, then)
    found = traces(cluster)
    if fault is None:
        (tmp_path / "go").write_text("")
    else:
        owner.send_signal(fault)
    owner.wait(timeout=30)
    until(lambda: gone(folder, found), 10, "all is gone")
    assert mounts() == before


def test_nothing_is_left_when_the_guardian_is_killed(needs_cluster, tmp_path):
    folder = tmp_path / "state"
    with Cluster(folder=folder) as cluster:
        found = traces(cluster)
        os.kill(int((folder / "guardian").read_text()), signal.SIGKILL)
        until(lambda: not cluster.pids("h1"), 10, "the hosts have ended")
    assert gone(folder, found)


@pytest.mark.parametrize("moment", [0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5])
def test_nothing_is_left_of_half_a_cluster(needs_cluster, tmp_path, moment):
    before = mounts()
    folder = tmp_path / "state"
    owner = popen_owner(folder, "pass")
    time.sleep(moment)
    owner.kill()
    owner.wait(timeout=10)
    until(lambda: not folder.exists() and not related(folder), 10, "all is gone")
    assert mounts() == before


def test_nothing_is_left_when_coming_up_fails(needs_cluster, tmp_path):
    for stage in ("_write_files", "_wait_for_nodes"):
        cluster = Cluster(folder=tmp_path / "state")
        setattr(cluster, stage, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cluster.up()
        assert not cluster.folder.exists()
        assert cluster._guardian.returncode is not None


def test_a_folder_that_exists_is_left_alone(needs_cluster, tmp_path):
    (tmp_path / "lock").write_text("mine")
    cluster = Cluster(folder=tmp_path)
    with pytest.raises(ClusterError, match="exists"):
        cluster.up()
    cluster.down()
    assert program(tmp_path, "up").returncode == program(tmp_path, "down").returncode == 2
    assert (tmp_path / "lock").read_text() == "mine"


def test_two_clusters_at_once(cluster, tmp_path):
    with Cluster(folder=tmp_path / "state") as other:
        cluster.run("h1", "touch /run/mark")
        assert other.run("h1", ["ls", "/run/mark"], check=False).returncode == 2
        for each in (cluster, other):
            done = each.run("head", ["srun", "--nodes=2", "hostname"])
            assert sorted(done.stdout.split()) == ["h1", "h2"]
        assert not set(cluster.pids("h1")) & set(other.pids("h1"))
        other.kill_host("h1")
    assert cluster.run("head", ["ssh", "h1", "ls", "/run/mark"]).stdout == "/run/mark\n"


def program(folder, *arguments, **options):
    """Run the command line, with a time limit."""
    command = [sys.executable, PROGRAM, "--folder", folder, *arguments]
    streams = {"capture_output": True, "text": True, "timeout": 60}
    return subprocess.run(command, check=False, **streams | options)


@pytest.fixture
def folder(needs_cluster, tmp_path):
    """A folder for a cluster, which ends with the test though nobody owns it."""
    yield tmp_path / "state"
    program(tmp_path / "state", "down")


def test_the_command_line(folder):
    assert program(folder, "status").returncode == 2
    assert program(folder, "up").returncode == 0
    found = traces(Cluster.attach(folder))
    again = program(folder, "up")
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert program(folder, "exec", "h2", "hostname").stdout == "h2\n"
    assert program(folder, "exec", "h2", "sh", "-c", "exit 7").returncode == 7
    assert program(folder, "kill", "h2").returncode == 0
    assert re.search("^h2 .* dead$", program(folder, "status").stdout, re.MULTILINE)
    assert program(folder, "revive", "h2").returncode == 0
    assert re.search("^h2 .* processes$", program(folder, "status").stdout, re.MULTILINE)
    assert program(folder, "down").returncode == 0
    until(lambda: gone(folder, found), 10, "all is gone")


def test_the_shell(folder):
    done = program(folder, "shell", input="hostname; srun --nodes=2 hostname | sort; exit 3")
    assert done.stdout.splitlines()[-3:] == HOSTS, done.stderr
    assert done.returncode == 3
    assert not folder.exists()


def sleeping(folder):
    """Return whether there is a cluster in a folder, and on its head `sleep 76` runs."""
    with contextlib.suppress(ClusterError, OSError):
        return "sleep 76" in command_lines(Cluster.attach(folder), "head")


def test_ctrl_c_ends_what_runs_in_the_shell_and_no_more(folder):
    command = f"{sys.executable} {PROGRAM} --folder {folder} shell"
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    terminal = subprocess.Popen(["script", "-qec", command, "/dev/null"], **streams)
    try:
        terminal.stdin.write("sleep 76\n")
        terminal.stdin.flush()
        until(lambda: sleeping(folder), 30, "sleep runs in the shell")
        stdout, _ = terminal.communicate("\x03echo 'status' $?; exit 4\n", timeout=30)
    finally:
        terminal.kill()
    assert "status 130" in stdout
    assert terminal.returncode == 4
    assert not folder.exists()


def test_what_is_missing_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert obstacle() == "a cluster on one machine needs Linux, and root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("cluster.cluster.COMMANDS", ["sh", "no-such-tool"])
    assert re.fullmatch("no no-such-tool; install them with .*packages.sh", obstacle())
