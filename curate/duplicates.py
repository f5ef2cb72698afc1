"""The stage `duplicates`: removes near duplicates within the input, and copies of evaluation items.

Two texts are alike if the Jaccard similarity of pairs of neighbours in their cores (`tokens.Text.core`: the tokens
without articles, "find", "what is") is at least --similarity, and numbers and drawings are the same. In the input,
alike texts with equal answers are duplicates: the first is kept. If core and drawing are identical and the answers
differ, one of them is wrong, and all are rejected. Alike texts with different cores and answers are different problems
("the sum of the roots", "the product of the roots"), and so are texts with other numbers. Contamination: alike to an
evaluation item, whatever the answer, or shared runs of 13 words that cover 60 % of it, with all of its numbers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from curate.journal import digest
from curate.samples import is_open
from curate.similar import Runs, candidates, jaccard, same_drawings, same_numbers
from curate.stage import Command, Decision, Kept, Rejected, Show
from curate.tokens import Text, read_text
from shared.errors import ConfigError
from shared.jsonl import Row, read_rows, text_of
from shared.types import Verdict
from verify.pool import Pool, worker_count

SIMILARITY = 0.65
SHOW_EVERY = 200
CONFLICT = "duplicates with different answers"


def name_of(row: Row) -> str:
    """Return the name of a row in a reason: its id, or its line."""
    return str(row.fields.get("id") or f"line {row.number}")


class Duplicates:
    """The stage that removes near duplicates and copies of evaluation items; the module's docstring has the rules."""

    name = "duplicates"
    under_way = 1

    def __init__(self, against: Sequence[Path] = (), similarity: float = SIMILARITY, workers: int = 1):
        """Raises ConfigError for evaluation files that cannot be read."""
        self.against, self.similarity = list(against), similarity
        self.settings: dict[str, Any] = {
            "similarity": similarity,
            "against": [{"file": path.name, "digest": digest(path)} for path in self.against],
        }
        self.pool = Pool(workers=workers)
        self.rows: Sequence[Row] = []
        self.texts: list[Text] = []
        self.decisions: list[Decision] = []

    async def prepare(self, rows: Sequence[Row], show: Show) -> None:
        """Compare all rows. Raises DataError for a row or an evaluation item without a problem."""
        items = [(path.name, row) for path in self.against for row in read_rows(path)]
        total = 3 * len(rows) + 2 * len(items)
        self.rows, self.texts = rows, []
        given: list[Text] = []
        for number, row in enumerate([row for _, row in items] + list(rows)):
            (given if number < len(items) else self.texts).append(read_text(text_of(row.fields, "problem", row.where)))
            if number % SHOW_EVERY == 0:
                await show(number, total)

        async def second(done: int, _: int) -> None:
            await show(len(items) + len(rows) + done, total)

        near = await candidates([*given, *self.texts], second)
        foreign = self._contamination(items, given, near)
        members = {
            number - len(items): [other - len(items) for other in others if other >= len(items)]
            for number, others in near.items()
            if number >= len(items)
        }
        self.decisions = await self._inside(members, foreign)
        await show(total, total)

    def _alike(self, one: Text, other: Text) -> float:
        """Return the similarity of two texts with the same numbers and drawings; 0 if they are not alike."""
        if not same_numbers(one, other) or not same_drawings(one, other):
            return 0.0
        share = jaccard(one.shingles, other.shingles)
        return share if share >= self.similarity else 0.0

    def _contamination(
        self, items: Sequence[tuple[str, Row]], given: Sequence[Text], near: dict[int, list[int]]
    ) -> dict[int, Rejected]:
        """Return, for each row that is a copy of an evaluation item, its index and the rejection."""
        runs = Runs(given)
        found: dict[int, Rejected] = {}
        for index, text in enumerate(self.texts):
            best, how, item = 0.0, "", -1
            for other in near.get(index + len(items), []):
                if other < len(items) and (share := self._alike(text, given[other])) > best:
                    best, how, item = share, "similarity", other
            if item < 0:
                for other, covered in runs.sharing(text):
                    if covered > best:
                        best, how, item = covered, "shared runs of words", other
            if item >= 0:
                file, row = items[item]
                found[index] = Rejected(f"contamination: {file}", f"{name_of(row)}: {how} {best:.2f}")
        return found

    async def _inside(self, near: dict[int, list[int]], foreign: dict[int, Rejected]) -> list[Decision]:
        """Return the decisions about all rows."""
        first = list(range(len(self.rows)))
        """row -> an earlier row of its cluster, or itself for the first (union-find)"""
        conflicts: dict[int, tuple[int, int]] = {}
        """first row of a cluster -> two of its rows that contradict each other"""
        for index, others in near.items():
            if index in foreign:
                continue
            for other in others:
                if other in foreign or not self._alike(self.texts[index], self.texts[other]):
                    continue
                same_core = self.texts[index].core == self.texts[other].core
                agree = await self._same_answer(index, other, same_core)
                if not agree and not (same_core and self.texts[index].drawing == self.texts[other].drawing):
                    continue
                one, two = sorted((_root(first, index), _root(first, other)))
                first[two] = one
                kept = conflicts.pop(two, None)
                if not agree:
                    kept = (other, index)
                if kept is not None:
                    conflicts.setdefault(one, kept)
        decisions: list[Decision] = []
        for index, row in enumerate(self.rows):
            root = _root(first, index)
            if index in foreign:
                decisions.append(foreign[index])
            elif root in conflicts:
                decisions.append(Rejected(CONFLICT, self._contradiction(*conflicts[root])))
            elif root != index:
                share = jaccard(self.texts[index].shingles, self.texts[root].shingles)
                detail = f"of {name_of(self.rows[root])}: similarity {share:.2f}"
                decisions.append(Rejected("near duplicate", detail))
            else:
                decisions.append(Kept([row.fields]))
        return decisions

    def _contradiction(self, one: int, other: int) -> str:
        rows = self.rows[one], self.rows[other]
        return ", ".join(f"{name_of(row)}: {str(row.fields.get('answer'))[:60]}" for row in rows)

    async def _same_answer(self, index: int, other: int, same_core: bool) -> bool:
        """Whether the answers of two rows are equal in meaning; for programming problems, whether the tests are equal.

        With the same core, a programming task with other tests is a duplicate too, and so is an open problem with an
        answer in other words.
        """
        one, two = self.rows[index].fields, self.rows[other].fields
        if "code" in (one.get("domain"), two.get("domain")):
            return same_core or json.dumps(one.get("tests")) == json.dumps(two.get("tests"))
        if is_open(one) or is_open(two):
            return same_core or one.get("answer") == two.get("answer")
        left, right = str(one.get("answer", "")).strip(), str(two.get("answer", "")).strip()
        if left == right:
            return True
        await self.pool.start()  # the first time only
        return Verdict.CORRECT in (await self.pool.grade(left, right), await self.pool.grade(right, left))

    async def judge(self, index: int, row: Row) -> Decision:
        """Return the decision that `prepare` made."""
        return self.decisions[index]

    async def close(self) -> None:
        """Stop the verifiers."""
        await self.pool.close()


def _root(first: list[int], index: int) -> int:
    """Return the first row of a cluster, halving the path to it."""
    while first[index] != index:
        first[index] = first[first[index]]
        index = first[index]
    return index


EXPLANATION = """
near duplicates: the first row is kept. The same text with other numbers is another problem, and so is a similar text
with another answer, unless only small words differ ("Find", "What is"): then all copies go, for one answer is wrong.
contamination: rows that are like an item of --against, with the same numbers, or that share runs of 13 words with it
which cover 60 % of it. The reason names the evaluation file, the detail the item.

examples:
  python -m curate duplicates formatted.jsonl --out single.jsonl
  python -m curate duplicates a.jsonl b.jsonl --against math500.jsonl.gz aime24.jsonl --out single.jsonl
"""


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--against", type=Path, nargs="+", default=[], metavar="EVAL.jsonl", help="evaluation files to keep apart from"
    )
    parser.add_argument(
        "--similarity", type=float, default=SIMILARITY, metavar="X",
        help=f"Jaccard similarity from which texts are alike (default {SIMILARITY})",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="verifier processes (default: all cores)")


def _make(options: argparse.Namespace) -> Duplicates:
    if not 0 < options.similarity <= 1:
        raise ConfigError(f"--similarity = {options.similarity}: must be above 0 and at most 1")
    return Duplicates(options.against, options.similarity, worker_count(options.workers))


COMMAND = Command("one copy of each problem, none of the evaluation files", EXPLANATION, _add_options, _make)
