"""Claim: an agent that compacts its history, or delegates to a sub-agent, learns from a reward at
the end only if the reward reaches the calls whose answers were read.

    python bench/links.py [--seeds 1 2 3 4 5] [--steps 30]

The agent gets three digits, and must answer with the largest. The call `note` sees the three digits
and passes one of them on. The last call reads this digit, which the base model has learnt to
repeat. So the call `note` must learn which digit to pass on.

    compacts     user: note 4 1 3 - [4]      user: 4 - user: largest - [4]
    delegates    user: largest 4 1 3 - [ask] - tool: 4 - [4]       user: note 4 1 3 - [4]

Only the last call is rewarded. Each agent trains with `rollout.openai.compaction=link` and with
`cut`. The base model passes on a random one of the three digits. The table shows the mean success
of the last five steps. Even if the passed digit stays random, a last call that sees no other digit
can reach a success of about .5.
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from openai import AsyncOpenAI

ROOT = Path(__file__).resolve().parent.parent
DIGITS = "123456"
CALL = '<tool_call> {"name": "ask", "arguments": {}} </tool_call>'
ASK: Any = {"type": "function", "function": {"name": "ask", "parameters": {"type": "object"}}}
RECIPE: Any = {
    "train_dataset.batch_size": 10,
    "gconfig.n_samples": 8,
    "gconfig.max_new_tokens": 8,
    "rollout.max_head_offpolicyness": 1,
    "actor.ppo_n_minibatches": 2,
    "actor.adv_norm.std_level": "batch",
    "actor.optimizer.lr": 1e-3,
    "actor.optimizer.lr_scheduler_type": "linear",
}


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def dataset(split: str = "train") -> list[dict[str, str]]:
    draws = itertools.permutations(DIGITS, 3)
    return [{"digits": " ".join(digits), "answer": max(digits)} for digits in draws]


async def answer(client: AsyncOpenAI, *messages: Any, **options: Any) -> Any:
    reply = await client.chat.completions.create(model="default", messages=[*messages], **options)
    return reply.choices[0].message


class Compacts:
    """Its second call begins with the answer to its first call."""

    async def run(self, data: dict[str, str], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(max_retries=0, **extra_kwargs)
        summary = await answer(client, user(f"note {data['digits']}"))
        said = await answer(client, user(summary.content or ""), user("largest"))
        return float(said.content == data["answer"])


class Delegates:
    """It has a tool that is an agent itself."""

    async def run(self, data: dict[str, str], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(max_retries=0, **extra_kwargs)
        question, tools = user(f"largest {data['digits']}"), {"tools": [ASK]}
        called = await answer(client, question, **tools)
        if not called.tool_calls:
            return 0.0
        report = await answer(client, user(f"note {data['digits']}"))
        call_id = called.tool_calls[0].id
        result = {"role": "tool", "content": report.content or "", "tool_call_id": call_id}
        said = await answer(client, question, called.model_dump(exclude_none=True), result, **tools)
        return float(said.content == data["answer"])


WORKFLOW = Compacts


def success(reward: float) -> bool:
    return reward == 1


def make_model(path: Path, seed: int) -> None:
    """The base model imitates conversations in which the passed digit is a random one."""
    from tasks import base_model

    words = ["note", "largest", "<tool>", *CALL.split(), *DIGITS]
    tokenizer = base_model.make_tokenizer(dict.fromkeys(words))
    model = base_model.make_qwen3(tokenizer, layers=2, context=64, seed=seed)
    noise = random.Random(seed)

    def example() -> list[int]:
        digits = noise.sample(DIGITS, 3)
        one, last = noise.choice(digits), {"role": "assistant", "content": noise.choice(DIGITS)}
        if noise.random() < 0.9:
            last["content"] = one
        note = [user("note " + " ".join(digits)), {"role": "assistant", "content": one}]
        called = {"role": "assistant", "content": CALL}
        large = [user("largest " + " ".join(digits)), called, {"role": "tool", "content": one}]
        talk = noise.choice([note, [user(one), user("largest"), last], [*large, last]])
        return base_model.render(tokenizer, talk)

    base_model.imitate(model, tokenizer, lambda: [example() for _ in range(32)], 400, 5e-3)
    base_model.save_atomically(path, model, tokenizer)


def train(agent: str, compaction: str, seed: int, steps: int) -> float:
    """Return the mean success of the last five steps."""
    recipe = ROOT / "runs/links/recipe.yaml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text("task: bench.links\nexperiment_name: links\nserver: {backend: tiny}\n")
    name = f"{agent}-{compaction}-{seed}"
    keys = RECIPE | {"workflow": f"bench.links.{agent}", "rollout.openai.compaction": compaction}
    keys |= {"seed": seed, "trial_name": name, "max_steps": steps, "callbacks": "[]"}
    words = ["--config", str(recipe), *(f"{key}={value}" for key, value in keys.items())]
    subprocess.run(
        [sys.executable, "train.py", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    lines = (ROOT / "runs/links" / name / "metrics.jsonl").read_text().splitlines()
    return mean(json.loads(line)["success"] for line in lines[-5:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print("| agent | compaction | success of each seed |\n|---|---|---|")
    for agent, compaction in itertools.product(["Compacts", "Delegates"], ["link", "cut"]):
        found = [train(agent, compaction, seed, args.steps) for seed in args.seeds]
        print(f"| {agent} | {compaction} | {', '.join(f'{x:.2f}' for x in found)} |", flush=True)


if __name__ == "__main__":
    main()
