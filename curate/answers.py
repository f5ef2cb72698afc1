r"""Decides whether a true answer can be checked: the verifier understands it, and it is not prose.

An answer equals itself by its spelling alone, which proves nothing. So it is also compared with probes that no answer
equals: if the verifier then does not understand the true answer, no answer can be graded against it.
"""

from __future__ import annotations

import re
from typing import Protocol

from shared.types import Verdict

PROBES = (r"q\sqrt{7919}+1", "3:07 p.m.")
"""an expression and a time of day; an answer that is understood is found different from one of them"""
MOST_WORDS = 6
"""largest number of words of an answer; the longest in MATH has four"""
_NO_ANSWER = re.compile(
    r"^\W*(?:see\s+(?:the\s+)?(?:solution|proof|below|above|explanation)"
    r"|(?:the\s+)?proof(?:\s+(?:is\s+)?(?:omitted|above|below|complete))?|q\.?e\.?d|"
    r"(?:the\s+)?answers?\s+(?:may|will|can)?\s*var(?:y|ies)|n/?a|omitted|unknown|null|nan|tbd"
    r"|left\s+to\s+the\s+reader|"
    r"voir\s+(?:la\s+)?(?:solution|preuve)|siehe\s+(?:lösung|beweis)|ver\s+(?:la\s+)?(?:solución|demostración)"
    r"|vedi\s+(?:la\s+)?(?:soluzione|dimostrazione)|"
    r"см\.?\s+(?:решение|доказательство)|доказано|证明略|略|见解析|见证明)\W*$",
    re.IGNORECASE,
)
_TEXT = re.compile(r"\\(?:text\w*|mbox|mathrm|operatorname\*?)\s*\{([^{}]*)\}")
_MATH = re.compile(r"\$[^$]*\$|\\\(.*?\\\)|\\(?:begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_HAN = re.compile(r"[\u4e00-\u9fff]")


class Comparer(Protocol):
    """The part of `verify.pool.Pool` that is used here."""

    async def grade(self, gold: str, answer: str) -> Verdict:
        """Compare an answer with the true one."""
        ...


def count_words(answer: str) -> int:
    """Count words of prose, of two letters or more, outside of formulas; two Chinese characters count as one."""
    prose = _MATH.sub(" ", _TEXT.sub(r" \1 ", answer))
    han = len(_HAN.findall(prose))
    return len(_WORD.findall(_HAN.sub(" ", prose))) + (han + 1) // 2


async def why_not_checkable(comparer: Comparer, answer: str, most_words: int = MOST_WORDS) -> str:
    """Return why answers cannot be graded against this one, "" if they can."""
    if _NO_ANSWER.match(answer):
        return "it stands for an answer and is none"
    words = count_words(answer)
    if words > most_words:
        return f"{words} words of prose"
    verdict = await comparer.grade(answer, answer)
    if verdict is not Verdict.CORRECT:
        return f"compared with itself: {verdict}"
    for probe in PROBES:
        verdict = await comparer.grade(answer, probe)
        if verdict is Verdict.WRONG:
            return ""
    return f"compared with another answer: {verdict}"
