"""The calls of a session: tree, rewards and rows (cache.py), links and side conversations
(calls/sessions.py)."""

import json
import math
import sys
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from harness import said, user
from hypothesis import given
from hypothesis import strategies as st

from cache import Interaction, InteractionCache
from calls.messages import canonical
from calls.sessions import SHORT, Session, ancestors
from inference.fields import Refusal
from inference.io_struct import ModelResponse

TOOLS = [{"type": "function", "function": {"name": "f"}}]


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def turn(
    messages: list[dict[str, Any]],
    output: str | dict[str, Any] = "ok",
    prompt: list[int] | None = None,
    tokens: list[int] | None = None,
    **fields: Any,
) -> Interaction:
    """A finished interaction."""
    tokens = [7] if tokens is None else tokens
    response = ModelResponse(prompt or [1], tokens, [-0.5] * len(tokens), [3] * len(tokens), "stop")
    message = said(output) if isinstance(output, str) else output
    return Interaction(messages, model_response=response, output_message_list=[message], **fields)


def add(cache: InteractionCache | Session, name: str, call: Interaction) -> None:
    """Enter a call, and finish it if it has its tokens."""
    call.interaction_id = name
    cache.enter(call)
    if call.model_response:
        cache.finish(call, call.model_response, call.output_message_list[0])


def session_of(*calls: Interaction, links: bool = True) -> Session:
    """A session with these calls, whose ids are "0", "1", ..."""
    session = Session("s", "t", {}, InteractionCache(), links)
    for k, call in enumerate(calls):
        add(session, str(k), call)
    return session


def chain(length: int) -> InteractionCache:
    """One conversation, in which each prompt is all earlier tokens and a new one."""
    cache, messages, ids = InteractionCache(), [user("0")], [0]
    for k in range(length):
        add(cache, str(k), turn(list(messages), str(k), list(ids), [100 + k, 200 + k]))
        messages += [said(str(k)), user(str(k + 1))]
        ids += [100 + k, 200 + k, k]
    return cache


def rows_of(cache: InteractionCache, style: str = "concat") -> dict[str, dict[str, Any]]:
    return {name: i.to_lists() for name, i in cache.export_interactions(style).items()}


# ---- random sessions


@dataclass
class Call:
    """A random call. `goes_on_from` picks the earlier call that it continues, `quotes` the call
    whose answer its new message quotes, and `names` the call that its header names."""

    goes_on_from: int | None
    quotes: int | None
    names: int | None
    role: str
    question: str
    answer: str | bool | int  # a text, or the argument of a tool call
    reward: float | None
    drifts: bool  # whether the prompt differs from the parent's tokens
    finishes: bool
    sampled: int


calls = st.lists(
    st.builds(
        Call,
        goes_on_from=st.none() | st.integers(0, 6),
        quotes=st.none() | st.integers(0, 6),
        names=st.none() | st.integers(0, 6),
        role=st.sampled_from(["user", "tool"]),
        question=st.sampled_from("ab"),
        answer=st.sampled_from(["x", "report", True, 1]),
        reward=st.none() | st.integers(-4, 4).map(float),
        drifts=st.integers(0, 5).map(lambda n: n == 0),
        finishes=st.integers(0, 5).map(bool),
        sampled=st.integers(0, 3),
    ),
    max_size=12,
)


def play(calls: list[Call], links: bool = True) -> tuple[InteractionCache, dict[Any, Any]]:
    """Make the calls, and return them with the ids that each one's header names. No two tokens have
    the same id."""
    cache, fresh, headers = InteractionCache(), iter(range(1, 10_000)), dict[Any, Any]()
    session = Session("s", "t", {}, cache, links)
    for k, call in enumerate(calls):
        names = [name for name in cache if cache[name].complete]
        goes_on = names and call.goes_on_from is not None
        before = cache[names[(call.goes_on_from or 0) % len(names)]] if goes_on else None
        history = before.conversation if before else []
        text, role = call.question, call.role if before else "user"
        if names and call.quotes is not None:
            text += cache[names[call.quotes % len(names)]].output_message_list[0]["content"]
        interaction = Interaction([*history, {"role": role, "content": text}], str(k))
        named = [names[call.names % len(names)]] if names and call.names is not None else []
        session.enter(interaction, named)
        headers[interaction] = [cache[name] for name in named]
        if not call.finishes:
            continue
        parent = interaction.parent
        ids = parent.tokens.input_tokens + parent.tokens.output_tokens if parent else []
        output = [next(fresh) for _ in range(call.sampled)]
        prompt = [*([] if call.drifts else ids), next(fresh)]
        logprobs, versions = [-float(t) for t in output], [t % 5 for t in output]
        response = ModelResponse(prompt, output, logprobs, versions, "stop", 0.5 + k)
        report = f"the report of call number {len(names)}"
        answer = report if call.answer == "report" else call.answer
        message = said(answer) if isinstance(answer, str) else said("", ("f", {"a": answer}))
        session.finish(interaction, response, message)
        if call.reward is not None:
            cache.set_reward(str(k), call.reward)
    return cache, headers


@given(calls)
def test_the_parent_is_the_longest_finished_prefix(session: list[Call]) -> None:
    """A search through all earlier interactions finds the same parent. Of two with equal
    conversations, the parent is the newer one."""
    cache, _ = play(session)
    names = list(cache)
    for i, name in enumerate(names):
        child = [canonical(message) for message in cache[name].messages]
        best, length = None, 0
        for candidate in (cache[earlier] for earlier in names[:i]):
            whole = [canonical(m) for m in candidate.conversation]
            if candidate.complete and child[: len(whole)] == whole and len(whole) >= length:
                best, length = candidate, len(whole)
        assert cache[name].parent is best
        turns = [one.turn_id + 1 for one in ([best] if best else cache[name].reads)]
        assert cache[name].turn_id in ({max(turns)} if best else {0, max(turns, default=0)})


@given(calls, st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.booleans())
def test_discounting_is_its_recursion(session: list[Call], gamma: float, links: bool) -> None:
    """R(i) = r(i) + gamma * mean R(c) over the calls c that read i. A call that reads i only by a
    link counts only if it leads to a reward. Without links, a call reads only what it continues or
    names.

    The R of the calls that read nothing add up to a weighted sum of all r. Calls that read nothing
    have weight 1, and each call gives gamma times its weight to its readers, in equal shares.
    """
    (cache, named), (discounted, _) = play(session, links), play(session, links)
    for call in () if links else cache.values():
        reads = {x for x in [call.parent, *named[call]] if x is not None}
        assert {*call.reads} == reads - ancestors(x for y in reads for x in y.reads)
    own = {name: i.reward or 0.0 for name, i in cache.items() if i.complete}
    readers = {n: [c for c in own if cache[n] in cache[c].reads] for n in own}
    leads = {n: cache[n].reward is not None for n in own}
    for n in reversed(own):
        leads[n] = leads[n] or any(leads[c] for c in readers[n])
        readers[n] = [c for c in readers[n] if leads[c] or cache[c].parent is cache[n]]

    def final(name: str) -> float:
        below = [final(reader) for reader in readers[name]]
        return own[name] + gamma * (sum(below) / len(below) if below else 0.0)

    weights = {name: float(not cache[name].reads) for name in own}
    for name in own:  # in the order of their beginnings
        for reader in readers[name]:
            weights[reader] += gamma * weights[name] / len(readers[name])
    discounted.apply_reward_discount(gamma)
    rewards = {name: discounted[name].reward or 0.0 for name in own}
    assert rewards == pytest.approx({name: final(name) for name in own})
    roots = sum(rewards[name] for name in own if not cache[name].reads)
    assert roots == pytest.approx(sum(weights[name] * own[name] for name in own))


@given(calls)
def test_a_call_reads_the_newest_answers_before_it(session: list[Call]) -> None:
    """A call reads only earlier calls. Its ancestors include its parent, the calls that it names,
    and every call whose long answer its new message quotes, unless another call continues the
    quoted call."""
    cache, named = play(session)
    place = {call: k for k, call in enumerate(cache.values())}
    continued = {call.parent for call in cache.values() if call.complete}
    for k, call in enumerate(cache.values()):
        above = ancestors([call])
        assert all(place[read] < k for read in call.reads)
        assert call.parent is None or call.parent in above
        assert above.issuperset(named[call])
        new = call.messages[len(call.parent.conversation) if call.parent else 0 :]
        for answer in list(cache.values())[:k]:
            said = answer.output_message_list[0]["content"] if answer.complete else ""
            if answer not in continued and len(said) >= SHORT and said in new[0]["content"]:
                assert answer in above


@given(calls)
def test_concat_trains_every_sampled_token_once(session: list[Call]) -> None:
    """The first row that has a sampled token trains it, and in later rows the token is context. The
    tokens after which it was sampled stand before it. It has its own version, log-probability,
    temperature and reward."""
    cache, _ = play(session)
    cache.apply_reward_discount(0.5)
    of_token = {t: i for i in cache.finished() for t in i.tokens.output_tokens}
    trained = set()
    for row in rows_of(cache).values():
        lengths = {len(values) for values in row.values() if isinstance(values, list)}
        assert lengths == {len(row["input_ids"])}
        for t, token in enumerate(row["input_ids"]):
            keys = ("versions", "logprobs", "turn_ids", "turn_rewards", "temperatures")
            found = [row[key][t] for key in keys]
            if row["turn_ids"][t] < 0:
                assert not row["loss_mask"][t]
                assert found == [-1, 0.0, -1, 0.0, 1.0]
                continue
            source = of_token[token]
            tokens, place = source.tokens, source.tokens.output_tokens.index(token)
            assert row["input_ids"][:t] == tokens.input_tokens + tokens.output_tokens[:place]
            own = [token % 5, -float(token), source.turn_id, source.reward, tokens.temperature]
            assert found == own
            assert row["loss_mask"][t] == (token not in trained)
            trained.add(token)
    assert trained == of_token.keys()


@given(calls)
def test_a_row_continues_the_row_that_trains_its_parent(session: list[Call]) -> None:
    """In concat, a row's parent is the row that trains the parent of this row's first trained
    turn."""
    cache, _ = play(session)
    rows = cache.export_interactions("concat")
    row_of = {one: row for row in rows.values() for one, is_new in row.row_turns if is_new}
    assert set(row_of) == set(cache.finished())
    for row in rows.values():
        first = next(one for one, is_new in row.row_turns if is_new)
        assert row.parent is (row_of[first.parent] if first.parent else None)


@given(calls)
def test_individual_exports_every_finished_call(session: list[Call]) -> None:
    """Every finished call becomes one row, even after an export in the other style."""
    cache, _ = play(session)
    cache.export_interactions("concat")
    exported = cache.export_interactions("individual")
    assert list(exported.values()) == cache.finished()
    for interaction in exported.values():
        row, response = interaction.to_lists(), interaction.tokens
        assert row["input_ids"] == response.input_tokens + response.output_tokens
        assert row["loss_mask"] == [0] * response.input_len + [1] * response.output_len


@given(calls)
def test_what_failed_leaves_no_trace(session: list[Call]) -> None:
    """Discarded calls change nothing for the others."""
    caches = play(session)[0], play([call for call in session if call.finishes])[0]
    for name in list(caches[0]):
        caches[0].discard(caches[0][name])
    one, other = ([(i.conversation, i.turn_id) for i in cache.values()] for cache in caches)
    assert one == other


# ---- links

REPORT = "a report\n that is not short"
ASKS = said("", ("delegate", {"to": "s"}), ("delegate", {"to": "t"}))
RESULTS = [{"role": "tool", "content": x} for x in (json.dumps([REPORT]), "said:\n3")]


def final_rewards(session: Session) -> list[float | None]:
    """The rewards of all calls if the last one gets 1, with gamma 1/2."""
    session.cache.set_last_reward(1)
    session.cache.apply_reward_discount(0.5)
    return [call.reward for call in session.cache.values()]


@pytest.mark.parametrize("links", [True, False])
def test_a_conversation_that_begins_with_a_summary_rewards_it(links: bool) -> None:
    """If several conversations begin with the same summary, the mean over those that lead to a
    reward counts."""
    first, begun = turn([user("a")], "b"), [user(f"So far: {REPORT}")]
    summary = turn([*first.conversation, user("sum up")], REPORT)
    session = session_of(first, summary, *(turn(begun, answer) for answer in "cde"), links=links)
    session.cache.set_reward("2", 1)
    assert final_rewards(session) == ([0.25, 0.5, 1, 0, 1] if links else [0, 0, 1, 0, 1])


@pytest.mark.parametrize("links", [True, False])
def test_a_report_rewards_the_sub_agent_that_wrote_it(links: bool) -> None:
    """A call that asks two sub-agents at once gets the mean of their rewards, as a call with two
    branches does. A short report is found only on lines of its own, and a long report also as JSON.
    A call that looks like a request for a title is no side conversation if its answer is read.
    Without links no call reads a report."""
    title = turn([user("Write a title and a report")], f"<summary>{REPORT}</summary>")
    calls = turn([user("q")], ASKS), title, turn([user("t")], "3")
    session = session_of(*calls, turn([user("q"), ASKS, *RESULTS]), links=links)
    assert final_rewards(session) == ([0.25, 0.5, 0.5, 1] if links else [0.5, None, 0, 1])


def test_what_is_no_report() -> None:
    """A request for a title reads no answer, even if it contains one. A short answer is not found
    inside a word. Samples of one prompt do not read each other, even if it lists their answers."""
    title = turn([user(f"Write a title for this: {REPORT}")])
    calls = turn([user("q")], REPORT), turn([user("r")], "3"), title, turn([user("13")])
    choice, other = (user(f"Which?\n{names}") for names in ("Paris\nRome", "Rome\nOslo"))
    billed = ({"role": "system", "content": f"x-anthropic-billing-header: c={k};"} for k in "abc")
    samples = (turn([system, choice], said) for system, said in zip(billed, ("Paris", "Rome", "")))
    assert not any(call.reads for call in session_of(*calls, *samples).cache.values())
    assert session_of(turn([choice], "Rome"), turn([other])).cache["1"].reads


# ---- parents


def test_a_conversation_is_kept_once() -> None:
    """A turn shares the message objects of its parent."""
    cache = chain(50)
    first, last = cache["0"], cache["49"]
    assert [*map(id, last.messages[:2])] == [*map(id, first.conversation)]


# ---- rewards


def test_a_chain_gives_the_geometric_series() -> None:
    """Reward 1 at the end with gamma 0.9 gives 0.81, 0.9 and 1. A second discount is refused. A
    later call that is unfinished gets nothing. (In AReaL it gets the reward.)"""
    cache = chain(3)
    cache.enter(Interaction([user("0")], "cut"))
    cache.set_last_reward(1.0)
    cache.apply_reward_discount(0.9)
    assert [i.reward for i in cache.finished()] == pytest.approx([0.81, 0.9, 1.0])
    assert cache["cut"].reward is None
    with pytest.raises(RuntimeError, match="already"):
        cache.apply_reward_discount(0.9)


REWARDS = [math.nan, math.inf, -math.inf, "1", None, [1], 10**400, 1.7e308]


@pytest.mark.parametrize("reward", REWARDS)
def test_a_reward_is_a_finite_number(reward: Any) -> None:
    """One NaN would make the whole batch NaN."""
    with pytest.raises(ValueError, match="finite"):
        chain(1).set_reward("0", reward)


@pytest.mark.parametrize(
    "reward", [1, True, np.int64(1), np.bool_(True), torch.tensor(True), torch.ones(()).bfloat16()]
)
def test_any_number_is_a_reward(reward: Any) -> None:
    """An int, a bool or a scalar of numpy or torch becomes a float."""
    cache = chain(1)
    cache.set_last_reward(reward)
    assert cache["0"].reward == 1.0


def test_a_reward_for_nobody_is_an_error() -> None:
    """An unknown id, an unfinished call and an empty session cannot get a reward."""
    cache = InteractionCache()
    with pytest.raises(Refusal):
        cache.set_last_reward(1.0)
    cache.enter(Interaction([user("hi")], "a"))
    for name in ("a", "b"):
        with pytest.raises(Refusal, match=name):
            cache.set_reward(name, 1.0)


@pytest.mark.parametrize("discount", [-0.1, 1.5, math.nan])
def test_a_discount_is_between_0_and_1(discount: float) -> None:
    """With a discount above 1, the rewards of a long chain could overflow."""
    with pytest.raises(ValueError, match="needed"):
        chain(1).apply_reward_discount(discount)


# ---- side conversations

CODER, TITLE = system("You code."), system("You write titles.")
CLIENTS = {
    "opencode": "You are a title generator. You output ONLY a thread title. Nothing else.",
    "claude code": "Analyze if this message indicates a new conversation topic. If it does, "
    "extract a 2-3 word title.",
    "open webui": "Generate a concise, 3-5 word title with an emoji summarizing the chat history.",
}


def left_out(session: Session) -> list[str]:
    """Give the session the reward 1, and return the rows that are not trained."""
    session.cache.set_last_reward(1.0)
    session.cache.apply_reward_discount(1.0)
    rows = rows_of(session.cache)
    out = [name for name, row in rows.items() if row["side_conversations"]]
    assert out == [name for name, row in rows.items() if not sum(row["loss_mask"])]
    return out


def agent(tools: Any = ()) -> list[Interaction]:
    """An agent's two turns."""
    first = turn([CODER, user("hello")], "a", tools=list(tools))
    return [first, turn([CODER, user("hello"), said("a"), user("more")], "b", tools=list(tools))]


@pytest.mark.parametrize("tools", [[], TOOLS])
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("place", [0, 1, 2], ids=["before", "between", "after"])
def test_a_title_at_any_time(client: str, place: int, tools: Any) -> None:
    """A call for a title takes no reward and is not trained, whenever it comes."""
    calls = agent(tools)
    calls.insert(place, turn([system(CLIENTS[client]), user("hello")], "A title"))
    session = session_of(*calls)
    assert left_out(session) == [str(place)]
    assert session.cache[str(place)].reward is None
    assert [i.reward for i in session.cache.values() if i is not calls[place]] == [1.0, 1.0]


def test_the_order_of_ends_changes_nothing() -> None:
    """Three calls run at once. The one for a title is left out, whichever ends first."""
    for order in permutations("012"):
        openings = (CODER, TITLE, user("draft"))
        session = session_of(*(Interaction([opening, user("hello")]) for opening in openings))
        for name in order:
            session.finish(session.cache[name], turn([]).tokens, said(name))
        assert left_out(session) == ["1"]


def test_a_reward_of_the_last_call_looks_at_no_other() -> None:
    """Otherwise a session of thousands of calls would keep the proxy's loop busy."""
    session = session_of(*agent())
    session.cache["0"].messages = None  # type: ignore[assignment]
    session.cache.set_last_reward(1.0)
    assert (session.cache["0"].reward, session.cache["1"].reward) == (None, 1.0)


@pytest.mark.parametrize("place", [0, 2])
def test_a_second_agent_of_one_call_is_trained(place: int) -> None:
    """A critic makes only one call, but this call does not ask for a title."""
    calls = agent()
    calls.insert(place, turn([system("You are a strict critic of code."), user("hello")], "fine"))
    assert left_out(session_of(*calls)) == []
    assert calls[-1].reward == 1.0


def test_a_final_answer_without_tools_is_trained() -> None:
    """The final call begins with the same message as the agent's other calls, so it is no side
    conversation."""
    librarian = system("You write a title for each book.")
    final = turn([librarian, user("hello"), said("a"), user("Now answer.")], "b")
    for last in (final, turn([librarian, user("something else")])):
        assert left_out(session_of(turn([librarian, user("hello")], "a", tools=TOOLS), last)) == []


def test_an_agent_that_only_writes_titles_is_trained() -> None:
    """If every call of a session asks for a title, none is a side conversation."""
    titles = turn([TITLE, user("a book")]), turn([TITLE, user("another")])
    assert left_out(session_of(*titles)) == []


def test_a_rewarded_title_is_trained() -> None:
    """A call that the agent rewards by its id is no side conversation."""
    session = session_of(*agent(), turn([TITLE, user("hello")]))
    session.cache.set_reward("2", 0.5)
    assert left_out(session) == []
    assert session.cache["2"].reward == 0.5


# ---- rows


def test_tensors_are_the_documents() -> None:
    """A row has the tensors of AReaL's documents, and others. In the prompt, loss_mask and logprobs
    are 0, and versions are -1."""
    tensors = turn([user("q")], prompt=[5, 6], tokens=[7, 8, 9], reward=2.0).to_tensor_dict()
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
        "side_conversations": torch.tensor([0], dtype=torch.int32),
    }
    assert tensors.keys() == expected.keys()
    for key, value in expected.items():
        assert tensors[key].dtype == value.dtype, key
        assert torch.equal(tensors[key], value), key
    with pytest.raises(ValueError, match="unfinished"):
        Interaction([user("q")]).to_tensor_dict()


def test_a_reward_set_after_the_tensors_shows() -> None:
    """Tensors are made anew each time. (AReaL returns the first ones.)"""
    cache = chain(2)
    leaf = cache.export_interactions("concat")["1"]
    assert leaf.to_tensor_dict()["rewards"].tolist() == [0.0]
    cache.set_reward("0", 1.0)
    cache.set_last_reward(2.0)
    assert leaf.to_tensor_dict()["turn_rewards"].tolist() == [[0.0, 1.0, 1.0, 0.0, 2.0, 2.0]]
    assert rows_of(cache)["1"]["rewards"] == 2.0


def test_what_training_cannot_reproduce_stays_out_of_the_loss() -> None:
    """A turn that was sampled with top_p is only context."""
    cache = chain(2)
    cache["0"].tokens.trains_exactly = False
    (row,) = rows_of(cache).values()
    assert row["loss_mask"] == [0] * 4 + [1, 1]


def test_depth_is_no_limit() -> None:
    """A chain longer than Python's recursion limit is discounted and exported."""
    depth = sys.getrecursionlimit() + 50
    cache = chain(depth)
    cache.set_last_reward(1.0)
    cache.apply_reward_discount(1.0)
    assert cache["0"].reward == 1.0
    (row,) = rows_of(cache).values()
    assert sum(row["loss_mask"]) == 2 * depth
