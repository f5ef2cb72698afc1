"""Draws the plots of report.html as SVG: scores with intervals, pass@k and maj@k, languages, lengths.

Texts come from file names and are escaped; colours come from the page's style sheet, by class.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from evaluation.records import Record
from evaluation.tables import percent

Json = dict[str, Any]
LABEL, WIDTH, ROW = 190, 420, 26
"""pixels: width of the labels, width of the plot, height of a row"""
BINS = 24


def scores(results: Json) -> str:
    """Draw a bar for each benchmark, with its 95 % interval as a line."""
    shapes, place = [], 0
    for name, found in results["benchmarks"].items():
        if not found["problems"]:
            continue
        middle, score = place * ROW + 13, found["pass_at"]["1"]
        low, high = found["interval"]
        shapes += [
            _text(LABEL - 8, middle + 4, name, "end"),
            _box(LABEL, middle - 8, WIDTH, 16, "ground"),
            _box(LABEL, middle - 8, score * WIDTH, 16, "bar"),
            _line(LABEL + low * WIDTH, middle, LABEL + high * WIDTH, middle, "whisker"),
            _text(LABEL + WIDTH + 8, middle + 4, f"{percent(score)} %"),
        ]
        place += 1
    return _svg(LABEL + WIDTH + 70, place * ROW, "pass@1 with its 95 % interval", shapes)


def curves(name: str, found: Json) -> str:
    """Draw pass@k and maj@k over k, on a logarithmic scale."""
    width, height, left, bottom = 240, 130, 40, 20
    shapes = []
    for share in (0.0, 0.5, 1.0):
        y = 8 + (1 - share) * height
        shapes += [_line(left, y, left + width, y, "grid"), _text(left - 6, y + 4, f"{share:.0%}", "end")]
    sizes = [int(k) for k in found["pass_at"]]
    most = math.log2(max(sizes)) or 1.0
    for k in sizes:
        shapes.append(_text(left + math.log2(k) / most * width, height + 8 + bottom - 4, str(k), "middle"))
    for key, kind in (("pass_at", "pass"), ("majority_at", "majority")):
        known = [(int(k), share) for k, share in (found[key] or {}).items() if share is not None]
        points = [f"{left + math.log2(k) / most * width:.1f},{8 + (1 - share) * height:.1f}" for k, share in known]
        shapes.append(f'<polyline class="curve {kind}" points="{" ".join(points)}"/>')
    return _svg(left + width + 20, height + 8 + bottom, f"{name}: pass@k and maj@k over k", shapes)


def languages(results: Json) -> str:
    """Draw, for each language, the share of thoughts and answers that were in it."""
    shapes, place = [], 0
    for name, benchmark in results["benchmarks"].items():
        for language, found in benchmark.get("languages", {}).items():
            for part in ("thoughts", "answer"):
                y, x = place * ROW + 5, float(LABEL)
                shapes.append(_text(LABEL - 8, y + 12, f"{name}, {language}, {part}", "end"))
                for word in ("same", "other", "undetermined", "none"):
                    width = found[part][word] * WIDTH
                    shapes.append(_box(x, y, width, 16, word))
                    x += width
                shapes.append(_text(LABEL + WIDTH + 8, y + 12, f"{percent(found[part]['same'])} %"))
                place += 1
    return _svg(LABEL + WIDTH + 70, place * ROW, "Language of thoughts and answers", shapes)


def lengths(name: str, records: Sequence[Record]) -> str:
    """Draw a histogram of the tokens of right, wrong and cut responses; "" if no token counts are known."""
    known = [(record.completion_tokens, record) for record in records if record.completion_tokens]
    if not known:
        return ""
    width, height, left, bottom = 240, 110, 40, 20
    most = max(tokens for tokens, _ in known)
    bins = [{"right": 0, "wrong": 0, "cut": 0} for _ in range(BINS)]
    for tokens, record in known:
        kind = "cut" if record.finish_reason == "length" else "right" if record.correct else "wrong"
        bins[min(BINS - 1, tokens * BINS // (most + 1))][kind] += 1
    tallest = max(sum(one.values()) for one in bins)
    shapes = [_line(left, 8 + height, left + width, 8 + height, "grid"), _text(left - 6, 16, str(tallest), "end"),
              _text(left, height + 8 + bottom - 4, "0"),
              _text(left + width, height + 8 + bottom - 4, f"{most:,} tokens", "end")]  # fmt: skip
    for place, one in enumerate(bins):
        y = 8.0 + height
        for kind, count in one.items():
            tall = count / tallest * height
            y -= tall
            shapes.append(_box(left + place * width / BINS, y, width / BINS - 1, tall, kind))
    return _svg(left + width + 20, height + 8 + bottom, f"{name}: tokens of right, wrong and cut responses", shapes)


def _svg(width: int, height: int, title: str, shapes: Sequence[str]) -> str:
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><title>{escape(title)}</title>{"".join(shapes)}</svg></figure>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _line(x: float, y: float, to_x: float, to_y: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"/>'
