"""Run a script, and count how often FSDP gathers weights and reduces gradients.

test_pipeline.py starts this once per rank. The arguments are a folder, where each rank writes its
counts to a file, and the script with its arguments.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import torch.distributed.fsdp._fully_shard._fsdp_param_group as groups


def count_calls(function, counts, name):
    """Return a function that adds 1 to `counts[name]` in each call, and then calls `function`."""

    def counting_function(*args, **options):
        counts[name] += 1
        return function(*args, **options)

    return counting_function


def main():
    """Replace FSDP's collectives with counting functions, and run the script."""
    folder, script, *args = sys.argv[1:]
    counts = {"gathers": 0, "reductions": 0}
    groups.foreach_all_gather = count_calls(groups.foreach_all_gather, counts, "gathers")
    groups.foreach_reduce = count_calls(groups.foreach_reduce, counts, "reductions")
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")
    Path(folder, f"counted{os.environ['RANK']}").write_text(json.dumps(counts))


if __name__ == "__main__":
    main()
