"""Run train.py in this process with the given arguments, and print what the run leaves behind.

The last line of the output is JSON: threads, processes and files. TMPDIR should be an empty folder,
so that only files of the run are listed.
"""

import json
import os
import runpy
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

ROOT, MARK = Path(__file__).resolve().parent.parent, "LEFTOVERS_OF"


def processes() -> list[str]:
    """The commands of all descendants, even of those whose parents have ended."""
    mark, found = f"{MARK}={os.getpid()}\0".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process may end meanwhile
            if folder.name != str(os.getpid()) and mark in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text().replace("\0", " ")[:200])
    return found


if __name__ == "__main__":
    os.environ[MARK] = str(os.getpid())
    sys.argv[0], sys.path[0] = "train.py", str(ROOT)
    with suppress(SystemExit):
        runpy.run_path("train.py", run_name="__main__")
    paths = *Path(tempfile.gettempdir()).rglob("*"), *Path("/dev/shm").glob(f"*{os.getpid()}*")
    main_thread = threading.main_thread()
    left = {
        "threads": [thread.name for thread in threading.enumerate() if thread is not main_thread],
        "processes": processes(),
        "files": [str(path) for path in paths if path.is_file()],
    }
    print(json.dumps(left), flush=True)
