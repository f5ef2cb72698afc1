"""Reads GGUF files (llama.cpp's format): metadata and tensors, the quantised ones expanded to float32.

Types: F32, F16, Q8_0, Q4_1, those of the files we convert. Source: ggml-org/ggml, docs/gguf.md (version 3).
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.errors import ModelError

_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", 32)])
_Q4_1 = np.dtype([("scale", "<f2"), ("least", "<f2"), ("nibbles", "u1", 16)])
_BLOCKS: dict[int, tuple[np.dtype[Any], int]] = {
    0: (np.dtype("<f4"), 1),
    1: (np.dtype("<f2"), 1),
    3: (_Q4_1, 32),
    8: (_Q8_0, 32),
}
"""ggml type -> (layout of a block, weights in it)"""


class GGUF:
    """An opened file: `metadata` by key, `tensor(name)` on demand."""

    def __init__(self, path: Path):
        """Raises ModelError when the file is no GGUF of version 3 or is cut off."""
        self.path = path
        self._data: NDArray[np.uint8] = np.memmap(path, np.uint8, "r")
        self._at = 0
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, KeyError) as error:
            raise ModelError(f"{path} is truncated or damaged ({error}): install its package again") from error

    def _read_header(self) -> None:
        if bytes(self._data[:4]) != b"GGUF" or struct.unpack("<I", bytes(self._data[4:8]))[0] != 3:
            raise ModelError(f"{self.path} is not a GGUF file of version 3")
        self._at = 8
        tensors, keys = self._number("<Q"), self._number("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string()
            self.metadata[key] = self._value(self._number("<I"))
        self._places: dict[str, tuple[list[int], int, int]] = {}
        for _ in range(tensors):
            name = self._string()
            shape = [self._number("<Q") for _ in range(self._number("<I"))][::-1]
            self._places[name] = (shape, self._number("<I"), self._number("<Q"))
        alignment = int(self.metadata.get("general.alignment", 32))
        self._start = -(-self._at // alignment) * alignment

    def _number(self, form: str) -> Any:
        size = struct.calcsize(form)
        (number,) = struct.unpack(form, bytes(self._data[self._at : self._at + size]))
        self._at += size
        return number

    def _string(self) -> str:
        length = self._number("<Q")
        raw = bytes(self._data[self._at : self._at + length])
        self._at += length
        return raw.decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            element, count = self._number("<I"), self._number("<Q")
            return [self._value(element) for _ in range(count)]
        return self._number(_NUMBERS[kind])

    def names(self) -> list[str]:
        """Names of all tensors, in the file's order."""
        return list(self._places)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One tensor as float32, row-major, outermost dimension first. Raises ModelError for other quantisations."""
        shape, kind, offset = self._places[name]
        if kind not in _BLOCKS:
            raise ModelError(f"{self.path}: tensor {name} has ggml type {kind}, supported are F32, F16, Q8_0, Q4_1")
        layout, weights = _BLOCKS[kind]
        count = int(np.prod(shape)) // weights
        start = self._start + offset
        raw = self._data[start : start + count * layout.itemsize]
        if len(raw) < count * layout.itemsize:
            raise ModelError(f"{self.path} is cut off inside tensor {name}: install its package again")
        return _expand(raw.view(layout)).reshape(shape)


def _expand(blocks: NDArray[Any]) -> NDArray[np.float32]:
    """[blocks] of one ggml type -> [weights] float32: scale * q (+ least)."""
    expanded: NDArray[np.float32]
    if blocks.dtype == _Q8_0:
        expanded = blocks["scale"].astype(np.float32)[:, None] * blocks["values"]
    elif blocks.dtype == _Q4_1:
        quants = np.concatenate([blocks["nibbles"] & 15, blocks["nibbles"] >> 4], axis=1)
        expanded = blocks["scale"].astype(np.float32)[:, None] * quants + blocks["least"].astype(np.float32)[:, None]
    else:
        expanded = blocks.astype(np.float32)
    return expanded.astype(np.float32, copy=False).reshape(-1)
