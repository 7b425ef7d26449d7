"""What runs next: the decisions of the inference server, without a tensor, a thread or a socket.

**The rule.** Every request ends exactly once, with the tokens it has, whatever interrupts it; every token is counted
to the version of the weights that computed it; and a request's tokens depend on what is interrupting it as little as
its pause mode allows.

**How it works.** Slots 0 .. n-1 run, the others are idle and remember the keys of the sequence they ended with.
`plan` fills the running slots from the queue and says which rows the next step feeds; `advance` takes the tokens it
gave. Everything else is an event between two steps: submit, abort, pause, resume, request_update, updated. Because
running slots are always the first n, a step reads the cache as a view; filling the hole that an ended request leaves
costs one exchange of two rows (`moves`), which the plan hands to whoever holds the cache.

- **Admission** is first come, first served, while a slot is free and the running requests' prompts plus
  max_new_tokens fit into max_total_tokens: nothing that runs is ever pushed out for lack of room. The idle slot whose
  sequence shares the longest prefix with the request is taken, so the next turn of a conversation feeds only its tail.
- **Pause** stops the planning. `abort` ends every request with what it has, `retract` puts the running ones back
  at the head of the queue and forgets their keys, `in_place` leaves them where they are. New requests queue up.
- **An update of the weights** waits until nothing runs (the queue waits behind it), or happens at once while paused.
  It forgets every remembered prefix: keys of old weights are never given to a new request, also with flush_cache
  false, where SGLang would. Only what was paused `in_place` goes on with old keys.

Different from SGLang, on purpose: an update without a pause does not wait for what is only queued, which so starts
under the new weights; an abort is delivered at once also while paused in place; a stop token that is also the last
allowed token ends with "stop". AReaL keeps none of this: it talks to SGLang.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

PREFILL_TOKENS = 1024  # fed by one prefill step at most, padding included: more falls out of a CPU's cache


@dataclass(frozen=True)
class SamplingParams:
    """SGLang's sampling_params, those that are implemented; another field is an error."""

    max_new_tokens: int = 128
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = -1  # -1 keeps all
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # also ignores stop_token_ids, as in SGLang
    sampling_seed: int = 0  # given by the server where the request brings none

    @property
    def truncates(self) -> bool:
        """Whether tokens are left out of the draw."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(eq=False)
class Sequence:
    """One sequence. `tokens` is prompt and output, `marks` where a version begins: (version, index in the output)."""

    rid: str
    prompt_tokens: int
    tokens: list[int]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    scored: bool = False  # whether the prompt's logprobs are asked for
    logprobs: list[float] = field(default_factory=list)
    input_logprobs: list[float | None] = field(default_factory=list)
    marks: list[tuple[str, int]] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    retractions: int = 0
    cached_tokens: int = 0
    context: Any = None  # the shell's: whom to tell

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def reserved(self) -> int:
        """Tokens of the cache that it may come to need."""
        return self.prompt_tokens + self.params.max_new_tokens

    def spans(self, n: int) -> list[dict[str, Any]]:
        """SGLang's weight_versions: which of the first n output tokens, [start, end), which version computed."""
        bounds = pairwise([*self.marks, ("", n)])
        return [{"version": version, "start": a, "end": b} for (version, a), (_, b) in bounds if a < b]


@dataclass(eq=False)
class Slot:
    """One row of the cache: the first `cached` of `tokens` have keys in it."""

    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    request: Sequence | None = None
    used: int = 0  # the step it was last in
    stale: bool = False  # holds keys of weights before the present ones


@dataclass(frozen=True)
class Step:
    """Exchange cache rows as in `moves`, in this order; then feed the rows first .. last - 1."""

    moves: list[tuple[int, int]]
    first: int
    last: int


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix, by bisection over slice comparisons."""
    if not a or not b or a[0] != b[0]:
        return 0
    return bisect_left(range(1, min(len(a), len(b)) + 1), True, key=lambda k: a[:k] != b[:k])


class Scheduler:
    """Queue, slots and the version at hand. Not thread-safe: one thread sends it events."""

    def __init__(
        self, slots: int, max_total_tokens: int, version: str = "0", decode: Callable[[list[int]], str] | None = None
    ) -> None:
        self.max_total_tokens = max_total_tokens
        self.version = version
        self.decode = decode  # for stop strings
        self.slots = [Slot() for _ in range(slots)]
        self.running = 0  # slots[:running] are at work (one that just ended stays among them until the next plan)
        self.waiting: deque[Sequence] = deque()
        self.paused: str | None = None
        self.updates: deque[Any] = deque()  # updates of the weights that are asked for, in order
        self.finished: list[Sequence] = []  # for the shell to take
        self.steps = 0

    def __repr__(self) -> str:
        state = f"paused={self.paused}, " if self.paused else ""
        queues = f"running={len(self.at_work())}, waiting={len(self.waiting)}, updates={len(self.updates)}"
        return f"Scheduler({state}version={self.version!r}, {queues})"

    # questions

    def at_work(self) -> list[Sequence]:
        """The requests in slots."""
        return [slot.request for slot in self.slots[: self.running] if slot.request]

    def live(self) -> list[Sequence]:
        """Every request that has not ended: running or waiting."""
        return [*self.at_work(), *self.waiting]

    def update_is_due(self) -> bool:
        """Whether the first of `updates` may happen now."""
        return bool(self.updates) and (self.paused is not None or not self.at_work())

    # events

    def submit(self, request: Sequence) -> None:
        """Take a request in."""
        assert request.reserved <= self.max_total_tokens, "one that can never run is refused before"
        request.marks.append((self.version, 0))
        self.waiting.append(request)

    def abort(self, matches: Callable[[Sequence], bool] = lambda _: True) -> None:
        """End the matching requests with what they have."""
        for request in self.live():
            if matches(request):
                self._end(request, {"type": "abort", "message": "Aborted"})
        self.waiting = deque(r for r in self.waiting if r.finish is None)

    def pause(self, mode: str) -> None:
        """Stop planning; what happens to running requests is the mode: abort, retract or in_place."""
        self.paused = mode
        if mode == "abort":
            self.abort()
        elif mode == "retract":
            for slot in reversed(self.slots[: self.running]):
                if slot.request:
                    slot.request.retractions += 1
                    self.waiting.appendleft(slot.request)
                slot.request, slot.cached = None, 0

    def resume(self) -> None:
        self.paused = None

    def request_update(self, update: Any, abort_all: bool = False) -> None:
        """Ask for new weights; the shell loads `updates[0]` once update_is_due and then says updated()."""
        self.updates.append(update)
        if abort_all:
            self.abort()

    def updated(self, version: str | None) -> None:
        """The first update is over: with the version it brought, or None where it failed and nothing changed."""
        self.updates.popleft()
        if version is None:
            return
        self.relabel(version)
        for slot in self.slots:
            slot.stale = slot.request is not None
            slot.cached = slot.cached if slot.stale else 0

    def relabel(self, version: str) -> None:
        """From now on tokens are of this version."""
        if version != self.version:
            for request in self.live():
                request.marks.append((version, len(request.logprobs)))
        self.version = version

    def plan(self) -> Step | None:
        """Fill the slots; what to feed next, or None when there is nothing to do."""
        if self.paused:
            return None
        moves: list[tuple[int, int]] = []
        for i in reversed(range(self.running)):
            if self.slots[i].request is None:
                self.running -= 1
                self._swap(i, self.running, moves)
        first = self.running
        if not self.updates:
            self._admit(moves)
        if not self.running:
            return None
        self.steps += 1
        return Step(moves, first if self.running > first else 0, self.running)

    def advance(self, step: Step, tokens: list[int], logprobs: list[float]) -> None:
        """The step gave each of its rows a token."""
        for slot, token, logprob in zip(self.slots[step.first : step.last], tokens, logprobs, strict=True):
            request = slot.request
            assert request is not None, "events come between steps, so a planned row is still taken"
            slot.cached = len(slot.tokens)
            slot.used = self.steps
            params = request.params
            if params.max_new_tokens == 0:  # only the prompt's logprobs were wanted
                self._end(request, {"type": "length", "length": 0})
                continue
            request.tokens.append(token)  # slot.tokens is the same list
            request.logprobs.append(logprob)
            if token in request.stop_ids:
                self._end(request, {"type": "stop", "matched": token})
            elif params.stop and (matched := self._stop_string(request)) is not None:
                self._end(request, {"type": "stop", "matched": matched})
            elif len(request.logprobs) >= params.max_new_tokens:
                self._end(request, {"type": "length", "length": len(request.logprobs)})

    # parts of the above

    def _end(self, request: Sequence, finish: dict[str, Any]) -> None:
        assert request.finish is None, f"{request.rid} ends twice"
        request.finish = finish
        self.finished.append(request)
        for slot in self.slots[: self.running]:
            if slot.request is request:
                slot.request = None
                slot.cached = 0 if slot.stale else slot.cached

    def _stop_string(self, request: Sequence) -> str | None:
        assert self.decode is not None, "stop strings are refused where there is no tokenizer"
        tail = max(map(len, request.params.stop)) + 8  # a character is at least part of a token
        text = self.decode(request.output[-tail:])
        return next((stop for stop in request.params.stop if stop in text), None)

    def _swap(self, i: int, j: int, moves: list[tuple[int, int]]) -> None:
        if i != j:
            self.slots[i], self.slots[j] = self.slots[j], self.slots[i]
            moves.append((i, j))

    def _admit(self, moves: list[tuple[int, int]]) -> None:
        """Move requests from the queue into slots[running:], as many as fit into one prefill step."""
        total = sum(request.reserved for request in self.at_work())
        fed: list[int] = []
        while self.waiting and self.running < len(self.slots):
            request = self.waiting[0]
            total += request.reserved
            if total > self.max_total_tokens:
                return
            i, shared = self._best_slot(request)
            fed.append(len(request.tokens) - shared)
            if len(fed) > 1 and len(fed) * max(fed) > PREFILL_TOKENS:
                return
            self.waiting.popleft()
            self._swap(i, self.running, moves)
            slot = self.slots[self.running]
            slot.tokens, slot.cached, slot.request, slot.stale = request.tokens, shared, request, False
            request.cached_tokens = max(request.cached_tokens, shared)
            self.running += 1

    def _best_slot(self, request: Sequence) -> tuple[int, int]:
        """The idle slot that remembers most of the request, else the one idle for longest, and how much of it.
        At least one token is fed, and all of them where the prompt's logprobs are wanted."""
        idle = range(self.running, len(self.slots))
        limit = 0 if request.scored else len(request.tokens) - 1
        shared = {i: common_prefix(self.slots[i].tokens[: self.slots[i].cached], request.tokens) for i in idle}
        best = max(idle, key=lambda i: (min(shared[i], limit), -self.slots[i].used))
        return best, min(shared[best], limit)
