"""Scripted engines and trainers of a launch, all in one process: real messages over real ZeroMQ, no model.

    python -m benchmarks.scripted PORT FOLDER < script.json        the process; controller_run.py starts it

An engine decodes `seats` completions at a time, each at one token in `token_s`; the others wait in order. The length of
a completion is drawn by its seed from a table, so that runs with other settings sample the same lengths. Where decoding
takes no time, what was asked for in one message ends in one message.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import zmq
import zmq.asyncio

from rollout.weights.proof import PublishedWeights, Updated, WeightsHeld
from shared.launch.calls import CallReply, call
from shared.launch.messages import Finished, GenerateRequest
from shared.launch.ranks import Kind, Role, kind_of
from shared.launch.rpc import EngineLink, TrainerLink
from shared.launch.sockets import connect
from shared.launch.watchdog import Peer, die_with_parent
from shared.record_file import Written
from shared.types import Completion, VersionSpan
from trainer.step.forward_backward import StepSums
from trainer.step.rank import Stepped

HOST = "127.0.0.1"
TABLE = 4096
"""lengths in the table"""
PROBE_LOGPROB = -1.0
"""of every token of the probe, from both sides"""
SUMS = ("loss", "tokens", "compared", "ratio", "abs_logprob_difference", "kl_k3", "clipped_low", "clipped_high",
        "masked", "entropy")  # fmt: skip
MAXIMA = ("ratio", "abs_logprob_difference")


class Script(msgspec.Struct, frozen=True):
    """How scripted ranks behave."""

    trainers: int = 1
    engines: int = 1
    one_node: bool = True
    """messages go over Unix sockets in a private folder; else over TCP, encrypted and authenticated (CURVE)"""
    node_ranks: int = 8
    """ranks of a node, as far as heartbeats tell"""
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
    """an engine's answer to a weight update; it goes on decoding"""
    tensors: int = 272
    """tensors of the proof's checksums (SmolLM2-135M: 272)"""
    replies: list[list[int]] = []
    """[texts][tokens] completions to give instead, with their own lengths; those at even places to completions with an
    even index"""

    @property
    def world(self) -> int:
        """Ranks, the controller included."""
        return 1 + self.trainers + self.engines

    def checksums(self, version: int) -> dict[str, int]:
        """Return checksums that change with every version."""
        return {f"model.layers.{number}.self_attn.q_proj.weight": number + version for number in range(self.tensors)}


def length_table(script: Script) -> list[int]:
    """Draw [TABLE] lengths in tokens: lognormal with the script's mean before the cut, at least 1; always the same."""
    draws = np.random.default_rng(7).lognormal(0.0, script.sigma, TABLE) if script.sigma else np.ones(TABLE)
    scale = script.mean_tokens / float(np.exp(script.sigma**2 / 2))
    most = script.longest * script.mean_tokens
    return [max(1, round(min(scale * draw, most))) for draw in draws.tolist()]


def spans(updates: Sequence[tuple[float, int]], start: float, tokens: int, token_s: float) -> list[VersionSpan]:
    """Return the versions of a completion's tokens: token i is sampled at start + i * token_s, with the version of the
    last of the updates, (time, version) in order, at or before that."""
    found, begin = [], 0
    for number, (_, version) in enumerate(updates):
        until = tokens
        if number + 1 < len(updates):
            after = updates[number + 1][0] - start
            until = min(math.ceil(after / token_s), tokens) if token_s else tokens * (after > 0)
        if until > begin:
            found.append(VersionSpan(version, begin, until))
            begin = until
    return found


def scores(sequences: list[list[int]]) -> list[list[float]]:
    """Return [sequences][tokens - 1] log-probs, the same from trainers and engines."""
    return [[PROBE_LOGPROB] * (len(ids) - 1) for ids in sequences]


class ScriptedEngine:
    """One engine rank: the calls of rollout/worker.py, with the parameters that a script needs."""

    def __init__(self, script: Script, lengths: list[int], link: Any):
        self.script, self.lengths, self.link = script, lengths, link
        self.seats = asyncio.Semaphore(script.seats)
        self.updates: list[tuple[float, int]] = [(-math.inf, 0)]
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Answer the controller until it says stop."""
        await self.link.register()
        async for call_id, request in self.link.calls(ScriptedEngine):
            answer = await request.run(self)
            if call_id:
                await self.link.send(call_id, CallReply(answer))

    @call("weight update", deadline="sync")
    async def update(
        self, version: int, probe: list[list[int]] | None = None, chosen: list[dict[str, list[int]]] | None = None
    ) -> Updated:
        """Hold other weights from now on."""
        seconds = self.script.update_s
        await asyncio.sleep(seconds)
        self.updates.append((time.monotonic(), version))
        return Updated(0, version, {"total": seconds}, 0, WeightsHeld(self.script.checksums(version)), seconds,
                       scored_version=version, probe=scores(probe or []))  # fmt: skip

    @call("snapshot", deadline="step")
    async def snapshot(self) -> dict[str, Written]:
        """Write nothing: no checkpoint of a run against scripted ranks is taken up again."""
        return {}

    @call("stop", deadline=30, last=True)
    async def stop(self) -> None:
        """End."""

    @call("start of completions", deadline="step")
    async def generate(self, requests: list[GenerateRequest]) -> None:
        """End completions at once, or begin to decode them."""
        if not self.script.token_s:
            now = time.monotonic()
            await self.link.send(0, Finished([self.finished(request.completion, now) for request in requests]))
            return
        for request in requests:
            task = asyncio.create_task(self.decode(request.completion))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def decode(self, completion: Completion) -> None:
        """Wait for a place, then for the tokens."""
        async with self.seats:
            start = time.monotonic()
            await asyncio.sleep(len(self.tokens(completion)) * self.script.token_s)
        await self.link.send(0, Finished([self.finished(completion, start)]))

    def tokens(self, completion: Completion) -> list[int]:
        """Return what a completion will say."""
        if replies := self.script.replies:
            return replies[2 * (completion.seed % (len(replies) // 2)) + completion.index % 2]
        return [1] * self.lengths[completion.seed % TABLE]

    def finished(self, completion: Completion, start: float) -> Completion:
        """Return the whole completion, which began at `start`."""
        ids = self.tokens(completion)
        given = self.updates if self.script.token_s else self.updates[-1:]
        return msgspec.structs.replace(
            completion, token_ids=ids, logprobs=[-1.0] * len(ids), finish_reason="stop",
            spans=spans(given, start, len(ids), self.script.token_s),
        )  # fmt: skip


class ScriptedTrainer:
    """One trainer rank: the calls of trainer/step/rank.py, with the parameters that a script needs."""

    def __init__(self, script: Script, first: bool):
        """first: has the checksums and scores the probe."""
        self.script, self.first = script, first

    @call("forward and backward", deadline="step")
    def forward_backward(self) -> StepSums:
        """Take the time of the script."""
        time.sleep(self.script.accumulate_s)
        return StepSums(dict.fromkeys(SUMS, 1.0), dict.fromkeys(MAXIMA, 1.0), self.script.accumulate_s, 1)

    @call("optimiser step", deadline="step")
    def step(self) -> Stepped:
        """Take the time of the script."""
        time.sleep(self.script.step_s)
        return Stepped(1.0, self.script.step_s)

    @call("weights to staging", deadline="sync")
    def publish(self, version: int, probe: list[list[int]]) -> PublishedWeights:
        """Take the time of the script."""
        sums, seconds = self.script.checksums(version), self.script.publish_s
        time.sleep(seconds)
        if not self.first:
            return PublishedWeights(version, 0, seconds)
        return PublishedWeights(version, 0, seconds, sums, probe=scores(probe))

    @call("checkpoint of the trainers", deadline="step")
    def save(self) -> dict[str, int]:
        """Begin nothing."""
        return {}

    @call("writing of the checkpoint", deadline="step")
    def saved(self) -> dict[str, Written]:
        """Have written nothing."""
        return {}

    @call("stop of the trainers", deadline=60, last=True)
    def stop(self) -> None:
        """End."""


def role_of(script: Script, rank: int, store: dist.Store, folder: Path, device: Any = "cpu") -> Role:
    """Return the role of a rank of a launch on this machine."""
    kind: Kind = kind_of(rank, script.trainers)
    number = rank - {"controller": 0, "trainer": 1, "engine": 1 + script.trainers}[kind]
    device = torch.device(device)
    return Role(kind, rank, script.world, number, script.one_node, HOST, device, store, folder=folder)


def beat(script: Script, store: dist.Store, folder: Path) -> None:
    """Send the heartbeat of every rank once a second, evenly, from one thread and as many sockets; read the answers.

    What is spared of a real rank's pulse is the look at its own processes, which costs the controller nothing.
    """
    encode, lines = msgspec.msgpack.Encoder().encode, []
    for rank in range(1, script.world):
        role = role_of(script, rank, store, folder)
        line = connect(zmq.Context.instance().socket(zmq.DEALER), role, "pulse")
        peer = Peer(rank, role.kind, os.getpid(), f"node {rank // script.node_ranks}", "sampling", 1 << 30, 1 << 34)
        lines.append((line, encode(peer)))
    began = time.monotonic()
    for number in itertools.count():
        line, pulse = lines[number % len(lines)]
        while line.poll(0):
            line.recv()
        line.send(pulse)
        if number % 16 == 0:
            time.sleep(max(0.0, began + number / len(lines) - time.monotonic()))


async def be_ranks(script: Script, store: dist.Store, folder: Path) -> None:
    """Play all ranks but the controller until each was told to stop."""
    for context in (zmq.asyncio.Context.instance(), zmq.Context.instance()):
        context.set(zmq.MAX_SOCKETS, 2 * script.world + 64)  # calls and heartbeats
    threading.Thread(target=beat, args=(script, store, folder), daemon=True).start()
    lengths = length_table(script)
    for rank in range(1, 1 + script.trainers):
        link = TrainerLink(role_of(script, rank, store, folder))
        threading.Thread(target=link.serve, args=(ScriptedTrainer(script, first=rank == 1),)).start()
    roles = [role_of(script, rank, store, folder) for rank in range(1 + script.trainers, script.world)]
    async with asyncio.TaskGroup() as group:
        for role in roles:
            group.create_task(ScriptedEngine(script, lengths, EngineLink(role)).serve())


if __name__ == "__main__":
    die_with_parent()
    shared = dist.TCPStore(HOST, int(sys.argv[1]), is_master=False)
    asyncio.run(be_ranks(msgspec.json.decode(sys.stdin.buffer.read(), type=Script), shared, Path(sys.argv[2])))
