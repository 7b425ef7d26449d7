"""The engine gets completions from the inference servers, even if weight updates interrupt the servers.

The servers generate while the trainer works. When the trainer has new weights, thousands of completions are unfinished.
Waiting for the longest completion would leave GPUs idle. Discarding the unfinished completions would waste work and
favour short completions. A **partial rollout** (write-up, section 2.1) avoids idle GPUs and wasted work. When a weight
update interrupts a completion, the completion keeps its tokens, and the new weights compute the next token. The trainer
must know which weights computed which token, so every token carries a version:

    output_tokens     a     b     c     d     e     f
    output_logprobs  -0.2  -1.1  -0.4  -0.7  -0.1  -2.3     log-probability under the weights that sampled the token
    output_versions   3     3     3     4     4     4       the update from version 3 to 4 came after token c

`RemoteInfEngine.agenerate` builds a completion from one or more **segments**. A segment is the part of a completion
that one POST /generate produces. The pause mode decides how a weight update interrupts a server's requests:

- `retract` (the default): the server keeps the tokens of a request and drops the request's KV cache. After the update,
  the server recomputes the KV cache with the new weights and continues the request. In mode `retract` the engine gets
  all tokens as one segment. The server's answer states which span of tokens has which version (`weight_versions`).

- `abort`: the server returns the tokens generated so far, with finish reason `abort`. After an abort, the engine sends
  a new request with the prompt and the generated tokens. The new request waits until the update is complete.

- `in_place`: the server continues with the KV cache of the old weights. Mode `in_place` needs less computation than the
  other modes. After an update in mode `in_place`, the new weights read keys and values that the old weights computed,
  so no single version gives a token's probability.

**Versions.** Each token gets its version from the server's answer, because the engine's version may change while a
request runs. SGLang 0.5.16 to 0.5.18 reports no `weight_versions`, but reports the version at the end of each segment.
If a server reports no `weight_versions`, `initialize` sets the pause mode to `abort`, so each segment has one version.

**Failures.** If a server fails in the middle of a segment, the engine keeps the tokens that the server has streamed.
After a failure the engine waits, and then requests the missing tokens from a server that is alive
(inference/servers.py). If a request fails several times, each wait is about twice as long as the previous wait. If a
server refuses a request as invalid, the engine does not retry the request.

**Checks.** A token id outside the vocabulary would crash an SGLang server, so the engine checks all ids of a prompt
before it sends a request.

**Not promised.** In mode `abort`, no server finds a stop string that begins in one segment and ends in the next.
In mode `abort`, frequency and presence penalties count the tokens of each segment separately.
"""

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import orjson

from inference import weights
from inference.io_struct import (
    ModelRequest,
    ModelResponse,
    generate_body,
    parse_scores,
    parse_segment,
    probe,
)
from inference.servers import LOOK_AGAIN, Servers
from inference.wire import EngineError, Wire

logger = logging.getLogger("pocket_areal.engine")

EMPTY_ABORT_WAIT = (
    0.05,
    1.0,
)  # shortest and longest wait, in seconds, after an abort that returned no tokens
FAILURE_WAIT = 0.5, 10.0  # shortest and longest wait, in seconds, after a failed request

# The engine calls a function of this type with the response so far, each time tokens arrive.
OnTokens = Callable[[ModelResponse], None]


def backoff(attempt: int, first: float, most: float) -> float:
    """Return how many seconds to wait after failure number `attempt` (1, 2, ...).

    The wait after failure 1 is `first`. Each further failure doubles the wait, up to `most`.
    """
    return min(most, first * 2.0 ** min(attempt - 1, 30))


def read_vocab_size(model_path: str | None) -> int | None:
    """Return `vocab_size` from config.json in the model's folder, or None if the file cannot be read or lacks this
    key."""
    try:
        config = orjson.loads((Path(model_path or "") / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return config.get("text_config", config).get("vocab_size")


@dataclass(eq=False)
class RemoteInfEngine:
    """The client of all inference servers of a run. Raises ValueError if the addresses or the pause mode are wrong.

    A run uses the subclass ScheduledEngine (run/schedule.py), which also records each call.
    """

    addresses: list[str]  # base URLs of the servers, or of routers in front of them
    pause_mode: str = (
        "retract"  # `retract`, `abort` or `in_place`; `initialize` may replace it by `abort`
    )
    request_timeout: float = (
        3600.0  # a segment fails if its server sends nothing for this number of seconds
    )
    request_retries: int = (
        3  # number of retries of a request after a connection error, a timeout or a 5xx status
    )
    key: str = ""  # API key of the servers
    wait_for_servers: bool = (
        False  # True: while all servers are lost, requests wait for a living server
    )
    transport: httpx.MockTransport | None = (
        None  # tests pass a mock of the network; None means the real network
    )
    sleep: Callable[[float], Awaitable[None]] = (
        asyncio.sleep
    )  # function that waits; tests replace this function

    def __post_init__(self) -> None:
        if not self.addresses:
            raise ValueError("the engine needs the address of at least one server")
        if self.pause_mode not in ("retract", "abort", "in_place"):
            raise ValueError(f"pause_mode is retract, abort or in_place, not {self.pause_mode!r}")
        self._wire = Wire(self.transport, self.key)
        # The attributes below change during a run, and `initialize` may change `pause_mode`:
        self.servers = Servers(self.addresses, self._wire)
        self.vocab_size: int | None = (
            None  # size of the vocabulary; None if no config.json of the model can be read
        )
        self.context_length: int | None = (
            None  # maximum length of prompt plus completion; None if unknown
        )
        self.has_grammar = False  # True if every server can restrict its output to a JSON schema
        self.proxies: Servers | None = (
            None  # the proxies of the run; `set_version` tells them each new version
        )
        self.executor: Any = (
            None  # the WorkflowExecutor of training; the executor sets this attribute
        )
        self._version = 0  # newest policy version that all servers have
        self._sent = -1  # newest version whose weights `update_weights` has sent
        self._servers_paused = False  # True between `pause` and `resume`
        self._memory_released = False  # True between `release_memory` and `update_weights`

    # 1. Generation

    async def agenerate(
        self, req: ModelRequest, on_tokens: OnTokens | None = None
    ) -> ModelResponse:
        """Generate and return one completion, even if weight updates interrupt it.

        If `on_tokens` is given, the server streams the tokens. Each time tokens arrive, the engine calls `on_tokens`
        with the response so far. A token that `on_tokens` has received is never removed or changed.

        Raises EngineError with status 400 if the request is invalid. If the last retry fails, the EngineError has
        status 502 for an answer that cannot be read, and status 503 for any other failure.
        """
        # 1. Check the request, and make an empty response for the tokens of all segments.
        g = req.gconfig.new(max_new_tokens=self._budget(req))
        req = replace(req, gconfig=g)
        temperature = 1.0 if g.is_greedy else g.temperature
        response = ModelResponse(
            list(req.input_ids), temperature=temperature, trains_exactly=g.trains_exactly
        )
        request_ids = (
            f"{req.rid}-{k}" for k in itertools.count()
        )  # every POST /generate needs a new id

        async def generate_segment(server: str) -> None:
            await self._generate_segment(server, next(request_ids), req, response, on_tokens)

        empty_aborts = 0
        while True:
            # 2. Generate one segment. All requests of a prompt group go to one server while this server is alive.
            length_before = response.output_len
            await self._ask_a_server(req.affinity, generate_segment)

            # 3. Return the completion if no update interrupted the segment or the completion has `max_new_tokens`
            # tokens.
            interrupted = response.stop_reason == "abort" and response.output_len < g.max_new_tokens
            if not interrupted:
                response.stop_reason = "stop" if response.stop_reason == "stop" else "length"
                return response

            # 4. If the abort returned no tokens, wait before the next segment.
            empty_aborts = 0 if response.output_len > length_before else empty_aborts + 1
            if empty_aborts:
                await self.sleep(backoff(empty_aborts, *EMPTY_ABORT_WAIT))

    async def _generate_segment(
        self,
        server: str,
        rid: str,
        req: ModelRequest,
        response: ModelResponse,
        on_tokens: OnTokens | None,
    ) -> None:
        """Generate one segment: send one POST /generate to `server`, and append the generated tokens to `response`.

        A streamed answer has many events, and an answer without streaming has one event. Every event contains all
        tokens of the segment so far. The tokens of an event replace the tokens that earlier events of this segment have
        appended to `response`.
        """
        url = server + "/generate"
        start = response.output_len
        g = req.gconfig
        oldest_allowed = (
            self.servers.newest
        )  # a token of an older version shows that the server was restarted
        body = generate_body(response.input_tokens + response.output_tokens, g, start)
        body |= {"rid": rid, "stream": on_tokens is not None}

        # 1. Receive the tokens. The last event sets `stop_reason`. If the answer ends without its last event, the
        #    segment failed.
        response.stop_reason = ""
        failure = EngineError(f"{url} ended its answer before the completion was finished", 503)
        try:
            async with contextlib.aclosing(
                self._wire.stream(url, body, self.request_timeout)
            ) as events:
                async for event in events:
                    segment = parse_segment(event, self.vocab_size)
                    sent = response.output_tokens[start:]
                    if (
                        segment.output_tokens[: len(sent)] != sent
                        or start + segment.output_len > g.max_new_tokens
                    ):
                        raise EngineError(
                            f"{url} changed tokens that it had sent, or sent too many tokens", 503
                        )
                    self.servers.check_age(server, segment.output_versions, oldest_allowed)
                    response.replace_from(start, segment)
                    if on_tokens and segment.output_len:
                        on_tokens(response)
        except EngineError as error:
            failure = error
        except asyncio.CancelledError:  # the caller has cancelled the completion
            await self._abort(server, rid)
            raise

        # 2. If the segment is complete, return. A failure that comes after the last token of the segment is ignored.
        if response.stop_reason or response.output_len >= g.max_new_tokens:
            return

        # 3. If the segment is incomplete, tell the server to stop generating, and raise the failure.
        if failure.status != 400:  # the server accepted the request and may still be generating
            response.regenerated += 1
            await self._abort(server, rid)
        raise failure

    async def _abort(self, server: str, rid: str) -> None:
        """Tell a server to stop the generation of request `rid`. SGLang does not notice that a client has disconnected.

        A router does not forward aborts, so the engine sends the abort to every worker of the router. Errors are
        ignored.
        """
        urls = [worker + "/abort_request" for worker in self.servers.workers_of[server]]
        calls = [self._wire.call(url, {"rid": rid}, timeout=5.0) for url in urls]
        await asyncio.shield(asyncio.gather(*calls, return_exceptions=True))

    async def _ask_a_server(self, key: str, ask: Callable[[str], Awaitable[Any]]) -> Any:
        """Call the function `ask` with the URL of the server that `key` selects, and return the function's result. If
        the server fails, wait and retry.

        If `ask` raises an EngineError with status 502 or 503, the server has failed. Each retry goes to a living
        server, if any server is alive. When no retry is left, the method raises the last error. If `ask` raises an
        error with status 400, the method raises this error without a retry.
        """
        for failures in itertools.count(1):
            server = await self.servers.choose(key)
            while self.wait_for_servers and server in self.servers.lost:
                await self.sleep(LOOK_AGAIN)
                server = await self.servers.choose(key)
            try:
                return await ask(server)
            except EngineError as error:
                if error.status == 400:
                    raise
                self.servers.lose(server, error)
                if failures > self.request_retries:
                    raise
            await self.sleep(backoff(failures, *FAILURE_WAIT) * random.uniform(0.5, 1.0))

    def _budget(self, req: ModelRequest) -> int:
        """Return the maximum number of tokens that `req` may generate. Raises EngineError (400) if the request is
        wrong.

        The maximum is the smaller of `max_new_tokens` and the number of tokens that fit into the context window after
        the prompt.
        """
        g = req.gconfig
        self._check_ids(req.input_ids)
        if g.max_new_tokens < 1:
            raise EngineError("max_new_tokens must be at least 1", 400)
        if g.json_schema is not None and not self.has_grammar:
            raise EngineError(
                "json_schema (response_format) is refused: a server has no grammar backend", 400
            )
        if self.context_length is None:
            return g.max_new_tokens
        prompt, context = len(req.input_ids), self.context_length
        if prompt >= context:
            message = f"prompt is too long: {prompt} tokens > {context} maximum context length"
            raise EngineError(message, 400, "context_length_exceeded")
        return min(g.max_new_tokens, context - prompt)

    def _check_ids(self, ids: list[int]) -> None:
        """Check that `ids` is a non-empty list of Python ints inside the vocabulary, or raise EngineError (400)."""
        if not ids:
            raise EngineError("the prompt is empty", 400)
        if wrong_types := {type(token) for token in ids} - {int}:
            raise EngineError(
                f"input_ids must be Python ints, not {[kind.__name__ for kind in wrong_types]}", 400
            )
        for token in (min(ids), max(ids)):
            if token < 0 or (self.vocab_size is not None and token >= self.vocab_size):
                raise EngineError(
                    f"token id {token} is outside the vocabulary of {self.vocab_size} tokens", 400
                )

    # 2. Methods of the trainer's main thread. If a method sends a request to all servers, it waits until all have
    #    answered.

    def initialize(self) -> None:
        """Read the limits of every server, and test every server by a request for one token.

        The test finds three errors before the run starts: a version that is not a number, an answer without logprobs,
        and a server that an earlier run left paused. If an answer has no `weight_versions`, the pause mode becomes
        `abort`. Raises EngineError if a server cannot be reached or fails the test.
        """
        self.servers.refresh()
        infos = self.servers.post_all("/server_info")
        # The servers may report different limits. The engine keeps the smallest value of each limit.
        self.vocab_size = min(
            filter(None, (read_vocab_size(info.get("model_path")) for info in infos)), default=None
        )
        if self.vocab_size is None:
            logger.warning(
                "no server's model folder can be read: the engine cannot refuse ids outside the vocabulary"
            )
        self.context_length = min(
            filter(None, (info.get("max_req_input_len") for info in infos)), default=None
        )
        self.has_grammar = all(info.get("grammar_backend") not in (None, "none") for info in infos)
        answers = self.servers.post_all("/generate", probe([0]))
        if (
            self.servers.lost
        ):  # at the start of a run every server must answer; later the run may lose servers
            raise EngineError("; ".join(self.servers.lost.values()), 503)
        for server, answer in zip(self.servers.workers, answers):
            parse_segment(answer)
            if self.pause_mode != "abort" and "weight_versions" not in answer["meta_info"]:
                logger.warning(
                    "%s reports no weight_versions (SGLang 0.5.19 does): pause_mode is now abort",
                    server,
                )
                self.pause_mode = "abort"

    def pause(self) -> None:
        """Start no more rollouts, and pause every server. After a call of `pause` it is safe to change the weights.

        If `wait_for_servers` is true, the method waits while all servers are lost. If the executor stops the run while
        the method waits, the method raises RuntimeError. Only this method waits: if the last server is lost later in a
        weight update, `update_weights` raises EngineError.
        """
        if self._memory_released:
            return
        if self.executor is not None:
            self.executor.pause()
        self._servers_paused = True
        while True:
            self.servers.refresh()
            try:
                self.servers.post_all("/pause_generation", {"mode": self.pause_mode})
                return
            except EngineError:
                if not self.wait_for_servers or self.servers.living():
                    raise
            time.sleep(LOOK_AGAIN)
            self._rollouts().dispatcher.check_alive()

    def release_memory(self) -> None:
        """Pause every server, and free the memory of its weights and its KV cache. The next `update_weights` must send
        all weights."""
        self.pause()
        self.servers.post_all("/release_memory_occupation", {})
        self._memory_released = True

    def update_weights(
        self, meta: weights.WeightUpdateMeta, buckets: Iterable[weights.Bucket] | None = None
    ) -> None:
        """Send the weights of version `meta.version` to every server, from `buckets` or from disk.

        Call `pause` first, because a server that is not paused finishes all its requests before it changes weights.
        Raises EngineError with the message of every server that failed. Raises ValueError if an earlier call has
        already sent this version or a newer version.
        """
        if meta.version is None or meta.version <= self._sent:
            raise ValueError(
                f"version {meta.version} is not newer than {self._sent}; use meta.with_version(the next)"
            )
        if (
            self._memory_released
        ):  # after `release_memory`, the servers must allocate memory for the weights
            self.servers.post_all("/resume_memory_occupation", {})
            self._memory_released = False
        # In mode `in_place` the paused requests still need the KV cache, so the servers keep it.
        weights.send(
            replace(meta, flush_cache=self.pause_mode != "in_place"), self.servers.post_all, buckets
        )
        self.servers.newest = self.servers.limit = self._sent = meta.version

    def forget_sent(self) -> None:
        """Allow `update_weights` to send the current version a second time, because a restarted server needs the
        weights."""
        self._sent = -1

    def set_version(self, version: int) -> None:
        """Record that all servers have `version`, tell the proxies, and let the staleness gate start more rollouts."""
        self._version = self.servers.limit = version
        if self.proxies is not None:
            self.proxies.lost.clear()  # a proxy that did not answer in time may answer again
            self.proxies.post_all("/set_version", {"version": version})
        if self.executor is not None:
            self.executor.on_new_version()

    def get_version(self) -> int:
        """Return the newest policy version that all servers have."""
        return self._version

    def resume(self) -> None:
        """Let every server continue generating, then allow new rollouts.

        The engine also tells lost servers to continue, because a lost server may be alive and still paused.
        """
        self.servers.post_all("/continue_generation", {}, lost=True)
        self._servers_paused = False
        if self.executor is not None:
            self.executor.resume()

    def destroy(self) -> None:
        """If this engine has paused the servers, send /continue_generation to them. Then shut down the executor. A
        second call of `destroy` does nothing."""
        if self._servers_paused and not self._memory_released:
            self._servers_paused = False
            try:
                self.servers.post_all("/continue_generation", {}, timeout=5.0, lost=True)
            except EngineError as error:
                logger.warning("a server may be left paused: %s", error)
        if self.executor is not None:
            self.executor.destroy()

    def score(self, ids: list[int]) -> list[list[float]]:
        """Return one list for each living server, with log p(token | earlier tokens) of each token at temperature 1.

        The first entry of each list is 0, because the first token has no earlier tokens. If `ids` fills the context
        window, the last token of `ids` is not scored, because the request must leave room for one generated token.
        Raises EngineError if a server's answer lacks a log-probability.
        """
        ids = ids[: self.context_length - 1] if self.context_length else ids
        self._check_ids(ids)
        answers = self.servers.post_all(
            "/generate", {**probe(ids), "logprob_start_len": 0}, self.request_timeout
        )
        return [parse_scores(answer, ids) for answer in answers]

    # 3. Rollout methods. The engine forwards each call of a rollout method to the WorkflowExecutor.

    def _rollouts(self) -> Any:
        """Return the executor. Raises RuntimeError if no executor is attached."""
        if self.executor is None:
            raise RuntimeError(
                "this engine runs no rollouts: attach a WorkflowExecutor(engine, ...) first"
            )
        return self.executor

    def submit(self, data: Any, *args: Any, **kwargs: Any) -> int:
        """Put one prompt in the queue, and return its task id."""
        return self._rollouts().submit(data, *args, **kwargs)

    def wait(self, count: int, timeout: float | None = None) -> dict[str, Any]:
        """Wait for the next `count` accepted groups, and return these groups as one batch."""
        return self._rollouts().wait(count, timeout)

    def wait_for_task(self, task_id: int, timeout: float | None = None) -> dict[str, Any] | None:
        """Wait for one submitted group, and return the group, or None if it was rejected."""
        return self._rollouts().wait_for_task(task_id, timeout)

    def rollout_batch(self, data: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run all prompts of `data`, and return their accepted groups as one batch."""
        return self._rollouts().rollout_batch(data, *args, **kwargs)

    def prepare_batch(self, dataloader: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the next training batch, while groups of later batches continue to run."""
        return self._rollouts().prepare_batch(dataloader, *args, **kwargs)
