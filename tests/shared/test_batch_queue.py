"""A queue that gives all it has at once."""

import asyncio

import pytest

from shared.launch.batch_queue import BatchQueue


def test_everything_that_gathered_comes_at_once_and_in_order() -> None:
    async def story() -> list[list[int]]:
        queue: BatchQueue[int] = BatchQueue()
        queue.put(1)
        queue.put(2)
        taken = [await queue.take()]
        waiting = asyncio.ensure_future(queue.take())
        await asyncio.sleep(0.01)
        assert not waiting.done() and len(queue) == 0, "nothing is taken twice"
        queue.put(3)
        queue.put(4)
        return [*taken, await waiting]

    assert asyncio.run(story()) == [[1, 2], [3, 4]]


def test_a_taker_that_gives_up_loses_nothing() -> None:
    async def story() -> list[str]:
        queue: BatchQueue[str] = BatchQueue()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.take(), 0.01)
        queue.put("late")
        return await queue.take()

    assert asyncio.run(story()) == ["late"]
