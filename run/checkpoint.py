"""Checkpoints, from which a run goes on that was killed.

recover/step00040 holds model, optimizer and the position in the data: which prompts steps 1 to 40
have consumed. What was generated and not yet consumed is generated again, so no prompt is skipped
and none is trained on twice. A folder gets this name when it is complete. The newest two are kept:
where one cannot be read, the run goes on from the one before.

metrics.jsonl is cut to the step of the checkpoint, and the steps after it are trained again.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from training.ranks import share

KEPT = 2


def folders_of_steps(folder: Path) -> dict[int, Path]:
    """The folders step00040 and so on, by step."""
    named = {path.name.removeprefix("step"): path for path in sorted(folder.glob("step*"))}
    return {int(step): path for step, path in named.items() if step.isdecimal()}


def save_checkpoint(run_dir: Path, step: int, actor: Any, executor: Any) -> None:
    """Write the checkpoint of a step, whose line is in metrics.jsonl. All ranks call this."""
    target = run_dir / "recover" / f"step{step:05d}"
    partial = target.with_suffix(".partial")
    actor.save_state(partial)
    if dist.get_rank() == 0:
        (partial / "rollout.json").write_text(json.dumps(executor.state_dict()))
        shutil.rmtree(target, ignore_errors=True)  # a damaged one
        partial.rename(target)
        for old in [*folders_of_steps(target.parent).values()][:-KEPT]:
            shutil.rmtree(old)


def load_checkpoint(run_dir: Path, actor: Any, executor: Any) -> int:
    """Restore the newest checkpoint that can be read, and return its step, or 0. All ranks call
    this. The caller pushes the weights."""
    found = 0
    for step, folder in reversed(share(folders_of_steps(run_dir / "recover")).items()):
        try:
            rollout = json.loads((folder / "rollout.json").read_text())
            actor.load_state(folder)
            found = step
            break
        except Exception as error:  # anything may be wrong with a damaged file
            print(f"{folder} cannot be read ({error!r:.200}): trying the checkpoint before it")
    if executor is not None:
        if found:
            executor.load_state_dict(rollout, found)
        cut_metrics(run_dir / "metrics.jsonl", found)
    return found


def cut_metrics(path: Path, step: int) -> None:
    """Keep the lines of steps 1 to `step`."""
    if path.exists():
        partial = path.with_suffix(".partial")
        partial.write_text("".join(path.read_text().splitlines(keepends=True)[:step]))
        os.replace(partial, path)
