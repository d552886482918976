"""Starts Python scripts without their imports, which take seconds, and the tests start hundreds.

A server, one for the whole session, imports what the chapters import, and forks itself for each
script. What it starts is like a new process but for this: all have one seed for the hashes of
strings, and if the tests end, however they do, they are killed.
"""

import atexit
import ctypes
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import forkserver

FORKS = multiprocessing.get_context("forkserver")
IMPORTED = "torch torch.distributed.checkpoint.staging torch.distributed.checkpoint.state_dict "
IMPORTED += "torch.distributed.fsdp datasets transformers.integrations.sdpa_attention tqdm wandb "
IMPORTED += "transformers.models.auto.modeling_auto transformers.models.auto.tokenization_auto "
IMPORTED += "transformers.models.llama.modeling_llama pydoc_data.topics"
FORKS.set_forkserver_preload(IMPORTED.split())


class Server:
    """What starts processes; a process is a fork if it has the environment of the server."""

    settings = None  # that environment, once it is known

    def start(self, command, variables, log):
        """Start a script with its arguments and further variables; return the process.

        It is no fork but a new process, with its own seed for hashes, where a test has changed the
        environment: much of that is read by imports.
        """
        command, env = list(map(str, command)), os.environ | variables
        if settings() != self.settings:
            return subprocess.Popen([sys.executable, *command], env=env, stdout=log, stderr=log)
        process = Forked(target=run, args=(command, env, log.name), daemon=True)
        process.start()
        return process


class Forked(FORKS.Process):
    """A process that the server forked: what `subprocess.Popen` would be, without pipes."""

    returncode = property(lambda self: self.exitcode)

    def poll(self):
        return self.exitcode

    def wait(self, timeout=None):
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.name, timeout)
        return self.exitcode

    communicate = wait

    def send_signal(self, number):
        if self.exitcode is None:
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)


def settings():
    """Return the environment; pytest's own part of it is another one in each test."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


def run(command, env, log):
    """In a forked process: run a script as `python SCRIPT ARGUMENTS` does."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the server
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    os.close(forkserver._forkserver._forkserver_alive_fd)  # or it would outlive the tests
    gc.freeze()  # or each process would copy and collect all that was imported
    os.environ.clear()
    os.environ.update(env)
    sys.argv = command
    sys.path[0] = os.path.dirname(command[0])
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
