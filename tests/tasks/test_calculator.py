"""The calculator is safe, its reward is a ladder, and what is held out was never trained on."""

import re
from typing import Any

import pytest

from calls.client import sdk_http
from tasks import calculator

CALL = '<tool_call>{"name": "calc", "arguments": {"expression": "%s"}}</tool_call>'
PROBLEM = {"question": "A box holds 12 eggs. How many eggs do 11 boxes hold?", "answer": "132"}


def test_calculator_computes_nothing_else() -> None:
    """A model may send anything; only short sums, products and quotients have a value."""
    for text, value in {"12*11": "132", " 7 - (2+9)": "-4", "7//2": "3", "-3--4": "1"}.items():
        assert calculator.calculate(text) == value
    bad = ["9**9", "1/2", "7//0", "1.5", "exit()", "1(2)", "007", "3+", "1+1+1+1+1+1+1+1+1+1+1"]
    assert {calculator.calculate(text) for text in [*bad, "", None, 5]} == {"error"}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("said", "reward"),
    [
        (["132"], 0.0),
        (["<tool_call>12*11"], 0.1),
        ([CALL % "12x11"], 0.2),
        ([CALL % "12*12"], 0.3),
        ([CALL % "12+11"], 0.4),
        ([CALL % "12*11", ""], 0.6),
        ([CALL % "11*12", "132 eggs"], 0.8),
        ([CALL % "12*11", " 132"], 1.0),
    ],
)
async def test_reward_is_a_ladder(start: Any, said: list[str], reward: float) -> None:
    """Each step towards the right answer earns more, through the proxy and the OpenAI SDK. After a
    wrong value the model is not asked again."""
    harness = start(*said, "never asked for")
    session = await harness.start()
    async with sdk_http.AsyncClient(transport=sdk_http.ASGITransport(harness.app)) as http:
        where: Any = {"base_url": f"http://proxy/{session}/v1", "api_key": "DUMMY"}
        agent = calculator.CalculatorAgent()
        assert await agent.run(PROBLEM, http_client=http, **where) == reward
    assert len(harness.proxy.find(session).cache) == len(said)
    assert calculator.success(reward) == (reward == 1.0)


def test_held_out_problems_are_new() -> None:
    """Training and validation share neither a template nor a number."""
    seen = {}
    for split in ("train", "valid"):
        texts = [problem["question"] for problem in calculator.dataset(split)]
        seen[split] = {re.sub(r"\d+", "N", text) for text in texts}
        seen[split] |= set(re.findall(r"\d+", " ".join(texts)))
    assert not seen["train"] & seen["valid"]
