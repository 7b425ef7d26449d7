"""The calls of an agent's episode form a tree, from which we compute rewards and training rows.

An **interaction** is one call of an agent: the messages sent and the tokens of the answer. The
agent sends the whole conversation with every call, so a later call repeats earlier messages:

    system - user - [A] assistant -+- user  - [B] assistant
                                   +- user' - [C] assistant

**The tree is a dict**, `_conversations`. A finished interaction is stored under the digest of its
conversation (messages and output). A new call looks up the digest of every prefix of its messages.
The longest prefix found is the parent's conversation, so B and C find their parent A. Messages are
compared in `canonical` form (calls/messages.py), because clients rewrite the JSON of earlier
messages.

The **rewards** r(i) of calls i become final rewards R(i), from the last call to the first:

    R(i) = r(i) + gamma * mean of R(c) over the calls c that read i directly    (0 if none does)

With gamma = 0.5, three successive calls with rewards 0, 0, 1 get 0.25, 0.5, 1. A call reads the
answer that it continues: B and C read A. By a **link** it also reads another answer, which its new
messages copy (a summary, a sub-agent's report) or its HTTP header names. A call that reads i by a
link counts in the mean only if it led to a reward: it was rewarded, or a call that builds on it
was. A **side conversation**, such as a request for a title, counts only if it was rewarded itself.
calls/sessions.py finds links and side conversations.

**Rows.** A call that is part of a row is called a **turn**. In style "individual", each turn is a
row of its own. In "concat", each leaf of the tree and the turns that it continues are one row:

    tokens       p  p  p  a  a  t  t  b  b  b      prompt, turn 0, a tool's answer, turn 1
    loss_mask    0  0  0  1  1  0  0  1  1  1
    versions    -1 -1 -1  3  3 -1 -1  4  4  4
    turn_ids    -1 -1 -1  0  0 -1 -1  1  1  1

A turn joins its parent's row only if its prompt begins with the parent's tokens. Each turn is
trained with its own final reward, and only in the first row that contains it.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from calls.messages import Message, canonical
from inference.fields import Refusal, finite
from inference.io_struct import ModelResponse

# the fields that an export copies
EXPORTED = ("interaction_id", "messages", "output_message_list", "reply", "reward", "turn_id")


def check_style(style: Any) -> None:
    if style not in ("individual", "concat"):
        raise Refusal(f"style: individual or concat is needed, not {style!r}")


@dataclass(eq=False, repr=False)
class InteractionWithTokenLogpReward:
    """One call of an agent. It is complete when its answer's tokens have arrived."""

    messages: list[Message]
    interaction_id: str = ""
    tools: list[dict[str, Any]] = field(default_factory=list)  # as in AgentRequest
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    model_response: ModelResponse | None = None
    output_message_list: list[Message] = field(default_factory=list)
    reply: dict[str, Any] | None = None  # as the agent received it
    reward: float | None = None  # r(i); after the discount, R(i)
    # set by InteractionCache.enter:
    parent: "InteractionWithTokenLogpReward | None" = None
    digest: int = 0  # of all messages
    # set by InteractionCache.enter for the parent, and by Session._link for links:
    turn_id: int = 0  # 1 more than the parent's or, without a parent, than the largest in `reads`
    # The calls whose answers this call has read. If one has read another, only the reader is here.
    reads: list["InteractionWithTokenLogpReward"] = field(default_factory=list)
    # set by a session:
    first_digest: int = 0  # of this call's first message
    # the session's set, which still grows: first messages that begin no side conversation
    agent_digests: set[int] = field(default_factory=set)
    # set by an export: pairs (turn, whether this row trains it)
    row_turns: list[tuple["InteractionWithTokenLogpReward", bool]] = field(default_factory=list)
    row: dict[str, Any] = field(default_factory=dict)  # as the proxy has exported it

    @property
    def complete(self) -> bool:
        return self.model_response is not None

    @property
    def is_side(self) -> bool:
        """Whether this is a side conversation (calls/sessions.py). Of the calls with the same first
        message, all are or none is."""
        return bool(self.agent_digests) and self.first_digest not in self.agent_digests

    @property
    def is_left_out(self) -> bool:
        """Whether this is a side conversation that nobody rewarded."""
        return self.is_side and self.reward is None

    @property
    def tokens(self) -> ModelResponse:
        """Return `model_response`. Raises ValueError if the call is unfinished."""
        if self.model_response is None:
            raise ValueError(f"interaction {self.interaction_id!r} is unfinished: it has no tokens")
        return self.model_response

    @property
    def conversation(self) -> list[Message]:
        return self.messages + self.output_message_list

    @property
    def completion(self) -> Any:
        """Return the reply as an object of OpenAI's SDK, or None for Anthropic's protocol."""
        from openai.types import chat, responses  # slow to import

        kinds: Any = {"chat.completion": chat.ChatCompletion, "response": responses.Response}
        reply = self.reply or {}
        return reply.get("object") and kinds[reply["object"]].construct(**reply)

    def to_lists(self) -> dict[str, Any]:
        """Return the row: for each key one number, or one per token."""
        return self.row or make_row(self.row_turns or [(self, True)])

    def to_tensor_dict(self) -> dict[str, Any]:
        """Return the row as bool, int32 and float32 tensors: (1, T), for T tokens, or (1,)."""
        import torch  # slow to import, and the proxy does not need it

        tensors = {key: torch.tensor([value]) for key, value in self.to_lists().items()}
        return {key: x.int() if x.dtype == torch.int64 else x for key, x in tensors.items()}

    def export(self) -> dict[str, Any]:
        """Return the dict from which calls/client.py rebuilds this interaction."""
        return {name: getattr(self, name) for name in EXPORTED} | {
            "tensors": self.to_lists(),
            "parent": self.parent and self.parent.interaction_id,
            "reads": [call.interaction_id for call in self.reads],
            "model_response": vars(self.tokens),
        }


Interaction = InteractionWithTokenLogpReward  # the long name is AReaL's


def extend(digest: int, message: Message) -> int:
    """Return a conversation's digest after one more message. An empty conversation has the digest
    0. Python's hash has 64 bits and a random key, so a collision is unlikely, and nobody can
    construct one."""
    return hash((digest, canonical(message)))


class InteractionCache(dict[str, Interaction]):
    """The interactions of one session by completion id, in the order of the requests."""

    def __init__(self) -> None:
        super().__init__()
        self._conversations: dict[int, Interaction] = {}  # conversation's digest -> newest call
        self._discounted = False

    def enter(self, call: Interaction) -> Interaction:
        """Add a call, and find its parent."""
        call.parent, call.digest = self.find_parent(call.messages)
        if call.parent:
            shared = call.parent.conversation  # store every message once
            call.messages[: len(shared)] = shared
            call.turn_id = call.parent.turn_id + 1
            call.reads = [call.parent]
        self[call.interaction_id] = call
        return call

    def find_parent(self, messages: list[Message]) -> tuple[Interaction | None, int]:
        """Return (parent, digest of `messages`). The parent is the finished interaction whose
        conversation is the longest prefix of `messages`, or None."""
        parent, digest, start = None, 0, 0
        if self._conversations:  # usually, a call continues the latest conversation
            whole, latest = next(reversed(self._conversations.items()))
            conversation = latest.conversation
            if messages[: len(conversation)] == conversation:
                parent, digest, start = latest, whole, len(conversation)
        for message in messages[start:]:
            digest = extend(digest, message)
            parent = self._conversations.get(digest, parent)
        return parent, digest

    def finish(self, call: Interaction, response: ModelResponse, output: Message) -> None:
        """Store a call's answer, so that the call can be continued, rewarded and exported."""
        call.model_response = response
        call.output_message_list = [output]
        self._conversations[extend(call.digest, output)] = call

    def discard(self, call: Interaction) -> None:
        """Remove a call that failed. A finished one stays."""
        if not call.complete:
            self.pop(call.interaction_id, None)

    def finished(self) -> list[Interaction]:
        return [interaction for interaction in self.values() if interaction.complete]

    # ---- rewards

    def find(self, interaction_id: str | None, what: str) -> Interaction:
        """Return the finished call with this id. If the id is None, return the latest finished call
        that is not a side conversation. Raises Refusal if there is no such call."""
        latest = (call for call in reversed(self.values()) if call.complete and not call.is_side)
        found = next(latest, None) if interaction_id is None else self.get(interaction_id)
        if found is None or not found.complete:
            which = "call" if interaction_id is None else f"call {interaction_id!r}"
            raise Refusal(
                f"{what}: no {which} of this session has succeeded"
                " (did an agent's framework swallow an error?)"
            )
        return found

    def set_reward(self, interaction_id: str | None, reward: Any) -> None:
        self.find(interaction_id, "reward").reward = finite(reward)

    def set_last_reward(self, reward: Any) -> None:
        self.set_reward(None, reward)

    def apply_reward_discount(self, turn_discount: float = 1.0) -> None:
        """Replace every reward r(i) by the final R(i). Raises Refusal for a wrong discount, and
        RuntimeError if the rewards are already final."""
        gamma = finite(turn_discount, "discount")
        if not 0 <= gamma <= 1:
            raise Refusal(f"discount: a number from 0 to 1 is needed, not {gamma}")
        if self._discounted:
            raise RuntimeError("apply_reward_discount was already called: the rewards are final")
        self._discounted = True
        finished = self.finished()
        led_to_reward = ancestors(call for call in finished if call.reward is not None)
        below: defaultdict[Any, list[float]] = defaultdict(list)  # call -> R of its readers
        for call in reversed(finished):  # so every call comes after the calls that read it
            if call.is_left_out:
                continue
            # R(i) = r(i) + gamma * mean R(c)
            call.reward = (call.reward or 0.0) + gamma * fmean(below[call] or [0.0])
            for read in call.reads:
                if read is call.parent or call in led_to_reward:
                    below[read].append(call.reward)

    # ---- export

    def export_interactions(self, style: str = "individual") -> dict[str, Interaction]:
        """Return the interactions that become rows: with style "individual" all finished ones, with
        "concat" one for each leaf (`join_turns`). Raises Refusal for any other style."""
        check_style(style)
        rows = self.finished() if style == "individual" else join_turns(self.finished())
        return {row.interaction_id: row for row in rows}


def ancestors(calls: Iterable[Interaction]) -> set[Interaction]:
    """Return the calls, and all calls that they have read, directly or through other calls."""
    found, new = set[Interaction](), set(calls)
    while new:
        found |= new
        new = {x for call in new for x in call.reads} - found
    return found


def join_turns(finished: Sequence[Interaction]) -> list[Interaction]:
    """Return one row for each leaf, a turn whose tokens no other turn extends. The row is a copy of
    the leaf, with the row's turns in `row_turns`. If the first turn that a row trains has a parent,
    the row that trains this parent becomes the row's `parent`."""
    joined = {turn: turn.parent for turn in finished if turn.parent and extends_parent(turn)}
    inner = set(joined.values())
    rows: list[Interaction] = []
    row_of: dict[Any, Interaction] = {}  # turn -> the row that trains it
    for leaf in (turn for turn in finished if turn not in inner):
        path = [leaf]  # back to the first turn of the row
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


def extends_parent(turn: Interaction) -> bool:
    assert turn.parent is not None
    before = turn.parent.tokens.input_tokens + turn.parent.tokens.output_tokens
    return turn.tokens.input_tokens[: len(before)] == before


# a row's values for a token that was not sampled
NOT_SAMPLED = {
    "loss_mask": 0,
    "logprobs": 0.0,
    "versions": -1,
    "turn_ids": -1,
    "turn_rewards": 0.0,
    "temperatures": 1.0,
}


def make_row(turns: Sequence[tuple[Interaction, bool]]) -> dict[str, Any]:
    """Return the row of a conversation, as in the table of rollout/trajectory.py.

    `turns` has pairs (turn, whether this row trains it). Two kinds of turns stay in the row, but
    not in the loss: unrewarded side conversations, and turns whose sampling the trainer cannot
    reproduce.
    """
    leaf = turns[-1][0]
    last = leaf.tokens
    length = last.input_len + last.output_len
    row: dict[str, Any] = {
        "input_ids": last.input_tokens + last.output_tokens,
        "attention_mask": [True] * length,
        **{key: [value] * length for key, value in NOT_SAMPLED.items()},
        "rewards": leaf.reward or 0.0,
        "truncated": int(last.stop_reason == "length"),
        "side_conversations": int(leaf.is_left_out),
    }
    for turn, trained in turns:
        response, n = turn.tokens, turn.tokens.output_len
        is_trained = trained and response.trains_exactly and not turn.is_left_out
        sampled = {
            "loss_mask": [int(is_trained)] * n,
            "logprobs": response.output_logprobs,
            "versions": response.output_versions,
            "turn_ids": [turn.turn_id] * n,
            "turn_rewards": [turn.reward or 0.0] * n,
            "temperatures": [response.temperature] * n,
        }
        for key, values in sampled.items():
            row[key][response.input_len : response.input_len + n] = values
    return row
