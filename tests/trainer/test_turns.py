"""Who is called has the GPUs: the order of calls when trainers and engines work in turns."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from rollout.client import EngineClient
from rollout.worker import EngineRank
from shared.config import Config
from shared.launch.batch_queue import BatchQueue
from shared.launch.calls import CallRequest
from shared.launch.messages import Message
from trainer.client import TrainerClient
from trainer.step.rank import TrainerRank
from trainer.turns import Turns


class Recorder:
    """A hub that notes calls and answers None."""

    def __init__(self) -> None:
        self.events: BatchQueue[tuple[int, Message]] = BatchQueue()
        self.calls: list[str] = []

    def name(self, rank: int) -> str:
        return str(rank)

    async def post(self, rank: int, request: CallRequest[Any]) -> None:
        self.calls.append(request.call.method.__name__)

    async def call_all(
        self, requests: Mapping[int, CallRequest[Any]], deadline_s: float, excused: Callable[[], set[int]] = set
    ) -> list[Any]:
        await asyncio.sleep(0)
        [name] = {request.call.method.__name__ for request in requests.values()}
        self.calls.append(name)
        return [None] * len(requests)


def test_the_gpus_change_hands_exactly_when_the_other_side_is_called():
    hub, config = Recorder(), Config()
    trainers, engines = TrainerClient(hub, range(1, 3), config), EngineClient(hub, range(3, 5), lambda: config, print)
    Turns(trainers, engines)

    async def story() -> None:
        await trainers.call(TrainerRank.load, "model")
        await engines.call(EngineRank.attach, [])
        for version in range(2):
            await trainers.call(TrainerRank.step, 1e-3)
            await trainers.call(TrainerRank.publish, version, [])
            await engines.call(EngineRank.update, version)
            await engines.call(EngineRank.snapshot, "folder")
        await asyncio.gather(*(trainers.call(TrainerRank.reset_optimiser) for _ in range(2)))
        await trainers.call(TrainerRank.stop)
        await engines.call(EngineRank.stop)

    asyncio.run(story())
    to_trainers, to_engines = ["sleep", "onload"], ["offload", "wake"]
    step = ["step", "publish", *to_engines, "update", "snapshot"]
    assert hub.calls == [
        *to_trainers, "load", "attach", *step, *to_trainers, *step, *to_trainers, "reset_optimiser", "reset_optimiser",
        "stop", "stop",
    ]  # fmt: skip
