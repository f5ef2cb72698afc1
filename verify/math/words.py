r"""Reads answers that are words: yes and no, true and false, no solution, names, letters of choices, clock times."""

from __future__ import annotations

import re

from verify.math.brackets import TEXT, without_text
from verify.math.word_lists import LISTS, pattern_of, words_in

_FUNCTIONS = frozenset(words_in("words", "functions"))
_SHORT_WORDS = frozenset(words_in("words", "short"))
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"(?<!\\)[^\W\d_]+")
_TIME = re.compile(r"^(\d{1,2})(?::(\d\d))?(?::(\d\d))?(?: ?([ap])\.? ?m\.?)?$", re.IGNORECASE)
_CHOICES = re.compile(r"^\(?[A-H]\)?(?:\s*(?:,|;|and|&|和|与)*\s*\(?[A-H]\)?)+$")
_MONTH = re.compile(r"\b(?:january|february|march|april|may|june|july|august|september|october|november|december)\b")
_ORDINAL = re.compile(r"(?<=\d)(?:st|nd|rd|th)\b|\bof\b|\bthe\b")
_DATE = re.compile(rf"^(?:\d+(?:st|nd|rd|th)?|of|the|\s)*{_MONTH.pattern}(?:\d+(?:st|nd|rd|th)?|\s)*$")
_LABELLED = re.compile(
    r"^\(?\s*([A-J])\s*[).:]+\s*(?!.*(?:\b(?:or|and|not|wrong|false|incorrect)\b|(?<![A-Za-z\\])[A-J](?![A-Za-z])))(.+)$",
    re.DOTALL,
)
_NO_SIGN = re.compile(r"[,;$\\\"]|(?<=[A-Za-z])\.(?!\w)|(?<!\w)'|'(?!\w)")
_HAN = re.compile(r"[\u4e00-\u9fff]")
_CHOICE = re.compile(r"^\(?\s*([A-Z])\s*[).:]?$")
_AS_SETS = {"no solution": "\\emptyset", "all real numbers": "\\mathbb{R}"}
_ARTICLE = re.compile(r"^(?:an?|the) (?=\w{2})")
_SYNONYMS = {
    _ARTICLE.sub("", word): meaning
    for meaning in LISTS["synonyms"]
    for word in pattern_of("synonyms", meaning).split("|")
}


def words_of(text: str) -> str | None:
    """Return the words of an answer that is not mathematics ("yes", "\\text{Monday}", "星期一"), else None."""
    plain = without_text(text)
    choice = _CHOICE.match(plain.strip())
    if choice:
        return choice.group(1).casefold()
    if plain.strip().casefold() in _SYNONYMS:
        return plain.strip().casefold()
    time = clock(text)
    if time and time[1]:
        return f"{time[0]} s after midnight"
    rest = _COMMAND.sub(" ", plain)
    words = _WORD.findall(rest)
    wordy = any(
        (len(word) >= 4 and word.casefold() not in _FUNCTIONS) or word.casefold() in _SHORT_WORDS or _HAN.search(word)
        for word in words
    )
    if not wordy and not ("\\text" in text and words and TEXT.sub("", text).strip() == ""):
        return None
    return _ARTICLE.sub("", " ".join(_NO_SIGN.sub(" ", plain).strip(" .?\"'").casefold().split()))


def same_choice(ground_truth: str, answer: str) -> bool:
    """Return whether two answers name the same choice, with or without what it stands for: (B) 12 and B."""
    plain, labelled = (without_text(text) for text in (ground_truth, answer))
    if {len(plain), len(labelled)} == {1} and plain.upper() in "ABCD":
        return plain.upper() == labelled.upper()
    if _LABELLED.match(plain):
        plain, labelled = labelled, plain
    choice, labelled_match = _CHOICE.match(plain), _LABELLED.match(labelled)
    return bool(choice and labelled_match and choice.group(1) == labelled_match.group(1))


def same_words(ground_truth: str, answer: str) -> bool:
    """Return whether words mean the same: equal ones, synonyms (no solution, true), a date, statements in any order."""
    if ground_truth == answer or _SYNONYMS.get(ground_truth, ground_truth) == _SYNONYMS.get(answer, answer):
        return True
    if _DATE.match(ground_truth) and _DATE.match(answer):
        return sorted(_ORDINAL.sub("", ground_truth).split()) == sorted(_ORDINAL.sub("", answer).split())
    true_parts, given_parts = (sorted(text.split(" and ")) for text in (ground_truth, answer))
    return len(true_parts) > 1 and true_parts == given_parts and all(" is " in part for part in true_parts)


def choices(text: str) -> tuple[str, ...] | None:
    """Return the letters of several choices ("ACD", "A, C, D", "D and E"), or None. Letters in a row must be sorted."""
    plain = without_text(text)
    letters = tuple(re.findall("[A-H]", plain))
    if plain.startswith("(") and plain.endswith(")") and plain.count("(") == 1:
        return None  # (A, B) is a pair
    if len(letters) < 2 or len(set(letters)) < len(letters) or not _CHOICES.match(plain):
        return None
    return tuple(sorted(letters)) if not plain.isalpha() or list(letters) == sorted(letters) else None


def clock(text: str) -> tuple[int, bool] | None:
    """Return (seconds since midnight, whether am or pm was given) of a time of day, or None."""
    plain = without_text(text)
    match = _TIME.match(plain)
    if match is None:
        return None
    hour, minute, second, half = match.groups()
    if half is None and minute is None or int(hour) > (12 if half else 23) or int(minute or 0) > 59:
        return None
    hours = int(hour) % 12 + (12 if half.casefold() == "p" else 0) if half else int(hour)
    return hours * 3600 + int(minute or 0) * 60 + int(second or 0), half is not None


def as_set(text: str) -> str | None:
    """Return the set that some words stand for ("no solution", "all real numbers"), else None."""
    return _AS_SETS.get(_SYNONYMS.get(words_of(text) or "", ""))
