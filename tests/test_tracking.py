"""Test that track.py sends the rows of metrics.jsonl to TensorBoard, wandb and MLflow."""

import json
import signal
import subprocess
import sys

import numpy as np
import pytest

import track
import wandb_files
from conftest import ROOT, SCRIPTS, SERVER, SHORT, change_file, metrics, run_or_fail, user_error
from marks import exhaustive
from runs import wait_for

PATCH = ROOT / "related-topics/tracking/each-node.patch"


def add_rows(run_dir, *steps, shift=0.0):
    """Append rows to metrics.jsonl, and then half of a row, as a killed run may leave it."""
    run_dir.mkdir(exist_ok=True)
    with open(run_dir / "metrics.jsonl", "a") as file:
        for step in steps:
            row = {"step": step, "loss": 1 / (step + 3) + shift, "mfu": None}
            print(json.dumps(row | {"val_loss": 0.1 * step} if step % 2 == 0 else row), file=file)
        file.write('{"step": 99, "lo\n')


@pytest.fixture
def start(tmp_path):
    """Return a function that starts track.py; kill all started processes after the test."""
    processes = []

    def start_tool(*words, **variables):
        with open(tmp_path / "log", "w") as log:
            processes.append(SERVER.start([ROOT / "tools/track.py", *words], variables, log))
        return processes[-1]

    yield start_tool
    for process in processes:
        process.kill()


def rows_in_events(run_dir):
    """Return the metrics that TensorBoard reads, by step, or None if a file has disappeared.

    The metrics are 32-bit numbers.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events, rows = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}), {}
    try:
        events.Reload()
    except FileNotFoundError:
        # Let the caller read again, because track.py has deleted the file during this read.
        return None
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert name not in rows.setdefault(event.step, {}), f"{name} is there twice"
            rows[event.step][name] = np.float32(event.value)
    return rows


def values_in_metrics(run_dir, kind):
    """Return the metrics in metrics.jsonl by step, converted with `kind`; skip empty metrics."""
    rows = {}
    for step, row in metrics(run_dir).items():
        values = {name: value for name, value in row.items() if name != "step"}
        rows[step] = {name: kind(value) for name, value in values.items() if value is not None}
    return rows


def test_missing_run_or_package_prints_one_line(tmp_path, monkeypatch, capsys):
    add_rows(tmp_path / "run", 0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    for words, expected in [
        (["nosuch"], "track.py: error: nosuch/metrics.jsonl: cannot be read ("),
        (["run", "--to", "mlflow"], "track.py: error: --to mlflow: import of mlflow halted"),
    ]:
        monkeypatch.setattr(sys, "argv", ["track.py", *words])
        [line] = user_error(capsys, track.main).splitlines()
        assert line.startswith(expected)


def test_following_tool_sends_runs_through_a_resume(tmp_path, start):
    """Append further rows for old steps, as a resume does, while track.py follows the run."""
    for name in ("one", "two"):
        add_rows(tmp_path / name, 0, 1, 2, 3, 4)
    runs = [tmp_path / name for name in ("one", "nosuch", "two")]
    tool = start(*runs, "--follow")
    for steps, shift in [((), 0.0), ((5,), 0.0), ((4, 5, 6), 1.0), ((7,), 1.0)]:
        add_rows(runs[0], *steps, shift=shift)
        expected = values_in_metrics(runs[0], np.float32)
        assert wait_for(
            lambda: [*runs[0].glob("events*")] and rows_in_events(runs[0]) == expected,  # noqa: B023
            [tool],
        ), (tmp_path / "log").read_text()
    add_rows(runs[0], 8)
    # After Ctrl-C, the tool reads the metrics a last time, and then ends.
    tool.send_signal(signal.SIGINT)
    assert tool.wait(timeout=30) == 0
    assert (tmp_path / "log").read_text() == f"{runs[0]}: 9 steps\n{runs[2]}: 5 steps\n"
    assert rows_in_events(runs[0]) == values_in_metrics(runs[0], np.float32)
    assert rows_in_events(runs[2]) == values_in_metrics(runs[2], np.float32)


def test_wandb_continues_the_same_run_after_a_second_start(tmp_path, start):
    run_dir = tmp_path / "run"
    for steps, shift in [((0, 1, 2, 3, 4), 0.0), ((3, 4, 5), 1.0)]:
        add_rows(run_dir, *steps, shift=shift)
        tool = start(run_dir, "--to", "wandb", WANDB_MODE="offline")
        assert tool.wait(timeout=100) == 0, (tmp_path / "log").read_text()
    assert wandb_files.rows_of(run_dir) == {"run": metrics(run_dir)}
    ids = {path.name.partition("-")[2] for path in run_dir.glob("wandb/offline-run-*/*.wandb")}
    assert len(ids) == 1, "the second start has begun a new wandb run"


def test_mlflow_gets_each_new_value_once(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    run_dir = tmp_path / "run"
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/store")
    monkeypatch.setattr(sys, "argv", ["track.py", str(run_dir), "--to", "mlflow"])
    for steps, shift in [((0, 1, 2, 3, 4), 0.0), ((3, 4, 5), 1.0)]:
        add_rows(run_dir, *steps, shift=shift)
        track.main()
    client = MlflowClient()
    [found] = client.search_runs([client.get_experiment_by_name("runs").experiment_id])
    rows, num_values = {}, 0
    for name in ("loss", "val_loss"):
        history = client.get_metric_history(found.info.run_id, name)
        num_values += len(history)
        for metric in sorted(history, key=lambda metric: metric.timestamp):
            rows.setdefault(metric.step, {})[name] = metric.value
    assert found.info.run_name == "run" and found.info.status == "FINISHED"
    assert rows == values_in_metrics(run_dir, float)
    assert num_values == 5 + 3 + 3, "a value that has not changed was sent again"


@pytest.mark.slow
@pytest.mark.parametrize("chapter", ["03", exhaustive("08")])
def test_patched_chapter_tracks_each_rank(tmp_path, chapter):
    """Apply each-node.patch, but start a wandb run on each rank instead of one on each node."""
    script = tmp_path / "train_llm.py"
    subprocess.run(["patch", "--output", script, SCRIPTS[chapter], PATCH], check=True)
    change_file(script, 'is_tracked = os.environ["LOCAL_RANK"] == "0"', "is_tracked = True")
    args = [*SHORT, "--num-steps", 4, "--wandb", "offline", "--save-dir", tmp_path, "-e", "run"]
    run_or_fail(2, [(script, args)], tmp_path / "jobs")
    found, expected = wandb_files.rows_of(tmp_path / "run"), metrics(tmp_path / "run")
    assert found["run"] == expected and sorted(found) == ["run", "run-1"]
    # Do not compare speed and memory, because they differ between ranks.
    for step in range(1, 5):
        for name in ("loss", "grad_norm", "lr"):
            assert found["run-1"][step][name] == expected[step][name]
