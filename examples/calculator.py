"""The task of the example agents, and a tiny base model for this task. One core trains the model in
seconds.

The agent computes ( a + b ) * c in three turns: it calls the tool add, then the tool multiply with
the sum, and then answers in a sentence. A coding agent has only a shell (exec_command in Codex,
bash in opencode, Bash in Claude Code), and runs `expr 1 + 2` and `expr 3 '*' 3` instead.

    user: ( 1 + 2 ) * 3     assistant: add(1, 2)           tool: 3
                            assistant: multiply(3, 3)      tool: 9
                            assistant: the answer is 9

Every word is one token of the model (tasks/base_model.py). From correct conversations, the base
model learns to copy numbers from the question and from the tools' results. Its tool calls have the
format of Hermes and Qwen: <tool_call> {"name": ..., "arguments": ...} </tool_call>. A word outside
the model's vocabulary becomes the unknown token. The tokenizer keeps only the last 12 words of a
message, because the instructions of a coding agent have thousands of words, and the model's context
has only 512 tokens. The base model already solves the task. So the examples only show that training
can use each framework's conversations.

    python -m examples.calculator .cache/calculator        # make the model's folder
"""

import random
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from tokenizers import Regex, normalizers

from tasks.base_model import imitate, make_qwen3, make_tokenizer, render, save_atomically

NUMBERS = range(1, 5)
CALL = '<tool_call> {{"name": "{}", "arguments": {{"a": {} , "b": {} }}}} </tool_call>'
SHELL_CALL = '<tool_call> {{"name": "{}", "arguments": {{"{}": "expr {} {} {} " }}}} </tool_call>'
# shell tool (Codex, opencode, Claude Code): name of its argument
SHELLS = {"exec_command": "cmd", "bash": "command", "Bash": "command"}
KINDS = "", "", "exec_command", "bash"  # kinds of conversations; "" has no shell
WORDS = [
    "<tool>",
    "<tool_call>",
    "</tool_call>",
    '{"name":',
    '"add",',
    '"multiply",',
    '"arguments":',
    '{"a":',
    '"b":',
]
WORDS += [
    "}}",
    ",",
    "(",
    ")",
    "+",
    "*",
    "add",
    "multiply",
    "the",
    "answer",
    "is",
    *map(str, range(33)),
]
SHELL_WORDS = ['{"cmd":', '{"command":', '"expr', "'*'", '"']
# Matches all but the last 12 words of a message. The normalizer sees one message at a time.
EARLY = r"(?<=\s)(?!<tool>)\S+\s+(?=(?:\S+\s+){12})"
CHAT_TEMPLATE = (
    "{% if tools %}<system> {% for t in tools %}{{ t['function']['name'] }} {% endfor %}<end> {% endif %}"
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} "
    "{% for c in m['tool_calls'] or [] %}<tool_call> {\"name\": \"{{ c['function']['name'] }}\", \"arguments\": "
    "{{ c['function']['arguments'] | tojson | replace(',', ' ,') | replace('}', ' }') }}} </tool_call> {% endfor %}"
    "<end> {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def dataset(split: str = "train") -> list[dict]:
    return [
        {"question": f"( {a} + {b} ) * {c}", "answer": str((a + b) * c), "numbers": (a, b, c)}
        for a, b, c in product(NUMBERS, repeat=3)
    ]


def conversation(sample: dict, noise: random.Random, shell: str = "") -> list[dict]:
    """Return a correct conversation about a sample. `shell` names the shell tool of a coding agent.

    Without a shell, half of the conversations list no tools, because some agents send requests
    without tools. With a shell, unknown words stand for what a coding agent adds: other tools, an
    earlier message, and text around the question and the results.
    """
    a, b, c = sample["numbers"]
    calls = CALL.format("add", a, b), CALL.format("multiply", a + b, c)
    tools, question, before, prefix = (
        "add multiply" if noise.randrange(2) else "",
        sample["question"],
        [],
        ["", ""],
    )
    if shell:
        where = shell, SHELLS[shell]
        calls = SHELL_CALL.format(*where, a, "+", b), SHELL_CALL.format(*where, a + b, "'*'", c)
        tools = " ".join(
            ["unknown"] * noise.randrange(2) + [shell] + ["unknown"] * noise.randrange(12)
        )
        question = " ".join(
            ["unknown"] * noise.randrange(2) + [question] + ["unknown"] * noise.randrange(2)
        )
        before = [("user", "unknown " * noise.randrange(1, 13))] if noise.randrange(2) else []
        prefix = [
            " ".join(noise.choices(["unknown", "0", "1"], (8, 1, 1), k=noise.randrange(12)))
            for _ in calls
        ]
    talk = [
        ("user", question),
        ("assistant", calls[0]),
        ("tool", f"{prefix[0]} {a + b}".strip()),
        ("assistant", calls[1]),
        ("tool", f"{prefix[1]} {sample['answer']}".strip()),
        ("assistant", f"the answer is {sample['answer']}"),
    ]
    if shell == "Bash":  # Claude Code asks for a summary, which then replaces the history
        about_it = ("user", "unknown " * 12)
        summary = ("assistant", f"the answer is {sample['question']}")
        summarised = [*talk[: noise.choice([3, 5])], about_it, summary]
        talk = noise.choice([talk, talk, talk, summarised, [about_it, *talk[3:]]])
    prompt = "unknown " * noise.randrange(1, 13)
    system = [("system", prompt)] if noise.randrange(2) else []
    messages = [("system", tools)] * bool(tools) + system + before + talk
    return [{"role": role, "content": content} for role, content in messages]


def make_model(path: Path, steps: int = 400, kinds: Sequence[str] = KINDS) -> Path:
    """Make the model's Hugging Face folder, unless it exists."""
    if not (path / "config.json").is_file():
        shells = [kind for kind in kinds if kind]
        quoted = [f'"{shell}",' for shell in shells]
        tokenizer = make_tokenizer([*WORDS, *shells, *quoted, *SHELL_WORDS])
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex(EARLY), "")
        model, noise, samples = (
            make_qwen3(tokenizer, layers=2, context=512, seed=1),
            random.Random(1),
            dataset(),
        )

        def batch() -> list[list[int]]:
            drawn = noise.choices(kinds, k=16)
            talks = [
                conversation(sample, noise, kind)
                for sample, kind in zip(noise.choices(samples, k=16), drawn)
            ]
            return [render(tokenizer, talk) for talk in talks]

        imitate(model, tokenizer, batch, steps, lr=3e-3)
        save_atomically(path, model, tokenizer)
    return path


if __name__ == "__main__":
    torch.set_num_threads(1)  # more threads would slow down so small a model
    print(make_model(Path(sys.argv[1])))
