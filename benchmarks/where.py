"""Measure where the time of a step goes: computing, waiting for other ranks, for data, the host.

Here:    python benchmarks/where.py --output benchmarks/results/where.json
Closer:  python benchmarks/where.py --only 02 --modes eager --trace traces

Each chapter's own script trains a Llama of 7 million weights, and torch's profiler traces windows
of its steps. These four parts of a window add up to its length.

compute   kernels run; on a CPU, torch's operators in the thread that trains
exposed   communication that the rank waits for while it computes nothing
data      the rank waits for a batch
host      the rest: Python, launching kernels, logging

Hidden is communication that is in flight while the rank computes, so it lies inside of compute. On
a GPU, copies from and to the host count as compute. Events that overlap are merged before they are
measured. --trace keeps each rank's last window for https://ui.perfetto.dev.
"""

import functools
import json
import os
import shutil
import sys
import tempfile
from contextlib import contextmanager, nullcontext
from itertools import product
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch.profiler import profile, record_function

import harness
from harness import ROOT
from speed import BATCH, SEQ_LENGTH

SCRIPTS = {path.parent.name[:2]: path for path in sorted(ROOT.glob("0*/train_llm.py"))}
PARTS = ("compute", "exposed", "data", "host")
# The steps of a window; the first window is a warm-up.
WINDOW = 10
OPERATORS = ("aten::", "fsdp::", "mkldnn::", "torch::distributed::reducer", "## Call Compiled")


def parse_args():
    """Parse the arguments."""
    parser, modes = harness.parser_of(__doc__), ["eager", "compiled"]
    add = parser.add_argument
    add("--only", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), help="which chapters")
    add("--modes", nargs="+", choices=modes, default=modes, help="without --compile, and with it")
    add("--windows", type=int, default=5, help=f"of {WINDOW} steps, traced in each run")
    add("--trace", type=Path, metavar="FOLDER", help="keep each rank's last window there")
    args = parser.parse_args()
    if args.windows < 1:
        parser.error(f"--windows {args.windows}: must be at least 1")
    return args


# ---- spans: (start, end) in seconds ----------------------------------------------------------


def union(spans):
    """Return the spans in order, and merge spans that touch."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def total(spans):
    """Return the seconds that the spans cover; overlaps count once."""
    return sum(end - start for start, end in union(spans))


def clip(spans, *frames):
    """Return the parts of the spans that lie in a frame, frame by frame."""
    found = [(max(start, first), min(end, last)) for first, last in frames for start, end in spans]
    return [(start, end) for start, end in found if start < end]


def split(window, spans, order):
    """Return the seconds of a window's parts, and of hidden communication.

    `spans` has lists by part, and the list "flight" of collectives from start to end. Where parts
    overlap, the time belongs to the part that comes first in `order`.
    """
    spans = {name: clip(group, window) for name, group in spans.items()}
    parts, seen = {}, []
    for name in order:
        before, seen = total(seen), union(seen + spans[name])
        parts[name] = total(seen) - before
    parts["host"] = total([window]) - total(seen)
    compute, flight = spans["compute"], spans["flight"]
    parts["hidden"] = total(compute) + total(flight) - total(compute + flight)
    return parts


# ---- a rank's trace --------------------------------------------------------------------------


def parts_of(path):
    """Return the seconds of the parts of the window in a trace, and of the window itself."""
    content = json.loads(Path(path).read_text())
    events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    [thread] = [
        e["tid"] for e in events if (e.get("cat"), e["name"]) == ("user_annotation", "window")
    ]
    find = functools.partial(spans_of, [e for e in events if e["tid"] == thread])
    [window] = find("user_annotation", "window")
    data = find("user_annotation", "batch")
    marks = find("user_annotation", "waiting") + find("cpu_op", "_c10d_functional::wait_tensor")
    # Gloo works in threads of its own.
    gloo = spans_of(events, "user_annotation", "gloo:")
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if kernels:
        nccl = spans_of(kernels, "kernel", "nccl")
        compute = [e for e in kernels if not e["name"].startswith("nccl")]
        spans = {"compute": spans_of(compute), "flight": nccl + gloo}
        # A host that waits for NCCL does not delay the GPU.
        spans["exposed"] = nccl + clip(gloo, *marks)
        order = "compute", "exposed", "data"
    else:
        tails = tails_of(find("user_annotation", "backward"), find("cpu_op", "autograd::engine::"))
        spans = {"compute": find("cpu_op", OPERATORS), "flight": gloo}
        spans["exposed"] = marks + clip(gloo, *tails)
        # Operators make a batch, too.
        order = "data", "compute", "exposed"
    return split(window, spans | {"data": data}, order) | {"step": total([window])}


def spans_of(events, kind=None, names=""):
    """Return the spans, in seconds, of the events of a kind whose names begin with `names`."""
    return [
        (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in events
        if kind in (None, event.get("cat")) and event["name"].startswith(names)
    ]


def tails_of(backwards, nodes):
    """Return each backward pass's last part, after the last node of the graph.

    DDP waits there for its last buckets, in C++, and no event shows this.
    """
    ends = [[end for _, end in nodes if first < end < last] for first, last in backwards]
    return [(max(last), end) for last, (_, end) in zip(ends, backwards, strict=True) if last]


def marked(work, name):
    """Return a function that calls `work`, and that the profiler shows under `name`."""

    @functools.wraps(work)
    def marked_work(*args, **options):
        with record_function(name):
            return work(*args, **options)

    return marked_work


@contextmanager
def traced_window(name):
    """Trace a window of steps; append the seconds of its parts to a file."""
    with profile() as profiler:
        # Start together, because one rank's profiler may start later than the others.
        if dist.is_initialized():
            dist.barrier()
        with record_function("window"):
            yield
    profiler.export_chrome_trace(f"{name}.json")
    with open(f"{name}.jsonl", "a") as file:
        print(json.dumps(parts_of(f"{name}.json")), file=file)


def on_a_rank(folder, script):
    """Run a chapter's script on the remaining arguments, and trace its windows."""
    chapter, window = harness.load(script), nullcontext()
    train_step, name = chapter.train_step, Path(folder, f"rank{os.environ.get('RANK', '0')}")

    @functools.wraps(train_step)
    def traced_step(args, model, optimizer, train_set, step, device):
        nonlocal window
        if step > WINDOW and step % WINDOW == 1:
            window.__exit__(None, None, None)
            window = nullcontext() if step == args.num_steps else traced_window(name)
            window.__enter__()
        return train_step(args, model, optimizer, train_set, step, device)

    chapter.train_step = traced_step
    chapter.batch_at = marked(chapter.batch_at, "batch")
    dist.Work.wait = marked(dist.Work.wait, "waiting")
    torch.Tensor.backward = marked(torch.Tensor.backward, "backward")
    chapter.main()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


# ---- all runs --------------------------------------------------------------------------------


def most_ranks():
    """Return the largest number of ranks that divides a batch and is not above that of devices."""
    devices = torch.cuda.device_count() or 2
    return max(number for number in range(1, BATCH + 1) if number <= devices and not BATCH % number)


def run(script, ranks, folder, windows, *more):
    """Run a script with more arguments; return the seconds of each window's parts, by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = WINDOW * (windows + 1) + 1  # the last step ends the last window
    arguments = f"""
        --seq-length {SEQ_LENGTH} --precision bf16 --global-batch-size {BATCH} --batch-size {BATCH}
        --num-steps {steps} --log-every {WINDOW} --eval-samples {BATCH} --eval-every {steps}
        --checkpoint-every {steps} --save-dir {folder} --experiment-name run""".split()
    command = [__file__, "--on-a-rank", folder, script, *arguments, *more]
    is_alone = "01" in script.parent.name
    command = [sys.executable, *command] if is_alone else harness.torchrun_command(ranks, command)
    # A rank has the same number of threads in every chapter.
    harness.call(command, OMP_NUM_THREADS=str(max(1, os.cpu_count() // most_ranks())))
    files = [folder / f"rank{rank}.jsonl" for rank in range(ranks)]
    return [[json.loads(line) for line in open(file)] for file in files]


def shares_of(windows):
    """Return shares of the step: medians over a rank's windows, scaled so that they add up to 1."""
    names = (*PARTS, "hidden")
    middle = {name: median(row[name] / row["step"] for row in windows) for name in names}
    scale = sum(middle[name] for name in PARTS)
    seconds = median(row["step"] for row in windows) / WINDOW
    return {"step_seconds": seconds} | {name: share / scale for name, share in middle.items()}


def main():
    """Run the chapters; print and keep the shares."""
    args, machine, rows = parse_args(), harness.describe_machine(), []
    with tempfile.TemporaryDirectory() as temporary:
        model = harness.make_7m_llama(f"{temporary}/llama")
        for mode, chapter in product(args.modes, args.only):
            folder = Path(temporary, f"{chapter}-{mode}")
            ranks = 1 if chapter == "01" else most_ranks()
            more = ["--model-name", model, *["--compile"] * (mode == "compiled")]
            windows = run(SCRIPTS[chapter], ranks, folder, args.windows, *more)
            by_rank = [shares_of(windows_of_rank) for windows_of_rank in windows]
            row = {"chapter": chapter, "compiled": mode == "compiled", "ranks": ranks}
            row |= {name: fmean(shares[name] for shares in by_rank) for name in by_rank[0]}
            shares = "  ".join(f"{name} {row[name]:6.1%}" for name in (*PARTS, "hidden"))
            print(f"{chapter} {mode:8}  ranks {ranks}  {shares}", flush=True)
            # Sorting keeps the order of a chapter's modes.
            rows = sorted([*rows, row], key=itemgetter("chapter"))
            harness.keep(args.output, machine, {"rows": rows})
            for trace in folder.glob("rank*.json") if args.trace else ():
                args.trace.mkdir(parents=True, exist_ok=True)
                kept = shutil.copy(trace, args.trace / f"{folder.name}-{trace.name}")
                print(f"open this at https://ui.perfetto.dev: {kept}")


if __name__ == "__main__":
    # run() starts this script with --on-a-rank on each rank.
    if sys.argv[1:2] == ["--on-a-rank"]:
        del sys.argv[:2]
        on_a_rank(sys.argv.pop(0), sys.argv[0])
    else:
        main()
