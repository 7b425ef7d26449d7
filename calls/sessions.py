"""A session is what the proxy keeps of an episode: its calls, and which answers each call has read.

    state      | meaning
    -----------+--------------------------------------------------------
    open       | takes calls
    ended      | takes no calls, and waits for its export
    forgotten  | exported, or discarded because its episode has failed

Sessions never expire. A session's calls are kept in memory and exported in one reply, so their
number and size are limited.

**Links.** A call's reward also reaches the answers that the call has read (cache.py). A call reads
the answer that it continues. A call may also quote the answer of another call, such as a summary of
a long history or a sub-agent's report. So a call has also read every answer that stands whole in
its new messages. The header x-pocket-areal-reads can name further calls whose answers were read.

**Side conversations** are calls that a client makes for itself, for example to title the chat.
Unless the agent rewards them by id, they get no reward and are left out of the loss. A call looks
like a side conversation if it has no tools and no parent, and its first message matches SIDE. Calls
with the same first message are judged together: if one of them does not look like a side
conversation, none of them is one. If every call of a session looks like a side conversation, none
counts as one.
"""

import functools
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cache import Interaction, InteractionCache, ancestors, extend
from calls.messages import Message, Refusal, canonical
from inference.io_struct import ModelResponse

MAX_CALLS, MAX_BYTES = 2048, 2**26  # a session's calls, and the bytes of their bodies
SHORT = 20  # characters; a shorter answer may be part of a message by chance
SIDE = re.compile(  # opencode, Claude Code, Open WebUI
    r"\b(write|generate|create|extract|provide|suggest|output)\b.{0,80}\btitles?\b"
    r"|\bnew conversation topic\b|^(quota|warmup)$",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(eq=False)
class Session:
    session_id: str
    task_id: str
    sampling: dict[str, Any]  # its defaults for CallParameters
    cache: InteractionCache
    links: bool = True  # whether a call has read the answers that its messages contain
    calls: int = 0  # calls entered
    size: int = 0  # bytes of all bodies
    running: set[Any] = field(default_factory=set)  # turns (calls/turn.py)
    turns: dict[int, Any] = field(default_factory=dict)  # hash of a body -> its newest turn
    ended: bool = False
    # finished call without a finished child -> its `needle`
    leaves: dict[Any, str] = field(default_factory=dict)
    # digests of first messages that do not begin side conversations
    agent_digests: set[int] = field(default_factory=set)

    def check_open(self) -> None:
        if self.ended:
            raise Refusal("session: it has ended and takes no more work; start a new one", 410)

    def receive(self, size: int) -> None:
        """Count `size` more bytes of a body. Raises Refusal if the session has ended or is full."""
        self.check_open()
        self.size += size
        if self.size > MAX_BYTES or self.calls >= MAX_CALLS:
            raise Refusal(
                f"session: it takes at most {MAX_CALLS} calls with {MAX_BYTES} bytes;"
                " end it and start a new one",
                413,
            )

    def end(self) -> None:
        self.ended = True
        self.turns.clear()  # breaks a cycle, so that memory is freed at once
        for turn in self.running:
            turn.fail()

    # ---- calls

    def enter(self, call: Interaction, named: Iterable[str] = ()) -> None:
        """Add a call to the tree, and find the answers that it has read. `named` holds the ids in
        the call's header. Raises Refusal if one of them is unknown."""
        read = [self.cache.find(name, "x-pocket-areal-reads") for name in named]
        self.cache.enter(call)
        self._link(call, read)

    def finish(self, call: Interaction, response: ModelResponse, output: Message) -> None:
        """Complete a call, and store its `needle` in `leaves`."""
        self.cache.finish(call, response, output)
        self.leaves.pop(call.parent, None)
        if said := needle(output):
            self.leaves[call] = said
        call.first_digest = extend(0, call.messages[0])
        call.agent_digests = self.agent_digests
        if not looks_like_side(call):
            self.agent_digests.add(call.first_digest)

    def _link(self, call: Interaction, named: list[Interaction]) -> None:
        """Find what `call` has read besides its parent. The call's header names the calls in
        `named`, and its new messages may contain the answers of `leaves`. If one of the calls found
        has read another, only the reader is kept.

            history - [summary]            user: the summary - [call]       call reads summary
            [parent] calls a tool - tool: the report - [call]               call reads report
                 user: the task - [first] - ... - [report]                  first reads parent

        Brackets mark calls. In the last two lines, the parent's tool is a sub-agent, which writes
        the report. The sub-agent got its task from the parent's answer, so its first call reads the
        parent.
        """
        parent = call.parent
        start = len(parent.conversation) if parent else 0
        new = call.messages[start:]
        rest = functools.cache(lambda shared: squeeze_all(new[shared:]))
        leaves = self.leaves if self.links and not looks_like_side(call) else {}
        found = [
            x
            for x, said in leaves.items()
            if stands(said, rest(count_shared(new, x.messages[start:])))
        ]
        if not (found or named):
            return
        # A call that is read is not a side conversation.
        self.agent_digests |= {x.first_digest for x in found + named}
        if parent and self.links:
            results = squeeze_all(message for message in new if message["role"] == "tool")
            reports = [x for x in found if stands(self.leaves[x], results)]
            later = itertools.takewhile(lambda x: x is not parent, reversed(self.cache.values()))
            for first in ancestors(reports + named).intersection(later):
                first.reads = first.reads or [parent]
        call.reads = unread(found + named + call.reads)
        if not parent:
            call.turn_id = max(x.turn_id + 1 for x in call.reads)


# ---- what shows that an answer was read


def looks_like_side(call: Interaction) -> bool:
    beginning = call.messages[0]["content"][:2000]
    return not (call.tools or call.parent) and bool(SIDE.search(beginning))


def count_shared(new: list[Message], old: list[Message]) -> int:
    """Count the equal messages at the beginning of both lists. The older call has sent these
    messages itself, so they cannot quote its answer."""
    equal = (a == b or canonical(a) == canonical(b) for a, b in zip(new, old))
    return sum(itertools.takewhile(bool, equal))


def unread(calls: list[Interaction]) -> list[Interaction]:
    above = ancestors(x for call in calls for x in call.reads)
    return [x for x in dict.fromkeys(calls) if x not in above]


def needle(output: Message) -> str:
    """Return what a later call must contain to have read this answer: the id of the answer's first
    tool call or, without tool calls, the answer's text. If the text has a <summary>, only the
    summary counts, because Claude Code cuts away the rest."""
    if calls := output.get("tool_calls"):
        return calls[0]["id"]
    return squeeze(output["content"].rpartition("<summary>")[2].partition("</summary>")[0])


def stands(said: str, text: str) -> bool:
    """Whether `text` contains the answer `said`. A short answer must have lines of its own."""
    return said in text and (len(said) >= SHORT or f"\n{said}\n" in text)


def squeeze(text: str) -> str:
    """Collapse blanks, drop empty lines and undo JSON escapes, because agents wrap or quote
    answers."""
    lines = text.replace("\\n", "\n").replace('\\"', '"').splitlines()
    return "\n".join(filter(None, (" ".join(line.split()) for line in lines)))


def squeeze_all(messages: Iterable[Message]) -> str:
    parts = ((m["content"], *(call["id"] for call in m.get("tool_calls", []))) for m in messages)
    return "\0".join(f"\n{squeeze(part or '')}\n" for part in itertools.chain(*parts))
