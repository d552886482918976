"""Measure what a rank of chapter 04 holds and sends, for 1, 2 and 4 ranks.

Here:    python benchmarks/fsdp.py --output benchmarks/results/fsdp-cpu-2cores.json
Closer:  python benchmarks/fsdp.py --layers 8 --ranks 2

A row has the bytes of weights, gradients, optimizer state and gathered layers on rank 0, the memory
of its process, and the collectives of a step.
"""

import ctypes
import tempfile
from collections import Counter

import psutil
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness import describe_machine, keep, parser_of
from on_ranks import build, make_model_folder, on_ranks

BATCH, SEQ_LENGTH = 8, 64
# The flags of each setting, which every number of ranks tries.
SETTINGS = {
    "as it is": "",
    "layers kept": "--no-reshard-after-forward",
    "2 micro-batches": "--batch-size {half}",
    "2 replicas": "--replicas 2",
    "2 replicas, 2 micro-batches": "--replicas 2 --batch-size {half}",
}
COLLECTIVES = {
    "c10d::_allgather_base_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
    "c10d::allreduce_": "all-reduce",
}


class Collectives(TorchDispatchMode):
    """Counts the collectives on tensors with several numbers, and the bytes of the full tensors."""

    def __init__(self):
        super().__init__()
        self.counts, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in COLLECTIVES:
            name = COLLECTIVES[func.name()]
            tensors = args[:2] if name != "all-reduce" else args[0]
            size = max(tensor.numel() * tensor.element_size() for tensor in tensors)
            # Ranks also agree on single numbers.
            if size > 8:
                self.counts[name] += 1
                self.bytes[name] += size
        return func(*args, **(kwargs or {}))


def bytes_of(tensors):
    """Return the number of bytes of these tensors that lie on this rank."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def own_memory():
    """Return the number of bytes that only this process uses, after it gave back free memory."""
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_full_info().uss


def measure(chapter, args, device):
    """Take three steps on random tokens; return the costs of the third, on this rank."""
    before = own_memory()
    model, _, optimizer, samples = build(chapter, args, device)
    found = Counter(gathered=0)

    def note(name, value):
        found[name] = max(found[name], value)

    def look_at_gathered(*_):
        weights = [weight for weight in model.parameters() if not isinstance(weight, DTensor)]
        note("gathered", bytes_of(weights))

    def look_at_process(*_):
        note("process between micro-batches", own_memory() - before)

    def look_at_shards(*_):
        note("weights", bytes_of(model.parameters()))
        note("gradients", bytes_of(weight.grad for weight in model.parameters()))

    def look_at_state(*_):
        states = (optimizer.state[weight].values() for weight in model.parameters())
        note("optimizer", bytes_of(tensor for state in states for tensor in state))
        found["process at the step"] = own_memory() - before

    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.register_forward_pre_hook(look_at_gathered)
            part.register_full_backward_hook(look_at_gathered)
    model.register_forward_pre_hook(look_at_process)
    optimizer.register_step_pre_hook(look_at_shards)
    optimizer.register_step_post_hook(look_at_state)
    for step in (1, 2):
        chapter.train_step(args, model, optimizer, samples, step, device)
    with Collectives() as seen:
        chapter.train_step(args, model, optimizer, samples, 3, device)
    found["model"] = sum(weight.numel() for weight in model.parameters()) * 4
    counts = {name: [seen.counts[name], seen.bytes[name]] for name in seen.counts}
    return {**found, "collectives": counts}


def costs(args, folder):
    """Return a row of costs for each number of ranks and each setting."""
    model = make_model_folder(f"{folder}/model", args.layers, args.width)
    rows = []
    for ranks in args.ranks:
        for name, options in SETTINGS.items():
            if "--replicas 2" in options and ranks < 4:
                continue
            flags = f"--seq-length {SEQ_LENGTH} --global-batch-size {BATCH} "
            flags += options.format(half=BATCH // ranks // 2)
            found = on_ranks(measure, "04", ranks, model, folder, flags)
            print(ranks, name, found, flush=True)
            rows.append({"ranks": ranks, "setting": name, "layers": args.layers} | found)
    return rows


def main():
    """Measure the costs, and keep them."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--layers", type=int, default=16, help="of the model")
    add("--width", type=int, default=512, help="of the model")
    add("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keep(args.output, describe_machine(), {"costs": costs(args, folder)})


if __name__ == "__main__":
    main()
