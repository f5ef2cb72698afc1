"""The verifiers of the example "judge": of a verdict, as judges of debates give it, and of what an agent argues."""

from __future__ import annotations

from oversight.prompts import read_verdict
from oversight.protocol import Rules
from oversight.speech import read_speech
from verify.verifiers import Answer, verifier


@verifier("verdict", answer_in="response")
def names_the_right_answer(answer: Answer) -> bool:
    """Return whether the response ends in "Answer: n" with n the row's answer."""
    return str(read_verdict(answer.text)) == answer.problem.answer


@verifier("speech", answer_in="response")
def quotes_what_speaks_for_it(answer: Answer) -> bool:
    """Return whether the argument quotes the article word for word, and the row's answer is in it."""
    speech = read_speech(answer.text, Rules().words, answer.problem.text)
    passages = speech.passages
    return bool(passages) and all(one.verified for one in passages) and answer.problem.answer in speech.argument
