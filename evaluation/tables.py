"""Renders the figures of an evaluation as tables: on the terminal, and in summary.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from evaluation.benchmarks import Sampling

Json = dict[str, Any]
Rows = list[list[str]]
HEAD = ["benchmark, %", "problems", "pass@1 (95 %)", "pass@k (k)", "maj@k (k)", "cut", "nothing to judge", "errors",
        "tokens"]  # fmt: skip
SHARES = ("same", "other", "undetermined", "none")
LANGUAGE_HEAD = ["benchmark", "language", "responses", *(f"{part}, %: {' / '.join(SHARES)}" for part in
                 ("thoughts", "answer"))]  # fmt: skip
INSTRUCTION_HEAD = ["benchmark, %", "prompts, strict", "prompts, loose", "instructions, strict", "instructions, loose"]
SAMPLING_HEAD = ["benchmark", "temperature", "top-p", "max tokens", "samples"]
WIDTH = 120
"""least width of tables on a terminal, in characters"""


def percent(share: float | None) -> str:
    """Format a share as a percentage: 0.1234 -> "12.3"; None -> "-"."""
    return "-" if share is None else f"{100 * share:.1f}"


def score_rows(results: Json) -> Rows:
    """Return a row for every benchmark, and one for each of its parts."""
    rows = []
    for name, found in results["benchmarks"].items():
        samples = found["sampling"]["samples"]
        rows.append(_score_row(name, found, samples))
        rows += [_score_row(f"  {part.partition('/')[2]}", one, samples) for part, one in found["parts"].items()]
    return rows


def _score_row(name: str, found: Json, samples: int) -> list[str]:
    if not found["problems"]:
        return [name, f"0 x {samples}", *["-"] * 5, percent(found["errors"]), "-"]
    low, high = found["interval"]
    most, tokens = str(samples), found["completion_tokens"]

    def at_most(shares: dict[str, float | None] | None) -> str:
        return f"{percent(shares[most])} ({most})" if shares and samples > 1 else "-"

    return [
        name, f"{found['problems']} x {samples}",
        f"{percent(found['pass_at']['1'])} ({percent(low)} to {percent(high)})",
        at_most(found["pass_at"]), at_most(found["majority_at"]), percent(found["truncated"]),
        percent(found["unextracted"]), percent(found["errors"]), "-" if tokens is None else f"{tokens:,.0f}",
    ]  # fmt: skip


def language_rows(results: Json) -> Rows:
    """Return a row for every language that was requested in a benchmark."""
    return [
        [name, language, str(found["responses"]),
         *(" / ".join(percent(found[part][word]) for word in SHARES) for part in ("thoughts", "answer"))]
        for name, benchmark in results["benchmarks"].items()
        for language, found in benchmark.get("languages", {}).items()
    ]  # fmt: skip


def instruction_rows(results: Json) -> Rows:
    """Return a row of IFEval's figures for every benchmark that has them."""
    return [
        [name, *(percent(found["instructions"][word]) for word in
                 ("prompt_strict", "prompt_loose", "instruction_strict", "instruction_loose"))]
        for name, found in results["benchmarks"].items()
        if "instructions" in found
    ]  # fmt: skip


def sampling_rows(results: Json) -> Rows:
    """Return a row for the sampling of every benchmark."""
    return [
        [name, *(f"{found['sampling'][field]:g}" for field in Sampling._fields)]
        for name, found in results["benchmarks"].items()
    ]


def warning_lines(results: Json) -> list[str]:
    """Return all warnings with their benchmark."""
    return [f"{name}: {text}" for name, found in results["benchmarks"].items() for text in found["warnings"]]


def rich_table(title: str, head: Sequence[str], rows: Rows) -> Table:
    """Return a table for the terminal: names aligned left, figures right."""
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for place, name in enumerate(head):
        widest = max((len(row[place]) for row in rows), default=0)
        table.add_column(name, justify="right" if place else "left", min_width=widest)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def markdown_table(head: Sequence[str], rows: Rows) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def markdown(results: Json) -> str:
    """Return the contents of summary.md."""
    weights = f", weights: {results['weights']}" if results["weights"] else ""
    parts = [
        f"# Evaluation of {results['model']}{weights}\n\npass@1 is the mean over problems, its interval resamples "
        "problems; definitions: docs/evaluation.md.\n",
        markdown_table(HEAD, score_rows(results)),
    ]
    if warnings := warning_lines(results):
        parts.append("".join(f"- **{line}**\n" for line in warnings))
    if rows := instruction_rows(results):
        parts.append("## Instructions\n\n" + markdown_table(INSTRUCTION_HEAD, rows))
    parts.append("## Languages\n\n" + markdown_table(LANGUAGE_HEAD, language_rows(results)))
    parts.append("## Sampling\n\n" + markdown_table(SAMPLING_HEAD, sampling_rows(results)))
    return "\n".join(parts)
