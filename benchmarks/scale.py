"""Predict with the planner how layouts scale, next to published runs; write the pages' tables.

Here:    python benchmarks/scale.py --output benchmarks/results/scale.json
Closer:  python benchmarks/scale.py --only published scenes

Nothing is measured here. The published runs trained Llama in bf16, unless their name says Float8.
"""

import itertools
import json
import shlex
import sys

from harness import ROOT, benchmark

sys.path.append(str(ROOT / "tools/planner"))

import will_it_fit as planner
from step_time import StepTime, speed_of
from training_step import load_config, model_of, setting_of

GITHUB = "https://github.com"
TITAN = f"{GITHUB}/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
# The pages of MaxText and NeMo.
RECIPES = f"{GITHUB}/NVIDIA/dgxc-benchmarking/tree/143b90dd91f9be958fed4773ae95d941a3356a82"
LAMBDA = f"{GITHUB}/LambdaLabsML/distributed-training-guide/tree"
LAMBDA += "/1fbe39a1f86f84bb019ec1a0af666bc26d4a2aaa/05-training-llama-405b#run-statistics"
# torchtitan's H100s have a memory of 2.4 TB/s.
TITAN_8B = "-m meta-llama/Llama-3.1-8B -s 8192 -b 2 --recompute selective --gpu-bandwidth-gbs 2400"
TITAN_405B = "-m meta-llama/Llama-3.1-405B -s 8192 -b 1 --recompute full --gpu-bandwidth-gbs 2400 "
TITAN_405B += "--compile --tensor-parallel-size 8 --pipeline-parallel-size 8"
LLAMA_2_70B = f"-m {ROOT}/05-large-model/configs/llama-3.1-70b.json --config vocab_size=32000 "
LLAMA_2_70B += "-s 4096 -b 2 --compile --recompute selective"
# NeMo gives all ranks of a context-parallel group the same work, as Ulysses does.
NEMO = "-s 8192 -b 1 --compile --pipeline-schedule interleaved-1f1b --context-parallel-size 2 "
NEMO += "--context-parallel-style ulysses -m meta-llama/Llama-3.1-"
NEMO_70B = f"{NEMO}70B --tensor-parallel-size 4 --pipeline-parallel-size 4"
NEMO_405B = f"{NEMO}405B --tensor-parallel-size 8 --pipeline-parallel-size 9"
LAMBDA_405B = "-m meta-llama/Llama-3.1-405B -s 4096 -b 1 --cpu-offload --recompute full --compile "
LAMBDA_405B += "--weights-dtype bf16"
INTERLEAVED = f"{TITAN_405B} --pipeline-schedule interleaved-1f1b"
# Name, page, flags, nodes of 8 GPUs, global batch size, and published tokens per second and GPU.
# The efficiency of computation is fitted to the runs on one node.
PUBLISHED = [
    ("torchtitan, 8B, FSDP, eager", TITAN, TITAN_8B, 1, 16, 5762),
    ("torchtitan, 8B, FSDP", TITAN, f"{TITAN_8B} --compile", 1, 16, 6667),
    ("torchtitan, 8B, FSDP, eager", TITAN, TITAN_8B, 16, 256, 5605),
    ("torchtitan, 8B, FSDP", TITAN, f"{TITAN_8B} --compile", 16, 256, 6514),
    ("MaxText, Llama-2-70B, FSDP", f"{RECIPES}/maxtext", LLAMA_2_70B, 8, 128, 74909 / 64),
    ("NeMo, 70B, TP 4, PP 4, CP 2", f"{RECIPES}/llama3.1", NEMO_70B, 8, 128, 71235 / 64),
    ("NeMo, 405B, TP 8, PP 9, CP 2", f"{RECIPES}/llama3.1", NEMO_405B, 72, 252, 120022 / 576),
    ("torchtitan, 405B, Float8, TP 8, PP 8", TITAN, TITAN_405B, 64, 256, 100),
    ("the same with interleaved 1F1B", TITAN, INTERLEAVED, 64, 256, 128),
    ("Lambda, 405B, FSDP, CPU offload", LAMBDA, LAMBDA_405B, 8, 64, 4096 / 30),
]

MODELS = [f"meta-llama/Llama-3.{size}" for size in ("2-1B", "1-8B", "1-70B", "1-405B")]
DEVICES = [8, 64, 512, 4096]
# The flags of each strategy. The ranks of a group process the samples that they would process
# alone: together under TP, and as more micro-batches in a pipeline.
STRATEGIES = {
    "FSDP": "--batch-size {batch}",
    "hybrid": "--batch-size {batch} --replicas {nodes}",
    "FSDP, CPU offload": "--batch-size {batch} --cpu-offload",
    "tensor parallel": "--batch-size {group_batch} --tensor-parallel-size 8",
    "pipeline": "--batch-size {batch} --pipeline-parallel-size 8",
}
# Samples per device in a micro-batch, tokens of a sample, micro-batches, and other flags.
SCENES = {f"{tokens} tokens": (1, tokens, 1, "") for tokens in (512, 1024, 2048, 4096)}
SCENES["as published"] = (2, 8192, 1, "")
SCENES["8 × 4096 tokens, 100 Gb/s"] = (1, 4096, 8, "--network-gbs 12")


def setting_from(words):
    """Return the setting of a command line of the planner."""
    args = planner.parse_args(shlex.split(words))
    args.model = model_of(load_config(args)[0])
    return setting_of(args, args.chapter)


def layouts_of(words):
    """Return the best layout of each way to split, for a command line of the planner."""
    return planner.make_plan(planner.parse_args(shlex.split(f"{words} --layouts")))["layouts"]


def published_rows():
    """Return the published speeds next to the predicted speeds."""
    rows = []
    for run, page, flags, nodes, global_batch_size, published in PUBLISHED:
        sizes = f"--nodes {nodes} --global-batch-size {global_batch_size}"
        predicted = speed_of(setting_from(f"{flags} {sizes}"))["tokens_per_second"]
        row = {"run": run, "page": page, "devices": 8 * nodes, "published": published}
        rows.append(row | {"predicted": predicted, "error": predicted / published - 1})
    return rows


def scene_setting(scene, strategy, devices, model=MODELS[1], recompute="selective"):
    """Return the setting of a strategy on so many devices."""
    batch, tokens, micro_batches, flags = SCENES[scene]
    nodes = devices // 8
    strategy_flags = STRATEGIES[strategy].format(batch=batch, group_batch=8 * batch, nodes=nodes)
    words = f"-m {model} -s {tokens} --nodes {nodes} {strategy_flags} {flags} --compile "
    words += f"--global-batch-size {batch * micro_batches * devices} --recompute {recompute}"
    return setting_from(words)


def scene_rows():
    """Return the speed of each strategy in each scene, where the samples allow the strategy."""
    rows = []
    for scene, strategy, devices in itertools.product(SCENES, STRATEGIES, DEVICES):
        # A pipeline of 8 stages needs 8 nodes, with FSDP inside each node.
        if strategy != "pipeline" or devices > 8:
            point = {"scene": scene, "strategy": strategy, "devices": devices}
            rows.append(point | speed_of(scene_setting(scene, strategy, devices)))
    return rows


def layer_rows():
    """Return the seconds and the GB of one layer of several models, gathered or split.

    FSDP's traffic does not depend on the tokens. With fewer tokens than "pays below", it takes
    longer than tensor parallelism takes to compute and to send.
    """
    rows, tokens = [], 1024
    for model, devices in itertools.product(MODELS, (8, 512)):
        alone, split = (
            StepTime(scene_setting(f"{tokens} tokens", strategy, devices, model, "none"))
            for strategy in ("FSDP", "tensor parallel")
        )
        row = {"model": model, "devices": devices, "compute": alone.forward + alone.backward}
        split.sent.clear()
        hidden = 8 * tokens * split.model.config.hidden_size * split.setting.compute_bytes
        row["group"] = 8 * split.send("tensor", "all-gather", hidden, 8)
        row["group_gb"] = split.sent["tensor"] / 1e9
        row["FSDP"], row["FSDP_gb"] = layer_traffic(alone)
        row["across"], row["across_gb"] = layer_traffic(split)
        row["pays below"] = row["FSDP"] / (row["compute"] + row["group"]) * tokens
        rows.append(row)
    return rows


def layer_traffic(step):
    """Return the seconds and the GB to gather a layer twice, and to reduce its gradients."""
    setting = step.setting
    step.sent.clear()
    gather, _ = step.per_group("copy", "all-gather", setting.compute_bytes, (2, 0))
    reduce, _ = step.per_group("copy", "reduce-scatter", setting.weight_bytes, (1, 0))
    return 2 * gather + reduce, step.sent["copy"] / 1e9


# The columns of the ways to split in the table of the fastest layouts.
COLUMNS = {"FSDP": "FSDP", "FSDP, replicas": "FSDP", "FSDP, recompute": "FSDP"}
COLUMNS |= {"FSDP, TP": "TP", "FSDP, PP": "PP", "FSDP, TP, PP": "TP and PP"}


def fastest_rows(model):
    """Return the fastest layout that fits, for each number of devices and way to split."""
    rows = []
    for devices in DEVICES:
        row = {"model": model, "devices": devices}
        words = f"-m {model} -s 4096 --global-batch-size 1024 -b 1 --compile"
        for layout in layouts_of(f"{words} --nodes {devices // 8}"):
            if layout["fits"] and layout["way"] in COLUMNS:
                speed = layout["speed"]["tokens_per_second"]
                stages = layout["setting"].pipeline_parallel_size
                fastest = {"tokens_per_second": speed, "stages": stages}
                # The fastest layout comes first.
                row.setdefault(COLUMNS[layout["way"]], fastest)
        rows.append(row)
    return rows


# Of docs/train-a-70b-on-64-gpus.md: pairs of sequence length and global batch size. Each step has
# 2,097,152 tokens.
JOB = f"@{ROOT}/05-large-model/configs/llama-3.1-70b.args --nodes 8 --tokens 15e9"
JOB_COLUMNS = "way fits gpu_needs host_needs checkpoint stop_seconds speed command".split()
JOB_SHAPES = [(4096, 512), (32768, 64), (131072, 16)]


def job_rows():
    """Return for each sequence length all ways to split the 70B job, the fastest first."""
    rows = []
    for length, batch in JOB_SHAPES:
        found = layouts_of(f"{JOB} --seq-length {length} --global-batch-size {batch}")
        layouts = [{name: layout[name] for name in JOB_COLUMNS} for layout in found]
        rows.append({"seq_length": length, "global_batch_size": batch, "layouts": layouts})
    return rows


PARTS = {
    "published": published_rows,
    "scenes": scene_rows,
    "layers": layer_rows,
    "job": job_rows,
    "fastest": lambda: [row for model in MODELS[1:] for row in fastest_rows(model)],
}


def scale(args, folder):
    """Compute and print the rows."""
    parts = {part: PARTS[part]() for part in args.only}
    print(json.dumps(parts, indent=1))
    yield parts


def add_flags(add):
    """Declare the flags."""
    add("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts")


if __name__ == "__main__":
    benchmark(__doc__, scale, add_flags, gpus=False)
