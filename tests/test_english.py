"""Test that each rule of english.py finds its violation and accepts the better sentence."""

import pytest
import yaml

from conftest import ROOT, run_command
from english import RULES, findings_in

TEXTS = yaml.safe_load((ROOT / "tests/support/english_cases.yaml").read_text())
CASES = [(".md", *case.values()) for case in TEXTS["prose"]]
CASES += [(".py", *case.values()) for case in TEXTS["python"]]


def test_every_rule_has_a_case():
    findings = [finding for suffix, wrong, _ in CASES for finding in findings_in(wrong, suffix)]
    advice = {advice for rules in RULES.values() for advice in rules.values()}
    assert {finding.advice for finding in findings} == advice


@pytest.mark.parametrize("suffix, wrong, right", CASES)
def test_rule_finds_the_wrong_text_only(suffix, wrong, right):
    assert len(findings_in(wrong, suffix)) == 1
    assert findings_in(right, suffix) == []


def test_command_prints_findings_with_their_lines(tmp_path):
    case = TEXTS["command"]
    for name in ("page.md", "script.py"):
        (tmp_path / name).write_text(case[name])
    run_command("git", "init", "--quiet", cwd=tmp_path)
    done = run_command(ROOT / "tools/maintain/english.py", tmp_path, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, case["printed"]), done.stderr
