"""Files are whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.atomic_write import beside


def test_a_file_is_replaced_at_the_end_of_the_block(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("old")
    with beside(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("old")
    with pytest.raises(OSError, match="disk is full"), beside(path) as partial:
        partial.write_text("half")
        raise OSError("disk is full")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
