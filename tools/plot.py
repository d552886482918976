"""Plot the loss and the validation loss of one or several runs in one PNG.

Here:  python tools/plot.py outputs/one outputs/two --output parity.png
"""

import argparse
import json
import sys
from contextlib import suppress
from pathlib import Path

COLORS = ["#1f3b5c", "#e08a3c", "#5aa9a3", "#c8553d", "#8d6cab", "#7a7a7a"]


def parse_args():
    """Parse the command line: the folders of the runs, and the path of the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, help="folders such as outputs/02-ddp")
    parser.add_argument("-o", "--output", type=Path, default=Path("runs.png"), help="PNG to write")
    return parser.parse_args()


def fail(message):
    """Report a user's mistake in one line on stderr, and exit with status 2."""
    print(f"{Path(sys.argv[0]).name}: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def read_metrics(run):
    """Return the rows of a run's metrics.jsonl in the order of steps; exit if there are no rows.

    After a stop, a run may log a step again, so only the last row of each step counts.
    """
    path = run / "metrics.jsonl"
    try:
        last = {row["step"]: row for row in rows_of(path)}
    except (OSError, ValueError) as error:
        fail(f"{path}: cannot be read ({error}); give the folder of a run that has logged")
    if not last:
        fail(f"{path}: has no complete row; wait for the first log line")
    return [last[step] for step in sorted(last)]


def rows_of(path):
    """Return the rows of a metrics.jsonl file.

    Leave out a line that is incomplete because of a kill or a full disk.
    """
    rows = []
    for line in path.read_text().splitlines():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def series(rows, name):
    """Return the steps of the rows that have a value of the metric `name`, and these values."""
    measured = [row for row in rows if row.get(name) is not None]
    return [row["step"] for row in measured], [row[name] for row in measured]


def largest_difference(runs):
    """Return the largest difference between a loss of the first run and a loss of any other run.

    Both losses are of the same step, and both are training losses or both are validation losses.
    Return None if no other run has a loss in a step of the first run.
    """
    worst = []
    for name in ("loss", "val_loss"):
        first, *others = (dict(zip(*series(rows, name), strict=True)) for rows in runs.values())
        worst += [abs(first[step] - run[step]) for run in others for step in first.keys() & run]
    return max(worst, default=None)


def draw(runs, path):
    """Write a PNG with the losses of `runs`, which maps the name of each run to its rows.

    Later curves are thinner, so curves that coincide remain visible.
    """
    # Import matplotlib only here, because programs that only read metrics do not need it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), dpi=100, layout="constrained")
    axes = figure.subplots()
    for number, (run, rows) in enumerate(runs.items()):
        color, width = COLORS[number % len(COLORS)], 1.5 + 3 * (len(runs) - 1 - number)
        axes.plot(*series(rows, "loss"), color=color, lw=width, label=f"{run}: training")
        style = {"ls": "", "marker": "o", "ms": 6 + width, "mec": "white"}
        axes.plot(*series(rows, "val_loss"), color=color, label=f"{run}: held out", **style)
    difference = largest_difference(runs)
    coincide = "" if difference is None else f", largest difference {difference:.1e}"
    axes.set(title=f"loss{coincide}", xlabel="optimizer step", ylabel="nats per token")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e6e6")
    axes.legend(frameon=False)
    figure.savefig(path)


def main():
    """Plot all runs, and print the largest difference from the losses of the first run."""
    args = parse_args()
    runs = {run.name: read_metrics(run) for run in args.runs}
    draw(runs, args.output)
    difference = largest_difference(runs)
    losses = "" if difference is None else f"; largest difference between losses: {difference:.1e}"
    print(f"drawn: {args.output}{losses}")


if __name__ == "__main__":
    main()
