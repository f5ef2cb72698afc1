"""Decodes tests that LiveCodeBench publishes as base64 of zlib of a pickle of one text, which is JSON.

A pickle can run code when it is loaded, so none is: its instructions are only read, and must do nothing but give one
text. JSON compressed by zlib, without a pickle, is taken too.
"""

from __future__ import annotations

import base64
import pickletools
import re
import zlib
from typing import Any

from shared.errors import DataError
from shared.json_reader import parse_json

MAX_BYTES = 256 << 20
"""tests may take so much when they are unpacked"""
_COMPRESSED = re.compile(r"\s*e[AFJN][A-Za-z0-9+/\s]{10,}={0,2}\s*")
"""base64 of the first two bytes that zlib writes"""
_TEXTS = frozenset(("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"))
_OTHERS = frozenset(("PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"))


def is_compressed(text: str) -> bool:
    """Return whether a text looks like compressed tests."""
    return _COMPRESSED.fullmatch(text) is not None


def decode_private_tests(text: str) -> list[dict[str, Any]]:
    """Return the tests in a compressed text, each {"input", "output", "testtype"}.

    Raises DataError where it is damaged, holds more than one text, or is larger than MAX_BYTES.
    """
    try:
        tests = parse_json(_only_text(_unpacked(base64.b64decode("".join(text.split()), validate=True))))
    except (ValueError, zlib.error) as error:
        raise DataError(
            f"the compressed tests cannot be read ({str(error)[:200]}): give them as published, base64 of zlib of a "
            "pickled JSON text, or as a list of tests"
        ) from error
    if not isinstance(tests, list) or not all(isinstance(test, dict) for test in tests):
        raise DataError("the compressed tests are no list of tests: each must be an object with `input` and `output`")
    return tests


def _unpacked(data: bytes) -> bytes:
    """Return the data that zlib compressed, and stop at MAX_BYTES. Raises ValueError, zlib.error."""
    stream = zlib.decompressobj()
    unpacked = stream.decompress(data, MAX_BYTES)
    if stream.unconsumed_tail:
        raise ValueError(f"they unpack to more than {MAX_BYTES >> 20} MiB")
    if not stream.eof:
        raise ValueError("they end too early")
    return unpacked


def _only_text(data: bytes) -> str:
    """Return the one text that a pickle holds, or data that is no pickle as a text. Raises ValueError."""
    if data.lstrip()[:1] == b"[":
        return data.decode()
    texts: list[str] = []
    for instruction, argument, _ in pickletools.genops(data):
        if instruction.name in _TEXTS:
            texts.append(str(argument))
        elif instruction.name not in _OTHERS:
            raise ValueError(f"their pickle does more than hold a text: {instruction.name}")
    if len(texts) != 1:
        raise ValueError(f"their pickle holds {len(texts)} texts, not 1")
    return texts[0]
