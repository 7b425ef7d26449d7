"""This module defines a request and its answer, writes a request as SGLang's JSON, and parses SGLang's answers.

    ModelRequest -> sampling_params -> POST /generate -> parse_segment -> ModelResponse

**Requests.** A request contains every sampling parameter. If a parameter were missing, a server would take its value
from the model's generation_config.json, a file that the trainer does not read.

**Answers.** Training needs three facts about each token: its id, its log-probability under the policy that sampled it,
and the version of this policy. If an answer lacks the id, the log-probability or the version of a token,
`parse_segment` raises EngineError.

    output_ids               [17, 4, 9]
    output_token_logprobs    [[-0.2, 17, null], [-1.1, 4, null], [-0.4, 9, null]]     logprob, token id, text
    weight_versions          [{"version":"3","start":0,"end":2}, {"version":"4","start":2,"end":3}]

In the example, version 3 of the weights computed the tokens 17 and 4, and version 4 computed the token 9. SGLang before
0.5.19 reports only `weight_version`, the version of the weights at the end of the answer.

**Finish reasons.** The finish reason `abort` without a status means that a pause interrupted the request. The engine
(engine.py) continues an interrupted request later. The finish reason `abort` with a status is an error: the status is
4xx if the request is wrong, and 5xx if the server has no room for the request.

**Logprobs.** A server computes a logprob as log_softmax(logits / temperature) over the whole vocabulary. With top_p,
top_k, penalties or a grammar, the server samples from a distribution that differs from softmax(logits / temperature).
`trains_exactly` is True if training can reproduce the server's sampling distribution. `trains_exactly` is False for a
greedy request, and for a request with top_p, top_k, a penalty or a grammar.

The class names are those of AReaL's areal/api/io_struct.py (section 2 of the write-up, see docs/companion.md).
"""

import hashlib
import secrets
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from inference.wire import EngineError


@dataclass
class GenerationHyperparameters:
    """The sampling parameters of a request."""

    n_samples: Annotated[int, "[1, inf)"] = 1  # number of samples per prompt (the group size); one request per sample
    max_new_tokens: Annotated[int, "[1, inf)"] = 512  # maximum number of new tokens in a turn, if the context has room
    temperature: Annotated[float, "[0, inf)"] = 1.0  # divisor of the logits; 0: always sample the likeliest token
    top_p: Annotated[float, "(0, 1]"] = 1.0  # sample only the likeliest tokens with this total probability; 1: all
    top_k: Annotated[int, "[-1, -1] or [1, inf)"] = -1  # number of likeliest tokens to sample from; -1: all tokens
    stop: list[str] = field(default_factory=list)  # strings that end a turn; the completion includes them
    stop_token_ids: list[int] = field(default_factory=list)  # token ids that end a turn, in addition to the model's own
    frequency_penalty: Annotated[float, "[-2, 2]"] = 0.0  # number subtracted from a token's logit for each occurrence
    presence_penalty: Annotated[float, "[-2, 2]"] = 0.0  # number subtracted from a token's logit after its first use
    greedy: bool = False  # true: always sample the likeliest token, as at temperature 0
    seed: Annotated[int, "[0, 4294967295]"] | None = None  # seed of the sampling; null: the run's seed, or random
    json_schema: str | None = None  # JSON schema that a sample must fit; needs a server with a grammar backend

    def new(self, **changes: Any) -> "GenerationHyperparameters":
        """Return a copy with the given fields changed."""
        return replace(self, **changes)

    @property
    def is_greedy(self) -> bool:
        """True if the server always takes the likeliest token. Servers treat a temperature below 1e-6 as 0."""
        return self.greedy or self.temperature < 1e-6

    @property
    def trains_exactly(self) -> bool:
        """True if the server samples from plain softmax(logits / temperature), which training can reproduce."""
        unpenalised = self.frequency_penalty == self.presence_penalty == 0
        whole = self.top_p == 1 and self.top_k == -1 and self.json_schema is None
        return whole and unpenalised and not self.is_greedy


SAMPLING_KEYS = {f.name for f in fields(GenerationHyperparameters)}


@dataclass
class ModelRequest:
    """A request to complete one prompt. Requests with the same `affinity` go to the same server."""

    input_ids: list[int]  # the token ids of the prompt
    rid: str = field(default_factory=lambda: secrets.token_hex(16))
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    tokenizer: Any = None
    session: str | None = None
    call: str = ""  # name of the call in the run, such as "7-3.1": task 7, member 3, call 1 (run/schedule.py)

    def __post_init__(self) -> None:
        # apply_chat_template of transformers 5 returns a BatchEncoding, whose attribute `input_ids` is the list of
        # token ids.
        self.input_ids = getattr(self.input_ids, "input_ids", self.input_ids)

    @property
    def affinity(self) -> str:
        """The key that chooses a server: the number of the prompt group, such as "7" for call "7-3.1".

        If a request has no group, the key is its session or, without a session, its `rid`.
        """
        group, dash, _ = self.call.partition("-")
        return group if dash and group.isdecimal() else self.session or self.rid


@dataclass
class ModelResponse:
    """The completion of one request. Each output list has one entry per generated token, including the stop token.

    The engine returns a completion with the stop reason "stop" or "length", and the parser of tool calls may change the
    stop reason to "tool_calls". A segment is the part of a completion that one POST /generate produces. The class
    ModelResponse represents a segment as well as a whole completion. A segment that a pause interrupted has the stop
    reason "abort". A segment that is still being streamed has the stop reason "".
    """

    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)  # log_softmax(logits / temperature) of each token
    output_versions: list[int] = field(default_factory=list)  # version of the weights that computed each token
    stop_reason: str = "stop"
    temperature: float = 1.0  # temperature at which the logprobs were computed; 1 if the sampling was greedy
    trains_exactly: bool = True  # whether training can reproduce the sampling distribution
    regenerated: int = 0  # number of segments that were requested again after a server failed

    @property
    def input_len(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        """Length of the completion in tokens."""
        return len(self.output_tokens)

    def replace_from(self, done: int, segment: "ModelResponse") -> None:
        """Keep the first `done` output tokens, append the tokens of `segment`, and copy the segment's stop reason."""
        self.output_tokens[done:] = segment.output_tokens
        self.output_logprobs[done:] = segment.output_logprobs
        self.output_versions[done:] = segment.output_versions
        self.stop_reason = segment.stop_reason


def call_seed(seed: int, episode: str, call: int) -> int:
    """Return a seed below 2^31 for one call of an episode: a hash of the three arguments."""
    digest = hashlib.blake2b(f"{seed}/{episode}/{call}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def sampling_params(gconfig: GenerationHyperparameters, offset: int = 0) -> dict[str, Any]:
    """Return SGLang's sampling parameters for the segment that starts after `offset` generated tokens."""
    params = {
        "max_new_tokens": gconfig.max_new_tokens - offset,
        "temperature": 0.0 if gconfig.is_greedy else gconfig.temperature,
        "top_p": gconfig.top_p,
        "top_k": gconfig.top_k,
        "min_p": 0.0,
        "frequency_penalty": gconfig.frequency_penalty,
        "presence_penalty": gconfig.presence_penalty,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(gconfig.stop_token_ids),
        "stop": list(gconfig.stop) or None,  # a server without a tokenizer refuses `stop`, even an empty list
        "json_schema": gconfig.json_schema,
        "sampling_seed": None if gconfig.seed is None else gconfig.seed % 2**63,  # SGLang accepts 63 bits per seed
    }
    return {name: value for name, value in params.items() if value is not None}


def generate_body(input_ids: list[int], gconfig: GenerationHyperparameters, offset: int = 0) -> dict[str, Any]:
    """Return the body of a POST /generate. `input_ids` contains the prompt and the `offset` tokens generated so far."""
    return {"input_ids": input_ids, "sampling_params": sampling_params(gconfig, offset), "return_logprob": True}


def probe(input_ids: list[int]) -> dict[str, Any]:
    """Return the body of a POST /generate that requests a single token, sampled greedily."""
    return generate_body(input_ids, GenerationHyperparameters(greedy=True, max_new_tokens=1))


def check_segment(tokens: list[int], entries: list[list], spans: list[dict[str, Any]], vocab_size: int | None) -> None:
    """Raise EngineError (503) if an answer contradicts itself or cannot come from a model with `vocab_size` token ids.

    The token ids must be integers in the vocabulary, and must equal the ids in output_token_logprobs. A logprob may
    exceed 0 only by a rounding error. The spans of versions must cover all tokens without a gap, and the version must
    not decrease from one span to the next. The logprobs must fit into float32 and the versions into int32, the types of
    the trainer's tensors.
    """
    if tokens and ({*map(type, tokens)} != {int} or min(tokens) < 0 or max(tokens) >= (vocab_size or 2**31)):
        raise EngineError(f"a token id of an answer is not an integer below {vocab_size}", 503)
    if [entry[1] for entry in entries] != tokens or not all(-1e30 < entry[0] <= 1e-3 for entry in entries):
        raise EngineError("an answer has other ids beside its logprobs, or a logprob that is not from -1e30 to 0", 503)
    bounds = [0, *(end for span in spans for end in (span["start"], span["end"])), len(tokens)]
    versions = [int(span["version"]) for span in spans]
    if bounds[::2] != bounds[1::2] or bounds != sorted(bounds) or sorted(most := [*versions, 2**31 - 1]) != most:
        raise EngineError(f"the spans {spans[:9]} do not cover {len(tokens)} tokens with versions that never fall", 503)


def parse_segment(answer: dict[str, Any], vocab_size: int | None = None) -> ModelResponse:
    """Parse an answer of a server, or one event of a stream. For an event that is not the last of its stream, the
    response has stop_reason "".

    Raises EngineError with status 400 if the server reports that the request is wrong. Raises EngineError with status
    502 if the answer lacks ids, logprobs or versions, which training needs. Raises EngineError with status 503 if the
    server reports a status of 500 or more, if the server's last weight update was not completed, or if the answer
    contradicts itself.
    """
    try:
        meta, tokens = answer["meta_info"], answer["output_ids"]
        finish = dict(meta["finish_reason"] or {})  # only the last event of a stream has a finish_reason
        status = finish.get("status_code") or 0
        if status >= 400:
            raise EngineError(f"the server answered {status}: {finish['message']}", 400 if status < 500 else 503)
        entries = meta["output_token_logprobs"] if tokens else []
        whole = {"version": meta["weight_version"], "start": 0, "end": len(tokens)}
        spans = meta.get("weight_versions") or [whole]
        check_segment(tokens, entries, spans, vocab_size)
        versions = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    except (LookupError, TypeError, ValueError) as error:
        hint = "start SGLang with --weight-version 0, and check that its last weight update succeeded"
        # If a weight update failed, the version ends in "-incomplete". An error after a failed update has status 503,
        # because a retry may succeed.
        status = 503 if "-incomplete" in str(error) else 502
        raise EngineError(f"the answer cannot be read ({error!r}): {hint}", status) from error
    return ModelResponse([], tokens, [entry[0] for entry in entries], versions, stop_reason=finish.get("type", ""))


def parse_scores(answer: dict[str, Any], ids: list[int]) -> list[float]:
    """Return the log-probabilities of the tokens `ids`, read from a server's answer. The first token has
    log-probability 0, because no token comes before it. Raises EngineError: 502 if the answer has no list of
    log-probabilities, 503 if a token id or a log-probability is wrong."""
    try:
        entries = [[0.0, ids[0]], *answer["meta_info"]["input_token_logprobs"][1:]]
        check_segment(ids, entries, [{"version": "0", "start": 0, "end": len(ids)}], None)
    except (LookupError, TypeError) as error:
        raise EngineError(f"the scores of a sequence cannot be read ({error!r})", 502) from error
    return [entry[0] for entry in entries]
