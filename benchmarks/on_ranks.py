"""Run functions of a benchmark on the ranks of a chapter, with small models."""

import importlib
import inspect
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import ByT5Tokenizer, LlamaConfig

from harness import load, run, torchrun_command


def make_model_folder(folder, layers, width, heads=None, kv=None, vocabulary=384, tied=False):
    """Write the configuration of a Llama, and a tokenizer of bytes; return the folder."""
    tokenizer = ByT5Tokenizer()
    LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads or width // 64,
        num_key_value_heads=kv,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def torchrun(ranks, command, folder, threads=1):
    """Run a script and its arguments on a number of ranks; return the CompletedProcess."""
    settings = {"OMP_NUM_THREADS": str(threads), "HF_HOME": f"{folder}/hf", "HF_HUB_OFFLINE": "1"}
    return run(torchrun_command(ranks, command), **settings)


def work_command(work, chapter, result, options):
    """Return the script and the arguments that run `work(chapter, args, device)` on a rank."""
    function = [Path(inspect.getfile(work)).stem, work.__name__]
    return [Path(__file__).resolve(), *function, chapter, result, *options.split()]


def on_ranks(work, chapter, ranks, model, folder, options, **settings):
    """Return the result of `work(chapter, args, device)` on rank 0, with a chapter's options."""
    result = Path(folder, "result.json")
    result.unlink(missing_ok=True)
    options = f"--model-name {model} --save-dir {folder} --device cpu {options}"
    done = torchrun(ranks, work_command(work, chapter, result, options), folder, **settings)
    if not result.exists():
        sys.exit(f"{done.stdout}{done.stderr}\nno result of {work.__name__}, chapter {chapter}")
    return json.loads(result.read_text())


def build(chapter, args, device):
    """Build the model, the module that trains it, the optimizer and random samples."""
    _, config = chapter.build_tokenizer_and_config(args)
    model = chapter.build_model(args, config)
    if hasattr(chapter, "shard"):
        model = wrapped = chapter.shard(args, model, device)
    elif dist.is_initialized():
        wrapped = DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)
        wrapped.broadcast_buffers = False
    else:
        model = wrapped = model.to(device)
    ids = torch.randint(config.vocab_size, (8, args.seq_length), dtype=torch.int32)
    return model, wrapped, chapter.build_optimizer(args, model), chapter.Samples(ids)


def main():
    """Work as a rank that `on_ranks` started; rank 0 writes the result."""
    module, work, name, result = sys.argv[1:5]
    del sys.argv[1:5]
    chapter = load(name)
    args = chapter.parse_args()
    device, _ = chapter.setup(args)
    found = getattr(importlib.import_module(module), work)(chapter, args, device)
    in_group = dist.is_initialized()
    if not in_group or dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))
    if in_group:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
