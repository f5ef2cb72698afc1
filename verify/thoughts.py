"""Detects reasoning that is empty, a word or two, one thing said again and again, or a copy of the problem.

Thoughts need three different words, numbers or signs of their own: what is copied from the problem in runs does not
count, and a text that is one piece said three times counts as that piece. "2+3=5" is enough. A Han or kana character is
a word. Linear in both texts.
"""

from __future__ import annotations

import re

LEAST = 3
"""least number of different words, numbers or signs"""
LEAST_BESIDE_A_COPY = 5
"""the same where the problem was copied and nothing is calculated"""
SIGNS = frozenset("+*/=<>^×·÷−→√-")
COPIED_RUN = 6
"""this many words in a row that also stand in the problem are copied from it"""
_MARKUP = re.compile(r"<[^<>]{0,80}>|\\[A-Za-z]+|[\u200b-\u200f\u2060\ufeff]")
_TOKEN = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]|\d+|[^\W\d_]+|[+*/=<>^×·÷−→√%]|(?<=[\d\s])-(?=[\d\s])"
)
_IDEOGRAM = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")


def thoughtless(problem: str, reasoning: str) -> str:
    """Return why this does not count as reasoning, "" when it does."""
    words = _words(reasoning)
    if not words:
        return "is empty"
    piece = _period(words)
    if len(words) >= 3 * piece and len(words) > 3:
        return "says the same again and again"
    if len(set(words)) < LEAST:
        return "is a word or two"
    own = _own(words, _words(problem))
    if len(own) < len(words) and len(set(own)) < (LEAST if set(own) & SIGNS else LEAST_BESIDE_A_COPY):
        return "copies the problem"
    return ""


def _words(text: str) -> list[str]:
    return _TOKEN.findall(_MARKUP.sub(" ", text).lower()) if text.strip() else []


def _period(words: list[str]) -> int:
    """Return the length of the shortest piece that the words repeat, the last repetition perhaps cut off."""
    border = [0] * len(words)
    for index in range(1, len(words)):
        length = border[index - 1]
        while length and words[index] != words[length]:
            length = border[length - 1]
        border[index] = length + (words[index] == words[length])
    return len(words) - border[-1]


def _own(words: list[str], problem: list[str]) -> list[str]:
    """Return the words outside of runs copied from the problem. Numbers and signs alone are not a copy."""
    size = min(COPIED_RUN, len(problem), len(words))
    if size == 0:
        return words
    known = {tuple(problem[at : at + size]) for at in range(len(problem) - size + 1)}
    copied = [False] * len(words)
    for at in range(len(words) - size + 1):
        run = tuple(words[at : at + size])
        if run in known and sum(
            word.isalpha() and (len(word) > 1 or bool(_IDEOGRAM.match(word))) for word in run
        ) >= min(3, size):
            copied[at : at + size] = [True] * size
    return [word for word, known_word in zip(words, copied, strict=True) if not known_word]
