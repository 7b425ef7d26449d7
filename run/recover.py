"""Write and restore checkpoints, so that a killed run can continue.

If a run is started again with the same name and with `recover: auto`, it continues from its last checkpoint.

**The folder.** Only one process writes to a run's folder. While one run holds the lock of a folder, a second run with
this folder ends with an error.

**The checkpoint.** A checkpoint contains everything that the next step depends on. The folder recover/step00040
contains the model and the optimizer, the number of finished steps, the states of the random number generators, the
position in the data, and the list of open groups. A group is open from the moment when its prompt is drawn from the
data until a step has trained on the group. The library torch.distributed.checkpoint stores the model and the optimizer,
so any number of ranks can load them. The file state.pickle is written last, and a checkpoint without this file is
ignored.

**The write.** Training continues while a checkpoint is written: the trainer copies its state into host memory, and a
thread writes the copy. The previous checkpoint is deleted when the new checkpoint is complete. Before the next
checkpoint, and at the end of the run, the trainer waits until the thread has written the copy.

**Repeated steps.** A restarted run trains the steps after its last checkpoint again, and first removes their lines from
metrics.jsonl. A step's line of metrics.jsonl is written before the step's checkpoint, so no line is missing after a
restart.

**Finished groups.** A group is written to recover/groups/{task_id}.safetensors before the group counts as accepted.
After a restart, an open group with a file counts as finished, and the finished groups are consumed in the order of
their ids. An open group without a file is generated again. The group keeps its id, so its calls get the same sampling
seeds as before.

**Lost weights.** After a restart, a group is kept if none of its tokens is newer than the checkpoint's version.
Example: the checkpoint has version 40, and the run was killed at version 42. After the restart, version 41 is trained
again and may have different weights. A group with a token from the lost version 41 is generated again.

**Ages.** The upper bound on the age of groups (staleness.py) also holds after a restart. The steps after a restart
consume the restored groups first. After a restart at version v with batch size B, the gate's count of accepted groups
is v * B plus the number of restored groups. A restored group that would exceed the upper bound on ages, for example
because eta or B is smaller than before, is generated again.

**Limits.** In an asynchronous run, a restart may change the order in which groups start. In a power failure, files that
the operating system has not written to the disk may be lost. Groups that were submitted outside prepare_batch are not
restored.
"""

import fcntl
import json
import os
import pickle
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save
from torch.distributed.checkpoint import CheckpointException

from rollout.trajectory import Trajectory, complete, tail_version
from run.load import ConfigError, one_line
from training.ranks import second_group, share

PARTIAL = ".partial"  # suffix of a file that is being written


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: the file is never incomplete, even if the process dies during the write."""
    partial = path.with_suffix(PARTIAL)
    partial.write_bytes(content)
    os.replace(partial, path)


def claim(run_dir: Path) -> TextIO:
    """Lock the run's folder for this process. The lock is held until the returned file is closed.

    The kernel releases the lock when the process ends, even after a kill. Raises ConfigError if another process holds
    the lock, or if the folder cannot be written. On a file system without locks, a second process can write to the
    folder.
    """
    with one_line(f"fileroot: cannot write to {run_dir}"):
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / "lock").open("w")
    os.register_at_fork(after_in_child=lock.close)  # a forked child must not hold the lock
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"{run_dir} is being written by another process: wait, or give another trial_name"
        ) from error
    except OSError:  # some file systems have no locks
        pass
    return lock


def folders_of_steps(folder: Path) -> dict[int, Path]:
    """Return a dict that maps each step to its folder (step00040 and so on). Folders with other names are ignored."""
    named = {path.name.removeprefix("step"): path for path in folder.glob("step*")}
    return {int(step): path for step, path in named.items() if step.isdecimal()}


def best_step(lines: list[dict[str, Any]], steps: Any) -> int | None:
    """Return the step among `steps` with the highest eval_reward in `lines`, or None if no step has an eval_reward.

    `lines` are lines of metrics.jsonl. If several steps share the highest eval_reward, return the newest of them.
    """
    scored = [
        (line["eval_reward"], line["step"]) for line in lines if line.get("eval_reward") is not None
    ]
    return max((each for each in scored if each[1] in steps), default=(0, None))[1]


def save_model(
    actor: Any, folder: Path, step: int, keep: int, lines: list[dict[str, Any]] | None = None
) -> None:
    """Write the model to a Hugging Face directory, such as `folder`/step00040 for step 40, and delete old models.

    The newest `keep` models stay, and so does the model with the best evaluation in `lines` (the lines of
    metrics.jsonl). Models of steps after `step` are also deleted, because they were written before the run was
    restarted.
    """
    actor.save(folder / f"step{step:05d}")
    if actor.rank == 0:
        steps = folders_of_steps(folder)
        ours = sorted(k for k in steps if k <= step)
        for old in steps.keys() - {*ours[-keep:], best_step(lines or [], ours)}:
            shutil.rmtree(steps[old])


def discard(run_dir: Path, last: int, max_age: int) -> None:
    """Delete a run's files in tokens/ up to step `last`, and delete the folders in rollout/ that no later step needs.

    Step s trains at version s - 1, on groups that are at most `max_age` versions old. Step `last` + 1 may still train
    on groups of version `last` - `max_age`, so `discard` deletes only the folders of older versions.
    """
    for path in (run_dir / "tokens").glob("*.safetensors"):
        if path.stem.isdecimal() and int(path.stem) <= last:
            path.unlink()
    for folder in (run_dir / "rollout").glob("*"):
        if folder.name.isdecimal() and int(folder.name) < last - max_age:
            shutil.rmtree(
                folder, ignore_errors=True
            )  # if an episode writes into `folder` meanwhile, `rmtree` fails


class GroupLog:
    """Keeps a file for each finished group, until a checkpoint contains a step that has trained on the group.

    Rollout threads write the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"*{PARTIAL}"):
            left.unlink()

    def path(self, task_id: int) -> Path:
        """Return the path of a group's file."""
        return self.folder / f"{task_id}.safetensors"

    def write(self, task_id: int, group: Trajectory) -> None:
        """Write a finished group to its file."""
        write_whole(self.path(task_id), save({k: v.contiguous().clone() for k, v in group.items()}))

    def read(self, task_ids: Any, version: int) -> dict[int, Trajectory]:
        """Read the groups `task_ids`, in the order of `task_ids`. Skip a group if it has no file, or if one of its
        tokens is newer than `version`."""
        groups = {
            i: complete(load_file(self.path(i)), i) for i in task_ids if self.path(i).exists()
        }
        return {i: group for i, group in groups.items() if (tail_version(group) or 0) <= version}

    def keep(self, task_ids: Any, below: float = float("inf")) -> None:
        """Delete the files of all groups with an id less than `below`, except the groups `task_ids`."""
        for path in self.folder.glob("*.safetensors"):
            if int(path.stem) < below and int(path.stem) not in task_ids:
                path.unlink()


def cut_metrics(path: Path, last_step: int) -> None:
    """Remove from metrics.jsonl all lines after the line of step `last_step`.

    If the process died during a write, the file's last line is incomplete and does not count. Raises ConfigError if the
    file lacks the line of a step from 1 to `last_step`.
    """
    lines = path.read_text().splitlines(keepends=True)[:last_step] if path.exists() else []
    steps = [json.loads(line)["step"] for line in lines if line.endswith("\n")]
    if steps != list(range(1, last_step + 1)):
        raise ConfigError(
            f"{path} does not hold steps 1 to {last_step}: the file was changed; give another trial_name"
        )
    write_whole(path, "".join(lines).encode())


def newest_checkpoint(run_dir: Path) -> int:
    """Return the step of a run's newest complete checkpoint, or 0 if there is none."""
    found = folders_of_steps(run_dir / "recover")
    return max((step for step in found if (found[step] / "state.pickle").exists()), default=0)


@contextmanager
def unwrapped() -> Iterator[None]:
    """If Ctrl-C or SIGTERM interrupts the `with` block, raise KeyboardInterrupt or SystemExit instead of the
    CheckpointException that torch raises."""
    try:
        yield
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, KeyboardInterrupt | SystemExit):
                raise cause from error
        raise


class Recovery:
    """The checkpoints of one run. Every method must be called on all ranks. With recover=off there are no
    checkpoints."""

    def __init__(self, run_dir: Path, mode: str) -> None:
        self.folder, self.on = run_dir / "recover", mode == "auto"
        self.step = 0  # step of the newest checkpoint; 0 without a checkpoint
        self.groups: GroupLog | None = (
            None  # the log of finished groups; None on every rank except rank 0
        )
        if self.on and dist.get_rank() == 0:
            self.step = newest_checkpoint(run_dir)
            cut_metrics(run_dir / "metrics.jsonl", self.step)
            self.groups = GroupLog(self.folder / "groups")
        self.step = share(self.step)
        self.ranks = (
            second_group() if self.on else None
        )  # process group in which the checkpoint threads communicate
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.writing: Future[None] | None = (
            None  # the latest write of a checkpoint, which may still be running
        )

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`."""
        return self.folder / f"step{step:05d}"

    def save(self, step: int, actor: Any, executor: Any) -> None:
        """Copy the state after step `step` into memory, and start a thread that writes the copy as the step's
        checkpoint.

        metrics.jsonl must already have the step's line. If the thread is still writing the previous checkpoint, wait
        for the thread first. With recover=off, or if the checkpoint exists, do nothing.
        """
        if not self.on or step <= self.step:
            return
        self.wait()
        self.step, target = step, self.checkpoint(step)
        if self.groups:
            shutil.rmtree(
                target, ignore_errors=True
            )  # a killed process may have left an incomplete folder
        dist.barrier()
        with unwrapped():
            saved = actor.save_state(target, self.ranks)
        rollout = executor.state_dict() if self.groups else {}
        state = {
            "steps": actor.steps,
            "rollout": rollout,
            "random": (random.getstate(), torch.get_rng_state()),
        }
        self.writing = self.thread.submit(
            self.complete, saved, target, pickle.dumps(state), rollout
        )

    def complete(
        self, saved: Future[Any], target: Path, state: bytes, rollout: dict[str, Any]
    ) -> None:
        """Wait until every rank has written its part of the checkpoint. On rank 0, write state.pickle, which makes the
        checkpoint valid, and delete older checkpoints."""
        try:
            saved.result()
        except CheckpointException as error:  # CheckpointException is no subclass of Exception
            cause, _ = next(iter(error.failures.values()))
            raise RuntimeError(f"the checkpoint {target} was not written") from cause
        if self.groups:
            write_whole(target / "state.pickle", state)
            for old in {*folders_of_steps(self.folder).values()} - {target}:
                shutil.rmtree(old)
            self.groups.keep(rollout["open"], below=rollout["next_id"])

    def wait(self) -> None:
        """Wait until the newest checkpoint is complete. If the thread failed to write the checkpoint, raise the
        thread's error."""
        if self.writing:
            self.writing.result()

    def close(self) -> None:
        """Wait until the newest checkpoint is complete. Then destroy the process group that writes checkpoints."""
        self.wait()
        self.thread.shutdown()
        self.ranks = None

    def load(self, actor: Any, executor: Any) -> int:
        """Restore the newest checkpoint and return its step. Return 0 if there is no checkpoint.

        The caller must push the restored weights into the servers. Raises ConfigError if the checkpoint belongs to a
        different model.
        """
        if not self.step:
            if self.groups:
                self.groups.keep(())
            return 0
        folder = self.checkpoint(self.step)
        try:
            with unwrapped():
                actor.load_state(folder)
        except CheckpointException as error:
            found = str(error).strip().splitlines()[-1].strip()
            remedy = "give another trial_name, or the model that the run was started with"
            raise ConfigError(
                f"{folder} does not fit {actor.model_path}: {remedy} ({found})"
            ) from error
        state = share(pickle.loads((folder / "state.pickle").read_bytes()) if self.groups else None)
        actor.steps = state["steps"]
        random.setstate(state["random"][0])
        torch.set_rng_state(state["random"][1])
        if self.groups:
            finished = self.groups.read(state["rollout"]["open"], self.step)
            self.groups.keep(finished)
            executor.load_state_dict(state["rollout"], finished, self.step)
        return self.step
