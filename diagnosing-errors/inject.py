"""Break a training script on one rank, on purpose, without changing a line of it.

torchrun --standalone --nproc-per-node 2 diagnosing-errors/watched.py --into outputs/broken \
   diagnosing-errors/inject.py slow-compute@rank1:step20 02-ddp/train_llm.py --num-steps 500

In this example, the fault begins at the end of the 20th step that the process of rank 1 runs. You
can name several faults before the script. inject.py replaces functions of torch and of its data
loaders, so a fault never begins in a script that does not call the replaced function. Some faults
need a change in the training script itself: train_llm.py in this folder has these faults.
"""

import ctypes
import os
import re
import runpy
import signal
import sys
import time
from itertools import takewhile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

# Each fault that begins at the end of a step has a function here. end_of_step() calls this function
# with the first weight of the optimizer.
FUNCTIONS = {
    "crash": lambda _: 1 / 0,
    "segfault": lambda _: ctypes.string_at(0),
    "oom-kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "oom-device": lambda weight: torch.empty(2**50, device=weight.device),
    "file-leak": lambda _: LEAKED.extend(open(__file__) for _ in range(200)),
    "stop-process": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "slow-compute": lambda _: time.sleep(0.5),
    "memory-leak": lambda _: LEAKED.append(torch.ones(2**24)),  # 64 MiB
    "bit-flip": lambda weight: weight.view(torch.int32).view(-1)[:1].bitwise_xor_(2**20),
}
# The faults that are not in FUNCTIONS begin inside the functions that replace_functions() puts in
# place of torch's functions.
FAULTS = [*FUNCTIONS, "hang-data", "slow-data", "skip-collective", "nan-data", "nan-gradient"]
FAULTS += ["corrupt-checkpoint"]
# These faults act again in each later step or call; every other fault acts only once.
LASTING = ("memory-leak", "file-leak", "slow-compute", "slow-data")
USAGE = "usage: inject.py FAULT@rankR:stepS ... SCRIPT ARGUMENTS\n"
USAGE += f"FAULT is one of {', '.join(FAULTS)}"
# This list holds the tensors of memory-leak and the files of file-leak, so that Python does not
# free them.
LEAKED = []


class Fault:
    """Cause one fault of the command line, such as crash@rank1:step20, on its rank in its step."""

    def __init__(self, text):
        match = re.fullmatch(r"([a-z-]+)@rank(\d+):step(\d+)", text)
        if not match or match[1] not in FAULTS:
            sys.exit(f"inject.py: error: {text}: not FAULT@rankR:stepS\n{USAGE}")
        self.name, self.rank, self.step = match[1], int(match[2]), int(match[3])
        self.steps = 0
        self.has_begun = False

    def is_due(self, *names):
        """Return whether this fault is one of `names` and has to act now.

        Report on stderr when the fault acts for the first time.
        """
        rank = dist.get_rank() if dist.is_initialized() else 0
        if rank != self.rank or self.name not in names or self.steps < self.step:
            return False
        if self.has_begun:
            return self.name in LASTING
        print(f"{self.name} breaks in step {self.steps}", file=sys.stderr, flush=True)
        self.has_begun = True
        return True

    def end_of_step(self, optimizer, *_):
        """Count the step, and call the fault's function if the fault is due in this step."""
        self.steps += 1
        if self.is_due(*FUNCTIONS):
            weight = optimizer.param_groups[0]["params"][0].detach()
            # If the weight is a DTensor, pass only this rank's shard of the weight to the fault's
            # function.
            FUNCTIONS[self.name](getattr(weight, "_local_tensor", weight))

    def replace_functions(self):
        """Replace functions of torch by functions that behave wrongly while the fault is due.

        Also let torch call end_of_step() after each step of an optimizer.
        """
        backward, all_reduce = torch.autograd.backward, dist.all_reduce
        save, next_index = torch.save, _BaseDataLoaderIter._next_index

        def broken_backward(tensors, *args, **options):
            # Accept one tensor, such as a loss, or the sequence of tensors that a pipeline stage
            # passes.
            outputs = [tensors] if torch.is_tensor(tensors) else list(tensors)
            if self.is_due("nan-data"):
                outputs = [output * float("nan") for output in outputs]
            if self.is_due("nan-gradient"):
                outputs[0].register_hook(lambda gradient: gradient * float("nan"))
            return backward(outputs, *args, **options)

        def broken_all_reduce(tensor, *args, **options):
            is_blocking = not options.get("async_op")
            if tensor.numel() == 1 and is_blocking and self.is_due("skip-collective"):
                return None
            return all_reduce(tensor, *args, **options)

        def broken_save(state, file, *args, **options):
            save(state, file, *args, **options)
            if isinstance(file, (str, Path)) and self.is_due("corrupt-checkpoint"):
                os.truncate(file, os.path.getsize(file) // 2)

        # A data loader calls _next_index() each time it needs the indexes of its next batch.
        def broken_next_index(loader):
            if self.is_due("hang-data", "slow-data"):
                time.sleep(1e6 if self.name == "hang-data" else 0.5)
            return next_index(loader)

        torch.autograd.backward, dist.all_reduce = broken_backward, broken_all_reduce
        torch.save, _BaseDataLoaderIter._next_index = broken_save, broken_next_index
        register_optimizer_step_post_hook(self.end_of_step)


def main():
    """Install the faults that the command line names, and run the script."""
    faults = list(takewhile(lambda word: "@rank" in word, sys.argv[1:]))
    sys.argv = sys.argv[1 + len(faults) :]
    if not faults or not sys.argv:
        sys.exit(USAGE)
    for fault in faults:
        Fault(fault).replace_functions()
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
