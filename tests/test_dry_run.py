"""The dry run counts what the READMEs compute and the planner plans, and finds planted faults."""

import json
import shlex

import pytest

import dry_run
import will_it_fit
from conftest import ROOT, SCRIPTS
from marks import exhaustive, slow

pytestmark = pytest.mark.tool

# Sizes that 512 ranks can split without padding.
WIDTH, MLP_WIDTH, VOCABULARY, LAYERS, LENGTH = 512, 1024, 512, 3, 64
MODEL = (
    f"--config hidden_size={WIDTH} intermediate_size={MLP_WIDTH} vocab_size={VOCABULARY} "
    f"num_hidden_layers={LAYERS} num_attention_heads=8 num_key_value_heads=4 -s {LENGTH} -b 1 "
)
# The numbers of weights of a layer, and of the embedding, the norm and the head.
LAYER = 3 * WIDTH**2 + 3 * WIDTH * MLP_WIDTH + 2 * WIDTH
OUTER = 2 * VOCABULARY * WIDTH + WIDTH
WEIGHTS = LAYERS * LAYER + OUTER


def run(script, gpus, arguments, ranks="0"):
    """Run a script dry as some of its ranks, and return what they did."""
    words = f"--gpus {gpus} --rank {ranks} -- {script} {arguments} --global-batch-size {gpus}"
    options = dry_run.parse_args(shlex.split(words))
    dry_run.load_script(options)
    results = dry_run.run_ranks(options, dry_run.ranks_to_run(options, None))
    return results if len(results) > 1 else results[0]


def sent(result, kind, ranks=None):
    """Return the bytes that a rank sends in the second step with collectives of a kind."""
    assert not result["problem"], result["problem"]["traceback"]
    return sum(
        row["bytes"]
        for row in result["sent"]
        if row["phase"].startswith("step 2")
        and row["kind"] == kind
        and row["ranks"] == (ranks or row["ranks"])
        # The ranks also exchange single numbers, such as the norm of the gradients.
        and row["bytes"] > 8 * row["calls"]
    )


def share(ranks):
    """Return which part of a tensor each rank of a ring sends."""
    return (ranks - 1) / ranks


# ---- what a rank sends -----------------------------------------------------------------------
GPUS = [8, exhaustive(64), exhaustive(512)]


@pytest.mark.parametrize("gpus", GPUS)
def test_ddp_sends_the_bytes_of_the_formula(gpus):
    result = run(SCRIPTS["02"], gpus, MODEL)
    assert sent(result, "all-reduce") == pytest.approx(2 * share(gpus) * 4 * WEIGHTS)


@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("chapter", ["04", exhaustive("05")])
def test_fsdp_sends_the_bytes_of_the_formula(chapter, gpus):
    result = run(SCRIPTS[chapter], gpus, MODEL)
    gathered = 2 * 2 * WEIGHTS - 2 * OUTER - 2 * LAYER
    assert sent(result, "all-gather") == pytest.approx(share(gpus) * gathered)
    assert sent(result, "reduce-scatter") == pytest.approx(share(gpus) * 4 * WEIGHTS)


@pytest.mark.parametrize("gpus", [exhaustive(8), 64, exhaustive(512)])
def test_replicas_send_the_bytes_of_the_formula(gpus):
    result = run(SCRIPTS["04"], gpus, f"{MODEL} --replicas {gpus // 4}")
    assert sent(result, "reduce-scatter", 4) == pytest.approx(share(4) * 4 * WEIGHTS)
    reduced = 2 * share(gpus // 4) * 4 * WEIGHTS / 4
    assert sent(result, "all-reduce", gpus // 4) == pytest.approx(reduced)


@pytest.mark.parametrize("gpus", GPUS)
def test_tensor_parallelism_sends_the_bytes_of_the_formula(gpus):
    result = run(SCRIPTS["06"], gpus, f"{MODEL} --tensor-parallel-size 4")
    # Eight times per layer, hidden states of two bytes travel. The embedding and the head add two
    # passages each, and the head's weights are gathered and their gradients reduced.
    tokens, ring = LENGTH, share(4)
    hidden = 2 * tokens * WIDTH
    assert sent(result, "all-gather", 4) == pytest.approx(
        ring * ((4 * LAYERS + 1) * hidden + 2 * VOCABULARY * WIDTH), rel=0.1
    )
    if gpus > 4:
        reduced = share(gpus // 4) * 4 * (WEIGHTS - (2 * LAYERS + 1) * WIDTH) / 4
        assert sent(result, "reduce-scatter", gpus // 4) == pytest.approx(reduced, rel=0.01)


@pytest.mark.parametrize("gpus", GPUS)
def test_pipeline_sends_the_bytes_of_the_formula(gpus):
    arguments = f"{MODEL} --pipeline-parallel-size 2"
    result = run(SCRIPTS["07"], gpus, arguments)
    # The first rank sends the hidden states of its two micro-batches forward.
    assert sent(result, "send") == 2 * 2 * LENGTH * WIDTH


@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("style", ["gather", "ulysses"])
def test_context_parallelism_sends_the_bytes_of_the_formula(style, gpus):
    size, keys = 4, WIDTH // 2
    arguments = f"{MODEL} --context-parallel-size {size} --context-parallel-style {style}"
    result = run(SCRIPTS["08"], gpus, arguments)
    if style == "gather":
        kind, per_layer = "all-gather", 4 * LENGTH * keys * share(size)
    else:
        kind, per_layer = "all-to-all", 2 * 4 * LENGTH * (WIDTH + keys) * share(size) / size
    assert sent(result, kind, size) == pytest.approx(LAYERS * per_layer)


# ---- memory ----------------------------------------------------------------------------------
SMALL_8B = "@05-large-model/configs/llama-3.1-8b.args --config num_hidden_layers=3 -b 1 "
LAYOUTS = {
    "02": [8, "--recompute none"],
    "04": [8, ""],
    "04 replicas": [64, "--replicas 8"],
    "05": [64, "--recompute full"],
    "05 selective": [64, "--recompute selective"],
    "05 offload": [64, "--cpu-offload --recompute full"],
    "06": [64, "--tensor-parallel-size 8"],
    "07": [64, "--tensor-parallel-size 4 --pipeline-parallel-size 2"],
    "08": [8, "--context-parallel-size 8 -s 32768"],
    "08 ulysses": [8, "--context-parallel-size 8 --context-parallel-style ulysses -s 32768"],
}


def planned(chapter, gpus, arguments):
    """Return the planner's bytes of tensors on the fullest GPU."""
    nodes = f"--chapter {chapter} --nodes {gpus // 8} --gpus-per-node 8 --global-batch-size {gpus}"
    args = will_it_fit.parse_args(shlex.split(f"{arguments} {nodes}"))
    config, _ = will_it_fit.load_config(args)
    args.model = will_it_fit.model_of(config)
    return will_it_fit.plan_of(will_it_fit.setting_of(args, chapter))["gpu_total"]
