"""An agent with opencode (https://opencode.ai), a coding agent that runs shell commands.

opencode has no sandbox. So during training, run a coding agent in its own container. opencode also
asks the model for the conversation's title, in a call without a reward (calls/sessions.py).
"""

import json

from examples.node_agent import BIN, run_process


class Agent:
    async def run(self, data, **extra_kwargs):
        options = {"baseURL": extra_kwargs["base_url"], "apiKey": extra_kwargs["api_key"]}
        model = {"name": "default", "limit": {"context": 500, "output": 64}}
        provider = {"npm": "@ai-sdk/openai", "options": options, "models": {"default": model}}
        config = {
            "model": "policy/default",
            "small_model": "policy/default",
            "provider": {"policy": provider},
        }
        config |= {"autoupdate": False, "share": "disabled"}
        said = await run_process(
            str(BIN / "opencode"),
            *["run", "--pure", "--format", "json", f"Compute: {data['question']} ."],
            OPENCODE_CONFIG_CONTENT=json.dumps(config),
            OPENCODE_DISABLE_MODELS_FETCH="1",
            OPENCODE_DISABLE_AUTOUPDATE="1",
        )
        texts = [
            event["part"]["text"]
            for event in map(json.loads, said.splitlines())
            if event["type"] == "text"
        ]
        return float("".join(texts[-1:]).split()[-1:] == [data["answer"]])
