"""`python -m inference.with_parent COMMAND ...` runs a command until our parent ends.

SGLang has no option for this. The command gets SIGTERM when our parent is gone, or when we get
SIGTERM ourselves. After that, our whole process group gets SIGKILL as soon as the command has
ended, and at the latest after three seconds. So start this module in a session of its own, where
SIGKILL reaches nobody else.
"""

import os
import signal
import subprocess
import sys
import threading

from inference.process import follow_parent


def main(words: list[str]) -> int:
    child = subprocess.Popen(words)
    ending = threading.Event()

    def end(*_: object) -> None:
        ending.set()
        child.terminate()
        threading.Timer(3.0, os.killpg, (0, signal.SIGKILL)).start()

    signal.signal(signal.SIGTERM, end)
    follow_parent(end)
    code = child.wait()
    if ending.is_set():
        os.killpg(0, signal.SIGKILL)  # the command's workers may still be running
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
