"""Facts about ranks that are nowhere, as whats_wrong.py reads them."""

SCRIPT = "/run/train_llm.py"
NOW = 1_000_000.0
FLAG = ("all_reduce", "[[]]", 405, "measure")
BUCKET = ("all_reduce", "[[606976]]", 746, "train_step")
GATHER = ("all_gather", "[[21]]", 412, "gather")
STEPS = [BUCKET, BUCKET, FLAG, GATHER] * 5


def collectives(calls, pending, late=0.0):
    """Return calls as watched.py writes them, of which the last may be pending, 0.1 s each."""
    made = [
        {"group": "gloo 0", "number": n, "call": f"{name} {sizes} at train_llm.py:{line} {at}",
         "called": NOW - 50 + n / 10 + late, "milliseconds": None,
         "pending": pending and n == len(calls), "patient": False}
        for n, (name, sizes, line, at) in enumerate(calls, 1)
    ]  # fmt: skip
    return [*made, made[-1] | {"group": "gloo 1", "patient": True, "pending": True}]


def frames(*own, inner=("/x/site-packages/torch/distributed/distributed_c10d.py", "all_reduce")):
    """Return a main thread's frames: (line, function) of the script, then a package's."""
    stack = [[SCRIPT, line, name] for line, name in own]
    return stack + ([[inner[0], 3252, inner[1]]] if inner else [])


REDUCE = frames((746, "train_step"))
IN_DATA = frames((735, "batch_at"), inner=None)


def rank_files(rank, size, since=60.0, calls=STEPS, pending=True, stack=REDUCE, age=1.0, **changes):
    """Return what the files of a rank say that has been in one place for so many seconds."""
    beat = {
        "rank": rank, "world_size": size, "host": f"h{rank // 8}", "pid": 1000 + rank,
        "started": NOW - 500, "time": NOW, "written": NOW, "phase": "backward", "step": 12,
        "since": NOW - since, "step_ended": NOW - since, "step_seconds": 1.0, "shard": "whole",
        "phases": {"backward": 0.8}, "lines": {"/run/train_llm.py:746 train_step": 0.9},
        "memory": [0.69, 0.7, 0.7, 0.7, 0.7], "open_files": 35, "files_limit": 1024,
        "checks": [], "bad": None, "cpu": 0.0, "error": None,
        "asked_to_end": None, "printed": [], "end": None,
    }  # fmt: skip
    late = changes.pop("late", 0.0)
    dump = {"time": NOW, "reason": "asked", "stacks": {"MainThread": stack}}
    dump |= {"collectives": collectives(calls, pending, late)}
    beat |= changes.pop("beat", {})
    return {"beat": beat, "age": age, "dump": dump, "crash": ""} | changes


def facts_of(ranks, gone=(), stopped=(), **changes):
    """Return facts about these ranks, all of whose hosts answer; `gone` have no process."""
    hosts = {}
    for rank, files in ranks.items():
        host = files["beat"]["host"]
        hosts.setdefault(host, {"host": host, "states": {}, "stacks": {}})
        if rank not in gone:
            hosts[host]["states"][str(files["beat"]["pid"])] = "T" if rank in stopped else "S"
    return {"run": "/run/outputs/x", "free": 2**40, "ranks": ranks, "hosts": hosts} | changes


def files_of(size=4, odd=None, at=1, **same):
    """Return the files of so many ranks, which have the same changes, but for an odd one."""
    which = {at: odd} if odd is not None else {}
    return {rank: rank_files(rank, size, **which.get(rank, same)) for rank in range(size)}


def moving(size=4, **changes):
    """Return the files of ranks that take steps."""
    return files_of(size, since=1.0, pending=False, **changes)
