"""Answers checked at once, as an event loop must not: for tests of the rules and the benchmark of the verifier."""

from shared.types import Verdict
from verify.answer_checker import check_answer
from verify.extract import extract_answer
from verify.format import after_reasoning
from verify.math.algebra import equal
from verify.math.plain import decide


def judge(ground_truth: str, answer: str) -> Verdict:
    """Both stages of the answer checker without its process."""
    ground_truth, answer = _unboxed(ground_truth), _unboxed(answer)
    return decide(ground_truth, answer) or equal(ground_truth, answer)


def is_equivalent(ground_truth: str, answer: str) -> bool:
    r"""Return whether an answer means the same as the ground truth; both with or without \boxed{...}. Blocking.

    Anything but a proven equality is False, a timeout included; the verdict of `check_completion` says more.
    """
    return check_answer(_unboxed(ground_truth), _unboxed(answer)) is Verdict.CORRECT


def check_completion(ground_truth: str, completion: str) -> Verdict:
    r"""Extract the final answer of a completion (last \boxed{...} after any reasoning) and check it. Blocking.

    A completion without a balanced box, or whose reasoning never ends, is NO_ANSWER: nothing is guessed from prose.
    """
    response = after_reasoning(completion)
    answer = None if response is None else extract_answer(response)
    return Verdict.NO_ANSWER if answer is None else check_answer(_unboxed(ground_truth), answer)


def _unboxed(text: str) -> str:
    inner = extract_answer(text)
    return text if inner is None else inner
