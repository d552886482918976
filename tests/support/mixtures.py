"""Train small mixtures of many families in chapter 09, with and without splitting the experts.

runs.call_on_ranks() starts this script once per rank, with these arguments:

- a JSON file with the arguments of each family by the family's name
- a file for the results of rank 0
- the script of the chapter
- flags that split the experts
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from recorded import load


class RefusedError(Exception):
    """The chapter has refused a model."""


def refuse(message):
    """Raise the error that the chapter would report."""
    raise RefusedError(message)


def train(chapter, words):
    """Return the loss and the gradient norm of each of three steps, or the reason of a refusal."""
    sys.argv = ["train_llm.py", *words]
    device, steps = torch.device("cpu"), []
    try:
        args = chapter.parse_args()
        if not dist.is_initialized():
            chapter.setup(args)
        _, config = chapter.build_tokenizer_and_config(args)
        model = chapter.shard(args, chapter.build_model(args, config), device)
        chapter.check_forward(args, model, device)
        optimizer = chapter.build_optimizer(args, model)
    except RefusedError as reason:
        return str(reason)
    torch.manual_seed(0)
    ids = torch.randint(3, 200, (32, args.seq_length))
    for step in (1, 2, 3):
        samples = chapter.Samples(ids)
        loss, norm = chapter.train_step(args, model, optimizer, samples, step, device)
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        steps.append([loss.item(), norm.item()])
    return steps


def main():
    """Train each family twice; rank 0 writes both results by the family's name."""
    cases, result, script, *flags = sys.argv[1:]
    chapter, results = load(script), {}
    chapter.fail = refuse
    for family, words in json.loads(Path(cases).read_text()).items():
        results[family] = [train(chapter, words), train(chapter, [*words, *flags])]
    if os.environ["RANK"] == "0":
        Path(result).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
