"""Renders the figures of an evaluation as tables: on the terminal, in summary.md and in report.html."""

from __future__ import annotations

import re
from html import escape as escape_html
from typing import NamedTuple

from rich import box
from rich.markup import escape
from rich.table import Table

from evaluation.results import Json
from evaluation.tasks import BenchmarkSampling
from shared.clean_text import clean

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
        for place, name in enumerate(self.head):
            widest = max((len(row[place]) for row in self.rows), default=0)
            table.add_column(name, justify="right" if place else "left", min_width=widest)
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table

    def markdown(self) -> str:
        """Return the table in Markdown, without its title."""
        lines = [self.head, ["---", *["---:"] * (len(self.head) - 1)], *self.rows]
        return "\n".join("| " + " | ".join(map(in_markdown, line)) + " |" for line in lines) + "\n"

    def html(self) -> str:
        """Return the table in HTML, without its title."""
        names = "".join(f'<th scope="col">{escape_html(clean(name))}</th>' for name in self.head)
        lines = "".join(
            "<tr>" + "".join(f"<td>{escape_html(clean(cell))}</td>" for cell in row) + "</tr>" for row in self.rows
        )
        return f'<div class="scroll"><table><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table></div>'


def in_markdown(text: str) -> str:
    """Return a text of others for Markdown: in one line, without links, HTML or columns of its own."""
    return re.sub(r"[\\`<\[|]", r"\\\g<0>", " ".join(clean(text).splitlines()))


def percent(share: float | None) -> str:
    """Format a share as a percentage: 0.1234 -> "12.3"; None -> "-"."""
    return "-" if share is None else f"{100 * share:.1f}"


def score_table(results: Json) -> ResultTable:
    """Return the scores: a row for every benchmark, and one for each of its parts."""
    rows = []
    for name, found in results["benchmarks"].items():
        samples = found["sampling"]["samples"]
        rows.append(_score_row(name, found, samples))
        rows += [_score_row(f"  {part.partition('/')[2]}", one, samples) for part, one in found["parts"].items()]
    head = ["benchmark, %", "problems", "pass@1 (95 %)", "pass@k (k)", "maj@k (k)", "cut", "nothing to judge", "errors",
            "tokens"]  # fmt: skip
    return ResultTable(f"{results['model']} {results['weights']}".strip(), head, rows)


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


def _sampled(found: Json, field: str) -> str:
    """Return a value of the sampling, or that the server's own was in force."""
    left_out = found.get("left_out", {})
    renamed = field == "max_tokens" and "max_completion_tokens" not in left_out
    return "the server's" if field in left_out and not renamed else f"{found['sampling'][field]:g}"


def warning_lines(results: Json) -> list[str]:
    """Return all warnings with their benchmark."""
    return [f"{name}: {text}" for name, found in results["benchmarks"].items() for text in found["warnings"]]


def markdown(results: Json) -> str:
    """Return the contents of summary.md."""
    weights = f", weights: {results['weights']}" if results["weights"] else ""
    title = in_markdown(results["model"] + weights)
    parts = [
        f"# Evaluation of {title}\n\npass@1 is the mean over problems, its interval resamples "
        "problems; definitions: docs/evaluation.md.\n",
        score_table(results).markdown(),
    ]
    if warnings := warning_lines(results):
        parts.append("".join(f"- **{in_markdown(line)}**\n" for line in warnings))
    for table in (instruction_table(results), *language_tables(results), sampling_table(results)):
        if table is not None:
            parts.append(f"## {table.title}\n\n{table.markdown()}")
    return "\n".join(parts)
