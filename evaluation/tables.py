"""Renders the figures of an evaluation as tables: on the terminal, in summary.md and in report.html; and compares two.

The comparison is of the problems that both have, paired: the interval of the difference resamples problems with the
results of both runs. A problem flips when its share of right samples crosses one half.
"""

from __future__ import annotations

import re
from collections import defaultdict
from html import escape as escape_html
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.markup import escape
from rich.table import Table

from evaluation.results import Json, left_out_of
from evaluation.samples import COMMON, SampleRecord, label, read_identity, read_samples
from evaluation.tasks import BenchmarkSampling
from shared.clean_text import clean
from shared.errors import ConfigError
from shared.journal import differences
from shared.statistics import cluster_bootstrap, paired_difference

SHARES = {
    "same": "in it", "other": "another, or mixed", "undetermined": "too few words to tell", "none": "no text",
    "refused": "refused",
}  # fmt: skip
"""share of the responses to requests for a language -> what a reader is told"""
WIDTH = 120
"""least width of tables on a terminal, in characters"""


class ResultTable(NamedTuple):
    """A table of figures, for the terminal, Markdown or HTML: the first column holds names, the others figures."""

    title: str
    head: list[str]
    rows: list[list[str]]

    def rich(self) -> Table:
        """Return the table for the terminal: names aligned left, figures right."""
        table = Table(
            title=escape(self.title), title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False
        )
        for column, name in enumerate(self.head):
            widest = max((len(row[column]) for row in self.rows), default=0)
            table.add_column(name, justify="right" if column else "left", min_width=widest)
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table

    def markdown(self) -> str:
        """Return the table in Markdown, without its title."""
        lines = [self.head, ["---", *["---:"] * (len(self.head) - 1)], *self.rows]
        return "\n".join("| " + " | ".join(map(in_markdown, line)) + " |" for line in lines) + "\n"

    def html(self) -> str:
        """Return the table in HTML, without its title."""
        names = [escape_html(clean(name)) for name in self.head]
        head = "".join(f'<th scope="col">{name}</th>' for name in names)
        lines = "".join(f"<tr>{''.join(map(_cell, names, row))}</tr>" for row in self.rows)
        return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _cell(name: str, text: str) -> str:
    """A cell in HTML; a phone shows the name of its column beside it."""
    return f'<td data-name="{name}">{escape_html(clean(text))}</td>'


def in_markdown(text: str) -> str:
    """Return a text of others for Markdown: in one line, without links, HTML or columns of its own."""
    return re.sub(r"[\\`<\[|]", r"\\\g<0>", " ".join(clean(text).splitlines()))


def percent(share: float | None) -> str:
    """Format a share as a percentage: 0.1234 -> "12.3"; None -> "-"."""
    return "-" if share is None else f"{100 * share:.1f}"


def score_table(results: Json) -> ResultTable:
    """Return the scores: a row for every benchmark, and one for each of its parts."""
    rows = []
    for name, figures in results["benchmarks"].items():
        samples = figures["sampling"]["samples"]
        rows.append(_score_row(name, figures, samples))
        rows += [_score_row(f"  {part.partition('/')[2]}", one, samples) for part, one in figures["parts"].items()]
    head = ["benchmark, %", "problems", "pass@1 (95 %)", "pass@k (k)", "maj@k (k)", "cut", "nothing to judge", "errors",
            "tokens"]  # fmt: skip
    return ResultTable(label(results), head, rows)


def _score_row(name: str, figures: Json, samples: int) -> list[str]:
    if not figures["problems"]:
        return [name, f"0 x {samples}", *["-"] * 5, percent(figures["errors"]), "-"]
    low, high = figures["interval"]
    most, tokens = str(samples), figures["completion_tokens"]

    def at_most(shares: dict[str, float | None] | None) -> str:
        return f"{percent(shares[most])} ({most})" if shares and samples > 1 else "-"

    return [
        name, f"{figures['problems']} x {samples}",
        f"{percent(figures['pass_at']['1'])} ({percent(low)} to {percent(high)})",
        at_most(figures["pass_at"]), at_most(figures["majority_at"]), percent(figures["truncated"]),
        percent(figures["unextracted"]), percent(figures["errors"]), "-" if tokens is None else f"{tokens:,.0f}",
    ]  # fmt: skip


def language_tables(results: Json) -> list[ResultTable]:
    """Return the languages: rows for reasoning, answers and whole responses by the language that was requested; and by
    that of the question, where questions and requests differ."""
    rows, crossed = [], dict[str, dict[str, str]]()
    asked: list[str] = []
    for name, benchmark in results["benchmarks"].items():
        languages = benchmark.get("languages", {})
        for language, shares in languages.items():
            measured = ", ".join(f"{what} {percent(share)}" for what, share in shares["measured"].items())
            rows += [
                [name, language, part, str(shares["responses"]), *(percent(shares[part][word]) for word in SHARES),
                 measured if part == "response" else ""] for part in ("reasoning", "answer", "response")
            ]  # fmt: skip
        if any(shares["questions"].keys() != {language} for language, shares in languages.items()):
            asked += [language for language in languages if language not in asked]
            for language, shares in languages.items():
                for question, share in shares["questions"].items():
                    crossed.setdefault(f"{name}, {question}", {})[language] = percent(share)
    head = ["benchmark, %", "language", "part", "responses", *SHARES.values(), "measured"]
    tables = [ResultTable("Languages, as requested or else of the problem", head, rows)]
    if crossed:
        title = "Responses in the requested language, by the language of the question"
        lines = [[name, *(by.get(language, "-") for language in asked)] for name, by in sorted(crossed.items())]
        tables.append(ResultTable(title, ["benchmark and question, %", *asked], lines))
    return tables


def instruction_table(results: Json) -> ResultTable | None:
    """Return IFEval's figures: a row for every benchmark that has them; None if there is none."""
    figures = ("prompt_strict", "prompt_loose", "instruction_strict", "instruction_loose")
    rows = [
        [name, *(percent(found["instructions"][figure]) for figure in figures)]
        for name, found in results["benchmarks"].items()
        if "instructions" in found
    ]
    head = ["benchmark, %", "prompts, strict", "prompts, loose", "instructions, strict", "instructions, loose"]
    return ResultTable("Instructions", head, rows) if rows else None


def sampling_table(results: Json) -> ResultTable:
    """Return the sampling of every benchmark."""
    rows = [
        [name, *(_sampled(found, field) for field in BenchmarkSampling._fields)]
        for name, found in results["benchmarks"].items()
    ]
    return ResultTable("Sampling", ["benchmark", "temperature", "top-p", "max tokens", "samples"], rows)


def _sampled(figures: Json, field: str) -> str:
    """Return a value of the sampling, or that the server's own was in force."""
    left_out = figures.get("left_out", {})
    renamed = field == "max_tokens" and "max_completion_tokens" not in left_out
    return "the server's" if field in left_out and not renamed else f"{figures['sampling'][field]:g}"


def warning_lines(results: Json) -> list[str]:
    """Return all warnings with their benchmark."""
    return [f"{name}: {text}" for name, found in results["benchmarks"].items() for text in found["warnings"]]


def markdown(results: Json) -> str:
    """Return the contents of summary.md."""
    parts = [
        f"# Evaluation of {in_markdown(label(results))}\n\npass@1 is the mean over problems, its interval resamples "
        "problems; definitions: docs/evaluation.md.\n",
        score_table(results).markdown(),
    ]
    if warnings := warning_lines(results):
        parts.append("".join(f"- **{in_markdown(line)}**\n" for line in warnings))
    for table in (instruction_table(results), *language_tables(results), sampling_table(results)):
        if table is not None:
            parts.append(f"## {table.title}\n\n{table.markdown()}")
    return "\n".join(parts)


# ---- two evaluations ------------------------------------------------------------------------------------------------


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
    benchmarks: Json = {}
    shared = before.identity["benchmarks"].keys() & after.identity["benchmarks"].keys()
    settings = [
        {name: each.identity.get(name) for name in COMMON}
        | {name: each.identity["benchmarks"][name] for name in shared}
        for each in (before, after)
    ]
    warnings = differences(settings[0], settings[1])
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
            benchmarks[name] = _differ([_share(first[id]) for id in both], [_share(second[id]) for id in both], both)
    if not benchmarks:
        sets = " and ".join(", ".join(sorted(run.problems)) or "none" for run in (before, after))
        raise ConfigError(f"the two evaluations have no problem in common (they have {sets}): give two of the same "
                          "benchmarks")  # fmt: skip
    return {"before": before.identity, "after": after.identity, "benchmarks": benchmarks, "warnings": warnings}


def _differ(first: list[float], second: list[float], ids: list[str]) -> Json:
    difference = paired_difference(first, second)
    pairs = list(zip(ids, first, second, strict=True))
    return {
        "problems": len(ids),
        "before": round(sum(first) / len(first), 6),
        "after": round(sum(second) / len(second), 6),
        "difference": round(difference.mean, 6),
        "interval": [round(bound, 6) for bound in difference.interval],
        "before_interval": [round(bound, 6) for bound in cluster_bootstrap(first)],
        "after_interval": [round(bound, 6) for bound in cluster_bootstrap(second)],
        "now_right": [id for id, old, new in pairs if old < 0.5 <= new],
        "now_wrong": [id for id, old, new in pairs if new < 0.5 <= old],
    }


def _share(samples: list[SampleRecord]) -> float:
    return sum(bool(record.correct) for record in samples) / len(samples)


def difference_table(title: str, comparison: Json) -> ResultTable:
    """Return the table of differences, a row for every benchmark."""
    rows = [
        [name, str(one["problems"]), percent(one["before"]), percent(one["after"]),
         f"{100 * one['difference']:+.1f} ({' to '.join(f'{100 * bound:+.1f}' for bound in one['interval'])})"
         + " *" * (min(one["interval"]) > 0 or max(one["interval"]) < 0),
         str(len(one["now_right"])), str(len(one["now_wrong"]))]
        for name, one in comparison["benchmarks"].items()
    ]  # fmt: skip
    head = ["benchmark, %", "problems", "before", "after", "difference (95 %)", "now right", "now wrong"]
    return ResultTable(title, head, rows)


def comparison_lines(comparison: Json, most: int | None = None) -> list[str]:
    """Return which problems of each benchmark flipped, at most so many of each kind."""
    lines = []
    for name, difference in comparison["benchmarks"].items():
        for words in ("now_right", "now_wrong"):
            if ids := difference[words]:
                more = f" and {len(ids) - most} more" if most and len(ids) > most else ""
                lines.append(f"{name}, {words.replace('_', ' ')}: {', '.join(ids[:most])}{more}")
    return lines


def comparison_markdown(table: ResultTable, comparison: Json) -> str:
    """Return the contents of compare.md."""
    lines = [f"- **not the same in both: {in_markdown(line)}**\n" for line in comparison["warnings"]]
    lines += [f"- {in_markdown(line)}\n" for line in comparison_lines(comparison)]
    return f"# {in_markdown(table.title)}\n\n{table.markdown()}\n{''.join(lines)}"
