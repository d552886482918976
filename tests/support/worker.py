"""Run many training commands in sequence in one process, because imports take seconds.

conftest.run_jobs() starts this once per rank. Each job runs its script as `__main__`, with its own
arguments and port. After each job, run() resets what the next job would not find in a new process.
"""

import contextlib
import faulthandler
import io
import json
import os
import runpy
import sys
import time
import traceback

import torch.distributed as dist

sleep = time.sleep


def sleep_if_useful(seconds):
    """Sleep, but not the 10 seconds that a failed rank leaves its launcher to end the rank."""
    sleep(0.1 if seconds == 10 else seconds)


class Captured(io.StringIO):
    """A stream in memory that has a file descriptor, as real streams have."""

    def fileno(self):
        return 2

    def reconfigure(self, **_):
        """Do nothing, because a stream in memory has no buffer."""


def run(job):
    """Run one job; return its exit status and its output."""
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
    # A failed job does not destroy its process group.
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(variables)
    # accelerate and deepspeed keep state in classes and modules. Reset it for the next job.
    if states := sys.modules.get("accelerate.state"):
        states.AcceleratorState._reset_state(reset_partial_state=True)
        states.GradientState._reset_state()
    if "deepspeed" in sys.modules:
        sys.modules["deepspeed.comm.comm"].cdb = None
        sys.modules["deepspeed.utils.groups"]._release_process_group_references()
    return {"status": status, "stdout": out.getvalue(), "stderr": err.getvalue()}


def main():
    """Run the jobs of a share, which a file in a folder lists; write the results to the folder."""
    folder, share = sys.argv[1:]
    faulthandler.enable()
    time.sleep = sleep_if_useful
    results = []
    with open(f"{folder}/jobs{share}.json") as file:
        jobs = json.load(file)
    for job in jobs:
        result = run(job)
        if job["must_succeed"] and result["status"]:
            sys.exit(f"{job['script']} {job['args']}\n{result['stdout']}{result['stderr']}")
        results.append(result)
    with open(f"{folder}/results{share}-{os.environ['RANK']}.json", "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
