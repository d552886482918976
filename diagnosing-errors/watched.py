"""Run a training script unchanged, and record what each of its ranks does.

Here:      torchrun --standalone --nproc-per-node 2 \
               diagnosing-errors/watched.py --into outputs/02-ddp 02-ddp/train_llm.py
For real:  put `watched.py --into FOLDER` before the script's name, under any launcher.

In each rank, a thread writes a heartbeat every two seconds: rank 1 writes FOLDER/ranks/00001.json.
whats_wrong.py reads these files. The thread also dumps the stack of the main thread and the latest
collectives of its rank to 00001.dump.json in each of these cases:

- Somebody touches the file FOLDER/ranks/dump.
- The rank makes no progress for `--stall` seconds.
- The script fails, or SIGTERM ends it.

If the process crashes in C code, faulthandler writes the Python stacks to 00001.crash.
"""

import argparse
import ctypes
import faulthandler
import json
import math
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
from collections import Counter, defaultdict, deque
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median

# PyTorch's Flight Recorder reads these variables, so set them before the import of torch. With
# these values, the recorder keeps the latest 2,000 collectives, and the duration of each NCCL
# collective.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

# Each launcher sets its own variables for the rank and the world size. Of each tuple,
# from_environment() reads the first variable that is set.
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
SIZE_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")

# These are the seconds between two heartbeats, and between two samples of the main thread's stack.
HEARTBEAT_INTERVAL = 2.0
SAMPLE_INTERVAL = 0.1

# whats_wrong.py ignores collectives whose timeout is longer than this, because ranks may wait in
# them for hours without a fault.
PATIENT_TIMEOUT_MS = 24 * 3600 * 1000

# phase_of() writes a stack as a text with a line "file function" for each frame. The phase of the
# stack is the first phase in this list whose pattern matches a line.
PHASES = (
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

# Keep checksums smaller than this prime number, because send() converts them to float64, which
# represents every integer of 40 bits exactly.
HASH_MODULUS = 2**40 - 87

# This pattern matches the paths of Python's library, of installed packages, of watched.py and of
# inject.py. All other files are the user's code.
FOREIGN = re.compile(r"/(site|dist)-packages/|/lib/python3|^<|/torch/csrc|/(watched|inject)\.py$")

# If a collective's name starts with one of these words, its tensors may have a different size on
# each rank.
UNEVEN_COLLECTIVES = ("gather", "scatter", "all_to_all", "alltoall")

# The heartbeat contains the last lines of the script's output that this pattern matches.
PROBLEM = re.compile(r"\b([Ww]arning|[Ee]rror|[Cc]annot)\b")


# ---- where the main thread is ------------------------------------------------------------------
def main_stack():
    """Return the (file, line, function) of each frame of the main thread, outermost first."""
    frame = sys._current_frames()[threading.main_thread().ident]
    calls = [(caller.f_code, line) for caller, line in traceback.walk_stack(frame)]
    return [(code.co_filename, line, code.co_name) for code, line in reversed(calls)]


def phase_of(frames):
    """Return the first phase of PHASES whose pattern matches the stack `frames`, or `other`."""
    text = "\n".join(f"{file} {function}" for file, _, function in frames)
    found = (phase for phase, pattern in PHASES if re.search(pattern, text, re.MULTILINE))
    return next(found, "other")


def training_frame(frames):
    """Return the (file, line, function) of the innermost frame that is in the user's code.

    If no frame is in the user's code, return ("?", 0, "?").
    """
    own = (frame for frame in reversed(frames) if not FOREIGN.search(frame[0]))
    return next(own, ("?", 0, "?"))


# ---- steps, losses, gradients, weights ---------------------------------------------------------
class Steps:
    """Count optimizer steps, and check the losses, gradients, inputs and weights of this rank.

    The checks run on the device, and their results travel to the host asynchronously, so the
    training never waits for a check.
    """

    def __init__(self, every=10):
        # `every` is the number of steps from one check of the inputs and the weights to the next.
        self.every = every
        # This is the traceback of an error in a check or in the heartbeat thread, or None. After an
        # error, no check runs.
        self.fault = None

        # `count` is the number of steps that this process has run. `earlier_steps` is the number of
        # steps that earlier processes have run; it is 0 unless the run was resumed.
        self.count = 0
        self.earlier_steps = 0
        self.end_times = deque(maxlen=11)

        # These are sums over the micro-batches of the current step: the loss, the number of
        # gradients that are not finite, and the hash of the inputs.
        self.sums = defaultdict(int)
        # This queue holds the rows of results whose copies to the host may not have finished.
        self.pending = deque(maxlen=999)

        self.losses = deque(maxlen=3)
        self.checks = deque(maxlen=4)
        self.optimizer = None
        self.first_nonfinite = None
        self.shard = None

        backward = torch.autograd.backward
        embedding_forward = torch.nn.Embedding.forward

        def watched_backward(tensors, *args, **options):
            self.safely(self.note_loss, tensors)
            return backward(tensors, *args, **options)

        def watched_forward(embedding, *args, **options):
            output = embedding_forward(embedding, *args, **options)
            if not torch.compiler.is_compiling() and output.requires_grad:
                self.safely(self.note_input, args, output)
            return output

        torch.autograd.backward = watched_backward
        torch.nn.Embedding.forward = watched_forward
        register_optimizer_step_post_hook(lambda opt, *_: self.safely(self.note_step, opt))

    def safely(self, check, *args):
        """Run a check; if it raises an error, run no more checks, but let the training continue."""
        try:
            if self.fault is None:
                check(*args)
        except Exception:
            self.fault = traceback.format_exc()

    def note_loss(self, tensors):
        """Add the loss of a micro-batch to the sum of this rank's losses in the current step."""
        if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
            self.sums["loss"] += tensors.detach().float().reshape(())

    def note_input(self, args, output):
        """Check the gradient of an embedding's output, and hash the embedding's input.

        A hook checks the gradient in backward(), before data-parallel ranks reduce their
        gradients, so no other data-parallel rank can have caused a bad gradient. Only steps that
        also check the weights hash the input.
        """
        output.register_hook(lambda gradient: self.safely(self.note_gradient, gradient))
        # The hash reveals ranks that train on the same samples. Do not hash a DTensor, because
        # tensor-parallel ranks train on the same samples on purpose.
        is_shared = hasattr(args[0], "_local_tensor")
        if (self.count + 1) % self.every == 0 and not is_shared:
            ids = args[0].long()
            # Because of the square of each id, two batches are unlikely to get the same hash even
            # if the sums of their ids are equal.
            self.sums["input_hash"] += (ids * (ids + 7919)).sum()

    def note_gradient(self, gradient):
        """Count the gradient of an embedding's output if the gradient is not finite."""
        local = getattr(gradient, "_local_tensor", gradient)
        self.sums["nonfinite_gradients"] += ~local.isfinite().all()

    def note_step(self, optimizer):
        """Count a step of the script's first optimizer, and check the weights if a check is due."""
        self.optimizer = self.optimizer or optimizer
        if optimizer is not self.optimizer:
            return
        self.count += 1
        self.end_times.append(time.time())
        values = [self.sums[name] for name in ("loss", "nonfinite_gradients", "input_hash")]
        self.sums.clear()
        # Send the optimizer's own step number, too, because after a resume, it includes the steps
        # of earlier processes.
        state = next(iter(optimizer.state.values()), {})
        values.append(state.get("step", self.count))
        if self.count == 1 or self.count % self.every == 0:
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            self.shard = self.shard or shard_of(weights)
            values.append(checksum(weights))
        self.send(values)

    def send(self, values):
        """Start to copy a row of values to the host; a value may be a tensor on the device."""
        devices = (value.device for value in values if torch.is_tensor(value) and value.is_cuda)
        row = torch.zeros(len(values), dtype=torch.float64, device=next(devices, "cpu"))
        # Use fill_(), because a copy of a Python number from pageable memory would make the host
        # wait for the GPU.
        for slot, value in zip(row, values, strict=True):
            slot.fill_(value)
        # This copy does not make the host wait, because torch allocates pinned memory for it.
        copy = row.to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if row.is_cuda else None
        self.pending.append((self.count, copy, copied))

    def collect(self):
        """Process the results that have reached the host; stop at the first pending copy."""
        while self.pending:
            count, row, copied = self.pending[0]
            if copied is not None and not copied.query():
                return
            self.pending.popleft()
            loss, bad_gradients, input_hash, optimizer_step, *checksums = row.tolist()
            self.losses.append(loss)
            self.earlier_steps = max(0, int(optimizer_step) - count)
            step = self.earlier_steps + count
            for weights in checksums:
                check = {"step": step, "data": input_hash, "weights": weights}
                self.checks.append(check | {"losses": list(self.losses)})
            is_finite = math.isfinite(loss) and bad_gradients == 0
            if self.first_nonfinite is None and not is_finite:
                self.first_nonfinite = {"step": step, "loss": loss, "gradients": bad_gradients}


def checksum(weights):
    """Return a number that changes if one bit of this rank's part of the weights changes."""
    parts = [getattr(weight, "_local_tensor", weight).detach() for weight in weights]
    hashes = [torch.hash_tensor(part).view(torch.int64) % HASH_MODULUS for part in parts]
    return torch.stack(hashes).sum() % HASH_MODULUS


def shard_of(weights):
    """Return a text that names this rank's shard of the weights, or "whole" without shards.

    Ranks with the same text are replicas. The text has the first rank of the weights' mesh, because
    each stage of a pipeline has a mesh of its own, and different layers.
    """
    parts = set()
    for weight in weights:
        if mesh := getattr(weight, "device_mesh", None):
            parts.add(f"mesh from rank {mesh.mesh.min().item()}")
            coordinate = mesh.get_coordinate()
            for dimension, placement in enumerate(weight.placements):
                if not placement.is_replicate():
                    parts.add(f"{dimension}: {coordinate[dimension]}")
    return ", ".join(sorted(parts)) or "whole"


# ---- files of this rank ------------------------------------------------------------------------
class RecordingStream:
    """Pass text on to a stream, and keep the last three lines that mention a problem."""

    def __init__(self, stream):
        self.stream = stream
        self.problems = deque(maxlen=3)

    def write(self, text):
        self.problems.extend(line[:300] for line in text.splitlines() if PROBLEM.search(line))
        return self.stream.write(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


def from_environment(names, default):
    """Return the integer in the first environment variable of `names` that is set, or `default`."""
    values = (os.environ[name] for name in names if name in os.environ)
    return int(next(values, default))


class Watch:
    """Write this rank's heartbeats and dumps from a separate thread."""

    def __init__(self, folder, steps, stall):
        self.folder = folder
        self.steps = steps
        self.stall = stall
        rank = from_environment(RANK_VARIABLES, 0)
        self.path = folder / f"{rank:05}"
        self.identity = {
            "rank": rank,
            "world_size": from_environment(SIZE_VARIABLES, 1),
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "started": time.time(),
        }
        folder.mkdir(parents=True, exist_ok=True)
        # Delete the files that this rank wrote in an earlier start of the script.
        for path in folder.glob(f"{rank:05}.*"):
            path.unlink(missing_ok=True)
        self.crash = open(self.path.with_suffix(".crash"), "w")
        faulthandler.enable(self.crash)
        # Make later calls of faulthandler.enable() do nothing, because torch's @record calls it to
        # send the stacks to a different file.
        faulthandler.enable = lambda *_, **__: None

        # `position` is the step and the phase of the main thread, and `position_since` is the time
        # when the step or the phase last changed.
        self.position = (0, "start")
        self.position_since = time.time()
        # This is the (file, line, function) in the user's code where the latest sample found the
        # main thread.
        self.frame = ("?", 0, "?")
        self.frame_counts = Counter()

        self.end = None
        self.error = None
        self.sigterm_time = None
        self.stalled_step = None

        self.memory = deque(maxlen=6)
        self.memory_age = 0.0
        self.cpu_seconds = 0.0
        self.heartbeat_time = 0.0
        self.dump_time = 0.0
        self.dump_request_time = 0.0

        # Keep this file open until leave() closes it. The last heartbeat then has a free file
        # descriptor, even if the script has used up all other descriptors.
        self.spare_file = open(os.devnull)
        sys.stdout = self.stdout = RecordingStream(sys.stdout)
        sys.stderr = self.stderr = RecordingStream(sys.stderr)
        self.signal_pipe = self.open_signal_pipe()
        self.thread = threading.Thread(target=self.run, daemon=True, name="watched")
        self.thread.start()

    def open_signal_pipe(self):
        """Open a pipe that receives the numbers of signals, and return the read end of the pipe.

        The pipe receives each signal that has a Python handler, even while the main thread is in C
        code, where the handler cannot run.
        """
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, defer_to_thread)
        # Block SIGTERM during a fork, so that the child receives it only after restore_signals().
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]),
            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM]),
            after_in_child=restore_signals,
        )
        return reader

    def run(self):
        """Sample the main thread and write heartbeats until the script has ended."""
        has_signal = True
        while self.end is None:
            try:
                self.look()
                self.steps.collect()
                is_due = time.monotonic() - self.heartbeat_time > HEARTBEAT_INTERVAL
                if has_signal or is_due:
                    self.heartbeat_time = time.monotonic()
                    self.tell()
                    self.dump_if_due()
                if self.sigterm_time and signal.getsignal(signal.SIGTERM) is defer_to_thread:
                    self.end_by_sigterm()
                has_signal = select.select([self.signal_pipe], [], [], SAMPLE_INTERVAL)[0]
            except Exception:
                self.steps.fault = traceback.format_exc()
                time.sleep(SAMPLE_INTERVAL)

    def look(self):
        """Sample the main thread's phase, and the line of the user's code that this thread runs."""
        frames = main_stack()
        phase = phase_of(frames)
        if phase == "other" and not self.steps.count:
            phase = "start"
        self.frame = training_frame(frames)
        self.frame_counts[self.frame] += 1
        if (self.steps.count, phase) != self.position:
            self.position = (self.steps.count, phase)
            self.position_since = time.time()

    def end_by_sigterm(self):
        """Write a last heartbeat and a dump, and end the process as SIGTERM does by default.

        The heartbeat records SIGTERM as the error that has ended this rank.
        """
        self.error = "SIGTERM ended this rank; a launcher or a person sent it"
        self.end = "failed"
        self.tell()
        self.dump("ended")
        # Restore the default handler with C's signal(), because Python can set a handler only in
        # the main thread.
        ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
        os.kill(os.getpid(), signal.SIGTERM)

    def tell(self):
        """Write a heartbeat, which whats_wrong.py reads."""
        # If no signal has arrived since the last heartbeat, the pipe is empty, and os.read() raises
        # BlockingIOError.
        with suppress(BlockingIOError):
            if signal.SIGTERM in os.read(self.signal_pipe, 64):
                self.sigterm_time = time.time()
        steps = self.steps
        samples = max(1, sum(self.frame_counts.values()))
        end_times = list(steps.end_times)
        step_seconds = [after - before for before, after in pairwise(end_times)]
        cpu_seconds = time.process_time()
        memory = host_memory()
        # Append the host memory each time the run has become 3% older. The latest six values then
        # cover about a seventh of any run that is longer than a few minutes.
        age = time.time() - self.identity["started"]
        if steps.count and age > 1.03 * self.memory_age:
            self.memory_age = age
            self.memory.append(memory)
        # Map each of the three most frequent lines to the share of the samples that found the main
        # thread at this line.
        lines = {}
        for (file, line, function), count in self.frame_counts.most_common(3):
            lines[f"{os.path.basename(file)}:{line} {function}"] = round(count / samples, 2)
        values = {
            "time": time.time(),
            "end": self.end,
            "phase": self.position[1],
            "since": self.position_since,
            "frame": self.frame,
            "step": steps.earlier_steps + steps.count + (self.end != "finished"),
            "step_seconds": median(step_seconds) if step_seconds else None,
            "error": self.error,
            "asked_to_end": self.sigterm_time,
            "printed": [*self.stdout.problems, *self.stderr.problems],
            "lines": lines,
            "checks": list(steps.checks),
            "bad": steps.first_nonfinite,
            "shard": steps.shard,
            "memory": [*self.memory, memory],
            "cpu": (cpu_seconds - self.cpu_seconds) / HEARTBEAT_INTERVAL,
            "fault": steps.fault,
        }
        self.write(".json", self.identity | values)
        self.cpu_seconds = cpu_seconds
        # Reset the counts about every ten seconds, so that "lines" describes the recent past.
        if samples > 10 / SAMPLE_INTERVAL:
            self.frame_counts = Counter()

    def write(self, suffix, content):
        """Write `content` as JSON to this rank's file with the ending `suffix`.

        Replace the file in one operation, so that no reader sees half a file.
        """
        partial = self.path.with_suffix(".new")
        # If the disk is full, skip this file; whats_wrong.py checks the free space itself.
        with suppress(OSError):
            partial.write_text(json.dumps(content, default=str))
            partial.rename(self.path.with_suffix(suffix))

    def dump_if_due(self):
        """Write a dump if the file `dump` was touched, or after `stall` seconds of no progress."""
        # Before the first request, the file `dump` does not exist, and stat() raises OSError.
        with suppress(OSError):
            last_request = self.dump_request_time
            self.dump_request_time = (self.folder / "dump").stat().st_mtime
            if self.dump_request_time != last_request:
                self.dump("asked")
        if time.time() - max(self.position_since, self.dump_time) > self.stall:
            self.stalled_step = self.steps.count
            self.dump("stall")

    def dump(self, reason):
        """Write the stack of the main thread and the latest collectives to this rank's dump."""
        if reason in ("failed", "ended") and self.stalled_step == self.steps.count:
            # Keep the earlier dump of the stall, because it shows where the rank waited.
            return
        self.dump_time = time.time()
        content = {"reason": reason, "stack": main_stack(), "collectives": recorded_collectives()}
        self.write(".dump.json", content)

    def leave(self, error):
        """Write the last heartbeat, and a dump if an error has ended the script."""
        message = None if error is None else "".join(traceback.format_exception(error))
        if isinstance(error, SystemExit):
            text = error.code if isinstance(error.code, str) else " ".join(self.stderr.problems)
            message = f"SystemExit: {text}" if error.code else None
        self.error = self.error or message
        self.spare_file.close()
        self.end = "failed" if message else "finished"
        # Wait until the thread ends, but at most one second. Otherwise, the thread could replace
        # the last heartbeat with an older heartbeat.
        self.thread.join(timeout=1)
        self.steps.safely(self.steps.collect)
        self.tell()
        if message:
            self.dump("failed")


def defer_to_thread(*_):
    """Do nothing on SIGTERM here; the heartbeat thread calls `end_by_sigterm` instead."""


def restore_signals():
    """Undo watched.py's changes to the handling of signals, in a forked process."""
    if signal.getsignal(signal.SIGTERM) is defer_to_thread:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def host_memory():
    """Return this process's host memory in GiB, or 0.0 outside Linux."""
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return round(pages * resource.getpagesize() / 2**30, 3)
    return 0.0


def recorded_collectives():
    """Return the latest collectives, up to 500 per backend, from PyTorch's Flight Recorder."""
    collectives = []
    for function in ("_dump_fr_trace", "_dump_nccl_trace"):
        # Ignore errors, because these functions are private to torch and may change, and because
        # _dump_nccl_trace() exists only in GPU builds of torch.
        with suppress(Exception):
            trace = getattr(torch._C._distributed_c10d, function)()
            entries = pickle.loads(trace)["entries"][-500:]
            collectives += [collective_of(entry) for entry in entries if not entry["is_p2p"]]
    return collectives


def collective_of(entry):
    """Convert an entry of the Flight Recorder to a dictionary that whats_wrong.py reads."""
    backend, _, name = entry["profiling_name"].partition(":")
    frames = [(frame["filename"], frame["line"], frame["name"]) for frame in entry["frames"]]
    # The Flight Recorder lists the innermost frame first, so reverse the frames.
    file, line, function = training_frame(frames[::-1])
    call = name
    if not name.startswith(UNEVEN_COLLECTIVES):
        call += f" {entry['input_sizes']} {' '.join(entry['input_dtypes'])}"
    return {
        "group": f"{backend} {entry['process_group'][0]}",
        "number": entry["collective_seq_id"],
        "call": f"{call} at {os.path.basename(file)}:{line} {function}",
        "called": entry["time_created_ns"] / 1e9,
        "milliseconds": entry.get("duration_ms"),
        "pending": not entry["retired"] and entry["state"] != "completed",
        "patient": (entry.get("timeout_ms") or 0) > PATIENT_TIMEOUT_MS,
    }


def main():
    """Run the script as if it had been started without watched.py, and record what it does."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--into", type=Path, default="outputs/watched", help="folder that gets a subfolder ranks/")
    add("--stall", type=float, default=60, help="seconds without progress until a rank dumps")
    add("script", help="the training script")
    add("arguments", nargs=argparse.REMAINDER, help="the arguments of the training script")
    args = parser.parse_args()
    if not Path(args.script).is_file():
        parser.error(f"script {args.script}: no such file; pass the path of a Python script")
    sys.argv = [args.script, *args.arguments]
    sys.path[0] = str(Path(args.script).resolve().parent)
    watch = Watch(args.into.resolve() / "ranks", Steps(), args.stall)
    try:
        runpy.run_path(args.script, run_name="__main__")
    finally:
        # Pass leave() the exception that ends the script, or None if the script ends normally.
        watch.leave(sys.exc_info()[1])


if __name__ == "__main__":
    main()
