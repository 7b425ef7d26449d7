"""Find side conversations: calls that a client program makes for itself while an agent works on the task.

For example, Claude Code and opencode request a title of the conversation from the model. Such a call belongs to the
agent's session, but its output does not help to solve the task. If the title were the last call of the session, the
title would take the reward that the agent earned.

The rule. A finished interaction is a *suspect* if conditions 1 and 2 hold:

    1. One of the patterns matches the text of the interaction's first message.
    2. The interaction has no parent and no children, and the client offered no tools.

A suspect is a side conversation if condition 3 holds, too:

    3. The session has interactions that are not suspects, and all of these have first messages that differ from the
       suspect's first message.

The rule uses only the messages, so the time of a title request makes no difference. If an agent requests its final
answer without tools, this call has the agent's own first message, so by condition 3 the call is no side conversation.
The single call of a second agent is no side conversation either, because its prompt does not ask for a title.

The patterns are regular expressions in the key rollout.openai.side_conversations. Upper and lower case make no
difference. An empty list turns the rule off. A client whose title requests match no pattern needs another pattern.

A side conversation takes no reward of the session and is not trained, unless the agent sets a reward by the call's id.
The metric side_conversations counts these rows, and the run prints a message at the first of them.
"""

import re
from collections.abc import Collection, Iterable
from typing import Any, Protocol, TypeVar

from calls.messages import Message, canonical

PATTERNS = (
    r"\b(write|generate|create|extract|provide|suggest|output)\b.{0,80}\btitles?\b",  # opencode, Claude Code, Open WebUI
    r"\bnew conversation topic\b",  # Claude Code
    r"^(quota|warmup)$",  # Claude Code, before its first real call
)


class Interaction(Protocol):
    """The fields of an interaction (cache.py) that the rule uses."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    parent: Any
    children: int


T = TypeVar("T", bound=Interaction)


def find_side_conversations(finished: Iterable[T], patterns: Collection[str]) -> list[T]:
    """Return the side conversations among `finished`, which must hold all finished interactions of a session."""
    suspects: list[T] = []
    openings = set()  # first messages of all interactions that are not suspects
    for interaction in finished:
        opening = canonical(interaction.messages[0])  # (role, text, ...)
        is_single = not (interaction.tools or interaction.parent or interaction.children)
        if is_single and any(re.search(pattern, opening[1], re.IGNORECASE | re.DOTALL) for pattern in patterns):
            suspects.append(interaction)
        else:
            openings.add(opening)
    if not openings:
        return []
    return [interaction for interaction in suspects if canonical(interaction.messages[0]) not in openings]
