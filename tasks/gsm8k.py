"""Train on GSM8K, grade-school mathematics problems. Each problem's answer is one number, which a
program can check. The reward is 1 if the final answer is right, else 0.

    python train.py --config gsm8k model_path=DIR
    one attempt

    python train.py --config gsm8k model_path=DIR workflow=tasks.gsm8k.MathAgent
    two attempts

The first command uses RLVRWorkflow and the function `reward`. The second uses MathAgent, which asks
a second time if the first answer is wrong.

**Evaluation.** The base model and the trained one answer all test problems four times, with the
same prompt and sampling. At the end, the run prints both success rates, their intervals and pass@4
(rollout/evaluate.py). With `mode=eval`, either command evaluates one model alone.

**Data.** By default the problems come from the package `datasets` (openai/gsm8k). To use other
problems, set `train_dataset.path` and `valid_dataset.path` to JSONL files whose lines have the keys
"question" and "answer". As in GSM8K, "answer" is the whole solution, with the number after the last
`####`.

**Comparison.** If math-verify is installed, it compares answers, and understands fractions, units
and LaTeX. Without math-verify, the reward compares the numbers that `last_number` finds: 1,000
equals 1000.0, but 1/2 does not equal 0.5.
"""

import re
from decimal import Decimal
from typing import Any

from openai import AsyncOpenAI

from rollout.reward import AsyncRewardWrapper

try:
    import math_verify
except ImportError:
    math_verify = None

INSTRUCTION = "\nThink step by step, and put the final answer into \\boxed{}."
WRONG = "That is not right. Find the mistake, then give the final answer in \\boxed{} again."
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def dataset(split: str = "train") -> list[dict]:
    """Return the 7,473 training problems for the split "train", and the 1,319 test problems for any
    other split."""
    try:
        from datasets import load_dataset

        return list(
            load_dataset("openai/gsm8k", "main", split="train" if split == "train" else "test")
        )
    except (ImportError, OSError) as error:
        reason = f"openai/gsm8k cannot be loaded by the package datasets ({error})"
        raise ImportError(f"{reason}: give a file by {split}_dataset.path=FILE.jsonl") from error


def prepare(row: dict[str, Any]) -> dict[str, Any]:
    """Turn a GSM8K line into chat messages and the right number."""
    messages = [{"role": "user", "content": row["question"] + INSTRUCTION}]
    return {"messages": messages, "answer": str(row["answer"]).rpartition("####")[2].strip()}


def last_number(text: str) -> Decimal | None:
    """Return the last number in the last LaTeX box. Without a box, return the last number after
    `####`, or else the last number of the text."""
    place = (
        text.rpartition("\\boxed{")[2].partition("}")[0]
        if "\\boxed{" in text
        else text.rpartition("####")[2]
    )
    numbers = NUMBER.findall(place)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def is_right(completion: str, answer: str) -> bool:
    if math_verify:
        # None switches off math-verify's own time limit, which works only in the main thread.
        # AsyncRewardWrapper limits the time instead.
        gold, said = (
            math_verify.parse(text, parsing_timeout=None) for text in (answer, completion)
        )
        return bool(math_verify.verify(gold, said, timeout_seconds=None))
    said = last_number(completion)
    return said is not None and said == last_number(answer)


def reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **_
) -> float:
    """Return 1 if the answer is right, else 0. rollout/reward.py runs this function in a separate
    process."""
    return float(is_right(completion, answer))


WORKFLOW = "workflow.RLVRWorkflow"
WORKFLOW_KWARGS = {"reward_fn": "tasks.gsm8k.reward"}


class MathAgent:
    """Asks until the answer is right, at most `max_turns` times. A right answer at turn k, counted
    from 1, earns discount^(k-1)."""

    def __init__(
        self, max_turns: int = 2, discount: float = 0.9, timeout_seconds: float = 15.0
    ) -> None:
        self.max_turns = max_turns
        self.discount = discount
        self.timeout_seconds = timeout_seconds  # for a check; a slower check fails the episode

    async def run(self, data: dict, **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(max_retries=0, **extra_kwargs)
        messages: list = list(data["messages"])
        # math-verify can take minutes to check an answer. Called directly, it would block all other
        # episodes.
        check = AsyncRewardWrapper(is_right, self.timeout_seconds)
        for turn in range(self.max_turns):
            reply = await client.chat.completions.create(model="default", messages=messages)
            text = reply.choices[0].message.content or ""
            if await check(text, data["answer"]):
                return self.discount**turn
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": WRONG}]
        return 0.0
