"""An agent with AutoGen (https://microsoft.github.io/autogen): an AssistantAgent with tools.

With `reflect_on_tool_use` AutoGen sends no tools when it asks for the final answer, so the list of
tools changes during the conversation.
"""

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


class Agent:
    async def run(self, data, **extra_kwargs):
        info = {
            "vision": False,
            "function_calling": True,
            "json_output": False,
            "structured_output": False,
        }
        model = OpenAIChatCompletionClient(
            model="default",
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
            max_retries=0,
            model_info=info | {"family": "unknown"},
        )
        agent = AssistantAgent(
            "agent",
            model,
            tools=[add, multiply],
            reflect_on_tool_use=True,
            max_tool_iterations=2,
            system_message="Compute.",
        )
        result = await agent.run(task=data["question"])
        return float(result.messages[-1].content.split()[-1:] == [data["answer"]])
