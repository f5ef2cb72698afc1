"""The samples of a problem in its row: "pass_rate", and "samples" with answers and verdicts.

    pass_rate = right completions / graded completions           (a verifier that failed says nothing about the problem)

The pass rate of open problems is null.

A cluster is a set of completions whose answers the verifier finds equal; completions without an answer are in none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from shared.errors import DataError
from shared.jsonl import Row
from shared.types import Group, Verdict

FIRST = "run the stage sample first"


class Sample(msgspec.Struct, frozen=True):
    """One graded completion."""

    answer: str | None
    """the final answer, None if there is none (and for programs)"""
    verdict: Verdict
    tokens: int


class Cluster(msgspec.Struct, frozen=True):
    """A set of completions with equal answers."""

    answers: list[str]
    """the different spellings of the answer, most frequent first"""
    count: int
    """number of completions that gave it"""


def samples_of_group(group: Group) -> list[Sample]:
    """Return the samples of a graded group; of programs only the verdict is kept."""
    is_program = group.prompt.problem.domain == "code"
    found = []
    for completion, reward in zip(group.completions, group.rewards, strict=True):
        assert reward is not None
        answer = None if is_program else reward.answer or None
        found.append(Sample(answer, reward.verdict, len(completion.token_ids)))
    return found


def pass_rate(samples: Sequence[Sample]) -> float | None:
    """Return the share of right completions among the graded ones, in [0, 1]; None if none was graded."""
    graded = [sample.verdict for sample in samples if sample.verdict.graded]
    return sum(verdict is Verdict.CORRECT for verdict in graded) / len(graded) if graded else None


def with_samples(fields: Mapping[str, Any], samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the row with its samples and pass rate; earlier ones are replaced."""
    rate = None if is_open(fields) else pass_rate(samples)
    return {**fields, "pass_rate": rate, "samples": msgspec.to_builtins(list(samples))}


def is_open(fields: Mapping[str, Any]) -> bool:
    """Whether the row is an open problem, whose answer is learned from but not compared (`Problem.verified`)."""
    return fields.get("domain") == "open"


def read_pass_rate(row: Row) -> float | None:
    """Read the row's pass rate; None if nothing could be graded. Raises DataError for a row without one."""
    if "pass_rate" not in row.fields:
        raise DataError(f"{row.where} lacks 'pass_rate': {FIRST}")
    rate = row.fields["pass_rate"]
    if rate is None:
        return None
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise DataError(f"{row.where}: 'pass_rate' is {rate!r:.40}: it must be a number between 0 and 1; {FIRST}")
    return float(rate)


def read_samples(row: Row) -> list[Sample]:
    """Read the row's samples. Raises DataError for a row without them."""
    if not row.fields.get("samples"):
        raise DataError(f"{row.where} lacks 'samples': {FIRST}")
    try:
        samples = msgspec.convert(row.fields["samples"], list[Sample])
    except msgspec.ValidationError as error:
        raise DataError(f"{row.where}: 'samples' is damaged ({error}): {FIRST}") from error
    return samples


async def largest_cluster(
    answers: Sequence[str], equal: Callable[[str, str], Awaitable[bool]], more_than: float
) -> Cluster | None:
    """Return the largest cluster if it has more than `more_than` answers, else None.

    Answers are assigned, most frequent first, to the first cluster whose most frequent answer they equal;
    `equal(known, other)` is called only while a cluster can still become that large.
    """
    clusters: list[tuple[list[str], int]] = []
    left = len(answers)
    for answer, count in Counter(answers).most_common():
        if max((size for _, size in clusters), default=0) + left <= more_than:
            return None
        left -= count
        for place, (known, size) in enumerate(clusters):
            if await equal(known[0], answer):
                clusters[place] = ([*known, answer], size + count)
                break
        else:
            clusters.append(([answer], count))
    forms, size = max(clusters, key=lambda cluster: cluster[1], default=([], 0))
    return Cluster(forms, size) if size > more_than else None
