"""Run a chapter's script, and count what rank 0 sends in each training step.

Start this file once per rank, with a file for the counts, the chapter's script, and its arguments.
"""

import json
import os
import sys
from pathlib import Path

from recorded import load

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import dry_run
from step_watch import Watch


def main():
    """Train with a chapter's script; let rank 0 write a JSON file with the bytes that it sends.

    The file has a list of rows. They have the same keys as the rows of `sent` in the dry run's
    JSON, such as `phase`, `kind` and `bytes`.
    """
    output, script, *words = sys.argv[1:]
    options = dry_run.parse_args(["--gpus", "1", "--", script])
    chapter, watch = load(script), Watch(options)
    train_step = chapter.train_step

    def count_and_train(*args):
        watch.phase = f"step {args[4]}"
        with watch:
            return train_step(*args)

    chapter.train_step = count_and_train
    sys.argv = [script, *words]
    chapter.main()
    if os.environ["RANK"] == "0":
        Path(output).write_text(json.dumps(dry_run.summary(options, watch)["sent"]))


if __name__ == "__main__":
    main()
