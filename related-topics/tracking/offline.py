"""Compare what wandb has kept offline with metrics.jsonl, of which the last row of a step counts.

Here:  python related-topics/tracking/offline.py outputs/tracking
"""

import argparse
import json
import sys
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
from plot import fail, read_metrics

BLOCK, HEADER = 32768, 7  # bytes: https://github.com/google/leveldb/blob/main/doc/log_format.md


def records(path):
    """Yield what a .wandb file holds: records, each in one or several parts that no block cuts."""
    data, whole = path.read_bytes(), b""
    at = 7  # after the header of wandb's own
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # too little for a part: padding
            at += BLOCK - at % BLOCK
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        at += HEADER + size
        if at > len(data):  # a kill has torn it
            return
        whole += data[at - size : at]
        if kind in (1, 4):  # the only part, or the last one
            yield Record.FromString(whole)
            whole = b""


def rows_of(run_folder):
    """Return the rows of all wandb runs below a folder: by the run's name, and by step."""
    runs = {}
    for path in sorted(run_folder.glob("wandb/*run-*/run-*.wandb")):  # in order of time
        for record in records(path):
            if record.HasField("run"):
                rows = runs.setdefault(record.run.display_name, {})
            items = {item.key or item.nested_key[0]: item for item in record.history.item}
            row = {name: json.loads(item.value_json) for name, item in items.items()}
            if "step" in row:
                rows[row["step"]] = {n: value for n, value in row.items() if not n.startswith("_")}
    return runs


def main():
    """Say in how many steps the losses, norms and learning rates are those of metrics.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("run_folder", type=Path, help="such as outputs/tracking")
    folder = parser.parse_args().run_folder
    kept = {row["step"]: row for row in read_metrics(folder)}
    runs = rows_of(folder) or fail(f"{folder} has no wandb run: it was trained without --wandb")
    for name, rows in runs.items():
        same = [step for step in kept if numbers(rows.get(step, {})) == numbers(kept[step])]
        print(f"{name}: {len(rows)} steps, {len(same)} of {len(kept)} as in metrics.jsonl")


def numbers(row):
    """Return what all ranks agree on: not the speed and the memory, which are each rank's own."""
    return {name: row[name] for name in ("loss", "grad_norm", "lr", "val_loss") if name in row}


if __name__ == "__main__":
    main()
