"""The names of languages, and the request that asks a model to reason in one: the same text in training and serving.

Seven languages, in which Maestrale is trained and tested, ask in their own words. Every other language that the
detector knows is asked for in English, by its names. The names come from the Unicode CLDR, through langcodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

TAGS = {"als": "gsw", "bh": "bho", "eml": "egl"}
"""codes of the detector that differ from the language's BCP 47 tag (they are Wikipedia's, its training data) -> tag"""


@dataclass(frozen=True)
class Language:
    """A language with a request of its own."""

    code: str
    """ISO 639-1, as the language classifier gives it"""
    english: str
    native: str
    request: str
    """"Think and answer in this language", in this language"""


LANGUAGES = {
    language.code: language
    for language in (
        Language("en", "English", "English", "Think and answer in English."),
        Language("fr", "French", "français", "Réfléchis et réponds en français."),
        Language("de", "German", "Deutsch", "Denke und antworte auf Deutsch."),
        Language("es", "Spanish", "español", "Piensa y responde en español."),
        Language("it", "Italian", "italiano", "Ragiona e rispondi in italiano."),
        Language("ru", "Russian", "русский", "Рассуждай и отвечай по-русски."),
        Language("zh", "Chinese", "中文", "请用中文思考和回答。"),
    )
}
"""code -> language"""


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
    if code in LANGUAGES:
        return Name(LANGUAGES[code].english, LANGUAGES[code].native)
    import langcodes  # slow to import, and most runs ask for no other language

    language = langcodes.Language.get(TAGS.get(code, code), normalize=False)
    english, native = language.display_name(), language.autonym()
    return Name(english, english if native.startswith("Unknown language") else native)


def request_for(code: str) -> str:
    """Return the request to think and answer in a language: in that language if it has one, else in English."""
    return LANGUAGES[code].request if code in LANGUAGES else f"Think and answer in {name_of(code).both}."


def with_request(text: str, code: str) -> str:
    """Return a user's turn that ends with the request for a language; code "": the text itself."""
    return f"{text}\n\n{request_for(code)}" if code else text
