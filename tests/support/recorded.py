"""Import scripts as modules, and read the samples that the ranks of a run have recorded."""

import importlib.util
import json


def load(path):
    """Import a script from its path; return the module."""
    spec = importlib.util.spec_from_file_location("script", path)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def trained(folder):
    """Return a dictionary from positions in the stream to the samples that a run has trained on.

    Each rank has recorded its samples in a file ATTEMPT.RANK.jsonl. If several attempts have
    trained on a position, the last attempt counts.
    """
    samples = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            # Skip the last line if it is incomplete because the rank was killed.
            if line.endswith("]]]"):
                positions, rows = json.loads(line)
                samples |= zip(positions, map(tuple, rows), strict=True)
    return samples
