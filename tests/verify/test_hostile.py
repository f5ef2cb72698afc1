"""Hostile answers through the pool: each answered within the deadline, the workers alive, memory flat."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from shared.types import Verdict
from tests.processor_time import at_most
from tests.verify.hostile import hostile, written
from verify.answer_checker import AnswerChecker
from verify.extract import extract_answer
from verify.math.plain import decide

DEADLINE_S = 1.0


def test_cheap_stage_and_extraction_never_raise_and_are_quick() -> None:
    for ground_truth, answer in hostile(700, seed=2):
        with at_most(0.5):
            decide(ground_truth, answer)
            extract_answer(f"so \\boxed{{{answer}}}")


@pytest.mark.parametrize("answer", written("cheap"), ids=lambda answer: ascii(answer[:16]))
def test_cheap_stage_finds_no_hostile_answer_right(answer: str) -> None:
    for ground_truth in ("7", "x^2+1", "(1,2)", "\\text{yes}"):
        with at_most(0.5):
            verdict = decide(ground_truth, answer)
        assert verdict is None or verdict is Verdict.WRONG or (ground_truth == "7" and answer == "7\0")


@pytest.mark.slow
def test_pool_answers_each_within_the_deadline() -> None:
    async def use() -> None:
        async with AnswerChecker(workers=2, deadline_s=DEADLINE_S) as checker:
            assert await checker.check("x+1", "1+x") is Verdict.CORRECT
            await asyncio.sleep(1.5)  # both workers have loaded SymPy
            own = psutil.Process().memory_info().rss
            for ground_truth, answer in hostile(400):
                verdict = await asyncio.wait_for(checker.check(ground_truth, answer), 60)
                assert verdict is not Verdict.CORRECT or len(answer) < 40, answer[:60]
            assert await checker.check("x+2", "2+x") is Verdict.CORRECT
            assert len(checker.pids) == 2 and checker.counts["crashes"] == 0
            assert psutil.Process().memory_info().rss - own < 64 << 20
            for pid in checker.pids:
                assert psutil.Process(pid).memory_info().rss < 400 << 20

    asyncio.run(use())
