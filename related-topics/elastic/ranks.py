"""Print which numbers of nodes can continue a run, and how each rank then splits its samples.

Here:  python related-topics/elastic/ranks.py --global-batch-size 64 --nodes 1:4 --ranks-per-node 8

The chapters split the samples in the same way. From chapter 06 on, several ranks train on the same
samples; count such a group as one rank.
"""

import argparse
import math
import sys
from pathlib import Path


def parse_args():
    """Parse and check the arguments; split the range of nodes into two numbers."""
    formatter, about = argparse.ArgumentDefaultsHelpFormatter, __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(description=about, formatter_class=formatter)
    add = parser.add_argument
    add("--global-batch-size", type=int, default=64, help="samples per optimizer step")
    add("-b", "--batch-size", type=int, default=8, help="maximum samples per forward pass")
    add("--nodes", default="1:4", help="minimum and maximum, as in torchrun's --nnodes")
    add("--ranks-per-node", type=int, default=8, help="number of ranks, one per GPU")
    args = parser.parse_args()
    try:
        args.fewest, args.most = map(int, args.nodes.split(":"))
    except ValueError:
        fail(f"--nodes {args.nodes}: FEWEST:MOST, such as 1:4")
    if not 1 <= args.fewest <= args.most:
        fail(f"--nodes {args.nodes}: FEWEST:MOST, such as 1:4")
    if min(args.global_batch_size, args.batch_size, args.ranks_per_node) < 1:
        fail("batch sizes and ranks must be at least 1")
    return args


def fail(message):
    """Report a user error in one line on stderr, and exit with status 2."""
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
    sys.exit(2)


def split(samples, ranks, most):
    """Return a rank's micro-batch size and micro-batches per step, or None for an uneven split."""
    per_rank, rest = divmod(samples, ranks)
    if rest:
        return None
    micro = max(size for size in range(1, most + 1) if per_rank % size == 0)
    return micro, per_rank // micro


def main():
    """Print a line for each number of nodes, then a batch size that suits all these numbers."""
    args = parse_args()
    every = 1
    for nodes in range(args.fewest, args.most + 1):
        ranks = nodes * args.ranks_per_node
        every = math.lcm(every, ranks)
        found = split(args.global_batch_size, ranks, args.batch_size)
        told = "does not divide" if not found else f"{found[1]} × {found[0]} samples per rank"
        print(f"nodes {nodes:<3} ranks {ranks:<4} {told}")
    near = max(1, round(args.global_batch_size / every)) * every
    print(f"all of them divide the multiples of {every}; nearest to yours: {near}")


if __name__ == "__main__":
    main()
