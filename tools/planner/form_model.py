"""Plan in a browser: the facts in form.json replace runs on fake tensors, and the scripts.

MicroPython runs this file and the planner's modules that compute only with numbers; see
tools/maintain/planner_form.py. form_facts.py records the facts.
"""

import json
import math
import sys
from collections import Counter
from types import SimpleNamespace

from report import checkpoint_text, launcher, needs_text, speed_text
from setting import ExpertShape, Model, Setting, UnsupportedModelError, setting_of

KINDS = ["activations", "logits", "gradients"]
FACTS, FOUND = {}, {}


# ---- what replaces runs on fake tensors ------------------------------------------------------
def key_of(setting):
    """Return the key of a setting in the dictionary `segments` of a model's facts."""
    chapter = min(setting.chapter, "05")
    tensor, context = setting.tensor_parallel_size, setting.context_parallel_size
    style = setting.context_parallel_style if context > 1 else ""
    samples = " one sample" if tensor > 1 and setting.micro_batch_size == 1 else ""
    splits = f"t{tensor} c{context}{style} e{setting.expert_parallel_size}"
    return f"{chapter} {setting.recompute} {splits}{samples}"


def bytes_of(row, samples, length):
    """Return the bytes of each kind of tensor for `samples` samples of `length` tokens.

    `row` has the coefficients that form_facts.py has recorded.
    """
    found = Counter()
    for number, kind in enumerate(KINDS):
        constant, per_length, per_token = row[number]
        found[kind] = constant + length * (per_length + samples * per_token)
    return found


def segments_of(setting):
    """Return the bytes of tensors at the start and at the peak of each segment of a step, by name.

    This function replaces segments_of() of activations.py, which needs torch.
    """
    facts, name = setting.model.built, key_of(setting)
    samples, length = setting.micro_batch_size, setting.seq_length
    key = facts["active"], name, samples, length
    if name not in facts["segments"]:
        raise UnsupportedModelError()
    if key not in FOUND:
        found = FOUND[key] = {}
        for segment, start, rows in facts["segments"][name]:
            moments = [bytes_of(row, samples, length) for row in rows]
            most = max(moments, key=lambda moment: moment.total())
            found[segment] = SimpleNamespace(start=bytes_of(start, samples, length), most=most)
        ranks = setting.tensor_parallel_size * setting.context_parallel_size
        if "head in chunks" in found and samples * length > ranks * FACTS["chunk_size"]:
            found["head"] = found["head in chunks"]
    return FOUND[key]


def active_numbers(model):
    return model.built["active"]


def stages_of(setting):
    """Return a Model for each rank of a pipeline, with the weights of one tensor-parallel rank."""
    facts, tensor = setting.model.built, str(setting.tensor_parallel_size)
    stages = f"{setting.pipeline_parallel_size} {setting.num_stages}"
    key = facts["active"], tensor, stages
    if stages not in facts["stages"] or tensor not in facts["shapes"]:
        raise UnsupportedModelError()
    if key not in FOUND:
        layer, root, first, last = [list(map(shape_of, s)) for s in facts["shapes"][tensor]]
        counts = facts["stages"][stages]
        roots = [first] + [[] for _ in counts[2:]] + [last] if counts[1:] else [root]
        FOUND[key] = [
            Model(setting.model.config, [layer] * count, roots[rank])
            for rank, count in enumerate(counts)
        ]
    return FOUND[key]


def shape_of(row):
    return ExpertShape(row[1:]) if row[0] == "experts" else tuple(row)


# ---- what replaces the scripts ---------------------------------------------------------------
def words_without_layout(args, chapter):
    return [word for word in args.words if word != "--checkpoint-async" or chapter >= "04"]


def layout_of(args, chapter, words, line):
    """Return a dictionary with the setting, the command and the speed of a layout.

    Return None if the chapter's script would refuse the layout.
    """
    flags = FACTS["flags"].copy()
    for number, word in enumerate(line):
        if word.startswith("--"):
            name, after = word[2:].replace("no-", "").replace("-", "_"), line[number + 1 :]
            # A flag without a value is true, or false if it begins with --no-.
            flags[name] = not word.startswith("--no-")
            if after and not after[0].startswith("--"):
                flags[name] = int(after[0]) if after[0].isdigit() else after[0]
    setting = setting_of(SimpleNamespace(**(args.__dict__ | flags)), chapter)
    group = setting.tensor_parallel_size * setting.context_parallel_size
    stages = setting.pipeline_parallel_size
    data_ranks = args.ranks / group / stages
    samples = args.global_batch_size / data_ranks
    copy = args.ranks / stages / setting.replicas / setting.expert_parallel_size
    numbers = data_ranks, samples, args.seq_length / group, data_ranks / setting.replicas, copy
    if any(number % 1 for number in numbers):
        return None
    size = max(size for size in range(1, setting.batch_size + 1) if samples % size == 0)
    setting.micro_batch_size, setting.accumulation = size, int(samples) // size
    multiple = stages if setting.pipeline_schedule == "interleaved-1f1b" else 1
    if setting.accumulation < stages or setting.accumulation % multiple:
        return None
    # From chapter 05 on, refuse a layout whose segments form_facts.py has not recorded, because the
    # script refused to split the model in this way. Context-parallel layouts are checked later.
    is_checked = chapter >= "05" and setting.context_parallel_size == 1
    if is_checked and key_of(setting) not in args.model.built["segments"]:
        return None
    try:
        script = " ".join([FACTS["scripts"][chapter]] + words)
        command = " \\\n    ".join([launcher(args), script, " ".join(line)])
        return {"setting": setting, "command": command, "speed": speed_of(setting)}
    except UnsupportedModelError:
        return None


# Without torch, let the planner's modules import this module in place of activations.py,
# commands.py and training_step.py, which need torch.
if "torch" not in sys.modules:
    for name in ("activations", "commands", "training_step"):
        sys.modules[name] = sys.modules[__name__]
    from layouts import best_layouts
    from step_time import speed_of

    with open("form.json") as file:
        FACTS.update(json.load(file))


# ---- the form --------------------------------------------------------------------------------
def plan(fields):
    """Return the best layouts for the values in the form's fields; input and output are JSON.

    The command line computes the same layouts with --layouts.
    """
    fields = json.loads(fields)
    facts = FACTS["models"][fields["model"]]
    args = Setting(**(FACTS["defaults"] | FACTS["flags"] | fields))
    args.ranks, args.batch_size = args.nodes * args.gpus_per_node, facts["batch"]
    args.kernels = "compiled" if "--compile" in facts["words"] else "eager"
    args.checkpoint_async = "--checkpoint-async" in facts["words"]
    steps = math.ceil(args.tokens / args.global_batch_size / args.seq_length)
    values = {"--seq-length": args.seq_length, "--global-batch-size": args.global_batch_size}
    values |= {"--num-steps": steps, "--model-name": fields.get("model_name")}
    values["--dataset-name"] = fields.get("dataset_name")
    args.words = facts["words"][:]
    for number, flag in enumerate(args.words[:-1]):
        args.words[number + 1] = str(values.get(flag) or args.words[number + 1])
    args.model = Model(SimpleNamespace(**facts["config"]), [], [], facts)
    [args.model] = stages_of(args)
    args.model.built = facts
    return json.dumps([shown(args, layout) for layout in best_layouts(args)])


# The form's bar shows these parts of the GPU memory that is in use at the peak. A last part,
# "other", has the buffers for communication and the memory that the planner adds to the tensors.
BAR = {
    "weights": ["parameters", "gathered weights"],
    "gradients": ["gradients", "full gradients"],
    "optimizer state": ["optimizer state"],
    "activations": ["activations", "logits"],
}


def shown(args, layout):
    """Return a dictionary with the texts and numbers that the form shows for a layout."""
    found = {name: layout[name] for name in ("way", "fits", "command", "gpu_needs", "host_needs")}
    found["text"] = needs_text(layout)
    found["speed"] = speed_text(args, layout) if layout["fits"] else ""
    found |= {"checkpoint": checkpoint_text(args, layout), "numbers": layout["speed"]}
    found["room"] = layout["gpu_needs"] + layout["gpu_margin"]
    sizes = [[part, sum(layout["gpu"][name] for name in names)] for part, names in BAR.items()]
    other = layout["gpu_needs"] - sum(size for _, size in sizes)
    return found | {"parts": sizes + [["other", other]]}
