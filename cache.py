"""InteractionCache: every call of an agent with its tokens, as a tree in which reward flows back.

An interaction is one call: the messages that were sent, the tokens that came back. An agent's calls form trees.
Turn 2 of a conversation extends turn 1; best-of-n draws siblings; a side question starts a root of its own.

The parent of an interaction is the finished one whose messages + output are the longest prefix of its own
messages, equal in meaning (messages.canonical), under the same tools and template arguments. A conversation stands
at a *place* after each of its messages: a running hash of their canonical forms, begun with tools and template. The
places of a request are computed in one pass, when it is entered; the cache remembers which interaction ended at which
place. So a parent is found by looking back from the last message: that costs a look for each new message, however
long the history and however many interactions there are. (Two places are equal by chance once in 2^64.) A child
takes its history's messages from its parent, so that a conversation of n turns is kept once and not n times.

    system - user - [A] assistant - user - [B] assistant          A is the parent of B and of C:
                                         \\ user' - [C] assistant    their messages begin with all of A

The final reward of a turn is

    R(i) = r(i) + gamma * mean of R(c) over the children c of i        (0 where there are none)

leaves first (docs/openai_workflows.txt, "Reward Backpropagation Process"). In a chain that is the geometric
series of docs/agent_workflow.txt. It follows the tree and never the order of creation.

Export. "individual": every turn is a row, prompt and output. "concat": every leaf is a row that holds all turns
from its root, so that a conversation is one sequence. Before a turn joins its parent's row its prompt is compared
with the parent's tokens one by one; where they differ the turn starts a row of its own. A turn that several
leaves share is trained in the first of them only. Each sampled token is therefore trained exactly once, in
exactly the context it was sampled in, with the final reward of its own turn.

A row is token-aligned: position t speaks of token t. `to_lists` and `to_tensor_dict` read the interactions when
they are called, so a reward that is set later shows.

Side conversations. Beside the agent's own work some clients ask for a title, or what the topic is. Such a call is
a root of its own, and neither it nor its tokens have anything to do with the reward. The rule:

    a side conversation is a single turn without tools that begins with another message than a conversation which was
    running at the same moment, and which has tools or more than one turn

It takes no reward of the session (set_last_reward passes it by) and, unless it is given one by its id, is not trained.
Calls one after the other are never side conversations: the last of them takes the reward, whatever it looks like.

It does not promise to recognise a history whose texts an agent has rewritten (that turn is a root), nor to tell
two siblings apart that said the same words: who goes on from there goes on from the newer one. Tokens whose
sampling training cannot reproduce (top_p, penalties: `trains_exactly` is false), and turns that were asked not to
be stored, stay in the row and out of the loss. A turn whose reader hung up in the middle is one that ended there.

AReaL compares the messages of all candidates key by key, discounts along the order of creation (so a sibling's
reward leaks), gives the last reward to a call that never finished, checks only the length of a prefix, drops the
reward of an inner turn in concat, trains a shared turn once per leaf, and caches its tensors.
"""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING, Any

from calls.messages import Message, canonical

if TYPE_CHECKING:
    from torch import Tensor

    from inference.io_struct import ModelResponse


@dataclass(eq=False, repr=False)
class InteractionWithTokenLogpReward:
    """One call of an agent. It is unfinished until it has its tokens and its output messages."""

    messages: list[Message]
    interaction_id: str = ""
    template_key: str = ""  # tools and template arguments: what else decides the prompt
    trainable: bool = True  # false: the agent asked for this turn not to be stored
    tools: list[dict[str, Any]] = field(default_factory=list)  # that it could call, in chat form
    model_response: "ModelResponse | None" = None
    output_message_list: list[Message] = field(default_factory=list)
    completion: dict[str, Any] | None = None  # the reply as the agent got it
    reward: float | None = None  # its own; after apply_reward_discount the final one
    parent: "InteractionWithTokenLogpReward | None" = None
    turn: int = 0  # its depth in the tree
    earlier: list[tuple["InteractionWithTokenLogpReward", bool]] = field(default_factory=list)
    # ^ set by an export in style concat: the turns before this one in its row, and whether the row trains them
    children: int = 0  # interactions in the tree that go on from this one
    beside: list["InteractionWithTokenLogpReward"] = field(default_factory=list)
    # ^ calls that were running at the same moment and begin with another message

    @property
    def complete(self) -> bool:
        return self.model_response is not None

    @property
    def trains(self) -> bool:
        """Whether its sampled tokens may enter the loss."""
        return self.trainable and self.tokens.trains_exactly and not (self.is_side and self.reward is None)

    @property
    def is_main(self) -> bool:
        """Whether it has tools or belongs to a conversation of more than one turn."""
        return bool(self.tools or self.children or self.parent)

    @property
    def is_side(self) -> bool:
        """Whether it is a side conversation (the rule above), as far as one can tell by now."""
        return not self.is_main and any(other.complete and other.is_main for other in self.beside)

    @property
    def tokens(self) -> "ModelResponse":
        if self.model_response is None:
            raise ValueError(f"interaction {self.interaction_id!r} is unfinished: it has no tokens")
        return self.model_response

    def continues(self, parent: "InteractionWithTokenLogpReward") -> bool:
        """Whether its prompt begins with the very tokens of the parent's prompt and output."""
        tokens = parent.tokens
        whole = tokens.input_tokens + tokens.output_tokens
        return self.tokens.input_tokens[: len(whole)] == whole

    def to_lists(self) -> dict[str, list]:
        """One row of length L, a list of L numbers a key (`rewards`: one number).

        Keys: input_ids, attention_mask, loss_mask (1: train), logprobs (behaviour), versions (prompt -1),
        turn_ids (k for the k-th turn of the conversation, else -1), turn_rewards (the final reward of the
        token's turn, else 0), temperatures (else 1); and one number a row: rewards (this turn's), truncated (1: its
        length limit cut it), regenerated (segments asked for again). Raises ValueError if unfinished.
        """
        last = self.tokens
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
            "rewards": [self.reward or 0.0],
            "truncated": [int(last.stop_reason == "length")],
            "regenerated": [0],
        }
        for turn, trained in [*self.earlier, (self, True)]:
            n = turn.tokens.output_len
            span = slice(turn.tokens.input_len, turn.tokens.input_len + n)
            row["loss_mask"][span] = [int(trained and turn.trains)] * n
            row["logprobs"][span] = turn.tokens.output_logprobs
            row["versions"][span] = turn.tokens.output_versions
            row["turn_ids"][span] = [turn.turn] * n
            row["turn_rewards"][span] = [turn.reward or 0.0] * n
            row["temperatures"][span] = [turn.tokens.temperature] * n
            row["regenerated"][0] += turn.tokens.regenerated * trained  # a shared turn counts once
        return row

    def to_tensor_dict(self) -> "dict[str, Tensor]":
        """`to_lists` as tensors (1, L), `rewards` (1,), in the dtypes of rollout/trajectory.py."""
        import torch

        from rollout.trajectory import ROW_KEYS, TOKEN_KEYS

        row = self.to_lists()
        tensors = {key: torch.tensor(row[key], dtype=dtype) for key, (dtype, _) in ROW_KEYS.items() if key in row}
        return {key: torch.tensor([row[key]], dtype=dtype) for key, (dtype, _) in TOKEN_KEYS.items()} | tensors

    def __repr__(self) -> str:
        parent = self.parent.interaction_id if self.parent else None
        return f"Interaction({self.interaction_id!r}, turn {self.turn}, reward={self.reward}, parent={parent!r})"


def finite(reward: Any) -> float:
    """`reward` as a float. Raises ValueError for what is no finite number (a string, nan, inf)."""
    try:
        if math.isfinite(reward):
            return float(reward)
    except (TypeError, OverflowError):  # no number at all, or no float
        pass
    raise ValueError(f"reward: a finite number is needed, not {reward!r}")


def walk(place: Hashable, messages: list[Message]) -> list[Hashable]:
    """The places from `place` along `messages`, both ends included."""
    return list(accumulate(messages, lambda here, message: hash((here, canonical(message))), initial=place))


def end_of(interaction: InteractionWithTokenLogpReward) -> Hashable:
    """The place at which a finished interaction ends, and its children begin."""
    return walk(interaction.template_key, interaction.messages + interaction.output_message_list)[-1]


class InteractionCache(OrderedDict[str, InteractionWithTokenLogpReward]):
    """The interactions of one session, by completion id, in the order in which they were asked for.

    `cache[id] = interaction` enters it and finds its parent, `finish` gives it its tokens, `discard` takes one out
    again. Assigning a finished interaction does both steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ends: dict[Hashable, InteractionWithTokenLogpReward] = {}  # place -> the finished one that ends there
        self._unfinished: dict[str, Hashable] = {}  # interaction id -> the place where its messages end
        self._discounted = False

    def finished(self) -> list[InteractionWithTokenLogpReward]:
        """Those with tokens, in the order in which they were asked for."""
        return [interaction for interaction in self.values() if interaction.complete]

    def find_parent(self, places: list[Hashable]) -> InteractionWithTokenLogpReward | None:
        """The finished interaction whose conversation is the longest prefix; `places` begin with the template key."""
        return next((self._ends[place] for place in reversed(places) if place in self._ends), None)

    def __setitem__(self, interaction_id: str, interaction: InteractionWithTokenLogpReward) -> None:
        """Enter an interaction and find its parent. Raises ValueError without messages or for a known id."""
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
        for other in map(self.__getitem__, self._unfinished):
            if canonical(other.messages[0]) != canonical(interaction.messages[0]):
                interaction.beside.append(other)
                other.beside.append(interaction)
        super().__setitem__(interaction_id, interaction)
        self._unfinished[interaction_id] = places[-1]
        if interaction.model_response:
            self.finish(interaction_id, interaction.model_response, interaction.output_message_list)

    def __delitem__(self, interaction_id: str) -> None:
        """It leaves no trace: its parent has a child less."""
        if parent := self[interaction_id].parent:
            parent.children -= 1
        super().__delitem__(interaction_id)

    def finish(self, interaction_id: str, response: "ModelResponse", output: list[Message]) -> None:
        """The call came back: from here on it can be a parent, take a reward and be exported."""
        interaction = self[interaction_id]
        interaction.model_response, interaction.output_message_list = response, output
        self._ends[walk(self._unfinished.pop(interaction_id), output)[-1]] = interaction

    def discard(self, interaction_id: str) -> None:
        """The call failed or was given up: an unfinished interaction leaves no trace. A finished one stays."""
        if self._unfinished.pop(interaction_id, None) is not None:
            del self[interaction_id]

    def drop_orphan(self, interaction_id: str) -> None:
        """Nobody reads this turn, its caller asks anew: it leaves no trace, unless something goes on from it."""
        interaction = self.get(interaction_id)
        if interaction and interaction.complete and not interaction.children:
            del self[interaction_id]
            place = end_of(interaction)
            if self._ends[place] is interaction:
                del self._ends[place]
                self._ends.update((place, twin) for twin in self.finished() if end_of(twin) == place)

    def set_reward(self, interaction_id: str, reward: Any) -> None:
        """Raises KeyError for an id that is unknown or unfinished, ValueError for what is not finite."""
        if interaction_id not in self or not self[interaction_id].complete:
            raise KeyError(f"interaction_id: no finished interaction {interaction_id!r} in this session")
        self[interaction_id].reward = finite(reward)

    def set_last_reward(self, reward: Any) -> None:
        """Reward the last interaction that finished its call and is no side conversation."""
        finished = [interaction for interaction in self.finished() if not interaction.is_side]
        if not finished:
            raise KeyError("reward: no call of this session has succeeded (did an agent's framework swallow an error?)")
        self.set_reward(finished[-1].interaction_id, reward)

    def apply_reward_discount(self, turn_discount: float = 1.0) -> None:
        """Replace every reward by the final one, R(i) = r(i) + gamma * mean R(children), leaves first.

        A child is always younger than its parent, so reversed order visits leaves first, however deep the tree.
        Raises RuntimeError the second time: rewards would be counted twice.
        """
        if self._discounted:
            raise RuntimeError("apply_reward_discount was already called; the rewards are the final ones")
        gamma = finite(turn_discount)
        self._discounted = True
        below: defaultdict[Any, list[float]] = defaultdict(list)  # R of the children, by parent (None: of the roots)
        for interaction in reversed(self.finished()):
            if interaction.is_side and interaction.reward is None:
                continue
            interaction.reward = (interaction.reward or 0.0) + gamma * fmean(below[interaction] or [0.0])
            below[interaction.parent].append(interaction.reward)

    def export_interactions(self, style: str = "individual") -> dict[str, InteractionWithTokenLogpReward]:
        """Rows for training, by id: all finished interactions, or one per leaf. Raises ValueError for a style
        that is neither "individual" nor "concat"."""
        if style not in ("individual", "concat"):
            raise ValueError(f"style: individual or concat is needed, not {style!r}")
        finished, joins = self.finished(), style == "concat"
        before = {i: i.parent for i in finished if joins and i.parent and i.continues(i.parent)}
        inner, trained = set(before.values()), set()
        leaves = [i for i in finished if i not in inner]
        for leaf in leaves:
            turn, leaf.earlier = leaf, []
            while turn in before:
                turn = before[turn]
                leaf.earlier.append((turn, turn not in trained))
                trained.add(turn)
            leaf.earlier.reverse()
        return {leaf.interaction_id: leaf for leaf in leaves}

    def __repr__(self) -> str:
        unset = sum(i.reward is None for i in self.values())
        return f"InteractionCache({len(self)} interactions, {len(self._unfinished)} unfinished, {unset} unrewarded)"
