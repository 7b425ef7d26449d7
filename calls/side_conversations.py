"""Find side conversations: calls that a client program makes for its own purposes while an agent works on the task.

For example, Claude Code and opencode request a title for the conversation from the model. Such a call belongs to the
agent's session, but the call's output does not help to solve the task. If the title request were the session's last
call, the reward for the agent's work would go to the title.

The rule. A finished interaction is a *suspect* if conditions 1 and 2 hold:

    1. One of the patterns matches the text of the interaction's first message.
    2. The interaction has no parent and no children, and the client offered no tools.

A suspect is a side conversation if condition 3 also holds:

    3. The session has interactions that are not suspects, and the first message of each of these interactions differs
       from the suspect's first message.

The rule uses only the messages and tools, so the time of a title request makes no difference. If an agent requests the
final answer without tools, this call begins with the agent's own first message. By condition 3 the call is therefore no
side conversation. The single call of a second agent is no side conversation, because the call's prompt does not request
a title.

The configuration key rollout.openai.side_conversations contains the patterns, which are regular expressions. Upper and
lower case make no difference. An empty list turns the rule off. A client whose title requests match no pattern needs an
additional pattern.

A side conversation takes no reward of the session and is not trained, unless the agent sets a reward by the call's id.
The metric side_conversations counts the side conversations. The run prints a message at the first side conversation.
"""

import re
from collections.abc import Collection, Iterable
from typing import Any

from calls.messages import canonical

PATTERNS = (
    r"\b(write|generate|create|extract|provide|suggest|output)\b.{0,80}\btitles?\b",  # opencode, Claude Code, Open WebUI
    r"\bnew conversation topic\b",  # Claude Code
    r"^(quota|warmup)$",  # Claude Code, before its first real call
)


def find_side_conversations(finished: Iterable[Any], patterns: Collection[str]) -> list[Any]:
    """Return the side conversations among `finished`, which must contain all finished interactions of a session."""
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
