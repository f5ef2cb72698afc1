"""Sockets of the controller, which admit only ranks of the launch, limit the size of frames and count refusals.

On one node they are Unix sockets in the launch's private folder, which no other user can reach. On several nodes they
are TCP with CURVE: the keys lie in the private folder inside the run's folder, so only ranks of the launch have them,
and a rank verifies the controller before it sends anything. A stranger's connection is refused and counted. No frame is
larger than FRAME_BYTES, and larger messages are sent in pieces, so that a stranger cannot fill the memory either.
"""

from __future__ import annotations

import resource
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from shared.errors import MORE_FILES, ConfigError
from shared.launch.ranks import Role

FRAME_BYTES = 1 << 20
MESSAGE_BYTES = 1 << 30
HANDSHAKE_S = 10
"""a connection that has not shown its key by then is closed"""
SETTLED_S = 0.3
"""seconds between two checks of the connections; the ranks' have shown their keys by the second"""
WAITING_MESSAGES = 10_000
"""messages of one rank that wait here before its own queue grows instead of the controller's"""
BACKLOG = 4096
OPEN_FILES, LEAST_FILES = 65_536, 512
"""open files of a controller: an agent takes three pipes, a rank a connection, a stranger one until it is refused; and
those without which no launch starts: an engine has 120"""
SEALED_BYTES = 256
"""most bytes that encryption adds to a frame"""
SUCCEEDED = zmq.EVENT_HANDSHAKE_SUCCEEDED

AnySocket = TypeVar("AnySocket", bound="zmq.Socket[bytes]")


class Monitor:
    """Counts connections that ended before they had shown the key."""

    def __init__(self, socket: zmq.Socket[bytes], name: str):
        self.watched, self.counts, self.reported = socket, Counter[int](), 0
        self.looked, self.unproved = 0.0, 0
        line = f"inproc://connections of {name} {secrets.token_hex(8)}"  # a closed one's name is freed late
        socket.monitor(line, zmq.EVENT_ACCEPTED | SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self.socket.setsockopt(zmq.RCVHWM, 0)  # else a full line would stop the watched socket itself
        self.socket.connect(line)

    def failures(self) -> int:
        """Return how many such connections are new since the last call."""
        while self.socket.poll(0):
            self.counts[recv_monitor_message(self.socket)["event"]] += 1
        now, before = time.monotonic(), self.unproved
        if now - self.looked < SETTLED_S:
            return 0
        self.looked, self.unproved = now, self.counts[zmq.EVENT_ACCEPTED] - self.counts[SUCCEEDED]
        # ZeroMQ does not tell which succeeded: one that is just showing its key is not counted while another one leaves
        new = max(min(self.unproved, before, self.counts[zmq.EVENT_DISCONNECTED]) - self.reported, 0)
        self.reported += new
        return new

    def close(self) -> None:
        """Stop counting and close the sockets."""
        self.watched.disable_monitor()
        self.socket.close(linger=0)


class Refusals:
    """Counts the messages and connections that this process has refused since the launch."""

    def __init__(self) -> None:
        self.total = 0
        self.last = ""
        self.warned = False
        self.monitors: list[Monitor] = []

    def add(self, why: str, count: int = 1) -> None:
        """Count refusals. why: what was refused."""
        self.total += count
        self.last = why

    def look(self) -> str:
        """Count the connections that failed since the last call. Returns a warning at the first refusal, else ""."""
        for monitor in self.monitors:
            for _ in range(monitor.failures()):
                self.add("a connection without the launch's key")
        if not self.total or self.warned:
            return ""
        self.warned = True
        return (
            f"refused: {self.last}. Somebody who does not belong to this launch may be trying its ports; it has no "
            "effect on the run and is counted as messages/refused"
        )


refused = Refusals()
_authenticator: ThreadAuthenticator | None = None


class _OneKey:
    """Tells the authenticator whether a key is the one that the ranks of the launch have."""

    def __init__(self, key: bytes):
        self.key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return secrets.compare_digest(key, self.key)


def raise_open_files() -> None:
    """Raise the limit of open files, also for the processes that this one starts. Raises ConfigError where that cannot
    be enough for a launch."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
    if limit < LEAST_FILES:
        raise ConfigError(f"processes may have {hard:,} open files, and a launch needs {LEAST_FILES}: {MORE_FILES}")


class ListeningSocket:
    """A socket of the controller that only ranks of the launch can use, who find it in the store as `name`."""

    def __init__(self, role: Role, name: str, address: str):
        """address: the address to bind if the launch has several nodes."""
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self.monitor: Monitor | None = None
        limit = FRAME_BYTES + SEALED_BYTES
        self.socket.setsockopt(zmq.IPV6, 1)
        for option, value in ((zmq.MAXMSGSIZE, limit), (zmq.BACKLOG, BACKLOG), (zmq.RCVHWM, WAITING_MESSAGES)):
            self.socket.setsockopt(option, value)
        raise_open_files()
        if role.one_node:
            endpoint = f"ipc://{role.folder / name}"
            self.socket.bind(endpoint)
            role.store.set(name, endpoint)
            return
        key, own = zmq.curve_keypair(), zmq.curve_keypair()
        self._admit_only(key[0], own[1], name)
        port: int = self.socket.bind_to_random_port(f"tcp://{address}")
        entry = (b"tcp://%s:%d" % (address.encode(), port), own[0], *key)
        role.store.set(name, b" ".join(entry).decode())

    def _admit_only(self, key: bytes, own_secret: bytes, name: str) -> None:
        global _authenticator
        if _authenticator is None:
            _authenticator = ThreadAuthenticator(zmq.Context.instance())
            _authenticator.start()
        _authenticator.configure_curve_callback(domain=name, credentials_provider=_OneKey(key))
        self.socket.zap_domain = name.encode()
        self.socket.curve_secretkey = own_secret
        self.socket.curve_server = True
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, 1000 * HANDSHAKE_S)
        self.monitor = Monitor(self.socket, name)
        refused.monitors.append(self.monitor)

    def close(self) -> None:
        """Free the sockets."""
        if self.monitor is not None:
            refused.look()
            refused.monitors.remove(self.monitor)
            self.monitor.close()
        self.socket.close()


def connect(socket: AnySocket, role: Role, name: str) -> AnySocket:
    """Connect a rank's socket to the door `name`. Its identity begins with the rank, and is new for every process."""
    endpoint, *keys = role.store.get(name).split(b" ")
    socket.setsockopt(zmq.IDENTITY, b"%d:%s" % (role.rank, secrets.token_hex(8).encode()))
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES + SEALED_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
    if keys:
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = keys
    socket.connect(endpoint.decode())
    return socket


def rank_of(identity: bytes, world: int) -> int | None:
    """Return the worker rank that an identity names; None if there is no such rank."""
    text = identity.partition(b":")[0]
    return int(text) if text.isdigit() and len(text) < 8 and 0 < int(text) < world else None


def pieces(message: bytes) -> Sequence[bytes]:
    """Cut a message into frames of at most FRAME_BYTES."""
    if len(message) <= FRAME_BYTES:
        return (message,)
    return [message[start : start + FRAME_BYTES] for start in range(0, len(message), FRAME_BYTES)]
