"""Run a chapter's command on GPUs that do not exist, before you rent them.

Small:  python tools/dry_run.py --gpus 2 -- 04-fsdp/train_llm.py
Big:    python tools/dry_run.py --gpus 64 -- 06-tensor-parallel/train_llm.py \
            @05-large-model/configs/llama-3.1-70b.args --tensor-parallel-size 8

The script itself runs, unchanged and with its real sizes, once for each rank that you choose: it
builds and splits the model, evaluates it, and trains two steps. Its tensors have shapes but no
data, so a laptop is large enough. The tool reads no data and no weights, and leaves no files.
"""

import argparse
import contextlib
import functools
import gc
import itertools
import json
import linecache
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tools/planner"))

import fake_machine  # noqa: E402
from gpus import GPUS, gpu_kind, set_defaults  # noqa: E402
from step_time import SPEEDS  # noqa: E402
from step_watch import Watch  # noqa: E402
from training_step import (  # noqa: E402
    at_least,
    balanced,
    fail,
    import_script,
    parse_training_args,
)

GIB = 2**30
# Each key is the name of a function in a script. The value names the phase that begins when the
# script calls this function.
PHASES = {
    "build_model": "build",
    "shard": "shard",
    "check_causal": "check",
    "build_optimizer": "optimizer",
    "evaluate": "evaluation",
    "train_step": "step",
    "clip_gradients": "clip",
}
# The script is in one of these phases while it runs no function in PHASES.
OUTSIDE = ["start", "between steps"]
# Refuse a script that lacks one of these functions and classes. The dry run replaces or wraps most
# of them, so that the script reads no data, writes no files, and ends after two steps.
NEEDED = "parse_args setup build_model build_data Samples load_checkpoint save_checkpoint".split()
NEEDED += ["train_step", "main"]
# The dry run refuses scripts that import these frameworks, because it cannot simulate them.
FRAMEWORKS = {"accelerate", "deepspeed"}
# In the JSON output, each row of "sent" has these keys. The calls, the bytes and the seconds are
# sums over all collectives with the same values of the first seven keys.
COLUMNS = ["phase", "kind", "ranks", "nodes", "device", "line", "function"]
COLUMNS += ["calls", "bytes", "seconds"]
UNKNOWN = """\
Not checked: speed of the kernels, hangs and order of collectives, memory outside of tensors, data,
and saving. Assumed: the code runs without --compile, and attention is flash attention if its
inputs are in bf16 or fp16, there is no mask, and the GPU is an A100 or newer."""


# ---- command line ----------------------------------------------------------------------------


def parse_args(argv=None):
    """Return the parsed command line.

    Exit with an error if a flag has a wrong value, or if the dry run does not support the script.
    """
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="The exit status is 0 if the script completes two steps on all ranks that ran and "
        "fits in memory, 2 if the command has a mistake, and otherwise 1.",
        allow_abbrev=False,
    )
    parser.error = fail
    add = parser.add_argument
    add("--gpus", type=at_least(1), required=True, help="number of GPUs, with a rank on each")
    add("--gpus-per-node", type=at_least(1), default=8, help="GPUs of a node")
    names = ", ".join(GPUS)
    add("--gpu", type=gpu_kind, default="H100-80GB", help=f"kind of the GPUs: {names}")
    rank_help = "ranks to run, such as 0 7 last; None: first and last rank of each kind of split"
    add("--rank", nargs="+", help=rank_help)
    add("--json", action="store_true", help="print all numbers as JSON, in bytes and seconds")
    add("--gpu-overhead-gib", type=at_least(0.0), default=3.0, help="GiB for CUDA, NCCL and cuBLAS")
    fragmentation_help = "memory that the allocator wastes, as a share of the tensors"
    add("--fragmentation", type=at_least(0.0), default=0.05, help=fragmentation_help)
    for name in ("--nvlink-gbs", "--network-gbs", "--latency"):
        add(name, type=at_least(0.001), default=SPEEDS[name][0], help=SPEEDS[name][1])
    add("script", help="a chapter's train_llm.py, or a changed copy; write -- before its path")
    add("words", nargs=argparse.REMAINDER, help="the arguments of the script")
    set_defaults(parser, argv)
    options = parser.parse_args(argv)
    gpus, local_gpus = options.gpus, options.gpus_per_node
    if gpus > local_gpus and gpus % local_gpus:
        fail(f"--gpus {gpus}: not divisible by --gpus-per-node {local_gpus}; choose a multiple")
    ranks = {str(rank): rank for rank in range(gpus)} | {"last": gpus - 1}
    for word in options.rank or []:
        if word not in ranks:
            fail(f"--rank {word}: unknown rank; choose from 0 to {gpus - 1}, or last")
    # Drop repeated ranks without changing the order.
    options.rank = list(dict.fromkeys(ranks[word] for word in options.rank or []))
    options.script = str(Path(options.script).resolve())
    check_script(options.script)
    return options


def check_script(path):
    """Exit with an error if the dry run does not support the script at `path`.

    The script must be a chapter's script, or a changed copy of a chapter's script. Compile the file
    without importing it, because an import would run the file's code.
    """
    if not Path(path).is_file():
        fail(f"{path}: file not found; check the path")
    # These are the names that the file's top level defines, imports or reads.
    names = set(compile(Path(path).read_bytes(), path, "exec").co_names)
    if missing := [name for name in NEEDED if name not in names]:
        problem = f"is not a copy of a chapter's script, because it lacks {', '.join(missing)}"
        fail(f"{path}: {problem}; choose a chapter's script, or a copy of it with your changes")
    if "__name__" not in names:
        fail(f'{path}: would train on import; call main() only if __name__ == "__main__"')
    if found := FRAMEWORKS & names:
        problem = f"trains with {min(found)}, which the dry run cannot simulate"
        fail(f"{path}: {problem}; choose a chapter's script")


def ranks_to_run(options, args):
    """Return the ranks that --rank names; without --rank, return at most five ranks.

    Three of the five ranks are rank 0, the last rank, and the first rank of the last pipeline
    stage. The other two ranks have the last part of each sequence: they are the first rank with
    this part in the first stage, and the first rank with this part in the last stage. `args` has
    the script's arguments.
    """
    if options.rank:
        return options.rank
    # If a script has no flag for one of these sizes, this size is 1.
    names = ("tensor", "context", "pipeline")
    tensor, context, stages = [getattr(args, f"{name}_parallel_size", 1) for name in names]
    last_context, last_stage = tensor * (context - 1), options.gpus - options.gpus // stages
    ranks = {0, last_context, last_stage, last_stage + last_context, options.gpus - 1}
    return sorted(ranks)


# ---- the script ------------------------------------------------------------------------------


def load_script(options):
    """Import the script, replace some of its functions, and return its parsed arguments.

    Most of the replaced functions need a GPU, saved weights, or other ranks. Store the script's
    module in `options.module`, and the Watch of its run in `options.watch`.
    """
    # Let a changed copy of a script import files from the copy's folder.
    sys.path.append(str(Path(options.script).parent))
    module = options.module = import_script(options.script)
    options.watch = Watch(options)
    module.torch = fake_machine.ScriptTorch(options, options.watch)
    module.fail = fail
    module.causal_lower_right = fake_machine.LowerRight
    # Search all names for DDP, because a changed copy may import DDP under a different name.
    for name, value in list(vars(module).items()):
        if value is torch.nn.parallel.DistributedDataParallel:
            setattr(module, name, fake_machine.ReplicatedModel)
    # Read and save nothing, because the weights of the dry run have no data.
    module.load_checkpoint = lambda *_: 0
    module.read_weights = module.save_checkpoint = lambda *_: None
    # Let check_shared() only write the file that stop_requests() renames. Do not check whether all
    # ranks see this file, because this process simulates only one rank.
    module.check_shared = lambda folder: (folder / ".probe").write_text(module.PROCESS)
    return parse_training_args([*options.words, "--device", "cuda"], options.gpus, module)


def shorten(module):
    """Shorten the training of the script `module` to three steps, and replace its data with zeros.

    Also shorten an evaluation to one micro-batch for each data-parallel rank. add_phases() ends the
    run after step 2.
    """
    parse_args = module.parse_args

    def parse_short_run():
        args = parse_args()
        args.compile = args.pretrained = args.checkpoint_async = False
        # After the evaluation before step 1, schedule the next evaluation for step 3. Step 3 never
        # runs, because the run ends after step 2.
        args.num_steps = args.eval_every = 3
        args.log_every, args.wandb = 1, "disabled"
        return args

    def build_data(args, _):
        # Let all samples share the memory of one token, because the values of their tokens do not
        # matter.
        samples = torch.zeros(1, 1, dtype=torch.int32)
        samples = samples.expand(3 * args.global_batch_size, args.seq_length)
        held_out = samples[: args.global_batch_size // args.accumulation]
        return module.Samples(args.seed, samples, iter(())), held_out

    def count_pairs(samples):
        # Pretend that the largest number of pairs of answers in a sample is 1. Without this, the
        # script would read this number from a fake tensor, which has no values.
        numbers = count_real_pairs(samples)
        numbers.max = lambda: types.SimpleNamespace(item=lambda: 1)
        return numbers

    if hasattr(module, "count_pairs"):
        count_real_pairs, module.count_pairs = module.count_pairs, count_pairs
    module.parse_args = parse_short_run
    module.build_data = fake_machine.on_real_tensors(build_data)
    # Keep the samples in order, because a random order would be a fake tensor, without values.
    module.random_order = lambda seed, shuffle, num_samples: range(num_samples)


def add_phases(module, watch, progress):
    """Wrap the functions of `module` that PHASES names, so that each call sets `watch.phase`.

    A wrapped function also calls `progress` with the name of its phase, unless it runs inside a
    different wrapped function. When the second call of train_step() returns, its wrapper raises
    EndOfRun.
    """
    steps = itertools.count(1)

    def as_phase(function, phase):
        def call(*args, **kwargs):
            before, watch.phase = watch.phase, phase
            if phase == "step":
                watch.phase = f"step {next(steps)}"
            if phase == "clip":
                watch.phase = f"{before}, clip"
            elif before in OUTSIDE:
                progress(watch.phase)
            begun = watch.phase
            result = function(*args, **kwargs)
            watch.phase = "between steps" if phase == "step" else before
            if begun == "step 2":
                raise EndOfRun
            return result

        return call

    for name, phase in PHASES.items():
        if hasattr(module, name):
            setattr(module, name, as_phase(getattr(module, name), phase))


def run_rank(options, rank, sender):
    """Run the script as rank number `rank`, and send the result through the pipe `sender`.

    The result has the rank's memory, collectives and waits. If the script failed, the result also
    has the error.
    """
    # Hide all warnings, because torch may warn about the missing data of fake tensors.
    warnings.simplefilter("ignore")
    module, watch, began, problem = options.module, options.watch, time.perf_counter(), None
    fake_machine.add_ranks(options, rank)
    fake_machine.add_gpu(options, watch)
    watch.watch_torch()
    shorten(module)
    # Raise the script's error messages as exceptions, so that the rank's result can report them.
    module.fail = raise_message

    def progress(phase):
        seconds = time.perf_counter() - began
        print(f"rank {rank}, {seconds:.0f} s: {phase}", file=sys.stderr, flush=True)

    add_phases(module, watch, progress)
    dist.init_device_mesh = fake_machine.on_real_tensors(dist.init_device_mesh)
    if hasattr(module, "dispatch"):
        wait = functools.partial(watch.wait, "reads the numbers of tokens")
        module.dispatch = balanced(module.dispatch, wait)
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        fake_machine.FakeTensors(),
        watch,
    ):
        sys.argv = [options.script, *options.words, "--device", "cuda", "--save-dir", folder]
        try:
            # Call main() without torchrun's decorator, which would report EndOfRun as an error.
            getattr(module.main, "__wrapped__", module.main)()
        except EndOfRun:
            pass
        except BaseException as error:
            problem = describe(options, error)
    sender.send({"rank": rank, "problem": problem} | summary(options, watch))


class EndOfRun(Exception):
    """End the run after its second step."""


class ScriptError(Exception):
    """Carry the message that the script would print before it exits."""


def raise_message(message):
    """Raise the message as a ScriptError; the script itself would print the message and exit."""
    raise ScriptError(" ".join(message.split()))


def describe(options, error):
    """Return a dictionary with the line number, the reason and the traceback of an error.

    The line number belongs to the script's last line in the traceback. It is 0 if the traceback has
    no line of the script. The reason is one line of text.
    """
    trace = "".join(traceback.format_exception(error))
    # Find the original error, because the script and torch catch some errors, and raise new errors
    # in their place.
    if isinstance(error, ScriptError) and error.__context__:
        error = error.__context__
    while error.__cause__:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == options.script]
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    return {"line": lines[-1] if lines else 0, "reason": reason, "traceback": trace}


def summary(options, watch):
    """Return a dictionary with the peaks, the collectives and the waits that `watch` has counted.

    The dictionary also has the bytes of GPU memory that the rank needs.
    """
    peaks = [
        {"phase": phase, "device": device, "bytes": kinds.total(), "kinds": dict(kinds)}
        | {"line": line, "function": function}
        for (phase, device), (kinds, (line, function)) in watch.peaks.items()
    ]
    on_gpu = [row for row in peaks if row["device"] == "gpu"]
    fullest = max(on_gpu, key=lambda row: row["bytes"], default={"bytes": 0})
    on_host = [row for row in peaks if row["device"] == "cpu" and row["phase"].startswith("step")]
    needs = fullest["bytes"] * (1 + options.fragmentation) + options.gpu_overhead_gib * GIB
    return {
        "fullest": fullest,
        "needs": needs,
        "margin": GPUS[options.gpu].gpu_memory_gib * GIB - needs,
        "host": max((row["bytes"] for row in on_host), default=0),
        "peaks": peaks,
        "sent": [
            dict(zip(COLUMNS, (*key, *value), strict=True)) for key, value in watch.sent.items()
        ],
        "waits": [
            {"phase": phase, "line": line, "function": function, "reason": reason, "times": times}
            for (phase, (line, function), reason), times in watch.waits.items()
        ],
    }


def run_ranks(options, ranks):
    """Run the script as each of `ranks`, in separate processes; return the list of the results."""
    # Fork the processes, so that they inherit the imported modules.
    context, results = multiprocessing.get_context("fork"), []
    cores = len(os.sched_getaffinity(0))
    # Exclude existing objects from the garbage collection of each rank. If a rank deleted a process
    # group that existed before the fork, it would wait for threads that a fork does not copy.
    gc.freeze()
    for first in range(0, len(ranks), cores):
        receivers = {}
        for rank in ranks[first : first + cores]:
            receivers[rank], sender = context.Pipe(duplex=False)
            context.Process(target=run_rank, args=(options, rank, sender), daemon=True).start()
            sender.close()
        results += [receive_result(receiver, rank) for rank, receiver in receivers.items()]
    gc.unfreeze()
    return results


def receive_result(receiver, rank):
    """Wait for a rank's result and return it; exit with an error if the rank's process died."""
    try:
        return receiver.recv()
    except EOFError:
        sys.exit(f"dry_run.py: error: rank {rank}: its process was killed; free some memory")


# ---- report ----------------------------------------------------------------------------------


def show(options, results):
    """Print a line for each rank, and the details of one rank.

    The details are from a rank that failed or, if no rank failed, from the rank that needs the most
    memory.
    """
    nodes = -(-options.gpus // options.gpus_per_node)
    print(f"{name_of(options)} on {options.gpus} × {options.gpu}, nodes: {nodes}\n")
    print(f"{'rank':>8}{'tensors':>14}{'with all else':>16}")
    for result in results:
        sizes = f"{gib(result['fullest']['bytes']):>14}{gib(result['needs']):>16}"
        print(f"{result['rank']:>8}{sizes}  {verdict(options, result)}")
    # Choose a rank that failed; if no rank failed, choose the rank that needs the most memory.
    worst = max(results, key=lambda result: (bool(result["problem"]), result["needs"]))
    print(f"\nrank {worst['rank']}:")
    if worst["problem"]:
        print(line_of(options, worst["problem"]["line"]))
        print(f"    {worst['problem']['reason']}")
    show_memory(options, worst)
    show_sent(options, worst)
    show_waits(options, worst)
    print(f"\n{UNKNOWN}")


def verdict(options, result):
    """Return the verdict on a rank, such as "fits; 20.00 GiB are free" or "fails at line 700"."""
    if result["problem"]:
        return f"fails at line {result['problem']['line']}"
    margin = gib(abs(result["margin"]))
    if result["margin"] < 0:
        return f"does not fit; lacks {margin}"
    # Like the planner, call the fit tight if the free memory is less than a tenth of the needed
    # memory.
    word = "fits" if result["margin"] >= result["needs"] / 10 else "tight"
    return f"{word}; {margin} are free"


def show_memory(options, result):
    """Print the GPU memory of each kind of tensor at the moment when a rank needs the most memory.

    Leave out kinds below 0.005 GiB. Also print the peak of each phase that is not in OUTSIDE, and
    the peak of the rank's CPU memory in a step.
    """
    fullest = result["fullest"]
    if not fullest["bytes"]:
        return
    print(f"the fullest moment is in {fullest['phase']}:")
    print(line_of(options, fullest["line"]))
    for kind, size in sorted(fullest["kinds"].items(), key=lambda item: -item[1]):
        if size >= GIB / 200:
            print(f"  {kind:20}{gib(size):>12}")
    print(f"  {'all tensors':20}{gib(fullest['bytes']):>12}")
    print("\npeak of each phase")
    for row in result["peaks"]:
        if row["device"] == "gpu" and row["phase"] not in OUTSIDE:
            print(f"  {row['phase']:20}{gib(row['bytes']):>12}")
    print(f"  {'host, in a step':20}{gib(result['host']):>12}")


def show_sent(options, result):
    """Print the bytes that the collectives in each line of the script send.

    There are separate tables for step 2, for the time between steps, and for the evaluation.
    """
    parts = {"in a step": "step 2", "between steps": "between", "in an evaluation": "evaluation"}
    for part, phase in parts.items():
        rows = [row for row in result["sent"] if row["phase"].startswith(phase)]
        if rows:
            print(f"\nsent {part:20}ranks  nodes  calls            GB   seconds  in")
        for line in dict.fromkeys(row["line"] for row in rows):
            print(line_of(options, line))
            for row in rows:
                if row["line"] == line:
                    show_collective(row)
        if phase == "step 2" and rows:
            total, seconds = (sum(row[name] for row in rows) for name in ("bytes", "seconds"))
            print(f"  {'together':42}{total / 1e9:>14,.4f}{seconds:>10.3f}")


def show_collective(row):
    """Print a table row with the calls, GB and seconds of one kind of collective.

    The row counts only the collectives that one line of the script calls in one phase.
    """
    kind = row["kind"] + (" (host)" if row["device"] == "cpu" else "")
    part = row["phase"].partition(", ")[2]
    part = part or ("loop" if row["phase"] in OUTSIDE else "forward")
    counts = f"{row['ranks']:>7}{row['nodes']:>7}{row['calls']:>7}"
    print(f"    {kind:19}{counts}{row['bytes'] / 1e9:>14,.4f}{row['seconds']:>10.3f}  {part}")


def show_waits(options, result):
    """Print the script's lines where the CPU waits for the GPU, and the reason for each wait.

    Waits in step 2 come first, then waits between steps and in evaluations.
    """
    parts = {"a step": ("step 2",), "logs and evaluations": ("evaluation", "between")}
    print()
    for part, phases in parts.items():
        totals = Counter()
        for row in result["waits"]:
            if row["phase"].startswith(phases):
                totals[row["line"], row["reason"]] += row["times"]
        if totals or part == "a step":
            print(f"the CPU waits for the GPU in {part}{'' if totals else ': never'}")
        for (line, reason), times in totals.items():
            print(f"{line_of(options, line)}\n    {reason} (waits: {times})")


def line_of(options, line):
    """Return a text with the script's path, the number `line`, and the code of this line."""
    text = linecache.getline(options.script, line).strip()
    return f"  {name_of(options)}:{line}: {text}"


def name_of(options):
    """Return the path of the script, relative to the repository if the script is in it."""
    path = Path(options.script)
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def gib(size):
    """Format a number of bytes in GiB."""
    return f"{size / GIB:,.2f} GiB"


def main():
    """Run the chosen ranks, and print the report or, with --json, the results.

    Exit with 0 if each of these ranks completes two steps and fits on its GPU. Otherwise, exit with
    1.
    """
    options = parse_args()
    results = run_ranks(options, ranks_to_run(options, load_script(options)))
    if options.json:
        print(json.dumps(results, indent=1))
    else:
        show(options, results)
    fits = all(not result["problem"] and result["margin"] >= 0 for result in results)
    sys.exit(0 if fits else 1)


if __name__ == "__main__":
    main()
