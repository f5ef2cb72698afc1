"""The figures as Markdown, for docs/performance.md and for the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.speed.rows import Measured, Place, Row

HEAD = ["| figure | median (lowest to highest) | ratio of | target |", "|---|---|---|---|"]

NOTICED = 0.01
"""share of stolen time that is told"""


def shown(value: float, unit: str) -> str:
    """A value with its unit, three digits or more: (0.1873, "%") is "18.7 %", (1234.5, "groups/s") "1,234 groups/s"."""
    if unit == "%":
        return f"{100 * value:.1f} %"
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    text = f"{value:,.{digits}f}" if size >= 1e-3 or not size else f"{value:.2e}"
    return f"{text} {unit}".rstrip()


def target(row: Row) -> str:
    """ ">= 0.7, met", or "" without a target."""
    if row.target is None:
        return ""
    bound = f"{'>=' if row.better == 'higher' else '<='} {shown(row.target, row.unit)}"
    return bound if row.met is None else f"{bound}, {'met' if row.met else '**missed**'}"


def line(row: Row) -> str:
    """A row of the table."""
    if row.not_measured:
        return f"| {row.name} | not measured: {row.not_measured} | {row.of} | {target(row)} |"
    value = shown(row.median, row.unit)
    if len(row.values) > 1:
        value += f" ({shown(min(row.values), row.unit)} to {shown(max(row.values), row.unit)})"
    return f"| {row.name} | {value} | {row.of} | {target(row)} |"


def place(found: Place) -> str:
    """One sentence."""
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    return f"Measured on {found.date} at commit {found.commit} on {found.machine}; {versions}."


def section(results: Mapping[str, Measured], about: Mapping[str, str]) -> str:
    """Everything: a heading, where it was measured, and a table for each benchmark. Ends in a newline."""
    lines: list[str] = []
    for name, measured in results.items():
        words = about.get(name, name)
        lines += ["", f"### {name}", "", f"{words[:1].upper()}{words[1:]}.", "", place(measured.place)]
        if measured.quick:
            lines[-1] += " A quick try (`--quick`): few repeats and small loads."
        if measured.stolen >= NOTICED:
            lines[-1] += f" The host gave {measured.stolen:.0%} of the processors' working time to others meanwhile."
        if measured.not_measured:
            lines += ["", f"Not measured: {measured.not_measured}."]
        else:
            lines += ["", *HEAD, *map(line, measured.rows)]
    return "\n".join(lines[1:]) + "\n"
