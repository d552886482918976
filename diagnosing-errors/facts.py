"""What whats_wrong.py and watch.py know of a run: its ranks' files, and their processes.

It reads what watched.py writes to the run's folder, asks the ranks for their stacks, and looks at
their processes on each host. It stops nothing.
"""

import json
import linecache
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

HERE = os.uname().nodename
STALE = 10  # seconds without a heartbeat, of which there is one every 2, that make a rank silent
FOREIGN = re.compile(r"/(site|dist)-packages/|/lib/python3|^<|/torch/csrc|/(watched|inject)\.py$")


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
    here = HERE.split(".")[0]  # names may have a domain
    return {x: [] if x.split(".")[0] == here else before.format(x).split() for x in names}


def output(command, seconds):
    """Run a command for so many seconds at most; return its output and errors."""
    try:
        done = subprocess.run(command, timeout=seconds, check=False, text=True, capture_output=True)
        return done.stdout, done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)


def look_at(reach, known, quiet):
    """Return a host's own name, and of its processes the state, a letter as in ps, and stacks.

    `known` are pairs of a process's number, which another may have by now, and when it was started.
    """
    files = [f"/proc/{pid}/stat" for pid in {pid for pid, _ in known}]
    out, errors = output([*reach, "cat", "/proc/sys/kernel/hostname", *files], 8)
    if not out:
        return {"error": (errors.strip().splitlines() or ["no answer"])[-1][:200]}
    name, *lines = out.splitlines()
    told = re.findall(r"^(\d+) \(.*\) ([^Z])(?: \S+){18} (\d+) ", "\n".join(lines), re.M)
    found = {pid: state for pid, state, start in told if (int(pid), int(start)) in known}
    ask = [pid for pid, state in found.items() if state in "Tt" or int(pid) in quiet]
    return {"host": name, "states": found, "stacks": {pid: spy(reach, pid) for pid in ask}}


def spy(reach, pid):
    """Return the (file, line, function) of a process's main thread, if py-spy can tell."""
    beside = Path(sys.executable).with_name("py-spy")
    tool = beside if beside.exists() else "py-spy"
    with suppress(ValueError, KeyError, StopIteration):
        said, _ = output([*reach, tool, "dump", "--json", "--nonblocking", "--pid", pid], 4)
        main = next(one for one in json.loads(said) if one["os_thread_id"] == int(pid))
        return [[f["filename"], f["line"], f["name"]] for f in reversed(main["frames"])]
    return []


# ---- the run's folder --------------------------------------------------------------------------
def gather(args, ask=True):
    """Return all facts: of the run's folder and of its hosts."""
    ranks = read_ranks(args.run, ask)
    known = {(files["beat"]["pid"], files["beat"].get("born")) for files in ranks.values()}
    quiet = [files["beat"]["pid"] for files in ranks.values() if files["age"] > STALE / 2]
    with ThreadPoolExecutor(64) as pool:  # all hosts are asked at once
        asked = {x: pool.submit(look_at, words, known, quiet) for x, words in args.reach.items()}
        hosts = {name: answer.result() for name, answer in asked.items()}
    disk = os.statvfs(args.run)
    free = disk.f_bavail * disk.f_frsize
    return {"run": str(args.run), "ranks": ranks, "hosts": hosts, "free": free}


def read_ranks(run, ask=True):
    """Return what the ranks of the newest start have written: rank -> what `read_rank` returns.

    If this asks for dumps, it waits until they are there, up to 4 seconds. Hosts' clocks differ:
    times are those of the file system that has the folder.
    """
    folder, until = run / "ranks", time.monotonic() + 4 * ask
    probe, asked = folder / ("dump" if ask else "clock"), time.time()
    with suppress(OSError):  # a folder of another user: older dumps have to do
        probe.touch()
        asked = changed(probe)
    ahead = asked - time.time()
    while True:
        paths = sorted(folder.glob("[0-9]*[0-9].json"))
        read = {int(path.stem): read_rank(path, time.time() + ahead) for path in paths}
        found = {rank: files for rank, files in read.items() if files}
        awaited = [f for f in found.values() if f["age"] < STALE and not f["beat"]["end"]]
        if all(f["dumped"] >= asked for f in awaited) or time.monotonic() > until:
            newest = min((files["runs"] for files in found.values()), default=0)
            return {rank: files for rank, files in found.items() if files["runs"] < newest + 30}
        time.sleep(0.1)


def read_rank(path, now):
    """Return what a rank has written, or nothing; `age`, `runs`: seconds since then, and in all."""
    beat, dump = read_json(path), path.with_suffix(".dump.json")
    if "started" not in beat:
        return None
    beat["written"] = changed(path)
    age = now - beat["written"]
    return {
        "beat": beat,
        "age": age,
        "runs": age + beat["time"] - beat["started"],
        "dump": read_json(dump),
        "dumped": changed(dump),
        "crash": tail(path.with_suffix(".crash"), 20_000),
    }


def changed(path):
    """Return when a file was last changed, 0 for one that is not there."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0


def read_json(path):
    """Return a file's dictionary, an empty one if there is none."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else {}
    return {}


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
        beat, dump, host = files["beat"], files["dump"], shown.get(files["beat"]["host"])
        one = found[rank] = Rank(rank, beat, files["age"], files["crash"], state_of(files, host))
        if dump and dump["time"] > beat["started"] and beat["end"] != "finished":
            for call in dump["collectives"]:
                if not call["patient"]:  # who waits there may wait for days
                    one.calls.setdefault(call["group"], {})[call["number"]] = call
            if dump["reason"] != "failed":  # then the traceback tells where
                one.frames = dump["stacks"].get("MainThread") or []
        if one.state in ("stopped", "stuck"):  # which cannot say it themselves
            one.frames = host["stacks"].get(str(beat["pid"])) or one.frames
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


def location_of(frames):
    """Return the innermost line of training code, as text, with the code if its file is at hand."""
    own = [frame for frame in frames if not FOREIGN.search(frame[0])]
    if not own:
        return "an unknown line"
    file, line, function = own[-1]
    code = linecache.getline(file, int(line)).strip()[:80]
    return f"{os.path.basename(file)}:{line} {function}" + (f": {code}" if code else "")
