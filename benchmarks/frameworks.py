"""Compare chapters 03 and 04 with the same training in frameworks: speed, memory, saves.

All:     python benchmarks/frameworks.py --output benchmarks/results/frameworks.json
Closer:  python benchmarks/frameworks.py --only 03 deepspeed --rounds 5

All train the model of speed.py from the same weights on the same samples, on as many ranks, and
take turns; a ratio is one of two runs in the same round. Nothing else should run meanwhile.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from speed import ROOT, WINDOW, describe_machine, keep, make_model_folder, run, speed_of

FOLDER = ROOT / "alternative-frameworks"
BATCH = ["--global-batch-size", "8", "--batch-size", "8"]  # of speed.py


def parse_args():
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--output", type=Path, help="a JSON file for machine and results")
    add("--rounds", type=int, default=3, help="how often each runs")
    add("--steps", type=int, default=30, help=f"of each run; the first {WINDOW} warm it up")
    add("--ranks", type=int, default=2, help="of each run")
    add("--only", nargs="+", help="who takes part, such as 03 deepspeed-zero-3")
    return parser.parse_args()


def contenders(ranks, folder):
    """Return who takes part, as speed.py has them: script or chapter, ranks, flags."""
    found = {name: (name, ranks, []) for name in ("03", "04")}
    for script in sorted(FOLDER.glob("*/train_llm.py")):
        found[script.parent.name] = (str(script), ranks, [])
    path = f"{folder}/zero-3.json"
    line = ["--brief", "--write-config", "deepspeed", path, "--gpus-per-node", str(ranks), *BATCH]
    subprocess.run([sys.executable, ROOT / "tools/planner/will_it_fit.py", *line], check=True)
    script = found["deepspeed"][0]
    found["deepspeed-zero-3"] = (script, ranks, ["--deepspeed-config", path])
    return found


def measured(result):
    """Return of one run: tokens a second, GiB at most, seconds of the last save."""
    memory = max(row["peak_memory_gib"] for row in result["rows"])
    return {
        "speed": speed_of(result),
        "memory": memory,
        "save": result["timing"]["save_checkpoint"][-1],
    }


def compare(rounds):
    """Return of each the ratios to chapter 03 and 04, in the rounds and their median."""
    found = {}
    for name in rounds[0]:
        for chapter in ("03", "04"):
            for what in rounds[0][name] if chapter in rounds[0] and name != chapter else ():
                values = [each[name][what] / each[chapter][what] for each in rounds]
                row = {"median": median(values), "rounds": values}
                found[f"{name} / {chapter}, {what}"] = row
    return found


def main():
    """Let them take turns; print the ratios and, with --output, write all of it down."""
    args, rounds = parse_args(), []
    with tempfile.TemporaryDirectory() as folder:
        make_model_folder(f"{folder}/llama")
        all_of_them = contenders(args.ranks, folder)
        for number in range(args.rounds):
            rounds.append({})
            for name in args.only or all_of_them:
                result = run(all_of_them[name], args.steps, folder, f"{name}-{number}")
                rounds[-1][name] = measured(result)
                print(f"round {number + 1}: {name} {rounds[-1][name]}", flush=True)
    ratios = compare(rounds)
    keep(args.output, describe_machine(), {"ratios": ratios, "rounds": rounds})
    for name, row in ratios.items():
        print(f"{name:40} {row['median']:.2f}")


if __name__ == "__main__":
    main()
