"""Find side conversations: calls that a client program makes for its own purposes while an agent works on the task.

For example, Claude Code and opencode ask the model for a title of the conversation. A side conversation belongs to the
agent's session, but does not help to solve the task. If a request for a title is the last call of the session, the
session's reward must not go to this request.

The rule. A finished interaction is a *suspect* if conditions 1 and 2 hold:

    (1) One of the patterns matches the text of the interaction's first message.
    (2) The interaction has no parent and no children, and the client offered no tools.

A suspect is a side conversation if condition 3 also holds:

    (3) The session has interactions that are no suspects, and none of them has the same first message as the suspect.

The rule does not depend on the order of the calls, so a title request may come before, between or after the agent's
calls. Two kinds of calls resemble a title request, but do not satisfy all conditions. If an agent offers no tools in
its final call, this call has the same first message as the agent's earlier calls, so condition 3 does not hold. If a
second agent makes only one call, the prompt of this call describes a task and requests no title, so condition 1 does
not hold.

The configuration key rollout.openai.side_conversations contains the patterns, which are regular expressions. The
patterns ignore the difference between upper and lower case. If the list of patterns is empty, the rule is off. If the
title requests of a client match no pattern, add a pattern to the list.

A side conversation is not trained, and gets none of the session's reward. If the agent itself sets a reward for the id
of a side conversation, this side conversation is trained. The metric side_conversations counts the side conversations.
The run prints a message when it finds the first side conversation.
"""

import functools
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from calls.messages import canonical

PATTERNS = (
    # title requests of opencode, Claude Code and Open WebUI
    r"\b(write|generate|create|extract|provide|suggest|output)\b.{0,80}\btitles?\b",
    r"\bnew conversation topic\b",  # Claude Code
    r"^(quota|warmup)$",  # messages that Claude Code sends before the agent's first call
)


def make_matcher(patterns: Collection[str]) -> Callable[[str], bool]:
    """Return a function that tells whether one of the patterns matches a text.

    The function caches its results, so each text is searched only once.
    """
    return functools.cache(
        lambda text: any(re.search(p, text, re.IGNORECASE | re.DOTALL) for p in patterns)
    )


def find_side_conversations(finished: Iterable[Any], matches: Callable[[str], bool]) -> list[Any]:
    """Return the side conversations among `finished`, which are all finished interactions of a session.

    `matches` tells whether one of the patterns matches a text (`make_matcher`).
    """
    suspects = []
    openings = set()  # the first message of each interaction that is not a suspect
    for interaction in finished:
        opening = canonical(
            interaction.messages[0]
        )  # a tuple (role, text, tool calls, id of a tool result)
        is_single = not (interaction.tools or interaction.parent or interaction.children)
        if is_single and matches(opening[1]):
            suspects.append((opening, interaction))
        else:
            openings.add(opening)
    return [
        interaction for opening, interaction in suspects if openings and opening not in openings
    ]
