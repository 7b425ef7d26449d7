"""This small inference server for a CPU has SGLang's HTTP protocol, so clients can use it in place of SGLang.

    python -m inference.tiny.server --model-path DIR --port 30000

**The rule.** One thread, the engine's thread, owns the model and the scheduler. The HTTP routes run in an asyncio loop.
To change the model or the scheduler, a route sends a function call to the engine's thread. When a sequence has new
tokens or has finished, the engine's thread wakes the route that waits for the sequence.

    asyncio loop (Server)                               engine's thread (Engine)
    POST /generate  -- call(scheduler.submit, ..) -->   queue: event, event, step, event, step ..
    waits for sequence.changed  <------- announce --    after each step: finished and streaming sequences

Each entry of the thread's queue is either an event (a function call of a route) or a step. When a step ends, the thread
puts the next step into the queue, after the events that arrived during the step. The scheduler needs no lock, because
one thread handles both events and steps.

**The files.** scheduler.py chooses the sequences of the next step, model.py computes the step, and protocol.py
translates the bodies of requests and replies. The file fast.py is the forward pass of the most common architectures.

    POST /generate                     generates tokens for the prompts in `input_ids`; `stream` for server-sent events
    POST /abort_request                {"rid"}
    POST /pause_generation             {"mode": "abort" | "retract" | "in_place"}
    POST /continue_generation
    POST /update_weights_from_disk     {"model_path", "weight_version", "abort_all_requests"}
    POST /release_memory_occupation    frees the memory of the weights and the cache, until /resume_memory_occupation
    POST /begin_weight_update, /end_weight_update; between the two, any number of
         /update_weights_from_distributed    {"names", "dtypes", "shapes", "group_name"}, while rank 0 broadcasts
         /update_weights_from_tensor         {"serialized_named_tensors"}
    POST /init_weights_update_group    {"master_address", "master_port", "rank_offset", "world_size", "group_name"}
    POST /destroy_weights_update_group {"group_name"}
    POST /update_weight_version        {"new_version", "abort_all_requests"}
    GET  /server_info /model_info /health /ready

With `--seed`, a request's tokens and logprobs depend only on the request's seed, the prompt and the weights (model.py,
"Bits"). A weight update without a pause waits until all running sequences have finished. To end a request, a client
must send /abort_request. If a client disconnects, the server continues the client's request. With `--api-key`, every
request except /health and /ready needs the header Authorization with the value `Bearer <key>`.

**Not promised.** The server does not support text prompts, several samples of one prompt, grammars, LoRA or weight
updates of a mixture of experts.
"""

import argparse
import asyncio
import contextlib
import functools
import inspect
import os
import random
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from transformers.utils import logging as transformers_logging

from inference.fields import Refusal, get
from inference.group import join_group
from inference.serve import (
    NO_TELEMETRY,
    check_key,
    listen,
    load_tokenizer,
    read_object,
    read_secret,
    reply,
    serve,
)
from inference.tiny.model import TinyModel, read_weights, receive_weights, run_step, unpack_weights
from inference.tiny.protocol import Protocol
from inference.tiny.scheduler import Scheduler, Sequence

MODES = ("abort", "retract", "in_place")  # the pause modes
SPEAKS = "0.5.23"  # the version of SGLang that tests/inference/test_contract.py compares with this server

# The thread that owns the model


@contextlib.contextmanager
def supervised() -> Iterator[None]:
    """End the process if a bug raises an error in the engine's thread. If the process kept running without the engine's
    thread, all clients would wait forever."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def announce(sequences: list[Sequence]) -> None:
    """Wake the routes that wait for the given sequences. The asyncio loop calls this function."""
    for sequence in sequences:
        sequence.changed.set()


class Engine:
    """The thread that owns the model and the scheduler.

    The thread is the single worker of a ThreadPoolExecutor. The executor's queue contains events from the routes and at
    most one step.
    """

    def __init__(self, model: TinyModel, scheduler: Scheduler) -> None:
        self.model = model
        self.scheduler = scheduler
        self.thread = ThreadPoolExecutor(
            1, "engine", initializer=torch.set_num_threads, initargs=(1,)
        )
        # Mutable state:
        self.stepping = False  # True while a step is queued or running
        self.loop: (
            asyncio.AbstractEventLoop
        )  # the event loop of the routes, set when the server starts

    # A method that runs in the asyncio loop

    def call(self, function: Callable[..., None], *arguments: Any) -> asyncio.Future:
        """Queue `function(*arguments)` for the engine's thread. Return a future that is done when the function has
        returned."""
        return self.loop.run_in_executor(self.thread, self._event, function, *arguments)

    # Methods that run in the engine's thread

    def set_released(self, released: bool) -> None:
        """Release or allocate the memory of weights and cache. The method overwrites all weights with NaN, because a
        server loses its weights when it releases its memory."""
        self.scheduler.set_released(released)
        self.model.lose_weights()

    @supervised()
    def _event(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call `function`, as an HTTP route has requested. If no step is queued, put a step into the queue."""
        function(*arguments)
        if not self.stepping:
            self.stepping = True
            self.thread.submit(self._step)

    @supervised()
    def _step(self) -> None:
        """Compute one step and wake the routes whose sequences changed. If the step was not empty, queue the next
        step."""
        self.stepping = run_step(self.scheduler, self.model)
        news, self.scheduler.finished = self.scheduler.finished, []
        if self.stepping:
            news += [sequence for sequence in self.scheduler.running if sequence.stream]
            self.thread.submit(self._step)
        if news:
            self.loop.call_soon_threadsafe(announce, news)


# The HTTP routes


def outcome(problem: str | None) -> Response:
    """Return SGLang's reply to a weight update: status 200, or status 400 with `problem` as the message."""
    return reply(
        {"success": not problem, "message": problem or "Succeeded."}, 400 if problem else 200
    )


async def refuse(_: Request, refusal: Exception) -> Response:
    """Reply with the status and the message of an error. FastAPI calls this function."""
    return reply({"error": {"message": str(refusal)}}, getattr(refusal, "status", 400))


class Server:
    """The HTTP routes. Each public coroutine serves the path that has the coroutine's name."""

    def __init__(self, engine: Engine, protocol: Protocol, model_path: str, key: str = "") -> None:
        self.engine = engine
        self.key = key  # key that every request needs, except GET /health and GET /ready; "": no key is needed
        self.scheduler = engine.scheduler
        self.protocol = protocol
        self.model_path = model_path  # folder that contains the initial weights and the tokenizer.
        # Mutable state:
        self.groups: dict[str, Any] = {}  # process groups that receive new weights, by name
        self.in_session = False  # True between begin_weight_update and end_weight_update

    def app(self) -> FastAPI:
        """Return the web application, with one path for each public coroutine of this class."""

        @contextlib.asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            self.engine.loop = asyncio.get_running_loop()
            yield
            # At shutdown, clear the queue of weight updates, because a paused scheduler loads all updates in its queue.
            # Then pause the scheduler, so that it computes no further step.
            self.engine.call(self.scheduler.updates.clear)
            paused = self.engine.call(self.scheduler.pause, "in_place")
            await asyncio.wait({paused}, timeout=10)
            if not paused.done():
                os._exit(
                    1
                )  # the engine's thread may be waiting for a broadcast from a process that has ended

        handlers: Any = dict.fromkeys((Refusal, ClientDisconnect), refuse)
        app = FastAPI(
            lifespan=lifespan, openapi_url=None, exception_handlers=handlers, telemetry=NO_TELEMETRY
        )
        for name, route in inspect.getmembers(self, inspect.iscoroutinefunction):
            if not name.startswith("_"):
                app.add_route(
                    f"/{name}", functools.partial(self._answer, route), methods=["GET", "POST"]
                )
        return app

    async def _answer(
        self, route: Callable[[Request], Awaitable[Response]], request: Request
    ) -> Response:
        """Check the key of a request, then call its route. Raises Refusal if the key is missing or wrong."""
        if self.key and request.url.path not in ("/health", "/ready"):
            check_key(request, self.key)
        return await route(request)

    async def _body(self, request: Request, **kinds: type) -> dict[str, Any]:
        """Return the request's JSON object. Raises Refusal if a field that `kinds` names is missing or has a wrong
        type."""
        body = read_object(await request.body())
        for name, kind in kinds.items():
            if not isinstance(body.get(name), kind):
                raise Refusal(f"{name} must be given and have type {kind.__name__}")
        return body

    # Generation

    async def generate(self, request: Request) -> Response:
        sequences, batch = self.protocol.parse(await self._body(request))
        for sequence in sequences:
            self.engine.call(self.scheduler.submit, sequence)
        if sequences[0].stream:
            return StreamingResponse(self._stream(sequences[0]), media_type="text/event-stream")
        for sequence in sequences:
            await sequence.changed.wait()
        answers = [self.protocol.answer(sequence) for sequence in sequences]
        return reply(answers if batch else answers[0])

    async def _stream(self, sequence: Sequence) -> AsyncIterator[bytes]:
        """Yield server-sent events until the sequence has finished. Each event contains all tokens generated so far."""
        ended = False
        while not ended:
            await sequence.changed.wait()
            sequence.changed.clear()
            answer = self.protocol.answer(sequence)
            ended = answer["meta_info"]["finish_reason"] is not None
            yield b"data: " + orjson.dumps(answer) + b"\n\n"
        yield b"data: [DONE]\n\n"

    # Control

    async def abort_request(self, request: Request) -> Response:
        rid = (await self._body(request, rid=str))["rid"]
        await self.engine.call(self.scheduler.abort, lambda sequence: sequence.rid == rid)
        return Response()

    async def pause_generation(self, request: Request) -> Response:
        mode = (await self._body(request)).get("mode", "abort")
        if mode not in MODES:
            raise Refusal(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        await self.engine.call(self.scheduler.pause, mode)
        return reply({"message": f"Generation paused, mode {mode}.", "status": "ok"})

    async def continue_generation(self, _: Request) -> Response:
        await self.engine.call(self.scheduler.resume)
        return reply({"message": "Generation continued.", "status": "ok"})

    # Memory and new weights

    async def release_memory_occupation(self, _: Request) -> Response:
        await self.engine.call(self.engine.set_released, True)
        return Response()

    async def resume_memory_occupation(self, _: Request) -> Response:
        await self.engine.call(self.engine.set_released, False)
        return Response()

    async def update_weights_from_disk(self, request: Request) -> Response:
        body = await self._body(request, model_path=str)
        return await self._load(body, lambda: read_weights(body["model_path"]), whole=True)

    async def update_weights_from_distributed(self, request: Request) -> Response:
        body = await self._body(request, group_name=str, names=list, dtypes=list, shapes=list)
        group = self.groups.get(body["group_name"])
        return await self._load(
            body, lambda: receive_weights(group, body["names"], body["dtypes"], body["shapes"])
        )

    async def update_weights_from_tensor(self, request: Request) -> Response:
        body = await self._body(request, serialized_named_tensors=list)
        return await self._load(body, lambda: unpack_weights(body["serialized_named_tensors"]))

    async def _load(
        self, body: dict, read: Callable[[], dict[str, torch.Tensor]], whole: bool = False
    ) -> Response:
        """Load the weights that `read` returns, as soon as the scheduler allows an update. Return the reply to the
        request.

        If `whole` is set, `read` must return all weights. If `whole` is not set, `read` may return a part of the
        weights. The server accepts a part of the weights only between begin_weight_update and end_weight_update.
        """
        version = get(body, "weight_version", str)
        if not (whole or self.in_session):
            return outcome(
                "a part of the weights must come between begin_weight_update and end_weight_update"
            )
        if body.get("abort_all_requests"):
            self.engine.call(self.scheduler.abort)
        answer = self.engine.loop.create_future()

        def load() -> None:  # load() runs in the engine's thread
            problem = None
            try:
                if self.scheduler.released:
                    raise RuntimeError(
                        "the memory is released: /resume_memory_occupation comes before an update"
                    )
                self.engine.model.replace_weights(read(), whole)
            # `read` can raise errors of any type. An error of `read` leaves all weights unchanged.
            except Exception as error:
                problem = f"The old weights stay: {type(error).__name__}: {error}"
            else:
                self.scheduler.renew(version)
            self.engine.loop.call_soon_threadsafe(answer.set_result, problem)

        self.engine.call(self.scheduler.updates.append, load)
        return outcome(await answer)

    async def begin_weight_update(self, _: Request) -> Response:
        was_open, self.in_session = self.in_session, True
        return outcome("a weight-update session is already open" if was_open else None)

    async def end_weight_update(self, _: Request) -> Response:
        was_open, self.in_session = self.in_session, False
        return outcome(None if was_open else "no weight-update session is open")

    async def init_weights_update_group(self, request: Request) -> Response:
        kinds = {
            "master_address": str,
            "master_port": int,
            "rank_offset": int,
            "world_size": int,
            "group_name": str,
        }
        body = await self._body(request, **kinds)
        address, port, rank, world, name = (body[key] for key in kinds)
        try:
            self.groups[name] = await asyncio.to_thread(
                join_group, address, port, rank, world, name, "gloo"
            )
        except asyncio.CancelledError:
            # The server is shutting down. The thread that runs `join_group` would wait for missing ranks and keep the
            # process alive.
            os._exit(1)
        except (
            Exception
        ) as error:  # torch raises errors of any type for a bad port or a missing peer
            return outcome(f"the process group was not formed: {error}")
        return outcome(None)

    async def destroy_weights_update_group(self, request: Request) -> Response:
        body = await self._body(request, group_name=str)
        return outcome(
            None
            if self.groups.pop(body["group_name"], None)
            else "there is no process group of this name"
        )

    async def update_weight_version(self, request: Request) -> Response:
        body = await self._body(request, new_version=str)
        if body.get("abort_all_requests", True):
            self.engine.call(self.scheduler.abort)
        await self.engine.call(self.scheduler.relabel, body["new_version"])
        return outcome(None)

    # Routes that report the server's state

    async def server_info(self, _: Request) -> Response:
        """Reply with the scheduler's state, the CPU time in seconds, and the fields of SGLang's reply that clients
        read."""
        known = {"model_path": self.model_path, "max_req_input_len": self.protocol.max_length}
        known |= {
            "weight_version": self.scheduler.version,
            "version": SPEAKS,
            "device": "cpu",
            "tp_size": 1,
        }
        return reply({**known, "state": repr(self.scheduler), "cpu_seconds": time.process_time()})

    model_info = server_info

    async def health(self, _: Request) -> Response:
        return Response()

    async def ready(self, _: Request) -> Response:
        return Response(status_code=503 if self.scheduler.paused else 200)


# The process


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line. If an argument is wrong, print a message and exit."""
    parser = argparse.ArgumentParser(
        description="A small inference server with SGLang's HTTP protocol."
    )
    add = parser.add_argument
    add("--model-path", required=True, help="a Hugging Face folder with model and tokenizer")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=30000, help="port to listen on")
    add(
        "--api-key",
        type=read_secret,
        default=os.getenv("POCKET_AREAL_SERVER_KEY", ""),
        help="-: read it from stdin",
    )
    add("--weight-version", default="0", help="version of the weights at start")
    add(
        "--max-running-requests",
        type=int,
        default=64,
        help="largest number of sequences that run at the same time",
    )
    add(
        "--max-total-tokens",
        type=int,
        default=65536,
        help="most tokens of all running sequences together",
    )
    add(
        "--seed",
        type=int,
        help="seed for requests without a sampling_seed; makes two runs equal bit by bit",
    )
    add(
        "--exit-with-parent",
        action="store_true",
        help="end this server when its standard input is closed",
    )
    args = parser.parse_args(argv)
    if min(args.max_running_requests, args.max_total_tokens) < 1:
        parser.error("--max-running-requests and --max-total-tokens must be at least 1")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the server until a signal ends it. If the server cannot start, print one line on stderr and return the exit
    code 2."""
    args = parse_args(argv)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        listener = listen(args.host, args.port, args.api_key)
        model = TinyModel(
            args.model_path, args.max_running_requests, deterministic=args.seed is not None
        )
        tokenizer = load_tokenizer(args.model_path)
    except (OSError, ValueError) as problem:
        print("error:", " ".join(str(problem).split())[:300], file=sys.stderr)
        return 2
    scheduler = Scheduler(
        args.max_running_requests, args.max_total_tokens, args.weight_version, tokenizer.decode
    )
    max_length = min(model.context_length, args.max_total_tokens)
    eos = model.eos | {tokenizer.eos_token_id}
    protocol = Protocol(
        model.vocab_size, max_length, eos, tokenizer.decode, random.Random(args.seed)
    )
    app = Server(Engine(model, scheduler), protocol, args.model_path, args.api_key).app()
    serve(app, listener, args.exit_with_parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
