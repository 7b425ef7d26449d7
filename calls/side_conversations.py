"""Find side conversations: calls that a client program makes for its own purposes while an agent works on the task.

For example, Claude Code and opencode ask the model for a title of the conversation. Such a call belongs to the agent's
session, but the call's output does not help to solve the task. If the title request were the session's last call, the
reward for the agent's work would go to the title.

The rule. A finished interaction is a *suspect* if conditions 1 and 2 hold:

    1. One of the patterns matches the text of the interaction's first message.
    2. The interaction has no parent and no children, and the client offered no tools.

A suspect is a side conversation if condition 3 also holds:

    3. Some interactions of the session are not suspects, and all of these begin with a different first message.

The rule ignores the time of a call, so a title request may come before, between or after the agent's calls. An agent
may request its final answer without tools. Such a call begins with the agent's own first message, so by condition 3 the
call is no side conversation. A second agent may make a single call. The prompt of such a call requests no title, so by
condition 1 the call is no suspect.

The configuration key rollout.openai.side_conversations contains the patterns, which are regular expressions. The
patterns ignore upper and lower case. An empty list turns the rule off. If a client's title requests match no pattern,
the list needs an additional pattern.

A side conversation takes no reward of the session and is not trained. If the agent sets a reward by the call's id, the
call is trained. The metric side_conversations counts the side conversations. When the first side conversation is found,
the run prints a message.
"""

import re
from collections.abc import Collection, Iterable
from typing import Any

from calls.messages import canonical

PATTERNS = (
    # opencode, Claude Code, Open WebUI
    r"\b(write|generate|create|extract|provide|suggest|output)\b.{0,80}\btitles?\b",
    r"\bnew conversation topic\b",  # Claude Code
    r"^(quota|warmup)$",  # Claude Code, before its first real call
)


def find_side_conversations(finished: Iterable[Any], patterns: Collection[str]) -> list[Any]:
    """Return the side conversations among `finished`, which are all finished interactions of a session."""
    suspects = []
    openings = set()  # first messages of all interactions that are not suspects
    for interaction in finished:
        opening = canonical(interaction.messages[0])  # a tuple (role, text, tool calls, id of a tool result)
        is_single = not (interaction.tools or interaction.parent or interaction.children)
        if is_single and any(re.search(pattern, opening[1], re.IGNORECASE | re.DOTALL) for pattern in patterns):
            suspects.append((opening, interaction))
        else:
            openings.add(opening)
    return [interaction for opening, interaction in suspects if openings and opening not in openings]
