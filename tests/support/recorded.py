"""Run a script's main(), and record the samples that it trains on.

Usage: recorded.py SCRIPT FILE ARGUMENT...

Each rank appends to FILE.RANK.jsonl. `trained()` reads these files.
"""

import importlib.util
import json
import os
import sys


def load(path):
    """Return a script as a module."""
    spec = importlib.util.spec_from_file_location("script", path)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def main():
    """Run a chapter with a samples_at() that keeps a record."""
    script, file, *arguments = sys.argv[1:]
    chapter, sys.argv = load(script), [script, *arguments]
    samples_at = chapter.samples_at

    def recorded(args, samples, positions):
        rows = samples_at(args, samples, positions)
        with open(f"{file}.{os.environ.get('RANK', '0')}.jsonl", "a") as record:
            print(json.dumps([list(positions), rows.tolist()]), file=record)
        return rows

    chapter.samples_at = recorded
    chapter.main()


def trained(folder):
    """Return the sample at each position that a run has trained on, from files ATTEMPT.RANK.jsonl.

    If several attempts have trained on a position, the last attempt counts.
    """
    samples = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            # A kill may cut the last line.
            if line.endswith("]]]"):
                positions, rows = json.loads(line)
                samples |= zip(positions, map(tuple, rows), strict=True)
    return samples


if __name__ == "__main__":
    main()
