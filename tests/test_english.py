"""Tests of english.py: each rule finds its violation and accepts the better sentence."""

import tomllib

import pytest
import yaml

import english
from conftest import ROOT, run_command

CASES = yaml.safe_load((ROOT / "tests/support/english_cases.yaml").read_text())
RULES = [(name, ".md", case) for name, case in CASES["prose"].items()]
RULES += [(name, ".py", case) for name, case in CASES["python"].items()]


def rules_broken(source, suffix):
    return [finding.rule.name for finding in english.findings_in(source, suffix)]


def test_every_rule_has_a_case():
    assert {name for name, *_ in RULES} == {rule.name for rule in english.RULES}


@pytest.mark.parametrize("name, suffix, case", RULES, ids=[name for name, *_ in RULES])
def test_rule_finds_the_wrong_text_only(name, suffix, case):
    assert rules_broken(case["wrong"], suffix) == [name]
    assert rules_broken(case["right"], suffix) == []


@pytest.mark.parametrize("source", CASES["messages"])
def test_message_is_checked(source):
    assert rules_broken(source, ".py") == ["anew"]


@pytest.mark.parametrize("suffix, source", CASES["unchecked"])
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
    (tmp_path / "page.md").write_text("Fine.\n\nRun it anew.\n")
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
