"""Compare chapters 03 and 04 with the same training in frameworks: speed, memory, saves.

All:     python benchmarks/frameworks.py --output benchmarks/results/frameworks.json
Closer:  python benchmarks/frameworks.py --only 03 deepspeed --rounds 5

All runs train the model of speed.py from the same weights on the same samples, on the same number
of ranks, and take turns. A ratio is one of two runs in the same round.
"""

import sys
import tempfile
from statistics import median

import harness
import speed
from harness import ROOT


def parse_args():
    """Parse the arguments."""
    parser = harness.parser_of(__doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="how often each contender runs")
    add("--steps", type=int, default=30, help=f"of each run; the first {speed.WINDOW} warm it up")
    add("--ranks", type=int, default=2, help="of each run")
    add("--only", nargs="+", help="contenders, such as 03 deepspeed-zero-3")
    return parser.parse_args()


def contenders(ranks, folder):
    """Return each contender as speed.py has them: a script or chapter, its ranks and its flags."""
    found = {name: (name, ranks, []) for name in ("03", "04")}
    for script in sorted((ROOT / "alternative-frameworks").glob("*/train_llm.py")):
        found[script.parent.name] = (script, ranks, [])
    path = f"{folder}/zero-3.json"
    sizes = f"--global-batch-size {speed.BATCH} --batch-size {speed.BATCH} --gpus-per-node {ranks}"
    line = f"--brief --write-config deepspeed {path} {sizes}"
    harness.call([sys.executable, harness.PLANNER, *line.split()])
    found["deepspeed-zero-3"] = (found["deepspeed"][0], ranks, ["--deepspeed-config", path])
    return found


def compare(rounds):
    """Return the ratios of each contender to chapters 03 and 04, in the rounds and their median."""
    found = {}
    for name in rounds[0]:
        for chapter in ("03", "04"):
            for number in rounds[0][name] if chapter in rounds[0] and name != chapter else ():
                values = [runs[name][number] / runs[chapter][number] for runs in rounds]
                row = {"median": median(values), "rounds": values}
                found[f"{name} / {chapter}, {number}"] = row
    return found


def main():
    """Let the contenders take turns; print and keep the ratios."""
    args, machine = parse_args(), harness.describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        harness.make_7m_llama(f"{folder}/llama")
        everyone = contenders(args.ranks, folder)

        def measure(name, number):
            result = speed.run(everyone[name], args.steps, folder, f"{name}-{number}")
            memory = max(row["peak_memory_gib"] for row in result["rows"])
            save = result["timing"]["save_checkpoint"][-1]
            return {"speed": speed.speed_of(result), "memory": memory, "save": save}

        for rounds in harness.take_turns(args.only or everyone, args.rounds, measure, str):
            ratios = compare(rounds)
            harness.keep(args.output, machine, {"ratios": ratios, "rounds": rounds})
    for name, row in ratios.items():
        print(f"{name:40} {row['median']:.2f}")


if __name__ == "__main__":
    main()
