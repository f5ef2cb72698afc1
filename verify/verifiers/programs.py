"""The domain "code": the program of a response must pass the tests of its problem (`verify/code`)."""

from __future__ import annotations

from shared.chat import AnswerFormat
from shared.types import Problem, Verdict
from verify.code.runner import ProgramVerifier
from verify.code.tests import Test, read_tests
from verify.verifiers import Answer, Finding, verifier

REASONS = {
    Verdict.CORRECT: "every test passed",
    Verdict.WRONG: "a test failed",
    Verdict.CRASH: "the sandbox of the program died twice",
    Verdict.UNVERIFIABLE: "the tests cannot be run",
    Verdict.SANDBOX_REFUSED: "no program was run",
}
FORM = AnswerFormat(
    "the whole program in a Markdown block that names its language (```python or ```cpp)",
    "the program in a ```python or ```cpp block",
)


def _validate(problem: Problem) -> list[Test]:
    return read_tests(problem.tests)


@verifier("code", ground_truth="tests", answer_in="code block", needs="sandbox", form=FORM, validate=_validate)
async def passes_tests(answer: Answer, programs: ProgramVerifier) -> Finding:
    """Run the program on the tests of (problem, group)."""
    result = await programs.run(answer.problem, answer.text, answer.language, answer.group)
    reason = REASONS[result.verdict] + (f": {result.reason}" if result.reason else "")
    return Finding(result.verdict, result.share, reason)
