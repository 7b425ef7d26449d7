"""`python -m extras.episode` runs an agent once and draws its calls. tests/test_examples.py also
has agents that fail."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from conftest import ROOT
from openai import AsyncOpenAI

from extras.episode import text_of


class TwoTurns:
    """An agent that asks twice; its module's first sample has the question."""

    async def run(self, data: dict, base_url: str, api_key: str, **more: Any) -> float:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=more["http_client"])
        messages: list[Any] = [{"role": "user", "content": data["question"]}]
        for _ in range(2):
            own: Any = {"max_completion_tokens": 3, "temperature": 0.5, "messages": messages}
            reply = await client.chat.completions.create(model="default", **own)
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))
            messages.append({"role": "user", "content": "again [/x]\x1b[2J"})
        return 1.0


def dataset() -> list[dict]:
    return [{"question": "why?"}]


def episode(*words: str) -> subprocess.CompletedProcess[str]:
    path = f"{ROOT / 'tests' / 'extras'}:{ROOT / 'tests'}"
    command = ["env", f"PYTHONPATH={path}", "COLUMNS=200", sys.executable, "-m", "extras.episode"]
    return subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=200)


def test_the_tree_of_an_episode(tiny_model_dir: Path, tiny_server: str) -> None:
    """The tree shows each call under the call that it continues, with its tokens, its final reward,
    and its temperature if that is not 1. The sample is the first one of the agent's module."""
    model = ["--model-path", str(tiny_model_dir)]
    done = episode("test_episode.TwoTurns", *model, "--server", tiny_server, "--discount", "0.5")
    assert done.returncode == 0, done.stderr
    lines = [line.strip("│├└─ ") for line in done.stdout.splitlines()]
    assert lines[0] == "2 turns"
    turns = [line for line in lines if line.startswith("reward")]
    assert [turn.split(",")[0] for turn in turns] == ["reward 0.50", "reward 1.00"]
    sizes = r"\d+ \+ [1-3] tokens, [1-3] trained at temperature 0.5, chatcmpl-"
    assert all(re.search(sizes, turn) for turn in turns)
    users = [line for line in lines if line.startswith("user")]
    assert users == ["user: why?", r"user: again [/x]\x1b[2J"]


def test_a_message_with_tool_calls() -> None:
    """Calls follow the text, written as in Python."""
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    assert text_of({"role": "assistant", "content": None, "tool_calls": [call]}) == 'add({"a": 1})'
    assert text_of({"content": "two"}) == "two"
