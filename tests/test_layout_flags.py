"""Test that wrong flags of a layout are refused, and that a layout divides the batch correctly."""

import inspect

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from conftest import SHORT, parse, user_error
from families import shrink
from runs import check_user_error

TP2, TP4 = "--tensor-parallel-size 2", "--tensor-parallel-size 4"
PP2 = "--pipeline-parallel-size 2 -b 2"
CP2, CP4 = "--context-parallel-size 2", "--context-parallel-size 4"
EP2, EP4 = "--expert-parallel-size 2", "--expert-parallel-size 4"
RATE, LOSS = "--expert-balance-rate 0.1", "--expert-balance-loss 0.1"
INTERLEAVED, ULYSSES = "--pipeline-schedule interleaved-1f1b", "--context-parallel-style ulysses"
ONE_SAMPLE = "-b 1 --config num_hidden_layers=8"
ONE_HEAD = "--config num_key_value_heads=1"
# The chapters refuse these families only with these settings, not with the families' defaults.
SETTINGS = {
    "mistral": {"sliding_window": 32},
    "llama": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    "gemma3_text": {"final_logit_softcapping": 30.0},
}
# Each row has a chapter, a number of ranks, a command line, and a part of the error.
WRONG = [
    ("06", 2, f"{TP2} -m gpt2", "the plan of gpt2 does not say how to split transformer.wpe"),
    ("06", 2, f"{TP2} -m mistral", "-size 2: mistral has a mask, which needs full sequences"),
    ("06", 2, f"{TP2} {ONE_HEAD}", "tiny has 1 key-value heads; choose a divisor"),
    ("06", 2, TP4, "--tensor-parallel-size 4: 2 ranks are not divisible by 4"),
    ("06", 2, f"{TP2} -s 63", "--seq-length 63: not divisible by the 2 ranks that split a sequ"),
    ("06", 4, f"{TP2} --global-batch-size 7", "7: not divisible by 2 data-parallel ranks"),
    ("07", 2, f"{PP2} {TP2}", "--pipeline-parallel-size 2: 2 ranks are not divisible by 4"),
    ("07", 2, f"{PP2} -b 8", "2: micro-batches (1 per step) do not fill the pipeline"),
    ("07", 2, f"{PP2} {INTERLEAVED} --config num_hidden_layers=3", "has fewer than 4 layers"),
    ("07", 2, f"{PP2} -m opt", "-size 2: transformers has no pipeline plan for opt"),
    ("08", 8, f"{CP4} {TP2} {ULYSSES}", "4 key-value heads for 8 ranks"),
    ("08", 2, f"{CP2} -m llama", "full sequences, because it has dynamic"),
    ("09", 4, "--expert-parallel-size 3", "size 3: 4 ranks share a copy of each layer; choose"),
    ("09", 4, f"{EP4} --replicas 2", "size 4: 2 ranks share a copy of each layer; choose a divi"),
    ("09", 8, "--expert-parallel-size 8 -m mixtral", "8: mixtral has 4 experts; choose a divisor"),
    ("09", 2, EP2, "--expert-parallel-size 2: transformers has no plan to split experts of tiny"),
    ("09", 2, f"{EP2} -m qwen3_moe --recompute selective", "selective: layers with split experts"),
    ("09", 1, RATE, "0.1: the routers of tiny have no bias; use --expert-balance-loss"),
    ("09", 1, f"{LOSS} -m glm4_moe", "0.1: found no routers without a bias in glm4_moe; use"),
    ("05", 1, "-m gemma3_text", "the chunked loss caps no logits; use a different model"),
]


def begin(script, ranks, line):
    """Parse a command and build its model as rank 0 of `ranks` ranks; return the arguments."""
    args = parse(script, *SHORT, *line.split(), ranks=ranks)
    if args.model_name == "tiny":
        # Leave out the decorator that makes the other ranks wait for rank 0.
        _, config = inspect.unwrap(script.build_tokenizer_and_config)(args)
    else:
        settings = SETTINGS.get(args.model_name, {})
        config = shrink(CONFIG_MAPPING[args.model_name](), **settings)
    script.build_model(args, config)
    return args


@pytest.mark.parametrize("chapter, ranks, line, expected", WRONG)
def test_wrong_layout_stops_with_one_line(load, capsys, chapter, ranks, line, expected):
    error = user_error(capsys, begin, load(chapter), ranks, line)
    check_user_error({"stderr": error, "status": 2}, expected)


@pytest.mark.parametrize(
    "chapter, ranks, line, micro_batch_size, accumulation",
    [
        ("01", 1, "--global-batch-size 32", 8, 4),
        ("01", 1, "--global-batch-size 32 -b 99", 32, 1),
        ("01", 1, "--global-batch-size 7 -b 4", 1, 7),
        ("02", 12, "--global-batch-size 24", 2, 1),
        # Four ranks that split a matrix or a sequence process the same samples, so they divide the
        # batch as one rank would.
        ("06", 4, TP4, 8, 1),
        # The stages of a pipeline process the same samples. With two stages, four ranks form two
        # pipelines, and each pipeline processes 4 of the 8 samples.
        ("07", 4, f"{PP2} {ONE_SAMPLE}", 1, 4),
        ("07", 8, f"{PP2} {TP2} {ONE_SAMPLE}", 1, 4),
    ],
)
def test_layout_divides_the_batch_by_its_data_ranks_and_micro_batches(
    load, chapter, ranks, line, micro_batch_size, accumulation
):
    args = begin(load(chapter), ranks, line)
    assert (args.micro_batch_size, args.accumulation) == (micro_batch_size, accumulation)
    if chapter == "07":
        assert args.num_stages == args.pipeline_parallel_size
        stages = begin(load(chapter), ranks, f"{line} {INTERLEAVED}").num_stages
        assert stages == 2 * args.num_stages
