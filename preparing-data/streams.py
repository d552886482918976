"""Read a stream on several ranks: split it by rank and worker, and end on all ranks together.

Here:  torchrun --standalone --nproc-per-node 2 preparing-data/streams.py
"""

import itertools

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Share(IterableDataset):
    """The samples of an iterable that belong to this rank and to this worker of a DataLoader."""

    def __init__(self, samples, rank, world_size):
        self.samples, self.rank, self.world_size = samples, rank, world_size

    def __iter__(self):
        worker = get_worker_info()
        number, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        first = self.rank * num_workers + number
        return itertools.islice(self.samples, first, None, self.world_size * num_workers)


def together(batches):
    """Yield batches until a rank has none left, so that no rank waits for it in a collective."""
    for batch in itertools.chain(batches, [None]):
        all_have_one = torch.tensor(int(batch is not None))
        dist.all_reduce(all_have_one, dist.ReduceOp.MIN)
        if not all_have_one:
            return
        yield batch


def main():
    """Print which of 29 samples each rank has read with two workers."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = Share(range(29), rank, world_size)
    batches = DataLoader(share, batch_size=2, num_workers=2, drop_last=True)
    read = [batch.tolist() for batch in together(batches)]
    lines = [None] * world_size
    dist.all_gather_object(lines, f"rank {rank} has read {read}")
    if rank == 0:
        print(*lines, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
