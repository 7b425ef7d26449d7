"""The task of the examples, and a base model for it that is made on the spot: seconds on one core.

The task: what is ( a + b ) * c? The agent has two tools, add and multiply, and is to answer in words. So an episode is
three turns: a call of add, a call of multiply with what came back, and the answer.

The model (tasks/base_model.py: a word is a token) is warmed up by imitation of exactly that, to emit calls in the form
of Hermes and Qwen, <tool_call> {"name": ..., "arguments": ...} </tool_call>. It copies the numbers from the question
and from the results of the tools; what a framework adds in its system prompt is unknown words to it. It is here to show
that each framework's conversation trains, not to learn anything more.

    python -m examples.calculator .cache/calculator        makes the model's folder; the server and the proxy take it
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
    """All 64 questions."""
    return [
        {"question": f"( {a} + {b} ) * {c}", "answer": str((a + b) * c), "numbers": (a, b, c)}
        for a, b, c in product(NUMBERS, repeat=3)
    ]


def conversation(sample: dict, noise: random.Random) -> list[dict]:
    """How somebody who can do it does it, with a system prompt of random length."""
    a, b, c = sample["numbers"]
    talk = [
        ("user", sample["question"]),
        ("assistant", CALL.format("add", a, b)),
        ("tool", str(a + b)),
        ("assistant", CALL.format("multiply", a + b, c)),
        ("tool", sample["answer"]),
        ("assistant", f"the answer is {sample['answer']}"),
    ]
    tools = [("system", "add multiply")]  # as the template renders them
    system = [("system", "unknown " * noise.randrange(1, 40))] * noise.randrange(2)
    return [{"role": role, "content": content} for role, content in tools + system + talk]


def make_model(path: Path, steps: int = 300) -> Path:
    """A Hugging Face folder with the warmed-up model, made if it is not there."""
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
