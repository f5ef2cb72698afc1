"""What was sampled for a problem, as it stands in its row: "pass_rate", and "samples" with answers and verdicts.

    pass_rate = right completions / graded completions           (a verifier that failed says nothing about the problem)

Open problems have none: null.

A cluster is a set of completions whose answers the verifier finds equal; completions without an answer are in none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from shared.errors import DataError
from shared.rows import Row
from shared.types import Group, Verdict

FIRST = "run the stage sample first"


class Sample(msgspec.Struct, frozen=True):
    """One completion."""

    answer: str | None
    """the final answer, None where there is none (and for programs)"""
    verdict: Verdict
    tokens: int


class Cluster(msgspec.Struct, frozen=True):
    """Equal answers."""

    answers: list[str]
    """the different ways of writing it, most frequent first"""
    count: int
    """completions that gave it"""


def samples_of_group(group: Group) -> list[Sample]:
    """The samples of a graded group; programs are not kept, their verdict is."""
    is_program = group.prompt.problem.domain == "code"
    found = []
    for completion, reward in zip(group.completions, group.rewards, strict=True):
        assert reward is not None
        answer = None if is_program else reward.answer or None
        found.append(Sample(answer, reward.verdict, len(completion.token_ids)))
    return found


def pass_rate(samples: Sequence[Sample]) -> float | None:
    """Share of right completions among the graded ones, in [0, 1]; None when none was graded."""
    graded = [sample.verdict for sample in samples if sample.verdict.graded]
    return sum(verdict is Verdict.CORRECT for verdict in graded) / len(graded) if graded else None


def with_samples(fields: Mapping[str, Any], samples: Sequence[Sample]) -> dict[str, Any]:
    """The row with what was sampled; an earlier measurement in it is replaced."""
    rate = None if is_open(fields) else pass_rate(samples)
    return {**fields, "pass_rate": rate, "samples": msgspec.to_builtins(list(samples))}


def is_open(fields: Mapping[str, Any]) -> bool:
    """Whether the row is a problem whose answer is learned from and not compared (`Problem.verified`)."""
    return fields.get("domain") == "open"


def read_pass_rate(row: Row) -> float | None:
    """The row's pass rate; None where nothing could be graded. Raises DataError for a row without one."""
    if "pass_rate" not in row.fields:
        raise DataError(f"{row.where} lacks 'pass_rate': {FIRST}")
    rate = row.fields["pass_rate"]
    if rate is None:
        return None
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise DataError(f"{row.where}: 'pass_rate' is {rate!r:.40}: it must be a number between 0 and 1; {FIRST}")
    return float(rate)


def read_samples(row: Row) -> list[Sample]:
    """The row's samples. Raises DataError for a row without them."""
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
    """The largest cluster if it has more than `more_than` answers, else None.

    Answers go, most frequent first, to the first cluster whose most frequent answer they equal: `equal(known, other)`
    is asked only while a cluster can still grow so large.
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
