"""After a run has ended, no process, thread or temporary file of it is left."""

import getpass
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import ROOT
from runs import SMALL_GUESS, command

pytestmark = [
    pytest.mark.runs,
    pytest.mark.skipif(sys.platform != "linux", reason="tests/leftovers.py reads /proc"),
]
# What is left, the file in which an error is planted, its code, and what replaces it.
ERRORS = [
    ("threads", "rollout/dispatcher.py", "self.call_soon(self._end.set)", "pass"),
    ("files", "train.py", "run.stack.callback(shutil.rmtree, folder, ignore_errors=True)", "pass"),
    ("processes", "run/start.py", "self.stack.callback(child.end)", "pass"),
]


def leftovers(tmp_path: Path, *error: str) -> dict[str, list[str]]:
    """Run two steps of the demo in mode subproc, and return what is left."""
    (folder := tmp_path / "tmp").mkdir()
    words = [*SMALL_GUESS, "train_dataset.batch_size=2", "max_steps=2"]
    words += [f"weight_update.path={folder / 'weights'}", "rollout.openai.mode=subproc"]
    python, unbuffered, _, *words = command(tmp_path, *words)
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"  # torch keeps it
    env = os.environ | {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(compiled)}
    whole = [python, unbuffered, "tests/leftovers.py", *(error or ("train.py", "", "")), *words]
    done = subprocess.run(whole, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert "step 2 " in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
    left: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return left


def test_a_run_leaves_nothing_behind(tmp_path: Path) -> None:
    """Also the agents' processes and the files of the weights are gone."""
    assert leftovers(tmp_path) == {"threads": [], "processes": [], "files": []}


@pytest.mark.parametrize(("kind", "file", "line", "changed"), ERRORS)
def test_what_is_left_is_named(
    tmp_path: Path, kind: str, file: str, line: str, changed: str
) -> None:
    """The test above can fail: with the clean-up gone, it names what is left."""
    assert leftovers(tmp_path, file, line, changed)[kind]
