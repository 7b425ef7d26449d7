"""Save and load the checkpoints of a run.

recover/step00040 holds the model, the optimizer, and which prompts steps 1 to 40 have consumed.
Prompts whose answers were not yet consumed are run again, so no prompt is skipped and none is
trained on twice. A folder gets this name when it is complete, and then replaces the one before.
After a restart, metrics.jsonl loses the lines of later steps (run/log.py).
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from training.ranks import share


def save_checkpoint(run_dir: Path, step: int, actor: Any, executor: Any) -> None:
    """Write the checkpoint of a step that is in metrics.jsonl. All ranks call this."""
    folder = run_dir / "recover"
    actor.save_state(folder / "partial")
    if dist.get_rank() == 0:
        (folder / "partial" / "rollout.json").write_text(json.dumps(executor.state_dict()))
        before = [*folder.glob("step*")]
        (folder / "partial").rename(folder / f"step{step:05d}")
        for old in before:
            shutil.rmtree(old)


def load_checkpoint(run_dir: Path, actor: Any, executor: Any) -> int:
    """Restore the newest checkpoint, and return its step, or 0 without one. All ranks call this.
    The caller pushes the weights."""
    folder = share(max((run_dir / "recover").glob("step*"), default=None))
    if folder is None:
        return 0
    actor.load_state(folder)
    step = int(folder.name.removeprefix("step"))
    if executor is not None:
        executor.load_state_dict(json.loads((folder / "rollout.json").read_text()), step)
    return step
