"""The stage `request`: a share of the problems asks for a reasoning language.

Source: Magistral (2506.10910), section 2.2.4, for the share of 10 %. Requests for another language than the problem's
are this project's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from curate.languages import Seed, assign_languages
from curate.stage import CurationStage, Kept, Rate, Show
from shared.errors import ConfigError
from shared.jsonl import Row, text_of
from shared.languages import LANGUAGES
from verify.language import detect, known_languages, spoken_in
from verify.verifiers import check_language


def _known(codes: list[str]) -> list[str]:
    if not set(codes) <= known_languages():
        raise ValueError("must be codes that the language detector knows")
    return codes


@dataclass
class RequestStage(CurationStage):
    """Let a share of the problems ask for the language of the reasoning.

    They get the field "reasoning_language": training asks for it at the end of the prompt, as the server does, and the
    language reward wants it. --share of them ask for their problem's own language, --crossed of them for another one,
    drawn evenly from --languages. Programs and open problems ask too. Rows that ask already stay as they are and count
    in no share. Rows with a "completion" or a "prefix" ask for the language that it is in, or for none.

    examples:
      python -m curate request mixed.jsonl --out train.jsonl
      python -m curate request mixed.jsonl --languages en fr de --crossed 0.2 --out train.jsonl
      python -m curate request demonstrations.jsonl --share 0.5 --crossed 0 --out asking.jsonl
    """

    name = "request"
    languages: Annotated[list[str], AfterValidator(_known)] = Field(
        default_factory=lambda: list(LANGUAGES), description="codes of the languages that --crossed draws from"
    )
    share: Rate = Field(default=0.1, description="share of the problems that asks for their own language")
    crossed: Rate = Field(default=0.1, description="share of the problems that asks for another language; 0 for none")
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share + self.crossed > 1:
            raise ConfigError(f"--share = {self.share}, --crossed = {self.crossed}: must be at most 1 together")

    async def prepare(self, rows: Sequence[Row], show: Show) -> None:
        """Choose the rows and their languages, which do not depend on the order of the rows. Raises DataError."""
        self.decisions = [Kept([row.fields]) for row in rows]
        own: dict[str, str] = {}
        places: dict[str, int] = {}
        copies: Counter[str] = Counter()
        for index, row in enumerate(rows):
            name = f"{text_of(row.fields, 'id', row.where, '')}\0{text_of(row.fields, 'problem', row.where)}"
            copies[name] += 1
            name = f"{name}\0{copies[name]}"
            if asked := text_of(row.fields, "reasoning_language", row.where, ""):
                check_language(asked, "reasoning_language", row.where)
                self.decisions[index] = Kept([row.fields], {f"asked for {asked} before": 1})
            else:
                own[name], places[name] = language_of(row), index
        free = {name: not imitated(rows[place]) for name, place in places.items()}
        others = {name: [code for code in self.languages if free[name] and code != own[name]] for name in own}
        crossed = assign_languages(others, self.crossed, self.seed)
        mine = {
            name: [language] if free[name] or spoken_in(imitated(rows[places[name]]), language)[1] else []
            for name, language in own.items()
            if name not in crossed
        }
        plain = assign_languages(mine, min(1.0, self.share * len(own) / max(len(mine), 1)), self.seed)
        for name, language in (plain | crossed).items():
            whose = "another than" if name in crossed else "that of"
            asking = rows[places[name]].fields | {"reasoning_language": language}
            self.decisions[places[name]] = Kept([asking], {f"ask for {language}, {whose} the problem": 1})


def language_of(row: Row) -> str:
    """Return the language of a row's problem, as it says or as it is written. Raises DataError for an unknown code."""
    problem = text_of(row.fields, "problem", row.where)
    language = text_of(row.fields, "language", row.where, "") or detect(problem).language or "en"
    check_language(language, "language", row.where)
    return language


def imitated(row: Row) -> str:
    """Return what the row gives of a response, which has a language already: its completion or its prefix."""
    completion = row.fields.get("completion")
    if isinstance(completion, list):
        turns = [turn for turn in completion if isinstance(turn, dict) and turn.get("role") == "assistant"]
        completion = "\n".join(str(turn.get("content") or "") for turn in turns)
    return str(completion or row.fields.get("prefix") or "")
