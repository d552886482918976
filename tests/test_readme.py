"""What the READMEs show is what is there: commands run, diffs are of the files, links lead on."""

import ast
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS

READMES = sorted(path for path in ROOT.glob("**/README.md") if ".venv" not in path.parts)
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>.*?) -->\n)?^(?P<indent> *)```(?P<kind>\w+)\n(?P<text>.*?)^(?P=indent)```$",
    re.M | re.S,
)


def blocks(kind):
    """Return the READMEs' blocks of a kind, as (file and number, marker, text)."""
    found = []
    for path in READMES:
        matches = [match for match in BLOCK.finditer(path.read_text()) if match["kind"] == kind]
        for number, match in enumerate(matches):
            name = f"{path.relative_to(ROOT)}:{number}"
            text = textwrap.dedent(match["text"]) if match["indent"] else match["text"]
            found.append(pytest.param(match["mark"] or "", text, id=name))
    return found


def runs_here(block):
    """Return whether this machine can run a block, and no other part of CI does it already."""
    mark, text = block.values
    return not (mark.startswith("needs:") or text.startswith("make "))


@pytest.mark.slow
@pytest.mark.parametrize("mark, text", filter(runs_here, blocks("bash")))
def test_commands_run(mark, text, tmp_path):
    """Each block runs in a copy of the repository, as it stands, from beginning to end."""
    for path in ROOT.iterdir():
        if path.name != "outputs":
            (tmp_path / path.name).symlink_to(path)
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", text]
    if text.startswith("diff "):
        command[-1] = f"! {text}"  # that files differ is no failure
    done = subprocess.run(
        command, check=False, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("mark, text", blocks("diff"))
def test_hunks_are_of_the_files(mark, text):
    """Every line of a hunk stands in the diff, in one piece."""
    command = ["diff", "-u", "--", str(SCRIPTS["01"]), str(SCRIPTS["02"])]
    diff = subprocess.run(command, check=False, capture_output=True, text=True).stdout
    assert f"\n{text}" in diff


def functions(script):
    """Return a script's functions and classes: from name to source, decorators included."""
    source, found = script.read_text(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(source.splitlines()[first - 1 : node.end_lineno])
    return found


def test_what_changes_is_what_differs():
    """The README of chapter 02 lists exactly the functions that are not as in chapter 01."""
    text = (ROOT / "02-ddp/README.md").read_text()
    listed = re.search(r"What changes: (.*?); decorated:\s(.*?); new: (.*?)\.\n", text, re.S)
    changed, decorated, new = (set(re.findall(r"`(\w+)`", part)) for part in listed.groups())
    before, after = functions(SCRIPTS["01"]), functions(SCRIPTS["02"])
    assert new == after.keys() - before.keys()
    assert before.keys() <= after.keys()
    plain = {name: re.sub(r"@(in_turn|on_rank_zero)\n", "", after[name]) for name in before}
    assert changed == {name for name in before if plain[name] != before[name]}
    assert decorated == {name for name in before if plain[name] != after[name]}


def test_functions_keep_their_order():
    before, after = list(functions(SCRIPTS["01"])), list(functions(SCRIPTS["02"]))
    assert [name for name in after if name in before] == before


def test_banners_are_the_same():
    banners = [re.findall(r"^# ---- .*$", path.read_text(), re.M) for path in SCRIPTS.values()]
    assert len(banners[0]) == 5 and banners[0] == banners[1]


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target
