"""Say before a long run whether its machines are fit for it: go, or no-go and what to do.

Here:      torchrun --standalone --nproc-per-node 2 diagnosing-errors/preflight.py
For real:  MAX_RESTARTS=0 sbatch --nodes 4 --gpus-per-node 8 03-job-launchers/slurm/train.sbatch \
               diagnosing-errors/preflight.py --save-dir outputs --checkpoint-gb 40
Over ssh:  python diagnosing-errors/preflight.py --hosts hosts.txt --ranks-per-host 8

Start it with the launcher of the run itself, as that is under test too. torchrun waits for all of
its nodes before it starts anything, so a node that never comes is torchrun's to report; srun,
mpirun and --hosts start the ranks directly, and then rank 0 says which are missing.

All ranks read what they can of their machine and measure; rank 0 compares, and prints one table.
Exit status: 0 go, also with warnings; 1 no-go; 2 bad arguments. (torchrun makes 1 of any other
than 0, and adds a page of its own.) What ends in no-go: a rank that does not come through; another
torch, cuda, nccl, transformers or GPU; a faulty or occupied GPU; too few open files; an interface
that cannot work; a folder that is not shared, or too full; a wrong sum; a device 15% slower than
the median; a rank that has its CPUs half as long as others; a pair with less than half of the usual
bandwidth (a quarter on CPUs). --accept NAME makes a check of these only warn.
"""

import argparse
import array
import fcntl
import functools
import importlib.metadata
import itertools
import json
import math
import os
import platform
import re
import resource
import shlex
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import uuid
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict, namedtuple
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its warnings hide our one line

import torch
import torch.distributed as dist

GIB = 2**30
NO_GO, WARNING, OK, UNKNOWN = "no-go", "warning", "ok", "not known"
SLOW_DEVICE = 0.85  # of the median rate
SLOW_PAIR = {"cuda": 0.5, "cpu": 0.25}  # of the usual bandwidth; gloo's varies with the CPUs' load
SMALL_SHARE = 0.5  # of the time that the others have their CPUs
AGAIN = 6.0  # seconds for which what seems slow is measured again: other work comes and goes
MOST_ROUNDS = 32  # of pairs that are measured one after the other
CLOCKS_APART = 1.0  # seconds: enough to put lines of logs into the wrong order
DONE = "written, renamed, flushed"
PHASE_GRACE = 20  # seconds that the others give rank 0 to say what is wrong

LAUNCHERS = {  # the variables with rank, world size, local rank, and number of ranks on this node
    "torchrun": ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
    "mpirun (Open MPI)": [
        f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    ],
    "mpirun (MPICH)": ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
    "deepspeed": ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"],
    "srun": ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"],
}


# ---- command line and launcher ---------------------------------------------------------------


def parse_args(argv=None):
    """Return the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = fail
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add = parser.add_argument
    add("--save-dir", default="outputs", help="where the run will write its checkpoints")
    add("--checkpoint-gb", type=at_least(0.0), default=0.0, help="size of one, in 10^9 bytes")
    add("--keep-checkpoints", type=at_least(1), default=2, help="how many the run keeps on disk")
    add("--network-gbs", type=at_least(0.0), default=0.0,
        help="GB/s that ranks should reach between nodes; less than half is no-go")  # fmt: skip
    add("--device", choices=["cpu", "cuda"], default=device, help="what the run will use")
    add("--timeout", type=at_least(5), default=60, help="seconds that each phase may take")
    add(
        "--accept", action="append", default=[], metavar="NAME", help="a check that shall only warn"
    )
    add("--json", metavar="FILE", help="where to write all facts, measurements and findings")
    add("--hosts", metavar="FILE", help="start it over ssh on the hosts of this file")
    add("--ranks-per-host", type=at_least(1), default=1, help="with --hosts")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        fail(f"--device cuda: torch {torch.__version__} sees no GPU on {socket.gethostname()}")
    if args.json and not Path(args.json).resolve().parent.is_dir():
        fail(f"--json {args.json}: there is no folder {Path(args.json).resolve().parent}")
    if not args.hosts and "WORLD_SIZE" not in os.environ:
        fail(f"start this with a launcher, such as torchrun --nproc-per-node 2 {sys.argv[0]}")
    return args


def at_least(minimum):
    """Return an argument type: finite numbers like `minimum` that are not below it."""

    def number(text):
        value = type(minimum)(text)
        if not minimum <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, not {text}")
        return value

    number.__name__ = type(minimum).__name__  # which argparse shows for what is no number at all
    return number


def fail(message):
    """Stop because of what the user gave us: one line on stderr, exit status 2."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(3)  # rank 0 says it and the launcher ends us, or only we have this fault
    print(f"{Path(__file__).name}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def adopt_launcher():
    """Set the variables that torchrun sets to what another launcher says, as chapter 03 does."""
    missing = {
        name: [key for key in keys if key not in os.environ] for name, keys in LAUNCHERS.items()
    }
    launcher = min(missing, key=lambda name: len(missing[name]))
    if missing[launcher] == LAUNCHERS[launcher]:
        return  # nothing started this but a person, who may want --help or --hosts
    if missing[launcher]:
        fail(f"{missing[launcher][0]} is not set: {launcher} sets it for what it starts")
    for name, key in zip(LAUNCHERS["torchrun"], LAUNCHERS[launcher], strict=True):
        os.environ[name] = re.match(r"\d+", os.environ[key])[0]  # "2(x4)" is 2 on each of 4 nodes
    if launcher == "srun":  # rank 0 is on the first node of a list such as gpu[03-07,12]
        nodes = re.sub(r"\[(\d+)[^]]*\]", r"\1", os.environ["SLURM_STEP_NODELIST"])
        step = 10 * int(os.environ["SLURM_JOB_ID"]) + int(os.environ["SLURM_STEP_ID"])
        os.environ.setdefault("MASTER_ADDR", nodes.split(",")[0])
        os.environ.setdefault("MASTER_PORT", str(10_000 + step % 20_000))  # of this step alone
    elif os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"]:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            fail(f"{name} is not set: give {launcher} one address and port of rank 0's node")


def launch(args, argv):
    """Start the ranks on the hosts of a file over ssh, one ssh for each; return the status.

    Without torchrun between, so that the ranks of the other hosts can say which host is missing.
    """
    try:
        lines = Path(args.hosts).read_text().splitlines()
    except OSError as error:
        fail(f"--hosts {args.hosts}: {error.strerror}")
    hosts = [line.split("#")[0].split()[0] for line in lines if line.split("#")[0].strip()]
    if not hosts:
        fail(f"--hosts {args.hosts}: it names no host")
    port = os.environ.get("MASTER_PORT", str(20_000 + os.getpid() % 10_000))
    shared = {"MASTER_ADDR": hosts[0], "MASTER_PORT": port, "PREFLIGHT_HOSTS": ",".join(hosts)}
    shared |= {"WORLD_SIZE": len(hosts) * args.ranks_per_host}
    shared |= {"LOCAL_WORLD_SIZE": args.ranks_per_host}
    kept = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG")
    shared |= {name: os.environ[name] for name in kept if name in os.environ}
    started = [start_on(*host, args.ranks_per_host, shared, argv) for host in enumerate(hosts)]
    statuses = [status_of(process, started[0]) for process in started]
    for host, status in zip(hosts, statuses, strict=True):
        if status == 255:  # which is ssh's own
            print(f"{NO_GO:8} no ssh to {host}: try ssh {host} true", flush=True)
        if status is None:
            print(f"{NO_GO:8} {host} does not end: kill what hangs there", flush=True)
    return max(1 if status not in (0, 2) else status for status in statuses)


def status_of(process, first):
    """Return the status of one ssh; None if it goes on after that to rank 0's host has ended."""
    with suppress(subprocess.TimeoutExpired):
        first.wait()
        # those that never found rank 0 look for it as long as they are told to
        return process.wait(None if first.returncode == 255 else 15)
    process.kill()
    process.wait()
    return None


def start_on(number, host, ranks, shared, argv):
    """Start the ranks of one host; the last is what ssh waits for, and its status is all ranks'."""
    command = []
    for local_rank in reversed(range(ranks)):
        mine = {"RANK": number * ranks + local_rank, "LOCAL_RANK": local_rank}
        words = ["env", *(f"{name}={value}" for name, value in (shared | mine).items())]
        words += [sys.executable, str(Path(__file__).resolve()), *argv]
        command.append(shlex.join(words) + (" & " if local_rank else ""))
    line = f"cd {shlex.quote(os.getcwd())} && {{ {''.join(command)}; }}"
    options = ["-n", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    return subprocess.Popen(["ssh", *options, host, line])


# ---- meeting the other ranks -----------------------------------------------------------------


@dataclass
class Me:
    """Who this rank is, and the store through which ranks tell each other what they know."""

    rank: int
    world_size: int
    local_rank: int
    host: str
    store: object
    hosts: list = None  # of all ranks, by rank


def connect(args):
    """Return who this rank is, connected to the store that all meet at; or exit with 1."""
    rank, world_size, local_rank, _ = (int(os.environ[name]) for name in LAUNCHERS["torchrun"])
    host, where = socket.gethostname(), "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
    # torchrun has a store of its own there; otherwise rank 0 is to make one
    hosting = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    why = None if hosting else reach(time.monotonic() + args.timeout)
    try:
        if not why:
            return Me(rank, world_size, local_rank, host, open_store(args, hosting))
    except (RuntimeError, ValueError) as error:
        why = first_line(error)
        if "EADDRINUSE" in str(error):
            why = "this port is taken: end what holds it (ss -ltnp), or choose another MASTER_PORT"
    say_error(f"rank {rank} on {host} cannot {'open' if hosting else 'reach'} {where}: {why}")
    sys.exit(1)


def open_store(args, hosting=False):
    """Return a connection to the store; `hosting`: and make the store."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=hosting,
        timeout=timedelta(seconds=args.timeout),
        wait_for_workers=False,
    )
    store.set_timeout(timedelta(days=1))  # Watch looks after the time
    return dist.PrefixStore("preflight", store)


def reach(deadline):
    """Return None once MASTER_ADDR:MASTER_PORT takes connections, or at last why it does not."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    while True:
        patience = max(0.5, deadline - time.monotonic())
        try:
            with socket.create_connection((address, port), timeout=min(5, patience)):
                return None
        except socket.gaierror as error:
            why = f"{address} does not resolve ({error.strerror}): see getent hosts {address}"
        except TimeoutError:
            why = "no answer: a firewall drops this port, or the host is dead"
        except ConnectionRefusedError:
            why = "refused: rank 0 did not start, or is on another host, or a firewall rejects it"
        except OSError as error:
            why = error.strerror or str(error)
        if time.monotonic() > deadline:
            return why
        time.sleep(0.3)


def consult(me, name, mine, decide=list):
    """Return on every rank what rank 0 makes of the list of all ranks' answers."""
    me.store.set(f"{name}/{me.rank}", json.dumps(mine))
    if me.rank == 0:
        answers = me.store.multi_get([f"{name}/{rank}" for rank in range(me.world_size)])
        me.store.set(name, json.dumps(decide([json.loads(answer) for answer in answers])))
    return json.loads(me.store.get(name))


def tell(me, **facts):
    """Leave facts of this rank where rank 0 finds them, whatever happens next."""
    for name, value in facts.items():
        me.store.set(f"fact {name}/{me.rank}", json.dumps(value))
    names = ",".join(facts)
    me.store.append(f"told/{me.rank}", names + ",")


def collect(store, world_size):
    """Return what each rank has told so far: a list of dictionaries, None for those who did not."""
    reports = []
    for key in (f"told/{rank}" for rank in range(world_size)):
        names = store.get(key).decode().split(",")[:-1] if store.check([key]) else []
        rank = len(reports)
        values = store.multi_get([f"fact {name}/{rank}" for name in names]) if names else []
        report = {name: json.loads(value) for name, value in zip(names, values, strict=True)}
        reports.append({**report.pop("facts", {}), **report} or None)
    return reports


class Watch(threading.Thread):
    """Sees to it that every phase ends: rank 0's calls the roll and says who did not come."""

    def __init__(self, args, me):
        super().__init__(daemon=True)
        self.args, self.me, self.parent = args, me, os.getppid()
        self.store = open_store(args)  # the other connection may be waiting for something
        self.number, self.answered, self.over = 0, False, False
        self.enter("all ranks meet")
        self.start()

    def enter(self, phase):
        """Say that this rank is in the next phase, which may take --timeout seconds."""
        self.number, self.phase = self.number + 1, phase
        self.deadline = time.monotonic() + self.args.timeout
        signal.alarm(2 * self.args.timeout + 60)  # the system's own end to all that may hang
        self.me.store.set(f"phase/{self.me.rank}", f"{self.number:02} {phase}")

    def run(self):
        while not self.over:
            # these signals, taken here, do not end rank 0 before it has said what is wrong
            got = signal.sigtimedwait({signal.SIGTERM, signal.SIGINT}, 0.2)
            if got and (self.me.rank or got.si_signo == signal.SIGINT):
                os._exit(128 + got.si_signo)
            try:
                self.look(got or os.getppid() != self.parent)
            except RuntimeError:
                if not self.over:
                    self.leave("has lost the store of rank 0")

    def look(self, ended):
        late = time.monotonic() - self.deadline
        if self.store.check(["stop"]):
            self.leave()
        if not self.answered and self.store.check(["roll call"]):
            self.store.set(f"here/{self.me.rank}", "")
            self.answered = True
        if (
            self.me.rank == 0
            and not self.over
            and (late > 0 or ended or self.store.check(["failed"]))
        ):
            self.end()
        elif ended or late > PHASE_GRACE:
            self.leave("was left waiting by rank 0")

    def failed(self, error):
        """Report an error of this rank, and wait for the end that rank 0 makes."""
        with suppress(RuntimeError):  # the store may be what has failed
            tell(self.me, traceback=traceback.format_exc())  # for --json
            message = f"{type(error).__name__}: {first_line(error)}"
            self.me.store.set(f"failed/{self.me.rank}", message)
            self.me.store.set("failed", "")
        time.sleep(self.args.timeout + PHASE_GRACE + 10)

    def end(self):
        """On rank 0: call the roll, print what is known, and end all ranks."""
        try:
            self.store.set("roll call", "")
            time.sleep(2)
            roll = call_roll(self.store, self.me.world_size)
            expected = expected_hosts()
            findings = who_is_missing(self.args, roll, self.me.world_size, expected)
            row = {"check": "all ranks come through", "most": f"phase: {self.phase}"}
            row |= {"level": NO_GO, "findings": findings}
            report(self.args, collect(self.store, self.me.world_size), [row])
            self.store.set("stop", "")
            time.sleep(1)
        except Exception as error:
            say_error(f"{type(error).__name__}: {first_line(error)}")
        finally:
            os._exit(1)

    def leave(self, why=None):
        if why and self.me.local_rank == 0:
            say_error(f"rank {self.me.rank} on {self.me.host} {why}, in phase: {self.phase}")
        os._exit(1)


def call_roll(store, world_size):
    """Return all ranks' hosts and phases, who is silent and who failed, as the store has it."""
    came = [rank for rank in range(world_size) if store.check([f"phase/{rank}", f"host/{rank}"])]
    failed = [rank for rank in came if store.check([f"failed/{rank}"])]
    return {
        "hosts": {rank: json.loads(store.get(f"host/{rank}")) for rank in came},
        "phases": {rank: store.get(f"phase/{rank}").decode() for rank in came},
        "silent": [rank for rank in came if rank and not store.check([f"here/{rank}"])],
        "failed": {rank: store.get(f"failed/{rank}").decode() for rank in failed},
    }


def who_is_missing(args, roll, world_size, expected):
    """Return findings: which ranks never came, are silent, have failed, or are behind."""
    hosts, phases = roll["hosts"], roll["phases"]
    last = max(phases.values(), default="")[3:]
    behind = [rank for rank in hosts if phases[rank][3:] != last]

    def finding(ranks, text, advice):
        items = [Item(rank, hosts.get(rank), None, None) for rank in ranks]
        return finding_of("all ranks come through", NO_GO, items, text, "", advice)

    if absent := [rank for rank in range(world_size) if rank not in hosts]:
        names = [name for name in expected if name not in short_names(hosts.values())]
        text = "never came to {MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
        text += f" ({len(hosts)} of {world_size} did, within {args.timeout} s)"
        text += f"; no rank came from {', '.join(names)}" if names else ""
        return [finding(absent, text, "see its own error line; is its host up, is this port open?")]
    if roll["silent"]:
        text = f"no answer; the last known phase: {phases[roll['silent'][0]][3:]}"
        return [finding(roll["silent"], text, "dead, stopped or cut off: see dmesg there")]
    if roll["failed"]:
        # when one rank fails, its peers see their connections closed: the news is in other words
        said = {rank: text for rank, text in roll["failed"].items() if "by peer" not in text}
        return [finding([rank], text, "") for rank, text in [*(said or roll["failed"]).items()][:5]]
    if behind:
        text = f"still in phase: {phases[behind[0]][3:]}; others: {last}"
        return [
            finding(behind, text, f"raise --timeout ({args.timeout}), or see py-spy dump there")
        ]
    advice = f"raise --timeout ({args.timeout}); do hosts let all ports of each other through?"
    return [finding(hosts, f"not done in time: {last}", advice)]


def expected_hosts():
    """Return the short names of the hosts that the launcher has named, none if it has not."""
    if "PREFLIGHT_HOSTS" in os.environ:
        return short_names(os.environ["PREFLIGHT_HOSTS"].split(","))
    with suppress(OSError, KeyError, subprocess.SubprocessError):
        command = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
        return short_names(output_of(command).split())
    return []


def short_names(hosts):
    return [host.split(".")[0] for host in hosts]


# ---- facts: what each rank can read ----------------------------------------------------------


def known(read, *args):
    """Return what `read` returns, or None where it cannot be read here."""
    try:
        return read(*args)
    except (OSError, ValueError, LookupError, RuntimeError, AttributeError, ElementTree.ParseError,
            subprocess.SubprocessError, importlib.metadata.PackageNotFoundError):  # fmt: skip
        return None


def output_of(command, seconds=20):
    """Return what a command prints."""
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=seconds
    ).stdout


def read_facts(args, me):
    """Return what this rank knows of its software, limits, cores, memory and network."""
    facts = {"rank": me.rank, "host": me.host, "local_rank": me.local_rank}
    facts |= {"boot": known(Path("/proc/sys/kernel/random/boot_id").read_text)}
    facts |= read_versions() | read_limits() | read_network()
    if me.local_rank == 0 and args.device == "cuda":
        facts |= {"gpus": known(read_gpus), "driver": known(read_driver)}
    if args.device == "cuda":
        facts["gpus_seen"] = torch.cuda.device_count()  # makes no CUDA context
    return facts


def read_versions():
    """Return the versions of what must be the same on all ranks."""
    versions = {
        name: known(importlib.metadata.version, name) for name in ("transformers", "datasets")
    }
    nccl = known(torch.cuda.nccl.version) if torch.cuda.is_available() else None
    return versions | {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl and ".".join(map(str, nccl)),
    }


def read_limits():
    """Return limits of this process: files, locked bytes, cores; and bytes free in memory."""
    return {
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "shm_free": known(lambda: shutil.disk_usage("/dev/shm").free),
        "memory_free": known(memory_free),
        "cpus": known(usable_cpus),
        "affinity": known(lambda: sorted(os.sched_getaffinity(0))),
        "threads": torch.get_num_threads(),
        "infiniband": known(lambda: sorted(os.listdir("/sys/class/infiniband"))),
    }


def memory_free():
    """Return the bytes that this host, or its container, can still give."""
    text = Path("/proc/meminfo").read_text()
    free = int(re.search(r"MemAvailable:\s+(\d+)", text)[1]) * 1024
    with suppress(OSError, ValueError):  # "max" is no number: there is no limit
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return free


def usable_cpus():
    """Return how many CPUs this process may use, as its affinity and its container say."""
    cpus = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cpus = min(cpus, math.ceil(int(quota) / int(period)))
    return cpus


def read_network():
    """Return this host's interfaces, its own name and address, and which way leads to rank 0."""
    host = socket.gethostname()
    address = known(socket.gethostbyname, host)
    interfaces = known(read_interfaces) or {}
    by_address = {address: name for name, (address, _) in interfaces.items()}
    gloo = os.environ.get("GLOO_SOCKET_IFNAME")
    loopback = bool(address) and address.startswith("127.")
    return {
        "interfaces": interfaces,
        "address": address,
        "name_of_address": address and known(lambda: socket.gethostbyaddr(address)[0]),
        # without a name given, gloo listens at the address of the host's own name
        "gloo_interface": gloo or ("lo" if loopback else by_address.get(address)),
        "nccl_spec": os.environ.get("NCCL_SOCKET_IFNAME"),
        "route": by_address.get(known(address_towards, os.environ.get("MASTER_ADDR"))),
    }


def read_interfaces():
    """Return the IPv4 interfaces: from name to (address or None, whether it is up)."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack("256s", name.encode()[:15]))
            address = None
            with suppress(OSError):
                fcntl.ioctl(probe, 0x8915, request)  # SIOCGIFADDR of netdevice(7)
                address = socket.inet_ntoa(request[20:24].tobytes())
            state = known(Path(f"/sys/class/net/{name}/operstate").read_text) or "unknown"
            found[name] = (address, state.strip() in ("up", "unknown"))  # lo is "unknown"
    return found


def address_towards(host):
    """Return the own address from which packets to a host would leave; none is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def read_driver():
    return Path("/sys/module/nvidia/version").read_text().strip()


def read_gpus():
    """Return the health of this host's GPUs, by number, as nvidia-smi knows it."""
    gpus = parse_smi(output_of(["nvidia-smi", "-q", "-x"]))
    links = known(output_of, ["nvidia-smi", "nvlink", "--status"]) or ""
    for gpu, down in zip(gpus, parse_nvlink(links, len(gpus)), strict=True):
        gpu["nvlinks_down"] = down
    mine = os.environ.get("CUDA_VISIBLE_DEVICES")  # others' GPUs may well be in use
    visible = mine.split(",") if mine else [gpu["index"] for gpu in gpus]
    return [gpu for gpu in gpus if {gpu["index"], gpu["uuid"]} & set(visible)]


def while_hot(gpus, measure):
    """Return what `measure` returns; meanwhile read anew what GPUs show only while they work."""
    now = []
    reader = threading.Thread(target=lambda: now.extend(known(read_gpus) or []))
    if gpus:
        reader.start()
    measured = measure()
    if gpus:
        reader.join()
    for gpu, hot in zip(gpus or [], now, strict=False):
        gpu |= {name: hot[name] for name in ("slowed", "temperature", "clock", "generation")}
    return measured


def parse_smi(text):
    """Return a dictionary per GPU from `nvidia-smi -q -x`; what a driver does not say is None."""
    found = enumerate(ElementTree.fromstring(text).iter("gpu"))
    return [{"index": str(number)} | parse_gpu(gpu) for number, gpu in found]


def parse_gpu(gpu):
    def text(path):
        found = gpu.findtext(path, "").strip()
        return None if found in ("", "N/A", "[N/A]") else found

    def lower(path):
        return text(path) and text(path).lower()

    def number(path):
        found = re.match(r"\d+", text(path) or "")
        return int(found[0]) if found else None

    def pair(*paths):
        found = [text(f"pci/pci_gpu_link_info/{path}") for path in paths]
        return " of ".join(found) if all(found) else None

    def total(pattern, within):
        found = [part.text for part in gpu.findall(f"{within}/*") if re.search(pattern, part.tag)]
        counts = [int(each) for each in found if (each or "").strip().isdigit()]
        return sum(counts) if counts else None

    reasons = [*gpu.findall("clocks_event_reasons/*"), *gpu.findall("clocks_throttle_reasons/*")]
    slowed = [
        re.sub("clocks_(event|throttle)_reason_", "", part.tag)
        for part in reasons
        if part.text == "Active" and re.search("hw_|thermal", part.tag)
    ]
    return {
        "name": text("product_name"),
        "uuid": text("uuid"),
        "uncorrected": total("uncorrectable", "ecc_errors/volatile"),
        "remapped": total("_unc$", "remapped_rows"),
        "remap_failed": lower("remapped_rows/remapped_row_failure"),
        "pending": lower("remapped_rows/remapped_row_pending")
        or lower("retired_pages/pending_retirement"),
        "retired": number("retired_pages/double_bit_retirement/retired_count"),
        "slowed": " ".join(slowed) or "none" if reasons else None,
        "width": pair("link_widths/current_link_width", "link_widths/max_link_width"),
        "generation": pair("pcie_gen/current_link_gen", "pcie_gen/max_link_gen"),
        "temperature": number("temperature/gpu_temp"),
        "clock": number("clocks/sm_clock"),
        "processes": len(gpu.findall("processes/process_info")),
    }


def parse_nvlink(text, count):
    """Return how many NVLinks of each GPU are down, None where it has none that it tells of."""
    parts = re.split(r"^GPU (\d+):", text, flags=re.M)[1:]
    by_number = dict(zip(map(int, parts[::2]), parts[1::2], strict=True))
    links = [re.findall(r"Link \d+: (.*)", by_number.get(gpu, "")) for gpu in range(count)]
    # a GPU without bridges shows all of its links as inactive, and that is no fault
    return [
        sum("inactive" in link for link in each) if any("GB/s" in link for link in each) else None
        for each in links
    ]


def read_node(args, me):
    """Return what one rank of each host finds out with the others: names, disk, shared folder."""
    node = {}
    if me.local_rank == 0:
        others = [host for host in dict.fromkeys(me.hosts) if host != me.host]
        node["unresolved"] = [
            host for host in others[:200] if not known(socket.gethostbyname, host)
        ]
        node["disk_free"] = known(disk_free, Path(args.save_dir).resolve())
    return node | {"shared": try_shared(args, me)}


def disk_free(folder):
    """Return the bytes free where a folder is, or will be."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free


def try_shared(args, me):
    """Write, rename and flush on rank 0; return in words how one rank of each host saw it."""
    folder = Path(args.save_dir).resolve()
    probe = folder / f".preflight-{consult(me, 'probe', uuid.uuid4().hex, min)}"
    written = in_words(write_flushed, probe, "old") if me.rank == 0 else None
    written = consult(me, "written", written, lambda answers: answers[0])
    looks = me.local_rank == 0 and me.rank and written == DONE
    saw = "not seen" if looks and not wait_for(probe, "old") else written
    consult(me, "seen", saw, len)
    if me.rank == 0 and written == DONE:
        time.sleep(0.2)  # the others have begun to look
        saw = in_words(write_flushed, probe, "new")
    elif looks and saw == DONE:
        saw = wait_for(probe, "new")
        saw = DONE if saw else "rename not seen" if saw is False else "gone during the rename"
    consult(me, "renamed", saw, len)
    if me.rank == 0:
        probe.unlink(missing_ok=True)
    return saw if me.rank == 0 or looks else None


def in_words(work, *args):
    """Do what touches files; return how it went."""
    try:
        work(*args)
        return DONE
    except OSError as error:
        return f"failed: {error.strerror}"


def wait_for(path, text, seconds=10):
    """Return whether a file holds a text in time; None if it was there, and then was not."""
    patience = time.monotonic() + seconds  # network file systems show new files late
    seen = False
    while time.monotonic() < patience:
        found = known(path.read_text)
        if found == text:
            return True
        if seen and found not in ("old", "new"):
            return None
        seen = found is not None
        time.sleep(0.01)
    return False


def write_flushed(path, text):
    """Write a file beside, rename it, and flush both so that a power cut would not lose them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    with open(fresh, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# ---- measurements ----------------------------------------------------------------------------


def join_group(args, me):
    """Join the process group, which has gloo for CPU tensors also on GPUs; return the device."""
    store, backend, options = dist.PrefixStore("group", me.store), "gloo", {}
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", me.local_rank)
        torch.cuda.set_device(device)
        backend, options = "cpu:gloo,cuda:nccl", {"device_id": device}
    dist.init_process_group(
        backend,
        store=store,
        rank=me.rank,
        world_size=me.world_size,
        timeout=timedelta(seconds=args.timeout + PHASE_GRACE),  # Watch is to be the first
        **options,
    )
    return device


def agreed(number):
    """Return the largest of all ranks' numbers, on all of them: they leave it together."""
    largest = torch.tensor(float(number), dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def finish(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(device, work):
    """Return the seconds that some work takes on this rank, begun with all others."""
    finish(device)
    agreed(0)
    start = time.perf_counter()
    work()
    finish(device)
    return time.perf_counter() - start


def read_clocks():
    """Return the time of day in seconds at five moments that are nearly the same on all ranks."""
    return [(agreed(0), time.time())[1] for _ in range(5)]


def read_used(device):
    """Return the GiB of a GPU that are in use before anything is put there, None without a GPU."""
    if device.type != "cuda":
        return None
    free, whole = torch.cuda.mem_get_info(device)
    return (whole - free) / GIB


def matmul_rates(device):
    """Return TFLOP/s of this device in float32, without TF32, and bfloat16; of a CPU, its share.

    A CPU's rates are per second in which this process had it, and its share says how much of the
    time that was: what else runs on a machine comes and goes, and moves from core to core.
    """
    torch.set_float32_matmul_precision("highest")
    start = time.perf_counter(), cpu_seconds()
    rates = {
        str(dtype)[6:]: matmul_rate(device, dtype) for dtype in (torch.float32, torch.bfloat16)
    }
    if device.type == "cpu":
        rates["share"] = (cpu_seconds() - start[1]) / (time.perf_counter() - start[0])
    return rates


def cpu_seconds():
    """Return the seconds that this process has had a CPU for each of its threads."""
    return time.process_time() / torch.get_num_threads()


def matmul_rate(device, dtype):
    """Return TFLOP/s of products of n × n matrices, which take 2 n³ operations each."""
    cuda = device.type == "cuda"
    n, seconds, block = (8192, 1.5, 0.1) if cuda else (512, 0.5, 0.03)
    left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))

    def seconds_of(count):
        finish(device)
        start = time.perf_counter() if cuda else cpu_seconds()
        for _ in range(count):
            left @ right
        finish(device)
        return (time.perf_counter() if cuda else cpu_seconds()) - start

    seconds_of(2)
    count = max(1, math.ceil(block / seconds_of(2) * 2))
    deadline, times = time.monotonic() + seconds, []
    while len(times) < 3 or time.monotonic() < deadline:
        times.append(seconds_of(count))
    # a GPU's best block is one before it got hot; a CPU's, one that others disturbed least
    best = statistics.median(times) if cuda else min(times)
    return count * 2 * n**3 / best / 1e12


def until_steady(me, name, measure, suspicious):
    """Return the best of what `measure` returns, repeated while some rank's seems too slow."""
    best, start = measure(), time.monotonic()
    for again in itertools.count():
        # rank 0 decides for all
        if not consult(me, f"{name} {again}", best, suspicious):
            break
        if consult(me, f"{name} time {again}", time.monotonic() - start, max) > AGAIN:
            break
        merge(best, measure(), again + 1)
    return best


def merge(best, new, count):
    """Put what is better into the best of so many measurements; of shares, the mean."""
    for key, value in new.items():
        if key == "share":
            best[key] = (best[key] * count + value) / (count + 1)
        else:
            best[key] = (min if key.startswith("latency") else max)(best[key], value)


def grown(device, make, largest):
    """Return (bytes, seconds) of the slowest rank, at the first size that takes 30 ms."""
    size = 2**14
    while True:
        size = min(4 * size, largest)
        work = make(size)
        work()
        seconds = agreed(timed(device, work))
        if seconds > 0.03 or size == largest:
            break
    repeats = min(8, int(0.5 / seconds))
    return size, min([seconds, *(agreed(timed(device, work)) for _ in range(repeats))])


def collective_rates(me, device):
    """Return bus bandwidths in GB/s, the latency of 8 bytes in µs, and whether sums are right.

    Bus bandwidth is bytes / seconds × 2 (n - 1) / n for all-reduce, and × (n - 1) / n for
    all-gather, with the bytes of the whole result:
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    n, largest = me.world_size, 2**28 if device.type == "cuda" else 2**24
    # the second name is that of torch before 2.13
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    right = []

    def all_reduce(size):
        data = torch.full((size // 4,), me.rank + 1.0, device=device)
        dist.all_reduce(data)
        right.append(bool((data == n * (n + 1) / 2).all()))
        return functools.partial(dist.all_reduce, data.zero_())

    def all_gather(size):
        mine = torch.full((max(1, size // 4 // n),), me.rank + 1.0, device=device)
        whole = torch.zeros(n * mine.numel(), device=device)
        gather(whole, mine)
        wanted = torch.arange(1.0, n + 1, device=device).repeat_interleave(mine.numel())
        right.append(bool((whole == wanted).all()))
        return functools.partial(gather, whole, mine)

    reduced, gathered = (grown(device, make, largest) for make in (all_reduce, all_gather))
    small = torch.zeros(2, device=device)
    latency = min(timed(device, lambda: dist.all_reduce(small)) for _ in range(50))
    return {
        "all-reduce": reduced[0] / reduced[1] * 2 * (n - 1) / n / 1e9,
        "all-gather": gathered[0] / gathered[1] * (n - 1) / n / 1e9,
        "latency": latency * 1e6,
        "right": "right" if all(right) else "wrong",
    }


def rings(me):
    """Return the rings of ranks in which this one meets all others of its node, and of its kind.

    Its kind is its place on its node: ranks of one place on all nodes share a network card, or not,
    in the same way. A ring of one takes no part. The longest ring of all ranks comes with each.
    """
    nodes = defaultdict(list)
    for rank, host in enumerate(me.hosts):
        nodes[host].append(rank)
    inside = nodes[me.host]
    place = inside.index(me.rank)
    everywhere = all(place < len(node) for node in nodes.values())
    between = [node[place] for node in nodes.values()] if everywhere else [me.rank]
    return {"inside": (inside, max(map(len, nodes.values()))), "between": (between, len(nodes))}


def shifts(length):
    """Return the distances over which a ring of ranks sends, one a round: all, or many."""
    step = max(1, math.ceil((length - 1) / MOST_ROUNDS))
    return range(1, length, step)


def pair_rates(me, device):
    """Return GB/s and seconds of latency from other ranks to this one: a dictionary.

    In round s, each rank of a ring sends to the one s further on, all at once: n - 1 rounds for
    all n (n - 1) pairs.
    """
    rates = {}
    for kind, (ring, longest) in rings(me).items():
        size = None
        for shift in shifts(longest):
            here, length = ring.index(me.rank), len(ring)
            takes_part = shift < length
            to, source = (ring[(here + sign * shift) % length] for sign in (1, -1))
            swap = functools.partial(exchange, device, to, source, takes_part)
            if size is None:
                size = grown(device, lambda size, swap=swap: functools.partial(swap, size), 2**25)[
                    0
                ]
            times, spent = [], 0.0
            while len(times) < 2 or (len(times) < 6 and spent < 0.3):
                times.append(swap(size))
                spent += agreed(times[-1] or 0)
            delays = [swap(8, back=True) for _ in range(10)]
            if takes_part:
                rates[f"{kind} {source}"] = size / min(times) / 1e9
                rates[f"latency {kind} {source}"] = min(delays) / 2
    return rates


def exchange(device, to, source, takes_part, size, back=False):
    """Send bytes to one rank while getting some from another, and `back` again; return seconds."""
    out, into = (torch.zeros(size // 4, device=device) for _ in range(2))
    finish(device)
    agreed(0)
    start = time.perf_counter()
    for ahead, behind in ((to, source), (source, to))[: 1 + back] if takes_part else ():
        both = [dist.P2POp(dist.isend, out, ahead), dist.P2POp(dist.irecv, into, behind)]
        works = dist.batch_isend_irecv(both)
        works[-1].wait()  # what it got is what it times, so first this
        finish(device)
        seconds = time.perf_counter() - start
        for work in works[:-1]:
            work.wait()
    return seconds if takes_part else None


# ---- comparison: pure functions of what all ranks told ---------------------------------------

Item = namedtuple("Item", "rank host label value")  # rank: None for what a whole host has
SEE = {  # what else may tell, where this could not
    "gpu": ": run nvidia-smi -q, and dcgmi diag -r 2, on each host",
    "driver": ": run nvidia-smi on each host",
}
Check = namedtuple("Check", "name of value bad level advice unit", defaults=[None, None, "", "{}"])


def checks(args, reports):
    """Return all checks but those of pairs.

    `of`: rank, host or gpu. `value`: a key of what it told, or a function of that. `bad`: a
    function of a value and of all values; None: to differ from the majority. Without a level it
    is only shown.
    """
    local = Counter(report["host"] for report in reports)
    files = 512 + 4 * len(reports)  # gloo and nccl keep sockets to many other ranks
    need = (args.keep_checkpoints + 1) * args.checkpoint_gb * 1e9 / GIB
    infiniband = any(report.get("infiniband") for report in reports)
    threads = Counter()  # of all ranks that may use the same CPUs
    for told in reports:
        threads[told["host"], str(told.get("affinity"))] += told.get("threads", 0)
    same = "install the same on all hosts, or let all use one environment"
    found = [
        Check("python", "rank", "python", None, WARNING, same),
        Check("torch", "rank", "torch", None, NO_GO, same),
        Check("transformers", "rank", version_of("transformers"), None, NO_GO, same),
        Check("datasets", "rank", version_of("datasets"), None, WARNING, same),
        Check("open files", "rank", "open_files", lambda value, _: 0 <= value < files, NO_GO,
              f"needs {files}: ulimit -n 65536 where the launcher starts it, or its LimitNOFILE"),
        Check("locked memory", "rank", lambda told: limit_text(told.get("memlock")),
              lambda value, _: value != "unlimited", WARNING if infiniband else None,
              "ulimit -l unlimited, in jobs too: InfiniBand needs it"),
        Check("CPUs for threads", "rank", lambda told: crowding(told, threads),
              lambda value, _: "only" in value, WARNING,
              "set OMP_NUM_THREADS to the CPUs of a host divided by its ranks, or give it more"),
        Check("host memory free", "host", gib_of("memory_free"), below(0.5), WARNING,
              "see what holds it there: ps aux --sort -rss | head", "{:.1f} GiB"),
        Check("/dev/shm free", "host", gib_of("shm_free"), lambda value, _: value < 1, WARNING,
              "DataLoader workers and nccl need it: docker run --ipc=host", "{:.1f} GiB"),
        Check("gloo's interface", "rank", interface_state, lambda value, _: ":" in value, NO_GO,
              "set GLOO_SOCKET_IFNAME to one of: ip -brief address"),
        Check("interface to rank 0", "rank", "route"),
        Check("disk free", "host", gib_of("disk_free"), lambda value, _: value < need,
              NO_GO if need else None, f"needs {need:.1f} GiB: {args.keep_checkpoints} checkpoints "
              "and one in the making; free some, or take another --save-dir", "{:.1f} GiB"),
        Check("--save-dir", "host", "shared", lambda value, _: value != DONE, NO_GO,
              "take a folder that all hosts share, on storage with POSIX renames"),
    ]  # fmt: skip
    if len(local) > 1:
        found += [
            Check("own name and address", "host", own_name, lambda value, _: value != "match",
                  WARNING, "put each host's name and address into DNS or /etc/hosts"),
            Check("other hosts' names", "host", unresolved,
                  lambda value, _: value != "resolve", WARNING, "see getent hosts NAME there"),
            Check("clock ahead by", "host", lambda told: clock_ahead(told, reports),
                  lambda value, _: abs(value) > CLOCKS_APART, WARNING,
                  "start chronyd or ntpd there; see timedatectl", "{:.3f} s"),
        ]  # fmt: skip
    if args.device == "cuda":
        return found + gpu_checks(local) + measured_checks()
    return found + measured_checks()


def gpu_checks(local):
    """Return the checks of GPUs; `local`: how many ranks each host has."""
    faulty = "drain this host; nvidia-smi -q, dmesg | grep -i xid, dcgmi diag -r 2"
    repaired = "it has been repaired: watch it"
    some = lambda value, _: value not in (0, "no", "none")  # noqa: E731
    return [
        Check("cuda", "rank", "cuda", None, NO_GO, "install the same torch on all hosts"),
        Check("nccl", "rank", "nccl", None, NO_GO, "install the same torch on all hosts"),
        Check("nccl's interfaces", "rank", nccl_interfaces, lambda value, _: "none" in value, NO_GO,
              "set NCCL_SOCKET_IFNAME to one of: ip -brief address"),
        Check("driver", "host", "driver", None, WARNING, "install the same driver on all hosts"),
        Check("GPU", "gpu", "name", None, NO_GO, "use hosts with one kind of GPU"),
        Check("GPUs of a host", "host", "gpus_seen", None, WARNING, "see nvidia-smi -L there"),
        Check("GPU for each rank", "host",
              lambda told: "yes" if told.get("gpus_seen", 0) >= local[told["host"]] else "no",
              lambda value, _: value == "no", NO_GO, "start at most as many ranks as it has GPUs"),
        Check("GPU ECC errors", "gpu", "uncorrected", some, NO_GO, faulty),
        Check("GPU remapping failed", "gpu", "remap_failed", some, NO_GO, faulty),
        Check("GPU repair pending", "gpu", "pending", some, NO_GO, "reset the GPU, or reboot"),
        Check("GPU rows remapped", "gpu", "remapped", some, WARNING, repaired),
        Check("GPU pages retired", "gpu", "retired", some, WARNING, repaired),
        Check("NVLinks down", "gpu", "nvlinks_down", some, NO_GO, faulty),
        Check("GPU slowed by", "gpu", "slowed", some, NO_GO,
              "cooling or power: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER"),
        Check("GPU's processes", "gpu", "processes", some, NO_GO, "end them; see nvidia-smi"),
        Check("GPU memory in use", "rank", "gpu_used", lambda value, _: value > 2, NO_GO,
              "end what holds it: nvidia-smi, fuser -v /dev/nvidia*", "{:.1f} GiB"),
        Check("PCIe width", "gpu", "width", lambda value, _: len(set(value.split(" of "))) > 1,
              WARNING, "reseat the card, or drain this host"),
        Check("PCIe generation", "gpu", "generation"),  # an idle card lowers it to save power
        Check("GPU temperature", "gpu", "temperature", unit="{:.0f} °C"),
        Check("GPU clock", "gpu", "clock", unit="{:.0f} MHz"),
    ]  # fmt: skip


def measured_checks():
    """Return the checks of what was measured on each rank, or by all together."""
    slow = "its host is busy, hot or throttled: top, nvidia-smi -q -d PERFORMANCE there"
    wrong = "a device or a link corrupts data: drain hosts one by one until this is gone"
    return [
        Check("matmul float32", "rank", measured("matmul", "float32"), below(SLOW_DEVICE), NO_GO,
              slow, "{:.3g} TFLOP/s"),
        Check("matmul bfloat16", "rank", measured("matmul", "bfloat16"), below(SLOW_DEVICE), NO_GO,
              slow, "{:.3g} TFLOP/s"),
        Check("share of its CPUs", "rank", measured("matmul", "share"), below(SMALL_SHARE), NO_GO,
              "something else runs on its CPUs: top there; pin ranks apart", "{:.0%}"),
        Check("sums and gathers", "rank", measured("collective", "right"),
              lambda value, _: value != "right", NO_GO, wrong),
        Check("all-reduce, bus", "rank", measured("collective", "all-reduce"), unit="{:.3g} GB/s"),
        Check("all-gather, bus", "rank", measured("collective", "all-gather"), unit="{:.3g} GB/s"),
        Check("all-reduce, 8 bytes", "rank", measured("collective", "latency"), unit="{:.0f} µs"),
    ]  # fmt: skip


def below(part):
    return lambda value, values: value < part * statistics.median_high(values)


def measured(kind, name):
    return lambda told: told.get(kind, {}).get(name)


def version_of(package):
    return lambda told: told.get(package) or "not installed"


def gib_of(key):
    return lambda told: None if told.get(key) is None else told[key] / GIB


def limit_text(limit):
    return "unlimited" if limit == -1 else None if limit is None else f"{limit / 2**20:,.0f} MiB"


def crowding(told, threads):
    """Return in words whether there is a CPU for each thread of the ranks on the same CPUs."""
    if not told.get("affinity") or not told.get("cpus"):
        return None
    wanted = threads[told["host"], str(told["affinity"])]
    return "enough" if wanted <= told["cpus"] else f"only {told['cpus']} for {wanted} threads"


def interface_state(told):
    """Return the name of gloo's interface, with what is wrong with it after a colon."""
    name, interfaces = told.get("gloo_interface"), told.get("interfaces") or {}
    if not name or not interfaces:
        return None
    for each in name.split(","):
        if each not in interfaces:
            return f"{each}: there is none of this name, but {' '.join(interfaces)}"
        if not interfaces[each][1]:
            return f"{each}: it is down"
    if told.get("many_hosts") and interfaces[name.split(",")[0]][0] in ("127.0.0.1", None):
        return f"{name}: other hosts cannot reach it"
    return name


def nccl_interfaces(told):
    """Return which interfaces NCCL_SOCKET_IFNAME leaves, None if it is not set.

    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
    """
    spec, interfaces = told.get("nccl_spec"), told.get("interfaces")
    if not spec or not interfaces:
        return None
    kind, names = spec[0] if spec[0] in "^=" else "", spec.lstrip("^=").split(",")
    begins = (str.startswith, str.__eq__)["=" in spec[:2]]
    fits = {each for each in interfaces if any(begins(each, name) for name in names)}
    left = set(interfaces) - fits if kind == "^" else fits
    return " ".join(sorted(left)) or f"none fits {spec}"


def own_name(told):
    """Return whether a host's name leads to an address, and that back to the name."""
    if not told.get("address"):
        return "no address"
    back = told.get("name_of_address") or "no name"
    same = short_names([back]) == short_names([told["host"]])
    return "match" if same else f"{told['address']} is {back}"


def unresolved(told):
    names = told.get("unresolved")
    return None if names is None else f"not found: {' '.join(names[:8])}" if names else "resolve"


def clock_ahead(told, reports):
    """Return the seconds by which a host's clock is ahead of the middle one of all hosts."""
    if not told.get("clocks"):
        return None
    all_clocks = [
        each["clocks"] for each in reports if each["local_rank"] == 0 and each.get("clocks")
    ]
    usual = [statistics.median_high(moment) for moment in zip(*all_clocks, strict=True)]
    return statistics.median(mine - its for mine, its in zip(told["clocks"], usual, strict=True))


def compare(reports, args):
    """Return the table's rows, from what each rank told (None: nothing). Nothing is read here."""
    reports = known_ranks(reports)
    rows = [row_of(check, items_for(check, reports)) for check in checks(args, reports)]
    rows += pair_rows(args, reports)
    for row in rows:
        if row["check"] in args.accept and row["level"] == NO_GO:
            row["level"] = WARNING
            row["findings"] = [each | {"level": WARNING} for each in row["findings"]]
    return rows


def known_ranks(reports):
    """Return the reports of ranks that came as far as to say who they are."""
    return [report for report in reports if report and "rank" in report]


def items_for(check, reports):
    """Return what a check looks at: an item for each rank, or host, or GPU, that has a value."""
    pick = check.value if callable(check.value) else lambda told: told.get(check.value)
    if check.of == "rank":
        items = [Item(told["rank"], told["host"], None, pick(told)) for told in reports]
    elif check.of == "host":
        firsts = (told for told in reports if told["local_rank"] == 0)
        items = [Item(None, told["host"], None, pick(told)) for told in firsts]
    else:
        items = [
            Item(None, told["host"], f"{told['host']} GPU {gpu['index']}", pick(gpu))
            for told in reports
            for gpu in told.get("gpus") or []
        ]
    return [item for item in items if item.value is not None]


def row_of(check, items):
    """Return a row as a dictionary: what is usual, and findings of those that are not."""
    row = {"check": check.name, "level": OK, "most": "", "findings": [], "differs": []}
    if not items:
        see = SEE.get(check.name) or SEE.get(check.of, "")
        return row | {"level": UNKNOWN, "most": f"not known{see}"}
    values = [item.value for item in items]
    text = check.unit.format
    [(usual, count)] = Counter(values).most_common(1)
    if isinstance(usual, float):
        usual, count = statistics.median_high(values), 0
    row["most"] = text(usual) + (f" ({count} of {len(items)})" if count and len(items) > 1 else "")
    groups = defaultdict(list)
    for item in items:
        differs = item.value != usual and not isinstance(usual, float)
        if check.bad(item.value, values) if check.bad else differs:
            groups[text(item.value)].append(item)
    if not check.level:
        groups.pop(text(usual), None)
        return row | {"differs": [f"{value}: {where(group)}" for value, group in groups.items()]}
    return with_findings(row, [
        finding_of(check.name, check.level, group, value, row["most"], check.advice)
        for value, group in groups.items()
    ])  # fmt: skip


def with_findings(row, findings):
    """Return a row with its findings, and the level that these make it."""
    differs = [f"{each['value']}: {each['where']}" for each in findings]
    level = findings[0]["level"] if findings else row["level"]
    return row | {"findings": findings, "differs": differs, "level": level}


def finding_of(check, level, items, value, usual, advice):
    """Return a finding as a dictionary: what is wrong, where, and what to do."""
    return {
        "check": check,
        "level": level,
        "where": where(items),
        "ranks": [item.rank for item in items if item.rank is not None],
        "hosts": sorted({item.host for item in items if item.host}),
        "value": value,
        "usual": usual,
        "advice": advice,
    }


def where(items):
    """Return in words whose items these are, such as: ranks 0-7,9 on h1, h2."""
    if labels := [item.label for item in items if item.label]:
        return ", ".join(labels[:4]) + (f" and {len(labels) - 4} more" if len(labels) > 4 else "")
    ranks = [item.rank for item in items if item.rank is not None]
    names = list(dict.fromkeys(item.host for item in items if item.host))
    hosts = ", ".join(names) if len(names) <= 4 else f"{len(names)} hosts"
    if not ranks:
        return hosts
    text = f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"
    return f"{text} on {hosts}" if hosts else text


def spans(numbers):
    """Return numbers as text such as 0-7,9."""
    parts = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def pair_rows(args, reports):
    """Return the rows of pairs of ranks: bandwidth and latency, inside hosts and between them."""
    hosts = {told["rank"]: told["host"] for told in reports}
    rows = []
    for kind, name in {"inside": "pairs inside a host", "between": "pairs between hosts"}.items():
        rates, delays = pairs_of(reports, kind), pairs_of(reports, f"latency {kind}")
        if not rates:
            continue
        usual = usual_rate(rates)
        least = SLOW_PAIR[args.device] * max(usual, args.network_gbs if kind == "between" else 0)
        row = {"check": name, "level": OK, "most": f"{usual:.3g} GB/s"}
        rows.append(with_findings(row, slow_pairs(name, rates, hosts, least, row["most"])))
        middle = statistics.median_high(delays.values())
        far = {pair: delay for pair, delay in delays.items() if delay > 5 * middle + 0.5e-3}
        row = {"check": f"latency, {name}", "level": OK, "most": f"{middle * 1e6:.0f} µs"}
        rows.append(with_findings(row, [
            finding_of(row["check"], WARNING, pair_items(pair, hosts), f"{delay * 1e6:.0f} µs",
                       row["most"], "see ping, and what else uses this link or these CPUs")
            for pair, delay in far.items()
        ]))  # fmt: skip
    return rows


def pairs_of(reports, kind):
    """Return what was measured of one kind: a dictionary from (sender, receiver)."""
    return {
        (int(key.split()[-1]), told["rank"]): value
        for told in reports
        for key, value in (told.get("pairs") or {}).items()
        if key.rsplit(" ", 1)[0] == kind
    }


def usual_rate(rates):
    """Return the bandwidth that the middle one of all ranks has with its best partner.

    Not the median of all pairs: of the pairs of three hosts, most have to do with the slow one.
    """
    best = defaultdict(float)
    for pair, rate in rates.items():
        for rank in pair:
            best[rank] = max(best[rank], rate)
    return statistics.median_high(best.values())


def slow_pairs(name, rates, hosts, least, usual):
    """Return findings: ranks all of whose pairs are below the least bandwidth, and other pairs."""
    slow = {pair for pair, rate in rates.items() if rate < least}
    fine = {rank for pair in set(rates) - slow for rank in pair}
    blamed = sorted({rank for pair in slow for rank in pair} - fine)
    make = functools.partial(finding_of, name, NO_GO)
    advice = "see the link's speed and errors: ethtool, ip -s link, ibstat; drain the host"
    findings = []
    if blamed:
        value = max(rate for pair, rate in rates.items() if set(pair) & set(blamed))
        items = [Item(rank, hosts[rank], None, None) for rank in blamed]
        findings.append(make(items, f"at most {value:.3g} GB/s with any other", usual, advice))
    for pair in sorted(slow):
        if not set(pair) & set(blamed):
            value = f"{rates[pair]:.3g} GB/s"
            findings.append(make(pair_items(pair, hosts), value, usual, advice))
    return findings


def pair_items(pair, hosts):
    sender, receiver = pair
    text = f"from rank {sender} on {hosts[sender]} to rank {receiver} on {hosts[receiver]}"
    return [Item(None, hosts[receiver], text, None)]


# ---- report ----------------------------------------------------------------------------------


def report(args, reports, more=()):
    """Print the table, the findings and the verdict; write --json; return the exit status."""
    rows = compare(reports, args)
    if more:  # of what was never measured, nothing need be said
        rows = [row for row in rows if row["level"] != UNKNOWN]
        rows += [with_findings(row, row["findings"]) for row in more]
    findings = [finding for row in rows for finding in row["findings"]]
    stopping = [finding for finding in findings if finding["level"] == NO_GO]
    show_table(rows)
    for finding in sorted(findings, key=lambda finding: finding["level"] != NO_GO)[:50]:
        print(line_of(finding))
    print(verdict_of(rows, known_ranks(reports)))
    sys.stdout.flush()
    if args.json:
        verdict = "no-go" if stopping else "go"
        whole = {"verdict": verdict, "findings": findings, "rows": rows, "ranks": reports}
        try:
            Path(args.json).write_text(json.dumps(whole, indent=1))
        except OSError as error:
            say_error(f"--json {args.json}: {error.strerror}")
    return 1 if stopping else 0


def line_of(finding):
    """Return a finding as one line."""
    known = finding["usual"] and not finding["usual"].startswith(finding["value"])
    usual = f" (most: {finding['usual']})" if known else ""
    advice = f": {finding['advice']}" if finding["advice"] else ""
    level, check, place = finding["level"], finding["check"], finding["where"]
    return f"{level:8} {check}: {place}: {finding['value']}{usual}{advice}"


def verdict_of(rows, reports):
    """Return the last line: go or no-go, and which checks say so."""
    names = {level: [row["check"] for row in rows if row["level"] == level]
             for level in (NO_GO, WARNING, UNKNOWN)}  # fmt: skip
    text = "no-go: " + ", ".join(names[NO_GO]) if names[NO_GO] else "go"
    hosts = len({told["host"] for told in reports})
    text += f"; {len(rows)} checks of {len(reports)} ranks on {hosts} host{'s' * (hosts != 1)}"
    text += f"; warnings: {', '.join(names[WARNING])}" if names[WARNING] else ""
    return text + (f"; not known: {', '.join(names[UNKNOWN])}" if names[UNKNOWN] else "")


def cells_of(row):
    """Return a row's cells, so short that a line of the table is one."""
    differs = "; ".join(row["differs"][:3]) + (" ..." if len(row["differs"]) > 3 else "")
    most, differs = (
        textwrap.shorten(text, 50, placeholder=" ...") for text in (row["most"], differs)
    )
    return row["check"], "" if row["level"] == OK else row["level"], most, differs


def show_table(rows):
    """Print a row per check: with rich on a terminal that has it, or else as plain text."""
    cells = [cells_of(row) for row in rows]
    heads = ("check", "", "most have", "but not all")
    with suppress(ImportError):
        if sys.stdout.isatty():
            from rich.console import Console
            from rich.markup import escape
            from rich.table import Table

            table = Table(*heads)
            colours = {NO_GO: "red", WARNING: "yellow", UNKNOWN: "dim"}
            for cell in cells:
                table.add_row(*map(escape, cell), style=colours.get(cell[1]))
            return Console().print(table)
    widths = [max(len(cell[column]) for cell in [heads, *cells]) for column in range(3)]
    for cell in [heads, *cells]:
        line = "  ".join(text.ljust(width) for text, width in zip(cell, [*widths, 0], strict=True))
        print(line.rstrip())


def say_error(message):
    print(f"{Path(__file__).name}: error: {message}", file=sys.stderr, flush=True)


def first_line(error):
    """Return the first line of what an error says, without the place in torch's sources."""
    text = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return re.sub(r"^\[[^]]*\] ", "", text)


# ---- main ------------------------------------------------------------------------------------


def examine(args, me, watch):
    """Take all ranks through all phases; return the exit status, the same on each."""
    me.hosts = consult(me, "host", me.host)
    watch.enter("facts")
    facts = read_facts(args, me) | {"many_hosts": len(set(me.hosts)) > 1}
    tell(me, facts=facts)
    watch.enter("names and --save-dir")
    tell(me, **read_node(args, me))
    watch.enter("process group")
    device = join_group(args, me)
    agreed(0)
    tell(me, gpu_used=read_used(device), clocks=read_clocks())
    watch.enter("matmul")
    matmul = functools.partial(until_steady, me, "matmul", lambda: matmul_rates(device), some_slow)
    tell(me, matmul=while_hot(facts.get("gpus"), matmul), gpus=facts.get("gpus"))
    if me.world_size > 1:
        watch.enter("all-reduce and all-gather")
        tell(me, collective=collective_rates(me, device))
        watch.enter("pairs")
        suspect = functools.partial(some_slow_pair, args.device)
        tell(me, pairs=until_steady(me, "pairs", lambda: pair_rates(me, device), suspect))
    watch.enter("report")
    consult(me, "measured", "", len)
    status = report(args, collect(me.store, me.world_size)) if me.rank == 0 else None
    return consult(me, "status", status, lambda all_statuses: all_statuses[0])


def some_slow(rates):
    """Return whether a rank's rates are out of line, so that all should measure again."""
    reports = [{"matmul": each, "rank": 0, "host": ""} for each in rates]
    found = [check for check in measured_checks() if check.bad and check.of == "rank"]
    return any(row_of(check, items_for(check, reports))["findings"] for check in found)


def some_slow_pair(device, rates):
    """Return whether pairs are out of line, so that all should measure again."""
    reports = [{"rank": rank, "host": "", "pairs": pairs} for rank, pairs in enumerate(rates)]
    any_rate = argparse.Namespace(network_gbs=0.0, device=device)
    return any(row["findings"] for row in pair_rows(any_rate, reports))


def main():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # Watch takes them
    adopt_launcher()
    args = parse_args()
    if args.hosts and "PREFLIGHT_HOSTS" not in os.environ:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
        sys.exit(launch(args, sys.argv[1:]))
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        sys.exit(1)  # torchrun starts again what has ended in no-go: it would again
    me = connect(args)
    watch = Watch(args, me)
    try:
        status = examine(args, me, watch)
    except Exception as error:
        watch.failed(error)
        status = 1
    watch.over = True
    end(me, status)


def end(me, status):
    """End this rank; rank 0, whose store the others read to the end, as the last."""
    me.store.add("ended", 1)
    patience = time.monotonic() + 5
    while me.rank == 0 and me.store.add("ended", 0) < me.world_size:
        if time.monotonic() > patience:
            break
        time.sleep(0.02)
    with suppress(RuntimeError, ValueError, AssertionError):
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(status)  # gloo's threads may abort a process that ends in the usual way


if __name__ == "__main__":
    main()
