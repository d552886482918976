"""Test the command line, and the small functions that derive values from it."""

import os
import re

import pytest
import torch
import transformers

from chapters import flags as flags_of
from conftest import FRAMEWORKS, ROOT, SCRIPTS, curves_of, parse, user_error


def test_file_of_arguments_is_read(chapter, tmp_path):
    file = tmp_path / "run.args"
    file.write_text("# comment\n--num-steps 7\n-d 'my text.tokens'  # comment\n\n--compile\n")
    args = parse(chapter, f"@{file}", "--seed", 3)
    values = args.num_steps, args.dataset_name, args.compile, args.seed
    assert values == (7, "my text.tokens", True, 3)


@pytest.mark.parametrize("name", sorted(SCRIPTS.keys() - FRAMEWORKS))
def test_help_explains_every_flag(load, monkeypatch, capsys, name):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        parse(load(name), "--help")
    output, errors = capsys.readouterr()
    assert (stop.value.code, errors) == (0, "")
    flags = re.findall(r'add\((?:"-\w", )?"(--[\w-]+)"', SCRIPTS["01"].read_text())
    assert "--num-steps" in flags
    unexplained = [flag for flag in flags if not re.search(rf"{flag}\b[^\n]*(\n\s+)?\S", output)]
    assert unexplained == []
    assert "(default: 256)" in output


UNKNOWN = "unrecognized arguments: --nosuch 1; docs/flags.md has the flags of each chapter"


@pytest.mark.parametrize("name", sorted(SCRIPTS.keys() - FRAMEWORKS))
def test_unknown_flag_prints_the_same_error_in_every_script(load, capsys, name):
    message = user_error(capsys, parse, load(name), "--nosuch", 1, "--compile")
    assert message == f"train_llm.py: error: {UNKNOWN}\n"
    assert (ROOT / "docs/flags.md").exists()


@pytest.mark.parametrize("file", sorted(ROOT.glob("*/configs/*.args")), ids=lambda file: file.stem)
def test_argument_file_names_the_first_chapter_that_has_its_flags(file):
    first_line, *_ = file.read_text().splitlines()
    used = set(re.findall(r"^--[\w-]+", file.read_text(), re.M))
    numbers = [name for name in SCRIPTS if name.isdecimal()]
    fitting = [name for name in numbers if used <= flags_of(SCRIPTS[name].read_text()).keys()]
    assert first_line == f"# For chapter {fitting[0]} and all later chapters."
    assert fitting == numbers[numbers.index(fitting[0]) :]


def test_learning_rate_rises_then_falls_to_a_tenth(chapter):
    args = parse(chapter, "--lr", 1, "--warmup-steps", 10, "--num-steps", 100)
    rates = [chapter.lr_at(args, step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    # Step 55 is in the middle of the decay, so its rate is the mean of 1 and 0.1.
    assert [rates[54], rates[-1]] == pytest.approx([0.55, 0.1])
    for line in ("--num-steps 5", "--num-steps 1 --warmup-steps 0", "--warmup-steps 100"):
        args = parse(chapter, *line.split())
        rates = [chapter.lr_at(args, step) for step in range(1, args.num_steps + 1)]
        assert min(rates) > 0 and max(rates) <= args.lr, line


def test_only_matrices_decay(chapter):
    args = parse(chapter)
    model = chapter.build_model(args, chapter.build_tokenizer_and_config(args)[1])
    decayed, others = chapter.build_optimizer(args, model).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {weight.ndim for weight in decayed["params"]} == {2}
    assert {weight.ndim for weight in others["params"]} == {1}
    assert len(decayed["params"] + others["params"]) == len(list(model.parameters()))


# Each row has the configuration of a model, its number of weights in billions, and the number of
# weights that a token uses, also in billions. The last value is True if the model's card counts the
# input embedding; the cards of GPT-OSS do not count it.
CARDS = [
    ("05-large-model/configs/llama-3.1-8b.json", 8.03, 8.03, True),
    ("09-expert-parallel/configs/qwen3-30b-a3b.json", 30.5, 3.3, True),
    ("09-expert-parallel/configs/deepseek-v3-671b.json", 671, 37, True),
    ("09-expert-parallel/configs/gpt-oss-120b.json", 116.83, 5.13, False),
]


@pytest.mark.parametrize("path, total, active, counts_embedding", CARDS)
def test_mfu_counts_the_active_weights_of_the_model_card(
    chapter, monkeypatch, path, total, active, counts_embedding
):
    args = parse(chapter, "--precision", "bf16")
    assert chapter.mfu(args, None, 1.0) is None, "an MFU on a CPU, whose peak is unknown"
    monkeypatch.setitem(chapter.PEAK_TFLOPS, "cpu", 1e-12)
    config = transformers.AutoConfig.from_pretrained(ROOT / path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    attention = 12 * config.num_hidden_layers * width * args.seq_length
    counted = (chapter.mfu(args, model, 1.0) - attention) / 6
    if counts_embedding:
        counted += model.get_input_embeddings().weight.numel()
    # The card rounds its numbers, so allow a little more than half a unit of their last digit.
    for number, published in [(model.num_parameters(), total), (counted, active)]:
        decimals = len(str(published).partition(".")[2])
        assert abs(number / 1e9 - published) < 0.6 * 10**-decimals


def test_metrics_have_the_promised_columns(small_tokens, tmp_path):
    args = ["-d", small_tokens(), "--num-steps", 6, "--log-every", 2, "--eval-every", 3]
    rows = curves_of(tmp_path, {1: {"run": ("01", args)}})["run"]
    names = "step epoch loss grad_norm lr tokens_per_second mfu peak_memory_gib".split()
    assert list(rows) == [0, 2, 3, 4, 6] and list(rows[0]) == ["step", "val_loss"]
    assert list(rows[2]) == list(rows[4]) == names
    assert list(rows[3]) == list(rows[6]) == [*names, "val_loss"]
    speeds = [rows[step]["tokens_per_second"] for step in (2, 3, 4, 6)]
    assert speeds[0] is None, "a speed in the first interval, which may include compilation"
    assert min(speeds[1:]) > 0


# ---- simulated GPUs --------------------------------------------------------------------------
def simulate(monkeypatch, gpus=0, files=()):
    """Let torch report `gpus` GPUs, and pretend that `files` exist."""
    exists = os.path.exists
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os.path, "exists", lambda path: path in files or exists(path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


def test_run_on_a_broken_gpu_stops(chapter, monkeypatch, capsys):
    simulate(monkeypatch, files=["/dev/nvidiactl"])
    error = user_error(capsys, parse, chapter)
    assert error.count("\n") == 1 and "no working GPU; repair the driver, or pass" in error
    assert parse(chapter, "--device", "cpu").device == "cpu"


def test_run_on_a_hidden_gpu_uses_the_cpu(chapter, monkeypatch):
    simulate(monkeypatch, files=["/dev/nvidiactl"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert parse(chapter).device == "cpu"


@pytest.mark.parametrize("capability, precision", [((7, 5), "fp32"), ((8, 0), "bf16")])
def test_default_precision_is_bf16_where_it_is_fast(chapter, monkeypatch, capability, precision):
    """Simulate a T4 and an A100: torch would emulate bf16 on the T4, whose capability is 7.5."""
    simulate(monkeypatch, gpus=1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    args = parse(chapter)
    assert (args.device, args.precision) == ("cuda", precision)
    assert parse(chapter, "--precision", "bf16").precision == "bf16"


def test_configuration_takes_the_changes_of_the_command(chapter, models):
    """Check that --config changes the configuration, and the number of layers of a model."""
    layers = ["--config", "num_hidden_layers=3"]
    args = parse(chapter, *layers, "rms_norm_eps=1e-5", "hidden_act=gelu")
    _, config = chapter.build_tokenizer_and_config(args)
    assert (config.num_hidden_layers, config.rms_norm_eps, config.hidden_act) == (3, 1e-5, "gelu")
    for family in ("qwen3", "gemma3", "gpt2"):
        args = parse(chapter, "-m", models / family, "-s", 64, *layers)
        model = chapter.build_model(args, chapter.build_tokenizer_and_config(args)[1])
        assert len(chapter.layers_of(model)) == 3
