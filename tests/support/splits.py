"""Train small models of many families in a chapter, with and without splitting the models.

runs.call_on_ranks() starts this script once per rank, with these arguments:

- a JSON file with the arguments of each family by the family's name
- a file for the results of rank 0
- the script of the chapter
- flags that split the models
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from recorded import load


def train(chapter, words):
    """Train three steps; return each step's loss and gradient norm, and the gradients of step 1.

    If the chapter refuses the model, or torch cannot compute a batch, return the reason and no
    gradients.
    """
    sys.argv = ["train_llm.py", *words]
    device, steps, gradients = torch.device("cpu"), [], {}
    clip = chapter.clip_gradients

    def keep_and_clip(args, model):
        gradients.setdefault("first", gradients_of(model))
        return clip(args, model)

    try:
        args = chapter.parse_args()
        if not dist.is_initialized():
            chapter.setup(args)
        _, config = chapter.build_tokenizer_and_config(args)
        model = chapter.shard(args, chapter.build_model(args, config), device)
        optimizer = chapter.build_optimizer(args, model)
        chapter.check_causal(args, model, device)
        torch.manual_seed(0)
        ids = torch.randint(3, 200, (32, args.seq_length))
        chapter.clip_gradients = keep_and_clip
        for step in (1, 2, 3):
            samples = chapter.Samples(args.seed, ids, iter(()))
            loss, norm = chapter.train_step(args, model, optimizer, samples, step, device)
            dist.all_reduce(loss, dist.ReduceOp.AVG)
            steps.append([loss.item(), norm.item()])
    except SystemExit as reason:
        return str(reason), {}
    except RuntimeError as error:
        return f"RuntimeError: {error}", {}
    finally:
        chapter.clip_gradients = clip
    return steps, gradients["first"]


def gradients_of(model):
    """Return the full gradient of each weight by the weight's name."""
    grads = {name: weight.grad for name, weight in model.named_parameters()}
    return {
        name: (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
        for name, grad in grads.items()
        if grad is not None
    }


def differences(gradients, split_gradients):
    """Compare each weight's gradients in the unsplit model and in the split model.

    Return, by weight, the norm of the difference, divided by the norm in the unsplit model.
    """
    assert gradients.keys() == split_gradients.keys()
    norms = {name: gradient.norm() for name, gradient in gradients.items()}
    # Divide by at least this norm, because some gradients are zero except for rounding errors.
    smallest_norm = 1e-6 * max(norms.values())
    return {
        name: ((split_gradients[name] - gradient).norm() / max(norms[name], smallest_norm)).item()
        for name, gradient in gradients.items()
    }


def main():
    """Train a model of each family with and without splitting it; let rank 0 write the results.

    The results are the losses, the gradient norms, and the differences between the gradients. If
    the split model of a family cannot train, rank 0 writes the reason instead.
    """
    cases, result, script, *flags = sys.argv[1:]
    chapter, results = load(script), {}
    # If the chapter refuses a family, raise SystemExit with the message.
    chapter.fail = sys.exit
    for family, words in json.loads(Path(cases).read_text()).items():
        split_steps, split_gradients = train(chapter, [*words, *flags])
        if not split_gradients:
            results[family] = split_steps
            continue
        steps, gradients = train(chapter, words)
        apart = differences(gradients, split_gradients)
        results[family] = [steps, split_steps, apart]
    if os.environ["RANK"] == "0":
        Path(result).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
