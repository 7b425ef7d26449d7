"""Decide which sequences have a slot in the cache, and which sequences the next step feeds.

Each request becomes a sequence, which waits for a *slot*, one row of the cache of keys and values.
A step feeds tokens to the running sequences, those with a slot. When all tokens of a sequence have
been fed, the step draws a new token. In this example, A and B begin with the same 40 tokens, and C
is a long prompt of another session (episode):

    A, B, C arrive    slots A C       B waits until A has computed the 40 shared tokens
    prefill           A's prompt is fed
    prefill           slots A C B     B gets a copy of the 40 keys; the rest of its prompt is fed
    prefill, decode   128 tokens of C's prompt are fed, then one token of each sequence, and so on
    A ends            slots B C (A)   B moves to slot 0; slot 2 keeps A's keys for A's next turn

*Slots.* The n running sequences occupy slots 0 to n - 1, so a step reads one contiguous part of the
cache. All slots have the same length. The longer they are, the fewer fit: a cache of 16,384 tokens
has room for 85 slots of 192 tokens or 32 of 512. So slots grow only when a sequence needs more
room. A sequence that loses its slot waits again.

*Fairness.* The session that runs the fewest sequences comes first. If all slots are taken, a
session that runs m sequences gives up a slot to a waiting session that runs at most m - 2. A
sequence waits if it is too long to fit beside the running ones. For PATIENCE steps, all others may
overtake this sequence. After that, only sessions that run fewer sequences may do so.

Every token carries the version of the weights that computed it. When the server loads new weights,
it calls `retract`, which drops all keys and lets all running sequences wait again.
"""

from collections import Counter
from collections.abc import Callable
from copy import copy
from itertools import takewhile
from operator import eq
from typing import Any

from inference.tiny.model import FEWEST, round_up
from inference.tiny.sampling import SamplingParams, Sequence, sample

PATIENCE = 200  # how many steps a sequence waits before it comes first
NOBODY = Sequence("", [], SamplingParams())  # the user of a slot that holds no keys


def common(a: list[int], b: list[int]) -> int:
    """Return how many leading tokens `a` and `b` share."""
    return sum(takewhile(bool, map(eq, a, b)))


class Scheduler:
    """The waiting sequences, the slots and the version of the weights."""

    least_shared = 16  # for a shorter prefix, computing again is quicker than waiting

    def __init__(self, model: Any, version: str, decode: Callable[[list[int]], str]) -> None:
        self.model = model
        self.version = version
        self.decode = decode  # tokens to text, for stop strings
        self.paused = False
        self.waiting: list[Sequence] = []
        self.length, slots = model.resize(1)  # tokens of a slot, number of slots
        self.slots = [NOBODY] * slots  # who used each slot last
        self.n = 0  # the first n slots belong to running sequences
        self.steps = 0
        self.decodes_next = False  # whether a decode comes next, even if prompts wait

    @property
    def running(self) -> list[Sequence]:
        return self.slots[: self.n]

    # Between two steps

    def add(self, *sequences: Sequence) -> None:
        for one in sequences:
            one.used = self.steps
            self.waiting.append(one)

    def abort(self, rid: str | None = None) -> None:
        """End the sequences of a request, or all sequences. They keep their tokens."""
        for sequence in (*self.running, *self.waiting):
            if rid in (None, sequence.rid):
                sequence.end("abort")
        self.waiting = [sequence for sequence in self.waiting if not sequence.finish]
        self._release()

    def retract(self) -> None:
        self.waiting = self.running + self.waiting
        self.slots = [NOBODY] * len(self.slots)
        self.n = 0

    # A step

    def step(self) -> bool:
        """Compute one step. Return False if paused, or if there is nothing to compute."""
        if self.paused:
            return False
        self._grow()
        self._admit()
        if not self.n:
            return False
        first, end, most = self._choose()
        batch = self.slots[first:end]
        feeds = [one.tokens[one.cached :][:most] for one in batch]
        logits = self.model.step(feeds, [one.cached for one in batch], first)
        self.steps += 1
        for one, feed, token, logprob in zip(batch, feeds, *sample(logits, batch), strict=True):
            one.cached += len(feed)
            one.used = self.steps
            if one.cached == len(one.tokens):  # else the prompt has not been fed completely
                one.append(token, logprob, self.version)
                if reason := self._finish_reason(one):
                    one.end(reason)
                    self.decodes_next |= len(feed) > 1
        self._release()
        return True

    def _choose(self) -> tuple[int, int, int]:
        """Return (first, end, most). The step feeds at most `most` tokens to each of the slots
        first to end - 1.

        Prompts come before decodes, with two exceptions. A decode follows each piece of a long
        prompt, so that running sequences get tokens before the whole prompt is computed. A decode
        also follows each prompt whose answer has only one token. Otherwise a stream of such
        requests would hold up all running sequences.
        """
        left = [len(one.tokens) - one.cached for one in self.running]  # tokens still to be fed
        ready = [i for i, n in enumerate(left) if n == 1]
        if ready and (self.decodes_next or max(left) == 1):
            self.decodes_next = False
            return ready[0], ready[-1] + 1, 1  # decode; prompts in between are fed a token, too
        return self._prefill(left)

    def _prefill(self, left: list[int]) -> tuple[int, int, int]:
        """Return (first, end, most) for a prefill. Begin with the shortest prompt, but prefer
        prompts that have waited more than PATIENCE steps. Add the prompts of neighbouring slots
        while they fit into the step. A long prompt is fed alone and in pieces."""
        ranks = [(self.steps - one.used <= PATIENCE, n) for one, n in zip(self.running, left)]
        first = ranks.index(min(rank for rank in ranks if rank[1] > 1))
        # The more tokens are cached, the longer attention takes, so pieces get shorter. On a CPU, a
        # piece has at most 128 tokens after 2,048 cached ones, and 16 after 16,384.
        piece = self.model.prefill * 512 // max(1, self.slots[first].cached)
        most = min(self.model.chunk, max(FEWEST, piece))  # tokens of a row, with padding
        end, columns = first + 1, min(most, round_up(left[first], FEWEST))
        for i in (*range(end, self.n), *range(first - 1, -1, -1)):
            wider = min(most, round_up(max(columns, left[i]), FEWEST))
            fits = wider < most and (end - first + 1) * wider <= self.model.prefill
            if left[i] > 1 and fits and first - 1 <= i <= end:  # next to the others
                first, end, columns = min(first, i), max(end, i + 1), wider
        self.decodes_next = columns == most
        return first, end, most

    # Who has a slot

    def _admit(self) -> None:
        """Give slots to waiting sequences. Sessions that run the fewest sequences come first."""
        if self.waiting:
            self._make_room()
        runs, turns = self._runs(), dict[Sequence, int]()
        for one in self.waiting:
            turns[one] = runs[one.session]  # how many sequences of its session come before it
            runs[one.session] += 1
        for one in sorted(turns, key=turns.__getitem__):
            length, slots = self.model.fit(max(self.length, len(one.tokens)))
            if self.n < slots:
                self._resize(length)
                self._start(one)
            elif self.n == len(self.slots) or self.steps - one.used > PATIENCE:
                return

    def _start(self, one: Sequence) -> None:
        """Give a sequence a slot, unless it has to wait for keys that a running sequence is about
        to compute."""
        other, most = one.awaits
        if other in self.running and other.cached < most:  # spares the comparisons below
            return

        # Take the idle slot whose keys share the longest prefix with this sequence; among equals,
        # the least recently used.
        wanted = one.tokens[:-1]  # the last token is always fed: its logits give the next one
        found = []
        for slot, last in enumerate(self.slots[self.n :], self.n):
            cached = common(last.tokens[: last.cached], wanted)
            found.append((cached if cached >= self.least_shared else 0, -last.used, slot))
        cached, _, slot = max(found, key=lambda choice: choice[:2])

        # A running sequence may share a longer prefix.
        pairs = [(common(other.tokens, wanted), other.cached) for other in self.running]
        most, computed = max(pairs, default=(0, 0))
        if most >= cached + self.least_shared:
            i = pairs.index((most, computed))
            one.awaits = self.slots[i], most
            if computed < most:
                return
            self.model.copy(i, slot, most)
            cached = most

        one.cached = cached
        self.slots[slot] = one
        self._exchange(slot)
        self.n += 1
        self.waiting.remove(one)

    def _make_room(self) -> None:
        """Make room for the waiting session that runs the fewest sequences ("Fairness" above)."""
        if self.n == len(self.slots):  # shorten the slots to twice the longest sequence
            longest = max(len(one.tokens) for one in self.running)
            self._resize(min(self.length, self.model.fit(2 * longest)[0]))
        runs = self._runs()
        one = min(self.waiting, key=lambda one: runs[one.session])
        _, slots = self.model.fit(max(self.length, len(one.tokens)))
        needed = self.n - slots + 1  # how many have to give up their slot
        # Every other session keeps one sequence more than `one.session` runs.
        spare = sum(max(0, count - runs[one.session] - 1) for count in runs.values())
        # The only slot goes to a waiting sequence that is at most half as long as the running one.
        is_blocked = self.n == slots == 1 and 2 * len(one.tokens) <= len(self.slots[0].tokens)
        if is_blocked or needed <= spare:
            for _ in range(needed):
                self._send_back()

    def _grow(self) -> None:
        longest = max((len(one.tokens) for one in self.running), default=0)
        if longest > self.length:
            length, slots = self.model.fit(longest)
            while self.n > slots:
                self._send_back()
            self._resize(length)

    def _resize(self, length: int) -> None:
        if length != self.length:
            self.length, slots = self.model.resize(length)
            self.slots = (self.slots + [NOBODY] * slots)[:slots]
            for one in self.slots:
                one.cached = min(one.cached, length)

    def _send_back(self) -> None:
        """The session that runs the most sequences gives up its sequence with the fewest keys. The
        sequence then waits behind the other sessions. Its keys stay in an idle slot."""
        runs = self._runs()
        i = min(range(self.n), key=lambda i: (-runs[self.slots[i].session], self.slots[i].cached))
        one = self.slots[i]
        self.waiting.insert(0, one)
        self.waiting.sort(key=lambda other: other.session == one.session)
        self.slots[i] = copy(one)  # remembers whose keys these are, if `one` gets another slot
        self.n -= 1
        self._exchange(i)

    def _release(self) -> None:
        """Free the slots of ended sequences."""
        for i in reversed(range(self.n)):
            if self.slots[i].finish:
                self.n -= 1
                self._exchange(i)

    def _exchange(self, i: int) -> None:
        """Exchange slot i with the first idle one."""
        if i != (j := self.n):
            self.model.exchange(i, j, max(self.slots[i].cached, self.slots[j].cached))
            self.slots[i], self.slots[j] = self.slots[j], self.slots[i]

    def _runs(self) -> Counter[str]:
        return Counter(one.session for one in self.running)

    def _finish_reason(self, sequence: Sequence) -> str:
        token, params = sequence.tokens[-1], sequence.params
        is_stop = token in self.model.eos or token in params.stop_token_ids
        text = self.decode(sequence.output) if params.stop else ""
        if (is_stop and not params.ignore_eos) or any(stop in text for stop in params.stop):
            return "stop"
        return "length" if len(sequence.logprobs) >= params.max_new_tokens else ""
