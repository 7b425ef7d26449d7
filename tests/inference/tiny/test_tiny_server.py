"""What the small server promises beyond the contract that it shares with SGLang: versions, seeds,
the order of events, and answers to bad input."""

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from conftest import StartServer, forward_logprobs, server_process
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import RemoteInfEngine
from inference.tiny.model import Model, read_weights
from inference.tiny.sampling import SamplingParams, Sequence, sample, uniform
from inference.tiny.scheduler import Scheduler

PROMPT = list(range(60, 80))


@pytest.fixture
def tiny(tiny_model_dir: Path) -> Model:
    return Model(str(tiny_model_dir), slots=6)


def sequence(rid: str, prompt: list[int], new: int, seed: int = 0, **params: Any) -> Sequence:
    params = {"max_new_tokens": new, "sampling_seed": seed, "ignore_eos": True} | params
    return Sequence(rid, prompt, SamplingParams(**params))


def run(model: Model, *sequences: Sequence, scheduler: Scheduler | None = None) -> Scheduler:
    """Run the sequences to their ends."""
    scheduler = scheduler or Scheduler(model, "0", str)
    scheduler.add(*sequences)
    while scheduler.step():
        pass
    return scheduler


def assert_as_alone(model: Model, *sequences: Sequence) -> None:
    """Assert that each sequence has the tokens and the bits that it gets alone."""
    for one in sequences:
        alone = Sequence(one.rid, one.prompt, one.params)
        run(model, alone)
        assert (alone.tokens, alone.logprobs) == (one.tokens, one.logprobs)


def test_new_weights_compute_every_key_anew(tiny: Model, other_model_dir: Path) -> None:
    """A sequence that an update interrupts goes on. Neither this sequence nor the next request uses
    keys of the old weights."""
    scheduler = Scheduler(tiny, "0", str)
    before, one, again = (sequence(str(new), PROMPT, new) for new in (2, 8, 4))
    scheduler.add(before, one)
    scheduler.step()
    scheduler.step()
    assert (bool(before.finish), len(scheduler.running)) == (True, 1)
    tiny.replace_weights(read_weights(str(other_model_dir)))
    scheduler.version = "1"
    scheduler.retract()
    run(tiny, again, scheduler=scheduler)
    assert [(span["version"], span["end"]) for span in one.spans] == [("0", 1), ("1", 8)]
    for sent, first in ((one, 1), (again, 0)):
        expected = forward_logprobs(other_model_dir, sent.tokens)[len(PROMPT) + first :]
        assert sent.logprobs[first:] == pytest.approx(expected, abs=1e-4)


# Seeds and batches


def record_feeds(model: Model, monkeypatch: Any) -> list[list[int]]:
    """How many tokens each step feeds to each sequence, from now on."""
    fed, step = [], model.step

    def recorded(feeds: list[list[int]], *rest: Any) -> Any:
        fed.append([len(feed) for feed in feeds])
        return step(feeds, *rest)

    monkeypatch.setattr(model, "step", recorded)
    return fed


def test_a_step_feeds_a_bounded_number_of_tokens(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a mask grows with the square of what a step feeds, so a long prompt takes
    several steps. The logprobs of the output are still those of transformers."""
    tiny = Model(str(tiny_model_dir), slots=12)
    fed = record_feeds(tiny, monkeypatch)
    lengths = (3, 40, 300, 500, 1310, 7, 8, 9, 10, 1)
    prompts = [[(3 * j + n) % 250 for j in range(n)] for n in lengths]
    requests = [sequence(str(len(p)), p, 4, seed=len(p), temperature=0.8) for p in prompts]
    run(tiny, *requests)
    for one in requests:
        expected = forward_logprobs(tiny_model_dir, one.tokens, 0.8)[len(one.prompt) :]
        assert one.logprobs == pytest.approx(expected, abs=1e-4)
    assert max(map(max, fed)) == 128
    assert max(len(row) * max(row) for row in fed if max(row) > 1) <= 512
    assert sum(map(sum, fed)) == sum(len(one.tokens) - 1 for one in requests)  # each token once


def test_a_seeded_request_does_not_see_its_neighbours(tiny: Model) -> None:
    """Alone, in a crowd or after a wait in the queue, a seeded request gets the same tokens and
    bits. If aborted and sent again with its partial output, it gets the same tokens."""

    def ask(before: int, after: int) -> Sequence:
        one = sequence("a", PROMPT, 24, seed=7)
        crowd = [sequence(str(i), PROMPT[i:] + [i] * 9 * i, 20 + i, seed=i) for i in range(9)]
        run(tiny, *crowd[:before], one, *crowd[before : before + after])
        return one

    alone, among, late = ask(0, 0), ask(3, 5), ask(9, 0)
    assert alone.tokens == among.tokens == late.tokens
    assert alone.logprobs == among.logprobs == late.logprobs
    rest, other = sequence("a", alone.tokens[:26], 18, seed=7), sequence("b", PROMPT, 24, seed=8)
    run(tiny, rest, other)
    assert rest.tokens == alone.tokens
    assert other.tokens != alone.tokens


def test_a_reused_prefix_equals_a_fresh_prefill(tiny: Model, monkeypatch: Any) -> None:
    """The next turn of a conversation reuses its keys, and gets the same tokens and bits."""
    turn = sequence("turn 1", PROMPT, 10, seed=1)
    scheduler = run(tiny, turn, sequence("another", PROMPT[::-1], 30))
    prompt = [*turn.tokens, 5, 6, 7]
    reused = sequence("turn 2", prompt, 12, seed=2)
    fed = record_feeds(tiny, monkeypatch)
    run(tiny, reused, scheduler=scheduler)
    assert fed[0] == [4]  # the last token of turn 1, and three new ones
    assert_as_alone(tiny, reused)


def test_a_group_computes_its_prompt_once(tiny: Model, monkeypatch: Any) -> None:
    """The members wait for the keys of the first one, and get a copy. A prompt that shares only its
    beginning gets a copy of this part. The bits are those of keys that each member computes
    itself."""
    prompts = [PROMPT * 10, PROMPT * 10, PROMPT * 10, PROMPT * 5 + [3, 4, 5]]
    group = [sequence(str(i), prompt, 9, seed=i) for i, prompt in enumerate(prompts)]
    fed = record_feeds(tiny, monkeypatch)
    run(tiny, *group)
    assert sum(map(sum, fed)) == 200 + 3 + 2 + 4 * 8  # prompt, new tokens, members' last ones
    assert_as_alone(tiny, *group)


def test_a_long_prompt_does_not_stop_the_others(tiny: Model, monkeypatch: Any) -> None:
    """Every second step is a decode, while a prompt is fed in pieces."""
    short, long = sequence("short", [1, 2], 8), sequence("long", PROMPT * 60, 1)
    scheduler, fed = Scheduler(tiny, "0", str), record_feeds(tiny, monkeypatch)
    scheduler.add(short)
    scheduler.step()
    run(tiny, long, scheduler=scheduler)
    assert fed[1:5] == [[128], [1], [128], [1]]
    assert long.logprobs


def test_a_session_does_not_hold_another(tiny_model_dir: Path) -> None:
    """One session has long sequences in all slots, and more of them wait. A call of another session
    gets a slot at once, even if there is only one slot. The sequences that it interrupts end with
    the same bits."""
    tiny = Model(str(tiny_model_dir), slots=6, tokens=1024)
    for words in (20, 600):  # 630 tokens need the whole cache
        ask = [sequence(f"a/{i}", [i, *PROMPT] * (words // 20), 40, seed=i) for i in range(9)]
        scheduler, short = Scheduler(tiny, "0", str), sequence("b/0", [1, 2, 3], 5)
        scheduler.add(*ask)
        for _ in range(12):
            scheduler.step()
        before = scheduler.steps
        scheduler.add(short)
        while not short.finish:
            scheduler.step()
        assert scheduler.steps - before <= 10
        run(tiny, scheduler=scheduler)
        assert_as_alone(tiny, ask[8])


@pytest.mark.parametrize(("words", "new"), [(20, range(5, 14)), (1, [1])])
def test_nobody_is_overtaken_for_ever(tiny_model_dir: Path, words: int, new: Any) -> None:
    """Short sequences keep coming. A sequence that needs a longer slot still gets one, and a
    sequence still gets its tokens among others of one token each."""
    scheduler = Scheduler(Model(str(tiny_model_dir), slots=6, tokens=2048), "0", str)
    long = sequence("long", PROMPT * words, 4)
    for i in range(400):
        scheduler.add(*[long] * (i == 9), sequence(str(i), [i % 9, i % 7], new[i % len(new)]))
        scheduler.step()
    assert long.finish


def test_the_cache_is_as_large_as_was_planned(tiny_model_dir: Path) -> None:
    """Slots become longer and fewer while sequences grow. Sequences that no longer fit wait, and
    later go on with the same bits. The cache keeps its size, which is also the limit of a
    request."""
    tiny = Model(str(tiny_model_dir), slots=6, tokens=512)
    size, requests = tiny.cache.shape, [sequence(str(i), [i] * 30, 200, seed=i) for i in range(6)]
    scheduler = Scheduler(tiny, "0", str)
    scheduler.add(*requests)
    slots = set()
    while scheduler.step():
        slots.add((scheduler.length, len(scheduler.slots)))
    assert slots == {(64, 6), (128, 4), (192, 2), (512, 1)}
    assert (tiny.cache.shape, tiny.context_length) == (size, 512)
    assert_as_alone(tiny, *requests)


def test_uniform_numbers_are_uniform_and_independent() -> None:
    """Hashes of seed and position have the right mean and variance, and neighbours do not
    correlate."""
    grid = torch.tensor([[uniform(seed, k) for k in range(300)] for seed in range(300)])
    assert ((grid >= 0) & (grid < 1)).all()
    assert grid.mean().item() == pytest.approx(0.5, abs=0.01)
    assert grid.var().item() == pytest.approx(1 / 12, abs=0.005)
    centred = grid - 0.5  # (seed, position)
    for a, b in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1])):
        assert (a * b).mean().abs().item() < 0.002


@pytest.mark.parametrize(
    ("change", "kept"),
    [({"temperature": 0.7}, 4), ({"top_k": 2}, 2), ({"top_p": 0.7}, 2), ({"temperature": 0.0}, 1)],
)
def test_samples_follow_the_distribution_asked_for(change: dict[str, Any], kept: int) -> None:
    """Over many seeds, the tokens follow softmax(logits / T) after top_k and top_p. The
    log-probabilities are those before top_k and top_p."""
    logits, n = torch.tensor([2.0, 1.0, 0.0, -1.0]), 4000
    asked = [sequence("a", [], 1, seed=i, **change) for i in range(n)]
    tokens, logprobs = sample(logits.repeat(n, 1), asked)
    p = torch.softmax(logits / (change.get("temperature", 1.0) or 1.0), -1)
    assert logprobs == pytest.approx(p.log()[tokens].tolist(), abs=1e-5)
    p[kept:] = 0  # the probabilities are .64, .24, ...: top_p = .7 keeps two tokens
    counts = torch.bincount(torch.tensor(tokens), minlength=4) / n
    assert counts.tolist() == pytest.approx((p / p.sum()).tolist(), abs=0.03)
    assert (counts[p == 0] == 0).all()


def test_a_neighbours_truncation_does_not_reach_a_row() -> None:
    """A row's token does not depend on another row's top_p; the likeliest token always stays."""
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    for seed in range(100):
        plain = sequence("a", [1, 2, 3], 1, seed=seed)
        cut = sequence("b", [1, 2, 3], 1, top_p=0.5, top_k=9)
        (alone,), _ = sample(logits[:1].clone(), [plain])
        (beside, _), _ = sample(logits.clone(), [plain, cut])
        assert alone == beside
        tokens, _ = sample(logits[:1].clone(), [sequence("a", [], 1, seed=seed, top_p=1e-46)])
        assert tokens == [logits[0].argmax()]


def test_penalties_count_the_output() -> None:
    """A frequency penalty changes the likeliest token, and its logprob."""
    one = sequence("a", [1], 9, temperature=0, frequency_penalty=0.5)
    one.tokens += [0, 0]
    (token,), (logprob,) = sample(torch.tensor([[3.0, 2.9, 0.0]]), [one])
    assert token == 1
    expected = torch.log_softmax(torch.tensor([2.0, 2.9, 0.0]), -1)[1]
    assert logprob == pytest.approx(expected.item(), abs=1e-5)


# Random orders of events

SUBMIT = st.tuples(st.just("submit"), st.integers(1, 6), st.integers(1, 5))
OTHER = st.tuples(st.sampled_from(["pause", "continue", "update", "step", "step"]))
EVENTS = SUBMIT | st.tuples(st.just("abort"), st.integers(0, 12)) | OTHER


class Play:
    """A scheduler under random events, and a model whose next token is the token's position."""

    chunk, prefill, eos = 2, 512, frozenset[int]()

    def __init__(self) -> None:
        self.kv: list[list[tuple[int, str]]] = [[] for _ in range(3)]  # per slot (token, version)
        self.scheduler = Scheduler(self, "0", str)
        self.scheduler.least_shared = 2
        self.requests: list[Sequence] = []
        self.tags: dict[str, list[str]] = {}  # by request: the version of each output token
        self.lengths: dict[str, int] = {}  # by request: its output's length when it ended

    def fit(self, longest: int) -> tuple[int, int]:
        return (4, 3) if longest <= 4 else (8, 2) if longest <= 8 else (16, 1)

    def resize(self, longest: int) -> tuple[int, int]:
        length, slots = self.fit(longest)
        self.kv = [row[:length] for row in [*self.kv, [], []][:slots]]
        return length, slots

    def exchange(self, i: int, j: int, n: int) -> None:
        self.kv[i], self.kv[j] = self.kv[j][:n], self.kv[i][:n]

    def copy(self, source: int, target: int, n: int) -> None:
        self.kv[target] = self.kv[source][:n]

    def step(self, feeds: list[list[int]], cached: list[int], first: int) -> torch.Tensor:
        version = self.scheduler.version
        batch = self.scheduler.slots[first : first + len(feeds)]
        for i, (one, fed) in enumerate(zip(batch, feeds, strict=True), first):
            kept = self.kv[i][: one.cached]
            assert [token for token, _ in kept] == one.tokens[: one.cached]
            assert {v for _, v in kept} <= {version}
            assert fed
            assert fed == one.tokens[one.cached :][: len(fed)]
            self.kv[i] = kept + [(token, version) for token in fed]
            assert len(self.kv[i]) <= self.scheduler.length
            if one.cached + len(fed) == len(one.tokens):
                self.tags[one.rid].append(version)
        return only([len(one.tokens) for one in batch])

    def do(self, event: tuple) -> None:
        scheduler = self.scheduler
        match event:
            case ("submit", length, new):
                i = len(self.requests)
                one = sequence(f"{i * i % 3}/{i}", list(range(length)), new)
                self.requests.append(one)
                self.tags[one.rid] = []
                scheduler.add(one)
            case ("abort", i):
                scheduler.abort(f"{i * i % 3}/{i}")
            case ("pause" | "continue" as name,):
                scheduler.paused = name == "pause"
            case ("update",):
                scheduler.version = str(int(scheduler.version) + 1)
                scheduler.retract()
            case ("step",):
                scheduler.step()
        self.check()

    def check(self) -> None:
        running = self.scheduler.running
        for one in self.requests:
            n = len(one.logprobs)
            assert one.tokens == list(range(len(one.prompt) + n))
            told = [s["version"] for s in one.spans for _ in range(s["start"], s["end"])]
            assert told == self.tags[one.rid], "spans name the version that computed each token"
            assert one.ended.is_set() == bool(one.finish)
            if one.finish:
                assert self.lengths.setdefault(one.rid, n) == n, "no token after the end"
            assert (one in running) + (one in self.scheduler.waiting) == (not one.finish)


def only(tokens: list[int]) -> torch.Tensor:
    """Logits with which each row draws its token."""
    return 999.0 * torch.nn.functional.one_hot(torch.tensor(tokens), 300)


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=40))
def test_every_request_ends_once_whatever_interrupts_it(events: list[tuple]) -> None:
    """In any order of events, spans cover the tokens, and each slot holds the keys that the
    scheduler believes to be there."""
    play = Play()
    for event in (*events, ("continue",), *[("step",)] * 150, ("update",), *[("step",)] * 600):
        play.do(event)
    assert len(play.lengths) == len(play.requests), repr(play.scheduler)


ANY = st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")
TEXT = st.text(st.sampled_from("ab終🎉é") | ANY)


@settings(deadline=None)
@given(TEXT, st.lists(TEXT.filter(bool), min_size=1, max_size=2), TEXT)
def test_a_stop_string_ends_the_text_where_it_is_complete(
    tiny_tokenizer: Any, before: str, stops: list[str], after: str
) -> None:
    """The text ends at the token that completes the stop string, even if a character has several
    tokens."""
    text = before + stops[0] + after
    left, model = iter(tiny_tokenizer.encode(text)), SimpleNamespace(chunk=99, eos=())
    model.fit = model.resize = lambda longest: (9999, 1)
    model.step = lambda *_: only([next(left)])
    scheduler = Scheduler(model, "0", tiny_tokenizer.decode)
    one = sequence("a", [1], 5_000, stop=stops)
    scheduler.add(one)
    while not one.finish:
        scheduler.step()
    end = min(text.index(stop) + len(stop) for stop in stops if stop in text)
    assert tiny_tokenizer.decode(one.output) == text[:end]
    assert one.finish == "stop"


# The server


def post(url: str, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
    return httpx.post(url + path, json=body or {}, timeout=60, **kwargs)


def test_only_a_key_opens_the_server(start_tiny_server: StartServer) -> None:
    """Only health checks need no key. The engine sends its key with every request."""
    url = start_tiny_server("--api-key", "secret")
    for name in ("generate", "pause_generation", "update_weight_version"):
        body, wrong = {"new_version": "999"}, {"authorization": "Bearer guess"}
        assert post(url, f"/{name}", body).status_code == 401, name
        assert post(url, f"/{name}", headers=wrong).status_code == 403, name
    assert httpx.get(url + "/server_info").status_code == 401
    assert httpx.get(url + "/health").status_code == 200
    RemoteInfEngine([url], key="secret").initialize()


NONE: list[Any] = [[], [1, 259], [1, -1], [1, True], [[1]]]  # no ids of this vocabulary
BAD: list[dict[str, Any]] = [{}, *({"input_ids": ids} for ids in NONE)]
BAD += [{"input_ids": [1], "stream": True}, {"input_ids": [1], "sampling_params": 3}]
PARAMETERS: list[tuple[str, Any]] = [("max_new_tokens", 0), ("max_new_tokens", 2048)]
PARAMETERS += [("temperature", "hot"), ("top_k", 2**31), ("min_p", 0.1), ("stop", [""]), ("n", 2)]
PARAMETERS += [("json_schema", "{}")]
BAD += [{"input_ids": [1], "sampling_params": dict([one])} for one in PARAMETERS]


def test_bad_input_is_answered_and_kills_nothing(tiny_server: str) -> None:
    """A malformed body gets 400 and a message; odd but legal parameters are served."""
    for body in BAD:
        answer = post(tiny_server, "/generate", body)
        assert answer.status_code == 400, body
        assert answer.json()["error"]["message"], body
    sent: Any = {"headers": {"content-type": "application/json"}}
    for raw in (b"{", b"[1]", b'{"input_ids": NaN}', b"\xff"):
        assert httpx.post(tiny_server + "/generate", content=raw, **sent).status_code == 400
    assert post(tiny_server, "/pause_generation", {"mode": "sideways"}).status_code == 400
    assert post(tiny_server, "/abort_request").status_code == 400
    assert post(tiny_server, "/update_weights_from_disk").status_code == 400
    for seed in (-1, 2**64, 10**30):
        odd = {"max_new_tokens": 3, "temperature": 1e-9, "top_p": 1e-9, "top_k": 10**9}
        body = {"input_ids": [1], "sampling_params": odd | {"sampling_seed": seed}, "unknown": 1}
        answer = post(tiny_server, "/generate", body)
        assert answer.status_code == 200
        assert len(answer.json()["output_ids"]) == 3


def test_bad_weights_change_nothing(tiny_server: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    """An update with a damaged file gets 400; version and weights stay."""

    def state() -> tuple[str, list[int]]:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
        answer = post(tiny_server, "/generate", body).json()
        return answer["meta_info"]["weight_version"], answer["output_ids"]

    before = state()
    assert post(tiny_server, "/update_weight_version").status_code == 400
    whole = (tiny_model_dir / "model.safetensors").read_bytes()
    for content in (b"", whole[: len(whole) // 2]):
        (tmp_path / "model.safetensors").write_bytes(content)
        body = {"model_path": str(tmp_path), "weight_version": "9"}
        answer = post(tiny_server, "/update_weights_from_disk", body)
        assert answer.status_code == 400
        assert "old weights stay" in answer.json()["error"]["message"]
    assert state() == before


def test_ctrl_c_ends_the_server(tiny_model_dir: Path, tmp_path: Path) -> None:
    """A running request does not delay the end, and causes no RuntimeError."""
    command = [sys.executable, "-m", "inference.tiny.server", "--model-path", str(tiny_model_dir)]
    long, log = {"max_new_tokens": 2000, "ignore_eos": True}, tmp_path / "server.log"
    with ThreadPoolExecutor() as pool, server_process(*command, log=log) as (url, process):
        pool.submit(post, url, "/generate", {"input_ids": [1], "sampling_params": long})
        while httpx.get(url + "/server_info").json()["running"] != 1:
            pass
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    assert "RuntimeError" not in log.read_text()
