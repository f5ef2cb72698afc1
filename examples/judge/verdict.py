"""The verifier of the example "judge": a verdict, as judges of debates give it, names the right answer."""

from __future__ import annotations

from verify.oversight.prompts import read_verdict
from verify.verifiers import Answer, verifier


@verifier("verdict", answer_in="response")
def names_the_right_answer(answer: Answer) -> bool:
    """Return whether the response ends in "Answer: n" with n the row's answer."""
    return str(read_verdict(answer.text)) == answer.problem.answer
