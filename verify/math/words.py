r"""Answers that are words: yes and no, true and false, no solution, names, the letters of choices, clock times.

What it does not do: units and number words. Who calls this: `plain.py`.
"""

from __future__ import annotations

import re

_FUNCTION_NAMES = (
    "sqrt frac sin cos tan cot sec csc log ln exp arcsin arccos arctan sinh cosh tanh max min gcd lcm mod binom det "
    "deg lim sum prod int infty infinity"
)
_FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
_SHORT_WORDS = frozenset({"yes", "no", "odd", "even", "all", "none", "and", "or", "red", "true", "false", "not"})
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"(?<!\\)[^\W\d_]+")
_CLOCK = re.compile(r"^(\d{1,2}(?::\d\d){0,2})\s*([ap])\.?\s*m\.?$", re.IGNORECASE)
_LABELLED = re.compile(r"^\(?\s*([A-J])\s*[).:]+\s*(?!.*\b(?:or|and)\b)(.+)$", re.DOTALL)
_HAN = re.compile(r"[\u4e00-\u9fff]")
_CHOICE = re.compile(r"^\(?\s*([A-Z])\s*[).:]?$")
_AS_SETS = {"no solution": "\\emptyset", "all real numbers": "\\mathbb{R}"}
_SYNONYMS = {
    word: meaning
    for meaning, words in {
        "no solution": "no solutions|no solution|无解|none exist|there is no solution|there are no solutions"
        "|no real solution|no real solutions|empty set|the empty set|空集",
        "all real numbers": "all real numbers|all reals|the set of all real numbers|全体实数|所有实数|任意实数|实数集",
        "does not exist": "dne|does not exist|doesn t exist|不存在",
        "true": "true|正确|对",
        "false": "false|错误|错|incorrect",
        "yes": "yes|是",
        "no": "no|否|不是",
    }.items()
    for word in words.split("|")
}


def words_of(text: str) -> str | None:
    """The words of an answer that is words and not mathematics ("yes", "\\text{Monday}", "星期一"), else None."""
    plain = _TEXT.sub(r" \1 ", text)
    choice = _CHOICE.match(plain.strip())
    if choice:
        return choice.group(1).casefold()
    if plain.strip().casefold() in _SYNONYMS:
        return plain.strip().casefold()
    clock = _CLOCK.match(plain.strip())
    if clock:
        return f"{clock.group(1)} {clock.group(2)}m".casefold()
    rest = _COMMAND.sub(" ", plain)
    words = _WORD.findall(rest)
    wordy = any(
        (len(word) >= 4 and word.casefold() not in _FUNCTIONS) or word.casefold() in _SHORT_WORDS or _HAN.search(word)
        for word in words
    )
    if not wordy and not ("\\text" in text and words and _TEXT.sub("", text).strip() == ""):
        return None
    return " ".join(re.sub(r"[^\w\s+\-*/^=<>]|_", " ", plain).casefold().split())


def same_choice(gold: str, answer: str) -> bool:
    """(B) 12 for B: the letter of a choice, with or without what it stands for."""
    plain, labelled = (_TEXT.sub(r" \1 ", text).strip() for text in (gold, answer))
    if {len(plain), len(labelled)} == {1} and plain.upper() in "ABCDE":
        return plain.upper() == labelled.upper()
    if _LABELLED.match(plain):
        plain, labelled = labelled, plain
    choice, found = _CHOICE.match(plain), _LABELLED.match(labelled)
    return bool(choice and found and choice.group(1) == found.group(1))


def same_words(gold: str, answer: str) -> bool:
    """Equal words, or two ways to say no solution, true, false and the like."""
    return gold == answer or _SYNONYMS.get(gold, gold) == _SYNONYMS.get(answer, answer)


def as_set(text: str) -> str | None:
    """The set that some words stand for ("no solution", "all real numbers"), else None."""
    return _AS_SETS.get(_SYNONYMS.get(words_of(text) or "", ""))
