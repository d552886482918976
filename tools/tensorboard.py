"""Write the metrics of runs as TensorBoard's event files, into the runs' folders.

Here:  python tools/tensorboard.py outputs/02-ddp outputs/04-fsdp
       tensorboard --logdir outputs

With --follow it goes on until Ctrl-C, so that TensorBoard shows runs while they train. Of several
names, such as outputs/*, those that have no metrics are passed over.
"""

import argparse
import sys
import time
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

sys.path.append(sys.path.pop(0))  # or this file would hide the package of its name
from torch.utils.tensorboard import SummaryWriter

from plot import read_metrics


def parse_args():
    """Return the runs' folders and whether to go on."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, help="folders such as outputs/02-ddp")
    parser.add_argument("--follow", action="store_true", help="go on as the runs do, until Ctrl-C")
    return parser.parse_args()


class Events:
    """The event files of one run."""

    def __init__(self, run):
        read_metrics(run)  # which stops if there is no such run
        for old in run.glob("events.out.tfevents.*"):
            old.unlink()
        self.run, self.rows = run, []
        self.writer = SummaryWriter(run)

    def update(self):
        """Write the rows that are new; if a resume has replaced some, those and all after them."""
        rows = read_metrics(self.run)
        pairs = zip(rows, self.rows, strict=False)
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        if same < len(self.rows):  # TensorBoard forgets what it has of this step and later ones
            self.writer.close()
            self.writer = SummaryWriter(self.run, purge_step=self.rows[same]["step"])
        for row in rows[same:]:
            for name, value in row.items():
                if name != "step" and value is not None:
                    self.writer.add_scalar(name, value, row["step"])
        self.writer.flush()
        self.rows = rows


def main():
    """Write all runs; with --follow, look again every two seconds."""
    args = parse_args()
    runs = [run for run in args.runs if (run / "metrics.jsonl").exists()] or args.runs[:1]
    for other in set(args.runs) - set(runs):
        print(f"{other}: no run", file=sys.stderr)
    written = [Events(run) for run in runs]
    with suppress(KeyboardInterrupt):
        while True:
            for events in written:
                events.update()
            if not args.follow:
                break
            time.sleep(2)
    for events in written:
        events.writer.close()
        print(f"{events.run}: {len(events.rows)} steps")


if __name__ == "__main__":
    main()
