"""Compute the loss and the perplexity of a model, or of a run's checkpoint, on any text.

Here:  python tools/evaluate.py outputs/01-single-gpu/model
       python tools/evaluate.py outputs/04-fsdp/checkpoints/step-00000050 --held-out
       python tools/evaluate.py outputs/04-fsdp/model -d my.tokens -s 2048 --stride 1024

--dataset-name accepts the same texts as in chapter 01: pydoc, a dataset of the hub, or a folder of
pieces that preparing-data/prepare.py has written for the model's tokenizer. The tool cuts the
tokens into windows of --seq-length tokens, and a window begins every --stride tokens. If the stride
is shorter than a window, windows overlap: a window counts only the tokens after the end of the
previous window, and the overlap is context for these tokens. By default, windows do not overlap,
and the first token of each window does not count, because it has no context.
"""

import argparse
import contextlib
import math
import sys
import tempfile
from pathlib import Path
from unittest import mock

import datasets
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from export import chapter, write_model
from plot import fail


def parse_args():
    """Return the parsed command line; chapter 01 parses and checks the flags that it defines."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="These flags of chapter 01 are accepted, too: -d, --dataset-subset, --text-column, "
        "-s, -b, --device, --precision, --eval-samples.",
        allow_abbrev=False,
    )
    parser.error = fail
    add = parser.add_argument
    add("model", type=Path, help="a folder such as RUN/model or RUN/checkpoints/step-00000050")
    add("--stride", type=int, help="tokens between the starts of windows (default: --seq-length)")
    held_out_help = "use only the samples that a run with the same flags holds out"
    add("--held-out", action="store_true", help=held_out_help)
    all_gpus_help = "spread the layers over all GPUs of this machine; needs accelerate"
    add("--all-gpus", action="store_true", help=all_gpus_help)
    own, words = parser.parse_known_args()
    with mock.patch.object(sys, "argv", [sys.argv[0], *words]):
        args = chapter.parse_args()
    args = argparse.Namespace(**vars(args) | vars(own))
    args.stride = args.stride or args.seq_length
    if not 1 <= args.stride <= args.seq_length:
        problem = f"must be from 1 to --seq-length {args.seq_length}, so that windows leave no gap"
        fail(f"--stride {args.stride}: {problem}")
    if not args.model.is_dir():
        fail(f"{args.model}: no such folder; give RUN/model, or a folder in RUN/checkpoints")
    return args


# ---- the model -------------------------------------------------------------------------------
@contextlib.contextmanager
def model_folder(path):
    """Yield a folder that transformers can load: `path` itself, or the model of a checkpoint.

    If `path` is a checkpoint, convert it to a model in a temporary folder, which exists until the
    context ends.
    """
    if (path / "config.json").exists():
        yield path
        return
    # Write the model beside the checkpoint, because a disk for checkpoints has room for weights,
    # but the disk of /tmp may be too small.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".evaluate-") as folder:
        model = Path(folder, "model")
        write_model(path, model)
        yield model


def load_model(args, folder):
    """Load the model in `folder` onto --device or, with --all-gpus, spread it over all GPUs.

    The weights are in bf16 with --precision bf16, and otherwise in float32.
    """
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    options = {"device_map": "auto"} if args.all_gpus else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    return model.eval() if args.all_gpus else model.eval().to(args.device)


# ---- the text --------------------------------------------------------------------------------
def tokens_of(args, tokenizer):
    """Return all tokens of the text in a tensor with one dimension.

    With --held-out, return only the tokens of the held-out samples.
    """
    if args.held_out:
        _, held_out = chapter.build_data(args, tokenizer)
        return held_out.flatten()
    # Cut the text into samples of one token, because longer samples could leave out the last tokens
    # of a piece.
    args = argparse.Namespace(**vars(args) | {"seq_length": 1})
    return torch.cat([piece.flatten() for piece in chapter.pieces_of(args, tokenizer)])


def windows_of(num_tokens, seq_length, stride):
    """Yield (first, start, end), three positions in a text, for each window of the text.

    The window begins at `first`, its tokens count in the loss from `start` on, and `end` is the
    position after its last token.
    """
    end = 0
    for first in range(0, num_tokens, stride):
        counted_before, end = end, min(first + seq_length, num_tokens)
        # Count the tokens after the previous window, but not the first token of a window, because
        # the window has no context for its first token.
        yield first, max(counted_before, first + 1), end
        if end == num_tokens:
            return


@torch.no_grad()
def total_loss(args, model, tokens):
    """Return the total loss of all counted tokens, in nats, and the number of counted tokens."""
    total, count = 0.0, 0
    windows = list(windows_of(len(tokens), args.seq_length, args.stride))
    # Put full windows into batches; run the last window alone, because it may be shorter.
    full, last = windows[:-1], windows[-1:]
    groups = [full[at : at + args.batch_size] for at in range(0, len(full), args.batch_size)]
    for group in [*groups, last]:
        batch = torch.stack([tokens[first:end] for first, _, end in group]).long().to(model.device)
        logits = model(input_ids=batch, use_cache=False).logits
        for window, row, (first, start, end) in zip(batch, logits, group, strict=True):
            # Shift the logits by one position, because position i predicts token i + 1.
            counted = slice(start - first, end - first)
            before = slice(start - first - 1, end - first - 1)
            labels = window[counted].to(row.device)
            total += cross_entropy(row[before].float(), labels, reduction="sum").item()
            count += end - start
    return total, count


def main():
    """Print the number of counted tokens, the loss per token, and the perplexity."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    chapter.fail = fail
    args = parse_args()
    with model_folder(args.model) as folder:
        args.model_name = str(folder)
        tokenizer, _ = chapter.build_tokenizer_and_config(args)
        # Let error messages name the model by the path from the command line, because `folder` may
        # be temporary.
        args.model_name = str(args.model)
        tokens = tokens_of(args, tokenizer)
        model = load_model(args, folder)
    total, count = total_loss(args, model, tokens)
    windows = f"windows of {args.seq_length} tokens, {args.stride} apart"
    print(f"{args.model} on {args.dataset_name}, in {windows}")
    print(f"{count:,} of {len(tokens):,} tokens counted")
    print(f"loss {total / count:.5f} nats per token, perplexity {math.exp(total / count):.4f}")


if __name__ == "__main__":
    main()
