"""A request and its answer, in Python and in SGLang's JSON.

    ModelRequest -> generate_body -> POST /generate -> parse_segment -> ModelResponse

A request names every sampling parameter, because SGLang would take a missing parameter from the
model's generation_config.json, which the trainer does not read. For every token of an answer,
training needs three numbers: the id, the version of the policy that sampled the token, and the
log-probability under this policy:

    output_ids               [17, 4, 9]
    output_token_logprobs    [[-0.2, 17, null], [-1.1, 4, null], [-0.4, 9, null]]
    weight_versions          [{"version":"3","start":0,"end":2}, {"version":"4","start":2,"end":3}]

SGLang before 0.5.19 reports only `weight_version`, the version at the end of the answer. If an
answer's finish reason has a status code, the request failed. Without one, a finish reason of type
`abort` means that a pause interrupted the request.

A logprob is log_softmax(logits / temperature) over the whole vocabulary. With greedy decoding,
top_p, top_k, penalties or grammars, tokens are sampled from another distribution. So training
leaves the tokens of such answers out of the loss (`trains_exactly`).
"""

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

CHECKED = ConfigDict(
    extra="forbid",
    validate_assignment=True,
    allow_inf_nan=False,
    coerce_numbers_to_str=True,  # such as 128 in server.args=[--cuda-graph-max-bs,128]
    use_attribute_docstrings=True,
)
Penalty = Annotated[float, Field(ge=-2, le=2)]
SHAPING = {"top_p", "top_k", "frequency_penalty", "presence_penalty", "json_schema"}


class EngineError(RuntimeError):
    """A request failed. Status 400 means that the request is wrong and must not be repeated. Status
    502 means that the answer cannot be read."""

    def __init__(self, message: str, status: int = 500, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code  # OpenAI's name for the error, or ""


class Sampling(BaseModel):
    """The sampling parameters that the engine sends and every server understands."""

    model_config = CHECKED

    max_new_tokens: int = Field(512, ge=1, lt=2**31)
    """token limit of an answer"""
    temperature: float = Field(1.0, ge=0)
    """divides the logits; 0: greedy"""
    top_p: float = Field(1.0, gt=0, le=1)
    """sample from the likeliest tokens, up to this total probability"""
    top_k: int = Field(-1, ge=-1, lt=2**31)
    """number of likeliest tokens to sample from; -1: all"""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """texts that end an answer"""
    stop_token_ids: list[int] = []
    """tokens that end an answer, besides the model's own"""
    frequency_penalty: Penalty = 0.0
    """lowers a token's logit each time the token occurs"""


class GenerationHyperparameters(Sampling):
    """The fields of `gconfig`: sampling parameters and group size."""

    n_samples: int = Field(1, ge=1)
    """episodes per prompt, the group size"""
    greedy: bool = False
    """always take the likeliest token"""

    def new(self, **changes: Any) -> Self:
        return self.model_copy(update=changes)

    def for_call(self, **more: Any) -> "CallParameters":
        return CallParameters(**self.model_dump() | more)

    @property
    def is_greedy(self) -> bool:
        return self.greedy or self.temperature < 1e-6  # servers have the same bound

    @property
    def trains_exactly(self) -> bool:
        """Return whether the server samples from softmax(logits / temperature), as training
        assumes."""
        return not self.is_greedy and not SHAPING & self.model_dump(exclude_defaults=True).keys()


class CallParameters(GenerationHyperparameters):
    presence_penalty: Penalty = 0.0
    json_schema: str | None = None  # needs a server that supports grammars
    seed: int | None = None


@dataclass
class ModelRequest:
    """A prompt to complete. Requests with the same `affinity` go to the same server."""

    input_ids: list[int]
    rid: str = field(default_factory=lambda: secrets.token_hex(16))
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    tokenizer: Any = None  # AReaL's field, unused here
    call: str = ""  # name of the call in the run, such as "7-3.1": task 7, member 3, call 1

    def __post_init__(self) -> None:
        # In transformers 5, apply_chat_template returns an object with `input_ids`, not a list.
        self.input_ids = getattr(self.input_ids, "input_ids", self.input_ids)

    @property
    def affinity(self) -> str:
        """The call's prompt group, such as "7" for the calls "7-3.1" and "7.1"."""
        group, _, rest = self.call.rpartition("-")
        return group or rest.partition(".")[0] or self.rid


@dataclass
class ModelResponse:
    """A completion, or a segment of one.

    The output lists have one entry per token, including the stop token. The stop reason `abort`
    marks a segment that a pause interrupted.
    """

    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)  # under the sampling policy
    output_versions: list[int] = field(default_factory=list)  # of the sampling policy
    stop_reason: str = "stop"
    temperature: float = 1.0  # at which the logprobs are taken; 1 if greedy
    trains_exactly: bool = True

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)

    def extend(self, segment: "ModelResponse") -> None:
        self.output_tokens += segment.output_tokens
        self.output_logprobs += segment.output_logprobs
        self.output_versions += segment.output_versions
        self.stop_reason = segment.stop_reason


def call_seed(seed: int, episode: str, call: int) -> int:
    """Return a call's seed, which does not depend on other episodes."""
    digest = hashlib.blake2b(f"{seed}/{episode}/{call}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def generate_body(
    input_ids: list[int], gconfig: GenerationHyperparameters, max_new_tokens: int
) -> dict[str, Any]:
    g = gconfig.for_call()
    params = g.model_dump(exclude={"n_samples", "greedy", "seed"}, exclude_none=True)
    params |= {
        "max_new_tokens": max_new_tokens,
        "temperature": 0.0 if g.is_greedy else g.temperature,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    if g.seed is not None:
        params["sampling_seed"] = g.seed % 2**63
    return {"input_ids": input_ids, "sampling_params": params, "return_logprob": True}


def probe(input_ids: list[int], max_new_tokens: int = 1) -> dict[str, Any]:
    """The body of a request that tests a server with a few greedy tokens."""
    return generate_body(input_ids, GenerationHyperparameters(greedy=True), max_new_tokens)


def parse_segment(answer: dict[str, Any]) -> ModelResponse:
    """Read a server's answer.

    Raises EngineError with status 400 if the server rejected the request, and 503 if the server
    failed. The status is 502 if the answer is incomplete, contradicts itself, or has a version that
    is no number, such as "7-incomplete" after a failed update.
    """
    try:
        meta, tokens = answer["meta_info"], answer["output_ids"]
        finish = meta["finish_reason"]
        if status := finish.get("status_code"):
            message = f"the server answered {status}: {finish['message']}"
            raise EngineError(message, 400 if status < 500 else 503)
        entries = meta["output_token_logprobs"] if tokens else []  # [logprob, id, text]
        logprobs = [entry[0] for entry in entries]
        if [entry[1] for entry in entries] != tokens:
            raise ValueError("other ids stand beside the logprobs")
        if not all(-1e30 < logprob <= 1e-3 for logprob in logprobs):
            raise ValueError("a logprob is above 0, or no number")
        whole = {"version": meta["weight_version"], "start": 0, "end": len(tokens)}
        spans = meta.get("weight_versions") or [whole]
        versions = [int(s["version"]) for s in spans for _ in tokens[s["start"] : s["end"]]]
        if len(versions) != len(tokens) or versions != sorted(versions):
            raise ValueError("the versions have gaps, or fall")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        hint = "start SGLang with --weight-version 0, and check its last weight update"
        raise EngineError(f"the answer cannot be read ({error!r}): {hint}", 502) from error
    return ModelResponse([], tokens, logprobs, versions, stop_reason=finish.get("type", ""))
