"""Test that the recipes of both images pass linters and install the same packages."""

import re

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


def test_both_images_install_the_same_packages_on_the_same_base():
    installs = r"^from:? (.*)|apt-get install ([\w +-]+\w)|(requirements.txt /.*)|pip install (.*)"
    recipes = (re.findall(installs, recipe, re.M | re.I) for recipe in (DOCKERFILE, DEFINITION))
    in_dockerfile, in_definition = map(sorted, recipes)
    assert in_dockerfile == in_definition and len(in_dockerfile) == 4
