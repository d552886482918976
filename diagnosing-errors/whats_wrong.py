#!/usr/bin/env python3
"""Say what is wrong with a run that hangs, has died or is slow: what, which rank, which host.

Here:     python diagnosing-errors/whats_wrong.py outputs/02-ddp
By ssh:   python diagnosing-errors/whats_wrong.py outputs/my-run --hosts hosts.txt
Slurm:    python diagnosing-errors/whats_wrong.py outputs/my-run --slurm-job 123

It reads what watched.py writes to the run's folder, asks the ranks for their stacks, and looks at
their processes on each host. It stops nothing.
Exit status: 0 nothing found, 1 a fault was found, 2 wrong arguments, 3 cannot tell.
"""

import argparse
import json
import linecache
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, median_low

CATALOGUE = "diagnosing-errors/faults.md"  # has a section for each kind of finding
NO_FAULT = ("healthy", "slow-but-healthy", "finished", "interrupted")
HERE = os.uname().nodename
STALE = 10  # seconds without a heartbeat, of which there is one every 2, that make a rank silent
LATE = 0.2  # the share of its time that the others wait for a rank which is called slow
LEAK = 0.3  # GiB of host memory that a leak must have grown by, and half of what was there
FULL = 2**24  # bytes; a disk with fewer free is full
REST = ("start", "compile", "evaluation", "checkpoint", "export")  # which may take minutes
FOREIGN = re.compile(r"/(site|dist)-packages/|/lib/python3|^<|/torch/csrc|/(watched|inject)\.py$")
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
VICTIM = (  # who says this suffers from what happened elsewhere
    r"[Cc]onnection (closed|reset|refused)|Socket Timeout|[Tt]imed out|[Tt]imeout|Broken pipe"
    r"|NCCL|DistBackendError|ChildFailedError|Read error|another rank has failed|SIGTERM"
    r"|pair closure|watchdog"
)


def parse_args():
    """Return the arguments, checked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("run", type=Path, help="the run's folder, which watched.py was told with --into")
    add("--hosts", type=Path, help="a file that names a host per line, each reached over ssh")
    add("--slurm-job", help="look on the hosts of this job, by srun --overlap")
    add("--json", action="store_true", help="print the verdict as JSON")
    args = parser.parse_args()
    if not args.run.is_dir():
        parser.error(f"{args.run} is no folder; give that of a run, such as outputs/02-ddp")
    if args.hosts and not args.hosts.is_file():
        parser.error(f"there is no file {args.hosts}")
    args.reach = reach_of(args)
    if not args.reach:
        parser.error("no host is named there, or Slurm knows none of this job any more")
    return args


# ---- hosts -------------------------------------------------------------------------------------
def reach_of(args):
    """Return what to put before a command that is to run on a host: name -> words."""
    names, before = [HERE], ""
    if args.hosts:
        lines = (line.partition("#")[0].split() for line in args.hosts.read_text().splitlines())
        names, before = [words[0] for words in lines if words], "ssh -oBatchMode=yes {}"
    elif args.slurm_job:
        nodes, _ = output(f"squeue --noheader --format=%N --jobs={args.slurm_job}".split(), 5)
        names = output(["scontrol", "show", "hostnames", nodes.strip()], 5)[0].split()
        before = f"srun --jobid={args.slurm_job} --overlap --nodes=1 --ntasks=1 --nodelist={{}}"
    return {name: [] if same(name, HERE) else before.format(name).split() for name in names}


def same(one, other):
    """Return whether two names, with or without a domain, are of one host."""
    return one.split(".")[0] == other.split(".")[0]


def output(command, seconds):
    """Run a command for so many seconds at most; return its output and errors."""
    try:
        done = subprocess.run(command, timeout=seconds, check=False, text=True, capture_output=True)
        return done.stdout, done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)


def look_at(reach, pids, quiet):
    """Return a host's own name, and of its processes the state, a letter as in ps, and stacks."""
    files = [f"/proc/{pid}/stat" for pid in pids]
    out, errors = output([*reach, "cat", "/proc/sys/kernel/hostname", *files], 8)
    if not out:
        return {"error": (errors.strip().splitlines() or ["no answer"])[-1][:200]}
    name, *lines = out.splitlines()
    found = dict(re.findall(r"^(\d+) \((?:py|pt_).*\) ([^Z]) ", "\n".join(lines), re.M))
    ask = [pid for pid, state in found.items() if state in "Tt" or int(pid) in quiet]
    return {"host": name, "states": found, "stacks": {pid: spy(reach, pid) for pid in ask}}


def spy(reach, pid):
    """Return the (file, line, function) of a process's main thread, if py-spy can tell."""
    places = os.path.dirname(sys.executable), os.environ.get("PATH", "")
    tool = shutil.which("py-spy", path=os.pathsep.join(places)) or "py-spy"
    with suppress(ValueError, KeyError, StopIteration):
        threads = json.loads(
            output([*reach, tool, "dump", "--json", "--nonblocking", "--pid", pid], 4)[0]
        )
        main = next(one for one in threads if one["os_thread_id"] == int(pid))
        return [[f["filename"], f["line"], f["name"]] for f in reversed(main["frames"])]
    return []


# ---- the run's folder --------------------------------------------------------------------------
def gather(args, ask=True):
    """Return all facts: of the run's folder and of its hosts."""
    ranks = read_ranks(args.run, ask)
    pids = [files["beat"]["pid"] for files in ranks.values()]
    quiet = [files["beat"]["pid"] for files in ranks.values() if files["age"] > STALE / 2]
    with ThreadPoolExecutor(64) as pool:  # all hosts are asked at once
        asked = {name: pool.submit(look_at, words, pids, quiet)
                 for name, words in args.reach.items()}  # fmt: skip
        hosts = {name: answer.result() for name, answer in asked.items()}
    disk = os.statvfs(args.run)
    room = disk.f_favail > 16 or not disk.f_files
    free = disk.f_bavail * disk.f_frsize if room else 0
    return {"run": str(args.run), "ranks": ranks, "hosts": hosts, "free": free}


def read_ranks(run, ask=True):
    """Return what ranks have written: rank -> beat, its age in seconds, dump, crash.

    If this asks for dumps, it waits until they are there, up to 4 seconds. Hosts' clocks differ:
    times are those of the file system that has the folder.
    """
    folder, until = run / "ranks", time.monotonic() + 4 * ask
    probe, now = folder / ("dump" if ask else "clock"), time.time()
    with suppress(OSError):  # a folder of another user: older dumps have to do
        probe.touch()
        now = changed(probe)
    asked, ahead = now, now - time.time()
    while True:
        found = {}
        for path in folder.glob("[0-9]*[0-9].json"):
            if (beat := read_json(path)) and "started" in beat:
                beat["written"] = changed(path)
                found[int(path.stem)] = {
                    "beat": beat,
                    "age": time.time() + ahead - beat["written"],
                    "dump": read_json(path.with_suffix(".dump.json")),
                    "crash": tail(path.with_suffix(".crash"), 20_000),
                    "answered": changed(path.with_suffix(".dump.json")) >= asked,
                }
        awaited = [f for f in found.values() if f["age"] < STALE and not f["beat"]["end"]]
        if all(files["answered"] for files in awaited) or time.monotonic() > until:
            return without_leftovers(found)
        time.sleep(0.1)


def without_leftovers(found):
    """Return the ranks of this start: an earlier one may have had more."""
    starts = (f["age"] + f["beat"]["time"] - f["beat"]["started"] for f in found.values())
    newest = min(starts, default=0) + 30
    return {rank: files for rank, files in sorted(found.items()) if files["age"] < newest}


def changed(path):
    """Return when a file was last changed, 0 for one that is not there."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0


def read_json(path):
    """Return a file's dictionary, or nothing."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else None
    return None


def tail(path, size=200_000):
    """Return the end of a text file."""
    with suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - size))
        return file.read().decode(errors="replace")
    return ""


# ---- from facts to ranks -----------------------------------------------------------------------
@dataclass(eq=False)
class Rank:
    """What is known of one rank; attributes that are not set here are its heartbeat's."""

    rank: int
    beat: dict
    age: float  # of the heartbeat, in seconds
    crash: str
    state: str  # alive, stopped, stuck, finished, failed, gone or silent
    frames: list = field(default_factory=list)  # (file, line, function), outermost first
    calls: dict = field(default_factory=dict)  # of collectives: group -> number -> call

    def __getattr__(self, name):
        return self.beat.get(name)

    @property
    def lives(self):
        return self.state in ("alive", "stopped", "stuck")

    @property
    def quiet(self):
        """For how many seconds this rank is in the same phase of the same step."""
        return self.beat["time"] - self.beat["since"] + self.age


def ranks_of(facts):
    """Return the ranks, by number."""
    shown = {fact["host"]: fact for fact in facts["hosts"].values() if "host" in fact}
    found = {}
    for rank, files in sorted(facts["ranks"].items()):
        beat, host, pid = files["beat"], files["beat"]["host"], str(files["beat"]["pid"])
        state = state_of(files, shown.get(host))
        one = found[rank] = Rank(rank, beat, files["age"], files["crash"], state)
        dump = files["dump"]
        if dump and dump["time"] > beat["started"] and beat["end"] != "finished":
            one.calls = calls_of(dump)
            if dump["reason"] != "failed":  # then the traceback tells where
                one.frames = dump["stacks"].get("MainThread") or []
        if state in ("stopped", "stuck"):  # which cannot say it themselves
            one.frames = shown[host]["stacks"].get(pid) or one.frames
    return found


def state_of(files, host):
    """Return a rank's state, by its files and by what its host shows, if anything."""
    beat, process = files["beat"], host and host["states"].get(str(files["beat"]["pid"]))
    if beat["end"]:
        return beat["end"]
    if host and not process:
        return "gone"
    if process and process in "Tt":
        return "stopped"
    return "alive" if files["age"] < STALE else "stuck" if process else "silent"


def calls_of(dump):
    """Return the collectives of a dump by group and number; none of groups that wait for days."""
    found = defaultdict(dict)
    for call in dump["collectives"]:
        if not call["patient"]:
            sized = not call["name"].startswith(("gather", "scatter", "all_to_all", "alltoall"))
            found[call["group"]][call["number"]] = call | ({} if sized else {"sizes": ""})
    return dict(found)


def groups_of(some):
    """Return who has called what in each process group: name -> rank -> number -> call."""
    names = sorted({name for one in some for name in one.calls})
    return {name: {x: x.calls[name] for x in some if name in x.calls} for name in names}


def spans(numbers):
    """Return numbers as a short list: 0-3,5."""
    numbers, parts = sorted(numbers), []
    for value in numbers:
        if parts and value == parts[-1][1] + 1:
            parts[-1][1] = value
        else:
            parts.append([value, value])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def where(one):
    """Return where a rank's training code is, as text, with the line if its file is at hand."""
    own = next((frame for frame in reversed(one.frames) if not FOREIGN.search(frame[0])), None)
    if not own:
        return "an unknown line"
    file, line, function = own
    code = linecache.getline(file, line).strip()[:80]
    return f"{os.path.basename(file)}:{line} {function}" + (f": {code}" if code else "")


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
    wrong = [not_finite(everyone), replicas(everyone), same_data(everyone)]
    wrong = [each for each in [*wrong, spike(everyone), unread(everyone)] if each]
    ended = died(facts, everyone)
    if ended and wrong and wrong[0].kind == ended[0].kind:
        ended = []  # the numbers say which rank it was
    stuck = [] if ended else hung(everyone)
    found = ended + stuck + unreachable(facts, everyone) + wrong
    found += filter(None, [leak(everyone), many_files(everyone), full_disk(facts)])
    found += [] if ended or stuck else slowed(everyone)
    kinds = [each.kind for each in found]
    found = [each for at, each in enumerate(found) if each.kind not in kinds[:at]]
    down = [name for name, fact in facts["hosts"].items() if "error" in fact]
    for each in found:
        hosts = {ranks[rank].host for rank in each.ranks if rank in ranks}
        each.hosts = down if each.kind == "network" else sorted(hosts)
    return found or [at_rest(facts, everyone)]


# ---- a run that has ended ----------------------------------------------------------------------
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
    own = [one for one in everyone if one.error and kind_of_error(one.error)]
    victims = [one for one in everyone if one.error and one not in own]
    gone = [one for one in everyone if one.state == "gone"]
    aborted = [one for one in gone if "Aborted" in one.crash]  # often because of another rank
    vanished = [one for one in gone if one not in aborted and not one.asked_to_end]
    if not own and (not vanished or aborted):
        return of_victims(everyone, aborted or victims) if aborted or victims else []
    # Who failed has said so at once; who vanished was last heard of up to two seconds before.
    end = {one: one.age + (3 if one.error or one.crash.strip() else 0) for one in own + vanished}
    if not end:
        return []
    first = max(end, key=end.get)
    if first.error:
        return [of_error(facts, first, own)]
    together = [one for one in vanished if end[first] - end[one] < 4]
    all_hung = len(together) == len(everyone) > 1 and min(x.quiet - x.age for x in together) > 10
    if all_hung and (hang := blocked([one for one in everyone if one.calls], "had")):
        return hang  # somebody lost patience
    files = many_files(everyone)
    if files and first.rank in files.ranks:  # it could not write a last word
        return [files]
    return [of_vanished(facts, together)]


def of_victims(everyone, some):
    """Return why ranks ended none of which has an error of its own.

    NCCL's watchdog and gloo, which was sent another size than it waits for, abort innocent ranks.
    """
    calls = [one for one in everyone if one.calls]
    hang = [found for found in blocked(calls, "had") if found.kind != "network"]
    if hang := hang or unusual(calls):
        return hang
    ranks, crash = [one.rank for one in some], some[0].crash
    if "Aborted" in crash and not re.search("torch/distributed|torch/autograd", crash):
        return [Finding("crash", ranks, f"{crash.splitlines()[0]}, at {traceback_place(crash)}")]
    said = message_of(some[0].error or "")[:200] or "aborted in a collective"
    reason = f"no rank has an error of its own; all that failed lost the others: {said}"
    return [Finding("network", ranks, reason, "a guess")]


def of_error(facts, first, own):
    """Return the finding of an error that is a rank's own."""
    kind, said = kind_of_error(first.error), message_of(first.error)
    same_error = [one.rank for one in own if kind_of_error(one.error) == kind
                  and (kind != "crash" or message_of(one.error) == said)]  # fmt: skip
    if kind == "crash" and facts["free"] < FULL:
        kind = "disk-full"
    reason = f"{said[:300]} (in step {first.step}, at {traceback_place(first.error)})"
    return Finding(kind, same_error, reason, "certain")


def traceback_place(text):
    """Return the innermost line of training code in the text of a traceback or of faulthandler."""
    if "most recent call first" in text:  # of the thread that crashed, turned round
        threads = [part for part in text.split("\n\n") if "most recent call first" in part]
        current = [part for part in threads if "Current thread" in part] or threads
        text = "\n".join(reversed(current[-1].splitlines()))
    places = re.findall(r'File "([^"]+)", line (\d+),? in (\S+)', text)
    own = [place for place in places if not FOREIGN.search(place[0])]
    if not own:
        return "an unknown line"
    file, line, function = own[-1]
    return f"{os.path.basename(file)}:{line} {function}"


def of_vanished(facts, gone):
    """Return the finding of ranks that ended without a word."""
    ranks, one = [each.rank for each in gone], gone[0]
    last = f"last heard of in {one.phase} of step {one.step}"
    if crashed := [each for each in gone if each.crash.strip()]:
        text = crashed[0].crash.strip()
        reason = f"{text.splitlines()[0]}, at {traceback_place(text)} ({last})"
        return Finding("segfault", [each.rank for each in crashed], reason, "certain")
    if full := full_disk(facts):
        reason = f"ended without a word, and {full.reason} ({last})"
        return Finding("disk-full", ranks, reason)
    why = "killed by signal 9 (SIGKILL): its process is gone and left no error"
    if len(gone) > 1:
        why = "all these ended within seconds and left no error: killed from outside, or the host"
    ask = f"ask the kernel on {one.host}: dmesg -T | grep -i -E 'out of memory|killed process'"
    return Finding("killed", ranks, f"{why} ({last}); {ask}")


def unreachable(facts, everyone):
    """Return the finding of ranks of which nothing is heard any more, nor of their processes."""
    lost = [one for one in everyone if one.state == "silent"]
    if not lost:
        return []
    hosts = sorted({one.host for one in lost})
    down = [f"{name} does not answer ({fact['error']})" for name, fact in facts["hosts"].items()
            if "error" in fact and any(same(name, host) for host in hosts)]  # fmt: skip
    told = "; ".join(down[:4]) or "their hosts were not looked at: give --hosts or --slurm-job"
    reason = f"silent for {max(one.age for one in lost):.0f} s; {told}"
    sure = "certain" if down else "a guess"
    return [Finding("host-unreachable", [one.rank for one in lost], reason, sure)]


# ---- a run that stands still -------------------------------------------------------------------
def limit_of(everyone):
    """Return how many seconds a phase may last before a run counts as standing still."""
    steps = [one.step_seconds for one in everyone if one.step_seconds]
    return max(10, 5 * median(steps)) if steps else 45


def hung(everyone):
    """Return why the run stands still; nothing if it moves."""
    if stopped := [one for one in everyone if one.state == "stopped"]:
        one = stopped[0]
        reason = f"the process is stopped, by SIGSTOP or a debugger, at {where(one)}; "
        reason += f"kill -CONT {one.pid} lets it go on"
        return [Finding("stopped-process", [x.rank for x in stopped], reason, "certain")]
    living = [one for one in everyone if one.lives]
    if apart := not_met(living):
        return apart
    if len(living) < len(everyone) or not living or takes_long(living):
        return []
    limit = limit_of(living)
    moves = any(one.quiet <= limit or one.phase == "compile" for one in living)
    return [] if moves else blocked(living, "has")


def takes_long(living):
    """Return whether all ranks are in something that is no step, and some rank works in it."""
    works = any((one.cpu or 0) > 0.05 for one in living) or min(x.quiet for x in living) < 60
    return works and len({one.phase for one in living}) == 1 and living[0].phase in REST


def not_met(living):
    """Return the finding of ranks that others wait for at the start, and which never came."""
    joining = [one for one in living if any(f[2] == "init_process_group" for f in one.frames)]
    if not joining or min(one.quiet for one in joining) < 20:
        return []
    missing = sorted(set(range(joining[0].world_size)) - {one.rank for one in living})
    reason = f"{len(missing)} have not come, and the others wait for them"
    if not missing:
        reason = "all have come, and wait for each other"
    return [Finding("rendezvous", missing, f"{reason}; preflight.py tells which links work")]


def blocked(still, verb):
    """Return why ranks that stand still do: who is not where the others wait, and where it is."""
    for members in groups_of(still).values():
        if found := differing({one.rank: calls for one, calls in members.items()}):
            return [found]
    late = late_ranks(still)
    in_data = [one for one in late or still if one.phase == "data" or
               any("/utils/data/" in frame[0] for frame in one.frames)]  # fmt: skip
    if in_data:
        one, ranks = in_data[0], [each.rank for each in in_data]
        reason = f"{verb} waited for the next batch of step {one.step} for {one.quiet:.0f} s, at "
        reason += where(one) + waited_for(still, late)
        return [Finding("hang-in-data", ranks, reason, "certain" if late else "likely")]
    if late:
        return [of_late(late, still, verb)]
    if still and all(waits(one) for one in still):
        call = next((calls[max(calls)] for one in still for calls in one.calls.values()), None)
        told = text_of(key(call)) if call else where(still[0])
        reason = f"all ranks are in the same collective, {told}, and it does not end"
        return [Finding("network", [], reason, "likely" if call else "a guess")]
    return []


def key(call):
    """Return what must be equal on all ranks of a group, and the line that called it."""
    return (call["name"], call["sizes"]), tuple(call["at"] or ())


def text_of(call):
    """Return what `key` gives as text: operation, sizes and the line that called it."""
    (name, sizes), at = call
    line = f" at {os.path.basename(at[0])}:{at[1]} {at[2]}" if at else ""
    return f"{name} {sizes}".strip() + line


def differing(members):
    """Return the finding if ranks of a process group called different collectives, else None."""
    history = []
    first = max((min(calls, default=0) for calls in members.values()), default=0)
    last = max((max(calls, default=0) for calls in members.values()), default=-1)
    for number in range(first, last + 1):
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
        reason = f"as number {number}, some call {text_of(odd)}, others {text_of(other)}"
        return Finding("mismatched-collective", wrong, f"{reason}; which is right?", sure)
    reason = f"{text_of(odd)} as number {number}, where the others call {text_of(usual)}"
    if odd == predicted([*history, usual]):
        return Finding("skipped-collective", wrong, f"went on without calling one: {reason}", sure)
    sizes = odd[0][0] == usual[0][0] and odd[0] != usual[0]
    what = "sizes differ" if sizes else "the order differs"
    return Finding("mismatched-collective", wrong, f"{what}: {reason}", sure)


def unusual(some):
    """Return the finding if the last call of a rank is not what followed before, else nothing."""
    for members in groups_of(some).values():
        for one, calls in members.items():
            *history, last = [key(call) for _, call in sorted(calls.items())]
            usual = predicted(history)
            if usual not in (None, last):
                others = {one.rank: last, -1: usual, -2: usual}
                found = of_difference(max(calls), others, history)
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


def late_ranks(still):
    """Return the ranks that have not entered the collective which others wait in."""
    for members in groups_of(still).values():
        last = {one: max(calls) for one, calls in members.items()}
        front = max(last.values())
        pends = any(calls.get(front, {}).get("pending") for calls in members.values())
        if pends and min(last.values()) < front:
            return [one for one in members if last[one] < front]
    waiting = [one for one in still if waits(one)]
    free = [one for one in still if one.frames and not waits(one)]
    return free if waiting and free else []


def waits(one):
    """Return whether a rank waits in a collective, as far as its calls and its stack tell."""
    pending = any(calls[max(calls)]["pending"] for calls in one.calls.values())
    names = ("distributed_c10d.py", "_functional_collectives.py", "rendezvous.py")
    return pending or any(os.path.basename(frame[0]) in names for frame in one.frames[-4:])


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
    """Return the rank that the others waited for in the last collectives, and in those before."""
    living = [one for one in everyone if one.lives]
    before, now = lateness(living, 0), lateness(living, 1)
    worst = max(now, key=now.get, default=None)
    for shares in (before, now):
        rest = max((share for one, share in shares.items() if one != worst), default=0)
        if shares.get(worst, 0) < max(LATE, 3 * rest):
            return []
    others = [one for one in living if one is not worst]
    data = more_than(others, "phases", worst, "data")
    line = max(worst.lines or {"?": 0}, key=lambda line: more_than(others, "lines", worst, line))
    task = "waiting for data" if data > now[worst] / 2 else "what it does itself"
    reason = f"slow in {task}: the others wait for it {now[worst]:.0%} of the time; more than they "
    reason += f"it is at {line.rpartition('/')[2]} ({more_than(others, 'lines', worst, line):+.0%})"
    return [Finding("straggler", [worst.rank], reason, "certain")]


def more_than(others, what, one, name):
    """Return by how much a rank's share of something is above the median of the others'."""
    usual = median((other.beat.get(what) or {}).get(name, 0) for other in others)
    return (one.beat.get(what) or {}).get(name, 0) - usual


def lateness(living, half):
    """Return for each rank the share of the time that others waited for it, or nothing.

    Half 0 is of the first 100 of the last 200 collectives, half 1 of those after them.
    """
    most = {}
    for members in groups_of(living).values():
        common = sorted(set.intersection(*(set(calls) for calls in members.values())))[-200:]
        if len(members) > 1 and len(common) >= 20:
            middle = len(common) // 2
            shares = shares_of(members, common[middle:] if half else common[:middle])
            most = max(most, shares, key=lambda some: max(some.values(), default=0))
    return most


def shares_of(members, common):
    """Return for each rank of a group the share of its time that others waited for it.

    Who calls a collective last makes the others wait, from when the first of them called it, or
    from when the collective before it could end. The two longest waits of each rank do not count:
    it may have saved something. On NCCL, who comes last waits least.
    """
    waits, ended = {one: [] for one in members}, 0.0
    ahead = {one: shift(one, members) for one in members}
    called = [{one: calls[n]["called"] + ahead[one] for one, calls in members.items()}
              for n in common]  # fmt: skip
    for at in called:
        last = max(at, key=at.get)
        waits[last].append(max(0, at[last] - max(ended, min(at.values()))))
        ended = max(ended, at[last])
    late = {one: sum(sorted(some)[:-2]) for one, some in waits.items()}
    spent = {one: [calls[n]["milliseconds"] for n in common] for one, calls in members.items()}
    if all(None not in some for some in spent.values()):
        longest = max(map(sum, spent.values()))
        late = {one: (longest - sum(some)) / 1000 for one, some in spent.items()}
    span = ended - min(called[0].values())
    return {one: seconds / span for one, seconds in late.items() if span > 1}


def shift(one, everyone):
    """Return what to add to a rank's times, so that they are by the clock of the run's folder."""
    if len({other.host for other in everyone}) == 1:
        return 0.0
    return median(x.beat["written"] - x.beat["time"] for x in everyone if x.host == one.host)


# ---- wrong numbers -----------------------------------------------------------------------------
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
    """Return the checks in the order of steps: step -> rank -> check."""
    found = defaultdict(dict)
    for one in everyone:
        for check in one.checks:
            found[check["step"]][one] = check
    return dict(sorted(found.items()))


def replicas(everyone):
    """Return the finding of weights that differ on ranks which have the same part of the model."""
    for step, checks in checks_of(everyone).items():
        for part in {one.shard for one in checks}:
            sums = {
                one.rank: check["weights"] for one, check in checks.items() if one.shard == part
            }
            usual, count = Counter(sums.values()).most_common(1)[0]
            ranks = [rank for rank, value in sums.items() if value != usual]
            if ranks:
                told = " from those of their replicas"
                if count <= len(ranks):
                    ranks, told = list(sums), ": one of them is wrong"
                reason = f"step {step}: the weights of rank {spans(ranks)} differ{told}"
                return Finding("replicas-differ", ranks, reason, "certain")
    return None


def same_data(everyone):
    """Return the finding of ranks that had the same input in the last two steps looked at."""
    checks = [each for each in checks_of(everyone).values() if len(each) == len(everyone)][-2:]
    shown = defaultdict(list)
    for one in everyone if len(checks) == 2 else ():
        shown[tuple(check[one]["data"] for check in checks)].append(one.rank)
    for inputs, ranks in shown.items():
        if len(ranks) > 1 and all(inputs):
            reason = f"ranks {spans(ranks)} get the same tokens"
            return Finding("same-data", ranks, reason, "certain")
    return None


def spike(everyone):
    """Return the finding of ranks whose loss was far above that of most, in two looks."""
    odd = []
    for checks in list(checks_of(everyone).values())[-2:]:
        means = {one.rank: mean(check["losses"]) for one, check in checks.items()}
        usual = median_low(means.values())
        limit = usual + max(0.5, 0.25 * usual)
        odd.append({rank for rank, loss in means.items() if loss > limit})
    ranks = sorted(set.intersection(*odd)) if len(odd) == 2 else []
    if not ranks or 2 * len(ranks) >= len(everyone):
        return None
    return Finding("loss-spike", ranks, "a loss far above other ranks', in two looks")


def unread(everyone):
    """Return the finding of a checkpoint that this start of the run could not read."""
    for line in (line for one in everyone for line in one.printed):
        if re.search(CLUES["corrupt-checkpoint"], line):
            return Finding("corrupt-checkpoint", [], line[:300], "certain")
    return None


# ---- what is used up ---------------------------------------------------------------------------
def leak(everyone):
    """Return the finding of ranks whose host memory grows all the time, not just once."""
    grown = {}
    for one in everyone:
        values = one.memory[-6:]
        rises = [after > before + 0.02 for before, after in pairwise(values)]
        by = values[-1] - values[0]
        if len(rises) > 2 and sum(rises) >= len(rises) - 1 and by > max(LEAK, 0.5 * values[0]):
            grown[one] = by
    if not grown:
        return None
    worst = max(grown, key=grown.get)
    values = ", ".join(f"{value:.2f}" for value in worst.memory[-6:])
    reason = f"the host memory of rank {worst.rank} grows and grows: {values} GiB"
    return Finding("host-memory-leak", [one.rank for one in grown], reason)


def many_files(everyone):
    """Return the finding of ranks with so many open files that soon no other can be opened."""
    count = {one: one.open_files or 0 for one in everyone}
    usual = min(count.values(), default=0) + 400
    many = [one for one in count if count[one] > min(0.8 * one.files_limit, usual)]
    if not many:
        return None
    worst = max(many, key=count.get)
    reason = f"rank {worst.rank} has {count[worst]} files open, of {worst.files_limit} at most"
    return Finding("too-many-open-files", [one.rank for one in many], reason)


def full_disk(facts):
    """Return the finding of a disk with no room for a checkpoint."""
    if facts["free"] >= FULL:
        return None
    reason = f"{facts['run']} has {facts['free'] / 2**20:.0f} MiB free"
    return Finding("disk-full", [], reason, "certain")


# ---- nothing wrong -----------------------------------------------------------------------------
def at_rest(facts, everyone):
    """Return what is the case where nothing is wrong, or that this cannot be told."""
    if not everyone:
        reason = f"no rank has written to {facts['run']}/ranks: was the script run by watched.py? "
        reason += "Did the launchers meet? preflight.py tells"
        return Finding("unknown", [], reason)
    ranks = [one.rank for one in everyone]
    if all(one.end == "finished" for one in everyone):
        if any(one.asked_to_end for one in everyone):
            reason = f"stopped at step {everyone[0].step}, as asked; the same command goes on"
            return Finding("interrupted", ranks, reason, "certain")
        return Finding("finished", ranks, "the run has finished", "certain")
    if ended := [one.rank for one in everyone if not one.lives]:
        return Finding("unknown", ended, "these ranks have ended, and the others not yet")
    longest, limit = max(one.quiet for one in everyone), limit_of(everyone)
    if longest > 20 and takes_long(everyone):
        busy = max(everyone, key=lambda one: one.cpu or 0)
        reason = f"all ranks are in {busy.phase} for {longest:.0f} s, rank {busy.rank} at "
        return Finding("slow-but-healthy", [], reason + where(busy))
    if longest > limit and not any(one.phase == "compile" for one in everyone):
        still = [one.rank for one in everyone if one.quiet > limit]
        reason = f"these ranks have not got on for {longest:.0f} s, and nothing shows why"
        return Finding("unknown", still, reason)
    steps = [one.step_seconds for one in everyone if one.step_seconds]
    pace = f", in {median(steps):.3g} s each" if steps else ""
    reason = f"the ranks take steps, now {max(one.step for one in everyone)}{pace}"
    return Finding("healthy", [], reason, "certain" if steps else "likely")


# ---- report ------------------------------------------------------------------------------------
def judge(facts):
    """Return the verdict on collected facts, as a dictionary, and the ranks."""
    ranks = ranks_of(facts)
    first, *others = find(facts, ranks)
    more = {"section": f"{CATALOGUE}#{first.kind}", "also": [vars(other) for other in others]}
    return vars(first) | more, ranks


def show(facts, verdict, ranks):
    """Print the ranks by what they do, what they wait in, and the verdict last."""
    groups = defaultdict(list)
    for one in ranks.values():
        groups[one.state, one.phase, one.step, one.error, str(one.frames[-30:])].append(one)
    size = next((one.world_size for one in ranks.values()), "an unknown number of")
    print(f"{facts['run']}: {len(ranks)} of {size} ranks")
    for some in sorted(groups.values(), key=len, reverse=True)[:12]:
        one, hosts = some[0], sorted({each.host for each in some})
        on = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
        print(f"  {spans(x.rank for x in some):8} on {on:10} {one.state:8} {one.phase:10} "
              f"step {one.step:<6} for {one.quiet:.0f} s")  # fmt: skip
        print(f"{'':11}{message_of(one.error)[:200] if one.error else 'at ' + where(one)}")
    for name, fact in facts["hosts"].items():
        if "error" in fact:
            print(f"note: {name} does not answer: {fact['error']}")
    for one in ranks.values():
        if one.fault:
            print(f"note: rank {one.rank} is watched in part: {one.fault.splitlines()[-1]}")
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
