r"""Are two mathematical answers equal in meaning? The cheap part here, the rest in a killable process.

Order: size limits; equal spelling; form by form (`structure.py`) with exact numbers (`quantity.py`) and words. What
that cannot decide (radicals, variables, equations) goes to SymPy, and only ever inside a worker process (`pool.py`),
because no timer can stop it from outside. Text of the policy is never evaluated as Python.

Verdicts: the true answer is not understood -> UNVERIFIABLE; the policy's answer is not understood or beyond the limits
-> WRONG, unless the spelling is equal. What it does not do: find several answers in one response and choose.
Who calls this: `pool.py` (decide), `worker.py` (through `algebra.py`), people and tests (is_equivalent, grade).
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from shared.types import Verdict
from verify.extract import extract_answer, within_limits
from verify.format import CLOSE
from verify.normal import normalise, spelling_key
from verify.number import TooLarge
from verify.quantity import Quantity, quantity, same_unit
from verify.structure import same_form

SIGNIFICANT_DIGITS = 6
"""a decimal with at least so many significant digits may stand for an exact non-decimal number"""

_FUNCTION_NAMES = (
    "sqrt frac sin cos tan cot sec csc log ln exp arcsin arccos arctan sinh cosh tanh max min gcd lcm mod binom det "
    "deg lim sum prod int infty infinity"
)
_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
_SHORT_WORDS = frozenset({"yes", "no", "odd", "even", "all", "none", "and", "or", "red", "true", "false", "not"})
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"(?<!\\)[^\W\d_]+")
_HAN = re.compile(r"[\u4e00-\u9fff]")
_CHOICE = re.compile(r"^\(?\s*([A-Z])\s*[).:]?$")
_HUGE = re.compile(r"\d{5,}!|[\d)}]\^\s*\{?-?\d{5,}|\d\^\s*\{[^{}]*\d\s*\^|\d\^\s*\(?\d+\^|!{2,}")
_SUM = re.compile(r"\d\s*[-+*/]|[-+*/^]\s*\d|\\frac|\\sqrt")
_BASE = re.compile(r"\d_\{?\d")


def words_of(text: str) -> str | None:
    """The words of an answer that is words and not mathematics ("yes", "\\text{Monday}", "星期一"), else None."""
    plain = _TEXT.sub(r" \1 ", text)
    choice = _CHOICE.match(plain.strip())
    if choice:
        return choice.group(1).casefold()
    rest = _COMMAND.sub(" ", plain)
    words = _WORD.findall(rest)
    wordy = any(
        (len(word) >= 4 and word.casefold() not in _FUNCTIONS) or word.casefold() in _SHORT_WORDS or _HAN.search(word)
        for word in words
    )
    if not wordy and not ("\\text" in text and words and _TEXT.sub("", text).strip() == ""):
        return None
    return " ".join(re.sub(r"[^\w\s+\-*/^=<>]|_", " ", plain).casefold().split())


def _same_number(gold: Quantity, answer: Quantity) -> bool:
    if not same_unit(gold.unit, answer.unit) or (gold.percent and answer.unit) or (answer.percent and gold.unit):
        return False
    if gold.percent != answer.percent and gold.value == answer.value:
        return True  # the percent sign was dropped as a unit, on either side
    value = answer.value / 100 if answer.percent else answer.value
    if value == (gold.value / 100 if gold.percent else gold.value):
        return True
    if gold.significant or gold.percent or answer.significant < SIGNIFICANT_DIGITS or gold.value.denominator == 1:
        return False
    return rounds_to(value, answer.decimals, gold.value)


def rounds_to(decimal: Fraction, decimals: int, exact: Fraction) -> bool:
    """True when `decimal`, written with so many digits after the point, is `exact` rounded or cut at the last one."""
    return abs(decimal - exact) < Fraction(1, 10**decimals)


def same_scalar(gold: str, answer: str) -> bool | None:
    """Compare two values without SymPy; None when it takes algebra."""
    if spelling_key(gold) == spelling_key(answer):
        return True
    try:
        left, right = quantity(gold), quantity(answer)
    except TooLarge:
        return False
    if left and right:
        return _same_number(left, right)
    if _HUGE.search(answer) or _HUGE.search(gold) or _BASE.search(gold) or _BASE.search(answer):
        return False
    left_words, right_words = words_of(gold), words_of(answer)
    if left_words is not None or right_words is not None:
        return left_words is not None and left_words == right_words
    if ("=" in gold) != ("=" in answer):
        longer, shorter = (gold, answer) if "=" in gold else (answer, gold)
        name, _, value = longer.partition("=")
        if "=" in value or _SUM.search(name) or not re.search(r"[A-Za-z]", name):
            return False
        value = value.strip()
        return same_scalar(shorter, value) if longer is answer else same_scalar(value, shorter)
    return None


def decide(gold: str, answer: str) -> Verdict | None:
    """Grade without SymPy: a verdict, or None when it takes a worker process. Never raises, never takes long."""
    if not gold.strip():
        return Verdict.UNVERIFIABLE
    if not answer.strip():
        return Verdict.WRONG
    if not within_limits(answer):
        return Verdict.WRONG
    if not within_limits(gold):
        return Verdict.UNVERIFIABLE
    return _decide(gold, answer)


@lru_cache(maxsize=16384)
def _decide(gold: str, answer: str) -> Verdict | None:
    """`decide` for pairs within the limits: only those may fill the cache."""
    left, right = normalise(gold), normalise(answer)
    if left and spelling_key(left) == spelling_key(right):
        return Verdict.CORRECT
    if not left or not right:
        return Verdict.WRONG if left else Verdict.UNVERIFIABLE
    same = same_form(left, right, same_scalar)
    if same is None:
        return None
    return Verdict.CORRECT if same else Verdict.WRONG


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
    r"""True when `pred` means the same as the true answer `gold`; both with or without \boxed{...}. Blocking.

    Anything but a proven equality is False, a timeout included; `grade` tells why.
    """
    return compare(_unboxed(gold), _unboxed(pred)) is Verdict.CORRECT


def grade(gold: str, response: str) -> Verdict:
    r"""Extract the final answer of a response (last \boxed{...} after any thoughts) and grade it. Blocking.

    A response without a balanced box is WRONG: nothing is guessed from prose.
    """
    answer = extract_answer(response.rpartition(CLOSE)[2])
    return Verdict.WRONG if answer is None else compare(_unboxed(gold), answer)


def _unboxed(text: str) -> str:
    inner = extract_answer(text)
    return text if inner is None else inner
