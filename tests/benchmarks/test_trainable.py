"""The table "what it can train": the document has what the code computes, and cells are what a launch decides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.trainable import fewest, shared_settings, trainable_section
from lab.plan.scenario import CARDS, MODELS
from shared.errors import ConfigError
from trainer.colocate import share


def test_the_document_has_what_the_code_computes(root: Path) -> None:
    text = (root / "docs" / "plan.md").read_text(encoding="utf-8")
    between = text.partition("<!-- what it can train -->\n")[2].partition("<!-- end of what it can train -->")[0]
    assert between == trainable_section(), "run: python -m benchmarks plan"


def test_a_cell_is_what_a_launch_decides() -> None:
    """8B on H100: four cards in turns, two are refused by the arithmetic of the launch in every width."""
    assert fewest(MODELS["8b"], CARDS["h100"], 4096) == "4, in turns"
    for config in shared_settings(MODELS["8b"], 2, 4096):
        with pytest.raises(ConfigError, match="not even in turns"):
            share(config, MODELS["8b"], 80e9, 256 << 30)


def test_more_memory_never_takes_more_cards() -> None:
    counts = [
        int(fewest(MODELS["8b"], replace(CARDS["h100"], memory_bytes=gb * 1e9), 4096).partition(",")[0])
        for gb in (60, 80, 141, 400)
    ]
    assert counts == sorted(counts, reverse=True) and counts[-1] == 1
