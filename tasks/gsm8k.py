"""GSM8K: grade-school problems whose answer is one number, the classic task of a verifiable reward (RLVR).

The rule: whatever the model writes, only its final answer counts: 1 if it is the number, else 0. Two ways to train on
it, both of which this file offers:

    python train.py --config configs/gsm8k.yaml model_path=DIR                                      one answer
    python train.py --config configs/gsm8k.yaml model_path=DIR workflow=tasks.gsm8k.MathAgent       and second tries

The first is RLVRWorkflow with the reward function below; the second an agent on the plain OpenAI SDK, which is told
that it was wrong and tries again.

**Data.** Without `train_dataset.path` the problems come from `datasets` (openai/gsm8k). A JSONL file of
{"question", "answer"} lines in GSM8K's form does as well: there the answer is the whole solution, and what follows
its last `####` is the number (`prepare` reads it).

**Is it the same number?** math-verify decides where it is installed: it knows fractions, units and LaTeX. Without it
the last number of the answer is compared, the one in \\\\boxed{} or after `####` if there is one; 1,000 and 1000.0 are
equal, 1/2 and 0.5 are not.
"""

import re
from decimal import Decimal
from typing import Any

from openai import AsyncOpenAI

try:
    import math_verify
except ImportError:
    math_verify = None

INSTRUCTION = "\nThink step by step, and put the final answer into \\boxed{}."
WRONG = "That is not right. Find the mistake, then give the final answer in \\boxed{} again."
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def dataset(split: str = "train") -> list[dict]:
    """The 7,473 problems for training, or the 1,319 others."""
    try:
        from datasets import load_dataset

        return list(load_dataset("openai/gsm8k", "main", split="train" if split == "train" else "test"))
    except (ImportError, OSError) as error:
        reason = f"openai/gsm8k cannot be had through the package datasets ({error})"
        raise ImportError(f"{reason}: give a file by train_dataset.path=FILE.jsonl") from error


def prepare(row: dict[str, Any]) -> dict[str, Any]:
    """A line in GSM8K's form as chat messages and the number."""
    messages = [{"role": "user", "content": row["question"] + INSTRUCTION}]
    return {"messages": messages, "answer": str(row["answer"]).rpartition("####")[2].strip()}


def last_number(text: str) -> Decimal | None:
    """The final answer: in the last box, else after the last ####, else the last number of all."""
    place = text.rpartition("\\boxed{")[2].partition("}")[0] if "\\boxed{" in text else text.rpartition("####")[2]
    numbers = NUMBER.findall(place)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def is_right(completion: str, answer: str) -> bool:
    """Whether the completion's final answer is `answer`."""
    if math_verify:
        # Their clock is a signal, which only a main thread may use; AsyncRewardWrapper has its own.
        gold, said = (math_verify.parse(text, parsing_timeout=None) for text in (answer, completion))
        return bool(math_verify.verify(gold, said, timeout_seconds=None))
    said = last_number(completion)
    return said is not None and said == last_number(answer)


def reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], answer: str, **_: Any
) -> float:
    """1 if right, else 0; runs in a process of its own (rollout/reward.py)."""
    return float(is_right(completion, answer))


WORKFLOW = "workflow.RLVRWorkflow"
WORKFLOW_KWARGS = {"reward_fn": "tasks.gsm8k.reward"}


class MathAgent:
    """Answers, and while it is wrong is told so and tries again. The k-th try is worth discount^(k-1)."""

    def __init__(self, max_turns: int = 2, discount: float = 0.9) -> None:
        self.max_turns, self.discount = max_turns, discount

    async def run(self, data: dict, base_url: str, api_key: str, http_client: Any, **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
        messages: list = list(data["messages"])
        for turn in range(self.max_turns):
            reply = await client.chat.completions.create(model="default", messages=messages)
            text = reply.choices[0].message.content or ""
            if is_right(text, data["answer"]):
                return self.discount**turn
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": WRONG}]
        return 0.0
