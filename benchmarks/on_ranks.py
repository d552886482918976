"""Run functions of a benchmark on the ranks of a chapter, with small models."""

import importlib
import json
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.nn.parallel import DistributedDataParallel
from transformers import ByT5Tokenizer, LlamaConfig, PreTrainedTokenizerFast

from harness import fast_precision, launch_command, load, run, words_of

# A step of the 7M model trains on 8 samples of 256 tokens, and every tenth step logs a row.
BATCH, SEQ_LENGTH, WINDOW = 8, 256, 10


def make_model_folder(
    folder, layers, width, heads=None, kv=None, vocabulary=384, tied=False, tokenizer=None
):
    """Write a Llama's configuration and a tokenizer to a folder; return the folder.

    The default tokenizer makes a token of each byte.
    """
    tokenizer = tokenizer or ByT5Tokenizer()
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


def make_7m_llama(folder):
    """Write the configuration of a Llama with 7 million weights, and a tokenizer, to a folder.

    Train the tokenizer on Python's documentation. Return the folder.
    """
    end, alphabet = "<|endoftext|>", pre_tokenizers.ByteLevel.alphabet()
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    options = {"special_tokens": [end], "initial_alphabet": alphabet, "show_progress": False}
    tokens.train_from_iterator(topics.values(), trainers.BpeTrainer(vocab_size=4096, **options))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=end)
    return make_model_folder(folder, 6, 256, vocabulary=4096, tokenizer=tokenizer)


def training_flags(folder, run_name, steps):
    """Return the flags that all compared runs of the 7M model share."""
    return f"""
        --seq-length {SEQ_LENGTH} --precision {fast_precision()}
        --global-batch-size {BATCH} --batch-size {BATCH} --num-steps {steps} --log-every {WINDOW}
        --eval-samples {BATCH} --eval-every {steps} --checkpoint-every {steps}
        --save-dir {folder} --experiment-name {run_name}""".split()


def torchrun(ranks, command, folder, threads=1, **variables):
    """Run a script with its arguments on `ranks` ranks; return the CompletedProcess."""
    settings = {"OMP_NUM_THREADS": str(threads), "HF_HOME": f"{folder}/hf", "HF_HUB_OFFLINE": "1"}
    return run(launch_command(ranks, command), **settings | variables)


def on_ranks(work, chapter, ranks, model, folder, options, **settings):
    """Run `work(chapter, args, device)` on each rank; return the result of rank 0.

    `chapter` is the number of the chapter whose functions `work` calls, and `options` holds this
    chapter's flags. `settings` holds keyword arguments of torchrun(): `threads`, or environment
    variables of the ranks.
    """
    result = Path(folder, "result.json")
    result.unlink(missing_ok=True)
    options = f"--model-name {model} --save-dir {folder} --device cpu {options}"
    _, *name = words_of(work)
    command = [*words_of(work_on_rank), *name, chapter, result, *options.split()]
    done = torchrun(ranks, command, folder, **settings)
    if not result.exists():
        sys.exit(f"{done.stdout}{done.stderr}\n{work.__name__}() failed; read its output above")
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
    """Call the function that on_ranks() has named in sys.argv, on one rank.

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
