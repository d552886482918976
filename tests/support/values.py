"""Compare the initial weights and buffers of a chapter, on any number of ranks, with chapter 01.

cases.py describes the arguments. torch fills new memory with NaN here, so that a value that is
never set differs from chapter 01's.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, ByT5Tokenizer

from cases import load, run_cases

CHAPTER_01 = load("01")


def full_tensors(model):
    """Return the full parameters and buffers that this rank has a part of, by name."""
    tensors = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            continue
        full_tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        tensors[name] = full_tensor.detach().clone()
    return tensors


def differing_names(tensors, other_tensors):
    """Return the names of tensors that differ in a bit, or are NaN, or are missing on one side."""
    names = []
    for name in tensors.keys() | other_tensors.keys():
        tensor, other = tensors.get(name), other_tensors.get(name)
        if tensor is None or other is None or not torch.equal(tensor, other):
            names.append(name)
    return names


def differing_names_on_ranks(reference, tensors):
    """Return the names of tensors that differ from `reference` on a rank, or that no rank has."""
    expected = {name: tensor for name, tensor in reference.items() if name in tensors}
    results = [None] * dist.get_world_size()
    dist.all_gather_object(results, ([*tensors], differing_names(expected, tensors)))
    missing = set(reference)
    names = []
    for names_on_rank, differing_on_rank in results:
        missing -= set(names_on_rank)
        names += differing_on_rank
    return [*missing, *names]


def export_and_load(chapter, args, model):
    """Export the sharded model to several files; return the tensors of the loaded export."""
    run_dir = Path(args.save_dir, Path(args.model_name).name)
    chapter.export_model(args, run_dir, model, ByT5Tokenizer())
    # Wait until rank 0 has written the files.
    dist.barrier()
    assert len(list(run_dir.glob("model/*.safetensors"))) > 2
    return full_tensors(AutoModelForCausalLM.from_pretrained(run_dir / "model"))


def compare(chapter, args):
    """Return the names of initial weights, and of exported weights, that differ from chapter 01."""
    # In this mode, torch fills new memory with NaN.
    torch.use_deterministic_algorithms(True)
    _, config = chapter.build_tokenizer_and_config(args)
    model = chapter.shard(args, chapter.build_model(args, config), torch.device("cpu"))
    tensors = full_tensors(model)
    torch.use_deterministic_algorithms(False)
    reference = full_tensors(CHAPTER_01.build_model(args, config))
    differing = {"initial": differing_names_on_ranks(reference, tensors)}
    if args.pretrained:
        exported = export_and_load(chapter, args, model)
        differing["exported"] = differing_names(reference, exported)
    return differing


if __name__ == "__main__":
    run_cases(compare)
