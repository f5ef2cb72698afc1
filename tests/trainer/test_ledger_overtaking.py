"""Who was overtaken how often: counted on the groups in front only, equal to a look at all of them."""

from __future__ import annotations

import asyncio
import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.types import Group, Prompt
from tests.trainer.test_ledger import PROBLEM, finish_group, make_config
from trainer.ledger import Interrupted, Ledger, LedgerState
from trainer.stages import Stages


class Thorough(Ledger):
    """Looks at every waiting group."""

    def _take_one(self, group: Group) -> Group:
        index = group.prompt.index
        del self.groups[index], self._taken_after[index]
        for waiting in self._taken_after:
            if waiting < index:
                self._taken_after[waiting] += 1
        return group


async def take_and_interrupt(ledger: Ledger) -> list[Group]:
    """A batch, or nothing: what was taken in part is put back, as after Ctrl-C."""
    waiting = asyncio.ensure_future(ledger.take())
    await asyncio.sleep(0)
    ledger.interrupt()
    try:
        return await waiting
    except Interrupted:
        return []
    finally:
        ledger.interrupted = False


async def play(ledger: Ledger, seed: int) -> tuple[list[int], bytes]:
    """Open, finish in any order, take, put back, save and restore; ([taken], the state at the end)."""
    dice, taken = random.Random(seed), []
    ledger.trained_groups = 40 * ledger.OPENING_GROUPS  # the window is open
    for _ in range(300):
        event, batch = dice.random(), []
        unfinished = [index for index, group in ledger.groups.items() if not group.complete]
        if event < 0.35 and ledger.wanted():
            ledger.open(Prompt(ledger.next_index, PROBLEM, [1]), [0, 0])
        elif event < 0.7 and unfinished:
            finish_group(ledger, dice.choice(unfinished), [1.0, float(dice.random() < 0.1)])
        elif event < 0.95 and (group := ledger._next()) is not None:
            batch = [ledger._take_one(group)]
        elif event < 0.97:
            batch = await take_and_interrupt(ledger)
        elif event > 0.99:
            state = msgspec.json.encode(ledger.state())
            ledger.restore(msgspec.json.decode(state, type=LedgerState))
        taken += [group.prompt.index for group in batch]
        ledger.busy_slots -= len(batch)
    return taken, msgspec.json.encode(ledger.state())


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), window=st.sampled_from([1, 4, 13]))
def test_counting_in_front_is_counting_all(seed: int, window: int) -> None:
    config = make_config(max_async_level=3, reorder_window=window, steps=2_500)
    taken, state = asyncio.run(play(Ledger(Stages(config)), seed))
    assert (taken, state) == asyncio.run(play(Thorough(Stages(config)), seed))
    assert len(taken) > 20
