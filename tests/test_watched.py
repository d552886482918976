"""watched.py: what it writes, that nothing waits for it, that scripts end as they would without."""

import json
import signal
import subprocess
import textwrap
import threading
import time

import pytest
import torch
import watched

from conftest import SCRIPTS, SHORT, difference, metrics, printed
from runs import WATCHED, command_of


def run(*args, **options):
    """Run to the end; return the finished process with what it printed."""
    return printed(*command_of(*args, **options))


def beat_of(folder, rank=0):
    """Return a rank's heartbeat."""
    return json.loads((folder / f"ranks/{rank:05}.json").read_text())


@pytest.fixture
def script(tmp_path):
    """Write a script; return its path."""

    def write(text):
        (tmp_path / "some_script.py").write_text(textwrap.dedent(text))
        return tmp_path / "some_script.py"

    return write


# ---- it ends as it would -----------------------------------------------------------------------
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
def test_the_status_is_the_scripts(script, tmp_path, text, status, end, error):
    done = run(tmp_path, script(text))
    assert done.returncode == status, done.stderr
    beat = beat_of(tmp_path)
    assert beat["end"] == end
    assert beat["error"] is None if error is None else error in beat["error"]
    assert done.stdout in ("", "__main__\n")


def test_a_script_sees_what_it_would_without(script, tmp_path):
    """Its arguments, its folder, its __main__, and those of the processes that it starts."""
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


def starting(tmp_path, *args):
    """Start a script under watched.py; return the process once it has printed a line."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command_of(tmp_path, *args), **pipes)
    assert process.stdout.readline() == "ready\n"
    return process


IN_C = "import time, torch; print('ready', flush=True); time.sleep(1e6)"
IN_PYTHON = "print('ready', flush=True)\nwhile True: pass"
HOLDING = """
import ctypes, signal
print('ready', flush=True)
ctypes.CDLL(None).pause()  # ctypes lets go of Python's lock, and a handler in Python never runs
ctypes.CDLL(None).sleep(1000)
"""


@pytest.mark.parametrize("text", [IN_C, IN_PYTHON, HOLDING])
def test_sigterm_ends_it_at_once_and_is_noted(script, tmp_path, text):
    process = starting(tmp_path, script(text))
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == -signal.SIGTERM
    assert time.monotonic() - begun < 3
    assert beat_of(tmp_path)["asked_to_end"] and "SIGTERM" in beat_of(tmp_path)["error"]


def test_a_handler_of_the_scripts_own_stays(script, tmp_path):
    text = """
        import signal, time, sys
        def stop(*_): print("saving"); sys.exit(7)
        signal.signal(signal.SIGTERM, stop)
        sys.setswitchinterval(10)  # the thread that watches gets no turn before the script ends
        print("ready", flush=True)
        time.sleep(1e6)
    """
    process = starting(tmp_path, script(text))
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20)[0] == "saving\n" and process.returncode == 7
    assert beat_of(tmp_path)["asked_to_end"]


def test_what_it_forks_ends_by_sigterm(script, tmp_path):
    text = """
        import multiprocessing, time
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1e6,))
        child.start()
        child.terminate()
        child.join(20)
        print(child.exitcode)
    """
    assert run(tmp_path, script(text)).stdout == "-15\n"


def test_a_crash_in_c_tells_its_line(script, tmp_path):
    text = """
        import ctypes
        from torch.distributed.elastic.multiprocessing.errors import record
        record(lambda: ctypes.string_at(0))()
    """
    assert run(tmp_path, script(text)).returncode == -11
    assert "some_script.py" in (tmp_path / "ranks/00000.crash").read_text()


def test_wrong_arguments(tmp_path):
    done = run(tmp_path, "nowhere.py")
    assert done.returncode == 2 and "there is no script nowhere.py" in done.stderr


# ---- what it writes ----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def watched_run(tmp_path_factory):
    """A run of chapter 02 that was watched, and the folder of one that was not."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("alone", "watched"):
        args = [SCRIPTS["02"], *SHORT, "--save-dir", folder, "-e", name]
        command = command_of(folder / name, "--every", 5, *args, ranks=2)
        if name == "alone":
            at = command.index(str(WATCHED))
            del command[at : at + 5]  # with --into and --every
        subprocess.run(command, check=True, timeout=200)
    return folder


@pytest.mark.slow
def test_no_loss_is_another(watched_run):
    alone, watched = metrics(watched_run / "alone"), metrics(watched_run / "watched")
    assert difference(alone, watched) == 0


@pytest.mark.slow
def test_what_a_heartbeat_tells(watched_run):
    beats = [beat_of(watched_run / "watched", rank) for rank in (0, 1)]
    for rank, beat in enumerate(beats):
        assert (beat["rank"], beat["world_size"], beat["end"]) == (rank, 2, "finished")
        assert (beat["step"], beat["bad"], beat["fault"]) == (20, None, None)
        assert [check["step"] for check in beat["checks"]] == [5, 10, 15, 20]
        assert beat["memory"][-1] > 0.1 and beat["open_files"] > 3
    first, second = (beat["checks"] for beat in beats)
    assert [one["weights"] for one in first] == [one["weights"] for one in second]
    assert not {one["data"] for one in first} & {one["data"] for one in second}
    told = metrics(watched_run / "watched")
    means = [sum(pair) / 2 for pair in zip(first[-1]["losses"], second[-1]["losses"], strict=True)]
    assert means == pytest.approx([told[step]["loss"] for step in (18, 19, 20)], abs=1e-6)


@pytest.mark.slow
def test_a_resumed_run_goes_on_counting(watched_run):
    args = [*SHORT, "--num-steps", 30, "--save-dir", watched_run, "-e", "watched"]
    command = command_of(watched_run / "watched", "--every", 5, SCRIPTS["02"], *args, ranks=2)
    subprocess.run(command, check=True, timeout=200)
    assert beat_of(watched_run / "watched")["step"] == 30


# ---- nothing waits for it ----------------------------------------------------------------------
class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(16, 4), torch.nn.Linear(4, 16)

    def forward(self, ids):
        return torch.nn.functional.cross_entropy(self.head(self.embed(ids)), ids)


@pytest.fixture
def steps():
    """Steps that watch this process; in the end torch is as it was."""
    before = torch.autograd.backward, torch.nn.Embedding.forward
    handles = []
    register = watched.register_optimizer_step_post_hook
    watched.register_optimizer_step_post_hook = lambda hook: handles.append(register(hook))
    yield watched.Steps(2)
    torch.autograd.backward, torch.nn.Embedding.forward = before
    watched.register_optimizer_step_post_hook = register
    handles[0].remove()


def train(model, optimizer, count=4, poison=None):
    """Take steps on inputs of their own; in step `poison` the gradient is infinite."""
    for step in range(1, count + 1):
        loss = model(torch.arange(8) + step)
        loss = loss * (torch.inf if step == poison else 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_main_thread_reads_nothing_from_the_device(steps, monkeypatch):
    """On a GPU each of these would make it wait; the thread may, of what has arrived."""
    read = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy"):
        work = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda *args, work=work, name=name: read.append(name) or work(*args)
        )
    model = Tokens()
    train(model, torch.optim.AdamW(model.parameters(), fused=True))
    assert (steps.fault, read) == (None, [])
    thread = threading.Thread(target=steps.take)
    thread.start()
    thread.join()
    assert [check["step"] for check in steps.checks] == [1, 2, 4] and read == ["tolist"] * 4


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_the_first_step_that_is_not_finite_is_kept(steps, make):
    model = Tokens()
    train(model, make(model.parameters(), lr=0.1), poison=3)
    steps.take()
    assert steps.bad["step"] == 3 and steps.bad["loss"] == float("inf")


def test_an_error_of_its_own_ends_its_looks_and_not_the_training(steps, monkeypatch):
    monkeypatch.delattr(watched, "checksum")
    model = Tokens()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "NameError" in steps.fault and steps.count == 1


def test_phases():
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
