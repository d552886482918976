"""Break a training script on one rank, on purpose, without changing a line of it.

torchrun --standalone --nproc-per-node 2 diagnosing-errors/watched.py --into outputs/broken \
   diagnosing-errors/inject.py slow-compute@rank1:step20 02-ddp/train_llm.py --num-steps 500

The fault starts at the end of the 20th step that this process runs. inject.py replaces
functions of Python, of torch and of its data loaders; some scripts do not use all of them.
"""

import ctypes
import os
import re
import runpy
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

# The function of a fault runs at the end of the step, with the first weight. A fault without a
# function acts in one of the functions that main() replaces.
FAULTS = {
    "crash": lambda _: 1 / 0,
    "segfault": lambda _: ctypes.string_at(0),
    "oom-kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "oom-device": lambda weight: torch.empty(2**50, device=weight.device),
    "stop-process": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "bit-flip": lambda weight: weight.view(torch.int32).view(-1)[:1].bitwise_xor_(2**20),
    "memory-leak": lambda _: LEAKED.append(torch.ones(2**24)),  # 64 MiB
    "file-leak": lambda _: LEAKED.extend(open(__file__) for _ in range(200)),
    "slow-compute": lambda _: time.sleep(0.5),
    "slow-data": None,
    "hang-data": None,
    "skip-collective": None,
    "nan-data": None,
    "nan-gradient": None,
}
# These faults act again and again; every other fault acts once.
LASTING = ("memory-leak", "file-leak", "slow-compute", "slow-data")
# Tensors and files that the two leaks keep alive.
LEAKED = []


class Fault:
    """Hold the fault of the command line, the steps so far, and whether the fault has begun."""

    def __init__(self, text):
        match = re.fullmatch(r"([a-z-]+)@rank(\d+):step(\d+)", text)
        if not match or match[1] not in FAULTS:
            problem = f"not FAULT@rankR:stepS; FAULT is one of {', '.join(FAULTS)}"
            sys.exit(f"inject.py: error: {text}: {problem}")
        self.name, self.step, self.steps = match[1], int(match[3]), 0
        self.is_on_this_rank = os.environ.get("RANK", "0") == match[2]
        self.has_begun = False

    def is_due(self, *names):
        """Return whether one of these faults should act now; report the first time on stderr."""
        if not self.is_on_this_rank or self.name not in names or self.steps < self.step:
            return False
        if self.has_begun:
            return self.name in LASTING
        print(f"{self.name} breaks in step {self.steps}", file=sys.stderr, flush=True)
        self.has_begun = True
        return True

    def end_of_step(self, optimizer, *_):
        """Count the step, and run the function of the fault if it is due."""
        self.steps += 1
        if FAULTS[self.name] and self.is_due(self.name):
            weight = optimizer.param_groups[0]["params"][0].detach()
            # A DTensor keeps this rank's shard in _local_tensor.
            FAULTS[self.name](getattr(weight, "_local_tensor", weight))


def main():
    """Replace functions by broken versions, and run the script."""
    if len(sys.argv) < 3:
        sys.exit("usage: inject.py FAULT@rankR:stepS SCRIPT ARGUMENTS")
    fault = Fault(sys.argv[1])
    backward, all_reduce = torch.autograd.backward, dist.all_reduce

    def broken_backward(tensors, *args, **options):
        # The stage of a pipeline passes a sequence of tensors.
        outputs = [tensors] if torch.is_tensor(tensors) else list(tensors)
        if fault.is_due("nan-data"):
            outputs = [output * float("nan") for output in outputs]
        if fault.is_due("nan-gradient"):
            outputs[0].register_hook(lambda gradient: gradient * float("nan"))
        return backward(outputs, *args, **options)

    def broken_all_reduce(tensor, *args, **options):
        is_blocking = not options.get("async_op")
        if tensor.numel() == 1 and is_blocking and fault.is_due("skip-collective"):
            return None
        return all_reduce(tensor, *args, **options)

    def broken(next_data):
        def broken_next_data(loader):
            if fault.is_due("hang-data", "slow-data"):
                time.sleep(1e6 if fault.name == "hang-data" else 0.5)
            return next_data(loader)

        return broken_next_data

    torch.autograd.backward, dist.all_reduce = broken_backward, broken_all_reduce
    for loader in (_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter):
        loader._next_data = broken(loader._next_data)
    register_optimizer_step_post_hook(fault.end_of_step)
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
