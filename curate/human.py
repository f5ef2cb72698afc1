"""The stage `human`: selects one language per problem from sets with human translations, such as MGSM.

The rows of one problem are found by their id without its language ("mgsm/de/7" and "mgsm/en/7"), or by a field. Their
answers must agree in meaning (those of open problems are not compared), and each text must be in the language that its
row states. A share of the problems is drawn in other languages, in equal parts; of the others the English row is kept
(or the first, if there is none).
MGSM itself is for evaluation: train on other sets.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from curate.draw import check_languages, check_share, draw_languages
from curate.samples import is_open
from curate.stage import Command, Decision, Kept, Rejected, Show
from curate.translate import add_language_options
from shared.errors import DataError
from shared.jsonl import Row, text_of
from shared.types import Verdict
from verify.language import detect
from verify.pool import Pool, worker_count

SHOW_EVERY = 50
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


class Human:
    """The stage that selects one translation per problem; the module's docstring has the rules."""

    name = "human"
    under_way = 1

    def __init__(self, languages: Sequence[str], share: float, seed: int = 0, key: str = "", workers: int = 1):
        self.languages, self.share, self.seed, self.key = list(languages), share, seed, key
        self.settings: dict[str, Any] = {"languages": self.languages, "share": share, "seed": seed, "key": key}
        self.pool = Pool(workers=workers)
        self.decisions: list[Decision] = []

    async def prepare(self, rows: Sequence[Row], show: Show) -> None:
        """Group the rows by problem and draw languages. Raises DataError for rows that cannot be grouped."""
        self.decisions = [Kept([], {NOT_DRAWN: 1}) for _ in rows]
        problems: dict[str, dict[str, int]] = defaultdict(dict)
        for index, row in enumerate(rows):
            key, language = key_of(row, self.key), text_of(row.fields, "language", row.where)
            if language in problems[key]:
                raise DataError(f"{row.where}: {key} is there twice in {language!r}: remove one, or give another --key")
            problems[key][language] = index
        whole: dict[str, dict[str, int]] = {}
        for number, (key, by_language) in enumerate(problems.items()):
            if number % SHOW_EVERY == 0:
                await show(number, len(problems))
            whole[key] = await self._check(rows, by_language)
        names = {key: [code for code in self.languages if code in found] for key, found in whole.items() if found}
        drawn = draw_languages(names, self.share, self.seed)
        for key, found in whole.items():
            if found:
                language = drawn.get(key, "en" if "en" in found else next(iter(found)))
                index = found[language]
                self.decisions[index] = Kept([rows[index].fields], {f"problems in {language}": 1})

    async def _check(self, rows: Sequence[Row], by_language: dict[str, int]) -> dict[str, int]:
        """Return the usable translations of a problem, language -> row index; the others are rejected."""
        answers = {
            language: "" if is_open(rows[index].fields) else str(rows[index].fields.get("answer", ""))
            for language, index in by_language.items()
        }
        first_language, first = next(iter(answers.items()))
        if len(set(answers.values())) > 1:
            await self.pool.start()  # the first time only
        for language, answer in answers.items():
            if answer != first and await self.pool.grade(first, answer) is not Verdict.CORRECT:
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

    async def judge(self, index: int, row: Row) -> Decision:
        """Return the decision that `prepare` made."""
        return self.decisions[index]

    async def close(self) -> None:
        """Stop the verifiers."""
        await self.pool.close()


EXPLANATION = """
input: rows with "language", in several languages; the translations of a problem have ids that differ only there
("mgsm/de/7", "mgsm/en/7"), or a field in common (--key). Output: each problem once, --share of them not in English.
rejected: problems whose answers differ between languages; texts that are not in the language that the row says.

examples:
  python -m curate human translated_by_people.jsonl.gz --share 0.5 --out mixed.jsonl
  python -m curate human set_de.jsonl set_en.jsonl --key problem_id --languages de --out mixed.jsonl
"""


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--key", default="", metavar="FIELD", help="field that the translations of a problem share")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="verifier processes (default: all cores)")
    add_language_options(parser)


def _make(options: argparse.Namespace) -> Human:
    languages = check_languages(options.languages)
    return Human(languages, check_share(options.share), options.seed, options.key, worker_count(options.workers))


COMMAND = Command("one language a problem from sets that people translated", EXPLANATION, _add_options, _make)
