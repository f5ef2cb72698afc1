"""The key-value store of a launch on several nodes: rank 0 keeps it in memory, and every rank asks it over CURVE.

A file store wants locks that hold between nodes, which many clusters' file systems lack, and reads the whole file for
each key; torch's TCPStore lets anyone on the network read and change it. Here the server's public key is the secret: it
lies in the launch's private folder, and without it no handshake with the server succeeds.
"""

from __future__ import annotations

import datetime
import itertools
import threading
import time
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch.distributed as dist
import zmq

from shared.atomic_write import write_whole

DOOR = "store"
"""file of the private folder: the server's address and its public key"""
TIMEOUT_S = 900.0
"""seconds that a rank waits for a key"""
FRAME_BYTES = 64 << 20
"""largest request; a run's settings are the longest value"""
Kind = Literal["set", "get", "check", "add", "compare", "append", "delete", "count"]
encode = msgspec.msgpack.Encoder().encode


class Request(msgspec.Struct, array_like=True):
    """What a rank asks for; an answer is (its number, the result)."""

    number: int
    kind: Kind
    keys: list[str]
    values: list[bytes] = []
    amount: int = 0


_decode = msgspec.msgpack.Decoder(Request).decode


class MeetingServer(threading.Thread):
    """Rank 0's thread that holds the values. A `get` of keys that are not all there is answered once they are."""

    def __init__(self, folder: Path, address: str):
        super().__init__(name="meeting store", daemon=True)
        self.values: dict[str, bytes] = {}
        self.waiting: list[tuple[bytes, Request]] = []
        self.socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.ROUTER)
        public, secret = zmq.curve_keypair()
        self.socket.curve_secretkey, self.socket.curve_server = secret, True
        self.socket.setsockopt(zmq.IPV6, 1)
        self.socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES)
        port = self.socket.bind_to_random_port(f"tcp://{address}")
        write_whole(folder / DOOR, f"tcp://{address}:{port} {public.decode()}")

    def run(self) -> None:
        """Answer until the process ends."""
        while True:
            identity, content = self.socket.recv_multipart()
            try:
                request = _decode(content)
            except msgspec.DecodeError:
                continue  # of no rank of this version; it is not answered, and its wait ends with a name
            if request.kind == "get":
                self.waiting.append((identity, request))
            else:
                self.answer(identity, request.number, self.do(request))
            ready = [each for each in self.waiting if self.values.keys() >= set(each[1].keys)]
            self.waiting = [each for each in self.waiting if each not in ready]
            for other, get in ready:
                self.answer(other, get.number, [self.values[key] for key in get.keys])

    def answer(self, identity: bytes, number: int, result: Any) -> None:
        """Send a result; one to a rank that is gone is lost."""
        self.socket.send_multipart([identity, encode((number, result))])

    def do(self, request: Request) -> Any:
        """Do what a request says, and return the result."""
        keys, values = request.keys, request.values
        before = self.values.get(keys[0], b"") if keys else b""
        if request.kind == "check":
            return self.values.keys() >= set(keys)
        if request.kind == "count":
            return len(self.values)
        if request.kind == "delete":
            return self.values.pop(keys[0], None) is not None
        if request.kind == "compare":
            expected, desired = values
            if before == expected or (keys[0] not in self.values and not expected):
                self.values[keys[0]] = desired
            return self.values.get(keys[0], expected)
        if request.kind == "add":
            values = [b"%d" % (int(before or b"0") + request.amount)]
        elif request.kind == "append":
            values = [before + values[0]]
        self.values.update(zip(keys, values, strict=True))
        return int(values[0]) if request.kind == "add" else None


class MeetingStore(dist.Store):
    """A rank's end, as torch's process groups want it. They hold no reference to it: keep it as long as they live.
    Its methods raise DistStoreError where an answer does not come in time."""

    def __init__(self, folder: Path):
        """Raises FileNotFoundError where no launch has a store in this folder."""
        super().__init__()
        self.endpoint, self.key = (folder / DOOR).read_text().split()
        self._numbers, self._own, self._context = itertools.count(1), threading.local(), zmq.Context()

    def _socket(self) -> zmq.Socket[bytes]:
        """This thread's connection: one that waits for a key keeps no other thread from asking."""
        socket: zmq.Socket[bytes] | None = getattr(self._own, "socket", None)
        if socket is None:
            socket = self._own.socket = self._context.socket(zmq.DEALER)
            socket.curve_serverkey = self.key.encode()
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self.endpoint)
        return socket

    def _ask(
        self, kind: Kind, keys: list[str], values: list[bytes] | None = None, amount: int = 0,
        timeout_s: float = TIMEOUT_S,
    ) -> Any:  # fmt: skip
        socket, number, end = self._socket(), next(self._numbers), time.monotonic() + timeout_s
        socket.send(encode(Request(number, kind, keys, values or [], amount)))
        while (left := end - time.monotonic()) > 0:
            if socket.poll(int(1000 * left)):
                answered, result = msgspec.msgpack.decode(socket.recv())
                if answered == number:  # not to what was given up
                    return result
        where = f"rank 0's store at {self.endpoint} ({kind} {', '.join(keys[:3])})"
        raise dist.DistStoreError(f"no answer within {timeout_s:g} s from {where}")

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._ask("set", [key], [value.encode() if isinstance(value, str) else bytes(value)])

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        return bytes(self._ask("get", [key])[0])

    def wait(self, keys: list[str], timeout: datetime.timedelta = datetime.timedelta(seconds=TIMEOUT_S)) -> None:
        """Wait for values."""
        self._ask("get", keys, timeout_s=timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        """Return whether all are there."""
        return bool(self._ask("check", keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first; return the sum."""
        return int(self._ask("add", [key], amount=amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write where the value is the expected one, or "" is expected and none is there; return what is there then."""
        values = [each.encode() if isinstance(each, str) else bytes(each) for each in (expected, desired)]
        return bytes(self._ask("compare", [key], values))

    def append(self, key: str, value: str | bytes) -> None:
        """Write behind a value."""
        self._ask("append", [key], [value.encode() if isinstance(value, str) else bytes(value)])

    def delete_key(self, key: str) -> bool:
        """Remove a value; return whether it was there."""
        return bool(self._ask("delete", [key]))

    def has_extended_api(self) -> bool:
        """Whether it has `append`, `multi_get` and `multi_set`."""
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for values."""
        return list(self._ask("get", keys))

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        """Write values."""
        self._ask("set", keys, [value.encode() if isinstance(value, str) else bytes(value) for value in values])

    def num_keys(self) -> int:
        """Return how many values there are."""
        return int(self._ask("count", []))
