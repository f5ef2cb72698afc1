"""The phrases of phrases.toml: words of seven languages that curation looks for, compiled by kind."""

from __future__ import annotations

import re
import tomllib
from importlib import resources

PHRASES: dict[str, dict[str, list[str]]] = tomllib.loads(
    resources.files("curate").joinpath("phrases.toml").read_text(encoding="utf-8")
)
"""kind of phrase -> language -> phrases"""


def compile_phrases(kind: str, form: str = "(?:{})", before: str = "", after: str = "") -> re.Pattern[str]:
    """Compile all phrases of a kind into one pattern without regard to case, in the order of the file.

    form: the whole pattern, {} for the phrases. before, after: what surrounds a phrase that is not Chinese.
    """
    found = [
        phrase if language == "zh" else f"{before}(?:{phrase}){after}"
        for language, phrases in PHRASES[kind].items()
        for phrase in phrases
    ]
    return re.compile(form.replace("{}", "|".join(found)), re.IGNORECASE)
