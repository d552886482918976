"""Run prepare.py with a pause before each file that it writes.

Usage: slow_prepare.py SECONDS ARGUMENT...
"""

import sys
import time
from pathlib import Path

from recorded import load


def main():
    """Run the tool, which then can be killed at any moment of its work."""
    seconds = float(sys.argv.pop(1))
    tool = load(Path(__file__).parents[2] / "preparing-data/prepare.py")
    write = tool.write

    def slowly(path, data):
        time.sleep(seconds)
        write(path, data)

    tool.write = slowly
    tool.main()


if __name__ == "__main__":
    main()
