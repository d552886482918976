"""Turn a checkpoint of any number of ranks into a folder that transformers loads.

Here:  python 04-fsdp/to_transformers.py outputs/04-fsdp/checkpoints/step-00000050 outputs/step-50
"""

import argparse
import json
import logging
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.api import CheckpointException
from train_llm import build_tokenizer_and_config
from transformers import AutoModelForCausalLM


def read(checkpoint, state):
    """Replace the values of `state` by the values that the checkpoint has under the same names."""
    # DCP logs pages about an error; the message below needs one line.
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    try:
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    except CheckpointException as error:
        cause = next(cause for cause, _ in error.failures.values())
        sys.exit(f"{Path(__file__).name}: error: cannot read {checkpoint}: {cause}")
    return state


def main():
    """Read the shards of all ranks in one process; write the model, its config and tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="such as RUN/checkpoints/step-00000050")
    parser.add_argument("folder", type=Path, help="the new folder for the model")
    paths = parser.parse_args()
    transformers.logging.disable_progress_bar()
    if paths.folder.exists():
        parser.error(f"{paths.folder} exists already; choose a new folder")
    args = argparse.Namespace(**json.loads(read(paths.checkpoint, {"args": ""})["args"]))

    # Call the function without rank_first(), because this process has no other ranks.
    tokenizer, config = build_tokenizer_and_config.__wrapped__(args)
    # On the meta device, weights have names and shapes, but no memory.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # A checkpoint has a tied weight only once.
    weights = {
        name: torch.empty_like(weight, device="cpu")
        for name, weight in model.state_dict().items()
        if name not in model.all_tied_weights_keys
    }
    read(paths.checkpoint, {"model": weights})
    model.save_pretrained(paths.folder, state_dict=weights)
    tokenizer.save_pretrained(paths.folder)
    print(f"{paths.folder} has the model of {paths.checkpoint}")


if __name__ == "__main__":
    main()
