"""Run a script in this process, and send this process a signal when the script prints a line with a
given beginning.

    python tests/signalled.py "step 3 " 9 train.py max_steps=5

Some tests kill a run after a certain step. A test that reads a run's output and then sends a signal
can be too late, because a fast run is already in its next step. With this script, the run sends
SIGSTOP or SIGKILL to itself immediately after it prints the given line.
"""

import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run the script that the third argument names, and pass all later arguments to the script."""
    _, beginning, number, *sys.argv = sys.argv
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    write = sys.stdout.write
    found = False

    def watched_write(text: str) -> int:
        nonlocal found
        written = write(text)
        if found and text.endswith("\n"):
            found = False
            os.kill(os.getpid(), int(number))
        if text.startswith(beginning):
            # The signal waits until `print` writes the end of the line, in a second call.
            found = True
        return written

    sys.stdout.write = watched_write  # type: ignore[method-assign]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
