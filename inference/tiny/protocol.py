"""A /generate body to sequences, and a sequence back to a body: SGLang's wire format.

**The rule.** What can be refused is refused here, before anything is queued, with a message that names the field and
what it may hold; so a sequence that reaches the scheduler can run to its end. The forms are those measured on SGLang:
a logprob entry is [logprob, id, null], finish_reason an object, `weight_versions` spans over the output, the stop
token kept in `output_ids` and cut from `text`. A body with one prompt answers an object, a list of prompts a flat list.

Different from SGLang: an id outside the vocabulary is an error and not the server's death, a request without
sampling parameters gets plain defaults and not those of the model's generation_config.json, `sampling_seed` always
counts. Top-level fields that are not known are ignored, as SGLang does; sampling parameters that are not known or not
implemented (grammars, min_p, n ..) are errors unless they ask for nothing, since ignoring one would change what is
sampled. Prompts are token ids, never text: whoever trains on tokens knows them.
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
    """The request's sampling_params, checked. Raises Refusal naming the field."""
    given = {name: value for name, value in as_object(raw, "sampling_params").items() if value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    try:
        return SamplingParams.model_validate({"sampling_seed": default_seed} | given)
    except ValidationError as error:
        raise Refusal("; ".join(f"{wrong['loc'][0]}: {wrong['msg']}" for wrong in error.errors())) from error


@dataclass
class Protocol:
    """Reads and writes bodies for one model; it holds what is checked against, and the source of seeds."""

    vocab_size: int
    max_length: int  # tokens of prompt and output together
    eos: frozenset[int]
    decode: Callable[..., str]  # the tokenizer's
    seeds: random.Random

    def parse(self, body: dict[str, Any]) -> tuple[list[Sequence], bool]:
        """A /generate body as sequences, and whether input_ids was a list of prompts. Raises Refusal."""
        ids = body.get("input_ids")
        if body.get("text") is not None or not isinstance(ids, list):
            raise Refusal("give the prompt as input_ids, a list of token ids, not as text")
        batch = bool(ids) and isinstance(ids[0], list)
        rid = get(body, "rid", str) or uuid.uuid4().hex
        start = body.get("logprob_start_len", -1)
        if start not in (-1, 0):
            raise Refusal("logprob_start_len must be 0, for logprobs of the whole prompt, or -1, for none of it")
        stream, return_logprob = bool(body.get("stream")), bool(body.get("return_logprob"))
        scored = return_logprob and start == 0
        if stream and batch:
            raise Refusal("stream takes one prompt")
        sequences = []
        for i, prompt in enumerate(ids if batch else [ids]):
            params = parse_params(body.get("sampling_params") or {}, self.seeds.getrandbits(64))
            self.check(prompt, params)
            stops = frozenset() if params.ignore_eos else self.eos.union(params.stop_token_ids)
            name = f"{rid}_{i}" if batch else rid
            sequences.append(Sequence(name, len(prompt), prompt, params, stops, scored, stream, return_logprob))
        return sequences, batch

    def check(self, prompt: Any, params: SamplingParams) -> None:
        """Refuse what cannot be generated."""
        if not isinstance(prompt, list) or not prompt:
            raise Refusal("input_ids must be a list of token ids, not empty")
        for token in prompt:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise Refusal(f"input_ids holds {token!r}; token ids are integers from 0 to {self.vocab_size - 1}")
        if len(prompt) + params.max_new_tokens > self.max_length:
            raise Refusal(
                f"prompt ({len(prompt)} tokens) and max_new_tokens ({params.max_new_tokens}) together exceed "
                f"{self.max_length}, the lesser of the model's context length and --max-total-tokens"
            )

    def answer(self, seq: Sequence) -> dict[str, Any]:
        """The body for what a sequence has by now. Meanwhile it grows, its list of logprobs last, and then it ends: so
        that list says how much there is, and the end is looked at first."""
        finish, n = seq.finish, len(seq.logprobs)
        ids = seq.tokens[seq.prompt_tokens : seq.prompt_tokens + n]
        meta: dict[str, Any] = {
            "id": seq.rid,
            "finish_reason": finish,
            "prompt_tokens": seq.prompt_tokens,
            "weight_version": seq.marks[-1][0],
            "num_retractions": seq.retractions,
            "completion_tokens": n,
            "cached_tokens": seq.cached_tokens,
            "weight_versions": seq.spans(n),
        }
        if seq.return_logprob:
            meta["input_token_logprobs"] = [[lp, t, None] for lp, t in zip(seq.input_logprobs, seq.tokens)]
            meta["output_token_logprobs"] = [[lp, t, None] for lp, t in zip(seq.logprobs[:n], ids, strict=True)]
        return {"text": self.text(ids, (finish or {}).get("matched")), "output_ids": ids, "meta_info": meta}

    def text(self, ids: list[int], matched: int | str | None) -> str:
        """The output as text, without the token or string that ended it."""
        text = self.decode(ids[:-1] if isinstance(matched, int) else ids, skip_special_tokens=True)
        return text.partition(matched)[0] if isinstance(matched, str) else text
