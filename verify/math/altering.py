"""Lists words next to a number that change, deny or weaken it, in many languages: they are never units.

"5 doubled", "7 negativ", "5 et demi", "3 douzaines", "5 с половиной" and "9 fewer" are not 5, 7, 5, 3, 5 and 9. Things
that are counted ("apples", "Äpfel") are an open class and cannot be listed; words that alter a number (fractions,
multiples, powers, signs, comparisons, denials, operations, numerals) are a closed one, and are listed in
word_lists.toml. Words are compared without case and accents: whole, by their beginning where a language inflects, or by
their ending. Nor does a unit begin with a preposition: "5 zum Quadrat", "5 в квадрате".
"""

from __future__ import annotations

import re
import unicodedata

from verify.math.word_lists import pattern_of, words_in

_ENDING = re.compile(
    r"(?:fold|wise|iemes?|esim[oi]|eavos?|fach(?:e[nrs]?)?|iert|voudig|kertainen"
    r"|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|teen|tie|hundred|thousand|illion)ths?)$"
)
_PARTICIPLE = re.compile(
    r"^[a-z]{2,}(?:ed|ly)$|^(?:ge|ver|zer)\w{3,}[td]$|(?:..(?:ado|ido|ato|ito|uto)|é|нн(?:ое|ый|ая))$"
)
"""alone next to a number ("5 inverted", "5 dimezzato") it says what was done to it; after a thing, what it is like"""
_HAN = re.compile(pattern_of("altering", "han"))
_OTHER_SCRIPTS = re.compile(pattern_of("altering", "other_scripts"))
_PLAIN_LETTERS = str.maketrans("ıłđø", "ildo")


def _folded(word: str) -> str:
    """Return a word without case and accents."""
    parts = unicodedata.normalize("NFKD", word.casefold().translate(_PLAIN_LETTERS))
    return unicodedata.normalize("NFC", "".join(sign for sign in parts if not "\u0300" <= sign <= "\u036f"))


def _listed(name: str) -> list[str]:
    return sorted(map(_folded, words_in("altering", name)))


_WHOLE_WORDS, _ALONE_WORDS = frozenset(_listed("whole")), frozenset(_listed("alone"))
_FIRST_WORDS, _COUNTED_WORDS = frozenset(_listed("prepositions")), frozenset(_listed("counted"))
_STEMS, _ALONE_STEMS = tuple(_listed("beginnings")), tuple(_listed("alone_beginnings"))


def alters(words: list[str]) -> bool:
    """Return whether the words next to a number make another number of it, or none."""
    folded = [_folded(word) for word in words]
    if folded[0] in _FIRST_WORDS:
        return True
    alone = folded[0] in _ALONE_WORDS or folded[0].startswith(_ALONE_STEMS) or _is_participle(words[0])
    if alone and len(words) == 1:
        return True
    return any(
        word in _WHOLE_WORDS or word.startswith(_STEMS) or _ENDING.search(word) or _HAN.search(word)
        or _OTHER_SCRIPTS.search(word)
        for word in folded
    )  # fmt: skip


def _is_participle(word: str) -> bool:
    """Return whether a word ends as a past participle or adverb; no plural does, and German nouns are capitalised."""
    return word not in _COUNTED_WORDS and _PARTICIPLE.search(word) is not None
