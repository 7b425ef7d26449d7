"""Save and load the checkpoints of a run.

recover/step00040, the checkpoint of step 40, holds the trainable weights, the optimizer's state and
a list of finished prompts. A prompt is finished if a step has consumed its group, or if the group
was rejected, dropped or withdrawn (staleness.py). A restart runs all other prompts, so it skips no
prompt and trains on none twice.

A checkpoint is written to recover/partial, and the folder is renamed when it is complete. sums.json
has every file's checksum. We keep two checkpoints, so that a restart can use the older one if the
newest is damaged.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from run.config import ConfigError
from training.ranks import share


def save_checkpoint(run_dir: Path, step: int, actor: Any, executor: Any) -> None:
    """Write a step's checkpoint. The step's line must already be in metrics.jsonl, because a
    restart begins with the next step. All ranks call this."""
    folder = run_dir / "recover"
    new, partial = folder / f"step{step:05d}", folder / "partial"
    share(lambda: shutil.rmtree(partial, ignore_errors=True))  # a killed run may have left files
    actor.save_state(partial)
    if dist.get_rank() == 0:
        (partial / "rollout.json").write_text(json.dumps(executor.state_dict()))
        sums = {path.name: checksum(path) for path in partial.iterdir()}
        (partial / "sums.json").write_text(json.dumps(sums))
        shutil.rmtree(new, ignore_errors=True)  # a damaged checkpoint, if there is one
        before = sorted(folder.glob("step*"))
        partial.rename(new)
        for old in before[:-1]:
            shutil.rmtree(old)


def load_checkpoint(run_dir: Path, actor: Any, executor: Any) -> int:
    """Restore the newest undamaged checkpoint, and return its step, or 0 if no checkpoint exists.
    All ranks call this. The caller must push the weights to the servers. Raises ConfigError if all
    checkpoints are damaged."""
    folder = share(lambda: find_whole(run_dir / "recover"))
    if folder is None:
        return 0
    actor.load_state(folder)
    step = int(folder.name.removeprefix("step"))
    if executor is not None:
        executor.load_state_dict(json.loads((folder / "rollout.json").read_text()), step)
    return step


def find_whole(recover: Path) -> Path | None:
    folders = sorted(recover.glob("step*"), reverse=True)
    for folder in folders:
        path = folder / "sums.json"
        try:
            for name, written in json.loads(path.read_bytes()).items():
                path = folder / name
                if checksum(path) != written:
                    raise ValueError
            return folder
        except (OSError, ValueError):
            print(f"{path} is missing or damaged, so {folder.name} is not used", flush=True)
    if folders:
        raise ConfigError(f"no checkpoint is whole: remove {recover} to train from the first step")
    return None


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
