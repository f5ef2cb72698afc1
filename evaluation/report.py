"""Renders report.html: tables, plots and a browser of samples in one file that needs no network.

Texts of models are untrusted. They are embedded as JSON in which "<" is escaped, and shown by the page's script as
plain text; the content security policy allows only that script, by its hash, and nothing to be loaded. Plots are SVG:
their texts come from file names and are escaped, their colours come from the page's style sheet, by class.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from evaluation import tables
from evaluation.results import Json
from evaluation.samples import SampleKey, SampleRecord, label
from evaluation.tables import percent
from evaluation.tasks import Benchmark, BenchmarkTask
from shared.clean_text import clean
from shared.jsonl import spread

HERE = Path(__file__).parent
SCRIPT = (HERE / "report.js").read_text(encoding="utf-8")
LEGEND = (
    '<p class="legend"><span class="pass">pass@1, mean over the problems</span> The line across a bar is its 95 % '
    "interval, from resampled problems. That of a difference resamples what both have; *: it does not hold 0.</p>"
)
SHOWN = 400
"""largest number of samples that a page embeds"""
SHOWN_CHARACTERS = 20_000
"""largest length of a text of a sample; the middle of longer ones is left out"""


def render(results: Json, benchmarks: list[Benchmark], records: dict[SampleKey, SampleRecord]) -> str:
    """Return the HTML of the page."""
    chosen = [
        (task, record)
        for benchmark in benchmarks
        for task in benchmark.tasks
        for sample in range(benchmark.sampling.samples)
        if (record := records.get(SampleKey(benchmark.name, task.problem.id, sample))) is not None
    ]
    shown = spread(chosen, SHOWN)
    more = Template((HERE / "samples.html").read_text(encoding="utf-8")).substitute(
        shown=f"{len(shown)} of {len(chosen)} samples are in this file, evenly chosen; all are in samples.jsonl.",
        samples=embed([_sample(task, record) for task, record in shown]), script=SCRIPT,
    )  # fmt: skip
    return _page("Evaluation", label(results), _figures(results, [record for _, record in chosen]), more)


def render_comparison(table: tables.ResultTable, comparison: Json) -> str:
    """Return the HTML of the page about two evaluations."""
    parts = [table.html()]
    parts += [_warning(f"not the same in both: {line}") for line in comparison["warnings"]]
    for when in ("before", "after"):
        rows = [(name, one[when], *one[f"{when}_interval"]) for name, one in comparison["benchmarks"].items()]
        parts.append(plot_bars(f"pass@1 {when}, with its 95 % interval: {label(comparison[when])}", rows))
    parts += [f"<p>{escape(clean(line))}</p>" for line in tables.comparison_lines(comparison)]
    parts.append(LEGEND)
    return _page("Comparison of two evaluations", table.title, "\n".join(parts), "")


def _page(heading: str, title: str, figures: str, more: str) -> str:
    """Fill the template: its style and script are the only ones that its policy allows."""
    style = (HERE / "report.css").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; style-src '{hash_source(style)}'; script-src '{hash_source(SCRIPT)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    return Template((HERE / "report.html").read_text(encoding="utf-8")).substitute(
        policy=escape(policy), style=style, heading=heading, title=escape(clean(title)), figures=figures, more=more
    )


def _warning(line: str) -> str:
    return f'<p class="warning">{escape(clean(line))}</p>'


def embed(value: Any) -> str:
    """Return JSON for the inside of a script element, escaped so that no content can end the element."""
    return clean(json.dumps(value, ensure_ascii=False)).replace("<", "\\u003c")


def _figures(results: Json, records: list[SampleRecord]) -> str:
    """Return the HTML of the tables and plots."""
    parts = [tables.score_table(results).html()]
    parts += map(_warning, tables.warning_lines(results))
    parts.append(plot_scores(results))
    if (instructions := tables.instruction_table(results)) is not None:
        parts.append(instructions.html())
    small = [
        plot_curves(name, found)
        for name, found in results["benchmarks"].items()
        if found["problems"] and found["sampling"]["samples"] > 1
    ]
    small += [
        plot_lengths(name, [record for record in records if record.benchmark == name and not record.error])
        for name in results["benchmarks"]
    ]
    parts.append(f'<div class="small">{"".join(small)}</div>')
    parts += [f"<h2>{escape(table.title)}</h2>{table.html()}" for table in tables.language_tables(results)]
    parts += [plot_languages(results), tables.sampling_table(results).html()]
    return "\n".join(parts)


def _sample(task: BenchmarkTask, record: SampleRecord) -> Json:
    """Return the fields of a sample that the browser shows."""
    return {
        "benchmark": record.benchmark, "id": record.id, "sample": record.sample, "outcome": outcomes(record),
        "language": record.wanted_language, "prompt": shorten(task.prompt), "reasoning": shorten(record.reasoning),
        "answer": shorten(record.answer), "ground_truth": record.ground_truth,
        "extracted": shorten(record.extracted or ""),
        "verdict": str(record.verdict or "no response"), "reason": record.error or record.reason,
        "finish_reason": record.finish_reason, "tokens": record.completion_tokens,
        "reasoning_language": record.reasoning_language.language, "answer_language": record.answer_language.language,
    }  # fmt: skip


def outcomes(record: SampleRecord) -> list[str]:
    """Return the names of the filters that a sample passes."""
    if record.error:
        return ["error"]
    names = ["right" if record.correct else "wrong"]
    if record.finish_reason == "length":
        names.append("truncated")
    if record.extracted is None and record.kind != "instructions":
        names.append("unextracted")
    if record.refused or record.reasoning_language.same is False or record.answer_language.same is False:
        names.append("wrong language")
    return names


def shorten(text: str) -> str:
    text = clean(text)
    left_out = len(text) - SHOWN_CHARACTERS
    if left_out <= 0:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]}\n\n[... {left_out:,} characters left out ...]\n\n{text[-half:]}"


def hash_source(text: str) -> str:
    """Return the hash of a text in the form of a content security policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


LETTER, WIDTH, ROW = 8, 300, 26
"""pixels: width of a letter, width of the plot, height of a row"""
BINS = 24


def plot_scores(results: Json) -> str:
    """Draw a bar for each benchmark, with its 95 % interval as a line."""
    rows = [
        (name, found["pass_at"]["1"], *found["interval"])
        for name, found in results["benchmarks"].items()
        if found["problems"]
    ]
    return plot_bars("pass@1 with its 95 % interval", rows)


def plot_bars(title: str, rows: Sequence[tuple[str, float, float, float]]) -> str:
    """Draw a bar for each (name, share, low, high), with a line from low to high."""
    shapes, label = [], LETTER * max((len(name) for name, *_ in rows), default=0) + 16
    for row, (name, share, low, high) in enumerate(rows):
        middle = row * ROW + 13
        shapes += [
            _text(label - 8, middle + 4, name, "end"),
            _box(label, middle - 8, WIDTH, 16, "ground"),
            _box(label, middle - 8, share * WIDTH, 16, "bar"),
            _line(label + low * WIDTH, middle, label + high * WIDTH, middle, "whisker"),
            _text(label + WIDTH + 8, middle + 4, f"{percent(share)} %"),
        ]
    return _svg(label + WIDTH + 70, len(rows) * ROW, title, shapes)


def plot_curves(name: str, figures: Json) -> str:
    """Draw pass@k and maj@k over k, on a logarithmic scale."""
    width, height, left, bottom = 240, 130, 50, 20
    shapes = []
    for share in (0.0, 0.5, 1.0):
        y = 8 + (1 - share) * height
        shapes += [_line(left, y, left + width, y, "grid"), _text(left - 6, y + 4, f"{share:.0%}", "end")]
    sizes = [int(k) for k in figures["pass_at"]]
    most = math.log2(max(sizes)) or 1.0
    for k in sizes:
        shapes.append(_text(left + math.log2(k) / most * width, height + 8 + bottom - 4, str(k), "middle"))
    for key, kind in (("pass_at", "pass"), ("majority_at", "majority")):
        known = [(int(k), share) for k, share in (figures[key] or {}).items() if share is not None]
        points = [f"{left + math.log2(k) / most * width:.1f},{8 + (1 - share) * height:.1f}" for k, share in known]
        shapes.append(f'<polyline class="curve {kind}" points="{" ".join(points)}"/>')
    return _svg(left + width + 20, height + 8 + bottom, f"{name}: pass@k and maj@k over k", shapes)


def plot_languages(results: Json) -> str:
    """Draw, for each language, the share of reasoning and answers that were in it."""
    shares = {
        f"{name}, {language}, {text}": parts[text]
        for name, benchmark in results["benchmarks"].items()
        for language, parts in benchmark.get("languages", {}).items()
        for text in ("reasoning", "answer", "response")
    }
    shapes, label = [], LETTER * max(map(len, shares), default=0) + 16
    for row, (name, share) in enumerate(shares.items()):
        y, x = row * ROW + 5, float(label)
        shapes.append(_text(label - 8, y + 12, name, "end"))
        for word in tables.SHARES:
            shapes.append(_box(x, y, share[word] * WIDTH, 16, word))
            x += share[word] * WIDTH
        shown = f"{percent(share['same'])} %" if share["same"] or share["other"] else "-"
        shapes.append(_text(label + WIDTH + 8, y + 12, shown))
    return _svg(label + WIDTH + 70, len(shares) * ROW, "Language of reasoning and answers", shapes)


def plot_lengths(name: str, records: Sequence[SampleRecord]) -> str:
    """Draw a histogram of the tokens of right, wrong and cut responses; "" if no token counts are known."""
    known = [(record.completion_tokens, record) for record in records if record.completion_tokens]
    if not known:
        return ""
    width, height, left, bottom = 240, 110, 50, 20
    most = max(tokens for tokens, _ in known)
    bins = [{"right": 0, "wrong": 0, "cut": 0} for _ in range(BINS)]
    for tokens, record in known:
        kind = "cut" if record.finish_reason == "length" else "right" if record.correct else "wrong"
        bins[min(BINS - 1, tokens * BINS // (most + 1))][kind] += 1
    tallest = max(sum(counts.values()) for counts in bins)
    shapes = [_line(left, 8 + height, left + width, 8 + height, "grid"), _text(left - 6, 16, str(tallest), "end"),
              _text(left, height + 8 + bottom - 4, "0"),
              _text(left + width, height + 8 + bottom - 4, f"{most:,} tokens", "end")]  # fmt: skip
    for number, counts in enumerate(bins):
        y = 8.0 + height
        for kind, count in counts.items():
            tall = count / tallest * height
            y -= tall
            shapes.append(_box(left + number * width / BINS, y, width / BINS - 1, tall, kind))
    return _svg(left + width + 20, height + 8 + bottom, f"{name}: tokens of right, wrong and cut responses", shapes)


def _svg(width: int, height: int, title: str, shapes: Sequence[str]) -> str:
    return (
        f'<figure><figcaption>{escape(clean(title))}</figcaption><svg role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><title>{escape(clean(title))}</title>{"".join(shapes)}</svg></figure>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(clean(text))}</text>'


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _line(x: float, y: float, to_x: float, to_y: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"/>'
