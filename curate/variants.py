"""Duplicates a programming problem that takes any language, once for each, with a sentence that asks for the language.

Source: Magistral (2506.10910), section 4.2 (statements duplicated to ask for Python or C++).
"""

from __future__ import annotations

from curate.stage import Fields

REQUESTS = {
    "en": "Write the program in {language}.",
    "fr": "Écris le programme en {language}.",
    "de": "Schreibe das Programm in {language}.",
    "es": "Escribe el programa en {language}.",
    "it": "Scrivi il programma in {language}.",
    "ru": "Напиши программу на языке {language}.",
    "zh": "请用 {language} 编写程序。",
}
NAMES = {"python": "Python", "cpp": "C++"}


def variants(fields: Fields, tests: list[Fields]) -> list[Fields]:
    """Return the row once for Python and once for C++. `tests`: its stdin/stdout tests as JSON, without a language.

    The request is in the language of the statement, or in English if that has no request.
    """
    request = REQUESTS.get(str(fields.get("language", "en")), REQUESTS["en"])
    found = []
    for code, name in NAMES.items():
        row = {**fields, "problem": f"{fields['problem'].rstrip()}\n\n{request.format(language=name)}"}
        if "id" in fields:
            row["id"] = f"{fields['id']}/{code}"
        row["tests"] = {"language": code, "tests": tests}
        found.append(row)
    return found
