"""Measure what a rank of a chapter sends in a training step, and how much memory its tensors use.

runs.call_on_ranks() starts this script once per rank, with these arguments:

- a JSON file with cases; each case has a name, and arguments of the chapter
- a file for the results of rank 0
- the script of the chapter
- arguments that all cases have
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from recorded import load

COLLECTIVES = {
    "c10d::_allgather_base_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
    "c10d::allreduce_": "all-reduce",
}


class Traffic(TorchDispatchMode):
    """Counts the collectives of each kind, and the bytes of their full tensors."""

    def __init__(self):
        super().__init__()
        self.counts = defaultdict(lambda: [0, 0])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        kind = COLLECTIVES.get(func.name())
        if kind:
            tensors = args[0] if kind == "all-reduce" else [*args[:2], result]
            tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
            # Either the input or the output is the full tensor.
            num_bytes = max(tensor.nbytes for tensor in tensors)
            # The ranks also exchange single numbers, such as gradient norms.
            if num_bytes > 8:
                self.counts[kind][0] += 1
                self.counts[kind][1] += num_bytes
        return result


def bytes_of(tensors):
    """Return the number of bytes that the tensors have on this rank."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.nbytes for tensor in local if not tensor.is_meta)


def measure(chapter, args):
    """Train for two steps, and return the costs of the second step."""
    device = torch.device("cpu")
    _, config = chapter.build_tokenizer_and_config(args)
    model = chapter.shard(args, chapter.build_model(args, config), device)
    optimizer = chapter.build_optimizer(args, model)
    costs = {"gathered": 0}

    def measure_gathered(*_):
        gathered = [weight for weight in model.parameters() if not isinstance(weight, DTensor)]
        costs["gathered"] = max(costs["gathered"], bytes_of(gathered))

    def measure_shards(*_):
        weights = [weight for weight in model.parameters() if weight.grad is not None]
        costs["weights"] = bytes_of(weights)
        costs["gradients"] = bytes_of(weight.grad for weight in weights)

    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.register_forward_pre_hook(measure_gathered)
            part.register_full_backward_hook(measure_gathered)
    optimizer.register_step_pre_hook(measure_shards)
    ids = torch.randint(config.vocab_size, (args.global_batch_size, args.seq_length))
    samples = chapter.Samples(ids)
    chapter.train_step(args, model, optimizer, samples, 1, device)
    with Traffic() as sent:
        chapter.train_step(args, model, optimizer, samples, 2, device)
    states = [moment for state in optimizer.state.values() for moment in state.values()]
    return costs | {"optimizer": bytes_of(states), "sent": sent.counts}


def main():
    """Measure each case; rank 0 writes the results by name."""
    cases, result, script, *common = sys.argv[1:]
    chapter, results = load(script), {}
    for name, arguments in json.loads(Path(cases).read_text()).items():
        sys.argv = [script, *arguments, *common]
        args = chapter.parse_args()
        if not dist.is_initialized():
            chapter.setup(args)
        results[name] = measure(chapter, args)
    if os.environ["RANK"] == "0":
        Path(result).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
