"""metrics.jsonl has one line per step, even after a restart."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from run.log import Log
from staleness import RolloutStat


def test_a_restarted_run_forgets_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    """Steps after the checkpoint are trained again. A kill may have cut the last line of the file,
    and a disk may damage any line."""
    lines = [json.dumps({"step": step, "wall_s": 1.0}) + "\n" for step in (1, 2, 3)]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "w\xff\n[]\n\x00\n' + "".join(lines).encode() + b'{"st')
    executor = SimpleNamespace(stats=RolloutStat())
    run: Any = SimpleNamespace(run_dir=tmp_path, step=2, history=[], executor=executor)
    Log(run)
    assert path.read_text() == "".join(lines[:2])
    assert [line["step"] for line in run.history] == [1, 2]
