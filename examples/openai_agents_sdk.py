"""An agent with the OpenAI Agents SDK (https://openai.github.io/openai-agents-python).

The agent calls the Responses API.
"""

from agents import Agent as SDKAgent
from agents import ModelSettings, OpenAIResponsesModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


class Agent:
    async def run(self, data, **extra_kwargs):
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
            max_retries=0,
        )
        agent = SDKAgent(
            name="calculator",
            instructions="Compute with the tools, then say what the answer is.",
            model=OpenAIResponsesModel(model="default", openai_client=client),
            model_settings=ModelSettings(max_tokens=64),
            tools=[add, multiply],
        )
        config = RunConfig(
            tracing_disabled=True
        )  # with tracing, the SDK reports each run to OpenAI
        result = await Runner.run(agent, data["question"], max_turns=4, run_config=config)
        return float(result.final_output.split()[-1:] == [data["answer"]])
