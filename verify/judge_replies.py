r"""Reads the decision at the end of a judge's reply: "SCORE: n", n from 0 to 10, or "BETTER: 1" or "BETTER: 2".

Models dress that line: small letters, Markdown, fences, quotation marks, JSON, LaTeX, full-width signs, a scale, a
unit, a word of praise after it. What a person reads as one decision is read. Refused is what leaves a doubt: another
scale, a second number or score, a line that quotes the solution, or text after the line.
"""

from __future__ import annotations

import re

MOST_CHARACTERS = 300
"""most characters of a line that are read, its last ones"""
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_EMPTY = re.compile(r"\W*|[`~]{3,}\w*|</\w+>")
_DRESS = (
    (re.compile(r"<(score|better)>([^<>]*)</\1>", re.IGNORECASE), r"\1: \2"),
    (re.compile(r"\\(?:boxed|text\w*|mathbf)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"</?[a-z]+\s*/?>", re.IGNORECASE), ""),
    (re.compile(r"<([^<>]*)>"), r"\1"),
    (re.compile(r"[*_`$|\"'“”„«»「」\[\]{}]"), ""),
    (re.compile(r"^\s*\(([^()]*)\)\s*$"), r"\1"),
)
_QUOTE = r"[\"'“„«「`][\s*_]*"
_LAST = re.compile(r"\b(?:final|overall|total)\b", re.IGNORECASE)
_SAYS = re.compile(
    r"\b(?:says?|said|saying|claim\w*|writes?|wrote|written|state[sd]?|ask(?:s|ed|ing)?|demand\w*|tells?|told|quote[sd]?|"
    r"instruct\w*|contains?|ends (?:in|with))\b[^.!?;]*$|\b(?:not|never)\s*$"
    r"|\b(?:cannot|can['’]?t|unable to|refuse to|won['’]?t|not|never)\s+(?:give|assign|award|grant|justify)\b[^.!?;]*$",
    re.IGNORECASE,
)
_DOUBT = re.compile(
    r"\b(?:or|wait|actually|rather|instead|if|unless|no|maybe|perhaps|between|at (?:most|least))\b", re.I
)
_LEAD = r"(?:(?:so|thus|hence|therefore|my|the|final|overall|total|verdict|answer|[-#•:,]|[0-9]\.)\s*)*"
_LINK = r"\s*(?:[:=]|->|=>|→)\s*"
_LOOSE_LINK = r"(?:\s+is\s*:?\s+|\s+(?:of\s+)?|\s+[-–—]\s+)"
_TAIL = r"(?:[^\w/%+*×^~<>=-]*|\s*\(.*\)\s*[.!。]*|(?:\s*[,;:–—]|\s+-\s|\.\s|\s+(?:because|since|as|for)\b).*)"
_SCALE = r"(?:\s*(?:/|out\s+of|of)\s*(?:10|ten)(?:\.0+)?(?![.,]?\d))?(?:\s*(?:points?|pts?|marks?|分))?"
_SCORE = (
    rf"\(?\+?0?(?P<value>(?:10(?:\.0{{1,3}}|,0{{1,2}})?|\d(?:\.\d{{1,3}}|,\d{{1,2}})?)(?![.,]?\d)"
    rf"|(?:{'|'.join(_WORDS)})\b)\)?{_SCALE}"
)
_SCORE_NAME = r"\bscore\b(?:\s*(?:\(?\s*(?:0\s*(?:-|–|to)|out\s+of|of|/)\s*10\s*\)?))?"
_SIDE = r"(?:solution|response|answer|option|completion)"
_BETTER = (
    rf"(?:the\s+)?{_SIDE}?\s*(?:number\b|no\.|\#)?\s*\(?"
    rf"(?P<value>[12](?!\w|[.,]\d|\s*/)|(?:one|two|first|second|1st|2nd)\b)\)?(?:\s+(?:one|{_SIDE})\b)?"
)
_BETTER_NAME = rf"\bbetter\b(?:\s+(?:one|{_SIDE})\b)?"
_PLAIN_SCORE = re.compile(r"(?P<value>10|\d(?:\.\d{1,3})?)\s*(?:/|out\s+of)\s*10\s*\.?", re.IGNORECASE)
_PLAIN_BETTER = re.compile(
    rf"(?:the\s+)?{_SIDE}\s*\#?(?P<value>[12])\s+is\s+(?:the\s+)?better"
    rf"(?:\s+(?:one|{_SIDE})|\s+than\s+{_SIDE}\s*\#?[12])?\s*[.!]*",
    re.I,
)
_OTHER_SIDE = re.compile(rf"{_SIDE}\s*\#?\s*[12]\b", re.IGNORECASE)


def parse_score(reply: str) -> float | None:
    """Return the score at the end of a reply, divided by 10; None when there is none."""
    value = _read(reply, _SCORE_NAME, _SCORE, _PLAIN_SCORE)
    if value is None:
        return None
    return (_WORDS.index(value) if value in _WORDS else float(value.replace(",", "."))) / 10


def parse_choice(reply: str) -> float | None:
    """Return 1 or 2, as the end of a reply says; None when it says neither."""
    value = _read(reply, _BETTER_NAME, _BETTER, _PLAIN_BETTER)
    return None if value is None else 1.0 if value in ("1", "one", "first", "1st") else 2.0


def _read(reply: str, name: str, value: str, plain: re.Pattern[str]) -> str | None:
    """Return the value that the last line names, None for none, or another one than the line before."""
    every = (line.strip() for line in reply.strip().splitlines())
    last = [line for line in every if not _EMPTY.fullmatch(line)][-2:]
    lines = [line[-MOST_CHARACTERS:].translate(_WIDE) for line in last]
    if not lines:
        return None
    if len(lines) == 2 and re.fullmatch(f"{_LEAD}{name}\\s*:?", _undressed(lines[0]), re.IGNORECASE):
        lines = [f"{lines[0].rstrip(':*_ ')}: {lines[1]}"]  # the value stands below its name
    before = lines[0] if len(lines) == 2 else ""
    decision = _read_line(lines[-1], before, name, value, plain)
    if decision and re.match(_LEAD + name, _undressed(before), re.IGNORECASE) and not _LAST.search(lines[-1]):
        return decision if _read_line(before, "", name, value, plain) in (None, decision) else None
    return decision


def _read_line(line: str, before: str, name: str, value: str, plain: re.Pattern[str]) -> str | None:
    text = _undressed(line)
    if line.startswith(">") or (before.endswith(":") and _SAYS.search(before)):
        return None
    if match := plain.fullmatch(text):
        return None if before.endswith(":") else match["value"].lower()
    for start in re.finditer(name, text, re.IGNORECASE):
        words = text[: start.start()]
        link = f"(?:{_LINK}|{_LOOSE_LINK})" if re.fullmatch(_LEAD, words, re.IGNORECASE) else _LINK
        decision = re.match(name + link + value, text[start.start() :], re.IGNORECASE)
        if decision is None:
            continue
        match = re.fullmatch(_TAIL, text[start.start() + decision.end() :], re.IGNORECASE)
        if match is None:
            return None
        again = re.compile(rf"(?<!\d){re.escape(decision['value'])}\s*/\s*10(?!\d)")
        tail = (_OTHER_SIDE if plain is _PLAIN_BETTER else again).sub(" ", match[0])
        marked = not line.startswith("{") and re.search(_QUOTE + name, line, re.IGNORECASE)
        quoted = re.search(r"\w", words) and (_SAYS.search(words) or marked)
        unclear = re.search(r"\d", tail) or _DOUBT.search(tail)
        empty = plain is _PLAIN_BETTER and tail != match[0] and not re.search(r"[^\W\d]{2}", tail)
        return None if quoted or unclear or empty else decision["value"].lower()
    return None


def _undressed(line: str) -> str:
    for pattern, kept in _DRESS:
        line = pattern.sub(kept, line)
    return line.strip()
