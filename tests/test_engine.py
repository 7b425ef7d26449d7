"""The engine loses no token when a server is interrupted or fails, and records which weight version computed each
token.

Most tests replace the network with servers that answer from a script (httpx.MockTransport). In tests with scripted
servers the engine never really sleeps: a list records the seconds of each sleep. The tests with `real_engine` talk to a
real server process.
"""

import asyncio
import contextlib
import itertools
import json
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from conftest import idle_connections
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from engine import EngineError, RemoteInfEngine
from inference import wire
from inference.io_struct import GenerationHyperparameters, ModelRequest, sampling_params
from inference.servers import rank_servers
from inference.weights import WeightUpdateMeta

A, B = "http://a", "http://b"
Answer = httpx.Response | Exception | Callable[[], Coroutine[Any, Any, httpx.Response]]


def generated(tokens: list[int], finish: str = "stop", **meta: Any) -> httpx.Response:
    """Return a server's answer to /generate. The token with id t has logprob -t; `spans` lists pairs (version, number
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
    """Return an answer in the format of SGLang 0.5.16 to 0.5.18. The answer contains no spans, only the version at the
    time when the answer ended."""
    body = generated(tokens, finish, spans=[(version, len(tokens))]).json()
    del body["meta_info"]["weight_versions"]
    return httpx.Response(200, json=body)


class Script:
    """Servers that answer POST /generate with the answers of a list, and all other requests with status 200. After the
    end of the list, every request to /generate gets the last answer of the list."""

    def __init__(self, *answers: Answer, info: dict[str, Any] | None = None) -> None:
        self.answers = list(answers)
        self.info = info or {}
        self.requests: list[
            tuple[str, dict[str, Any]]
        ] = []  # (url, body) of each request, in order of arrival
        self.slept: list[float] = []

    def __call__(self, request: httpx.Request) -> Any:
        self.requests.append((str(request.url), json.loads(request.content or b"{}")))
        if request.url.path == "/server_info":
            return httpx.Response(200, json=self.info)
        if request.url.path != "/generate":
            return httpx.Response(200, json={"success": True})
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
            list(addresses) or [A], transport=transport, sleep=self.sleep, **options
        )

    def sent(self, path: str = "/generate") -> list[dict[str, Any]]:
        return [body for url, body in self.requests if url.endswith(path)]

    def paths(self) -> list[str]:
        return [httpx.URL(url).path for url, _ in self.requests]


def request(*ids: int, **gconfig: Any) -> ModelRequest:
    return ModelRequest(
        list(ids or (1, 2, 3)), rid="r", gconfig=GenerationHyperparameters(**gconfig)
    )


# Interruption


@pytest.mark.anyio
async def test_resumes_where_it_was_interrupted():
    """An interrupted completion continues after its last token. For each token, the response names the weight version
    that computed the token."""
    script = Script(generated([10, 11], "abort"), generated([12, 13, 14], "stop", spans=[(1, 3)]))
    response = await script.engine().agenerate(request(max_new_tokens=8))
    assert response.output_tokens == [10, 11, 12, 13, 14]
    assert response.output_logprobs == [-10.0, -11.0, -12.0, -13.0, -14.0]
    assert response.output_versions == [0, 0, 1, 1, 1]
    assert response.stop_reason == "stop"
    first, second = script.sent()
    assert (first["input_ids"], second["input_ids"]) == ([1, 2, 3], [1, 2, 3, 10, 11])
    assert [body["sampling_params"]["max_new_tokens"] for body in (first, second)] == [8, 6]
    assert [body["rid"] for body in (first, second)] == ["r-0", "r-1"]
    assert (response.input_len, response.output_len) == (3, 5)


@pytest.mark.anyio
async def test_spans_within_one_answer():
    """In pause mode `retract`, a server sends only one answer to an interrupted request, and the answer's spans show
    where the weights changed."""
    script = Script(generated([5, 6, 7, 8, 9], spans=[(3, 2), (4, 3)]))
    response = await script.engine().agenerate(request())
    assert response.output_versions == [3, 3, 4, 4, 4]


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=8))
def test_any_interruptions_give_the_same_answer(cuts: list[tuple[int, bool]]):
    """Interruptions lose no token of a completion, repeat no token, and change no token's version."""
    answers, tokens, versions = [], list[int](), list[int]()
    version = 0
    for count, updated in cuts:
        version += updated
        piece = list(range(len(tokens), len(tokens) + count))
        tokens, versions = tokens + piece, versions + [version] * count
        answers.append(generated(piece, "abort", spans=[(version, count)]))
    answers.append(generated([100], spans=[(version, 1)]))
    script = Script(*answers)
    response = asyncio.run(script.engine().agenerate(request(max_new_tokens=64)))
    assert response.output_tokens == [*tokens, 100]
    assert response.output_versions == [*versions, version]
    assert all(
        b["input_ids"] == [1, 2, 3, *tokens[: 64 - b["sampling_params"]["max_new_tokens"]]]
        for b in script.sent()
    )


@pytest.mark.anyio
async def test_abort_that_spent_the_budget_is_length():
    """If an aborted answer contains the last allowed token, the completion ends with stop reason `length`."""
    script = Script(generated([4, 5], "abort"))
    response = await script.engine().agenerate(request(max_new_tokens=2))
    assert response.stop_reason == "length"
    assert len(script.sent()) == 1


@pytest.mark.anyio
async def test_version_is_the_servers_not_the_clocks():
    """Calling set_version during a request does not change the versions of that request's tokens."""
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
    assert (await answer).output_versions == [3, 3]  # the engine's own version is 4


@pytest.mark.anyio
async def test_empty_aborts_are_no_storm():
    """After each aborted answer without a new token, the engine waits longer than before: at first 0.05 s, and at most
    1 s."""
    script = Script(*[generated([], "abort")] * 40, generated([9]))
    response = await script.engine().agenerate(request())
    assert response.output_tokens == [9]
    assert script.slept[:6] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0]
    assert len(script.slept) == 40
    assert sum(script.slept) > 35


@pytest.mark.anyio
async def test_every_segment_has_the_seed_of_its_request():
    """All segments of a completion have one seed. A server's random number depends on the seed and the position, so an
    interrupted completion has the same random numbers as an uninterrupted one."""
    script = Script(generated([5], "abort"), httpx.Response(503), generated([6]))
    await script.engine().agenerate(request(seed=11))
    seeds = [body["sampling_params"]["sampling_seed"] for body in script.sent()]
    assert seeds == [11, 11, 11]


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
    ],
)
async def test_failure_keeps_what_was_generated(failure: Answer):
    """When a server fails in the middle of a completion, the engine keeps the tokens, waits, and tries again."""
    script = Script(generated([4, 5], "abort"), failure, failure, generated([6], spans=[(1, 1)]))
    response = await script.engine().agenerate(request())
    assert response.output_tokens == [4, 5, 6]
    assert response.output_versions == [0, 0, 1]
    assert script.sent()[-1]["input_ids"] == [1, 2, 3, 4, 5]
    assert 0.25 <= script.slept[0] <= 0.5
    assert 0.5 <= script.slept[1] <= 1.0


@pytest.mark.anyio
async def test_gives_up_after_the_retries():
    """After `request_retries` failed retries the engine raises an error that names the server and the reason."""
    script = Script(httpx.ConnectError("refused"))
    with pytest.raises(
        EngineError, match=r"http://a/generate cannot be reached.*refused"
    ) as caught:
        await script.engine(request_retries=2).agenerate(request())
    assert caught.value.status == 503
    assert len(script.sent()) == 3


@pytest.mark.anyio
@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "unknown field: top_q"}},
        {"error": "unknown field: top_q"},
        {"object": "error", "message": "unknown field: top_q", "code": 400},
        {"detail": "unknown field: top_q"},
    ],
)
async def test_a_wrong_request_is_sent_once(body: dict[str, Any]):
    """After an answer with status 400 the engine does not retry, and the engine's error contains the server's
    message."""
    script = Script(httpx.Response(400, json=body))
    with pytest.raises(EngineError, match="unknown field: top_q") as caught:
        await script.engine().agenerate(request())
    assert caught.value.status == 400
    assert script.paths() == ["/generate"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, json={"text": "hello"}),
        generated(
            [1, 2],
            weight_version="default",
            weight_versions=[{"version": "default", "start": 0, "end": 2}],
        ),
    ],
)
async def test_an_answer_without_versions_or_logprobs_is_an_error(answer: httpx.Response):
    """The engine refuses an answer that lacks the version or the logprob of a token."""
    with pytest.raises(EngineError) as caught:
        await Script(answer).engine().agenerate(request())
    assert caught.value.status == 502


NONSENSE = {
    "one id too few in the spans": generated([1, 2], spans=[(0, 1)]),
    "no logprobs": generated([1, 2], output_token_logprobs=[]),
    "other ids beside the logprobs": generated(
        [1, 2], output_token_logprobs=[[-1.0, 1, None], [-1.0, 3, None]]
    ),
    "an id outside the vocabulary": generated([1, 100]),
    "a negative id": generated([1, -2]),
    "a float id": generated([1, 2.0]),  # type: ignore[list-item]
    "a positive logprob": generated([1], output_token_logprobs=[[5.0, 1, None]]),
    "falling versions": generated([1, 2], spans=[(3, 1), (2, 1)]),
    "a span without end": generated(
        [1], weight_versions=[{"version": "0", "start": 0, "end": 10**12}]
    ),
    "a gap between spans": generated(
        [1, 2, 3], weight_versions=[{"version": "0", "start": a, "end": a + 1} for a in (0, 2)]
    ),
    "overlapping spans": generated(
        [1, 2],
        weight_versions=[
            {"version": "0", "start": 0, "end": 2},
            {"version": "0", "start": 1, "end": 2},
        ],
    ),
}


@pytest.mark.anyio
@pytest.mark.parametrize("answer", NONSENSE.values(), ids=NONSENSE.keys())
async def test_an_answer_that_makes_no_sense_is_an_error_of_its_server(
    answer: httpx.Response,
) -> None:
    """If a server's answer contradicts itself, the engine treats the server as lost and asks another server."""
    script = Script(answer, generated([7]))
    engine = script.engine(A, B)
    engine.vocab_size = 100
    response = await engine.agenerate(request())
    assert (response.output_tokens, response.output_versions) == ([7], [0])
    assert len(engine.servers.lost) == 1


@pytest.mark.anyio
async def test_tokens_that_were_sent_are_never_changed() -> None:
    """If an event of a stream contradicts the tokens of an earlier event, the engine keeps the earlier tokens, and
    another server continues after them."""

    async def events() -> AsyncIterator[bytes]:
        for tokens in ([4, 5], [4, 6, 7]):
            event = generated(tokens, finish_reason=None).content
            yield b"data: " + event + b"\n\n"

    stream = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=events())
    engine, seen = Script(stream, generated([7])).engine(A, B), list[list[int]]()
    response = await engine.agenerate(
        request(), lambda so_far: seen.append([*so_far.output_tokens])
    )
    assert response.output_tokens == [4, 5, 7]
    assert seen == [[4, 5], [4, 5, 7]]
    assert len(engine.servers.lost) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("failure", [asyncio.CancelledError, httpx.ReadTimeout])
async def test_who_gives_up_tells_the_server(failure: type[BaseException]):
    """If a request is cancelled or times out, the engine sends /abort_request, so that the server stops
    generating."""
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
    assert script.sent("/abort_request") == [{"rid": "r-1"}]


# What is sent


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("ids", "gconfig", "message"),
    [
        ([], {}, "empty"),
        ([1, 259], {}, "259 is outside the vocabulary of 259"),
        ([1, -1], {}, "-1 is outside"),
        ([1, True], {}, "Python ints, not .'bool'"),
        ([1, 2.0], {}, "Python ints, not .'float'"),
        ([1] * 64, {}, "prompt is too long: 64 tokens > 64"),
        ([1], {"max_new_tokens": 0}, "at least 1"),
    ],
)
async def test_what_would_kill_a_server_is_never_sent(
    ids: list[int], gconfig: dict[str, Any], message: str
):
    """If a request is invalid, the engine raises an error with status 400 and sends nothing to the server. (A bad token
    id would crash an SGLang server.)"""
    script = Script(generated([1]))
    engine = script.engine()
    engine.vocab_size, engine.context_length = 259, 64
    with pytest.raises(EngineError, match=message) as caught:
        await engine.agenerate(ModelRequest(ids, gconfig=GenerationHyperparameters(**gconfig)))
    assert caught.value.status == 400
    assert script.requests == []


@pytest.mark.anyio
async def test_the_budget_ends_with_the_context():
    """If a prompt leaves only one token of the context free, the engine requests one token."""
    script = Script(generated([5], "length"))
    engine = script.engine()
    engine.context_length = 64
    response = await engine.agenerate(ModelRequest([1] * 63))
    assert script.sent()[0]["sampling_params"]["max_new_tokens"] == 1
    assert response.stop_reason == "length"


@pytest.mark.anyio
async def test_every_sampling_parameter_is_sent():
    """The engine sends every sampling parameter, so the server never uses its own default."""
    script = Script(generated([5]))
    response = await script.engine().agenerate(
        request(temperature=0.7, stop=["\n"], stop_token_ids=[2])
    )
    assert script.sent()[0]["sampling_params"] == {
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
    assert script.sent()[0]["return_logprob"] is True
    assert (response.temperature, response.trains_exactly) == (0.7, True)


@pytest.mark.anyio
@pytest.mark.parametrize("gconfig", [{"greedy": True}, {"temperature": 0.0}, {"temperature": 9e-7}])
async def test_greedy_is_temperature_zero(gconfig: dict[str, Any]):
    """The engine sends a greedy request with temperature 0, and the response has trains_exactly = False."""
    script = Script(generated([5]))
    response = await script.engine().agenerate(request(**gconfig))
    assert script.sent()[0]["sampling_params"]["temperature"] == 0.0
    assert (response.temperature, response.trains_exactly) == (1.0, False)


def test_trains_exactly_means_pure_temperature_sampling():
    """`trains_exactly` is true for pure temperature sampling, and false with top_p, top_k, penalties or greedy
    sampling."""
    pure = GenerationHyperparameters(temperature=0.5)
    assert pure.trains_exactly
    assert pure.new(temperature=1e-6).trains_exactly
    changes: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_k": 5},
        {"frequency_penalty": 0.1},
        {"greedy": True},
    ]
    assert not any(pure.new(**change).trains_exactly for change in changes)


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63, 10**30])
def test_any_seed_is_one_that_servers_take(seed: int):
    """A negative seed or a seed of more than 63 bits is reduced to 63 bits. A seed from 0 to 2^63 - 1 stays
    unchanged."""
    params = sampling_params(GenerationHyperparameters(seed=seed))
    assert params["sampling_seed"] == seed % 2**63


# Several servers


KEYS = st.text(min_size=1, max_size=8)


@given(KEYS, st.sets(KEYS, min_size=2, max_size=8), st.data())
def test_a_lost_server_moves_only_its_own_conversations(
    key: str, servers: set[str], data: st.DataObject
):
    """If one server is removed, only that server's conversations move to other servers. Keys that are numbers belong to
    prompt groups; `test_groups_are_spread_evenly` tests these keys, and this test skips them."""
    assume(not key.isdecimal())
    order = rank_servers(sorted(servers), key)
    lost = data.draw(st.sampled_from(order))
    assert rank_servers(sorted(servers - {lost}), key) == [
        server for server in order if server != lost
    ]
    assert rank_servers(sorted(servers, reverse=True), key) == order


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 8), st.data())
def test_groups_are_spread_evenly(first: int, groups: int, count: int, data: st.DataObject):
    """Consecutive prompt groups are divided evenly: the numbers of groups of any two servers differ by at most one. The
    ranking of the servers for a group contains every server, so another server can take the group if the first server
    is lost."""
    servers = [f"http://s{k}" for k in range(count)]
    keys = [str(n) for n in range(first, first + groups)]
    counts = Counter(rank_servers(servers, key)[0] for key in keys)
    assert max(counts.values()) - min(counts[server] for server in servers) <= 1
    assert all(sorted(rank_servers(servers, key)) == servers for key in keys)
    assert rank_servers(servers[::-1], keys[0]) == rank_servers(servers, keys[0])


def test_groups_of_a_lost_server_are_spread():
    """If one of five servers is lost, each of the other four servers gets 20 to 30 % of the lost server's 1,000
    groups."""
    servers = [f"http://s{k}" for k in range(5)]
    moved = Counter(rank_servers(servers, str(n))[1] for n in range(2, 5000, 5))
    assert sorted(moved) == [
        server for server in servers if server != rank_servers(servers, "2")[0]
    ]
    assert 200 <= min(moved.values()) <= max(moved.values()) <= 300


@pytest.mark.anyio
async def test_all_samples_of_a_prompt_go_to_one_server():
    """All turns of all members of a prompt group go to one server, although each member has its own session. If a call
    belongs to no prompt group, the call's session determines which server gets the call."""
    script = Script(generated([5]))
    engine = script.engine(A, B)
    for group, member, turn in itertools.product(range(6), range(4), range(2)):
        await engine.agenerate(
            ModelRequest([1], session=f"{group}{member}", call=f"{group}-{member}.{turn}")
        )
    hosts = [url for url, _ in script.requests]
    assert all(len({*hosts[k : k + 8]}) == 1 for k in range(0, 48, 8))
    assert Counter(hosts) == {hosts[0]: 24, hosts[8]: 24}
    assert ModelRequest([1], session="s", call="eval-7-0.1").affinity == "s"
    assert ModelRequest([1], session="s", call="by hand.1").affinity == "s"


@pytest.mark.anyio
async def test_turns_of_a_conversation_go_to_one_server():
    """All requests of a session go to one server, and different sessions are spread over all servers."""
    script = Script(generated([5]))
    engine = script.engine(A, B)
    for session in "abcdefghijkl" * 3:
        await engine.agenerate(ModelRequest([1], session=session))
    hosts = [url for url, _ in script.requests]
    assert hosts[:12] == hosts[12:24] == hosts[24:]
    assert len(set(hosts)) == 2


@pytest.mark.anyio
async def test_a_dead_server_hands_over():
    """If a server fails, another server continues the completion, and `regenerated` counts the segment that was
    repeated."""
    script = Script(generated([4], "abort"), httpx.ConnectError("refused"), generated([5]))
    response = await script.engine(A, B).agenerate(request())
    first, dead, alive = (url for url, body in script.requests if url.endswith("/generate"))
    assert first == dead != alive
    assert response.output_tokens == [4, 5]
    assert response.regenerated == 1


# Control


class Executor:
    """A fake WorkflowExecutor that appends each of the engine's calls to `script.requests`."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: self.script.requests.append(
            (f"executor/{name}", {"args": args})
        )


def test_the_order_of_a_weight_update(tmp_path: Path):
    """pause() pauses the rollouts before the servers, and resume() resumes the servers before the rollouts."""
    (tmp_path / "v1").mkdir()
    script = Script(generated([1]))
    engine = script.engine(A)
    engine.executor = Executor(script)
    engine.pause()
    engine.update_weights(WeightUpdateMeta(path=str(tmp_path), version=1))
    engine.set_version(1)
    engine.resume()
    assert [url.removeprefix(A).lstrip("/") for url, _ in script.requests] == [
        "executor/pause",
        "workers",
        "pause_generation",
        "update_weight_version",
        "update_weights_from_disk",
        "executor/on_new_version",
        "continue_generation",
        "executor/resume",
    ]
    assert script.sent("/pause_generation") == [{"mode": "retract"}]
    assert engine.get_version() == 1


def test_released_memory_comes_back_before_the_weights(tmp_path: Path):
    """`release_memory` pauses the servers before they release their memory. After `release_memory`, the next weight
    update makes the servers allocate their memory, and then sends the weights. The weight update does not pause servers
    that `release_memory` has paused. The engine never resumes a server that has no weights."""
    (tmp_path / "v1").mkdir()
    script = Script(generated([1]))
    engine = script.engine(A)
    engine.release_memory()
    engine.pause()
    engine.update_weights(WeightUpdateMeta(path=str(tmp_path), version=1))
    engine.resume()
    assert [url.removeprefix(A).lstrip("/") for url, _ in script.requests] == [
        "workers",
        "pause_generation",
        "release_memory_occupation",
        "resume_memory_occupation",
        "update_weight_version",
        "update_weights_from_disk",
        "continue_generation",
    ]
    engine.release_memory()
    engine.destroy()
    assert script.requests[-1][0] == A + "/release_memory_occupation"


def test_a_server_without_spans_is_paused_by_abort(caplog: pytest.LogCaptureFixture):
    """If a server reports no spans, `initialize` changes the pause mode to `abort` and logs one warning."""
    script = Script(without_spans([1], "length", 0))
    engine = script.engine(A, B)
    engine.initialize()
    engine.pause()
    assert script.sent("/pause_generation") == [{"mode": "abort"}] * 2
    assert sum(record.message.count("no weight_versions") for record in caplog.records) == 1


@pytest.mark.anyio
async def test_without_spans_a_segment_has_one_version():
    """In pause mode `abort` a weight update ends every running segment. Each segment has tokens of only one version, so
    the engine needs no spans to label the tokens correctly."""
    script = Script(without_spans([4, 5], "abort", 0), without_spans([6], "stop", 1))
    response = await script.engine(pause_mode="abort").agenerate(request())
    assert response.output_versions == [0, 0, 1]


def test_initialize_learns_the_limits(tmp_path: Path):
    """The engine uses the smallest vocabulary and context length that any server reports."""
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


def test_failing_servers_are_all_named():
    """A control call, such as pause, waits for every server, and then raises one error that names all failing
    servers."""

    def serve(http_request: httpx.Request) -> httpx.Response:
        if http_request.url.host == "a":
            return httpx.Response(200, json={"status": "ok"})
        return httpx.Response(500, text="boom")

    engine = RemoteInfEngine([A, B, "http://c"], transport=httpx.MockTransport(serve))
    with pytest.raises(
        RuntimeError, match=r"http://b/pause_generation .*; http://c/pause_generation "
    ) as caught:
        engine.pause()
    assert "http://a" not in str(caught.value)


def test_destroy_leaves_no_server_paused():
    """If a run ends between pause and resume, `destroy` resumes the servers. A second `destroy` has no effect."""
    script = Script(generated([1]))
    engine = script.engine(A)
    engine.executor = Executor(script)
    engine.pause()
    engine.destroy()
    assert script.paths()[-3:] == ["/pause_generation", "/continue_generation", "executor/destroy"]
    script.requests.clear()
    engine.destroy()
    assert script.paths() == ["executor/destroy"]


def test_rollouts_need_an_executor():
    """The rollout methods call the executor, and they raise an error if no executor is attached."""
    script = Script(generated([1]))
    engine = script.engine(A)
    for method in (
        engine.submit,
        engine.wait,
        engine.wait_for_task,
        engine.rollout_batch,
        engine.prepare_batch,
    ):
        with pytest.raises(RuntimeError, match="attach a WorkflowExecutor"):
            method(1)
    engine.executor = Executor(script)
    engine.submit("data", is_eval=True)
    assert script.requests == [("executor/submit", {"args": ("data",)})]


def test_an_engine_needs_a_server():
    """Constructing an engine without a server's address raises an error."""
    with pytest.raises(ValueError, match="needs the address"):
        RemoteInfEngine([])


def test_an_engine_refuses_an_unknown_pause_mode():
    """Constructing an engine with an unknown pause mode raises an error."""
    with pytest.raises(ValueError, match="pause_mode is retract, abort or in_place, not 'stop'"):
        RemoteInfEngine([A], pause_mode="stop")


# Connections


class CountingServer(BaseHTTPRequestHandler):
    """A server that counts its connections. Each connection has its own thread, and `server_close` waits for all
    threads."""

    protocol_version = "HTTP/1.1"
    connections = 0

    def setup(self) -> None:
        type(self).connections += 1
        super().setup()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        content = generated([1, 2]).content
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def test_connections_are_reused_and_end_with_their_loop():
    """The engine opens one connection per concurrent request, reuses the connections, and closes them when the event
    loop ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), CountingServer)
    server.daemon_threads = False  # without daemon threads, server_close waits for all threads
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    engine = RemoteInfEngine([f"http://127.0.0.1:{server.server_port}"])

    async def rounds_of_four() -> None:
        for _ in range(5):
            await asyncio.gather(*(engine.agenerate(ModelRequest([1])) for _ in range(4)))

    asyncio.run(rounds_of_four())
    assert CountingServer.connections == 4
    engine.destroy()
    server.shutdown()
    serving.join()
    server.server_close()


def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch):
    """A connection that is idle for KEEPALIVE seconds is closed, so that its file descriptor is free again."""
    monkeypatch.setattr(wire, "KEEPALIVE", 1.0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), CountingServer)
    threading.Thread(target=server.serve_forever).start()
    url = f"http://127.0.0.1:{server.server_port}/generate"

    async def burst() -> None:
        before = len(os.listdir("/dev/fd"))
        async with contextlib.aclosing(wire.make_transport()) as transport:
            requests = [httpx.Request("POST", url, content=b"{}") for _ in range(8)]
            answers = await asyncio.gather(*map(transport.handle_async_request, requests))
            for answer in answers:
                await answer.aread()
                await answer.aclose()
            assert idle_connections(transport)
            async with asyncio.timeout(30):
                while (
                    idle_connections(transport) or len(os.listdir("/dev/fd")) > before + 8
                ):  # the server may need some time to close its sockets
                    await asyncio.sleep(0.01)

    asyncio.run(burst())
    server.shutdown()
    server.server_close()


# A real server


@pytest.fixture
def real_engine(tiny_server: str):
    engine = RemoteInfEngine([tiny_server])
    try:
        engine.initialize()
        yield engine
    finally:
        engine.destroy()


def forward_logprobs(model_dir: Path, ids: list[int]) -> torch.Tensor:
    """Return log p(ids[t] | ids[:t]) for each position t, computed by transformers in float32. The returned value for
    position 0 is 0."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        logp = model(torch.tensor([ids])).logits[0].log_softmax(-1)  # (T, V)
    taken = logp[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]  # (T - 1,)
    return torch.cat([torch.zeros(1), taken])  # (T,)


@pytest.mark.parametrize("pause_mode", ["retract", "abort"])
def test_every_logprob_is_that_of_the_weights_it_names(
    real_engine: RemoteInfEngine,
    tiny_model_dir: Path,
    other_model_dir: Path,
    tmp_path: Path,
    pause_mode: str,
):
    """Each token's logprob agrees with a forward pass that uses the weights of the token's version, even if a weight
    update interrupts the completion."""
    real_engine.pause_mode = pause_mode
    models = {0: tiny_model_dir, 1: other_model_dir}
    prompts = [[5, 6, 7, 8 + i] for i in range(4)]

    def update(engine: RemoteInfEngine, version: int) -> None:
        link = tmp_path / f"v{version}"
        link.symlink_to(models[version], target_is_directory=True)
        engine.pause()
        engine.update_weights(WeightUpdateMeta(path=str(tmp_path), version=version))
        engine.set_version(version)
        engine.resume()
        link.unlink()

    async def generate_through_an_update() -> list[Any]:
        gconfig = GenerationHyperparameters(max_new_tokens=400, seed=0)
        tasks = [
            asyncio.create_task(real_engine.agenerate(ModelRequest(prompt, gconfig=gconfig)))
            for prompt in prompts
        ]
        first = ModelRequest([1, 2], gconfig=GenerationHyperparameters(max_new_tokens=8))
        await real_engine.agenerate(
            first
        )  # all `tasks` are running when the answer to `first` arrives
        await asyncio.to_thread(update, real_engine, 1)
        return await asyncio.gather(*tasks)

    responses = asyncio.run(generate_through_an_update())
    update(
        RemoteInfEngine(real_engine.addresses), 0
    )  # `real_engine` accepts no version below its own
    assert any(len(set(response.output_versions)) == 2 for response in responses)
    for response in responses:
        assert response.output_versions == sorted(response.output_versions)
        ids = response.input_tokens + response.output_tokens
        by_version = {
            v: forward_logprobs(path, ids)[response.input_len :] for v, path in models.items()
        }
        for t, (logprob, version) in enumerate(
            zip(response.output_logprobs, response.output_versions, strict=True)
        ):
            assert logprob == pytest.approx(by_version[version][t].item(), abs=1e-4)


def test_score_is_the_forward_pass(real_engine: RemoteInfEngine, tiny_model_dir: Path):
    """`score` returns the logprobs that a forward pass of transformers computes for the given tokens."""
    for ids in [5, 6, 7], list(range(1, 40)), [3, 1]:
        [scores] = real_engine.score(ids)
        assert scores == pytest.approx(forward_logprobs(tiny_model_dir, ids).tolist(), abs=1e-4)


def test_one_seed_one_answer(real_engine: RemoteInfEngine):
    """A real server generates the same tokens for the same seed, even if the requests come from two event loops."""
    gconfig = GenerationHyperparameters(max_new_tokens=16, seed=5)
    ask = ModelRequest([9, 8, 7], gconfig=gconfig)
    first, second = (asyncio.run(real_engine.agenerate(ask)) for _ in range(2))
    assert first.output_tokens == second.output_tokens


# Streaming


def in_events(*events: httpx.Response) -> bytes:
    """Return the body of a stream of server-sent events, with one event for each of the given answers."""
    return b"".join(b"data: " + event.content + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def answered(content: bytes, failure: Exception | None = None) -> httpx.Response:
    """Return a streamed answer with this body. If `failure` is given, the stream raises `failure` after the body."""

    async def body() -> Any:
        for i in range(0, len(content), 7):  # the body arrives in pieces of at most 7 bytes
            yield content[i : i + 7]
        if failure:
            raise failure

    return httpx.Response(200, content=body(), headers={"content-type": "text/event-stream"})


def streamed(*events: httpx.Response) -> httpx.Response:
    """Return a streamed answer with these events."""
    return answered(in_events(*events))


def partial(tokens: list[int], **meta: Any) -> httpx.Response:
    """Return an event that is not the last event of a stream. An event contains all tokens that were generated so
    far."""
    return generated(tokens, **meta, finish_reason=None)


@pytest.mark.anyio
async def test_a_stream_tells_every_token_as_it_comes():
    """The engine reports every new token to `on_tokens`, and streaming does not change the final response."""
    script = Script(
        streamed(partial([4]), partial([4, 5]), generated([4, 5, 6], spans=[(0, 2), (1, 1)]))
    )
    heard: list[list[int]] = []
    response = await script.engine().agenerate(
        request(), lambda r: heard.append(list(r.output_tokens))
    )
    assert heard == [[4], [4, 5], [4, 5, 6]]
    assert (response.output_tokens, response.output_versions) == ([4, 5, 6], [0, 0, 1])
    assert (response.output_logprobs, response.stop_reason) == ([-4.0, -5.0, -6.0], "stop")
    assert script.sent()[0]["stream"] is True


@pytest.mark.anyio
@pytest.mark.parametrize("cut", ["abort", "503"])
async def test_what_was_streamed_is_kept(cut: str):
    """If a stream ends too early, the engine continues the completion after the last token that arrived."""
    first = {
        "abort": streamed(partial([4]), generated([4, 5], "abort")),
        "503": streamed(
            partial([4]), partial([4, 5]), httpx.Response(200, json={"success": False})
        ),
    }[cut]
    script = Script(first, streamed(partial([6]), generated([6, 7], spans=[(1, 2)])))
    heard: list[list[int]] = []
    response = await script.engine().agenerate(
        request(), lambda r: heard.append(list(r.output_tokens))
    )
    assert response.output_tokens == heard[-1] == [4, 5, 6, 7]
    assert response.output_versions == [0, 0, 1, 1]
    assert all(later[: len(before)] == before for before, later in itertools.pairwise(heard))
    assert script.sent()[1]["input_ids"] == [1, 2, 3, 4, 5]


WHOLE = {  # stop reason -> body of the whole stream
    "stop": in_events(partial([4]), partial([4, 5]), generated([4, 5, 6], "stop")),
    "length": in_events(partial([4]), partial([4, 5, 6]), generated([4, 5, 6], "length")),
}


@given(
    st.sampled_from(["stop", "length"]),
    st.data(),
    st.sampled_from([None, httpx.ReadError("reset")]),
)
def test_a_stream_may_break_anywhere(end: str, data: st.DataObject, failure: Exception | None):
    """Wherever a stream breaks, no token is lost or repeated, and no token is added after the end of the completion."""
    content = WHOLE[end][: data.draw(st.integers(0, len(WHOLE[end])))]
    wanted = request(max_new_tokens=3 if end == "length" else 64)

    async def rest() -> httpx.Response:
        tokens = [4, 5, 6][len(script.sent()[-1]["input_ids"]) - 3 :]
        return streamed(
            generated(tokens or [7, 8], end)
        )  # a request for a fourth token gets the tokens 7 and 8

    script = Script(answered(content, failure), rest)
    heard: list[list[int]] = []
    response = asyncio.run(
        script.engine().agenerate(wanted, lambda r: heard.append(list(r.output_tokens)))
    )
    assert (response.output_tokens, response.stop_reason) == (heard[-1], end) == ([4, 5, 6], end)
    assert all(later[: len(before)] == before for before, later in itertools.pairwise(heard))


@pytest.mark.anyio
async def test_who_stops_listening_tells_the_server():
    """If a caller is cancelled in the middle of a stream, the engine sends /abort_request to the server."""
    heard = asyncio.Event()

    async def endless() -> Any:
        yield b"data: " + partial([4]).content + b"\n\n"
        await asyncio.Event().wait()

    async def answer() -> httpx.Response:
        return httpx.Response(200, content=endless(), headers={"content-type": "text/event-stream"})

    script = Script(answer)
    task = asyncio.create_task(script.engine().agenerate(request(), lambda r: heard.set()))
    await heard.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert script.sent("/abort_request") == [{"rid": "r-0"}]


def refused(status: int, tokens: int = 0) -> httpx.Response:
    """Return the answer that SGLang's scheduler sends when it refuses a request after `tokens` generated tokens."""
    reason = {"type": "abort", "message": "no such thing", "status_code": status, "err_type": None}
    return generated(list(range(tokens)), finish_reason=reason, output_token_logprobs=[])


def error_event(status: int) -> httpx.Response:
    """Return the answer that SGLang sends when it refuses a request before the request reaches the scheduler."""
    error = {
        "message": "no such thing",
        "type": "invalid_request_error",
        "code": status,
        "retryable": False,
    }
    return httpx.Response(200, json={"error": error})


@pytest.mark.anyio
@pytest.mark.parametrize("on_tokens", [None, lambda _: None])
@pytest.mark.parametrize("event", [error_event(400), refused(400), refused(400, tokens=1)])
async def test_a_stream_is_refused_as_a_whole_answer_is(event: httpx.Response, on_tokens: Any):
    """A refusal inside a stream raises the same error as an unstreamed refusal with status 400, and the engine does not
    retry."""
    script = Script(streamed(event) if on_tokens else event, generated([9]))
    with pytest.raises(EngineError, match="no such thing") as caught:
        await script.engine().agenerate(request(), on_tokens)
    assert caught.value.status == 400
    assert len(script.requests) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("event", [error_event(503), refused(503), refused(500, tokens=1)])
async def test_a_server_that_has_no_room_is_no_pause(event: httpx.Response):
    """If an aborted answer contains a 5xx status, the server has failed: the engine keeps the tokens, waits, and
    retries."""
    script = Script(streamed(partial([4]), event), streamed(event), streamed(event), generated([9]))
    with pytest.raises(EngineError, match="no such thing") as caught:
        await script.engine(request_retries=2).agenerate(request(), lambda _: None)
    assert caught.value.status == 503
    assert [body["input_ids"] for body in script.sent()] == [[1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]]


@pytest.mark.anyio
async def test_a_grammar_is_asked_for_where_there_is_one():
    """The engine sends json_schema only to servers with a grammar backend, and refuses the request if there is no
    such server."""
    script = Script(generated([1]))
    engine = script.engine()
    with pytest.raises(EngineError, match="no grammar") as caught:
        await engine.agenerate(request(json_schema="{}"))
    assert (caught.value.status, script.requests) == (400, [])
    engine.has_grammar = True
    response = await engine.agenerate(request(json_schema="{}", presence_penalty=0.5))
    assert script.sent()[0]["sampling_params"]["json_schema"] == "{}"
    assert script.sent()[0]["sampling_params"]["presence_penalty"] == 0.5
    assert not response.trains_exactly


def test_streaming_is_not_streaming(real_engine: RemoteInfEngine):
    """With the same seed, a streamed and an unstreamed request return the same tokens, logprobs and versions."""
    gconfig = GenerationHyperparameters(max_new_tokens=40, seed=5)
    ask = ModelRequest([9, 8, 7], gconfig=gconfig)

    lengths: list[int] = []

    async def both() -> None:
        await real_engine.agenerate(
            ask
        )  # the server caches the prompt, which may change a logprob's last bit
        whole = await real_engine.agenerate(ask)
        for _ in range(3):
            lengths.append(0)
            assert await real_engine.agenerate(ask, lambda r: lengths.append(r.output_len)) == whole
            assert lengths == sorted(lengths)
            assert lengths[-1] == whole.output_len
            lengths.clear()
        transport: Any = await real_engine._wire._transports.get()
        assert idle_connections(transport) == 1

    asyncio.run(both())
