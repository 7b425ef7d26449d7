"""An agent with PydanticAI (https://ai.pydantic.dev), with typed tools and streamed replies."""

from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

calculator = PydanticAgent(
    instructions="Compute with the tools, then say what the answer is.", retries=0
)


@calculator.tool_plain
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@calculator.tool_plain
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


class Agent:
    async def run(self, data, **extra_kwargs):
        provider = OpenAIProvider(
            base_url=extra_kwargs["base_url"], api_key=extra_kwargs["api_key"]
        )
        model = OpenAIChatModel("default", provider=provider)
        limits = UsageLimits(request_limit=4)
        async with calculator.run_stream(
            data["question"], model=model, usage_limits=limits
        ) as stream:
            output = await stream.get_output()
        return float(output.split()[-1:] == [data["answer"]])
