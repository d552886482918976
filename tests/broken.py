"""Runs a chapter with something broken on one rank: `broken.py WHAT STEP SCRIPT ARGUMENTS`.

The chapters have no faults to inject but for diagnosing-errors; this patches their functions.
"""

import importlib.util
import math
import sys

import torch
import torch.distributed as dist


def load(script):
    """Return a chapter's script as a module."""
    spec = importlib.util.spec_from_file_location("broken_chapter", script)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shift(weight):
    """Flip a bit of what this rank has of a weight."""
    own = weight.to_local() if hasattr(weight, "to_local") else weight
    own.data.view(torch.int32).view(-1)[0] ^= 2**18


def break_chapter(chapter, what, when):
    """Have the last rank do something wrong in a step."""
    train_step, loss_of = chapter.train_step, chapter.loss_of
    now = {}

    def is_now():
        last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        return last and now.get("step") == when

    def broken_step(args, model, optimizer, batches, step, device):
        now["step"] = step
        done = train_step(args, model, optimizer, batches, step, device)
        if what == "weights" and is_now():
            shift(next(model.parameters()))
        return done

    def broken_loss(args, model, batch):
        loss = loss_of(args, model, batch)
        if what == "loss" and is_now() and loss.requires_grad:
            return loss * math.nan
        if what == "gradient" and is_now() and loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss

    chapter.train_step, chapter.loss_of = broken_step, broken_loss


def main():
    """Run it."""
    what, when, script, *sys.argv[1:] = sys.argv[1:]
    sys.argv[0] = script
    chapter = load(script)
    break_chapter(chapter, what, int(when))
    chapter.main()
    if dist.is_initialized():
        chapter.all_ranks(True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
