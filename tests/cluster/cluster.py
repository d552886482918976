#!/usr/bin/env python3
"""Start a small cluster on one machine: hosts with their own network, ssh and Slurm. Needs root.

    with Cluster(hosts=2) as cluster:
        print(cluster.run("head", ["srun", "--nodes=2", "hostname"]).stdout)

A host is a set of namespaces: network, host name, mounts and processes. Only its first process
keeps these namespaces alive. The switch between the hosts is a process, too, and the process
namespaces of all hosts are inside the process namespace of the switch. When the process that owns
the cluster ends, for any reason, the kernel ends the switch, and with it all processes, mounts and
network devices of the hosts.

All hosts see the files of the machine, so they share every folder except /run, /dev/shm, /var/log,
/var/spool and some files in /etc. They see only the cluster's network.
"""

import argparse
import contextlib
import ctypes
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGES = HERE / "packages.sh"
COMMANDS = (
    "slurmd slurmctld sbatch munged ssh ssh-keygen sshd pdsh mpirun ip tc nft ps nsenter unshare "
    "setpriv tmux mpiexec.hydra"
).split()
NETWORK = "10.77.0"
# Daemons get a clean environment, as at boot. Commands on a host inherit the caller's environment.
BOOT_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
LIBC = ctypes.CDLL(None, use_errno=True)


class ClusterError(RuntimeError):
    """An action on the cluster failed; the message gives the user the reason."""


def missing_requirement():
    """Return the reason why no cluster can start here, in one line, or None if one can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "a cluster on one machine needs Linux, and root"
    path = f"{os.environ.get('PATH', '')}:{BOOT_ENVIRONMENT['PATH']}"
    missing = [name for name in COMMANDS if not shutil.which(name, path=path)]
    if missing:
        return f"{', '.join(missing)}: not installed; run bash {os.path.relpath(PACKAGES)}"
    attempt = ["unshare", "--net", "--mount", "--pid", "--fork", "true"]
    result = subprocess.run(attempt, check=False, capture_output=True, text=True)
    if result.returncode:
        return f"this machine does not allow new namespaces: {result.stderr.strip()}"
    return None


def wait_until(condition, seconds, description):
    """Return the first true value of `condition()`; raise ClusterError after `seconds`."""
    deadline, pause = time.monotonic() + seconds, 0.02
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise ClusterError(f"timed out after {seconds} s, waiting for: {description}")
        time.sleep(pause)
        # Requests in a tight loop would slow down Slurm.
        pause = min(2 * pause, 0.5)
    return value


def expect_line(process, word, seconds):
    """Read one line of a process that is starting; raise ClusterError unless it is `word`."""
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    if not ready:
        process.kill()
        raise ClusterError(f"expected {word!r}, but nothing came within {seconds} s")
    line = process.stdout.readline()
    if line.strip() != word:
        process.kill()
        raise ClusterError(f"expected {word!r}, but got: {line}{process.stdout.read()}")


@contextlib.contextmanager
def starting_in(namespace):
    """Put the processes that this thread starts into a different PID namespace."""
    # `nsenter --pid` would stay between this process and the command, and a signal to nsenter would
    # not reach the command.
    with open("/proc/thread-self/ns/pid") as own, open(namespace) as target:
        enter(target)
        try:
            yield
        finally:
            enter(own)


def enter(namespace):
    """Call setns(), which Python itself has only from version 3.12."""
    if LIBC.setns(namespace.fileno(), 0):
        error = ctypes.get_errno()
        raise OSError(error, f"setns {namespace.name}: {os.strerror(error)}")


@contextlib.contextmanager
def open_namespaces(folders):
    """Open the namespaces of hosts, and yield the namespaces' inode numbers; skip dead hosts.

    While the namespaces are open, the kernel cannot give their numbers to new namespaces.
    """
    # Each host needs two numbers, because some of its processes are in only one of the namespaces.
    # A new process is in the host's process namespace first, and in its network namespace later. A
    # container on the host has a process namespace of its own.
    inodes = set()
    with contextlib.ExitStack() as stack:
        for folder in folders:
            with contextlib.suppress(OSError):
                pid = (folder / "pid").read_text()
                for kind in ("net", "pid_for_children"):
                    namespace = stack.enter_context(open(f"/proc/{pid}/ns/{kind}"))
                    inodes.add(os.fstat(namespace.fileno()).st_ino)
        yield inodes


def processes_in(inodes):
    """Return the ids of all live processes in any of these namespaces."""
    pids = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        # Zombies have no namespaces, and a process may end during the search.
        with contextlib.suppress(OSError):
            own_inodes = {os.stat(f"/proc/{entry}/ns/{kind}").st_ino for kind in ("net", "pid")}
            if inodes & own_inodes:
                pids.append(int(entry))
    return pids


class Cluster:
    """The hosts head, h1, h2, ... on one network; all hosts but head are nodes of Slurm."""

    def __init__(self, hosts=2, folder=None):
        """Describe a cluster of `hosts` nodes, each with two fake GPUs; up() or `with` starts it.

        `folder` must not exist yet; the cluster creates it for all its files, by default in /tmp.
        """
        self.hosts = ["head", *(f"h{number}" for number in range(1, hosts + 1))]
        unique = f"cluster-{os.getpid()}-{secrets.token_hex(4)}"
        self.folder = Path(folder or Path(tempfile.gettempdir()) / unique).absolute()
        self._children = []

    @classmethod
    def attach(cls, folder):
        """Return the cluster that a different process runs in `folder`."""
        folder = Path(folder).absolute()
        up = folder / "up"
        with open_namespaces([folder]) as inodes:
            if not up.exists() or up.read_text() != str(sorted(inodes)):
                raise ClusterError(f"{folder}: no cluster runs in this folder")
        return cls(len(list(folder.glob("h[0-9]*"))), folder)

    def __enter__(self):
        self.up()
        return self

    def __exit__(self, *_):
        self.down()

    def up(self):
        """Start all hosts; the cluster ends with this process."""
        if reason := missing_requirement():
            raise ClusterError(reason)
        if self.folder.exists():
            raise ClusterError(f"{self.folder} exists; choose a new folder")
        self.folder.mkdir(mode=0o700)
        try:
            self._start_switch()
            self._write_files()
            starting = [self._start(host) for host in self.hosts]
            for process in starting:
                self._finish(process)
            self._wait_for_nodes(self.hosts[1:])
            with open_namespaces([self.folder]) as inodes:
                (self.folder / "up").write_text(str(sorted(inodes)))
        except BaseException:
            self.down()
            raise

    def down(self):
        """End all processes of all hosts, and remove all files."""
        folders = [self.folder, *(self.folder / host for host in self.hosts)]
        with open_namespaces(folders) as inodes:
            for process in self._children:
                process.kill()
            self._wait_until_empty(inodes, 20, "all processes of the cluster have ended")
        shutil.rmtree(self.folder)

    # ---- commands on a host

    def popen(self, host, command, env=None, cwd=None, **options):
        """Start a command, or a line of bash, on a host; return its subprocess.Popen.

        Popen.pid is the pid outside the host. A program that prints its own pid prints the pid
        inside the host. Only commands on the host, such as `run(host, ["kill", ...])`, can use it.
        """
        command = ["bash", "-c", command] if isinstance(command, str) else list(map(str, command))
        namespaces = f"/proc/{self._pid(host)}/ns"
        files = {"net": "net", "uts": "uts", "ipc": "ipc", "mount": "mnt"}
        enter_all = ["nsenter", *(f"--{kind}={namespaces}/{file}" for kind, file in files.items())]
        change_folder = ["env", f"--chdir={cwd or os.getcwd()}", "--"]
        with starting_in(f"{namespaces}/pid_for_children"):
            process = subprocess.Popen(
                [*enter_all, *change_folder, *command], env=os.environ | (env or {}), **options
            )
        self._children.append(process)
        return process

    def run(self, host, command, timeout=60, check=True, **options):
        """Run a command on a host; return its CompletedProcess, with `stdout` and `stderr` as text.

        Raise ClusterError, with all output, if the command runs for over `timeout` seconds, or if
        it fails and `check` is true.
        """
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
        process = self.popen(host, command, **streams | {"stderr": subprocess.PIPE} | options)
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            process.kill()
            process.wait(timeout=10)
            output = b"".join(part for part in (error.stdout, error.stderr) if part).decode()
            raise ClusterError(f"{host}: {command} ran over {timeout} s:\n{output}") from None
        if check and process.returncode:
            raise ClusterError(
                f"{host}: {command} ended with {process.returncode}:\n{stdout}{stderr}"
            )
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    def pids(self, host):
        """Return the pids, outside the host, of all processes of a host; a dead host has none."""
        with open_namespaces([self.folder / host]) as inodes:
            return processes_in(inodes)

    # ---- faults

    def kill_host(self, host, silently=True):
        """Kill all processes of a host.

        With `silently`, cut the host's network first, so that its peers notice nothing, as in a
        power cut.
        """
        with open_namespaces([self.folder / host]) as inodes:
            if not inodes:
                raise ClusterError(f"{host} is not up")
            if silently:
                self._on_switch(["ip", "link", "delete", host])
            os.kill(self._pid(host), signal.SIGKILL)
            self._wait_until_empty(inodes, 10, f"all processes of {host} have ended")
        (self.folder / host / "pid").unlink()

    def revive(self, host):
        """Boot a host that was killed; return when its Slurm daemon answers again."""
        self._on_switch(["ip", "link", "delete", host], check=False)
        self._finish(self._start(host))
        self._wait_for_nodes(self.hosts[1:] if host == "head" else [host])

    def unplug(self, host):
        """Disconnect a host from the network."""
        self._on_switch(["ip", "link", "set", host, "down"])

    def block_port(self, host, port):
        """Drop all packets from other hosts to a TCP port of a host."""
        rules = (
            "add table inet faults",
            "add chain inet faults input { type filter hook input priority 0; }",
            f"add rule inet faults input iifname eth0 tcp dport {port} drop",
        )
        self.run(host, ["nft", "; ".join(rules)])

    def slow_link(self, host, rate):
        """Limit a host's network traffic, in both directions, to a rate such as `10mbit`."""
        shape = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
        self.run(host, ["tc", "qdisc", "replace", "dev", "eth0", *shape])
        self._on_switch(["tc", "qdisc", "replace", "dev", host, *shape])

    # ---- Slurm

    def sbatch(self, *arguments, **options):
        """Submit a job on head; return its id."""
        return self.run("head", ["sbatch", "--parsable", *arguments], **options).stdout.strip()

    def job(self, job):
        """Return Slurm's record of a job, such as {"JobState": "RUNNING"}."""
        text = self.run("head", ["scontrol", "--oneliner", "show", "job", job]).stdout
        return dict(pair.split("=", 1) for pair in text.split() if "=" in pair)

    def wait_for_job(self, job, *states, seconds=60):
        """Wait until a job has one of the states, such as COMPLETED; return its record."""

        def record_in_states():
            record = self.job(job)
            return record if record["JobState"] in states else None

        return wait_until(record_in_states, seconds, f"job {job} is {' or '.join(states)}")

    # ---- starting the hosts

    def _start_switch(self):
        """Start the switch, which ends with this process and takes the hosts with it."""
        # If this process ends before setpriv runs, the kernel sends no signal. Then the parent's id
        # differs, and the switch does not start.
        owned = f'[ $PPID = {os.getpid()} ] && exec "$@"'
        boot = "ip link add switch type bridge; ip link set switch up; echo up; "
        boot += "exec env --ignore-signal=CHLD sleep infinity </dev/null >/dev/null 2>&1"
        command = ["setpriv", "--pdeathsig=KILL", "sh", "-c", owned, "sh"]
        command += "unshare --net --pid --fork --kill-child sh -ec".split()
        process = self._boot([*command, boot])
        (self.folder / "pid").write_text(str(process.pid))
        self._finish(process)

    def _boot(self, command):
        """Start the first process of a host or of the switch, with pipes for lines of text."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd="/",
            env=BOOT_ENVIRONMENT,
            start_new_session=True,
        )
        self._children.append(process)
        return process

    def _write_files(self):
        """Write the configuration files that the hosts mount into /etc."""
        etc = self.folder / "etc"
        for folder in ("ssh", "slurm", "munge"):
            (etc / folder).mkdir(parents=True)
        (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        # sshd refuses a root user whose password is locked, so this file has an unlocked entry.
        (etc / "shadow").write_text("root:*:19000:0:99999:7:::\n")
        (etc / "munge" / "munge.key").write_bytes(secrets.token_bytes(128))
        (etc / "munge" / "munge.key").chmod(0o400)
        self._write_names(etc)
        self._write_ssh(etc / "ssh")
        self._write_slurm(etc / "slurm")

    def _write_names(self, etc):
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for host in self.hosts:
            # torch looks up the IPv6 form of its peers' addresses, and waits long without an entry.
            lines += [f"{self.address(host)} {host}", f"::ffff:{self.address(host)} {host}"]
        (etc / "hosts").write_text("\n".join(lines) + "\n")

    def _write_ssh(self, folder):
        make_key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "cluster"]
        subprocess.run([*make_key, "-f", folder / "id_ed25519"], check=True)
        public = (folder / "id_ed25519.pub").read_text()
        (folder / "authorized_keys").write_text(public)
        names = ",".join([*self.hosts, *map(self.address, self.hosts), "localhost"])
        (folder / "ssh_known_hosts").write_text(f"{names} {public}")
        for name in ("ssh_config", "sshd_config"):
            shutil.copy(HERE / "etc" / name, folder)

    def _write_slurm(self, folder):
        lines = [f"NodeName={host} CPUs=4 RealMemory=4000 Gres=gpu:2" for host in self.hosts[1:]]
        lines.append("PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE GraceTime=60")
        lines.append("PartitionName=main Default=YES PriorityTier=1")
        lines.append("PartitionName=urgent PriorityTier=2")
        text = (HERE / "etc" / "slurm.conf").read_text() + "\n".join(lines) + "\n"
        (folder / "slurm.conf").write_text(text)
        (folder / "gres.conf").write_text("Name=gpu File=/run/gpu[0-1]\n")

    def _start(self, host):
        """Boot a host without waiting for its daemons; return its first process."""
        for kind in ("log", "spool"):
            (self.folder / host / kind).mkdir(parents=True, exist_ok=True)
        options = "--net --uts --ipc --mount --pid --fork --kill-child --mount-proc".split()
        boot = ["sh", HERE / "host.sh", host, self.address(host), self.folder]
        with starting_in(f"/proc/{self._pid()}/ns/pid_for_children"):
            process = self._boot(["unshare", *options, *boot])
        expect_line(process, "named", 20)
        (self.folder / host / "pid").write_text(str(process.pid))
        cable = ["ip", "link", "add", host, "type", "veth"]
        self._on_switch([*cable, "peer", "name", "eth0", "netns", str(process.pid)])
        self._on_switch(["ip", "link", "set", host, "master", "switch", "up"])
        process.stdin.write("wired\n")
        process.stdin.close()
        return process

    def _finish(self, process):
        """Wait until a starting host, or the switch, is up."""
        expect_line(process, "up", 30)
        process.stdout.close()

    def _wait_for_nodes(self, nodes):
        """Wait until Slurm can run jobs on these nodes."""

        def usable():
            query = ["sinfo", "--noheader", "--Node", "--format=%N %T"]
            # sinfo fails while the controller is down.
            lines = self.run("head", query, check=False).stdout.splitlines()
            states = dict(map(str.split, lines))
            return all(states.get(node) in {"idle", "mixed", "allocated"} for node in nodes)

        wait_until(usable, 60, f"Slurm can use {', '.join(nodes)}")

    def _wait_until_empty(self, inodes, seconds, description):
        """Wait until no process is in these namespaces."""

        def is_empty():
            # A namespace ends only when its last process has been reaped, which poll() does.
            self._children = [child for child in self._children if child.poll() is None]
            return not processes_in(inodes)

        wait_until(is_empty, seconds, description)

    def address(self, host):
        """Return a host's address on the cluster's network."""
        return f"{NETWORK}.{1 if host == 'head' else 10 + int(host[1:])}"

    def _pid(self, host=""):
        """Return the id of the first process of a host, or of the switch."""
        if host and host not in self.hosts:
            raise ClusterError(f"{host}: no such host; the hosts are {' '.join(self.hosts)}")
        try:
            return int((self.folder / host / "pid").read_text())
        except FileNotFoundError:
            raise ClusterError(f"{host} is not up") from None

    def _on_switch(self, command, check=True):
        """Run a command in the network of the switch."""
        network = f"--net=/proc/{self._pid()}/ns/net"
        result = subprocess.run(
            ["nsenter", network, *command], check=False, capture_output=True, text=True
        )
        if check and result.returncode:
            raise ClusterError(f"{' '.join(command)}: {result.stderr.strip()}")


BANNER = """
This machine now runs a cluster: head, where you are, and the nodes {nodes}, with fake GPUs.
All of them see the same files. Try:
  sinfo                       list the nodes and their states
  srun --nodes=2 hostname     run a command on two nodes, and wait for it
  sbatch --nodes=2 --gpus-per-node=2 --wrap="srun env | grep CUDA_; sleep 60"
                              submit a job; its output goes to slurm-JOB.out
  squeue                      list the waiting and the running jobs
  scancel JOB                 end a job
  scontrol requeue JOB        start a job again from its beginning
  ssh h1                      log in to a node
In a second terminal, kill a node, and boot it again:
  {program} kill h2
  {program} revive h2
`exit` ends the cluster and everything that runs on it.
"""


def shell(cluster):
    """Run bash on head; return its exit status."""
    program = f"python3 {os.path.relpath(__file__)} --folder {cluster.folder}"
    print(BANNER.format(nodes=" ".join(cluster.hosts[1:]), program=program), flush=True)
    # Leave Ctrl-C to the programs in the shell.
    signal.signal(signal.SIGINT, lambda *_: None)
    status = cluster.popen("head", ["bash"]).wait()
    with contextlib.suppress(OSError):
        # The terminal still belongs to the shell's process group, which has ended.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        os.tcsetpgrp(0, os.getpgrp())
    return status


def main(arguments):
    """Run the action of the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="folder with the cluster's files")
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("shell", help="start a cluster, and run a shell on its head")
    for name, text in {"kill": "kill a host", "revive": "boot a killed host"}.items():
        actions.add_parser(name, help=text).add_argument("host")
    args = parser.parse_args(arguments)
    if args.action == "shell":
        # End the cluster in the usual way when its terminal is closed.
        signal.signal(signal.SIGHUP, lambda *_: sys.exit())
        with Cluster(folder=args.folder) as cluster:
            return shell(cluster)
    if not args.folder:
        parser.error("--folder: missing; copy it from the commands that the shell has printed")
    cluster = Cluster.attach(args.folder)
    change = cluster.kill_host if args.action == "kill" else cluster.revive
    change(args.host)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ClusterError as error:
        print(f"cluster.py: error: {error}", file=sys.stderr)
        sys.exit(2)
