"""Fit the eight numbers of the speed model again, and show how far both halves are then off.

Here:  python tools/planner/fit.py

The search needs about a minute. It minimizes the Huber loss of the fitted half: the misses count
squared, but misses above a tenth count less, because some runs have causes that the model lacks.
"""

import json
import math
from itertools import product
from statistics import median
from unittest import mock

import step_time
from gpus import GPUS
from scale import FILE, HalfRepeatedStep, setting_from
from step_time import HALF_WORK, KERNELS, StepTime, speed_of
from training_step import ROOT

A100, H100 = GPUS["A100-80GB"], GPUS["H100-80GB"]
# Each number has the value where the search starts, and the value in use. "TFLOP/s with 500 W" is
# the peak of an H100 with a limit of 500 W, as in torchtitan's runs.
NUMBERS = {
    "A100 matrix_share": (0.5, A100.matrix_share),
    "A100 attention_share": (0.5, A100.attention_share),
    "H100 matrix_share": (0.5, H100.matrix_share),
    "H100 attention_share": (0.5, H100.attention_share),
    "HALF_WORK": (1000 * 4096, HALF_WORK),
    "values of eager kernels": (40, KERNELS["eager"][1]),
    "factor of fused kernels": (1.2, KERNELS["fused"][0]),
    "TFLOP/s with 500 W": (989, 875),
}


def published_runs():
    """Return two lists of published runs: the runs that fit() uses, and the other runs.

    A run is a tuple of its row in the file, its setting, and the class that adds up its seconds.
    """
    halves = [], []
    for row in json.loads(FILE.read_text())["published"]:
        kind = HalfRepeatedStep if row.get("options") else StepTime
        setting = setting_from(row["words"].format(root=ROOT))
        halves[not row["fitted"]].append((row, setting, kind))
    return halves


def log_misses(runs, numbers):
    """Return each run's miss: the logarithm of its predicted speed divided by its published speed.

    `numbers` has the values to use in place of the constants of the speed model.
    """
    kernels = KERNELS | {"eager": (1.0, numbers["values of eager kernels"])}
    kernels["fused"] = numbers["factor of fused kernels"], KERNELS["fused"][1]
    found = []
    with mock.patch.multiple(step_time, HALF_WORK=numbers["HALF_WORK"], KERNELS=kernels):
        for row, setting, kind in runs:
            names = "matrix_share", "attention_share"
            changes = {name: numbers[f"{row['gpu'][:4]} {name}"] for name in names}
            if "500 W" in row["gpu"]:
                changes["gpu_tflops"] = numbers["TFLOP/s with 500 W"]
            speed = speed_of(setting.changed(**changes), kind)["tokens_per_second"]
            found.append(math.log(speed / row["published"]))
    return found


def loss_of(runs, numbers):
    """Return the sum of the Huber losses of the runs' logarithmic misses with `numbers`.

    Return infinity if the factor of fused kernels exceeds its upper limit, the factor in KERNELS.
    """
    if numbers["factor of fused kernels"] > KERNELS["fused"][0]:
        return math.inf
    sizes = map(abs, log_misses(runs, numbers))
    return sum(size**2 / 2 if size < 0.1 else 0.1 * (size - 0.05) for size in sizes)


def fit(runs):
    """Search for the numbers with the lowest loss, and return them.

    Change one number at a time, by 10% at first and by about 1% in the end.
    """
    numbers, step = {name: start for name, (start, _) in NUMBERS.items()}, 0.1
    loss = loss_of(runs, numbers)
    while step > 0.01:
        before = loss
        for name, factor in product(NUMBERS, (1 + step, 1 / (1 + step))):
            changed = numbers | {name: numbers[name] * factor}
            if (changed_loss := loss_of(runs, changed)) < loss:
                numbers, loss = changed, changed_loss
        if loss == before:
            step /= 2
    return numbers


def main():
    """Print the fitted numbers and the numbers in use, and the misses with each set of numbers."""
    halves = published_runs()
    fitted, used = fit(halves[0]), {name: value for name, (_, value) in NUMBERS.items()}
    print(f"{'':24}{'fitted':>12}{'in use':>12}")
    for name in NUMBERS:
        print(f"{name:24}{fitted[name]:12,.4g}{used[name]:12,.4g}")
    for half, runs in zip(("fitted", "held-out"), halves, strict=True):
        misses = [[abs(math.expm1(m)) for m in log_misses(runs, n)] for n in (fitted, used)]
        for name, summary in {"median": median, "largest": max}.items():
            print(f"{f'{name} miss, {half}':24}", *(f"{summary(found):11.1%}" for found in misses))


if __name__ == "__main__":
    main()
