"""Measure where the time of a step goes: computing, waiting for other ranks, for data, the host.

Here:    python benchmarks/where.py --plot where.png
Closer:  python benchmarks/where.py --only 02 --modes eager --trace traces

Each chapter's own script trains a 7M Llama, and torch's profiler traces some windows of its steps.
Of a window the four parts add up to its length:

compute   kernels run; on a CPU, torch's operators in the thread that trains
exposed   communication that the rank waits for, and computes nothing meanwhile
data      the rank waits for a batch
host      the rest: Python, launching kernels, logging

Hidden is communication that is in flight while the rank computes, so it lies inside of compute. On
a GPU copies from and to the host count as compute. No part is a sum of events: spans that overlap
are merged before they are measured. --trace keeps what https://ui.perfetto.dev can show.
"""

import functools
import json
import os
import shutil
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from itertools import product
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch.profiler import profile, record_function

from contenders import load
from speed import (
    BATCH,
    ROOT,
    SEQ_LENGTH,
    call,
    describe_machine,
    keep,
    make_model_folder,
    parser_of,
)

SCRIPTS = {path.parent.name[:2]: path for path in sorted(ROOT.glob("0*/train_llm.py"))}
COLORS = {"compute": "#1f3b5c", "exposed": "#e08a3c", "data": "#5aa9a3", "host": "#c9c4bb"}
WINDOW = 10  # steps; the first is a warm-up, then every other one is traced
LIMIT = 900  # seconds that a run may take
OPERATORS = ("aten::", "fsdp::", "mkldnn::", "torch::distributed::reducer", "## Call Compiled")


def parse_args():
    """Return the arguments."""
    parser, modes = parser_of(__doc__), ["eager", "compiled"]
    add = parser.add_argument
    add("--only", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), help="which chapters")
    add("--modes", nargs="+", choices=modes, default=modes, help="without --compile, and with it")
    add("--windows", type=int, default=5, help=f"of {WINDOW} steps, to be traced in each run")
    add("--plot", type=Path, help="a PNG of the shares")
    add("--trace", type=Path, metavar="FOLDER", help="keep each rank's last traced window there")
    args = parser.parse_args()
    if args.windows < 1:
        parser.error("it takes one window or more")
    return args


# ---- spans: (start, end) in seconds ----------------------------------------------------------


def union(spans):
    """Return the spans in order, with those that touch made one."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def total(spans):
    """Return the seconds that the spans cover, each of them once."""
    return sum(end - start for start, end in union(spans))


def clip(spans, *frames):
    """Return the parts of the spans that lie in a frame, frame by frame."""
    found = [(max(start, first), min(end, last)) for first, last in frames for start, end in spans]
    return [(start, end) for start, end in found if start < end]


def split(window, spans, order):
    """Return the seconds of a window's parts, and of hidden communication.

    `spans` are lists by part, and "flight" those of collectives from start to end. Where parts
    overlap, the time belongs to the one that comes first in `order`.
    """
    spans = {name: clip(some, window) for name, some in spans.items()}
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
    gloo = spans_of(events, "user_annotation", "gloo:")  # in threads of their own
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if kernels:
        nccl = spans_of(kernels, "kernel", "nccl")
        compute = [e for e in kernels if not e["name"].startswith("nccl")]
        spans = {"compute": spans_of(compute), "flight": nccl + gloo}
        spans["exposed"] = nccl + clip(gloo, *marks)  # a host that waits for nccl holds nothing up
        order = "compute", "exposed", "data"
    else:
        tails = tails_of(find("user_annotation", "backward"), find("cpu_op", "autograd::engine::"))
        spans = {"compute": find("cpu_op", OPERATORS), "flight": gloo}
        spans["exposed"] = marks + clip(gloo, *tails)
        order = "data", "compute", "exposed"  # to make a batch takes operators too
    return split(window, spans | {"data": data}, order) | {"step": total([window])}


def spans_of(events, kind=None, names=""):
    """Return the spans, in seconds, of the events of a kind whose names begin so."""
    return [
        (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in events
        if kind in (None, event.get("cat")) and event["name"].startswith(names)
    ]


def tails_of(backwards, nodes):
    """Return each backward's last part, when the last node of the graph is done.

    There DDP waits for its last buckets, in C++, of which no event tells.
    """
    ends = [[end for _, end in nodes if first < end < last] for first, last in backwards]
    return [(max(some), last) for some, (_, last) in zip(ends, backwards, strict=True) if some]


def marked(work, name):
    """Return `work` so that the profiler shows it under `name`."""

    @functools.wraps(work)
    def marked_work(*args, **options):
        with record_function(name):
            return work(*args, **options)

    return marked_work


class Tracer:
    """Measures windows of steps: after the warm-up, every other one with the profiler."""

    def __init__(self, folder):
        self.name = str(Path(folder, f"rank{os.environ.get('RANK', '0')}"))
        self.window = nullcontext()

    def begin(self, step):
        """Note that this step begins, and with it perhaps a window."""
        number, rest = divmod(step - 1, WINDOW)
        if rest == 0:
            self.window.__exit__(None, None, None)
            self.window = self.measured(traced=number > 0 and number % 2 == 0)
            self.window.__enter__()

    @contextmanager
    def measured(self, traced):
        """Write down the seconds per step of a window, and those of its parts if it is traced."""
        with profile() if traced else nullcontext() as profiler:
            if dist.is_initialized():
                dist.barrier()  # that the profiler starts late is no other rank's wait
            begun = time.perf_counter()
            with record_function("window"):
                yield
            found = {"wall": time.perf_counter() - begun}
        if traced:
            profiler.export_chrome_trace(f"{self.name}.json")
            found |= parts_of(f"{self.name}.json")
        with open(f"{self.name}.jsonl", "a") as file:
            print(json.dumps({name: value / WINDOW for name, value in found.items()}), file=file)


def on_a_rank(folder, script):
    """Run a chapter's script on the arguments that are left, and trace it."""
    chapter = load(script)
    tracer, train_step = Tracer(folder), chapter.train_step

    @functools.wraps(train_step)
    def traced_step(args, model, optimizer, train_set, step, device):
        tracer.begin(step)
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
    """Return how many ranks there are devices for, of those among which a step can be divided."""
    devices = torch.cuda.device_count() or 2
    return max(number for number in range(1, BATCH + 1) if number <= devices and not BATCH % number)


def run(script, ranks, folder, windows, *more):
    """Run a script, with more arguments; return the rows of seconds per step, rank by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = WINDOW * (2 * windows + 1) + 1  # the last one ends the last window
    arguments = f"""
        --seq-length {SEQ_LENGTH} --precision bf16 --global-batch-size {BATCH} --batch-size {BATCH}
        --num-steps {steps} --log-every {WINDOW} --eval-samples {BATCH} --eval-every {steps}
        --checkpoint-every {steps} --save-dir {folder} --experiment-name run""".split()
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(launcher if "01" not in script.parent.name else [])]
    command += [__file__, "--on-a-rank", folder, script, *arguments, *more]
    # a rank has as many threads in every chapter
    threads = {"OMP_NUM_THREADS": str(max(1, os.cpu_count() // most_ranks()))}
    call(list(map(str, command)), os.environ | threads, LIMIT)
    files = [folder / f"rank{rank}.jsonl" for rank in range(ranks)]
    return [[json.loads(line) for line in open(file)][1:] for file in files]  # [0]: the warm-up


def shares_of(rows):
    """Return shares of the step: medians over a rank's windows, scaled so that the parts add up.

    With them the seconds of a step, and how many times as long it is because it is traced.
    """
    traced, names = [row for row in rows if "step" in row], (*COLORS, "hidden")
    plain = median(row["wall"] for row in rows if "step" not in row)
    step = median(row["step"] for row in traced)
    middle = {name: median(row[name] / row["step"] for row in traced) for name in names}
    scale = sum(middle[name] for name in COLORS)
    shares = {name: share / scale for name, share in middle.items()}
    return {"step_seconds": step, "tracing": step / plain} | shares


def row_of(chapter, mode, ranks):
    """Return the row of a run: the means over its ranks, then what each rank had."""
    by_rank = [shares_of(rows) for rows in ranks]
    means = {name: fmean(shares[name] for shares in by_rank) for name in by_rank[0]}
    about = {"chapter": chapter, "mode": mode, "compiled": mode == "compiled", "ranks": len(ranks)}
    return about | means | {"by_rank": by_rank}


def show(row):
    """Print a row: shares of a step."""
    told = "  ".join(f"{name} {row[name]:6.1%}" for name in (*COLORS, "hidden"))
    step = f"step {row['step_seconds'] * 1e3:7,.0f} ms"
    print(f"{row['chapter']} {row['mode']:8}  ranks {row['ranks']}  {step}  {told}", flush=True)


def draw(rows, path):
    """Write a PNG: a bar for each run; under it, what is hidden ends where the rest is exposed."""
    figure = Figure(figsize=(9, 0.5 * len(rows) + 1.3), dpi=100, layout="constrained")
    axes = figure.subplots()
    thin = {"facecolor": "white", "edgecolor": COLORS["exposed"], "hatch": "/////", "linewidth": 0}
    for place, row in enumerate(rows):
        left = 0
        for name, color in COLORS.items():
            axes.barh(place, row[name], 0.5, left, color=color)
            if row[name] > 0.04:
                inside = "black" if name == "host" else "white"
                middle = left + row[name] / 2
                axes.text(middle, place, f"{row[name]:.0%}", color=inside, ha="center", va="center")
            left += row[name]
        axes.barh(place + 0.36, row["hidden"], 0.16, row["compute"] - row["hidden"], **thin)
    names = [f"{SCRIPTS[row['chapter']].parent.name}, {row['mode']}" for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set(xlim=(0, 1), ylim=(len(rows) - 0.45, -0.45), xlabel="share of an optimizer step")
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = [Patch(color=color, label=name) for name, color in COLORS.items()]
    handles.append(Patch(**thin, label="hidden, within compute"))
    figure.legend(handles=handles, ncols=5, loc="outside upper center", frameon=False)
    figure.savefig(path)


def keep_traces(folder, target):
    """Copy the traces of a run's ranks to a folder."""
    target.mkdir(parents=True, exist_ok=True)
    for trace in sorted(folder.glob("rank*.json")):
        kept = shutil.copy(trace, target / f"{folder.name}-{trace.name}")
        print(f"open this at https://ui.perfetto.dev: {kept}")


def main():
    """Run the chapters; print the shares."""
    args, machine, rows = parse_args(), describe_machine(), []
    with tempfile.TemporaryDirectory() as temporary:
        make_model_folder(f"{temporary}/llama")
        for mode, chapter in product(args.modes, args.only):
            folder = Path(temporary, f"{chapter}-{mode}")
            ranks = 1 if chapter == "01" else most_ranks()
            more = ["--model-name", f"{temporary}/llama", *["--compile"] * (mode == "compiled")]
            found = run(SCRIPTS[chapter], ranks, folder, args.windows, *more)
            rows.append(row_of(chapter, mode, found))
            show(rows[-1])
            rows.sort(key=itemgetter("chapter"))  # those of a chapter stay in order
            keep(args.output, machine, {"rows": rows})
            if args.plot:
                draw(rows, args.plot)
            if args.trace:
                keep_traces(folder, args.trace)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--on-a-rank"]:  # as which run() starts this script anew, for each rank
        del sys.argv[:2]
        on_a_rank(sys.argv.pop(0), sys.argv[0])
    else:
        main()
