"""Run train.py with a planted error, and print what the run leaves behind.

    python tests/leftovers.py run/start.py "stack.callback(child.end)" "pass" max_steps=1

The arguments are a file, a piece of its code, what replaces it, and those of train.py. An empty
piece plants nothing. The last line of the output is JSON: threads, processes and files. TMPDIR
should be an empty folder, so that only files of the run are listed.
"""

import importlib.util
import json
import os
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

ROOT, MARK = Path(__file__).resolve().parent.parent, "LEFTOVERS_OF"


def plant(file: str, line: str, changed: str) -> None:
    """Import a module of the project with a piece of its code replaced; train.py is run."""
    source = (ROOT / file).read_text()
    assert not line or source.count(line) == 1, f"{line!r} is not in {file} one time"
    name = file.removesuffix(".py").replace("/", ".") if file != "train.py" else "__main__"
    spec = importlib.util.spec_from_file_location(name, ROOT / file)
    assert spec is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    exec(compile(source.replace(line, changed), file, "exec"), vars(module))


def processes() -> list[str]:
    """The commands of all descendants, also of those whose parents have ended."""
    mark, found = f"{MARK}={os.getpid()}\0".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process may end meanwhile
            if folder.name != str(os.getpid()) and mark in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text().replace("\0", " ")[:200])
    return found


def main() -> None:
    _, file, line, changed, *words = sys.argv
    os.environ[MARK] = str(os.getpid())
    sys.argv, sys.path[0] = ["train.py", *words], str(ROOT)
    with suppress(SystemExit):
        if file != "train.py":
            plant(file, line, changed)
            line = changed = ""
        plant("train.py", line, changed)
    paths = *Path(tempfile.gettempdir()).rglob("*"), *Path("/dev/shm").glob(f"*{os.getpid()}*")
    main_thread = threading.main_thread()
    left = {
        "threads": [thread.name for thread in threading.enumerate() if thread is not main_thread],
        "processes": processes(),
        "files": [str(path) for path in paths if path.is_file()],
    }
    print(json.dumps(left), flush=True)
    os._exit(0)  # a planted error may leave a thread that would keep this process from ending


if __name__ == "__main__":
    main()
