"""After a run has ended, no process, thread or temporary file of it is left."""

import getpass
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
from runs import SMALL_GUESS, command, finish


@pytest.mark.runs
@pytest.mark.skipif(sys.platform != "linux", reason="tests/leftovers.py reads /proc")
def test_a_run_leaves_nothing_behind(tmp_path: Path) -> None:
    """After two steps of the demo in mode subproc, even the agents' processes and the weight files
    are gone."""
    (folder := tmp_path / "tmp").mkdir()
    words = [*SMALL_GUESS, "train_dataset.batch_size=2", "max_steps=2"]
    words += [f"weight_update.path={folder / 'weights'}", "rollout.openai.mode=subproc"]
    python, unbuffered, _, *words = command(tmp_path, *words)
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"  # torch keeps it
    env = os.environ | {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(compiled)}
    done = finish([python, unbuffered, "tests/leftovers.py", *words], env=env)
    assert "step 2 " in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"threads": [], "processes": [], "files": []}
