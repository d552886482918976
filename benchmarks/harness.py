"""Share code between all benchmarks: describe the machine, keep results, run commands.

Each benchmark is a short file with a *question*: a function that yields rows of results. After each
row, the harness writes all rows so far to a JSON file, with the machine, the versions and the
command.
"""

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
PLANNER = ROOT / "tools/planner/will_it_fit.py"
# Let all runs keep the memory that they free, as `make train` does. By default, glibc returns large
# free blocks to the system, and the system needs time to clear each page for its next use.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)}
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed")
# Stop a run after this number of seconds. The limit is high, because the first start of DeepSpeed
# compiles for minutes.
LONGEST = 1200
# Let the benchmarks import the tools that read metrics.
sys.path.append(str(ROOT / "tools"))


def script_of(name):
    """Return the path of a train_llm.py by its chapter's number or by the name of its folder."""
    paths = [*ROOT.glob(f"{name}-*/train_llm.py"), *ROOT.glob(f"*/{name}/train_llm.py")]
    return paths[0]


def load(script):
    """Import a script, and return the module; `script` is a path or a name for script_of()."""
    path = script if str(script).endswith(".py") else script_of(script)
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# ---- the command line and the results --------------------------------------------------------


def parser_of(docstring):
    """Return a parser with the flag --output; its description is the first line of `docstring`."""
    parser = argparse.ArgumentParser(
        description=docstring.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="a JSON file for the machine and the results")
    return parser


def benchmark(docstring, question, add_flags=lambda add: None, cases=(), gpus=True, in_rows=True):
    """Parse the flags, run the generator `question`, and write its results to the file of --output.

    `question` receives the arguments and a temporary folder, and yields rows. If `in_rows` is
    false, `question` yields dictionaries of entries for the file instead. `add_flags` declares the
    flags that only this benchmark has. If there are `cases`, the flag --only selects cases to run.
    Set `gpus` to False if the results do not depend on GPUs; then the file names no GPU.
    """
    parser = parser_of(docstring)
    add_flags(parser.add_argument)
    if cases:
        choices = {"choices": cases, "default": list(cases), "metavar": "CASE"}
        parser.add_argument("--only", nargs="+", **choices, help="run only these cases")
    args, machine, rows = parser.parse_args(), describe_machine(gpus), []
    with tempfile.TemporaryDirectory() as folder:
        for found in question(args, Path(folder)):
            rows.append(found)
            keep(args.output, machine, {"rows": rows} if in_rows else found)


def show(row):
    """Print a row of results, without its lists and dictionaries."""
    texts = []
    for name, value in row.items():
        if not isinstance(value, (dict, list)):
            texts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    print(", ".join(texts), flush=True)


def cpu_facts():
    """Return, by name, the facts that /proc/cpuinfo lists about a core, or {} without this file."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}


def bf16_flags():
    """Return the flags of this CPU that stand for bf16 instructions; the list may be empty."""
    return sorted({"avx512_bf16", "amx_bf16"} & set(cpu_facts().get("flags", "").split()))


def fast_precision():
    """Return bf16 if this machine has a GPU or a CPU with bf16 instructions, and fp32 otherwise."""
    return "bf16" if torch.cuda.is_available() or bf16_flags() else "fp32"


def describe_machine(gpus=True):
    """Return a dictionary that describes this machine, its software, the date and the command.

    If `gpus` is true, initialize CUDA, and add the number and the name of the GPUs, if there are
    any.
    """
    count = torch.cuda.device_count() if gpus else 0
    return {
        "cpu": cpu_facts().get("model name", platform.processor()),
        "cores": os.cpu_count(),
        "bf16 flags": ", ".join(bf16_flags()) or "none",
        **({"gpus": f"{count} x {torch.cuda.get_device_name()}"} if count else {}),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES if importlib.util.find_spec(name)},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
    }


def keep(output, machine, results):
    """Add the machine and the results to the JSON file `output`, unless `output` is None."""
    if output:
        before = json.loads(output.read_text()) if output.exists() else {}
        results = before | {"machine": machine} | results
        text = json.dumps(results, indent=1, ensure_ascii=False)
        # Put each row, such as `results["rows"][0]`, on one line: join the lines of the row, which
        # begin with three or more spaces, and its closing bracket, which follows two spaces.
        text = re.sub(r"\n {3,}|\n {2}(?=[]}])", " ", text)
        output.with_suffix(".new").write_text(text + "\n")
        output.with_suffix(".new").replace(output)


# ---- runs ------------------------------------------------------------------------------------


class Failed(SystemExit):
    """End the program with the output of a failed command, unless the caller catches this error."""


def launch_command(ranks, command):
    """Return the command that starts a script: under torchrun, or without it if `ranks` is 0."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    launcher = [*torchrun, "--nproc-per-node", ranks] if ranks else []
    return [sys.executable, *launcher, *command]


def words_of(function):
    """Return the `command` for launch_command() that calls a function.

    The caller appends the arguments that the function reads.
    """
    return [Path(__file__).resolve(), Path(inspect.getfile(function)).stem, function.__name__]


class Job:
    """Run a command, and mark its environment, so that kill() finds all of the job's processes."""

    def __init__(self, command, out=subprocess.PIPE, log=subprocess.PIPE, **variables):
        """Start the command, and add `variables` to its environment."""
        self.command, self.mark = list(map(str, command)), uuid.uuid4().hex
        # A job may start further jobs. Append this job's mark to the mark of the outer job, so that
        # kill() of the outer job also finds the processes of this job.
        marks = os.environ.get("BENCHMARK_MARK", "") + self.mark
        environment = os.environ | ALLOCATOR | variables | {"BENCHMARK_MARK": marks}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": log, "text": True}
        self.process = subprocess.Popen(self.command, env=environment, **pipes)

    def kill(self):
        """Kill the job's processes, including processes that torchrun has put into new sessions."""
        deadline = time.monotonic() + 10
        # A GPU driver may keep a killed process from ending, so stop trying after ten seconds.
        while (victims := self.living()) and time.monotonic() < deadline:
            for path in victims:
                with suppress(OSError):
                    os.kill(int(path.name), signal.SIGKILL)
            time.sleep(0.01)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)

    def living(self):
        """Return the /proc folders of the job's processes that still exist."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.mark.encode() in (path / "environ").read_bytes():
                    found.append(path)
        return found


def call(command, ranks=0, threads=1, **variables):
    """Run a script with its arguments on `ranks` ranks; return the text that it prints to stdout.

    If `ranks` is 0, run the script without torchrun. Each rank gets `threads` threads, and
    `variables` in its environment. Raise Failed if the script fails, or runs for more than LONGEST
    seconds. Kill all processes that the script has left behind.
    """
    variables = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"} | variables
    job = Job(launch_command(ranks, command), **variables)
    try:
        output, log = job.process.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        raise Failed(f"{shlex.join(job.command)}: not done after {LONGEST} s") from None
    finally:
        job.kill()
    if job.process.returncode:
        raise Failed(f"{output}{log}\n{shlex.join(job.command)}: failed; read its output above")
    return output


def main():
    """Call the function that words_of() has named in the command.

    The function reads the remaining arguments of the command from sys.argv.
    """
    module, function = sys.argv[1:3]
    del sys.argv[1:3]
    getattr(importlib.import_module(module), function)()
    if dist.is_initialized():
        # Leave the process group only when all ranks are done. If one rank left early, the
        # collectives of the other ranks might fail.
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
