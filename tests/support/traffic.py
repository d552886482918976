"""Count what ranks of a tensor-parallel group send one another in a training step of chapter 06.

Started once per rank by test_tensor.py, with a JSON file of cases, which are arguments of the
chapter, and the file into which rank 0 writes by case and kind of collective how often it sent how
many bytes; they are those of the whole tensor.
"""

import importlib.util
import json
import os
import sys
from collections import Counter, defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

SCRIPT = next(Path(__file__).resolve().parents[2].glob("06-*/train_llm.py"))


class Traffic(TorchDispatchMode):
    """Counts the collectives of DTensor; FSDP's own operations have other names."""

    def __init__(self):
        super().__init__()
        self.seen = defaultdict(Counter)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # it comes again, with this rank's tensors
        out = func(*args, **(kwargs or {}))
        library, _, name = func.name().partition("::")
        if library == "_c10d_functional" and name != "wait_tensor":
            whole = max(tensor.numel() * tensor.element_size() for tensor in (args[0], out))
            self.seen[name][whole] += 1
        return out


def main():
    """Take a step of each case, and another one that is counted."""
    cases, result = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("chapter_06", SCRIPT)
    chapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chapter)
    found = {}
    for name, given in json.loads(Path(cases).read_text()).items():
        sys.argv = ["train_llm.py", *given]
        args = chapter.parse_args()
        if not dist.is_initialized():
            device, _ = chapter.setup(args)
        _, config = chapter.build_tokenizer_and_config(args)
        model = chapter.shard(args, chapter.build_model(args, config), device)
        optimizer = chapter.build_optimizer(args, model)
        samples = torch.randint(config.vocab_size, (args.global_batch_size, args.seq_length))
        chapter.train_step(args, model, optimizer, samples, 1, device)
        with Traffic() as traffic:
            chapter.train_step(args, model, optimizer, samples, 2, device)
        found[name] = traffic.seen
    if os.environ["RANK"] == "0":
        Path(result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
