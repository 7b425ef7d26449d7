"""A small inference server that speaks SGLang's protocol, so that a client can use either.

    python -m inference.tiny.server --model-path DIR --port 30000

Everything happens in one thread: the routes and the steps take turns in the asyncio loop. A route
reads or changes the scheduler between two steps, so nothing needs a lock, and a small model's steps
do not fight the routes for Python's global lock. The price: /health and /abort_request wait for the
step that runs, at most 1,024 tokens of prompts or a token for each sequence. Only the reading of
new weights has a thread of its own.

A route ignores the fields of a body that it does not know, as SGLang does. But an unknown sampling
parameter is refused: without it the tokens would have another distribution. So is a request that
the server could not complete, before it is queued.

A request's tokens and logprobs depend on its seed, its prompt and the weights alone. New weights
are loaded between two steps; whoever wants the running sequences to drop their old keys pauses
first. A client that hangs up does not end its request: that takes /abort_request. Not here:
streams, texts, several prompts in one request, logprobs of prompts, grammars, LoRA, mixtures
of experts, and weights by a process group.
"""

import argparse
import asyncio
import os
import random
import secrets
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from safetensors import SafetensorError
from tokenizers import Tokenizer

from inference.fields import Refusal
from inference.serve import check_key, listen, reply, serve
from inference.tiny.model import Model, read_weights
from inference.tiny.scheduler import SamplingParams, Scheduler, Sequence


class Generate(BaseModel, strict=True):
    """The body of POST /generate."""

    input_ids: list[int] = Field(min_length=1)
    sampling_params: SamplingParams = Field(default_factory=SamplingParams)
    rid: str = Field(default_factory=lambda: secrets.token_hex(16))
    stream: Literal[False] = False


class Abort(BaseModel):
    rid: str


class Pause(BaseModel):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class Load(BaseModel):
    model_path: str
    weight_version: str = ""  # empty: it stays


class Label(BaseModel):
    new_version: str
    abort_all_requests: bool = True


async def refuse(_: Request, error: Any) -> Response:
    """Answer 400, or 401 and 403 for a missing or wrong key."""
    message = str(error)
    if isinstance(error, RequestValidationError):
        message = "; ".join(f"{one['loc'][-1]}: {one['msg']}" for one in error.errors())
    return reply({"error": {"message": message}}, getattr(error, "status", 400))


def create_app(scheduler: Scheduler, folder: str, key: str = "") -> FastAPI:
    """The web application. Everybody may ask for /health, and only who has the key for the rest."""
    model, stepping = scheduler.model, None
    max_length = min(model.context_length, scheduler.max_total_tokens)

    async def check(request: Request) -> None:
        if key and request.url.path != "/health":
            check_key(request, key)

    handlers: Any = {Refusal: refuse, RequestValidationError: refuse}
    app = FastAPI(openapi_url=None, exception_handlers=handlers, dependencies=[Depends(check)])

    def wake() -> None:
        """Let steps be computed, if none are."""
        nonlocal stepping
        if stepping is None or stepping.done():
            stepping = asyncio.create_task(compute())

    async def compute() -> None:
        """Compute steps until there is nothing to compute."""
        try:
            while scheduler.step():
                for _ in range(3):  # a request takes three turns of the loop: read, run, answer
                    await asyncio.sleep(0)
        except Exception:  # without steps, all clients would wait forever
            traceback.print_exc()
            os._exit(1)

    # Generation

    @app.post("/generate")
    async def generate(ask: Generate) -> Response:
        prompt, vocab = ask.input_ids, model.vocab_size
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise Refusal(f"input_ids: token ids are integers from 0 to {vocab - 1}")
        one = Sequence(ask.rid, prompt, ask.sampling_params)
        if one.most > max_length:
            limit = f"{max_length}, the context length or --max-total-tokens"
            raise Refusal(f"prompt and max_new_tokens make {one.most} tokens, more than {limit}")
        scheduler.waiting.append(one)
        wake()
        await one.ended.wait()
        meta = {
            "id": one.rid,
            "finish_reason": one.finish,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(one.output),
            "cached_tokens": one.reused,
            "num_retractions": one.retractions,
            "weight_version": (one.versions or [scheduler.version])[-1],
            "weight_versions": one.spans(),
            "output_token_logprobs": [[*pair, None] for pair in zip(one.logprobs, one.output)],
        }
        return reply({"output_ids": one.output, "meta_info": meta})  # a stop token stays in them

    @app.post("/abort_request")
    async def abort(ask: Abort) -> Response:
        scheduler.abort(ask.rid)
        return Response()

    @app.post("/pause_generation")
    async def pause(ask: Pause) -> Response:
        scheduler.pause(ask.mode)
        return reply({"status": "ok"})

    @app.post("/continue_generation")
    async def resume() -> Response:
        scheduler.paused = False
        wake()
        return reply({"status": "ok"})

    # New weights

    @app.post("/update_weights_from_disk")
    async def load(ask: Load) -> Response:
        try:
            model.replace_weights(await asyncio.to_thread(read_weights, ask.model_path))
        except (OSError, ValueError, SafetensorError) as error:
            return reply({"success": False, "message": f"The old weights stay: {error}"}, 400)
        scheduler.renew(ask.weight_version)
        return reply({"success": True})

    @app.post("/update_weight_version")
    async def label(ask: Label) -> Response:
        if ask.abort_all_requests:
            scheduler.abort()
        scheduler.version = ask.new_version
        return reply({"success": True})

    # What the server tells about itself

    @app.get("/server_info")
    @app.get("/model_info")
    async def info() -> Response:
        told = {
            "model_path": folder,
            "max_req_input_len": max_length,
            "weight_version": scheduler.version,
            "state": repr(scheduler),
            "cpu_seconds": time.process_time(),
        }
        return reply(told)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    return app


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small server with SGLang's HTTP protocol.")
    add, key = parser.add_argument, os.getenv("POCKET_AREAL_SERVER_KEY", "")
    add("--model-path", required=True, help="a Hugging Face folder with model and tokenizer")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=30000, help="port to listen on")
    add("--api-key", default=key)
    add("--weight-version", default="0", help="version of the weights at start")
    add("--max-running-requests", type=int, default=64, help="most sequences at the same time")
    add("--max-total-tokens", type=int, default=65536, help="most tokens of these together")
    add("--seed", type=int, help="of the requests that have none")
    add("--exit-with-parent", action="store_true", help="end when the parent process ends")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal. Prints one line and returns 2 if the server cannot start."""
    args = parse_args(argv)
    torch.set_num_threads(1)
    random.seed(args.seed)  # gives a seed to each request that has none
    try:
        listener = listen(args.host, args.port, args.api_key)
        model = Model(args.model_path, args.max_running_requests)
        # Without transformers, which takes a second to import.
        tokenizer = Tokenizer.from_buffer(Path(args.model_path, "tokenizer.json").read_bytes())
    except (OSError, ValueError, KeyError, SafetensorError) as problem:
        print("error:", " ".join(str(problem).split())[:300], file=sys.stderr)
        return 2
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    scheduler = Scheduler(model, args.max_total_tokens, args.weight_version, decode)
    app = create_app(scheduler, args.model_path, args.api_key)
    serve(app, listener, args.exit_with_parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
