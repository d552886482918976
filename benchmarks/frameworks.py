"""Compare chapters 03 and 04 with the same training in frameworks: speed, memory, saves.

All:     python benchmarks/frameworks.py --output benchmarks/results/frameworks.json
Closer:  python benchmarks/frameworks.py --only 03 deepspeed --rounds 5

All runs train the model of speed.py from the same weights on the same samples, on two ranks, and
take turns. A ratio is one of two runs in the same round.
"""

import sys
from itertools import permutations
from statistics import median

import harness
import speed
from on_ranks import make_7m_llama


def contenders(folder):
    """Return each contender as speed.py has them: a script or chapter, its ranks and its flags."""
    found = {name: (name, speed.RANKS, []) for name in ("03", "04")}
    for script in sorted((harness.ROOT / "alternative-frameworks").glob("*/train_llm.py")):
        found[script.parent.name] = (script, speed.RANKS, [])
    path = f"{folder}/zero-3.json"
    line = f"--global-batch-size {speed.BATCH} --batch-size {speed.BATCH} --brief"
    line += f" --gpus-per-node {speed.RANKS} --precision {harness.fast_precision()}"
    line += f" --write-config deepspeed {path}"
    harness.call([sys.executable, harness.PLANNER, *line.split()])
    script, ranks, _ = found["deepspeed"]
    return found | {"deepspeed-zero-3": (script, ranks, ["--deepspeed-config", path])}


def compare(rounds):
    """Return the ratios of each contender to chapters 03 and 04, in the rounds and their median."""
    found = {}
    for name, chapter in permutations(rounds[0], 2):
        for number in rounds[0][name] if chapter in ("03", "04") else ():
            values = [runs[name][number] / runs[chapter][number] for runs in rounds]
            found[f"{name} / {chapter}, {number}"] = {"median": median(values), "rounds": values}
    return found


def frameworks(args, folder):
    """Let the contenders take turns; compare their speeds, memory and saves."""
    make_7m_llama(folder / "llama")
    everyone = contenders(folder)

    def measure(name, number):
        result = speed.run(everyone[name], args.steps, folder, f"{name}-{number}")
        memory = max(row["peak_memory_gib"] for row in result["rows"])
        save = result["timing"]["save_checkpoint"]
        return {"speed": speed.speed_of(result), "memory": memory, "save": save}

    for rounds in harness.take_turns(args.only or everyone, args.rounds, measure, str):
        yield {"ratios": compare(rounds), "rounds": rounds}


def add_flags(add):
    """Declare the flags."""
    speed.add_flags(add)
    add("--only", nargs="+", help="contenders, such as 03 deepspeed-zero-3")


if __name__ == "__main__":
    harness.benchmark(__doc__, frameworks, add_flags)
