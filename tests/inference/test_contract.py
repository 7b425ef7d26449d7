r"""Each kind of inference server fulfils the contract that engine.py relies on.

The tests run against inference/tiny/server.py. If POCKET_AREAL_SGLANG is the path of a Python with SGLang (`make
test-sglang`), the tests also run against the real SGLang on a CPU. The servers inference/tiny and SGLang compute in
float32, and their logprobs must agree with a forward pass of transformers to 1e-4 nats. The command below tests a
server that is already running, for example on a GPU. If a server computes in bfloat16, its logprobs may differ from the
logprobs of the forward pass by up to 0.25 nats.

    POCKET_AREAL_CONTRACT_URL=http://127.0.0.1:30000 POCKET_AREAL_CONTRACT_MODEL=/path/to/model \
        pytest tests/inference/test_contract.py

The tests avoid requests that inference/tiny and SGLang treat differently. The tests send no id outside the vocabulary
and no tensor of a wrong shape, because such an id or tensor crashes SGLang. The tests send no seed, because SGLang
ignores seeds. The tests send every sampling parameter, because the servers' defaults may differ.
"""

import asyncio
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import timedelta
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from conftest import SGLANG, run_sglang
from transformers import AutoModelForCausalLM

from engine import EngineError, RemoteInfEngine
from inference import weights
from inference.group import join_group
from inference.io_struct import GenerationHyperparameters, ModelRequest
from inference.weights import WeightUpdateMeta
from run.start import take_over

SERVERS = (
    ["url"]
    if os.environ.get("POCKET_AREAL_CONTRACT_URL")
    else ["tiny", *(["sglang"] if SGLANG else [])]
)
PROMPT = [40, 41, 42, 43, 44, 45, 46]
SLOTS = 16  # number of requests that a server under test runs at the same time
LONG = 1000  # number of tokens of a request that is still running when a test interrupts it


class Server:
    """The server under test, and a reference model that computes the expected logprobs."""

    def __init__(self, url: str, model_path: str) -> None:
        self.url = url
        self.model_path = model_path
        self.http = httpx.Client(base_url=url, timeout=120)
        self.pool = ThreadPoolExecutor(8)
        config = json.loads((Path(model_path) / "config.json").read_text())
        bf16 = "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))
        # The tests allow two logprobs to differ by `tolerance` nats. The largest measured difference in bfloat16 is
        # 0.10 nats.
        self.tolerance = 0.25 if bf16 else 1e-4
        self.reference = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.http.post(path, json=body)

    def ask(
        self, max_new_tokens: int = 8, rid: str | None = None, prompt: Any = PROMPT, **params: Any
    ) -> httpx.Response:
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True}
        sampling |= {"max_new_tokens": max_new_tokens, **params}
        body = {
            "input_ids": prompt,
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        return self.post("/generate", body | ({"rid": rid} if rid else {}))

    def generate(self, *args: Any, **params: Any) -> dict[str, Any]:
        response = self.ask(*args, **params)
        assert response.status_code == 200, response.text
        return response.json()

    def send(self, max_new_tokens: int, prompt: Any) -> Callable[[], Any]:
        """Send a request, and return a function that waits for the answer. After the request, `send` asks the server
        for its version and waits for the reply. The server reads requests in order of arrival, so the server has read
        the first request when this reply comes."""
        sampling = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": max_new_tokens}
        connection = HTTPConnection(
            self.http.base_url.host, self.http.base_url.port or 80, timeout=60
        )
        body = json.dumps({"input_ids": prompt, "sampling_params": sampling})
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        self.version()

        def answer() -> Any:
            with closing(connection):
                return json.loads(connection.getresponse().read())

        return answer

    def start(self, rid: str, max_new_tokens: int = LONG) -> Future:
        """Send a long request in a second thread, and return after the server has generated the request's first
        token."""
        begun = threading.Event()

        def run() -> dict[str, Any]:
            body = {
                "input_ids": PROMPT,
                "rid": rid,
                "stream": True,
                "return_logprob": True,
                "sampling_params": {
                    "max_new_tokens": max_new_tokens,
                    "temperature": 1.0,
                    "ignore_eos": True,
                },
            }
            last: dict[str, Any] = {}
            try:
                with self.http.stream("POST", "/generate", json=body) as response:
                    rest = b""
                    for part in response.iter_bytes():  # `iter_lines` would split a text at U+0085
                        *events, rest = (rest + part).split(b"\n\n")
                        for event in events:
                            if event.startswith(b"data: {"):
                                last = json.loads(event[6:])
                                begun.set()
            finally:
                begun.set()
            return last

        future = self.pool.submit(run)
        assert begun.wait(60)
        return future

    def logprobs(self, ids: list[int], temperature: float = 1.0, model: Any = None) -> list[float]:
        """Return log p(ids[t] | ids[:t]) for t >= 1, computed by a forward pass of `model` (default: the reference)."""
        with torch.no_grad():
            logits = (
                (model or self.reference)(input_ids=torch.tensor([ids]), use_cache=False)
                .logits[0, :-1]
                .float()
            )
        scores = torch.log_softmax(logits / temperature, dim=-1)
        return scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    def version(self) -> str:
        return self.http.get("/model_info").json()["weight_version"]

    def next_version(self) -> str:
        """Return the server's version plus 1. After a failed update the version is a number followed by
        "-incomplete"."""
        return str(int(self.version().partition("-")[0]) + 1)

    def eventually(self, path: str, status: int) -> None:
        """Repeat a request to `path` until the server answers with the HTTP status `status`."""
        deadline = time.monotonic() + 30
        while self.http.get(path).status_code != status:
            assert time.monotonic() < deadline, f"{path} never answered {status}"


@pytest.fixture(scope="module", params=SERVERS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with ExitStack() as stack:
        if request.param == "url":
            server = Server(
                os.environ["POCKET_AREAL_CONTRACT_URL"], os.environ["POCKET_AREAL_CONTRACT_MODEL"]
            )
        else:
            model_dir = request.getfixturevalue("tiny_model_dir")
            if request.param == "sglang":
                log = tmp_path_factory.mktemp("sglang") / "log"
                small = (
                    "--dtype",
                    "float32",
                    "--max-total-tokens",
                    "8192",
                    "--max-running-requests",
                    str(SLOTS),
                )
                url = stack.enter_context(run_sglang(model_dir, log, *small))
            else:
                url = request.getfixturevalue("start_tiny_server")(
                    "--max-running-requests", str(SLOTS)
                )
            server = Server(url, str(model_dir))
        version = server.version()
        yield server
        server.post("/continue_generation", {})
        server.post(
            "/update_weights_from_disk",
            {"model_path": server.model_path, "weight_version": version},
        )
        server.pool.shutdown()
        server.http.close()


def outputs(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Check that the two lists of output tokens in an answer contain the same ids, and return the ids and logprobs."""
    entries = answer["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in entries] == answer["output_ids"]
    assert answer["meta_info"]["completion_tokens"] == len(entries)
    return answer["output_ids"], [entry[0] for entry in entries]


def assert_spans(answer: dict[str, Any], versions: list[str]) -> list[int]:
    """Check that the answer's spans have the versions `versions` in this order and cover the output without a gap.
    Return the end of each span."""
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == versions
    assert [span["start"] for span in spans] == [0] + [span["end"] for span in spans[:-1]]
    assert spans[-1]["end"] == len(answer["output_ids"])
    assert answer["meta_info"]["weight_version"] == versions[-1]
    return [span["end"] for span in spans]


def test_a_request_runs_to_its_length(server: Server) -> None:
    """A request that reaches max_new_tokens ends with finish reason `length`, and its answer has max_new_tokens ids and
    logprobs."""
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
    """The server reports log_softmax(logits / temperature) as a token's logprob, and the trainer computes the same
    formula."""
    ids, logprobs = outputs(server.generate(12, temperature=temperature))
    expected = server.logprobs(PROMPT + ids, temperature)[len(PROMPT) - 1 :]
    assert logprobs == pytest.approx(expected, abs=server.tolerance)


def test_logprobs_are_before_top_p_and_top_k(server: Server) -> None:
    """top_p and top_k change which token the server draws, but not the logprob that the server reports."""
    ids, logprobs = outputs(server.generate(12, top_p=0.6, top_k=5))
    assert logprobs == pytest.approx(
        server.logprobs(PROMPT + ids)[len(PROMPT) - 1 :], abs=server.tolerance
    )


def test_greedy_repeats_itself_and_reports_raw_logprobs(server: Server) -> None:
    """At temperature 0 a prompt always gets the same tokens, and the reported logprobs are computed at temperature
    1."""
    ids, logprobs = outputs(server.generate(12, temperature=0.0))
    assert ids == server.generate(12, temperature=0.0)["output_ids"]
    assert logprobs == pytest.approx(
        server.logprobs(PROMPT + ids)[len(PROMPT) - 1 :], abs=server.tolerance
    )


def test_input_logprobs_score_a_given_text(server: Server) -> None:
    """With logprob_start_len 0 the server returns the logprobs of the prompt's tokens. The first token of a prompt has
    no logprob."""
    entries = server.generate(1)["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == PROMPT
    assert entries[0][0] is None
    assert [entry[0] for entry in entries[1:]] == pytest.approx(
        server.logprobs(PROMPT), abs=server.tolerance
    )


def test_a_stop_token_ends_the_output_and_stays_in_it(server: Server) -> None:
    """A stop token stays in the ids and logprobs, and finish_reason contains the token's id."""
    ids, _ = outputs(server.generate(12, temperature=0.0))
    stop = ids[5]
    answer = server.generate(12, temperature=0.0, stop_token_ids=[stop], ignore_eos=False)
    got, _ = outputs(answer)
    assert got == ids[: ids.index(stop) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_a_stop_string_ends_the_output(server: Server) -> None:
    """A stop string is cut from the text, but its tokens stay in the ids. The answer's finish_reason contains the stop
    string."""
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
    """The answer to a request with several prompts is a list in the order of the prompts."""
    prompts = [PROMPT, PROMPT[:3], PROMPT[2:]]
    sampling = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    answers = server.post("/generate", {"input_ids": prompts, "sampling_params": sampling}).json()
    assert [a["meta_info"]["prompt_tokens"] for a in answers] == [7, 3, 5]
    alone = server.post("/generate", {"input_ids": prompts[1], "sampling_params": sampling}).json()
    assert answers[1]["output_ids"] == alone["output_ids"]


def test_a_stream_is_cumulative(server: Server) -> None:
    """Every event of a stream contains all token ids generated so far, and the last event contains the finish
    reason."""
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
    """The answer to an aborted request contains the tokens and logprobs generated so far. An abort of an unknown
    request has no effect."""
    pending = server.start("contract-abort")
    assert server.post("/abort_request", {"rid": "contract-abort"}).status_code == 200
    answer = pending.result(60)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    ids, _ = outputs(answer)
    assert 0 < len(ids) < LONG
    assert server.post("/abort_request", {"rid": "contract-nobody"}).status_code == 200


def interrupted(server: Server, rid: str, mode: str, between: Callable[[], Any]) -> dict[str, Any]:
    """Pause a long request in mode `mode`, call the function `between`, continue the request, and return its answer."""
    pending = server.start(rid)
    answer = server.post("/pause_generation", {"mode": mode})
    assert answer.status_code == 200
    assert answer.json()["status"] == "ok"
    if mode == "abort":
        pending.result(60)  # in mode `abort` the request ends during the pause
    else:
        assert not pending.done()
    between()
    assert server.post("/continue_generation", {}).json()["status"] == "ok"
    return pending.result(120)


def test_pause_abort_returns_partials_at_once(server: Server) -> None:
    """A pause in mode `abort` immediately ends every request, and each answer contains the tokens generated so far."""
    answer = interrupted(server, "contract-pause-abort", "abort", lambda: None)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(outputs(answer)[0]) < LONG


def test_pause_retract_goes_on_where_it_was(server: Server) -> None:
    """A request continues after a pause in mode `retract`, and its answer has all tokens and reports one retraction."""
    answer = interrupted(server, "contract-retract", "retract", lambda: None)
    ids, logprobs = outputs(answer)
    assert len(ids) == LONG
    assert answer["meta_info"]["num_retractions"] == 1
    assert logprobs == pytest.approx(
        server.logprobs(PROMPT + ids)[len(PROMPT) - 1 :], abs=server.tolerance
    )


def test_a_retracted_request_goes_to_the_end_of_the_queue(server: Server) -> None:
    """After a pause, a request that was waiting starts before the requests that the pause interrupted.

    The test checks that the waiting request is answered while all interrupted requests are incomplete. On a busy
    machine, the interrupted requests may be complete before the check, so the test makes up to twenty attempts. If a
    server puts interrupted requests at the head of its queue, it completes them before the waiting request, and every
    attempt fails.
    """
    for _ in range(20):
        running = server.send(LONG // 2, [PROMPT] * SLOTS)
        waiting = server.send(1, PROMPT[:3])
        server.post("/pause_generation", {"mode": "retract"})
        server.post("/continue_generation", {})
        assert waiting()["meta_info"]["completion_tokens"] == 1
        server.post("/pause_generation", {"mode": "abort"})
        server.post("/continue_generation", {})
        ran = running()
        reasons = {answer["meta_info"]["finish_reason"]["type"] for answer in ran}
        if reasons == {"abort"} and any(answer["meta_info"]["num_retractions"] for answer in ran):
            return
    pytest.fail(
        "in no try was the waiting request answered while all running requests were incomplete"
    )


def test_pause_in_place_goes_on_with_its_keys(server: Server) -> None:
    """During a pause in mode `in_place` a request keeps its KV cache and is not retracted: the answer's
    `num_retractions` is 0."""
    answer = interrupted(server, "contract-in-place", "in_place", lambda: None)
    ids, logprobs = outputs(answer)
    assert len(ids) == LONG
    assert answer["meta_info"]["num_retractions"] == 0
    assert logprobs == pytest.approx(
        server.logprobs(PROMPT + ids)[len(PROMPT) - 1 :], abs=server.tolerance
    )


def test_a_new_request_waits_out_a_pause(server: Server) -> None:
    """A request that arrives during a pause gets its answer after /continue_generation."""
    server.post("/pause_generation", {"mode": "retract"})
    server.eventually("/ready", 503)
    pending = server.pool.submit(server.generate, 4)
    assert not pending.done()
    server.post("/continue_generation", {})
    assert len(pending.result(60)["output_ids"]) == 4
    server.eventually("/ready", 200)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_spans_say_which_version_computed_which_token(server: Server, mode: str) -> None:
    """If the weights are updated during a pause, the answer has a span of the old version, and directly after it a span
    of the new version."""
    old, new = server.version(), server.next_version()

    def update() -> None:
        body = {
            "model_path": server.model_path,
            "weight_version": new,
            "flush_cache": mode == "retract",
        }
        answer = server.post("/update_weights_from_disk", body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["success"] is True

    answer = interrupted(server, f"contract-span-{mode}", mode, update)
    first, last = assert_spans(answer, [old, new])
    assert 0 < first < last == LONG
    assert server.version() == new


def test_a_request_outlives_released_memory(server: Server) -> None:
    """A server that has released its memory keeps its requests. If a pause in mode `retract` has interrupted a request,
    the next weight update lets the request continue from its last token. If a request arrives while the memory is
    released, the server answers the request after the next weight update."""
    if server.http.delete("/release_memory_occupation").status_code == 404:
        pytest.skip("this server has no route /release_memory_occupation")
    waiting = []

    def release() -> None:
        assert server.post("/release_memory_occupation", {}).status_code == 200
        waiting.append(server.send(4, PROMPT))
        assert server.post("/resume_memory_occupation", {}).status_code == 200
        body = {
            "model_path": server.model_path,
            "weight_version": server.next_version(),
            "flush_cache": True,
        }
        assert server.post("/update_weights_from_disk", body).json()["success"] is True

    answer = interrupted(server, "contract-release", "retract", release)
    ids, logprobs = outputs(answer)
    assert len(ids) == LONG
    assert answer["meta_info"]["num_retractions"] == 1
    assert logprobs == pytest.approx(
        server.logprobs(PROMPT + ids)[len(PROMPT) - 1 :], abs=server.tolerance
    )
    assert waiting[0]()["meta_info"]["completion_tokens"] == 4


def test_an_update_without_a_pause_waits(server: Server) -> None:
    """Without a pause, an update waits until the running requests have finished. With abort_all_requests, the update
    aborts the running requests. With abort_all_requests the test sends flush_cache=False, because SGLang refuses to
    flush its cache while its scheduler still holds an aborted request."""
    old = server.version()
    body = {
        "model_path": server.model_path,
        "weight_version": server.next_version(),
        "flush_cache": True,
    }
    pending = server.start("contract-wait", 200)
    assert server.post("/update_weights_from_disk", body).json()["success"] is True
    assert_spans(pending.result(60), [old])
    pending = server.start("contract-wait-abort")
    body |= {"abort_all_requests": True, "flush_cache": False}
    assert server.post("/update_weights_from_disk", body).json()["success"] is True
    assert pending.result(60)["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_bad_update_changes_nothing(server: Server, tmp_path: Path) -> None:
    """An update from a path without weights gets status 400, and the server keeps its version and weights."""
    version, before = server.version(), server.generate(6, temperature=0.0)["output_ids"]
    answer = server.post(
        "/update_weights_from_disk", {"model_path": str(tmp_path / "none"), "weight_version": "x"}
    )
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
    """The server answers an invalid request with status 400 and a message, and serves the next request."""
    answer = server.post("/generate", {"input_ids": PROMPT} | change)
    assert answer.status_code == 400
    assert answer.json()
    assert len(server.generate(2)["output_ids"]) == 2


@pytest.mark.parametrize("on_tokens", [None, lambda _: None], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "change", [{"top_p": 2.0}, {"json_schema": '{"type": "bogus"}'}], ids=["top_p", "schema"]
)
def test_a_refusal_is_a_400_in_any_form(
    server: Server, change: dict[str, Any], on_tokens: Any
) -> None:
    """The engine raises an EngineError with status 400 if the server refuses a request, with or without streaming."""
    engine = RemoteInfEngine([server.url])
    engine.initialize()
    gconfig = GenerationHyperparameters(max_new_tokens=4, **change)
    with pytest.raises(EngineError) as caught:
        asyncio.run(engine.agenerate(ModelRequest(PROMPT, gconfig=gconfig), on_tokens))
    assert caught.value.status == 400
    assert len(server.generate(2)["output_ids"]) == 2


# The limits that a server reports


def test_the_engine_learns_what_it_may_send(server: Server) -> None:
    """The engine reads the vocabulary size and the context length from the server, and the server serves a request
    that fills the context."""
    engine = RemoteInfEngine([server.url])
    engine.initialize()
    config = server.reference.config
    assert engine.vocab_size == config.vocab_size
    assert engine.context_length is not None
    assert (
        config.max_position_embeddings - 8
        <= engine.context_length
        <= config.max_position_embeddings
    )
    for new in (1, 5):
        prompt = (PROMPT * config.max_position_embeddings)[: engine.context_length - new]
        gconfig = GenerationHyperparameters(max_new_tokens=new, stop_token_ids=[])
        answer = asyncio.run(engine.agenerate(ModelRequest(prompt, gconfig=gconfig)))
        assert answer.output_len == new or answer.stop_reason == "stop"
    with pytest.raises(EngineError, match="outside the vocabulary"):
        asyncio.run(engine.agenerate(ModelRequest([config.vocab_size])))


# Weight updates in each mode


class Blocking:
    """A gloo group in which every `broadcast` waits, like NCCL's first broadcast, until all servers have received the
    tensor.

    In gloo itself, `broadcast` returns a handle before the servers have received the tensor. The class Blocking waits
    for gloo's handle.
    """

    def __init__(self, group: Any) -> None:
        self.group = group

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        work = self.group.broadcast(tensor, root)
        work.wait(timedelta(seconds=60))
        return work

    def shutdown(self) -> None:
        self.group.shutdown()


@pytest.fixture(autouse=True)
def blocking_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every broadcast of the trainer wait until all servers have received the tensor."""
    monkeypatch.setattr(weights, "join_group", lambda *arguments: Blocking(join_group(*arguments)))


class Other:
    """A model of the same architecture as the server's model, with a method that sends weights to the server."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.model = AutoModelForCausalLM.from_pretrained(server.model_path, dtype=torch.float32)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))

    def send(
        self, mode: str, model: Any, version: str, pause_mode: str = "retract", fail: bool = False
    ) -> None:
        """Update the server's weights as the trainer does. If `fail` is true, an error ends the update after the first
        bucket."""
        engine = RemoteInfEngine([self.server.url], pause_mode=pause_mode)
        meta = WeightUpdateMeta(
            mode=mode, path=str(self.folder), version=int(version), bucket_mb=0.1
        )
        if mode == "disk":
            weights.write_checkpoint(model.state_dict(), self.server.model_path, meta.directory)
        if fail:
            engine.update_weights(meta, broken(weights.named_buckets(model, torch.float32, 0.1)))
        engine.update_weights(
            meta, None if mode == "disk" else weights.named_buckets(model, torch.float32, 0.1)
        )


def broken(buckets: Iterator[weights.Bucket]) -> Iterator[weights.Bucket]:
    yield next(buckets)
    raise RuntimeError("out of memory")


@pytest.fixture
def other(server: Server, tmp_path: Path) -> Iterator[Other]:
    """Yield a second model, whose weights a test can send to the server. After the test, send the original weights to
    the server."""
    other = Other(server, tmp_path)
    yield other
    server.post("/pause_generation", {"mode": "abort"})
    other.send("disk", server.reference, server.next_version())
    server.post("/continue_generation", {})


def assert_serves(server: Server, model: Any, version: str) -> None:
    """Check that the server uses the weights of `model` and reports `version`. `assert_serves` sends a prompt that the
    server has not cached."""
    prompt = [50 + int(version) % 50, *PROMPT]
    answer = server.generate(12, prompt=prompt, temperature=0.0)
    ids, logprobs = outputs(answer)
    assert_spans(answer, [version])
    assert logprobs == pytest.approx(
        server.logprobs(prompt + ids, model=model)[len(prompt) - 1 :], abs=server.tolerance
    )
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + ids]), use_cache=False).logits[
            0, len(prompt) - 1 : -1
        ]
    lead = logits.max(-1).values - logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert (
        lead.max() < 2 * server.tolerance
    )  # up to rounding, each generated token is the most likely token


MODES = ["disk", "distributed", "tensor"]


@pytest.mark.parametrize("pause_mode", ["retract", "abort", "in_place"])
@pytest.mark.parametrize("mode", MODES)
def test_new_weights_arrive_while_somebody_generates(
    server: Server, other: Other, mode: str, pause_mode: str
) -> None:
    """A weight update keeps the tokens of a running request. Each token's logprob agrees with the weights of the
    token's version.

    In pause mode `in_place` a token after the update depends on the old and the new weights, so the test does not check
    the token's logprob. Requests after the update are computed with the new weights.
    """
    old, new = server.version(), server.next_version()
    rid = f"contract-{mode}-{pause_mode}"
    answer = interrupted(
        server, rid, pause_mode, lambda: other.send(mode, other.model, new, pause_mode)
    )
    ids, logprobs = outputs(answer)
    if pause_mode == "abort":
        assert_spans(answer, [old])
        cut = len(ids)
        assert 0 < cut < LONG
    else:
        cut, end = assert_spans(answer, [old, new])
        assert 0 < cut < end == LONG
    by_old = server.logprobs(PROMPT + ids)[len(PROMPT) - 1 :]
    by_new = server.logprobs(PROMPT + ids, model=other.model)[len(PROMPT) - 1 :]
    assert logprobs[:cut] == pytest.approx(by_old[:cut], abs=server.tolerance)
    if pause_mode == "retract":
        assert logprobs[cut:] == pytest.approx(by_new[cut:], abs=server.tolerance)
    assert_serves(server, other.model, new)


@pytest.mark.parametrize("mode", ["distributed", "tensor"])
def test_an_update_that_failed_is_never_served(server: Server, other: Other, mode: str) -> None:
    """If an update fails halfway, the engine refuses the server's tokens until a later update succeeds."""
    old, new = server.version(), server.next_version()
    server.post("/pause_generation", {"mode": "retract"})
    with pytest.raises(RuntimeError, match="out of memory"):
        other.send(mode, other.model, new, fail=True)
    server.post("/continue_generation", {})
    assert server.version() == f"{new}-incomplete"
    engine = RemoteInfEngine([server.url], request_retries=0)
    with pytest.raises(EngineError, match="cannot be read"):
        asyncio.run(engine.agenerate(ModelRequest(PROMPT)))
    assert old != new
    server.post("/pause_generation", {"mode": "retract"})
    other.send(mode, other.model, new)
    server.post("/continue_generation", {})
    assert_serves(server, other.model, new)


def test_weights_come_in_sessions(server: Server) -> None:
    """The server accepts weights only between begin_weight_update and end_weight_update. Before begin_weight_update and
    after end_weight_update, a request with weights gets status 400. A request with an unknown process group gets status
    400."""
    part = {
        "names": ["model.norm.weight"],
        "dtypes": ["float32"],
        "shapes": [[1]],
        "group_name": "nobody",
    }
    handles = {"serialized_named_tensors": [weights.serialise([])]}
    calls: list[tuple[str, dict[str, Any], int]] = [
        ("/end_weight_update", {}, 400),
        ("/update_weights_from_distributed", part, 400),
        ("/update_weights_from_tensor", handles, 400),
        ("/begin_weight_update", {}, 200),
        ("/begin_weight_update", {}, 400),
        ("/update_weights_from_distributed", part, 400),
        ("/update_weights_from_tensor", handles, 200),
        ("/end_weight_update", {}, 200),
        ("/destroy_weights_update_group", {"group_name": "nobody"}, 400),
    ]
    version = server.version()
    for path, body, status in calls:
        answer = server.post(path, body)
        assert (answer.status_code, answer.json()["success"]) == (status, status == 200), (
            path,
            answer.text,
        )
    assert server.version() == version
    assert len(server.generate(2)["output_ids"]) == 2


def test_a_label_can_change_alone(server: Server) -> None:
    """A request to /update_weight_version changes the server's version label but not its weights, and running requests
    continue."""
    old, new = server.version(), server.next_version()
    pending = server.start("contract-label")
    body = {"new_version": new, "abort_all_requests": False}
    assert server.post("/update_weight_version", body).json()["success"] is True
    answer = pending.result(60)
    first, last = assert_spans(answer, [old, new])
    assert 0 < first < last == LONG
    ids, logprobs = outputs(answer)
    assert logprobs == pytest.approx(
        server.logprobs(PROMPT + ids)[len(PROMPT) - 1 :], abs=server.tolerance
    )


def test_a_new_run_ends_the_update_of_a_killed_run(server: Server) -> None:
    """A run that was killed in the middle of a weight update leaves the update open. The next run that uses the server
    ends the update, so it can send its own weights."""
    assert server.post("/begin_weight_update", {}).status_code == 200
    engine: Any = RemoteInfEngine([server.url])
    take_over(engine)
    assert server.post("/begin_weight_update", {}).status_code == 200
    assert server.post("/end_weight_update", {}).status_code == 200
    take_over(engine)  # no update is open
    assert len(server.generate(2)["output_ids"]) == 2
