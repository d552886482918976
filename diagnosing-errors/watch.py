"""Watch a run: which rank is slow, which has stalled, how long the rest takes.

Live:      python diagnosing-errors/watch.py outputs/diagnosing-errors
Once:      python diagnosing-errors/watch.py outputs/diagnosing-errors --once
With GPUs: python diagnosing-errors/watch.py outputs/diagnosing-errors --slurm-job 1234

All that it shows of ranks and steps the run itself has written: a file per rank every two seconds,
in ranks/, and metrics.jsonl. So it works wherever the folder can be seen. A step has four shares:
data, waiting for a batch; own, computing until the ranks must meet; wait, waiting for the slowest
of them; rest, what all then do together: the last backward, the exchange of gradients, AdamW.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median, median_low

SILENT = 6  # seconds without a heartbeat, of which there is one every two
SILENT_AT_REST = 30  # imports hold Python's lock, and a save keeps the storage busy
ENDED = ("finished", "stopped", "failed")
STEPPING = ("data", "compute")
ASK = "index,uuid,utilization.gpu,power.draw,temperature.gpu,clocks.sm"
SMI = f'nvidia-smi --query-gpu={ASK} --format=csv,noheader,nounits | sed "s/^/$(hostname), /"'
SSH = "ssh -n -o BatchMode=yes -o ConnectTimeout=5".split()
GPU_COLUMNS = {"GPU %": "percent", "W": "watt", "°C": "celsius", "MHz": "mhz"}
FIRST_TO_GO = "MHz|°C|W|GPU GiB|rest|data|own|wait|host GiB|GPU %|for|bar|step s|host".split("|")
LEAST_WIDTH = {"phase": 10, "for": 6, "step s": 6}  # or else columns would jump
SHARES = {"data": "▒", "own": "█", "wait": "·", "rest": "─"}
BAR = " ".join(
    character + name for name, character in SHARES.items()
)  # the title of the bars tells their characters
STYLES = {"": "", "title": "bold", "note": "dim", "slow": "bold yellow", "memory": "magenta"}


# ---- command line ----------------------------------------------------------------------------


def parse_args(argv=None):
    """Return the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="exit status of --once and --json: 0 all is well, 1 something is marked, 2 no run",
        allow_abbrev=False,
    )
    parser.error = fail
    add = parser.add_argument
    add("run", type=Path, help="the run's folder, such as outputs/diagnosing-errors")
    add("--once", action="store_true", help="print one picture and exit")
    add("--json", action="store_true", help="print one picture as JSON and exit")
    add("--rows", type=int, help="most ranks to show (default: what fits; 20 if not live)")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--ssh", action="store_true", help="ask nvidia-smi on the run's hosts over ssh")
    add("--hosts", type=Path, metavar="FILE", help="the same on the hosts of a file, one a line")
    add("--slurm-job", metavar="ID", help="the same on the job's hosts, by srun --overlap")
    args = parser.parse_args(argv)
    if not args.run.is_dir():
        fail(f"{args.run}: there is no such folder")
    if args.rows is not None and args.rows < 1:
        fail(f"--rows must be at least 1, not {args.rows}")
    return args


def fail(message):
    """Stop because of what the user gave us: one line on stderr, exit status 2."""
    print(f"{Path(__file__).name}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


# ---- what is known of a run ------------------------------------------------------------------


@dataclass
class Rank:
    """What is known of one rank: seconds and GiB; None where it is not known yet."""

    rank: int
    host: str = ""
    phase: str = "compute"
    step: int = 1  # the one being worked on
    age: float = 0.0  # since its last heartbeat
    life: float = 60.0  # since its first
    in_phase: float = 0.0
    since_step: float | None = None  # since its last whole step
    step_seconds: float | None = None
    data_seconds: float | None = None
    local_seconds: float | None = None  # data and own computing, until ranks wait for each other
    host_memory_gib: float | None = None
    host_memory_gib_first: float | None = None
    device_memory_gib: float | None = None
    device: str = "cpu"
    device_uuid: str | None = None
    world_size: int = 1
    num_steps: int | None = None
    stall_after: float = 300.0
    error: str | None = None
    warning: str | None = None  # what the run itself has noticed
    losses: tuple = ()  # this rank's own, of the last steps
    gpu: dict | None = None  # what nvidia-smi says


@dataclass
class State:
    """What is known of a run at one moment."""

    run: Path
    ranks: list
    rows: list = field(default_factory=list)  # of metrics.jsonl
    unreadable: int = 0  # files and rows
    exported: bool = False  # the model was written after the last row
    no_answer: list = field(default_factory=list)  # hosts whose nvidia-smi says nothing


@dataclass
class Mark:
    """Something that is not as it should be, and the ranks that a person should look at first."""

    kind: str
    ranks: list
    text: str


def number(value):
    """Return whether a value is a number that can be computed with."""
    return isinstance(value, int | float) and math.isfinite(value)


def rank_of(text):
    """Return the Rank that a heartbeat tells of, as if it were new; None if it is none."""
    try:
        beat = json.loads(text)
        now, started = beat["time"], beat["started"]
        # differences of one host's times only, since the clocks of two may differ by minutes
        told = {"life": now - started, "in_phase": now - beat["since"]}
        told["since_step"] = now - beat["step_ended"] if beat["step_ended"] else None
        for name in Rank.__dataclass_fields__:
            value = beat.get(name)
            fits = str if name in TEXTS else int if name in WHOLE else int | float
            if isinstance(value, fits) and (fits is str or math.isfinite(value)):
                told.setdefault(name, value)
        told["losses"] = tuple(x for x in beat.get("losses") or () if isinstance(x, float))
        whole = all(name in told for name in (*WHOLE, "host", "phase"))
        return Rank(**told) if whole and math.isfinite(now - started - beat["since"]) else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


TEXTS = ("host", "phase", "device", "device_uuid", "error", "warning")
WHOLE = ("rank", "step", "world_size")


def aged(rank, age):
    """Return a Rank whose heartbeat is so many seconds old: all that lasted has gone on."""
    lasted = {name: getattr(rank, name) for name in ("life", "in_phase", "since_step")}
    longer = {name: value + age for name, value in lasted.items() if value is not None}
    return replace(rank, age=age, **longer)


def outcome(state):
    """Return how a run has ended: finished, stopped or failed; or None while it goes on."""
    phases = {rank.phase for rank in state.ranks}
    if not phases:
        return "finished" if state.exported else None
    if going(state.ranks) or len(state.ranks) < state.ranks[0].world_size:
        return None
    return next(phase for phase in ("failed", "stopped", "finished") if phase in phases)


def going(ranks):
    """Return the ranks that have not said that they end."""
    return [rank for rank in ranks if rank.phase not in ENDED]


# ---- reading ---------------------------------------------------------------------------------


class Reader:
    """Reads a run's folder again and again, and of its files only those that have changed."""

    def __init__(self, run):
        self.run = run
        self.beats = {}  # from file name to its stamp, its age when it was read, when, and the Rank
        self.rows, self.bad_rows = [], 0
        self.read_to = (None, 0)  # of metrics.jsonl: which file, and how many bytes
        self.before = 0.0  # when the folder was last read

    def read(self):
        """Return the State; stop if there is nothing of a run."""
        folder = self.run / "ranks"
        self.clock = file_clock(folder if folder.is_dir() else self.run)
        self.read_beats(folder)
        self.read_rows(self.run / "metrics.jsonl")
        now = time.monotonic()
        told = sorted(self.beats.items())
        ranks = [aged(rank, age + now - then) for _, (_, age, then, rank) in told if rank]
        if not ranks and not self.rows:
            fail(f"{self.run}: neither ranks/ nor metrics.jsonl tells of a run; is it its folder?")
        unreadable = self.bad_rows + len(told) - len(ranks)
        return State(self.run, ranks, self.rows, unreadable, self.exported())

    def read_beats(self, folder):
        """Read the heartbeats that are new."""
        found, now = stats_in(folder), time.monotonic()
        newest = max((stat.st_mtime for stat in found.values()), default=0.0)
        beats, self.beats = self.beats, {}
        for name, stat in found.items():
            stamp, known = (stat.st_mtime_ns, stat.st_ino), beats.get(name)
            if known is None or known[0] != stamp:
                age = max(0.0, (self.clock or newest) - stat.st_mtime)
                if known:  # on some storage the writer's clock makes the stamp; here is another
                    age = min(age, now - self.before)
                with contextlib.suppress(OSError):
                    known = (stamp, age, now, rank_of((folder / name).read_bytes()))
            if known:
                self.beats[name] = known
        self.before = now

    def read_rows(self, path):
        """Read the rows of metrics.jsonl that are new and whole; all, if it is another file."""
        with contextlib.suppress(OSError), open(path, "rb") as file:
            stat = os.fstat(file.fileno())
            inode, start = self.read_to
            if stat.st_ino != inode or stat.st_size < start:
                self.rows, self.bad_rows, start = [], 0, 0
            file.seek(start)
            lines, end, _ = file.read().rpartition(b"\n")
            self.read_to = (stat.st_ino, start + len(lines) + len(end))
            rows = list(map(row_in, lines.splitlines()))
            self.rows += filter(None, rows)
            self.bad_rows += rows.count(None)

    def exported(self):
        """Return whether the model was written after the last row of the metrics."""
        with contextlib.suppress(OSError):
            model, rows = (self.run / name for name in ("model", "metrics.jsonl"))
            return model.stat().st_mtime >= rows.stat().st_mtime
        return False

    def look_closer(self, state):
        """Return the State; if ranks seem silent, that of seconds later: do their files change?

        The same without a clock of the folder, as nothing else tells then whether all are dead.
        """
        if silences(state.ranks) or (going(state.ranks) and self.clock is None):
            time.sleep(3 if self.clock else SILENT + 1)
            return self.read()
        return state


def file_clock(folder):
    """Return the time, in unix seconds, by the clock that stamps the files of a folder, or None.

    A new file also makes NFS ask the server for what else is new in the folder.
    """
    probe = folder / f".watch-{uuid.uuid4().hex}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:
        return None
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def stats_in(folder):
    """Return the stat of each heartbeat's file, by name."""
    found = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name[:-5].isdigit() and entry.name.endswith(".json"):
                with contextlib.suppress(OSError):  # it is replaced this very moment
                    found[entry.name] = entry.stat()
    return found


def row_in(line):
    """Return a row of metrics.jsonl, or None if it is none."""
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line)
        return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
    return None


# ---- GPUs ------------------------------------------------------------------------------------


class Gpus:
    """Asks nvidia-smi on all hosts again and again, in threads, for which nobody waits."""

    def __init__(self, commands):
        """Start to ask; `commands` are by the name of who is asked."""
        self.asked = set(commands)
        self.answers = {}  # from name to (when, what nvidia-smi said, by host)
        self.few = threading.Semaphore(32)  # a thousand ssh at once would be felt
        for name, command in commands.items():
            threading.Thread(target=self.keep_asking, args=(name, command), daemon=True).start()

    def keep_asking(self, name, command):
        """Ask every five seconds."""
        while True:
            with self.few:
                said = gpus_in(answer(command))
            self.answers[name] = (time.monotonic(), said)
            time.sleep(5)

    def wait(self, seconds):
        """Wait until all have answered or failed, but not for ever."""
        deadline = time.monotonic() + seconds
        while self.asked - set(self.answers) and time.monotonic() < deadline:
            time.sleep(0.05)

    def add_to(self, state):
        """Give each rank what is known of its GPU; name the hosts that do not answer."""
        now, found = time.monotonic(), {}
        silent = set()
        for name, (when, said) in list(self.answers.items()):
            if said and now < when + 30:
                found |= said
            else:
                silent.add(short(name))
        for rank in state.ranks:
            rank.gpu = gpu_of(rank, found.get(short(rank.host), []))
        if self.asked and self.asked <= set(self.answers):
            hosts = {short(rank.host) for rank in state.ranks if rank.device != "cpu"}
            silent |= hosts - set(found)
        state.no_answer = sorted(silent)
        return state


def gpu_commands(args, ranks):
    """Return the commands that ask nvidia-smi, by whom they ask."""
    if args.slurm_job:
        job = f"--jobid={args.slurm_job}"
        nodes = answer(["squeue", "--noheader", f"--jobs={args.slurm_job}", "--format=%D"]).strip()
        srun = f"srun {job} --overlap --nodes={nodes or 1} --ntasks-per-node=1 --quiet".split()
        return {f"job {args.slurm_job}": [*srun, "sh", "-c", SMI]}
    if args.hosts or args.ssh:
        hosts = hosts_in(args.hosts) if args.hosts else sorted({rank.host for rank in ranks})
        return {host: [*SSH, host, SMI] for host in hosts}
    here = socket.gethostname()
    mine = any(rank.device != "cpu" and short(rank.host) == short(here) for rank in ranks)
    return {here: ["sh", "-c", SMI]} if mine and shutil.which("nvidia-smi") else {}


def hosts_in(path):
    """Return the hosts of a file, the first word of each line; # begins a comment."""
    try:
        lines = [line.partition("#")[0].split() for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        fail(f"--hosts {path}: {error}")
    return [words[0] for words in lines if words] or fail(f"--hosts {path}: it names no host")


def answer(command):
    """Return what a command prints within ten seconds."""
    try:
        return subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=10,
        ).stdout.decode(errors="replace")
    except subprocess.TimeoutExpired as error:  # of many hosts, one may hang
        return (error.stdout or b"").decode(errors="replace")
    except OSError:
        return ""


def gpus_in(text):
    """Return what nvidia-smi has said: lists of GPUs by host; None where a value is not known."""
    found = {}
    for line in text.splitlines():
        host, *words = map(str.strip, line.split(","))
        if len(words) == 6 and words[0].isdigit():
            values = [float(word) if re.fullmatch(r"[\d.]+", word) else None for word in words[2:]]
            gpu = dict(zip(GPU_COLUMNS.values(), values, strict=True))
            gpu |= {"index": int(words[0]), "uuid": words[1].removeprefix("GPU-")}
            found.setdefault(short(host), []).append(gpu)
    return found


def gpu_of(rank, gpus):
    """Return the GPU of a rank among those of its host, or None."""
    if rank.device_uuid:
        key, mine = "uuid", rank.device_uuid.removeprefix("GPU-")
    else:  # which is the right one only if CUDA_VISIBLE_DEVICES hides none
        key, mine = "index", int(re.sub(r"\D", "", rank.device) or -1)
    return next((gpu for gpu in gpus if gpu[key] == mine), None)


def short(host):
    """Return a host's name without its domain."""
    return host if host.replace(".", "").isdigit() else host.partition(".")[0]


# ---- judging ---------------------------------------------------------------------------------


def marks(state):
    """Return what is not as it should be, the gravest first: a list of Mark."""
    alive = going(state.ranks)
    ends = [*failures(state.ranks), *silences(state.ranks)]
    return [
        *sorted(ends, key=lambda mark: -max(rank.age for rank in mark.ranks)),  # what came first
        *absences(state.ranks),
        *stalls([rank for rank in alive if not is_silent(rank)]),
        *stragglers(alive, state.rows),
        *memory_growth(alive),
        *warnings(alive),
        *bad_losses(state.rows),
        *odd_losses(alive),
    ]


def failures(ranks):
    """Mark ranks that say that they have failed, and tell why the first of them did."""
    failed = sorted((rank for rank in ranks if rank.phase == "failed"), key=lambda rank: -rank.age)
    if not failed:
        return []
    first, *rest = failed
    why = next(reversed((first.error or "").strip().splitlines()), "it does not say why")
    also = f"; then {who(rest)}" if rest else ""
    return [Mark("failed", failed, f"{who([first])} in step {first.step}: {why[:300]}{also}")]


def is_silent(rank, least=SILENT):
    """Return whether no heartbeat has come for longer than a healthy rank would need."""
    return rank.age > (least if rank.phase in (*STEPPING, "evaluation") else SILENT_AT_REST)


def silences(ranks):
    """Mark ranks whose process is gone or stopped, or whose host is."""
    alive = going(ranks)
    # where a rank has failed, a missing heartbeat soon means something: it may be the cause
    least = SILENT / 2 if any(rank.phase == "failed" for rank in ranks) else SILENT
    silent = [rank for rank in alive if is_silent(rank, least)]
    if not silent:
        return []
    whom, why = who(silent), "killed or stopped, or the host is gone"
    if len(silent) == len(ranks) > 1:
        whom, why = "any rank", "all are killed, or the storage hangs, or a new start is under way"
    since = span(min(rank.age for rank in silent))
    return [Mark("silent", silent, f"no heartbeat of {whom} for {since}: {why}")]


def absences(ranks):
    """Mark ranks that have never written anything, while the others have long begun."""
    here = {rank.rank for rank in ranks}
    gone = [Rank(rank) for rank in range(ranks[0].world_size if ranks else 0) if rank not in here]
    if not gone or max(rank.life for rank in ranks) < SILENT_AT_REST:
        return []
    return [Mark("missing", gone, f"{who(gone)} of {ranks[0].world_size:,} never came")]


def patience(rank):
    """Return how many seconds a rank may take for what it does now."""
    if rank.phase not in STEPPING:  # minutes are usual; to load may take longer still
        return math.inf if rank.phase == "start" else 4 * rank.stall_after
    if rank.step_seconds:
        return max(10.0, 5 * rank.step_seconds)
    if rank.since_step is None:  # the first step compiles
        return rank.stall_after
    return min(rank.stall_after, max(10.0, 5 * (rank.life - rank.since_step)))


def stalls(alive):
    """Mark that no step ends, and name the ranks that do something else than most."""
    # after a long checkpoint the last step is long ago, and the new phase has only begun
    quiet = [min(rank.in_phase, rank.since_step or math.inf) for rank in alive]
    stuck = [rank for rank, wait in zip(alive, quiet, strict=True) if wait > patience(rank)]
    if not stuck:
        return []
    usual, count = Counter((rank.step, rank.phase) for rank in alive).most_common(1)[0]
    odd = [rank for rank in alive if (rank.step, rank.phase) != usual]
    since = span(max(rank.since_step or rank.in_phase for rank in stuck))
    most = f"{count:,} of {len(alive):,} ranks" if odd else "all ranks"
    text = f"no step has ended for {since}: {most} are in {usual[1]} of step {usual[0]}"
    if odd:
        text += f", {who(odd)} in {odd[0].phase} of step {odd[0].step}"
    return [Mark("stalled", odd or stuck, text)]


def lasting(rows, slow):
    """Return whether the others have waited for one of these in nearly all rows of ten seconds.

    A row or two may be of a moment in which a host had other work.
    """
    told = [row for row in rows[-1000:] if number(row.get("skew"))]
    first = told[-1]["step"] - 10 / slow[0].step_seconds if told else 0
    recent = max(told[-3:], [row for row in told if row["step"] > first], key=len)
    names = {rank.rank for rank in slow}
    waited = [row for row in recent if row["skew"] >= 0.1 and row.get("slowest_rank") in names]
    return len(recent) >= 3 and len(waited) >= 0.8 * len(recent)


def stragglers(alive, rows):
    """Mark ranks that work clearly longer for a step than most, so that the others wait."""
    timed = [rank for rank in alive if rank.step_seconds and rank.local_seconds is not None]
    if len(timed) < 2:
        return []
    # of two ranks, the lower one: the mean would hide one that takes half as long again
    usual = median_low(rank.local_seconds for rank in timed)
    data = median_low(rank.data_seconds or 0.0 for rank in timed)
    slow = [
        rank
        for rank in sorted(timed, key=lambda rank: -rank.local_seconds)
        if rank.local_seconds >= max(1.3 * usual, usual + 0.15 * rank.step_seconds)
    ]
    if not slow or not lasting(rows, slow):
        return []
    worst, *rest = slow
    for_data = (worst.data_seconds or 0.0) - data > (worst.local_seconds - usual) / 2
    text = f"{who([worst])} works {span(worst.local_seconds)} for a step, most {span(usual)}; "
    text += f"the difference is in its {'data' if for_data else 'computing'}"
    return [Mark("slow", slow, text + (f"; slow too: {who(rest)}" if rest else ""))]


def memory_growth(alive):
    """Mark ranks that hold much more memory of their host than after their first steps, in GiB."""
    sizes = {
        rank.rank: (rank.host_memory_gib, rank.host_memory_gib_first)
        for rank in alive
        if rank.host_memory_gib and rank.host_memory_gib_first
    }
    grown = {
        rank: now - first
        for rank, (now, first) in sizes.items()
        if now > max(1.2 * first, first + 0.5)
    }
    if not grown:
        return []
    ranks = [rank for rank in alive if rank.rank in grown]
    now, first = sizes[max(grown, key=grown.get)]
    text = f"{who(ranks)}: {first:.2f} GiB of host memory at first, {now:.2f} now"
    return [Mark("memory", ranks, text + (" where it is most" if len(ranks) > 1 else ""))]


def warnings(ranks):
    """Return what the run itself warns of: all ranks have the same warning."""
    told = {rank.warning: rank for rank in ranks if rank.warning}
    return [Mark("warning", [rank], text) for text, rank in told.items()]


def bad_losses(rows):
    """Mark that the newest loss is no number, or far above the ten logged before it."""
    told = [row for row in rows if isinstance(row.get("loss"), float)][-11:]
    if not told:
        return []
    *before, (step, loss) = [(row["step"], row["loss"]) for row in told]
    if not math.isfinite(loss):
        return [Mark("loss", [], f"the loss of step {step} is {loss}")]
    usual = median(loss for _, loss in before) if len(before) >= 4 else math.inf
    if loss - usual > max(0.5, 0.25 * abs(usual)):
        return [Mark("loss", [], f"the loss of step {step} is {loss:.4g}, before it {usual:.4g}")]
    return []


def odd_losses(ranks):
    """Mark ranks whose own losses are far above those of most: they have other data.

    A heartbeat of seconds ago is of other steps, and in its first steps a model learns fast.
    """
    newest = max((rank.step for rank in ranks), default=0)
    means = {
        rank.rank: fmean(rank.losses) for rank in ranks if rank.losses and rank.step > newest - 5
    }
    usual = median_low(means.values()) if means else 0.0
    found = [rank for rank in ranks if means.get(rank.rank, 0) - usual > max(0.5, 0.25 * usual)]
    if not found or 2 * len(found) >= len(means):
        return []
    worst = max(means.values())
    return [Mark("loss", found, f"{who(found)}: a loss of {worst:.4g}, the usual is {usual:.4g}")]


# ---- words -----------------------------------------------------------------------------------


def who(ranks):
    """Return what to call some ranks: ranks 8–15 (gpu2)."""
    parts = []
    for rank in sorted(rank.rank for rank in ranks):
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    names = [str(a) if a == b else f"{a}–{b}" for a, b in parts[:6]]
    more = f" and {len(ranks) - sum(b - a + 1 for a, b in parts[:6]):,} more" if parts[6:] else ""
    hosts = {short(rank.host) for rank in ranks} - {""}
    where = f" ({hosts.pop() if len(hosts) == 1 else f'{len(hosts)} hosts'})" if hosts else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(names)}{more}{where}"


def span(seconds):
    """Return seconds in words of a person."""
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.{int(seconds < 10)}f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 2880 else f"{minutes // 1440} days"


def last(rows, name):
    """Return the newest number of that name, or None."""
    return next((row[name] for row in reversed(rows) if number(row.get(name))), None)


def facts(state):
    """Return what is known of the whole run, by name; None where nothing is."""
    rows, alive = state.rows, going(state.ranks)
    at = max((rank.step for rank in state.ranks), default=None) or last(rows, "step")
    num_steps = next((rank.num_steps for rank in state.ranks if rank.num_steps), None)
    times = [rank.step_seconds for rank in alive if rank.step_seconds]
    ended = [rank.since_step for rank in alive if rank.since_step is not None]
    names = ("loss", "val_loss", "grad_norm", "tokens_per_second", "skew")
    return {
        "step": at,
        "num_steps": num_steps,
        **{name: last(rows, name) for name in names},
        "since_step": min(ended, default=None),
        "seconds_left": (num_steps - at) * median(times) if num_steps and times else None,
    }


def summary(rows):
    """Return what metrics.jsonl says of a whole run, by name."""
    speeds = [row["tokens_per_second"] for row in rows if number(row.get("tokens_per_second"))]
    skewed = [row for row in rows if number(row.get("skew"))]
    worst = max(skewed, key=lambda row: row["skew"], default={})
    slowest = Counter(str(row.get("slowest_rank")) for row in skewed).most_common(1)
    return {
        **{name: last(rows, name) for name in ("step", "loss", "val_loss")},
        "median_tokens_per_second": median(speeds) if speeds else None,
        "largest_skew": worst.get("skew"),
        "at_step": worst.get("step"),
        "slowest_rank": slowest[0][0] if slowest else None,
        "slowest_times": slowest[0][1] if slowest else None,
        "of_rows": len(skewed),
    }


def sentence(known, texts):
    """Return the texts of what is known, with it filled in, as one line."""
    return ", ".join(
        text.format(**known) for name, text in texts.items() if known[name] is not None
    )


def headlines(state, how):
    """Return what there is to say of the whole run: lines."""
    if how:
        return summary_lines(state, how)
    known = facts(state)
    known["of"] = f" of {known['num_steps']:,}" if known["num_steps"] else ""
    known |= {f"{name}_text": span(known[name] or 0) for name in ("since_step", "seconds_left")}
    texts = {
        "step": "step {step:,}{of}",
        "loss": "loss {loss:.4g}",
        "grad_norm": "grad norm {grad_norm:.3g}",
        "tokens_per_second": "{tokens_per_second:,.0f} tokens/s",
        "skew": "skew {skew:.0%}",
        "since_step": "last step {since_step_text} ago",
        "seconds_left": "{seconds_left_text} left",
    }
    return [f"{state.run.resolve().name}: {sentence(known, texts)}"]


def summary_lines(state, how):
    """Return the summary of a run that goes on no more."""
    texts = {
        "step": "{step:,} steps",
        "loss": "last loss {loss:.4g}",
        "val_loss": "held out {val_loss:.4g}",
        "median_tokens_per_second": "median {median_tokens_per_second:,.0f} tokens/s",
    }
    skew = {
        "largest_skew": "largest skew {largest_skew:.0%} at step {at_step:,}",
        "slowest_rank": "slowest most often rank {slowest_rank}: {slowest_times:,} of {of_rows:,} "
        "times",
    }
    known = summary(state.rows)
    lines = [f"{state.run.resolve().name} {how}: {sentence(known, texts) or 'nothing was logged'}"]
    return [*lines, sentence(known, skew)] if known["of_rows"] else lines


def notes(state):
    """Return lines of what a person should know besides."""
    if state.unreadable:
        yield f"left out, as they cannot be read: {state.unreadable:,} files or rows"
    if state.no_answer:
        more = f" and {len(state.no_answer) - 8:,} more" if state.no_answer[8:] else ""
        yield f"nvidia-smi does not answer on {', '.join(state.no_answer[:8])}{more}"
    if not state.ranks:
        yield "it has no ranks/, which only diagnosing-errors writes: this is from metrics.jsonl"


def next_command(state):
    """Return the command that finds the cause."""
    tool = os.path.relpath(Path(__file__).with_name("whats_wrong.py"))
    return shlex.join(["python", tool, str(state.run)])


# ---- table -----------------------------------------------------------------------------------


def chosen(ranks, found, most):
    """Return at most that many ranks: what is marked, then the slowest; in the order of ranks."""
    places = [*enumerate(found)][::-1]  # of a rank's marks, the first is the gravest
    grave = {rank.rank: place for place, mark in places for rank in mark.ranks}
    order = sorted(ranks, key=lambda rank: (grave.get(rank.rank, 99), -(rank.local_seconds or 0)))
    return sorted(order[:most], key=lambda rank: rank.rank)


def shares(rank, slowest):
    """Return the parts of a step, from data to rest; `slowest` is the most own seconds of all."""
    if not rank.step_seconds or rank.local_seconds is None:
        return {}
    local, data = rank.local_seconds, min(rank.local_seconds, rank.data_seconds or 0.0)
    ends = [data, local, max(local, slowest), max(local, slowest, rank.step_seconds)]
    parts = [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]
    return {name: part / ends[-1] for name, part in zip(SHARES, parts, strict=True)}


def bar(parts):
    """Return the shares of a step as characters."""
    ends = [round(len(BAR) * end) for end in accumulate(parts.values())]
    widths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return "".join(map(str.__mul__, SHARES.values(), widths)) if parts else ""


def cells(rank, mark, slowest):
    """Return what a line shows of a rank, from title to text; - where it is not known."""
    parts = shares(rank, slowest)
    values = {
        "rank": ("", rank.rank),
        "host": ("", short(rank.host)[:16]),
        "phase": ("", rank.phase),
        "step": ("", rank.step),
        "for": ("", span(rank.in_phase)),
        "step s": (".3g", rank.step_seconds),
        "bar": ("", bar(parts)),
        **{title: (".0%", parts.get(title)) for title in SHARES},
        "host GiB": (".2f", rank.host_memory_gib),
        "GPU GiB": (".1f", rank.device_memory_gib),
        **{title: (".0f", (rank.gpu or {}).get(name)) for title, name in GPU_COLUMNS.items()},
        "": ("", mark),
    }
    return {
        title: "-" if value is None else format(value, form)
        for title, (form, value) in values.items()
    }


def table(state, found, width, most, bars):
    """Return lines that fit: lists of padded cells, each list with the kind of the rank's mark."""
    kinds = {rank.rank: mark.kind for mark in reversed(found) for rank in mark.ranks}
    shown = chosen(state.ranks, found, most)
    slowest = max((rank.local_seconds or 0.0 for rank in state.ranks), default=0.0)
    rows = [cells(rank, kinds.get(rank.rank, ""), slowest) for rank in shown]
    used = [title for title in rows[0] if any(row[title] not in ("-", "") for row in rows)]
    heads = {title: BAR if title == "bar" else title for title in used if bars or title != "bar"}
    sizes = {
        title: max(LEAST_WIDTH.get(title, 0), len(head), *(len(row[title]) for row in rows))
        for title, head in heads.items()
    }
    for title in FIRST_TO_GO:
        if sum(sizes.values()) + 2 * len(sizes) - 2 > width:
            sizes.pop(title, None)
    lines = [(padded(heads, sizes), "title"), *((padded(row, sizes), row[""]) for row in rows)]
    names = {rank.rank for rank in shown}
    if rest := [rank for rank in state.ranks if rank.rank not in names]:
        lines.append(([others(rest)[:width]], ""))
    return lines


def padded(row, sizes):
    """Return the cells of a row, words to the left and numbers to the right."""
    sides = {title: "<" if title in ("host", "phase", "bar", "") else ">" for title in sizes}
    return [f"{row[title]:{sides[title]}{size}}" for title, size in sizes.items()]


def others(ranks):
    """Return one line about the ranks that are not shown."""
    phases = Counter(rank.phase for rank in ranks).most_common(2)
    own = [rank.local_seconds for rank in ranks if rank.local_seconds is not None]
    spread = f", working {min(own):.3g} to {max(own):.3g} s a step" if own else ""
    many = ", ".join(f"{count:,} in {phase}" for phase, count in phases)
    return f"and {len(ranks):,} others like them{spread}; {many}"


def picture(state, found, width, most, bars=False):
    """Return the lines of a view: lists of their parts, each list with a style or a mark's kind."""
    how = outcome(state)
    dead = any(mark.kind == "silent" and len(mark.ranks) == len(state.ranks) for mark in found)
    lines = [(text, "title") for text in headlines(state, how or ("not running" if dead else None))]
    head = [([part], style) for text, style in lines for part in textwrap.wrap(text, width)]
    if state.ranks and how not in ("finished", "stopped"):
        head += table(state, found, width, most, bars)
    lines = [(f"{mark.kind}: {mark.text}", mark.kind) for mark in found]
    lines += [(text, "note") for text in notes(state)]
    foot = [
        ([part], style)
        for text, style in lines
        for part in textwrap.wrap(text, width, subsequent_indent="  ")
    ]
    if found and state.ranks:
        foot.append(([f"next: {next_command(state)}"], "title"))
    return head + foot


# ---- views -----------------------------------------------------------------------------------


def plain(state, args):
    """Return a picture as text, with all columns for which the terminal has room."""
    width = shutil.get_terminal_size((140, 24)).columns
    lines = picture(state, marks(state), width, args.rows or 20)
    return "\n".join("  ".join(parts).rstrip() for parts, _ in lines)


def as_json(state):
    """Return a picture as JSON, with all ranks in it."""
    found = marks(state)
    said = [{"kind": m.kind, "ranks": [r.rank for r in m.ranks], "text": m.text} for m in found]
    told = {"run": str(state.run), "ended": outcome(state), **facts(state), "marks": said}
    told |= {"next": next_command(state) if found else None, "summary": summary(state.rows)}
    told |= {"unreadable": state.unreadable, "no_answer": state.no_answer}
    return json.dumps(told | {"ranks": list(map(asdict, state.ranks))}, indent=1)


def styled(lines):
    """Return a picture for rich."""
    from rich.text import Text

    view = Text(no_wrap=True, overflow="crop")
    for parts, kind in lines:
        line = Text("  ".join(parts), STYLES.get(kind, "bold red"))
        if kind in ("", "title"):  # a marked line keeps its one colour
            line.highlight_regex("▒+", "magenta")
            line.highlight_regex("█+", "green")
            line.highlight_regex("[·─]+", "bright_black")
        view.append_text(line).append("\n")
    return view


def watch_live(args, look):
    """Show the run on the whole terminal until it ends; then leave the last picture."""
    from rich.console import Console
    from rich.live import Live

    console, state = Console(), look()
    try:
        with Live(console=console, screen=True, auto_refresh=False) as view:
            while outcome(state) not in ("finished", "stopped"):
                width, height = console.size
                found = marks(state)
                rest = len(picture(state, found, width, 1, bars=True)) + 1
                most = args.rows or max(1, height - rest)
                view.update(styled(picture(state, found, width, most, bars=True)), refresh=True)
                time.sleep(1)
                state = look()
    finally:
        print(plain(state, args))


def watch_plainly(args, look):
    """Print the run every two seconds until it ends."""
    state = look()
    print(plain(state, args), flush=True)
    while outcome(state) not in ("finished", "stopped"):
        time.sleep(2)
        state = look()
        print(f"\n{plain(state, args)}", flush=True)


def show_once(args, reader, gpus):
    """Print one picture; return the exit status."""
    gpus.wait(12)
    state = gpus.add_to(reader.look_closer(reader.read()))
    print(as_json(state) if args.json else plain(state, args))
    return 1 if marks(state) else 0


def main():
    """Show a run; with --once or --json, exit with 1 if something is marked."""
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what restores the terminal
    reader = Reader(args.run)
    try:
        gpus = Gpus(gpu_commands(args, reader.read().ranks))
        if args.once or args.json:
            sys.exit(show_once(args, reader, gpus))
        rich = importlib.util.find_spec("rich")
        if not rich:
            print("a picture every two seconds; pip install rich gives a live one")
        watch = watch_live if rich and sys.stdout.isatty() else watch_plainly
        watch(args, lambda: gpus.add_to(reader.read()))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever reads this has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    main()
