"""Compares two evaluations: the difference on the problems that both have, and the problems that flipped.

Problems are paired: the interval of the difference resamples problems with the results of both runs, so that their
difficulty does not widen it. A problem flips when its share of right samples crosses one half.
"""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from evaluation import tables
from evaluation.results import Json, left_out_of
from evaluation.samples import COMMON, SampleRecord, read_identity, read_samples
from evaluation.settings import EvaluationSettings
from shared.atomic_write import write_whole
from shared.errors import ConfigError
from shared.journal import differences
from shared.statistics import paired_difference

FLIPPED = 20
"""largest number of flipped problems that the terminal lists in each direction"""


class EvaluationRun(NamedTuple):
    """One evaluation that was read from its folder."""

    identity: Json
    problems: dict[str, dict[str, list[SampleRecord]]]
    """benchmark -> problem -> samples that have a response"""


def read_run(path: Path) -> EvaluationRun:
    """Read an evaluation from its folder. Raises ConfigError, DataError."""
    identity = read_identity(path)
    problems: dict[str, dict[str, list[SampleRecord]]] = defaultdict(lambda: defaultdict(list))
    for record in read_samples(path).values():
        if not record.error:
            problems[record.benchmark][record.id].append(record)
    return EvaluationRun(identity, problems)


def compare(before: EvaluationRun, after: EvaluationRun) -> Json:
    """Return the differences by benchmark, over common problems. Raises ConfigError if there are none."""
    found: Json = {}
    shared = before.identity["benchmarks"].keys() & after.identity["benchmarks"].keys()
    asked = [
        {name: each.identity.get(name) for name in COMMON}
        | {name: each.identity["benchmarks"][name] for name in shared}
        for each in (before, after)
    ]
    warnings = differences(*asked)
    for name in sorted(before.problems.keys() & after.problems.keys()):
        first, second = before.problems[name], after.problems[name]
        both = sorted(first.keys() & second.keys())
        if reworded := sum(first[id][0].prompt_sha != second[id][0].prompt_sha for id in both):
            warnings.append(f"{name}: {reworded} of {len(both)} problems were asked in other words")
        if len(first) > len(both) or len(second) > len(both):
            warnings.append(f"{name}: {len(first)} and {len(second)} problems, {len(both)} in both")
        sent = [left_out_of(chain.from_iterable(one.values())) for one in (first, second)]
        if sent[0] != sent[1]:
            words = [", ".join(f"{key} ({share:.0%})" for key, share in one.items()) or "none" for one in sent]
            warnings.append(f"parameters left out of {name}: {words[0]}, now {words[1]}")
        if both:
            found[name] = _differ([_share(first[id]) for id in both], [_share(second[id]) for id in both], both)
    if not found:
        raise ConfigError("the two evaluations have no problem in common: give two of the same benchmarks")
    return {"before": before.identity, "after": after.identity, "benchmarks": found, "warnings": warnings}


def _differ(first: list[float], second: list[float], ids: list[str]) -> Json:
    difference = paired_difference(first, second)
    pairs = list(zip(ids, first, second, strict=True))
    return {
        "problems": len(ids),
        "before": round(sum(first) / len(first), 6),
        "after": round(sum(second) / len(second), 6),
        "difference": round(difference.mean, 6),
        "interval": [round(bound, 6) for bound in difference.interval],
        "now_right": [id for id, old, new in pairs if old < 0.5 <= new],
        "now_wrong": [id for id, old, new in pairs if new < 0.5 <= old],
    }


def _share(samples: list[SampleRecord]) -> float:
    return sum(bool(record.correct) for record in samples) / len(samples)


def difference_table(title: str, found: Json) -> tables.ResultTable:
    """Return the table of differences, a row for every benchmark."""
    rows = [
        [name, str(one["problems"]), tables.percent(one["before"]), tables.percent(one["after"]),
         f"{100 * one['difference']:+.1f} ({' to '.join(f'{100 * bound:+.1f}' for bound in one['interval'])})"
         + (" *" if is_clear(one) else ""),
         str(len(one["now_right"])), str(len(one["now_wrong"]))]
        for name, one in found["benchmarks"].items()
    ]  # fmt: skip
    head = ["benchmark, %", "problems", "before", "after", "difference (95 %)", "now right", "now wrong"]
    return tables.ResultTable(title, head, rows)


def is_clear(one: Json) -> bool:
    """Whether the interval of a difference excludes 0."""
    low, high = one["interval"]
    return bool(low > 0 or high < 0)


def run(settings: EvaluationSettings, console: Console) -> int:
    """Compare the two folders of the settings; with --out, compare.json and compare.md are written there."""
    if len(settings.benchmarks) != 2:
        raise ConfigError("--compare takes the folders of two evaluations: --compare BEFORE AFTER")
    found = compare(*(read_run(Path(path)) for path in settings.benchmarks))
    names = [
        " ".join(filter(None, (path, "=", found[when]["model"], found[when]["weights"])))
        for path, when in zip(settings.benchmarks, ("before", "after"), strict=True)
    ]
    table = difference_table(f"{' -> '.join(names)} (*: the interval does not hold 0)", found)
    console.print(table.rich())
    for name, one in found["benchmarks"].items():
        for words in ("now_right", "now_wrong"):
            if ids := one[words]:
                more = f" and {len(ids) - FLIPPED} more" if len(ids) > FLIPPED else ""
                text = f"{name}, {words.replace('_', ' ')}: {', '.join(ids[:FLIPPED])}{more}"
                console.print(text, markup=False, soft_wrap=True)
    for line in found["warnings"]:
        console.print(f"warning: not the same in both: {line}", style="yellow", markup=False, soft_wrap=True)
    if settings.out:
        write(Path(settings.out), table, found)
        console.print(f"{settings.out}: compare.json, compare.md", markup=False, soft_wrap=True)
    return 0


def write(folder: Path, table: tables.ResultTable, found: Json) -> None:
    """Write compare.json and compare.md."""
    folder.mkdir(parents=True, exist_ok=True)
    lists = [
        f"- {tables.in_markdown(name)}, {words.replace('_', ' ')}: {tables.in_markdown(', '.join(one[words]))}\n"
        for name, one in found["benchmarks"].items()
        for words in ("now_right", "now_wrong")
        if one[words]
    ]
    warnings = [f"- **not the same in both: {tables.in_markdown(line)}**\n" for line in found["warnings"]]
    text = f"# {tables.in_markdown(table.title)}\n\n{table.markdown()}\n{''.join(warnings)}{''.join(lists)}"
    for name, content in (("compare.json", json.dumps(found, indent=1, sort_keys=True) + "\n"), ("compare.md", text)):
        write_whole(folder / name, content)
