"""A queue that gives all it has at once."""

import asyncio

import pytest

from shared.inbox import Inbox


def test_everything_that_gathered_comes_at_once_and_in_order() -> None:
    async def story() -> list[list[int]]:
        inbox: Inbox[int] = Inbox()
        inbox.put(1)
        inbox.put(2)
        taken = [await inbox.take()]
        waiting = asyncio.ensure_future(inbox.take())
        await asyncio.sleep(0.01)
        assert not waiting.done() and len(inbox) == 0, "nothing is taken twice"
        inbox.put(3)
        inbox.put(4)
        return [*taken, await waiting]

    assert asyncio.run(story()) == [[1, 2], [3, 4]]


def test_a_taker_that_gives_up_loses_nothing() -> None:
    async def story() -> list[str]:
        inbox: Inbox[str] = Inbox()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(inbox.take(), 0.01)
        inbox.put("late")
        return await inbox.take()

    assert asyncio.run(story()) == ["late"]
