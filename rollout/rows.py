"""make_row makes one row for training from the turns of one conversation, and join_turns chooses the turns of each row.

The prompt of a conversation's last turn contains the tokens of all earlier turns. A conversation's row consists of the
prompt and the output of the conversation's last turn. The row marks which tokens each turn generated. Example: a
conversation has two turns. Between the two turns a tool answered, and the policy got new weights:

    tokens       p  p  p  a  a  t  t  b  b  b       p: first prompt, a: output of turn 0, t: tool, b: output of turn 1
    loss_mask    0  0  0  1  1  0  0  1  1  1
    versions    -1 -1 -1  3  3 -1 -1  4  4  4
    turn_ids    -1 -1 -1  0  0 -1 -1  1  1  1

Entry t of each list describes token t.

In export style concat (cache.py) each leaf of the conversation tree has a row. A turn joins its parent's row only if
the turn's prompt begins with exactly the parent's tokens. If the prompt begins with other tokens, for example because
the agent offers other tools, the turn starts a new row. If the rows of several leaves contain the same turn, only one
of these rows trains the turn.

In four cases, a row does not train one of its turns, and the turn's tokens are only context for other turns:

    (1) Another row already trains on the turn.
    (2) The agent asked the proxy not to store the call, and rollout.openai.store=honour is set.
    (3) The trainer cannot reproduce how the tokens were sampled (`trains_exactly`).
    (4) The turn is a side conversation without a reward (calls/side_conversations.py).
"""

import copy
from collections.abc import Sequence
from typing import Any

from calls.messages import PLACEHOLDER


def is_left_out(turn: Any) -> bool:
    """Return whether an interaction is a side conversation without a reward of its own."""
    return turn.is_side and turn.reward is None


def is_trainable(turn: Any) -> bool:
    """Return whether the loss may include the tokens of an interaction."""
    return turn.unstored != "honour" and turn.tokens.trains_exactly and not is_left_out(turn)


def join_turns(finished: Sequence[Any]) -> list[Any]:
    """Return a copy of each leaf of the conversation tree. The copy's attribute `row_turns` lists the turns of the
    leaf's row.

    `finished` are all finished interactions of a session, in the order of their requests. If several rows contain a
    turn, only the first of these rows trains the turn. If t is the first turn that a row trains, the row's attribute
    `parent` is the row that trains the parent of t.
    """
    joined = {turn: turn.parent for turn in finished if turn.parent and turn.continues(turn.parent)}
    inner = set(joined.values())
    rows = []
    row_of: dict[Any, Any] = {}  # turn -> the row that trains the turn
    for leaf in (turn for turn in finished if turn not in inner):
        path = [leaf]  # turns from the leaf back to the first turn of the leaf's row
        while path[-1] in joined:
            path.append(joined[path[-1]])
        row = copy.copy(leaf)
        row.row_turns = [(turn, turn not in row_of) for turn in reversed(path)]
        row_of |= {turn: row for turn, is_new in row.row_turns if is_new}
        rows.append(row)
    for row in rows:
        first = next(turn for turn, is_new in row.row_turns if is_new)
        row.parent = row_of.get(first.parent)
    return rows


def make_row(turns: Sequence[tuple[Any, bool]]) -> dict[str, list]:
    """Return the row of a conversation as a dict of lists. Each list has L numbers (one per token) or a single number.

    `turns` is a list of pairs (finished interaction, whether the row trains it), in the order of the conversation. The
    table in rollout/trajectory.py explains the keys. A key of shape [B, L] has a list of L numbers, and a key of shape
    [B] has a list of one number. The dict lacks the keys masked, parents, group_ids and task_ids.
    """
    leaf = turns[-1][0]
    last = leaf.tokens
    length = last.input_len + last.output_len
    row: dict[str, list] = {
        "input_ids": last.input_tokens + last.output_tokens,
        "attention_mask": [True] * length,
        "loss_mask": [0] * length,
        "logprobs": [0.0] * length,
        "versions": [-1] * length,
        "turn_ids": [-1] * length,
        "turn_rewards": [0.0] * length,
        "temperatures": [1.0] * length,
        "rewards": [leaf.reward or 0.0],
        "truncated": [int(last.stop_reason == "length")],
        "regenerated": [0],
        "side_conversations": [int(is_left_out(leaf))],
        "unstored": [sum(bool(turn.unstored) and trained for turn, trained in turns)],
        "placeholders": [sum(message["content"].count(PLACEHOLDER) for message in leaf.messages)],
    }
    for turn, trained in turns:
        n = turn.tokens.output_len
        span = slice(turn.tokens.input_len, turn.tokens.input_len + n)
        row["loss_mask"][span] = [int(trained and is_trainable(turn))] * n
        row["logprobs"][span] = turn.tokens.output_logprobs
        row["versions"][span] = turn.tokens.output_versions
        row["turn_ids"][span] = [turn.turn] * n
        row["turn_rewards"][span] = [turn.reward or 0.0] * n
        row["temperatures"][span] = [turn.tokens.temperature] * n
        # If several rows contain a turn, only the row that trains the turn counts the turn's regenerated segments.
        row["regenerated"][0] += turn.tokens.regenerated * trained
    return row


def row_to_tensors(row: dict[str, list]) -> dict[str, Any]:
    """Return a row as tensors of shape (1, L) or (1,), with the dtypes of trajectory.py."""
    import torch  # this import is slow, so it is not at the top of the file

    from rollout.trajectory import ROW_KEYS, TOKEN_KEYS

    tensors = {
        key: torch.tensor(row[key], dtype=dtype)
        for key, (dtype, _) in ROW_KEYS.items()
        if key in row
    }
    return {
        key: torch.tensor([row[key]], dtype=dtype) for key, (dtype, _) in TOKEN_KEYS.items()
    } | tensors
