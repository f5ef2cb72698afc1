"""Trainers and engines that share GPUs and do not fit together work in turns: who is called has the GPUs.

    every call of the trainers   the engines sleep (weights and KV cache dropped), the trainers' memory comes back
    weight update                the trainers' memory goes to the host, the engines wake up and take the new weights

Only what is synchronous does that (rollout.max_async_level = 0): no completion is under way while trainers work.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rollout.client import EngineClient
from rollout.worker import EngineRank
from shared.launch.calls import CallRequest
from trainer.client import TrainerClient
from trainer.step.rank import TrainerRank

NO_GPU = (TrainerRank.offload, TrainerRank.onload, TrainerRank.saved)
"""calls that trainers answer without their memory on the GPU"""


class Turns:
    """Gives the GPUs of a launch to those that are called next. The engines have them first, to start."""

    def __init__(self, trainers: TrainerClient, engines: EngineClient):
        self.trainers, self.engines = trainers, engines
        self.sampling = True
        """whether it is the engines' turn"""
        self._changing = asyncio.Lock()
        trainers.prepare, engines.prepare = self._before_trainers, self._before_engines

    async def _before_trainers(self, asked: CallRequest[Any]) -> None:
        if asked.call.last or asked.call.method in NO_GPU:
            return
        async with self._changing:
            if self.sampling:
                await self.engines.call(EngineRank.sleep)
                await self.trainers.call(TrainerRank.onload)
                self.sampling = False

    async def _before_engines(self, asked: CallRequest[Any]) -> None:
        if asked.call.method is not EngineRank.update:
            return
        async with self._changing:
            if not self.sampling:
                await self.trainers.call(TrainerRank.offload)
                await self.engines.call(EngineRank.wake)
                self.sampling = True
