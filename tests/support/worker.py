"""Runs many training commands one after another in one process, because imports take seconds.

Started once per rank by `conftest.run_jobs`. Each job executes the script as `__main__` with
arguments and a port of its own, as a fresh process would, down to the clean-up at its end.
"""

import contextlib
import faulthandler
import io
import json
import os
import runpy
import sys
import traceback

import torch.distributed as dist


class Captured(io.StringIO):
    """A stream to memory that, like a real one, has a file descriptor."""

    def fileno(self):
        return 2

    def reconfigure(self, **_):
        """A stream to memory has no buffer."""


def run(job):
    """Run one job; return its exit status and what it printed."""
    variables = dict(os.environ)
    os.environ["MASTER_PORT"] = str(job["port"])
    sys.argv = [job["script"], *job["args"]]
    out, err = Captured(), Captured()
    status = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(job["script"], run_name="__main__")
        except SystemExit as stop:
            status = stop.code or 0
        except BaseException:
            traceback.print_exc()
            status = 1
    if dist.is_initialized():  # a job that failed left it, as a process that ends does
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(variables)
    if states := sys.modules.get("accelerate.state"):  # which keeps what it knows in its classes
        states.AcceleratorState._reset_state(reset_partial_state=True)
        states.GradientState._reset_state()
    if "deepspeed" in sys.modules:  # it would go on with the groups of this job
        sys.modules["deepspeed.comm.comm"].cdb = None
        sys.modules["deepspeed.utils.groups"]._release_process_group_references()
    return {"status": status, "stdout": out.getvalue(), "stderr": err.getvalue()}


def main():
    """Run the jobs of a share, each of which has a file in a folder; write their results there."""
    folder, share = sys.argv[1:]
    faulthandler.enable()
    done = []
    with open(f"{folder}/jobs{share}.json") as file:
        jobs = json.load(file)
    for job in jobs:
        result = run(job)
        if job["well"] and result["status"]:
            sys.exit(f"{job['script']} {job['args']}\n{result['stdout']}{result['stderr']}")
        done.append(result)
    with open(f"{folder}/results{share}-{os.environ['RANK']}.json", "w") as file:
        json.dump(done, file)


if __name__ == "__main__":
    main()
