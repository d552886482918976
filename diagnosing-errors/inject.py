"""Break a training script on purpose, and on one rank, without a line of it being changed.

torchrun --standalone --nproc-per-node 2 diagnosing-errors/watched.py --into outputs/broken \
    diagnosing-errors/inject.py slow-compute@rank1:step20 02-ddp/train_llm.py --num-steps 500

From the end of that step on, counted from this start, the fault is there. What it replaces are
functions of Python's, torch's and its loaders': some scripts do not use them all.
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

FAULTS = {  # at the end of the step, or, if None, where one of the functions below is called
    "crash": lambda _: 1 / 0,
    "segfault": lambda _: ctypes.string_at(0),
    "oom-kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "oom-device": lambda weight: torch.empty(2**50, device=weight.device),
    "stop-process": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "bit-flip": lambda weight: weight.view(torch.int32).view(-1)[:1].bitwise_xor_(2**20),
    "memory-leak": lambda _: KEPT.append(torch.ones(2**24)),  # 64 MiB in each step
    "file-leak": lambda _: KEPT.extend(open(__file__) for _ in range(200)),
    "slow-compute": lambda _: time.sleep(0.5),
    "slow-data": None,
    "hang-data": None,
    "skip-collective": None,
    "nan-data": None,
    "nan-gradient": None,
}
LASTING = ("memory-leak", "file-leak", "slow-compute", "slow-data")
KEPT = []


class Fault:
    """What is to break, and whether it is broken by now."""

    def __init__(self, text):
        match = re.fullmatch(r"([a-z-]+)@rank(\d+):step(\d+)", text)
        if not match or match[1] not in FAULTS:
            sys.exit(f"inject.py: error: {text}: FAULT@rankR:stepS, of {', '.join(FAULTS)}")
        self.name, self.step, self.steps = match[1], int(match[3]), 0
        self.mine, self.done = os.environ.get("RANK", "0") == match[2], False

    def now(self, *names):
        """Return whether one of these faults is due, which is so once, or from then on."""
        due = self.mine and self.name in names and self.steps >= self.step
        due = due and (not self.done or self.name in LASTING)
        if due and not self.done:
            print(f"{self.name} breaks in step {self.steps}", file=sys.stderr, flush=True)
        self.done = self.done or due
        return due

    def end_of_step(self, optimizer, *_):
        """Count it; break what is to break at once."""
        self.steps += 1
        if FAULTS[self.name] and self.now(self.name):
            weight = optimizer.param_groups[0]["params"][0].detach()
            FAULTS[self.name](getattr(weight, "_local_tensor", weight))


def main():
    """Replace functions by broken ones; run the script."""
    if len(sys.argv) < 3:
        sys.exit("usage: inject.py FAULT@rankR:stepS SCRIPT ARGUMENTS")
    fault = Fault(sys.argv[1])
    backward, all_reduce = torch.autograd.backward, dist.all_reduce

    def broken_backward(tensors, *args, **options):
        some = [tensors] if torch.is_tensor(tensors) else list(tensors)  # of a pipeline's stage
        if fault.now("nan-data"):
            some = [each * float("nan") for each in some]
        if fault.now("nan-gradient"):
            some[0].register_hook(lambda gradient: gradient * float("nan"))
        return backward(some, *args, **options)

    def broken_all_reduce(tensor, *args, **options):
        if tensor.numel() == 1 and not options.get("async_op") and fault.now("skip-collective"):
            return None
        return all_reduce(tensor, *args, **options)

    def broken(next_data):
        def broken_next_data(loader):
            if fault.now("hang-data", "slow-data"):
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
