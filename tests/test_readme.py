"""What the READMEs show is what is there: commands run, parts made from files, links lead on."""

import json
import math
import re
from itertools import pairwise

import pytest
from markdown_it import MarkdownIt

import samples
from cluster.cluster import missing_requirement
from conftest import ROOT, run_command
from flags import unknown_flags
from readme import Block, blocks, commands, readmes, shown, slug

READMES = [pytest.param(path, id=str(path.relative_to(ROOT))) for path in readmes()]
MEASURED = {
    "tokens_per_second",
    "data_wait",
    "second",
    "peak_memory_gib",
    "mfu",
}  # in no two runs the same
LIVE = {"06-apart", "data-loading-watch", "diagnosing-hang", "diagnosing-preflight"}  # measured
LIVE |= {"fp16-check"}
MODELS = {"Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B"}
HUB = {*MODELS, "roneneldan/TinyStories", "allenai/c4", "HuggingFaceFW/fineweb-edu"}
SMALL = (
    " --num-steps 2 --seq-length 32 --global-batch-size 4 --batch-size 2 --eval-samples 4"
    " --device cpu --precision fp32"
)


def runs_here(block):
    """Return whether a test can run a block as it stands; the tests cannot run themselves."""
    return not block.needs and not block.text.startswith("make test")


def by_name(found):
    return [pytest.param(block, id=block.name) for block in found]


def marked(block):
    """Return a block as a parameter: what a README checks, test_layouts.py and others check too,
    its exercises and the pages beside it are second ways to do what other blocks do, and those of
    tools and frameworks are of no chapter. On a CPU, 03 and 05 do what 02 and 04 do."""
    path, line = block.name.split(":")
    before = (ROOT / path).read_text().splitlines()[: int(line)]
    second = (
        "## Check it" in before
        or "## Try" in before
        or path.startswith(("alternative-frameworks", "benchmarks", "diagnosing-errors", "tools"))
        or path in ("03-job-launchers/README.md", "05-large-model/README.md")
        or not path.endswith("README.md")
    )
    return pytest.param(block, id=block.name, marks=[pytest.mark.exhaustive] * second)


@pytest.mark.slow
@pytest.mark.parametrize("block", list(map(marked, filter(runs_here, commands()))))
def test_commands_run(block, tmp_path):
    """Each block runs, from beginning to end, and prints what the README says it prints."""
    status, output = samples.run(block, tmp_path, timeout=1100)
    assert status == 0, output
    if block.sample:
        kept = (samples.SAMPLES / f"{block.sample}.txt").read_text()
        output = shown(block.sample, output)
        if block.sample in LIVE:
            kept, output = (ending(text) for text in (kept, output))
        assert differences(kept, output) == []


def ending(text):
    """Return the first words of the last three lines: what the tools found."""
    return "\n".join(line.split()[0] for line in text.rstrip().splitlines()[-3:])


def differences(shown, output):
    """Return the pairs of lines that differ by more than rounding and what a machine measures."""
    found = []
    one, other = shown.splitlines(), output.splitlines()
    if len(one) != len(other):
        return [(f"{len(one)} lines", f"{len(other)} lines: {output}")]
    for expected, line in zip(one, other, strict=True):
        words, others = expected.split(), line.split()
        same = len(words) == len(others) and all(
            before in MEASURED or like(word, its)
            for before, word, its in zip(["", *words], words, others, strict=False)
        )
        if not same:
            found.append((expected, line))
    return found


def like(one, other):
    """Return whether two words are the same, or numbers that are within 1e-3 of each other."""
    try:
        one, other = float(one.replace(",", "")), float(other.replace(",", ""))
    except ValueError:
        return one == other
    return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-5)


@pytest.mark.parametrize(
    "line, same",
    [
        ("step 1  loss 2.54801  tokens_per_second 9", True),
        ("step 1  loss 2.64801  tokens_per_second 9", False),
        ("step 2  loss 2.54801  tokens_per_second 9", False),
        ("step 1  losses 2.54801  tokens_per_second 9", False),
        ("step 1  loss 2.54801", False),
    ],
)
def test_a_wrong_sample_is_seen(line, same):
    shown = "step 1  loss 2.54800  tokens_per_second 14,590.5\n"
    assert (differences(shown, line) == []) == same


@pytest.fixture(scope="session")
def stand_in(models, tmp_path_factory):
    """A folder in which the hub's names that the READMEs use are local folders."""
    folder = tmp_path_factory.mktemp("hub")
    for name in MODELS:
        (folder / name).parent.mkdir()
        (folder / name).symlink_to(models / "qwen3")
    rows = [json.dumps({"text": f"Once upon a time there was number {n}."}) for n in range(100)]
    files = {"roneneldan/TinyStories/train.jsonl": rows}
    files |= {f"allenai/c4/en/{n}.jsonl": rows for n in range(64)}
    files["HuggingFaceFW/fineweb-edu/sample-10BT/0.jsonl"] = rows
    files["allenai/c4/README.md"] = ["---", "configs: [{config_name: en, data_files: en/*}]", "---"]
    for name, lines in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("\n".join(lines))
    return folder


@pytest.fixture(autouse=True)
def allocator(monkeypatch):
    """The settings that chapter 01's README advises on a CPU: the commands take less time."""
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(2**34))


def needs_hub(block):
    return "hub" in block.needs and "train_llm.py" in block.text


@pytest.mark.slow
@pytest.mark.parametrize("block", by_name(filter(needs_hub, commands())))
def test_commands_for_the_hub_run_on_a_stand_in(block, stand_in, tmp_path):
    """The hub's names are local folders here, the GPUs two CPU processes, and all is smaller."""
    for name in HUB:
        (tmp_path / name.split("/")[0]).symlink_to(stand_in / name.split("/")[0])
    text = block.text.replace("--nproc-per-node gpu", "--nproc-per-node 2").rstrip() + SMALL
    assert text.count("train_llm.py") == 1, "the sizes belong to the end of the one command"
    status, output = samples.run(Block(block.name, "bash", text), tmp_path, timeout=1100)
    assert status == 0 and "finished: " in output, output


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_the_practice_cluster(tmp_path):
    """Its section, word by word: the job is told to stop, goes on, is cancelled."""
    if reason := missing_requirement():
        pytest.skip(reason)
    status, output = samples.practise(tmp_path, timeout=560)
    assert status == 0, output
    steps = sorted(set(map(int, re.findall(r"^stopped at step (\d+); ", output, flags=re.M))))
    assert len(steps) == 2 and steps[-1] < 900, output
    assert "requeue: yes" in output and "requeue: no" in output, output
    assert "continuing from outputs/practice/checkpoints/step-" in output, output


def test_made_parts_are_up_to_date():
    """No table, diff or sample was edited, and no script since they were made."""
    done = run_command(ROOT / "tools/maintain/docs.py", "--check", cwd=ROOT)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n`make docs` makes them again"


def test_nothing_that_could_be_made_is_written_by_hand():
    """All diffs, code and samples of a run are made: they stand between cog's markers.

    The Python of two pages is not: test_own_script.py runs it.
    """
    for path in readmes():
        made = re.sub(r"\[\[\[cog.*?\[\[\[end\]\]\]", "", path.read_text(), flags=re.S)
        kinds = "diff|text" if path.name.startswith("your-own-") else "diff|python|text"
        assert not re.search(f"```({kinds})", made), path


@pytest.mark.parametrize("block", by_name(commands()))
def test_scripts_have_the_flags_that_they_are_given(block):
    """In blocks that need hardware too, which nothing runs."""
    assert unknown_flags(block.text) == []


@pytest.mark.parametrize(
    "text, unknown",
    [
        ("python 01-single-gpu/train_llm.py -e one --lr 1e-3 --seed=1 --help # --none", []),
        ("python 01-single-gpu/train_llm.py \\\n    --nosuch 1", ["--nosuch"]),
        ("sbatch --nodes 4 train.sbatch 01-single-gpu/train_llm.py -x 1 | grep -z", ["-x"]),
        ("torchrun 04-fsdp/train_llm.py --no-reshard-after-forward --no-lr", ["--no-lr"]),
        ('run="python 01-single-gpu/train_llm.py"; if true; then $run --two; fi', ["--two"]),
        ('python 01-single-gpu/train_llm.py & kill -s TERM "$job" -q', []),
        ('run="python 01-single-gpu/train_llm.py --one"\n$run --two', ["--one", "--two"]),
        ("cat > a <<END\n--three 3\nEND\npython 01-single-gpu/train_llm.py @a", ["--three"]),
        ("python tools/plot.py outputs/one --output a.png --lr 1", ["--lr"]),
        ("python 04-fsdp/to_transformers.py --lr 1 step-1 model", ["--lr"]),
    ],
)
def test_a_wrong_flag_is_seen(text, unknown):
    assert [flag for _, flag in unknown_flags(text)] == unknown


def tokens(path):
    """Yield all tokens of a README, those inside of paragraphs too."""
    for token in MarkdownIt("gfm-like", {"linkify": False}).parse(path.read_text()):
        yield token
        yield from token.children or ()


def anchors(path):
    """Return the anchors of a README's headings, and those that it sets itself."""
    flat = list(tokens(path))
    headings = [one.content for before, one in pairwise(flat) if before.type == "heading_open"]
    named = [re.match('<a id="([\\w-]+)">', one.content) for one in flat if "html" in one.type]
    return {slug(heading) for heading in headings} | {found[1] for found in named if found}


@pytest.mark.parametrize("path", READMES)
def test_links_lead_somewhere(path):
    found = [
        target
        for token in tokens(path)
        if (target := token.attrGet("href") or token.attrGet("src"))
        and not target.startswith("https://")
    ]
    for target in found:
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize("path", READMES)
def test_blocks_are_of_a_kind_that_is_checked(path):
    kinds = {block.kind for block in blocks(path)}
    assert kinds <= {"bash", "text", "diff", "python", "mermaid"}, "what is yaml, say, is not run"
