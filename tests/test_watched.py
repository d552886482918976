"""Test that watched.py writes correct files, and that scripts run as they do without it."""

import json
import signal
import subprocess
import textwrap
import threading
import time

import pytest
import torch
import watched

from conftest import SCRIPTS, SHORT, difference, metrics, run_command
from runs import WATCHED, watched_command


def run(*args, **options):
    """Run a script under watched.py to its end; return the finished process with its output."""
    return run_command(*watched_command(*args, **options))


def beat_of(folder, rank=0):
    """Return the last heartbeat of a rank."""
    return json.loads((folder / f"ranks/{rank:05}.json").read_text())


@pytest.fixture
def script(tmp_path):
    """Return a function that writes a script and returns its path."""

    def write(text):
        (tmp_path / "some_script.py").write_text(textwrap.dedent(text))
        return tmp_path / "some_script.py"

    return write


# ---- scripts run and end as they do without it -------------------------------------------------
@pytest.mark.parametrize(
    "text, status, end, error",
    [
        ("print(__name__)", 0, "finished", None),
        ("import sys; sys.exit(3)", 3, "failed", "SystemExit"),
        ("import sys; sys.exit('no way')", 1, "failed", "SystemExit: no way"),
        ("1 / 0", 1, "failed", "ZeroDivisionError"),
        ("import sys; print('x.py: error: bad', file=sys.stderr); sys.exit(2)", 2, "failed",
         "SystemExit: x.py: error: bad"),
    ],
)  # fmt: skip
def test_exit_status_is_that_of_the_script(script, tmp_path, text, status, end, error):
    done = run(tmp_path, script(text))
    assert done.returncode == status, done.stderr
    beat = beat_of(tmp_path)
    assert beat["end"] == end
    assert beat["error"] is None if error is None else error in beat["error"]
    assert done.stdout in ("", "__main__\n")


def test_script_has_its_own_arguments_folder_and_main(script, tmp_path):
    """Check also that a process started by the script finds the script's functions."""
    (tmp_path / "neighbour.py").write_text("value = 5\n")
    text = """
        import multiprocessing, pickle, sys
        from neighbour import value
        class Kept: pass
        def work(number): return number * value
        if __name__ == "__main__":
            assert sys.argv[1:] == ["-e", "--into"] and sys.argv[0].endswith("some_script.py")
            pickle.loads(pickle.dumps(Kept()))
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(work, [2, 3]))
    """
    done = run(tmp_path / "run", script(text), "-e", "--into")
    assert (done.returncode, done.stdout) == (0, "[10, 15]\n"), done.stderr


def start(tmp_path, *args):
    """Start a script under watched.py; return the process once it has printed a line."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(watched_command(tmp_path, *args), **pipes)
    assert process.stdout.readline() == "ready\n"
    return process


IN_C = "import time, torch; print('ready', flush=True); time.sleep(1e6)"
IN_PYTHON = "print('ready', flush=True)\nwhile True: pass"
# ctypes releases Python's global lock, but the main thread stays in C code, so no Python handler
# runs.
IN_C_FOREVER = """
import ctypes, signal
print('ready', flush=True)
ctypes.CDLL(None).pause()
ctypes.CDLL(None).sleep(1000)
"""


@pytest.mark.parametrize("text", [IN_C, IN_PYTHON, IN_C_FOREVER])
def test_sigterm_ends_the_script_at_once_and_is_recorded(script, tmp_path, text):
    process = start(tmp_path, script(text))
    start_time = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == -signal.SIGTERM
    assert time.monotonic() - start_time < 3
    assert beat_of(tmp_path)["asked_to_end"] and "SIGTERM" in beat_of(tmp_path)["error"]


def test_sigterm_handler_of_the_script_runs(script, tmp_path):
    text = """
        import signal, time, sys
        def stop(*_): print("saving"); sys.exit(7)
        signal.signal(signal.SIGTERM, stop)
        # Keep the watching thread from running before the script ends.
        sys.setswitchinterval(10)
        print("ready", flush=True)
        time.sleep(1e6)
    """
    process = start(tmp_path, script(text))
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20)[0] == "saving\n" and process.returncode == 7
    assert beat_of(tmp_path)["asked_to_end"]


def test_sigterm_ends_a_forked_process(script, tmp_path):
    text = """
        import multiprocessing, time
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1e6,))
        child.start()
        child.terminate()
        child.join(20)
        print(child.exitcode)
    """
    assert run(tmp_path, script(text)).stdout == "-15\n"


def test_crash_in_c_code_writes_the_python_stack(script, tmp_path):
    text = """
        import ctypes
        from torch.distributed.elastic.multiprocessing.errors import record
        record(lambda: ctypes.string_at(0))()
    """
    assert run(tmp_path, script(text)).returncode == -11
    assert "some_script.py" in (tmp_path / "ranks/00000.crash").read_text()


def test_missing_script_is_an_error(tmp_path):
    done = run(tmp_path, "nowhere.py")
    assert done.returncode == 2
    assert "error: script nowhere.py: no such file;" in done.stderr


# ---- heartbeats --------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def watched_run(tmp_path_factory):
    """Run chapter 02 with watched.py and without it; return the folder that holds both runs."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("alone", "watched"):
        args = [SCRIPTS["02"], *SHORT, "--save-dir", folder, "-e", name]
        command = watched_command(folder / name, "--every", 5, *args, ranks=2)
        if name == "alone":
            # Remove watched.py with its --into and --every.
            first = command.index(str(WATCHED))
            del command[first : first + 5]
        subprocess.run(command, check=True, timeout=200)
    return folder


@pytest.mark.slow
def test_losses_are_the_same_without_watched(watched_run):
    alone, watched = metrics(watched_run / "alone"), metrics(watched_run / "watched")
    assert difference(alone, watched) == 0


@pytest.mark.slow
def test_heartbeat_has_steps_checks_and_resources(watched_run):
    beats = [beat_of(watched_run / "watched", rank) for rank in (0, 1)]
    for rank, beat in enumerate(beats):
        assert (beat["rank"], beat["world_size"], beat["end"]) == (rank, 2, "finished")
        assert (beat["step"], beat["bad"], beat["fault"]) == (20, None, None)
        assert [check["step"] for check in beat["checks"]] == [5, 10, 15, 20]
        assert beat["memory"][-1] > 0.1 and beat["open_files"] > 3
    first, second = (beat["checks"] for beat in beats)
    assert [check["weights"] for check in first] == [check["weights"] for check in second]
    assert not {check["data"] for check in first} & {check["data"] for check in second}
    rows = metrics(watched_run / "watched")
    means = [sum(pair) / 2 for pair in zip(first[-1]["losses"], second[-1]["losses"], strict=True)]
    assert means == pytest.approx([rows[step]["loss"] for step in (18, 19, 20)], abs=1e-6)


@pytest.mark.slow
def test_step_number_includes_the_steps_before_a_resume(watched_run):
    args = [*SHORT, "--num-steps", 30, "--save-dir", watched_run, "-e", "watched"]
    command = watched_command(watched_run / "watched", "--every", 5, SCRIPTS["02"], *args, ranks=2)
    subprocess.run(command, check=True, timeout=200)
    assert beat_of(watched_run / "watched")["step"] == 30


# ---- checks ------------------------------------------------------------------------------------
class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(16, 4), torch.nn.Linear(4, 16)

    def forward(self, ids):
        return torch.nn.functional.cross_entropy(self.head(self.embed(ids)), ids)


@pytest.fixture
def steps():
    """Count the steps of this process; restore torch's functions after the test."""
    backward = torch.autograd.backward
    embedding_forward = torch.nn.Embedding.forward
    handles = []
    register = watched.register_optimizer_step_post_hook
    watched.register_optimizer_step_post_hook = lambda hook: handles.append(register(hook))
    yield watched.Steps(2)
    torch.autograd.backward = backward
    torch.nn.Embedding.forward = embedding_forward
    watched.register_optimizer_step_post_hook = register
    handles[0].remove()


def train(model, optimizer, count=4, infinite_step=None):
    """Train for some steps, each on a different batch; one step may have an infinite loss."""
    for step in range(1, count + 1):
        loss = model(torch.arange(8) + step)
        loss = loss * (torch.inf if step == infinite_step else 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_main_thread_reads_nothing_from_the_device(steps, monkeypatch):
    """Each of these functions would make the main thread wait for a GPU.

    The watching thread may call them, because it reads only numbers that have arrived.
    """
    calls = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy"):
        read = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor,
            name,
            lambda *args, read=read, name=name: calls.append(name) or read(*args),
        )
    model = Tokens()
    train(model, torch.optim.AdamW(model.parameters(), fused=True))
    assert (steps.fault, calls) == (None, [])
    thread = threading.Thread(target=steps.collect)
    thread.start()
    thread.join()
    assert [check["step"] for check in steps.checks] == [1, 2, 4]
    assert calls == ["tolist"] * 4


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
def test_first_step_that_is_not_finite_is_recorded(steps, optimizer_class):
    model = Tokens()
    train(model, optimizer_class(model.parameters(), lr=0.1), infinite_step=3)
    steps.collect()
    assert steps.first_nonfinite["step"] == 3
    assert steps.first_nonfinite["loss"] == float("inf")


def test_error_in_a_check_does_not_stop_the_training(steps, monkeypatch):
    monkeypatch.delattr(watched, "checksum")
    model = Tokens()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "NameError" in steps.fault and steps.count == 1


def test_stack_gives_the_phase():
    at = lambda *names: watched.phase_of([(file, 1, name) for file, name in names])  # noqa: E731
    layer = ("/x/site-packages/torch/nn/modules/module.py", "_call_impl")
    hook = ("/x/site-packages/torch/_dynamo/eval_frame.py", "_fn")
    reduce = ("/x/site-packages/torch/distributed/distributed_c10d.py", "all_reduce")
    assert at(("/w/train.py", "main"), layer, hook) == "forward"
    assert at(("/w/train.py", "evaluate"), layer) == "evaluation"
    assert at(("/w/train.py", "save_checkpoint"), reduce) == "checkpoint"
    assert at(("/w/train.py", "measure"), reduce) == "collective"
    assert at(("/x/site-packages/torch/utils/data/dataloader.py", "__next__")) == "data"
    assert at(layer, ("/x/site-packages/torch/_dynamo/convert_frame.py", "compile")) == "compile"
    assert at(("/w/train.py", "main")) == "other"
