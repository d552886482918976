"""Call a function for each case of a chapter, on this rank of a process group.

costs.py does this. runs.call_on_ranks() starts it once per rank, with these arguments:

- a JSON file with cases; each case has a name, and arguments of the chapter
- a file for the results of rank 0
- the number of the chapter
- arguments that all cases have
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]


def load(chapter):
    """Import a chapter's script."""
    script = next(ROOT.glob(f"{chapter}-*/train_llm.py"))
    spec = importlib.util.spec_from_file_location(f"chapter_{chapter}", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
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
