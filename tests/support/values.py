"""Compare the weights and buffers that a chapter starts with, on any ranks, with chapter 01's.

Started once per rank by test_large.py, test_tensor.py and test_pipeline.py, with a JSON file of
cases, which are the arguments of both chapters, the chapter, and arguments that 01 has not.
What torch has not filled is NaN here, so whatever is forgotten shows.
"""

import json
import os
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, ByT5Tokenizer

ROOT = Path(__file__).resolve().parents[2]


def load(chapter):
    """Import a chapter's script, which exports models to files of 20 KB instead of 5 GB."""
    script = next(ROOT.glob(f"{chapter}-*/train_llm.py"))
    module = types.ModuleType(f"chapter_{chapter}")
    module.__file__ = str(script)
    source = script.read_text().replace("5_000_000_000", "20_000")
    exec(compile(source, script, "exec"), module.__dict__)
    return module


def named(model):
    """Return the parameters and buffers that this rank has a part of, by name, whole."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    tensors = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
    return {
        name: getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)().detach().clone()
        for name, tensor in tensors.items()
    }


def different(one, other):
    """Return the names of what is not the same, bit for bit; NaN is never the same."""
    return [name for name in one.keys() | other.keys() if not same(one.get(name), other.get(name))]


def on_any_rank(whole, split):
    """Return the names of what is not the same on the ranks that have it, or is on none of them."""
    found = [None] * dist.get_world_size()
    mine = {name: tensor for name, tensor in whole.items() if name in split}
    dist.all_gather_object(found, ([*split], different(mine, split)))
    somewhere = {name for names, _ in found for name in names}
    return [*whole.keys() - somewhere, *(name for _, names in found for name in names)]


def same(one, other):
    return one is not None and other is not None and torch.equal(one, other)


def exported(chapter, args, model):
    """Return what a model of many files, made of the shards, has after it is loaded again."""
    run_dir = Path(args.save_dir, Path(args.model_name).name)
    chapter.export_model(args, run_dir, model, ByT5Tokenizer())
    dist.barrier()  # until rank 0 has made the files
    assert len(list(run_dir.glob("model/*.safetensors"))) > 2
    return named(AutoModelForCausalLM.from_pretrained(run_dir / "model"))


def main():
    """Build each case's model both ways; rank 0 writes down what differs."""
    cases, result, chapter, *more = sys.argv[1:]
    first, last = load("01"), load(chapter)
    differing = {}
    for name, given in json.loads(Path(cases).read_text()).items():
        sys.argv = ["train_llm.py", *given, *more]
        args = last.parse_args()
        if not dist.is_initialized():
            last.setup(args)
        torch.use_deterministic_algorithms(True)
        _, config = last.build_tokenizer_and_config(args)
        model = last.shard(args, last.build_model(args, config), torch.device("cpu"))
        split = named(model)
        torch.use_deterministic_algorithms(False)
        whole = named(first.build_model(args, config))
        differing[name] = on_any_rank(whole, split)
        if args.pretrained:
            differing[f"{name}, exported"] = different(whole, exported(last, args, model))
    if os.environ["RANK"] == "0":
        Path(result).write_text(json.dumps(differing))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
