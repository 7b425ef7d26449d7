"""UpdateMachine explores a weight update around one request.

It runs the shipped `PPOTrainer.push` (train.py), `RemoteInfEngine` (engine.py), and `Servers` and
`send` (inference/). There are two engines: the trainer's engine pushes versions, and the proxy's
engine makes the request.

Between two calls of the trainer, a server may generate a token, die, or restart with its first
weights. A connection may break, and an answer may be lost. The servers are stand-ins: the id of
each token is the version of the weights that computed it. The properties:

    `label`     Every token has the version of the weights that computed it, and none is newer than
                the version that the proxy was told.
    `falls`     Versions never fall along a completion.
    `lost`      A completion keeps every token, has all that were asked for, and fails only after
                request_retries + 1 failures in a row.
    `has`       A server whose label is a number has the weights of that version. When the gate gets
                a new version, every live server has it, unless it restarted during the update.
    `paused`    When the trainer has ended, no living server is paused.
    `deadlock`  From every state, request and trainer can end.
"""

import asyncio
import contextlib
import shutil
import tempfile
import weakref
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import aiohttp

import engine
import inference.servers
import train
from inference.io_struct import EngineError, GenerationHyperparameters, ModelRequest, ModelResponse
from inference.weights import WeightUpdateMeta

from .loop import StillLoop
from .search import Broken, Event, PathMachine, State

TRAINER = "trainer goes on", "trainer gets no answer", "trainer gets an error"
RETRIES = 1


class PathEnds(BaseException):
    """All events of the path have happened."""


class UpdateBounds(NamedTuple):
    servers: int = 1
    versions: int = 1  # updates
    tokens: int = 2  # what the request asks for
    faults: int = 1  # deaths of servers, broken connections, lost answers and errors together
    pause_mode: str = "retract"


@dataclass(eq=False)
class Generation:
    """A request at a server: for each token the version of the weights, and the server's label."""

    limit: int
    answered: asyncio.Future  # the answer, or None for a broken connection
    tokens: list[tuple[int, str]] = field(default_factory=list)

    def end(self, answer: dict[str, Any] | None) -> None:
        if not self.answered.done():
            self.answered.set_result(answer)

    def answer(self, label: str, reason: str) -> dict[str, Any]:
        ids = [version for version, _ in self.tokens]
        meta = {
            "weight_version": label,
            "weight_versions": [
                {"version": label, "start": k, "end": k + 1}
                for k, (_, label) in enumerate(self.tokens)
            ],
            "finish_reason": {"type": reason},
            "output_token_logprobs": [[-0.5, one, None] for one in ids],
        }
        return {"output_ids": ids, "meta_info": meta}


@dataclass(eq=False)
class Server:
    """A stand-in for an inference server."""

    alive: bool = True
    label: str = "0"
    weights: int = 0
    restarted: bool = False  # true until new weights come
    paused: bool = False
    running: dict[str, Generation] = field(default_factory=dict)

    def die(self) -> None:
        for generation in self.running.values():
            generation.end(None)
        self.alive, self.running = False, {}

    def token(self, rid: str) -> None:
        generation = self.running[rid]
        generation.tokens.append((self.weights, self.label))
        if len(generation.tokens) >= generation.limit:
            generation.end(self.running.pop(rid).answer(self.label, "length"))

    def abort(self, rids: list[str]) -> None:
        for rid in rids:
            if generation := self.running.pop(rid, None):
                generation.end(generation.answer(self.label, "abort"))

    def post(self, path: str, body: Any) -> dict[str, Any]:
        """Do what a control call says, as a real server does."""
        if path == "/pause_generation":
            self.paused = True
        elif path == "/continue_generation":
            self.paused = False
        elif path == "/update_weight_version":
            self.label = body["new_version"]
        elif path == "/update_weights_from_disk":
            self.weights, self.restarted = int(Path(body["model_path"]).name[1:]), False
            self.label = body.get("weight_version") or self.label
        if path == "/abort_request":
            self.abort([body["rid"]])
        elif body.get("mode") == "abort":
            self.abort([*self.running])
        return {}


class Wires:
    """Replaces the network. An event decides how each call of the trainer ends; a call of the proxy
    arrives at once."""

    def __init__(self, world: "World", of_trainer: bool) -> None:
        self.world, self.of_trainer = world, of_trainer

    async def call(self, url: str, body: Any = None, timeout: float = 0.0) -> dict[str, Any]:
        name, _, path = url.removeprefix("http://").partition("/")
        outcome = self.world.wait_for_trainer(url, body) if self.of_trainer else TRAINER[0]
        if name == "proxy":
            self.world.told = body["version"]
            self.world.proxy.set_version(body["version"])
            return {}
        server = self.world.servers[int(name)]
        if outcome == TRAINER[2] and server.alive:
            raise EngineError(f"{url} answered 500", 503)
        answer: dict[str, Any] | None = None
        if server.alive and path == "generate":
            limit = body["sampling_params"]["max_new_tokens"]
            generation = Generation(limit, self.world.loop.create_future())
            server.running[body["rid"]] = generation
            answer = await generation.answered
        elif server.alive:
            answer = server.post(f"/{path}", body)
        if path == "generate":
            self.world.asked += 1
        if outcome == TRAINER[1] or answer is None:
            raise EngineError(f"{url} cannot be reached", 503) from aiohttp.ClientError("refused")
        return answer


def run_all(calls: Iterable[Any]) -> list[Any]:
    """Make the trainer's calls one after the other. Replaces inference.servers.run_all."""
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


class World(engine.Hooks):
    """One run: a trainer, a proxy with one request, and servers. It is also the hook of the proxy's
    engine."""

    def __init__(self, bounds: UpdateBounds, modules: dict[str, ModuleType], folder: str) -> None:
        self.bounds, self.modules, self.folder, self.loop = bounds, modules, folder, StillLoop()
        self.faults = bounds.faults
        self.servers = [Server() for _ in range(bounds.servers)]
        self.pending: tuple[str, Any] | None = None  # URL and body of the trainer's next call
        self.trainer_ended = self.failed = False
        self.waits: list[asyncio.Future] = []
        self.version = 0  # the gate's version
        self.broken: Broken | None = None
        self.request: asyncio.Task | None = None
        self.kept: list[tuple[int, int]] = []  # (token, version) of the segments that are complete
        self.asked = 0  # requests for the segment that runs
        self.trainer, self.proxy = self.make_engine(True), self.make_engine(False)
        self.trainer.proxy = "http://proxy", ""
        self.told = 0  # the version that the proxy knows
        self.proxy.set_version(self.told)

    def make_engine(self, of_trainer: bool) -> Any:
        made = self.modules["engine"].RemoteInfEngine(
            [f"http://{k}" for k in range(self.bounds.servers)],
            self.bounds.pause_mode,
            request_retries=RETRIES,
            hooks=self,
            sleep=self.sleep,
        )
        made.servers.call = Wires(self, of_trainer).call
        return made

    async def sleep(self, seconds: float) -> None:
        wait = self.loop.create_future()
        self.waits.append(wait)
        try:
            await wait
        finally:
            self.waits.remove(wait)

    def fail(self, name: str, why: str) -> None:
        self.broken = self.broken or Broken(name, why)

    # ---- what is checked

    def on_new_version(self) -> None:
        self.version = self.trainer.get_version()
        for k, server in enumerate(self.servers):
            state = server.weights, server.label
            fresh = state == (self.version, str(self.version))
            if server.alive and not server.restarted and not fresh:
                self.fail("has", f"server {k} has (weights, label) {state}, not {self.version}")

    async def before_segment(self, req: ModelRequest, response: ModelResponse) -> int:
        self.asked = 0
        return req.gconfig.max_new_tokens

    def after_segment(
        self, req: ModelRequest, response: ModelResponse, error: BaseException | None
    ) -> None:
        now = [*zip(response.output_tokens, response.output_versions)]
        if now[: len(self.kept)] != self.kept:
            self.fail("lost", f"the tokens were {self.kept} and are {now}")
        self.kept = now
        if any(token != version for token, version in now):
            self.fail("label", f"(weights, version) of the tokens: {now}")
        if max(response.output_versions, default=0) > self.told:
            self.fail("label", f"version {response.output_versions[-1]} is above {self.told}")
        if response.output_versions != sorted(response.output_versions):
            self.fail("falls", f"the versions are {response.output_versions}")
        if isinstance(error, EngineError) and self.asked != RETRIES + 1:
            self.fail("lost", f"the request failed after {self.asked} requests: {error}")

    def look_at_request(self) -> None:
        if not self.request or not self.request.done() or self.request.cancelled():
            return
        if error := self.request.exception():
            if self.faults == self.bounds.faults:
                self.fail("lost", f"the request failed without a fault: {error}")
        elif len(self.kept) != self.bounds.tokens:
            self.fail("lost", f"the answer has {len(self.kept)} tokens of {self.bounds.tokens}")

    # ---- the trainer

    def run(self, path: Iterable[Event]) -> None:
        """Apply all events of the path."""
        self.path = iter(path)
        with contextlib.suppress(PathEnds):
            self.train()
            self.trainer_ended = True
            self.pending = None
            for k, server in enumerate(self.servers):
                if server.alive and server.paused:
                    self.fail("paused", f"server {k} is left paused")
            self.wait_for_trainer("", None)

    def train(self) -> None:
        """Push every version, as train.py does."""
        rollout, path = self.trainer, self.folder
        actor = SimpleNamespace(
            write_weights=lambda meta: meta.directory.mkdir(parents=True, exist_ok=True),
            update_weights=rollout.update_weights,
            set_version=lambda version: None,
        )
        run = SimpleNamespace(actor=actor, engine=rollout)
        trainer: Any = SimpleNamespace(run=run, meta=WeightUpdateMeta(path=path))
        nothing = dict.fromkeys(("pause", "resume", "destroy"), lambda: None)
        rollout.dispatcher = SimpleNamespace(**nothing, on_new_version=self.on_new_version)
        try:
            for version in range(1, self.bounds.versions + 1):
                self.wait_for_trainer("trains", None)
                self.modules["train"].PPOTrainer.push(trainer, version)
        except EngineError:
            self.failed = True
            if self.request is not None:
                self.request.cancel()  # the proxy ends with the run
                self.loop.run()
        rollout.destroy()

    def wait_for_trainer(self, url: str, body: Any) -> str:
        """Apply events until one decides how the trainer's next call ends, and return its name."""
        self.loop.run()  # the proxy reacts to the trainer's last call
        self.look_at_request()
        self.pending = None if self.trainer_ended else (url, body)
        for event in self.path:
            for k, server in enumerate(self.servers):
                claims = server.alive and server.label.isdecimal()
                if claims and int(server.label) != server.weights:
                    what = f"server {k} with weights {server.weights} says {server.label}"
                    self.fail("has", what)
            if event[0] in TRAINER:
                self.faults -= event[0] != TRAINER[0]
                return event[0]
            self.apply(event)
        raise PathEnds

    # ---- other events

    def apply(self, event: Event) -> None:
        name, *args = event
        if name == "asks":
            gconfig = GenerationHyperparameters(max_new_tokens=self.bounds.tokens)
            request = ModelRequest([7], "r", gconfig)
            self.request = self.loop.create_task(self.proxy.agenerate(request))
        elif name == "wait ends":
            self.waits[0].set_result(None)
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
                else:  # the connection breaks, and the server goes on
                    next(iter(server.running.values())).end(None)
        self.loop.run()
        self.look_at_request()

    def possible(self) -> Iterator[Event]:
        if self.pending:
            yield (TRAINER[0],)
            name = self.pending[0].split("/")[2] if "/" in self.pending[0] else ""
            if self.faults and name.isdecimal() and self.servers[int(name)].alive:
                yield (TRAINER[1],)
                if self.pending[0].endswith("disk"):
                    yield (TRAINER[2],)
        if self.request is None:
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

    # ---- the state

    def key(self) -> Hashable:
        servers = tuple(
            (
                *(s.alive, s.label, s.weights, s.restarted, s.paused),
                tuple((g.limit, *g.tokens) for g in s.running.values()),
            )
            for s in self.servers
        )
        engines = tuple(
            (one.servers.newest, one.servers.trainer_version, one._paused)
            for one in (self.trainer, self.proxy)
        )
        request = self.request and (*(self.asked, self.request.done(), len(self.waits)), *self.kept)
        spent = self.faults, self.version, self.told
        return servers, engines, str(self.pending), request, spent, self.trainer_ended, self.failed

    def text(self) -> str:
        servers = "; ".join(
            f"{k}: weights {s.weights}, label {s.label}{', paused' * s.paused}"
            if s.alive
            else f"{k}: dead"
            for k, s in enumerate(self.servers)
        )
        ended = "has failed" if self.failed else "has ended" if self.trainer_ended else ""
        trainer = ended or f"next: {self.pending}"
        return f"trainer {trainer}; servers [{servers}]; tokens {self.kept}"

    @property
    def is_goal(self) -> bool:
        return self.trainer_ended and self.request is not None and self.request.done()


@dataclass(eq=False)
class UpdateMachine(PathMachine):
    """The events come from a trainer, a proxy with a request, and servers."""

    bounds: UpdateBounds
    modules: dict[str, ModuleType] = field(
        default_factory=lambda: {"servers": inference.servers, "engine": engine, "train": train}
    )

    @cached_property
    def folder(self) -> str:
        """A folder for the weights, deleted together with the machine."""
        folder = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    def run(self, path: tuple[Event, ...]) -> State:
        servers: Any = self.modules["servers"]
        client: Any = self.modules["engine"]
        replaced = servers.run_all, servers.Servers.call, engine.logger.disabled
        world = World(self.bounds, self.modules, self.folder)
        servers.run_all, servers.Servers.call = run_all, staticmethod(Wires(world, True).call)
        client.logger.disabled = True
        try:
            world.run(path)
            possible = tuple(world.possible())
            seen, text = world.key(), world.text()
            return State(path, seen, possible, world.broken, world.is_goal, text)
        finally:
            for server in world.servers:
                server.alive = False
            world.loop.end()
            servers.run_all, servers.Servers.call, client.logger.disabled = replaced


SMALL = (UpdateBounds(tokens=1), UpdateBounds(tokens=1, pause_mode="abort"))
LARGE = (UpdateBounds(2, 2, 2, 1), UpdateBounds(2, 1, 2, 2), UpdateBounds(1, 2, 3, 2, "abort"))
FAR = (UpdateBounds(3, 4, 6, 6), UpdateBounds(3, 4, 6, 6, "abort"))
