"""Connect an episode to the proxy in one of two ways: over HTTP, or inside the process of the workflow.

1. Proxy approach. The agent sends HTTP requests to the proxy with any SDK, and the workflow manages the agent's session
   with an `OpenAIProxyClient`. The proxy keeps the tokens until the workflow exports the session.

       client = OpenAIProxyClient(transport, base_url, admin_key, task_id)
       await client.grant_capacity()                            # the proxy may start one more session
       async with client:                                       # start the session; end it at the end of the block
           reward = await agent.run(data, base_url=client.session_url, api_key=client.api_key)
           await client.set_last_reward(reward)
       interactions = await client.export_interactions(discount=0.9, style="concat")

   Without `grant=True` and `finish`, the client sends five requests to the proxy. With `grant=True` and `finish`, the
   client sends only two requests, so the trainer needs less CPU time:

       async with OpenAIProxyClient(transport, base_url, admin_key, task_id, grant=True) as client:
           reward = await agent.run(data, base_url=client.session_url, api_key=client.api_key)
           interactions = await client.finish(reward, discount=0.9, style="concat")

   The session ends when the `async with` block ends, even if the block raises an exception. If the `async with` block
   raises an exception, the client tells the proxy to forget the session. The caller gets the agent's exception even if
   the request to forget the session fails. If the proxy refuses a request, the client raises `Refusal` with the status
   and message of the reply. The client never retries a request: a lost connection means that the proxy's process has
   ended and that the session is lost.

2. Direct approach. AReaL's documents call the direct approach a legacy pattern (page Agent Workflow, section "Direct
   Approach"). In the direct approach a RolloutWorkflow calls the model with an `ArealOpenAI`, which is a subclass of
   AsyncOpenAI. The HTTP client of an `ArealOpenAI` passes each request to the proxy's application in the same process.
   The proxy's code handles prompts, tool calls and errors in the proxy approach and in the direct approach. In the
   direct approach, `set_reward` changes the conversation tree directly, without a request.

       client = ArealOpenAI(engine, tokenizer)
       reply = await client.chat.completions.create(model="default", messages=messages)
       client.set_last_reward(1.0)
       interactions = client.export_completions(turn_discount=0.9)

If a proxy's process ends, its sessions are lost. An `ArealOpenAI` has only one session, so each episode needs a
separate `ArealOpenAI`.
"""

import functools
import math
import secrets
import sys
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
import openai
import orjson

from cache import Interaction, finite
from inference.fields import Refusal
from inference.io_struct import ModelResponse

TIMEOUT = httpx.Timeout(
    600.0
).as_dict()  # timeout in seconds for each phase of a request: connecting, writing, reading

# `sdk_http` is the HTTP library of the installed openai SDK: httpx, or httpx2 since openai 3.0. `_library_client` is
# the client class of `sdk_http`. The library's name is the first part of the module name of `_library_client`, such as
# "httpx" in "httpx._client".
_library_client: Any = openai.DefaultAsyncHttpxClient.__base__
sdk_http: Any = sys.modules[_library_client.__module__.partition(".")[0]]


@dataclass(eq=False)
class ExportedInteraction(Interaction):
    """An interaction that the proxy has exported. `row` holds the tensors of the interaction, as lists."""

    row: dict[str, list] = field(default_factory=dict)

    def to_lists(self) -> dict[str, list]:
        """Return the exported row with the turn's current reward. The reward may have changed since the export."""
        reward = self.reward or 0.0
        turns = zip(self.row["turn_ids"], self.row["turn_rewards"], strict=True)
        turn_rewards = [reward if turn == self.turn else other for turn, other in turns]
        return self.row | {"rewards": [reward], "turn_rewards": turn_rewards}


class OpenAIProxyClient:
    """The workflow's client for one session at the proxy. Several clients may share a transport.

    The caller must close the transport. The client passes requests directly to the httpx transport, because a request
    through httpx's client class takes a third more time.
    """

    def __init__(
        self,
        transport: Any,
        base_url: str,
        admin_key: str,
        task_id: str,
        grant: bool = False,
        **options: Any,
    ) -> None:
        # If `grant` is true, the request that starts the session also adds the grant for this session. `options` are
        # further fields of the request that starts the session.
        self._start = {"task_id": task_id, "grant": grant, **options}
        self._transport: httpx.AsyncBaseTransport = transport
        self._base_url = base_url.rstrip("/")
        self._headers = {
            "Authorization": f"Bearer {admin_key}"
        }  # admin key, needed for URL paths without a session id
        self.session_id = self.api_key = (
            ""  # `session_id` and `api_key` get their values when the session starts
        )
        self.rewarded_count = 0  # number of interactions with a reward; set when the session ends

    @property
    def session_url(self) -> str:
        """Return the base_url that the agent's SDK needs."""
        return f"{self._base_url}/{self.session_id}/v1"

    async def grant_capacity(self) -> int:
        """Add one grant, so that the proxy may start one more session. Return the number of unused grants."""
        return (await self._post("/grant_capacity", {}))["capacity"]

    async def __aenter__(self) -> Self:
        started = await self._post("/rl/start_session", self._start)
        self.session_id, self.api_key = started["session_id"], started["api_key"]
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if not self.session_id:  # `finish` has already ended the session
            return
        try:
            ended = await self._post(
                f"/{self.session_id}/rl/end_session", {"discard": error is not None}
            )
            self.rewarded_count = ended["rewarded_count"]
        except (httpx.HTTPError, Refusal):
            if error is None:
                raise

    async def set_reward(self, interaction_id: str, reward: float) -> None:
        """Set an interaction's reward.

        Raises ValueError for a reward that is not finite, and Refusal for an unknown id.
        """
        body = {"interaction_id": interaction_id, "reward": finite(reward)}
        await self._post(f"/{self.session_id}/rl/set_reward", body)

    async def set_last_reward(self, reward: float) -> None:
        """Set the reward of the last finished interaction. Raises the same errors as `set_reward`."""
        await self._post(f"/{self.session_id}/rl/set_reward", {"reward": finite(reward)})

    async def export_interactions(
        self, discount: float = 1.0, style: str = "individual"
    ) -> dict[str, Interaction]:
        """Return the interactions of the session with their discounted rewards. After the export, the proxy forgets the
        session.

        If an interaction's parent is not exported, the interaction's attribute `parent` is None. The style "individual"
        exports every finished interaction and therefore every parent.
        """
        return await self._export(discount=discount, style=style)

    async def finish(
        self, rewards: float | dict[str, float] | None, **options: Any
    ) -> dict[str, Interaction]:
        """Set the rewards, end the session and export its interactions, all in one request.

        `rewards` is a number (the reward of the last interaction), a dict {interaction id: reward}, or None for no
        reward. `options` are the arguments of `export_interactions`. Raises the same errors as `set_reward`.
        """
        named = (
            rewards.items()
            if isinstance(rewards, dict)
            else []
            if rewards is None
            else [(None, rewards)]
        )
        given = [{"interaction_id": name, "reward": finite(reward)} for name, reward in named]
        interactions, self.session_id = await self._export(rewards=given, **options), ""
        return interactions

    async def _export(self, **options: Any) -> dict[str, Interaction]:
        answer = await self._post(
            "/export_trajectories", {"session_id": self.session_id, **options}
        )
        self.rewarded_count = answer["rewarded_count"]
        rows: dict[str, Interaction] = {}
        for interaction_id, exported in answer["interactions"].items():
            row, messages = exported["tensors"], exported["messages"]
            interaction = ExportedInteraction(
                messages, interaction_id, reward=exported["reward"], row=row
            )
            interaction.output_message_list, interaction.reply = (
                exported["output"],
                exported["reply"],
            )
            interaction.turn = max(row["turn_ids"], default=0)
            start = len(row["turn_ids"]) - row["turn_ids"].count(
                interaction.turn
            )  # index of the first output token
            output: list[Any] = [row[key][start:] for key in ("input_ids", "logprobs", "versions")]
            interaction.model_response = response = ModelResponse(row["input_ids"][:start], *output)
            response.stop_reason, response.temperature = (
                exported["stop_reason"],
                row["temperatures"][-1],
            )
            rows[interaction_id] = interaction
        for interaction_id, exported in answer["interactions"].items():
            rows[interaction_id].parent = rows.get(exported["parent"])
        return rows

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a POST and return the JSON of the reply. Raises Refusal if the status is not 200."""
        url, content, extensions = self._base_url + path, orjson.dumps(body), {"timeout": TIMEOUT}
        request = httpx.Request(
            "POST", url, content=content, headers=self._headers, extensions=extensions
        )
        answer = await self._transport.handle_async_request(request)
        await answer.aread()
        if answer.status_code != 200:
            raise Refusal(f"proxy refused POST {path}: {answer.text}", answer.status_code)
        return orjson.loads(answer.content)


class ArealOpenAI(openai.AsyncOpenAI):
    """An AsyncOpenAI client whose requests are answered by the proxy's code in the same process.

    `engine` must have the method `async agenerate(ModelRequest)`. `options` contains values for keys of rollout.openai
    and for fields of `proxy.Proxy`, such as `seed` and `sampling`. `cache` is the conversation tree of the client's
    only session. The methods of `cache` that set rewards and export interactions are also methods of the client
    (cache.py).
    """

    def __init__(self, engine: Any, tokenizer: Any, task_id: str = "", **options: Any) -> None:
        from proxy import (
            create_app,  # only the direct approach needs fastapi, which takes time to import
        )

        options = {"session_timeout_seconds": math.inf} | options
        app = create_app(engine, tokenizer, secrets.token_urlsafe(), **options)
        session = app.state.proxy.start_own_session(task_id)
        self.cache = cache = session.cache
        self.set_reward, self.set_last_reward = cache.set_reward, cache.set_last_reward
        self.apply_reward_discount, self.export_interactions = (
            cache.apply_reward_discount,
            cache.export_interactions,
        )
        http_client = openai.DefaultAsyncHttpxClient(
            transport=sdk_http.ASGITransport(app), timeout=None
        )
        url = f"http://in-process/{session.session_id}/v1"
        super().__init__(
            base_url=url, api_key=session.session_id, http_client=http_client, max_retries=0
        )
        for endpoint in list[Any](
            [self.chat.completions, self.responses]
        ):  # callers need not pass `model`
            endpoint.create = functools.partial(endpoint.create, model="default")

    def copy(self, **changes: Any) -> openai.AsyncOpenAI:  # type: ignore[override]
        """Return a second client for this client's session.

        `changes` are new options of the client, such as the timeout or the headers.
        """
        plain = openai.AsyncOpenAI(
            base_url=self.base_url, api_key=self.api_key, http_client=self._client
        )
        return plain.copy(**{"max_retries": 0} | changes)

    with_options = copy  # type: ignore[assignment]

    def get_interaction(self, interaction_id: str) -> Interaction:
        """Return the interaction of the completion or response with the given id. Raises KeyError for an unknown id."""
        return self.cache[interaction_id]

    def export_completions(self, turn_discount: float = 1.0) -> dict[str, Interaction]:
        """Compute the discounted rewards and return all finished interactions.

        `export_completions` is a method of AReaL's older API.
        """
        self.apply_reward_discount(turn_discount)
        return self.export_interactions("individual")

    get_completions = (
        get_interaction  # `get_interaction` is called `get_completions` in AReaL's older API
    )
