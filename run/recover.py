"""Coming back from the dead: checkpoints, the log of finished groups, and what is kept of each after `kill -9`.

A run that is started again under its name goes on (`recover: auto`). The rule of what it goes on *from*:

- **One process writes a run.** Who wants to go on with one that is still alive, as after a lost connection, is refused.
- **A checkpoint is a step.** recover/step00040 holds all that step 41 depends on: model and optimizer (sharded, by
  torch.distributed.checkpoint, so that any number of ranks reads it), schedules, random state, the place in the data,
  and which groups were open: drawn from the data, not yet trained on. Of its files state.pickle comes last, and all at
  once; a checkpoint without it never existed.
- **A step that no checkpoint holds did not happen.** Its line is cut from metrics.jsonl and it is done again. So every
  step is in the surviving lineage once: its line is written before the checkpoint is.
- **A finished group outlives its process.** Before a group counts as accepted it is a file,
  recover/groups/{task}.safetensors. Each open group of the checkpoint whose file is there is put back as
  finished, in its place in the order of start; the others are rolled out again, under the same id and so
  with the same sampling seeds.
- **Except when it comes from weights that are gone.** A group with a token newer than the checkpoint's version v was
  sampled by a policy that the new lineage will not have (its version v + 1 is another one). It is dropped and rolled
  out again. Older tokens are as good as ever: their weights are this lineage's, too.

Why the age bound of staleness.py still holds: groups that are put back stand in front, in their old order, so each is
consumed no later than it would have been; the gate is told version * B + (groups put back) places are taken. With a
smaller eta or batch than before it would not hold: a group that would be too old at its turn is rolled out again.

Not promised: that the order of starts is the same as without the crash, unless the run is synchronous; survival of a
power failure between the write of a file and the disk; the groups that agents submit beside prepare_batch.

Beside AReaL: there in-flight and accepted but untrained rollouts are lost, and before #1345 the gate opened too wide.
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
    """All or nothing, whenever the process dies."""
    partial = path.with_suffix(PARTIAL)
    partial.write_bytes(content)
    os.replace(partial, path)


def claim(run_dir: Path) -> TextIO:
    """Make the run's folder this process's own while the returned file is open; however it ends, the kernel lets go.
    ConfigError where another process has it. A file system without locks protects nobody."""
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = (run_dir / "lock").open("w")
    os.register_at_fork(after_in_child=lock.close)  # or a child would keep it
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"{run_dir} is being written by another process: wait, or give another trial_name") from error
    except OSError:  # no locks here
        pass
    return lock


def folders_of_steps(folder: Path) -> dict[int, Path]:
    """Those named step00040 and so on; what somebody keeps beside them has another name."""
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
    """Finished groups that no checkpoint has trained on, a file each. Written by the rollout's threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"*{PARTIAL}"):
            left.unlink()

    def path(self, task_id: int) -> Path:
        return self.folder / f"{task_id}.safetensors"

    def write(self, task_id: int, group: Trajectory) -> None:
        write_whole(self.path(task_id), save({k: v.contiguous().clone() for k, v in group.items()}))

    def read(self, task_ids: Any, version: int) -> dict[int, Trajectory]:
        """Those of `task_ids` that are here and hold no token newer than `version`, in the order given."""
        groups = {i: complete(load_file(self.path(i)), i) for i in task_ids if self.path(i).exists()}
        return {i: group for i, group in groups.items() if (tail_version(group) or 0) <= version}

    def keep(self, task_ids: Any, below: float = float("inf")) -> None:
        """Forget every group with an id less than `below` but `task_ids`."""
        for path in self.folder.glob("*.safetensors"):
            if int(path.stem) < below and int(path.stem) not in task_ids:
                path.unlink()


def cut_metrics(path: Path, last_step: int) -> None:
    """Leave the lines of steps 1 to last_step, which are the first; the last one may be torn."""
    lines = path.read_text().splitlines(keepends=True)[:last_step] if path.exists() else []
    steps = [json.loads(line)["step"] for line in lines if line.endswith("\n")]
    if steps != list(range(1, last_step + 1)):
        raise ConfigError(f"{path} does not hold steps 1 to {last_step}; it was changed, give another trial_name")
    write_whole(path, "".join(lines).encode())


class Recovery:
    """The checkpoints of one run. All ranks make one and call its methods together; off: they do nothing."""

    def __init__(self, run_dir: Path, mode: str) -> None:
        self.folder, self.on = run_dir / "recover", mode == "auto"
        self.step = 0  # of the checkpoint that the run goes on from
        self.groups: GroupLog | None = None  # rank 0's
        if self.on and dist.get_rank() == 0:
            found = folders_of_steps(self.folder)
            self.step = max((step for step in found if (found[step] / "state.pickle").exists()), default=0)
            cut_metrics(run_dir / "metrics.jsonl", self.step)
            self.groups = GroupLog(self.folder / "groups")
        self.step = share(self.step)

    def checkpoint(self, step: int) -> Path:
        return self.folder / f"step{step:05d}"

    def save(self, step: int, actor: Any, executor: Any) -> None:
        """The checkpoint of `step`, whose line is in metrics.jsonl; then older ones are deleted."""
        target = self.checkpoint(step)
        if self.groups:
            shutil.rmtree(target, ignore_errors=True)  # what a crash has left there
        dist.barrier()
        actor.save_state(target)
        if self.groups:  # what rank 0 alone knows, when all ranks have written
            rollout = executor.state_dict()
            state = {"steps": actor.steps, "rollout": rollout, "random": (random.getstate(), torch.get_rng_state())}
            write_whole(target / "state.pickle", pickle.dumps(state))
            for old in {*folders_of_steps(self.folder).values()} - {target}:
                shutil.rmtree(old)
            self.groups.keep(rollout["open"], below=rollout["next_id"])
        dist.barrier()

    def load(self, actor: Any, executor: Any) -> int:
        """Put back the newest checkpoint; its step, 0 if there is none. The servers' weights are the caller's.

        ConfigError where it does not fit the model.
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
