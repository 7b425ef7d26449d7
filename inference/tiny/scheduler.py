"""The scheduler: it decides which sequences the next step feeds, and when new weights may be loaded.

**The rule.** A request becomes a sequence. The sequence waits in a queue, runs in a *slot* (one row of the KV cache),
and finishes once. Each step gives every sequence that it feeds one more token.

**How it works.** The engine's thread alternates between two calls, and `model.py` computes a forward pass in between.

    plan()      1. load new weights, if nothing runs or generation is paused
                2. admit waiting sequences into free slots
                3. feed the sequences that were just admitted (prefill), or else all running ones (decode)
    extend()    append one token to each sequence that was fed, and finish those that have reached their end

The running sequences occupy slots 0 to n-1, so a step reads one contiguous part of the cache. When a sequence
finishes, the last running sequence moves into its slot. An example with three slots and four requests:

    event               waiting    slot 0  slot 1  slot 2    the step that follows
    submit A, B, C, D   A B C D    -       -       -
    plan                D          A       B       C         prefill A, B and C
    plan                D          A       B       C         decode A, B and C; A reaches its end
    A finishes          D          C       B       (A)       C moved; slot 2 remembers the keys and values of A
    plan                           C       B       D         prefill D, which reuses A's keys if its prompt begins alike
    plan                           C       B       D         decode C, B and D

**What the scheduler guarantees.**

- *Order.* Sequences start in the order of their arrival. If the first one does not fit, all others wait behind it.
  A retracted sequence restarts before all sequences that have not started.
- *Memory.* The prompts and max_new_tokens of all running sequences together never exceed max_total_tokens. A running
  sequence therefore always has room for its next token, and is never evicted to make room for another.
- *Retraction.* Only a pause in mode "retract" sends running sequences back to the queue. They keep their tokens, and
  their keys and values are computed again when they restart.
- *End.* Every sequence finishes exactly once, with the tokens that it has, for the reason stop, length or abort.
- *Versions.* Every token is labelled with the version of the weights that computed it. Keys of old weights are never
  given to another sequence. Only a sequence that was paused in mode "in_place" goes on with its own old keys.

The scheduler does not promise fairness: a long request at the head of the queue delays the short ones behind it.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

PREFILL_TOKENS = 1024  # most tokens of one prefill step, padding included; larger steps overflow a CPU's cache


class SamplingParams(BaseModel, frozen=True, strict=True, extra="forbid"):
    """SGLang's sampling_params and their limits. The last four are not implemented and accept only their default."""

    max_new_tokens: int = Field(default=128, ge=1, lt=2**31)
    temperature: float = Field(default=1.0, ge=0, lt=2**31)  # 0 takes the most likely token
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: Literal[-1] | Annotated[int, Field(ge=1, lt=2**31)] = -1  # -1 keeps all tokens
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    stop: list[Annotated[str, Field(min_length=1)]] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False  # also ignores stop_token_ids, as in SGLang
    sampling_seed: int = 0  # protocol.py fills in a random seed if the request has none
    min_p: float = Field(default=0.0, ge=0, le=0)
    presence_penalty: float = Field(default=0.0, ge=0, le=0)
    repetition_penalty: float = Field(default=1.0, ge=1, le=1)
    n: Literal[1] = 1


@dataclass(eq=False)
class Sequence:
    """A client's request and what has been generated for it so far."""

    # What the client asked for, which never changes:
    rid: str  # the request's id, which /abort_request names
    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()  # token ids that end the output
    stream: bool = False  # the client wants to see every token as it comes
    return_logprob: bool = False  # the reply holds logprobs
    wants_prompt_logprobs: bool = False  # the reply holds logprobs of the prompt, too
    # What the steps compute:
    tokens: list[int] = field(init=False)  # prompt and output
    logprobs: list[float] = field(default_factory=list)  # one for each output token
    prompt_logprobs: list[float | None] = field(default_factory=list)  # one for each prompt token, if requested
    finish: dict[str, Any] | None = None  # SGLang's finish_reason, as soon as the sequence has finished
    # What only the reply needs:
    version_starts: list[tuple[str, int]] = field(default_factory=list)  # (version, index of its first output token)
    retractions: int = 0  # how often a pause took the sequence out of its slot
    reused_tokens: int = 0  # tokens whose keys were in the cache when the sequence started
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # set at the end; if streaming, at every token

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def reserved(self) -> int:
        """The number of tokens that this sequence may fill in the cache at most."""
        return len(self.prompt) + self.params.max_new_tokens

    @property
    def output(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[len(self.prompt) :]

    def spans(self, n: int) -> list[dict[str, Any]]:
        """Return SGLang's weight_versions: which version computed output tokens start .. end - 1, for the first n."""
        starts = [(version, start) for version, start in self.version_starts if start < n]
        bounds = pairwise([*starts, ("", n)])
        return [{"version": version, "start": a, "end": b} for (version, a), (_, b) in bounds if a < b]


@dataclass
class Slot:
    """One row of the KV cache. A slot whose sequence has finished remembers its tokens for a later request."""

    cached: list[int] = field(default_factory=list)  # the tokens whose keys and values it holds, from position 0 on
    stale: bool = False  # some of these keys and values come from earlier weights
    used: int = 0  # number of the last step that fed this slot


@dataclass
class Step:
    """One forward pass: sequences[i] computes in slot first_slot + i. The three lists have the same length."""

    first_slot: int
    sequences: list[Sequence]
    cached: list[int]  # how many tokens of each sequence have their keys and values in the cache
    feeds: list[list[int]]  # the tokens after those: the input of the forward pass


def common_prefix(a: list[int], b: list[int]) -> int:
    """Return the length of the longest common prefix of a and b."""
    for length, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return length
    return min(len(a), len(b))


class Scheduler:
    """The queue, the slots and the current version. It is not thread-safe: only the engine's thread calls it."""

    def __init__(self, slots: int, max_total_tokens: int, version: str, decode: Callable[[list[int]], str]) -> None:
        self.max_total_tokens = max_total_tokens
        self.decode = decode  # turns token ids into text, to search it for stop strings
        # Everything below changes; nothing else does.
        self.version = version
        self.paused: str | None = None  # the mode of the pause, or None
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # running[i] computes in slots[i]
        self.slots = [Slot() for _ in range(slots)]
        self.moves: list[tuple[int, int]] = []  # pairs of slots that the cache must exchange before the next step
        # Functions that load new weights and call `renew`, oldest first. While one waits here, no sequence starts.
        self.updates: deque[Callable[[], None]] = deque()
        self.finished: list[Sequence] = []  # finished sequences that the server has not announced yet
        self.steps = 0  # steps computed so far

    def __repr__(self) -> str:
        queues = f"running={len(self.running)}, waiting={len(self.waiting)}, updates={len(self.updates)}"
        return f"Scheduler(version={self.version!r}, paused={self.paused}, {queues})"

    def live(self) -> list[Sequence]:
        """Return every sequence that has not finished, running or waiting."""
        return [*self.running, *self.waiting]

    # What the server asks for between two steps

    def submit(self, sequence: Sequence) -> None:
        """Append a sequence to the queue. The protocol has refused requests that could never fit."""
        assert sequence.reserved <= self.max_total_tokens, "the request is larger than max_total_tokens"
        sequence.version_starts.append((self.version, 0))
        self.waiting.append(sequence)

    def abort(self, matches: Callable[[Sequence], bool] = lambda _: True) -> None:
        """Finish every sequence that matches, running or waiting, with the tokens that it has."""
        for sequence in self.live():
            if matches(sequence):
                sequence.finish = {"type": "abort", "message": "Aborted"}
                self.finished.append(sequence)
        self.waiting = deque(sequence for sequence in self.waiting if sequence.finish is None)
        self._release()

    def pause(self, mode: str) -> None:
        """Plan no step until `resume`, so new requests wait.

        mode: running sequences finish ("abort"), keep their slots ("in_place"), or return to the head of the queue
        without their keys and values ("retract").
        """
        self.paused = mode
        if mode == "abort":
            self.abort()
        elif mode == "retract":
            for i, sequence in enumerate(self.running):
                sequence.retractions += 1
                self.slots[i] = Slot()
            self.waiting.extendleft(reversed(self.running))
            self.running = []

    def resume(self) -> None:
        """Plan steps again."""
        self.paused = None

    def renew(self, version: str | None) -> None:
        """Record that the weights have changed, so all cached keys are stale. None keeps the version's label."""
        self.relabel(version or self.version)
        for slot in self.slots:
            slot.stale = True

    def relabel(self, version: str) -> None:
        """Label all tokens from now on with this version."""
        if version != self.version:
            for sequence in self.live():
                sequence.version_starts.append((version, len(sequence.logprobs)))
        self.version = version

    # The two halves of a step

    def plan(self) -> Step:
        """Load new weights if allowed, admit the sequences that fit, and return the next step, empty if none is due."""
        while self.updates and (self.paused or not self.running):
            load = self.updates.popleft()
            load()
        if self.paused:
            return Step(0, [], [], [])
        started = 0 if self.updates else self._admit()
        first = len(self.running) - started if started else 0  # prefill the new sequences alone, else decode all
        sequences = self.running[first:]
        cached = [len(slot.cached) for slot in self.slots[first : len(self.running)]]
        feeds = [sequence.tokens[n:] for sequence, n in zip(sequences, cached, strict=True)]
        return Step(first, sequences, cached, feeds)

    def extend(self, step: Step, tokens: list[int], logprobs: list[float]) -> None:
        """Append to each sequence of the step its new token, and finish the sequences that have reached their end."""
        self.steps += 1
        for slot, feed in zip(self.slots[step.first_slot :], step.feeds):
            slot.cached += feed
            slot.used = self.steps
        for sequence, token, logprob in zip(step.sequences, tokens, logprobs, strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.finish = self._finish_reason(sequence)
        self.finished += [sequence for sequence in step.sequences if sequence.finish is not None]
        self._release()

    # Admit

    def _admit(self) -> int:
        """Start waiting sequences in order, as many as fit into the slots, the memory and one prefill step. Return how
        many started."""
        reserved = sum(sequence.reserved for sequence in self.running)
        started, longest = 0, 0
        while self.waiting and len(self.running) < len(self.slots):
            sequence = self.waiting[0]
            reserved += sequence.reserved
            if reserved > self.max_total_tokens:
                break
            slot, reused = self._best_slot(sequence)
            longest = max(longest, len(sequence.tokens) - reused)
            if started and (started + 1) * longest > PREFILL_TOKENS:  # each row is padded to the longest
                break
            self.waiting.popleft()
            self._exchange(slot, len(self.running))
            self.slots[len(self.running)] = Slot(sequence.tokens[:reused])
            self.running.append(sequence)
            sequence.reused_tokens = max(sequence.reused_tokens, reused)
            started += 1
        return started

    def _best_slot(self, sequence: Sequence) -> tuple[int, int]:
        """Return the idle slot that caches most of the sequence, and how many tokens of it can be reused. Among equals,
        return the slot that has been idle for longest."""
        # The last token is fed in any case, because its logits give the next token. Prompt logprobs need all logits.
        reusable = 0 if sequence.wants_prompt_logprobs else len(sequence.tokens) - 1
        ranked = []
        for i, slot in enumerate(self.slots[len(self.running) :], len(self.running)):
            shared = 0 if slot.stale else common_prefix(slot.cached, sequence.tokens)
            ranked.append((min(shared, reusable), -slot.used, i))
        reused, _, best = max(ranked)
        return best, reused

    def _exchange(self, i: int, j: int) -> None:
        """Exchange two slots, and have the cache exchange their keys and values before the next step."""
        if i != j:
            self.slots[i], self.slots[j] = self.slots[j], self.slots[i]
            self.moves.append((i, j))

    # Finish

    def _finish_reason(self, sequence: Sequence) -> dict[str, Any] | None:
        """Return why the sequence ends with its last token, as SGLang's finish_reason, or None if it goes on."""
        token, params = sequence.tokens[-1], sequence.params
        if token in sequence.stop_ids:
            return {"type": "stop", "matched": token}
        if params.stop:
            tail = max(len(stop.encode()) for stop in params.stop) + 8  # every token holds at least one byte
            text = self.decode(sequence.output[-tail:])
            for stop in params.stop:
                if stop in text:
                    return {"type": "stop", "matched": stop}
        if len(sequence.logprobs) >= params.max_new_tokens:
            return {"type": "length", "length": len(sequence.logprobs)}
        return None

    def _release(self) -> None:
        """Free the slots of finished sequences: the last running sequence moves into each hole."""
        for i in reversed(range(len(self.running))):
            if self.running[i].finish is not None:
                self.running[i] = self.running[-1]
                self.running.pop()
                self._exchange(i, len(self.running))
