"""TensorBoard's files, wandb's offline files and an MLflow store hold what metrics.jsonl holds."""

import json
import os
import signal
import subprocess
import sys
import time
from subprocess import PIPE, Popen

import numpy as np
import pytest
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import wandb_files
from conftest import ROOT, SCRIPTS, SHORT, metrics, run_command, run_or_fail

TOOL = ROOT / "tools/track.py"
PATCH = ROOT / "related-topics/tracking/each-node.patch"


def add_rows(run_dir, *steps, shift=0.0):
    """Write rows of metrics, and half of a row, as a kill may."""
    run_dir.mkdir(exist_ok=True)
    with open(run_dir / "metrics.jsonl", "a") as file:
        for step in steps:
            row = {"step": step, "loss": 1 / (step + 3) + shift, "mfu": None}
            print(json.dumps(row | {"val_loss": 0.1 * step} if step % 2 == 0 else row), file=file)
        file.write('{"step": 99, "lo\n')


def track(*words, **variables):
    """Run the tool; return its result."""
    return run_command(TOOL, *words, env=os.environ | variables)


def rows_in_events(run_dir):
    """Return the metrics by step that TensorBoard reads, as 32-bit floats."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    events.Reload()
    rows = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert name not in rows.setdefault(event.step, {}), f"{name} is there twice"
            rows[event.step][name] = np.float32(event.value)
    return rows


def rows_in_metrics(run_dir, kind=np.float32):
    """Return the metrics by step of metrics.jsonl, without those that have no value."""
    return {
        step: {
            name: kind(value) for name, value in row.items() if name != "step" and value is not None
        }
        for step, row in metrics_of(run_dir).items()
    }


def metrics_of(run_dir):
    """Return the last row of each step, and leave out the half rows."""
    rows = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        if line.endswith("}"):
            row = json.loads(line)
            rows[row["step"]] = row
    return rows


def test_tensorboard_gets_the_last_row_of_each_step(tmp_path):
    add_rows(tmp_path / "one", 0, 1, 2, 3, 4)
    add_rows(tmp_path / "one", 3, 4, 5, shift=1.0)
    add_rows(tmp_path / "two", 0, 10)
    for _ in range(2):  # The second time, the files are written again from the beginning.
        done = run_command(TOOL, "one", "nosuch", "two", cwd=tmp_path, check=True)
        assert done.stdout == "one: 6 steps\ntwo: 2 steps\n" and done.stderr == "nosuch: no run\n"
    for name in ("one", "two"):
        assert rows_in_events(tmp_path / name) == rows_in_metrics(tmp_path / name)
    assert rows_in_events(tmp_path / "one")[4]["loss"] > 1


def test_missing_run_is_reported_in_one_line(tmp_path):
    done = run_command(TOOL, "nosuch", cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "track.py: error: cannot read nosuch/metrics.jsonl" in done.stderr


def test_missing_package_is_reported_in_one_line(tmp_path):
    add_rows(tmp_path / "run", 0)
    (tmp_path / "mlflow.py").write_text("raise ImportError('No module named mlflow')")
    done = track(tmp_path / "run", "--to", "mlflow", PYTHONPATH=str(tmp_path))
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and "--to mlflow: No module named mlflow; install" in line


def test_following_tool_sends_a_run_through_a_resume(tmp_path):
    add_rows(tmp_path, 0, 1, 2, 3, 4)
    with Popen([sys.executable, TOOL, tmp_path, "--follow"], stdout=PIPE, text=True) as tool:
        try:
            for steps, shift in [((), 0.0), ((5,), 0.0), ((4, 5, 6), 1.0), ((7,), 1.0)]:
                add_rows(tmp_path, *steps, shift=shift)
                deadline = time.monotonic() + 60
                while not (found := list(tmp_path.glob("events*"))) or (
                    rows_in_events(tmp_path) != rows_in_metrics(tmp_path)
                ):
                    assert time.monotonic() < deadline and tool.poll() is None, found
                    time.sleep(0.2)
            tool.send_signal(signal.SIGINT)
            assert tool.communicate(timeout=30)[0] == f"{tmp_path}: 8 steps\n"
            assert tool.returncode == 0
        finally:
            tool.kill()
    assert rows_in_events(tmp_path)[5]["loss"] > 1


def test_wandb_continues_the_same_run_after_a_second_start(tmp_path):
    run_dir = tmp_path / "run"
    for steps, shift in [((0, 1, 2, 3, 4), 0.0), ((3, 4, 5), 1.0)]:
        add_rows(run_dir, *steps, shift=shift)
        done = track(run_dir, "--to", "wandb", WANDB_MODE="offline")
        assert done.returncode == 0, done.stderr
    assert wandb_files.rows_of(run_dir) == {"run": metrics_of(run_dir)}
    ids = {path.name.partition("-")[2] for path in run_dir.glob("wandb/offline-run-*/*.wandb")}
    assert len(ids) == 1, "the second start has begun a new wandb run"


def test_mlflow_gets_each_new_value_once(tmp_path):
    run_dir, uri = tmp_path / "run", f"file:{tmp_path}/store"
    variables = {"MLFLOW_TRACKING_URI": uri, "MLFLOW_ALLOW_FILE_STORE": "true"}
    for steps, shift in [((0, 1, 2, 3, 4), 0.0), ((), 0.0), ((3, 4, 5), 1.0)]:
        add_rows(run_dir, *steps, shift=shift)
        done = track(run_dir, "--to", "mlflow", **variables)
        assert done.returncode == 0, done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        client = MlflowClient(uri)
    [found] = client.search_runs([client.get_experiment_by_name("runs").experiment_id])
    rows, num_values = {}, 0
    for name in ("loss", "val_loss"):
        history = client.get_metric_history(found.info.run_id, name)
        num_values += len(history)
        for metric in sorted(history, key=lambda metric: metric.timestamp):
            rows.setdefault(metric.step, {})[name] = metric.value
    assert found.info.run_name == "run" and found.info.status == "FINISHED"
    assert rows == rows_in_metrics(run_dir, float)
    assert num_values == 5 + 3 + 3, "a value that has not changed was sent again"


@pytest.mark.slow
@pytest.mark.parametrize("chapter", ["03", "08"])
def test_patched_chapter_tracks_each_rank(tmp_path, chapter):
    """As the page has it, with a wandb run on each rank."""
    script = tmp_path / "train_llm.py"
    subprocess.run(["patch", "--output", script, SCRIPTS[chapter], PATCH], check=True)
    text = script.read_text()
    assert text.count('is_tracked = os.environ["LOCAL_RANK"] == "0"') == 1
    script.write_text(
        text.replace('is_tracked = os.environ["LOCAL_RANK"] == "0"', "is_tracked = True")
    )
    args = [*SHORT, "--wandb", "offline", "--save-dir", tmp_path, "-e", "run"]
    run_or_fail(2, [(script, args)], tmp_path / "jobs")
    found, expected = wandb_files.rows_of(tmp_path / "run"), metrics(tmp_path / "run")
    assert found["run"] == expected and sorted(found) == ["run", "run-1"]
    for step in range(1, 21):
        assert wandb_files.numbers(found["run-1"][step]) == wandb_files.numbers(expected[step])


def test_file_that_a_kill_has_cut_is_read_up_to_the_cut(tmp_path):
    add_rows(tmp_path / "run", *range(40))
    assert track(tmp_path / "run", "--to", "wandb", WANDB_MODE="offline").returncode == 0
    path = next(path for path in (tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb"))
    whole, data = list(wandb_files.records(path)), path.read_bytes()
    assert len(whole) > 40
    for size in range(7, len(data), 101):
        (tmp_path / "cut.wandb").write_bytes(data[:size])
        found = list(wandb_files.records(tmp_path / "cut.wandb"))
        assert found == whole[: len(found)]
