"""Writes safetensors files of a checkpoint, hashed on the way: a hash is never of what is read back from the disk.

The library's own writer copies all tensors into one piece of memory first; here one tensor goes to the disk after the
other while a thread hashes the one before (both release Python's lock).
Format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.record_file import Written, sha256_of

REFERENCE = "reference"
"""name of the starting policy's folder in a run, and of a moved reference's folder in a checkpoint"""
TYPES = {torch.float32: "F32", torch.int64: "I64"}


def write(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    take: Callable[[str], Tensor] | None = None,
) -> Written:
    """Write the tensors (float32 or int64, on any device) and flush them; returns size and hash. Raises OSError, and
    KeyError for another type.

    take: returns the tensor of a name when its turn has come, of the same shape and type, which it may keep in memory
    until then; `tensors` is asked for these only.
    """
    digest = hashlib.sha256()
    size = 0
    hashed: Future[None] | None = None
    with ThreadPoolExecutor(1) as hasher, path.open("wb", buffering=0) as stream:
        for piece in _pieces(tensors, metadata or {}, take or tensors.__getitem__):
            if hashed is not None:
                hashed.result()  # one piece waits at most: on a GPU each is a copy
            hashed = hasher.submit(digest.update, piece)
            size += len(piece)
            while piece:
                piece = piece[stream.write(piece) :]
        os.fsync(stream.fileno())
    return Written(size, digest.hexdigest())


def _pieces(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], take: Callable[[str], Tensor]
) -> Iterator[memoryview]:
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
    for name, _ in ordered:
        tensor = take(name)
        if tensor.numel():
            array: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            yield memoryview(array)


def written(path: Path) -> Written:
    """Size and hash of a file that another writer has just written, read back from the disk. Raises OSError."""
    return Written(path.stat().st_size, sha256_of(path))
