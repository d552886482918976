"""Plan in the browser, by the formulas of form_facts.py instead of runs on fake tensors.

MicroPython runs this file after the functions of the planner; see tools/maintain/planner_form.py.
"""

import json
import math
from collections import Counter
from types import SimpleNamespace

from layouts import best_layouts, launcher
from memory import TRACED_PARTS
from step_time import speed_of
from training_step import (
    ExpertShape,
    Setting,
    UnsupportedModelError,
    local_numbers,
    numbers,
    padded_numbers,
    shard_numbers,
)
from will_it_fit import checkpoint_text, speed_text, text_of, verdict

# planner_form.py puts the text of form.json before this program.
FACTS = json.loads(globals().get("FACTS_TEXT", "{}"))
KINDS = {"l": "logits", "g": "gradients"}
SEGMENTS = "embedding, layer 1, layer 2, head, head backward, layer 2 backward, layer 1 backward"
SEGMENTS = (SEGMENTS + ", embedding backward").split(", ")
STAGES, FOUND = {}, {}


# ---- formulas --------------------------------------------------------------------------------
def values_of(config, tensor=1, context=1, expert=1, samples=1, length=1, chunks=1):
    """Return the value of each letter in the formulas; form_facts.py explains the letters."""
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    width = config["moe_intermediate_size"] or config["intermediate_size"]
    values = {"S": samples, "P": length / tensor / context / chunks, "N": chunks}
    values.update({"t": tensor, "c": context, "p": expert, "g": heads // keys})
    values.update({"h": config["hidden_size"] // tensor, "i": width // tensor})
    values.update({"v": config["vocab_size"] // tensor, "d": config["head_dim"] // 2})
    values["k"] = keys / tensor / context
    values["e"] = (config["num_experts"] or 0) // expert
    return values


def product_of(text, values):
    """Return the value of a product, such as 8SPh."""
    number = text.rstrip("SPNtcphikgdve")
    product = float(number)
    for letter in text[len(number) :]:
        product *= values[letter]
    return product


def bytes_of(text, values):
    """Return the bytes of a formula for each kind of tensors."""
    found = Counter()
    for term in text.split():
        is_activation = ":" not in term
        kind = "activations" if is_activation else KINDS[term[0]]
        found[kind] += product_of(term if is_activation else term[2:], values)
    return found


# ---- what replaces the scripts and the runs on fake tensors ----------------------------------
class Model:
    """Hold the shapes of the weights of a model, or of a pipeline stage."""

    has_other_layers = False

    def __init__(self, facts, layer, layers, root):
        self.facts, self.config = facts, SimpleNamespace(**facts["config"])
        self.layers, self.root = [layer] * layers, root
        self.built = self.shapes = layer * layers + root
        self.weights = numbers(self.shapes)


def newest_chapter():
    """Stand in for the script of the newest chapter."""
    schedules = {"gpipe": (None, 1), "1f1b": (None, 1), "interleaved-1f1b": (None, 2)}

    def experts_of(shapes):
        return [shape for shape in shapes if isinstance(shape, ExpertShape)]

    return SimpleNamespace(SCHEDULES=schedules, experts_of=experts_of)


def active_numbers(model):
    return model.facts["active"]


def shape_of(text, values):
    """Return a shape from its text, such as 2kgd th."""
    kind = ExpertShape if text.startswith("experts ") else tuple
    return kind([int(product_of(size, values)) for size in text.split() if size != "experts"])


def stages_of(setting):
    """Return the Model of each rank of a pipeline; tensor-parallel ranks split its layers."""
    facts, tensor = setting.model.facts, setting.tensor_parallel_size
    ranks, count, layers = setting.pipeline_parallel_size, setting.num_stages, facts["layers"]
    key = facts["active"], tensor, ranks, count
    if key not in STAGES:
        if facts["config"]["num_key_value_heads"] % tensor or (ranks > 1 and count > layers):
            raise UnsupportedModelError()
        values = values_of(facts["config"], tensor)
        family = FACTS[facts["family"]]
        layer = [
            shape_of(text, values) for text in FACTS[facts["family"].partition(" ")[0]]["layer"]
        ]
        embedding, *others = [shape_of(text, values) for text in family["root"]]
        # Chapter 07 balances the stages like this, in split_into_stages().
        borders = [round(number * (layers + 2) / count) - 1 for number in range(count + 1)]
        borders = [max(n, min(border, layers - count + n)) for n, border in enumerate(borders)]
        stages = [0] * ranks
        for number in range(count):
            stages[number % ranks] += borders[number + 1] - borders[number]
        roots = [[] for _ in range(ranks)]
        roots[0].append(embedding)
        roots[-1] += others
        if ranks > 1 and facts["config"]["tie_word_embeddings"]:
            roots[-1].append(embedding)
        STAGES[key] = [Model(facts, layer, *part) for part in zip(stages, roots, strict=True)]
    return STAGES[key]


def formulas_of(setting):
    """Return the formulas of a setting, or None if no chapter can train it."""
    config, split, words = setting.model.facts["config"], "", []
    for letter, size in zip("tcp", splits_of(setting), strict=True):
        split = letter if size > 1 else split
    style = setting.context_parallel_style if split == "c" else ""
    chapter = "02" if setting.chapter == "02" else "04" if setting.chapter < "05" else "05"
    heads = config["num_key_value_heads"]
    divided = split == "t" or style == "ulysses"
    if divided:
        heads /= setting.tensor_parallel_size * setting.context_parallel_size
    words = [chapter, split, style, setting.recompute, "one-head" if divided and heads == 1 else ""]
    words.append("one-sample" if split == "t" and setting.micro_batch_size == 1 else "")
    is_split = heads % 1 == 0 and (config["num_experts"] or 0) % setting.expert_parallel_size == 0
    name, family = " ".join([word for word in words if word]), setting.model.facts["family"]
    # Tied embeddings change few formulas.
    formulas = FACTS[family].get(name) or FACTS[family.partition(" ")[0]].get(name)
    return formulas if is_split else None


def splits_of(setting):
    names = "tensor", "context", "expert"
    return [getattr(setting, f"{name}_parallel_size") for name in names]


def segments_of(setting):
    """Return the bytes of tensors in each segment of a step, by the formulas that were recorded."""
    formulas, samples = formulas_of(setting), setting.micro_batch_size
    if not formulas:
        raise UnsupportedModelError()
    facts, sizes = setting.model.facts, splits_of(setting)
    key = facts["active"], setting.chapter, setting.recompute, samples, setting.seq_length
    key = (*key, setting.context_parallel_style, *sizes)
    if key in FOUND:
        return FOUND[key]
    values = values_of(facts["config"], *sizes, samples, setting.seq_length)
    chunks = samples * values["P"] / FACTS["defaults"]["chunk_size"]
    found, starts, peaks = FOUND.setdefault(key, {}), {}, {}
    start, names = Counter(), SEGMENTS
    if len(formulas) > len(names) + 1:
        names = [*names[:6], f"{names[5]} after experts", *names[6:]]
        names = [*names[:8], f"{names[7]} after experts", *names[8:]]
    for name, (change, *moments) in zip(names, formulas, strict=False):
        start = start + bytes_of(change, values)
        most = [bytes_of(moment, values) for moment in moments]
        if name == "head" and chunks > 1 and len(formulas) > len(names):
            several = values_of(facts["config"], *sizes, samples, setting.seq_length, chunks)
            most = [bytes_of(moment, several) for moment in formulas[-1]]
        if most:
            peaks[name] = max(most, key=lambda moment: moment.total())
        starts[name] = start
    for name, start in starts.items():
        most = start + peaks[name.replace("layer 1", "layer 2")]
        found[name] = SimpleNamespace(start=start, most=most, most_besides_gradients=most)
    return found


def remembered(function):
    """Compute a size of the same shapes and setting only once."""
    found = {}

    def call(shapes, setting, least_shards=1):
        if not hasattr(setting, "sizes"):
            parallel = setting.expert_parallel_size
            setting.sizes = setting.shards, setting.expert_shards, parallel
        key = tuple(shapes), setting.sizes, least_shards
        if key not in found:
            named = {"least_shards": least_shards} if least_shards > 1 else {}
            found[key] = function(shapes, setting, **named)
        return found[key]

    return call


# MicroPython is slow, so do not compute these sizes for each layer again.
local_numbers = remembered(local_numbers)
shard_numbers = remembered(shard_numbers)
padded_numbers = remembered(padded_numbers)


# ---- the layouts that the form compares ------------------------------------------------------
def words_without_layout(args, chapter):
    return [word for word in args.words if word != "--checkpoint-async" or chapter >= "04"]


def flags_of(line):
    """Return the values of all flags that a layout may set."""
    flags = FACTS["flags"].copy()
    for word, after in zip(line, [*line[1:], "--"], strict=True):
        if word.startswith("--"):
            value = int(after) if after.isdigit() else after
            if after.startswith("--"):
                value = not word.startswith("--no-")
            flags[word[2:].replace("no-", "").replace("-", "_")] = value
    return flags


def layout_of(args, chapter, words, line):
    """Return the setting, the command and the speed of a layout, or None if a script refuses it."""
    flags = flags_of(line)
    group = flags["tensor_parallel_size"] * flags["context_parallel_size"]
    stages, replicas = flags["pipeline_parallel_size"], flags["replicas"]
    data_ranks = args.ranks / group / stages
    samples = args.global_batch_size / data_ranks
    copy = args.ranks / stages / replicas / flags["expert_parallel_size"]
    if any(
        n % 1 for n in (data_ranks, samples, args.seq_length / group, data_ranks / replicas, copy)
    ):
        return None
    size = max(size for size in range(1, flags["batch_size"] + 1) if samples % size == 0)
    accumulation = int(samples) // size
    multiple = stages if flags["pipeline_schedule"] == "interleaved-1f1b" else 1
    if accumulation < stages or accumulation % multiple:
        return None
    flags["reshard_after_forward"] &= stages == 1
    flags.update({"micro_batch_size": size, "accumulation": accumulation})
    flags["checkpoint_async"] = args.checkpoint_async and chapter >= "04"
    flags["chapter"] = "02" if chapter == "03" else chapter
    setting = Setting(**(args.__dict__ | flags))
    # From chapter 05 on, scripts check the model first, except for splits of a sequence.
    if chapter >= "05" and flags["context_parallel_size"] == 1 and not formulas_of(setting):
        return None
    try:
        script = " ".join([FACTS["scripts"][chapter], *words])
        command = " \\\n    ".join([launcher(args), script, " ".join(line)])
        return {"setting": setting, "command": command, "speed": speed_of(setting)}
    except UnsupportedModelError:
        return None


def plan(fields):
    """Return the layouts of the form's fields as JSON, as the command line's --layouts does."""
    fields = json.loads(fields)
    facts = FACTS["models"][fields["model"]]
    args = SimpleNamespace(**(FACTS["defaults"] | fields))
    args.batch_size, args.ranks = facts["batch"], args.nodes * args.gpus_per_node
    args.compile = "--compile" in facts["words"]
    args.kernels = "compiled" if args.compile else "eager"
    args.checkpoint_async = "--checkpoint-async" in facts["words"]
    values = {"--seq-length": args.seq_length, "--global-batch-size": args.global_batch_size}
    values["--num-steps"] = math.ceil(args.tokens / args.global_batch_size / args.seq_length)
    for name in ("model_name", "dataset_name"):
        values["--" + name.replace("_", "-")] = quoted(fields.get(name, ""))
    pairs = zip(["", *facts["words"]], facts["words"], strict=False)
    args.words = [str(values.get(flag) or word) for flag, word in pairs]
    args.model = SimpleNamespace(facts=facts)
    alone = Setting(model=args.model, tensor_parallel_size=1, pipeline_parallel_size=1)
    alone.pipeline_schedule = "1f1b"
    [args.model] = stages_of(alone)
    return json.dumps([shown(args, layout) for layout in best_layouts(args)])


def quoted(word):
    """Return a word as a shell needs it."""
    is_plain = all(
        letter.isalpha() or letter.isdigit() or letter in "@%+=:,./-_" for letter in word
    )
    return word if is_plain else "'" + word.replace("'", "'\"'\"'") + "'"


def shown(args, layout):
    """Return the texts and numbers of a layout that the form shows."""
    needs = [f"{text_of(layout[f'{name}_needs'])} per {name}" for name in ("gpu", "host")]
    found = {name: layout[name] for name in ("way", "fits", "command", "gpu_needs", "host_needs")}
    found["text"] = f"{verdict(layout, True)}; {', '.join(needs).replace('gpu', 'GPU')}"
    found["speed"] = speed_text(args, layout) if layout["fits"] else ""
    found.update({"checkpoint": checkpoint_text(args, layout), "numbers": layout["speed"]})
    # The bar shows these parts of the fullest moment, and what the planner adds to the tensors.
    parts = layout["gpu"]
    state = [("weights", parts["parameters"] + parts["gathered weights"])]
    state.append(("gradients", parts["gradients"] + parts["full gradients"]))
    state.append(("optimizer state", parts["optimizer state"]))
    state.append(("activations", sum(parts[name] for name in TRACED_PARTS)))
    other = layout["gpu_needs"] - sum(size for _, size in state)
    found["parts"] = [[name, size] for name, size in [*state, ("other", other)]]
    found["room"] = layout["gpu_needs"] + layout["gpu_margin"]
    return found
