"""Run a program, such as a coding agent, as an agent in its own process.

`make agents` installs the programs of the examples into the folder examples/node. Each process has
a new, empty home directory, so that the agent uses neither your own settings nor the files of
another episode.
"""

import asyncio
import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

NODE = Path(__file__).parent / "node"
BIN = NODE / "node_modules" / ".bin"


async def run_process(*command, **variables):
    """Run a command with the environment variables `variables`, and return its output. Raises
    RuntimeError if the command fails."""
    env = {
        name: value for name, value in os.environ.items() if not name.startswith("XDG_")
    } | variables
    pipes = {
        "stdin": asyncio.subprocess.DEVNULL,
        "stdout": asyncio.subprocess.PIPE,
        "stderr": asyncio.subprocess.PIPE,
    }
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        env |= {"HOME": home, "CODEX_HOME": home}
        process = await asyncio.create_subprocess_exec(
            *command, cwd=home, env=env, **pipes, start_new_session=True
        )
        try:
            said, complaint = await process.communicate()
        finally:  # kill the program even if the episode is cancelled
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise RuntimeError(
            f"{command[0]} ended with code {process.returncode}: {complaint.decode()[-2000:]}"
        )
    return said.decode()
