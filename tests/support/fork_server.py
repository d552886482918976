"""Start Python scripts quickly, by forking a server that has already imported their packages.

The imports take seconds, and the tests start hundreds of scripts. One server per test session
imports the packages of the chapters, and forks itself for each script.

A forked script differs from a new process in two ways. All forks hash strings with the same seed,
and the kernel kills a fork when the test session ends for any reason.
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
import threading
import time
from contextlib import suppress
from multiprocessing import connection, forkserver

FORKS = multiprocessing.get_context("forkserver")
IMPORTED = "torch torch.distributed.checkpoint.staging torch.distributed.checkpoint.state_dict "
IMPORTED += "torch.distributed.fsdp datasets transformers.integrations.sdpa_attention tqdm wandb "
IMPORTED += "transformers.models.auto.modeling_auto transformers.models.auto.tokenization_auto "
IMPORTED += "transformers.models.llama.modeling_llama pydoc_data.topics "
# Import accelerate and DeepSpeed too, because save_pretrained() would import them in each fork,
# which takes seconds.
IMPORTED += "accelerate deepspeed"
FORKS.set_forkserver_preload(IMPORTED.split())
# Process.start() also polls all earlier processes, so allow only one start or poll at a time. If
# two threads read the status of a process at the same time, the second thread finds no status and
# reports 255.
LOCK = threading.RLock()
# Ignore changes of the variables whose names begin with these texts. pytest changes PYTEST_* in
# each test. Libraries set the other variables once, sometimes long after the first test has begun:
# threadpoolctl sets KMP_*, and a compilation sets _TORCHINDUCTOR_*.
IGNORED_VARIABLES = ("PYTEST_", "_MLFLOW_", "MLFLOW_", "PYTORCH_NVML_BASED_CUDA_CHECK", "KMP_")
IGNORED_VARIABLES += ("_TORCHINDUCTOR_", "HF_XET_")


class Server:
    """Start scripts as forks, or as new processes if a test has changed environment variables."""

    # conftest.py replaces None with the environment variables at the start of the tests.
    environment = None

    def start(self, command, variables, out, err=None):
        """Start a script with its arguments and additional variables; return the process.

        If a test has changed the environment, start a new process instead of a fork, because
        libraries read many variables only while they are imported. Unlike forks, new processes hash
        strings with different seeds.

        Without `err`, the script's stderr goes to `out`.
        """
        err = err or out
        command, env = list(map(str, command)), os.environ | variables
        if current_environment() != self.environment:
            # Give the script a new process group. A script may signal its entire group, and the
            # signal must not reach the tests.
            options = {"env": env, "stdout": out, "stderr": err, "start_new_session": True}
            return subprocess.Popen([sys.executable, *command], **options)
        process = Forked(target=run_script, args=(command, env, out.name, err.name), daemon=True)
        with LOCK:
            process.start()
        return process


class Forked(FORKS.Process):
    """Give a forked process the interface of subprocess.Popen, but without pipes."""

    returncode = property(lambda self: self.poll())

    def poll(self):
        with LOCK:
            return self.exitcode

    def wait(self, timeout=None):
        connection.wait([self.sentinel], timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.name, timeout)
        return self.poll()

    def send_signal(self, number):
        if self.poll() is None:
            # Ignore this error, because the process may end between poll() and os.kill().
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def current_environment():
    """Return all environment variables, except variables that do not affect a script."""
    names = [name for name in os.environ if not name.startswith(IGNORED_VARIABLES)]
    return {name: os.environ[name] for name in names}


def run_script(command, env, out, err):
    """Run a script in this forked process, as `python SCRIPT ARGUMENTS >out 2>err` would."""
    # Option 1 is PR_SET_PDEATHSIG: the kernel kills this process when the server ends.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.setsid()
    for name, descriptor in ((out, 1), (err, 2)):
        file = os.open(name, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    # A failed rank sleeps for 10 seconds, so that a launcher can end the rank. run_jobs() starts
    # ranks without a launcher, so shorten this sleep there; only run_jobs() uses two files per
    # rank.
    if out != err:
        sleep = time.sleep
        time.sleep = lambda seconds: sleep(0.1 if seconds == 10 else seconds)
    # The server ends when the last copy of this descriptor is closed, so close the script's copy.
    os.close(forkserver._forkserver._forkserver_alive_fd)
    # Undo two settings of the fork server, so that the script can fork processes, as it could if a
    # new Python had started it.
    multiprocessing.current_process()._config["daemon"] = False
    multiprocessing.set_start_method("fork", force=True)
    # Exclude the imported objects from garbage collection, because it would write to the memory
    # that this process shares with the server, and so copy this memory.
    gc.freeze()
    os.environ.clear()
    os.environ.update(env)
    sys.argv = command
    sys.path[0] = os.path.dirname(command[0])
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
