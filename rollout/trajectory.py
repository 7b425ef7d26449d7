"""The trajectory: what a rollout hands to the trainer, as one dict of tensors.

The rule. A row is a sequence, B rows are padded to L tokens, and **position t speaks of token t**: its id, whether
it is trained on, the log-probability it was sampled with, the version of the weights that computed it. Nothing is
ever rolled by one, so no two tensors can disagree about which token they describe.

| key | type, shape | meaning | padding |
|---|---|---|---|
| input_ids | int32 [B, L] | prompt and completion, turn after turn | 0 |
| attention_mask | bool [B, L] | a token, not padding | False |
| loss_mask | int32 [B, L] | 1 = train on this token | 0 |
| logprobs | float32 [B, L] | log pi_behav of the token; 0 where the policy did not sample it | 0 |
| versions | int32 [B, L] | policy version that computed the token; -1 where none did | -1 |
| turn_ids | int32 [B, L] | the token belongs to the k-th generated turn of its row; -1 elsewhere | -1 |
| turn_rewards | float32 [B, L] | the final, discounted reward of the token's turn; 0 elsewhere | 0 |
| temperatures | float32 [B, L] | temperature the token was sampled at; 1 elsewhere | 1 |
| rewards | float32 [B] | the last turn's own final reward | |
| truncated | int32 [B] | 1 = the last turn ended because its token budget was used up | |
| regenerated | int32 [B] | segments that were asked for again, because a server failed or was lost | |
| side_conversations | int32 [B] | 1 for a side conversation, which is not trained (calls/side_conversations.py) | |
| parents | int32 [B] | which of its task's rows the row goes on from, counted from 0; -1: none of them | |
| group_ids | int32 [B] | rows with the same id answer the same prompt: the group of a group baseline | |
| task_ids | int32 [B] | the dispatcher's task that made the row | |

A workflow owes the first two keys and gives what it knows of the others. `check_trajectory_format` says what is wrong
with what it gave; `complete` fills the rest, so that behind it every trajectory has every key and batches can be
concatenated. What a workflow leaves out is guessed in the plainest way: no `loss_mask`, nothing is trained on; no
`turn_ids`, every unbroken run of trained tokens is a turn; no `temperatures`, everything was sampled at 1.

How this differs from AReaL. Its trajectories end at `versions`; what training needs beside them is recovered from
positions (a group is "the next group_size rows"), which breaks as soon as one member of a group is missing. Its
`head_version` in dumps includes the prompt's -1 and is therefore always -1; its `prompt_len` subtracts the number of
trained tokens, which is wrong as soon as prompt and completion alternate. Here both speak of generated tokens.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

REQUIRED_KEYS = ("input_ids", "attention_mask")

# Every key that training knows: dtype, and the value of a position that holds no (generated) token.
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
ROW_KEYS: dict[str, tuple[torch.dtype, float]] = {  # [B]
    "rewards": (torch.float32, 0.0),
    "truncated": (torch.int32, 0),
    "regenerated": (torch.int32, 0),
    "side_conversations": (torch.int32, 0),
    "parents": (torch.int32, -1),
    "group_ids": (torch.int32, 0),
    "task_ids": (torch.int32, 0),
}
PADDING = {name: fill for name, (_, fill) in (TOKEN_KEYS | ROW_KEYS).items()}

Trajectory = dict[str, Tensor]


def generated(traj: Trajectory) -> Tensor:
    """Which tokens the policy sampled, trained on or not: bool (B, L)."""
    if "turn_ids" in traj:
        return traj["turn_ids"] >= 0
    if "loss_mask" in traj:
        return traj["loss_mask"] > 0
    return torch.zeros_like(traj["input_ids"], dtype=torch.bool)


def head_version(traj: Trajectory) -> int | None:
    """The smallest version over generated tokens: what the age of a trajectory is measured from. None without any."""
    versions = traj["versions"][generated(traj)]
    return int(versions.min()) if len(versions) else None


def tail_version(traj: Trajectory) -> int | None:
    """The largest version over generated tokens. None without any."""
    versions = traj["versions"][generated(traj)]
    return int(versions.max()) if len(versions) else None


def check_trajectory_format(traj: Any, expected_keys: frozenset[str] | None = None) -> None:
    """Raise a ValueError that names what is wrong with a trajectory that a workflow returned.

    `expected_keys` are those of the same workflow's earlier trajectories.
    """
    if not isinstance(traj, dict):
        raise ValueError(f"a trajectory is a dict of tensors, not {type(traj).__name__}")
    missing = [key for key in REQUIRED_KEYS if key not in traj]
    if missing:
        raise ValueError(f"the trajectory lacks {', '.join(missing)}; it has {sorted(traj) or 'no keys'}")
    for key, value in traj.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"trajectory[{key!r}] is a {type(value).__name__}; a tensor is needed")
    shape = traj["input_ids"].shape
    if len(shape) != 2:
        raise ValueError(f"trajectory['input_ids'] must be [batch, seq_len], but its shape is {list(shape)}")
    if 0 in shape:
        raise ValueError(f"the trajectory is empty: trajectory['input_ids'] has shape {list(shape)}")
    for key, value in traj.items():
        needed = shape if key in TOKEN_KEYS else shape[:1]
        got = value.shape if key in TOKEN_KEYS or key in ROW_KEYS else value.shape[:1]
        if got != needed:
            raise ValueError(f"trajectory[{key!r}] has shape {list(value.shape)}; {list(needed)} is needed")
        if value.is_floating_point() and not value.isfinite().all():
            raise ValueError(f"trajectory[{key!r}] holds values that are not finite")
    if (generated(traj) & ~traj["attention_mask"].bool()).any():
        raise ValueError("the trajectory trains on padding: loss_mask is 1 where attention_mask is False")
    if "versions" in traj and (traj["versions"][generated(traj)] < 0).any():
        raise ValueError("trajectory['versions'] is negative on generated tokens; -1 is for tokens of no policy")
    if expected_keys is not None and traj.keys() != expected_keys:
        fewer, more = sorted(expected_keys - traj.keys()), sorted(traj.keys() - expected_keys)
        raise ValueError(f"the keys differ from this workflow's earlier trajectories: lacks {fewer}, adds {more}")


def number_turns(loss_mask: Tensor) -> Tensor:
    """(B, L) -> (B, L): 0, 1, 2... on the k-th unbroken run of ones in each row, -1 elsewhere."""
    trained = loss_mask > 0  # (B, L)
    starts = trained.clone()
    starts[:, 1:] &= ~trained[:, :-1]
    return torch.where(trained, starts.cumsum(1) - 1, -1)  # (B, L)


def complete(traj: Trajectory, task_id: int, version: int = 0) -> Trajectory:
    """The same trajectory with every key of the table, each with its dtype; keys of the user's own are kept.

    `version` stands in for `versions` that the workflow left out: give the policy's version when the episode began, so
    that its age is over-stated and never under-stated. Without `logprobs` the behaviour policy is unknown: the zeros
    that stand in serve only an objective that recomputes the old log-probabilities.
    """
    rows, shape = len(traj["input_ids"]), traj["input_ids"].shape
    full = {key: torch.full(shape, fill, dtype=dtype) for key, (dtype, fill) in TOKEN_KEYS.items()}
    full |= {key: torch.full((rows,), fill, dtype=dtype) for key, (dtype, fill) in ROW_KEYS.items()}
    full |= {key: value.to(full[key].dtype) if key in full else value for key, value in traj.items()}
    if "turn_ids" not in traj:
        full["turn_ids"] = number_turns(full["loss_mask"]).to(torch.int32)
    sampled = generated(full)  # (B, L)
    if "versions" not in traj:
        full["versions"][sampled] = version
    if "turn_rewards" not in traj:
        full["turn_rewards"] = full["rewards"][:, None] * sampled
    full["task_ids"] = torch.full((rows,), task_id, dtype=torch.int32)
    full["group_ids"] = full["task_ids"].clone()  # a task is a prompt group
    return full


def concat_padded_tensors(trajectories: list[Trajectory]) -> Trajectory:
    """Pad every trajectory to the longest and put their rows one under another, in order.

    A key whose tensors are all of shape [B, L, ...] is padded along L with its PADDING (one of the user's own with 0);
    any other is concatenated as it is. Raises ValueError when there is nothing to concatenate or the keys differ.
    """
    if not trajectories:
        raise ValueError("no trajectories to concatenate")
    keys = trajectories[0].keys()
    if partial := {key for traj in trajectories for key in keys ^ traj.keys()}:
        raise ValueError(f"trajectories with different keys cannot be concatenated: only some have {sorted(partial)}")
    lengths = [traj["input_ids"].shape[1:] for traj in trajectories]
    batch = {}
    for key in keys:
        values = [traj[key] for traj in trajectories]
        if [value.shape[1:2] for value in values] == lengths:  # one alone may be a feature as wide as it is long
            rows = [row for value in values for row in value]
            batch[key] = pad_sequence(rows, batch_first=True, padding_value=PADDING.get(key, 0))
        else:
            batch[key] = torch.cat(values)
    return batch


def dump_lines(traj: Trajectory, task_id: int, tokenizer: Any) -> list[dict[str, Any]]:
    """One record per row of a completed trajectory: the JSONL fields of docs/rollout_workflow.txt.

    sample_idx counts the task's rows. prompt_len is the number of tokens before the first generated one; what follows
    it is the completion, with the messages between later turns in it. A row without generated tokens has null versions.
    """
    lines = []
    for i, sampled in enumerate(generated(traj)):
        real = traj["attention_mask"][i]
        ids = traj["input_ids"][i][real].tolist()
        own = sampled[real].nonzero().flatten().tolist()
        prompt_len = own[0] if own else len(ids)
        row = {key: value[i : i + 1] for key, value in traj.items()}
        lines.append(
            {
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
        )
    return lines
