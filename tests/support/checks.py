"""Check that a failed run prints one error line, writes no file, and saves no bad gradient."""

import re

from conftest import SCRIPTS, start_ranks
from runs import kill, wait_for


def check_two_ranks_fail(chapter, args, expected, logs, folder):
    """Check that exactly one of two ranks reports the error `expected`.

    When one rank fails, end the other rank, as torchrun would. The run must write no file to
    `folder`, except hidden files.
    """
    processes = start_ranks(2, [SCRIPTS[chapter], *args, "--save-dir", folder], logs)
    wait_for(lambda: False, processes)
    statuses = [process.poll() for process in processes]
    kill(processes)
    output = "".join(path.read_text() for path in logs.glob("rank*.log"))
    assert set(statuses) <= {2, None}, output
    errors = re.findall("^train_llm.py: error:.*", output, re.M)
    assert len(errors) == 1 and expected in errors[0], output
    assert 'train_llm.py", line' not in output, f"the output has a traceback:\n{output}"
    # Ignore hidden files, because check_shared() writes a hidden file.
    assert [path for path in folder.rglob("[!.]*") if path.is_file()] == []


def check_bad_gradient(results, run_dir, every):
    """Check that a gradient that is not finite has stopped all ranks, and is in no checkpoint.

    The run saves every `every` steps. It must have all checkpoints from before the bad gradient,
    but no later checkpoint.
    """
    output = "".join(result["stdout"] + result["stderr"] for result in results)
    assert {result["status"] for result in results} == {2}, output
    error = r"train_llm.py: error: a gradient in steps \d+ to (\d+) was not finite; lower --lr"
    match = re.search(error, output)
    assert match and "Traceback" not in output, output
    saved_steps = range(every, int(match[1]), every)
    names = sorted(path.name for path in run_dir.glob("checkpoints/step-*"))
    assert names == [f"step-{step:08}" for step in saved_steps], output
