"""Measure the share of a training step that is spent waiting for data, with several loaders.

Here:  python preparing-data/share.py --workers 0 4 --steps 10
Ours:  python preparing-data/share.py --output benchmarks/results/data-loading.json

First, training reads chapter 01's memory-mapped tokens. Then a DataLoader provides the same samples
slowly: loading a batch takes --cost times as long as computing a step.
"""

import argparse
import itertools
import sys
import time
import warnings
from pathlib import Path

import datasets
import torch
from torch.utils.data import DataLoader, Dataset

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))

from contenders import load  # noqa: E402
from harness import describe_machine, keep  # noqa: E402

BATCH = 8  # samples per step
WARM_UP = 3  # steps that do not count
# The computing time of a step is the mean of at most this number of steps.
MOST = 30
SETTINGS = f"--device cpu --precision fp32 -s 64 --global-batch-size {BATCH} --batch-size {BATCH}"


def parse_args():
    """Parse and check the arguments."""
    formatter, about = argparse.ArgumentDefaultsHelpFormatter, __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(description=about, formatter_class=formatter)
    add, workers = parser.add_argument, [0, 1, 2, 4]
    add("--workers", nargs="+", type=int, default=workers, help="numbers of loading processes")
    add("--cost", type=float, default=3.0, help="time to load a batch / time to compute a step")
    add("--steps", type=int, default=MOST, help=f"steps to measure, after {WARM_UP} warm-up steps")
    add("--output", type=Path, help="JSON file for the machine and the results")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: must be at least 1")
    return args


class Far(Dataset):
    """Samples that load slowly: a sleep stands for a download, or for decoding on other cores."""

    def __init__(self, samples, seconds):
        self.samples, self.seconds = samples, seconds

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, number):
        time.sleep(self.seconds)
        return self.samples[number].long()


def ids_from(args, order_of, num_samples, step, rank=0, ranks=1):
    """Yield the ids of this rank's micro-batches from a step on, as the chapters' `batch_at`."""
    size = args.micro_batch_size * ranks
    for first in itertools.count((step - 1) * args.global_batch_size, size):
        places = [divmod(at, num_samples) for at in range(first + rank, first + size, ranks)]
        yield [int(order_of(args.seed, epoch, num_samples)[place]) for epoch, place in places]


def measure(steps, workers=None, seconds=0.0):
    """Return the seconds that the steps took, and the seconds that they waited for their batches.

    If `workers` is a number, a DataLoader with that number of workers loads the batches, and each
    sample takes `seconds` to load. Otherwise, the steps read chapter 01's memory-mapped tokens.
    """
    chapter, sys.argv = load("01"), ["train_llm.py", *SETTINGS.split()]
    args, device = chapter.parse_args(), torch.device("cpu")
    tokenizer, config = chapter.build_tokenizer_and_config(args)
    train_set, _ = chapter.build_data(args, tokenizer)
    model = chapter.build_model(args, config)
    optimizer = chapter.build_optimizer(args, model)
    get, waited = chapter.batch_at, []
    if workers is not None:
        [samples] = train_set.pieces
        ids = ids_from(args, chapter.order_of, len(samples), step=1)
        far = Far(samples, seconds)
        batches = iter(DataLoader(far, batch_sampler=ids, num_workers=workers))

    def timed(*place):
        begun = time.perf_counter()
        batch = get(*place) if workers is None else next(batches)
        waited.append(time.perf_counter() - begun)
        return batch

    chapter.batch_at = timed
    for step in range(1, WARM_UP + steps + 1):
        if step == WARM_UP + 1:
            begun = time.perf_counter()
        chapter.train_step(args, model, optimizer, train_set, step, device)
    return time.perf_counter() - begun, sum(waited[WARM_UP:])


def main():
    """Measure the memory-mapped tokens, then a DataLoader with each number of workers."""
    args, machine = parse_args(), describe_machine(gpus=False)
    datasets.disable_progress_bars()
    # Ignore the warning that there are more workers than cores: workers that sleep need no core.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    steps = min(MOST, args.steps)
    took, waited = measure(steps)
    rows = [{"workers": None, "share": waited / took}]
    print(f"memory-mapped tokens   {rows[-1]['share']:6.1%} of a step", flush=True)
    seconds = args.cost * (took - waited) / steps / BATCH
    for workers in args.workers:
        took, waited = measure(args.steps, workers, seconds)
        # A step that has waited computes more slowly, so this run has a cost of its own.
        cost = seconds * BATCH / ((took - waited) / args.steps)
        rows.append({"workers": workers, "cost": cost, "share": waited / took})
        print(f"DataLoader, workers: {workers} {rows[-1]['share']:6.1%} of a step", flush=True)
    if args.output:
        keep(args.output, machine, {"rows": rows})


if __name__ == "__main__":
    main()
