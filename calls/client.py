"""With this client, a workflow starts, rewards and exports a session of the proxy over HTTP.

    client = OpenAIProxyClient(Servers(proxy_addr, admin_key), task_id)
    await client.grant_capacity()
    async with client:
        reward = await agent.run(data, base_url=client.session_url, api_key=client.api_key)
        await client.set_last_reward(reward)
    interactions = await client.export_interactions(discount=0.9, style="concat")

After an exception in the `async with` block, the client asks the proxy to forget the session. Even
if this request fails, the caller gets the original exception. The client never repeats a request,
because a lost connection means that the proxy has ended.
"""

import contextlib
import functools
import sys
from typing import Any, Self

import openai

from cache import EXPORTED, Interaction
from inference.fields import finite
from inference.io_struct import EngineError, ModelResponse
from inference.servers import KEEPALIVE, PerLoop, Servers

TIMEOUT = 600.0  # seconds

# The HTTP library that the installed openai SDK uses: httpx, or httpx2 since openai 3.0.
sdk_http: Any = sys.modules[type(openai.DEFAULT_CONNECTION_LIMITS).__module__]


class AgentsClient(openai.DefaultAioHttpClient):
    """All agents of an event loop share this HTTP client. Its `aclose` does nothing, so no agent
    can close the client for the others."""

    def __init__(self) -> None:
        limits = sdk_http.Limits(max_connections=2**16, keepalive_expiry=KEEPALIVE)
        super().__init__(timeout=None, trust_env=False, limits=limits)

    async def aclose(self) -> None: ...


# one Servers object per proxy
proxy_at = functools.cache(Servers)
agents_client = PerLoop(AgentsClient, openai.DefaultAioHttpClient.aclose)


class OpenAIProxyClient:
    """The client of one session at `proxy`. `options`, such as the session's sampling, are sent
    when the session starts. A failed request raises EngineError."""

    def __init__(self, proxy: Servers, task_id: str, **options: Any) -> None:
        self._proxy = proxy
        self._start = {"task_id": task_id, **options}
        self.session_id = self.api_key = ""
        self.rewarded_count = 0  # finished calls with a reward; set when the session ends

    @property
    def session_url(self) -> str:
        """The base_url for the agent's SDK."""
        return f"{self._proxy.addresses[0]}/{self.session_id}/v1"

    async def grant_capacity(self) -> int:
        """Allow the proxy to start one more session. Return how many it may start now."""
        return (await self._post("/grant_capacity"))["capacity"]

    async def __aenter__(self) -> Self:
        started = await self._post("/rl/start_session", **self._start)
        self.session_id, self.api_key = started["session_id"], started["api_key"]
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        with contextlib.suppress(EngineError) if error else contextlib.nullcontext():
            path = f"/{self.session_id}/rl/end_session"
            ended = await self._post(path, discard=error is not None)
            self.rewarded_count = ended["rewarded_count"]

    async def set_reward(self, interaction_id: str | None, reward: float) -> None:
        """Reward the call with this id, or the last call if the id is None."""
        path = f"/{self.session_id}/rl/set_reward"
        await self._post(path, interaction_id=interaction_id, reward=finite(reward))

    async def set_last_reward(self, reward: float) -> None:
        await self.set_reward(None, reward)

    async def export_interactions(
        self, discount: float = 1.0, style: str = "individual"
    ) -> dict[str, Interaction]:
        """Return the interactions that become rows, by id and with final rewards. The proxy then
        forgets the session."""
        options = {"session_id": self.session_id, "discount": discount, "style": style}
        answer = await self._post("/export_trajectories", **options)
        exported = answer["interactions"]
        rows: dict[str, Interaction] = {}
        for key, one in exported.items():
            fields = {name: one[name] for name in EXPORTED} | {"row": one["tensors"]}
            rows[key] = Interaction(**fields, model_response=ModelResponse(**one["model_response"]))
        for key, row in rows.items():
            row.parent = rows.get(exported[key]["parent"])
            row.reads = [rows[call] for call in exported[key]["reads"] if call in rows]
        return rows

    async def _post(self, path: str, **body: Any) -> dict[str, Any]:
        return await self._proxy.call(self._proxy.addresses[0] + path, body, TIMEOUT)
