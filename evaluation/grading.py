r"""Grades answers by the kind of task. Untrusted text is compared in killable processes, programs run in sandboxes.

    answer         the last \boxed{...} means the same as the ground truth (verify/answer_checker.py)
    program        the first fenced block that names a language passes every test (verify/code)
    instructions   every instruction is followed, to the letter (verify/verifiers/instructions.py)
    calls          the right functions are called with accepted values, or none if none fits (verify/verifiers/calls.py)

Only the text after the reasoning is graded. A model need not think, so the reward's format rules do not apply here.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, NamedTuple

from evaluation.client import ParsedResponse
from evaluation.tasks import BenchmarkTask, Kind
from shared.types import Verdict
from verify.answer_checker import AnswerChecker
from verify.code.runner import ProgramVerifier
from verify.verifiers import Answer, Needs, verifier_for, verifier_of
from verify.verifiers.calls import FunctionCall, read_calls
from verify.verifiers.instructions import follow

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


DOMAINS: dict[Kind, str] = {"program": "code", "instructions": "instructions", "calls": "calls"}
"""kind of a task -> the domain whose verifier checks it; an answer is checked by that of its problem's domain"""


class ResponseGrader:
    """Grades responses with the verifiers of their tasks' domains."""

    def __init__(self, checker: AnswerChecker, programs: ProgramVerifier):
        self.tools: dict[Needs, Any] = {"answer checker": checker, "sandbox": programs}

    async def grade(self, task: BenchmarkTask, response: ParsedResponse) -> Grade:
        """Grade a response. Raises RunError if no verifier process can start."""
        verifier = verifier_of(DOMAINS[task.kind]) if task.kind in DOMAINS else verifier_for(task.problem)
        text = response.answer
        if task.tools is not None and (response.calls or text.strip()):
            text = json.dumps([call._asdict() for call in response.calls or []])
        answer = verifier.extract(text)
        if answer is None and task.kind in ("answer", "program"):
            missed = "```" in text if task.kind == "program" else _mentions(text, task.problem.answer)
            return Grade(Verdict.NO_ANSWER, verifier.missing, missed=missed)
        if answer is None and task.tools is not None:
            return Grade(Verdict.NO_ANSWER, "no call that is understood and no answer")
        source, language = (answer.source, answer.language) if answer else (text, "")
        finding = await verifier.verify(Answer(task.problem, source, language), self.tools)
        grade = Grade(finding.verdict, _storable(finding.reason), source)
        if task.kind == "instructions":
            return await asyncio.to_thread(_with_loose, grade, task, text)
        if task.kind == "calls":
            calls = read_calls(source)
            listed = None if calls is None else _storable(", ".join(map(_line, calls)) or "no call")
            return grade._replace(extracted=listed)
        return grade


def _with_loose(grade: Grade, task: BenchmarkTask, text: str) -> Grade:
    """Add what the loose rules of IFEval say."""
    tests = task.problem.tests
    rules = follow(text, tests["instruction_id_list"], tests["kwargs"])
    followed = (len(rules.strict), sum(rules.strict), sum(rules.loose))
    loose = all(rules.loose) and bool(text.strip())
    return grade._replace(extracted=None, followed=followed, loose=loose)


def _line(call: FunctionCall) -> str:
    return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"


def _mentions(answer: str, ground_truth: str) -> bool:
    """Whether the end of an answer contains the true one, not as a part of a longer number or word."""
    return bool(re.search(rf"(?<![\w.,]){re.escape(ground_truth.strip())}(?![\w]|[.,]\d)", answer[-LAST_CHARACTERS:]))


def _storable(text: str) -> str:
    """Return the text without lone surrogates, which programs and JSON escapes can make and records cannot hold."""
    return text.encode("utf-8", "replace").decode()
