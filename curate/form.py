"""The stage `format`: keeps problems whose answer a program can check; multiple choice loses its options.

Rejected: proofs, several parts, missing figures, answers that the verifier does not understand, tests that cannot be
read, multiple choice that makes no sense without its options. Source: Magistral (2506.10910), section 4.1.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from curate.answers import MOST_WORDS, why_not_checkable
from curate.choices import (
    FOLLOWING,
    Choices,
    asks_for_letter,
    find_choices,
    letter_of,
    needs_options,
    position_of,
)
from curate.samples import is_open
from curate.stage import Command, Decision, Fields, Kept, Rejected, Show
from curate.wording import asks_proof, missing_figure, several_parts
from shared.errors import ConfigError, DataError
from shared.jsonl import Row, problem_of
from shared.types import Verdict
from verify.code.exam import checked
from verify.pool import Pool, worker_count

UNDER_WAY = 64


class Format:
    """The stage that keeps, rewrites or rejects problems by their form; the module's docstring has the rules."""

    name = "format"
    under_way = UNDER_WAY

    def __init__(self, most_words: int = MOST_WORDS, workers: int = 1):
        self.settings: dict[str, Any] = {"words": most_words}
        self.most_words = most_words
        self.pool = Pool(workers=workers)

    async def prepare(self, rows: Sequence[Row], show: Show) -> None:
        """Start the verifiers."""
        await self.pool.start()

    async def judge(self, index: int, row: Row) -> Decision:
        """Keep, rewrite or reject a row by its own content."""
        fields = row.fields
        if not isinstance(fields.get("problem"), str) or not fields["problem"].strip():
            return Rejected("no problem text", "'problem' is missing or empty")
        if fields.get("domain") == "code":
            return _judge_code(row)
        answer = fields.get("answer")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
            return Rejected("no answer", "'answer' is missing or empty")
        if is_open(fields):
            return Kept([fields])
        return await self._judge_math(fields, fields["problem"], str(answer).strip())

    async def _judge_math(self, fields: Fields, text: str, answer: str) -> Decision:
        if words := asks_proof(text):
            return Rejected("proof", words)
        choices = find_choices(text, answer)
        if choices is None and letter_of(answer) and (FOLLOWING.search(text) or asks_for_letter(text)):
            return Rejected("multiple choice: options not readable", f"the answer is {answer}")
        if choices is not None:
            opened = await self._open(choices, answer)
            if isinstance(opened, Rejected):
                return opened
            text, answer = choices.stem, opened
        if why := several_parts(text, answer):
            return Rejected("several parts", why)
        if words := missing_figure(text):
            return Rejected("missing figure", words)
        if why := await why_not_checkable(self.pool, answer, self.most_words):
            return Rejected("answer not checkable", f"{answer[:80]}: {why}")
        if choices is None:
            return Kept([fields])
        rewritten = {**fields, "problem": text, "answer": answer, "options": choices.options}
        return Kept([rewritten], {"multiple choice rewritten": 1})

    async def _open(self, choices: Choices, answer: str) -> str | Rejected:
        """Return the answer of the problem without its options: the content of the option that a letter names; or a
        rejection, if the problem needs its options or the answer is none of them."""
        position = position_of(choices, answer)
        option = choices.options[position] if position >= 0 else answer
        if why := needs_options(choices, option):
            return Rejected(f"multiple choice: {why}", f"the answer is {answer}")
        if position >= 0:
            return option
        for content in choices.options:
            if content and await self.pool.grade(content, answer) is Verdict.CORRECT:
                return answer
        return Rejected("multiple choice: answer is no option", f"{answer} is none of {choices.options}"[:300])

    async def close(self) -> None:
        """Stop the verifiers."""
        await self.pool.close()


def _judge_code(row: Row) -> Decision:
    """Keep a programming problem if its tests can be read."""
    try:
        checked(problem_of(row.fields, "the row"), "the row")
    except DataError as error:
        return Rejected("tests not readable", str(error))
    return Kept([row.fields])


EXPLANATION = """
rejected, with its reason: proofs ("prove that", "montrer que", "докажите", ...), several parts ("(a) Find ... (b) Find
..."), text that points to a figure and holds none ([asy], tikz, tables count as there), answers that the verifier does
not understand or that are prose, programming problems whose tests are not readable.
Rows with "domain": "open" only need a problem and an answer: nothing is to be checked there.
Multiple choice loses its options: a letter is replaced by its option's content. Where that makes
no sense ("which of the following", "none of the above", "is closest to") it is rejected.
Languages of these words: en fr de es it ru zh.

examples:
  python -m curate format raw.jsonl.gz --out formatted.jsonl
  python -m curate format a.jsonl b.jsonl --out formatted.jsonl --words=3
"""


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--words", type=int, default=MOST_WORDS, metavar="N",
        help=f"an answer of more words than this is prose (default {MOST_WORDS})",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="verifier processes (default: all cores)")


def _make(options: argparse.Namespace) -> Format:
    if options.words < 1:
        raise ConfigError(f"--words = {options.words}: must be at least 1")
    return Format(options.words, worker_count(options.workers))


COMMAND = Command("keep problems with one checkable answer; no multiple choice", EXPLANATION, _add_options, _make)
