"""GGUF: blocks expanded by hand-computed values, and files that are no GGUF."""

import struct

import numpy as np
import pytest

from shared.errors import ModelError
from shared.gguf import GGUF


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def write_gguf(path, tensors, cut=0):
    """tensors: name -> (ggml type, shape innermost first, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 2)
    head += text("answer") + struct.pack("<II", 4, 42)
    head += text("words") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("é")
    body = b""
    for name, (kind, shape, data) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        head += struct.pack("<IQ", kind, len(body))
        body += data + b"\0" * (-len(data) % 32)
    content = head + b"\0" * (-len(head) % 32) + body
    path.write_bytes(content[: len(content) - cut])
    return path


def test_metadata_and_plain_tensors(tmp_path):
    data = np.arange(6, dtype="<f4").tobytes()
    gguf = GGUF(write_gguf(tmp_path / "x.gguf", {"a": (0, (3, 2), data)}))
    assert gguf.metadata == {"answer": 42, "words": ["a", "é"]} and gguf.names() == ["a"]
    assert gguf.tensor("a").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_quantised_blocks_by_hand(tmp_path):
    q8 = struct.pack("<e32b", 0.5, *range(-16, 16))
    # value 0 is the low nibble of byte 0, value 16 its high nibble
    q4 = struct.pack("<ee16B", 2.0, -1.0, *[0x30 + number for number in range(16)])
    gguf = GGUF(write_gguf(tmp_path / "x.gguf", {"q8": (8, (32,), q8), "q4": (3, (32,), q4)}))
    assert gguf.tensor("q8").tolist() == [number / 2 for number in range(-16, 16)]
    assert gguf.tensor("q4").tolist() == [2.0 * number - 1 for number in range(16)] + [5.0] * 16


def test_damaged_files_are_refused(tmp_path):
    (tmp_path / "no.gguf").write_bytes(b"PK\3\4" + bytes(40))
    with pytest.raises(ModelError, match="is not a GGUF file"):
        GGUF(tmp_path / "no.gguf")
    tensors = {"a": (0, (8, 8), bytes(256))}
    with pytest.raises(ModelError, match="truncated or damaged"):
        GGUF(write_gguf(tmp_path / "short.gguf", tensors, cut=300))
    with pytest.raises(ModelError, match="cut off inside tensor a"):
        GGUF(write_gguf(tmp_path / "cut.gguf", tensors, cut=10)).tensor("a")
    with pytest.raises(ModelError, match="ggml type 14"):
        GGUF(write_gguf(tmp_path / "k.gguf", {"a": (14, (256,), bytes(210))})).tensor("a")
