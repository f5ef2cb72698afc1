"""Scripted engines and trainers of a launch, all in one process: real messages over real ZeroMQ, no model.

    python -m benchmarks.speed.ranks PARENT < settings.json

Every rank has its own connection and identity, as in a launch. Of what the controller sends only what a script needs is
decoded, and answers are encoded once where they are alike, so that this process is faster than the controller that is
measured. No asyncio for the same reason. Ends when every rank was told to stop.
"""

from __future__ import annotations

import heapq
import math
import os
import socket
import sys
import time
from typing import Any

import msgspec
import zmq

from benchmarks.speed.script import Script, ScriptedEngine, ScriptedTrainer, Seat, length_table
from rollout.weights.proof import PublishedWeights, Updated
from shared.calls import CallReply, encode
from shared.messages import Finished, Register
from shared.rpc import CALL_ID_BYTES
from shared.sockets import pieces
from trainer.forward_backward import StepSums
from trainer.rank import Stepped
from verify.code.sandbox.syscalls import die_with_parent

PROBE_LOGPROB = -1.0
"""of every token of the probe, from both sides"""


class Settings(msgspec.Struct):
    """What the process is told."""

    address: str
    script: Script


# ---- the calls of the controller, with the parameters that a script needs -----------------------------------------


class Request(msgspec.Struct):
    completion: Seat


class Generate(msgspec.Struct, tag="generate"):
    requests: list[Request]


class Update(msgspec.Struct, tag="update"):
    version: int
    probe: list[list[int]] | None = None


class Snapshot(msgspec.Struct, tag="snapshot"): ...


class ForwardBackward(msgspec.Struct, tag="forward_backward"): ...


class OptimiserStep(msgspec.Struct, tag="step"): ...


class Publish(msgspec.Struct, tag="publish"):
    version: int
    probe: list[list[int]] = []


class Save(msgspec.Struct, tag="save"): ...


class Stop(msgspec.Struct, tag="stop"): ...


Asked = Generate | Update | Snapshot | ForwardBackward | OptimiserStep | Publish | Save | Stop
decode = msgspec.msgpack.Decoder(Asked).decode
SUMS = ("loss", "tokens", "ratio", "abs_logprob_difference", "kl_k3", "clipped_low", "clipped_high", "masked",
        "entropy")  # fmt: skip
MAXIMA = ("ratio", "abs_logprob_difference")


def probe(sequences: list[list[int]]) -> list[list[float]]:
    """[sequences][tokens - 1] the same from trainers and engines."""
    return [[PROBE_LOGPROB] * (len(ids) - 1) for ids in sequences]


class Ranks:
    """All ranks of the process, by rank number."""

    def __init__(self, settings: Settings):
        script = self.script = settings.script
        world = 1 + script.trainers + script.engines
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, world + 16)
        self.poller = zmq.Poller()
        self.sockets: dict[int, zmq.Socket[bytes]] = {}
        lengths = length_table(script)
        self.trainers = {rank: ScriptedTrainer() for rank in range(1, 1 + script.trainers)}
        self.engines = {rank: ScriptedEngine(script, lengths) for rank in range(1 + script.trainers, world)}
        self.rank_of: dict[zmq.Socket[bytes], int] = {}
        self.later: list[tuple[float, int, int, bytes, bytes]] = []
        """(when, number, rank, call id, message) to send, a heap"""
        self.numbered = 0
        self.due: dict[int, float] = {}
        """engine rank -> when its next completion ends"""
        parts = {f"model.layers.{number}.weight": number for number in range(script.tensors)}
        self.checksums = [parts, dict.fromkeys(parts, 0)]
        """of the first trainer, which stands for all, and of the others"""
        self.updated: tuple[int, bytes] = (-1, b"")
        for rank in (*self.trainers, *self.engines):
            self._connect(rank, settings)

    def _connect(self, rank: int, settings: Settings) -> None:
        line: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        line.setsockopt(zmq.IDENTITY, f"{rank}:scripted".encode())
        line.setsockopt(zmq.LINGER, 2000)
        line.setsockopt(zmq.SNDHWM, 0)
        line.setsockopt(zmq.RCVHWM, 0)
        line.connect(settings.address)
        self.sockets[rank], self.rank_of[line] = line, rank
        self.poller.register(line, zmq.POLLIN)
        role = "trainer" if rank in self.trainers else "engine"
        self._send(rank, bytes(CALL_ID_BYTES), encode(Register(role, rank, os.getpid(), socket.gethostname())))

    def _send(self, rank: int, call_id: bytes, message: bytes) -> None:
        self.sockets[rank].send_multipart(pieces(call_id + message))

    def _send_at(self, when: float, rank: int, call_id: bytes, message: bytes) -> None:
        self.numbered += 1
        heapq.heappush(self.later, (when, self.numbered, rank, call_id, message))

    def serve(self) -> None:
        """Until every rank was told to stop."""
        while self.sockets:
            next_s = min(min(self.due.values(), default=math.inf), self.later[0][0] if self.later else math.inf)
            wait_s = max(next_s - time.monotonic(), 0.0)
            for line, _ in self.poller.poll(None if wait_s == math.inf else math.ceil(wait_s * 1000)):
                self._receive(self.rank_of[line], line)
            now = time.monotonic()
            for rank in [rank for rank, when in self.due.items() if when <= now]:
                self._report(rank, now)
            while self.later and self.later[0][0] <= now:
                _, _, rank, call_id, message = heapq.heappop(self.later)
                self._send(rank, call_id, message)
        self.context.destroy(linger=2000)

    def _receive(self, rank: int, line: zmq.Socket[bytes]) -> None:
        while rank in self.sockets:
            try:
                frame = b"".join(line.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            call_id, content = frame[:CALL_ID_BYTES], frame[CALL_ID_BYTES:]
            message, now = decode(content), time.monotonic()
            if isinstance(message, Stop):
                self._send(rank, call_id, encode(CallReply(None)))
                self.poller.unregister(line)
                del self.sockets[rank]
                self.due.pop(rank, None)
            elif rank in self.engines:
                self._engine(rank, call_id, message, now)
            else:
                self._trainer(rank, call_id, message, now)

    def _engine(self, rank: int, call_id: bytes, message: Asked, now: float) -> None:
        engine = self.engines[rank]
        match message:
            case Generate(requests=requests):
                engine.submit(now, [request.completion for request in requests])
                self._report(rank, now)
            case Update(version=version, probe=sequences):
                self._send_at(engine.update(now, version), rank, call_id, self._held(version, sequences or []))
                self._report(rank, now)
            case Snapshot():
                self._send(rank, call_id, encode(CallReply([])))
            case _:
                raise ValueError(f"a scripted engine has no answer to {type(message).__name__}")

    def _held(self, version: int, sequences: list[list[int]]) -> bytes:
        """The answer of every engine that took these weights, encoded once."""
        if self.updated[0] != version:
            seconds = {"total": self.script.update_s}
            message = Updated(0, version, seconds, 0, self._sums(0, version), self.script.update_s,
                              scored_version=version, probe=probe(sequences))  # fmt: skip
            self.updated = version, encode(CallReply(message))
        return self.updated[1]

    def _sums(self, part: int, version: int) -> dict[str, int]:
        """Checksums that change with every version; those of the trainers after the first are zero."""
        return {name: value + version for name, value in self.checksums[0].items()} if not part else self.checksums[1]

    def _report(self, rank: int, now: float) -> None:
        """Send what has ended on an engine."""
        engine = self.engines[rank]
        ended = list(engine.ended(now))
        size = 1 if self.script.apart else max(len(ended), 1)
        for first in range(0, len(ended), size):
            self._send(rank, bytes(8), encode(Finished(ended[first : first + size])))
        if (due := engine.due()) is None:
            self.due.pop(rank, None)
        else:
            self.due[rank] = due

    def _trainer(self, rank: int, call_id: bytes, message: Asked, now: float) -> None:
        script, work = self.script, self.trainers[rank].work
        seconds, answer = 0.0, CallReply[Any](None)
        match message:
            case ForwardBackward():
                seconds = script.accumulate_s
                answer = CallReply(StepSums(dict.fromkeys(SUMS, 1.0), dict.fromkeys(MAXIMA, 1.0), seconds, 1))
            case OptimiserStep():
                seconds, answer = script.step_s, CallReply(Stepped(1.0, script.step_s))
            case Publish(version=version, probe=sequences):
                seconds, part = script.publish_s, int(rank > 1)
                scored = [] if part else probe(sequences)
                answer = CallReply(PublishedWeights(version, 0, seconds, self._sums(part, version), scored))
            case Save():
                answer = CallReply({})
            case _:
                raise ValueError(f"a scripted trainer has no answer to {type(message).__name__}")
        self._send_at(work(now, seconds), rank, call_id, encode(answer))


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    Ranks(msgspec.json.decode(sys.stdin.buffer.read(), type=Settings)).serve()
