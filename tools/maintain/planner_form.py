"""Put together the script of the planner's form: MicroPython, the planner's modules, and facts.

A browser cannot import torch, so the script has only the modules that compute with numbers. The
folder micropython/ has two files of the npm package @micropython/micropython-webassembly-pyscript,
version 1.27.0, which `npm pack` downloads.
"""

import base64
import gzip
import json

from chapters import ROOT

PLANNER, MICROPYTHON = ROOT / "tools/planner", ROOT / "tools/maintain/micropython"
NAMES = "form.json setting.py report.py memory.py step_time.py layouts.py form_model.py".split()
FILES = [MICROPYTHON / "prelude.py", *(PLANNER / name for name in NAMES)]


def planner_script():
    """Return a script in JavaScript that defines the constant `planner`.

    `planner.FACTS` has the models, the GPUs and the defaults of the form. `planner.layouts` is a
    promise of a function that computes layouts.
    """
    facts = json.loads((PLANNER / "form.json").read_text())
    shown = {"models": [*facts["models"]], "gpus": facts["gpus"], "defaults": facts["defaults"]}
    script = (MICROPYTHON / "start.js").read_text().replace('"facts"', json.dumps(shown))
    files = {name: (MICROPYTHON / f"micropython.{name}").read_bytes() for name in ("mjs", "wasm")}
    files["files"] = json.dumps({path.name: path.read_text() for path in FILES}).encode()
    for name, data in files.items():
        packed = base64.b64encode(gzip.compress(data, mtime=0)).decode()
        script = script.replace(f'"{name}"', f'"{packed}"')
    return script
