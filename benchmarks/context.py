"""Count what ranks of chapter 08 keep for the backward, by sequence length.

Here:  python benchmarks/context.py --output benchmarks/results/context.json

Counted are the bytes of all tensors that autograd saves in a forward pass, without the weights: of
the rank that keeps most.
"""

import tempfile

import torch
import torch.distributed as dist

from on_ranks import on_ranks
from speed import describe_machine, keep, parser_of

CASES = {  # ranks that split each sequence, and how
    "one rank": (1, "gather"),
    "gather, 2 ranks": (2, "gather"),
    "gather, 4 ranks": (4, "gather"),
    "ulysses, 2 ranks": (2, "ulysses"),
    "ulysses, 4 ranks": (4, "ulysses"),
}
SAMPLES = 4


def parse_args():
    """Return the arguments."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help="these")
    add("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048], help="of sequences")
    add("--model", default="tiny", help="whose configuration it is")
    return parser.parse_args()


def storage_of(tensor):
    """Return the memory of a tensor, of which views share one."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def kept(chapter, args, model, batch):
    """Return how many bytes autograd keeps of a forward pass."""
    sizes = {}

    def pack(tensor):
        weights = {storage_of(weight).data_ptr() for weight in model.parameters()}
        storage = storage_of(tensor)
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = chapter.loss_of(args, model, batch)
    loss.backward()
    return sum(sizes.values())


def measure(chapter, args, device):
    """Return by length the bytes that are kept on the rank that keeps most."""
    _, config = chapter.build_tokenizer_and_config(args)
    model = chapter.shard(args, chapter.build_model(args, config), device)
    found = {}
    for length in map(int, args.experiment_name.split("-")):
        args.seq_length = length
        batch = torch.randint(config.vocab_size, (SAMPLES, length))
        most = torch.tensor(kept(chapter, args, model, batch))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        found[length] = most.item()
    return found


def main():
    """Count in all cases; with --output, write it down."""
    args, rows = parse_args(), []
    for name in args.only:
        ranks, style = CASES[name]
        flags = f"--context-parallel-size {ranks} --context-parallel-style {style} "
        flags += f"-s {max(args.lengths)} -e {'-'.join(map(str, args.lengths))}"
        with tempfile.TemporaryDirectory() as folder:
            found = on_ranks(measure, "08", ranks, args.model, folder, flags)
        rows.append({"case": name, "ranks": ranks, "style": style, "bytes": found})
        told = ", ".join(f"{length} tokens {size / 1e6:.1f} MB" for length, size in found.items())
        print(f"{name}: {told}", flush=True)
    keep(args.output, describe_machine(), {"samples": SAMPLES, "rows": rows})


if __name__ == "__main__":
    main()
