r"""The final answer of a response: the content of its last balanced \boxed{...}.

One linear scan with explicit counters, so nesting cannot exhaust a stack. It never guesses: without a box
there is no answer, and an unclosed box is not an answer.
"""

from __future__ import annotations

import re

MAX_SCAN_CHARACTERS = 65_536
"""only the end of a longer response is scanned: the last box is what counts, and the caller's event loop is not held"""
MAX_ANSWER_CHARACTERS = 2_000
MAX_BRACE_LEVELS = 200
MAX_JOIN_CHARACTERS = 40
"""longest text between two boxes of one answer"""
MAX_DIGITS = 400
"""longest run of digits in an answer that is compared by value"""

_TOKEN = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_JOIN = re.compile(
    r"^[\s$,;、，]*(?:\\(?:text|mbox)\s*\{\s*)?(?:and|or|和|或|与|et|ou|und|oder|y|o|и|или)?(?:\s*\})?[\s$,;、，]*"
    r"(?:[A-Za-z](?:_\{?\w\}?)?\s*=\s*)?$"
)
_LONG_DIGITS = re.compile(rf"\d{{{MAX_DIGITS + 1}}}")


def extract_answer(response: str) -> str | None:
    r"""Return the content of the last balanced \boxed{...}, stripped, or None when there is none.

    Boxes that stand side by side ("\boxed{1} and \boxed{2}") are one answer of several parts: "1, 2"; nothing is chosen
    among them. Braces escaped as \{ and \} do not count, as in LaTeX. Of nested boxes the one that opens last is taken.
    The answer may be of any size; `within_limits` tells whether it is worth comparing. Source: Magistral (2506.10910),
    section 3.
    """
    answers = list(dict.fromkeys(response[start:end].strip() for start, end in find_answer(response)))
    return ", ".join(answers) if answers else None


def find_answer(response: str) -> list[tuple[int, int]]:
    """Return (start, end) of each part of the answer of `extract_answer` in the response, [] when there is none."""
    tail, skipped = _tail(response)
    return [(skipped + start, skipped + end) for _, start, end, _ in _final(tail, _all_boxes(tail))]


def find_boxes(response: str) -> list[tuple[int, int]]:
    """Return (start, end) of all balanced boxes, from command to closing brace, in the order of their beginnings."""
    tail, skipped = _tail(response)
    return [(skipped + start, skipped + end) for start, _, _, end in _all_boxes(tail)]


def _tail(response: str) -> tuple[str, int]:
    """Return the part that is scanned, and the number of characters before it."""
    skipped = max(len(response) - MAX_SCAN_CHARACTERS, 0)
    return response[skipped:], skipped


def _all_boxes(tail: str) -> list[tuple[int, int, int, int]]:
    """Return (command start, content start, content end, box end) of every box, in the order in which they open."""
    if "\\boxed" not in tail:
        return []
    boxes: list[tuple[int, int, int, int]] = []
    opened: list[tuple[int, int]] = []
    """for each open brace: where its box and the content start, or -1 for a brace that is no box"""
    for token in _TOKEN.finditer(tail):
        text = token.group()
        if text == "{":
            opened.append((-1, -1))
        elif text == "}":
            start, content = opened.pop() if opened else (-1, -1)
            if start >= 0:
                boxes.append((start, content, token.start(), token.end()))
        elif text.startswith("\\boxed"):
            opened.append((token.start(), token.end()))
    return sorted(boxes)


def _final(tail: str, boxes: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Return the last box, preceded by those that form one list with it. boxes: in the order in which they open."""
    if not boxes:
        return []
    first = last = len(boxes) - 1
    while first > 0 and boxes[first][0] >= boxes[first - 1][3]:
        between = tail[boxes[first - 1][3] : boxes[first][0]]
        if len(between) > MAX_JOIN_CHARACTERS or not _JOIN.match(between):
            break
        first -= 1
    return boxes[first : last + 1]


def within_limits(answer: str) -> bool:
    """Return whether the answer is small enough to be compared: characters, brace levels, digits in a row."""
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
