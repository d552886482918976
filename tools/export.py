"""Convert a checkpoint of any chapter and any number of ranks to a folder for transformers.

Here:  python tools/export.py outputs/04-fsdp/checkpoints/step-00000050 outputs/step-50
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
from transformers import AutoModelForCausalLM

from plot import fail

# Let Python find chapter 01's script, because its functions build tokenizers and configurations.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "01-single-gpu"))

import train_llm as chapter


def write_model(checkpoint, folder):
    """Write the model of a checkpoint, with its configuration and tokenizer, to a new folder.

    Exit with an error if the checkpoint cannot be read, or if it has only LoRA adapters.
    """
    if (checkpoint / "state.pt").exists():
        state = torch.load(checkpoint / "state.pt", "cpu", mmap=True, weights_only=True)
        args, weights = state["args"], state["model"]
    else:
        args, weights = json.loads(read_shards(checkpoint, {"args": ""})["args"]), None
    if "lora_rank" in args:
        problem = "it has only adapters; use the folder model/, which the run writes when it ends"
        fail(f"{checkpoint}: {problem}")
    tokenizer, config = chapter.build_tokenizer_and_config(argparse.Namespace(**args))
    # Build the model on the meta device, because only the names and shapes of weights are needed.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if weights is None:
        # Leave out the second names of tied weights, because a sharded checkpoint stores each tied
        # weight only under its first name.
        weights = {
            name: torch.empty_like(weight, device="cpu")
            for name, weight in model.state_dict().items()
            if name not in model.all_tied_weights_keys
        }
        read_shards(checkpoint, {"model": weights})
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)


def read_shards(checkpoint, state):
    """Replace each value in `state` by the checkpoint's value of the same name; return `state`.

    Exit with an error if the checkpoint is not complete.
    """
    # Turn off warnings in the log, because DCP would log pages about an error that fits on one
    # line.
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    try:
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    except CheckpointException as error:
        cause = next(cause for cause, _ in error.failures.values())
        problem = f"not a complete checkpoint ({cause})"
        fail(f"{checkpoint}: {problem}; choose RUN/checkpoints/step-...")
    return state


def main():
    """Read the checkpoint in one process; write the model, its configuration and its tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", type=Path, help="such as RUN/checkpoints/step-00000050")
    parser.add_argument("folder", type=Path, help="the new folder for the model")
    paths = parser.parse_args()
    transformers.logging.disable_progress_bar()
    if paths.folder.exists():
        parser.error(f"{paths.folder}: exists already; choose a new folder")
    write_model(paths.checkpoint, paths.folder)
    print(f"{paths.folder} has the model of {paths.checkpoint}")


if __name__ == "__main__":
    main()
