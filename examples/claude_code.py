"""An agent with Claude Code (https://code.claude.com), a coding agent that runs shell commands.

The example uses no sandbox, and `--allowedTools Bash` lets Claude Code run any shell command. So
during training, run a coding agent in its own container. `--bare` and `--system-prompt` leave out
Claude Code's usual instructions to the model, which have about 80 kB.
"""

from examples.node_agent import NODE, run_process

# This script starts Claude Code even if npm ran no install script.
CLI = NODE / "node_modules" / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"
WINDOW = 80_000  # tokens: Claude Code's smallest window, minus room for the answer


class Agent:
    def __init__(self, compact_at=WINDOW):
        self.compact_at = compact_at  # tokens, after which a summary replaces the history

    async def run(self, data, **extra_kwargs):
        said = await run_process(
            *["node", str(CLI), "--print", "--bare", "--model", "policy"],
            *["--system-prompt", "You compute.", "--tools", "Bash", "--allowedTools", "Bash", "--"],
            data["question"],
            ANTHROPIC_BASE_URL=extra_kwargs["base_url"].removesuffix("/v1"),
            ANTHROPIC_API_KEY=extra_kwargs["api_key"],
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            CLAUDE_CODE_AUTO_COMPACT_WINDOW="100000",
            CLAUDE_AUTOCOMPACT_PCT_OVERRIDE=str(100 * self.compact_at / WINDOW),
        )
        return float(said.split()[-1:] == [data["answer"]])
