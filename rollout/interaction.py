"""An interaction is the record of one call of an agent: the messages that the agent sent, and the tokens of the answer.

The proxy makes the record when the call arrives, and adds the tokens when the answer is complete. The conversation tree
(cache.py) sets the parent, the children and the final reward. The module rows.py makes a row for training from the
record. The second call of a conversation has, for example, these fields:

    messages              user: 2 + 2?   assistant: 4   user: double it
    output_message_list   assistant: 8
    model_response        prompt tokens, output tokens, and the log-probability and the version of each output token
    parent                the first call
    turn                  1
"""

from dataclasses import dataclass, field
from typing import Any

from calls.messages import Message
from inference.io_struct import ModelResponse
from rollout.rows import make_row, row_to_tensors


@dataclass(eq=False, repr=False)
class InteractionWithTokenLogpReward:
    """One call of an agent. A finished interaction has tokens and output messages."""

    messages: list[Message]
    interaction_id: str = ""
    template_key: str = ""  # tools and template arguments as one text (`AgentRequest.template_key`)
    unstored: str = (
        ""  # value of the key rollout.openai.store if the agent sent `store: false`, else ""
    )
    tools: list[dict[str, Any]] = field(
        default_factory=list
    )  # tools offered to the model, in chat-completions format
    model_response: ModelResponse | None = None
    output_message_list: list[Message] = field(default_factory=list)
    reply: dict[str, Any] | None = None  # the reply as the agent received it
    reward: float | None = (
        None  # the turn's own reward; apply_reward_discount replaces it with the final reward
    )
    parent: "InteractionWithTokenLogpReward | None" = (
        None  # parent, named by the client or found by InteractionCache
    )

    # InteractionCache sets the following fields:
    turn: int = 0  # number of ancestors in the tree
    children: int = 0  # number of interactions whose parent is this interaction
    is_side: bool = False  # whether this call is a side conversation

    # A list of pairs (turn of this interaction's row, whether the row trains the turn). If `row_turns` is empty, this
    # turn is the row's only turn and is trained.
    row_turns: list[tuple["InteractionWithTokenLogpReward", bool]] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return self.model_response is not None

    @property
    def tokens(self) -> ModelResponse:
        """Return the tokens of the call. Raises ValueError if the call is unfinished."""
        if self.model_response is None:
            raise ValueError(f"interaction {self.interaction_id!r} is unfinished: it has no tokens")
        return self.model_response

    @property
    def completion(self) -> Any:
        """Return the reply as an object of OpenAI's SDK.

        Return None for an unfinished call, and for a reply in Anthropic's protocol.
        """
        from openai.types import (  # this import is slow, so it is not at the top of the file
            chat,
            responses,
        )

        kinds: dict[Any, Any] = {
            "chat.completion": chat.ChatCompletion,
            "response": responses.Response,
        }
        kind = kinds.get((self.reply or {}).get("object"))
        return kind and kind.construct(**self.reply or {})

    @property
    def conversation(self) -> list[Message]:
        """Return the messages of the call, followed by the messages of its output.

        The messages of each child of this interaction begin with the returned list.
        """
        return self.messages + self.output_message_list

    def continues(self, parent: "InteractionWithTokenLogpReward") -> bool:
        """Return whether this turn's prompt tokens begin with exactly the parent's prompt and output tokens."""
        tokens = parent.tokens
        whole = tokens.input_tokens + tokens.output_tokens
        return self.tokens.input_tokens[: len(whole)] == whole

    def to_lists(self) -> dict[str, list]:
        """Return the row of this interaction as lists of numbers (rollout/rows.py)."""
        return make_row(self.row_turns or [(self, True)])

    def to_tensor_dict(self) -> dict[str, Any]:
        """Return the row of this interaction as tensors of shape (1, L) or (1,)."""
        return row_to_tensors(self.to_lists())

    def __repr__(self) -> str:
        parent = self.parent.interaction_id if self.parent else None
        return f"Interaction({self.interaction_id!r}, turn {self.turn}, reward={self.reward}, parent={parent!r})"


Interaction = (
    InteractionWithTokenLogpReward  # `Interaction` is a short name; the long name comes from AReaL
)
