"""OpenAIProxyClient: one episode's session at the proxy, seen from the workflow.

    client = OpenAIProxyClient(transport, base_url, admin_key, task_id)
    await client.grant_capacity()
    async with client:                                       # start_session ... end_session
        rewards = await agent.run(data, base_url=client.session_url, api_key=client.api_key)
        await client.set_last_reward(rewards)
    interactions = await client.export_interactions(discount=0.9, style="concat")

The session ends however the block is left. If it is left by an exception nobody will export the session, so the
proxy is told to forget it (AReaL keeps it until the sweep of stale sessions an hour later); an error of that
farewell never hides the agent's own.

What the proxy refuses is raised as `ProxyCallError` with its status and its words. Nothing is retried here: these
are small calls to a process of our own, and a lost one means that the process is gone. A reward for an unknown
interaction is an error of the episode too (AReaL logs it and trains on 0).

It does not carry tokens on its way in: agents talk to the proxy with any SDK, this class only manages. Its five calls
an episode go straight to an httpx transport, without httpx's client, whose layer is a third of the cost of a call.
"""

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx
import orjson

from cache import InteractionWithTokenLogpReward, finite

TIMEOUT = httpx.Timeout(600.0).as_dict()  # seconds for one call


class ProxyCallError(RuntimeError):
    """The proxy refused a call; `status` is its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class ExportedInteraction(InteractionWithTokenLogpReward):
    """An interaction that was exported elsewhere: its row arrived as lists, without the response behind them."""

    row: dict[str, list] = field(default_factory=dict)

    def to_lists(self) -> dict[str, list]:
        """The row as it was exported, with this turn's reward as it is now."""
        reward = self.reward or 0.0
        turns = zip(self.row["turn_ids"], self.row["turn_rewards"], strict=True)
        turn_rewards = [reward if turn == self.turn else other for turn, other in turns]
        return self.row | {"rewards": [reward], "turn_rewards": turn_rewards}


class OpenAIProxyClient:
    """One session. `transport` is the caller's and stays open; it may serve many sessions."""

    def __init__(self, transport: httpx.AsyncBaseTransport, base_url: str, admin_key: str, task_id: str) -> None:
        self._transport = transport
        self._base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {admin_key}"}  # where the path names a session, that counts
        self.task_id = task_id
        self.session_id = ""  # these two are known once the session has started
        self.api_key = ""
        self.interaction_count = 0  # these two once it has ended: finished interactions, and those with a reward
        self.rewarded_count = 0

    @property
    def session_url(self) -> str:
        """The agent's base_url."""
        return f"{self._base_url}/{self.session_id}/v1"

    async def grant_capacity(self) -> int:
        """Allow one more session to start. How many may start now."""
        return (await self._post("/grant_capacity", {}))["capacity"]

    async def __aenter__(self) -> Self:
        started = await self._post("/rl/start_session", {"task_id": self.task_id})
        self.session_id, self.api_key = started["session_id"], started["api_key"]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            ended = await self._post(f"/{self.session_id}/rl/end_session", {"discard": error is not None})
        except (httpx.HTTPError, ProxyCallError):
            if error is None:
                raise
        else:
            self.interaction_count = ended["interaction_count"]
            self.rewarded_count = ended["rewarded_count"]

    async def set_reward(self, interaction_id: str, reward: float) -> None:
        """Reward one interaction. Raises ValueError for what is not finite, ProxyCallError for an unknown id."""
        body = {"interaction_id": interaction_id, "reward": finite(reward)}
        await self._post(f"/{self.session_id}/rl/set_reward", body)

    async def set_last_reward(self, reward: float) -> None:
        """Reward the last finished interaction. Raises as `set_reward` does."""
        await self._post(f"/{self.session_id}/rl/set_reward", {"reward": finite(reward)})

    async def export_interactions(
        self, discount: float = 1.0, style: str = "individual"
    ) -> dict[str, InteractionWithTokenLogpReward]:
        """The session's rows with their final rewards, once: the proxy forgets the session.

        Parents are linked where they are rows themselves (always in style individual).
        """
        body = {"session_id": self.session_id, "discount": discount, "style": style}
        answer = (await self._post("/export_trajectories", body))["interactions"]
        rows: dict[str, InteractionWithTokenLogpReward] = {}
        for interaction_id, exported in answer.items():  # parents come before their children
            rows[interaction_id] = ExportedInteraction(
                exported["messages"],
                interaction_id,
                output_message_list=exported["output"],
                reward=exported["reward"],
                parent=rows.get(exported["parent"]),
                turn=max(exported["tensors"]["turn_ids"], default=0),
                row=exported["tensors"],
            )
        return rows

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        url, content, extensions = self._base_url + path, orjson.dumps(body), {"timeout": TIMEOUT}
        request = httpx.Request("POST", url, content=content, headers=self._headers, extensions=extensions)
        answer = await self._transport.handle_async_request(request)
        await answer.aread()
        if answer.status_code != 200:
            raise ProxyCallError(f"proxy refused POST {path}: {answer.text}", answer.status_code)
        return orjson.loads(answer.content)

    def __repr__(self) -> str:
        return f"OpenAIProxyClient(task {self.task_id!r}, session {self.session_id!r} at {self._base_url})"
