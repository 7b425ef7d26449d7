"""Two clients of the proxy: one episode's session seen from the workflow, and the direct approach.

OpenAIProxyClient manages a session while an agent talks to it.

    client = OpenAIProxyClient(transport, base_url, admin_key, task_id)
    await client.grant_capacity()
    async with client:                                       # start_session ... end_session
        rewards = await agent.run(data, base_url=client.session_url, api_key=client.api_key)
        await client.set_last_reward(rewards)
    interactions = await client.export_interactions(discount=0.9, style="concat")

The session ends however the block is left. If it is left by an exception nobody will export the session, so the
proxy is told to forget it (AReaL keeps it until the sweep of stale sessions an hour later); an error of that
farewell never hides the agent's own.

What the proxy refuses is raised as `Refusal` with its status and its words. Nothing is retried here: these
are small calls to a process of our own, and a lost one means that the process is gone. A reward for an unknown
interaction is an error of the episode too (AReaL logs it and trains on 0).

It does not carry tokens on its way in: agents talk to the proxy with any SDK, this class only manages. Its five calls
an episode go straight to an httpx transport, without httpx's client, whose layer is a third of the cost of a call.

ArealOpenAI is for a RolloutWorkflow that speaks OpenAI by itself (docs/openai_workflows.txt; the documents call it
legacy): an AsyncOpenAI that is bound to an engine. It contains no second implementation of anything: its HTTP
client hands each request to the proxy's application in this very process, so prompts, tools, errors and the tree
are the proxy's, and what the proxy learns it can do. Its rewards act on the tree at once. An AReaL user finds what
its client gets wrong here put right: a stop string raises there, a failed call stays in the tree, a refused
parameter is ignored with a warning.
"""

import math
import secrets
import sys
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
import openai
import orjson

from cache import InteractionWithTokenLogpReward, finite
from run.fields import Refusal

TIMEOUT = httpx.Timeout(600.0).as_dict()  # seconds for one call

# The HTTP library that the installed openai SDK runs on: httpx, or httpx2 since 3.0.
sdk_http: Any = sys.modules[openai.DefaultAsyncHttpxClient.__base__.__module__.partition(".")[0]]


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
        self.rewarded_count = 0  # once it has ended: interactions with a reward

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

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        try:
            ended = await self._post(f"/{self.session_id}/rl/end_session", {"discard": error is not None})
            self.rewarded_count = ended["rewarded_count"]
        except (httpx.HTTPError, Refusal):
            if error is None:
                raise

    async def set_reward(self, interaction_id: str, reward: float) -> None:
        """Reward one interaction. Raises ValueError for what is not finite, Refusal for an unknown id."""
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
            raise Refusal(f"proxy refused POST {path}: {answer.text}", answer.status_code)
        return orjson.loads(answer.content)


class ArealOpenAI(openai.AsyncOpenAI):
    """The direct approach: an AsyncOpenAI whose calls are answered by the proxy's own code, in this process.

    `engine` has `async agenerate(ModelRequest)`; `options` are those of `proxy.Proxy` (seed, sampling, and so on).
    `cache` holds its interactions: one session for the client's whole life.
    """

    def __init__(self, engine: Any, tokenizer: Any, task_id: str = "", **options: Any) -> None:
        from proxy import create_app  # fastapi: only for who goes this way

        options = {"session_timeout_seconds": math.inf} | options
        app = create_app(engine, tokenizer, secrets.token_urlsafe(), **options)
        sessions = app.state.proxy.sessions
        sessions.grant()
        session = sessions.start(task_id)
        self.cache = session.cache
        http_client = openai.DefaultAsyncHttpxClient(transport=sdk_http.ASGITransport(app), timeout=None)
        url = f"http://in-process/{session.session_id}/v1"
        super().__init__(base_url=url, api_key=session.session_id, http_client=http_client, max_retries=0)

    def copy(self, **changes: Any) -> openai.AsyncOpenAI:  # type: ignore[override]
        """A client of the same session with other options (timeout, headers, ...)."""
        plain = openai.AsyncOpenAI(
            base_url=self.base_url, api_key=self.api_key, http_client=self._client, max_retries=0
        )
        return plain.copy(**changes)

    with_options = copy  # type: ignore[assignment]

    def get_interaction(self, interaction_id: str) -> InteractionWithTokenLogpReward:
        """One call with its tokens, by the id of its completion or response. Raises KeyError."""
        return self.cache[interaction_id]

    def set_reward(self, interaction_id: str, reward: float) -> None:
        """Raises KeyError for an id that is unknown or unfinished, ValueError for what is not finite."""
        self.cache.set_reward(interaction_id, reward)

    def set_last_reward(self, reward: float) -> None:
        """Reward the last finished call. Raises as `set_reward` does."""
        self.cache.set_last_reward(reward)

    def apply_reward_discount(self, turn_discount: float = 1.0) -> None:
        """Turn rewards into final ones, once, along the tree (cache.py)."""
        self.cache.apply_reward_discount(turn_discount)

    def export_interactions(self, style: str = "individual") -> dict[str, InteractionWithTokenLogpReward]:
        """The rows: every call, or (concat) every leaf. Raises ValueError for another style."""
        return self.cache.export_interactions(style)

    def export_completions(self, turn_discount: float = 1.0) -> dict[str, InteractionWithTokenLogpReward]:
        """The older name: discount, then export every call."""
        self.apply_reward_discount(turn_discount)
        return self.export_interactions("individual")

    get_completions = get_interaction  # the older name
