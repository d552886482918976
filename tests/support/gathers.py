"""Run a script with its arguments, and count how often FSDP gathers weights and reduces gradients.

Started once per rank by test_pipeline.py, with the folder for the counts: a file for each rank.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import torch.distributed.fsdp._fully_shard._fsdp_param_group as groups


def counted(function, counts, name):
    """Return the function; each call of it is counted."""

    def call(*args, **options):
        counts[name] += 1
        return function(*args, **options)

    return call


def main():
    """Count what a run does."""
    folder, script, *args = sys.argv[1:]
    counts = {"gathers": 0, "reductions": 0}
    groups.foreach_all_gather = counted(groups.foreach_all_gather, counts, "gathers")
    groups.foreach_reduce = counted(groups.foreach_reduce, counts, "reductions")
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")
    Path(folder, f"counted{os.environ['RANK']}").write_text(json.dumps(counts))


if __name__ == "__main__":
    main()
