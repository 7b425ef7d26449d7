"""The client of the inference servers: generation that weight updates interrupt and that forgets nothing.

While a batch is trained, the servers go on generating; then new weights arrive in the middle of thousands of
unfinished answers. Waiting for the longest of them would idle every GPU, throwing them away would waste what
they cost and favour short answers. So the answers are **interrupted**: each keeps its tokens, and the next
token is computed by the new weights. What the trainer needs in return is to know who computed which token:

    output_tokens    a  b  c  d  e  f
    output_logprobs  of each token, under the weights that sampled it
    output_versions  3  3  3  4  4  4        <- a weight update came after the third token

That is the write-up's partial rollout (section 2.1), and `RemoteInfEngine.agenerate` is where it happens. A
request is a loop over **segments**, one POST /generate each; what the server does at a pause decides how many
there are:

- `retract` (the default): the server drops the KV cache of what runs, keeps the tokens, and after the update
  prefills them again under the new weights. The client notices nothing: one segment, whose `weight_versions`
  spans say where the version changed.
- `abort`: the server hands back what it has, with finish reason `abort`. The client posts prompt + tokens so
  far with the rest of the budget; that request waits at the paused server and goes on under the new weights.
- `in_place`: the server goes on with the KV cache of the old weights. Cheapest, but the tokens after the
  update come from no policy that can be named, so it is never the default.

A token's version is **what the server reports**, never a variable of this process that is read when the
answer arrives (AReaL: a `set_version` during the request retags tokens of the old weights). A server without
spans (SGLang 0.5.16 to 0.5.18) reports only the version at a segment's end, which is right for all of the
segment if no segment lives through an update: where `initialize` finds such a server it falls back to `abort` and
says so.

Streaming. Who wants to hear of tokens as they come gives `agenerate` a function; then the segments are streamed, each
event with all of the segment so far. What was told stays told: an answer that breaks off in the middle of a stream goes
on behind its last token, on another server if need be.

Control (pause, resume, update_weights) goes to every server, from the trainer's process only. Proxies in
other processes have an engine each and need not be told: a paused server makes their requests wait.

What is sent is checked first, because an id outside the vocabulary kills an SGLang server with all that runs
on it, and every sampling parameter is sent, because a server's own defaults come from the model's
generation_config.json.

Not promised: a stop string whose halves lie on either side of an abort is not seen, and a frequency penalty
starts to count anew there (`retract` has neither flaw). The noise of a resumed segment is new: (seed, tokens
so far).

Differs from AReaL: failures and empty aborts back off exponentially (AReaL: one second flat; no pause at all
after an abort, 2,000 requests in 1.8 s); what was generated before a failure is kept; a request that is wrong
is never retried; servers are chosen by hash of the conversation, so that its turns find their prefix cache
(AReaL: by request, round robin); one that dies, or returns with old weights, is done without (inference/servers.py); a
cancelled caller aborts its request at the server.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from functools import partialmethod
from pathlib import Path
from typing import Any

import httpx
import orjson

from inference import weights
from inference.io_struct import (
    GenerationHyperparameters,
    ModelRequest,
    ModelResponse,
    parse_segment,
    probe,
    sampling_params,
)
from inference.servers import Servers
from inference.wire import EngineError, Wire, run_all

logger = logging.getLogger("nano_areal.engine")

EMPTY_ABORT_WAIT = 0.05, 1.0  # seconds, doubling up to: after an abort that brought no token
FAILURE_WAIT = 0.5, 10.0  # seconds, doubling up to, with jitter: after a server did not answer


OnTokens = Callable[[ModelResponse], None]


def backoff(attempt: int, first: float, most: float) -> float:
    """Seconds before try `attempt` (1, 2, ...): `first`, doubled each time, never above `most`."""
    return min(most, first * 2.0 ** min(attempt - 1, 30))


def read_vocab_size(model_path: str | None) -> int | None:
    """Ids that the embeddings of a model folder know; None where there is none. Servers do not tell it, and SGLang
    dies of an id outside."""
    try:
        config = orjson.loads((Path(model_path or "") / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return config.get("text_config", config).get("vocab_size")


class RemoteInfEngine:
    """Every inference server of the run, behind one object.

    addresses: base URLs. request_timeout: seconds for one segment. request_retries: tries after the first
    one, for connection errors, timeouts and 5xx. `transport` and `sleep` stand in for the network and for time
    in tests.
    """

    def __init__(
        self,
        addresses: list[str],
        *,
        pause_mode: str = "retract",
        request_timeout: float = 3600.0,
        request_retries: int = 3,
        transport: httpx.MockTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        if not addresses:
            raise ValueError("the engine needs the address of at least one server")
        if pause_mode not in ("retract", "abort", "in_place"):
            raise ValueError(f"pause_mode is retract, abort or in_place, not {pause_mode!r}")
        self.request_timeout, self.request_retries = request_timeout, request_retries
        self._sleep = sleep
        self._wire = Wire(transport)
        self.servers = Servers(addresses, self._wire)
        # All that changes over the engine's life:
        self.pause_mode = pause_mode  # becomes "abort" when a server reports no spans
        self.vocab_size: int | None = None  # these two, in tokens, as far as the servers tell
        self.context_length: int | None = None
        self.has_grammar = False  # every server can sample by a json_schema
        self.executor: Any = None  # the WorkflowExecutor, attached by itself
        self._version = 0
        self._servers_paused = False

    # Questions

    def get_version(self) -> int:
        """The version of the newest policy that all servers have."""
        return self._version

    def score(self, input_ids: list[list[int]]) -> list[list[float]]:
        """The servers' own log p(token | tokens before it) at temperature 1, per sequence; the first is 0.

        A server takes no prompt as long as its context, so of a sequence that fills it the last is missing.
        """

        async def score_one(number: int, ids: list[int]) -> list[float]:
            ids = ids[: self.context_length - 1] if self.context_length else ids
            self._check_ids(ids)
            body = {**probe(ids), "logprob_start_len": 0}
            answer = await self._ask(
                str(number), lambda server: self._wire.call(server + "/generate", body, self.request_timeout)
            )
            return [0.0] + [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]

        return run_all(map(score_one, itertools.count(), input_ids))

    # Generation

    async def agenerate(self, req: ModelRequest, on_tokens: OnTokens | None = None) -> ModelResponse:
        """Generate until a stop token, a stop string or the budget, through any number of weight updates.

        With `on_tokens` the segments are streamed, and it hears of the response so far whenever that has grown. What
        it has heard of stays: a stream that breaks off is resumed behind the last token that came.

        Raises EngineError: 400 before anything is sent when the request cannot be served, or with the
        server's own message when it refuses; 503 when no server answered; 502 when an answer makes no sense.
        """
        g = req.gconfig.new(max_new_tokens=self._budget(req))
        temperature = 1.0 if g.is_greedy else g.temperature
        response = ModelResponse(list(req.input_ids), temperature=temperature, trains_exactly=g.trains_exactly)
        rids = (f"{req.rid}-{k}" for k in itertools.count())
        empty_aborts = 0
        while True:
            done = response.output_len
            await self._ask(
                req.session or req.rid,
                lambda server: self._generate_segment(server, next(rids), g, response, on_tokens),
            )
            if response.stop_reason != "abort" or response.output_len >= g.max_new_tokens:
                response.stop_reason = "stop" if response.stop_reason == "stop" else "length"
                return response
            empty_aborts = 0 if response.output_len > done else empty_aborts + 1
            if empty_aborts:
                await self._sleep(backoff(empty_aborts, *EMPTY_ABORT_WAIT))

    async def _ask(self, key: str, ask: Callable[[str], Awaitable[Any]]) -> Any:
        """What `ask` gets from the server of conversation `key`; while none answers (503), from the next in its order,
        as often as there are retries. Raises EngineError."""
        for failures in itertools.count(1):
            server = await self.servers.choose(key)
            try:
                return await ask(server)
            except EngineError as error:
                if error.status == 503:
                    self.servers.lose(server, error)
                if error.status != 503 or failures > self.request_retries:
                    raise
            await self._sleep(backoff(failures, *FAILURE_WAIT) * random.uniform(0.5, 1.0))

    def _budget(self, req: ModelRequest) -> int:
        """How many tokens `req` may generate; EngineError (400) if it cannot be served at all."""
        g = req.gconfig
        self._check_ids(req.input_ids)
        if g.n_samples != 1 or g.max_new_tokens < 1:
            asked = f"n_samples={g.n_samples}, max_new_tokens={g.max_new_tokens}"
            raise EngineError(f"a request is for one sample of at least 1 token, not {asked}", 400)
        if g.json_schema is not None and not self.has_grammar:
            raise EngineError("json_schema (response_format): the inference server has no grammar", 400)
        if self.context_length is None:
            return g.max_new_tokens
        room = self.context_length - len(req.input_ids)
        if room < 1:
            reason = f"the prompt's {len(req.input_ids)} tokens leave no room in the context of"
            raise EngineError(f"{reason} {self.context_length} tokens", 400)
        return min(g.max_new_tokens, room)

    def _check_ids(self, ids: list[int]) -> None:
        """EngineError (400) unless `ids` is a non-empty list of ints in the vocabulary."""
        if not ids:
            raise EngineError("the prompt is empty", 400)
        if kinds := set(map(type, ids)) - {int}:
            raise EngineError(f"input_ids must be Python ints, not {[kind.__name__ for kind in kinds]}", 400)
        if min(ids) < 0 or (self.vocab_size is not None and max(ids) >= self.vocab_size):
            bad = min(ids) if min(ids) < 0 else max(ids)
            raise EngineError(f"token id {bad} is outside the vocabulary of {self.vocab_size} tokens", 400)

    async def _generate_segment(
        self, server: str, rid: str, g: GenerationHyperparameters, response: ModelResponse, on_tokens: OnTokens | None
    ) -> None:
        """One POST /generate, by which `response` grows: with each event of a stream, or once. Who gives up on a
        request must tell the server, which does not notice a closed connection and would generate to the end."""
        url, done, sent_after = server + "/generate", response.output_len, self.servers.newest
        response.stop_reason = ""
        body = {
            "rid": rid,
            "input_ids": response.input_tokens + response.output_tokens,
            "sampling_params": sampling_params(g, done),
            "return_logprob": True,
            "stream": on_tokens is not None,
        }
        try:
            async with contextlib.aclosing(self._wire.stream(url, body, self.request_timeout)) as events:
                async for event in events:
                    segment = parse_segment(event)
                    self.servers.check_age(server, segment.output_versions, sent_after)
                    response.replace_from(done, segment)
                    if on_tokens and segment.output_len:
                        on_tokens(response)
            if not response.stop_reason:
                raise EngineError(f"{url} broke off in the middle of an answer", 503)
        except (asyncio.CancelledError, EngineError) as error:
            if isinstance(error, EngineError) and (response.stop_reason or response.output_len >= g.max_new_tokens):
                return  # the stream broke off behind its end, or behind the last token allowed
            response.regenerated += isinstance(error, EngineError)  # asked for again, or the response is not wanted
            if getattr(error, "status", None) != 400:
                # a router answers 404 and does not tell who generates; who is gone generates nothing
                told = [server] if server in self.servers.workers else self.servers.workers
                calls = (self._wire.call(worker + "/abort_request", {"rid": rid}, timeout=5.0) for worker in told)
                await asyncio.shield(asyncio.gather(*calls, return_exceptions=True))
            raise

    # Control, from the trainer's main thread: it waits for the servers in event loops of its own

    def initialize(self) -> None:
        """Ask every server for its vocabulary and context, then for one token.

        The token shows before the first step what would otherwise fail in the middle of a run: a version that
        is no number, missing logprobs, missing spans, a server that an earlier run left paused.
        """
        self.servers.refresh()
        infos = self.servers.post_all("/server_info")
        self.vocab_size = min(filter(None, (read_vocab_size(info.get("model_path")) for info in infos)), default=None)
        if self.vocab_size is None:
            logger.warning("no server's model can be read from here: ids outside its vocabulary are not refused")
        self.context_length = min(filter(None, (info.get("max_req_input_len") for info in infos)), default=None)
        self.has_grammar = all(info.get("grammar_backend") not in (None, "none") for info in infos)
        answers = self.servers.post_all("/generate", probe([0]))
        if self.servers.lost:  # later the run would go on without them
            raise EngineError("; ".join(self.servers.lost.values()), 503)
        for server, answer in zip(self.servers.workers, answers):
            parse_segment(answer)
            if self.pause_mode != "abort" and "weight_versions" not in answer["meta_info"]:
                logger.warning(
                    "%s reports no weight_versions, so the tokens of a request that lives through a weight "
                    "update could not be told apart: pause_mode is abort from now on (SGLang 0.5.19 has them)",
                    server,
                )
                self.pause_mode = "abort"

    def pause(self) -> None:
        """Stop admitting rollouts, then interrupt what the servers generate. Weights may change after
        this."""
        if self.executor is not None:
            self.executor.pause()
        self._servers_paused = True
        self.servers.refresh()
        self.servers.post_all("/pause_generation", {"mode": self.pause_mode})

    def resume(self) -> None:
        """The reverse of pause: the servers first, or admitted rollouts would meet paused ones. Also the lost: one that
        lives may be paused."""
        self.servers.post_all("/continue_generation", {}, lost=True)
        self._servers_paused = False
        if self.executor is not None:
            self.executor.resume()

    def update_weights(self, meta: weights.WeightUpdateMeta, buckets: Iterable[weights.Bucket] | None = None) -> None:
        """Have every server take `meta.version`, the model being `buckets` or on disk. Call between pause and resume:
        without a pause a server first finishes everything it runs. RuntimeError names each server that failed and
        why."""
        meta = dataclasses.replace(meta, flush_cache=self.pause_mode != "in_place")
        weights.send(meta, self.servers.post_all, buckets)
        self.servers.newest = meta.version

    def set_version(self, version: int) -> None:
        """The servers have this version now. It opens the staleness gate; it tags no token."""
        self._version = version
        if self.executor is not None:
            self.executor.on_new_version()

    def destroy(self) -> None:
        """End the executor; may be repeated. Servers that this engine left paused are continued, for the next
        one's sake. Connections end with their event loop."""
        if self._servers_paused:
            self._servers_paused = False
            try:
                self.servers.post_all("/continue_generation", {}, timeout=5.0, lost=True)
            except EngineError as error:
                logger.warning("a server may be left paused: %s", error)
        if self.executor is not None:
            self.executor.destroy()

    # Rollouts: the executor's methods, reached through the engine

    def _roll_out(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        if self.executor is None:
            raise RuntimeError("this engine runs no rollouts: attach a WorkflowExecutor(engine, ...) first")
        return getattr(self.executor, method)(*args, **kwargs)

    # (data, workflow, workflow_kwargs, should_accept_fn, group_size, is_eval)
    submit = partialmethod(_roll_out, "submit")
    wait = partialmethod(_roll_out, "wait")  # (count, timeout)
    wait_for_task = partialmethod(_roll_out, "wait_for_task")  # (task_id, timeout)
    rollout_batch = partialmethod(_roll_out, "rollout_batch")  # (data, workflow, ...)
    # (dataloader, workflow, workflow_kwargs, should_accept_fn, group_size)
    prepare_batch = partialmethod(_roll_out, "prepare_batch")
