"""Pure comparisons that prove that an engine holds the weights that the trainers sent; errors name what differs.

There are three independent checks after every update: the version the engine process reports, a checksum of every
tensor it read against one computed from the trainers' master weights, and log-probs of fixed sequences scored by both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from shared.errors import NonFinite, SyncMismatch

NAMED = 5
LOGPROB_LIMITS = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.25}
"""dtype of the weights on the wire -> largest mean |difference| of the probe. It scores prompts, whose tokens are
improbable: there rounding to bfloat16 shows (SmolLM2 after SFT: 0.07 to 0.105 a token, while sampled completions agree
to 0.005; SmolLM2-Instruct: 0.057, and 0.009 in float16); weights in a wrong place differ by several nats"""


class PublishedWeights(msgspec.Struct):
    """What a trainer rank wrote for the engines, and the proof material computed from its master weights."""

    version: int
    bytes: int
    seconds: float
    checksums: dict[str, int]
    """tensor -> this rank's part of the checksum (parts of all ranks add up modulo 2**64)"""
    probe: list[list[float]] = []
    """[sequences][tokens - 1] log-probs of the probe sequences under these weights (rank 0 of the trainers only)"""


class Updated(msgspec.Struct):
    """What an engine took: it holds `version`; with timings and proof material."""

    engine: int
    version: int
    seconds: dict[str, float]
    """receive, pause, apply, finish, resume, total"""
    bytes: int
    checksums: dict[str, int]
    """tensor -> checksum of what was received"""
    stall_s: float = 0.0
    """longest time without a token that running requests saw across this update"""
    stall_steps: float = 0.0
    """the same in median decode steps"""
    running: int = 0
    """requests that were running"""
    gpu_peak_bytes: int = 0
    """largest GPU memory that one of its GPUs had allocated so far; 0 on a CPU"""
    scored_version: int = -1
    """version with which the engine process itself says it scored the probe"""
    probe: list[list[float]] = []
    """[sequences][tokens - 1] log-probs"""


@dataclass(frozen=True)
class LogprobDifference:
    """|trainer - engine| of probe log-probs, over all tokens."""

    mean: float
    p99: float
    max: float


def compare_version(engine: int, expected: int, held: int | None) -> None:
    """Raise SyncMismatch if the engine does not report the version that was published (None: it never answered)."""
    if held == expected:
        return
    what = "confirmed nothing (it was skipped)" if held is None else f"holds version {held}"
    raise SyncMismatch(f"engine {engine} {what}, but version {expected} was published")


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def compare_checksums(
    truth: dict[str, int], received: dict[str, int], engine: int, previous: dict[str, int] | None = None
) -> None:
    """Compare what the trainers hold (parts of all ranks added up: `checksum.add_parts`) with what an engine read.

    previous: `truth` of the version before, to detect old weights. Raises SyncMismatch naming the engine and: tensors
    missing on either side, tensors that still have their previous value (dropped, or the whole old version), pairs that
    were swapped, others.
    """
    if truth == received:
        return
    head = f"engine {engine} does not hold the weights that the trainers sent: "
    if missing := [name for name in truth if name not in received]:
        raise SyncMismatch(f"{head}it received no {_list(missing)}")
    if surplus := [name for name in received if name not in truth]:
        raise SyncMismatch(f"{head}it received {_list(surplus)}, which no trainer has")
    wrong = [name for name in truth if received[name] != truth[name]]
    old = previous or {}
    stale = [name for name in wrong if old.get(name) == received[name]]
    changed = [name for name in truth if old.get(name) != truth[name]]
    if stale and stale == changed:
        raise SyncMismatch(f"{head}all {len(stale)} changed tensors are those of the previous version")
    parts = []
    if stale:
        parts.append(f"{_list(stale)} still of the previous version (dropped)")
    swapped: list[str] = []
    for name in wrong:
        partner = next((other for other in wrong if other > name and is_swapped(truth, received, name, other)), None)
        if partner is not None and name not in swapped:
            swapped += [name, partner]
            parts.append(f"{name} and {partner} are swapped")
    if others := [name for name in wrong if name not in stale and name not in swapped]:
        parts.append(f"{_list(others)} differ (dropped or damaged)")
    raise SyncMismatch(head + "; ".join(parts))


def is_swapped(truth: dict[str, int], received: dict[str, int], name: str, other: str) -> bool:
    """True if each of two tensors arrived as the other. Row weights make this exact only for equal shapes, which is the
    case in which a swap goes unnoticed otherwise."""
    return received[name] == truth[other] and received[other] == truth[name]


def compare_probe(trainer: list[list[float]], engine: list[list[float]], number: int, dtype: str) -> LogprobDifference:
    """Compare log-probs of the same sequences, [sequences][tokens - 1], by trainers and by engine `number`.

    Raises SyncMismatch if the mean |difference| is above LOGPROB_LIMITS[dtype], naming the worst token with both
    values; NonFinite if a value is not a number.
    """
    gaps = sorted(
        abs(ours - theirs)
        for row, other in zip(trainer, engine, strict=True)
        for ours, theirs in zip(row, other, strict=True)
    )
    if not gaps:
        return LogprobDifference(0.0, 0.0, 0.0)
    total = sum(gaps)
    difference = LogprobDifference(total / len(gaps), gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))], gaps[-1])
    if not difference.mean <= LOGPROB_LIMITS[dtype]:
        _refuse(trainer, engine, number, difference.mean, dtype)
    return difference


def _refuse(trainer: list[list[float]], engine: list[list[float]], number: int, mean: float, dtype: str) -> None:
    """Raise NonFinite for the first value that is not a number, else SyncMismatch for the worst token."""
    worst = (-1.0, 0, 0, 0.0, 0.0)
    for sequence, (row, other) in enumerate(zip(trainer, engine, strict=True)):
        for token, (ours, theirs) in enumerate(zip(row, other, strict=True), 1):
            if not abs(ours - theirs) < float("inf"):
                where = f"probe sequence {sequence}, token {token}"
                raise NonFinite(f"{where}: trainer {ours} or engine {number} {theirs} is not finite")
            worst = max(worst, (abs(ours - theirs), sequence, token, ours, theirs))
    _, sequence, token, ours, theirs = worst
    raise SyncMismatch(
        f"engine {number} and the trainers disagree about the same weights: mean |log-prob difference| "
        f"{mean:.2e} is above {LOGPROB_LIMITS[dtype]:.2e}, the limit of {dtype}; worst at token {token} of probe "
        f"sequence {sequence}: trainer {ours:.5f}, engine {theirs:.5f}"
    )
