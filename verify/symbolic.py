r"""Decides whether two mathematical answers are equal in meaning: cheap cases here, the rest in a killable process.

`math/plain.py` decides nearly all real answers in the caller. What takes algebra (radicals, variables, equations) goes
to `math/algebra.py`, and only ever inside a worker process (`pool.py`), because no timer can stop it from outside. Text
of the policy is never evaluated as Python.

Verdicts: the true answer is not understood -> UNVERIFIABLE; the policy's answer is not understood or beyond the limits
-> WRONG, unless the spelling is equal.
"""

from __future__ import annotations

from shared.types import Verdict
from verify.extract import extract_answer
from verify.format import after_thoughts
from verify.math.plain import decide


def compare(gold: str, pred: str) -> Verdict:
    """Grade an extracted answer, blocking; the slow part runs in a process that is killed at its deadline.

    Not for event loops: there use `pool.Pool.grade`.
    """
    verdict = decide(gold, pred)
    if verdict is not None:
        return verdict
    from verify.pool import compare_blocking  # the pool knows this module

    return compare_blocking(gold, pred)


def is_equivalent(gold: str, pred: str) -> bool:
    r"""Return whether `pred` means the same as the true answer `gold`; both with or without \boxed{...}. Blocking.

    Anything but a proven equality is False, a timeout included; the verdict of `grade` says more.
    """
    return compare(_unboxed(gold), _unboxed(pred)) is Verdict.CORRECT


def grade(gold: str, response: str) -> Verdict:
    r"""Extract the final answer of a response (last \boxed{...} after any thoughts) and grade it. Blocking.

    A response without a balanced box, or whose thoughts never end, is NO_ANSWER: nothing is guessed from prose.
    """
    solution = after_thoughts(response)
    answer = None if solution is None else extract_answer(solution)
    return Verdict.NO_ANSWER if answer is None else compare(_unboxed(gold), answer)


def _unboxed(text: str) -> str:
    inner = extract_answer(text)
    return text if inner is None else inner
