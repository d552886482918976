"""Run a script's main(), and write down which samples it trains on, step by step.

Usage: recorded.py SCRIPT FILE ARGUMENT...

Each rank appends to FILE.RANK.jsonl. `trained()` reads these files.
"""

import importlib.util
import json
import os
import sys

import torch.distributed as dist


def load(path):
    """Return a script as a module."""
    spec = importlib.util.spec_from_file_location("script", path)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def main():
    """Run a chapter with a batch_at() that keeps a record."""
    script, file, *arguments = sys.argv[1:]
    chapter, sys.argv = load(script), [script, *arguments]
    batch_at = chapter.batch_at

    def recorded(args, samples, step, micro_step, device):
        batch = batch_at(args, samples, step, micro_step, device)
        data_rank, num_data_ranks = 0, 1
        if hasattr(chapter, "data_rank_of"):
            data_rank, num_data_ranks = chapter.data_rank_of(args)
        elif dist.is_initialized():
            data_rank, num_data_ranks = dist.get_rank(), dist.get_world_size()
        with open(f"{file}.{os.environ.get('RANK', '0')}.jsonl", "a") as record:
            row = [step, micro_step, data_rank, num_data_ranks, batch.tolist()]
            print(json.dumps(row), file=record)
        return batch

    chapter.batch_at = recorded
    chapter.main()


def trained(folder, global_batch_size):
    """Return the sample at each position that a run has trained on, from files ATTEMPT.RANK.jsonl.

    Of a step that several attempts have trained, the last attempt counts.
    """
    steps = {}
    for path in sorted(folder.glob("*.jsonl")):
        attempt = path.name.partition(".")[0]
        for line in path.read_text().splitlines():
            try:
                step, micro_step, data_rank, num_data_ranks, rows = json.loads(line)
            except ValueError:
                continue  # A kill may cut the last line.
            first = micro_step * len(rows) * num_data_ranks + data_rank
            found = {first + number * num_data_ranks: row for number, row in enumerate(rows)}
            if steps.get(step, ("", {}))[0] != attempt:
                steps[step] = attempt, {}
            steps[step][1].update(found)
    samples = {}
    for step, (_, rows) in steps.items():
        assert sorted(rows) == list(range(global_batch_size)), step
        for position, row in rows.items():
            samples[(step - 1) * global_batch_size + position] = tuple(row)
    return samples


if __name__ == "__main__":
    main()
