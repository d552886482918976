"""Compare the rows of wandb's offline runs with metrics.jsonl; the last row of a step counts.

Here:  python related-topics/tracking/offline.py outputs/tracking
"""

import argparse
import json
import sys
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
from plot import fail, read_metrics

# A .wandb file has the format of LevelDB's logs. These are the sizes of a block and of the header
# of a part, in bytes: https://github.com/google/leveldb/blob/main/doc/log_format.md.
BLOCK, HEADER = 32768, 7


def records(path):
    """Yield the records of a .wandb file.

    A record has one or more parts, and each part is within one block.
    """
    data, whole = path.read_bytes(), b""
    # Skip wandb's own header at the start of the file.
    at = 7
    while at + HEADER <= len(data):
        # The end of a block is padding if it is too short for a header.
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        at += HEADER + size
        # The last part is incomplete if a kill interrupted its write.
        if at > len(data):
            return
        whole += data[at - size : at]
        if kind in (1, 4):  # the only or last part
            yield Record.FromString(whole)
            whole = b""


def rows_of(run_folder):
    """Return the rows of all wandb runs in a folder, by the name of the run and by step."""
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
    """Print the number of steps whose losses, norms and learning rates match metrics.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("run_folder", type=Path, help="folder of a run, such as outputs/tracking")
    folder = parser.parse_args().run_folder
    kept = {row["step"]: row for row in read_metrics(folder)}
    runs = rows_of(folder) or fail(f"{folder}: no wandb run in this folder; train with --wandb")
    for name, rows in runs.items():
        same = [step for step in kept if numbers(rows.get(step, {})) == numbers(kept[step])]
        print(f"{name}: {len(rows)} steps, {len(same)} of {len(kept)} as in metrics.jsonl")


def numbers(row):
    """Return the values that are the same on all ranks; speed and memory differ by rank."""
    return {name: row[name] for name in ("loss", "grad_norm", "lr", "val_loss") if name in row}


if __name__ == "__main__":
    main()
