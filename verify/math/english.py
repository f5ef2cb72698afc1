r"""English around and inside an answer: frames ("The answer is 5", "Option D"), number words, exceptions.

Frames are dropped only where what is left is the answer itself; a frame that denies ("is not") stays. Numbers in words
are read only when they are the whole answer. What it does not do: other words (`words.py`).
Who calls this: `normal.py`.
"""

from __future__ import annotations

import re

_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_UNITS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SMALL = {word: value for value, word in enumerate(_UNITS)} | {
    word: 10 * value for value, word in enumerate(_TENS, start=2)
}
_LARGE = {"hundred": 100, "thousand": 1_000, "million": 1_000_000, "billion": 1_000_000_000}
_NUMBER = re.compile(rf"^(?:{'|'.join([*_SMALL, *_LARGE, 'and'])}|[\s-])+$")
_CHOICE = re.compile(
    r"^(?:the\s+)?(?:correct\s+|right\s+|best\s+)?(?:answer|choice|option|statement)s?\s*(?:(?:is|are)\s+|:\s*)?"
    r"(?:option\s+|choice\s+)?(\(?[A-J]\)?(?:\s*(?:,|and|&)+\s*\(?[A-J]\)?)*)\s*\.?$",
    re.IGNORECASE,
)
_FRAME = re.compile(
    r"^\\text\s*\{(?![^{}]*\b(?:not|never|no|isn't|between|about|approximately|at least|at most)\b)[^{}]*"
    r"\b(?:is|are|equals|was|be|(?:profit|total|value|cost|price|area|volume|probability|distance|length) of)\s*:?\s*\}"
    r"\s*(?=[-+\d\\$(\[a-zA-Z|])"
)
_EXPLANATION = re.compile(
    r"\s*(?:\\text\s*\{\s*\((?:where|with|since|because|as|for)\b[^{}()]*\)\s*\}"
    r"|\\text\s*\{\s*\(?(?:where|since|because)\b[^{}()]*\}[^{}]*\\text\s*\{[^{}()]*\)\s*\})$"
)
_EXCEPT = re.compile(
    r"^all\s+real\s+(?:numbers|values)(?:\s+of\s+[a-z])?\s*(?:except(?:\s+for)?|other\s+than|excluding|but)\s*(?:[a-z]\s*=\s*)?"
    r"(.+)$",
    re.IGNORECASE,
)
_AND = re.compile(r"\s*,?\s*\b(?:and|or)\b\s*|\s*,\s*")


def number_of(words: str) -> int | None:
    """The number that words are ("twenty-one", "two hundred and five"), or None."""
    words = words.strip().casefold()
    if not words or len(words) > 100 or not _NUMBER.match(words):
        return None
    total = group = 0
    before = ""
    for word in words.replace("-", " ").split():
        if word == "and":
            if before not in _LARGE:
                return None
        elif word in _LARGE:
            size = _LARGE[word]
            if size == 100:
                group = (group or 1) * 100
            else:
                total, group = total + (group or 1) * size, 0
        elif before in _SMALL and not (_SMALL[before] >= 20 and 0 < _SMALL[word] < 10):
            return None  # "one two" is no number
        else:
            group += _SMALL[word]
        before = word
    return None if before == "and" else total + group


def spell_english(text: str) -> str:
    """Drop frames and explanations, write number words in digits and exceptions as a set difference."""
    if "text" not in text and not re.search(r"[A-Za-z]{3}", text):
        return text
    plain = _TEXT.sub(r" \1 ", text).strip()
    choice = _CHOICE.match(plain)
    if choice:
        return choice.group(1)
    number = number_of(plain)
    if number is not None:
        return str(number)
    text = _EXPLANATION.sub("", _FRAME.sub("", text))
    excluded = _EXCEPT.match(_TEXT.sub(r" \1 ", text).strip())
    if excluded:
        members = [part.strip() for part in _AND.split(excluded.group(1)) if part.strip()]
        return rf"\mathbb{{R}}\setminus \{{{', '.join(members)}\}}"
    return text
