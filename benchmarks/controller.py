"""Groups a second of one controller with 10, 100 and 1,000 scripted engines, its processor time and memory.

The whole loop of a launch (scripted.py) with engines and trainers that answer at once over real ZeroMQ, groups of 16
completions of 32 tokens: as fast as it can, beside the same messages through the bare wire, which neither keeps nor
learns anything; with the heartbeats of all ranks, whose thread is measured by itself, and once more where ranks do
nothing else and prove who they are; and with the real scorer, whose cost is also given alone. What a large batch, with
the routes of a mixture too, puts through the controller is counted in real messages. Memory is that of the controller's
process. The scripted ranks are one process: where it uses a whole core, the controller could do more. Weight updates
with proof are those of whole launches: as many trainers, engines and tensors as large models have.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import msgspec
import psutil

from benchmarks.controller_run import (
    PROMPT_TOKENS,
    Measures,
    play,
    play_in_folder,
    problems,
    scripted_ranks,
    settings,
    thread_s,
)
from benchmarks.figures import Figure, benchmark
from benchmarks.scripted import Script
from examples.quickstart.prepare import Options, make_tiny_model
from examples.quickstart.word_problems import calculate, complete, make_word_problem
from rollout.client import EngineClient
from rollout.weights.proof import Updated, WeightsHeld
from rollout.worker import EngineRank
from shared import route_files
from shared.chat import Chat
from shared.config import Config
from shared.launch.calls import CallReply, encode, request
from shared.launch.messages import Finished, GenerateRequest
from shared.types import Completion, Group, MicroBatch, Problem, Prompt, VersionSpan
from trainer.client import TrainerClient
from trainer.ledger import Ledger
from trainer.objectives.sequences import sequence_of
from trainer.stages import Stages
from trainer.step.rank import TrainerRank
from verify.scorer import RewardScorer

GROUP_SIZE, TOKENS, ASYNC_LEVEL = 16, 32, 2
LEAST_PROMPTS = 128
"""groups a step; with more engines one for each"""
TARGET = 1000.0
"""groups a second"""
KEEPER_CORES = 0.1
"""most of a core for heartbeats"""
STEPS, QUICK_STEPS = {10: 80, 100: 24, 1000: 6}, {10: 8, 100: 8, 1000: 4}
"""engines -> optimiser steps of a run"""
FLAT_GROUPS = 10_000
BATCH_COMPLETIONS, BATCH_TOKENS, BATCH_GB, HELD_BYTES = 2048, 12_000, 2.5, 60.0
"""a large batch; most that it may put through the controller, and that a token may take there"""
ROUTE_BYTES = 48 * 8
"""routes of a token of Qwen3-30B-A3B: layers x experts"""
UPDATES = {"70B, 128 trainers, 64 engines": (128, 64, 723), "24B, 64 trainers, 1,000 engines": (64, 1000, 363),
           "405B, 512 trainers, 32 engines": (512, 32, 1138)}  # fmt: skip
"""model -> its trainers, engines and tensors"""
MOST_AT_A_TIME_MS, MOST_OF_AN_UPDATE_S = 50.0, 0.5
"""for which an update may keep the controller's loop"""
ALL = 10**9


async def bare_wire(engines: int, groups: int) -> float:
    """Return the groups a second through hub and ZeroMQ alone, as many under way as the ledger has slots."""
    script = Script(engines=engines, seats=ALL, mean_tokens=TOKENS)
    async with scripted_ranks(script) as (hub, *_):
        first, prompt = 1 + script.trainers, [1] * PROMPT_TOKENS
        slots = (ASYNC_LEVEL + 1) * max(LEAST_PROMPTS, engines)

        async def start(group: int) -> None:
            completions = [Completion(group, index, seed=index) for index in range(GROUP_SIZE)]
            requests = [GenerateRequest(prompt, completion, 5 * TOKENS, 1.0) for completion in completions]
            await hub.post(first + group % engines, request(EngineRank.generate, requests))

        for group in range(slots):
            await start(group)
        began, started, ended = time.perf_counter(), 0, 0
        while ended < groups * GROUP_SIZE:
            for _, event in await hub.events.take():
                assert isinstance(event, Finished)
                ended += len(event.completions)
            while started < min(ended // GROUP_SIZE, groups):
                await start(started)
                started += 1
        return groups / (time.perf_counter() - began)


def saturated(engines: int, steps: int, repeats: int) -> Iterator[Figure]:
    """Yield rates, shares of the bare wire and of the cores, and the processor time of a group."""
    first, prompts, found, shares = min(3, steps - 2), max(LEAST_PROMPTS, engines), [], []
    for _ in range(repeats):
        wire = asyncio.run(bare_wire(engines, prompts * 4))
        script = Script(engines=engines, seats=ALL, mean_tokens=TOKENS)
        found.append(play_in_folder(script, steps, prompts, GROUP_SIZE, ASYNC_LEVEL))
        shares.append(found[-1].rate(first) / wire)
    name = f"{engines:,} engines, saturated"
    rates, cpu = [one.rate(first) for one in found], [1e3 * one.cpu_s / steps / prompts for one in found]
    yield Figure(f"{name}: groups", rates, "groups/s", better="higher", target=TARGET)
    yield Figure(f"{name}: groups beside the bare wire", shares, "", "the bare wire's", better="higher")
    yield Figure(f"{name}: controller's processor time of a group", cpu, "ms", better="lower")
    kept = [one.keeper_cpu_s / one.wall_s for one in found]
    yield Figure(f"{name}: heartbeats", kept, "cores", better="lower", target=KEEPER_CORES)
    yield Figure(f"{name}: cores used by the scripted ranks", [one.ranks_cpu_s / one.wall_s for one in found], "cores")
    if steps * prompts >= FLAT_GROUPS:
        yield flatness(found, f"{name}: memory after {steps * prompts:,} groups")


def flatness(found: list[Measures], name: str) -> Figure:
    """Return resident memory at the end of runs of 10,000 groups, beside that after the first quarter."""
    values = [one.rss_bytes[-1] / one.rss_bytes[len(one.rss_bytes) // 4] for one in found]
    return Figure(name, values, "", "that after a quarter of them", "lower", 1.02)


def make_completion(tokens: int, run_dir: Path | None = None) -> Completion:
    """A completion that ended. run_dir: with routes of Qwen3-30B-A3B, in a file there."""
    ids, logprobs = [300 + number for number in range(tokens)], [-0.1 - number for number in range(tokens)]
    completion = Completion(0, 0, 0, ids, logprobs, [VersionSpan(0, 0, tokens)], "stop")
    if run_dir is not None:
        routed = PROMPT_TOKENS + tokens - 1
        completion.routes = [route_files.write(run_dir, "0/0.0.0", bytes(routed * ROUTE_BYTES), routed)]
    return completion


def wire_bytes(completion: Completion) -> int:
    """Return the bytes of the messages in which a completion comes from its engine and goes to its trainer."""
    group = Group(Prompt(0, problems(1)[0], [300] * PROMPT_TOKENS), [completion], [None])
    share = [MicroBatch([sequence_of(group, completion, [1.0])])]
    sent = request(TrainerRank.forward_backward, share, 1.0)
    return sum(len(msgspec.msgpack.encode(message)) for message in (Finished([completion]), sent.message))


def routes(tokens: int) -> Iterator[Figure]:
    """Yield what a batch of 2,048 x 12,000 tokens puts through the controller, from one completion of so many tokens,
    and what the controller holds of each token; without routes, and with."""
    with tempfile.TemporaryDirectory() as folder:
        for name, run_dir in (("", None), (", with a mixture's routes", Path(folder))):
            short, long = (make_completion(count, run_dir) for count in (tokens, 2 * tokens))
            each = (wire_bytes(long) - wire_bytes(short)) / tokens
            batch = BATCH_COMPLETIONS * (wire_bytes(short) + each * (BATCH_TOKENS - tokens))
            text = f"in and out for a batch of {BATCH_COMPLETIONS:,} completions of {BATCH_TOKENS:,} tokens{name}"
            yield Figure(text, [batch / 1e9], "GB", better="lower", target=BATCH_GB)
            text, held = f"memory of each further token of a completion{name}", token_bytes(run_dir)
            yield Figure(text, [held], "bytes", better="lower", target=HELD_BYTES)


def group_bytes(tokens: int, groups: int = 100, run_dir: Path | None = None) -> float:
    """Return the bytes of an open group whose completions have so many tokens, as they come from the wire."""
    content = msgspec.msgpack.encode(Finished([make_completion(tokens, run_dir)]))
    sizes = {"prompts_per_step": groups, "group_size": GROUP_SIZE}
    ledger = Ledger(Stages(Config.model_validate({"rollout": sizes})))
    problem = problems(1)[0]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for index in range(groups):
            ledger.open(Prompt(index, problem, [300 + number for number in range(PROMPT_TOKENS)]), [0] * GROUP_SIZE)
            for number in range(GROUP_SIZE):
                (completion,) = msgspec.msgpack.decode(content, type=Finished).completions
                completion.group, completion.index = index, number
                ledger.receive(completion)
        return (tracemalloc.get_traced_memory()[0] - before) / groups
    finally:
        tracemalloc.stop()


def token_bytes(run_dir: Path | None = None) -> float:
    """Return what one more token in every completion adds to a group's memory, for each of them, in bytes."""
    return (group_bytes(1000, 20, run_dir) - group_bytes(500, 20, run_dir)) / (500 * GROUP_SIZE)


def stories(chat: Chat, count: int) -> tuple[list[Problem], list[list[int]]]:
    """Return problems that all have one answer, and [2 * count] responses: right at even places, wrong at odd ones."""
    rng, answer = random.Random(3), 12
    told: list[Problem] = []
    replies: list[list[int]] = []
    while len(told) < count:
        story = make_word_problem(rng, "en", (2, 3))
        thoughts, result = calculate(story, "en")
        if result != answer:
            continue
        told.append(Problem(str(len(told)), story.text, str(answer), "en"))
        for said in (answer, answer + 1):
            ids = chat.tokenizer.encode(complete(thoughts, "en", said), add_special_tokens=False)
            replies.append([*ids, chat.eos_id])
    return told, replies


async def with_scorer(steps: int, size: int) -> tuple[float, list[float]]:
    """Return (groups a second with the real scorer and 10 engines, [completions] seconds of each score alone)."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_tiny_model(model, Options(), 0)
        chat = Chat(model)
        tasks, replies = stories(chat, 64)
        script = Script(engines=10, seats=ALL, replies=replies)
        config = settings(Path(folder), script, steps, LEAST_PROMPTS, GROUP_SIZE, ASYNC_LEVEL)
        scorer = RewardScorer(Stages(config), chat)
        await scorer.start(tasks)
        try:
            seconds = []
            for number in range(size):
                completion = Completion(0, number, 0, replies[number % len(replies)], finish_reason="stop")
                began = time.perf_counter()
                await scorer.score(tasks[0], completion)
                seconds.append(time.perf_counter() - began)
            measures = await play(config, script, tasks, scorer, chat)
        finally:
            await scorer.close()
    return measures.rate(first=2), seconds


async def heartbeats(script: Script, seconds: float) -> tuple[float, float]:
    """Return the cores that the keeper's thread, and the whole process, take for the heartbeats of idle ranks."""
    own = psutil.Process()
    async with scripted_ranks(script) as (_, _, keeper):
        while len(keeper.heard) < script.world - 1:
            await asyncio.sleep(0.1)
        began, *before = time.monotonic(), thread_s(keeper), sum(own.cpu_times()[:2])
        await asyncio.sleep(seconds)
        after, wall_s = (thread_s(keeper), sum(own.cpu_times()[:2])), time.monotonic() - began
    kept, whole = ((end - start) / wall_s for start, end in zip(before, after, strict=True))
    return kept, whole


async def updates(name: str, trainers: int, engines: int, tensors: int, count: int) -> list[Figure]:
    """Return for how long updates with proof keep the controller's loop, and the bytes that they send and receive."""
    script, took = Script(trainers=trainers, engines=engines, tensors=tensors), list[float]()
    run_callback = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run_callback(handle)
        took.append(time.thread_time() - began)

    longest, whole, seconds = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        config = settings(Path(folder), script, 1, 1, 2, ASYNC_LEVEL)
        async with scripted_ranks(script) as (hub, *_):
            trainer_client = TrainerClient(hub, range(1, 1 + trainers), config)
            engine_client = EngineClient(hub, range(1 + trainers, script.world), lambda: config, print)
            for version in range(1, count + 1):
                with mock.patch.object(asyncio.Handle, "_run", timed):
                    took.clear()
                    began = time.monotonic()
                    published = await trainer_client.publish(version, [])
                    await engine_client.update(published, [], began)
                    seconds.append(time.monotonic() - began)
                longest.append(1e3 * max(took))
                whole.append(sum(took))
    held = Updated(0, 1, {}, 0, WeightsHeld(script.checksums(1)), scored_version=1)
    received = engines * len(encode(CallReply(held))) + sum(len(encode(CallReply(part))) for part in published)
    asked = request(EngineRank.update, 1, [], [part.chosen for part in published if part.columns])
    sent = engines * len(encode(asked.message)) + trainers * len(encode(request(TrainerRank.publish, 1, []).message))
    name = f"update of {name}"
    return [
        Figure(f"{name}: loop kept at a time", longest, "ms", better="lower", target=MOST_AT_A_TIME_MS),
        Figure(f"{name}: loop kept in all", whole, "s", better="lower", target=MOST_OF_AN_UPDATE_S),
        Figure(f"{name}: from the trainers' call to the proof", seconds, "s", better="lower"),
        Figure(f"{name}: sent", [sent / 1e6], "MB"), Figure(f"{name}: received", [received / 1e6], "MB"),
    ]  # fmt: skip


@benchmark()
def controller(quick: bool) -> Iterator[Figure]:
    """Measure with each number of engines, then with real scorer."""
    for engines, steps in (QUICK_STEPS if quick else STEPS).items():
        yield from saturated(engines, steps, repeats=1 if quick else 3)
    yield Figure(f"memory of an open group of {GROUP_SIZE} x {TOKENS} tokens", [group_bytes(TOKENS) / 1e3], "kB")
    yield from routes(1000)
    for name, (trainers, engines, tensors) in UPDATES.items():
        yield from asyncio.run(updates(name, trainers, engines, tensors, count=3 if quick else 10))
    found = [asyncio.run(heartbeats(Script(engines=1000, one_node=False), 10.0)) for _ in range(1 if quick else 3)]
    name = "1,000 idle engines over TCP with CURVE"
    yield Figure(f"{name}: heartbeats", [kept for kept, _ in found], "cores", better="lower", target=KEEPER_CORES)
    yield Figure(f"{name}: the whole controller", [whole for _, whole in found], "cores", better="lower")
    rate, seconds = asyncio.run(with_scorer(8 if quick else 20, 200 if quick else 1000))
    yield Figure("10 engines, saturated, real scorer: groups", [rate], "groups/s", better="higher")
    parts = [1e3 * statistics.fmean(seconds[start::5]) for start in range(5)]
    yield Figure("real scorer alone, a completion", parts, "ms", better="lower")
