"""The engine gets completions from the inference servers, even across weight updates.

The servers generate while the trainer works. When the trainer has new weights, thousands of
completions are unfinished. Waiting for the longest would leave GPUs idle, and discarding the
unfinished ones would waste work and favour short answers. So an unfinished completion keeps its
tokens, and the new weights compute the next ones (a **partial rollout**). Every token carries the
version of the weights that computed it:

    output_tokens     a     b     c     d     e     f
    output_logprobs  -0.2  -1.1  -0.4  -0.7  -0.1  -2.3    under the weights that sampled the token
    output_versions   3     3     3     4     4     4      the update came after token c

The loss needs no special case for mixed versions, because it weights every token by that token's
own log-probability (ppo.py).

**Two engines.** The proxy's engine generates for agents. The trainer's engine controls the servers,
and generates only for workflows without an agent.

`agenerate` builds a completion from **segments**: a segment is the answer to one POST /generate.
The pause mode says how an update interrupts the servers:

- `retract` (default): a server keeps a request's tokens but drops their KV cache, which the old
  weights computed. After the update, the server recomputes the cache and continues. The engine gets
  one segment, which names the version of every token.
- `abort`: the server returns the tokens so far. The engine sends the prompt and these tokens again,
  and the new request waits at the server until the update is over.

**Versions come from the server's answer**, because the engine's own version may change while a
request runs. SGLang before 0.5.19 reports only the version at the end of a segment. With such a
server the engine uses `abort`, because then all tokens of a segment have the same version.

**Limits** of `abort`: a stop string that spans two segments is not found, and a penalty for
repeated tokens counts only the current segment's tokens. **Failures**: if a server fails, the
engine asks the next server, at most `request_retries` times per segment. **Hooks** let
extras/replay.py record and repeat a run.
"""

import asyncio
import itertools
import logging
import math
import random
import secrets
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from inference import weights
from inference.io_struct import (
    EngineError,
    ModelRequest,
    ModelResponse,
    generate_body,
    parse_segment,
    probe,
)
from inference.servers import Servers, rank_servers

logger = logging.getLogger("pocket_areal.engine")


class Hooks:
    """Methods that the engine calls around every segment."""

    async def before_segment(self, req: ModelRequest, response: ModelResponse) -> int:
        """Return how many output tokens the completion may have in total after this segment. An
        override may wait, or raise EngineError to refuse the segment."""
        return req.gconfig.max_new_tokens

    def after_segment(
        self, req: ModelRequest, response: ModelResponse, error: BaseException | None
    ) -> None:
        """Receive the completion so far, and the error, if any. If an override sets
        response.stop_reason to "abort", the engine asks for another segment."""


@dataclass(eq=False)
class RemoteInfEngine:
    """The client of a run's inference servers."""

    addresses: list[str]
    pause_mode: str = "retract"
    request_timeout: float = 3600.0  # seconds for one segment
    request_retries: int = 3
    key: str = ""  # the servers' API key
    hooks: Hooks | None = None
    session: Any = None  # replaces the network in tests
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep  # replaces time in tests

    def __post_init__(self) -> None:
        self._hooks = self.hooks or Hooks()
        # What changes during a run:
        self.servers = Servers(self.addresses, self.key, self.session)
        self.context_length: Any = math.inf  # token limit of prompt plus completion
        self.proxy: Any = None  # a ProxyAddress; `set_version` sends the proxy every version
        # The dispatcher starts the rollouts. rollout/executor.py sets this field, and adds methods
        # such as `prepare_batch` to the engine.
        self.dispatcher: Any = None
        self._paused = False

    # ---- generation, in the event loop of the proxy, or of workflows without an agent

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Generate one completion, across any number of weight updates.

        Raises EngineError: status 400 for a wrong request, 502 or 503 if the last retry failed.
        """
        # 1. `response` collects the tokens of all segments.
        n, context = len(req.input_ids), self.context_length
        if n >= context:
            raise EngineError(
                f"prompt is too long: {n} tokens > {context} maximum context length",
                400,
                "context_length_exceeded",
            )
        g = req.gconfig.new(max_new_tokens=min(req.gconfig.max_new_tokens, context - n))
        req = replace(req, gconfig=g)
        response = ModelResponse(
            list(req.input_ids),
            temperature=1.0 if g.is_greedy else g.temperature,
            trains_exactly=g.trains_exactly,
        )
        while True:
            # 2. Ask for a segment.
            before = response.output_len
            try:
                limit = await self._hooks.before_segment(req, response)
                response.extend(await self._ask_a_server(req, response, limit))
            except BaseException as error:
                self._hooks.after_segment(req, response, error)
                raise
            self._hooks.after_segment(req, response, None)

            # 3. Done, unless the segment was interrupted before max_new_tokens.
            if response.stop_reason != "abort" or response.output_len >= g.max_new_tokens:
                response.stop_reason = "stop" if response.stop_reason == "stop" else "length"
                return response

            # 4. Ask for the next segment, after half a second if the last one brought no token.
            if response.output_len == before:
                await self.sleep(0.5)

    async def _ask_a_server(
        self, req: ModelRequest, response: ModelResponse, limit: int
    ) -> ModelResponse:
        """Ask the group's preferred server for the next segment. If it fails, ask the next one."""
        ranking = itertools.cycle(rank_servers(self.servers.addresses, req.affinity))
        failures = 0
        while True:
            try:
                return await self._generate_segment(next(ranking), req, response, limit)
            except EngineError as error:
                failures += 1
                if error.status == 400 or failures > self.request_retries:
                    raise
                logger.warning("asking again: %s", error)
            await self.sleep(failures * random.uniform(0.5, 1.0))

    async def _generate_segment(
        self, server: str, req: ModelRequest, response: ModelResponse, limit: int
    ) -> ModelResponse:
        ids = response.input_tokens + response.output_tokens
        room = limit - response.output_len
        # A request's id begins with its episode ("7-3" for call "7-3.1"), because the small server
        # serves episodes in rotation. The random suffix makes the id unique, so that an abort ends
        # only this request.
        rid = f"{req.call.rpartition('.')[0] or req.rid}/{secrets.token_hex(8)}"
        body = generate_body(ids, req.gconfig, room) | {"rid": rid}
        at_least = self.servers.newest  # no token may be older (see the proof in staleness.py)
        try:
            answer = await self.servers.call(server + "/generate", body, self.request_timeout)
        except (asyncio.CancelledError, EngineError):
            # A server does not notice that its client has hung up, so tell it to stop generating.
            abort = self.servers.call(server + "/abort_request", {"rid": rid}, timeout=5.0)
            with suppress(EngineError):
                await asyncio.shield(abort)
            raise
        segment = parse_segment(answer)
        if segment.output_len > room:
            raise EngineError(f"{server} sent more tokens than were asked for", 502)
        self.servers.check_versions(server, segment.output_versions, at_least)
        return segment

    # ---- control, in the trainer's thread

    def initialize(self, *_: Any, **__: Any) -> None:
        """Read the servers' limits, and test every server with one token. Raises EngineError if an
        answer lacks logprobs or a numeric version. Takes AReaL's arguments, but ignores them."""
        infos = self.servers.post_all("/server_info")
        self.context_length = min(info["max_req_input_len"] for info in infos)
        for answer in self.servers.post_all("/generate", probe([0])):
            parse_segment(answer)
            if self.pause_mode != "abort" and "weight_versions" not in answer["meta_info"]:
                logger.warning("a server reports no weight_versions: pause_mode is now abort")
                self.pause_mode = "abort"

    def take_over(self) -> None:
        """Reset servers that a killed run may have left paused, generating or in an update."""
        self.servers.post_all("/continue_generation", {})
        with suppress(EngineError):  # raised if no update is open
            self.servers.post_all("/end_weight_update", {})
        weights.label(self.servers.post_all, "0", abort=True)

    def pause(self) -> None:
        """Start no more rollouts, and pause the servers, so that the weights can change."""
        if self.dispatcher is not None:
            self.dispatcher.pause()
        self._paused = True
        self.servers.post_all("/pause_generation", {"mode": self.pause_mode})

    def update_weights(
        self, meta: weights.WeightUpdateMeta, buckets: Iterable[weights.Bucket] = ()
    ) -> None:
        """Send version `meta.version` to all servers. Call `pause` first."""
        weights.send(meta, self.servers.post_all, buckets)

    def set_version(self, version: int) -> None:
        """Record that all servers have `version`. The trainer's engine also tells the proxy's
        engine, and lets the gate admit more groups."""
        self.servers.newest = self.servers.trainer_version = version
        if self.proxy is not None:
            Servers(*self.proxy).post_all("/set_version", {"version": version})
        if self.dispatcher is not None:
            self.dispatcher.on_new_version()

    def get_version(self) -> int:
        """The newest version that all servers have."""
        return self.servers.newest

    def resume(self) -> None:
        self.servers.post_all("/continue_generation", {})
        self._paused = False
        if self.dispatcher is not None:
            self.dispatcher.resume()

    def destroy(self) -> None:
        if self._paused:
            self._paused = False
            with suppress(EngineError):
                self.servers.post_all("/continue_generation", {}, timeout=5.0)
        if self.dispatcher is not None:
            self.dispatcher.destroy()
