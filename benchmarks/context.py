"""Count the bytes that a rank of chapter 08 keeps for the backward pass, by sequence length.

Here:  python benchmarks/context.py --output benchmarks/results/context.json

The count includes all tensors that autograd saves in a forward pass, except the weights. The result
is the count of the rank that keeps the most bytes.
"""

from itertools import product

import torch
import torch.distributed as dist

from harness import benchmark
from on_ranks import build, on_ranks

# Each case has the number of ranks that split each sequence, and the style of the split.
CASES = {"one rank": (1, "gather")}
for style, ranks in product(("gather", "ulysses"), (2, 4)):
    CASES[f"{style}, {ranks} ranks"] = (ranks, style)
SAMPLES, LENGTHS = 4, [256, 512, 1024, 2048]


def storage_of(tensor):
    """Return the storage of a tensor, or of a DTensor's local part; a view has the same storage."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def bytes_kept(chapter, args, model, batch):
    """Return the number of bytes, without weights, that autograd keeps for the backward pass."""
    sizes = {}

    def pack(tensor):
        # Look up the weights again for each saved tensor, because FSDP replaces a layer's shards
        # with the gathered weights while the layer runs.
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
    """Return the largest number of bytes that any rank keeps for the backward pass."""
    model, *_ = build(chapter, args, device)
    batch = torch.randint(model.config.vocab_size, (SAMPLES, args.seq_length))
    most = torch.tensor(bytes_kept(chapter, args, model, batch))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def activations(args, folder):
    """Yield a row for each case, with the bytes that the fullest rank keeps, by sequence length."""
    for name in args.only:
        ranks, style = CASES[name]
        flags = f"--context-parallel-size {ranks} --context-parallel-style {style} --seq-length"
        # Start a new run for each length, because a rank builds its attention mask only once, for
        # one length.
        found = {
            length: on_ranks(measure, "08", ranks, folder, f"{flags} {length}")
            for length in LENGTHS
        }
        row = {"case": name, "ranks": ranks, "style": style, "bytes": found}
        print(row, flush=True)
        yield row


if __name__ == "__main__":
    benchmark(__doc__, activations, cases=CASES)
