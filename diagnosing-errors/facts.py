"""Collect what whats_wrong.py and watch.py know about a run.

The facts come from the files that watched.py writes to the run's folder, and from the processes on
each host. Collecting them stops nothing.
"""

import json
import linecache
import os
import re
import subprocess
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

HERE = os.uname().nodename
# A rank writes a heartbeat every two seconds. After this many seconds without one, it is silent.
STALE = 10
# This pattern matches the files of Python, packages and these tools; other files are user code.
FOREIGN = re.compile(r"/(site|dist)-packages/|/lib/python3|^<|/torch/csrc|/(watched|inject)\.py$")


# ---- hosts -------------------------------------------------------------------------------------
def reach_of(hosts_file=None):
    """Return, for each host, the words that run a command there: none for this host."""
    if not hosts_file:
        return {HERE: []}
    lines = [line.partition("#")[0].split() for line in hosts_file.read_text().splitlines()]
    reach = {words[0]: ["ssh", "-oBatchMode=yes", words[0]] for words in lines if words}
    for name in reach:
        # A name may have a domain.
        if name.split(".")[0] == HERE.split(".")[0]:
            reach[name] = []
    return reach


def look_at(words, pids):
    """Return a host's own name, and the states of its processes as letters, as in ps."""
    files = [f"/proc/{pid}/stat" for pid in pids]
    command = [*words, "cat", "/proc/sys/kernel/hostname", *files]
    try:
        done = subprocess.run(command, timeout=8, check=False, text=True, capture_output=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)[:200]}
    if not done.stdout:
        return {"error": done.stderr.strip().rpartition("\n")[2][:200]}
    name, *lines = done.stdout.splitlines()
    # A zombie has ended, so skip its state Z.
    states = re.findall(r"^(\d+) \(.*\) ([^Z]) ", "\n".join(lines), re.M)
    return {"host": name, "states": dict(states)}


# ---- the run's folder --------------------------------------------------------------------------
def gather(run, reach, ask=True):
    """Return all facts about a run: from its folder and from its hosts."""
    ranks = read_ranks(run, ask)
    pids = {files["beat"]["pid"] for files in ranks.values()}
    # Ask all hosts at the same time.
    with ThreadPoolExecutor(64) as pool:
        answers = pool.map(lambda words: look_at(words, pids), reach.values())
        hosts = dict(zip(reach, answers, strict=True))
    # Read the files again, because a process that is gone may have written why in the meantime.
    ranks = read_ranks(run, ask=False)
    disk = os.statvfs(run)
    free = disk.f_bavail * disk.f_frsize
    return {"run": str(run), "ranks": ranks, "hosts": hosts, "free": free}


def read_ranks(run, ask=True):
    """Return the files of each rank of the latest start: rank -> read_rank().

    If `ask` is true, request dumps, and wait up to four seconds for them. The clocks of hosts
    differ, so all times are those of the file system that has the folder.
    """
    folder, deadline = run / "ranks", time.monotonic() + 4 * ask
    probe, asked = folder / ("dump" if ask else "clock"), time.time()
    # The folder may belong to a different user. If so, use the dumps that exist.
    with suppress(OSError):
        probe.touch()
        asked = changed(probe)
    ahead = asked - time.time()
    while True:
        paths = sorted(folder.glob("[0-9]*[0-9].json"))
        ranks = {int(path.stem): read_rank(path, time.time() + ahead) for path in paths}
        ranks = {rank: files for rank, files in ranks.items() if files}
        alive = [f for f in ranks.values() if f["age"] < STALE and not f["beat"]["end"]]
        if all(f["dumped"] >= asked for f in alive) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    # Files of ranks that started long before the others are left over from an earlier start.
    latest = min((files["runs"] for files in ranks.values()), default=0)
    return {rank: files for rank, files in ranks.items() if files["runs"] < latest + 30}


def read_rank(path, now):
    """Return the files of a rank, or None if its heartbeat is damaged.

    `age` is the number of seconds since the heartbeat, and `runs` since the start of the rank.
    """
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
        "crash": tail(path.with_suffix(".crash")).strip(),
    }


def changed(path):
    """Return the time of the last change of a file, or 0 if there is no file."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0


def read_json(path):
    """Return the dictionary in a file, or an empty dictionary if there is none."""
    with suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return {}


def tail(path):
    """Return the last 20 kB of a text file, or an empty text if there is no file."""
    with suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 20_000))
        return file.read().decode(errors="replace")
    return ""


# ---- from facts to ranks -----------------------------------------------------------------------
class Rank:
    """A rank; attributes that are not listed here are those of its heartbeat."""

    def __init__(self, files, host):
        self.beat = files["beat"]
        # The age of the heartbeat in seconds.
        self.age = files["age"]
        # The stacks that faulthandler wrote, if the process has crashed in C code.
        self.crash = files["crash"]
        # The state is alive, stopped, finished, failed, gone or silent.
        self.state = state_of(files, host)
        self.lives = self.state in ("alive", "stopped")
        # The time in seconds since this rank last changed its step or its phase.
        self.quiet = self.beat["time"] - self.since + self.age
        step = f"step {self.step}"
        self.position = step if self.phase == "other" else f"the {self.phase} phase of {step}"
        # The collectives: group -> number -> call.
        self.calls = defaultdict(dict)
        dump = files["dump"] if self.end != "finished" else {}
        for call in dump.get("collectives", []):
            # A rank may wait in a patient call for days.
            if not call["patient"]:
                self.calls[call["group"]][call["number"]] = call
        # The stack of the main thread as (file, line, function), outermost first. If the rank has
        # failed, the traceback has the line.
        self.frames = []
        if self.state == "stopped":
            # A stopped rank cannot write a dump, so its heartbeat has its latest frame.
            self.frames = [self.frame]
        elif dump and dump["reason"] != "failed":
            self.frames = dump["stacks"].get("MainThread") or []

    def __getattr__(self, name):
        return self.beat.get(name)


def ranks_of(facts):
    """Return the ranks by number."""
    hosts = {fact["host"]: fact for fact in facts["hosts"].values() if "host" in fact}
    files_of = dict(sorted(facts["ranks"].items()))
    return {rank: Rank(files, hosts.get(files["beat"]["host"])) for rank, files in files_of.items()}


def state_of(files, host):
    """Return the state of a rank, from its files and from its process, if the host answered."""
    beat = files["beat"]
    if beat["end"]:
        return beat["end"]
    if not host:
        return "alive" if files["age"] < STALE else "silent"
    process = host["states"].get(str(beat["pid"]))
    if not process:
        return "gone"
    return "stopped" if process in "Tt" else "alive"


def location_of(frames):
    """Return the innermost line of training code as text, with its code if the file is here."""
    own = [frame for frame in frames if not FOREIGN.search(frame[0])]
    if not own:
        return "an unknown line"
    file, line, function = own[-1]
    code = linecache.getline(file, int(line)).strip()[:80]
    return f"{os.path.basename(file)}:{line} {function}" + (f": {code}" if code else "")
