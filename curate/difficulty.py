"""The stages `difficulty` and `labels`: what a model's samples say about a problem, and about its ground truth.

Source: Magistral (2506.10910), section 4.1, which prints no thresholds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from curate.sample import read_pass_rate, read_samples
from curate.stage import CurationStage, Decision, Kept, Rejected, Show, VerifyingStage, is_open
from shared.errors import ConfigError
from shared.jsonl import Row, text_of
from shared.types import Verdict
from verify.verifiers import verifier_of

NEVER, SELDOM, OFTEN, UNKNOWN = "never solved", "too seldom solved", "too often solved", "not graded"
CONTRADICTED = "most samples contradict the ground truth"


@dataclass
class DifficultyStage(CurationStage):
    """Drop problems that are never, or too often, solved.

    input: rows with "pass_rate", as the stage sample writes it. It stays in the row, so that a run can select by it
    (data.pass_rate = [least, most], stages of a schedule).
    reasons: never solved (0), too seldom solved (below --least), too often solved (above --most), not graded (the
    verifier understood none of the completions, or not the answer). Open problems ("domain": "open") pass: nobody
    knows.
    A weak model alone throws away problems that are hard but valid: train a better grader first
    (docs/curation.md).

    example:
      python -m curate difficulty sampled.jsonl --out learnable.jsonl --most 0.9
    """

    name = "difficulty"
    least: float = Field(default=0.0, description="reject a lower pass rate")
    most: float = Field(default=0.9, description="and a higher one")
    without_samples: bool = Field(default=False, description='leave "samples" out of the rows written')

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.least <= self.most <= 1:
            both = f"--least = {self.least:g} and --most = {self.most:g}"
            raise ConfigError(f"{both}: must be 0 <= least <= most <= 1")

    async def prepare(self, rows: Sequence[Row], show: Show) -> None:
        """Compare all pass rates with the thresholds. Raises DataError for a row without one that is not open."""
        self.decisions = [self._decide(row) for row in rows]

    def _decide(self, row: Row) -> Decision:
        if not is_open(row.fields):
            rate = read_pass_rate(row)
            if rate is None:
                return Rejected(UNKNOWN, "no completion could be graded")
            if rate == 0:
                return Rejected(NEVER, "pass rate 0")
            if rate < self.least:
                return Rejected(SELDOM, f"pass rate {rate:.3g} is below {self.least:g}")
            if rate > self.most:
                return Rejected(OFTEN, f"pass rate {rate:.3g} is above {self.most:g}")
        left_out = ("samples",) if self.without_samples else ()
        return Kept([{name: value for name, value in row.fields.items() if name not in left_out}])


@dataclass
class LabelsStage(VerifyingStage):
    """Drop problems whose ground truth most samples contradict.

    input: rows with "answer" and "samples", as the stage sample writes them. Programming and open problems pass.
    A problem is dropped when more than --majority of all its samples give one answer, and the ground truth is another:
    wrong against every form of that answer. Answers are equal if the verifier finds them equal, not if they are
    spelled alike. Samples without an answer count among all. This is only as good as the model that sampled: it should
    solve most problems.

    example:
      python -m curate labels graded.jsonl --out labelled.jsonl --majority 0.5
    """

    name = "labels"
    concurrency = 256
    majority: float = Field(
        default=0.5, ge=0.5, lt=1, description="drop when more than this share of all samples agrees on another answer"
    )

    async def prepare(self, rows: Sequence[Row], show: Show) -> None:
        """Check that every row has samples and a ground truth. Raises DataError."""
        for row in rows:
            read_samples(row)
            _ground_truth(row)

    async def decide(self, index: int, row: Row) -> Decision:
        """Find the majority's answer and compare it with the ground truth."""
        samples, ground_truth = read_samples(row), _ground_truth(row)
        answers = [sample.answer for sample in samples if sample.answer]
        if not ground_truth or not answers:
            return Kept([row.fields])
        cluster = await largest_cluster(answers, self._equal, self.majority * len(samples))
        if cluster is None:
            return Kept([row.fields], {"without a majority": 1})
        for answer in cluster.answers:
            if await self.compare(ground_truth, answer) is not Verdict.WRONG:
                return Kept([row.fields])
        agree = f"{cluster.size} of {len(samples)} samples agree on {cluster.answers[0]}"
        return Rejected(CONTRADICTED, f"{agree}, the ground truth is {ground_truth}")

    async def _equal(self, known: str, other: str) -> bool:
        return await self.compare(known, other) is Verdict.CORRECT


def _ground_truth(row: Row) -> str:
    """Return the ground truth; "" for a programming or open problem, where answers are not compared."""
    compared = verifier_of(row.fields.get("domain")).needs == "answer checker"
    return text_of(row.fields, "answer", row.where) if compared else ""


class Cluster(NamedTuple):
    """A set of completions whose answers the verifier finds equal; those without an answer are in none."""

    answers: list[str]
    """the different spellings of the answer, most frequent first"""
    size: int
    """number of completions that gave it"""


async def largest_cluster(
    answers: Sequence[str], equal: Callable[[str, str], Awaitable[bool]], more_than: float
) -> Cluster | None:
    """Return the largest cluster if it has more than `more_than` answers, else None.

    Answers are assigned, most frequent first, to the first cluster whose most frequent answer they equal;
    `equal(known, other)` is called only while a cluster can still become that large.
    """
    clusters: list[Cluster] = []
    left = len(answers)
    for answer, count in Counter(answers).most_common():
        if max((cluster.size for cluster in clusters), default=0) + left <= more_than:
            return None
        left -= count
        for number, (known, size) in enumerate(clusters):
            if await equal(known[0], answer):
                clusters[number] = Cluster([*known, answer], size + count)
                break
        else:
            clusters.append(Cluster([answer], count))
    largest = max(clusters, key=lambda cluster: cluster.size, default=Cluster([], 0))
    return largest if largest.size > more_than else None
