"""Compare the initial weights and buffers of a chapter, on any number of ranks, with chapter 01.

runs.call_on_ranks() starts this once per rank, with these arguments:

- a JSON file with cases; each case has a name, and arguments for both chapters
- a file for the results
- the number of the chapter
- arguments that only this chapter has

torch fills new memory with NaN here, so that a value that is never set differs from chapter 01's.
"""

import json
import os
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, ByT5Tokenizer

ROOT = Path(__file__).resolve().parents[2]


def load(chapter):
    """Import a chapter's script, changed to export models to files of 100 KB instead of 5 GB."""
    script = next(ROOT.glob(f"{chapter}-*/train_llm.py"))
    module = types.ModuleType(f"chapter_{chapter}")
    module.__file__ = str(script)
    source = script.read_text().replace("5_000_000_000", "100_000")
    exec(compile(source, script, "exec"), module.__dict__)
    return module


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


def main():
    """Build the model of each case in both chapters; rank 0 writes the names that differ."""
    cases, result, chapter_name, *chapter_arguments = sys.argv[1:]
    chapter_01, chapter = load("01"), load(chapter_name)
    differences = {}
    for name, arguments in json.loads(Path(cases).read_text()).items():
        sys.argv = ["train_llm.py", *arguments, *chapter_arguments]
        args = chapter.parse_args()
        if not dist.is_initialized():
            chapter.setup(args)
        # In this mode, torch fills new memory with NaN.
        torch.use_deterministic_algorithms(True)
        _, config = chapter.build_tokenizer_and_config(args)
        model = chapter.shard(args, chapter.build_model(args, config), torch.device("cpu"))
        tensors = full_tensors(model)
        torch.use_deterministic_algorithms(False)
        reference = full_tensors(chapter_01.build_model(args, config))
        differences[name] = differing_names_on_ranks(reference, tensors)
        if args.pretrained:
            exported = export_and_load(chapter, args, model)
            differences[f"{name}, exported"] = differing_names(reference, exported)
    if os.environ["RANK"] == "0":
        Path(result).write_text(json.dumps(differences))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
