"""UpdateMachine is the state machine of the weight updates.

UpdateMachine uses the real TrainingLoop.push_weights (train.py), RemoteInfEngine (engine.py), Servers
(inference/servers.py) and send (inference/weights.py). A run has two engines. The trainer's engine pushes new versions,
and the proxy's engine processes a request during the updates. Between two calls of the trainer, a server may generate a
token, die, or restart with its first weights. A connection may break, and an answer may be lost. After a failed
attempt, the proxy waits, and may then send its request again. The trainer may die together with its proxy. After the
trainer's death, a new trainer and a new proxy use the same servers (`take_over` in run/start.py). The new trainer
continues from the newest version that the gate of the dead trainer used. Only the servers are stand-ins. A stand-in
server uses the version of its weights as the id of each token that it generates. As in turns.py, a state is the list of
the events that lead to this state. The properties:

    `label`     Every token has the version of the weights that computed the token.
    `falls`     Versions never decrease along a completion.
    `lost`      Without a fault the request succeeds. The answer of a successful request has all tokens that the request
                asks for.
    `kept`      A token that the engine has passed to its caller is never changed or removed.
    `has`       When the gate gets a new version, every server that the trainer counts as living has the weights of this
                version. A restarted server that has not yet received weights is an exception. If a server's label is a
                version number, the server has the weights of this version.
    `paused`    After the trainer's end, no reachable server is paused.
    `deadlock`  From every state, the request and the trainer can end.
"""

import asyncio
import contextlib
import shutil
import tempfile
import weakref
from collections.abc import AsyncGenerator, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import httpx

import engine
import inference.servers
import inference.weights
import run.start
import train
from inference.io_struct import GenerationHyperparameters, ModelRequest, ModelResponse
from inference.wire import EngineError

from .loop import StillLoop
from .search import Broken, Event, PathMachine, State

TRAINER = "trainer goes on", "trainer gets no answer", "trainer gets an error"


class PathEnds(BaseException):
    """Raised when all events of the path have happened."""


class TrainerDies(BaseException):
    """Raised in the trainer's code when the trainer dies."""


class UpdateBounds(NamedTuple):
    """The bounds within which the search explores the state machine."""

    servers: int = 1
    versions: int = 1  # number of weight updates
    tokens: int = 2  # number of tokens that the request asks for
    faults: int = (
        1  # maximum number of server deaths, broken connections, lost answers and errors together
    )
    pause_mode: str = "retract"
    deaths: int = 0  # maximum number of crashes of the trainer


@dataclass(eq=False)
class Generation:
    """A generation request that a server is answering. For each token, `tokens` has the version of the weights and the
    server's label."""

    limit: int
    stream: asyncio.Queue
    tokens: list[tuple[int, str]] = field(default_factory=list)

    def answer(self, label: str, reason: str | None) -> dict[str, Any]:
        spans = [
            {"version": label, "start": k, "end": k + 1} for k, (_, label) in enumerate(self.tokens)
        ]
        ids = [version for version, _ in self.tokens]
        meta = {
            "weight_version": label,
            "weight_versions": spans,
            "finish_reason": reason and {"type": reason},
        }
        return {
            "output_ids": ids,
            "meta_info": meta | {"output_token_logprobs": [[-0.5, one, None] for one in ids]},
        }


@dataclass(eq=False)
class Server:
    """A stand-in for an inference server."""

    alive: bool = True
    label: str = "0"
    weights: int = 0
    restarted: bool = False  # true after a restart, until the server receives weights
    paused: bool = False
    running: dict[str, Generation] = field(default_factory=dict)

    def die(self) -> None:
        for generation in self.running.values():
            generation.stream.put_nowait(None)
        self.alive, self.running = False, {}

    def token(self, rid: str) -> None:
        generation = self.running[rid]
        generation.tokens.append((self.weights, self.label))
        ended = len(generation.tokens) >= generation.limit
        generation.stream.put_nowait(generation.answer(self.label, "length" if ended else None))
        if ended:
            del self.running[rid]

    def post(self, path: str, body: Any) -> dict[str, Any]:
        """Answer a control call, for example `pause`, like a real server."""
        if path == "/workers":
            raise EngineError("no router", 400)
        if path == "/generate":  # a test request from `initialize`
            return Generation(1, asyncio.Queue(), [(self.weights, self.label)]).answer(
                self.label, "length"
            )
        if path == "/pause_generation":
            self.paused = True
            if body["mode"] == "abort":
                self.abort([*self.running])
        elif path == "/continue_generation":
            self.paused = False
        elif path == "/update_weight_version":
            self.label = body["new_version"]
            if body["abort_all_requests"]:
                self.abort([*self.running])
        elif path == "/abort_request":
            self.abort([body["rid"]])
        elif path == "/update_weights_from_disk":
            folder = Path(body["model_path"])
            if not folder.is_dir():
                raise EngineError(f"{folder} is not there", 400)
            self.weights, self.restarted, self.label = (
                int(folder.name[1:]),
                False,
                body.get("weight_version") or self.label,
            )
        return {"weight_version": self.label}

    def abort(self, rids: list[str]) -> None:
        for rid in rids:
            if generation := self.running.pop(rid, None):
                generation.stream.put_nowait(generation.answer(self.label, "abort"))


class Wires:
    """Replaces inference.wire.Wire. For each call of the trainer, an event of the state machine decides when the call
    arrives and how it ends. A call that the proxy makes arrives immediately."""

    def __init__(self, world: "World", of_trainer: bool) -> None:
        self.world, self.of_trainer = world, of_trainer
        self.dead = False  # whether the process (trainer or proxy) that uses this object has died

    async def call(self, url: str, body: Any = None, timeout: float = 0.0) -> dict[str, Any]:
        if self.dead:
            return {}
        name, _, path = url.removeprefix("http://").partition("/")
        outcome = self.world.wait_for_trainer(url, body) if self.of_trainer else TRAINER[0]
        if name == "proxy":
            self.world.proxy.servers.limit = body["version"]
            return {}
        server = self.world.servers[int(name)]
        if outcome == TRAINER[2] and server.alive:
            raise EngineError(f"{url} answered 500", 503)
        answer = server.post(f"/{path}", body) if server.alive else {}
        if outcome == TRAINER[1] or not server.alive:
            raise EngineError(f"{url} cannot be reached", 503) from httpx.ConnectError("refused")
        return answer

    async def stream(
        self, url: str, body: Any, timeout: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        server = self.world.servers[int(url.split("/")[2])]
        self.world.attempts += 1
        if not server.alive:
            raise EngineError(f"{url} cannot be reached", 503) from httpx.ConnectError("refused")
        generation = Generation(body["sampling_params"]["max_new_tokens"], asyncio.Queue())
        server.running[body["rid"]] = generation
        while answer := await generation.stream.get():
            yield answer
            if answer["meta_info"]["finish_reason"]:
                return
        raise EngineError(f"{url} broke", 503) from httpx.ReadError("broken")


def run_all(calls: Iterable[Any], return_exceptions: bool = False) -> list[Any]:
    """Make the trainer's calls one after the other. Replaces inference.wire.run_all."""
    results: list[Any] = []
    waiting = [*calls]
    try:
        for call in waiting:
            try:
                call.send(None)
            except StopIteration as end:
                results.append(end.value)
            except EngineError as error:
                results.append(error)
    finally:
        for call in waiting:
            call.close()
    return results


class World:
    """One run: a trainer, a proxy with one request, and servers."""

    def __init__(self, bounds: UpdateBounds, modules: dict[str, ModuleType], folder: str) -> None:
        self.bounds, self.modules, self.folder, self.loop = bounds, modules, folder, StillLoop()
        self.clock, self.faults, self.attempts, self.version = 0.0, bounds.faults, 0, 0
        self.servers = [Server() for _ in range(bounds.servers)]
        self.pending: tuple[str, Any] | None = None  # URL and body of the trainer's next call
        self.trainer_ended = self.failed = False
        self.waits: list[asyncio.Future] = []
        self.request: asyncio.Task | None = None
        self.passed: list[
            tuple[int, int]
        ] = []  # (token, version) of each token that the engine's caller has got
        self.broken: Broken | None = None
        self.deaths = bounds.deaths
        # `claiming` is above 0 from a trainer's death until a new trainer labels the servers. While `claiming` is above
        # 0, the servers' labels may be wrong.
        self.claiming = 0
        self.starting = (
            False  # true while a new trainer has not yet pushed weights; in this time no agent runs
        )
        self.make_processes()

    def make_processes(self) -> None:
        """Make a trainer and a proxy."""
        self.trainer, self.proxy = self.make_engine(True), self.make_engine(False)
        self.trainer.proxies = self.modules["servers"].Servers(["http://proxy"], Wires(self, True))

    def make_engine(self, of_trainer: bool) -> Any:
        addresses = [f"http://{k}" for k in range(self.bounds.servers)]
        made = self.modules["engine"].RemoteInfEngine(
            addresses, self.bounds.pause_mode, request_retries=2
        )
        made._wire = made.servers._wire = Wires(self, of_trainer)
        made.sleep = self.sleep
        made.servers.limit = 0
        return made

    async def sleep(self, seconds: float) -> None:
        wait = self.loop.create_future()
        self.waits.append(wait)
        try:
            await wait
        finally:
            self.waits.remove(wait)

    def on_new_version(self) -> None:
        """Check the weights and labels of the servers when the gate gets a new version."""
        self.version = self.trainer.get_version()
        for url in self.trainer.servers.living():
            server = self.servers[int(url.removeprefix("http://"))]
            if (
                server.alive
                and not server.restarted
                and (server.weights, server.label) != (self.version, str(self.version))
            ):
                self.fail(
                    "has",
                    f"{url} has weights {server.weights} with label {server.label}, not {self.version}",
                )

    def fail(self, name: str, why: str) -> None:
        self.broken = self.broken or Broken(name, why)

    # ---- the trainer

    def run(self, path: Iterable[Event]) -> None:
        """Apply all events of the path."""
        self.path = iter(path)
        with contextlib.suppress(PathEnds):
            while not self.trainer_ended:
                with contextlib.suppress(TrainerDies):
                    self.train()
                    self.trainer_ended = True
            self.trainer_ended, self.pending = True, None
            for k, server in enumerate(self.servers):
                if server.alive and server.paused:
                    self.fail("paused", f"server {k} is left paused")
            self.wait_for_trainer("", None)

    def train(self) -> None:
        rollout = self.trainer
        meta = inference.weights.WeightUpdateMeta(mode="disk", path=self.folder)
        actor = SimpleNamespace(
            weight_update_meta=meta,
            write_weights=lambda meta: meta.directory.mkdir(parents=True, exist_ok=True),
            update_weights=rollout.update_weights,
            set_version=lambda version: None,
        )
        run = SimpleNamespace(trace=SimpleNamespace(mark=lambda *args, **kwargs: None))
        trainer: Any = SimpleNamespace(actor=actor, rollout=rollout, run=run)
        try:
            first = self.continue_after_death() if self.deaths < self.bounds.deaths else 1
            rollout.executor = SimpleNamespace(
                pause=lambda: None,
                resume=lambda: None,
                destroy=lambda: None,
                on_new_version=self.on_new_version,
            )
            for version in range(first, self.bounds.versions + 1):
                self.wait_for_trainer("trains", None)
                self.modules["train"].TrainingLoop.push_weights(trainer, version)
                self.starting = False
        except (EngineError, ValueError) as error:
            self.failed = True
            if self.request is not None:
                self.request.cancel()  # the proxy ends together with the run
                self.loop.run()
            if isinstance(error, ValueError):
                self.fail("has", str(error))
        rollout.destroy()

    def continue_after_death(self) -> int:
        """Start a new trainer in the same way as run/start.py. Return the version that the trainer pushes first."""
        self.modules["start"].take_over(self.trainer)
        self.trainer.initialize()
        inference.weights.label(self.trainer.servers.post_all, "0-incomplete")
        self.trainer.set_version(0)
        self.claiming = 0
        return self.version

    def die(self) -> None:
        """Kill the trainer and the proxy, so that neither process sends another request. The servers continue."""
        self.deaths -= 1
        self.proxy._wire.dead = True
        if self.request is not None:
            self.request.cancel()
            self.loop.run()
        self.request, self.passed, self.attempts, self.starting = None, [], 0, True
        self.claiming = 1
        self.make_processes()
        raise TrainerDies

    def wait_for_trainer(self, url: str, body: Any) -> str:
        """Apply events of the path until an event decides how the trainer's next call ends, and return the name of this
        event."""
        self.claiming += bool(self.claiming)
        self.loop.run()  # the proxy reacts to the trainer's previous call
        self.look_at_request()
        self.pending = None if self.trainer_ended else (url, body)
        for event in self.path:
            for server in self.servers:
                claims = server.alive and server.label.isdecimal() and not self.claiming
                if claims and int(server.label) != server.weights:
                    self.fail(
                        "has",
                        f"a server with weights {server.weights} claims version {server.label}",
                    )
            if event[0] in TRAINER:
                self.faults -= event[0] != TRAINER[0]
                return event[0]
            if event[0] == "trainer dies":
                self.die()
            self.apply(event)
        raise PathEnds

    # ---- other events

    def apply(self, event: Event) -> None:
        name, *args = event
        if name == "asks":
            gconfig = GenerationHyperparameters(max_new_tokens=self.bounds.tokens)
            self.request = self.loop.create_task(
                self.proxy.agenerate(ModelRequest([7], "r", gconfig), self.on_tokens)
            )
        elif name == "wait ends":
            self.waits[0].set_result(None)
        elif name == "2 s pass":
            self.clock += 2.0
        else:
            server = self.servers[args[0]]
            if name == "token":
                server.token(next(iter(server.running)))
            elif name == "restarts":
                self.servers[args[0]] = Server(restarted=True)
            else:
                self.faults -= 1
                if name == "dies":
                    server.die()
                else:  # the connection breaks, and the server continues
                    next(iter(server.running.values())).stream.put_nowait(None)
        self.loop.run()
        self.look_at_request()

    def on_tokens(self, response: ModelResponse) -> None:
        """Check the tokens that the engine passes to the caller of the request."""
        now = [*zip(response.output_tokens, response.output_versions)]
        if now[: len(self.passed)] != self.passed:
            self.fail("kept", f"the tokens were {self.passed} and are {now}")
        self.passed = now
        if any(token != version for token, version in now):
            self.fail("label", f"(weights, version) of the tokens: {now}")
        if response.output_versions != sorted(response.output_versions):
            self.fail("falls", f"the versions are {response.output_versions}")

    def look_at_request(self) -> None:
        """Check the answer to the request."""
        if not self.request or not self.request.done() or self.request.cancelled():
            return
        if error := self.request.exception():
            if self.faults == self.bounds.faults:
                self.fail("lost", f"the request failed without a fault: {error}")
        else:
            response = self.request.result()
            if response.output_len != self.bounds.tokens:
                self.fail(
                    "lost", f"the answer has {response.output_len} tokens of {self.bounds.tokens}"
                )
            if [*zip(response.output_tokens, response.output_versions)] != self.passed:
                self.fail(
                    "kept",
                    f"the tokens were {self.passed}, and the answer has {response.output_tokens}",
                )

    # ---- the state

    def possible(self) -> Iterator[Event]:
        if self.pending:
            yield (TRAINER[0],)
            name = self.pending[0].split("/")[2] if "/" in self.pending[0] else ""
            if self.faults and name.isdecimal() and self.servers[int(name)].alive:
                yield (TRAINER[1],)
                if self.pending[0].endswith("disk"):
                    yield (TRAINER[2],)
            if self.deaths:
                yield ("trainer dies",)
        if self.request is None and not self.starting:
            yield ("asks",)
        for k, server in enumerate(self.servers):
            if not server.alive:
                yield "restarts", k
            elif self.faults:
                yield "dies", k
            if server.running and not server.paused:
                yield "token", k
            if server.running and self.faults:
                yield "connection breaks", k
        if self.waits:
            yield ("wait ends",)
        if (
            any(at > self.clock for at in self.proxy.servers._look_at.values())
            and self.proxy.servers.lost
        ):
            yield ("2 s pass",)

    def key(self) -> Hashable:
        servers = tuple(
            (
                s.alive,
                s.label,
                s.weights,
                s.restarted,
                s.paused,
                tuple((g.limit, *g.tokens) for g in s.running.values()),
            )
            for s in self.servers
        )
        engines = tuple(
            (
                tuple(one.servers.lost),
                one.servers.newest,
                one.servers.limit,
                one._sent,
                one._servers_paused,
            )
            for one in (self.trainer, self.proxy)
        )
        due = tuple(
            self.proxy.servers._look_at[url] > self.clock for url in self.proxy.servers.lost
        )
        pending = self.pending and (self.pending[0], str(self.pending[1]), self.version)
        request = self.request and (
            self.attempts,
            self.request.done(),
            len(self.waits),
            *self.passed,
        )
        spent = self.faults, self.deaths, self.claiming, self.starting, self.version
        return servers, engines, due, pending, request, spent, self.trainer_ended, self.failed

    def text(self) -> str:
        servers = "; ".join(
            f"{k}: weights {s.weights}, label {s.label}{', paused' * s.paused}"
            if s.alive
            else f"{k}: dead"
            for k, s in enumerate(self.servers)
        )
        trainer = (
            "has failed"
            if self.failed
            else "has ended"
            if self.trainer_ended
            else f"next: {self.pending}"
        )
        return f"trainer {trainer}; servers [{servers}]; tokens {self.passed}"

    @property
    def is_goal(self) -> bool:
        answered = self.request is not None and self.request.done()
        # If a new trainer ends before its first push, there is no request.
        return self.trainer_ended and (answered or self.starting)


@dataclass(eq=False)
class UpdateMachine(PathMachine):
    """The state machine of the weight updates. The events come from a trainer, a proxy with a request, and servers."""

    bounds: UpdateBounds
    modules: dict[str, ModuleType] = field(
        default_factory=lambda: {
            "servers": inference.servers,
            "engine": engine,
            "train": train,
            "start": run.start,
        }
    )

    @cached_property
    def folder(self) -> str:
        """Return a new folder for the weights. When Python deletes the UpdateMachine, the folder of the weights is
        deleted."""
        folder = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    def run(self, path: tuple[Event, ...]) -> State:
        """Replay all events of a path in a newly created world, and return the resulting state."""
        module: Any = self.modules["servers"]
        replaced = module.run_all, module.time, module.logger.disabled
        world = World(self.bounds, self.modules, self.folder)
        module.run_all, module.time = run_all, SimpleNamespace(monotonic=lambda: world.clock)
        module.logger.disabled = engine.logger.disabled = True
        try:
            world.run(path)
            return State(
                path,
                world.key(),
                tuple(world.possible()),
                world.broken,
                world.is_goal,
                world.text(),
            )
        finally:
            for server in world.servers:
                server.alive = False
            world.loop.end()
            module.run_all, module.time, module.logger.disabled = replaced
            engine.logger.disabled = False


SMALL = (
    UpdateBounds(tokens=1),
    UpdateBounds(tokens=1, pause_mode="abort"),
    UpdateBounds(tokens=1, faults=0, deaths=1),
)
LARGE = (
    UpdateBounds(2, 2, 2, 1),
    UpdateBounds(2, 1, 2, 2),
    UpdateBounds(1, 2, 3, 2, "abort"),
    UpdateBounds(2, 1, 1, 1, deaths=1),
)
FAR = (
    UpdateBounds(3, 4, 6, 6),
    UpdateBounds(3, 4, 6, 6, "abort"),
    UpdateBounds(3, 4, 6, 6, deaths=3),
)
