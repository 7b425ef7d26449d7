"""An OpenAI client whose calls are answered in this process, by the proxy's code.

This is the direct approach of AReaL's page "Agent Workflow". A workflow makes one client for each
episode:

    client = ArealOpenAI(engine, tokenizer)
    reply = await client.chat.completions.create(model="default", messages=messages)
    client.set_last_reward(1.0)
    interactions = client.export_completions(turn_discount=0.9)
"""

import functools
import secrets
from typing import Any

import openai

from cache import Interaction
from calls.client import sdk_http
from proxy import Proxy, create_app


class ArealOpenAI(openai.AsyncOpenAI):
    """A client with methods for rewards and export. `engine` must have `async
    agenerate(ModelRequest)`; `options` are those of Proxy."""

    def __init__(self, engine: Any, tokenizer: Any, task_id: str = "", **options: Any) -> None:
        proxy = Proxy(engine, tokenizer, secrets.token_urlsafe(), **options)
        session = proxy.start(task_id)
        self.cache = cache = session.cache
        self.set_reward = cache.set_reward
        self.set_last_reward = cache.set_last_reward
        self.apply_reward_discount = cache.apply_reward_discount
        self.export_interactions = cache.export_interactions
        transport = sdk_http.ASGITransport(create_app(proxy))
        super().__init__(
            base_url=f"http://in-process/{session.session_id}/v1",
            api_key=session.session_id,
            http_client=openai.DefaultAsyncHttpxClient(transport=transport, timeout=None),
            max_retries=0,
        )
        for endpoint in list[Any]([self.chat.completions, self.responses]):  # `model` is optional
            endpoint.create = functools.partial(endpoint.create, model="default")

    def copy(self, **changes: Any) -> openai.AsyncOpenAI:  # type: ignore[override]
        """Return a client with other options, such as a timeout, for the same session."""
        plain = openai.AsyncOpenAI(
            base_url=self.base_url, api_key=self.api_key, http_client=self._client
        )
        return plain.copy(**{"max_retries": 0} | changes)

    with_options = copy  # type: ignore[assignment]

    def get_interaction(self, interaction_id: str) -> Interaction:
        """Return the call with this id. Raises KeyError if there is none."""
        return self.cache[interaction_id]

    def export_completions(self, turn_discount: float = 1.0) -> dict[str, Interaction]:
        """Discount the rewards, and return all finished interactions (AReaL's older API)."""
        self.apply_reward_discount(turn_discount)
        return self.export_interactions("individual")

    get_completions = get_interaction  # the older name
