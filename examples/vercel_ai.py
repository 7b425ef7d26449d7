"""An agent with Vercel's AI SDK (https://ai-sdk.dev), which runs in a process of Node.js.

The code is in examples/node/vercel_ai.mjs. The agent sends no tools when it asks for the final
answer, so the list of tools changes during the conversation.
"""

from examples.node_agent import NODE, run_process


class Agent:
    async def run(self, data, **extra_kwargs):
        where = extra_kwargs["base_url"], extra_kwargs["api_key"]
        said = await run_process("node", str(NODE / "vercel_ai.mjs"), *where, data["question"])
        return float(said.split()[-1:] == [data["answer"]])
