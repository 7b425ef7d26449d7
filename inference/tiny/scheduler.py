"""Decide which sequences the next step computes, and when new weights may come in.

Each request becomes a sequence. It waits in a queue, runs in a *slot* (one row of the cache of keys
and values) and ends exactly once, with reason stop, length or abort. A step feeds tokens to running
sequences; each sequence with no more to feed gets a new token. The server repeats `step`:

    1. admit waiting sequences, if no running one has a piece of its prompt left to feed
    2. feed the sequences that have (prefill) or, if there are none, all (decode)

The n running sequences occupy slots 0 to n - 1, so a step reads one contiguous part of the cache.
When a sequence ends, the sequence in the highest slot moves to its place. With 3 slots and 4
requests:

    A, B, C, D arrive   slots A B C      prefill A, B, C; D waits
    A ends              slots C B (A)    C moved; slot 2 keeps the keys of A
    next step           slots C B D      prefill what D does not share with A

Sequences start in order of arrival. Every token carries the version of the weights that computed
it, and no sequence uses keys of older weights: new weights send the running sequences back to the
queue. A long request at the head delays the others.
"""

import operator
from collections import deque
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from inference.tiny.sampling import SamplingParams, Sequence, sample

PREFILL_ROWS = 8  # the most sequences that start together, to bound a step's work
NOBODY = Sequence("", [], SamplingParams())  # the user of a slot that holds no keys


class Scheduler:
    """The queue, the slots and the version of the weights."""

    def __init__(self, model: Any, version: str, decode: Callable[[list[int]], str]) -> None:
        self.model = model
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
        """End the sequences of a request, or all sequences. They keep their tokens."""
        for sequence in (*self.running, *self.waiting):
            if rid in (None, sequence.rid):
                sequence.end("abort")
        self.waiting = deque(sequence for sequence in self.waiting if not sequence.finish)
        self._release()

    def retract(self) -> None:
        """Send the running sequences to the end of the queue, as SGLang does, and forget all keys.
        The keys are computed again when a sequence returns."""
        self.waiting += self.running
        self.slots = [NOBODY] * len(self.slots)
        self.n = 0

    # A step

    def step(self) -> bool:
        """Compute one step. Return False if there is nothing to compute."""
        if self.paused:
            return False
        feeding = self._behind() or self._admit() or range(self.n)
        if not feeding:
            return False
        first = feeding[0]
        batch = self.slots[first : feeding[-1] + 1]
        feeds = [one.tokens[one.cached : one.cached + self.model.chunk] for one in batch]
        logits = self.model.step(feeds, [one.cached for one in batch], first)
        self.steps += 1
        for one, feed, token, logprob in zip(batch, feeds, *sample(logits, batch), strict=True):
            one.cached += len(feed)
            one.used = self.steps
            if one.cached == len(one.tokens):  # else the rest of its prompt comes first
                one.append(token, logprob, self.version)
                if reason := self._finish_reason(one):
                    one.end(reason)
        self._release()
        return True

    def _behind(self) -> list[int]:
        """Return the slots whose sequences have more than one token to feed."""
        return [i for i, one in enumerate(self.running) if len(one.tokens) - one.cached > 1]

    def _admit(self) -> list[int]:
        """Start waiting sequences, and return the slots of those that have a prompt to feed. Each
        gets the idle slot with which it shares the longest prefix; among equal slots, the one idle
        for longest."""
        end = min(self.n + PREFILL_ROWS, len(self.slots))
        while self.waiting and self.n < end:
            sequence = self.waiting.popleft()
            # The last token is always fed: its logits give the next one.
            wanted, shared = sequence.tokens[:-1], {}
            for slot in range(self.n, len(self.slots)):
                last = self.slots[slot]
                equal = map(operator.eq, last.tokens[: last.cached], wanted)
                shared[slot] = sum(takewhile(bool, equal)), -last.used
            slot = max(shared, key=shared.__getitem__)
            sequence.cached, _ = shared[slot]
            self._exchange(slot, self.n)
            self.slots[self.n] = sequence
            self.n += 1
        return self._behind()

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

    def _finish_reason(self, sequence: Sequence) -> str:
        """Return why the last token ends the sequence, or "" if it does not."""
        token, params = sequence.tokens[-1], sequence.params
        is_stop = token in self.model.eos or token in params.stop_token_ids
        text = self.decode(sequence.output) if params.stop else ""
        if (is_stop and not params.ignore_eos) or any(stop in text for stop in params.stop):
            return "stop"
        return "length" if len(sequence.logprobs) >= params.max_new_tokens else ""
