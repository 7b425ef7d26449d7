"""The task of the example agents, and a tiny base model for this task, which is trained in seconds on one core.

The agent computes ( a + b ) * c with two tools, add and multiply, and gives the answer in words. An episode has three
turns: the agent calls add, calls multiply with the sum, and then answers.

    user: ( 1 + 2 ) * 3     assistant: add(1, 2)     tool: 3     assistant: multiply(3, 3)     tool: 9
    assistant: the answer is 9

Every word is one token of the model (tasks/base_model.py). The model learns to imitate such conversations. The model's
tool calls have the format of Hermes and Qwen: <tool_call> {"name": ..., "arguments": ...} </tool_call>. The model
copies numbers from the question and from the tools' results. The words of a framework's system prompt become unknown
tokens. The base model already solves the task. The examples show only that training works with the conversations of
each framework.

    python -m examples.calculator .cache/calculator        make the folder of the model, for the server and the proxy
"""

import random
import sys
from itertools import product
from pathlib import Path

from tasks.base_model import imitate, make_qwen3, make_tokenizer, render, save_atomically

NUMBERS = range(1, 5)
CALL = '<tool_call> {{"name": "{}", "arguments": {{"a": {} , "b": {} }}}} </tool_call>'
WORDS = ["<tool>", "<tool_call>", "</tool_call>", '{"name":', '"add",', '"multiply",', '"arguments":', '{"a":', '"b":']
WORDS += ["}}", ",", "(", ")", "+", "*", "add", "multiply", "the", "answer", "is", *map(str, range(33))]
CHAT_TEMPLATE = (
    "{% if tools %}<system> {% for t in tools %}{{ t['function']['name'] }} {% endfor %}<end> {% endif %}"
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% for c in m['tool_calls'] or [] %}"
    "<tool_call> {\"name\": \"{{ c['function']['name'] }}\", \"arguments\": {{ c['function']['arguments'] | tojson }}}"
    " </tool_call> {% endfor %}<end> {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def dataset(split: str = "train") -> list[dict]:
    """Return all 64 questions with their answers."""
    return [
        {"question": f"( {a} + {b} ) * {c}", "answer": str((a + b) * c), "numbers": (a, b, c)}
        for a, b, c in product(NUMBERS, repeat=3)
    ]


def conversation(sample: dict, noise: random.Random) -> list[dict]:
    """Return a correct conversation about a sample. The conversation has a system prompt with probability 1/2."""
    a, b, c = sample["numbers"]
    talk = [
        ("user", sample["question"]),
        ("assistant", CALL.format("add", a, b)),
        ("tool", str(a + b)),
        ("assistant", CALL.format("multiply", a + b, c)),
        ("tool", sample["answer"]),
        ("assistant", f"the answer is {sample['answer']}"),
    ]
    tools = [("system", "add multiply")]  # the chat template renders the tools as a system message
    prompt = "unknown " * noise.randrange(1, 40)
    system = [("system", prompt)] if noise.randrange(2) else []
    return [{"role": role, "content": content} for role, content in tools + system + talk]


def make_model(path: Path, steps: int = 300) -> Path:
    """Return the path of the model's Hugging Face folder. Make the folder if it does not exist yet."""
    if not (path / "config.json").is_file():
        tokenizer = make_tokenizer(WORDS)
        tokenizer.chat_template = CHAT_TEMPLATE
        model, noise, samples = make_qwen3(tokenizer, layers=2, context=512, seed=1), random.Random(1), dataset()

        def batch() -> list[list[int]]:
            talks = [conversation(sample, noise) for sample in noise.choices(samples, k=16)]
            return [render(tokenizer, talk) for talk in talks]

        imitate(model, tokenizer, batch, steps, lr=3e-3)
        save_atomically(path, model, tokenizer)
    return path


if __name__ == "__main__":
    print(make_model(Path(sys.argv[1])))
