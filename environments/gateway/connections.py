"""The connections to the gateway: whoever has no key of an episode under way cannot take the places of its agents.

A connection counts as a stranger's until a request shows such a key. Strangers have 10 seconds for their headers, and
their oldest connection is closed when there are too many. Each episode has a few connections of its own besides.
"""

from __future__ import annotations

import asyncio
import resource
from collections import OrderedDict
from collections.abc import Callable

from shared.http_limits import LimitedHttpProtocol

STRANGERS = 2048
"""connections at once that have shown no key; twice as many as are accepted at a time"""
EPISODE_CONNECTIONS = 16
"""connections at once of one episode, which needs one"""
REMEMBERED = 10_000
"""keys of episodes that are over"""
HEAD_BYTES = 16 << 10
"""largest size of a request line and its headers; with that, strangers' headers take at most some 200 MiB of memory"""
NO_KEY = "this is no key of an episode under way: send the api_key that the agent got"


def read_key(authorization: str) -> str:
    """Return the key of an Authorization header; "" for none."""
    kind, _, key = authorization.partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


class Connections:
    """Whose the open connections are. Of each kind the oldest is closed when there are too many."""

    def __init__(self, is_open: Callable[[str], bool]):
        """is_open: whether a key is that of an episode under way."""
        self.is_open = is_open
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.most_strangers = STRANGERS if hard == resource.RLIM_INFINITY else min(STRANGERS, hard // 2)
        self.strangers: Line = OrderedDict()
        self.episodes: dict[str, Line] = {}
        self.keys: dict[LimitedHttpProtocol, str] = {}
        """of the connections of episodes"""
        self.over: OrderedDict[str, None] = OrderedDict()
        """keys of episodes that are over, of which late requests are no stranger's"""
        self.refused = 0
        """connections of strangers that were closed, and not reported yet"""

    def add(self, connection: LimitedHttpProtocol, key: str = "") -> None:
        """Count a connection that showed this key, or none yet."""
        self.remove(connection)
        line, most = self.strangers, self.most_strangers
        if key:
            line, most = self.episodes.setdefault(key, OrderedDict()), EPISODE_CONNECTIONS
            self.keys[connection] = key
        line[connection] = None
        if len(line) > most:
            oldest, _ = line.popitem(last=False)
            self.keys.pop(oldest, None)
            oldest.transport.abort()
            self.refused += not key

    def remove(self, connection: LimitedHttpProtocol) -> None:
        """Forget a connection that is closed."""
        self.episodes.get(self.keys.pop(connection, ""), self.strangers).pop(connection, None)

    def forget(self, key: str) -> None:
        """Count the connections of an episode that is over as strangers'."""
        self.over[key] = None
        if len(self.over) > REMEMBERED:
            self.over.popitem(last=False)
        for connection in list(self.episodes.pop(key, ())):
            self.add(connection)


Line = OrderedDict[LimitedHttpProtocol, None]
"""connections of one kind, the oldest first"""


def protocol_of(connections: Connections) -> type[LimitedHttpProtocol]:
    """Return the class of connections that are counted here."""

    class CountedHttpProtocol(LimitedHttpProtocol):
        head_bytes = HEAD_BYTES
        refusal_headers = "X-Should-Retry: false\r\n"
        late = False
        """whether its request shows the key of an episode that is over"""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            connections.add(self)

        def connection_lost(self, exc: Exception | None) -> None:
            connections.remove(self)
            super().connection_lost(exc)

        def on_headers_complete(self) -> None:
            key = read_key(dict(self.headers).get(b"authorization", b"").decode("latin-1"))
            if not connections.is_open(key):  # at once: nothing else is spent on it
                self.late = key in connections.over
                self._refusal = 401, NO_KEY, "invalid_api_key"
                raise ValueError(NO_KEY)  # the parser stops, and asks for send_400_response
            connections.add(self, key)
            super().on_headers_complete()

        def _refuse(self, status: int, message: str, code: str) -> None:
            if self in connections.strangers and not self.late and not self.transport.is_closing():
                connections.refused += 1
            super()._refuse(status, message, code)

    return CountedHttpProtocol
