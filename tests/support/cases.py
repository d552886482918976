"""Call a function for each case of a chapter, on this rank of a process group.

values.py and costs.py do this. runs.call_on_ranks() starts them once per rank, with these
arguments:

- a JSON file with cases; each case has a name, and arguments of the chapter
- a file for the results of rank 0
- the number of the chapter
- arguments that all cases have
"""

import json
import os
import sys
import types
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]


def load(chapter):
    """Import a chapter's script, changed to export models to files of 100 KB instead of 5 GB."""
    script = next(ROOT.glob(f"{chapter}-*/train_llm.py"))
    module = types.ModuleType(f"chapter_{chapter}")
    module.__file__ = str(script)
    source = script.read_text().replace("5_000_000_000", "100_000")
    exec(compile(source, script, "exec"), module.__dict__)
    return module


def run_cases(work):
    """Call `work(chapter, args)` for each case; rank 0 writes the results by name."""
    cases, result, chapter_name, *common = sys.argv[1:]
    chapter, results = load(chapter_name), {}
    for name, arguments in json.loads(Path(cases).read_text()).items():
        sys.argv = ["train_llm.py", *arguments, *common]
        args = chapter.parse_args()
        if not dist.is_initialized():
            chapter.setup(args)
        results[name] = work(chapter, args)
    if os.environ["RANK"] == "0":
        Path(result).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
