"""Test that the dry run agrees with the READMEs and the planner, and finds planted faults."""

import contextlib
import io
import json
import math
import re
import shlex

import pytest

import dry_run
import will_it_fit
from conftest import ROOT, SCRIPTS, SHORT, change_file, run_or_fail
from gpus import GPUS as KINDS
from marks import exhaustive
from memory import PipelineMemory, fullest_step
from real_commands import real_commands
from training_step import find_config

pytestmark = [pytest.mark.tool, pytest.mark.usefixtures("no_group")]

# 512 ranks can split the weights without padding, because the first three sizes are multiples of
# 512.
WIDTH, MLP_WIDTH, VOCABULARY, LAYERS, LENGTH = 512, 1024, 512, 3, 64
MODEL = (
    f"--config hidden_size={WIDTH} intermediate_size={MLP_WIDTH} vocab_size={VOCABULARY} "
    f"num_hidden_layers={LAYERS} num_attention_heads=8 num_key_value_heads=8 head_dim=64 "
    f"-s {LENGTH} -b 1 "
)
# Count the weights of one layer, and the weights outside of all layers: the embedding, the last
# norm and the head.
LAYER = 4 * WIDTH**2 + 3 * WIDTH * MLP_WIDTH + 2 * WIDTH
OUTER = 2 * VOCABULARY * WIDTH + WIDTH
WEIGHTS = LAYERS * LAYER + OUTER
MIXTURE = f"-m {ROOT}/09-expert-parallel/tiny-mixture -b 1"


def run(script, gpus, arguments, ranks="0", gpu="H100-80GB", samples=None):
    """Run a script under the dry run as each of `ranks`.

    Return the result of the only rank, or a list of results if there are several ranks. By default,
    a step has one sample for each GPU.
    """
    words = f"--gpus {gpus} --gpu {gpu} --rank {ranks} -- {script} {arguments} "
    words += f"--global-batch-size {samples or gpus}"
    options = dry_run.parse_args(shlex.split(words))
    dry_run.load_script(options)
    results = dry_run.run_ranks(options, dry_run.ranks_to_run(options, None))
    return results if len(results) > 1 else results[0]


def sent(result, kind, ranks=None, column="bytes"):
    """Return the bytes that a rank sends in step 2 with one kind of collective, such as all-gather.

    With `ranks`, count only collectives among this number of ranks. With `column="calls"`, return
    the number of calls instead of the bytes.
    """
    assert not result["problem"], result["problem"]["traceback"]
    return sum(
        row[column]
        for row in result["sent"]
        if row["phase"].startswith("step 2")
        and row["kind"] == kind
        and row["ranks"] == (ranks or row["ranks"])
        # Leave out collectives of single numbers, such as the norm of the gradients, because the
        # formulas do not count them.
        and row["bytes"] > 8 * row["calls"]
    )


def share(ranks):
    """Return the fraction of a tensor that each of `ranks` ranks sends in a ring all-gather."""
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
    # The backward pass gathers the weights of each layer again, except for the last layer. It does
    # not gather the embedding, the last norm and the head again.
    gathered = 2 * 2 * WEIGHTS - 2 * OUTER - 2 * LAYER
    assert sent(result, "all-gather") == pytest.approx(share(gpus) * gathered)
    assert sent(result, "all-gather", column="calls") == 2 * LAYERS
    assert sent(result, "reduce-scatter") == pytest.approx(share(gpus) * 4 * WEIGHTS)
    assert sent(result, "reduce-scatter", column="calls") == LAYERS + 1


def test_each_micro_batch_of_kept_layers_sends_the_bytes_of_the_formula():
    result = run(SCRIPTS["04"], 8, f"{MODEL} --no-reshard-after-forward", samples=16)
    assert sent(result, "all-gather") == pytest.approx(2 * share(8) * 2 * WEIGHTS)
    assert sent(result, "reduce-scatter") == pytest.approx(2 * share(8) * 4 * WEIGHTS)
    for kind in ("all-gather", "reduce-scatter"):
        assert sent(result, kind, column="calls") == 2 * (LAYERS + 1)


def test_muon_sends_the_bytes_of_the_formula():
    """Count the padding, too: Muon adds zero matrices, so that each rank gets the same number."""
    result = run(SCRIPTS["muon"], 8, MODEL)
    # Each pair has the size of a matrix, and the number of matrices of this shape in a layer.
    # Attention has four matrices. The MLP has two matrices of one shape, and a third matrix with
    # rows and columns swapped.
    sizes = [(WIDTH**2, 4), (WIDTH * MLP_WIDTH, 2), (WIDTH * MLP_WIDTH, 1)]
    weights = sum(size * math.ceil(number * LAYERS / 8) * 8 for size, number in sizes)
    assert sent(result, "all-to-all") == pytest.approx(2 * share(8) * 2 * weights / 8)
    assert sent(result, "all-to-all", column="calls") == 2 * 3


@pytest.mark.parametrize("gpus", [exhaustive(8), 64, exhaustive(512)])
def test_replicas_send_the_bytes_of_the_formula(gpus):
    result = run(SCRIPTS["04"], gpus, f"{MODEL} --replicas {gpus // 4}")
    assert sent(result, "reduce-scatter", 4) == pytest.approx(share(4) * 4 * WEIGHTS)
    reduced = 2 * share(gpus // 4) * 4 * WEIGHTS / 4
    assert sent(result, "all-reduce", gpus // 4) == pytest.approx(reduced)
    assert sent(result, "all-reduce", gpus // 4, column="calls") == LAYERS + 1


@pytest.mark.parametrize(
    "gpus, recompute",
    [
        (8, "none"),
        exhaustive(64, "none"),
        exhaustive(512, "none"),
        exhaustive(8, "full"),
        exhaustive(8, "selective"),
    ],
)
def test_tensor_parallelism_sends_the_bytes_of_the_formula(gpus, recompute):
    arguments = f"{MODEL} --tensor-parallel-size 4 --recompute {recompute}"
    result = run(SCRIPTS["06"], gpus, arguments)
    # Each group of four ranks processes four micro-batches, each with one sample. In a micro-batch,
    # a layer gathers its hidden states four times, or six times if it is recomputed, and the head
    # gathers its weights. Each number has two bytes.
    gathers = 4 if recompute == "none" else 6
    gathered = gathers * LAYERS * 2 * LENGTH * WIDTH + 2 * VOCABULARY * WIDTH
    assert sent(result, "all-gather", 4) == pytest.approx(4 * share(4) * gathered)
    # The ranks exchange their columns of the embedded tokens and, in the backward pass, the columns
    # of the gradient.
    exchanged = 4 * 2 * 2 * LENGTH * WIDTH / 4
    assert sent(result, "all-to-all", 4) == pytest.approx(share(4) * exchanged)
    norms, shards = (2 * LAYERS + 1) * WIDTH, gpus // 4
    reduced = 4 * ((WEIGHTS - norms) / 4 + norms)
    assert sent(result, "reduce-scatter", shards) == pytest.approx(4 * share(shards) * reduced)


@pytest.mark.parametrize("gpus", GPUS)
def test_pipeline_sends_the_bytes_of_the_formula(gpus):
    arguments = f"{MODEL} --pipeline-parallel-size 2"
    result = run(SCRIPTS["07"], gpus, arguments)
    # The first rank sends the hidden states of its two micro-batches to the next stage. The first
    # rank also gathers its only layer and its embedding, once for both micro-batches.
    assert sent(result, "send") == 2 * 2 * LENGTH * WIDTH
    gathered = 2 * (LAYER + VOCABULARY * WIDTH)
    assert sent(result, "all-gather") == pytest.approx(share(gpus // 2) * gathered)


@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("style", ["gather", exhaustive("ulysses")])
def test_context_parallelism_sends_the_bytes_of_the_formula_and_never_waits(style, gpus):
    # The keys are as wide as the hidden states. Each group of four ranks processes four
    # micro-batches.
    size, keys, micro_batches = 4, WIDTH, 4
    arguments = f"{MODEL} --context-parallel-size {size} --context-parallel-style {style}"
    result = run(SCRIPTS["08"], gpus, arguments)
    if style == "gather":
        kind, per_layer = "all-gather", 4 * LENGTH * keys * share(size)
    else:
        kind, per_layer = "all-to-all", 2 * 4 * LENGTH * (WIDTH + keys) * share(size) / size
    assert sent(result, kind, size) == pytest.approx(micro_batches * LAYERS * per_layer)
    assert not [row for row in result["waits"] if row["phase"].startswith("step")]


@pytest.mark.parametrize("size", [2, exhaustive(8)])
def test_expert_parallelism_sends_the_bytes_of_the_formula(size):
    arguments = f"{MIXTURE} -s 256 --expert-parallel-size {size}"
    result = run(SCRIPTS["09"], 8, arguments)
    # Each of 256 tokens travels to two experts and back, in each of three layers, in the forward
    # and in the backward pass. A token's hidden state has 128 numbers of two bytes.
    per_pass = 2 * 3 * 256 * 2 * 128 * 2
    assert sent(result, "all-to-all", size) == pytest.approx(2 * per_pass * share(size), rel=0.01)
    # In each of three layers, the host waits until it knows how many tokens the ranks exchange.
    [wait] = [row for row in result["waits"] if row["phase"].startswith("step 2")]
    assert wait["function"] == "dispatch" and wait["times"] == 3


# Each value has a number of ranks, flags, and the kinds of collectives to compare. Leave out
# all-to-all: on a CPU, DTensor uses an all-gather in its place. In chapter 09, the bytes of an
# all-to-all depend on the data, which the dry run lacks.
REAL_RANKS = {
    "02": [2, "--batch-size 2", "all-reduce"],
    "04": [4, "--replicas 2 --batch-size 1", "all-gather reduce-scatter all-reduce"],
    "06": [2, "--tensor-parallel-size 2 --recompute full", "reduce-scatter"],
    "07": [2, "--pipeline-parallel-size 2 --batch-size 4", "send"],
    "08": [2, "--context-parallel-size 2", "all-gather reduce-scatter"],
    "09": [2, "--expert-parallel-size 2 --recompute full", "all-gather reduce-scatter"],
}


@pytest.mark.parametrize(
    "chapter", [name if name < "07" else exhaustive(name) for name in REAL_RANKS]
)
def test_real_ranks_send_what_the_dry_run_counts(chapter, tmp_path):
    ranks, split, collectives = REAL_RANKS[chapter]
    words = ["--precision", "fp32", *split.split()]
    if chapter == "09":
        words += ["-m", f"{ROOT}/09-expert-parallel/tiny-mixture"]
    arguments = [*SHORT, *words, "--num-steps", 2, "--save-dir", tmp_path / "runs"]
    job = [ROOT / "tests/support/count_sent.py", [tmp_path / "sent", SCRIPTS[chapter], *arguments]]
    run_or_fail(ranks, [job], tmp_path / "jobs")
    real = {"problem": None, "sent": json.loads((tmp_path / "sent").read_text())}
    dry = run(SCRIPTS[chapter], ranks, shlex.join(map(str, [*SHORT, *words])), samples=8)
    for kind in collectives.split():
        for column in ("calls", "bytes"):
            assert sent(real, kind, column=column) == sent(dry, kind, column=column) > 0


# ---- memory ----------------------------------------------------------------------------------
SMALL_8B = "-m meta-llama/Llama-3.1-8B --config num_hidden_layers=3 -s 4096 -b 1 "
SMALL_30B = "-m Qwen/Qwen3-30B-A3B --config num_hidden_layers=3 -s 4096 -b 1"
PIPELINE = "-b 4 --recompute full"
LAYOUTS = {
    "02": [8, ""],
    "04": [8, ""],
    "04 replicas": [64, "--replicas 8"],
    "05": [64, "--recompute full"],
    "05 selective": [64, "--recompute selective"],
    "05 offload": [64, "--cpu-offload --recompute full"],
    "06": [64, "--tensor-parallel-size 8"],
    "07 first": [64, f"--tensor-parallel-size 4 --pipeline-parallel-size 2 {PIPELINE}", "0"],
    "07 last": [64, f"--tensor-parallel-size 4 --pipeline-parallel-size 2 {PIPELINE}", "last"],
    "08": [8, "--context-parallel-size 8 -s 32768", "7"],
    "08 ulysses": [8, "--context-parallel-size 8 --context-parallel-style ulysses -s 32768", "7"],
    "09": [16, f"{SMALL_30B} --expert-parallel-size 8"],
    "09 full": [16, f"{SMALL_30B} -s 32768 --recompute full --expert-parallel-size 8"],
    "09 TP": [16, f"{SMALL_30B} -s 32768 --expert-parallel-size 8 --tensor-parallel-size 2"],
    "lora": [8, "--lora-rank 16"],
    "lora full": [8, "--lora-rank 16 --recompute full"],
    "muon": [8, ""],
    "float8": [8, "--float8"],
    "float8 full": [8, "--float8 --recompute full"],
}


def planned(name, gpus, arguments):
    """Return the planner's peak memory for a layout: the bytes of tensors on the fullest GPU.

    For chapter 07, the last word of `name` chooses the first or the last pipeline stage instead.
    """
    chapter, _, part = name.replace("lora", "05").replace("muon", "04").partition(" ")
    arguments += " --muon" * (name == "muon")
    # Plan float8 as chapter 05, because both scripts need the same memory.
    chapter, arguments = chapter.replace("float8", "05"), arguments.replace("--float8", "")
    nodes = f"--chapter {chapter} --nodes {gpus // 8} --gpus-per-node 8 --global-batch-size {gpus}"
    args = will_it_fit.parse_args(shlex.split(f"{arguments} {nodes}"))
    config, _ = will_it_fit.load_config(args)
    args.model = will_it_fit.model_of(config)
    setting = will_it_fit.setting_of(args, chapter)
    if chapter == "07":
        step = PipelineMemory(setting, {"first": 0, "last": 1}[part])
        step.simulate()
    else:
        step = fullest_step(setting)
    return step.most.total()


@pytest.mark.parametrize(
    "name", [name if name in ("02", "06") else exhaustive(name) for name in LAYOUTS]
)
def test_peak_equals_the_planner(name):
    gpus, words, *ranks = LAYOUTS[name]
    result = run(SCRIPTS[name.partition(" ")[0]], gpus, f"{SMALL_8B} {words}", *ranks)
    assert not result["problem"], result["problem"]["traceback"]
    # Allow a larger difference in two cases. For a pipeline, the planner simulates one micro-batch,
    # and adds the memory of the other micro-batches. For LoRA, the planner ignores the mask of
    # conversations.
    relative = {"07": 0.03, "lora": 0.02}.get(name.partition(" ")[0])
    tolerance = {"rel": relative} if relative else {"abs": dry_run.GIB / 100}
    expected = planned(name, gpus, f"{SMALL_8B} {words}")
    assert result["fullest"]["bytes"] == pytest.approx(expected, **tolerance)


# These arguments change nothing in a dry run, so commands that differ only in these arguments share
# a run.
WITHOUT_EFFECT = """
    checkpoint_async checkpoint_every compile dataset_name experiment_name keep_checkpoints lr
    num_steps pretrained text_column wandb_id warmup_steps
""".split()
# Models with more layers than this run with fewer layers, so that all commands together take less
# than 15 minutes.
MAX_LAYERS = 28
PEAKS = {}


def options_of(command, *more_arguments):
    """Return the dry run's options for a command of the guide."""
    words = ["--gpus", command.gpus, "--gpu", command.gpu, "--", command.script]
    return dry_run.parse_args([str(word) for word in (*words, *command.arguments, *more_arguments)])


def peaks_of(command, ranks, *more_arguments):
    """Run a command under the dry run; return the peak bytes on the GPU by (rank, phase)."""
    options = options_of(command, *more_arguments)
    dry_run.load_script(options)
    peaks = {}
    for result in dry_run.run_ranks(options, ranks):
        assert not result["problem"], result["problem"]["traceback"]
        rows = [row for row in result["peaks"] if row["device"] == "gpu"]
        peaks |= {(result["rank"], row["phase"]): row["bytes"] for row in rows}
    return peaks


def peak_of(command, args):
    """Return the peak memory of a command: the bytes of all tensors on the GPU of its fullest rank.

    Run at most two micro-batches; in a pipeline with S stages, run at most 2 S micro-batches.
    Without a pipeline, further micro-batches do not raise the peak. In a pipeline, a rank keeps
    hidden states of each micro-batch, so the peak of chapter 07's command with all its 64
    micro-batches is 1.5% higher. Run a deep model with two small numbers of layers, and extend the
    line through the two peaks of each phase to the real number of layers.
    """
    stages, changes = getattr(args, "num_stages", 1), []
    ranks = [command.gpus - 1] if stages == 1 else [0, command.gpus - 1]
    if args.accumulation > 2 * stages:
        samples = 2 * stages * args.global_batch_size // args.accumulation
        changes = ["--global-batch-size", samples]
    is_tiny = args.model_name == "tiny"
    layers = 0 if is_tiny else find_config(args.model_name)[0].num_hidden_layers
    if layers <= MAX_LAYERS:
        return max(peaks_of(command, ranks, *changes).values())
    # Choose numbers of layers that leave the same remainder as the real number when they are
    # divided by the number of stages, so that the same stages have an additional layer.
    short, long = [layers % stages + number for number in (max(stages, 4), max(2 * stages, 6))]
    few = peaks_of(command, ranks, *changes, "--config", f"num_hidden_layers={short}")
    more = peaks_of(command, ranks, *changes, "--config", f"num_hidden_layers={long}")
    slope = (layers - short) / (long - short)
    return max(few[phase] + slope * (more[phase] - few[phase]) for phase in few)


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", real_commands(), ids=lambda command: command.name)
def test_real_command_fits(command, monkeypatch):
    """Check each command that real_commands() finds, so that a new command needs no new test."""
    monkeypatch.chdir(ROOT)
    options = options_of(command)
    args = dry_run.load_script(options)
    values = [item for item in vars(args).items() if item[0] not in WITHOUT_EFFECT]
    key = command.script, command.gpus, repr(values)
    if key not in PEAKS:
        PEAKS[key] = peak_of(command, args)
    needs = PEAKS[key] * (1 + options.fragmentation) + options.gpu_overhead_gib * dry_run.GIB
    assert needs <= KINDS[command.gpu].gpu_memory_gib * dry_run.GIB


# ---- faults ----------------------------------------------------------------------------------
# Each fault has a text of chapter 08's script, a replacement for this text, a part of the line that
# the dry run must report, and a part of the reason that it must print.
FAULTS = {
    "total on the CPU": (
        "total_loss = torch.zeros((), device=device)\n    for micro_step",
        "total_loss = torch.zeros(())\n    for micro_step",
        "total_loss += loss.detach()",
        "same device",
    ),
    "blocking copy of the batch": (
        ".to(device, non_blocking=True)",
        ".to(device)",
        "return batch.pin_memory().to(device)",
        "copies to the GPU",
    ),
    "positions on the CPU": (
        "torch.arange(batch.shape[1], device=batch.device)",
        "torch.arange(batch.shape[1])",
        "hidden = model(input_ids=context_part(args, batch)",
        "copies to the GPU",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_found_with_its_line(name, tmp_path):
    line, replacement, reported, reason = FAULTS[name]
    script = change_file(SCRIPTS["08"], line, replacement, tmp_path / "train_llm.py")
    result = run(script, 2, f"{MODEL} --context-parallel-size 2")
    found = [row for row in result["waits"] if row["phase"].startswith("step")]
    found += [result["problem"]] if result["problem"] else []
    assert len({row["line"] for row in found}) == 1
    assert reported in script.read_text().splitlines()[found[0]["line"] - 1]
    assert reason in found[0]["reason"]


# ---- the report ------------------------------------------------------------------------------


def test_added_all_reduce_is_reported_with_its_line(tmp_path):
    line, new = "total_loss += loss.detach()", "dist.all_reduce(loss.detach().clone())"
    copy = tmp_path / "my_train.py"
    script = change_file(SCRIPTS["04"], line, f"total_loss += loss.item()\n        {new}", copy)
    words = f"--gpus 2 --rank 0 -- {script} {MODEL} --global-batch-size 2"
    options = dry_run.parse_args(shlex.split(words))
    dry_run.load_script(options)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        dry_run.show(options, dry_run.run_ranks(options, [0]))
    report = [line.strip() for line in output.getvalue().splitlines()]
    added = "dist.all_reduce(loss.detach().clone())"
    [number] = [n for n, line in enumerate(report) if line.endswith(added)]
    assert "my_train.py:" in report[number]
    assert report[number + 1].split()[:4] == ["all-reduce", "2", "1", "1"]
    [number] = [n for n, line in enumerate(report) if line.endswith("total_loss += loss.item()")]
    assert report[number + 1] == "reads a value (waits: 1)"


def test_report_names_the_worst_rank_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--gpus", "2", "--gpu-overhead-gib", "100", "--", str(SCRIPTS["07"])]
    words += shlex.split(f"{MODEL} --pipeline-parallel-size 2 --global-batch-size 4")
    monkeypatch.setattr("sys.argv", ["dry_run.py", *words])
    with pytest.raises(SystemExit) as end:
        dry_run.main()
    assert end.value.code == 1
    output = capsys.readouterr().out
    assert "does not fit" in output
    assert not list(tmp_path.iterdir())


# ---- bad input -------------------------------------------------------------------------------

BAD = {
    "--gpus 0": "argument --gpus: must be at least 1, not 0",
    "--gpus 12": "--gpus 12: not divisible by --gpus-per-node 8; choose a multiple",
    "--gpus 8 --rank foo": "--rank foo: unknown rank; choose from 0 to 7, or last",
    # The script itself reports this error, because the dry run lets the script check the script's
    # flags.
    "--gpus 3": "--global-batch-size 32: not divisible by 3 data-parallel ranks; choose a multiple",
    "--gpus 8 --rank 0 8": "--rank 8: unknown rank; choose from 0 to 7, or last",
}
GUARD = 'if __name__ == "__main__":'
# Each case has a text of chapter 04's script, a replacement for this text, and a part of the error
# that the dry run must report. `.*` stands for the entire script. TRAIN stands for code that the
# dry run must not execute.
OTHER_SCRIPTS = {
    "own script": (".*", "TRAIN", "because it lacks parse_args, setup, build_model"),
    "renamed function": ("def train_step", "TRAIN\ndef step", "because it lacks train_step;"),
    "call of main on import": (GUARD, "TRAIN\nif True:", "would train on import"),
    "framework": ("import torch", "TRAIN; import torch, deepspeed", "trains with deepspeed"),
}


def check_refusal(words, message, monkeypatch, capsys):
    """Check that the dry run prints one error line with `message`, and exits with status 2."""
    monkeypatch.setattr("sys.argv", ["dry_run.py", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        dry_run.main()
    output, error = capsys.readouterr()
    assert end.value.code == 2 and not output
    assert error.startswith("dry_run.py: error: ") and error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize("options", BAD)
def test_mistake_in_a_flag_prints_one_line(options, monkeypatch, capsys):
    words = [*options.split(), "--", SCRIPTS["04"]]
    check_refusal(words, BAD[options], monkeypatch, capsys)


@pytest.mark.parametrize("name", OTHER_SCRIPTS)
def test_script_without_the_functions_of_a_chapter_is_not_executed(
    name, tmp_path, monkeypatch, capsys
):
    old, new, message = OTHER_SCRIPTS[name]
    script, ran = tmp_path / "train.py", tmp_path / "ran"
    new = new.replace("TRAIN", f"open({str(ran)!r}, 'w')")
    text = SCRIPTS["04"].read_text()
    script.write_text(new if old == ".*" else text.replace(f"\n{old}", f"\n{new}", 1))
    check_refusal(["--gpus", 2, "--", script], message, monkeypatch, capsys)
    assert not ran.exists()


def test_second_wrapper_of_ddp_is_reported_with_its_line(tmp_path):
    """Wrap a model in DDP twice: the inner wrapper would reduce gradients in each micro-batch."""
    source = SCRIPTS["02"].read_text()
    name = "import DistributedDataParallel"
    wrapped = "ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, **options)"
    assert source.count(name) == source.count(wrapped) == 1
    script = tmp_path / "train_llm.py"
    source = source.replace(wrapped, "ddp = DDP(DDP(model))").replace(name, f"{name} as DDP")
    script.write_text(source)
    problem = run(script, 2, MODEL)["problem"]
    assert "a second DistributedDataParallel" in problem["reason"]
    assert "DDP(DDP(" in source.splitlines()[problem["line"] - 1]


@pytest.mark.parametrize("path", sorted((ROOT / "assets/samples").glob("dry-run-*.txt")))
def test_sample_names_the_lines_of_the_current_scripts(path):
    for script, number, code in re.findall(r"(\S+/train_llm\.py):(\d+): (.*)", path.read_text()):
        line = (ROOT / script).read_text().splitlines()[int(number) - 1].strip()
        assert line.startswith(code[:60]), f"{path.stem}: line {number} is now {line}; record again"
