"""What a rank of chapter 04 holds and sends in a training step is what its README computes.

test_dry_run.py compares what the ranks of all chapters would send, on up to 512 GPUs.
"""

import pytest

from conftest import SCRIPTS, SHORT
from runs import call_on_ranks

pytestmark = pytest.mark.slow
# The sizes of the tiny model of the chapters.
LAYERS, WIDTH, MLP_WIDTH, VOCABULARY = 4, 128, 352, 384
# The numbers of bytes of the weights of a layer, of those outside of the layers, and of the model.
LAYER = 4 * (4 * WIDTH**2 + 3 * WIDTH * MLP_WIDTH + 2 * WIDTH)
OUTER = 4 * (2 * VOCABULARY * WIDTH + WIDTH)
MODEL = LAYERS * LAYER + OUTER


CASES = {
    "default": [],
    "kept": ["--no-reshard-after-forward"],
    "2 micro-batches": ["--batch-size", 1],
    "2 replicas": ["--replicas", 2],
    "2 replicas, 2 micro-batches": ["--replicas", 2, "--batch-size", 1],
}


@pytest.fixture(scope="module")
def fsdp_costs(tmp_path_factory):
    """The costs of each case on the first of four ranks."""
    folder = tmp_path_factory.mktemp("costs")
    cases = {name: [*SHORT, "--save-dir", folder, *args] for name, args in CASES.items()}
    return call_on_ranks(4, "costs.py", cases, folder, SCRIPTS["04"])


@pytest.mark.parametrize("case", CASES)
def test_fsdp_memory_equals_the_formula(fsdp_costs, case):
    """A rank holds its shard of everything; the outer weights and one layer are gathered."""
    costs, num_shards = fsdp_costs[case], 2 if "replicas" in case else 4
    assert costs["weights"] == costs["gradients"] == MODEL // num_shards
    # Besides its two moments, each weight has a step number.
    assert 0 <= costs["optimizer"] - 2 * MODEL // num_shards < 1000
    assert costs["gathered"] == (MODEL if case == "kept" else OUTER + LAYER)


@pytest.mark.parametrize("case", CASES)
def test_fsdp_sends_the_bytes_of_the_formula(fsdp_costs, case):
    times = 2 if "micro-batches" in case else 1
    # The backward pass gathers each layer a second time, except for the last one.
    repeated = 0 if case == "kept" else LAYERS - 1
    expected = {
        "all-gather": [times * (1 + LAYERS + repeated), times * (MODEL + repeated * LAYER)],
        "reduce-scatter": [times * (1 + LAYERS), times * MODEL],
    }
    if "replicas" in case:
        expected["all-reduce"] = [1 + LAYERS, MODEL // 2]
    assert fsdp_costs[case]["sent"] == expected
