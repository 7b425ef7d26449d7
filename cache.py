"""InteractionCache stores the calls of one session as a tree of conversations and passes rewards back through the tree.

An interaction is one call of an agent: the messages that the agent sent and the tokens that the model generated. The
agent sends the whole conversation with every call, so a later call begins with the messages of an earlier call:

    system - user - [A] assistant -+- user  - [B] assistant       The messages of B and C begin with the messages
                                   +- user' - [C] assistant       and the output of A, so A is the parent of both.

The parent of an interaction is the finished interaction whose messages and output are the longest prefix of the
interaction's messages. Messages are compared by meaning (calls/messages.py, `canonical`), because clients reorder keys
and change spaces. Tools and template arguments must be equal. An interaction without a parent is a root.

How a parent is found. Each message of a conversation has a *place*: a hash of the message and of the place before the
message. The first place is the template key (tools and template arguments). `enter` computes all places of a request in
one pass. The cache stores the place where each finished interaction ends. The parent of a request is the interaction
that ends at the latest of the request's places. Each place takes one dictionary access, however long the history is.
(Two different places have equal hashes with probability 2^-64.) A child reuses the message objects of its parent, so
the cache holds each message of a long conversation only one time.

Rewards. The final reward R of a turn i is computed from the leaves to the roots:

    R(i) = r(i) + gamma * mean of R(c) over the children c of i        (the mean is 0 if i has no children)

(OpenAI-Compatible Workflows, "Reward Backpropagation Process"). With gamma = 0.5 and a reward of 1 at the end, a chain
of three turns gets the final rewards 0.25, 0.5 and 1 (Agent Workflow, "Reward System"). A side conversation is a call
that a client makes for itself, such as a title. It takes no reward of the session (calls/side_conversations.py).

Export. Style "individual" makes one row of every turn. Style "concat" makes one row of every leaf, with all turns from
the root to the leaf. A turn joins its parent's row only if the turn's prompt begins with exactly the parent's tokens.
If the prompt differs, the turn starts a new row. A turn that several leaves share is trained in only one of their rows.
Thus each sampled token is trained once, in the context in which it was sampled, with the final reward of its own turn.

rollout/rows.py makes the row, and says which of a row's tokens are not trained.

Not promised. If the agent rewrites the messages or the output of a turn, the next call is not a child of this turn. If
two siblings have equal messages and outputs, the next turn becomes a child of the newer sibling.
"""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean
from typing import Any

from calls.messages import Message, Refusal, canonical
from calls.side_conversations import PATTERNS, find_side_conversations
from inference.io_struct import ModelResponse
from rollout.rows import is_left_out, make_row, row_to_tensors


@dataclass(eq=False, repr=False)
class InteractionWithTokenLogpReward:
    """One call of an agent, which is a node of the tree. A finished interaction has tokens and output messages."""

    messages: list[Message]
    interaction_id: str = ""
    template_key: str = ""  # key of the tools and template arguments, which decide the prompt with the messages
    trainable: bool = True  # False if the agent asked the proxy not to store this call
    tools: list[dict[str, Any]] = field(default_factory=list)  # tools offered to the model, in chat-completions format
    model_response: ModelResponse | None = None
    output_message_list: list[Message] = field(default_factory=list)
    completion: dict[str, Any] | None = None  # the reply as the agent received it
    reward: float | None = None  # the turn's own reward; apply_reward_discount replaces it with the final reward
    # InteractionCache sets the following fields:
    parent: "InteractionWithTokenLogpReward | None" = None
    turn: int = 0  # number of ancestors in the tree
    children: int = 0  # number of interactions that continue this one
    is_side: bool = False  # whether this call is a side conversation, which takes no reward of the session
    row_turns: list[tuple["InteractionWithTokenLogpReward", bool]] = field(default_factory=list)
    # ^ the turns in this interaction's row, each with whether the row trains it; empty: this turn alone

    @property
    def complete(self) -> bool:
        return self.model_response is not None

    @property
    def tokens(self) -> ModelResponse:
        """The tokens of the call. Raises ValueError if the call is unfinished."""
        if self.model_response is None:
            raise ValueError(f"interaction {self.interaction_id!r} is unfinished: it has no tokens")
        return self.model_response

    def continues(self, parent: "InteractionWithTokenLogpReward") -> bool:
        """Whether the prompt of this turn begins with exactly the parent's prompt and output tokens."""
        tokens = parent.tokens
        whole = tokens.input_tokens + tokens.output_tokens
        return self.tokens.input_tokens[: len(whole)] == whole

    def to_lists(self) -> dict[str, list]:
        """Return the row of this interaction as lists of numbers (rollout/rows.py)."""
        return make_row(self.row_turns or [(self, True)])

    def to_tensor_dict(self) -> dict[str, Any]:
        """Return the row of this interaction as tensors of shape (1, L) or (1,)."""
        return row_to_tensors(self.to_lists())

    def __repr__(self) -> str:
        parent = self.parent.interaction_id if self.parent else None
        return f"Interaction({self.interaction_id!r}, turn {self.turn}, reward={self.reward}, parent={parent!r})"


Interaction = InteractionWithTokenLogpReward  # short for AReaL's name


def finite(reward: Any) -> float:
    """Return `reward` as a float. Raises Refusal, a ValueError, if it is not a finite number (a string, nan, inf)."""
    try:
        if math.isfinite(reward):
            return float(reward)
    except (TypeError, OverflowError):  # not a number, or an integer too large for a float
        pass
    raise Refusal(f"reward: a finite number is needed, not {reward!r}")


def walk(place: Hashable, messages: list[Message]) -> list[Hashable]:
    """Return the places along `messages`: first `place` itself, then the place after each message."""
    return list(accumulate(messages, lambda here, message: hash((here, canonical(message))), initial=place))


def end_of(interaction: Interaction) -> Hashable:
    """Return the place after the output of a finished interaction. The new messages of its children follow there."""
    return walk(interaction.template_key, interaction.messages + interaction.output_message_list)[-1]


class InteractionCache(OrderedDict[str, Interaction]):
    """The interactions of one session by completion id, in the order of their requests.

    The proxy adds a call with `enter`. When the call ends, the proxy calls `finish` or, after a failure, `discard`.
    """

    def __init__(self, side_patterns: Collection[str] = PATTERNS) -> None:
        super().__init__()
        self.side_patterns = side_patterns
        # All mutable state, in addition to the dictionary itself:
        self._ends: dict[Hashable, Interaction] = {}  # place -> finished interaction that ends at this place
        self._unfinished: dict[str, Hashable] = {}  # id -> place after the last message of the request
        self._discounted = False

    # ---- queries

    def finished(self) -> list[Interaction]:
        """Return the finished interactions, in the order of their requests."""
        return [interaction for interaction in self.values() if interaction.complete]

    def find_parent(self, places: list[Hashable]) -> Interaction | None:
        """Return the finished interaction that ends at the last possible place in `places`, or None without one."""
        for place in reversed(places):
            if place in self._ends:
                return self._ends[place]
        return None

    def mark_side_conversations(self) -> list[Interaction]:
        """Set `is_side` of every interaction from the current calls of the session; return the side conversations."""
        side = find_side_conversations(self.finished(), self.side_patterns)
        for interaction in self.values():
            interaction.is_side = interaction in side
        return side

    # ---- the life of a call

    def enter(self, interaction_id: str, interaction: Interaction) -> Interaction:
        """Add an interaction to the tree, find its parent, and return the interaction.

        An interaction that already has tokens is also finished. Raises ValueError if the interaction has no messages or
        if the cache already contains the id.
        """
        if not interaction.messages:
            raise ValueError(f"interaction {interaction_id!r} has no messages")
        if interaction_id in self:
            raise ValueError(f"interaction {interaction_id!r} is already in the cache")
        places = walk(interaction.template_key, interaction.messages)
        interaction.interaction_id = interaction_id
        interaction.parent = parent = self.find_parent(places)
        if parent:
            parent.children += 1
            interaction.turn = parent.turn + 1
            history = parent.messages + parent.output_message_list
            interaction.messages = history + interaction.messages[len(history) :]
        self[interaction_id] = interaction
        self._unfinished[interaction_id] = places[-1]
        if interaction.model_response:
            self.finish(interaction_id, interaction.model_response, interaction.output_message_list)
        return interaction

    def finish(self, interaction_id: str, response: ModelResponse, output: list[Message]) -> None:
        """Store the tokens and the output of a call. A finished call can be a parent, take a reward and be exported."""
        interaction = self[interaction_id]
        interaction.model_response, interaction.output_message_list = response, output
        self._ends[walk(self._unfinished.pop(interaction_id), output)[-1]] = interaction

    def discard(self, interaction_id: str) -> None:
        """Remove an unfinished interaction whose call failed or was cancelled. A finished interaction stays."""
        if self._unfinished.pop(interaction_id, None) is not None:
            self._remove(interaction_id)

    def drop_orphan(self, interaction_id: str) -> None:
        """Remove a finished interaction whose reply the client never read. An interaction with children stays."""
        interaction = self.get(interaction_id)
        if interaction is None or not interaction.complete or interaction.children:
            return
        self._remove(interaction_id)
        place = end_of(interaction)
        if self._ends[place] is interaction:
            del self._ends[place]
            for twin in self.finished():  # an older interaction with equal messages and output takes the place
                if end_of(twin) == place:
                    self._ends[place] = twin

    def _remove(self, interaction_id: str) -> None:
        removed = self.pop(interaction_id)
        if removed.parent:
            removed.parent.children -= 1

    # ---- rewards

    def set_reward(self, interaction_id: str, reward: Any) -> None:
        """Set the reward of one finished interaction.

        Raises KeyError if the interaction is unknown or unfinished, and ValueError if the reward is not finite.
        """
        if interaction_id not in self or not self[interaction_id].complete:
            raise KeyError(f"interaction_id: no finished interaction {interaction_id!r} in this session")
        self[interaction_id].reward = finite(reward)

    def set_last_reward(self, reward: Any) -> None:
        """Reward the last finished call that is not a side conversation. Raises KeyError if there is no such call."""
        self.mark_side_conversations()
        finished = [interaction for interaction in self.finished() if not interaction.is_side]
        if not finished:
            raise KeyError("reward: no call of this session has succeeded (did an agent's framework swallow an error?)")
        self.set_reward(finished[-1].interaction_id, reward)

    def apply_reward_discount(self, turn_discount: float = 1.0) -> None:
        """Replace every reward with the final reward, R(i) = r(i) + gamma * mean of R(children).

        A child is always younger than its parent, so the reversed order visits every child before its parent.
        A second call would count rewards twice, so a second call raises RuntimeError.
        """
        if self._discounted:
            raise RuntimeError("apply_reward_discount was already called; the rewards are the final ones")
        gamma = finite(turn_discount)
        self._discounted = True
        self.mark_side_conversations()
        child_rewards: defaultdict[Any, list[float]] = defaultdict(list)  # parent (None: roots) -> R of its children
        for interaction in reversed(self.finished()):
            if is_left_out(interaction):
                continue
            interaction.reward = (interaction.reward or 0.0) + gamma * fmean(child_rewards[interaction] or [0.0])
            child_rewards[interaction.parent].append(interaction.reward)

    # ---- rows

    def export_interactions(self, style: str = "individual") -> dict[str, Interaction]:
        """Return the interactions that become training rows, by id.

        Style "individual" returns every finished interaction, style "concat" only the last interaction of each row.
        Raises ValueError for any other style.
        """
        if style not in ("individual", "concat"):
            raise Refusal(f"style: individual or concat is needed, not {style!r}")
        self.mark_side_conversations()
        finished = self.finished()
        joined = {i: i.parent for i in finished if style == "concat" and i.parent and i.continues(i.parent)}
        inner = set(joined.values())
        leaves = [interaction for interaction in finished if interaction not in inner]
        trained: set[Interaction] = set()
        for leaf in leaves:
            path = [leaf]  # from the leaf to the first turn of its row
            while path[-1] in joined:
                path.append(joined[path[-1]])
            leaf.row_turns = [(turn, turn not in trained) for turn in reversed(path)]
            trained.update(path)
        return {leaf.interaction_id: leaf for leaf in leaves}

    def __repr__(self) -> str:
        unset = sum(i.reward is None for i in self.values())
        return f"InteractionCache({len(self)} interactions, {len(self._unfinished)} unfinished, {unset} unrewarded)"
