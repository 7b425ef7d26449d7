"""`python leash.py COMMAND ...` runs a command, and ends the command and its children when standard input closes.

Servers of this project end by themselves when their standard input closes (`--exit-with-parent`). SGLang has no option
`--exit-with-parent`, so SGLang runs under this script. Standard input is a pipe from the parent process, so the pipe
closes when the parent dies. When standard input closes, the script sends SIGTERM to the command. At most 3 seconds
after SIGTERM, the script kills its whole process group, including itself. Start the script in a new process session
(setsid), so that the script's process group contains no unrelated process.

`python leash.py --api-key COMMAND ...` reads a key from the first line of standard input, and appends `--api-key=KEY`
to the command. The form `--api-key=KEY` is necessary, because in the form `--api-key KEY` the command would mistake a
key that begins with "-" for an option.
"""

import os
import signal
import subprocess
import sys
import threading

GRACE_SECONDS = 3.0  # seconds between SIGTERM and SIGKILL


def main(command: list[str]) -> int:
    """Run the command and return its exit code. If signal n ended the command, the code is 128 + n, as in a shell."""
    if command[0] == "--api-key":
        command = [*command[1:], f"--api-key={sys.stdin.readline().strip()}"]
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
