"""The stage `duplicates`: removes near duplicates within the input, and copies of evaluation items."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from curate.runner import digest
from curate.similarity import SHOW_EVERY, NgramIndex, Text, candidates, jaccard, read_text, same_drawings
from curate.stage import SHARE, Decision, Kept, Rejected, Show, VerifyingStage, is_open, option
from shared.jsonl import Row, read_rows, text_of
from shared.types import Verdict

CONFLICT = "duplicates with different answers"


def _name(row: Row) -> str:
    """Return the name of a row in a reason: its id, or its line."""
    return str(row.fields.get("id") or f"line {row.number}")


@dataclass
class DuplicatesStage(VerifyingStage):
    """Keep one copy of each problem, and none of the evaluation files.

    Two texts are alike if the Jaccard similarity of pairs of neighbours in their cores (the words, numbers and signs
    without articles, "find", "what is") is at least --similarity, and numbers and drawings are the same.
    near duplicates: alike texts with equal answers; the first row is kept. The same text with other numbers is another
    problem, and so is a similar text with another answer ("the sum of the roots", "the product of the roots"), unless
    core and drawing are identical: then all copies go, for one answer is wrong.
    contamination: rows that are like an item of --against, whatever the answer, or that share runs of 13 words with it
    which cover 60 % of it and have all of its numbers. The reason names the evaluation file, the detail the item.

    examples:
      python -m curate duplicates formatted.jsonl --out single.jsonl
      python -m curate duplicates a.jsonl b.jsonl --against math500.jsonl.gz aime24.jsonl --out single.jsonl
    """

    name = "duplicates"
    against: Sequence[Path] = option(
        [], "evaluation files to keep apart from", setting=False, type=Path, nargs="+", metavar="EVAL.jsonl"
    )
    similarity: float = option(0.65, "Jaccard similarity from which texts are alike (default %(default)s)", SHARE)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.digests = [{"file": path.name, "digest": digest(path)} for path in self.against]
        self.rows: Sequence[Row] = []
        self.texts: list[Text] = []

    @property
    def settings(self) -> dict[str, Any]:
        """The similarity, and the digests of the evaluation files."""
        return {**super().settings, "against": self.digests}

    async def prepare(self, rows: Sequence[Row], show: Show) -> None:
        """Compare all rows. Raises DataError for a row or an evaluation item without a problem."""
        items = [(path.name, row) for path in self.against for row in read_rows(path)]
        total = 3 * len(rows) + 2 * len(items)
        texts: list[Text] = []
        for number, row in enumerate([*(row for _, row in items), *rows]):
            texts.append(read_text(text_of(row.fields, "problem", row.where)))
            if number % SHOW_EVERY == 0:
                await show(number, total)

        async def second(done: int, _: int) -> None:
            await show(len(items) + len(rows) + done, total)

        near = await candidates(texts, second)
        given, self.rows, self.texts = texts[: len(items)], rows, texts[len(items) :]
        foreign = self._contamination(items, given, near)
        members = {
            number - len(items): [other - len(items) for other in others if other >= len(items)]
            for number, others in near.items()
            if number >= len(items)
        }
        self.decisions = await self._inside(members, foreign)
        await show(total, total)

    def _similarity(self, one: Text, other: Text) -> float:
        """Return the similarity of two texts with the same numbers and drawings; 0 if they are not alike."""
        if one.numbers != other.numbers or not same_drawings(one, other):
            return 0.0
        share = jaccard(one.shingles, other.shingles)
        return share if share >= self.similarity else 0.0

    def _contamination(
        self, items: Sequence[tuple[str, Row]], given: Sequence[Text], near: dict[int, list[int]]
    ) -> dict[int, Rejected]:
        """Return, for each row that is a copy of an evaluation item, its index and the rejection."""
        ngrams = NgramIndex(given)
        found: dict[int, Rejected] = {}
        for index, text in enumerate(self.texts):
            others = [other for other in near.get(index + len(items), []) if other < len(items)]
            alike = [(other, share) for other in others if (share := self._similarity(text, given[other]))]
            how = "similarity" if alike else "shared runs of words"
            alike = alike or ngrams.sharing(text)
            if alike:
                item, share = max(alike, key=lambda pair: pair[1])
                file, row = items[item]
                found[index] = Rejected(f"contamination: {file}", f"{_name(row)}: {how} {share:.2f}")
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
                if other in foreign or not self._similarity(self.texts[index], self.texts[other]):
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
        return [
            foreign.get(index) or self._decide(index, _root(first, index), conflicts) for index in range(len(first))
        ]

    def _decide(self, index: int, root: int, conflicts: dict[int, tuple[int, int]]) -> Decision:
        """Decide about a row whose cluster begins with the row `root`."""
        if root in conflicts:
            pair = [self.rows[one] for one in conflicts[root]]
            return Rejected(CONFLICT, ", ".join(f"{_name(row)}: {str(row.fields.get('answer'))[:60]}" for row in pair))
        if root != index:
            share = jaccard(self.texts[index].shingles, self.texts[root].shingles)
            return Rejected("near duplicate", f"of {_name(self.rows[root])}: similarity {share:.2f}")
        return Kept([self.rows[index].fields])

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
        return left == right or Verdict.CORRECT in (await self.compare(left, right), await self.compare(right, left))


def _root(first: list[int], index: int) -> int:
    """Return the first row of a cluster, halving the path to it."""
    while first[index] != index:
        first[index] = first[first[index]]
        index = first[index]
    return index
