"""The notebook for free GPUs: its cells run here too, on two CPU processes."""

import nbformat
import pytest

import contenders
import samples
from conftest import ROOT, metrics, same_curve
from flags import unknown_flags
from readme import Block

FOLDER = ROOT / "related-topics/try-it-free"
SMALL = "--num-steps 6 --seq-length 32 --global-batch-size 4 --batch-size 2 --eval-samples 4"
SMALL += " --log-every 1 --device cpu"


def cells(tag=None):
    """Return the cells with code: those with this tag, or those with none."""
    notebook = nbformat.read(FOLDER / "notebook.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [cell.source for cell in code if cell.metadata.get("tags", []) == [tag] * bool(tag)]


def test_the_notebook_is_made_from_its_source():
    made = nbformat.writes(contenders.load(FOLDER / "make_notebook.py").notebook())
    assert made == (FOLDER / "notebook.ipynb").read_text().rstrip("\n"), "run make_notebook.py"


def test_only_what_a_service_alone_can_do_is_not_run():
    assert all(source.startswith("%%bash\n") for source in cells())
    clone, install, picture = cells("service")
    assert "git clone ADDRESS " in clone and "pip install" in install and "Image(" in picture


@pytest.mark.parametrize("number", range(len(cells())))
def test_scripts_have_the_flags_that_they_are_given(number):
    assert unknown_flags(cells()[number].removeprefix("%%bash\n")) == []


@pytest.mark.exhaustive
def test_the_cells_run(tmp_path):
    """With `gpu` processes being two, and a smaller file of arguments; the curves are one."""
    lines = []
    for source in cells():
        lines.append(f"({source.removeprefix('%%bash')}\n)")
        if "cat > try.args" in source:
            lines.append(f"printf '%s\\n' {SMALL!r} >> try.args")
    text = "\n".join(lines).replace("--nproc-per-node gpu", "--nproc-per-node 2")
    assert text.count("--nproc-per-node 2") == 3
    status, output = samples.run(Block("notebook", "bash", text), tmp_path, timeout=600)
    assert status == 0, output
    runs = {name: metrics(tmp_path / "outputs" / name) for name in ("one", "ddp", "fsdp", "fp16")}
    assert same_curve(runs["one"], runs["ddp"]) and same_curve(runs["one"], runs["fsdp"])
    assert runs["fp16"][6]["loss_scale"] >= 2.0**12
    assert (tmp_path / "outputs.tar.gz").stat().st_size > 10**6
    assert output.count("drawn: outputs/") == 2
