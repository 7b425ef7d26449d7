r"""Every inference server keeps the contract that engine.py relies on.

The tests run against inference/tiny, and, if POCKET_AREAL_SGLANG is a Python with SGLang (`make
test-sglang`), against the real SGLang on a CPU. Both compute in float32, so their logprobs agree
with a forward pass of transformers to 1e-4 nats. A server that runs already, such as one on a GPU,
is tested by the command below; in bfloat16 its logprobs may differ by 0.25 nats.

    POCKET_AREAL_CONTRACT_URL=http://127.0.0.1:30000 POCKET_AREAL_CONTRACT_MODEL=/path/to/model \
        pytest tests/inference/test_contract.py

The tests send no id outside the vocabulary and no tensor of a wrong shape, because SGLang would
crash. They send no seed, because SGLang ignores it. The small server takes weights only from a
disk, so the tests of mode distributed skip it.
"""

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from conftest import SGLANG, run_sglang
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import EngineError, RemoteInfEngine
from inference import weights
from inference.io_struct import CallParameters, GenerationHyperparameters, ModelRequest
from inference.weights import WeightUpdateMeta

URL = os.environ.get("POCKET_AREAL_CONTRACT_URL", "")
PROMPT = [40, 41, 42, 43, 44, 45, 46]
LONG = 1000  # tokens of a request that is still running when a test interrupts it


class Server:
    """The server under test, and a model that knows the right logprobs."""

    def __init__(self, url: str, model_path: str, kind: str) -> None:
        self.url, self.model_path = url, model_path
        self.broadcasts = kind != "tiny"
        self.http, self.pool = httpx.Client(base_url=url, timeout=120), ThreadPoolExecutor()
        config = json.loads((Path(model_path) / "config.json").read_text())
        bf16 = "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))
        self.tolerance = 0.25 if bf16 else 1e-4
        self.reference = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.http.post(path, json=body)

    def done(self, path: str, **body: Any) -> None:
        """Make a request that must succeed."""
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        assert (answer.json() or {}).get("success", True)

    @staticmethod
    def body(max_new_tokens: int, prompt: Any = PROMPT, **params: Any) -> dict[str, Any]:
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True}
        sampling |= {"max_new_tokens": max_new_tokens, **params}
        return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}

    def generate(self, *args: Any, **params: Any) -> Any:
        response = self.post("/generate", self.body(*args, **params))
        assert response.status_code == 200, response.text
        return response.json()

    def send(self, rid: str | None, *args: Any) -> Future:
        """Send a request, and return when the server has read it."""
        base = self.http.base_url
        connection = HTTPConnection(base.host, base.port or 80, timeout=120)
        body = json.dumps(self.body(*args) | ({"rid": rid} if rid else {}))
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        self.version()  # the server reads requests in order of arrival

        def answer() -> Any:
            with closing(connection):
                return json.loads(connection.getresponse().read())

        return self.pool.submit(answer)

    def start(self, rid: str, max_new_tokens: int = LONG) -> Future:
        """Send a long request, and wait for its first token. The answer to a later request shows
        that it has one."""
        future = self.send(rid, max_new_tokens)
        self.generate(1, PROMPT[:3])
        return future

    def logits(self, ids: list[int], model: Any = None) -> torch.Tensor:
        with torch.no_grad():
            model = model or self.reference
            return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()

    def logprobs(self, ids: list[int], temperature: float = 1.0, model: Any = None) -> list[float]:
        """log p(ids[t] | ids[:t]) for t >= 1."""
        scores = torch.log_softmax(self.logits(ids, model) / temperature, dim=-1)
        return scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    def check(self, answer: dict[str, Any], **how: Any) -> list[int]:
        """Check the logprobs of an answer to PROMPT, and return its ids."""
        ids, logprobs = outputs(answer)
        expected = self.logprobs(PROMPT + ids, **how)[len(PROMPT) - 1 :]
        assert logprobs == pytest.approx(expected, abs=self.tolerance)
        return ids

    def version(self) -> str:
        return self.http.get("/model_info").json()["weight_version"]

    def next_version(self) -> str:
        return str(int(self.version().partition("-")[0]) + 1)

    def load(self, version: str, **more: Any) -> None:
        """Load the first weights again, as `version`."""
        body = {"model_path": self.model_path, "weight_version": version, "flush_cache": True}
        self.done("/update_weights_from_disk", **body | more)


SERVERS = ["url"] if URL else ["tiny", *(["sglang"] if SGLANG else [])]


@pytest.fixture(scope="module", params=SERVERS)
def server(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ExitStack() as stack:
        slots = ("--max-running-requests", "16")
        if request.param == "url":
            server = Server(URL, os.environ["POCKET_AREAL_CONTRACT_MODEL"], "url")
        else:
            model_dir = request.getfixturevalue("tiny_model_dir")
            if request.param == "sglang":
                log = tmp_path_factory.mktemp("sglang") / "server.log"
                small = ("--dtype", "float32", "--max-total-tokens", "8192", *slots)
                url = stack.enter_context(run_sglang(model_dir, log, *small))
            else:
                url = request.getfixturevalue("start_tiny_server")(*slots)
            server = Server(url, str(model_dir), request.param)
        version = server.version()
        yield server
        server.done("/continue_generation")
        server.load(version)
        server.pool.shutdown()
        server.http.close()


def outputs(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    """The ids and logprobs of an answer, which has the ids twice."""
    entries = answer["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in entries] == answer["output_ids"]
    return answer["output_ids"], [entry[0] for entry in entries]


def reason(answer: dict[str, Any]) -> str:
    return answer["meta_info"]["finish_reason"]["type"]


def assert_spans(answer: dict[str, Any], versions: list[str]) -> list[int]:
    """Check that the spans have these versions and no gap. Return the end of each."""
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == versions
    assert [span["start"] for span in spans] == [0] + [span["end"] for span in spans[:-1]]
    assert spans[-1]["end"] == len(answer["output_ids"])
    assert answer["meta_info"]["weight_version"] == versions[-1]
    return [span["end"] for span in spans]


# One request


def test_a_request_runs_to_its_length(server: Server) -> None:
    """A request ends at max_new_tokens, and says so."""
    answer = server.send("contract-length", 8).result(60)
    assert (len(outputs(answer)[0]), reason(answer)) == (8, "length")
    assert_spans(answer, [server.version()])


SAMPLED = [{}, {"temperature": 0.5}, {"temperature": 1.7}, {"top_p": 0.6, "top_k": 5}]


@pytest.mark.parametrize("params", SAMPLED)
def test_logprobs_are_those_of_the_trainer(server: Server, params: dict[str, Any]) -> None:
    """They are log_softmax(logits / temperature); top_p and top_k only change which token is
    drawn."""
    server.check(server.generate(12, **params), temperature=params.get("temperature", 1.0))


def test_greedy_repeats_itself_and_reports_raw_logprobs(server: Server) -> None:
    """At temperature 0 a prompt has one answer, with logprobs at temperature 1."""
    ids = server.check(server.generate(12, temperature=0.0))
    assert ids == server.generate(12, temperature=0.0)["output_ids"]


def test_a_stop_token_ends_the_output_and_stays_in_it(server: Server) -> None:
    """The stop token has an id and a logprob like any other."""
    ids, _ = outputs(server.generate(12, temperature=0.0))
    stop = ids[5]
    answer = server.generate(12, temperature=0.0, stop_token_ids=[stop], ignore_eos=False)
    assert outputs(answer)[0] == ids[: ids.index(stop) + 1]
    assert reason(answer) == "stop"


def test_a_stop_string_ends_the_output(server: Server) -> None:
    """The ids of the answer include the tokens of the stop string."""
    whole = outputs(server.generate(16, temperature=0.0))[0]
    decode = AutoTokenizer.from_pretrained(server.model_path).decode
    stop = next(c for c in decode(whole) if c.isascii() and c.isprintable())
    answer = server.generate(16, temperature=0.0, stop=[stop])
    ids, _ = outputs(answer)
    assert ids == whole[: len(ids)]
    assert stop in decode(ids)
    assert stop not in decode(ids[:-1])
    assert reason(answer) == "stop"


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
    """The server says why, and serves the next request."""
    answer = server.post("/generate", {"input_ids": PROMPT} | change)
    assert answer.status_code == 400
    assert answer.json()
    assert len(server.generate(2)["output_ids"]) == 2


def test_a_wrong_schema_is_a_400(server: Server) -> None:
    """A server refuses a wrong schema, whether it supports grammars or not. The status tells the
    engine not to retry."""
    engine = RemoteInfEngine([server.url])
    gconfig = CallParameters(max_new_tokens=4, json_schema='{"type": "bogus"}')
    with pytest.raises(EngineError, check=lambda error: error.status == 400):
        asyncio.run(engine.agenerate(ModelRequest(PROMPT, gconfig=gconfig)))
    assert len(server.generate(2)["output_ids"]) == 2


def test_the_engine_learns_what_it_may_send(server: Server) -> None:
    """The engine learns the model's context length, and a request may fill it."""
    engine = RemoteInfEngine([server.url])
    engine.initialize()
    longest = server.reference.config.max_position_embeddings
    assert engine.context_length is not None
    assert longest - 8 <= engine.context_length <= longest
    for new in (1, 5):
        prompt = (PROMPT * longest)[: engine.context_length - new]
        gconfig = GenerationHyperparameters(max_new_tokens=9)  # more than the context has
        answer = asyncio.run(engine.agenerate(ModelRequest(prompt, gconfig=gconfig)))
        assert answer.output_len == new or answer.stop_reason == "stop"


# Aborts and pauses


def test_an_abort_returns_what_there_is(server: Server) -> None:
    """An aborted request returns its tokens so far; aborting an unknown one is no error."""
    pending = server.start("contract-abort")
    assert server.post("/abort_request", {"rid": "contract-abort"}).status_code == 200
    answer = pending.result(60)
    assert reason(answer) == "abort"
    assert 0 < len(outputs(answer)[0]) < LONG
    assert server.post("/abort_request", {"rid": "contract-nobody"}).status_code == 200


def interrupted(server: Server, rid: str, mode: str, between: Callable[[], Any]) -> dict[str, Any]:
    """Pause a long request, call `between`, continue, and return the request's answer."""
    pending = server.start(rid)
    server.done("/pause_generation", mode=mode)
    if mode == "abort":
        pending.result(60)  # it ends during the pause
    else:
        assert not pending.done()
    between()
    server.done("/continue_generation")
    return pending.result(120)


def test_a_new_request_waits_out_a_pause(server: Server) -> None:
    """A request that comes during a pause is answered after it."""
    server.done("/pause_generation", mode="retract")
    pending = server.pool.submit(server.generate, 4)
    assert not pending.done()
    server.done("/continue_generation")
    assert len(pending.result(60)["output_ids"]) == 4


# Weight updates


def test_a_bad_update_changes_nothing(server: Server, tmp_path: Path) -> None:
    """A folder without weights gets a 400, and the server keeps version and weights."""
    version, before = server.version(), server.generate(6, temperature=0.0)["output_ids"]
    body = {"model_path": str(tmp_path / "none"), "weight_version": "x"}
    assert server.post("/update_weights_from_disk", body).status_code == 400
    assert server.version() == version
    assert server.generate(6, temperature=0.0)["output_ids"] == before


class Other:
    """A second model with other weights, and a way to send a model as the trainer does."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.model = AutoModelForCausalLM.from_pretrained(server.model_path, dtype=torch.float32)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))

    def send(self, mode: str, model: Any, version: str, fail: bool = False) -> None:
        engine = RemoteInfEngine([self.server.url])
        meta = WeightUpdateMeta(mode=mode, path=str(self.folder), version=int(version))
        if mode == "disk":
            weights.write_checkpoint(model.state_dict(), self.server.model_path, meta.directory)
        buckets = weights.named_buckets(model, torch.float32, 0.1)
        engine.update_weights(meta, broken(buckets) if fail else buckets)


def broken(buckets: Iterator[weights.Bucket]) -> Iterator[weights.Bucket]:
    yield next(buckets)
    raise RuntimeError("out of memory")


@pytest.fixture
def other(server: Server, tmp_path: Path) -> Iterator[Other]:
    """A second model. After the test the server has the first one again."""
    other = Other(server, tmp_path)
    yield other
    server.done("/pause_generation", mode="abort")
    other.send("disk", server.reference, server.next_version())
    server.done("/continue_generation")


def assert_serves(server: Server, model: Any, version: str) -> None:
    """Check the weights and the version of a server, with a prompt that it has not cached."""
    prompt = [50 + int(version) % 50, *PROMPT]
    answer = server.generate(12, prompt=prompt, temperature=0.0)
    ids, logprobs = outputs(answer)
    assert_spans(answer, [version])
    expected = server.logprobs(prompt + ids, model=model)[len(prompt) - 1 :]
    assert logprobs == pytest.approx(expected, abs=server.tolerance)
    logits = server.logits(prompt + ids, model)[len(prompt) - 1 :]
    lead = logits.max(-1).values - logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert lead.max() < 2 * server.tolerance  # greedy, up to rounding


@pytest.mark.parametrize("pause_mode", ["retract", "abort"])
@pytest.mark.parametrize("mode", ["disk", "distributed"])
def test_new_weights_arrive_while_somebody_generates(
    server: Server, other: Other, mode: str, pause_mode: str
) -> None:
    """A running request keeps its tokens, and each logprob is that of its version's weights."""
    if mode == "distributed" and not server.broadcasts:
        pytest.skip("the small server has no process group")
    old, new = server.version(), server.next_version()
    rid = f"contract-{mode}-{pause_mode}"

    def update() -> None:
        other.send(mode, other.model, new)

    answer = interrupted(server, rid, pause_mode, update)
    ids, logprobs = outputs(answer)
    if pause_mode == "abort":
        [cut] = assert_spans(answer, [old])
        assert reason(answer) == "abort"
        assert 0 < cut < LONG
    else:
        cut, end = assert_spans(answer, [old, new])
        assert 0 < cut < end == LONG
    by_old = server.logprobs(PROMPT + ids)[len(PROMPT) - 1 :]
    by_new = server.logprobs(PROMPT + ids, model=other.model)[len(PROMPT) - 1 :]
    assert logprobs[:cut] == pytest.approx(by_old[:cut], abs=server.tolerance)
    assert logprobs[cut:] == pytest.approx(by_new[cut:], abs=server.tolerance)
    assert_serves(server, other.model, new)


def test_an_update_that_failed_is_never_served(server: Server, other: Other) -> None:
    """The engine refuses the server's tokens until a later update succeeds."""
    if not server.broadcasts:
        pytest.skip("the small server has no process group")
    new = server.next_version()
    server.done("/pause_generation", mode="retract")
    with pytest.raises(RuntimeError, match="out of memory"):
        other.send("distributed", other.model, new, fail=True)
    server.done("/continue_generation")
    assert server.version() == f"{new}-incomplete"
    engine = RemoteInfEngine([server.url], request_retries=0)
    with pytest.raises(EngineError, match="cannot be read"):
        asyncio.run(engine.agenerate(ModelRequest(PROMPT)))
    server.done("/pause_generation", mode="retract")
    other.send("distributed", other.model, new)
    server.done("/continue_generation")
    assert_serves(server, other.model, new)


def test_a_new_run_takes_over_what_a_killed_run_left(server: Server) -> None:
    """The new run ends an open update, lets the server continue, and gives it a readable
    version."""
    version = server.version()
    if server.broadcasts:
        server.done("/begin_weight_update")
    server.done("/update_weight_version", new_version="7-incomplete")
    server.done("/pause_generation", mode="retract")
    engine = RemoteInfEngine([server.url])
    for _ in range(2):  # the second time no update is open
        engine.take_over()
        engine.initialize()
        assert server.version() == "0"
    server.load(version)
