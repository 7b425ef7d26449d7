"""OpenAIProxyClient and ArealOpenAI: two ways to a session, which export the sampled tokens."""

import itertools
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import torch
from harness import ScriptedEngine

from calls.client import OpenAIProxyClient
from engine import EngineError
from extras.direct import ArealOpenAI
from inference.fields import Refusal
from proxy import create_app

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def app(tiny_tokenizer: Any) -> Any:
    """Its engine answers "ok" to everything."""
    return create_app(ScriptedEngine(tiny_tokenizer), tiny_tokenizer, "admin")


@pytest.fixture
async def http(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        yield client


@pytest.fixture
async def client(app: Any) -> OpenAIProxyClient:
    client = OpenAIProxyClient(httpx.ASGITransport(app), "http://proxy/", "admin", "task-0")
    assert await client.grant_capacity() == 1
    return client


async def talk(http: httpx.AsyncClient, client: OpenAIProxyClient, turns: int) -> list[str]:
    """Send the calls of a conversation of `turns` turns to the proxy, and return the ids of the
    completions."""
    messages, ids = list(HELLO), []
    for _ in range(turns):
        answer = await http.post(
            client.session_url + "/chat/completions", json={"messages": messages}
        )
        completion = answer.json()
        ids.append(completion["id"])
        messages += [completion["choices"][0]["message"], {"role": "user", "content": "more"}]
    return ids


async def test_an_episode(http: httpx.AsyncClient, client: OpenAIProxyClient) -> None:
    """The client exports an episode's interactions with their rewards and parents."""
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
    with pytest.raises(Refusal) as gone:
        await client.export_interactions()
    assert gone.value.status == 404


class CountingTransport(httpx.ASGITransport):
    """Records the paths of the requests."""

    paths: list[str]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(request.url.path)
        return await super().handle_async_request(request)


@pytest.mark.parametrize("rewards", [None, 2.0, {"first": 0.5, "last": 2.0}])
async def test_two_requests_do_what_five_do(
    http: httpx.AsyncClient, app: Any, rewards: Any
) -> None:
    """With `grant` and `finish`, a client sends only two requests for a whole session."""
    transport = CountingTransport(app)
    found = []
    for is_short in (False, True):
        transport.paths = []
        client = OpenAIProxyClient(transport, "http://proxy", "admin", "task", grant=is_short)
        if not is_short:
            await client.grant_capacity()
        async with client:
            ids = await talk(http, client, 2)
            named = dict(zip(ids, rewards.values())) if isinstance(rewards, dict) else {}
            if is_short:
                rows = await client.finish(named or rewards, discount=0.5, style="individual")
            for name, reward in named.items() if not is_short else ():
                await client.set_reward(name, reward)
            if rewards == 2.0 and not is_short:
                await client.set_last_reward(rewards)
        if not is_short:
            rows = await client.export_interactions(discount=0.5)
        assert list(rows) == ids
        assert rows[ids[1]].parent is rows[ids[0]]
        found.append(([row.to_lists() for row in rows.values()], client.rewarded_count))
    assert found[0] == found[1]
    assert transport.paths == ["/rl/start_session", "/export_trajectories"]
    assert len(app.state.proxy.sessions) == app.state.proxy.sessions.capacity == 0


@pytest.mark.parametrize("rewards", [{"chatcmpl-x": 1.0}, float("nan")])
async def test_a_refused_finish_discards_the_session(
    http: httpx.AsyncClient, app: Any, rewards: Any
) -> None:
    """If a reward given to `finish` is NaN or is for an unknown interaction, the episode fails and
    the proxy deletes the session."""

    async def episode() -> None:
        async with OpenAIProxyClient(
            httpx.ASGITransport(app), "http://proxy", "admin", "task", grant=True
        ) as client:
            await talk(http, client, 1)
            await client.finish(rewards)

    with pytest.raises((Refusal, ValueError), match=r"chatcmpl-x|finite"):
        await episode()
    assert len(app.state.proxy.sessions) == 0


async def test_the_tensors_are_the_exported_ones(
    http: httpx.AsyncClient, client: OpenAIProxyClient
) -> None:
    """With the documents' dtypes. The reward and the tokens are those of the last turn."""
    async with client:
        _, leaf = await talk(http, client, 2)
        await client.set_last_reward(1.0)
    (row,) = (await client.export_interactions(discount=0.5, style="concat")).values()
    assert (row.interaction_id, row.turn, row.reward) == (leaf, 1, 1.0)
    tensors = row.to_tensor_dict()
    ids = row.tokens.input_tokens + row.tokens.output_tokens
    assert tensors["input_ids"][0].tolist() == ids
    for name in ("input_ids", "loss_mask", "versions"):
        assert tensors[name].dtype == torch.int32
    assert tensors["attention_mask"].dtype == torch.bool
    assert tensors["logprobs"].dtype == torch.float32
    trained = tensors["loss_mask"] == 1
    assert tensors["turn_rewards"][trained].tolist() == [0.5] * 3 + [1.0] * 3
    assert tensors["turn_ids"][trained].tolist() == [0] * 3 + [1] * 3
    assert set(tensors["versions"][trained].tolist()) == {4}


async def test_an_agent_that_raises_leaves_nothing_behind(
    http: httpx.AsyncClient, client: OpenAIProxyClient, app: Any
) -> None:
    """If the agent raises an exception, the exception reaches the caller and the proxy deletes the
    session."""

    async def episode() -> None:
        async with client:
            await talk(http, client, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await episode()
    assert len(app.state.proxy.sessions) == 0


async def test_a_failing_farewell_never_hides_the_agents_error(
    client: OpenAIProxyClient, app: Any
) -> None:
    """If the agent raises an exception and the proxy then fails to end the session, the caller gets
    the agent's exception."""

    async def episode() -> None:
        async with client:
            app.state.proxy.sessions.forget(app.state.proxy.sessions.find(client.session_id))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await episode()


async def test_a_lost_session_is_an_error(client: OpenAIProxyClient, app: Any) -> None:
    """If the agent succeeds but the proxy has lost the session, the episode raises an error."""
    with pytest.raises(Refusal, match="unknown"):
        async with client:
            app.state.proxy.sessions.forget(app.state.proxy.sessions.find(client.session_id))


async def test_a_start_without_a_grant_is_refused(app: Any) -> None:
    """Without a grant the proxy refuses to start a session."""
    transport = httpx.ASGITransport(app)
    with pytest.raises(Refusal, match="grant_capacity") as refused:
        await OpenAIProxyClient(transport, "http://proxy", "admin", "t").__aenter__()
    assert refused.value.status == 429
    with pytest.raises(Refusal) as refused:
        await OpenAIProxyClient(transport, "http://proxy", "wrong", "t").grant_capacity()
    assert refused.value.status == 403


async def test_a_wrong_reward_is_an_error_of_the_episode(
    http: httpx.AsyncClient, client: OpenAIProxyClient
) -> None:
    """If a reward is NaN or is for an unknown interaction, the client raises an error and no reward
    is stored."""
    async with client:
        await talk(http, client, 1)
        with pytest.raises(ValueError, match="finite"):
            await client.set_last_reward(float("nan"))
        with pytest.raises(Refusal, match="chatcmpl-x"):
            await client.set_reward("chatcmpl-x", 1.0)
    assert client.rewarded_count == 0


# ---- ArealOpenAI


async def say(client: ArealOpenAI, *texts: str, **options: Any) -> Any:
    """Request a completion for a conversation. The first of `texts` is a message of the user, the
    second is a message of the assistant, and so on."""
    roles = itertools.cycle(("user", "assistant"))
    messages: Any = [{"role": role, "content": text} for role, text in zip(roles, texts)]
    return await client.chat.completions.create(model="default", messages=messages, **options)


@pytest.fixture
def direct(tiny_tokenizer: Any) -> Any:
    """Return a function make(*texts, **options) that makes an ArealOpenAI client and an engine that
    answers with these texts."""

    def make(*texts: str, **options: Any) -> tuple[ArealOpenAI, ScriptedEngine]:
        engine = ScriptedEngine(tiny_tokenizer, *texts)
        return ArealOpenAI(engine, tiny_tokenizer, **options), engine

    return make


async def test_the_direct_approach_of_agent_workflow(direct: Any) -> None:
    """ArealOpenAI supports the example "Direct Approach" from AReaL's page Agent Workflow: calls,
    rewards and export."""
    client, engine = direct("five", "four")
    first = await say(client, "2+2?")
    second = await say(client, "2+2?", first.choices[0].message.content, "wrong")
    client.set_last_reward(1.0)
    client.apply_reward_discount(turn_discount=0.9)
    rows = client.export_interactions(style="individual")
    assert {name: row.reward for name, row in rows.items()} == {first.id: 0.9, second.id: 1.0}
    (row,) = client.export_interactions(style="concat").values()
    assert row.to_tensor_dict()["input_ids"][0].tolist() == (
        engine.requests[1].input_ids + client.get_interaction(second.id).tokens.output_tokens
    )


async def test_responses_are_created_the_same_way(direct: Any) -> None:
    """ArealOpenAI supports responses.create."""
    client, _ = direct("one", "two")
    first = await client.responses.create(model="default", input="count")
    second = await client.responses.create(
        model="default", input="go on", previous_response_id=first.id
    )
    assert (first.output_text, second.output_text) == ("one", "two")
    assert client.get_interaction(second.id).parent is client.get_interaction(first.id)


async def test_a_stream_and_other_options_are_the_same_session(direct: Any) -> None:
    """A copy of a client (`with_options`, `copy`) stores its calls, also streamed calls, in the
    conversation tree of the original client."""
    client, _ = direct("one", "two", seed=1)
    messages: Any = [{"role": "user", "content": "count"}]
    stream = await client.with_options(timeout=5).chat.completions.create(
        model="m", messages=messages, stream=True
    )
    text = "".join(
        [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    )
    await say(client.copy(max_retries=3), "count", text, "go on")
    assert [interaction.turn for interaction in client.cache.values()] == [0, 1]


async def test_clients_do_not_share_a_session(direct: Any) -> None:
    """Each ArealOpenAI client has its own conversation tree."""
    (one, _), (two, _) = direct(), direct()
    completion = await say(one, "hello")
    assert list(one.cache) == [completion.id]
    assert not two.cache


# ---- where AReaL's own client fails (docs/differences.md)


async def test_a_failed_call_leaves_nothing_in_the_tree(direct: Any) -> None:
    """A failed call raises an error with an HTTP status and leaves nothing in the conversation
    tree."""
    client, engine = direct()
    with pytest.raises(openai.BadRequestError, match="messages"):
        await client.chat.completions.create(model="m", messages=[])
    with pytest.raises(openai.BadRequestError, match="max_completion_tokens"):
        await say(client, "hello", max_tokens=3, max_completion_tokens=4)
    engine.error = EngineError("no server answered", 503)
    with pytest.raises(openai.InternalServerError, match="no server answered"):
        await say(client, "hello")
    assert not client.cache
    engine.error = None
    await say(client, "hello")
    client.set_last_reward(1.0)  # the only finished call gets the reward
    assert [row.reward for row in client.export_completions().values()] == [1.0]


async def test_stop_strings_are_a_way_to_end(direct: Any) -> None:
    """The reply's text ends before the stop string, but the export contains every sampled token."""
    client, engine = direct("four. And five")
    completion = await say(client, "2+2?", stop="And")
    assert completion.choices[0].message.content == "four. "
    assert engine.requests[0].gconfig.stop == ["And"]
    client.set_last_reward(1.0)
    (row,) = client.export_interactions("concat").values()
    assert row.to_tensor_dict()["loss_mask"].sum() == row.tokens.output_len


async def test_greedy_and_default_temperatures(direct: Any) -> None:
    """A temperature of None means 1.0."""
    client, engine = direct()
    await say(client, "a", temperature=None)
    await say(client, "b", temperature=0)
    assert [request.gconfig.is_greedy for request in engine.requests] == [False, True]
    trains = [interaction.tokens.trains_exactly for interaction in client.cache.values()]
    assert trains == [True, False]


async def test_an_unknown_interaction_or_style_is_an_error(direct: Any) -> None:
    """An unknown interaction id, a reward of NaN and an unknown export style each raise an
    error."""
    client, _ = direct()
    with pytest.raises(Refusal, match="chatcmpl-x"):
        client.set_reward("chatcmpl-x", 1.0)
    with pytest.raises(Refusal, match="no call of this session has succeeded"):
        client.set_last_reward(1.0)
    await say(client, "hello")
    with pytest.raises(ValueError, match="finite"):
        client.set_last_reward(float("nan"))
    with pytest.raises(ValueError, match="style"):
        client.export_interactions(style="both")
