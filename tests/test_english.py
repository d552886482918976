"""Tests of english.py: each rule finds its violation and accepts the better sentence."""

import tomllib

import pytest

import english
from conftest import ROOT, run_command

# For each rule: a text that violates it, and a text that says the same and passes.
# Texts in Markdown are prose; texts that end in ".py" are Python.
MARKDOWN = {
    "preposition + which": (
        "Pinned memory, of which torch takes a power of two.",
        "In which order do ranks start? The log shows in which case it waits.",
    ),
    "more than one colon": (
        "Two steps: load the file: it is large.",
        "Two steps: load the file. One more: split it.",
    ),
    "more than one semicolon": (
        "It loads; it splits; it ends.",
        "It loads; it splits. Or not; wait.",
    ),
    "does not divide by": (
        "A batch of 9 does not divide by 2.",
        "A batch of 9 is not divisible by 2.",
    ),
    "backend name": (
        "Tensors travel over nccl.",
        "Run nccl-tests, or pass the backend cpu:gloo or `nccl`, for NCCL.",
    ),
    "bare pronoun": ("It copies weights from one rank to all.", "It copies weights to all ranks."),
    "whole": ("Each rank holds the whole model.", "Each rank reads the whole file once."),
    "another": ("Use another seed.", "Use a different seed on another machine."),
    "as many": ("It starts on as many\nranks.", "It starts twice as many ranks as nodes."),
    "draw": ("Each rank draws its own masks.", "The tool draws the loss curve."),
    "loss": ("Plot the curve of the loss.", "Plot the loss curve and the losses of 20 steps."),
    "told, asked": ("All ranks are told to stop.", "Rank 0 tells whether it was asked to stop."),
    "says so": ("The log says so.", "The log says why."),
    "linking word": ("It saves, thereby waiting.", "It saves. This takes time."),
    "meanwhile": ("Other ranks wait meanwhile.", "Meanwhile, other ranks wait."),
    "halfway": ("Stop it halfway.", "Stop it at step 50."),
    "the one before": ("It reads the one before.", "Run one after another."),
    "none of ours": ("These files are none of ours.", "These files are not part of this guide."),
    "anew": ("Run it anew.", "Run it again, and see `anew`."),
    "go on": ("The run goes on.", "The run continues."),
    "or else": ("Save it, or else it is lost.", "Save it; otherwise it is lost."),
    "shall": ("It shall stop.", "It must stop."),
}
PYTHON = {
    "Return + clause": (
        'def f():\n    """Return what it found."""\n',
        'def f():\n    """Return whether it found the order of what it read."""\n',
    ),
    "tail of a sentence": (
        "x = 1\n# which follow from the number of layers.\n",
        "x = 1\n# As ranks differ, they take turns.\n# which may be slow.\n",
    ),
    "no period": (
        "x = 1\n# A sentence that goes over\n# two lines\n",
        "x = 1\n# A sentence that goes over\n# two lines.\n\n# noqa: E501\n# ---- model ----\n",
    ),
    "long trailing comment": (
        "x = 1  # a comment of one two three words\n",
        "x = 1  # DDP: the comment of a few words\n",
    ),
    "wide line": (f"x = {'1' * 80}  # tokens\n", f"x = {'1' * 70}  # tokens\n"),
    "variable name": (
        "for whole in range(2):\n    pass\n",
        "for total in range(2):\n    print(total.whole)\n",
    ),
    "syntax error": ("<<<<<<< ours\n", "x = 1\n"),
}
CASES = [(name, ".md", *texts) for name, texts in MARKDOWN.items()]
CASES += [(name, ".py", *texts) for name, texts in PYTHON.items()]
MESSAGES = [
    'fail("run it anew")',
    'print(f"rank {rank}: run it anew")',
    'raise ValueError("run it " "anew")',
    'parser.error("run it anew")',
    'sys.exit("run it anew" if rank else 1)',
    'add("--lr", help="run it anew")',
    'problem = "run it anew"\nfail(f"--lr {lr}: {problem}")',
    "fail(f\"--lr: {'run it anew' if rank else ''}\")",
]


# Nobody reads these strings as English.
UNCHECKED = [
    (".py", 'word = "anew"\nprint(rows["anew"], {"anew": 1})'),
    (".md", "```bash\necho anew\n```"),
    (".md", "<!-- anew -->"),
    (".md", "See [the page](https://example.com/anew)."),
    (".md", "Write `run it\nanew` here."),
]


def rules_broken(source, suffix):
    return [finding.rule.name for finding in english.findings_in(source, suffix)]


def test_every_rule_has_a_case():
    assert {name for name, *_ in CASES} == {rule.name for rule in english.RULES}


@pytest.mark.parametrize("name, suffix, wrong, right", CASES, ids=[case[0] for case in CASES])
def test_rule_finds_the_wrong_text_only(name, suffix, wrong, right):
    assert rules_broken(wrong, suffix) == [name]
    assert rules_broken(right, suffix) == []


@pytest.mark.parametrize("source", MESSAGES)
def test_message_is_checked(source):
    assert rules_broken(source, ".py") == ["anew"]


@pytest.mark.parametrize("suffix, source", UNCHECKED)
def test_code_passes(suffix, source):
    assert rules_broken(source, suffix) == []


def test_finding_has_the_line_of_its_word():
    source = "# Title\n\nOne line,\nthen anew.\n\n| a | b |\n|---|---|\n| c | anew |\n"
    assert [finding.line for finding in english.findings_in(source, ".md")] == [4, 8]
    source = '"""Title."""\n\n# One line,\n# then anew.\n'
    assert [finding.line for finding in english.findings_in(source, ".py")] == [4]


def run(*paths):
    return run_command(ROOT / "tools/maintain/english.py", *paths, cwd=ROOT)


def test_command_prints_findings_advice_and_totals(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("Fine.\n\nRun it anew.\n")
    done = run(tmp_path)
    first, *others = done.stdout.splitlines()
    assert done.returncode == 1 and first.endswith("page.md:3: anew: Run it anew.")
    assert others == ["1 x anew: write: again", "total: 1; files checked: 1"]
    done = run("tools/maintain/english.py")
    assert (done.returncode, done.stdout) == (0, "total: 0; files checked: 1\n")
    done = run("nosuch.md")
    assert done.returncode == 2
    assert done.stderr == "english.py: error: nosuch.md: no such file or folder\n"


def test_configured_paths_exist():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for pattern in settings["tool"]["english"]["paths"]:
        assert list(ROOT.glob(pattern)), pattern
