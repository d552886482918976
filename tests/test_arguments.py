"""The command line, and the small functions that everything is derived with."""

import json
import math
import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from conftest import FRAMEWORKS, SCRIPTS, metrics, run_or_fail, user_error


@pytest.fixture(scope="module", params=["01", "02"])
def chapter(request, load):
    return load(request.param)


@pytest.fixture
def parse(chapter, monkeypatch):
    """Return the chapter's parser, for a command line without the script's name."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def parse_line(line, world_size=1):
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        monkeypatch.setattr(sys, "argv", ["train_llm.py", *line.split()])
        return chapter.parse_args()

    return parse_line


def test_arguments_may_come_from_a_file(parse, tmp_path):
    file = tmp_path / "run.args"
    text = "# a comment\n--num-steps 7\n-d 'my file.jsonl'  # and one behind\n\n--compile\n"
    file.write_text(text)
    args = parse(f"@{file} --seed 3")
    found = args.num_steps, args.dataset_name, args.compile, args.seed
    assert found == (7, "my file.jsonl", True, 3)


@pytest.mark.parametrize("chapter", sorted(SCRIPTS.keys() - FRAMEWORKS), indirect=True)
def test_every_flag_is_explained(chapter, parse, capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    shown, said = capsys.readouterr()
    assert (stop.value.code, said) == (0, "")
    flags = re.findall(r'add\((?:"-\w", )?"(--[\w-]+)"', SCRIPTS["01"].read_text())
    assert len(flags) == 27
    for flag in flags:
        assert re.search(rf"{flag}\b[^\n]*(\n\s+)?\S", shown)
    assert "(default: 0.001)" in " ".join(shown.split())


def test_an_experiment_is_named_after_its_chapter(chapter, parse):
    assert parse("").experiment_name in chapter.__file__


@pytest.mark.parametrize(
    "line, micro, accumulation",
    [
        ("", 8, 4),
        ("--batch-size 5", 4, 8),
        ("--batch-size 100", 32, 1),
        ("--global-batch-size 7 --batch-size 4", 1, 7),
    ],
)
def test_accumulation_is_derived(parse, line, micro, accumulation):
    args = parse(line)
    assert (args.micro_batch_size, args.accumulation) == (micro, accumulation)
    assert micro * accumulation == args.global_batch_size


@pytest.mark.parametrize("chapter", ["02"], indirect=True)
@pytest.mark.parametrize(
    "world_size, micro, accumulation", [(1, 8, 3), (2, 6, 2), (3, 8, 1), (12, 2, 1)]
)
def test_ranks_share_the_global_batch(chapter, parse, world_size, micro, accumulation):
    args = parse("--global-batch-size 24", world_size)
    assert (args.micro_batch_size, args.accumulation) == (micro, accumulation)


def test_learning_rate_rises_then_falls_to_a_tenth(chapter, parse):
    args = parse("--lr 1 --warmup-steps 10 --num-steps 100")
    rates = [chapter.lr_at(args, step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[54] == pytest.approx(0.55)  # half-way down
    assert rates[-1] == pytest.approx(0.1)
    for line in ("--num-steps 5", "--num-steps 1 --warmup-steps 0", "--warmup-steps 100"):
        args = parse(line)
        for step in range(1, args.num_steps + 1):
            assert 0 < chapter.lr_at(args, step) <= args.lr


def test_only_matrices_decay(chapter, parse):
    args = parse("")
    _, config = load_tiny(chapter, args)
    model = chapter.build_model(args, config)
    optimizer = chapter.build_optimizer(args, model)
    decayed, others = optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {weight.ndim for weight in decayed["params"]} == {2}
    assert {weight.ndim for weight in others["params"]} == {1}
    assert len(decayed["params"] + others["params"]) == len(list(model.parameters()))


def load_tiny(chapter, args):
    """Return the built-in tokenizer and configuration, without waiting for other ranks."""
    build = chapter.build_tokenizer_and_config
    return getattr(build, "__wrapped__", build)(args)


def test_mfu_by_hand(load, parse, monkeypatch):
    """An 8B Llama on an H100: 6 × 7.505e9 weights that multiply, and 12 × 32 × 4096 × 4096."""
    import transformers

    chapter = load("01")
    args = parse("--precision bf16 --seq-length 1024")
    args.seq_length = 4096
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert chapter.mfu(args, model, 1000.0) is None  # no peak is known of this CPU
    args.device = "cuda"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    flops = 6 * (8_030_261_248 - 128256 * 4096) + 12 * 32 * 4096 * 4096
    assert chapter.mfu(args, model, 6667.0) == pytest.approx(6667 * flops / 989e12)
    assert chapter.mfu(args, model, None) is None
    args.precision = "fp32"
    assert chapter.mfu(args, model, 6667.0) is None
    args.precision = "bf16"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an unheard-of GPU")
    assert chapter.mfu(args, model, 6667.0) is None


def test_metrics_have_the_promised_columns(tmp_path):
    args = "--device cpu -s 64 --global-batch-size 4 --num-steps 6 --log-every 2 --eval-every 3"
    args = [*args.split(), "--eval-samples", "5", "--save-dir", tmp_path, "-e", "run"]
    run_or_fail(1, [("01", args)], tmp_path / "jobs")
    rows = metrics(tmp_path / "run")
    names = ["step", "epoch", "loss", "grad_norm", "lr", "tokens_per_second", "mfu"]
    names.append("peak_memory_gib")
    assert list(rows) == [0, 2, 3, 4, 6]
    assert list(rows[0]) == ["step", "val_loss"]
    assert list(rows[2]) == list(rows[4]) == names
    assert list(rows[3]) == list(rows[6]) == [*names, "val_loss"]
    assert rows[2]["tokens_per_second"] is None  # that interval may have compiled
    assert all(row["tokens_per_second"] > 0 for step, row in rows.items() if step > 2)
    assert all(math.isfinite(row["loss"]) for step, row in rows.items() if step)


def test_row_after_a_cut_row_is_on_a_line_of_its_own(tmp_path, load):
    chapter, rows = load("01"), [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.25}]
    wandb_run = SimpleNamespace(log=lambda row: None)
    path = tmp_path / "metrics.jsonl"
    for row in rows:
        chapter.log(tmp_path, wandb_run, row)
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
    path.write_text(path.read_text() + '{"step": 3, "lo')
    chapter.log(tmp_path, wandb_run, {"step": 3, "loss": 2.0})
    *_, cut, last = path.read_text().splitlines()
    assert cut == '{"step": 3, "lo' and json.loads(last) == {"step": 3, "loss": 2.0}


# ---- GPUs, as far as a machine without any can tell ---------------------------------------------


def pretend(monkeypatch, gpus=0, files=(), **variables):
    """Have torch see so many GPUs, the system have these files and environment variables."""
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: path in files or exists(path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


BROKEN = {
    "driver": {"files": ["/dev/nvidiactl"]},
    "AMD's driver": {"files": ["/dev/kfd"]},
    "given by CUDA": {"CUDA_VISIBLE_DEVICES": "0,1"},
}


@pytest.mark.parametrize("case", BROKEN)
def test_no_run_trains_on_a_cpu_because_a_gpu_is_broken(parse, monkeypatch, capsys, case):
    pretend(monkeypatch, **BROKEN[case])
    error = user_error(capsys, parse, "")
    assert error.count("\n") == 1 and "no working GPU; repair the driver, or pass" in error
    assert parse("--device cpu").device == "cpu"


def test_chapter_03_refuses_a_cpu_if_slurm_has_given_gpus(load, monkeypatch):
    pretend(monkeypatch, SLURM_GPUS_ON_NODE="8")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert load("03").has_gpu() and not load("02").has_gpu()


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_may_be_hidden_on_purpose(parse, monkeypatch, hidden):
    pretend(monkeypatch, files=["/dev/nvidiactl"], CUDA_VISIBLE_DEVICES=hidden)
    assert parse("").device == "cpu"


@pytest.mark.parametrize("capability, precision", [((7, 5), "fp32"), ((8, 0), "bf16")])
def test_bf16_is_for_gpus_that_have_it(parse, monkeypatch, capability, precision):
    """A T4 is 7.5: torch would take bf16 there and emulate it."""
    pretend(monkeypatch, gpus=1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    args = parse("")
    assert (args.device, args.precision) == ("cuda", precision)
    assert parse("--precision bf16").precision == "bf16"


@pytest.mark.parametrize("name, known", [
    ("H200", True), ("A100-SXM4-80GB", True), ("B200", True), ("H100 80GB HBM3", True),
    ("AMD Instinct MI300X", True), ("GB200", True), ("H200 NVL", True), ("L40S", True),
    ("L40", False), ("H100 80GB HBM3 MIG 1g.10gb", False), ("A100", False),
])  # fmt: skip
def test_peaks_are_of_whole_chips(load, name, known):
    """Another chip's or a slice's name may contain that of one in the table."""
    assert (name in load("01").PEAK_FLOPS) == known


def test_compiled_code_is_of_static_shapes(load, parse, monkeypatch):
    """An evaluation's other batch size would otherwise make torch compile dynamic code."""
    given = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda _, **options: given.append(options))
    monkeypatch.setattr(torch, "compile", lambda of, **options: given.append(options) or of)
    chapter = load("01")
    args = parse("--compile")
    _, config = load_tiny(chapter, args)
    chapter.build_model(args, config)
    assert given == [{"dynamic": False}] * 5


def test_a_configuration_may_be_changed(load, models, parse):
    """By its own names; what follows from the number of layers follows."""
    chapter = load("01")
    args = parse("--config hidden_size=64 num_hidden_layers=3 rms_norm_eps=1e-5 hidden_act=gelu")
    _, config = load_tiny(chapter, args)
    found = config.hidden_size, config.num_hidden_layers, config.rms_norm_eps, config.hidden_act
    assert found == (64, 3, 1e-5, "gelu")
    for family in ("qwen3", "gemma3", "gpt2"):
        args = parse(f"-m {models / family} -s 64 --config num_hidden_layers=3")
        _, config = load_tiny(chapter, args)
        model = chapter.build_model(args, config)
        assert len(chapter.layers_of(model)) == 3
