"""Hostile answers through the pool: each answered within the deadline, the workers alive, memory flat."""

from __future__ import annotations

import asyncio
import time

import psutil
import pytest

from shared.types import Verdict
from tests.verify.hostile import hostile
from verify.extract import extract_answer
from verify.math.plain import decide
from verify.pool import Pool

DEADLINE_S = 1.0


def test_cheap_stage_and_extraction_never_raise_and_are_quick() -> None:
    for gold, answer in hostile(1_500, seed=2):
        start = time.perf_counter()
        decide(gold, answer)
        extract_answer(f"so \\boxed{{{answer}}}")
        assert time.perf_counter() - start < 0.5, answer[:60]


@pytest.mark.slow
def test_pool_answers_each_within_the_deadline() -> None:
    async def use() -> None:
        async with Pool(workers=2, deadline_s=DEADLINE_S) as pool:
            assert await pool.grade("x+1", "1+x") is Verdict.CORRECT
            await asyncio.sleep(1.5)  # both workers have loaded SymPy
            own = psutil.Process().memory_info().rss
            for gold, answer in hostile(400):
                start = time.perf_counter()
                verdict = await pool.grade(gold, answer)
                assert time.perf_counter() - start < DEADLINE_S + 0.6, answer[:60]
                assert verdict is not Verdict.CORRECT or len(answer) < 40, answer[:60]
            assert await pool.grade("x+2", "2+x") is Verdict.CORRECT
            assert len(pool.pids) == 2 and pool.counts["crashes"] == 0
            assert psutil.Process().memory_info().rss - own < 64 << 20
            for pid in pool.pids:
                assert psutil.Process(pid).memory_info().rss < 400 << 20

    asyncio.run(use())
