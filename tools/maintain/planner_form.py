"""Put together the script of the planner's form: MicroPython, the planner's functions, and facts.

A browser cannot import torch, so the script has only the functions that compute with numbers. The
folder micropython/ has two files of the npm package @micropython/micropython-webassembly-pyscript,
version 1.27.0, which `npm pack` downloads.
"""

import ast
import base64
import gzip
import json

from chapters import ROOT

PLANNER, MICROPYTHON = ROOT / "tools/planner", ROOT / "tools/maintain/micropython"
# The form needs these parts of each module. The other parts read models, flags or files.
SOURCES = {
    "training_step": "ExpertShape UnsupportedModelError numbers local_numbers shards_of "
    "shard_numbers padded_numbers Setting in_flight bubble",
    "memory": "TRACED_PARTS PARTS class_of fullest_step least_bytes state_bytes StepMemory "
    "segment_of ShardedMemory PipelineMemory host_memory",
    "step_time": "HALF_WORK KERNELS NCCL forward_flops forward_seconds attention_width "
    "collective ring overlapped StepTime speed_of",
    "layouts": "GIB plan_of stop_seconds checkpoint_bytes ways_to_split best_layouts launcher "
    "best_of state_fits",
    "will_it_fit": "checkpoint_text speed_text cost_text text_of verdict",
}


class ForMicroPython(ast.NodeTransformer):
    """Replace the syntax and the methods that MicroPython lacks."""

    def visit_Call(self, node):
        self.generic_visit(node)
        if getattr(node.func, "attr", "") == "bit_length":
            return call("bit_length", node.func.value)
        return node

    def visit_Dict(self, node):
        self.generic_visit(node)
        pairs = zip(node.keys, node.values, strict=True)
        return call("OrderedDict", ast.List([ast.Tuple([*pair]) for pair in pairs]))

    def visit_FormattedValue(self, node):
        self.generic_visit(node)
        layout = [node.format_spec] if node.format_spec else []
        return call("formatted" if layout else "str", node.value, *layout)

    def visit_JoinedStr(self, node):
        self.generic_visit(node)
        return ast.Call(ast.Attribute(ast.Constant(""), "join"), [ast.List(node.values)], [])

    def visit_List(self, node):
        self.generic_visit(node)
        is_starred = [isinstance(item, ast.Starred) for item in node.elts]
        if isinstance(node.ctx, ast.Store) or not any(is_starred):
            return node
        parts = [
            item.value if isinstance(item, ast.Starred) else ast.List([item]) for item in node.elts
        ]
        return call(type(node).__name__.lower(), call("chain", *parts))

    visit_Tuple = visit_List


def call(name, *args):
    """Return the call of a function."""
    return ast.Call(ast.Name(name), [*args], [])


def name_of(node):
    """Return the name that a statement defines, or None."""
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", node)
    return getattr(target, "id", getattr(node, "name", None))


def without_docstrings(tree):
    """Drop the docstrings of a program, which a browser does not need."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def planner_source():
    """Return the Python program of the form."""
    nodes = ast.parse((MICROPYTHON / "prelude.py").read_text()).body
    for module, names in SOURCES.items():
        tree = ast.parse((PLANNER / f"{module}.py").read_text())
        nodes += [node for node in tree.body if name_of(node) in names.split()]
    tree = ast.parse((PLANNER / "form_model.py").read_text())
    nodes += [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    program = ForMicroPython().visit(without_docstrings(ast.Module(nodes, [])))
    return ast.unparse(ast.fix_missing_locations(program))


def planner_script():
    """Return a script that defines `planner`: FACTS, and a promise of the function `layouts`."""
    text = (PLANNER / "form.json").read_text()
    facts = json.loads(text)
    shown = {"models": [*facts["models"]], "gpus": facts["gpus"], "defaults": facts["defaults"]}
    script = (MICROPYTHON / "start.js").read_text().replace('"facts"', json.dumps(shown))
    files = {name: (MICROPYTHON / f"micropython.{name}").read_bytes() for name in ("mjs", "wasm")}
    files["source"] = f"FACTS_TEXT = {text!r}\n{planner_source()}".encode()
    for name, data in files.items():
        packed = base64.b64encode(gzip.compress(data, mtime=0)).decode()
        script = script.replace(f'"{name}"', f'"{packed}"')
    return script
