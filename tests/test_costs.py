"""What a rank holds and sends in a training step is what the READMEs of 04, 06 and 07 compute."""

import pytest

from conftest import ROOT, SCRIPTS, SHORT
from runs import call_on_ranks

pytestmark = pytest.mark.slow
# The sizes of the tiny model of the chapters, and of the batches in these tests.
LAYERS, WIDTH, MLP_WIDTH, VOCABULARY, LENGTH, BATCH = 4, 128, 352, 384, 64, 8
# The numbers of bytes of the weights of a layer, of those outside of the layers, and of the model.
LAYER = 4 * (4 * WIDTH**2 + 3 * WIDTH * MLP_WIDTH + 2 * WIDTH)
OUTER = 4 * (2 * VOCABULARY * WIDTH + WIDTH)
MODEL = LAYERS * LAYER + OUTER


def measure(chapter, cases, folder):
    """Return the costs of each case on the first of four ranks."""
    cases = {name: [*SHORT, "--save-dir", folder, *args] for name, args in cases.items()}
    return call_on_ranks(4, "costs.py", cases, folder, SCRIPTS[chapter])


def totals(counts):
    """Return the number of collectives of each kind, and the sum of their bytes."""
    return {
        kind: [sum(sizes.values()), sum(int(size) * n for size, n in sizes.items())]
        for kind, sizes in counts.items()
    }


CASES = {
    "default": [],
    "kept": ["--no-reshard-after-forward"],
    "2 micro-batches": ["--batch-size", 1],
    "2 replicas": ["--replicas", 2],
    "2 replicas, 2 micro-batches": ["--replicas", 2, "--batch-size", 1],
}


@pytest.fixture(scope="module")
def fsdp_costs(tmp_path_factory):
    """The costs of chapter 04 by case."""
    return measure("04", CASES, tmp_path_factory.mktemp("costs"))


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
    assert totals(fsdp_costs[case]["step"]) == expected


def test_tensor_parallel_step_sends_the_bytes_of_the_formula(tmp_path):
    """A layer gathers and reduce-scatters its hidden states four times each.

    Besides, the head gathers its weights, and reduce-scatters their gradient. The embedding sends
    two all-to-alls, which DTensor replaces by all-gathers on CPUs.
    """
    common = ["--tensor-parallel-size", 2, "--batch-size"]
    cases = {name: [*common, 2, "--recompute", name] for name in ("none", "full", "selective")}
    cases["one micro-batch"] = [*common, 4]
    for name, costs in measure("06", cases, tmp_path).items():
        samples, times = (4, 1) if name == "one micro-batch" else (2, 2)
        hidden, head = samples * LENGTH * WIDTH * 4, VOCABULARY * WIDTH * 4
        recomputes = name in ("full", "selective")
        # The last reduce-scatter of a layer is not needed again.
        expected = {
            "split all-gather": 4 * LAYERS + 2 + 2 * LAYERS * recomputes,
            "split reduce-scatter": 4 * LAYERS + LAYERS * recomputes,
        }
        for kind, number in expected.items():
            assert costs["step"][kind] == {str(hidden): times * number, str(head): times}, name


def test_experts_send_the_bytes_of_the_formula(tmp_path):
    """A rank sends each token to its experts, and receives their results; so do the gradients."""
    mixture = ROOT / "09-expert-parallel/tiny-mixture"
    common = ["-m", mixture, "--expert-parallel-size", 4, "--batch-size", 1]
    cases = {name: [*common, "--recompute", name] for name in ("none", "full")}
    layers, experts, choices, samples = 3, 16, 2, 2
    for name, costs in measure("09", cases, tmp_path).items():
        tokens = choices * LENGTH * WIDTH * 4
        passes = 2 if name == "none" else 3
        for kind in ("sent", "received"):
            counts = costs["step"][kind]
            # Before, the ranks exchange the number of tokens for each expert.
            assert counts.pop(str(experts * 8)) == samples * layers * (passes - 1)
            assert sum(counts.values()) == 2 * samples * layers * passes
            # The rank also receives the tokens of other ranks, and sends the results.
            assert counts[str(tokens)] == samples * layers * passes


@pytest.mark.exhaustive
def test_pipeline_step_gathers_each_layer_once(tmp_path):
    """This holds for any number of micro-batches; a step also reduces each gradient once."""
    args = ["--pipeline-parallel-size", 2, "--batch-size", 1]
    costs = measure("07", {"pipeline": args}, tmp_path)["pipeline"]
    groups = LAYERS // 2 + 1
    assert totals(costs["step"])["all-gather"][0] == groups
    assert totals(costs["step"])["reduce-scatter"][0] == groups
    assert totals(costs["evaluation"])["all-gather"][0] == groups
