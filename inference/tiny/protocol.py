"""This module parses the bodies of /generate requests and writes the bodies of replies, in SGLang's format.

**The rule.** `Protocol.parse` refuses a request that the server cannot complete, before the request enters the queue.
Therefore the scheduler can complete every request in the queue. The error message of a refusal names the wrong field
and describes the allowed values.

**How it works.** `Protocol.parse` reads the body of a request, and `Protocol.answer` writes the body of a reply. The
replies have the forms that were observed in SGLang's replies:

- An entry of a list of logprobs is [logprob, token id, null], and finish_reason is a JSON object.

- `weight_versions` lists spans of the output. A span with version "3", start 0 and end 5 says that version 3 computed
  output tokens 0 to 4.

- `output_ids` includes the stop token, and `text` does not.

- The reply to one prompt is a JSON object. The reply to a list of prompts is a JSON list.

The server ignores unknown fields at the top level of a request's body. The server refuses unknown or unimplemented
sampling parameters, because without them the tokens would have another distribution. Prompts are token ids and never
text, because a client that trains on tokens already has the ids.
"""

import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from inference.fields import Refusal, as_object, get
from inference.tiny.scheduler import SamplingParams, Sequence


def parse_params(raw: Any, default_seed: int) -> SamplingParams:
    """Parse and check sampling_params. A field whose value is null counts as missing. Raises a Refusal that names the
    wrong fields."""
    given = {
        name: value
        for name, value in as_object(raw, "sampling_params").items()
        if value is not None
    }
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    try:
        return SamplingParams.model_validate({"sampling_seed": default_seed} | given)
    except ValidationError as error:
        raise Refusal(
            "; ".join(f"{wrong['loc'][0]}: {wrong['msg']}" for wrong in error.errors())
        ) from error


@dataclass
class Protocol:
    """The parser of requests and the writer of replies for one model."""

    vocab_size: int
    max_length: int  # maximum number of tokens of prompt and output together
    eos: frozenset[int]  # token ids that end a text
    decode: Callable[..., str]  # the tokenizer's method that turns token ids into text
    seeds: random.Random  # generator of a seed for each prompt whose request has no seed

    def parse(self, body: dict[str, Any]) -> tuple[list[Sequence], bool]:
        """Return the sequences of a /generate body, and whether the body has a list of prompts. Raises Refusal."""
        ids = body.get("input_ids")
        if body.get("text") is not None or not isinstance(ids, list):
            raise Refusal("give the prompt as input_ids, a list of token ids, not as text")
        batch = bool(ids) and isinstance(ids[0], list)
        rid = get(body, "rid", str) or secrets.token_hex(16)
        start = body.get("logprob_start_len", -1)
        if start not in (-1, 0):
            raise Refusal(
                "logprob_start_len must be 0 (logprobs of the whole prompt) or -1 (no prompt logprobs)"
            )
        stream, return_logprob = bool(body.get("stream")), bool(body.get("return_logprob"))
        prompt_logprobs = return_logprob and start == 0
        if stream and batch:
            raise Refusal("stream needs a single prompt, not a list of prompts")
        sequences = []
        for i, prompt in enumerate(ids if batch else [ids]):
            params = parse_params(body.get("sampling_params") or {}, self.seeds.getrandbits(64))
            self.check(prompt, params)
            stops = frozenset() if params.ignore_eos else self.eos.union(params.stop_token_ids)
            name = f"{rid}_{i}" if batch else rid
            sequences.append(
                Sequence(name, prompt, params, stops, stream, return_logprob, prompt_logprobs)
            )
        return sequences, batch

    def check(self, prompt: Any, params: SamplingParams) -> None:
        """Raise Refusal if the prompt is not a list of known token ids, or if prompt and output are too long."""
        if not isinstance(prompt, list) or not prompt:
            raise Refusal("input_ids must be a list of token ids, not empty")
        for token in prompt:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise Refusal(
                    f"input_ids holds {token!r}; token ids are integers from 0 to {self.vocab_size - 1}"
                )
        total = len(prompt) + params.max_new_tokens
        if total > self.max_length:
            limit = f"{self.max_length}, the lesser of the model's context length and --max-total-tokens"
            raise Refusal(
                f"prompt ({len(prompt)} tokens) and max_new_tokens make {total}, more than {limit}"
            )

    def answer(self, sequence: Sequence) -> dict[str, Any]:
        """Return the body of a reply with all tokens that the sequence has so far.

        The engine's thread (server.py) may extend the sequence while `answer` reads the sequence. The thread appends
        each token to `tokens` before it appends the token's logprob to `logprobs`. The reply contains only the tokens
        whose logprob is already in `logprobs`. The thread sets `finish` after it has appended the last token, and
        `answer` reads `finish` before it reads the tokens. A reply with a finish reason therefore has all tokens.
        """
        finish, n = sequence.finish, len(sequence.logprobs)
        ids = sequence.output[:n]
        meta: dict[str, Any] = {
            "id": sequence.rid,
            "finish_reason": finish,
            "num_retractions": sequence.retractions,
        }
        meta |= {
            "prompt_tokens": len(sequence.prompt),
            "cached_tokens": sequence.reused_tokens,
            "completion_tokens": n,
        }
        meta |= {
            "weight_version": sequence.version_starts[-1][0],
            "weight_versions": sequence.spans(n),
        }
        if (
            sequence.return_logprob
        ):  # prompt_logprobs is empty if the client requested no prompt logprobs
            meta["input_token_logprobs"] = [
                [*pair, None] for pair in zip(sequence.prompt_logprobs, sequence.prompt)
            ]
            meta["output_token_logprobs"] = [[*pair, None] for pair in zip(sequence.logprobs, ids)]
        matched = finish.get("matched") if finish else None
        return {"text": self.text(ids, matched), "output_ids": ids, "meta_info": meta}

    def text(self, ids: list[int], matched: int | str | None) -> str:
        """Return the output tokens as text. If a stop token or a stop string (`matched`) ended the output, the text
        does not contain this token or string."""
        text = self.decode(ids[:-1] if isinstance(matched, int) else ids, skip_special_tokens=True)
        return text.partition(matched)[0] if isinstance(matched, str) else text
