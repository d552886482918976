"""Collect the facts about a run that whats_wrong.py judges.

The facts come from the files that watched.py writes to the run's folder, and from the processes on
each host. The run continues while this script collects the facts.
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
# A rank writes a heartbeat every two seconds. A rank is silent if it has not reported its end, its
# latest heartbeat is at least this number of seconds old, and its host gives no answer.
STALE = 10
# This pattern matches the paths of files that are not the user's code: the files of Python and of
# installed packages, watched.py, and inject.py.
FOREIGN = re.compile(r"/(site|dist)-packages/|/lib/python3|^<|/torch/csrc|/(watched|inject)\.py$")


# ---- hosts -------------------------------------------------------------------------------------
def reach_of(hosts_file):
    """Map the name of each host to the words that come before a command to run it on that host.

    For other hosts, the words call ssh; for the host of this script, there are no words. If
    `hosts_file` is None or has no names, the result has only the host of this script.
    """
    text = hosts_file.read_text() if hosts_file else ""
    # Each line of the file may have a host's name, a comment, or both.
    names = re.findall(r"^\s*([^\s#]+)", text, re.M) or [HERE]
    reach = {name: ["ssh", "-oBatchMode=yes", name] for name in names}
    # Compare host names without their domains, because a name may lack its domain in the file or in
    # HERE.
    reach |= {name: [] for name in names if name.split(".")[0] == HERE.split(".")[0]}
    return reach


def look_at(words, pids):
    """Ask a host for its name and for the states of its processes `pids`; return the answer.

    `words` come before a command to run it on the host. A state is the letter that ps shows. A
    process that has ended has no state. If the host does not answer, return the error instead.
    """
    files = [f"/proc/{pid}/stat" for pid in pids]
    command = [*words, "cat", "/proc/sys/kernel/hostname", *files]
    try:
        done = subprocess.run(command, timeout=8, check=False, text=True, capture_output=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)[:200]}
    if not done.stdout:
        return {"error": done.stderr.strip().rpartition("\n")[2][:200]}
    name, *lines = done.stdout.splitlines()
    # Skip processes in state Z: a zombie has ended, although /proc still lists it.
    states = re.findall(r"^(\d+) \(.*\) ([^Z]) ", "\n".join(lines), re.M)
    return {"host": name, "states": dict(states)}


# ---- the run's folder --------------------------------------------------------------------------
def gather(run, reach):
    """Return the facts about a run, which come from its folder and from the hosts in `reach`."""
    now = request_dumps(run)
    pids = {files["beat"]["pid"] for files in read_ranks(run, now).values()}
    # Ask up to 64 hosts at the same time, because each answer may take seconds.
    with ThreadPoolExecutor(64) as pool:
        answers = pool.map(lambda words: look_at(words, pids), reach.values())
        hosts = dict(zip(reach, answers, strict=True))
    disk = os.statvfs(run)
    free = disk.f_bavail * disk.f_frsize
    # Read the files again, because a rank may have written its error and ended in the meantime.
    return {"run": str(run), "ranks": read_ranks(run, now), "hosts": hosts, "free": free}


def request_dumps(run):
    """Ask all ranks for dumps; wait up to four seconds for the dumps of the running ranks.

    Return the time of the request by the file system's clock. If this script cannot write the
    request, return the time by this host's clock.
    """
    request = run / "ranks/dump"
    now = time.time()
    # If the folder belongs to a different user, touch() may fail. Then use the dumps that exist.
    with suppress(OSError):
        request.touch()
        now = changed(request)
    deadline = time.monotonic() + 4
    while time.monotonic() < deadline:
        ranks = read_ranks(run, now).values()
        running = [files for files in ranks if files["age"] < STALE and not files["beat"]["end"]]
        if all(files["dumped"] >= now for files in running):
            break
        time.sleep(0.1)
    return now


def read_ranks(run, now):
    """Map each rank of the run's latest start to the result of read_rank() for this rank.

    `now` is the result of request_dumps(): a time by the file system's clock, because the clocks of
    hosts differ.
    """
    paths = sorted((run / "ranks").glob("[0-9]*[0-9].json"))
    ranks = {int(path.stem): files for path in paths if (files := read_rank(path, now))}
    # Drop ranks that started at least 30 s before the latest rank, because their files are left
    # over from an earlier start.
    latest = min((files["runs"] for files in ranks.values()), default=0)
    return {rank: files for rank, files in ranks.items() if files["runs"] < latest + 30}


def read_rank(path, now):
    """Return the content of a rank's files, or None if the heartbeat in the file `path` is damaged.

    In the result, `age` is the number of seconds from the rank's last heartbeat to the time `now`,
    and `runs` is the number of seconds from the rank's start to this time.
    """
    beat, dump = read_json(path), path.with_suffix(".dump.json")
    if "started" not in beat:
        return None
    age = now - changed(path)
    return {
        "beat": beat,
        "age": age,
        "runs": age + beat["time"] - beat["started"],
        "dump": read_json(dump),
        "dumped": changed(dump),
        "crash": read_text(path.with_suffix(".crash")).strip(),
    }


def changed(path):
    """Return the time of the last change of a file, or 0 if there is no file."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0


def read_text(path):
    """Return the text of a file, or an empty text if there is no file."""
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def read_json(path):
    """Return the content of a JSON file, or an empty dictionary if there is no valid JSON."""
    with suppress(ValueError):
        return json.loads(read_text(path))
    return {}


# ---- from facts to ranks -----------------------------------------------------------------------
class Rank:
    """Hold all facts about a rank as attributes, including each value in the rank's heartbeat."""

    def __init__(self, files, host):
        # `age` is the number of seconds since the rank's last heartbeat. `crash` is the text that
        # faulthandler has written if the process has crashed in C code: the signal and the Python
        # stacks.
        vars(self).update(files["beat"], age=files["age"], crash=files["crash"])
        # The state is one of the words alive, stopped, finished, failed, gone and silent.
        self.state = state_of(files, host)
        self.lives = self.state in ("alive", "stopped")
        # `quiet` is the number of seconds since the rank last changed its step or its phase.
        self.quiet = self.time - self.since + self.age
        step = f"step {self.step}"
        self.position = step if self.phase == "other" else f"the {self.phase} phase of {step}"
        # Map each process group to the collectives that the rank has called in it: group ->
        # sequence number -> call.
        self.calls = defaultdict(dict)
        dump = files["dump"] if self.end != "finished" else {}
        for call in dump.get("collectives", []):
            # Leave out patient calls: their timeout is longer than a day, because a rank may wait
            # in them for hours without a fault.
            if not call["patient"]:
                self.calls[call["group"]][call["number"]] = call
        # Each frame of the main thread has a file, a line and a function; the outermost frame is
        # first. A stopped rank cannot write a dump, so use the only frame in its last heartbeat.
        self.frames = [self.frame] if self.state == "stopped" else dump.get("stack", [])


def ranks_of(facts):
    """Return a list with a Rank for each rank in `facts`, in the order of the ranks' numbers."""
    hosts = {fact["host"]: fact for fact in facts["hosts"].values() if "host" in fact}
    return [Rank(files, hosts.get(files["beat"]["host"])) for files in facts["ranks"].values()]


def state_of(files, host):
    """Return the state of a rank, judged by its files and, if its host answered, by its process."""
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
    """Describe, as a text, the innermost frame that is in the user's code.

    The text has the file, the line and the function, and also the code if this host has the file.
    If no frame is in the user's code, return "an unknown line".
    """
    own = [frame for frame in frames if not FOREIGN.search(frame[0])]
    if not own:
        return "an unknown line"
    file, line, function = own[-1]
    code = linecache.getline(file, int(line)).strip()[:80]
    return f"{os.path.basename(file)}:{line} {function}" + (f": {code}" if code else "")
