"""The tables at the end of `python -m verify`: verdict classes, means of every part, by language and domain."""

from __future__ import annotations

from collections import Counter, defaultdict
from statistics import fmean

from rich.table import Table

from shared.types import Verdict
from verify.records import Record

PARTS = ("total", "format", "correctness", "length", "language")


def verdict_table(records: list[Record]) -> Table:
    """Return the table of verdict classes: number, share and most frequent reason."""
    table = Table(title="Verdicts")
    table.add_column("verdict")
    table.add_column("responses", justify="right")
    table.add_column("share", justify="right")
    table.add_column("most often")
    for verdict in Verdict:
        found = [record.reward for record in records if record.reward.verdict is verdict]
        if found:
            reason, count = Counter(reward.reason.split(";")[0][:60] for reward in found).most_common(1)[0]
            table.add_row(verdict.value, str(len(found)), f"{len(found) / len(records):.1%}", f"{reason} ({count})")
    return table


def group_table(records: list[Record]) -> Table:
    """Return the table of shares and mean reward over the graded responses: all, by language of the problem, by domain.

    Responses to open problems are neither right nor wrong: "-" where there are no others.
    """
    table = Table(title="Graded responses")
    table.add_column("of")
    for name in ("responses", "right", "well formed", "one language", "mean reward"):
        table.add_column(name, justify="right")
    groups: dict[tuple[int, str], list[Record]] = defaultdict(list)
    for record in records:
        if record.reward.verdict.graded:
            for key in ((0, "all"), (1, record.language), (2, record.domain)):
                groups[key].append(record)
    for (_, name), found in sorted(groups.items()):
        rewards = [record.reward for record in found]
        right = [record.reward.verdict is Verdict.CORRECT for record in found if record.verified]
        formed = fmean(not reward.reason.startswith("format: ") for reward in rewards)
        table.add_row(
            name,
            str(len(found)),
            f"{fmean(right):.1%}" if right else "-",
            f"{formed:.1%}",
            f"{fmean(bool(reward.consistent) for reward in rewards):.1%}",
            f"{fmean(reward.total for reward in rewards):.3f}",
        )
    return table


def part_table(records: list[Record]) -> Table:
    """Return the table of mean and range of the total and of every part over the graded responses."""
    rewards = [record.reward for record in records if record.reward.verdict.graded]
    table = Table(title="Parts of the reward")
    table.add_column("part")
    for name in ("mean", "lowest", "highest"):
        table.add_column(name, justify="right")
    columns = {name: [float(getattr(reward, name)) for reward in rewards] for name in PARTS}
    for name in sorted({name for reward in rewards for name in reward.extra}):
        columns[name] = [reward.extra.get(name, 0.0) for reward in rewards]
    for name, values in columns.items():
        if values:
            table.add_row(name, *(f"{value + 0.0:.3f}" for value in (fmean(values), min(values), max(values))))
    return table
