"""Test that the planner's form finds the layouts that the planner's command line finds."""

import json
import shlex

import pytest

import form_facts
import will_it_fit
from conftest import ROOT
from planner_form import planner_script

pytestmark = pytest.mark.tool
py_mini_racer = pytest.importorskip("py_mini_racer")
JOB = json.loads((ROOT / "benchmarks/results/scale.json").read_text())["job"]
# Each case has a value for each name in FIELDS.
CASES = {
    "1B on 1": ("Llama 3.2 1B", 1, 1, 4096, 64),
    "8B on 8": ("Llama 3.1 8B", 1, 8, 4096, 64),
    "8B on 32, long": ("Llama 3.1 8B", 4, 8, 16384, 32),
    "70B on 64": ("Llama 3.1 70B", 8, 8, 4096, 128),
    "405B on 512": ("Llama 3.1 405B", 64, 8, 4096, 512),
    "mixture on 16": ("Qwen3 30B-A3B", 2, 8, 4096, 64),
}
FIELDS = ["model", "nodes", "gpus_per_node", "seq_length", "global_batch_size"]
# Keep only one case in the core tests, because running all models on fake tensors takes minutes.
MARKS = {"1B on 1": (), "8B on 8": pytest.mark.slow}
TOKENS = 15e9


@pytest.fixture(scope="module")
def in_browser():
    context = py_mini_racer.MiniRacer()
    context.eval(planner_script())

    def layouts(**fields):
        return json.loads(context.eval(f"JSON.stringify(planner.layouts({json.dumps(fields)}))"))

    return layouts


def on_command_line(model, nodes, gpus_per_node, seq_length, global_batch_size):
    """Return the arguments of the command line, and the plans of all layouts."""
    words = f"{form_facts.MODELS[model]} --nodes {nodes} --gpus-per-node {gpus_per_node}"
    words += f" --seq-length {seq_length} --global-batch-size {global_batch_size}"
    args = will_it_fit.parse_args(shlex.split(f"{words} --tokens {TOKENS} --layouts"))
    return args, will_it_fit.make_plan(args)["layouts"]


def check(found, planned):
    """Compare the layouts of the form with the layouts of the command line."""
    assert [layout["way"] for layout in found] == [layout["way"] for layout in planned]
    for layout, other in zip(found, planned, strict=True):
        assert layout["fits"] == other["fits"], layout
        for needs in ("gpu_needs", "host_needs"):
            # Allow half of 0.01 GiB, the last digit that the form shows.
            assert layout[needs] == pytest.approx(other[needs], rel=0, abs=5e6), layout
        assert layout["command"] == other["command"]
        assert bool(layout["numbers"]) == bool(other["speed"])
        if other["speed"]:
            assert layout["numbers"] == pytest.approx(other["speed"]), layout


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=MARKS.get(case, pytest.mark.exhaustive)) for case in CASES]
)
def test_form_finds_the_layouts_of_the_command_line(in_browser, case):
    fields = dict(zip(FIELDS, CASES[case], strict=True))
    found = in_browser(**fields, tokens=TOKENS)
    args, planned = on_command_line(**fields)
    check(found, planned)
    for layout, other in zip(found, planned, strict=True):
        assert layout["text"].startswith(will_it_fit.verdict(other).split()[0])
        if other["fits"]:
            assert layout["speed"] == will_it_fit.speed_text(args, other)


@pytest.mark.parametrize("job", JOB, ids=lambda job: f"{job['seq_length']} tokens")
def test_form_finds_the_recorded_layouts_of_the_70b_job(in_browser, job):
    fields = dict(zip(FIELDS, CASES["70B on 64"], strict=True)) | {"tokens": TOKENS}
    fields |= {name: job[name] for name in ("seq_length", "global_batch_size")}
    check(in_browser(**fields), job["predicted"])


@pytest.mark.slow
def test_facts_of_a_model_are_those_of_a_fresh_recording():
    [name, *_] = form_facts.MODELS
    recorded = json.loads(form_facts.FACTS.read_text())["models"][name]
    fresh = json.loads(json.dumps(form_facts.facts_of(form_facts.MODELS[name])))
    assert fresh == recorded, f"run tools/planner/form_facts.py '{name}' again"
