"""If a server process ends, only its unfinished segments are lost. A restarted server gets no requests before it has
the current weights.

Most tests replace the network by scripted servers (`Machines`). The last test kills a real server process that is
generating.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
from conftest import ROOT, free_port, wait_until_up
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import generated

import engine as engine_module
from engine import EngineError, RemoteInfEngine
from inference import servers as servers_module
from inference.io_struct import GenerationHyperparameters, ModelRequest
from inference.servers import Servers, rank_servers, read_version
from inference.weights import WeightUpdateMeta
from inference.wire import Wire

A, B, ROUTER = "http://a", "http://b", "http://router"
CONTROL = (
    "/pause_generation",
    "/update_weight_version",
    "/update_weights_from_disk",
    "/continue_generation",
)


class Machines:
    """Scripted servers, each with a host name. A server has a version, may be down or paused, and generates one token
    per call."""

    def __init__(self, **versions: int) -> None:
        self.versions: dict[str, Any] = dict(versions)
        self.dead: set[str] = set()
        self.paused: set[str] = set()
        self.mute: dict[
            str, int
        ] = {}  # host -> number of control calls that it answers before an answer is lost
        # The URLs that host "router" reports as its workers. The router sends requests for tokens to host a.
        self.workers: list[Any] = []
        self.asked: list[tuple[str, str]] = []  # (host, path) of each request

    def __call__(self, request: httpx.Request) -> Any:
        host, path = request.url.host, request.url.path
        self.asked.append((host, path))
        if host in self.dead:
            raise httpx.ConnectError("refused")
        if host == "router":
            if path == "/workers":
                return httpx.Response(200, json={"workers": self.workers})
            if path not in ("/generate", "/model_info"):
                return httpx.Response(404, json={"error": "not found"})
            host = "a"
        if path == "/workers":
            return httpx.Response(404, json={"detail": "Not Found"})
        if path == "/generate":
            return self.generate(host)
        if path == "/pause_generation":
            self.paused.add(host)
        if path == "/continue_generation":
            self.paused.discard(host)
        if path == "/update_weight_version":
            label = json.loads(request.content)["new_version"]
            self.versions[host] = int(label) if label.isdecimal() else label
        if path == "/update_weights_from_disk":
            self.versions[host] = int(json.loads(request.content)["weight_version"])
        if path in CONTROL and host in self.mute:
            self.mute[host] -= 1
            if self.mute[host] < 0:
                del self.mute[host]
                raise httpx.ReadTimeout("it did what it was told, but the answer was lost")
        return httpx.Response(
            200, json={"success": True, "weight_version": str(self.versions[host])}
        )

    def generate(self, host: str) -> Any:
        assert host not in self.paused, "this request would wait for ever"
        return generated([7], spans=[(self.versions[host], 1)])

    def engine(self, *addresses: str) -> RemoteInfEngine:
        async def sleep(_: float) -> None:
            await asyncio.sleep(0)

        return RemoteInfEngine(list(addresses), transport=httpx.MockTransport(self), sleep=sleep)

    def generated_at(self) -> list[str]:
        return [host for host, path in self.asked if path == "/generate"]


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine check a lost server before every request instead of every few seconds."""
    monkeypatch.setattr(servers_module, "LOOK_AGAIN", 0.0)


def ask(engine: RemoteInfEngine, session: str = "s", count: int = 1) -> list[int]:
    """Send `count` requests of one conversation, and return the versions of their tokens."""

    async def ask_all() -> list[int]:
        request = ModelRequest(
            [1], session=session, gconfig=GenerationHyperparameters(max_new_tokens=1)
        )
        return [
            version
            for _ in range(count)
            for version in (await engine.agenerate(request)).output_versions
        ]

    return asyncio.run(ask_all())


def update(engine: RemoteInfEngine, folder: Path, version: int) -> None:
    (folder / f"v{version}").mkdir()
    engine.pause()
    engine.update_weights(WeightUpdateMeta(path=str(folder), version=version))
    engine.set_version(version)
    engine.resume()


def home(session: str = "s") -> tuple[str, str]:
    """Return the hosts a and b in the order in which the engine tries them for the conversation `session`."""
    first, second = rank_servers([A, B], session)
    return first[-1], second[-1]


def test_a_dead_server_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one failed request to a server that is down, the next requests of the conversation go to a different
    server."""
    monkeypatch.setattr(servers_module, "LOOK_AGAIN", 3600.0)
    machines, (first, second) = Machines(a=0, b=0), home()
    machines.dead.add(first)
    assert ask(machines.engine(A, B), count=5) == [0] * 5
    assert machines.generated_at() == [first] + [second] * 5


def test_requests_wait_for_a_server_that_is_started_again() -> None:
    """If all servers are down, requests wait until a server is started again, even if they have used up their retries.
    The restarted server gets no request before it has the current weights."""
    machines, sleeps = Machines(a=7), list[float]()
    engine = machines.engine(A)
    assert ask(engine) == [7]
    machines.dead.add("a")

    async def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 20:
            machines.dead.remove("a")
            machines.versions["a"] = "0-incomplete"
        if len(sleeps) == 30:
            assert machines.generated_at() == ["a", "a"]
            machines.versions["a"] = 7

    engine.sleep, engine.wait_for_servers = sleep, True
    assert ask(engine) == [7]
    assert len(sleeps) == 30


def test_a_proxy_that_was_silent_is_told_the_next_version() -> None:
    """If a proxy does not answer a call of set_version in time, it gets the next call of set_version again."""
    machines = Machines(a=0, p=0, q=0)
    engine = machines.engine(A)
    engine.proxies = Servers(
        ["http://p", "http://q"], Wire(transport=httpx.MockTransport(machines))
    )
    for version, silent in ((1, {"q"}), (2, set[str]())):
        machines.dead = silent
        engine.set_version(version)
    assert [host for host, path in machines.asked if path == "/set_version"].count("q") == 2


def test_an_update_waits_for_a_server_that_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all servers are down when an update begins, the update waits until a server is started again, or until the run
    has stopped. If the engine has already sent version v, a second update to version v raises an error. After a call of
    `forget_sent`, the engine can send version v a second time."""
    machines = Machines(a=0)
    engine = machines.engine(A)
    engine.wait_for_servers = True
    engine.executor = MagicMock()
    machines.dead.add("a")
    monkeypatch.setattr(engine_module.time, "sleep", lambda _: machines.dead.discard("a"))
    update(engine, tmp_path, 1)
    assert machines.versions == {"a": 1}
    with pytest.raises(ValueError, match="version 1 is not newer than 1"):
        engine.update_weights(WeightUpdateMeta(path=str(tmp_path), version=1))
    engine.forget_sent()
    engine.update_weights(WeightUpdateMeta(path=str(tmp_path), version=1))
    machines.dead.add("a")
    monkeypatch.undo()
    engine.executor.dispatcher.check_alive.side_effect = RuntimeError("server-0 ended")
    with pytest.raises(RuntimeError, match="server-0 ended"):
        engine.pause()


def test_an_update_goes_on_without_the_dead(tmp_path: Path) -> None:
    """An update succeeds if at least one server answers. If all servers are down, `pause` raises an error that names a
    server."""
    machines = Machines(a=0, b=0)
    engine = machines.engine(A, B)
    machines.dead.add("b")
    update(engine, tmp_path, 1)
    assert machines.versions == {"a": 1, "b": 0}
    machines.dead.add("a")
    with pytest.raises(EngineError, match=r"http://a/pause"):
        engine.pause()


@pytest.mark.parametrize("answers", range(4))
def test_a_lost_answer_leaves_no_server_paused(tmp_path: Path, answers: int) -> None:
    """If a server's answer is lost during an update, the server does not stay paused, and tokens from its old weights
    are labelled with the old version.
    """
    machines = Machines(a=0, b=0)
    trainer, proxy = machines.engine(A, B), machines.engine(A, B)
    session = next(f"{k}" for k in range(100) if home(f"{k}")[0] == "b")
    assert ask(proxy, session) == [0]
    machines.mute["b"] = answers
    update(trainer, tmp_path, 1)
    assert machines.mute == {}
    assert machines.paused == set()
    assert ask(trainer) == [1]
    assert ask(proxy, session) == [
        min(answers, 1)
    ]  # if server b's answer to the pause is lost, b keeps version 0
    update(trainer, tmp_path, 2)
    assert ask(trainer, session) == ask(proxy, session) == [2]
    assert machines.generated_at()[-1] == "b"


def test_destroy_continues_also_the_lost() -> None:
    """`destroy` also ends the pause of a lost server, so that the next run can use the server."""
    machines = Machines(a=0)
    engine = machines.engine(A)
    engine.pause()
    engine.servers.lose(A, EngineError("an answer of 500"))
    engine.destroy()
    assert machines.paused == set()


def test_who_returns_takes_part_in_the_next_update(tmp_path: Path) -> None:
    """A restarted server gets no requests until a weight update has reached the server."""
    machines, (first, _) = Machines(a=0, b=0), home()
    engine = machines.engine(A, B)
    machines.dead.add(first)
    update(engine, tmp_path, 1)
    machines.dead.clear()
    assert ask(engine, count=3) == [1, 1, 1]
    assert first not in machines.generated_at()
    update(engine, tmp_path, 2)
    machines.asked.clear()
    assert ask(engine, count=3) == [2, 2, 2]
    assert machines.generated_at() == [first] * 3


def test_a_process_that_is_told_nothing_waits_for_the_version(tmp_path: Path) -> None:
    """A proxy uses a lost server again when the server's version is at least the newest version among all tokens that
    the proxy has received."""
    machines, (first, _) = Machines(a=3, b=3), home()
    proxy = machines.engine(A, B)
    machines.dead.add(first)
    assert ask(proxy) == [3]
    machines.dead.clear()
    machines.versions[first] = 0
    assert ask(proxy, count=2) == [3, 3]
    machines.versions.update(a=4, b=4)
    machines.asked.clear()
    assert ask(proxy, count=2) == [4, 4]
    assert set(machines.generated_at()) == {first}


def test_a_server_that_died_unseen_is_caught_by_its_tokens() -> None:
    """If a server restarts, it generates tokens with version 0. The engine discards the tokens of a restarted server
    and repeats the request at a different server."""
    machines, (first, second) = Machines(a=7, b=7), home()
    engine = machines.engine(A, B)
    assert ask(engine) == [7]
    machines.versions[first] = 0
    assert ask(engine, count=2) == [7, 7]
    assert machines.generated_at() == [first, first, second, second]


def test_a_version_above_the_trainers_is_refused_wherever_it_is_read() -> None:
    """A server counts as lost if it reports tokens or weights that are newer than the trainer's version. After
    `set_version(v)`, an engine refuses tokens of versions above v."""
    machines, (first, second) = Machines(a=7, b=7), home()
    engine = machines.engine(A, B)
    engine.set_version(7)
    machines.versions[first] = 999
    assert ask(engine, count=2) == [7, 7]
    assert machines.generated_at() == [first, second, second]
    assert engine.servers.newest == 7


def test_an_answer_from_before_an_update_is_no_restart() -> None:
    """The engine accepts an answer of version 7 if it sent the request before its first token of version 8 arrived. The
    engine refuses an answer of version 7 if it sent the request after a token of version 8 arrived."""
    servers = Servers([A, B], Wire())
    servers.check_age(A, [7], sent_after=7)
    servers.check_age(B, [7, 8], sent_after=7)
    servers.check_age(A, [7], sent_after=7)
    assert servers.newest == 8
    with pytest.raises(EngineError, match="restarted"):
        servers.check_age(A, [7], sent_after=8)


@pytest.mark.parametrize("form", ["text", "object"])
def test_control_goes_around_a_router(tmp_path: Path, form: str) -> None:
    """Requests for tokens go to the router. Control requests (pause, abort, weight update) go to the router's workers,
    including workers that joined later."""
    machines = Machines(a=0, b=0)
    machines.workers = [{"url": A, "is_healthy": True} if form == "object" else A]
    engine = machines.engine(ROUTER)
    engine.initialize()
    machines.workers.append({"url": B + "/"} if form == "object" else B)
    update(engine, tmp_path, 1)
    assert machines.versions == {"a": 1, "b": 1}
    assert ask(engine) == [1]
    assert {host for host, path in machines.asked if path not in ("/generate", "/workers")} == {
        "a",
        "b",
    }


@pytest.mark.anyio
async def test_behind_a_router_a_request_ends_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a request to a router is cancelled, the engine sends /abort_request to every worker of the router."""
    machines, in_flight = Machines(a=0, b=0), asyncio.Event()
    machines.workers = [A, B]
    engine = machines.engine(ROUTER)
    await asyncio.to_thread(engine.initialize)

    async def hang(_: str) -> httpx.Response:
        in_flight.set()
        return await asyncio.Event().wait()  # type: ignore[return-value]

    monkeypatch.setattr(machines, "generate", hang)
    task = asyncio.create_task(engine.agenerate(ModelRequest([1])))
    await in_flight.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert {host for host, path in machines.asked if path == "/abort_request"} == {"a", "b"}


def test_without_its_router_a_run_ends() -> None:
    """If a router does not answer when an update begins, `pause` raises an error that names the router."""
    machines = Machines(a=0)
    machines.workers = [A]
    engine = machines.engine(ROUTER)
    engine.initialize()
    machines.dead.add("router")
    with pytest.raises(EngineError, match=f"no answer from the router {ROUTER}"):
        engine.pause()


def test_at_the_start_every_server_must_be_there() -> None:
    """If a server does not answer at the start, `initialize` raises an error that names the server."""
    machines = Machines(a=0, b=0)
    machines.dead.add("b")
    with pytest.raises(EngineError, match="http://b"):
        machines.engine(A, B).initialize()


@given(st.integers(0, 10**9))
def test_versions_are_numbers(version: int) -> None:
    """If a version label is not a number, for example during an update, it counts as older than every version."""
    assert read_version(str(version)) == version
    assert (
        read_version(f"{version}-incomplete") == read_version("default") == read_version(None) == -1
    )


KINDS = st.sampled_from(["die", "return", "mute", "update", "ask"])
EVENTS = st.lists(st.tuples(KINDS, st.sampled_from("abc"), st.integers(0, 4)), max_size=40)


@settings(deadline=None, max_examples=40)
@given(EVENTS)
def test_any_order_of_deaths_returns_and_updates(
    tmp_path_factory: pytest.TempPathFactory, events: list
) -> None:
    """If at least one server with current weights is up, every request gets tokens of the current version, and no
    running server stays paused.

    The test stops servers, restarts servers at version 0, and loses answers to an update, in any order.
    """
    machines = Machines(a=0, b=0, c=0)
    trainer, proxy = (machines.engine(A, B, "http://c") for _ in range(2))
    folder, version = tmp_path_factory.mktemp("weights"), 0
    for k, (event, host, answers) in enumerate(events):
        others = set("abc") - machines.dead - {host}
        if event == "die" and any(
            machines.versions[h] == version for h in others - machines.mute.keys()
        ):
            machines.dead.add(host)
        elif event == "mute" and others and not machines.mute and host not in machines.dead:
            machines.mute[host] = answers
        elif event == "return" and host in machines.dead:
            machines.dead.discard(host)
            machines.versions[host] = 0
        elif event == "update":
            version += 1
            update(trainer, folder, version)
            assert machines.paused <= machines.dead
            assert ask(trainer) == [version]
            # The proxy recognises old tokens only after it has received a token of the new version.
            survivor = next(
                h for h in "abc" if h not in machines.dead and machines.versions[h] == version
            )
            proxy.servers.check_age(survivor, [version], 0)
        else:
            assert ask(trainer, session=f"{k}") == ask(proxy, session=f"{k}") == [version]


# Real servers


@pytest.fixture
def pair(tiny_model_dir: Path) -> Iterator["Pair"]:
    pair = Pair(tiny_model_dir)
    yield pair
    pair.stop()


class Pair:
    """Two processes of inference/tiny/server.py, which a test can kill and start again on the same ports."""

    def __init__(self, model: Path) -> None:
        self.model, self.ports = model, [free_port(), free_port()]
        self.processes: list[subprocess.Popen | None] = [None, None]
        for k in (0, 1):
            self.start(k)

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def start(self, k: int) -> None:
        words = [
            "--model-path",
            str(self.model),
            "--port",
            str(self.ports[k]),
            "--exit-with-parent",
        ]
        process = subprocess.Popen(
            [sys.executable, "-m", "inference.tiny.server", *words], cwd=ROOT, stdin=subprocess.PIPE
        )
        self.processes[k] = process
        wait_until_up(self.urls[k], process)

    def kill(self, k: int) -> None:
        process = self.processes[k]
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()  # type: ignore[union-attr]

    def info(self, k: int) -> dict:
        return httpx.get(self.urls[k] + "/model_info", trust_env=False).json()

    def stop(self) -> None:
        for process in self.processes:
            if process is not None and process.poll() is None:
                process.stdin.close()  # type: ignore[union-attr]
                process.wait(timeout=20)


LONG = 1800  # length in tokens of a completion that is still running when its server is killed


@pytest.mark.runs
def test_kill_one_of_two_in_the_midst_of_generation(
    pair: Pair, other_model_dir: Path, tmp_path: Path
) -> None:
    """Twelve long completions finish, although the weights are updated and one of two real servers is killed.

    When the killed server is started again, it gets no requests until the next update gives it the current weights.
    """
    engine = RemoteInfEngine(pair.urls, pause_mode="abort")
    engine.initialize()
    gconfig = GenerationHyperparameters(max_new_tokens=LONG, temperature=1.0)
    responses: dict[int, Any] = {}

    async def generate(k: int) -> None:
        responses[k] = await engine.agenerate(
            ModelRequest([5, 6, 7], session=f"{k}", gconfig=gconfig)
        )

    async def generate_all() -> None:
        await asyncio.gather(*(generate(k) for k in range(12)))

    thread = threading.Thread(target=lambda: asyncio.run(generate_all()))
    thread.start()
    wait_for_tokens(pair, 0)
    meta = WeightUpdateMeta(path=str(tmp_path))
    shutil.copytree(other_model_dir, tmp_path / "v1")
    engine.pause()
    engine.update_weights(meta.with_version(1))
    engine.resume()
    wait_for_tokens(pair, 0)
    pair.kill(0)
    thread.join(timeout=120)
    assert sorted(responses) == list(range(12))
    for response in responses.values():
        assert response.output_len == LONG or response.stop_reason == "stop"
        assert response.output_versions == sorted(response.output_versions)
        assert set(response.output_versions) <= {0, 1}
    assert any(set(response.output_versions) == {0, 1} for response in responses.values())
    assert list(engine.servers.lost) == pair.urls[:1]

    # The server restarts with its original weights, and gets no requests until an update.
    pair.start(0)
    mine = next(f"{k}" for k in range(100) if rank_servers(pair.urls, f"{k}")[0] == pair.urls[0])
    assert ask(engine, session=mine, count=2) == [1, 1]
    assert pair.urls[0] in engine.servers.lost
    shutil.copytree(other_model_dir, tmp_path / "v2")
    engine.pause()
    engine.update_weights(meta.with_version(2))
    engine.resume()
    assert pair.info(0)["weight_version"] == "2"
    assert ask(engine, session=mine, count=2) == [2, 2]
    assert engine.servers.lost == {}
    engine.destroy()


def wait_for_tokens(pair: Pair, k: int) -> None:
    """Wait until server k reports that it is generating."""
    while "running=0" in (state := pair.info(k)["state"]):
        assert "running=" in state
