"""Pure comparisons that prove that an engine computes with the trainers' weights; errors name what differs.

There are four independent checks. After every update: the version that the engine process reports, and a checksum of
every tensor, read back from the engine's model (parameters.py), against one of the trainers' master weights, cast as
the wire casts them. After every second update: log-probs of fixed sequences, scored by both, and how far these moved
since an update before, in which what rounding does to both versions alike is not contained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace as replace_fields

from rollout.weights.checksum import MODULUS, Columns, add_parts
from rollout.weights.layout import Layout
from shared.errors import NonFinite, SyncMismatch

if TYPE_CHECKING:
    from rollout.weights.sender import WeightSender

NAMED = 5
LOGPROB_LIMITS = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.25}
"""dtype of the weights on the wire -> largest mean |difference| of the probe. It scores prompts, whose tokens are
improbable: there rounding to bfloat16 shows (SmolLM2 after SFT: 0.07 to 0.105 a token, while sampled completions agree
to 0.005; SmolLM2-Instruct: 0.057, and 0.009 in float16); weights in a wrong place differ by several nats"""
MOVE_LIMITS = {"float32": 3e-5, "float16": 0.004, "bfloat16": 0.04}
"""the same for how far the log-probs moved, unless MOVE_SHARE times what they differed by at first, or when they were
scored last, is more, or WAY_SHARE of how far they moved in the trainers (those of stale weights do not move at all)"""
MOVE_SHARE, WAY_SHARE = 3.0, 0.1
SHORT_INTERVAL, LONG_INTERVAL_FACTOR = 2, 4
"""updates from one scoring of the probe's shortest sequence to the next; one n times as long is scored every n times
the second number of updates. On a processor that computes no faster than it reads weights, each token of the probe
costs running requests as much as one of theirs; tensors are compared after every update"""
AS_HEAD = " as the head"
Held = tuple[dict[str, tuple[int, int]], dict[str, int]]
"""weights that a worker's model computes with: {tensor: (checksum, number of values)} of plain parameters, and {tensor:
checksum} of those columns of packed ones that a version compares; a part of a tensor gives a part of its checksum"""


class PublishedWeights(msgspec.Struct):
    """What a trainer rank wrote for the engines, and the proof material computed from its master weights."""

    version: int
    bytes: int
    seconds: float
    checksums: dict[str, int] = {}
    """tensor -> checksum, added up over the ranks modulo 2**64 (rank 0 of the trainers only; or each rank's part)"""
    columns: dict[str, Columns] = {}
    """matrix -> those columns of this rank's rows that this version compares where an engine keeps it packed (CPU)"""
    probe: list[list[float]] = []
    """[sequences][tokens - 1] log-probs of the probe sequences under these weights (rank 0 of the trainers only)"""

    def add_checksums(self, sender: WeightSender) -> None:
        """Compute this rank's parts from its master weights, of which the sender wrote this version last."""
        self.checksums, self.columns = sender.checksums(), sender.columns(self.version)

    @property
    def chosen(self) -> dict[str, list[int]]:
        """matrix -> which columns of this rank's rows are compared."""
        return {name: columns.numbers for name, columns in self.columns.items()}


class WeightsHeld(msgspec.Struct):
    """What an engine computes with, read back from its model after an update."""

    checksums: dict[str, int] = {}
    """tensor -> checksum of its values, added up over the engine's tensor-parallel workers"""
    copies: dict[str, int] = {}
    """tensor -> on how many of them it is, where that is not one"""
    columns: dict[str, int] = {}
    """tensor -> checksum of those columns of a packed linear or head that the ranks chose, added up over the ranks"""


class Updated(msgspec.Struct):
    """What an engine took: it holds `version`; with timings and proof material."""

    engine: int
    version: int
    seconds: dict[str, float]
    """receive, pause, apply, finish, resume, total"""
    bytes: int
    held: WeightsHeld
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
    moved: float = 0.0
    """mean |difference| between how far both moved since the same tokens were scored before"""


def compare_version(engine: int, expected: int, version: int | None) -> None:
    """Raise SyncMismatch if the engine does not report the version that was published (None: it never answered)."""
    if version == expected:
        return
    what = "confirmed nothing (it was skipped)" if version is None else f"holds version {version}"
    raise SyncMismatch(f"engine {engine} {what}, but version {expected} was published")


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def add_workers(workers: Sequence[Held], layout: Layout) -> WeightsHeld:
    """Add up what the tensor-parallel workers of an engine hold.

    Raises SyncMismatch if they hold a tensor one and a half times, say: then a part of it is on none of them.
    """
    total = WeightsHeld(columns=workers[0][1])
    for name, tensor in layout.places.items():
        if rows := [plain[name] for plain, _ in workers if name in plain]:
            total.checksums[name] = sum(value for value, _ in rows) % MODULUS
            copies, rest = divmod(sum(count for _, count in rows), tensor.rows * tensor.row_bytes(1))
            if rest or not copies:
                raise SyncMismatch(f"the engine's workers hold {rest} values of {name} beside {copies} whole copies")
            if copies > 1:
                total.copies[name] = copies
    return total


def _by_reading(weights: WeightsHeld, whole: dict[str, int], columns: dict[str, int]) -> dict[str, int]:
    """What the trainers' checksums say of each thing that was read back: tensors of plain parameters, or of packed
    ones; a tied head is packed, and its tensor is the embedding too."""
    checksums = {
        name: value * weights.copies.get(name, 1) % MODULUS
        for name, value in whole.items()
        if name in weights.checksums or name not in weights.columns
    }
    for name, value in columns.items():
        if name in weights.columns:
            checksums[name + AS_HEAD if name in weights.checksums else name] = value
    return checksums


def _received(weights: WeightsHeld) -> dict[str, int]:
    """The checksums of what was read back, under the names of `_by_reading`."""
    return weights.checksums | {
        name + AS_HEAD if name in weights.checksums else name: value for name, value in weights.columns.items()
    }


def compare_held(
    published: Sequence[PublishedWeights], weights: WeightsHeld, engine: int, before: Sequence[PublishedWeights] = ()
) -> None:
    """Compare what the trainer ranks published with what an engine computes with; before: the version before.

    Raises SyncMismatch as `compare_checksums` does.
    """

    def expected(old: set[int]) -> dict[str, int]:
        """With the rows of these ranks still old."""
        whole = [(before if rank in old else published)[rank].checksums for rank in ranks]
        columns = [
            {name: part.before if rank in old else part.checksum for name, part in published[rank].columns.items()}
            for rank in ranks
        ]
        return _by_reading(weights, add_parts(whole), add_parts(columns))

    ranks = range(len(published))
    truth = expected(set())
    received = _received(weights)
    if truth == received:
        return
    if not before:
        return compare_checksums(truth, received, engine)
    compare_checksums(truth, received, engine, expected(set(ranks)), [expected({rank}) for rank in ranks])


def compare_checksums(
    truth: dict[str, int],
    received: dict[str, int],
    engine: int,
    previous: dict[str, int] | None = None,
    by_rank: Sequence[dict[str, int]] = (),
) -> None:
    """Compare what the trainers hold (parts of all ranks added up: `checksum.add_parts`) with what an engine holds.

    previous: `truth` of the version before, to detect old weights. by_rank: what `truth` would be if only one rank's
    rows were old, [ranks]. Raises SyncMismatch naming the engine and: tensors missing on either side, tensors that
    still have their previous value (dropped, or the whole old version), or of which one rank's rows have it, pairs that
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
        raise SyncMismatch(f"{head}all {len(stale)} changed tensors are those of the previous version: {_list(stale)}")
    parts, named = [], set(stale)
    if stale:
        parts.append(f"{_list(stale)} still of the previous version (dropped)")
    for rank, partly_old in enumerate(by_rank):
        if late := [name for name in wrong if name not in named and received[name] == partly_old[name]]:
            parts.append(f"the rows of trainer rank {rank} in {_list(late)} still of the previous version")
            named.update(late)
    for name in wrong:
        partner = next((other for other in wrong if other > name and is_swapped(truth, received, name, other)), None)
        if partner is not None and name not in named:
            named |= {name, partner}
            parts.append(f"{name} and {partner} are swapped")
    if others := [name for name in wrong if name not in named]:
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


@dataclass(frozen=True)
class Scored:
    """Log-probs of a probe sequence, [tokens - 1], by trainers and one engine."""

    version: int
    trainer: list[float]
    engine: list[float]
    first: float
    """mean |difference| when both scored it for the first time"""


def mean_gap(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Mean |difference|."""
    return sum(abs(one - other) for one, other in zip(ours, theirs, strict=True)) / max(1, len(ours))


def scoring_interval(tokens: int, shortest: int) -> int:
    """Return the number of updates from one scoring of a probe sequence to the next."""
    return LONG_INTERVAL_FACTOR * (tokens // shortest) if tokens > shortest else SHORT_INTERVAL


class WeightProof:
    """Compares each update with the one before it, engine by engine. It is given every update of a run, in order."""

    def __init__(self, dtype: str):
        """dtype: of the weights on the wire."""
        self.dtype = dtype
        self.before: list[PublishedWeights] = []
        self.scored: dict[tuple[int, tuple[int, ...]], Scored] = {}
        """(engine, probe sequence) -> when it was scored last"""
        self.differences: list[LogprobDifference] = []
        """[engines] of the update after which the probe was scored last"""
        self.unlike: tuple[list[PublishedWeights], WeightsHeld, int] | None = None
        """what was published, and what the engine holds that differs from it"""

    def due(self, probe: list[list[int]], version: int) -> list[list[int]]:
        """The sequences to score after the update to `version`: those never scored, and those whose turn it is."""
        return [
            sequence
            for sequence in probe
            if (0, tuple(sequence)) not in self.scored or version % scoring_interval(len(sequence), len(probe[0])) == 0
        ]

    def check(
        self, published: list[PublishedWeights], updates: Sequence[Updated], probe: Sequence[Sequence[int]]
    ) -> list[LogprobDifference]:
        """Compare what every engine took with what the trainer ranks published; [engines] differences of the probe
        when it was scored last. probe: the sequences that were scored now, or none.

        Raises SyncMismatch naming the engine and the version, the tensors or the tokens that differ.
        """
        version = published[0].version
        whole = add_parts(part.checksums for part in published)
        columns = add_parts({name: one.checksum for name, one in part.columns.items()} for part in published)
        for engine, updated in enumerate(updates):
            compare_version(engine, version, updated.version)
            if _by_reading(updated.held, whole, columns) != _received(updated.held):
                self.unlike = published, updated.held, engine
                compare_held(published, updated.held, engine, self.before)
        self.before = published
        differences = []
        for engine, updated in enumerate(updates):
            compare_version(engine, version, updated.scored_version)
            difference = compare_probe(published[0].probe, updated.probe, engine, self.dtype)
            moved = self.compare_moves(published[0], updated.probe, engine, probe)
            differences.append(replace(difference, moved=moved))
        if probe or not self.differences:
            self.differences = differences
        return self.differences

    def name_ranks(self, parts: Sequence[Sequence[dict[str, int]]]) -> None:
        """Raise what `check` raised of an engine's tensors once more, naming the trainer rank with old rows where one
        has some. parts: of each rank, its parts of the checksums before this version and in it."""
        if self.unlike is None or not self.before or any(len(versions) < 2 for versions in parts):
            return
        published, held, engine = self.unlike
        before = [replace_fields(part, checksums=old) for part, (old, _) in zip(self.before, parts, strict=True)]
        now = [replace_fields(part, checksums=new) for part, (_, new) in zip(published, parts, strict=True)]
        compare_held(now, held, engine, before)

    def compare_moves(
        self, published: PublishedWeights, rows: list[list[float]], engine: int, probe: Sequence[Sequence[int]]
    ) -> float:
        """Compare how far the log-probs of each sequence moved since it was scored last: the largest mean |difference|.
        Raises SyncMismatch."""
        largest = 0.0
        for sequence, trainer, theirs in zip(probe, published.probe, rows, strict=True):
            key = engine, tuple(sequence)
            last = self.scored.get(key)
            first = mean_gap(trainer, theirs) if last is None else last.first
            self.scored[key] = Scored(published.version, trainer, theirs, first)
            if last is None:
                continue
            moved = [now - then for now, then in zip(trainer, last.trainer, strict=True)]
            there = [now - then for now, then in zip(theirs, last.engine, strict=True)]
            way = sum(map(abs, moved)) / len(moved)
            rounding = MOVE_SHARE * max(first, mean_gap(last.trainer, last.engine))
            difference, limit = mean_gap(moved, there), max(MOVE_LIMITS[self.dtype], rounding, WAY_SHARE * way)
            largest = max(largest, difference)
            if not difference <= limit:
                theirs_way = sum(map(abs, there)) / len(there)
                raise SyncMismatch(
                    f"engine {engine} does not compute with version {published.version}: since version {last.version} "
                    f"{len(moved)} log-probs of the probe moved by {way:.2e} in the trainers and {theirs_way:.2e} in "
                    f"the engine on average, {difference:.2e} apart, above {limit:.2e}"
                )
        return largest
