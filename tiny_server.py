"""An inference server on torch that speaks SGLang's HTTP protocol: what a laptop has in SGLang's place.

    python tiny_server.py --model-path DIR --port 30000

**The rule.** To its client this server is SGLang: the same routes, bodies, finish reasons, version spans and pause
modes, so engine.py has no branch for a CPU and one contract test runs against both. Where SGLang has a lethal bug it
is not copied: an id outside the vocabulary is a 400, not the end of the server.

**How it works.** Four files, four concerns. tiny_scheduler.py decides what runs next, tiny_model.py computes one step
of a batch, tiny_protocol.py reads and writes the bodies, and here are the one thread that owns scheduler and model
(`Engine`) and the asyncio loop with the HTTP routes.
They meet in two places. The routes put closures on the engine's inbox, which it runs between two steps; the engine
hands back everything that ended in a step with one wake-up of the loop. So the scheduler needs no lock, and a token
that many requests get at once costs one thread switch.

    POST /generate                     tokens for input_ids or text, one or a list; `stream` for server-sent events
    POST /abort_request                {"rid"} or {"abort_all": true}
    POST /pause_generation             {"mode": "abort" | "retract" | "in_place"}
    POST /continue_generation
    POST /update_weights_from_disk     {"model_path", "weight_version", "abort_all_requests"}
    POST /update_weight_version        {"new_version", "abort_all_requests"}
    POST /flush_cache
    GET  /model_info /server_info /health /ready

**Own choices.** A client that hangs up aborts its request (SGLang computes on for nobody). `sampling_seed` is always
honoured; with `--seed` a request's tokens and logprobs depend on it, the prompt and the weights only, not on what else
is in the batch (tiny_model.py, "Bits"; without, batches of one to three are faster and differ in the last bit).
flush_cache false does not keep the keys of old weights. An update without a pause waits for what is in flight, as in
SGLang, and so do requests that come after it.

**What it does not promise.** Speed beyond model.generate's (bench/engine.py compares them), more than one request's
worth of patience with a client that never reads, authentication, grammars, LoRA. Weights come from disk; a process
group or serialised tensors would be two more routes that hand Engine.update a reader of their own.
"""

import argparse
import asyncio
import contextlib
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson
import torch
import uvicorn
from fastapi import FastAPI, Response
from fastapi import Request as HTTPRequest
from fastapi.responses import StreamingResponse
from torch import Tensor
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from tiny_model import ModelError, TinyModel, read_weights, run_step
from tiny_protocol import Protocol, Refused, read_body
from tiny_scheduler import Scheduler, Sequence

MODES = ("abort", "retract", "in_place")
CONTROLS = ("abort_request", "pause_generation", "continue_generation", "flush_cache")
UPDATES = ("update_weights_from_disk", "update_weight_version")
QUESTIONS = ("model_info", "get_model_info", "server_info", "get_server_info", "health", "ready")


class ListenError(OSError):
    """The port cannot be had."""


# the engine's thread


def resolve(future: asyncio.Future, result: Any) -> None:
    """Set a future's result unless who waited for it is gone."""
    if not future.done():
        future.set_result(result)


class Engine:
    """The one thread that touches scheduler and model. `call` runs a function there, between two steps."""

    def __init__(self, model: TinyModel, scheduler: Scheduler, deliver: Callable[[list[Sequence]], None]) -> None:
        self.model = model
        self.scheduler = scheduler
        self.deliver = deliver  # called in the engine's thread with requests that ended or, streaming, grew
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.streams = 0  # streaming requests that have not ended, at most
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def submit(self, sequence: Sequence) -> None:
        def run() -> None:
            self.streams += sequence.context.stream
            self.scheduler.submit(sequence)

        self.inbox.put(run)

    def abort(self, sequences: list[Sequence]) -> None:
        self.inbox.put(lambda: self.scheduler.abort(sequences.__contains__))

    def call(self, function: Callable[[], Any]) -> asyncio.Future:
        """A future of the running loop that is done when the engine has run `function`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future = loop.create_future()

        def run() -> None:
            function()
            loop.call_soon_threadsafe(resolve, future, None)

        self.inbox.put(run)
        return future

    def update(self, read: Callable[[], dict[str, Tensor]], version: str | None, abort_all: bool) -> asyncio.Future:
        """Replace the weights by what `read` returns, once nothing is in flight. The future's result: None, or why
        the old weights stay."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future = loop.create_future()

        def load() -> bool:
            problem = None
            try:
                self.model.replace_weights(read())
            except ModelError as error:
                problem = str(error)
            loop.call_soon_threadsafe(resolve, future, problem)
            return problem is None

        self.inbox.put(lambda: self.scheduler.request_update((load, version), abort_all))
        return future

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """Let the step under way end, then the thread."""
        self.inbox.put(None)
        self.thread.join(timeout=10)

    def _run(self) -> None:
        torch.set_num_threads(1)
        try:
            while self._serve():
                pass
        except BaseException:  # the supervisor: a bug here must end the process, not hang its clients
            traceback.print_exc()
            os._exit(1)

    def _serve(self) -> bool:
        """Take what came in, load new weights if they are due, hand over what ended, take one step; wait when there
        is nothing to do. False when told to stop."""
        scheduler = self.scheduler
        idle = scheduler.paused is not None or not (scheduler.running or scheduler.waiting)
        while idle or not self.inbox.empty():
            event = self.inbox.get()
            if event is None:
                return False
            event()
            idle = False
        while scheduler.update_is_due():
            load, version = scheduler.updates[0]
            loaded = load()
            scheduler.updated((version or scheduler.version) if loaded else None)
        self._hand_over()
        if run_step(scheduler, self.model):
            self._hand_over()
        return True

    def _hand_over(self) -> None:
        ended, self.scheduler.finished = self.scheduler.finished, []
        if self.streams:
            ended += [r for r in self.scheduler.live() if r.context.stream]
            self.streams = sum(r.finish is None for r in ended if r.context.stream)
        if ended:
            self.deliver(ended)


# the HTTP side


def error(message: str, status: int = 400) -> Response:
    return reply({"error": {"message": message, "type": "invalid_request_error"}}, status)


def reply(body: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


class Server:
    """The routes. Everything that changes the scheduler goes through the engine's inbox."""

    def __init__(self, model: TinyModel, scheduler: Scheduler, protocol: Protocol, path: str) -> None:
        self.model = model
        self.scheduler = scheduler
        self.protocol = protocol
        self.model_path = path
        self.engine = Engine(model, scheduler, self.deliver)
        self.loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"Server({self.model_path!r}, {self.scheduler!r})"

    def app(self) -> FastAPI:
        @contextlib.asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            self.loop = asyncio.get_running_loop()
            self.engine.start()
            yield
            self.engine.stop()

        app = FastAPI(lifespan=lifespan, openapi_url=None)
        for path in ("generate", *CONTROLS, *UPDATES, *QUESTIONS):
            handler = getattr(self, path.removeprefix("get_"))
            app.router.add_route(f"/{path}", answering(handler), methods=["GET", "POST"])
        return app

    def deliver(self, requests: list[Sequence]) -> None:
        """Called by the engine's thread: tell everyone who waits, with one wake-up."""

        def tell() -> None:
            for r in requests:
                resolve(r.context.news, None)

        assert self.loop is not None, "the engine starts after the loop"
        self.loop.call_soon_threadsafe(tell)

    # generation

    async def generate(self, request: HTTPRequest) -> Response:
        body = read_body(await request.body())
        sequences, one = self.protocol.parse(body)
        logprobs = bool(body.get("return_logprob"))
        for seq in sequences:
            self.engine.submit(seq)
        if sequences[0].context.stream:
            return StreamingResponse(self.stream(sequences[0], logprobs), media_type="text/event-stream")
        gone = asyncio.ensure_future(request.receive())  # a body that was read is followed by the hang-up only
        try:
            for seq in sequences:
                await asyncio.wait({seq.context.news, gone}, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    self.engine.abort(sequences)
                    return error("the client hung up", 499)
        finally:
            gone.cancel()
        answers = [self.protocol.answer(seq, logprobs) for seq in sequences]
        return reply(answers[0] if one else answers)

    async def stream(self, seq: Sequence, logprobs: bool) -> AsyncIterator[bytes]:
        """Server-sent events, each with all tokens so far."""
        try:
            ended = False
            while not ended:
                await seq.context.news
                seq.context.news = asyncio.get_running_loop().create_future()
                ended = seq.finish is not None
                yield b"data: " + orjson.dumps(self.protocol.answer(seq, logprobs)) + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            self.engine.abort([seq])  # of no effect on one that ended

    # control

    async def abort_request(self, request: HTTPRequest) -> Response:
        body = read_body(await request.body())
        rid, everything = body.get("rid"), bool(body.get("abort_all"))
        if not everything and not isinstance(rid, str):
            raise Refused('give {"rid": "..."} or {"abort_all": true}')
        await self.engine.call(lambda: self.scheduler.abort(lambda s: everything or s.rid == rid))
        return Response()

    async def pause_generation(self, request: HTTPRequest) -> Response:
        mode = read_body(await request.body()).get("mode", "abort")
        if mode not in MODES:
            raise Refused(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        await self.engine.call(lambda: self.scheduler.pause(mode))
        return reply({"message": f"Generation paused, mode {mode}.", "status": "ok"})

    async def continue_generation(self, _: HTTPRequest) -> Response:
        await self.engine.call(self.scheduler.resume)
        return reply({"message": "Generation continued.", "status": "ok"})

    async def update_weights_from_disk(self, request: HTTPRequest) -> Response:
        body = read_body(await request.body())
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str):
            raise Refused("model_path must be the path of a Hugging Face directory")
        version = None if version is None else str(version)
        abort_all = bool(body.get("abort_all_requests"))
        problem = await self.engine.update(lambda: read_weights(path), version, abort_all)
        if problem:
            return reply({"success": False, "message": f"The old weights stay: {problem}"}, 400)
        self.model_path = path
        message = "Succeeded to update model weights."
        return reply({"success": True, "message": message, "num_paused_requests": 0})

    async def update_weight_version(self, request: HTTPRequest) -> Response:
        body = read_body(await request.body())
        version = body.get("new_version")
        if not isinstance(version, str):
            raise Refused("new_version must be a string")
        aborts = bool(body.get("abort_all_requests", True))

        def relabel() -> None:
            if aborts:
                self.scheduler.abort()
            self.scheduler.relabel(version)

        await self.engine.call(relabel)
        return reply({"success": True, "message": f"Weight version is {version}.", "new_version": version})

    async def flush_cache(self, _: HTTPRequest) -> Response:
        await self.engine.call(self.scheduler.flush)
        return Response("Cache flushed.\n", media_type="text/plain")

    # questions

    async def model_info(self, _: HTTPRequest) -> Response:
        sizes = {"vocab_size": self.model.vocab_size, "context_length": self.model.context_length}
        version = {"weight_version": self.scheduler.version, "is_generation": True}
        return reply({"model_path": self.model_path, **version, **sizes})

    async def server_info(self, _: HTTPRequest) -> Response:
        limits = {"max_total_num_tokens": self.scheduler.max_total_tokens}
        limits["max_running_requests"] = len(self.scheduler.slots)
        state = {"state": repr(self.scheduler), "steps": self.scheduler.steps, "cpu_seconds": time.process_time()}
        return reply({"model_path": self.model_path, "weight_version": self.scheduler.version, **limits, **state})

    async def health(self, _: HTTPRequest) -> Response:
        return Response()

    async def ready(self, _: HTTPRequest) -> Response:
        return Response(status_code=503 if self.scheduler.paused else 200)


def answering(handler: Callable[[HTTPRequest], Awaitable[Response]]) -> Callable:
    """What the caller did wrong as a 400 with its message."""

    async def route(request: HTTPRequest) -> Response:
        try:
            return await handler(request)
        except Refused as refused:
            return error(str(refused))

    return route


# the process


def parse_args(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small inference server with SGLang's HTTP protocol.")
    parser.add_argument("--model-path", required=True, help="a Hugging Face directory")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--weight-version", default="0", help="the version of the weights at start")
    parser.add_argument("--max-running-requests", type=positive, default=64, help="sequences decoded together")
    parser.add_argument("--max-total-tokens", type=positive, help="tokens of all running sequences; default: no limit")
    parser.add_argument("--seed", type=int, help="for requests without sampling_seed; makes runs repeat bit by bit")
    parser.add_argument("--skip-tokenizer-init", action="store_true", help="token ids only: no text, no stop strings")
    parser.add_argument("--exit-with-parent", action="store_true", help="end when standard input is closed")
    return parser.parse_args(words)


def follow_parent() -> None:
    """End this process when the other end of standard input is gone. At once: there is nothing to save."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def bind(host: str, port: int) -> socket.socket:
    """The port, taken before anything slow is loaded; nobody can connect before the server listens."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as problem:
        raise ListenError(f"cannot listen on {host}:{port}: {problem}") from problem
    return sock


def positive(word: str) -> int:
    """An integer, at least 1."""
    if int(word) < 1:
        raise ValueError
    return int(word)


def load_tokenizer(path: str, skip: bool) -> Any:
    """The directory's tokenizer; None where it has none or it is not wanted."""
    if skip:
        return None
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError):
        print(f"warning: no tokenizer in {path}: token ids only", file=sys.stderr)
        return None


def main(words: list[str]) -> None:
    args = parse_args(words)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    if args.exit_with_parent:
        follow_parent()
    sock = bind(args.host, args.port)
    model = TinyModel.load(args.model_path, args.max_running_requests, deterministic=args.seed is not None)
    tokenizer = load_tokenizer(args.model_path, args.skip_tokenizer_init)
    limit = args.max_total_tokens or args.max_running_requests * model.context_length
    decode = None if tokenizer is None else tokenizer.decode
    scheduler = Scheduler(args.max_running_requests, limit, args.weight_version, decode)
    eos = model.eos | ({tokenizer.eos_token_id} if tokenizer is not None else set())
    protocol = Protocol(model.vocab_size, model.context_length, limit, eos - {None}, tokenizer, args.seed)
    app = Server(model, scheduler, protocol, args.model_path).app()
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_keep_alive=75, timeout_graceful_shutdown=1
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[sock])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ModelError, ListenError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
