"""Starts Python scripts without their imports, which take seconds, and the tests start hundreds.

A server, one for the whole session, imports what the chapters import, and forks itself for each
script. What it starts is like a new process but for this: all have one seed for the hashes of
strings, and if the tests end, however they do, they are killed.
"""

import ast
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress

# ---- in the tests ----------------------------------------------------------------------------


class Server:
    """The server as the tests see it; it starts with the first script."""

    def __init__(self, scripts):
        self.scripts = scripts  # whose imports it does
        self.settings = None  # the environment in which it does them
        self.process = None

    def start(self, command, variables, log):
        """Start a script with its arguments and further variables; return the process.

        It is no fork but a new process, with its own seed for hashes, where a test has changed the
        environment: much of that is read by imports.
        """
        command, env = list(map(str, command)), os.environ | variables
        if can_fork() and settings() == self.settings:
            return self.fork(command, env, log)
        return subprocess.Popen([sys.executable, *command], env=env, stdout=log, stderr=log)

    def fork(self, command, env, log):
        if not self.process:
            self.launch()
        request = {"command": command, "env": env, "folder": os.getcwd()}
        ours, theirs = os.pipe()
        message = [json.dumps(request).encode()]
        socket.send_fds(self.requests, message, [log.fileno(), theirs])
        os.close(theirs)
        return Forked(command, ours)

    def launch(self):
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), *self.scripts],
            env=self.settings,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for the tests, and these end what they started
        )
        theirs.close()

    def stop(self):
        if self.process:
            self.requests.close()
            self.process.wait()


class Forked:
    """A process that the server started: what `subprocess.Popen` would be, without pipes."""

    def __init__(self, args, pipe):
        self.args = args
        self.pipe = pipe  # gives the process's number, and when it has ended, its status
        self.pid = self.read()
        self.returncode = None

    def read(self):
        number = os.read(self.pipe, 4)
        assert number, "the fork server is gone"
        return int.from_bytes(number, "little", signed=True)

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self.pipe], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = self.read()
            os.close(self.pipe)
        return self.returncode

    def poll(self):
        try:
            return self.wait(timeout=0)
        except subprocess.TimeoutExpired:
            return None

    def communicate(self, timeout=None):
        self.wait(timeout)
        return None, None

    def send_signal(self, number):
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def settings():
    """Return the environment; pytest's own part of it is another one in each test."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


def can_fork():
    """Return whether this system, as Linux does, can tell at once that a process has ended."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


# ---- in the server ---------------------------------------------------------------------------


def import_all(scripts):
    """Import what scripts import."""
    for script in scripts:
        with suppress(Exception):  # it will fail again, and say why, when that script is run
            for node in ast.parse(open(script).read()).body:
                if isinstance(node, ast.Import | ast.ImportFrom):
                    exec(compile(ast.Module([node], []), script, "exec"), {})
    gc.freeze()  # or each process, at its end at the latest, would copy and collect all of it


def serve(requests):
    """Fork a process for each request; return only in these, with what they are to do."""
    running = {}  # from a descriptor of a process to its number and the pipe that waits for its end
    while True:
        for ready in select.select([requests, *running], [], [])[0]:
            if ready is not requests:
                os.close(ready)
                report(*running.pop(ready))
            elif request := answer(requests, running):
                return request


def answer(requests, running):
    """Fork a process for the next request; return that in the new process, and nothing here."""
    message, descriptors, *_ = socket.recv_fds(requests, 2**20, 2)
    if not message:
        sys.exit()  # the tests have ended
    log, pipe = descriptors
    server, pid = os.getpid(), os.fork()
    if pid == 0:
        requests.close()
        leave(server, log)
        return json.loads(message)
    running[os.pidfd_open(pid)] = pid, pipe
    tell(pipe, pid)
    os.close(log)


def report(pid, pipe):
    """Tell how a process has ended: its exit status, or the signal as a negative number."""
    tell(pipe, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os.close(pipe)


def tell(pipe, number):
    """Write a number to a pipe, which the tests may have closed."""
    with suppress(BrokenPipeError):
        os.write(pipe, number.to_bytes(4, "little", signed=True))


def leave(server, log):
    """In a forked process: have nothing in common with the server but its end."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != server:  # it had ended before
        os._exit(1)
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, 2**16)


def run(request):
    """Run a script as `python SCRIPT ARGUMENTS` does."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["command"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    import_all(sys.argv[2:])
    run(serve(socket.socket(fileno=int(sys.argv[1]))))
