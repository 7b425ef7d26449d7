"""A trajectory is the dict of tensors that the rollout side passes to the trainer.

A row is one sequence, padded to T tokens. **Position t of every (rows, T) tensor describes token
t**: versions[r, t] is the version that computed input_ids[r, t].

| key | type, shape | meaning | padding |
|---|---|---|---|
| input_ids | int32 (rows, T) | prompt and completion, turn after turn | 0 |
| attention_mask | bool (rows, T) | True for a token, False for padding | False |
| loss_mask | int32 (rows, T) | 1 = train on this token | 0 |
| logprobs | float32 (rows, T) | log-probability at sampling (log pi_behav); 0 outside turns | 0 |
| versions | int32 (rows, T) | policy version that computed the token; -1 if none did | -1 |
| turn_ids | int32 (rows, T) | number of the token's turn (0, 1, ...); -1 outside of turns | -1 |
| turn_rewards | float32 (rows, T) | final reward of the token's turn; 0 outside turns | 0 |
| temperatures | float32 (rows, T) | temperature of the sampling; 1 outside turns | 1 |
| rewards | float32 (rows,) | final reward of the row's last turn | |
| truncated | int32 (rows,) | 1 = the last turn reached its token limit | |
| side_conversations | int32 (rows,) | 1 = untrained side conversation (calls/sessions.py) | |
| masked | int32 (rows,) | number of tokens that are too old for the loss (staleness.py) | |
| parents | int32 (rows,) | index in the task of the row that this one continues; -1 = none | |
| group_ids | int32 (rows,) | equal for the rows of one prompt group | |
| task_ids | int32 (rows,) | the task that made the row | |

A workflow must return input_ids and attention_mask. Without loss_mask, no token is trained. Without
turn_ids, all trained tokens of a row form one turn.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cache import Interaction


class Key(NamedTuple):
    dims: int  # 2: (rows, T), a value per token; 1: (rows,), a value per row
    dtype: torch.dtype
    fill: float = 0  # for padding and for missing keys


INT, FLOAT = torch.int32, torch.float32
KEYS = {
    "input_ids": Key(2, INT),
    "attention_mask": Key(2, torch.bool),
    "loss_mask": Key(2, INT),
    "logprobs": Key(2, FLOAT),
    "versions": Key(2, INT, -1),
    "turn_ids": Key(2, INT, -1),
    "turn_rewards": Key(2, FLOAT),
    "temperatures": Key(2, FLOAT, 1.0),
    "rewards": Key(1, FLOAT),
    "truncated": Key(1, INT),
    "side_conversations": Key(1, INT),
    "masked": Key(1, INT),
    "parents": Key(1, INT, -1),
    "group_ids": Key(1, INT),
    "task_ids": Key(1, INT),
}
Trajectory = dict[str, Tensor]


def version_span(traj: Trajectory, tokens: Tensor) -> tuple[int | None, int | None]:
    """Return the oldest and newest version of the tokens in a mask (rows, T). An empty mask gives
    (None, None)."""
    versions = traj["versions"][tokens].tolist()
    return min(versions, default=None), max(versions, default=None)


def generated(traj: Trajectory) -> Tensor:
    """The mask (rows, T) of the tokens that the policy sampled, trained or not."""
    return traj["turn_ids"] >= 0


def head_version(traj: Trajectory) -> int | None:
    return version_span(traj, traj["loss_mask"] > 0)[0]


def without_older(traj: Trajectory, oldest: int) -> Trajectory | None:
    """Take tokens older than `oldest` out of the loss. Return None if all trained tokens are
    older."""
    old = (traj["loss_mask"] > 0) & (traj["versions"] < oldest)  # (rows, T)
    mask = traj["loss_mask"].masked_fill(old, 0)  # (rows, T)
    nothing_left = old.any() and not mask.any()
    return None if nothing_left else traj | {"loss_mask": mask, "masked": old.sum(1).int()}


def check_trajectory_format(traj: Any) -> None:
    """Raise ValueError if a trajectory is malformed."""
    found = sorted(traj) if isinstance(traj, dict) else [type(traj).__name__]
    if not {"input_ids", "attention_mask"} <= {*found}:
        raise ValueError(f"a trajectory is a dict with input_ids and attention_mask, not {found}")
    shape = traj["input_ids"].shape
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"input_ids must be [batch, seq_len] and not empty, not {list(shape)}")
    for key, value in traj.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"trajectory[{key!r}] is a {type(value).__name__}, not a tensor")
        needed = shape[: KEYS[key].dims] if key in KEYS else shape[:1] + value.shape[1:]
        if value.shape != needed:
            raise ValueError(
                f"trajectory[{key!r}] has shape {list(value.shape)}; {list(needed)} is needed"
            )
        if not value.isfinite().all():
            raise ValueError(f"trajectory[{key!r}] holds NaN or an infinite value")


def complete(
    traj: Trajectory, task_id: int, version: int = 0, temperature: float = 1.0
) -> Trajectory:
    """Add the missing keys of the table above, except logprobs, and use the table's dtypes. Missing
    `versions` become `version`, the version at the episode's start, because no token is older."""
    shape = traj["input_ids"].shape
    full = {key: torch.full(shape[:dims], fill, dtype=t) for key, (dims, t, fill) in KEYS.items()}
    full |= {key: x.to(full[key].dtype) if key in full else x for key, x in traj.items()}
    if "logprobs" not in traj:
        del full["logprobs"]
    full["loss_mask"] = full["loss_mask"] * full["attention_mask"]  # padding is not trained
    if "turn_ids" not in traj:
        full["turn_ids"] = full["loss_mask"].clamp(max=1) - 1
    sampled = generated(full)  # (rows, T)
    for key, value in (("versions", version), ("temperatures", temperature)):
        if key not in traj:
            full[key][sampled] = value
    if "turn_rewards" not in traj:
        full["turn_rewards"] = full["rewards"][:, None] * sampled
    return full | {key: torch.full_like(full[key], task_id) for key in ("task_ids", "group_ids")}


def concat_padded_tensors(trajectories: list[Trajectory]) -> Trajectory:
    """Pad all rows to the length of the longest trajectory, and stack them in order.

    A key is padded only if its tensors have the shape (rows, T, ...) in all trajectories. Raises
    ValueError if there is no trajectory, or if the keys differ.
    """
    if not trajectories:
        raise ValueError(
            "there is no trajectory: all groups were rejected, or failed (see the log)"
        )
    keys = trajectories[0].keys()
    if partial := {key for traj in trajectories for key in keys ^ traj.keys()}:
        raise ValueError(f"trajectories to concatenate: only some have {sorted(partial)}")
    lengths = [traj["input_ids"].shape[1:] for traj in trajectories]
    batch = {}
    for key in keys:
        values = [traj[key] for traj in trajectories]
        if [value.shape[1:2] for value in values] == lengths:
            rows = [row for value in values for row in value]
            fill = KEYS[key].fill if key in KEYS else 0
            batch[key] = pad_sequence(rows, batch_first=True, padding_value=fill)
        else:
            batch[key] = torch.cat(values)
    return batch


def is_interactions(result: Any) -> bool:
    return isinstance(result, dict) and isinstance(next(iter(result.values()), None), Interaction)


def to_tensors(result: Any) -> Trajectory:
    if not is_interactions(result):
        return result
    places = {interaction: k for k, interaction in enumerate(result.values())}
    rows = concat_padded_tensors([interaction.to_tensor_dict() for interaction in places])
    parents = [places.get(interaction.parent, -1) for interaction in places]
    return rows | {"parents": torch.tensor(parents, dtype=torch.int32)}


def dump(traj: Trajectory, task_id: int, folder: Path, version: int, tokenizer: Any) -> None:
    """Write the rows to {folder}/{version}/{task_id}.jsonl, in the format of AReaL's page "Rollout
    Workflow". The field `completion` holds everything from the first generated token to the end of
    the row."""
    lines = []
    for i, sampled in enumerate(generated(traj)):
        row = {key: x[i] for key, x in traj.items()}
        ids = row["input_ids"][row["attention_mask"]].tolist()
        prompt_len = min(sampled.nonzero().flatten().tolist(), default=len(ids))
        oldest, newest = version_span(row, sampled)
        record = {
            "task_id": task_id,
            "sample_idx": i,  # the row's index in its group
            "seqlen": len(ids),
            "prompt_len": prompt_len,
            "head_version": oldest,
            "tail_version": newest,
            "reward": row["rewards"].item(),
            "prompt": tokenizer.decode(ids[:prompt_len]),
            "completion": tokenizer.decode(ids[prompt_len:]),
        }
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    path = folder / str(version) / f"{task_id}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")
