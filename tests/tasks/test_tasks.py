"""The tasks can be solved, their rewards follow their definitions, and a seed determines the base
model."""

import io
import random
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from calls.client import sdk_http
from tasks import base_model, calculator, guess, maze


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Return a dict from (task, seed, copy) to the directory of a base model. Each model has been
    trained for two warm-up steps."""
    made = {}
    for task in (guess, maze):
        for seed, copy in ((1, 0), (1, 1), (2, 0)):
            path = tmp_path_factory.mktemp("models") / "base"
            task.make_model(path, seed, warmup_steps=2)
            made[task, seed, copy] = path
    return made


@pytest.fixture(scope="module")
def tokenizer(models: dict) -> Any:
    return AutoTokenizer.from_pretrained(models[guess, 1, 0])


def talk(*texts: str) -> list[dict]:
    """A conversation, in which the user begins."""
    return [{"role": ("user", "assistant")[i % 2], "content": s} for i, s in enumerate(texts)]


async def play(agent: Any, data: dict, harness: Any) -> tuple[float, list[list[dict]]]:
    """Run one episode of an agent. Return its reward, and the messages of each call."""
    session = await harness.start()
    async with sdk_http.AsyncClient(transport=sdk_http.ASGITransport(harness.app)) as http:
        kwargs: Any = {"base_url": f"http://proxy/{session}/v1", "api_key": "DUMMY"}
        reward = await agent.run(data, http_client=http, **kwargs)
    return reward, [call.messages for call in harness.proxy.find(session).cache.values()]


@pytest.mark.parametrize("task", [guess, maze], ids=["guess", "maze"])
def test_base_model_is_deterministic_and_an_ordinary_one(models: dict, task) -> None:
    """The same seed gives the same base model, and different seeds give different base models.
    Making a model does not change the state of the caller's random generator. The Auto classes of
    transformers load the model, and model and tokenizer have the same end token."""
    state = torch.random.get_rng_state()
    paths = [models[task, *key] for key in ((1, 0), (1, 1), (2, 0))]
    made = [AutoModelForCausalLM.from_pretrained(path) for path in paths]
    first, again, other = (model.state_dict() for model in made)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    base_model.make_qwen3(base_model.make_tokenizer(guess.WORDS), layers=1, context=64, seed=1)
    assert torch.equal(state, torch.random.get_rng_state())
    config, tokenizer = made[0].config, AutoTokenizer.from_pretrained(paths[0])
    assert (config.vocab_size, config.eos_token_id) == (len(tokenizer), tokenizer.eos_token_id)
    assert [file.name for file in paths[0].parent.iterdir()] == ["base"]  # nothing temporary


def test_processes_may_race(models: dict) -> None:
    """make_model does not change an existing model, and raises an error if the directory contains
    other files."""
    path = models[guess, 1, 0]
    before = (path / "model.safetensors").stat().st_mtime_ns
    guess.make_model(path, 1, warmup_steps=0)
    assert (path / "model.safetensors").stat().st_mtime_ns == before
    other = path.parent / "holiday-photos"
    other.mkdir()
    (other / "beach.jpg").touch()
    with pytest.raises(OSError, match="holiday-photos"):
        guess.make_model(other, 1, warmup_steps=0)


@given(data=st.data())
def test_template_splices(tokenizer: Any, data: st.DataObject) -> None:
    """The prompt of a new turn consists of the previous turn's prompt, the sampled tokens, and the
    tokens of the new message."""
    words = st.lists(st.sampled_from(guess.WORDS), max_size=4).map(" ".join)
    texts = data.draw(st.lists(words, min_size=3, max_size=7).filter(lambda texts: len(texts) % 2))
    messages = talk(*texts)

    def ids(part: list[dict]) -> list[int]:
        return tokenizer.apply_chat_template(part, add_generation_prompt=True, return_dict=False)

    parent, answer, tail = messages[:-2], texts[-2], messages[-1:]
    sampled = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    assert ids(parent) + sampled + ids(tail) == ids(messages)
    assert tokenizer.decode(sampled, skip_special_tokens=True) == answer


def test_only_answers_are_imitated(tokenizer: Any) -> None:
    """The loss of the warm-up covers only the assistant's words and the end tokens of the
    assistant's turns."""
    ids = base_model.render(tokenizer, talk(guess.QUESTION, "3", "higher", "5"))
    labels = base_model.answers_only(tokenizer, ids)
    trained = [label for label in labels if label != base_model.IGNORED]
    assert tokenizer.decode(trained) == "3 <end> 5 <end>"


# ---------------------------------------------------------------- the task `guess`


@given(rng=st.randoms(use_true_random=False))
def test_a_strategy_is_judged_as_it_plays(rng: random.Random) -> None:
    """For each secret that a strategy finds in the game, and for no other secret, `explore` reports
    the number of guesses."""
    answers: dict[str, str] = {}
    words = [*map(str, guess.SECRETS), "9", "higher"]

    def play(messages: list[dict], _: object = None) -> str:
        return answers.setdefault(str(messages), rng.choice(words))

    explored: list[int] = []
    guess.explore(play, explored)
    found = []
    for secret in guess.SECRETS:
        messages = list(guess.START)
        for turn in range(1, guess.GUESSES + 1):
            answer = play(messages)
            number = guess.parse(answer)
            if number == secret:
                found.append(turn)
            if number is None or number == secret:
                break
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": guess.feedback(number, secret)})
    assert sorted(explored) == sorted(found)


WRITTEN = ["", None, "3 4", "7", "0", "-3", "03", "three", "higher", "3.0", "³", "3 <end>"]


@pytest.mark.parametrize("answer", WRITTEN)
def test_what_is_no_guess(answer: str | None) -> None:
    """An answer counts as a guess only if it is a single number from 1 to 6."""
    assert guess.parse(answer) is None
    assert guess.parse(" 3 ") == 3


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("secret", "answers", "reward", "asked"),
    [
        (4, ["3", " 5", "4"], 1.0, [1, 3, 5]),
        (6, ["1", "2", "3", "4"], 0.0, [1, 3, 5]),
        (5, ["3", "higher", "5"], 0.0, [1, 3]),
    ],
)
async def test_agent_plays_to_the_end(
    start: Any, secret: int, answers: list[str], reward: float, asked: list[int]
) -> None:
    """The agent plays until the secret is found, no guess is left or an answer is no guess, and
    sends the model's answers back unchanged."""
    found, calls = await play(guess.GuessAgent(), {"secret": secret}, start(*answers))
    assert found == reward
    assert [len(messages) for messages in calls] == asked
    if secret == 4:
        assert calls[-1] == talk(guess.QUESTION, "3", "higher", " 5", "lower")


# ---------------------------------------------------------------- the task `maze`


def test_maze_is_perfect() -> None:
    """The maze connects its 144 cells by 143 passages, so there is exactly one way between any two
    cells."""
    passages = maze.passages()
    assert len(passages) == 144
    assert sum(map(len, passages.values())) == 2 * 143
    assert all(here in passages[there] for here in passages for there in passages[here])
    assert all(len(maze.distances(home)) == 144 for home in maze.HOMES)


def test_instances() -> None:
    """The maze has 286 prompts. The shortest ways home have 1 to 108 moves, and on average between
    50 and 60."""
    instances = maze.dataset()
    lengths = [maze.distances(d["home"])[maze.CELLS[d["start"]]] for d in instances]
    assert len(instances) == len({d["messages"][0]["content"] for d in instances}) == 286
    assert (min(lengths), max(lengths)) == (1, 108)
    assert 50 < sum(lengths) / len(lengths) < 60


def shortest_walk(start: str, home: str) -> list[str]:
    """Return the names of the cells on the shortest way home."""
    walk = [maze.CELLS[start]]
    while walk[-1] != maze.CELLS[home]:
        walk.append(min(maze.passages()[walk[-1]], key=maze.distances(home).__getitem__))
    return [maze.name(cell) for cell in walk]


def test_spl() -> None:
    """A walk gets a reward only if it stays in open passages and ends at home. A longer walk gets a
    smaller reward."""
    start, home = "b7", "l12"
    way = shortest_walk(start, home)
    moves = len(way) - 1
    table = {
        "the shortest way": (way, 1.0),
        "one step back and forth": ([way[0], way[1], *way], moves / (moves + 2)),
        "on past home and back": ([*way, way[-2], way[-1]], moves / (moves + 2)),
        "one cell short": (way[:-1], 0.0),
        "past home": ([*way, way[-2]], 0.0),
        "another beginning": (way[1:], 0.0),
        "through walls": ([way[0], way[-1]], 0.0),
        "standing still": ([way[0], *way], 0.0),
        "a word that is no cell": ([*way[:3], "from", *way[3:]], 0.0),
        "silence": ([], 0.0),
    }
    for case, (words, paid) in table.items():
        for answer in (" ".join(words), " ".join([*words, "<end>"])):
            reward = maze.reward("", answer, [], [], messages=[], start=start, home=home)
            assert reward == pytest.approx(paid), case


def test_drunkard_comes_home_sometimes() -> None:
    """The drunk, whom the maze's base model imitates, never goes through a wall. About a quarter of
    these walks end at home."""
    rng, rewards = random.Random(0), []
    for sample in 3 * maze.dataset():
        start, home = sample["start"], sample["home"]
        answer = " ".join(map(maze.name, maze.stagger(rng, start, home)))
        assert maze.walk_of(answer, start) is not None
        rewards.append(maze.reward("", answer, [], [], start=start, home=home))
    assert 0.2 < sum(reward > 0 for reward in rewards) / len(rewards) < 0.35


# ---------------------------------------------------------------- the task `calculator`

CALL = '<tool_call>{"name": "calc", "arguments": {"expression": "%s"}}</tool_call>'


def test_calculator_computes_nothing_else() -> None:
    """A model may send anything; only short sums, products and quotients have a value."""
    for text, value in {"12*11": "132", " 7 - (2+9)": "-4", "7//2": "3", "-3--4": "1"}.items():
        assert calculator.calculate(text) == value
    bad = ["9**9", "1/2", "7//0", "1.5", "exit()", "1(2)", "007", "3+", "1+1+1+1+1+1+1+1+1+1+1"]
    assert {calculator.calculate(text) for text in [*bad, "", None, 5]} == {"error"}


@pytest.mark.anyio
async def test_reward_is_a_ladder(start: Any) -> None:
    """Each step towards the right answer earns more. After a wrong value the model is not asked
    again."""
    ladder = {
        0.0: ["132"],
        0.05: ["<tool_call>12*11"],
        0.1: [CALL % "12"],
        0.15: [CALL % "12*12"],
        0.2: [CALL % "12+11"],
        0.6: [CALL % "12*11", ""],
        0.8: [CALL % "11*12", "132 eggs"],
        1.0: [CALL % "12*11", " 132"],
    }
    problem = {"question": "A box holds 12 eggs. How many do 11 boxes hold?", "answer": "132"}
    for reward, said in ladder.items():
        found, calls = await play(calculator.CalculatorAgent(), problem, start(*said))
        assert (found, len(calls)) == (reward, len(said))
        assert calculator.success(reward) == (reward == 1.0)


@pytest.mark.anyio
async def test_a_compound_problem_needs_two_calls(start: Any) -> None:
    """Without rungs only the end is rewarded. A wrong first value ends the episode."""
    agent, problem = calculator.CalculatorAgent(True, False), calculator.compound()[0]
    _, a, b, c, _ = re.split(r"\D+", problem["question"])
    said = [CALL % f"{a}*{b}", CALL % f"{problem['steps'][0]}-{c}", problem["answer"]]
    for reward, answers in ((1.0, said), (0.0, [CALL % f"{a}+{b}"])):
        found, calls = await play(agent, problem, start(*answers))
        assert (found, len(calls)) == (reward, len(answers))


def test_held_out_problems_are_new() -> None:
    """Training and validation share neither a template nor a number."""
    seen = {}
    for split in ("train", "valid"):
        texts = [problem["question"] for problem in calculator.dataset(split)]
        seen[split] = {re.sub(r"\d+", "N", text) for text in texts}
        seen[split] |= set(re.findall(r"\d+", " ".join(texts)))
    assert not seen["train"] & seen["valid"]


# ---------------------------------------------------------------- the printed summaries


def printed(task, answers: list[str] | str) -> str:
    """Return the text that a task's summary prints for a policy that gives these `answers`."""
    console = Console(width=100, record=True, file=io.StringIO())
    task.summary(lambda messages: answers if isinstance(answers, str) else answers.pop(0), console)
    return console.export_text()


def test_guess_summary() -> None:
    """The summary of the task `guess` shows the learnt strategy next to binary search. An answer
    that is not a guess is shown as a question mark."""
    text = printed(guess, ["4", "2", "1", "3", "5", "6"])
    assert text.count("finds 6 of 6, mean 2.33 guesses") == 2
    assert "finds 1 of 6, mean 1.00 guesses" in printed(guess, "3")
    assert "?" in printed(guess, "higher")


def test_maze_summary() -> None:
    """The summary of the task `maze` draws the model's walk through the maze, and reports whether
    the walk ends at home or runs into a wall."""
    start, home = maze.typical()["start"], maze.typical()["home"]
    walk = shortest_walk(start, home)
    text = printed(maze, " ".join(walk))
    assert f"makes {len(walk) - 1} moves and is home" in text
    assert text.count("•") == 2 * (len(walk) - 1) - 1
    assert len([line for line in text.splitlines() if "█" in line]) == 2 * maze.SIDE + 1
    through = printed(maze, f"{start} {home}")
    assert "gives an answer that is no walk from S and is not home" in through
