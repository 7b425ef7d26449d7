"""A request for tokens and its answer: how tokens are sampled, what comes back, and both on SGLang's wire.

    ModelRequest -> sampling_params -> POST /generate -> parse_segment -> ModelResponse

Every sampling parameter is sent, because a server's own defaults come from the model's generation_config.json. Every
answer is read with suspicion: training needs of each token its id, its log-probability under the policy that sampled
it, and the version of the weights that computed it, and an answer that does not say all three, or says them of another
number of tokens, is an error and never a guess. So is an `abort` with a status: the request is wrong (4xx) or the
server has no room for it (5xx). One without is a pause, after which the request goes on.

`weight_versions` are spans [start, end) over the output tokens; a server before SGLang 0.5.19 reports only
`weight_version`, that at the answer's end. A logprob entry is [logprob, token id, text or null], of
log_softmax(logits / temperature) over the whole vocabulary, before top_p and top_k. Hence `trains_exactly`: whether the
logprob that came back is that of the distribution that was sampled, so that training can reproduce it.

These are AReaL's names (areal/api/io_struct.py, section 2 of the write-up). What it does not do: send anything; that is
engine.py.
"""

import dataclasses
import hashlib
import uuid
from dataclasses import dataclass, field
from typing import Any

from inference.wire import EngineError


@dataclass
class GenerationHyperparameters:
    """How tokens are sampled."""

    n_samples: int = 1  # samples per prompt, that is a group's size; a request to the engine asks for 1
    max_new_tokens: int = 512  # most tokens to generate in one turn (clipped to the context window)
    temperature: float = 1.0  # divides the logits before sampling; 0 is greedy
    top_p: float = 1.0  # nucleus: keep the likeliest tokens of this total probability; 1 keeps all
    top_k: int = -1  # keep this many likeliest tokens; -1 keeps all
    stop: list[str] = field(default_factory=list)  # strings that end a turn (they stay in the tokens)
    stop_token_ids: list[int] = field(default_factory=list)  # ids that end a turn, beside the model's own
    frequency_penalty: float = 0.0  # logit penalty per earlier occurrence of a token in this turn; 0 is none
    presence_penalty: float = 0.0  # logit penalty of every token that occurred in this turn; 0 is none
    greedy: bool = False  # take the likeliest token always (the same as temperature 0)
    seed: int | None = None  # seed of the sampling noise; none: in a run its seed, else the server draws its own
    json_schema: str | None = None  # only JSON of this schema may be sampled; for servers with a grammar

    def new(self, **changes: Any) -> "GenerationHyperparameters":
        """A copy with `changes`."""
        return dataclasses.replace(self, **changes)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken. Servers have the same threshold: below it dividing by it overflows."""
        return self.greedy or self.temperature < 1e-6

    @property
    def trains_exactly(self) -> bool:
        """Whether tokens are drawn from softmax(logits / temperature) itself: then the logprobs that the
        server returns are those of the distribution that was sampled, and training can reproduce them."""
        unpenalised = self.frequency_penalty == self.presence_penalty == 0
        whole = self.top_p == 1 and self.top_k == -1 and self.json_schema is None
        return whole and unpenalised and not self.is_greedy


@dataclass
class ModelRequest:
    """One prompt, given as token ids. `session` names the conversation: its requests go to one server."""

    input_ids: list[int]
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    tokenizer: Any = None
    session: str | None = None


@dataclass
class ModelResponse:
    """What one request gave. The three output lists have one entry per generated token, the stop token
    included.

    `stop_reason`: "stop" or "length" from agenerate; "tool_calls" is set by who parses the text; "abort", and "" of a
    stream that goes on, mark the segments of which agenerate makes a response.
    """

    input_tokens: list[int]
    output_tokens: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)  # of log_softmax(logits / temperature)
    output_versions: list[int] = field(default_factory=list)  # of the weights that computed each token
    stop_reason: str = "stop"
    temperature: float = 1.0  # 1 for greedy tokens: their logprobs are of the logits as they are
    trains_exactly: bool = True  # see GenerationHyperparameters
    regenerated: int = 0  # times that a segment was asked for again, because a server failed or was lost

    @property
    def input_len(self) -> int:
        """Prompt length, tokens."""
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        """Generated length, tokens."""
        return len(self.output_tokens)

    def replace_from(self, done: int, segment: "ModelResponse") -> None:
        """Let the output be its first `done` tokens and those of `segment`, and end as that does."""
        self.output_tokens[done:] = segment.output_tokens
        self.output_logprobs[done:] = segment.output_logprobs
        self.output_versions[done:] = segment.output_versions
        self.stop_reason = segment.stop_reason


def call_seed(seed: int, episode: str, call: int) -> int:
    """The seed, below 2^31, of an episode's k-th call: a run asks for the same noise, whatever else is going on."""
    digest = hashlib.blake2b(f"{seed}/{episode}/{call}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def segment_seed(seed: int, offset: int) -> int:
    """The seed of the segment that starts after `offset` tokens. A retry with nothing gained repeats itself;
    a resumed segment does not reuse the noise that sampled the segment before it."""
    return call_seed(seed, "resumed", offset) if offset else seed % 2**63  # no longer ones: JSON readers, SGLang


def sampling_params(gconfig: GenerationHyperparameters, offset: int = 0) -> dict[str, Any]:
    """What the segment after `offset` tokens sends: all that a generation_config.json could set otherwise."""
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
        "stop": list(gconfig.stop) or None,  # a server without tokenizer refuses the key
        "json_schema": gconfig.json_schema,
        "sampling_seed": None if gconfig.seed is None else segment_seed(gconfig.seed, offset),
    }
    return {name: value for name, value in params.items() if value is not None}


def probe(input_ids: list[int]) -> dict[str, Any]:
    """A request for one greedy token."""
    params = sampling_params(GenerationHyperparameters(greedy=True, max_new_tokens=1))
    return {"input_ids": input_ids, "sampling_params": params, "return_logprob": True}


def parse_segment(answer: dict[str, Any]) -> ModelResponse:
    """One answer of a server, or the event of a stream: then its stop_reason is "" until the last. EngineError (502)
    when it does not say what training needs to know, and when it is a refusal or of an update that is not complete."""
    try:
        meta, tokens = answer["meta_info"], answer["output_ids"]
        finish = {"type": "", "status_code": None} | (meta["finish_reason"] or {})
        if (status := finish["status_code"] or 0) >= 400:
            raise EngineError(f"the server answered {status}: {finish['message']}", 400 if status < 500 else 503)
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]] if tokens else []
        whole = [{"version": meta["weight_version"], "start": 0, "end": len(tokens)}]
        spans = meta.get("weight_versions") or whole
        versions = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    except (KeyError, TypeError, ValueError) as error:
        hint = "is it SGLang's with --weight-version 0 (a decimal number), and its last weight update complete?"
        status = 503 if "-incomplete" in str(error) else 502  # another server may have all of the update
        raise EngineError(f"an answer that cannot be read ({error!r}): {hint}", status) from error
    if not len(tokens) == len(logprobs) == len(versions):
        counts = f"{len(tokens)} tokens, {len(logprobs)} logprobs, {len(versions)} versions"
        raise EngineError(f"an answer that does not fit together: {counts}", 502)
    return ModelResponse([], tokens, logprobs, versions, stop_reason=finish["type"])
