"""New figures beside old ones: what became worse by more than it may.

A ratio is compared wherever it was measured; an absolute figure only with one of the same machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from benchmarks.speed.page import shown
from benchmarks.speed.rows import TOLERANCE, Measured, Row


class Verdict(NamedTuple):
    """About one figure, or a whole benchmark."""

    regressed: bool
    text: str


def compare(old: Mapping[str, Measured], new: Mapping[str, Measured]) -> list[Verdict]:
    """Every figure of the new results that the old ones have too, and what the old ones had and the new lack."""
    return [verdict for name, measured in new.items() if name in old for verdict in _pairs(name, old[name], measured)]


def _pairs(name: str, old: Measured, new: Measured) -> Iterator[Verdict]:
    if old.quick != new.quick:
        yield Verdict(False, f"{name}: not compared, one of the two is a quick try")
        return
    if new.not_measured and not old.not_measured:
        yield Verdict(False, f"{name}: not compared, it is not measured now: {new.not_measured}")
        return
    same_machine = old.place.machine == new.place.machine
    now = {row.name: row for row in new.rows}
    for before in old.rows:
        if not before.better or not before.values:
            continue
        row = now.get(before.name)
        if row is None or not row.values:
            reason = row.not_measured if row else "there is no such figure any more"
            yield Verdict(False, f"{name}, {before.name}: not compared: {reason}")
        elif not before.of and not same_machine:
            yield Verdict(False, f"{name}, {before.name}: not compared, an absolute figure of another machine")
        else:
            yield _judge(f"{name}, {before.name}", before, row)


def _judge(name: str, before: Row, row: Row) -> Verdict:
    loss, allowed = row.loss(before), TOLERANCE[row.kind]
    change = f"{shown(before.median, row.unit)} -> {shown(row.median, row.unit)}"
    if loss > allowed:
        return Verdict(True, f"{name}: {change}, {loss:.1%} worse (allowed {allowed:.0%})")
    return Verdict(False, f"{name}: {change}, {'worse' if loss > 0 else 'better'} by {abs(loss):.1%}")
