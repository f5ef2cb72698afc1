"""The stage `human`: selects one language per problem from sets with human translations, such as MGSM."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from curate.stage import Kept, Rejected, Show, VerifyingStage, is_open, option
from curate.translate import draw_languages, languages_option, seed_option, share_option
from shared.errors import DataError
from shared.jsonl import Row, text_of
from shared.types import Verdict
from verify.language import detect

SURE = 0.8
"""probability from which the classifier's language overrules that of the row"""
NOT_DRAWN = "rows in languages that were not drawn"


def key_of(row: Row, field: str = "") -> str:
    """Return what all translations of a problem share: a field, or the id without the part that is the row's language.

    Raises DataError if the row has neither.
    """
    if field:
        return text_of(row.fields, field, row.where)
    name, language = text_of(row.fields, "id", row.where), text_of(row.fields, "language", row.where)
    parts = re.split(r"([/_.:-])", name)
    if parts.count(language) != 1:
        raise DataError(
            f"{row.where}: the id {name!r} does not hold the row's language {language!r} once (as mgsm/de/7 does), so "
            "that its translations cannot be found: name the field that they share with --key"
        )
    return "".join("*" if part == language else part for part in parts)


@dataclass
class HumanStage(VerifyingStage):
    """Keep one language of each problem from sets that people translated.

    input: rows with "language", in several languages; the translations of a problem have ids that differ only there
    ("mgsm/de/7", "mgsm/en/7"), or a field in common (--key).
    output: each problem once, --share of them not in English, in equal parts; of the others the English row (or the
    first, if there is none).
    rejected: problems whose answers differ between languages (those of open problems are not compared); texts that are
    not in the language that the row says. MGSM itself is for evaluation: train on other sets.

    examples:
      python -m curate human translated_by_people.jsonl.gz --share 0.5 --out mixed.jsonl
      python -m curate human set_de.jsonl set_en.jsonl --key problem_id --languages de --out mixed.jsonl
    """

    name = "human"
    languages: Sequence[str] = languages_option()
    share: float = share_option()
    seed: int = seed_option()
    key: str = option("", "field that the translations of a problem share", metavar="FIELD")

    async def prepare(self, rows: Sequence[Row], show: Show) -> None:
        """Group the rows by problem and draw languages. Raises DataError for rows that cannot be grouped."""
        self.decisions = [Kept([], {NOT_DRAWN: 1}) for _ in rows]
        problems: dict[str, dict[str, int]] = defaultdict(dict)
        for index, row in enumerate(rows):
            key, language = key_of(row, self.key), text_of(row.fields, "language", row.where)
            if language in problems[key]:
                raise DataError(f"{row.where}: {key} is there twice in {language!r}: remove one, or give another --key")
            problems[key][language] = index
        usable: dict[str, dict[str, int]] = {}
        for number, (key, by_language) in enumerate(problems.items()):
            if number % 50 == 0:
                await show(number, len(problems))
            if found := await self._check(rows, by_language):
                usable[key] = found
        names = {key: [code for code in self.languages if code in found] for key, found in usable.items()}
        drawn = draw_languages(names, self.share, self.seed)
        for key, found in usable.items():
            language = drawn.get(key, "en" if "en" in found else next(iter(found)))
            self.decisions[found[language]] = Kept([rows[found[language]].fields], {f"problems in {language}": 1})

    async def _check(self, rows: Sequence[Row], by_language: dict[str, int]) -> dict[str, int]:
        """Return the usable translations of a problem, language -> row index; the others are rejected."""
        answers = {
            language: "" if is_open(rows[index].fields) else str(rows[index].fields.get("answer", ""))
            for language, index in by_language.items()
        }
        first_language, first = next(iter(answers.items()))
        for language, answer in answers.items():
            if answer != first and await self.compare(first, answer) is not Verdict.CORRECT:
                detail = f"{first_language}: {first[:60]}, {language}: {answer[:60]}"
                for index in by_language.values():
                    self.decisions[index] = Rejected("translations with different answers", detail)
                return {}
        usable = {}
        for language, index in by_language.items():
            found = detect(text_of(rows[index].fields, "problem", rows[index].where))
            if found.language not in ("", language) and found.probability >= SURE:
                self.decisions[index] = Rejected("text in another language", f"{found.language} instead of {language}")
            else:
                usable[language] = index
        return usable
