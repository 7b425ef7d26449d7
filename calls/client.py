"""The workflow's side of a session: start it, reward it, export it, over HTTP.

    async with OpenAIProxyClient(transport, proxy_addr, admin_key, task_id, grant=True) as client:
        reward = await agent.run(data, base_url=client.session_url, api_key=client.api_key)
        interactions = await client.finish(reward, discount=0.9, style="concat")

These are two requests. The five single ones are there too: `grant_capacity`, the start,
`set_reward` or `set_last_reward`, the end, and `export_interactions` after it. An exception in the
block makes the proxy forget the session, and the caller gets this exception whatever else goes
wrong. Nothing is tried again: a lost connection means that the proxy, and with it the session, is
gone.
"""

import contextlib
import sys
from typing import Any, Self

import httpx
import openai
import orjson

from cache import EXPORTED, Interaction, finite
from calls.sessions import ProxyAddress as ProxyAddress
from inference.fields import Refusal
from inference.io_struct import ModelResponse

TIMEOUT = {"timeout": httpx.Timeout(600.0).as_dict()}

# The HTTP library of the installed openai SDK: httpx, or httpx2 since 3.0.
_sdk_client: Any = openai.DefaultAsyncHttpxClient.__base__
sdk_http: Any = sys.modules[_sdk_client.__module__.partition(".")[0]]


def read_exported(exported: dict[str, Any]) -> Interaction:
    """An interaction from its exported form (`proxy.export`). Its reward and its row are final."""
    fields = {name: exported[name] for name in EXPORTED}
    response = ModelResponse(**exported["model_response"])
    return Interaction(**fields, model_response=response, row=exported["tensors"])


class OpenAIProxyClient:
    """One session. `transport` is the caller's, who closes it; `options` are more fields of the
    request that starts the session."""

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport,
        base_url: str,
        admin_key: str,
        task_id: str,
        **options: Any,
    ) -> None:
        self._start = {"task_id": task_id, **options}
        self._transport = transport  # not through httpx's client, which takes a third more time
        self._base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {admin_key}"}
        self.session_id = self.api_key = ""
        self.rewarded_count = 0  # interactions with a reward, once the session has ended

    @property
    def session_url(self) -> str:
        """The base_url for the agent's SDK."""
        return f"{self._base_url}/{self.session_id}/v1"

    async def grant_capacity(self) -> int:
        """Let one more session start."""
        return (await self._post("/grant_capacity"))["capacity"]

    async def __aenter__(self) -> Self:
        started = await self._post("/rl/start_session", **self._start)
        self.session_id, self.api_key = started["session_id"], started["api_key"]
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if not self.session_id:  # `finish` has ended it
            return
        quietly = contextlib.suppress(*(httpx.HTTPError, Refusal) if error else ())
        with quietly:
            path = f"/{self.session_id}/rl/end_session"
            ended = await self._post(path, discard=error is not None)
            self.rewarded_count = ended["rewarded_count"]

    async def set_reward(self, interaction_id: str | None, reward: float) -> None:
        """Reward a call; None is the last one. Raises Refusal."""
        path = f"/{self.session_id}/rl/set_reward"
        await self._post(path, interaction_id=interaction_id, reward=finite(reward))

    async def set_last_reward(self, reward: float) -> None:
        await self.set_reward(None, reward)

    async def finish(
        self, rewards: float | dict[str, float] | None, **options: Any
    ) -> dict[str, Interaction]:
        """Set the rewards, end the session and export it. `rewards` is that of the last call, or
        {id: reward}, or None; a reward may be a scalar of numpy or torch. `options` are those of
        `export_interactions`."""
        named: Any = rewards if isinstance(rewards, dict) else {None: rewards}
        items = [] if rewards is None else named.items()
        given = [{"interaction_id": name, "reward": finite(x)} for name, x in items]
        exported = await self.export_interactions(**options, rewards=given)
        self.session_id = ""
        return exported

    async def export_interactions(
        self, discount: float = 1.0, style: str = "individual", **more: Any
    ) -> dict[str, Interaction]:
        """The interactions with their final rewards. The proxy then forgets the session."""
        more |= {"session_id": self.session_id, "discount": discount, "style": style}
        answer = await self._post("/export_trajectories", **more)
        self.rewarded_count = answer["rewarded_count"]
        exported = answer["interactions"]
        rows: dict[str, Interaction] = {key: read_exported(exported[key]) for key in exported}
        for key, row in rows.items():
            row.parent = rows.get(exported[key]["parent"])
        return rows

    async def _post(self, path: str, **body: Any) -> dict[str, Any]:
        request = httpx.Request(
            "POST",
            self._base_url + path,
            content=orjson.dumps(body),
            headers=self._headers,
            extensions=TIMEOUT,
        )
        answer = await self._transport.handle_async_request(request)
        await answer.aread()
        if answer.status_code != 200:
            raise Refusal(f"proxy refused POST {path}: {answer.text}", answer.status_code)
        return orjson.loads(answer.content)
