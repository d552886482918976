"""Draw what speed.py has measured.

python benchmarks/report.py benchmarks/results/speed.json assets/speed.png
"""

import json
import sys
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure
from matplotlib.patches import Patch

COLORS = {"chapter": "#2a78d6", "peer": "#8a8a86", "floor": "#e0a030"}
FLOORS = ("bare", "pure-bf16", "matmul")
SHOWN = ("bare compiled", "01 compiled", "trainer compiled", "bare", "01", "trainer", "02@2")
SHOWN += ("accelerate@2", "04@2", "zero-3@2")  # the README's table has all


def kind(name):
    """Return whether a contender is a chapter, a peer, or what has nothing around the loop."""
    if name[0].isdigit():
        return "chapter"
    return "floor" if name.startswith(FLOORS) else "peer"


def draw_speed(results, path):
    """Draw contenders' speeds as shares of chapter 01's in the same round, slowest below."""
    rounds = results["speeds"]
    shares = {name: [speeds[name] / speeds["01"] for speeds in rounds] for name in SHOWN}
    names = sorted(shares, key=lambda name: median(shares[name]))
    figure = Figure(figsize=(8.3, 0.8 + 0.26 * len(names)), dpi=100, layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(names):
        low, middle, high = min(shares[name]), median(shares[name]), max(shares[name])
        axes.barh(place, middle, color=COLORS[kind(name)], height=0.7)
        axes.plot([low, high], [place, place], color="black", lw=1)
        axes.text(high + 0.015, place, f"{middle:.2f}", va="center", fontsize=8)
    axes.axvline(1, color="black", lw=0.8, ls=":")
    axes.set_yticks(range(len(names)), [label(name) for name in names], fontsize=8)
    axes.set(xlabel="speed, of chapter 01 in the same round; the line spans all rounds")
    axes.set_ylim(-0.7, len(names) - 0.3)
    words = {"floor": "nothing around the loop", "chapter": "the chapters", "peer": "others"}
    handles = [Patch(color=COLORS[name], label=word) for name, word in words.items()]
    below = {"loc": "upper center", "bbox_to_anchor": (0.4, -0.17), "ncols": 3}
    axes.legend(handles=handles, frameon=False, **below)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def label(name):
    """Return a contender's name for a reader: chapter 02, 2 ranks, compiled."""
    first, *rest = name.split()
    who, _, ranks = first.partition("@")
    parts = [f"chapter {who}" if who.isdigit() else who]
    parts += [f"{ranks} rank{'s' * (ranks != '1')}"] if ranks else []
    return ", ".join([*parts, *rest])


def main():
    """Draw it."""
    results, picture = map(Path, sys.argv[1:])
    draw_speed(json.loads(results.read_text()), picture)


if __name__ == "__main__":
    main()
