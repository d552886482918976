"""Compare the memory of real runs with the memory that the planner predicts.

Here:    python benchmarks/planner.py --output benchmarks/results/planner-cpu-2cores.json
Closer:  python benchmarks/planner.py --only "05 offload" "04 kept"

Each case trains some steps on random tokens, on ranks that are CPU processes. Rank 0 reports the
bytes of weights, gradients and optimizer state that it holds, and the peak of all tensors. torch's
profiler sees each allocation, and each release outside of Gloo's threads. The planner gets the same
flags.
"""

import json

from torch._C._profiler import _EventType
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

from harness import PLANNER, benchmark, call, show
from on_ranks import build, make_model_folder, on_ranks

SMALL = {"layers": 4, "width": 256, "heads": 8, "kv": 4, "vocabulary": 2000, "tied": False}
# Each case has a chapter, a number of ranks, settings that differ from SMALL, and flags in addition
# to COMMON.
CASES = {
    "02": ("02", 2, {}, "-s 256 -b 4"),
    "02 bf16": ("02", 2, {}, "-s 256 -b 4 --precision bf16"),
    "02 wide": ("02", 2, {"layers": 2, "width": 512}, "-s 64 -b 2"),
    "04": ("04", 2, {}, "-s 256 -b 4"),
    "04 alone": ("04", 1, {}, "-s 128 -b 8"),
    "04 kept": ("04", 2, {"layers": 8}, "-s 64 -b 1 --no-reshard-after-forward"),
    "04 uneven": ("04", 4, {"width": 264, "heads": 6, "kv": 2, "vocabulary": 1999}, "-s 64 -b 1"),
    "04 replicas": ("04", 4, {"tied": True}, "-s 64 -b 1 --replicas 2"),
    "05 bf16": ("05", 2, {"vocabulary": 16000}, "-s 512 -b 4 --precision bf16"),
    "05 full bf16": ("05", 4, {"layers": 6}, "-s 512 -b 2 --recompute full --precision bf16"),
    "05 selective": ("05", 2, {"layers": 6}, "-s 256 -b 4 --recompute selective"),
    "05 offload": ("05", 2, {"tied": True}, "-s 128 -b 2 --cpu-offload --recompute full"),
    "06 bf16": ("06", 4, {}, "-s 512 -b 4 --tensor-parallel-size 4 --precision bf16"),
    "06 full": ("06", 4, {"layers": 6}, "-s 512 -b 4 --tensor-parallel-size 2 --recompute full"),
    "07": ("07", 2, {}, "-s 256 -b 2 --pipeline-parallel-size 2"),
}
STEPS = 8
COMMON = "--device cpu --global-batch-size 8"
# In the profiler's events, the name of a collective begins with one of these words.
GLOO = ("c10d::", "_c10d_functional::", "gloo:")


def bytes_of(tensors):
    """Return the number of bytes of the parts of `tensors` that this rank holds."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.nbytes for tensor in local)


def measure(chapter, args, device):
    """Train for STEPS steps on random tokens.

    Return the bytes of weights, gradients and optimizer state that this rank holds, and the peak of
    its allocated bytes.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model, wrapped, optimizer, samples = build(chapter, args, device)
        state = {}

        def measure_state(*_):
            weights = [weight for weight in model.parameters() if not weight.is_meta]
            moments = (optimizer.state[weight].values() for weight in weights)
            state["parameters"] = bytes_of(weights)
            state["gradients"] = bytes_of(weight.grad for weight in weights)
            state["optimizer state"] = bytes_of(tensor for group in moments for tensor in group)

        optimizer.register_step_post_hook(measure_state)
        for step in range(1, STEPS + 1):
            with record_function(f"step {step}"):
                chapter.train_step(args, wrapped, optimizer, samples, step, device)
    start, _, *later = rises(allocations(profiler))
    # Every step after the first needs the same memory, so use the smallest rise: a rise looks
    # higher than it is if the profiler misses a release.
    return state | {"peak": start + state["optimizer state"] + min(later)}


def allocations(profiler):
    """Return the allocations and the releases of memory that the profiler saw, ordered by time.

    Each of these events is a list of its address, its bytes (negative for a release), and the names
    of the operations that contain the event.
    """
    found = []
    stack = [(event, ()) for event in profiler.profiler.kineto_results.experimental_event_tree()]
    while stack:
        event, names = stack.pop()
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size, names))
        stack += [(child, (*names, event.name)) for child in event.children]
    return [event for _, *event in sorted(found, key=lambda event: event[0])]


def unseen_releases(events):
    """Return the indexes in `events` of collectives' allocations whose release was not seen.

    A collective allocates buffers for itself. A thread of Gloo may release them, and the profiler
    does not see these releases. rises() leaves out such buffers, because they exist only briefly:
    if the profiler sees the release of such a buffer, the collective has just filled the buffer.
    """
    unseen, own = set(), {}
    for number, (address, size, names) in enumerate(events):
        # If the same address is allocated again, the profiler has missed the release in between.
        if address in own and size > 0:
            unseen.add(own[address])
        own.pop(address, None)
        if size > 0 and any(name.startswith(GLOO) for name in names):
            own[address] = number
    return unseen | set(own.values())


def rises(events):
    """Return a list with the rise of the allocated bytes in each step.

    The rise of a step is the highest number of allocated bytes in this step, minus the number at
    the start of the step. The first value in the list is not a rise, but the number of bytes that
    are allocated before the first step.
    """
    unseen = unseen_releases(events)
    live, before, when, most = 0, 0, "start", {}
    for number, (_, size, names) in enumerate(events):
        if names and names[0].startswith("step") and names[0] != when:
            before, when = live, names[0]
        live += 0 if number in unseen else size
        most[when] = live if when == "start" else max(most.get(when, 0), live - before)
    return list(most.values())


def compare(case, folder):
    """Run a case, and plan its memory; return a row with the measured bytes and the planned bytes.

    The row also has the planned peak divided by the measured peak.
    """
    chapter, ranks, changes, flags = CASES[case]
    model = make_model_folder(folder / "model", **(SMALL | changes))
    options = f"--model-name {model} {COMMON} {flags}"
    measured = on_ranks(measure, chapter, ranks, folder, options)
    words = f"--json --chapter {chapter} --gpus-per-node {ranks} {options}"
    plan = json.loads(call([PLANNER, *words.split()]))["asked"]
    row = {"case": case, "ranks": ranks, "flags": flags, "measured": measured}
    row["planned"] = plan["state"] | {"peak": plan["gpu_total"]}
    row["when"] = plan["gpu_when"]
    row["exact"] = all(measured[part] == size for part, size in plan["state"].items())
    return row | {"peak ratio": plan["gpu_total"] / measured["peak"]}


def memory(args, folder):
    """Compare the measured memory of each case with the planned memory; yield a row per case."""
    for case in args.only:
        row = compare(case, folder / case.replace(" ", "-"))
        show(row)
        yield row


if __name__ == "__main__":
    benchmark(__doc__, memory, cases=CASES)
