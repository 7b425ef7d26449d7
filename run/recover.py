"""Checkpoints for recovery: how a run that was killed goes on where it was.

A run that is started again under the same name goes on from its last checkpoint (`recover: auto`). The rules:

- **One process writes a run.** A second process that is started on the same run is refused while the first one lives.
- **A checkpoint holds everything that the next step depends on.** recover/step00040 holds the model and the optimizer
  (sharded by torch.distributed.checkpoint, so any number of ranks can read it), the schedules, the random states, the
  position in the data, and the list of open groups. A group is open if its prompt was drawn from the data and no step
  has trained on it yet. state.pickle is written last and in one piece: a checkpoint without it is ignored.
- **A step after the last checkpoint is done again.** Its line is removed from metrics.jsonl. A step's line is written
  before its checkpoint, so in the end metrics.jsonl has every step once.
- **A finished group survives the process.** A group becomes the file recover/groups/{task_id}.safetensors before it
  counts as accepted. After a restart, an open group with a file is put back as finished, at its place in the order of
  start. An open group without a file is rolled out again, with the same id and therefore the same sampling seeds.
- **A group with tokens of lost weights is dropped.** Suppose the checkpoint has version 40 and the run was killed at
  version 42. The restarted run makes a new version 41 with other weights. A group with a token of the old version 41
  is therefore rolled out again. A group with tokens of versions up to 40 is kept.

The age bound of staleness.py still holds. Restored groups stand first and in their old order, so a step consumes them
no later than before. The gate counts version * B + (restored groups) places as taken, with B the batch size. If eta
or B is smaller than before the restart, a group that would become too old is rolled out again.

Not promised: the same order of starts as without the kill, unless the run is synchronous; a power failure between the
write of a file and the disk; groups that agents submit outside prepare_batch.
"""

import fcntl
import json
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save
from torch.distributed.checkpoint import CheckpointException

from rollout.trajectory import Trajectory, complete, tail_version
from run.config import ConfigError
from training.ranks import share

PARTIAL = ".partial"  # suffix of a file that is being written


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it exists completely or not at all, whenever the process dies."""
    partial = path.with_suffix(PARTIAL)
    partial.write_bytes(content)
    os.replace(partial, path)


def claim(run_dir: Path) -> TextIO:
    """Lock the run's folder for this process, for as long as the returned file is open.

    The kernel releases the lock when the process ends, however it ends. Raises ConfigError if another process holds the
    lock. On a file system without locks nothing is protected.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = (run_dir / "lock").open("w")
    os.register_at_fork(after_in_child=lock.close)  # a forked child would hold the lock too
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"{run_dir} is being written by another process: wait, or give another trial_name") from error
    except OSError:  # this file system has no locks
        pass
    return lock


def folders_of_steps(folder: Path) -> dict[int, Path]:
    """Return the folders named step00040 and so on, by step. Folders with other names are ignored."""
    named = {path.name.removeprefix("step"): path for path in folder.glob("step*")}
    return {int(step): path for step, path in named.items() if step.isdecimal()}


def save_model(actor: Any, folder: Path, step: int, keep: int) -> None:
    """Write a Hugging Face directory `step00040` in `folder`, and delete all but the newest `keep` of them.

    Directories of later steps belong to a life of the run that a restart has cut off, and are deleted too.
    """
    actor.save(folder / f"step{step:05d}")
    if actor.rank == 0:
        steps = folders_of_steps(folder)
        kept = sorted(k for k in steps if k <= step)[-keep:]
        for old in steps.keys() - set(kept):
            shutil.rmtree(steps[old])


class GroupLog:
    """The finished groups that no checkpoint has trained on, one file each. The rollout's threads write it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"*{PARTIAL}"):
            left.unlink()

    def path(self, task_id: int) -> Path:
        """Return the file of a group."""
        return self.folder / f"{task_id}.safetensors"

    def write(self, task_id: int, group: Trajectory) -> None:
        """Write a finished group to its file."""
        write_whole(self.path(task_id), save({k: v.contiguous().clone() for k, v in group.items()}))

    def read(self, task_ids: Any, version: int) -> dict[int, Trajectory]:
        """Read the groups `task_ids`, in that order. Skip groups without a file or with newer tokens than `version`."""
        groups = {i: complete(load_file(self.path(i)), i) for i in task_ids if self.path(i).exists()}
        return {i: group for i, group in groups.items() if (tail_version(group) or 0) <= version}

    def keep(self, task_ids: Any, below: float = float("inf")) -> None:
        """Delete the files of all groups with an id less than `below`, except the groups `task_ids`."""
        for path in self.folder.glob("*.safetensors"):
            if int(path.stem) < below and int(path.stem) not in task_ids:
                path.unlink()


def cut_metrics(path: Path, last_step: int) -> None:
    """Keep the lines of steps 1 to last_step in metrics.jsonl and remove the lines after them.

    Raises ConfigError if a line is missing. The last line may be incomplete, since the process died.
    """
    lines = path.read_text().splitlines(keepends=True)[:last_step] if path.exists() else []
    steps = [json.loads(line)["step"] for line in lines if line.endswith("\n")]
    if steps != list(range(1, last_step + 1)):
        raise ConfigError(f"{path} does not hold steps 1 to {last_step}: the file was changed; give another trial_name")
    write_whole(path, "".join(lines).encode())


class Recovery:
    """The checkpoints of one run. All ranks call its methods together. With mode "off" they do nothing."""

    def __init__(self, run_dir: Path, mode: str) -> None:
        self.folder, self.on = run_dir / "recover", mode == "auto"
        self.step = 0  # step of the checkpoint that the run goes on from, 0 if there is none
        self.groups: GroupLog | None = None  # rank 0 has it, the other ranks have None
        if self.on and dist.get_rank() == 0:
            found = folders_of_steps(self.folder)
            self.step = max((step for step in found if (found[step] / "state.pickle").exists()), default=0)
            cut_metrics(run_dir / "metrics.jsonl", self.step)
            self.groups = GroupLog(self.folder / "groups")
        self.step = share(self.step)

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`."""
        return self.folder / f"step{step:05d}"

    def save(self, step: int, actor: Any, executor: Any) -> None:
        """Write the checkpoint of `step`, then delete the older ones. The step's line is already in metrics.jsonl."""
        target = self.checkpoint(step)
        if self.groups:
            shutil.rmtree(target, ignore_errors=True)  # a killed life of the run may have left it incomplete
        dist.barrier()
        actor.save_state(target)
        if self.groups:  # rank 0 writes its own state after all ranks have written theirs
            rollout = executor.state_dict()
            state = {"steps": actor.steps, "rollout": rollout, "random": (random.getstate(), torch.get_rng_state())}
            write_whole(target / "state.pickle", pickle.dumps(state))
            for old in {*folders_of_steps(self.folder).values()} - {target}:
                shutil.rmtree(old)
            self.groups.keep(rollout["open"], below=rollout["next_id"])
        dist.barrier()

    def load(self, actor: Any, executor: Any) -> int:
        """Restore the newest checkpoint and return its step, 0 if there is none.

        The caller sends the restored weights to the servers. Raises ConfigError if the checkpoint is of another model.
        """
        if not self.step:
            if self.groups:
                self.groups.keep(())
            return 0
        folder = self.checkpoint(self.step)
        try:
            actor.load_state(folder)
        except CheckpointException as error:
            found = str(error).strip().splitlines()[-1].strip()
            remedy = "give another trial_name, or the model that the run was started with"
            raise ConfigError(f"{folder} does not fit {actor.model_path}: {remedy} ({found})") from error
        state = share(pickle.loads((folder / "state.pickle").read_bytes()) if self.groups else None)
        actor.steps = state["steps"]
        random.setstate(state["random"][0])
        torch.set_rng_state(state["random"][1])
        if self.groups:
            finished = self.groups.read(state["rollout"]["open"], self.step)
            self.groups.keep(finished)
            executor.load_state_dict(state["rollout"], finished, self.step)
        return self.step
