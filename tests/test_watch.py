"""watch.py of diagnosing-errors: what it marks and what not, what it reads, how it looks."""

import contextlib
import fcntl
import importlib.util
import json
import os
import pty
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace

import pytest

from cluster.cluster import until
from conftest import ROOT, SHORT, family, kill_all, torchrun

TOOL = ROOT / "diagnosing-errors/watch.py"
SMI_LINE = "0, GPU-aa, 98, 350.20, 61, 1980"


@pytest.fixture(scope="module")
def watch():
    """The tool as a module."""
    spec = importlib.util.spec_from_file_location("watch", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def state(watch, tmp_path):
    """Return a function that makes the State of a healthy run, with changes to some of its ranks.

    A step takes 1 s, of which a rank works 0.5 s. Unless rows of metrics are given, they say that
    the others have long been waiting for the last of the ranks that are changed.
    """

    def make(changes=(), world_size=8, rows=None, **common):
        rows = slowed_by(max(changes, default=0)) if rows is None else rows
        healthy = {
            "step": 20,
            "age": 1.0,
            "life": 100.0,
            "in_phase": 0.3,
            "since_step": 0.5,
            "step_seconds": 1.0,
            "data_seconds": 0.01,
            "local_seconds": 0.5,
            "host_memory_gib": 1.0,
            "host_memory_gib_first": 1.0,
            "world_size": world_size,
        }
        ranks = [
            watch.Rank(rank=rank, host=f"gpu{rank // 8}", **(healthy | common))
            for rank in range(world_size)
        ]
        for rank, change in dict(changes).items():
            ranks[rank] = replace(ranks[rank], **change)
        return watch.State(tmp_path, ranks, list(rows))

    return make


def kinds(found):
    """Return the kinds of marks and the ranks they name."""
    return [(mark.kind, [rank.rank for rank in mark.ranks]) for mark in found]


def beat(rank, world_size=2, ago=0.0, clock=0.0, **changes):
    """Return a heartbeat as a rank writes it, on a host whose clock is wrong by so many seconds."""
    now = time.time() + clock - ago
    return {
        "rank": rank,
        "local_rank": rank,
        "world_size": world_size,
        "host": f"gpu{rank}",
        "pid": 1,
        "started": now - 100,
        "time": now,
        "phase": "compute",
        "step": 20,
        "since": now - 0.3,
        "step_ended": now - 0.5,
        "step_seconds": 1.0,
        "data_seconds": 0.01,
        "local_seconds": 0.5,
        "host_memory_gib": 1.0,
        "host_memory_gib_first": 1.0,
        "open_files": 35,
        "device": "cpu",
        "stall_after": 300,
        "error": None,
    } | changes


def slowed_by(rank):
    """Return rows of metrics that say that the others have long been waiting for a rank."""
    return [{"step": step, "skew": 0.3, "slowest_rank": rank} for step in range(20)]


def write_run(folder, beats, rows=(), age=-60.0):
    """Make a run's folder of heartbeats that are so many seconds old, and of rows of metrics.

    Those of the future count as new, however long it takes until they are read.
    """
    (folder / "ranks").mkdir(parents=True, exist_ok=True)
    for told in beats:
        path = folder / "ranks" / f"{told['rank']:05}.json"
        path.with_suffix(".new").write_text(json.dumps(told))
        path.with_suffix(".new").rename(path)
        os.utime(path, (time.time() - age,) * 2)
    write_rows(folder, rows)
    return folder


def write_rows(folder, rows):
    """Write metrics.jsonl."""
    if rows:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def once(run, *options, **variables):
    """Run watch.py --once on a folder."""
    return subprocess.run(
        [sys.executable, TOOL, run, "--once", *map(str, options)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"COLUMNS": "140"} | variables,
    )


# ---- what is marked --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "common",
    [
        {},
        {"step_seconds": 40.0, "local_seconds": 39.0, "in_phase": 30.0, "since_step": 35.0},
        {"phase": "start", "step": 0, "since_step": None, "step_seconds": None,
         "local_seconds": None, "in_phase": 5000.0, "age": 20.0},
        {"step": 1, "since_step": None, "step_seconds": None, "local_seconds": None,
         "in_phase": 250.0},
        {"step": 2, "step_seconds": None, "local_seconds": None, "life": 70.0, "since_step": 40.0,
         "in_phase": 40.0},
        {"phase": "evaluation", "in_phase": 600.0, "since_step": 600.0},
        {"phase": "checkpoint", "in_phase": 600.0, "since_step": 600.0, "age": 20.0},
        {"phase": "export", "in_phase": 60.0, "since_step": 60.0},
        {"phase": "data", "in_phase": 0.1, "since_step": 600.0},  # just after a checkpoint
        {"phase": "finished", "age": 1e6},
        {"phase": "stopped", "age": 1e6},
        {"step_seconds": 0.02, "local_seconds": 0.01, "in_phase": 9.0, "since_step": 9.0},
        {"host_memory_gib": 1.4},
        {"host_memory_gib": 10.6, "host_memory_gib_first": 10.0},
    ],
)  # fmt: skip
def test_healthy_runs_have_no_mark(watch, state, common):
    assert kinds(watch.marks(state(**common))) == []


@pytest.mark.parametrize(("local", "marked"), [(0.60, False), (0.66, True), (0.98, True)])
def test_a_rank_that_works_longer_is_marked(watch, state, local, marked):
    found = watch.marks(state({5: {"local_seconds": local}}))
    assert kinds(found) == ([("slow", [5])] if marked else [])


def test_of_two_ranks_one_that_takes_half_as_long_again_is_marked(watch, state):
    assert kinds(watch.marks(state({1: {"local_seconds": 0.75}}, 2))) == [("slow", [1])]


def test_what_is_slow_is_its_data_or_its_computing(watch, state):
    (data,) = watch.marks(state({5: {"local_seconds": 0.9, "data_seconds": 0.4}}))
    (computing,) = watch.marks(state({5: {"local_seconds": 0.9, "data_seconds": 0.02}}))
    assert data.text.endswith("in its data") and computing.text.endswith("in its computing")


def test_little_work_in_a_long_step_is_no_reason_for_a_mark(watch, state):
    """Three times as long as the others, but for a twentieth of the step."""
    assert kinds(watch.marks(state({5: {"local_seconds": 0.09}}, local_seconds=0.03))) == []


@pytest.mark.parametrize(
    ("skews", "marked"),
    [([], False), ([0.2] * 2, False), ([0.2] * 3, True), ([0.01, 0.4, 0.4], False),
     ([0.01, 0.2, 0.2, 0.2, 0.2], True)],
)  # fmt: skip
def test_a_rank_is_slow_only_if_it_lasts(watch, state, skews, marked):
    rows = [{"step": n, "skew": skew, "slowest_rank": 5} for n, skew in enumerate(skews)]
    found = watch.marks(state({5: {"local_seconds": 0.9}}, rows=rows))
    assert kinds(found) == ([("slow", [5])] if marked else [])


@pytest.mark.parametrize(("step", "marked"), [(41, True), (40, True), (17, False)])
def test_losses_of_other_steps_are_not_compared(watch, state, step, marked):
    changes = {1: {"losses": (4.2, 4.3), "step": step}}
    found = watch.marks(state(changes, 3, losses=(3.2, 3.3), step=41))
    assert kinds(found) == ([("loss", [1])] if marked else [])


@pytest.mark.parametrize(
    "losses, marked",
    [
        ([5.0, 4.0, 3.5, 3.3, 3.2], False),
        ([3.3, 3.2, 3.3, 3.1, 4.5], True),
        ([3.3, 3.2, 3.3, 3.1, 3.5], False),
        ([3.0, 9.0], False),  # nobody knows yet what is usual
        ([3.0, float("nan")], True),
    ],
)
def test_a_loss_that_jumps_is_marked(watch, state, losses, marked):
    rows = [{"step": 10 * number, "loss": loss} for number, loss in enumerate(losses, 1)]
    assert kinds(watch.marks(state({}, rows=rows))) == ([("loss", [])] if marked else [])


def test_a_stall_names_the_rank_that_does_something_else(watch, state):
    stuck = {"in_phase": 12.0, "since_step": 12.5}
    found = watch.marks(state({3: stuck | {"phase": "data"}}, **stuck))
    assert kinds(found) == [("stalled", [3])]
    assert (
        "7 of 8 ranks are in compute of step 20, rank 3 (gpu0) in data of step 20" in found[0].text
    )


def test_a_stall_of_all_in_the_same_place_names_all(watch, state):
    found = watch.marks(state(in_phase=51.0, since_step=51.0, step_seconds=10.0))
    assert kinds(found) == [("stalled", list(range(8)))] and "all ranks are in" in found[0].text
    assert kinds(watch.marks(state(in_phase=49.0, since_step=49.0, step_seconds=10.0))) == []


def test_a_stall_before_any_step_has_ended(watch, state):
    early = {"step": 1, "since_step": None, "step_seconds": None, "local_seconds": None}
    found = watch.marks(state(**early, in_phase=301.0))
    assert kinds(found) == [("stalled", list(range(8)))]


def test_an_evaluation_may_take_minutes_but_not_for_ever(watch, state):
    found = watch.marks(state(phase="evaluation", in_phase=1201.0, since_step=1201.0))
    assert kinds(found) == [("stalled", list(range(8)))]


def test_silent_ranks(watch, state):
    assert kinds(watch.marks(state({2: {"age": 6.5}}))) == [("silent", [2])]
    (found,) = watch.marks(state(age=7.0))
    assert found.text.startswith("no heartbeat of any rank for 7.0 s")


def test_the_rank_that_failed_first_is_named_first(watch, state):
    error = "Traceback (most recent call last):\n  line 1\nValueError: boom\n"
    changes = {
        1: {"phase": "failed", "age": 3.0},
        6: {"phase": "failed", "age": 4.0, "error": error},
    }
    (found,) = watch.marks(state(changes))
    assert found.text == "rank 6 (gpu0) in step 20: ValueError: boom; then rank 1 (gpu0)"


def test_a_rank_that_went_without_a_word_before_another_failed_comes_first(watch, state):
    changes = {1: {"age": 4.0}, 6: {"phase": "failed", "age": 2.0, "error": "closed by peer"}}
    assert kinds(watch.marks(state(changes))) == [("silent", [1]), ("failed", [6])]
    changes[6]["age"] = 5.0  # and one that was ended because of it comes later
    assert kinds(watch.marks(state(changes))) == [("failed", [6]), ("silent", [1])]


def test_missing_ranks(watch, state):
    some = state()
    del some.ranks[4:7]
    assert kinds(watch.marks(some)) == [("missing", [4, 5, 6])]
    early = state(life=10.0, step=0, phase="start", since_step=None, step_seconds=None)
    del early.ranks[4:7]
    assert watch.marks(early) == []


def test_growing_memory(watch, state):
    found = watch.marks(state({5: {"host_memory_gib": 1.6}}))
    assert kinds(found) == [("memory", [5])]
    assert found[0].text == "rank 5 (gpu0): 1.00 GiB of host memory at first, 1.60 now"


def test_a_loss_that_is_no_number(watch, state):
    rows = [{"step": 10, "loss": 2.0}, {"step": 20, "loss": float("nan")}]
    assert kinds(watch.marks(state(rows=rows))) == [("loss", [])]
    assert watch.marks(state(rows=[*rows, {"step": 30, "loss": 2.0}])) == []


def test_names_of_many_ranks(watch):
    ranks = [watch.Rank(rank, host=f"gpu{rank // 8}.cluster") for rank in (1, 3, 4, 5, 8)]
    assert watch.who(ranks) == "ranks 1, 3–5, 8 (2 hosts)"
    assert watch.who(ranks[:1]) == "rank 1 (gpu0)"
    many = [watch.Rank(rank) for rank in range(0, 40, 2)]
    assert watch.who(many) == "ranks 0, 2, 4, 6, 8, 10 and 14 more"


# ---- what is read ----------------------------------------------------------------------------


def test_clocks_of_hosts_may_differ(watch, tmp_path):
    write_run(tmp_path, [beat(0, 3, clock=500), beat(1, 3, clock=-500), beat(2, 3)])
    state = watch.Reader(tmp_path).read()
    assert watch.marks(state) == []
    for rank in state.ranks:
        assert 0.5 <= rank.since_step < 5 and 0 <= rank.age < 5


def test_silence_is_measured_by_the_clock_of_the_files(watch, tmp_path):
    write_run(tmp_path, [beat(0)])
    write_run(tmp_path, [beat(1, clock=77)], age=20)
    reader = watch.Reader(tmp_path)
    silent = reader.read().ranks[1]
    assert 20 <= silent.age < 25 and 20.5 <= silent.since_step < 25.5
    write_run(tmp_path, [beat(1, clock=77)], age=20)  # it goes on, but its stamps are of that clock
    assert reader.read().ranks[1].age < 5


def test_in_a_folder_that_is_read_only_the_newest_file_tells_the_time(watch, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "file_clock", lambda folder: None)
    write_run(tmp_path, [beat(0)], age=50)
    write_run(tmp_path, [beat(1)], age=70)
    reader = watch.Reader(tmp_path)
    assert [round(rank.age) for rank in reader.read().ranks] == [0, 20]
    time.sleep(0.2)
    assert reader.read().ranks[0].age >= 0.2


def test_garbage_is_left_out_and_counted(watch, tmp_path):
    rows = [{"step": 10, "loss": 2.0}, ["no row"]]
    write_run(tmp_path, [beat(0), beat(1)], rows)
    ranks = tmp_path / "ranks"
    broken = [
        "",
        "{",
        "[]",
        "null",
        '{"rank": 2}',
        "\xff",
        "[" * 100_000,
        json.dumps({**beat(2), "time": "x"}),
        json.dumps({**beat(2), "time": 7}).replace("7", "1e999"),
    ]
    for number, text in enumerate(broken):
        (ranks / f"{number + 2:05}.json").write_text(text, encoding="latin-1")
    for name in ("00001.dump.json", "00001.crash", "00007.new", "dump"):
        (ranks / name).write_text("{")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('garbage\n{"step": 20, "lo')
    state = watch.Reader(tmp_path).read()
    assert len(state.ranks) == 2 and state.rows == rows[:1]
    assert state.unreadable == len(broken) + 2


def test_values_of_the_wrong_kind_count_as_not_known(watch):
    odd = {"step_seconds": "1", "local_seconds": float("nan"), "device": 3, "error": ["x"]}
    rank = watch.rank_of(json.dumps(beat(0, **odd)))
    assert (rank.step_seconds, rank.local_seconds, rank.device, rank.error) == (
        None,
        None,
        "cpu",
        None,
    )


def test_rows_are_read_as_they_come_and_anew_when_the_file_is_another(watch, tmp_path):
    reader = watch.Reader(tmp_path)
    write_rows(tmp_path, [{"step": 10}])
    assert reader.read().rows == [{"step": 10}]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2')
        file.flush()
        assert reader.read().rows == [{"step": 10}]
        file.write("0}\n")
    assert reader.read().rows == [{"step": 10}, {"step": 20}]
    (tmp_path / "metrics.new").write_text('{"step": 5}\n{"step": 6}\n{"step": 7}\n')
    (tmp_path / "metrics.new").rename(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in reader.read().rows] == [5, 6, 7]


def test_it_leaves_nothing_in_the_run(watch, tmp_path):
    write_run(tmp_path, [beat(0), beat(1)], [{"step": 10, "loss": 2.0}])
    before = sorted((path, path.stat().st_size) for path in tmp_path.rglob("*.*"))
    once(tmp_path)
    assert sorted((path, path.stat().st_size) for path in tmp_path.rglob("*.*")) == before


def test_four_thousand_ranks_take_well_under_a_second(watch, tmp_path):
    (tmp_path / "ranks").mkdir()
    write_rows(tmp_path, slowed_by(1234))
    for rank in range(4096):
        told = beat(rank, 4096, local_seconds=0.9 if rank == 1234 else 0.5)
        (tmp_path / f"ranks/{rank:05}.json").write_text(json.dumps(told))
    begun = time.process_time()
    state = watch.Reader(tmp_path).read()
    found = watch.marks(state)
    lines = watch.picture(state, found, 120, 30, bars=True)
    assert time.process_time() - begun < 1
    assert ("slow", [1234]) in kinds(found)
    assert any(parts[0].startswith("and 4,066 others like them") for parts, _ in lines)


# ---- GPUs ------------------------------------------------------------------------------------


def test_a_rank_finds_its_gpu(watch):
    text = f"a.net, {SMI_LINE}\na.net, 1, GPU-bb, [N/A], 300, 60, 1410\nwarning: x\n\n"
    found = watch.gpus_in(text)
    first, second = found["a"]
    assert (first["percent"], first["watt"], first["mhz"]) == (98, 350.2, 1980)
    assert second["percent"] is None
    assert watch.gpu_of(watch.Rank(0, device="cuda:1"), found["a"]) is second
    assert watch.gpu_of(watch.Rank(0, device="cuda:0", device_uuid="bb"), found["a"]) is second
    assert watch.gpu_of(watch.Rank(0, device="cpu"), found["a"]) is None


@pytest.fixture
def two_hosts(tmp_path):
    """A run on two hosts, and commands in the place of ssh and srun: gpu1 does not answer."""
    run = write_run(tmp_path / "run", [beat(rank, device="cuda:0") for rank in range(2)])
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("ssh", "srun"):
        script = f'#!/bin/sh\ncase "$*" in *gpu1*) exit 255;; esac\necho gpu0, {SMI_LINE}\n'
        (commands / name).write_text(script)
        (commands / name).chmod(0o755)
    return run, f"{commands}:{os.environ['PATH']}"


@pytest.mark.parametrize("how", ["--ssh", "--hosts", "--slurm-job"])
def test_a_host_that_does_not_answer_is_named(two_hosts, tmp_path, how):
    run, path = two_hosts
    (tmp_path / "hosts.txt").write_text("# ours\ngpu0\n\ngpu1 # far away\n")
    value = {"--ssh": [], "--hosts": [tmp_path / "hosts.txt"], "--slurm-job": ["7"]}[how]
    done = once(run, how, *value, PATH=path)
    _, head, first, second, note = done.stdout.splitlines()
    assert head.split()[-4:] == ["GPU", "%", "W", "°C", "MHz"][-4:]
    assert first.split()[-4:] == ["98", "350", "61", "1980"]
    assert second.split()[-4:] == ["-", "-", "-", "-"]
    assert note == "nvidia-smi does not answer on gpu1"
    assert done.returncode == 0


# ---- how it looks ----------------------------------------------------------------------------


@pytest.mark.parametrize("width", [20, 40, 80, 120, 160, 300])
@pytest.mark.parametrize("bars", [False, True])
def test_the_table_fits_the_width(watch, state, width, bars):
    gpu = {"percent": 98.0, "watt": 700.0, "celsius": 61.0, "mhz": 1980.0}
    some = state({5: {"local_seconds": 0.9}}, 1024, device_memory_gib=71.5, gpu=gpu)
    rows = watch.table(some, watch.marks(some), width, 10, bars)
    assert all(len("  ".join(parts).rstrip()) <= max(width, 40) for parts, _ in rows)
    shown = " ".join(title.strip() for title in rows[0][0])
    assert ("MHz" in shown) == (width >= 160 - 40 * (not bars))
    assert "rank" in shown and "step" in shown
    assert ("█own" in shown) == (bars and width >= 80)


def test_what_is_marked_is_shown_first_then_the_slowest(watch, state):
    some = state({5: {"local_seconds": 0.6}, 700: {"age": 8.0}, 900: {"local_seconds": 0.9}}, 1024)
    shown = watch.chosen(some.ranks, watch.marks(some), 3)
    assert [rank.rank for rank in shown] == [5, 700, 900]
    assert [rank.rank for rank in watch.chosen(some.ranks, watch.marks(some), 1)] == [700]


def test_shares_add_up(watch, state):
    one = state().ranks[0]
    assert watch.shares(one, 0.8) == pytest.approx(
        {"data": 0.01, "own": 0.49, "wait": 0.3, "rest": 0.2}
    )
    assert watch.bar(watch.shares(one, 0.8)) == "█" * 11 + "·" * 7 + "─" * 4
    assert watch.bar(watch.shares(replace(one, step_seconds=None), 0.8)) == ""


def test_the_head_tells_where_the_run_is(watch, state):
    rows = [{"step": 0, "val_loss": 5.5}, {"step": 10, "loss": 2.345678, "grad_norm": 0.51,
            "tokens_per_second": 12345.6, "skew": 0.034, "slowest_rank": 1}]  # fmt: skip
    (line,) = watch.headlines(state(rows=rows, num_steps=1000), None)
    expected = "step 20 of 1,000, loss 2.346, grad norm 0.51, 12,346 tokens/s, skew 3%, "
    assert line.partition(": ")[2] == expected + "last step 0.5 s ago, 16 min left"


# ---- once ------------------------------------------------------------------------------------


def test_once_on_a_healthy_run(tmp_path):
    done = once(write_run(tmp_path, [beat(0), beat(1)], [{"step": 10, "loss": 2.0}]))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].startswith(f"{tmp_path.name}: step 20, loss 2, last step")
    assert len(done.stdout.splitlines()) == 4 and "next:" not in done.stdout


def test_once_on_a_run_with_a_straggler(tmp_path):
    done = once(write_run(tmp_path, [beat(0), beat(1, local_seconds=0.95)], slowed_by(1)))
    assert done.returncode == 1
    assert done.stdout.splitlines()[3].endswith("slow")
    assert "slow: rank 1 (gpu1) works 0.95 s for a step, most 0.5 s" in done.stdout
    assert done.stdout.splitlines()[-1].endswith(f"whats_wrong.py {tmp_path}")


def test_once_on_a_run_that_was_killed(tmp_path):
    done = once(write_run(tmp_path, [beat(0), beat(1)], [{"step": 10, "loss": 2.0}], age=100))
    assert done.returncode == 1
    assert f"{tmp_path.name} not running: 10 steps, last loss 2" in done.stdout
    assert "no heartbeat of any rank for 10" in done.stdout  # a look, and one 3 s later


@pytest.mark.parametrize("with_ranks", [True, False])
def test_once_on_a_run_that_is_finished(tmp_path, with_ranks):
    rows = [
        {"step": 10 * n, "loss": 3 - 0.1 * n, "tokens_per_second": 1000 * n, "skew": 0.02 * n,
         "slowest_rank": n % 3 and 1}
        for n in range(1, 6)
    ]  # fmt: skip
    write_run(tmp_path, [beat(rank, phase="finished") for rank in range(2)], rows, age=5000)
    (tmp_path / "model").mkdir()
    if not with_ranks:
        shutil.rmtree(tmp_path / "ranks")
    done = once(tmp_path)
    assert done.returncode == 0
    assert done.stdout.splitlines()[:2] == [
        f"{tmp_path.name} finished: 50 steps, last loss 2.5, median 3,000 tokens/s",
        "largest skew 10% at step 50, slowest most often rank 1: 4 of 5 times",
    ]


def test_once_on_a_run_of_a_chapter(tmp_path):
    write_rows(tmp_path, [{"step": 10, "loss": 2.0, "tokens_per_second": None}])
    done = once(tmp_path)
    assert done.returncode == 0
    head, note = done.stdout.splitlines()
    assert head == f"{tmp_path.name}: step 10, loss 2" and "metrics.jsonl" in note


def test_json(tmp_path):
    slow = [beat(0), beat(1, local_seconds=0.95)]
    lost = {"step": 20, "loss": float("nan"), "grad_norm": 0.5}
    write_run(tmp_path, slow, [*slowed_by(1), lost])
    done = once(tmp_path, "--json")
    told = json.loads(done.stdout, parse_constant=pytest.fail)
    assert done.returncode == 1
    assert [(mark["kind"], mark["ranks"]) for mark in told["marks"]] == [
        ("slow", [1]),
        ("loss", []),
    ]
    assert told["step"] == 20 and told["loss"] is None and told["grad_norm"] == 0.5
    assert [rank["local_seconds"] for rank in told["ranks"]] == [0.5, 0.95]


def test_bad_arguments_are_told_in_one_line(tmp_path):
    (tmp_path / "none.txt").write_text("# no host\n")
    write_run(tmp_path / "run", [beat(0), beat(1)])
    for options, part in [
        ([tmp_path / "absent"], "there is no such folder"),
        ([tmp_path], "neither ranks/ nor metrics.jsonl"),
        ([tmp_path / "run", "--rows", "0"], "--rows must be at least 1"),
        ([tmp_path / "run", "--hosts", tmp_path / "none.txt"], "it names no host"),
        ([tmp_path / "run", "--hosts", tmp_path / "absent.txt"], "No such file"),
        ([tmp_path / "run", "--ssh", "--slurm-job", "7"], "not allowed with"),
        ([tmp_path / "run", "--twice"], "--twice"),
    ]:
        done = once(*options)
        assert done.returncode == 2, options
        assert part in done.stderr and done.stderr.count("\n") == 1 and not done.stdout


# ---- live ------------------------------------------------------------------------------------


@contextlib.contextmanager
def terminal(run, width, height=24):
    """Start the live view in a terminal; yield the process and a function that reads what it shows.

    That function returns all that was shown since it began.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    variables = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")
    }
    process = subprocess.Popen(
        [sys.executable, TOOL, run],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=variables | {"TERM": "xterm-256color"},
    )
    os.close(theirs)
    shown = bytearray()

    def read_until(text, seconds=10.0):
        deadline = time.monotonic() + seconds
        while text not in shown.decode(errors="replace") and time.monotonic() < deadline:
            if select.select([ours], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # it is closed
                    shown.extend(os.read(ours, 65536))
        assert text in shown.decode(errors="replace"), shown.decode(errors="replace")
        return shown.decode(errors="replace")

    try:
        yield process, read_until
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_live_view_ends_and_leaves_the_terminal_in_order(tmp_path, width, number, status):
    pytest.importorskip("rich")
    beats = [beat(rank, 64, local_seconds=0.9 if rank == 7 else 0.5) for rank in range(64)]
    write_run(tmp_path, beats, slowed_by(7))
    with terminal(tmp_path, width) as (process, read_until):
        shown = read_until("next: python")
        assert "\x1b[?1049h" in shown and "others like them" in shown and "slow" in shown
        process.send_signal(number)
        assert process.wait(10) == status
        shown = read_until("and 44 others like them")
    assert "Traceback" not in shown
    after = shown.rpartition("\x1b[?1049l")[2]  # the screen of before is back, and the cursor
    assert "\x1b[?25h" in shown and "slow: rank 7 (gpu7)" in after


def test_the_live_view_ends_with_the_run(tmp_path):
    pytest.importorskip("rich")
    rows = [{"step": 20, "loss": 2.0}]
    write_run(tmp_path, [beat(0), beat(1)], rows)
    with terminal(tmp_path, 80) as (process, read_until):
        read_until("last step")
        write_run(tmp_path, [beat(rank, phase="finished") for rank in range(2)], rows)
        shown = read_until("finished: 20 steps, last loss 2")
        assert process.wait(10) == 0 and "Traceback" not in shown


def test_without_rich_it_prints_pictures(watch, tmp_path, monkeypatch, capsys):
    write_run(tmp_path, [beat(0), beat(1)])
    monkeypatch.setattr(watch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(watch.sys, "argv", ["watch.py", str(tmp_path)])
    monkeypatch.setattr(watch.signal, "signal", lambda *_: None)
    ends = [beat(rank, phase="finished") for rank in range(2)]
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: write_run(tmp_path, ends))
    watch.main()
    shown = capsys.readouterr().out
    assert shown.count("pip install rich") == 1
    assert "last step" in shown and "finished: nothing was logged" in shown


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    write_run(tmp_path, [beat(0), beat(1)])
    process = subprocess.Popen(
        [sys.executable, TOOL, tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(20) == 0
    assert process.stderr.read() == ""


# ---- a real run ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_found_within_seconds(tmp_path):
    """Until then nothing is marked, from the start on."""
    options = [*SHORT, "--num-steps", 5000, "--eval-every", 5000, "--checkpoint-every", 5000]
    run = torchrun("diagnosing-errors", *options, "--save-dir", tmp_path, "-e", "run")
    try:
        healthy = []
        deadline = time.monotonic() + 90
        while not any("loss" in told.stdout for told in healthy[-1:]):
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.5)
            healthy.append(once(tmp_path / "run"))
        shown = "".join(told.stdout + told.stderr for told in healthy)
        assert not any(f"{kind}: " in shown for kind in ("silent", "stalled", "missing", "failed"))
        assert "Traceback" not in shown
        heartbeat = tmp_path / "run/ranks/00001.json"
        until(lambda: json.loads(heartbeat.read_text())["step"], 20, "rank 1 says that it trains")
        victim = json.loads(heartbeat.read_text())
        os.kill(victim["pid"], signal.SIGSTOP)
        begun = time.monotonic()
        while "silent: no heartbeat of rank 1" not in (told := once(tmp_path / "run")).stdout:
            assert time.monotonic() - begun < 20, told.stdout
        assert told.returncode == 1
    finally:
        kill_all(run, family(run))


@pytest.mark.slow
@pytest.mark.cluster
def test_gpus_of_a_slurm_job(cluster, tmp_path):
    """With a command in the place of nvidia-smi: srun must reach every host of a job in use."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '{SMI_LINE}'\n")
    smi.chmod(0o755)
    beats = [beat(rank, host=f"h{rank + 1}", device="cuda:0") for rank in range(2)]
    run = write_run(tmp_path / "run", beats)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "COLUMNS": "140"}
    env = os.environ | path
    job = ["sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null"]
    wrap = f"--wrap=srun sh -c 'touch {tmp_path}/up-$SLURM_PROCID; sleep 100'"
    number = cluster.run("head", [*job, wrap], env=env).stdout.strip()
    until(lambda: len(list(tmp_path.glob("up-*"))) == 2, 60, "the job runs")
    command = [sys.executable, TOOL, run, "--once"]
    done = cluster.run("head", [*command, "--slurm-job", number], env=env)
    rows = done.stdout.splitlines()[2:4]
    assert [row.split()[-4:] for row in rows] == [["98", "350", "61", "1980"]] * 2, done.stdout
    done = cluster.run("head", [*command, "--ssh"], env=env)  # there, PATH has no nvidia-smi
    assert "nvidia-smi does not answer on h1, h2" in done.stdout
