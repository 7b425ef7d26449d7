"""A session ends however its block is left, and what comes back is what the proxy kept."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import torch

from client import OpenAIProxyClient, ProxyCallError
from engine import ModelRequest, ModelResponse
from proxy import create_app

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "hello"}]


class EchoEngine:
    """Says `ok` to everything; its tokens have logprob -0.5 and version 2."""

    def __init__(self, tokenizer: Any) -> None:
        self.output = [*tokenizer.encode("ok"), tokenizer.eos_token_id]

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        n = len(self.output)
        return ModelResponse(request.input_ids, list(self.output), [-0.5] * n, [2] * n)


@pytest.fixture
def app(tiny_tokenizer: Any) -> Any:
    return create_app(EchoEngine(tiny_tokenizer), tiny_tokenizer, "admin")


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
    """A conversation of so many turns; the ids of its completions."""
    messages, ids = list(HELLO), []
    for _ in range(turns):
        answer = await http.post(client.session_url + "/chat/completions", json={"messages": messages})
        completion = answer.json()
        ids.append(completion["id"])
        messages += [completion["choices"][0]["message"], {"role": "user", "content": "more"}]
    return ids


async def test_an_episode(http: httpx.AsyncClient, client: OpenAIProxyClient) -> None:
    """Grant, start, talk, reward, end, export: the rows carry their rewards and know their parents."""
    async with client:
        first, second = await talk(http, client, 2)
        await client.set_last_reward(1)
        await client.set_reward(first, 0.5)
    assert (client.interaction_count, client.rewarded_count) == (2, 2)
    rows = await client.export_interactions(discount=0.5)
    assert list(rows) == [first, second]
    assert [row.reward for row in rows.values()] == [1.0, 1.0]
    assert rows[second].parent is rows[first]
    assert rows[second].messages[:2] == [*HELLO, {"role": "assistant", "content": "ok"}]
    with pytest.raises(ProxyCallError) as gone:
        await client.export_interactions()
    assert gone.value.status == 404


async def test_the_tensors_are_the_exported_ones(http: httpx.AsyncClient, client: OpenAIProxyClient) -> None:
    """to_tensor_dict here is to_tensor_dict there, dtypes and all; a reward set later shows here too."""
    async with client:
        _, leaf = await talk(http, client, 2)
        await client.set_last_reward(1.0)
    (row,) = (await client.export_interactions(discount=0.5, style="concat")).values()
    assert row.interaction_id == leaf
    row.reward = 3.0
    tensors = row.to_tensor_dict()
    assert tensors["input_ids"].dtype == tensors["loss_mask"].dtype == tensors["versions"].dtype == torch.int32
    assert tensors["attention_mask"].dtype == torch.bool
    assert tensors["logprobs"].dtype == torch.float32
    assert tensors["rewards"].tolist() == [3.0]
    trained = tensors["loss_mask"] == 1
    assert tensors["turn_rewards"][trained].tolist() == [0.5] * 3 + [3.0] * 3
    assert tensors["turn_ids"][trained].tolist() == [0] * 3 + [1] * 3
    assert set(tensors["versions"][trained].tolist()) == {2}


async def test_an_agent_that_raises_leaves_nothing_behind(
    http: httpx.AsyncClient, client: OpenAIProxyClient, app: Any
) -> None:
    """Its own error comes out, and the proxy has forgotten the session (AReaL keeps it for an hour)."""

    async def episode() -> None:
        async with client:
            await talk(http, client, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await episode()
    assert client.interaction_count == 1
    assert len(app.state.proxy.sessions) == 0


async def test_a_failing_farewell_never_hides_the_agents_error(client: OpenAIProxyClient, app: Any) -> None:
    """The proxy may have died with the agent; what is reported is the agent's error."""

    async def episode() -> None:
        async with client:
            app.state.proxy.sessions.forget(app.state.proxy.sessions.find(client.session_id))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await episode()


async def test_a_lost_session_is_an_error(client: OpenAIProxyClient, app: Any) -> None:
    """If the agent was content and the session is gone, the episode has failed."""
    with pytest.raises(ProxyCallError, match="expired"):
        async with client:
            app.state.proxy.sessions.forget(app.state.proxy.sessions.find(client.session_id))


async def test_a_start_without_a_grant_is_refused(app: Any) -> None:
    """The proxy's words and status are the error's."""
    transport = httpx.ASGITransport(app)
    with pytest.raises(ProxyCallError, match="grant_capacity") as refused:
        await OpenAIProxyClient(transport, "http://proxy", "admin", "t").__aenter__()
    assert refused.value.status == 429
    with pytest.raises(ProxyCallError) as refused:
        await OpenAIProxyClient(transport, "http://proxy", "wrong", "t").grant_capacity()
    assert refused.value.status == 403


async def test_a_wrong_reward_is_an_error_of_the_episode(http: httpx.AsyncClient, client: OpenAIProxyClient) -> None:
    """NaN never leaves this process, and an unknown interaction is not trained on as 0 (AReaL only logs it)."""
    async with client:
        await talk(http, client, 1)
        with pytest.raises(ValueError, match="finite"):
            await client.set_last_reward(float("nan"))
        with pytest.raises(ProxyCallError, match="chatcmpl-x"):
            await client.set_reward("chatcmpl-x", 1.0)
    assert client.rewarded_count == 0
