"""Hashes of files. Files of records: structs in msgpack, each with its length before it, hashed as they are written.

Every record is encoded by itself. That holds Python's lock, so that a thread which writes a gigabyte keeps the others
waiting for no longer than one record takes.
"""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from shared.atomic_write import cannot_write
from shared.errors import CheckpointError, DataError

LENGTH_BYTES = 8


class Written(msgspec.Struct, frozen=True):
    """Size and hash of a checkpoint file, as its writer knows them."""

    bytes: int
    sha256: str


def sha256_of(path: Path) -> str:
    """Hash of a file, read from the disk. Raises OSError."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def content_of(path: Path, setting: str) -> str:
    """Number of lines and hash of a text file, the same whether or not it is compressed. Raises DataError."""
    digest, lines = hashlib.sha256(), 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            while piece := stream.read(1 << 20):
                digest.update(piece)
                lines += piece.count(b"\n")
    except (OSError, EOFError) as error:
        raise DataError(f"{setting}: {path} cannot be read: {error}") from error
    return f"{lines} lines, sha256 {digest.hexdigest()[:16]}"


def write(path: Path, records: Iterable[msgspec.Struct]) -> Written:
    """Write the records and flush them to the disk; returns size and hash. Raises CheckpointError."""
    encode, digest, size = msgspec.msgpack.Encoder().encode, hashlib.sha256(), 0
    try:
        with path.open("wb") as stream:
            for record in records:
                content = encode(record)
                for chunk in (len(content).to_bytes(LENGTH_BYTES, "little"), content):
                    digest.update(chunk)
                    stream.write(chunk)
                size += LENGTH_BYTES + len(content)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise CheckpointError(cannot_write(path, error)) from error
    return Written(size, digest.hexdigest())


def read(path: Path) -> Iterator[bytes]:
    """Yield the encoded records of a file. Raises ValueError for a file that ends within one, and OSError."""
    with path.open("rb") as stream:
        while head := stream.read(LENGTH_BYTES):
            length = int.from_bytes(head, "little")
            if len(head) < LENGTH_BYTES or len(content := stream.read(length)) < length:
                raise ValueError("it ends within a record")
            yield content
