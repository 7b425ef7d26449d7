"""If a server process answers with garbage, no completion is lost and no wrong token is accepted.

The garbage comes from tests/garbage_server.py. A healthy small server runs beside the garbage server.
"""

import asyncio
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from conftest import StartServer, server_process
from garbage_server import KINDS
from runs import SMALL_GUESS, check_metrics, run
from transformers import AutoModelForCausalLM

import engine as engine_module
from engine import RemoteInfEngine
from inference import servers, wire
from inference.io_struct import GenerationHyperparameters, ModelRequest, ModelResponse
from inference.servers import rank_servers
from inference.wire import EngineError
from run.inputs import load_inputs
from run.load import load

GARBAGE = [sys.executable, "tests/garbage_server.py", "--model-path"]


def worst_logprob(model: Any, response: ModelResponse) -> float:
    """Return the largest difference between the response's log-probabilities and those of a forward pass of
    transformers."""
    ids = torch.tensor([response.input_tokens + response.output_tokens])
    with torch.no_grad():
        logprobs = model(ids).logits[0, response.input_len - 1 : -1].float().log_softmax(-1)
    mine = logprobs.gather(-1, ids[0, response.input_len :, None])[:, 0]
    return float((mine - torch.tensor(response.output_logprobs)).abs().max())


@pytest.mark.runs
def test_garbage_of_every_kind_costs_no_completion(
    tiny_server: str,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A faulty server answers one ordinary and one streaming request with each kind of garbage. Each request gets its
    completion from the healthy server. The log names the faulty server and says how many times the engine has lost this
    server."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    monkeypatch.setattr(
        servers, "LOOK_AGAIN", 3600.0
    )  # the engine never checks a lost server during this test
    monkeypatch.setattr(engine_module, "FAILURE_WAIT", (0.0, 0.0))
    monkeypatch.setattr(wire, "MOST_BYTES", 2**22)
    with server_process(*GARBAGE, str(tiny_model_dir), out=subprocess.DEVNULL) as (garbage, _):
        engine = RemoteInfEngine([tiny_server, garbage], request_timeout=5.0)
        engine.initialize()
        engine.set_version(0)
        session = next(
            f"{k}" for k in range(100) if rank_servers([tiny_server, garbage], f"{k}")[0] == garbage
        )

        async def ask(streams: bool) -> ModelResponse:
            request = ModelRequest(
                [1, 2, 3], session=session, gconfig=GenerationHyperparameters(max_new_tokens=8)
            )
            lengths: list[int] = []
            on_tokens = (lambda so_far: lengths.append(so_far.output_len)) if streams else None
            answer = await engine.agenerate(request, on_tokens)
            assert lengths == sorted(lengths)
            return answer

        for lost in range(1, 2 * len(KINDS) + 1):
            response = asyncio.run(ask(streams=lost > len(KINDS)))
            assert 0 < response.output_len <= 8
            assert set(response.output_versions) == {0}
            assert worst_logprob(model, response) < 1e-4
            assert engine.servers.losses == Counter({garbage: lost})
            engine.servers.find(garbage)
        seen = asyncio.run(engine._wire.call(garbage + "/server_info"))["seen"]
        assert seen == 2 * len(KINDS)
        engine.destroy()
    counts = [re.search(r"lost (\d+) times", line) for line in caplog.messages]
    assert [int(count[1]) for count in counts if count] == [1, 2, 4, 8, 16, 32, 64]
    assert all("\n" not in line and len(line) < 1000 for line in caplog.messages)


def test_garbage_is_no_score(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every kind of garbage, a request for scores raises an EngineError. If the canary (run/mismatch.py) gets this
    error, it reports no values for the weight update, and the run continues."""
    monkeypatch.setattr(wire, "MOST_BYTES", 2**22)
    with server_process(*GARBAGE, str(tiny_model_dir), out=subprocess.DEVNULL) as (garbage, _):
        engine = RemoteInfEngine([garbage], request_timeout=5.0)
        engine.initialize()
        for _ in KINDS:
            with pytest.raises(EngineError):
                engine.score([1, 2, 3])
            engine.servers.find(garbage)
        engine.destroy()


@pytest.mark.runs
def test_a_run_beside_a_server_that_answers_with_garbage(
    tmp_path: Path, start_tiny_server: StartServer
) -> None:
    """A run has two servers, and one of them answers with garbage. The run trains as usual: no episode fails, and every
    trained token comes from the healthy server."""
    base = load_inputs(load(["seed=1"])).tokenizer.name_or_path
    healthy = start_tiny_server("--model-path", base)
    with server_process(*GARBAGE, base, "--honest", "2", out=subprocess.DEVNULL) as (garbage, _):
        words = [
            f"rollout.server_addrs=[{healthy},{garbage}]",
            "weight_update.mode=disk",
            "rollout.request_timeout=5",
        ]
        metrics = run(tmp_path, *SMALL_GUESS, *words, "max_steps=12", "seed=1")
        check_metrics(metrics, eta=1)
        seen = httpx.get(garbage + "/server_info").json()["seen"]
    assert [line["step"] for line in metrics] == list(range(1, 13))
    assert max(line["logp_mismatch"] for line in metrics) < 1e-4
    assert seen > 3
