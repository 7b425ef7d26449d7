"""The engine loses no token when a server is interrupted or fails, and knows each token's version.

Most tests replace the network by servers that answer from a script. There the engine never really
sleeps: a list has the seconds of each sleep. The tests with `real_engine` talk to a real server.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from conftest import forward_logprobs
from hypothesis import given
from hypothesis import strategies as st

from engine import EngineError, Hooks, RemoteInfEngine
from inference import servers
from inference.io_struct import (
    CallParameters,
    GenerationHyperparameters,
    ModelRequest,
    ModelResponse,
    generate_body,
)
from inference.weights import WeightUpdateMeta

A, B = "http://a", "http://b"
Answer = httpx.Response | Exception | Callable[[], Coroutine[Any, Any, httpx.Response]]


def generated(tokens: list[int], finish: str = "stop", **meta: Any) -> httpx.Response:
    """A server's answer to /generate. Token t has logprob -t; `spans` lists pairs (version, number
    of tokens)."""
    spans, start = [], 0
    for version, count in meta.pop("spans", [(0, len(tokens))]):
        spans.append({"version": str(version), "start": start, "end": start + count})
        start += count
    info = {
        "finish_reason": {"type": finish},
        "weight_version": spans[-1]["version"],
        "output_token_logprobs": [[-float(t), t, None] for t in tokens],
        "weight_versions": spans,
    }
    return httpx.Response(200, json={"output_ids": tokens, "meta_info": info | meta})


def without_spans(tokens: list[int], finish: str, version: int) -> httpx.Response:
    """An answer of SGLang 0.5.16 to 0.5.18, with only the version at its end."""
    body = generated(tokens, finish, spans=[(version, len(tokens))]).json()
    del body["meta_info"]["weight_versions"]
    return httpx.Response(200, json=body)


class Script:
    """Servers that answer POST /generate with the answers of a list, the last one again and again,
    and everything else with `info`."""

    def __init__(self, *answers: Answer, **info: Any) -> None:
        self.answers = list(answers)
        self.info = {"model_path": "none"} | info
        self.requests: list[tuple[str, dict[str, Any]]] = []  # (url, body), in order of arrival
        self.slept: list[float] = []

    def __call__(self, request: httpx.Request) -> Any:
        self.requests.append((str(request.url), json.loads(request.content or b"{}")))
        if request.url.path != "/generate":
            return httpx.Response(200, json=self.info)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, httpx.Response) else answer()

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)

    def engine(self, *addresses: str, **options: Any) -> RemoteInfEngine:
        transport = httpx.MockTransport(self)
        return RemoteInfEngine(
            [*(addresses or [A])], transport=transport, sleep=self.sleep, **options
        )

    def sent(self, path: str = "/generate") -> list[dict[str, Any]]:
        return [body for url, body in self.requests if url.endswith(path)]

    def calls(self) -> list[str]:
        return [url.removeprefix(A + "/") for url, _ in self.requests]


def request(*ids: int, **params: Any) -> ModelRequest:
    return ModelRequest(list(ids or (1, 2, 3)), rid="r", gconfig=CallParameters(**params))


# Interruption


@pytest.mark.anyio
async def test_resumes_where_it_was_interrupted():
    """An interrupted completion goes on after its last token, and each token keeps its version."""
    script = Script(generated([10, 11], "abort"), generated([12, 13, 14], "stop", spans=[(1, 3)]))
    response = await script.engine().agenerate(request(max_new_tokens=8))
    assert response.output_tokens == [10, 11, 12, 13, 14]
    assert response.output_logprobs == [-10.0, -11.0, -12.0, -13.0, -14.0]
    assert response.output_versions == [0, 0, 1, 1, 1]
    assert response.stop_reason == "stop"
    first, second = script.sent()
    assert (first["input_ids"], second["input_ids"]) == ([1, 2, 3], [1, 2, 3, 10, 11])
    assert [body["sampling_params"]["max_new_tokens"] for body in (first, second)] == [8, 6]
    assert first["rid"] != second["rid"]
    assert (response.input_len, response.output_len) == (3, 5)


@pytest.mark.anyio
async def test_spans_within_one_answer():
    """In mode `retract` an interrupted request has one answer, whose spans say where the weights
    changed."""
    script = Script(generated([5, 6, 7, 8, 9], spans=[(3, 2), (4, 3)]))
    response = await script.engine().agenerate(request())
    assert response.output_versions == [3, 3, 4, 4, 4]


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=8))
def test_any_interruptions_give_the_same_answer(cuts: list[tuple[int, bool]]):
    """Interruptions lose no token, repeat none, and change no token's version."""
    answers, tokens, versions = [], list[int](), list[int]()
    version = 0
    for count, updated in cuts:
        version += updated
        piece = list(range(len(tokens), len(tokens) + count))
        tokens, versions = tokens + piece, versions + [version] * count
        answers.append(generated(piece, "abort", spans=[(version, count)]))
    script = Script(*answers, generated([100], spans=[(version, 1)]))
    response = asyncio.run(script.engine().agenerate(request(max_new_tokens=64)))
    assert response.output_tokens == [*tokens, 100]
    assert response.output_versions == [*versions, version]
    for body in script.sent():
        assert body["input_ids"] == [
            1,
            2,
            3,
            *tokens[: 64 - body["sampling_params"]["max_new_tokens"]],
        ]


@pytest.mark.anyio
async def test_abort_that_spent_the_budget_is_length():
    """An aborted answer with the last allowed token ends the completion."""
    script = Script(generated([4, 5], "abort"))
    response = await script.engine().agenerate(request(max_new_tokens=2))
    assert (response.stop_reason, len(script.sent())) == ("length", 1)


@pytest.mark.anyio
async def test_version_is_the_servers_not_the_clocks():
    """A set_version during a request does not change the versions of its tokens."""
    in_flight, release = asyncio.Event(), asyncio.Event()

    async def slow() -> httpx.Response:
        in_flight.set()
        await release.wait()
        return generated([7, 8], spans=[(3, 2)])

    engine = Script(slow).engine()
    answer = asyncio.create_task(engine.agenerate(request()))
    await in_flight.wait()
    engine.set_version(4)
    release.set()
    assert (await answer).output_versions == [3, 3]


@pytest.mark.anyio
async def test_empty_aborts_are_no_storm():
    """After each abort without a new token the engine waits."""
    script = Script(*[generated([], "abort")] * 40, generated([9]))
    response = await script.engine().agenerate(request())
    assert response.output_tokens == [9]
    assert script.slept == [0.5] * 40


@pytest.mark.anyio
async def test_every_segment_has_the_seed_of_its_request():
    """A server's random number depends on seed and position, so an interruption changes none."""
    script = Script(generated([5], "abort"), httpx.Response(503), generated([6]))
    await script.engine().agenerate(request(seed=11))
    assert [body["sampling_params"]["sampling_seed"] for body in script.sent()] == [11, 11, 11]


@pytest.mark.anyio
async def test_without_spans_a_segment_has_one_version():
    """In mode `abort` an update ends every segment, so each has one version even without spans."""
    script = Script(without_spans([4, 5], "abort", 0), without_spans([6], "stop", 1))
    response = await script.engine(pause_mode="abort").agenerate(request())
    assert response.output_versions == [0, 0, 1]


# Hooks


class Halves(Hooks):
    """Asks for two tokens at a time, as replay does to interrupt where the first run did."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def before_segment(self, req: ModelRequest, response: ModelResponse) -> int:
        self.seen.append(response.output_len)
        return response.output_len + 2

    def after_segment(
        self, req: ModelRequest, response: ModelResponse, error: BaseException | None
    ) -> None:
        self.seen.append(str(error) if error else [*response.output_tokens])
        if response.stop_reason == "length" and response.output_len < req.gconfig.max_new_tokens:
            response.stop_reason = "abort"


@pytest.mark.anyio
async def test_a_hook_bounds_a_segment_and_asks_for_another():
    """A hook sees the completion before and after each segment, and decides where it is cut."""
    hooks = Halves()
    script = Script(generated([4, 5], "length"), generated([6], "stop", spans=[(1, 1)]))
    response = await script.engine(hooks=hooks).agenerate(request(max_new_tokens=9))
    assert (response.output_tokens, response.output_versions) == ([4, 5, 6], [0, 0, 1])
    assert [body["sampling_params"]["max_new_tokens"] for body in script.sent()] == [2, 2]
    assert hooks.seen == [0, [4, 5], 2, [4, 5, 6]]


@pytest.mark.anyio
@pytest.mark.parametrize("refusing", [False, True])
async def test_a_hook_sees_failures(refusing: bool):
    """after_segment gets the error of a failed segment, and that of a hook that refuses it."""
    hooks = Halves()

    async def refuse(req: ModelRequest, response: ModelResponse) -> int:
        raise EngineError("400: not in the recording", 503)

    if refusing:
        hooks.before_segment = refuse  # type: ignore[method-assign]
    script = Script(generated([4, 5], "length"), httpx.Response(400, text="no"))
    with pytest.raises(EngineError, match="400"):
        await script.engine(hooks=hooks).agenerate(request())
    assert "400: n" in hooks.seen[-1]
    assert len(script.sent()) == (0 if refusing else 2)


# Failures


@pytest.mark.anyio
@pytest.mark.parametrize(
    "failure",
    [
        httpx.Response(503, json={"error": {"message": "busy"}}),
        httpx.Response(500, text="oops"),
        httpx.ConnectError("refused"),
        httpx.ReadError("reset"),
        httpx.ReadTimeout("slow"),
        generated([9], weight_version="0-incomplete", weight_versions=None),
    ],
)
async def test_failure_keeps_what_was_generated(failure: Answer):
    """When a server fails in the middle of a completion, its tokens are kept, and no more lost."""
    script = Script(generated([4, 5], "abort"), failure, failure, generated([6], spans=[(1, 1)]))
    response = await script.engine().agenerate(request())
    assert (response.output_tokens, response.output_versions) == ([4, 5, 6], [0, 0, 1])
    assert script.sent()[-1]["input_ids"] == [1, 2, 3, 4, 5]
    assert 0.5 <= script.slept[0] <= 1.0 <= script.slept[1] <= 2.0


@pytest.mark.anyio
async def test_a_failed_server_hands_over():
    """The next server of the ranking goes on; when all retries fail, the error names the server."""
    script = Script(generated([4], "abort"), httpx.ConnectError("refused"), generated([5]))
    response = await script.engine(A, B).agenerate(request())
    first, dead, alive = (url for url, _ in script.requests if url.endswith("/generate"))
    assert first == dead != alive
    assert response.output_tokens == [4, 5]
    script = Script(httpx.ConnectError("refused"))
    with pytest.raises(EngineError, match=r"http://a/generate gave no answer.*refused") as caught:
        await script.engine(request_retries=2).agenerate(request())
    assert (caught.value.status, len(script.sent())) == (503, 3)


@pytest.mark.anyio
@pytest.mark.parametrize("status", [400, 422])
async def test_a_wrong_request_is_sent_once(status: int):
    """After a 4xx the engine does not retry, and its error has the server's words."""
    script = Script(httpx.Response(status, json={"error": {"message": "unknown field: top_q"}}))
    with pytest.raises(EngineError, match="unknown field: top_q") as caught:
        await script.engine().agenerate(request())
    assert (caught.value.status, len(script.sent())) == (400, 1)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("status", "wanted", "asked"), [(400, 400, 1), (503, 503, 3), (500, 503, 3)]
)
async def test_a_refusal_of_the_scheduler_is_no_pause(status: int, wanted: int, asked: int):
    """SGLang's scheduler refuses by an `abort` with a status: an error, and no interruption."""
    reason = {"type": "abort", "message": "no such thing", "status_code": status, "err_type": None}
    script = Script(generated([1], finish_reason=reason, output_token_logprobs=[]))
    with pytest.raises(EngineError, match="no such thing") as caught:
        await script.engine(request_retries=2).agenerate(request())
    assert (caught.value.status, len(script.sent())) == (wanted, asked)


def spans(*bounds: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"version": "0", "start": a, "end": b} for a, b in bounds]


NONSENSE = {
    "another service": httpx.Response(200, json={"text": "hello"}),
    "a version that is no number": generated([1], weight_versions=[{"version": "default"}]),
    "one id too few in the spans": generated([1, 2], spans=[(0, 1)]),
    "no logprobs": generated([1, 2], output_token_logprobs=[]),
    "ids": generated([1, 2], output_token_logprobs=[[-1.0, 1, None], [-1.0, 3, None]]),
    "an id outside the vocabulary": generated([1, 100]),
    "a negative id": generated([1, -2]),
    "a positive logprob": generated([1], output_token_logprobs=[[5.0, 1, None]]),
    "falling versions": generated([1, 2], spans=[(3, 1), (2, 1)]),
    "a gap between spans": generated([1, 2, 3], weight_versions=spans((0, 1), (2, 3))),
    "overlapping spans": generated([1, 2], weight_versions=spans((0, 2), (1, 2))),
    "more tokens than were asked for": generated([1] * 9),
}


@pytest.mark.anyio
@pytest.mark.parametrize("answer", NONSENSE.values(), ids=NONSENSE.keys())
async def test_an_answer_that_makes_no_sense_is_refused(answer: httpx.Response) -> None:
    """An answer is checked before it is believed: another server is asked, or the request fails."""
    script = Script(answer, generated([7]))
    engine = script.engine(A, B)
    engine.vocab_size = 100
    response = await engine.agenerate(request(max_new_tokens=8))
    assert (response.output_tokens, response.output_versions) == ([7], [0])
    script = Script(answer)
    engine = script.engine(request_retries=0)
    engine.vocab_size = 100
    with pytest.raises(EngineError) as caught:
        await engine.agenerate(request(max_new_tokens=8))
    assert caught.value.status == 502


@pytest.mark.anyio
@pytest.mark.parametrize("failure", [asyncio.CancelledError, httpx.ReadTimeout])
async def test_who_gives_up_tells_the_server(failure: type[BaseException]):
    """A server does not notice that its client is gone, so a cancelled request sends an abort."""
    in_flight = asyncio.Event()

    async def hang() -> httpx.Response:
        in_flight.set()
        if failure is httpx.ReadTimeout:
            raise httpx.ReadTimeout("slow")
        return await asyncio.Event().wait()  # type: ignore[return-value]

    script = Script(generated([4], "abort"), hang)
    task = asyncio.create_task(script.engine(request_retries=0).agenerate(request()))
    await in_flight.wait()
    if failure is asyncio.CancelledError:
        task.cancel()
    with pytest.raises((asyncio.CancelledError, EngineError)):
        await task
    assert script.sent("/abort_request") == [{"rid": script.sent()[-1]["rid"]}]


# What is sent


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "empty"),
        ([1, 259], "259 is outside the vocabulary of 259"),
        ([1, -1], "-1 is outside"),
        ([1] * 64, "prompt is too long: 64 tokens > 64"),
    ],
)
async def test_what_would_kill_a_server_is_never_sent(ids: list[int], message: str):
    """A token id outside the vocabulary would end SGLang, so the engine refuses it."""
    script = Script(generated([1]))
    engine = script.engine()
    engine.vocab_size, engine.context_length = 259, 64
    with pytest.raises(EngineError, match=message) as caught:
        await engine.agenerate(ModelRequest(ids))
    assert (caught.value.status, script.requests) == (400, [])
    assert caught.value.code == ("context_length_exceeded" if len(ids) == 64 else "")


@pytest.mark.anyio
async def test_the_budget_ends_with_the_context():
    """A prompt that leaves one token of the context gets one token."""
    script = Script(generated([5], "length"))
    engine = script.engine()
    engine.context_length = 64
    response = await engine.agenerate(ModelRequest([1] * 63))
    assert script.sent()[0]["sampling_params"]["max_new_tokens"] == 1
    assert response.stop_reason == "length"


@pytest.mark.anyio
async def test_every_sampling_parameter_is_sent():
    """A server never uses its own default, which the trainer would not know."""
    script = Script(generated([5]))
    response = await script.engine().agenerate(
        request(temperature=0.7, stop=["\n"], stop_token_ids=[2])
    )
    expected = {
        "max_new_tokens": 512,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [2],
        "stop": ["\n"],
    }
    assert script.sent()[0]["sampling_params"] == expected
    assert script.sent()[0]["return_logprob"] is True
    assert (response.temperature, response.trains_exactly) == (0.7, True)
    body = generate_body([1], GenerationHyperparameters(), 3)
    changed = {"max_new_tokens": 3, "temperature": 1.0, "stop_token_ids": []}
    assert body["sampling_params"] == {k: v for k, v in expected.items() if k != "stop"} | changed


@pytest.mark.anyio
@pytest.mark.parametrize("params", [{"greedy": True}, {"temperature": 0.0}, {"temperature": 9e-7}])
async def test_greedy_is_temperature_zero(params: dict[str, Any]):
    """Greedy tokens are sent as temperature 0, have logprobs at 1, and are not trained exactly."""
    script = Script(generated([5]))
    response = await script.engine().agenerate(request(**params))
    assert script.sent()[0]["sampling_params"]["temperature"] == 0.0
    assert (response.temperature, response.trains_exactly) == (1.0, False)


@pytest.mark.parametrize(
    "change",
    [
        {"top_p": 0.9},
        {"top_k": 5},
        {"frequency_penalty": 0.1},
        {"presence_penalty": 0.1},
        {"json_schema": "{}"},
        {"greedy": True},
    ],
)
def test_trains_exactly_means_pure_temperature_sampling(change: dict[str, Any]):
    """Whatever draws from another distribution than softmax(logits / temperature) is left out."""
    pure = GenerationHyperparameters(temperature=0.5)
    assert pure.trains_exactly
    assert pure.new(temperature=1e-6).trains_exactly
    assert pure.for_call(stop=["x"], seed=3).trains_exactly
    assert not pure.for_call(**change).trains_exactly


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63, 10**30])
def test_any_seed_is_one_that_servers_take(seed: int):
    """A seed is reduced to 63 bits."""
    params = generate_body([1], CallParameters(seed=seed), 1)["sampling_params"]
    assert params["sampling_seed"] == seed % 2**63


def test_what_shares_a_prompt_goes_to_one_server():
    """All turns of all members of a group have one affinity, and so have those of a session."""
    calls = {
        ModelRequest([1], call=f"7-{k}.{turn}").affinity for k in range(3) for turn in range(2)
    }
    assert calls == {"7"}
    assert ModelRequest([1], session="s", call="eval-7-0.1").affinity == "s"
    assert ModelRequest([1], rid="r").affinity == "r"


# Control


class Executor:
    """Records each call of the engine in `script.requests`."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: self.script.requests.append((f"executor/{name}", {"args": args}))


def test_the_order_of_a_weight_update(tmp_path: Path):
    """The rollouts stop before the servers, the servers have the weights before the gate has the
    version, and go on before new rollouts start."""
    (tmp_path / "v1").mkdir()
    script = Script(generated([1]))
    engine = script.engine(A)
    engine.executor = Executor(script)
    engine.pause()
    meta = WeightUpdateMeta(path=str(tmp_path), version=1)
    engine.update_weights(meta)
    engine.set_version(1)
    engine.resume()
    assert script.calls() == [
        "executor/pause",
        "pause_generation",
        "update_weight_version",
        "update_weights_from_disk",
        "executor/on_new_version",
        "continue_generation",
        "executor/resume",
    ]
    assert script.sent("/pause_generation") == [{"mode": "retract"}]
    assert engine.get_version() == 1
    with pytest.raises(ValueError, match="version 1 is not newer than 1"):
        engine.update_weights(meta)


def test_servers_of_a_killed_run_are_taken_over():
    """They go on, end an open update, abort what they generate, and get a readable version."""
    script = Script(generated([1]))
    script.engine(A).take_over()
    assert script.calls() == ["continue_generation", "end_weight_update", "update_weight_version"]
    assert script.requests[-1][1] == {"new_version": "0", "abort_all_requests": True}


def test_a_server_without_spans_is_paused_by_abort(caplog: pytest.LogCaptureFixture):
    """Without spans only the mode `abort` says which version a token has."""
    script = Script(without_spans([1], "length", 0))
    engine = script.engine(A, B)
    engine.initialize()
    engine.pause()
    assert script.sent("/pause_generation") == [{"mode": "abort"}] * 2
    assert sum(record.message.count("no weight_versions") for record in caplog.records) == 1


def test_initialize_learns_the_limits(tmp_path: Path):
    """The engine keeps to the smallest vocabulary and context of all servers."""
    (tmp_path / "config.json").write_text('{"vocab_size": 259}')

    def serve(http_request: httpx.Request) -> httpx.Response:
        if http_request.url.path == "/generate":
            assert json.loads(http_request.content)["input_ids"] == [0]
            return generated([1])
        if http_request.url.host == "a":
            return httpx.Response(200, json={"model_path": str(tmp_path), "max_req_input_len": 64})
        return httpx.Response(200, json={"model_path": "somebody/else", "max_req_input_len": 32})

    engine = RemoteInfEngine([A, B], transport=httpx.MockTransport(serve))
    engine.initialize()
    assert (engine.vocab_size, engine.context_length) == (259, 32)


def test_the_proxies_learn_each_version(monkeypatch: pytest.MonkeyPatch):
    """set_version posts the version to every proxy, with the admin key, before the gate opens."""
    seen: list[Any] = []

    def serve(http_request: httpx.Request) -> httpx.Response:
        seen.append((http_request.url.host, http_request.headers["authorization"]))
        return httpx.Response(200, json={})

    monkeypatch.setattr(servers, "make_transport", lambda: httpx.MockTransport(serve))
    engine = Script(generated([1])).engine()
    engine.proxies = SimpleNamespace(proxy_addr=("http://p", "http://q/"), admin_key="k")
    engine.executor = SimpleNamespace(on_new_version=lambda: seen.append("gate"))
    engine.set_version(3)
    assert seen == [("p", "Bearer k"), ("q", "Bearer k"), "gate"]
    engine.proxies.proxy_addr = "http://p"
    engine.set_version(4)
    assert seen[3:] == [("p", "Bearer k"), "gate"]


def test_destroy_leaves_no_server_paused():
    """A run that ends between pause and resume lets the servers go on, once."""
    script = Script(generated([1]))
    engine = script.engine(A)
    engine.executor = Executor(script)
    engine.pause()
    engine.destroy()
    assert script.calls()[-2:] == ["continue_generation", "executor/destroy"]
    script.requests.clear()
    engine.destroy()
    assert script.calls() == ["executor/destroy"]


# A real server


@pytest.mark.parametrize("pause_mode", ["retract", "abort"])
def test_every_logprob_is_that_of_the_weights_it_names(
    real_engine: RemoteInfEngine,
    tiny_model_dir: Path,
    other_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pause_mode: str,
):
    """Each token's logprob is that of a forward pass with the weights of its version, even if an
    update interrupts the completion."""
    models = {0: tiny_model_dir, 1: other_model_dir}
    prompts = [[5, 6, 7, 8 + i] for i in range(4)]
    trainer = RemoteInfEngine(real_engine.addresses, pause_mode)

    def update(engine: RemoteInfEngine, version: int) -> None:
        link = tmp_path / f"v{version}"
        link.symlink_to(models[version], target_is_directory=True)
        engine.pause()
        engine.update_weights(WeightUpdateMeta(path=str(tmp_path), version=version))
        engine.set_version(version)
        engine.resume()
        link.unlink()

    async def generate_through_an_update() -> list[Any]:
        gconfig = CallParameters(max_new_tokens=400, seed=0)
        tasks = [
            asyncio.create_task(trainer.agenerate(ModelRequest(prompt, gconfig=gconfig)))
            for prompt in prompts
        ]
        first = ModelRequest([1, 2], gconfig=GenerationHyperparameters(max_new_tokens=8))
        await trainer.agenerate(first)  # when its answer arrives, all `tasks` are running
        await asyncio.to_thread(update, trainer, 1)
        return await asyncio.gather(*tasks)

    responses = asyncio.run(generate_through_an_update())
    update(RemoteInfEngine(trainer.addresses), 0)  # `trainer` goes to no older version
    assert any(len(set(response.output_versions)) == 2 for response in responses)
    for response in responses:
        assert response.output_versions == sorted(response.output_versions)
        ids = response.input_tokens + response.output_tokens
        by_version = {v: forward_logprobs(path, ids) for v, path in models.items()}
        expected = [
            by_version[version][response.input_len + t]
            for t, version in enumerate(response.output_versions)
        ]
        assert response.output_logprobs == pytest.approx(expected, abs=1e-4)
