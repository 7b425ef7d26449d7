"""Checkpoints, from which a killed run goes on.

recover/step00040 holds model, optimizer and the position in the data: which prompts steps 1 to 40
have consumed. Prompts that were generated but not yet consumed are generated again, so no prompt is
skipped and none is trained on twice. A folder gets this name when it is complete, and then replaces
the one before. Lines of later steps are removed from metrics.jsonl (run/log.py).
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
    """Restore the newest checkpoint, and return its step, or 0. All ranks call this. The caller
    pushes the weights."""
    folder = share(max((run_dir / "recover").glob("step*"), default=None))
    if folder is None:
        return 0
    actor.load_state(folder)
    step = int(folder.name.removeprefix("step"))
    if executor is not None:
        executor.load_state_dict(json.loads((folder / "rollout.json").read_text()), step)
    return step
