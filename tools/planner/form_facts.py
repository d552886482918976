"""Write what the planner's form needs to know about models: tools/planner/form.json.

Here:  python tools/planner/form_facts.py

A browser cannot run a model on fake tensors, so this script runs small models and records each size
as a formula. In these models, all sizes are different prime numbers, so the factors of a tensor's
size show what the size depends on.
"""

import contextlib
import copy
import itertools
import json
import math
from unittest import mock

import activations
import will_it_fit
from form_model import values_of
from gpus import GPUS
from layouts import LAYOUT_FLAGS, last_of_each, words_without_layout
from step_time import active_numbers
from training_step import (
    ROOT,
    SCRIPTS,
    ExpertShape,
    UnsupportedModelError,
    check_split,
    load_config,
    model_of,
    newest_chapter,
    setting_of,
)

FACTS = ROOT / "tools/planner/form.json"
# A command with these arguments trains each model.
CONFIGS = "05-large-model/configs"
MODELS = {
    "Llama 3.2 1B": f"@{CONFIGS}/llama-3.2-1b.args",
    "Llama 3.1 8B": f"@{CONFIGS}/llama-3.1-8b.args",
    "Llama 3.1 70B": f"@{CONFIGS}/llama-3.1-70b.args",
    "Llama 3.1 405B": f"@{CONFIGS}/llama-3.1-405b.args",
    "Qwen3 30B-A3B": "--model-name Qwen/Qwen3-30B-A3B --pretrained --dataset-name "
    "roneneldan/TinyStories --seq-length 4096 --global-batch-size 64 --batch-size 1 --num-steps "
    "1000 --lr 1e-5 --compile --checkpoint-async",
}
# A formula has these letters. A rank has S samples, with P tokens of each sample in each of the N
# chunks of its loss. There are t, c or p ranks that split a layer, a sequence or experts. The sizes
# of the model are those of one rank: its hidden width, the width inside of an MLP, heads of keys,
# heads of queries for each of them, half the width of a head, vocabulary, and experts.
PRIMES = {"S": 11, "P": 101, "N": 3, "t": 5, "c": 7, "p": 13}
PRIMES |= {"h": 29, "i": 31, "k": 17, "g": 19, "d": 23, "v": 37, "e": 41}
SPLITS = {"t": "tensor", "c": "context", "p": "expert"}
KINDS = {"activations": "", "logits": "l:", "gradients": "g:"}
CONFIG_KEYS = ["hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads"]
CONFIG_KEYS += ["head_dim", "tie_word_embeddings", "num_experts", "num_experts_per_tok"]
CONFIG_KEYS += ["intermediate_size", "moe_intermediate_size"]


# ---- sizes as formulas -----------------------------------------------------------------------
class FormulaRecorder(activations.Recorder):
    """Record the live bytes of each moment, by kind and by the letters of the tensors' sizes."""

    def update_peaks(self):
        self.segment.__dict__.setdefault("moments", []).append(+self.live)

    def count(self, tensor, kind):
        super().count(tensor, (kind, letters_of(tensor.numel())))

    def rename(self, tensor, kind):
        key = activations.key_of(tensor)
        if key in self.kind_of:
            super().rename(tensor, (kind, self.kind_of[key][1]))


def letters_of(number):
    """Return a letter for each known prime factor of a number."""
    found = ""
    for letter, prime in PRIMES.items():
        while number and number % prime == 0:
            number //= prime
            found += letter
    return found


def formula_of(live):
    """Return the coefficient in bytes for each kind and product; drop products that stay small."""
    is_large = {key: "P" in key[1] or len({*key[1]} & {*"hikgdve"}) > 1 for key in live}
    primes = {key: math.prod(PRIMES[letter] for letter in key[1]) for key in live}
    return {key: live[key] / primes[key] for key in live if live[key] and is_large[key]}


def change(new, old):
    """Return the difference of two formulas."""
    found = {key: round(new.get(key, 0) - old.get(key, 0), 4) for key in {**old, **new}}
    return {key: size for key, size in found.items() if size}


def size_of(formula, values):
    """Return the bytes of a formula, if the letters have these values."""
    products = (math.prod(values[letter] for letter in letters) for _, letters in formula)
    return sum(size * product for size, product in zip(formula.values(), products, strict=True))


def text_of(formula):
    """Return a formula as text; a letter before the colon stands for the kind of tensors."""
    terms = sorted((KINDS[kind], letters, size) for (kind, letters), size in formula.items())
    return " ".join(f"{kind}{size:g}{letters}" for kind, letters, size in terms)


# ---- a family of models ----------------------------------------------------------------------
def config_with_primes(config, split, one_head):
    """Return a configuration whose sizes are prime numbers, and that `split` divides."""
    config, sizes = copy.deepcopy(config), PRIMES | {"k": 1} if one_head else PRIMES
    tensor, expert = (split == "t" and PRIMES["t"]) or 1, (split == "p" and PRIMES["p"]) or 1
    config.num_hidden_layers, config.hidden_size = 2, tensor * sizes["h"]
    config.intermediate_size = config.moe_intermediate_size = tensor * sizes["i"]
    config.num_key_value_heads = sizes["k"] * (PRIMES[split] if split in ("t", "c") else 1)
    config.num_attention_heads = config.num_key_value_heads * sizes["g"]
    config.head_dim, config.vocab_size = 2 * sizes["d"], tensor * sizes["v"]
    config.num_experts = expert * sizes["e"]
    return config


def record(base, key, chunks):
    """Return the segments of a step as formulas: each segment's start, and its moments."""
    chapter, split, style, recompute, one_head, one_sample = key
    config = config_with_primes(base.model.config, split, one_head)
    samples, ranks = 1 if one_sample else PRIMES["S"], PRIMES.get(split, 1)
    changes = {"chapter": chapter, "micro_batch_size": samples, "recompute": recompute}
    changes |= {"model": model_of(config), "seq_length": PRIMES["P"] * chunks}
    if split:
        changes[f"{SPLITS[split]}_parallel_size"] = ranks
        changes["context_parallel_style"] = style
    if split in ("t", "c"):
        changes["seq_length"] *= ranks
    setting = base.changed(**changes)
    if chapter == "05":
        check_split(setting, setting.model)
    with (
        mock.patch.object(activations, "Recorder", FormulaRecorder),
        mock.patch.object(newest_chapter(), "CHUNK_SIZE", samples * PRIMES["P"]),
    ):
        segments = activations.trace(setting)
    # The first layer ends in "head", too, but the second layer comes before it.
    names = ["embedding", "layer 1", "layer 2", *segments]
    return {
        name: (formula_of(segments[name].start), [*map(formula_of, segments[name].moments)])
        for name in dict.fromkeys(names)
        if name not in ("before", "end")
    }


def points_of(configs, key, chunks):
    """Return values of the letters that a setting may have, for one chunk or for several chunks."""
    _, split, style, _, one_head, one_sample = key
    powers = range(1, 7) if split == "p" else range(1, 4) if split else [0]
    samples, lengths, found = [1] if one_sample else [1, 2, 8], range(10, 18), []
    for config, size, length, count in itertools.product(configs, powers, lengths, samples):
        splits = [2**size if letter == split else 1 for letter in "tcp"]
        tokens = count * 2**length / splits[0] / splits[1]
        number = tokens / newest_chapter().CHUNK_SIZE if chunks > 1 else 1
        values = values_of(config, *splits, count, 2**length, number)
        heads = values["k"]
        is_possible = heads == 1 if one_head else heads > 1 or style == "gather" or split == "p"
        if is_possible and (number > 1 or chunks == 1):
            found.append(values)
    return found


def fullest(start, moments, key, points):
    """Return the moments, as changes from the start, that are the fullest for some values."""
    formulas = {}
    for moment in moments:
        formula = change(moment, start)
        if key[0] == "02":
            formula = {term: size for term, size in formula.items() if term[0] != "gradients"}
        formulas[text_of(formula)] = formula
    sizes = [[size_of(formula, values) for formula in formulas.values()] for values in points]
    texts = list(formulas)
    return sorted({texts[max(range(len(texts)), key=row.__getitem__)] for row in sizes})


def formulas_of(base, key, configs):
    """Return the formulas of a setting: for each segment, the change of its start, and moments.

    The first layer has the same moments as the second. The last element has the moments of the head
    if the loss has several chunks.
    """
    found, previous = [], {}
    numbers = (1, PRIMES["N"]) if key[0] == "05" else (1,)
    points = {chunks: points_of(configs, key, chunks) for chunks in numbers}
    for name, (start, moments) in record(base, key, 1).items():
        most = fullest(start, moments, key, points[1]) if "layer 1" not in name else []
        found.append([text_of(change(start, previous)), *most])
        previous = start
    for chunks in numbers[1:]:
        start, moments = record(base, key, chunks)["head"]
        found.append(fullest(start, moments, key, points[chunks]))
    return found


def keys_of(is_mixture):
    """Yield the settings of a family: chapter, split, its style, recomputation, and what is one.

    If a rank has one head of keys, or a tensor-parallel group has one sample, torch copies less.
    """
    yield "02", "", "", "none", False, False
    yield "04", "", "", "none", False, False
    for recompute in ("none", "selective", "full"):
        for split in ("", "p") if is_mixture else ("",):
            yield "05", split, "", recompute, False, False
        yield "05", "c", "gather", recompute, False, False
        for one_head in (False, True):
            yield "05", "c", "ulysses", recompute, one_head, False
            for one_sample in (False, True):
                yield "05", "t", "", recompute, one_head, one_sample


def family_of(words, configs, only=None):
    """Return the shapes of a layer and of the root, and the formulas of all or some settings."""
    args = will_it_fit.parse_args([*words.split(), "--layouts"])
    args.model = model_of(load_config(args)[0])
    base = setting_of(args, "05").changed(device="cuda", cpu_offload=False)
    model = model_of(config_with_primes(args.model.config, "t", False), PRIMES["t"])
    family = {"root": [*map(dimensions_of, model.root)]}
    family["layer"] = [*map(dimensions_of, model.layers[0])]
    for key in keys_of(len(newest_chapter().experts_of(args.model.built)) > 0):
        *parts, one_head, one_sample = key
        parts += [one_head * "one-head", one_sample * "one-sample"]
        name = " ".join(filter(None, parts))
        # Skip a setting if the chapter refuses to split this model.
        with contextlib.suppress(UnsupportedModelError):
            if not only or name in only:
                family[name] = formulas_of(base, key, configs)
                print(name, flush=True)
    return family


def dimensions_of(shape):
    """Return a shape as text, with the letters of each size; mark a shape of experts."""
    sizes = [f"{size / math.prod(PRIMES[x] for x in letters_of(size)):g}" for size in shape]
    sizes = [size + letters_of(number) for size, number in zip(sizes, shape, strict=True)]
    return " ".join(["experts"] * isinstance(shape, ExpertShape) + sizes)


def model_facts(words):
    """Return the facts of the model that a command trains."""
    args = will_it_fit.parse_args([*words.split(), "--layouts"])
    config, _ = load_config(args)
    model = model_of(config)
    facts = {"words": last_of_each(words_without_layout(args, "09")), "batch": args.batch_size}
    tied = " tied" if config.tie_word_embeddings else ""
    facts |= {"family": config.model_type + tied, "layers": len(model.layers)}
    facts |= {"active": active_numbers(model)}
    return facts | {"config": {key: getattr(config, key, None) for key in CONFIG_KEYS}}


def main():
    """Write the facts of all models and families."""
    models = {name: model_facts(words) for name, words in MODELS.items()}
    args = vars(will_it_fit.parse_args([]))
    machines = vars(will_it_fit.build_parser().parse_args([]))
    flags = [flag[2:].replace("-", "_") for flag in LAYOUT_FLAGS]
    facts = {
        "gpus": {kind: gpu.values for kind, gpu in GPUS.items()},
        "defaults": {name: args[name] for name in (*machines, "device", "precision")}
        | {"chunk_size": newest_chapter().CHUNK_SIZE},
        "flags": {name: args[name] for name in (*flags, "cpu_offload", "reshard_after_forward")},
        "scripts": {name: str(path.relative_to(ROOT)) for name, path in SCRIPTS.items()},
        "models": models,
    }
    families = {models[name]["family"]: words for name, words in MODELS.items()}
    for family, words in sorted(families.items()):
        kind = family.partition(" ")[0]
        alike = [model["config"] for model in models.values() if kind in model["family"]]
        facts[family] = family_of(words, alike)
        # A model with tied embeddings needs only the formulas that other models do not have.
        if kind != family:
            new = {name for name, row in facts[family].items() if facts[kind].get(name) != row}
            facts[family] = {name: facts[family][name] for name in sorted(new)}
    text = "{" + ",\n".join(f'"{name}": {lines(value)}' for name, value in facts.items()) + "}\n"
    FACTS.write_text(text)


def lines(value):
    """Return JSON with one line for each entry of a dictionary, if its entries are long."""
    rows = [f"{json.dumps(key)}: {json.dumps(row)}" for key, row in value.items()]
    is_long = all(isinstance(row, dict | list) for row in value.values())
    return "{\n" + ",\n".join(rows) + "}" if is_long else json.dumps(value)


if __name__ == "__main__":
    main()
