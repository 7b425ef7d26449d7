"""Side conversations: calls that a client makes for itself while an agent works on the task.

Claude Code and opencode ask the model for a title of the conversation. Such a call travels in the agent's session, but
it says nothing about the task. If it were the last call of the session, it would take the reward that the agent earned.

The rule. A finished interaction is a side conversation if all of this holds:

    1. One of the patterns matches the text of its first message.
    2. It is a single turn, and it was offered no tools.
    3. It begins with another message than every interaction of the session for which 1 and 2 do not both hold,
       and there is at least one such interaction.

The rule reads only what was said, so it gives one answer for a title before, during and after the agent's work. A
final answer that the agent asks for without tools begins with the agent's own first message, so 3 keeps it. A second
agent with a single call is kept, because its prompt does not ask for a title.

The patterns are the key rollout.openai.side_conversations: regular expressions, searched without regard to case. An
empty list turns the rule off. A client whose titles the patterns do not know needs one more pattern.

A side conversation takes no reward of the session and is not trained, unless the agent rewards it by its id. The number
of such rows is the metric side_conversations, and a run says so when it meets the first one.
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
    """What the rule reads of an interaction (cache.py)."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    parent: Any
    children: int


T = TypeVar("T", bound=Interaction)


def find_side_conversations(finished: Iterable[T], patterns: Collection[str]) -> list[T]:
    """Return the interactions that are side conversations by the rule above; `finished` is a whole session's."""
    suspects: list[T] = []
    openings = set()  # first messages of all other interactions
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
