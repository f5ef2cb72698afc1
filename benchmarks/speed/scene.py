"""The controller of a launch, real in all its parts, against scripted ranks in another process.

Real: the loop, ledger, wire, packing, metrics, records on disk, checkpoint, proof of every weight update. Scripted:
what engines and trainers answer (ranks.py), and, where no scorer is given, rewards (alternately high and low: every
group is trained) and tokens of prompts.
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import torch
import torch.distributed as dist

from benchmarks.speed.ranks import Settings
from benchmarks.speed.rows import NotMeasured
from benchmarks.speed.script import Script
from rollout.client import EngineClient
from rollout.worker import EngineRank
from shared import launch_folder
from shared.chat import Chat
from shared.config import Config
from shared.progress import Progress
from shared.ranks import Role
from shared.rpc import Hub
from shared.types import Completion, Group, Problem, Reward, Verdict
from trainer.batching import Learned
from trainer.checkpoint import Checkpointer
from trainer.client import TrainerClient
from trainer.controller import TrainingLoop
from trainer.data import DataSource, PromptFormat
from trainer.launch import choose_probe
from trainer.ledger import Ledger
from trainer.origin import Origin
from trainer.rank import TrainerRank
from trainer.run_log import RunLogger
from trainer.stages import Stages
from trainer.timing import PhaseTimer
from verify.scorer import RewardScorer

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0
PROMPT_TOKENS = 64
VOCABULARY = 128
RIGHT = Reward(1.0, 0.1, 0.9, 0.0, 0.0, Verdict.CORRECT, consistent=False)
WRONG = Reward(0.1, 0.1, 0.0, 0.0, 0.0, Verdict.WRONG, consistent=False)


class Step(NamedTuple):
    """The end of one optimiser step."""

    time_s: float
    """monotonic"""
    cpu_s: float
    """of the controller's process so far, all threads"""
    ranks_cpu_s: float
    """of the process of the scripted ranks"""
    rss_bytes: int
    """of the controller's process"""
    completion_tokens: int
    """trained in the step"""


@dataclass
class Measures:
    """What came of one run."""

    steps: list[Step]
    groups_per_step: int

    def groups(self, first: int) -> int:
        """Trained after the end of step `first` (0-based)."""
        return (len(self.steps) - 1 - first) * self.groups_per_step

    def wall_s(self, first: int, last: int = -1) -> float:
        """From the end of step `first` to that of `last`."""
        return self.steps[last].time_s - self.steps[first].time_s

    def rate(self, first: int) -> float:
        """Groups a second after the end of step `first`."""
        return self.groups(first) / self.wall_s(first)


class ScriptedScorer:
    """Every second completion of a group is right; nothing is looked at."""

    def __init__(self) -> None:
        self.counts: dict[Verdict, int] = {}

    async def score(self, problem: Problem, completion: Completion) -> tuple[Reward, str]:
        """By the place in the group."""
        return (WRONG if completion.index % 2 else RIGHT), ""

    def news(self) -> list[str]:
        """Nothing fails."""
        return []


class Letters:
    """A chat format of one token a letter, for prompts that nobody reads."""

    think_prefix = ""

    def render(self, text: str, system: str) -> list[int]:
        """[PROMPT_TOKENS]"""
        return [ord(letter) for letter in text[:PROMPT_TOKENS].ljust(PROMPT_TOKENS)]


def problems(count: int) -> list[Problem]:
    """Sums, all with the answer 5."""
    return [Problem(str(number), f"{number} things and some more; how many is 2 + 3?", "5") for number in range(count)]


class Watched(RunLogger):
    """The run's record, which also notes what every step took."""

    def watch(self, ranks: psutil.Process, told: Callable[[int], None]) -> list[Step]:
        """From now on; `told` hears the number of every step. Returns the list that grows."""
        self.own, self.ranks, self.told = psutil.Process(), ranks, told
        self.seen: list[Step] = []
        return self.seen

    def step(
        self, groups: list[Group], staleness: list[int], filtered: list[Group], learned: Learned, version: int
    ) -> dict[str, float]:
        """As the run's own."""
        row = super().step(groups, staleness, filtered, learned, version)
        tokens = sum(len(completion.token_ids) for group in groups for completion in group.completions)
        used = self.own.cpu_times()
        theirs = self.ranks.cpu_times()
        self.seen.append(
            Step(time.monotonic(), used.user + used.system, theirs.user + theirs.system,
                 self.own.memory_info().rss, tokens)
        )  # fmt: skip
        self.told(version)
        return row


def raise_open_files(needed: int) -> None:
    """A connection is an open file. Raises NotMeasured where so many are not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise NotMeasured(f"{needed} open files are needed, the system allows {hard} (ulimit -n)")
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@asynccontextmanager
async def scripted_ranks(script: Script) -> AsyncIterator[tuple[Hub, psutil.Process]]:
    """A hub at which all scripted ranks have registered. Raises what its receiving loop raised."""
    world = 1 + script.trainers + script.engines
    raise_open_files(4 * world + 256)
    store, device = dist.HashStore(), torch.device("cpu")
    folder = launch_folder.make(launch_folder.temporary(), "benchmark")
    role = Role("controller", 0, world, 0, 0, True, "127.0.0.1", device, store, folder=folder.path)
    hub = Hub(role)
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.speed.ranks", str(os.getpid())], stdin=subprocess.PIPE, cwd=ROOT
    )
    receiving = asyncio.ensure_future(hub.receive())
    try:
        assert process.stdin is not None
        with process.stdin as stream:
            stream.write(msgspec.json.encode(Settings(store.get("hub").decode(), script)))
        await hub.wait_for_ranks(range(1, world), START_S)
        yield hub, psutil.Process(process.pid)
    finally:
        receiving.cancel()
        hub.close()
        process.kill()
        process.wait()
        folder.leave()


def settings(
    folder: Path, script: Script, steps: int, prompts_per_step: int, group_size: int, async_level: int
) -> Config:
    """Settings of a run against these ranks: no evaluation, one checkpoint at the end."""
    most = 1 + int(script.longest * script.mean_tokens) + max(map(len, script.replies), default=0)
    return Config.model_validate({
        "runs_dir": str(folder), "steps": steps, "data": {"validation": "", "system_prompt": ""},
        "placement": {"trainers": script.trainers, "engines": script.engines},
        "model": {"max_tokens": most + PROMPT_TOKENS + 256}, "checkpoint": {"every": 0},
        "rollout": {"prompts_per_step": prompts_per_step, "group_size": group_size, "max_async_level": async_level,
                    "max_completion_tokens": most, "max_sequences": script.seats},
        "reward": {"length": 0.0}, "optimiser": {"micro_batch_tokens": max(8192, 2 * most)},
    })  # fmt: skip


async def play(
    config: Config, script: Script, tasks: Sequence[Problem], scorer: RewardScorer | None = None,
    chat: Chat | None = None,
    told: Callable[[int], None] = lambda step: None,
) -> Measures:  # fmt: skip
    """One run from its first group to its last checkpoint. scorer, chat: real ones (scripted without); told: hears
    the number of every step."""
    async with scripted_ranks(script) as (hub, process):
        with Path(os.devnull).open("w") as nowhere:
            run = assemble(config, hub, Progress(nowhere), list(tasks), scorer or ScriptedScorer(), chat or Letters())
            steps = run.logger.watch(process, told)
            dispatching = asyncio.ensure_future(run.engines.dispatch())
            await run.publish(0)
            run.clock.close_step()
            looping = asyncio.ensure_future(run.run())
            try:
                await asyncio.wait([looping, dispatching], return_when=asyncio.FIRST_COMPLETED)
                for task in (looping, dispatching):
                    if task.done():
                        task.result()
            finally:
                for task in (looping, dispatching):
                    task.cancel()
                await asyncio.gather(looping, dispatching, return_exceptions=True)
            await run.trainers.call(TrainerRank.stop)
            await run.engines.call(EngineRank.stop)
    return Measures(steps, config.rollout.prompts_per_step)


def assemble(config: Config, hub: Hub, progress: Progress, tasks: list[Problem], scorer: Any, chat: Any) -> Any:
    """A Run as launch.py makes it, without a session: its record is `Watched`."""
    first_engine, stages = 1 + config.placement.trainers, Stages(config)
    trainers = TrainerClient(hub, range(1, first_engine), config)
    engines = EngineClient(hub, range(first_engine, config.world_size), lambda: stages.now, progress.warning)
    clock, ledger = PhaseTimer(), Ledger(stages)
    source = DataSource(tasks, stages, PromptFormat(chat, config.data))
    record = Watched(clock, progress, engines, scorer, ledger, list)
    checkpointer = Checkpointer(config, ledger, engines, trainers, clock, progress, Origin({}, {}))
    return TrainingLoop(
        ledger=ledger, engines=engines, scorer=scorer, trainers=trainers, source=source,
        clock=clock, logger=record, checkpointer=checkpointer, probe=choose_probe(source), vocabulary=VOCABULARY,
    )  # fmt: skip


def play_in_folder(
    script: Script, steps: int, prompts_per_step: int, group_size: int, async_level: int,
    told: Callable[[int], None] = lambda step: None,
) -> Measures:  # fmt: skip
    """`play` in a folder that is removed afterwards, with a scripted scorer."""
    with tempfile.TemporaryDirectory() as folder:
        config = settings(Path(folder), script, steps, prompts_per_step, group_size, async_level)
        return asyncio.run(play(config, script, problems(256), told=told))
