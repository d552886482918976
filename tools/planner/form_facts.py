"""Write the facts of each model that the planner's form needs: tools/planner/form.json.

Here:  python tools/planner/form_facts.py

A browser cannot run a model on fake tensors, so this script runs it and records each size as a
formula. For this, the number of samples and the tokens of a rank in a chunk of the loss are prime
numbers. If the size of a tensor is a multiple of a prime, the tensor grows with that number.
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
from unittest import mock

import numpy as np

import activations
import will_it_fit
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
    stages_of,
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
CONFIG_KEYS = ["hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads"]
CONFIG_KEYS += ["head_dim", "tie_word_embeddings", "num_experts_per_tok"]
# A recorded step has these prime numbers: its samples, and a rank's tokens in each chunk.
SAMPLES, PIECE = 11, 101
KINDS = ["activations", "logits", "gradients"]
TERMS = ["constant", "sequence", "tokens", "chunk"]
HEAD = ["head", "head backward"]
# A layout may set these flags.
FLAGS = [flag[2:].replace("-", "_") for flag in LAYOUT_FLAGS]
FLAGS += ["cpu_offload", "reshard_after_forward"]


# ---- sizes as formulas -----------------------------------------------------------------------
class FormulaRecorder(activations.Recorder):
    """Record the live bytes of each moment, by kind and by the term that they grow with."""

    # The step has this number of samples, and its loss has this number of chunks.
    samples, chunks = SAMPLES, 1

    def update_peaks(self):
        self.segment.__dict__.setdefault("moments", []).append(+self.live)

    def count(self, tensor, kind):
        super().count(tensor, (kind, self.term_of(tensor.shape)))

    def rename(self, tensor, kind):
        key = activations.key_of(tensor)
        if key in self.kind_of:
            super().rename(tensor, (kind, self.kind_of[key][1]))

    def term_of(self, shape):
        """Return the term that the size of a tensor is proportional to."""
        pieces = [size // PIECE for size in shape if size and size % PIECE == 0]
        if not pieces:
            return "constant"
        if math.prod(pieces) % self.chunks:
            return "chunk"
        return "sequence" if math.prod(shape) % self.samples else "tokens"


def record(setting, chunks=1):
    """Return the segments of a step: the formulas of each segment's start and moments.

    A formula is a matrix: it has a coefficient, in bytes, for each kind of tensor and each term.
    The loss has `chunks` chunks.
    """
    split = setting.tensor_parallel_size * setting.context_parallel_size
    length, samples = PIECE * chunks * split, setting.micro_batch_size
    values = {"constant": 1, "sequence": length, "tokens": samples * length}
    values["chunk"] = samples * PIECE
    with (
        mock.patch.object(activations, "Recorder", FormulaRecorder),
        mock.patch.multiple(FormulaRecorder, chunks=chunks, samples=samples),
        mock.patch.object(newest_chapter(), "CHUNK_SIZE", samples * PIECE),
    ):
        segments = activations.trace(setting.changed(seq_length=length))

    def formula(live):
        return np.array([[round(live[kind, t] / values[t], 6) for t in TERMS] for kind in KINDS])

    return {
        name: (formula(segment.start), [formula(moment) for moment in segment.moments])
        for name, segment in segments.items()
        if name not in ("before", "end")
    }


def many_chunks(setting):
    """Return the segments of the head for three chunks or more.

    Each chunk adds the same number of bytes to the last moments, and none to the first moments.
    """
    three, five, seven = (record(setting, chunks) for chunks in (3, 5, 7))
    split = setting.tensor_parallel_size * setting.context_parallel_size
    found = {}
    for name in HEAD:
        (start, few), (_, more), (_, most) = three[name], five[name], seven[name]
        moments = [a for a, b in zip(few, more, strict=False) if np.array_equal(a, b)]
        for a, b, c in zip(few[::-1], more[::-1], most[::-1], strict=False):
            if np.array_equal(b - a, c - b):
                moments.append(grown(a, (b - a) / 2, split))
        found[name] = start, moments
    return found


def grown(formula, growth, split):
    """Extend the formula for three chunks to any number of chunks, by its growth per chunk."""
    constant, _, _, chunk = growth.T
    # The chunks together have all tokens of the rank, and each chunk has CHUNK_SIZE tokens.
    per_token = (chunk + constant / newest_chapter().CHUNK_SIZE) / split
    return formula + np.stack([-3 * constant, 0 * chunk, per_token, -3 * chunk], axis=1)


def relative(segments, base):
    """Return the segments of the head relative to its segments for one chunk.

    The moments after the last norm have the activations of the backward pass. These moments form
    the segment "chunks", which is relative to the start of the backward pass.
    """
    found = {"chunks": (np.zeros((len(KINDS), len(TERMS))), [])}
    for name in HEAD:
        start, after_norm = base[name][0], base["head backward"][0]
        found[name] = segments[name][0] - start, []
        for moment in segments[name][1]:
            # Compare the first row, which has the activations.
            is_after = name == "head" and np.array_equal(moment[0], after_norm[0])
            origin, others = (after_norm, "chunks") if is_after else (start, name)
            found[others][1].append(moment - origin)
    return found


def compact(segments, besides_gradients=False):
    """Drop the moments of each segment that are not the fullest for any values of the form."""
    found = {}
    # The form offers these numbers of samples and tokens. Treat every chunk as a full chunk.
    lengths, chunk = [2**power for power in range(10, 18)], newest_chapter().CHUNK_SIZE
    values = [(1, n, samples * n, chunk) for n in lengths for samples in range(1, 17)]
    for name, (start, moments) in segments.items():
        totals = {}
        for moment in moments:
            counted = moment * [[1], [1], [0]] if besides_gradients else moment
            totals.setdefault(tuple(counted.sum(axis=0).tolist()), counted)
        fullest = {max(totals, key=functools.partial(dot, value)) for value in values}
        kept = [moment for total, moment in totals.items() if total in fullest]
        found[name] = [short(formula) for formula in (start, *kept)]
    return found


def dot(values, formula):
    return sum(value * size for value, size in zip(values, formula, strict=True))


def short(formula):
    """Return a formula as a list of numbers; drop zeros at the end, and write 2.0 as 2."""
    numbers = np.trim_zeros(formula.ravel(), "b").tolist()
    return [int(value) if value.is_integer() else value for value in numbers]


# ---- the facts of a model --------------------------------------------------------------------
def settings_of(args):
    """Yield a setting for each different set of tensors that a layer can have."""
    base = setting_of(args, "05").changed(device="cuda", cpu_offload=False)
    base = base.changed(micro_batch_size=SAMPLES)
    yield base.changed(chapter="02", recompute="none", accumulation=2)
    yield base.changed(chapter="04", recompute="none")
    product = itertools.product
    sizes = [*product(["tensor_parallel_size"], (1, 2, 4, 8), ["gather"])]
    sizes += product(["context_parallel_size"], (2, 4, 8), ["gather", "ulysses"])
    if newest_chapter().experts_of(args.model.built):
        sizes += product(["expert_parallel_size"], (2, 4, 8, 16, 32, 64), ["gather"])
    for (name, size, style), recompute in product(sizes, ["none", "selective", "full"]):
        changes = {name: size, "context_parallel_style": style, "recompute": recompute}
        yield base.changed(**changes)
        if name == "tensor_parallel_size" and size > 1:
            # TP: also record a single sample, because it needs fewer copies.
            yield base.changed(**changes, micro_batch_size=1)


def key_of(setting):
    """Return the key of the segments of a setting; model.js has the same function."""
    kind = "02" if setting.chapter == "02" else "04" if setting.chapter < "05" else "05"
    style = setting.context_parallel_style if setting.context_parallel_size > 1 else "gather"
    sizes = setting.tensor_parallel_size, setting.context_parallel_size, style
    alone = setting.tensor_parallel_size > 1 and setting.micro_batch_size == 1
    words = kind, *sizes, setting.expert_parallel_size, setting.recompute, 1 if alone else "more"
    return " ".join(map(str, words))


def segments_of(args):
    """Return the segments of all settings by key, and the head's segments by number of chunks."""
    found, heads = {}, {}
    for setting in settings_of(args):
        # Skip a setting if the chapter refuses to split this model.
        with contextlib.suppress(UnsupportedModelError):
            check_split(setting, args.model)
            segments = record(setting)
            found[key_of(setting)] = compact(segments, setting.chapter == "02")
            head = f"{setting.tensor_parallel_size} {setting.context_parallel_size}"
            if setting.chapter == "05" and head not in heads:
                chunked = record(setting, 2), many_chunks(setting)
                heads[head] = [compact(relative(split, segments)) for split in chunked]
            print(key_of(setting), flush=True)
    return {"segments": found, "heads": heads}


def shapes_of(args):
    """Return the shapes of a layer and of the root on a tensor-parallel rank, and the stages."""
    found, stages = {}, {}
    pipelines = list(itertools.product((2, 4, 8, 16, 32), ["1f1b", "interleaved-1f1b"]))
    for tp_size in (1, 2, 4, 8):
        with contextlib.suppress(UnsupportedModelError):
            split = setting_of(args, "07").changed(tensor_parallel_size=tp_size)
            check_split(split, args.model)
            model = model_of(args.model.config, tp_size)
            assert all(layer == model.layers[0] for layer in model.layers)
            found[tp_size] = [named(model.layers[0]), named(model.root)]
            for ranks, schedule in pipelines:
                with contextlib.suppress(UnsupportedModelError):
                    pipeline = {"pipeline_parallel_size": ranks, "pipeline_schedule": schedule}
                    setting = split.changed(**pipeline)
                    parts = [[len(part.layers), named(part.root)] for part in stages_of(setting)]
                    stages[f"{tp_size} {ranks} {setting.num_stages}"] = parts
    return {"shapes": found, "stages": stages}


def named(shapes):
    """Return shapes as lists; put the word "experts" before a shape of experts."""
    return [["experts"] * isinstance(shape, ExpertShape) + list(shape) for shape in shapes]


def facts_of(words):
    """Return the facts of the model that a command trains."""
    args = will_it_fit.parse_args([*words.split(), "--layouts"])
    config, source = load_config(args)
    args.model = model_of(config)
    words = last_of_each(words_without_layout(args, "09"))
    facts = {
        "words": words,
        "source": source,
        "batch": args.batch_size,
        "layers": len(args.model.layers),
        "active": active_numbers(args.model),
        "config": {key: getattr(config, key, None) for key in CONFIG_KEYS},
    }
    return facts | shapes_of(args) | segments_of(args)


def main():
    """Write the facts of the chosen models, or of all models."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    models_help = "names, or none to renew only the defaults; the default is all models"
    parser.add_argument(
        "models", nargs="*", default=list(MODELS), metavar="MODEL", help=models_help
    )
    new = {name: facts_of(MODELS[name]) for name in parser.parse_args().models if name != "none"}
    models = (json.loads(FACTS.read_text())["models"] if FACTS.exists() else {}) | new
    args = vars(will_it_fit.parse_args([]))
    machines = vars(will_it_fit.build_parser().parse_args([]))
    del machines["flops_efficiency"]
    facts = {
        "gpus": {kind: gpu.values for kind, gpu in GPUS.items()},
        "defaults": {name: args[name] for name in (*machines, "device", "precision")},
        "flags": {name: args[name] for name in FLAGS},
        "scripts": {name: str(path.relative_to(ROOT)) for name, path in SCRIPTS.items()},
        "chunk_size": newest_chapter().CHUNK_SIZE,
        "models": {name: models[name] for name in MODELS if name in models},
    }
    FACTS.write_text(json.dumps(facts, separators=(",", ":")).replace('],"', '],\n"') + "\n")


if __name__ == "__main__":
    main()
