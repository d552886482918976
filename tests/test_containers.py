"""The recipes of the images are sound and agree, as far as one can tell without building them."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from conftest import ROOT, linter, run_command

FOLDER = ROOT / "03-job-launchers/containers"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
HEADER, *PARTS = re.split(r"^%(\w+)\n", (FOLDER / "train.def").read_text(), flags=re.M)
SECTIONS = dict(zip(PARTS[::2], PARTS[1::2], strict=True))


@pytest.mark.parametrize("section", ["post", "environment", "test", "runscript"])
def test_script_in_the_definition_passes_shellcheck(section):
    done = run_command(linter("shellcheck"), "--shell=sh", "-", input=SECTIONS[section])
    assert done.returncode == 0, done.stdout


def test_dockerfile_passes_hadolint():
    done = run_command(linter("hadolint"), FOLDER / "Dockerfile")
    assert done.returncode == 0, done.stdout


def test_both_images_install_the_same_on_the_same_base():
    assert (
        re.search(r"^From: (.*)", HEADER, re.M)[1] == re.search("^FROM (.*)", DOCKERFILE, re.M)[1]
    )
    for pattern in (r"apt-get install [\w +-]+\w", r"pip install .*"):
        commands = [re.findall(pattern, text) for text in (DOCKERFILE, SECTIONS["post"])]
        assert commands[0] == commands[1] and len(commands[0]) == 1
    assert "pip install --no-cache-dir -r /opt/requirements.txt\n" in DOCKERFILE
    assert "COPY requirements.txt /opt/requirements.txt" in DOCKERFILE
    assert SECTIONS["files"].split() == ["requirements.txt", "/opt/requirements.txt"]


@pytest.fixture
def apptainer(tmp_path):
    """Return a function that runs apptainer.sh, with an `apptainer` that prints its arguments."""
    stand_in = tmp_path / "bin/apptainer"
    stand_in.parent.mkdir()
    stand_in.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$@"\nwhile [ "$1" != train.sif ]; do shift; done\n'
        'shift\necho "== inside"\nexec "$@"\n'
    )
    stand_in.chmod(0o755)
    (tmp_path / "train.sif").touch()
    env = {"PATH": f"{stand_in.parent}:/usr/bin:/bin", "HOME": f"{tmp_path}/home"}
    env["OUTPUTS"] = f"{tmp_path}/my runs"

    def run(*args, **variables):
        return run_command(FOLDER / "apptainer.sh", *args, cwd=tmp_path, env=env | variables)

    return run


def test_apptainer_gets_all_folders_and_the_command(apptainer, tmp_path):
    command = ["sh", "-c", 'printf "%s\\n" "$HF_HOME" "$@"; exit 7', "sh", "two words", "*"]
    done = apptainer("train.sif", *command)
    options, inside = (part.splitlines() for part in done.stdout.split("== inside\n"))
    binds = [after for word, after in pairwise(options) if word == "--bind"]
    hub = f"{tmp_path}/home/.cache/huggingface"
    assert binds == [str(ROOT), str(tmp_path), hub, f"{tmp_path}/my runs"]
    assert all(Path(folder).is_dir() for folder in binds)
    assert options[options.index("--pwd") + 1] == str(tmp_path)
    assert inside == [hub, "two words", "*"]
    assert done.returncode == 7


@pytest.mark.parametrize(
    "args, variables, message",
    [
        ([], {}, "give an image and a command"),
        (["nosuch.sif", "true"], {}, "nosuch.sif: no such image"),
        (["train.sif", "true"], {"PATH": "/usr/bin:/bin"}, "apptainer: command not found"),
        (["train.sif", "true"], {"DATA": "/nosuch"}, "DATA=/nosuch: no such folder"),
    ],
)
def test_wrong_call_of_apptainer_is_reported_in_one_line(apptainer, args, variables, message):
    done = apptainer(*args, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"apptainer.sh: error: {message}")
    assert done.stderr.count("\n") == 1
