"""A small inference server that speaks SGLang's protocol, so that a client can use either.

    python -m inference.tiny.server --model-path DIR --port 30000

Everything happens in one thread: the routes and the steps take turns in the asyncio loop. A route
reads or changes the scheduler between two steps, so nothing needs a lock, and a small model's steps
do not fight the routes for Python's global lock. The price: /health and /abort_request wait for the
step that runs, at most 1,024 tokens of prompts or a token for each sequence. Only what waits for
another process, a broadcast of weights, has a thread of its own.

A route's body is a JSON object, whose unknown fields are ignored, as in SGLang. But an unknown
sampling parameter is refused: without it the tokens would have another distribution. A request that
the server could not complete is refused before it is queued.

With --seed, a request's tokens and logprobs depend on its seed, its prompt and the weights alone.
An update of the weights without a pause waits for the running sequences. A client that hangs up
does not end its request: that takes /abort_request. Not here: streams, text prompts, n > 1,
grammars, LoRA, mixtures of experts.
"""

import argparse
import asyncio
import inspect
import os
import random
import secrets
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError
from starlette.requests import ClientDisconnect
from tokenizers import Tokenizer

from inference.fields import Refusal
from inference.serve import check_key, listen, read_object, read_secret, reply, serve
from inference.tiny.model import Model, read_weights, receive_weights
from inference.tiny.scheduler import SamplingParams, Scheduler, Sequence

SPEAKS = "0.5.23"  # the SGLang that tests/inference/test_contract.py compares this server with

Body = dict[str, Any]  # of a request; fields that are null count as missing


class Generate(BaseModel, strict=True):
    """The body of POST /generate. In it, a single prompt may stand without its list."""

    input_ids: list[Annotated[list[int], Field(min_length=1)]] = Field(min_length=1)
    sampling_params: dict[str, Any] = {}
    rid: str = ""
    return_logprob: bool = False
    logprob_start_len: Literal[-1, 0] = -1  # 0: logprobs of the prompts, too
    stream: Literal[False] = False
    text: None = None


def present(body: Body) -> Body:
    """The fields that are not null."""
    return {name: value for name, value in body.items() if value is not None}


def outcome(problem: str = "") -> Response:
    """SGLang's answer to an update of the weights."""
    status = 400 if problem else 200
    return reply({"success": not problem, "message": problem or "Succeeded."}, status)


async def refuse(_: Request, error: Exception) -> Response:
    """Answer 400, or 401 and 403 for a missing or wrong key."""
    message = str(error)
    if isinstance(error, KeyError):
        message = f"{message} is missing or unknown"
    elif isinstance(error, ValidationError):
        message = "; ".join(f"{one['loc'][0]}: {one['msg']}" for one in error.errors())
    return reply({"error": {"message": message}}, getattr(error, "status", 400))


class Server:
    """The routes. Each public coroutine serves the path of its name, with GET or POST."""

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        folder: str,
        key: str = "",
        seed: int | None = None,
    ) -> None:
        self.scheduler, self.model = scheduler, scheduler.model
        self.tokenizer, self.folder, self.key = tokenizer, folder, key
        self.seeds = random.Random(seed)  # gives a seed to each prompt that has none
        self.max_length = min(self.model.context_length, scheduler.max_total_tokens)
        self.stepping: asyncio.Task | None = None
        self.groups: dict[str, Any] = {}  # process groups that receive weights
        self.in_session = False  # between begin_weight_update and end_weight_update

    def app(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            yield
            os._exit(0)  # do not wait for a broadcast that may never come

        known: Any = (Refusal, KeyError, ValidationError, ClientDisconnect)
        handlers: Any = dict.fromkeys(known, refuse)
        app = FastAPI(lifespan=lifespan, openapi_url=None, exception_handlers=handlers)
        for name, route in inspect.getmembers(self, inspect.iscoroutinefunction):
            if not name.startswith("_"):
                app.add_route(f"/{name}", partial(self._serve, route), methods=["GET", "POST"])
        return app

    async def _serve(self, route: Callable[[Body], Any], request: Request) -> Response:
        if self.key and request.url.path not in ("/health", "/ready"):
            check_key(request, self.key)
        result = await route(present(read_object(await request.body())))
        return result if isinstance(result, Response) else reply(result)

    def _wake(self) -> None:
        """Let steps be computed, if none are."""
        if self.stepping is None or self.stepping.done():
            self.stepping = asyncio.create_task(self._step())

    async def _step(self) -> None:
        """Compute steps until there is nothing to compute."""
        try:
            while self.scheduler.step():
                for _ in range(3):  # a request takes three turns of the loop: read, run, answer
                    await asyncio.sleep(0)
        except Exception:  # without steps, all clients would wait forever
            traceback.print_exc()
            os._exit(1)

    # Generation

    async def generate(self, body: Body) -> Any:
        ids = body.get("input_ids")
        batch = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
        ask = Generate.model_validate(body | {"input_ids": ids if batch else [ids]})
        given = present(ask.sampling_params)
        if isinstance(given.get("stop"), str):
            given["stop"] = [given["stop"]]
        rid = ask.rid or secrets.token_hex(16)
        sequences = []
        for i, prompt in enumerate(ask.input_ids):
            seed = {"sampling_seed": self.seeds.getrandbits(64)}
            params = SamplingParams.model_validate(seed | given)
            self._check(prompt, params.max_new_tokens)
            ends = self.model.eos.union(params.stop_token_ids)
            stop_ids = frozenset() if params.ignore_eos else ends
            scored = ask.return_logprob and ask.logprob_start_len == 0
            one = Sequence(f"{rid}_{i}" if batch else rid, prompt, params, stop_ids, scored)
            sequences.append(one)
        self.scheduler.waiting += sequences
        self._wake()
        for one in sequences:
            await one.ended.wait()
        answers = [self._answer(one, ask.return_logprob) for one in sequences]
        return answers if batch else answers[0]

    def _check(self, prompt: list[int], new: int) -> None:
        vocab = self.model.vocab_size
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise Refusal(f"input_ids: token ids are integers from 0 to {vocab - 1}")
        if (total := len(prompt) + new) > self.max_length:
            limit = f"{self.max_length}, the context length or --max-total-tokens"
            raise Refusal(f"prompt and max_new_tokens make {total} tokens, more than {limit}")

    def _answer(self, one: Sequence, return_logprob: bool) -> dict[str, Any]:
        """As in SGLang, a stop token stays in output_ids, and `text` ends before the stop."""
        ids, matched = one.output, (one.finish or {}).get("matched")
        meta: dict[str, Any] = {
            "id": one.rid,
            "finish_reason": one.finish,
            "prompt_tokens": len(one.prompt),
            "completion_tokens": len(ids),
            "cached_tokens": one.reused,
            "num_retractions": one.retractions,
            "weight_version": (one.versions or [self.scheduler.version])[-1],
            "weight_versions": one.spans(),
        }
        if return_logprob:
            output, prompt = zip(one.logprobs, ids), zip(one.prompt_logprobs, one.prompt)
            meta["output_token_logprobs"] = [[*pair, None] for pair in output]
            meta["input_token_logprobs"] = [[*pair, None] for pair in prompt]
        text = self.tokenizer.decode(ids[:-1] if isinstance(matched, int) else ids)
        if isinstance(matched, str):
            text = text.partition(matched)[0]
        return {"text": text, "output_ids": ids, "meta_info": meta}

    async def abort_request(self, body: Body) -> Any:
        self.scheduler.abort(str(body["rid"]))
        return Response()

    async def pause_generation(self, body: Body) -> Any:
        mode = body.get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise Refusal("mode: abort, retract or in_place is needed")
        self.scheduler.pause(mode)
        return {"message": f"Generation paused, mode {mode}.", "status": "ok"}

    async def continue_generation(self, _: Body) -> Any:
        self.scheduler.paused = False
        self._wake()
        return {"message": "Generation continued.", "status": "ok"}

    # New weights

    async def update_weights_from_disk(self, body: Body) -> Any:
        return await self._load(body, partial(read_weights, body["model_path"]), whole=True)

    async def update_weights_from_distributed(self, body: Body) -> Any:
        if not self.in_session:
            return outcome("this must come between begin_weight_update and end_weight_update")
        what = self.groups[body["group_name"]], body["names"], body["dtypes"], body["shapes"]
        return await self._load(body, partial(receive_weights, *what), whole=False)

    async def _load(
        self, body: Body, read: Callable[[], dict[str, torch.Tensor]], whole: bool
    ) -> Response:
        """Load the weights that `read` returns, when no sequence runs or generation is paused."""
        if body.get("abort_all_requests"):
            self.scheduler.abort()
        self.scheduler.updates += 1  # from now on, no sequence starts
        try:
            while self.scheduler.running and not self.scheduler.paused:
                await asyncio.sleep(0)
            self.model.replace_weights(await asyncio.to_thread(read), whole)
            self.scheduler.renew(str(body.get("weight_version", "")))
        except Exception as error:  # whatever a file or a broken connection raises
            return outcome(f"The old weights stay: {type(error).__name__}: {error}")
        finally:
            self.scheduler.updates -= 1
            self._wake()
        return outcome()

    async def begin_weight_update(self, _: Body) -> Any:
        was, self.in_session = self.in_session, True
        return outcome("a weight-update session is already open" if was else "")

    async def end_weight_update(self, _: Body) -> Any:
        was, self.in_session = self.in_session, False
        return outcome("" if was else "no weight-update session is open")

    async def init_weights_update_group(self, body: Body) -> Any:
        from inference.weights import join_group  # only this mode needs it

        fields = ("master_address", "master_port", "rank_offset", "world_size", "group_name")
        where = [*(body[field] for field in fields), "gloo"]
        try:
            join = partial(join_group, *where)
            self.groups[body["group_name"]] = await asyncio.to_thread(join)
        except Exception as error:  # whatever torch raises for a bad port or a missing peer
            return outcome(f"the process group was not formed: {error}")
        return outcome()

    async def destroy_weights_update_group(self, body: Body) -> Any:
        known = self.groups.pop(body["group_name"], None)
        return outcome("" if known else "there is no process group of this name")

    async def update_weight_version(self, body: Body) -> Any:
        version = str(body["new_version"])
        if body.get("abort_all_requests", True):
            self.scheduler.abort()
        self.scheduler.version = version
        return outcome()

    # What the server tells about itself

    async def server_info(self, _: Body) -> Any:
        return {
            "model_path": self.folder,
            "max_req_input_len": self.max_length,
            "weight_version": self.scheduler.version,
            "version": SPEAKS,
            "device": "cpu",
            "tp_size": 1,
            "state": repr(self.scheduler),
            "cpu_seconds": time.process_time(),
        }

    model_info = server_info

    async def health(self, _: Body) -> Any:
        return Response()

    async def ready(self, _: Body) -> Any:
        return Response(status_code=503 if self.scheduler.paused else 200)


def read_tokenizer(folder: str) -> Tokenizer:
    """The tokenizer of a folder, without transformers, which takes a second to import."""
    file = Path(folder, "tokenizer.json")
    if not file.is_file():
        raise ValueError(f"no tokenizer.json in {folder}")
    return Tokenizer.from_file(str(file))


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small server with SGLang's HTTP protocol.")
    add, key = parser.add_argument, os.getenv("POCKET_AREAL_SERVER_KEY", "")
    add("--model-path", required=True, help="a Hugging Face folder with model and tokenizer")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=30000, help="port to listen on")
    add("--api-key", type=read_secret, default=key, help="-: read it from stdin")
    add("--weight-version", default="0", help="version of the weights at start")
    add("--max-running-requests", type=int, default=64, help="most sequences at the same time")
    add("--max-total-tokens", type=int, default=65536, help="most tokens of these together")
    add("--seed", type=int, help="makes two runs equal bit by bit")
    add("--exit-with-parent", action="store_true", help="end when the parent process ends")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal. Prints one line and returns 2 if the server cannot start."""
    args = parse_args(argv)
    torch.set_num_threads(1)
    try:
        listener = listen(args.host, args.port, args.api_key)
        model = Model(args.model_path, args.max_running_requests, args.seed is not None)
        tokenizer = read_tokenizer(args.model_path)
    except (OSError, ValueError, KeyError, SafetensorError) as problem:
        print("error:", " ".join(str(problem).split())[:300], file=sys.stderr)
        return 2
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    scheduler = Scheduler(model, args.max_total_tokens, args.weight_version, decode)
    server = Server(scheduler, tokenizer, args.model_path, args.api_key, args.seed)
    serve(server.app(), listener, args.exit_with_parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
