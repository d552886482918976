"""Import scripts as modules, and read the samples that the ranks of a run have recorded."""

import importlib.util
import json


def load(path):
    """Return a script as a module."""
    spec = importlib.util.spec_from_file_location("script", path)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def trained(folder):
    """Read files ATTEMPT.RANK.jsonl; return the sample at each position that a run has trained on.

    If several attempts have trained on a position, the last attempt counts.
    """
    samples = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            # Skip the last line if a kill has cut it.
            if line.endswith("]]]"):
                positions, rows = json.loads(line)
                samples |= zip(positions, map(tuple, rows), strict=True)
    return samples
