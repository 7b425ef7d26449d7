"""`python leash.py COMMAND ...` runs a command, and ends it together with its children when standard input closes.

Servers of this project end by themselves when their standard input closes (`--exit-with-parent`). Other servers, such
as SGLang, do not, so they run under this script. The parent process holds the other end of the pipe. When the parent
is gone, the script sends the command SIGTERM, and kills the whole process group 3 seconds later, itself included. The
script must therefore be started in a session of its own.
"""

import os
import signal
import subprocess
import sys
import threading

GRACE_SECONDS = 3.0  # seconds between SIGTERM and SIGKILL


def main(command: list[str]) -> int:
    """Run the command and return its exit code. A signal number n becomes 128 + n, as in a shell."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    parent_gone = threading.Event()

    def follow_parent() -> None:
        """Wait until standard input closes, then end the command."""
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
