"""An inference server on torch that speaks SGLang's HTTP protocol: what a laptop has in SGLang's place.

    python tiny_server.py --model-path DIR --port 30000

**The rule.** To its client this server is SGLang: the same routes, bodies, finish reasons, version spans and pause
modes, so engine.py has no branch for a CPU and one contract test runs against both. Where SGLang has a lethal bug it
is not copied: an id outside the vocabulary and a tensor of another shape are a 400, not the end of the server; a tensor
whose name nobody knows is one too, where SGLang says success.

**How it works.** Four files, four concerns. tiny_scheduler.py decides what runs next, tiny_model.py computes one step
of a batch, tiny_protocol.py reads and writes the bodies, and here are the one thread that owns scheduler and model
(`Engine`) and the asyncio loop with the HTTP routes.
They meet in two places. The routes put closures on the engine's inbox, which it runs between two steps; the engine
tells all whose request ended or grew in a step with one wake-up of the loop. So the scheduler needs no lock, and a
token that many requests get at once costs one thread switch.

    POST /generate                     tokens for input_ids, one list or several; `stream` for server-sent events
    POST /abort_request                {"rid"}
    POST /pause_generation             {"mode": "abort" | "retract" | "in_place"}
    POST /continue_generation
    POST /update_weights_from_disk     {"model_path", "weight_version", "abort_all_requests"}
    POST /begin_weight_update .. /end_weight_update, and between the two any number of
         /update_weights_from_distributed    {"names", "dtypes", "shapes", "group_name"}, while rank 0 broadcasts
         /update_weights_from_tensor         {"serialized_named_tensors"}
    POST /init_weights_update_group    {"master_address", "master_port", "rank_offset", "world_size", "group_name"}
    POST /destroy_weights_update_group {"group_name"}
    POST /update_weight_version        {"new_version", "abort_all_requests"}
    GET  /server_info /model_info /health /ready

**Own choices.** A client that hangs up aborts its request (SGLang computes on for nobody). `sampling_seed` is always
honoured; with `--seed` a request's tokens and logprobs depend on it, the prompt and the weights only, not on what else
is in the batch (tiny_model.py, "Bits"; without, batches of one to three are faster and differ in the last bit).
An update without a pause waits for what runs, as in SGLang, and forgets the keys of old weights whatever
flush_cache says.

**What it does not promise.** Speed beyond model.generate's (bench/engine.py compares them), more than one request's
worth of patience with a client that never reads, authentication, text prompts, several samples of one prompt (`n`),
grammars, LoRA.
"""

import argparse
import asyncio
import contextlib
import os
import queue
import random
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from torch import Tensor
from transformers.utils import logging as transformers_logging

from plumbing.serve import listen, load_tokenizer, read_object, serve
from tiny_model import ModelError, TinyModel, read_weights, receive_weights, run_step, unpack_weights
from tiny_protocol import Protocol, Refused
from tiny_scheduler import Scheduler, Sequence
from weights import join_group

MODES = ("abort", "retract", "in_place")
SPEAKS = "0.5.23"  # the SGLang that tests/test_contract.py compares with
ROUTES = (
    *("generate", "abort_request", "pause_generation", "continue_generation"),
    *("update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor"),
    *("begin_weight_update", "end_weight_update", "init_weights_update_group", "destroy_weights_update_group"),
    *("update_weight_version", "server_info", "model_info", "health", "ready"),
)


# the engine's thread


def resolve(future: asyncio.Future, result: Any) -> None:
    """Set a future's result unless who waited for it is gone."""
    if not future.done():
        future.set_result(result)


class Engine:
    """The one thread that touches scheduler and model. The others put events on its inbox, run between two steps."""

    def __init__(self, model: TinyModel, scheduler: Scheduler) -> None:
        self.model = model
        self.scheduler = scheduler
        self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: stop
        self.loop: asyncio.AbstractEventLoop  # of the routes; there since start
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # called in the loop

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.thread.start()

    def stop(self) -> None:
        """Let the step under way end, then the thread."""
        self.inbox.put(None)
        self.thread.join(timeout=10)

    def submit(self, sequence: Sequence) -> None:
        self.inbox.put(lambda: self.scheduler.submit(sequence))

    def abort(self, sequences: list[Sequence]) -> None:
        self.inbox.put(lambda: self.scheduler.abort(sequences.__contains__))

    def call(self, function: Callable[[], Any]) -> asyncio.Future:
        """A future that is done when the engine has run `function`."""
        future = asyncio.get_running_loop().create_future()

        def run() -> None:
            function()
            self._tell(resolve, future, None)

        self.inbox.put(run)
        return future

    def update(
        self, read: Callable[[], dict[str, Tensor]], version: str | None, abort_all: bool, whole: bool
    ) -> asyncio.Future:
        """Take the weights that `read` returns, the `whole` model or a part, once nothing runs. The future's result:
        None, or why the old stay."""
        future = asyncio.get_running_loop().create_future()

        def load() -> str | None:
            problem = None
            try:
                self.model.replace_weights(read(), whole)
            except ModelError as error:
                problem = str(error)
            self._tell(resolve, future, problem)
            return None if problem else version or self.scheduler.version

        self.inbox.put(lambda: self.scheduler.request_update(load, abort_all))
        return future

    # the thread

    def _tell(self, function: Callable, *arguments: Any) -> None:
        self.loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        torch.set_num_threads(1)
        try:
            while self._serve():
                pass
        except BaseException:  # the supervisor: a bug here must end the process, not hang its clients
            traceback.print_exc()
            os._exit(1)

    def _serve(self) -> bool:
        """Take what came in, load new weights if they are due, take one step, tell who waits; wait when there is
        nothing to do. False when told to stop."""
        scheduler = self.scheduler
        idle = scheduler.paused is not None or not (scheduler.running or scheduler.waiting)
        while idle or not self.inbox.empty():
            event = self.inbox.get()
            if event is None:
                return False
            event()
            idle = False
        while scheduler.update_is_due():
            scheduler.updated(scheduler.updates[0]())
        stepped = run_step(scheduler, self.model)
        news, scheduler.finished = scheduler.finished, []
        if stepped:
            news += [seq for seq in scheduler.at_work() if seq.context.stream]
        if news:
            self._tell(lambda: [seq.context.news.set() for seq in news])
        return True


# the HTTP side


def reply(body: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def told(problem: Any, **fields: Any) -> Response:
    """How SGLang answers a change of the weights: success and a message."""
    done = {"success": not problem, "message": str(problem or "Succeeded."), **fields}
    return reply(done, 400 if problem else 200)


async def refuse(_: Request, refused: Exception) -> Response:
    """What the caller did wrong as a 400 with its message."""
    return reply({"error": {"message": str(refused), "type": "invalid_request_error"}}, 400)


class Server:
    """The routes. Everything that changes the scheduler goes through the engine's inbox."""

    def __init__(self, engine: Engine, protocol: Protocol, path: str) -> None:
        self.engine = engine
        self.scheduler = engine.scheduler
        self.protocol = protocol
        # All that changes:
        self.model_path = path  # of the weights at hand
        self.groups: dict[str, Any] = {}  # process groups that weights come through
        self.in_session = False  # between begin_weight_update and end_weight_update

    def app(self) -> FastAPI:
        @contextlib.asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            self.engine.start()
            yield
            self.engine.stop()

        app = FastAPI(lifespan=lifespan, openapi_url=None, exception_handlers={Refused: refuse})
        for name in ROUTES:
            app.add_route(f"/{name}", getattr(self, name), methods=["GET", "POST"])
        return app

    # generation

    async def generate(self, request: Request) -> Response:
        sequences, batch = self.protocol.parse(read_object(await request.body(), Refused))
        for seq in sequences:
            self.engine.submit(seq)
        if sequences[0].context.stream:
            return StreamingResponse(self.stream(sequences[0]), media_type="text/event-stream")
        ended: asyncio.Future = asyncio.gather(*(seq.context.news.wait() for seq in sequences))
        gone: asyncio.Future = asyncio.ensure_future(request.receive())  # after the body comes the hang-up only
        await asyncio.wait({ended, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            self.engine.abort(sequences)
            return Response(status_code=499)  # which nobody reads
        gone.cancel()
        answers = [self.protocol.answer(seq) for seq in sequences]
        return reply(answers if batch else answers[0])

    async def stream(self, seq: Sequence) -> AsyncIterator[bytes]:
        """Server-sent events, each with all tokens so far."""
        try:
            ended = False
            while not ended:
                await seq.context.news.wait()
                seq.context.news.clear()
                ended = seq.finish is not None
                yield b"data: " + orjson.dumps(self.protocol.answer(seq)) + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            self.engine.abort([seq])  # of no effect on one that ended

    # control

    async def abort_request(self, request: Request) -> Response:
        rid = read_object(await request.body(), Refused).get("rid")
        if not isinstance(rid, str):
            raise Refused('give {"rid": "..."}')
        await self.engine.call(lambda: self.scheduler.abort(lambda seq: seq.rid == rid))
        return Response()

    async def pause_generation(self, request: Request) -> Response:
        mode = read_object(await request.body(), Refused).get("mode", "abort")
        if mode not in MODES:
            raise Refused(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        await self.engine.call(lambda: self.scheduler.pause(mode))
        return reply({"message": f"Generation paused, mode {mode}.", "status": "ok"})

    async def continue_generation(self, _: Request) -> Response:
        await self.engine.call(self.scheduler.resume)
        return reply({"message": "Generation continued.", "status": "ok"})

    # new weights

    async def update_weights_from_disk(self, request: Request) -> Response:
        body = await self.body(request, model_path=str)
        path = body["model_path"]
        answer = await self.load(body, lambda: read_weights(path), whole=True)
        if answer.status_code == 200:
            self.model_path = path
        return answer

    async def update_weights_from_distributed(self, request: Request) -> Response:
        body = await self.body(request, group_name=str, names=list, dtypes=list, shapes=list)
        group = self.groups.get(body["group_name"])
        described = [body[key] for key in ("names", "dtypes", "shapes")]
        return await self.load(body, lambda: receive_weights(group, *described))

    async def update_weights_from_tensor(self, request: Request) -> Response:
        body = await self.body(request, serialized_named_tensors=list)
        return await self.load(body, lambda: unpack_weights(body["serialized_named_tensors"]))

    async def load(self, body: dict[str, Any], read: Callable[[], dict[str, Tensor]], whole: bool = False) -> Response:
        """Have the engine take what `read` returns; a part only inside a session."""
        version, abort_all = body.get("weight_version"), bool(body.get("abort_all_requests"))
        if not isinstance(version, str | None):
            raise Refused("weight_version must be a string")
        problem = "weights in parts come between begin_weight_update and end_weight_update"
        if whole or self.in_session:
            problem = await self.engine.update(read, version, abort_all, whole)
        return told(problem and f"The old weights stay: {problem}", num_paused_requests=0)

    async def begin_weight_update(self, _: Request) -> Response:
        problem, self.in_session = self.in_session and "a weight-update session is already open", True
        return told(problem)

    async def end_weight_update(self, _: Request) -> Response:
        problem, self.in_session = not self.in_session and "no weight-update session is open", False
        return told(problem)

    async def init_weights_update_group(self, request: Request) -> Response:
        kinds = {"master_address": str, "master_port": int, "rank_offset": int, "world_size": int, "group_name": str}
        body = await self.body(request, **kinds)
        address, port, rank, world, name = (body[key] for key in kinds)
        try:
            self.groups[name] = await asyncio.to_thread(join_group, address, port, rank, world, name, "gloo")
        except (RuntimeError, ValueError) as error:
            return told(f"no group came together: {error}")
        return told(None)

    async def destroy_weights_update_group(self, request: Request) -> Response:
        body = await self.body(request, group_name=str)
        return told(self.groups.pop(body["group_name"], None) is None and "there is no such group")

    async def update_weight_version(self, request: Request) -> Response:
        body = await self.body(request, new_version=str)
        if body.get("abort_all_requests", True):
            await self.engine.call(self.scheduler.abort)
        await self.engine.call(lambda: self.scheduler.relabel(body["new_version"]))
        return told(None, new_version=body["new_version"])

    async def body(self, request: Request, **kinds: type) -> dict[str, Any]:
        """The request's body; Refused where a field is missing or of another kind."""
        body = read_object(await request.body(), Refused)
        for name, kind in kinds.items():
            if not isinstance(body.get(name), kind):
                raise Refused(f"{name} must be given, as {kind.__name__}")
        return body

    # questions

    async def server_info(self, _: Request) -> Response:
        """What of SGLang's /server_info its clients need, beside it what tests look at and the benchmark needs."""
        version, longest = self.scheduler.version, self.protocol.max_length
        known = {"model_path": self.model_path, "is_generation": True, "weight_version": version}
        shape = {"version": SPEAKS, "device": "cpu", "tp_size": 1, "max_req_input_len": longest}
        return reply({**known, **shape, "state": repr(self.scheduler), "cpu_seconds": time.process_time()})

    model_info = server_info

    async def health(self, _: Request) -> Response:
        return Response()

    async def ready(self, _: Request) -> Response:
        return Response(status_code=503 if self.scheduler.paused else 200)


# the process


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small inference server with SGLang's HTTP protocol.")
    add = parser.add_argument
    add("--model-path", required=True, help="a Hugging Face directory, with a tokenizer")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=30000, help="port to listen on")
    add("--weight-version", default="0", help="the version of the weights at start")
    add("--max-running-requests", type=int, default=64, help="sequences decoded together")
    add("--max-total-tokens", type=int, default=65536, help="tokens of all running sequences")
    add("--seed", type=int, help="for requests without sampling_seed; makes runs repeat bit by bit")
    add("--exit-with-parent", action="store_true", help="end when standard input is closed")
    args = parser.parse_args(argv)
    if min(args.max_running_requests, args.max_total_tokens) < 1:
        parser.error("--max-running-requests and --max-total-tokens must be at least 1")
    return args


def main(argv: list[str] | None = None) -> int:
    """Returns 2, after one line on stderr, if it cannot start."""
    args = parse_args(argv)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        listener = listen(args.host, args.port)
        model = TinyModel.load(args.model_path, args.max_running_requests, deterministic=args.seed is not None)
        tokenizer = load_tokenizer(args.model_path)
    except (OSError, ValueError) as problem:
        print("error:", " ".join(str(problem).split())[:300], file=sys.stderr)
        return 2
    scheduler = Scheduler(args.max_running_requests, args.max_total_tokens, args.weight_version, tokenizer.decode)
    max_length = min(model.context_length, args.max_total_tokens)
    eos = model.eos | {tokenizer.eos_token_id}
    protocol = Protocol(model.vocab_size, max_length, eos, tokenizer.decode, random.Random(args.seed))
    app = Server(Engine(model, scheduler), protocol, args.model_path).app()
    serve(app, listener, args.exit_with_parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
