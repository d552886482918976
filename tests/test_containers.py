"""The images' recipes are sound and agree, as far as one can tell without building them."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from conftest import ROOT, linter, run_command

FOLDER = ROOT / "03-job-launchers/containers"


def definition():
    """Return the header of train.def as a dictionary, and its sections by name."""
    header, *parts = re.split(r"^%(\w+)\n", (FOLDER / "train.def").read_text(), flags=re.M)
    lines = [line for line in header.splitlines() if line and not line.startswith("#")]
    return dict(line.split(": ") for line in lines), dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("section", ["post", "environment", "test", "runscript"])
def test_the_definition_has_sound_scripts(section):
    done = run_command(linter("shellcheck"), "--shell=sh", "-", input=definition()[1][section])
    assert done.returncode == 0, done.stdout


def test_the_dockerfile_is_sound():
    done = run_command(linter("hadolint"), FOLDER / "Dockerfile")
    assert done.returncode == 0, done.stdout


def test_both_images_have_the_same_in_them():
    """They start from the same, and install the same: the requirements, all, nothing else."""
    header, sections = definition()
    docker = (FOLDER / "Dockerfile").read_text()
    assert f"FROM {header['From']}\n" in docker
    for pattern in (r"apt-get install [\w +-]+", r"pip install .*"):
        (one,), (other,) = re.findall(pattern, docker), re.findall(pattern, sections["post"])
        assert one.strip() == other.strip()
    assert re.findall(r"pip install (.*)", docker) == ["--no-cache-dir -r /opt/requirements.txt"]
    assert "COPY requirements.txt /opt/requirements.txt" in docker
    assert sections["files"].split() == ["requirements.txt", "/opt/requirements.txt"]


@pytest.fixture
def outside(tmp_path):
    """An environment in which `apptainer` prints its arguments, then runs the command."""
    stand_in = tmp_path / "bin/apptainer"
    stand_in.parent.mkdir()
    stand_in.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$@"\nwhile [ "$1" != train.sif ]; do shift; done\n'
        'shift\necho "== inside"\nexec "$@"\n'
    )
    stand_in.chmod(0o755)
    (tmp_path / "train.sif").touch()
    folders = {"HOME": tmp_path / "home", "OUTPUTS": tmp_path / "my runs"}
    return {"PATH": f"{stand_in.parent}:/usr/bin:/bin"} | {n: str(p) for n, p in folders.items()}


def apptainer(cwd, env, *args):
    return run_command(FOLDER / "apptainer.sh", *args, cwd=cwd, env=env)


def test_apptainer_gets_all_folders_and_the_command(outside, tmp_path):
    command = ["sh", "-c", 'printf "%s\\n" "$HF_HOME" "$@"; exit 7', "sh", "two words", "*"]
    done = apptainer(tmp_path, outside, "train.sif", *command)
    options, inside = done.stdout.split("== inside\n")
    options = options.splitlines()
    binds = [after for word, after in pairwise(options) if word == "--bind"]
    hub = f"{tmp_path}/home/.cache/huggingface"
    assert binds == [str(ROOT), str(tmp_path), hub, f"{tmp_path}/my runs"]
    assert all(Path(folder).is_dir() for folder in binds)
    assert options[options.index("--pwd") + 1] == str(tmp_path)
    assert inside.splitlines() == [hub, "two words", "*"]
    assert done.returncode == 7


@pytest.mark.parametrize(
    "args, env, message",
    [
        ([], {}, "give an image and a command"),
        (["nosuch.sif", "true"], {}, "nosuch.sif: no such image"),
        (["train.sif", "true"], {"PATH": "/usr/bin:/bin"}, "apptainer: command not found"),
        (["train.sif", "true"], {"DATA": "/nosuch"}, "DATA=/nosuch: no such folder"),
    ],
)
def test_a_mistake_costs_one_line(outside, tmp_path, args, env, message):
    done = apptainer(tmp_path, outside | env, *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"apptainer.sh: error: {message}")
    assert done.stderr.count("\n") == 1
