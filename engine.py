"""The engine asks the inference servers for completions, and a weight update may arrive in the middle of one.

While the trainer works on a batch, the servers go on generating. When new weights arrive, thousands of completions are
unfinished. Waiting for the longest one would leave GPUs idle, and throwing them away would waste work and favour short
ones. A **partial rollout** (write-up, section 2.1) does neither. The update interrupts a completion, the
completion keeps its tokens, and the new weights compute the next token. The trainer must know which weights computed
which token, so every token carries a version:

    output_tokens     a     b     c     d     e     f
    output_logprobs  -0.2  -1.1  -0.4  -0.7  -0.1  -2.3     under the weights that sampled the token
    output_versions   3     3     3     4     4     4       the weight update came after the third token

`RemoteInfEngine.agenerate` builds such a completion from one or more **segments**. A segment is what one POST /generate
produces. The pause mode says what a server does with its running requests when it is paused for an update:

- `retract` (the default): the server drops the KV cache of a request and keeps its tokens. After the update the server
  computes the cache again under the new weights and goes on. The engine receives one segment, whose spans
  (`weight_versions`) say where the version changed.
- `abort`: the server returns the tokens it has, with finish reason `abort`. The engine sends prompt + tokens so far
  with what is left of the budget. This request waits at the paused server and continues under the new weights.
- `in_place`: the server goes on with the KV cache of the old weights. This mode is the cheapest, but tokens after
  the update mix old and new weights and follow neither policy. It is never the default.

**Versions come from the server**, in each answer. The engine's own version may change while a request is under way, so
it tags no token. SGLang 0.5.16 to 0.5.18 reports no spans, only the version at the end of a segment. With such a
server no segment may live through an update, so `initialize` switches to `abort` and logs a warning.

**Failures.** When a server fails in the middle of a segment, the tokens that it has streamed are kept. The engine asks
for the missing tokens again, at another server if there is one (inference/servers.py). The waits between tries grow
exponentially. The engine never repeats a request that a server refuses. If the caller is cancelled, the engine aborts
the request at the server.

**Checks.** A token id outside the vocabulary kills an SGLang server, so the engine checks every id before it sends it.

**Not promised.** In mode `abort`, a stop string that spans two segments is not found, and frequency and presence
penalties count from zero in each segment. An interrupted completion does not repeat what its seed would have given
without the interruption.
"""

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import httpx
import orjson

from inference import weights
from inference.io_struct import ModelRequest, ModelResponse, generate_body, parse_segment, probe
from inference.servers import Servers
from inference.wire import EngineError, Wire, run_all

logger = logging.getLogger("nano_areal.engine")

EMPTY_ABORT_WAIT = 0.05, 1.0  # seconds to wait after an abort that brought no token: the first wait, the longest wait
FAILURE_WAIT = 0.5, 10.0  # seconds to wait after a failed request: the first wait, the longest wait

OnTokens = Callable[[ModelResponse], None]


def backoff(attempt: int, first: float, most: float) -> float:
    """Return the seconds to wait after failure number `attempt` (1, 2, ...): `first`, then doubled, at most `most`."""
    return min(most, first * 2.0 ** min(attempt - 1, 30))


def read_vocab_size(model_path: str | None) -> int | None:
    """Return the vocabulary size that a model folder's config.json names, or None if the file cannot be read."""
    try:
        config = orjson.loads((Path(model_path or "") / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return config.get("text_config", config).get("vocab_size")


@dataclass(eq=False)
class RemoteInfEngine:
    """All inference servers of a run, behind one object. Raises ValueError if it gets no address."""

    addresses: list[str]  # base URLs of servers or routers
    pause_mode: str = "retract"  # retract, abort or in_place; it becomes abort if a server reports no spans
    request_timeout: float = 3600.0  # seconds that a server may be silent during one segment
    request_retries: int = 3  # how often a segment is asked for again after a connection error, a timeout or a 5xx
    transport: httpx.MockTransport | None = None  # tests replace the network by it
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep  # tests replace waiting by it

    def __post_init__(self) -> None:
        if not self.addresses:
            raise ValueError("the engine needs the address of at least one server")
        self._wire = Wire(self.transport)
        # Everything that changes during the engine's life, apart from `pause_mode`:
        self.servers = Servers(self.addresses, self._wire)
        self.vocab_size: int | None = None  # tokens; None if no server's model folder can be read
        self.context_length: int | None = None  # tokens of prompt and completion together; None if no server tells
        self.has_grammar = False  # True if every server can enforce a json_schema
        self.executor: Any = None  # the WorkflowExecutor, which sets this attribute itself
        self._version = 0
        self._servers_paused = False

    # 1. Generation

    async def agenerate(self, req: ModelRequest, on_tokens: OnTokens | None = None) -> ModelResponse:
        """Generate one completion, through any number of weight updates.

        If `on_tokens` is given, the tokens are streamed, and `on_tokens` is called with the response so far whenever
        tokens have arrived. Tokens that it has seen are never taken back.

        Raises EngineError with an HTTP status: 400 if the request is wrong, 502 if an answer makes no sense, 503 if
        the server still fails after all retries.
        """
        # 1. Check the request. `response` collects what the segments bring.
        g = req.gconfig.new(max_new_tokens=self._budget(req))
        req = replace(req, gconfig=g)
        temperature = 1.0 if g.is_greedy else g.temperature
        response = ModelResponse(list(req.input_ids), temperature=temperature, trains_exactly=g.trains_exactly)
        request_ids = (f"{req.rid}-{k}" for k in itertools.count())  # each POST /generate has an id of its own

        async def generate_segment(server: str) -> None:
            await self._generate_segment(server, next(request_ids), req, response, on_tokens)

        empty_aborts = 0
        while True:
            # 2. Generate one segment: a server continues prompt + tokens so far. A session always asks the same server.
            length_before = response.output_len
            await self._ask_a_server(req.session or req.rid, generate_segment)

            # 3. Return the completion, unless a weight update interrupted it before the budget was spent.
            interrupted = response.stop_reason == "abort" and response.output_len < g.max_new_tokens
            if not interrupted:
                response.stop_reason = "stop" if response.stop_reason == "stop" else "length"
                return response

            # 4. Go on behind the last token. After an abort without any token, wait before asking again.
            empty_aborts = 0 if response.output_len > length_before else empty_aborts + 1
            if empty_aborts:
                await self.sleep(backoff(empty_aborts, *EMPTY_ABORT_WAIT))

    async def _generate_segment(
        self, server: str, rid: str, req: ModelRequest, response: ModelResponse, on_tokens: OnTokens | None
    ) -> None:
        """Send one POST /generate, and append the tokens that it brings to `response`.

        A streamed answer comes in many events, and any other answer is a single event. Each event holds all tokens of
        the segment so far, so it replaces what `response` has behind `start`.
        """
        url = server + "/generate"
        start = response.output_len
        oldest_allowed = self.servers.newest  # a server that still sends an older version was restarted
        response.stop_reason = ""
        body = generate_body(response.input_tokens + response.output_tokens, req.gconfig, start)
        body |= {"rid": rid, "stream": on_tokens is not None}
        try:
            async with contextlib.aclosing(self._wire.stream(url, body, self.request_timeout)) as events:
                async for event in events:
                    segment = parse_segment(event)
                    self.servers.check_age(server, segment.output_versions, oldest_allowed)
                    response.replace_from(start, segment)
                    if on_tokens and segment.output_len:
                        on_tokens(response)
            if not response.stop_reason:
                raise EngineError(f"{url} broke off in the middle of an answer", 503)
        except asyncio.CancelledError:  # the caller no longer wants the completion
            await self._abort(server, rid)
            raise
        except EngineError as error:
            is_complete = response.stop_reason or response.output_len >= req.gconfig.max_new_tokens
            if is_complete:  # the connection broke after the last token, so nothing is missing
                return
            if error.status != 400:  # the server did not refuse, so it may still be generating for this request
                response.regenerated += 1
                await self._abort(server, rid)
            raise

    async def _abort(self, server: str, rid: str) -> None:
        """Tell a server to stop generating for request `rid`. SGLang does not notice that a client has hung up.

        A router passes no abort on, so each of its workers is told. Failures are ignored.
        """
        urls = [worker + "/abort_request" for worker in self.servers.workers_of[server]]
        calls = [self._wire.call(url, {"rid": rid}, timeout=5.0) for url in urls]
        await asyncio.shield(asyncio.gather(*calls, return_exceptions=True))

    async def _ask_a_server(self, key: str, ask: Callable[[str], Awaitable[Any]]) -> Any:
        """Return what `ask` gets from the server of conversation `key`. If a server fails, wait and try the next one.

        Only an EngineError with status 503 counts as a failure of the server, and any other is raised at once.
        When the retries are used up, the last error is raised.
        """
        for failures in itertools.count(1):
            server = await self.servers.choose(key)
            try:
                return await ask(server)
            except EngineError as error:
                if error.status != 503:
                    raise
                self.servers.lose(server, error)
                if failures > self.request_retries:
                    raise
            await self.sleep(backoff(failures, *FAILURE_WAIT) * random.uniform(0.5, 1.0))

    def _budget(self, req: ModelRequest) -> int:
        """Return how many tokens `req` may generate. Raises EngineError (400) if no server could serve it."""
        g = req.gconfig
        self._check_ids(req.input_ids)
        if g.n_samples != 1 or g.max_new_tokens < 1:
            raise EngineError("set n_samples=1 and max_new_tokens>=1: one sample of at least 1 token", 400)
        if g.json_schema is not None and not self.has_grammar:
            raise EngineError("json_schema (response_format) is refused: a server has no grammar backend", 400)
        if self.context_length is None:
            return g.max_new_tokens
        prompt, context = len(req.input_ids), self.context_length
        if prompt >= context:
            raise EngineError(f"the prompt's {prompt} tokens leave no room in the context of {context} tokens", 400)
        return min(g.max_new_tokens, context - prompt)

    def _check_ids(self, ids: list[int]) -> None:
        """Raise EngineError (400) unless `ids` is a non-empty list of ints inside the vocabulary."""
        if not ids:
            raise EngineError("the prompt is empty", 400)
        wrong_types = {type(token) for token in ids} - {int}
        if wrong_types:
            raise EngineError(f"input_ids must be Python ints, not {[kind.__name__ for kind in wrong_types]}", 400)
        for token in (min(ids), max(ids)):
            if token < 0 or (self.vocab_size is not None and token >= self.vocab_size):
                raise EngineError(f"token id {token} is outside the vocabulary of {self.vocab_size} tokens", 400)

    # 2. Control. The trainer's main thread calls these methods, and each waits until all servers have answered.

    def initialize(self) -> None:
        """Ask every server for its limits, then for one token.

        The token shows at once what would otherwise fail in the middle of a run: a version that is not a number,
        missing logprobs, missing spans, or a server that an earlier run left paused.
        """
        self.servers.refresh()
        infos = self.servers.post_all("/server_info")
        # Of each limit the engine takes the smallest that is known.
        self.vocab_size = min(filter(None, (read_vocab_size(info.get("model_path")) for info in infos)), default=None)
        if self.vocab_size is None:
            logger.warning("no server's model folder can be read: the engine cannot refuse ids outside the vocabulary")
        self.context_length = min(filter(None, (info.get("max_req_input_len") for info in infos)), default=None)
        self.has_grammar = all(info.get("grammar_backend") not in (None, "none") for info in infos)
        answers = self.servers.post_all("/generate", probe([0]))
        if self.servers.lost:  # a run goes on without a lost server, but it does not start without one
            raise EngineError("; ".join(self.servers.lost.values()), 503)
        for server, answer in zip(self.servers.workers, answers):
            parse_segment(answer)
            if self.pause_mode != "abort" and "weight_versions" not in answer["meta_info"]:
                logger.warning("%s reports no weight_versions (SGLang 0.5.19 does): pause_mode is now abort", server)
                self.pause_mode = "abort"

    def pause(self) -> None:
        """Start no more rollouts, then pause every server. After this the weights may change."""
        if self.executor is not None:
            self.executor.pause()
        self._servers_paused = True
        self.servers.refresh()
        self.servers.post_all("/pause_generation", {"mode": self.pause_mode})

    def update_weights(self, meta: weights.WeightUpdateMeta, buckets: Iterable[weights.Bucket] | None = None) -> None:
        """Bring every server to the weights of `meta.version`, from `buckets` or from disk.

        Call it between pause and resume, because a server that is not paused first finishes all its requests.
        Raises RuntimeError that names each server that failed and why.
        """
        meta = replace(meta, flush_cache=self.pause_mode != "in_place")
        weights.send(meta, self.servers.post_all, buckets)
        self.servers.newest = meta.version

    def set_version(self, version: int) -> None:
        """Record that all servers have `version`, and let the staleness gate admit rollouts for it."""
        self._version = version
        if self.executor is not None:
            self.executor.on_new_version()

    def get_version(self) -> int:
        """Return the version of the newest policy that all servers have."""
        return self._version

    def resume(self) -> None:
        """Continue every server, then let rollouts start again.

        Lost servers are told too, because a lost server may be alive and paused.
        """
        self.servers.post_all("/continue_generation", {}, lost=True)
        self._servers_paused = False
        if self.executor is not None:
            self.executor.resume()

    def destroy(self) -> None:
        """Continue servers that this engine left paused, and end the executor. A second call does no harm."""
        if self._servers_paused:
            self._servers_paused = False
            try:
                self.servers.post_all("/continue_generation", {}, timeout=5.0, lost=True)
            except EngineError as error:
                logger.warning("a server may be left paused: %s", error)
        if self.executor is not None:
            self.executor.destroy()

    def score(self, input_ids: list[list[int]]) -> list[list[float]]:
        """Return the servers' log p(token | tokens before it) at temperature 1 for each sequence.

        The first token of a sequence has no such probability and gets 0. A sequence that fills the context loses its
        last token, because a server takes only prompts that leave room for one token.
        """

        async def score_one(number: int, ids: list[int]) -> list[float]:
            ids = ids[: self.context_length - 1] if self.context_length else ids
            self._check_ids(ids)
            body = {**probe(ids), "logprob_start_len": 0}

            async def post(server: str) -> dict[str, Any]:
                return await self._wire.call(server + "/generate", body, self.request_timeout)

            answer = await self._ask_a_server(str(number), post)
            return [0.0] + [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]

        return run_all(score_one(number, ids) for number, ids in enumerate(input_ids))

    # 3. Rollouts. The executor owns these methods, and the engine passes each call on.

    def _roll_out(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the executor. Raises RuntimeError if none is attached."""
        if self.executor is None:
            raise RuntimeError("this engine runs no rollouts: attach a WorkflowExecutor(engine, ...) first")
        return getattr(self.executor, method)(*args, **kwargs)

    # Submit one prompt; takes (data, workflow, workflow_kwargs, should_accept_fn, group_size, is_eval).
    submit = partialmethod(_roll_out, "submit")
    # Wait for groups and return them as one batch; takes (count, timeout).
    wait = partialmethod(_roll_out, "wait")
    # Wait for one submitted group and return it; takes (task_id, timeout).
    wait_for_task = partialmethod(_roll_out, "wait_for_task")
    # Submit many prompts and return their groups as one batch; takes (data, workflow, ...).
    rollout_batch = partialmethod(_roll_out, "rollout_batch")
    # Return a training batch; takes (dataloader, workflow, workflow_kwargs, should_accept_fn, group_size).
    prepare_batch = partialmethod(_roll_out, "prepare_batch")
