"""Word problems with a calculator: a pretrained model learns to call a tool.

"Ann has 43 coins and Ben has 18 coins. How many coins do they have together?" A model of 135M
parameters (tasks/smollm2.py) cannot add such numbers. But it can learn to write

    <tool_call>{"name": "calc", "arguments": {"expression": "43+18"}}</tool_call>

and to answer "61". The model must learn this form, find the numbers and choose the operation.

**The agent** is an ordinary tool loop. `converse` yields each message as it comes, so
extras/chat.py can use the same code. Solved problems precede every question. Without these examples
the model never makes a right call, so it has nothing to learn from.

**The reward is graded**, because a model that is seldom right learns slowly from successes alone. A
call with a wrong value (result) earns at most 0.2. If a wrong value earned more, the model would
settle on one operation before trying the others.

    0.05  begins a call      0.2  the problem's numbers, but the wrong operation
    0.10  a complete call    0.6  the right value
    0.15  any operation      0.8  an answer that contains the value      1.0  the value alone

**Held out.** The problems of the split "valid" use four templates of their own, and numbers that
training never sees, so the model cannot know their answers by heart.
"""

import ast
import json
import operator
import random
import re
from collections.abc import AsyncIterator
from typing import Any

from openai import AsyncOpenAI

PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "calc", "parameters": PARAMETERS}}]


# ---------------------------------------------------------------- the tool

OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def calculate(expression: Any) -> str:
    """Return the value of an expression of integers, + - * // and brackets, or "error" for anything
    else that a model may write. The limit of 20 characters bounds the value and the time to compute
    it."""
    if not isinstance(expression, str) or not re.fullmatch(r"[-+*/()\d ]{1,20}", expression):
        return "error"
    try:
        return str(value_of(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return "error"


def value_of(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value_of(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value_of(node.left), value_of(node.right))
    raise ValueError("not an operation of the calculator")


# ---------------------------------------------------------------- the agent


def solved(question: str, *steps: tuple[str, str]) -> list[dict]:
    """Return a conversation that solves a problem with the tool. A step is an expression and its
    result."""
    messages: list[dict] = [{"role": "user", "content": question}]
    for k, (expression, result) in enumerate(steps):
        call = {"name": "calc", "arguments": json.dumps({"expression": expression})}
        calls = [{"id": f"example-{k}", "type": "function", "function": call}]
        messages += [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"example-{k}", "content": result},
        ]
    return [*messages, {"role": "assistant", "content": steps[-1][1]}]


EXAMPLES = [
    *solved("A bag holds 15 pens. How many pens do 31 bags hold?", ("15*31", "465")),
    *solved("Tom had 60 cards and lost 18. How many cards does he have left?", ("60-18", "42")),
    *solved("A bowl has 35 nuts, and Eva adds 46. How many nuts are in the bowl?", ("35+46", "81")),
    *solved("A chair costs 24 dollars. How much do 13 chairs cost?", ("24*13", "312")),
    *solved("A pond had 70 frogs, and 29 jumped out. How many frogs are left?", ("70-29", "41")),
    *solved("Max has 53 stamps and Kim has 16. How many do they have together?", ("53+16", "69")),
]
COMPOUND_EXAMPLES = [
    *solved(
        "A bag holds 15 pens. Kim buys 31 bags and loses 22 pens. How many pens does she have?",
        ("15*31", "465"),
        ("465-22", "443"),
    ),
    *solved(
        "Tom had 60 cards and lost 18. Then he got 25 cards. How many cards does he have now?",
        ("60-18", "42"),
        ("42+25", "67"),
    ),
]


class CalculatorAgent:
    """Solves a word problem with one call of the calculator, or two if `compound`. Without
    `graded`, only success is rewarded."""

    def __init__(self, compound: bool = False, graded: bool = True) -> None:
        self.examples = COMPOUND_EXAMPLES if compound else EXAMPLES
        self.max_turns = 3 if compound else 2
        self.graded = graded

    async def converse(self, client: AsyncOpenAI, question: str) -> AsyncIterator[dict]:
        messages: list[Any] = [*self.examples, {"role": "user", "content": question}]
        for _ in range(self.max_turns):
            reply = await client.chat.completions.create(
                model="default", messages=messages, tools=TOOLS
            )
            said: Any = reply.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            yield messages[-1]
            for call in said.tool_calls or []:
                result = calculate(json.loads(call.function.arguments).get("expression"))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                yield messages[-1]
            if not said.tool_calls:
                return

    async def run(self, data: dict, **extra_kwargs: Any) -> float:
        """Solve a problem, and return the reward. A wrong value ends the episode, because we never
        saw a model correct its mistake."""
        client = AsyncOpenAI(max_retries=0, **extra_kwargs)
        right = (*data.get("steps", ()), data["answer"])
        said = []
        async for message in self.converse(client, data["question"]):
            said.append(message)
            if message["role"] == "tool" and message["content"] not in right:
                break
        reward = grade(data, said)
        return reward if self.graded else float(success(reward))


WORKFLOW = CalculatorAgent


def grade(data: dict, said: list[dict]) -> float:
    calls = [call for message in said for call in message.get("tool_calls") or []]
    results = [message["content"] for message in said if message["role"] == "tool"]
    text = said[-1].get("content", "")
    if not results:
        return 0.05 if text.startswith("<tool_call>") else 0.0
    if results[-1] != data["answer"]:
        last = calls[len(results) - 1]["function"]["arguments"]
        used = sorted(re.findall(r"\d+", last))
        given = sorted(re.findall(r"\d+", data["question"]))
        if results[-1] == "error" or len(used) < 2:
            return 0.1
        return 0.2 if used == given else 0.15
    if said[-1]["role"] == "tool":
        return 0.6
    if text.strip() == data["answer"]:
        return 1.0
    return 0.8 if data["answer"] in text else 0.6


def success(reward: float) -> bool:
    return reward == 1.0


# ---------------------------------------------------------------- the problems

TRAINED = [  # the operations alternate, so none dominates a batch
    "Ann has {a} coins and Ben has {b} coins. How many coins do they have together? +",
    "Ann had {a} coins and gave away {b}. How many coins does she have left? -",
    "A box holds {a} eggs. How many eggs do {b} boxes hold? *",
    "A train has {a} passengers, and {b} more get on. How many passengers are there now? +",
    "A tree has {a} apples, and {b} fall down. How many apples are still on the tree? -",
    "One ticket costs {a} dollars. How much do {b} tickets cost? *",
    "A farmer has {a} cows and buys {b} more. How many cows does he have now? +",
    "A shop had {a} cakes and sold {b}. How many cakes are left? -",
    "A bus has {a} seats. How many seats do {b} buses have? *",
    "There are {a} red and {b} blue balls. How many balls are there in total? +",
    "A book has {a} pages. Mia has read {b}. How many pages are left to read? -",
    "Sam runs {a} miles every day. How many miles does he run in {b} days? *",
]
HELD_OUT = [
    "A class has {a} girls and {b} boys. How many children are in the class? +",
    "A tank had {a} liters of water, and {b} leaked out. How many liters are left? -",
    "A shelf holds {a} books. How many books do {b} shelves hold? *",
    "Lily had {a} stickers and lost {b}. How many stickers does she have left? -",
]


def dataset(split: str = "train") -> list[dict]:
    """Return 480 problems for the split "train", and 96 held-out problems for any other split."""
    is_train = split == "train"
    rng = random.Random(split)
    numbers = [n for n in range(11, 100) if (n % 5 != 2) == is_train]
    problems = []
    for template in TRAINED * 40 if is_train else HELD_OUT * 24:
        b, a = sorted(rng.sample(numbers, 2))
        question, sign = template.format(a=a, b=b).rsplit(" ", 1)
        problems.append({"question": question, "answer": calculate(f"{a}{sign}{b}")})
    # Sort held-out problems by template. Then the three problems that extras/before_after.py shows,
    # a third of the list apart, have different templates.
    each = 1 if is_train else len(HELD_OUT)
    return [problem for k in range(each) for problem in problems[k::each]]


COMPOUND = [
    "A box holds {a} eggs. Eve buys {b} boxes, and {c} eggs break. How many are whole? * -",
    "A ticket costs {a} dollars. Tom buys {b} and a map for {c} dollars. What does he pay? * +",
    "Ann has {a} coins and Ben has {b} coins. They spend {c} coins. How many coins are left? + -",
    "A train has {a} passengers. {b} get off, and {c} get on. How many are in the train? - +",
]


def compound() -> list[dict]:
    """Return 96 problems in which the second call needs the result of the first."""
    rng = random.Random("compound")
    problems = []
    for template in COMPOUND * 24:
        c, b, a = sorted(rng.sample(range(11, 100), 3))
        question, first, second = template.format(a=a, b=b, c=c).rsplit(" ", 2)
        middle = calculate(f"{a}{first}{b}")
        answer = calculate(f"{middle}{second}{c}")
        problems.append({"question": question, "steps": [middle], "answer": answer})
    return problems
