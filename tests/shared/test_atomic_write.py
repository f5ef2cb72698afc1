"""Files are whole or not there."""

import errno
from pathlib import Path

import pytest

from shared.atomic_write import append_line, beside
from shared.errors import DiskError


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("old\n")
    return path


def test_a_file_is_replaced_at_the_end_of_the_block_and_a_failure_leaves_the_old_one(path):
    with pytest.raises(OSError, match="disk is full"), beside(path) as partial:
        partial.write_text("half")
        raise OSError("disk is full")
    assert path.read_text() == "old\n" and list(path.parent.iterdir()) == [path]
    with beside(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old\n"
    assert path.read_text() == "new" and list(path.parent.iterdir()) == [path]


class Full:
    """A file on a disk that takes four bytes, and no more."""

    def __init__(self, stream):
        self.stream, self.written = stream, 0

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stream.close()

    def write(self, data):
        if self.written:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.written = self.stream.write(data[:4])
        return self.written


def test_a_line_is_appended_whole_or_not_at_all(path, monkeypatch):
    opened = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *given, **named: Full(opened(*given, **named)))
        with pytest.raises(DiskError, match="free disk space"):
            append_line(path, b"another")
    assert path.read_bytes() == b"old\n"
    for content in (b"", b"old\n", b"old"):
        path.write_bytes(content)
        append_line(path, b"new")
        assert path.read_bytes().splitlines() == [*content.splitlines(), b"new"], "a line begins a line"
