"""Run a training script unchanged; write down what each rank does, where the other tools read it.

Here:      torchrun --standalone --nproc-per-node 2 \
               diagnosing-errors/watched.py --into outputs/02-ddp 02-ddp/train_llm.py
For real:  any launcher, any script: put `watched.py --into FOLDER` before the script's name.

A thread writes FOLDER/ranks/00001.json every two seconds: what rank 1 does. 00001.dump.json has its
stacks and last collectives: when somebody touches FOLDER/ranks/dump, when no step ends for
`--stall` seconds, and when an exception ends it. 00001.crash is faulthandler's. The thread ends
with the process, so a file that is not renewed tells something too. Nothing here waits for a GPU.
"""

import argparse
import ctypes
import faulthandler
import functools
import json
import os
import pickle
import re
import resource
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter, deque
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median

os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # torch's Flight Recorder, for gloo too
os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")  # it then knows how long each one took

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
BEAT, TICK = 2.0, 0.1  # seconds from heartbeat to heartbeat, and from look to look at the stack
PATIENT = 24 * 3600 * 1000  # milliseconds: who waits longer in a collective has time
PHASES = (  # the first of these that a function of the stack tells of, by "file name"
    ("checkpoint", r" \w*(save|load|write|read)_(checkpoint|state|model)\w*$"
                   r"|/serialization.py (save|load)$|/distributed/checkpoint/"),
    ("export", r" export_\w+$| save_pretrained$"),
    ("evaluation", r" (evaluat|validat)\w*$| eval_\w+$"),
    ("start", r" init_process_group$| build_(data|model|tok)\w*$| from_pretrained$"),
    ("data", r"/utils/data/dataloader.py| (collate|batch_at|\w*next_batch|get_batch)\w*$"),
    ("compile", r"/_dynamo/(convert_frame|symbolic_convert|output_graph)|/torch/_inductor/"),
    ("collective", r"/distributed_c10d.py|/_functional_collectives.py"),
    ("backward", r"/autograd/__init__.py backward"),
    ("optimizer", r"/torch/optim/"),
    ("forward", r"/nn/modules/module.py"),
)  # fmt: skip
FOREIGN = re.compile(r"/(site|dist)-packages/|/lib/python3|^<|/torch/csrc|/(watched|inject)\.py$")
TELLING = re.compile(r"\b([Ww]arning|[Ee]rror|[Cc]annot)\b")


# ---- where the main thread is ------------------------------------------------------------------
def stack(frame):
    """Return (file, line, function) of a frame and of its callers, outermost first."""
    found = []
    while frame:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found[::-1]


@functools.cache
def told_by(file, function):
    """Return the number of the phase that a function tells of."""
    at = f"{file} {function}"
    return next((n for n, (_, clue) in enumerate(PHASES) if re.search(clue, at)), len(PHASES))


def phase_of(frames):
    """Return what a stack is busy with."""
    number = min((told_by(file, function) for file, _, function in frames), default=len(PHASES))
    return [*(phase for phase, _ in PHASES), "other"][number]


@functools.cache
def is_own(file):
    """Return whether a file is of the user's own code, and not Python's, a package's or ours."""
    return not FOREIGN.search(file)


# ---- steps, losses, gradients, weights ---------------------------------------------------------
def harmless(work):
    """Return `work` so that an error of it ends what it looks after, and not the training."""

    @functools.wraps(work)
    def guarded(self, *args):
        if self.fault is None:
            try:
                return work(self, *args)
            except Exception:
                self.fault = traceback.format_exc()
        return None

    return guarded


class Steps:
    """Counts optimizer steps, and looks at losses and gradients; in every tenth also at weights.

    What it sees comes to the host when the device has done it: no step waits.
    """

    def __init__(self, every):
        self.every = every
        self.fault = None
        self.count, self.before = 0, 0  # steps of this start, and those of earlier starts
        self.ended = deque(maxlen=11)  # unix times
        self.optimizer = None
        self.loss, self.broken, self.data = 0.0, 0, 0
        self.pending, self.host = deque(maxlen=999), None
        self.losses, self.checks = deque(maxlen=3), deque(maxlen=4)
        self.bad = self.shard = self.device_memory = None
        watcher, backward, embed = self, torch.autograd.backward, torch.nn.Embedding.forward

        def watched_backward(tensors, *args, **options):
            watcher.note_loss(tensors)
            return backward(tensors, *args, **options)

        def watched_embed(self, *args, **options):
            output = embed(self, *args, **options)
            if not torch.compiler.is_compiling() and output.requires_grad:
                watcher.note_input(args, output)
            return output

        torch.autograd.backward, torch.nn.Embedding.forward = watched_backward, watched_embed
        register_optimizer_step_post_hook(lambda optimizer, *_: self.note_step(optimizer))

    @harmless
    def note_loss(self, tensors):
        """Add up this rank's own loss."""
        if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
            self.loss = self.loss + tensors.detach().float().reshape(())

    @harmless
    def note_input(self, args, output):
        """Look at the tokens that come in, and at the gradient that comes back, not yet reduced."""
        output.register_hook(self.note_gradient)
        if (self.count + 1) % self.every == 0:
            ids = args[0].long()
            self.data = self.data + (ids * (ids + 7919)).sum()

    @harmless
    def note_gradient(self, gradient):
        """Count the micro-steps in which it was not finite."""
        self.broken = self.broken + ~gradient.isfinite().all()

    @harmless
    def note_step(self, optimizer):
        """Count a step of the script's first optimizer."""
        self.optimizer = self.optimizer or optimizer
        if optimizer is self.optimizer:
            self.count += 1
            self.ended.append(time.time())
            seen, self.loss, self.broken = [self.loss, self.broken], 0.0, 0
            if self.count == 1 or self.count % self.every == 0:
                weights = [p for group in optimizer.param_groups for p in group["params"]]
                self.shard = self.shard or shard_of(weights)
                state = next(iter(optimizer.state.values()), {})
                seen += [state.get("step", self.count), self.data, checksum(weights)]
                self.data = 0
                if torch.cuda.is_initialized():
                    self.device_memory = torch.cuda.memory_allocated() / 2**30
            self.send(seen)

    def send(self, seen):
        """Send numbers that lie on the device to the host; wait for nothing."""
        tensors = [value for value in seen if torch.is_tensor(value)]
        device = next((value.device for value in tensors if value.is_cuda), torch.device("cpu"))
        there = [value for value in tensors if value.device == device]
        known = [None if any(value is one for one in there) else float(value) for value in seen]
        if self.host is None:  # rows for those of a thousand steps, made once
            self.host = torch.empty(1000, 8, dtype=torch.float64, pin_memory=device.type == "cuda")
        row, arrived = self.host[self.count % 1000, : len(there)], None
        if there:
            row.copy_(torch.stack([value.double() for value in there]), non_blocking=True)
        if device.type == "cuda":
            arrived = torch.cuda.Event()
            arrived.record()
        self.pending.append((self.count, known, row, arrived))

    @harmless
    def take(self):
        """Take over what has come to the host by now; the thread calls this."""
        while self.pending and (self.pending[0][3] is None or self.pending[0][3].query()):
            count, known, row, _ = self.pending.popleft()
            came = iter(row.tolist())
            loss, broken, *more = (next(came) if value is None else value for value in known)
            self.losses.append(loss)
            if more:
                step, data, weights = more
                self.before = max(0, int(step) - count)
                told = {"step": self.before + count, "data": data, "weights": weights}
                self.checks.append(told | {"losses": list(self.losses)})
            if self.bad is None and not (abs(loss) < float("inf") and broken == 0):
                self.bad = {"step": self.before + count, "loss": loss, "gradients": broken}


def checksum(weights):
    """Return a number that is another one if a bit of this rank's part of the weights is."""
    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    local = [getattr(weight, "_local_tensor", weight).detach() for weight in weights]
    sums = [part.view(ints[part.element_size()]).sum(dtype=torch.int64) for part in local]
    return torch.stack(sums).sum() % 2**40


def shard_of(weights):
    """Return which part of the weights this rank has; ranks that say the same are replicas."""
    parts = set()
    for weight in weights:
        if mesh := getattr(weight, "device_mesh", None):
            places = enumerate(zip(mesh.get_coordinate(), weight.placements, strict=True))
            parts |= {f"{dim}: {at}" for dim, (at, place) in places if not place.is_replicate()}
    return " ".join(sorted(parts)) or "whole"


# ---- what this rank tells ----------------------------------------------------------------------
class Printed:
    """A stream that also keeps the last lines which warn of something."""

    def __init__(self, stream):
        self.stream, self.telling = stream, deque(maxlen=3)

    def write(self, text):
        self.telling.extend(line[:300] for line in text.splitlines() if TELLING.search(line))
        return self.stream.write(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


class Watch:
    """Writes what this rank does, in a thread of its own."""

    def __init__(self, folder, steps, stall):
        self.folder, self.steps = folder, steps
        rank = int(next((os.environ[name] for name in RANK if name in os.environ), 0))
        self.path = folder / f"{rank:05}"
        self.main = threading.main_thread().ident
        self.about = {
            "rank": rank,
            "world_size": int(next((os.environ[name] for name in SIZE if name in os.environ), 1)),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": time.time(),
            "stall_after": stall,
            "files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        }
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f"{rank:05}.*"):  # of an earlier start
            path.unlink(missing_ok=True)
        self.crash = open(self.path.with_suffix(".crash"), "w")
        faulthandler.enable(self.crash)
        faulthandler.enable = lambda *_, **__: None  # torch's @record would send it elsewhere
        self.phase, self.mark, self.since = "start", None, time.time()
        self.end = self.error = self.asked_to_end = None
        self.lines, self.phases = Counter(), Counter()
        self.memory, self.beats, self.keep = [], 0, 1
        self.told = self.asked = self.dumped = self.cpu = 0.0
        self.lock = threading.Lock()
        self.spare = open(os.devnull)  # gives its descriptor to the last words, if there is none
        self.stalled_in = None  # the step in which this rank wrote that it stands still
        sys.stdout = self.out = Printed(sys.stdout)
        sys.stderr = self.errors = Printed(sys.stderr)
        self.signals = self.follow_signals()
        threading.Thread(target=self.run, daemon=True, name="watched").start()

    def follow_signals(self):
        """Return a file to which signals come, even while the main thread is in C.

        With a handler SIGTERM no longer ends a process by itself: `told_to_end` does it. What the
        script itself makes of the signal stays, and processes that it forks end as ever.
        """
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, nothing_more)
        os.register_at_fork(  # SIGTERM waits until a child follows it in its own way
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]),
            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM]),
            after_in_child=stop_following,
        )
        return reader

    def run(self):
        """Look, and tell, whatever happens."""
        while True:
            try:
                self.look()
                bad = self.steps.bad
                self.steps.take()
                if time.monotonic() - self.told > BEAT or self.steps.bad is not bad:
                    self.told = time.monotonic()
                    self.tell()
                    self.dump_if_due()
                came = select.select([self.signals], [], [], TICK)[0]
                if came and signal.SIGTERM in os.read(self.signals, 64):
                    self.told_to_end()
            except Exception:
                self.steps.fault = traceback.format_exc()
                time.sleep(TICK)

    def look(self):
        """Note where the main thread is, and since when."""
        frames = stack(sys._current_frames().get(self.main))
        phase = phase_of(frames)
        if phase == "other" and not self.steps.count:
            phase = "start"
        self.phases[phase] += 1
        own = next((frame for frame in reversed(frames) if is_own(frame[0])), ("?", 0, "?"))
        self.lines["{}:{} {}".format(*own)] += 1
        if (self.steps.count, phase) != self.mark:
            self.mark, self.since = (self.steps.count, phase), time.time()
        self.phase = phase

    def told_to_end(self):
        """Note that another has asked this rank to end; unless the script handles that, end it."""
        self.asked_to_end = time.time()
        if signal.getsignal(signal.SIGTERM) is nothing_more:
            self.error = "SIGTERM, from the launcher or a person"
            self.tell("failed")
            self.dump("ended")
            ctypes.CDLL(None).signal(int(signal.SIGTERM), None)  # only C may, in a thread
            os.kill(os.getpid(), signal.SIGTERM)
        self.tell()

    def tell(self, end=None):
        """Write what this rank does, or how it has ended."""
        self.end = self.end or end
        steps, samples = self.steps, max(1, sum(self.phases.values()))
        ended = list(steps.ended)
        took = [then - before for before, then in pairwise(ended)]
        cpu, (memory, files) = time.process_time(), used()
        beat = self.about | {
            "time": time.time(),
            "end": self.end,
            "phase": self.phase,
            "since": self.since,
            "step": steps.before + steps.count + (self.end != "finished"),
            "step_ended": ended[-1] if ended else None,
            "step_seconds": median(took) if took else None,
            "error": self.error,
            "asked_to_end": self.asked_to_end,
            "printed": [*self.out.telling, *self.errors.telling],
            "phases": {name: round(n / samples, 3) for name, n in self.phases.most_common()},
            "lines": {name: round(n / samples, 3) for name, n in self.lines.most_common(3)},
            "checks": list(steps.checks),
            "bad": steps.bad,
            "shard": steps.shard,
            "memory": self.remember(round(memory, 3)),
            "device_memory_gib": steps.device_memory,
            "open_files": files,
            "cpu": (cpu - self.cpu) / BEAT,
            "fault": steps.fault,
        }
        self.cpu = cpu
        if samples > 10 / TICK:
            self.phases.clear()
            self.lines.clear()
        self.write(".json", beat)

    def remember(self, now):
        """Return GiB of host memory at up to 32 moments spread evenly over the run, and now."""
        if self.beats % self.keep == 0 and self.steps.count:
            self.memory.append(now)
        self.beats += 1
        if len(self.memory) == 32:
            self.memory, self.keep = self.memory[::2], 2 * self.keep
        return [*self.memory, now]

    def write(self, ending, content):
        """Replace a file, so that nobody reads half of it; a full disk is for others to report."""
        new = self.path.with_suffix(".new")
        with self.lock, suppress(OSError):  # the main thread writes too, when it ends
            new.write_text(json.dumps(content, default=str))
            new.rename(self.path.with_suffix(ending))

    def dump_if_due(self):
        """Say where each thread stands, if somebody asks or no step ends."""
        with suppress(OSError):  # nobody has asked yet
            asked = (self.folder / "dump").stat().st_mtime
            if asked != self.asked:
                self.asked = asked
                self.dump("asked")
        if time.time() - max(self.since, self.dumped) > self.about["stall_after"]:
            self.stalled_in = self.steps.count
            self.dump("stall")

    def dump(self, reason):
        """Write where each thread stands, and which collectives were called."""
        if reason in ("failed", "ended") and self.stalled_in == self.steps.count:
            return  # what it wrote when it stood still tells more
        self.dumped = time.time()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames().items()
        stacks = {names.get(thread, str(thread)): stack(frame) for thread, frame in frames}
        told = {"time": self.dumped, "reason": reason, "stacks": stacks}
        self.write(".dump.json", told | {"collectives": collectives()})

    def leave(self, end, error=None):
        """Tell how the script has ended."""
        self.error = self.error or error
        self.spare.close()
        with suppress(BlockingIOError):  # the thread may not have come to it
            if signal.SIGTERM in os.read(self.signals, 64):
                self.asked_to_end = time.time()
        until = time.monotonic() + 1  # what a device that has failed never sends is not waited for
        while self.steps.pending and time.monotonic() < until:
            time.sleep(0.01)
        self.tell(end)
        if error:
            self.dump("failed")


def nothing_more(*_):
    """Handle SIGTERM: the thread does it, since the main thread may be in C."""


def stop_following():
    """Let a process that was forked end by SIGTERM, as it would without this."""
    if signal.getsignal(signal.SIGTERM) is nothing_more:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def used():
    """Return GiB of host memory and the number of open files, which only Linux tells."""
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 2**30, len(os.listdir("/proc/self/fd"))
    return 0.0, None


def collectives():
    """Return the last 500 collectives of gloo and of NCCL that torch's Flight Recorder knows."""
    found, dumps = [], torch._C._distributed_c10d
    for recorder in ("_dump_fr_trace", "_dump_nccl_trace"):
        with suppress(Exception):  # inner parts of torch; one of them is in builds for GPUs alone
            entries = pickle.loads(getattr(dumps, recorder)())["entries"]
            found += [call_of(entry) for entry in entries[-500:] if not entry["is_p2p"]]
    return found


def call_of(entry):
    """Return what the tools need of a Flight Recorder's entry."""
    backend, _, name = entry["profiling_name"].partition(":")
    own = [frame for frame in entry["frames"] if is_own(frame["filename"])][:1]
    return {
        "group": f"{backend} {entry['process_group'][0]}",
        "number": entry["collective_seq_id"],
        "name": name,
        "sizes": f"{entry['input_sizes']} {' '.join(entry['input_dtypes'])}",
        "at": [own[0]["filename"], own[0]["line"], own[0]["name"]] if own else None,
        "called": entry["time_created_ns"] / 1e9,
        "milliseconds": entry.get("duration_ms"),
        "pending": not entry["retired"] and entry["state"] != "completed",
        "patient": (entry.get("timeout_ms") or 0) > PATIENT,
    }


def main():
    """Run the script as if it had been started by itself, and watch it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--into", type=Path, default="outputs/watched", help="the run's folder, for its ranks/")
    add("--stall", type=float, default=60, help="seconds without a step, after which ranks dump")
    add("--every", type=int, default=10, help="steps between looks at losses and weights")
    add("script", help="with its arguments after it")
    add("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if not Path(args.script).is_file():
        parser.error(f"there is no script {args.script}")
    sys.argv = [args.script, *args.arguments]
    sys.path[0] = str(Path(args.script).resolve().parent)
    watch = Watch(args.into.resolve() / "ranks", Steps(args.every), args.stall)
    try:
        runpy.run_path(args.script, run_name="__main__")
    except SystemExit as stop:
        good = stop.code in (None, 0)
        said = stop.code if isinstance(stop.code, str) else " ".join(watch.errors.telling)
        watch.leave("finished" if good else "failed", None if good else f"SystemExit: {said}")
        raise
    except BaseException:
        watch.leave("failed", traceback.format_exc())
        raise
    watch.leave("finished")


if __name__ == "__main__":
    main()
