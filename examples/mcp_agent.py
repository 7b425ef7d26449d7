"""An agent whose tools come from an MCP server (https://modelcontextprotocol.io), with the official
SDK. The server is this file. Each episode starts its own server and talks to it over stdio."""

import json
import sys

from mcp import ClientSession, StdioServerParameters, stdio_client
from openai import AsyncOpenAI

SERVER = StdioServerParameters(command=sys.executable, args=[__file__])


def schema(tool):
    """Convert an MCP tool to the tool format of chat completions."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.inputSchema}
    return {"type": "function", "function": function}


class Agent:
    async def run(self, data, **extra_kwargs):
        client = AsyncOpenAI(max_retries=0, **extra_kwargs)
        messages = [{"role": "user", "content": data["question"]}]
        async with stdio_client(SERVER) as streams, ClientSession(*streams) as session:
            await session.initialize()
            tools = [schema(tool) for tool in (await session.list_tools()).tools]
            for _ in range(4):
                reply = await client.chat.completions.create(
                    model="default", messages=messages, tools=tools
                )
                message = reply.choices[0].message
                messages.append(message)
                if not message.tool_calls:
                    return float(message.content.split()[-1:] == [data["answer"]])
                for call in message.tool_calls:
                    function = call.function
                    result = await session.call_tool(function.name, json.loads(function.arguments))
                    text = "".join(part.text for part in result.content if part.type == "text")
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
        return 0.0


if __name__ == "__main__":
    from mcp.server.fastmcp import FastMCP

    server = FastMCP("calculator", log_level="WARNING")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @server.tool()
    def multiply(a: int, b: int) -> int:
        """Multiply two numbers."""
        return a * b

    server.run()
