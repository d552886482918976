"""Run functions of a benchmark on the ranks of a chapter, with small models."""

import importlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import ByT5Tokenizer, LlamaConfig

from harness import call, fast_precision, load, words_of

# A step of the 7M model trains on 8 samples of 256 tokens, and every tenth step logs a row.
BATCH, SEQ_LENGTH, WINDOW = 8, 256, 10
# These flags give the model `tiny` 7 million weights.
LLAMA_7M = """--config hidden_size=256 intermediate_size=704 num_hidden_layers=6 head_dim=64
    vocab_size=4096"""


def make_model_folder(folder, layers, width, heads=None, kv=None, vocabulary=384, tied=False):
    """Write a Llama's configuration and a tokenizer of bytes to a folder; return the folder."""
    tokenizer = ByT5Tokenizer()
    LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads or width // 64,
        num_key_value_heads=kv,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def training_flags(folder, run_name, steps):
    """Return the flags of a run that trains the 7M model and writes to `folder`/`run_name`."""
    return f"""
        {LLAMA_7M} --seq-length {SEQ_LENGTH} --precision {fast_precision()}
        --global-batch-size {BATCH} --batch-size {BATCH} --num-steps {steps} --log-every {WINDOW}
        --eval-samples {BATCH} --eval-every {steps} --checkpoint-every {steps}
        --save-dir {folder} --experiment-name {run_name}""".split()


def on_ranks(work, chapter, ranks, folder, options, **settings):
    """Run `work(chapter, args, device)` on each rank; return the result of rank 0.

    `work` receives the chapter's module, the parsed arguments and the rank's device. The parameter
    `chapter` of on_ranks() is the chapter's number, and `options` holds the chapter's flags.
    `settings` holds keyword arguments of call(): `threads` and environment variables of the ranks.
    """
    result = Path(folder, "result.json")
    _, *name = words_of(work)
    words = f"--save-dir {folder} --device cpu {options}".split()
    call([*words_of(work_on_rank), *name, chapter, result, *words], ranks, **settings)
    return json.loads(result.read_text())


def build(chapter, args, device):
    """Return a chapter's model, its wrapped model, its optimizer, and samples of random tokens.

    The wrapped model is a DistributedDataParallel in chapters with DDP; in all other chapters, it
    is the model itself.
    """
    _, config = chapter.build_tokenizer_and_config(args)
    model = chapter.build_model(args, config)
    if hasattr(chapter, "shard"):
        model = wrapped = chapter.shard(args, model, device)
    elif dist.is_initialized():
        wrapped = DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)
        wrapped.broadcast_buffers, wrapped.loss_function = False, model.loss_function
    else:
        model = wrapped = model.to(device)
    ids = torch.randint(config.vocab_size, (8, args.seq_length), dtype=torch.int32)
    samples = chapter.Samples(args.seed, ids, iter(()))
    return model, wrapped, chapter.build_optimizer(args, model), samples


def work_on_rank():
    """Call the function that on_ranks() has named in sys.argv, on this rank.

    Rank 0 writes the function's result to a file.
    """
    module, work, name, result = sys.argv[1:5]
    del sys.argv[1:5]
    chapter = load(name)
    args = chapter.parse_args()
    device, _ = chapter.setup(args)
    found = getattr(importlib.import_module(module), work)(chapter, args, device)
    if not dist.is_initialized() or dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))
