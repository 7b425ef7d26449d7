"""Which sequences does the next step compute, and when may new weights come in?

Each prompt of a request becomes a sequence. It waits in a queue, runs in a *slot* (one row of the
cache of keys and values) and ends exactly once, with reason stop, length or abort. A step feeds
tokens to running sequences, and each that has no more to feed gets a new one. The server
repeats `step`:

    1. admit waiting sequences, if no running one has a piece of its prompt left to feed
    2. feed the sequences that have (prefill) or, if there are none, all (decode)

The n running sequences occupy slots 0 to n - 1, so a step reads one contiguous part of the cache.
When a sequence ends, the one in the highest slot moves to its place. With 3 slots and 4 requests:

    A, B, C, D arrive   slots A B C      prefill A, B, C; D waits
    A ends              slots C B (A)    C moved; slot 2 keeps the keys of A
    next step           slots C B D      prefill what D does not share with A

Sequences start in order of arrival, and together they never need more than max_total_tokens, so a
running one always has room for its next token. Every token carries the version of the weights that
computed it, and no sequence reuses keys of older weights; only a pause "in_place" lets a running
one go on with its own. Not promised: fairness. A long request at the head delays the others.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

PREFILL_ROWS = 8  # the most sequences that start together: a step has bounded work


class SamplingParams(BaseModel, frozen=True, strict=True, extra="forbid"):
    """SGLang's sampling_params. The last four are not implemented: they accept their default."""

    max_new_tokens: int = Field(128, ge=1, lt=2**31)
    temperature: float = Field(1.0, ge=0, lt=2**31)  # 0: the most likely token
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, lt=2**31)  # -1 and 0: all tokens
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    stop: list[Annotated[str, Field(min_length=1)]] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False  # no token ends the output, not even one of stop_token_ids
    sampling_seed: int = Field(default_factory=lambda: random.getrandbits(64))
    min_p: float = Field(0.0, ge=0, le=0)
    presence_penalty: float = Field(0.0, ge=0, le=0)
    repetition_penalty: float = Field(1.0, ge=1, le=1)
    n: Literal[1] = 1


@dataclass(eq=False)
class Sequence:
    """One prompt of a POST /generate, and its output so far."""

    rid: str  # the request's id, for /abort_request
    prompt: list[int]
    params: SamplingParams

    tokens: list[int] = field(init=False)  # prompt and output
    logprobs: list[float] = field(default_factory=list)  # one for each output token
    versions: list[str] = field(default_factory=list)  # one for each output token
    finish: dict[str, Any] | None = None  # SGLang's finish_reason, once it has ended
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    retractions: int = 0  # how often a pause took it out of its slot
    reused: int = 0  # tokens whose keys it found in the cache

    cached: int = 0  # its first tokens, whose keys are in its slot
    stale: bool = False  # old weights computed some of the keys
    used: int = 0  # number of the last step that fed it

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def most(self) -> int:
        """How many tokens it may have in the end."""
        return len(self.prompt) + self.params.max_new_tokens

    def end(self, reason: dict[str, Any]) -> None:
        self.finish = reason
        self.ended.set()

    def spans(self) -> list[dict[str, Any]]:
        """Return SGLang's weight_versions: one version computed output tokens start to end - 1."""
        spans: list[dict[str, Any]] = []
        for i, version in enumerate(self.versions):
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": i})
            spans[-1]["end"] = i + 1
        return spans


NOBODY = Sequence("", [], SamplingParams())  # the user of a slot that holds no keys


def common_prefix(a: list[int], b: list[int]) -> int:
    """Return how many tokens at the start of both lists are equal."""
    return next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


class Scheduler:
    """The queue, the slots and the version of the weights."""

    def __init__(
        self, model: Any, max_total_tokens: int, version: str, decode: Callable[[list[int]], str]
    ) -> None:
        self.model = model
        self.max_total_tokens = max_total_tokens
        self.version = version
        self.decode = decode  # tokens to text, in which stop strings are searched
        self.paused = False
        self.waiting: deque[Sequence] = deque()
        self.slots = [NOBODY] * model.slots  # who used each slot last
        self.n = 0  # the first n slots belong to running sequences
        self.steps = 0

    def __repr__(self) -> str:
        queues = f"running={self.n}, waiting={len(self.waiting)}"
        return f"Scheduler(version={self.version!r}, paused={self.paused}, {queues})"

    @property
    def running(self) -> list[Sequence]:
        return self.slots[: self.n]

    # Between two steps

    def abort(self, rid: str | None = None) -> None:
        """End the sequences of a request, or all of them. They keep the tokens that they have."""
        for sequence in (*self.running, *self.waiting):
            if rid in (None, sequence.rid):
                sequence.end({"type": "abort", "message": "Aborted"})
        self.waiting = deque(sequence for sequence in self.waiting if not sequence.finish)
        self._release()

    def pause(self, mode: str) -> None:
        """Stop generating. Mode "abort" ends all sequences, "in_place" leaves the running ones in
        their slots, and "retract" sends them to the end of the queue, as SGLang does; their keys
        are dropped, and computed again when they return."""
        self.paused = True
        if mode == "abort":
            self.abort()
        elif mode == "retract":
            for sequence in self.running:
                sequence.retractions += 1
            self.waiting += self.running
            self.slots[: self.n] = [NOBODY] * self.n
            self.n = 0

    def renew(self, version: str) -> None:
        """The weights are new: no key in the cache may be reused."""
        self.version = version or self.version
        for sequence in self.slots:
            sequence.stale = True

    # A step

    def step(self) -> bool:
        """Compute one step. Return False if there is nothing to compute."""
        if self.paused:
            return False
        if not self._behind():
            self._admit()
        feeding = self._behind() or range(self.n)
        if not feeding:
            return False
        first = feeding[0]
        batch = self.slots[first : feeding[-1] + 1]
        feeds = [one.tokens[one.cached : one.cached + self.model.chunk] for one in batch]
        tokens, logprobs = self.model.next_tokens(batch, feeds, first)
        self.steps += 1
        for one, feed, token, logprob in zip(batch, feeds, tokens, logprobs, strict=True):
            one.cached += len(feed)
            one.used = self.steps
            if one.cached == len(one.tokens):  # else the rest of its prompt comes first
                one.tokens.append(token)
                one.logprobs.append(logprob)
                one.versions.append(self.version)
                if reason := self._finish_reason(one):
                    one.end(reason)
        self._release()
        return True

    def _behind(self) -> list[int]:
        """Return the slots whose sequences have more than one token to feed."""
        return [i for i, one in enumerate(self.running) if len(one.tokens) - one.cached > 1]

    def _admit(self) -> None:
        """Start waiting sequences, until one does not fit."""
        end = min(self.n + PREFILL_ROWS, len(self.slots))
        while self.waiting and self.n < end:
            sequence = self.waiting[0]
            if sum(one.most for one in (*self.running, sequence)) > self.max_total_tokens:
                break
            slot, reused = self._best_slot(sequence)
            self._exchange(slot, self.n)
            self.slots[self.n] = self.waiting.popleft()
            self.n += 1
            sequence.cached = sequence.reused = reused
            sequence.stale = False

    def _best_slot(self, sequence: Sequence) -> tuple[int, int]:
        """Return the idle slot that shares the longest prefix with the sequence (of equals, the one
        that was idle longest), and how many tokens they share."""

        def shared(slot: int) -> int:
            last = self.slots[slot]
            known = 0 if last.stale else common_prefix(last.tokens, sequence.tokens)
            # The last token is always fed: its logits give the next one.
            return min(known, last.cached, len(sequence.tokens) - 1)

        idle = range(self.n, len(self.slots))
        best = max(idle, key=lambda slot: (shared(slot), -self.slots[slot].used))
        return best, shared(best)

    def _release(self) -> None:
        """Take ended sequences out of their slots; the one in the highest slot fills each gap."""
        for i in reversed(range(self.n)):
            if self.slots[i].finish:
                self.n -= 1
                self._exchange(i, self.n)

    def _exchange(self, i: int, j: int) -> None:
        if i != j:
            self.slots[i], self.slots[j] = self.slots[j], self.slots[i]
            self.model.exchange(i, j)

    def _finish_reason(self, sequence: Sequence) -> dict[str, Any] | None:
        """Return SGLang's finish_reason if the last token ends the sequence."""
        token, params = sequence.tokens[-1], sequence.params
        is_stop = token in self.model.eos or token in params.stop_token_ids
        if is_stop and not params.ignore_eos:
            return {"type": "stop", "matched": token}
        if params.stop:
            # A stop string of n bytes spans at most n tokens. Eight more, because the text of the
            # first characters can be wrong when the tokens before them are missing.
            tail = max(len(stop.encode()) for stop in params.stop) + 8
            text = self.decode(sequence.output[-tail:])
            for stop in params.stop:
                if stop in text:
                    return {"type": "stop", "matched": stop}
        if len(sequence.logprobs) >= params.max_new_tokens:
            return {"type": "length", "length": len(sequence.logprobs)}
        return None
