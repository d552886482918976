"""Runs a chapter with a loss or a gradient that is not finite: `broken.py WHAT STEP SCRIPT ARGS`.

The last rank has it, in one step.
"""

import importlib
import math
import sys
from pathlib import Path

import torch.distributed as dist


def break_chapter(chapter, what, when):
    """Patch the functions of a step."""
    train_step, loss_of = chapter.train_step, chapter.loss_of
    now = {}

    def noted_step(args, model, optimizer, train_set, step, device):
        now["step"] = step
        return train_step(args, model, optimizer, train_set, step, device)

    def broken_loss(args, model, batch):
        loss = loss_of(args, model, batch)
        last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        if last and now.get("step") == when and loss.requires_grad:
            if what == "loss":
                return loss * math.nan
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss

    chapter.train_step, chapter.loss_of = noted_step, broken_loss


def main():
    """Run it."""
    what, when, script, *sys.argv[1:] = sys.argv[1:]
    sys.argv[0] = script
    sys.path[0] = str(Path(script).parent)
    chapter = importlib.import_module("train_llm")
    break_chapter(chapter, what, int(when))
    chapter.main()


if __name__ == "__main__":
    main()
