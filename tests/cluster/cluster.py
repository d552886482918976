#!/usr/bin/env python3
"""A small cluster on one machine: hosts with a network, ssh and Slurm of their own. Needs root.

    with Cluster(hosts=2) as cluster:
        print(cluster.run("head", ["srun", "--nodes=2", "hostname"]).stdout)

A host is a set of namespaces (network, names, mounts, processes) that no name or file keeps alive:
it lasts as long as its first process does. The switch between them is a process too, inside whose
process namespace all hosts are. When the cluster's owner is gone, however it went, the kernel ends
the switch, and with it the rest: all processes, mounts and network devices.

All hosts see the machine's files, so that every folder is a shared one, except for
/run, /dev/shm, /var/log, /var/spool and some files in /etc. They see no network but their own.
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
# Daemons get a clean environment, as at boot; what is run on a host inherits the caller's.
BOOT_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
LIBC = ctypes.CDLL(None, use_errno=True)


class ClusterError(RuntimeError):
    """What was asked of the cluster did not work; the message says why, in words for the user."""


def obstacle():
    """Return in one line why no cluster can be made here, or None if it can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "a cluster on one machine needs Linux, and root"
    path = f"{os.environ.get('PATH', '')}:{BOOT_ENVIRONMENT['PATH']}"
    absent = [name for name in COMMANDS if not shutil.which(name, path=path)]
    if absent:
        return f"no {', no '.join(absent)}; install them with {os.path.relpath(PACKAGES)}"
    attempt = ["unshare", "--net", "--mount", "--pid", "--fork", "true"]
    allowed = subprocess.run(attempt, check=False, capture_output=True, text=True)
    if allowed.returncode:
        return f"no namespaces can be made here: {allowed.stderr.strip()}"
    return None


def until(condition, seconds, what):
    """Return the first true value of `condition()`; raise ClusterError after so many seconds."""
    deadline, pause = time.monotonic() + seconds, 0.02
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise ClusterError(f"after {seconds} s still not: {what}")
        time.sleep(pause)
        pause = min(2 * pause, 0.5)  # to ask Slurm in a tight loop would slow down what is awaited
    return value


def expect(process, word, seconds):
    """Read one line of a process that is starting; raise ClusterError if it is another."""
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    line = process.stdout.readline() if ready else f"nothing within {seconds} s"
    if line.strip() != word:
        process.kill()
        raise ClusterError(f"no {word!r} but: {line}{process.stdout.read() if ready else ''}")


@contextlib.contextmanager
def born_in(space):
    """Let the processes that this thread starts begin their lives in another PID namespace."""
    # Unlike `nsenter --pid`, this puts nothing between: signals to the child reach the child.
    with open("/proc/thread-self/ns/pid") as here, open(space) as there:
        enter(there)
        try:
            yield
        finally:
            enter(here)


def enter(space):
    """Call setns, which Python has from 3.12 on."""
    if LIBC.setns(space.fileno(), 0):
        error = ctypes.get_errno()
        raise OSError(error, f"setns {space.name}: {os.strerror(error)}")


@contextlib.contextmanager
def kept(folders):
    """Yield the numbers of what makes these hosts, and keep them; a dead host has none."""
    # What is born into its process namespace may not have reached its network yet, and what runs in
    # a container on it may have a process namespace of its own.
    spaces = set()
    with contextlib.ExitStack() as stack:
        for folder in folders:
            with contextlib.suppress(OSError):
                pid = (folder / "pid").read_text()
                for kind in ("net", "pid_for_children"):
                    space = stack.enter_context(open(f"/proc/{pid}/ns/{kind}"))
                    spaces.add(os.fstat(space.fileno()).st_ino)
        yield spaces


def processes_in(spaces):
    """Return the ids of all living processes that are in one of these namespaces."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        # A process that ends meanwhile, and a zombie, have no namespaces.
        with contextlib.suppress(OSError):
            if spaces & {os.stat(f"/proc/{entry}/ns/{kind}").st_ino for kind in ("net", "pid")}:
                found.append(int(entry))
    return found


class Cluster:
    """The hosts head, h1, h2, ... on one network; all but head are nodes of Slurm."""

    def __init__(self, hosts=2, folder=None):
        """Prepare; `up` or `with` starts it, with so many nodes, and two fake GPUs on each.

        All its files go to `folder`, which must not exist: by default a fresh one.
        """
        self.hosts = ["head", *(f"h{number}" for number in range(1, hosts + 1))]
        unique = f"cluster-{os.getpid()}-{secrets.token_hex(4)}"
        self.folder = Path(folder or Path(tempfile.gettempdir()) / unique).absolute()
        self._children = []

    @classmethod
    def attach(cls, folder):
        """Return the cluster that another process keeps in `folder`."""
        folder = Path(folder).absolute()
        up = folder / "up"
        with kept([folder]) as spaces:
            if not up.exists() or up.read_text() != str(sorted(spaces)):
                raise ClusterError(f"no cluster is up in {folder}")
        return cls(len(list(folder.glob("h[0-9]*"))), folder)

    def __enter__(self):
        self.up()
        return self

    def __exit__(self, *_):
        self.down()

    def up(self):
        """Start all hosts; the cluster ends with this process."""
        if reason := obstacle():
            raise ClusterError(reason)
        if self.folder.exists():
            raise ClusterError(f"{self.folder} exists; a cluster makes its folder itself")
        self.folder.mkdir(mode=0o700)
        try:
            self._start_switch()
            self._write_files()
            starting = [self._start(host) for host in self.hosts]
            for process in starting:
                self._finish(process)
            self._wait_for_nodes(self.hosts[1:])
            with kept([self.folder]) as spaces:
                (self.folder / "up").write_text(str(sorted(spaces)))
        except BaseException:
            self.down()
            raise

    def down(self):
        """End all processes of all hosts, and remove all files."""
        with kept([self.folder, *(self.folder / host for host in self.hosts)]) as spaces:
            for process in self._children:
                process.kill()
            until(lambda: self._reap() and not processes_in(spaces), 20, "all has ended")
        shutil.rmtree(self.folder)

    # What happens on a host

    def popen(self, host, command, env=None, cwd=None, **options):
        """Start a command (or a line of bash) on a host as `subprocess.Popen` does; return that.

        Its pid is the process's own, outside. On its host it has another: what a program prints as
        its pid must be killed there, by `run(host, ["kill", ...])`.
        """
        command = ["bash", "-c", command] if isinstance(command, str) else list(map(str, command))
        spaces = f"/proc/{self._pid(host)}/ns"
        kinds = {"net": "net", "uts": "uts", "ipc": "ipc", "mount": "mnt"}
        enter_all = ["nsenter", *(f"--{kind}={spaces}/{file}" for kind, file in kinds.items())]
        change = ["env", f"--chdir={cwd or os.getcwd()}", "--"]
        with born_in(f"{spaces}/pid_for_children"):
            process = subprocess.Popen(
                [*enter_all, *change, *command], env=os.environ | (env or {}), **options
            )
        self._children.append(process)
        return process

    def run(self, host, command, timeout=60, check=True, **options):
        """Run a command on a host; return its CompletedProcess, with `stdout` and `stderr` as text.

        Raise ClusterError, with all output, if it fails (with `check`) or takes longer.
        """
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
        process = self.popen(host, command, **streams | {"stderr": subprocess.PIPE} | options)
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            process.kill()
            process.wait(timeout=10)
            output = b"".join(part for part in (error.stdout, error.stderr) if part).decode()
            raise ClusterError(f"{host}: {command} ran past {timeout} s:\n{output}") from None
        if check and process.returncode:
            raise ClusterError(
                f"{host}: {command} ended with {process.returncode}:\n{stdout}{stderr}"
            )
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    def pids(self, host):
        """Return the ids, outside, of all processes on a host, daemons' too; none if it is dead."""
        with kept([self.folder / host]) as spaces:
            return processes_in(spaces)

    # Faults

    def kill_host(self, host, silently=True):
        """Kill all processes of a host at once. Silently: no peer is told, as with a power cut."""
        with kept([self.folder / host]) as spaces:
            if not spaces:
                raise ClusterError(f"{host} is not up")
            if silently:
                self._on_switch(["ip", "link", "delete", host])
            os.kill(self._pid(host), signal.SIGKILL)
            until(lambda: self._reap() and not processes_in(spaces), 10, f"{host} is dead")
        (self.folder / host / "pid").unlink()

    def revive(self, host):
        """Boot a host that was killed; return when Slurm, if it is there, has it back."""
        self._on_switch(["ip", "link", "delete", host], check=False)
        self._finish(self._start(host))
        self._wait_for_nodes(self.hosts[1:] if host == "head" else [host])

    def unplug(self, host):
        """Pull a host's network cable."""
        self._on_switch(["ip", "link", "set", host, "down"])

    def block_port(self, host, port):
        """Drop what comes to a TCP port from other hosts."""
        rules = (
            "add table inet faults",
            "add chain inet faults input { type filter hook input priority 0; }",
            f"add rule inet faults input iifname eth0 tcp dport {port} drop",
        )
        self.run(host, ["nft", "; ".join(rules)])

    def slow_link(self, host, rate):
        """Limit what a host sends and receives to a rate such as `10mbit`."""
        shape = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
        self.run(host, ["tc", "qdisc", "replace", "dev", "eth0", *shape])
        self._on_switch(["tc", "qdisc", "replace", "dev", host, *shape])

    # Slurm

    def sbatch(self, *arguments, **options):
        """Submit a job from head; return its id."""
        return self.run("head", ["sbatch", "--parsable", *arguments], **options).stdout.strip()

    def job(self, job):
        """Return all that Slurm knows of a job: a dictionary such as {"JobState": "RUNNING"}."""
        text = self.run("head", ["scontrol", "--oneliner", "show", "job", job]).stdout
        return dict(pair.split("=", 1) for pair in text.split() if "=" in pair)

    def wait_for_job(self, job, *states, seconds=60):
        """Wait until a job is in one of the states, such as COMPLETED; return all about it."""

        def arrived():
            known = self.job(job)
            return known if known["JobState"] in states else None

        return until(arrived, seconds, f"job {job} is {' or '.join(states)}")

    # How it is made

    def _start_switch(self):
        """Start what joins the hosts; it ends with this process, and they with it."""
        # Nothing begins if this process ended before the kernel was told so.
        owned = f'[ $PPID = {os.getpid()} ] && exec "$@"'
        boot = "ip link add switch type bridge; ip link set switch up; echo up; "
        boot += "exec env --ignore-signal=CHLD sleep infinity </dev/null >/dev/null 2>&1"
        command = ["setpriv", "--pdeathsig=KILL", "sh", "-c", owned, "sh"]
        command += "unshare --net --pid --fork --kill-child sh -ec".split()
        process = self._boot([*command, boot])
        (self.folder / "pid").write_text(str(process.pid))
        self._finish(process)

    def _boot(self, command):
        """Start the outermost process of a host, or the switch; what it reads and says is lines."""
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
        etc = self.folder / "etc"
        for folder in ("ssh", "slurm", "munge"):
            (etc / folder).mkdir(parents=True)
        (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        # Where root's password is locked, sshd would let nobody in: here it is not.
        (etc / "shadow").write_text("root:*:19000:0:99999:7:::\n")
        (etc / "munge" / "munge.key").write_bytes(secrets.token_bytes(128))
        (etc / "munge" / "munge.key").chmod(0o400)
        self._write_names(etc)
        self._write_ssh(etc / "ssh")
        self._write_slurm(etc / "slurm")

    def _write_names(self, etc):
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for host in self.hosts:
            # Torch looks its peers' addresses up in the longer form, and waits long without it.
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
        """Boot a host as far as can be without waiting; return its outermost process."""
        for kind in ("log", "spool"):
            (self.folder / host / kind).mkdir(parents=True, exist_ok=True)
        spaces = "--net --uts --ipc --mount --pid --fork --kill-child --mount-proc".split()
        boot = ["sh", HERE / "host.sh", host, self.address(host), self.folder]
        with born_in(f"/proc/{self._pid()}/ns/pid_for_children"):
            process = self._boot(["unshare", *spaces, *boot])
        expect(process, "named", 20)
        (self.folder / host / "pid").write_text(str(process.pid))
        cable = ["ip", "link", "add", host, "type", "veth"]
        self._on_switch([*cable, "peer", "name", "eth0", "netns", str(process.pid)])
        self._on_switch(["ip", "link", "set", host, "master", "switch", "up"])
        process.stdin.write("wired\n")
        process.stdin.close()
        return process

    def _finish(self, process):
        """Wait until a host that was started is up."""
        expect(process, "up", 30)
        process.stdout.close()

    def _wait_for_nodes(self, nodes):
        def good():
            query = ["sinfo", "--noheader", "--Node", "--format=%N %T"]
            # No controller, no states.
            known = dict(map(str.split, self.run("head", query, check=False).stdout.splitlines()))
            return all(known.get(node) in {"idle", "mixed", "allocated"} for node in nodes)

        until(good, 60, f"{', '.join(nodes)} answer to Slurm")

    def _reap(self):
        """Reap what has ended, for a namespace ends only when its last process is reaped."""
        self._children = [child for child in self._children if child.poll() is None]
        return True

    def address(self, host):
        """Return a host's address on the cluster's network."""
        return f"{NETWORK}.{1 if host == 'head' else 10 + int(host[1:])}"

    def _pid(self, host=""):
        """Return the id of a host's outermost process, or of the switch's."""
        if host and host not in self.hosts:
            raise ClusterError(f"there is no host {host}; the hosts are {' '.join(self.hosts)}")
        try:
            return int((self.folder / host / "pid").read_text())
        except FileNotFoundError:
            raise ClusterError(f"{host} is not up") from None

    def _on_switch(self, command, check=True):
        network = f"--net=/proc/{self._pid()}/ns/net"
        done = subprocess.run(
            ["nsenter", network, *command], check=False, capture_output=True, text=True
        )
        if check and done.returncode:
            raise ClusterError(f"{' '.join(command)}: {done.stderr.strip()}")


BANNER = """
A cluster on this machine: head, where you are now, and the nodes {nodes}, with fake GPUs.
All see the same files. Try:
  sinfo                       which nodes there are, and how they are
  srun --nodes=2 hostname     run a command on two nodes, and wait for it
  sbatch --nodes=2 --gpus-per-node=2 --wrap="srun env | grep CUDA_; sleep 60"
                              submit a job; what it prints goes to slurm-JOB.out
  squeue                      what waits and what runs
  scancel JOB                 end a job
  scontrol requeue JOB        start a job from its beginning again
  ssh h1                      log in to a node
From another terminal, let a node die, and bring it back:
  {program} kill h2
  {program} revive h2
`exit` ends the cluster with all that runs on it.
"""


def shell(cluster):
    """Open bash on head, and return its exit status; the cluster lasts as long."""
    program = f"python3 {os.path.relpath(__file__)} --folder {cluster.folder}"
    print(BANNER.format(nodes=" ".join(cluster.hosts[1:]), program=program), flush=True)
    # Ctrl-C is meant for what runs in the shell.
    signal.signal(signal.SIGINT, lambda *_: None)
    status = cluster.popen("head", ["bash"]).wait()
    with contextlib.suppress(OSError):
        # A shell leaves the terminal to its own process group, which is gone.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        os.tcsetpgrp(0, os.getpgrp())
    return status


def main(arguments):
    """Do what the command line says; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where the cluster's files are")
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("shell", help="start a cluster, open a shell on head, end it with that")
    for name, text in {"kill": "kill a host", "revive": "boot a killed host"}.items():
        actions.add_parser(name, help=text).add_argument("host")
    args = parser.parse_args(arguments)
    if args.action == "shell":
        signal.signal(signal.SIGHUP, lambda *_: sys.exit())  # its terminal is closed
        with Cluster(folder=args.folder) as cluster:
            return shell(cluster)
    if not args.folder:
        parser.error("--folder: which cluster? its shell has said it")
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
