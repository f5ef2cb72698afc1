"""Writes safetensors files of a checkpoint, hashed on the way: a hash is never of what is read back from the disk.

The library's own writer copies all tensors into one piece of memory first; here one tensor goes to the disk after the
other while a thread hashes the one before (both release Python's lock).
Format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

REFERENCE = "reference"
"""name of the starting policy's folder in a run, and of a moved reference's folder in a checkpoint"""
TYPES = {torch.float32: "F32", torch.int64: "I64"}


class Written(msgspec.Struct, frozen=True):
    """Size and hash of a checkpoint file, as its writer knows them."""

    bytes: int
    sha256: str


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Written:
    """Write the tensors (float32 or int64, on any device) and flush them; returns size and hash. Raises OSError, and
    KeyError for another type."""
    digest = hashlib.sha256()
    size = 0
    hashed: Future[None] | None = None
    with ThreadPoolExecutor(1) as hasher, path.open("wb", buffering=0) as stream:
        for piece in _pieces(tensors, metadata or {}):
            if hashed is not None:
                hashed.result()  # one piece waits at most: on a GPU each is a copy
            hashed = hasher.submit(digest.update, piece)
            size += len(piece)
            while piece:
                piece = piece[stream.write(piece) :]
        os.fsync(stream.fileno())
    return Written(size, digest.hexdigest())


def _pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # wide ones first: aligned
    start = 0
    for name, tensor in ordered:
        end = start + tensor.nbytes
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        if tensor.numel():
            array: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            yield memoryview(array)


def written(path: Path) -> Written:
    """Size and hash of a file that another writer has just written, read back from the disk. Raises OSError."""
    with path.open("rb") as stream:
        return Written(path.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())
