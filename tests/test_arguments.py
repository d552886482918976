"""The command line, and the small functions that derive values from it."""

import os
import re
import sys

import pytest
import torch
import transformers

from chapters import flags
from conftest import FRAMEWORKS, ROOT, SCRIPTS, curves_of, user_error


@pytest.fixture
def chapter(request, load):
    return load(getattr(request, "param", "01"))


@pytest.fixture
def parse(chapter, monkeypatch):
    """Return a function that parses a command line, which does not name the script."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def parse_line(line, world_size=1):
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        monkeypatch.setattr(sys, "argv", ["train_llm.py", *line.split()])
        return chapter.parse_args()

    return parse_line


def test_file_of_arguments_is_read(parse, tmp_path):
    file = tmp_path / "run.args"
    file.write_text("# comment\n--num-steps 7\n-d 'my file.jsonl'  # comment\n\n--compile\n")
    args = parse(f"@{file} --seed 3")
    values = args.num_steps, args.dataset_name, args.compile, args.seed
    assert values == (7, "my file.jsonl", True, 3)


@pytest.mark.parametrize("chapter", sorted(SCRIPTS.keys() - FRAMEWORKS), indirect=True)
def test_help_explains_every_flag(chapter, parse, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    output, errors = capsys.readouterr()
    assert (stop.value.code, errors) == (0, "")
    flags = re.findall(r'add\((?:"-\w", )?"(--[\w-]+)"', SCRIPTS["01"].read_text())
    assert "--num-steps" in flags
    unexplained = [flag for flag in flags if not re.search(rf"{flag}\b[^\n]*(\n\s+)?\S", output)]
    assert unexplained == []
    assert "(default: 256)" in output


UNKNOWN = "--nosuch 1: unknown argument; a later chapter may have it, see docs/flags.md"


@pytest.mark.parametrize("chapter", sorted(SCRIPTS.keys() - FRAMEWORKS), indirect=True)
def test_unknown_flag_ends_with_the_same_words_in_every_script(parse, capsys):
    assert user_error(capsys, parse, "--nosuch 1 --compile") == f"train_llm.py: error: {UNKNOWN}\n"
    assert (ROOT / "docs/flags.md").exists()


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
def test_script_in_a_framework_has_the_lines_about_unknown_flags(framework):
    """The packages of the framework may not be installed."""
    [lines] = re.findall(r"args, unknown = .*?flags.md\"\)\n", SCRIPTS["01"].read_text(), re.DOTALL)
    assert lines in SCRIPTS[framework].read_text()


@pytest.mark.parametrize("file", sorted(ROOT.glob("*/configs/*.args")), ids=lambda file: file.stem)
def test_argument_file_names_the_first_chapter_that_has_its_flags(file):
    first_line, *_ = file.read_text().splitlines()
    used = set(re.findall(r"^--[\w-]+", file.read_text(), re.M))
    numbers = [name for name in SCRIPTS if name.isdecimal()]
    fitting = [name for name in numbers if used <= flags(SCRIPTS[name].read_text()).keys()]
    assert first_line == f"# For chapter {fitting[0]} and all later chapters."
    assert fitting == numbers[numbers.index(fitting[0]) :]


BATCHES = [
    ("01", "", 1, 8, 4),
    ("01", "--batch-size 99", 1, 32, 1),
    ("01", "--global-batch-size 7 --batch-size 4", 1, 1, 7),
    ("02", "--global-batch-size 24", 2, 6, 2),
    ("02", "--global-batch-size 24", 12, 2, 1),
]


@pytest.mark.parametrize("chapter, line, ranks, size, accumulation", BATCHES, indirect=["chapter"])
def test_global_batch_gives_the_accumulation(parse, line, ranks, size, accumulation):
    args = parse(line, ranks)
    assert (args.micro_batch_size, args.accumulation) == (size, accumulation)
    assert size * accumulation * ranks == args.global_batch_size


@pytest.mark.parametrize("chapter", ["02"], indirect=True)
def test_chapter_02_without_torchrun_prints_its_command(parse, monkeypatch, capsys):
    monkeypatch.delenv("LOCAL_RANK")
    assert "this script needs torchrun: torchrun --standalone" in user_error(capsys, parse, "")


def test_learning_rate_rises_then_falls_to_a_tenth(chapter, parse):
    args = parse("--lr 1 --warmup-steps 10 --num-steps 100")
    rates = [chapter.lr_at(args, step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    # Step 55 is the middle of the decay.
    assert [rates[54], rates[-1]] == pytest.approx([0.55, 0.1])
    for line in ("--num-steps 5", "--num-steps 1 --warmup-steps 0", "--warmup-steps 100"):
        args = parse(line)
        rates = [chapter.lr_at(args, step) for step in range(1, args.num_steps + 1)]
        assert min(rates) > 0 and max(rates) <= args.lr, line


def test_only_matrices_decay(chapter, parse):
    args = parse("")
    model = chapter.build_model(args, chapter.build_tokenizer_and_config(args)[1])
    decayed, others = chapter.build_optimizer(args, model).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {weight.ndim for weight in decayed["params"]} == {2}
    assert {weight.ndim for weight in others["params"]} == {1}
    assert len(decayed["params"] + others["params"]) == len(list(model.parameters()))


def test_mfu_counts_the_multiplications_of_a_llama(chapter, parse, monkeypatch):
    """An 8B Llama has 7.505e9 weights that multiply, and 32 layers with a width of 4096."""
    args = parse("--precision bf16 --seq-length 1024")
    args.seq_length = 4096
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    config = transformers.LlamaConfig(vocab_size=128256, **sizes, **heads)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert chapter.mfu(args, model, 1000.0) is None, "the peak of a CPU is unknown"
    args.device = "cuda"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    flops = 6 * (8_030_261_248 - 128256 * 4096) + 12 * 32 * 4096 * 4096
    assert chapter.mfu(args, model, 6667.0) == pytest.approx(6667 * flops / 989e12)


def test_metrics_have_the_promised_columns(small_text, tmp_path):
    args = ["-d", small_text, "--num-steps", 6, "--log-every", 2, "--eval-every", 3]
    rows = curves_of(tmp_path, {1: {"run": ("01", args)}})["run"]
    names = "step epoch loss grad_norm lr tokens_per_second mfu peak_memory_gib".split()
    assert list(rows) == [0, 2, 3, 4, 6] and list(rows[0]) == ["step", "val_loss"]
    assert list(rows[2]) == list(rows[4]) == names
    assert list(rows[3]) == list(rows[6]) == [*names, "val_loss"]
    speeds = [rows[step]["tokens_per_second"] for step in (2, 3, 4, 6)]
    assert speeds[0] is None, "the first interval may include compilation"
    assert min(speeds[1:]) > 0


# ---- GPUs, as far as a machine without GPUs can tell -----------------------------------------
def simulate(monkeypatch, gpus=0, files=(), **variables):
    """Let torch see a number of GPUs, and let the system have these files and variables."""
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: path in files or exists(path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


GPUS = [("01", {"files": ["/dev/nvidiactl"]}), ("01", {"files": ["/dev/kfd"]})]
GPUS += [("01", {"CUDA_VISIBLE_DEVICES": "0,1"}), ("03", {"SLURM_GPUS_ON_NODE": "8"})]


@pytest.mark.parametrize("chapter, system", GPUS, indirect=["chapter"])
def test_run_on_a_broken_gpu_stops(parse, monkeypatch, capsys, system):
    simulate(monkeypatch, **system)
    error = user_error(capsys, parse, "")
    assert error.count("\n") == 1 and "no working GPU; repair the driver, or pass" in error
    assert parse("--device cpu").device == "cpu"


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_run_on_a_hidden_gpu_uses_the_cpu(parse, monkeypatch, hidden):
    simulate(monkeypatch, files=["/dev/nvidiactl"], CUDA_VISIBLE_DEVICES=hidden)
    assert parse("").device == "cpu"


@pytest.mark.parametrize("capability, precision", [((7, 5), "fp32"), ((8, 0), "bf16")])
def test_default_precision_is_bf16_where_it_is_fast(parse, monkeypatch, capability, precision):
    """A T4 has compute capability 7.5; torch would emulate bf16 there."""
    simulate(monkeypatch, gpus=1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    args = parse("")
    assert (args.device, args.precision) == ("cuda", precision)
    assert parse("--precision bf16").precision == "bf16"


def test_configuration_takes_the_changes_of_the_command(chapter, models, parse):
    """Lists that depend on the number of layers follow."""
    args = parse("--config num_hidden_layers=3 rms_norm_eps=1e-5 hidden_act=gelu")
    _, config = chapter.build_tokenizer_and_config(args)
    assert (config.num_hidden_layers, config.rms_norm_eps, config.hidden_act) == (3, 1e-5, "gelu")
    for family in ("qwen3", "gemma3", "gpt2"):
        args = parse(f"-m {models / family} -s 64 --config num_hidden_layers=3")
        model = chapter.build_model(args, chapter.build_tokenizer_and_config(args)[1])
        assert len(chapter.layers_of(model)) == 3
