"""What fsdp.py, large.py and planner.py share: small models, and functions that ranks run."""

import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist
from transformers import ByT5Tokenizer, LlamaConfig

from contenders import load
from speed import keep


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


def torchrun(ranks, command, folder, limit=None):
    """Run a command on so many ranks, each with at most `limit` bytes of data; return how it went.

    Both cores of a small machine are enough for all: what is measured is no speed.
    """
    prefix = ["prlimit", f"--data={limit}"] if limit else []
    prefix += [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    settings = {"OMP_NUM_THREADS": "1", "HF_HOME": f"{folder}/hf", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [*prefix, f"--nproc-per-node={ranks}", *map(str, command)],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | settings,
    )


def measure_all(measures, args, machine):
    """Measure what was asked for, each in a folder of its own; keep it."""
    for what in args.what:
        with tempfile.TemporaryDirectory() as folder:
            keep(args.output, machine, {what: measures[what](args, folder)})


def on_ranks(work, chapter, ranks, model, folder, options):
    """Return what `work(chapter, args, device)` finds on rank 0, with a chapter and its options."""
    result = Path(folder, "result.json")
    result.unlink(missing_ok=True)
    command = [__file__, Path(inspect.getfile(work)).stem, work.__name__, chapter, result]
    command += ["--model-name", model, "--save-dir", folder, "--device", "cpu", *options.split()]
    done = torchrun(ranks, command, folder)
    if not result.exists():
        sys.exit(f"{done.stdout}{done.stderr}\nno result of {work.__name__}, chapter {chapter}")
    return json.loads(result.read_text())


def main():
    """Work as a rank that `on_ranks` started; rank 0 writes down what it found."""
    module, work, name, result = sys.argv[1:5]
    del sys.argv[1:5]
    chapter = load(name)
    args = chapter.parse_args()
    device, _ = chapter.setup(args)
    found = getattr(importlib.import_module(module), work)(chapter, args, device)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
