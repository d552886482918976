#!/usr/bin/env python3
"""Say what is wrong with a run that hangs, has died or is slow: what, which rank, which host.

Here:     python diagnosing-errors/whats_wrong.py outputs/diagnosing-errors
By ssh:   python diagnosing-errors/whats_wrong.py outputs/my-run --hosts hosts.txt
Slurm:    python diagnosing-errors/whats_wrong.py outputs/my-run --slurm-job 123

It reads what the ranks write to the run's folder, asks them for their stacks, and looks at their
processes on each host; nothing has to be installed there but python3. It stops nothing: py-spy
reads the memory of a process that goes on running (--nonblocking).
Exit status: 0 nothing found, 1 a fault was found, 2 wrong arguments, 3 cannot tell.
"""

from __future__ import annotations  # python3 on a host may be an old one

import argparse
import contextlib
import functools
import json
import linecache
import math
import os
import re
import shlex
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import time
import uuid
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

README = "diagnosing-errors/README.md"
KINDS = {  # what there is to find, and the section of the README about it
    "healthy": "healthy",
    "slow-but-healthy": "slow-but-healthy",
    "finished": "finished",
    "interrupted": "interrupted",
    "crash": "crash",
    "segfault": "segfault",
    "killed": "killed",
    "hang-in-data": "hang-data-loading",
    "skipped-collective": "skipped-collective",
    "mismatched-collective": "mismatched-collective",
    "straggler": "straggler",
    "stopped-process": "stopped-process",
    "not-finite": "not-finite",
    "replicas-differ": "replicas-differ",
    "same-data": "same-data",
    "loss-spike": "loss-spike",
    "device-out-of-memory": "device-out-of-memory",
    "host-memory-leak": "host-memory-leak",
    "too-many-open-files": "too-many-open-files",
    "disk-full": "disk-full",
    "corrupt-checkpoint": "corrupt-checkpoint",
    "network": "network",
    "rendezvous": "rendezvous",
    "host-unreachable": "host-unreachable",
    "unknown": "cannot-tell",
}
NO_FAULT = ("healthy", "slow-but-healthy", "finished", "interrupted")
DONE = ("finished", "stopped")
STALE = 10  # seconds without a heartbeat, of which there is one every 2, that make a rank silent
CLUES = {  # what errors say, in the order in which to look
    "not-finite": r"not finite",
    "replicas-differ": r"weights\b.*\bdiffer",
    "same-data": r"the same data",
    "device-out-of-memory": r"CUDA out of memory|OutOfMemoryError|_ALLOC_FAILED"
    r"|DefaultCPUAllocator: can't allocate",  # for training on a CPU, that is the device
    "too-many-open-files": r"[Tt]oo many open files|EMFILE",
    "disk-full": r"No space left on device|[Dd]isk quota exceeded|ENOSPC",
    "host-memory-leak": r"Cannot allocate memory|\bMemoryError|bad_alloc",
    "mismatched-collective": r"Detected mismatch between collectives|op\.preamble\.length",
    "rendezvous": r"cannot meet the other ranks|Unable to find address for|RendezvousTimeout"
    r"|client socket has (failed|timed out)|C10d store has failed|[Nn]o socket interface",
    "corrupt-checkpoint": r"no checkpoint in \S+ can be read|PytorchStreamReader failed",
    "interrupted": r"KeyboardInterrupt|^interrupted|SystemExit: 130",
}
# Who says this suffers from what happened elsewhere.
VICTIM = (
    r"[Cc]onnection (closed|reset|refused)|Socket Timeout|[Tt]imed out|[Tt]imeout|Broken pipe"
    r"|NCCL.*(abort|remote error|unhandled system error|communicator)|DistBackendError|Read error"
    r"|launcher .*is gone|^SystemExit|SIGTERM|closed by remote|pair closure|watchdog"
)
RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
MEETING = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LAUNCHERS = r"torchrun|torch\.distributed\.(run|launch)|deepspeed|accelerate"


# ---- command line ----------------------------------------------------------------------------


def parse_args():
    """Return the arguments, checked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.error = fail
    add = parser.add_argument
    add("run", type=Path, help="the run's folder, such as outputs/my-run")
    add("--hosts", type=Path, help="a file that names a host per line, each reached over ssh")
    add("--slurm-job", help="look on the hosts of this job, by srun --overlap, or else by ssh")
    add("--log", type=Path, action="append", default=[], help="what torchrun printed, in a file")
    add("--error-files", type=Path, default=os.environ.get("TORCHELASTIC_ERROR_FILE"),
        help="torchrun's error.json, or a folder with such files in it")  # fmt: skip
    add("--patience", type=float, default=8.0, help="seconds that a host has to answer")
    add("--json", action="store_true", help="print the verdict and what it rests on as JSON")
    add("--collect", action="store_true", help=argparse.SUPPRESS)  # what this runs on each host
    args = parser.parse_args()
    if args.collect:
        return args
    if not args.run.is_dir():
        fail(f"{args.run} is no folder; give that of a run, such as outputs/diagnosing-errors")
    for path in [*args.log, *filter(None, [args.hosts])]:
        if not path.is_file():
            fail(f"there is no file {path}")
    args.shown, args.run = str(args.run), args.run.resolve()
    return args


def fail(message):
    """Stop because of what the user gave us: one line on stderr, exit status 2."""
    print(f"whats_wrong.py: error: {message}", file=sys.stderr)
    sys.exit(2)


# ---- on each host: its processes ---------------------------------------------------------------
# This part also runs on hosts whose python3 is older than the one that trains.


def collect(run):
    """Return what this host shows of a run: its workers, kernel, network, as a dictionary."""
    seen = find_processes(run)
    pids = seen["workers"]
    before = {pid: (cpu_seconds(pid), waiting_sockets(pid)) for pid in pids}
    with ThreadPoolExecutor(4) as pool:
        stacks = dict(pool.map(lambda pid: (pid, stack_of(pid)), pids or seen["launchers"]))
    time.sleep(0.5)
    workers = []
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):  # it may end meanwhile
            workers.append(worker_facts(pid, stacks[pid], *before[pid]))
    interfaces = [name for _, name in socket.if_nameindex()]
    return {
        "host": socket.gethostname(),
        "workers": workers,
        "launchers": [stacks.get(pid, {"frames": []}) for pid in seen["launchers"]],
        "hidden": seen["hidden"],
        "interfaces": {x: read(f"/sys/class/net/{x}/operstate").strip() for x in interfaces},
        "kernel": kernel_messages(),
        "oom_kills": sum(map(oom_kills, {cgroup_of(pid) for pid in [*pids, "self"]})),
    }


def read(path):
    """Return a file's text, or an empty one if it cannot be read."""
    with contextlib.suppress(OSError):
        return Path(path).read_bytes().decode(errors="replace")
    return ""


def find_processes(run):
    """Return the pids of the run's workers and launchers, and how many cannot be looked into."""
    workers, launchers, hidden = {}, [], 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        words = read(f"/proc/{pid}/cmdline").split("\0")[:-1]
        script = script_in(words)
        if script is None or int(pid) == os.getpid():
            continue
        try:
            environment, stat = environment_of(pid), stat_of(pid)
            if belongs(words, script, environment, os.readlink(f"/proc/{pid}/cwd"), run):
                if re.search(LAUNCHERS, " ".join(words[:script])):
                    launchers.append(int(pid))
                else:
                    workers[int(pid)] = int(stat[1])
        except PermissionError:
            hidden += 1
        except (OSError, IndexError):
            pass  # it has ended
    # What a worker forks to load or tokenize data has the same command line and environment.
    workers = [pid for pid, parent in workers.items() if parent not in workers]
    return {"workers": workers, "launchers": launchers, "hidden": hidden}


def script_in(words):
    """Return where in a command line of python the script that trains is, or None."""
    if not words or not os.path.basename(words[0]).startswith("python"):
        return None
    scripts = (at for at, word in enumerate(words) if at and word.endswith(".py"))
    first = next(scripts, None)
    own = first is None or "whats_wrong" in words[first] or "-c" in words[1:first]
    return None if own else first


def belongs(words, script, environment, cwd, run):
    """Return whether a process trains into this run's folder, as far as its arguments tell."""
    if rank_in(environment) is None and not os.path.basename(words[script]).startswith("train"):
        return False
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, fromfile_prefix_chars="@", exit_on_error=False
    )
    parser.convert_arg_line_to_args = lambda line: shlex.split(line, comments=True)
    parser.add_argument("-e", "--experiment-name")
    parser.add_argument("--save-dir", default="outputs")
    files = [f"@{os.path.join(cwd, w[1:])}" if w[:1] == "@" else w for w in words[script + 1 :]]
    try:
        known, _ = parser.parse_known_args(files)
    except (SystemExit, argparse.ArgumentError):
        return False
    chapter = Path(cwd, words[script]).resolve().parent.name
    name = known.experiment_name or chapter
    return Path(cwd, known.save_dir, name).resolve() == Path(run).resolve()


def environment_of(pid):
    """Return a process's environment; raises PermissionError if it is another user's."""
    text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)


def rank_in(environment):
    """Return the rank that a launcher set, or None."""
    values = [environment[name] for name in RANK_NAMES if environment.get(name, "").isdigit()]
    return int(values[0]) if values else None


def stat_of(pid):
    """Return the fields of /proc/PID/stat from the state on, or nothing if it is gone."""
    return read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def cpu_seconds(pid):
    """Return the processor seconds that a process has taken."""
    stat = stat_of(pid)
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK") if stat else 0.0


def worker_facts(pid, stack, cpu_before, sockets_before):
    """Return what /proc and py-spy say of one worker."""
    stat, status = stat_of(pid), read(f"/proc/{pid}/status")
    environment = environment_of(pid)
    limit = re.search(r"Max open files +(\d+)", read(f"/proc/{pid}/limits"))
    sockets = waiting_sockets(pid)
    age = float(read("/proc/uptime").split()[0]) - int(stat[19]) / os.sysconf("SC_CLK_TCK")
    return {
        "rank": rank_in(environment) or 0,
        "pid": pid,
        "pid_inside": int((re.findall(r"NSpid:.*?(\d+)\n", status) or [pid])[0]),
        "state": stat[0],
        "cpu": cpu_seconds(pid) - cpu_before,
        "age": age,
        "files_limit": int(limit[1]) if limit else None,
        "stuck_sockets": [sockets[key] for key in sockets if key in sockets_before],
        "environment": {name: environment.get(name) for name in MEETING},
        **stack,
    }


def stack_of(pid):
    """Return the main thread's frames (file, line, function, ""), outermost first, or why not."""
    folders = [os.path.dirname(read(f"/proc/{pid}/cmdline").split("\0")[0])]
    folders += [os.path.dirname(sys.executable or ""), os.environ.get("PATH", "")]
    spy = shutil.which("py-spy", path=os.pathsep.join(folders))
    if not spy:
        return {"frames": [], "no_stack": "py-spy is not installed"}
    done = limited([spy, "dump", "--json", "--nonblocking", "--pid", str(pid)], 4)
    try:
        threads = json.loads(done[1])
        main = next(one for one in threads if one["os_thread_id"] == pid or len(threads) == 1)
        frames = [[f["filename"], f["line"], f["name"], ""] for f in reversed(main["frames"])]
        return {"frames": frames, "no_stack": None}
    except (ValueError, KeyError, TypeError, StopIteration):
        text = done[2].strip().splitlines() or ["no answer"]
        return {"frames": [], "no_stack": f"py-spy: {text[0]}"}


def waiting_sockets(pid):
    """Return TCP connections with bytes that the other end has not taken: key -> facts."""
    owned = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                owned.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    found = {}
    for line in (read(f"/proc/{pid}/net/tcp") + read(f"/proc/{pid}/net/tcp6")).splitlines():
        words = line.split()
        if len(words) > 9 and words[3] == "01" and f"socket:[{words[9]}]" in owned:
            sent, again = int(words[4].split(":")[0], 16), int(words[6], 16)
            if sent:
                fact = {"from": address(words[1]), "to": address(words[2])}
                found[words[9]] = {**fact, "bytes": sent, "again": again}
    return found


def address(text):
    """Return the IP address in a line of /proc/net/tcp or tcp6."""
    raw = bytes.fromhex(text.split(":")[0])
    if len(raw) == 4:
        return socket.inet_ntop(socket.AF_INET, raw[::-1])
    raw = struct.pack(">4I", *struct.unpack("<4I", raw))
    return socket.inet_ntop(socket.AF_INET6, raw).replace("::ffff:", "")


def kernel_messages():
    """Return [seconds ago, message] of the kernel on kills, crashes, GPUs and links, or None."""
    wanted = re.compile(
        r"out of memory|oom.kill|Killed process|NVRM|Xid|segfault|I/O error|Link is Down"
        r"|not responding|hung task|blocked for more than",
        re.IGNORECASE,
    )
    uptime = read("/proc/uptime").split()
    commands = ["dmesg"], ["journalctl", "-k", "-b", "-o", "short-monotonic", "-n", "3000"]
    for status, text, _ in (limited(command, 3) for command in commands):
        stamped = [re.match(r"(?:<\d+>)?\[ *(\d+\.\d+)\] *(.*)", x) for x in text.splitlines()]
        if status == 0 and any(stamped):
            found = [(float(uptime[0]) - float(x[1]), x[2][:300]) for x in stamped if x]
            return [each for each in found if wanted.search(each[1])][-50:]
    return None


def cgroup_of(pid):
    """Return a process's control group of the one hierarchy that version 2 has, or its memory."""
    for line in reversed(read(f"/proc/{pid}/cgroup").splitlines()):
        if line.startswith("0::") or ":memory:" in line:
            return line.split(":", 2)[2]
    return "/"


def oom_kills(cgroup):
    """Return how many processes of a control group the kernel has killed for their memory."""
    text = read(f"/sys/fs/cgroup{cgroup}/memory.events")
    text += read(f"/sys/fs/cgroup/memory{cgroup}/memory.oom_control")
    return sum(map(int, re.findall(r"^oom_kill (\d+)", text, re.MULTILINE)))


def limited(command, seconds, text=None):
    """Run a command for so many seconds at most; return its status, output and errors."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        return 127, "", str(error)
    text = text.encode() if text else None
    for patience, stop in ((seconds, process.terminate), (1, process.kill), (1, None)):
        try:
            out, err = (
                stream.decode(errors="replace") for stream in process.communicate(text, patience)
            )
            return (process.returncode, out, err) if stop == process.terminate else (
                124, out, f"no answer within {seconds:g} s")  # fmt: skip
        except subprocess.TimeoutExpired:
            text = None  # it has been sent
            if stop:
                stop()
    return 124, "", "no answer, and what asks cannot be ended"


# ---- from here: all hosts ----------------------------------------------------------------------


def hosts_of(args):
    """Return the hosts to look on, as (name, command before `python3 -`), and a note or None."""
    if args.hosts:
        lines = (line.partition("#")[0].split() for line in args.hosts.read_text().splitlines())
        return [(words[0], by_ssh(words[0])) for words in lines if words], None
    if not args.slurm_job:
        return [(socket.gethostname(), None)], None
    query = ["squeue", "--noheader", "--format=%N", f"--jobs={args.slurm_job}"]
    nodes = limited(query, 5)[1].strip()
    over = not nodes
    if over:  # it is over, but Slurm remembers it for some minutes
        text = limited(["scontrol", "--oneliner", "show", "job", args.slurm_job], 5)[1]
        nodes = next(iter(re.findall(r" NodeList=([^\s(]+)", text)), "")
    names = limited(["scontrol", "show", "hostnames", nodes], 5)[1].split() if nodes else []
    if not names or nodes == "(null)":
        fail(f"--slurm-job {args.slurm_job}: Slurm knows no hosts of it")
    srun = ["srun", f"--jobid={args.slurm_job}", "--overlap", "--nodes=1", "--ntasks=1"]
    how = {name: by_ssh(name) if over else [*srun, f"--nodelist={name}"] for name in names}
    return list(how.items()), "the job is over: its hosts were asked over ssh" if over else None


def by_ssh(host):
    """Return the start of a command that runs on another host, and never asks for a password."""
    return ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=4", host]


def ask_host(host, reach, run, patience):
    """Return what a host shows of the run, or {"error": why it does not answer}."""
    if reach is None or host in (socket.gethostname(), "localhost"):
        return collect(run)
    words = [*reach, "python3", "-", "--collect", shlex.quote(str(run))]
    if reach[0] == "srun":
        words[-1] = str(run)  # no shell reads it there
    source = Path(__file__).read_text()
    status, out, err = limited(words, patience, source)
    if status and reach[0] == "srun" and status != 124:
        status, out, err = limited([*by_ssh(host), *words[-4:]], patience, source)
    try:
        return json.loads(out)
    except ValueError:
        fact = {"error": (err.strip().splitlines() or [f"status {status}"])[-1][:200]}
        with contextlib.suppress(OSError):
            fact["address"] = socket.gethostbyname(host)
        return fact


def look_at_hosts(args, hosts):
    """Return what each host shows, from name to facts; all are asked at once."""
    with ThreadPoolExecutor(64) as pool:
        ask = functools.partial(ask_host, run=args.run, patience=args.patience)
        facts = list(pool.map(lambda host: ask(*host), hosts))
    return {host: fact for (host, _), fact in zip(hosts, facts, strict=True)}


# ---- the run's folder --------------------------------------------------------------------------


def clock_of(folder):
    """Return the time by the clock of the file system that has the folder, and if it is writable.

    The clocks of hosts differ, and the times of files on one file system are of one clock.
    """
    probe = folder / f".now-{uuid.uuid4().hex}"
    try:
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return now, True
    except OSError:
        return time.time(), False


def read_dated(path):
    """Return a file's bytes and the time of its last change; (None, 0) if it cannot be read."""
    try:
        with open(path, "rb") as file:  # opening asks NFS for what is new
            return file.read(20_000_000), os.fstat(file.fileno()).st_mtime
    except OSError:
        return None, 0.0


def read_json(path, now):
    """Return (a dictionary or None, its age in seconds or None); garbage is none."""
    raw, written = read_dated(path)
    try:
        found = json.loads(raw.decode(errors="replace")) if raw else None
    except (ValueError, RecursionError):
        found = None
    return (found if isinstance(found, dict) else None), (now - written if raw else None)


def ask_for_dumps(run, patience=5.0):
    """Ask the ranks that live for their stacks; return a note if that is not possible."""
    folder = run / "ranks"
    if not folder.is_dir():
        return None
    now, _ = clock_of(folder)
    living = {name[:-5] for name, age in ages(folder, now).items()
              if re.fullmatch(r"\d+\.json", name) and age < STALE}  # fmt: skip
    if not living:
        return None
    try:
        (folder / "dump").touch()
        asked = (folder / "dump").stat().st_mtime
    except OSError as error:
        return f"cannot ask the ranks for their stacks: {error}; as another user: touch that file"
    until = time.monotonic() + patience
    while living and time.monotonic() < until:
        time.sleep(0.2)
        listed = ages(folder, 0)
        living = {name for name in living if -listed.get(f"{name}.dump.json", 0) < asked}
    return None


def ages(folder, now):
    """Return the seconds since the last change of each file in a folder."""
    found = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                found[entry.name] = now - entry.stat().st_mtime
    return found


def read_run(run):
    """Return what lies in the run's folder, as a dictionary."""
    folder = run / "ranks" if (run / "ranks").is_dir() else run
    now, writable = clock_of(folder)
    ranks = {}
    for path in sorted((run / "ranks").glob("[0-9]*.json")):
        number = path.name.split(".")[0]
        if path.name == f"{number}.json" and number.isdigit():
            beat, age = read_json(path, now)
            dump, dump_age = read_json(path.with_suffix(".dump.json"), now)
            ranks[int(number)] = {"beat": beat, "age": age, "dump": dump, "dump_age": dump_age,
                                  "crash": read(path.with_suffix(".crash"))[:5000]}  # fmt: skip
    rows, rows_age = read_rows(run, now)
    return {
        "ranks": ranks,
        "rows": rows,
        "rows_age": rows_age,
        "checkpoints": checkpoints_of(run, now),
        "exported": (run / "model").is_dir(),
        "disk": disk_of(run) | {"writable": writable},
        "logs": {path.name: tail(path, 20_000) for path in sorted(run.glob("logs/*.log"))[:64]},
    }


def read_rows(run, now):
    """Return the last rows of metrics.jsonl, and the seconds since it last changed."""
    raw, written = read_dated(run / "metrics.jsonl")
    rows = []
    for line in (raw or b"")[-200_000:].decode(errors="replace").splitlines()[-200:]:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            rows += [row] if isinstance(row, dict) else []
    return rows, now - written if raw is not None else None


def checkpoints_of(run, now):
    """Return the checkpoints by name, and the seconds since each was made or renamed."""
    found = {}
    for path in (run / "checkpoints").glob("step-*"):
        with contextlib.suppress(OSError):
            found[path.name] = now - path.stat().st_ctime
    return found


def disk_of(run):
    """Return how much of the run's file system is free."""
    try:
        disk = os.statvfs(run)
        return {"free": disk.f_bavail * disk.f_frsize, "files_free": disk.f_favail if disk.f_files
                else None}  # fmt: skip
    except OSError:
        return {"free": None, "files_free": None}


def tail(path, size=200_000):
    """Return the end of a text file."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def read_error_files(where):
    """Return what torchrun's error files say: [the failed process's message, ...]."""
    found = []
    paths = sorted(Path(where).rglob("error.json")) if where and Path(where).is_dir() else [where]
    for path in filter(None, paths):
        told = (read_json(path, 0)[0] or {}).get("message")
        told = told.get("message") if isinstance(told, dict) else told
        found += [str(told)] if told else []
    return found


def gather(args):
    """Return all facts: of the run's folder, its hosts and what was given."""
    hosts, note = hosts_of(args)
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look_at_hosts, args, hosts)
        notes = [note, ask_for_dumps(args.run)]
        facts = {"run": args.shown, "hosts": looking.result(), "notes": notes}
    text = "\n".join([*map(tail, args.log), *read_error_files(args.error_files)])
    return facts | read_run(args.run) | {"text": text}


# ---- from facts to ranks -----------------------------------------------------------------------


@dataclass
class Rank:
    """What is known of one rank; times are seconds ago, None is unknown."""

    rank: int
    host: str = "?"
    pid: int | None = None
    world_size: int | None = None
    phase: str | None = None
    step: int = 0
    age: float | None = None  # of the heartbeat
    since: float | None = None  # the beginning of the phase
    started: float | None = None
    stepped: bool = False  # whether any step ended
    times: dict = field(default_factory=dict)  # step, data, local: mean seconds of a step
    use: dict = field(default_factory=dict)  # memory, memory_first, files, files_limit
    error: str = ""
    warning: str = ""
    losses: list = field(default_factory=list)  # this rank's own, of the last steps
    crash: str = ""
    state: str = "unseen"
    frames: list = field(default_factory=list)
    groups: dict = field(default_factory=dict)  # of processes: name -> Group
    worker: dict = field(default_factory=dict)

    @property
    def lives(self):
        return self.state not in ("gone", "host down", "silent", "ended")


@dataclass
class Group:
    """What a rank did in one process group; entries: sequence number -> (what, where, pending)."""

    last: int
    patient: bool  # a wait of days, in which there is always something pending
    entries: dict


def number(value):
    """Return a value if it is a finite number, else None."""
    fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if fine else None


def ranks_of(facts):
    """Return the ranks of the run's last start, and notes on what was left out."""
    workers = {one["rank"]: (one, fact["host"]) for fact in facts["hosts"].values()
               for one in fact.get("workers", ())}  # fmt: skip
    ranks, garbage = {}, []
    for rank, files in facts["ranks"].items():
        if not files["beat"] or number(files["beat"].get("time")) is None:
            garbage.append(int(rank))
        else:
            ranks[int(rank)] = rank_of_beat(int(rank), files)
    for rank, (worker, host) in workers.items():
        known = ranks.get(rank)
        if known is None or (
            known.pid not in (worker["pid"], worker["pid_inside"]) and known.age > STALE
        ):  # its heartbeat is of an earlier start, and of this one there is none yet
            size = worker["environment"].get("WORLD_SIZE") or "0"
            ranks[rank] = Rank(rank, host, worker["pid"], int(size) or None)
            ranks[rank].started = worker["age"]
        ranks[rank].worker = worker
    reached = {fact["host"] for fact in facts["hosts"].values() if "workers" in fact}
    down = {name for name, fact in facts["hosts"].items() if "error" in fact}
    for one in ranks.values():
        add_process(one, reached, down)
    kept, notes = without_leftovers(ranks)
    if garbage:
        notes.append(f"the heartbeats of ranks {spans(garbage)} cannot be read")
    return kept, notes


def rank_of_beat(rank, files):
    """Return what a rank's own files say."""
    beat, age = files["beat"], files["age"]
    ago = lambda key: None if number(beat.get(key)) is None else beat["time"] - beat[key] + age  # noqa: E731
    times = {name: number(beat.get(f"{name}_seconds")) for name in ("step", "data", "local")}
    one = Rank(rank, str(beat.get("host")), number(beat.get("pid")), number(beat.get("world_size")))
    one.phase, one.step = str(beat.get("phase")), number(beat.get("step")) or 0
    one.age, one.since, one.started = age, ago("since"), ago("started")
    one.stepped, one.times = number(beat.get("step_ended")) is not None, times
    one.error = str(beat.get("error") or "")
    one.crash = files["crash"]
    names = {"memory": "host_memory_gib", "memory_first": "host_memory_gib_first"}
    names["files"] = "open_files"
    one.use = {name: number(beat.get(key)) for name, key in names.items()}
    dump = files["dump"] or {}
    one.warning = str(beat.get("warning") or "")
    one.losses = [loss for loss in beat.get("losses") or () if isinstance(loss, float)]
    dumped = number(files["dump_age"])  # since this start, and not by a run that went on and ended
    if dumped is not None and dumped < (one.started or 1e18) + 5 and one.phase not in DONE:
        one.groups = groups_of(dump.get("collectives"))
        if dump.get("reason") != "failed":  # then the traceback tells where
            one.frames = main_frames(dump)
    return one


def main_frames(dump):
    """Return the main thread's frames in a dump, outermost first; none if there is garbage."""
    stacks = dump.get("stacks")
    for stack in stacks if isinstance(stacks, list) else ():
        if isinstance(stack, dict) and stack.get("thread") == "MainThread":
            frames = stack.get("frames") or ()
            return [list(f) for f in frames if isinstance(f, list | tuple) and len(f) == 4][-400:]
    return []


def groups_of(collectives):
    """Return what a flight recorder's dictionary says, by process group; nothing for garbage."""
    found = {}
    try:
        status = collectives["pg_status"]
        for entry in collectives["entries"]:
            if entry.get("is_p2p"):
                continue
            name, seq = str(entry["process_group"][0]), int(entry["collective_seq_id"])
            patient = (entry.get("timeout_ms") or 0) > 24 * 3600 * 1000
            group = found.setdefault(name, Group(0, patient, {}))
            last = status.get(str(entry["pg_id"]), {}).get("last_enqueued_collective", 0)
            group.last = max(group.last, last, seq)
            pending = not entry.get("retired") and entry.get("state") != "completed"
            group.entries[seq] = (what_of(entry), where_of(entry.get("frames")), pending)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return {}
    return found


def what_of(entry):
    """Return a collective's operation and its sizes, where all ranks must have the same."""
    op = bare_name(entry["profiling_name"])
    if op.startswith(("gather", "scatter", "all_to_all", "alltoall")):
        return (op, "")
    return (op, f"{entry.get('input_sizes')} {' '.join(entry.get('input_dtypes') or ())}")


@functools.lru_cache(maxsize=1000)
def bare_name(op):
    """Return a collective's name without that of its backend."""
    return op.rpartition(":")[2]


def where_of(frames):
    """Return the (file, line, function) of the training code in frames, innermost first."""
    for frame in frames or ():
        if is_own(frame["filename"]):
            return (frame["filename"], frame["line"], frame["name"])
    return None


@functools.lru_cache(maxsize=10_000)
def is_own(filename):
    """Return whether a file is of the training code, not of Python or a package."""
    return not re.search(r"/(site|dist)-packages/|/lib/python3|^<|/torch/csrc", filename)


def add_process(one, reached, down):
    """Add what a rank's host shows: whether its process is there, its state, its stack."""
    worker, stale = one.worker, one.age is not None and one.age > STALE
    if one.phase in (*DONE, "failed"):
        one.state = "ended"
    elif worker and one.pid in (worker["pid"], worker["pid_inside"]):
        names = {"T": "stopped", "t": "traced", "D": "disk wait", "Z": "gone"}
        one.state = names.get(worker["state"], "busy" if worker["cpu"] > 0.4 else "waiting")
        one.frames = one.frames or worker["frames"]
        one.use["files_limit"] = worker["files_limit"]
    elif not stale:
        one.state = "alive"
    elif any(same_host(one.host, name) for name in down):
        one.state = "host down"
    else:
        one.state = "gone" if one.host in reached else "silent"


def same_host(one, other):
    """Return whether two names, with or without a domain, are of one host."""
    return one.split(".")[0] == other.split(".")[0]


def without_leftovers(ranks):
    """Return the ranks without those of an earlier start, whose files still lie there."""
    dated = [one for one in ranks.values() if one.started is not None]
    if not dated:
        return dict(sorted(ranks.items())), []
    newest = min(dated, key=lambda one: one.started)
    old = {
        one.rank
        for one in dated
        if not one.worker and one.age > STALE
        and (one.age > newest.started + 30 or one.rank >= (newest.world_size or 1e9))
    }  # fmt: skip
    notes = [f"ranks {spans(old)}: files of an earlier start, ignored"] if old else []
    return {rank: one for rank, one in sorted(ranks.items()) if rank not in old}, notes


def spans(numbers):
    """Return numbers as a short list: 0-3,5."""
    numbers, parts = sorted(numbers), []
    for value in numbers:
        if parts and value == parts[-1][1] + 1:
            parts[-1][1] = value
        else:
            parts.append([value, value])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def own_frame(one):
    """Return the innermost frame of the training code on a rank's main thread, or None."""
    return next((frame for frame in reversed(one.frames) if is_own(frame[0])), None)


def place(frame):
    """Return a frame as text, with its source line where that is known."""
    if not frame:
        return "an unknown line"
    source = (frame[3] if len(frame) > 3 else "") or linecache.getline(frame[0], frame[1] or 0)
    text = f"{os.path.basename(frame[0])}:{frame[1]} {frame[2]}"
    return f"{text}: {source.strip()[:80]}" if source.strip() else text


# ---- from ranks to findings --------------------------------------------------------------------


@dataclass
class Finding:
    """One thing that is wrong, or that nothing is; `sure`: certain, likely or a guess."""

    kind: str
    ranks: list
    reason: str
    sure: str = "likely"
    hosts: list = field(default_factory=list)


def find(facts, ranks):
    """Return all findings, the one that explains the others first."""
    everyone = list(ranks.values())
    deaths = died(facts, everyone)
    stuck = [] if deaths else hung(facts, everyone)
    found = deaths + stuck + unreachable(facts, everyone)
    found += found_by([warned, leaks, many_files, full_disk], facts, everyone)
    found += [] if deaths or stuck else slowed(facts, everyone)
    found += found_by([bad_losses, broken_checkpoints], facts, everyone)
    kinds = [each.kind for each in found]
    found = [each for at, each in enumerate(found) if each.kind not in kinds[:at]]
    for each in found:
        each.hosts = each.hosts or sorted({ranks[r].host for r in each.ranks if r in ranks})
    return found or [at_rest(facts, everyone)]


def kind_of_error(text):
    """Return the kind of fault that an error's text tells of; None if of one elsewhere."""
    said = message_of(text)
    for kind, clue in CLUES.items():
        if re.search(clue, said):
            return kind
    return None if re.search(VICTIM, said) else "crash"


def message_of(text):
    """Return what an error says, without the stack of its traceback."""
    named = list(re.finditer(r"^[\w.]*(Error|Exception|Exit|Interrupt|OutOfMemory)\b", text, re.M))
    return " ".join(text[named[-1].start() :].split() if named else text.split())


def died(facts, everyone):
    """Return what ended the run: the first error that is a rank's own, or the first to vanish."""
    told = exits(facts["text"])
    own = [one for one in everyone if one.error and kind_of_error(one.error)]
    gone = [one for one in everyone if one.state == "gone" and not one.error]
    aborted = [one for one in gone if "Aborted" in one.crash]  # often because of another rank
    vanished = [one for one in gone if one not in aborted]
    # A rank that vanished was last heard of up to two seconds before, one that failed at that time.
    end = lambda one: (one.age or 0) + (3 if one.error or one.crash.strip() else 0)  # noqa: E731
    if aborted and not own and (not vanished or -6 in told.values()):
        return of_aborted(facts, everyone, aborted)
    if not own and not vanished:
        return died_elsewhere(facts, everyone, told)
    first = max(own + vanished, key=end)
    first = next((one for one in vanished if one.rank in told), first)
    if first.error:
        return [of_error(facts, first, own)]
    if told.get(first.rank, 0) > 0 and (said := died_elsewhere(facts, everyone, told)):
        return said  # by its status it ended by itself, and the log says why
    if (leaked := many_files(facts, everyone)) and first.rank in leaked.ranks:
        leaked.reason += "; it ended without a word, as it could not write any"
        return [leaked]
    together = [one for one in vanished if end(first) - end(one) < 4]
    stood = min((one.since or 0) - (one.age or 0) for one in everyone) > limit_of(everyone)
    if len(together) == len(everyone) > 1 and stood:  # somebody has lost patience with a hang
        hang = blocked(facts, [one for one in everyone if one.groups], "had")
        if hang and hang[0].kind != "network":
            return [*hang, of_vanished(facts, together, told)]
    return [of_vanished(facts, together, told)]


def of_aborted(facts, everyone, aborted):
    """Return why the C++ of ranks gave up: gloo does when it is sent more than it waits for."""
    calls = {one.rank: traceback_place(crash_frames(one.crash)) for one in aborted}
    at = "; ".join(f"rank {rank} at {place}" for rank, place in list(calls.items())[:4])
    if "op.preamble.length" not in facts["text"] and "torch/distributed" not in aborted[0].crash:
        return [Finding("crash", list(calls), f"{aborted[0].crash.splitlines()[0]}, {at}")]
    told = f"gloo aborts where it is sent another size than it waits for: {at}"
    witnesses = [one for one in everyone if one.groups and one not in aborted]
    for name in sorted({name for one in witnesses for name in one.groups}):
        members = {one.rank: one.groups[name] for one in witnesses if name in one.groups}
        found = differing(members) or unusual(members)
        if found and not any(group.patient for group in members.values()):
            found.reason += f"; {told}"
            return [found]
    ranks = list(calls) if witnesses and len(calls) == 1 else [one.rank for one in everyone]
    return [Finding("mismatched-collective", ranks, told, "a guess")]


def unusual(members):
    """Return the finding if the last call of a rank is not what followed before, else None."""
    for rank, group in members.items():
        *history, last = [call[:2] for _, call in sorted(group.entries.items())] or [None]
        usual = predicted(history)
        if usual not in (None, last):
            found = of_difference(group.last, {rank: last}, Counter([last, usual]), history)
            return replace(found, ranks=[rank], sure="likely")
    return None


def of_error(facts, first, own):
    """Return the finding of an error that is a rank's own."""
    kind, line = kind_of_error(first.error), message_of(first.error)
    if kind == "crash" and is_full(facts["disk"]):
        kind = "disk-full"
    same = [one.rank for one in own if kind_of_error(one.error) == kind
            and (kind != "crash" or message_of(one.error) == line)]  # fmt: skip
    named = ranks_named(line) if kind in ("not-finite", "replicas-differ", "same-data") else []
    at = traceback_place(first.error)
    reason = line[:300] + (f" (in step {first.step}, at {at})" if at else "")
    return Finding(kind, named or same, reason, "certain")


def ranks_named(line):
    """Return the ranks that a line names, each as rank 3."""
    return sorted({int(text) for text in re.findall(r"\brank (\d+)", line)})


def traceback_place(text):
    """Return the innermost line of training code in a traceback's text."""
    places = re.findall(r'File "([^"]+)", line (\d+),? in (\S+)', text)
    own = [f"{os.path.basename(name)}:{line} {call}" for name, line, call in places if is_own(name)]
    return own[-1] if own else None


def of_vanished(facts, gone, told):
    """Return the finding of ranks that ended without a word."""
    ranks, crashed = [one.rank for one in gone], [one for one in gone if one.crash.strip()]
    last = f"last heard of in {gone[0].phase} of step {gone[0].step}"
    said, codes = kernel_of(facts, gone), {told[rank] for rank in ranks if rank in told}
    if is_full(facts["disk"]) and not crashed and not said and min(codes, default=0) >= 0:
        room = facts["disk"]["free"] / 2**20
        reason = f"it ended without a word, and its disk has {room:.0f} MiB free ({last})"
        return Finding("disk-full", ranks, reason)
    if crashed:
        text, at = crashed[0].crash.strip().splitlines()[0], crash_frames(crashed[0].crash)
        reason = f"{text}, at {traceback_place(at) or 'an unknown line'} ({last})"
        return Finding("segfault", [one.rank for one in crashed], reason, "certain")
    if -11 in codes or "segfault" in said:
        return Finding("segfault", ranks, f"ended by signal 11 (SIGSEGV) ({last})", "certain")
    if said or any(fact.get("oom_kills") for fact in hosts_with(facts, gone)):
        why = f"killed by the kernel, out of memory: {said or 'its control group counts a kill'}"
    elif len(gone) == sum(one.phase is not None for one in gone) > 1:
        why = "all these ended within seconds and left no error: killed from outside, or the host"
    else:
        why = "its process is gone and left no error: killed by signal 9 (SIGKILL)"
    return Finding("killed", ranks, f"{why} ({last})", "certain" if said or codes else "likely")


def crash_frames(text):
    """Return faulthandler's frames of the thread that crashed, or else of the first one made."""
    threads = [part for part in text.split("\n\n") if "most recent call first" in part]
    current = [part for part in threads if "Current thread" in part] or threads[-1:] or [""]
    return "\n".join(reversed(current[0].splitlines()))


def hosts_with(facts, some):
    """Return what the hosts of some ranks show."""
    names = {one.host for one in some}
    return [fact for fact in facts["hosts"].values() if fact.get("host") in names]


def kernel_of(facts, gone):
    """Return what the kernels of these ranks' hosts said of their processes as they ended."""
    pids, ended = {str(one.pid) for one in gone}, max(one.age or 0 for one in gone)
    said = [each for fact in hosts_with(facts, gone) for each in fact.get("kernel") or ()]
    mine = [text for ago, text in said
            if abs(ago - ended) < 15 and pids & set(re.findall(r"\d+", text))]  # fmt: skip
    return mine[-1] if mine else ""


def exits(text):
    """Return the exit codes by rank that torchrun, srun or mpirun printed; signals are negative."""
    root = text.rpartition("Root Cause")[2] if "Root Cause" in text else ""  # the first to fail
    pairs = re.findall(r"rank +: (\d+)[^\n]*\n\s*exitcode +: (-?\d+)", root)
    pairs += re.findall(r"rank (\d+) with PID \d+[^\n]* exited on signal (\d+)", text)
    pairs += [(task, 9) for task in re.findall(r"task (\d+): (?:Killed|Out Of Memory)", text)]
    signals = (6, 9, 11)
    return {int(r): -int(c) if int(c) in signals else int(c) for r, c in reversed(pairs)}


def died_elsewhere(facts, everyone, told):
    """Return what ended a run none of whose ranks has an error of its own: victims, or a log."""
    victims = [one for one in everyone if one.error]
    named = re.findall(r"\[(?:rank)?(\d+)\]:? *([\w.]*(?:Error|Exception)\b.*)", facts["text"])
    host = r"^(?:[\w.-]+: )?"  # which pdsh, srun and others put before each line
    for clue in (r"\S+\.py: error: (.*)", r"([\w.]*(?:Error|Exception)\b.*)"):
        named += [("", line) for line in re.findall(host + clue, facts["text"], re.M)]
    own = [(rank, line) for rank, line in named if kind_of_error(line)]
    told = {rank: code for rank, code in told.items() if code < 0}
    alive = any(one.lives for one in everyone)
    if own and not alive:
        kind = kind_of_error(own[0][1])
        ranks = ranks_named(own[0][1]) or [int(own[0][0])] if own[0][0] else []
        return [Finding(kind, ranks, f"{own[0][1][:300]} (in the log)")]
    if told and not alive:
        rank, code = next(iter(told.items()))
        kind = "segfault" if code == -11 else "killed"
        return [Finding(kind, [rank], f"ended by signal {-code}, says the launcher", "certain")]
    if not victims:
        return []
    found = blocked(facts, [one for one in everyone if one.groups], "had")
    if found and found[0].kind != "network":
        return found
    lines = Counter(message_of(one.error)[:200] for one in victims).most_common(1)[0][0]
    return [Finding("network", [o.rank for o in victims], f"no rank has an error of its own, all "
                    f"that failed lost the others: {lines}", "a guess")]  # fmt: skip


def unreachable(facts, everyone):
    """Return the hosts that do not answer, if their ranks are silent, and those not looked at."""
    found = []
    for name, error in (
        (x, fact["error"]) for x, fact in facts["hosts"].items() if "error" in fact
    ):
        lost = [one for one in everyone if one.state == "host down" and same_host(one.host, name)]
        reason = f"{name} does not answer ({error})"
        if lost:
            reason += f", and its ranks have been silent for {lost[0].age:.0f} s"
        if lost or not everyone:
            ranks = [one.rank for one in lost]
            found.append(Finding("host-unreachable", ranks, reason, "certain", [name]))
    silent = [one for one in everyone if one.state == "silent"]
    for host in sorted({one.host for one in silent}):
        lost = [one.rank for one in silent if one.host == host]
        reason = f"silent, and {host} was not looked at: name it with --hosts or --slurm-job"
        whole = len(lost) == sum(one.host == host for one in everyone)
        found.append(Finding("host-unreachable" if whole else "unknown", lost, reason, "a guess"))
    return found


# ---- a run that stands still -------------------------------------------------------------------


def limit_of(everyone):
    """Return how many seconds a phase may last before a run counts as standing still."""
    steps = [one.times["step"] for one in everyone if one.times.get("step")]
    return max(10, 5 * statistics.median(steps)) if steps else 45


def hung(facts, everyone):
    """Return why the run stands still; nothing if it moves."""
    stopped = [one for one in everyone if one.state in ("stopped", "traced")]
    if stopped:
        ranks, one = [each.rank for each in stopped], stopped[0]
        how = "stopped by a signal (SIGSTOP)" if one.state == "stopped" else "held by a debugger"
        reason = f"the process is {how}, at {where(one)}; kill -CONT {one.pid} "
        return [Finding("stopped-process", ranks, reason + "lets it go on", "certain")]
    if apart := not_met(facts, everyone):
        return apart
    living = [one for one in everyone if one.lives]
    if len(living) < len(everyone) or not living:
        return []
    limit = limit_of(everyone)
    moves = [one for one in living if quiet(one, facts) <= limit or compiles(one)]
    return [] if moves or may_take_long(living, facts) else blocked(facts, living, "has")


def quiet(one, facts):
    """Return the seconds since a rank was last seen to get on."""
    if one.since is not None:
        return one.since
    return min(each for each in (facts["rows_age"], one.started, 1e9) if each is not None)


def since_of(one):
    """Return since when a rank is where it is, as text."""
    return f"for {one.since:.0f} s" if one.since is not None else "for an unknown time"


def compiles(one):
    """Return whether a rank compiles, which takes minutes in the first step."""
    return any("/_dynamo/" in frame[0] or "/_inductor/" in frame[0] for frame in one.frames)


def may_take_long(living, facts):
    """Return whether all ranks are in something that is no step, and some rank works in it."""
    phases = {one.phase for one in living}
    if phases == {None}:  # the chapters tell no phases
        return not any(frame[2] == "train_step" for one in living for frame in one.frames)
    works = any(one.worker.get("cpu", 1) > 0.05 or one.state == "disk wait" for one in living)
    slow = len(phases) == 1 and not phases & {"data", "compute"}
    return slow and (works or min(quiet(one, facts) for one in living) < 60)


def not_met(facts, everyone):
    """Return why ranks do not meet at the start: some never came, or were told another place."""
    joining = [o for o in everyone if any(f[2] == "init_process_group" for f in o.frames)]
    told = defaultdict(list)
    for one in everyone:
        if one.worker:
            place = {name: one.worker["environment"].get(name) for name in MEETING[:3]}
            told[":".join(filter(None, place.values()))].append(one.rank)
    if not joining:
        return launchers_wait(facts, everyone)
    if len(told) > 1:
        odd, most = min(told, key=lambda x: len(told[x])), max(told, key=lambda x: len(told[x]))
        reason = f"told to meet at (ranks:host:port) {odd}, the others at {most}"
        return [Finding("rendezvous", told[odd], reason, "likely")]
    if bad := wrong_interface(facts, joining):
        return bad
    if min(one.since or one.started or 0 for one in joining) < 20:
        return []
    size = joining[0].world_size or 0
    missing = sorted(set(range(size)) - {one.rank for one in everyone})
    waited = f"wait for each other at {next(iter(told), 'an unknown place')}"
    if missing:
        reason = f"of {size} ranks {len(missing)} are not seen on the hosts looked at; the others"
        return [Finding("rendezvous", missing, f"{reason} {waited}")]
    reason = f"all ranks are there and {waited}, but do not meet: a port or a link is blocked"
    return [Finding("rendezvous", [one.rank for one in joining], reason, "a guess")]


def launchers_wait(facts, everyone):
    """Return the finding of launchers that wait for those on other hosts, and have no worker."""
    waiting = [
        fact["host"]
        for fact in facts["hosts"].values()
        for launcher in fact.get("launchers", ())
        if any("rendezvous" in frame[0] for frame in launcher["frames"])
    ]
    if not waiting or any(one.lives for one in everyone):
        return []
    others = sorted(set(facts["hosts"]) - set(waiting))
    reason = "the launcher there waits for those on other hosts, and has started no rank"
    reason += f"; none waits on {', '.join(others)}" if others else ": is a port or link blocked?"
    return [Finding("rendezvous", [], reason, "likely", waiting)]


def wrong_interface(facts, joining):
    """Return ranks that were told to use a network interface which does not lead to the others."""
    several = len({one.host for one in joining}) > 1
    for one in joining:
        here = next((fact["interfaces"] for fact in hosts_with(facts, [one])), None)
        for name in MEETING[3:]:
            asked = (one.worker.get("environment") or {}).get(name)
            if not asked or here is None or asked[0] in "^=":  # of NCCL's lists
                continue
            known = [face for face in here if face.startswith(asked.split(",")[0])]
            if not known or (known == ["lo"] and several) or here[known[0]] == "down":
                reason = f"{name}={asked}, and {one.host} has "
                reason += ", ".join(f"{face} ({state})" for face, state in here.items())
                return [Finding("rendezvous", [one.rank], reason, "likely")]
    return []


def blocked(facts, still, verb):
    """Return why ranks that stand still do: who is not where the others wait, and where it is."""
    for name in sorted({name for one in still for name in one.groups}):
        members = {one.rank: one.groups[name] for one in still if name in one.groups}
        if any(group.patient for group in members.values()):
            continue
        if found := differing(members):
            return [found]
    late = late_ranks(still)
    in_data = [one for one in still if loads_data(one)]
    if in_data and (not late or {one.rank for one in late} & {one.rank for one in in_data}):
        one, sure = in_data[0], "certain" if late or in_data[0].phase == "data" else "likely"
        reason = f"{verb} been in next(batches) of step {one.step} {since_of(one)}, at {where(one)}"
        ranks = [each.rank for each in in_data]
        return [Finding("hang-in-data", ranks, reason + waited_for(still, late), sure)]
    if late:
        return [of_late(late, still, verb)]
    if still and all(waits(one) for one in still):
        return [of_network(facts, still)]
    return []


def differing(members):
    """Return the finding if ranks of a process group called different collectives, else None."""
    first = max(min(group.entries, default=0) for group in members.values())
    last = max(group.last for group in members.values())
    history = []
    for seq in range(first, last + 1):
        calls = {r: g.entries[seq][:2] for r, g in members.items() if seq in g.entries}
        counts = Counter(calls.values())
        if len({what for what, _ in counts}) > 1 or (len(counts) > 1 and pends(members, seq)):
            return of_difference(seq, calls, counts, history)
        history += [next(iter(counts))] if counts else []
    return None


def pends(members, seq):
    """Return whether any rank still waits in a collective."""
    return any(group.entries[seq][2] for group in members.values() if seq in group.entries)


def of_difference(seq, calls, counts, history):
    """Return who called what others did not, by majority or else by what came before."""
    usual, most = counts.most_common(1)[0]
    expected = predicted(history)
    sure = "certain"
    if most * 2 <= sum(counts.values()):  # no majority: what was called in earlier steps decides
        usual, sure = (expected, "likely") if expected in counts else (None, "a guess")
    wrong = sorted(rank for rank, call in calls.items() if call != usual)
    odd = calls[wrong[0]]
    if usual is None:
        other = next(call for call in counts if call != odd)
        reason = (
            f"as number {seq}, some call {call_text(odd)}, others {call_text(other)}; which is "
        )
        return Finding("mismatched-collective", wrong, reason + "right cannot be told", sure)
    reason = f"{call_text(odd)} as number {seq}, where the others call {call_text(usual)}"
    if odd != usual and odd == predicted([*history, usual]):
        return Finding("skipped-collective", wrong, f"went on without calling one: {reason}", sure)
    what = (
        "sizes differ" if odd[0][0] == usual[0][0] and odd[1] == usual[1] else "the order differs"
    )
    return Finding("mismatched-collective", wrong, f"{what}: {reason}", sure)


def predicted(history):
    """Return the call that followed the last time when the latest ones came in this order."""
    for context in (6, 3, 2, 1):
        latest = history[-context:]
        for end in range(len(history) - 1, context - 1, -1):
            if latest and history[end - context : end] == latest:
                return history[end]
    return None


def call_text(call):
    """Return a collective as text: operation, sizes and the line that called it."""
    (op, sizes), at = call
    line = f" at {os.path.basename(at[0])}:{at[1]} {at[2]}" if at else ""
    return f"{op} {sizes}".strip() + line


def late_ranks(still):
    """Return the ranks that have not entered the collective which others wait in."""
    for name in sorted({name for one in still for name in one.groups}):
        members = [one for one in still if name in one.groups and not one.groups[name].patient]
        front = max((one.groups[name].last for one in members), default=0)
        late = [one for one in members if one.groups[name].last < front]
        if late and any(pends({0: one.groups[name]}, front) for one in members):
            return late
    waiting = [one for one in still if waits(one)]
    free = [one for one in still if one.frames and not waits(one)]
    return free if waiting and free else []


def waits(one):
    """Return whether a rank waits in a collective, as far as its stack tells."""
    pending = any(
        pends({0: group}, group.last) for group in one.groups.values() if not group.patient
    )
    calls = ("distributed_c10d.py", "_functional_collectives.py", "rendezvous.py")
    return pending or any(os.path.basename(frame[0]) in calls for frame in one.frames[-4:])


def loads_data(one):
    """Return whether a rank waits for its next batch."""
    stack = [f"{frame[0]} {frame[2]} {frame[3]}" for frame in one.frames]
    seen = any("next(batches)" in place(frame) for frame in one.frames if is_own(frame[0]))
    return one.phase == "data" or seen or any("utils/data/dataloader.py" in text for text in stack)


def where(one):
    """Return where a rank's training code is, as text."""
    return place(own_frame(one))


def waited_for(still, late):
    """Return in what the other ranks wait, as the end of a sentence."""
    others = [one for one in still if one not in late and waits(one)]
    return f"; {who_waits(others)} at {where(others[0])}" if others else ""


def who_waits(some):
    """Return as text that some ranks wait."""
    return f"rank{'s' * (len(some) > 1)} {spans(o.rank for o in some)} wait{'s' * (len(some) < 2)}"


def of_late(late, still, verb):
    """Return the finding of ranks that do not come to a collective, though not for want of data."""
    one, ranks = late[0], [each.rank for each in late]
    reason = f"{verb} not come to the collective that the others wait in"
    if waits(one):
        reason = f"went on without the others' collective: in {one.phase} of step {one.step}"
        reason += f", waits at {where(one)}"
        return Finding("skipped-collective", ranks, reason + waited_for(still, late))
    busy = {"busy": "computes", "disk wait": "waits for a disk"}
    reason += f": {busy.get(one.state, 'is')} in {one.phase} of step {one.step} {since_of(one)}"
    kind = "unknown" if one.state == "disk wait" or one.phase == "checkpoint" else "straggler"
    return Finding(kind, ranks, f"{reason}, at {where(one)}{waited_for(still, late)}")


def of_network(facts, still):
    """Return the finding of ranks that all wait in the same collective."""
    name = next((name for one in still for name, g in one.groups.items() if not g.patient), None)
    groups = [one.groups[name] for one in still if name in one.groups]
    call = call_text(groups[0].entries[groups[0].last][:2]) if groups else where(still[0])
    hosts, evidence = stuck_hosts(facts)
    reason = (
        f"all ranks are in the same collective, {call}, and it does not end {since_of(still[0])}"
    )
    ranks = [one.rank for one in still if one.host in hosts]
    return Finding("network", ranks, reason + evidence, "likely" if groups else "a guess", hosts)


def stuck_hosts(facts):
    """Return the hosts at the ends of most stuck connections, and the evidence as text."""
    silent = [name for name, fact in facts["hosts"].items() if "error" in fact]
    workers = [(one, fact) for fact in facts["hosts"].values() for one in fact.get("workers", ())]
    links = [(link, fact["host"]) for one, fact in workers for link in one["stuck_sockets"]]
    homes = {link["from"]: host for link, host in links}
    homes |= {fact["address"]: name for name, fact in facts["hosts"].items() if "address" in fact}
    ends = Counter(homes.get(link[end], link[end]) for link, _ in links for end in ("from", "to"))
    if not ends:
        return silent, ""
    most = sorted(end for end, count in ends.items() if count == max(ends.values()))
    again = sum(link["again"] for link, _ in links)
    evidence = f"; connections between {', '.join(sorted(ends))} hold bytes that were not taken"
    return silent or most, evidence + (f" in {again} repeats" if again else "")


# ---- a run that moves --------------------------------------------------------------------------


def slowed(facts, everyone):
    """Return the ranks that the others wait for in each step."""
    timed = [one for one in everyone if one.lives and one.times.get("local") and one.times["step"]]
    found = {"data": [], "compute": []}
    usual, usual_data = usual_time("local", timed), usual_time("data", timed)
    slow = [one for one in timed if one.times["local"] - usual >= slow_by(usual, one)]
    for one in slow if lasts(facts, slow) else []:
        excess = one.times["local"] - usual
        data = (one.times["data"] or 0) - usual_data
        found["data" if data > excess / 2 else "compute"].append((excess, one, usual))
    stragglers = [of_straggler(what, some) for what, some in found.items() if some]
    return stragglers or (slow_network(facts, timed) if len(timed) == len(everyone) else [])


def slow_by(usual, one):
    """Return how many seconds more than usual a rank must work in a step to be called slow."""
    return max(0.5 * usual, 0.2 * one.times["step"])


def lasts(facts, slow):
    """Return whether the others have waited for one of these in nearly all rows of ten seconds."""
    known = [row for row in facts["rows"] if isinstance(row.get("step"), int)]
    told = [row for row in known if isinstance(row.get("skew"), int | float)]
    if len(told) < 3 or not slow:
        return False
    first = told[-1]["step"] - 10 / slow[0].times["step"]
    recent = max(told[-3:], [row for row in told if row["step"] > first], key=len)
    ranks = {one.rank for one in slow}
    waited = [row for row in recent if row["skew"] >= 0.1 and row.get("slowest_rank") in ranks]
    return len(waited) >= 0.8 * len(recent)


def usual_time(name, timed):
    """Return the median over ranks; of two ranks the less, as half way to a slow one is no norm."""
    times = [one.times[name] or 0 for one in timed]
    return statistics.median_low(times) if times else 0


def of_straggler(what, some):
    """Return the finding of ranks that are slow in what they do themselves."""
    _, one, usual = max(some, key=lambda each: each[0])
    ranks = sorted(each.rank for _, each, _ in some)
    hosts = sorted({each.host for _, each, _ in some})
    task = "waiting for data" if what == "data" else "computing"
    reason = (
        f"slow in {task}: {one.times['local']:.3g} s a step before it waits for others, the usual "
        f"is {usual:.3g} s; a step takes {one.times['step']:.3g} s"
    )
    return Finding("straggler", ranks, reason, "certain" if len(hosts) == 1 else "likely", hosts)


def slow_network(facts, timed):
    """Return the finding if steps are mostly waiting for bytes that stand in connections."""
    if len({one.host for one in timed}) < 2:  # on one host it would be the host that is slow
        return []
    share = 1 - max(one.times["local"] / one.times["step"] for one in timed)
    hosts, evidence = stuck_hosts(facts)
    if share < 0.5 or not evidence:
        return []
    reason = f"{share:.0%} of a step goes to communication on every rank{evidence}"
    ranks = [one.rank for one in timed if one.host in hosts]
    return [Finding("network", ranks, reason, "a guess", hosts)]


def found_by(checks, facts, everyone):
    """Return what is wrong while the run goes on, or beside what ended it."""
    return [found for check in checks if (found := check(facts, everyone))]


def warned(facts, everyone):
    """Return the finding of the last warning of the script itself, in a heartbeat or a log."""
    logs = "\n".join([facts["text"], *facts["logs"].values()])
    told = [one.warning for one in everyone] + re.findall(r"warning: (step \d+.*)", logs)
    for line in reversed(told):
        if (kind := kind_of_error(line)) in ("same-data", "not-finite", "replicas-differ"):
            return Finding(kind, ranks_named(line), line[:300], "certain")
    return None


def bad_losses(facts, everyone):
    """Return the finding of a loss that is not finite, or far above those before it."""
    rows = [row for row in facts["rows"] if isinstance(row.get("loss"), int | float)]
    for at, row in enumerate(rows):
        if not math.isfinite(row["loss"]) or row.get("grad_norm") in (math.inf, -math.inf):
            reason = (
                f"loss {row['loss']}, grad_norm {row.get('grad_norm')} at step {row.get('step')}"
            )
            return Finding("not-finite", [], reason, "certain")
        before = [other["loss"] for other in rows[max(0, at - 10) : at]]
        if len(before) >= 4 and at >= len(rows) - 30:
            usual = statistics.median(before)
            spread = statistics.median(abs(loss - usual) for loss in before)
            if row["loss"] - usual > max(0.5, 0.25 * abs(usual), 6 * spread):
                reason = f"loss {row['loss']:.4g} at step {row.get('step')}, before it {usual:.4g}"
                ranks, _ = worse_than_the_rest(everyone)
                if ranks:
                    reason += f"; on rank {spans(ranks)} alone it is far above the others"
                return Finding("loss-spike", ranks, reason, "certain")
    ranks, reason = worse_than_the_rest(everyone)
    return Finding("loss-spike", ranks, reason, "likely") if ranks else None


def worse_than_the_rest(everyone):
    """Return the ranks whose own losses are far above those of most, and in words how far."""
    living = [one for one in everyone if one.lives and one.losses]
    means = {one.rank: statistics.mean(one.losses) for one in living}
    usual = statistics.median_low(means.values()) if means else 0
    found = [rank for rank, mean in means.items() if mean - usual > max(0.5, 0.25 * usual)]
    if not found or 2 * len(found) >= len(means):
        return [], ""
    worst = max(means.values())
    return found, f"a loss of {worst:.4g} in the last steps, the usual rank has {usual:.4g}"


def leaks(_, everyone):
    """Return the finding of ranks whose memory on the host grows."""
    known = [one for one in everyone if one.use.get("memory") and one.use.get("memory_first")]
    first = {one.rank: one.use["memory_first"] for one in known}
    grown = {one.rank: one.use["memory"] - first[one.rank] for one in known}
    grown = {rank: by for rank, by in grown.items() if by > max(0.3, 0.5 * first[rank])}
    if not grown:
        return None
    worst = next(one for one in known if one.rank == max(grown, key=grown.get))
    reason = f"rank {worst.rank} holds {worst.use['memory']:.2f} GiB of host memory in step "
    reason += f"{worst.step}, and held {worst.use['memory_first']:.2f} after its first steps"
    return Finding("host-memory-leak", list(grown), reason)


def many_files(_, everyone):
    """Return the finding of ranks with so many open files that soon no other can be opened."""
    count = {one.rank: one.use.get("files") or 0 for one in everyone}
    usual = statistics.median_low(count.values()) if count else 0
    limit = {one.rank: one.use.get("files_limit") or math.inf for one in everyone}
    many = [rank for rank in count if count[rank] > min(0.8 * limit[rank], usual + 400)]
    if not many:
        return None
    worst = max(many, key=count.get)
    known = f", of {limit[worst]} at most" if limit[worst] < math.inf else ""
    reason = f"rank {worst} has {count[worst]} files open{known}; others have {usual}"
    return Finding("too-many-open-files", many, reason)


def is_full(disk):
    """Return whether a file system has next to nothing left."""
    return any(left is not None and left < least
               for left, least in ((disk["free"], 2**24), (disk["files_free"], 16)))  # fmt: skip


def full_disk(facts, _):
    """Return the finding of a run's folder in which nothing more can be written."""
    if not is_full(facts["disk"]):
        return None
    reason = f"{facts['run']} has {facts['disk']['free'] / 2**20:.0f} MiB free"
    return Finding("disk-full", [], reason, "certain")


def broken_checkpoints(facts, everyone):
    """Return the finding of a checkpoint that this start of the run could not read."""
    started = max((one.started or 0 for one in everyone), default=0) or math.inf
    broken = [name for name, age in facts["checkpoints"].items()
              if name.endswith(".broken") and age < started + 60]  # fmt: skip
    if not broken:
        return None
    reason = (
        f"{', '.join(sorted(broken))} could not be read and was set aside; an older one was taken"
    )
    return Finding("corrupt-checkpoint", [], reason, "certain")


def at_rest(facts, everyone):
    """Return what is the case where nothing is wrong, or that this cannot be told."""
    phases = Counter(one.phase for one in everyone)
    ranks = [one.rank for one in everyone]
    if (everyone and set(phases) == {"finished"}) or (not everyone and facts["exported"]):
        return Finding("finished", ranks, "the run has finished", "certain")
    if phases["stopped"] and set(phases) <= {"finished", "stopped"}:
        reason = f"stopped at step {everyone[0].step}, as asked; the same command goes on"
        return Finding("interrupted", ranks, reason, "certain")
    if not everyone:
        known = "it has no metrics"
        if facts["rows"]:
            known = f"its last row of metrics is of step {facts['rows'][-1].get('step')}"
            known += f", {facts['rows_age']:.0f} s ago"
        return Finding("unknown", [], f"no process and no heartbeat of this run is seen; {known}")
    if ended := [one.rank for one in everyone if not one.lives]:
        return Finding("unknown", ended, "these ranks have ended, and the others not yet")
    return of_living(facts, everyone, phases)


def of_living(facts, everyone, phases):
    """Return how a run does whose ranks all live, or that this cannot be told."""
    longest, still = max(quiet(one, facts) for one in everyone), limit_of(everyone)
    steps = [one.times["step"] for one in everyone if one.times.get("step")]
    pace = f"step {max(one.step for one in everyone)}"
    pace += f", {statistics.median(steps):.3g} s each" if steps else ""
    if longest > 20 and may_take_long(everyone, facts):
        busy = max(everyone, key=lambda one: (not waits(one), one.worker.get("cpu", 0)))
        what = everyone[0].phase or "what is no step"
        reason = f"all ranks are in {what} for {longest:.0f} s; rank {busy.rank} at {where(busy)}"
        return Finding("slow-but-healthy", [], reason)
    if longest > still and not any(map(compiles, everyone)):
        stuck = [one.rank for one in everyone if quiet(one, facts) > still]
        reason = f"these ranks have not got on for {longest:.0f} s, and nothing shows why"
        return Finding("unknown", stuck, reason)
    speeds = [row["tokens_per_second"] for row in facts["rows"] if row.get("tokens_per_second")]
    now, before = map(statistics.median, (speeds[-3:] or [1], speeds[:-3] or [1]))
    if len(speeds) > 8 and now < 0.6 * before:
        reason = f"the ranks take steps ({pace}), all alike slower than before: {now:,.0f} tokens/s"
        return Finding("slow-but-healthy", [], f"{reason} after {before:,.0f}")
    return Finding(
        "healthy", [], f"the ranks take steps ({pace})", "certain" if steps else "likely"
    )


# ---- report ------------------------------------------------------------------------------------


def judge(facts):
    """Return the verdict on collected facts, as a dictionary, and the ranks."""
    ranks, notes = ranks_of(facts)
    findings = find(facts, ranks)
    first, *others = findings
    verdict = {
        "kind": first.kind,
        "ranks": first.ranks,
        "hosts": first.hosts,
        "reason": first.reason,
        "sure": first.sure,
        "section": f"{README}#{KINDS[first.kind]}",
        "also": [vars(other) for other in others],
        "notes": [*filter(None, facts.get("notes", ())), *notes, *notes_on(facts, ranks)],
    }
    return verdict, ranks


def notes_on(facts, ranks):
    """Return what could not be seen, each with what to run instead."""
    notes = []
    for name, fact in facts["hosts"].items():
        if "error" in fact:
            notes.append(f"{name} does not answer: {fact['error']}")
        elif fact["hidden"]:
            notes.append(
                f"{name}: {fact['hidden']} python processes are of another user: take sudo"
            )
        if fact.get("kernel", 0) is None:
            notes.append(f"{name}: the kernel's messages are not readable here: sudo dmesg")
    blind = [o for o in ranks.values() if o.worker and not o.frames and o.worker["no_stack"]]
    if blind:
        why = f"{blind[0].worker['no_stack']}; sudo py-spy dump --pid {blind[0].pid}"
        notes.append(f"no stack of ranks {spans(one.rank for one in blind)}: {why}")
    if not facts["disk"]["writable"]:
        notes.append("the run's folder is not writable here, so ages are by this host's clock")
    return notes


def show(facts, verdict, ranks):
    """Print the ranks by what they do, what they wait in, and the verdict last."""
    groups = defaultdict(list)
    for one in ranks.values():
        key = one.state, one.phase, one.step, one.error, tuple(map(tuple, one.frames[-30:]))
        groups[key].append(one)
    size = next((one.world_size for one in ranks.values() if one.world_size), None)
    print(f"{facts['run']}: {len(ranks)} of {size or 'an unknown number of'} ranks")
    for some in sorted(groups.values(), key=len, reverse=True)[:12]:
        show_group(some)
    if len(groups) > 12:
        print(f"  and {len(groups) - 12} more kinds of stacks")
    show_collectives(ranks)
    for note in verdict["notes"][:12]:
        print(f"note: {note}")
    for other in verdict["also"]:
        print(f"also: {other['kind']}{who(other)}: {other['reason']}")
    print(f"\n{verdict['kind'].upper()}{who(verdict)} ({verdict['sure']})")
    print(f"  {verdict['reason']}")
    print(f"  read {verdict['section']}")


def who(finding):
    """Return the ranks and hosts of a finding, as text."""
    text = (
        f" rank{'s' * (len(finding['ranks']) > 1)} {spans(finding['ranks'])}"
        if finding["ranks"]
        else ""
    )
    hosts = finding["hosts"]
    shown = ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")
    return text + (f" on {shown}" if hosts else "")


def show_group(some):
    """Print ranks that have the same stack."""
    one = some[0]
    hosts = sorted({each.host for each in some})
    on = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    print(
        f"  {spans(each.rank for each in some):12} on {on:10} {one.state:9} "
        f"{one.phase or '-':10} step {one.step:<6} {since_of(one)}"
    )
    if one.error:
        print(f"{'':15}{message_of(one.error)[:200]}")
    elif one.frames:
        inner = "" if one.frames[-1] == own_frame(one) else f"\n{'':15}in {place(one.frames[-1])}"
        print(f"{'':15}at {where(one)}{inner}")


def show_collectives(ranks):
    """Print the newest collective of each rank, per process group in which any waits."""
    for name in sorted({name for one in ranks.values() for name in one.groups}):
        last = defaultdict(list)
        for one in (one for one in ranks.values() if name in one.groups):
            group = one.groups[name]
            if not group.patient:
                what, at, pending = group.entries.get(group.last, (("?", ""), None, False))
                last[group.last, what, at, pending].append(one.rank)
        if len(last) > 1 or any(pending for *_, pending in last):
            print(f"collectives of process group {name}:")
            for (seq, what, at, pending), some in sorted(last.items(), key=lambda x: -x[0][0])[:8]:
                state = "waits in" if pending else "has done"
                print(f"  {spans(some):12} {state} number {seq}, {call_text((what, at))}")


def too_early(everyone):
    """Return the seconds until it is known whether a rank is silent, if others have failed by now.

    Its process is not seen, but its last heartbeat is fresh: the others' errors may come from it.
    """
    unseen = [one for one in everyone if one.state == "alive" and not one.worker]
    if not unseen or not any(one.error for one in everyone):
        return 0
    return max(STALE + 0.5 - min(one.age for one in unseen), 0)


def main():
    args = parse_args()
    if args.collect:
        print(json.dumps(collect(args.run)))
        return
    facts = gather(args)
    verdict, ranks = judge(facts)
    if wait := too_early(ranks.values()):
        time.sleep(wait)
        facts = gather(args)
        verdict, ranks = judge(facts)
    if args.json:
        print(json.dumps(verdict, indent=1))
    else:
        show(facts, verdict, ranks)
    sys.exit(3 if verdict["kind"] == "unknown" else int(verdict["kind"] not in NO_FAULT))


if __name__ == "__main__":
    main()
