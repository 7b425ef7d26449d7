"""Checkpoints, from which a run goes on that was killed.

recover/step00040 holds model, optimizer and the position in the data: which prompts steps 1 to 40
have consumed. What was generated and not yet consumed is generated again, so no prompt is skipped
and none is trained on twice. state.json is written last and makes the checkpoint valid. The newest
two are kept: where one cannot be read, the run goes on from the one before.

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


def checkpoints(run_dir: Path) -> dict[int, Path]:
    """The complete checkpoints of a run, by step."""
    found = folders_of_steps(run_dir / "recover").items()
    return {step: path for step, path in found if (path / "state.json").is_file()}


def save_checkpoint(run_dir: Path, step: int, actor: Any, executor: Any) -> None:
    """Write the checkpoint of a step, whose line is in metrics.jsonl. All ranks call this."""
    target = run_dir / "recover" / f"step{step:05d}"
    if (target / "state.json").is_file():
        return
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)  # a killed run may have left a part of it
        target.mkdir(parents=True)
    dist.barrier()
    actor.save_state(target)
    if dist.get_rank() > 0:
        return
    partial = target / "state.partial"
    partial.write_text(json.dumps({"step": step, "rollout": executor.state_dict()}))
    os.replace(partial, target / "state.json")
    for old in sorted(folders_of_steps(target.parent).items())[:-KEPT]:
        shutil.rmtree(old[1])


def load_checkpoint(run_dir: Path, actor: Any, executor: Any) -> int:
    """Restore the newest checkpoint that can be read, and return its step, or 0. All ranks call
    this. The caller pushes the weights."""
    found = 0
    for step, folder in sorted(share(checkpoints(run_dir)).items(), reverse=True):
        try:
            state = json.loads((folder / "state.json").read_text())
            actor.load_state(folder)
            found = step
            break
        except Exception as error:  # anything may be wrong with a damaged file
            print(f"{folder} cannot be read ({error!r:.200}): trying the checkpoint before it")
    if executor is not None:
        if found:
            executor.load_state_dict(state["rollout"], found)
        cut_metrics(run_dir / "metrics.jsonl", found)
    return found


def cut_metrics(path: Path, step: int) -> None:
    """Keep the lines of steps 1 to `step` of metrics.jsonl."""
    if path.exists():
        partial = path.with_suffix(".partial")
        partial.write_text("".join(path.read_text().splitlines(keepends=True)[:step]))
        os.replace(partial, path)


def save_model(actor: Any, run_dir: Path, step: int, history: list[dict[str, Any]]) -> None:
    """Write the model as a Hugging Face folder. The newest two stay, and the best by evaluation."""
    folder = run_dir / "checkpoints"
    actor.save(folder / f"step{step:05d}")
    if actor.rank == 0:
        steps = folders_of_steps(folder)
        kept = {*sorted(k for k in steps if k <= step)[-KEPT:], best_step(history, steps)}
        for old in steps.keys() - kept:
            shutil.rmtree(steps[old])


def best_step(history: list[dict[str, Any]], steps: Any) -> int | None:
    """The step among `steps` with the best evaluation, the newest of equals; None without any."""
    scored = [(x["eval_reward"], x["step"]) for x in history if x.get("eval_reward") is not None]
    return max((pair for pair in scored if pair[1] in steps), default=(0, None))[1]
