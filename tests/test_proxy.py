"""The proxy answers an agent as an OpenAI server does, and exports exactly the sampled tokens to
the trainer."""

import asyncio
import itertools
import os
import re
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import httpx
import orjson
import pytest
from conftest import ROOT
from harness import ADMIN, HELLO, Connection, Harness, reply_message, sdk, tool, with_template
from runs import begin

import calls.sessions
from cache import Interaction
from calls.prompts import PromptBuilder
from calls.replies import PROTOCOLS
from engine import EngineError
from inference.io_struct import ModelRequest, ModelResponse, call_seed
from proxy import LONG, main, write_rows

pytestmark = pytest.mark.anyio

Start = Callable[..., Harness]


# ---- tokens


async def test_history_that_tokenises_otherwise_keeps_its_sampled_tokens(
    start: Start, tiny_tokenizer: Any
) -> None:
    """The model may sample tokens that differ from the tokenizer's encoding of the same text."""
    prompts, harness = PromptBuilder(tiny_tokenizer), start()
    session = await harness.start()
    odd = [*tiny_tokenizer.encode("a"), tiny_tokenizer.pad_token_id, *tiny_tokenizer.encode("b")]

    async def sample(request: ModelRequest) -> ModelResponse:
        harness.engine.requests.append(request)
        return ModelResponse(request.input_ids, odd, [-1.0] * 3, [0] * 3, "length")

    harness.engine.agenerate = sample  # type: ignore[method-assign]
    assert reply_message(await harness.chat(session, HELLO))["content"] == "ab"
    then = {"role": "user", "content": "?"}
    await harness.chat(session, [*HELLO, {"role": "assistant", "content": "ab"}, then])
    first, second = (request.input_ids for request in harness.engine.requests)
    assert second[: len(first) + 3] == first + odd
    assert first == prompts.prompt(Interaction(HELLO))


THINKS = {  # like Qwen's template, like DeepSeek's, and one without <think> after a tool's result
    "enable_thinking": "{% if enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}",
    "thinking": "{% if thinking %}<think>{% else %}</think>{% endif %}",
    "unknown": "{% if messages[-1].role != 'tool' %}<think>\n{% endif %}",
}


@pytest.mark.parametrize("switch", THINKS)
@pytest.mark.parametrize("on", [None, True, False])
@pytest.mark.parametrize("forced", [True, False])
async def test_each_prompt_says_whether_it_has_begun_the_reasoning(
    start: Start, tiny_tokenizer: Any, switch: str, on: bool | None, forced: bool
) -> None:
    """If the prompt ends with <think>, the beginning of the answer is reasoning."""
    head = "<|im_start|>assistant\n"
    template = tiny_tokenizer.chat_template.replace(head, head + THINKS[switch])
    own = with_template(tiny_tokenizer, template)
    harness = start(tokenizer=own)
    session, messages = await harness.start(), list(HELLO)
    variables = {} if on is None else {switch: on}
    tools = [tool("f")]
    tools[0]["function"]["strict"] = True  # openai before 3.0 streams no others
    options: Any = {"tools": tools, "extra_body": {"chat_template_kwargs": variables}}
    options |= {"tool_choice": "required"} if forced else {}
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    how: Any = variables | {"add_generation_prompt": True, "tokenize": False}
    for _ in range(2):
        prompt = own.apply_chat_template(messages, **how)
        inside = prompt.rstrip().endswith("<think>")
        text = f"hm</think>ok{call}" if inside else f"ok{call}"
        harness.engine.texts = ["{}}\n</tool_call>" if forced else text]
        async with (
            sdk(harness, f"/{session}/v1") as client,
            client.chat.completions.stream(model="m", messages=messages, **options) as events,
        ):
            message: Any = (await events.get_final_completion()).choices[0].message.to_dict()
        assert message["tool_calls"][0]["function"]["name"] == "f"
        assert message.get("content") == (None if forced else "ok")
        assert message.get("reasoning_content") == ("hm" if inside and not forced else None)
        sent = own.decode(harness.engine.requests[-1].input_ids).rpartition(head)[2]
        rendered = prompt.rpartition(head)[2]
        assert sent.count("</think>") == rendered.count("</think>") + (inside and forced)
        result = {"role": "tool", "content": "r", "tool_call_id": message["tool_calls"][0]["id"]}
        messages += [message, result]


async def test_a_long_prompt_keeps_nobody_waiting(start: Start) -> None:
    """A thread tokenises a long prompt. Meanwhile the proxy answers other calls."""
    harness, answered = start(), threading.Event()
    session, make = await harness.start(), harness.proxy.prompts.prompt

    def make_slowly(call: Interaction) -> list[int]:
        assert call.messages == HELLO or answered.wait(30)
        return make(call)

    harness.proxy.prompts.prompt = make_slowly  # type: ignore[method-assign]
    long = asyncio.ensure_future(harness.chat(session, [HELLO[0] | {"content": "w " * LONG}]))
    await harness.chat(await harness.start(), HELLO)
    answered.set()
    await long


# ---- sampling


async def test_the_agents_parameters_win(start: Start, tiny_tokenizer: Any) -> None:
    """The engine gets each sampling parameter that the agent sets."""
    harness = start(sampling={"max_new_tokens": 9})
    session = await harness.start()
    await harness.chat(session, HELLO)
    own: Any = {"temperature": 0.5, "top_p": 0.9, "max_completion_tokens": 3, "stop": "x"}
    await harness.chat(session, HELLO, **own)
    default, asked = (request.gconfig for request in harness.engine.requests)
    assert default.trains_exactly
    assert (default.temperature, default.max_new_tokens, default.seed) == (1.0, 9, None)
    assert default.stop_token_ids == [tiny_tokenizer.eos_token_id]
    assert (asked.temperature, asked.top_p, asked.max_new_tokens) == (0.5, 0.9, 3)
    assert asked.stop == ["x"]
    rows = [call["tensors"] for call in (await harness.export(session)).values()]
    assert [any(row["loss_mask"]) for row in rows] == [True, False]


async def test_a_session_may_have_default_values_of_its_own(start: Start) -> None:
    """A session's defaults replace the proxy's, for example in an evaluation. The agent's own
    parameters still win."""
    harness = start(sampling={"temperature": 0.9, "max_new_tokens": 9})
    for sampling in (None, {"temperature": 0.0, "max_new_tokens": 5}, {"greedy": True}):
        session = await harness.start(sampling=sampling)
        await harness.chat(session, HELLO)
        await harness.chat(session, HELLO, temperature=0.5, max_completion_tokens=3)
    used = [request.gconfig for request in harness.engine.requests]
    found = [(one.temperature, one.max_new_tokens) for one in used]
    assert found == [(0.9, 9), (0.5, 3), (0.0, 5), (0.5, 3), (0.9, 9), (0.5, 3)]
    assert [one.is_greedy for one in used] == [False, False, True, False, True, False]
    body = {"task_id": "t", "sampling": {"temprature": 0.0}}
    answer = await harness.post("/rl/start_session", body, headers=ADMIN)
    assert (answer.status_code, "temprature" in answer.text) == (400, True)


async def test_the_same_run_asks_for_the_same_noise(start: Start) -> None:
    """The seed of a call depends only on three things: the seed of the proxy or the agent, the id
    of the task, and the number of the call. So the members of a group differ even if the agent
    always sends 42."""

    async def seeds(task_id: str, **sent: int) -> list[int | None]:
        """The seeds of two calls at a new proxy."""
        harness = start(seed=1)
        await harness.start("another")
        session = await harness.start(task_id)
        for _ in range(2):
            await harness.chat(session, HELLO, **sent)
        return [request.gconfig.seed for request in harness.engine.requests]

    assert await seeds("7") == await seeds("7") == [call_seed(1, "7", 0), call_seed(1, "7", 1)]
    assert await seeds("7", seed=42) == [call_seed(42, "7", 0), call_seed(42, "7", 1)]
    assert len({*(await seeds("7")), *(await seeds("8"))}) == 4


async def test_one_call_if_the_agent_wants_one(start: Start) -> None:
    """An agent that cannot do two things at once sees only the first of two tool calls."""
    harness = start(*['<tool_call>{"name": "f"}</tool_call>' * 2] * 2)
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    for one in ({"parallel_tool_calls": False}, {"tool_choice": choice}):
        reply = await harness.chat(await harness.start(), HELLO, tools=[tool("f")], **one)
        assert len(reply_message(reply)["tool_calls"]) == 1


# ---- replies


@pytest.mark.parametrize("path", ["/{}/v1", "/{}", "/v1", ""])
async def test_the_official_sdk_is_served_by_url_or_by_key(start: Start, path: str) -> None:
    """A client names its session in the URL or as the API key."""
    harness = start("hi there")
    session = await harness.start()
    api_key = "DUMMY" if "{}" in path else session
    async with sdk(harness, path.format(session), api_key) as client:
        completion = await client.chat.completions.create(model="policy", messages=HELLO)
    assert completion.choices[0].message.content == "hi there"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.model == "policy"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == len("hi there") + 1
    assert list(await harness.export(session)) == [completion.id]


async def test_x_api_key_serves_too(start: Start) -> None:
    """Anthropic's SDK sends this header."""
    harness = start()
    url, key = "/v1/chat/completions?beta=true", {"x-api-key": await harness.start()}
    answers = [await harness.post(url, {"messages": HELLO}, headers=h) for h in (key, {})]
    assert [answer.status_code for answer in answers] == [200, 404]


# ---- wrong requests

KINDS = ["application/json", "application/x-www-form-urlencoded", "text/plain"]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"messages": [', 400),
        (b"[1]", 400),
        (b"", 400),
        (b"\xff", 400),
        (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}', 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        (b'{"messages": [{"role": "user", "content": "hi"}], "n": 0}', 400),
        (b'{"messages": [{"role": "user", "content": "hi"}]}', 200),
    ],
)
@pytest.mark.parametrize("content_type", KINDS)
async def test_a_body_is_json_whatever_it_says_it_is(
    start: Start, content: bytes, status: int, content_type: str
) -> None:
    """The content type does not matter, because curl, for example, declares a form."""
    harness = start()
    session = await harness.start()
    path, headers = f"/{session}/v1/chat/completions", {"content-type": content_type}
    answer = await harness.http.post(path, content=content, headers=headers)
    assert answer.status_code == status
    if status != 200:
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert len(await harness.export(session)) == (status == 200)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (EngineError("the prompt has 9 tokens", 400), 400, "invalid_request_error"),
        (EngineError("http://10.0.0.1:30000/generate gave no answer", 503), 503, "server_error"),
        (EngineError("what is this"), 500, "server_error"),
    ],
)
async def test_an_engines_refusal_is_passed_on(
    start: Start, error: Exception, status: int, kind: str
) -> None:
    """The agent gets the status and the words of the error, but not the server's address. A request
    for a stream gets the same answer. The refused call leaves the tree."""
    harness = start()
    session = await harness.start()
    harness.engine.error = error
    for path, streams in itertools.product(("chat/completions", "messages"), (False, True)):
        body = {"messages": HELLO, "stream": streams}
        answer = await harness.post(f"/{session}/v1/{path}", body)
        words = str(error).replace("http://10.0.0.1:30000", "the server")
        said = {"message": words, "type": kind}
        assert (answer.status_code, answer.json()) == (status, {"type": "error", "error": said})
        assert not harness.proxy.find(session).cache
    harness.engine.error = None
    await harness.chat(session, HELLO)
    assert len(await harness.export(session)) == 1


async def test_a_template_that_refuses_is_a_400(start: Start, tiny_tokenizer: Any) -> None:
    """The agent gets the template's message, for example about the order of roles."""
    refusal = "{% if messages[0].role == 'tool' %}{{ raise_exception('no tool first') }}{% endif %}"
    own = with_template(tiny_tokenizer, refusal + tiny_tokenizer.chat_template)
    harness = start(tokenizer=own)
    body = {"messages": [{"role": "tool", "content": "2"}]}
    answer = await harness.post(f"/{await harness.start()}/v1/chat/completions", body)
    assert answer.status_code == 400
    assert "no tool first" in answer.json()["error"]["message"]


async def test_an_offer_of_another_protocol_is_refused(start: Start) -> None:
    """Java's client offers HTTP/2 by default. The proxy's web server would then read no body."""
    harness = start()
    offer, path = {"Upgrade": "h2c"}, f"/{await harness.start()}/v1/messages"
    answer = await harness.post(path, {"messages": []}, headers=offer)
    assert "only HTTP/1.1" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["rl/set_reward", "rl/end_session", "v1/chat/completions"])
async def test_without_a_session_no_body_is_read(start: Start, path: str) -> None:
    """The proxy refuses an unknown session before it reads the body, so a stranger causes no
    work."""
    call = Connection(start(), f"/nobody/{path}", {})
    assert (await call.status(), len(call.unread)) == (404, 1)
    await call.rest()


async def test_a_reward_that_makes_no_sense_is_a_400(start: Start) -> None:
    """The reward is not a finite number, or its interaction is unknown."""
    deep = "[" * 900 + "]" * 900
    texts = ["{}", *(f'{{"reward": {x}}}' for x in ("null", '"1.0"', "[1]", deep, "NaN", "1e999"))]
    ids = ('"chatcmpl-unknown"', '{"a": 1}', deep)
    texts += [f'{{"reward": 1, "interaction_id": {name}}}' for name in ids]
    harness = start()
    session = await harness.start()
    await harness.chat(session, HELLO)
    for text in texts:
        answer = await harness.http.post(f"/{session}/rl/set_reward", content=text)
        assert answer.status_code == 400, text
    ended = await harness.post(f"/{session}/rl/end_session")
    assert ended.json() == {"interaction_count": 1, "rewarded_count": 0}


async def test_a_path_that_is_not_there_is_answered_in_the_same_form(start: Start) -> None:
    """The answer names the path, because a wrong base_url is a common mistake."""
    harness = start()
    answers = [await harness.post("/set_env"), await harness.http.get("/grant_capacity")]
    assert [answer.status_code for answer in answers] == [404, 405]
    errors = [answer.json()["error"] for answer in answers]
    paths = [error["message"].split(":")[0] for error in errors]
    assert paths == ["POST /set_env", "GET /grant_capacity"]
    assert {error["type"] for error in errors} == {"invalid_request_error"}


# ---- sessions


@pytest.mark.parametrize("compaction", ["link", "cut"])
async def test_a_call_names_the_calls_that_it_reads(start: Start, compaction: str) -> None:
    """A header names the calls. A named call counts like a call whose answer is in the messages.
    With compaction=cut, only named and continued calls count."""
    harness = start()
    session, ids = await harness.start(compaction=compaction), list[str]()

    async def call(path: str, *names: str) -> httpx.Response:
        body, head = {"messages": HELLO, "input": HELLO}, {"x-pocket-areal-reads": ", ".join(names)}
        return await harness.post(f"/{session}/v1/{path}", body, headers=head)

    for path in PROTOCOLS:
        ids.append((await call(path, *ids)).json()["id"])
    refused = await call("messages", ids[0], "nobody")
    assert (refused.status_code, "no call 'nobody'" in refused.text) == (400, True)
    await harness.post(f"/{session}/rl/set_reward", {"reward": 1})
    exported = await harness.export(session, discount=0.5)
    found = [(exported[name]["reads"], exported[name]["reward"]) for name in ids]
    assert found == [([], 0.25), ([ids[0]], 0.5), ([ids[1]], 1.0)]


@pytest.mark.parametrize("path", ["/grant_capacity", "/rl/start_session", "/export_trajectories"])
async def test_management_needs_the_admin_key(start: Start, path: str) -> None:
    """Without a key the status is 401. With a wrong key, or the key of a session, it is 403. No
    version may be negative, because with version -1 the proxy would refuse every server's
    answer."""
    harness = start()
    assert (await harness.post("/set_version", {"version": -1}, headers=ADMIN)).status_code == 400
    assert (await harness.post(path)).status_code == 401
    for key in ("Bearer wrong", f"Bearer {await harness.start()}"):
        assert (await harness.post(path, headers={"Authorization": key})).status_code == 403


async def test_one_grant_starts_one_session(start: Start) -> None:
    """Without an unused grant a start gets a 429. A start that fails uses up no grant."""
    harness = start()

    async def begin(body: bytes = b'{"task_id": "t"}') -> httpx.Response:
        return await harness.http.post("/rl/start_session", content=body, headers=ADMIN)

    assert (await begin()).status_code == 429
    for capacity in (1, 2):
        granted = await harness.post("/grant_capacity", headers=ADMIN)
        assert granted.json() == {"capacity": capacity}
    for body in (b"{", b"{}", b'{"task_id": [1]}', b'{"task_id": "t", "sampling": {"x": 1}}'):
        assert (await begin(body)).status_code == 400
    first, second = [(await begin()).json() for _ in range(2)]
    assert first["session_id"] != second["session_id"]
    assert len(first["session_id"]) > 20
    assert first["api_key"] == first["session_id"]
    assert (await begin()).status_code == 429
    health = (await harness.http.get("/health")).json()
    assert health == {"status": "ok", "sessions": 2, "capacity": 0}


@pytest.mark.parametrize(("bound", "most"), [("MAX_CALLS", 2), ("MAX_BYTES", 300)])
async def test_a_session_has_a_bound(
    start: Start, monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    """A call beyond the bound gets status 413, and the session keeps its earlier calls. Other
    sessions are not affected."""
    monkeypatch.setattr(calls.sessions, bound, most)
    harness = start()
    for session in [await harness.start(), await harness.start()]:
        for _ in range(2):
            await harness.chat(session, HELLO)
        body = {"messages": [{"role": "user", "content": "x" * 300}]}
        assert (await harness.post(f"/{session}/v1/chat/completions", body)).status_code == 413
        assert len(await harness.export(session)) == 2


async def test_an_export_is_written_and_forgotten_row_by_row(start: Start) -> None:
    """A large export does not hold up other requests, and never has all rows and all their JSON in
    memory. The session itself is freed at once, without the garbage collector."""
    harness = start()
    session = await harness.start()
    ids = [(await harness.chat(session, HELLO))["id"] for _ in range(3)]
    await harness.post(f"/{session}/rl/end_session")
    forgotten = weakref.ref(harness.proxy.sessions[session])
    rows = harness.proxy.export_trajectories({"session_id": session})
    pieces = [(piece, len(rows)) async for piece in write_rows(rows)]
    assert [left for _, left in pieces] == [3, 2, 1, 0, 0]
    assert forgotten() is None
    assert [*orjson.loads(b"".join(piece for piece, _ in pieces))["interactions"]] == ids


@pytest.mark.parametrize("body", [{"style": "all"}, {"discount": "much"}, {"discount": None}])
async def test_a_wrong_export_loses_nothing(start: Start, body: dict[str, Any]) -> None:
    """The export of an open session is refused, and so is an export with a wrong argument. The
    session can still be exported afterwards."""
    harness = start()
    session = await harness.start()
    await harness.chat(session, HELLO)
    request: Any = {"path": "/export_trajectories", "headers": ADMIN}
    assert (await harness.post(body={"session_id": session}, **request)).status_code == 400
    await harness.post(f"/{session}/rl/end_session")
    assert (await harness.post(body={"session_id": session, **body}, **request)).status_code == 400
    assert len(await harness.export(session)) == 1


@pytest.mark.parametrize("discard", [True, False])
async def test_no_work_after_the_end(start: Start, discard: bool) -> None:
    """A call that is running when the session ends gets status 410, and is not counted. Later calls
    and rewards get 410, too, or 404 if the session was discarded. A discarded session is freed
    without the garbage collector."""
    harness = start()
    session = await harness.start()
    await harness.chat(session, HELLO)
    freed = weakref.ref(harness.proxy.sessions[session])
    harness.engine.started.clear()
    harness.engine.hold = asyncio.Event()
    call, body = f"/{session}/v1/chat/completions", {"messages": HELLO}
    running = asyncio.ensure_future(harness.post(call, body))
    await harness.engine.started.wait()
    for code in (200, 404 if discard else 200):
        ended = await harness.post(f"/{session}/rl/end_session", {"discard": discard})
        assert ended.status_code == code
        assert code == 404 or ended.json() == {"interaction_count": 1, "rewarded_count": 0}
    assert (await asyncio.wait_for(running, timeout=30)).status_code == 410
    assert harness.engine.cancelled.is_set()
    for path, later in ((call, body), (f"/{session}/rl/set_reward", {"reward": 1})):
        assert (await harness.post(path, later)).status_code == (404 if discard else 410)
    assert (freed() is None) == discard


# ---- the process


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--model-path", "/no/such/folder", "no tokenizer there"),
        ("--model-path", str(ROOT / "tests"), "no tokenizer there"),
        ("--port", "taken", "in use"),
        ("--hooks", '{"no.such.Hooks": {}}', "no"),
        ("--server", "not a url", "not a url"),
    ],
)
def test_a_proxy_that_cannot_start_says_why(
    option: str, value: str, message: str, tiny_model_dir: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The proxy prints one line, and exits with code 2."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = {"--server": "http://127.0.0.1:9", "--port": "0"}
        arguments |= {"--model-path": str(tiny_model_dir), "--admin-key": "secret"}
        arguments[option] = str(taken.getsockname()[1]) if value == "taken" else value
        assert main([word for pair in arguments.items() for word in pair]) == 2
    written = capsys.readouterr().err
    assert written.startswith("error: ")
    assert written.count("\n") == 1
    assert message in written


def test_the_proxy_process_never_imports_torch(tiny_model_dir: Any) -> None:
    """The import of torch takes seconds and a gigabyte of address space."""
    code = "import sys, proxy; proxy.load_tokenizer(sys.argv[1]).encode('a')\n"
    code += "sys.exit(sys.modules.get('torch') is not None)"
    subprocess.run([sys.executable, "-c", code, str(tiny_model_dir)], cwd=ROOT, check=True)


def test_an_admin_key_is_never_printed(tiny_model_dir: Any, tiny_server: str) -> None:
    """The key may come from the environment or from the command line."""
    command = [sys.executable, "proxy.py", "--server", tiny_server, "--port", "0"]
    command += ["--model-path", str(tiny_model_dir), "--exit-with-parent"]
    command += ["--admin-key", "s3cret of the option"]
    process = begin(command, os.environ | {"POCKET_AREAL_ADMIN_KEY": "s3cret"})
    line = process.stdout.readline() if process.stdout else ""
    process.terminate()
    rest, _ = process.communicate(timeout=60)
    assert re.fullmatch(r"proxy at http://127\.0\.0\.1:\d+\n", line)
    assert "s3cret" not in line + rest
