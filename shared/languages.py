"""The names of languages, and the request that asks a model to reason in one: the same text in training and serving.

The languages of languages.toml ask in their own words. Every other language that the detector knows is asked for in
English, by its names, which come from the Unicode CLDR, through langcodes.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from typing import NamedTuple

import msgspec

TAGS = {"als": "gsw", "bh": "bho", "eml": "egl"}
"""codes of the detector that differ from the language's BCP 47 tag (they are Wikipedia's, its training data) -> tag"""


class Language(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A language with a request of its own, as in languages.toml."""

    english: str
    native: str
    request: str
    """"Think and answer in this language", in this language"""
    trained: bool = False
    """whether Maestrale is trained and tested in it"""


WITH_REQUEST = msgspec.toml.decode(
    resources.files("shared").joinpath("languages.toml").read_bytes(), type=dict[str, Language]
)
"""code (ISO 639-1, as the language classifier gives it) -> language with a request of its own"""
LANGUAGES = {code: language for code, language in WITH_REQUEST.items() if language.trained}
"""code -> language in which Maestrale is trained and tested"""


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
    """Return the names of a language, by the detector's code."""
    if language := WITH_REQUEST.get(code):
        return Name(language.english, language.native)
    import langcodes  # slow to import, and most runs ask for no other language

    tag = langcodes.Language.get(TAGS.get(code, code), normalize=False)
    english, native = tag.display_name(), tag.autonym()
    return Name(english, english if native.startswith("Unknown language") else native)


def request_for(code: str) -> str:
    """Return the request to think and answer in a language: in that language if it has one, else in English."""
    return WITH_REQUEST[code].request if code in WITH_REQUEST else f"Think and answer in {name_of(code).both}."


def with_request(text: str, code: str) -> str:
    """Return a user's turn that ends with the request for a language; code "": the text itself."""
    return f"{text}\n\n{request_for(code)}" if code else text
