"""An agent with the Anthropic SDK. It calls the model in a loop, and runs the model's tool
calls."""

from anthropic import AsyncAnthropic


def add(a, b):
    return a + b


def multiply(a, b):
    return a * b


TOOLS = {"add": add, "multiply": multiply}
NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
SCHEMAS = [
    {"name": name, "description": f"{name} two numbers", "input_schema": NUMBERS} for name in TOOLS
]


def compute(name, arguments):
    try:
        return str(TOOLS[name](**arguments))
    except (KeyError, TypeError):  # the model's mistake, which costs reward
        return "error"


class Agent:
    async def run(self, data, **extra_kwargs):
        base_url = extra_kwargs["base_url"].removesuffix(
            "/v1"
        )  # the Anthropic SDK appends /v1/messages
        messages = [{"role": "user", "content": data["question"]}]
        async with AsyncAnthropic(
            base_url=base_url, api_key=extra_kwargs["api_key"], max_retries=0
        ) as client:
            for _ in range(4):
                reply = await client.messages.create(
                    model="default",
                    max_tokens=64,
                    system="Compute with the tools.",
                    messages=messages,
                    tools=SCHEMAS,
                )
                messages.append({"role": "assistant", "content": reply.content})
                uses = [block for block in reply.content if block.type == "tool_use"]
                if not uses:
                    return float(reply.content[-1].text.split()[-1:] == [data["answer"]])
                results = [
                    {
                        "type": "tool_result",
                        "tool_use_id": use.id,
                        "content": compute(use.name, use.input),
                    }
                    for use in uses
                ]
                messages.append({"role": "user", "content": results})
        return 0.0
