"""Predict all speeds that the pages show, and write them to benchmarks/results/scale.json.

Here:  python tools/planner/scale.py

Each row of the file has a command line of the planner, which shows the row in detail.
Published runs trained in bf16, unless their name says Float8. fit.py fits the constants of
step_time.py and gpus.py to the rows with "fitted", every other row of each source on each GPU. MPT
is planned as a Llama with the same number of weights. torchtitan's H100s had a limit of 500 W, and
their peak is fitted, too: 875 TFLOP/s. A pipeline of 8 stages needs 8 nodes. A tensor-parallel
group processes the same number of samples as its ranks would alone.
"""

import json
import shlex

import will_it_fit as planner
from setting import setting_of
from step_time import StepTime, speed_of
from training_step import ROOT, load_config, model_of

FILE = ROOT / "benchmarks/results/scale.json"
# Map each way to split the model to its column in the table of the fastest layouts.
COLUMNS = {"FSDP": "FSDP", "FSDP, replicas": "FSDP", "FSDP, recompute": "FSDP"}
COLUMNS |= {"FSDP, TP": "TP", "FSDP, PP": "PP", "FSDP, TP, PP": "TP and PP"}
JOB_KEYS = "way fits gpu_needs host_needs checkpoint stop_seconds speed command".split()


def setting_from(words):
    """Return the setting that a command line of the planner describes."""
    args = planner.parse_args(shlex.split(words))
    args.model = model_of(load_config(args)[0])
    return setting_of(args, args.chapter)


def layouts_of(words):
    """Return the plan of the best layout of each way to split the model.

    The fastest layout comes first, and layouts that do not fit come last.
    """
    return planner.make_plan(planner.parse_args([*shlex.split(words), "--layouts"]))["layouts"]


def layer_of(words):
    """Return the seconds and the GB that one layer needs in a step, under FSDP and under TP.

    FSDP's traffic does not depend on the number of tokens. If a GPU has fewer tokens than "pays
    below", FSDP's traffic takes longer than tensor parallelism takes to compute and to send.
    """
    alone = StepTime(setting_from(f"{words} -b 1"))
    split = StepTime(setting_from(f"{words} -b 8 --tensor-parallel-size 8"))
    compute, config = alone.forward + alone.backward, alone.model.config
    group = split.forward + split.backward - compute
    # A rank sends 7/8 of the hidden states of 8 samples in each of 8 collectives.
    group_bytes = 7 * 8 * alone.tokens * config.hidden_size * split.setting.compute_bytes
    (fsdp, fsdp_gb), (across, across_gb) = layer_traffic(alone), layer_traffic(split)
    row = {"compute": compute, "group": group, "group_gb": group_bytes / 1e9, "FSDP": fsdp}
    row |= {"FSDP_gb": fsdp_gb, "across": across, "across_gb": across_gb}
    return row | {"pays below": fsdp / (compute + group) * alone.tokens}


def layer_traffic(step):
    """Return the seconds and the GB to gather a layer twice, and to reduce its gradients."""
    step.sent.clear()
    gather, _ = step.per_group("all-gather", (2, 0))
    reduce, _ = step.per_group("reduce-scatter", (1, 0))
    return 2 * gather + reduce, step.sent["copy"] / 1e9


def fastest_of(words):
    """Return the fastest layout of each column: its tokens per second and GPU, and its stages.

    Leave out the layouts that do not fit.
    """
    found = {}
    for layout in layouts_of(words):
        if layout["fits"] and layout["way"] in COLUMNS:
            speed = layout["speed"]["tokens_per_second"]
            row = {"tokens_per_second": speed, "stages": layout["setting"].pipeline_parallel_size}
            found.setdefault(COLUMNS[layout["way"]], row)
    return found


class HalfRepeatedStep(StepTime):
    """Add up a step's seconds if selective recomputation repeats half of the matrix products.

    torchtitan keeps the results of every second matrix product, and chapter 05 keeps the results of
    all matrix products.
    """

    def repeated(self, matrices, attention, cheap):
        half = matrices / 2 if self.setting.recompute == "selective" else 0.0
        return half + super().repeated(matrices, attention, cheap)


def published_of(words, half=False):
    """Return the predicted speed of a published run; `half` selects HalfRepeatedStep."""
    return speed_of(setting_from(words), HalfRepeatedStep if half else StepTime)


class SentOnceStep(StepTime):
    """Add up the seconds of a step that sends a token once, even if several experts process it.

    NeMo AutoModel's benchmarks replace the router with a gate that chooses neighboring experts,
    which lie on one rank or on two ranks of a node. DeepEP sends a token only once to each node.
    """

    def exchange(self, size, times):
        return super().exchange(size / self.model.config.num_experts_per_tok, times)


def mixture_of(words):
    """Return the predicted tokens per second and GPU of a run that trains a mixture of experts.

    There are two predictions: from StepTime and from SentOnceStep.
    """
    setting = setting_from(words)
    steps = {"tokens_per_second": StepTime, "sent once": SentOnceStep}
    return {name: speed_of(setting, step)["tokens_per_second"] for name, step in steps.items()}


# Each part of scale.json has a function that predicts a row from the row's command line.
PARTS = {
    "published": published_of,
    "mixtures": mixture_of,
    "scenes": lambda words: speed_of(setting_from(words)),
    "layers": layer_of,
    "job": lambda words: [{key: row[key] for key in JOB_KEYS} for row in layouts_of(words)],
    "fastest": fastest_of,
}


def predict(part, row):
    """Return the prediction for a row in the part `part` of scale.json."""
    return PARTS[part](row["words"].format(root=ROOT), **row.get("options", {}))


def main():
    """Compute all predictions in scale.json again, and write them to the file."""
    rows_by_part = json.loads(FILE.read_text())
    for part, rows in rows_by_part.items():
        for row in rows:
            row["predicted"] = predict(part, row)
            print(part, row["words"], flush=True)
    FILE.write_text(json.dumps(rows_by_part, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
