"""A trajectory is the dict of tensors that the rollout side passes to the trainer.

A row is one sequence; B rows are padded to L tokens. **Position t of every [B, L] tensor describes
token t**: versions[b, t] is the version that computed input_ids[b, t]. Nothing is shifted by one.

| key | type, shape | meaning | padding |
|---|---|---|---|
| input_ids | int32 [B, L] | prompt and completion, turn after turn | 0 |
| attention_mask | bool [B, L] | True for a token, False for padding | False |
| loss_mask | int32 [B, L] | 1 = train on this token | 0 |
| logprobs | float32 [B, L] | log pi_behav; 0 for a token that the policy did not sample | 0 |
| versions | int32 [B, L] | policy version that computed the token; -1 if none did | -1 |
| turn_ids | int32 [B, L] | number of the token's turn (0, 1, ...); -1 outside of turns | -1 |
| turn_rewards | float32 [B, L] | final, discounted reward of the token's turn; 0 outside | 0 |
| temperatures | float32 [B, L] | temperature at which it was sampled; 1 outside of turns | 1 |
| rewards | float32 [B] | final reward of the row's last turn | |
| truncated | int32 [B] | 1 = the last turn reached its token limit | |
| side_conversations | int32 [B] | 1 = not trained on (cache.py) | |
| masked | int32 [B] | tokens left out of the loss because they are too old (staleness.py) | |
| parents | int32 [B] | row, within the task, that this row continues; -1 = none | |
| group_ids | int32 [B] | equal for the rows of one prompt group | |
| task_ids | int32 [B] | the task that made the row | |

A workflow returns at least input_ids and attention_mask; `complete` adds the rest. Without
loss_mask nothing trains; without turn_ids a row is one turn.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

INT, FLOAT = torch.int32, torch.float32
TOKEN_KEYS: dict[str, tuple[torch.dtype, float]] = {  # [B, L]: dtype and fill value
    "input_ids": (INT, 0),
    "attention_mask": (torch.bool, 0),
    "loss_mask": (INT, 0),
    "logprobs": (FLOAT, 0.0),
    "versions": (INT, -1),
    "turn_ids": (INT, -1),
    "turn_rewards": (FLOAT, 0.0),
    "temperatures": (FLOAT, 1.0),
}
COUNTS = ("truncated", "side_conversations", "masked", "group_ids", "task_ids")
ROW_KEYS: dict[str, tuple[torch.dtype, float]] = {  # [B]
    "rewards": (FLOAT, 0.0),
    "parents": (INT, -1),
    **dict.fromkeys(COUNTS, (INT, 0)),
}
PADDING = {name: fill for name, (_, fill) in (TOKEN_KEYS | ROW_KEYS).items()}

Trajectory = dict[str, Tensor]


def generated(traj: Trajectory) -> Tensor:
    """A mask (B, L) of the tokens that the policy sampled, also those that are not trained."""
    if "turn_ids" in traj:
        return traj["turn_ids"] >= 0
    return traj.get("loss_mask", torch.zeros_like(traj["input_ids"])) > 0


def head_version(traj: Trajectory) -> int | None:
    """The oldest version among the generated tokens, None if there are none."""
    return min(traj["versions"][generated(traj)].tolist(), default=None)


def tail_version(traj: Trajectory) -> int | None:
    """The newest version among the generated tokens, None if there are none."""
    return max(traj["versions"][generated(traj)].tolist(), default=None)


def oldest_trained(traj: Trajectory) -> int | None:
    """The oldest version among the trained tokens, None if there are none."""
    return min(traj["versions"][traj["loss_mask"] > 0].tolist(), default=None)


def without_older(traj: Trajectory, oldest: int) -> Trajectory | None:
    """Leave tokens older than `oldest` out of the loss. None if this leaves nothing to train."""
    old = (traj["loss_mask"] > 0) & (traj["versions"] < oldest)  # (B, L)
    mask = traj["loss_mask"].masked_fill(old, 0)  # (B, L)
    nothing_left = old.any() and not mask.any()
    return None if nothing_left else traj | {"loss_mask": mask, "masked": old.sum(1).int()}


def check_trajectory_format(traj: Any, expected_keys: frozenset[str] | None = None) -> None:
    """Raise ValueError if a trajectory is malformed, or its keys are not those of the workflow's
    earlier ones. The message names the key."""

    def need(condition: Any, message: str) -> None:
        if not condition:
            raise ValueError(message)

    need(isinstance(traj, dict), f"a trajectory is a dict of tensors, not {type(traj).__name__}")
    missing = [key for key in ("input_ids", "attention_mask") if key not in traj]
    need(not missing, f"the trajectory lacks {', '.join(missing)}; it has {sorted(traj)}")
    for key, value in traj.items():
        kind = type(value).__name__
        need(isinstance(value, Tensor), f"trajectory[{key!r}] is a {kind}; a tensor is needed")
    shape = traj["input_ids"].shape
    found = f"its shape is {list(shape)}; an empty trajectory is not allowed"
    need(len(shape) == 2 and 0 not in shape, f"input_ids must be [batch, seq_len], but {found}")
    for key, value in traj.items():
        needed = shape if key in TOKEN_KEYS else shape[:1]
        got = value.shape if key in PADDING else value.shape[:1]  # a user's key: [B, ...]
        found = f"has shape {list(value.shape)}"
        need(got == needed, f"trajectory[{key!r}] {found}; {list(needed)} is needed")
        need(not value.isnan().any(), f"trajectory[{key!r}] holds NaN")
        need(not value.isinf().any(), f"trajectory[{key!r}] holds an infinite value")
    sampled = generated(traj)
    padding = sampled & ~traj["attention_mask"].bool()
    need(not padding.any(), "the trajectory trains on padding: attention_mask is False there")
    old = traj.get("versions", sampled)[sampled] < 0
    need(not old.any(), "trajectory['versions'] is negative on generated tokens")
    known = expected_keys or frozenset(traj)
    fewer, more = sorted(known - traj.keys()), sorted(traj.keys() - known)
    need(
        not fewer + more, f"unlike this workflow's earlier trajectories: lacks {fewer}, adds {more}"
    )


def complete(traj: Trajectory, task_id: int, version: int = 0) -> Trajectory:
    """Add every missing key of the table, and give the others its dtype.

    Without `versions`, generated tokens get `version`, at which the episode started: none is older.
    """
    shape, full = traj["input_ids"].shape, dict[str, Tensor]()
    for keys, size in ((TOKEN_KEYS, shape), (ROW_KEYS, shape[:1])):
        full |= {key: torch.full(size, fill, dtype=dtype) for key, (dtype, fill) in keys.items()}
    full |= {key: x.to(full[key].dtype) if key in full else x for key, x in traj.items()}
    if "turn_ids" not in traj:
        full["turn_ids"] = full["loss_mask"].clamp(max=1) - 1
    sampled = generated(full)  # (B, L)
    if "versions" not in traj:
        full["versions"][sampled] = version
    if "turn_rewards" not in traj:
        full["turn_rewards"] = full["rewards"][:, None] * sampled
    return full | {key: torch.full_like(full[key], task_id) for key in ("task_ids", "group_ids")}


def concat_padded_tensors(trajectories: list[Trajectory]) -> Trajectory:
    """Pad to the longest trajectory, and stack the rows in order.

    Tensors [B, L, ...] are padded along L; where a key has no L in some trajectory, its tensors are
    only stacked. Raises ValueError for none, or for different keys.
    """
    if not trajectories:
        raise ValueError("no trajectories to concatenate")
    keys = trajectories[0].keys()
    if partial := {key for traj in trajectories for key in keys ^ traj.keys()}:
        raise ValueError(f"trajectories to concatenate: only some have {sorted(partial)}")
    lengths = [traj["input_ids"].shape[1:] for traj in trajectories]
    batch = {}
    for key in keys:
        values = [traj[key] for traj in trajectories]
        if [value.shape[1:2] for value in values] == lengths:
            rows = [row for value in values for row in value]
            batch[key] = pad_sequence(rows, batch_first=True, padding_value=PADDING.get(key, 0))
        else:
            batch[key] = torch.cat(values)
    return batch


def dump_lines(traj: Trajectory, task_id: int, tokenizer: Any) -> list[dict[str, Any]]:
    """One record a row (AReaL's Rollout Workflow, "Trajectory Dumping"). The completion begins with
    the first generated token, and contains what stands between the turns."""
    lines = []
    for i, sampled in enumerate(generated(traj)):
        real = traj["attention_mask"][i]
        ids, own = traj["input_ids"][i][real].tolist(), sampled[real].tolist()
        versions = traj["versions"][i][sampled].tolist()
        prompt_len = own.index(True) if versions else len(ids)
        line = {
            "task_id": task_id,
            "sample_idx": i,
            "seqlen": len(ids),
            "prompt_len": prompt_len,
            "head_version": min(versions, default=None),
            "tail_version": max(versions, default=None),
            "reward": traj["rewards"][i].item(),
            "prompt": tokenizer.decode(ids[:prompt_len], skip_special_tokens=False),
            "completion": tokenizer.decode(ids[prompt_len:], skip_special_tokens=False),
        }
        lines.append(line)
    return lines


def dump(traj: Trajectory, task_id: int, folder: Path, version: int, tokenizer: Any) -> None:
    """Write the records to {folder}/{newest version}/{task_id}.jsonl; `version` if it has none."""
    newest = tail_version(traj)
    path = folder / str(version if newest is None else newest) / f"{task_id}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(x, ensure_ascii=False) for x in dump_lines(traj, task_id, tokenizer))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
