"""Read from traces of benchmarks/where.py when two ranks of chapter 02 compute and send in a step.

Here:  make pictures      run this program, and write benchmarks/results/step.json
"""

import json
import sys
from pathlib import Path

from chapters import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from harness import describe_machine, keep
from where import select


def spans_of(trace):
    """Return the parts of a rank's last step, such as the forward pass, by name.

    A part has a list of pairs: the start and the length of a span of time in ms.
    """
    content = json.loads(trace.read_text())
    events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    last = max(select(events, "user_annotation", "step"), key=lambda event: event["ts"])
    end = last["ts"] + last["dur"]
    events = [event for event in events if last["ts"] <= event["ts"] < end]
    # Each trace counts time from its own start, so add this start to all times.
    offset = content.get("baseTimeNanoseconds", 0) / 1e6

    def spans(kind, name):
        found = select(events, kind, name)
        return [(event["ts"] / 1e3 + offset, event["dur"] / 1e3) for event in found]

    found = {name: spans("user_annotation", name) for name in ("forward", "clip and step")}
    nodes = spans("cpu_op", "autograd::engine::evaluate_function")
    first, last = min(start for start, _ in nodes), max(map(sum, nodes))
    found["backward"] = [(first, last - first)]
    # End each all-reduce at the latest when clipping starts, because clipping uses the result, and
    # Gloo's thread records the end too late.
    used = min(start for start, _ in found["clip and step"])
    sums = spans("user_annotation", "gloo:all_reduce")
    found["all-reduce"] = [(start, min(length, used - start)) for start, length in sums]
    return found


def main():
    """Read the traces of all ranks, and write the spans of each rank's last step to a file.

    The first argument is the folder of the traces. The second argument is the path of the file.
    """
    traces, output = map(Path, sys.argv[1:])
    ranks = [spans_of(trace) for trace in sorted(traces.glob("02-rank*.json"))]
    keep(output, describe_machine(), {"ranks": ranks})


if __name__ == "__main__":
    main()
