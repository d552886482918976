"""Test that gradients stay the same when ranks split a model's matrices or experts."""

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from conftest import MIXTURES, SCRIPTS
from families import save_small_model
from marks import exhaustive, slow
from runs import call_on_ranks

TP2, EP2 = ["--tensor-parallel-size", 2], ["--expert-parallel-size", 2]
# These families have no experts. Their layers differ in matrices, biases or norms.
DENSE = "llama qwen2 qwen3 gemma olmo2 phi3 gpt_neox".split()
# In these families, a batch may raise RuntimeError. The small model of bailing_hybrid has too few
# experts for its groups, and the tensor-parallel plans of the other two do not fit their experts.
BROKEN = {"bailing_hybrid", "hy_v3", "laguna"}
TRAINING = """--device cpu --precision fp32 -s 16 --global-batch-size 4 -b 2 --num-steps 4
    --eval-samples 4 --warmup-steps 1""".split()


def all_mixtures():
    """Return the families whose experts can be split with a plan of transformers."""
    plans = {
        kind: str(getattr(CONFIG_MAPPING[kind], "base_model_ep_plan", None))
        for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    }
    return [kind for kind, plan in plans.items() if "ep_dispatch_experts" in plan]


def with_experts(kinds):
    """Return the families as names for save_small_model(), some with settings.

    A family gets settings if both layers of its small model would have no experts without them.
    """
    numbers = {kind: getattr(CONFIG_MAPPING[kind](), "first_k_dense_replace", 0) for kind in kinds}
    settings = "+first_k_dense_replace=1+n_group=1+topk_group=1"
    return [kind + settings * ((number or 0) > 1) for kind, number in numbers.items()]


# The import of all mixtures takes seconds, so build a list of families only when a test needs it.
FAMILIES = {"dense": lambda: DENSE, "mixtures": lambda: with_experts(MIXTURES)}
FAMILIES |= {"all-mixtures": lambda: with_experts(all_mixtures())}
# Each case has a chapter, flags for this chapter, the name of a list of families, and a number: at
# least this number of families must train with equal gradients.
CASES = [
    slow("06", TP2, "dense", 7),
    slow("09", EP2, "mixtures", 7),
    exhaustive("09", [*EP2, "--recompute", "full"], "mixtures", 7),
    exhaustive("09", EP2, "all-mixtures", 35),
    exhaustive("09", TP2, "all-mixtures", 8),
    exhaustive("09", [*TP2, *EP2], "all-mixtures", 8),
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chapter, flags, families, fewest", CASES)
def test_split_model_has_the_same_gradients_or_is_refused(
    tmp_path, chapter, flags, families, fewest
):
    cases = {}
    for family in FAMILIES[families]():
        try:
            save_small_model(family, tmp_path / family)
        except ValueError as reason:
            print(f"{family}: {reason}")
            continue
        cases[family] = ["-m", tmp_path / family, *TRAINING, "--save-dir", tmp_path / "runs"]
    results = call_on_ranks(2, "splits.py", cases, tmp_path / "ranks", SCRIPTS[chapter], *flags)
    equal = 0
    for family, result in results.items():
        if isinstance(result, str):
            print(f"{family}: {result}")
            is_error = result.startswith("RuntimeError")
            assert not is_error or family.partition("+")[0] in BROKEN, f"{family}: {result}"
            continue
        steps, split_steps, differences = result
        # Compare each gradient, because a gradient that is added up twice hardly changes the norm
        # of all gradients.
        assert {name: apart for name, apart in differences.items() if apart > 1e-4} == {}, family
        for (loss, norm), (split_loss, split_norm) in zip(steps, split_steps, strict=True):
            assert abs(loss - split_loss) < 1e-5, family
            assert abs(norm - split_norm) < 1e-4 * norm, family
        equal += 1
    assert equal >= fewest
