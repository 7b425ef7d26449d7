"""TurnMachine is the state machine of a session's calls.

It runs the shipped Proxy, Turn and Session, and the conversation tree.

Clients call, hang up and retry, and the proxy notices a hang-up some time later. The engine
finishes or fails, and needs time to abort. The trainer rewards, ends and exports the session.
Tokenizer and engine are stand-ins: a token is a letter, and every generation has its own letter,
version and log-probability. A running coroutine cannot be copied. So a state is the list of the
events that lead to it, and to apply one more event, all of them are repeated in a new world
(search.py). The properties:

    once      A call and its retries become at most one exported turn; a retry of a failed call
              gets a generation of its own.
    ended     A session that has ended starts no generation.
    read      A reply that a client has read before the session's end is exported.
    mixed     A client gets the reply to its own request, and a turn the tokens of its own request.
    stopped   A generation is told to stop when nobody waits for it, or the session has ended.
    answered  Nobody waits for a generation that is over.
    tree      The unfinished turns of the tree are those that run.
    tokens    Each sampled token is trained at most once, with its own version and log-probability.
    rewards   The exported rewards are those of the recursive formula.
    deadlock  From every state, all clients can be answered and the session can be exported.
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
from calls.turn import PROGRESS_SECONDS
from inference.io_struct import EngineError, ModelRequest, ModelResponse

from .loop import StillLoop
from .search import Broken, Event, PathMachine, State

DISCOUNT = 0.5


class Letters:
    """A tokenizer whose tokens are letters."""

    chat_template, eos_token_id = "letters", 0
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

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
    """A generation of one token: the generation's letter."""

    letter: str
    body: str
    news: asyncio.Future
    state: str = "runs"  # runs, stops (it is being aborted), over


@dataclass(eq=False)
class Engine:
    """Generates when an event says so."""

    context_length: int | None = None
    generations: list[Generation] = field(default_factory=list)

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        number, loop = len(self.generations), asyncio.get_running_loop()
        letter = chr(ord("A") + number)
        body = next(chr(token) for token in reversed(request.input_ids) if chr(token) in "wxyz")
        own = Generation(letter, body, loop.create_future())
        self.generations.append(own)
        try:
            if await own.news == "fails":
                raise EngineError("the server died", 503)
            logprob = -1.0 - 100 * number
            return ModelResponse([*request.input_ids], [ord(letter)], [logprob], [number])
        except asyncio.CancelledError:
            own.state, own.news = "stops", loop.create_future()
            await own.news  # comes with the event "stopped"
            raise
        finally:
            own.state = "over"


@dataclass(eq=False)
class Client:
    """A connection. Its status is 0 until it has the answer."""

    body: str
    marked: bool  # whether a header says that this is a retry
    hangup: asyncio.Future
    gone: bool = False
    status: int = 0
    text: str = ""  # the answer's text, if it was read whole
    begun: bool = False  # whether the first byte of a stream has left
    in_time: bool = False  # whether the session was open when the answer was read


def state_of(turn: Any) -> str:
    return "failed" if turn.failed else "finished" if turn.interaction.complete else "running"


class TurnBounds(NamedTuple):
    """`bodies` are what clients may send: w and x are plain calls, y asks for a stream, and z
    continues the answer to x."""

    bodies: str = "x"
    connections: int = 3
    rewards: bool = False


class World:
    """A proxy with one session, the session's clients, and a stand-in engine."""

    def __init__(self, bounds: TurnBounds, shared: Any, module: ModuleType) -> None:
        self.bounds, self.module, self.loop = bounds, module, StillLoop()
        self.engine, self.proxy = Engine(), copy.copy(shared)
        self.proxy.engine = self.engine
        self.proxy.sessions = {}
        self.session = self.proxy.start("task")
        self.clients: list[Client] = []
        self.turns: list[Any] = []
        self.expected = 0  # generations, after the request that came last
        self.exported: dict[str, Any] | None = None
        self.refused = ""  # the error message, if the proxy has refused the export
        self.rewarded = ""  # id of the interaction that got the reward 1

    # ---- events

    def apply(self, event: Event) -> None:
        name, *args = event
        if name in ("call", "retry"):
            self.expect_generations(args[0], name == "retry")
            self.connect(args[0], name == "retry")
        elif name == "hangs up":
            self.clients[args[0]].gone = True
        elif name == "noticed":
            self.clients[args[0]].hangup.set_result(None)
        elif name == "time passes":
            self.loop.pass_time(PROGRESS_SECONDS)
        elif name in ("finishes", "fails", "stopped"):
            self.engine.generations[args[0]].news.set_result(name)
        elif name == "noticed as it finishes":  # both reach the proxy at the same time
            self.clients[args[0]].hangup.set_result(None)
            self.engine.generations[args[1]].news.set_result("finishes")
        else:
            self.manage(name)
        self.loop.run()
        self.turns += [turn for turn in self.session.turns.values() if turn not in self.turns]

    def expect_generations(self, body: str, marked: bool) -> None:
        """Compute how many generations there must be after a request. A new call adds one, and so
        does the retry of a call that failed or never arrived."""
        equal = [turn for turn in self.turns if turn.ask.messages[-1]["content"] == body]
        is_new = not marked or not equal or equal[-1].failed
        self.expected = len(self.engine.generations) + (is_new and not self.session.ended)

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

    def request(self, path: dict[str, str], raw: bytes, hangup: Any = None) -> Request:
        inbox = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> Any:
            if inbox:
                return inbox.pop()
            assert hangup is not None
            await asyncio.shield(hangup)
            return {"type": "http.disconnect"}

        scope: Any = {"type": "http", "method": "POST", "path": "/", "query_string": b""}
        scope |= {"path_params": path}
        headers = [(b"authorization", b"Bearer admin")]
        return Request(scope | {"headers": headers}, receive)

    async def converse(self, client: Client, request: Request) -> None:
        """Send a request, and read the answer unless the client has hung up."""
        pieces: list[bytes] = []

        async def send(message: Any) -> None:
            pieces.append(message.get("body", b""))
            client.begun = client.begun or bool(pieces[-1])

        try:
            response = await self.proxy.complete(PROTOCOLS["chat/completions"], request)
            await response(request.scope, request.receive, send)
            raw, status = b"".join(pieces), response.status_code
            if client.body == "y":
                frames = [line[6:] for line in raw.split(b"\n\n") if line.startswith(b"data: {")]
                sent = (one for x in frames for one in orjson.loads(x).get("choices", ()))
                text = "".join(choice["delta"].get("content", "") for choice in sent)
                status = 200 if raw.endswith(b"[DONE]\n\n") else 500
            else:
                text = orjson.loads(raw)["choices"][0]["message"]["content"]
        except (Refusal, EngineError) as error:
            status, text = error.status, ""
        client.status = status
        if not client.gone and status == 200:
            client.text, client.in_time = text, not self.session.ended

    def manage(self, name: str) -> None:
        """A request of the trainer: a reward, the end of the session, or an export."""
        if name == "reward":
            self.rewarded = self.session.cache.finished()[-1].interaction_id
            self.session.cache.set_last_reward(1.0)
        elif name == "end":
            self.proxy.end_session(self.session, {})
        else:
            wanted = {"session_id": self.session.session_id, "discount": DISCOUNT}
            try:
                rows = self.proxy.export_trajectories(wanted)
                exported = {key: row.export() for key, row in rows.items()}
                self.exported = orjson.loads(orjson.dumps(exported))
            except RuntimeError as error:
                self.refused = str(error)

    # ---- the state

    def possible(self) -> Iterable[Event]:
        if len(self.clients) < self.bounds.connections and self.exported is None:
            for body in self.bounds.bodies:
                if body != "z" or any(one.body == "x" and one.text for one in self.clients):
                    yield "call", body
                    equal = [one for one in self.clients if one.body == body]
                    if any(one.gone or one.status >= 500 for one in equal):
                        yield "retry", body
        for k, client in enumerate(self.clients):
            if not client.status and not client.gone:
                yield "hangs up", k
            elif not client.status and not client.hangup.done():
                yield "noticed", k
                for j, generation in enumerate(self.engine.generations):
                    if generation.state == "runs":
                        yield "noticed as it finishes", k, j
        waits = [c for c in self.clients if c.body == "y" and not c.status and not c.begun]
        if any(not client.hangup.done() for client in waits):
            yield ("time passes",)
        for k, generation in enumerate(self.engine.generations):
            if generation.state == "runs":
                yield "finishes", k
                yield "fails", k
            elif generation.state == "stops":
                yield "stopped", k
        may_reward = self.bounds.rewards and not self.rewarded and not self.session.ended
        if may_reward and self.session.cache.finished():
            yield ("reward",)
        if not self.session.ended:
            yield ("end",)
        elif self.exported is None:
            yield ("export",)

    def turn_of(self, interaction_id: str) -> int:
        ids = [turn.interaction.interaction_id for turn in self.turns]
        return ids.index(interaction_id) if interaction_id in ids else -1

    def key(self) -> Hashable:
        tree = tuple(
            (
                self.turn_of(name),
                interaction.complete and chr(interaction.tokens.output_tokens[0]),
                interaction.reply is not None,
                interaction.parent and self.turn_of(interaction.parent.interaction_id),
                interaction.reward,
            )
            for name, interaction in self.session.cache.items()
        )
        turns = tuple((state_of(turn), turn.listeners, turn.task.done()) for turn in self.turns)
        newest = tuple(self.turns.index(turn) for turn in self.session.turns.values())
        told = tuple((c.status and (c.gone or c.status), c.text, c.begun) for c in self.clients)
        sent = tuple((c.body, c.marked, c.gone, c.hangup.done()) for c in self.clients)
        in_time = tuple(c.in_time for c in self.clients)
        jobs = tuple((g.body, g.state) for g in self.engine.generations)
        ended = self.session.ended, self.exported is not None, len(self.proxy.sessions)
        return (sent, told, in_time), jobs, turns, newest, tree, ended, self.turn_of(self.rewarded)

    def text(self) -> str:
        words = [(c.body + " retry" * c.marked, c.status or "waits", c.text) for c in self.clients]
        turns = " ".join(f"{state_of(turn)}/{turn.listeners}" for turn in self.turns)
        jobs = " ".join(f"{g.letter}:{g.state}" for g in self.engine.generations)
        state = "open" if not self.session.ended else "ended" if not self.exported else "exported"
        return f"session {state}; clients {words}; turns [{turns}]; generations [{jobs}]"

    def check(self) -> None:
        if self.refused:
            raise Broken("rewards", self.refused)
        for k, client in enumerate(self.clients):
            letters = {g.letter for g in self.engine.generations if g.body == client.body}
            if client.text and not set(client.text) <= letters:
                raise Broken("mixed", f"client {k} asked {client.body} and read {client.text}")
        busy = {turn.task: turn for turn in self.turns if not turn.task.done()}
        known = {turn.interaction.interaction_id for turn in busy.values() if not turn.failed}
        unfinished = {name for name, one in self.session.cache.items() if not one.complete}
        if unfinished != known and self.exported is None:
            why = f"{len(unfinished)} turns are unfinished, and {len(known)} are running"
            raise Broken("tree", why)
        waiting = [c for c in self.clients if not c.status and not c.hangup.done()]
        if len(waiting) != sum(turn.listeners for turn in busy.values()):
            raise Broken("answered", f"{len(waiting)} clients wait: {self.text()}")
        if (count := len(self.engine.generations)) != self.expected and self.clients:
            if self.session.ended:
                raise Broken("ended", f"{count} generations: {self.text()}")
            raise Broken("once", f"{count} generations: {self.text()}")
        for generation in self.engine.generations:
            listeners = sum(t.listeners for t in busy.values())
            if generation.state == "runs" and (self.session.ended or not listeners):
                raise Broken("stopped", f"generation {generation.letter} runs on")
        if self.exported is not None:
            self.check_export(self.exported)

    def check_tokens(self, rows: list[dict[str, list]]) -> None:
        """Check the trained tokens of all rows of an export."""
        names = "loss_mask", "input_ids", "versions", "logprobs"
        tokens = [one for row in rows for mask, *one in zip(*map(row.get, names)) if mask]
        for token, version, logprob in tokens:
            g = self.engine.generations[version]
            if chr(token) != g.letter or -logprob - 100 * version != 1:
                why = f"token {chr(token)} has version {version} and log-probability {logprob}"
                raise Broken("tokens", why)
        if len({logprob for *_, logprob in tokens}) < len(tokens):
            raise Broken("tokens", f"a token is trained twice: {tokens}")

    def check_export(self, exported: dict[str, Any]) -> None:
        self.check_tokens([row["tensors"] for row in exported.values()])
        joined = self.session.cache.export_interactions("concat").values()
        self.check_tokens([row.to_lists() for row in joined])
        texts: dict[str, str] = {}
        for name, row in exported.items():
            tokens = zip(row["tensors"]["input_ids"], row["tensors"]["loss_mask"])
            texts[name] = "".join(chr(token) for token, trained in tokens if trained and token)
        for client in self.clients:
            if client.text and client.in_time and client.text not in texts.values():
                raise Broken("read", f"a client has read {client.text}, exported are {texts}")
        asked = {name: row["messages"][-1]["content"] for name, row in exported.items()}
        for name, text in texts.items():
            bodies = [g.body for g in self.engine.generations if g.letter == text]
            if bodies != [asked[name]]:
                raise Broken("mixed", f"the answer to {asked[name]} has the tokens {text!r}")
        for body in self.bounds.bodies:
            calls = sum(c.body == body and not c.marked for c in self.clients)
            if (count := [*asked.values()].count(body)) > calls:
                raise Broken("once", f"{calls} calls of {body} became {count} turns: {texts}")
        self.check_rewards(exported)

    def check_rewards(self, exported: dict[str, Any]) -> None:
        def final(name: str) -> float:
            below = [final(child) for child in exported if exported[child]["parent"] == name]
            return (name == self.rewarded) + DISCOUNT * (sum(below) / len(below) if below else 0.0)

        for name, row in exported.items():
            if abs(row["reward"] - final(name)) > 1e-6:
                raise Broken("rewards", f"a reward is {row['reward']}, not {final(name)}")

    @property
    def is_goal(self) -> bool:
        answered = all(client.status or client.hangup.done() for client in self.clients)
        is_gone = self.exported is not None and not self.proxy.sessions
        return answered and is_gone and all(g.state == "over" for g in self.engine.generations)


@dataclass
class TurnMachine(PathMachine):
    """Repeats a path of events in a new world."""

    bounds: TurnBounds
    module: ModuleType = proxy  # module with Proxy, or a copy with a planted error

    @cached_property
    def shared(self) -> Any:
        return self.module.Proxy(Engine(), Letters(), "admin")

    def run(self, path: tuple[Event, ...]) -> State:
        world = World(self.bounds, self.shared, self.module)
        try:
            for event in path:
                world.apply(event)
            broken = None
            try:
                world.check()
            except Broken as error:
                broken = error
            events = tuple(world.possible())
            return State(path, world.key(), events, broken, world.is_goal, world.text())
        finally:
            world.loop.end()


SMALL = (
    TurnBounds("x", connections=2),
    TurnBounds("y", connections=2),
    TurnBounds("xz", connections=2, rewards=True),
)
LARGE = (
    TurnBounds("x", connections=3),
    TurnBounds("y", connections=3),
    TurnBounds("wx", connections=3),
    TurnBounds("xz", connections=3, rewards=True),
)
FAR = (TurnBounds("xyz", connections=8, rewards=True),)
