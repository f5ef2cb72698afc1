"""Stage `labels`: drops problems whose label is contradicted by one answer that most samples share.

Answers are equal if the verifier finds them equal, not if they are spelled alike. A label is contradicted only if it is
WRONG against every form of the majority's answer; one that the verifier does not understand is not.
Source: Magistral (2506.10910), section 4.1.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from curate.samples import largest_cluster, read_samples
from curate.stage import Command, Decision, Kept, Rejected, Show
from shared.errors import ConfigError
from shared.jsonl import Row, text_of
from shared.types import Verdict
from verify.pool import Pool, worker_count

MAJORITY = 0.5
CONTRADICTED = "most samples contradict the label"

EXPLANATION = """
input: rows with "answer" and "samples", as the stage sample writes them. Programming and open problems pass unchanged.
A problem is dropped when more than --majority of all its samples give one answer, and the label is another. Samples
without an answer count among all. This is only as good as the model that sampled: it should solve most problems.

example:
  python -m curate labels graded.jsonl --out labelled.jsonl --majority 0.5
"""


class Labels:
    """The stage `labels`: compares labels with the majority answer of the samples."""

    name = "labels"
    under_way = 256

    def __init__(self, majority: float = MAJORITY, workers: int = 0):
        """workers: verifier processes, 0 for one per core. Raises ConfigError unless 0.5 <= majority < 1."""
        if not 0.5 <= majority < 1:
            raise ConfigError(f"--majority = {majority:g}: must be at least 0.5 and less than 1")
        self.majority = majority
        self.pool = Pool(workers=worker_count(workers))

    @property
    def settings(self) -> dict[str, Any]:
        """The threshold of the majority."""
        return {"majority": self.majority}

    async def prepare(self, rows: Sequence[Row], show: Show) -> None:
        """Check that every row has samples and a label, and start the verifiers. Raises DataError."""
        for row in rows:
            read_samples(row)
            _label(row)
        await self.pool.start()

    async def judge(self, index: int, row: Row) -> Decision:
        """Find the majority's answer and compare it with the label."""
        samples, label = read_samples(row), _label(row)
        answers = [sample.answer for sample in samples if sample.answer]
        if not label or not answers:
            return Kept([row.fields])
        cluster = await largest_cluster(answers, self._equal, self.majority * len(samples))
        if cluster is None:
            return Kept([row.fields], {"without a majority": 1})
        for answer in cluster.answers:
            if await self.pool.grade(label, answer) is not Verdict.WRONG:
                return Kept([row.fields])
        return Rejected(
            CONTRADICTED,
            f"{cluster.count} of {len(samples)} samples agree on {cluster.answers[0]}, the label is {label}",
        )

    async def _equal(self, known: str, other: str) -> bool:
        return await self.pool.grade(known, other) is Verdict.CORRECT

    async def close(self) -> None:
        """Stop the verifiers."""
        await self.pool.close()


def _label(row: Row) -> str:
    """Return the label; "" for a programming or open problem, which is not judged by comparing answers."""
    return "" if row.fields.get("domain") in ("code", "open") else text_of(row.fields, "answer", row.where)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --majority and --workers."""
    parser.add_argument(
        "--majority", type=float, default=MAJORITY, metavar="SHARE",
        help=f"drop when more than this share of all samples agrees on another answer (default {MAJORITY})",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="verifiers (default: one per core)")


COMMAND = Command(
    summary="drop problems whose label most samples contradict",
    explanation=EXPLANATION,
    add_options=add_options,
    make=lambda options: Labels(options.majority, options.workers),
)
