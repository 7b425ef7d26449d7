"""The scheduler chooses the sequences of the next step, and decides when new weights may be loaded.

**The rule.** Each prompt of a request becomes a sequence. A sequence waits in a queue, runs in a *slot* (one row of the
KV cache), and finishes exactly once, with reason stop, length or abort. A step feeds running sequences to the model,
and each of these sequences gets one new token.

**How it works.** The engine's thread (server.py) calls `plan`, computes a forward pass (model.py), and calls `extend`.

    plan()      1. load new weights, if no sequence runs or generation is paused
                2. admit waiting sequences into free slots
                3. feed the sequences that were just admitted (prefill) or, if there are none, all running ones (decode)
    extend()    append one token to each sequence that was fed, and finish the sequences that have reached their end

The n running sequences occupy slots 0 to n-1, so a step reads one contiguous part of the cache. When a sequence
finishes, the running sequence in the highest slot moves to the free slot. The example has 3 slots and 4 requests:

    event               waiting    slot 0  slot 1  slot 2    the step that follows
    submit A, B, C, D   A B C D    -       -       -
    plan                D          A       B       C         prefill A, B and C
    plan                D          A       B       C         decode A, B and C; A reaches its end
    A finishes          D          C       B       (A)       C moved; slot 2 keeps the keys and values of A
    plan                           C       B       D         prefill D; D reuses A's keys of the prefix that both share
    plan                           C       B       D         decode C, B and D

**What the scheduler guarantees.**

- *Order.* Sequences start in the order of their arrival. If there is no room for the first waiting sequence, all later
  sequences wait too. A retracted sequence (see *Retraction*) goes to the end of the queue, as in SGLang.

- *Memory.* The sum of prompt tokens and max_new_tokens over all running sequences never exceeds max_total_tokens. A
  running sequence always has room for its next token, and no other sequence takes its slot.

- *Retraction.* Only a pause in mode "retract" sends running sequences back to the queue. A retracted sequence keeps its
  tokens. When a retracted sequence returns to a slot, the model recomputes the keys and values of the sequence.

- *Versions.* Every token is labelled with the version of the weights that computed the token. After an update, no
  sequence reuses the keys that a finished sequence left in the cache. Exception: after a pause in mode "in_place", each
  running sequence continues with its own old keys.

The scheduler does not promise fairness. A long request at the head of the queue delays the short requests after it.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

PREFILL_TOKENS = 1024  # maximum number of tokens in one prefill step, padding included


class SamplingParams(BaseModel, frozen=True, strict=True, extra="forbid"):
    """SGLang's sampling_params and their limits. The server does not implement min_p, presence_penalty,
    repetition_penalty and n, so each of these four accepts only its default value."""

    max_new_tokens: int = Field(default=128, ge=1, lt=2**31)
    temperature: float = Field(
        default=1.0, ge=0, lt=2**31
    )  # temperature 0: take the most likely token
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: Literal[-1] | Annotated[int, Field(ge=1, lt=2**31)] = -1  # -1: keep all tokens
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    stop: list[Annotated[str, Field(min_length=1)]] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = (
        False  # True: no token id ends the output, not even one of stop_token_ids (as in SGLang)
    )
    sampling_seed: int = 0  # protocol.py fills in a random seed if the request has none
    min_p: float = Field(default=0.0, ge=0, le=0)
    presence_penalty: float = Field(default=0.0, ge=0, le=0)
    repetition_penalty: float = Field(default=1.0, ge=1, le=1)
    n: Literal[1] = 1


@dataclass(eq=False)
class Sequence:
    """One prompt of a client's POST /generate, together with its output so far."""

    # Fields of the request. They never change:
    rid: str  # the request's id, for /abort_request
    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()  # token ids that end the output
    stream: bool = False  # True if the reply is a stream of events
    return_logprob: bool = False  # True if the reply contains logprobs of the output
    wants_prompt_logprobs: bool = False  # True if the reply contains logprobs of the prompt
    # Fields that the scheduler reads and changes:
    tokens: list[int] = field(init=False)  # prompt and output
    logprobs: list[float] = field(default_factory=list)  # one logprob for each output token
    finish: dict[str, Any] | None = (
        None  # SGLang's finish_reason; None until the sequence has finished.
    )
    # Fields that only the reply needs:
    version_starts: list[tuple[str, int]] = field(
        default_factory=list
    )  # pairs (version, index of its first token)
    # One logprob for each prompt token if `wants_prompt_logprobs` is True; otherwise the list is empty.
    prompt_logprobs: list[float | None] = field(default_factory=list)
    retractions: int = 0  # how often a pause took the sequence out of its slot
    reused_tokens: int = (
        0  # number of tokens whose keys were in the cache when the sequence started
    )
    # The event `changed` is set when the sequence has finished. If `stream` is True, `changed` is also set at every
    # token.
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def reserved(self) -> int:
        """The largest number of tokens that this sequence may store in the cache."""
        return len(self.prompt) + self.params.max_new_tokens

    @property
    def output(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[len(self.prompt) :]

    def spans(self, n: int) -> list[dict[str, Any]]:
        """Return SGLang's weight_versions for the first n output tokens.

        Each entry names the version that computed the output tokens `start` to `end` - 1.
        """
        starts = [(version, start) for version, start in self.version_starts if start < n]
        bounds = pairwise([*starts, ("", n)])
        return [
            {"version": version, "start": a, "end": b} for (version, a), (_, b) in bounds if a < b
        ]


@dataclass
class Slot:
    """One row of the KV cache. A slot keeps the tokens of a finished sequence for later requests."""

    cached: list[int] = field(
        default_factory=list
    )  # tokens whose keys and values are in this slot, from position 0 on
    stale: bool = False  # True if old weights computed some keys and values of this slot
    used: int = 0  # index of the last step that fed this slot, counted from 1


@dataclass
class Step:
    """The sequences and the tokens of one forward pass. `sequences[i]` occupies slot first_slot + i. `sequences`,
    `cached` and `feeds` have the same length."""

    first_slot: int
    sequences: list[Sequence]
    cached: list[int]  # for each sequence, number of tokens whose keys and values are in the cache
    feeds: list[
        list[int]
    ]  # for each sequence, all tokens after the cached tokens: the input of the forward pass


def common_prefix(a: list[int], b: list[int]) -> int:
    """Return the length of the longest common prefix of a and b."""
    return next((length for length, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


class Scheduler:
    """The queue, the slots and the current version. The scheduler has no lock, because only the engine's thread calls
    it."""

    def __init__(
        self, slots: int, max_total_tokens: int, version: str, decode: Callable[[list[int]], str]
    ) -> None:
        self.max_total_tokens = max_total_tokens
        self.decode = decode  # function that turns token ids into text; the search for stop strings needs texts
        # Mutable state:
        self.version = version
        self.paused: str | None = None  # mode of the current pause, or None
        self.released = False  # True while the memory is released: no sequence is computed, even without a pause
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # running[i] occupies slots[i]
        self.slots = [Slot() for _ in range(slots)]
        self.moves: list[
            tuple[int, int]
        ] = []  # pairs of slots that the cache must exchange before the next step.
        # Queue of functions that load new weights and call `renew`. No sequence starts while an update is in the queue.
        self.updates: deque[Callable[[], None]] = deque()
        self.finished: list[Sequence] = []  # finished sequences whose HTTP routes still wait
        self.steps = 0  # steps computed so far

    def __repr__(self) -> str:
        queues = (
            f"running={len(self.running)}, waiting={len(self.waiting)}, updates={len(self.updates)}"
        )
        return f"Scheduler(version={self.version!r}, paused={self.paused}, {queues})"

    def live(self) -> list[Sequence]:
        """Return all running and all waiting sequences."""
        return [*self.running, *self.waiting]

    # Methods that the server calls between two steps

    def submit(self, sequence: Sequence) -> None:
        """Append a sequence to the queue. The parser (protocol.py) has already refused requests with more tokens than
        max_total_tokens."""
        assert sequence.reserved <= self.max_total_tokens, (
            "the request is larger than max_total_tokens"
        )
        sequence.version_starts.append((self.version, 0))
        self.waiting.append(sequence)

    def abort(self, matches: Callable[[Sequence], bool] = lambda _: True) -> None:
        """Finish every running or waiting sequence for which `matches` returns True. An aborted sequence keeps the
        tokens that it has."""
        for sequence in self.live():
            if matches(sequence):
                sequence.finish = {"type": "abort", "message": "Aborted"}
                self.finished.append(sequence)
        self.waiting = deque(sequence for sequence in self.waiting if sequence.finish is None)
        self._release()

    def pause(self, mode: str) -> None:
        """Stop generating: `plan` returns only empty steps until `resume`, so new requests wait.

        In mode "abort" the running and waiting sequences finish immediately. In mode "in_place" the running sequences
        keep their slots. In mode "retract" the running sequences go to the end of the queue, and their keys and values
        are dropped.
        """
        self.paused = mode
        if mode == "abort":
            self.abort()
        elif mode == "retract":
            for i, sequence in enumerate(self.running):
                sequence.retractions += 1
                self.slots[i] = Slot()
            self.waiting.extend(self.running)
            self.running = []

    def resume(self) -> None:
        """End the pause, so that `plan` returns steps again."""
        self.paused = None

    def set_released(self, released: bool) -> None:
        """Release the memory of weights and cache if `released` is true, and allocate this memory if `released` is
        false. As in SGLang, the server process ends if the memory is to be released while the server is not idle, or if
        the memory is already in the requested state."""
        is_idle = not self.running and (self.paused or not self.waiting)
        assert is_idle or not released, (
            "release_memory_occupation should be called only when the server is idle"
        )
        assert released != self.released, "the memory is in this state already"
        self.released = released
        self.slots = [Slot() for _ in self.slots]

    def renew(self, version: str | None) -> None:
        """Mark all cached keys as stale after a weight update. Label new tokens with `version` if it is not None."""
        self.relabel(version or self.version)
        for slot in self.slots:
            slot.stale = True

    def relabel(self, version: str) -> None:
        """Label all tokens that are generated from now on with `version`."""
        if version != self.version:
            for sequence in self.live():
                sequence.version_starts.append((version, len(sequence.logprobs)))
        self.version = version

    # Methods that begin and end a step

    def plan(self) -> Step:
        """Load waiting weight updates if no sequence runs or generation is paused, admit waiting sequences, and return
        the next step.

        The step is empty if generation is paused, if the memory is released, or if there is no sequence to compute.
        """
        while self.updates and (self.paused or not self.running):
            load = self.updates.popleft()
            load()
        if self.paused or self.released:
            return Step(0, [], [], [])
        started = self._admit() if self.waiting and not self.updates else 0
        # The step prefills the sequences that `_admit` started. If `_admit` started no sequence, the step decodes all
        # running sequences.
        first = len(self.running) - started if started else 0
        sequences = self.running[first:]
        cached = [len(slot.cached) for slot in self.slots[first : len(self.running)]]
        feeds = [sequence.tokens[n:] for sequence, n in zip(sequences, cached, strict=True)]
        return Step(first, sequences, cached, feeds)

    def extend(self, step: Step, tokens: list[int], logprobs: list[float]) -> None:
        """Append the new tokens to the sequences of the step, and finish the sequences that have reached their end."""
        self.steps += 1
        for slot, feed in zip(self.slots[step.first_slot :], step.feeds):
            slot.cached += feed
            slot.used = self.steps
        for sequence, token, logprob in zip(step.sequences, tokens, logprobs, strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.finish = self._finish_reason(sequence)
        if done := [sequence for sequence in step.sequences if sequence.finish is not None]:
            self.finished += done
            self._release()

    # Admit

    def _admit(self) -> int:
        """Start waiting sequences in order, and return how many started.

        The method stops at the first sequence that does not fit into the slots, the memory or one prefill step.
        """
        reserved = sum(sequence.reserved for sequence in self.running)
        started, longest = 0, 0
        while self.waiting and len(self.running) < len(self.slots):
            sequence = self.waiting[0]
            reserved += sequence.reserved
            if reserved > self.max_total_tokens:
                break
            slot, reused = self._best_slot(sequence)
            longest = max(longest, len(sequence.tokens) - reused)
            if (
                started and (started + 1) * longest > PREFILL_TOKENS
            ):  # all rows of a step are padded to the longest row
                break
            self.waiting.popleft()
            self._exchange(slot, len(self.running))
            self.slots[len(self.running)] = Slot(sequence.tokens[:reused])
            self.running.append(sequence)
            sequence.reused_tokens = max(sequence.reused_tokens, reused)
            started += 1
        return started

    def _best_slot(self, sequence: Sequence) -> tuple[int, int]:
        """Return the idle slot that caches the longest prefix of the sequence, and the number of reusable tokens.

        If several slots have the same number of reusable tokens, the method returns the slot that was idle longest.
        """
        # The last token is always fed, because its logits give the next token. If the client wants prompt logprobs, all
        # tokens are fed.
        reusable = 0 if sequence.wants_prompt_logprobs else len(sequence.tokens) - 1
        ranked = []
        for i, slot in enumerate(self.slots[len(self.running) :], len(self.running)):
            shared = 0 if slot.stale else common_prefix(slot.cached, sequence.tokens)
            ranked.append((min(shared, reusable), -slot.used, i))
        reused, _, best = max(ranked)
        return best, reused

    def _exchange(self, i: int, j: int) -> None:
        """Exchange two slots, and record that the cache must exchange their keys and values before the next step."""
        if i != j:
            self.slots[i], self.slots[j] = self.slots[j], self.slots[i]
            self.moves.append((i, j))

    # Finish

    def _finish_reason(self, sequence: Sequence) -> dict[str, Any] | None:
        """Return SGLang's finish_reason if the last token ends the sequence, or None if the sequence continues."""
        token, params = sequence.tokens[-1], sequence.params
        if token in sequence.stop_ids:
            return {"type": "stop", "matched": token}
        if params.stop:
            # A stop string of n bytes spans at most n tokens, because a token has at least one byte. The first
            # characters of a decoded text can be wrong if earlier tokens are missing, so the method decodes n + 8
            # tokens.
            tail = max(len(stop.encode()) for stop in params.stop) + 8
            text = self.decode(sequence.output[-tail:])
            for stop in params.stop:
                if stop in text:
                    return {"type": "stop", "matched": stop}
        if len(sequence.logprobs) >= params.max_new_tokens:
            return {"type": "length", "length": len(sequence.logprobs)}
        return None

    def _release(self) -> None:
        """Free the slots of finished sequences. When a slot becomes free, the running sequence in the highest slot
        moves into the free slot."""
        for i in reversed(range(len(self.running))):
            if self.running[i].finish is not None:
                self.running[i] = self.running[-1]
                self.running.pop()
                self._exchange(i, len(self.running))
