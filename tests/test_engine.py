"""The engine loses no token when a server is interrupted or fails, and knows each token's version.

In these tests, servers answer from a script instead of over the network, and the engine does not
sleep: the seconds of each sleep are added to a list. tests/inference/test_contract.py has real
servers.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from conftest import Session
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

pytestmark = pytest.mark.anyio
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
    """Servers that answer POST /generate with the answers of a list, and then repeat the last
    one."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, dict[str, Any]]] = []  # (url, body), in order of arrival
        self.slept: list[float] = []

    def __call__(self, request: httpx.Request) -> Any:
        self.requests.append((str(request.url), json.loads(request.content or b"{}")))
        if request.url.path != "/generate":
            return httpx.Response(200, json={"max_req_input_len": 64})
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, httpx.Response) else answer()

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)

    def engine(self, *addresses: str, **options: Any) -> RemoteInfEngine:
        options |= {"session": Session(httpx.MockTransport(self)), "sleep": self.sleep}
        return RemoteInfEngine([*(addresses or [A])], **options)

    def sent(self, path: str = "/generate") -> list[dict[str, Any]]:
        return [body for url, body in self.requests if url.endswith(path)]

    def calls(self) -> list[str]:
        return [url.removeprefix(A + "/") for url, _ in self.requests]


def request(*ids: int, **params: Any) -> ModelRequest:
    return ModelRequest(list(ids or (1, 2, 3)), rid="r", gconfig=CallParameters(**params))


# Interruption


async def test_spans_within_one_answer():
    """In mode `retract` an interrupted request has one answer, whose spans say where the weights
    changed."""
    script = Script(generated([5, 6, 7, 8, 9], spans=[(3, 2), (4, 3)]))
    assert (await script.engine().agenerate(request())).output_versions == [3, 3, 4, 4, 4]


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=8))
def test_any_interruptions_give_the_same_answer(cuts: list[tuple[int, bool]]):
    """An interrupted completion continues after its last token. No token is lost or repeated, and
    none changes its version. Every segment is sent with the request's seed, so interruptions do not
    change the noise of the sampling."""
    answers, tokens, versions = [], list[int](), list[int]()
    version = 0
    for count, updated in cuts:
        version += updated
        piece = list(range(len(tokens), len(tokens) + count))
        tokens, versions = tokens + piece, versions + [version] * count
        answers.append(generated(piece, "abort", spans=[(version, count)]))
    script = Script(*answers, generated([100], spans=[(version, 1)]))
    response = asyncio.run(script.engine().agenerate(request(max_new_tokens=64, seed=11)))
    assert response.output_tokens == [*tokens, 100]
    assert response.output_logprobs == [-float(token) for token in response.output_tokens]
    assert response.output_versions == [*versions, version]
    assert (response.stop_reason, response.input_len) == ("stop", 3)
    for body in script.sent():
        params, known = body["sampling_params"], body["input_ids"][3:]
        assert body["input_ids"] == [1, 2, 3, *tokens[: 64 - params["max_new_tokens"]]]
        assert params["max_new_tokens"] == 64 - len(known)
        assert params["sampling_seed"] == 11
    assert len({body["rid"] for body in script.sent()}) == len(cuts) + 1


async def test_abort_that_spent_the_budget_is_length():
    """An aborted answer with the last allowed token ends the completion."""
    script = Script(generated([4, 5], "abort"))
    response = await script.engine().agenerate(request(max_new_tokens=2))
    assert (response.stop_reason, len(script.sent())) == ("length", 1)


async def test_empty_aborts_are_no_storm():
    """After each abort without a new token the engine waits."""
    script = Script(*[generated([], "abort")] * 40, generated([9]))
    assert (await script.engine().agenerate(request())).output_tokens == [9]
    assert script.slept == [0.5] * 40


async def test_without_spans_a_segment_has_one_version():
    """In mode `abort` an update ends every segment, so each has one version even without spans."""
    script = Script(without_spans([4, 5], "abort", 0), without_spans([6], "stop", 1))
    response = await script.engine(pause_mode="abort").agenerate(request())
    assert response.output_versions == [0, 0, 1]


# Hooks


class Halves(Hooks):
    """Asks for two tokens at a time. (Replay's hooks end a segment where the recorded run was
    interrupted.)"""

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


async def test_a_hook_bounds_a_segment_and_asks_for_another():
    """A hook sees the completion before and after each segment, and decides where it is cut."""
    hooks = Halves()
    script = Script(generated([4, 5], "length"), generated([6], "stop", spans=[(1, 1)]))
    response = await script.engine(hooks=hooks).agenerate(request(max_new_tokens=9))
    assert (response.output_tokens, response.output_versions) == ([4, 5, 6], [0, 0, 1])
    assert [body["sampling_params"]["max_new_tokens"] for body in script.sent()] == [2, 2]
    assert hooks.seen == [0, [4, 5], 2, [4, 5, 6]]


@pytest.mark.parametrize("refusing", [False, True])
async def test_a_hook_sees_failures(refusing: bool):
    """`after_segment` gets the error if a segment fails, and also if the hook itself has refused
    the segment."""
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
    """If a server fails in the middle of a completion, the engine keeps the tokens of earlier
    segments. It asks again after a wait, which grows with each failure."""
    script = Script(generated([4, 5], "abort"), failure, failure, generated([6], spans=[(1, 1)]))
    response = await script.engine().agenerate(request())
    assert (response.output_tokens, response.output_versions) == ([4, 5, 6], [0, 0, 1])
    assert script.sent()[-1]["input_ids"] == [1, 2, 3, 4, 5]
    assert 0.5 <= script.slept[0] <= 1.0 <= script.slept[1] <= 2.0


async def test_a_failed_server_hands_over():
    """The next server of the ranking continues the completion. If all retries fail, the error names
    the server."""
    script = Script(generated([4], "abort"), httpx.ConnectError("refused"), generated([5]))
    response = await script.engine(A, B).agenerate(request())
    first, dead, alive = (url for url, _ in script.requests if url.endswith("/generate"))
    assert first == dead != alive
    assert response.output_tokens == [4, 5]
    script = Script(httpx.ConnectError("refused"))
    with pytest.raises(EngineError, match=r"http://a/generate gave no answer.*refused") as caught:
        await script.engine(request_retries=2).agenerate(request())
    assert (caught.value.status, len(script.sent())) == (503, 3)


@pytest.mark.parametrize("status", [400, 422])
async def test_a_wrong_request_is_sent_once(status: int):
    """After a 4xx the engine does not retry, and its error has the server's words."""
    script = Script(httpx.Response(status, json={"error": {"message": "unknown field: top_q"}}))
    with pytest.raises(EngineError, match="unknown field: top_q") as caught:
        await script.engine().agenerate(request())
    assert (caught.value.status, len(script.sent())) == (400, 1)


STATUSES = [(400, 400, 1), (503, 503, 3), (500, 503, 3)]


@pytest.mark.parametrize(("status", "wanted", "asked"), STATUSES)
async def test_a_refusal_of_the_scheduler_is_no_pause(status: int, wanted: int, asked: int):
    """SGLang's scheduler refuses a request by an `abort` with a status, which is an error, and not
    an interruption by an update."""
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
    "a positive logprob": generated([1], output_token_logprobs=[[5.0, 1, None]]),
    "falling versions": generated([1, 2], spans=[(3, 1), (2, 1)]),
    "a gap between spans": generated([1, 2, 3], weight_versions=spans((0, 1), (2, 3))),
    "overlapping spans": generated([1, 2], weight_versions=spans((0, 2), (1, 2))),
    "more tokens than were asked for": generated([1] * 9),
}


@pytest.mark.parametrize("answer", NONSENSE.values(), ids=NONSENSE.keys())
async def test_an_answer_that_makes_no_sense_is_refused(answer: httpx.Response) -> None:
    """The engine checks every answer. If an answer makes no sense, the engine asks another server,
    or the request fails if no retry is left."""
    engine = Script(answer, generated([7])).engine(A, B)
    response = await engine.agenerate(request(max_new_tokens=8))
    assert (response.output_tokens, response.output_versions) == ([7], [0])
    with pytest.raises(EngineError, check=lambda error: error.status == 502):
        await Script(answer).engine(request_retries=0).agenerate(request(max_new_tokens=8))


@pytest.mark.parametrize("failure", [asyncio.CancelledError, httpx.ReadTimeout])
async def test_who_gives_up_tells_the_server(failure: type[BaseException]):
    """A server does not notice that its client is gone. So the engine sends an abort for a request
    that was cancelled or took too long."""
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


async def test_every_sampling_parameter_is_sent():
    """The engine sends all parameters, because the trainer would not know the defaults of a server.
    A seed has at most 63 bits."""
    script = Script(generated([5]))
    own: Any = {"temperature": 0.7, "stop": ["\n"], "stop_token_ids": [2]}
    response = await script.engine().agenerate(request(**own, seed=-1))
    expected = own | {"max_new_tokens": 512, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    expected |= {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
    expected |= {"sampling_seed": 2**63 - 1}
    assert script.sent()[0]["sampling_params"] == expected
    assert script.sent()[0]["return_logprob"] is True
    assert (response.temperature, response.trains_exactly) == (0.7, True)
    plain = generate_body([1], GenerationHyperparameters(), 3)["sampling_params"]
    assert plain.keys() == expected.keys() - {"sampling_seed"}


@pytest.mark.parametrize("params", [{"greedy": True}, {"temperature": 0.0}, {"temperature": 9e-7}])
async def test_greedy_is_temperature_zero(params: dict[str, Any]):
    """A greedy request is sent with temperature 0. Its response has temperature 1, that of the
    log-probabilities, and `trains_exactly` is false."""
    script = Script(generated([5]))
    response = await script.engine().agenerate(request(**params))
    assert script.sent()[0]["sampling_params"]["temperature"] == 0.0
    assert (response.temperature, response.trains_exactly) == (1.0, False)


def test_trains_exactly_means_pure_temperature_sampling():
    """A request trains exactly only if it samples from softmax(logits / temperature). Stop strings
    and a seed do not change this distribution."""
    pure = GenerationHyperparameters(temperature=0.5)
    assert pure.trains_exactly
    assert pure.new(temperature=1e-6).trains_exactly
    assert pure.for_call(stop=["x"], seed=3).trains_exactly
    changes: Any = {"top_p": 0.9, "top_k": 5, "frequency_penalty": 0.1, "presence_penalty": 0.1}
    for name, value in (changes | {"json_schema": "{}", "greedy": True}).items():
        assert not pure.for_call(**{name: value}).trains_exactly, name


def test_what_shares_a_prompt_goes_to_one_server():
    """All turns of all members of a group have the same affinity, and so do all turns of a
    session."""
    calls = "7-0.0", "7-1.3", "eval-7-0.1", "eval-7-1.1", "a b.0", "a b.1", ""
    affinities = [ModelRequest([1], rid="r", call=call).affinity for call in calls]
    assert affinities == ["7", "7", "eval-7", "eval-7", "a b", "a b", "r"]


# Control


class Executor:
    """A dispatcher that records each call of the engine in `script.requests`."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: self.script.requests.append((f"executor/{name}", {"args": args}))


def test_the_order_of_a_weight_update(tmp_path: Path):
    """First the rollouts pause, then the servers. The gate gets the version when the servers have
    the weights. The servers continue before new rollouts start."""
    (tmp_path / "v1").mkdir()
    script = Script(generated([1]))
    engine = script.engine(A)
    engine.dispatcher = Executor(script)
    engine.pause()
    engine.update_weights(WeightUpdateMeta(path=str(tmp_path), version=1))
    engine.set_version(1)
    engine.resume()
    stop, go_on = ["executor/pause", "pause_generation"], ["continue_generation", "executor/resume"]
    update = ["update_weight_version", "update_weights_from_disk", "executor/on_new_version"]
    assert script.calls() == stop + update + go_on
    assert script.sent("/pause_generation") == [{"mode": "retract"}]
    assert engine.get_version() == 1


def test_a_server_without_spans_is_paused_by_abort(caplog: pytest.LogCaptureFixture):
    """Without spans only the mode `abort` says which version a token has."""
    script = Script(without_spans([1], "length", 0))
    engine = script.engine(A, B)
    engine.initialize()
    engine.pause()
    assert script.sent("/pause_generation") == [{"mode": "abort"}] * 2
    assert sum(record.message.count("no weight_versions") for record in caplog.records) == 1


def test_the_proxy_learns_each_version(monkeypatch: pytest.MonkeyPatch):
    """set_version posts the version to the proxy, with the admin key, before the gate opens."""
    seen: list[Any] = []

    def serve(http_request: httpx.Request) -> httpx.Response:
        seen.append((http_request.url.host, http_request.headers["authorization"]))
        return httpx.Response(200, json={})

    monkeypatch.setattr(servers, "make_session", lambda: Session(httpx.MockTransport(serve)))
    engine = Script(generated([1])).engine()
    engine.proxy = "http://p/", "k"
    engine.dispatcher = SimpleNamespace(on_new_version=lambda: seen.append("gate"))
    engine.set_version(3)
    assert seen == [("p", "Bearer k"), "gate"]
