"""The two ways in which an episode reaches the proxy: over HTTP, or inside its own process.

1. Proxy approach. The agent talks HTTP to the proxy with any SDK, and the workflow manages the agent's session with an
   `OpenAIProxyClient`. The tokens stay at the proxy until the workflow exports them.

       client = OpenAIProxyClient(transport, base_url, admin_key, task_id)
       await client.grant_capacity()                            # the proxy may start one more session
       async with client:                                       # start the session; end it at the end of the block
           reward = await agent.run(data, base_url=client.session_url, api_key=client.api_key)
           await client.set_last_reward(reward)
       interactions = await client.export_interactions(discount=0.9, style="concat")

   The session ends however the block is left. If an exception leaves the block, nobody will export the session, so the
   proxy is told to forget it. An error of that last request never hides the agent's exception. If the proxy refuses a
   request, the client raises `Refusal` with the proxy's status and message. It retries nothing: the proxy is a process
   of the same run, and a lost connection means that it has died.

2. Direct approach (Agent Workflow, "Direct Approach", a legacy pattern). A RolloutWorkflow calls the model itself, with
   an `ArealOpenAI`. This is an AsyncOpenAI that is bound to an engine. Its HTTP client hands each request to the
   application of the proxy in the same process. Prompts, tool calls, errors and the conversation tree are therefore the
   proxy's own, and a reward changes the tree at once.

       client = ArealOpenAI(engine, tokenizer)
       reply = await client.chat.completions.create(model="default", messages=messages)
       client.set_last_reward(1.0)
       interactions = client.export_completions(turn_discount=0.9)

What it does not promise: no session survives its proxy. An `ArealOpenAI` has one session for its whole life, so an
episode needs a client of its own.
"""

import math
import secrets
import sys
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
import openai
import orjson

from cache import Interaction, finite
from run.fields import Refusal

TIMEOUT = httpx.Timeout(600.0).as_dict()  # seconds for one request

# The HTTP library of the installed openai SDK: httpx, or httpx2 since openai 3.0. The SDK's client class inherits from
# the library's, which stands in a module such as "httpx._client"; the first word is the library.
_library_client: Any = openai.DefaultAsyncHttpxClient.__base__
sdk_http: Any = sys.modules[_library_client.__module__.partition(".")[0]]


@dataclass(eq=False)
class ExportedInteraction(Interaction):
    """An interaction that the proxy has exported: a row of lists in place of the engine's response."""

    row: dict[str, list] = field(default_factory=dict)  # its tensors, as lists

    def to_lists(self) -> dict[str, list]:
        """Return the exported row with the present reward of this turn, which may have been set since."""
        reward = self.reward or 0.0
        turns = zip(self.row["turn_ids"], self.row["turn_rewards"], strict=True)
        turn_rewards = [reward if turn == self.turn else other for turn, other in turns]
        return self.row | {"rewards": [reward], "turn_rewards": turn_rewards}


class OpenAIProxyClient:
    """One session at the proxy, as the workflow sees it. Many sessions may share a transport; the caller closes it.

    The five requests of an episode go straight to the httpx transport. httpx's client class would add a third to the
    time of each request.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport, base_url: str, admin_key: str, task_id: str) -> None:
        self._transport = transport
        self._base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {admin_key}"}  # the proxy ignores it if the path names a session
        self.task_id = task_id
        self.session_id = ""  # set when the session starts, like the key
        self.api_key = ""
        self.rewarded_count = 0  # interactions with a reward; set when the session ends

    @property
    def session_url(self) -> str:
        """Return the base_url for the agent."""
        return f"{self._base_url}/{self.session_id}/v1"

    async def grant_capacity(self) -> int:
        """Allow the proxy to start one more session, and return how many it may start now."""
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
        """Set the reward of one interaction. Raises ValueError if it is not finite, Refusal for an unknown id."""
        body = {"interaction_id": interaction_id, "reward": finite(reward)}
        await self._post(f"/{self.session_id}/rl/set_reward", body)

    async def set_last_reward(self, reward: float) -> None:
        """Set the reward of the last finished interaction. Raises ValueError or Refusal, as `set_reward` does."""
        await self._post(f"/{self.session_id}/rl/set_reward", {"reward": finite(reward)})

    async def export_interactions(self, discount: float = 1.0, style: str = "individual") -> dict[str, Interaction]:
        """Return the interactions of the session with their discounted rewards. The proxy then forgets the session.

        An interaction knows its parent if the parent is exported too; in style "individual" it always is.
        """
        body = {"session_id": self.session_id, "discount": discount, "style": style}
        answer = (await self._post("/export_trajectories", body))["interactions"]
        rows: dict[str, Interaction] = {}
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
        """Send a POST and return the JSON of its reply. Raises Refusal if the status is not 200."""
        url, content, extensions = self._base_url + path, orjson.dumps(body), {"timeout": TIMEOUT}
        request = httpx.Request("POST", url, content=content, headers=self._headers, extensions=extensions)
        answer = await self._transport.handle_async_request(request)
        await answer.aread()
        if answer.status_code != 200:
            raise Refusal(f"proxy refused POST {path}: {answer.text}", answer.status_code)
        return orjson.loads(answer.content)


class ArealOpenAI(openai.AsyncOpenAI):
    """An AsyncOpenAI whose requests are answered by the proxy's own code, in this process.

    `engine` has `async agenerate(ModelRequest)`. `options` are fields of `proxy.Proxy` (seed, sampling, and so on).
    `cache` is the conversation tree of the client's one session.
    """

    def __init__(self, engine: Any, tokenizer: Any, task_id: str = "", **options: Any) -> None:
        from proxy import create_app  # here, because only the direct approach needs fastapi

        options = {"session_timeout_seconds": math.inf} | options
        app = create_app(engine, tokenizer, secrets.token_urlsafe(), **options)
        session = app.state.proxy.start_own_session(task_id)
        self.cache = session.cache
        http_client = openai.DefaultAsyncHttpxClient(transport=sdk_http.ASGITransport(app), timeout=None)
        url = f"http://in-process/{session.session_id}/v1"
        super().__init__(base_url=url, api_key=session.session_id, http_client=http_client, max_retries=0)

    def copy(self, **changes: Any) -> openai.AsyncOpenAI:  # type: ignore[override]
        """Return a client of this session with other options, such as a timeout or headers."""
        plain = openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, http_client=self._client)
        return plain.copy(**{"max_retries": 0} | changes)

    with_options = copy  # type: ignore[assignment]

    def get_interaction(self, interaction_id: str) -> Interaction:
        """Return the interaction with the id of a completion or response. Raises KeyError for an unknown id."""
        return self.cache[interaction_id]

    def set_reward(self, interaction_id: str, reward: float) -> None:
        """Set the reward of one interaction.

        Raises KeyError if the id is unknown or its call has not finished, ValueError if the reward is not finite.
        """
        self.cache.set_reward(interaction_id, reward)

    def set_last_reward(self, reward: float) -> None:
        """Set the reward of the last finished interaction. Raises KeyError or ValueError, as `set_reward` does."""
        self.cache.set_last_reward(reward)

    def apply_reward_discount(self, turn_discount: float = 1.0) -> None:
        """Add the discounted rewards of later turns to each turn (`cache.py`). May be called once."""
        self.cache.apply_reward_discount(turn_discount)

    def export_interactions(self, style: str = "individual") -> dict[str, Interaction]:
        """Return every interaction, or in style "concat" every leaf of the tree. Raises ValueError for other styles."""
        return self.cache.export_interactions(style)

    def export_completions(self, turn_discount: float = 1.0) -> dict[str, Interaction]:
        """Discount the rewards and return every interaction; AReaL's older name for these two steps."""
        self.apply_reward_discount(turn_discount)
        return self.export_interactions("individual")

    get_completions = get_interaction  # AReaL's older name
