"""The controller of a launch, real in all its parts, against scripted engines and trainers in another process.

Real: the loop, ledger, wire, heartbeats, packing, metrics, records on disk, checkpoint, proof of every weight update.
Scripted:
what engines and trainers answer, and when (scripted.py); and, where no scorer is given, rewards (alternately high and
low: every group is trained) and tokens of prompts.
"""

from __future__ import annotations

import asyncio
import io
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch.distributed as dist

from benchmarks.figures import ROOT, NotMeasured
from benchmarks.scripted import HOST, Script, role_of
from rollout.client import EngineClient
from rollout.worker import EngineRank
from shared.chat import Chat
from shared.config import Config
from shared.launch import launch_folder
from shared.launch.rpc import Hub
from shared.launch.watchdog import PulseKeeper
from shared.metrics import read_rows
from shared.progress import Progress
from shared.types import Completion, Group, Problem, Reward, Verdict
from trainer.assembly import assemble
from trainer.checkpoint.origin import Origin
from trainer.client import TrainerClient
from trainer.controller import TrainingLoop
from trainer.data.data_source import DataSource, PromptFormat
from trainer.episodes import Episodes
from trainer.ledger import Ledger
from trainer.stages import Stages
from trainer.step.rank import TrainerRank
from verify.scorer import RewardScorer, Settled

START_S, HEARTBEAT_S = 300.0, 60.0
PROMPT_TOKENS, VOCABULARY = 64, 128
RIGHT = Reward(1.0, 0.1, 0.9, 0.0, 0.0, Verdict.CORRECT, consistent=False)
WRONG = Reward(0.1, 0.1, 0.0, 0.0, 0.0, Verdict.WRONG, consistent=False)


@dataclass
class Measures:
    """What came of one run."""

    groups_per_step: int
    steps: list[dict[str, Any]]
    """the training steps of metrics.jsonl"""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """of the controller's process, all threads"""
    ranks_cpu_s: float = 0.0
    keeper_cpu_s: float = 0.0
    """of the thread that answers heartbeats, of `cpu_s`"""
    rss_bytes: list[int] = field(default_factory=list)
    """of the controller's process, sampled at equal times"""

    def step_s(self, first: int, last: int = -1) -> float:
        """Return the seconds of a step, the mean over those after step `first` (0-based) until step `last`."""
        count = last % len(self.steps) - first
        return float(self.steps[last]["time"] - self.steps[first]["time"]) / count

    def rate(self, first: int) -> float:
        """Return the groups a second that were trained after step `first`."""
        return self.groups_per_step / self.step_s(first)


class ScriptedScorer:
    """Every second completion of a group is right; nothing is looked at."""

    def __init__(self) -> None:
        self.counts: dict[Verdict, int] = {}

    async def score(self, problem: Problem, completion: Completion) -> tuple[Reward, str]:
        """Decide by the place in the group."""
        return (WRONG if completion.index % 2 else RIGHT), ""

    async def settle(self, group: Group, completion: Completion, reward: Reward, text: str) -> list[Settled]:
        """At once."""
        return [Settled(completion, reward, text)]

    @property
    def judge_metrics(self) -> dict[str, float]:
        """There are no judges."""
        return {}

    def news(self) -> list[str]:
        """Nothing fails."""
        return []


class Letters:
    """A chat format of one token a letter, for prompts that nobody reads."""

    think_prefix = ""
    tokenizer = range(VOCABULARY)
    added = re.compile("(?!)")

    def render(self, text: str, system: str, _quoted: object = None) -> list[int]:
        """Return [PROMPT_TOKENS] ids."""
        return [ord(letter) for letter in text[:PROMPT_TOKENS].ljust(PROMPT_TOKENS)]

    def encode_plain(self, text: str) -> list[int]:
        """Return [letters] ids."""
        return [ord(letter) for letter in text]


def problems(count: int) -> list[Problem]:
    """Return sums that all have the answer 5."""
    return [Problem(str(number), f"{number} things and some more; how many is 2 + 3?", "5") for number in range(count)]


def raise_open_files(needed: int) -> None:
    """Allow so many open files: a connection is one. Raises NotMeasured where that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise NotMeasured(f"{needed} open files are needed, the system allows {hard} (ulimit -n)")
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def thread_s(thread: threading.Thread) -> float:
    """Return the seconds of processor time that a thread of this process has taken."""
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


@asynccontextmanager
async def scripted_ranks(script: Script) -> AsyncIterator[tuple[Hub, psutil.Process, PulseKeeper]]:
    """A hub that all scripted ranks have registered at, their process, and the keeper that hears the heart of each.
    Raises what the hub's receiving loop raised."""
    world = script.world
    raise_open_files(16 * world + 256)
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    folder = launch_folder.make(launch_folder.temporary(), "benchmark")
    role = role_of(script, 0, store, folder.path)
    hub, keeper = Hub(role), PulseKeeper(role, HOST, HEARTBEAT_S)
    keeper.start()
    command = [sys.executable, "-m", "benchmarks.scripted", str(store.port), str(folder.path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT)

    async def turn() -> None:
        while True:
            keeper.turn()
            await asyncio.sleep(0.5)

    beside = [asyncio.ensure_future(hub.receive()), asyncio.ensure_future(turn())]
    try:
        assert process.stdin is not None
        with process.stdin as stream:
            stream.write(msgspec.json.encode(script))
        await hub.wait_for_ranks(range(1, world), START_S)
        yield hub, psutil.Process(process.pid), keeper
    finally:
        keeper.leaving = keeper.closed = True
        for task in beside:
            task.cancel()
        await asyncio.to_thread(keeper.join)
        hub.close()
        process.kill()
        process.wait()
        folder.leave()


def settings(
    folder: Path, script: Script, steps: int, prompts_per_step: int, group_size: int, async_level: int
) -> Config:
    """Return the settings of a run against these ranks: no evaluation, one checkpoint at the end."""
    most = 1 + int(script.longest * script.mean_tokens) + max(map(len, script.replies), default=0)
    return Config.model_validate({
        "runs_dir": str(folder), "steps": steps, "data": {"validation": "", "system_prompt": ""},
        "placement": {"trainers": script.trainers, "engines": script.engines},
        "model": {"max_tokens": most + PROMPT_TOKENS + 256}, "checkpoint": {"every": 0},
        "rollout": {"prompts_per_step": prompts_per_step, "group_size": group_size, "max_async_level": async_level,
                    "max_completion_tokens": most, "max_sequences": script.seats},
        "reward": {"length": 0.0}, "optimiser": {"micro_batch_tokens": max(8192, 2 * most)},
    })  # fmt: skip


def loop_of(config: Config, hub: Hub, tasks: list[Problem], scorer: Any, chat: Any) -> TrainingLoop:
    """Make a loop as launch.py does, without a session."""
    progress, first_engine = Progress(io.StringIO()), 1 + config.placement.trainers
    stages, prompts = Stages(config), PromptFormat(chat, config.data)
    trainers = TrainerClient(hub, range(1, first_engine), config)
    engines = EngineClient(hub, range(first_engine, config.world_size), lambda: stages.now, progress.warning)
    source, episodes = DataSource(tasks, stages, prompts), Episodes(config, prompts, scorer)
    return assemble(config, Ledger(stages), engines, trainers, scorer, episodes, source, progress, Origin({}, {}))


async def play(
    config: Config,
    script: Script,
    tasks: Sequence[Problem],
    scorer: RewardScorer | None = None,
    chat: Chat | None = None,
) -> Measures:
    """Run from the first group to the last checkpoint. scorer, chat: real ones (scripted without)."""
    own, found = psutil.Process(), Measures(config.rollout.prompts_per_step, [])

    async def watch() -> None:
        while True:
            found.rss_bytes.append(own.memory_info().rss)
            await asyncio.sleep(0.1)

    async with scripted_ranks(script) as (hub, ranks, keeper):
        run = loop_of(config, hub, list(tasks), scorer or ScriptedScorer(), chat or Letters())
        beside = [asyncio.ensure_future(work) for work in (run.engines.dispatch(), watch())]
        await run.publish(0)
        run.clock.close_step()
        began, *before = time.monotonic(), sum(own.cpu_times()[:2]), sum(ranks.cpu_times()[:2]), thread_s(keeper)
        looping = asyncio.ensure_future(run.run())
        try:
            await asyncio.wait([looping, *beside], return_when=asyncio.FIRST_COMPLETED)
            for task in (looping, *beside):
                if task.done():
                    task.result()
            await run.checkpointer.finish()
            found.wall_s = time.monotonic() - began
            after = sum(own.cpu_times()[:2]), sum(ranks.cpu_times()[:2]), thread_s(keeper)
            spent = (end - start for start, end in zip(before, after, strict=True))
            found.cpu_s, found.ranks_cpu_s, found.keeper_cpu_s = spent
        finally:
            for task in (looping, *beside):
                task.cancel()
            await asyncio.gather(looping, *beside, return_exceptions=True)
        await run.learner.trainers.call(TrainerRank.stop)
        await run.engines.call(EngineRank.stop)
    found.steps = [row for row in read_rows(config.run_dir / "metrics.jsonl") if row["kind"] == "train"]
    return found


def play_in_folder(script: Script, steps: int, prompts_per_step: int, group_size: int, async_level: int) -> Measures:
    """Run `play` in a folder that is removed afterwards, with a scripted scorer."""
    with tempfile.TemporaryDirectory() as folder:
        config = settings(Path(folder), script, steps, prompts_per_step, group_size, async_level)
        return asyncio.run(play(config, script, problems(256)))
