"""The languages that Maestrale is trained and tested in, and how each asks for reasoning in itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Language:
    """A language and the clause that asks for reasoning in it."""

    code: str
    """ISO 639-1, as the language classifier gives it"""
    english: str
    native: str
    clause: str
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
