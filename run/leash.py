"""`python leash.py COMMAND ...`: run a command that ends when standard input is closed, with all that it started.

For servers that are not ours (SGLang) and know nothing of --exit-with-parent. The parent holds the other end of the
pipe; when it is gone, however it went, the command is asked to end, and after a moment its whole process group is
killed, this process included. Start it in a session of its own.
"""

import os
import signal
import subprocess
import sys
import threading

GRACE_SECONDS = 3.0


def main(command: list[str]) -> int:
    """The command's exit code, as a shell tells it."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    parent_gone = threading.Event()

    def follow_parent() -> None:
        while os.read(0, 4096):
            pass
        parent_gone.set()
        child.terminate()
        threading.Timer(GRACE_SECONDS, os.killpg, (0, signal.SIGKILL)).start()

    threading.Thread(target=follow_parent, daemon=True).start()
    code = child.wait()
    if parent_gone.is_set():
        os.killpg(0, signal.SIGKILL)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
