#!/usr/bin/env python3
"""Say what is wrong with a run that hangs, has died or is slow: what, which rank, which host.

Here:     python diagnosing-errors/whats_wrong.py outputs/02-ddp
By ssh:   python diagnosing-errors/whats_wrong.py outputs/my-run --hosts hosts.txt
Slurm:    python diagnosing-errors/whats_wrong.py outputs/my-run --slurm-job 123

It reads what watched.py writes to the run's folder, asks the ranks for their stacks, and looks at
their processes on each host; nothing has to be installed there but python3. It stops nothing.
Exit status: 0 nothing found, 1 a fault was found, 2 wrong arguments, 3 cannot tell.
"""

from __future__ import annotations  # python3 on a host may be an old one

import argparse
import contextlib
import json
import linecache
import math
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

FOREIGN = r"/(site|dist)-packages/|/lib/python3|^<|/torch/csrc|/(watched|inject)\.py$"
README = "diagnosing-errors/faults.md"
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
STALE = 10  # seconds without a heartbeat, of which there is one every 2, that make a rank silent
LATE = 0.2  # the share of its time that the others wait for a rank which is called slow
PAUSE = 2.5  # seconds between the two dumps that must agree on it
LEAK = 0.3  # GiB of host memory that a leak must have grown by, and half of what was there
REST = ("start", "compile", "evaluation", "checkpoint", "export")  # which may take minutes
CLUES = {  # what errors say, in the order in which to look
    "not-finite": r"not finite",
    "device-out-of-memory": r"CUDA out of memory|OutOfMemoryError|_ALLOC_FAILED"
    r"|CUDA error: out of memory|Cuda failure \S+ 'out of memory'|cudaErrorMemoryAllocation"
    r"|DefaultCPUAllocator: can't allocate",  # for training on a CPU, that is the device
    "too-many-open-files": r"[Tt]oo many open files|EMFILE",
    "disk-full": r"No space left on device|[Dd]isk quota exceeded|ENOSPC",
    "host-memory-leak": r"Cannot allocate memory|\bMemoryError|bad_alloc",
    "mismatched-collective": r"Detected mismatch between collectives|op\.preamble\.length",
    "rendezvous": r"Unable to find address for|RendezvousTimeout|[Nn]o socket interface"
    r"|client socket has (failed|timed out)|C10d store has failed",
    "corrupt-checkpoint": r"no checkpoint in \S+ can be read|PytorchStreamReader failed"
    r"|cannot be read, so the one before",
    "interrupted": r"KeyboardInterrupt",
}
# Who says this suffers from what happened elsewhere.
VICTIM = (
    r"[Cc]onnection (closed|reset|refused)|Socket Timeout|[Tt]imed out|[Tt]imeout|Broken pipe"
    r"|NCCL|DistBackendError|ChildFailedError|Read error|another rank has failed|SIGTERM"
    r"|pair closure|watchdog"
)


# ---- command line ------------------------------------------------------------------------------
def parse_args():
    """Return the arguments, checked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("run", type=Path, help="the run's folder, which watched.py was told with --into")
    add("--hosts", type=Path, help="a file that names a host per line, each reached over ssh")
    add("--slurm-job", help="look on the hosts of this job, by srun --overlap")
    add("--log", type=Path, action="append", default=[], help="what the launcher printed, a file")
    add("--patience", type=float, default=8.0, help="seconds that a host has to answer")
    add("--json", action="store_true", help="print the verdict as JSON")
    args = parser.parse_args()
    if not args.run.is_dir():
        parser.error(f"{args.run} is no folder; give that of a run, such as outputs/02-ddp")
    for path in [*args.log, *filter(None, [args.hosts])]:
        if not path.is_file():
            parser.error(f"there is no file {path}")
    return args


# ---- on each host: its processes ---------------------------------------------------------------
# This part also runs on hosts whose python3 is older than the one that trains.
def collect(pids, quiet):
    """Return what this host shows of processes, as a dictionary; of quiet ones with their stack."""
    found = {str(pid): process_of(pid, pid in quiet) for pid in pids}
    return {"host": socket.gethostname(), "processes": {p: x for p, x in found.items() if x}}


def process_of(pid, quiet):
    """Return a process's state, a letter as in ps, and its stack; None if it is gone."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None
    if state == "Z" or b"python" not in command:
        return None
    folder = os.path.dirname(command.split(b"\0")[0].decode(errors="replace"))
    return {"state": state, "frames": stack_of(pid, folder) if quiet or state in "Tt" else []}


def stack_of(pid, folder):
    """Return the main thread's (file, line, function), outermost first, if py-spy can tell."""
    places = [folder, os.path.dirname(sys.executable or ""), os.environ.get("PATH", "")]
    spy = shutil.which("py-spy", path=os.pathsep.join(places))
    command = [spy or "py-spy", "dump", "--json", "--nonblocking", "--pid", str(pid)]
    with contextlib.suppress(ValueError, KeyError, StopIteration):
        threads = json.loads(limited(command, 4)[1])
        main = next(one for one in threads if one["os_thread_id"] == pid or len(threads) == 1)
        return [[f["filename"], f["line"], f["name"]] for f in reversed(main["frames"])]
    return []


def limited(command, seconds, text=None):
    """Run a command for so many seconds at most; return its status, output and errors."""
    try:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        done = subprocess.run(command, input=text, timeout=seconds, check=False, text=True, **pipes)
        return done.returncode, done.stdout, done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, "", str(error)


# ---- from here: all hosts ----------------------------------------------------------------------
def hosts_of(args):
    """Return how to start a command on each host: from its name to what comes before the command.

    None stands for this host.
    """
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=4"]
    if args.hosts:
        lines = (line.partition("#")[0].split() for line in args.hosts.read_text().splitlines())
        return {words[0]: [*ssh, words[0]] for words in lines if words}
    if not args.slurm_job:
        return {socket.gethostname(): None}
    nodes = limited(["squeue", "--noheader", "--format=%N", f"--jobs={args.slurm_job}"], 5)[1]
    names = limited(["scontrol", "show", "hostnames", nodes.strip()], 5)[1].split()
    if not names:
        told = (
            f"Slurm knows no hosts of job {args.slurm_job}; if it is over, name them with --hosts"
        )
        print(f"whats_wrong.py: error: {told}", file=sys.stderr)
        sys.exit(2)
    srun = ["srun", f"--jobid={args.slurm_job}", "--overlap", "--nodes=1", "--ntasks=1"]
    return {name: [*srun, f"--nodelist={name}"] for name in names}


def ask_host(host, reach, pids, quiet, patience):
    """Return what a host shows of processes, or {"error": why it does not answer}."""
    if reach is None or same_host(host, socket.gethostname()):
        return collect(pids, quiet)
    command = [*reach, "python3", "-", "--collect", ",".join(map(str, pids))]
    command.append(",".join(map(str, quiet)))
    status, out, err = limited(command, patience, Path(__file__).read_text())
    try:
        return json.loads(out)
    except ValueError:
        return {"error": (err.strip().splitlines() or [f"status {status}"])[-1][:200]}


def same_host(one, other):
    """Return whether two names, with or without a domain, are of one host."""
    return one.split(".")[0] == other.split(".")[0]


# ---- the run's folder --------------------------------------------------------------------------
def clock_of(folder):
    """Return the time by the clock of the file system that has a folder: hosts' clocks differ."""
    probe = folder / f".now-{uuid.uuid4().hex}"
    try:
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return now
    except OSError:
        return time.time()


def read_json(path):
    """Return a file's dictionary, or None if there is none."""
    try:
        found = json.loads(path.read_text(errors="replace"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_ranks(run):
    """Return what the ranks have written: rank -> beat, its age in seconds, crash."""
    folder, found = run / "ranks", {}
    now = clock_of(folder if folder.is_dir() else run)
    for path in sorted(folder.glob("[0-9]*.json")):
        beat = read_json(path) if path.name.count(".") == 1 else None
        if beat and "started" in beat:
            with contextlib.suppress(OSError):
                age = now - path.stat().st_mtime
                beat["written"] = now - age
                found[int(path.stem)] = {"beat": beat, "age": age, "dumps": []}
                found[int(path.stem)]["crash"] = tail(path.with_suffix(".crash"), 20_000)
    # The files of a rank that is not there any more may be of an earlier start.
    newest = min((f["age"] + f["beat"]["time"] - f["beat"]["started"] for f in found.values()),
                 default=0)  # fmt: skip
    return {rank: files for rank, files in found.items() if files["age"] < newest + 30}


def ask_for_dumps(run, ranks, patience=4.0):
    """Ask the ranks that live for their stacks and collectives; add what they write to `ranks`."""
    folder = run / "ranks"
    living = {rank for rank, files in ranks.items() if files["age"] < STALE
              and not files["beat"].get("end")}  # fmt: skip
    asked = math.inf
    with contextlib.suppress(OSError):  # a folder of another user: older dumps have to do
        if living:
            (folder / "dump").touch()
            asked = (folder / "dump").stat().st_mtime
    paths = {rank: folder / f"{rank:05}.dump.json" for rank in ranks}
    until = time.monotonic() + patience
    while living and asked < math.inf and time.monotonic() < until:
        time.sleep(0.1)
        living = {rank for rank in living if changed(paths[rank]) < asked}
    for rank, path in paths.items():
        if dump := read_json(path):
            ranks[rank]["dumps"].append(dump)


def changed(path):
    """Return when a file was last changed, 0 for one that is not there."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0


def read_rows(run):
    """Return the last rows of metrics.jsonl, if the script writes such a file."""
    rows = []
    for line in tail(run / "metrics.jsonl").splitlines()[-200:]:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            rows += [row] if isinstance(row, dict) and isinstance(row.get("step"), int) else []
    return rows


def tail(path, size=200_000):
    """Return the end of a text file."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def gather(args):
    """Return all facts: of the run's folder, its hosts and what the launcher printed."""
    ranks = read_ranks(args.run)
    shown = look_at_hosts(args, ranks)
    ask_for_dumps(args.run, ranks)
    beats = [files["beat"] for files in ranks.values()]
    if any(beat["step_seconds"] for beat in beats) and not any(beat["end"] for beat in beats):
        time.sleep(PAUSE)
        ask_for_dumps(args.run, ranks)
    for rank, files in read_ranks(args.run).items():
        if rank in ranks:
            ranks[rank] = files | {"dumps": ranks[rank]["dumps"]}
    return facts_of(args.run, ranks, shown, "\n".join(map(tail, args.log)))


def look_at_hosts(args, ranks):
    """Return what each host shows, by name; all are asked at once."""
    pids = [files["beat"]["pid"] for files in ranks.values()]
    quiet = [files["beat"]["pid"] for files in ranks.values() if files["age"] > STALE / 2]
    with ThreadPoolExecutor(64) as pool:
        asked = {host: pool.submit(ask_host, host, reach, pids, quiet, args.patience)
                 for host, reach in hosts_of(args).items()}  # fmt: skip
        return {host: answer.result() for host, answer in asked.items()}


def facts_of(run, ranks, hosts, text=""):
    """Return what `judge` goes by."""
    disk = os.statvfs(run)
    files_free = disk.f_favail if disk.f_files else math.inf
    return {
        "run": str(run),
        "ranks": ranks,
        "hosts": hosts,
        "rows": read_rows(run),
        "free": disk.f_bavail * disk.f_frsize if files_free > 16 else 0,
        "text": text,
    }


# ---- from facts to ranks -----------------------------------------------------------------------
@dataclass(eq=False)
class Rank:
    """What is known of one rank; times are seconds ago."""

    rank: int
    beat: dict
    age: float  # of the heartbeat
    crash: str
    state: str  # alive, stopped, stuck, finished, failed, gone, silent or host down
    frames: list = field(default_factory=list)  # (file, line, function), outermost first
    calls: dict = field(default_factory=dict)  # of collectives: group -> number -> call
    earlier: dict = field(default_factory=dict)  # the same of the dump before

    def __getattr__(self, name):  # what the heartbeat says
        return self.beat.get(name)

    @property
    def lives(self):
        return self.state in ("alive", "stopped", "stuck")

    @property
    def quiet(self):
        """Since when this rank is in the same phase of the same step."""
        return self.beat["time"] - self.beat["since"] + self.age

    @property
    def failed(self):
        """What ended this rank, or nothing."""
        return self.beat.get("error") or ""


def ranks_of(facts):
    """Return the ranks, by number."""
    shown = {x["host"]: x["processes"] for x in facts["hosts"].values() if "processes" in x}
    down = [name for name, fact in facts["hosts"].items() if "error" in fact]
    found = {}
    for rank, files in sorted(facts["ranks"].items()):
        beat = files["beat"]
        process = shown.get(beat["host"], {}).get(str(beat["pid"]))
        one = Rank(rank, beat, files["age"], files["crash"], "alive")
        if beat["end"]:
            one.state = beat["end"]
        elif process and process["state"] in "Tt":
            one.state = "stopped"
        elif beat["host"] in shown and not process:
            one.state = "gone"
        elif one.age > STALE:
            one.state = "stuck" if process else "silent"
            if any(same_host(beat["host"], name) for name in down):
                one.state = "host down"
        dumps = [dump for dump in files["dumps"] if dump.get("time", 0) > beat["started"]]
        if dumps and beat["end"] != "finished":
            if dumps[-1]["reason"] != "failed":  # then the traceback tells where
                one.frames = dumps[-1]["stacks"].get("MainThread") or []
            one.calls, one.earlier = calls_of(dumps[-1]), calls_of(dumps[0])
        if one.state in ("stopped", "stuck"):  # which cannot say it themselves
            one.frames = process["frames"] or one.frames
        found[rank] = one
    return found


def calls_of(dump):
    """Return the collectives of a dump by group and number; none of groups that wait for days."""
    found = defaultdict(dict)
    for call in dump.get("collectives") or ():
        if not call["patient"]:
            sized = not call["name"].startswith(("gather", "scatter", "all_to_all", "alltoall"))
            found[call["group"]][call["number"]] = call | ({} if sized else {"sizes": ""})
    return dict(found)


def members_of(some, name):
    """Return the calls in one group: rank -> number -> call."""
    return {one.rank: one.calls[name] for one in some if name in one.calls}


def groups_of(some):
    """Return the names of all groups in which any of these ranks has called."""
    return sorted({name for one in some for name in one.calls})


def spans(numbers):
    """Return numbers as a short list: 0-3,5."""
    numbers, parts = sorted(numbers), []
    for value in numbers:
        if parts and value == parts[-1][1] + 1:
            parts[-1][1] = value
        else:
            parts.append([value, value])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def is_own(file):
    """Return whether a file is of the training code, not of Python, a package or these tools."""
    return not re.search(FOREIGN, file)


def place(frame):
    """Return a frame as text, with its line of code where that file is at hand."""
    if not frame:
        return "an unknown line"
    file, line, function = frame[:3]
    code = linecache.getline(file, line).strip()[:80]
    return f"{os.path.basename(file)}:{line} {function}" + (f": {code}" if code else "")


def where(one):
    """Return where a rank's training code is, as text."""
    return place(next((frame for frame in reversed(one.frames) if is_own(frame[0])), None))


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
    wrong = numbers(facts, everyone)
    ended = died(facts, everyone)
    if ended and wrong and wrong[0].kind == ended[0].kind:
        ended = []  # the numbers say which rank it was
    stuck = [] if ended else hung(everyone)
    found = ended + stuck + unreachable(facts, everyone) + wrong + used_up(facts, everyone)
    found += [] if ended or stuck else slowed(everyone)
    kinds = [each.kind for each in found]
    found = [each for at, each in enumerate(found) if each.kind not in kinds[:at]]
    down = [name for name, fact in facts["hosts"].items() if "error" in fact]
    for each in found:
        hosts = {ranks[rank].host for rank in each.ranks if rank in ranks}
        each.hosts = each.hosts or (down if each.kind == "network" else sorted(hosts))
    return found or [at_rest(facts, everyone)]


def kind_of_error(text):
    """Return the kind of fault that an error's text tells of; None if of one elsewhere."""
    said = message_of(text)
    for kind, clue in CLUES.items():
        if re.search(clue, said):
            return kind
    return None if re.search(VICTIM, said) else "crash"


def message_of(text):
    """Return what an error says, without the stack of its traceback; NCCL's reason comes last."""
    named = list(re.finditer(r"^[\w.]*(Error|Exception|Exit|Interrupt|OutOfMemory)\b", text, re.M))
    said = " ".join(text[named[-1].start() :].split() if named else text.split())
    start, told, reason = said.partition("Last error: ")
    return f"{start.split(':')[0]}: {reason} ({start.strip()})" if told else said


def died(facts, everyone):
    """Return what ended the run: the first error that is a rank's own, or the first to vanish."""
    codes = exit_codes(facts["text"])
    own = [one for one in everyone if one.failed and kind_of_error(one.failed)]
    victims = [one for one in everyone if one.failed and one not in own]
    gone = [one for one in everyone if one.state == "gone"]
    aborted = [one for one in gone if "Aborted" in one.crash]  # often because of another rank
    vanished = [one for one in gone if one not in aborted and not one.asked_to_end]
    if not own and (aborted or victims) and (not vanished or -6 in codes.values()):
        return of_victims(facts, everyone, aborted, victims)
    if not own and not vanished:
        return told_by_log(facts["text"], everyone)
    # Who failed has said so at once; who vanished was last heard of up to two seconds before.
    end = lambda one: one.age + (3 if one.failed or one.crash.strip() else 0)  # noqa: E731
    first = max(own + vanished, key=end)
    first = next((one for one in vanished if one.rank in codes), first)
    if first.failed:
        return [of_error(facts, first, own)]
    together = [one for one in vanished if end(first) - end(one) < 4]
    hang = []
    if len(together) == len(everyone) > 1 and min(one.quiet - one.age for one in together) > 10:
        hang = blocked([one for one in everyone if one.calls], "had")  # somebody lost patience
    files = many_files(everyone)
    if files and first.rank in files.ranks:  # it could not write a last word
        return [files]
    return hang or [of_vanished(facts, together, codes)]


def of_victims(facts, everyone, aborted, victims):
    """Return why ranks ended none of which has an error of its own.

    NCCL's watchdog and gloo, which was sent another size than it waits for, abort innocent ranks.
    """
    calls = [one for one in everyone if one.calls]
    hang = [found for found in blocked(calls, "had") if found.kind != "network"]
    if hang := hang or unusual(calls):
        return hang
    if aborted and not re.search("torch/distributed|torch/autograd", aborted[0].crash):
        first = aborted[0].crash.splitlines()[0]
        at = traceback_place(aborted[0].crash) or "an unknown line"
        return [Finding("crash", [one.rank for one in aborted], f"{first}, at {at}")]
    if said := told_by_log(facts["text"], everyone):
        return said
    some = aborted or victims
    said = message_of(some[0].failed)[:200] or "aborted in a collective"
    reason = f"no rank has an error of its own; all that failed lost the others: {said}"
    return [Finding("network", [one.rank for one in some], reason, "a guess")]


def of_error(facts, first, own):
    """Return the finding of an error that is a rank's own."""
    kind, line = kind_of_error(first.failed), message_of(first.failed)
    if kind == "crash" and facts["free"] < 2**24:
        kind = "disk-full"
    same = [one.rank for one in own if kind_of_error(one.failed) == kind
            and (kind != "crash" or message_of(one.failed) == line)]  # fmt: skip
    at = traceback_place(first.failed)
    reason = line[:300] + (f" (in step {first.step}, at {at})" if at else "")
    return Finding(kind, same, reason, "certain")


def traceback_place(text):
    """Return the innermost line of training code in the text of a traceback or of faulthandler."""
    if "most recent call first" in text:  # of the thread that crashed, turned round
        threads = [part for part in text.split("\n\n") if "most recent call first" in part]
        current = [part for part in threads if "Current thread" in part] or threads
        text = "\n".join(reversed(current[-1].splitlines()))
    places = re.findall(r'File "([^"]+)", line (\d+),? in (\S+)', text)
    own = [f"{os.path.basename(name)}:{line} {call}" for name, line, call in places if is_own(name)]
    return own[-1] if own else None


def of_vanished(facts, gone, codes):
    """Return the finding of ranks that ended without a word."""
    ranks, one = [each.rank for each in gone], gone[0]
    last = f"last heard of in {one.phase} of step {one.step}"
    crashed = [each for each in gone if each.crash.strip()]
    told = {codes[rank] for rank in ranks if rank in codes}
    if crashed or -11 in told:
        text = (crashed or gone)[0].crash.strip()
        said = text.splitlines()[0] if text else "ended by signal 11 (SIGSEGV)"
        reason = f"{said}, at {traceback_place(text) or 'an unknown line'} ({last})"
        return Finding("segfault", [x.rank for x in crashed] or ranks, reason, "certain")
    if facts["free"] < 2**24:
        reason = f"it ended without a word, and its disk has {facts['free'] / 2**20:.0f} MiB free"
        return Finding("disk-full", ranks, f"{reason} ({last})")
    why = "killed by signal 9 (SIGKILL): its process is gone and left no error"
    if len(gone) > 1:
        why = "all these ended within seconds and left no error: killed from outside, or the host"
    ask = f"ask the kernel on {one.host}: dmesg -T | grep -i -E 'out of memory|killed process'"
    return Finding("killed", ranks, f"{why} ({last}); {ask}", "certain" if told else "likely")


def exit_codes(text):
    """Return the exit codes by rank that torchrun, srun or mpirun printed; signals are negative."""
    root = text.rpartition("Root Cause")[2] if "Root Cause" in text else ""  # the first to fail
    pairs = re.findall(r"rank +: (\d+)[^\n]*\n\s*exitcode +: (-\d+)", root)
    pairs += re.findall(r"rank (\d+) with PID \d+[^\n]* exited on signal (\d+)", text)
    pairs += [(task, 9) for task in re.findall(r"task (\d+): (?:Killed|Out Of Memory)", text)]
    return {int(rank): -abs(int(code)) for rank, code in reversed(pairs)}


def told_by_log(text, everyone):
    """Return what the launcher's log says ended a run whose ranks could not say it themselves."""
    named = re.findall(r"\[(?:rank)?(\d+)\]:? *([\w.]*(?:Error|Exception)\b.*)", text)
    host = r"^(?:[\w.-]+: )?"  # which pdsh, srun and others put before each line
    for clue in (r"\S+\.py: error: (.*)", r"([\w.]*(?:Error|Exception)\b.*)"):
        named += [("", line) for line in re.findall(host + clue, text, re.M)]
    own = [(rank, line) for rank, line in named if kind_of_error(line)]
    if not own or any(one.lives for one in everyone):
        return []
    rank, line = own[0]
    ranks = [int(rank)] if rank else []
    return [Finding(kind_of_error(line), ranks, f"{line[:300]} (in the log)")]


def unreachable(facts, everyone):
    """Return the hosts that do not answer, if their ranks are silent, and those not looked at."""
    found = []
    for name, fact in facts["hosts"].items():
        lost = [x for x in everyone if x.state == "host down" and same_host(x.host, name)]
        if "error" in fact and (lost or not everyone):
            reason = f"{name} does not answer ({fact['error']})"
            reason += f", and its ranks have been silent for {lost[0].age:.0f} s" if lost else ""
            ranks = [one.rank for one in lost]
            found.append(Finding("host-unreachable", ranks, reason, "certain", [name]))
    silent = [one for one in everyone if one.state == "silent"]
    for host in sorted({one.host for one in silent}):
        lost = [one.rank for one in silent if one.host == host]
        reason = f"silent, and {host} was not looked at: name it with --hosts or --slurm-job"
        found.append(Finding("host-unreachable", lost, reason, "a guess"))
    return found


# ---- a run that stands still -------------------------------------------------------------------
def limit_of(everyone):
    """Return how many seconds a phase may last before a run counts as standing still."""
    steps = [one.step_seconds for one in everyone if one.step_seconds]
    return max(10, 5 * statistics.median(steps)) if steps else 45


def hung(everyone):
    """Return why the run stands still; nothing if it moves."""
    stopped = [one for one in everyone if one.state == "stopped"]
    if stopped:
        one = stopped[0]
        reason = f"the process is stopped, by SIGSTOP or a debugger, at {where(one)}; "
        reason += f"kill -CONT {one.pid} lets it go on"
        return [Finding("stopped-process", [x.rank for x in stopped], reason, "certain")]
    living = [one for one in everyone if one.lives]
    if apart := not_met(living):
        return apart
    limit = limit_of(living)
    if len(living) < len(everyone) or not living or takes_long(living):
        return []
    moves = [one for one in living if one.quiet <= limit or one.phase == "compile"]
    return [] if moves else blocked(living, "has")


def takes_long(living):
    """Return whether all ranks are in something that is no step, and some rank works in it."""
    works = any((one.cpu or 0) > 0.05 for one in living) or min(x.quiet for x in living) < 60
    return works and len({one.phase for one in living}) == 1 and living[0].phase in REST


def not_met(living):
    """Return the finding of ranks that wait for others at the start which never came."""
    size = living[0].world_size if living else 0
    joining = [one for one in living if any(f[2] == "init_process_group" for f in one.frames)]
    if not joining or min(one.quiet for one in joining) < 20:
        return []
    missing = sorted(set(range(size)) - {one.rank for one in living})
    if missing:
        reason = f"of {size} ranks {len(missing)} have not come, and the others wait for them"
        return [Finding("rendezvous", missing, reason)]
    reason = "all ranks have come, and wait for each other: is a port or a link blocked?"
    return [Finding("rendezvous", [one.rank for one in joining], reason, "a guess")]


def blocked(still, verb):
    """Return why ranks that stand still do: who is not where the others wait, and where it is."""
    for name in groups_of(still):
        if found := differing(members_of(still, name)):
            return [found]
    late = late_ranks(still)
    in_data = [one for one in late or still if one.phase == "data" or loads_data(one)]
    if in_data:
        one, ranks = in_data[0], [each.rank for each in in_data]
        reason = f"{verb} waited for the next batch of step {one.step} for {one.quiet:.0f} s, at "
        reason += where(one) + waited_for(still, late)
        return [Finding("hang-in-data", ranks, reason, "certain" if late else "likely")]
    if late:
        return [of_late(late, still, verb)]
    if still and all(waits(one) for one in still):
        call = next((calls[max(calls)] for one in still for calls in one.calls.values()), None)
        told = call_text(call) if call else where(still[0])
        reason = f"all ranks are in the same collective, {told}, and it does not end"
        return [Finding("network", [], reason, "likely" if call else "a guess")]
    return []


def key(call):
    """Return what must be equal on all ranks of a group, and the line that called it."""
    return (call["name"], call["sizes"]), tuple(call["at"] or ())


def differing(members):
    """Return the finding if ranks of a process group called different collectives, else None."""
    history = []
    if not members:
        return None
    first = max(min(calls, default=0) for calls in members.values())
    for number in range(first, max(max(calls, default=0) for calls in members.values()) + 1):
        made = {rank: calls[number] for rank, calls in members.items() if number in calls}
        counts = Counter(key(call) for call in made.values())
        pends = any(call["pending"] for call in made.values())
        if len({what for what, _ in counts}) > 1 or (len(counts) > 1 and pends):
            return of_difference(number, {r: key(call) for r, call in made.items()}, history)
        history += [next(iter(counts))] if counts else []
    return None


def of_difference(number, calls, history):
    """Return who called what others did not, by majority or else by what came before."""
    counts = Counter(calls.values())
    usual, most = counts.most_common(1)[0]
    sure = "certain"
    if most * 2 <= sum(counts.values()):  # no majority: what was called in earlier steps decides
        usual = predicted(history)
        usual, sure = (usual, "likely") if usual in counts else (None, "a guess")
    wrong = sorted(rank for rank, call in calls.items() if call != usual)
    odd = calls[wrong[0]]
    if usual is None:
        other = next(call for call in counts if call != odd)
        reason = f"as number {number}, some call {key_text(odd)}, others {key_text(other)}"
        return Finding("mismatched-collective", wrong, f"{reason}; which is right?", sure)
    reason = f"{key_text(odd)} as number {number}, where the others call {key_text(usual)}"
    if odd != usual and odd == predicted([*history, usual]):
        return Finding("skipped-collective", wrong, f"went on without calling one: {reason}", sure)
    sizes = odd[0][0] == usual[0][0] and odd[0] != usual[0]
    what = "sizes differ" if sizes else "the order differs"
    return Finding("mismatched-collective", wrong, f"{what}: {reason}", sure)


def unusual(some):
    """Return the finding if the last call of a rank is not what followed before, else nothing."""
    for name in groups_of(some):
        for rank, calls in members_of(some, name).items():
            *history, last = [key(call) for _, call in sorted(calls.items())]
            usual = predicted(history)
            if usual not in (None, last):
                found = of_difference(max(calls), {rank: last, -1: usual, -2: usual}, history)
                found.sure = "likely"
                return [found]
    return []


def predicted(history):
    """Return the call that followed the last time when the latest ones came in this order."""
    for context in (64, 32, 16, 8, 4, 2, 1):
        latest = history[-context:]
        for end in range(len(history) - 1, context - 1, -1):
            if latest and history[end - context : end] == latest:
                return history[end]
    return None


def call_text(call):
    """Return a collective as text: operation, sizes and the line that called it."""
    return key_text(key(call))


def key_text(call):
    """Return the same of what `key` gives."""
    (name, sizes), at = call
    line = f" at {os.path.basename(at[0])}:{at[1]} {at[2]}" if at else ""
    return f"{name} {sizes}".strip() + line


def late_ranks(still):
    """Return the ranks that have not entered the collective which others wait in."""
    for name in groups_of(still):
        members = [one for one in still if name in one.calls]
        last = {one.rank: max(one.calls[name]) for one in members}
        front = max(last.values())
        pends = any(one.calls[name].get(front, {}).get("pending") for one in members)
        if pends and min(last.values()) < front:
            return [one for one in members if last[one.rank] < front]
    waiting = [one for one in still if waits(one)]
    free = [one for one in still if one.frames and not waits(one)]
    return free if waiting and free else []


def waits(one):
    """Return whether a rank waits in a collective, as far as its calls and its stack tell."""
    pending = any(calls[max(calls)]["pending"] for calls in one.calls.values())
    names = ("distributed_c10d.py", "_functional_collectives.py", "rendezvous.py")
    return pending or any(os.path.basename(frame[0]) in names for frame in one.frames[-4:])


def loads_data(one):
    """Return whether a rank's stack is in a loader."""
    return any("/utils/data/" in frame[0] for frame in one.frames)


def waited_for(still, late):
    """Return in what the other ranks wait, as the end of a sentence."""
    others = [one for one in still if one not in late and waits(one)]
    who = f"ranks {spans(o.rank for o in others)} wait" if others[1:] else "the other waits"
    return f"; {who} at {where(others[0])}" if others else ""


def of_late(late, still, verb):
    """Return the finding of ranks that do not come to a collective, though not for want of data."""
    one, ranks = late[0], [each.rank for each in late]
    at = f"in {one.phase} of step {one.step} for {one.quiet:.0f} s, at {where(one)}"
    if waits(one):
        reason = f"went on without the others' collective: {at}{waited_for(still, late)}"
        return Finding("skipped-collective", ranks, reason)
    kind = "unknown" if one.phase == "checkpoint" else "straggler"
    reason = f"{verb} not come to the collective that the others wait in: {at}"
    return Finding(kind, ranks, reason + waited_for(still, late))


# ---- a run that moves --------------------------------------------------------------------------
def slowed(everyone):
    """Return the rank that the others wait for in each step, if two dumps say so."""
    living = [one for one in everyone if one.lives]
    before, now = lateness(living, "earlier"), lateness(living, "calls")
    if not now or not before:
        return []
    worst = max(now, key=now.get)
    for shares in (before, now):
        rest = max(share for rank, share in shares.items() if rank != worst)
        if shares.get(worst, 0) < max(LATE, 3 * rest):
            return []
    one = next(one for one in living if one.rank == worst)
    others = [other for other in living if other is not one]
    data = more_than(others, "phases", one, "data")
    line = max(one.lines or {"?": 0}, key=lambda line: more_than(others, "lines", one, line))
    task = "waiting for data" if data > now[worst] / 2 else "what it does itself"
    reason = f"slow in {task}: the others wait for it {now[worst]:.0%} of the time; more than they "
    reason += f"it is at {line.rpartition('/')[2]} ({more_than(others, 'lines', one, line):+.0%})"
    return [Finding("straggler", [worst], reason, "certain")]


def more_than(others, what, one, name):
    """Return by how much a rank's share of something is above the median of the others'."""
    usual = statistics.median((other.beat.get(what) or {}).get(name, 0) for other in others)
    return (one.beat.get(what) or {}).get(name, 0) - usual


def lateness(living, which):
    """Return for each rank the share of the last seconds that others waited for it, or nothing.

    Who calls a collective last makes the others wait, from when the first of them called it, or
    from when the collective before it could end. The two longest waits of each rank do not count:
    it may have saved something.
    """
    most = {}
    for name in sorted({name for one in living for name in getattr(one, which)}):
        members = {one: getattr(one, which)[name] for one in living if name in getattr(one, which)}
        common = sorted(set.intersection(*(set(calls) for calls in members.values())))[-200:]
        if len(members) < 2 or len(common) < 10:
            continue
        waits, ended = {one.rank: [] for one in members}, 0.0
        called = [{one: calls[n]["called"] + shift(one, members) for one, calls in members.items()}
                  for n in common]  # fmt: skip
        for at in called:
            last = max(at, key=at.get)
            waits[last.rank].append(max(0, at[last] - max(ended, min(at.values()))))
            ended = max(ended, at[last])
        span = ended - min(called[0].values())
        late = {rank: sum(sorted(some)[:-2]) for rank, some in waits.items()}
        spent = {one.rank: [calls[n]["milliseconds"] for n in common]
                 for one, calls in members.items()}  # fmt: skip
        if all(None not in some for some in spent.values()):  # NCCL's: who comes last waits least
            longest = max(map(sum, spent.values()))
            late = {rank: (longest - sum(some)) / 1000 for rank, some in spent.items()}
        shares = {rank: seconds / span for rank, seconds in late.items() if span > 1}
        if max(shares.values(), default=0) > max(most.values(), default=0):
            most = shares
    return most


def shift(one, everyone):
    """Return what to add to a rank's times, so that they are by the clock of the run's folder."""
    if len({other.host for other in everyone}) == 1:
        return 0.0
    return statistics.median(
        other.beat["written"] - other.beat["time"] for other in everyone if other.host == one.host
    )


# ---- wrong numbers -----------------------------------------------------------------------------
def numbers(facts, everyone):
    """Return what is wrong with losses, gradients, weights and inputs."""
    found = [not_finite(everyone), replicas(everyone), same_data(everyone)]
    found += [spike(facts, everyone), unread(facts, everyone)]
    return [each for each in found if each]


def not_finite(everyone):
    """Return the finding of the ranks whose own loss or gradient was the first not to be finite."""
    bad = [one for one in everyone if one.bad]
    if not bad:
        return None
    step = min(one.bad["step"] for one in bad)
    first = [one for one in bad if one.bad["step"] == step]
    losses = [one for one in first if not math.isfinite(one.bad["loss"])]
    what = "loss" if losses else "gradient"
    ranks = [one.rank for one in losses or first]
    reason = f"step {step}: the {what} of rank {spans(ranks)} was not finite, before it was reduced"
    return Finding("not-finite", ranks, reason, "certain")


def checks_of(everyone):
    """Return the checks: step -> rank -> check."""
    found = defaultdict(dict)
    for one in everyone:
        for check in one.checks or ():
            found[check["step"]][one.rank] = check
    return found


def replicas(everyone):
    """Return the finding of weights that differ on ranks which have the same part of the model."""
    for step, checks in sorted(checks_of(everyone).items()):
        for part in {one.shard for one in everyone}:
            sums = {one.rank: checks[one.rank]["weights"] for one in everyone
                    if one.shard == part and one.rank in checks}  # fmt: skip
            if len(set(sums.values())) > 1:
                usual, count = Counter(sums.values()).most_common(1)[0]
                ranks = [rank for rank, value in sums.items() if value != usual]
                ranks = ranks if count > len(ranks) else list(sums)
                one_of = len(ranks) == len(sums)
                told = ": one of them is wrong" if one_of else " from those of their replicas"
                reason = f"step {step}: the weights of rank {spans(ranks)} differ{told}"
                return Finding("replicas-differ", ranks, reason, "certain")
    return None


def same_data(everyone):
    """Return the finding of ranks that had the same input in the last two steps looked at."""
    checks = [each for _, each in sorted(checks_of(everyone).items()) if len(each) == len(everyone)]
    shown = defaultdict(list)
    for one in everyone if len(checks) > 1 else ():
        shown[tuple(check[one.rank]["data"] for check in checks[-2:])].append(one.rank)
    for inputs, ranks in shown.items():
        if len(ranks) > 1 and all(inputs):
            reason = f"ranks {spans(ranks)} get the same tokens"
            return Finding("same-data", ranks, reason, "certain")
    return None


def odd_losses(checks):
    """Return the mean losses of ranks for which they are far above those of most ranks."""
    means = {rank: statistics.mean(check["losses"]) for rank, check in checks.items()}
    usual = statistics.median_low(means.values())
    odd = {rank: mean for rank, mean in means.items() if mean - usual > max(0.5, 0.25 * usual)}
    return odd if 2 * len(odd) < len(means) else {}


def spike(facts, everyone):
    """Return the finding of a loss far above those before it, or a rank's above the others'."""
    found = [odd_losses(checks) for _, checks in sorted(checks_of(everyone).items())[-2:]]
    if len(found) == 2 and (ranks := set(found[0]) & set(found[1])):
        reason = f"a loss of {max(found[1].values()):.4g}, in two looks far above other ranks'"
        return Finding("loss-spike", sorted(ranks), reason)
    known = [row["loss"] for row in facts["rows"] if isinstance(row.get("loss"), (int, float))]
    for at in range(max(4, len(known) - 30), len(known)):
        before = known[max(0, at - 10) : at]
        usual = statistics.median(before)
        spread = statistics.median(abs(loss - usual) for loss in before)
        if known[at] - usual > max(0.5, 0.25 * abs(usual), 6 * spread):
            reason = f"loss {known[at]:.4g} in metrics.jsonl, before it {usual:.4g}"
            return Finding("loss-spike", [], reason, "certain")
    return None


def unread(facts, everyone):
    """Return the finding of a checkpoint that this start of the run could not read."""
    printed = [line for one in everyone for line in one.printed or ()]
    for line in [*printed, *facts["text"].splitlines()]:
        if re.search(CLUES["corrupt-checkpoint"], line):
            return Finding("corrupt-checkpoint", [], line[:300], "certain")
    return None


# ---- what is used up ---------------------------------------------------------------------------
def used_up(facts, everyone):
    """Return what there is too little of: memory, open files, disk."""
    found = [leak(everyone), many_files(everyone)]
    if facts["free"] < 2**24:
        reason = f"{facts['run']} has {facts['free'] / 2**20:.0f} MiB free"
        found.append(Finding("disk-full", [], reason, "certain"))
    return [each for each in found if each]


def leak(everyone):
    """Return the finding of ranks whose host memory grows all the time, not just once."""
    grown = {}
    for one in everyone:
        last = (one.memory or [])[-6:]
        steady = sum(last[n + 1] > last[n] + 0.02 for n in range(len(last) - 1))
        if len(last) > 3 and steady >= len(last) - 2:
            grown[one.rank] = last[-1] - last[0], last
    grown = {rank: by for rank, (by, last) in grown.items() if by > max(LEAK, 0.5 * last[0])}
    if not grown:
        return None
    worst = next(one for one in everyone if one.rank == max(grown, key=grown.get))
    values = ", ".join(f"{value:.2f}" for value in worst.memory[-6:])
    reason = f"the host memory of rank {worst.rank} grows and grows: {values} GiB"
    return Finding("host-memory-leak", list(grown), reason)


def many_files(everyone):
    """Return the finding of ranks with so many open files that soon no other can be opened."""
    count = {one.rank: one.open_files or 0 for one in everyone}
    usual = min(count.values(), default=0)
    limit = {one.rank: one.files_limit or math.inf for one in everyone}
    many = [rank for rank in count if count[rank] > min(0.8 * limit[rank], usual + 400)]
    if not many:
        return None
    worst = max(many, key=count.get)
    reason = f"rank {worst} has {count[worst]} files open, of {limit[worst]} at most"
    return Finding("too-many-open-files", many, reason)


# ---- nothing wrong -----------------------------------------------------------------------------
def at_rest(facts, everyone):
    """Return what is the case where nothing is wrong, or that this cannot be told."""
    if not everyone:
        reason = f"no rank has written to {facts['run']}/ranks; was the script run by watched.py?"
        return Finding("unknown", [], reason)
    ranks = [one.rank for one in everyone]
    if all(one.end == "finished" for one in everyone):
        if any(one.asked_to_end for one in everyone):
            reason = f"stopped at step {everyone[0].step}, as asked; the same command goes on"
            return Finding("interrupted", ranks, reason, "certain")
        return Finding("finished", ranks, "the run has finished", "certain")
    if ended := [one.rank for one in everyone if not one.lives]:
        return Finding("unknown", ended, "these ranks have ended, and the others not yet")
    longest = max(one.quiet for one in everyone)
    if longest > 20 and takes_long(everyone):
        busy = max(everyone, key=lambda one: one.cpu or 0)
        reason = f"all ranks are in {busy.phase} for {longest:.0f} s, rank {busy.rank} at "
        return Finding("slow-but-healthy", [], reason + where(busy))
    if longest > limit_of(everyone) and not any(one.phase == "compile" for one in everyone):
        stuck = [one.rank for one in everyone if one.quiet > limit_of(everyone)]
        reason = f"these ranks have not got on for {longest:.0f} s, and nothing shows why"
        return Finding("unknown", stuck, reason)
    steps = [one.step_seconds for one in everyone if one.step_seconds]
    pace = f"the ranks take steps, now {max(one.step for one in everyone)}"
    pace += f", in {statistics.median(steps):.3g} s each" if steps else ""
    speeds = [row["tokens_per_second"] for row in facts["rows"] if row.get("tokens_per_second")]
    now, before = map(statistics.median, (speeds[-3:] or [1], speeds[:-3] or [1]))
    if len(speeds) > 8 and now < 0.6 * before:
        reason = f"{pace}: all alike slower than before, {now:,.0f} tokens/s after {before:,.0f}"
        return Finding("slow-but-healthy", [], reason)
    return Finding("healthy", [], pace, "certain" if steps else "likely")


# ---- report ------------------------------------------------------------------------------------
def judge(facts):
    """Return the verdict on collected facts, as a dictionary, and the ranks."""
    ranks = ranks_of(facts)
    first, *others = find(facts, ranks)
    verdict = vars(first) | {"section": f"{README}#{KINDS[first.kind]}"}
    notes = [f"{name} does not answer: {fact['error']}" for name, fact in facts["hosts"].items()
             if "error" in fact]  # fmt: skip
    notes += [f"rank {one.rank} is watched in part: {one.fault.splitlines()[-1]}"
              for one in ranks.values() if one.fault]  # fmt: skip
    return verdict | {"also": [vars(other) for other in others], "notes": notes}, ranks


def show(facts, verdict, ranks):
    """Print the ranks by what they do, what they wait in, and the verdict last."""
    groups = defaultdict(list)
    for one in ranks.values():
        groups[one.state, one.phase, one.step, one.failed, str(one.frames[-30:])].append(one)
    size = next((one.world_size for one in ranks.values()), "an unknown number of")
    print(f"{facts['run']}: {len(ranks)} of {size} ranks")
    for some in sorted(groups.values(), key=len, reverse=True)[:12]:
        one, hosts = some[0], sorted({each.host for each in some})
        on = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
        print(f"  {spans(x.rank for x in some):8} on {on:10} {one.state:8} {one.phase:10} "
              f"step {one.step:<6} for {one.quiet:.0f} s")  # fmt: skip
        print(f"{'':11}{message_of(one.failed)[:200] if one.failed else 'at ' + where(one)}")
    for name in groups_of(ranks.values()):
        last = defaultdict(list)
        for rank, calls in members_of(ranks.values(), name).items():
            call = calls[max(calls)]
            last[call["number"], call["pending"], call_text(call)].append(rank)
        if verdict["kind"] not in NO_FAULT and (len(last) > 1 or any(key[1] for key in last)):
            print(f"collectives of process group {name}:")
            for (number, pending, text), some in sorted(last.items(), reverse=True)[:8]:
                print(f"  {spans(some):8} {'waits in' if pending else 'has done'} {number}, {text}")
    for note in verdict["notes"][:12]:
        print(f"note: {note}")
    for other in verdict["also"]:
        print(f"also: {other['kind']}{who(other)}: {other['reason']}")
    print(f"\n{verdict['kind'].upper()}{who(verdict)} ({verdict['sure']})")
    print(f"  {verdict['reason']}\n  read {verdict['section']}")


def who(finding):
    """Return the ranks and hosts of a finding, as text."""
    ranks, hosts = finding["ranks"], finding["hosts"]
    text = f" rank{'s' * (len(ranks) > 1)} {spans(ranks)}" if ranks else ""
    shown = ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")
    return text + (f" on {shown}" if hosts else "")


def main():
    if sys.argv[1:2] == ["--collect"]:  # what this runs on each host
        pids, quiet = ([int(pid) for pid in word.split(",") if pid] for word in sys.argv[2:])
        print(json.dumps(collect(pids, quiet)))
        return
    args = parse_args()
    facts = gather(args)
    verdict, ranks = judge(facts)
    if verdict["sure"] == "a guess":  # some rank may be about to say why it ends
        time.sleep(STALE / 2)
        facts = gather(args)
        verdict, ranks = judge(facts)
    if args.json:
        print(json.dumps(verdict, indent=1))
    else:
        show(facts, verdict, ranks)
    sys.exit(3 if verdict["kind"] == "unknown" else int(verdict["kind"] not in NO_FAULT))


if __name__ == "__main__":
    main()
