"""Plan the memory and the speed of a layout, and find the best layouts of a training run."""

import itertools
import math

from commands import layout_of, words_without_layout
from memory import PARTS, fullest_step, host_memory, least_bytes, state_bytes
from report import GIB
from setting import ExpertShape, UnsupportedModelError
from step_time import speed_of
from training_step import stages_of


def plan_of(setting):
    """Return the plan of one setting as a dictionary, with all sizes in bytes.

    The speed is None if the setting does not fit, has no GPUs, uses Muon, or has layers without
    attention.
    """
    step = fullest_step(setting)
    host, when = host_memory(setting, step.model)
    gpu_total = step.most.total()
    gpu_room, host_room = setting.gpu_memory_gib * GIB, setting.host_memory_gib * GIB
    local_ranks, host_overhead = setting.gpus_per_node, setting.host_overhead_gib * GIB
    gpu_needs = gpu_total * (1 + setting.fragmentation) + setting.gpu_overhead_gib * GIB
    host_needs = sum(host.values()) + local_ranks * host_overhead
    if not setting.cuda:
        gpu_room = host_room / local_ranks
        gpu_needs = gpu_total + host_overhead
        host_needs = gpu_needs * local_ranks
    fits = gpu_room >= gpu_needs and host_room >= host_needs
    checkpoint = checkpoint_bytes(setting)
    has_speed = fits and setting.cuda and not setting.muon
    has_speed = has_speed and not setting.model.has_other_layers
    speed = speed_of(setting) if has_speed else None
    return {
        "gpu": {name: step.most[name] for name in PARTS},
        "gpu_when": step.when,
        "gpu_total": gpu_total,
        "gpu_needs": gpu_needs,
        "gpu_margin": gpu_room - gpu_needs,
        "state": step.state,
        "host": host,
        "host_when": when,
        "host_needs": host_needs,
        "host_margin": host_room - host_needs,
        "fits": fits,
        "checkpoint": checkpoint,
        "stop_seconds": stop_seconds(setting, checkpoint, speed) if speed else None,
        "speed": speed,
    }


def stop_seconds(setting, checkpoint, speed):
    """Return the longest time in seconds from the request to stop until the run has ended.

    After the request, the run trains for up to three steps, and saves a checkpoint. With
    `--checkpoint-async`, an earlier save may still be in progress, and must end first. Add a
    reserve of one minute, and round up to a multiple of 10 seconds.
    """
    saves = 2 if setting.checkpoint_async else 1
    seconds = 3 * speed["step"] + saves * checkpoint / 1e9 / setting.storage_gbs + 60
    return 10 * math.ceil(seconds / 10)


def checkpoint_bytes(setting):
    """Return the bytes of a checkpoint: trained weights, two moments, and a counter per tensor.

    With LoRA, only the adapters are trained. With Muon, the matrices in the layers have only one
    moment and no counter.
    """
    # A rank of chapter 02 holds the full state. Count gradients in place of the trained weights,
    # which have the same number of bytes.
    state = state_bytes(setting.model, setting.changed(chapter="02", expert_parallel_size=1))
    return state["gradients"] + state["optimizer state"]


def ways_to_split(args):
    """Return the ways to split the model, each as a tuple (name, chapter, lists of flags).

    A layout combines one element of each list. The last element of a list saves the most memory.
    """

    def sizes(name, most):
        """Return a flag for each power of two above 1 that is a divisor of `most`."""
        powers = [2**power for power in range(1, 13)]
        return [f"--{name}-parallel-size {size}" for size in powers if most % size == 0]

    # The ranks of a tensor-parallel or context-parallel group split the activations of each sample,
    # so a rank has memory for larger micro-batches.
    batch, group = args.batch_size, args.batch_size * args.gpus_per_node
    alone = [f"--batch-size {size}" for size in sorted({batch, 1}, reverse=True)]
    together = [f"--batch-size {size}" for size in sorted({group, batch, 1}, reverse=True)]
    recompute = ["", "--recompute selective", "--recompute full"]
    replicas = [f"--replicas {args.nodes}", ""] if args.nodes > 1 else [""]
    tensor, context = (sizes(name, args.gpus_per_node) for name in ("tensor", "context"))
    stages = sizes("pipeline", min(args.ranks, 32))
    schedules = ["--pipeline-schedule interleaved-1f1b", ""]
    styles = ["", "--context-parallel-style ulysses"]
    # In a mixture of experts, only chapter 09 can split each layer with tensor parallelism, so use
    # chapter 09 in place of chapters 06 and 07.
    is_mixture = any(isinstance(shape, ExpertShape) for shape in args.model.shapes)
    tensor_chapter, both_chapter = ("09", "09") if is_mixture else ("06", "07")
    ways = [
        ("DDP", "02" if args.nodes == 1 else "03", [alone]),
        ("FSDP", "04", [alone, ["--no-reshard-after-forward", ""]]),
        ("FSDP, replicas", "04", [alone, replicas[:-1]]),
        ("FSDP, recompute", "05", [alone, replicas, recompute[1:]]),
        ("FSDP, CPU offload", "05", [alone, recompute, ["--cpu-offload"]]),
        ("FSDP, TP", tensor_chapter, [together, recompute, tensor]),
        ("FSDP, PP", "07", [alone, recompute, schedules, stages]),
        ("FSDP, TP, PP", both_chapter, [together, recompute, schedules, tensor, stages]),
        ("FSDP, CP", "08", [together, recompute, styles, context]),
    ]
    if is_mixture:
        experts = sizes("expert", min(args.ranks, 64))
        ways.append(("FSDP, EP", "09", [alone, recompute, experts]))
    return ways


def best_layouts(args):
    """Return the plan of the best layout of each way to split the model.

    The fastest layout comes first, and layouts that do not fit come last.
    """
    found = []
    for way, chapter, choices in ways_to_split(args):
        words = words_without_layout(args, chapter)
        lines = (" ".join(flags).split() for flags in itertools.product(*choices))
        layouts = (layout_of(args, chapter, words, line) for line in lines)
        best = best_of([layout for layout in layouts if layout])
        if best:
            found.append({"way": way} | best)
    return sorted(found, key=lambda layout: -(layout["speed"] or {}).get("tokens_per_second", 0))


def best_of(layouts):
    """Return the plan of the fastest layout that fits.

    If no layout fits, return the plan of the layout that needs the least GPU memory, apart from
    skipped layouts. If no layout has a plan, return None.
    """
    smallest = None
    for layout in sorted(layouts, key=lambda layout: -layout["speed"]["tokens_per_second"]):
        # Skip a layout whose weights, gradients and moments do not fit, because a plan takes a
        # second. Never skip the last layout, so that there is a plan even if no layout fits.
        if layout is not layouts[-1] and not state_fits(layout["setting"]):
            continue
        setting = layout["setting"]
        try:
            # Skip a layout that can neither fit nor need less memory than the smallest layout so
            # far, because a simulation is slow.
            lower_bound = least_bytes(setting) * (1 + setting.fragmentation)
            lower_bound += setting.gpu_overhead_gib * GIB
            if smallest and lower_bound > max(setting.gpu_memory_gib * GIB, smallest["gpu_needs"]):
                continue
            plan = layout | plan_of(setting)
        except UnsupportedModelError:
            continue
        if plan["fits"]:
            return plan
        if not smallest or plan["gpu_needs"] < smallest["gpu_needs"]:
            smallest = plan
    return smallest


def state_fits(setting):
    """Return whether the weights, gradients and moments of a rank of stage 0 fit on its GPU.

    With CPU offload, return true, because the CPU memory then holds these tensors.
    """
    state = state_bytes(stages_of(setting)[0], setting)
    return setting.cpu_offload or sum(state.values()) < setting.gpu_memory_gib * GIB
