"""Tokens a second through worker, wire, ledger and verifier against raw vLLM, cost of log-probs.

Ours: rank 0's own admission, ledger, collection and scorer here, a real rollout rank (worker, engine, ZeroMQ) in its
process; batches are taken as soon as they are complete, and are not trained. Raw: vLLM with the settings of our engine,
the same prompts, seeds and lengths, all asked for at once, with per-token log-probs, as AsyncLLM and as LLMEngine in
one process; the faster of the two is the peer. They take turns, repeat after repeat, and whoever waits is stopped
(SIGSTOP), so that each has the machine for itself. Lengths are drawn (lognormal), since a random model does not end its
texts; nor does it write well-formed ones, so the scorer is given a right or wrong well-formed response in place of
each completion. Weights do not change meanwhile (weight_update.py).
"""

from __future__ import annotations

import asyncio
import io
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from benchmarks.raw_vllm import Asked, Ran, RawAsync, RawOffline  # first: it prepares the environment for vLLM

# isort: split
import torch
import torch.distributed as dist

from benchmarks import child
from benchmarks.child import Child
from benchmarks.controller import stories
from benchmarks.figures import Figure, benchmark
from benchmarks.llama import SMOLLM2_135M, Shape, write_model, write_tokenizer
from benchmarks.scripted import HOST, TABLE, Script, length_table, role_of
from examples.quickstart.prepare import Options, make_tiny_model
from rollout.client import EngineClient
from rollout.weights import WeightSender, make_sender
from rollout.worker import EngineRank, serve
from shared.chat import Chat
from shared.config import Config
from shared.errors import RunError
from shared.launch import launch_folder
from shared.launch.calls import request
from shared.launch.messages import GenerateRequest
from shared.launch.rpc import EngineLink, Hub
from shared.launch.watchdog import die_with_parent
from shared.model.config import DecoderConfig
from shared.model.decoder import Decoder
from shared.model.hf import iterate_weights, load_config
from shared.progress import Progress
from shared.types import Completion, Group, Problem, Reward
from trainer.controller import TrainingLoop
from trainer.data.data_source import DataSource, PromptFormat
from trainer.episodes import Episodes
from trainer.learner import Learner
from trainer.ledger import Ledger
from trainer.stages import Stages
from verify.scorer import RewardScorer

ASYNC_LEVEL = 2
RANK, WORLD = 1, 2
SCRIPT = Script(trainers=0, engines=1)
"""of the engine; rank 0 is the controller, and also holds the weights here"""
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
SIGMA, LONGEST = 0.5, 2.5
"""of the lengths: of the logarithm; the longest in means"""
START_S = 120.0
Result = TypeVar("Result")
TARGET = 0.95


class Load(NamedTuple):
    """What is sampled, and by which model."""

    name: str
    shape: Shape | None
    """None: the quickstart's model"""
    dtype: str
    seats: int
    """completions decoded at a time"""
    prompts: int
    """groups of a batch"""
    group_size: int
    mean_tokens: float
    steps: int
    """batches"""
    target: float | None

    def lengths(self) -> list[int]:
        """Return [TABLE] tokens, drawn by a completion's seed."""
        return length_table(Script(mean_tokens=self.mean_tokens, sigma=SIGMA, longest=LONGEST))

    def config(self) -> Config:
        """Return the settings of the run. Prompts are short, so that decoding is what is measured."""
        most = 1 + int(LONGEST * self.mean_tokens)
        return Config.model_validate({
            "steps": self.steps, "data": {"validation": "", "system_prompt": ""},
            "model": {"dtype": self.dtype, "max_tokens": most + 256},
            "rollout": {"prompts_per_step": self.prompts, "group_size": self.group_size, "max_async_level": ASYNC_LEVEL,
                        "cache_bytes": 512 << 20, "max_completion_tokens": most, "max_sequences": self.seats},
            "reward": {"overlong_buffer": min(32, most)}, "sync": {"verify": False},
            "optimiser": {"micro_batch_tokens": 8192},
        })  # fmt: skip


SMOLLM2 = Load("SmolLM2-135M (random)", SMOLLM2_135M, "bfloat16", 64, 8, 8, mean_tokens=32.0, steps=2, target=TARGET)
TINY = Load("quickstart's model", None, "float32", 256, 16, 16, mean_tokens=64.0, steps=6, target=None)


class Drawn(EngineClient):
    """Asks for completions, or turns, of drawn lengths."""

    lengths: list[int]

    def _request(self, group: Group, completion: Completion) -> GenerateRequest:
        request = super()._request(group, completion)
        request.max_tokens = completion.turn_start + self.lengths[completion.seed % TABLE]
        return request


class Answered(RewardScorer):
    """Scores a well-formed response in place of each completion: right for even places in the group, else wrong."""

    replies: list[list[int]]

    async def score(self, problem: Problem, completion: Completion) -> tuple[Reward, str]:
        """Score as a real one."""
        reply = self.replies[2 * int(problem.id) + completion.index % 2]
        return await super().score(problem, msgspec.structs.replace(completion, token_ids=reply))


class Ours:
    """The controller's side of a launch with one engine, without training."""

    def __init__(self, load: Load, hub: Hub, scorer: Answered, source: DataSource):
        self.load, self.config, self.scorer, self.source = load, load.config(), scorer, source
        ranks = range(RANK, WORLD)
        self.engines = Drawn(hub, ranks, lambda: self.config, Progress(io.StringIO()).warning)
        self.engines.lengths = load.lengths()
        self.background = [asyncio.ensure_future(forever) for forever in (hub.receive(), self.engines.dispatch())]

    async def guarded(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await `work`; raises what ended one of the loops in the background before."""
        task = asyncio.ensure_future(work)
        await asyncio.wait([task, *self.background], return_when=asyncio.FIRST_COMPLETED)
        for loop in self.background:
            if loop.done():
                task.cancel()
                loop.result()
        return await task

    async def run(self, steps: int) -> Ran:
        """Run so many batches, from the first admission until the last is taken. Raises RunError if the engine died."""
        before, start = self.engines.generated_tokens, time.perf_counter()
        await self.guarded(self._run(Ledger(Stages(self.config.model_copy(update={"steps": steps})))))
        if self.engines.restarts:
            raise RunError("the engine died and was started again: its figures say nothing")
        return Ran(time.perf_counter() - start, self.engines.generated_tokens - before)

    async def _run(self, ledger: Ledger) -> None:
        unused: Any = None
        path = TrainingLoop(
            ledger=ledger, engines=self.engines, scorer=self.scorer,
            episodes=Episodes(self.config, self.source.prompt_format, self.scorer), source=self.source,
            learner=Learner(unused, ledger, self.source, unused), clock=unused, logger=unused, checkpointer=unused,
            probe=[],
        )  # fmt: skip
        async with asyncio.TaskGroup() as loops:
            for loop in (path.admit(), path.collect(), take_all(ledger, self.engines)):
                loops.create_task(loop)

    def same_requests(self) -> list[Asked]:
        """Return what `run` asks the engine for, in that order."""
        prompts = [self.source.draw(index) for index in range(self.load.steps * self.load.prompts)]
        lengths = self.engines.lengths
        return [
            Asked(prompt.token_ids, seed, lengths[seed % TABLE])
            for prompt in prompts
            for seed in self.source.seeds(prompt)
        ]


async def take_all(ledger: Ledger, engines: EngineClient) -> None:
    """In place of training: every batch is done as soon as it is complete."""
    while not ledger.exhausted:
        ledger.trained(await ledger.take())
        ledger.release(ledger.version)
    engines.close()


def be_rank(port: int, folder: Path, settings: str, model_dir: str) -> None:
    """Be a rollout rank as a launch has it, in a process of its own, until `stop`."""
    die_with_parent()
    role = role_of(SCRIPT, RANK, dist.TCPStore(HOST, port, is_master=False), folder, DEVICE)

    async def work() -> None:
        link = EngineLink(role)
        await link.register()
        await serve(link, Config.model_validate_json(settings), role, model_dir)
        link.close()

    asyncio.run(work())


def make_model(load: Load, folder: Path) -> str:
    """Write a folder with weights, tokenizer and chat template."""
    if load.shape is None:
        make_tiny_model(folder, Options(max_tokens=load.config().model.max_tokens), 0)
    else:
        write_model(folder, load.shape)
        write_tokenizer(folder, load.shape, spare=False)  # the scorer is given other responses
    return str(folder)


def weights_of(model_dir: str) -> list[tuple[str, torch.Tensor]]:
    """Return float32 master weights of the model in the folder, where a trainer would have them."""
    with torch.device("meta"):
        decoder = Decoder(DecoderConfig.from_hf(load_config(Path(model_dir))))
    shapes = {name: parameter.shape for name, parameter in decoder.named_parameters()}
    stored = dict(iterate_weights(Path(model_dir), shapes))
    return [(name, stored[name].float().to(DEVICE)) for name in shapes]


async def begin(hub: Hub, engines: EngineClient, sender: WeightSender) -> None:
    """The start of a launch: ranks register, attach, first weights."""
    await hub.wait_for_ranks(range(RANK, WORLD), START_S)
    await engines.call(EngineRank.attach, [sender.describe()])
    sender.write(0)
    await hub.call(RANK, request(EngineRank.update, 0), START_S)


@asynccontextmanager
async def launched(load: Load, model_dir: str) -> AsyncIterator[tuple[Ours, int]]:
    """(our side, process id of the rollout rank), with the weights in the engine. Raises what a rank reported."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    folder = launch_folder.make(launch_folder.temporary(), "benchmark")
    hub = Hub(role_of(SCRIPT, 0, store, folder.path))
    config, chat = load.config(), Chat(Path(model_dir))
    tasks, replies = stories(chat, 64)
    stages = Stages(config)
    scorer = Answered(stages, chat)
    scorer.replies = replies
    ours = Ours(load, hub, scorer, DataSource(tasks, stages, PromptFormat(chat, config.data)))
    process = multiprocessing.get_context("spawn").Process(
        target=be_rank, args=(store.port, folder.path, config.model_dump_json(), model_dir)
    )
    process.start()
    weights, dtype = weights_of(model_dir), getattr(torch, load.dtype)
    sender = make_sender("auto", weights, dtype, rank=0, world=1, store=store, engines=1)
    try:
        await scorer.start(tasks)
        await ours.guarded(begin(hub, ours.engines, sender))
        yield ours, process.pid or 0
        await hub.call(RANK, request(EngineRank.stop), START_S)
    finally:
        for task in ours.background:
            task.cancel()
        sender.close()
        hub.close()
        await scorer.close()
        child.end(process.pid or 0)
        folder.leave()


OURS, PEERS, WITHOUT = "ours", ("AsyncLLM", "LLMEngine"), "LLMEngine without log-probs"


async def compare(load: Load, repeats: int, folder: Path) -> dict[str, list[float]]:
    """Measure side -> [repeats] tokens a second, after a batch of each, unmeasured."""
    model_dir, config = make_model(load, folder), load.config()
    found: dict[str, list[float]] = {side: [] for side in (OURS, *PEERS, WITHOUT)}
    async with launched(load, model_dir) as (ours, rank):
        requests = ours.same_requests()
        await ours.run(steps=1)
        child.suspend(rank)
        with (
            Child(RawAsync, config, model_dir, deadline_s=300.0) as first,
            Child(RawOffline, config, model_dir, deadline_s=300.0) as second,
        ):
            for raw in (first, second):
                await raw("run", requests[: load.prompts * load.group_size], True)
                raw.suspend()
            for _ in range(repeats):
                child.resume(rank)
                found[OURS].append((await ours.run(load.steps)).rate)
                child.suspend(rank)
                for side, raw in ((PEERS[0], first), (PEERS[1], second), (WITHOUT, second)):
                    raw.resume()
                    found[side].append((await raw("run", requests, side != WITHOUT)).rate)
                    raw.suspend()
        child.resume(rank)
    return found


def figures(load: Load, found: dict[str, list[float]]) -> Iterator[Figure]:
    """Yield what is said of one model. The faster raw vLLM is the peer; repeats are compared pair by pair."""
    peer = max(PEERS, key=lambda side: statistics.median(found[side]))
    beside = [ours / raw for ours, raw in zip(found[OURS], found[peer], strict=True)]
    cost = [rate / without for rate, without in zip(found[PEERS[1]], found[WITHOUT], strict=True)]
    ours = f"{load.name}: worker, wire, ledger and verifier"
    yield Figure(ours, found[OURS], "tokens/s", better="higher")
    for side in (*PEERS, WITHOUT):
        yield Figure(f"{load.name}: raw vLLM, {side}", found[side], "tokens/s")
    yield Figure(f"{ours}, of raw vLLM", beside, "", "the faster raw vLLM", "higher", load.target)
    yield Figure(f"{load.name}: raw vLLM with per-token log-probs", cost, "", "that without (LLMEngine)")


@benchmark()
def rollout(quick: bool) -> Iterator[Figure]:
    """Measure both models."""
    loads = [(SMOLLM2, 3), (TINY, 4)]
    if quick:
        loads = [(SMOLLM2._replace(mean_tokens=16.0, steps=2), 1), (TINY._replace(steps=3), 2)]
    for load, repeats in loads:
        with tempfile.TemporaryDirectory() as folder:
            yield from figures(load, asyncio.run(compare(load, repeats, Path(folder))))
