"""Compressed private tests of LiveCodeBench (base64, zlib, one pickled text), read without unpickling."""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import zlib
from typing import Any

from shared.errors import DataError


def decode_private_tests(text: str) -> list[dict[str, Any]]:
    """Return the tests of a compressed text. Raises DataError for what is none."""
    try:
        packed = zlib.decompress(base64.b64decode(text, validate=True))
        texts = [value for _, value, _ in pickletools.genops(packed) if isinstance(value, str)]
        cases = json.loads(texts[0])
    except (binascii.Error, zlib.error, ValueError, IndexError) as error:
        raise DataError(f"its private tests cannot be decoded ({error})") from error
    return list(cases)
