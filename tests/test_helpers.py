"""The helpers that start jobs do not hide failures."""

from contextlib import nullcontext

import pytest

from conftest import run_jobs

CRASHING = """
import os, pathlib, sys
print('File "torch/distributed/_functional_collectives.py"' if {named} else "", file=sys.stderr)
marker = pathlib.Path({folder!r}, "started-" + os.environ["RANK"])
is_first_start = not marker.exists()
marker.touch()
sys.stderr.flush()
if is_first_start and os.environ["RANK"] == "0":
    os.abort()
"""


@pytest.mark.parametrize("named", [True, False])
def test_job_is_started_again_only_after_a_crash_in_a_collective(tmp_path, named):
    script = tmp_path / "crashing.py"
    script.write_text(CRASHING.format(folder=str(tmp_path), named=named))
    with pytest.warns(UserWarning, match="started again") if named else nullcontext():
        [results] = run_jobs(2, [(script, [])], tmp_path / "jobs")
    assert results[0]["status"] == (0 if named else -6)
