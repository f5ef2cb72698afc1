"""A rank of this process: its calls, their errors, and calls that hang."""

import asyncio
import threading
from collections.abc import Callable
from itertools import count

import pytest

from rollout.local_engine import LocalConnection
from shared.errors import DeadlineExceeded, NonFinite
from shared.launch.calls import call, request


class Rank:
    """Doubles numbers, one call after the other."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.doubled = list[int]()

    @call("doubling of {number}", deadline=60)
    def double(self, number: int) -> int:
        """Twice the number. Raises NonFinite for -1; waits to be let go for -2."""
        if number == -1:
            raise NonFinite("-1 has no double")
        if number == -2:
            self.go_on.wait()
        self.doubled.append(number)
        return 2 * number

    @call("stop", deadline=60, last=True)
    def stop(self) -> None:
        """End."""


async def ask(
    link: LocalConnection, number: int, deadline_s: float = 60.0, excused: Callable[[], set[int]] = set
) -> int:
    [doubled] = await link.call_all({0: request(Rank.double, number)}, deadline_s, excused)
    return doubled


def test_calls_are_carried_out_in_order_until_the_last_and_errors_are_those_of_the_rank():
    async def story() -> None:
        rank, link = Rank(), LocalConnection("the rank")
        serving = asyncio.create_task(link.serve(rank))
        assert await asyncio.gather(*(ask(link, number) for number in range(3))) == [0, 2, 4]
        await link.post(0, request(Rank.double, 3))
        with pytest.raises(NonFinite, match="^the rank: -1 has no double$"):
            await ask(link, -1)
        await link.post(0, request(Rank.double, -1))
        assert await ask(link, 4) == 8 and rank.doubled == [0, 1, 2, 3, 4]
        assert await link.call_all({0: request(Rank.stop)}, 60.0) == [None]
        await serving

    asyncio.run(story())


def test_a_call_that_hangs_is_named_unless_the_rank_is_excused():
    async def story() -> None:
        rank, link = Rank(), LocalConnection("the rank")
        serving = asyncio.create_task(link.serve(rank))
        with pytest.raises(DeadlineExceeded, match="0 s for the rank in phase 'doubling of -2'"):
            await ask(link, -2, 0.01)
        rank.go_on.set()
        assert await ask(link, 1) == 2 and rank.doubled == [-2, 1], "the late answer went to nobody"
        rank.go_on.clear()
        times = count(1)

        def excused() -> set[int]:
            if next(times) == 3:
                rank.go_on.set()
            return {0}

        assert await ask(link, -2, 0.01, excused) == -4, "it is excused until it answers"
        await link.post(0, request(Rank.stop))
        await serving

    asyncio.run(story())
