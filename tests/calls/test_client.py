"""OpenAIProxyClient and ArealOpenAI: two ways to a session, which export the sampled tokens."""

import itertools
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from conftest import Session
from harness import HELLO, ScriptedEngine

from calls.client import OpenAIProxyClient
from engine import EngineError
from extras.direct import ArealOpenAI
from inference.servers import Servers
from proxy import Proxy, create_app

pytestmark = pytest.mark.anyio


@pytest.fixture
def proxy(tiny_tokenizer: Any) -> Proxy:
    """A proxy whose engine answers "ok" to everything."""
    return Proxy(ScriptedEngine(tiny_tokenizer), tiny_tokenizer, "admin")


@pytest.fixture
async def http(proxy: Proxy) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(proxy))) as client:
        yield client


@pytest.fixture
async def client(proxy: Proxy) -> OpenAIProxyClient:
    session: Any = Session(httpx.ASGITransport(create_app(proxy)))
    client = OpenAIProxyClient(Servers("http://proxy/", "admin", session), "task-0")
    assert await client.grant_capacity() == 1
    return client


async def talk(http: httpx.AsyncClient, client: OpenAIProxyClient, turns: int) -> list[str]:
    """A conversation of `turns` turns. Return the ids of the completions."""
    messages, ids = list(HELLO), []
    for _ in range(turns):
        url = client.session_url + "/chat/completions"
        completion = (await http.post(url, json={"messages": messages})).json()
        ids.append(completion["id"])
        messages += [completion["choices"][0]["message"], {"role": "user", "content": "more"}]
    return ids


async def test_an_episode(http: httpx.AsyncClient, client: OpenAIProxyClient) -> None:
    """The interactions of a session are exported once, with their rewards and parents."""
    async with client:
        first, second = await talk(http, client, 2)
        await client.set_last_reward(1)
        await client.set_reward(first, 0.5)
    assert client.rewarded_count == 2
    rows = await client.export_interactions(discount=0.5)
    assert list(rows) == [first, second]
    assert [row.reward for row in rows.values()] == [1.0, 1.0]
    assert rows[second].parent is rows[first]
    assert rows[second].messages[:2] == [*HELLO, {"role": "assistant", "content": "ok"}]
    with pytest.raises(EngineError, match="answered 404"):
        await client.export_interactions()


@pytest.mark.parametrize("is_lost", [False, True])
async def test_an_agent_that_raises_leaves_nothing_behind(
    http: httpx.AsyncClient, client: OpenAIProxyClient, proxy: Proxy, is_lost: bool
) -> None:
    """The caller gets the agent's error, even if the proxy cannot end the session."""

    async def episode() -> None:
        async with client:
            await talk(http, client, 1)
            if is_lost:
                proxy.sessions.clear()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await episode()
    assert not proxy.sessions


async def test_a_lost_session_is_an_error(client: OpenAIProxyClient, proxy: Proxy) -> None:
    """The episode fails, although the agent has succeeded."""
    with pytest.raises(EngineError, match="unknown"):
        async with client:
            proxy.sessions.clear()


async def test_a_wrong_reward_is_an_error_of_the_episode(
    http: httpx.AsyncClient, client: OpenAIProxyClient
) -> None:
    """NaN and an unknown interaction are errors, and no reward is stored."""
    async with client:
        await talk(http, client, 1)
        with pytest.raises(ValueError, match="finite"):
            await client.set_last_reward(float("nan"))
        with pytest.raises(EngineError, match="chatcmpl-x"):
            await client.set_reward("chatcmpl-x", 1.0)
    assert client.rewarded_count == 0


# ---- ArealOpenAI


async def say(client: ArealOpenAI, *texts: str, **options: Any) -> Any:
    """Ask for a completion. The texts are those of the user and the assistant in turn."""
    roles = itertools.cycle(("user", "assistant"))
    messages: Any = [{"role": role, "content": text} for role, text in zip(roles, texts)]
    return await client.chat.completions.create(model="default", messages=messages, **options)


@pytest.fixture
def direct(tiny_tokenizer: Any) -> Any:
    """make(*texts, **options): a client, and its engine, which answers with these texts."""

    def make(*texts: str, **options: Any) -> tuple[ArealOpenAI, ScriptedEngine]:
        engine = ScriptedEngine(tiny_tokenizer, *texts)
        return ArealOpenAI(engine, tiny_tokenizer, **options), engine

    return make


async def test_a_stream_and_other_options_are_the_same_session(direct: Any) -> None:
    """A copy of a client (`with_options`, `copy`) enters its calls in the same tree."""
    client, _ = direct("one", "two", seed=1)
    body: Any = {"model": "m", "messages": [{"role": "user", "content": "count"}], "stream": True}
    stream = await client.with_options(timeout=5).chat.completions.create(**body)
    deltas = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]
    text = "".join(filter(None, deltas))
    await say(client.copy(max_retries=3), "count", text, "go on")
    assert [interaction.turn_id for interaction in client.cache.values()] == [0, 1]


# ---- where AReaL's own client fails (docs/differences.md)


async def test_a_failed_call_leaves_nothing_in_the_tree(direct: Any) -> None:
    """A call that fails raises the SDK's error, and the next call gets the reward."""
    client, engine = direct()
    with pytest.raises(openai.BadRequestError, match="messages"):
        await client.chat.completions.create(model="m", messages=[])
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        await say(client, "hello", max_tokens=0)
    engine.error = EngineError("no server answered", 503)
    with pytest.raises(openai.InternalServerError, match="no server answered"):
        await say(client, "hello")
    assert not client.cache
    engine.error = None
    await say(client, "hello")
    client.set_last_reward(1.0)  # the only finished call gets the reward
    assert [row.reward for row in client.export_completions().values()] == [1.0]
