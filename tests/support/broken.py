"""Runs a chapter with a loss or a gradient that is not finite: `broken.py WHAT STEP SCRIPT ARGS`.

The last rank has it, in one step.
"""

import importlib.util
import math
import sys

import torch.distributed as dist


def load(script):
    """Return a chapter's script as a module."""
    spec = importlib.util.spec_from_file_location("broken_chapter", script)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    chapter = load(script)
    break_chapter(chapter, what, int(when))
    chapter.main()


if __name__ == "__main__":
    main()
