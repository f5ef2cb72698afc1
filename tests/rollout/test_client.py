"""The engines' client over a link in this process, with ranks that only write down what they are asked."""

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from rollout.client import EngineClient
from rollout.local_engine import LocalConnection
from rollout.weights.proof import PublishedWeights, Updated, WeightsHeld
from rollout.worker import EngineRank
from shared.config import Config
from shared.errors import NonFinite, RunError, SyncMismatch
from shared.launch.calls import CallReply
from shared.launch.messages import EngineEnded, EngineRestarted, Finished, GenerateRequest, RankFailed
from shared.launch.sockets import refused
from shared.record_file import Written
from shared.types import Completion, Group, Problem, Prompt


class Scene:
    """A client of one engine, whose rank answers with `answers` and keeps what it should sample."""

    def __init__(self, **settings: Any) -> None:
        self.link, self.told = LocalConnection("the engine"), list[str]()
        config = Config.model_validate(settings)
        self.client = EngineClient(self.link, range(1), lambda: config, self.told.append)
        self.asked: list[GenerateRequest] = []
        self.held: list[bool] = []
        self.answers: dict[str, Any] = {}

    async def rank(self) -> None:
        """Be the rank."""
        async for call_id, called in self.link.calls(EngineRank):
            message: Any = called.message
            if called.call.method is EngineRank.generate:
                self.asked += message.requests
                self.held.append(message.hold)
            else:
                await self.link.send(call_id, self.answers[called.call.method.__name__])

    async def event(self, message: Any) -> None:
        """Report something to the client."""
        await self.link.send(0, message)

    def play(self, story: Coroutine[Any, Any, None]) -> None:
        """Run a story with the rank beside it, and the client's dispatch."""

        async def together() -> None:
            tasks = [asyncio.ensure_future(work) for work in (self.rank(), self.client.dispatch())]
            try:
                await asyncio.wait_for(story, 300)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(together())


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0)


def group(index: int, count: int) -> Group:
    completions = [Completion(index, number, seed=number) for number in range(count)]
    return Group(Prompt(index, Problem(str(index), "?", "1"), [1, 2]), completions, [None] * count)


def test_samples_outside_of_training_take_and_return_tokens_in_order():
    scene = Scene()

    async def story() -> None:
        sampling = asyncio.ensure_future(scene.client.sample([5, 6], [70, 80], 0.0))
        await until(lambda: len(scene.asked) == 2)
        assert scene.client.live == {0: 2} and scene.client.oldest_wait_s() == 0.0, "not of training"
        for asked in reversed(scene.asked):
            assert asked.prompt_ids == [5, 6] and asked.temperature == 0.0
            asked.completion.token_ids.append(asked.completion.seed)
            await scene.event(Finished([asked.completion]))
        assert [completion.token_ids for completion in await sampling] == [[70], [80]]
        assert scene.client.live == {0: 0} and scene.client.generated_tokens == 2

    scene.play(story())


@pytest.mark.parametrize(("level", "hold"), [(0, True), (1, False)])
def test_groups_are_sampled_where_they_are_unfinished(level, hold):
    scene = Scene(rollout={"max_async_level": level})

    async def story() -> None:
        resumed = group(3, 3)
        resumed.completions[1].finish_reason = "stop"
        began = time.monotonic()
        await scene.client.submit([resumed])
        await until(lambda: len(scene.asked) == 2)
        assert [asked.completion.index for asked in scene.asked] == [0, 2] and scene.held == [hold]
        assert 0 <= scene.client.oldest_wait_s() <= time.monotonic() - began
        await scene.event(Finished([resumed.completions[2]]))
        async for completion in scene.client.finished():
            assert completion is resumed.completions[2]
            scene.client.close()
        assert scene.client.live == {0: 1}

    scene.play(story())


def test_turns_of_an_episode_stay_on_the_engine_that_holds_what_was_before():
    """In training and outside of it, however busy that engine is beside the others."""
    posts: list[tuple[int, list[GenerateRequest]]] = []

    async def post(rank: int, asked: Any) -> None:
        posts.append((rank, asked.message.requests))

    hub: Any = SimpleNamespace(post=post)
    client = EngineClient(hub, range(1, 4), lambda: Config.model_validate({}), print)

    async def story() -> None:
        for index in range(4):
            training = group(index, 2)
            training.prompt = replace(training.prompt, problem=replace(training.prompt.problem, environment="guess"))
            outside, engines = client.episode(seed=7), set[tuple[int, int]]()
            for _ in range(3):
                await client.submit([training])
                turn = asyncio.ensure_future(client.continue_turn([1, 2], outside, 1.0))
                await asyncio.sleep(0)
                (one, trained), (other, [asked]) = posts[-2:]
                engines.add((one, other))
                client.live[one] += 50  # others of its work
                client.live[other] += 50
                for completion in (*(request.completion for request in trained), asked.completion):
                    client._arrived(one if completion.group >= 0 else other, completion)
                client._ended.clear()
                assert await turn is outside
            assert len(engines) == 1, "a turn went to another engine"

    asyncio.run(story())
    assert {rank for rank, _ in posts} == {1, 2, 3}


def test_completions_that_nobody_asked_for_are_dropped_and_counted():
    scene = Scene()

    async def story() -> None:
        before, asked = refused.total, group(1, 1)
        await scene.client.submit([asked])
        [completion] = asked.completions
        scene.client._arrived(7, completion)  # of another rank than the one that has it
        assert refused.total == before + 1 and scene.client.live == {0: 1}
        await scene.event(Finished([Completion(1, 7, 0), Completion(-5, 0, 0), completion, completion]))
        await until(lambda: refused.total == before + 4)
        assert scene.client.live == {0: 0}

    scene.play(story())


def test_a_rank_that_starts_another_engine_may_be_late_and_both_are_told():
    scene = Scene()

    async def story() -> None:
        await scene.event(EngineEnded(0, "it was killed"))
        await until(lambda: scene.told)
        assert scene.client.excused() == {0}
        await scene.event(EngineRestarted(0, 2.0, 5, "it was killed"))
        await until(lambda: scene.client.restarts)
        assert scene.client.excused() == set() and len(scene.told) == 2

    scene.play(story())


def test_the_error_of_a_rank_is_raised():
    scene = Scene()

    async def story() -> None:
        rank = asyncio.ensure_future(scene.rank())
        scene.answers["snapshot"] = RankFailed("RunError", "no memory")
        with pytest.raises(RunError, match="no memory"):
            await scene.client.snapshot(Path("x"))
        scene.answers["snapshot"] = CallReply({"engine-0.msgpack": Written(1, "")})
        assert await scene.client.snapshot(Path("x")) == {"engine-0.msgpack": Written(1, "")}
        await scene.event(RankFailed("NonFinite", "log-prob nan"))
        with pytest.raises(NonFinite, match="log-prob nan"):
            await scene.client.dispatch()
        rank.cancel()

    asyncio.run(story())


def test_an_update_is_proved_by_version_checksums_and_probe():
    scene, probe = Scene(model={"dtype": "float32"}), [[1, 2, 3]]
    parts = [PublishedWeights(4, 8, 0.1, {"w": 10}, probe=[[-1.0, -2.0]]), PublishedWeights(4, 8, 0.2, {"w": 20})]
    update = {"engine": 0, "version": 4, "seconds": {"total": 0.5}, "bytes": 8, "held": WeightsHeld({"w": 30}),
            "scored_version": 4, "probe": [[-1.0, -2.0]]}  # fmt: skip
    others = ({"held": WeightsHeld({"w": 31})}, {"version": 3}, {"scored_version": 3}, {"probe": [[-1.0, -3.0]]})

    async def story() -> None:
        scene.answers["update"] = CallReply(Updated(**update))
        report = await scene.client.update(parts, probe, time.monotonic())
        assert (report.version, report.bytes, report.write_s, report.update_s) == (4, 16, 0.2, 0.5)
        for wrong in others:
            scene.answers["update"] = CallReply(Updated(**{**update, **wrong}))
            with pytest.raises(SyncMismatch):
                await scene.client.update(parts, probe, time.monotonic())

    scene.play(story())
