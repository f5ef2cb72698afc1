"""Files are whole or not there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shared.atomic_write import append_line, beside
from shared.errors import DiskError


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


def test_a_folder_that_is_gone_is_told_as_such(tmp_path: Path) -> None:
    """Deleted or moved while a run writes into it: no disk is broken."""
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    append_line(run / "metrics.jsonl", b"{}")
    shutil.rmtree(tmp_path / "runs")
    for path in (run / "metrics.jsonl", run / "rollouts" / "step_1.jsonl"):
        with pytest.raises(DiskError, match=f"the folder {tmp_path / 'runs'} is gone") as failure:
            append_line(path, b"{}")
        assert "repair the disk" not in str(failure.value)
