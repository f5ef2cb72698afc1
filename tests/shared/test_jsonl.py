"""What is drawn of a file of rows; how lines are checked is tested where files are used."""

from __future__ import annotations

from shared.jsonl import spread


def test_items_are_spread_over_a_mixed_file() -> None:
    assert spread(range(100), 8) == [0, 12, 25, 37, 50, 62, 75, 87]
    assert spread([1, 2, 3], 200) == [1, 2, 3]
