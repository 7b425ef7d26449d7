"""A small inference server with SGLang's protocol.

    python -m inference.tiny.server --model-path DIR --port 30000

Everything except reading new weights happens in one thread, where the routes and the steps take
turns in the asyncio loop. So routes and steps do not compete for Python's global lock, and the
scheduler needs no lock. But every route, even /abort_request, waits for the running step. A step
feeds at most 512 prompt tokens (2,048 on a GPU), or one token per sequence.

A route ignores unknown fields of a body, as SGLang does. But the server refuses an unknown sampling
parameter, because ignoring it would change the tokens' distribution.

In float32 on one CPU thread, a request's tokens and logprobs depend only on its prompt, its
sampling_params and the weights. In bfloat16 or on a GPU, other requests may change the rounding,
and thereby the tokens. New weights replace the old ones between two steps, and unfinished requests
continue with the new weights. A request continues even when its client hangs up, unless
/abort_request ends it. Not supported: streaming, prompts as text, several prompts in one request,
logprobs of prompts, grammars, LoRA, mixtures of experts, the pause mode in_place, and new weights
through a process group.
"""

import argparse
import asyncio
import os
import random
import traceback
from functools import partial
from typing import Any, Literal

import torch
from fastapi import Body, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

from inference.fields import Refusal
from inference.serve import check_key, listen, reply, serve
from inference.tiny.model import Model, read_weights
from inference.tiny.sampling import SamplingParams, Sequence
from inference.tiny.scheduler import Scheduler


class Generate(BaseModel, strict=True):
    """The body of POST /generate."""

    input_ids: list[int] = Field(min_length=1)
    sampling_params: SamplingParams = Field(default_factory=SamplingParams)
    rid: str = ""
    stream: Literal[False] = False


async def refuse(_: Request, error: Any) -> Response:
    return reply({"error": {"message": str(error)}}, getattr(error, "status", 400))


def create_app(scheduler: Scheduler, key: str = "") -> FastAPI:
    model = scheduler.model
    stepping = None

    async def check(request: Request) -> None:
        if key and request.url.path != "/health":
            check_key(request, key)

    handlers: Any = {Refusal: refuse, RequestValidationError: refuse}
    app = FastAPI(openapi_url=None, exception_handlers=handlers, dependencies=[Depends(check)])

    def wake() -> None:
        nonlocal stepping
        if stepping is None or stepping.done():
            stepping = asyncio.create_task(compute())

    async def compute() -> None:
        try:
            while scheduler.step():
                for _ in range(3):  # a request takes three rounds of the loop: read, run, answer
                    await asyncio.sleep(0)
        except Exception:  # without steps, all clients would wait forever
            traceback.print_exc()
            os._exit(1)

    # Generation

    @app.post("/generate")
    async def generate(ask: Generate) -> Response:
        prompt, most = ask.input_ids, ask.sampling_params.max_new_tokens
        if not 0 <= min(prompt) <= max(prompt) < model.vocab_size:
            raise Refusal(f"input_ids: token ids are below {model.vocab_size}, and not negative")
        if len(prompt) + most > model.context_length:
            raise Refusal(f"prompt and output are more than {model.context_length} tokens")
        one = Sequence(ask.rid, prompt, ask.sampling_params)
        scheduler.add(one)
        wake()
        await one.ended.wait()
        meta = {
            "finish_reason": {"type": one.finish},
            "output_token_logprobs": [[*pair, None] for pair in zip(one.logprobs, one.output)],
            "weight_version": scheduler.version,
            "weight_versions": one.spans,
        }
        return reply({"output_ids": one.output, "meta_info": meta})  # including a stop token

    @app.post("/abort_request")
    async def abort(rid: str = Body(embed=True)) -> None:
        scheduler.abort(rid)

    @app.post("/pause_generation")
    async def pause(mode: Literal["abort", "retract"] = Body(embed=True)) -> None:
        scheduler.paused = True
        if mode == "abort":
            scheduler.abort()
        scheduler.retract()

    @app.post("/continue_generation")
    async def resume() -> None:
        scheduler.paused = False
        wake()

    # New weights

    @app.post("/update_weights_from_disk")
    async def load(model_path: str = Body(), weight_version: str = Body()) -> None:
        try:
            model.replace_weights(await asyncio.to_thread(read_weights, model_path))
        except Exception as error:
            raise Refusal(f"The old weights stay: {error!r}") from error
        scheduler.version = weight_version
        scheduler.retract()

    @app.post("/update_weight_version")
    async def label(new_version: str = Body(), abort_all_requests: bool = Body(True)) -> None:
        if abort_all_requests:
            scheduler.abort()
        scheduler.version = new_version

    # What the server reports about itself

    @app.get("/server_info")
    @app.get("/model_info")
    async def info() -> dict[str, Any]:
        return {
            "max_req_input_len": model.context_length,
            "weight_version": scheduler.version,
            "running": scheduler.n,
            "waiting": len(scheduler.waiting),
        }

    @app.get("/health")
    async def health() -> None: ...

    return app


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A small server with SGLang's HTTP protocol.")
    add = parser.add_argument
    add("--model-path", required=True, help="a Hugging Face folder")
    add("--tokenizer-path", help="a folder with tokenizer.json; default: that of the model")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000)
    add("--api-key", default=os.getenv("POCKET_AREAL_SERVER_KEY", ""))
    add("--weight-version", default="0")
    add("--max-running-requests", type=int, default=64, help="most sequences at the same time")
    add("--max-total-tokens", type=int, default=16384, help="most tokens of all sequences together")
    add("--dtype", default="float32", choices=["float32", "bfloat16"])
    add("--device", default="cpu", choices=["cpu", "cuda", "mps"])
    add("--threads", type=int, default=1)
    add("--seed", type=int, help="of the requests that have none")
    add("--exit-with-parent", action="store_true")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    random.seed(args.seed)  # requests without a seed draw one from `random`
    listener = listen(args.host, args.port, args.api_key)
    model = Model(
        args.model_path, args.max_running_requests, args.max_total_tokens, args.dtype, args.device
    )
    # AutoTokenizer would import transformers, which takes a second.
    tokenizer = Tokenizer.from_file(f"{args.tokenizer_path or args.model_path}/tokenizer.json")
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    scheduler = Scheduler(model, args.weight_version, decode)
    serve(create_app(scheduler, args.api_key), listener, args.exit_with_parent)


if __name__ == "__main__":
    main()
