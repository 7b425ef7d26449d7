"""What runs next: the decisions of the inference server, without a tensor, a thread or a socket.

**The rule.** Every request ends exactly once, with the tokens it has, whatever interrupts it; every token is counted
to the version of the weights that computed it; and a request's tokens depend on what is interrupting it as little as
its pause mode allows.

**How it works.** A *slot* is a row of the cache and holds the sequence whose keys are in it: slots 0 .. n-1 those that
run, the others some that have ended, whose keys are remembered. `plan` fills the running slots from the queue and says
whom the next step feeds; `advance` takes the tokens it gave. Everything else is an event between two steps: submit,
abort, pause, resume, request_update, relabel. Because running slots are always the first n, a step reads the cache as
a view; filling the hole that an ended request leaves costs one exchange of two rows (`moves`), which is left to
whoever holds the cache.

- **Admission** is first come, first served, while a slot is free and the running requests' prompts plus
  max_new_tokens fit into max_total_tokens: nothing that runs is ever pushed out for lack of room. The idle slot whose
  sequence shares the longest prefix with the request is taken, so the next turn of a conversation feeds only its tail.
- **Pause** stops the planning. `abort` ends every request with what it has, `retract` puts the running ones back
  at the head of the queue and forgets their keys, `in_place` leaves them where they are. New requests queue up.
- **An update of the weights** waits until nothing runs (the queue waits behind it), or happens at once while paused.
  It makes every remembered prefix stale: keys of old weights are never given to a new request, also with flush_cache
  false, where SGLang would. Only what was paused `in_place` goes on with old keys.

Different from SGLang, on purpose: an update without a pause does not wait for what is only queued, which so starts
under the new weights; an abort is delivered at once also while paused in place; a stop token that is also the last
allowed token ends with "stop". AReaL keeps none of this: it talks to SGLang.
"""

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

PREFILL_TOKENS = 1024  # fed by one prefill step at most, padding included: more falls out of a CPU's cache


class SamplingParams(BaseModel, frozen=True, strict=True, extra="forbid"):
    """SGLang's sampling_params with what each may hold; the last four are not implemented and may ask for nothing."""

    max_new_tokens: int = Field(default=128, ge=1, lt=2**31)
    temperature: float = Field(default=1.0, ge=0, lt=2**31)  # 0 is greedy
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: Literal[-1] | Annotated[int, Field(ge=1, lt=2**31)] = -1  # -1 keeps all
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    stop: list[Annotated[str, Field(min_length=1)]] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False  # also ignores stop_token_ids, as in SGLang
    sampling_seed: int = 0  # given by the server where the request brings none
    min_p: float = Field(default=0.0, ge=0, le=0)
    presence_penalty: float = Field(default=0.0, ge=0, le=0)
    repetition_penalty: float = Field(default=1.0, ge=1, le=1)
    n: Literal[1] = 1


@dataclass(eq=False)
class Sequence:
    """One request. `tokens` is prompt and output, `marks` where a version begins: (version, index in the output)."""

    rid: str
    prompt_tokens: int
    tokens: list[int]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    scored: bool = False  # the prompt's logprobs are wanted
    stream: bool = False  # who waits hears of every token
    return_logprob: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)  # it has ended or, streaming, grown
    # All that changes:
    logprobs: list[float] = field(default_factory=list)
    input_logprobs: list[float | None] = field(default_factory=list)
    marks: list[tuple[str, int]] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    retractions: int = 0
    cached_tokens: int = 0  # found in the cache when it was admitted
    # and in its slot, while it has one
    cached: int = 0  # the first so many of `tokens` have keys there
    stale: bool = False  # these are of weights before the present ones
    used: int = 0  # the step it was last in

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


def nobody() -> Sequence:
    """What a slot holds that remembers nothing."""
    return Sequence("", 0, [], SamplingParams(), finish={"type": "empty"})


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix, by bisection over slice comparisons."""
    return bisect_left(range(1, min(len(a), len(b)) + 1), True, key=lambda k: a[:k] != b[:k])


class Scheduler:
    """Queue, slots and the version at hand. Not thread-safe: one thread sends it events."""

    def __init__(self, slots: int, max_total_tokens: int, version: str, decode: Callable[[list[int]], str]) -> None:
        self.max_total_tokens = max_total_tokens
        self.decode = decode  # for stop strings
        # All that changes:
        self.version = version
        self.slots = [nobody() for _ in range(slots)]
        self.running = 0  # slots[:running] are at work (one that just ended stays among them until the next plan)
        self.waiting: deque[Sequence] = deque()
        self.paused: str | None = None
        self.updates: deque[Callable[[], None]] = deque()  # that are asked for, in order
        self.finished: list[Sequence] = []  # for the shell to take
        self.moves: list[tuple[int, int]] = []  # rows of the cache to exchange before the next step, in this order
        self.steps = 0

    def __repr__(self) -> str:
        queues = f"running={len(self.at_work())}, waiting={len(self.waiting)}, updates={len(self.updates)}"
        return f"Scheduler(version={self.version!r}, paused={self.paused}, {queues})"

    # questions

    def at_work(self) -> list[Sequence]:
        """The requests that run."""
        return [one for one in self.slots[: self.running] if one.finish is None]

    def live(self) -> list[Sequence]:
        """Every request that has not ended: running or waiting."""
        return [*self.at_work(), *self.waiting]

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
            for request in reversed(self.at_work()):
                request.retractions += 1
                self.waiting.appendleft(request)
            self.slots[: self.running] = [nobody() for _ in range(self.running)]
            self.running = 0

    def resume(self) -> None:
        self.paused = None

    def request_update(self, load: Callable[[], None]) -> None:
        """Have `plan` call `load` once nothing runs or all is paused; it brings new weights and then says renew()."""
        self.updates.append(load)

    def renew(self, version: str | None) -> None:
        """The weights are others now: of this version, or of the same where None is given."""
        self.relabel(version or self.version)
        for one in self.slots:
            one.stale = True

    def relabel(self, version: str) -> None:
        """From now on tokens are of this version."""
        if version != self.version:
            for request in self.live():
                request.marks.append((version, len(request.logprobs)))
        self.version = version

    def plan(self) -> tuple[int, list[Sequence]]:
        """Load new weights where they are due, fill the slots, and say what to feed next: the sequences of the slots
        from which one on; none when there is nothing to do."""
        while self.updates and (self.paused or not self.at_work()):
            self.updates.popleft()()
        if self.paused:
            return 0, []
        for i in reversed(range(self.running)):
            if self.slots[i].finish is not None:
                self.running -= 1
                self._swap(i, self.running)
        first = self.running
        if not self.updates:
            self._admit()
        if first == self.running:  # nobody new, whose prompt would go first
            first = 0
        return first, self.slots[first : self.running]

    def advance(self, batch: list[Sequence], tokens: list[int], logprobs: list[float]) -> None:
        """The step gave each of the sequences that it fed a token."""
        self.steps += 1
        for request, token, logprob in zip(batch, tokens, logprobs, strict=True):
            request.cached = len(request.tokens)
            request.used = self.steps
            request.tokens.append(token)
            request.logprobs.append(logprob)
            if token in request.stop_ids:
                self._end(request, {"type": "stop", "matched": token})
            elif request.params.stop and (matched := self._stop_string(request)) is not None:
                self._end(request, {"type": "stop", "matched": matched})
            elif len(request.logprobs) >= request.params.max_new_tokens:
                self._end(request, {"type": "length", "length": len(request.logprobs)})

    # parts of the above

    def _end(self, request: Sequence, finish: dict[str, Any]) -> None:
        assert request.finish is None, f"{request.rid} ends twice"
        request.finish = finish
        self.finished.append(request)

    def _stop_string(self, request: Sequence) -> str | None:
        tail = max(len(stop.encode()) for stop in request.params.stop) + 8  # a token is at least a byte
        text = self.decode(request.output[-tail:])
        return next((stop for stop in request.params.stop if stop in text), None)

    def _swap(self, i: int, j: int) -> None:
        if i != j:
            self.slots[i], self.slots[j] = self.slots[j], self.slots[i]
            self.moves.append((i, j))

    def _admit(self) -> None:
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
            self._swap(i, self.running)
            self.slots[self.running] = request
            request.cached, request.stale = shared, False
            request.cached_tokens = max(request.cached_tokens, shared)
            self.running += 1

    def _best_slot(self, request: Sequence) -> tuple[int, int]:
        """The idle slot that remembers most of the request, else the one idle for longest, and how much of it.
        At least one token is fed, and all of them where the prompt's logprobs are wanted."""
        limit = 0 if request.scored else len(request.tokens) - 1
        ranked = []
        for i, one in enumerate(self.slots[self.running :], self.running):
            kept = [] if one.stale else one.tokens[: one.cached]
            ranked.append((min(limit, common_prefix(kept, request.tokens)), -one.used, i))
        shared, _, best = max(ranked)
        return best, shared
