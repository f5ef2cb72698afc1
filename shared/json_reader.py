"""JSON of others, where one error covers all that can be wrong with it: that it is nested too deeply, too."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

Kind = TypeVar("Kind")
DEEP = "nested too deeply"


def parse_json(text: str | bytes) -> Any:
    """The value of a text. Raises json.JSONDecodeError for one that is no JSON or not UTF-8, and for one that Python
    does not read: nested too deeply, or with an integer of thousands of digits."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise json.JSONDecodeError(DEEP if isinstance(error, RecursionError) else str(error), "", 0) from error


def decode_json(data: str | bytes, kind: type[Kind]) -> Kind:
    """The record of a kind in a text. Raises msgspec.DecodeError for any other."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError as error:
        raise msgspec.DecodeError(DEEP) from error
