"""Print the values of --config for a Llama of one size, or write the needs of all sizes.

Here:  python 01-single-gpu/train_llm.py --num-steps 3 -e 10M \
           --config $(python related-topics/own-architecture/sizes.py 10M)
All:   python related-topics/own-architecture/sizes.py \
           --output benchmarks/results/own-architecture.json

tools/planner/will_it_fit.py counts the weights on the meta device, and plans the memory.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tools/planner")]

from harness import benchmark  # noqa: E402

VOCABULARY, LONGEST = 32_768, 4096  # tokens
# Each size has a width, a number of layers, a number of attention heads, a number of heads for keys
# and values, and a width inside the MLP. The last value is True if the embeddings are tied.
SHAPES = {
    "10M": (192, 8, 3, 3, 512, True),
    "35M": (384, 12, 6, 6, 1024, True),
    "110M": (768, 12, 12, 12, 2048, True),
    "340M": (1024, 24, 16, 16, 2816, True),
    "730M": (1536, 24, 12, 12, 4096, True),
    "1.1B": (2048, 24, 16, 4, 5632, True),
    "2.5B": (2560, 32, 20, 4, 7168, False),
    "6.7B": (4096, 32, 32, 32, 11008, False),
}
STEP = "-m tiny -s 2048 -b 4 --global-batch-size 256 --gpu-memory-gib 80 --nodes 1"
MACHINES = [1, 8]  # GPUs of 80 GiB
# PEAK is the peak of an H100 in FLOP/s. We assume that training reaches the share MFU of this peak.
PEAK, MFU = 989e12, 0.4
# Hoffmann et al. recommend training on this number of tokens per weight: arxiv.org/abs/2203.15556.
TOKENS = 20


def config_of(size):
    """Return the values of --config for a size; all other settings stay as in the model `tiny`."""
    width, layers, heads, kv_heads, inner, tied = SHAPES[size]
    values = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    values |= {"num_key_value_heads": kv_heads, "head_dim": width // heads}
    values |= {"intermediate_size": inner, "vocab_size": VOCABULARY}
    values |= {"max_position_embeddings": LONGEST, "tie_word_embeddings": str(tied).lower()}
    return [f"{name}={value}" for name, value in values.items()]


def needs_of(size):
    """Return a row with the weights, the training tokens and the GPU hours of a size.

    For each number of GPUs in MACHINES, the row also has the planner's first setting that fits into
    the memory, and the GiB that this setting needs on each GPU.
    """
    import will_it_fit as planner

    width, *_, tied = SHAPES[size]
    row = {"size": size, "embeddings": VOCABULARY * width * (1 if tied else 2)}
    for gpus in MACHINES:
        words = [*STEP.split(), "--gpus-per-node", str(gpus), "--config", *config_of(size)]
        plan = planner.make_plan(planner.parse_args(words))
        # Use the first setting whose memory fits, because the planner lists fast settings first.
        needs = plan["settings"][plan["first"]]["gpu_needs"] / planner.GIB
        row[f"{gpus} GPUs"] = {"setting": plan["first"], "gib": needs}
    weights = plan["model"]["weights"]
    hours = 6 * weights * TOKENS * weights / (MFU * PEAK) / 3600
    return row | {"weights": weights, "tokens": TOKENS * weights, "gpu_hours": hours}


def sizes(args, folder):
    """Print the values of --config for `args.size`; if it is None, yield the needs of all sizes."""
    if args.size:
        print(*config_of(args.size))
    else:
        yield from map(needs_of, SHAPES)


def add_flags(add):
    """Declare the arguments that only this script has."""
    add("size", nargs="?", choices=SHAPES, help="print the values of this size")


if __name__ == "__main__":
    benchmark(__doc__, sizes, add_flags, gpus=False)
