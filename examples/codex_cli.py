"""An agent with Codex (https://github.com/openai/codex), a coding agent that runs shell commands.

Codex's sandbox cannot start in many containers, so it is turned off here. During training, run a
coding agent in its own container instead.
"""

from examples.node_agent import BIN, run_process


class Agent:
    def __init__(self, compact_at=10**9):
        self.compact_at = compact_at  # tokens, after which Codex replaces its history by a summary

    async def run(self, data, **extra_kwargs):
        provider = f'name="policy",base_url="{extra_kwargs["base_url"]}",env_key="POLICY_KEY",wire_api="responses"'
        retries = "request_max_retries=0,stream_max_retries=0"
        said = await run_process(
            str(BIN / "codex"),
            *[
                "exec",
                "--ephemeral",
                "--skip-git-repo-check",
                "--sandbox",
                "danger-full-access",
                "--model",
                "default",
            ],
            *[
                "--config",
                'model_provider="policy"',
                "--config",
                f"model_providers.policy={{{provider},{retries}}}",
                "--config",
                f"model_auto_compact_token_limit={self.compact_at}",
            ],
            data["question"],
            POLICY_KEY=extra_kwargs["api_key"],
        )
        return float(said.split()[-1:] == [data["answer"]])
