"""The recipes of the images are sound and agree, as far as one can tell without building them."""

import re
from itertools import pairwise

import pytest

from conftest import ROOT, linter, run_command

FOLDER = ROOT / "03-job-launchers/containers"
DOCKERFILE, DEFINITION = ((FOLDER / name).read_text() for name in ("Dockerfile", "train.def"))


@pytest.mark.parametrize("section", ["post", "environment", "test", "runscript"])
def test_script_in_the_definition_passes_shellcheck(section):
    [script] = re.findall(rf"^%{section}\n([^%]*)", DEFINITION, re.M)
    done = run_command(linter("shellcheck"), "--shell=sh", "-", input=script)
    assert done.returncode == 0, done.stdout


def test_dockerfile_passes_hadolint():
    done = run_command(linter("hadolint"), FOLDER / "Dockerfile")
    assert done.returncode == 0, done.stdout


def test_both_images_install_the_same_on_the_same_base():
    installs = r"^from:? (.*)|apt-get install ([\w +-]+\w)|(requirements.txt /.*)|pip install (.*)"
    recipes = (re.findall(installs, recipe, re.M | re.I) for recipe in (DOCKERFILE, DEFINITION))
    in_dockerfile, in_definition = map(sorted, recipes)
    assert in_dockerfile == in_definition and len(in_dockerfile) == 4


def test_apptainer_gets_all_folders_and_the_command(tmp_path):
    """An `apptainer` that prints its arguments stands in for the real one."""
    stand_in = tmp_path / "bin/apptainer"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\necho "$HF_HOME"; printf "%s\\n" "$@"; exit 7\n')
    stand_in.chmod(0o755)
    (tmp_path / "train.sif").touch()
    env = {"PATH": f"{stand_in.parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    env["OUTPUTS"] = f"{tmp_path}/my runs"
    command = ["train.sif", "sh", "-c", "two words", "*"]
    done = run_command(FOLDER / "apptainer.sh", *command, cwd=tmp_path, env=env)
    hub, *printed = done.stdout.splitlines()
    binds = [after for word, after in pairwise(printed) if word == "--bind"]
    assert binds == [str(ROOT), str(tmp_path), hub, env["OUTPUTS"]]
    assert hub == f"{tmp_path}/.cache/huggingface" and (tmp_path / "my runs").is_dir()
    assert printed[printed.index("--pwd") + 1] == str(tmp_path)
    assert printed[-5:] == command
    assert done.returncode == 7
