"""Files are whole or not there."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from shared.atomic_write import append_line, beside
from shared.errors import DiskError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text("old\n")
    return path


def test_a_file_is_replaced_at_the_end_of_the_block(path: Path) -> None:
    with beside(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old\n"
    assert path.read_text() == "new" and list(path.parent.iterdir()) == [path]


def test_a_failure_leaves_the_old_file_and_nothing_else(path: Path) -> None:
    with pytest.raises(OSError, match="disk is full"), beside(path) as partial:
        partial.write_text("half")
        raise OSError("disk is full")
    assert path.read_text() == "old\n" and list(path.parent.iterdir()) == [path]


def test_a_line_is_appended_whole_or_not_at_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes four bytes, and no more."""
    append_line(path, b"new")
    assert path.read_bytes() == b"old\nnew\n"
    opened = Path.open

    class Full:
        def __init__(self, *arguments, **named):
            self.stream = opened(*arguments, **named)
            self.seek, self.truncate, self.full = self.stream.seek, self.stream.truncate, False

        def write(self, data):
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.full = True
            return self.stream.write(data[:4])

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.stream.close()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda file, mode, **named: (Full if mode == "ab" else opened)(file, mode, **named))
        with pytest.raises(DiskError, match="free disk space"):
            append_line(path, b"another")
    assert path.read_bytes() == b"old\nnew\n"


@pytest.mark.parametrize("content", [b"", b"old\n", b"old"])
def test_a_line_begins_a_line(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    append_line(path, b"new")
    assert path.read_bytes().splitlines() == [*content.splitlines(), b"new"]
