"""Figures as Markdown, pages that hold them, and what became slower."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.figures import TOLERANCE, Figure, Measured, Place
from shared.atomic_write import beside

NOTICED = 0.01
"""share of stolen time that is told"""


def table(head: Sequence[str], *rows: Sequence[object]) -> str:
    """Format a Markdown table, which ends in a newline."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]) + "\n"


def shown(value: float, unit: str) -> str:
    """Format a value with its unit, three digits or more: (0.1873, "%") is "18.7 %", (1234.5, "m") "1,234 m"."""
    if unit == "%":
        return f"{100 * value:.1f} %"
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    text = f"{value:,.{digits}f}" if size >= 1e-3 or not size else f"{value:.2e}"
    return f"{text} {unit}".rstrip()


def row(figure: Figure) -> tuple[str, str, str, str]:
    """Return a figure's cells: name, median with its range, what it is a ratio of, target."""
    target = ""
    if figure.target is not None:
        target = f"{'>=' if figure.better == 'higher' else '<='} {shown(figure.target, figure.unit)}"
        target += "" if figure.met is None else f", {'met' if figure.met else '**missed**'}"
    if figure.not_measured:
        return figure.name, f"not measured: {figure.not_measured}", figure.of, target
    value = shown(figure.median, figure.unit)
    if len(figure.values) > 1:
        value += f" ({shown(min(figure.values), figure.unit)} to {shown(max(figure.values), figure.unit)})"
    return figure.name, value, figure.of, target


def place(found: Place) -> str:
    """Say where something was measured, in one sentence."""
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    return f"Measured on {found.date} at commit {found.commit} on {found.machine}; {versions}."


def section(results: Mapping[str, Measured], about: Mapping[str, str]) -> str:
    """Format all results: for each benchmark a heading, where it was measured, and a table. Ends in a newline."""
    lines: list[str] = []
    for name, measured in results.items():
        lines += ["", f"### {name}", "", about.get(name, name), "", place(measured.place)]
        if measured.quick:
            lines[-1] += " A quick try (`--quick`): few repeats and small loads."
        if measured.stolen >= NOTICED:
            lines[-1] += f" The host gave {measured.stolen:.0%} of the processors' working time to others meanwhile."
        if measured.not_measured:
            lines += ["", f"Not measured: {measured.not_measured}."]
        else:
            head = ("figure", "median (lowest to highest)", "ratio of", "target")
            lines += ["", table(head, *map(row, measured.rows)).rstrip()]
    return "\n".join(lines[1:]) + "\n"


def write(text: str, document: Path, mark: str = "results") -> None:
    """Write a whole page, or what stands between <!-- mark --> and <!-- end of mark -->. Raises ValueError where a page
    lacks these."""
    if mark:
        begin, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
        head, found, rest = document.read_text(encoding="utf-8").partition(begin)
        _, closed, tail = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"{document} has no {begin} ... {end} to write between")
        text = f"{head}{begin}\n{text}{end}{tail}"
    document.parent.mkdir(parents=True, exist_ok=True)
    with beside(document) as partial:
        partial.write_text(text, encoding="utf-8")


class Verdict(NamedTuple):
    """A comparison of one figure, or of a whole benchmark."""

    regressed: bool
    text: str


def compare(old: Mapping[str, Measured], new: Mapping[str, Measured]) -> list[Verdict]:
    """Compare every figure that the old results have. A ratio is compared wherever it was measured; an absolute figure
    only with one of the same machine."""
    return [verdict for name, measured in new.items() if name in old for verdict in _pairs(name, old[name], measured)]


def _pairs(name: str, old: Measured, new: Measured) -> Iterator[Verdict]:
    if old.quick != new.quick:
        yield Verdict(False, f"{name}: not compared, one of the two is a quick try")
        return
    if new.not_measured and not old.not_measured:
        yield Verdict(False, f"{name}: not compared, it is not measured now: {new.not_measured}")
        return
    same_machine = old.place.machine == new.place.machine
    now = {figure.name: figure for figure in new.rows}
    for before in old.rows:
        if not before.better or not before.values:
            continue
        figure = now.get(before.name)
        if figure is None or not figure.values:
            reason = figure.not_measured if figure else "there is no such figure any more"
            yield Verdict(False, f"{name}, {before.name}: not compared: {reason}")
        elif not before.of and not same_machine:
            yield Verdict(False, f"{name}, {before.name}: not compared, an absolute figure of another machine")
        else:
            yield _judge(f"{name}, {before.name}", before, figure)


def _judge(name: str, before: Figure, figure: Figure) -> Verdict:
    loss, allowed = figure.loss(before), TOLERANCE[figure.kind]
    change = f"{shown(before.median, figure.unit)} -> {shown(figure.median, figure.unit)}"
    if loss > allowed:
        return Verdict(True, f"{name}: {change}, {loss:.1%} worse (allowed {allowed:.0%})")
    return Verdict(False, f"{name}: {change}, {'worse' if loss > 0 else 'better'} by {abs(loss):.1%}")
