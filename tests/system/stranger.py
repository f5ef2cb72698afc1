"""What another user, or another host, can try against a launch: `python stranger.py TARGET`, TARGET a JSON object.

It runs without privileges, knows every address that the launch listens at (the test tells it), and prints what it got
hold of as one JSON object. Torch's own client reads the store; everything else is raw sockets and ZeroMQ.
"""

import contextlib
import datetime
import json
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import zmq

GIANT = 800 << 20
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\x00" + bytes(31)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
"""of ZMTP 3.0, without authentication"""
SAID = b'{"model": "policy", "messages": [{"role": "user", "content": "x"}], "reward": 1.0}'
PATHS = ("/", "/metrics", "/v1/models", "/api/runs", "/%61pi/runs", "/api%2fruns", "/v1/reward", "/v1/chat/completions",
         "/inference/v1/generate")  # fmt: skip
KEYS = ("hub", "pulse", "settings")
encode = msgspec.msgpack.Encoder().encode
Address = tuple[str, int]


def raw(address: Address, payload: bytes, wait_s: float = 0.2) -> socket.socket | None:
    """Connect and say something; the open connection, or None where nobody takes it."""
    try:
        line = socket.create_connection(address, timeout=5)
        line.sendall(payload)
        time.sleep(wait_s)
        return line
    except OSError:
        return None


def garbage(address: Address) -> None:
    """Bytes without sense, and beginnings of protocols that go on without sense."""
    for payload in (b"\0", b"\xff" * 4096, os.urandom(1 << 16), b"GET / HTTP/1.1\r\n\r\n", GREETING + os.urandom(4096)):
        if line := raw(address, payload):
            line.close()


def read_http(address: Address) -> list[str]:
    """Paths that are answered with what is no refusal."""
    found = []
    for path in PATHS:
        for head in (f"GET {path} HTTP/1.0\r\n", f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n",
                     f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer x\r\nConnection: close\r\n"
                     f"Content-Type: application/json\r\nContent-Length: {len(SAID)}\r\n"):  # fmt: skip
            try:
                with socket.create_connection(address, timeout=5) as line:
                    line.sendall(head.encode() + b"\r\n" + (SAID if head.startswith("POST") else b""))
                    answer = line.recv(4096)
            except TimeoutError:
                return found  # it does not speak HTTP
            except OSError:
                continue
            if answer.startswith(b"HTTP/1.1 2"):
                found.append(f"{address[1]} {head.splitlines()[0]}: {answer[-200:]!r}")
    return found


def endless(address: Address, beginning: bytes, piece: bytes, most: int, seconds: float) -> int:
    """A message without end, as fast as it is taken; returns the bytes that left."""
    sent = 0
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=5) as line:
        line.sendall(beginning)
        end = time.monotonic() + seconds
        while sent < most and time.monotonic() < end:
            line.sendall(piece)
            sent += len(piece)
    return sent


def endless_headers(address: Address) -> int:
    beginning = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    return endless(address, beginning, b"X-A: " + b"a" * 60_000 + b"\r\n", GIANT >> 4, 10.0)


def endless_frame(address: Address) -> int:
    """Of 800 MB."""
    return endless(address, GREETING + READY + b"\x02" + GIANT.to_bytes(8, "big"), bytes(1 << 20), GIANT, 20.0)


def message(endpoint: str, identity: bytes, frames: list[bytes]) -> None:
    """What a rank would send, over ZeroMQ."""
    line = zmq.Context.instance().socket(zmq.DEALER)
    line.setsockopt(zmq.IDENTITY, identity)
    line.setsockopt(zmq.LINGER, 300)
    line.connect(endpoint)
    line.send_multipart(frames)
    line.close()


def forged(endpoint: str, target: dict[str, Any], tokens: list[str]) -> None:
    """Heartbeats, registrations, completions and malformed frames in the name of ranks."""
    heartbeat = {"rank": 2, "role": "engine", "pid": target["victim"], "host": target["hostname"], "phase": "x"}
    completion = {"group": 0, "index": 0, "seed": 0, "token_ids": [1], "logprobs": [0.0], "finish_reason": "stop"}
    register = {"type": "Register", "role": "engine", "rank": 2, "pid": target["victim"], "host": target["hostname"]}
    identities = [f"2:{token}" for token in tokens] + ["2", "7", "x", f"x:{tokens[0]}" if tokens else ":"]
    failed = {"type": "RankFailed", "kind": "RunError", "message": "forged"}
    events = (register, {"type": "Finished", "completions": [completion] * 3}, failed)
    for name in identities:
        answer = bytes(7) + b"\x01" + encode({"type": "Answer", "value": None})
        for frame in (*(bytes(8) + encode(event) for event in events), answer, os.urandom(64)):
            message(endpoint, name.encode(), [frame])
    for number in range(2, 7):  # those that there are not fall silent then
        message(endpoint, f"{number}".encode(), [encode({**heartbeat, "rank": number})])
    time.sleep(0.5)
    for frames in ([b""], [b"one", b"two", b"three"], [b"\xc1" * 100]):
        message(endpoint, os.urandom(5), frames)


def read_store(address: Address, runs: list[str]) -> dict[str, str]:
    """What a client of torch finds under the names that this project has used."""
    import torch.distributed as dist

    found: dict[str, str] = {}
    limit = datetime.timedelta(seconds=3)
    try:
        store = dist.TCPStore(address[0], address[1], is_master=False, timeout=limit, wait_for_workers=False)
        store.set_timeout(limit)
        for run in runs:
            for key in KEYS:
                name = f"maestrale/{run}/0/{key}"
                if store.check([name]):
                    found[key] = store.get(name).decode()
    except (RuntimeError, ValueError):
        pass  # no store
    return found


def read_stores(addresses: list[Address], runs: list[str]) -> dict[str, str]:
    """`read_store` of all, at most 30 s: the client of torch waits without end for a listener that says nothing."""
    values: dict[str, str] = {}
    end = time.monotonic() + 30
    readers = [
        threading.Thread(target=lambda address=address: values.update(read_store(address, runs)), daemon=True)
        for address in addresses
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(max(0.0, end - time.monotonic()))
    return dict(values)


def paths(target: dict[str, Any]) -> list[str]:
    """Those of the launch's files, sockets and memory that can be opened."""
    opened = []
    for path in target["sockets"]:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
            line.settimeout(2)
            line.connect(path if path[0] != "@" else "\0" + path[1:])
            opened.append(path)
    for path in target["files"]:
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_RDONLY))
            opened.append(path)
    return opened


class Stranger:
    """All attacks on all addresses, again and again."""

    def __init__(self, target: dict[str, Any]):
        self.target = target
        self.addresses: list[Address] = [(host, port) for host, port in target["addresses"]]
        self.found: dict[str, Any] = {"uid": os.getuid(), "rounds": 0, "store": {}, "sent": 0, "connected": 0,
                                      "read": [], "opened": paths(target)}  # fmt: skip
        self.idle: list[socket.socket] = []

    def go_round(self) -> None:
        """Every attack once, on all addresses at a time; idle and half-said connections stay open meanwhile."""
        with ThreadPoolExecutor(32) as pool:
            if not self.found["rounds"]:  # torch tries for long where there is no store
                self.found["store"] |= read_stores(self.addresses, self.target["runs"])
            tokens = [part.split(" ")[1] for part in [self.found["store"].get("hub", "")] if " " in part]
            for beginning in (b"", b"\xff", GREETING[:30]):
                lines = pool.map(lambda address: [raw(address, beginning, 0.0) for _ in range(50)], self.addresses)  # noqa: B023
                self.idle += [line for some in lines for line in some if line is not None]
            self.found["connected"] = max(self.found["connected"], len(self.idle))
            list(pool.map(garbage, self.addresses))
            self.found["read"] += [line for some in pool.map(read_http, self.addresses) for line in some]
            self.found["sent"] = max([self.found["sent"], *pool.map(endless_headers, self.addresses)])
            endpoints = [f"tcp://{host}:{port}" for host, port in self.addresses]
            list(pool.map(lambda endpoint: forged(endpoint, self.target, tokens), endpoints))
            reached = [address for address in self.addresses if address[1] not in self.target["stores"]]
            self.found["sent"] = max([self.found["sent"], *pool.map(endless_frame, reached)])
        for line in self.idle:
            line.close()
        self.idle.clear()
        self.found["rounds"] += 1
        report = Path(self.target["report"])
        report.with_suffix(".new").write_text(json.dumps(self.found))
        report.with_suffix(".new").rename(report)


def main() -> None:
    """Until the test ends it."""
    stranger = Stranger(json.loads(sys.argv[1]))
    while True:
        stranger.go_round()
        time.sleep(1.0)


if __name__ == "__main__":
    main()
