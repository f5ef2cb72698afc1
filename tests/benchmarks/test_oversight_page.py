"""The page of `benchmarks oversight`, from results as an evaluation writes them."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import oversight


def test_the_page_of_an_evaluation_tells_kills_and_bias(tmp_path: Path) -> None:
    contests = [{"protocol": "qa", "position": 1.25}, {"protocol": "debate", "position": None}]
    (tmp_path / "results.json").write_text(json.dumps({"contests": contests}))
    (tmp_path / "summary.md").write_text("# Scalable oversight\n\nDefinitions: docs.\n\n## Accuracy\n\nrows\n")
    (tmp_path / "games.jsonl").write_bytes(b"{}\n" * 9)
    page = oversight.page(tmp_path, ["stories", f"--out={tmp_path}"], [2, 5], 60.0)
    assert "killed (SIGKILL) with 2 and 5 of 9 games" in page and "qa 1.25." in page and str(tmp_path) not in page
    assert page.rstrip().endswith("## Accuracy\n\nrows")
