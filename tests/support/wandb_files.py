"""Read the rows that wandb keeps in its files when it is offline."""

import json

from wandb.proto.wandb_internal_pb2 import Record

# A .wandb file has the format of LevelDB's logs. These are the sizes of a block and of the header
# of a part, in bytes: https://github.com/google/leveldb/blob/main/doc/log_format.md.
BLOCK, HEADER = 32768, 7


def records(path):
    """Yield the records of a .wandb file.

    A record has one or more parts, and each part is within one block.
    """
    # Skip wandb's own header at the start of the file.
    data, record, at = path.read_bytes(), b"", 7
    while at + HEADER <= len(data):
        # The end of a block is padding if no header fits into this end, so skip the padding.
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        at += HEADER + size
        record += data[at - size : at]
        # Kind 1 marks the only part of a record, and kind 4 the last part, so the record is
        # complete.
        if kind in (1, 4):
            yield Record.FromString(record)
            record = b""


def rows_of(run_folder):
    """Return the rows of all wandb runs in a folder, by the name of the run and by step."""
    runs = {}
    # Sort the files by path, which contains the start time, so that later rows replace earlier rows
    # of the same step.
    for path in sorted(run_folder.glob("wandb/*run-*/run-*.wandb")):
        for record in records(path):
            if record.HasField("run"):
                rows = runs.setdefault(record.run.display_name, {})
            items = {item.key or item.nested_key[0]: item for item in record.history.item}
            row = {name: json.loads(item.value_json) for name, item in items.items()}
            if "step" in row:
                rows[row["step"]] = {n: value for n, value in row.items() if not n.startswith("_")}
    return runs
