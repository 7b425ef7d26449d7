"""A /generate body to sequences, and a sequence back to a body: SGLang's wire format.

**The rule.** What can be refused is refused here, before anything is queued, with a message that names the field and
what it may hold; so a sequence that reaches the scheduler can run to its end. The forms are those measured on SGLang:
a logprob entry is [logprob, id, null], finish_reason an object, `weight_versions` spans over the output, the stop
token kept in `output_ids` and cut from `text`. A body with one prompt and n = 1 answers an object, any other a flat
list.

Different from SGLang: an id outside the vocabulary is an error and not the server's death, a request without
sampling parameters gets plain defaults and not those of the model's generation_config.json, `sampling_seed` always
counts. Top-level fields that are not known are ignored, as SGLang does; sampling parameters that are not known or not
implemented (grammars, min_p, logit_bias ..) are errors, since ignoring one would change what is sampled.
"""

import asyncio
import math
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from tiny_scheduler import SamplingParams, Sequence


class Refused(ValueError):
    """What the caller did wrong: a 400 with this message."""


@dataclass(eq=False)
class Ticket:
    """Who waits for a request: `news` is resolved when it ended or, streaming, when it grew."""

    stream: bool
    news: asyncio.Future
    start: float = field(default_factory=time.monotonic)


CHECKS: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "max_new_tokens": (int, lambda x: x >= 0, "an integer, at least 0"),
    "temperature": ((int, float), lambda x: 0 <= x < math.inf, "a finite number, at least 0"),
    "top_p": ((int, float), lambda x: 0 < x <= 1, "a number in (0, 1]"),
    "top_k": (int, lambda x: x == -1 or x >= 1, "-1 (all) or an integer, at least 1"),
    "frequency_penalty": ((int, float), lambda x: -2 <= x <= 2, "a number in [-2, 2]"),
    "presence_penalty": ((int, float), lambda x: -2 <= x <= 2, "a number in [-2, 2]"),
    "min_p": ((int, float), lambda x: x == 0, "0: it is not implemented here"),
    "repetition_penalty": ((int, float), lambda x: x == 1, "1: it is not implemented here"),
    "stop": (list, lambda x: all(isinstance(s, str) and s for s in x), "a string or a list of strings"),
    "stop_token_ids": (list, lambda x: all(type(t) is int for t in x), "a list of token ids"),
    "ignore_eos": (bool, lambda _: True, "true or false"),
    "skip_special_tokens": (bool, lambda _: True, "true or false"),
    "sampling_seed": (int, lambda _: True, "an integer"),
    "n": (int, lambda x: 1 <= x <= 1024, "an integer in 1 .. 1024"),
}


def parse_params(raw: Any, default_seed: int) -> SamplingParams:
    """The request's sampling_params, checked. Raises Refused naming the field."""
    if not isinstance(raw, dict):
        raise Refused("sampling_params must be an object")
    given = {name: value for name, value in raw.items() if value is not None or name not in CHECKS}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    for name, value in given.items():
        if name not in CHECKS:
            raise Refused(f"unknown sampling_params field {name!r}; known are {', '.join(CHECKS)}")
        kind, holds, words = CHECKS[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool) or not holds(value):
            raise Refused(f"{name} must be {words}, not {value!r}")
    given["sampling_seed"] = given.get("sampling_seed", default_seed) % 2**64
    if given.get("temperature", 1) < 1e-6:
        given["temperature"] = 0  # dividing by it would overflow; SGLang takes it as greedy too
    frozen: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    return SamplingParams(**frozen)


def read_body(raw: bytes) -> dict[str, Any]:
    """A request's body as an object; an empty body is an empty object."""
    try:
        body = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as problem:
        raise Refused(f"the body is not JSON: {problem}") from problem
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    return body


class Protocol:
    """Reads and writes bodies for one model; it holds what is checked against, and the source of seeds."""

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        max_total_tokens: int,
        eos: frozenset[int],
        tokenizer: Any,
        seed: int | None,
    ) -> None:
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.max_total_tokens = max_total_tokens
        self.eos = eos
        self.tokenizer = tokenizer
        self.seeds = random.Random(seed)

    def parse(self, body: dict[str, Any]) -> tuple[list[Sequence], bool]:
        """A /generate body as sequences, and whether it asked for one. Raises Refused."""
        prompts, one = self.prompts(body)
        raw = body.get("sampling_params") or {}
        if isinstance(raw, list) and len(raw) != len(prompts):
            raise Refused(f"{len(raw)} sampling_params for {len(prompts)} prompts")
        rid = body.get("rid") or uuid.uuid4().hex
        if not isinstance(rid, str) and not (isinstance(rid, list) and len(rid) == len(prompts)):
            raise Refused("rid must be a string, or a list with one for each prompt")
        start = body.get("logprob_start_len", -1) if body.get("return_logprob") else -1
        if type(start) is not int:
            raise Refused("logprob_start_len must be an integer")
        stream, loop, sequences = bool(body.get("stream")), asyncio.get_running_loop(), []
        for i, prompt in enumerate(prompts):
            params = parse_params(raw[i] if isinstance(raw, list) else raw, self.seeds.getrandbits(64))
            self.check(prompt, params, start)
            for k in range(params.n):
                own = rid[i] if isinstance(rid, list) else rid if len(prompts) == 1 else f"{rid}_{i}"
                seq = Sequence(own if params.n == 1 else f"{own}_{k}", len(prompt), list(prompt), params)
                seq.params = replace(params, sampling_seed=(params.sampling_seed + k) % 2**64)
                seq.stop_ids = frozenset() if params.ignore_eos else self.eos.union(params.stop_token_ids)
                seq.logprob_start = start
                seq.context = Ticket(stream, loop.create_future())
                sequences.append(seq)
        if stream and len(sequences) > 1:
            raise Refused("stream takes one prompt and n = 1")
        return sequences, one and len(sequences) == 1

    def prompts(self, body: dict[str, Any]) -> tuple[list[list[int]], bool]:
        """Token ids of the prompts, and whether there was one that was no list of one."""
        ids, text = body.get("input_ids"), body.get("text")
        if (ids is None) == (text is None):
            raise Refused("give either input_ids or text")
        if text is not None:
            texts = [text] if isinstance(text, str) else text
            if not isinstance(texts, list) or not all(isinstance(t, str) for t in texts):
                raise Refused("text must be a string or a list of strings")
            if self.tokenizer is None:
                raise Refused("text needs a tokenizer, and the server has none: send input_ids")
            return [self.tokenizer(t)["input_ids"] for t in texts], isinstance(text, str)
        if not isinstance(ids, list) or not ids:
            raise Refused("input_ids must be a list of token ids, not empty")
        return (ids, False) if all(isinstance(row, list) for row in ids) else ([ids], True)

    def check(self, prompt: list[int], params: SamplingParams, start: int) -> None:
        """Refuse what cannot be generated."""
        vocab, context = self.vocab_size, self.context_length
        if not prompt:
            raise Refused("the prompt is empty")
        for token in prompt:
            if type(token) is not int or not 0 <= token < vocab:
                raise Refused(f"input_ids holds {token!r}; token ids are integers from 0 to {vocab - 1}")
        if len(prompt) + params.max_new_tokens > context:
            raise Refused(
                f"prompt ({len(prompt)} tokens) and max_new_tokens ({params.max_new_tokens}) together exceed the "
                f"model's context length of {context}"
            )
        if len(prompt) + params.max_new_tokens > self.max_total_tokens:
            raise Refused(
                f"prompt ({len(prompt)} tokens) and max_new_tokens ({params.max_new_tokens}) together exceed "
                f"--max-total-tokens {self.max_total_tokens}"
            )
        if params.stop and self.tokenizer is None:
            raise Refused("stop strings need a tokenizer, and the server has none: send stop_token_ids")
        if start >= len(prompt):
            raise Refused(f"logprob_start_len {start} is behind the prompt of {len(prompt)} tokens")

    def answer(self, seq: Sequence, logprobs: bool) -> dict[str, Any]:
        """The body for what a sequence has by now. Its list of logprobs grows last, so it says how much there is."""
        n = len(seq.logprobs)
        ids = seq.tokens[seq.prompt_tokens : seq.prompt_tokens + n]
        finish = seq.finish
        meta = {
            "id": seq.rid,
            "finish_reason": finish,
            "prompt_tokens": seq.prompt_tokens,
            "weight_version": seq.marks[-1][0],
            "num_retractions": seq.retractions,
            "completion_tokens": n,
            "cached_tokens": seq.cached_tokens,
            "weight_versions": seq.spans(n),
            "e2e_latency": time.monotonic() - seq.context.start,
        }
        if logprobs:
            prompt = seq.tokens[max(seq.logprob_start, 0) : seq.prompt_tokens]
            scores = seq.input_logprobs
            meta["input_token_logprobs"] = [[lp, t, None] for lp, t in zip(scores, prompt, strict=False)]
            meta["output_token_logprobs"] = [[lp, t, None] for lp, t in zip(seq.logprobs[:n], ids, strict=True)]
        body: dict[str, Any] = {"output_ids": ids, "meta_info": meta}
        if self.tokenizer is not None:
            body["text"] = self.text(ids, finish, seq.params.skip_special_tokens)
        return body

    def text(self, ids: list[int], finish: dict[str, Any] | None, skip_special: bool) -> str:
        """The output as text, without what ended it."""
        matched = (finish or {}).get("matched")
        text = self.tokenizer.decode(ids[:-1] if type(matched) is int else ids, skip_special_tokens=skip_special)
        return text[: text.index(matched)] if isinstance(matched, str) and matched in text else text
