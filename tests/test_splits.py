"""Test that gradients stay the same when ranks split a model's matrices or experts."""

import pytest

from conftest import SCRIPTS
from families import save_small_model
from marks import exhaustive, slow
from runs import call_on_ranks

TP2, EP2 = ["--tensor-parallel-size", 2], ["--expert-parallel-size", 2]
# In each of these families, ranks share the work of a layer in a different way.
DENSE = "llama qwen2 qwen3 gemma olmo2 phi3 gpt_neox".split()
TRAINING = """--device cpu --precision fp32 -s 16 --global-batch-size 4 -b 2 --num-steps 4
    --eval-samples 4 --warmup-steps 1""".split()

# A small DeepSeek-V3 needs settings, so that one of its two layers has experts.
MIXTURES = "mixtral qwen2_moe qwen3_moe olmoe gpt_oss glm4_moe".split()
MIXTURES += ["deepseek_v3+first_k_dense_replace=1+n_group=1+topk_group=1"]
# Each case has a chapter, its flags, a list of families, and the smallest number of families that
# the chapter must accept.
CASES = [
    slow("06", TP2, DENSE, 7),
    slow("09", EP2, MIXTURES, 7),
    exhaustive("09", [*EP2, "--recompute", "full"], MIXTURES, 7),
    exhaustive("09", [*TP2, *EP2], MIXTURES, 4),
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chapter, flags, families, fewest", CASES)
def test_split_model_has_the_same_gradients_or_is_refused(
    tmp_path, chapter, flags, families, fewest
):
    cases = {}
    for family in families:
        save_small_model(family, tmp_path / family)
        cases[family] = ["-m", tmp_path / family, *TRAINING, "--save-dir", tmp_path / "runs"]
    results = call_on_ranks(2, "splits.py", cases, tmp_path / "ranks", SCRIPTS[chapter], *flags)
    equal = 0
    for family, result in results.items():
        if isinstance(result, str):
            print(f"{family}: {result}")
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
