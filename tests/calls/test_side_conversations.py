"""A client's request for a title gets no reward and is not trained. All calls except requests for a title are
trained."""

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import pytest
from test_cache import CODER, TITLE, TOOLS, said, turn, user

from cache import InteractionCache, InteractionWithTokenLogpReward
from calls.side_conversations import PATTERNS
from run.load import ConfigError, load

CLIENTS = {
    "opencode": "You are a title generator. You output ONLY a thread title. Nothing else.",
    "claude code": "Analyze if this message indicates a new conversation topic. If it does, extract a 2-3 word title.",
    "open webui": "Generate a concise, 3-5 word title with an emoji summarizing the chat history.",
}


def session(*interactions: InteractionWithTokenLogpReward, **options: Any) -> InteractionCache:
    """Return the cache of a session with these finished calls. The calls' ids are "0", "1", ... in the order of the
    requests."""
    cache = InteractionCache(**options)
    for k, interaction in enumerate(interactions):
        cache.enter(str(k), interaction)
    return cache


def left_out(cache: InteractionCache) -> list[str]:
    """Set the session's reward to 1, as if the agent had returned 1. Return the ids of the rows that are not
    trained."""
    cache.set_last_reward(1.0)
    cache.apply_reward_discount(1.0)
    rows = {name: i.to_lists() for name, i in cache.export_interactions("concat").items()}
    out = [name for name, row in rows.items() if row["side_conversations"] == [1]]
    assert out == [name for name, row in rows.items() if not sum(row["loss_mask"])]
    return out


def agent_of_two_turns() -> list[InteractionWithTokenLogpReward]:
    first = turn([CODER, user("hello")], "a")
    return [first, turn([CODER, user("hello"), said("a"), user("more")], "b")]


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("place", [0, 1, 2], ids=["before", "between", "after"])
def test_a_title_at_any_time(client: str, place: int) -> None:
    """A call that asks for a title is not trained, whether it comes before, between or after the agent's turns. The
    agent's last turn gets the reward."""
    calls = agent_of_two_turns()
    calls.insert(
        place, turn([{"role": "system", "content": CLIENTS[client]}, user("hello")], "A title")
    )
    cache = session(*calls)
    assert left_out(cache) == [str(place)]
    assert [i.reward for i in cache.values() if i is not calls[place]] == [1.0, 1.0]


def test_the_order_of_ends_changes_nothing() -> None:
    """Three calls run at the same time, and one of them asks for a title. The order in which the calls end does not
    matter: only the call that asks for a title is left out of training."""
    for order in permutations("012"):
        cache = InteractionCache()
        for name, opening in zip("012", (CODER, TITLE, user("draft")), strict=True):
            cache.enter(name, InteractionWithTokenLogpReward([opening, user("hello")]))
        for name in order:
            cache.finish(name, turn([user("x")]).tokens, [said(name)])
        assert left_out(cache) == ["1"]


def test_a_second_agent_of_one_call_is_trained() -> None:
    """A critic makes a single call, without tools and with a different system prompt. The critic's call is trained,
    whether it is the first or the last call."""
    critic = turn(
        [{"role": "system", "content": "You are a strict critic of code."}, user("hello")], "fine"
    )
    assert left_out(session(*agent_of_two_turns(), critic)) == []
    assert critic.reward == 1.0
    critic = turn(
        [{"role": "system", "content": "You are a strict critic of code."}, user("hello")], "fine"
    )
    assert left_out(session(critic, *agent_of_two_turns())) == []


def test_a_final_answer_without_tools_is_trained() -> None:
    """An agent's final call without tools is trained, even if the agent's system prompt mentions titles."""
    librarian = {"role": "system", "content": "You write a title for each book."}
    work = turn([librarian, user("hello")], "a", tools=TOOLS)
    final = turn([librarian, user("hello"), said("a"), user("Now answer.")], "b")
    assert left_out(session(work, final)) == []
    assert final.reward == 1.0


def test_an_agent_that_only_writes_titles_is_trained() -> None:
    """If every call of a session seems to ask for a title, every call is trained."""
    assert left_out(session(turn([TITLE, user("a book")]), turn([TITLE, user("another")]))) == []


def test_a_rewarded_title_is_trained() -> None:
    """A call that asks for a title is trained if the agent sets a reward by the id of this call."""
    cache = session(*agent_of_two_turns(), turn([TITLE, user("hello")]))
    cache.set_reward("2", 0.5)
    assert left_out(cache) == []
    assert cache["2"].reward == 0.5


def test_the_key_turns_the_rule_off() -> None:
    """With rollout.openai.side_conversations=[] a call that asks for a title is treated like any other call. For
    example, a call that asks for a title gets the reward if it is the last call of its session."""
    cache = session(*agent_of_two_turns(), turn([TITLE, user("hello")]), side_patterns=())
    assert left_out(cache) == []
    assert cache["2"].reward == 1.0


def test_a_pattern_that_is_no_regular_expression_is_refused() -> None:
    """If a pattern is not a valid regular expression, loading the configuration raises an error."""
    with pytest.raises(ConfigError, match=r"side_conversations: '\(' is no regular expression"):
        load(["rollout.openai.side_conversations=['(']"])


def test_each_first_message_is_searched_once() -> None:
    """The regular expressions are applied only once to each distinct first message, however often a reward is set.
    While a regular expression is applied, the proxy serves no other session."""

    class Counted(tuple):
        searches = 0

        def __iter__(self) -> Iterator[Any]:
            Counted.searches += 1
            return super().__iter__()

    titles = [turn([user(f"Write a title for {k % 2}")]) for k in range(4)]
    cache = session(
        *agent_of_two_turns(), *titles, turn([user("hi")]), side_patterns=Counted(PATTERNS)
    )
    for _ in range(3):
        cache.set_last_reward(1.0)
    assert len(cache.mark_side_conversations()) == 4
    assert Counted.searches == 3
