"""Record what the planner's form needs to know about some models: tools/planner/form.json.

Here:  python tools/planner/form_facts.py

A browser cannot run a model on fake tensors. So this script runs each model with two numbers of
samples and two lengths. The bytes of each moment are a + bL + cSL for S samples of L tokens, and
this script records a, b and c.
"""

import contextlib
import itertools
import json
from unittest import mock

import numpy

import activations
import will_it_fit
from commands import LAYOUT_FLAGS, last_of_each, words_without_layout
from form_model import KINDS, bytes_of, key_of
from gpus import GPUS
from scale import setting_from
from setting import ExpertShape, UnsupportedModelError
from training_step import ROOT, SCRIPTS, active_numbers, check_split, newest_chapter, stages_of

FACTS = ROOT / "tools/planner/form.json"
# MODELS maps the name of each model to the arguments of its training command.
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


class MomentRecorder(activations.Recorder):
    """Keep the live bytes at all moments of a segment, and not only at the segment's peak."""

    def update_peaks(self):
        super().update_peaks()
        self.segment.__dict__.setdefault("moments", []).append(+self.live)


def settings_of(base):
    """Yield settings for each combination of chapter, recomputation and split that the form plans.

    For a given model, the sizes of a setting's tensors depend only on this combination, the
    micro-batch and the sequence length.
    """
    for chapter in ("02", "04"):
        yield base.changed(chapter=chapter, recompute="none")
    powers = [2, 4, 8]
    splits = [{}, *({"tensor_parallel_size": size} for size in powers)]
    for style, size in itertools.product(("gather", "ulysses"), powers):
        splits.append({"context_parallel_size": size, "context_parallel_style": style})
    splits += [{"expert_parallel_size": size} for size in (*powers, 16, 32, 64)]
    for recompute, split in itertools.product(("none", "selective", "full"), splits):
        setting = base.changed(recompute=recompute, **split)
        yield setting
        # Trace a micro-batch of one sample, too, because for one sample, torch copies fewer tensors
        # in a tensor-parallel group.
        if setting.tensor_parallel_size > 1:
            yield setting.changed(micro_batch_size=1)


def coefficients(points, sizes):
    """Return a, b and c of the bytes a + bL + cSL, for each kind of tensor in KINDS.

    Each of `points` is a pair (S, L), for S samples of L tokens. `sizes` has the bytes by kind at
    each point.
    """
    rows = [[1, length, samples * length] for samples, length in points]
    table = [[size[kind] for kind in KINDS] for size in sizes]
    # If S is 1 at all points, SL equals L, so only the sum of b and c is known. The sum is enough,
    # because the form then uses these coefficients only for one sample.
    found, *_ = numpy.linalg.lstsq(rows, table, rcond=1e-12)
    # Add 0, which turns -0 into 0, because -0 needs more characters in the file.
    return (found.T.round(4) + 0.0).tolist()


def segments_of(setting):
    """Return a list for each segment of a step: name, start, and moments that may be the peak.

    The start and the moments are coefficients of the bytes by kind. In chapter 05, there is one
    more segment, "head in chunks", which the form uses in place of "head" if the chapter computes
    the loss in several chunks.
    """
    if setting.chapter == "05":
        check_split(setting, setting.model)
    chunk = newest_chapter().CHUNK_SIZE
    length = chunk * setting.tensor_parallel_size * setting.context_parallel_size
    points = [(2, length), (3, length), (2, 2 * length)]
    if setting.micro_batch_size == 1:
        points = [(1, 2 * length), (1, 3 * length), (1, 4 * length)]
    one_chunk = [traced(setting, *point, chunk_size=1 << 40) for point in points]
    found = []
    for name in one_chunk[0]:
        moments = zip(*(segments[name].moments for segments in one_chunk), strict=True)
        rows = [coefficients(points, sizes) for sizes in moments]
        start = coefficients(points, [segments[name].start for segments in one_chunk])
        found.append([name, start, fullest(rows, points[0][0])])
    if setting.chapter == "05":
        chunked = [traced(setting, *point, chunk_size=chunk)["head"] for point in points]
        start = coefficients(points, [head.start for head in chunked])
        found.append(
            ["head in chunks", start, [coefficients(points, [head.most for head in chunked])]]
        )
    return found


def traced(setting, samples, length, chunk_size):
    """Trace a step with `samples` samples of `length` tokens; return its segments by name.

    The loss is computed in chunks of `chunk_size` tokens.
    """
    setting = setting.changed(micro_batch_size=samples, seq_length=length)
    with (
        mock.patch.object(activations, "Recorder", MomentRecorder),
        mock.patch.object(newest_chapter(), "CHUNK_SIZE", chunk_size),
    ):
        segments = activations.trace(setting)
    del segments["before"], segments["end"]
    return segments


def fullest(rows, samples):
    """Return the rows of coefficients that give the most bytes for some size of the micro-batch.

    Try `samples` samples and eight times this number, each with lengths from 1024 to 131072 tokens.
    """
    found = []
    for count, power in itertools.product({samples, 8 * samples}, range(10, 18)):
        row = max(rows, key=lambda row: bytes_of(row, count, 2**power).total())
        if row not in found:
            found.append(row)
    return found


def shapes_of(base, tensor):
    """Return four lists with the shapes of weights that are split across `tensor` ranks.

    The lists are for a layer, for the root, and for the root in the first and in the last of two
    pipeline stages. The root has the weights outside of the layers.
    """
    alone = base.changed(tensor_parallel_size=tensor)
    [model], (first, last) = stages_of(alone), stages_of(alone.changed(pipeline_parallel_size=2))
    lists = model.layers[0], model.root, first.root, last.root
    return [[*map(row_of, shapes)] for shapes in lists]


def row_of(shape):
    """Return a shape as a list, which begins with "experts" if the weight holds several experts."""
    return ["experts"] * isinstance(shape, ExpertShape) + [*shape]


def base_of(words):
    """Return the setting of a training command in chapter 05.

    The setting splits neither the model nor a sequence, and a micro-batch has two samples.
    """
    setting = setting_from(f"{words} --layouts")
    return setting.changed(device="cuda", cpu_offload=False, micro_batch_size=2)


def facts_of(words):
    """Return a dictionary with the facts about the model that a training command trains."""
    base = base_of(words)
    config, words = base.model.config, words_without_layout(base, "09")
    facts = {"words": last_of_each(words), "batch": base.batch_size, "stages": {}, "segments": {}}
    facts |= {"active": active_numbers(base.model)}
    facts["config"] = {key: getattr(config, key, None) for key in CONFIG_KEYS}
    sizes = [size for size in (1, 2, 4, 8) if config.num_key_value_heads % size == 0]
    facts["shapes"] = {size: shapes_of(base, size) for size in sizes}
    for power, schedule in itertools.product(range(6), ("1f1b", "interleaved-1f1b")):
        pipeline = base.changed(pipeline_parallel_size=2**power, pipeline_schedule=schedule)
        with contextlib.suppress(UnsupportedModelError):
            layers = [len(stage.layers) for stage in stages_of(pipeline)]
            facts["stages"][f"{2**power} {pipeline.num_stages}"] = layers
    for setting in settings_of(base):
        with contextlib.suppress(UnsupportedModelError):
            facts["segments"][key_of(setting)] = segments_of(setting)
            print(key_of(setting), flush=True)
    return facts


def main():
    """Write the facts of all models to form.json; put the segments of each model on one line."""
    args = vars(will_it_fit.parse_args([]))
    machines = vars(will_it_fit.build_parser().parse_args([]))
    flags = [flag[2:].replace("-", "_") for flag in LAYOUT_FLAGS]
    facts = {
        "gpus": {kind: gpu.values for kind, gpu in GPUS.items()},
        "defaults": {name: args[name] for name in (*machines, "device", "precision")},
        "flags": {name: args[name] for name in (*flags, "cpu_offload", "reshard_after_forward")},
        "scripts": {name: str(path.relative_to(ROOT)) for name, path in SCRIPTS.items()},
        "chunk_size": newest_chapter().CHUNK_SIZE,
        "models": {name: facts_of(words) for name, words in MODELS.items()},
    }
    text = json.dumps(facts, separators=(",", ":"))
    FACTS.write_text(text.replace('"segments":', '\n"segments":') + "\n")


if __name__ == "__main__":
    main()
