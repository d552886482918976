"""Measure what watched.py costs a step of chapter 01: switched on and off within one run.

Here:  python benchmarks/watching.py --output benchmarks/results/watching.json

The 7M Llama of the other benchmarks; ten steps each, in turn. A block counts as its mean step
without the fastest and the slowest, as a share of the blocks before and after it.
"""

import json
import sys
import time
from pathlib import Path
from statistics import fmean, median

from contenders import ROOT, Race, settle
from speed import describe_machine, keep, measured_apart, parser_of

BLOCK = 10  # steps; in each block watched.py looks at losses and weights once


def measure():
    """Take steps, watched and not; print the seconds of the median step of each block."""
    sys.path.insert(0, str(ROOT / "diagnosing-errors"))
    import watched

    race = Race()
    args, device, chapter = race.args, race.device, race.script
    samples = chapter.Samples(race.samples)
    model = race.model().to(device)
    optimizer, _ = race.optimizer(model)
    steps = watched.Steps(BLOCK)
    watch = watched.Watch(Path(args.save_dir, "ranks"), steps, 60)
    working = {name: getattr(watch, name) for name in ("look", "tell", "dump_if_due")}
    medians = []
    for block in range(args.num_steps // BLOCK):
        on = block % 2
        steps.fault = None if on else "off"  # which keeps hooks from doing anything
        for name, work in working.items():
            setattr(watch, name, work if on else lambda: None)
        seconds = []
        for step in range(block * BLOCK + 1, (block + 1) * BLOCK + 1):
            begun = time.perf_counter()
            chapter.train_step(args, model, optimizer, samples, step, device)
            settle(device)
            seconds.append(time.perf_counter() - begun)
        medians.append(fmean(sorted(seconds)[1:-1]))
    print(json.dumps({"medians": medians, "seen": len(steps.checks), "fault": steps.fault}))


def main():
    """Measure in a process with the harness's settings; print the shares."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--blocks", type=int, default=25, help="of ten steps each; the first warms up")
    args = parser.parse_args()
    found = measured_apart(__file__, args.blocks * BLOCK)
    if not found["seen"]:
        sys.exit(f"watching.py: error: it watched nothing: {found['fault']}")
    blocks = found["medians"]
    shares = [blocks[at] / fmean([blocks[at - 1], blocks[at + 1]])
              for at in range(2, len(blocks) - 1)]  # fmt: skip
    result = {"watched": shares[1::2], "alone": shares[::2]}
    for name, some in result.items():
        print(f"{name:8} {median(some):.3f}   {min(some):.3f} – {max(some):.3f}")
    keep(args.output, describe_machine(), {"shares": result})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:  # as which it starts itself anew
        del sys.argv[1]
        measure()
    else:
        main()
