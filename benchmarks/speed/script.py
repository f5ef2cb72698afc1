"""A scripted engine and a scripted trainer: what they answer and when, without a model. Pure: time is a number.

An engine decodes up to `seats` completions at a time, each at one token in `token_s`; the others wait in order. A
completion's length is drawn by its seed from a table, so that runs with other settings sample the same lengths. A
weight update stops decoding for `update_s`. A trainer does one call after the other, each in its own time.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from shared.types import Completion, VersionSpan

TABLE = 4096
"""lengths in the table"""


class Script(msgspec.Struct, frozen=True):
    """How scripted ranks behave."""

    trainers: int = 1
    engines: int = 1
    seats: int = 1
    """completions that one engine decodes at a time"""
    token_s: float = 0.0
    """one decode step, s; 0 answers at once"""
    mean_tokens: float = 32.0
    """of a completion"""
    sigma: float = 0.0
    """of the logarithm of the length; 0: all have mean_tokens"""
    longest: float = 5.0
    """lengths are cut at so many means"""
    accumulate_s: float = 0.0
    """forward and backward of one step"""
    step_s: float = 0.0
    """optimiser step"""
    publish_s: float = 0.0
    """write of the weights"""
    update_s: float = 0.0
    """an engine stands still for a weight update"""
    tensors: int = 272
    """tensors of the proof's checksums (SmolLM2-135M: 272)"""
    apart: bool = False
    """every completion is told in a message of its own, as where no two end in the same step of an engine"""
    replies: list[list[int]] = []
    """[texts][tokens] completions to give instead, with their own lengths; those at even places to completions with an
    even index"""


def length_table(script: Script) -> list[int]:
    """[TABLE] lengths in tokens: lognormal with the script's mean before the cut, at least 1; always the same."""
    draws = np.random.default_rng(7).lognormal(0.0, script.sigma, TABLE) if script.sigma else np.ones(TABLE)
    scale = script.mean_tokens / float(np.exp(script.sigma**2 / 2))
    most = script.longest * script.mean_tokens
    return [max(1, round(min(scale * draw, most))) for draw in draws.tolist()]


class Seat(msgspec.Struct, gc=False):
    """The part of a `Completion` that is asked for; the rest of it is not even decoded."""

    group: int
    index: int
    seed: int


class Running(NamedTuple):
    """A completion that is being decoded; times in s of the engine's decode clock."""

    end: float
    number: int
    start: float
    tokens: int
    seat: Seat


class ScriptedEngine:
    """One engine. Times given and returned are of the wall clock unless told otherwise."""

    def __init__(self, script: Script, lengths: list[int]):
        self.script, self.lengths = script, lengths
        self.version = 0
        self.waiting: deque[Seat] = deque()
        self.running: list[Running] = []
        self.changes: list[tuple[float, int]] = [(0.0, 0)]
        """(decode clock, version) of every update"""
        self.stood_s = 0.0
        """time that decoding stood still, ever"""
        self.frozen = 0.0
        """decode clock at which the last update began"""
        self.started = 0

    def clock(self, now: float) -> float:
        """The decode clock, which stands still during an update."""
        return max(now - self.stood_s, self.frozen)

    def submit(self, now: float, seats: list[Seat]) -> None:
        """More completions to decode."""
        self.waiting += seats
        self._fill(self.clock(now))

    def update(self, now: float, version: int) -> float:
        """Take new weights; returns when decoding goes on."""
        begin = self.clock(now)
        self.frozen = begin
        self.stood_s += self.script.update_s
        self.version = version
        self.changes.append((begin, version))
        return now + self.script.update_s

    def due(self) -> float | None:
        """When the next completion ends; None without any."""
        return self.running[0].end + self.stood_s if self.running else None

    def ended(self, now: float) -> Iterator[Completion]:
        """Completions that have ended by now. Each one's place is taken in the moment that it ended."""
        clock = self.clock(now)
        while self.running and self.running[0].end <= clock:
            done = heapq.heappop(self.running)
            self._fill(done.end)
            yield self._completion(done)

    def _fill(self, clock: float) -> None:
        while self.waiting and len(self.running) < self.script.seats:
            seat = self.waiting.popleft()
            tokens = self._tokens(seat)
            self.started += 1
            end = clock + tokens * self.script.token_s
            heapq.heappush(self.running, Running(end, self.started, clock, tokens, seat))

    def _reply(self, seat: Seat) -> list[int] | None:
        replies = self.script.replies
        return replies[2 * (seat.seed % (len(replies) // 2)) + seat.index % 2] if replies else None

    def _tokens(self, seat: Seat) -> int:
        reply = self._reply(seat)
        return self.lengths[seat.seed % TABLE] if reply is None else len(reply)

    def _completion(self, done: Running) -> Completion:
        seat, ids = done.seat, self._reply(done.seat) or [1] * done.tokens
        return Completion(
            seat.group, seat.index, seat.seed, ids, [-1.0] * done.tokens, self._spans(done), finish_reason="stop"
        )

    def _spans(self, done: Running) -> list[VersionSpan]:
        """Token i is sampled at start + i * token_s, with the version of the last update at or before that."""
        token_s, spans, begin = self.script.token_s, [], 0
        number = bisect.bisect_right(self.changes, (done.start, math.inf)) - 1
        while begin < done.tokens:
            version, until = self.changes[max(number, 0)][1], done.tokens
            number += 1
            if token_s and number < len(self.changes):
                until = min(math.ceil((self.changes[number][0] - done.start) / token_s), done.tokens)
            if until > begin:
                spans.append(VersionSpan(version, begin, until))
                begin = until
        return spans


class ScriptedTrainer:
    """One trainer: a queue of calls."""

    def __init__(self) -> None:
        self.free = 0.0

    def work(self, now: float, seconds: float) -> float:
        """When work of so many seconds that is asked for now will be done."""
        self.free = max(self.free, now) + seconds
        return self.free
