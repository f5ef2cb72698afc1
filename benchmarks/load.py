"""A load on a chat server: many clients at once, each streaming, with the time of every event.

Raw HTTP over asyncio, because the client shares the cores with the server that it measures: while a response arrives
only the time of each piece is noted, and its text is read when all is over.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    "Connection: close\r\nContent-Length: {size}\r\n\r\n"
)
PATIENCE_S = 300.0


@dataclass
class Answer:
    """What one request got."""

    asked_s: float
    ended_s: float = 0.0
    status: int = 0
    """0: the server dropped the connection"""
    retry_after: str = ""
    times_s: list[float] = field(default_factory=list)
    """of every event that carries text, or could have"""
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    tries: int = 1
    """for the language, where the server tells"""
    whole: bool = False
    """the stream came to its end, with a reason to finish and the usage"""

    @property
    def first_s(self) -> float:
        """Seconds from the request to its first token."""
        return self.times_s[0] - self.asked_s

    @property
    def latency_s(self) -> float:
        """Seconds from the request to the end of its response."""
        return self.ended_s - self.asked_s

    @property
    def token_s(self) -> float:
        """Seconds of one token, between the first and the last."""
        return (self.times_s[-1] - self.times_s[0]) / max(1, self.completion_tokens - 1)

    @property
    def pauses_s(self) -> list[float]:
        """Seconds between one arrival and the next; what arrives together is one."""
        return [after - before for before, after in pairwise(sorted(set(self.times_s)))]

    def read(self, arrivals: list[tuple[float, bytes]]) -> None:
        """Make sense of what arrived: (time, bytes)."""
        head, _, _ = b"".join(part for _, part in arrivals).partition(b"\r\n\r\n")
        self.status = int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/") else 0
        found = re.search(rb"(?mi)^retry-after:\s*(\S+?)\r?$", head)
        self.retry_after = found[1].decode() if found else ""
        rest, reason, done, texts = b"", "", False, list[str]()
        for moment, part in arrivals if self.status == 200 else ():
            *lines, rest = (rest + part).split(b"\n")
            for value in (line[6:].strip() for line in lines if line.startswith(b"data: ")):
                if value == b"[DONE]":
                    done = True
                    continue
                event = json.loads(value)
                if usage := event.get("usage"):
                    self.prompt_tokens, self.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                self.tries = event.get("reasoning_language", {}).get("tries", self.tries)
                for choice in event.get("choices", ()):
                    delta = choice["delta"]
                    said = delta.get("reasoning") or delta.get("content")
                    reason = choice.get("finish_reason") or reason
                    if said or ("content" in delta and "role" not in delta):
                        texts.append(said or "")
                        self.times_s.append(moment)
        self.text, self.whole = "".join(texts), done and bool(reason) and self.completion_tokens > 0


class Load(NamedTuple):
    """What came of many requests."""

    answers: list[Answer]
    wall_s: float
    client_s: float
    """processor time of this process"""

    @property
    def rate(self) -> float:
        """Tokens per second, from the first request to the last answer."""
        return sum(answer.completion_tokens for answer in self.answers if answer.whole) / self.wall_s


async def ask(port: int, body: dict[str, Any]) -> tuple[Answer, list[tuple[float, bytes]]]:
    """Send one request on a connection of its own; returns its answer, not yet read, and (time, bytes) as they came."""
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    answer, arrivals = Answer(time.perf_counter()), list[tuple[float, bytes]]()
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                answer.asked_s = time.perf_counter()
                writer.write(HEAD.format(port=port, size=len(content)).encode() + content)
                while part := await reader.read(1 << 16):
                    arrivals.append((time.perf_counter(), part))
            finally:
                writer.close()
    except (OSError, TimeoutError):
        pass  # told by the status, or by `whole`
    answer.ended_s = time.perf_counter()
    return answer, arrivals


def put(port: int, bodies: list[dict[str, Any]], clients: int) -> Load:
    """Send all bodies, `clients` at a time: as one answer ends, the next request starts. Answers in order of bodies."""

    async def play() -> tuple[dict[int, tuple[Answer, list[tuple[float, bytes]]]], float]:
        waiting, found = iter(enumerate(bodies)), {}

        async def client() -> None:
            for number, body in waiting:
                found[number] = await ask(port, body)

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
        return found, time.perf_counter() - began

    gc.collect()
    gc.disable()  # a collection in the middle would be counted as the server's
    try:
        worked = time.process_time()
        found, wall_s = asyncio.run(play())
        worked = time.process_time() - worked
    finally:
        gc.enable()
    for answer, arrivals in found.values():
        answer.read(arrivals)
    return Load([found[number][0] for number in range(len(bodies))], wall_s, worked)
