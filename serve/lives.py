"""A completion over the lives of several engines: when one dies, what was under way goes on in the next.

A request with a seed, or at temperature 0, is sampled once more from its beginning: the same tokens come, those that
were told are left out, and where rounding led elsewhere it ends with EngineDied. Any other goes on behind its tokens as
if they were the prompt, if nothing of it depends on them (stop strings, penalties and forms do: EngineDied). A request
that kills engines is found and refused (suspects.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from serve.suspects import DEATHS, Suspects, digest_of

if TYPE_CHECKING:
    from serve.engine import Delta, Sampling

log = logging.getLogger("serve")


class EngineDied(Exception):
    """The engine process is gone; another try may find its successor."""


class LedElsewhere(EngineDied):
    """Rounding in another batch gave another token: what was told cannot be gone on with."""


class Lives:
    """Of the engine processes of one server, one after the other."""

    def __init__(
        self, living: Callable[[], object | None], sample: Callable[[list[int], Sampling], AsyncGenerator[Delta, None]]
    ):
        """living: the engine that lives now. sample: one completion in it; raises EngineDied, after `bury`."""
        self._living, self._sample = living, sample
        self.suspects = Suspects()
        self.over = False
        """there will be no further engine"""
        self._buried: object | None = None
        self._successor: asyncio.Future[bool] | None = None
        """true when the next engine is there, false when there will be none; None while nobody waits"""

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        """Sample one completion, in one engine or, where one dies, in several. Raises EngineDied, Guilty."""
        request = digest_of(prompt_ids, replace(sampling, seed=None))
        told: list[int] = []
        while True:
            async with self.suspects.turn(request):
                engine = self._living()
                try:
                    with self.suspects.running(request):
                        async with contextlib.aclosing(self._go_on(prompt_ids, sampling, told)) as deltas:
                            async for delta in deltas:
                                told += delta.token_ids
                                yield delta
                    self.suspects.clear(request)
                    return
                except LedElsewhere:
                    raise
                except EngineDied:
                    self.suspects.check(request)
                    if not (repeatable(sampling) or plain(sampling)):
                        raise
            await self._await_successor(engine)

    async def _go_on(self, prompt_ids: list[int], sampling: Sampling, told: list[int]) -> AsyncGenerator[Delta, None]:
        """What comes behind the tokens that were told already."""
        known: list[int] = []
        if repeatable(sampling):
            known = list(told)
        else:
            prompt_ids = prompt_ids + told
            sampling = replace(sampling, max_tokens=sampling.max_tokens - len(told))
        place = 0
        async with contextlib.aclosing(self._sample(prompt_ids, sampling)) as deltas:
            async for delta in deltas:
                if place >= len(known):
                    yield delta
                    continue
                if known[place : place + len(delta.token_ids)] != delta.token_ids:
                    raise LedElsewhere
                place += len(delta.token_ids)

    async def _await_successor(self, engine: object | None) -> None:
        """Until there is another engine. Raises EngineDied where none will be."""
        if self.over:
            raise EngineDied
        if self._living() is not engine and self._living() is not None:
            return
        if self._successor is None:
            self._successor = asyncio.get_running_loop().create_future()
        if not await asyncio.shield(self._successor):
            raise EngineDied

    def tell_waiting(self, there: bool) -> None:
        """The next engine is there, or there will be none."""
        waiting, self._successor = self._successor, None
        if waiting is not None:
            waiting.set_result(there)

    def bury(self, engine: object, *, meant: bool = False) -> None:
        """An engine is dead, and unless that was meant some request may have done it. A second time nothing happens."""
        if self._buried is engine:
            return
        self._buried = engine
        if not meant and self.suspects.note_death() is not None:
            log.error("a request was running at %d deaths of the engine: it is not tried again", DEATHS)


def repeatable(sampling: Sampling) -> bool:
    """Sampled once more, it has the same tokens, but for rounding."""
    return sampling.seed is not None or sampling.temperature == 0


def plain(sampling: Sampling) -> bool:
    """Nothing of it depends on the tokens that are there: it can go on behind them as if they were the prompt."""
    kept = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "logprobs")
    return sampling == type(sampling)(**{name: getattr(sampling, name) for name in kept})
