"""Count the collectives of a tensor-parallel group in a training step of chapter 06.

test_tensor.py starts this once per rank. The arguments are a JSON file with cases, which are
arguments of the chapter, and a file for the counts of rank 0. For each case, collective and number
of bytes, the counts hold the number of calls. The number of bytes is the size of the full tensor.
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
    """Counts the collectives of DTensor; FSDP's own collectives have different names."""

    def __init__(self):
        super().__init__()
        self.counts = defaultdict(Counter)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            # DTensor then calls this function again with the tensors of this rank.
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        library, _, name = func.name().partition("::")
        if library == "_c10d_functional" and name != "wait_tensor":
            # Either the input or the output is the full tensor.
            num_bytes = max(args[0].nbytes, out.nbytes)
            self.counts[name][num_bytes] += 1
        return out


def main():
    """Take two steps of each case, and count the collectives of the second step."""
    cases, result = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("chapter_06", SCRIPT)
    chapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chapter)
    counts = {}
    for name, arguments in json.loads(Path(cases).read_text()).items():
        sys.argv = ["train_llm.py", *arguments]
        args = chapter.parse_args()
        if not dist.is_initialized():
            device, _ = chapter.setup(args)
        _, config = chapter.build_tokenizer_and_config(args)
        model = chapter.shard(args, chapter.build_model(args, config), device)
        optimizer = chapter.build_optimizer(args, model)
        ids = torch.randint(config.vocab_size, (args.global_batch_size, args.seq_length))
        samples = chapter.Samples(ids)
        chapter.train_step(args, model, optimizer, samples, 1, device)
        with Traffic() as traffic:
            chapter.train_step(args, model, optimizer, samples, 2, device)
        counts[name] = traffic.counts
    if os.environ["RANK"] == "0":
        Path(result).write_text(json.dumps(counts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
