#!/usr/bin/env python3
"""Start a small cluster on one machine, as root: its hosts have a network, ssh and Slurm.

    with Cluster() as cluster:
        print(cluster.run("head", ["srun", "--nodes=2", "hostname"]).stdout)

A host is a set of namespaces: network, host name, mounts and processes. Only its first process
keeps these namespaces alive. The switch between the hosts is a process with a network namespace.
When the process that owns the cluster ends, for any reason, the kernel ends the switch and the
first process of each host, and with them all processes, mounts and network devices of the hosts.

All hosts see the files of the machine, so they share every folder except /run, /dev/shm, /var/log,
/var/spool and some files in /etc. A host sees only the cluster's network.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
HOSTS = ("head", "h1", "h2")
COMMANDS = (
    "slurmd slurmctld sbatch munged ssh ssh-keygen sshd pdsh mpirun mpiexec.hydra "
    "ip tc nft pkill nsenter unshare setpriv tmux"
).split()
# Daemons get this clean environment, as at boot, while commands on a host inherit the caller's
# environment.
BOOT_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}


class ClusterError(RuntimeError):
    """Report the reason why an action on the cluster has failed."""


def missing_requirement():
    """Return the reason why no cluster can start on this machine, or None if one can start."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "a cluster on one machine needs Linux, and root"
    path = f"{os.environ.get('PATH', '')}:{BOOT_ENVIRONMENT['PATH']}"
    missing = [name for name in COMMANDS if not shutil.which(name, path=path)]
    if missing:
        packages = os.path.relpath(HERE / "packages.sh")
        return f"{', '.join(missing)}: not installed; run bash {packages}"
    attempt = ["unshare", "--net", "--mount", "--pid", "--fork", "true"]
    result = subprocess.run(attempt, check=False, capture_output=True, text=True)
    if result.returncode:
        return f"this machine does not allow new namespaces: {result.stderr.strip()}"
    return None


def wait_until(condition, seconds, description):
    """Call `condition()` until its value is true, and return this value.

    Raise ClusterError, with the text `description`, if the value is still false after `seconds`.
    """
    deadline, pause = time.monotonic() + seconds, 0.02
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise ClusterError(f"timed out after {seconds} s, waiting for: {description}")
        time.sleep(pause)
        # Double the pause after each check, up to half a second, because requests in a tight loop
        # would slow down Slurm.
        pause = min(2 * pause, 0.5)
    return value


def expect_line(process, word):
    """Read one line that a process prints.

    If the line is not `word`, kill the process, and raise ClusterError with the process's output.
    """
    line = process.stdout.readline()
    if line.strip() != word:
        process.kill()
        raise ClusterError(f"expected {word!r}, but got: {line}{process.stdout.read()}")


class Cluster:
    """Run the hosts head, h1 and h2 during a `with` block.

    h1 and h2 are Slurm nodes with two fake GPUs each.
    """

    def __enter__(self):
        """Start all hosts, wait until Slurm can run jobs on h1 and h2, and return the cluster.

        When this process ends, the kernel ends all processes of the hosts.
        """
        if reason := missing_requirement():
            raise ClusterError(reason)
        self.folder = Path(tempfile.mkdtemp(prefix="cluster-"))
        self._children = []
        # Map each host to the `unshare` process that made the host's namespaces.
        self._boots = {}
        try:
            self._write_files()
            self._start_switch()
            starting = [self._start(host) for host in HOSTS]
            for process in starting:
                expect_line(process, "up")
            self._wait_for_nodes("h1", "h2")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        """End all processes of all hosts, and remove the cluster's files."""
        for host in list(self._boots):
            self._end(host)
        for process in self._children:
            process.kill()
            process.wait(timeout=20)
        shutil.rmtree(self.folder)

    # ---- commands on a host

    def popen(self, host, command, env=None, cwd=None, **options):
        """Start a command, or a line of bash, on a host; return a subprocess.Popen.

        Popen.pid is the pid of the `nsenter` that waits for the command. To signal the command, use
        `run(host, ["pkill", ...])`.
        """
        command = ["bash", "-c", command] if isinstance(command, str) else list(map(str, command))
        pid = self._boots[host].pid
        enter_all = f"nsenter --target={pid} --net --uts --ipc --mount".split()
        enter_all += [f"--pid=/proc/{pid}/ns/pid_for_children"]
        enter_all += ["env", f"--chdir={cwd or os.getcwd()}", "--"]
        environment = os.environ | (env or {})
        process = subprocess.Popen([*enter_all, *command], env=environment, **options)
        self._children.append(process)
        return process

    def run(self, host, command, timeout=60, check=True, **options):
        """Run a command on a host; return a CompletedProcess, with `stdout` and `stderr` as text.

        If `check` is true and the command fails, raise ClusterError with the command's output. If
        the command runs longer than `timeout` seconds, raise subprocess.TimeoutExpired.
        """
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
        process = self.popen(host, command, stderr=subprocess.PIPE, **streams, **options)
        stdout, stderr = process.communicate(timeout=timeout)
        if check and process.returncode:
            raise ClusterError(f"{host}: {command} failed:\n{stdout}{stderr}")
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    # ---- faults

    def kill_host(self, host, silently=True):
        """Kill all processes of a host.

        With `silently`, cut the host's network first, so that the other hosts get no message, as in
        a power cut.
        """
        if silently:
            self.unplug(host)
        self._end(host)

    def revive(self, host):
        """Boot h1 or h2 again after kill_host(), and wait until Slurm can run jobs on it."""
        expect_line(self._start(host), "up")
        self._wait_for_nodes(host)

    def unplug(self, host):
        """Disconnect a host from the network."""
        self._on_switch(f"ip link set {host} down")

    def block_port(self, host, port):
        """Let a host drop all packets that other hosts send to its TCP port `port`."""
        rules = "add table inet faults; "
        rules += "add chain inet faults input { type filter hook input priority 0; }; "
        rules += f"add rule inet faults input iifname eth0 tcp dport {port} drop"
        self.run(host, ["nft", rules])

    def slow_link(self, host, rate):
        """Limit a host's network traffic, in both directions, to a rate such as `10mbit`."""
        limit = "tc qdisc replace dev {} root tbf rate {} burst 64kb latency 400ms"
        self.run(host, limit.format("eth0", rate))
        self._on_switch(limit.format(host, rate))

    # ---- Slurm

    def job(self, job):
        """Return Slurm's record of the job with the ID `job`, such as {"JobState": "RUNNING"}."""
        text = self.run("head", ["scontrol", "--oneliner", "show", "job", job]).stdout
        return dict(pair.split("=", 1) for pair in text.split() if "=" in pair)

    # ---- starting and ending the hosts

    def _write_files(self):
        """Write the files that the hosts mount into /etc, with new keys for munge and ssh."""
        etc = self.folder / "etc"
        shutil.copytree(HERE / "etc", etc)
        key = etc / "munge/munge.key"
        key.parent.mkdir()
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        make_key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "cluster", "-f"]
        subprocess.run([*make_key, etc / "ssh/id_ed25519"], check=True)
        public = (etc / "ssh/id_ed25519.pub").read_text()
        (etc / "ssh/authorized_keys").write_text(public)
        (etc / "ssh/ssh_known_hosts").write_text(f"* {public}")

    def _boot(self, command):
        """Start a command that the kernel kills when this process ends; return a Popen.

        The command's stdin and stdout are pipes, and stderr goes to the same pipe as stdout.
        """
        # If this process ends before setpriv runs, the kernel sends no signal. So start the command
        # only if this process is still the parent of `sh`.
        owned = ["setpriv", "--pdeathsig=KILL", "sh", "-c"]
        owned += [f'[ $PPID = {os.getpid()} ] && exec "$@"', "sh"]
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        streams |= {"stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen([*owned, *command], cwd="/", env=BOOT_ENVIRONMENT, **streams)
        self._children.append(process)
        return process

    def _start_switch(self):
        boot = "ip link add switch type bridge; ip link set switch up; echo up; "
        boot += "exec sleep infinity </dev/null >/dev/null 2>&1"
        self._switch = self._boot(["unshare", "--net", "sh", "-ec", boot])
        expect_line(self._switch, "up")

    def _start(self, host):
        """Boot a host, but do not wait for its daemons; return the host's `unshare` process."""
        for kind in ("log", "spool"):
            (self.folder / host / kind).mkdir(parents=True, exist_ok=True)
        options = "--net --uts --ipc --mount --pid --fork --kill-child --mount-proc".split()
        process = self._boot(["unshare", *options, "sh", HERE / "host.sh", host, self.folder])
        self._boots[host] = process
        expect_line(process, "named")
        # Delete the host's virtual cable, because after a kill, the cable of the previous boot may
        # still exist.
        self._on_switch(f"ip link delete {host}", check=False)
        self._on_switch(f"ip link add {host} type veth peer name eth0 netns {process.pid}")
        self._on_switch(f"ip link set {host} master switch up")
        process.stdin.write("wired\n")
        process.stdin.close()
        return process

    def _wait_for_nodes(self, *nodes):
        """Wait until Slurm can run jobs on all `nodes`, or raise ClusterError after 60 seconds."""

        def usable():
            query = ["sinfo", "--noheader", "--Node", "--format=%N %T"]
            # Raise no error if sinfo fails, because it fails while Slurm's controller is down.
            lines = self.run("head", query, check=False).stdout.splitlines()
            states = dict(map(str.split, lines))
            return all(states.get(node) in {"idle", "mixed", "allocated"} for node in nodes)

        wait_until(usable, 60, f"Slurm can use {', '.join(nodes)}")

    def _end(self, host):
        """Kill all processes of a host, and wait until they have ended."""
        boot = self._boots.pop(host)

        def has_ended():
            # Kill the child of `unshare`, because the child is the first process in the host's PID
            # namespace: the kernel then kills all processes in this namespace. `unshare` ends after
            # them.
            subprocess.run(["pkill", "-KILL", "--parent", str(boot.pid)], check=False)
            return boot.poll() is not None

        wait_until(has_ended, 20, f"all processes of {host} have ended")

    def _on_switch(self, command, check=True):
        """Run a command in the network namespace of the switch that connects the hosts."""
        enter_network = f"nsenter --target={self._switch.pid} --net".split()
        subprocess.run([*enter_network, *command.split()], check=check, capture_output=not check)


def shell(cluster):
    """Run bash on the host `head` until the user exits; return bash's exit status.

    When the user creates a file named `kill` or `revive` in a host's folder, kill or revive that
    host.
    """
    print((HERE / "shell.txt").read_text(), flush=True)
    # Ignore Ctrl-C, because it is for the programs in the shell; end when the terminal is closed.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGHUP, lambda *_: sys.exit())
    actions = {"kill": cluster.kill_host, "revive": cluster.revive}
    bash = cluster.popen("head", ["bash"], env={"CLUSTER": str(cluster.folder)})
    while bash.poll() is None:
        for path in [*cluster.folder.glob("*/kill"), *cluster.folder.glob("*/revive")]:
            actions[path.name](path.parent.name)
            path.unlink()
        time.sleep(0.1)
    return bash.returncode


if __name__ == "__main__":
    try:
        with Cluster() as cluster:
            sys.exit(shell(cluster))
    except ClusterError as error:
        print(f"cluster.py: error: {error}", file=sys.stderr)
        sys.exit(2)
