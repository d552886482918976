"""Compare the speed and the memory of chapters 03 and 04 with the same training in frameworks.

All:     python benchmarks/frameworks.py --output benchmarks/results/frameworks.json
Closer:  python benchmarks/frameworks.py --only 03 deepspeed

On two ranks, all runs train a Llama of 7 million weights, from the same initial weights and on the
same samples. The runs take turns, and a ratio compares two runs of the same round.
"""

import os
import sys
from itertools import permutations
from statistics import median

import harness
from on_ranks import BATCH, WINDOW, make_7m_llama, training_flags

sys.path.append(str(harness.ROOT / "tools"))

from plot import read_metrics

RANKS = 2
# Each chapter or framework trains ROUNDS times for STEPS steps. The first WINDOW steps are a
# warm-up.
ROUNDS, STEPS = 3, 30


def contenders(folder):
    """Return the script and the additional flags of each chapter and framework, by name.

    Also write a configuration file for DeepSpeed's ZeRO-3 to `folder`.
    """
    found = {name: (harness.script_of(name), []) for name in ("03", "04")}
    for script in sorted((harness.ROOT / "alternative-frameworks").glob("*/train_llm.py")):
        found[script.parent.name] = (script, [])
    path = f"{folder}/zero-3.json"
    line = f"--global-batch-size {BATCH} --batch-size {BATCH} --brief"
    line += f" --gpus-per-node {RANKS} --precision {harness.fast_precision()}"
    line += f" --write-config deepspeed {path}"
    harness.call([sys.executable, harness.PLANNER, *line.split()])
    return found | {"deepspeed-zero-3": (found["deepspeed"][0], ["--deepspeed-config", path])}


def run(script, flags, folder, run_name):
    """Train with a script; return the run's median tokens per second and its peak memory in GiB."""
    flags = ["--model-name", f"{folder}/llama", *training_flags(folder, run_name, STEPS), *flags]
    command = harness.launch_command(RANKS, [script, *flags])
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, os.cpu_count() // RANKS)))
    settings = {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    harness.call(command, HF_HOME=f"{folder}/hf", **settings)
    # Leave out the rows of the first WINDOW steps, which are a warm-up.
    rows = [row for row in read_metrics(folder / run_name) if row["step"] > WINDOW]
    return {
        "speed": median(row["tokens_per_second"] for row in rows),
        "memory": max(row["peak_memory_gib"] for row in rows),
    }


def compare(rounds):
    """Divide each contender's speed and memory by the values of chapter 03 and of chapter 04.

    Return the ratio in each round, and the median of these ratios.
    """
    found = {}
    for name, chapter in permutations(rounds[0], 2):
        for number in rounds[0][name] if chapter in ("03", "04") else ():
            values = [runs[name][number] / runs[chapter][number] for runs in rounds]
            found[f"{name} / {chapter}, {number}"] = {"median": median(values), "rounds": values}
    return found


def frameworks(args, folder):
    """Train with one contender after the other; after each round, yield all ratios so far."""
    make_7m_llama(folder / "llama")
    everyone = contenders(folder)

    def measure(name, number):
        return run(*everyone[name], folder, f"{name}-{number}")

    for rounds in harness.take_turns(args.only or everyone, ROUNDS, measure):
        yield {"ratios": compare(rounds), "rounds": rounds}


def add_flags(add):
    """Declare the flags that only this benchmark has."""
    add("--only", nargs="+", help="contenders, such as 03 deepspeed-zero-3")


if __name__ == "__main__":
    harness.benchmark(__doc__, frameworks, add_flags)
