"""The domain "math": an answer means the same as the ground truth (`verify/answer_checker.py`)."""

from __future__ import annotations

from shared.types import Verdict
from verify.answer_checker import AnswerChecker
from verify.verifiers import Answer, Finding, verifier

REASONS = {
    Verdict.CORRECT: "answer is right",
    Verdict.WRONG: "answer differs from the true one",
    Verdict.TIMEOUT: "verifier killed at its deadline",
    Verdict.CRASH: "verifier process died",
    Verdict.UNVERIFIABLE: "the ground truth is not understood",
}


@verifier("math", needs="answer checker")
async def means_the_same(answer: Answer, checker: AnswerChecker) -> Finding:
    """Compare the answer with the problem's."""
    verdict = await checker.check(answer.problem.answer, answer.text)
    return Finding(verdict, float(verdict is Verdict.CORRECT), REASONS[verdict])
