"""An inference server on torch that speaks SGLang's HTTP protocol: what a laptop has in SGLang's place.

    python -m inference.tiny.server --model-path DIR --port 30000

**The rule.** To its client this server is SGLang: the same routes, bodies, finish reasons, version spans and pause
modes, so engine.py has no branch for a CPU and one contract test runs against both. Where SGLang has a lethal bug it
is not copied: an id outside the vocabulary and a tensor of another shape are a 400, not the end of the server; a tensor
whose name nobody knows is one too, where SGLang says success.

**How it works.** Four files, four concerns. inference/tiny/scheduler.py decides what runs next,
inference/tiny/model.py computes one step of a batch, inference/tiny/protocol.py reads and writes the bodies, and here
are the one thread that owns scheduler and model (`Engine`) and the asyncio loop with the HTTP routes.
They meet in two places. What a route wants of the scheduler goes into the queue of the engine's thread, where each step
queues the next; after a step the engine tells those whose request ended or, streaming, grew. So the scheduler needs no
lock, and steps that end nothing do not wake the loop.

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

**Own choices.** `sampling_seed` is always honoured; with `--seed` a request's tokens and logprobs depend on it, the
prompt and the weights only, not on what else is in the batch (inference/tiny/model.py, "Bits"; without, batches of one
to three are faster and differ in the last bit).
As with SGLang, a client that hangs up does not end its request: send /abort_request.
An update without a pause waits for what runs, as in SGLang, and forgets the keys of old weights whatever
flush_cache says.

**What it does not promise.** Speed beyond model.generate's (bench/engine.py compares them), more than one request's
worth of patience with a client that never reads, authentication, text prompts, several samples of one prompt (`n`),
grammars, LoRA. A mixture of experts is served, but refuses an update, which has its files' names: transformers holds
the experts fused.
"""

import argparse
import asyncio
import contextlib
import inspect
import os
import random
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
import torch
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from torch import Tensor
from transformers.utils import logging as transformers_logging

from inference.group import join_group
from inference.tiny.model import TinyModel, read_weights, receive_weights, run_step, unpack_weights
from inference.tiny.protocol import Protocol
from inference.tiny.scheduler import Scheduler, Sequence
from run.fields import Refusal, get
from run.serve import listen, load_tokenizer, read_object, reply, serve

MODES = ("abort", "retract", "in_place")
SPEAKS = "0.5.23"  # the SGLang that tests/inference/test_contract.py compares with

# the engine's thread


@contextlib.contextmanager
def supervised() -> Iterator[None]:
    """A bug in the engine's thread must end the process, not hang its clients."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def tell(sequences: list[Sequence]) -> None:
    """Those who wait for them, in the loop."""
    for seq in sequences:
        seq.changed.set()


class Engine:
    """The one thread that touches scheduler and model: an executor's only worker. Its queue holds what the routes want
    to happen between two steps, and while there is something to do the next step."""

    def __init__(self, model: TinyModel, scheduler: Scheduler) -> None:
        self.model = model
        self.scheduler = scheduler
        self.thread = ThreadPoolExecutor(1, "engine", initializer=torch.set_num_threads, initargs=(1,))
        # All that changes:
        self.stepping = False  # a step is in the queue
        self.loop: asyncio.AbstractEventLoop  # of the routes; there since they serve

    # called in the loop

    def call(self, function: Callable[..., None], *arguments: Any) -> asyncio.Future:
        """Have the thread call `function` between two steps; a future that is done when it has."""
        return self.loop.run_in_executor(self.thread, self._event, function, *arguments)

    async def update(self, read: Callable[[], dict[str, Tensor]], version: str | None, whole: bool) -> str | None:
        """Take the weights that `read` returns, the `whole` model or a part, once nothing runs. None, or why the old
        stay."""
        answer = self.loop.create_future()

        def load() -> None:
            problem = None
            try:
                self.model.replace_weights(read(), whole)
            except Exception as error:  # what a broken file, pickle or peer raises is anything; nothing was copied
                problem = f"The old weights stay: {type(error).__name__}: {error}"
            else:
                self.scheduler.renew(version)
            self.loop.call_soon_threadsafe(answer.set_result, problem)

        self.call(self.scheduler.request_update, load)
        return await answer

    # in the thread

    @supervised()
    def _event(self, function: Callable[..., None], *arguments: Any) -> None:
        function(*arguments)
        if not self.stepping:
            self.stepping = True
            self.thread.submit(self._step)

    @supervised()
    def _step(self) -> None:
        """Take one step, tell who waits, and queue the next step behind what came in meanwhile."""
        self.stepping = run_step(self.scheduler, self.model)
        news, self.scheduler.finished = self.scheduler.finished, []
        if self.stepping:
            news += [seq for seq in self.scheduler.running if seq.request.stream]
            self.thread.submit(self._step)
        if news:
            self.loop.call_soon_threadsafe(tell, news)


# the HTTP side


def told(problem: str | None) -> Response:
    """How SGLang answers a change of the weights: success and a message."""
    return reply({"success": not problem, "message": problem or "Succeeded."}, 400 if problem else 200)


async def refuse(_: Request, refused: Exception) -> Response:
    """What the caller did wrong as a 400 with its message."""
    return reply({"error": {"message": str(refused), "type": "invalid_request_error"}}, 400)


class Server:
    """Each public coroutine is the route of its name. What changes the scheduler goes through the engine's thread."""

    def __init__(self, engine: Engine, protocol: Protocol, model_path: str) -> None:
        self.engine = engine
        self.scheduler = engine.scheduler
        self.protocol = protocol
        self.model_path = model_path  # where the first weights and the tokenizer came from
        # All that changes:
        self.groups: dict[str, Any] = {}  # process groups that weights come through
        self.in_session = False  # between begin_weight_update and end_weight_update

    def app(self) -> FastAPI:
        @contextlib.asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            self.engine.loop = asyncio.get_running_loop()
            yield
            self.engine.call(self.scheduler.updates.clear)  # none becomes due by the pause
            ended = self.engine.call(self.scheduler.pause, "in_place")  # no next step: the process can end
            if (await asyncio.wait({ended}, timeout=10))[1]:
                os._exit(1)  # the thread waits for a broadcast that does not come

        app = FastAPI(lifespan=lifespan, openapi_url=None, exception_handlers={Refusal: refuse})
        for name, route in inspect.getmembers(self, inspect.iscoroutinefunction):
            if not name.startswith("_"):
                app.add_route(f"/{name}", route, methods=["GET", "POST"])
        return app

    async def _body(self, request: Request, **kinds: type) -> dict[str, Any]:
        """The request's body; Refusal where a field is missing or of another kind."""
        body = read_object(await request.body())
        for name, kind in kinds.items():
            if not isinstance(body.get(name), kind):
                raise Refusal(f"{name} must be given, as {kind.__name__}")
        return body

    # generation

    async def generate(self, request: Request) -> Response:
        sequences, batch = self.protocol.parse(await self._body(request))
        for seq in sequences:
            self.engine.call(self.scheduler.submit, seq)
        if sequences[0].request.stream:
            return StreamingResponse(self._stream(sequences[0]), media_type="text/event-stream")
        for seq in sequences:
            await seq.changed.wait()
        answers = [self.protocol.answer(seq) for seq in sequences]
        return reply(answers if batch else answers[0])

    async def _stream(self, seq: Sequence) -> AsyncIterator[bytes]:
        """Server-sent events, each with all tokens so far."""
        ended = False
        while not ended:
            await seq.changed.wait()
            seq.changed.clear()
            answer = self.protocol.answer(seq)
            ended = answer["meta_info"]["finish_reason"] is not None
            yield b"data: " + orjson.dumps(answer) + b"\n\n"
        yield b"data: [DONE]\n\n"

    # control

    async def abort_request(self, request: Request) -> Response:
        rid = (await self._body(request, rid=str))["rid"]
        await self.engine.call(self.scheduler.abort, lambda seq: seq.request.rid == rid)
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

    # new weights

    async def update_weights_from_disk(self, request: Request) -> Response:
        body = await self._body(request, model_path=str)
        return await self._load(body, lambda: read_weights(body["model_path"]), whole=True)

    async def update_weights_from_distributed(self, request: Request) -> Response:
        body = await self._body(request, group_name=str, names=list, dtypes=list, shapes=list)
        group = self.groups.get(body["group_name"])
        return await self._load(body, lambda: receive_weights(group, body["names"], body["dtypes"], body["shapes"]))

    async def update_weights_from_tensor(self, request: Request) -> Response:
        body = await self._body(request, serialized_named_tensors=list)
        return await self._load(body, lambda: unpack_weights(body["serialized_named_tensors"]))

    async def _load(self, body: dict[str, Any], read: Callable[[], dict[str, Tensor]], whole: bool = False) -> Response:
        """Have the engine take what `read` returns; a part only inside a session."""
        version = get(body, "weight_version", str)
        if not (whole or self.in_session):
            return told("weights in parts come between begin_weight_update and end_weight_update")
        if body.get("abort_all_requests"):
            self.engine.call(self.scheduler.abort)
        return told(await self.engine.update(read, version, whole))

    async def begin_weight_update(self, _: Request) -> Response:
        was_open, self.in_session = self.in_session, True
        return told("a weight-update session is already open" if was_open else None)

    async def end_weight_update(self, _: Request) -> Response:
        was_open, self.in_session = self.in_session, False
        return told(None if was_open else "no weight-update session is open")

    async def init_weights_update_group(self, request: Request) -> Response:
        kinds = {"master_address": str, "master_port": int, "rank_offset": int, "world_size": int, "group_name": str}
        body = await self._body(request, **kinds)
        address, port, rank, world, name = (body[key] for key in kinds)
        try:
            self.groups[name] = await asyncio.to_thread(join_group, address, port, rank, world, name, "gloo")
        except asyncio.CancelledError:
            os._exit(1)  # the server ends, and would wait for the thread, which waits for a group that does not come
        except Exception as error:  # what the binding raises for a bad number, or the other side, is anything
            return told(f"no group came together: {error}")
        return told(None)

    async def destroy_weights_update_group(self, request: Request) -> Response:
        body = await self._body(request, group_name=str)
        return told(None if self.groups.pop(body["group_name"], None) else "there is no such group")

    async def update_weight_version(self, request: Request) -> Response:
        body = await self._body(request, new_version=str)
        if body.get("abort_all_requests", True):
            self.engine.call(self.scheduler.abort)
        await self.engine.call(self.scheduler.relabel, body["new_version"])
        return told(None)

    # questions

    async def server_info(self, _: Request) -> Response:
        """What of SGLang's /server_info its clients need, beside it what tests look at and the benchmark needs."""
        known = {"model_path": self.model_path, "max_req_input_len": self.protocol.max_length}
        known |= {"weight_version": self.scheduler.version, "version": SPEAKS, "device": "cpu", "tp_size": 1}
        return reply({**known, "state": repr(self.scheduler), "cpu_seconds": time.process_time()})

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
        model = TinyModel(args.model_path, args.max_running_requests, deterministic=args.seed is not None)
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
