"""Measure what a rank of chapter 04 holds, for 1, 2 and 4 ranks.

Here:  python benchmarks/fsdp.py --output benchmarks/results/fsdp-cpu-2cores.json

A row has the bytes of weights, gradients, optimizer state and gathered layers on rank 0, and the
memory of its process.
"""

import ctypes
from collections import Counter
from itertools import product

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from harness import benchmark, show
from on_ranks import build, make_model_folder, on_ranks, own_memory

LAYERS, WIDTH, BATCH, SEQ_LENGTH = 16, 512, 8, 64
# The flags of each setting, which every number of ranks tries.
SETTINGS = {
    "as it is": "",
    "layers kept": "--no-reshard-after-forward",
    "2 micro-batches": "--batch-size {half}",
    "2 replicas": "--replicas 2",
    "2 replicas, 2 micro-batches": "--replicas 2 --batch-size {half}",
}


def bytes_of(tensors):
    """Return the number of bytes of these tensors that lie on this rank."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def allocated_memory():
    """Return the number of bytes that this process fills, after it gave back free memory."""
    ctypes.CDLL(None).malloc_trim(0)
    return own_memory()


def measure(chapter, args, device):
    """Take three steps on random tokens; return the highest costs on this rank."""
    before = allocated_memory()
    model, _, optimizer, samples = build(chapter, args, device)
    found = Counter(gathered=0)

    def note(name, value):
        found[name] = max(found[name], value)

    def look_at_gathered(*_):
        weights = [weight for weight in model.parameters() if not isinstance(weight, DTensor)]
        note("gathered", bytes_of(weights))

    def look_at_process(*_):
        note("process between micro-batches", allocated_memory() - before)

    def look_at_shards(*_):
        note("weights", bytes_of(model.parameters()))
        note("gradients", bytes_of(weight.grad for weight in model.parameters()))

    def look_at_state(*_):
        states = (optimizer.state[weight].values() for weight in model.parameters())
        note("optimizer", bytes_of(tensor for state in states for tensor in state))
        found["process at the step"] = allocated_memory() - before

    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.register_forward_pre_hook(look_at_gathered)
            part.register_full_backward_hook(look_at_gathered)
    model.register_forward_pre_hook(look_at_process)
    optimizer.register_step_pre_hook(look_at_shards)
    optimizer.register_step_post_hook(look_at_state)
    for step in (1, 2, 3):
        chapter.train_step(args, model, optimizer, samples, step, device)
    return found


def costs(_, folder):
    """Measure with each number of ranks in each setting."""
    model, rows = make_model_folder(folder / "model", LAYERS, WIDTH), []
    for ranks, (name, options) in product((1, 2, 4), SETTINGS.items()):
        if "--replicas 2" in options and ranks < 4:
            continue
        flags = f"--seq-length {SEQ_LENGTH} --global-batch-size {BATCH} "
        flags += options.format(half=BATCH // ranks // 2)
        found = on_ranks(measure, "04", ranks, model, folder, flags)
        rows.append({"ranks": ranks, "setting": name} | found)
        show(rows[-1])
        yield {"costs": rows}


if __name__ == "__main__":
    benchmark(__doc__, costs)
