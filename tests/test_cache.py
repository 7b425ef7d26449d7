"""The calls of a session form a tree. These tests check how a call finds its parent, how rewards pass from children to
parents, and that each sampled token is trained exactly once."""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache import InteractionCache, InteractionWithTokenLogpReward
from calls.messages import Refusal, canonical
from inference.io_struct import ModelResponse

PAIRS = [
    json.loads(line)
    for line in (Path(__file__).parent / "data/chat_pairs.jsonl").read_text().splitlines()
]
Messages = list[dict[str, Any]]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def called(a: Any) -> dict[str, Any]:
    """Return an assistant's message that calls the tool f with the argument a."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": a}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def turn(
    messages: Messages,
    output: str = "ok",
    prompt: list[int] | None = None,
    tokens: list[int] | None = None,
    **fields: Any,
) -> InteractionWithTokenLogpReward:
    """Return a finished interaction with these messages, tokens and reward."""
    tokens = [7] if tokens is None else tokens
    response = ModelResponse(prompt or [1], tokens, [-0.5] * len(tokens), [3] * len(tokens), "stop")
    return InteractionWithTokenLogpReward(
        messages, model_response=response, output_message_list=[said(output)], **fields
    )


def chain(length: int) -> InteractionCache:
    """Return a cache with one conversation. The prompt of each turn consists of all tokens of the previous turn and one
    new token."""
    cache, messages, ids = InteractionCache(), [user("0")], [0]
    for k in range(length):
        cache.enter(str(k), turn(list(messages), str(k), list(ids), [100 + k, 200 + k]))
        messages += [said(str(k)), user(str(k + 1))]
        ids += [100 + k, 200 + k, k]
    return cache


# Random sessions


@dataclass
class Call:
    """A call of an agent that makes random calls. The number `goes_on_from` selects the earlier call that this call
    continues. If `goes_on_from` is None, the call continues no earlier call."""

    goes_on_from: int | None
    question: str
    answer: str | bool | int  # the text of the answer, or the argument of its tool call
    reward: float | None
    drifts: bool  # true if the prompt does not begin with the parent's tokens
    finishes: bool
    sampled: int  # number of sampled tokens


calls = st.lists(
    st.builds(
        Call,
        goes_on_from=st.none() | st.integers(0, 6),
        question=st.sampled_from("ab"),
        answer=st.sampled_from(["x", True, 1]),
        reward=st.none() | st.integers(-4, 4).map(float),
        drifts=st.integers(0, 5).map(lambda n: n == 0),
        finishes=st.integers(0, 5).map(bool),
        sampled=st.integers(0, 3),
    ),
    max_size=12,
)


def play(session: list[Call]) -> InteractionCache:
    """Return a cache that contains the calls of the session. All new tokens of the session have different ids."""
    cache, fresh = InteractionCache(), iter(range(1, 10_000))
    for k, call in enumerate(session):
        names = [name for name in cache if cache[name].complete]
        before = (
            cache[names[call.goes_on_from % len(names)]]
            if names and call.goes_on_from is not None
            else None
        )
        history = before.messages + (before.output_message_list or []) if before else []
        interaction = cache.enter(
            str(k), InteractionWithTokenLogpReward([*history, user(call.question)])
        )
        if not call.finishes:
            continue
        parent = interaction.parent
        ids = (
            parent.tokens.input_tokens + parent.tokens.output_tokens
            if parent and not call.drifts
            else []
        )
        output = [next(fresh) for _ in range(call.sampled)]
        response = ModelResponse(
            [*ids, next(fresh)],
            output,
            [-float(t) for t in output],
            [t % 5 for t in output],
            "stop",
            0.5 + k,
        )
        output_message = said(call.answer) if isinstance(call.answer, str) else called(call.answer)
        cache.finish(str(k), response, [output_message])
        if call.reward is not None:
            cache.set_reward(str(k), call.reward)
    return cache


@given(calls)
def test_the_parent_is_the_longest_finished_prefix(session: list[Call]) -> None:
    """The cache finds the same parent as a search through all interactions. Of two identical candidates, the newer
    candidate becomes the parent."""
    cache = play(session)
    names = list(cache)
    for i, name in enumerate(names):
        child = [canonical(message) for message in cache[name].messages]
        best, length = None, 0
        for candidate in (cache[earlier] for earlier in names[:i]):
            if not candidate.complete:
                continue
            whole = [
                canonical(m) for m in candidate.messages + (candidate.output_message_list or [])
            ]
            if child[: len(whole)] == whole and len(whole) >= length:
                best, length = candidate, len(whole)
        assert cache[name].parent is best


@given(calls, st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_discounting_is_its_recursive_definition(session: list[Call], gamma: float) -> None:
    """The final reward of turn i is R(i) = r(i) + gamma * (mean of R over the children of i)."""
    cache = play(session)
    own = {name: i.reward or 0.0 for name, i in cache.items() if i.complete}

    def final(name: str) -> float:
        below = [final(child) for child in own if cache[child].parent is cache[name]]
        return own[name] + gamma * (sum(below) / len(below) if below else 0.0)

    expected = {name: final(name) for name in own}
    cache.apply_reward_discount(gamma)
    assert {name: cache[name].reward for name in own} == pytest.approx(expected)


@given(calls)
def test_concat_trains_every_sampled_token_once(session: list[Call]) -> None:
    """In an export in style concat, each sampled token is trained in exactly one row. In its row, each sampled token
    follows exactly the tokens that preceded it when it was sampled. The row holds the version, log-probability and
    temperature with which each token was sampled, and the reward of the token's turn."""
    cache = play(session)
    cache.apply_reward_discount(0.5)
    of_token = {t: i for i in cache.finished() for t in i.tokens.output_tokens}
    trained = []
    for interaction in cache.export_interactions("concat").values():
        row = interaction.to_lists()
        per_row = (
            "rewards",
            "truncated",
            "regenerated",
            "side_conversations",
            "unstored",
            "placeholders",
        )
        assert {len(values) for key, values in row.items() if key not in per_row} == {
            len(row["input_ids"])
        }
        for t, token in enumerate(row["input_ids"]):
            if row["turn_ids"][t] < 0:
                assert not row["loss_mask"][t]
                assert row["versions"][t] == -1
                assert (row["logprobs"][t], row["turn_rewards"][t], row["temperatures"][t]) == (
                    0.0,
                    0.0,
                    1.0,
                )
                continue
            source = of_token[token]
            place = source.tokens.output_tokens.index(token)
            assert (
                row["input_ids"][:t]
                == source.tokens.input_tokens + source.tokens.output_tokens[:place]
            )
            assert row["logprobs"][t] == -float(token)
            assert row["versions"][t] == token % 5
            assert row["turn_ids"][t] == source.turn
            assert row["turn_rewards"][t] == source.reward
            assert row["temperatures"][t] == source.tokens.temperature
            if row["loss_mask"][t]:
                trained.append(token)
    assert sorted(trained) == sorted(of_token)


@given(calls)
def test_a_row_of_concat_continues_the_row_that_trains_its_parent(session: list[Call]) -> None:
    """In an export in style concat, row A is the parent of row B if the parent of B's first trained turn is trained in
    A. If the first trained turn of a row is a root, the row has no parent."""
    cache = play(session)
    rows = cache.export_interactions("concat")
    row_of = {
        turn: row for row in rows.values() for turn, is_trained in row.row_turns if is_trained
    }
    assert set(row_of) == set(cache.finished())
    for row in rows.values():
        first = next(turn for turn, is_trained in row.row_turns if is_trained)
        assert row.parent is (row_of[first.parent] if first.parent else None)


@given(calls)
def test_individual_exports_every_finished_call(session: list[Call]) -> None:
    """An export in style individual has one row for each finished call, even after an export in style concat."""
    cache = play(session)
    cache.export_interactions("concat")
    exported = cache.export_interactions("individual")
    assert list(exported.values()) == cache.finished()
    for interaction in exported.values():
        row, response = interaction.to_lists(), interaction.tokens
        assert row["input_ids"] == response.input_tokens + response.output_tokens
        assert row["loss_mask"] == [0] * response.input_len + [1] * response.output_len


# Parents


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair["id"])
def test_real_clients_turns_are_chained(pair: dict[str, Any]) -> None:
    """If a framework sends the history back in a different form, the next turn is still a child of the previous
    turn."""
    cache = InteractionCache()
    response = ModelResponse([1], [2], [-1.0], [0], "stop")
    cache.enter(
        "parent",
        InteractionWithTokenLogpReward(
            pair["parent"], model_response=response, output_message_list=[pair["reply"]]
        ),
    )
    cache.enter("child", InteractionWithTokenLogpReward(pair["child"]))
    assert cache["child"].parent is cache["parent"]


def test_a_turn_with_other_tools_stays_in_the_tree() -> None:
    """An agent may omit the tools when it asks for a final answer. A final call without tools is still a child of the
    previous turn, so the final call's reward reaches the earlier turns. Without the tools, the final call's prompt has
    different tokens, so the final call and the previous turn become two rows."""
    cache = InteractionCache()
    cache.enter("work", turn([user("hi")], "ok", [1], [2], template_key="tools"))
    cache.enter("answer", turn([user("hi"), said("ok"), user("now answer")], "42", [8, 9], [3]))
    assert cache["answer"].parent is cache["work"]
    cache.set_last_reward(1.0)
    cache.apply_reward_discount(0.5)
    assert cache["work"].reward == 0.5
    assert cache.export_interactions("concat").keys() == {"work", "answer"}


def test_an_unfinished_call_is_never_a_parent() -> None:
    """A call cannot be a parent before its output is known. A call that fails is removed from the cache."""
    cache = InteractionCache()
    cache.enter("a", InteractionWithTokenLogpReward([user("hi")]))
    cache.enter("b", turn([user("hi"), said("ok"), user("more")]))
    assert cache["b"].parent is None
    cache.discard("a")
    cache.discard("b")
    assert list(cache) == ["b"]  # `discard` does not remove a finished interaction


@pytest.mark.parametrize(
    ("sampled", "echoed"), [(True, 1), (1, True), (False, 0), ([0, "x"], [False, "x"])]
)
def test_true_is_not_1(sampled: Any, echoed: Any) -> None:
    """If a client changes `true` in a tool call to 1, the cache treats the history as a different conversation,
    although `True == 1` in Python. An unchanged history is a continuation of the conversation."""
    for a in (echoed, sampled):
        cache = InteractionCache()
        first = turn([user("hi")])
        first.output_message_list = [called(sampled)]
        cache.enter("first", first)
        cache.enter("second", turn([user("hi"), called(a), user("more")]))
        cache.enter(
            "third", turn([user("hi"), called(sampled), user("more"), said("ok"), user("and more")])
        )
        assert cache["second"].parent is (cache["first"] if a is sampled else None)
        assert cache["third"].parent is cache["second" if a is sampled else "first"]


class Counted(dict):
    """A message that counts how often its role is read."""

    looks = 0

    def get(self, key: str, default: Any = None) -> Any:
        Counted.looks += key == "role"
        return super().get(key, default)


def test_finding_a_parent_costs_messages_not_interactions() -> None:
    """To find the parent of a request, the cache reads each message of the request only once. In this test 800 requests
    share the same 200 messages."""
    Counted.looks = 0
    shared = [Counted(user(str(i))) for i in range(200)]
    cache = InteractionCache()
    for k in range(800):
        cache.enter(str(k), turn(list(shared), str(k)))
    assert (
        Counted.looks == 800 * 200 + 1
    )  # + 1: for one request, the cache reads the first message twice


def test_a_turn_reads_its_new_messages_only() -> None:
    """In a chain of 100 turns, the cache reads each new question twice: once to find the parent, and once to add the
    call to the tree. The cache reads each answer once. The cache does not read the messages of earlier turns one by
    one: it compares all of them at once with the newest conversation."""
    Counted.looks = 0
    cache, messages = InteractionCache(), [user("0")]
    for k in range(100):
        interaction = InteractionWithTokenLogpReward([Counted(message) for message in messages])
        cache.enter(str(k), interaction)
        cache.finish(str(k), turn([]).tokens, [Counted(said(str(k)))])
        messages += [said(str(k)), Counted(user(str(k + 1)))]
    assert Counted.looks == 100 * 3


def test_a_conversation_is_kept_once() -> None:
    """A turn reuses its parent's message objects, so the cache stores each message of a conversation only once."""
    cache = chain(50)
    first, last = cache["0"], cache["49"]
    assert all(mine is theirs for mine, theirs in zip(last.messages, first.messages, strict=False))
    assert last.messages[1] is first.output_message_list[0]


def test_bad_entries_are_refused() -> None:
    """The cache raises ValueError for an interaction without messages and for an id that the cache already
    contains."""
    cache = chain(1)
    with pytest.raises(ValueError, match="no messages"):
        cache.enter("x", InteractionWithTokenLogpReward([]))
    with pytest.raises(ValueError, match="already"):
        cache.enter("0", turn([user("hi")]))


def test_a_message_that_cannot_be_compared_changes_nothing() -> None:
    """A call with a message that is nested too deeply is refused before it enters the tree. If the output of a call is
    nested too deeply, the call stays unfinished, so it can be discarded."""
    deep: Any = {}
    for _ in range(300):
        deep = {"a": deep}
    cache = InteractionCache()
    with pytest.raises(Refusal, match="nested too deeply"):
        cache.enter(
            "deep", InteractionWithTokenLogpReward([user("hi"), called(deep), user("more")])
        )
    assert not cache
    cache.enter("0", InteractionWithTokenLogpReward([user("hi")]))
    with pytest.raises(Refusal, match="nested too deeply"):
        cache.finish("0", turn([]).tokens, [called(deep)])
    assert not cache.finished()
    cache.discard("0")
    assert not cache


# Rewards


def test_a_sibling_keeps_its_reward_to_itself() -> None:
    """If A has the children B (reward 1) and C (reward 2), and gamma is 0.9, then B keeps 1 and A gets 0.9 * 1.5 =
    1.35. For this test's tree and rewards, AReaL gives the child B the reward 2.8."""
    cache = InteractionCache()
    cache.enter("A", turn([user("q")], "a"))
    for name, reward in (("B", 1.0), ("C", 2.0)):
        cache.enter(name, turn([user("q"), said("a"), user(name)]))
        cache.set_reward(name, reward)
    cache.apply_reward_discount(0.9)
    assert [cache[name].reward for name in "ABC"] == pytest.approx([1.35, 1.0, 2.0])


def test_a_chain_gives_the_geometric_series() -> None:
    """In a chain A -> B -> C with reward 1 on C and gamma = 0.9, B gets 0.9 and A gets 0.81, as in AReaL's
    documentation."""
    cache = chain(3)
    cache.set_last_reward(1.0)
    cache.apply_reward_discount(0.9)
    assert [i.reward for i in cache.values()] == pytest.approx([0.81, 0.9, 1.0])
    with pytest.raises(RuntimeError, match="already"):
        cache.apply_reward_discount(0.9)


def test_the_last_reward_goes_to_the_last_finished_call() -> None:
    """The last finished call gets the reward, even if a later call is unfinished. (In AReaL the unfinished call gets
    the reward.)"""
    cache = chain(2)
    cache.enter("cut", InteractionWithTokenLogpReward([user("0")]))
    cache.set_last_reward(1.0)
    cache.apply_reward_discount(0.5)
    assert cache["cut"].reward is None
    assert [i.reward for i in cache.finished()] == [0.5, 1.0]


TITLE = {"role": "system", "content": "You write titles."}
CODER = {"role": "system", "content": "You code."}


def title_call(cache: InteractionCache, title_first: bool, turns: int) -> None:
    """Make the calls that opencode makes: while the agent's first turn runs, a second call asks for a title. The
    agent's calls have tools, and the call for a title has none."""
    title = InteractionWithTokenLogpReward([TITLE, user("hello")])
    agent = InteractionWithTokenLogpReward([CODER, user("hello")], tools=TOOLS)
    entered = {"title": title, "0": agent}
    for name in ("title", "0") if title_first else ("0", "title"):
        cache.enter(name, entered[name])
    for name in entered:
        cache.finish(name, turn([user("x")]).tokens, [said(name)])
    messages = [*agent.messages, said("0")]
    for k in range(1, turns):
        cache.enter(str(k), turn([*messages, user("more")], str(k), tools=TOOLS))
        messages += [user("more"), said(str(k))]


@pytest.mark.parametrize("title_first", [True, False])
@pytest.mark.parametrize("turns", [1, 3])
def test_a_side_conversation_takes_no_reward(title_first: bool, turns: int) -> None:
    """opencode's title call gets no reward, whether it starts before or after the agent's first turn. The agent's last
    turn gets the reward."""
    cache = InteractionCache()
    title_call(cache, title_first, turns)
    assert [i.interaction_id for i in cache.mark_side_conversations()] == ["title"]
    cache.set_last_reward(1.0)
    cache.apply_reward_discount(1.0)
    assert {name: i.reward for name, i in cache.items()} == {
        "title": None,
        **{str(k): 1.0 for k in range(turns)},
    }
    rows = {name: i.to_lists() for name, i in cache.export_interactions("concat").items()}
    assert sum(rows["title"]["loss_mask"]) == 0
    assert sum(sum(row["loss_mask"]) for row in rows.values()) == turns


def test_a_side_conversation_that_is_rewarded_is_trained() -> None:
    """If the agent sets a reward for a call that asks for a title, this call is trained."""
    cache = InteractionCache()
    title_call(cache, True, 2)
    cache.set_reward("title", 0.5)
    cache.apply_reward_discount(1.0)
    assert cache["title"].reward == 0.5
    assert sum(cache["title"].to_lists()["loss_mask"]) == 1


def test_what_comes_later_is_no_side_conversation() -> None:
    """The last call gets the reward, even if it has no tools and its prompt differs from the other calls' prompts. If
    the agent continues one of two calls with identical messages, neither call counts as a side conversation."""
    cache = InteractionCache()
    cache.enter("work", turn([user("work")], tools=TOOLS))
    cache.enter("answer", turn([user("answer")]))
    cache.set_last_reward(1.0)
    assert cache["answer"].reward == 1.0
    cache = InteractionCache()
    for name in "ab":
        cache.enter(name, InteractionWithTokenLogpReward([user("draft")]))
    for name in "ab":
        cache.finish(name, turn([user("x")]).tokens, [said(name)])
    cache.enter("c", turn([user("draft"), said("a"), user("more")]))
    assert not cache.mark_side_conversations()


def test_an_orphan_leaves_no_trace() -> None:
    """If a client retries a request because it never read the reply, the turn of the unread reply is removed. A turn
    with an unread reply is kept if it is the parent of another turn."""
    cache = chain(2)
    for name in ("0", "1", "unknown"):
        cache.drop_orphan(name)
    assert list(cache) == ["0"]
    cache.enter(
        "again",
        InteractionWithTokenLogpReward([user("0"), said("0"), user("1"), said("1"), user("2")]),
    )
    assert cache["again"].parent is cache["0"]
    cache.drop_orphan("0")
    assert list(cache) == ["0", "again"]
    cache.discard("again")
    cache.drop_orphan("0")
    assert not cache


@given(calls, st.lists(st.integers(0, 11)))
def test_what_failed_leaves_no_trace(session: list[Call], orphans: list[int]) -> None:
    """Failed calls do not change a session's tree, even if the session also drops orphans. An orphan is a turn whose
    reply no client will read."""
    caches = play(session), play([call for call in session if call.finishes])
    for cache in caches:
        for name in list(cache):
            cache.discard(name)
        for k in orphans:
            cache.drop_orphan([*cache, ""][k % (len(cache) + 1)])
    one, other = (
        [(i.messages, i.output_message_list, i.children, i.turn) for i in cache.values()]
        for cache in caches
    )
    assert one == other


def test_an_orphan_leaves_its_twin() -> None:
    """If two turns are identical and the newer turn is dropped, the next turn continues the older turn."""
    cache = InteractionCache()
    for name in ("twin", "orphan"):
        cache.enter(name, turn([user("q")], "same"))
    cache.drop_orphan("orphan")
    cache.enter("next", turn([user("q"), said("same"), user("r")]))
    assert cache["next"].parent is cache["twin"]


@pytest.mark.parametrize(
    "reward", [math.nan, math.inf, -math.inf, "1", None, [1], 10**400, 1.7e308]
)
def test_a_reward_is_a_finite_number(reward: Any) -> None:
    """The cache refuses a reward of NaN or infinity, because one such reward would make the whole batch NaN."""
    with pytest.raises(ValueError, match="finite"):
        chain(1).set_reward("0", reward)


@pytest.mark.parametrize("reward", [1, True, torch.tensor(1.0)])
def test_any_number_is_a_reward(reward: Any) -> None:
    """A reward may be an int, a bool or a torch scalar; the cache converts the reward to a float."""
    cache = chain(1)
    cache.set_last_reward(reward)
    assert cache["0"].reward == 1.0


def test_a_reward_for_nobody_is_an_error() -> None:
    """A reward for an unknown id, an unfinished call or an empty session raises KeyError."""
    cache = InteractionCache()
    with pytest.raises(KeyError):
        cache.set_last_reward(1.0)
    cache.enter("a", InteractionWithTokenLogpReward([user("hi")]))
    for name in ("a", "b"):
        with pytest.raises(KeyError, match=name):
            cache.set_reward(name, 1.0)


# Export


def test_tensors_are_the_documents() -> None:
    """An interaction's tensors have the keys, dtypes and shapes that AReaL's documentation describes. At prompt
    positions, loss_mask and logprobs are 0 and versions is -1."""
    cache = InteractionCache()
    cache.enter("a", turn([user("q")], prompt=[5, 6], tokens=[7, 8, 9], reward=2.0))
    tensors = cache["a"].to_tensor_dict()
    expected = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 9]], dtype=torch.int32),
        "attention_mask": torch.ones(1, 5, dtype=torch.bool),
        "loss_mask": torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.int32),
        "logprobs": torch.tensor([[0, 0, -0.5, -0.5, -0.5]]),
        "versions": torch.tensor([[-1, -1, 3, 3, 3]], dtype=torch.int32),
        "turn_ids": torch.tensor([[-1, -1, 0, 0, 0]], dtype=torch.int32),
        "turn_rewards": torch.tensor([[0, 0, 2.0, 2.0, 2.0]]),
        "temperatures": torch.ones(1, 5),
        "rewards": torch.tensor([2.0]),
        "truncated": torch.tensor([0], dtype=torch.int32),
        "regenerated": torch.tensor([0], dtype=torch.int32),
        "side_conversations": torch.tensor([0], dtype=torch.int32),
        "unstored": torch.tensor([0], dtype=torch.int32),
        "placeholders": torch.tensor([0], dtype=torch.int32),
    }
    assert tensors.keys() == expected.keys()
    for key, value in expected.items():
        assert tensors[key].dtype == value.dtype, key
        assert torch.equal(tensors[key], value), key
    with pytest.raises(ValueError, match="unfinished"):
        InteractionWithTokenLogpReward([user("q")]).to_tensor_dict()


def test_a_reward_set_after_the_tensors_shows() -> None:
    """A reward that is set after to_tensor_dict() appears in the tensors of the next to_tensor_dict() call. (In AReaL
    the second call of to_tensor_dict() returns the tensors of the first call.)"""
    cache = chain(2)
    leaf = cache.export_interactions("concat")["1"]
    assert leaf.to_tensor_dict()["rewards"].tolist() == [0.0]
    cache.set_reward("0", 1.0)
    cache.set_last_reward(2.0)
    tensors = leaf.to_tensor_dict()
    assert tensors["rewards"].tolist() == [2.0]
    assert tensors["turn_rewards"].tolist() == [[0.0, 1.0, 1.0, 0.0, 2.0, 2.0]]


def test_an_unsampled_token_is_never_trained() -> None:
    """If a child's prompt does not begin with exactly the parent's tokens, the child starts a new row, even if only one
    token differs."""
    cache = InteractionCache()
    cache.enter("a", turn([user("q")], "a", prompt=[1, 2], tokens=[3, 4]))
    cache.enter("b", turn([user("q"), said("a"), user("r")], prompt=[1, 2, 3, 99, 5], tokens=[6]))
    assert cache["b"].parent is cache["a"]
    rows = {name: i.to_lists() for name, i in cache.export_interactions("concat").items()}
    assert rows.keys() == {"a", "b"}
    assert rows["b"]["loss_mask"] == [0, 0, 0, 0, 0, 1]


def test_an_inner_turns_reward_survives_concat() -> None:
    """If a row contains several turns, each turn is trained with its own final reward. (AReaL exports only the leaf's
    reward.)"""
    cache = chain(2)
    cache.set_reward("0", 1.0)
    (row,) = (i.to_lists() for i in cache.export_interactions("concat").values())
    assert row["turn_rewards"] == [0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert row["rewards"] == [0.0]


def test_a_shared_turn_is_trained_in_the_first_leaf_only() -> None:
    """If two leaves of a conversation tree share a root, the root's tokens are trained in the first leaf's row. In the
    second leaf's row the root's tokens are context and are not trained."""
    cache = InteractionCache()
    cache.enter("root", turn([user("q")], "a", prompt=[1], tokens=[2, 3]))
    for name in ("left", "right"):
        cache.enter(name, turn([user("q"), said("a"), user(name)], prompt=[1, 2, 3, 4], tokens=[5]))
    rows = {name: i.to_lists() for name, i in cache.export_interactions("concat").items()}
    assert rows["left"]["loss_mask"] == [0, 1, 1, 0, 1]
    assert rows["right"]["loss_mask"] == [0, 0, 0, 0, 1]
    assert rows["right"]["turn_ids"] == [-1, 0, 0, -1, 1]


def test_what_training_cannot_reproduce_stays_out_of_the_loss() -> None:
    """A turn that was sampled with top_p, or requested with store=False, is not trained. The tokens of an untrained
    turn are only context for later turns."""
    cache = chain(3)
    cache["0"].tokens.trains_exactly = False
    cache["1"].unstored = "honour"
    (row,) = (i.to_lists() for i in cache.export_interactions("concat").values())
    assert row["loss_mask"] == [0] * 7 + [1, 1]


def test_depth_is_no_limit() -> None:
    """The cache can discount and export a chain that is longer than Python's recursion limit, because cache.py uses no
    recursion."""
    depth = sys.getrecursionlimit() + 50
    cache = chain(depth)
    cache.set_last_reward(1.0)
    cache.apply_reward_discount(1.0)
    assert cache["0"].reward == 1.0
    (row,) = (i.to_lists() for i in cache.export_interactions("concat").values())
    assert sum(row["loss_mask"]) == 2 * depth


def test_a_later_export_leaves_exported_rows_alone() -> None:
    """A second export in a different style does not change the rows of the first export."""
    cache = chain(3)
    first = cache.export_interactions("concat")
    before = {name: row.to_lists() for name, row in first.items()}
    assert {
        name: sum(row.to_lists()["loss_mask"]) for name, row in cache.export_interactions().items()
    } == dict.fromkeys("012", 2)
    assert {name: row.to_lists() for name, row in first.items()} == before


@pytest.mark.parametrize("discount", [-0.1, 1.5, math.nan])
def test_a_discount_is_between_0_and_1(discount: float) -> None:
    """The cache refuses a discount outside [0, 1], because such a discount could make the rewards of a long chain
    overflow."""
    with pytest.raises(ValueError, match="needed"):
        chain(1).apply_reward_discount(discount)


def test_an_unknown_style_is_an_error() -> None:
    """A misspelt export style raises ValueError."""
    with pytest.raises(ValueError, match="individual or concat"):
        chain(1).export_interactions("concatenated")


def test_the_state_can_be_read() -> None:
    """The cache's repr shows how many interactions are unfinished, and how many have no reward."""
    cache = chain(2)
    cache.enter("open", InteractionWithTokenLogpReward([user("x")]))
    assert repr(cache) == "InteractionCache(3 interactions, 1 unfinished, 3 unrewarded)"
    assert repr(cache["1"]) == "Interaction('1', turn 1, reward=None, parent='0')"
