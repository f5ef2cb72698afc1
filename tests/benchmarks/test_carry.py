"""GPU code of other architectures is zeroed where it lies in a library; the code of the one that is kept stays."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu_check.carry import CONTAINER, ENTRY, MACHINE_CODE, MAGIC, PTX, VERSION, keep_one

HEADER = 64
KEPT = b"sm_90 code" * 10


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    return ENTRY.pack(kind, 1, HEADER, len(code), architecture).ljust(HEADER, b"h") + code


def container(*pieces: bytes) -> bytes:
    whole = b"".join(pieces)
    return CONTAINER.pack(MAGIC, VERSION, CONTAINER.size, len(whole)) + whole


def test_only_the_code_of_one_architecture_stays(tmp_path: Path) -> None:
    one = container(entry(MACHINE_CODE, 80, b"old" * 40), entry(MACHINE_CODE, 90, KEPT), entry(PTX, 90, b"text" * 9))
    other = container(entry(MACHINE_CODE, 100, b"new" * 50))
    stray = CONTAINER.pack(MAGIC, VERSION, CONTAINER.size, 1 << 40)  # the magic number, but no container
    library = tmp_path / "lib.so"
    library.write_bytes(b"ELF" + one + b"between" + stray + b"after" * 30 + other + b"end")
    before = library.read_bytes()
    assert keep_one(library, 90) == 120 + 36 + 150
    after = library.read_bytes()
    assert len(after) == len(before) and KEPT in after and after.endswith(b"end") and b"after" * 30 in after
    assert after.count(b"old") == after.count(b"text") == after.count(b"new") == 0
    assert keep_one(library, 90) == 120 + 36 + 150 and library.read_bytes() == after
