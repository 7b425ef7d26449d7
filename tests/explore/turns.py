"""TurnMachine is the state machine of the proxy's calls.

TurnMachine uses the real classes Proxy (proxy.py), Turn (calls/turn.py) and Session (calls/sessions.py), and the real
conversation tree (cache.py). TurnMachine calls the real endpoints of the proxy in a separate event loop (loop.py).
Clients connect, hang up and retry. After a client hangs up, some time passes before the proxy detects the hang-up. The
engine generates tokens, finishes or fails. The engine needs some time to abort a generation. The trainer sets a reward,
ends the session and exports the session. Only the tokenizer and the engine are stand-ins. In this state machine a token
is a letter. Each generation has its own letter, version and log-probabilities. The search (search.py) cannot copy a
running coroutine, so a state is the list of the events that lead to the state. To apply an event, the state machine
replays all earlier events and then this event. The properties:

    `once`      A call and its retries become at most one exported turn.
    `read`      If a client reads a whole reply before the session ends, the export contains the reply.
    `mixed`     Each client gets the reply to its own request. Each exported turn has the tokens of its own generation.
    `stopped`   If no client waits for a generation or the session has ended, the engine is told to stop the generation.
    `answered`  No client waits for a generation that is over.
    `tree`      The unfinished turns of the conversation tree are the running turns of the session.
    `tokens`    Each sampled token is trained at most once, with its own log-probability and version.
    `rewards`   The exported rewards are equal to rewards that are recomputed from the leaves to the roots.
    `deadlock`  From every state, all clients can get an answer, all generations can end, and the session can be
              removed.
"""

import asyncio
import copy
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple

import orjson
from starlette.requests import Request

import proxy
from calls.messages import Refusal
from calls.replies import PROTOCOLS
from inference.io_struct import ModelRequest, ModelResponse
from inference.wire import EngineError

from .loop import StillLoop
from .search import Broken, Event, PathMachine, State

ADMIN = {"authorization": "Bearer admin"}
DISCOUNT = 0.5


class Letters:
    """A tokenizer whose tokens are letters."""

    chat_template, eos_token_id = "letters", 0

    def apply_chat_template(
        self, conversation: Any, add_generation_prompt: bool = False, **_: Any
    ) -> str:
        text = "".join(f"<{message['role']}>{message['content']}\0" for message in conversation)
        return text + "<assistant>" * add_generation_prompt

    def encode(self, text: str, **_: Any) -> list[int]:
        return [*map(ord, text)]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, filter(None, ids)))


@dataclass(eq=False)
class Generation:
    """One generation of the stand-in engine. Each token of the generation is the letter `letter`."""

    letter: str
    body: str
    on_tokens: Any
    response: ModelResponse
    news: asyncio.Future
    state: str = "runs"  # "runs", "stops" (the engine aborts the generation) or "over"


@dataclass(eq=False)
class Engine:
    """A stand-in for RemoteInfEngine. The engine generates a token only when an event of the state machine requests the
    token."""

    servers: Any = None
    context_length: int | None = None
    generations: list[Generation] = field(default_factory=list)

    async def agenerate(self, request: ModelRequest, on_tokens: Any = None) -> ModelResponse:
        number, loop = len(self.generations), asyncio.get_running_loop()
        letter = chr(ord("A") + number)
        body = chr(
            next(
                token
                for token in reversed(request.input_ids)
                if chr(token).islower() and chr(token) in "wxyz"
            )
        )
        response = ModelResponse(list(request.input_ids), stop_reason="")
        own = Generation(letter, body, on_tokens, response, loop.create_future())
        self.generations.append(own)
        try:
            while not response.stop_reason:
                event = await own.news
                own.news = loop.create_future()
                if event == "fails":
                    raise EngineError("the server died", 503)
                n = response.output_len
                response.replace_from(
                    n, ModelResponse([], [ord(letter)], [-1.0 - n - 100 * number], [number], "")
                )
                response.stop_reason = "stop" if event == "finishes" else ""
                if on_tokens:
                    on_tokens(response)
            return response
        except asyncio.CancelledError:
            own.state, own.news = "stops", loop.create_future()
            await own.news  # the abort ends with the event "stopped"
            raise
        finally:
            own.state = "over"


@dataclass(eq=False)
class Client:
    """A connection of a client. `body` is the letter of the request (see TurnBounds). `status` is 0 until the client
    has the answer."""

    body: str
    marked: bool  # whether a header marks the request as a retry
    hangup: asyncio.Future
    gone: bool = False  # whether the client has hung up
    status: int = 0
    text: str = ""  # the text of the answer, if the client has read the whole answer
    in_time: bool = (
        False  # whether the session was still open when the client finished reading the answer
    )


class TurnBounds(NamedTuple):
    """The bounds within which the search explores the state machine. `bodies` are the requests that clients may send: w
    and x are plain calls, y is a call with a stream, and z continues the answer to x."""

    bodies: str = "x"
    connections: int = 3
    tokens: int = 1  # maximum number of tokens of a generation before its last token
    threads: bool = (
        False  # whether the proxy parses every request body in a thread, and not only long ones
    )
    rewards: bool = False


class World:
    """A proxy with one session, the session's clients, and a stand-in engine."""

    def __init__(self, bounds: TurnBounds, shared: Any, module: ModuleType) -> None:
        self.bounds, self.module, self.loop = bounds, module, StillLoop()
        self.engine, self.proxy = Engine(), copy.copy(shared)
        self.proxy.engine = self.engine
        self.proxy.sessions = module.SessionTable(3600.0, lambda: 0.0)
        self.session = self.proxy.start_own_session("task")
        self.clients: list[Client] = []
        self.turns: list[Any] = []
        self.exported: dict[str, Any] | None = None
        self.refused = ""  # the error message, if the proxy has refused the export
        self.rewarded = ""  # id of the interaction that got the reward 1
        module.LONG_BODY = -1 if bounds.threads else 2**15  # type: ignore[attr-defined]

    # ---- events

    def apply(self, event: Event) -> None:
        name, *args = event
        if name in ("call", "retry"):
            self.connect(args[0], name == "retry")
        elif name == "hangs up":
            self.clients[args[0]].gone = True
        elif name == "noticed":
            self.clients[args[0]].hangup.set_result(None)
        elif name == "thread":
            self.loop.run_thread()
        elif name in ("token", "finishes", "fails", "stopped"):
            self.engine.generations[args[0]].news.set_result(name)
        elif (
            name == "noticed as it finishes"
        ):  # the hang-up and the last token reach the proxy at the same time
            self.clients[args[0]].hangup.set_result(None)
            self.engine.generations[args[1]].news.set_result("finishes")
        else:
            self.manage(name)
        self.loop.run()
        for turns in self.session.turns.values():
            self.turns += [turn for turn in turns if turn not in self.turns]

    def messages(self, body: str) -> list[dict[str, str]]:
        start = [{"role": "user", "content": "x" if body == "z" else body}]
        if body != "z":
            return start
        answer = next(client.text for client in self.clients if client.body == "x" and client.text)
        return [*start, {"role": "assistant", "content": answer}, {"role": "user", "content": "z"}]

    def connect(self, body: str, marked: bool) -> None:
        client = Client(body, marked, self.loop.create_future())
        raw = orjson.dumps({"messages": self.messages(body), "stream": body == "y"})
        request = self.request({"session_id": self.session.session_id}, raw, client.hangup)
        if marked:
            request.scope["headers"].append((b"x-stainless-retry-count", b"1"))
        self.clients.append(client)
        self.loop.create_task(self.converse(client, request))

    def request(
        self, path: dict[str, str], raw: bytes, hangup: asyncio.Future | None = None
    ) -> Request:
        inbox = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> Any:
            if inbox:
                return inbox.pop()
            assert hangup is not None
            await asyncio.shield(hangup)
            return {"type": "http.disconnect"}

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/",
            "query_string": b"",
            "path_params": path,
        }
        headers = [(key.encode(), value.encode()) for key, value in ADMIN.items()]
        return Request(scope | {"headers": headers}, receive)

    async def converse(self, client: Client, request: Request) -> None:
        """Send a client's request to the proxy, and read the answer unless the client has hung up."""
        pieces: list[bytes] = []

        async def send(message: Any) -> None:
            pieces.append(message.get("body", b""))

        try:
            response = await self.proxy.complete(PROTOCOLS["chat/completions"], request)
            await response(request.scope, request.receive, send)
            raw, status = b"".join(pieces), response.status_code
            if client.body == "y":
                events = [
                    orjson.loads(line[6:])
                    for line in raw.split(b"\n\n")
                    if line.startswith(b"data: {")
                ]
                text = "".join(
                    e["choices"][0]["delta"].get("content") or ""
                    for e in events
                    if e.get("choices")
                )
                status = 200 if raw.endswith(b"[DONE]\n\n") else 500
            else:
                text = orjson.loads(raw)["choices"][0]["message"]["content"]
        except (Refusal, EngineError) as error:
            status, text = error.status or 500, ""
        client.status = status
        if not client.gone and status == 200:
            client.text, client.in_time = text, not self.session.ended

    def manage(self, name: str) -> None:
        """Send one of the trainer's requests to the proxy: a reward, the end of the session, or an export."""
        if name == "reward":
            self.rewarded = self.session.cache.finished()[-1].interaction_id
            self.proxy.reward(self.session, {"reward": 1.0})
            return
        path = {"session_id": self.session.session_id}
        if name == "end":
            self.loop.create_task(self.proxy.end_session(self.request(path, b"{}")))
            return

        async def export() -> None:
            raw = orjson.dumps({**path, "discount": DISCOUNT})
            try:
                answer = await self.proxy.export_trajectories(self.request({}, raw))
            except RuntimeError as error:
                self.refused = str(error)
                raise
            self.exported = orjson.loads(answer.body)["interactions"]

        self.loop.create_task(export())

    # ---- the state

    def possible(self) -> Iterable[Event]:
        bodies = self.bounds.bodies
        if len(self.clients) < self.bounds.connections and self.exported is None:
            for body in bodies:
                if body != "z" or any(
                    client.body == "x" and client.text for client in self.clients
                ):
                    yield "call", body
                    if any(
                        client.body == body and (client.gone or client.status >= 500)
                        for client in self.clients
                    ):
                        yield "retry", body
        for k, client in enumerate(self.clients):
            if not client.status and not client.gone:
                yield "hangs up", k
            elif not client.status and not client.hangup.done():
                yield "noticed", k
                for j, generation in enumerate(self.engine.generations):
                    if generation.state == "runs":
                        yield "noticed as it finishes", k, j
        if self.loop.threads:
            yield ("thread",)
        for k, generation in enumerate(self.engine.generations):
            if generation.state == "runs":
                if generation.response.output_len < self.bounds.tokens:
                    yield "token", k
                yield "finishes", k
                yield "fails", k
            elif generation.state == "stops":
                yield "stopped", k
        if (
            self.bounds.rewards
            and not self.rewarded
            and not self.session.ended
            and self.session.cache.finished()
        ):
            yield ("reward",)
        if not self.session.ended:
            yield ("end",)
        elif self.exported is None and not self.loop.threads:
            yield ("export",)

    def turn_of(self, interaction_id: str) -> int:
        return next((k for k, turn in enumerate(self.turns) if interaction_id in turn.ids), -1)

    def key(self) -> Hashable:
        tree = tuple(
            (
                self.turn_of(name),
                interaction.complete and chr(interaction.tokens.output_tokens[0]),
                interaction.complete and interaction.tokens.output_len,
                interaction.reply is not None,
                interaction.parent and self.turn_of(interaction.parent.interaction_id),
                interaction.children,
                interaction.reward,
            )
            for name, interaction in self.session.cache.items()
        )
        waiting = {id(turn): k for k, turn in enumerate(self.turns)}
        turns = tuple(
            (turn.state.name, turn.listeners, turn.retries, turn.task.done()) for turn in self.turns
        )
        equal = tuple(
            tuple(waiting[id(turn)] for turn in turns) for turns in self.session.turns.values()
        )
        clients = tuple(
            (
                c.body,
                c.marked,
                c.gone,
                c.hangup.done(),
                c.status and (c.gone or c.status),
                c.text,
                c.in_time,
            )
            for c in self.clients
        )
        jobs = tuple((g.body, g.state, g.response.output_len) for g in self.engine.generations)
        ended = (
            self.session.ended,
            self.exported is not None,
            len(self.proxy.sessions),
            self.turn_of(self.rewarded),
        )
        return clients, jobs, turns, equal, tree, ended, len(self.loop.threads)

    def text(self) -> str:
        clients = "; ".join(
            f"{k}: {c.body}{' retry' * c.marked}, {c.status or ('gone' if c.gone else 'waits')} {c.text}".rstrip()
            for k, c in enumerate(self.clients)
        )
        turns = " ".join(f"{turn.state.name.lower()}/{turn.listeners}" for turn in self.turns)
        jobs = " ".join(f"{g.letter}:{g.state}" for g in self.engine.generations)
        state = (
            "exported" if self.exported is not None else "ended" if self.session.ended else "open"
        )
        return f"session {state}; clients [{clients}]; turns [{turns}]; generations [{jobs}]"

    def check(self) -> None:
        if self.refused:
            raise Broken("rewards", self.refused)
        for k, client in enumerate(self.clients):
            letters = {g.letter for g in self.engine.generations if g.body == client.body}
            if client.text and not set(client.text) <= letters:
                raise Broken("mixed", f"client {k} asked {client.body} and read {client.text}")
        busy = {turn.task: turn for turn in self.turns if not turn.task.done()}
        if not self.loop.threads:
            known = {name for turn in busy.values() for name in turn.ids}
            unfinished = {name for name, one in self.session.cache.items() if not one.complete}
            if unfinished != known and self.exported is None:
                raise Broken(
                    "tree", f"{len(unfinished)} turns are unfinished, and {len(known)} are running"
                )
            waiting = [c for c in self.clients if not c.status and not c.hangup.done()]
            if len(waiting) != sum(turn.listeners for turn in busy.values() if turn.listeners):
                raise Broken("answered", f"{len(waiting)} clients wait: {self.text()}")
        for generation in self.engine.generations:
            listeners = sum(t.listeners for t in busy.values())
            if (
                generation.state == "runs"
                and (self.session.ended or not listeners)
                and not self.loop.threads
            ):
                raise Broken("stopped", f"generation {generation.letter} runs on")
        if self.exported is not None:
            self.check_export(self.exported)

    def check_tokens(self, rows: list[dict[str, list]]) -> None:
        """Check the trained tokens of all rows of an export."""
        names = "loss_mask", "input_ids", "versions", "logprobs"
        tokens = [one for row in rows for mask, *one in zip(*map(row.get, names)) if mask]
        for token, version, logprob in tokens:
            g = self.engine.generations[version]
            if chr(token) != g.letter or not 1 <= -logprob - 100 * version <= g.response.output_len:
                raise Broken(
                    "tokens",
                    f"token {chr(token)} has version {version} and log-probability {logprob}",
                )
        if len({logprob for *_, logprob in tokens}) < len(tokens):
            raise Broken("tokens", f"a token is trained twice: {tokens}")

    def check_export(self, exported: dict[str, Any]) -> None:
        self.check_tokens([row["tensors"] for row in exported.values()])
        self.check_tokens(
            [row.to_lists() for row in self.session.cache.export_interactions("concat").values()]
        )
        texts: dict[str, str] = {}
        for name, row in exported.items():
            mask, ids = row["tensors"]["loss_mask"], row["tensors"]["input_ids"]
            texts[name] = "".join(
                chr(token) for token, trained in zip(ids, mask) if trained and token
            )
        for client in self.clients:
            if client.text and client.in_time and client.text not in texts.values():
                raise Broken(
                    "read",
                    f"a client has read {client.text}, and the export has {[*texts.values()]}",
                )
        for name, text in texts.items():
            content = exported[name]["messages"][-1]["content"]
            own = [
                g
                for g in self.engine.generations
                if text and set(text) == {g.letter} and g.body == content
            ]
            if not own or len(text) > own[0].response.output_len:
                raise Broken("mixed", f"the answer to {content} has the tokens {text!r}")
        for body in self.bounds.bodies:
            count = sum(row["messages"][-1]["content"] == body for row in exported.values())
            if count > (calls := sum(c.body == body and not c.marked for c in self.clients)):
                raise Broken(
                    "once",
                    f"{calls} calls of {body} became {count} exported turns: {[*texts.values()]}",
                )
        self.check_rewards(exported)

    def check_rewards(self, exported: dict[str, Any]) -> None:
        def final(name: str) -> float:
            children = [final(other) for other in exported if exported[other]["parent"] == name]
            return (name == self.rewarded) + DISCOUNT * (
                sum(children) / len(children) if children else 0.0
            )

        for name, row in exported.items():
            if abs(row["reward"] - final(name)) > 1e-6:
                raise Broken("rewards", f"a reward is {row['reward']}, not {final(name)}")

    @property
    def is_goal(self) -> bool:
        ended = all(client.status or client.hangup.done() for client in self.clients)
        return (
            ended
            and self.exported is not None
            and not self.proxy.sessions
            and all(g.state == "over" for g in self.engine.generations)
        )


@dataclass
class TurnMachine(PathMachine):
    """The state machine of the proxy's endpoints. The events come from clients, an engine and a trainer."""

    bounds: TurnBounds
    module: ModuleType = proxy  # module with Proxy, or a copy of the module with a planted error

    @cached_property
    def shared(self) -> Any:
        return self.module.Proxy(Engine(), Letters(), "admin")

    def run(self, path: tuple[Event, ...]) -> State:
        """Replay all events of a path in a newly created world, and return the resulting state."""
        world = World(self.bounds, self.shared, self.module)
        try:
            for event in path:
                world.apply(event)
            broken = None
            try:
                world.check()
            except Broken as error:
                broken = error
            return State(
                path, world.key(), tuple(world.possible()), broken, world.is_goal, world.text()
            )
        finally:
            world.loop.end()


SMALL = (
    TurnBounds("x", connections=2, tokens=0),
    TurnBounds("y", connections=2, tokens=0),
    TurnBounds("xz", connections=2, tokens=0, rewards=True),
    TurnBounds("x", connections=2, tokens=0, threads=True),
)
LARGE = (
    TurnBounds("x", connections=3, tokens=0),
    TurnBounds("y", connections=3, tokens=0),
    TurnBounds("y", connections=2, tokens=2, threads=True),
    TurnBounds("xz", connections=3, tokens=0, rewards=True),
)
FAR = (
    TurnBounds("xyz", connections=8, tokens=3, rewards=True),
    TurnBounds("xyz", 6, 3, threads=True, rewards=True),
)
