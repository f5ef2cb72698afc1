"""The page of the benchmark matrix: what it gathers stands in the results files, and a step here is measured whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.figures import Figure, Measured, Place
from benchmarks.llama import Shape
from benchmarks.matrix import ABSENT, ADAPTERS, CARDS, HEAD, Load, measure, of_cards, of_other_cpus
from tests.process import in_fresh_process

ROOT = Path(__file__).resolve().parents[2]
TINY = Load(Shape(hidden=64, layers=2, heads=2, kv_heads=1, inner=128, vocabulary=512), 256, ((256, 256, 256),))


def test_rows_of_a_card_by_hand(tmp_path: Path) -> None:
    title = "8b, 18 of 32 layers, 32,768 tokens, one sequence, all layers recomputed"
    figures = {
        title: 9363.4, f"{title}: MFU": 0.39, f"{title}: MFU of this run": 0.5, f"{title}: memory": 124.06,
        "0.6b, 4,096 tokens, nothing recomputed": None, "step of 8,192 tokens with adapters of rank 16: time": 1.6,
        "step with adapters: largest memory": 0.8,
    }  # fmt: skip
    items = [{"figures": [{"name": name, "value": value} for name, value in figures.items()]}]
    results = {"card": "CARD", "date": "2026-01-02", "items": items}
    (tmp_path / "card.json").write_text(json.dumps(results))
    whole, beside = of_cards(tmp_path)
    assert whole == [
        "Llama 3.1 8B, 18 of 32 layers", "all weights", "32,768, one sequence", "all layers", "CARD", "9,363 tokens/s",
        "39.0 %", "124 GiB", "2026-01-02",
    ]  # fmt: skip
    assert beside[1] == "adapters of rank 16" and beside[5] == "0.625 of that of all weights"
    assert beside[7] == "0.800 of that of all weights"


def test_rows_of_another_cpu_by_hand() -> None:
    rows = [Figure("step, 4,096 tokens, float32", [180.0, 200.0], "tokens/s"), Figure("other", [1.0], "")]
    rows.append(Figure("MFU, 4,096 tokens, float32", [0.5, 0.7], ""))
    found = Measured(Place("2 cores", {}, "abc", "2026-01-02"), rows)
    [row] = of_other_cpus({"training": found, "rollout": found})
    assert row[2:] == ["4,096", "nothing", "2 cores; float32", "190 tokens/s", "60.0 %", "not measured", "2026-01-02"]


def test_the_page_holds_what_the_files_of_cards_say() -> None:
    page = (ROOT / "docs" / "matrix.md").read_text(encoding="utf-8")
    rows = list(of_cards(CARDS))
    assert len(rows) > 20 and all(len(row) == len(HEAD) and f"| {' | '.join(row)} |" in page for row in rows)
    assert ("| SmolLM2-135M | adapters of rank 16 | 4,096 |" in page) != (ABSENT in page)


def steps() -> list[float]:
    whole, adapters = measure(TINY, 0), measure(TINY, ADAPTERS)
    assert len(whole.seconds) == len(whole.shares) == 2 and min(*whole.shares, *adapters.shares) > 0
    assert whole.memory_bytes > 50 << 20 and 0 <= whole.others <= 1
    return adapters.seconds


@pytest.mark.slow
def test_a_step_is_measured() -> None:
    assert min(in_fresh_process(steps)) > 0
