"""The inference servers of a run: which one gets a request, and what all of them are told.

All conversations of a prompt group go to one server, which computes the shared prompt once.
`rank_servers` orders the servers for a group, the same way in every process; a request whose server
fails is repeated at the next one.

A server may have been restarted with its first weights, or may have missed an update. So every
answer is checked: its tokens may not be newer than the trainer's version (`limit`), and not older
than a token that this process already had when it sent the request, because an update changes all
servers before it lets any of them continue. After an update that failed half way the servers report
version "7-incomplete", which no engine accepts.
"""

import math
import zlib
from collections.abc import Iterable
from typing import Any

from inference.io_struct import EngineError
from inference.wire import CALL_TIMEOUT, Wire, run_all


def rank_servers(servers: list[str], key: str) -> list[str]:
    """The servers in order of preference for `key`. Group n prefers server n mod N."""
    number = int(key) if key.isdecimal() else zlib.crc32(key.encode())
    first = number % len(servers)
    ranking = sorted(servers)
    return ranking[first:] + ranking[:first]


class Servers:
    """The servers at `addresses`."""

    def __init__(self, addresses: str | Iterable[str], wire: Wire) -> None:
        addresses = [addresses] if isinstance(addresses, str) else addresses
        self.addresses = [address.rstrip("/") for address in addresses]
        self._wire = wire
        self.newest = 0  # the newest version of a token that this process has received
        self.limit = math.inf  # the trainer's version, once this process knows it

    def check_age(self, url: str, versions: list[int], sent_after: int) -> None:
        """Check the versions of a server's tokens. `sent_after` is what `newest` was when the
        request was sent. Raises EngineError (503)."""
        if wrong := [v for v in versions if not sent_after <= v <= self.limit]:
            why = f"version {wrong[0]} instead of {sent_after} to {self.limit}: was it restarted?"
            raise EngineError(f"{url} sent {why}", 503)
        self.newest = max([self.newest, *versions])

    def post_all(self, path: str, body: Any = None, timeout: float = CALL_TIMEOUT) -> list[Any]:
        """Send `body` to all servers at once, and return their answers in order.

        A list has one body a server; None is a GET. Raises EngineError with the words of every
        server that failed. The calling thread has no event loop.
        """
        bodies = body if isinstance(body, list) else [body] * len(self.addresses)
        calls = zip(self.addresses, bodies, strict=True)
        answers = run_all(self._wire.call(url + path, one, timeout) for url, one in calls)
        if failed := [answer for answer in answers if isinstance(answer, BaseException)]:
            raise EngineError("; ".join(map(str, failed)), 503) from failed[0]
        return answers
