"""Test the planner's form in a browser: it finds the layouts of the planner's command line."""

import json
import shlex
import shutil

import pytest

import form_facts
import will_it_fit
from conftest import ROOT
from form_model import key_of
from planner_form import planner_script

pytestmark = pytest.mark.tool
SITE = ROOT / "tools/maintain/site"
JOB = json.loads((ROOT / "benchmarks/results/scale.json").read_text())["job"]
# Each case has a value for each name in FIELDS.
CASES = {
    "1B on 1": ("Llama 3.2 1B", 1, 1, 4096, 64),
    "1B on 4": ("Llama 3.2 1B", 1, 4, 2048, 64),
    "8B on 8": ("Llama 3.1 8B", 1, 8, 4096, 64),
    "8B on 32, long": ("Llama 3.1 8B", 4, 8, 16384, 32),
    "70B on 64": ("Llama 3.1 70B", 8, 8, 4096, 128),
    "405B on 512": ("Llama 3.1 405B", 64, 8, 4096, 512),
    "mixture on 16": ("Qwen3 30B-A3B", 2, 8, 4096, 64),
}
FIELDS = ["model", "nodes", "gpus_per_node", "seq_length", "global_batch_size"]
# Keep only one case in the core tests, because running all models on fake tensors takes minutes.
MARKS = {"1B on 1": (), "1B on 4": pytest.mark.slow, "8B on 8": pytest.mark.slow}
TOKENS = 15e9


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Write a page that has only the form, and return the page's address."""
    folder = tmp_path_factory.mktemp("form")
    shutil.copytree(SITE / "static", folder / "_static")
    (folder / "_static/planner.js").write_text(planner_script())
    page = folder / "tools/planner/form.html"
    page.parent.mkdir(parents=True)
    styles = '<meta name="viewport" content="width=device-width">'
    styles += '<link rel="stylesheet" href="../../_static/site.css">'
    page.write_text(f"<!doctype html>{styles}{(SITE / 'planner/form.html').read_text()}")
    return page.as_uri()


@pytest.fixture(scope="module")
def page(browser, address):
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.set_default_timeout(120_000)
    page.goto(address)
    page.wait_for_selector("article")
    return page


def in_browser(page, **fields):
    script = "fields => planner.layouts.then(layouts => layouts(fields))"
    return page.evaluate(script, fields | {"tokens": TOKENS})


def on_command_line(model, nodes, gpus_per_node, seq_length, global_batch_size):
    """Plan with the command line; return the parsed arguments, and the plans of all layouts."""
    words = f"{form_facts.MODELS[model]} --nodes {nodes} --gpus-per-node {gpus_per_node}"
    words += f" --seq-length {seq_length} --global-batch-size {global_batch_size}"
    args = will_it_fit.parse_args(shlex.split(f"{words} --tokens {TOKENS} --layouts"))
    return args, will_it_fit.make_plan(args)["layouts"]


def check(found, planned):
    """Check that the form's layouts `found` equal the command line's layouts `planned`."""
    assert [layout["way"] for layout in found] == [layout["way"] for layout in planned]
    for layout, other in zip(found, planned, strict=True):
        assert layout["fits"] == other["fits"], layout
        for needs in ("gpu_needs", "host_needs"):
            # Allow 5 MB, which is about half of 0.01 GiB, the last digit that the form shows.
            assert layout[needs] == pytest.approx(other[needs], rel=0, abs=5e6), layout
        assert layout["command"] == other["command"]
        assert bool(layout["numbers"]) == bool(other["speed"])
        if other["speed"]:
            assert layout["numbers"] == pytest.approx(other["speed"]), layout


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=MARKS.get(case, pytest.mark.exhaustive)) for case in CASES]
)
def test_form_finds_the_layouts_of_the_command_line(page, case):
    fields = dict(zip(FIELDS, CASES[case], strict=True))
    found = in_browser(page, **fields)
    args, planned = on_command_line(**fields)
    check(found, planned)
    for layout, other in zip(found, planned, strict=True):
        assert layout["text"].startswith(will_it_fit.verdict(other).split()[0])
        assert sum(size for _, size in layout["parts"]) == pytest.approx(layout["gpu_needs"])
        if other["fits"]:
            assert layout["speed"] == will_it_fit.speed_text(args, other)


@pytest.mark.parametrize("job", JOB, ids=lambda job: f"{job['seq_length']} tokens")
def test_form_finds_the_recorded_layouts_of_the_70b_job(page, job):
    fields = dict(zip(FIELDS, CASES["70B on 64"], strict=True))
    fields |= {name: job[name] for name in ("seq_length", "global_batch_size")}
    check(in_browser(page, **fields), job["predicted"])


def fill(page, **fields):
    """Fill fields of the form, wait until the form shows the result, and return the shown text."""
    page.evaluate("shown.textContent = 'Computing …'")
    for name, value in fields.items():
        page.locator(f"[name={name}]").evaluate(
            "(field, value) => { field.value = value; }", str(value)
        )
    page.evaluate("plan()")
    page.wait_for_function("!shown.textContent.startsWith('Computing')")
    return page.inner_text("#planner-layouts")


def test_invalid_fields_are_named(page):
    assert fill(page, gpus_per_node=0, tokens="").splitlines() == [
        "GPUs per node must be a whole number between 1 and 8.",
        "",
        "Billion tokens in all must be a number of at least 0.000001.",
    ]
    assert page.locator("[aria-invalid=true]").count() == 2
    assert "GPUs per node" not in fill(page, gpus_per_node=8, tokens=15)


def test_address_reopens_the_plan(browser, page, address):
    values = {"model": "Llama 3.2 1B", "nodes": 1, "gpus_per_node": 2, "global_batch_size": 8}
    text = fill(page, **values, dollars_per_gpu_hour=2.5, dataset_name="my data")
    assert "--dataset-name 'my data'" in text and " dollars" in text
    other = browser.new_page()
    other.set_default_timeout(120_000)
    other.goto(f"{address}#{page.url.partition('#')[2]}")
    other.wait_for_selector("article")
    assert other.inner_text("#planner-layouts") == page.inner_text("#planner-layouts")


def test_button_copies_the_command_and_reports_it(page):
    fill(page, model="Llama 3.2 1B", nodes=1)
    button = page.locator("article button").first
    button.click()
    page.wait_for_function("document.querySelector('article button').textContent === 'copied'")
    command = page.locator("article pre").first.inner_text()
    assert page.evaluate("getSelection().toString()").split() == command.split()


def test_form_fits_a_narrow_screen_and_labels_all_fields(page):
    fill(page, model="Llama 3.1 70B", nodes=8)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    unlabeled = "[...form].filter(field => field.name && !field.labels.length).length"
    assert page.evaluate(unlabeled) == 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Llama 3.2 1B", "Qwen3 30B-A3B"])
def test_facts_are_those_of_a_fresh_recording(model):
    recorded = json.loads(form_facts.FACTS.read_text())["models"][model]["segments"]
    base = form_facts.base_of(form_facts.MODELS[model])
    selective = base.changed(recompute="selective", context_parallel_size=2)
    for setting in (base.changed(chapter="04"), base, selective):
        fresh = form_facts.segments_of(setting)
        assert fresh == recorded[key_of(setting)], "run tools/planner/form_facts.py again"
