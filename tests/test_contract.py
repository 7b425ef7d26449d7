"""The wire contract of an inference server: what engine.py may rely on, whoever answers.

The same tests run against tiny_server.py (a fixture starts one) and against the real SGLang:

    NANO_AREAL_CONTRACT_URL=http://127.0.0.1:30000 NANO_AREAL_CONTRACT_MODEL=/path/to/model pytest tests/test_contract.py

They ask for nothing that one of the two does differently: no id outside the vocabulary (it kills SGLang), no seed (it
is ignored there), every sampling parameter explicit, control calls to a server that is otherwise idle.
"""

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

PROMPT = [40, 41, 42, 43, 44, 45, 46]
LONG = 400  # tokens: long enough to be interrupted half way, short enough to end


class Server:
    """The server under test, and a reference model that computes what it should answer."""

    def __init__(self, url: str, model_path: str) -> None:
        self.model_path = model_path
        self.http = httpx.Client(base_url=url, timeout=120)
        self.pool = ThreadPoolExecutor(8)
        config = json.loads((Path(model_path) / "config.json").read_text())
        bf16 = "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))
        self.tolerance = 5e-2 if bf16 else 1e-4
        self.reference = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.http.post(path, json=body)

    def ask(
        self, max_new_tokens: int = 8, rid: str | None = None, prompt: Any = PROMPT, **params: Any
    ) -> httpx.Response:
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True}
        sampling |= {"max_new_tokens": max_new_tokens, **params}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        return self.post("/generate", body | ({"rid": rid} if rid else {}))

    def generate(self, *args: Any, **params: Any) -> dict[str, Any]:
        response = self.ask(*args, **params)
        assert response.status_code == 200, response.text
        return response.json()

    def start(self, rid: str, max_new_tokens: int = LONG) -> Future:
        """Send a long request from another thread and come back when it decodes (streaming says so)."""
        begun = threading.Event()

        def run() -> dict[str, Any]:
            body = {
                "input_ids": PROMPT,
                "rid": rid,
                "stream": True,
                "return_logprob": True,
                "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 1.0, "ignore_eos": True},
            }
            last: dict[str, Any] = {}
            try:
                with self.http.stream("POST", "/generate", json=body) as response:
                    for line in response.iter_lines():
                        if line.startswith("data: {"):
                            last = json.loads(line[6:])
                            begun.set()
            finally:
                begun.set()
            return last

        future = self.pool.submit(run)
        assert begun.wait(60)
        return future

    def logprobs(self, ids: list[int], temperature: float = 1.0) -> list[float]:
        """log p(ids[t] | ids[:t]) for t >= 1 by a plain forward pass."""
        with torch.no_grad():
            logits = self.reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
        scores = torch.log_softmax(logits / temperature, dim=-1)
        return scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    def version(self) -> str:
        return self.http.get("/model_info").json()["weight_version"]

    def eventually(self, path: str, status: int) -> None:
        """Ask until `path` answers `status`: another process's state has no event to wait for."""
        deadline = time.monotonic() + 30
        while self.http.get(path).status_code != status:
            assert time.monotonic() < deadline, f"{path} never answered {status}"


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    if url := os.environ.get("NANO_AREAL_CONTRACT_URL"):
        server = Server(url, os.environ["NANO_AREAL_CONTRACT_MODEL"])
    else:
        server = Server(request.getfixturevalue("tiny_server"), str(request.getfixturevalue("tiny_model_dir")))
    version = server.version()
    yield server
    server.post("/continue_generation", {})
    server.post("/update_weights_from_disk", {"model_path": server.model_path, "weight_version": version})
    server.pool.shutdown()
    server.http.close()


def outputs(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Ids and logprobs of an answer, after checking that the two tell the same."""
    entries = answer["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in entries] == answer["output_ids"]
    assert answer["meta_info"]["completion_tokens"] == len(entries)
    return answer["output_ids"], [entry[0] for entry in entries]


def assert_spans(answer: dict[str, Any], versions: list[str]) -> list[int]:
    """The spans name `versions`, and cover the output without a gap; their ends."""
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == versions
    assert [span["start"] for span in spans] == [0] + [span["end"] for span in spans[:-1]]
    assert spans[-1]["end"] == len(answer["output_ids"])
    assert answer["meta_info"]["weight_version"] == versions[-1]
    return [span["end"] for span in spans]


def test_a_request_runs_to_its_length(server: Server) -> None:
    """finish_reason says length and how much; ids, logprobs and counts agree."""
    answer = server.generate(8, rid="contract-length")
    ids, _ = outputs(answer)
    assert len(ids) == 8
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert meta["id"] == "contract-length"
    assert meta["prompt_tokens"] == len(PROMPT)
    assert_spans(answer, [server.version()])


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_logprobs_are_after_temperature(server: Server, temperature: float) -> None:
    """The logprob is log_softmax(logits / T): what a trainer gets when it divides its logits by the same T."""
    ids, logprobs = outputs(server.generate(12, temperature=temperature))
    expected = server.logprobs(PROMPT + ids, temperature)[len(PROMPT) - 1 :]
    assert logprobs == pytest.approx(expected, abs=server.tolerance)


def test_logprobs_are_before_top_p_and_top_k(server: Server) -> None:
    """Truncation changes which token is drawn, not the logprob that is reported."""
    ids, logprobs = outputs(server.generate(12, top_p=0.6, top_k=5))
    assert logprobs == pytest.approx(server.logprobs(PROMPT + ids)[len(PROMPT) - 1 :], abs=server.tolerance)


def test_greedy_repeats_itself_and_reports_raw_logprobs(server: Server) -> None:
    """At temperature 0 the same prompt gives the same tokens, and logprobs are those of the undivided logits."""
    ids, logprobs = outputs(server.generate(12, temperature=0.0))
    assert ids == server.generate(12, temperature=0.0)["output_ids"]
    assert logprobs == pytest.approx(server.logprobs(PROMPT + ids)[len(PROMPT) - 1 :], abs=server.tolerance)


def test_input_logprobs_score_a_given_text(server: Server) -> None:
    """logprob_start_len 0 scores the prompt; its first token has no logprob."""
    entries = server.generate(1)["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == PROMPT
    assert entries[0][0] is None
    assert [entry[0] for entry in entries[1:]] == pytest.approx(server.logprobs(PROMPT), abs=server.tolerance)


def test_a_stop_token_ends_the_output_and_stays_in_it(server: Server) -> None:
    """The stop token is sampled like any other: it stays in ids and logprobs, and finish_reason names it."""
    ids, _ = outputs(server.generate(12, temperature=0.0))
    stop = ids[5]
    answer = server.generate(12, temperature=0.0, stop_token_ids=[stop], ignore_eos=False)
    got, _ = outputs(answer)
    assert got == ids[: ids.index(stop) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_a_stop_string_ends_the_output(server: Server) -> None:
    """A stop string is found in the text, cut from it, and named by finish_reason; its tokens stay."""
    whole = server.generate(16, temperature=0.0)
    text = whole["text"]
    stop = next((c for c in text if c.isascii() and c.isprintable()), None)
    assert stop is not None, "the greedy text of this model holds nothing printable to stop at"
    answer = server.generate(16, temperature=0.0, stop=[stop])
    ids, _ = outputs(answer)
    assert ids == whole["output_ids"][: len(ids)]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"] == text[: text.index(stop)]


def test_a_batch_answers_a_flat_list_in_order(server: Server) -> None:
    """Several prompts in one call come back as a list, each with its own finish."""
    prompts = [PROMPT, PROMPT[:3], PROMPT[2:]]
    sampling = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    answers = server.post("/generate", {"input_ids": prompts, "sampling_params": sampling}).json()
    assert [a["meta_info"]["prompt_tokens"] for a in answers] == [7, 3, 5]
    alone = server.post("/generate", {"input_ids": prompts[1], "sampling_params": sampling}).json()
    assert answers[1]["output_ids"] == alone["output_ids"]


def test_a_stream_is_cumulative(server: Server) -> None:
    """Every event holds all ids so far, the last one the finish."""
    body = {
        "input_ids": PROMPT,
        "stream": True,
        "sampling_params": {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True},
    }
    with server.http.stream("POST", "/generate", json=body) as response:
        data = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    events = [json.loads(d) for d in data]
    for earlier, later in itertools.pairwise(events):
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert len(events[-1]["output_ids"]) == 6


def test_an_abort_returns_what_there_is(server: Server) -> None:
    """Partial tokens with all their logprobs, finish_reason abort; an unknown rid is no error."""
    pending = server.start("contract-abort")
    assert server.post("/abort_request", {"rid": "contract-abort"}).status_code == 200
    answer = pending.result(60)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    ids, _ = outputs(answer)
    assert 0 < len(ids) < LONG
    assert server.post("/abort_request", {"rid": "contract-nobody"}).status_code == 200


def interrupted(server: Server, rid: str, mode: str, between: Callable[[], None]) -> dict[str, Any]:
    """A long request's answer, with a pause in `mode`, `between`, and continue while it runs."""
    pending = server.start(rid)
    answer = server.post("/pause_generation", {"mode": mode})
    assert answer.status_code == 200
    assert answer.json()["status"] == "ok"
    if mode == "abort":
        pending.result(60)  # returns although generation is paused
    else:
        assert not pending.done()
    between()
    assert server.post("/continue_generation", {}).json()["status"] == "ok"
    return pending.result(120)


def test_pause_abort_returns_partials_at_once(server: Server) -> None:
    """In abort mode nobody waits: the client gets its part and asks again."""
    answer = interrupted(server, "contract-pause-abort", "abort", lambda: None)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(outputs(answer)[0]) < LONG


def test_pause_retract_goes_on_where_it_was(server: Server) -> None:
    """In retract mode the request hangs, drops its keys, and ends with every token and num_retractions 1."""
    answer = interrupted(server, "contract-retract", "retract", lambda: None)
    ids, logprobs = outputs(answer)
    assert len(ids) == LONG
    assert answer["meta_info"]["num_retractions"] == 1
    assert logprobs == pytest.approx(server.logprobs(PROMPT + ids)[len(PROMPT) - 1 :], abs=server.tolerance)


def test_pause_in_place_goes_on_with_its_keys(server: Server) -> None:
    """In in_place mode the request hangs and ends as if nothing had been."""
    answer = interrupted(server, "contract-in-place", "in_place", lambda: None)
    ids, logprobs = outputs(answer)
    assert len(ids) == LONG
    assert answer["meta_info"]["num_retractions"] == 0
    assert logprobs == pytest.approx(server.logprobs(PROMPT + ids)[len(PROMPT) - 1 :], abs=server.tolerance)


def test_a_new_request_waits_out_a_pause(server: Server) -> None:
    """What arrives while paused is answered after continue."""
    server.post("/pause_generation", {"mode": "retract"})
    server.eventually("/ready", 503)
    pending = server.pool.submit(server.generate, 4)
    assert not pending.done()
    server.post("/continue_generation", {})
    assert len(pending.result(60)["output_ids"]) == 4
    server.eventually("/ready", 200)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_spans_say_which_version_computed_which_token(server: Server, mode: str) -> None:
    """Weights updated while paused: the answer holds both versions, without a gap."""
    old, new = server.version(), f"{server.version()}-{mode}"

    def update() -> None:
        body = {"model_path": server.model_path, "weight_version": new, "flush_cache": mode == "retract"}
        answer = server.post("/update_weights_from_disk", body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["success"] is True

    answer = interrupted(server, f"contract-span-{mode}", mode, update)
    first, last = assert_spans(answer, [old, new])
    assert 0 < first < last == LONG
    assert server.version() == new


def test_an_update_without_a_pause_waits(server: Server) -> None:
    """In-flight requests end under their weights first; abort_all_requests sends them home instead."""
    old = server.version()
    body = {"model_path": server.model_path, "weight_version": f"{old}-w", "flush_cache": True}
    pending = server.start("contract-wait", 200)
    assert server.post("/update_weights_from_disk", body).json()["success"] is True
    assert_spans(pending.result(60), [old])
    pending = server.start("contract-wait-abort")
    assert server.post("/update_weights_from_disk", body | {"abort_all_requests": True}).json()["success"] is True
    assert pending.result(60)["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_bad_update_changes_nothing(server: Server, tmp_path: Path) -> None:
    """A path without weights is a 400 with success false; version and tokens stay."""
    version, before = server.version(), server.generate(6, temperature=0.0)["output_ids"]
    answer = server.post("/update_weights_from_disk", {"model_path": str(tmp_path / "none"), "weight_version": "x"})
    assert answer.status_code == 400
    assert answer.json()["success"] is False
    assert server.version() == version
    assert server.generate(6, temperature=0.0)["output_ids"] == before


@pytest.mark.parametrize(
    "change",
    [
        {"sampling_params": {"max_new_tokens": 4, "no_such_field": 1}},
        {"sampling_params": {"max_new_tokens": 10**7}},
        {"sampling_params": {"max_new_tokens": 4, "temperature": -1.0}},
        {"sampling_params": {"max_new_tokens": 4, "top_p": 2.0}},
        {"input_ids": None},
    ],
)
def test_a_request_that_cannot_be_served_is_a_400(server: Server, change: dict[str, Any]) -> None:
    """The caller's mistakes are 400 with a message, and the next request is served."""
    answer = server.post("/generate", {"input_ids": PROMPT} | change)
    assert answer.status_code == 400
    assert answer.json()
    assert len(server.generate(2)["output_ids"]) == 2
