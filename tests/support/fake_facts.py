"""Build the facts that whats_wrong.py reads, for ranks that do not exist."""

NOW = 1_000_000.0
FLAG = ("all_reduce", "[[]]", 405, "measure")
BUCKET = ("all_reduce", "[[606976]]", 746, "train_step")
GATHER = ("all_gather", "[[21]]", 412, "gather")
STEPS = [BUCKET, BUCKET, FLAG, GATHER] * 5


def collectives(calls, pending, late=0.0):
    """Return calls as watched.py writes them, 0.1 s apart; `pending` applies to the last call."""
    records = [
        {"group": "gloo 0", "number": n, "call": f"{name} {sizes} at train_llm.py:{line} {at}",
         "called": NOW - 50 + n / 10 + late, "milliseconds": None,
         "pending": pending and n == len(calls), "patient": False}
        for n, (name, sizes, line, at) in enumerate(calls, 1)
    ]  # fmt: skip
    return records and [
        *records,
        records[-1] | {"group": "gloo 1", "patient": True, "pending": True},
    ]


STACK = [["/run/train_llm.py", 746, "train_step"]]


def rank_files(rank, size, since=60.0, calls=STEPS, pending=True, age=1.0, **changes):
    """Return the contents of the files of a rank that has been in one phase for `since` seconds.

    The other changes are values of the heartbeat, but `crash` is the text of faulthandler.
    """
    late, crash = changes.pop("late", 0.0), changes.pop("crash", "")
    beat = {
        "rank": rank, "world_size": size, "host": f"h{rank // 8}", "pid": 1000 + rank,
        "started": NOW - 500, "time": NOW, "phase": "backward", "step": 12,
        "since": NOW - since, "step_seconds": 1.0, "shard": "whole", "frame": STACK[0],
        "lines": {"train_llm.py:746 train_step": 0.9}, "memory": [0.69, 0.7, 0.7, 0.7, 0.7],
        "checks": [], "cpu": 0.0, "printed": [], "end": None,
    }  # fmt: skip
    dump = {"time": NOW, "reason": "asked", "stacks": {"MainThread": STACK}}
    dump |= {"collectives": collectives(calls, pending, late)}
    return {"beat": beat | changes, "age": age, "dump": dump, "crash": crash}


def facts_of(ranks, gone=(), stopped=(), **changes):
    """Return facts about ranks whose hosts all answer.

    The ranks in `gone` have no process, and the processes of the ranks in `stopped` are stopped.
    """
    hosts = {}
    for rank, files in ranks.items():
        states = hosts.setdefault(files["beat"]["host"], {})
        if rank not in gone:
            states[str(files["beat"]["pid"])] = "T" if rank in stopped else "S"
    hosts = {host: {"host": host, "states": states} for host, states in hosts.items()}
    return {"run": "/run/outputs/x", "free": 2**40, "ranks": ranks, "hosts": hosts} | changes


def files_of(size=4, odd=None, **changes):
    """Return the files of `size` ranks with the same changes; rank 1 may have its own changes."""
    files = {rank: rank_files(rank, size, **changes) for rank in range(size)}
    return files if odd is None else files | {1: rank_files(1, size, **odd)}


def moving_ranks(size=4, odd=None, **changes):
    """Return the files of `size` ranks that take steps; rank 1 may have further changes."""
    moving = {"since": 1.0, "pending": False} | changes
    return files_of(size, moving | (odd or {}), **moving)
