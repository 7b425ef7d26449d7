"""An agent with CAMEL (https://www.camel-ai.org): a ChatAgent with tools.

CAMEL counts tokens to limit the length of a conversation, by default with a tokenizer that it
downloads. This example counts words instead.
"""

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from camel.utils import BaseTokenCounter


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a (int): first number
        b (int): second number
    """
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a (int): first number
        b (int): second number
    """
    return a * b


class WordCounter(BaseTokenCounter):
    def count_tokens_from_messages(self, messages):
        return sum(len(self.encode(str(message))) for message in messages)

    def encode(self, text):
        return [len(word) for word in text.split()]

    def decode(self, token_ids):
        return ""


class Agent:
    async def run(self, data, **extra_kwargs):
        model = ModelFactory.create(
            model_platform=ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
            model_type="default",
            url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            max_retries=0,
            token_counter=WordCounter(),
        )
        tools = [FunctionTool(add), FunctionTool(multiply)]
        agent = ChatAgent("Compute with the tools.", model=model, tools=tools, max_iteration=4)
        response = await agent.astep(data["question"])
        return float(response.msgs[-1].content.split()[-1:] == [data["answer"]])
