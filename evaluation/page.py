"""Renders report.html: tables, plots and a browser of samples in one file that needs no network.

Texts of models are untrusted. They are embedded as JSON in which "<" is escaped, and shown by the page's script as
plain text; the content security policy allows only that script, by its hash, and nothing to be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from evaluation import plots, tables
from evaluation.benchmarks import Benchmark, Task
from evaluation.records import Key, Record
from shared.jsonl import spread

Json = dict[str, Any]
HERE = Path(__file__).parent
SHOWN = 400
"""largest number of samples that a page embeds"""
SHOWN_CHARACTERS = 20_000
"""largest length of a text of a sample; the middle of longer ones is left out"""


def render(results: Json, benchmarks: list[Benchmark], records: dict[Key, Record]) -> str:
    """Return the HTML of the page."""
    chosen = [
        (task, record)
        for benchmark in benchmarks
        for task in benchmark.tasks
        for sample in range(benchmark.sampling.samples)
        if (record := records.get(Key(benchmark.name, task.problem.id, sample))) is not None
    ]
    shown = spread(chosen, SHOWN)
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    weights = f", weights: {results['weights']}" if results["weights"] else ""
    return Template((HERE / "page.html").read_text(encoding="utf-8")).substitute(
        policy=escape(policy), style=style, script=script, title=escape(f"{results['model']}{weights}"),
        figures=_figures(results, [record for _, record in chosen]),
        shown=f"{len(shown)} of {len(chosen)} samples are in this file, evenly chosen; all are in samples.jsonl.",
        samples=embed([_sample(task, record) for task, record in shown]),
    )  # fmt: skip


def embed(value: Any) -> str:
    """Return JSON for the inside of a script element, escaped so that no content can end the element."""
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c").replace("\u2028", "\\u2028")


def _figures(results: Json, records: list[Record]) -> str:
    """Return the HTML of the tables and plots."""
    parts = [_table(tables.HEAD, tables.score_rows(results))]
    parts += [f'<p class="warning">{escape(line)}</p>' for line in tables.warning_lines(results)]
    parts.append(plots.scores(results))
    if rows := tables.instruction_rows(results):
        parts.append(_table(tables.INSTRUCTION_HEAD, rows))
    small = [
        plots.curves(name, found)
        for name, found in results["benchmarks"].items()
        if found["problems"] and found["sampling"]["samples"] > 1
    ]
    small += [
        plots.lengths(name, [record for record in records if record.benchmark == name and not record.error])
        for name in results["benchmarks"]
    ]
    parts.append(f'<div class="small">{"".join(small)}</div>')
    parts += [_table(tables.LANGUAGE_HEAD, tables.language_rows(results)), plots.languages(results)]
    parts.append(_table(tables.SAMPLING_HEAD, tables.sampling_rows(results)))
    return "\n".join(parts)


def _table(head: list[str], rows: tables.Rows) -> str:
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table></div>'


def _sample(task: Task, record: Record) -> Json:
    """Return the fields of a sample that the browser shows."""
    return {
        "benchmark": record.benchmark, "id": record.id, "sample": record.sample, "outcome": outcomes(record),
        "language": record.wanted_language, "prompt": _short(task.prompt), "thoughts": _short(record.thoughts),
        "answer": _short(record.answer), "gold": record.gold, "extracted": _short(record.extracted or ""),
        "verdict": str(record.verdict or "no response"), "reason": record.error or record.reason,
        "finish_reason": record.finish_reason, "tokens": record.completion_tokens,
        "thoughts_language": record.thoughts_spoken.language, "answer_language": record.answer_spoken.language,
    }  # fmt: skip


def outcomes(record: Record) -> list[str]:
    """Return the names of the filters that a sample passes."""
    if record.error:
        return ["error"]
    found = ["right" if record.correct else "wrong"]
    if record.finish_reason == "length":
        found.append("truncated")
    if record.extracted is None and record.kind != "instructions":
        found.append("unextracted")
    if record.thoughts_spoken.same is False or record.answer_spoken.same is False:
        found.append("wrong language")
    return found


def _short(text: str) -> str:
    left_out = len(text) - SHOWN_CHARACTERS
    if left_out <= 0:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]}\n\n[... {left_out:,} characters left out ...]\n\n{text[-half:]}"


def _hash(text: str) -> str:
    """Return the hash of a text in the form of a content security policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
