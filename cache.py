"""`InteractionCache` stores the calls of one session as a tree, and computes the final reward of each call.

An interaction is one call of an agent: the messages that the agent sent and the tokens that the model generated. The
agent sends the whole conversation with every call, so a later call begins with the messages of an earlier call:

    system - user - [A] assistant -+- user  - [B] assistant
                                   +- user' - [C] assistant

The messages of the calls B and C begin with the messages and the output of call A, so call A is the parent of both.

The tree. The messages of a session form a prefix tree. An edge of the prefix tree is a message. A node stands for a
prefix: the messages on the path from the first node to this node. The first node stands for the empty prefix. Each
finished interaction belongs to the node that stands for its messages and its output. To find the parent of a new
interaction, the cache follows the interaction's messages through the tree, starting at the first node. The parent of
the new interaction is the finished interaction whose conversation is the longest prefix of the new interaction's
messages. An interaction without a parent is a root. A client may change the order of JSON keys or the white space when
it sends a message a second time. If two messages after the same prefix have the same meaning, they share one edge of
the tree (calls/messages.py, `canonical`).

A call usually continues the conversation of the interaction that finished last, so the cache first compares the call's
messages with this conversation.

Rewards. Every turn i has an own reward r(i). From the leaves to the roots, the cache computes the final reward R(i):

    R(i) = r(i) + gamma * mean of R(c) over the children c of i        (the mean is 0 if i has no children)

AReaL's document OpenAI-Compatible Workflows calls the computation of final rewards the "Reward Backpropagation
Process". If gamma is 0.5 and three consecutive turns get the rewards 0, 0 and 1, their final rewards are 0.25, 0.5 and
1 (AReaL's document Agent Workflow, "Reward System"). A side conversation is a call that a client makes for its own
purposes, for example to get a title for the conversation. A side conversation does not get the session's reward
(calls/side_conversations.py).

Export. A row is a sequence of tokens for training. With style "individual" each turn has its own row. With style
"concat" each leaf has a row, which holds the turns from the root to the leaf. With both styles, each sampled token of a
trainable turn is trained exactly once, with the final reward of its own turn. The server sampled each trained token
after exactly those tokens that precede it in the row. The module rollout/rows.py makes the rows.

Not promised. If an agent changes the messages or the output of a turn, the agent's next call is not a child of this
turn. If two turns have identical messages and outputs, a call that continues their conversation becomes a child of the
newer turn.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from math import fsum, isclose
from statistics import fmean
from typing import Any

from calls.messages import Message, Refusal, canonical
from calls.side_conversations import PATTERNS, find_side_conversations, make_matcher
from inference.io_struct import ModelResponse
from rollout.interaction import Interaction, InteractionWithTokenLogpReward
from rollout.rows import is_left_out, join_turns

__all__ = [
    "Interaction",
    "InteractionCache",
    "InteractionWithTokenLogpReward",
    "check_style",
    "finite",
]

LARGEST_REWARD = (
    1e30  # maximum absolute value of a reward, so that a sum of many rewards fits into a float32
)


def finite(reward: Any) -> float:
    """Return `reward` as a float. Raises Refusal, a ValueError, if `reward` is not a number or is too large."""
    try:
        if abs(reward) <= LARGEST_REWARD:
            return float(reward)
    except TypeError:  # not a number
        pass
    raise Refusal(f"reward: a finite number of at most {LARGEST_REWARD:g} is needed")


def check_style(style: Any) -> None:
    """Raise Refusal, a ValueError, if `style` is not the name of an export style."""
    if style not in ("individual", "concat"):
        raise Refusal(f"style: individual or concat is needed, not {style!r}")


@dataclass(eq=False)
class Node:
    """A node of the prefix tree. The node stands for a prefix: the list of the messages on the path to the node."""

    edges: dict[Hashable, "Node"] = field(
        default_factory=dict
    )  # canonical message -> the node after this message
    ended: list[Interaction] = field(
        default_factory=list
    )  # finished interactions of this node, oldest first


def are_identical(messages: list[Message], others: list[Message]) -> bool:
    """Return whether two lists of messages are equal. In the arguments of tool calls, True and 1 count as different."""
    pairs = (
        (a["tool_calls"], b["tool_calls"]) for a, b in zip(messages, others) if a.get("tool_calls")
    )
    return messages == others and all(
        repr(a) == repr(b) for a, b in pairs
    )  # `==` treats True and 1 as equal


class PrefixTree:
    """The finished interactions of a session, each at the node that stands for its whole conversation."""

    def __init__(self) -> None:
        self.first = Node()  # the node of the empty prefix
        # The conversation of the interaction that finished last, and the node of this conversation:
        self.newest: tuple[list[Message], Node] = ([], self.first)

    def follow(self, messages: list[Message]) -> tuple[Interaction | None, Node, int]:
        """Walk through the tree along the edges of `messages`, until a message has no edge.

        Return the finished interaction nearest to the end of the path, the last node of the path, and the number of
        edges of the path.
        """
        conversation, node = self.newest
        known = len(conversation)
        if not are_identical(messages[:known], conversation):
            node, known = self.first, 0
        parent = node.ended[-1] if node.ended else None
        for message in messages[known:]:
            following = node.edges.get(canonical(message))
            if following is None:
                break
            node, known = following, known + 1
            parent = node.ended[-1] if node.ended else parent
        return parent, node, known

    def insert(self, interaction: Interaction, node: Node, edges: list[tuple]) -> None:
        """Add a finished interaction at the end of the path that begins at `node` and has the edges `edges`."""
        for edge in edges:
            node = node.edges.setdefault(edge, Node())
        node.ended.append(interaction)
        self.newest = interaction.conversation, node

    def remove(self, interaction: Interaction) -> None:
        """Remove a finished interaction. The nodes stay."""
        self.follow(interaction.conversation)[1].ended.remove(interaction)
        self.newest = [], self.first


class InteractionCache(Mapping[str, Interaction]):
    """A mapping from the completion ids of one session to its interactions, in the order of the requests.

    The proxy adds a call with `enter`. When the call ends, the proxy calls `finish` or, after a failure, `discard`.
    """

    def __init__(self, side_patterns: Collection[str] = PATTERNS) -> None:
        self._matches_side_pattern = make_matcher(side_patterns)
        # All mutable state:
        self._interactions: dict[str, Interaction] = {}  # finished and unfinished interactions
        self._tree = PrefixTree()  # the finished interactions
        # The place of each unfinished call in the tree, by the call's id: the last existing node on the path of the
        # call's messages, and one edge for each message after this node.
        self._unfinished: dict[str, tuple[Node, list[tuple]]] = {}
        self._discounted = False

    def __getitem__(self, interaction_id: str) -> Interaction:
        return self._interactions[interaction_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._interactions)

    def __len__(self) -> int:
        return len(self._interactions)

    # ---- methods that add, finish or remove a call

    def enter(self, interaction_id: str, interaction: Interaction) -> Interaction:
        """Add an interaction, find its parent, and return the interaction.

        If the interaction already has tokens, mark it as finished. Raises ValueError if the interaction has no messages
        or if its id is already in the cache. Raises Refusal if a message has no canonical form.
        """
        if not interaction.messages:
            raise ValueError(f"interaction {interaction_id!r} has no messages")
        if interaction_id in self:
            raise ValueError(f"interaction {interaction_id!r} is already in the cache")
        interaction.interaction_id = interaction_id
        found, node, known = self._tree.follow(interaction.messages)
        self._unfinished[interaction_id] = (
            node,
            [canonical(message) for message in interaction.messages[known:]],
        )
        if found:
            shared = found.conversation  # the parent's message objects are reused to save memory
            interaction.messages = shared + interaction.messages[len(shared) :]
        interaction.parent = parent = interaction.parent or found
        if parent:
            parent.children += 1
            interaction.turn = parent.turn + 1
        self._interactions[interaction_id] = interaction
        if interaction.model_response:
            self.finish(interaction_id, interaction.model_response, interaction.output_message_list)
        return interaction

    def finish(self, interaction_id: str, response: ModelResponse, output: list[Message]) -> None:
        """Mark a call as finished, and store its tokens and its output.

        A call can become a parent, get a reward or be exported only after it has finished. Raises Refusal if a message
        of the output has no canonical form. A call whose output was refused stays unfinished.
        """
        interaction, said = self[interaction_id], [canonical(message) for message in output]
        node, rest = self._unfinished.pop(interaction_id)
        interaction.model_response, interaction.output_message_list = response, output
        self._tree.insert(interaction, node, rest + said)

    def discard(self, interaction_id: str) -> None:
        """Remove an unfinished interaction, because its call failed or was cancelled. Leave a finished interaction
        unchanged."""
        if self._unfinished.pop(interaction_id, None) is not None:
            self._remove(interaction_id)

    def drop_orphan(self, interaction_id: str) -> None:
        """Remove a finished interaction whose reply the client never read, unless the interaction has children."""
        interaction = self.get(interaction_id)
        if interaction is not None and interaction.complete and not interaction.children:
            self._tree.remove(interaction)
            self._remove(interaction_id)

    def find_parent(self, messages: list[Message]) -> Interaction | None:
        """Return the finished interaction whose conversation is the longest prefix of `messages`, or None."""
        return self._tree.follow(messages)[0]

    def _remove(self, interaction_id: str) -> None:
        removed = self._interactions.pop(interaction_id)
        if removed.parent:
            removed.parent.children -= 1

    # ---- rewards

    def set_reward(self, interaction_id: str, reward: Any) -> None:
        """Set the reward of one finished interaction.

        Raises KeyError if the interaction is unknown or unfinished. Raises ValueError if the reward is not a number, or
        if its absolute value is above LARGEST_REWARD.
        """
        if interaction_id not in self or not self[interaction_id].complete:
            raise KeyError(
                f"interaction_id: no finished interaction {interaction_id!r} in this session"
            )
        self[interaction_id].reward = finite(reward)

    def set_last_reward(self, reward: Any) -> None:
        """Set the reward of one finished call that is not a side conversation: the call whose request came last.

        Raises KeyError if the session has only unfinished calls and side conversations.
        """
        self.mark_side_conversations()
        finished = [interaction for interaction in self.finished() if not interaction.is_side]
        if not finished:
            raise KeyError(
                "reward: no call of this session has succeeded (did an agent's framework swallow an error?)"
            )
        self.set_reward(finished[-1].interaction_id, reward)

    def apply_reward_discount(self, turn_discount: float = 1.0) -> None:
        """Replace the reward of each turn i by the final reward, R(i) = r(i) + gamma * mean of R(children).

        A child is always younger than its parent, so a loop in reverse order visits every child before its parent. If
        the method is called a second time, it raises RuntimeError instead of discounting the rewards twice.
        """
        if self._discounted:
            raise RuntimeError(
                "apply_reward_discount was already called; the rewards are the final ones"
            )
        gamma = finite(turn_discount)
        if not 0 <= gamma <= 1:
            raise Refusal(f"discount: a number from 0 to 1 is needed, not {gamma}")
        self._discounted = True
        self.mark_side_conversations()
        own = {turn: turn.reward or 0.0 for turn in self.finished() if not is_left_out(turn)}
        child_rewards: defaultdict[Any, list[float]] = defaultdict(
            list
        )  # parent -> final rewards of its children
        for turn in reversed(own):
            turn.reward = own[turn] + gamma * fmean(child_rewards[turn] or [0.0])
            child_rewards[turn.parent].append(turn.reward)
        self._check_rewards(own, gamma)

    def _check_rewards(self, own: dict[Interaction, float], gamma: float) -> None:
        """Check that the final rewards of the roots add up to the weighted sum of the turns' own rewards.

        In the weighted sum, the weight of a root is 1. The weight of a child is gamma * (weight of its parent) /
        (number of the parent's children). Raises RuntimeError if the sum of final rewards differs from the weighted
        sum.
        """
        siblings, weights = Counter(turn.parent for turn in own), dict[Any, float]()
        for turn in own:
            weights[turn] = (
                gamma * weights[turn.parent] / siblings[turn.parent] if turn.parent in own else 1.0
            )
        parts = [weights[turn] * own[turn] for turn in own]
        total = fsum(turn.reward or 0.0 for turn in own if turn.parent not in own)
        if not isclose(total, fsum(parts), rel_tol=1e-9, abs_tol=1e-9 * fsum(map(abs, parts))):
            raise RuntimeError(
                f"rewards: the final rewards of the roots add up to {total}, not to {fsum(parts)}"
            )

    # ---- queries

    def finished(self) -> list[Interaction]:
        """Return the finished interactions, in the order of their requests."""
        return [interaction for interaction in self.values() if interaction.complete]

    def mark_side_conversations(self) -> list[Interaction]:
        """Set `is_side` of every interaction, and return the finished interactions that are side conversations."""
        side = find_side_conversations(self.finished(), self._matches_side_pattern)
        for interaction in self.values():
            interaction.is_side = interaction in side
        return side

    def export_interactions(self, style: str = "individual") -> dict[str, Interaction]:
        """Return a dict {id: interaction} of the interactions that become training rows. Raises Refusal, a ValueError,
        for an unknown style.

        Style "individual" returns every finished interaction. Style "concat" returns a copy of each leaf. The attribute
        `row_turns` of the copy lists the turns of the leaf's row (`join_turns`).
        """
        check_style(style)
        self.mark_side_conversations()
        rows = self.finished() if style == "individual" else join_turns(self.finished())
        return {row.interaction_id: row for row in rows}

    def __repr__(self) -> str:
        unset = sum(i.reward is None for i in self.values())
        return f"InteractionCache({len(self)} interactions, {len(self._unfinished)} unfinished, {unset} unrewarded)"
