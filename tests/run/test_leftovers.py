"""After a run has ended, no process, thread or temporary file of the run is left. If a run is killed and continued, it
trains each step and each group once."""

import getpass
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from runs import SMALL_GUESS, command
from safetensors.torch import save_file

KINDS = ("threads", "processes", "files")
# Each planted error has four parts: the kind of leftover, the file, the original code and the changed code.
ERRORS = [
    ("threads", "rollout/runner.py", "self._loop.call_soon_threadsafe(self._stop.set)", "pass"),
    ("processes", "run/command.py", "stack.callback(fleet.close)", "pass"),
    (
        "files",
        "run/start.py",
        "self.stack.callback(shutil.rmtree, folder, ignore_errors=True)",
        "pass",
    ),
]


def leftovers(tmp_path: Path, *error: str) -> dict[str, list[str]]:
    """Run two steps of the demo, and return the threads, processes and files that are left. If `error` is given, plant
    this error in the code first."""
    (folder := tmp_path / "tmp").mkdir()
    words = [
        *SMALL_GUESS,
        "train_dataset.batch_size=2",
        "max_steps=2",
        f"weight_update.path={folder / 'weights'}",
    ]
    words += ["rollout.openai.mode=subproc", "rollout.openai.subproc_max_workers=2"]
    python, unbuffered, _, *words = command(tmp_path, *words)
    # By default, torch keeps compiled code in TMPDIR, where the code would count as left. TORCHINDUCTOR_CACHE_DIR names
    # another folder.
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    env = os.environ | {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(compiled)}
    whole = [python, unbuffered, "tests/leftovers.py", *(error or ("", "", "")), *words]
    done = subprocess.run(whole, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert "step 2 " in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
    left: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return left


@pytest.mark.runs
@pytest.mark.skipif(sys.platform != "linux", reason="tests/leftovers.py reads /proc")
def test_a_run_leaves_nothing_behind(tmp_path: Path) -> None:
    """A run in mode subproc leaves no thread, no process, no temporary file and no file in shared memory."""
    assert leftovers(tmp_path) == {kind: [] for kind in KINDS}


@pytest.mark.runs
@pytest.mark.skipif(sys.platform != "linux", reason="tests/leftovers.py reads /proc")
@pytest.mark.parametrize(("kind", "file", "line", "changed"), ERRORS)
def test_what_is_left_behind_is_named(
    tmp_path: Path, kind: str, file: str, line: str, changed: str
) -> None:
    """If an error is planted in the code that cleans up after a run, `leftovers` names what is left."""
    assert leftovers(tmp_path, file, line, changed)[kind]


@pytest.mark.parametrize(("kind", "file", "line", "changed"), ERRORS)
def test_a_planted_error_changes_one_place(kind: str, file: str, line: str, changed: str) -> None:
    """test_what_is_left_behind_is_named plants an error by replacing a piece of code. The replaced piece of code occurs
    exactly once in its file."""
    assert (ROOT / file).read_text().count(line) == 1


# Each entry of WRONG has a function that puts an error into a list of steps, and words of the message that
# bench/soak.py raises for this error.
Steps = list[dict[str, Any]]
WRONG: list[tuple[Callable[[Steps], Any], str]] = [
    (lambda steps: steps.pop(3), "every step once"),
    (lambda steps: steps.insert(3, steps[3]), "every step once"),
    (lambda steps: steps[4].update(groups=steps[3]["groups"]), "again"),
    (lambda steps: steps[2].update(groups=range(100, 106)), "missing|opened too wide"),
    (lambda steps: steps[2].update(groups=range(12, 17)), "trained 5 groups"),
    (lambda steps: steps[5].update(staleness_max=3), "too old"),
    (lambda steps: steps[5].update(newest=6), "of the future"),
]


@pytest.mark.parametrize(("change", "words"), [(lambda steps: None, None), *WRONG])
def test_a_lost_or_repeated_group_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Steps], Any],
    words: str | None,
) -> None:
    """The check of bench/soak.py accepts a run that trained each step and each group once. The check of bench/soak.py
    refuses a run in which a step or a group is missing or repeated. The check of bench/soak.py refuses a run in which a
    group is too old, or in which a token has a higher version than the policy that the step trains."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    soak = importlib.import_module("soak")
    steps: Steps = [
        {
            "step": k + 1,
            "version": k,
            "staleness_max": 2,
            "groups": range(6 * k, 6 * k + 6),
            "newest": k,
        }
        for k in range(10)
    ]
    change(steps)
    (tmp_path / "tokens").mkdir()
    for step in steps:
        ledger = {
            "task_ids": torch.tensor(step["groups"]),
            "versions": torch.full((6,), step["newest"]),
        }
        save_file(ledger, tmp_path / "tokens" / f"{step['step']:05d}.safetensors")
    lines = [
        json.dumps({name: step[name] for name in ("step", "version", "staleness_max")})
        for step in steps
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    if words is None:
        soak.check(tmp_path, 10)
    else:
        with pytest.raises(AssertionError, match=words):
            soak.check(tmp_path, 10)
