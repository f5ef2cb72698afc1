"""Languages that a response can be reasoned in: all that the detector knows, by their BCP 47 tags and with their names.

Names and the normalisation of tags come from the Unicode CLDR and the IANA registry, through langcodes.
"""

from __future__ import annotations

import difflib
from functools import lru_cache
from typing import NamedTuple

import langcodes

from shared.languages import LANGUAGES
from verify.language import known_languages

TAGS = {"als": "gsw", "bh": "bho", "eml": "egl"}
"""codes of the detector that are no BCP 47 tags of what they mean: Wikipedia's, from which it learned"""
ALSO = {"nb": "no"}
"""subtags that mean a code of the detector, which the registry keeps apart from it"""
MOST_DISTANCE = 20
"""by CLDR, from a language to another that its speakers understand"""


class Name(NamedTuple):
    """What a language is called."""

    english: str
    native: str
    """in itself; in English where CLDR does not know it"""

    @property
    def both(self) -> str:
        """In English and in itself."""
        return self.english if self.native == self.english else f"{self.english} ({self.native})"


@lru_cache(maxsize=256)
def name_of(code: str) -> Name:
    """Of a language that the detector knows."""
    if code in LANGUAGES:
        return Name(LANGUAGES[code].english, LANGUAGES[code].native)
    found = langcodes.Language.get(TAGS.get(code, code), normalize=False)
    english, native = found.display_name(), found.autonym()
    return Name(english, english if native.startswith("Unknown language") else native)


@lru_cache(maxsize=1)
def codes() -> dict[str, str]:
    """Language subtag -> the detector's code, for all ways to write one (no and nb, tl and fil)."""
    known = sorted(known_languages())
    found = {code: code for code in known if code not in TAGS} | ALSO
    for code in known:
        tag = TAGS.get(code, code)
        found.setdefault(tag, code)
        found.setdefault(langcodes.standardize_tag(tag, macro=True).partition("-")[0], code)
    return found


def code_of(subtag: str) -> str | None:
    """The detector's code of a language subtag ("deu" and "ger" are de), None for one that it does not know."""
    found = codes()
    if subtag in found:
        return found[subtag]
    try:
        standard = [langcodes.standardize_tag(subtag, macro=macro).partition("-")[0] for macro in (False, True)]
    except langcodes.LanguageTagError:
        return None
    return next((found[one] for one in standard if one in found), None)


def nearest(wish: str) -> str:
    """The code that somebody may have meant who wrote this."""
    try:
        meant = code_of(langcodes.find(wish).language or "")
    except LookupError:
        meant = None
    if meant is not None:
        return meant
    try:
        tag, distance = langcodes.closest_match(wish, list(codes()), max_distance=MOST_DISTANCE)
    except langcodes.LanguageTagError:
        tag, distance = "und", MOST_DISTANCE
    if tag in codes() and distance < MOST_DISTANCE:
        return codes()[tag]
    names = {name_of(code).english.lower(): code for code in codes().values()} | codes()
    close = difflib.get_close_matches(wish.lower(), names, 1, cutoff=0)
    return names[close[0]] if close else "en"
