r"""Grades answers by the kind of task. Untrusted text is compared in killable processes, programs run in sandboxes.

    answer         the last \boxed{...} means the same as the true answer (verify/pool.py)
    program        the first fenced block that names a language passes every test (verify/code)
    instructions   every instruction is followed, to the letter (verify/instructions.py)
    calls          the right functions are called with accepted values, or none if none fits (verify/calls.py)

Only the text after the thoughts is graded. A model need not think, so the reward's format rules do not apply here.
"""

from __future__ import annotations

import asyncio
import re
from typing import NamedTuple

from evaluation.client import ParsedResponse
from evaluation.tasks import BenchmarkTask
from shared.types import Verdict
from verify.calls import Call, fault, read_calls
from verify.code.programs import Programs
from verify.extract import extract_answer
from verify.fence import first_program
from verify.instructions import follow
from verify.pool import Pool
from verify.reward import REASONS

LAST_CHARACTERS = 2000
"""length of the end of an answer that is searched for the true one if nothing could be extracted"""


class Grade(NamedTuple):
    """The grade of one response."""

    verdict: Verdict
    reason: str
    extracted: str | None = None
    """the part that was graded; None if there is none, or if the whole answer was"""
    missed: bool = False
    """whether nothing could be extracted although the text seems to contain the right answer"""
    followed: tuple[int, int, int] | None = None
    """instructions: their number, the number followed strictly, and that followed by the loose rules"""
    loose: bool | None = None
    """instructions: whether all are followed by the loose rules"""


class ResponseGrader:
    """Grades responses with a pool of verifier processes and one of sandboxes."""

    def __init__(self, pool: Pool, programs: Programs):
        self.pool, self.programs = pool, programs

    async def grade(self, task: BenchmarkTask, response: ParsedResponse) -> Grade:
        """Grade a response. Raises RunError if no verifier process can start."""
        if task.kind == "answer":
            return await self._answer(task, response.answer)
        if task.kind == "program":
            return await self._program(task, response.answer)
        if task.kind == "instructions":
            return await asyncio.to_thread(_instructions, task, response.answer)
        return _calls(task, response)

    async def _answer(self, task: BenchmarkTask, answer: str) -> Grade:
        gold, extracted = task.problem.answer, extract_answer(answer)
        if extracted is None:
            return Grade(Verdict.NO_ANSWER, "no balanced \\boxed{...}", missed=_mentions(answer, gold))
        verdict = await self.pool.grade(gold, extracted)
        return Grade(verdict, REASONS[verdict], extracted)

    async def _program(self, task: BenchmarkTask, answer: str) -> Grade:
        program = first_program(answer)
        if program is None:
            return Grade(Verdict.NO_ANSWER, "no closed ``` block that names a language", missed="```" in answer)
        result = await self.programs.run(task.problem, program.source, program.language, 0)
        reason = "every test passed" if result.verdict is Verdict.CORRECT else result.reason or "a test failed"
        return Grade(result.verdict, _storable(reason), program.source)


def _instructions(task: BenchmarkTask, answer: str) -> Grade:
    tests = task.problem.tests
    found = follow(answer, tests["instruction_id_list"], tests["kwargs"])
    followed = (len(found.strict), sum(found.strict), sum(found.loose))
    if not answer.strip():
        return Grade(Verdict.NO_ANSWER, "no answer", followed=followed, loose=False)
    names = zip(tests["instruction_id_list"], found.strict, strict=True)
    broken = ", ".join(name for name, kept in names if not kept)
    verdict = Verdict.WRONG if broken else Verdict.CORRECT
    reason = f"not followed: {broken}" if broken else "every instruction is followed"
    return Grade(verdict, reason, followed=followed, loose=all(found.loose))


def _calls(task: BenchmarkTask, response: ParsedResponse) -> Grade:
    """Grade function calls, of the API or in the answer; there, no call is an empty list, which the prompt asks for."""
    if task.tools is None:
        calls = read_calls(response.answer)
        nothing = "no JSON list of calls"
    else:
        calls = response.calls if response.calls or response.answer.strip() else None
        nothing = "no call that is understood and no answer"
    if calls is None:
        return Grade(Verdict.NO_ANSWER, nothing)
    wrong = fault(calls, task.problem.tests)
    told = ", ".join(map(_line, calls)) or "no call"
    return Grade(Verdict.WRONG if wrong else Verdict.CORRECT, _storable(wrong or "as wanted"), _storable(told))


def _line(call: Call) -> str:
    return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"


def _mentions(answer: str, gold: str) -> bool:
    """Whether the end of an answer contains the true one, not as a part of a longer number or word."""
    return bool(re.search(rf"(?<![\w.,]){re.escape(gold.strip())}(?![\w]|[.,]\d)", answer[-LAST_CHARACTERS:]))


def _storable(text: str) -> str:
    """Return the text without lone surrogates, which programs and JSON escapes can make and records cannot hold."""
    return text.encode("utf-8", "replace").decode()
