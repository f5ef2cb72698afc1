"""How many groups a second one controller keeps going, with 10, 100 and 1,000 scripted engines; its processor time and
memory for each.

    python -m benchmarks.speed controller
    python -m benchmarks.speed.controller --engines 100 --profile     where the time goes (cProfile)

The whole loop of a launch (scene.py) with engines and trainers that answer at once over real ZeroMQ, groups of 16
completions of 32 tokens. Looks: as fast as it can (`saturated`: what was asked for in one message ends at once, and an
engine tells in one message what ended together, as a real one does), beside the same messages through the bare wire,
which neither keeps nor learns anything; the same with a message for every completion (`apart`); engines that give one
group a second each (`offered`): up to where they find a controller that keeps up; and as fast as it can with the real
scorer, whose cost is also given alone. Memory is that of the controller's process. The scripted ranks are one process:
where it uses a whole core, the controller could do more.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import random
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.speed.rows import Row, Task
from benchmarks.speed.scene import PROMPT_TOKENS, Measures, play, play_in_folder, problems, scripted_ranks, settings
from benchmarks.speed.script import Script
from examples.quickstart.prepare import Options, make_tiny_model
from examples.quickstart.word_problems import calculate, complete, make_word_problem
from rollout.worker import EngineRank
from shared.calls import request
from shared.chat import Chat
from shared.config import Config
from shared.messages import Finished, GenerateRequest
from shared.types import Completion, Problem, Prompt, VersionSpan
from trainer.ledger import Ledger
from trainer.stages import Stages
from verify.scorer import RewardScorer

ENGINES = (10, 100, 1000)
GROUP_SIZE, TOKENS, ASYNC_LEVEL = 16, 32, 2
APART = 100
"""engines of the look at single messages"""
LEAST_PROMPTS = 128
"""groups a step; with more engines one for each"""
TARGET = 1000.0
"""groups a second"""
OFFERED = 1.0
"""groups a second of each engine that is not infinitely fast"""
SEATS = 32
"""of such an engine"""
FLAT_GROUPS = 10_000
ALL = 10**9


class Size(NamedTuple):
    """How much is run."""

    steps: dict[int, int]
    """engines -> optimiser steps of a saturated run"""
    repeats: int
    offered: dict[int, int]
    """engines -> optimiser steps of a run with engines of limited speed"""


FULL = Size({10: 80, 100: 24, 1000: 6}, repeats=3, offered={10: 12, 100: 12, 1000: 6})
QUICK = Size({10: 8, 100: 8, 1000: 4}, repeats=1, offered={10: 5, 100: 5, 1000: 4})
OFFER_FIRST = 2
"""step from which a run with engines of limited speed counts (0-based)"""


def prompts_per_step(engines: int) -> int:
    """Groups of one optimiser step."""
    return max(LEAST_PROMPTS, engines)


def saturated(
    engines: int, steps: int, told: Callable[[int], None] = lambda step: None, apart: bool = False
) -> Measures:
    """Engines and trainers answer at once. apart: each completion in a message of its own."""
    script = Script(engines=engines, seats=ALL, mean_tokens=TOKENS, apart=apart)
    return play_in_folder(script, steps, prompts_per_step(engines), GROUP_SIZE, ASYNC_LEVEL, told)


def offered(engines: int, steps: int) -> Measures:
    """Every engine gives OFFERED groups a second when all its places are taken. Five times as many completions are
    under way as there are places, so that these stay taken while a batch waits for its longest completion."""
    token_s = SEATS / (OFFERED * GROUP_SIZE * TOKENS)
    script = Script(engines=engines, seats=SEATS, token_s=token_s, mean_tokens=TOKENS, sigma=0.5)
    return play_in_folder(script, steps, 2 * engines, GROUP_SIZE, async_level=4)


async def bare_wire(engines: int, groups: int) -> float:
    """Groups a second through hub and ZeroMQ alone, as many under way as the ledger has slots."""
    script = Script(engines=engines, seats=ALL, mean_tokens=TOKENS)
    async with scripted_ranks(script) as (hub, _):
        first, prompt = 1 + script.trainers, [1] * PROMPT_TOKENS
        slots = (ASYNC_LEVEL + 1) * prompts_per_step(engines)
        ended = 0  # completions that are not yet counted

        async def start(group: int) -> None:
            completions = [Completion(group, index, seed=index) for index in range(GROUP_SIZE)]
            requests = [GenerateRequest(prompt, completion, 5 * TOKENS, 1.0) for completion in completions]
            await hub.post(first + group % engines, request(EngineRank.generate, requests))

        async def count(groups: int) -> None:
            nonlocal ended
            while ended < groups * GROUP_SIZE:
                events = await hub.events.take()
                for _, event in events:
                    assert isinstance(event, Finished)
                    ended += len(event.completions)
            ended -= groups * GROUP_SIZE

        for group in range(slots):
            await start(group)
        began = time.perf_counter()
        for group in range(groups):
            await count(1)
            await start(group)
        seconds = time.perf_counter() - began
        await count(slots)
    return groups / seconds


def of_saturation(engines: int, size: Size, task: Task) -> list[Row]:
    """Rates, shares of the bare wire and of the cores, and the processor time of a group."""
    rates, shares, cpu, used, theirs, found = [], [], [], [], [], []
    steps = size.steps[engines]
    first = min(3, steps - 2)
    for _ in range(size.repeats):
        wire = asyncio.run(bare_wire(engines, prompts_per_step(engines) * 4))
        measures = saturated(engines, steps)
        spent = measures.steps[-1].cpu_s - measures.steps[first].cpu_s
        ranks = measures.steps[-1].ranks_cpu_s - measures.steps[first].ranks_cpu_s
        rates.append(measures.rate(first))
        shares.append(rates[-1] / wire)
        cpu.append(1e3 * spent / measures.groups(first))
        used.append(spent / measures.wall_s(first))
        theirs.append(ranks / measures.wall_s(first))
        found.append(measures)
        task.part_done()
    name = f"{engines:,} engines, saturated"
    rows = [
        Row(f"{name}: groups", rates, "groups/s", better="higher", target=TARGET),
        Row(f"{name}: groups beside the bare wire", shares, "", "the bare wire's", better="higher"),
        Row(f"{name}: controller's processor time of a group", cpu, "ms", better="lower"),
        Row(f"{name}: cores used by the controller", used, "cores"),
        Row(f"{name}: cores used by the scripted ranks", theirs, "cores"),
    ]
    if measures.groups(first) + first * measures.groups_per_step >= FLAT_GROUPS:
        rows.append(flatness(found, name))
    return rows


def flatness(found: list[Measures], name: str) -> Row:
    """Resident memory at the end of a run of 10,000 groups, beside that after the first quarter."""
    values = [one.steps[-1].rss_bytes / one.steps[len(one.steps) // 4].rss_bytes for one in found]
    count = len(found[0].steps) * found[0].groups_per_step
    return Row(f"{name}: memory after {count:,} groups", values, "", "that after a quarter of them", "lower", 1.02)


def group_bytes(tokens: int, groups: int = 100) -> float:
    """Memory of an open group whose completions have so many tokens, as they come from the wire, in bytes."""
    ids, logprobs = [300 + number for number in range(tokens)], [-0.1 - number for number in range(tokens)]
    arrived = Completion(0, 0, 0, ids, logprobs, [VersionSpan(0, 0, tokens)], "stop")
    content = msgspec.msgpack.encode(Finished([arrived]))
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
                ledger.finish(completion)
        return (tracemalloc.get_traced_memory()[0] - before) / groups
    finally:
        tracemalloc.stop()


def token_bytes() -> float:
    """What one more token in every completion adds to a group's memory, for each of them, in bytes."""
    return (group_bytes(1000, 20) - group_bytes(500, 20)) / (500 * GROUP_SIZE)


def of_offers(engines: int, size: Size) -> Row:
    """What arrives of what the engines could give."""
    share = offered(engines, size.offered[engines]).rate(OFFER_FIRST) / (engines * OFFERED)
    return Row(f"{engines:,} engines of one group/s: groups", [share], "", "what they offer", "higher")


def stories(chat: Chat, count: int) -> tuple[list[Problem], list[list[int]]]:
    """Problems that all have one answer, and [2 * count] responses: at even places right ones, at odd places wrong."""
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
    """(groups a second with the real scorer, [completions] seconds of each score alone), with 10 engines."""
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


def rows(task: Task) -> list[Row]:
    """All looks."""
    size = QUICK if task.quick else FULL
    task.parts(len(ENGINES) * (size.repeats + 1) + 2)
    found: list[Row] = []
    for engines in ENGINES:
        found += of_saturation(engines, size, task)
    apart = [saturated(APART, size.steps[APART], apart=True).rate(first=2) for _ in range(size.repeats)]
    name = f"{APART:,} engines, saturated, a message for every completion: groups"
    found.append(Row(name, apart, "groups/s", better="higher"))
    task.part_done()
    for engines in ENGINES:
        found.append(of_offers(engines, size))
        task.part_done()
    rate, seconds = asyncio.run(with_scorer(8 if task.quick else 20, 200 if task.quick else 1000))
    task.part_done()
    return [
        *found,
        Row(f"memory of an open group of {GROUP_SIZE} x {TOKENS} tokens", [group_bytes(TOKENS) / 1e3], "kB"),
        Row("memory of each further token of a completion", [token_bytes()], "bytes"),
        Row("10 engines, saturated, real scorer: groups", [rate], "groups/s", better="higher"),
        Row("real scorer alone, a completion", [1e3 * value for value in summary(seconds)], "ms", better="lower"),
    ]


def summary(values: list[float], parts: int = 5) -> list[float]:
    """[parts] means of equal parts, in order."""
    size = len(values) // parts
    return [sum(values[start : start + size]) / size for start in range(0, size * parts, size)]


def main() -> None:
    """Command line: one saturated run, profiled or not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=100, help="scripted engines")
    parser.add_argument("--steps", type=int, default=16, help="optimiser steps")
    parser.add_argument("--apart", action="store_true", help="a message for every completion")
    parser.add_argument("--offered", action="store_true", help="engines of one group a second instead of at once")
    parser.add_argument("--scorer", action="store_true", help="with the real scorer, and 10 engines")
    parser.add_argument("--profile", action="store_true", help="print the costliest functions by their own time")
    parser.add_argument("--lines", type=int, default=40, help="of the profile")
    options = parser.parse_args()  # fmt: skip
    profile = cProfile.Profile()
    if options.profile:
        profile.enable()
    if options.scorer:
        rate = asyncio.run(with_scorer(options.steps, 10))[0]
    elif options.offered:
        rate = offered(options.engines, options.steps).rate(OFFER_FIRST)
    else:
        rate = saturated(options.engines, options.steps, apart=options.apart).rate(first=2)
    profile.disable()
    print(f"{rate:.0f} groups/s")
    if options.profile:
        statistics = pstats.Stats(profile)
        statistics.sort_stats("tottime").print_stats(options.lines)
        statistics.sort_stats("cumulative").print_stats(options.lines)


if __name__ == "__main__":
    main()
