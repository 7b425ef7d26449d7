"""A trajectory is a dict of tensors that the rollout side passes to the trainer.

A row is one sequence of tokens. B rows are padded to L tokens. **Position t of every [B, L] tensor describes token t.**
For example, versions[b, t] is the version that computed the token input_ids[b, t]. The labels of a language model are
often shifted by one position. In a trajectory, no tensor is shifted by one position.

| key | type, shape | meaning | padding |
|---|---|---|---|
| input_ids | int32 [B, L] | prompt and completion, turn after turn | 0 |
| attention_mask | bool [B, L] | True for a token, False for padding | False |
| loss_mask | int32 [B, L] | 1 = train on this token | 0 |
| logprobs | float32 [B, L] | log pi_behav of the token; 0 for a token that the policy did not sample | 0 |
| versions | int32 [B, L] | policy version that computed the token; -1 for a token that the policy did not sample | -1 |
| turn_ids | int32 [B, L] | number of the token's turn in its conversation (0, 1, ...); -1 outside of turns | -1 |
| turn_rewards | float32 [B, L] | the final, discounted reward of the token's turn; 0 outside of turns | 0 |
| temperatures | float32 [B, L] | temperature at which the token was sampled; 1 outside of turns | 1 |
| rewards | float32 [B] | the final reward of the row's last turn | |
| truncated | int32 [B] | 1 = the last turn ended because it reached its token limit | |
| regenerated | int32 [B] | how many segments were requested again because a server failed | |
| side_conversations | int32 [B] | 1 for a side conversation, which is not trained on (calls/side_conversations.py) | |
| unstored | int32 [B] | number of the row's turns that the agent asked not to store | |
| masked | int32 [B] | how many tokens of the row are excluded from the loss because they are too old (staleness.py) | |
| placeholders | int32 [B] | number of the row's images and files that the model could not read (calls/messages.py) | |
| parents | int32 [B] | index, within the task, of the row that this row continues; -1 = no such row | |
| group_ids | int32 [B] | rows with equal ids belong to one prompt group | |
| task_ids | int32 [B] | id of the dispatcher's task that made the row | |

In this example, a row has two prompt tokens, two answer tokens of the versions 3 and 4, and one position of padding:

    input_ids 10 11 12 13 0    loss_mask 0 0 1 1 0    versions -1 -1 3 4 -1    turn_ids -1 -1 0 0 -1

A workflow must return the first two keys of the table (input_ids and attention_mask), and may return any other key. If
a trajectory is malformed, `check_trajectory_format` raises an error that says what is wrong. `complete` adds the
missing keys with default values. If `loss_mask` is missing, no token is trained. If `turn_ids` is missing, each
unbroken sequence of trained tokens counts as one turn. If `temperatures` is missing, every token has temperature 1. A
completed trajectory has every key, so completed trajectories can be concatenated.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# The keys that training reads. Each key has a dtype and a fill value. The fill value stands at positions that have no
# value of their own, such as padding.
TOKEN_KEYS: dict[str, tuple[torch.dtype, float]] = {  # [B, L]
    "input_ids": (torch.int32, 0),
    "attention_mask": (torch.bool, 0),
    "loss_mask": (torch.int32, 0),
    "logprobs": (torch.float32, 0.0),
    "versions": (torch.int32, -1),
    "turn_ids": (torch.int32, -1),
    "turn_rewards": (torch.float32, 0.0),
    "temperatures": (torch.float32, 1.0),
}
COUNTS = ("truncated", "regenerated", "side_conversations", "unstored", "masked", "placeholders")
ROW_KEYS: dict[str, tuple[torch.dtype, float]] = {  # [B]
    "rewards": (torch.float32, 0.0),
    **dict.fromkeys(COUNTS, (torch.int32, 0)),
    "parents": (torch.int32, -1),
    "group_ids": (torch.int32, 0),
    "task_ids": (torch.int32, 0),
}
PADDING = {name: fill for name, (_, fill) in (TOKEN_KEYS | ROW_KEYS).items()}

Trajectory = dict[str, Tensor]


def generated(traj: Trajectory) -> Tensor:
    """Return a bool mask (B, L) of all tokens that the policy sampled, including sampled tokens that are not
    trained."""
    if "turn_ids" in traj:
        return traj["turn_ids"] >= 0
    return traj.get("loss_mask", torch.zeros_like(traj["input_ids"])) > 0


def head_version(traj: Trajectory) -> int | None:
    """Return the oldest version among the generated tokens, or None if no token was generated."""
    return min(traj["versions"][generated(traj)].tolist(), default=None)


def tail_version(traj: Trajectory) -> int | None:
    """Return the newest version among the generated tokens, or None if no token was generated."""
    return max(traj["versions"][generated(traj)].tolist(), default=None)


def oldest_trained(traj: Trajectory) -> int | None:
    """Return the oldest version among the trained tokens, or None if no token is trained."""
    return min(traj["versions"][traj["loss_mask"] > 0].tolist(), default=None)


def without_older(traj: Trajectory, oldest: int) -> Trajectory | None:
    """Remove tokens older than version `oldest` from the loss. Return None if this removes all trained tokens."""
    old = (traj["loss_mask"] > 0) & (traj["versions"] < oldest)  # (B, L)
    mask = traj["loss_mask"].masked_fill(old, 0)  # (B, L)
    return (
        None
        if old.any() and not mask.any()
        else traj | {"loss_mask": mask, "masked": old.sum(1).int()}
    )


def check_trajectory_format(traj: Any, expected_keys: frozenset[str] | None = None) -> None:
    """Raise ValueError if the trajectory is malformed. The error's message names the wrong key and says what is needed.

    `expected_keys` are the keys of this workflow's earlier trajectories, or None if this trajectory is the first.
    """
    if not isinstance(traj, dict):
        raise ValueError(f"a trajectory is a dict of tensors, not {type(traj).__name__}")
    missing = [key for key in ("input_ids", "attention_mask") if key not in traj]
    if missing:
        raise ValueError(
            f"the trajectory lacks {', '.join(missing)}; it has {sorted(traj) or 'no keys'}"
        )
    for key, value in traj.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"trajectory[{key!r}] is a {type(value).__name__}; a tensor is needed")
    shape = traj["input_ids"].shape
    if len(shape) != 2 or 0 in shape:
        wrong = f"trajectory['input_ids'] must be [batch, seq_len], but its shape is {list(shape)}"
        raise ValueError(f"{wrong}; an empty trajectory is not allowed")
    for key, value in traj.items():
        needed = shape if key in TOKEN_KEYS else shape[:1]
        got = value.shape if key in TOKEN_KEYS or key in ROW_KEYS else value.shape[:1]
        if got != needed:
            raise ValueError(
                f"trajectory[{key!r}] has shape {list(value.shape)}; {list(needed)} is needed"
            )
        if value.is_floating_point() and not value.isfinite().all():
            raise ValueError(f"trajectory[{key!r}] holds values that are not finite")
    if (generated(traj) & ~traj["attention_mask"].bool()).any():
        raise ValueError(
            "the trajectory trains on padding: loss_mask is 1 where attention_mask is False"
        )
    if "versions" in traj and (traj["versions"][generated(traj)] < 0).any():
        raise ValueError(
            "trajectory['versions'] is negative on generated tokens; -1 is only for other tokens"
        )
    if expected_keys is not None and traj.keys() != expected_keys:
        fewer, more = sorted(expected_keys - traj.keys()), sorted(traj.keys() - expected_keys)
        raise ValueError(
            f"the keys differ from this workflow's earlier trajectories: lacks {fewer}, adds {more}"
        )


def number_turns(loss_mask: Tensor) -> Tensor:
    """Number the unbroken sequences of trained tokens in each row: 0, 1, and so on.

    In the returned tensor (B, L), each trained token has the number of its sequence, and all other positions have -1.
    """
    trained = loss_mask > 0  # (B, L)
    starts = trained.clone()
    starts[:, 1:] &= ~trained[:, :-1]
    return torch.where(trained, starts.cumsum(1) - 1, -1)  # (B, L)


def complete(traj: Trajectory, task_id: int, version: int = 0) -> Trajectory:
    """Return a trajectory with every key of the table, in the dtype of the table. Keys that are not in the table are
    kept.

    If `versions` is missing, every generated token gets `version`. `version` is the policy version at which the episode
    started. The servers may get new weights during an episode, so a token's true version can be newer than `version`.
    If `logprobs` is missing, the function fills it with zeros. Zeros in `logprobs` are correct only for an objective
    that recomputes the old log-probabilities.
    """
    rows, shape = len(traj["input_ids"]), traj["input_ids"].shape
    full = {key: torch.full(shape, fill, dtype=dtype) for key, (dtype, fill) in TOKEN_KEYS.items()}
    full |= {key: torch.full((rows,), fill, dtype=dtype) for key, (dtype, fill) in ROW_KEYS.items()}
    full |= {
        key: value.to(full[key].dtype) if key in full else value for key, value in traj.items()
    }
    if "turn_ids" not in traj:
        full["turn_ids"] = number_turns(full["loss_mask"]).to(torch.int32)
    sampled = generated(full)  # (B, L)
    if "versions" not in traj:
        full["versions"][sampled] = version
    if "turn_rewards" not in traj:
        full["turn_rewards"] = full["rewards"][:, None] * sampled
    full["task_ids"] = torch.full((rows,), task_id, dtype=torch.int32)
    full["group_ids"] = full["task_ids"].clone()  # one task is one prompt group
    return full


def concat_padded_tensors(trajectories: list[Trajectory]) -> Trajectory:
    """Pad all trajectories to the length of the longest trajectory, and stack their rows in order.

    If all tensors of a key have the shape [B, L, ...], they are padded along L. The padding value is PADDING[key], or 0
    if PADDING lacks the key. If the tensors of a key have no dimension L, they are concatenated without padding. Raises
    ValueError if there is no trajectory, or if the trajectories have different keys.
    """
    if not trajectories:
        raise ValueError("no trajectories to concatenate")
    keys = trajectories[0].keys()
    partial = {key for traj in trajectories for key in keys ^ traj.keys()}
    if partial:
        raise ValueError(
            f"trajectories with different keys cannot be concatenated: only some have {sorted(partial)}"
        )
    lengths = [traj["input_ids"].shape[1:] for traj in trajectories]
    batch = {}
    for key in keys:
        values = [traj[key] for traj in trajectories]
        if [
            value.shape[1:2] for value in values
        ] == lengths:  # all tensors of this key have the shape [B, L, ...]
            rows = [row for value in values for row in value]
            batch[key] = pad_sequence(rows, batch_first=True, padding_value=PADDING.get(key, 0))
        else:
            batch[key] = torch.cat(values)
    return batch


def dump_lines(traj: Trajectory, task_id: int, tokenizer: Any) -> list[dict[str, Any]]:
    """Return one record per row of a completed trajectory (AReaL's document Rollout Workflow, "Trajectory Dumping").

    `sample_idx` is the index of the row in the task. `prompt_len` is the number of tokens before the first generated
    token. The completion of a record begins with the row's first generated token, and includes the messages between the
    turns. `head_version` and `tail_version` are null for a row without generated tokens.
    """
    lines = []
    for i, sampled in enumerate(generated(traj)):
        real = traj["attention_mask"][i]
        ids = traj["input_ids"][i][real].tolist()
        own = sampled[real].nonzero().flatten().tolist()
        prompt_len = own[0] if own else len(ids)
        row = {key: value[i : i + 1] for key, value in traj.items()}
        line = {
            "task_id": task_id,
            "sample_idx": i,
            "seqlen": len(ids),
            "prompt_len": prompt_len,
            "head_version": head_version(row),
            "tail_version": tail_version(row),
            "reward": traj["rewards"][i].item(),
            "prompt": tokenizer.decode(ids[:prompt_len], skip_special_tokens=False),
            "completion": tokenizer.decode(ids[prompt_len:], skip_special_tokens=False),
        }
        lines.append(line)
    return lines


def dump(traj: Trajectory, task_id: int, folder: Path, version: int, tokenizer: Any) -> None:
    """Write the lines of `dump_lines` to {folder}/{newest version in the trajectory}/{task_id}.jsonl.

    If a trajectory has no generated tokens, its lines are written to the subfolder {version}.
    """
    newest = tail_version(traj)
    folder = folder / str(version if newest is None else newest)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(line, ensure_ascii=False) + "\n" for line in dump_lines(traj, task_id, tokenizer)
    ]
    (folder / f"{task_id}.jsonl").write_text("".join(lines), encoding="utf-8")
