"""Run a training script unchanged; write down what each rank does, where the other tools read it.

Here:      torchrun --standalone --nproc-per-node 2 \
               diagnosing-errors/watched.py --into outputs/02-ddp 02-ddp/train_llm.py
For real:  any launcher, any script: put `watched.py --into FOLDER` before the script's name.

A thread writes FOLDER/ranks/00001.json every two seconds: what rank 1 does. 00001.dump.json has its
stacks and last collectives: when somebody touches FOLDER/ranks/dump, when no step ends for
`--stall` seconds, and when an exception ends it. 00001.crash is faulthandler's.
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
    ("other", r""),
)  # fmt: skip
FOREIGN = re.compile(r"/(site|dist)-packages/|/lib/python3|^<|/torch/csrc|/(watched|inject)\.py$")
UNEVEN = ("gather", "scatter", "all_to_all", "alltoall")  # sizes may differ from rank to rank
TELLING = re.compile(r"\b([Ww]arning|[Ee]rror|[Cc]annot)\b")


# ---- where the main thread is ------------------------------------------------------------------
def stack(frame):
    """Return (file, line, function) of a frame and of its callers, outermost first."""
    calls = [(one.f_code, line) for one, line in traceback.walk_stack(frame)]
    return [(code.co_filename, line, code.co_name) for code, line in reversed(calls)]


@functools.cache
def told_by(file, function):
    """Return the number of the phase that a function tells of."""
    at = f"{file} {function}"
    return next(number for number, (_, clue) in enumerate(PHASES) if re.search(clue, at))


def phase_of(frames):
    """Return what a stack is busy with."""
    return PHASES[min(told_by(file, function) for file, _, function in frames)][0]


def own_of(frames):
    """Return the innermost frame of the user's own code, and not of Python, a package or ours."""
    return next((frame for frame in reversed(frames) if not FOREIGN.search(frame[0])), None)


# ---- steps, losses, gradients, weights ---------------------------------------------------------
class Steps:
    """Counts optimizer steps; looks at losses, gradients and weights, and lets no step wait."""

    def __init__(self, every):
        self.every, self.fault = every, None
        self.count, self.before = 0, 0  # steps of this start, and those of earlier starts
        self.ended = deque(maxlen=11)  # unix times
        self.loss, self.broken, self.data = 0.0, 0, 0
        self.pending, self.host = deque(maxlen=999), None
        self.losses, self.checks = deque(maxlen=3), deque(maxlen=4)
        self.optimizer = self.bad = self.shard = self.device_memory = None
        watcher, backward, embed = self, torch.autograd.backward, torch.nn.Embedding.forward

        def watched_backward(tensors, *args, **options):
            watcher.safely(watcher.note_loss, tensors)
            return backward(tensors, *args, **options)

        def watched_embed(self, *args, **options):
            output = embed(self, *args, **options)
            if not torch.compiler.is_compiling() and output.requires_grad:
                watcher.safely(watcher.note_input, args, output)
            return output

        torch.autograd.backward, torch.nn.Embedding.forward = watched_backward, watched_embed
        register_optimizer_step_post_hook(lambda one, *_: self.safely(self.note_step, one))

    def safely(self, look, *args):
        """Look at something; an error of that ends all looks, and not the training."""
        try:
            if self.fault is None:
                look(*args)
        except Exception:
            self.fault = traceback.format_exc()

    def note_loss(self, tensors):
        """Add up this rank's own loss."""
        if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
            self.loss = self.loss + tensors.detach().float().reshape(())

    def note_input(self, args, output):
        """Look at the tokens that come in, and at the gradient that comes back, not yet reduced."""
        output.register_hook(lambda gradient: self.safely(self.note_gradient, gradient))
        meant = hasattr(args[0], "_local_tensor")  # ranks that split a matrix take the same samples
        if (self.count + 1) % self.every == 0 and not meant:
            ids = args[0].long()
            self.data = self.data + (ids * (ids + 7919)).sum()

    def note_gradient(self, gradient):
        """Count the micro-steps in which it was not finite."""
        own = getattr(gradient, "_local_tensor", gradient)
        self.broken = self.broken + ~own.isfinite().all()

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
                self.device_memory = torch.cuda.memory_allocated() / 2**30
            self.send(seen)

    def send(self, seen):
        """Send numbers, some of which lie on the device, to the host; wait for nothing."""
        device = next((x.device for x in seen if torch.is_tensor(x) and x.is_cuda), "cpu")
        there = torch.zeros(len(seen), dtype=torch.float64, device=device)
        for slot, value in zip(there, seen, strict=True):  # no copy from pageable memory: it waits
            slot.fill_(value)
        if self.host is None:  # rows for those of a thousand steps, made once
            self.host = torch.empty(1000, 8, dtype=torch.float64, pin_memory=there.is_cuda)
        row = self.host[self.count % 1000, : len(seen)]
        row.copy_(there, non_blocking=True)
        arrived = torch.cuda.current_stream().record_event() if there.is_cuda else None
        self.pending.append((self.count, row, arrived))

    def take(self):
        """Take over what has come to the host by now; the thread calls this."""
        while self.pending and (self.pending[0][2] is None or self.pending[0][2].query()):
            count, row, _ = self.pending.popleft()
            loss, broken, *more = row.tolist()
            self.losses.append(loss)
            if more:
                step, data, weights = more
                self.before = max(0, int(step) - count)
                check = {"step": self.before + count, "data": data, "weights": weights}
                self.checks.append(check | {"losses": list(self.losses)})
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


def born():
    """Return when this process was started, in ticks since the system was: field 22 in proc(5)."""
    with suppress(OSError):  # only Linux tells
        return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


class Watch:
    """Writes what this rank does, in a thread of its own."""

    def __init__(self, folder, steps, stall):
        self.folder, self.steps, self.stall = folder, steps, stall
        rank = int(next((os.environ[name] for name in RANK if name in os.environ), 0))
        self.path = folder / f"{rank:05}"
        self.about = {
            "rank": rank,
            "world_size": int(next((os.environ[name] for name in SIZE if name in os.environ), 1)),
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "started": time.time(),
            "born": born(),
            "files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        }
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f"{rank:05}.*"):  # of an earlier start
            path.unlink(missing_ok=True)
        self.crash = open(self.path.with_suffix(".crash"), "w")
        faulthandler.enable(self.crash)
        faulthandler.enable = lambda *_, **__: None  # torch's @record would send it elsewhere
        self.mark, self.since = (0, "start"), time.time()
        self.end = self.error = self.asked_to_end = self.stalled_in = None
        self.lines, self.phases = Counter(), Counter()
        self.memory, self.noted = deque(maxlen=6), 0.0
        self.told = self.asked = self.dumped = self.cpu = 0.0
        self.spare = open(os.devnull)  # gives its descriptor to the last words, if there is none
        sys.stdout = self.out = Printed(sys.stdout)
        sys.stderr = self.errors = Printed(sys.stderr)
        self.signals, self.telling = self.follow_signals(), threading.Lock()
        threading.Thread(target=self.run, daemon=True, name="watched").start()

    def follow_signals(self):
        """Return a pipe to which signals come, even while the main thread is in C."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, nothing_more)  # `end_as_asked` ends the process instead
        os.register_at_fork(  # SIGTERM waits until a child follows it in its own way
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]),
            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM]),
            after_in_child=stop_following,
        )
        return reader

    def run(self):
        """Look, and tell, whatever happens."""
        came = True
        while True:
            try:
                self.look()
                bad = self.steps.bad
                self.steps.take()
                late = time.monotonic() - self.told > BEAT
                if came or late or self.steps.bad is not bad:
                    self.told = time.monotonic()
                    self.tell()
                    self.dump_if_due()
                if self.asked_to_end and signal.getsignal(signal.SIGTERM) is nothing_more:
                    self.end_as_asked()
                came = select.select([self.signals], [], [], TICK)[0]
            except Exception:
                self.steps.fault = traceback.format_exc()
                time.sleep(TICK)

    def look(self):
        """Note where the main thread is, and since when."""
        frames = stack(sys._current_frames()[threading.main_thread().ident])
        phase = phase_of(frames)
        phase = "start" if phase == "other" and not self.steps.count else phase
        self.phases[phase] += 1
        self.lines["{}:{} {}".format(*own_of(frames) or "?0?")] += 1
        if (self.steps.count, phase) != self.mark:
            self.mark, self.since = (self.steps.count, phase), time.time()

    def end_as_asked(self):
        """End this rank by SIGTERM, as it would end unwatched: the script does not handle it."""
        self.error = "SIGTERM, from the launcher or a person"
        self.tell("failed")
        self.dump("ended")
        ctypes.CDLL(None).signal(int(signal.SIGTERM), None)  # only C may, in a thread
        os.kill(os.getpid(), signal.SIGTERM)

    def tell(self, end=None):
        """Write what this rank does, or how it has ended; two at once might leave the older one."""
        self.end = self.end or end
        alone = self.telling.acquire(timeout=1)  # no longer: a process is forked with the lock held
        try:
            with suppress(BlockingIOError):  # no signal has come
                if signal.SIGTERM in os.read(self.signals, 64):
                    self.asked_to_end = time.time()
            self.write(".json", self.beat())
        finally:
            if alone:
                self.telling.release()

    def beat(self):
        """Return what this rank does, or how it has ended."""
        steps, samples = self.steps, max(1, sum(self.phases.values()))
        took = [then - before for before, then in pairwise(list(steps.ended))]
        cpu, (memory, files) = time.process_time(), used()
        if steps.count and time.time() - self.about["started"] > 1.03 * self.noted:
            self.noted = time.time() - self.about["started"]  # moments ever further apart
            self.memory.append(memory)
        beat = {
            "time": time.time(),
            "end": self.end,
            "phase": self.mark[1],
            "since": self.since,
            "step": steps.before + steps.count + (self.end != "finished"),
            "step_seconds": median(took) if took else None,
            "error": self.error,
            "asked_to_end": self.asked_to_end,
            "printed": [*self.out.telling, *self.errors.telling],
            "phases": {name: round(n / samples, 3) for name, n in self.phases.most_common()},
            "lines": {name: round(n / samples, 3) for name, n in self.lines.most_common(3)},
            "checks": list(steps.checks),
            "bad": steps.bad,
            "shard": steps.shard,
            "memory": [*self.memory, memory],
            "device_memory_gib": steps.device_memory,
            "open_files": files,
            "cpu": (cpu - self.cpu) / BEAT,
            "fault": steps.fault,
        }
        self.cpu = cpu
        if samples > 10 / TICK:
            self.lines, self.phases = Counter(), Counter()
        return self.about | beat

    def write(self, ending, content):
        """Replace a file, so that nobody reads half of it; a full disk is for others to report."""
        new = self.path.with_suffix(f".new-{threading.get_native_id()}")
        with suppress(OSError):
            new.write_text(json.dumps(content, default=str))
            new.rename(self.path.with_suffix(ending))

    def dump_if_due(self):
        """Say where each thread stands, if somebody asks or no step ends."""
        with suppress(OSError):  # nobody has asked yet
            before, self.asked = self.asked, (self.folder / "dump").stat().st_mtime
            if self.asked != before:
                self.dump("asked")
        if time.time() - max(self.since, self.dumped) > self.stall:
            self.stalled_in = self.steps.count
            self.dump("stall")

    def dump(self, reason):
        """Write where each thread stands, and which collectives were called."""
        if reason in ("failed", "ended") and self.stalled_in == self.steps.count:
            return  # what it wrote when it stood still tells more
        self.dumped = time.time()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = {names.get(x, str(x)): stack(frame) for x, frame in sys._current_frames().items()}
        told = {"time": self.dumped, "reason": reason, "stacks": stacks}
        self.write(".dump.json", told | {"collectives": collectives()})

    def leave(self, error):
        """Tell how the script has ended: with an error, or with none."""
        told = "".join(traceback.format_exception(error)) if error else None
        if isinstance(error, SystemExit):
            said = error.code if isinstance(error.code, str) else " ".join(self.errors.telling)
            told = f"SystemExit: {said}" if error.code else None
        self.error = self.error or told
        self.spare.close()
        until = time.monotonic() + 1  # what a device that has failed never sends is not waited for
        while self.steps.pending and time.monotonic() < until:
            time.sleep(0.01)
        self.tell("failed" if told else "finished")
        if told:
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
        return round(pages * resource.getpagesize() / 2**30, 3), len(os.listdir("/proc/self/fd"))
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
    frames = [(each["filename"], each["line"], each["name"]) for each in entry["frames"][::-1]]
    at = os.path.basename("{}:{} {}".format(*own_of(frames) or "?0?"))
    sizes = f" {entry['input_sizes']} {' '.join(entry['input_dtypes'])}"
    return {
        "group": f"{backend} {entry['process_group'][0]}",
        "number": entry["collective_seq_id"],
        "call": f"{name}{'' if name.startswith(UNEVEN) else sizes} at {at}",
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
    error = None
    try:
        runpy.run_path(args.script, run_name="__main__")
    except BaseException as problem:
        error = problem
        raise
    finally:
        watch.leave(error)


if __name__ == "__main__":
    main()
