r"""An agent with the OpenAI SDK. It calls the model in a loop, and runs the model's tool calls. The
command below runs one episode.

python -m extras.episode examples.openai_sdk.Agent --model-path DIR \
    --data '{"question": "( 1 + 2 ) * 3", "answer": "9"}'
"""

import json

from openai import AsyncOpenAI, pydantic_function_tool
from pydantic import BaseModel


class Numbers(BaseModel):
    a: int
    b: int


def add(a, b):
    return a + b


def multiply(a, b):
    return a * b


TOOLS = {"add": add, "multiply": multiply}
SCHEMAS = [pydantic_function_tool(Numbers, name=name) for name in TOOLS]


class Agent:
    async def run(self, data, **extra_kwargs):
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
            max_retries=0,
        )
        messages = [{"role": "user", "content": data["question"]}]
        for _ in range(4):
            reply = await client.chat.completions.create(
                model="default", messages=messages, tools=SCHEMAS
            )
            message = reply.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return float(message.content.split()[-1:] == [data["answer"]])
            for call in message.tool_calls:
                try:
                    result = TOOLS[call.function.name](**json.loads(call.function.arguments))
                except (KeyError, TypeError, ValueError):  # the model's mistake, which costs reward
                    result = "error"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
        return 0.0
