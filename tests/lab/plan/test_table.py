"""The table "what it can train": the document has what the code computes, and cells are what a launch decides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lab.plan import table
from lab.plan.__main__ import main
from lab.plan.scenario import CARDS, MODELS
from shared.errors import ConfigError, DataError
from trainer.colocate import share


@pytest.fixture(scope="module")
def rendered() -> str:
    """The table, which takes some seconds to compute."""
    return table.render()


def test_the_document_has_what_the_code_computes(root: Path, rendered: str) -> None:
    text = (root / "docs" / "plan.md").read_text(encoding="utf-8")
    held = text.partition(table.BEGIN)[2].partition(table.END)[0].strip()
    assert held == rendered, "run: python -m lab.plan --table"
    assert "not run" in text


def test_the_table_is_written_between_its_markers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rendered: str
) -> None:
    path = tmp_path / "docs" / "plan.md"
    path.parent.mkdir()
    path.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table, "render", lambda: rendered)
    assert main(["--table"]) == 0
    assert path.read_text() == f"before\n{table.BEGIN}\n{rendered}\n{table.END}\nafter\n"
    path.write_text("no markers")
    with pytest.raises(DataError, match="has no lines"):
        table.write(path)
    assert main(["--table"]) != 0 and main(["8b", "--table"]) == 2


def test_a_cell_is_what_a_launch_decides() -> None:
    """8B on H100: four cards in turns, two are refused by the arithmetic of the launch in every width."""
    assert table.fewest(MODELS["8b"], CARDS["h100"], 4096) == "4, in turns"
    for config in table.shared_settings(MODELS["8b"], 2, 4096):
        with pytest.raises(ConfigError, match="not even in turns"):
            share(config, MODELS["8b"], 80e9, 256 << 30)


def test_more_memory_never_takes_more_cards() -> None:
    counts = [
        int(table.fewest(MODELS["8b"], replace(CARDS["h100"], memory_bytes=gb * 1e9), 4096).partition(",")[0])
        for gb in (60, 80, 141, 400)
    ]
    assert counts == sorted(counts, reverse=True) and counts[-1] == 1
