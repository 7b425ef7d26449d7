"""SGLang's wire format: a /generate body becomes sequences, and a sequence becomes the body of a reply.

**The rule.** A request that cannot be served is refused here, before anything is queued. The message names the field
and says what it may hold. Every sequence that reaches the scheduler can therefore run to its end.

**How it works.** `Protocol.parse` reads a body, `Protocol.answer` writes one. The forms are those measured on SGLang:

- A logprob entry is [logprob, token id, null], and finish_reason is an object.
- `weight_versions` lists spans of the output: {"version": "3", "start": 0, "end": 5} covers output tokens 0 to 4.
- A stop token stays in `output_ids` and is cut from `text`.
- A body with one prompt gets an object as its reply. A body with a list of prompts gets a list.

Unknown fields at the top level of the body are ignored. Unknown or unimplemented sampling parameters are refused,
because ignoring one would change what is sampled. Prompts are token ids and never text: a client that trains on tokens
has the ids already.
"""

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from inference.tiny.scheduler import SamplingParams, Sequence
from run.fields import Refusal, as_object, get


def parse_params(raw: Any, default_seed: int) -> SamplingParams:
    """Read and check sampling_params; null counts as absent. Raises Refusal, which names the wrong fields."""
    given = {name: value for name, value in as_object(raw, "sampling_params").items() if value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    try:
        return SamplingParams.model_validate({"sampling_seed": default_seed} | given)
    except ValidationError as error:
        raise Refusal("; ".join(f"{wrong['loc'][0]}: {wrong['msg']}" for wrong in error.errors())) from error


@dataclass
class Protocol:
    """Reads requests and writes replies for one model."""

    vocab_size: int
    max_length: int  # most tokens of prompt and output together
    eos: frozenset[int]  # token ids that end a text
    decode: Callable[..., str]  # the tokenizer's method: token ids to text
    seeds: random.Random  # gives a seed to each request that has none

    def parse(self, body: dict[str, Any]) -> tuple[list[Sequence], bool]:
        """Return the sequences of a /generate body, and whether input_ids was a list of prompts. Raises Refusal."""
        ids = body.get("input_ids")
        if body.get("text") is not None or not isinstance(ids, list):
            raise Refusal("give the prompt as input_ids, a list of token ids, not as text")
        batch = bool(ids) and isinstance(ids[0], list)
        rid = get(body, "rid", str) or uuid.uuid4().hex
        start = body.get("logprob_start_len", -1)
        if start not in (-1, 0):
            raise Refusal("logprob_start_len must be 0, for logprobs of the whole prompt, or -1, for none of it")
        stream, return_logprob = bool(body.get("stream")), bool(body.get("return_logprob"))
        prompt_logprobs = return_logprob and start == 0
        if stream and batch:
            raise Refusal("stream takes one prompt")
        sequences = []
        for i, prompt in enumerate(ids if batch else [ids]):
            params = parse_params(body.get("sampling_params") or {}, self.seeds.getrandbits(64))
            self.check(prompt, params)
            stops = frozenset() if params.ignore_eos else self.eos.union(params.stop_token_ids)
            name = f"{rid}_{i}" if batch else rid
            sequences.append(Sequence(name, prompt, params, stops, stream, return_logprob, prompt_logprobs))
        return sequences, batch

    def check(self, prompt: Any, params: SamplingParams) -> None:
        """Raise Refusal if the prompt is not a list of known token ids, or is too long together with its output."""
        if not isinstance(prompt, list) or not prompt:
            raise Refusal("input_ids must be a list of token ids, not empty")
        for token in prompt:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise Refusal(f"input_ids holds {token!r}; token ids are integers from 0 to {self.vocab_size - 1}")
        total = len(prompt) + params.max_new_tokens
        if total > self.max_length:
            limit = f"{self.max_length}, the lesser of the model's context length and --max-total-tokens"
            raise Refusal(f"prompt ({len(prompt)} tokens) and max_new_tokens make {total}, more than {limit}")

    def answer(self, sequence: Sequence) -> dict[str, Any]:
        """Return the reply's body for the tokens that a sequence has now.

        The engine's thread may extend the sequence meanwhile. It appends to `tokens`, then to `logprobs`, and sets
        `finish` last. This method therefore reads `finish` first, and takes as many tokens as there are logprobs.
        """
        finish, n = sequence.finish, len(sequence.logprobs)
        ids = sequence.output[:n]
        meta: dict[str, Any] = {"id": sequence.rid, "finish_reason": finish, "num_retractions": sequence.retractions}
        meta |= {"prompt_tokens": len(sequence.prompt), "cached_tokens": sequence.reused_tokens, "completion_tokens": n}
        meta |= {"weight_version": sequence.version_starts[-1][0], "weight_versions": sequence.spans(n)}
        if sequence.return_logprob:  # prompt_logprobs is empty if the client did not ask for them
            prompt_entries = zip(sequence.prompt_logprobs, sequence.prompt)
            meta["input_token_logprobs"] = [[logprob, token, None] for logprob, token in prompt_entries]
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in zip(sequence.logprobs, ids)]
        matched = finish.get("matched") if finish else None
        return {"text": self.text(ids, matched), "output_ids": ids, "meta_info": meta}

    def text(self, ids: list[int], matched: int | str | None) -> str:
        """Return the output as text, without the stop token or stop string (`matched`) that ended it."""
        text = self.decode(ids[:-1] if isinstance(matched, int) else ids, skip_special_tokens=True)
        return text.partition(matched)[0] if isinstance(matched, str) else text
