r"""The final answer of a solution: the content of its last balanced \boxed{...}.

One linear scan with explicit counters, so nesting cannot exhaust a stack. It never guesses: no box, no answer; an
unclosed box is not an answer. What it does not do: judge the answer, or look into the thoughts (the caller passes the
part after `</think>`, see `format.py`). Who calls this: `format.py`, `symbolic.py`, `reward.py`.
"""

from __future__ import annotations

import re

MAX_SCAN_CHARACTERS = 65_536
"""only the end of a longer solution is scanned: the last box is what counts, and the caller's event loop is not held"""
MAX_ANSWER_CHARACTERS = 2_000
MAX_BRACE_LEVELS = 200
MAX_DIGITS = 400
"""longest run of digits in an answer that is compared by value"""

_TOKEN = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_LONG_DIGITS = re.compile(rf"\d{{{MAX_DIGITS + 1}}}")


def extract_answer(solution: str) -> str | None:
    r"""Return the content of the last balanced \boxed{...}, stripped, or None when there is none.

    Braces escaped as \{ and \} do not count, as in LaTeX. Of nested boxes the one that opens last is taken. The answer
    may be of any size; `within_limits` tells whether it is worth comparing. Source: Magistral (2506.10910), section 3.
    """
    if "\\boxed" not in solution:
        return None
    tail = solution[-MAX_SCAN_CHARACTERS:]
    opened: list[int] = []
    """for each open brace: where the content of its box starts, or -1 for a brace that is no box"""
    best: tuple[int, int] | None = None
    for token in _TOKEN.finditer(tail):
        text = token.group()
        if text == "{":
            opened.append(-1)
        elif text == "}":
            start = opened.pop() if opened else -1
            if start >= 0 and (best is None or start > best[0]):
                best = (start, token.start())
        elif text.startswith("\\boxed"):
            opened.append(token.end())
    return None if best is None else tail[best[0] : best[1]].strip()


def within_limits(answer: str) -> bool:
    """True when the answer is small enough to be compared: characters, brace levels, digits in a row."""
    if len(answer) > MAX_ANSWER_CHARACTERS or _LONG_DIGITS.search(answer):
        return False
    level = 0
    for character in answer:
        if character in "{([":
            level += 1
            if level > MAX_BRACE_LEVELS:
                return False
        elif character in "})]":
            level = max(0, level - 1)
    return True
