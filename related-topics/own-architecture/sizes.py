"""Print the values of --config for a Llama of one size, or the needs of all sizes.

Here:  python 01-single-gpu/train_llm.py --num-steps 3 -e 10M \
           --config $(python related-topics/own-architecture/sizes.py 10M)
All:   python related-topics/own-architecture/sizes.py \
           --output benchmarks/results/own-architecture.json

tools/planner/will_it_fit.py counts the weights on the meta device, and plans the memory.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tools"), str(ROOT / "tools/planner")]

VOCABULARY, LONGEST = 32_768, 4096  # tokens
# Each size has a width, layers, attention heads, heads of keys and values, a width inside the MLP,
# and whether the embeddings are tied.
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
# The peak FLOP/s of an H100, and the share of it that we assume training to reach.
PEAK, MFU = 989e12, 0.4
# The tokens per weight that Hoffmann et al. recommend: arxiv.org/abs/2203.15556.
TOKENS = 20


def parse_args():
    """Parse the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("size", nargs="?", choices=SHAPES, help="size whose configuration to print")
    add("--output", type=Path, help="JSON file for the needs of all sizes")
    return parser.parse_args()


def config_of(size):
    """Return the values of --config for a size; all other settings stay as in the model `tiny`."""
    width, layers, heads, kv_heads, inner, tied = SHAPES[size]
    values = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    values |= {"num_key_value_heads": kv_heads, "head_dim": width // heads}
    values |= {"intermediate_size": inner, "vocab_size": VOCABULARY}
    values |= {"max_position_embeddings": LONGEST, "tie_word_embeddings": str(tied).lower()}
    return [f"{name}={value}" for name, value in values.items()]


def plan_of(planner, size, gpus):
    """Return the number of weights, the first setting that fits on `gpus` GPUs, and its GiB."""
    words = [*STEP.split(), "--gpus-per-node", str(gpus), "--config", *config_of(size)]
    args = planner.parse_args(words)
    config, _ = planner.load_config(args)
    model = planner.model_of(config)
    for name, changes in planner.SETTINGS.items():
        plan = planner.plan_of(args, model, name[:2], changes)
        if plan["fits"]:
            return model.weights, name, plan["gpu_needs"] / planner.GIB
    return model.weights, None, None


def needs_of(planner, size):
    """Return the weights, the settings, the tokens and the GPU hours of a size."""
    row = {"size": size}
    for gpus in MACHINES:
        row["weights"], setting, gib = plan_of(planner, size, gpus)
        row[f"{gpus} GPUs"] = {"setting": setting, "gib": gib}
    width, *_, tied = SHAPES[size]
    row["embeddings"] = VOCABULARY * width * (1 if tied else 2)
    row["tokens"] = TOKENS * row["weights"]
    row["gpu_hours"] = 6 * row["weights"] * row["tokens"] / (MFU * PEAK) / 3600
    return row


def main():
    """Print a configuration, or a line for each size."""
    args = parse_args()
    if args.size:
        print(*config_of(args.size))
        return
    import will_it_fit as planner
    from harness import describe_machine, keep

    rows = []
    for size in SHAPES:
        rows.append(needs_of(planner, size))
        fits = (f"{rows[-1][f'{gpus} GPUs']['setting']} on {gpus}" for gpus in MACHINES)
        print(f"{size:5} {rows[-1]['weights']:13,} weights  {'  '.join(fits)}", flush=True)
    if args.output:
        keep(args.output, describe_machine(gpus=False), {"rows": rows})


if __name__ == "__main__":
    main()
