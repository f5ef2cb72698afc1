"""Tags and names of the languages that a response can be reasoned in: all that the language detector knows.

Names and the normalisation of BCP 47 tags come from the Unicode CLDR and the IANA registry, through langcodes.
"""

from __future__ import annotations

import difflib
from functools import lru_cache
from typing import NamedTuple

import langcodes

from shared.languages import LANGUAGES
from verify.language import known_languages

TAGS = {"als": "gsw", "bh": "bho", "eml": "egl"}
"""codes of the detector that differ from the language's BCP 47 tag (they are Wikipedia's, its training data) -> tag"""
ALSO = {"nb": "no"}
"""subtags that the registry keeps separate from the detector's code for the same language -> that code"""
MOST_DISTANCE = 20
"""largest CLDR distance from a language to another that its speakers understand"""


class Name(NamedTuple):
    """The names of a language."""

    english: str
    native: str
    """name in the language itself; in English if CLDR does not know it"""

    @property
    def both(self) -> str:
        """The English name, followed by the native one in parentheses if it differs."""
        return self.english if self.native == self.english else f"{self.english} ({self.native})"


@lru_cache(maxsize=256)
def name_of(code: str) -> Name:
    """Return the names of a language that the detector knows."""
    if code in LANGUAGES:
        return Name(LANGUAGES[code].english, LANGUAGES[code].native)
    found = langcodes.Language.get(TAGS.get(code, code), normalize=False)
    english, native = found.display_name(), found.autonym()
    return Name(english, english if native.startswith("Unknown language") else native)


@lru_cache(maxsize=1)
def codes() -> dict[str, str]:
    """Map language subtags to the detector's codes, for all spellings of a language (no and nb, tl and fil)."""
    known = sorted(known_languages())
    found = {code: code for code in known if code not in TAGS} | ALSO
    for code in known:
        tag = TAGS.get(code, code)
        found.setdefault(tag, code)
        found.setdefault(langcodes.standardize_tag(tag, macro=True).partition("-")[0], code)
    return found


def code_of(subtag: str) -> str | None:
    """Return the detector's code of a language subtag ("deu" and "ger" are de), or None if it knows none."""
    found = codes()
    if subtag in found:
        return found[subtag]
    try:
        standard = [langcodes.standardize_tag(subtag, macro=macro).partition("-")[0] for macro in (False, True)]
    except langcodes.LanguageTagError:
        return None
    return next((found[one] for one in standard if one in found), None)


def nearest(wish: str) -> str:
    """Return the code of the language that `wish` most likely means, for the hint in an error message."""
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
