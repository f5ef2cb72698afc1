"""Completions that outlive an engine: when one dies, the completions under way continue in the next.

A request with a seed, or at temperature 0, is sampled again from its beginning: the same tokens come, those returned
before are skipped, and if rounding gives a different token it ends with EngineDied. Any other continues after its
tokens as if they were the prompt, provided that nothing in it depends on them (stop strings, penalties and constraints
do: EngineDied). A request that kills engines is found and refused (suspects.py).
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
    """Raised when the engine process is gone; a retry may reach its successor."""


class LedElsewhere(EngineDied):
    """Raised when rounding in another batch gave a different token, so that the completion cannot be continued."""


class Lives:
    """Carries the completions of one server from each of its successive engine processes to the next."""

    def __init__(
        self, living: Callable[[], object | None], sample: Callable[[list[int], Sampling], AsyncGenerator[Delta, None]]
    ):
        """living: returns the current engine. sample: samples one completion in it; raises EngineDied, after `bury`."""
        self._living, self._sample = living, sample
        self.suspects = Suspects()
        self.over = False
        """whether there will be no further engine"""
        self._buried: object | None = None
        self._successor: asyncio.Future[bool] | None = None
        """resolves to True when the next engine is ready, to False if there will be none; None while no task waits"""

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        """Sample one completion, in several engines if one dies. Raises EngineDied, Guilty."""
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
        """Yield the deltas after the tokens that were returned already. Raises EngineDied."""
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
        """Wait until there is an engine other than `engine`. Raises EngineDied if there will be none."""
        if self.over:
            raise EngineDied
        if self._living() is not engine and self._living() is not None:
            return
        if self._successor is None:
            self._successor = asyncio.get_running_loop().create_future()
        if not await asyncio.shield(self._successor):
            raise EngineDied

    def tell_waiting(self, there: bool) -> None:
        """Wake the requests that wait: the next engine is ready (`there`), or there will be none."""
        waiting, self._successor = self._successor, None
        if waiting is not None:
            waiting.set_result(there)

    def bury(self, engine: object, *, meant: bool = False) -> None:
        """Record once that an engine is dead. Unless that was intended (`meant`), a request may have caused it."""
        if self._buried is engine:
            return
        self._buried = engine
        if not meant and self.suspects.note_death() is not None:
            log.error("a request was running at %d deaths of the engine: it is not tried again", DEATHS)


def repeatable(sampling: Sampling) -> bool:
    """Whether sampling it again gives the same tokens, apart from rounding."""
    return sampling.seed is not None or sampling.temperature == 0


def plain(sampling: Sampling) -> bool:
    """Whether it does not depend on its earlier tokens, so that it can continue as if they were the prompt."""
    kept = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "logprobs")
    return sampling == type(sampling)(**{name: getattr(sampling, name) for name in kept})
