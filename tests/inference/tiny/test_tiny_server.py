"""These tests check properties of inference/tiny that go beyond the contract shared with SGLang.

- If a weight update interrupts a completion, each token's logprob is computed with the weights of the token's version.
  In pause mode `in_place` the logprobs are not exact, and a test measures their error.

- The tokens of a request with a seed do not depend on the other requests.

- Every request ends exactly once, for any order of events, and its spans cover its tokens.

- The server answers bad input with an error and keeps running.
"""

import asyncio
import base64
import itertools
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from conftest import ROOT, StartServer, free_port, wait_until_up
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
)

import proxy
from engine import EngineError, RemoteInfEngine
from inference.fields import Refusal
from inference.tiny import server
from inference.tiny.model import ModelError, TinyModel, read_weights, run_step, sample, uniforms
from inference.tiny.protocol import Protocol, parse_params
from inference.tiny.scheduler import SamplingParams, Scheduler, Sequence, common_prefix
from inference.tiny.server import Server
from inference.weights import serialise

PROMPT = list(range(60, 80))


@pytest.fixture
def tiny(tiny_model_dir: Path) -> TinyModel:
    return TinyModel(str(tiny_model_dir), slots=6, deterministic=True)


def sequence(rid: str, prompt: list[int], new: int, seed: int = 0, **params: Any) -> Sequence:
    """Return a sequence that asks for `new` tokens after the prompt."""
    return Sequence(rid, prompt, SamplingParams(max_new_tokens=new, sampling_seed=seed, **params))


def make_scheduler(slots: int = 6, max_total_tokens: int = 10_000) -> Scheduler:
    return Scheduler(slots, max_total_tokens, "0", str)


def run(tiny: TinyModel, *sequences: Sequence, scheduler: Scheduler | None = None) -> Scheduler:
    """Submit the sequences, and run steps until all have finished. Return the scheduler."""
    scheduler = scheduler or make_scheduler(tiny.slots)
    for one in sequences:
        scheduler.submit(one)
    while run_step(scheduler, tiny):
        pass
    return scheduler


def by_forward(path: Path, ids: list[int], temperature: float = 1.0) -> list[float]:
    """Return log p(ids[t] | ids[:t]) for t >= 1, computed by the model's own forward pass."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    return (
        torch.log_softmax(logits / temperature, -1)
        .gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        .tolist()
    )


def versioned_logprobs(one: Sequence, paths: dict[str, Path]) -> list[float]:
    """Return the expected logprob of each output token, computed by a forward pass with the weights of the token's
    version."""
    scores = {
        version: by_forward(path, one.tokens)[len(one.prompt) - 1 :]
        for version, path in paths.items()
    }
    spans = one.spans(len(one.logprobs))
    return [scores[span["version"]][t] for span in spans for t in range(span["start"], span["end"])]


# Versions


def update(tiny: TinyModel, scheduler: Scheduler, weights: Path, version: str) -> None:
    """Load new weights while the scheduler is paused or idle."""

    def load() -> None:
        tiny.replace_weights(read_weights(str(weights)))
        scheduler.renew(version)

    scheduler.updates.append(load)
    assert run_step(scheduler, tiny) is False


def straddle(tiny: TinyModel, mode: str, new_weights: Path) -> list[Sequence]:
    """Run three requests. After 5 steps, pause the scheduler, load new weights, and continue until all requests have
    ended. If the pause aborts requests, submit each request again with its partial output."""
    scheduler = make_scheduler()
    requests = [sequence(str(i), PROMPT[i:], 12, seed=i) for i in range(3)]
    for one in requests:
        scheduler.submit(one)
    for _ in range(5):
        run_step(scheduler, tiny)
    scheduler.pause(mode)
    assert run_step(scheduler, tiny) is False
    update(tiny, scheduler, new_weights, "1")
    scheduler.resume()
    if mode == "abort":
        for one in requests:
            seed = one.params.sampling_seed
            rest = sequence(one.rid, one.tokens, 12 - len(one.logprobs), seed=seed)
            run(tiny, rest, scheduler=scheduler)
            one.version_starts.append(("1", len(one.logprobs)))
            one.tokens, one.logprobs = rest.tokens, one.logprobs + rest.logprobs
    run(tiny, scheduler=scheduler)
    return requests


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_a_straddling_completion_is_a_forward_pass_under_each_tokens_version(
    tiny: TinyModel, tiny_model_dir: Path, other_model_dir: Path, mode: str
) -> None:
    """If new weights arrive after 5 tokens, each token's logprob equals that of a forward pass with the weights of the
    token's version."""
    for one in straddle(tiny, mode, other_model_dir):
        assert one.spans(12) == [
            {"version": "0", "start": 0, "end": 5},
            {"version": "1", "start": 5, "end": 12},
        ]
        expected = versioned_logprobs(one, {"0": tiny_model_dir, "1": other_model_dir})
        assert one.logprobs == pytest.approx(expected, abs=1e-4)
        assert one.retractions == (mode == "retract")


def test_a_released_server_computes_nothing_before_an_update(
    tiny: TinyModel, tiny_model_dir: Path, other_model_dir: Path
) -> None:
    """A server whose memory is released has lost its weights. Without weights, the server computes no sequence, even
    after the end of the pause. After a weight update, a retracted sequence continues, and its earlier tokens keep their
    version labels. The scheduler raises an error if the memory is to be released while a sequence runs, or to be
    allocated although it was not released. (In SGLang an error of the scheduler ends the server process.)"""
    scheduler, one = make_scheduler(tiny.slots), sequence("a", [3, 4, 5], 12)
    scheduler.submit(one)
    for _ in range(5):
        run_step(scheduler, tiny)
    for released, says in ((True, "server is idle"), (False, "in this state already")):
        with pytest.raises(AssertionError, match=says):
            scheduler.set_released(released)
    scheduler.pause("retract")
    scheduler.set_released(True)
    tiny.lose_weights()
    scheduler.resume()
    assert run_step(scheduler, tiny) is False
    assert len(one.logprobs) == 5
    scheduler.pause("retract")
    scheduler.set_released(False)
    update(tiny, scheduler, other_model_dir, "1")
    scheduler.resume()
    while run_step(scheduler, tiny):
        pass
    assert one.spans(12) == [
        {"version": "0", "start": 0, "end": 5},
        {"version": "1", "start": 5, "end": 12},
    ]
    paths = {"0": tiny_model_dir, "1": other_model_dir}
    assert one.logprobs == pytest.approx(versioned_logprobs(one, paths), abs=1e-4)


def test_in_place_equals_no_forward_pass(
    tiny: TinyModel, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """After a weight update in pause mode `in_place`, new queries attend to old keys. The logprob of a token after the
    update differs from the logprob that a forward pass with the new weights computes. If every weight changes by about
    1 %, the largest difference of the two logprobs is between 0.001 and 0.5 nats."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 0.01 * torch.randn_like(p))
    model.save_pretrained(tmp_path)
    paths = {"0": tiny_model_dir, "1": tmp_path}
    errors = [
        abs(got - want)
        for one in straddle(tiny, "in_place", tmp_path)
        for got, want in zip(one.logprobs[5:], versioned_logprobs(one, paths)[5:], strict=True)
    ]
    assert 1e-3 < max(errors) < 0.5


def test_keys_of_old_weights_are_not_reused(tiny: TinyModel, other_model_dir: Path) -> None:
    """If a weight update in pause mode `in_place` interrupts a sequence, the sequence's keys have two versions, so the
    server does not reuse these keys."""
    scheduler = make_scheduler()
    scheduler.submit(sequence("old", PROMPT, 8))
    run_step(scheduler, tiny)
    scheduler.pause("in_place")
    update(tiny, scheduler, other_model_dir, "1")
    scheduler.resume()
    run(tiny, scheduler=scheduler)
    again = sequence("again", PROMPT, 4)
    run(tiny, again, scheduler=scheduler)
    assert again.reused_tokens == 0
    expected = by_forward(other_model_dir, again.tokens)[len(PROMPT) - 1 :]
    assert again.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("factor", [float("nan"), 3e38])
def test_weights_that_are_not_finite_leave_nothing_behind(
    tiny: TinyModel, tiny_model_dir: Path, tmp_path: Path, factor: float
) -> None:
    """Weights that are not finite may leave NaN or infinity in a slot. When finite weights have replaced
    them, the next sequence in this slot gets correct logprobs."""
    named = read_weights(str(tiny_model_dir))
    bad = {name: tensor * factor if "v_proj" in name else tensor for name, tensor in named.items()}
    save_file(bad, tmp_path / "model.safetensors")
    scheduler = make_scheduler(slots=1)
    update(tiny, scheduler, tmp_path, "1")
    run(tiny, sequence("long", PROMPT, 8), scheduler=scheduler)
    assert not tiny.cache.kv.isfinite().all()
    update(tiny, scheduler, tiny_model_dir, "2")
    short = sequence("short", PROMPT[:3], 4)
    run(tiny, short, scheduler=scheduler)
    assert short.logprobs == pytest.approx(by_forward(tiny_model_dir, short.tokens)[2:], abs=1e-4)


def test_weights_that_do_not_fit_change_nothing(tiny: TinyModel) -> None:
    """A wrong name, a missing weight or a wrong shape raises ModelError, and no weight is changed."""
    before = {name: tensor.clone() for name, tensor in tiny.model.state_dict().items()}
    name = next(iter(before))
    changed = {n: t + 1 for n, t in before.items()}
    for bad in (
        changed | {"no.such": torch.zeros(1)},
        {name: changed[name]},
        changed | {name: torch.zeros(1)},
    ):
        with pytest.raises(ModelError):
            tiny.replace_weights(bad)
    assert all(torch.equal(tensor, before[n]) for n, tensor in tiny.model.state_dict().items())


def test_a_cut_off_weights_file_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    """A damaged safetensors file raises a ModelError that names the file's folder."""
    whole = (tiny_model_dir / "model.safetensors").read_bytes()
    for part in (whole[: len(whole) // 2], b"", b"not safetensors"):
        (tmp_path / "model.safetensors").write_bytes(part)
        with pytest.raises(ModelError, match=re.escape(str(tmp_path))):
            read_weights(str(tmp_path))


# Seeds and batches


def test_a_seeded_request_does_not_see_its_neighbours(tiny: TinyModel) -> None:
    """A request with a seed gets the same tokens if it runs alone, in a full batch, or after a wait in the queue."""
    alone = sequence("a", PROMPT, 24, seed=7)
    run(tiny, alone)
    crowd = [sequence(str(i), PROMPT[i:] + [i] * 9 * i, 20 + i, seed=i) for i in range(8)]
    among = sequence("a", PROMPT, 24, seed=7)
    run(tiny, *crowd[:3], among, *crowd[3:])
    late = sequence("a", PROMPT, 24, seed=7)
    run(tiny, *[sequence(str(i), PROMPT[i:], 9 + 2 * i, seed=i) for i in range(9)], late)
    assert alone.tokens == among.tokens == late.tokens
    assert alone.logprobs == pytest.approx(among.logprobs, abs=1e-5)
    other = sequence("b", PROMPT, 24, seed=8)
    run(tiny, other)
    assert other.tokens != alone.tokens


def test_an_aborted_request_goes_on_with_its_own_noise(tiny: TinyModel) -> None:
    """If an aborted request is sent again with its partial output, it gets the same tokens as without the
    interruption."""
    whole = sequence("a", PROMPT, 16, seed=3)
    run(tiny, whole)
    rest = sequence("a", whole.tokens[: len(PROMPT) + 6], 10, seed=3)
    run(tiny, rest)
    assert rest.tokens == whole.tokens


def test_a_reused_prefix_equals_a_fresh_prefill(tiny: TinyModel) -> None:
    """A turn that reuses the cached prefix of its conversation gets the tokens that a full prefill would give."""
    turn = sequence("turn 1", PROMPT, 10, seed=1)
    scheduler = run(tiny, turn, sequence("another", PROMPT[::-1], 30))
    prompt = [*turn.tokens, 5, 6, 7]
    reused, fresh = sequence("turn 2", prompt, 12, seed=2), sequence("turn 2", prompt, 12, seed=2)
    run(tiny, reused, scheduler=scheduler)
    run(tiny, fresh)
    assert (
        reused.reused_tokens == len(turn.tokens) - 1
    )  # the cache does not contain the last token of turn 1
    assert fresh.reused_tokens == 0
    assert reused.tokens == fresh.tokens
    assert reused.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)


def test_uniform_numbers_are_uniform_and_independent() -> None:
    """The numbers that `uniforms` hashes from seed and position have the mean and variance of a uniform distribution,
    and neighbouring numbers do not correlate."""
    grid = torch.stack(
        [uniforms([seed] * 300, list(range(300))) for seed in range(300)]
    )  # (seed, position)
    assert ((grid >= 0) & (grid < 1)).all()
    assert grid.mean().item() == pytest.approx(0.5, abs=0.01)
    assert grid.var().item() == pytest.approx(1 / 12, abs=0.005)
    centred = grid - 0.5
    for a, b in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1])):
        assert (a * b).mean().abs().item() < 0.002


def test_samples_follow_the_distribution_that_was_asked_for() -> None:
    """Over many seeds, the frequency of each token matches softmax(logits / T) after top_k and top_p."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    n = 4000
    for change in ({"temperature": 0.7}, {"top_k": 2}, {"top_p": 0.7}, {"temperature": 0.0}):
        tokens, logprobs = sample(
            logits.repeat(n, 1), [sequence("a", [], 1, seed=i, **change) for i in range(n)]
        )
        temperature = change.get("temperature", 1.0) or 1.0
        p = torch.softmax(logits / temperature, -1)
        assert logprobs == pytest.approx(p.log()[tokens].tolist(), abs=1e-5)
        p[change.get("top_k", 4) :] = 0
        if "top_p" in change:
            p[2:] = 0  # the probabilities are 0.64, 0.24, ...: top_p = 0.7 keeps two tokens
        if change.get("temperature") == 0:
            p = torch.tensor([1.0, 0, 0, 0])
        counts = torch.bincount(torch.tensor(tokens), minlength=4) / n
        assert counts.tolist() == pytest.approx((p / p.sum()).tolist(), abs=0.03)
        assert (counts[p == 0] == 0).all()


def test_a_neighbours_truncation_does_not_reach_a_row() -> None:
    """The token sampled for one row does not depend on whether a different row of the batch uses top_p or top_k."""
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    for seed in range(100):
        plain, cut = (
            sequence("a", [1, 2, 3], 1, seed=seed),
            sequence("b", [1, 2, 3], 1, top_p=0.5, top_k=9),
        )
        (alone,), _ = sample(logits[:1].clone(), [plain])
        (beside, _), _ = sample(logits.clone(), [plain, cut])
        assert alone == beside


def test_the_likeliest_token_is_always_kept() -> None:
    """If top_p is so small that float32 rounds it to 0, the most likely token is still kept."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    for seed in range(20):
        tokens, _ = sample(logits.clone(), [sequence("a", [], 1, seed=seed, top_p=1e-46)])
        assert tokens == [1]


def test_penalties_count_the_output(tiny: TinyModel) -> None:
    """A frequency penalty changes which token is the most likely one, and the logprob includes the penalty."""
    logits = torch.tensor([[3.0, 2.9, 0.0]])
    one = sequence("a", [1], 9, temperature=0, frequency_penalty=0.5)
    one.tokens += [0, 0]
    (token,), (logprob,) = sample(logits.clone(), [one])
    assert token == 1
    assert logprob == pytest.approx(
        torch.log_softmax(torch.tensor([2.0, 2.9, 0.0]), -1)[1].item(), abs=1e-5
    )


@pytest.mark.parametrize("family", ["qwen2", "llama", "tied"])
def test_other_small_models_fit_the_slot_cache(tmp_path: Path, family: str) -> None:
    """For several model families, prompts of different lengths get the logprobs of the model's own forward pass."""
    shape: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
    }
    shape |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256}
    shape |= {"initializer_range": 0.2, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    if family == "llama":
        LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(tmp_path)
    else:
        Qwen2ForCausalLM(
            Qwen2Config(**shape, tie_word_embeddings=family == "tied")
        ).save_pretrained(tmp_path)
    model = TinyModel(str(tmp_path), 4)
    requests = [
        sequence(str(i), PROMPT[: 3 + 4 * i], 5 + i, seed=i, temperature=0.8) for i in range(5)
    ]
    run(model, *requests)
    for one in requests:
        expected = by_forward(tmp_path, one.tokens, 0.8)[len(one.prompt) - 1 :]
        assert one.logprobs == pytest.approx(expected, abs=1e-4)
    model.replace_weights(read_weights(str(tmp_path)))


def test_a_model_with_sliding_windows_is_refused(tmp_path: Path) -> None:
    """The server refuses to load a model with sliding windows, because it would compute wrong logprobs from its slot
    cache."""
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="sliding_attention"):
        TinyModel(str(tmp_path), 2)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix_is_the_longest(a: list[int], b: list[int]) -> None:
    """`common_prefix` returns the number of equal tokens at the start of two lists."""
    assert common_prefix(a, b) == len(
        list(itertools.takewhile(lambda p: p[0] == p[1], zip(a, b, strict=False)))
    )


# Tests of the scheduler with random orders of events

EVENTS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 6), st.integers(1, 5)),
    st.tuples(st.just("abort"), st.integers(0, 12)),
    st.tuples(st.just("pause"), st.sampled_from(["abort", "retract", "in_place"])),
    st.tuples(st.just("continue")),
    st.tuples(st.just("update"), st.booleans()),
    st.tuples(st.just("step")),
    st.tuples(st.just("step")),
)


class Play:
    """A scheduler to which a test sends events. The scheduler has no model: the id of each new token is the token's
    position."""

    def __init__(self) -> None:
        self.scheduler = make_scheduler(slots=3, max_total_tokens=20)
        self.requests: list[Sequence] = []
        self.tags: dict[
            str, list[str]
        ] = {}  # for each request id, the version that computed each output token
        self.ended: dict[
            str, int
        ] = {}  # for each request id, the number of output tokens when the request ended
        self.kv: list[list[tuple[int, int]]] = [
            [] for _ in range(3)
        ]  # (token, version) for each key in each slot
        self.version = 0

    def do(self, event: tuple) -> None:
        scheduler = self.scheduler
        match event:
            case ("submit", length, new):
                one = sequence(str(len(self.requests)), list(range(length)), new)
                self.requests.append(one)
                self.tags[one.rid] = []
                scheduler.submit(one)
            case ("abort", i):
                scheduler.abort(lambda one: one.rid == str(i))
            case ("pause", mode):
                scheduler.pause(mode)
            case ("continue",):
                scheduler.resume()
            case ("update", works):
                scheduler.updates.append(self.renew if works else lambda: None)
            case ("step",):
                self.step()
        for one in scheduler.finished:
            assert one.rid not in self.ended, "a request ends once"
            self.ended[one.rid] = len(one.logprobs)
        scheduler.finished = []

    def renew(self) -> None:
        """Change the version. The scheduler calls this method in place of loading new weights."""
        assert self.scheduler.paused or not self.scheduler.running
        self.version += 1
        self.scheduler.renew(str(self.version))

    def step(self) -> None:
        step = self.scheduler.plan()
        for i, j in self.scheduler.moves:
            self.kv[i], self.kv[j] = self.kv[j], self.kv[i]
        self.scheduler.moves.clear()
        rows = zip(step.sequences, step.cached, step.feeds, strict=True)
        for i, (one, n, fed) in enumerate(rows, step.first_slot):
            assert self.scheduler.running[i] is one
            slot, cached = self.scheduler.slots[i], self.kv[i][:n]
            assert [token for token, _ in cached] == slot.cached == one.tokens[:n]
            assert slot.stale or {version for _, version in cached} <= {self.version}
            assert fed == one.tokens[n:] != []
            self.kv[i] = cached + [(token, self.version) for token in fed]
            self.tags[one.rid].append(str(self.version))
        self.scheduler.extend(
            step, [len(one.tokens) for one in step.sequences], [0.0] * len(step.sequences)
        )

    def check(self) -> None:
        for one in self.requests:
            n = len(one.logprobs)
            prompt = len(one.prompt)
            assert one.tokens == list(range(prompt)) + list(range(prompt, prompt + n))
            told = [s["version"] for s in one.spans(n) for _ in range(s["start"], s["end"])]
            assert told == self.tags[one.rid], "the spans name the version that computed each token"
            assert self.ended.get(one.rid, n) == n, "a sequence gets no token after its end"


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=40))
def test_every_request_ends_once_whatever_interrupts_it(events: list[tuple]) -> None:
    """For any order of submit, abort, pause, continue and update, each request ends exactly once and its spans cover
    its tokens. Each slot always contains the keys that the scheduler has recorded for the slot."""
    play = Play()
    for event in events:
        play.do(event)
        play.check()
    play.do(("continue",))
    for _ in range(300):
        play.do(("step",))
    play.check()
    assert len(play.ended) == len(play.requests), repr(play.scheduler)
    assert not play.scheduler.live()


def test_admission_never_exceeds_the_token_budget() -> None:
    """The sum of prompt tokens and max_new_tokens over all running requests never exceeds max_total_tokens."""
    scheduler = make_scheduler(slots=8, max_total_tokens=30)
    for i in range(6):
        scheduler.submit(sequence(str(i), [1] * 5, 5))
    step = scheduler.plan()
    assert (step.first_slot, len(step.sequences)) == (0, 3)
    assert repr(scheduler) == "Scheduler(version='0', paused=None, running=3, waiting=3, updates=0)"


def test_spans_of_the_first_tokens_leave_out_later_versions() -> None:
    """The spans for the first n tokens cover exactly n tokens, even if later tokens have a newer version."""
    one = sequence("a", [1], 9)
    one.version_starts = [("0", 0), ("1", 3)]
    assert one.spans(2) == [{"version": "0", "start": 0, "end": 2}]
    assert one.spans(3) == [{"version": "0", "start": 0, "end": 3}]
    assert one.spans(5)[-1] == {"version": "1", "start": 3, "end": 5}
    assert one.spans(0) == []


TEXT = st.text(
    st.one_of(
        st.sampled_from("ab終🎉é"),
        st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"),
    )
)


@settings(deadline=None)
@given(TEXT, st.lists(TEXT.filter(bool), min_size=1, max_size=2), TEXT)
def test_a_stop_string_ends_the_text_where_it_is_complete(
    tiny_tokenizer: Any, before: str, stops: list[str], after: str
) -> None:
    """A generation stops at the token that completes a stop string, even if one character consists of several
    tokens."""
    text = before + stops[0] + after
    scheduler = Scheduler(1, 10_000, "0", tiny_tokenizer.decode)
    one = sequence("a", [1], 5_000, stop=stops)
    scheduler.submit(one)
    for token in tiny_tokenizer.encode(text):
        if one.finish is None:
            scheduler.extend(scheduler.plan(), [token], [0.0])
    end = min(text.index(stop) + len(stop) for stop in stops if stop in text)
    assert tiny_tokenizer.decode(one.output) == text[:end]
    assert one.finish == {
        "type": "stop",
        "matched": next(stop for stop in stops if text[:end].endswith(stop)),
    }


# The protocol


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", 2**63), ("top_k", 2**31), ("max_new_tokens", 2**31), ("temperature", 2**63)],
)
def test_a_number_that_no_tensor_holds_is_refused(name: str, value: int) -> None:
    """If a field of a request has a number that is too large for a tensor, the server refuses the request, and the
    error names the field. A number that is too large for a tensor would crash the server."""
    with pytest.raises(Refusal, match=f"^{name}"):
        parse_params({name: value}, 0)


@pytest.mark.parametrize("seed", [-1, 2**64, 10**30])
def test_any_integer_is_a_seed(seed: int) -> None:
    """Any integer, negative or huge, is a valid seed. The hash that makes the random numbers uses only 64 bits of the
    seed."""
    params = parse_params({"sampling_seed": seed, "top_k": 2**31 - 1, "temperature": 2**31 - 1}, 0)
    tokens, _ = sample(torch.zeros(1, 8), [Sequence("a", [], params)])
    assert 0 <= tokens[0] < 8


def overtaken(last: int) -> dict[str, Any]:
    """Return the result of Protocol.answer for a sequence whose last token arrives while Protocol.answer runs.
    Protocol.answer reads attributes of the sequence `last` times before the last token arrives."""
    scheduler, looks = make_scheduler(slots=1), itertools.count()
    one = Sequence("a", [7], SamplingParams(), stop_ids=frozenset({2}), return_logprob=True)
    scheduler.submit(one)
    scheduler.extend(scheduler.plan(), [1], [0.0])

    class Looked(Sequence):
        def __getattribute__(self, name: str) -> Any:
            if next(looks) == last:
                scheduler.extend(scheduler.plan(), [2], [0.0])
            return super().__getattribute__(name)

    one.__class__ = Looked
    return Protocol(9, 99, frozenset(), lambda ids, **_: str(ids), Random(0)).answer(one)


def test_an_answer_that_tells_the_end_has_the_last_token() -> None:
    """An answer with a finish reason always contains the last token, even if this token arrives while the answer is
    being built."""
    answers = [overtaken(last) for last in range(20)]
    ended = [answer["meta_info"]["finish_reason"] is not None for answer in answers]
    assert set(ended) == {True, False}
    for end, answer in zip(ended, answers, strict=True):
        assert answer["output_ids"] == [1, 2] or not end
        assert answer["text"] == str([1] if end else answer["output_ids"])


def test_the_context_that_is_told_is_the_one_that_is_honoured(
    start_tiny_server: StartServer,
) -> None:
    """The server refuses a request that exceeds the limit in /server_info, and the option --max-total-tokens sets this
    limit."""
    url = start_tiny_server("--max-total-tokens", "100")
    told = httpx.get(url + "/server_info").json()["max_req_input_len"]
    assert told == 100
    for prompt, status in ((told - 1, 200), (told, 400)):
        body = {"input_ids": [1] * prompt, "sampling_params": {"max_new_tokens": 1}}
        assert post(url, "/generate", body).status_code == status


# The process


def post(url: str, path: str, body: Any, **kwargs: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=60, **kwargs)


def test_only_a_key_opens_the_server(start_tiny_server: StartServer) -> None:
    """With --api-key, the server refuses every request without the key, except a health check. The engine sends the API
    key with every request."""
    url = start_tiny_server("--api-key", "secret")
    for path in (
        "/generate",
        "/pause_generation",
        "/update_weight_version",
        "/update_weights_from_disk",
        "/server_info",
    ):
        assert post(url, path, {"new_version": "999"}).status_code == 401, path
        assert post(url, path, {}, headers={"authorization": "Bearer guess"}).status_code == 403, (
            path
        )
    assert httpx.get(url + "/health").status_code == 200
    engine = RemoteInfEngine([url], key="secret")
    engine.initialize()
    assert engine.servers.post_all("/model_info")[0]["weight_version"] == "0"
    with pytest.raises(EngineError, match="401"):
        RemoteInfEngine([url]).initialize()


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::"])
def test_a_public_address_needs_a_key(
    host: str, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server or proxy that other machines can reach does not start without a key."""
    assert (
        server.main(
            ["--model-path", str(tiny_model_dir), "--host", host, "--port", "0", "--api-key", ""]
        )
        == 2
    )
    assert "give the server a key" in capsys.readouterr().err
    assert (
        proxy.main(
            [
                "--model-path",
                str(tiny_model_dir),
                "--host",
                host,
                "--port",
                "0",
                "--server",
                "http://a",
            ]
        )
        == 2
    )
    assert "give the server a key" in capsys.readouterr().err


BAD = [
    {},
    {"input_ids": []},
    {"input_ids": [1, 259]},
    {"input_ids": [1, -1]},
    {"input_ids": [1, None]},
    {"input_ids": [1, True]},
    {"input_ids": [[1], []]},
    {"input_ids": "abc"},
    {"input_ids": [1], "text": "a"},
    {"text": 5},
    {"text": ""},
    {"input_ids": [1], "rid": 7},
    {"input_ids": [1], "return_logprob": True, "logprob_start_len": 5},
    {"input_ids": [1], "sampling_params": 3},
    {"input_ids": [1], "sampling_params": [{}, {}]},
    {"input_ids": [1], "sampling_params": {"temperature": "hot"}},
    {"input_ids": [1], "sampling_params": {"max_new_tokens": 2.5}},
    {"input_ids": [1], "sampling_params": {"max_new_tokens": 0}},
    {"input_ids": [1], "sampling_params": {"min_p": 0.1}},
    {"input_ids": [1], "sampling_params": {"max_new_tokens": 2048}},
    {"input_ids": [1] * 2049, "sampling_params": {"max_new_tokens": 1}},
    {"input_ids": [1], "sampling_params": {"stop": [""]}},
    {"input_ids": [1], "sampling_params": {"stop_token_ids": ["a"]}},
    {"input_ids": [1], "sampling_params": {"top_k": 0}},
    {"input_ids": [1], "sampling_params": {"json_schema": "{}"}},
    {"input_ids": [1], "sampling_params": {"n": 2}},
    {"input_ids": [[1], [2]], "stream": True},
]


def test_bad_input_is_answered_and_kills_nothing(tiny_server: str) -> None:
    """The server answers each malformed body with status 400 and a message, and keeps running."""
    for body in BAD:
        answer = post(tiny_server, "/generate", body)
        assert answer.status_code == 400, body
        assert answer.json()["error"]["message"], body
    for raw in (b"{", b"[1]", b'{"input_ids": NaN}', b"\xff"):
        answer = httpx.post(tiny_server + "/generate", content=raw)
        assert answer.status_code == 400
    assert post(tiny_server, "/pause_generation", {"mode": "sideways"}).status_code == 400
    assert post(tiny_server, "/abort_request", {}).status_code == 400
    assert post(tiny_server, "/update_weights_from_disk", {}).status_code == 400
    odd = {
        "max_new_tokens": 3,
        "temperature": 1e-9,
        "top_p": 1e-9,
        "top_k": 10**9,
        "sampling_seed": -(2**60),
    }
    answer = post(
        tiny_server, "/generate", {"input_ids": [1], "sampling_params": odd, "unknown": 1}
    )
    assert answer.status_code == 200
    assert len(answer.json()["output_ids"]) == 3


def pickled(content: Any) -> str:
    return base64.b64encode(pickle.dumps(content)).decode()


MEETING = {
    "master_address": "127.0.0.1",
    "master_port": 1,
    "rank_offset": 1,
    "world_size": 2,
    "group_name": "g",
}

BAD_WEIGHTS: list[tuple[str, dict[str, Any]]] = [
    ("/update_weights_from_distributed", {}),
    (
        "/update_weights_from_distributed",
        {"group_name": 5, "names": [], "dtypes": [], "shapes": []},
    ),
    (
        "/update_weights_from_distributed",
        {"group_name": "g", "names": ["a"], "dtypes": ["load"], "shapes": [[1]]},
    ),
    (
        "/update_weights_from_distributed",
        {"group_name": "g", "names": ["a"], "dtypes": [], "shapes": []},
    ),
    ("/update_weights_from_tensor", {"serialized_named_tensors": "abc"}),
    ("/update_weights_from_tensor", {"serialized_named_tensors": []}),
    ("/update_weights_from_tensor", {"serialized_named_tensors": ["!!"]}),
    ("/update_weights_from_tensor", {"serialized_named_tensors": [7]}),
    ("/update_weights_from_tensor", {"serialized_named_tensors": [pickled(None)]}),
    ("/update_weights_from_tensor", {"serialized_named_tensors": [pickled([("a", "no tensor")])]}),
    (
        "/update_weights_from_tensor",
        {"serialized_named_tensors": [serialise([])], "weight_version": 3},
    ),
    ("/init_weights_update_group", {}),
    ("/init_weights_update_group", MEETING | {"master_port": 70000}),
    ("/init_weights_update_group", MEETING | {"master_port": -1}),
    ("/destroy_weights_update_group", {"group_name": ["g"]}),
    ("/update_weight_version", {"new_version": 4}),
]


def test_a_released_server_refuses_weights(start_tiny_server: StartServer) -> None:
    """A server whose memory is released has no memory for new weights, so it refuses an update."""
    url = start_tiny_server()
    post(url, "/pause_generation", {"mode": "retract"})
    assert post(url, "/release_memory_occupation", {}).status_code == 200
    answer = post(url, "/update_weights_from_disk", {"model_path": "anywhere"})
    assert (answer.status_code, "memory is released" in answer.text) == (400, True)
    assert post(url, "/resume_memory_occupation", {}).status_code == 200


def test_bad_weights_are_answered_and_kill_nothing(tiny_server: str) -> None:
    """The server answers every malformed weight update with status 400, and keeps its version and its weights."""

    def state() -> tuple[str, list[int]]:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
        answer = post(tiny_server, "/generate", body).json()
        return answer["meta_info"]["weight_version"], answer["output_ids"]

    before = state()
    for session in (False, True):
        for path, body in BAD_WEIGHTS:
            assert post(tiny_server, path, body).status_code == 400, (session, path, body)
        assert (
            post(
                tiny_server, "/end_weight_update" if session else "/begin_weight_update", {}
            ).status_code
            == 200
        )
    assert state() == before


class Call:
    """An object whose pickle creates a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_pickle_runs_no_code(tiny_server: str, tmp_path: Path) -> None:
    """The server refuses a pickle that would call a function, and the function is not called."""
    post(tiny_server, "/begin_weight_update", {})
    body = {"serialized_named_tensors": [pickled([("model.norm.weight", Call(tmp_path / "harm"))])]}
    answer = post(tiny_server, "/update_weights_from_tensor", body)
    assert answer.status_code == 400
    assert "mkdir" in answer.json()["message"]
    assert not (tmp_path / "harm").exists()
    post(tiny_server, "/end_weight_update", {})


def test_a_part_that_does_not_fit_changes_nothing(tiny_server: str) -> None:
    """If a tensor has a wrong shape or an unknown name, the server answers with status 400 and the tensor's name."""
    post(tiny_server, "/begin_weight_update", {})
    for name in ("model.norm.weight", "no.such.weight"):
        body = {"serialized_named_tensors": [serialise([(name, torch.zeros(3))])]}
        answer = post(tiny_server, "/update_weights_from_tensor", body)
        assert answer.status_code == 400
        assert name in answer.json()["message"]
    post(tiny_server, "/end_weight_update", {})


def test_seeds_are_honoured_over_http(tiny_server: str) -> None:
    """On a busy server, requests with the same seed get the same tokens, and requests without a seed get different
    tokens."""

    def ask(seed: int | None) -> list[int]:
        params = {"max_new_tokens": 20, "sampling_seed": seed, "ignore_eos": True}
        return post(
            tiny_server, "/generate", {"input_ids": PROMPT, "sampling_params": params}
        ).json()["output_ids"]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, [5, None, 5, 6, 5, None, 5, 6]))
    assert answers[0] == answers[2] == answers[4] == answers[6]
    assert answers[3] == answers[7] != answers[0]
    assert answers[1] != answers[5]


def serve(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "inference.tiny.server", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_what_cannot_start_says_so_in_one_line(tiny_model_dir: Path, tmp_path: Path) -> None:
    """If the port is taken or the folder contains no model, the server exits with code 2 and reports the reason in
    one line."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = serve("--model-path", str(tiny_model_dir), "--port", port)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: --port {port}: cannot listen on 127.0.0.1")
    assert ended.stderr.count("\n") == 1
    ended = serve("--model-path", str(tmp_path), "--port", str(free_port()))
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: no model in {tmp_path}")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "how",
    [
        "parent",
        *(pytest.param(how, marks=pytest.mark.runs) for how in ("interrupt", "update", "group")),
    ],
)
def test_the_server_ends_when_told(tiny_model_dir: Path, how: str) -> None:
    """The server ends if it gets Ctrl-C, or if its parent process closes the server's standard input. The server ends
    even while a request is running, an update is waiting, or a process group is waiting for rank 0."""
    port = str(free_port())
    command = [
        sys.executable,
        "-m",
        "inference.tiny.server",
        "--model-path",
        str(tiny_model_dir),
        "--port",
        port,
    ]
    process = subprocess.Popen(
        [*command, "--exit-with-parent"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    url = f"http://127.0.0.1:{port}"
    wait_until_up(url, process)
    long = {
        "input_ids": PROMPT,
        "stream": True,
        "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True},
    }
    state = ""
    with ExitStack() as stack:
        # If `how` is "update", the test needs an update that waits for a running request. If the request ends before
        # the server reports `updates=1`, the test sends the request and the update again.
        while not state or (how == "update" and "updates=1" not in state):
            response = stack.enter_context(
                httpx.stream("POST", url + "/generate", json=long, timeout=60)
            )
            next(response.iter_lines())
            state = "a request runs"
            if how == "update":
                # The update's connection stays open until the server reports `updates=1` (the update waits) or
                # `running=0` (no request runs).
                with socket.create_connection(("127.0.0.1", int(port))) as caller:
                    body = json.dumps({"model_path": str(tiny_model_dir)})
                    head = f"POST /update_weights_from_disk HTTP/1.1\r\nHost: server\r\nContent-Length: {len(body)}"
                    caller.sendall(f"{head}\r\n\r\n{body}".encode())
                    while "running=0" not in state and "updates=1" not in state:
                        state = httpx.get(url + "/model_info").json()["state"]
        if how == "group":
            mute = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            mute.settimeout(60)
            meeting = MEETING | {"master_port": mute.getsockname()[1]}
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url + "/init_weights_update_group", json=meeting, timeout=0.2)
            stack.enter_context(mute.accept()[0])
        if how == "interrupt":
            os.kill(process.pid, signal.SIGINT)
        else:
            process.stdin.close()
        process.wait(timeout=20)
    said = process.stderr.read()
    assert (
        "Traceback" not in said or how == "update"
    )  # if `how` is "update", uvicorn prints a traceback
    assert "RuntimeError" not in said
    process.stdin.close()
    process.stderr.close()


def test_a_client_that_leaves_is_no_error_of_the_server() -> None:
    """If a client disconnects before its whole request has arrived, the server raises no error, so no traceback is in
    its log."""
    statuses: list[int] = []

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        statuses.append(message.get("status", 0))

    app: Any = Server(SimpleNamespace(scheduler=None), None, "").app()  # type: ignore[arg-type]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/abort_request",
        "headers": [],
        "query_string": b"",
    }
    asyncio.run(app(scope, receive, send))
    assert statuses[0] == 400
