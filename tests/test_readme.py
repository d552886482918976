"""Test that the READMEs' commands print what is shown, and that generated parts are current."""

import json
import math
import re
import sys

import pytest

import docs
import samples
from cluster.cluster import missing_requirement
from flags import unknown_flags
from readme import Block, blocks, commands, readmes, shown

# The values after these words are measurements, which may differ between two runs.
MEASURED = {"tokens_per_second", "data_wait", "second", "peak_memory_gib", "mfu"}
# Numbers in these samples may differ by more than 0.1%, because float8 amplifies the rounding
# differences between CPUs. float8-check shows numbers with only two digits, so a change of the
# last digit is a change by several percent.
TOLERANCES = {"float8-run": 0.005, "float8-check": 0.05}
# These samples show measurements, so compare only the first words of their last three lines.
LIVE = {"data-loading-watch", "diagnosing-hang", "diagnosing-preflight", "fp16-check"}
# These samples show the results of many training steps. Rounding errors grow over the steps, and
# change some numbers and words, so compare only the first words here, too.
LIVE |= {"conversations-run", "lora-run", "preferences-run", "09-balance", "small-run"}
LIVE |= {"mixture-rehearsal"}
MODELS = {"Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B"}
# Each key is the name of a dataset, and each value is the name of the subset that the READMEs use.
DATASETS = {"roneneldan/TinyStories": "default", "allenai/c4": "en"}
DATASETS |= {"HuggingFaceFW/fineweb-edu": "sample-10BT"}
STAND_IN = """
import datasets

load = datasets.load_dataset
datasets.load_dataset = lambda name, *args, **options: load({hub!r} + name, *args, **options)
"""
SMALL = (
    " --num-steps 2 --seq-length 32 --global-batch-size 4 --batch-size 2 --eval-samples 4"
    " --device cpu --precision fp32"
)


# ---- commands --------------------------------------------------------------------------------
def params(found):
    """Return blocks as test parameters; mark all blocks as exhaustive, except quick blocks."""
    return [
        pytest.param(block, id=block.name, marks=[] if is_quick(block) else pytest.mark.exhaustive)
        for block in found
    ]


def is_quick(block):
    return block.text.startswith(("diff", "make diff")) or block.sample == "fp16-run"


def runs_here(block):
    """Return whether a test can run a block: the block has no needs, and is not `make test`."""
    return not block.needs and not block.text.startswith("make test")


# Leave out chapters 03 and 05, because on a CPU they print the same lines as chapters
# 02 and 04.
RUNS = [block for block in commands() if re.fullmatch(r"0[1246789]-run", block.sample)]
HUB_RUNS = [block for block in commands() if "hub" in block.needs and "train_llm.py" in block.text]


@pytest.fixture(autouse=True)
def allocator(monkeypatch):
    """Set the variables that chapter 01's in-depth.md recommends, so that commands are faster."""
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(2**34))


@pytest.mark.slow
@pytest.mark.parametrize("block", params(filter(runs_here, commands())))
def test_command_prints_what_its_readme_shows(block, tmp_path):
    status, output = samples.run(block, tmp_path, timeout=1100)
    assert status == 0, output
    if block.sample:
        expected, output = sample_of(block), shown(block.sample, output)
        if block.sample in LIVE:
            expected, output = (first_words(text) for text in (expected, output))
        assert differences(expected, output, TOLERANCES.get(block.sample, 1e-3)) == []


@pytest.mark.slow
@pytest.mark.parametrize("block", RUNS, ids=lambda block: block.sample)
def test_run_begins_as_its_readme_shows(block, tmp_path):
    """Run only up to the last step before the sample's dots, because a full run takes minutes."""
    head, _, _ = sample_of(block).partition("...\n")
    step = max(map(int, re.findall(r"^step (\d+)", head, re.M)))
    text = f"{block.text.rstrip()} --num-steps {max(step, 1)} --eval-every 1000"
    status, output = samples.run(Block(block.name, "bash", text), tmp_path, timeout=600)
    assert status == 0 and "finished: " in output, output
    # Remove the validation loss of the last step, because the README's run continues after this
    # step without an evaluation.
    begin = re.sub(r"(?m)^(step [1-9].*)  val_loss.*", r"\1", output)
    assert differences(head, "".join(begin.splitlines(keepends=True)[: head.count("\n")])) == []


def sample_of(block):
    return (samples.SAMPLES / f"{block.sample}.txt").read_text()


def first_words(text):
    """Return the first words of a text's last three lines, one word per line."""
    return "\n".join(line.split()[0] for line in text.rstrip().splitlines()[-3:])


def differences(expected, output, tolerance=1e-3):
    """Return the pairs of lines that differ, or one pair if the numbers of lines differ.

    Ignore measured values, and small differences between numbers: up to `tolerance` times the
    larger number, or up to 1e-5.
    """
    lines, other_lines = expected.splitlines(), output.splitlines()
    if len(lines) != len(other_lines):
        return [(f"{len(lines)} lines", f"{len(other_lines)} lines: {output}")]
    pairs = zip(lines, other_lines, strict=True)
    return [pair for pair in pairs if not same_line(*(line.split() for line in pair), tolerance)]


def same_line(words, other_words, tolerance):
    """Return whether two lists of words are equal, except for small differences of numbers.

    Two numbers may differ by `tolerance` times the larger number, or by 1e-5. Ignore each value
    that follows a word in MEASURED.
    """
    same_length = len(words) == len(other_words)
    triples = zip(["", *words], words, other_words, strict=False)
    return same_length and all(
        before in MEASURED or same_word(word, other, tolerance) for before, word, other in triples
    )


def same_word(word, other_word, tolerance):
    try:
        numbers = [float(text.replace(",", "")) for text in (word, other_word)]
    except ValueError:
        return word == other_word
    return math.isclose(*numbers, rel_tol=tolerance, abs_tol=1e-5)


@pytest.fixture
def stand_in(models, tmp_path, monkeypatch):
    """Let local folders replace the models and datasets of the hub that the READMEs name."""
    for name in MODELS:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).symlink_to(models / "qwen3")
    rows = [json.dumps({"text": f"Once upon a time there was number {n}."}) for n in range(100)]
    for name, subset in DATASETS.items():
        folder = tmp_path / "hub" / name
        folder.mkdir(parents=True)
        (folder / "train.jsonl").write_text("\n".join(rows))
        card = f"---\nconfigs: [{{config_name: {subset}, data_files: train.jsonl}}]\n---\n"
        (folder / "README.md").write_text(card)
    # Replace load_dataset() in the module sitecustomize, because each Python process imports this
    # module when the process starts.
    (tmp_path / "sitecustomize.py").write_text(STAND_IN.format(hub=f"{tmp_path}/hub/"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("block", HUB_RUNS, ids=lambda block: block.name)
def test_command_for_the_hub_runs_on_a_stand_in(block, stand_in, tmp_path):
    """Replace the hub with local folders, and the GPUs with two CPU processes."""
    text = block.text.replace("--nproc-per-node gpu", "--nproc-per-node 2").replace("--compile", "")
    assert text.count("train_llm.py") == 1, "a block must have one command, to append the sizes to"
    block = Block(block.name, "bash", text.rstrip() + SMALL)
    status, output = samples.run(block, tmp_path, timeout=1100)
    assert status == 0 and "finished: " in output, output


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_practice_cluster_stops_requeues_and_cancels_a_job(tmp_path):
    """Type the commands that the READMEs show for the practice cluster into the cluster's shell."""
    if reason := missing_requirement():
        pytest.skip(reason)
    status, output = samples.practise(tmp_path, timeout=560)
    assert status == 0, output
    steps = sorted(set(map(int, re.findall(r"^stopped at step (\d+); ", output, flags=re.M))))
    assert len(steps) == 2 and steps[-1] < 900, output
    assert "requeue: yes" in output and "requeue: no" in output, output
    assert "continuing from outputs/practice/checkpoints/step-" in output, output


# ---- text ------------------------------------------------------------------------------------
def test_generated_parts_are_current(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["docs.py", "--check"])
    with pytest.raises(SystemExit) as stop:
        docs.main()
    assert stop.value.code == 0, f"{capsys.readouterr()}\nrun `make docs` to renew these parts"


def test_blocks_are_generated_or_run():
    """Check that cog generates all diffs and outputs, and the Python code that no test runs."""
    for path in readmes():
        languages = {block.kind for block in blocks(path)}
        assert languages <= {"bash", "text", "diff", "python"}, path
        by_hand = re.sub(r"\[\[\[cog.*?\[\[\[end\]\]\]", "", path.read_text(), flags=re.S)
        is_run = path.name.startswith(("your-own-", "data-loading"))
        generated = "diff|text" if is_run else "diff|python|text"
        assert not re.search(f"```({generated})", by_hand), path


def test_sample_of_make_train_has_the_lines_of_the_makefile():
    """Check that the Makefile contains all lines of the sample that begin with `== `.

    Only an exhaustive test runs `make train`.
    """
    lines = (samples.SAMPLES / "make-train.txt").read_text().splitlines()
    messages = [line for line in lines if line.startswith("== ")]
    makefile = (docs.ROOT / "Makefile").read_text()
    assert messages and [line for line in messages if line not in makefile] == []


def test_commands_use_known_flags():
    """Check the flags in all blocks, even in blocks that no test can run without hardware."""
    unknown = {block.name: unknown_flags(block.text) for block in commands()}
    assert {name: flags for name, flags in unknown.items() if flags} == {}


def test_wrong_sample_has_differences():
    expected = "step 1  loss 2.54800  tokens_per_second 14,590.5\n"
    assert differences(expected, "step 1  loss 2.54801  tokens_per_second 9") == []
    for line in ("step 1  loss 2.64801  tokens_per_second 9", "step 1  loss 2.54801"):
        assert differences(expected, line) != []


@pytest.mark.parametrize(
    "text, unknown",
    [
        ("python 01-single-gpu/train_llm.py -e one --lr 1e-3 --seed=1 --help # --none", []),
        ("python 01-single-gpu/train_llm.py \\\n    --nosuch 1", ["--nosuch"]),
        ("torchrun 04-fsdp/train_llm.py --no-reshard-after-forward --no-lr", ["--no-lr"]),
        ('run="python 01-single-gpu/train_llm.py --one"\n$run --two', ["--one", "--two"]),
        ("cat > a <<END\n--three 3\nEND\npython 01-single-gpu/train_llm.py @a", ["--three"]),
    ],
)
def test_unknown_flags_are_found(text, unknown):
    assert [flag for _, flag in unknown_flags(text)] == unknown
