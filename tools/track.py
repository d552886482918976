"""Send the metrics of runs to TensorBoard, wandb or MLflow: while they train, or afterwards.

Here:     python tools/track.py outputs/02-ddp outputs/04-fsdp --to tensorboard
          tensorboard --logdir outputs
Follow:   python tools/track.py outputs/* --to wandb --follow

The training scripts need no change, because they always write metrics.jsonl. You can start, end and
restart this tool at any time: it continues the same wandb run or MLflow run. If several rows have
the same step, the last row counts. wandb and MLflow take their settings from environment variables:
WANDB_PROJECT, WANDB_MODE, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME.
"""

import argparse
import os
import queue
import signal
import uuid
from contextlib import suppress
from pathlib import Path

from plot import fail, read_metrics


def id_of(run, tracker):
    """Return a run's id in a tracker; the first call writes it to a file in the run's folder."""
    path = run / f"{tracker}-id.txt"
    with suppress(FileExistsError), open(path, "x") as file:
        file.write(uuid.uuid4().hex[:8])
    return path.read_text()


def values_of(row):
    """Return all metrics of a row that have a value, except the step."""
    return {name: value for name, value in row.items() if name != "step" and value is not None}


class TensorBoard:
    """Write a run's metrics to event files in its folder; first delete the old event files."""

    def __init__(self, run):
        from torch.utils.tensorboard import SummaryWriter

        for path in run.glob("events.out.tfevents.*"):
            path.unlink()
        self.writer = SummaryWriter(run)

    def send(self, row):
        """Write all metrics of a row to the event files."""
        for name, value in values_of(row).items():
            self.writer.add_scalar(name, value, row["step"])
        self.writer.flush()

    def close(self):
        """Close the event files."""
        self.writer.close()


class Wandb:
    """Send rows to a wandb run; a second start of this tool continues the same wandb run."""

    def __init__(self, run):
        import wandb

        options = {"id": id_of(run, "wandb"), "name": run.name, "dir": run, "resume": "allow"}
        # Leave other wandb runs open, because this tool may send several runs at the same time.
        self.wandb_run = wandb.init(**options, reinit="create_new")
        # Use the step in each row as the x-axis, because wandb's own step number cannot go back.
        self.wandb_run.define_metric("*", step_metric="step")

    def send(self, row):
        """Send a row to wandb."""
        self.wandb_run.log(row)

    def close(self):
        """Wait until wandb has sent all rows."""
        self.wandb_run.finish()


class MLflow:
    """Send rows to an MLflow run, but leave out values that the MLflow run already has."""

    def __init__(self, run):
        import mlflow

        self.client, tags = mlflow.MlflowClient(), {"folder_id": id_of(run, "mlflow")}
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "runs")
        number = mlflow.set_experiment(name).experiment_id
        found = self.client.search_runs([number], f"tags.folder_id = '{tags['folder_id']}'")
        found = found or [self.client.create_run(number, run_name=run.name, tags=tags)]
        self.run_id, self.sent = found[0].info.run_id, {}
        for name in found[0].data.metrics:
            for metric in self.client.get_metric_history(self.run_id, name):
                self.sent[name, metric.step] = metric.value

    def send(self, row):
        """Send the values of a row that the MLflow run does not have yet."""
        for name, value in values_of(row).items():
            if self.sent.get((name, row["step"])) != value:
                self.client.log_metric(self.run_id, name, value, step=row["step"])
                self.sent[name, row["step"]] = value

    def close(self):
        """Mark the MLflow run as finished."""
        self.client.set_terminated(self.run_id)


TRACKERS = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow}


class Tracked:
    """Hold a run, its tracker, and the rows that the tracker has already received."""

    def __init__(self, run, tracker):
        # Read the metrics first, so that a missing run stops the tool before it creates a tracker.
        read_metrics(run)
        self.run, self.start, self.tracker, self.rows = run, tracker, tracker(run), []

    def update(self):
        """Send the rows that are new; if a resume has replaced rows, send all rows again."""
        rows = read_metrics(self.run)
        if rows[: len(self.rows)] != self.rows:
            self.tracker.close()
            self.tracker, self.rows = self.start(self.run), []
        for row in rows[len(self.rows) :]:
            self.tracker.send(row)
        self.rows = rows


def follow(tracked):
    """Send new rows of all runs every two seconds, until Ctrl-C.

    After Ctrl-C, finish sending the rows of the current round, and return.
    """
    # Use a SimpleQueue, because a signal handler can safely call put() of this queue at any moment.
    ends = queue.SimpleQueue()

    def end(*_):
        ends.put(True)
        # Restore the default handler, so that a second Ctrl-C ends the tool at once.
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, end)
    while True:
        for one in tracked:
            one.update()
        with suppress(queue.Empty):
            ends.get(timeout=2)
            return


def main():
    """Send the rows of all runs; with --follow, also send the rows that the runs add later."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, help="folders of runs; folders without metrics are skipped")
    add("--to", choices=TRACKERS, default="tensorboard", help="the tracker (default: %(default)s)")
    add("--follow", action="store_true", help="keep sending new rows until Ctrl-C")
    args = parser.parse_args()
    runs = [run for run in args.runs if (run / "metrics.jsonl").exists()] or args.runs[:1]
    try:
        tracked = [Tracked(run, TRACKERS[args.to]) for run in runs]
    except ImportError as error:
        fail(f"--to {args.to}: {error}; install the package")
    if args.follow:
        follow(tracked)
    for one in tracked:
        # Send all rows or, after --follow, the rows that are newer than the last update.
        one.update()
        one.tracker.close()
        print(f"{one.run}: {len(one.rows)} steps")


if __name__ == "__main__":
    main()
