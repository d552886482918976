"""Put together the script of the planner's form: the planner in JavaScript, with its models."""

from chapters import ROOT
from javascript import translate

PLANNER = ROOT / "tools/planner"
PARTS = ROOT / "tools/maintain/site/planner"
# The form needs these parts of each module. The other parts read models, flags or files.
SOURCES = {
    "training_step": "UnsupportedModelError numbers local_numbers shard_numbers padded_numbers "
    "shards_of Setting in_flight bubble",
    "memory": "TRACED_PARTS PARTS fullest_step state_bytes StepMemory segment_of ShardedMemory "
    "PipelineMemory host_memory",
    "step_time": "HALF_WORK KERNELS NCCL forward_flops forward_seconds attention_width "
    "collective ring overlapped StepTime speed_of",
    "layouts": "GIB plan_of stop_seconds checkpoint_bytes ways_to_split best_layouts launcher "
    "best_of state_fits",
    "will_it_fit": "checkpoint_text speed_text text_of verdict",
}


def planner_script():
    """Return a script that defines `planner`; planner.layouts() computes the same as --layouts."""
    python = "\n".join((PLANNER / f"{name}.py").read_text() for name in SOURCES)
    translated = translate(python, " ".join(SOURCES.values()).split())
    facts = (PLANNER / "form.json").read_text()
    runtime, model = ((PARTS / name).read_text() for name in ("python.js", "model.js"))
    parts = [runtime, f"const FACTS = {facts};", translated, model]
    return "\n".join(["const planner = (() => {", *parts, "return { layouts, FACTS };\n})();\n"])
